//! Filters stand between a volume and its backend and make it slow, faulty, bounded or talkative:
//! for tests, demonstrations and measurements.
//!
//! They stack in a fixed order, from the volume to the backend: `log`, `rate`, `delay`, `error`. So
//! the log shows what the volume sees, and a failure takes as long as a success. What a filter
//! decides by chance follows from the option `seed` and the order of operations alone.

pub mod delay;
pub mod error;
mod later;
pub mod log;
pub mod rate;

#[cfg(test)]
mod tests;

use crate::url::{OptionList, UrlError};
use crate::{Backend, BackendError};

/// The names of all options, for suggestions.
pub const OPTIONS: &[&[&str]] = &[
    delay::OPTIONS,
    error::OPTIONS,
    log::OPTIONS,
    rate::OPTIONS,
    &["seed"],
];

/// What the options of a URL ask of each filter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// From which all chance follows.
    pub seed: u64,
    /// See [`delay`].
    pub delay: Option<delay::Options>,
    /// See [`error`].
    pub error: Option<error::Options>,
    /// See [`log`].
    pub log: Option<log::Options>,
    /// See [`rate`].
    pub rate: Option<rate::Options>,
}

impl Options {
    /// Take every filter's options out of the list.
    pub fn parse(list: &mut OptionList) -> Result<Self, UrlError> {
        Ok(Self {
            seed: list.number("seed", u64::MAX)?.unwrap_or(1),
            delay: delay::Options::parse(list)?,
            error: error::Options::parse(list)?,
            log: log::Options::parse(list)?,
            rate: rate::Options::parse(list)?,
        })
    }
}

/// Filters whose files are open.
pub struct Prepared {
    options: Options,
    log: Option<log::Prepared>,
}

/// Open what the filters need. Blocks.
pub fn prepare(options: &Options) -> Result<Prepared, BackendError> {
    Ok(Prepared {
        log: options.log.as_ref().map(log::prepare).transpose()?,
        options: options.clone(),
    })
}

/// Put the filters over a backend.
pub fn stack(prepared: Prepared, backend: Box<dyn Backend>) -> Box<dyn Backend> {
    let Prepared { options, log } = prepared;
    let mut top = backend;
    if let Some(error) = options.error {
        top = Box::new(error::Error::new(error, options.seed, top));
    }
    if let Some(delay) = options.delay {
        top = Box::new(delay::Delay::new(&delay, options.seed, top));
    }
    if let Some(rate) = options.rate {
        top = Box::new(rate::Rate::new(&rate, top));
    }
    if let Some(log) = log {
        top = Box::new(log::Log::new(log, top));
    }
    top
}

/// `SplitMix64`: all that a filter, or the conformance suite, needs of randomness.
pub struct Chance(u64);

impl Chance {
    /// A stream that follows from the seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// From 0 up to but not including 1.
    fn share(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }
}
