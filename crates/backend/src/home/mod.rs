//! The local store of a volume in storage mode: drives [`hdcs_core::local`] over a store, which is a file or block
//! device, and the volume's backend with its filters.
//!
//! Invariants:
//! 1. The store is locked while it is open, and belongs to the volume, as its superblock says.
//! 2. Its data is encrypted if the volume is, with the volume's key.
//! 3. All of its room is reserved when the volume is made or grows: what was accepted never lacks room.
//! 4. The backend is asked for a snapshot only while the local store holds it as a tier has left it, and nothing else
//!    is under way there.
//! 5. A local store that is larger than its volume, which a resize that was interrupted or has failed leaves, is cut
//!    before the volume grows: what it holds beyond the volume's end never comes back. It is cut at the next opening,
//!    before anything else is asked of it: see [`Sizes`].
//!
//! Failure: see [`hdcs_core::local`] and [`store`].

pub mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Extent, ExtentState, Nanos, SectorRange, Token};
use hdcs_core::base::limits::BLOCK_SECTORS;
use hdcs_core::local::map::BlockState;
use hdcs_core::local::sizes::{Act, Sizes};
use hdcs_core::local::{Action, Ask as StoreAsk, Event, LocalStore, Status, Verified};
use hdcs_device::file::Opened;
use hdcs_device::ring::Outcome;
use hdcs_device::worker::JobOutput;
use store::{ResizeError, Store};
use tokio::sync::oneshot;

use super::{Ask, Backend, Capabilities, Operation, Port, SnapshotCommand, Stack};

/// Marks what was asked of the store among the tokens of the ring.
const STORE: u64 = 1 << 63;
/// Marks what is asked of the backend on behalf of a client alone.
const PASSED_ON: u64 = 1 << 62;
/// What is kept or forgotten, among what the backend is asked.
const KEEP: Token = Token(STORE - 1);
/// A resize, among what the local store is asked.
const RESIZE: Token = Token(STORE - 2);
/// Operations under way at most.
const IN_FLIGHT_MAX: usize = 256;

/// Who waits for a piece that is compared with its checksums.
pub type Verifying = oneshot::Sender<Result<Verified, String>>;

/// What a local store is asked about tiers: see [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiers {
    /// Tier out what is dirty.
    Begin,
    /// The same, and leave the backend as that leaves it.
    BeginAndHold,
    /// The backend need not stay so any more.
    Release,
    /// Stop tiering out.
    Cancel,
}

/// See the module.
pub struct LocalStoreBackend {
    home: LocalStore,
    opened: Opened,
    inner: Stack,
    sizes: Sizes,
    /// The size that the backend is being given, by what was asked of it.
    resizing_inner: Option<(Token, u64)>,
    /// Why the last resize failed, if that can be told better than by an error.
    resize_trouble: Option<String>,
    /// What waits until the local store is cut.
    uncut: Vec<Operation>,
    /// What the backend has ended.
    ended: Vec<Completion>,
    /// What is being kept or forgotten, for whom.
    keeping: Option<Token>,
    /// A snapshot that waits until nothing is under way in the backend, and what waits for it to begin.
    unasked: Option<SnapshotCommand>,
    held: Vec<Operation>,
    actions: Vec<Action>,
    /// Who waits for what is being verified.
    verifying: BTreeMap<Token, Verifying>,
    next_verifying: u64,
}

impl LocalStoreBackend {
    /// Put an open store of a volume of `bytes` bytes to use over its backend.
    pub fn new(mut store: Store, inner: Stack, bytes: u64) -> Self {
        store.config.backend_atomic = inner.capabilities().atomic_flush;
        let sizes = Sizes::new(bytes, store.config.bytes);
        Self {
            home: LocalStore::new(store.config, store.map, store.cipher),
            opened: store.opened,
            inner,
            sizes,
            resizing_inner: None,
            resize_trouble: None,
            uncut: Vec::new(),
            ended: Vec::new(),
            keeping: None,
            unasked: None,
            held: Vec::new(),
            actions: Vec::new(),
            verifying: BTreeMap::new(),
            next_verifying: 0,
        }
    }

    /// Counters and gauges.
    pub fn status(&self) -> Status {
        self.home.status()
    }

