//! Bytes of a client against the NBD session.
//!
//! Checked, besides that nothing panics: the session never waits for nothing; what is in flight
//! and what waits to be sent are bounded by what it may hold, however little of its answers the client
//! takes; when the client is gone the session closes with nothing
//! in flight, and every buffer is back in its pool.

use std::cell::RefCell;
use std::sync::Arc;

use hdcs_core::base::error::RequestError;
use hdcs_frontend::access::Allow;
use hdcs_frontend::memory::{MemoryHost, MemoryVolume};
use hdcs_frontend::nbd::{NbdConfig, NbdSession};
use hdcs_frontend::{Chunk, Export, Receive, Session, VolumeNumber};

/// Small enough that requests of the larger kinds run out of buffers.
const POOL_BYTES: usize = 4 << 20;
const VOLUME_BYTES: u64 = (3 << 20) + 512;
/// The session's own limit, and both contexts of one request.
const IN_FLIGHT_MAX: usize = 256 + 1;
/// What a session may hold besides data beyond what it was allowed: itself, a reply to LIST, and the
/// memory of its queue.
const HEAP_SLACK_BYTES: usize = 512 << 10;

thread_local! {
    static HOST: RefCell<MemoryHost> = RefCell::new(host());
}

fn host() -> MemoryHost {
    let volume = |number, name: &str, read_only| {
        MemoryVolume::new(Export {
            opening: hdcs_frontend::OpeningId::default(),
            number: VolumeNumber(number),
            name: name.to_owned(),
            bytes: VOLUME_BYTES,
            read_only,
            discards: true,
            allow: Allow::default(),
        })
    };
    let volumes: Vec<Arc<MemoryVolume>> = vec![volume(1, "a", false), volume(2, "frozen", true)];
    MemoryHost::new(POOL_BYTES, volumes)
}

/// The first 8 bytes choose how the rest is cut, when requests complete and how, and what the
/// listener demands; the rest is what the client sends.
pub fn nbd(data: &[u8]) {
    let Some((seed, stream)) = data.split_first_chunk() else {
        return;
    };
    let seed = u64::from_le_bytes(*seed);
    HOST.with_borrow_mut(|host| Run::new(seed, host).all(stream));
}

struct Run<'a> {
    random: fastrand::Rng,
    host: &'a mut MemoryHost,
    session: NbdSession,
    /// How much is given to the session at once at most.
    feed_bytes_max: usize,
    /// The client takes its answers once in so many steps, and when nothing else goes on.
    takes_every: u32,
}

