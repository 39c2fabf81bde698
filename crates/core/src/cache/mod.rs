//! The read cache of a node: a DRAM tier over content-addressed segments on SSD.
//!
//! It holds clean data only: it may lose anything at any time, and may never return what is not the
//! backend's present content. The volume says what that is: [`ReadCache::fill`] brings present
//! content, [`ReadCache::invalidate`] ends it, and a restart must not undo an invalidation that
//! the volume has waited for ([`ReadCache::barrier`]).
//!
//! | part | decides |
//! |---|---|
//! | `benefit` | what of a volume's blocks is worth more than others |
//! | `dram` | which 4 KiB frames hold what, and which goes |
//! | `index` | which line of the SSD tier holds which address |
//! | `tier` | how the shards of a node share the SSD tier |
//! | `ssd` | the SSD tier: whether it serves, and what its machines do next |
//! | `ssd/fill` | which lines it takes, and which it has already |
//! | `ssd/evict`, `ssd/retention` | which segment goes next, and which of its lines stay |
//! | `ssd/store`, `ssd/segments`, `ssd/writer` | where lines are, in which segments, and what is being written |
//! | `packed`, `footer` | how lines are stored that are compressed, and which a segment holds |
//! | `forgetting` | what has to go and has not been come to |
//! | `marks` | how full the SSD tier becomes |
//! | `pins` | what stays in it |
//! | `heat` | how hot is what they hold |
//! | `ssd/journal`, `journal`, `root` | what makes invalidations durable |
//! | `ssd/load`, `void` | what a restart finds, and what of it the journal voids |
//! | `table`, `ghost` | the memory that the indexes are made of |
//!
//! Invariants:
//! 1. A lookup returns what was last filled for the block and not invalidated since, or nothing.
//! 2. Both tiers are told of every invalidation at once, in memory; only its durability is later, and what
//!    a long range has taken is given back in bounded steps.
//!    Each shard has a DRAM tier of its own: what changes a volume's content in the cache is told where the volume is, and
//!    a volume that leaves a shard is forgotten there ([`ReadCache::forget_in_dram`]).
//! 3. Nothing waits for the cache: what does not fit or is not ready is refused silently, and
//!    shows in [`CacheStats`].
//! 4. The indexes take at most 16 bytes per cached 4 KiB with lines of 4 blocks.
//! 5. Of a volume that has a cipher, the SSD tier holds what that makes of its blocks, or of its compressed
//!    lines, in memory as on the medium: checksums, comparing and sharing are about encrypted bytes there, so none of
//!    that needs a key, and nothing is shared between different ones. The DRAM tier holds plaintext.
//!
//! Failure: see `ssd`. A device that fails or does not answer turns the SSD tier off and reads into
//! misses, never into errors; it is readmitted, empty, when the node finds it well again.

mod benefit;
mod dram;
mod footer;
mod forgetting;
mod ghost;
mod heat;
pub mod heat_map;
mod index;
mod journal;
mod marks;
pub(crate) mod packed;
mod pins;
pub mod read_counts;
mod root;
mod ssd;
mod table;
mod tier;
mod void;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::AddAssign;
use core::ptr::NonNull;

use benefit::Benefit;
pub use benefit::{Tiering, VolumeBenefit};
use dram::Dram;
// For looking at a cache's device without serving from it.
pub use footer::{FooterLine, FooterLines, Place};
pub use journal::{Entry, JournalScan, Layout};
pub use marks::FillMarks;
pub use pins::PinRefused;
pub(crate) use pins::whole_lines;
pub use root::{Root, Verdict};
use ssd::{Fill, Found, Ssd};
pub use ssd::{FooterFound, ScrubLine, read_footer};
pub(crate) use table::mix;
pub use tier::SharedTier;
use tier::Tier as SsdTier;
pub use void::{SegmentVoid, VoidRanges};

use crate::base::buf::{Buf, Pool};
use crate::base::cipher::BlockCipher;
use crate::base::codec::{Codec, Method};
use crate::base::io::{Action, BlockKey, Completion, Nanos};
use crate::base::limits::{BLOCK_BYTES, CACHE_PROBE_BLOCKS_MAX, CACHE_STEP_PLACES_MAX};

/// Sizes of a read cache.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// 4 KiB frames of the DRAM tier; 0 turns it off.
    pub dram_blocks: usize,
    /// The SSD tier, if the node has one.
    pub ssd: Option<SsdConfig>,
    /// How long an operation of the SSD tier may take before it counts as failed and the tier is
    /// given up.
    pub ssd_answer_max: Nanos,
}

