//! The NBD server side of one connection, without I/O.
//!
//! ```text
//!  socket ──▶ inbox ──▶ Handshake ── Agreement ──▶ Transmission ──▶ Host (requests)
//!    ▲  ▲       ▲                                       │
//!    │  └─ Tls ─┘ (after STARTTLS)                      │
//!    └────────────────── output ◀───────────────────────┘ (completions)
//! ```
//!
//! Fixed newstyle; structured replies; `base:allocation` and `hdcs:cache` ([`protocol::cache`]);
//! every command of the specification but `RESIZE`, and no extended headers.
//!
//! Invariants:
//! 1. Memory is bounded: an inbox of fixed size, and requests in flight as [`transmission`] says.
//! 2. [`Receive::Close`] is answered only when nothing is in flight.
//! 3. Bytes in the place that [`Session::receive`] named move only when the next bytes came.
//! 4. A client that sends the head of a write and no data holds no buffer for it.
//! 5. Bytes that came in the clear are never taken for bytes that came through TLS.
//!
//! Whatever a client sends ends at worst its own connection.

mod contexts;
mod handshake;
mod inbox;
mod output;
pub mod protocol;
pub mod tls;
mod transmission;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::error::RequestError;
use hdcs_core::io::{Reply, RequestId};
use rustls::ServerConfig;

use self::handshake::{Handshake, Security};
use self::inbox::Inbox;
use self::output::Output;
use self::tls::Tls;
use self::transmission::Transmission;
use super::{Chunk, Host, Owed, Receive, Session, VolumeNumber};

/// The request size that clients are told to prefer: the block of the log and the caches.
const PREFERRED_BYTES: usize = hdcs_core::limits::BLOCK_BYTES;
/// Inbox during the handshake: one option of the longest kind.
const HANDSHAKE_INBOX_BYTES: usize = handshake::OPTION_BYTES_MAX + protocol::OPTION_HEADER_BYTES;
/// Inbox during transmission: one receive brings some thirty writes of 4 KiB, and a connection
/// costs little memory.
const TRANSMISSION_INBOX_BYTES: usize = 128 << 10;

/// What a listener allows.
#[derive(Clone, Debug, Default)]
pub struct NbdConfig {
    /// How to speak TLS, if at all; see [`tls::load`].
    pub tls: Option<Arc<ServerConfig>>,
    /// Whether a client must start TLS before it learns anything.
    pub require_tls: bool,
}

/// One NBD connection.
#[derive(Debug)]
pub struct NbdSession {
    config: NbdConfig,
    stage: Stage,
    inbox: Inbox,
    output: Output,
    tls: Option<Box<Tls>>,
    /// Whether the place of the receive under way is a payload's buffer.
    direct: bool,
    /// Nothing is taken any more.
    closing: bool,
    /// Close after what was received is answered.
    stopping: bool,
}

#[derive(Debug)]
enum Stage {
    Handshake(Handshake),
    Transmission(Box<Transmission>),
}

/// Whether more bytes can be taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Intake {
    Open,
    Blocked,
    Closed,
}

impl NbdSession {
    /// A session that greets its client.
    pub fn new(config: NbdConfig) -> Self {
        let mut output = Output::default();
        let handshake = Handshake::new(&mut output);
        Self {
            config,
            stage: Stage::Handshake(handshake),
            inbox: Inbox::new(HANDSHAKE_INBOX_BYTES),
            output,
            tls: None,
            direct: false,
            closing: false,
            stopping: false,
        }
    }

    /// Take what the inbox holds.
    fn advance(&mut self, host: &mut dyn Host) -> Intake {
        while !self.closing {
            match &mut self.stage {
                Stage::Handshake(handshake) => {
                    let security = Security {
                        offered: self.config.tls.is_some(),
                        required: self.config.require_tls,
                        started: self.tls.is_some(),
                    };
                    let output = &mut self.output;
                    match handshake.advance(&mut self.inbox, security, host, output) {
                        handshake::Step::More => return Intake::Open,
                        handshake::Step::Blocked => return Intake::Blocked,
                        handshake::Step::Close => self.closing = true,
                        handshake::Step::StartTls => {
                            handshake.forget();
                            self.start_tls();
                            return Intake::Open;
                        }
                        handshake::Step::Transmit(agreement) => {
                            self.inbox.grow(TRANSMISSION_INBOX_BYTES);
                            let transmission = Transmission::new(agreement);
                            self.stage = Stage::Transmission(Box::new(transmission));
                        }
                    }
                }
                Stage::Transmission(transmission) => {
                    match transmission.advance(&mut self.inbox, host, &mut self.output) {
                        transmission::Step::More => return Intake::Open,
                        transmission::Step::Blocked => return Intake::Blocked,
                        transmission::Step::Close => self.closing = true,
                    }
                }
            }
        }
        Intake::Closed
    }

