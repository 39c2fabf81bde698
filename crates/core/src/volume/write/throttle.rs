//! Throttling of admissions by how full the log is, and how fast destage frees it: see the module above.

use super::log_fill;
use crate::base::io::Nanos;
use crate::log::write_log::WriteLog;
use crate::volume::direct::{DRAIN_FILL, DRAIN_RATE_BLOCKS_MIN};

/// Throttled admissions run ahead of their schedule by the time that destage needs for so many log
/// blocks, and then wait until they are back on it: let in one by one, each would be a span of its
/// own, which costs twice the log space and many times the CPU of a span for several.
const BURST_BLOCKS: f64 = 32.0;
/// Bounds of that time: a timer's granularity, and what a client may notice.
const BURST_MIN: Nanos = Nanos::from_micros(500);
const BURST_MAX: Nanos = Nanos::from_millis(5);
/// Log blocks a second that are admitted above the threshold while nothing is known of destage.
const RATE_BLOCKS_MIN: f64 = 256.0;

/// How fast the log is being emptied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Log blocks a second that destage frees; 0: that is not known.
    pub(super) rate_blocks: f64,
    /// Whether it is being emptied, and can be.
    pub(super) drains: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    /// When the next throttled write may go, and since when it is known.
    next: Nanos,
    /// Admissions have run ahead as far as they may, and wait for their schedule.
    held: bool,
}

impl Throttle {
    /// When the next throttled write may go, if that is not now.
    pub(super) fn holds_until(&self, now: Nanos) -> Option<Nanos> {
        (self.held && self.next > now).then_some(self.next)
    }

    /// How far throttled admissions may run ahead of their schedule.
    fn burst(rate_blocks: f64) -> Nanos {
        let nanos = BURST_BLOCKS / rate_blocks.max(RATE_BLOCKS_MIN) * 1e9;
        Nanos((nanos as u64).clamp(BURST_MIN.0, BURST_MAX.0))
    }

    /// 0 below the throttling threshold, rising to 1 at a full log.
    fn fill_above_threshold(log: &WriteLog, dirty_ratio_max: u8) -> f64 {
        let threshold = f64::from(dirty_ratio_max.min(95)) / 100.0;
        ((log_fill(log) - threshold) / (1.0 - threshold)).clamp(0.0, 1.0)
    }

    /// The same, while the log drains no less than makes it empty in the end.
    pub(super) fn fill(log: &WriteLog, dirty_ratio_max: u8, pace: Pace) -> f64 {
        let fill = Self::fill_above_threshold(log, dirty_ratio_max);
        if pace.drains && pace.rate_blocks > 0.0 {
            return fill.max(DRAIN_FILL);
        }
        fill
    }

    /// Move the next admission back by the time that destage needs for so many blocks.
    pub(super) fn schedule_next(&mut self, now: Nanos, fill: f64, blocks: u64, pace: Pace) {
        let rate_min = if pace.drains {
            DRAIN_RATE_BLOCKS_MIN
        } else {
            RATE_BLOCKS_MIN
        };
        let rate = pace.rate_blocks.max(rate_min) * (1.0 - fill) / fill;
        let nanos = (blocks as f64 / rate.max(1.0) * 1e9).min(1e9) as u64;
        self.next = self.next.max(now).plus(Nanos(nanos));
        self.held = self.next > now.plus(Self::burst(pace.rate_blocks));
    }
}
