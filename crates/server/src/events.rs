//! What was done to a node and its volumes, what was refused, and by whom: kept on disk, bounded.
//!
//! ```text
//!  control plane ─┐                                          ┌─► events.jsonl          what was done and became
//!  data path ─────┼─ Recorder ─► queue ─► thread: merge, ────┤
//!  connections ───┘   (never waits)       number             └─► events-clients.jsonl  what clients and refusals are
//! ```
//!
//! Invariants:
//! 1. Whoever notes an event never waits: not for the disk, not for a lock. What the queue cannot take is counted, and
//!    the count becomes an event.
//! 2. What anybody can cause who may connect ([`Record::Clients`]) displaces nothing else: it has files, room in memory,
//!    a part of the queue and rates of its own.
//! 3. The files of each record hold at most twice [`journal::FILE_BYTES_MAX`], memory [`EVENTS_MAX`] events, whatever
//!    clients do: events that repeat within [`WINDOW`] become one with a count, and of each kind more than its rate are
//!    only counted.
//! 4. Numbers only grow, also over a restart. After a loss of power those of the last second may be given once more.
//! 5. Whoever asks for events sees those that were noted before, unless the disk hangs ([`Events::settled`]).
//!
//! Failure: see [`journal`]; events that cannot be written stay in memory.

mod journal;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hdcs_api::events::{Event, Outcome};
use hdcs_api::time::utc;
use hdcs_frontend::Ending;
use journal::Journal;
use tokio::sync::watch;

/// Events in memory.
pub const EVENTS_MAX: usize = 4096;
/// Those of each record.
const RECORD_EVENTS_MAX: usize = EVENTS_MAX / 2;
/// Events that wait for the thread, and how many of them may be of clients.
const QUEUE_MAX: usize = 1024;
const QUEUE_CLIENTS_MAX: usize = QUEUE_MAX / 2;
/// Events that are alike become one for so long.
const WINDOW: Duration = Duration::from_secs(10);
/// Windows of each record that are open at once.
const ALIKE_MAX: usize = 512;
/// Kinds of events that have a rate of their own; what comes beyond shares one.
const KINDS_MAX: usize = 64;
/// Events of one kind that are kept at once, and in a second after that.
const BURST_MAX: u32 = 250;
const RATE_MAX: u32 = 50;
/// The same for what clients cause: few, so that a flood of one kind leaves what was before in the files for a while.
const CLIENTS_BURST_MAX: u32 = 250;
const CLIENTS_RATE_MAX: u32 = 2;
/// The kinds that clients of the data path and strangers cause.
const CLIENT_KINDS: [&str; 5] = ["accept", "connect", "disconnect", "request", "tls"];

/// Where an event is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Record {
    /// What was done to the node and its volumes, and what became of them.
    Node,
    /// What clients did, and what was refused: anybody may cause any number of these.
    Clients,
}

impl Record {
    const ALL: [Self; 2] = [Self::Node, Self::Clients];

    fn journal(self, directory: &Path) -> Journal {
        let name = match self {
            Self::Node => "events",
            Self::Clients => "events-clients",
        };
        Journal::new(directory, name)
    }

    /// What is kept of a kind: at once, and in a second.
    fn rate(self) -> (u32, u32) {
        match self {
            Self::Node => (BURST_MAX, RATE_MAX),
            Self::Clients => (CLIENTS_BURST_MAX, CLIENTS_RATE_MAX),
        }
    }
}

/// Where `event` is kept.
fn record_of(event: &Event) -> Record {
    if event.outcome == Outcome::Refused || CLIENT_KINDS.contains(&&*event.kind) {
        Record::Clients
    } else {
        Record::Node
    }
}

/// Whether `event` is `other` once more. A client's port and the like make no difference.
fn are_alike(event: &Event, other: &Event) -> bool {
    event.outcome == other.outcome
        && event.volume == other.volume
        && [&event.kind, &event.who, &event.why] == [&other.kind, &other.who, &other.why]
        && (event.what == other.what || CLIENT_KINDS.contains(&&*event.kind))
}

/// How a connection ended, as an event has it.
pub fn outcome_of(ending: &Ending) -> Outcome {
    match ending {
        Ending::Left | Ending::Gone | Ending::NodeStops => Outcome::Seen,
        Ending::NoExport | Ending::Violation(_) | Ending::Ended(_) => Outcome::Refused,
        Ending::Failed(_) => Outcome::Failed,
    }
}

