//! What a device does with its time: a bus that everything passes, channels that work side by side, and a flush.
//!
//! 1. What is submitted passes the bus in the order of submission, which is the order of time.
//! 2. One flush is under way at a time. Those that are asked for meanwhile wait, and are one, as in the block layer of
//!    the kernel.
//! 3. A flush takes the longer the more was written since the last one began.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hdcs_core::base::io::Nanos;

/// How a write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// By a flush of the device's volatile cache behind it, which takes so long beside what it has to write back.
    Flush {
        /// Without anything to write back.
        latency: Nanos,
        /// Bytes written back a second.
        bytes_s: u64,
    },
    /// By a write that goes past the volatile cache, and takes so much longer. A flush of all of it takes as long.
    Fua {
        /// Beside the latency of a plain write.
        latency: Nanos,
    },
    /// The same where a write that goes past the cache takes longer than a flush.
    SlowFua {
        /// Of such a write, beside the latency of a plain one.
        latency: Nanos,
        /// Of a flush.
        flush: Nanos,
    },
    /// It is durable on completion: power-loss protection. A flush costs nothing but its way.
    Protected,
}

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceModel {
    /// How writes become durable.
    pub durability: Durability,
    /// Time of one transfer, beside that on the bus.
    pub latency: Nanos,
    /// Transfers at a time.
    pub channels: usize,
    /// Bytes a second at most.
    pub bytes_s: u64,
    /// Transfers a second at most.
    pub iops: u64,
}

impl DeviceModel {
    /// A disk of a cloud: a flush of 100 µs behind each durable write, no FUA.
    pub fn flushed() -> Self {
        Self {
            durability: Durability::Flush {
                latency: Nanos::from_micros(100),
                bytes_s: 4 << 30,
            },
            latency: Nanos::from_micros(60),
            channels: 64,
            bytes_s: 1 << 30,
            iops: 250_000,
        }
    }

    /// An NVMe drive with a volatile cache, and FUA.
    pub fn fua() -> Self {
        Self {
            durability: Durability::Fua {
                latency: Nanos::from_micros(60),
            },
            latency: Nanos::from_micros(20),
            channels: 64,
            bytes_s: 2 << 30,
            iops: 400_000,
        }
    }

    /// A cheap drive, whose FUA is slower than its flush.
    pub fn slow_fua() -> Self {
        Self {
            durability: Durability::SlowFua {
                latency: Nanos::from_micros(900),
                flush: Nanos::from_micros(200),
            },
            ..Self::fua()
        }
    }

    /// A drive whose cache outlives a loss of power.
    pub fn protected() -> Self {
        Self {
            durability: Durability::Protected,
            latency: Nanos::from_micros(10),
            channels: 64,
            bytes_s: 3 << 30,
            iops: 600_000,
        }
    }

    /// Memory.
    pub fn memory() -> Self {
        Self {
            durability: Durability::Protected,
            latency: Nanos::from_micros(2),
            channels: 16,
            bytes_s: 8 << 30,
            iops: 4_000_000,
        }
    }

    /// Something behind a network, that does so many operations a second.
    pub fn remote(latency: Nanos, iops: u64) -> Self {
        Self {
            durability: Durability::Flush {
                latency: Nanos(latency.0 * 2),
                bytes_s: u64::MAX,
            },
            latency,
            channels: 256,
            bytes_s: 1 << 30,
            iops,
        }
    }
}

/// A device at work.
#[derive(Debug)]
pub(super) struct Device {
    model: DeviceModel,
    bus_free: u64,
    /// When each channel is free.
    channels: BinaryHeap<Reverse<u64>>,
    unflushed_bytes: u64,
    flush_ends: u64,
    /// When the flush ends that those wait for that were asked for during this one.
    next_flush_ends: Option<u64>,
}

impl Device {
    pub(super) fn new(model: DeviceModel) -> Self {
        Self {
            model,
            bus_free: 0,
            channels: (0..model.channels).map(|_| Reverse(0)).collect(),
            unflushed_bytes: 0,
            flush_ends: 0,
            next_flush_ends: None,
        }
    }