/// Size and identity of the SSD tier.
#[derive(Clone, Debug)]
pub struct SsdConfig {
    /// Bytes of the cache device's region.
    pub bytes: u64,
    /// Identity of the node's cache; another one's content is discarded, never used.
    pub uuid: [u8; 16],
    /// Blocks of one line, the unit of filling and evicting: 2, 4, 8 or 16.
    pub line_blocks: usize,
}

/// What happens to the cache.
#[derive(Debug)]
pub enum CacheEvent {
    /// One of the cache's own actions ended.
    Completed(Completion),
    /// The end of a batch: background work.
    Poll,
    /// The device may be used again ([`ReadCache::can_readmit`]), under this identity, which no
    /// medium carries and which the node has recorded durably.
    Readmit {
        /// As [`SsdConfig::uuid`].
        uuid: [u8; 16],
    },
    /// Write everything that makes the next start warm; [`ReadCache::is_closed`] tells the end.
    Close,
}

/// Where a block was found.
#[derive(Debug)]
pub enum Lookup {
    /// In memory: the whole block.
    Dram(Buf),
    /// On the SSD: perform the read, then [`ReadCache::finish_ssd_read`].
    Ssd(SsdRead),
    /// Not here.
    Miss,
}

/// Permission to read from the SSD tier. What is read stays in place until it is given
/// back through [`ReadCache::finish_ssd_read`], which must happen exactly once.
#[derive(Debug)]
pub struct SsdRead {
    /// Which block was asked for.
    pub key: BlockKey,
    /// What to read lies here on the cache device,
    pub offset: u64,
    /// and has so many bytes: the blocks, or the whole of a compressed line.
    pub bytes: usize,
    /// How many blocks this brings, from the one that was asked for on. Whoever reads may want fewer, or more
    /// ([`Self::take`]).
    pub blocks: u64,
    /// How many it may bring.
    reach: u64,
    /// Whether the line is compressed, and read as a whole.
    is_packed: bool,
    /// Number of the line.
    line: u32,
}

impl SsdRead {
    /// How many blocks the line has, from the one that was asked for on.
    pub fn reach(&self) -> u64 {
        self.reach
    }

    /// Bring so many blocks, at most [`Self::reach`].
    pub fn take(&mut self, blocks: u64) {
        assert!((1..=self.reach).contains(&blocks), "blocks of one line");
        self.blocks = blocks;
        if !self.is_packed {
            self.bytes = blocks as usize * BLOCK_BYTES;
        }
    }

    /// Whether what is read is what the blocks are made of, one behind the other.
    pub fn is_plain(&self) -> bool {
        !self.is_packed
    }
}

/// What the SSD tier has taken of what was filled: lines that are new to it under their address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SsdTaken {
    /// Their bytes.
    pub plain_bytes: u64,
    /// Their bytes as they are stored: fewer, if some are compressed.
    pub stored_bytes: u64,
}

impl AddAssign for SsdTaken {
    fn add_assign(&mut self, other: Self) {
        self.plain_bytes += other.plain_bytes;
        self.stored_bytes += other.stored_bytes;
    }
}

/// Where a block lives, without touching its standing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In memory.
    Dram,
    /// On the SSD.
    Ssd,
    /// In neither.
    Absent,
}

/// The cached data did not match its checksum; the block was dropped and must be fetched again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// A point in the stream of invalidations; see [`ReadCache::barrier`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Barrier(pub u64);

/// What the log of a volume says of the cache: that it has forgotten, durably, what was written over before the log's
/// tail. A cache that turns out to have come less far has lost something that its device had acknowledged, or is not
/// the one that it was: then it serves nothing that it holds of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Which cache.
    pub cache: u64,
    /// Where the stream of invalidations was.
    pub stamp: u64,
}

impl Tie {
    /// Nothing was ever written over: the volume needs nothing of the cache.
    pub const NONE: Self = Self { cache: 0, stamp: 0 };
    /// It cannot be told what a cache has to have forgotten, so none has.
    pub const UNKNOWN: Self = Self {
        cache: u64::MAX,
        stamp: u64::MAX,
    };
}

/// What the SSD tier is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SsdState {
    /// There is none.
    #[default]
    Off,
    /// What the last run left is being read, or the region is being made new: everything misses.
    Warming,
    /// It serves.
    Online,
    /// It was given up; see [`SsdFailure`]. It stays so until it is readmitted.
    Offline,
}

