//! What each volume needs of the process's memory beside what all volumes share: the least for its write log, the tables
//! and buffers of its local store, and what its backend keeps. It is reserved before the volume is opened or grows,
//! from the part of the cap that is for volumes ([`hdcs_server::config::budget`]); what does not fit is refused.
//!
//! ```text
//!   ├──── reserved by volumes ────┼─── for the indexes of write logs ───┼ a reserve ┤
//!                                  as they need it, beyond their least
//! ```
//!
//! What nobody has reserved is for the indexes of all write logs together: each shard has a budget ([`IndexBudget`]), a part
//! of it ([`IndexCap`]).
//!
//! Invariants:
//! 1. What is reserved is never more than the share had when it was reserved.
//! 2. A reservation lasts as long as anything that it was made for: it goes with the volume, or with the thread that
//!    opens it, whichever goes last.
//! 3. A volume that finds plenty takes more than it needs at least, but never more than a part of what is left when all
//!    volumes of the node that are not open yet have the least: so after a restart all are open that were before.
//! 4. A part is kept for indexes ([`INDEX_SHARE`]), unless the logs of all volumes together never need so much. What is
//!    reserved takes from what indexes may have, and they give it back as they are destaged: whoever has reserved waits
//!    for that ([`Share::is_overdrawn`]).
//!
//! [`IndexBudget`]: hdcs_core::log::budget::IndexBudget

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hdcs_core::base::limits::{
    BLOCK_BYTES, DESTAGE_PLAN_BYTES_ATOMIC, DESTAGE_PLAN_BYTES_LEAST, DESTAGE_RESERVE_BYTES,
    HOME_CIPHER_BYTES, HOME_POOL_BYTES, HOME_READ_POOL_BYTES, HOME_SUMS_BYTES,
    LOG_BLOCK_ENTRIES_MAX, LOG_INDEX_BYTES_LEAST, OBJECT_BATCH_BLOCKS_MAX, OBJECT_CONTROL_BYTES,
    OBJECT_FRAMES_MEMORY_BYTES, OBJECT_PAGE_BLOCKS_MAX, UNFLUSHED_BYTES_LEAST, log_memory_bytes,
};
use hdcs_core::local::format::pages;
use hdcs_core::log::index_cap::IndexCap;
use hdcs_core::objects::Config as ObjectConfig;
use hdcs_core::objects::format::SLOT_BYTES;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Every volume: control parts of its spans (128 KiB), histograms (69 KiB), state machines and tables of what is under
/// way.
const VOLUME_BYTES: u64 = 256 * KIB;
/// What destage reads a log with when no buffer is left. One is set apart on each shard for whoever needs it first; more are of the
/// memory for indexes.
const RESERVE_BYTES: u64 = DESTAGE_RESERVE_BYTES as u64;
/// The part of the memory for volumes that is kept for indexes, as a divisor.
const INDEX_SHARE: u64 = 6;
/// What encrypts the spans of a log.
const LOG_CIPHER_BYTES: u64 = 3 * MIB;
/// What is known of the blocks that a clone has from its origin: of stretches of 16 MiB that it has in part, and of
/// each stretch whether it has that at all.
const INHERITED_BYTES: u64 = 2 * MIB;
const INHERITED_STRETCH_BYTES: u64 = 16;
/// What the libraries of Ceph hold for an image: copies of what is under way, maps of the image's objects.
const RBD_BYTES: u64 = 16 * MIB;
/// The least that a local store has for checksums: it works with less of them at hand, and reads more.
const HOME_SUMS_BYTES_MIN: u64 = 256 * KIB;
/// Bytes of data for each byte of checksums.
const SUMS_RATIO: u64 = 128;
/// Beside each page of checksums is what is known of it.
const SUMS_OVERHEAD_DIVISOR: u64 = 32;
/// The largest object of a map, which is copied while it is put.
const MAP_OBJECT_BYTES: u64 = 4 * MIB;
/// A change that is not in the map yet, and a data object that is known.
const OBJECT_CHANGE_BYTES: usize = 32;
const OBJECT_BYTES: u64 = 38;
/// Behind the slots of a data object are its tables.
const OBJECT_TABLES_BYTES: u64 = 128 * KIB;

