//! What the sectors of a backend hold, as far as what was asked of it tells.
//!
//! For each sector it knows the hash of what a read brings, or that it cannot know: two changes overlapped, one failed, or
//! nothing was ever seen there. What a read then brings is what later reads must bring. Beside it stands what the last
//! flush has kept, which is what the next opening finds.
//!
//! It takes about 100 bytes for each sector that was asked about: it is for tests.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hasher as _};

use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, ExtentState};
use hdcs_core::base::limits::SECTOR_BYTES;

use super::super::Ask;

/// See the module.
#[derive(Debug)]
pub struct Content {
    sectors: HashMap<u64, Sector>,
    /// Sectors that were changed since a flush was last submitted.
    unflushed: HashSet<u64>,
    /// Sectors of the backend.
    end: u64,
    /// Changes of sectors that were begun.
    changes: u64,
}

type Hash = u64;

#[derive(Debug, Default)]
struct Sector {
    /// What a read brings, if that is known.
    now: Option<Hash>,
    /// What the last flush has kept, if that is known.
    kept: Option<Hash>,
    /// The version that it has kept.
    kept_version: u64,
    /// The number of the last change that was begun.
    version: u64,
    /// Changes under way.
    changing: u32,
    /// Whether changes overlapped, so that nobody knows which came last.
    is_mixed: bool,
    /// Whether a change has failed since the last one that completed: it may still take effect.
    is_torn: bool,
}

/// What an operation under way says about contents.
#[derive(Debug)]
pub enum Claim {
    /// A read or a question about extents: sectors that do not change, with their versions.
    Look(u64, Vec<(u64, u64)>),
    /// A write or zero: what each sector will hold.
    Change(Vec<(u64, Hash)>),
    /// A flush: the versions and contents that it keeps.
    Flush(Vec<(u64, u64, Option<Hash>)>),
    /// A change of the size to so many sectors.
    Resize(u64),
}

fn hash(sector: &[u8]) -> Hash {
    let mut hasher = DefaultHasher::new();
    hasher.write(sector);
    hasher.finish()
}

fn sectors(bytes: u64) -> u64 {
    bytes / SECTOR_BYTES as u64
}

impl Content {
    /// Of a backend of so many bytes, about which nothing is known.
    pub fn new(bytes: u64) -> Self {
        Self {
            sectors: HashMap::new(),
            unflushed: HashSet::new(),
            end: sectors(bytes),
            changes: 0,
        }
    }

    /// The backend will be asked for this.
    pub fn begins(&mut self, ask: &Ask) -> Option<Claim> {
        match ask {
            Ask::Read { offset, buf } => Some(self.look(sectors(*offset), buf.len() as u64)),
            Ask::Extents { range } => Some(self.look(range.start, range.bytes() as u64)),
            Ask::Write { offset, data } => {
                let bytes: Vec<u8> = data.iter().flat_map(|buf| buf.iter().copied()).collect();
                let hashes = bytes.chunks(SECTOR_BYTES).map(hash);
                Some(self.change((sectors(*offset)..).zip(hashes).collect()))
            }
            Ask::Zero { offset, bytes, .. } => {
                let range = sectors(*offset)..sectors(*offset + *bytes);
                let zero = hash(&[0; SECTOR_BYTES]);
                Some(self.change(range.map(|sector| (sector, zero)).collect()))
            }
            Ask::Flush => {
                let unflushed = std::mem::take(&mut self.unflushed).into_iter();
                let kept = unflushed.filter_map(|at| {
                    let sector = self.sectors.get(&at)?;
                    Some((at, sector.version, sector.now))
                });
                Some(Claim::Flush(kept.collect()))
            }
            Ask::Resize { bytes } => {
                let end = sectors(*bytes);
                let cut = end.min(self.end);
                self.changes += 1;
                for (at, sector) in &mut self.sectors {
                    if *at >= cut {
                        sector.now = None;
                        sector.version = self.changes;
                        sector.is_mixed |= sector.changing > 0;
                    }
                    // It may keep what no flush has kept yet.
                    if self.unflushed.contains(at) {
                        sector.kept = None;
                    }
                }
                Some(Claim::Resize(end))
            }
            Ask::Snapshot(_) => None,
        }
    }

    fn look(&mut self, from: u64, bytes: u64) -> Claim {
        let mut still = Vec::new();
        for at in from..from + sectors(bytes) {
            let sector = self.sectors.entry(at).or_default();
            if sector.changing == 0 {
                still.push((at, sector.version));
            }
        }
        Claim::Look(from, still)
    }

    fn change(&mut self, hashes: Vec<(u64, Hash)>) -> Claim {
        self.changes += 1;
        for (at, _) in &hashes {
            let sector = self.sectors.entry(*at).or_default();
            sector.is_mixed |= sector.changing > 0;
            sector.changing += 1;
            sector.version = self.changes;
            sector.now = None;
        }
        Claim::Change(hashes)
    }

