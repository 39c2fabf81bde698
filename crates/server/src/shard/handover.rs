//! The way of a connection to the shard of its volume.
//!
//! Any shard accepts any client. Once a client has opened an export, its connection goes to the shard that has the volume
//! and stays there:
//!
//! ```text
//!                  opens an export            all is sent
//!  Unknown ──┬────────────────────▶ Elsewhere ─────────────▶ travels: Command::Adopt ─┐
//!            │                        ▲    └─ the volume is gone ─▶ ended             │
//!            └────────────────▶ Here ─┘                       ▲                       │
//!                                ▲  (the volume has moved)    │                       │
//!                                └────────────────────────────┴───────────────────────┘
//! ```
//!
//! Invariants:
//! 1. A connection travels while nothing of it is under way: no receive, no send, no request, and nothing unsent. What
//!    its client has sent already lies in its session, and is taken where it arrives.
//! 2. A connection that is to travel is asked for nothing: it receives nothing, and submits no request.
//! 3. It takes its place with it, and counts where it is, and nowhere while it travels.
//! 4. A connection belongs to one opening of its volume: that of the export that its client was told about. If that was
//!    closed, the connection ends as it would have there. If that is between two shards, the connection waits where it is.
//!
//! Failure: a shard whose queue is full is asked again after a pause, for as long as a client may stall; one that has ended
//! ends the connection, and drops those that wait in its queue.

use hdcs_core::base::io::Nanos;
use hdcs_frontend::{Ending, Held};

use super::SendError;
use super::clients::{NO_MEMORY, NOT_ALLOWED, REVOKED};
use super::command::{Adopted, Command, Visit};
use super::connection::Connection;
use super::directory::Whereabouts;
use super::turn::{NEVER, Shard};
use super::visits::CLOSED;

/// Before a shard that has too much to do is asked again to take a connection.
const BUSY_PAUSE: Nanos = Nanos::from_millis(10);
/// Why a connection ends that nobody takes.
const NOT_TAKEN: Ending = Ending::Ended("the thread of its volume had too much to do to take it");

/// Where the volume of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Station {
    /// It has opened none.
    Unknown,
    /// On the shard that has the connection.
    Here,
    /// On this other one, where the connection belongs since then.
    Elsewhere {
        /// Which.
        shard: usize,
        /// Since when.
        since: Nanos,
    },
    /// On its way from this shard to another one: see [`super::moving`].
    Waits,
}

impl Shard {
    /// Find out where the volume is that a connection has opened. It is asked once for each connection.
    pub(super) fn look_for_volume(&mut self, slot: u32) {
        let Some(connection) = self.connections.get_mut(slot) else {
            return;
        };
        if connection.station != Station::Unknown {
            return;
        }
        let Some(export) = connection.opened() else {
            return;
        };
        // Not that which the volume has now, if it was closed and opened again since the client was told about it.
        connection.visit = Some(Visit {
            name: export.name.clone(),
            opening: export.opening,
            is_noted: false,
        });
        connection.station = Station::Here;
        self.find_home(slot);
    }

    /// The opening that a connection belongs to is on this shard.
    fn station(&mut self, slot: u32, shard: usize) {
        let Some(connection) = self.connections.get_mut(slot) else {
            return;
        };
        if shard != self.state.shard {
            let since = self.state.now;
            connection.station = Station::Elsewhere { shard, since };
            return;
        }
        connection.station = Station::Here;
        let number = connection.volume();
        // One that closes has ended its other connections already.
        let served = number.and_then(|number| self.state.served(number));
        if !served.is_some_and(|served| served.terms().serves) {
            connection.abort(CLOSED);
        }
    }

