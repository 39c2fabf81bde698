//! What happened, as a hash that two equal runs share and a tail to read.

use std::collections::VecDeque;
use std::fmt;

use hdcs_core::base::io::Nanos;

use crate::content::mix;

/// Lines of the tail.
const TAIL: usize = 60;

/// One thing that happened.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    step: u64,
    time: Nanos,
    what: &'static str,
    numbers: [u64; 4],
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.time.0 as f64 / 1000.0;
        let Self { step, what, .. } = self;
        write!(f, "{step:>7} {micros:>14.3} us  {what:<22}")?;
        self.numbers
            .iter()
            .try_for_each(|number| write!(f, " {number}"))
    }
}

/// The trace of one run.
#[derive(Debug, Default)]
pub struct Trace {
    hash: u64,
    tail: VecDeque<Entry>,
    verbose: bool,
}

impl Trace {
    /// An empty trace; a verbose one prints every entry.
    pub fn new(verbose: bool) -> Self {
        Self {
            verbose,
            ..Self::default()
        }
    }

    /// Something happened in `step` at `time`.
    pub fn add(&mut self, step: u64, time: Nanos, what: &'static str, numbers: [u64; 4]) {
        let mut hash = self.hash ^ time.0;
        for byte in what.bytes() {
            hash = hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte);
        }
        for number in numbers {
            hash = mix(hash ^ number);
        }
        self.hash = hash;
        let entry = Entry {
            step,
            time,
            what,
            numbers,
        };
        if self.verbose {
            println!("{entry}");
        }
        if self.tail.len() == TAIL {
            self.tail.pop_front();
        }
        self.tail.push_back(entry);
    }

    /// The hash of everything so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The last things that happened.
    pub fn tail(&self) -> Vec<String> {
        self.tail.iter().map(Entry::to_string).collect()
    }
}
