//! Bytes of another node against a link.
//!
//! The bytes are taken as frames, most of which get the checksum and the number that they need to be looked into; the others
//! are given as they are. Checked, besides that nothing panics: a link that is over says so once, at last; every request ends
//! once; what is held is bounded; when the link is gone, every buffer is back in its pool.
//!
//! What its frames say of replication is read as a node reads it: nothing of that panics, and what is read is written the
//! same ([`messages`], which has bytes of its own).

use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::Nanos;
use hdcs_core::format::block_checksum;
use hdcs_core::wire::replication::{
    About, LogName, answer, open, read_answer, read_open, read_request, request, span_of,
};
use hdcs_core::wire::{
    AppendMarks, FRAME_HEADER_BYTES, FRAME_MAGIC, Kind, PayloadChecksum, Purpose,
};
use hdcs_messenger::conformance::{ONE, TWO, config, known, own};
use hdcs_messenger::event::{Ask, Event};
use hdcs_messenger::frame::Frame;
use hdcs_messenger::handshake::greet;
use hdcs_messenger::link::Link;
use hdcs_messenger::streams::{Marks, Progress};
use hdcs_messenger::transport::Receive;

/// Small enough that spans of the larger kinds run out of buffers.
const POOL_BYTES: usize = 2 << 20;
/// What fits into one input.
const PAYLOAD_BYTES_MAX: u32 = 40 << 10;

/// The first 8 bytes choose the connection and what the node does; the rest is what the other side sends.
pub fn messenger(data: &[u8]) {
    let Some((seed, stream)) = data.split_first_chunk() else {
        return;
    };
    Run::new(u64::from_le_bytes(*seed)).all(stream);
}

