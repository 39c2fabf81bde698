//! The session against a client in memory: every byte goes through [`Session`], in pieces of any
//! size; requests complete late and out of order, from a printed seed.

mod handshake;
mod tls;
mod transmission;

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::error::RequestError;

use super::protocol::{
    GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, chunk, command, option, option_reply,
};
use super::{NbdConfig, NbdSession};
use crate::access::{Allow, Peer};
use crate::memory::{MemoryHost, MemoryVolume};
use crate::{Chunk, Export, Owed, Receive, Session, Unopened, VolumeNumber};

/// Size of the volume `disk`: not a multiple of the piece size, nor of 4096.
const DISK_BYTES: u64 = (40 << 20) + 512;

/// What a session may hold beyond its allowance besides data: itself, and the queue's own memory.
const REPLIES_SLACK_BYTES: usize = 512 << 10;

/// A session, its host, and what its client received.
struct Wire {
    session: NbdSession,
    host: MemoryHost,
    disk: Arc<MemoryVolume>,
    random: fastrand::Rng,
    /// Bytes given to the session at once at most.
    feed_bytes_max: usize,
    /// Results of the next requests that complete.
    failures: VecDeque<RequestError>,
    /// Sent by the session, not yet looked at.
    inbound: VecDeque<u8>,
    /// Whether the session wants the connection closed.
    closed: bool,
    /// The most requests that were in flight.
    in_flight_max: usize,
}

impl Wire {
    fn new(config: NbdConfig, seed: u64) -> Self {
        println!("seed {seed}");
        let volume = |number, name: &str, bytes, read_only| {
            MemoryVolume::new(Export {
                opening: crate::OpeningId::default(),
                number: VolumeNumber(number),
                name: name.to_owned(),
                bytes,
                read_only,
                discards: true,
                allow: Allow::any(),
            })
        };
        let disk = volume(1, "disk", DISK_BYTES, false);
        let volumes = vec![Arc::clone(&disk), volume(2, "frozen", 1 << 20, true)];
        let mut wire = Self {
            session: NbdSession::new(config),
            host: MemoryHost::new(80 << 20, volumes),
            disk,
            random: fastrand::Rng::with_seed(seed),
            feed_bytes_max: usize::MAX,
            failures: VecDeque::new(),
            inbound: VecDeque::new(),
            closed: false,
            in_flight_max: 0,
        };
        wire.collect();
        wire
    }

    /// A client that has greeted the server.
    fn greeted(seed: u64) -> Self {
        let mut wire = Self::new(NbdConfig::default(), seed);
        wire.greet(0b11);
        wire
    }

    /// A client in the transmission phase of `disk`, with structured replies and all contexts.
    fn structured(seed: u64) -> Self {
        let mut wire = Self::greeted(seed);
        wire.send_option(option::STRUCTURED_REPLY, &[]);
        assert_eq!(wire.option_replies(option::STRUCTURED_REPLY), [ack()]);
        let queries = meta_query("disk", &["base:allocation", "hdcs:cache"]);
        wire.send_option(option::SET_META_CONTEXT, &queries);
        assert_eq!(wire.option_replies(option::SET_META_CONTEXT).len(), 3);
        wire.go("disk");
        wire
    }

    /// A client in the transmission phase with simple replies.
    fn simple(seed: u64, export: &str) -> Self {
        let mut wire = Self::greeted(seed);
        wire.go(export);
        wire
    }

    fn greet(&mut self, client_flags: u32) {
        assert_eq!(self.u64(), GREETING_MAGIC);
        assert_eq!(self.u64(), OPTION_MAGIC);
        assert_eq!(self.u16(), 0b11);
        self.send(&client_flags.to_be_bytes());
    }

    fn go(&mut self, export: &str) {
        self.send_option(option::GO, &info_query(export, &[]));
        assert_eq!(self.option_replies(option::GO).last(), Some(&ack()));
        assert!(self.session.opened().is_some());
    }