    /// When a read or write of so many bytes ends, which is submitted now.
    pub(super) fn transfer(&mut self, now: Nanos, bytes: u64, is_write: bool) -> Nanos {
        self.transfer_for(now, bytes, is_write, Nanos(0))
    }

    /// The same of a durable write, by a call that flushes if so, and otherwise by what the device has. The second part:
    /// whether a flush has to be asked for at that time.
    pub(super) fn write_durably(&mut self, now: Nanos, bytes: u64, flushes: bool) -> (Nanos, bool) {
        match self.model.durability {
            _ if flushes => (self.transfer(now, bytes, true), true),
            Durability::Flush { .. } => (self.transfer(now, bytes, true), true),
            Durability::Fua { latency } | Durability::SlowFua { latency, .. } => {
                (self.transfer_for(now, bytes, false, latency), false)
            }
            Durability::Protected => (self.transfer(now, bytes, false), false),
        }
    }

    fn transfer_for(&mut self, now: Nanos, bytes: u64, is_write: bool, more: Nanos) -> Nanos {
        let model = self.model;
        let by_bytes = (u128::from(bytes) * 1_000_000_000 / u128::from(model.bytes_s)) as u64;
        let on_bus = by_bytes.max(1_000_000_000 / model.iops);
        self.bus_free = self.bus_free.max(now.0) + on_bus;
        let Reverse(free) = self.channels.pop().expect("a device has channels");
        let end = self.bus_free.max(free) + model.latency.0 + more.0;
        self.channels.push(Reverse(end));
        if is_write {
            self.unflushed_bytes += bytes;
        }
        Nanos(end)
    }

    /// When a flush ends that is asked for now.
    pub(super) fn flush(&mut self, now: Nanos) -> Nanos {
        if let Some(next) = self.next_flush_ends
            && self.flush_ends <= now.0
        {
            self.flush_ends = next;
            self.next_flush_ends = None;
        }
        if self.flush_ends <= now.0 {
            self.flush_ends = now.0 + self.flush_time();
            return Nanos(self.flush_ends);
        }
        if let Some(next) = self.next_flush_ends {
            return Nanos(next);
        }
        let next = self.flush_ends + self.flush_time();
        self.next_flush_ends = Some(next);
        Nanos(next)
    }

    fn flush_time(&mut self) -> u64 {
        let bytes = u128::from(std::mem::take(&mut self.unflushed_bytes));
        match self.model.durability {
            Durability::Flush { latency, bytes_s } => {
                latency.0 + (bytes * 1_000_000_000 / u128::from(bytes_s)) as u64
            }
            Durability::Fua { latency } => latency.0 + self.model.latency.0,
            Durability::SlowFua { flush, .. } => flush.0,
            Durability::Protected => self.model.latency.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(nanos: Nanos) -> u64 {
        nanos.0 / 1000
    }

    #[test]
    fn device_is_bounded_by_its_bus_and_its_channels() {
        let model = DeviceModel {
            channels: 2,
            latency: Nanos::from_micros(100),
            iops: 100_000,
            ..DeviceModel::flushed()
        };
        let mut device = Device::new(model);
        let ends: Vec<u64> = (0..4)
            .map(|_| micros(device.transfer(Nanos(0), 4096, true)))
            .collect();
        assert_eq!(ends, [110, 120, 210, 220]);
        let large = device.transfer(Nanos::from_millis(1), 1 << 30, false);
        assert_eq!(large.0 / 1_000_000, 1001, "a GiB takes a second");
    }

    #[test]
    fn device_flushes_once_for_all_that_ask_meanwhile() {
        let mut device = Device::new(DeviceModel::flushed());
        let at = |micros| Nanos::from_micros(micros);
        let asked = [0, 10, 50, 110, 250, 400];
        let ends: Vec<u64> = asked
            .iter()
            .map(|&time| micros(device.flush(at(time))))
            .collect();
        assert_eq!(ends, [100, 200, 200, 300, 400, 500]);
    }

    #[test]
    fn device_takes_longer_to_flush_the_more_was_written() {
        let mut device = Device::new(DeviceModel::flushed());
        device.transfer(Nanos(0), 4 << 20, true);
        let end = device.flush(Nanos::from_millis(10));
        assert_eq!(micros(end), 10_000 + 100 + 976);
    }
}
