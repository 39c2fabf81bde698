//! The pair that this node has made to a member of groups that it leads.
//!
//! ```text
//! away ── due ─► spans ── open ─► bulk ── open ─► connected
//!   ▲             └────────────────┴──────────────────┘
//!   └──── pause ◄──────────── either ends ────────────
//! ```
//!
//! A stream is opened by the first span of a log in an epoch, and anew when a span does not follow on the one before: the
//! member was brought to another place of the log in between. Until it is accepted, and where the member has no room, spans
//! are not taken ([`NotSent::Full`]); nothing is queued beside what the messenger queues.

use std::collections::BTreeMap;

use hdcs_core::base::buf::Buf;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::WIRE_SPAN_BYTES_MAX;
use hdcs_core::replication::message::Message;
use hdcs_core::replication::{Member, SpanId};
use hdcs_core::wire::Purpose;
use hdcs_core::wire::replication::{
    About, Answer, CLOSE_FENCED, CLOSE_NO_LOG, LogName, MessageError, Question, check_span, fits,
    marks_of, open, read_answer, request,
};
use hdcs_messenger::connection::Connection;
use hdcs_messenger::error::SendError;
use hdcs_messenger::event::{self, Ask};
use hdcs_messenger::streams::{Marks, Progress};

use super::following::Following;
use super::questions::answers;
use super::{Event, LinkEvent, Links, NotSent, Received, unexpected};

/// One connection of the pair.
#[derive(Clone, Copy, Debug)]
struct Half {
    slot: u32,
    is_open: bool,
}

/// A log on its way to the member.
#[derive(Clone, Copy, Debug)]
struct Stream {
    number: u32,
    epoch: u64,
    /// Where the last span that was sent ends.
    next: u64,
    /// What the member has said is durable.
    durable: u64,
}

/// A request that is not answered.
#[derive(Debug)]
struct Asked {
    about: About,
    question: Question,
    message: Message,
    /// Another request has taken its place.
    is_over: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Leading {
    is_wanted: bool,
    /// When it is made, if it is wanted.
    attempt_at: Nanos,
    spans: Option<Half>,
    bulk: Option<Half>,
    /// Since when both connections have been open.
    connected_at: Option<Nanos>,
    streams: BTreeMap<LogName, Stream>,
    /// By their numbers.
    logs: BTreeMap<u32, LogName>,
    asked: BTreeMap<(Purpose, u64), Asked>,
}

impl Leading {
    /// The connection that is to be made now.
    pub fn due(&self, now: Nanos) -> Option<Purpose> {
        let is_due = self.attempt_at()? <= now;
        let purpose = match self.spans {
            None => Purpose::Spans,
            Some(_) => Purpose::Bulk,
        };
        is_due.then_some(purpose)
    }

    /// When a connection is to be made, if one is.
    pub fn attempt_at(&self) -> Option<Nanos> {
        match (self.spans, self.bulk) {
            (None, _) => self.is_wanted.then_some(self.attempt_at),
            (Some(spans), None) if spans.is_open => Some(Nanos(0)),
            _ => None,
        }
    }

    /// A connection is being made.
    pub fn begun(&mut self, purpose: Purpose, slot: u32) {
        let is_open = false;
        *self.half(purpose) = Some(Half { slot, is_open });
    }

    /// Whether the pair is made.
    pub fn is_connected(&self) -> bool {
        self.connected_at.is_some()
    }

    fn half(&mut self, purpose: Purpose) -> &mut Option<Half> {
        match purpose {
            Purpose::Bulk => &mut self.bulk,
            Purpose::Spans | Purpose::Requests => &mut self.spans,
        }
    }

    /// The connection for this purpose, once both are open.
    fn slot(&self, purpose: Purpose) -> Option<u32> {
        self.connected_at?;
        let half = match purpose {
            Purpose::Bulk => self.bulk,
            Purpose::Spans | Purpose::Requests => self.spans,
        };
        Some(half?.slot)
    }

    /// The stream that a span of this log and epoch, which follows on `start`, goes over.
    fn stream(
        &mut self,
        connection: &mut Connection,
        about: About,
        start: u64,
        deadline: Nanos,
    ) -> Result<u32, SendError> {
        if let Some(stream) = self.streams.get(&about.log) {
            if stream.epoch == about.epoch && stream.next == start {
                return Ok(stream.number);
            }
            let number = stream.number;
            self.streams.remove(&about.log);
            self.logs.remove(&number);
            connection.close_own_stream(number, 0)?;
        }
        let number = connection.open_stream(about.epoch, start, &open(about), deadline)?;
        let stream = Stream {
            number,
            epoch: about.epoch,
            next: start,
            durable: 0,
        };
        self.streams.insert(about.log, stream);
        self.logs.insert(number, about.log);
        Ok(number)
    }

    /// The stream of this number is no more.
    fn closed(&mut self, number: u32) -> Option<About> {
        let log = self.logs.remove(&number)?;
        let epoch = self.streams.remove(&log)?.epoch;
        Some(About { log, epoch })
    }

