//! The log of a copy that was cut: what lies behind the cut is void, wherever it lies and whatever it says.

use std::collections::VecDeque;

use fastrand::Rng;
use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::OpenError;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_BYTES_MIN};
use hdcs_core::format::{CopyState, LOG_HEADER_BLOCKS, LOG_UNFLUSHED, LogSuperblock, Membership};
use hdcs_core::log::replay::{Found, Replay, SpanFound};
use hdcs_core::log::write_log::SpanWrite;
use hdcs_kit::copies::{cut, superblock, write_superblock};
use zerocopy::IntoBytes;

use super::evidence::Bench;

const REGION_BYTES: usize = LOG_BYTES_MIN as usize + RING_START;
const RING_START: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;

/// Where the spans lie that the log has in memory, and their checksums.
fn expected(bench: &Bench) -> Vec<(u64, u64, u64)> {
    let spans = bench.log.spans().iter();
    spans
        .map(|span| (span.position, span.end(), span.checksum))
        .collect()
}

/// The same of those that a replay finds.
fn found(bench: &Bench) -> Result<Vec<(u64, u64, u64)>, OpenError> {
    let spans = bench.spans()?.into_iter();
    Ok(spans
        .map(|span| (span.position, span.end(), span.checksum))
        .collect())
}

/// A log of spans with so many data blocks each, all durable.
fn bench(spans: &[usize]) -> Bench {
    let mut bench = Bench::new(REGION_BYTES);
    for &blocks in spans {
        bench.write_span(&[blocks]);
    }
    bench
}

/// Where the block at a position begins on the device.
fn place(bench: &Bench, position: u64) -> usize {
    RING_START + (position % bench.log.ring_blocks()) as usize * BLOCK_BYTES
}

/// Write large spans, of which few are not retired, until one ends behind this position.
fn fill_up_to(bench: &mut Bench, position: u64) {
    while bench.log.head() <= position {
        bench.write_span(&[256]);
        let spans = bench.log.spans().len();
        bench.retire(spans.saturating_sub(2));
    }
}

fn membership(bench: &Bench) -> Membership {
    let membership = superblock(&bench.device).membership();
    membership.expect("it was cut")
}

#[test]
fn span_at_the_cut_is_void() {
    let mut bench = bench(&[1, 2, 3]);
    let spans = expected(&bench);
    for kept in [2, 1, 0] {
        cut(&mut bench.device, spans[kept].0);
        assert_eq!(found(&bench).unwrap(), spans[..kept]);
    }
}

/// The span behind the cut does not lie there, but where the next lap of the ring begins.
#[test]
fn span_in_the_next_lap_is_void() {
    let mut bench = bench(&[]);
    let ring = bench.log.ring_blocks();
    fill_up_to(&mut bench, ring - 256);
    let at = bench.log.head();
    assert!(at < ring);
    let spans = expected(&bench);
    bench.write_span(&[256]);
    assert_eq!(bench.spans().unwrap().last().unwrap().position, ring);
    cut(&mut bench.device, at);
    assert_eq!(found(&bench).unwrap(), spans);
    // Another one takes its place, as far as it is written.
    bench.follow();
    let span = bench.append(255);
    assert_eq!(span.end, ring + 256);
    assert_eq!(found(&bench).unwrap(), spans);
    bench.write(&span);
    assert_eq!(found(&bench).unwrap(), expected(&bench));
}

/// A span that was cut off says that spans before it had been durable. Spans of later openings take their place, and are
/// not there after a crash.
#[test]
fn void_span_is_no_evidence() {
    let mut bench = bench(&[1; 8]);
    let kept = expected(&bench)[..2].to_vec();
    cut(&mut bench.device, kept[1].1);
    bench.follow();
    let lost = bench.append(3);
    assert_eq!(found(&bench).unwrap(), kept);
    // And the same with a later span there.
    let later = bench.append(1);
    bench.write(&later);
    assert_eq!(found(&bench).unwrap(), kept);
    bench.write(&lost);
    assert_eq!(found(&bench).unwrap(), expected(&bench));
}

