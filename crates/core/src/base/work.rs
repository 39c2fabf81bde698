//! Work that is counted, so that whoever tests can bound what one step costs.
//!
//! A unit is a look at one run, entry, item, block or place. Release builds count nothing.

use core::cell::Cell;

/// Units so far.
#[derive(Clone, Debug, Default)]
pub struct Work(Cell<u64>);

impl Work {
    /// So many units more.
    pub fn add(&self, units: u64) {
        if cfg!(debug_assertions) {
            self.0.set(self.0.get().wrapping_add(units));
        }
    }

    /// Units so far; 0 in release builds.
    pub fn units(&self) -> u64 {
        self.0.get()
    }
}
