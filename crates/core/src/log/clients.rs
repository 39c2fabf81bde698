//! The client table of a log of records: with it a request that is repeated takes effect once, whoever serves by then.
//!
//! ```text
//!  register ─► registered ──Take: appended──► under way ──committed──► result kept ──8 numbers later──► too old
//!                  │                              │ its record was lost with a primary: as if never asked
//!                  └── another one registers beyond the bound, and no other client was silent for longer ──► forgotten
//! ```
//!
//! | a request comes | answer |
//! |---|---|
//! | new | [`Admission::Take`]: append it |
//! | again, and its record is committed | [`Admission::Repeated`]: the result that was kept |
//! | again, and it is not yet | [`Admission::UnderWay`]: wait until it is, and ask again |
//! | again, and too late for its result | [`Admission::TooOld`] |
//! | without having waited for earlier answers | [`Admission::Ahead`]: refused, nothing happens |
//! | of a client that was forgotten, or never registered | [`Admission::Unknown`] |
//!
//! Invariants:
//! 1. The table is what the records of the log say, in order. Who appends them ([`ClientTable::appended`]) and who replays
//!    them ([`ClientTable::replayed`]) have the same one.
//! 2. A request is one [`ClientRecord`] with its result and its effect, in one span: both are in a log, or neither is.
//! 3. A request is answered once its record is committed, and not before. Nothing that is not committed is forgotten, so
//!    what is answered is found until then.
//! 4. Of each client the results of the last [`CLIENT_RESULTS_MAX`] numbers are kept. A client sends number `n` once it has
//!    the answer to `n - CLIENT_RESULTS_MAX`, so whatever it may repeat has a result there. A lower number is refused,
//!    whether it took effect or not.
//! 5. There are [`CLIENTS_MAX`] clients at most. The one whose last record is the oldest is forgotten for a new one: that is
//!    the same at every node. A number is given once, so a client that was forgotten is never known again.
//! 6. The tail of the log does not pass the start of the last committed checkpoint ([`ClientTable::tail_max`]), which has the
//!    whole table. A replay that begins behind the beginning of the log counts nothing before it meets a checkpoint.
//!
//! It must not wait, answer or append: who stands on the log does. A log whose records cannot be parsed, or whose table is
//! not [whole](ClientTable::is_whole) at its end, must not be served.
//!
//! A registration that is repeated registers twice; the first number is never used, and forgotten in time.

mod record;

use alloc::vec::Vec;

pub use record::{
    CHECKPOINT_BYTES_MAX, CLIENT_MAGIC, CLIENT_VERSION, CheckpointClient, CheckpointResult,
    ClientRecord, ClientRecordHeader, EFFECT_BYTES_MAX,
};

use crate::base::limits::{CLIENT_RESULTS_MAX, CLIENTS_MAX};

/// What is to be done with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission<'a> {
    /// It is new: append its record.
    Take,
    /// It took effect, with this result.
    Repeated(&'a [u8]),
    /// Its record is appended: it is to be answered once more than this position is committed.
    UnderWay(u64),
    /// The client does not have the answer to an earlier request without which it must not send this one.
    Ahead,
    /// Its result, if it had one, was let go of.
    TooOld,
    /// There is no such client, or no more.
    Unknown,
}

/// A result that is kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kept {
    number: u64,
    /// Its record is committed once more than this position is.
    at: u64,
    result: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Client {
    number: u64,
    /// The same of its last record.
    at: u64,
    /// By number; all of the last [`CLIENT_RESULTS_MAX`] numbers.
    results: Vec<Kept>,
}

/// Clients and their last results, as a checkpoint has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Clients {
    /// The last number that was given.
    last: u64,
    /// Those that are known, in the order of their last records.
    clients: Vec<Client>,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClientTable {
    known: Clients,
    /// Position before which all records are committed.
    committed: u64,
    /// The newest checkpoint, if it is not known to be committed: the position at which its span follows.
    checkpoint: Option<u64>,
    tail_max: u64,
    is_whole: bool,
}

impl Client {
    /// The result of a request, if it is kept.
    fn kept(&self, number: u64) -> Option<&Kept> {
        self.results.iter().find(|kept| kept.number == number)
    }

    /// Whether a request has no result here because it is too old to have one.
    fn is_too_old(&self, number: u64) -> bool {
        let highest = self.results.last().map_or(0, |kept| kept.number);
        number == 0 || lets_go(highest, number)
    }

    fn keep(&mut self, new: Kept) {
        self.at = new.at;
        self.results
            .retain(|kept| !lets_go(new.number, kept.number));
        let index = (self.results).partition_point(|kept| kept.number < new.number);
        self.results.insert(index, new);
    }
}

/// Whether the result of `number` is let go of for the request `highest`.
fn lets_go(highest: u64, number: u64) -> bool {
    highest.saturating_sub(number) >= CLIENT_RESULTS_MAX as u64
}

impl ClientTable {
    /// That of a log that begins at `tail`. If anything lay before, it is not whole until a checkpoint was replayed.
    pub fn new(tail: u64) -> Self {
        Self {
            known: Clients::default(),
            committed: tail,
            checkpoint: None,
            tail_max: tail,
            is_whole: tail == 0,
        }
    }

