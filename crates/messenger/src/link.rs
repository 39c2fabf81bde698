//! One connection to another node: handshake, frames in both directions, pings, and its end.
//!
//! ```text
//! connects: Greeting ── Welcome ─────────────────────────► Open ──┐
//! accepts:  Awaiting ── Hello ─► Asked ── admit (Welcome) ► Open ─┤ Bye, error, the end of the connection, shut_down
//!              │                   └───── admit (Refuse) ─┐       ▼
//!              └──────────────────────────────────────────┴──► ended, perhaps taking leave
//! ```
//!
//! A driver asks where to receive ([`Link::receive`]), says what came ([`Link::received`]), sends what is to be sent
//! ([`Link::output`]), says what time it is ([`Link::tick`]) at [`Link::next_deadline`], and takes events
//! ([`Link::event`]). Nothing here blocks, and nothing is called back.
//!
//! Invariants:
//! 1. Every request that was taken ends with exactly one of [`Event::Answered`], [`Event::TimedOut`] and
//!    [`Event::Disconnected`]; what was whole before the end comes before [`Event::Ended`], which is the last event.
//! 2. Memory is bounded, whatever the peer does ([`LinkConfig::data_bytes_max`]): one frame that comes in; requests and answers
//!    by credit; spans and data of own requests by `queue_bytes_max`; fronts by the size of an inbox. The node bounds spans that come in by the
//!    limits that it says.
//! 3. Nothing is received while events wait, or while [`QUEUE_FRAMES_MAX`] frames wait to be sent. An honest peer never
//!    brings it to that.
//! 4. Frames are numbered when they are put behind those that the driver takes, at most [`STAGE_BYTES_MAX`] ahead; so a ping or
//!    an urgent request never waits for more than that and one frame.
//! 5. Nothing that a peer sends panics. Its mistake ends its link, with a Bye that says what kind of mistake it was.
//! 6. What ended a link is told once, with the place.
//!
//! Pings: each `ping_interval` one is sent, with this side's time, and the event of its echo says that time: what the other
//! side has echoed it had received after it was sent. Which clock that is does not matter to the messenger. A ping that is
//! not echoed in `ping_max` ends the link, unless this side itself takes nothing in.

mod take;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{
    WIRE_BULK_BYTES_MAX, WIRE_CREDIT_BYTES_MIN, WIRE_META_BYTES_MAX, WIRE_PARTS_MAX,
    WIRE_QUEUE_BYTES_MIN, WIRE_REQUESTS_MAX, WIRE_SPAN_BYTES_MAX, WIRE_STREAMS_MAX,
};
use hdcs_core::wire::replication::MessageError;
use hdcs_core::wire::{AppendMarks, FRAME_URGENT, Kind, Purpose};

use crate::error::{Blame, Ended, Place, Refused, SendError, Side, Violation, Why};
use crate::event::{Ask, Event, NotAsked};
use crate::frame::{Frame, Head};
use crate::handshake::{self, Greeted, Identity, Known, Own};
use crate::intake::Intake;
use crate::outbox::{Outbox, STAGE_BYTES_MAX};
use crate::requests::{Answering, Asking};
use crate::streams::{Marks, Progress, Receiving, Sending, close_head};
use crate::transport::{Chunk, Receive};

/// Frames that wait to be sent, at which nothing is received: more than an honest peer can bring about with all its
/// requests and streams.
pub const QUEUE_FRAMES_MAX: usize = 2 * (WIRE_REQUESTS_MAX + WIRE_STREAMS_MAX);

/// What a link is to be like.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// How the other end is called, for errors.
    pub address: String,
    /// Who this is, what it speaks, and what the other side's requests may cost.
    pub own: Own,
    /// Bytes of spans and of requests' data that wait to be sent at most.
    pub queue_bytes_max: usize,
    /// How long a handshake may take.
    pub handshake_max: Nanos,
    /// A ping is sent so often.
    pub ping_interval: Nanos,
    /// How long its echo may take.
    pub ping_max: Nanos,
}

