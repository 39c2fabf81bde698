//! Makes every operation take longer: `delay_us`, and up to `delay_jitter_us` more by chance.

use hdcs_core::base::io::{Nanos, Token};
use hdcs_device::ring::Outcome;

use super::Chance;
use super::later::{Later, earlier};
use crate::url::{OptionList, UrlError};
use crate::{Backend, Capabilities, Operation, Port};

/// The names of its options.
pub const OPTIONS: &[&str] = &["delay_us", "delay_jitter_us"];

/// The longest delay: an hour.
const DELAY_US_MAX: u64 = 3_600_000_000;

/// How slow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// At least.
    pub delay: Nanos,
    /// By chance up to so much more.
    pub jitter: Nanos,
}

impl Options {
    /// Take the options out of the list.
    pub fn parse(list: &mut OptionList) -> Result<Option<Self>, UrlError> {
        let delay = list.number("delay_us", DELAY_US_MAX)?;
        let jitter = list.number("delay_jitter_us", DELAY_US_MAX)?;
        Ok((delay.is_some() || jitter.is_some()).then(|| Self {
            delay: Nanos::from_micros(delay.unwrap_or(0)),
            jitter: Nanos::from_micros(jitter.unwrap_or(0)),
        }))
    }
}

/// See the module.
pub struct Delay {
    options: Options,
    chance: Chance,
    later: Later,
    inner: Box<dyn Backend>,
}

impl Delay {
    /// Over `inner`.
    pub fn new(options: &Options, seed: u64, inner: Box<dyn Backend>) -> Self {
        Self {
            options: options.clone(),
            chance: Chance::new(seed),
            later: Later::default(),
            inner,
        }
    }
}

impl Backend for Delay {
    fn submit(&mut self, now: Nanos, operation: Operation, _port: &mut Port<'_>) {
        let jitter = (self.chance.share() * self.options.jitter.0 as f64) as u64;
        let due = now.plus(self.options.delay).plus(Nanos(jitter));
        self.later.push(due, operation);
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