    /// Give bytes to the session as it wants them, completing requests when it waits.
    fn send(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() && !self.closed {
            match self.session.receive(&mut self.host) {
                Receive::Close => self.closed = true,
                Receive::Wait => {
                    let progress = self.complete_one() | self.collect();
                    assert!(progress, "the session waits for nothing");
                }
                Receive::Into(place) => {
                    let bytes = rest.len().min(place.len()).min(self.feed_bytes_max);
                    let bytes = self.random.usize(1..=bytes);
                    place[..bytes].copy_from_slice(&rest[..bytes]);
                    rest = &rest[bytes..];
                    self.session.received(bytes, &mut self.host);
                }
                Receive::IntoBoth(place, behind) => {
                    let bytes = rest.len().min(place.len() + behind.len());
                    let bytes = self.random.usize(1..=bytes.min(self.feed_bytes_max));
                    let (here, further) = rest[..bytes].split_at(bytes.min(place.len()));
                    place[..here.len()].copy_from_slice(here);
                    behind[..further.len()].copy_from_slice(further);
                    rest = &rest[bytes..];
                    self.session.received(bytes, &mut self.host);
                }
            }
            self.watch();
        }
    }

    /// Complete everything and take all output; notice whether the session closes.
    fn settle(&mut self) {
        loop {
            let receive = self.session.receive(&mut self.host);
            self.closed |= matches!(receive, Receive::Close);
            self.watch();
            if !(self.complete_one() | self.collect()) {
                return;
            }
        }
    }

    /// The client ends the connection.
    fn hang_up(&mut self) {
        assert!(matches!(
            self.session.receive(&mut self.host),
            Receive::Into(_)
        ));
        self.session.received(0, &mut self.host);
        self.settle();
        assert!(self.closed);
    }

    fn watch(&mut self) {
        assert_eq!(self.session.in_flight(), self.host.submitted.len());
        assert!(!self.closed || self.session.in_flight() == 0);
        self.in_flight_max = self.in_flight_max.max(self.session.in_flight());
        let (held, allowed) = (self.session.held(), self.host.allowance.held);
        assert!(held.data_bytes <= allowed.data_bytes, "{held:?}");
        assert!(
            held.heap_bytes <= allowed.heap_bytes + REPLIES_SLACK_BYTES,
            "{held:?}"
        );
    }

    /// Complete one request, whichever; whether there was one.
    fn complete_one(&mut self) -> bool {
        if self.host.submitted.is_empty() {
            return false;
        }
        let index = self.random.usize(..self.host.submitted.len());
        let (id, result) = self.host.perform(index);
        let result = self.failures.pop_front().map_or(result, Err);
        self.session.completed(id, result);
        true
    }

    /// Take what the session sends; whether there was anything.
    fn collect(&mut self) -> bool {
        let chunks = self.session.output();
        let any = !chunks.is_empty();
        for chunk in chunks.drain(..) {
            match chunk {
                Chunk::Bytes(bytes) => self.inbound.extend(bytes),
                Chunk::Data(data) => self.inbound.extend(&*data),
            }
        }
        any
    }

    fn send_option(&mut self, kind: u32, data: &[u8]) {
        self.send(&option_bytes(kind, data));
        self.settle();
    }

    /// The replies to one option, each with its type and data.
    fn option_replies(&mut self, kind: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        while !self.inbound.is_empty() {
            assert_eq!(self.u64(), OPTION_REPLY_MAGIC);
            assert_eq!(self.u32(), kind);
            let (reply, length) = (self.u32(), self.u32());
            replies.push((reply, self.take(length as usize)));
        }
        replies
    }

    /// The type of the only reply to an option.
    fn option_error(&mut self, kind: u32, data: &[u8]) -> u32 {
        self.send_option(kind, data);
        let replies = self.option_replies(kind);
        assert_eq!(replies.len(), 1, "one reply");
        assert!(!self.closed);
        replies[0].0
    }