/// Why the SSD tier was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SsdFailure {
    /// Too many operations failed in a row.
    Errors,
    /// An operation was not answered in time.
    Silent,
    /// Its device was not there at the start.
    Absent,
    /// A newer program made what is there, and it is not overwritten.
    Newer,
}

/// Counters and gauges of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Frames in use of the DRAM tier.
    pub dram_used_blocks: u64,
    /// Frames of the DRAM tier.
    pub dram_blocks: u64,
    /// Lines in use of the SSD tier.
    pub ssd_used_lines: u64,
    /// Lines that fit the SSD tier as they are; if they are compressed, more do.
    pub ssd_lines: u64,
    /// Blocks that the lines in use take on the device: fewer than they have, if some are compressed.
    pub ssd_used_blocks: u64,
    /// Blocks of one line.
    pub line_blocks: u64,
    /// Bytes of memory in the indexes of both tiers.
    pub index_bytes: u64,
    /// Lines filled.
    pub filled_lines: u64,
    /// Lines that were there already under another address.
    pub shared_lines: u64,
    /// Blocks dropped from the DRAM tier to make room.
    pub dram_evicted_blocks: u64,
    /// Lines dropped from the SSD tier to make room.
    pub ssd_evicted_lines: u64,
    /// Bytes written to the cache device.
    pub ssd_written_bytes: u64,
    /// Blocks that failed their checksum.
    pub corrupt_blocks: u64,
    /// I/O errors of the cache device; after too many in a row the SSD tier is offline.
    pub device_errors: u64,
    /// What the SSD tier is doing.
    pub ssd_state: SsdState,
    /// Why it is offline, if it is.
    pub ssd_failure: Option<SsdFailure>,
    /// Since when it has been in its state.
    pub ssd_since: Nanos,
    /// How often it was given up.
    pub ssd_failures: u64,
    /// How often it came back.
    pub ssd_readmissions: u64,
    /// Lines that the last start found on the SSD.
    pub warm_lines: u64,
    /// Volumes of which nothing that was found there was used, since their logs say that it should be newer.
    pub forgotten_volumes: u64,
}

/// Where the memory of a cache's DRAM tier lies, if it has one.
pub fn dram_memory(cache: &ReadCache) -> Option<(NonNull<u8>, usize)> {
    cache.dram.memory()
}

/// The read cache of one shard: its own DRAM tier, over the SSD tier that all shards share.
#[derive(Debug)]
pub struct ReadCache {
    line_blocks: u64,
    dram: Dram,
    ssd: Option<SsdTier>,
    benefit: Benefit,
    tiering: Tiering,
    /// Of the volumes that are encrypted, by number.
    ciphers: BTreeMap<u32, Arc<dyn BlockCipher>>,
    closing: bool,
    probes_max: usize,
    places_max: usize,
}

impl ReadCache {
    /// A cache with an empty DRAM tier that begins to read its SSD tier, if it has one. Until
    /// that is read, lookups miss and fills go to DRAM alone. A region or line size that limits.rs
    /// does not allow leaves the SSD tier off.
    pub fn new(
        config: CacheConfig,
        now: Nanos,
        pool: Arc<Pool>,
        actions: &mut Vec<Action>,
    ) -> Self {
        let answer_max = config.ssd_answer_max;
        Self::with(config.dram_blocks, config.ssd, |ssd| {
            Ssd::new(ssd, answer_max, now, pool, actions)
        })
    }

    /// As [`Self::new`], but the device of the SSD tier cannot be used at present: the tier is
    /// offline until [`CacheEvent::Readmit`].
    pub fn without_device(config: CacheConfig, pool: Arc<Pool>) -> Self {
        let answer_max = config.ssd_answer_max;
        Self::with(config.dram_blocks, config.ssd, |ssd| {
            Ssd::absent(ssd, answer_max, pool)
        })
    }

    fn with(
        dram_blocks: usize,
        ssd: Option<SsdConfig>,
        make: impl FnOnce(SsdConfig) -> Option<Ssd>,
    ) -> Self {
        let line_blocks = ssd.as_ref().map_or(4, |ssd| ssd.line_blocks as u64);
        let shared = ssd
            .and_then(make)
            .map(|ssd| SharedTier::new(ssd, line_blocks));
        Self::over(dram_blocks, line_blocks, shared.map(|shared| shared.of(0)))
    }

