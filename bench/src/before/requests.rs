//! What a run asked of an object store, and what that is for a GiB.

use serde::Serialize;
use serde_json::Value;

use super::direct;
use crate::failure::{Context, Result};
use crate::fio::Load;

/// Requests, as the node counts them; those that failed included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// Puts of anything.
    pub puts: u64,
    /// Puts of batches of written blocks; the direct client's only kind.
    pub puts_data: u64,
    /// Puts of parts of a map.
    pub puts_map: u64,
    /// Puts of manifests.
    pub puts_manifest: u64,
    /// Gets.
    pub gets: u64,
    /// Deletes.
    pub deletes: u64,
    /// Pages of listings.
    pub lists: u64,
    /// Bytes put.
    pub put_bytes: u64,
    /// Bytes got.
    pub get_bytes: u64,
}

impl Requests {
    /// What `hdcs volume show --json` says.
    pub fn of(volume: &Value) -> Result<Self> {
        let store = &volume["counters"]["store"];
        let count = |name: &str| {
            let counted = store[name].as_u64();
            counted.context(format_args!(
                "hdcs volume show --json: no counters.store.{name}"
            ))
        };
        Ok(Self {
            puts: count("puts")?,
            puts_data: count("puts_data")?,
            puts_map: count("puts_map")?,
            puts_manifest: count("puts_manifest")?,
            gets: count("gets")?,
            deletes: count("deletes")?,
            lists: count("lists")?,
            put_bytes: count("put_bytes")?,
            get_bytes: count("get_bytes")?,
        })
    }

    /// What a direct client asked for so many requests of its load: one each.
    pub fn direct(load: &Load, requests: u64) -> Self {
        let bytes = requests * load.block_bytes;
        if direct::reads(load) {
            return Self {
                gets: requests,
                get_bytes: bytes,
                ..Self::default()
            };
        }
        Self {
            puts: requests,
            puts_data: requests,
            put_bytes: bytes,
            ..Self::default()
        }
    }

    /// What came after an earlier moment.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            puts: self.puts - before.puts,
            puts_data: self.puts_data - before.puts_data,
            puts_map: self.puts_map - before.puts_map,
            puts_manifest: self.puts_manifest - before.puts_manifest,
            gets: self.gets - before.gets,
            deletes: self.deletes - before.deletes,
            lists: self.lists - before.lists,
            put_bytes: self.put_bytes - before.put_bytes,
            get_bytes: self.get_bytes - before.get_bytes,
        }
    }
}

/// So many, while clients moved `bytes`, for each GiB of them.
pub fn for_each_gib(count: u64, bytes: u64) -> f64 {
    count as f64 * f64::from(1 << 30) / bytes.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_what_the_node_says_since_then() {
        let said = |puts: u64| {
            serde_json::json!({"counters": {"store": {"puts": puts, "puts_data": 3, "puts_map": 2,
                "puts_manifest": 1, "gets": 4, "deletes": 5, "lists": 6, "put_bytes": 7, "get_bytes": 8}}})
        };
        let (before, after) = (Requests::of(&said(6)), Requests::of(&said(16)));
        let since = after.unwrap().since(&before.unwrap());
        assert_eq!((since.puts, since.puts_data, since.gets), (10, 0, 0));
        let failure = Requests::of(&serde_json::json!({"counters": {}})).unwrap_err();
        assert!(failure.to_string().contains("counters.store.puts"));
    }

    #[test]
    fn direct_client_asks_once_for_each_request() {
        let put = Requests::direct(&Load::random("randwrite", 1 << 20), 10);
        assert_eq!((put.puts, put.put_bytes, put.gets), (10, 40960, 0));
        let got = Requests::direct(&Load::random("randread", 1 << 20), 10);
        assert_eq!((got.puts, got.gets, got.get_bytes), (0, 10, 40960));
    }

    #[test]
    fn count_is_scaled_to_a_gib() {
        assert!((for_each_gib(10, 1 << 29) - 20.0).abs() < 1e-9);
        assert!(for_each_gib(0, 0).abs() < 1e-9);
    }
}
