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
//! 6. What follows the option that opens an export is taken only where the volume is served ([`Host::serves`]): until
//!    then it stays in the inbox, with which the session may travel.
//! 7. A client learns of no export, and opens none, that its certificate may not open ([`crate::access`]).
//!
//! Whatever a client sends ends at worst its own connection.

mod contexts;
mod handshake;
mod output;
pub mod protocol;
pub mod tls;
mod transmission;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use hdcs_core::base::error::RequestError;
use hdcs_core::base::inbox::Inbox;
use hdcs_core::base::io::{Reply, RequestId};
use rustls::ServerConfig;

use self::handshake::{Handshake, Security};
use self::output::Output;
use self::tls::Tls;
use self::transmission::{BEHIND_BYTES, Transmission};
use super::{Chunk, Ending, Export, Held, Host, Owed, Receive, Session};
use crate::access::{Identity, Peer};

/// The request size that clients are told to prefer: the block of the log and the caches.
const PREFERRED_BYTES: usize = hdcs_core::base::limits::BLOCK_BYTES;
/// Inbox during the handshake: one option of the longest kind.
const HANDSHAKE_INBOX_BYTES: usize = handshake::OPTION_BYTES_MAX + protocol::OPTION_HEADER_BYTES;
/// Inbox during transmission, once a receive has filled that of the handshake and if there is memory:
/// one receive brings some thirty writes of 4 KiB.
const TRANSMISSION_INBOX_BYTES: usize = 128 << 10;

/// What a listener allows.
#[derive(Clone, Debug, Default)]
pub struct NbdConfig {
    /// How to speak TLS, if at all; see [`tls::load`].
    pub tls: Option<Arc<ServerConfig>>,
    /// Whether a client must start TLS before it learns anything.
    pub require_tls: bool,
    /// Who the client is as long as it has shown no certificate.
    pub peer: Peer,
    /// From where it comes, if that is known.
    pub address: Option<SocketAddr>,
}

/// A client whose TLS handshake is over, on its way to where it is served.
#[derive(Debug)]
pub struct Admitted {
    handshake: Handshake,
    tls: tls::Parts,
    peer: Peer,
}

impl Admitted {
    /// Who it is.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }
}

/// One NBD connection.
#[derive(Debug)]
pub struct NbdSession {
    config: NbdConfig,
    stage: Stage,
    inbox: Inbox,
    output: Output,
    tls: Option<Box<Tls>>,
    peer: Peer,
    reach: Reach,
    /// Whether the place of the receive under way is a payload's buffer.
    direct: bool,
    /// Nothing is taken any more, and why.
    ending: Option<Ending>,
    /// Close after what was received is answered.
    stopping: bool,
}

#[derive(Debug)]
enum Stage {
    Handshake(Handshake),
    Transmission(Box<Transmission>),
}

