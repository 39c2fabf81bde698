//! The SSD tier: lines in segments on the cache device, found through memory.
//!
//! Lines collect in the *open* segment of one of two streams and are written whole, with a footer that
//! names them. New lines go to the small stream; lines that were used since, that come back soon after their
//! eviction, or that were asked for by a promotion or a pin, go to the main stream. Segments are evicted in the order in which
//! they were sealed, from the small stream while it is larger than its share; lines that were used
//! are copied into the main stream's open segment first.
//!
//! ```text
//! Loading ──► Starting ──► Ready ──► Offline
//!   ▲ └─────► Forming ──────►┘          │
//!   └── readmitted, under a new identity, nothing in flight
//! ```
//!
//! It leads machines, each of which has its own state:
//!
//! | machine | has |
//! |---|---|
//! | `Store` | lines by their addresses, segments, what is being written |
//! | `Device` | what is under way, and how well it answers |
//! | `Journal`, `Ties` | what makes invalidations durable, and what logs say of that |
//! | `Load` | what a start has read |
//! | `Retention` | pins, worths, what was evicted of late: which lines stay |
//! | `Evictor` | marks, and the segment that is being emptied |
//! | `Filler` | lines that are being compared, and those that are promised |
//!
//! Invariants:
//! 1. For every footer that may be on the medium, in whatever order the device persisted its writes,
//!    and every line in it: either its primary address leads to that line, or an entry of the
//!    journal queue voids it. (Entries are queued *before* an address is turned elsewhere.) Hence an
//!    invalidation needs an entry only if it finds something in a sealed segment, and once the
//!    queue is durable no restart brings anything back.
//! 2. A sequence number is given when a segment is sealed and never twice in one format: its upper
//!    part counts starts, durably, before anything is written.
//! 3. A segment is opened again only when nobody reads it: `pins` counts permissions and reads.
//! 4. The journal has one write in flight. A checkpoint names the other half in the superblock,
//!    continues there, and writes the void lines of every segment as it goes; room for that is
//!    reserved, so the journal never blocks for ever.
//! 5. Every byte that is read is checked against checksums kept in memory or in a checked footer.
//!    Lines and footers need no order and no durability: what is torn does not match.
//! 6. An operation that its device does not end in time counts as failed, and the tier is given up.
//!    What is still under way belongs to the driver until it ends; then it changes nothing.
//! 7. The tier is readmitted only when nothing of the time before is under way on the device, and
//!    only under an identity that no medium carries: so it starts empty.
//! 8. A stamp counts what the journal has made durable, and is never given twice: its upper part counts starts. The
//!    logs of volumes say which stamp they have waited for ([`Tie`]). What a start finds less than that was lost, by a
//!    device that has lied: then nothing of the volume is served.
//!
//! Failure: a failed read is a miss, a failed segment write loses the segment. After too many in a
//! row the tier goes offline: everything misses, and the superblocks are overwritten so that the
//! next start is cold ([`Burn`]). If even that fails, or the device does not answer, the node must
//! give the cache a new identity.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::index::Line;
use super::journal::{Entry, Layout};
use super::marks::FREE_SEGMENTS_MIN;
use super::packed::Packing;
use super::pins::PinRefused;
use super::{Corrupt, SsdConfig, SsdFailure, SsdRead, SsdState, SsdTaken, Tie};
use crate::base::buf::{Buf, Pool};
use crate::base::cipher::BlockCipher;
use crate::base::io::{Action, BlockKey, Completion, Done, Nanos};
use crate::base::limits::{BLOCK_BYTES, CACHE_ERRORS_IN_ROW_MAX, CACHE_PROBE_BLOCKS_MAX};

mod device;
mod evict;
mod fill;
mod heat;
mod journal;
mod load;
mod retention;
#[cfg(test)]
mod rig;
mod scrub;
mod segments;
mod store;
mod ties;
mod writer;

