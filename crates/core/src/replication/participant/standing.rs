//! What stands on the log: its operations that have not ended.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use crate::base::buf::Buf;
use crate::base::io::Token;
use crate::base::limits::BLOCK_BYTES;
use crate::format::{LOG_HEADER_BLOCKS, LogSuperblock, SpanHeader};
use crate::replication::{Point, SpanId};

/// What a write is, as the clear text tells.
#[derive(Debug)]
pub(super) enum Announced {
    Superblock(Box<LogSuperblock>),
    /// Something in the ring: a span, if it has the head of one and is where that belongs; else a part of the log that is
    /// written again in its place.
    Ring {
        offset: u64,
        header: Option<Header>,
    },
}

/// Of a span's head, what names the span.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    log: u64,
    pub(super) position: u64,
    blocks: u32,
    chain: u64,
    checksum: u64,
    incarnation: u64,
    evidence: u64,
}

impl Header {
    fn of(header: &SpanHeader) -> Self {
        Self {
            log: header.log.get(),
            position: header.position.get(),
            blocks: u32::from(header.control_blocks.get()) + u32::from(header.data_blocks.get()),
            chain: header.chain.get(),
            checksum: header.checksum.get(),
            incarnation: header.incarnation.get(),
            evidence: header.durable.get(),
        }
    }

    /// Whether it is of the next span of the log with this number, if that ends at `head`.
    pub(super) fn follows(&self, log: u64, head: Point) -> bool {
        self.log == log && self.chain == head.chain && self.position >= head.position
    }

    /// What others call the span, if the log ends at `head`.
    pub(super) fn id(&self, head: Point) -> SpanId {
        SpanId {
            start: head,
            end: Point {
                position: self.position + u64::from(self.blocks),
                chain: self.checksum,
            },
            blocks: self.blocks,
            incarnation: self.incarnation,
            evidence: self.evidence,
        }
    }
}

impl Announced {
    /// What is written at `offset`; `None` if it is nothing of a log.
    pub(super) fn of(offset: u64, data: &[Buf]) -> Option<Self> {
        let first = data.first()?;
        if offset < LOG_HEADER_BLOCKS * BLOCK_BYTES as u64 {
            let block = LogSuperblock::parse(first).ok()?;
            return Some(Self::Superblock(Box::new(block)));
        }
        let header = SpanHeader::peek(first).ok();
        let header = header.as_ref().map(Header::of);
        Some(Self::Ring { offset, header })
    }
}

/// See the module. Superblocks are with [`super::superblocks`].
#[derive(Debug, Default)]
pub(super) struct Standing {
    announced: BTreeMap<Token, Announced>,
    /// Where they end, in order.
    spans: VecDeque<(u64, Token)>,
}

impl Standing {
    pub(super) fn announce(&mut self, token: Token, announced: Option<Announced>) {
        if let Some(announced) = announced {
            self.announced.insert(token, announced);
        }
    }

    pub(super) fn take_announced(&mut self, token: Token) -> Option<Announced> {
        self.announced.remove(&token)
    }

    /// A span was taken.
    pub(super) fn span(&mut self, end: u64, token: Token) {
        self.spans.push_back((end, token));
    }

    /// The next write of a span that has ended, if everything before this position is committed.
    pub(super) fn next_committed(&mut self, committed: u64) -> Option<Token> {
        let next = self.spans.pop_front_if(|(end, _)| *end <= committed)?;
        Some(next.1)
    }

    /// All that has not ended, and with it what is asked of superblocks.
    pub(super) fn end_all(&mut self, superblock: Option<Token>) -> Vec<Token> {
        self.announced.clear();
        let spans = core::mem::take(&mut self.spans);
        let spans = spans.into_iter().map(|(_, token)| token);
        spans.chain(superblock).collect()
    }
}
