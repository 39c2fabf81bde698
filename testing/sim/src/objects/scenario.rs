//! What a seed decides before a run of a volume over objects begins, and what a run has seen.

use std::fmt;

use fastrand::Rng;

/// What a run saw.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// Requests that ended.
    pub requests: u64,
    /// Manifests that were created.
    pub commits: u64,
    /// Objects that were removed.
    pub deletes: u64,
    /// Blocks that were copied forward.
    pub copied_blocks: u64,
    /// Objects of the map.
    pub maps: u64,
    /// Gets of pages of the map.
    pub page_gets: u64,
    /// Whether the crash that was asked for at a step happened.
    pub cut: bool,
    /// Owners that died.
    pub crashes: u64,
    /// Owners that were replaced while they lived.
    pub takeovers: u64,
    /// Owners that learned that they are fenced.
    pub fenced: u64,
    /// Faults of the store.
    pub faults: u64,
    /// Things that happened after they were reported as failed, or twice, or after their owner died.
    pub late: u64,
    /// Puts that were refused because the bucket was full.
    pub refused: u64,
    /// Objects that were removed while it was full.
    pub freed_when_full: u64,
    /// Snapshots that were compared.
    pub snapshots: u64,
    /// Clones that were compared.
    pub clones: u64,
    /// Clones that were given up.
    pub given_up: u64,
    /// Blocks that clones said they had inherited, at every opening.
    pub inherited_blocks: u64,
    /// Objects that were compressed.
    pub compressed: u64,
    /// Frames of them, and slots that were stored as they are.
    pub frames: u64,
    /// Gets of those.
    pub frame_gets: u64,
    /// Flushes of parts of blocks beside more reads than there may be gets.
    pub flushes_beside_readers: u64,
    /// Clones that never came to be, and such that did although they were slow.
    pub dead_clones: u64,
    /// See [`Self::dead_clones`].
    pub slow_clones: u64,
}

impl Coverage {
    /// Add what another run saw.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.commits += other.commits;
        self.deletes += other.deletes;
        self.copied_blocks += other.copied_blocks;
        self.maps += other.maps;
        self.page_gets += other.page_gets;
        self.cut |= other.cut;
        self.crashes += other.crashes;
        self.takeovers += other.takeovers;
        self.fenced += other.fenced;
        self.faults += other.faults;
        self.late += other.late;
        self.refused += other.refused;
        self.freed_when_full += other.freed_when_full;
        self.snapshots += other.snapshots;
        self.clones += other.clones;
        self.given_up += other.given_up;
        self.inherited_blocks += other.inherited_blocks;
        self.compressed += other.compressed;
        self.frames += other.frames;
        self.frame_gets += other.frame_gets;
        self.flushes_beside_readers += other.flushes_beside_readers;
        self.dead_clones += other.dead_clones;
        self.slow_clones += other.slow_clones;
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} requests, {} commits, {} deletes, {} blocks copied, {} map objects, {} gets of pages, {} crashes, \
             {} take-overs, {} fenced, {} faults, {} late, {} refused, {} freed when full, \
             {} snapshots, {} clones, {} given up, {} blocks inherited, {} objects compressed, \
             {} frames, {} gets of frames, {} flushes beside busy readers, \
             {} dead clones, {} slow ones",
            self.requests,
            self.commits,
            self.deletes,
            self.copied_blocks,
            self.maps,
            self.page_gets,
            self.crashes,
            self.takeovers,
            self.fenced,
            self.faults,
            self.late,
            self.refused,
            self.freed_when_full,
            self.snapshots,
            self.clones,
            self.given_up,
            self.inherited_blocks,
            self.compressed,
            self.frames,
            self.frame_gets,
            self.flushes_beside_readers,
            self.dead_clones,
            self.slow_clones
        )
    }
}

/// How the map is paged, which has draws of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paging {
    pub(super) page_blocks: u32,
    pub(super) cache_bytes: usize,
    pub(super) changes_max: usize,
}

impl Paging {
    pub(super) fn draw(random: &mut Rng) -> Self {
        Self {
            page_blocks: random.choice([8, 8, 16, 64, 1024]).unwrap_or(8),
            // With nothing, as few pages as there may be at least.
            cache_bytes: random.choice([0, 0, 4096, 1 << 20]).unwrap_or(0),
            changes_max: random.choice([8, 40, 200, 1 << 20]).unwrap_or(8),
        }
    }
}

/// What a seed decides before a run begins.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent choices")]
pub(super) struct Scenario {
    pub(super) sectors: u64,
    pub(super) sectors_max: u64,
    pub(super) aligned: bool,
    pub(super) hot: bool,
    pub(super) batch_blocks: usize,
    pub(super) write_memory_bytes: usize,
    pub(super) puts: usize,
    pub(super) gets: usize,
    pub(super) depth: usize,
    pub(super) requests: u32,
    pub(super) lives: u32,
    pub(super) flush_one_in: u32,
    pub(super) fault_one_in: u32,
    pub(super) corrupts: bool,
    /// The bucket is full now and then.
    pub(super) fills: bool,
    pub(super) snapshots: bool,
    pub(super) resizes: bool,
    pub(super) clones: bool,
    pub(super) latency_max: u64,
}

impl Scenario {
    pub(super) fn draw(random: &mut Rng) -> Self {
        let batch_blocks = random.choice([8, 8, 16, 32, 64]).unwrap_or(8);
        let sectors = if random.u8(0..4) == 0 {
            random.u64(1..100)
        } else {
            random.u64(200..1500)
        };
        Self {
            sectors,
            sectors_max: random.choice([8, 16, 64, 200]).unwrap_or(8),
            aligned: random.bool(),
            hot: random.bool(),
            batch_blocks,
            write_memory_bytes: 1 << 20,
            puts: random.usize(1..=4),
            gets: random.usize(1..=8),
            depth: random.choice([1, 4, 16]).unwrap_or(1),
            requests: random.u32(30..300),
            lives: random.u32(1..=4),
            flush_one_in: random.choice([3, 10, 40]).unwrap_or(3),
            fault_one_in: random.choice([0, 0, 10, 40, 200]).unwrap_or(0),
            corrupts: random.u8(0..4) == 0,
            snapshots: random.u8(0..3) == 0,
            resizes: random.u8(0..4) == 0,
            clones: random.u8(0..4) == 0,
            fills: random.bool(),
            latency_max: random.choice([2, 20, 200]).unwrap_or(2) * 1_000_000,
        }
    }
}