    /// Tier out what is dirty, or stop that.
    pub fn tier(&mut self, now: Nanos, ask: Tiers, port: &mut Port<'_>) {
        let event = match ask {
            Tiers::Begin => Event::Tier,
            Tiers::BeginAndHold => Event::TierAndHold,
            Tiers::Release => Event::Release,
            Tiers::Cancel => Event::CancelTier,
        };
        self.step(now, event, port);
    }

    /// Compare what is in the local store with its checksums, from a block on.
    pub fn verify(&mut self, now: Nanos, block: u64, answer: Verifying, port: &mut Port<'_>) {
        self.next_verifying += 1;
        let token = Token(self.next_verifying);
        self.verifying.insert(token, answer);
        self.step(now, Event::Verify { token, block }, port);
    }

    /// The volume's log, which is being replayed, writes these sectors again.
    pub fn unsettled(&mut self, range: SectorRange) {
        self.home.unsettle(range);
    }

    /// Why the last resize failed, if there is more to say than its error.
    pub fn resize_trouble(&self) -> Option<&str> {
        self.resize_trouble.as_deref()
    }

    fn step(&mut self, now: Nanos, event: Event, port: &mut Port<'_>) {
        self.home.step(now, event, &mut self.actions);
        self.go_on(now, port);
    }

    /// Begin to give the local store the size that the volume is to have.
    fn resize(&mut self, now: Nanos, token: Token, bytes: u64) {
        let bytes = self.sizes.begin(token, bytes, self.home.status().bytes);
        self.resize_trouble = None;
        self.ask_for_size(now, bytes);
    }

    fn ask_for_size(&mut self, now: Nanos, bytes: u64) {
        let (token, ask) = (RESIZE, StoreAsk::Resize { bytes });
        let event = Event::Submit { token, ask };
        self.home.step(now, event, &mut self.actions);
    }

    /// The local store has the size that it was asked for, or not.
    fn resized(&mut self, now: Nanos, result: Result<Done, IoError>, port: &mut Port<'_>) {
        let has = self.home.status().bytes;
        let (token, bytes) = match self.sizes.ended(result.is_ok(), has) {
            None => return,
            Some(Act::Ask(bytes)) => return self.ask_for_size(now, bytes),
            Some(Act::End(token, bytes)) => (token, bytes),
        };
        if let (Ok(_), Some(trouble)) = (&result, &self.resize_trouble) {
            tracing::warn!(
                path = %self.opened.path.display(),
                "the local store has {bytes} bytes, but what lies behind them is not given back yet: {trouble}"
            );
        }
        match (token, result) {
            (Some(token), result) => port.end(token, result),
            (None, Ok(_)) => tracing::info!(
                path = %self.opened.path.display(),
                "a resize that was interrupted is done: the local store has {bytes} bytes"
            ),
            (None, Err(error)) => tracing::warn!(
                path = %self.opened.path.display(),
                "the local store is larger than its volume since a resize was interrupted, and cannot be cut ({}): that is \
                 tried again when the volume is resized or opened",
                self.resize_trouble.clone().unwrap_or(error.to_string())
            ),
        }
        for operation in std::mem::take(&mut self.uncut) {
            self.begin(now, operation, port);
        }
    }

    /// Have the store hold so many bytes, on a thread of its own: reserving room may take long.
    fn resize_store(&mut self, token: Token, bytes: u64, port: &mut Port<'_>) {
        let opened = self.opened.clone();
        let job = move || {
            let resized = store::resize(&opened.file, &opened.path, opened.block_device, bytes);
            JobOutput::Any(Box::new(resized))
        };
        let of_store = Token(token.0 | STORE);
        let remote = port.ring.remote(port.owner);
        let thread = std::thread::Builder::new().name("hdcs-home-size".into());
        match thread.spawn(move || remote.end(of_store, job())) {
            Ok(_) => port.ring.begin_remote(),
            Err(error) => {
                self.resize_trouble = Some(format!("its local store cannot be resized: {error}"));
                let result = Err(IoError::Failed);
                self.ended.push(Completion { token, result });
            }
        }
    }

