//! The pair that another node has made to this one, whose copies follow it.
//!
//! A copy says what it has done by log and epoch; [`super::questions`] finds the requests that this answers. What is durable
//! it may say before a stream is open, or before the span has come of which it says so (it had that from an earlier pair):
//! so the last word is kept, and said again as the stream comes up to it. A cut takes it back.

use std::collections::BTreeMap;

use hdcs_core::base::buf::Buf;
use hdcs_core::replication::Member;
use hdcs_core::replication::message::Message;
use hdcs_core::wire::replication::{
    About, Answer, CLOSE_FENCED, CLOSE_NO_LOG, LogName, MessageError, Question, answer, read_open,
    read_request, span_of,
};
use hdcs_core::wire::{AppendMarks, Purpose};
use hdcs_messenger::event::{Request, Span};
use hdcs_messenger::streams::Progress;

use super::questions::{Pending, Questions};
use super::{Event, LinkEvent, Links, Received, Role, unexpected};
use crate::cluster::names::Named;

/// A log that comes from the leader.
#[derive(Clone, Copy, Debug)]
struct Stream {
    number: u32,
    epoch: u64,
    /// Where the last span that came ends.
    next: u64,
    /// What of it was said to be durable; at first, where it begins: the window counts from there.
    durable: u64,
}

/// What a copy has said is durable.
#[derive(Clone, Copy, Debug)]
struct Told {
    epoch: u64,
    durable: u64,
    tail: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Following {
    spans: Option<u32>,
    bulk: Option<u32>,
    questions: Questions,
    streams: BTreeMap<LogName, Stream>,
    /// By their numbers.
    logs: BTreeMap<u32, LogName>,
    told: BTreeMap<LogName, Told>,
}

impl Following {
    /// Whether a connection of it is there.
    pub fn is_there(&self) -> bool {
        self.spans.is_some()
    }

    fn is_paired(&self) -> bool {
        self.spans.is_some() && self.bulk.is_some()
    }

    fn slot(&self, purpose: Purpose) -> Option<u32> {
        match purpose {
            Purpose::Bulk => self.bulk,
            Purpose::Spans | Purpose::Requests => self.spans,
        }
    }

    /// Forget the stream of a log in epochs up to this one; its number.
    fn close(&mut self, log: LogName, epoch_max: u64) -> Option<u32> {
        self.streams
            .get(&log)
            .filter(|stream| stream.epoch <= epoch_max)?;
        let number = self.streams.remove(&log)?.number;
        self.logs.remove(&number);
        Some(number)
    }

    /// Keep what a copy has said, of the highest epoch.
    fn tell(&mut self, about: About, durable: u64, tail: u64) {
        let epoch = about.epoch;
        let told = self.told.entry(about.log).or_insert(Told {
            epoch,
            durable,
            tail,
        });
        if told.epoch < epoch {
            *told = Told {
                epoch,
                durable,
                tail,
            };
        } else if told.epoch == epoch {
            told.durable = told.durable.max(durable);
            told.tail = told.tail.max(tail);
        }
    }

    /// What the stream of a log has to be told: its number, and what is durable of what came.
    fn news(&mut self, log: LogName) -> Option<(u32, Progress)> {
        let told = self.told.get(&log);
        let stream = self.streams.get_mut(&log)?;
        let told = told.filter(|told| told.epoch == stream.epoch)?;
        let durable = told.durable.min(stream.next);
        stream.durable = stream.durable.max(durable);
        let progress = Progress {
            durable,
            tail: told.tail,
            limit: stream.durable,
        };
        Some((stream.number, progress))
    }
}

impl Links {
    /// A copy of this node says this to the leader that asked in this epoch. It is the answer to every request that it
    /// belongs to; if there is none, or no pair any more, nobody waits for it. `data` goes with LogData.
    pub fn answer(&mut self, to: Member, about: About, said: &Message, data: &[Buf]) {
        if let Message::Nothing(question) = said {
            return self.nothing(to, about, *question);
        }
        let Some(peer) = self.peers.get_mut(&to) else {
            return;
        };
        let following = &mut peer.following;
        let (answered, ended) = following.questions.answer(about, said);
        match said {
            Message::Ack { durable } => return self.ack(to, about, *durable, 0),
            Message::HasCut(cut) => {
                if let Some(told) = following.told.get_mut(&about.log) {
                    told.durable = told.durable.min(cut.at.position);
                }
            }
            Message::Fenced { .. } => {
                let closed = following.close(about.log, about.epoch);
                self.close_stream(to, closed, CLOSE_FENCED);
            }
            _ => {}
        }
        let reply = Answer::Message(said.clone());
        self.reply(to, answered, &reply, data);
        self.reply(to, ended, &Answer::Nothing, &[]);
    }

