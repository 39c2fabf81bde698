//! What the node keeps of clients' comings and goings: which export a client opened, which it was refused, and why its
//! connection ended; see [`crate::events`]. Noting it never waits.

use std::io;

use hdcs_api::events::{Event, Outcome};
use hdcs_device::Errno;
use hdcs_frontend::Ending;
use hdcs_frontend::access::{Allow, Peer};

use super::command::Transport;
use super::connection::Connection;
use super::state::ShardState;
use super::turn::Shard;
use crate::events::{Recorder, outcome_of};

impl ShardState {
    /// A client asked for an export that it does not get. Whoever may know why is told by the handshake; whoever operates
    /// the node is told here.
    pub fn note_refused(&self, name: &str, client: Transport, peer: &Peer) {
        let may_know = |allow: &Allow| allow.lets_in(peer);
        let open = self.volumes.iter().find(|(_, one)| one.name == name);
        let why = match (open, self.explained.get(name)) {
            (Some((_, served)), _) if !may_know(&served.allow) => not_allowed(name),
            (None, Some(unopened)) if !may_know(&unopened.allow) => not_allowed(name),
            (None, Some(unopened)) => format!("the volume is not open: {}", unopened.why),
            (Some(_), _) => "the volume is not open yet".to_owned(),
            (None, None) => "there is no such export".to_owned(),
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
        if connection.opened.is_none()
            && let Some(number) = connection.volume()
        {
            let served = self.state.numbers.get(&number);
            let served = served.and_then(|&slot| self.state.volumes.get(slot));
            let name = served.map_or_else(String::new, |served| served.name.clone());
            let event = about(connection, "connect", Outcome::Done).of(&name);
            self.state.events.note(event);
            connection.opened = Some(name);
        }
        let Some(why) = connection.end() else {
            return;
        };
        let opened = connection.opened.clone();
        let event = about(connection, "disconnect", outcome_of(&why)).why(why.to_string());
        self.state.events.note(match opened {
            Some(name) => event.of(name),
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
