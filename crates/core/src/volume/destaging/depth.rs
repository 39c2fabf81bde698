//! How many backend writes are under way for destage, and when something is so old that it has to go.
//!
//! The fuller the log is, the more: so a burst has the device nearly for itself, and under a long load destage becomes as
//! fast as it has to be. A generation gives its space back at its end, all at once. What of it is written already does not
//! press any more: if it did, each generation would become faster to its end, and the next one would wait. As it is,
//! destage settles at the depth by which as much is written to the backend as to the log.
//!
//! Writes begin several at a time, once there is room for half of the depth: fewer turns have to do with destage, and the
//! device is told of several at once.

use super::Destaging;
use crate::base::io::Nanos;
use crate::log::write_log::WriteLog;
use crate::volume::VolumeConfig;
use crate::volume::write::log_fill;

/// Destage at the pace of the deadline uses this share of its depth, as a divisor.
const IDLE_DEPTH_DIVISOR: usize = 4;
/// So many begin at once at most.
const TOGETHER_MAX: usize = 8;

impl Destaging {
    /// Whether something is so old that it is to be destaged.
    pub(super) fn is_aged(config: &VolumeConfig, log: &WriteLog, now: Nanos) -> bool {
        let oldest = log.oldest_since();
        oldest.is_some_and(|since| now >= since.plus(Self::age(config)))
    }

    /// Destage begins at this age: early enough to be done at the deadline.
    pub(in crate::volume) fn age(config: &VolumeConfig) -> Nanos {
        Nanos(config.dirty_age_max.0 / 2)
    }

    /// 0 while the log is filled up to `dirty_ratio_min`, rising to 1 at `dirty_ratio_max`.
    pub(super) fn pressure(config: &VolumeConfig, log: &WriteLog) -> f64 {
        Self::pressure_without(config, log, 0)
    }

    /// The same without so many blocks of the log.
    fn pressure_without(config: &VolumeConfig, log: &WriteLog, blocks: u64) -> f64 {
        let min = f64::from(config.dirty_ratio_min) / 100.0;
        let max = f64::from(config.dirty_ratio_max) / 100.0;
        let fill = log_fill(log) - blocks as f64 / log.prepared_blocks() as f64;
        let fill = fill.max(log.share().pressure());
        ((fill - min) / (max - min).max(0.01)).clamp(0.0, 1.0)
    }

    /// Items under way at most: all that are allowed when somebody waits, few for the deadline's sake, and between them
    /// by what the log holds that is not written.
    pub(super) fn depth_at(
        &self,
        now: Nanos,
        config: &VolumeConfig,
        log: &WriteLog,
        is_awaited: bool,
    ) -> usize {
        let depth = config.destage_depth_max.max(1);
        if is_awaited {
            return depth;
        }
        let aged = Self::is_aged(config, log, now);
        let floor = if aged { depth / IDLE_DEPTH_DIVISOR } else { 1 };
        let written = self.generation.plan().written_blocks();
        let pressed = (depth as f64 * Self::pressure_without(config, log, written)) as usize;
        pressed.max(floor).max(1)
    }

    /// How many may be under way now, if so many are and more are to begin.
    pub(super) fn depth_to_begin(&self, busy: usize) -> usize {
        let room = self.depth.saturating_sub(busy);
        if busy > 0 && room < self.depth.div_ceil(2).min(TOGETHER_MAX) {
            return busy;
        }
        self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::LogSuperblock;
    use crate::volume::tests::config;

    #[test]
    fn destaging_has_all_its_depth_when_somebody_waits_and_one_write_for_an_empty_log() {
        let config = config();
        let superblock = LogSuperblock::new(config.uuid, 1, config.log_bytes);
        let log = WriteLog::new(superblock, None);
        let destaging = Destaging::default();
        let depth = |is_awaited| destaging.depth_at(Nanos(0), &config, &log, is_awaited);
        assert_eq!(depth(false), 1, "nobody waits, and the log is empty");
        assert_eq!(depth(true), config.destage_depth_max);
    }

    #[test]
    fn destaging_begins_several_writes_once_there_is_room_for_half_of_its_depth() {
        let begins = |depth, busy| {
            let destaging = Destaging {
                depth,
                ..Destaging::default()
            };
            destaging.depth_to_begin(busy) - busy
        };
        assert_eq!([0, 1].map(|busy| begins(1, busy)), [1, 0]);
        assert_eq!([0, 1, 2, 3].map(|busy| begins(3, busy)), [3, 2, 0, 0]);
        assert_eq!([0, 4, 5, 8].map(|busy| begins(8, busy)), [8, 4, 0, 0]);
        assert_eq!([0, 56, 57].map(|busy| begins(64, busy)), [64, 8, 0]);
        assert_eq!(begins(2, 5), 0, "the depth has sunk");
    }
}