    /// A request of this kind does not apply any more, or what it asks for is not there.
    fn nothing(&mut self, to: Member, about: About, question: Question) {
        if let Some(peer) = self.peers.get_mut(&to) {
            let pending = peer.following.questions.give_up(about, question);
            self.reply(to, pending, &Answer::Nothing, &[]);
        }
    }

    /// This node has no such log: so it says to everything that this leader has asked about it.
    pub fn no_log(&mut self, to: Member, log: LogName) {
        let Some(peer) = self.peers.get_mut(&to) else {
            return;
        };
        let following = &mut peer.following;
        let pending = following.questions.give_up_log(log);
        following.told.remove(&log);
        let closed = following.close(log, u64::MAX);
        self.close_stream(to, closed, CLOSE_NO_LOG);
        self.reply(to, pending, &Answer::NoLog, &[]);
    }

    /// What is durable of a copy, and its durable tail, for the leader that it follows in this epoch.
    pub fn ack(&mut self, to: Member, about: About, durable: u64, tail: u64) {
        if let Some(peer) = self.peers.get_mut(&to) {
            peer.following.tell(about, durable, tail);
            self.tell_stream(to, about.log);
        }
    }

    /// Tell the stream of a log what it has not been told.
    fn tell_stream(&mut self, to: Member, log: LogName) {
        let count = self.incoming_streams();
        let window = self.window;
        if let Some(peer) = self.peers.get_mut(&to)
            && let Some((number, progress)) = peer.following.news(log)
            && let Some(connection) = {
                let slot = peer.following.spans;
                self.connection(slot)
            }
        {
            let limit = window.limit(progress.limit, count);
            // One that has ended takes nothing any more.
            let _ = connection.ack(number, Progress { limit, ..progress });
        }
    }

    fn incoming_streams(&self) -> usize {
        let followings = self.peers.values().map(|peer| &peer.following);
        followings.map(|following| following.streams.len()).sum()
    }

    fn close_stream(&mut self, to: Member, number: Option<u32>, code: u16) {
        let slot = self.peers.get(&to).and_then(|peer| peer.following.spans);
        if let Some(number) = number
            && let Some(connection) = self.connection(slot)
        {
            // One that has ended has no streams any more.
            let _ = connection.close_stream(number, code);
        }
    }

    fn reply(&mut self, to: Member, pending: Vec<Pending>, said: &Answer, data: &[Buf]) {
        for one in pending {
            let (code, meta) = answer(one.about, said).expect("it is an answer");
            let peer = self.peers.get(&to);
            let slot = peer.and_then(|peer| peer.following.slot(one.purpose));
            let Some(connection) = self.connection(slot) else {
                continue;
            };
            if connection.answer(one.request, code, &meta, data).is_err() {
                // It has ended, or whoever asked has made too little room for the data.
                let (code, meta) = answer(one.about, &Answer::Nothing).expect("it is an answer");
                let _ = connection.answer(one.request, code, &meta, &[]);
            }
        }
    }

    /// A connection of another node is open: it is one of its pair.
    pub(super) fn admitted(&mut self, member: Member, purpose: Purpose, slot: u32) {
        if purpose == Purpose::Spans {
            // The first of a new pair. Nothing of the one before is handed in any more.
            self.end_following(member, false);
        }
        let Some(peer) = self.peers.get_mut(&member) else {
            return;
        };
        let following = &mut peer.following;
        match purpose {
            Purpose::Spans => following.spans = Some(slot),
            Purpose::Bulk if following.spans.is_some() && following.bulk.is_none() => {
                following.bulk = Some(slot);
                self.events.push_back(Event::PeerConnected(member));
            }
            Purpose::Bulk | Purpose::Requests => {
                let what = "a connection that belongs to no pair";
                if let Some(left_out) = peer.faults.pass() {
                    tracing::warn!(member = %Named(member), left_out, "the node has made {what}");
                }
                if let Some(wire) = self.wires.get_mut(slot) {
                    wire.role = Role::Gone(member);
                    let error = MessageError::Unexpected(what);
                    wire.socket.connection.object(error);
                }
            }
        }
    }

