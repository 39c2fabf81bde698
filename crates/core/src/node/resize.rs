//! A change of a volume's size while clients go on.
//!
//! ```text
//!  shrinks ─────────────► Tell ─► Ask ─► Destage ─► Check ───────────┐
//!  grows over a cut ───────────► Ask ─► Destage ─► TellTail ─► Tail ──┴─► Whole ─► Drain ─► Forget ─► Void ─► …
//!  grows, atomic flushes ─────────────────────────► TellTail ─► Tail ────► Whole
//!  grows otherwise ───────────────────────────────► TellTail ─► Tail ─────────────────────► Forget
//!
//!  … Void ─┬─ shrinks ──────────► Backend ─► End
//!          └─ grows ────► Cut ──► Backend ─► End
//! ```
//!
//! | step | waits for | leaves with |
//! |---|---|---|
//! | Tell | – | the volume is told of a smaller size; it may refuse for now |
//! | Ask | – | everything is to be destaged |
//! | Destage | nothing is left of that | the volume is told of a smaller size once more |
//! | Check | the volume has the smaller size | – ([`Refusal::StillWritten`]) |
//! | TellTail | – | both superblocks of its log are to say the same |
//! | Tail | they do | – ([`Refusal::Log`]) |
//! | Whole | a backend with atomic flushes has flushed what it was given | – |
//! | Drain | nothing is under way in the backend | – |
//! | Forget | – | the cache forgets what lies beyond the smaller end |
//! | Void | it has, durably | the backend is asked for the smaller size |
//! | Cut | the backend has the present size (only when growing) | it is asked for the new one |
//! | Backend | the backend has the new size | [`Act::End`] |
//!
//! Invariants:
//! 1. The backend always holds all of the volume: it grows before the volume and shrinks after it. Between its growth
//!    and the volume's, whoever asked records the new size.
//! 2. What lies beyond the smaller end is in no log, cache or backend before the volume is larger than that. A node that
//!    went down within a shrink has recorded the smaller size and may have left something in each.
//! 3. No superblock of its log names a tail from which on something lies beyond the end when the volume grows: were the
//!    newest damaged, the one before would bring that back.
//! 4. A backend whose flushes are atomic shows at a resize what it was given: so that is whole then.
//!
//! Failure: the volume keeps the size that it has. One that was told of a smaller size keeps that over a backend that is
//! larger.

use crate::base::error::IoError;
use crate::base::io::BlockKey;
use crate::base::limits::BLOCK_BYTES;
use crate::cache::Barrier;
use crate::volume::Cut;

/// What a change of size looks at.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// The volume's size in bytes.
    pub bytes: u64,
    /// What is left of destaging everything.
    pub destage_left_bytes: u64,
    /// What its log knows of what was cut off.
    pub cut: Cut,
    /// Whether its backend has flushed everything that it was given.
    pub is_flushed: bool,
    /// Whether it is in trouble.
    pub is_in_trouble: bool,
    /// Operations under way in its backend.
    pub under_way: usize,
    /// What of the cache's invalidations is durable.
    pub persisted: Barrier,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Tell the volume that it has so many bytes.
    Tell(u64),
    /// Have the volume destage everything.
    DestageAll,
    /// Have both superblocks of its log say the same.
    TellTail,
    /// Have the cache forget so many blocks from this one on, and say with what barrier ([`Resize::forgotten`]).
    Forget(BlockKey, u64),
    /// Have the backend take so many bytes, and say how that ended ([`Resize::backend_resized`]).
    Backend(u64),
    /// It has ended.
    End(Result<(), Refusal>),
}