/// What goes through the queue.
#[derive(Debug)]
enum Item {
    Event(Event),
    /// Write everything, and say so.
    Finish(SyncSender<()>),
}

/// What those who note and the thread that writes know of the queue.
#[derive(Debug, Default)]
struct Gate {
    /// Events of [`Record::Clients`] in the queue.
    clients: AtomicUsize,
    /// Events that it did not take, by [`Record`].
    lost: [AtomicU64; 2],
    /// Events that it took or is about to take, and those of them that the thread has dealt with.
    queued: AtomicU64,
    taken: watch::Sender<u64>,
}

/// Takes events from any thread.
#[derive(Clone, Debug)]
pub struct Recorder {
    queue: SyncSender<Item>,
    gate: Arc<Gate>,
}

impl Recorder {
    /// One that keeps nothing.
    pub fn nowhere() -> Self {
        Self {
            queue: sync_channel(0).0,
            gate: Arc::default(),
        }
    }

    /// Note an event; never waits.
    pub fn note(&self, event: Event) {
        let (record, order) = (record_of(&event), Ordering::Relaxed);
        let is_of_client = record == Record::Clients;
        let (gate, clients) = (&self.gate, usize::from(is_of_client));
        let room = gate.clients.fetch_add(clients, order) < QUEUE_CLIENTS_MAX || !is_of_client;
        // Before it is in the queue: whoever waits for it must not see fewer than there are.
        gate.queued.fetch_add(1, order);
        if !room || self.queue.try_send(Item::Event(event)).is_err() {
            gate.clients.fetch_sub(clients, order);
            gate.lost[record as usize].fetch_add(1, order);
            // Whoever has seen the higher number waits for an event more, or in vain.
            gate.queued.fetch_sub(1, order);
        }
    }
}

/// The newest events of each record.
#[derive(Debug, Default)]
struct Newest([VecDeque<Event>; 2]);

impl Newest {
    fn push(&mut self, record: Record, event: Event) {
        let events = &mut self.0[record as usize];
        if events.len() == RECORD_EVENTS_MAX {
            events.pop_front();
        }
        events.push_back(event);
    }

    fn last_number(&self) -> u64 {
        let last = self.0.iter().filter_map(VecDeque::back);
        last.map(|event| event.number).max().unwrap_or(0)
    }
}

/// The newest events, for whoever asks.
#[derive(Clone, Debug)]
pub struct Events {
    newest: Arc<Mutex<Newest>>,
    recorder: Recorder,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Events {
    /// Read the files in `directory`, and go on writing there.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let (queue, items) = sync_channel(QUEUE_MAX);
        let recorder = Recorder {
            queue,
            gate: Arc::default(),
        };
        let mut writer = Writer::open(directory, Arc::clone(&recorder.gate));
        let newest = Arc::clone(&writer.newest);
        std::thread::Builder::new()
            .name("hdcs-events".into())
            .spawn(move || writer.run(&items))?;
        Ok(Self { newest, recorder })
    }

    /// What notes events.
    pub fn recorder(&self) -> Recorder {
        self.recorder.clone()
    }

    /// Note an event; never waits.
    pub fn note(&self, event: Event) {
        self.recorder.note(event);
    }

    /// Have everything that was noted written, also what was only counted. Gives up after `time_max`: a disk may hang.
    pub fn finish(&self, time_max: Duration) {
        let deadline = Instant::now() + time_max;
        let (done, is_done) = sync_channel(1);
        let mut item = Item::Finish(done);
        while let Err(TrySendError::Full(refused)) = self.recorder.queue.try_send(item) {
            if Instant::now() >= deadline {
                return;
            }
            item = refused;
            std::thread::sleep(Duration::from_millis(1));
        }
        // If it does not answer, there is nobody left to tell.
        let _ = is_done.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }

    /// Wait until what was noted before this call can be listed, and no longer than `time_max`: a disk may hang. Whether
    /// it can be.
    pub async fn settled(&self, time_max: Duration) -> bool {
        let gate = &self.recorder.gate;
        let queued = gate.queued.load(Ordering::Relaxed);
        let mut taken = gate.taken.subscribe();
        let all = taken.wait_for(|taken| *taken >= queued);
        tokio::time::timeout(time_max, all).await.is_ok()
    }

