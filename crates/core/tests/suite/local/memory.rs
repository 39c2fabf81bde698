//! What memory a local store has is shared so that nobody waits for ever: neither a tier nor a flush beside reads that
//! are of local store and backend both and want more memory than there is.

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::{Completion, Done, Nanos, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, HOME_POOL_BYTES, HOME_READ_POOL_BYTES};
use hdcs_core::local::format;
use hdcs_core::local::map::Map;
use hdcs_core::local::{Action, Ask, Config, Event, LocalStore};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// The local store has the first of so many blocks; of those behind them it has every other run of [`RUN`] blocks.
const LARGE: u64 = 256;
const RUN: u64 = 8;
const BLOCKS: u64 = 4096;
const HOME: u64 = 9;
/// Reads under way at all times: their pieces are of twice as much memory as there is for everything.
const READS: usize = 2 * (HOME_POOL_BYTES + HOME_READ_POOL_BYTES) / (RUN as usize * BLOCK_BYTES);
const NOW: Nanos = Nanos(1);

/// A local store whose store and backend keep nothing, and end actions in the order in which they began.
struct Rig {
    home: LocalStore,
    pool: Arc<Pool>,
    actions: VecDeque<Action>,
    ended: Vec<Token>,
    next_token: u64,
    reads: u64,
    random: fastrand::Rng,
}

impl Rig {
    fn new() -> Self {
        let bytes = BLOCKS * BLOCK;
        let config = Config {
            bytes,
            volume: [7; 16],
            home: HOME,
            log: 1,
            data_key: [0; 16],
            sequence: 1,
            commits: 1,
            between: false,
            sums_log: 1,
            sums_bytes: 1 << 20,
            backend_atomic: false,
            flush_every_blocks: u64::MAX,
            turn_blocks: 1 << 20,
        };
        let pages =
            (0..format::pages(bytes)).map(|page| Box::new(format::format_page(HOME, page, None)));
        Self {
            home: LocalStore::new(config, Map::load(pages.collect(), BLOCKS, 1, true), None),
            pool: Pool::new(256 << 20),
            actions: VecDeque::new(),
            ended: Vec::new(),
            next_token: 0,
            reads: 0,
            random: fastrand::Rng::with_seed(3),
        }
    }

    fn event(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.home.step(NOW, event, &mut actions);
        for action in actions {
            match action {
                Action::End(Completion { token, result }) => {
                    let done = result.expect("nothing fails");
                    self.reads -= u64::from(matches!(done, Done::Read(_)));
                    self.ended.push(token);
                }
                other => self.actions.push_back(other),
            }
        }
    }

    fn ask(&mut self, ask: Ask) -> Token {
        self.next_token += 1;
        let token = Token(self.next_token);
        self.event(Event::Submit { token, ask });
        token
    }

    fn write(&mut self, block: u64, blocks: u64) -> Token {
        let mut buf = self.pool.alloc((blocks * BLOCK) as usize).unwrap();
        buf.fill(0);
        let (offset, data) = (block * BLOCK, vec![buf.freeze()]);
        self.ask(Ask::Write { offset, data })
    }

    /// Let everything end that is under way.
    fn settle(&mut self) {
        while !self.actions.is_empty() {
            self.act();
        }
    }

    /// The first action ends.
    fn act(&mut self) {
        let (token, done) = match self.actions.pop_front().expect("something is under way") {
            Action::StoreRead { token, mut buf, .. }
            | Action::BackendRead { token, mut buf, .. } => {
                // Checksums are of zeroes, those that were never written of nothing.
                buf.fill(0);
                (token, Done::Read(buf))
            }
            Action::StoreWrite { token, .. }
            | Action::StoreSync { token }
            | Action::BackendWrite { token, .. }
            | Action::BackendFlush { token } => (token, Done::Written),
            other => panic!("not expected: {other:?}"),
        };
        let result = Ok(done);
        self.event(Event::Completed(Completion { token, result }));
    }

    /// Have reads under way at all times while one action after the other ends, until `ends`; how many there were.
    fn read_until(&mut self, ends: impl Fn(&Self) -> bool) -> usize {
        for step in 0..50_000 {
            while (self.reads as usize) < READS {
                self.reads += 1;
                let block = LARGE + 2 * RUN * self.random.u64(..(BLOCKS - LARGE) / (2 * RUN));
                let buf = self.pool.alloc(2 * RUN as usize * BLOCK_BYTES).unwrap();
                let offset = block * BLOCK;
                self.ask(Ask::Read { offset, buf });
            }
            if ends(self) {
                return step;
            }
            self.act();
        }
        panic!("it waits for ever: {:?}", self.home.status());
    }
}

#[test]
fn tier_and_flush_end_beside_reads_that_want_all_memory() {
    let mut rig = Rig::new();
    rig.write(0, LARGE);
    for block in (LARGE..BLOCKS).step_by(2 * RUN as usize) {
        rig.write(block, RUN);
    }
    rig.settle();
    rig.ask(Ask::Flush);
    rig.settle();
    rig.read_until(|rig| rig.next_token > 10_000);
    rig.event(Event::Tier);
    let tier = rig.read_until(|rig| rig.home.status().tiers > 0);
    let write = rig.write(1, 1);
    rig.read_until(|rig| rig.ended.contains(&write));
    let flush = rig.ask(Ask::Flush);
    let flushed = rig.read_until(|rig| rig.ended.contains(&flush));
    // Each of their actions waits for the reads that are under way, and for nothing else.
    assert!(tier < 400 * READS, "the tier takes {tier} steps");
    assert!(flushed < 20 * READS, "the flush takes {flushed} steps");
}