/// What a volume takes beyond the least, as long as it has no more in all than this part of what others leave: larger
/// objects save requests, checksums that are at hand save reads.
const OBJECTS_SHARE: u64 = 2;
const SUMS_SHARE: u64 = 4;

/// Memory by what it is for, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// The least for the index of a write log, and for the plan of what is destaged of it.
    pub log_bytes: u64,
    /// Maps, checksums, and other tables that grow with a volume.
    pub tables_bytes: u64,
    /// Buffers of its own.
    pub buffers_bytes: u64,
}

impl Parts {
    /// All together.
    pub fn total(&self) -> u64 {
        let all = [self.tables_bytes, self.buffers_bytes];
        all.into_iter().fold(self.log_bytes, u64::saturating_add)
    }

    fn with(self, other: Self, add: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            log_bytes: add(self.log_bytes, other.log_bytes),
            tables_bytes: add(self.tables_bytes, other.tables_bytes),
            buffers_bytes: add(self.buffers_bytes, other.buffers_bytes),
        }
    }
}

/// What is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What is needed at least.
    pub needs: Parts,
    /// What is left.
    pub left_bytes: u64,
    /// What there is for all volumes.
    pub all_bytes: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        write!(
            f,
            "it needs {} MiB of memory ({} for its write log, {} for tables, {} for buffers), and {} of the {} \
             MiB for volumes are left: detach volumes that nobody uses, or raise `memory_max_mib` or \
             `volumes_memory_mib` and restart the daemon",
            mib(self.needs.total()),
            mib(self.needs.log_bytes),
            mib(self.needs.tables_bytes),
            mib(self.needs.buffers_bytes),
            self.left_bytes / MIB,
            self.all_bytes / MIB,
        )
    }
}

impl std::error::Error for Shortage {}

/// Memory that volumes share.
#[derive(Debug)]
pub struct Share {
    bytes: u64,
    held: Mutex<Held>,
    /// For the indexes of write logs, beyond the least of each: a part for each shard.
    index: Arc<IndexCap>,
    /// What they have, for each shard, as the data path says.
    index_used: Box<[Used]>,
}

/// A count that one shard changes at each turn, on a line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Used(AtomicU64);

/// What of a [`Share`] is reserved.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    parts: Parts,
    /// What the indexes of all logs would take if all were full.
    index_most_bytes: u64,
}

impl Held {
    fn with(self, parts: Parts, index_most_bytes: u64, add: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            parts: self.parts.with(parts, &add),
            index_most_bytes: add(self.index_most_bytes, index_most_bytes),
        }
    }
}

impl Share {
    /// So many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        Self::of_shards(bytes, 1)
    }

    /// So many bytes for the volumes of so many shards together, one at least.
    pub fn of_shards(bytes: u64, shards: usize) -> Arc<Self> {
        let shards = shards.max(1);
        let reserves = shards as u64 * RESERVE_BYTES;
        Arc::new(Self {
            bytes,
            held: Mutex::default(),
            index: IndexCap::new(bytes.saturating_sub(reserves), shards),
            index_used: (0..shards).map(|_| Used::default()).collect(),
        })
    }

    /// Without a bound, for tools and tests.
    pub fn unlimited() -> Arc<Self> {
        Self::new(u64::MAX)
    }

    /// How much there is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What is reserved.
    pub fn held(&self) -> Parts {
        self.lock().parts
    }

    /// What the indexes of write logs may take together, beyond the least of each.
    pub fn index_bytes(&self) -> u64 {
        self.index.cap()
    }

    /// The same as the shards share it.
    pub fn index(&self) -> &Arc<IndexCap> {
        &self.index
    }

    /// What they have of that, as the data path says.
    pub fn index_used_bytes(&self) -> u64 {
        let used = self.index_used.iter();
        used.map(|used| used.0.load(Ordering::Relaxed)).sum()
    }

    /// Those of one shard have so much of it.
    pub fn note_index_used(&self, shard: usize, bytes: u64) {
        self.index_used[shard].0.store(bytes, Ordering::Relaxed);
    }

    /// Whether indexes have more than what is left for them: others have reserved it since. It is being destaged.
    pub fn is_overdrawn(&self) -> bool {
        self.index_used_bytes() > self.index_bytes()
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Nobody who holds it can panic.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unreserved(&self, held: &Held) -> u64 {
        let taken = held
            .parts
            .total()
            .saturating_add(self.index_used.len() as u64 * RESERVE_BYTES);
        self.bytes.saturating_sub(taken)
    }

    /// What may be reserved beside a log whose index takes so much if it is full.
    fn left(&self, held: &Held, index_most_bytes: u64) -> u64 {
        let most = held.index_most_bytes.saturating_add(index_most_bytes);
        let kept = most.min(self.bytes / INDEX_SHARE);
        self.unreserved(held).saturating_sub(kept)
    }

    fn shortage(&self, needs: Parts, left_bytes: u64) -> Shortage {
        Shortage {
            needs,
            left_bytes,
            all_bytes: self.bytes,
        }
    }

    fn set(&self, held: &mut Held, to: Held) {
        *held = to;
        // Whoever waits for what indexes have to give back asks the shards, which look at their parts then.
        self.index.set_cap(self.unreserved(held));
    }

    /// Reserve exactly this.
    pub fn reserve(self: &Arc<Self>, parts: Parts) -> Result<Lease, Shortage> {
        let mut lease = self.lease();
        lease.reach(parts)?;
        Ok(lease)
    }

    fn lease(self: &Arc<Self>) -> Lease {
        Lease {
            share: Arc::clone(self),
            parts: Parts::default(),
            index_most_bytes: 0,
        }
    }
}