/// How far a session goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// To the end of the TLS handshake; see [`NbdSession::for_handshake`].
    TlsHandshake,
    /// To the end of the connection.
    Everything,
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
        Self::at(handshake, output, config)
    }

    fn at(handshake: Handshake, output: Output, config: NbdConfig) -> Self {
        Self {
            peer: config.peer.clone(),
            config,
            stage: Stage::Handshake(handshake),
            inbox: Inbox::new(HANDSHAKE_INBOX_BYTES),
            output,
            tls: None,
            reach: Reach::Everything,
            direct: false,
            ending: None,
            stopping: false,
        }
    }

    /// A session that greets its client and goes as far as the end of the TLS handshake, which costs
    /// milliseconds of a processor: for a thread that can spare them. [`Self::into_admitted`] follows
    /// when it waits with nothing to send.
    pub fn for_handshake(config: NbdConfig) -> Self {
        assert!(config.tls.is_some() && config.require_tls);
        Self {
            reach: Reach::TlsHandshake,
            ..Self::new(config)
        }
    }

    /// Whether the client has started TLS.
    pub fn has_started_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// The client, if its TLS handshake is over and what there was to say is sent.
    pub fn into_admitted(mut self) -> Option<Admitted> {
        if self.ending.is_some() || !self.output().is_empty() {
            return None;
        }
        let (tls, Stage::Handshake(handshake)) = (self.tls?, self.stage) else {
            return None;
        };
        (!tls.is_handshaking()).then(|| Admitted {
            handshake,
            tls: tls.into_parts(),
            peer: self.peer,
        })
    }

    /// Go on with a client.
    pub fn admitted(admitted: Admitted) -> Self {
        let config = NbdConfig {
            require_tls: true,
            peer: admitted.peer,
            ..NbdConfig::default()
        };
        let mut this = Self::at(admitted.handshake, Output::default(), config);
        this.tls = Some(Box::new(Tls::from_parts(admitted.tls)));
        this
    }

    /// Take nothing any more. The first reason is the one that counts.
    fn end(&mut self, why: Ending) {
        self.ending.get_or_insert(why);
    }

    /// TLS is over: broken by the client, or closed.
    fn end_tls(&mut self) {
        let why = self.tls.as_deref().and_then(Tls::why_broken);
        self.end(match why {
            Some(why) => Ending::Violation(format!("TLS: {why}").into()),
            None => Ending::Gone,
        });
    }

    /// Take what the inbox holds.
    fn advance(&mut self, host: &mut dyn Host) -> Intake {
        while self.ending.is_none() {
            match &mut self.stage {
                Stage::Handshake(handshake) => {
                    let security = Security {
                        offered: self.config.tls.is_some(),
                        required: self.config.require_tls,
                        started: self.tls.is_some(),
                    };
                    let output = &mut self.output;
                    match handshake.advance(&mut self.inbox, security, host, &self.peer, output) {
                        handshake::Step::More => return Intake::Open,
                        handshake::Step::Blocked => return Intake::Blocked,
                        handshake::Step::Close(why) => self.end(why),
                        handshake::Step::StartTls => {
                            handshake.forget();
                            self.start_tls();
                            return Intake::Open;
                        }
                        handshake::Step::Transmit(agreement) => {
                            let number = agreement.export.number;
                            let transmission = Transmission::new(agreement);
                            self.stage = Stage::Transmission(Box::new(transmission));
                            if !host.serves(number) {
                                return Intake::Blocked;
                            }
                        }
                    }
                }
                Stage::Transmission(transmission) => {
                    match transmission.advance(&mut self.inbox, host, &mut self.output) {
                        transmission::Step::More => return Intake::Open,
                        transmission::Step::Blocked => return Intake::Blocked,
                        transmission::Step::Close(why) => self.end(why),
                    }
                }
            }
        }
        Intake::Closed
    }

    /// Make the inbox larger if it was too small for what came, and there is memory.
    fn grow(&mut self, host: &dyn Host) {
        if !self.inbox.was_full()
            || self.inbox.capacity() >= TRANSMISSION_INBOX_BYTES
            || !matches!(self.stage, Stage::Transmission(_))
        {
            return;
        }
        let more = TRANSMISSION_INBOX_BYTES - self.inbox.capacity();
        if self.held().heap_bytes + more <= host.allowance().held.heap_bytes {
            self.inbox.grow(TRANSMISSION_INBOX_BYTES);
        }
    }

    /// The reply to STARTTLS was the last byte in the clear. A client awaits it, so bytes that are
    /// here already were put there by somebody who wants them taken for the client's.
    fn start_tls(&mut self) {
        let config = self.config.tls.clone().expect("offered, or not agreed to");
        let clear = std::mem::take(&mut self.output.chunks);
        match Tls::new(config, clear) {
            Ok(tls) if self.inbox.unread().is_empty() => self.tls = Some(Box::new(tls)),
            Ok(_) => {
                let what = "bytes in the clear follow the request to start TLS";
                self.end(Ending::Violation(what.into()));
            }
            Err(error) => self.end(Ending::Failed(error.to_string())),
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
            if matches!(self.stage, Stage::Handshake(_)) {
                match secure(tls, &mut self.peer, self.config.address) {
                    Ok(true) if self.reach == Reach::TlsHandshake => return Intake::Blocked,
                    Ok(true) => {}
                    Ok(false) => return Intake::Open,
                    Err(tls::Broken) => {
                        self.end_tls();
                        continue;
                    }
                }
            }
            let (place, direct) = match place(&mut self.stage, &mut self.inbox) {
                Place::Inbox(room) => (room, false),
                Place::Payload(rest, _) => (rest, true),
            };
            match tls.read(place) {
                Ok(0) => return Intake::Open,
                Ok(bytes) => placed(&mut self.stage, &mut self.inbox, direct, bytes),
                Err(tls::Broken) => self.end_tls(),
            }
        }
    }
}

