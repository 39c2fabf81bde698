//! How a seed is run, and what comes of it, in whichever world.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::engine::Simulated;
use crate::violation::Violation;

/// How to run a seed in a world in which bugs of kind `P` can be planted.
#[derive(Clone, Copy, Debug)]
pub struct Options<P> {
    /// Print everything that happens.
    pub verbose: bool,
    /// Plant a bug.
    pub plant: Option<P>,
    /// A short variant with one crash after so many steps (none if beyond its end).
    pub crash_at: Option<u64>,
}

impl<P> Default for Options<P> {
    fn default() -> Self {
        Self {
            verbose: false,
            plant: None,
            crash_at: None,
        }
    }
}

/// What came of a run, which saw `C`.
#[derive(Clone, Debug)]
pub struct Outcome<C> {
    /// The seed.
    pub seed: u64,
    /// Equal runs have equal hashes.
    pub trace_hash: u64,
    /// The rule that was broken, if one was.
    pub violation: Option<Violation>,
    /// The last things that happened.
    pub tail: Vec<String>,
    /// What the run saw.
    pub coverage: C,
}

impl<C> Outcome<C> {
    /// Drive a world to its end; `coverage` is what it saw. A panic is a violation like any other.
    pub(crate) fn of<W: Simulated>(
        seed: u64,
        mut world: W,
        drive: impl FnOnce(&mut W) -> Result<(), Violation>,
        coverage: impl FnOnce(&W) -> C,
    ) -> Self {
        let result = catch_unwind(AssertUnwindSafe(|| drive(&mut world)));
        let has_panicked = result.is_err();
        let violation = match result {
            Ok(result) => result.err(),
            Err(panic) => {
                let message = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                Some(Violation::new("assertion", message.unwrap_or_default()))
            }
        };
        let trace = world.trace();
        let outcome = Self {
            seed,
            trace_hash: trace.hash(),
            violation,
            tail: trace.tail(),
            coverage: coverage(&world),
        };
        if has_panicked {
            // What a panic left behind cannot be trusted to drop well.
            std::mem::forget(world);
        }
        outcome
    }

    /// The same with something else that was seen.
    pub fn map<D>(self, of: impl FnOnce(C) -> D) -> Outcome<D> {
        Outcome {
            seed: self.seed,
            trace_hash: self.trace_hash,
            violation: self.violation,
            tail: self.tail,
            coverage: of(self.coverage),
        }
    }

    /// Panic unless the run held, with the options beside its seed that replay it.
    ///
    /// # Panics
    /// If it did not.
    pub fn assert_held(&self, options: &str) {
        if let Some(violation) = &self.violation {
            let (seed, tail) = (self.seed, self.tail.join("\n"));
            panic!("{violation}\nreplay: hdcs-sim{options} --seed {seed}\n{tail}");
        }
    }
}

/// Run the short variant of a seed once for every step of it, with a crash there, until one is not `cut`; how many
/// were.
///
/// # Panics
/// If one does not hold.
pub fn assert_held_at_every_step<P, C>(
    seed: u64,
    options: &str,
    run: fn(u64, Options<P>) -> Outcome<C>,
    cut: fn(&C) -> bool,
) -> u64 {
    for step in 0.. {
        let crash_at = Some(step);
        let outcome = run(
            seed,
            Options {
                crash_at,
                ..Options::default()
            },
        );
        outcome.assert_held(&format!("{options} --every-step --step {step}"));
        if !cut(&outcome.coverage) {
            return step;
        }
    }
    unreachable!("every run ends")
}

/// Plant a bug in one seed after another until one is caught.
///
/// # Panics
/// If it survives `seeds_max` of them, or is caught by none of `rules`.
pub fn assert_caught<P: Copy + Debug, C>(
    plant: P,
    rules: &[&str],
    seeds_max: u64,
    run: fn(u64, Options<P>) -> Outcome<C>,
) {
    let options = Options {
        plant: Some(plant),
        ..Options::default()
    };
    let violation = (0..seeds_max).find_map(|seed| run(seed, options).violation);
    let violation = violation.unwrap_or_else(|| panic!("{plant:?} survived {seeds_max} seeds"));
    assert!(
        rules.contains(&violation.rule),
        "{plant:?} was caught by another rule: {violation}"
    );
}