/// What was written behind the cut since counts as it does everywhere, if the opening is as old as can be: but it was
/// written in any order, and is evidence only once the copy is whole.
#[test]
fn span_behind_the_cut_is_evidence_once_the_copy_is_whole() {
    let mut bench = bench(&[1; 8]);
    let at = expected(&bench)[1].1;
    cut(&mut bench.device, at);
    bench.follow();
    bench.write_span(&[1]);
    bench.write_span(&[1]);
    let spans = bench.spans().unwrap();
    let last = spans.last().unwrap();
    let void_before = membership(&bench).void_before;
    assert_eq!((last.durable, last.incarnation), (at + 2, void_before));
    let rotten = place(&bench, at) + 40;
    bench.device[rotten] ^= 1;
    assert_eq!(bench.spans().unwrap().len(), 2, "it was never there");
    let whole = Membership {
        is_whole: true,
        ..membership(&bench)
    };
    write_superblock(&mut bench.device, |superblock| {
        superblock.set_membership(whole);
    });
    let refused = OpenError::CorruptLog { position: at };
    assert_eq!(bench.replay(), Err(refused));
}

/// Nothing behind a cut proves it, so the superblock that cuts does.
#[test]
fn rot_before_the_cut_is_told() {
    let mut bench = bench(&[1; 8]);
    let spans = expected(&bench);
    cut(&mut bench.device, spans[3].1);
    let rotten = place(&bench, spans[3].0) + 40;
    bench.device[rotten] ^= 1;
    let position = spans[3].0;
    assert_eq!(bench.replay(), Err(OpenError::CorruptLog { position }));
    bench.device[rotten] ^= 1;
    // Of a span whose control part holds, its data alone is lost.
    bench.device[rotten + BLOCK_BYTES] ^= 1;
    let found = bench.spans().unwrap();
    let damaged: Vec<u32> = found.iter().map(|span| span.damaged_blocks).collect();
    assert_eq!(damaged, [0, 0, 0, 1]);
}