    /// The member has said how far it is; what is durable, if that is news.
    fn acked(&mut self, number: u32, progress: Progress) -> Option<(About, u64)> {
        let log = *self.logs.get(&number)?;
        let stream = self.streams.get_mut(&log)?;
        let epoch = stream.epoch;
        let is_news = progress.durable > stream.durable;
        stream.durable = stream.durable.max(progress.durable);
        is_news.then_some((About { log, epoch }, progress.durable))
    }
}

impl Links {
    /// Keep a pair to this member, from now on and until [`Self::unwant`].
    pub fn want(&mut self, member: Member) {
        if let Some(peer) = self.peers.get_mut(&member)
            && !peer.leading.is_wanted
        {
            peer.leading.is_wanted = true;
            peer.leading.attempt_at = self.now;
        }
    }

    /// Keep none any more. [`Event::Disconnected`] follows if there is one.
    pub fn unwant(&mut self, member: Member) {
        if let Some(peer) = self.peers.get_mut(&member) {
            peer.leading.is_wanted = false;
            self.end_leading(member, true);
        }
    }

    /// Send a span to a member, and up to where the log is committed, which does not go back in an epoch. Its data is held
    /// until it was sent; nothing is copied.
    pub fn append(
        &mut self,
        to: Member,
        about: About,
        span: &SpanId,
        committed: u64,
        data: &[Buf],
    ) -> Result<(), NotSent> {
        let data_bytes = data.iter().map(|part| part.len()).sum();
        let checked = check_span(span, data_bytes);
        assert_eq!(checked, Ok(()), "a span is sent as it is");
        let deadline = self.now.plus(self.times.answer_max);
        let peer = self.peers.get_mut(&to).ok_or(NotSent::Disconnected)?;
        let leading = &mut peer.leading;
        let slot = leading.slot(Purpose::Spans).ok_or(NotSent::Disconnected)?;
        let wire = self.wires.get_mut(slot).ok_or(NotSent::Disconnected)?;
        let connection = &mut wire.socket.connection;
        let start = span.start.position;
        let number = leading.stream(connection, about, start, deadline)?;
        let marks = Marks::from(&marks_of(span, committed));
        let position = span.end.position - u64::from(span.blocks);
        connection.append(number, position, marks, data)?;
        if let Some(stream) = leading.streams.get_mut(&about.log) {
            stream.next = span.end.position;
        }
        Ok(())
    }

    /// Ask a member something: `message` is one of the requests.
    pub fn ask(&mut self, to: Member, about: About, message: &Message) -> Result<(), NotSent> {
        let question = Question::of(message).expect("it asks something");
        let (code, meta) = request(about, message).expect("it asks something");
        let (purpose, room_bytes) = match question {
            Question::ReadLog => (Purpose::Bulk, WIRE_SPAN_BYTES_MAX),
            _ => (Purpose::Spans, 0),
        };
        let patience = match question {
            Question::Promise | Question::JoinAt | Question::Verify | Question::Superblock => {
                self.times.slow_answer_max
            }
            _ => self.times.answer_max,
        };
        let deadline = self.now.plus(patience);
        let peer = self.peers.get_mut(&to).ok_or(NotSent::Disconnected)?;
        let slot = peer.leading.slot(purpose).ok_or(NotSent::Disconnected)?;
        let wire = self.wires.get_mut(slot).ok_or(NotSent::Disconnected)?;
        let number = wire.socket.connection.request(Ask {
            code,
            urgent: false,
            meta: &meta,
            payload: &[],
            into: None,
            room_bytes,
            deadline,
        });
        let number = number.map_err(|not_asked| NotSent::from(not_asked.error))?;
        for earlier in peer.leading.asked.values_mut() {
            let is_before = earlier.about.epoch < about.epoch
                || earlier.about == about && earlier.question.gives_way_to(question);
            earlier.is_over |= earlier.about.log == about.log && is_before;
        }
        let message = message.clone();
        let asked = Asked {
            about,
            question,
            message,
            is_over: false,
        };
        peer.leading.asked.insert((purpose, number), asked);
        Ok(())
    }

