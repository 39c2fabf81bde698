//! Bounds the bytes read and written per second: `rate_mib`.
//!
//! Operations go through one after another at the rate, as over one slow link; idle time is not
//! saved up beyond [`BURST`].

use hdcs_core::base::io::{Nanos, Token};
use hdcs_device::ring::Outcome;

use super::later::{Later, earlier};
use crate::url::{OptionList, UrlError};
use crate::{Ask, Backend, Capabilities, Operation, Port};

/// The names of its options.
pub const OPTIONS: &[&str] = &["rate_mib"];

/// Idle time that counts.
const BURST: Nanos = Nanos::from_millis(10);

/// How much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes per second.
    pub bytes_per_second: u64,
}

impl Options {
    /// Take the options out of the list.
    pub fn parse(list: &mut OptionList) -> Result<Option<Self>, UrlError> {
        let rate = list.number("rate_mib", 1 << 20)?;
        if rate == Some(0) {
            return Err(UrlError::Value {
                name: "rate_mib",
                value: "0".to_owned(),
                must: "at least 1",
            });
        }
        Ok(rate.map(|mib| Self {
            bytes_per_second: mib << 20,
        }))
    }
}

/// See the module.
pub struct Rate {
    bytes_per_second: u64,
    /// When everything that was let through will have passed.
    free: Nanos,
    later: Later,
    inner: Box<dyn Backend>,
}

impl Rate {
    /// Over `inner`.
    pub fn new(options: &Options, inner: Box<dyn Backend>) -> Self {
        Self {
            bytes_per_second: options.bytes_per_second,
            free: Nanos(0),
            later: Later::default(),
            inner,
        }
    }
}

impl Backend for Rate {
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let bytes = match &operation.ask {
            Ask::Read { .. } | Ask::Write { .. } => operation.ask.describe().2,
            _ => return self.inner.submit(now, operation, port),
        };
        let time = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let earliest = Nanos(now.0.saturating_sub(BURST.0));
        self.free = self.free.max(earliest).plus(Nanos(time as u64));
        if self.free <= now && self.later.due().is_none() {
            self.inner.submit(now, operation, port);
        } else {
            self.later.push(self.free, operation);
        }
    }

    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        self.inner.completed(now, token, outcome, port);
    }

    fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        while let Some(operation) = self.later.pop(now) {
            self.inner.submit(now, operation, port);
        }
        self.inner.poll(now, port);
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        earlier(self.later.due(), self.inner.next_wakeup())
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn finish(&mut self) -> bool {
        self.inner.finish()
    }
}
