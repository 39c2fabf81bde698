//! What every transport has to keep to: one suite, over pairs of connected ends.
//!
//! [`check_all`] is given a function that puts two links on a transport and connects them. It moves a made-up clock, and
//! waits for nothing but bytes, so no timing decides. A case that does not hold panics with its name. The suite has no
//! sockets: what moves the bytes is a [`Carrier`], of which [`memory`] makes a pair without any.

mod cases;

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::sync::{Arc, Mutex, PoisonError};

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::io::Nanos;
use hdcs_core::wire::{BootId, ClusterId, NodeId, Purpose};

use crate::connection::Connection;
use crate::event::Event;
use crate::handshake::{Identity, Known, Own, Versions};
use crate::link::{Link, LinkConfig};
use crate::transport::{Chunk, Receive, Transport};

pub use cases::check_all;

/// The cluster of the suite, for certificates.
pub const CLUSTER: ClusterId = ClusterId([0xc1; 16]);
/// The node that connects.
pub const ONE: NodeId = NodeId([0x01; 16]);
/// The node that accepts.
pub const TWO: NodeId = NodeId([0x02; 16]);

/// Times that nothing moves before a case has failed.
const IDLE_MAX: u32 = 200_000;
/// Slices of one send at most.
const SLICES_MAX: usize = 64;

/// What moves bytes from one end to the other. Neither call waits: [`io::ErrorKind::WouldBlock`] says that nothing can be
/// moved at present.
pub trait Carrier {
    /// Send from these slices, in order; how many bytes were taken.
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Receive into these places, in order; how many bytes came, 0 at the end.
    fn receive(&mut self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize>;
    /// Nothing is sent or received any more.
    fn close(&mut self);
    /// Nothing has moved: let others run.
    fn idle(&mut self) {
        std::thread::yield_now();
    }
}

/// Bytes on their way in one direction.
#[derive(Debug, Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    is_closed: bool,
}

/// One end of a pair in memory.
#[derive(Debug)]
pub struct Memory {
    out: Arc<Mutex<Pipe>>,
    into: Arc<Mutex<Pipe>>,
}

/// Bytes that a pipe in memory has room for: as a socket's buffer has.
const PIPE_BYTES: usize = 200_000;

/// A pair of carriers in memory.
pub fn memory() -> (Memory, Memory) {
    let (out, into) = (Arc::default(), Arc::default());
    let other = Memory {
        out: Arc::clone(&into),
        into: Arc::clone(&out),
    };
    (Memory { out, into }, other)
}

