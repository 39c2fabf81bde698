//! Superblocks and the journal: what makes invalidations durable. See the module above.

use super::{Action, Arena, BLOCK_BYTES, Buf, BufMut, Burn, Op, Phase, Rc, Root, Ssd, Vec, vec};
use crate::cache::journal;
use crate::format::{CACHE_JOURNAL_ENTRIES_MAX, CACHE_SUPERBLOCK_BLOCKS};

/// Blocks that are zeroed by one buffer, and buffers of one write.
const ZERO_BLOCKS: u64 = 16;
const ZERO_BUFFERS: u64 = 16;

/// The one write of superblocks or journal in flight.
#[derive(Debug)]
pub(super) struct Control {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    FormBegun,
    Formed,
    Started,
    CheckpointBegun,
    CheckpointEnded,
    Renewed,
    Burnt,
}

/// Memory for two of the largest control writes: a driver may still hold the one that has just
/// ended when the next begins.
pub(super) fn memory() -> Rc<Arena> {
    Arena::new(2 * ZERO_BLOCKS as usize)
}

impl Ssd {
    /// Write what the journal or the superblocks need next, if nothing is in flight.
    pub(super) fn drive_control(&mut self, actions: &mut Vec<Action>) {
        if self.control.is_none() {
            self.control = self.next_control();
        }
        let Some(control) = &mut self.control else {
            return;
        };
        if core::mem::replace(&mut control.sent, true) {
            return;
        }
        let (offset, data) = (control.offset, control.data.clone());
        self.device.write(Op::Control, offset, data, true, actions);
    }

    /// Whether superblocks are on their way that void all of the medium.
    pub(super) fn is_renewing(&self) -> bool {
        let purpose = self.control.as_ref().map(|control| control.purpose);
        matches!(
            purpose,
            Some(Purpose::Root {
                step: Step::Renewed,
                ..
            })
        )
    }

    fn next_control(&mut self) -> Option<Control> {
        match self.phase {
            Phase::Forming { begun: false } => {
                self.write_pair(Root::fresh(self.root.format, true), Step::FormBegun)
            }
            Phase::Forming { begun: true } => self.zero_journal(),
            Phase::Starting => self.write_root(self.root.started(self.stamp), Step::Started),
            Phase::Offline(Burn::Wanted(attempts @ 1..)) => {
                self.phase = Phase::Offline(Burn::Wanted(attempts - 1));
                self.write_pair(Root::fresh(self.root.format + 1, true), Step::Burnt)
            }
            Phase::Offline(_)
            | Phase::Superblocks(_)
            | Phase::Footers { .. }
            | Phase::Journal(_) => None,
            Phase::Ready => self.next_journal_write(),
        }
    }

    fn next_journal_write(&mut self) -> Option<Control> {
        if self.renew {
            let root = Root {
                incarnation: self.root.incarnation,
                stamp: self.next_stamp(),
                ..Root::fresh(self.root.format + 1, false)
            };
            let control = self.write_pair(root, Step::Renewed)?;
            self.renew = false;
            self.queue.supersede();
            return Some(control);
        }
        match self.snapshot {
            Some(next) if next >= self.store.segments.len() => {
                let root = Root {
                    journal_first: self.root.journal_last,
                    stamp: self.stamp,
                    ..self.root
                };
                self.write_root(root, Step::CheckpointEnded)
            }
            None if !self.queue.is_due() || self.queue.len() == 0 => None,
            None if self.journal_room() == 0 => {
                let root = Root {
                    journal_last: self.root.journal_last + 1,
                    stamp: self.stamp,
                    ..self.root
                };
                self.write_root(root, Step::CheckpointBegun)
            }
            _ => self.write_journal(),
        }
    }

    /// Blocks of the present half that invalidations may take: what a snapshot does not need.
    pub(super) fn journal_room(&self) -> u64 {
        self.store
            .layout
            .half_blocks
            .saturating_sub(self.journal_index + self.snapshot_blocks())
    }

    /// Blocks that the rest of the snapshot under way needs.
    pub(super) fn snapshot_blocks(&self) -> u64 {
        self.snapshot.map_or(0, |next| {
            (self.store.segments.len() - next).div_ceil(CACHE_JOURNAL_ENTRIES_MAX) as u64
        })
    }

