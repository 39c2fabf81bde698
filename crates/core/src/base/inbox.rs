//! The receive buffer of a session or a link: one receive brings many requests, parsing consumes them.
//!
//! Invariants: `start <= end <= bytes.len()`; the unread bytes are `start..end`. It moves bytes
//! only in [`Inbox::room`] and [`Inbox::grow`], never while a receive into it is under way.

use alloc::boxed::Box;
use alloc::vec;

/// Bytes that were received and not yet parsed.
#[derive(Debug)]
pub struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether something filled it since it was made.
    was_full: bool,
}

impl Inbox {
    /// An empty inbox of so many bytes.
    pub fn new(capacity_bytes: usize) -> Self {
        Self {
            bytes: vec![0; capacity_bytes].into_boxed_slice(),
            start: 0,
            end: 0,
            was_full: false,
        }
    }

    /// The same unread bytes with a capacity of at least so many bytes.
    pub fn grow(&mut self, capacity_bytes: usize) {
        if self.bytes.len() < capacity_bytes {
            let mut grown = Self::new(capacity_bytes);
            grown.end = self.unread().len();
            grown.bytes[..grown.end].copy_from_slice(self.unread());
            *self = grown;
        }
    }

    /// Bytes that it has room for in all.
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Whether a receive has filled it since it was made or has grown: more might have come.
    pub fn was_full(&self) -> bool {
        self.was_full
    }

    /// What was received and not consumed.
    pub fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Forget the first so many unread bytes.
    pub fn consume(&mut self, bytes: usize) {
        assert!(bytes <= self.end - self.start, "consume beyond the end");
        self.start += bytes;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Where the next bytes go. Unread bytes move to the front when they are few or in the way, so
    /// that the room is worth a receive.
    pub fn room(&mut self) -> &mut [u8] {
        let unread = self.end - self.start;
        if self.start > 0 && (unread <= MOVE_BYTES_MAX || self.end == self.bytes.len()) {
            self.bytes.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = unread;
        }
        &mut self.bytes[self.end..]
    }

    /// So many bytes came into the room.
    pub fn received(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes.len() - self.end, "more than the room");
        self.end += bytes;
        self.was_full |= self.end == self.bytes.len();
    }
}

/// Unread bytes that are moved to the front whenever there is room before them: a part of one
/// small request, cheaper to move than a shorter receive.
const MOVE_BYTES_MAX: usize = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inbox_keeps_the_stream_through_moves_and_growth() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut inbox = Inbox::new(64);
        let (mut sent, mut seen) = (0u8, 0u8);
        for step in 0..10_000 {
            let room = inbox.room();
            let bytes = random.usize(..=room.len());
            for place in &mut room[..bytes] {
                *place = sent;
                sent = sent.wrapping_add(1);
            }
            inbox.received(bytes);
            let bytes = random.usize(..=inbox.unread().len());
            for &byte in &inbox.unread()[..bytes] {
                assert_eq!(byte, seen);
                seen = seen.wrapping_add(1);
            }
            inbox.consume(bytes);
            if step == 5_000 {
                inbox.grow(100);
            }
        }
        inbox.consume(inbox.unread().len());
        assert_eq!(inbox.room().len(), 100);
    }
}