/// Go on with the TLS handshake, if it is not over: whether it is, and who the client has shown to be.
fn secure(
    tls: &mut Tls,
    peer: &mut Peer,
    address: Option<SocketAddr>,
) -> Result<bool, tls::Broken> {
    if !tls.is_handshaking() {
        return Ok(true);
    }
    let is_over = tls.shake()?;
    if is_over && let Some(chain) = tls.peer_certificates() {
        *peer = Peer::Named(Arc::new(Identity::new(chain, address)));
    }
    Ok(is_over)
}

/// Where plain bytes go.
enum Place<'a> {
    Inbox(&'a mut [u8]),
    /// To the rest of a payload's buffer, and what follows it to the inbox.
    Payload(&'a mut [u8], &'a mut [u8]),
}

fn place<'a>(stage: &'a mut Stage, inbox: &'a mut Inbox) -> Place<'a> {
    let Stage::Transmission(transmission) = stage else {
        return Place::Inbox(inbox.room());
    };
    let most = transmission.inbox_bytes_max(inbox.unread().len());
    if let Some(rest) = transmission.direct() {
        assert!(inbox.unread().is_empty(), "the payload's buffer has it");
        let room = inbox.room();
        let bytes = room.len().min(BEHIND_BYTES);
        return Place::Payload(rest, &mut room[..bytes]);
    }
    let room = inbox.room();
    let bytes = most.map_or(room.len(), |most| most.min(room.len()));
    Place::Inbox(&mut room[..bytes])
}

/// So many plain bytes came there; whether that was a payload's buffer.
fn placed(stage: &mut Stage, inbox: &mut Inbox, direct: bool, bytes: usize) {
    match stage {
        Stage::Transmission(transmission) if direct => {
            let behind = transmission.direct_received(bytes);
            inbox.received(behind);
        }
        _ => inbox.received(bytes),
    }
}

impl Session for NbdSession {
    fn receive(&mut self, host: &mut dyn Host) -> Receive<'_> {
        let mut intake = self.advance_tls(host);
        if self.stopping {
            self.end(Ending::NodeStops);
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
                self.grow(host);
                if let Some(tls) = &mut self.tls {
                    return Receive::Into(tls.room());
                }
                match place(&mut self.stage, &mut self.inbox) {
                    Place::Inbox(room) => {
                        self.direct = false;
                        Receive::Into(room)
                    }
                    Place::Payload(rest, behind) => {
                        self.direct = true;
                        Receive::IntoBoth(rest, behind)
                    }
                }
            }
        }
    }

    fn received(&mut self, bytes: usize, host: &mut dyn Host) {
        if bytes == 0 {
            return self.end(Ending::Gone);
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

    fn held(&self) -> Held {
        let mut held = self.output.held();
        held.heap_bytes += size_of::<Self>() + self.inbox.capacity();
        held.heap_bytes += self.output.spare_bytes();
        held.heap_bytes += self.tls.as_ref().map_or(0, |tls| tls.held_bytes());
        if let Stage::Transmission(transmission) = &self.stage {
            held += transmission.held();
        }
        held
    }

    fn in_flight(&self) -> usize {
        match &self.stage {
            Stage::Handshake(_) => 0,
            Stage::Transmission(transmission) => transmission.in_flight(),
        }
    }

    fn owed(&self) -> Owed {
        match &self.stage {
            Stage::Handshake(handshake) if handshake.waits() => Owed::Nothing,
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

    fn opened(&self) -> Option<&Export> {
        match &self.stage {
            Stage::Handshake(_) => None,
            Stage::Transmission(transmission) => Some(transmission.export()),
        }
    }

    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }
}