    fn control_buffer(&self, blocks: usize) -> Option<BufMut> {
        (0..self.control_memory.blocks())
            .step_by(blocks)
            .find_map(|block| self.control_memory.claim(block, blocks))
    }

    fn write_journal(&mut self) -> Option<Control> {
        let mut block = self.control_buffer(1)?;
        let room = if self.journal_room() > 0 {
            CACHE_JOURNAL_ENTRIES_MAX
        } else {
            0
        };
        let mut entries = self.queue.take(room);
        let counted = entries.len() as u64;
        let mut snapshot = self.snapshot;
        if let Some(next) = &mut snapshot {
            while *next < self.store.segments.len() && entries.len() < CACHE_JOURNAL_ENTRIES_MAX {
                entries.extend(self.store.voids_of(*next));
                *next += 1;
            }
        }
        let (epoch, index) = (self.root.journal_last, self.journal_index);
        let at = journal::At {
            format: self.root.format,
            epoch,
            index,
        };
        journal::write_block(at, self.next_stamp(), &entries, &mut block);
        Some(Control {
            offset: self.store.layout.journal_offset(epoch, index),
            data: vec![block.freeze()],
            purpose: Purpose::Journal { counted, snapshot },
            sent: false,
        })
    }

    /// The next superblock, in the place of the older one.
    fn write_root(&self, root: Root, step: Step) -> Option<Control> {
        let root = Root {
            sequence: self.root.sequence + 1,
            ..root
        };
        let mut block = self.control_buffer(1)?;
        root.write(&self.config, &mut block);
        Some(Control {
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
    fn write_pair(&mut self, root: Root, step: Step) -> Option<Control> {
        const ZEROES: usize = 2;
        let mut blocks = self.control_buffer(2 + ZEROES)?;
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
        Some(Control {
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
    fn zero_journal(&mut self) -> Option<Control> {
        let blocks = 2 * self.store.layout.half_blocks;
        let start = self.journal_index;
        if start >= blocks {
            return self.write_pair(Root::fresh(self.root.format, false), Step::Formed);
        }
        let end = (start + ZERO_BLOCKS * ZERO_BUFFERS).min(blocks);
        let mut zeroes = self.control_buffer(ZERO_BLOCKS as usize)?;
        zeroes.fill(0);
        let zeroes = zeroes.freeze();
        let data = (start..end)
            .step_by(ZERO_BLOCKS as usize)
            .map(|block| zeroes.slice(0..(end - block).min(ZERO_BLOCKS) as usize * BLOCK_BYTES))
            .collect();
        Some(Control {
            offset: self.store.layout.journal_offset(0, start),
            data,
            purpose: Purpose::Zero { end },
            sent: false,
        })
    }

    pub(super) fn control_written(&mut self, ok: bool) {
        let Some(control) = &mut self.control else {
            return;
        };
        if !ok {
            // Once offline, whatever it was gives way to burning the superblocks.
            control.sent = false;
            if matches!(self.phase, Phase::Offline(_)) {
                self.control = None;
            }
            return;
        }
        let purpose = control.purpose;
        self.control = None;
        if let Phase::Offline(burn) = &mut self.phase {
            if let Purpose::Root { root, step, .. } = purpose {
                self.root = root;
                if step == Step::Burnt {
                    *burn = Burn::Done;
                    let all = self.queue.supersede();
                    self.queue.settle(all);
                }
            }
            return;
        }
        match purpose {
            Purpose::Journal { counted, snapshot } => {
                self.journal_index += 1;
                self.stamp = self.next_stamp();
                self.snapshot = snapshot;
                self.queue.advance(counted);
            }
            Purpose::Zero { end } => self.journal_index = end,
            Purpose::Root {
                root,
                settles,
                step,
            } => {
                self.root = root;
                self.stamp = root.stamp;
                self.queue.settle(settles);
                self.root_written(step);
            }
        }
    }

    fn root_written(&mut self, step: Step) {
        match step {
            Step::FormBegun => self.phase = Phase::Forming { begun: true },
            Step::Formed => self.serve_cold(),
            Step::Started => self.serve_warm(),
            Step::CheckpointBegun => {
                self.journal_index = 0;
                self.snapshot = Some(0);
            }
            Step::CheckpointEnded => self.snapshot = None,
            Step::Renewed => {
                self.journal_index = 0;
                self.snapshot = None;
            }
            Step::Burnt => unreachable!("superblocks are burnt offline"),
        }
    }
}