fn with<T>(pipe: &Mutex<Pipe>, look: impl FnOnce(&mut Pipe) -> T) -> T {
    look(&mut pipe.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Carrier for Memory {
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        with(&self.out, |pipe| {
            if pipe.is_closed {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let mut room = PIPE_BYTES - pipe.bytes.len();
            if room == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let mut sent = 0;
            for slice in slices {
                let bytes = slice.len().min(room);
                pipe.bytes.extend(&slice[..bytes]);
                room -= bytes;
                sent += bytes;
            }
            Ok(sent)
        })
    }

    fn receive(&mut self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        with(&self.into, |pipe| {
            if pipe.bytes.is_empty() && !pipe.is_closed {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let mut received = 0;
            for place in places {
                let mut place = &mut place[..];
                // What it holds may lie in two pieces.
                while let bytes @ 1.. = pipe.bytes.read(place)? {
                    received += bytes;
                    place = &mut place[bytes..];
                }
            }
            Ok(received)
        })
    }

    fn close(&mut self) {
        with(&self.out, |pipe| pipe.is_closed = true);
        with(&self.into, |pipe| pipe.is_closed = true);
    }
}

/// One end: a connection, and the driver that moves its bytes.
pub struct End {
    /// The connection.
    pub connection: Connection,
    carrier: Box<dyn Carrier + Send>,
    queue: VecDeque<Chunk>,
    /// Bytes of the first chunk that are sent.
    sent: usize,
    is_closed: bool,
    /// What has happened, in order.
    pub events: VecDeque<Event>,
    /// Events are taken from the connection as they come.
    pub takes_events: bool,
}

impl End {
    /// `link` over `transport`, moved by `carrier`.
    pub fn new(
        link: Link,
        transport: impl Transport + 'static,
        carrier: impl Carrier + Send + 'static,
    ) -> Self {
        Self {
            connection: Connection::new(link, transport),
            carrier: Box::new(carrier),
            queue: VecDeque::new(),
            sent: 0,
            is_closed: false,
            events: VecDeque::new(),
            takes_events: true,
        }
    }

    fn take_events(&mut self) {
        while self.takes_events
            && let Some(event) = self.connection.event()
        {
            self.events.push_back(event);
        }
    }

    /// Move what can be moved; whether anything was.
    pub fn turn(&mut self, now: Nanos) -> bool {
        let sent = self.send(now);
        let received = self.receive(now);
        sent | received
    }

    fn receive(&mut self, now: Nanos) -> bool {
        self.take_events();
        if self.is_closed {
            return false;
        }
        let result = match self.connection.receive() {
            Receive::Wait => return false,
            Receive::Close => {
                if self.queue.is_empty() && self.connection.output(now).is_empty() {
                    self.is_closed = true;
                    self.carrier.close();
                }
                return false;
            }
            Receive::Into(place) => {
                assert!(!place.is_empty(), "a place holds something");
                self.carrier.receive(&mut [IoSliceMut::new(place)])
            }
            Receive::IntoBoth(here, behind) => {
                assert!(!here.is_empty(), "a place holds something");
                let places = &mut [IoSliceMut::new(here), IoSliceMut::new(behind)];
                self.carrier.receive(places)
            }
        };
        match result {
            Ok(bytes) => self.connection.received(bytes, now),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => self.connection.failed(error.kind()),
        }
        self.take_events();
        true
    }

    fn send(&mut self, now: Nanos) -> bool {
        if self.is_closed {
            return false;
        }
        if self.queue.is_empty() {
            let output = self.connection.output(now);
            self.queue.extend(output.drain(..));
            self.take_events();
        }
        if self.queue.is_empty() {
            return false;
        }
        let slices: Vec<IoSlice<'_>> = (self.queue.iter().take(SLICES_MAX).enumerate())
            .map(|(index, chunk)| {
                let skipped = if index == 0 { self.sent } else { 0 };
                IoSlice::new(&chunk.bytes()[skipped..])
            })
            .collect();
        match self.carrier.send(&slices) {
            Ok(bytes) => {
                self.sent += bytes;
                while let Some(chunk) = self.queue.front()
                    && self.sent >= chunk.bytes().len()
                {
                    self.sent -= chunk.bytes().len();
                    self.queue.pop_front();
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                self.queue.clear();
                self.sent = 0;
                // The other side may have said why before it closed.
                while self.receive(now) {}
                self.connection.failed(error.kind());
                self.take_events();
            }
        }
        true
    }

    /// Nothing has moved: let others run.
    pub fn idle(&mut self) {
        self.carrier.idle();
    }

    /// Bytes of data that the connection and its driver hold.
    pub fn held_bytes(&self) -> usize {
        let queue: usize = self.queue.iter().map(|chunk| chunk.bytes().len()).sum();
        self.connection.held_bytes() + queue
    }

    /// Whether everything there was to send is sent, and the carrier closed.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }
}

/// Puts two links, one that connects and one that accepts, on a transport, and connects them.
pub type Make<'a> = dyn FnMut(Link, Link) -> (End, End) + 'a;

/// Two ends, and a clock.
pub struct Pair {
    /// The one that connects.
    pub one: End,
    /// The one that accepts.
    pub two: End,
    /// What time it is.
    pub now: Nanos,
    /// Memory of both.
    pub pools: [Arc<Pool>; 2],
}

/// What a node of the suite says of itself.
pub fn own(node: NodeId) -> Own {
    Own {
        identity: Identity {
            cluster: CLUSTER,
            node,
            number: u32::from(node.0[0]),
            boot: BootId([7; 16]),
            boots: 7,
        },
        versions: Versions {
            oldest: 1,
            newest: 1,
        },
        credit_bytes: 4 << 20,
    }
}

/// What the other node knows of it.
pub fn known(node: NodeId) -> Known {
    Known {
        node,
        boot: Some((7, BootId([7; 16]))),
    }
}

/// The configuration of a node's end.
pub fn config(node: NodeId) -> LinkConfig {
    LinkConfig::new(format!("end of {}", node.0[0]), own(node))
}

impl Pair {
    /// Two ends that are about to greet each other.
    pub fn greeting(
        make: &mut Make<'_>,
        purpose: Purpose,
        configs: [LinkConfig; 2],
        expects: Known,
        pool_bytes: usize,
    ) -> Self {
        let pools = [Pool::new(pool_bytes), Pool::new(pool_bytes)];
        let now = Nanos::from_millis(1000);
        let [one, two] = configs;
        let one = Link::connect(one, expects, purpose, Arc::clone(&pools[0]), now);
        let two = Link::accept(two, Arc::clone(&pools[1]), now);
        let (one, two) = make(one, two);
        Self {
            one,
            two,
            now,
            pools,
        }
    }

    /// Two ends that have greeted each other.
    pub fn open(make: &mut Make<'_>, purpose: Purpose) -> Self {
        Self::open_with(make, purpose, [config(ONE), config(TWO)], 16 << 20)
    }

    /// The same with these configurations, and pools of such a size.
    pub fn open_with(
        make: &mut Make<'_>,
        purpose: Purpose,
        configs: [LinkConfig; 2],
        pool_bytes: usize,
    ) -> Self {
        let mut pair = Self::greeting(make, purpose, configs, known(TWO), pool_bytes);
        pair.until("the Hello", |pair| pair.two.connection.asked().is_some());
        pair.two.connection.admit(Some(&known(ONE)));
        pair.until("the handshake", |pair| {
            pair.one.connection.is_open() && pair.two.connection.is_open()
        });
        pair.one.events.clear();
        pair.two.events.clear();
        pair
    }

    /// Move bytes until something holds.
    pub fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let mut idle = 0;
        while !holds(self) {
            let moved = self.turn();
            idle = if moved { 0 } else { idle + 1 };
            assert!(
                idle < IDLE_MAX,
                "{what} does not come: {:?}, {:?}",
                self.one.connection.ended(),
                self.two.connection.ended()
            );
        }
    }

    /// Move what can be moved; whether anything was.
    pub fn turn(&mut self) -> bool {
        let moved = self.one.turn(self.now) | self.two.turn(self.now);
        if !moved {
            self.one.carrier.idle();
        }
        moved
    }

    /// Move the clock.
    pub fn pass(&mut self, time: Nanos) {
        self.now = self.now.plus(time);
        for end in [&mut self.one, &mut self.two] {
            end.connection.tick(self.now);
            end.take_events();
        }
    }

    /// The next event of one end that is of some kind; others before it are dropped, but for the end of the link.
    pub fn await_event<T>(
        &mut self,
        what: &str,
        end: fn(&mut Self) -> &mut End,
        mut is: impl FnMut(Event) -> Option<T>,
    ) -> T {
        let mut found = None;
        self.until(what, |pair| {
            while found.is_none()
                && let Some(event) = end(pair).events.pop_front()
            {
                found = is(event);
            }
            found.is_some()
        });
        found.expect("it was found")
    }
}

/// A buffer of so many bytes that are all told from their place and a seed.
pub fn filled(pool: &Pool, bytes: usize, seed: u64) -> Buf {
    let mut buf = pool.alloc(bytes).expect("memory of the suite");
    fill(&mut buf, seed);
    buf.freeze()
}

/// Bytes that are told from their place and a seed.
pub fn fill(bytes: &mut [u8], seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for piece in bytes.chunks_mut(8) {
        let next = random.u64(..).to_le_bytes();
        piece.copy_from_slice(&next[..piece.len()]);
    }
}
