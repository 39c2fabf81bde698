//! How hot the lines are, and how many more fit.

use super::Ssd;
use crate::base::io::BlockKey;
use crate::cache::marks::FREE_SEGMENTS_MIN;

impl Ssd {
    /// The address in one of the places of the index, and how often its line was used of late.
    pub fn used_at(&self, place: usize) -> Option<(BlockKey, u8)> {
        if !self.is_ready_phase() {
            return None;
        }
        let (key, line) = self.store.index.address_at(place)?;
        Some((BlockKey(key), self.store.index.uses(line)))
    }

    /// Whether two more segments can be opened, one for each stream, before anything is evicted.
    pub fn has_free_segments(&self) -> bool {
        let kept = self.evictor.free_min(self.store.segments.len());
        self.store.segments.free() > kept + FREE_SEGMENTS_MIN
    }

    /// Lines, stored as they are, that the tier holds before anything is evicted, but for the segments that are being
    /// filled.
    pub fn room_lines(&self) -> usize {
        let kept = self.evictor.free_min(self.store.segments.len()) + FREE_SEGMENTS_MIN;
        self.store.segments.len().saturating_sub(kept) * self.store.layout.plain_lines
    }
}