impl LinkConfig {
    /// What suits a local network.
    pub fn new(address: String, own: Own) -> Self {
        Self {
            address,
            own,
            queue_bytes_max: 2 * WIRE_QUEUE_BYTES_MIN,
            handshake_max: Nanos::from_millis(5000),
            ping_interval: Nanos::from_millis(500),
            ping_max: Nanos::from_millis(5000),
        }
    }

    /// Bytes of data that a link holds at most, in buffers as long as they are: a frame that comes in, requests of the peer and
    /// answers to them, spans and own requests to be sent, what is staged.
    pub fn data_bytes_max(&self) -> usize {
        let largest = WIRE_SPAN_BYTES_MAX.max(WIRE_BULK_BYTES_MAX);
        largest + self.own.credit_bytes as usize + self.queue_bytes_max + STAGE_BYTES_MAX + largest
    }
}

#[derive(Debug)]
enum Stage {
    /// Hello is sent; this is expected at the other end.
    Greeting(Known),
    /// Hello is awaited.
    Awaiting,
    /// It came; the node is to say whether its sender is admitted, with this version.
    Asked(Box<Greeted>, u16),
    Open,
}

/// See the module.
#[derive(Debug)]
pub struct Link {
    config: LinkConfig,
    pool: Arc<Pool>,
    place: Place,
    purpose: Option<Purpose>,
    /// The version that is spoken.
    version: Option<u16>,
    stage: Stage,
    is_connector: bool,
    ended: Option<Ended>,
    /// Up to when the other side is waited for to close, after it was told that nothing follows.
    leaving: Option<Nanos>,
    /// End in order once everything is sent.
    is_closing: bool,
    intake: Intake,
    outbox: Outbox,
    events: VecDeque<Event>,
    sending: Sending,
    receiving: Receiving,
    asking: Asking,
    answering: Answering,
    now: Nanos,
    handshake_deadline: Nanos,
    next_ping: Nanos,
    /// The time in the ping that is not echoed.
    ping: Option<Nanos>,
    ping_deadline: Nanos,
}

impl Link {
    /// A link that connects to `known` for a purpose. Its Hello is the first output.
    pub fn connect(
        config: LinkConfig,
        known: Known,
        purpose: Purpose,
        pool: Arc<Pool>,
        now: Nanos,
    ) -> Self {
        let hello = handshake::greet(&config.own, known.node, 0, purpose);
        let mut link = Self::new(config, Stage::Greeting(known), pool, now);
        link.purpose = Some(purpose);
        link.place.purpose = Some(purpose);
        link.is_connector = true;
        let frame = Frame::with(Head::new(Kind::Hello), &hello);
        link.outbox.stage(frame);
        link
    }

    /// A link to somebody who has connected: [`Event::Asked`] follows.
    pub fn accept(config: LinkConfig, pool: Arc<Pool>, now: Nanos) -> Self {
        Self::new(config, Stage::Awaiting, pool, now)
    }

    fn new(config: LinkConfig, stage: Stage, pool: Arc<Pool>, now: Nanos) -> Self {
        assert!(
            config.queue_bytes_max >= WIRE_QUEUE_BYTES_MIN,
            "room for one span"
        );
        let credit_bytes = config.own.credit_bytes;
        assert!(
            credit_bytes >= WIRE_CREDIT_BYTES_MIN,
            "room for one request"
        );
        Self {
            place: Place {
                address: config.address.clone(),
                node: None,
                purpose: None,
            },
            pool,
            purpose: None,
            version: None,
            stage,
            is_connector: false,
            ended: None,
            leaving: None,
            is_closing: false,
            intake: Intake::new(),
            outbox: Outbox::default(),
            events: VecDeque::new(),
            sending: Sending::default(),
            receiving: Receiving::default(),
            asking: Asking::default(),
            answering: Answering::new(credit_bytes),
            now,
            handshake_deadline: now.plus(config.handshake_max),
            next_ping: now,
            ping: None,
            ping_deadline: now,
            config,
        }
    }

    // What the driver does.

