//! How far ahead of what is durable here a primary may send.
//!
//! Half of the pool is for spans of streams, in equal parts; the other half takes what is fetched from members' logs. A part
//! is never less than two of the largest spans: a span that does not fit before the ring's end begins behind it, so it may
//! end almost two lengths behind the one before, and with less it could never be sent. With so many streams that the parts
//! come to more than there is, spans wait in their sockets. A span that waits for room in its ring then holds up the message
//! that makes room, if it comes over the same connection: so a pool has room for all streams, 2 * [`WINDOW_BLOCKS_MIN`] each.

use hdcs_core::base::limits::{BLOCK_BYTES, WIRE_PARTS_MAX};

/// Blocks ahead of what is durable that each stream has at least.
pub const WINDOW_BLOCKS_MIN: u64 = 2 * WIRE_PARTS_MAX as u64;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    blocks: u64,
}

impl Window {
    /// Of a pool of so many bytes.
    pub fn new(pool_bytes: usize) -> Self {
        Self {
            blocks: (pool_bytes / BLOCK_BYTES / 2) as u64,
        }
    }

    /// Up to where one of so many streams may go on, of which what is before `durable` is durable.
    pub fn limit(self, durable: u64, streams: usize) -> u64 {
        let part = self.blocks / streams.max(1) as u64;
        durable.saturating_add(part.max(WINDOW_BLOCKS_MIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_is_shared_and_never_too_small_for_a_span_that_jumps() {
        let window = Window::new(1 << 30);
        assert_eq!(window.limit(100, 0), 100 + (1 << 17));
        assert_eq!(window.limit(100, 1), 100 + (1 << 17));
        assert_eq!(window.limit(100, 4), 100 + (1 << 15));
        assert_eq!(window.limit(100, 10_000), 100 + WINDOW_BLOCKS_MIN);
        assert_eq!(window.limit(u64::MAX, 1), u64::MAX);
    }
}
