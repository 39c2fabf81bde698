//! A backend with its filters, as a shard uses it. It asserts the contract at the head of this crate for all of them.

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::buf::Buf;
use hdcs_core::base::codec::Method;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, Nanos, SectorRange, Token};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_device::ring::Outcome;

use super::compression::Compression;
use super::contract::{Content, Contract};
use super::copying::Copying;
use super::stores::{Counters, Counts};
use super::{Ask, Backend, Capabilities, Operation, Port, Prepared, file, filters, home};

/// See the module.
pub struct Stack {
    backend: Box<dyn Backend>,
    bytes: u64,
    contract: Contract,
    in_flight_max: usize,
    waiting: VecDeque<Operation>,
    counters: Option<Arc<Counters>>,
    copying: Option<Arc<Copying>>,
    spoilt: Option<Arc<file::Spoilt>>,
    compression: Option<Arc<Compression>>,
}

impl Prepared {
    /// Put it together on the thread that will use it.
    pub fn build(self) -> Stack {
        let counters = self.backend.counters();
        let copying = self.backend.copying();
        let spoilt = self.backend.spoilt();
        let compression = self.backend.compression();
        let backend = filters::stack(self.filters, self.backend.build());
        let backend: Box<dyn Backend> = match self.home {
            Some(store) => {
                let inner = Stack::new(backend, self.bytes);
                Box::new(home::LocalStoreBackend::new(store, inner, self.bytes))
            }
            None => backend,
        };
        Stack {
            counters,
            copying,
            spoilt,
            compression,
            ..Stack::new(backend, self.bytes)
        }
    }
}

impl Stack {
    /// A stack whose top is `backend`.
    pub fn new(backend: Box<dyn Backend>, bytes: u64) -> Self {
        let capabilities = backend.capabilities();
        Self {
            contract: Contract::new(capabilities, backend.home().is_some()),
            in_flight_max: capabilities.in_flight_max,
            backend,
            bytes,
            waiting: VecDeque::new(),
            counters: None,
            copying: None,
            spoilt: None,
            compression: None,
        }
    }

    /// Assert from now on what the contract says of contents, too; this takes memory for each sector that is asked
    /// about. `before` is what an earlier stack over the same place has left ([`Self::into_content`]).
    #[must_use]
    pub fn watching(mut self, before: Option<Content>) -> Self {
        let content = before.unwrap_or_else(|| Content::new(self.bytes));
        self.contract.watch(content);
        self
    }

    /// End it as it is, as a crash of this program would; what the next opening finds, if contents were watched.
    pub fn into_content(self) -> Option<Content> {
        self.contract.into_content()
    }

    /// The copy for a snapshot, if one is under way.
    pub fn copying(&self) -> Option<&Copying> {
        self.copying
            .as_deref()
            .filter(|copying| copying.is_running())
    }

