//! When a tier begins: also under clients that write past the log, and leave no moment in which nothing is under way.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::io::{Completion, Done, Nanos, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::local::format::{self, Layout};
use hdcs_core::local::map::Map;
use hdcs_core::local::{Action, Ask, Config, Event, LocalStore, TierState};

const BLOCKS: u64 = 64;
const BYTES: u64 = BLOCKS * BLOCK_BYTES as u64;
const HOME: u64 = 9;
/// Writes under way at all times.
const DEPTH: usize = 8;
const FLUSH: Token = Token(u64::MAX);

/// A write of one block, and in which step it was asked for and ended.
struct Written {
    block: u64,
    asked: u64,
    ended: Option<u64>,
}

/// A local store whose store and backend take one action in each step, in an order of their own. What gets to the
/// backend has to be durable in the store.
struct Rig {
    home: LocalStore,
    pool: Arc<Pool>,
    store: Vec<u8>,
    /// What of it a sync has made durable.
    durable: Vec<u8>,
    backend: Vec<u8>,
    actions: Vec<Action>,
    /// Writes to the backend that were looked at.
    seen: BTreeSet<u64>,
    /// Of the backend, so many actions in a row are not performed.
    backend_stalls: usize,
    random: fastrand::Rng,
    step: u64,
    /// By number; what a block holds is the number of the write, from 1 on.
    writes: Vec<Written>,
    flushes: usize,
}

impl Rig {
    fn new(seed: u64, backend_atomic: bool) -> Self {
        let config = Config {
            bytes: BYTES,
            volume: [7; 16],
            home: HOME,
            log: 1,
            sequence: 1,
            commits: 1,
            between: false,
            sums_log: 1,
            sums_bytes: 1 << 20,
            backend_atomic,
            flush_every_blocks: u64::MAX,
            data_key: [0; 16],
            turn_blocks: 1 << 20,
        };
        let pages =
            (0..format::pages(BYTES)).map(|page| Box::new(format::format_page(HOME, page, None)));
        Self {
            home: LocalStore::new(config, Map::load(pages.collect(), BLOCKS, 1, true), None),
            pool: Pool::new(4 << 20),
            store: vec![0; Layout::PLAIN.store_bytes(BYTES) as usize],
            durable: vec![0; Layout::PLAIN.store_bytes(BYTES) as usize],
            backend: vec![0; BYTES as usize],
            actions: Vec::new(),
            seen: BTreeSet::new(),
            backend_stalls: 0,
            random: fastrand::Rng::with_seed(seed),
            step: 0,
            writes: Vec::new(),
            flushes: 0,
        }
    }

    fn event(&mut self, event: Event) {
        let now = Nanos::from_millis(self.step);
        self.home.step(now, event, &mut self.actions);
        self.take_ends();
    }

    fn take_ends(&mut self) {
        for action in &self.actions {
            if let Action::BackendWrite {
                token,
                offset,
                data,
            } = action
                && self.seen.insert(token.0)
            {
                let at = Layout::PLAIN.data_offset(*offset) as usize;
                assert!(self.durable[at..at + data.len()] == **data);
            }
        }
        let (ends, others): (Vec<_>, Vec<_>) = core::mem::take(&mut self.actions)
            .into_iter()
            .partition(|action| matches!(action, Action::End(_)));
        self.actions = others;
        for action in ends {
            let Action::End(Completion { token, result }) = action else {
                continue;
            };
            result.unwrap();
            if token == FLUSH {
                self.flushes += 1;
            } else {
                self.writes[token.0 as usize - 1].ended = Some(self.step);
            }
        }
    }

    fn write(&mut self, block: u64) {
        let asked = self.step;
        let ended = None;
        self.writes.push(Written {
            block,
            asked,
            ended,
        });
        let number = self.writes.len() as u64;
        let mut data = self.pool.alloc(BLOCK_BYTES).unwrap();
        data.fill(0);
        data[..8].copy_from_slice(&number.to_le_bytes());
        let (token, offset) = (Token(number), block * BLOCK_BYTES as u64);
        let data = vec![data.freeze()];
        self.event(Event::Submit {
            token,
            ask: Ask::Write { offset, data },
        });
    }

    fn flush(&mut self) {
        let (token, ask) = (FLUSH, Ask::Flush);
        self.event(Event::Submit { token, ask });
    }

    /// Zero blocks; it ends as a flush does.
    fn zero(&mut self, blocks: core::ops::Range<u64>) {
        let (token, block) = (FLUSH, BLOCK_BYTES as u64);
        let (offset, bytes) = (blocks.start * block, (blocks.end - blocks.start) * block);
        let ask = Ask::Zero { offset, bytes };
        self.event(Event::Submit { token, ask });
    }

