//! Superblocks and the journal: what makes invalidations durable.
//!
//! Invariants:
//! 1. One write is in flight.
//! 2. A checkpoint names the other half of the journal in the superblock, continues there, and writes the void lines of
//!    every segment as it goes; room for that is reserved, so the journal never blocks for ever.
//! 3. A stamp counts what is durable, and is never given twice: its upper part counts starts.
//! 4. What cannot be recorded, since too much waits, is made needless: superblocks void all of the medium instead.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use super::device::{Device, Op};
use super::store::{Content, Store};
use crate::base::buf::{Arena, Buf, BufMut};
use crate::base::io::Action;
use crate::base::limits::{BLOCK_BYTES, CACHE_INVALIDATIONS_MAX};
use crate::cache::journal::{self, Entry, Layout, Queue};
use crate::cache::root::Root;
use crate::cache::{SsdConfig, Tie};
use crate::format::{CACHE_JOURNAL_ENTRIES_MAX, CACHE_START_SHIFT, CACHE_SUPERBLOCK_BLOCKS};

/// Blocks that are zeroed by one buffer, and buffers of one write.
const ZERO_BLOCKS: u64 = 16;
const ZERO_BUFFERS: u64 = 16;

/// The write in flight.
#[derive(Debug)]
struct Write {
    offset: u64,
    data: Vec<Buf>,
    purpose: Purpose,
    sent: bool,
}

#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// Entries, of which so many were counted, and a piece of a snapshot up to this segment.
    Journal {
        counted: u64,
        snapshot: Option<usize>,
    },
    /// A root; it makes entries up to `settles` needless.
    Root {
        root: Root,
        settles: u64,
        step: Step,
    },
    /// Zeroes in the journal up to this block.
    Zero { end: u64 },
}

/// What superblocks say that they did not say before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing on the medium counts, and it is being made anew.
    FormBegun,
    /// It is made.
    Formed,
    /// Another start has begun.
    Started,
    CheckpointBegun,
    CheckpointEnded,
    /// Nothing of before counts any more; the tier goes on.
    Renewed,
    /// Nothing counts any more.
    Burnt,
}

/// What superblocks and journal are to be written for.
#[derive(Clone, Copy, Debug)]
pub enum Task {
    BeginForming,
    Form,
    Start,
    /// Make invalidations durable, as far as that is due.
    Serve,
    Burn,
}

/// See the module.
#[derive(Debug)]
pub struct Journal {
    config: SsdConfig,
    layout: Layout,
    /// For superblocks and journal blocks, so that an invalidation never waits for the pool.
    memory: Arc<Arena>,
    root: Root,
    queue: Queue,
    /// What is durable.
    stamp: u64,
    /// Next block of the last epoch's half.
    index: u64,
    /// Next segment of a checkpoint under way.
    snapshot: Option<usize>,
    /// Everything on the medium is to be voided instead of recording more.
    renew: bool,
    write: Option<Write>,
}

impl Journal {
    /// The journal of a medium that is not read yet.
    pub fn new(config: SsdConfig, layout: Layout) -> Self {
        Self {
            config,
            layout,
            // Room for two of the largest writes: a driver may still hold the one that has just ended when the next
            // begins.
            memory: Arena::new(2 * ZERO_BLOCKS as usize),
            root: Root::fresh(0, true),
            queue: Queue::default(),
            stamp: 0,
            index: 0,
            snapshot: None,
            renew: false,
            write: None,
        }
    }

    pub fn config(&self) -> &SsdConfig {
        &self.config
    }

    /// What the superblocks say.
    pub fn root(&self) -> &Root {
        &self.root
    }

    /// What footers say that they belong to.
    pub fn content(&self) -> Content {
        Content {
            uuid: self.config.uuid,
            format: self.root.format,
        }
    }

    // Invalidations.

    /// Queue an entry; if too many wait already (the device hangs), void everything instead.
    pub fn record(&mut self, entry: Entry) {
        if self.renew || self.queue.len() >= CACHE_INVALIDATIONS_MAX {
            self.renew = true;
            self.queue.supersede();
            self.queue.count_unrecorded();
        } else {
            self.queue.push(entry);
        }
    }

