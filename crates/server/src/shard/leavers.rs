//! Clients that have gone while requests of theirs are under way.
//!
//! Their requests end in their volume, without anybody to be told. Until then they count against what the clients of that
//! volume may hold, but they have neither a socket nor a place on a listener: a volume that hangs does not keep the
//! clients of others out, however often its own come and go. No more of their requests are kept than a volume takes at
//! once: those that wait for it are taken back.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use hdcs_frontend::{Held, VolumeNumber};

use super::turn::Shard;

/// Who is at the other end of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Somebody.
    Here,
    /// Somebody who sends nothing any more, or nobody: over TCP both look the same until something is sent.
    Silent,
    /// Nobody.
    Gone,
}

impl Presence {
    /// At the other end of a socket. It costs a system call that does not wait.
    pub fn of(socket: &OwnedFd) -> Self {
        let mut poll = libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one entry, which outlives the call.
        let found = unsafe { libc::poll(&raw mut poll, 1, 0) };
        if found < 0 {
            // Only for want of memory, or a signal: it is looked again.
            tracing::debug!(error = %io::Error::last_os_error(), "cannot poll a socket");
            return Self::Here;
        }
        if poll.revents & (libc::POLLHUP | libc::POLLERR) != 0 {
            Self::Gone
        } else if poll.revents & libc::POLLRDHUP != 0 {
            Self::Silent
        } else {
            Self::Here
        }
    }
}

/// What is left of a connection: see the module. The slot of the connection, which its requests name, stays empty
/// until they have ended.
#[derive(Debug)]
pub struct Leaver {
    volume: Option<VolumeNumber>,
    requests: usize,
    held: Held,
}

impl Shard {
    /// Break off connections whose clients have gone while their requests hang.
    pub(super) fn look_for_leavers(&mut self) {
        for slot in 0..self.connections.end() {
            let Some(connection) = self.connections.get_mut(slot) else {
                continue;
            };
            if connection.has_departed(self.state.now, &self.config.connections) {
                self.note_visit(slot);
                self.list(slot);
            }
        }
    }

    /// Let go of a connection of which nothing is left but requests that have not ended.
    pub(super) fn part_from(&mut self, slot: u32) {
        let Some(mut connection) = self.connections.vacate(slot) else {
            return;
        };
        let (volume, requests) = (connection.volume(), connection.requests);
        let data_bytes = connection.held().data_bytes;
        self.state
            .count(volume, &mut connection.counted, Held::default());
        let mut held = Held::default();
        let data = Held {
            data_bytes,
            heap_bytes: 0,
        };
        self.state.count(volume, &mut held, data);
        let leaver = Leaver {
            volume,
            requests,
            held,
        };
        self.leavers.insert(slot, leaver);
    }

    /// A request has ended whose client has gone.
    pub(super) fn request_of_leaver_ended(&mut self, slot: u32) {
        let Some(leaver) = self.leavers.get_mut(&slot) else {
            return;
        };
        leaver.requests -= 1;
        if leaver.requests > 0 {
            return;
        }
        if let Some(Leaver {
            volume, mut held, ..
        }) = self.leavers.remove(&slot)
        {
            self.state.count(volume, &mut held, Held::default());
            self.connections.release(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn presence_of_a_local_client_ends_with_its_socket() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ours = OwnedFd::from(ours);
        assert_eq!(Presence::of(&ours), Presence::Here);
        theirs.write_all(b"unread").unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        assert_eq!(Presence::of(&ours), Presence::Silent);
        drop(theirs);
        assert_eq!(Presence::of(&ours), Presence::Gone);
    }

    #[test]
    fn presence_of_a_client_over_tcp_is_doubted_once_it_sends_nothing_any_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        let ours = OwnedFd::from(ours);
        assert_eq!(Presence::of(&ours), Presence::Here);
        drop(theirs);
        while Presence::of(&ours) == Presence::Here {
            std::thread::yield_now();
        }
        assert_ne!(Presence::of(&ours), Presence::Here);
    }
}