    /// The cache of another shard, with this number from 1 to 63, over the same SSD tier.
    pub fn sharing(dram_blocks: usize, tier: &SharedTier, shard: u32) -> Self {
        Self::over(dram_blocks, tier.line_blocks(), Some(tier.of(shard)))
    }

    /// The SSD tier, for the other shards; `None`: there is none.
    pub fn tier(&self) -> Option<SharedTier> {
        self.ssd.as_ref().map(SsdTier::shared)
    }

    fn over(dram_blocks: usize, line_blocks: u64, ssd: Option<SsdTier>) -> Self {
        Self {
            line_blocks,
            dram: Dram::new(dram_blocks),
            ssd,
            benefit: Benefit::default(),
            tiering: Tiering::default(),
            ciphers: BTreeMap::new(),
            closing: false,
            probes_max: CACHE_PROBE_BLOCKS_MAX,
            places_max: CACHE_STEP_PLACES_MAX,
        }
    }

    /// Ranges of more blocks than these are forgotten in steps that look at so many places each: instead of
    /// [`CACHE_PROBE_BLOCKS_MAX`] and [`CACHE_STEP_PLACES_MAX`], for tests with small caches.
    pub fn set_step_max(&mut self, probes: usize, places: usize) {
        (self.probes_max, self.places_max) = (probes.max(1), places.max(1));
        let probes_max = self.probes_max;
        if let Some(ssd) = self.ssd_mut() {
            ssd.probes_max = probes_max;
        }
    }

    /// From now on the volume's blocks are encrypted so in the SSD tier, or with `None` not at all.
    /// To be said before the volume is opened, and not again before nothing of it is under way: what
    /// the tier holds under its number is not looked at.
    pub fn set_cipher(&mut self, volume: u32, cipher: Option<Arc<dyn BlockCipher>>) {
        match cipher {
            Some(cipher) => self.ciphers.insert(volume, cipher),
            None => self.ciphers.remove(&volume),
        };
    }

