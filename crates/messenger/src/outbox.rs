//! What a link sends: frames that wait, and chunks that the driver takes.
//!
//! A frame gets its number when it is *staged*: put behind the chunks that the driver takes. Before that, what is urgent passes
//! by what is not. No frame is ever cut by another, so what is staged is sent to the end even if the link is over.

use std::collections::VecDeque;

use hdcs_core::base::buf::Buf;
use hdcs_core::base::io::Nanos;
use hdcs_core::wire::Kind;

use crate::frame::{Frame, Head};
use crate::requests::is_urgent;
use crate::transport::{Chunk, waiting_bytes};

/// Bytes that are staged before another frame is: enough for one send, and little for a ping to wait behind.
pub const STAGE_BYTES_MAX: usize = 256 << 10;
/// Chunks that are staged before another frame is: as many as one send takes.
const STAGE_CHUNKS_MAX: usize = 512;

/// See the module.
#[derive(Debug, Default)]
pub struct Outbox {
    /// What the driver takes.
    pub wire: VecDeque<Chunk>,
    /// The version of frames.
    pub version: u16,
    /// A ping with this time waits.
    pub ping: Option<Nanos>,
    /// The echo of a ping waits.
    pub pong: Option<u64>,
    /// Frames that pass by the others, with what their requests have cost.
    urgent: VecDeque<(Frame, u64)>,
    /// The others.
    normal: VecDeque<(Frame, u64)>,
    sequence: u32,
    /// Bytes of spans and of requests' data that wait.
    data_bytes: usize,
    /// Somebody waits for room for such.
    is_short: bool,
}

impl Outbox {
    /// Whether there is room for so much data, of a span or a request. Where none waits there is.
    pub fn has_room(&mut self, bytes: usize, max: usize) -> bool {
        let has_room = self.data_bytes == 0 || self.data_bytes + bytes <= max;
        self.is_short |= !has_room;
        has_room
    }

    /// Whether somebody waits for room for data and there is much, once.
    pub fn take_relief(&mut self, max: usize) -> bool {
        let is_relieved = self.is_short && self.data_bytes <= max / 2;
        self.is_short &= !is_relieved;
        is_relieved
    }

    /// A frame is to be sent; it has cost its asker so much.
    pub fn push(&mut self, frame: Frame, cost: u64) {
        let urgent = frame.head.kind == Kind::Request && is_urgent(&frame.head);
        self.put(frame, cost, urgent);
    }

    /// The answer to a request is to be sent.
    pub fn push_answer(&mut self, frame: Frame, cost: u64, urgent: bool) {
        self.put(frame, cost, urgent);
    }

    fn put(&mut self, frame: Frame, cost: u64, urgent: bool) {
        self.data_bytes += own_bytes(&frame.head);
        let queue = if urgent {
            &mut self.urgent
        } else {
            &mut self.normal
        };
        queue.push_back((frame, cost));
    }

    /// The next frame that waits.
    pub fn next(&mut self) -> Option<(Frame, u64)> {
        let next = self
            .urgent
            .pop_front()
            .or_else(|| self.normal.pop_front())?;
        self.data_bytes -= own_bytes(&next.0.head);
        Some(next)
    }

    /// Frames that wait.
    pub fn waiting(&self) -> usize {
        self.urgent.len() + self.normal.len()
    }

    /// Forget the spans of a stream that wait, and its Open.
    pub fn forget_stream(&mut self, stream: u32) {
        let mut forgotten = 0;
        self.normal.retain(|(Frame { head, .. }, _)| {
            let is_span = head.kind == Kind::Append && head.stream == stream;
            forgotten += if is_span {
                head.payload_bytes as usize
            } else {
                0
            };
            !is_span
        });
        self.data_bytes -= forgotten;
    }

    /// Forget everything that is not staged.
    pub fn forget(&mut self) {
        self.urgent.clear();
        self.normal.clear();
        self.data_bytes = 0;
        self.ping = None;
        self.pong = None;
        self.is_short = false;
    }

    /// Bytes that are staged.
    pub fn staged_bytes(&self) -> usize {
        waiting_bytes(&self.wire)
    }

    /// Whether another frame may be staged, with so many bytes staged.
    pub fn has_stage_room(&self, staged_bytes: usize) -> bool {
        self.wire.len() < STAGE_CHUNKS_MAX && staged_bytes < STAGE_BYTES_MAX
    }

    /// The echo of a ping, or a ping, if one waits.
    pub fn next_ping(&mut self) -> Option<Frame> {
        let head = if let Some(number) = self.pong.take() {
            Head {
                number,
                ..Head::new(Kind::Pong)
            }
        } else if let Some(Nanos(number)) = self.ping.take() {
            Head {
                number,
                ..Head::new(Kind::Ping)
            }
        } else {
            return None;
        };
        Some(Frame::bare(head))
    }

    /// Put a frame behind what the driver takes; how many bytes it is.
    pub fn stage(&mut self, frame: Frame) -> usize {
        let version = self.version;
        let bytes = frame.head.front_bytes() + frame.head.payload_bytes as usize;
        let front = frame.front(version, self.sequence);
        self.sequence = self.sequence.wrapping_add(1);
        self.wire.push_back(Chunk::Bytes(front));
        let parts = frame.parts.into_iter().filter(|part| !part.is_empty());
        self.wire.extend(parts.map(Chunk::Data));
        bytes
    }

    /// Bytes of data that wait, and are staged.
    pub fn held_bytes(&self) -> usize {
        let frames = self.urgent.iter().chain(&self.normal);
        let queued = frames.flat_map(|(frame, _)| &frame.parts);
        let staged = self.wire.iter().filter_map(|chunk| match chunk {
            Chunk::Data(data) => Some(data),
            Chunk::Bytes(_) => None,
        });
        queued.chain(staged).map(|part: &Buf| part.len()).sum()
    }
}

/// Data of a frame that counts as this side's. Answers count as their asker's, by credit.
fn own_bytes(head: &Head) -> usize {
    match head.kind {
        Kind::Append | Kind::Request => head.payload_bytes as usize,
        _ => 0,
    }
}
