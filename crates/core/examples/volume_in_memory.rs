//! The core in a program of one's own: a volume whose log and backend are two vectors, which writes, flushes, crashes and
//! replays. `cargo run -p hdcs-core --example volume_in_memory`
//!
//! [`Volume`] does no I/O: it takes events, and pushes actions that this driver performs. Nothing here is durable, and
//! every action ends at once, in order; the simulator in `testing/sim` is the same thing with time, disorder and faults.

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::buf::{Buf, BufMut, Pool};
use hdcs_core::base::codec::{Codec, Method};
use hdcs_core::base::io::{
    Action, Completion, Done, Nanos, Reply, Request, RequestId, SectorRange,
};
use hdcs_core::base::limits::{LOG_BLOCK_ENTRIES_MAX, LOG_BYTES_MIN};
use hdcs_core::cache::{CacheConfig, ReadCache};
use hdcs_core::volume::{
    Context, Discard, Event, LogFailure, Persist, Phase, Policy, Volume, VolumeConfig, WhenFull,
};

/// The volume's size in bytes.
const BYTES: usize = 16 << 20;

/// What a node keeps for its volumes, here for one.
struct Node {
    pool: Arc<Pool>,
    cache: ReadCache,
    log: Vec<u8>,
    backend: Vec<u8>,
    now: Nanos,
}

/// No compression.
#[derive(Debug)]
struct Plain;

impl Codec for Plain {
    fn compress(&self, _: Method, _: &[u8], _: &mut [u8]) -> Option<usize> {
        None
    }
    fn decompress(&self, _: Method, _: &[u8], _: &mut [u8]) -> bool {
        false
    }
}

fn config() -> VolumeConfig {
    VolumeConfig {
        number: 1,
        uuid: *b"an example alone",
        bytes: BYTES as u64,
        log_bytes: LOG_BYTES_MIN,
        policy: Policy::WriteBack,
        persist: Persist::OnWrite,
        compression: None,
        codec: &Plain,
        when_full: WhenFull::Wait,
        log_failure: LogFailure::ReadOnly,
        discard: Discard::Pass,
        unpersisted_bytes_max: 4 << 20,
        unpersisted_age_max: Nanos::from_millis(50),
        dirty_age_max: Nanos::from_millis(5_000),
        dirty_ratio_min: 30,
        dirty_ratio_max: 70,
        destage_depth_max: 16,
        sequential_cutoff_bytes: 4 << 20,
        promote_hits: 1,
        fill_rate_max_bytes_s: 1 << 30,
        read_ahead_bytes_max: 0,
        log_entries_max: LOG_BYTES_MIN / 4096 * LOG_BLOCK_ENTRIES_MAX,
        resident_bytes_max: 1 << 20,
        backend_extents: false,
        backend_atomic: false,
        backend_answer_max: Nanos::from_millis(5_000),
        log_answer_max: Nanos::from_millis(5_000),
    }
}

