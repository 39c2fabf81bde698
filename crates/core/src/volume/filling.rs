//! Filling: brings into the SSD tier what nobody waits for, a piece at a time, no faster than allowed.
//!
//! Two things are filled: *pinned* ranges, whenever a line of them is not there, and the ranges of a
//! *warm-up*, once, in the order given. A warm-up that nobody asked for begins only if the cache is cold, and
//! takes free room only. Each piece is a promotion, so all that is true of these holds; a
//! pinned line that a write has dropped is fetched again after its destage.
//!
//! Invariants:
//! 1. Whatever of a pin may be missing is among what is still to be looked at, or is under way.
//! 2. One piece is under way at most, and the next does not begin before the rate allows.
//! 3. Nothing is begun while the tier takes no lines, or the policy leaves the cache out. Without an SSD tier,
//!    warm-ups fill the DRAM tier.
//! 4. For a warm-up that nobody asked for, nothing is evicted.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::{CachedBlocks, Context, Policy};
use crate::base::io::{Nanos, SectorRange};
use crate::base::limits::BLOCK_BYTES;

/// Blocks of one piece; pieces end at multiples of it.
const PIECE_BLOCKS: u64 = 256;
/// Pieces that one poll finds to be there already: bounds its time.
const LOOKS_MAX: usize = 16;
/// Until it goes on with looking.
const LOOK_PAUSE: Nanos = Nanos::from_micros(100);
/// Until what was lost, or could not be fetched, is fetched again: writes come in groups, and a failure
/// may last.
const AGAIN_PAUSE: Nanos = Nanos::from_millis(1_000);
/// Ranges to be looked at that are kept apart; beyond it all that is pinned is looked at.
const RANGES_MAX: usize = 1024;
/// How often a piece goes back to what the tier did not take before it waits.
pub(super) const RETURNS_MAX: u32 = 4;

/// What a piece is filled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    Pinned,
    WarmUp,
}

/// Who asked for a warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Asked {
    #[default]
    ByHand,
    /// Nobody: it begins if the cache is cold, which is not known yet.
    IfCold,
    /// Nobody, and the cache is cold.
    ByItself,
}

/// See the module. Ranges are first block and end.
#[derive(Debug, Default)]
pub(super) struct Filling {
    pins: Vec<(u64, u64)>,
    /// Of them, what is to be looked at: end by first block, apart.
    unseen: BTreeMap<u64, u64>,
    warm: VecDeque<(u64, u64)>,
    warm_asked: Asked,
    /// Of the last warm-up.
    warm_bytes: u64,
    running: Option<(Why, u64, u64)>,
    next_at: Nanos,
    losses: u64,
}

impl Filling {
    /// Look at these blocks again, as far as they are pinned.
    fn look_at(&mut self, first: u64, end: u64) {
        let from = self.pins.partition_point(|&(_, pin_end)| pin_end <= first);
        let to = self.pins.partition_point(|&(pin_first, _)| pin_first < end);
        if to.saturating_sub(from) > RANGES_MAX {
            return self.look_at_all();
        }
        for index in from..to {
            let (pin_first, pin_end) = self.pins[index];
            let (mut first, mut end) = (first.max(pin_first), end.min(pin_end));
            if first >= end {
                continue;
            }
            while let Some((&start, &stop)) = self.unseen.range(..=end).next_back()
                && stop >= first
            {
                self.unseen.remove(&start);
                (first, end) = (first.min(start), end.max(stop));
            }
            self.unseen.insert(first, end);
        }
        if self.unseen.len() > RANGES_MAX {
            self.look_at_all();
        }
    }

    pub(super) fn look_at_all(&mut self) {
        self.unseen = self.pins.iter().copied().collect();
    }

    fn postpone(&mut self, until: Nanos) {
        self.next_at = self.next_at.max(until);
    }

    fn has_work(&self) -> bool {
        self.running.is_none() && !(self.unseen.is_empty() && self.warm.is_empty())
    }

