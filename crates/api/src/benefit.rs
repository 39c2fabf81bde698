//! What the read cache is worth to a volume.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What reading a volume costs, and how the read cache weighs its blocks for it.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct VolumeBenefit {
    /// Mean time of a client's read of one line from the backend, of late; left out before the first.
    pub miss_us: Option<f64>,
    /// Mean time of reading one block from the SSD tier, of all volumes.
    pub ssd_hit_us: Option<f64>,
    /// How many times as long its blocks in DRAM are held on to as the mean there; 1 within a factor of two.
    pub dram_weight: f64,
    /// The same of its lines in the SSD tier.
    pub ssd_weight: f64,
}
