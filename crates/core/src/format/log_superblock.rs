//! The superblock of a write log: how it is made, sealed, chosen and checked, and what it says of a copy in a group.
//!
//! ```text
//!            version 1: no group            version 2: the copy of a member or joiner
//! epoch      0                              highest epoch that it has promised
//! joined     0                              revision of the record under which it was brought up
//! cut        0, 0                           cut_position, void_before: see [`Membership::voids`]
//! flags      LOG_NOT_WHOLE is clear         LOG_NOT_WHOLE while it is brought up
//! ```
//!
//! Invariants:
//! 1. A log without a group stays as version 1 has it, byte for byte.
//! 2. A log of a group is never version 1: a program that does not know cuts refuses it, and reads no void spans.
//! 3. What is said of the group stays until [`LogSuperblock::set_membership`] says something else.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    LOG_HEADER_BLOCKS, LOG_HOLDS_VOLUME, LOG_MAGIC, LOG_NOT_WHOLE, LOG_SUPERBLOCK_STRIDE,
    LOG_SUPERBLOCKS, LOG_UNFLUSHED, LOG_VERSION, LOG_VERSION_ALONE, LogSuperblock, refuse_newer,
    seal, verify,
};
use crate::base::cipher::{Authenticator, TAG_BYTES, compare_tags};
use crate::base::error::{FormatError, OpenError};
use crate::base::limits::{
    BLOCK_BYTES, LOG_POSITION_MAX, LOST_RANGES_MAX, SECTOR_BYTES, SPAN_DATA_BLOCKS_MAX,
    VOLUME_BYTES_MAX,
};
use crate::log::ahead::AHEAD_BLOCKS_LEAST;

/// What the superblock of a group's log says of this copy. docs/CLUSTER.md has the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The highest epoch that the copy has promised. It takes nothing of a lower one.
    pub promised: u64,
    /// Position from which on spans of openings before `void_before` are void.
    pub cut_position: u64,
    /// The first opening whose spans count there. The superblock knows that opening.
    pub void_before: u64,
    /// Revision of the record under which the copy was brought up.
    pub joined: u64,
    /// Whether the copy may be a source. A new one, or one that is being brought up, is not.
    pub is_whole: bool,
}

impl Membership {
    /// Whether a span of this opening whose first block has this position was cut off. It is not part of the log, and
    /// proves nothing about it.
    pub const fn voids(&self, position: u64, incarnation: u64) -> bool {
        position >= self.cut_position && incarnation < self.void_before
    }

    /// Whether a span whose first block has this position proves that all below its evidence was there. While a copy is
    /// brought up, what comes is written in any order.
    pub const fn proves(&self, position: u64) -> bool {
        self.is_whole || position < self.cut_position
    }
}

/// What the superblock of a copy is to say that follows a primary, and on which no volume stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyState {
    /// What it says of the group.
    pub membership: Membership,
    /// The highest opening whose spans it takes.
    pub incarnation: u64,
    /// Position of the first span that is not retired.
    pub tail: u64,
    /// Checksum of the span before the tail.
    pub tail_chain: u64,
    /// Sync points before the tail.
    pub sync_points: u64,
    /// Whether the backend may hold writes past the log that it has not flushed.
    pub is_unflushed: bool,
}

impl LogSuperblock {
    /// That of the new log `log` of a volume without a group, on a region of so many bytes.
    pub fn new(volume: [u8; 16], log: u64, region_bytes: u64) -> Self {
        let mut superblock = Self {
            magic: LOG_MAGIC,
            version: U16::new(LOG_VERSION_ALONE),
            holds: U16::new(LOG_HOLDS_VOLUME),
            reserved_a: [0; 4],
            checksum: U64::new(0),
            volume,
            log: U64::new(log),
            // Even: it belongs in block 0, and the first opening writes the other one.
            sequence: U64::new(0),
            incarnation: U64::new(0),
            epoch: U64::new(0),
            ring_blocks: U64::new(region_bytes / BLOCK_BYTES as u64 - LOG_HEADER_BLOCKS),
            tail: U64::new(0),
            tail_chain: U64::new(0),
            clean_head: U64::new(0),
            sync_points: U64::new(0),
            data_key: [0; 16],
            flags: U64::new(0),
            // No cache has anything of the volume.
            cache: U64::new(0),
            cache_stamp: U64::new(0),
            backend_commit: [0; 64],
            known_head: U64::new(0),
            tag: [0; TAG_BYTES],
            ahead: U64::new(AHEAD_BLOCKS_LEAST),
            ahead_sequence: U64::new(0),
            cut_position: U64::new(0),
            void_before: U64::new(0),
            joined: U64::new(0),
            reserved_b: [0; 1760],
            lost_ranges: U64::new(0),
            lost: [[U64::new(0); 2]; LOST_RANGES_MAX],
        };
        superblock.seal();
        superblock
    }

