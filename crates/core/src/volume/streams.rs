//! What is worth caching: finds sequential streams among the reads of one volume.
//!
//! A stream that has gone on for longer than the cut-off stops filling the read cache, so that one
//! backup does not wash out what others use. A stream that is going on is read ahead of, in windows
//! that double. Random reads fill the cache and are never read ahead of.
//!
//! Invariants:
//! 1. Memory is fixed: [`STREAMS`] streams. Random reads take places from one another before
//!    they take one from a stream that has proved itself.
//! 2. What was advised is not advised again while its stream lives; advice is aligned to lines and
//!    ends at the volume's end.
//! 3. Requests of one stream may arrive somewhat out of order (a client with queue depth); its
//!    length is how far it has come, so that rereading a hot spot never looks like a stream.

use crate::base::io::SectorRange;
use crate::base::limits::{BLOCK_SECTORS, SECTOR_BYTES};

/// Streams that are followed at once.
pub const STREAMS: usize = 16;
/// How far from the expected place a read may be and still continue a stream: several requests of a
/// client with queue depth.
const SLACK_SECTORS: u64 = (1 << 20) / SECTOR_BYTES as u64;
/// The smallest read-ahead: below it, another request costs more than the bytes.
const WINDOW_SECTORS_MIN: u64 = (64 << 10) / SECTOR_BYTES as u64;
/// A stream that was silent for so many reads of the volume gives way to a new one.
const SILENT_READS_MAX: u64 = 4096;

/// What to look for, and where the volume ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamConfig {
    /// A stream longer than this stops filling the cache.
    pub sequential_cutoff_bytes: u64,
    /// The largest read-ahead; 0 turns it off.
    pub read_ahead_bytes_max: u64,
    /// Size of the volume, a multiple of 512.
    pub volume_bytes: u64,
    /// Blocks of one cache line.
    pub line_blocks: u64,
}

/// What to do with one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advice {
    /// Whether its data belongs in the read cache.
    pub fill: bool,
    /// What to fetch as well, beyond the read; starts on a line, ends on a line or at the volume's
    /// end. It is meant for DRAM when `fill` is false: it will be read once, soon.
    pub read_ahead: Option<SectorRange>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The sector after the furthest read; 0 is an unused place.
    next: u64,
    /// Length so far in sectors.
    run: u64,
    /// Reads that took it further, the first included.
    advances: u32,
    /// Everything below is advised already.
    advised: u64,
    /// The size of the next read-ahead in sectors.
    window: u64,
    /// When it was last read, in reads of the volume.
    seen: u64,
}

/// Finds the streams of one volume.
#[derive(Clone, Debug)]
pub struct StreamDetector {
    config: StreamConfig,
    streams: [Stream; STREAMS],
    reads: u64,
}

impl StreamDetector {
    /// A detector that knows of no stream.
    pub fn new(config: StreamConfig) -> Self {
        Self {
            config,
            streams: [Stream::default(); STREAMS],
            reads: 0,
        }
    }

    /// Change the limits or the volume's size; streams go on.
    pub fn reconfigure(&mut self, config: StreamConfig) {
        self.config = config;
    }

    /// Take note of one client read and say what to do with it.
    pub fn observe(&mut self, range: SectorRange) -> Advice {
        self.reads += 1;
        let none = Advice {
            fill: true,
            read_ahead: None,
        };
        if range.is_empty() {
            return none;
        }
        let Some(index) = self.continued_by(range) else {
            let index = self.place_for_new();
            self.streams[index] = Stream {
                next: range.end(),
                run: range.count,
                advances: 1,
                advised: 0,
                window: 0,
                seen: self.reads,
            };
            return none;
        };
        let stream = &mut self.streams[index];
        stream.seen = self.reads;
        if range.end() > stream.next {
            stream.run += range.end() - stream.next;
            stream.advances = stream.advances.saturating_add(1);
            stream.next = range.end();
        }
        let run_bytes = stream.run.saturating_mul(SECTOR_BYTES as u64);
        let is_stream = stream.advances > 1;
        Advice {
            fill: !is_stream || run_bytes <= self.config.sequential_cutoff_bytes,
            read_ahead: if is_stream {
                self.read_ahead(index, range.count)
            } else {
                None
            },
        }
    }