    /// The backend has ended what said so.
    pub fn ends(&mut self, claim: Claim, result: &Result<Done, IoError>) {
        match (claim, result) {
            (Claim::Look(from, still), Ok(Done::Read(buf))) => {
                let bytes = |at: u64| &buf[(at - from) as usize * SECTOR_BYTES..][..SECTOR_BYTES];
                let seen = still
                    .into_iter()
                    .map(|(at, version)| (at, version, hash(bytes(at))));
                seen.for_each(|seen| self.saw(seen, "rule 2: a read brings something else"));
            }
            (Claim::Look(_, still), Ok(Done::Extents(extents))) => {
                let zero = hash(&[0; SECTOR_BYTES]);
                let is_zero = |at: u64| {
                    extents.iter().any(|extent| {
                        let range = extent.range.start..extent.range.end();
                        range.contains(&at) && extent.state != ExtentState::Data
                    })
                };
                for (at, version) in still.into_iter().filter(|&(at, _)| is_zero(at)) {
                    self.saw((at, version, zero), "rule 4: a hole or zeroes over data");
                }
            }
            (Claim::Look(..), _) => {}
            (Claim::Change(hashes), result) => {
                for (at, hash) in hashes {
                    self.changed(at, result.is_ok().then_some(hash));
                }
            }
            (Claim::Flush(kept), Ok(_)) => {
                for (at, version, hash) in kept {
                    if let Some(sector) = self.sectors.get_mut(&at)
                        && sector.kept_version <= version
                    {
                        sector.kept_version = version;
                        sector.kept = hash;
                    }
                }
            }
            (Claim::Flush(kept), Err(_)) => self.not_flushed(kept),
            (Claim::Resize(end), Ok(_)) => self.resized(end),
            // Nobody knows what it has done.
            (Claim::Resize(end), Err(_)) => self.end = self.end.min(end),
        }
    }

    /// A sector that did not change meanwhile holds this.
    fn saw(&mut self, (at, version, hash): (u64, u64, Hash), breach: &str) {
        let Some(sector) = self.sectors.get_mut(&at) else {
            return;
        };
        if sector.version != version || sector.is_torn {
            return;
        }
        if let Some(now) = sector.now {
            assert!(now == hash, "{breach} in sector {at} than was written last");
            return;
        }
        sector.now = Some(hash);
        if !self.unflushed.contains(&at) {
            sector.kept = Some(hash);
        }
    }

    /// A change of a sector has ended; what it holds if that was no failure.
    fn changed(&mut self, at: u64, hash: Option<Hash>) {
        let Some(sector) = self.sectors.get_mut(&at) else {
            return;
        };
        sector.changing -= 1;
        sector.is_torn = hash.is_none();
        sector.is_mixed |= hash.is_none();
        if sector.changing == 0 {
            sector.now = hash.filter(|_| !sector.is_mixed);
            sector.is_mixed = false;
        }
        self.unflushed.insert(at);
    }

    /// A flush has failed, or is not known to have ended: it may have kept what it was to keep, or not.
    fn not_flushed(&mut self, kept: Vec<(u64, u64, Option<Hash>)>) {
        for (at, ..) in kept {
            if let Some(sector) = self.sectors.get_mut(&at) {
                sector.kept = None;
                self.unflushed.insert(at);
            }
        }
    }

    fn resized(&mut self, end: u64) {
        let (cut, zero) = (end.min(self.end), hash(&[0; SECTOR_BYTES]));
        self.sectors
            .retain(|&at, sector| at < cut || sector.changing > 0);
        self.changes += 1;
        for at in self.end..end {
            let sector = self.sectors.entry(at).or_default();
            sector.version = self.changes;
            sector.now = (sector.changing == 0).then_some(zero);
            self.unflushed.insert(at);
        }
        self.end = end;
    }

    /// What the next opening finds, after these were under way when the backend was dropped.
    #[must_use]
    pub fn reopened(mut self, under_way: impl Iterator<Item = Claim>, is_atomic: bool) -> Self {
        for claim in under_way {
            match claim {
                Claim::Flush(kept) => self.not_flushed(kept),
                // All of it may be there, or nothing.
                Claim::Resize(_) => self.sectors.clear(),
                Claim::Look(..) | Claim::Change(_) => {}
            }
        }
        let found = |(at, sector): (u64, Sector)| {
            let is_changed = sector.changing > 0 || self.unflushed.contains(&at);
            let now = match (is_changed, is_atomic) {
                (true, true) => sector.kept,
                (true, false) => None,
                (false, _) => sector.now,
            };
            let found = Sector {
                now,
                kept: now,
                ..Sector::default()
            };
            (at, found)
        };
        Self {
            sectors: self.sectors.into_iter().map(found).collect(),
            unflushed: HashSet::new(),
            end: self.end,
            changes: 0,
        }
    }
}
