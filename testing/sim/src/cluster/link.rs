//! Connections from who leads to members: ordered, slow, broken in mid-stream, cut in one direction or both.
//!
//! A connection has two lanes in each direction: spans and requests on one, reads of the log and their answers on the
//! other. A lane keeps its order; the two do not keep one another's. Each end learns by itself that a connection is
//! broken. Nothing of an old connection is handed in once its receiver has closed its end, or has a new one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fastrand::Rng;
use hdcs_core::base::buf::Buf;
use hdcs_core::base::io::Nanos;
use hdcs_core::replication::message::{Message, Question};

/// A message on its way.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    /// In which its sender acts, or which it answers.
    pub(super) epoch: u64,
    pub(super) message: Message,
    pub(super) data: Vec<Buf>,
}

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Leader,
    Member,
}

impl End {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Leader => Self::Member,
            Self::Member => Self::Leader,
        }
    }
}

/// Which way, and on which lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lane {
    /// Who receives.
    pub(super) to: End,
    /// Reads of the log, and what was read.
    pub(super) is_bulk: bool,
}

impl Lane {
    const ALL: [Self; 4] = [
        Self {
            to: End::Member,
            is_bulk: false,
        },
        Self {
            to: End::Leader,
            is_bulk: false,
        },
        Self {
            to: End::Member,
            is_bulk: true,
        },
        Self {
            to: End::Leader,
            is_bulk: true,
        },
    ];

    /// The one that a message takes.
    pub(super) fn of(to: End, message: &Message) -> Self {
        let is_bulk = matches!(
            message,
            Message::ReadLog { .. } | Message::LogData(_) | Message::Nothing(Question::ReadLog)
        );
        Self { to, is_bulk }
    }

    fn index(self) -> usize {
        usize::from(self.to == End::Leader) + 2 * usize::from(self.is_bulk)
    }
}

#[derive(Debug, Default)]
struct Queue {
    wires: VecDeque<Wire>,
    /// When the last one arrives.
    last: Nanos,
    /// Those that have arrived and are not let through.
    stalled: usize,
}

#[derive(Debug)]
struct Connection {
    pair: Pair,
    queues: [Queue; 4],
}

/// Who leads, and the member.
pub(super) type Pair = (usize, usize);

/// Names one connection.
pub(super) type ConnectionId = u64;

#[derive(Debug, Default)]
struct Link {
    /// What each end takes for the present connection.
    ends: [Option<ConnectionId>; 2],
    is_connecting: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Links {
    pairs: BTreeMap<Pair, Link>,
    connections: BTreeMap<ConnectionId, Connection>,
    next: ConnectionId,
    /// From, to: nothing gets through.
    cuts: BTreeSet<Pair>,
}

/// What a lane brought.
#[derive(Debug)]
pub(super) enum Arrival {
    /// Nothing gets through at present.
    Stalled,
    /// Nobody listens any more.
    Lost,
    /// A message: from, to.
    Message(usize, usize, Wire),
}

impl Links {
    fn end(&self, pair: Pair, end: End) -> Option<ConnectionId> {
        self.pairs.get(&pair)?.ends[end as usize]
    }

    /// The connection that an end of this pair has.
    pub(super) fn present(&self, pair: Pair, end: End) -> Option<ConnectionId> {
        self.end(pair, end)
    }

    /// Of whom a connection is.
    pub(super) fn pair(&self, connection: ConnectionId) -> Option<Pair> {
        self.connections.get(&connection).map(|found| found.pair)
    }

    /// Begin to connect, unless that is under way or done.
    pub(super) fn begin(&mut self, pair: Pair) -> bool {
        let link = self.pairs.entry(pair).or_default();
        let begins = link.ends[End::Leader as usize].is_none() && !link.is_connecting;
        link.is_connecting |= begins;
        begins
    }

    /// It did not succeed.
    pub(super) fn give_up(&mut self, pair: Pair) {
        self.pairs.entry(pair).or_default().is_connecting = false;
    }

    /// A new connection is there. Both ends have closed the old one.
    pub(super) fn connect(&mut self, pair: Pair) {
        self.next += 1;
        let link = self.pairs.entry(pair).or_default();
        assert_eq!(link.ends, [None; 2], "the old one is closed at both ends");
        *link = Link {
            ends: [Some(self.next); 2],
            is_connecting: false,
        };
        let queues = Default::default();
        self.connections
            .insert(self.next, Connection { pair, queues });
    }

