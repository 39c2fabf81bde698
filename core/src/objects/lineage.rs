//! What a clone still has of its parent, as its map tells.
//!
//! A block lies at a place of an ancestor as long as the clone has not written, zeroed or cut it off:
//! places of ancestors come into the map when it begins as a copy of theirs, and never later. What was
//! a hole then has no place to tell it by. But a page of the map that no object of the clone has changed
//! or stored is the ancestors' as a whole, holes included.

use alloc::vec::Vec;

use super::io::Name;
use super::map::PAGE_BLOCKS;
use super::{Access, ObjectVolume};
use crate::limits::BLOCK_BYTES;

/// What a clone began as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// UUID of the volume.
    pub volume: [u8; 16],
    /// Its place.
    pub location: alloc::string::String,
    /// What the clone has left there, which says with which snapshot it began.
    pub reference: Name,
}

impl ObjectVolume {
    /// What it is a clone of, if it is one; known once it is open.
    pub fn parent(&self) -> Option<Parent> {
        let parent = self.manifest.ancestors.last()?;
        let reference = self.reference_name()?;
        let snapshot = matches!(self.config.access, Access::Snapshot(_));
        (!snapshot).then(|| Parent {
            volume: parent.volume,
            location: parent.location.clone(),
            reference,
        })
    }

    /// Runs of whole blocks, first and count, that are as when the clone began. Right only before it is
    /// asked for anything.
    pub fn inherited(&self, mut each: impl FnMut(u64, u64)) {
        let (own_first, blocks) = (self.own_first(), self.bytes / BLOCK_BYTES as u64);
        for (number, page) in self.map.pages(0) {
            let first = number * u64::from(PAGE_BLOCKS);
            if first >= blocks {
                break;
            }
            let mut run = |from: u64, count: u64| {
                let count = count.min(blocks.saturating_sub(from));
                if count > 0 {
                    each(from, count);
                }
            };
            if !page.is_changed && page.stored_in < own_first {
                run(first, u64::from(PAGE_BLOCKS));
                continue;
            }
            let kept = page.runs().iter();
            for kept in kept.filter(|run| run.place().number() < own_first) {
                run(first + u64::from(kept.first), u64::from(kept.count));
            }
        }
    }

    /// The same as a list; for tests.
    pub fn inherited_runs(&self) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        self.inherited(|first, count| runs.push((first, count)));
        runs
    }
}
