//! The home of a volume in storage mode: drives [`hdcs_core::home`] over a store, which is a file or block
//! device, and the volume's backend with its filters.
//!
//! Invariants:
//! 1. The store is locked while it is open, and belongs to the volume, as its superblock says.
//! 2. Its data is encrypted if the volume is, with the volume's key.
//! 3. It is as large as it will ever be when the volume is made: what was accepted never lacks room.
//! 4. The backend is asked for a snapshot only while the home holds it as a tier has left it, and nothing else
//!    is under way there.
//!
//! Failure: see [`hdcs_core::home`] and [`store`].

pub mod store;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use hdcs_core::error::IoError;
use hdcs_core::home::map::BlockState;
use hdcs_core::home::{Action, Ask as HomeAsk, Event, Home, Status, Verified};
use hdcs_core::io::{Completion, Done, Extent, ExtentState, Nanos, SectorRange, Token};
use hdcs_core::limits::BLOCK_SECTORS;

use tokio::sync::oneshot;

use super::{Ask, Backend, Capabilities, Keep, Operation, Port, Stack};
use crate::device::ring::Outcome;
use store::Store;

/// Marks what was asked of the store among the tokens of the ring.
const STORE: u64 = 1 << 63;
/// Marks what is asked of the backend on behalf of a client alone.
const PASSED_ON: u64 = 1 << 62;
/// What is kept or forgotten, among what the backend is asked.
const KEEP: Token = Token(STORE - 1);
/// Operations under way at most.
const IN_FLIGHT_MAX: usize = 256;

/// Who waits for a piece that is compared with its checksums.
pub type Verifying = oneshot::Sender<Result<Verified, String>>;

/// What a home is asked about tiers: see [`Event`].
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
pub struct HomeBackend {
    home: Home,
    file: Arc<File>,
    inner: Stack,
    /// What the backend has ended.
    ended: Vec<Completion>,
    /// What is being kept or forgotten, for whom.
    keeping: Option<Token>,
    /// A snapshot that waits until nothing is under way in the backend, and what waits for it to begin.
    unasked: Option<Keep>,
    held: Vec<Operation>,
    actions: Vec<Action>,
    /// Who waits for what is being verified.
    verifying: BTreeMap<Token, Verifying>,
    next_verifying: u64,
}

impl HomeBackend {
    /// Put an open store to use over its backend.
    pub fn new(mut store: Store, inner: Stack) -> Self {
        store.config.backend_atomic = inner.capabilities().atomic_flush;
        Self {
            home: Home::new(store.config, store.map, store.cipher),
            file: store.opened.file,
            inner,
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

    /// Compare what is in the home with its checksums, from a block on.
    pub fn verify(&mut self, now: Nanos, block: u64, answer: Verifying, port: &mut Port<'_>) {
        self.next_verifying += 1;
        let token = Token(self.next_verifying);
        self.verifying.insert(token, answer);
        self.step(now, Event::Verify { token, block }, port);
    }

    fn step(&mut self, now: Nanos, event: Event, port: &mut Port<'_>) {
        self.home.step(now, event, &mut self.actions);
        self.go_on(now, port);
    }

    /// Perform what the machine wants, until nothing of that ends at once.
    fn go_on(&mut self, now: Nanos, port: &mut Port<'_>) {
        self.begin_keeping(now, port);
        while !self.actions.is_empty() || !self.ended.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                self.perform(now, action, port);
            }
            for Completion { token, result } in std::mem::take(&mut self.ended) {
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

    /// Keep or forget something for a shard.
    fn keep(&mut self, now: Nanos, token: Token, keep: Keep, port: &mut Port<'_>) {
        self.keeping = Some(token);
        if let Keep::Snapshot { .. } = keep {
            self.unasked = Some(keep);
        } else {
            let ask = Ask::Keep(keep);
            self.ask(now, Operation { token: KEEP, ask }, port);
        }
        self.go_on(now, port);
    }

    /// Ask for the snapshot that waits, once nothing else is under way; then go on with what waits for it,
    /// which only reads.
    fn begin_keeping(&mut self, now: Nanos, port: &mut Port<'_>) {
        let inner = &self.inner;
        if let Some(keep) = self.unasked.take_if(|_| inner.under_way() == 0) {
            let ask = Ask::Keep(keep);
            self.ask(now, Operation { token: KEEP, ask }, port);
            for operation in std::mem::take(&mut self.held) {
                self.ask(now, operation, port);
            }
        }
    }

    fn perform(&mut self, now: Nanos, action: Action, port: &mut Port<'_>) {
        let (owner, fd) = (port.owner, self.file.as_raw_fd());
        let of_store = |token: Token| Token(token.0 | STORE);
        let (token, ask) = match action {
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
            } => {
                return tracing::error!(
                    "home: the sector at byte {offset} of the volume does not match its checksum (byte {store_offset} \
                     of the home): write it again, or restore it from a backup"
                );
            }
            Action::StoreRead { token, offset, buf } => {
                return port.ring.read(owner, of_store(token), fd, offset, buf);
            }
            Action::StoreWrite {
                token,
                offset,
                data,
            } => {
                let token = of_store(token);
                return port.ring.write(owner, token, fd, offset, data, None);
            }
            Action::StoreSync { token } => return port.ring.sync(owner, of_store(token), fd),
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
            Action::StoreResize { .. } | Action::BackendResize { .. } => {
                unreachable!("no other size is asked for")
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

    /// What the home has is known here; of all else the backend knows.
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

impl Backend for HomeBackend {
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let Operation { token, ask } = operation;
        let ask = match ask {
            Ask::Read { offset, buf } => HomeAsk::Read { offset, buf },
            Ask::Write { offset, data } => HomeAsk::Write { offset, data },
            Ask::Zero { bytes: 0, .. } => return port.end(token, Ok(Done::Written)),
            Ask::Zero { offset, bytes, .. } => HomeAsk::Zero { offset, bytes },
            Ask::Flush => HomeAsk::Flush,
            Ask::Extents { range } => {
                self.extents(now, token, range, port);
                return self.go_on(now, port);
            }
            Ask::Keep(keep) => return self.keep(now, token, keep, port),
            // The control plane refuses it with a reason.
            Ask::Resize { .. } => return port.end(token, Err(IoError::Failed)),
        };
        self.step(now, Event::Submit { token, ask }, port);
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
            let Outcome::Device(result) = outcome else {
                unreachable!("the store starts nothing that ends in {outcome:?}");
            };
            let (token, result) = (Token(token.0 & !STORE), result.map_err(IoError::from));
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

    fn home(&self) -> Option<&HomeBackend> {
        Some(self)
    }

    fn home_mut(&mut self) -> Option<&mut HomeBackend> {
        Some(self)
    }

    fn finish(&mut self) -> bool {
        self.home.finish();
        // In this order: what the home asked of its backend ends first.
        self.home.under_way() == 0 && self.inner.finish()
    }
}