    /// The reply to STARTTLS was the last byte in the clear. A client awaits it, so bytes that are
    /// here already were put there by somebody who wants them taken for the client's.
    fn start_tls(&mut self) {
        let config = self.config.tls.clone().expect("offered, or not agreed to");
        let clear = std::mem::take(&mut self.output.chunks);
        match Tls::new(config, clear) {
            Ok(tls) if self.inbox.unread().is_empty() => self.tls = Some(Box::new(tls)),
            _ => self.closing = true,
        }
    }

    /// Decrypt and take what can be taken.
    fn advance_tls(&mut self, host: &mut dyn Host) -> Intake {
        loop {
            let intake = self.advance(host);
            if intake != Intake::Open {
                return intake;
            }
            let Some(tls) = &mut self.tls else {
                return intake;
            };
            let (place, direct) = place(&mut self.stage, &mut self.inbox);
            match tls.read(place) {
                Ok(0) => return Intake::Open,
                Ok(bytes) => placed(&mut self.stage, &mut self.inbox, direct, bytes),
                Err(tls::Broken) => self.closing = true,
            }
        }
    }
}

/// Where plain bytes go, and whether that is a payload's buffer.
fn place<'a>(stage: &'a mut Stage, inbox: &'a mut Inbox) -> (&'a mut [u8], bool) {
    let Stage::Transmission(transmission) = stage else {
        return (inbox.room(), false);
    };
    let wanted = transmission.wanted();
    if let Some(rest) = transmission.direct() {
        return (rest, true);
    }
    let unread = inbox.unread().len();
    let room = inbox.room();
    let most = wanted.map_or(room.len(), |wanted| wanted.saturating_sub(unread).max(1));
    let bytes = most.min(room.len());
    (&mut room[..bytes], false)
}

/// So many plain bytes came there.
fn placed(stage: &mut Stage, inbox: &mut Inbox, direct: bool, bytes: usize) {
    match stage {
        Stage::Transmission(transmission) if direct => transmission.direct_received(bytes),
        _ => inbox.received(bytes),
    }
}

impl Session for NbdSession {
    fn receive(&mut self, host: &mut dyn Host) -> Receive<'_> {
        let mut intake = self.advance_tls(host);
        if self.stopping {
            self.closing = true;
            intake = Intake::Closed;
        }
        match intake {
            Intake::Closed if self.in_flight() == 0 => {
                if let Some(tls) = &mut self.tls {
                    tls.close();
                }
                Receive::Close
            }
            Intake::Closed | Intake::Blocked => Receive::Wait,
            Intake::Open => {
                if let Some(tls) = &mut self.tls {
                    return Receive::Into(tls.room());
                }
                let (place, direct) = place(&mut self.stage, &mut self.inbox);
                self.direct = direct;
                Receive::Into(place)
            }
        }
    }

    fn received(&mut self, bytes: usize, host: &mut dyn Host) {
        if bytes == 0 {
            self.closing = true;
            return;
        }
        match &mut self.tls {
            Some(tls) => tls.received(bytes),
            None => placed(&mut self.stage, &mut self.inbox, self.direct, bytes),
        }
        self.advance_tls(host);
    }

    fn completed(&mut self, id: RequestId, result: Result<Reply, RequestError>) {
        let Stage::Transmission(transmission) = &mut self.stage else {
            unreachable!("the handshake submits nothing");
        };
        transmission.completed(id, result, &mut self.output);
    }

    fn output(&mut self) -> &mut VecDeque<Chunk> {
        match &mut self.tls {
            Some(tls) => tls.output(&mut self.output.chunks),
            None => &mut self.output.chunks,
        }
    }

    fn in_flight(&self) -> usize {
        match &self.stage {
            Stage::Handshake(_) => 0,
            Stage::Transmission(transmission) => transmission.in_flight(),
        }
    }

    fn owed(&self) -> Owed {
        match &self.stage {
            Stage::Handshake(_) => Owed::Handshake,
            Stage::Transmission(transmission) => transmission.owed(),
        }
    }

    fn shut_down(&mut self) {
        self.stopping = true;
        if let Stage::Transmission(transmission) = &mut self.stage {
            transmission.stop();
        }
    }

    fn volume(&self) -> Option<VolumeNumber> {
        match &self.stage {
            Stage::Handshake(_) => None,
            Stage::Transmission(transmission) => Some(transmission.export().number),
        }
    }
}