    /// Perform what the machine wants, until nothing of that ends at once.
    fn go_on(&mut self, now: Nanos, port: &mut Port<'_>) {
        self.begin_keeping(now, port);
        while !self.actions.is_empty() || !self.ended.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                self.perform(now, action, port);
            }
            for Completion { token, result } in std::mem::take(&mut self.ended) {
                self.note_resized(token, &result);
                if token == KEEP {
                    let token = self.keeping.take().expect("it was asked");
                    port.end(token, result);
                    continue;
                }
                if token.0 & PASSED_ON != 0 {
                    port.end(Token(token.0 & !PASSED_ON), result);
                    continue;
                }
                let event = Event::Completed(Completion { token, result });
                self.home.step(now, event, &mut self.actions);
            }
            self.begin_keeping(now, port);
        }
    }

    /// If this is the end of a resize of the backend, its operations keep to its size from now on.
    fn note_resized(&mut self, token: Token, result: &Result<Done, IoError>) {
        let asked = self.resizing_inner.take_if(|(asked, _)| *asked == token);
        let asked = asked.map(|(_, bytes)| bytes);
        match (asked, result) {
            (Some(bytes), Ok(_)) => self.inner.resized(bytes),
            // The smaller size is the one to keep to.
            (Some(_), Err(error)) => {
                let why = format!("its backend cannot be resized: {error}");
                self.resize_trouble = Some(why);
            }
            (None, _) => {}
        }
    }

    /// Keep or forget something for a shard.
    fn keep(&mut self, now: Nanos, token: Token, keep: SnapshotCommand, port: &mut Port<'_>) {
        self.keeping = Some(token);
        if let SnapshotCommand::Snapshot { .. } = keep {
            self.unasked = Some(keep);
        } else {
            let ask = Ask::Snapshot(keep);
            self.ask(now, Operation { token: KEEP, ask }, port);
        }
    }

    /// Ask for the snapshot that waits, once nothing else is under way; then go on with what waits for it,
    /// which only reads.
    fn begin_keeping(&mut self, now: Nanos, port: &mut Port<'_>) {
        let inner = &self.inner;
        if let Some(keep) = self.unasked.take_if(|_| inner.under_way() == 0) {
            let ask = Ask::Snapshot(keep);
            self.ask(now, Operation { token: KEEP, ask }, port);
            for operation in std::mem::take(&mut self.held) {
                self.ask(now, operation, port);
            }
        }
    }

    fn perform(&mut self, now: Nanos, action: Action, port: &mut Port<'_>) {
        let (owner, file) = (port.owner, self.opened.target());
        let of_store = |token: Token| Token(token.0 | STORE);
        let (token, ask) = match action {
            Action::End(Completion { token, result }) if token == RESIZE => {
                return self.resized(now, result, port);
            }
            Action::End(completion) => return port.done.push(completion),
            Action::Verified(token, found) => {
                if let Some(answer) = self.verifying.remove(&token) {
                    // Whoever asked may have gone.
                    let _ = answer.send(found.map_err(|error| error.to_string()));
                }
                return;
            }
            Action::Damaged {
                offset,
                store_offset,
                is_forged: true,
            } => {
                return tracing::error!(
                    "local store: the sector at byte {offset} of the volume does not authenticate (byte {store_offset} of the \
                     home): somebody without the volume's key has written it: find out who can write to its medium, \
                     and write it again, or restore it from a backup"
                );
            }
            Action::Damaged {
                offset,
                store_offset,
                is_forged: false,
            } => {
                return tracing::error!(
                    "local store: the sector at byte {offset} of the volume does not match its checksum (byte {store_offset} \
                     of the home): write it again, or restore it from a backup"
                );
            }
            Action::StoreRead { token, offset, buf } => {
                return port.ring.read(owner, of_store(token), file, offset, buf);
            }
            Action::StoreWrite {
                token,
                offset,
                data,
            } => {
                let token = of_store(token);
                return port.ring.write(owner, token, file, offset, data, None);
            }
            Action::StoreSync { token } => return port.ring.sync(owner, of_store(token), file.fd),
            Action::StoreResize { token, bytes } => return self.resize_store(token, bytes, port),
            Action::BackendRead { token, offset, buf } => (token, Ask::Read { offset, buf }),
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                let data = vec![data];
                (token, Ask::Write { offset, data })
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
            } => {
                let unmap = true;
                let ask = Ask::Zero {
                    offset,
                    bytes,
                    unmap,
                };
                (token, ask)
            }
            Action::BackendFlush { token } => (token, Ask::Flush),
            Action::BackendResize { token, bytes } => {
                self.resizing_inner = Some((token, bytes));
                (token, Ask::Resize { bytes })
            }
        };
        self.ask(now, Operation { token, ask }, port);
    }

    fn ask(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        if self.unasked.is_some() {
            return self.held.push(operation);
        }
        let mut port = Port {
            ring: &mut *port.ring,
            owner: port.owner,
            done: &mut self.ended,
        };
        self.inner.submit(now, operation, &mut port);
    }

    /// Begin an operation.
    fn begin(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let Operation { token, ask } = operation;
        let ask = match ask {
            Ask::Read { offset, buf } => StoreAsk::Read { offset, buf },
            Ask::Write { offset, data } => StoreAsk::Write { offset, data },
            Ask::Zero { bytes: 0, .. } => return port.end(token, Ok(Done::Written)),
            Ask::Zero { offset, bytes, .. } => StoreAsk::Zero { offset, bytes },
            Ask::Flush => StoreAsk::Flush,
            Ask::Extents { range } => return self.extents(now, token, range, port),
            Ask::Snapshot(keep) => return self.keep(now, token, keep, port),
            Ask::Resize { bytes } => return self.resize(now, token, bytes),
        };
        let event = Event::Submit { token, ask };
        self.home.step(now, event, &mut self.actions);
    }

    /// What the local store has is known here; of all else the backend knows.
    fn extents(&mut self, now: Nanos, token: Token, range: SectorRange, port: &mut Port<'_>) {
        let end = range.end().div_ceil(BLOCK_SECTORS);
        let (state, end) = self.home.state_of(range.first_block(), end);
        let known = SectorRange::between(range.start, (end * BLOCK_SECTORS).min(range.end()));
        let state = match state {
            BlockState::Clean | BlockState::Dirty => ExtentState::Data,
            BlockState::Zero => ExtentState::Hole,
            BlockState::Absent => {
                let token = Token(token.0 | PASSED_ON);
                let ask = Ask::Extents { range: known };
                return self.ask(now, Operation { token, ask }, port);
            }
        };
        let extent = Extent {
            range: known,
            state,
        };
        port.end(token, Ok(Done::Extents(vec![extent])));
    }
}

