//! Events as the API and the files of a node have them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::time::unix_ms;

/// Characters of a text from outside.
pub const TEXT_CHARS_MAX: usize = 400;

/// How something ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It was done.
    Done,
    /// It was not allowed, or wrong.
    Refused,
    /// It was tried and failed.
    Failed,
    /// It was seen.
    Seen,
}

impl Outcome {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Seen => "seen",
        }
    }
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number; later events have higher ones.
    pub number: u64,
    /// When it was first seen: milliseconds of Unix time.
    pub at_ms: u64,
    /// How often, if it was repeated within seconds.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub count: u64,
    /// What was done or happened, such as `create`, `set`, `state`, `connect`.
    pub kind: String,
    /// How it ended.
    pub outcome: Outcome,
    /// The volume, if it concerns one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Who did it: a process on a unix socket, a client's address and certificate, or `node`.
    pub who: String,
    /// More about what it was; of clients' events that were repeated, about the last one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub what: String,
    /// Why it was refused, failed or happened.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
}

fn one() -> u64 {
    1
}

// The signature is serde's.
#[expect(clippy::trivially_copy_pass_by_ref)]
fn is_one(count: &u64) -> bool {
    *count == 1
}

impl Event {
    /// An event of now.
    pub fn new(kind: &str, outcome: Outcome, who: impl AsRef<str>) -> Self {
        Self {
            number: 0,
            at_ms: unix_ms(),
            count: 1,
            kind: kind.to_owned(),
            outcome,
            volume: None,
            who: bounded(who.as_ref()),
            what: String::new(),
            why: String::new(),
        }
    }

    /// The same, of a volume.
    #[must_use]
    pub fn of(mut self, volume: impl AsRef<str>) -> Self {
        self.volume = Some(bounded(volume.as_ref()));
        self
    }

    /// The same, with more about it.
    #[must_use]
    pub fn what(mut self, what: impl AsRef<str>) -> Self {
        self.what = bounded(what.as_ref());
        self
    }

    /// The same, with the reason.
    #[must_use]
    pub fn why(mut self, why: impl AsRef<str>) -> Self {
        self.why = bounded(why.as_ref());
        self
    }
}

/// A text on one line, no longer than an event may be.
fn bounded(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut chars = text.chars().map(clean);
    let mut kept: String = chars.by_ref().take(TEXT_CHARS_MAX).collect();
    if chars.next().is_some() {
        kept.push('…');
    }
    kept
}
