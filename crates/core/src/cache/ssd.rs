//! The SSD tier: lines in segments on the cache device, found through memory.
//!
//! Lines collect in the *open* segment of one of two streams and are written whole, with a footer that
//! names them. New lines go to the small stream; lines that were used since, that come back soon after their
//! eviction, or that were asked for by a promotion or a pin, go to the main stream. Segments are evicted in the order in which
//! they were sealed, from the small stream while it is larger than its share; lines that were used
//! are copied into the main stream's open segment first.
//!
//! ```text
//! segment:  Free ──open──► Open ──seal──► Sealing ──written──► Sealed ──evict──► Emptying ──► Free
//!                                            └───── write failed ──────────────────────────────►┘
//! tier:     Superblocks ──► Footers ──► Journal ──► Starting ──► Ready ──► Offline
//!                 ▲ └──────────┴───────────┴──► Forming ───────────►┘          │
//!                 └──── readmitted, under a new identity, nothing in flight ◄──┘
//! ```
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

use alloc::collections::{BTreeMap, VecDeque};
use alloc::rc::Rc;
use alloc::vec;
use alloc::vec::Vec;

use ties::Tied;

use super::benefit::Worths;
use super::forgetting::Forgetting;
use super::ghost::Ghost;
use super::index::{Index, Line};
use super::journal::{Entry, Layout, Queue};
use super::marks::Eviction;
use super::packed::Packing;
use super::pins::Pins;
use super::root::Root;
use super::table::mix;
use super::{Corrupt, SsdConfig, SsdFailure, SsdRead, SsdState};
use crate::base::buf::{Arena, Buf, BufMut, Pool};
use crate::base::cipher::BlockCipher;
use crate::base::io::{Action, BlockKey, Completion, Done, Nanos, Token};
use crate::base::limits::{
    BLOCK_BYTES, CACHE_ERRORS_IN_ROW_MAX, CACHE_INVALIDATIONS_MAX, CACHE_PROBE_BLOCKS_MAX,
    CACHE_READS_MAX, CACHE_SEGMENT_WRITES_MAX, SEGMENT_BYTES,
};
use crate::format::block_checksum;
use crate::log::extent_index::ExtentIndex;

mod control;
mod device;
mod evict;
mod heat;
mod load;
mod scrub;
mod segments;
mod ties;

use control::Control;
use device::{Device, Op};
use evict::Emptying;
use load::Scan;
pub use load::{FooterFound, read_footer};
pub use scrub::ScrubLine;
use segments::{Compare, Open};

/// The streams of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Small,
    Main,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentState {
    Free,
    Open,
    Sealing,
    Sealed,
    Emptying,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    /// Footers on the medium with a lower number are void; a sealed segment's own number.
    sequence: u64,
    /// Permissions and reads that are not given back.
    pins: u16,
    state: SegmentState,
    stream: Stream,
}

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
    /// The blocks of those that were read, one behind the other. Each has a read of its own, so that none that goes
    /// wrong hides them both.
    Superblocks(Vec<u8>),
    Footers {
        next: usize,
        /// Those that seem blank before the end of what was written are read again: it may have been the read.
        again: bool,
    },
    Journal(Scan),
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
    config: SsdConfig,
    layout: Layout,
    pool: Rc<Pool>,
    device: Device,
    /// Memory for superblocks and journal blocks, so that an invalidation never waits for the pool.
    control_memory: Rc<Arena>,
    index: Index,
    segments: Vec<Segment>,
    ghost: Ghost,
    phase: Phase,
    root: Root,
    queue: Queue,
    /// What is durable.
    stamp: u64,
    /// Whether nothing that a start has found is in use, so that no log can be newer.
    began_empty: bool,
    /// Volumes whose logs cannot be told yet that the cache has what they have waited for.
    ties: BTreeMap<u32, Tied>,
    /// Next block of the last epoch's half.
    journal_index: u64,
    /// Next segment of a checkpoint under way.
    snapshot: Option<usize>,
    /// Everything on the medium is to be voided instead of recording more.
    renew: bool,
    control: Option<Control>,
    next_sequence: u64,
    free: VecDeque<u32>,
    /// Sealed segments of each stream, oldest first.
    sealed: [VecDeque<u32>; 2],
    open: [Option<Open>; 2],
    /// Sealed segments whose write was not handed out yet.
    unsent: VecDeque<u32>,
    /// Segments that are not on the medium yet: their bytes.
    writing: BTreeMap<u32, Buf>,
    pub packing: Packing,
    pub eviction: Eviction,
    pub worths: Worths,
    pins: Pins,
    /// Segments of each stream that eviction has passed over since it found one, and the sequence number at which it
    /// found that all of them are pinned.
    passed_over: [usize; 2],
    all_pinned_at: u64,
    emptying: Option<Emptying>,
    compares: Vec<Compare>,
    /// What no address leads to any more, though the table still has it.
    forgetting: Forgetting,
    /// Blocks of the longest range that is looked up at once.
    pub probes_max: usize,
    /// What the journal that is being read voids: of each range, lines of segments up to a number.
    voids: ExtentIndex,
    /// Once all of that is known, the line at which the walk goes on that voids it.
    void_at: Option<usize>,
    /// Lines that promotions are fetching.
    promised_lines: usize,
    /// Permissions that were given and are not back.
    permissions: usize,
    failure: Option<SsdFailure>,
    closing: bool,
    pub counters: Counters,
}