    /// What it says of this copy in its group; `None` if the log has no group.
    pub fn membership(&self) -> Option<Membership> {
        (self.version.get() > LOG_VERSION_ALONE).then(|| Membership {
            promised: self.epoch.get(),
            cut_position: self.cut_position.get(),
            void_before: self.void_before.get(),
            joined: self.joined.get(),
            is_whole: self.flags.get() & LOG_NOT_WHOLE == 0,
        })
    }

    /// Have it say this of this copy. It is to be sealed afterwards.
    ///
    /// The superblock that cuts a copy also has to end the log at the cut: see [`Self::truncate`].
    pub fn set_membership(&mut self, membership: Membership) {
        let mark = if membership.is_whole {
            0
        } else {
            LOG_NOT_WHOLE
        };
        self.version = U16::new(LOG_VERSION);
        self.epoch = U64::new(membership.promised);
        self.cut_position = U64::new(membership.cut_position);
        self.void_before = U64::new(membership.void_before);
        self.joined = U64::new(membership.joined);
        self.flags = U64::new(self.flags.get() & !LOG_NOT_WHOLE | mark);
    }

    /// Have it say that the log ends at `end`, a position, and is durable up to there: a cut has taken what was behind. It
    /// is to be sealed afterwards.
    pub fn truncate(&mut self, end: u64) {
        self.known_head = U64::new(end);
        self.clean_head = U64::new(u64::MAX);
        if self.tail.get() == end {
            // How far ahead of what is durable somebody else writes the first span is not known here.
            self.ahead = U64::new(0);
        }
    }

    /// The superblock that follows this one, of a copy on which no volume stands. It is to be sealed.
    ///
    /// Its end is named where it is cut, and later only by what a replay has found: a copy that is not whole may be cut
    /// there once more.
    #[must_use]
    pub fn next_of_copy(&self, state: &CopyState) -> Self {
        let mut next = *self;
        next.set_membership(state.membership);
        // Others close the log.
        next.clean_head = U64::new(u64::MAX);
        next.incarnation = U64::new(state.incarnation);
        // How far ahead of what is durable the spans behind a new tail were written, their primary knows.
        let is_same_tail = self.tail.get() == state.tail;
        next.ahead = U64::new(if is_same_tail { self.named_ahead() } else { 0 });
        next.tail = U64::new(state.tail);
        next.tail_chain = U64::new(state.tail_chain);
        next.sync_points = U64::new(state.sync_points);
        let others = next.flags.get() & !LOG_UNFLUSHED;
        let mark = if state.is_unflushed { LOG_UNFLUSHED } else { 0 };
        next.flags = U64::new(others | mark);
        if !state.membership.is_whole {
            next.truncate(state.membership.cut_position);
        }
        next.sequence = U64::new(self.sequence.get() + 1);
        next.ahead_sequence = next.sequence;
        next
    }

    /// Whether a span of this opening that lies at this position was cut off ([`Membership::voids`]).
    pub fn voids(&self, position: u64, incarnation: u64) -> bool {
        let membership = self.membership();
        membership.is_some_and(|membership| membership.voids(position, incarnation))
    }

    /// Whether a span that lies at this position proves what was before it ([`Membership::proves`]).
    pub fn proves(&self, position: u64) -> bool {
        let membership = self.membership();
        membership.is_none_or(|membership| membership.proves(position))
    }

    /// What it names as [`Self::ahead`]; zero if that is of an earlier one.
    pub fn named_ahead(&self) -> u64 {
        if self.ahead_sequence == self.sequence {
            self.ahead.get()
        } else {
            0
        }
    }

