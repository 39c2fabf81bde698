//! Memory of volumes: what each needs is reserved before it is opened, and shown.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hdcs_api::{ApiError, ErrorKind};
use hdcs_backend::memory::{Lease, Parts, Share, Shortage, VolumeMemory, verify_log};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::node::opening::Failure;

use super::lock;
use super::setup::Setup;
use crate::catalogue::{Entry, VolumeName};
use crate::control::link::Link;
use crate::shard::command::OpenFailure;

/// How long memory is waited for that the indexes of other logs give back, and how often that is looked at.
const MEMORY_PATIENCE: Duration = Duration::from_secs(10);
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Why something is not done that there is too little memory for.
pub(super) fn short(name: &VolumeName, shortage: &Shortage) -> ApiError {
    ApiError::new(ErrorKind::Invalid, format!("volume {name}: {shortage}"))
}

/// Memory for volumes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Totals {
    /// All of it.
    pub volumes_bytes: u64,
    /// What is reserved.
    pub reserved: Parts,
    /// What the indexes of logs may have beyond the least of each.
    pub index_bytes: u64,
    /// What they have of that.
    pub index_used_bytes: u64,
}

/// Memory for volumes, and what each has of it, by its number.
pub(super) struct Memories {
    setup: Arc<Setup>,
    share: Arc<Share>,
    reserved: Mutex<BTreeMap<u32, Weak<VolumeMemory>>>,
}

impl Memories {
    /// All of it, for nobody yet.
    pub fn new(setup: Arc<Setup>, share: Arc<Share>) -> Self {
        Self {
            share,
            setup,
            reserved: Mutex::default(),
        }
    }

    /// Refuse a volume that there is not enough memory for.
    pub fn check(&self, entry: &Entry) -> Result<(), ApiError> {
        let checked = self.setup.needs_of(entry).check(&self.share);
        checked.map_err(|shortage| short(&entry.name, &shortage))
    }

    /// Reserve the memory of a volume that is to be opened, and leave what these others need at least, each by its
    /// number, unless they have reserved it.
    pub fn reserve(
        &self,
        entry: &Entry,
        others: &[(u32, u64)],
    ) -> Result<Arc<VolumeMemory>, Shortage> {
        let needs = self.setup.needs_of(entry);
        let mut reserved = lock(&self.reserved);
        reserved.retain(|_, memory| memory.strong_count() > 0);
        let unopened = others
            .iter()
            .filter(|(number, _)| *number != entry.number && !reserved.contains_key(number));
        let others_bytes = unopened.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        let memory = Arc::new(needs.reserve(&self.share, others_bytes)?);
        reserved.insert(entry.number, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// Wait until the indexes of other logs have given back what was reserved of their memory.
    pub async fn wait(&self, link: &Link) -> Result<(), OpenFailure> {
        let until = Instant::now() + MEMORY_PATIENCE;
        while self.share.is_overdrawn() {
            if Instant::now() >= until {
                let why = "what other volumes have in their write logs takes the memory that it needs, and is not \
                           destaged fast enough";
                return Err(OpenFailure::new(Failure::Shortage, why));
            }
            // Whoever is asked looks at its memory.
            if link.report().await.is_err() {
                return Ok(());
            }
            tokio::time::sleep(MEMORY_PAUSE).await;
        }
        Ok(())
    }

    /// Reserve what it takes to read the log of a volume, beside what the volume has if it is open.
    pub fn to_read_log(&self, entry: &Entry) -> Result<Lease, Shortage> {
        let blocks = entry.log.bytes / BLOCK_BYTES as u64;
        let entries = self.of(entry.number).map(|memory| memory.entries_max());
        let needs = verify_log(entry.log.bytes, entries.unwrap_or(blocks));
        self.share.reserve(needs)
    }

    /// What the volume with a number has reserved, if it is open or being opened.
    pub fn of(&self, number: u32) -> Option<Arc<VolumeMemory>> {
        lock(&self.reserved).get(&number)?.upgrade()
    }

    /// Memory for volumes, what of it they have reserved, and what the indexes of logs may have and have of the rest.
    pub fn totals(&self) -> Totals {
        Totals {
            volumes_bytes: self.share.bytes(),
            reserved: self.share.held(),
            index_bytes: self.share.index_bytes(),
            index_used_bytes: self.share.index_used_bytes(),
        }
    }

    /// Reserve parts for something that ends, such as a verification.
    pub fn lease(&self, parts: Parts) -> Result<Lease, Shortage> {
        self.share.reserve(parts)
    }
}