/// What is reserved of a [`Share`].
#[derive(Debug)]
pub struct Lease {
    share: Arc<Share>,
    parts: Parts,
    /// What the index of the volume's log takes if it is full.
    index_most_bytes: u64,
}

impl Lease {
    /// Have at least so much of each part. If there is too little, nothing changes.
    fn reach(&mut self, parts: Parts) -> Result<(), Shortage> {
        self.reach_with_index(parts, 0)
    }

    /// The same for a volume that has a log whose index takes so much if it is full.
    fn reach_with_index(&mut self, parts: Parts, index_most_bytes: u64) -> Result<(), Shortage> {
        let wanted = self.parts.with(parts, u64::max);
        let more = wanted.with(self.parts, |wanted, has| wanted - has);
        let more_index = index_most_bytes.saturating_sub(self.index_most_bytes);
        let mut held = self.share.lock();
        let left = self.share.left(&held, more_index);
        if more.total() > left {
            return Err(self.share.shortage(wanted, left));
        }
        let to = held.with(more, more_index, u64::saturating_add);
        self.share.set(&mut held, to);
        self.parts = wanted;
        self.index_most_bytes += more_index;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut held = self.share.lock();
        let to = held.with(self.parts, self.index_most_bytes, u64::saturating_sub);
        self.share.set(&mut held, to);
    }
}

/// What the memory of a volume over objects is, which its driver passes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectMemory {
    /// Blocks of a data object at most.
    pub batch_blocks: usize,
    /// For what is gathered and being put.
    pub write_bytes: u64,
    /// For what is being read.
    pub read_bytes: u64,
    /// Puts of data at once.
    pub puts: usize,
    /// For pages of the map and changes that are not in them yet, a half each.
    pub map_bytes: u64,
}

impl ObjectMemory {
    /// From the least that works to the most that brings something. With smaller objects there are more puts.
    pub const LEVELS: [Self; 5] = [
        // Two buffers of 1 MiB each.
        Self::new(510, 5, 2, 1, 16),
        Self::new(1024, 10, 4, 1, 16),
        Self::new(OBJECT_BATCH_BLOCKS_MAX, 36, 4, 1, 16),
        Self::new(OBJECT_BATCH_BLOCKS_MAX, 54, 8, 2, 32),
        Self::new(OBJECT_BATCH_BLOCKS_MAX, 72, 16, 4, 64),
    ];

    const fn new(
        batch_blocks: usize,
        write_mib: u64,
        read_mib: u64,
        puts: usize,
        map_mib: u64,
    ) -> Self {
        Self {
            batch_blocks,
            write_bytes: write_mib * MIB,
            read_bytes: read_mib * MIB,
            puts,
            map_bytes: map_mib * MIB,
        }
    }

