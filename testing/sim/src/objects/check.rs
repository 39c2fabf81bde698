//! The rules: what requests may end with, what may be created and removed, and what may be left.

use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, ExtentState, Token};
use hdcs_core::objects::ObjectVolume;
use hdcs_core::objects::format::{Manifest, SLOT_BYTES};
use hdcs_core::objects::io::{Kind, Name, Phase, SnapshotError};

use super::dead_clones::{DEAD_NUMBER, DEAD_PLACE};
use super::reader;
use super::world::{CLONE_PLACE, ObjectsWorld, Op, PLACE, REFUSAL_TELLS, UUID, VOLUME};
use crate::violation::Violation;

impl ObjectsWorld {
    /// A manifest is about to be created: by whoever may.
    pub(super) fn check_manifest(
        &self,
        owner: usize,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let wrong = |message: String| Err(Violation::new("fenced-commit", message));
        let place = self.owners[owner].place;
        let Ok(manifest) = Manifest::parse(bytes) else {
            return wrong(format!("{name} is no manifest"));
        };
        self.check_reference(place, &manifest)?;
        let Ok(Some(newest)) = reader::newest(&self.store, place) else {
            return Ok(());
        };
        if manifest.sequence <= newest.sequence && self.store.get(name).is_some() {
            return wrong(format!("{name} is replaced"));
        }
        if manifest.sequence > newest.sequence && manifest.nonce != newest.nonce && !manifest.begins
        {
            return wrong(format!("{name} follows one of another owner"));
        }
        Ok(())
    }

    /// A manifest was created: everything that it names is there, and it is a state of a flush.
    pub(super) fn check_state(&mut self, owner: usize) -> Result<(), Violation> {
        self.coverage.commits += 1;
        let entry = &self.owners[owner];
        let contents = self.bucket(entry.place)?;
        let newest = reader::newest(&self.store, entry.place).ok().flatten();
        // One that comes late for the second time is not the newest.
        if newest.is_some_and(|newest| newest.nonce == entry.nonce)
            && let Some(model) = &entry.model
        {
            model.boundary_of(&contents)?;
        }
        Ok(())
    }

    /// Whether the newest manifest is this owner's.
    fn owns(&self, owner: usize) -> bool {
        let entry = &self.owners[owner];
        let newest = reader::newest(&self.store, entry.place).ok().flatten();
        newest.is_some_and(|newest| newest.nonce == entry.nonce)
    }

    /// An object is about to be removed: nobody needs it.
    pub(super) fn check_delete(&mut self, name: &str) -> Result<(), Violation> {
        if self.needed.is_none() {
            let broken = |error: String| Violation::new("manifest-dangling", error);
            let mut needed = reader::needed(&self.store, PLACE).map_err(broken)?;
            needed.extend(reader::needed(&self.store, CLONE_PLACE).map_err(broken)?);
            needed.extend(reader::needed(&self.store, DEAD_PLACE).map_err(broken)?);
            self.needed = Some(needed);
        }
        if self
            .needed
            .as_ref()
            .is_some_and(|needed| needed.contains(name))
        {
            return Err(Violation::new("delete-needed", name.to_string()));
        }
        if name.starts_with(PLACE) && name.contains("/clone/") {
            let is_dead = name.ends_with(&Name::own(Kind::Clone, DEAD_NUMBER).to_string());
            let clone = if is_dead { DEAD_PLACE } else { CLONE_PLACE };
            let clone = reader::newest(&self.store, clone).ok().flatten();
            if clone.is_some_and(|manifest| !manifest.gone) {
                return Err(Violation::new("delete-needed", name.to_string()));
            }
        }
        if name.contains("manifest/")
            && let Some(bytes) = self.store.get(name)
            && let Ok(manifest) = Manifest::parse(bytes)
        {
            let newest = reader::newest(&self.store, PLACE).ok().flatten();
            let newest_of_clone = reader::newest(&self.store, CLONE_PLACE).ok().flatten();
            let is_newest = |newest: Option<Manifest>| newest.is_some_and(|n| n == manifest);
            let named = |newest: &Option<Manifest>| {
                let newest = newest.as_ref();
                newest.is_some_and(|newest| newest.beginnings.contains(&manifest.sequence))
            };
            // One that came late, when its number was free again, begins nothing.
            if manifest.begins && (named(&newest) || named(&newest_of_clone)) {
                return Err(Violation::new("beginning-deleted", name.to_string()));
            }
            if is_newest(newest) || is_newest(newest_of_clone) {
                return Err(Violation::new("delete-needed", name.to_string()));
            }
        }
        Ok(())
    }