    /// Something has happened on a connection of this leader's pair.
    pub(super) fn followed(
        &mut self,
        member: Member,
        purpose: Purpose,
        event: LinkEvent,
    ) -> Result<(), MessageError> {
        let Some(peer) = self.peers.get_mut(&member) else {
            return Ok(());
        };
        let following = &mut peer.following;
        let is_paired = following.is_paired();
        match event {
            LinkEvent::StreamAsked { .. } | LinkEvent::Asking(_) if !is_paired => {
                unexpected("a message before the pair is whole")
            }
            LinkEvent::StreamAsked {
                stream,
                epoch,
                position,
                meta,
            } => {
                let log = read_open(epoch, &meta)?;
                if following.streams.contains_key(&log) {
                    return unexpected("a second stream for a log");
                }
                following.logs.insert(stream, log);
                let opened = Stream {
                    number: stream,
                    epoch,
                    next: position,
                    durable: position,
                };
                following.streams.insert(log, opened);
                // To accept it is to tell it something.
                following.tell(About { log, epoch }, 0, 0);
                self.tell_stream(member, log);
                Ok(())
            }
            LinkEvent::Span(span) => self.span(member, span),
            LinkEvent::StreamClosed { stream, .. } => {
                if let Some(log) = following.logs.get(&stream).copied() {
                    following.close(log, u64::MAX);
                }
                Ok(())
            }
            LinkEvent::Asking(request) => self.asking(member, purpose, request),
            LinkEvent::Asked { .. }
            | LinkEvent::Opened { .. }
            | LinkEvent::Acked { .. }
            | LinkEvent::StreamLate { .. }
            | LinkEvent::Answered(_)
            | LinkEvent::TimedOut { .. }
            | LinkEvent::Disconnected { .. }
            | LinkEvent::Echo { .. }
            | LinkEvent::Room
            | LinkEvent::Ended(_) => Ok(()),
        }
    }

    /// A span has come.
    fn span(&mut self, from: Member, came: Span) -> Result<(), MessageError> {
        let Some(peer) = self.peers.get_mut(&from) else {
            return Ok(());
        };
        let following = &mut peer.following;
        let Some(&log) = following.logs.get(&came.stream) else {
            return Ok(());
        };
        let bytes = came.parts.iter().map(|part| part.len()).sum();
        let marks = AppendMarks::from(came.marks);
        let span = span_of(came.follows, came.position, bytes, &marks)?;
        let mut is_known = false;
        if let Some(stream) = following.streams.get_mut(&log) {
            stream.next = span.end.position;
            let told = following.told.get(&log);
            is_known = told.is_some_and(|told| told.durable > stream.durable);
        }
        let epoch = came.epoch;
        self.events.push_back(Event::Received(Received {
            from,
            about: About { log, epoch },
            message: Message::Append(span),
            committed: came.marks.committed,
            data: came.parts,
        }));
        if is_known {
            self.tell_stream(from, log);
        }
        Ok(())
    }

    /// A request has come.
    fn asking(
        &mut self,
        from: Member,
        purpose: Purpose,
        request: Request,
    ) -> Result<(), MessageError> {
        let (about, message) = read_request(request.code, &request.meta)?;
        let bytes: usize = request.payload.iter().map(|part| part.len()).sum();
        if bytes > 0 {
            return Err(MessageError::Payload(bytes));
        }
        let is_bulk = matches!(message, Message::ReadLog { .. });
        if is_bulk != (purpose == Purpose::Bulk) {
            return unexpected("a request on a connection that does not carry it");
        }
        let pending = Pending {
            about,
            message: message.clone(),
            request: request.number,
            purpose,
        };
        if let Some(peer) = self.peers.get_mut(&from) {
            let ended = peer.following.questions.ask(pending);
            self.reply(from, ended, &Answer::Nothing, &[]);
        }
        self.events.push_back(Event::Received(Received {
            from,
            about,
            message,
            committed: 0,
            data: Vec::new(),
        }));
        Ok(())
    }

    /// The pair of this leader is over.
    pub(super) fn end_following(&mut self, member: Member, in_order: bool) {
        let Some(peer) = self.peers.get_mut(&member) else {
            return;
        };
        let following = std::mem::take(&mut peer.following);
        let is_paired = following.is_paired();
        for slot in [following.spans, following.bulk].into_iter().flatten() {
            self.close(slot, in_order);
        }
        if is_paired {
            self.events.push_back(Event::PeerDisconnected(member));
        }
    }
}
