//! Whether the device itself stalled during a run. Disks of shared machines are throttled in bursts, and a figure that
//! was measured meanwhile says nothing about who was measured.
//!
//! Two things are looked at, neither of which depends on who is measured: what the kernel counts of the device while a
//! load runs (a stall is a time in which it had something to do and ended nothing), and durable writes just before and
//! after (beside the median of all such probes of the run).

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::bars::median;
use crate::failure::{Context, Result};

/// How often the kernel's counters are read.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);
/// A device that ends nothing for so long although it has something to do has stalled.
const STALL_MS: u64 = 100;
/// Durable writes of one probe go on for so long.
const PROBE_TIME: Duration = Duration::from_millis(150);
/// A probe that is so many times slower than the median of the run was throttled.
const PROBE_RATIO_MAX: f64 = 3.0;
/// Probes without which a median says nothing.
const PROBES_MIN: usize = 4;
/// What a probe writes at once, and how it is aligned.
const BLOCK_BYTES: usize = 4096;
/// Of the file that probes write to.
const PROBE_BLOCKS: u64 = 256;

/// The kernel's counters of a device at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moment {
    at_ms: u64,
    /// Reads, writes, discards and flushes that have ended.
    ended: u64,
    under_way: u64,
}

/// Counters of the device `major:minor` in `/proc/diskstats`.
fn counters(text: &str, device: (u32, u32)) -> Option<(u64, u64)> {
    let line = text.lines().find(|line| {
        let mut words = line.split_whitespace();
        let mut number = || words.next().and_then(|word| word.parse().ok());
        number() == Some(device.0) && number() == Some(device.1)
    })?;
    let fields: Vec<u64> = line
        .split_whitespace()
        .skip(3)
        .map_while(|word| word.parse().ok())
        .collect();
    // Documentation/admin-guide/iostats.rst. Discards came with Linux 4.18, flushes with 5.5.
    let ended = [0, 4, 11, 15].map(|field| fields.get(field).copied().unwrap_or(0));
    Some((ended.iter().sum(), *fields.get(8)?))
}

/// The longest time in which it had something to do and ended nothing, in milliseconds.
fn longest_stall_ms(moments: &[Moment]) -> u64 {
    let (mut longest, mut since) = (0, None);
    for pair in moments.windows(2) {
        let [before, after] = pair else { continue };
        let stands = before.under_way > 0 && after.under_way > 0 && before.ended == after.ended;
        since = stands.then(|| since.unwrap_or(before.at_ms));
        longest = longest.max(since.map_or(0, |since| after.at_ms - since));
    }
    longest
}

/// What watches the device that some directory is on.
#[derive(Debug)]
pub struct Watch {
    /// None: it is on no device of the kernel's, such as memory.
    device: Option<(u32, u32)>,
    probe: std::path::PathBuf,
    /// Microseconds of a durable write, of each probe so far.
    probes: Vec<f64>,
}

impl Watch {
    /// For this directory.
    pub fn of(directory: &Path) -> Result<Self> {
        let number = fs::metadata(directory).context(directory.display())?.dev();
        let device = (libc::major(number), libc::minor(number));
        let disks = fs::read_to_string("/proc/diskstats").unwrap_or_default();
        Ok(Self {
            device: counters(&disks, device).map(|_| device),
            probe: directory.join("probe"),
            probes: Vec::new(),
        })
    }

    /// Run something; with it, for how long the device had ended nothing meanwhile although it had something to do, in
    /// milliseconds.
    pub fn during<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
        let Some(device) = self.device else {
            return Ok((run()?, 0));
        };
        let is_over = AtomicBool::new(false);
        let (result, stall_ms) = thread::scope(|scope| {
            let watching = scope.spawn(|| watch(device, &is_over));
            let result = run();
            is_over.store(true, Ordering::Relaxed);
            (result, watching.join().unwrap_or_default())
        });
        Ok((result?, stall_ms))
    }

    /// Write durably for a moment, while nothing else does: by the mean, one write in microseconds.
    pub fn probe(&mut self) -> Result<f64> {
        if self.device.is_none() {
            return Ok(0.0);
        }
        let micros = durable_write_us(&self.probe).context(self.probe.display())?;
        self.probes.push(micros);
        Ok(micros)
    }

    /// Whether the device had stalled in a run, by what was seen during it and the probes before and after.
    pub fn verdict(&self, stall_ms: u64, probes: [f64; 2]) -> Option<String> {
        if stall_ms >= STALL_MS {
            return Some(format!(
                "the device ended nothing for {stall_ms} ms although it had something to do"
            ));
        }
        slow(probes[0].max(probes[1]), &self.probes)
    }
}