struct Run {
    random: fastrand::Rng,
    link: Link,
    pool: Arc<Pool>,
    now: Nanos,
    /// Frames of the other side so far.
    sequence: u32,
    /// Requests that have not ended.
    asked: Vec<u64>,
    is_told: bool,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let pool = Pool::new(POOL_BYTES);
        let now = Nanos::from_millis(1);
        let purpose = Purpose::ALL[random.usize(..3)];
        let link = if random.bool() {
            Link::accept(config(TWO), Arc::clone(&pool), now)
        } else {
            Link::connect(config(TWO), known(ONE), purpose, Arc::clone(&pool), now)
        };
        let mut run = Self {
            random,
            link,
            pool,
            now,
            sequence: 0,
            asked: Vec::new(),
            is_told: false,
        };
        // Mostly the handshake is over before.
        if run.random.u8(..8) > 0 {
            let is_connector = !run.link.output().is_empty();
            let (version, kind) = if is_connector {
                (1, Kind::Welcome)
            } else {
                (0, Kind::Hello)
            };
            let greeting = greet(&own(ONE), TWO, version, purpose);
            let head = hdcs_messenger::frame::Head::new(kind);
            let front = Frame::with(head, &greeting).front(1, 0);
            run.give(&front);
            run.sequence = 1;
            run.node();
        }
        run
    }

    fn all(mut self, mut rest: &[u8]) {
        while !rest.is_empty() && self.link.ended().is_none() {
            let frame = self.frame(&mut rest);
            self.give(&frame);
            self.node();
            let (held, max) = (self.link.held_bytes(), self.link.data_bytes_max());
            assert!(held <= max, "{held} of {max}");
        }
        match self.random.u8(..3) {
            0 => self.link.failed(std::io::ErrorKind::ConnectionReset),
            1 => self.link.shut_down(),
            _ => {}
        }
        // The other side is silent from here on.
        for _ in 0..10 {
            self.link.output().clear();
            if let Some(deadline) = self.link.next_deadline() {
                self.now = self.now.max(deadline);
                self.link.tick(self.now);
            }
            self.node();
            if let Receive::Into(_) | Receive::IntoBoth(..) = self.link.receive() {
                self.link.received(0, self.now);
            }
            self.node();
        }
        assert!(
            self.link.ended().is_some() && self.is_told,
            "{:?}",
            self.link
        );
        assert!(self.asked.is_empty(), "a request never ends");
        drop(self.link);
        assert_eq!(
            self.pool.free_bytes(),
            self.pool.total_bytes(),
            "a buffer is lost"
        );
    }

    /// The next frame, put right as far as is drawn.
    fn frame(&mut self, rest: &mut &[u8]) -> Vec<u8> {
        let (header, behind) = rest.split_at(rest.len().min(FRAME_HEADER_BYTES));
        *rest = behind;
        let mut frame = header.to_vec();
        if frame.len() < FRAME_HEADER_BYTES || self.random.u8(..64) == 0 {
            return frame;
        }
        frame[..4].copy_from_slice(&FRAME_MAGIC);
        frame[4..6].copy_from_slice(&1u16.to_le_bytes());
        let kinds = Kind::ALL;
        let kind = kinds[usize::from(frame[6]) % kinds.len()];
        frame[6] = kind.code();
        frame[7] &= 3;
        let (meta_min, meta_max) = kind.meta_bytes();
        let meta = usize::from(u16::from_le_bytes([frame[54], frame[55]]));
        let meta = meta_min + meta % (meta_max.min(200) - meta_min.min(200) + 1);
        frame[54..56].copy_from_slice(&(meta as u16).to_le_bytes());
        let payload = u32::from_le_bytes([frame[8], frame[9], frame[10], frame[11]]);
        let payload = match kind {
            Kind::Append => payload % (PAYLOAD_BYTES_MAX / 4096) * 4096,
            Kind::Request | Kind::Answer => payload % PAYLOAD_BYTES_MAX,
            _ => 0,
        };
        frame[8..12].copy_from_slice(&payload.to_le_bytes());
        // Small numbers meet each other.
        for field in [16, 24, 32] {
            frame[field + 1..field + 8].fill(0);
        }
        frame[49..52].fill(0);
        let take = |rest: &mut &[u8], bytes: usize| {
            let (taken, behind) = rest.split_at(rest.len().min(bytes));
            *rest = behind;
            let mut taken = taken.to_vec();
            taken.resize(bytes, 0);
            taken
        };
        let meta = take(rest, meta);
        let payload = take(rest, payload as usize);
        let mut checksum = PayloadChecksum::new();
        checksum.update(&payload);
        let checksum = if payload.is_empty() {
            0
        } else {
            checksum.value()
        };
        frame[40..48].copy_from_slice(&checksum.to_le_bytes());
        frame[56..60].copy_from_slice(&self.sequence.to_le_bytes());
        let checksum = block_checksum(&frame[..60]);
        frame[60..64].copy_from_slice(&checksum.to_le_bytes());
        self.sequence = self.sequence.wrapping_add(1);
        if !meta.is_empty() {
            frame.extend(&meta);
            frame.extend(block_checksum(&meta).to_le_bytes());
        }
        frame.extend(payload);
        frame
    }

    /// Give the link bytes, as far as it takes any.
    fn give(&mut self, mut bytes: &[u8]) {
        let most = [1, 64, 5000, usize::MAX][self.random.usize(..4)];
        while !bytes.is_empty() {
            let (here, behind) = match self.link.receive() {
                Receive::Into(here) => (here, &mut [][..]),
                Receive::IntoBoth(here, behind) => (here, behind),
                Receive::Wait | Receive::Close => return,
            };
            assert!(!here.is_empty(), "a place holds something");
            let count = bytes.len().min(here.len() + behind.len()).min(most);
            let first = count.min(here.len());
            here[..first].copy_from_slice(&bytes[..first]);
            behind[..count - first].copy_from_slice(&bytes[first..count]);
            bytes = &bytes[count..];
            self.link.received(count, self.now);
            self.events();
        }
    }

    fn events(&mut self) {
        while let Some(event) = self.link.event() {
            assert!(!self.is_told, "nothing follows the end");
            match event {
                Event::Asked { .. } => self.link.admit(Some(&known(ONE))),
                Event::Ended(_) => self.is_told = true,
                Event::Answered(answer) => self.ends(answer.number),
                Event::TimedOut { number, .. } | Event::Disconnected { number, .. } => {
                    self.ends(number);
                }
                Event::Span(span) => {
                    let bytes = span.parts.iter().map(|part| part.len()).sum();
                    let marks = AppendMarks::from(span.marks);
                    if let Ok(found) = span_of(span.follows, span.position, bytes, &marks) {
                        assert_eq!(found.blocks as usize * 4096, bytes);
                        assert!(found.start.position <= span.position);
                    }
                }
                Event::StreamAsked { epoch, meta, .. } => {
                    if let Ok(log) = read_open(epoch, &meta) {
                        assert_eq!(open(About { log, epoch })[..], meta[..]);
                    }
                }
                Event::Asking(request) if self.random.u8(..32) == 0 => {
                    if let Err(error) = read_request(request.code, &request.meta) {
                        self.link.object(error);
                    }
                }
                Event::Asking(request) if self.random.bool() => {
                    let payload = if request.room_bytes as usize
                        >= request.payload.iter().map(|part| part.len()).sum()
                    {
                        request.payload
                    } else {
                        Vec::new()
                    };
                    let answered = self.link.answer(request.number, 1, &request.meta, &payload);
                    answered.expect("it has room");
                }
                _ => {}
            }
        }
    }

    fn ends(&mut self, number: u64) {
        let at = self.asked.iter().position(|asked| *asked == number);
        self.asked.swap_remove(at.expect("a request ends once"));
    }

    /// What the node does of its own.
    fn node(&mut self) {
        self.events();
        let stream = self.random.u32(..4);
        match self.random.u8(..10) {
            0 => {
                let deadline = self.now.plus(Nanos(1000));
                let _ = self.link.open_stream(1, 5, b"log", deadline);
            }
            1 => {
                if let Some(buf) = self.pool.alloc(4096) {
                    let position = self.random.u64(..20);
                    let parts = [buf.freeze()];
                    let _ = self.link.append(stream, position, Marks::default(), &parts);
                }
            }
            2 | 3 => {
                let progress = Progress {
                    durable: self.random.u64(..20),
                    tail: self.random.u64(..20),
                    limit: self.random.u64(..300),
                };
                let _ = self.link.ack(stream, progress);
            }
            4 => {
                let _ = self.link.close_stream(stream, 1);
            }
            5 => {
                let _ = self.link.close_own_stream(stream, 1);
            }
            6 | 7 => {
                let into = if self.random.bool() {
                    self.pool.alloc(8192)
                } else {
                    None
                };
                let room_bytes = self.random.usize(..2) * 20_000;
                let asked = self.link.request(Ask {
                    code: 1,
                    urgent: self.random.bool(),
                    meta: b"question",
                    payload: &[],
                    into,
                    room_bytes,
                    deadline: self.now.plus(Nanos(self.random.u64(..100_000))),
                });
                self.asked.extend(asked.ok());
            }
            8 => {
                self.now = self.now.plus(Nanos(self.random.u64(..50_000)));
                self.link.tick(self.now);
            }
            _ => self.link.output().clear(),
        }
        self.events();
    }
}