    /// How the run before this one ended, in words, if there was one. To be asked before a start is noted.
    pub fn last_end(&self) -> Option<String> {
        let newest = lock(&self.newest);
        let events = &newest.0[Record::Node as usize];
        // A start that failed was no run.
        let is_mark = |event: &&Event| {
            event.kind == "stop" || (event.kind == "start" && event.outcome == Outcome::Done)
        };
        let Some(last) = events.iter().rev().find(is_mark) else {
            // So much was done after the start that it is not known any more.
            let last = events.iter().rev().find(|event| event.kind != "start")?;
            return Some(format!(
                "the last run did not stop, it was killed or the machine failed after {}",
                utc(last.at_ms)
            ));
        };
        Some(match (&*last.kind, last.outcome) {
            ("stop", Outcome::Done) => {
                format!("the last run stopped cleanly at {}", utc(last.at_ms))
            }
            ("stop", _) => format!("the last run stopped uncleanly: {}", last.why),
            _ => format!(
                "the last run, which began at {}, did not stop: it was killed or the machine failed",
                utc(last.at_ms)
            ),
        })
    }

    /// Events with higher numbers than `after`, of one volume if asked: the first `limit` of them, or without `after`
    /// the last. In order.
    pub fn list(&self, after: Option<u64>, limit: usize, volume: Option<&str>) -> Vec<Event> {
        let newest = lock(&self.newest);
        let wanted = |event: &&Event| {
            after.is_none_or(|after| event.number > after)
                && volume.is_none_or(|volume| event.volume.as_deref() == Some(volume))
        };
        let mut events: Vec<&Event> = newest.0.iter().flatten().filter(wanted).collect();
        events.sort_unstable_by_key(|event| event.number);
        let first = match after {
            Some(_) => 0,
            None => events.len().saturating_sub(limit),
        };
        let events = events.into_iter().skip(first).take(limit);
        events.cloned().collect()
    }
}

/// How many events of a kind may still be kept.
#[derive(Debug)]
struct Budget {
    left: u32,
    at: Instant,
    /// Events that were only counted since that was last said.
    dropped: u64,
    /// When it was last said.
    said: Option<Instant>,
}

impl Budget {
    fn new((burst, _): (u32, u32), now: Instant) -> Self {
        Self {
            left: burst,
            at: now,
            dropped: 0,
            said: None,
        }
    }

    fn take(&mut self, (burst, rate): (u32, u32), now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.at).as_secs_f64() * f64::from(rate);
        if earned >= 1.0 {
            self.left = self.left.saturating_add(earned as u32).min(burst);
            self.at = now;
        }
        let is_left = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_left
    }

    /// How many were only counted, if it is time to say that.
    fn dropped(&mut self, now: Instant, is_last: bool) -> Option<u64> {
        let is_time = self.said.is_none_or(|said| now - said >= WINDOW);
        if self.dropped == 0 || !(is_time || is_last) {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.dropped))
    }
}

/// By what events are compared: of the node's by what they are about, so that each change of that is said at once; of
/// clients' by everything that makes them alike.
type Key = (Record, String, String, Option<String>, String);

/// Events that are alike, from the first one on.
#[derive(Debug)]
struct Alike {
    since: Instant,
    /// The last one, and how many came after the first.
    last: Event,
    more: u64,
}

#[derive(Debug)]
struct Writer {
    journals: [Journal; 2],
    newest: Arc<Mutex<Newest>>,
    next: u64,
    recent: HashMap<Key, Alike>,
    /// By record and kind; beyond [`KINDS_MAX`] they share that of the empty name.
    budgets: HashMap<(Record, String), Budget>,
    gate: Arc<Gate>,
}

impl Writer {
    fn open(directory: &Path, gate: Arc<Gate>) -> Self {
        let journals = Record::ALL.map(|record| record.journal(directory));
        let found = Newest(journals.each_ref().map(|one| one.read(RECORD_EVENTS_MAX)));
        Self {
            next: found.last_number() + 1,
            journals,
            newest: Arc::new(Mutex::new(found)),
            recent: HashMap::new(),
            budgets: HashMap::new(),
            gate,
        }
    }