impl Ssd {
    /// The tier of a region, or `None` if its size or its lines are out of bounds.
    /// An operation that takes longer than `answer_max` counts as failed.
    pub fn new(
        config: SsdConfig,
        answer_max: Nanos,
        now: Nanos,
        pool: Rc<Pool>,
        actions: &mut Vec<Action>,
    ) -> Option<Self> {
        let device = Device::new(Rc::clone(&pool), answer_max, now);
        let mut this = Self::idle(config, device, pool)?;
        this.drive(actions);
        Some(this)
    }

    /// The tier of a region whose device is not there: offline until it is readmitted. The
    /// identity must be one that no medium carries.
    pub fn absent(config: SsdConfig, answer_max: Nanos, pool: Rc<Pool>) -> Option<Self> {
        let device = Device::new(Rc::clone(&pool), answer_max, Nanos(0));
        let mut this = Self::idle(config, device, pool)?;
        this.give_up(SsdFailure::Absent, Burn::Done);
        Some(this)
    }

    fn idle(config: SsdConfig, device: Device, pool: Rc<Pool>) -> Option<Self> {
        let layout = Layout::new(config.bytes, config.line_blocks)?;
        let lines = layout.segments * layout.plain_lines;
        Some(Self {
            config,
            layout,
            pool,
            device,
            control_memory: control::memory(),
            index: Index::new(layout.segments, &layout),
            segments: vec![Segment::NEW; layout.segments],
            ghost: Ghost::new(lines / 2),
            phase: Phase::Superblocks(Vec::new()),
            root: Root::fresh(0, true),
            queue: Queue::default(),
            stamp: 0,
            began_empty: false,
            ties: BTreeMap::new(),
            journal_index: 0,
            snapshot: None,
            renew: false,
            control: None,
            next_sequence: 0,
            free: VecDeque::new(),
            sealed: [const { VecDeque::new() }; 2],
            open: [None, None],
            unsent: VecDeque::new(),
            writing: BTreeMap::new(),
            packing: Packing::default(),
            eviction: Eviction::default(),
            worths: Worths::default(),
            pins: Pins::default(),
            passed_over: [0; 2],
            all_pinned_at: 0,
            emptying: None,
            compares: Vec::new(),
            forgetting: Forgetting::default(),
            probes_max: CACHE_PROBE_BLOCKS_MAX,
            voids: ExtentIndex::default(),
            void_at: None,
            promised_lines: 0,
            permissions: 0,
            failure: None,
            closing: false,
            counters: Counters::default(),
        })
    }