/// A volume's log says nothing else of its group than what it found.
#[test]
fn write_log_keeps_what_the_superblock_says_of_the_group() {
    let mut bench = bench(&[1; 4]);
    let at = expected(&bench)[1].1;
    cut(&mut bench.device, at);
    let said = membership(&bench);
    let both = |bench: &Bench| {
        [0, 1].map(|index| {
            let place = LogSuperblock::offset_of(index) as usize;
            let block = &bench.device[place..place + BLOCK_BYTES];
            LogSuperblock::parse(block).unwrap().membership()
        })
    };
    // A damaged span, so that the opening writes both.
    let damaged = place(&bench, 1) + 7;
    bench.device[damaged] ^= 1;
    bench.reopen();
    let (offset, block) = bench.log.superblocks_mut().beside_opening().unwrap();
    bench.device[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
    assert_eq!(both(&bench), [Some(said); 2]);
    bench.write_span(&[5]);
    bench.log.superblocks_mut().mark_unflushed(true);
    for is_clean in [false, true] {
        let tail = bench.log.tail_after(1);
        let (offset, block) = bench.log.superblock_for(&tail, is_clean);
        bench.device[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
        assert_eq!(superblock(&bench.device).membership(), Some(said));
    }
    let marks = superblock(&bench.device).flags.get();
    assert_eq!(marks & LOG_UNFLUSHED, LOG_UNFLUSHED);
    write_superblock(&mut bench.device, |next| {
        next.set_membership(Membership {
            is_whole: true,
            promised: 9,
            ..said
        });
    });
    bench.reopen();
    let said = membership(&bench);
    assert!(said.is_whole && said.promised == 9);
    bench.retire(0);
    assert_eq!(both(&bench), [Some(said); 2]);
}

/// Spans follow one another, and each is told before what it holds.
fn check_links(spans: &[SpanFound], ring_blocks: u64) {
    for span in spans {
        let lap = span.start.next_multiple_of(ring_blocks);
        assert!(span.position == span.start || span.position == lap);
        assert!(span.durable <= span.start && span.blocks > 0);
    }
    for pair in spans.windows(2) {
        assert_eq!(pair[1].start, pair[0].end());
        assert_eq!(pair[1].chain, pair[0].checksum);
        assert!(pair[1].incarnation >= pair[0].incarnation);
    }
}

/// A copy that nobody opens a volume on.
#[test]
fn replay_tells_spans_and_superblock_of_a_copy() {
    let mut bench = bench(&[1; 8]);
    bench.retire(2);
    let at = expected(&bench)[3].1;
    cut(&mut bench.device, at);
    let mut replay = Replay::new([7; 16], bench.device.len() as u64);
    let pool = Pool::new(8 << 20);
    let (mut spans, mut told, mut is_done) = (Vec::new(), Vec::new(), false);
    assert!(replay.superblock().is_none());
    while !is_done {
        let mut read = replay.next_read(&pool).unwrap();
        let bytes = read.buf.len();
        let from = read.offset as usize;
        read.buf.copy_from_slice(&bench.device[from..from + bytes]);
        let result = replay.read_done(Nanos(0), read.chunk, Ok(read.buf), |_, found| match found {
            Found::Span(span) => {
                told.push("span");
                spans.push(span);
            }
            Found::Entries(_) => told.push("entries"),
            Found::Record(_) => unreachable!("nothing writes one"),
            Found::Done => is_done = true,
        });
        result.unwrap();
    }
    assert_eq!(told, ["span", "entries"].repeat(4));
    check_links(&spans, bench.log.ring_blocks());
    let superblock = replay.superblock().unwrap();
    let tail = (superblock.tail.get(), superblock.tail_chain.get());
    assert_eq!((spans[0].start, spans[0].chain), tail);
    assert_eq!(spans.last().unwrap().end(), at);
    assert_eq!(superblock.known_head.get(), at);
    assert_eq!(superblock.membership().unwrap().cut_position, at);
}

/// A new copy takes the spans of another one, byte for byte, and superblocks of its own.
#[test]
fn copy_that_was_given_spans_opens_with_them() {
    let mut primary = bench(&[1, 2, 3]);
    primary.retire(1);
    primary.write_span(&[4]);
    let mut copy = Bench::new(REGION_BYTES);
    copy.device[..RING_START].fill(0);
    let first = LogSuperblock::new([7; 16], 99, REGION_BYTES as u64);
    let told = superblock(&primary.device);
    let mut state = CopyState {
        membership: Membership {
            promised: 1,
            cut_position: 0,
            void_before: 0,
            joined: 1,
            is_whole: true,
        },
        incarnation: told.incarnation.get(),
        tail: 0,
        tail_chain: 0,
        sync_points: 0,
        is_unflushed: false,
    };
    let put = |copy: &mut Bench, mut superblock: LogSuperblock| {
        superblock.seal();
        let at = LogSuperblock::offset_of(superblock.sequence.get()) as usize;
        copy.device[at..at + BLOCK_BYTES].copy_from_slice(superblock.as_bytes());
        superblock
    };
    let second = put(&mut copy, first.next_of_copy(&state));
    copy.device[RING_START..].copy_from_slice(&primary.device[RING_START..]);
    assert_eq!(copy.spans().unwrap().len(), 4);
    (state.tail, state.tail_chain) = (told.tail.get(), told.tail_chain.get());
    put(&mut copy, second.next_of_copy(&state));
    assert_eq!(copy.spans(), primary.spans());
    assert_eq!(copy.spans().unwrap().len(), 3);
}

/// A copy that is written, cut, and crashes, again and again.
struct Life {
    bench: Bench,
    rng: Rng,
}

impl Life {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut bench = bench(&[]);
        // Not far from where the next lap begins.
        let lap = bench.log.ring_blocks();
        fill_up_to(&mut bench, lap - rng.u64(300..900));
        Self { bench, rng }
    }

    /// Replay has to find just these spans.
    fn finds(&self, spans: &[(u64, u64, u64)], what: &str) {
        let told = self.bench.spans();
        if let Ok(told) = &told {
            check_links(told, self.bench.log.ring_blocks());
        }
        assert_eq!(found(&self.bench).as_deref(), Ok(spans), "{what}");
    }

    fn retires(&mut self) {
        let spans = self.bench.log.spans().len();
        let is_full = self.bench.log.used_blocks() > self.bench.log.ring_blocks() / 2;
        if spans > 0 && (is_full || self.rng.u8(..8) == 0) {
            let some = self.rng.usize(1..=spans);
            self.bench.retire(some);
        }
    }

    /// Several spans are under way, some of which are durable when others are sealed. At each step a crash is looked at.
    fn writes(&mut self) {
        let mut under_way: VecDeque<SpanWrite> = VecDeque::new();
        for _ in 0..self.rng.usize(1..8) {
            let blocks = [1, 1, 2, 7, 60, 256][self.rng.usize(..6)];
            let log = &self.bench.log;
            if log.has_room(blocks as u64, None) && !log.is_far_ahead(blocks as u64) {
                under_way.push_back(self.bench.append(blocks));
                if self.rng.bool() {
                    self.crashes(&under_way);
                }
            }
            for _ in 0..self.rng.usize(..3) {
                if let Some(span) = under_way.pop_front() {
                    self.bench.write(&span);
                    self.bench.end(&[span]);
                }
            }
        }
        if self.rng.bool() {
            // The crash stays.
            self.loses(&under_way);
            self.bench.reopen();
            return;
        }
        for span in under_way {
            self.bench.write(&span);
            self.bench.end(&[span]);
        }
    }

    /// If there were a crash now, what is durable would be found, and what follows of the rest.
    fn crashes(&mut self, under_way: &VecDeque<SpanWrite>) {
        let device = &self.bench.device;
        let places = under_way.iter().map(|span| {
            let bytes: usize = span.data.iter().map(|block| block.len()).sum();
            span.offset as usize..span.offset as usize + bytes
        });
        let before: Vec<_> = places.map(|at| (at.clone(), device[at].to_vec())).collect();
        let left = self.loses(under_way);
        self.finds(&left, "after a crash");
        for (place, bytes) in before {
            self.bench.device[place].copy_from_slice(&bytes);
        }
    }

    /// Some of what is under way is written, some is not, some is torn; the spans that are left.
    fn loses(&mut self, under_way: &VecDeque<SpanWrite>) -> Vec<(u64, u64, u64)> {
        let mut spans = expected(&self.bench);
        let mut is_whole = true;
        let mut left = spans.len() - under_way.len();
        for span in under_way {
            let fate = self.rng.u8(..3);
            let written = span.data.iter().flat_map(|block| block.iter().copied());
            let written: Vec<u8> = written.collect();
            let start = span.offset as usize;
            let end = start + written.len();
            let before = self.bench.device[start..end].to_vec();
            if fate > 0 {
                self.bench.write(span);
            }
            if fate == 1 {
                // All but one block, which is as it was.
                let block = self.rng.usize(..(end - start) / BLOCK_BYTES) * BLOCK_BYTES;
                self.bench.device[start + block..][..BLOCK_BYTES]
                    .copy_from_slice(&before[block..][..BLOCK_BYTES]);
            }
            is_whole &= self.bench.device[start..end] == written;
            left += usize::from(is_whole);
        }
        spans.truncate(left);
        spans
    }

    /// A primary has it cut where one of its spans ends, or at its tail.
    fn is_cut(&mut self) {
        let mut spans = expected(&self.bench);
        let most = if self.rng.u8(..8) == 0 {
            spans.len()
        } else {
            6
        };
        let gone = self.rng.usize(..=most.min(spans.len()));
        spans.truncate(spans.len() - gone);
        let tail = superblock(&self.bench.device).tail.get();
        cut(
            &mut self.bench.device,
            spans.last().map_or(tail, |last| last.1),
        );
        self.finds(&spans, "after a cut");
        // The next spans are of the first opening that counts, or of a later one.
        if self.rng.bool() {
            self.bench.follow();
        } else {
            self.bench.reopen();
        }
    }
}

/// Whatever was cut off and whatever crashed, a replay finds what is left, and takes nothing of it for rot.
#[test]
fn cut_log_is_found_as_it_was_left_whatever_crashes() {
    let (lives, mut laps) = (6, 0);
    for seed in 0..lives {
        let mut life = Life::new(seed);
        for _ in 0..40 {
            life.retires();
            life.writes();
            if life.rng.u8(..3) == 0 {
                life.is_cut();
            }
        }
        laps += life.bench.log.head() / life.bench.log.ring_blocks();
    }
    assert!(laps >= lives, "most have gone round the ring");
}