/// Why a volume keeps its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// What was cut off before is still in its log: the flush that was to end that was cancelled.
    FlushCancelled,
    /// What lies beyond the new end is being written.
    StillWritten,
    /// Its log cannot say that nothing is left of what was cut off before.
    Log,
    /// The backend has failed.
    Backend(IoError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Tell,
    Ask,
    Destage,
    Check,
    TellTail,
    Tail,
    Whole,
    Drain,
    Forget,
    Void(Option<Barrier>),
    Cut,
    Backend,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Resize {
    step: Step,
    volume: u32,
    before: u64,
    bytes: u64,
    /// Whether flushes of the backend are atomic.
    is_atomic: bool,
    /// Whether it has begun over a log that held what was cut off.
    is_over_cut: bool,
}

impl Resize {
    /// Begin with a volume of that number, over a backend whose flushes are atomic or not.
    pub fn begin(volume: u32, bytes: u64, is_atomic: bool, view: &View) -> Self {
        let before = view.bytes;
        let step = if bytes < before {
            Step::Tell
        } else if view.cut == Cut::Held {
            Step::Ask
        } else {
            Step::TellTail
        };
        Self {
            step,
            volume,
            before,
            bytes,
            is_atomic,
            is_over_cut: view.cut == Cut::Held,
        }
    }

    /// The new size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The size before, in bytes.
    pub fn before(&self) -> u64 {
        self.before
    }

    /// Whether the volume becomes smaller.
    pub fn shrinks(&self) -> bool {
        self.bytes < self.before
    }

    /// Whether the backend is asked for its last size now.
    pub fn is_at_backend(&self) -> bool {
        self.step == Step::Backend
    }

    /// Whether the backend has been asked for a size.
    pub fn awaits_backend(&self) -> bool {
        matches!(self.step, Step::Cut | Step::Backend)
    }

    /// What is to be done next; none: something has to happen first.
    pub fn go_on(&mut self, view: &View) -> Option<Act> {
        loop {
            let act = match self.step {
                Step::Tell => {
                    self.step = Step::Ask;
                    Act::Tell(self.bytes)
                }
                Step::Ask => {
                    self.step = Step::Destage;
                    Act::DestageAll
                }
                Step::Destage if view.destage_left_bytes > 0 => return None,
                Step::Destage if self.shrinks() => {
                    // What was dirty beyond the new end has kept the volume from taking it before. The backend is not
                    // cut under a volume that is larger.
                    self.step = Step::Check;
                    Act::Tell(self.bytes)
                }
                Step::Destage if view.cut == Cut::Held => Act::End(Err(Refusal::FlushCancelled)),
                Step::Check if view.bytes != self.bytes => Act::End(Err(Refusal::StillWritten)),
                Step::Destage => {
                    self.step = Step::TellTail;
                    continue;
                }
                Step::TellTail => {
                    self.step = Step::Tail;
                    Act::TellTail
                }
                Step::Tail if view.cut == Cut::Untold => Act::End(Err(Refusal::Log)),
                Step::Tail if view.cut != Cut::Gone => return None,
                Step::Tail if !self.is_atomic && !self.is_over_cut => {
                    self.step = Step::Forget;
                    continue;
                }
                Step::Tail | Step::Check => {
                    self.step = Step::Whole;
                    continue;
                }
                Step::Whole if !self.is_atomic || view.is_flushed => {
                    self.step = Step::Drain;
                    continue;
                }
                // What it was given may not be flushed for a long time.
                Step::Whole if !self.shrinks() && view.is_in_trouble => {
                    Act::End(Err(Refusal::Backend(IoError::Unreachable)))
                }
                Step::Drain if view.under_way == 0 => {
                    self.step = Step::Forget;
                    continue;
                }
                Step::Forget => {
                    self.step = Step::Void(None);
                    let (first, blocks) = self.cut();
                    Act::Forget(first, blocks)
                }
                Step::Void(Some(barrier)) if barrier <= view.persisted => {
                    self.step = if self.shrinks() {
                        Step::Backend
                    } else {
                        Step::Cut
                    };
                    Act::Backend(self.bytes.min(self.before))
                }
                Step::Whole | Step::Drain | Step::Void(_) | Step::Cut | Step::Backend => {
                    return None;
                }
            };
            return Some(act);
        }
    }

    /// What lies beyond the smaller of both ends. The block in which that lies is among it: it is not cached while it is
    /// a part of one, but found again once the volume has grown.
    fn cut(&self) -> (BlockKey, u64) {
        let (from, to) = (self.bytes.min(self.before), self.bytes.max(self.before));
        let first = from / BLOCK_BYTES as u64;
        let blocks = to.div_ceil(BLOCK_BYTES as u64) - first;
        (BlockKey::new(self.volume, first), blocks)
    }

    /// The cache has forgotten that, durably from this barrier on.
    pub fn forgotten(&mut self, barrier: Barrier) {
        debug_assert_eq!(self.step, Step::Void(None), "it was asked to");
        self.step = Step::Void(Some(barrier));
    }

    /// The backend has taken the size that it was asked for, or has not: what is to be done then.
    pub fn backend_resized(&mut self, result: Result<(), IoError>) -> Act {
        match (self.step, result) {
            (Step::Cut, Ok(())) => {
                self.step = Step::Backend;
                Act::Backend(self.bytes)
            }
            (_, result) => Act::End(result.map_err(Refusal::Backend)),
        }
    }

    /// Whether what the volume asks of its backend waits for the end of this. A read shows nothing to anybody.
    pub fn holds(&self, is_read: bool) -> bool {
        match self.step {
            Step::Drain => true,
            Step::Forget | Step::Void(_) => self.is_atomic || self.shrinks(),
            Step::Cut | Step::Backend => self.is_atomic && !is_read,
            Step::Tell
            | Step::Ask
            | Step::Destage
            | Step::Check
            | Step::TellTail
            | Step::Tail
            | Step::Whole => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: u64 = 64 << 20;
    const VIEW: View = View {
        bytes: BEFORE,
        destage_left_bytes: 0,
        cut: Cut::Gone,
        is_flushed: true,
        is_in_trouble: false,
        under_way: 0,
        persisted: Barrier(0),
    };

    #[test]
    fn growth_cuts_the_backend_before_it_grows() {
        let bytes = BEFORE + 4096;
        let mut resize = Resize::begin(3, bytes, false, &VIEW);
        let first = BEFORE / BLOCK_BYTES as u64;
        let forget = Act::Forget(BlockKey::new(3, first), 1);
        assert_eq!(resize.go_on(&VIEW), Some(Act::TellTail));
        let telling = View {
            cut: Cut::Pending,
            ..VIEW
        };
        assert_eq!(resize.go_on(&telling), None);
        let untold = View {
            cut: Cut::Untold,
            ..VIEW
        };
        let mut refused = resize;
        assert_eq!(refused.go_on(&untold), Some(Act::End(Err(Refusal::Log))));
        assert_eq!(resize.go_on(&VIEW), Some(forget));
        resize.forgotten(Barrier(7));
        assert_eq!(resize.go_on(&VIEW), None, "it is not durable yet");
        let persisted = View {
            persisted: Barrier(7),
            ..VIEW
        };
        assert_eq!(resize.go_on(&persisted), Some(Act::Backend(BEFORE)));
        assert_eq!(resize.go_on(&persisted), None);
        assert_eq!(resize.backend_resized(Ok(())), Act::Backend(bytes));
        assert_eq!(resize.backend_resized(Ok(())), Act::End(Ok(())));
    }

    #[test]
    fn shrink_tells_the_volume_before_and_after_it_destages() {
        let bytes = BEFORE / 2;
        let mut resize = Resize::begin(3, bytes, true, &VIEW);
        assert_eq!(resize.go_on(&VIEW), Some(Act::Tell(bytes)));
        assert_eq!(resize.go_on(&VIEW), Some(Act::DestageAll));
        let dirty = View {
            destage_left_bytes: 1,
            ..VIEW
        };
        assert_eq!(resize.go_on(&dirty), None);
        assert_eq!(resize.go_on(&VIEW), Some(Act::Tell(bytes)));
        let mut refused = resize;
        let still_written = Act::End(Err(Refusal::StillWritten));
        assert_eq!(refused.go_on(&VIEW), Some(still_written));
        let told = View { bytes, ..VIEW };
        let busy = View {
            is_flushed: false,
            is_in_trouble: true,
            ..told
        };
        assert_eq!(resize.go_on(&busy), None, "a shrink waits for its flush");
        assert!(!resize.holds(false));
        let draining = View {
            under_way: 1,
            ..told
        };
        assert_eq!(resize.go_on(&draining), None);
        assert!(resize.holds(true));
        assert!(matches!(resize.go_on(&told), Some(Act::Forget(..))));
        assert!(resize.holds(true));
        resize.forgotten(Barrier(0));
        assert_eq!(resize.go_on(&told), Some(Act::Backend(bytes)));
        assert!(resize.holds(false) && !resize.holds(true));
        let failed = resize.backend_resized(Err(IoError::Failed));
        assert_eq!(failed, Act::End(Err(Refusal::Backend(IoError::Failed))));
    }

    #[test]
    fn growth_over_a_log_with_a_cut_destages_first() {
        let cut = View {
            cut: Cut::Held,
            ..VIEW
        };
        let mut resize = Resize::begin(3, BEFORE * 2, false, &cut);
        assert_eq!(resize.go_on(&cut), Some(Act::DestageAll));
        let mut cancelled = resize;
        let refused = Act::End(Err(Refusal::FlushCancelled));
        assert_eq!(cancelled.go_on(&cut), Some(refused));
        assert_eq!(resize.go_on(&VIEW), Some(Act::TellTail));
        let draining = View {
            under_way: 1,
            ..VIEW
        };
        assert_eq!(resize.go_on(&draining), None);
        assert!(matches!(resize.go_on(&VIEW), Some(Act::Forget(..))));
    }

    #[test]
    fn growth_over_atomic_flushes_waits_for_one_unless_it_may_be_long() {
        let unflushed = View {
            is_flushed: false,
            ..VIEW
        };
        let mut resize = Resize::begin(3, BEFORE * 2, true, &unflushed);
        assert_eq!(resize.go_on(&unflushed), Some(Act::TellTail));
        assert_eq!(resize.go_on(&unflushed), None);
        let trouble = View {
            is_in_trouble: true,
            ..unflushed
        };
        let refused = Act::End(Err(Refusal::Backend(IoError::Unreachable)));
        assert_eq!(resize.go_on(&trouble), Some(refused));
    }
}