impl Backend for LocalStoreBackend {
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        if self.sizes.is_uncut() {
            self.uncut.push(operation);
        } else {
            self.begin(now, operation, port);
        }
        self.go_on(now, port);
    }

    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        if token.0 & STORE == 0 {
            let mut port = Port {
                ring: &mut *port.ring,
                owner: port.owner,
                done: &mut self.ended,
            };
            self.inner.completed(now, token, outcome, &mut port);
        } else {
            let result = match outcome {
                Outcome::Device(result) => result.map_err(IoError::from),
                Outcome::Job(JobOutput::Any(resized)) => {
                    let resized = resized.downcast::<Result<(), ResizeError>>();
                    let resized = *resized.expect("nothing else ends so");
                    resized.map(|()| Done::Written).map_err(|error| {
                        self.resize_trouble = Some(error.to_string());
                        IoError::from(&error)
                    })
                }
                other => unreachable!("the store starts nothing that ends in {other:?}"),
            };
            let token = Token(token.0 & !STORE);
            let event = Event::Completed(Completion { token, result });
            self.home.step(now, event, &mut self.actions);
        }
        self.go_on(now, port);
    }

    fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        let mut inner = Port {
            ring: &mut *port.ring,
            owner: port.owner,
            done: &mut self.ended,
        };
        self.inner.poll(now, &mut inner);
        if let Some(bytes) = self.sizes.cut() {
            self.ask_for_size(now, bytes);
        }
        self.home.poll(now, &mut self.actions);
        self.go_on(now, port);
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let both = [self.inner.next_wakeup(), self.home.next_wakeup()];
        both.into_iter().flatten().min()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            extents: true,
            snapshots: self.inner.capabilities().snapshots,
            in_flight_max: IN_FLIGHT_MAX,
            ..Capabilities::default()
        }
    }

    fn home(&self) -> Option<&LocalStoreBackend> {
        Some(self)
    }

    fn home_mut(&mut self) -> Option<&mut LocalStoreBackend> {
        Some(self)
    }

    fn finish(&mut self) -> bool {
        self.home.finish();
        // In this order: what the local store asked of its backend ends first.
        self.home.under_way() == 0 && self.inner.finish()
    }
}
