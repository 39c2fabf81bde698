//! What of a volume is to be changed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::value::Value;

/// Where a volume is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "`shard` takes the number of a shard, from 0, or \"auto\""
)]
pub enum ShardChoice {
    /// On the shard of this number, where it goes at once.
    On(u64),
    /// Wherever there is least to do when it is opened. It stays where it is until then.
    Auto(Auto),
}

/// What is left to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// It is.
    Auto,
}

/// A change of settings; `null` returns a key to the node's.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetVolume {
    /// What to change.
    #[serde(default)]
    pub settings: BTreeMap<String, Option<Value>>,
    /// The thread of the data path (shard) that the volume moves to while its clients go on, and is opened on from now
    /// on; `auto` takes that back. One that is not open is opened there next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardChoice>,
}

/// A change of size.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// The new size.
    pub bytes: u64,
    /// Whether data beyond the new size may be lost.
    #[serde(default)]
    pub shrink: bool,
}
