//! What is told of a start while it is under way.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How far a start is with opening volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StartProgress {
    /// Volumes that it opens.
    pub volumes: u64,
    /// Those of them that it has not opened yet.
    pub left: u64,
    /// Since it began to.
    pub elapsed_ms: u64,
    /// How long these take at the rate of those that it has opened; null while it has opened none.
    pub left_ms: Option<u64>,
}