    /// An end closes its connection. Returns it, if there was one.
    pub(super) fn close(&mut self, pair: Pair, end: End) -> Option<ConnectionId> {
        let link = self.pairs.get_mut(&pair)?;
        let closed = link.ends[end as usize].take()?;
        if link.ends[end.other() as usize] != Some(closed) {
            self.connections.remove(&closed);
        }
        Some(closed)
    }

    /// A connection breaks: of what is under way in each lane some still arrives, and the rest is lost.
    pub(super) fn lose(&mut self, connection: ConnectionId, random: &mut Rng) {
        if let Some(found) = self.connections.get_mut(&connection) {
            for queue in &mut found.queues {
                let left = queue.wires.len();
                queue.wires.truncate(random.usize(..=left));
            }
        }
    }

    /// The last two messages of a lane change places. Returns whether there are two that may.
    pub(super) fn exchange(
        &mut self,
        connection: ConnectionId,
        lane: Lane,
        may: impl Fn(&Message) -> bool,
    ) -> bool {
        let found = self.connections.get_mut(&connection);
        let Some(wires) = found.map(|found| &mut found.queues[lane.index()].wires) else {
            return false;
        };
        let count = wires.len();
        let is_done = count >= 2 && may(&wires[count - 2].message);
        if is_done {
            wires.swap(count - 1, count - 2);
        }
        is_done
    }

    /// Send, if the end has a connection with room. Returns it, and when it arrives after at least `delay`.
    pub(super) fn send(
        &mut self,
        pair: Pair,
        lane: Lane,
        wire: Wire,
        at: Nanos,
    ) -> Option<(ConnectionId, Nanos)> {
        let connection = self.end(pair, lane.to.other())?;
        let queue = &mut self.connections.get_mut(&connection)?.queues[lane.index()];
        queue.wires.push_back(wire);
        queue.last = queue.last.max(at);
        Some((connection, queue.last))
    }

    /// Messages to a member that are on their way.
    pub(super) fn under_way(&self, pair: Pair) -> usize {
        let Some(connection) = self.end(pair, End::Leader) else {
            return 0;
        };
        let lane = Lane {
            to: End::Member,
            is_bulk: false,
        };
        self.connections[&connection].queues[lane.index()]
            .wires
            .len()
    }

    /// A message arrives.
    pub(super) fn arrive(
        &mut self,
        connection: ConnectionId,
        lane: Lane,
        is_open: impl FnOnce(usize) -> bool,
    ) -> Arrival {
        let Some(pair) = self.pair(connection) else {
            return Arrival::Lost;
        };
        let (from, to) = match lane.to {
            End::Member => pair,
            End::Leader => (pair.1, pair.0),
        };
        let is_stalled = self.cuts.contains(&(from, to)) || !is_open(to);
        let listens = self.end(pair, lane.to) == Some(connection);
        let queue =
            &mut (self.connections.get_mut(&connection).expect("it is there")).queues[lane.index()];
        if is_stalled {
            queue.stalled += 1;
            return Arrival::Stalled;
        }
        match queue.wires.pop_front() {
            Some(wire) if listens => Arrival::Message(from, to, wire),
            _ => Arrival::Lost,
        }
    }

    /// Take what was stalled: each connection and lane, once for each message.
    pub(super) fn take_stalled(&mut self) -> Vec<(ConnectionId, Lane)> {
        let mut all = Vec::new();
        for (connection, found) in &mut self.connections {
            for lane in Lane::ALL {
                let stalled = std::mem::take(&mut found.queues[lane.index()].stalled);
                all.extend(std::iter::repeat_n((*connection, lane), stalled));
            }
        }
        all
    }

    /// Nothing gets from one node to another one any more, or everything again.
    pub(super) fn cut(&mut self, from: usize, to: usize, is_cut: bool) {
        if is_cut {
            self.cuts.insert((from, to));
        } else {
            self.cuts.remove(&(from, to));
        }
    }

    /// Everything gets through again.
    pub(super) fn heal(&mut self) {
        self.cuts.clear();
    }

    /// Whether either direction between two nodes is cut.
    pub(super) fn is_cut(&self, one: usize, other: usize) -> bool {
        self.cuts.contains(&(one, other)) || self.cuts.contains(&(other, one))
    }

