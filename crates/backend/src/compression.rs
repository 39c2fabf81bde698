//! How a backend compresses what it stores, as its volume has it set: shared between the shard and the driver,
//! whatever filters are between them.

use std::sync::atomic::{AtomicU8, Ordering};

use hdcs_core::base::codec::Method;

/// The setting. It takes effect with what is stored next.
#[derive(Debug, Default)]
pub struct Compression(AtomicU8);

impl Compression {
    /// Change it.
    pub fn set(&self, method: Option<Method>) {
        let number = method.map_or(0, |method| method as u8);
        self.0.store(number, Ordering::Relaxed);
    }

    /// What it is.
    pub fn get(&self) -> Option<Method> {
        Method::of_number(self.0.load(Ordering::Relaxed))
    }
}
