//! Why a run could not go on: what was attempted, and what came back.

use std::fmt;

/// A broken environment or a program that did not do its part.
pub struct Failure(String);

/// Result of everything that can fail here.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure described by one sentence.
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Say what was attempted when something fails.
pub trait Context<T> {
    /// `what` leads the error's own text.
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure(format!("{what}: {error}")))
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.ok_or_else(|| Failure(what.to_string()))
    }
}
