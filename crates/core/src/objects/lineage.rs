//! What a clone still has of its parent, as its map tells.
//!
//! A block lies at a place of an ancestor as long as the clone has not written, zeroed or cut it off:
//! places of ancestors come into the map when it begins as a copy of theirs, and never later. What was
//! a hole then has no place to tell it by. But a page of the map that no object of the clone has changed
//! is the ancestors' as a whole, holes included; whether the clone has stored it once more is no matter.
//!
//! Pages are not read for that: of one that the clone has changed and stored, nothing is told but what is in
//! the cache.

use alloc::vec::Vec;

use super::format::Manifest;
use super::io::{Kind, Name};
use super::map::Place;
use super::map::changes::Changes;
use super::snapshots::clone_number;
use super::{Access, ObjectVolume};
use crate::base::limits::BLOCK_BYTES;

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

impl Manifest {
    /// The ancestor that wrote the objects with a number, by its place among the ancestors; none: this volume did.
    fn ancestor_of(&self, number: u64) -> Option<usize> {
        let index = (self.ancestors).partition_point(|ancestor| ancestor.below <= number);
        (index < self.ancestors.len()).then_some(index)
    }

    /// The name of an object, of this volume or of an ancestor.
    pub(super) fn name(&self, kind: Kind, number: u64) -> Name {
        let volume = self.ancestor_of(number).map_or(0, |index| index + 1);
        Name {
            volume: volume as u16,
            kind,
            number,
        }
    }

    /// UUID of the volume that wrote the object with this number.
    pub(super) fn writer(&self, number: u64) -> [u8; 16] {
        let index = self.ancestor_of(number);
        index.map_or(self.volume, |index| self.ancestors[index].volume)
    }

    /// Objects below this number are not this volume's own.
    pub(super) fn own_first(&self) -> u64 {
        self.ancestors.last().map_or(0, |last| last.below)
    }

    /// The reference of this volume, if it is a clone.
    pub(super) fn reference_name(&self) -> Option<Name> {
        let parent = self.ancestors.len();
        (parent > 0).then(|| Name {
            volume: parent as u16,
            kind: Kind::Clone,
            number: clone_number(&self.volume),
        })
    }
}

impl ObjectVolume {
    /// What it is a clone of, if it is one; known once it is open.
    pub fn parent(&self) -> Option<Parent> {
        let parent = self.manifest.ancestors.last()?;
        let reference = self.manifest.reference_name()?;
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
        let (own_first, blocks) = (
            self.manifest.own_first(),
            self.commits.bytes() / BLOCK_BYTES as u64,
        );
        let page_blocks = self.store.map.page_blocks();
        if own_first == 0 {
            return;
        }
        let mut run = |from: u64, to: u64| {
            let to = to.min(blocks);
            if from < to {
                each(from, to - from);
            }
        };
        // Once the clone has stored its own map, a page that is not there may have been cut off before it ever was, or
        // hold nothing any more. Until then its ancestors never wrote there, and what it has done itself is all among the
        // changes.
        let mut maps = self.manifest.maps.iter();
        let has_own_map = self.manifest.own_map || maps.any(|map| map.number >= own_first);
        let is_kept = |place: Place| place.number() < own_first;
        let mut page = 0;
        loop {
            let stored = self.store.map.directory.next(page);
            let newer = [&self.store.map.frozen, &self.store.map.fresh].into_iter();
            let newer = newer.filter_map(|changes| changes.next(page * page_blocks));
            let newer = newer.map(|block| block / page_blocks);
            let next = stored.into_iter().chain(newer).min();
            let next = next.unwrap_or(blocks.div_ceil(page_blocks));
            if !has_own_map {
                run(page * page_blocks, next * page_blocks);
            }
            page = next;
            let (first, end) = (page * page_blocks, (page + 1) * page_blocks);
            if first >= blocks {
                return;
            }
            let entry = self.store.map.directory.get(page);
            // What the page says from a block on up to another one.
            let mut page_says = |from: u64, to: u64| match entry {
                Some(entry) if self.store.is_of_ancestor(entry, own_first) => run(from, to),
                Some(entry) => {
                    let content = self.store.map.cache.get(page, entry);
                    let runs = content.map_or(&[][..], |content| content.runs()).iter();
                    for kept in runs.filter(|run| is_kept(run.place())) {
                        let kept_first = first + u64::from(kept.first);
                        let kept_end = kept_first + u64::from(kept.count);
                        run(from.max(kept_first), to.min(kept_end));
                    }
                }
                None if has_own_map => {}
                None => run(from, to),
            };
            let mut changes = Changes::default();
            for newer in [&self.store.map.frozen, &self.store.map.fresh] {
                for (block, count, place) in newer.range(first, end) {
                    changes.set(block, count, place);
                }
            }
            let mut at = first;
            let mut kept = Vec::new();
            for (block, count, place) in changes.range(first, end) {
                page_says(at, block);
                at = block + count;
                if place.is_some_and(is_kept) {
                    kept.push((block, at));
                }
            }
            page_says(at, end);
            for (from, to) in kept {
                run(from, to);
            }
            page += 1;
        }
    }

    /// The same as a list; for tests.
    pub fn inherited_runs(&self) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        self.inherited(|first, count| runs.push((first, count)));
        runs
    }
}