    /// How full the SSD tier becomes from now on.
    pub fn set_fill_marks(&mut self, marks: FillMarks) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.evictor.set_marks(marks);
        }
    }

    /// By what the tiers choose what they keep, from now on.
    pub fn set_tiering(&mut self, tiering: Tiering) {
        self.tiering = tiering;
        self.dram.worths.clear();
        if let Some(ssd) = self.ssd_mut() {
            ssd.retention.clear_worths();
        }
    }

    /// A client's read has had `blocks` blocks from `first` from the backend in this time.
    pub fn note_miss(&mut self, first: BlockKey, blocks: u64, took: Nanos) {
        let lines = blocks.div_ceil(self.line_blocks).max(1);
        self.benefit.missed(first.volume(), Nanos(took.0 / lines));
        self.weigh(first.volume());
    }

    /// A client's read has had a block from the SSD tier in this time.
    pub fn note_ssd_hit(&mut self, key: BlockKey, took: Nanos) {
        self.benefit.read_ssd(key.volume(), took);
        self.weigh(key.volume());
    }

    fn weigh(&mut self, volume: u32) {
        if self.tiering == Tiering::Recency {
            return;
        }
        let worth = self.benefit.dram_worth(volume);
        self.dram.worths.set(volume, worth);
        let worth = self.benefit.ssd_worth(volume);
        if let Some(ssd) = self.ssd_mut() {
            ssd.retention.set_worth(volume, worth);
        }
    }

    /// Whether the SSD tier is to take what clients read of this volume. Not, if that has to drive out
    /// what is worth more, and the backend is as fast as the SSD.
    pub fn is_worth_taking(&self, volume: u32) -> bool {
        !self.benefit.saves_nothing(volume)
            || self.with_ssd(|ssd| ssd.drives_out_for(volume)) != Some(true)
    }

    /// What reads of a volume cost, and how its blocks are weighed for it.
    pub fn benefit(&self, volume: u32) -> VolumeBenefit {
        VolumeBenefit {
            miss: self.benefit.miss(volume),
            ssd_hit: self.benefit.ssd_hit(),
            dram_gain: self.dram.gain(volume),
            ssd_gain: (self.with_ssd(|ssd| ssd.retention.gain(volume))).unwrap_or(0),
        }
    }

    /// Take one event; push what follows from it.
    pub fn step(&mut self, now: Nanos, event: CacheEvent, actions: &mut Vec<Action>) {
        self.closing |= matches!(event, CacheEvent::Close);
        let places_max = self.places_max;
        let Some(tier) = &mut self.ssd else {
            self.dram.forget_some(places_max);
            return;
        };
        if let CacheEvent::Poll = event {
            self.dram.forget_some(places_max);
            if !tier.is_due(now) {
                return;
            }
        }
        let ssd = tier.get_mut();
        ssd.at(now);
        let has_changed = matches!(event, CacheEvent::Completed(_) | CacheEvent::Readmit { .. });
        match event {
            CacheEvent::Readmit { uuid } => ssd.readmit(uuid, actions),
            CacheEvent::Completed(completion) => ssd.completed(completion, actions),
            CacheEvent::Poll => {
                ssd.forget_some(places_max);
                ssd.drive(actions);
            }
            CacheEvent::Close => {
                ssd.close();
                ssd.drive(actions);
            }
        }
        tier.stepped(now, has_changed);
        tier.release();
    }

    /// Give the SSD tier back to the other shards, if this one has it. A step of a volume does so at its end, by dropping
    /// its [`Context`](crate::volume::Context); whoever else has called may not wait for anything before this.
    #[inline]
    pub fn release(&self) {
        if let Some(tier) = &self.ssd {
            tier.release();
        }
    }

    /// Counts what has happened to the SSD tier that a volume may wait for, by whichever shard it was done.
    pub fn changes(&self) -> u64 {
        self.ssd.as_ref().map_or(0, SsdTier::changes)
    }

    /// Volumes of this shard wait for that: whichever shard changes something next finds this one in
    /// [`Self::take_waiting`]. Whoever looked at them before has to look again if [`Self::changes`] has grown since then.
    pub fn wait_for_changes(&self) {
        if let Some(tier) = &self.ssd {
            tier.wait_for_changes();
        }
    }

    /// Shards that wait for what this one has changed, a bit each: they have to be told now.
    #[must_use]
    pub fn take_waiting(&self) -> u64 {
        self.ssd.as_ref().map_or(0, SsdTier::take_waiting)
    }

    fn ssd_mut(&mut self) -> Option<&mut Ssd> {
        self.ssd.as_mut().map(SsdTier::get_mut)
    }

    fn with_ssd<T>(&self, look: impl FnOnce(&Ssd) -> T) -> Option<T> {
        self.ssd.as_ref().map(|tier| tier.with(look))
    }

    /// When [`CacheEvent::Poll`] is due at the latest, if nothing happens before.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        if !self.dram.has_forgotten() {
            return Some(Nanos(0));
        }
        self.ssd.as_ref().and_then(SsdTier::next_wakeup)
    }

    /// What it has looked at so far, in builds with assertions: whoever tests bounds what a step costs.
    pub fn work(&self) -> u64 {
        self.dram.work() + self.with_ssd(ssd::Ssd::work).unwrap_or(0)
    }

    /// Whether places of what was invalidated are still to be given back.
    pub fn is_forgetting(&self) -> bool {
        !self.dram.has_forgotten() || self.with_ssd(|ssd| !ssd.has_forgotten()) == Some(true)
    }

    /// Whether blocks are not taken at present, since a range that they lie in is being forgotten.
    pub fn refuses(&self, first: BlockKey, blocks: u64) -> bool {
        let end = first.0.saturating_add(blocks);
        self.dram.refuses(first.0, end)
            || self.with_ssd(|ssd| ssd.store.refuses(first.0, end)) == Some(true)
    }

    /// Whether the SSD tier was given up, whatever its medium holds no longer counts, and nothing
    /// of it is under way: its device, or another one, may be used from now on.
    pub fn can_readmit(&self) -> bool {
        self.ssd
            .as_ref()
            .is_some_and(|tier| tier.said().can_readmit)
    }

    /// How long a read that was permitted may take; see [`Self::ssd_read_is_late`].
    pub fn ssd_answer_max(&self) -> Nanos {
        (self.with_ssd(ssd::Ssd::answer_max)).unwrap_or(Nanos(u64::MAX))
    }

    /// A read that was permitted has taken too long: the tier is given up. The permission is kept
    /// until the read ends, and given back by [`Self::cancel_ssd_read`] then.
    pub fn ssd_read_is_late(&mut self) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.is_silent();
        }
    }

    /// Whether the SSD tier has been read, or there is none, or it was given up.
    pub fn is_ready(&self) -> bool {
        self.with_ssd(ssd::Ssd::is_loaded) != Some(false)
    }

    /// Whether [`CacheEvent::Close`] is done.
    pub fn is_closed(&self) -> bool {
        self.closing && self.with_ssd(ssd::Ssd::is_closed) != Some(false)
    }

    /// Blocks of one line: what a miss fetches, aligned to its size.
    pub fn line_blocks(&self) -> u64 {
        self.line_blocks
    }

    /// Whether these ranges of a volume's blocks, first and end of each, may be pinned instead of what is.
    pub fn may_pin(&self, volume: u32, ranges: &[(u64, u64)]) -> Result<(), PinRefused> {
        match &self.ssd {
            None if ranges.iter().all(|(first, end)| first >= end) => Ok(()),
            None => Err(PinRefused::NoTier),
            Some(tier) => tier.with(|ssd| ssd.may_pin(volume, ranges)),
        }
    }

    /// Pin these ranges of a volume's blocks, and nothing else of it: their lines are not evicted from
    /// the SSD tier while they are valid, nor are those of its origin there. Refused, nothing changes.
    pub fn pin(
        &mut self,
        volume: u32,
        origin: Option<u32>,
        ranges: &[(u64, u64)],
    ) -> Result<(), PinRefused> {
        self.may_pin(volume, ranges)?;
        if let Some(ssd) = self.ssd_mut() {
            ssd.pin(volume, origin, ranges);
        }
        Ok(())
    }

    /// How often lines were lost of the SSD tier that were neither invalidated nor evicted: pinned ones
    /// may be among them.
    pub fn losses(&self) -> u64 {
        self.ssd.as_ref().map_or(0, |tier| tier.said().losses)
    }

    /// Whether the SSD tier takes lines at present.
    pub fn takes_lines(&self) -> bool {
        self.with_ssd(ssd::Ssd::takes_lines) == Some(true)
    }

    /// Find a block for a client's read; counts as a use.
    pub fn lookup(&mut self, key: BlockKey) -> Lookup {
        if let Some(buf) = self.dram.lookup(key) {
            return Lookup::Dram(buf);
        }
        let cipher = self.ciphers.get(&key.volume()).map(|cipher| &**cipher);
        let ssd = self.ssd.as_mut().map(SsdTier::get_mut);
        match ssd.map(|ssd| ssd.lookup(key, cipher)) {
            Some(Found::Memory(buf)) => {
                self.dram.insert(key, &buf);
                Lookup::Dram(buf)
            }
            Some(Found::Device(read)) => Lookup::Ssd(read),
            Some(Found::Absent) | None => Lookup::Miss,
        }
    }

    /// Find a block without counting a use.
    pub fn probe(&self, key: BlockKey) -> Tier {
        if self.dram.contains(key) {
            Tier::Dram
        } else if self.with_ssd(|ssd| ssd.contains(key)) == Some(true) {
            Tier::Ssd
        } else {
            Tier::Absent
        }
    }

    /// Whether a block is where promoting it brings it: in the SSD tier if that takes lines and the
    /// block's line is whole below `end`, the end of its volume; else in any tier.
    pub fn is_promoted(&self, key: BlockKey, end: BlockKey) -> bool {
        let taken = self.with_ssd(|ssd| {
            let is_taker = ssd.takes_lines() && ssd.store.is_whole(key, end);
            is_taker.then(|| ssd.has_taken(key))
        });
        (taken.flatten()).unwrap_or_else(|| self.probe(key) != Tier::Absent)
    }

    /// Whether the SSD tier has room to take so many blocks soon; if not, fetching them now would
    /// bring them to DRAM alone. Without the tier there is always room.
    pub fn has_room(&self, blocks: u64) -> bool {
        self.with_ssd(|ssd| ssd.has_room(blocks)) != Some(false)
    }

    /// So many blocks are being fetched to be taken: room for others is less by that.
    pub fn promise(&mut self, blocks: u64) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.filler.promise(blocks);
        }
    }

    /// Blocks that were promised are about to be filled, or do not come.
    pub fn end_promise(&mut self, blocks: u64) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.filler.end_promise(blocks);
        }
    }

    /// Give a read permission back, with what was read or `None` if the device failed. It is checked against its
    /// checksums, decrypted and decompressed; blocks that were not invalidated meanwhile go to the DRAM
    /// tier. The blocks of the permission are returned, from the one on that [`Self::lookup`] found.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a permission is given back once"
    )]
    pub fn finish_ssd_read<'a>(
        &'a mut self,
        read: SsdRead,
        data: Option<&'a mut [u8]>,
    ) -> Result<&'a [u8], Corrupt> {
        let ssd = self.ssd.as_mut().map(SsdTier::get_mut).ok_or(Corrupt)?;
        let cipher = self.ciphers.get(&read.key.volume()).map(|cipher| &**cipher);
        let (plain, is_current) = ssd.finish(&read, data, cipher)?;
        if is_current {
            for (key, block) in (read.key.0..).zip(plain.chunks_exact(BLOCK_BYTES)) {
                if !self.dram.contains(BlockKey(key)) {
                    self.dram.insert(BlockKey(key), block);
                }
            }
        }
        Ok(plain)
    }

    /// Give a read permission back unused; says nothing about the block.
    pub fn cancel_ssd_read(&mut self, read: SsdRead) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.store.cancel(&read);
        }
    }

    /// The next line from the number `from` on that one of these volumes has on the SSD.
    pub fn next_to_scrub(&mut self, volumes: [u32; 2], from: u64) -> ScrubLine {
        let ssd = self.ssd_mut();
        ssd.map_or(ScrubLine::End, |ssd| ssd.next_to_scrub(volumes, from))
    }

    /// Give the permission to scrub a line back, with the line or `None` if the device failed; how many
    /// of its blocks are bad. A line with a bad block is dropped.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a permission is given back once"
    )]
    pub fn finish_scrub(&mut self, read: SsdRead, data: Option<&[u8]>) -> u64 {
        (self.ssd_mut()).map_or(0, |ssd| ssd.finish_scrub(&read, data))
    }

    /// Bytes of the SSD tier that lines may take: what a scrub passes.
    pub fn scrub_bytes(&self) -> u64 {
        let lines = (self.with_ssd(|ssd| ssd.store.lines() as u64)).unwrap_or(0);
        lines * self.line_blocks * BLOCK_BYTES as u64
    }

    /// What of it a scrub has passed from the line `from` to the line `next`.
    pub fn scrubbed_bytes(&self, from: u64, next: u64) -> u64 {
        (self.with_ssd(|ssd| ssd.scrubbed_bytes(from, next))).unwrap_or(0)
    }

    /// What compresses lines of the SSD tier, and what reads those that are. Until it is said, none is
    /// compressed, and those that are cannot be read.
    pub fn set_codec(&mut self, codec: &'static dyn Codec) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.packing.codec = Some(codec);
        }
    }

    /// Take consecutive whole blocks from the backend, starting at `first`. Complete lines among
    /// them may go to the SSD tier; blocks go to the DRAM tier.
    pub fn fill(&mut self, first: BlockKey, data: &Buf) {
        self.fill_compressed(first, data, None);
    }

    /// The same; lines of the SSD tier are stored compressed by this method, if there is one and it saves a block.
    pub fn fill_compressed(
        &mut self,
        first: BlockKey,
        data: &Buf,
        method: Option<Method>,
    ) -> SsdTaken {
        self.take(first, data, method, false)
    }

    /// The same for blocks that somebody has asked to be here: in the SSD tier their lines begin among those that were
    /// used, and not among new ones, of which a full tier keeps few.
    pub fn fill_promoted(
        &mut self,
        first: BlockKey,
        data: &Buf,
        method: Option<Method>,
    ) -> SsdTaken {
        self.take(first, data, method, true)
    }

    fn take(
        &mut self,
        first: BlockKey,
        data: &Buf,
        method: Option<Method>,
        is_promoted: bool,
    ) -> SsdTaken {
        for (index, block) in data.chunks_exact(BLOCK_BYTES).enumerate() {
            self.dram.insert(BlockKey(first.0 + index as u64), block);
        }
        let cipher = self.ciphers.get(&first.volume()).map(|cipher| &**cipher);
        let ssd = self.ssd.as_mut().map(SsdTier::get_mut);
        ssd.map_or(SsdTaken::default(), |ssd| {
            ssd.fill(&Fill {
                first,
                data,
                method,
                cipher,
                is_promoted,
            })
        })
    }

    /// Take one whole block that was just destaged, into the DRAM tier only.
    pub fn fill_block(&mut self, key: BlockKey, data: &[u8]) {
        self.dram.insert(key, data);
    }

    /// Forget `blocks` blocks from `first`: the backend's content has changed. Nothing of them is found from now
    /// on; of a long range, nothing is taken either, until its places are given back.
    pub fn invalidate(&mut self, first: BlockKey, blocks: u64) {
        let end = first.0.saturating_add(blocks);
        self.dram.invalidate(first.0, end, self.probes_max);
        if let Some(ssd) = self.ssd_mut() {
            ssd.invalidate(first, blocks);
        }
    }

    /// Forget every block of a volume.
    pub fn forget_volume(&mut self, volume: u32) {
        self.invalidate(BlockKey::new(volume, 0), 1 << 40);
        self.benefit.forget(volume);
        self.weigh(volume);
    }

    /// Forget every block that the DRAM tier has of a volume, which leaves this shard: what is written elsewhere is not
    /// said here.
    pub fn forget_in_dram(&mut self, volume: u32) {
        let first = BlockKey::new(volume, 0).0;
        self.dram
            .invalidate(first, first + (1 << 40), self.probes_max);
    }

    /// The point after all invalidations so far. Once [`Self::persisted`] has reached it, no
    /// restart brings back what they dropped. The writes for it begin with the next step.
    pub fn barrier(&mut self) -> Barrier {
        Barrier(self.ssd_mut().map_or(0, Ssd::barrier))
    }

    /// Up to which point invalidations are durable.
    pub fn persisted(&self) -> Barrier {
        Barrier(self.ssd.as_ref().map_or(0, |tier| tier.said().persisted))
    }

    /// What the log of a volume says that opens, before anything is looked up for it.
    pub fn tie(&mut self, volume: u32, tie: Tie) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.tie(volume, tie);
        }
    }

    /// How many volumes were given nothing of what a start has found, since their logs are newer.
    pub fn forgotten_volumes(&self) -> u64 {
        (self.ssd.as_ref()).map_or(0, |tier| tier.said().forgotten_volumes)
    }

    /// What the log of a volume is to say from now on: that everything up to [`Self::persisted`] was forgotten.
    pub fn tie_of(&self, volume: u32) -> Tie {
        (self.with_ssd(|ssd| ssd.tie_of(volume))).unwrap_or(Tie::UNKNOWN)
    }

    /// Whether the cache device failed so badly that not even its superblocks could be voided. The
    /// node must then give the cache a new identity ([`SsdConfig::uuid`]), make that durable, and
    /// say so with [`Self::reset_recorded`]. Until then no barrier is reached.
    pub fn must_reset(&self) -> bool {
        self.ssd.as_ref().is_some_and(|tier| tier.said().must_reset)
    }

    /// The next start will use another identity, durably: nothing of this one can come back.
    pub fn reset_recorded(&mut self) {
        if let Some(ssd) = self.ssd_mut() {
            ssd.reset_recorded();
        }
    }

    /// Counters and gauges.
    pub fn stats(&self) -> CacheStats {
        let dram = CacheStats {
            dram_used_blocks: self.dram.used() as u64,
            dram_blocks: self.dram.frames() as u64,
            dram_evicted_blocks: self.dram.evicted(),
            line_blocks: self.line_blocks,
            index_bytes: self.dram.index_bytes() as u64,
            ..CacheStats::default()
        };
        let Some(tier) = &self.ssd else {
            return dram;
        };
        let (since, keeps) = (tier.since(), tier.is_kept());
        tier.with(|ssd| CacheStats {
            ssd_used_lines: ssd.store.index.used_lines() as u64,
            ssd_lines: ssd.store.lines() as u64,
            ssd_used_blocks: ssd.store.index.used_blocks() as u64,
            // Counted once, for the shard that keeps it.
            index_bytes: dram.index_bytes + if keeps { ssd.index_bytes() as u64 } else { 0 },
            filled_lines: ssd.store.counters.filled_lines,
            shared_lines: ssd.store.counters.shared_lines,
            ssd_evicted_lines: ssd.store.counters.evicted_lines,
            ssd_written_bytes: ssd.store.counters.written_bytes,
            corrupt_blocks: ssd.store.counters.corrupt_blocks,
            device_errors: ssd.store.counters.device_errors,
            ssd_state: ssd.state(),
            ssd_failure: ssd.failure(),
            ssd_since: since,
            ssd_failures: ssd.store.counters.failures,
            ssd_readmissions: ssd.store.counters.readmissions,
            warm_lines: ssd.store.counters.warm_lines,
            forgotten_volumes: ssd.store.counters.forgotten_volumes,
            ..dram
        })
    }

    /// Assert what must always hold; for tests and the simulator.
    pub fn check_invariants(&self) {
        self.dram.check_invariants();
        self.with_ssd(ssd::Ssd::check_invariants);
    }
}