use device::{Device, Op};
use evict::Evictor;
pub use fill::Fill;
use fill::Filler;
use journal::{Journal, Step, Task};
pub use load::{FooterFound, read_footer};
use load::{Load, Loaded};
use retention::Retention;
pub use scrub::ScrubLine;
use segments::Stream;
use store::Store;
use ties::Ties;

/// Making the next start cold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Burn {
    /// Not done yet; so many attempts are left.
    Wanted(u32),
    /// Done: nothing on the medium counts any more.
    Done,
}

#[derive(Debug)]
enum Phase {
    /// What the medium holds is being read.
    Loading(Load),
    /// The last root write before the tier serves.
    Starting,
    Forming {
        begun: bool,
    },
    Ready,
    Offline(Burn),
}

/// Where a block was found.
#[derive(Debug)]
pub enum Found {
    Memory(Buf),
    Device(SsdRead),
    Absent,
}

/// Counters; see [`super::CacheStats`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub filled_lines: u64,
    pub shared_lines: u64,
    pub evicted_lines: u64,
    pub written_bytes: u64,
    pub corrupt_blocks: u64,
    pub device_errors: u64,
    pub warm_lines: u64,
    pub failures: u64,
    pub readmissions: u64,
    pub losses: u64,
    pub forgotten_volumes: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Ssd {
    pub store: Store,
    pool: Arc<Pool>,
    device: Device,
    phase: Phase,
    pub journal: Journal,
    ties: Ties,
    pub packing: Packing,
    pub evictor: Evictor,
    pub retention: Retention,
    pub filler: Filler,
    /// Blocks of the longest range that is looked up at once.
    pub probes_max: usize,
    failure: Option<SsdFailure>,
    closing: bool,
}

impl Ssd {
    /// The tier of a region, or `None` if its size or its lines are out of bounds.
    /// An operation that takes longer than `answer_max` counts as failed.
    pub fn new(
        config: SsdConfig,
        answer_max: Nanos,
        now: Nanos,
        pool: Arc<Pool>,
        actions: &mut Vec<Action>,
    ) -> Option<Self> {
        let device = Device::new(Arc::clone(&pool), answer_max, now);
        let mut this = Self::idle(config, device, pool)?;
        this.drive(actions);
        Some(this)
    }

    /// The tier of a region whose device is not there: offline until it is readmitted. The
    /// identity must be one that no medium carries.
    pub fn absent(config: SsdConfig, answer_max: Nanos, pool: Arc<Pool>) -> Option<Self> {
        let device = Device::new(Arc::clone(&pool), answer_max, Nanos(0));
        let mut this = Self::idle(config, device, pool)?;
        this.give_up(SsdFailure::Absent, Burn::Done);
        Some(this)
    }

    fn idle(config: SsdConfig, device: Device, pool: Arc<Pool>) -> Option<Self> {
        let layout = Layout::new(config.bytes, config.line_blocks)?;
        let store = Store::new(layout, Arc::clone(&pool));
        Some(Self {
            retention: Retention::new(store.lines()),
            store,
            filler: Filler::new(Arc::clone(&pool), layout.line_blocks),
            pool,
            device,
            phase: Phase::Loading(Load::new()),
            journal: Journal::new(config, layout),
            ties: Ties::default(),
            packing: Packing::default(),
            evictor: Evictor::default(),
            probes_max: CACHE_PROBE_BLOCKS_MAX,
            failure: None,
            closing: false,
        })
    }

    /// Whether the device may be used again: the tier is offline for good, and nothing of it is
    /// under way.
    pub fn can_readmit(&self) -> bool {
        matches!(self.phase, Phase::Offline(Burn::Done))
            && self.device.under_way() == 0
            && self.store.permissions() == 0
            && !self.closing
    }

