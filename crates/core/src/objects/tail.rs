//! The tail: data objects that were sealed since the map was stored, which whoever opens the volume has to replay.
//!
//! Sealed objects have positions, in the order in which they apply; the first one has 1. States are told by them, never by
//! the numbers of objects, which are names.
//!
//! The tail is bounded in objects, and in runs, by what an opening can read and remember. Near the bound the map is
//! stored ([`super::checkpoint`]); at it, writes wait.

use alloc::collections::VecDeque;

use super::format::{TailEntry, table_bytes};
use super::frames::Frames;
use crate::base::limits::{OBJECT_TAIL_MAX, OBJECT_TAIL_UNFLUSHED_MAX};

/// An object of the tail.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) entry: TailEntry,
    pub(super) position: u64,
    /// Whether it has anything that was asked for from above.
    user: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Tail {
    objects: VecDeque<Sealed>,
    /// Bytes and runs of all of them.
    bytes: u64,
    runs: usize,
    /// Runs at which writes wait for the map to be stored.
    runs_max: usize,
    /// Position of the last object that was sealed.
    last: u64,
}

impl Tail {
    /// An empty one.
    pub(super) fn new(runs_max: usize) -> Self {
        Self {
            objects: VecDeque::new(),
            bytes: 0,
            runs: 0,
            runs_max,
            last: 0,
        }
    }

    /// An object is sealed; its position.
    pub(super) fn push(&mut self, entry: TailEntry, user: bool) -> u64 {
        self.last += 1;
        self.bytes += entry.bytes();
        self.runs += entry.runs as usize;
        self.objects.push_back(Sealed {
            entry,
            position: self.last,
            user,
        });
        self.last
    }

    /// Position of the last object that was sealed.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// In the order of their positions.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Sealed> {
        self.objects.iter()
    }

    /// Whether a manifest has room for no more objects, beside those that were not flushed.
    pub(super) fn is_full(&self) -> bool {
        self.objects.len() >= OBJECT_TAIL_MAX
    }

    /// Whether there is no room for more objects even if nobody flushes.
    pub(super) fn is_full_unflushed(&self) -> bool {
        self.objects.len() >= OBJECT_TAIL_UNFLUSHED_MAX
    }

    /// Whether the map should be stored for the sake of the runs.
    pub(super) fn has_many_runs(&self) -> bool {
        self.runs >= self.runs_max / 2
    }

    /// Whether whoever opens the volume could not remember more runs.
    pub(super) fn has_too_many_runs(&self) -> bool {
        self.runs >= self.runs_max
    }

    /// Whether anything after a position was asked for from above.
    pub(super) fn has_user_after(&self, position: u64) -> bool {
        let newest_first = self.objects.iter().rev();
        let mut after = newest_first.take_while(|sealed| sealed.position > position);
        after.any(|sealed| sealed.user)
    }

    /// It is known where the frames of the compressed object at a position are; how large that makes it.
    pub(super) fn set_frames(&mut self, position: u64, frames: &Frames) -> Option<u64> {
        let index = (self.objects).partition_point(|sealed| sealed.position < position);
        let entry = &mut self.objects.get_mut(index)?.entry;
        self.bytes -= entry.bytes();
        let table = table_bytes(entry.runs as usize);
        entry.compressed_bytes = frames.table_offset(table) as u32;
        self.bytes += entry.bytes();
        Some(entry.bytes())
    }

    /// The map has everything up to a position.
    pub(super) fn forget(&mut self, upto: u64) {
        while let Some(sealed) = (self.objects).pop_front_if(|sealed| sealed.position <= upto) {
            self.bytes -= sealed.entry.bytes();
            self.runs -= sealed.entry.runs as usize;
        }
    }

    /// Stop at what cannot be.
    pub(super) fn check_invariants(&self) {
        let runs = self.objects.iter().map(|sealed| sealed.entry.runs as usize);
        assert_eq!(runs.sum::<usize>(), self.runs, "runs are counted");
    }
}
