//! How full the SSD tier becomes, and when it is emptied ahead of demand.
//!
//! ```text
//! idle ──more than ratio_max in use, or too few segments free──► evicting
//!   ▲──────────at most ratio_health in use, and enough free──────────┘
//! ```
//!
//! Eviction runs in the background, a segment at a time, so that a fill finds free segments. The marks
//! are soft: what is filled faster than it can be evicted goes beyond them as long as segments are free.

/// Free segments that eviction keeps ready, whatever the marks say.
pub const FREE_SEGMENTS_MIN: usize = 2;

/// Shares of the SSD tier in percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillMarks {
    /// Above this share in use, eviction begins.
    pub ratio_max: u8,
    /// It ends when no more than this is in use; not above the other.
    pub ratio_health: u8,
    /// Pins of all volumes take no more than this.
    pub pin_ratio_max: u8,
}

impl Default for FillMarks {
    fn default() -> Self {
        Self {
            ratio_max: 100,
            ratio_health: 100,
            pin_ratio_max: 50,
        }
    }
}

/// Whether the tier is being emptied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Eviction {
    pub marks: FillMarks,
    is_under_way: bool,
}

impl Eviction {
    /// Of so many segments, those that are free with this share in percent in use.
    fn free_at(segments: usize, ratio: u8) -> usize {
        let unused = usize::from(100 - ratio.min(100));
        (segments * unused).div_ceil(100).max(FREE_SEGMENTS_MIN)
    }

    /// With fewer free segments, of so many, eviction begins.
    pub fn free_min(self, segments: usize) -> usize {
        Self::free_at(segments, self.marks.ratio_max)
    }

    /// Whether another segment is to go, with `free` of `segments` free.
    pub fn is_due(&mut self, free: usize, segments: usize) -> bool {
        let begin = self.free_min(segments);
        let end = Self::free_at(segments, self.marks.ratio_health).max(begin);
        self.is_under_way = free < begin || (self.is_under_way && free < end);
        self.is_under_way
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_by_default_keeps_two_segments_free() {
        let mut eviction = Eviction::default();
        assert!(!eviction.is_due(2, 16));
        assert!(eviction.is_due(1, 16));
        assert!(!eviction.is_due(2, 16));
    }

    #[test]
    fn eviction_goes_on_from_the_upper_mark_to_the_lower() {
        let marks = FillMarks {
            ratio_max: 90,
            ratio_health: 60,
            ..FillMarks::default()
        };
        let mut eviction = Eviction {
            marks,
            ..Eviction::default()
        };
        assert!(!eviction.is_due(39, 100) && !eviction.is_due(10, 100));
        assert!(eviction.is_due(9, 100) && eviction.is_due(39, 100));
        assert!(!eviction.is_due(40, 100) && !eviction.is_due(39, 100));
    }
}