    /// Send a connection to where its volume is, if that is elsewhere and nothing of the connection is under way.
    pub(super) fn hand_over(&mut self, slot: u32) {
        let now = self.state.now;
        let Some(connection) = self.connections.get_mut(slot) else {
            return;
        };
        let Station::Elsewhere { shard, since } = connection.station else {
            return;
        };
        if !connection.may_travel() {
            return;
        }
        if self.stopping.is_some() {
            return self.end(slot, Ending::NodeStops);
        }
        let peers = &self.config.peers;
        let Some(peer) = peers.get(shard) else {
            // The others are being started.
            return self.hand_over_later();
        };
        let number = connection.volume();
        let none = Held::default();
        self.state.count(number, &mut connection.counted, none);
        let Some(connection) = self.connections.remove(slot) else {
            return;
        };
        let refused = match peer.send(Command::Adopt(Box::new(connection.pack()))) {
            Ok(()) => return self.held.retain(|&one| one != slot),
            Err(refused) => refused,
        };
        let (ending, command) = match refused {
            SendError::Busy(command) if now.since(since) < self.config.connections.stall_max => {
                (None, command)
            }
            SendError::Busy(command) => (Some(NOT_TAKEN), command),
            SendError::Stopped(command) => (Some(Ending::NodeStops), command),
        };
        let Command::Adopt(adopted) = *command else {
            unreachable!("what is not taken comes back");
        };
        let mut connection = Connection::unpack(*adopted);
        connection.station = Station::Elsewhere { shard, since };
        let slot = self.connections.insert(connection);
        self.recount(slot);
        match ending {
            None => self.hand_over_later(),
            Some(why) => self.end(slot, why),
        }
    }

    /// End a connection that is being served.
    pub(super) fn end(&mut self, slot: u32, why: Ending) {
        if let Some(connection) = self.connections.get_mut(slot) {
            connection.abort(why);
        }
        self.note_visit(slot);
    }

    fn hand_over_later(&mut self) {
        self.hand_over_at = self.hand_over_at.min(self.state.now.plus(BUSY_PAUSE));
    }

    /// Ask again the shards that were busy.
    pub(super) fn hand_over_again(&mut self) {
        if self.state.now < self.hand_over_at {
            return;
        }
        self.hand_over_at = NEVER;
        for slot in 0..self.connections.end() {
            let connection = self.connections.get(slot);
            if connection.is_some_and(Connection::is_to_travel) {
                self.list(slot);
            }
        }
    }

    /// Take a connection from another shard.
    pub(super) fn arrive(&mut self, adopted: Adopted) {
        let connection = Connection::unpack(adopted);
        let is_local = connection.client.is_local();
        let has_room = self.state.shares.has_room_for_connection(is_local);
        let why = if self.stopping.is_some() {
            Some(Ending::NodeStops)
        } else if connection.peer().is_revoked() {
            Some(Ending::Ended(REVOKED))
        } else if !has_room {
            self.refuse_connection();
            Some(Ending::Ended(NO_MEMORY))
        } else {
            None
        };
        let slot = self.insert(connection);
        if let Some(connection) = self.connections.get_mut(slot)
            && connection.visit.is_some()
        {
            connection.station = Station::Here;
        }
        match why {
            // It is dropped when it is served.
            Some(why) => self.end(slot, why),
            None => self.find_home(slot),
        }
    }

    /// See to it that a connection gets where it belongs: since it has opened its volume, or while it was on its way, that
    /// may have been closed, moved, or given to other clients.
    pub(super) fn find_home(&mut self, slot: u32) {
        let Some(connection) = self.connections.get(slot) else {
            return;
        };
        let (Some(number), Some(visit)) = (connection.volume(), &connection.visit) else {
            return;
        };
        let opening = visit.opening;
        let shard = match self.state.whereabouts(number, opening) {
            Whereabouts::On(shard) => shard,
            Whereabouts::Between => {
                if let Some(connection) = self.connections.get_mut(slot) {
                    connection.station = Station::Waits;
                }
                return;
            }
            Whereabouts::Nowhere => return self.end(slot, CLOSED),
        };
        let served = self.state.served(number);
        if served.is_some_and(|served| !served.allow.lets_in(connection.peer())) {
            return self.end(slot, Ending::Ended(NOT_ALLOWED));
        }
        self.station(slot, shard);
    }
}
