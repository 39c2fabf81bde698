//! The loads that are compared.

use crate::fio::Load;

/// One load with its name.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name, as given to `--only`.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// The load; span and seconds are filled in by the run.
    pub load: Load,
}

impl Profile {
    /// Whether it reads.
    pub fn reads(&self) -> bool {
        self.load.rw == "randread"
    }
}

/// A line of the read cache: misses are aligned to it so that none is a neighbour's hit.
pub const CACHE_LINE_BYTES: u64 = 16 << 10;

/// All of them, in the order of the tables.
pub fn all() -> Vec<Profile> {
    let write = || Load::random("randwrite", 0);
    let read = || Load::random("randread", 0);
    vec![
        Profile {
            name: "randwrite-qd1",
            title: "4k random write, depth 1",
            load: write(),
        },
        Profile {
            name: "randwrite-qd32",
            title: "4k random write, depth 32",
            load: Load {
                depth: 32,
                ..write()
            },
        },
        Profile {
            name: "randread-qd1",
            title: "4k random read, depth 1",
            load: read(),
        },
        Profile {
            name: "randread-qd32",
            title: "4k random read, depth 32",
            load: Load {
                depth: 32,
                ..read()
            },
        },
        Profile {
            name: "write64k-qd16",
            title: "64k random write, depth 16",
            load: Load {
                block_bytes: 64 << 10,
                depth: 16,
                ..write()
            },
        },
        Profile {
            name: "zipf-qd32",
            title: "4k random write, zipf 1.2, depth 32",
            load: Load {
                depth: 32,
                zipf: Some(1.2),
                ..write()
            },
        },
        // Depth 1: fio 3.33 miscounts syncs at higher depths.
        Profile {
            name: "rate4000-sync32",
            title: "4k random write, depth 1, 4000 a second, sync every 32",
            load: Load {
                rate: Some(4000),
                fsync_every: Some(32),
                ..write()
            },
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_with_syncs_have_depth_one() {
        for profile in all() {
            assert!(
                profile.load.fsync_every.is_none() || profile.load.depth == 1,
                "{}",
                profile.name
            );
        }
    }
}