    /// What an owner that is still the owner looks for is there.
    pub(super) fn check_lost(&self, owner: usize, name: &str) -> Result<(), Violation> {
        let entry = &self.owners[owner];
        let newest = reader::newest(&self.store, entry.place).ok().flatten();
        if newest.is_some_and(|newest| newest.nonce == entry.nonce) && name.contains("/data/") {
            return Err(Violation::new("read-lost", format!("{name} is gone")));
        }
        Ok(())
    }

    /// Every snapshot that there is holds what it held.
    pub(super) fn check_snapshots(&mut self) -> Result<(), Violation> {
        let broken = |error: String| Violation::new("snapshot", error);
        let Some(manifest) = reader::newest(&self.store, PLACE).map_err(broken)? else {
            return Ok(());
        };
        for snapshot in &manifest.snapshots {
            let copy = reader::kept(&self.store, PLACE, snapshot).map_err(broken)?;
            let state = reader::read(&self.store, PLACE, copy).map_err(broken)?;
            let contents = reader::contents(&self.store, PLACE, &state, VOLUME).map_err(broken)?;
            if let Some(model) = self.snapshots.get(&snapshot.name)
                && let Err(error) = model.boundary_of(&contents)
            {
                let message = format!("{:?} is no state of a flush: {error}", snapshot.name);
                return Err(broken(message));
            }
            self.coverage.snapshots += 1;
        }
        Ok(())
    }

