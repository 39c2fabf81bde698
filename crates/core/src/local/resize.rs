//! Changing the size of a local store, while clients read and write below both sizes.
//!
//! ```text
//!   grow:   settling ──► reserving ──► pages ──► durable ──► backend cut ──► backend grown ──► recording ──► answered
//!                            └────────────┴── failed: giving back ──┴──────────────┘
//!   shrink: settling ──► recording ──► cutting ──► backend cut ──► store cut ──► answered
//! ```
//!
//! The superblock says which size a crash leaves, and it never says more than store and backend have. So a local store
//! grows after both of them, and shrinks before them.
//!
//! * *Settling*: nobody touches what will be cut off, and the backend may be resized. A tier to a backend that shows
//!   with a resize what it was given ends first. Else one that would copy what is cut off is given up, and begins anew
//!   afterwards; no other begins until then.
//! * *Pages*, *durable*: both copies of new pages say that nothing is there, whatever an earlier, larger local store
//!   has left in their place; they are of a newer commit than that, and the superblock of the new size knows them. The
//!   same of the last page that there is: what was cut off in it is absent ([`Map::load`], and when this local store
//!   has shrunk), and that is durable before a superblock is larger.
//! * *Backend cut*: to the size of the local store, since a shrink that was interrupted may have left it larger. Only
//!   then what it grows by reads as zeroes.
//! * *Recording*: the superblock gets the new size, once a commit has brought everything before it.
//! * *Cutting*: the map lets go of what is behind the end, in bounded turns between commits.
//!
//! A failure before the superblock is written leaves the old size. A commit that fails is the end of the local store,
//! as ever, and of either size; so a shrink ends well then, since its caller must not go back to the larger one, and a
//! growth with the error. A shrunk local store stays so if its backend or store cannot be cut: whoever grows it, or
//! asks for the same size, cuts them.
//!
//! [`Map::load`]: super::map::Map::load

use alloc::vec;
use alloc::vec::Vec;

use zerocopy::IntoBytes;

use super::format::{PAGE_BLOCKS, empty_page, pages};
use super::store::Purpose;
use super::{Action, LocalStore, end};
use crate::base::error::IoError;
use crate::base::io::{Done, Token};
use crate::base::limits::BLOCK_BYTES;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Writes of new pages under way at most.
const PAGE_WRITES_MAX: usize = 32;

/// Where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Settling,
    Reserving,
    Pages {
        next: u64,
        in_flight: usize,
        error: Option<IoError>,
    },
    /// By the commit with this number.
    Durable(u64),
    BackendEnds,
    BackendGrows,
    Recording,
    Cutting,
    BackendCut,
    StoreCut,
    GivingBack(IoError),
}

/// The change of size that is under way.
#[derive(Debug)]
pub(super) struct Resize {
    token: Token,
    /// Blocks before and after.
    from: u64,
    to: u64,
    stage: Stage,
    /// Why it cannot settle.
    trouble: Option<IoError>,
}

impl Resize {
    fn shrinks(&self) -> bool {
        self.to < self.from
    }
}

impl LocalStore {
    pub(super) fn ask_to_resize(&mut self, token: Token, bytes: u64, actions: &mut Vec<Action>) {
        let (from, to) = (self.store.map.blocks(), bytes / BLOCK);
        let is_held = self.tier.is_to_be_held();
        let refused = match self.store.failed {
            Some(error) => Some(error),
            None if from == to && is_held => {
                return end(actions, token, Ok(Done::Written));
            }
            None if is_held || self.resize.is_some() => Some(IoError::Failed),
            None if to == 0 || !bytes.is_multiple_of(BLOCK) => Some(IoError::Failed),
            None => None,
        };
        if let Some(error) = refused {
            return end(actions, token, Err(error));
        }
        self.tier.failure = None;
        self.resize = Some(Resize {
            token,
            from,
            to,
            stage: Stage::Settling,
            trouble: None,
        });
    }

    /// The blocks that may be touched: those of the smaller size while it changes.
    pub(super) fn end_block(&self) -> u64 {
        let blocks = self.store.config.bytes / BLOCK;
        let to = self.resize.as_ref().map_or(blocks, |resize| resize.to);
        blocks.min(to)
    }

    /// The blocks that are gone through: all of them, until a tier is out of the way of a change.
    pub(super) fn patrol_end(&self) -> u64 {
        if self.tier.is_kept_off {
            self.end_block()
        } else {
            self.store.config.bytes / BLOCK
        }
    }

    /// Begin nothing more.
    pub(super) fn finish_resize(&mut self) {
        if let Some(resize) = &mut self.resize
            && resize.stage == Stage::Settling
        {
            resize.trouble = Some(IoError::Failed);
        }
    }

