//! Which lines stay on the tier: those that are pinned, and of the others what they are worth. And for what a new line
//! is taken: for one that stays, or for one that has to prove itself.
//!
//! What was used is kept, weighed by what it is worth (`benefit`). Pinned lines are kept all; a segment of which they
//! are most is passed over by eviction, since emptying it would write nearly all of it again. Of what was evicted
//! before it was used, a fingerprint is remembered (`ghost`): if it comes back soon, it was evicted too early.
//!
//! Invariants:
//! 1. Pins of all volumes together take no more than their share of the tier. Whoever pins asks first.
//! 2. A line is pinned if any address that leads to it is.
//! 3. It decides from what the store says and changes nothing there.

use alloc::vec::Vec;

use super::segments::Stream;
use super::store::Store;
use crate::base::io::BlockKey;
use crate::base::limits::{BLOCK_BYTES, CACHE_PASS_OVER_RATIO};
use crate::cache::benefit::{Worths, unproven};
use crate::cache::ghost::{Ghost, Ring};
use crate::cache::index::Line;
use crate::cache::pins::{PinRefused, Pins, whole_lines};
use crate::cache::table::mix;

/// The largest number of uses that is counted of a line.
pub const USES_MAX: u8 = 3;

/// See the module.
#[derive(Debug)]
pub struct Retention {
    pins: Pins,
    worths: Worths,
    ghost: Ghost,
}

impl Retention {
    /// Nothing is pinned, everything is worth the same, and nothing was evicted yet from a tier of so many lines.
    pub fn new(lines: usize) -> Self {
        Self {
            pins: Pins::default(),
            worths: Worths::default(),
            ghost: Ghost::new(lines / 2),
        }
    }

    /// The same pins and worths for a tier of so many lines that begins anew.
    pub fn renewed(self, lines: usize) -> Self {
        Self {
            pins: self.pins,
            worths: self.worths,
            ..Self::new(lines)
        }
    }

    /// Nothing is stored any more, so what was evicted is of no use. Pins and worths stay.
    pub fn give_up(&mut self) {
        self.ghost = Ghost::new(0);
    }

    pub fn bytes(&self) -> usize {
        self.ghost.bytes()
    }

    // Pins.

    /// Whether ranges of a volume's blocks may be pinned instead of what is, where pins take `blocks_max` at most.
    pub fn may_pin(
        &self,
        volume: u32,
        ranges: &[(u64, u64)],
        line_blocks: usize,
        blocks_max: u64,
    ) -> Result<(), PinRefused> {
        let lines = whole_lines(ranges, line_blocks as u64);
        let asked: u64 = lines.iter().map(|(first, end)| end - first).sum();
        let others = self.pins.blocks_beside(volume);
        if asked > 0 && asked + others > blocks_max {
            let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
            return Err(PinRefused::TooMuch {
                asked_bytes: bytes(asked),
                others_bytes: bytes(others),
                max_bytes: bytes(blocks_max),
            });
        }
        Ok(())
    }

    /// Pin ranges that [`Self::may_pin`] allows, and nothing else of the volume.
    pub fn pin(
        &mut self,
        volume: u32,
        origin: Option<u32>,
        ranges: &[(u64, u64)],
        line_blocks: usize,
        blocks_max: u64,
    ) {
        let lines = whole_lines(ranges, line_blocks as u64);
        let pinned = self.pins.set(volume, origin, lines, blocks_max);
        assert!(pinned.is_ok(), "whoever pins has asked whether it may");
    }

    /// Whether anything is pinned.
    pub fn has_pins(&self) -> bool {
        !self.pins.is_empty()
    }

    /// Whether an address is pinned.
    pub fn is_pinned(&self, key: u64) -> bool {
        self.pins.contains(key)
    }

    /// Segments that are left to lines that are kept: while anything is pinned, those would be lost otherwise.
    pub fn segments_kept(&self) -> usize {
        usize::from(self.has_pins())
    }

    /// The address under which a line is pinned, if it is.
    pub fn pinned_key(&self, line: Line, store: &Store) -> Option<u64> {
        if self.pins.is_empty() {
            return None;
        }
        let primary = store.index.primary(line);
        primary.filter(|&key| self.pins.contains(key)).or_else(|| {
            let mut aliases = store.index.aliases_of(store.index.segment_of(line));
            let found = aliases.find(|&(key, of)| of == line && self.pins.contains(key));
            found.map(|(key, _)| key)
        })
    }

    /// The addresses beside `key` under which a line is pinned and that are not to be forgotten.
    pub fn pinned_aliases(&self, line: Line, key: u64, store: &Store) -> Vec<u64> {
        let aliases = store.index.aliases_of(store.index.segment_of(line));
        aliases
            .filter(|&(other, of)| of == line && other != key && self.pins.contains(other))
            .filter(|&(other, _)| !store.forgets(other))
            .map(|(other, _)| other)
            .collect()
    }

    /// One bit for each slot of a segment whose line is pinned.
    pub fn pinned_bits(&self, segment: usize, store: &Store) -> u128 {
        if self.pins.is_empty() {
            return 0;
        }
        let primaries = (0..store.layout.lines_per_segment).filter(|&slot| {
            let key = store.index.primary(store.index.line_at(segment, slot));
            key.is_some_and(|key| self.pins.contains(key))
        });
        let aliases = store.index.aliases_of(segment);
        let aliases = aliases.filter(|&(key, _)| self.pins.contains(key));
        primaries
            .chain(aliases.map(|(_, line)| store.index.slot_of(line)))
            .fold(0, |bits, slot| bits | 1 << slot)
    }