    /// Fill in the checksum.
    pub fn seal(&mut self) {
        seal(self.as_mut_bytes());
    }

    /// Fill in the tag of these keys, and the checksum. Without any there is no tag.
    pub fn seal_with(&mut self, keys: Option<&dyn Authenticator>) {
        self.tag = keys.map_or([0; TAG_BYTES], |keys| self.tag_by(keys));
        self.seal();
    }

    fn tag_by(mut self, keys: &dyn Authenticator) -> [u8; TAG_BYTES] {
        self.checksum = U64::new(0);
        self.tag = [0; TAG_BYTES];
        keys.tag(self.as_bytes())
    }

    /// Whether a holder of these keys has written it; without any that is not asked.
    ///
    /// # Errors
    /// [`FormatError::Forged`] if nobody has.
    pub fn authenticate(&self, keys: Option<&dyn Authenticator>) -> Result<(), FormatError> {
        keys.map_or(Ok(()), |keys| compare_tags(&self.tag, &self.tag_by(keys)))
    }

    /// Which of these is in force: the newest of those that are whole and fit.
    ///
    /// # Errors
    /// If none does, the most telling of the reasons: any but that a block was never formatted.
    pub fn in_force(
        copies: impl IntoIterator<Item = Result<Self, FormatError>>,
    ) -> Result<Self, FormatError> {
        let mut best: Result<Self, _> = Err(FormatError::Magic);
        for copy in copies {
            best = match (best, copy) {
                (Ok(a), Ok(b)) if b.sequence.get() > a.sequence.get() => Ok(b),
                (Ok(a), _) => Ok(a),
                (Err(_), Ok(b)) => Ok(b),
                (Err(FormatError::Magic), Err(reason)) | (Err(reason), Err(_)) => Err(reason),
            };
        }
        best
    }

    /// Whether a holder of these keys has written all of these blocks that are superblocks of this volume.
    ///
    /// # Errors
    /// [`OpenError::Forged`] if one is that nobody has written.
    pub fn authenticate_all(
        blocks: &[&[u8]],
        volume: [u8; 16],
        keys: Option<&dyn Authenticator>,
    ) -> Result<(), OpenError> {
        let found = blocks.iter().filter_map(|block| Self::parse(block).ok());
        let mut own = found.filter(|superblock| superblock.volume == volume);
        own.try_for_each(|superblock| superblock.authenticate(keys))
            .map_err(|_| OpenError::Forged)
    }

    /// Offset in bytes on the log's region of the one with this sequence: they are written in turn.
    pub const fn offset_of(sequence: u64) -> u64 {
        sequence % LOG_SUPERBLOCKS * LOG_SUPERBLOCK_STRIDE * BLOCK_BYTES as u64
    }

    /// Refuse the blocks of both superblocks if a newer program has written one of them.
    pub fn refuse_newer(blocks: &[&[u8]]) -> Result<(), FormatError> {
        refuse_newer(blocks, LOG_MAGIC, LOG_VERSION)
    }

    /// The superblock in `block`, checked but for its identity and what stands on the log.
    pub fn parse(block: &[u8]) -> Result<Self, FormatError> {
        let this = Self::read_from_bytes(block).map_err(|_| FormatError::Field("length"))?;
        verify(block, LOG_MAGIC, LOG_VERSION)?;
        let ring_blocks = this.ring_blocks.get();
        if ring_blocks < 4 * SPAN_DATA_BLOCKS_MAX as u64 || ring_blocks > u64::from(u32::MAX) {
            return Err(FormatError::Field("ring_blocks"));
        }
        let ranges = this.lost_ranges.get();
        if ranges > LOST_RANGES_MAX as u64 {
            return Err(FormatError::Field("lost_ranges"));
        }
        if !lost_is_in_order(&this.lost[..ranges as usize]) {
            return Err(FormatError::Field("lost"));
        }
        this.check_positions()?;
        this.check_group()?;
        Ok(this)
    }

    /// No arithmetic with positions near these overflows.
    fn check_positions(&self) -> Result<(), FormatError> {
        if self.tail.get() > LOG_POSITION_MAX {
            return Err(FormatError::Field("tail"));
        }
        if self.cut_position.get() > LOG_POSITION_MAX {
            return Err(FormatError::Field("cut_position"));
        }
        Ok(())
    }

