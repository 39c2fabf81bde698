//! Local stores that get another size: what pages of the map that were cut off say never comes back, what is cut off is
//! not touched, and an atomic backend is not resized with a part of a tier.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Nanos, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_core::local::format::{
    self, FoundPage, HOME_BETWEEN, HomePage, HomeSuperblock, Layout, MapCheck, PAGE_BLOCKS,
    SUMS_UNTRUSTED, choose_page,
};
use hdcs_core::local::map::{BlockState, Map};
use hdcs_core::local::{Action, Ask, Config, Event, LocalStore, TierState};
use zerocopy::IntoBytes;

const BLOCK: u64 = BLOCK_BYTES as u64;
const UUID: [u8; 16] = [7; 16];
const HOME: u64 = 99;
const LOG: u64 = 5;

/// Sectors that were written.
#[derive(Clone, Default)]
struct Sectors(BTreeMap<u64, Vec<u8>>);

impl Sectors {
    fn read(&self, offset: u64, data: &mut [u8]) {
        for (number, sector) in (offset / SECTOR_BYTES as u64..).zip(data.chunks_mut(SECTOR_BYTES))
        {
            match self.0.get(&number) {
                Some(written) => sector.copy_from_slice(written),
                None => sector.fill(0),
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (number, sector) in (offset / SECTOR_BYTES as u64..).zip(data.chunks(SECTOR_BYTES)) {
            self.0.insert(number, sector.to_vec());
        }
    }

    fn two_blocks(&self, offset: u64) -> [Vec<u8>; 2] {
        [0, BLOCK].map(|at| {
            let mut block = vec![0; BLOCK_BYTES];
            self.read(offset + at, &mut block);
            block
        })
    }
}

/// A local store on a device, which keeps what was cut off, and a backend in memory. Actions are performed in order.
struct Rig {
    home: LocalStore,
    store: Sectors,
    backend: Sectors,
    backend_bytes: u64,
    backend_atomic: bool,
    flush_every_blocks: u64,
    actions: VecDeque<Action>,
    ended: Vec<Completion>,
    /// What the store and the backend were asked to be resized to.
    resized: Vec<(&'static str, u64)>,
    /// Whether these fail.
    store_fails: bool,
    backend_fails: bool,
    pool: Arc<Pool>,
    next_token: u64,
}

fn superblock(store: &Sectors) -> HomeSuperblock {
    let [one, two] = store.two_blocks(0);
    HomeSuperblock::newest([&one, &two]).unwrap()
}

/// The pages of a local store, and what its superblock says of them.
fn map_of(store: &Sectors, superblock: &HomeSuperblock) -> (Vec<FoundPage>, MapCheck) {
    let mut check = MapCheck::new(superblock);
    let pages = (0..format::pages(superblock.bytes.get())).map(|page| {
        let [one, two] = store.two_blocks(Layout::PLAIN.page_offset(page, 0));
        let found = choose_page([&one, &two], HOME, page, None).unwrap();
        check.add(&found);
        found
    });
    (pages.collect(), check)
}

fn open(store: &mut Sectors, backend_atomic: bool, flush_every_blocks: u64) -> LocalStore {
    let mut superblock = superblock(store);
    let (pages, check) = map_of(store, &superblock);
    check.end().unwrap();
    for found in &pages {
        if let Some(copy) = found.repair {
            let place = Layout::PLAIN.page_offset(found.page.page.get(), copy);
            store.write(place, found.page.as_bytes());
        }
    }
    if let Some(begun) = superblock.begin(LOG, true, &check, None) {
        store.write(begun.place(), begun.as_bytes());
        superblock = begun;
    }
    let bytes = superblock.bytes.get();
    let pages = pages.into_iter().map(|found| found.page);
    let map = Map::load(pages.collect(), bytes / BLOCK, LOG, true);
    let config = Config {
        bytes,
        volume: UUID,
        home: HOME,
        log: LOG,
        data_key: [0; 16],
        sequence: superblock.sequence.get(),
        commits: superblock.commits.get(),
        between: false,
        sums_log: superblock.sums_log.get(),
        sums_bytes: 1 << 20,
        backend_atomic,
        flush_every_blocks,
        turn_blocks: 1000,
    };
    LocalStore::new(config, map, None)
}

impl Rig {
    /// A new local store of so many blocks.
    fn new(blocks: u64, backend_atomic: bool) -> Self {
        Self::with_flushes(blocks, backend_atomic, 1 << 20)
    }

    /// The same, whose tiers flush the backend after so many blocks, unless they show as a whole.
    fn with_flushes(blocks: u64, backend_atomic: bool, flush_every_blocks: u64) -> Self {
        let mut store = Sectors::default();
        store.write(
            0,
            &format::format_head(UUID, HOME, blocks * BLOCK, [0; 16], None),
        );
        for page in 0..format::pages(blocks * BLOCK) {
            for copy in [0, 1] {
                let empty = format::format_page(HOME, page, None);
                store.write(Layout::PLAIN.page_offset(page, copy), empty.as_bytes());
            }
        }
        Self {
            home: open(&mut store, backend_atomic, flush_every_blocks),
            store,
            backend: Sectors::default(),
            backend_bytes: blocks * BLOCK,
            backend_atomic,
            flush_every_blocks,
            actions: VecDeque::new(),
            ended: Vec::new(),
            resized: Vec::new(),
            store_fails: false,
            backend_fails: false,
            pool: Pool::new(16 << 20),
            next_token: 0,
        }
    }

    fn open_again(&mut self) {
        let every = self.flush_every_blocks;
        self.home = open(&mut self.store, self.backend_atomic, every);
        self.actions.clear();
    }

    fn event(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.home.step(Nanos(0), event, &mut actions);
        self.take(actions);
    }

    /// What has ended is taken at once.
    fn take(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::End(completion) => self.ended.push(completion),
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

    fn poll(&mut self) {
        let mut actions = Vec::new();
        self.home.poll(Nanos(0), &mut actions);
        self.take(actions);
    }

    /// Perform the first action; false if there is none, and no turn is due.
    fn act(&mut self) -> bool {
        let Some(action) = self.actions.pop_front() else {
            // Time does not pass here.
            let is_due = self.home.next_wakeup() == Some(Nanos(0));
            if is_due {
                self.poll();
            }
            return is_due;
        };
        let (token, result) = match action {
            Action::StoreRead {
                token,
                offset,
                mut buf,
            } => {
                self.store.read(offset, &mut buf);
                (token, Ok(Done::Read(buf)))
            }
            Action::StoreWrite {
                token,
                offset,
                data,
            } => {
                let mut at = offset;
                for buf in data {
                    self.store.write(at, &buf);
                    at += buf.len() as u64;
                }
                (token, Ok(Done::Written))
            }
            Action::BackendRead {
                token,
                offset,
                mut buf,
            } => {
                assert!(offset + buf.len() as u64 <= self.backend_bytes);
                self.backend.read(offset, &mut buf);
                (token, Ok(Done::Read(buf)))
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                assert!(offset + data.len() as u64 <= self.backend_bytes);
                self.backend.write(offset, &data);
                (token, Ok(Done::Written))
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
            } => {
                self.backend.write(offset, &vec![0; bytes as usize]);
                (token, Ok(Done::Written))
            }
            Action::StoreSync { token } | Action::BackendFlush { token } => {
                (token, Ok(Done::Written))
            }
            Action::StoreResize { token, bytes } => {
                self.resized.push(("store", bytes));
                let failed = self.store_fails.then_some(IoError::NoSpace);
                (token, failed.map_or(Ok(Done::Written), Err))
            }
            Action::BackendResize { token, bytes } => {
                self.resized.push(("backend", bytes));
                // Store and backend never have less than the superblock says.
                assert!(superblock(&self.store).bytes.get() <= bytes);
                if self.backend_fails {
                    (token, Err(IoError::Unreachable))
                } else {
                    self.backend.0.split_off(&(bytes / SECTOR_BYTES as u64));
                    self.backend_bytes = bytes;
                    (token, Ok(Done::Written))
                }
            }
            other => panic!("not expected: {other:?}"),
        };
        self.event(Event::Completed(Completion { token, result }));
        true
    }

    /// Go on until such an action is next.
    fn go_to(&mut self, is_it: impl Fn(&Action) -> bool) {
        while !self.actions.front().is_some_and(&is_it) {
            assert!(self.act());
        }
    }

    fn settle(&mut self) {
        while self.act() {}
    }

    fn end_of(&mut self, token: Token) -> Option<Result<Done, IoError>> {
        let index = self.ended.iter().position(|ended| ended.token == token)?;
        Some(self.ended.remove(index).result)
    }

    fn resize(&mut self, blocks: u64) -> Result<(), IoError> {
        let bytes = blocks * BLOCK;
        let token = self.ask(Ask::Resize { bytes });
        self.settle();
        self.end_of(token).expect("it ends").map(drop)
    }

    fn write(&mut self, block: u64, byte: u8) -> Token {
        let mut buf = self.pool.alloc(BLOCK_BYTES).unwrap();
        buf.fill(byte);
        let data = vec![buf.freeze()];
        let offset = block * BLOCK;
        self.ask(Ask::Write { offset, data })
    }

    fn flush(&mut self) {
        self.settle();
        let token = self.ask(Ask::Flush);
        self.settle();
        assert!(self.end_of(token).unwrap().is_ok());
    }

    fn read(&mut self, block: u64) -> u8 {
        let buf = self.pool.alloc(BLOCK_BYTES).unwrap();
        let offset = block * BLOCK;
        let token = self.ask(Ask::Read { offset, buf });
        self.settle();
        match self.end_of(token) {
            Some(Ok(Done::Read(buf))) => {
                assert!(buf.iter().all(|byte| *byte == buf[0]));
                buf[0]
            }
            other => panic!("{other:?}"),
        }
    }

    fn blocks(&self) -> u64 {
        let status = self.home.status();
        assert_eq!(superblock(&self.store).bytes.get(), status.bytes);
        let all = status.dirty_bytes + status.zero_bytes + status.clean_bytes + status.absent_bytes;
        assert_eq!(all, status.bytes);
        status.bytes / BLOCK
    }
}

fn is_copy(action: &Action) -> bool {
    matches!(action, Action::BackendWrite { .. })
}

/// Over several pages of the map, and opened anew after each change.
#[test]
fn home_that_shrinks_and_grows_reads_zeroes_where_it_was_cut() {
    let (small, large) = (PAGE_BLOCKS - 9, 3 * PAGE_BLOCKS + 5);
    let mut rig = Rig::new(small, false);
    for reopens in [false, true] {
        let written = [
            3,
            small - 1,
            small,
            PAGE_BLOCKS,
            2 * PAGE_BLOCKS + 7,
            large - 1,
        ];
        rig.resize(large).unwrap();
        assert_eq!(rig.blocks(), large);
        for block in written {
            let expected = u8::from(block < small && reopens);
            assert_eq!(rig.read(block), expected, "block {block}");
        }
        for block in written {
            rig.write(block, 1);
        }
        rig.flush();
        rig.event(Event::Tier);
        rig.settle();
        assert_eq!(rig.home.status().dirty_bytes, 0);
        rig.write(large - 2, 2);
        rig.write(small + 1, 2);
        rig.flush();
        rig.resized.clear();
        rig.resize(small).unwrap();
        assert_eq!(rig.blocks(), small);
        let bytes = small * BLOCK;
        let store = Layout::PLAIN.store_bytes(bytes);
        assert_eq!(rig.resized, [("backend", bytes), ("store", store)]);
        if reopens {
            rig.open_again();
        }
        assert_eq!((rig.read(3), rig.read(small - 1)), (1, 1));
    }
}

/// A page says of blocks behind the end what they were before an interrupted shrink. It is written anew before a
/// superblock is larger, or it would say so again.
#[test]
fn home_that_grows_has_made_its_last_page_durable_before() {
    let blocks = 100;
    let mut rig = Rig::new(blocks, false);
    rig.write(50, 1);
    rig.write(90, 1);
    rig.flush();
    rig.settle();
    // The shrink came as far as its superblock.
    let found = superblock(&rig.store);
    let cut = HomeSuperblock::sealed(
        UUID,
        HOME,
        found.sequence.get() + 1,
        60 * BLOCK,
        0,
        found.sums_log.get(),
    );
    let cut = cut.counting(found.commits.get(), found.map_digest.get());
    rig.store.write(cut.place(), cut.as_bytes());
    rig.open_again();
    assert_eq!(rig.home.status().dirty_bytes, BLOCK);
    let token = rig.ask(Ask::Resize {
        bytes: blocks * BLOCK,
    });
    // At every step that a crash may leave.
    while rig.act() {
        let home = open(&mut rig.store.clone(), false, 1 << 20);
        assert_eq!(home.state_of(50, 51).0, BlockState::Dirty);
        assert_eq!(home.status().dirty_bytes, BLOCK, "what was cut off is back");
    }
    assert!(rig.end_of(token).unwrap().is_ok());
    assert_eq!((rig.blocks(), rig.read(50), rig.read(90)), (100, 1, 0));
}

#[test]
fn home_waits_for_what_is_written_beyond_its_new_end_and_takes_no_more_of_it() {
    let mut rig = Rig::new(100, false);
    let before = rig.write(80, 1);
    let resize = rig.ask(Ask::Resize { bytes: 60 * BLOCK });
    let (beyond, below) = (rig.write(60, 1), rig.write(59, 1));
    assert_eq!(rig.end_of(beyond).unwrap().unwrap_err(), IoError::Failed);
    assert_eq!(superblock(&rig.store).bytes.get(), 100 * BLOCK);
    rig.settle();
    for token in [before, below, resize] {
        assert_eq!(rig.end_of(token).map(|end| end.is_ok()), Some(true));
    }
    assert_eq!((rig.blocks(), rig.read(59)), (60, 1));
}

/// Nothing else happens when it ends.
#[test]
fn home_waits_for_what_is_read_beyond_its_new_end() {
    let mut rig = Rig::new(100, false);
    rig.backend.write(80 * BLOCK, &[7; BLOCK_BYTES]);
    let buf = rig.pool.alloc(BLOCK_BYTES).unwrap();
    let offset = 80 * BLOCK;
    let read = rig.ask(Ask::Read { offset, buf });
    let resize = rig.ask(Ask::Resize { bytes: 60 * BLOCK });
    rig.settle();
    match rig.end_of(read) {
        Some(Ok(Done::Read(buf))) => assert!(buf.iter().all(|byte| *byte == 7)),
        other => panic!("{other:?}"),
    }
    assert!(rig.end_of(resize).unwrap().is_ok());
    assert_eq!(rig.blocks(), 60);
}

#[test]
fn home_that_cannot_grow_keeps_its_size_and_its_store() {
    let mut rig = Rig::new(100, false);
    rig.write(9, 1);
    for (store_fails, backend_fails) in [(true, false), (false, true)] {
        rig.resized.clear();
        (rig.store_fails, rig.backend_fails) = (store_fails, backend_fails);
        let error = rig.resize(PAGE_BLOCKS + 9).unwrap_err();
        let expected = if store_fails {
            IoError::NoSpace
        } else {
            IoError::Unreachable
        };
        assert_eq!((error, rig.blocks()), (expected, 100));
        let given_back = Layout::PLAIN.store_bytes(100 * BLOCK);
        assert_eq!(rig.resized.last(), Some(&("store", given_back)));
        rig.flush();
        assert_eq!(rig.read(9), 1);
    }
    (rig.store_fails, rig.backend_fails) = (false, false);
    rig.resize(PAGE_BLOCKS + 9).unwrap();
    assert_eq!(rig.blocks(), PAGE_BLOCKS + 9);
}

/// What cannot be cut with a shrink is cut when the local store grows, before that reads as anything.
#[test]
fn home_that_has_shrunk_over_a_backend_that_was_not_cut_grows_by_zeroes() {
    let mut rig = Rig::new(100, false);
    rig.backend.write(0, &vec![7; 100 * BLOCK_BYTES]);
    rig.backend_fails = true;
    rig.resize(60).unwrap();
    assert_eq!((rig.blocks(), rig.backend_bytes), (60, 100 * BLOCK));
    rig.backend_fails = false;
    rig.resized.clear();
    rig.resize(100).unwrap();
    let to_backend = rig.resized.iter().filter(|(what, _)| *what == "backend");
    let sizes: Vec<u64> = to_backend.map(|(_, bytes)| bytes / BLOCK).collect();
    assert_eq!(sizes, [60, 100]);
    assert_eq!((rig.read(59), rig.read(60)), (7, 0));
}

/// A cancelled tier has left something in an atomic backend: a tier ends before that is resized.
#[test]
fn home_is_not_resized_while_its_atomic_backend_has_a_part_of_a_tier() {
    for blocks in [60, 140] {
        let mut rig = Rig::new(100, true);
        for block in [5, 50] {
            rig.write(block, 1);
        }
        rig.flush();
        rig.event(Event::Tier);
        rig.go_to(is_copy);
        assert!(rig.act());
        rig.event(Event::CancelTier);
        rig.settle();
        assert_eq!(rig.home.status().tier, TierState::Idle);
        // No moment: what is there is of the middle of a generation.
        rig.write(7, 2);
        let bytes = blocks * BLOCK;
        let token = rig.ask(Ask::Resize { bytes });
        rig.settle();
        assert!(rig.end_of(token).is_none() && rig.resized.is_empty());
        rig.flush();
        assert!(rig.end_of(token).unwrap().is_ok());
        assert_eq!((rig.blocks(), rig.home.status().tiers), (blocks, 1));
        // One that is cancelled again ends the wait.
        rig.write(8, 3);
        rig.flush();
        rig.event(Event::Tier);
        rig.go_to(is_copy);
        assert!(rig.act());
        let token = rig.ask(Ask::Resize { bytes: 90 * BLOCK });
        rig.event(Event::CancelTier);
        rig.settle();
        assert_eq!(rig.end_of(token).unwrap().unwrap_err(), IoError::Failed);
        assert_eq!(rig.blocks(), blocks);
    }
}

/// What cancelled tiers have left in a backend that is not flushed meanwhile counts for those that follow.
#[test]
fn home_flushes_its_backend_after_so_many_blocks_of_several_tiers() {
    let mut rig = Rig::with_flushes(100, false, 4);
    for block in 0..20 {
        rig.write(2 * block, 1);
    }
    rig.flush();
    let mut unflushed = 0;
    for tier in 0..4 {
        rig.event(Event::Tier);
        let mut copies = 0;
        while rig.home.status().tiers == 0 && (tier == 3 || copies < 3) {
            match rig.actions.front() {
                Some(Action::BackendWrite { .. }) => {
                    copies += 1;
                    unflushed += 1;
                    assert!(unflushed <= 4, "in tier {tier}");
                }
                Some(Action::BackendFlush { .. }) => unflushed = 0,
                _ => {}
            }
            assert!(rig.act());
        }
        rig.event(Event::CancelTier);
        while !rig.home.status().tier_rests {
            unflushed += u64::from(rig.actions.front().is_some_and(is_copy));
            assert!(rig.act());
        }
    }
    assert_eq!(rig.home.status().tiers, 1);
}

/// An atomic backend that may not be given more says that it is between two states before it shows a part.
#[test]
fn home_says_that_an_atomic_backend_is_between_states_once_cancelled_tiers_have_filled_it() {
    let mut rig = Rig::with_flushes(4, true, 4);
    for block in [0, 2] {
        rig.write(block, 1);
    }
    rig.flush();
    let between = |rig: &Rig| superblock(&rig.store).flags.get() & HOME_BETWEEN != 0;
    for _ in 0..3 {
        rig.event(Event::Tier);
        rig.go_to(is_copy);
        assert!(!between(&rig));
        rig.event(Event::CancelTier);
        rig.settle();
    }
    rig.event(Event::Tier);
    rig.go_to(|action| matches!(action, Action::BackendFlush { .. }));
    assert!(between(&rig));
    rig.settle();
    assert_eq!((between(&rig), rig.home.status().tiers), (false, 1));
}

/// A tier that is being finished is waited for, and its end is noticed when nothing else happens.
#[test]
fn home_that_shrinks_waits_for_the_end_of_a_tier() {
    let mut rig = Rig::new(100, false);
    rig.write(5, 1);
    rig.flush();
    rig.event(Event::Tier);
    while rig.home.status().tier != TierState::Finishing {
        assert!(rig.act());
    }
    let token = rig.ask(Ask::Resize { bytes: 60 * BLOCK });
    assert_eq!(rig.home.status().tier, TierState::Finishing);
    rig.settle();
    assert!(rig.end_of(token).unwrap().is_ok());
    assert_eq!((rig.blocks(), rig.home.status().tiers), (60, 1));
}

/// One that was copying begins anew: it was asked for, and has not ended.
#[test]
fn home_that_shrinks_gives_up_a_tier_that_copies_and_begins_another() {
    let mut rig = Rig::new(100, false);
    for block in [5, 80] {
        rig.write(block, 1);
    }
    rig.flush();
    rig.event(Event::Tier);
    rig.go_to(is_copy);
    let token = rig.ask(Ask::Resize { bytes: 60 * BLOCK });
    let end = loop {
        assert!(rig.act());
        if let Some(end) = rig.end_of(token) {
            break end;
        }
    };
    assert!(end.is_ok());
    assert_eq!((rig.blocks(), rig.home.status().tiers), (60, 0));
    rig.settle();
    let status = rig.home.status();
    assert_eq!((status.tiers, status.dirty_bytes), (1, 0));
}

/// The table of checksums that is being made anew is complete when the rest of it is cut off.
#[test]
fn home_that_shrinks_while_its_checksums_are_made_anew_has_them() {
    let mut rig = Rig::new(100, false);
    for block in [10, 90] {
        rig.write(block, 1);
    }
    rig.flush();
    rig.settle();
    let found = superblock(&rig.store);
    let sequence = found.sequence.get() + 1;
    let lost = HomeSuperblock::sealed(UUID, HOME, sequence, 100 * BLOCK, 0, SUMS_UNTRUSTED)
        .counting(found.commits.get(), found.map_digest.get());
    rig.store.write(lost.place(), lost.as_bytes());
    rig.open_again();
    rig.poll();
    while rig.home.status().sums_rebuild != Some((100 * BLOCK, 11 * BLOCK)) {
        assert!(rig.act());
    }
    rig.resize(60).unwrap();
    assert_eq!(rig.home.status().sums_rebuild, None);
    assert_eq!(superblock(&rig.store).sums_log.get(), LOG);
}

#[test]
fn home_that_is_held_keeps_its_size() {
    let mut rig = Rig::new(100, false);
    rig.write(5, 1);
    rig.flush();
    rig.event(Event::TierAndHold);
    assert_eq!(rig.resize(60), Err(IoError::Failed));
    assert_eq!(rig.home.status().tier, TierState::Held);
    assert_eq!(rig.resize(100), Ok(()));
    assert_eq!(rig.resize(140), Err(IoError::Failed));
    rig.event(Event::Release);
    assert_eq!(rig.resize(140), Ok(()));
}

#[test]
fn map_says_nothing_of_blocks_behind_its_end() {
    let mut states = [0; format::PAGE_STATE_BYTES];
    states[2] = 0b10_10_10_10;
    let page = || Box::new(HomePage::sealed(HOME, LOG, 2, 0, &states));
    let map = Map::load(vec![page()], 10, LOG, true);
    assert_eq!(map.count(BlockState::Dirty), 2);
    assert!(map.changed.contains(&0), "it is written anew");
    assert!(Map::load(vec![page()], 12, LOG, true).changed.is_empty());
}