    /// The next piece, of what is pinned first.
    fn next(&mut self) -> Option<(Why, u64, u64)> {
        if let Some((first, end)) = self.unseen.pop_first() {
            let stop = end.min((first / PIECE_BLOCKS + 1) * PIECE_BLOCKS);
            if stop < end {
                self.unseen.insert(stop, end);
            }
            return Some((Why::Pinned, first, stop));
        }
        let (first, end) = self.warm.pop_front()?;
        let stop = end.min((first / PIECE_BLOCKS + 1) * PIECE_BLOCKS);
        if stop < end {
            self.warm.push_front((stop, end));
        }
        (first < stop).then_some((Why::WarmUp, first, stop))
    }

    fn bytes_of(ranges: impl Iterator<Item = (u64, u64)>) -> u64 {
        ranges.map(|(first, end)| end - first).sum::<u64>() * BLOCK_BYTES as u64
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        Self::bytes_of(self.pins.iter().copied())
    }

    /// Of what is pinned, what may not be there.
    pub(super) fn pinned_left_bytes(&self) -> u64 {
        let running = self.running.filter(|(why, ..)| *why == Why::Pinned);
        let running = running.map(|(_, first, end)| (first, end));
        let unseen = self.unseen.iter().map(|(&first, &end)| (first, end));
        Self::bytes_of(unseen.chain(running))
    }

    /// All of the warm-up that is under way.
    pub(super) fn warm_bytes(&self) -> u64 {
        if self.warm_left_bytes() == 0 {
            return 0;
        }
        self.warm_bytes
    }

    pub(super) fn warm_left_bytes(&self) -> u64 {
        let running = self.running.filter(|(why, ..)| *why == Why::WarmUp);
        let running = running.map(|(_, first, end)| (first, end));
        Self::bytes_of(self.warm.iter().copied().chain(running))
    }

    /// Pin these ranges and nothing else. A driver asks [`crate::cache::ReadCache::may_pin`] before; what
    /// the cache refuses is not pinned.
    pub(super) fn pin_ranges(
        &mut self,
        ranges: &[SectorRange],
        cached: &CachedBlocks,
        now: Nanos,
        cx: &mut Context<'_>,
    ) {
        let blocks = blocks_of(ranges);
        let is_pinned = cached.pin(&blocks, cx);
        self.pins = if is_pinned { blocks } else { Vec::new() };
        self.look_at_all();
        self.next_at = now;
    }

    /// Fill these ranges in this order, instead of what was left of another warm-up.
    pub(super) fn warm_up(&mut self, ranges: &[SectorRange], asked: Asked) {
        let blocks = ranges.iter().map(|range| {
            let first = range.first_block();
            (first, first + range.block_count())
        });
        self.warm = blocks.filter(|(first, end)| first < end).collect();
        self.warm_asked = asked;
        self.warm_bytes = self.warm_left_bytes();
    }

    /// Ranges that are left of a warm-up: they take memory.
    pub(super) fn warm_up_ranges(&self) -> usize {
        self.warm.len()
    }

    /// Give a warm-up up that nobody asked for, if it is not needed or would drive something out.
    fn judge_warm_up(&mut self, cached: &CachedBlocks, cx: &Context<'_>) {
        if self.warm_asked == Asked::IfCold {
            if !cached.is_cold(self.warm.iter(), cx) {
                self.warm.clear();
            }
            self.warm_asked = Asked::ByItself;
        }
        let next = self.warm.front();
        let blocks = next.map_or(0, |(first, end)| (end - first).min(PIECE_BLOCKS));
        if self.warm_asked == Asked::ByItself && !cx.cache.has_free_room(blocks) {
            self.warm.clear();
        }
    }

    /// Blocks of a range are not in the cache any more, or not for long.
    pub(super) fn note_forgotten(&mut self, range: SectorRange, now: Nanos) {
        if self.pins.is_empty() {
            return;
        }
        let had_work = self.has_work();
        let first = range.first_block();
        self.look_at(first, first + range.block_count());
        if !had_work {
            self.postpone(now.plus(AGAIN_PAUSE));
        }
    }

    /// Whether what the cache loses or has room for concerns it.
    pub(super) fn follows_cache(&self) -> bool {
        !self.pins.is_empty() || !self.warm.is_empty()
    }

    /// When the next piece may begin, if there is one.
    pub(super) fn wakeup(&self) -> Option<Nanos> {
        self.has_work().then_some(self.next_at)
    }

