//! What the node keeps of clients' comings and goings: which export a client opened, which it was refused, and why its
//! connection ended; see [`crate::events`]. Noting it never waits.

use std::io;

use hdcs_api::events::{Event, Outcome};
use hdcs_device::Errno;
use hdcs_frontend::Ending;
use hdcs_frontend::access::Peer;

use super::command::Transport;
use super::connection::Connection;
use super::directory::Refusal;
use super::state::ShardState;
use super::turn::Shard;
use crate::events::{Recorder, outcome_of};

impl ShardState {
    /// A client asked for an export that it does not get. Whoever may know why is told by the handshake; whoever operates
    /// the node is told here.
    pub fn note_refused(&self, name: &str, client: Transport, peer: &Peer) {
        let why = match self.directory.refusal(name, peer) {
            Refusal::Denied { .. } => not_allowed(name),
            Refusal::Unopened(why) => format!("the volume is not open: {why}"),
            Refusal::Changing => "the volume is not open yet".to_owned(),
            Refusal::Unknown => "there is no such export".to_owned(),
        };
        let event = Event::new("connect", Outcome::Refused, client.who(peer));
        let event = if name.is_empty() {
            event
        } else {
            event.of(name)
        };
        self.events.note(event.what(client.which()).why(why));
    }
}

fn not_allowed(name: &str) -> String {
    format!("it is not in `allow` (hdcs volume set {name} allow=...)")
}

impl Shard {
    /// Note what has become of a connection: that it has opened an export, or that it ends.
    pub(super) fn note_visit(&mut self, slot: u32) {
        let Some(connection) = self.connections.get_mut(slot) else {
            return;
        };
        let visit = connection.visit.as_mut();
        if let Some(visit) = visit.filter(|visit| !visit.is_noted) {
            visit.is_noted = true;
            let name = visit.name.clone();
            let event = about(connection, "connect", Outcome::Done).of(&name);
            self.state.events.note(event);
        }
        let Some(why) = connection.end() else {
            return;
        };
        let event = about(connection, "disconnect", outcome_of(&why)).why(why.to_string());
        self.state.events.note(match &connection.visit {
            Some(visit) => event.of(&visit.name),
            None => event,
        });
    }

    /// A client that came was not let in.
    pub(super) fn note_refused_entry(&self, client: Transport, peer: &Peer, why: &str) {
        let event = Event::new("connect", Outcome::Refused, client.who(peer));
        self.state.events.note(event.what(client.which()).why(why));
    }
}

fn about(connection: &Connection, kind: &str, outcome: Outcome) -> Event {
    let client = connection.client;
    Event::new(kind, outcome, client.who(connection.peer())).what(client.which())
}

/// Note that connections cannot be accepted on `address`, or can again.
pub fn note_accepting(events: &Recorder, address: &str, result: Result<(), &io::Error>) {
    let event = match result {
        Ok(()) => Event::new("accept", Outcome::Done, "node").why("connections are accepted again"),
        Err(error) => Event::new("accept", Outcome::Failed, "node").why(format!(
            "no connection can be accepted: {error}{}",
            advice(error)
        )),
    };
    events.note(event.what(address));
}

/// What to do about it.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            ": raise the limit of open files of the daemon (LimitNOFILE= of a systemd service), or lower \
             nbd_connections_max"
        }
        Some(libc::ENFILE) => ": raise fs.file-max of the system",
        _ => "",
    }
}

/// The error of a number.
pub(super) fn error_of(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

/// Why a connection ends whose volume is closed.
pub(super) const CLOSED: Ending = Ending::Ended("its volume was closed");