    /// What nobody needs is gone, but for a bounded rest.
    pub(super) fn check_garbage(&self, owner: usize) -> Result<(), Violation> {
        let Some(machine) = self.machine(owner) else {
            return Ok(());
        };
        if machine.memory_bytes() > 0 {
            let message = format!("{} bytes at rest: {machine:?}", machine.memory_bytes());
            return Err(Violation::new("memory", message));
        }
        let clones = reader::clones(&self.store, PLACE, &UUID);
        if !machine.snapshots().is_empty() || !clones.is_empty() {
            return Ok(());
        }
        let total = |kind: Kind| {
            let prefix = format!("{PLACE}{}", kind.prefix());
            let objects = self.store.below(&prefix);
            objects.fold((0, 0), |(count, bytes), (_, object)| {
                (count + 1, bytes + object.len() as u64)
            })
        };
        let batch = (self.scenario.batch_blocks * SLOT_BYTES) as u64;
        let live = machine.stats().live_blocks * SLOT_BYTES as u64;
        let (_, data) = total(Kind::Data);
        if data > live * 2 + batch * 12 {
            let message = format!("{data} bytes of data for {live} that live");
            return Err(Violation::new("garbage", message));
        }
        let (maps, _) = total(Kind::Map);
        let (snapshots, _) = total(Kind::Snapshot);
        if maps > 12 || snapshots > 0 {
            let message = format!("{maps} map objects, {snapshots} snapshots");
            return Err(Violation::new("garbage", message));
        }
        let (manifests, _) = total(Kind::Manifest);
        if manifests > machine.stats().epoch + 2 {
            let epoch = machine.stats().epoch;
            let message = format!("{manifests} manifests after {epoch} openings");
            return Err(Violation::new("garbage", message));
        }
        Ok(())
    }
    pub(super) fn ended(&mut self, owner: usize, completion: Completion) -> Result<(), Violation> {
        let owns = self.owns(owner);
        let entry = &mut self.owners[owner];
        let Some((since, op)) = entry.ops.remove(&completion.token.0) else {
            return Err(Violation::new("reply-unexpected", "a request ended twice"));
        };
        self.coverage.requests += 1;
        let good = u64::from(completion.result.is_ok());
        let numbers = [owner as u64, completion.token.0, good, 0];
        self.engine.note("ended", numbers);
        // What an owner of before needs may be gone. A full bucket is a reason for what has to put.
        let excused = match (&op, completion.result.as_ref()) {
            (Op::Read(..) | Op::Extents(_), Err(IoError::NoSpace)) => false,
            (_, Err(IoError::NoSpace)) => since <= self.last_refusal.plus(REFUSAL_TELLS),
            _ => since <= self.last_fault || !owns,
        };
        let Some(model) = &mut entry.model else {
            return Ok(());
        };
        if let Err(error) = completion.result
            && !excused
            && error != IoError::Fenced
        {
            let message = format!("{op:?} failed: {error}");
            return Err(Violation::new("error-without-cause", message));
        }
        match (op, completion.result) {
            (Op::Read(range, before), Ok(Done::Read(buf))) => {
                model.read_done(VOLUME, range, &before, &buf)?;
            }
            (Op::Write(range, content), Ok(_)) => model.write_done(range, content),
            (Op::Flush(boundary), Ok(_)) => model.flush_done(boundary)?,
            (Op::Extents(range), Ok(Done::Extents(extents))) => {
                let mut at = range.start;
                for extent in &extents {
                    let misplaced = extent.range.start != at || extent.range.end() > range.end();
                    if misplaced || extent.range.is_empty() {
                        return Err(Violation::new("extents", "runs are not consecutive"));
                    }
                    at = extent.range.end();
                    let mut sectors = extent.range.start..extent.range.end();
                    if extent.state == ExtentState::Hole
                        && !sectors.all(|sector| model.may_be_zero(sector))
                    {
                        return Err(Violation::new("extents", "a hole has data"));
                    }
                }
            }
            (Op::Resize(sectors), Ok(_)) => {
                // It is a flush as well.
                let boundary = model.flush_sent();
                model.flush_done(boundary)?;
                if model.sectors() != sectors {
                    return Err(Violation::new("size", "not the one that was asked for"));
                }
            }
            (Op::Resize(_), Err(_)) => {
                // Which size it has is not known: nobody would go on.
                self.engine.note("resize failed", [owner as u64, 0, 0, 0]);
                self.owners[owner].ops.clear();
                if !owns {
                    // The next owner has found what there is, so nothing more of this one is compared.
                    self.owners[owner].model = None;
                }
                self.crash_at = Some(self.engine.turns());
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn snapshot_ended(
        &mut self,
        owner: usize,
        token: Token,
        result: Result<(), SnapshotError>,
    ) -> Result<(), Violation> {
        let Some((_, op)) = self.owners[owner].ops.remove(&token.0) else {
            return Err(Violation::new("reply-unexpected", "a request ended twice"));
        };
        match (op, result) {
            (Op::Snapshot(name), Err(_)) => {
                self.snapshots.remove(&name);
            }
            (Op::GiveUp, Ok(())) if self.owners[owner].place == CLONE_PLACE => {
                let newest = reader::newest(&self.store, CLONE_PLACE).ok().flatten();
                if !newest.is_some_and(|manifest| manifest.gone) {
                    return Err(Violation::new("given-up", "its manifest does not say so"));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// An owner is fenced only by another one.
    pub(super) fn check_fenced(&self, owner: usize) -> Result<(), Violation> {
        let entry = &self.owners[owner];
        if !matches!(
            self.machine(owner).map(ObjectVolume::phase),
            Some(Phase::Fenced)
        ) {
            return Ok(());
        }
        let newest = reader::newest(&self.store, entry.place).ok().flatten();
        if newest.is_some_and(|newest| newest.nonce == entry.nonce) {
            let message = "the newest manifest is its own";
            return Err(Violation::new("fenced-without-cause", message));
        }
        Ok(())
    }
}