    /// What is to be done with a request.
    pub fn admit(&self, client: u64, number: u64) -> Admission<'_> {
        let mut clients = self.known.clients.iter();
        let Some(client) = clients.find(|known| known.number == client) else {
            return Admission::Unknown;
        };
        if let Some(kept) = client.kept(number) {
            return if self.is_committed(kept.at) {
                Admission::Repeated(&kept.result)
            } else {
                Admission::UnderWay(kept.at)
            };
        }
        if client.is_too_old(number) {
            return Admission::TooOld;
        }
        let is_owed = |kept: &Kept| lets_go(number, kept.number) && !self.is_committed(kept.at);
        if client.results.iter().any(is_owed) {
            return Admission::Ahead;
        }
        Admission::Take
    }

    /// The number that the next client gets by a record, to be told once that is committed. `None`: not before more is
    /// committed, since the client that would be forgotten waits for that, too.
    pub fn next_client(&self) -> Option<u64> {
        let clients = &self.known.clients;
        let is_full = clients.len() >= CLIENTS_MAX;
        let may_forget = |oldest: &Client| self.is_committed(oldest.at);
        if is_full && !clients.first().is_some_and(may_forget) {
            return None;
        }
        self.known.last.checked_add(1)
    }

    /// What a checkpoint has to say of clients.
    pub fn clients(&self) -> &Clients {
        &self.known
    }

    /// A record was appended to the log, in a span that follows at this position.
    ///
    /// # Panics
    /// If it is not one that [`Self::admit`] or [`Self::next_client`] has asked for.
    pub fn appended(&mut self, record: &ClientRecord<'_>, at: u64) {
        match record {
            ClientRecord::Checkpoint { .. } => self.checkpoint = Some(at),
            ClientRecord::Registration { client } => {
                assert_eq!(self.next_client(), Some(*client), "it is the next one");
                self.replayed(record, at);
            }
            ClientRecord::Request { client, number, .. } => {
                let admission = self.admit(*client, *number);
                assert_eq!(admission, Admission::Take, "it takes effect once");
                self.replayed(record, at);
            }
        }
    }

    /// A record was found in the log, in a span that follows at this position. Returns whether it counts: if not, its effect
    /// is to be ignored too. It is committed only once that is told.
    pub fn replayed(&mut self, record: &ClientRecord<'_>, at: u64) -> bool {
        match record {
            ClientRecord::Checkpoint { clients, .. } => {
                self.known.clone_from(clients);
                for client in &mut self.known.clients {
                    client.at = at;
                    client.results.iter_mut().for_each(|kept| kept.at = at);
                }
                self.checkpoint = Some(at);
                self.is_whole = true;
                true
            }
            _ if !self.is_whole => false,
            ClientRecord::Registration { client } => self.register(*client, at),
            ClientRecord::Request {
                client,
                number,
                result,
                ..
            } => {
                let kept = Kept {
                    number: *number,
                    at,
                    result: result.to_vec(),
                };
                self.keep(*client, kept)
            }
        }
    }

    fn register(&mut self, client: u64, at: u64) -> bool {
        let is_new = client > self.known.last;
        if is_new {
            if self.known.clients.len() >= CLIENTS_MAX {
                self.known.clients.remove(0);
            }
            self.known.last = client;
            self.known.clients.push(Client {
                number: client,
                at,
                results: Vec::new(),
            });
        }
        is_new
    }

    fn keep(&mut self, client: u64, kept: Kept) -> bool {
        let clients = &mut self.known.clients;
        let is_new = |known: &Client| {
            known.number == client
                && known.kept(kept.number).is_none()
                && !known.is_too_old(kept.number)
        };
        let Some(index) = clients.iter().position(is_new) else {
            return false;
        };
        // It is the last one in the order of records now.
        let mut client = clients.remove(index);
        client.keep(kept);
        clients.push(client);
        true
    }

    /// All that lies before this position is committed: durable, in a log without copies.
    pub fn committed(&mut self, up_to: u64) {
        self.committed = self.committed.max(up_to);
        if let Some(at) = self.checkpoint.filter(|at| self.is_committed(*at)) {
            self.tail_max = at;
            self.checkpoint = None;
        }
    }

    /// Whether a record is committed whose span follows at this position.
    pub fn is_committed(&self, at: u64) -> bool {
        self.committed > at
    }

    /// How far the tail of the log may move. To have it move further, append a checkpoint.
    pub fn tail_max(&self) -> u64 {
        self.tail_max
    }

    /// Whether it is what the log says, and not only a part of it: a log that has no checkpoint behind its tail has lost it.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        let Clients { last, clients } = &self.known;
        assert!(clients.len() <= CLIENTS_MAX && clients.is_sorted_by_key(|client| client.at));
        for client in clients {
            let results = &client.results;
            assert!((1..=*last).contains(&client.number));
            assert!(results.is_sorted_by(|one, other| one.number < other.number));
            let is_kept = |kept: &Kept| !client.is_too_old(kept.number) && kept.at <= client.at;
            assert!(results.iter().all(is_kept));
        }
    }
}
