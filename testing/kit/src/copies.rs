//! What happens to the log of a copy in a group besides what a volume writes there.

use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::OpenError;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_SUPERBLOCKS, LogSuperblock, Membership};
use hdcs_core::log::replay::{Found, Replay, SpanFound};
use zerocopy::IntoBytes;

/// The superblock in force on the device of a log.
///
/// # Panics
/// If there is none.
pub fn superblock(log: &[u8]) -> LogSuperblock {
    let places = (0..LOG_SUPERBLOCKS).map(|index| LogSuperblock::offset_of(index) as usize);
    let copies = places.map(|at| LogSuperblock::parse(&log[at..at + BLOCK_BYTES]));
    LogSuperblock::in_force(copies).expect("a log has a superblock")
}

/// Write the next superblock to the device of a log: what the one in force says, with a change.
pub fn write_superblock(log: &mut [u8], change: impl FnOnce(&mut LogSuperblock)) {
    let mut next = superblock(log);
    change(&mut next);
    next.ahead = next.named_ahead().into();
    next.sequence += 1;
    next.ahead_sequence = next.sequence;
    next.seal();
    let at = LogSuperblock::offset_of(next.sequence.get()) as usize;
    log[at..at + BLOCK_BYTES].copy_from_slice(next.as_bytes());
}

/// Cut the copy at a position, where one of its spans ends. What has been written behind it is void; spans of the next
/// opening take its place.
pub fn cut(log: &mut [u8], at: u64) {
    write_superblock(log, |superblock| {
        superblock.incarnation += 1;
        superblock.set_membership(Membership {
            promised: superblock.epoch.get() + 1,
            cut_position: at,
            void_before: superblock.incarnation.get(),
            joined: superblock.joined.get() + 1,
            is_whole: false,
        });
        superblock.truncate(at);
    });
}

/// The spans that a replay finds on the device of this volume's log.
///
/// # Errors
/// The log would be refused.
pub fn spans(log: &[u8], volume: [u8; 16]) -> Result<Vec<SpanFound>, OpenError> {
    let mut replay = Replay::new(volume, log.len() as u64);
    let pool = Pool::new(8 << 20);
    let (mut spans, mut is_done) = (Vec::new(), false);
    while !is_done {
        let mut read = replay.next_read(&pool).expect("each is answered at once");
        let bytes = read.buf.len();
        read.buf
            .copy_from_slice(&log[read.offset as usize..][..bytes]);
        replay.read_done(Nanos(0), read.chunk, Ok(read.buf), |_, found| match found {
            Found::Span(span) => spans.push(span),
            Found::Entries(_) | Found::Record(_) => {}
            Found::Done => is_done = true,
        })?;
    }
    Ok(spans)
}