    fn run(&mut self, items: &Receiver<Item>) {
        loop {
            let mut next = match items.recv_timeout(Duration::from_secs(1)) {
                Ok(item) => Some(item),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let mut asked = None;
            while let Some(item) = next {
                match item {
                    Item::Event(event) => {
                        let is_of_client = record_of(&event) == Record::Clients;
                        let clients = &self.gate.clients;
                        clients.fetch_sub(usize::from(is_of_client), Ordering::Relaxed);
                        self.take(event, Instant::now());
                        self.gate.taken.send_modify(|taken| *taken += 1);
                    }
                    Item::Finish(done) => asked = Some(done),
                }
                next = items.try_recv().ok();
            }
            self.settle(Instant::now(), asked.is_some());
            self.journals.iter_mut().for_each(Journal::sync);
            if let Some(done) = asked {
                // Whoever asked may have given up.
                let _ = done.send(());
            }
        }
    }

    fn take(&mut self, event: Event, now: Instant) {
        let record = record_of(&event);
        let why = match record {
            Record::Node => String::new(),
            Record::Clients => event.why.clone(),
        };
        let (kind, who) = (event.kind.clone(), event.who.clone());
        let key = (record, kind, who, event.volume.clone(), why);
        match self.recent.get_mut(&key) {
            Some(alike) if are_alike(&alike.last, &event) && now - alike.since < WINDOW => {
                alike.more += 1;
                alike.last = event;
                return;
            }
            Some(_) => {
                if let Some(before) = self.recent.remove(&key) {
                    self.say_repeated(before, now);
                }
            }
            None => {}
        }
        let open = self.recent.keys().filter(|key| key.0 == record).count();
        if open < ALIKE_MAX {
            let alike = Alike {
                since: now,
                last: event.clone(),
                more: 0,
            };
            self.recent.insert(key, alike);
        }
        self.keep(event, now);
    }

    /// Close the windows that are over, or all of them, and say what was only counted.
    fn settle(&mut self, now: Instant, is_last: bool) {
        let is_over = |alike: &Alike| is_last || now - alike.since >= WINDOW;
        let over = self.recent.extract_if(|_, alike| is_over(alike));
        let mut over: Vec<Alike> = over.map(|(_, alike)| alike).collect();
        over.sort_unstable_by_key(|alike| alike.last.at_ms);
        for alike in over {
            self.say_repeated(alike, now);
        }
        for record in Record::ALL {
            let lost = self.gate.lost[record as usize].swap(0, Ordering::Relaxed);
            if lost > 0 {
                self.budget(record, "", now).dropped += lost;
            }
        }
        let mut dropped = Vec::new();
        for ((record, kind), budget) in &mut self.budgets {
            if let Some(count) = budget.dropped(now, is_last) {
                dropped.push((*record, kind.clone(), count));
            }
        }
        dropped.sort_unstable_by(|one, other| one.1.cmp(&other.1));
        for (record, kind, count) in dropped {
            let what = if kind.is_empty() {
                "of several kinds"
            } else {
                &kind
            };
            let event = Event::new("events-dropped", Outcome::Seen, "node")
                .what(what)
                .why("more came than are kept");
            self.write(record, Event { count, ..event });
        }
    }

    fn say_repeated(&mut self, alike: Alike, now: Instant) {
        if alike.more > 0 {
            let event = Event {
                count: alike.more,
                ..alike.last
            };
            self.keep(event, now);
        }
    }

    fn budget(&mut self, record: Record, kind: &str, now: Instant) -> &mut Budget {
        let key = (record, kind.to_owned());
        let key = if self.budgets.len() < KINDS_MAX || self.budgets.contains_key(&key) {
            key
        } else {
            (record, String::new())
        };
        let budget = self.budgets.entry(key);
        budget.or_insert_with(|| Budget::new(record.rate(), now))
    }

    fn keep(&mut self, event: Event, now: Instant) {
        let record = record_of(&event);
        let budget = self.budget(record, &event.kind, now);
        if budget.take(record.rate(), now) {
            self.write(record, event);
        } else {
            budget.dropped += event.count;
        }
    }

    fn write(&mut self, record: Record, mut event: Event) {
        event.number = self.next;
        self.next += 1;
        self.journals[record as usize].append(&event);
        lock(&self.newest).push(record, event);
    }
}

#[cfg(test)]
mod tests;