/// Whether a probe was so slow that the device must have been throttled.
fn slow(micros: f64, probes: &[f64]) -> Option<String> {
    let usual = median(probes.iter().copied());
    let is_slow = probes.len() >= PROBES_MIN && micros > PROBE_RATIO_MAX * usual;
    is_slow.then(|| {
        format!("a durable write beside it took {micros:.0} µs, {usual:.0} µs are usual here")
    })
}

fn watch(device: (u32, u32), is_over: &AtomicBool) -> u64 {
    let begin = Instant::now();
    let mut moments = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let disks = fs::read_to_string("/proc/diskstats").unwrap_or_default();
        if let Some((ended, under_way)) = counters(&disks, device) {
            moments.push(Moment {
                at_ms: begin.elapsed().as_millis() as u64,
                ended,
                under_way,
            });
        }
        thread::sleep(SAMPLE_INTERVAL);
    }
    longest_stall_ms(&moments)
}

/// Write blocks durably, one after another; the mean.
fn durable_write_us(path: &Path) -> std::io::Result<f64> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(libc::O_DIRECT | libc::O_DSYNC)
        .open(path)?;
    let block = Box::new(Block([0; BLOCK_BYTES]));
    let is_new = file.metadata()?.len() < PROBE_BLOCKS * BLOCK_BYTES as u64;
    if is_new {
        for number in 0..PROBE_BLOCKS {
            file.write_all_at(&block.0, number * BLOCK_BYTES as u64)?;
        }
    }
    let begin = Instant::now();
    let mut count = 0u64;
    while begin.elapsed() < PROBE_TIME {
        file.write_all_at(&block.0, count % PROBE_BLOCKS * BLOCK_BYTES as u64)?;
        count += 1;
    }
    Ok(begin.elapsed().as_secs_f64() * 1e6 / count as f64)
}

/// Memory that a device can read.
#[repr(align(4096))]
struct Block([u8; BLOCK_BYTES]);

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(of: &[(u64, u64, u64)]) -> Vec<Moment> {
        let moment = |&(at_ms, ended, under_way)| Moment {
            at_ms,
            ended,
            under_way,
        };
        of.iter().map(moment).collect()
    }

    #[test]
    fn stall_is_a_time_with_work_and_without_an_end() {
        let busy = moments(&[(0, 1, 4), (10, 5, 4), (20, 9, 4), (30, 9, 4), (40, 12, 4)]);
        assert_eq!(longest_stall_ms(&busy), 10);
        let stalled = moments(&[(0, 1, 4), (10, 5, 4), (120, 5, 4), (350, 5, 6), (360, 9, 1)]);
        assert_eq!(longest_stall_ms(&stalled), 340);
        let idle = moments(&[(0, 5, 0), (500, 5, 0), (900, 5, 1), (910, 6, 0)]);
        assert_eq!(longest_stall_ms(&idle), 0);
        assert_eq!(longest_stall_ms(&[]), 0);
    }

    #[test]
    fn device_is_found_by_its_number_and_all_that_ended_counts() {
        let text = "   7       0 loop0 9 0 0 0 9 0 0 0 9 0 0\n \
                    254       0 vda 10 1 2 3 20 4 5 6 7 8 9 30 0 0 0 40 9\n";
        assert_eq!(counters(text, (254, 0)), Some((100, 7)));
        // An older kernel counts neither discards nor flushes.
        assert_eq!(counters(text, (7, 0)), Some((18, 9)));
        assert_eq!(counters(text, (1, 1)), None);
    }

    #[test]
    fn slow_probe_is_beside_the_median_of_the_run() {
        let probes = [100.0, 110.0, 90.0, 5000.0];
        assert!(slow(5000.0, &probes).unwrap().contains("5000 µs"));
        assert_eq!(slow(250.0, &probes), None);
        assert_eq!(slow(5000.0, &probes[..3]), None, "too few to know");
    }

    #[test]
    fn run_in_a_directory_gives_its_result() {
        let directory = tempfile::tempdir().unwrap();
        let mut watch = Watch::of(directory.path()).unwrap();
        let (result, _) = watch.during(|| Ok(7)).unwrap();
        assert_eq!(result, 7);
        watch.probe().unwrap();
        assert!(
            watch
                .verdict(STALL_MS, [1.0; 2])
                .unwrap()
                .contains("100 ms")
        );
        assert_eq!(watch.verdict(STALL_MS - 1, [1.0; 2]), None);
        assert!(
            watch
                .during(|| Err::<(), _>(crate::failure::Failure::new("x")))
                .is_err()
        );
    }
}