    /// Count an invalidation of what will not count any more.
    pub fn count_unrecorded(&mut self) {
        self.queue.count_unrecorded();
    }

    /// Make everything durable that was queued so far; once so much is, it is done.
    pub fn want(&mut self) -> u64 {
        self.queue.want()
    }

    /// How much was queued.
    pub fn queued(&self) -> u64 {
        self.queue.queued()
    }

    /// How much of that is durable.
    pub fn durable(&self) -> u64 {
        self.queue.durable()
    }

    /// Whether everything on the medium is to be voided.
    pub fn renews(&self) -> bool {
        self.renew
    }

    /// What waits is not written any more, but not needless either.
    pub fn give_up(&mut self) {
        self.queue.supersede();
    }

    /// Nothing on the medium can count again, so what waits is needless.
    pub fn settle_all(&mut self) {
        let all = self.queue.supersede();
        self.queue.settle(all);
    }

    /// The numbers that volumes wait for go on from those of an earlier journal.
    pub fn continue_queue(&mut self, earlier: Self) {
        self.queue = earlier.queue;
    }

    // A start.

    /// The superblocks were read.
    pub fn found(&mut self, root: Root) {
        self.stamp = root.stamp;
        self.root = root;
    }

    /// The journal was read up to this block, and as far as this stamp.
    pub fn found_end(&mut self, index: u64, stamp: u64) {
        self.index = index;
        self.stamp = self.stamp.max(stamp);
    }

    /// The medium is to be made anew.
    pub fn form(&mut self, format: u64) {
        self.root = Root::fresh(format, true);
    }

    /// It goes on at the front of a half, without a checkpoint.
    pub fn restart(&mut self) {
        self.index = 0;
        self.snapshot = None;
    }

    /// Nothing is on the medium.
    pub fn begin_empty(&mut self) {
        self.settle_all();
        self.renew = false;
        self.index = 0;
    }

    /// What was invalidated before it was known what the medium holds: first key and blocks. It is about the segments of
    /// earlier starts.
    pub fn take_early(&mut self) -> Vec<(u64, u64)> {
        let base = self.root.incarnation << CACHE_START_SHIFT;
        let mut ranges = Vec::new();
        for entry in self.queue.pending_mut() {
            if let Entry::Range {
                first,
                blocks,
                upto: upto @ u64::MAX,
            } = entry
            {
                *upto = base;
                ranges.push((*first, *blocks));
            }
        }
        ranges
    }

    /// Take up a checkpoint that was cut short, if its half still has the room.
    pub fn resume_checkpoint(&mut self) {
        if self.root.journal_first < self.root.journal_last {
            self.snapshot = Some(0);
            if self.room() == 0 {
                self.snapshot = None;
                self.renew = true;
            }
        }
    }

    // Stamps.

    /// The last stamp of this start; it says nothing.
    fn last_stamp(&self) -> u64 {
        self.root.incarnation << CACHE_START_SHIFT | ((1 << CACHE_START_SHIFT) - 1)
    }

    /// The stamp after the present one.
    fn next_stamp(&self) -> u64 {
        (self.stamp + 1).min(self.last_stamp())
    }

    /// What a log may say now, if anything.
    pub fn tie(&self) -> Option<Tie> {
        // Until the superblocks void what the medium holds, they vouch for it as they did before.
        let is_voided = !self.renew && !self.is_renewing();
        (is_voided && self.stamp < self.last_stamp()).then(|| Tie {
            cache: self.content().checksum(),
            stamp: self.stamp,
        })
    }

    /// Whether what a log has waited for is there.
    pub fn has(&self, tie: Tie) -> bool {
        tie.cache == self.content().checksum() && self.root.has(tie.stamp, self.stamp)
    }

    // Writing.

    /// Whether no write is in flight.
    pub fn is_idle(&self) -> bool {
        self.write.is_none()
    }

    /// Whether nothing is left to make durable.
    pub fn is_settled(&self) -> bool {
        self.queue.is_settled()
    }

    /// The write in flight is not waited for any more.
    pub fn abandon_write(&mut self) {
        self.write = None;
    }

