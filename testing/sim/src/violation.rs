//! What a checker says when a rule is broken.

use std::fmt;

/// A rule that was broken, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which rule, as a short name.
    pub rule: &'static str,
    /// What happened.
    pub message: String,
}

impl Violation {
    /// `rule` was broken.
    pub fn new(rule: &'static str, message: impl Into<String>) -> Self {
        Self {
            rule,
            message: message.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.message)
    }
}
