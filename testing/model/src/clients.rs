//! A client that numbers its requests and repeats them to whoever serves, and a service which takes them: each request
//! appends its number to a list, so one that takes effect twice is seen.

use std::collections::BTreeMap;

use hdcs_core::log::clients::{Admission, ClientRecord, ClientTable};
use hdcs_core::replication::replica::Replica;
use hdcs_core::replication::{Point, Spans};

use crate::checks::Broken;
use crate::plant::Plant;

/// The number of the client, which is the first one that registers.
const CLIENT: u64 = 1;

/// What is in the spans that were ever appended, by where each ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Records(BTreeMap<Point, Vec<u8>>);

/// A request in the log: its number and its result.
pub type Taken = (u64, u64);

impl Records {
    /// A span was appended that ends there.
    pub fn insert(&mut self, end: Point, record: Vec<u8>) {
        self.0.insert(end, record);
    }

    fn get(&self, end: Point) -> Option<ClientRecord<'_>> {
        let bytes = self.0.get(&end)?;
        Some(ClientRecord::parse(bytes).expect("it was encoded"))
    }

    /// The requests in the spans that end there.
    pub fn requests(&self, ends: &[Point]) -> Vec<Taken> {
        let request = |end: &Point| match self.get(*end)? {
            ClientRecord::Request { number, result, .. } => Some((number, result_of(result))),
            ClientRecord::Registration { .. } | ClientRecord::Checkpoint { .. } => None,
        };
        ends.iter().filter_map(request).collect()
    }
}

fn result_of(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// What stands on the log of the node that serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Service {
    table: ClientTable,
    /// The numbers of the requests that took effect.
    list: Vec<u8>,
    /// The position at which the span of its last checkpoint follows.
    checkpoint: u64,
}

/// What is done with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is new.
    Take,
    /// This is its result.
    Result(u64),
    /// Nothing yet.
    Wait,
    /// It is refused.
    Refuse,
}

impl Service {
    /// What the log of a node that begins to serve says; `None` if it does not say all.
    pub fn rebuild(replica: &Replica, records: &Records, plant: Option<Plant>) -> Option<Self> {
        let mut at = replica.superblock().tail.position;
        let mut this = Self {
            table: ClientTable::new(at),
            list: Vec::new(),
            checkpoint: at,
        };
        while let Some(span) = replica.span_after(at) {
            at = span.end.position;
            let record = records.get(span.end).expect("every span has one");
            let is_forgotten = plant == Some(Plant::TableNotRebuilt)
                && matches!(record, ClientRecord::Request { .. });
            if is_forgotten || this.table.replayed(&record, span.start.position) {
                match record {
                    ClientRecord::Registration { .. } => {}
                    ClientRecord::Request { effect, .. } => this.list.extend(effect),
                    ClientRecord::Checkpoint { state, .. } => this.list = state.to_vec(),
                }
            }
        }
        this.table.is_whole().then_some(this)
    }

    /// What the group has committed.
    pub fn committed(&mut self, up_to: u64) {
        self.table.committed(up_to);
    }

    /// How far the tail may move.
    pub fn tail_max(&self, plant: Option<Plant>) -> u64 {
        match plant {
            Some(Plant::CarriedUncommitted) => self.checkpoint,
            _ => self.table.tail_max(),
        }
    }

    /// What is done with a request.
    pub fn answer(&self, number: u64, plant: Option<Plant>) -> Answer {
        match self.table.admit(CLIENT, number) {
            Admission::Take => Answer::Take,
            Admission::Repeated(result) => Answer::Result(result_of(result)),
            Admission::UnderWay(_) if plant == Some(Plant::AnsweredUncommitted) => {
                let index = (self.list.iter()).position(|taken| u64::from(*taken) == number);
                Answer::Result(index.expect("it was taken") as u64)
            }
            Admission::UnderWay(_) => Answer::Wait,
            Admission::Ahead | Admission::TooOld | Admission::Unknown => Answer::Refuse,
        }
    }

    /// The record of a request that is taken, in a span that follows at this position.
    pub fn take(&mut self, number: u64, at: u64) -> Vec<u8> {
        let result = (self.list.len() as u64).to_le_bytes();
        let effect = [number as u8];
        let record = ClientRecord::Request {
            client: CLIENT,
            number,
            result: &result,
            effect: &effect,
        };
        self.table.appended(&record, at);
        self.list.extend(effect);
        record.encode()
    }

    /// The same of the client.
    pub fn register(&mut self, at: u64) -> Vec<u8> {
        let client = self.table.next_client().expect("it is the first one");
        let record = ClientRecord::Registration { client };
        self.table.appended(&record, at);
        record.encode()
    }

    /// The same of a checkpoint.
    pub fn checkpoint(&mut self, at: u64, plant: Option<Plant>) -> Vec<u8> {
        let mut bare = ClientTable::new(0);
        bare.replayed(&ClientRecord::Registration { client: CLIENT }, 0);
        let table = match plant {
            Some(Plant::ResultNotCarried) => &bare,
            _ => &self.table,
        };
        let record = ClientRecord::Checkpoint {
            clients: table.clients().clone(),
            state: &self.list.clone(),
        };
        self.table.appended(&record, at);
        self.checkpoint = at;
        record.encode()
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        self.table.check_invariants();
    }

    /// Whether what it begins with is what was committed, and perhaps more.
    pub fn has(&self, committed: &[Taken]) -> bool {
        let numbers = committed.iter().map(|(number, _)| *number as u8);
        self.list.starts_with(&numbers.collect::<Vec<_>>())
    }
}

/// What the client has been told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Client(BTreeMap<u64, u64>);

impl Client {
    /// The numbers that it may send: those without an answer, up to so many of them.
    pub fn numbers(&self, scope_requests: u8, window: u64) -> impl Iterator<Item = u64> {
        let all = 1..=u64::from(scope_requests);
        let first = all.clone().find(|number| !self.0.contains_key(number));
        let limit = first.unwrap_or(0) + window;
        all.filter(move |number| *number < limit && !self.0.contains_key(number))
    }

    /// It gets an answer.
    pub fn told(&mut self, number: u64, result: u64) {
        self.0.insert(number, result);
    }

    /// Whether it has every answer.
    pub fn has_all(&self, requests: u8) -> bool {
        self.0.len() == usize::from(requests)
    }

    /// Check it against the requests in the log that counts.
    pub fn check(&self, committed: &[Taken]) -> Option<Broken> {
        let times = |number: u64| committed.iter().filter(|taken| taken.0 == number).count();
        if committed.iter().any(|taken| times(taken.0) > 1) {
            return Some(Broken::TakenTwice);
        }
        let mut told = self.0.iter();
        let is_said = |(number, result): (&u64, &u64)| committed.contains(&(*number, *result));
        (!told.all(is_said)).then_some(Broken::Unsaid)
    }
}
