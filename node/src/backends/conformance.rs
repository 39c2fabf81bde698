//! What every backend and every stack of filters must do, whatever it is made of.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use hdcs_core::buf::{Buf, Pool};
use hdcs_core::error::IoError;
use hdcs_core::io::{Completion, Done, Extent, ExtentState, Nanos, SectorRange, Token};

use super::{Absent, Ask, Operation, Port, Stack};
use crate::device::ring::{Finished, Owner, Ring, RingConfig};

/// Bytes of the backends under test: not a multiple of a block, on purpose.
pub const BYTES: u64 = (3 << 20) + 512;

/// A backend with the loop that a shard would be.
pub struct Bench {
    pub ring: Ring,
    pub stack: Stack,
    pub pool: Rc<Pool>,
    origin: Instant,
    next: u64,
    ended: HashMap<u64, Result<Done, IoError>>,
}

impl Bench {
    pub fn open(url: &str, bytes: u64, absent: Absent) -> Result<Self, super::BackendError> {
        Ok(Self {
            stack: super::open(url, bytes, absent)?.build(),
            ring: Ring::new(RingConfig::default()).unwrap(),
            pool: Pool::new(8 << 20),
            origin: Instant::now(),
            next: 0,
            ended: HashMap::new(),
        })
    }

    pub fn new(url: &str) -> Self {
        Self::open(url, BYTES, Absent::Create).unwrap()
    }

    fn now(&self) -> Nanos {
        Nanos(self.origin.elapsed().as_nanos() as u64)
    }

    fn call(&mut self, call: impl FnOnce(&mut Stack, Nanos, &mut Port<'_>)) {
        let now = self.now();
        let mut done = Vec::new();
        let mut port = Port {
            ring: &mut self.ring,
            owner: Owner::Backend(0),
            done: &mut done,
        };
        call(&mut self.stack, now, &mut port);
        for Completion { token, result } in done {
            assert!(self.ended.insert(token.0, result).is_none(), "ended twice");
        }
    }

    pub fn start(&mut self, ask: Ask) -> u64 {
        self.next += 1;
        let token = Token(self.next);
        self.call(|stack, now, port| stack.submit(now, Operation { token, ask }, port));
        token.0
    }

    /// One turn of the loop.
    pub fn turn(&mut self) {
        let until = self.stack.next_wakeup().map(|due| due.since(self.now()).0);
        let wait = Duration::from_nanos(until.unwrap_or(u64::MAX)).min(Duration::from_millis(20));
        self.ring.submit_and_wait(Some(wait)).unwrap();
        let mut finished = Vec::new();
        self.ring.reap(&mut finished);
        for Finished {
            owner,
            token,
            outcome,
        } in finished
        {
            if owner == Owner::Backend(0) {
                self.call(|stack, now, port| stack.completed(now, token, outcome, port));
            }
        }
        self.call(Stack::poll);
    }

    pub fn end(&mut self, id: u64) -> Result<Done, IoError> {
        let started = Instant::now();
        loop {
            if let Some(result) = self.ended.remove(&id) {
                return result;
            }
            assert!(started.elapsed() < Duration::from_secs(30), "never ended");
            self.turn();
        }
    }

    pub fn ask(&mut self, ask: Ask) -> Result<Done, IoError> {
        let id = self.start(ask);
        self.end(id)
    }

    pub fn has_ended(&self, id: u64) -> bool {
        self.ended.contains_key(&id)
    }

    /// A buffer placed as a volume's are.
    pub fn buf(&self, offset: u64, content: &[u8]) -> Buf {
        let range = SectorRange::new(offset / 512, content.len() as u64 / 512);
        let mut buf = self.pool.alloc_for(range).unwrap();
        buf.copy_from_slice(content);
        buf.freeze()
    }

    pub fn write(&mut self, offset: u64, content: &[u8]) -> Result<(), IoError> {
        let data = vec![self.buf(offset, content)];
        self.ask(Ask::Write { offset, data }).map(drop)
    }

    pub fn read(&mut self, offset: u64, bytes: usize) -> Result<Vec<u8>, IoError> {
        let range = SectorRange::new(offset / 512, bytes as u64 / 512);
        let buf = self.pool.alloc_for(range).unwrap();
        match self.ask(Ask::Read { offset, buf })? {
            Done::Read(buf) => Ok(buf.to_vec()),
            other => panic!("a read ended in {other:?}"),
        }
    }

    pub fn extents(&mut self, range: SectorRange) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        let mut at = range.start;
        while at < range.end() {
            let rest = SectorRange::between(at, range.end());
            let Ok(Done::Extents(found)) = self.ask(Ask::Extents { range: rest }) else {
                panic!("extents failed");
            };
            assert!(!found.is_empty());
            for extent in found {
                assert_eq!(extent.range.start, at, "runs are consecutive");
                assert!(!extent.range.is_empty() && extent.range.end() <= range.end());
                at = extent.range.end();
                runs.push(extent);
            }
        }
        runs
    }
}

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(1..))
        .take(bytes)
        .collect()
}

/// The suite. `make` opens a new backend of [`BYTES`] bytes, or, with the path of an earlier call
/// to it, the same one again.
pub fn conformance(make: impl Fn(&std::path::Path) -> Bench) {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = make(directory.path());
    reads_what_was_written(&mut bench);
    zeroes_are_zero(&mut bench);
    many_at_once(&mut bench);
    extents_tell_the_truth(&mut bench);
    resizes(&mut bench);
    assert_eq!(bench.stack.under_way(), 0);
    let pool = Rc::clone(&bench.pool);
    bench.write(8192, &noise(77, 4096)).unwrap();
    bench.ask(Ask::Flush).unwrap();
    drop(bench);
    assert_eq!(pool.free_bytes(), pool.total_bytes(), "buffers came back");
    let mut again = make(directory.path());
    assert_eq!(again.read(8192, 4096).unwrap(), noise(77, 4096));
}

