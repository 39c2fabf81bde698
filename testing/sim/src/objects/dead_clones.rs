//! Creations of clones that die or are slow, and a sweeper who removes the references of dead ones: a
//! clone that comes to be has its reference for good, and that of one that died goes. Its place may be one where another
//! volume was given up.

use std::rc::Rc;

use hdcs_core::base::limits::OBJECT_PAGE_BLOCKS_MAX;
use hdcs_core::objects::Access;
use hdcs_core::objects::format::{Manifest, Reference};
use hdcs_core::objects::io::{Kind, Name, SnapshotName};
use hdcs_core::objects::references::{Fate, fate, tombstone};

use super::plant::Plant;
use super::reader;
use super::world::{ObjectsWorld, PLACE, UUID};
use crate::content::Content;
use crate::engine::Simulated;
use crate::violation::Violation;

/// Where the clone is to be, and which it is.
pub(super) const DEAD_PLACE: &str = "bucket/dead/";
pub(super) const DEAD_UUID: [u8; 16] = [5; 16];
/// The number of its reference.
pub(super) const DEAD_NUMBER: u64 = 0x0505_0505_0505_0505;

impl ObjectsWorld {
    /// Begin a clone of a snapshot, with faults; let it die or be slow; sweep.
    pub(super) fn dead_clone(
        &mut self,
        snapshot: SnapshotName,
        contents: &[Content],
    ) -> Result<(), Violation> {
        if self.choices.bool() {
            self.give_up_dead_place();
        }
        let uuid = DEAD_UUID;
        let clone = self.start(Access::Clone { uuid, snapshot }, None, DEAD_PLACE);
        self.calm = false;
        self.poll(clone)?;
        // Usually until the reference is there, and the clone is not.
        for _ in 0..self.choices.u32(0..100) {
            let is_between = self.dead_reference().is_some() && self.choices.bool();
            if is_between || self.go_on()?.is_none() {
                break;
            }
        }
        if self.choices.bool() {
            self.kill(clone);
        }
        self.sweep()?;
        self.calm = true;
        self.finish_opening(clone)?;
        self.kill(clone);
        self.drain()?;
        self.sweep()?;
        let there = reader::newest(&self.store, DEAD_PLACE).ok().flatten();
        let is_alive = there.is_some_and(|manifest| !manifest.gone);
        if is_alive && self.bucket(DEAD_PLACE)? != contents {
            return Err(Violation::new("clone", "it differs from its snapshot"));
        }
        if is_alive != self.dead_reference().is_some() {
            let message =
                format!("a clone is there: {is_alive}, and its reference is not as it should be");
            return Err(Violation::new("dead-clone", message));
        }
        self.coverage.dead_clones += u64::from(!is_alive);
        self.coverage.slow_clones += u64::from(is_alive);
        Ok(())
    }

    /// Leave what a volume leaves that was given up and removed.
    fn give_up_dead_place(&mut self) {
        let gone = Manifest {
            volume: [6; 16],
            gone: true,
            sequence: 3,
            epoch: 1,
            beginnings: vec![1],
            number_first: 1,
            number_limit: 1 << 20,
            bytes: 4096,
            page_blocks: OBJECT_PAGE_BLOCKS_MAX,
            ..Manifest::default()
        };
        let mut bytes = vec![0; gone.encoded_bytes()];
        gone.write(&mut bytes);
        let name = Name::own(Kind::Manifest, gone.sequence);
        self.store
            .put(&format!("{DEAD_PLACE}{name}"), Rc::new(bytes));
    }

    fn dead_reference(&self) -> Option<Reference> {
        let references = reader::clones(&self.store, PLACE, &UUID);
        references.into_iter().find(|it| it.clone == DEAD_UUID)
    }

    /// What a node does about references, one request after another, while everything else goes on.
    fn sweep(&mut self) -> Result<(), Violation> {
        loop {
            let Some(reference) = self.dead_reference() else {
                return Ok(());
            };
            self.meanwhile()?;
            let there = reader::newest(&self.store, DEAD_PLACE).ok().flatten();
            self.meanwhile()?;
            match fate(&reference, there.as_ref()) {
                Fate::Keep => return Ok(()),
                Fate::Remove => {}
                Fate::Bury if self.plant == Some(Plant::NoTombstone) => {}
                Fate::Bury => {
                    let grave = tombstone(&reference, UUID, PLACE.into(), there.as_ref());
                    let name = Name::own(Kind::Manifest, grave.sequence);
                    let name = format!("{DEAD_PLACE}{name}");
                    if self.store.get(&name).is_some() {
                        continue;
                    }
                    let mut bytes = vec![0; grave.encoded_bytes()];
                    grave.write(&mut bytes);
                    self.store.put(&name, Rc::new(bytes));
                    self.needed = None;
                    self.engine.note("buried", [0; 4]);
                    self.meanwhile()?;
                }
            }
            let name = format!("{PLACE}{}", Name::own(Kind::Clone, DEAD_NUMBER));
            self.engine.note("swept", [0; 4]);
            self.check_delete(&name)?;
            self.store.delete(&name);
            self.needed = None;
            return Ok(());
        }
    }

    fn meanwhile(&mut self) -> Result<(), Violation> {
        for _ in 0..self.choices.u32(0..4) {
            self.go_on()?;
        }
        Ok(())
    }

    /// The first manifest of a clone comes to be: its parent knows of it.
    pub(super) fn check_reference(
        &self,
        place: &str,
        manifest: &Manifest,
    ) -> Result<(), Violation> {
        if place == DEAD_PLACE && !manifest.gone && self.dead_reference().is_none() {
            let message = "a clone comes to be that its parent does not know of";
            return Err(Violation::new("dead-clone", message));
        }
        Ok(())
    }
}