    /// The pairs that a node is an end of, and which.
    pub(super) fn of(&self, node: usize) -> Vec<(Pair, End)> {
        let ends = self
            .pairs
            .keys()
            .flat_map(|&pair| [(pair, End::Leader), (pair, End::Member)]);
        let is_it = |(pair, end): &(Pair, End)| match end {
            End::Leader => pair.0 == node,
            End::Member => pair.1 == node,
        };
        ends.filter(is_it).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: Pair = (0, 1);
    const TO_MEMBER: Lane = Lane {
        to: End::Member,
        is_bulk: false,
    };

    fn wire(epoch: u64) -> Wire {
        Wire {
            epoch,
            message: Message::Join,
            data: Vec::new(),
        }
    }

    fn epoch(arrival: Arrival) -> Option<u64> {
        match arrival {
            Arrival::Message(0, 1, wire) => Some(wire.epoch),
            _ => None,
        }
    }

    #[test]
    fn messages_keep_their_order_and_wait_while_nothing_gets_through() {
        let mut links = Links::default();
        assert!(links.begin(PAIR) && !links.begin(PAIR));
        links.connect(PAIR);
        let (connection, first) = links.send(PAIR, TO_MEMBER, wire(1), Nanos(9)).unwrap();
        let (_, second) = links.send(PAIR, TO_MEMBER, wire(2), Nanos(3)).unwrap();
        assert_eq!((first, second), (Nanos(9), Nanos(9)));
        links.cut(0, 1, true);
        assert!(matches!(
            links.arrive(connection, TO_MEMBER, |_| true),
            Arrival::Stalled
        ));
        links.heal();
        assert!(matches!(
            links.arrive(connection, TO_MEMBER, |_| false),
            Arrival::Stalled
        ));
        assert_eq!(links.take_stalled().len(), 2);
        assert_eq!(
            epoch(links.arrive(connection, TO_MEMBER, |_| true)),
            Some(1)
        );
        assert_eq!(
            epoch(links.arrive(connection, TO_MEMBER, |_| true)),
            Some(2)
        );
    }

    #[test]
    fn connection_that_breaks_loses_the_end_of_what_is_under_way() {
        let mut seen = BTreeSet::new();
        for seed in 0..50 {
            let mut links = Links::default();
            links.connect(PAIR);
            let sent = (1..=3).map(|epoch| links.send(PAIR, TO_MEMBER, wire(epoch), Nanos(1)));
            let (connection, _) = sent.last().flatten().unwrap();
            links.lose(connection, &mut Rng::with_seed(seed));
            let arrived = (1..=3).map(|_| epoch(links.arrive(connection, TO_MEMBER, |_| true)));
            let arrived: Vec<u64> = arrived.flatten().collect();
            assert_eq!(arrived, (1..=arrived.len() as u64).collect::<Vec<_>>());
            seen.insert(arrived.len());
        }
        assert_eq!(seen.len(), 4);
    }

    #[test]
    fn messages_change_places_if_there_are_two() {
        let mut links = Links::default();
        links.connect(PAIR);
        let (connection, _) = links.send(PAIR, TO_MEMBER, wire(1), Nanos(1)).unwrap();
        assert!(!links.exchange(connection, TO_MEMBER, |_| true));
        links.send(PAIR, TO_MEMBER, wire(2), Nanos(1)).unwrap();
        assert!(!links.exchange(connection, TO_MEMBER, |_| false));
        assert!(links.exchange(connection, TO_MEMBER, |_| true));
        assert_eq!(
            epoch(links.arrive(connection, TO_MEMBER, |_| true)),
            Some(2)
        );
    }

    #[test]
    fn nothing_of_a_connection_that_was_closed_is_handed_in() {
        let mut links = Links::default();
        links.connect(PAIR);
        let (old, _) = links.send(PAIR, TO_MEMBER, wire(1), Nanos(1)).unwrap();
        assert_eq!(links.close(PAIR, End::Member), Some(old));
        assert!(matches!(
            links.arrive(old, TO_MEMBER, |_| true),
            Arrival::Lost
        ));
        assert_eq!(links.close(PAIR, End::Leader), Some(old));
        links.connect(PAIR);
        assert!(matches!(
            links.arrive(old, TO_MEMBER, |_| true),
            Arrival::Lost
        ));
        assert!(
            links
                .present(PAIR, End::Member)
                .is_some_and(|new| new != old)
        );
    }
}