    /// Send one request and all of its payload, complete it, and return its reply.
    fn request(&mut self, kind: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> Answer {
        self.send(&request_bytes(kind, flags, 77, offset, length));
        self.send(data);
        self.settle();
        let read_bytes = if kind == command::READ { length } else { 0 };
        let (cookie, answer) = self.answer(offset, read_bytes as usize);
        assert_eq!(cookie, 77);
        assert!(self.inbound.is_empty(), "one reply");
        answer
    }

    fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, u32> {
        self.request(command::READ, 0, offset, length, &[]).data()
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<Vec<u8>, u32> {
        let length = data.len() as u32;
        self.request(command::WRITE, 0, offset, length, data).data()
    }

    /// The next reply, simple or structured, to a request of which the client knows the range.
    fn answer(&mut self, offset: u64, read_bytes: usize) -> (u64, Answer) {
        let mut answer = Answer {
            data: vec![0; read_bytes],
            ..Answer::default()
        };
        let magic = self.u32();
        if magic == SIMPLE_REPLY_MAGIC {
            let (error, cookie) = (self.u32(), self.u64());
            if error == 0 {
                answer.data = self.take(read_bytes);
            } else {
                answer.errors.push((error, String::new(), None));
            }
            return (cookie, answer);
        }
        assert_eq!(magic, STRUCTURED_REPLY_MAGIC);
        let mut covered = 0;
        let mut cookie = None;
        loop {
            if answer.chunks > 0 {
                assert_eq!(self.u32(), STRUCTURED_REPLY_MAGIC);
            }
            answer.chunks += 1;
            let (flags, kind, this, length) = (self.u16(), self.u16(), self.u64(), self.u32());
            assert_eq!(*cookie.get_or_insert(this), this, "one reply at a time");
            match kind {
                chunk::OFFSET_DATA => {
                    let at = (self.u64() - offset) as usize;
                    let data = self.take(length as usize - 8);
                    answer.data[at..at + data.len()].copy_from_slice(&data);
                    covered += data.len();
                }
                chunk::BLOCK_STATUS => {
                    let context = self.u32();
                    let runs = (0..(length - 4) / 8).map(|_| (self.u32(), self.u32()));
                    answer.extents.push((context, runs.collect()));
                }
                chunk::ERROR | chunk::ERROR_OFFSET => {
                    let (error, bytes) = (self.u32(), self.u16());
                    let message = String::from_utf8(self.take(bytes.into())).unwrap();
                    let at = (kind == chunk::ERROR_OFFSET).then(|| self.u64());
                    let fixed = if at.is_some() { 14 } else { 6 };
                    assert_eq!(length, fixed + u32::from(bytes));
                    answer.errors.push((error, message, at));
                }
                other => panic!("chunk type {other}"),
            }
            if flags & chunk::FLAG_DONE != 0 {
                break;
            }
        }
        assert!(covered == read_bytes || !answer.errors.is_empty());
        (cookie.unwrap(), answer)
    }

    fn take(&mut self, bytes: usize) -> Vec<u8> {
        assert!(bytes <= self.inbound.len(), "the reply is whole");
        self.inbound.drain(..bytes).collect()
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().unwrap())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }
}

/// A reply as the client sees it.
#[derive(Debug, Default)]
struct Answer {
    data: Vec<u8>,
    extents: Vec<(u32, Vec<(u32, u32)>)>,
    errors: Vec<(u32, String, Option<u64>)>,
    /// Chunks of a structured reply; 0 for a simple one.
    chunks: usize,
}

impl Answer {
    fn data(self) -> Result<Vec<u8>, u32> {
        match self.errors.first() {
            Some((error, ..)) => Err(*error),
            None => Ok(self.data),
        }
    }

    fn error(&self) -> u32 {
        self.errors.first().map_or(0, |error| error.0)
    }
}

fn ack() -> (u32, Vec<u8>) {
    (option_reply::ACK, Vec::new())
}

fn option_bytes(kind: u32, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u32).to_be_bytes();
    [
        &OPTION_MAGIC.to_be_bytes(),
        &kind.to_be_bytes()[..],
        &length,
        data,
    ]
    .concat()
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

fn info_query(export: &str, kinds: &[u16]) -> Vec<u8> {
    let mut bytes = string(export);
    bytes.extend((kinds.len() as u16).to_be_bytes());
    bytes.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
    bytes
}

fn meta_query(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = string(export);
    bytes.extend((queries.len() as u32).to_be_bytes());
    bytes.extend(queries.iter().flat_map(|query| string(query)));
    bytes
}

fn request_bytes(kind: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    [
        &REQUEST_MAGIC.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &offset.to_be_bytes(),
        &length.to_be_bytes(),
    ]
    .concat()
}