    /// Let time pass, with flushes, until `ends`.
    fn pass_until(&mut self, ends: impl Fn(&Self) -> bool) {
        for round in 0.. {
            if ends(self) {
                return;
            }
            assert!(round < 20_000, "never ends: {:?}", self.home.status());
            if round % 100 == 0 {
                self.flush();
            }
            self.pass();
        }
    }

    fn writes_under_way(&self) -> usize {
        let writes = self.writes.iter();
        writes.filter(|write| write.ended.is_none()).count()
    }

    /// Let the time of one step pass, in which one action is performed.
    fn pass(&mut self) {
        self.step += 1;
        let now = Nanos::from_millis(self.step);
        self.home.poll(now, &mut self.actions);
        self.take_ends();
        let is_of_backend = |action: &Action| {
            matches!(
                action,
                Action::BackendRead { .. }
                    | Action::BackendWrite { .. }
                    | Action::BackendZero { .. }
                    | Action::BackendFlush { .. }
            )
        };
        let stalls = self.backend_stalls > 0;
        self.backend_stalls = self.backend_stalls.saturating_sub(1);
        let ready: VecDeque<usize> = (0..self.actions.len())
            .filter(|&index| !(stalls && is_of_backend(&self.actions[index])))
            .collect();
        if ready.is_empty() {
            return;
        }
        let index = ready[self.random.usize(..ready.len())];
        let (token, done) = match self.actions.remove(index) {
            Action::StoreRead {
                token,
                offset,
                mut buf,
            } => {
                let at = offset as usize;
                let bytes = buf.len();
                buf.copy_from_slice(&self.store[at..at + bytes]);
                (token, Done::Read(buf))
            }
            Action::BackendRead {
                token,
                offset,
                mut buf,
            } => {
                let at = offset as usize;
                let bytes = buf.len();
                buf.copy_from_slice(&self.backend[at..at + bytes]);
                (token, Done::Read(buf))
            }
            Action::StoreWrite {
                token,
                offset,
                data,
            } => {
                put(&mut self.store, offset, &data);
                (token, Done::Written)
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                put(&mut self.backend, offset, &[data]);
                (token, Done::Written)
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
            } => {
                self.backend[offset as usize..][..bytes as usize].fill(0);
                (token, Done::Written)
            }
            Action::StoreSync { token } => {
                self.durable.clone_from(&self.store);
                (token, Done::Written)
            }
            Action::BackendFlush { token } => (token, Done::Written),
            other => panic!("not expected: {other:?}"),
        };
        let result = Ok(done);
        self.event(Event::Completed(Completion { token, result }));
    }

    /// The write that the backend has of a block; 0 for none.
    fn tiered(&self, block: u64) -> usize {
        let at = block as usize * BLOCK_BYTES;
        let number = self.backend[at..at + 8].try_into().unwrap();
        u64::from_le_bytes(number) as usize
    }

    /// Whether the backend has what was there at one moment, and everything that had ended before `step`.
    fn is_one_moment_after(&self, step: u64) -> bool {
        // Of each block, what is there was complete by then, and what came next was not.
        let (mut from, mut until) = (step, u64::MAX);
        for block in 0..BLOCKS {
            let tiered = self.tiered(block);
            let mut later = (tiered..self.writes.len()).filter(|&n| self.writes[n].block == block);
            if let Some(next) = later.next() {
                until = until.min(self.writes[next].ended.unwrap_or(u64::MAX));
            }
            if let Some(index) = tiered.checked_sub(1) {
                from = from.max(self.writes[index].asked);
            }
        }
        from <= until
    }
}

fn put(to: &mut [u8], offset: u64, data: &[Buf]) {
    let mut at = offset as usize;
    for part in data {
        to[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
}

/// Have writes under way at all times, and a flush now and then, until `ends`; the longest time in steps in which no
/// write has ended.
fn write_until(rig: &mut Rig, ends: impl Fn(&Rig) -> bool) -> u64 {
    let (mut longest, mut since, mut ended) = (0, rig.step, 0);
    for round in 1..20_000 {
        while rig.writes_under_way() < DEPTH {
            let block = rig.random.u64(..BLOCKS);
            rig.write(block);
        }
        if round % 100 == 0 {
            rig.flush();
        }
        rig.pass();
        let now_ended = rig.writes.len() - rig.writes_under_way();
        if now_ended > ended {
            (ended, since) = (now_ended, rig.step);
        }
        longest = longest.max(rig.step - since);
        if ends(rig) {
            return longest;
        }
    }
    panic!("never ends: {:?}", rig.home.status());
}

#[test]
fn tier_begins_and_ends_under_writes_that_never_pause() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, seed % 2 == 1);
        write_until(&mut rig, |rig| rig.flushes > 0);
        let asked = rig.step;
        rig.event(Event::Tier);
        let begins = |rig: &Rig| rig.home.status().tier != TierState::Waiting;
        let longest = write_until(&mut rig, begins);
        let waited = rig.step - asked;
        assert!(waited < 300, "seed {seed}: it begins after {waited} steps");
        assert!(
            longest < 50,
            "seed {seed}: no write ends in {longest} steps"
        );
        write_until(&mut rig, |rig| rig.home.status().tiers > 0);
        assert!(rig.is_one_moment_after(asked), "seed {seed}");
    }
}

