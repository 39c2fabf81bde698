//! The loads that are compared.

use crate::fio::Load;
use crate::peers::Peer;

/// One load with its name.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name, as given to `--only`.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// Who is measured under it.
    pub peers: &'static [Peer],
    /// Whether it is about the processor, and so measured in memory as well, by those that run there.
    pub in_memory: bool,
    /// The load; span and seconds are filled in by the run.
    pub load: Load,
}

impl Profile {
    /// Whether it reads.
    pub fn reads(&self) -> bool {
        self.load.rw == "randread"
    }

    /// Whether it goes on until the log was overrun.
    pub fn overruns(&self) -> bool {
        self.name == SUSTAINED
    }
}

/// A line of the read cache: misses are aligned to it so that none is a neighbour's hit.
pub const CACHE_LINE_BYTES: u64 = 16 << 10;

/// Name of the profile that overruns the log.
pub const SUSTAINED: &str = "sustained";

const SERVERS_AND_DEVICE: &[Peer] = &[
    Peer::Device,
    Peer::DeviceDurable,
    Peer::Nbdkit,
    Peer::Qemu,
    Peer::OnWrite,
    Peer::OnFlush,
];
const READERS: &[Peer] = &[
    Peer::Device,
    Peer::Nbdkit,
    Peer::Qemu,
    Peer::DramHit,
    Peer::SsdHit,
    Peer::Miss,
];

/// All of them, in the order of the tables.
pub fn all() -> Vec<Profile> {
    let write = |depth| Load {
        depth,
        ..Load::random("randwrite", 0)
    };
    let read = |depth| Load {
        depth,
        ..Load::random("randread", 0)
    };
    let large = |depth| Load {
        block_bytes: 64 << 10,
        ..write(depth)
    };
    let of = |name, title, peers, in_memory, load| Profile {
        name,
        title,
        peers,
        in_memory,
        load,
    };
    vec![
        of(
            "randwrite-qd1",
            "4k random write, depth 1",
            SERVERS_AND_DEVICE,
            true,
            write(1),
        ),
        of(
            "randwrite-qd32",
            "4k random write, depth 32",
            SERVERS_AND_DEVICE,
            true,
            write(32),
        ),
        // Its requests come one at a time, since they are sent by a thread of their own.
        of(
            "randwrite-qd32-thread",
            "4k random write, depth 32, fio --thread",
            &[Peer::Nbdkit, Peer::Qemu, Peer::OnWrite, Peer::OnFlush],
            true,
            Load {
                thread: true,
                ..write(32)
            },
        ),
        of(
            "randread-qd1",
            "4k random read, depth 1",
            READERS,
            true,
            read(1),
        ),
        of(
            "randread-qd32",
            "4k random read, depth 32",
            READERS,
            true,
            read(32),
        ),
        of(
            "write64k-qd1",
            "64k random write, depth 1",
            &[Peer::OnWrite, Peer::Four],
            false,
            large(1),
        ),
        of(
            "write64k-qd16",
            "64k random write, depth 16",
            &[
                Peer::Device,
                Peer::DeviceDurable,
                Peer::Nbdkit,
                Peer::Qemu,
                Peer::OnWrite,
                Peer::OnFlush,
                Peer::Four,
            ],
            true,
            large(16),
        ),
        of(
            "zipf-qd32",
            "4k random write, zipf 1.2, depth 32",
            SERVERS_AND_DEVICE,
            false,
            Load {
                zipf: Some(1.2),
                ..write(32)
            },
        ),
        // Depth 1: fio 3.33 miscounts syncs at higher depths.
        of(
            "rate4000-sync32",
            "4k random write, 4000 a second, sync every 32",
            SERVERS_AND_DEVICE,
            false,
            Load {
                rate: Some(4000),
                fsync_every: Some(32),
                ..write(1)
            },
        ),
        of(
            SUSTAINED,
            "4k random write, depth 32, log overrun four times",
            &[
                Peer::Qemu,
                Peer::Sustained,
                Peer::SustainedMemory,
                Peer::SustainedFour,
            ],
            false,
            write(32),
        ),
        of(
            "read-beside",
            "4k random read, depth 4, by itself and beside writes that overrun the log",
            &[Peer::Sustained, Peer::Beside],
            false,
            read(4),
        ),
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