impl<'a> Run<'a> {
    fn new(seed: u64, host: &'a mut MemoryHost) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let config = NbdConfig {
            tls: None,
            require_tls: random.u8(..16) == 0,
            ..NbdConfig::default()
        };
        // Two of the largest pieces: a read of 1 MiB that is answered as a whole needs two.
        host.allowance.held.data_bytes = [2 << 20, 3 << 20, 16 << 20][random.usize(..3)];
        host.allowance.held.heap_bytes = [48 << 10, 8 << 20][random.usize(..2)];
        Self {
            takes_every: [1, 4, 100_000][random.usize(..3)],
            feed_bytes_max: [1, 30, 5000, 1 << 20][random.usize(..4)],
            session: NbdSession::new(config),
            random,
            host,
        }
    }

    fn all(mut self, stream: &[u8]) {
        let pool = Arc::clone(self.host.pool());
        let mut rest = stream;
        let mut hung_up = false;
        loop {
            let is_spent = self.random.u8(..8) == 0;
            self.host.allowance.work = if is_spent { 0 } else { usize::MAX };
            let (random, feed_bytes_max) = (&mut self.random, self.feed_bytes_max);
            match self.session.receive(self.host) {
                Receive::Close => break,
                Receive::Wait => {
                    let progress = self.complete() || self.collect();
                    assert!(progress || is_spent, "the session waits for nothing");
                }
                Receive::Into(place) => {
                    assert!(!hung_up, "nothing follows the end");
                    assert!(!place.is_empty(), "a place holds something");
                    let bytes = rest.len().min(place.len()).min(feed_bytes_max);
                    let bytes = if bytes == 0 {
                        0
                    } else {
                        random.usize(1..=bytes)
                    };
                    place[..bytes].copy_from_slice(&rest[..bytes]);
                    rest = &rest[bytes..];
                    hung_up = bytes == 0;
                    self.session.received(bytes, self.host);
                }
                Receive::IntoBoth(place, behind) => {
                    assert!(!hung_up, "nothing follows the end");
                    assert!(!place.is_empty(), "a place holds something");
                    let bytes = rest.len().min(place.len() + behind.len());
                    let bytes = match bytes.min(feed_bytes_max) {
                        0 => 0,
                        bytes => random.usize(1..=bytes),
                    };
                    let (here, further) = rest[..bytes].split_at(bytes.min(place.len()));
                    place[..here.len()].copy_from_slice(here);
                    behind[..further.len()].copy_from_slice(further);
                    rest = &rest[bytes..];
                    hung_up = bytes == 0;
                    self.session.received(bytes, self.host);
                }
            }
            if self.random.bool() {
                self.complete();
            }
            if self.random.u32(..self.takes_every) == 0 {
                self.collect();
            }
            if self.random.u16(..2000) == 0 {
                self.session.shut_down();
            }
            let in_flight = self.session.in_flight();
            assert!(in_flight <= IN_FLIGHT_MAX && in_flight == self.host.submitted.len());
            let (held, allowed) = (self.session.held(), self.host.allowance.held);
            assert!(held.data_bytes <= allowed.data_bytes, "{held:?}");
            assert!(
                held.heap_bytes <= allowed.heap_bytes + HEAP_SLACK_BYTES,
                "{held:?}"
            );
        }
        assert!(self.host.submitted.is_empty());
        self.collect();
        drop(self.session);
        assert_eq!(pool.free_bytes(), pool.total_bytes(), "a buffer is lost");
    }

    fn complete(&mut self) -> bool {
        if self.host.submitted.is_empty() {
            return false;
        }
        let index = self.random.usize(..self.host.submitted.len());
        let (id, result) = self.host.perform(index);
        let result = match self.random.u8(..30) {
            0 => Err(RequestError::Io),
            1 => Err(RequestError::LogFull),
            _ => result,
        };
        self.session.completed(id, result);
        true
    }

    fn collect(&mut self) -> bool {
        let chunks = self.session.output();
        let bytes: usize = chunks
            .iter()
            .map(|chunk| match chunk {
                Chunk::Bytes(bytes) => bytes.len(),
                Chunk::Data(data) => data.len(),
            })
            .sum();
        chunks.clear();
        bytes > 0
    }
}

/// What a client says that does everything once: food for mutations.
pub fn nbd_example(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = random.u64(..).to_le_bytes().to_vec();
    bytes.extend([0, 0, 0, random.u8(..4)]);
    let mut option = |kind: u32, data: &[u8]| {
        bytes.extend(b"IHAVEOPT");
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
    };
    option(8, &[]);
    option(3, &[]);
    option(6, b"\0\0\0\x01a\0\x03\0\0\0\x01\0\x02");
    option(9, b"\0\0\0\x01a\0\0\0\0");
    let contexts = b"\0\0\0\x01a\0\0\0\x02\0\0\0\x0fbase:allocation\0\0\0\x0ahdcs:cache";
    option(10, contexts);
    match random.u8(..4) {
        0 => option(1, b"a"),
        1 => option(7, b"\0\0\0\x06frozen\0\0"),
        _ => option(7, b"\0\0\0\x01a\0\0"),
    }
    for cookie in 0..random.u64(1..60) {
        let kind = [0, 0, 1, 1, 3, 4, 5, 6, 7, 8][random.usize(..10)];
        let flags = [0, 0, 0, 1, 2, 4, 8][random.usize(..7)];
        let length = [512, 1024, 4096, 66_048, 1 << 20, 2 << 20][random.usize(..6)];
        let offset = random.u64(..6000) * 512;
        let (offset, length) = if kind == 3 { (0, 0) } else { (offset, length) };
        bytes.extend(0x2560_9513u32.to_be_bytes());
        bytes.extend(u16::to_be_bytes(flags));
        bytes.extend(u16::to_be_bytes(kind));
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend((length as u32).to_be_bytes());
        if kind == 1 {
            bytes.resize(bytes.len() + length, cookie as u8);
        }
    }
    bytes
}