    /// What is durable is not known any more. The superblock may have the smaller size by now, so that nobody may go
    /// back to the larger one: whoever opens this local store next goes on with that, or finds it done.
    pub(super) fn give_up_resize(&mut self, error: IoError, actions: &mut Vec<Action>) {
        let resize = self.resize.as_ref();
        let is_decided =
            resize.is_some_and(|resize| resize.shrinks() && resize.stage != Stage::Settling);
        let result = if is_decided {
            Ok(Done::Written)
        } else {
            Err(error)
        };
        self.end_resize(result, actions);
    }

    /// Whether the next turn goes on with it.
    pub(super) fn is_cutting(&self) -> bool {
        let resize = self.resize.as_ref();
        resize.is_some_and(|resize| resize.stage == Stage::Cutting)
            && self.store.commit.is_idle()
            && self.store.map.blocks() > self.end_block()
    }

    /// Go on with it as far as it goes. It is called before a commit may begin.
    pub(super) fn pump_resize(&mut self, actions: &mut Vec<Action>) {
        while self.store.failed.is_none()
            && let Some(resize) = &self.resize
        {
            let (from, to) = (resize.from, resize.to);
            // The tier that it may wait for failed, or is not to be.
            let of_tier = self.tier.failure.filter(|_| !self.tier.is_kept_off);
            let trouble = of_tier.or(resize.trouble);
            let stage = resize.stage;
            let next = match stage {
                Stage::Settling => match trouble {
                    Some(error) => return self.end_resize(Err(error), actions),
                    None if !self.settles() => return,
                    None if to > from => {
                        self.resize_store(to, actions);
                        Stage::Reserving
                    }
                    None if to < from => {
                        self.store.commit.set_bytes(to * BLOCK);
                        Stage::Recording
                    }
                    None => Stage::Cutting,
                },
                Stage::Pages { .. } => match self.write_new_pages(actions) {
                    Some(next) => next,
                    None => return,
                },
                Stage::Durable(commit) if self.store.commit.done >= commit => {
                    self.resize_backend(from, actions);
                    Stage::BackendEnds
                }
                Stage::Recording if self.store.commit.has_bytes(to * BLOCK) => {
                    self.store.config.bytes = to * BLOCK;
                    if to > from {
                        self.store.map.grow(to, self.store.new_generation);
                        return self.end_resize(Ok(Done::Written), actions);
                    }
                    Stage::Cutting
                }
                Stage::Cutting if self.cut(to) => {
                    self.resize_backend(to, actions);
                    Stage::BackendCut
                }
                _ => return,
            };
            if let Some(resize) = &mut self.resize {
                resize.stage = next;
            }
        }
    }

    fn end_resize(&mut self, result: Result<Done, IoError>, actions: &mut Vec<Action>) {
        if let Some(resize) = self.resize.take() {
            self.tier.is_kept_off = false;
            self.store.new_generation = 0;
            end(actions, resize.token, result);
        }
    }

    fn resize_store(&mut self, blocks: u64, actions: &mut Vec<Action>) {
        let bytes = self.store.layout().store_bytes(blocks * BLOCK);
        let token = self.store.token(Purpose::Resize);
        actions.push(Action::StoreResize { token, bytes });
    }

    fn resize_backend(&mut self, blocks: u64, actions: &mut Vec<Action>) {
        let token = self.store.token(Purpose::Resize);
        let bytes = blocks * BLOCK;
        actions.push(Action::BackendResize { token, bytes });
    }

    /// Whether nothing is in the way any more.
    fn settles(&mut self) -> bool {
        let Some(resize) = &self.resize else {
            return false;
        };
        let (to, shrinks) = (resize.to, resize.shrinks());
        if !self.tier.is_kept_off {
            if self.tier.is_to_be_held_next() {
                self.tier.failure = Some(IoError::Failed);
                return false;
            }
            // What was given to it shows with a resize.
            let shows = self.store.config.backend_atomic && !self.store.commit.is_between();
            if shows && self.tier.has_unflushed() {
                self.tier.have_it_flushed(&self.store);
                return false;
            }
            self.tier.is_kept_off = true;
            if shows || shrinks {
                self.tier.restart();
            }
        }
        let is_free = !shrinks && !self.store.config.backend_atomic || self.tier.is_at_rest();
        is_free && !(shrinks && self.is_touched_from(to))
    }

    /// Whether somebody reads or writes blocks from here on.
    fn is_touched_from(&self, block: u64) -> bool {
        let beyond = block..u64::MAX;
        self.writes.overlap(&beyond)
            || self.reads.reach(block)
            || self.patrol.reads(&beyond)
            || self.store.sums.reads_from(block)
    }