impl Node {
    fn new() -> Self {
        let pool = Pool::new(32 << 20);
        let cache = CacheConfig {
            dram_blocks: 256,
            ssd: None,
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        // Without an SSD tier the cache asks for nothing.
        let cache = ReadCache::new(cache, Nanos(0), Arc::clone(&pool), &mut Vec::new());
        let mut log = vec![0; LOG_BYTES_MIN as usize];
        log[..4096].copy_from_slice(&Volume::format_log(&config(), 4711));
        Self {
            pool,
            cache,
            log,
            backend: vec![0; BYTES],
            now: Nanos(1),
        }
    }

    /// Open the volume, which replays its log.
    fn open(&mut self) -> Volume {
        let mut actions = Vec::new();
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        let mut volume = Volume::open(config(), self.now, &mut context);
        drop(context);
        self.perform(&mut volume, actions);
        assert_eq!(volume.phase(), Phase::Open);
        volume
    }

    /// One event, the poll that ends every batch of events, and all that follows from them; the replies.
    fn step(&mut self, volume: &mut Volume, event: Event) -> Vec<Reply> {
        let mut actions = Vec::new();
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        volume.step(self.now, event, &mut context);
        volume.step(self.now, Event::Poll, &mut context);
        drop(context);
        self.perform(volume, actions)
    }

    /// Perform actions, and those that follow from their ends.
    fn perform(&mut self, volume: &mut Volume, actions: Vec<Action>) -> Vec<Reply> {
        let mut queue = VecDeque::from(actions);
        let mut replies = Vec::new();
        while let Some(action) = queue.pop_front() {
            self.now = self.now.plus(Nanos::from_micros(10));
            let (token, done) = match action {
                Action::LogRead {
                    token, offset, buf, ..
                } => (token, read(&self.log, offset, buf)),
                Action::LogWrite {
                    token,
                    offset,
                    data,
                    ..
                } => (token, write(&mut self.log, offset, &data)),
                Action::BackendRead { token, offset, buf } => {
                    (token, read(&self.backend, offset, buf))
                }
                Action::BackendWrite {
                    token,
                    offset,
                    data,
                } => (token, write(&mut self.backend, offset, &data)),
                Action::BackendFlush { token } => (token, Done::Written),
                Action::Reply { result, .. } => {
                    replies.push(result.expect("nothing fails here"));
                    continue;
                }
                Action::BackendUnsettled { .. } => continue,
                other => unreachable!("nothing here leads to {other:?}"),
            };
            let result = Ok(done);
            replies.extend(self.step(volume, Event::Completed(Completion { token, result })));
        }
        replies
    }

    fn ask(&mut self, volume: &mut Volume, request: Request) -> Reply {
        let id = RequestId(1);
        let mut replies = self.step(volume, Event::Request { id, request });
        while replies.is_empty() {
            // Whatever it waits for is due then.
            self.now = volume
                .next_wakeup()
                .expect("it waits for something")
                .max(self.now);
            replies = self.step(volume, Event::Poll);
        }
        replies.remove(0)
    }

    fn write(&mut self, volume: &mut Volume, range: SectorRange, byte: u8) {
        let mut data = self
            .pool
            .alloc_for(range)
            .expect("the pool is large enough");
        data.fill(byte);
        let data = data.freeze();
        self.ask(
            volume,
            Request::Write {
                range,
                data,
                fua: false,
            },
        );
    }

    fn read(&mut self, volume: &mut Volume, range: SectorRange) -> Buf {
        match self.ask(volume, Request::Read { range }) {
            Reply::Data(data) => data,
            other => unreachable!("a read is answered with {other:?}"),
        }
    }
}

fn read(device: &[u8], offset: u64, mut buf: BufMut) -> Done {
    let bytes = buf.len();
    buf.copy_from_slice(&device[offset as usize..][..bytes]);
    Done::Read(buf)
}

fn write(device: &mut [u8], mut offset: u64, data: &[Buf]) -> Done {
    for part in data {
        device[offset as usize..][..part.len()].copy_from_slice(part);
        offset += part.len() as u64;
    }
    Done::Written
}

fn main() {
    let range = SectorRange::new(8, 16);
    let mut node = Node::new();
    let mut volume = node.open();
    node.write(&mut volume, range, b'a');
    println!(
        "acknowledged: it is in the log; the backend has {:?}",
        node.backend[4096]
    );

    // A crash: nothing but the log is left of the volume.
    drop(volume);
    let mut volume = node.open();
    assert!(
        node.read(&mut volume, range)
            .iter()
            .all(|&byte| byte == b'a')
    );
    println!("replayed: it is still there");

    node.step(&mut volume, Event::DestageAll);
    while volume.stats(node.now).destage_all_remaining_bytes > 0 {
        node.now = volume.next_wakeup().expect("destage goes on").max(node.now);
        node.step(&mut volume, Event::Poll);
    }
    assert_eq!(
        node.backend[4096..4096 + range.bytes()],
        vec![b'a'; range.bytes()]
    );
    println!(
        "destaged: the backend has {:?}",
        char::from(node.backend[4096])
    );
}

#[test]
fn example_runs() {
    main();
}