/// A code, and then the meta of a request or an answer with it.
pub fn messages(data: &[u8]) {
    let Some((&code, meta)) = data.split_first() else {
        return;
    };
    let code = u16::from(code);
    if let Ok((about, message)) = read_request(code, meta) {
        assert_eq!(request(about, &message), Some((code, meta.to_vec())));
    }
    if let Ok((about, said)) = read_answer(code, meta) {
        assert_eq!(answer(about, &said), Some((code, meta.to_vec())));
    }
}

/// Messages of all lengths that there are.
pub fn messages_example(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut volume = [0; 16];
    random.fill(&mut volume);
    let number = random.u64(..3);
    let log = LogName { volume, number };
    let epoch = random.u64(..5);
    let mut bytes = vec![random.u8(60..95)];
    bytes.extend(open(About { log, epoch }));
    let more = [0, 8, 16, 56, 72, 88, random.usize(..200) * 16][random.usize(..7)];
    let mut behind = vec![0; more];
    random.fill(&mut behind);
    // Flags and what is reserved come last, and are mostly zero.
    let end = behind.len() - behind.len().min(8);
    behind[end..].fill(0);
    bytes.extend(behind);
    bytes
}

/// Frames of all kinds: food for mutations.
pub fn messenger_example(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = random.u64(..).to_le_bytes().to_vec();
    for _ in 0..random.usize(1..40) {
        let mut header = [0; FRAME_HEADER_BYTES];
        header[6] = random.u8(..);
        header[7] = random.u8(..4) & random.u8(..4);
        header[8..12].copy_from_slice(&random.u32(..).to_le_bytes());
        header[12..16].copy_from_slice(&[0u32, 10, 8192][random.usize(..3)].to_le_bytes());
        for field in [16, 24, 32, 48, 52] {
            header[field] = random.u8(..8);
        }
        header[54] = random.u8(..);
        bytes.extend(header);
        bytes.extend(vec![random.u8(..3); random.usize(..300)]);
    }
    bytes
}