    /// With no write in flight, put the next one together that is needed.
    pub fn begin(&mut self, task: Task, store: &Store) {
        self.write = match task {
            Task::BeginForming => {
                self.write_pair(Root::fresh(self.root.format, true), Step::FormBegun)
            }
            Task::Form => self.zero_journal(),
            Task::Start => self.write_root(self.root.started(self.stamp), Step::Started),
            Task::Serve => self.next_write(store),
            Task::Burn => self.write_pair(Root::fresh(self.root.format + 1, true), Step::Burnt),
        };
    }

    /// Hand the write out that was put together.
    pub fn drive(&mut self, device: &mut Device, actions: &mut Vec<Action>) {
        let Some(write) = &mut self.write else {
            return;
        };
        if core::mem::replace(&mut write.sent, true) {
            return;
        }
        let (offset, data) = (write.offset, write.data.clone());
        device.write(Op::Control, offset, data, true, actions);
    }

    /// Whether superblocks are on their way that void all of the medium.
    fn is_renewing(&self) -> bool {
        let purpose = self.write.as_ref().map(|write| write.purpose);
        matches!(
            purpose,
            Some(Purpose::Root {
                step: Step::Renewed,
                ..
            })
        )
    }

    fn next_write(&mut self, store: &Store) -> Option<Write> {
        if self.renew {
            let root = Root {
                incarnation: self.root.incarnation,
                stamp: self.next_stamp(),
                ..Root::fresh(self.root.format + 1, false)
            };
            let write = self.write_pair(root, Step::Renewed)?;
            self.renew = false;
            self.queue.supersede();
            return Some(write);
        }
        match self.snapshot {
            Some(next) if next >= self.layout.segments => {
                let root = Root {
                    journal_first: self.root.journal_last,
                    stamp: self.stamp,
                    ..self.root
                };
                self.write_root(root, Step::CheckpointEnded)
            }
            None if !self.queue.is_due() || self.queue.len() == 0 => None,
            None if self.room() == 0 => {
                let root = Root {
                    journal_last: self.root.journal_last + 1,
                    stamp: self.stamp,
                    ..self.root
                };
                self.write_root(root, Step::CheckpointBegun)
            }
            _ => self.write_journal(store),
        }
    }

    /// Blocks of the present half that invalidations may take: what a snapshot does not need.
    fn room(&self) -> u64 {
        let half_blocks = self.layout.half_blocks;
        half_blocks.saturating_sub(self.index + self.snapshot_blocks())
    }

    /// Blocks that the rest of the snapshot under way needs.
    fn snapshot_blocks(&self) -> u64 {
        self.snapshot.map_or(0, |next| {
            (self.layout.segments - next).div_ceil(CACHE_JOURNAL_ENTRIES_MAX) as u64
        })
    }

    fn buffer(&self, blocks: usize) -> Option<BufMut> {
        (0..self.memory.blocks())
            .step_by(blocks)
            .find_map(|block| self.memory.claim(block, blocks))
    }

    fn write_journal(&mut self, store: &Store) -> Option<Write> {
        let mut block = self.buffer(1)?;
        let room = if self.room() > 0 {
            CACHE_JOURNAL_ENTRIES_MAX
        } else {
            0
        };
        let mut entries = self.queue.take(room);
        let counted = entries.len() as u64;
        let mut snapshot = self.snapshot;
        if let Some(next) = &mut snapshot {
            while *next < self.layout.segments && entries.len() < CACHE_JOURNAL_ENTRIES_MAX {
                entries.extend(store.voids_of(*next));
                *next += 1;
            }
        }
        let (epoch, index) = (self.root.journal_last, self.index);
        let at = journal::At {
            format: self.root.format,
            epoch,
            index,
        };
        journal::write_block(at, self.next_stamp(), &entries, &mut block);
        Some(Write {
            offset: self.layout.journal_offset(epoch, index),
            data: vec![block.freeze()],
            purpose: Purpose::Journal { counted, snapshot },
            sent: false,
        })
    }

    /// The next superblock, in the place of the older one.
    fn write_root(&self, root: Root, step: Step) -> Option<Write> {
        let root = Root {
            sequence: self.root.sequence + 1,
            ..root
        };
        let mut block = self.buffer(1)?;
        root.write(&self.config, &mut block);
        Some(Write {
            offset: CACHE_SUPERBLOCK_BLOCKS[(root.sequence % 2) as usize] * BLOCK_BYTES as u64,
            data: vec![block.freeze()],
            purpose: Purpose::Root {
                root,
                settles: 0,
                step,
            },
            sent: false,
        })
    }