/// A write that waits for the backend does not keep the others waiting for long, nor the flush.
#[test]
fn tier_that_waits_for_a_write_lets_the_others_go_on() {
    let mut rig = Rig::new(7, false);
    rig.backend_stalls = usize::MAX;
    let data = rig.pool.alloc(512).unwrap().freeze();
    let (token, offset) = (Token(1), 0);
    rig.writes.push(Written {
        block: 0,
        asked: 0,
        ended: None,
    });
    let data = vec![data];
    rig.event(Event::Submit {
        token,
        ask: Ask::Write { offset, data },
    });
    rig.write(3);
    rig.event(Event::Tier);
    while rig.writes_under_way() > 1 {
        rig.pass();
    }
    rig.flush();
    rig.write(5);
    let since = rig.step;
    while rig.flushes == 0 || rig.writes_under_way() > 1 {
        rig.pass();
        assert!(rig.step - since < 300, "{:?}", rig.home.status());
    }
    assert_eq!(rig.home.status().tier, TierState::Pausing);
    // The backend answers again: the next flush is the moment.
    rig.backend_stalls = 0;
    rig.event(Event::Tier);
    while rig.home.status().tiers == 0 {
        if rig.step.is_multiple_of(100) {
            rig.flush();
        }
        rig.pass();
        assert!(rig.step - since < 20_000, "{:?}", rig.home.status());
    }
}

#[test]
fn age_of_what_is_dirty_counts_from_the_first_write_and_then_from_the_last_tier() {
    let owed_since = |rig: &Rig| rig.home.status().owed_since;
    let mut rig = Rig::new(3, false);
    for _ in 0..10 {
        rig.pass();
    }
    assert_eq!(owed_since(&rig), None);
    rig.write(1);
    rig.pass_until(|rig| rig.writes_under_way() == 0);
    let first = owed_since(&rig).unwrap();
    assert!(first >= Nanos::from_millis(10));
    rig.write(2);
    rig.pass_until(|rig| rig.writes_under_way() == 0);
    assert_eq!(owed_since(&rig), Some(first));
    rig.event(Event::Tier);
    rig.pass_until(|rig| rig.home.status().tier == TierState::Copying);
    let copies = Nanos::from_millis(rig.step);
    rig.write(3);
    rig.pass_until(|rig| rig.home.status().tiers == 1);
    let second = owed_since(&rig).unwrap();
    assert!(first < second && second <= copies, "{first:?} {second:?}");
    rig.event(Event::Tier);
    rig.pass_until(|rig| rig.home.status().tiers == 2);
    assert_eq!(owed_since(&rig), None);
    // Zeroes are owed, too.
    rig.zero(3..4);
    rig.pass_until(|rig| rig.home.status().zero_bytes > 0);
    assert!(owed_since(&rig) > Some(copies));
}

#[test]
fn age_of_what_is_dirty_is_as_before_after_a_tier_that_did_not_end() {
    let mut rig = Rig::new(3, false);
    rig.write(1);
    rig.pass_until(|rig| rig.writes_under_way() == 0);
    let first = rig.home.status().owed_since;
    rig.event(Event::Tier);
    rig.pass_until(|rig| rig.home.status().tier == TierState::Copying);
    rig.event(Event::CancelTier);
    rig.pass();
    assert_eq!(rig.home.status().owed_since, first);
    assert!(first.is_some());
}

#[test]
fn progress_of_a_tier_counts_data_and_no_zeroes() {
    let block = BLOCK_BYTES as u64;
    let mut rig = Rig::new(5, false);
    rig.write(1);
    rig.write(2);
    rig.zero(8..40);
    rig.pass_until(|rig| rig.writes_under_way() == 0 && rig.home.status().zero_bytes == 32 * block);
    rig.event(Event::Tier);
    rig.pass_until(|rig| rig.home.status().tier == TierState::Copying);
    assert_eq!(rig.home.status().tier_bytes, 2 * block);
    rig.pass_until(|rig| rig.home.status().tiers == 1);
    let status = rig.home.status();
    assert_eq!(
        (status.tiered_bytes, status.tiered_zero_bytes),
        (2 * block, 32 * block)
    );
    assert_eq!((status.tier_bytes, status.tier_left_bytes), (0, 0));
}
