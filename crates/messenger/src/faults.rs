//! A transport that injects errors into what another one sends, for tests: one seed decides everything.
//!
//! What is sent is taken as segments: a frame of a plain transport, a lump of ciphertext of TLS. Now and then one of them meets
//! a [`Fault`]. Bytes of a real TCP connection are neither lost nor reordered, so most of these stand for broken hardware,
//! software in between, or memory; the link has to notice each of them.

use std::collections::VecDeque;
use std::io;

use hdcs_core::base::io::Nanos;
use smallvec::SmallVec;

use crate::handshake::Identity;
use crate::link::Link;
use crate::transport::{Chunk, Receive, Transport, waiting_bytes};

/// What may happen to a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It, and all after it, comes later.
    Delay,
    /// It does not come.
    Drop,
    /// A part of it does not come.
    DropPart,
    /// The connection ends within it.
    Cut,
    /// Nothing is sent from within it on, and the connection stays.
    Silence,
    /// One bit is changed.
    Corrupt,
    /// It comes twice.
    Repeat,
    /// The next one comes first.
    Reorder,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Delay,
        Self::Drop,
        Self::DropPart,
        Self::Cut,
        Self::Silence,
        Self::Corrupt,
        Self::Repeat,
        Self::Reorder,
    ];
}

/// Which faults are injected, and how often.
#[derive(Clone, Debug)]
pub struct Plan {
    /// These; none: what is sent passes as it is.
    pub faults: Vec<Fault>,
    /// One segment of so many meets one.
    pub one_of: u32,
    /// A delay is as long at most.
    pub delay_max: Nanos,
    /// What the choices are drawn from.
    pub seed: u64,
}

impl Plan {
    /// No fault at all.
    pub fn none() -> Self {
        Self {
            faults: Vec::new(),
            one_of: 1,
            delay_max: Nanos(0),
            seed: 0,
        }
    }
}

/// Bytes that are taken from the transport below before the driver has taken those before.
const OUTPUT_BYTES_MAX: usize = 256 << 10;

/// See the module.
#[derive(Debug)]
pub struct Faulty<T> {
    inner: T,
    plan: Plan,
    random: fastrand::Rng,
    output: VecDeque<Chunk>,
    /// Nothing is sent before.
    until: Nanos,
    /// What comes after the next segment, or when the time above has come.
    held: Vec<Chunk>,
    /// Nothing is sent any more.
    is_silent: bool,
    is_cut: bool,
    now: Nanos,
}

impl<T: Transport> Faulty<T> {
    /// Faults in what `inner` sends.
    pub fn new(inner: T, plan: Plan) -> Self {
        Self {
            random: fastrand::Rng::with_seed(plan.seed),
            inner,
            plan,
            output: VecDeque::new(),
            until: Nanos(0),
            held: Vec::new(),
            is_silent: false,
            is_cut: false,
            now: Nanos(0),
        }
    }

    /// The next segment.
    fn pull(&mut self, link: &mut Link) -> Option<Vec<Chunk>> {
        let chunks = self.inner.output(link, self.now);
        let mut segment = vec![chunks.pop_front()?];
        while let Some(Chunk::Data(_)) = chunks.front() {
            segment.extend(chunks.pop_front());
        }
        Some(segment)
    }

    fn draw(&mut self) -> Option<Fault> {
        if self.plan.faults.is_empty() || self.random.u32(..self.plan.one_of) != 0 {
            return None;
        }
        Some(self.plan.faults[self.random.usize(..self.plan.faults.len())])
    }

    fn inject(&mut self, fault: Fault, segment: Vec<Chunk>, link: &mut Link) {
        let bytes: Vec<u8> = segment.iter().flat_map(Chunk::bytes).copied().collect();
        let at = self.random.usize(..bytes.len());
        match fault {
            Fault::Delay => {
                let delay = self.random.u64(..=self.plan.delay_max.0);
                self.until = self.now.plus(Nanos(delay));
                self.held = segment;
            }
            Fault::Drop => {}
            Fault::DropPart => {
                let end = self.random.usize(at + 1..=bytes.len());
                self.put(&bytes[..at]);
                self.put(&bytes[end..]);
            }
            Fault::Cut => {
                self.put(&bytes[..at]);
                self.is_cut = true;
                link.failed(io::ErrorKind::ConnectionReset);
            }
            Fault::Silence => {
                self.put(&bytes[..at]);
                self.is_silent = true;
            }
            Fault::Corrupt => {
                let mut bytes = bytes;
                bytes[at] ^= 1 << self.random.u8(..8);
                self.put(&bytes);
            }
            Fault::Repeat => {
                self.put(&bytes);
                self.put(&bytes);
            }
            Fault::Reorder => {
                self.until = self.now;
                self.held = segment;
                if let Some(next) = self.pull(link) {
                    self.output.extend(next);
                }
            }
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let bytes = SmallVec::from_slice(bytes);
            self.output.push_back(Chunk::Bytes(bytes));
        }
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn receive<'a>(&'a mut self, link: &'a mut Link) -> Receive<'a> {
        self.inner.receive(link)
    }

    fn received(&mut self, bytes: usize, link: &mut Link, now: Nanos) {
        self.now = now;
        self.inner.received(bytes, link, now);
    }

    fn output<'a>(&'a mut self, link: &'a mut Link, now: Nanos) -> &'a mut VecDeque<Chunk> {
        self.now = now;
        if self.plan.faults.is_empty() {
            return self.inner.output(link, now);
        }
        while !self.is_cut && !self.is_silent && self.now >= self.until {
            self.output.extend(self.held.drain(..));
            if waiting_bytes(&self.output) >= OUTPUT_BYTES_MAX {
                break;
            }
            let Some(segment) = self.pull(link) else {
                break;
            };
            match self.draw() {
                Some(fault) => self.inject(fault, segment, link),
                None => self.output.extend(segment),
            }
        }
        &mut self.output
    }

    fn vouches_for(&self, peer: &Identity) -> bool {
        self.inner.vouches_for(peer)
    }

    fn next_deadline(&self) -> Option<Nanos> {
        let until = (self.now < self.until).then_some(self.until);
        let both = [until, self.inner.next_deadline()];
        both.into_iter().flatten().min()
    }

    fn held_bytes(&self) -> usize {
        let held: usize = self.held.iter().map(|chunk| chunk.bytes().len()).sum();
        self.inner.held_bytes() + waiting_bytes(&self.output) + held
    }
}