    /// Both superblocks at once, and the zeroes between them: a root that voids everything before.
    fn write_pair(&mut self, root: Root, step: Step) -> Option<Write> {
        const ZEROES: usize = 2;
        let mut blocks = self.buffer(2 + ZEROES)?;
        let (even, rest) = blocks.split_at_mut(BLOCK_BYTES);
        let (odd, zeroes) = rest.split_at_mut(BLOCK_BYTES);
        root.write(&self.config, even);
        let root = Root {
            sequence: root.sequence + 1,
            ..root
        };
        root.write(&self.config, odd);
        zeroes.fill(0);
        let blocks = blocks.freeze();
        let part = |first, count| blocks.slice(first * BLOCK_BYTES..(first + count) * BLOCK_BYTES);
        let [first, second] = CACHE_SUPERBLOCK_BLOCKS;
        let between = (second - first - 1) as usize;
        let mut data = vec![part(0, 1)];
        data.extend(
            (0..between)
                .step_by(ZEROES)
                .map(|block| part(2, ZEROES.min(between - block))),
        );
        data.push(part(1, 1));
        Some(Write {
            offset: first * BLOCK_BYTES as u64,
            data,
            purpose: Purpose::Root {
                root,
                settles: self.queue.queued(),
                step,
            },
            sent: false,
        })
    }

    /// Zeroes for the journal, so that foreign bytes are not taken for damage.
    fn zero_journal(&mut self) -> Option<Write> {
        let blocks = 2 * self.layout.half_blocks;
        let start = self.index;
        if start >= blocks {
            return self.write_pair(Root::fresh(self.root.format, false), Step::Formed);
        }
        let end = (start + ZERO_BLOCKS * ZERO_BUFFERS).min(blocks);
        let mut zeroes = self.buffer(ZERO_BLOCKS as usize)?;
        zeroes.fill(0);
        let zeroes = zeroes.freeze();
        let data = (start..end)
            .step_by(ZERO_BLOCKS as usize)
            .map(|block| zeroes.slice(0..(end - block).min(ZERO_BLOCKS) as usize * BLOCK_BYTES))
            .collect();
        Some(Write {
            offset: self.layout.journal_offset(0, start),
            data,
            purpose: Purpose::Zero { end },
            sent: false,
        })
    }

    /// The write in flight has ended: what superblocks say now, if it was one of them. One that failed is tried again.
    pub fn ended(&mut self, ok: bool, is_offline: bool) -> Option<Step> {
        let write = self.write.as_mut()?;
        if !ok {
            // Once offline, whatever it was gives way to burning the superblocks.
            write.sent = false;
            if is_offline {
                self.write = None;
            }
            return None;
        }
        let purpose = write.purpose;
        self.write = None;
        match purpose {
            Purpose::Root { root, step, .. } if is_offline => {
                self.root = root;
                if step == Step::Burnt {
                    self.settle_all();
                }
                Some(step)
            }
            _ if is_offline => None,
            Purpose::Journal { counted, snapshot } => {
                self.index += 1;
                self.stamp = self.next_stamp();
                self.snapshot = snapshot;
                self.queue.advance(counted);
                None
            }
            Purpose::Zero { end } => {
                self.index = end;
                None
            }
            Purpose::Root {
                root,
                settles,
                step,
            } => {
                self.root = root;
                self.stamp = root.stamp;
                self.queue.settle(settles);
                match step {
                    Step::CheckpointBegun => {
                        self.index = 0;
                        self.snapshot = Some(0);
                    }
                    Step::CheckpointEnded => self.snapshot = None,
                    Step::Renewed => self.restart(),
                    Step::FormBegun | Step::Formed | Step::Started => {}
                    Step::Burnt => unreachable!("superblocks are burnt offline"),
                }
                Some(step)
            }
        }
    }

    pub fn check_invariants(&self) {
        assert!(self.queue.len() <= CACHE_INVALIDATIONS_MAX);
        let reserved = self.index + self.snapshot_blocks();
        assert!(
            reserved <= self.layout.half_blocks,
            "a checkpoint has its room"
        );
    }
}
