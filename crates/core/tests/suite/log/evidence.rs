//! Where the spans of a log seem to end, what proves that wrong is near enough to be found, whatever was written at once.

use std::collections::VecDeque;
use std::iter;
use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::OpenError;
use hdcs_core::base::io::{Nanos, SectorRange};
use hdcs_core::base::limits::{
    BLOCK_BYTES, BLOCK_SECTORS, REQUEST_BLOCKS_MAX, SPANS_IN_FLIGHT_MAX,
};
use hdcs_core::format::{EntryKind, LOG_HEADER_BLOCKS, LogSuperblock};
use hdcs_core::log::replay::{Found, Replay, SpanFound};
use hdcs_core::log::write_log::{Entry, SpanWrite, WriteLog, region_bytes};

const NOW: Nanos = Nanos(1);
const REGION_BYTES: usize = 256 << 20;
const LOG_HEADER_BYTES: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;

/// A log, and the device below it.
pub struct Bench {
    pub log: WriteLog,
    pool: Arc<Pool>,
    pub device: Vec<u8>,
    requests: u64,
}

impl Bench {
    pub fn new(region_bytes: usize) -> Self {
        let mut superblock = LogSuperblock::new([7; 16], 99, region_bytes as u64);
        superblock.seal();
        let mut device = vec![0; region_bytes];
        device[..BLOCK_BYTES].copy_from_slice(zerocopy::IntoBytes::as_bytes(&superblock));
        let mut log = WriteLog::new(superblock, None);
        for _ in 0..2 {
            let (offset, block) = log.superblock_for_opening();
            device[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
        }
        Self {
            log,
            pool: Pool::new(REGION_BYTES),
            device,
            requests: 0,
        }
    }

    /// Accept and seal requests of so many blocks, as far as that is allowed before more is durable.
    pub fn fill(&mut self, blocks: usize) -> Vec<SpanWrite> {
        let mut spans = Vec::new();
        while self.log.flights() < SPANS_IN_FLIGHT_MAX && !self.log.is_far_ahead(blocks as u64) {
            spans.push(self.append(blocks));
        }
        spans
    }

    pub fn append(&mut self, blocks: usize) -> SpanWrite {
        self.accept(blocks);
        self.log.seal(NOW);
        let span = self.log.next_write(SPANS_IN_FLIGHT_MAX);
        span.expect("it was sealed")
    }

    pub fn accept(&mut self, blocks: usize) {
        let mut data = self.pool.alloc(blocks * BLOCK_BYTES).unwrap();
        // No two requests have a block alike.
        self.requests += 1;
        for number in data.chunks_exact_mut(8) {
            number.copy_from_slice(&self.requests.to_le_bytes());
        }
        let entry = Entry {
            range: SectorRange::new(0, blocks as u64 * BLOCK_SECTORS),
            kind: EntryKind::Write,
            no_hole: false,
            position: 0,
            stored: None,
            data: Some(data.freeze()),
            held_blocks: 0,
        };
        self.log.append(NOW, entry, None);
    }

    /// Requests that become one span, which is durable.
    pub fn write_span(&mut self, requests: &[usize]) {
        for &blocks in requests {
            assert!(self.log.has_room(blocks as u64, None));
            assert!(!self.log.is_far_ahead(blocks as u64));
            self.accept(blocks);
        }
        self.log.seal(NOW);
        let span = self.log.next_write(SPANS_IN_FLIGHT_MAX);
        let span = span.expect("it was sealed");
        self.write(&span);
        self.end(&[span]);
    }

    /// A superblock says that the first spans are retired; where it is.
    pub fn retire(&mut self, spans: usize) -> usize {
        let tail = self.log.tail_after(spans);
        let (offset, block) = self.log.superblock_for(&tail, false);
        self.device[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
        if spans > 0 {
            self.log.retire(spans).for_each(drop);
        }
        self.log.forget_checksums(None);
        offset as usize
    }

    /// The device says that it has written these.
    pub fn end(&mut self, spans: &[SpanWrite]) {
        for span in spans {
            self.log.span_written(NOW, span.end);
        }
    }

    /// And it has.
    pub fn write(&mut self, span: &SpanWrite) {
        let mut at = span.offset as usize;
        for block in &span.data {
            self.device[at..][..block.len()].copy_from_slice(block);
            at += block.len();
        }
    }

    /// Open the log that is on the device: where it ends.
    pub fn replay(&self) -> Result<u64, OpenError> {
        self.open(&mut 0).map(|log| log.head())
    }

    /// The same: its spans.
    pub fn spans(&self) -> Result<Vec<SpanFound>, OpenError> {
        let mut spans = Vec::new();
        self.open_telling(&mut 0, |found| match found {
            Found::Span(span) => spans.push(span),
            Found::Entries(_) | Found::Record(_) | Found::Done => {}
        })?;
        Ok(spans)
    }

    /// The same, with so many bytes read, of which several are under way at once.
    fn open(&self, bytes_read: &mut u64) -> Result<WriteLog, OpenError> {
        self.open_telling(bytes_read, |_| ())
    }

    /// Open the log that is on the device; `tell` is told what is found.
    pub fn open_telling(
        &self,
        bytes_read: &mut u64,
        mut tell: impl FnMut(Found),
    ) -> Result<WriteLog, OpenError> {
        let mut replay = Replay::new([7; 16], self.device.len() as u64);
        replay.set_prepared(region_bytes(self.log.prepared_blocks()));
        let pool = Pool::new(8 << 20);
        let mut done = false;
        let mut reads = VecDeque::new();
        while !done {
            reads.extend(iter::from_fn(|| replay.next_read(&pool)));
            let mut read = reads.pop_front().expect("a read");
            let bytes = &self.device[read.offset as usize..][..read.buf.len()];
            *bytes_read += bytes.len() as u64;
            read.buf.copy_from_slice(bytes);
            replay.read_done(NOW, read.chunk, Ok(read.buf), |_, found| {
                done = matches!(found, Found::Done);
                tell(found);
            })?;
        }
        Ok(replay.into_log())
    }

    /// Take the log that is on the device, and write on in the opening of its superblock, as somebody does who is given
    /// spans.
    pub fn follow(&mut self) {
        self.log = self.open(&mut 0).unwrap();
    }

    /// Go on with the log that is on the device.
    pub fn reopen(&mut self) {
        self.follow();
        let (offset, block) = self.log.superblock_for_opening();
        self.device[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
    }

    /// Make a hole of what is not prepared.
    pub fn punch(&mut self) {
        let from = region_bytes(self.log.prepared_blocks()) as usize;
        self.device[from..].fill(0);
    }

    /// Where the superblock is that counts.
    pub fn newest_superblock(&self) -> usize {
        let sequence = |at: &usize| {
            let block = &self.device[*at..*at + BLOCK_BYTES];
            LogSuperblock::parse(block).map_or(0, |found| found.sequence.get())
        };
        let places = [0, 1].map(|index| LogSuperblock::offset_of(index) as usize);
        places.into_iter().max_by_key(sequence).unwrap()
    }
}

/// After some rounds in which as much as is allowed was written at once, the device loses a span that was durable, and
/// what was written at once with it. A crash then tears all that is written next but for the last span.
fn loses_what_was_durable(rounds: usize, blocks: usize) {
    let mut bench = Bench::new(REGION_BYTES);
    for _ in 0..rounds {
        let spans = bench.fill(blocks);
        for span in &spans {
            bench.write(span);
        }
        bench.end(&spans);
    }
    let end = bench.log.head();
    assert_eq!(bench.replay(), Ok(end));
    let rotten = bench.append(blocks);
    let beside = bench.fill(blocks);
    bench.end(&[rotten]);
    let torn = bench.fill(blocks);
    bench.end(&beside);
    let Some(last) = bench.fill(blocks).pop() else {
        assert!(torn.is_empty() || beside.is_empty());
        return;
    };
    bench.write(&last);
    assert_eq!(
        bench.replay(),
        Err(OpenError::CorruptLog { position: end }),
        "{rounds} rounds of {blocks} blocks: the last span ends {} blocks from there",
        last.end - end
    );
}

#[test]
fn replay_finds_what_proves_an_end_wrong_however_much_was_written_at_once() {
    for blocks in [1, 5, 32, 100, 200, REQUEST_BLOCKS_MAX] {
        for rounds in [0, 1, 2, 3, 5, 8] {
            loses_what_was_durable(rounds, blocks);
        }
    }
}

/// The newest superblock rots, or the device has lost it. The one before names a tail, in a log that was empty then, which
/// the last span of the next lap covers; and that has cut off the head of the largest span of the lap before.
#[test]
fn replay_finds_a_later_lap_over_the_tail_of_an_older_superblock() {
    for is_lost in [false, true] {
        let mut bench = Bench::new(16 << 20);
        bench.write_span(&[200]);
        bench.retire(1);
        for requests in [&[100][..], &[200], &[256, 256], &[256, 100], &[10]] {
            bench.write_span(requests);
        }
        let before = bench.device[..LOG_HEADER_BYTES].to_vec();
        let newest = bench.retire(4);
        while bench.log.head() < bench.log.ring_blocks() {
            bench.write_span(&[256, 256]);
        }
        assert_eq!(bench.replay(), Ok(bench.log.head()));
        if is_lost {
            bench.device[..LOG_HEADER_BYTES].copy_from_slice(&before);
        } else {
            bench.device[newest + 100] ^= 1;
        }
        let replayed = bench.replay();
        let is_refused = matches!(replayed, Err(OpenError::CorruptLog { .. }));
        assert!(is_refused, "{replayed:?}");
    }
}

/// The newest superblock rots. The one before names a tail where there still is a span. What the next lap writes there was
/// in flight in a crash, which has left of it all but the head of a largest span: that covers the heads of three.
#[test]
fn replay_finds_a_torn_later_lap_behind_the_tail_of_an_older_superblock() {
    let mut bench = Bench::new(16 << 20);
    // Few blocks, so that what the span behind them names is no reason to search far.
    bench.write_span(&[60]);
    bench.retire(1);
    let good = bench.log.head();
    for requests in [&[10][..], &[256], &[256], &[256, 256], &[10]] {
        bench.write_span(requests);
    }
    let newest = bench.retire(4);
    let ring_blocks = bench.log.ring_blocks();
    while bench.log.head() + 520 < ring_blocks {
        bench.write_span(&[256, 256]);
    }
    let end = good + 11;
    while bench.log.head() + end + 2 <= ring_blocks {
        bench.write_span(&[60]);
    }
    // It jumps to where the lap begins, and ends two blocks behind the first head that is to be found no more.
    let lost = bench.append(end as usize + 1);
    assert_eq!(lost.end, ring_blocks + end + 2);
    bench.accept(256);
    bench.accept(256);
    bench.log.seal(NOW);
    let torn = bench.log.next_write(SPANS_IN_FLIGHT_MAX).unwrap();
    let head_bytes = torn.offset as usize..torn.offset as usize + BLOCK_BYTES;
    let head = bench.device[head_bytes.clone()].to_vec();
    bench.write(&torn);
    bench.device[head_bytes].copy_from_slice(&head);
    bench.device[newest + 100] ^= 1;
    let replayed = bench.replay();
    let is_refused = matches!(replayed, Err(OpenError::CorruptLog { .. }));
    assert!(is_refused, "{replayed:?}");
}

/// What is read behind the end of a log that holds little is little.
#[test]
fn replay_reads_little_behind_the_end_of_a_log() {
    let mut bench = Bench::new(64 << 20);
    let read = |bench: &Bench| {
        let mut bytes = 0;
        bench.open(&mut bytes).unwrap();
        bytes / BLOCK_BYTES as u64
    };
    let empty = read(&bench);
    assert!(empty < 1_100, "{empty}");
    while bench.log.head() < 400 {
        bench.write_span(&[1; 16]);
    }
    let little = read(&bench);
    assert!(little < 400 + 200 + 600, "{little}");
}

/// A program that does not know of it writes superblocks that still name what the last one of this program did.
#[test]
fn superblock_of_another_program_names_nothing() {
    let mut superblock = LogSuperblock::new([7; 16], 99, REGION_BYTES as u64);
    assert!(superblock.named_ahead() > 0);
    superblock.sequence += 1;
    assert_eq!(superblock.named_ahead(), 0);
}