    /// Begin anew on the device, under an identity that no medium carries.
    pub fn readmit(&mut self, uuid: [u8; 16], actions: &mut Vec<Action>) {
        assert!(
            self.can_readmit(),
            "a tier is readmitted when nothing of it is under way"
        );
        let config = SsdConfig {
            uuid,
            ..self.journal.config().clone()
        };
        let fresh = Self::idle(config, self.device.renewed(), Arc::clone(&self.pool));
        let before = core::mem::replace(self, fresh.expect("its sizes were good before"));
        self.journal.continue_queue(before.journal);
        self.store.counters = before.store.counters;
        self.store.counters.readmissions += 1;
        self.store.counters.losses += 1;
        self.packing = before.packing;
        self.retention = before.retention.renewed(self.store.lines());
        self.evictor = before.evictor.renewed();
        self.probes_max = before.probes_max;
        self.drive(actions);
    }

    /// What time it is, and what follows: an operation may have taken too long.
    pub fn at(&mut self, now: Nanos) {
        if self.device.advance(now) && self.waits_for_device() {
            self.give_up(SsdFailure::Silent, Burn::Wanted(0));
        }
    }

    /// Whether it matters how long the device takes: once offline, only the superblocks do, and only until they are
    /// void.
    fn waits_for_device(&self) -> bool {
        !matches!(self.phase, Phase::Offline(_)) || !self.journal.is_idle()
    }

    /// Whether a later poll may go further although nothing ends before: something waits for memory, of which nobody says
    /// when it is free, or eviction goes on in steps.
    pub fn may_go_on(&mut self) -> bool {
        let evicts = self.takes_lines() && self.evictor.may_go_on(&self.store);
        evicts || self.device.is_starved()
    }