    /// What is wrong with the image, and what to do.
    pub fn image_trouble(&self) -> Option<&'static str> {
        self.spoilt.as_ref()?.words()
    }

    /// What it counts of the requests to its store, if it has one.
    pub fn counts(&self) -> Option<Counts> {
        self.counters.as_ref().map(|counters| counters.counts())
    }

    /// Nobody needs any more what is asked of it: what its store fails is not tried again.
    pub fn end_retries(&self) {
        if let Some(counters) = &self.counters {
            counters.end();
        }
    }

    /// Compress what is stored from now on, if the backend can.
    pub fn set_compression(&self, method: Option<Method>) {
        if let Some(compression) = &self.compression {
            compression.set(method);
        }
    }

    /// See [`Backend::home`].
    pub fn home(&self) -> Option<&home::LocalStoreBackend> {
        self.backend.home()
    }

    /// Tier out what is dirty, or stop that, if the volume is in storage mode.
    pub fn tier(&mut self, now: Nanos, ask: home::Tiers, port: &mut Port<'_>) {
        self.call(port, |backend, port| {
            if let Some(home) = backend.home_mut() {
                home.tier(now, ask, port);
            }
        });
    }

    /// The volume's log, which is being replayed, writes these sectors again.
    pub fn unsettled(&mut self, range: SectorRange) {
        if let Some(home) = self.backend.home_mut() {
            home.unsettled(range);
        }
    }

    /// Compare a piece of the local store with its checksums, if the volume is in storage mode.
    pub fn verify_home(
        &mut self,
        now: Nanos,
        block: u64,
        answer: home::Verifying,
        port: &mut Port<'_>,
    ) {
        self.call(port, |backend, port| {
            // Without one, whoever asked sees that nobody answers.
            if let Some(home) = backend.home_mut() {
                home.verify(now, block, answer, port);
            }
        });
    }

    /// See [`Backend::finish`].
    pub fn finish(&mut self) -> bool {
        self.backend.finish()
    }

    /// Operations that have not ended.
    pub fn under_way(&self) -> usize {
        self.contract.under_way() + self.waiting.len()
    }

    /// Size that operations must keep to.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Begin an operation. One off the sector grid is a bug of the caller, and asserts. What a
    /// write or zero asks beyond the end is left out: it was accepted before the volume shrank.
    pub fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let Operation { token, mut ask } = operation;
        let (what, offset, bytes) = ask.describe();
        let capabilities = self.backend.capabilities();
        let is_possible = match ask {
            Ask::Snapshot(_) => capabilities.snapshots,
            Ask::Write { .. } | Ask::Zero { .. } | Ask::Resize { .. } => !capabilities.read_only,
            Ask::Read { .. } | Ask::Flush | Ask::Extents { .. } => true,
        };
        if !is_possible {
            return port.end(token, Err(IoError::Failed));
        }
        if let Ask::Resize { bytes } = ask {
            // While a resize is under way, the smaller size is the one to keep to.
            self.bytes = self.bytes.min(bytes);
        } else {
            let sector = SECTOR_BYTES as u64;
            assert!(
                offset.is_multiple_of(sector) && bytes.is_multiple_of(sector),
                "backend {what} of {bytes} bytes at {offset}: off the sector grid"
            );
            let inside = self.bytes.saturating_sub(offset);
            if bytes > inside {
                match &mut ask {
                    Ask::Write { data, .. } => cut(data, inside as usize),
                    Ask::Zero { bytes, .. } => *bytes = inside,
                    _ => return port.end(token, Err(IoError::Failed)),
                }
                if inside == 0 {
                    return port.end(token, Ok(Done::Written));
                }
            }
        }
        self.waiting.push_back(Operation { token, ask });
        self.go_on(now, port);
    }

    /// A resize has ended; operations must keep to the new size from now on.
    pub fn resized(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// See [`Backend::completed`].
    pub fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        self.call(port, |backend, port| {
            backend.completed(now, token, outcome, port);
        });
        self.go_on(now, port);
    }

    /// See [`Backend::poll`].
    pub fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        self.call(port, |backend, port| backend.poll(now, port));
        self.go_on(now, port);
    }

    /// See [`Backend::next_wakeup`].
    pub fn next_wakeup(&self) -> Option<Nanos> {
        self.backend.next_wakeup()
    }

    /// See [`Backend::capabilities`].
    pub fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    /// Hand over as many operations as may be under way.
    fn go_on(&mut self, now: Nanos, port: &mut Port<'_>) {
        while self.contract.under_way() < self.in_flight_max
            && let Some(operation) = self.waiting.pop_front()
        {
            self.contract.begins(&operation);
            self.call(port, |backend, port| backend.submit(now, operation, port));
        }
    }

    /// Call the backend and note what has ended.
    fn call(&mut self, port: &mut Port<'_>, call: impl FnOnce(&mut dyn Backend, &mut Port<'_>)) {
        let before = port.done.len();
        call(&mut *self.backend, port);
        for completion in &port.done[before..] {
            self.contract.ends(completion);
        }
    }
}

/// Keep the first `bytes` bytes.
fn cut(data: &mut Vec<Buf>, mut bytes: usize) {
    data.retain_mut(|buf| {
        let keep = buf.len().min(bytes);
        bytes -= keep;
        if keep < buf.len() {
            *buf = buf.slice(0..keep);
        }
        keep > 0
    });
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Stack({} bytes, {} under way)",
            self.bytes,
            self.under_way()
        )
    }
}