    /// Begin the next piece, if there is one and it may begin now: its first block and its end.
    pub(super) fn begin_piece(
        &mut self,
        policy: Policy,
        cached: &CachedBlocks,
        now: Nanos,
        cx: &Context<'_>,
    ) -> Option<(u64, u64)> {
        let losses = cx.cache.losses();
        if core::mem::replace(&mut self.losses, losses) != losses {
            self.look_at_all();
            self.postpone(now.plus(AGAIN_PAUSE));
        }
        if !self.has_work() || now < self.next_at {
            return None;
        }
        if !cx.cache.can_warm_up() || policy == Policy::PassThrough {
            self.postpone(now.plus(AGAIN_PAUSE));
            return None;
        }
        self.judge_warm_up(cached, cx);
        for _ in 0..LOOKS_MAX {
            let (why, first, end) = self.next()?;
            let end = end.min(cached.whole_blocks());
            if !cached.are_promoted(first, end, cx) {
                self.running = Some((why, first, end));
                return Some((first, end));
            }
        }
        self.postpone(now.plus(LOOK_PAUSE));
        None
    }

    /// The promotion of the piece under way has ended.
    pub(super) fn piece_ended(
        &mut self,
        failed: bool,
        rate_max_bytes_s: u64,
        cached: &CachedBlocks,
        now: Nanos,
        cx: &Context<'_>,
    ) {
        let Some((why, first, end)) = self.running.take() else {
            return;
        };
        let bytes = (end - first) * BLOCK_BYTES as u64;
        let rate = rate_max_bytes_s.max(1);
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        self.next_at = now.plus(Nanos(takes as u64));
        let again = match why {
            Why::Pinned => failed || !cached.are_promoted(first, end, cx),
            Why::WarmUp => failed,
        };
        if again {
            match why {
                Why::Pinned => self.look_at(first, end),
                Why::WarmUp => self.warm.push_front((first, end)),
            }
            self.postpone(now.plus(AGAIN_PAUSE));
        }
    }
}

/// Ranges as blocks: in order, apart, none of them empty.
fn blocks_of(ranges: &[SectorRange]) -> Vec<(u64, u64)> {
    let blocks: Vec<(u64, u64)> = ranges
        .iter()
        .map(|range| {
            let first = range.first_block();
            (first, first + range.block_count())
        })
        .collect();
    crate::cache::whole_lines(&blocks, 1)
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn pinned(ranges: &[(u64, u64)]) -> Filling {
        Filling {
            pins: ranges.to_vec(),
            ..Filling::default()
        }
    }

    #[test]
    fn filling_looks_only_at_what_is_pinned_and_merges_it() {
        let mut filling = pinned(&[(100, 1000), (2000, 2100)]);
        filling.look_at(0, 50);
        assert!(!filling.has_work());
        filling.look_at(90, 110);
        filling.look_at(120, 130);
        filling.look_at(105, 120);
        filling.look_at(990, 2010);
        let unseen: Vec<_> = filling.unseen.clone().into_iter().collect();
        assert_eq!(unseen, vec![(100, 130), (990, 1000), (2000, 2010)]);
        assert_eq!(filling.pinned_left_bytes(), 50 * 4096);
    }

    #[test]
    fn filling_of_too_many_ranges_looks_at_everything() {
        let mut filling = pinned(&[(0, 100_000)]);
        (0..RANGES_MAX as u64 + 2).for_each(|index| filling.look_at(index * 8, index * 8 + 4));
        assert_eq!(filling.unseen.len(), 1);
        assert_eq!(filling.pinned_left_bytes(), filling.pinned_bytes());
    }

    #[test]
    fn filling_takes_pins_first_and_pieces_end_at_multiples() {
        let mut filling = pinned(&[(200, 600)]);
        filling.look_at_all();
        filling.warm = [(5000, 5010), (10, 20)].into();
        let pieces: Vec<_> = core::iter::from_fn(|| filling.next()).collect();
        let pin = |first, end| (Why::Pinned, first, end);
        let warm = |first, end| (Why::WarmUp, first, end);
        assert_eq!(
            pieces,
            vec![
                pin(200, 256),
                pin(256, 512),
                pin(512, 600),
                warm(5000, 5010),
                warm(10, 20)
            ]
        );
    }
}
