//! Clients that come from elsewhere, and those that lose their right to be here.

use hdcs_frontend::access::Allow;
use hdcs_frontend::{Ending, VolumeNumber};

use super::command::Adopted;
use super::connection::Connection;
use super::control::NOT_OPEN;
use super::turn::Shard;

/// Why a client is not let in, or ended.
pub(super) const REVOKED: &str = "its certificate is not good any more";
pub(super) const NOT_ALLOWED: &str = "it may not open the volume any more";
pub(super) const NO_MEMORY: &str =
    "no memory is left for connections: raise memory_max_mib if they are needed";

impl Shard {
    /// Take a client that was accepted elsewhere.
    pub(super) fn adopt(&mut self, adopted: Adopted) {
        if adopted.visit.is_some() {
            return self.arrive(adopted);
        }
        if self.stopping.is_some() {
            return;
        }
        // What was revoked on its way here is not let in.
        let peer = adopted.session.peer();
        if peer.is_revoked() {
            return self.note_refused_entry(adopted.client, peer, REVOKED);
        }
        if !self.state.shares.has_room_for_connection(false) {
            self.note_refused_entry(adopted.client, peer, NO_MEMORY);
            return self.refuse_connection();
        }
        self.insert(Connection::unpack(adopted));
    }

    /// Change which clients may open a volume.
    pub(super) fn set_allow(&mut self, number: VolumeNumber, allow: Allow) -> Result<(), String> {
        let slot = self.state.open_slot(number)?;
        let served = self.state.volumes.get_mut(slot).ok_or(NOT_OPEN)?;
        served.allow = allow.clone();
        self.state.directory.set_allow(number, &allow);
        self.end_connections(NOT_ALLOWED, |connection| {
            connection.volume() == Some(number) && !allow.lets_in(connection.peer())
        });
        Ok(())
    }

    /// Break off the connections of clients that have lost their right to them.
    pub(super) fn end_connections(
        &mut self,
        why: &'static str,
        is_meant: impl Fn(&Connection) -> bool,
    ) {
        for slot in 0..self.connections.end() {
            let Some(connection) = self.connections.get_mut(slot) else {
                continue;
            };
            if is_meant(connection) {
                tracing::info!("ended the connection of {}: {why}", connection.peer());
                connection.abort(Ending::Ended(why));
                self.list(slot);
            }
        }
    }
}