    /// Something has happened on a connection of the pair to this member.
    pub(super) fn led(
        &mut self,
        member: Member,
        purpose: Purpose,
        event: LinkEvent,
    ) -> Result<(), MessageError> {
        if let LinkEvent::Opened { peer: found, .. } = &event {
            let is_open = |half: Half| half.is_open;
            let pair = self.peers.get(&member).map(|peer| &peer.leading);
            let follows = self.peers.get(&member).map(|peer| &peer.following);
            let has_others = pair.is_some_and(|pair| pair.spans.is_some_and(is_open))
                || follows.is_some_and(Following::is_there);
            if has_others && self.other_run(member, found).is_some() {
                return unexpected(
                    "a second run of the node, while the first one lives: a data directory or a machine was copied",
                );
            }
        }
        let Some(peer) = self.peers.get_mut(&member) else {
            return Ok(());
        };
        let leading = &mut peer.leading;
        match event {
            LinkEvent::Opened { peer: found, .. } => {
                if let Some(half) = leading.half(purpose) {
                    half.is_open = true;
                }
                if leading.bulk.is_some_and(|bulk| bulk.is_open) {
                    leading.connected_at = Some(self.now);
                    self.events.push_back(Event::Connected(member));
                }
                self.note_run(member, &found);
            }
            LinkEvent::Acked { stream, progress } => {
                if let Some((about, durable)) = leading.acked(stream, progress) {
                    self.say(member, about, Message::Ack { durable });
                }
            }
            LinkEvent::StreamClosed { stream, code, .. } => {
                if let Some(about) = leading.closed(stream) {
                    return self.stream_refused(member, about, code);
                }
            }
            LinkEvent::StreamLate { .. } => self.give_up(member, "the opening of a stream"),
            LinkEvent::Answered(answer) => {
                if let Some(asked) = leading.asked.remove(&(purpose, answer.number)) {
                    return self.answered(member, &asked, answer);
                }
            }
            LinkEvent::TimedOut { number, .. } => {
                let asked = leading.asked.remove(&(purpose, number));
                let what = asked.map_or("a request", |asked| asked.question.name());
                self.give_up(member, what);
            }
            LinkEvent::Room => self.events.push_back(Event::Room(member)),
            LinkEvent::StreamAsked { .. } | LinkEvent::Span(_) | LinkEvent::Asking(_) => {
                return unexpected("a request or a stream of the node that was connected to");
            }
            LinkEvent::Disconnected { .. }
            | LinkEvent::Echo { .. }
            | LinkEvent::Asked { .. }
            | LinkEvent::Ended(_) => {}
        }
        Ok(())
    }

    fn say(&mut self, from: Member, about: About, message: Message) {
        self.events.push_back(Event::Received(Received {
            from,
            about,
            message,
            committed: 0,
            data: Vec::new(),
        }));
    }

    /// The member has closed a stream.
    fn stream_refused(
        &mut self,
        from: Member,
        about: About,
        code: u16,
    ) -> Result<(), MessageError> {
        match code {
            CLOSE_NO_LOG => self.events.push_back(Event::NoLog { from, about }),
            CLOSE_FENCED => {
                // By an epoch that is higher than the stream's, which is all that a Close can say.
                let promised = about.epoch.saturating_add(1);
                self.say(from, about, Message::Fenced { promised });
            }
            _ => return unexpected("a stream is closed for a reason that is not known"),
        }
        Ok(())
    }

    fn answered(
        &mut self,
        from: Member,
        asked: &Asked,
        answer: event::Answer,
    ) -> Result<(), MessageError> {
        let (question, code) = (asked.question, answer.code);
        if !fits(question, code) {
            return Err(MessageError::Answer { question, code });
        }
        let (found, said) = read_answer(code, &answer.meta)?;
        let about = asked.about;
        if found != about {
            let expected = about;
            return Err(MessageError::About { found, expected });
        }
        match &said {
            Answer::Message(Message::LogData(span)) => check_span(span, answer.payload_bytes)?,
            _ if answer.payload_bytes > 0 => {
                return Err(MessageError::Payload(answer.payload_bytes));
            }
            _ => {}
        }
        let message = match said {
            Answer::NoLog => {
                self.events.push_back(Event::NoLog { from, about });
                return Ok(());
            }
            Answer::Nothing if asked.is_over => return Ok(()),
            Answer::Nothing => Message::Nothing(question),
            Answer::Message(message) => message,
        };
        let fits_all = matches!(message, Message::Fenced { .. } | Message::Nothing(_));
        if !fits_all && !answers(&message, &asked.message) {
            return unexpected("an answer does not repeat what was asked");
        }
        self.events.push_back(Event::Received(Received {
            from,
            about,
            message,
            committed: 0,
            data: answer.payload,
        }));
        Ok(())
    }

    /// The pair to this member is over.
    pub(super) fn end_leading(&mut self, member: Member, in_order: bool) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(&member) else {
            return;
        };
        let Leading {
            is_wanted,
            spans,
            bulk,
            connected_at,
            ..
        } = std::mem::take(&mut peer.leading);
        let pause = peer.pauses.next(connected_at.map(|since| now.since(since)));
        peer.leading.is_wanted = is_wanted;
        peer.leading.attempt_at = now.plus(pause);
        for half in [spans, bulk].into_iter().flatten() {
            self.close(half.slot, in_order);
        }
        if connected_at.is_some() {
            self.events.push_back(Event::Disconnected(member));
        }
    }
}

impl From<SendError> for NotSent {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Full | SendError::Streams(_) => Self::Full,
            SendError::NotOpen | SendError::Ended => Self::Disconnected,
            SendError::Purpose { .. }
            | SendError::Stream(_)
            | SendError::Position { .. }
            | SendError::TooLarge { .. }
            | SendError::NotBlocks(_)
            | SendError::Unasked(_) => unreachable!("{error}"),
        }
    }
}
