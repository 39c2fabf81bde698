//! What the tiers know of how hot their content is, and how much more they hold.

use super::ReadCache;
use crate::base::io::BlockKey;
use crate::base::limits::BLOCK_BYTES;
use crate::cache::heat_map::Heat;

impl ReadCache {
    /// Look at so many places of both tiers from the place `at` on, and tell of each address that is found
    /// there: its first block, how many there are and how hot they are. False: that was the end.
    pub fn walk(
        &self,
        at: &mut u64,
        places: usize,
        mut tell: impl FnMut(BlockKey, u64, Heat),
    ) -> bool {
        let frames = self.dram.frames();
        let places_of_ssd = self.with_ssd(|ssd| ssd.store.index.places()).unwrap_or(0);
        let end = frames + places_of_ssd;
        let first = *at as usize;
        let stop = first.saturating_add(places).min(end);
        for place in first..stop {
            match place.checked_sub(frames) {
                None => {
                    if let Some((key, uses)) = self.dram.used_at(place) {
                        tell(key, 1, if uses > 0 { Heat::Hot } else { Heat::Warm });
                    }
                }
                Some(place) => {
                    let used = self.with_ssd(|ssd| ssd.used_at(place)).flatten();
                    if let Some((key, uses)) = used {
                        let heat = match uses {
                            0 => Heat::Cool,
                            1 => Heat::Warm,
                            _ => Heat::Hot,
                        };
                        tell(key, self.line_blocks, heat);
                    }
                }
            }
        }
        *at = stop as u64;
        stop < end
    }

    /// Whether something can be brought in that nobody has asked for: there is no SSD tier, or it takes lines.
    pub fn can_warm_up(&self) -> bool {
        (self.with_ssd(super::ssd::Ssd::takes_lines)).unwrap_or(self.dram.frames() > 0)
    }

    /// Whether the tier that promotions fill has room left for so many blocks, so that nothing else has to go.
    pub fn has_free_room(&self, blocks: u64) -> bool {
        (self.with_ssd(super::ssd::Ssd::has_free_segments))
            .unwrap_or_else(|| self.dram.used() as u64 + blocks <= self.dram.frames() as u64)
    }

    /// Bytes that the tier holds that promotions fill.
    pub fn room_bytes(&self) -> u64 {
        let lines = self.with_ssd(|ssd| ssd.room_lines() as u64);
        let blocks = lines.map_or(self.dram.frames() as u64, |lines| lines * self.line_blocks);
        blocks * BLOCK_BYTES as u64
    }
}