    /// Whether the device may be used again: the tier is offline for good, and nothing of it is
    /// under way.
    pub fn can_readmit(&self) -> bool {
        matches!(self.phase, Phase::Offline(Burn::Done))
            && self.device.under_way() == 0
            && self.permissions == 0
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
            ..self.config.clone()
        };
        let fresh = Self::idle(config, self.device.renewed(), Rc::clone(&self.pool));
        let before = core::mem::replace(self, fresh.expect("its sizes were good before"));
        // Volumes wait for numbers of the queue.
        self.queue = before.queue;
        self.counters = before.counters;
        self.counters.readmissions += 1;
        self.counters.losses += 1;
        self.packing = before.packing;
        self.pins = before.pins;
        self.eviction.marks = before.eviction.marks;
        self.worths = before.worths;
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
        !matches!(self.phase, Phase::Offline(_)) || self.control.is_some()
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
            Op::Superblock => self.superblock_read(data.as_deref()),
            Op::Footer(segment) => self.footer_read(segment, data.as_deref()),
            Op::Journal => self.journal_read(data.as_deref()),
            Op::Control => self.control_written(ok),
            Op::Segment(segment) => self.segment_written(segment, ok),
            Op::Compare => self.compare_read(completion.token, data.as_deref()),
            Op::Keep { line, key, uses } => self.keep_read(line, key, uses, data.as_deref()),
        }
        self.drive(actions);
    }

    /// Push whatever can go on now.
    pub fn drive(&mut self, actions: &mut Vec<Action>) {
        if self.closing {
            self.queue.want();
        }
        match self.phase {
            Phase::Footers { .. } | Phase::Journal(_) if self.renew => {
                self.start_forming(self.root.format + 1);
            }
            Phase::Superblocks(_) => self.read_superblocks(actions),
            Phase::Footers { .. } => self.read_footers(actions),
            Phase::Journal(_) => self.read_journal(actions),
            Phase::Ready => {
                self.drive_emptying(actions);
                self.drive_compares(actions);
                self.drive_writes(actions);
            }
            Phase::Starting | Phase::Forming { .. } | Phase::Offline(_) => {}
        }
        self.drive_control(actions);
    }

    fn count_outcome(&mut self, is_write: bool, ok: bool) {
        let too_many = self.device.judge(is_write, ok);
        self.counters.device_errors += u64::from(!ok);
        if too_many && !matches!(self.phase, Phase::Offline(_)) {
            // Without having read the superblocks, no number is known that would void them for sure.
            let attempts = match self.phase {
                Phase::Superblocks(_) => 0,
                _ => CACHE_ERRORS_IN_ROW_MAX,
            };
            self.give_up(SsdFailure::Errors, Burn::Wanted(attempts));
        }
    }

    /// Go offline, or once offline, give up voiding the superblocks.
    fn give_up(&mut self, why: SsdFailure, burn: Burn) {
        if matches!(self.phase, Phase::Offline(_)) {
            self.control = None;
            self.phase = Phase::Offline(burn);
            return;
        }
        self.counters.failures += 1;
        self.failure = Some(why);
        if why == SsdFailure::Silent {
            // Nothing is waited for any more; what it wrote may still come about.
            self.counters.device_errors += 1;
            self.control = None;
        }
        self.phase = Phase::Offline(burn);
        self.queue.supersede();
        self.forget_all();
        self.index = Index::new(0, &self.layout);
        self.ghost = Ghost::new(0);
        self.segments = Vec::new();
        self.free.clear();
    }

    /// Empty the memory side: nothing on the medium counts any more.
    fn forget_all(&mut self) {
        let layout = &self.layout;
        self.index = Index::new(layout.segments, layout);
        self.segments.fill(Segment::NEW);
        self.free = (0..layout.segments as u32).collect();
        self.sealed = [const { VecDeque::new() }; 2];
        self.open = [None, None];
        self.unsent.clear();
        self.writing.clear();
        self.emptying = None;
        self.compares.clear();
        self.forgetting = Forgetting::default();
        (self.voids, self.void_at) = (ExtentIndex::default(), None);
        self.snapshot = None;
        self.journal_index = 0;
    }

    fn line_key(&self, key: BlockKey) -> u64 {
        key.0 & !(self.layout.line_blocks as u64 - 1)
    }

    fn is_ready_phase(&self) -> bool {
        matches!(self.phase, Phase::Ready)
    }

    /// Find a block; what is in memory is decrypted, what is on the device is not.
    pub fn lookup(&mut self, key: BlockKey, cipher: Option<&dyn BlockCipher>) -> Found {
        if !self.is_ready_phase() {
            return Found::Absent;
        }
        let first = self.line_key(key);
        let Some(line) = self.find(first) else {
            return Found::Absent;
        };
        let uses = self.index.uses(line);
        self.index.set_uses(line, uses + 1);
        let block = (key.0 - first) as usize;
        let segment = self.index.segment_of(line);
        match self.segments[segment].state {
            SegmentState::Open | SegmentState::Sealing => self
                .find_in_memory(line, key, cipher)
                .map_or(Found::Absent, Found::Memory),
            SegmentState::Sealed | SegmentState::Emptying => {
                let Some(pins) = self.segments[segment].pins.checked_add(1) else {
                    return Found::Absent;
                };
                self.segments[segment].pins = pins;
                self.permissions += 1;
                Found::Device(self.read_of(line, key, block))
            }
            SegmentState::Free => unreachable!("no address leads to a free segment"),
        }
    }

    pub fn contains(&self, key: BlockKey) -> bool {
        self.is_ready_phase() && self.find(self.line_key(key)).is_some()
    }

    /// The line that an address leads to, unless that is to be forgotten.
    fn find(&self, key: u64) -> Option<Line> {
        if self.forgetting.covers(key) {
            return None;
        }
        self.index.find(key)
    }

    /// A block of a line that is not on the medium yet.
    fn find_in_memory(
        &mut self,
        line: Line,
        key: BlockKey,
        cipher: Option<&dyn BlockCipher>,
    ) -> Option<Buf> {
        let first = BlockKey(self.line_key(key));
        let start = (key.0 - first.0) as usize * BLOCK_BYTES;
        let is_packed = self.index.is_packed(line);
        let sealing = self.writing.get(&(self.index.segment_of(line) as u32));
        if let Some(buf) = sealing.filter(|_| !is_packed && cipher.is_none()) {
            let start = self.index.place_of(line).offset() + start;
            return Some(buf.slice(start..start + BLOCK_BYTES));
        }
        let mut copy = self.pool.alloc(BLOCK_BYTES)?;
        if !is_packed {
            copy.copy_from_slice(&self.line_in_memory(line)?[start..][..BLOCK_BYTES]);
            if let Some(cipher) = cipher {
                cipher.decrypt(key.block(), &mut copy);
            }
            return Some(copy.freeze());
        }
        let mut packing = core::mem::take(&mut self.packing);
        let is_whole = self.line_in_memory(line).is_some_and(|stored| {
            let line_bytes = self.layout.line_bytes();
            packing.unpack_copy(stored, first, cipher, line_bytes)
        });
        self.packing = packing;
        copy.copy_from_slice(self.packing.unpacked().get(start..start + BLOCK_BYTES)?);
        is_whole.then(|| copy.freeze())
    }

    /// How a block of a line on the medium is read: alone, or with all that the line is made of.
    fn read_of(&self, line: Line, key: BlockKey, block: usize) -> SsdRead {
        let (place, offset) = (self.index.place_of(line), self.line_offset(line));
        let is_packed = self.index.is_packed(line);
        let (before, bytes, blocks) = if is_packed {
            (0, place.bytes(), self.layout.line_blocks - block)
        } else {
            (block * BLOCK_BYTES, BLOCK_BYTES, 1)
        };
        SsdRead {
            key,
            offset: offset + before as u64,
            bytes,
            blocks: blocks as u64,
            line: line.0,
        }
    }

    /// A permission is given back: its segment may be reused once none is left.
    pub fn cancel(&mut self, read: &SsdRead) {
        let permissions = self.permissions.checked_sub(1);
        self.permissions = permissions.expect("a permission is given back once");
        if !self.segments.is_empty() {
            self.unpin(self.index.segment_of(Line(read.line)));
        }
    }

    /// What a read is about, plain, and whether it still belongs to its address.
    pub fn finish<'a>(
        &'a mut self,
        read: &SsdRead,
        data: Option<&'a mut [u8]>,
        cipher: Option<&dyn BlockCipher>,
    ) -> Result<(&'a [u8], bool), Corrupt> {
        if self.segments.is_empty() {
            // Offline: the checksums are gone.
            self.cancel(read);
            return Err(Corrupt);
        }
        let line = Line(read.line);
        let first = BlockKey(self.line_key(read.key));
        let block = (read.key.0 - first.0) as usize;
        let is_packed = self.index.is_packed(line);
        let expected = self.index.checksums(line);
        let expected = if is_packed {
            expected
        } else {
            &expected[block..=block]
        };
        let is_sound = data.as_deref().map(|data| has_checksums(data, expected));
        self.cancel(read);
        self.count_outcome(false, is_sound.is_some());
        let is_current = self.find(first.0) == Some(line);
        let Some(data) = data.filter(|_| is_sound == Some(true)) else {
            self.counters.corrupt_blocks += u64::from(is_sound.is_some());
            return Err(self.is_bad(line));
        };
        if !is_packed {
            if let Some(cipher) = cipher {
                cipher.decrypt(read.key.block(), data);
            }
            return Ok((data, is_current));
        }
        let line_bytes = self.layout.line_bytes();
        if !self.packing.unpack(data, first, cipher, line_bytes) {
            self.counters.corrupt_blocks += 1;
            return Err(self.is_bad(line));
        }
        let start = block * BLOCK_BYTES;
        let end = start + read.blocks as usize * BLOCK_BYTES;
        Ok((&self.packing.unpacked()[start..end], is_current))
    }

    fn is_bad(&mut self, line: Line) -> Corrupt {
        if self.is_ready_phase() {
            self.distrust(line);
        }
        Corrupt
    }

    /// Queue an entry; if too many wait already (the device hangs), void everything instead.
    fn record(&mut self, entry: Entry) {
        if self.renew || self.queue.len() >= CACHE_INVALIDATIONS_MAX {
            self.renew = true;
            self.queue.supersede();
            self.queue.count_unrecorded();
        } else {
            self.queue.push(entry);
        }
    }

    /// Drop a line whose bytes cannot be had.
    fn distrust(&mut self, line: Line) {
        if self.index.primary(line).is_some() {
            let segment = self.index.segment_of(line);
            self.record(Entry::Segment {
                segment: segment as u32,
                sequence: self.segments[segment].sequence,
                void: 1 << self.index.slot_of(line),
            });
        }
        self.index.unmap_line(line);
        self.counters.losses += 1;
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
                self.queue.count_unrecorded();
                return;
            }
            Phase::Forming { .. } => {
                // Nothing counts once this is done, and it is not done before.
                self.queue.count_unrecorded();
                return;
            }
            _ => {
                // What the medium holds is not known yet.
                self.record(Entry::Range {
                    first: first.0,
                    blocks,
                    upto: u64::MAX,
                });
                return;
            }
        }
        for compare in &mut self.compares {
            let key = compare.key;
            compare.cancelled |= key < end && first.0 < key + self.layout.line_blocks as u64;
        }
        if blocks > self.probes_max as u64 {
            self.forget(first, end);
        } else {
            self.unmap(first, blocks);
        }
    }

    /// Let no address of a short range lead anywhere, from now on and after a restart.
    fn unmap(&mut self, first: BlockKey, blocks: u64) {
        let upto = self.next_sequence - 1;
        let mut sealed = false;
        for key in self
            .index
            .addresses_in(first.0, first.0.saturating_add(blocks))
        {
            if let Some(line) = self.index.unmap(key) {
                let state = self.segments[self.index.segment_of(line)].state;
                sealed |= state != SegmentState::Open;
            }
        }
        if sealed {
            self.record(Entry::Range {
                first: first.0,
                blocks,
                upto,
            });
        }
    }

    /// Let no address of a long range lead anywhere. It is recorded at once, for what is in a sealed segment; what is
    /// in an open one is dropped when that is sealed, if not before.
    fn forget(&mut self, first: BlockKey, end: u64) {
        if self.index.used_lines() == 0 {
            return;
        }
        let joined = self.forget_lines(first.0, end);
        let is_on_medium = !self.sealed.iter().all(VecDeque::is_empty) || self.emptying.is_some();
        if is_on_medium {
            // What goes with it is recorded, too: nothing is, once no line is found there any more.
            let (first, end) = joined.unwrap_or((first.0, end));
            self.record(Entry::Range {
                first,
                blocks: end - first,
                upto: self.next_sequence - 1,
            });
        }
    }

    /// Whole lines, so that none is found by a part of it. Returns what is forgotten instead if that is more.
    fn forget_lines(&mut self, first: u64, end: u64) -> Option<(u64, u64)> {
        let line_blocks = self.layout.line_blocks as u64;
        let first = first / line_blocks * line_blocks;
        let end = end.checked_next_multiple_of(line_blocks).unwrap_or(end);
        let joined = self.forgetting.add(first, end);
        // Of what lies between two ranges, something may be pinned.
        self.counters.losses += u64::from(joined.is_some());
        joined
    }

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.index.work() + self.forgetting.work() + self.voids.work()
    }

    /// Whether nothing is left to forget.
    pub fn has_forgotten(&self) -> bool {
        self.forgetting.is_empty() && self.void_at.is_none()
    }

    /// Whether a part of a range is being forgotten.
    pub fn refuses(&self, first: u64, end: u64) -> bool {
        let line_blocks = self.layout.line_blocks as u64;
        let end = end.checked_next_multiple_of(line_blocks).unwrap_or(end);
        (self.forgetting).overlaps(first / line_blocks * line_blocks, end)
    }

    /// Drop what is to be forgotten in the next `places_max` places. Nothing of it comes to another place
    /// meanwhile: what is filled, shared or kept is looked at before.
    pub fn forget_some(&mut self, places_max: usize) {
        self.void_some(places_max);
        if self.forgetting.is_empty() {
            return;
        }
        let places = self.index.places();
        for place in self.forgetting.next(places, places_max) {
            if let Some((key, _)) = self.index.address_at(place)
                && self.forgetting.covers(key)
            {
                self.index.unmap(key);
            }
        }
        self.forgetting.end_walk(self.index.places());
    }

    /// One bit for each slot of a segment whose line is to be forgotten under its primary address.
    fn forgotten_bits(&self, segment: usize) -> u128 {
        if self.forgetting.is_empty() {
            return 0;
        }
        (0..self.layout.lines_per_segment).fold(0, |bits, slot| {
            let key = self.index.primary(self.index.line_at(segment, slot));
            let is_one = key.is_some_and(|key| self.forgetting.covers(key));
            bits | u128::from(is_one) << slot
        })
    }

    pub fn barrier(&mut self) -> u64 {
        self.queue.want()
    }

    pub fn persisted(&self) -> u64 {
        self.queue.durable()
    }

    pub fn must_reset(&self) -> bool {
        matches!(self.phase, Phase::Offline(Burn::Wanted(0))) && self.control.is_none()
    }

    pub fn reset_recorded(&mut self) {
        if let Phase::Offline(burn) = &mut self.phase {
            *burn = Burn::Done;
            let all = self.queue.supersede();
            self.queue.settle(all);
        }
    }

    pub fn is_loaded(&self) -> bool {
        matches!(self.phase, Phase::Ready | Phase::Offline(_))
    }

    pub fn state(&self) -> SsdState {
        match self.phase {
            Phase::Superblocks(_)
            | Phase::Footers { .. }
            | Phase::Journal(_)
            | Phase::Starting
            | Phase::Forming { .. } => SsdState::Warming,
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
        self.queue.want();
    }

    pub fn is_closed(&self) -> bool {
        let still = self.control.is_none() && self.device.under_way() == 0;
        self.closing
            && match self.phase {
                Phase::Ready => {
                    still && self.writing.is_empty() && self.queue.is_settled() && !self.has_open()
                }
                // What a silent device has not ended is not waited for.
                Phase::Offline(burn) => {
                    self.control.is_none() && matches!(burn, Burn::Done | Burn::Wanted(0))
                }
                _ => false,
            }
    }

    pub fn used_lines(&self) -> usize {
        self.index.used_lines()
    }

    /// Blocks that these take on the device.
    pub fn used_blocks(&self) -> usize {
        self.index.used_blocks()
    }

    /// Lines that fit as they are.
    pub fn lines(&self) -> usize {
        self.segments.len() * self.layout.plain_lines
    }

    pub fn index_bytes(&self) -> usize {
        self.index.bytes()
            + self.ghost.bytes()
            + self.packing.memory_bytes()
            + self.segments.len() * (size_of::<Segment>() + size_of::<u32>())
    }

    pub fn check_invariants(&self) {
        if !self.is_ready_phase() {
            return;
        }
        self.index.check_invariants();
        let queued = self.sealed.iter().map(VecDeque::len).sum::<usize>();
        let open = self.open.iter().flatten().count();
        let emptying = usize::from(self.emptying.is_some());
        assert_eq!(
            self.free.len() + queued + open + emptying,
            self.segments.len(),
            "every segment is in one place"
        );
        for &segment in &self.free {
            let segment = self.segments[segment as usize];
            assert!(segment.state == SegmentState::Free && segment.pins == 0);
        }
        for segment in &self.segments {
            let sealed = matches!(segment.state, SegmentState::Sealing | SegmentState::Sealed);
            assert!(!sealed || segment.sequence < self.next_sequence);
        }
        assert!(self.queue.len() <= CACHE_INVALIDATIONS_MAX);
        assert!(self.unsent.len() <= self.writing.len());
        assert!(self.compares.len() <= CACHE_READS_MAX);
        let reserved = self.journal_index + self.snapshot_blocks();
        assert!(
            reserved <= self.layout.half_blocks,
            "a checkpoint has its room"
        );
    }
}

/// Whether the blocks of `data` are as many as the checksums, and have them.
fn has_checksums(data: &[u8], checksums: &[u32]) -> bool {
    let blocks = data.chunks_exact(BLOCK_BYTES).map(block_checksum);
    blocks.eq(checksums.iter().copied())
}

impl Segment {
    const NEW: Self = Self {
        sequence: 0,
        pins: 0,
        state: SegmentState::Free,
        stream: Stream::Small,
    };
}
