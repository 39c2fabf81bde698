//! The size of a local store beside that of its volume.
//!
//! ```text
//!           the store is larger                    asked for more than the volume has,
//!           than the volume                        over a store that is larger still
//!  new ──┬─────────────────────► Cut ──► End       ──► the volume's size ──► the new one ──► End
//!        └─► (requests may begin)                  else ──► the new one ──► End
//! ```
//!
//! A resize that was interrupted, or has failed, leaves a store that is larger than its volume: what it holds beyond
//! the volume's end must never come back.
//!
//! Invariants:
//! 1. A store that is larger is cut before the volume grows: first to the size that the volume has, then to the new one.
//! 2. One that is larger when it is opened is cut before anything else is asked of it.
//! 3. A volume that has shrunk keeps its size over a store that is larger; one that could not grow keeps its size, too.

use crate::base::io::Token;

/// A change of size that is under way.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// Who waits for it; none: the store is cut to the size that the volume has.
    asker: Option<Token>,
    /// The size that the volume is to have.
    bytes: u64,
    /// The one that the store is being given.
    next: u64,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Ask the store for this size.
    Ask(u64),
    /// The change has ended, well or not: tell who has asked, if anybody has, what came of this size.
    End(Option<Token>, u64),
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    volume: u64,
    change: Option<Change>,
    is_uncut: bool,
}

impl Sizes {
    /// Of a volume of `volume` bytes, and a store that has `store`.
    pub fn new(volume: u64, store: u64) -> Self {
        Self {
            volume,
            change: None,
            is_uncut: store > volume,
        }
    }

    /// Whether everything that is asked waits until the store is cut.
    pub fn is_uncut(&self) -> bool {
        self.is_uncut
    }

    /// What the store is to be asked for first of all, if it is larger.
    pub fn cut(&mut self) -> Option<u64> {
        let begins = self.is_uncut && self.change.is_none();
        let (asker, bytes) = (None, self.volume);
        let next = bytes;
        self.change = self
            .change
            .or(begins.then_some(Change { asker, bytes, next }));
        begins.then_some(next)
    }

    /// A size is asked for, over a store that has `store` bytes: what that is to be asked for.
    pub fn begin(&mut self, asker: Token, bytes: u64, store: u64) -> u64 {
        let next = self.next(bytes, store);
        let asker = Some(asker);
        self.change = Some(Change { asker, bytes, next });
        next
    }

    fn next(&self, bytes: u64, store: u64) -> u64 {
        if store > self.volume && bytes > self.volume {
            self.volume
        } else {
            bytes
        }
    }

    /// The store, which has `store` bytes, has the size that it was asked for, or not; none: nothing was asked.
    pub fn ended(&mut self, is_well: bool, store: u64) -> Option<Act> {
        let Change { asker, bytes, next } = self.change?;
        if is_well && next != bytes {
            let next = self.next(bytes, store);
            self.change = Some(Change { asker, bytes, next });
            return Some(Act::Ask(next));
        }
        self.change = None;
        self.is_uncut = false;
        if asker.is_some() {
            self.volume = if is_well {
                bytes
            } else {
                bytes.min(self.volume)
            };
        }
        Some(Act::End(asker, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKER: Token = Token(7);

    #[test]
    fn sizes_change_in_one_step_where_the_store_is_as_large() {
        let mut sizes = Sizes::new(8, 8);
        assert!(!sizes.is_uncut() && sizes.cut().is_none());
        assert_eq!(sizes.begin(ASKER, 12, 8), 12);
        assert_eq!(sizes.ended(true, 12), Some(Act::End(Some(ASKER), 12)));
        assert_eq!(sizes.begin(ASKER, 4, 12), 4);
        assert_eq!(sizes.ended(true, 4), Some(Act::End(Some(ASKER), 4)));
        assert_eq!(sizes.ended(true, 4), None);
    }

    #[test]
    fn store_that_is_larger_is_cut_before_anything_else() {
        let mut sizes = Sizes::new(8, 12);
        assert!(sizes.is_uncut());
        assert_eq!(sizes.cut(), Some(8));
        assert_eq!(sizes.cut(), None, "it is under way");
        assert_eq!(sizes.ended(true, 8), Some(Act::End(None, 8)));
        assert!(!sizes.is_uncut() && sizes.cut().is_none());
    }

    #[test]
    fn store_that_stays_larger_is_cut_before_the_volume_grows() {
        let mut sizes = Sizes::new(8, 12);
        sizes.cut();
        // The cut has failed: the volume serves all the same.
        assert_eq!(sizes.ended(false, 12), Some(Act::End(None, 8)));
        assert!(!sizes.is_uncut());
        assert_eq!(sizes.begin(ASKER, 16, 12), 8);
        assert_eq!(sizes.ended(true, 8), Some(Act::Ask(16)));
        assert_eq!(sizes.ended(true, 16), Some(Act::End(Some(ASKER), 16)));
    }

    #[test]
    fn volume_that_has_shrunk_keeps_its_size_over_a_store_that_is_larger() {
        let mut sizes = Sizes::new(8, 8);
        sizes.begin(ASKER, 4, 8);
        assert_eq!(sizes.ended(false, 8), Some(Act::End(Some(ASKER), 4)));
        // To grow again, the store is cut first.
        assert_eq!(sizes.begin(ASKER, 6, 8), 4);
        assert_eq!(sizes.ended(false, 8), Some(Act::End(Some(ASKER), 6)));
        assert_eq!(sizes.begin(ASKER, 6, 8), 4, "it could not grow");
    }
}