    /// The stream whose furthest place is nearest to the read, within the slack.
    fn continued_by(&self, range: SectorRange) -> Option<usize> {
        (0..STREAMS)
            .filter(|&index| self.streams[index].next != 0)
            .map(|index| (self.streams[index].next.abs_diff(range.start), index))
            .filter(|&(distance, index)| {
                // The first read says little; only its exact continuation makes it a stream.
                distance == 0 || (distance <= SLACK_SECTORS && self.streams[index].advances > 1)
            })
            .min()
            .map(|(_, index)| index)
    }

    fn place_for_new(&self) -> usize {
        let rank = |stream: &Stream| {
            let settled = stream.advances > 1 && self.reads - stream.seen <= SILENT_READS_MAX;
            (stream.next != 0, settled, stream.seen)
        };
        (0..STREAMS)
            .min_by_key(|&index| rank(&self.streams[index]))
            .unwrap_or(0)
    }

    fn read_ahead(&mut self, index: usize, request_sectors: u64) -> Option<SectorRange> {
        let line = self.config.line_blocks * BLOCK_SECTORS;
        let max = self.config.read_ahead_bytes_max / SECTOR_BYTES as u64 / line * line;
        if max == 0 {
            return None;
        }
        let stream = &mut self.streams[index];
        let window = stream
            .window
            .max(WINDOW_SECTORS_MIN)
            .max(2 * request_sectors)
            .next_multiple_of(line)
            .min(max);
        // Ask again when half of what was asked for is consumed, so that the next part arrives
        // before it is needed.
        if stream.advised > stream.next + window / 2 {
            return None;
        }
        let volume_end = self.config.volume_bytes / SECTOR_BYTES as u64;
        let start = stream.next.next_multiple_of(line).max(stream.advised);
        let end = (stream.next + window)
            .next_multiple_of(line)
            .max(start)
            .min(start + max)
            .min(volume_end);
        if start >= end {
            return None;
        }
        stream.window = (2 * window).min(max);
        stream.advised = end;
        Some(SectorRange::between(start, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: u64 = 32;

    fn detector(cutoff_bytes: u64, read_ahead_bytes_max: u64) -> StreamDetector {
        StreamDetector::new(StreamConfig {
            sequential_cutoff_bytes: cutoff_bytes,
            read_ahead_bytes_max,
            volume_bytes: 1 << 30,
            line_blocks: 4,
        })
    }

    #[test]
    fn streams_random_reads_fill_and_are_not_read_ahead() {
        let mut detector = detector(0, 1 << 20);
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..10_000 {
            // Reads four requests apart never touch.
            let range = SectorRange::new(random.u64(0..65_000) * 32, 8);
            let advice = detector.observe(range);
            assert!(advice.fill && advice.read_ahead.is_none());
        }
    }

    #[test]
    fn streams_rereading_one_place_is_no_stream() {
        let mut detector = detector(1 << 20, 1 << 20);
        for _ in 0..10_000 {
            let advice = detector.observe(SectorRange::new(800, 8));
            assert!(advice.fill && advice.read_ahead.is_none());
        }
    }

    #[test]
    fn streams_longer_than_the_cutoff_stop_filling() {
        let mut detector = detector(1 << 20, 0);
        for request in 0..512 {
            let advice = detector.observe(SectorRange::new(1024 + request * 8, 8));
            assert_eq!(advice.fill, request < 256, "request {request}");
            assert!(advice.read_ahead.is_none());
        }
        assert!(detector.observe(SectorRange::new(900_000, 8)).fill);
    }

    #[test]
    fn streams_are_followed_while_random_reads_interleave() {
        let mut detector = detector(1 << 20, 0);
        let mut random = fastrand::Rng::with_seed(2);
        for request in 0..512u64 {
            let advice = detector.observe(SectorRange::new(request * 8, 8));
            assert_eq!(advice.fill, request < 256, "request {request}");
            for _ in 0..10 {
                let range = SectorRange::new(100_000 + random.u64(0..60_000) * 32, 8);
                assert!(detector.observe(range).fill);
            }
        }
    }

    #[test]
    fn streams_old_ones_give_way() {
        let mut detector = detector(4096, 0);
        for stream in 0..STREAMS as u64 {
            let start = stream * 100_000;
            detector.observe(SectorRange::new(start, 8));
            detector.observe(SectorRange::new(start + 8, 8));
        }
        for _ in 0..2 * SILENT_READS_MAX {
            detector.observe(SectorRange::new(1_900_000, 8));
        }
        detector.observe(SectorRange::new(2_000_000, 8));
        assert!(!detector.observe(SectorRange::new(2_000_008, 8)).fill);
    }

    #[test]
    fn read_ahead_doubles_is_aligned_gapless_and_never_repeats() {
        for request_sectors in [1, 7, 8, 64, 2048] {
            let mut detector = detector(u64::MAX, 1 << 20);
            let (mut covered, mut largest, mut previous) = (None::<u64>, 0, 0);
            let mut start = 0;
            while start + request_sectors <= (1 << 30) / 512 / 4 {
                let range = SectorRange::new(start, request_sectors);
                let advice = detector.observe(range);
                if let Some(ahead) = advice.read_ahead {
                    assert!(ahead.start.is_multiple_of(LINE) && ahead.end().is_multiple_of(LINE));
                    assert!(ahead.bytes() <= 1 << 20);
                    if let Some(covered) = covered {
                        assert_eq!(ahead.start, covered.max(range.end().next_multiple_of(LINE)));
                    }
                    covered = Some(ahead.end());
                    assert!(ahead.count <= (2 * previous).max(4096), "grows by doubling");
                    previous = ahead.count;
                    largest = largest.max(ahead.bytes());
                } else if let Some(covered) = covered {
                    assert!(covered >= range.end(), "the stream ran out of read-ahead");
                }
                start += request_sectors;
            }
            assert!(largest >= 512 << 10, "{request_sectors}: largest {largest}");
        }
    }

    #[test]
    fn read_ahead_ends_with_the_volume() {
        let mut detector = detector(u64::MAX, 1 << 20);
        let end = (1 << 30) / 512 - 5;
        detector.reconfigure(StreamConfig {
            volume_bytes: end * 512,
            ..detector.config
        });
        let mut last = 0;
        for request in 0..32 {
            let range = SectorRange::new(end - 256 + request * 8, 8);
            if let Some(ahead) = detector.observe(range).read_ahead {
                assert!(ahead.end() <= end);
                last = ahead.end();
            }
        }
        assert_eq!(last, end);
    }

    #[test]
    fn streams_with_queue_depth_arrive_out_of_order() {
        let mut detector = detector(1 << 20, 1 << 20);
        let mut random = fastrand::Rng::with_seed(3);
        let (mut advised, mut unfilled) = (0, 0);
        for batch in 0..64u64 {
            let mut requests: [u64; 16] = core::array::from_fn(|i| batch * 16 + i as u64);
            random.shuffle(&mut requests[usize::from(batch == 0) * 8..]);
            for request in requests {
                let advice = detector.observe(SectorRange::new(request * 8, 8));
                advised += advice.read_ahead.map_or(0, |ahead| ahead.count);
                unfilled += u32::from(!advice.fill);
            }
        }
        assert!(unfilled > 700, "{unfilled} of 1024 past the cut-off");
        assert!(advised <= 1024 * 8 + 2048, "{advised} sectors advised");
    }
}
