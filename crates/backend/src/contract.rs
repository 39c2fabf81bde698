//! What [`Stack`](super::Stack) asserts of a backend, of what is asked of it and how that ends: the rules at the head of
//! this crate. A breach is a bug of the backend, or of whoever asks, and panics before a wrong answer gets further.
//!
//! Rules 1, 4, 7 and 10 are seen in each operation, in production too. Rules 2, 3, 8 and 9 are about contents, which takes
//! memory for each sector: tests switch that on, see [`Content`].

mod content;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use content::Claim;
pub use content::Content;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Extent, SectorRange, Token};

use super::{Ask, Capabilities, Operation, SnapshotCommand};

/// See the module.
#[derive(Debug)]
pub struct Contract {
    is_atomic: bool,
    is_local_store: bool,
    under_way: HashMap<Token, Entry, BuildHasherDefault<TokenHasher>>,
    is_fenced: bool,
    /// The snapshot that is being made.
    snapshot: Option<Token>,
    content: Option<Content>,
}

/// An operation under way.
#[derive(Debug)]
struct Entry {
    kind: Kind,
    /// Whether it was asked after another one had been fenced.
    is_after_fence: bool,
    claim: Option<Claim>,
}

/// What an operation may end with.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Read { bytes: usize },
    Change,
    Extents(SectorRange),
    Snapshot,
}

impl Contract {
    /// Of a backend that can do this. A local store goes on when the backend behind it is fenced, and waits by itself until
    /// that may be asked for a snapshot: rules 7 and 10 are asserted of the backend alone.
    pub fn new(capabilities: Capabilities, is_local_store: bool) -> Self {
        Self {
            is_atomic: capabilities.atomic_flush,
            is_local_store,
            under_way: HashMap::default(),
            is_fenced: false,
            snapshot: None,
            content: None,
        }
    }

    /// Operations under way in the backend.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Remember what the sectors hold from now on, and what they held before.
    pub fn watch(&mut self, content: Content) {
        self.content = Some(content);
    }

    /// What the next opening finds, if the contents were watched.
    pub fn into_content(self) -> Option<Content> {
        let claims = self.under_way.into_values().filter_map(|entry| entry.claim);
        Some(self.content?.reopened(claims, self.is_atomic))
    }

    /// The backend will be asked for this.
    pub fn begins(&mut self, operation: &Operation) {
        let Operation { token, ask } = operation;
        let kind = match ask {
            Ask::Read { buf, .. } => Kind::Read { bytes: buf.len() },
            Ask::Write { .. } | Ask::Zero { .. } | Ask::Flush | Ask::Resize { .. } => Kind::Change,
            Ask::Extents { range } => Kind::Extents(*range),
            Ask::Snapshot(_) => Kind::Snapshot,
        };
        if self.snapshot.is_some() {
            assert!(
                matches!(kind, Kind::Read { .. } | Kind::Extents(_)),
                "rule 10: the backend is asked for {ask:?} beside a snapshot"
            );
        }
        if self.is_alone(ask) {
            assert!(
                self.under_way.is_empty(),
                "rule 10: the backend is asked for a snapshot beside {:?}",
                self.under_way
            );
            self.snapshot = Some(*token);
        }
        let claim = self
            .content
            .as_mut()
            .and_then(|content| content.begins(ask));
        let entry = Entry {
            kind,
            is_after_fence: self.is_fenced,
            claim,
        };
        let before = self.under_way.insert(*token, entry);
        assert!(
            before.is_none(),
            "rule 1: {token:?} is under way already: {before:?}"
        );
    }

    /// Whether nothing but reads may be under way beside it.
    fn is_alone(&self, ask: &Ask) -> bool {
        let needs_quiet = !self.is_atomic && !self.is_local_store;
        needs_quiet && matches!(ask, Ask::Snapshot(SnapshotCommand::Snapshot { .. }))
    }

    /// The backend has ended this.
    pub fn ends(&mut self, completion: &Completion) {
        let Completion { token, result } = completion;
        let Some(entry) = self.under_way.remove(token) else {
            panic!("rule 1: {token:?} has ended twice, or never begun: {result:?}");
        };
        self.snapshot.take_if(|snapshot| snapshot == token);
        let kind = entry.kind;
        let is_fitting = match (kind, result) {
            (_, Err(_))
            | (Kind::Change | Kind::Snapshot, Ok(Done::Written))
            | (Kind::Snapshot, Ok(Done::Refused(_))) => true,
            (Kind::Read { bytes }, Ok(Done::Read(buf))) => buf.len() == bytes,
            (Kind::Extents(range), Ok(Done::Extents(extents))) => {
                assert!(
                    are_consecutive(range, extents),
                    "rule 4: asked about {range:?}, the backend tells {extents:?}"
                );
                true
            }
            _ => false,
        };
        assert!(is_fitting, "rule 1: {kind:?} has ended in {result:?}");
        assert!(
            !entry.is_after_fence || matches!(result, Err(IoError::Fenced)),
            "rule 7: {kind:?} has ended in {result:?} after the backend was fenced"
        );
        self.is_fenced |= !self.is_local_store && matches!(result, Err(IoError::Fenced));
        if let (Some(content), Some(claim)) = (&mut self.content, entry.claim) {
            content.ends(claim, result);
        }
    }
}

/// Spreads tokens. The volume gives them out, so nobody outside chooses them.
#[derive(Default)]
struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, number: u64) {
        // A table goes by the upper bits as well as by the lower ones.
        let spread = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ spread >> 32;
    }

    fn write(&mut self, bytes: &[u8]) {
        unreachable!("a token is a number: {bytes:?}");
    }
}

/// Whether these are runs one after another from the start of a range, and within it.
fn are_consecutive(range: SectorRange, extents: &[Extent]) -> bool {
    let mut at = range.start;
    for extent in extents {
        if extent.range.start != at || extent.range.is_empty() {
            return false;
        }
        at = extent.range.end();
    }
    (!extents.is_empty() || range.is_empty()) && at <= range.end()
}

#[cfg(test)]
mod tests;
