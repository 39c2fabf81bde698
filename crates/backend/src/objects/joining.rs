//! Copying what is to be put out of the machine's memory, which only the shard's thread may touch, a piece in each turn:
//! an object of 16 MiB at once would keep every client of the shard waiting for milliseconds.

use std::collections::VecDeque;

use bytes::BytesMut;
use hdcs_core::base::buf::Buf;
use hdcs_core::base::codec::Method;
use hdcs_core::base::io::Token;
use hdcs_core::objects::io::{Condition, Name};

/// Bytes that are copied in one turn at most: some 100 µs. A manifest is no longer, so an opening never waits for a
/// turn.
pub(super) const PIECE_BYTES: usize = 1 << 20;
const _: () = assert!(PIECE_BYTES >= hdcs_core::base::limits::OBJECT_MANIFEST_BYTES_MAX);

/// How an object is put.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    Plain(Condition),
    Compressed(Method),
}

/// An object on its way out of the machine's memory.
#[derive(Debug)]
pub(super) struct Joining {
    pub(super) token: Token,
    pub(super) name: Name,
    pub(super) how: How,
    /// How many of its bytes are slots.
    pub(super) slot_bytes: usize,
    rest: VecDeque<Buf>,
    joined: BytesMut,
}

impl Joining {
    pub(super) fn new(
        token: Token,
        name: Name,
        how: How,
        slot_bytes: usize,
        data: Vec<Buf>,
    ) -> Self {
        let bytes = data.iter().map(|buf| buf.len()).sum();
        Self {
            token,
            name,
            how,
            slot_bytes,
            rest: data.into(),
            joined: BytesMut::with_capacity(bytes),
        }
    }

    /// Whether it is one piece.
    pub(super) fn is_small(&self) -> bool {
        self.joined.capacity() <= PIECE_BYTES
    }

    /// Copy the next piece; whether everything is copied now.
    pub(super) fn go_on(&mut self) -> bool {
        let mut left = PIECE_BYTES;
        while left > 0
            && let Some(buf) = self.rest.pop_front()
        {
            let count = buf.len().min(left);
            self.joined.extend_from_slice(&buf[..count]);
            left -= count;
            if count < buf.len() {
                self.rest.push_front(buf.slice(count..buf.len()));
            }
        }
        self.rest.is_empty()
    }

    /// The whole object, once everything is copied.
    pub(super) fn into_bytes(self) -> BytesMut {
        debug_assert!(self.rest.is_empty(), "it is whole");
        self.joined
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use hdcs_core::base::buf::Pool;
    use hdcs_core::objects::io::Kind;

    use super::*;

    #[test]
    fn object_is_copied_whole_and_in_pieces() {
        let pool = Pool::new(24 << 20);
        let buf = |bytes: usize, seed: u8| {
            let mut buf = pool.alloc(bytes).unwrap();
            for (index, byte) in buf.iter_mut().enumerate() {
                *byte = seed ^ (index % 251) as u8;
            }
            buf.freeze()
        };
        let mut data: Vec<Buf> = (0..16)
            .map(|seed| buf(1_049_600 / 1025 * 1000, seed))
            .collect();
        data.push(buf(80_000, 99));
        let whole: Vec<u8> = data.iter().flat_map(|buf| buf.iter().copied()).collect();
        let name = Name::own(Kind::Data, 1);
        let how = How::Plain(Condition::Always);
        let mut joining = Joining::new(Token(1), name, how, 0, data);
        let mut turns = Vec::new();
        loop {
            let started = Instant::now();
            let before = joining.joined.len();
            let is_whole = joining.go_on();
            turns.push(started.elapsed());
            assert!(joining.joined.len() - before <= PIECE_BYTES);
            if is_whole {
                break;
            }
        }
        assert_eq!(turns.len(), whole.len().div_ceil(PIECE_BYTES));
        assert!(joining.into_bytes() == whole);
        let started = Instant::now();
        BytesMut::with_capacity(whole.len()).extend_from_slice(&whole);
        let at_once = started.elapsed();
        turns.sort_unstable();
        let median = turns[turns.len() / 2];
        println!(
            "{} bytes: {at_once:?} at once, {median:?} a turn",
            whole.len()
        );
    }
}