    /// The least, for a machine that makes a volume and ends then.
    pub const fn least() -> Self {
        Self::LEVELS[0]
    }

    /// The most, where nothing bounds it.
    pub const fn most() -> Self {
        Self::LEVELS[Self::LEVELS.len() - 1]
    }

    /// Have a volume over objects keep to it.
    pub fn bound(&self, config: &mut ObjectConfig) {
        config.map_cache_bytes = self.map_bytes as usize / 2;
        config.changes_max = self.map_bytes as usize / 2 / OBJECT_CHANGE_BYTES;
        config.batch_blocks = self.batch_blocks;
        config.write_memory_bytes = self.write_bytes as usize;
        config.read_memory_bytes = self.read_bytes as usize;
        config.puts_in_flight_max = self.puts;
    }

    /// What the directory of the map of a volume of so many bytes takes, and what is known of its data objects, of
    /// which two fifths may be garbage.
    fn tables_bytes(&self, volume_bytes: u64) -> u64 {
        let pages = volume_bytes.div_ceil(u64::from(OBJECT_PAGE_BLOCKS_MAX) * BLOCK_BYTES as u64);
        let objects = volume_bytes.div_ceil((self.batch_blocks * BLOCK_BYTES) as u64);
        pages * 9 + objects * 5 / 3 * OBJECT_BYTES
    }

    /// What it takes in all, but for what grows with the volume.
    pub fn parts(&self) -> Parts {
        let object = (self.batch_blocks * SLOT_BYTES) as u64 + OBJECT_TABLES_BYTES;
        // What is put is copied, and again where it is compressed. What is got comes in pieces, which are put together,
        // and then copied to where it was wanted.
        let copies = self.puts as u64 * 2 * object + MAP_OBJECT_BYTES + 2 * self.read_bytes;
        Parts {
            log_bytes: 0,
            tables_bytes: self.map_bytes + OBJECT_FRAMES_MEMORY_BYTES as u64,
            buffers_bytes: self.write_bytes
                + self.read_bytes
                + OBJECT_CONTROL_BYTES as u64
                + copies,
        }
    }
}

/// Where the data of a volume goes in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file or a device: the kernel's memory.
    File,
    /// An image of Ceph.
    Rbd,
    /// Objects on S3, HDFS or in a directory.
    Objects,
}

/// What decides how much memory a volume needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Size of the volume.
    pub bytes: u64,
    /// Size of its write log.
    pub log_bytes: u64,
    /// Size of its local store, if it is in storage mode.
    pub home_bytes: Option<u64>,
    /// Its backend.
    pub kind: Kind,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// Whether its log is compressed.
    pub compressed: bool,
}

/// What a volume may have beyond the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plenty {
    sums_bytes: u64,
    objects: Option<ObjectMemory>,
}

impl Needs {
    fn least(&self) -> Plenty {
        let levels = self.levels();
        Plenty {
            sums_bytes: HOME_SUMS_BYTES_MIN,
            objects: levels.first().copied(),
        }
    }

