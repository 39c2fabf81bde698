//! One volume: routes requests over the write log, the read cache and the backend.

use alloc::rc::Rc;
use alloc::vec::Vec;

use crate::buf::Pool;
use crate::error::OpenError;
use crate::io::{Action, Completion, Nanos, Request, RequestId};
use crate::read_cache::ReadCache;

/// When a write counts as durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persist {
    /// Before its acknowledgement.
    OnWrite,
    /// At the client's next flush; what is not yet durable is bounded in bytes and age.
    OnFlush,
    /// On write until the client's first flush shows that it knows barriers, then on flush.
    Auto,
}

/// What a write gets when the log is full and the backend takes no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits.
    Wait,
    /// It fails with [`crate::error::RequestError::LogFull`].
    Error,
}

/// What a volume is and how it behaves.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// Number of the volume on its node, never reused: its identity in the read cache.
    pub number: u32,
    /// Identity of the volume everywhere.
    pub uuid: [u8; 16],
    /// Size, a multiple of 512.
    pub bytes: u64,
    /// Size of the log's region on its device, a multiple of 4096.
    pub log_bytes: u64,
    /// When a write counts as durable.
    pub persist: Persist,
    /// What a write gets when nothing can be taken.
    pub when_full: WhenFull,
    /// Most bytes acknowledged but not durable, under persist-on-flush.
    pub unpersisted_bytes_max: u64,
    /// Longest time that an acknowledged write stays not durable, under persist-on-flush.
    pub unpersisted_age_max: Nanos,
    /// Deadline of destage: the oldest dirty data is never meant to be older.
    pub dirty_age_max: Nanos,
    /// Below this share of the log in use, in percent, destage waits for data to age.
    pub dirty_ratio_min: u8,
    /// At this share of the log in use, in percent, writes begin to be slowed.
    pub dirty_ratio_max: u8,
    /// Backend writes in flight at most during destage.
    pub destage_depth_max: usize,
    /// A sequential read stream longer than this stops filling the read cache.
    pub sequential_cutoff_bytes: u64,
    /// Largest read-ahead of a sequential stream; 0 turns it off.
    pub read_ahead_bytes_max: u64,
    /// Memory for recently logged data, so that reading or destaging it needs no device.
    pub resident_bytes_max: u64,
    /// Whether the backend answers `BackendExtents`.
    pub backend_extents: bool,
}

/// What happens to a volume.
#[derive(Debug)]
pub enum Event {
    /// A client asks. One [`Action::Reply`] follows, now or later.
    Request {
        /// Echoed in the reply.
        id: RequestId,
        /// What is asked.
        request: Request,
    },
    /// One of the volume's actions ended.
    Completed(Completion),
    /// The end of a batch of events, or [`Volume::next_wakeup`] has come. The volume does its
    /// group work here: a driver must poll after every batch.
    Poll,
    /// Destage all that is dirty now, at full speed. Progress is in [`VolumeStats`].
    DestageAll,
    /// Return to destaging by policy.
    CancelDestageAll,
    /// Stop taking requests, make everything durable, with `destage` also destage everything, and
    /// close the log cleanly; the phase becomes [`Phase::Closed`].
    Close {
        /// Whether the backend must hold everything first.
        destage: bool,
    },
    /// Change the size. Shrinking needs an empty log beyond the new size: destage first.
    Resize {
        /// The new size, a multiple of 512.
        bytes: u64,
    },
    /// Change the behaviour; identity and sizes are kept.
    Reconfigure(VolumeConfig),
}

/// Where a volume is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Replaying the log; requests wait.
    Opening,
    /// It could not be opened; requests are refused.
    Failed(OpenError),
    /// Serving.
    Open,
    /// Finishing what was asked before `Close`.
    Closing,
    /// Everything is in place; the volume can be dropped.
    Closed,
}

/// The five states of a core. The first three serve, the last two refuse writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All is well.
    Healthy,
    /// Serving with the backend failing: data is kept in the log.
    Degraded,
    /// A log write failed: reads and destage go on, writes are refused until it is reopened.
    ReadOnly,
    /// Dirty data in the log is corrupt: destage has stopped before it.
    Inconsistent,
    /// Not open.
    Error,
}