    /// Where the next bytes go. The place stays valid and unused until [`Self::received`].
    pub fn receive(&mut self) -> Receive<'_> {
        if self.ended.is_none() && self.intake.is_waiting() {
            self.advance();
        }
        if self.ended.is_some() {
            if self.leaving.is_none() {
                return Receive::Close;
            }
            self.intake.forget();
            return self.intake.receive();
        }
        if self.takes_nothing() || self.outbox.waiting() >= QUEUE_FRAMES_MAX {
            return Receive::Wait;
        }
        self.intake.receive()
    }

    /// Whether it is this side's fault that nothing is received.
    fn takes_nothing(&self) -> bool {
        !self.events.is_empty()
            || self.intake.is_waiting()
            || matches!(self.stage, Stage::Asked(..))
    }

    /// So many bytes came into the place that [`Self::receive`] named, or into the first of two and then the second; 0 is the
    /// peer's end.
    pub fn received(&mut self, bytes: usize, now: Nanos) {
        self.now = self.now.max(now);
        self.intake.landed(bytes);
        if self.ended.is_some() {
            self.intake.forget();
            if bytes == 0 {
                self.leaving = None;
            }
            return;
        }
        if bytes == 0 {
            return self.end(if self.intake.is_between() {
                Why::Closed
            } else {
                Why::Cut {
                    received: self.intake.begun_bytes(),
                }
            });
        }
        self.advance();
    }

    /// What is to be sent, in order; the driver takes chunks from the front, and then events, as there may be new ones.
    pub fn output(&mut self) -> &mut VecDeque<Chunk> {
        if self.ended.is_none() && matches!(self.stage, Stage::Open) {
            self.stage_frames();
        }
        &mut self.outbox.wire
    }

    /// The socket has failed.
    pub fn failed(&mut self, error: std::io::ErrorKind) {
        self.leaving = None;
        self.outbox.wire.clear();
        self.end(Why::Io(error));
    }

    /// TLS has failed, or somebody else above the socket.
    pub(crate) fn broke(&mut self, why: Why) {
        self.leaving = None;
        self.end(why);
    }

    /// The time at which [`Self::tick`] is to be called, if nothing else happens.
    pub fn next_deadline(&self) -> Option<Nanos> {
        if self.ended.is_some() {
            return self.leaving;
        }
        if !matches!(self.stage, Stage::Open) {
            return Some(self.handshake_deadline);
        }
        let ping = match self.ping {
            Some(_) => self.ping_deadline,
            None => self.next_ping,
        };
        let others = [self.asking.next_deadline(), self.sending.next_deadline()];
        others.into_iter().flatten().chain([ping]).min()
    }

    /// It is so late. The driver hands in what has come before it says so, lest a peer be given up for what lies in the socket.
    pub fn tick(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        let takes_nothing = self.takes_nothing();
        if self.ended.is_some() {
            self.leaving = self.leaving.filter(|until| self.now < *until);
            return;
        }
        if !matches!(self.stage, Stage::Open) {
            if self.now >= self.handshake_deadline {
                self.end(Why::HandshakeLate(self.config.handshake_max));
            }
            return;
        }
        while let Some((number, into)) = self.asking.time_out(self.now) {
            self.events.push_back(Event::TimedOut { number, into });
        }
        while let Some(stream) = self.sending.give_up(self.now) {
            self.give_up(stream);
            self.events.push_back(Event::StreamLate { stream });
        }
        match self.ping {
            None if self.now >= self.next_ping => {
                self.ping = Some(self.now);
                self.ping_deadline = self.now.plus(self.config.ping_max);
                self.outbox.ping = self.ping;
            }
            // Its echo may be among what is not taken in.
            Some(_) if self.now >= self.ping_deadline && takes_nothing => {
                self.ping_deadline = self.now.plus(self.config.ping_max);
            }
            Some(sent) if self.now >= self.ping_deadline => {
                self.end(Why::Silent {
                    waited: self.now.since(sent),
                    received: self.intake.begun_bytes(),
                });
            }
            _ => {}
        }
    }

    /// What has happened, in order.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    // What the node asks of it.

    /// The sender of the Hello that the node is asked about.
    pub fn asked(&self) -> Option<&Identity> {
        match &self.stage {
            Stage::Asked(greeted, _) => Some(&greeted.identity),
            _ => None,
        }
    }

    /// Whether the sender of the Hello in [`Event::Asked`] may go on: `known` is what is known of the node with its number.
    /// It is refused if that is nothing, or contradicts what it says.
    pub fn admit(&mut self, known: Option<&Known>) {
        let Stage::Asked(greeted, _) = &self.stage else {
            return;
        };
        match handshake::judge_known(greeted, known) {
            Err(refused) => self.refuse(refused),
            Ok(()) => self.welcome(),
        }
    }

    /// Refuse the sender of a Hello, or at any time before the handshake is over.
    pub fn refuse(&mut self, refused: Refused) {
        if self.ended.is_some() || matches!(self.stage, Stage::Open) {
            return;
        }
        let refusal = handshake::refusal(&self.config.own, &refused);
        let frame = Frame::with(Head::new(Kind::Refuse), &refusal);
        self.outbox.stage(frame);
        self.leave();
        self.end(Why::Refused {
            by: Side::This,
            refusal: refused,
        });
    }

    /// Open a stream from `position` on. [`Event::Acked`] says that the other side has accepted it; it is closed if that
    /// does not come before `deadline`.
    pub fn open_stream(
        &mut self,
        epoch: u64,
        position: u64,
        meta: &[u8],
        deadline: Nanos,
    ) -> Result<u32, SendError> {
        self.may_send(Kind::Open)?;
        check_bytes("meta", meta.len(), WIRE_META_BYTES_MAX)?;
        let head = self.sending.open(epoch, position, deadline)?;
        let stream = head.stream;
        self.outbox
            .push(Frame::new(head, meta.into(), Vec::new()), 0);
        Ok(stream)
    }

    /// Send a span that begins at `position`; its parts are whole blocks, and are held until they were sent. Nothing is
    /// copied, and nothing waits: if there is no room for it, [`Event::Room`] follows once there is, and the node reads
    /// the span again from its log if it has let go of it.
    pub fn append(
        &mut self,
        stream: u32,
        position: u64,
        marks: Marks,
        parts: &[Buf],
    ) -> Result<(), SendError> {
        self.may_send(Kind::Append)?;
        let bytes = bytes_of(parts);
        check_bytes("parts", parts.len(), WIRE_PARTS_MAX)?;
        check_bytes("span", bytes, WIRE_SPAN_BYTES_MAX)?;
        let head = self.sending.append(stream, position, bytes)?;
        if !self.outbox.has_room(bytes, self.config.queue_bytes_max) {
            return Err(SendError::Full);
        }
        self.sending.appended(&head, bytes);
        let frame = Frame::with(head, &AppendMarks::from(marks));
        self.outbox
            .push(Frame::new(frame.head, frame.meta, parts.to_vec()), 0);
        Ok(())
    }

    /// Say what of a stream of the other side is durable, and up to where it may go on; for the first time to accept it. What
    /// would take back what was said before stays as it was.
    pub fn ack(&mut self, stream: u32, progress: Progress) -> Result<(), SendError> {
        self.may_send(Kind::Ack)?;
        self.receiving.ack(stream, progress)
    }

    /// Close a stream that this side has opened. What of it waits is not sent.
    pub fn close_own_stream(&mut self, stream: u32, code: u16) -> Result<(), SendError> {
        self.may_send(Kind::Close)?;
        if !self.sending.close(stream) {
            return Err(SendError::Stream(stream));
        }
        self.outbox.forget_stream(stream);
        self.outbox
            .push(Frame::bare(close_head(stream, code, true)), 0);
        Ok(())
    }

    /// Close or refuse a stream that the other side has opened. Spans that still come are dropped.
    pub fn close_stream(&mut self, stream: u32, code: u16) -> Result<(), SendError> {
        self.may_send(Kind::Close)?;
        if !self.receiving.close(stream) {
            return Err(SendError::Stream(stream));
        }
        self.outbox
            .push(Frame::bare(close_head(stream, code, false)), 0);
        Ok(())
    }

    /// Ask something; the number by which it ends.
    pub fn request(&mut self, ask: Ask<'_>) -> Result<u64, NotAsked> {
        let Ask {
            code,
            urgent,
            meta,
            payload,
            into,
            room_bytes,
            deadline,
        } = ask;
        let room = into.as_ref().map_or(room_bytes, |into| into.len());
        if let Err(error) = self.check_request(meta, payload, room) {
            return Err(NotAsked { error, into });
        }
        let payload_bytes = bytes_of(payload);
        if payload_bytes > 0
            && !self
                .outbox
                .has_room(payload_bytes, self.config.queue_bytes_max)
        {
            let error = SendError::Full;
            return Err(NotAsked { error, into });
        }
        let head = Head {
            code,
            flags: if urgent { FRAME_URGENT } else { 0 },
            room_bytes: room as u32,
            ..Head::new(Kind::Request)
        };
        // Sizes, so that its cost is known before anything is held for it.
        let sized = Head {
            meta_bytes: meta.len() as u16,
            payload_bytes: payload_bytes as u32,
            ..head
        };
        match self.asking.ask(&sized, into, deadline) {
            Err((error, into)) => Err(NotAsked { error, into }),
            Ok(number) => {
                let head = Head { number, ..head };
                let frame = Frame::new(head, meta.into(), payload.to_vec());
                self.outbox.push(frame, 0);
                Ok(number)
            }
        }
    }

    fn check_request(&self, meta: &[u8], payload: &[Buf], room: usize) -> Result<(), SendError> {
        self.may_send(Kind::Request)?;
        let purpose = self.purpose.unwrap_or(Purpose::Requests);
        check_bytes("meta", meta.len(), WIRE_META_BYTES_MAX)?;
        check_bytes("parts", payload.len(), WIRE_PARTS_MAX)?;
        let max = Kind::Request.payload_bytes_max(purpose);
        check_bytes("payload", bytes_of(payload), max)?;
        check_bytes("room", room, Kind::Answer.payload_bytes_max(purpose))
    }

    /// Answer a request of the other side.
    pub fn answer(
        &mut self,
        number: u64,
        code: u16,
        meta: &[u8],
        payload: &[Buf],
    ) -> Result<(), SendError> {
        if self.ended.is_some() {
            return Err(SendError::Ended);
        }
        let open = self.answering.open(number)?;
        check_bytes("meta", meta.len(), WIRE_META_BYTES_MAX)?;
        check_bytes("parts", payload.len(), WIRE_PARTS_MAX)?;
        check_bytes("payload", bytes_of(payload), open.room as usize)?;
        self.answering.answered(number);
        let head = Head {
            code,
            number,
            ..Head::new(Kind::Answer)
        };
        let frame = Frame::new(head, meta.into(), payload.to_vec());
        self.outbox
            .push_answer(frame, open.cost(), open.is_urgent());
        Ok(())
    }

    /// What the peer has said is wrong by what its frames mean to the node: the link ends, as if by a wrong frame.
    pub fn object(&mut self, error: MessageError) {
        let why = Why::Violation {
            frame: self.intake.frame(),
            error: Violation::Message(error),
        };
        self.end(why);
    }

    /// Requests of the other side that are not answered may cost so much from here on.
    pub fn set_credit(&mut self, window_bytes: u64) {
        self.answering.set_window(window_bytes);
    }

    /// Send what waits, say that nothing follows, and end. Own requests that are not answered end at once, and those that were
    /// not sent are not; what the other side asks can be answered until everything is sent.
    pub fn shut_down(&mut self) {
        if self.ended.is_some() || self.is_closing {
            return;
        }
        if !matches!(self.stage, Stage::Open) {
            return self.end(Why::Finished);
        }
        self.is_closing = true;
        self.disconnect_requests();
    }

    /// Why it is over.
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// Whether the handshake is over, and the link not.
    pub fn is_open(&self) -> bool {
        self.ended.is_none() && matches!(self.stage, Stage::Open)
    }

    /// The version that is spoken.
    pub fn version(&self) -> Option<u16> {
        self.version
    }

    /// Answers and spans that came too late to mean anything, and were dropped.
    pub fn late(&self) -> u64 {
        self.asking.late() + self.receiving.late()
    }

    /// See [`LinkConfig::data_bytes_max`].
    pub fn data_bytes_max(&self) -> usize {
        self.config.data_bytes_max()
    }

    /// Requests in flight: of this side, of the other.
    pub fn requests(&self) -> (usize, usize) {
        (self.asking.in_flight(), self.answering.in_flight())
    }

    /// Bytes of data that it holds: what comes in, and what is to be sent. Data in events is the node's.
    pub fn held_bytes(&self) -> usize {
        self.intake.held_bytes() + self.outbox.held_bytes()
    }

    // What both do.

    fn may_send(&self, kind: Kind) -> Result<(), SendError> {
        if self.ended.is_some() || self.is_closing {
            return Err(SendError::Ended);
        }
        let (Stage::Open, Some(purpose)) = (&self.stage, self.purpose) else {
            return Err(SendError::NotOpen);
        };
        if !kind.is_for(purpose) {
            return Err(SendError::Purpose { kind, purpose });
        }
        Ok(())
    }

    // What goes.

    /// Put frames behind those that the driver takes.
    fn stage_frames(&mut self) {
        let mut staged_bytes = self.outbox.staged_bytes();
        while self.outbox.has_stage_room(staged_bytes) {
            let Some(frame) = self.next_frame() else {
                break;
            };
            staged_bytes += self.outbox.stage(frame);
        }
        if self.outbox.take_relief(self.config.queue_bytes_max) {
            self.events.push_back(Event::Room);
        }
        if self.is_closing && self.outbox.waiting() == 0 && self.outbox.has_stage_room(staged_bytes)
        {
            self.outbox.stage(Frame::bare(Head::new(Kind::Bye)));
            self.leave();
            self.end(Why::Finished);
        }
    }

    /// The next frame to be staged.
    fn next_frame(&mut self) -> Option<Frame> {
        if let Some(frame) = self.outbox.next_ping() {
            return Some(frame);
        }
        if let Some((head, marks)) = self.receiving.next_ack() {
            return Some(Frame::with(head, &marks));
        }
        if let Some(position) = self.answering.tell() {
            let head = Head {
                position,
                ..Head::new(Kind::Credit)
            };
            return Some(Frame::bare(head));
        }
        loop {
            let (mut frame, cost) = self.outbox.next()?;
            match frame.head.kind {
                Kind::Request if !self.asking.is_to_be_sent(frame.head.number) => continue,
                Kind::Answer => frame.head.position = self.answering.sends(cost),
                _ => {}
            }
            return Some(frame);
        }
    }

    /// A stream was not accepted in time: the other side is told, should it still look at it.
    fn give_up(&mut self, stream: u32) {
        self.outbox.forget_stream(stream);
        self.outbox
            .push(Frame::bare(close_head(stream, 0, true)), 0);
    }

    fn leave(&mut self) {
        self.leaving = Some(self.now.plus(self.config.ping_max));
    }

    fn disconnect_requests(&mut self) {
        for (number, into) in self.asking.disconnect() {
            self.events.push_back(Event::Disconnected { number, into });
        }
    }

    /// It is over. The first reason counts.
    fn end(&mut self, why: Why) {
        if self.ended.is_some() {
            return;
        }
        let blame = match &why {
            Why::Frame { .. } => Some(Blame::Frame),
            Why::Violation { .. } => Some(Blame::Violation),
            Why::Silent { .. } => Some(Blame::Silent),
            _ => None,
        };
        self.outbox.forget();
        // What is no HDCS node is told nothing.
        if let Some(blame) = blame
            && matches!(self.stage, Stage::Open)
        {
            let head = Head {
                code: blame.code(),
                ..Head::new(Kind::Bye)
            };
            self.outbox.stage(Frame::bare(head));
            self.leave();
        }
        self.disconnect_requests();
        self.answering.disconnect();
        self.sending = Sending::default();
        self.receiving = Receiving::default();
        let ended = Ended {
            place: self.place.clone(),
            why,
        };
        self.ended = Some(ended.clone());
        self.events.push_back(Event::Ended(ended));
    }
}

fn check_bytes(part: &'static str, bytes: usize, max: usize) -> Result<(), SendError> {
    if bytes > max {
        return Err(SendError::TooLarge { part, bytes, max });
    }
    Ok(())
}

fn bytes_of(parts: &[Buf]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}