    /// When the oldest operation will have taken too long.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let deadline = self.device.deadline();
        deadline.filter(|_| self.waits_for_device())
    }

    /// The device has kept a volume's read for too long.
    pub fn is_silent(&mut self) {
        if !matches!(self.phase, Phase::Offline(_)) {
            self.give_up(SsdFailure::Silent, Burn::Wanted(0));
        }
    }

    pub fn completed(&mut self, completion: Completion, actions: &mut Vec<Action>) {
        let Some(op) = self.device.end(completion.token) else {
            return;
        };
        let ok = completion.result.is_ok();
        self.count_outcome(op.is_write(), ok);
        let data = match completion.result {
            Ok(Done::Read(buf)) => Some(buf),
            _ => None,
        };
        match op {
            Op::Superblock | Op::Footer(_) | Op::Journal => {
                if let Phase::Loading(load) = &mut self.phase {
                    let (store, journal) = (&mut self.store, &mut self.journal);
                    let loaded = load.completed(&op, data.as_deref(), store, journal);
                    self.loaded(loaded);
                }
            }
            Op::Control => self.journal_written(ok),
            Op::Segment(segment) => {
                if let Some(entry) = self.store.segment_written(segment, ok) {
                    self.journal.record(entry);
                }
            }
            Op::Compare => self.filler.line_read(
                completion.token,
                data.as_deref(),
                self.closing,
                &mut self.store,
                &mut self.retention,
                self.journal.content(),
            ),
            Op::Keep(kept) => self.evictor.line_read(
                kept,
                data.as_deref(),
                &mut self.store,
                &mut self.retention,
                self.journal.content(),
            ),
        }
        self.drive(actions);
    }

    /// Push whatever can go on now.
    pub fn drive(&mut self, actions: &mut Vec<Action>) {
        self.device.begin_drive();
        if self.closing {
            self.journal.want();
        }
        match &mut self.phase {
            Phase::Loading(load) => {
                let (store, journal) = (&mut self.store, &mut self.journal);
                let loaded = load.drive(store, journal, &mut self.device, actions);
                self.loaded(loaded);
            }
            Phase::Ready => self.drive_lines(actions),
            Phase::Starting | Phase::Forming { .. } | Phase::Offline(_) => {}
        }
        self.drive_journal(actions);
    }

    /// Empty, compare and write, as far as that is due.
    fn drive_lines(&mut self, actions: &mut Vec<Action>) {
        let (store, retention) = (&mut self.store, &mut self.retention);
        if !self.closing {
            (self.evictor).begin_if_due(store, retention, &mut self.journal);
        }
        (self.evictor).drive(store, retention, &mut self.device, actions);
        (self.filler).drive(store, retention, &mut self.device, actions);
        if self.closing {
            let content = self.journal.content();
            store.seal(Stream::Small, content);
            store.seal(Stream::Main, content);
        }
        let Store { layout, writer, .. } = store;
        writer.drive(self.closing, layout, &mut self.device, actions);
    }

    /// Write what the journal or the superblocks need next, if nothing is in flight.
    fn drive_journal(&mut self, actions: &mut Vec<Action>) {
        if self.journal.is_idle() {
            let task = match &mut self.phase {
                Phase::Forming { begun: false } => Some(Task::BeginForming),
                Phase::Forming { begun: true } => Some(Task::Form),
                Phase::Starting => Some(Task::Start),
                Phase::Ready => Some(Task::Serve),
                Phase::Offline(Burn::Wanted(attempts @ 1..)) => {
                    *attempts -= 1;
                    Some(Task::Burn)
                }
                Phase::Offline(_) | Phase::Loading(_) => None,
            };
            if let Some(task) = task {
                self.journal.begin(task, &self.store);
            }
        }
        self.journal.drive(&mut self.device, actions);
    }

    fn journal_written(&mut self, ok: bool) {
        let is_offline = matches!(self.phase, Phase::Offline(_));
        match self.journal.ended(ok, is_offline) {
            Some(Step::Burnt) => self.phase = Phase::Offline(Burn::Done),
            Some(Step::FormBegun) if !is_offline => self.phase = Phase::Forming { begun: true },
            Some(Step::Formed) if !is_offline => self.serve_cold(),
            Some(Step::Started) if !is_offline => self.serve_warm(),
            _ => {}
        }
    }

    /// Go on with what a start came to, if it did.
    fn loaded(&mut self, loaded: Option<Loaded>) {
        match loaded {
            None => {}
            Some(Loaded::Warm) => self.phase = Phase::Starting,
            Some(Loaded::Cold { format }) => {
                self.forget_all();
                self.journal.form(format);
                self.phase = Phase::Forming { begun: false };
            }
            // Nothing is written, not even to say that it does not count: it gets another identity.
            Some(Loaded::Newer) => self.give_up(SsdFailure::Newer, Burn::Wanted(0)),
        }
    }

    fn serve_cold(&mut self) {
        self.journal.begin_empty();
        self.ties.begin_empty();
        self.store.segments.begin(self.journal.root().incarnation);
        self.phase = Phase::Ready;
    }

    fn serve_warm(&mut self) {
        self.store.segments.begin(self.journal.root().incarnation);
        self.phase = Phase::Ready;
        if self.journal.renews() {
            // Too many invalidations came meanwhile to be recorded: none of the content is used.
            self.forget_all();
            // The medium holds what their logs know better until the superblocks say that all of it is void.
            self.ties.begin_forgotten(self.journal.queued());
            return;
        }
        // What was invalidated since the start.
        for (first, blocks) in self.journal.take_early() {
            let end = first.saturating_add(blocks);
            if blocks > self.probes_max as u64 {
                if let Some((first, end)) = self.store.forget_lines(first, end) {
                    self.journal.record(Entry::Range {
                        first,
                        blocks: end - first,
                        upto: self.store.segments.next_sequence() - 1,
                    });
                }
                continue;
            }
            for key in self.store.index.addresses_in(first, end) {
                self.store.index.unmap(key);
            }
        }
        self.store.counters.warm_lines = self.store.index.used_lines() as u64;
        self.journal.resume_checkpoint();
        for (volume, tie) in self.ties.take_untied(&self.journal) {
            self.forget_untied(volume, tie);
        }
    }

    /// The log of a volume that opens says what it has waited for. If that is not there, nothing of the volume is
    /// served.
    pub fn tie(&mut self, volume: u32, tie: Tie) {
        match self.phase {
            Phase::Ready => {
                if !self.ties.has(tie, &self.journal) {
                    self.forget_untied(volume, tie);
                }
            }
            // It begins, or will begin anew.
            Phase::Forming { .. } | Phase::Offline(_) => {}
            _ => self.ties.untried(volume, tie),
        }
    }

    /// What the log of a volume is to say.
    pub fn tie_of(&self, volume: u32) -> Tie {
        let tie = self.ties.tie_of(volume, &self.journal);
        tie.filter(|_| self.is_ready_phase())
            .unwrap_or(Tie::UNKNOWN)
    }

    /// What the medium holds of a volume is older than its log. If the log does not say what it has waited for, that is as
    /// it should be: a node that takes a volume over knows nothing of what others have destaged.
    fn forget_untied(&mut self, volume: u32, tie: Tie) {
        if self.store.index.used_lines() > 0 {
            self.invalidate(BlockKey::new(volume, 0), 1 << 40);
            self.store.counters.forgotten_volumes += u64::from(tie != Tie::UNKNOWN);
            self.store.counters.losses += 1;
        }
        self.ties.forgotten(volume, self.journal.queued());
    }

    fn count_outcome(&mut self, is_write: bool, ok: bool) {
        let too_many = self.device.judge(is_write, ok);
        self.store.counters.device_errors += u64::from(!ok);
        if too_many && !matches!(self.phase, Phase::Offline(_)) {
            let attempts = match &self.phase {
                Phase::Loading(load) if !load.has_superblocks() => 0,
                _ => CACHE_ERRORS_IN_ROW_MAX,
            };
            self.give_up(SsdFailure::Errors, Burn::Wanted(attempts));
        }
    }

    /// Go offline, or once offline, give up voiding the superblocks.
    fn give_up(&mut self, why: SsdFailure, burn: Burn) {
        if matches!(self.phase, Phase::Offline(_)) {
            self.journal.abandon_write();
            self.phase = Phase::Offline(burn);
            return;
        }
        self.store.counters.failures += 1;
        self.failure = Some(why);
        if why == SsdFailure::Silent {
            // Nothing is waited for any more; what it wrote may still come about.
            self.store.counters.device_errors += 1;
            self.journal.abandon_write();
        }
        self.phase = Phase::Offline(burn);
        self.journal.give_up();
        self.forget_all();
        self.store.give_up();
        self.retention.give_up();
    }

    /// Empty the memory side: nothing on the medium counts any more.
    fn forget_all(&mut self) {
        self.store.clear();
        self.evictor.stop();
        self.filler.stop();
        self.journal.restart();
    }

    fn is_ready_phase(&self) -> bool {
        matches!(self.phase, Phase::Ready)
    }

    /// Find a block; what is in memory is decrypted, what is on the device is not.
    pub fn lookup(&mut self, key: BlockKey, cipher: Option<&dyn BlockCipher>) -> Found {
        if !self.is_ready_phase() {
            return Found::Absent;
        }
        self.store.lookup(key, cipher, &mut self.packing)
    }

    pub fn contains(&self, key: BlockKey) -> bool {
        self.is_ready_phase() && self.store.find(self.store.line_key(key)).is_some()
    }

    // Filling.

    /// Whether lines are taken at all.
    pub fn takes_lines(&self) -> bool {
        self.is_ready_phase() && !self.closing
    }

    /// Take what can be taken of consecutive blocks.
    pub fn fill(&mut self, fill: &Fill<'_>) -> SsdTaken {
        let blocks = (fill.data.len() / BLOCK_BYTES) as u64;
        if !self.takes_lines() || self.store.refuses(fill.first.0, fill.first.0 + blocks) {
            return SsdTaken::default();
        }
        self.filler.fill(
            fill,
            &mut self.store,
            &mut self.retention,
            &mut self.journal,
            &mut self.packing,
        )
    }

    /// Whether a line is here, or will be once it was compared with another.
    pub fn has_taken(&self, key: BlockKey) -> bool {
        self.contains(key) || self.filler.is_compared(self.store.line_key(key))
    }

    /// Whether so many blocks can be promoted now, or there is no use in waiting.
    pub fn has_room(&self, blocks: u64) -> bool {
        let is_emptying = self.evictor.is_emptying();
        !self.takes_lines()
            || (self.filler).has_room(blocks, is_emptying, &self.store, &self.retention)
    }

    /// Whether taking a line of this volume drives out what is worth more.
    pub fn drives_out_for(&self, volume: u32) -> bool {
        self.takes_lines()
            && self.store.segments.free() <= FREE_SEGMENTS_MIN
            && self.retention.gain(volume) < 0
    }

    /// Whether ranges of a volume's blocks may be pinned instead of what is.
    pub fn may_pin(&self, volume: u32, ranges: &[(u64, u64)]) -> Result<(), PinRefused> {
        let layout = &self.store.layout;
        let blocks_max = self.evictor.pinned_blocks_max(layout);
        (self.retention).may_pin(volume, ranges, layout.line_blocks, blocks_max)
    }

    /// Pin ranges that [`Self::may_pin`] allows, and nothing else of the volume.
    pub fn pin(&mut self, volume: u32, origin: Option<u32>, ranges: &[(u64, u64)]) {
        let layout = &self.store.layout;
        let blocks_max = self.evictor.pinned_blocks_max(layout);
        (self.retention).pin(volume, origin, ranges, layout.line_blocks, blocks_max);
        self.evictor.look_again();
    }

    // Reading and invalidating.

    /// What a read is about, plain, and whether it still belongs to its address.
    pub fn finish<'a>(
        &'a mut self,
        read: &SsdRead,
        data: Option<&'a mut [u8]>,
        cipher: Option<&dyn BlockCipher>,
    ) -> Result<(&'a [u8], bool), Corrupt> {
        if self.store.is_given_up() {
            self.store.cancel(read);
            return Err(Corrupt);
        }
        let line = Line(read.line);
        let first = BlockKey(self.store.line_key(read.key));
        let block = (read.key.0 - first.0) as usize;
        let is_packed = self.store.index.is_packed(line);
        let is_sound = data.as_deref().map(|data| self.store.is_sound(read, data));
        self.store.cancel(read);
        self.count_outcome(false, is_sound.is_some());
        let is_current = self.store.find(first.0) == Some(line);
        let Some(data) = data.filter(|_| is_sound == Some(true)) else {
            self.store.counters.corrupt_blocks += u64::from(is_sound.is_some());
            return Err(self.is_bad(line));
        };
        if !is_packed {
            if let Some(cipher) = cipher {
                let blocks = data.chunks_exact_mut(BLOCK_BYTES);
                for (number, block) in (read.key.block()..).zip(blocks) {
                    cipher.decrypt(number, block);
                }
            }
            return Ok((data, is_current));
        }
        let line_bytes = self.store.layout.line_bytes();
        if !self.packing.unpack(data, first, cipher, line_bytes) {
            self.store.counters.corrupt_blocks += 1;
            return Err(self.is_bad(line));
        }
        let start = block * BLOCK_BYTES;
        let end = start + read.blocks as usize * BLOCK_BYTES;
        Ok((&self.packing.unpacked()[start..end], is_current))
    }

    fn is_bad(&mut self, line: Line) -> Corrupt {
        if self.is_ready_phase()
            && let Some(entry) = self.store.distrust(line)
        {
            self.journal.record(entry);
        }
        Corrupt
    }

    pub fn invalidate(&mut self, first: BlockKey, blocks: u64) {
        if blocks == 0 {
            return;
        }
        let end = first.0.saturating_add(blocks);
        match self.phase {
            Phase::Ready => {}
            Phase::Offline(Burn::Done) => return,
            Phase::Offline(Burn::Wanted(_)) => {
                self.journal.count_unrecorded();
                return;
            }
            Phase::Forming { .. } => {
                // Nothing counts once this is done, and it is not done before.
                self.journal.count_unrecorded();
                return;
            }
            _ => {
                // What the medium holds is not known yet.
                self.journal.record(Entry::Range {
                    first: first.0,
                    blocks,
                    upto: u64::MAX,
                });
                return;
            }
        }
        self.filler.invalidate(first.0, end);
        let entry = if blocks > self.probes_max as u64 {
            self.store.forget(first, end, self.evictor.is_emptying())
        } else {
            self.store.unmap(first, blocks)
        };
        if let Some(entry) = entry {
            self.journal.record(entry);
        }
    }

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        let loading = match &self.phase {
            Phase::Loading(load) => load.work(),
            _ => 0,
        };
        self.store.work() + loading
    }

    /// Whether nothing is left to forget.
    pub fn has_forgotten(&self) -> bool {
        let is_voiding = matches!(&self.phase, Phase::Loading(load) if load.is_voiding());
        self.store.has_forgotten() && !is_voiding
    }

    /// Drop what is to be forgotten in the next `places_max` places. Nothing of it comes to another place
    /// meanwhile: what is filled, shared or kept is looked at before.
    pub fn forget_some(&mut self, places_max: usize) {
        if let Phase::Loading(load) = &mut self.phase {
            let loaded = load.void_some(places_max, &mut self.store);
            self.loaded(loaded);
        }
        self.store.forget_some(places_max);
    }

    pub fn barrier(&mut self) -> u64 {
        self.journal.want()
    }

    pub fn persisted(&self) -> u64 {
        self.journal.durable()
    }

    pub fn must_reset(&self) -> bool {
        matches!(self.phase, Phase::Offline(Burn::Wanted(0))) && self.journal.is_idle()
    }

    pub fn reset_recorded(&mut self) {
        if let Phase::Offline(burn) = &mut self.phase {
            *burn = Burn::Done;
            self.journal.settle_all();
        }
    }

    pub fn is_loaded(&self) -> bool {
        matches!(self.phase, Phase::Ready | Phase::Offline(_))
    }

    pub fn state(&self) -> SsdState {
        match self.phase {
            Phase::Loading(_) | Phase::Starting | Phase::Forming { .. } => SsdState::Warming,
            Phase::Ready => SsdState::Online,
            Phase::Offline(_) => SsdState::Offline,
        }
    }

    /// Why it is offline.
    pub fn failure(&self) -> Option<SsdFailure> {
        self.failure
    }

    pub fn answer_max(&self) -> Nanos {
        self.device.answer_max()
    }

    pub fn close(&mut self) {
        self.closing = true;
        self.journal.want();
    }

    pub fn is_closed(&self) -> bool {
        let still = self.journal.is_idle() && self.device.under_way() == 0;
        self.closing
            && match self.phase {
                Phase::Ready => {
                    still
                        && !self.store.writer.is_writing()
                        && self.journal.is_settled()
                        && self.store.writer.opened() == 0
                }
                // What a silent device has not ended is not waited for.
                Phase::Offline(burn) => {
                    self.journal.is_idle() && matches!(burn, Burn::Done | Burn::Wanted(0))
                }
                _ => false,
            }
    }

    pub fn index_bytes(&self) -> usize {
        self.store.bytes() + self.retention.bytes() + self.packing.memory_bytes()
    }

    pub fn check_invariants(&self) {
        if !self.is_ready_phase() {
            return;
        }
        self.store.check_invariants(self.evictor.is_emptying());
        self.filler.check_invariants();
        self.journal.check_invariants();
    }
}
