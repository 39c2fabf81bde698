//! A scrub that is under way, as those see it who carry it out, watch it or end it: the data path, a thread
//! that verifies a backend, and the control plane.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hdcs_backend::verify::Watch;

/// Problems that are named one by one.
pub const PROBLEMS_MAX: usize = 100;
/// How long a thread sleeps at once, so that a cancel is seen soon.
const NAP: Duration = Duration::from_millis(100);
/// How long it lets clients go first at most.
const BUSY_MAX: Duration = Duration::from_secs(1);

/// What is scrubbed, in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// The write log.
    #[default]
    Log,
    /// The volume's lines in the SSD tier.
    Cache,
    /// The local store of a volume in storage mode.
    Home,
    /// What its backend holds.
    Backend,
}

impl Part {
    const ALL: [Self; 4] = [Self::Log, Self::Cache, Self::Home, Self::Backend];

    /// In words.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Log => "write log",
            Self::Cache => "SSD tier",
            Self::Home => "home",
            Self::Backend => "backend",
        }
    }
}

/// See the module. Its numbers are for people: nothing is decided by how they fit together.
#[derive(Debug)]
pub struct Progress {
    rate: AtomicU64,
    part: AtomicU8,
    part_bytes: AtomicU64,
    passed_bytes: AtomicU64,
    read_bytes: AtomicU64,
    bad_blocks: AtomicU64,
    healed_blocks: AtomicU64,
    cancelled: AtomicBool,
    busy: AtomicBool,
    problems: Mutex<Vec<String>>,
    started: Instant,
}

impl Progress {
    /// Nothing is done yet. At most so many bytes a second are to be read.
    pub fn new(bytes_per_s: u64) -> Self {
        Self {
            rate: AtomicU64::new(bytes_per_s),
            part: AtomicU8::default(),
            part_bytes: AtomicU64::default(),
            passed_bytes: AtomicU64::default(),
            read_bytes: AtomicU64::default(),
            bad_blocks: AtomicU64::default(),
            healed_blocks: AtomicU64::default(),
            cancelled: AtomicBool::default(),
            busy: AtomicBool::default(),
            problems: Mutex::default(),
            started: Instant::now(),
        }
    }

    /// Bytes a second at most.
    pub fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed).max(1)
    }

    /// A part begins, with so much to pass.
    pub fn begin(&self, part: Part, bytes: u64) {
        self.part.store(part as u8, Ordering::Relaxed);
        self.part_bytes.store(bytes, Ordering::Relaxed);
        self.passed_bytes.store(0, Ordering::Relaxed);
    }

    /// As is known now, the part has so much to pass in all.
    pub fn set_part_bytes(&self, bytes: u64) {
        self.part_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Which part it is at, how much that is, and how much of it is still to go.
    pub fn part(&self) -> (Part, u64, u64) {
        let part = Part::ALL[usize::from(self.part.load(Ordering::Relaxed))];
        let bytes = self.part_bytes.load(Ordering::Relaxed);
        let passed = self.passed_bytes.load(Ordering::Relaxed);
        (part, bytes, bytes.saturating_sub(passed))
    }

    /// So much more was read, and passed with that or without.
    pub fn moved(&self, read_bytes: u64, passed_bytes: u64) {
        self.read_bytes.fetch_add(read_bytes, Ordering::Relaxed);
        self.passed_bytes.fetch_add(passed_bytes, Ordering::Relaxed);
    }

    /// So many blocks were bad, and of them so many were made good.
    pub fn found(&self, bad_blocks: u64, healed_blocks: u64) {
        self.bad_blocks.fetch_add(bad_blocks, Ordering::Relaxed);
        self.healed_blocks
            .fetch_add(healed_blocks, Ordering::Relaxed);
    }

    /// Something is wrong that nothing here can make good.
    pub fn problem(&self, what: String) {
        let mut problems = self.lock();
        if problems.len() < PROBLEMS_MAX {
            problems.push(what);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        // A list of sentences is never half changed.
        self.problems.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is wrong, one sentence each.
    pub fn problems(&self) -> Vec<String> {
        self.lock().clone()
    }

    /// Bytes that were read so far.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Blocks that were bad, and those of them that were made good.
    pub fn blocks(&self) -> (u64, u64) {
        let healed = self.healed_blocks.load(Ordering::Relaxed);
        (self.bad_blocks.load(Ordering::Relaxed), healed)
    }

    /// End it soon.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether it is to end.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Whether clients keep the volume busy.
    pub fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Relaxed);
    }

    /// Since it began.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

/// Slows a verification of a backend down, on the thread that makes it.
pub struct Pace<'a> {
    progress: &'a Progress,
    /// When it may read on.
    ready_at: Instant,
}

impl<'a> Pace<'a> {
    /// From now on, for the part that has begun.
    pub fn new(progress: &'a Progress) -> Self {
        Self {
            progress,
            ready_at: Instant::now(),
        }
    }
}

impl Watch for Pace<'_> {
    fn total(&mut self, bytes: u64) {
        self.progress.set_part_bytes(bytes);
    }

    fn at_once(&self) -> usize {
        1
    }

    fn skipped(&mut self, bytes: u64) {
        self.progress.moved(0, bytes);
    }

    fn passed(&mut self, bytes: u64) -> bool {
        self.progress.moved(bytes, bytes);
        let takes = Duration::from_secs_f64(bytes as f64 / self.progress.rate() as f64);
        self.ready_at = self.ready_at.max(Instant::now()) + takes;
        let busy_until = self.ready_at + BUSY_MAX;
        loop {
            let now = Instant::now();
            let is_busy = self.progress.busy.load(Ordering::Relaxed) && now < busy_until;
            if self.progress.is_cancelled() {
                return false;
            }
            if now >= self.ready_at && !is_busy {
                return true;
            }
            let early = self.ready_at.saturating_duration_since(now);
            std::thread::sleep(if early.is_zero() { NAP } else { early.min(NAP) });
        }
    }
}