    /// A local store flushes its backend after 64 GiB, which smaller objects would be too many for.
    fn levels(&self) -> &'static [ObjectMemory] {
        match (self.kind, self.home_bytes) {
            (Kind::Objects, None) => &ObjectMemory::LEVELS,
            (Kind::Objects, Some(_)) => &ObjectMemory::LEVELS[2..],
            _ => &[],
        }
    }

    /// What it takes with so much.
    fn parts(&self, plenty: &Plenty) -> Parts {
        // A backend over objects is atomic.
        let plan_bytes = if self.kind == Kind::Objects && self.home_bytes.is_none() {
            DESTAGE_PLAN_BYTES_ATOMIC
        } else {
            DESTAGE_PLAN_BYTES_LEAST
        };
        let mut parts = Parts {
            log_bytes: LOG_INDEX_BYTES_LEAST + plan_bytes + UNFLUSHED_BYTES_LEAST,
            tables_bytes: 0,
            buffers_bytes: VOLUME_BYTES,
        };
        if self.encrypted {
            parts.buffers_bytes += LOG_CIPHER_BYTES;
        }
        if let Some(bytes) = self.home_bytes {
            parts.tables_bytes = home_tables_bytes(bytes, plenty.sums_bytes);
            parts.buffers_bytes += (HOME_POOL_BYTES + HOME_READ_POOL_BYTES) as u64;
            if self.encrypted {
                parts.buffers_bytes += HOME_CIPHER_BYTES as u64;
            }
        }
        if self.kind == Kind::Rbd {
            parts.buffers_bytes += RBD_BYTES;
        }
        if let Some(objects) = plenty.objects {
            parts = parts.with(objects.parts(), u64::saturating_add);
            parts.tables_bytes += objects.tables_bytes(self.bytes);
        }
        parts
    }

    /// What it is given where so much is left: at least the least, even if that is not there.
    fn plenty(&self, left: u64) -> Plenty {
        let mut plenty = self.least();
        let fits = |plenty: &Plenty, of: u64| self.parts(plenty).total() <= left / of;
        // All checksums, and a third as much for what the log writes again.
        let all = self.home_bytes.unwrap_or_default() / SUMS_RATIO * 4 / 3;
        let all = all.next_multiple_of(BLOCK_BYTES as u64);
        let sums_max = all.clamp(HOME_SUMS_BYTES_MIN, HOME_SUMS_BYTES as u64);
        while plenty.sums_bytes < sums_max {
            let sums_bytes = (plenty.sums_bytes * 2).min(sums_max);
            let more = Plenty {
                sums_bytes,
                ..plenty
            };
            if !fits(&more, SUMS_SHARE) {
                break;
            }
            plenty = more;
        }
        for &level in self.levels() {
            let more = Plenty {
                objects: Some(level),
                ..plenty
            };
            if fits(&more, OBJECTS_SHARE) {
                plenty = more;
            }
        }
        plenty
    }

    /// What it needs at least.
    pub fn least_parts(&self) -> Parts {
        self.parts(&self.least())
    }

    /// Whether a share has what it needs at least, beside what is reserved already.
    pub fn check(&self, share: &Share) -> Result<(), Shortage> {
        let (needs, held) = (self.least_parts(), *share.lock());
        let left = share.left(&held, self.index_most_bytes());
        if needs.total() > left {
            return Err(share.shortage(needs, left));
        }
        Ok(())
    }

    /// Entries that the log holds at most: one for each block, or of compressed data some.
    fn entries_max(&self) -> u64 {
        let each = if self.compressed {
            LOG_BLOCK_ENTRIES_MAX
        } else {
            1
        };
        (self.log_bytes / BLOCK_BYTES as u64).saturating_mul(each)
    }

    /// What the index of its log takes if that is full.
    fn index_most_bytes(&self) -> u64 {
        log_memory_bytes(self.log_bytes, self.entries_max())
    }

    /// What a share needs to have so that the volume fits alone, and can fill its log, or nearly.
    pub fn share_bytes(&self) -> u64 {
        self.share_bytes_of(1)
    }

    /// The same of the share of so many shards, each of which has its part.
    pub fn share_bytes_of(&self, shards: usize) -> u64 {
        let shards = shards as u64;
        let others = self.least_parts().total() + shards * RESERVE_BYTES;
        (self.index_most_bytes().saturating_mul(shards)).saturating_add(others)
    }

    /// Reserve it, and more where there is plenty beside `others_bytes`, which others need that have nothing yet.
    pub fn reserve(&self, share: &Arc<Share>, others_bytes: u64) -> Result<VolumeMemory, Shortage> {
        let mut lease = share.lease();
        let index = self.index_most_bytes();
        let left = share.left(&share.lock(), index);
        let mut plenty = self.plenty(left.saturating_sub(others_bytes));
        // Others may have taken what was there a moment ago.
        let reached = lease.reach_with_index(self.parts(&plenty), index);
        if reached.is_err() {
            plenty = self.least();
            lease.reach_with_index(self.parts(&plenty), index)?;
        }
        Ok(VolumeMemory {
            needs: *self,
            plenty,
            reserved: Mutex::new(Reserved {
                lease,
                inherited_bytes: 0,
            }),
        })
    }
}

