//! What the cache knows of how hot the volume is.

use super::{Context, Volume};
use crate::base::io::Nanos;
use crate::cache::ReadCache;
use crate::cache::heat_map::Gathering;

/// Places of the cache that one step looks at: some 10 microseconds, or some 100 where all are aliases.
const STEP_PLACES: usize = 4096;
/// Pieces of a heat map that are looked for to see whether the cache still has it.
const SAMPLES: usize = 64;

impl Volume {
    /// Until the next step may be taken: a walk takes a small share of the time.
    pub const GATHER_PAUSE: Nanos = Nanos::from_millis(1);

    /// A heat map of the volume in the making, of which nothing is gathered yet.
    pub fn begin_gathering(&self, cache: &ReadCache) -> Gathering {
        Gathering::new(self.config.bytes, cache.line_blocks())
    }

    /// Gather a bounded part more; false: that was the last one.
    pub fn gather(&self, gathering: &mut Gathering, cache: &ReadCache) -> bool {
        let mut at = gathering.at;
        let more = cache.walk(&mut at, STEP_PLACES, |key, blocks, heat| {
            // What lies under the origin's number is the volume's where it was not written since.
            let is_own = key.volume() == self.config.number;
            let is_origins = Some(key.volume()) == self.origin();
            let first = key.block();
            if is_own || (is_origins && (first..first + blocks).any(|block| self.inherits(block))) {
                // A unit is no smaller than a line.
                gathering.see(first, heat);
            }
        });
        gathering.at = at;
        more
    }

    /// Whether the cache holds so little of these blocks, of which the first ones are the hottest, that it
    /// cannot be the one that they were hot in.
    pub(super) fn is_cold<'a>(
        &self,
        ranges: impl ExactSizeIterator<Item = &'a (u64, u64)>,
        cx: &Context<'_>,
    ) -> bool {
        let step = ranges.len().div_ceil(SAMPLES).max(1);
        let firsts = ranges.map(|range| range.0).step_by(step);
        let (mut looked, mut there) = (0, 0);
        for block in firsts.filter(|&block| block < self.whole_blocks()) {
            looked += 1;
            there += usize::from(self.is_promoted(block, cx));
        }
        there * 2 < looked
    }
}
