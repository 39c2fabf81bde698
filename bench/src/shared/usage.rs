//! What a run used of the machine: its processors, the shard's thread, and the device.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use crate::failure::{Context, Result};

/// Shares from 0 to 1, and a rate.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Usage {
    /// Of all processors, the time that they were not idle.
    pub processors: f64,
    /// Of one processor, the time that the shard's thread had it.
    pub shard: f64,
    /// The time that the device had something to do.
    pub device: f64,
    /// MB written to the device a second.
    pub device_mb_s: f64,
}

/// The counters at one moment.
#[derive(Debug)]
pub struct Meter {
    at: Instant,
    ticks_idle: f64,
    ticks: f64,
    shard_ticks: f64,
    device_ms: f64,
    device_sectors: f64,
}

impl Meter {
    /// Now, of a node and of the device that a directory is on.
    pub fn read(pid: u32, directory: &Path) -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).context(path);
        let stat = read("/proc/stat")?;
        let first = stat.lines().next().context("/proc/stat is empty")?;
        let ticks = numbers(first, 1);
        // user nice system idle iowait irq softirq steal; guest time is in user time already.
        let ticks = &ticks[..ticks.len().min(8)];
        let mut shard_ticks = 0.0;
        let tasks = format!("/proc/{pid}/task");
        for task in fs::read_dir(&tasks).context(&tasks)? {
            let path = task.context(&tasks)?.path().join("stat");
            // A thread may have ended meanwhile.
            let Ok(text) = fs::read_to_string(&path) else {
                continue;
            };
            if let Some((name, rest)) = text.rsplit_once(')')
                && name.contains("(hdcs-shard")
            {
                let fields = numbers(rest, 2);
                shard_ticks += fields.iter().skip(10).take(2).sum::<f64>();
            }
        }
        let device = fs::metadata(directory).context(directory.display())?.dev();
        let device = [libc::major(device), libc::minor(device)].map(f64::from);
        let disks = read("/proc/diskstats")?;
        let disk = disks.lines().find_map(|line| {
            let place = numbers(line, 0);
            (place.get(..2) == Some(&device)).then(|| numbers(line, 3))
        });
        // Some file systems are on no device of their own.
        let disk = disk.unwrap_or_default();
        let of_disk = |field: usize| disk.get(field).copied().unwrap_or(0.0);
        Ok(Self {
            at: Instant::now(),
            ticks_idle: ticks.iter().skip(3).take(2).sum(),
            ticks: ticks.iter().sum(),
            shard_ticks,
            device_ms: of_disk(9),
            device_sectors: of_disk(6),
        })
    }

    /// What was used from this moment until another.
    pub fn until(&self, end: &Self) -> Usage {
        let seconds = (end.at - self.at).as_secs_f64();
        // SAFETY: sysconf reads constants.
        let tick_hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
        let idle = (end.ticks_idle - self.ticks_idle) / (end.ticks - self.ticks).max(1.0);
        Usage {
            processors: 1.0 - idle,
            shard: (end.shard_ticks - self.shard_ticks) / tick_hz / seconds,
            device: (end.device_ms - self.device_ms) / 1000.0 / seconds,
            device_mb_s: (end.device_sectors - self.device_sectors) * 512.0 / 1e6 / seconds,
        }
    }
}

/// The numbers of a line after its first words, up to what is none.
fn numbers(line: &str, skip: usize) -> Vec<f64> {
    let words = line.split_whitespace().skip(skip);
    words.map_while(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_line_end_at_a_word() {
        assert_eq!(numbers("cpu 1 2 3", 1), [1.0, 2.0, 3.0]);
        assert_eq!(numbers(" 253 0 vda 9 8", 0), [253.0, 0.0]);
        assert_eq!(numbers(" 253 0 vda 9 8", 3), [9.0, 8.0]);
    }

    #[test]
    fn busy_processor_shows() {
        let directory = tempfile::tempdir().unwrap();
        let before = Meter::read(std::process::id(), directory.path()).unwrap();
        let begin = Instant::now();
        let mut sum = 0u64;
        while begin.elapsed().as_millis() < 200 {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
        }
        let after = Meter::read(std::process::id(), directory.path()).unwrap();
        let used = before.until(&after);
        assert!(used.processors > 0.0 && used.processors <= 1.0, "{used:?}");
    }
}
