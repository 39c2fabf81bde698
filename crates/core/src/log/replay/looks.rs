//! What was seen where the spans end, so that no single bad read decides where that is.
//!
//! A span may begin at two *places*: right behind the last one, or at the start of the next lap. They are looked at
//! when the spans seem to end, and once more, from the device, with the search for evidence. What is whole at either
//! look counts. Two looks that differ say that the device reads badly: then both are taken again.

use alloc::vec::Vec;

use crate::base::limits::LOG_READ_TRIES_MAX;
use crate::format::{block_checksum, control_checksum};

/// What was seen where a span was looked for. Equal bytes are seen equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// No header that is next.
    Block(u32),
    /// A control part that does not hold.
    Control(u64),
    /// The first data block that does not match, and which one it is.
    Data(usize, u32),
}

impl Seen {
    pub(super) fn block(block: &[u8]) -> Self {
        Self::Block(block_checksum(block))
    }

    pub(super) fn control(control: &[u8]) -> Self {
        Self::Control(control_checksum(control))
    }

    pub(super) fn data(index: usize, block: &[u8]) -> Self {
        Self::Data(index, block_checksum(block))
    }
}

/// A place at which a span may begin.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    position: u64,
    first: Option<Seen>,
    second: Option<Seen>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Looks {
    places: [Option<Place>; 2],
    /// Rounds of two looks that were begun.
    rounds: u8,
    /// Something other than a span says that there was more.
    pub(super) more: bool,
    /// There is a span of an opening that the superblock does not know.
    pub(super) newer: bool,
    /// A span that seems to begin at one of the places, at the second look.
    pub(super) next: Option<Next>,
}

/// A span of which the second look has seen the beginning.
#[derive(Debug)]
pub(super) struct Next {
    /// Where it begins.
    pub(super) position: u64,
    /// As far as it was read.
    pub(super) control: Vec<u8>,
    /// Those of its data, once the control part is whole.
    pub(super) checksums: Option<Vec<u32>>,
    /// Data blocks that were read.
    pub(super) data_blocks: usize,
}

impl Looks {
    /// A span was not found at `position`, at the first look.
    pub(super) fn note_first(&mut self, position: u64, seen: Seen) {
        let is_end = self.places[0].is_none_or(|end| end.position == position);
        self.places[usize::from(!is_end)] = Some(Place {
            position,
            first: Some(seen),
            second: None,
        });
    }

    /// The same at the second look.
    pub(super) fn note_second(&mut self, position: u64, seen: Seen) {
        let mut places = self.places.iter_mut().flatten();
        if let Some(place) = places.find(|place| place.position == position) {
            place.second = Some(seen);
        }
    }

    /// Whether a span may begin at `position`.
    pub(super) fn is_place(&self, position: u64) -> bool {
        let mut places = self.places.iter().flatten();
        places.any(|place| place.position == position)
    }

    /// Both looks are over. Whether both are to be taken again: they differ, or much depends on them.
    pub(super) fn again(&mut self, decides: bool) -> bool {
        let differs = |place: &Place| place.second.is_some() && place.first != place.second;
        let again = decides || self.places.iter().flatten().any(differs);
        self.rounds += 1;
        let again = again && self.rounds < LOG_READ_TRIES_MAX;
        self.next = None;
        if again {
            self.places = [None; 2];
            (self.more, self.newer) = (false, false);
        }
        again
    }

    /// Where a span lies of which both looks have found the control part good and data bad.
    pub(super) fn damaged(&self) -> Option<u64> {
        let has_bad_data = |seen| matches!(seen, Some(Seen::Data(..)));
        let is_damaged = |place: &&Place| has_bad_data(place.first) && has_bad_data(place.second);
        let mut places = self.places.iter().flatten().filter(|_| !self.newer);
        places.find(is_damaged).map(|place| place.position)
    }
}