/// Memory of the tables of a local store of so many bytes: the map, two bits for each block and, while it is tiered out
/// or opened, as much again and one bit more; and so much for checksums.
fn home_tables_bytes(bytes: u64, sums_bytes: u64) -> u64 {
    let page = BLOCK_BYTES as u64;
    let map = pages(bytes).saturating_mul(page * 5 / 2);
    map.saturating_add(sums_bytes + sums_bytes / SUMS_OVERHEAD_DIVISOR)
}

/// What verifying a volume over objects takes beside, with plenty and at least: what its manifests need, one object,
/// the same decrypted, and decompressed.
pub const VERIFY_OBJECTS: [Parts; 2] = [buffers(100 * MIB), buffers(60 * MIB)];

/// What verifying a local store of so many bytes takes beside: its map, and what is read at once.
pub fn verify_home(bytes: u64) -> Parts {
    Parts {
        tables_bytes: home_tables_bytes(bytes, 0),
        ..buffers(4 * MIB)
    }
}

/// What verifying a log of so many bytes takes beside, which holds so many entries at most.
pub fn verify_log(log_bytes: u64, entries_max: u64) -> Parts {
    Parts {
        log_bytes: log_memory_bytes(log_bytes, entries_max),
        ..buffers(8 * MIB)
    }
}

const fn buffers(buffers_bytes: u64) -> Parts {
    Parts {
        log_bytes: 0,
        tables_bytes: 0,
        buffers_bytes,
    }
}

/// What a volume has reserved, for as long as anything of the volume is there.
#[derive(Debug)]
pub struct VolumeMemory {
    needs: Needs,
    plenty: Plenty,
    reserved: Mutex<Reserved>,
}

#[derive(Debug)]
struct Reserved {
    lease: Lease,
    /// What of it is for what a clone knows of its origin.
    inherited_bytes: u64,
}

impl VolumeMemory {
    /// Without a bound, for tools and tests.
    pub fn unlimited(log_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            needs: Needs {
                bytes: 0,
                log_bytes,
                home_bytes: None,
                kind: Kind::Objects,
                encrypted: false,
                compressed: true,
            },
            plenty: Plenty {
                sums_bytes: HOME_SUMS_BYTES as u64,
                objects: Some(ObjectMemory::most()),
            },
            reserved: Mutex::new(Reserved {
                lease: Share::unlimited().lease(),
                inherited_bytes: 0,
            }),
        })
    }

    fn reserved(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it has.
    pub fn parts(&self) -> Parts {
        self.reserved().lease.parts
    }

    /// Have what it needs with so many bytes, to which it is to grow, or which its local store has.
    pub fn reach_bytes(&self, bytes: u64) -> Result<(), Shortage> {
        let needs = Needs {
            bytes: bytes.max(self.needs.bytes),
            home_bytes: self.needs.home_bytes.map(|home| bytes.max(home)),
            ..self.needs
        };
        let mut parts = needs.parts(&self.plenty);
        let mut reserved = self.reserved();
        parts.tables_bytes += reserved.inherited_bytes;
        reserved.lease.reach(parts)
    }

    /// Have what a clone of so many bytes needs beside. One that is opened again with what it had has that already.
    pub fn reach_inherited(&self, bytes: u64) -> Result<(), Shortage> {
        let stretches = bytes.div_ceil(16 * MIB) * INHERITED_STRETCH_BYTES;
        let mut reserved = self.reserved();
        let inherited_bytes = reserved.inherited_bytes.max(INHERITED_BYTES + stretches);
        let more = inherited_bytes - reserved.inherited_bytes;
        let parts = Parts {
            tables_bytes: reserved.lease.parts.tables_bytes + more,
            ..Parts::default()
        };
        reserved.lease.reach(parts)?;
        reserved.inherited_bytes = inherited_bytes;
        Ok(())
    }

    /// What a local store has for checksums.
    pub fn sums_bytes(&self) -> usize {
        self.plenty.sums_bytes as usize
    }

    /// What a volume over objects has.
    pub fn objects(&self) -> Option<ObjectMemory> {
        self.plenty.objects
    }

    /// Entries that the write log may hold.
    pub fn entries_max(&self) -> u64 {
        self.needs.entries_max()
    }
}

#[cfg(test)]
mod tests;