/// Counters and gauges of one volume. Counters only grow while it is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// Requests answered: read, write, write-zeroes, discard, flush.
    pub reads: u64,
    /// Writes answered.
    pub writes: u64,
    /// Write-zeroes and discards answered.
    pub trims: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes read by clients.
    pub read_bytes: u64,
    /// Bytes written by clients.
    pub write_bytes: u64,
    /// 4 KiB blocks read from the log's data in memory or on its device.
    pub log_hit_blocks: u64,
    /// 4 KiB blocks read from DRAM.
    pub dram_hit_blocks: u64,
    /// 4 KiB blocks read from the SSD cache.
    pub ssd_hit_blocks: u64,
    /// 4 KiB blocks read from the backend for a client.
    pub miss_blocks: u64,
    /// 4 KiB blocks read ahead.
    pub read_ahead_blocks: u64,
    /// Clean cached blocks that failed their checksum and were fetched again.
    pub cache_corrupt_blocks: u64,
    /// Dirty blocks that failed their checksum.
    pub log_corrupt_blocks: u64,
    /// Blocks of the ring in use, control and padding included.
    pub log_used_blocks: u64,
    /// Blocks of the ring.
    pub log_ring_blocks: u64,
    /// Bytes written to the log's device.
    pub log_written_bytes: u64,
    /// Spans written.
    pub log_spans: u64,
    /// Bytes in the log that the backend does not have.
    pub dirty_bytes: u64,
    /// Age of the oldest of them.
    pub dirty_age: Nanos,
    /// Bytes acknowledged and not yet durable.
    pub unpersisted_bytes: u64,
    /// Bytes written to the backend by destage.
    pub destaged_bytes: u64,
    /// Dirty bytes that needed no backend write because a later write covered them.
    pub coalesced_bytes: u64,
    /// Sync points in the log since it was made.
    pub sync_points: u64,
    /// Of a running [`Event::DestageAll`]: bytes still to go.
    pub destage_all_remaining_bytes: u64,
    /// Requests waiting for room in the log.
    pub throttled_requests: u64,
    /// Time that requests have waited for room, in all.
    pub throttled_time: Nanos,
    /// Requests not answered yet.
    pub requests_in_flight: u64,
    /// Backend operations that failed.
    pub backend_errors: u64,
    /// Bytes of memory in the volume's indexes.
    pub index_bytes: u64,
    /// Bytes of buffers held for recently logged data.
    pub resident_bytes: u64,
    /// What the last opening replayed: entries.
    pub replayed_entries: u64,
    /// What the last opening replayed: bytes of data.
    pub replayed_bytes: u64,
    /// How long the last opening took.
    pub replay_time: Nanos,
}

/// What a volume works with during one step.
pub struct Context<'a> {
    /// The node's read cache.
    pub cache: &'a mut ReadCache,
    /// Where buffers come from.
    pub pool: &'a Rc<Pool>,
    /// Where effects go.
    pub actions: &'a mut Vec<Action>,
}

/// The state of one open volume.
#[derive(Debug)]
pub struct Volume {
    config: VolumeConfig,
}

impl Volume {
    /// The first superblock of a new log and the number of zeroed bytes after which it is one:
    /// block 0 gets the superblock, everything else in the region is zero. `log` is random.
    pub fn format_log(config: &VolumeConfig, log: u64) -> [u8; 4096] {
        let _ = (config, log);
        todo!()
    }

    /// Begin to open a volume whose log was made by [`Self::format_log`].
    pub fn open(config: VolumeConfig, now: Nanos, cx: &mut Context<'_>) -> Self {
        let _ = (now, cx);
        Self { config }
    }

    /// Take one event; push what follows from it.
    pub fn step(&mut self, now: Nanos, event: Event, cx: &mut Context<'_>) {
        let _ = (now, event, cx);
        todo!()
    }

    /// When [`Event::Poll`] is due at the latest, if nothing happens before.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        todo!()
    }

    /// Where the volume is in its life.
    pub fn phase(&self) -> Phase {
        todo!()
    }

    /// Which of the five states it is in.
    pub fn state(&self) -> State {
        todo!()
    }

    /// What it is and how it behaves.
    pub fn config(&self) -> &VolumeConfig {
        &self.config
    }

    /// Counters and gauges.
    pub fn stats(&self, now: Nanos) -> VolumeStats {
        let _ = now;
        todo!()
    }

    /// Assert what must always hold. Cheap checks run after every step; this runs them all.
    pub fn check_invariants(&self) {}
}
