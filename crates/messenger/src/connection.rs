//! A link and the transport below it, as one thing for a driver.
//!
//! The side that accepts is admitted only if the transport vouches for who it says that it is.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};

use hdcs_core::base::io::Nanos;

use crate::error::Refused;
use crate::handshake::Known;
use crate::link::Link;
use crate::transport::{Chunk, Receive, Transport};

/// See the module. What goes over it is asked of the [`Link`] that it derefs to.
pub struct Connection {
    link: Link,
    transport: Box<dyn Transport>,
}

impl Connection {
    /// `link` over `transport`.
    pub fn new(link: Link, transport: impl Transport + 'static) -> Self {
        Self {
            link,
            transport: Box::new(transport),
        }
    }

    /// Where the next bytes go. The place stays valid and unused until [`Self::received`].
    pub fn receive(&mut self) -> Receive<'_> {
        self.transport.receive(&mut self.link)
    }

    /// So many bytes came there; 0 is the peer's end.
    pub fn received(&mut self, bytes: usize, now: Nanos) {
        self.transport.received(bytes, &mut self.link, now);
    }

    /// What is to be sent, in order; the driver takes chunks from the front, and then events, as there may be new ones.
    pub fn output(&mut self, now: Nanos) -> &mut VecDeque<Chunk> {
        self.transport.output(&mut self.link, now)
    }

    /// See [`Link::admit`].
    pub fn admit(&mut self, known: Option<&Known>) {
        let Some(asked) = self.link.asked() else {
            return;
        };
        if self.transport.vouches_for(asked) {
            self.link.admit(known);
        } else {
            let node = asked.node;
            self.link.refuse(Refused::Certificate(node));
        }
    }

    /// When [`Link::tick`] is to be called, and output to be asked for.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let both = [self.link.next_deadline(), self.transport.next_deadline()];
        both.into_iter().flatten().min()
    }

    /// Bytes of data and of ciphertext that it holds.
    pub fn held_bytes(&self) -> usize {
        self.link.held_bytes() + self.transport.held_bytes()
    }
}

impl Deref for Connection {
    type Target = Link;
    fn deref(&self) -> &Link {
        &self.link
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut Link {
        &mut self.link
    }
}
