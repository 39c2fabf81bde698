//! The replies of a session on their way out.

use std::collections::VecDeque;

use hdcs_core::base::buf::Buf;
use smallvec::SmallVec;

use crate::{Chunk, Held};

/// Bytes that a [`Chunk`] holds without an allocation of its own.
const INLINE_BYTES: usize = 64;

/// A queue of chunks that joins what is short.
#[derive(Debug, Default)]
pub struct Output {
    /// What is to be sent, in order.
    pub chunks: VecDeque<Chunk>,
}

impl Output {
    /// Append bytes; short ones join the last chunk, so that a batch of replies is few chunks.
    pub fn bytes(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if let Some(Chunk::Bytes(last)) = self.chunks.back_mut()
            && last.len() + bytes.len() <= INLINE_BYTES
        {
            last.extend_from_slice(bytes);
            return;
        }
        self.chunks
            .push_back(Chunk::Bytes(SmallVec::from_slice(bytes)));
    }

    /// Append data, without a copy.
    pub fn data(&mut self, data: Buf) {
        self.chunks.push_back(Chunk::Data(data));
    }

    /// Memory of the queue that no chunk is in.
    pub fn spare_bytes(&self) -> usize {
        (self.chunks.capacity() - self.chunks.len()) * size_of::<Chunk>()
    }

    /// Memory that waits to be sent. There are never many chunks.
    pub fn held(&self) -> Held {
        self.chunks.iter().map(Chunk::held).sum()
    }
}
