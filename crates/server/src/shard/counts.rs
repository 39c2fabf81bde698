//! What a shard counts of its own work. Plain integers that the data path adds to, with times that it reads anyway; what
//! the kernel knows of the thread is asked when somebody wants a report.

use std::time::Duration;

use hdcs_core::base::io::Nanos;
use hdcs_device::ring::RingCounts;

/// Counters of the data path since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardCounts {
    /// Turns of the loop.
    pub turns: u64,
    /// What other threads told the shard: commands of the control plane and of other shards, and that the SSD tier or
    /// memory has changed.
    pub messages: u64,
    /// Receives of connections that ended.
    pub receives: u64,
    /// Sends that ended.
    pub sends: u64,
    /// Replies that were sent whole.
    pub replies: u64,
    /// From the turns in which the sending of replies began until those in which it ended, all replies together.
    pub reply_time: Nanos,
}

/// What the kernel has counted of the thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadCounts {
    /// How often it slept and was woken.
    pub wakeups: u64,
    /// Processor time in the program.
    pub user: Duration,
    /// The same in the kernel.
    pub system: Duration,
}

impl ThreadCounts {
    /// Those of the thread that asks.
    pub fn of_this_thread() -> Self {
        // SAFETY: rusage is plain integers, for which zero is valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to a live local. Nothing can be wrong with the constant; if it were, zeroes stay.
        unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
        let time = |time: libc::timeval| {
            Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
        };
        Self {
            wakeups: usage.ru_nvcsw as u64,
            user: time(usage.ru_utime),
            system: time(usage.ru_stime),
        }
    }
}

/// All of that.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopReport {
    /// Of the loop.
    pub shard: ShardCounts,
    /// Of its ring.
    pub ring: RingCounts,
    /// Of its thread.
    pub thread: ThreadCounts,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_that_sleeps_is_woken() {
        let before = ThreadCounts::of_this_thread();
        std::thread::sleep(Duration::from_millis(1));
        let after = ThreadCounts::of_this_thread();
        assert!(after.wakeups > before.wakeups);
        assert!(after.user + after.system >= before.user + before.system);
    }
}