    /// Write both copies of pages that there were none of; what is next once all of them are written.
    fn write_new_pages(&mut self, actions: &mut Vec<Action>) -> Option<Stage> {
        let end_page = pages(self.resize.as_ref()?.to * BLOCK);
        loop {
            let Stage::Pages {
                next,
                in_flight,
                error,
            } = &mut self.resize.as_mut()?.stage
            else {
                return None;
            };
            if *next == end_page || error.is_some() {
                if *in_flight > 0 {
                    return None;
                }
                let failed = *error;
                return Some(match failed {
                    None => {
                        self.store.commit.wanted = true;
                        Stage::Durable(self.store.commit.begun + 1)
                    }
                    Some(error) => {
                        self.give_back(actions);
                        Stage::GivingBack(error)
                    }
                });
            }
            if *in_flight == PAGE_WRITES_MAX {
                return None;
            }
            let mut buf = self.store.pool.alloc(BLOCK_BYTES)?;
            let page = *next;
            *next += 1;
            *in_flight += 1;
            let generation = self.store.new_generation;
            let empty =
                empty_page(self.store.config.home, generation, page).tagged(self.store.keys());
            buf.copy_from_slice(empty.as_bytes());
            let copy = buf.freeze();
            self.store.status.map_written_bytes += 2 * BLOCK;
            let token = self.store.token(Purpose::Resize);
            actions.push(Action::StoreWrite {
                token,
                offset: self.store.layout().page_offset(page, 0),
                data: vec![copy.clone(), copy],
            });
        }
    }

    /// The store needs no more than before.
    fn give_back(&mut self, actions: &mut Vec<Action>) {
        self.resize_store(self.store.map.blocks(), actions);
    }

    /// Let go of blocks from here on, as many as this turn may; whether that is all, and nothing of them is written any
    /// more. No commit is under way meanwhile, which would have pages of theirs.
    fn cut(&mut self, to: u64) -> bool {
        if !self.store.commit.is_idle() {
            return false;
        }
        let blocks = self.store.map.blocks();
        let until = to.max(blocks.saturating_sub(self.store.turn_blocks));
        self.store.turn_blocks -= blocks - until;
        self.store.map.cut(until);
        if until > to {
            return false;
        }
        let sums = &mut self.store.sums;
        sums.cut(to);
        let is_drained = !sums.writes_from(to);
        let until = sums.trusted_until;
        if until != u64::MAX && until >= to {
            self.store.is_believed_until(to);
        }
        is_drained
    }

    /// The store or the backend has been resized, or new pages were written.
    pub(super) fn resize_moved(&mut self, result: Result<(), IoError>, actions: &mut Vec<Action>) {
        let Some(resize) = &mut self.resize else {
            return;
        };
        let (to, first) = (resize.to, resize.from.div_ceil(PAGE_BLOCKS));
        if let Stage::Pages {
            in_flight, error, ..
        } = &mut resize.stage
        {
            *in_flight -= 1;
            *error = error.or(result.err());
            return;
        }
        let next = match (resize.stage, result) {
            (Stage::Reserving | Stage::BackendEnds | Stage::BackendGrows, Err(error)) => {
                self.give_back(actions);
                Stage::GivingBack(error)
            }
            (Stage::Reserving, Ok(())) => {
                self.store.new_generation = self.store.commit.number + 1;
                Stage::Pages {
                    next: first,
                    in_flight: 0,
                    error: None,
                }
            }
            (Stage::BackendEnds, Ok(())) => {
                self.resize_backend(to, actions);
                Stage::BackendGrows
            }
            (Stage::BackendGrows, Ok(())) => {
                self.store.commit.set_bytes(to * BLOCK);
                Stage::Recording
            }
            (Stage::BackendCut, _) => {
                self.resize_store(to, actions);
                Stage::StoreCut
            }
            (Stage::StoreCut, _) => return self.end_resize(Ok(Done::Written), actions),
            (Stage::GivingBack(error), _) => return self.end_resize(Err(error), actions),
            (stage, _) => unreachable!("nothing of a resize is under way: {stage:?}"),
        };
        if let Some(resize) = &mut self.resize {
            resize.stage = next;
        }
    }

    pub(super) fn check_resize(&self) {
        let Some(resize) = &self.resize else {
            return;
        };
        debug_assert!(
            !resize.shrinks()
                || resize.stage == Stage::Settling
                || !self.is_touched_from(resize.to),
            "what is cut off is touched"
        );
        debug_assert!(
            resize.stage == Stage::Settling || self.tier.is_kept_off,
            "a tier may begin while the backend is resized"
        );
    }
}