    /// Whether eviction passes a segment over for what is pinned of it.
    pub fn is_mostly_pinned(&self, segment: usize, store: &Store) -> bool {
        let pinned = store.share_of_bits(segment, self.pinned_bits(segment, store));
        pinned * 100 >= store.whole_segment() * CACHE_PASS_OVER_RATIO
    }

    // Worths.

    /// What a line of a volume is worth from now on, if it is known.
    pub fn set_worth(&mut self, volume: u32, worth: Option<i32>) {
        self.worths.set(volume, worth);
    }

    /// Everything is worth the same.
    pub fn clear_worths(&mut self) {
        self.worths.clear();
    }

    /// The doublings by which a volume's lines are worth more than the mean of the main stream.
    pub fn gain(&self, volume: u32) -> i32 {
        self.worths.gain(volume, Stream::Main as usize)
    }

    /// For each slot of a segment, what its line's worth adds to the number of its uses: of what is worth
    /// more, enough to be kept before others, now and then nothing, so that it ages; of what is worth less, now and then
    /// nothing, else so little that its uses do not count.
    pub fn bonuses(&mut self, stream: Stream, segment: usize, store: &Store) -> Vec<i8> {
        let bonus = |slot| {
            let line = store.index.line_at(segment, slot);
            let (key, uses) = (store.index.primary(line), store.index.uses(line));
            let gain = key.map_or(0, |key| {
                self.worths.pass(BlockKey(key).volume(), stream as usize)
            });
            let is_new = uses == 0 && stream == Stream::Small;
            let gain = if is_new { unproven(gain) } else { gain };
            let counts_fully = self.worths.is_drawn(gain.abs());
            match gain {
                _ if counts_fully => 0,
                1.. => gain as i8,
                _ => -(USES_MAX as i8),
            }
        };
        (0..store.layout.lines_per_segment).map(bonus).collect()
    }

    // What comes and goes.

    /// The stream that a line which was not here is for.
    pub fn stream_of_new(&mut self, key: u64, is_promoted: bool) -> Stream {
        let gain = self.gain(BlockKey(key).volume());
        let is_remembered = self.ghost.remove(mix(key)).is_some() && self.worths.is_drawn(-gain);
        if is_remembered || is_promoted || self.pins.contains(key) {
            Stream::Main
        } else {
            Stream::Small
        }
    }

    /// A stream has taken a line.
    pub fn taken(&mut self, stream: Stream, key: u64) {
        self.worths.note(BlockKey(key).volume(), stream as usize);
    }

    /// A line was evicted from a stream.
    pub fn evicted(&mut self, stream: Stream, key: u64) {
        if stream == Stream::Small {
            self.ghost.insert(mix(key), Ring::Small);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::ssd::rig;

    #[test]
    fn retention_takes_for_used_what_is_promoted_pinned_or_comes_back() {
        let mut retention = Retention::new(1024);
        let key = |block| BlockKey::new(1, block).0;
        retention.pin(1, None, &[(1, 2)], 4, 4);
        assert_eq!(retention.stream_of_new(key(0), false), Stream::Main);
        assert_eq!(retention.stream_of_new(key(4), false), Stream::Small);
        assert_eq!(retention.stream_of_new(key(4), true), Stream::Main);
        retention.evicted(Stream::Main, key(8));
        assert_eq!(retention.stream_of_new(key(8), false), Stream::Small);
        retention.evicted(Stream::Small, key(8));
        assert_eq!(retention.stream_of_new(key(8), false), Stream::Main);
        assert_eq!(retention.stream_of_new(key(8), false), Stream::Small);
    }

    #[test]
    fn retention_bounds_pins_and_keeps_them_through_a_failure() {
        let mut retention = Retention::new(1024);
        retention.pin(1, None, &[(0, 6)], 4, 12);
        let refused = PinRefused::TooMuch {
            asked_bytes: 8 * BLOCK_BYTES as u64,
            others_bytes: 8 * BLOCK_BYTES as u64,
            max_bytes: 12 * BLOCK_BYTES as u64,
        };
        assert_eq!(retention.may_pin(2, &[(3, 5)], 4, 12), Err(refused));
        assert_eq!(retention.may_pin(2, &[(4, 5)], 4, 12), Ok(()));
        assert_eq!(retention.may_pin(1, &[(0, 12)], 4, 12), Ok(()));
        retention.evicted(Stream::Small, 400);
        retention.give_up();
        assert_eq!(retention.bytes(), Ghost::new(0).bytes());
        let mut retention = retention.renewed(1024);
        assert!(retention.is_pinned(BlockKey::new(1, 7).0));
        assert_eq!(retention.stream_of_new(400, false), Stream::Small);
    }

    #[test]
    fn retention_passes_a_segment_over_from_three_quarters_on() {
        let mut store = rig::store();
        let lines = store.layout.plain_lines as u64;
        rig::seal_segment(&mut store, Stream::Main, 0);
        let mut retention = Retention::new(0);
        assert!(!retention.is_mostly_pinned(0, &store));
        assert_eq!(retention.pinned_key(Line(0), &store), None);
        let least = (lines * CACHE_PASS_OVER_RATIO as u64).div_ceil(100);
        for (pinned, is_most) in [(least - 1, false), (least, true)] {
            retention.pin(1, None, &[(0, 4 * pinned)], 4, u64::MAX);
            assert_eq!(retention.pinned_bits(0, &store).count_ones(), pinned as u32);
            assert_eq!(retention.is_mostly_pinned(0, &store), is_most);
        }
        assert_eq!(
            retention.pinned_key(Line(0), &store),
            Some(BlockKey::new(1, 0).0)
        );
    }
}