    /// A log without a group says nothing of one, and no cut voids what is still to be written.
    fn check_group(&self) -> Result<(), FormatError> {
        let is_alone = self.membership().is_none();
        for (name, value) in [
            ("epoch", self.epoch.get()),
            ("cut_position", self.cut_position.get()),
            ("void_before", self.void_before.get()),
            ("joined", self.joined.get()),
            ("flags", self.flags.get() & LOG_NOT_WHOLE),
        ] {
            if is_alone && value != 0 {
                return Err(FormatError::Field(name));
            }
        }
        let voids_all = self.void_before.get() == u64::MAX;
        if self.void_before.get() > self.incarnation.get() && !voids_all {
            return Err(FormatError::Field("void_before"));
        }
        Ok(())
    }
}

/// Whether ranges are within the largest volume, in order, apart from one another, and none is empty.
fn lost_is_in_order(ranges: &[[U64; 2]]) -> bool {
    let mut before = None;
    ranges.iter().all(|[start, sectors]| {
        let (start, sectors) = (start.get(), sectors.get());
        let end = start.checked_add(sectors);
        let follows = before.is_none_or(|before| before < start);
        before = end;
        follows
            && sectors > 0
            && end.is_some_and(|end| end <= VOLUME_BYTES_MAX / SECTOR_BYTES as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::super::check_head;
    use super::*;

    const REGION_BYTES: u64 = 64 << 20;

    const MEMBERSHIP: Membership = Membership {
        promised: 7,
        cut_position: 100,
        void_before: 3,
        joined: 5,
        is_whole: false,
    };

    fn of_group() -> LogSuperblock {
        let mut superblock = LogSuperblock::new([7; 16], 99, REGION_BYTES);
        superblock.incarnation = U64::new(4);
        superblock.set_membership(MEMBERSHIP);
        superblock.seal();
        superblock
    }

    #[test]
    fn superblock_without_a_group_is_of_the_first_version() {
        let superblock = LogSuperblock::new([7; 16], 99, REGION_BYTES);
        assert_eq!(superblock.version.get(), LOG_VERSION_ALONE);
        assert_eq!(superblock.membership(), None);
        assert!(!superblock.voids(0, 0));
        LogSuperblock::parse(superblock.as_bytes()).unwrap();
    }

    #[test]
    fn superblock_of_a_group_says_what_it_was_told() {
        let mut superblock = LogSuperblock::parse(of_group().as_bytes()).unwrap();
        assert_eq!(superblock.membership(), Some(MEMBERSHIP));
        let whole = Membership {
            is_whole: true,
            ..MEMBERSHIP
        };
        superblock.set_membership(whole);
        superblock.seal();
        let superblock = LogSuperblock::parse(superblock.as_bytes()).unwrap();
        assert_eq!(superblock.membership(), Some(whole));
        assert_eq!(superblock.flags.get(), 0);
    }

    #[test]
    fn cut_voids_older_openings_from_its_position_on() {
        let superblock = of_group();
        for (position, incarnation, is_void) in [
            (99, 2, false),
            (100, 2, true),
            (100, 3, false),
            (u64::MAX, 2, true),
            (u64::MAX, 3, false),
        ] {
            assert_eq!(superblock.voids(position, incarnation), is_void);
        }
    }

    #[test]
    fn truncation_names_the_new_end() {
        let mut superblock = of_group();
        superblock.known_head = U64::new(120);
        superblock.clean_head = U64::new(120);
        superblock.truncate(100);
        assert_eq!(superblock.known_head.get(), 100);
        assert_eq!(superblock.clean_head.get(), u64::MAX);
        assert!(superblock.named_ahead() > 0, "spans before the cut name it");
        superblock.truncate(superblock.tail.get());
        assert_eq!(
            (superblock.known_head.get(), superblock.named_ahead()),
            (0, 0)
        );
    }

    #[test]
    fn superblock_of_a_copy_says_what_it_is_to_say() {
        let before = LogSuperblock::new([7; 16], 99, REGION_BYTES);
        let state = CopyState {
            membership: MEMBERSHIP,
            incarnation: 4,
            tail: 90,
            tail_chain: 0x1234,
            sync_points: 3,
            is_unflushed: true,
        };
        let mut next = before.next_of_copy(&state);
        next.seal();
        let next = LogSuperblock::parse(next.as_bytes()).unwrap();
        assert_eq!(next.membership(), Some(MEMBERSHIP));
        let numbers = [next.sequence, next.incarnation, next.tail, next.tail_chain];
        assert_eq!(numbers.map(U64::get), [1, 4, 90, 0x1234]);
        assert_eq!(next.sync_points.get(), 3);
        assert_eq!(next.flags.get(), LOG_NOT_WHOLE | LOG_UNFLUSHED);
        assert_eq!(next.clean_head.get(), u64::MAX);
        assert_eq!(next.known_head.get(), 100);
        assert_eq!(next.named_ahead(), 0);
    }

    #[test]
    fn superblock_of_a_copy_names_an_end_behind_its_cut_only_once_it_is_whole() {
        let mut superblock = of_group();
        superblock.known_head = U64::new(140);
        let state = |is_whole| CopyState {
            membership: Membership {
                is_whole,
                ..MEMBERSHIP
            },
            incarnation: 4,
            tail: 0,
            tail_chain: 0,
            sync_points: 0,
            is_unflushed: false,
        };
        for (is_whole, known_head) in [(true, 140), (false, 100)] {
            let next = superblock.next_of_copy(&state(is_whole));
            assert_eq!(next.known_head.get(), known_head);
            assert_eq!(next.named_ahead(), superblock.named_ahead(), "same tail");
        }
    }

    /// The program before this version reads the first one only.
    #[test]
    fn superblock_of_a_group_is_refused_by_the_program_before() {
        let superblock = of_group();
        let error = check_head(superblock.as_bytes(), LOG_MAGIC, LOG_VERSION_ALONE);
        let newer = FormatError::Newer {
            found: 2,
            supported: 1,
        };
        assert_eq!(error, Err(newer));
        // Whichever of the two is of a group, and whatever else there is.
        let alone = LogSuperblock::new([7; 16], 99, REGION_BYTES);
        for pair in [[&superblock, &alone], [&alone, &superblock]] {
            let blocks = pair.map(IntoBytes::as_bytes);
            let refused = refuse_newer(&blocks, LOG_MAGIC, LOG_VERSION_ALONE);
            assert_eq!(refused, Err(newer));
            assert_eq!(LogSuperblock::refuse_newer(&blocks), Ok(()));
        }
    }

    #[test]
    fn superblock_without_a_group_that_says_something_of_one_is_refused() {
        type Change = fn(&mut LogSuperblock);
        let changes: [(&str, Change); 5] = [
            ("epoch", |it| it.epoch = U64::new(1)),
            ("cut_position", |it| it.cut_position = U64::new(1)),
            ("void_before", |it| it.void_before = U64::new(1)),
            ("joined", |it| it.joined = U64::new(1)),
            ("flags", |it| it.flags = U64::new(LOG_NOT_WHOLE)),
        ];
        for (name, change) in changes {
            let mut superblock = LogSuperblock::new([7; 16], 99, REGION_BYTES);
            change(&mut superblock);
            superblock.seal();
            let refused = LogSuperblock::parse(superblock.as_bytes()).map(drop);
            assert_eq!(refused, Err(FormatError::Field(name)));
        }
    }

    #[test]
    fn superblock_of_a_group_with_an_impossible_cut_is_refused() {
        type Change = fn(&mut LogSuperblock);
        let changes: [(&str, Change); 3] = [
            // The next opening would write spans that are void.
            ("void_before", |it| it.void_before = U64::new(5)),
            ("cut_position", |it| it.cut_position = U64::new(u64::MAX)),
            ("tail", |it| it.tail = U64::new(LOG_POSITION_MAX + 1)),
        ];
        for (name, change) in changes {
            let mut superblock = of_group();
            change(&mut superblock);
            superblock.seal();
            let refused = LogSuperblock::parse(superblock.as_bytes()).map(drop);
            assert_eq!(refused, Err(FormatError::Field(name)));
        }
    }
}
