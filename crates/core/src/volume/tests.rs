//! What the tests of a volume's machines need beside them.

use super::{Discard, LogFailure, Persist, Policy, VolumeConfig, WhenFull};
use crate::base::codec::{Codec, Method};
use crate::base::io::Nanos;
use crate::base::limits::LOG_BYTES_MIN;

/// No compression.
#[derive(Debug)]
struct Plain;

impl Codec for Plain {
    fn compress(&self, _: Method, _: &[u8], _: &mut [u8]) -> Option<usize> {
        None
    }

    fn decompress(&self, _: Method, _: &[u8], _: &mut [u8]) -> bool {
        false
    }
}

/// A small volume under write-back.
pub(super) fn config() -> VolumeConfig {
    VolumeConfig {
        number: 1,
        uuid: [7; 16],
        bytes: 16 << 20,
        log_bytes: LOG_BYTES_MIN,
        policy: Policy::WriteBack,
        persist: Persist::OnWrite,
        compression: None,
        codec: &Plain,
        when_full: WhenFull::Wait,
        log_failure: LogFailure::PassThrough,
        discard: Discard::Pass,
        unpersisted_bytes_max: 4 << 20,
        unpersisted_age_max: Nanos::from_millis(50),
        dirty_age_max: Nanos::from_millis(5_000),
        dirty_ratio_min: 30,
        dirty_ratio_max: 70,
        destage_depth_max: 16,
        sequential_cutoff_bytes: 4 << 20,
        promote_hits: 1,
        fill_rate_max_bytes_s: 1 << 30,
        read_ahead_bytes_max: 0,
        log_entries_max: u64::MAX,
        resident_bytes_max: 1 << 20,
        backend_extents: false,
        backend_atomic: false,
        backend_answer_max: Nanos::from_millis(5_000),
        log_answer_max: Nanos::from_millis(5_000),
    }
}