fn reads_what_was_written(bench: &mut Bench) {
    assert_eq!(
        bench.read(0, 1 << 20).unwrap(),
        vec![0; 1 << 20],
        "new is zero"
    );
    let cases = [
        (0, 512),
        (512, 512),
        (3584, 1024),
        (4096, 4096),
        (5120, 8192),
        (BYTES - 512, 512),
    ];
    for (seed, (offset, bytes)) in cases.into_iter().enumerate() {
        let content = noise(seed as u64, bytes);
        bench.write(offset, &content).unwrap();
        assert_eq!(bench.read(offset, bytes).unwrap(), content);
    }
    let large = noise(9, 1 << 20);
    bench.write(1 << 20, &large).unwrap();
    assert_eq!(bench.read(1 << 20, 1 << 20).unwrap(), large);
    // More buffers than one system call takes.
    let piece = bench.buf(0, &noise(10, 512));
    let data = vec![piece.clone(); 1500];
    bench.ask(Ask::Write { offset: 512, data }).unwrap();
    assert_eq!(bench.read(512, 1500 * 512).unwrap(), piece.repeat(1500));
}

fn zeroes_are_zero(bench: &mut Bench) {
    let content = noise(20, 1 << 20);
    for unmap in [true, false] {
        for (offset, bytes) in [(512u64, 1024u64), (4096, 8192), (1024, 700 * 512), (0, 0)] {
            bench.write(0, &content).unwrap();
            bench
                .ask(Ask::Zero {
                    offset,
                    bytes,
                    unmap,
                })
                .unwrap();
            let mut expected = content.clone();
            expected[offset as usize..(offset + bytes) as usize].fill(0);
            assert!(
                bench.read(0, 1 << 20).unwrap() == expected,
                "{offset} {bytes} {unmap}"
            );
        }
        bench.write(BYTES - 512, &noise(21, 512)).unwrap();
        bench
            .ask(Ask::Zero {
                offset: 0,
                bytes: BYTES,
                unmap,
            })
            .unwrap();
        assert_eq!(bench.read(BYTES - 512, 512).unwrap(), vec![0; 512]);
    }
}

fn many_at_once(bench: &mut Bench) {
    let mut random = fastrand::Rng::with_seed(5);
    let mut order: Vec<u64> = (0..256).collect();
    random.shuffle(&mut order);
    let ids: Vec<u64> = order
        .iter()
        .map(|&block| {
            let data = vec![bench.buf(block * 4096, &noise(block, 4096))];
            bench.start(Ask::Write {
                offset: block * 4096,
                data,
            })
        })
        .collect();
    for id in ids {
        bench.end(id).unwrap();
    }
    bench.ask(Ask::Flush).unwrap();
    for block in 0..256 {
        assert_eq!(bench.read(block * 4096, 4096).unwrap(), noise(block, 4096));
    }
}

fn extents_tell_the_truth(bench: &mut Bench) {
    bench
        .ask(Ask::Zero {
            offset: 0,
            bytes: BYTES,
            unmap: true,
        })
        .unwrap();
    bench.write(1 << 20, &noise(30, 4096)).unwrap();
    bench.ask(Ask::Flush).unwrap();
    for range in [SectorRange::new(0, BYTES / 512), SectorRange::new(2047, 3)] {
        for extent in bench.extents(range) {
            if extent.state == ExtentState::Data {
                continue;
            }
            assert!(
                !extent.range.overlaps(SectorRange::new(2048, 8)),
                "a hole over data"
            );
        }
    }
}

fn resizes(bench: &mut Bench) {
    bench.write(BYTES - 512, &noise(40, 512)).unwrap();
    for bytes in [BYTES + (1 << 20), BYTES] {
        bench.ask(Ask::Resize { bytes }).unwrap();
        bench.stack.resized(bytes);
    }
    assert_eq!(bench.read(BYTES - 512, 512).unwrap(), noise(40, 512));
    bench.ask(Ask::Resize { bytes: 1 << 20 }).unwrap();
    bench.ask(Ask::Resize { bytes: BYTES }).unwrap();
    bench.stack.resized(BYTES);
    assert_eq!(
        bench.read(BYTES - 512, 512).unwrap(),
        vec![0; 512],
        "cut off is gone"
    );
}

fn url(directory: &std::path::Path, options: &str) -> String {
    format!("file:{}/image?{options}", directory.display())
}

fn reopen(directory: &std::path::Path, options: &str) -> Bench {
    Bench::new(&url(directory, options))
}

mod cases {
    use super::*;

    #[test]
    fn file_direct() {
        conformance(|directory| reopen(directory, ""));
    }

    #[test]
    fn file_buffered() {
        conformance(|directory| reopen(directory, "direct=off"));
    }

    #[test]
    fn delay() {
        conformance(|directory| reopen(directory, "delay_us=50&delay_jitter_us=100"));
    }

    #[test]
    fn rate() {
        conformance(|directory| reopen(directory, "rate_mib=2000"));
    }

    #[test]
    fn error_at_rest() {
        conformance(|directory| reopen(directory, "error_rate=0&error_kind=hang"));
    }

    #[test]
    fn everything_stacked() {
        conformance(|directory| {
            let log = directory.join("log");
            let options = format!(
                "delay_us=20&rate_mib=4000&error_file=/nonexistent/file&log={}",
                log.display()
            );
            reopen(directory, &options)
        });
    }
}
