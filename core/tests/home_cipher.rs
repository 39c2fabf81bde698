//! An encrypted home: ciphertext in its store, plaintext for clients and the backend.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use hdcs_core::buf::{Buf, Pool};
use hdcs_core::cipher::BlockCipher;
use hdcs_core::home::format::{
    self, HOME_HEADER_BLOCKS, HomeSuperblock, Layout, SUMS_UNTRUSTED, choose_page,
};
use hdcs_core::home::map::Map;
use hdcs_core::home::{Action, Ask, Config, Event, Home};
use hdcs_core::io::{Completion, Done, Nanos, Token};
use hdcs_core::limits::{BLOCK_BYTES, HOME_CIPHER_BYTES, REQUEST_BYTES_MAX, SECTOR_BYTES};
use zerocopy::IntoBytes;

const BYTES: u64 = 16 << 20;
const KEY: [u8; 16] = [3; 16];
const UUID: [u8; 16] = [7; 16];
const HOME: u64 = 99;
const LOG: u64 = 5;

/// Adds the number to every byte: enough to tell sectors apart.
#[derive(Debug)]
struct Toy;

impl BlockCipher for Toy {
    fn encrypt(&self, number: u64, unit: &mut [u8]) {
        assert_eq!(unit.len(), SECTOR_BYTES, "a home encrypts sectors");
        for byte in unit {
            *byte = byte.wrapping_add(number as u8 | 1);
        }
    }

    fn decrypt(&self, number: u64, unit: &mut [u8]) {
        for byte in unit {
            *byte = byte.wrapping_sub(number as u8 | 1);
        }
    }
}

/// A home on memory. What it wants done is done in order, when that is asked for.
struct Rig {
    home: Home,
    store: Vec<u8>,
    backend: Vec<u8>,
    actions: VecDeque<Action>,
    ended: Vec<Completion>,
    damaged: Vec<u64>,
    /// Where a scrub goes on.
    next: Option<u64>,
    pool: Rc<Pool>,
    next_token: u64,
}

fn cipher(key: [u8; 16]) -> Option<Arc<dyn BlockCipher>> {
    (key == KEY).then(|| Arc::new(Toy) as Arc<dyn BlockCipher>)
}

fn superblock(store: &[u8]) -> HomeSuperblock {
    let blocks = [&store[..BLOCK_BYTES], &store[BLOCK_BYTES..2 * BLOCK_BYTES]];
    HomeSuperblock::newest(blocks).unwrap()
}

fn open(store: &mut [u8]) -> Home {
    let mut superblock = superblock(store);
    if let Some(begun) = superblock.begin(LOG, true) {
        store[begun.place() as usize..][..BLOCK_BYTES].copy_from_slice(begun.as_bytes());
        superblock = begun;
    }
    let page = &store[HOME_HEADER_BLOCKS as usize * BLOCK_BYTES..][..2 * BLOCK_BYTES];
    let page = choose_page([&page[..BLOCK_BYTES], &page[BLOCK_BYTES..]], HOME, 0).unwrap();
    let config = Config {
        bytes: BYTES,
        volume: UUID,
        home: HOME,
        log: LOG,
        data_key: superblock.data_key,
        layout: superblock.layout(),
        sequence: superblock.sequence.get(),
        between: false,
        sums_log: superblock.sums(),
        sums_bytes: 1 << 20,
        backend_atomic: false,
        flush_every_blocks: 1 << 20,
        turn_blocks: 1 << 20,
    };
    let map = Map::load(vec![page.page], BYTES / BLOCK_BYTES as u64, LOG, true);
    Home::new(config, map, cipher(superblock.data_key))
}

impl Rig {
    fn new(key: [u8; 16]) -> Self {
        let mut store = vec![0; Layout::Grouped.store_bytes(BYTES) as usize];
        let head = format::format_head(UUID, HOME, BYTES, key);
        store[..head.len()].copy_from_slice(&head);
        let page = format::format_page(HOME, 0);
        for copy in [0, 1] {
            let place = Layout::Grouped.page_offset(0, copy) as usize;
            store[place..place + BLOCK_BYTES].copy_from_slice(page.as_bytes());
        }
        Self {
            home: open(&mut store),
            store,
            backend: (0..BYTES).map(|at| (at / 512) as u8 ^ 0x5a).collect(),
            actions: VecDeque::new(),
            ended: Vec::new(),
            damaged: Vec::new(),
            next: None,
            pool: Pool::new(32 << 20),
            next_token: 0,
        }
    }

    fn event(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.home.step(Nanos(0), event, &mut actions);
        self.actions.extend(actions);
    }

    fn ask(&mut self, ask: Ask) {
        self.next_token += 1;
        let token = Token(self.next_token);
        self.event(Event::Submit { token, ask });
    }

    fn buf(&self, data: &[u8]) -> Buf {
        let mut buf = self.pool.alloc(data.len()).unwrap();
        buf.copy_from_slice(data);
        buf.freeze()
    }

    /// Do the first of what is to be done; false if that is nothing.
    fn act(&mut self) -> bool {
        let Some(action) = self.actions.pop_front() else {
            return false;
        };
        let (token, done) = match action {
            Action::End(completion) => {
                self.ended.push(completion);
                return true;
            }
            Action::Verified(_, found) => {
                let found = found.unwrap();
                self.damaged.extend(found.damaged);
                self.next = found.next;
                return true;
            }
            Action::Damaged { offset, .. } => {
                self.damaged.push(offset / BLOCK_BYTES as u64);
                return true;
            }
            Action::StoreRead {
                token,
                offset,
                mut buf,
            } => {
                let bytes = buf.len();
                buf.copy_from_slice(&self.store[offset as usize..][..bytes]);
                (token, Done::Read(buf))
            }
            Action::StoreWrite {
                token,
                offset,
                data,
            } => {
                let mut at = offset as usize;
                for buf in data {
                    self.store[at..at + buf.len()].copy_from_slice(&buf);
                    at += buf.len();
                }
                (token, Done::Written)
            }
            Action::BackendRead {
                token,
                offset,
                mut buf,
            } => {
                let bytes = buf.len();
                buf.copy_from_slice(&self.backend[offset as usize..][..bytes]);
                (token, Done::Read(buf))
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                self.backend[offset as usize..][..data.len()].copy_from_slice(&data);
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
            Action::StoreSync { token } | Action::BackendFlush { token } => (token, Done::Written),
            Action::StoreResize { token, bytes } => {
                self.store.resize(bytes as usize, 0);
                (token, Done::Written)
            }
            Action::BackendResize { token, bytes } => {
                self.backend.resize(bytes as usize, 0);
                (token, Done::Written)
            }
        };
        let result = Ok(done);
        self.event(Event::Completed(Completion { token, result }));
        true
    }

    fn settle(&mut self) {
        while self.act() {}
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let data = vec![self.buf(data)];
        self.ask(Ask::Write { offset, data });
    }

    fn read(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        let buf = self.pool.alloc(bytes).unwrap();
        self.ask(Ask::Read { offset, buf });
        self.settle();
        match self.ended.pop() {
            Some(Completion {
                result: Ok(Done::Read(buf)),
                ..
            }) => buf.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    fn scrub(&mut self) {
        self.next = Some(0);
        while let Some(block) = self.next.take() {
            let token = Token(0);
            self.event(Event::Verify { token, block });
            self.settle();
        }
    }

    /// Nothing of what is here is in the store as it reads, and it reads as `expected`.
    fn expect(&mut self, offset: u64, expected: &[u8]) {
        assert!(self.read(offset, expected.len()) == expected, "at {offset}");
        let stored = &self.store[Layout::Grouped.data_offset(offset) as usize..][..expected.len()];
        let sectors = stored
            .chunks(SECTOR_BYTES)
            .zip(expected.chunks(SECTOR_BYTES));
        for (index, (stored, plain)) in sectors.enumerate() {
            assert_ne!(stored, plain, "sector {index} from {offset} on is plain");
        }
    }
}

#[test]
fn home_cipher_keeps_parts_of_blocks_and_what_the_backend_had() {
    let mut rig = Rig::new(KEY);
    let mut expected = rig.backend.clone();
    let mut put = |rig: &mut Rig, offset: usize, bytes: usize, byte: u8| {
        let data: Vec<u8> = (0..bytes).map(|at| byte ^ (at / 100) as u8).collect();
        rig.write(offset as u64, &data);
        rig.settle();
        expected[offset..offset + bytes].copy_from_slice(&data);
    };
    // A part of one block, of three, all of one; then over parts of that.
    put(&mut rig, 4096 + 512, 1024, 1);
    put(&mut rig, 5 * 4096 - 512, 4096 + 1024, 2);
    put(&mut rig, 9 * 4096, 4096, 3);
    put(&mut rig, 9 * 4096 + 1024, 512, 4);
    rig.ask(Ask::Zero {
        offset: 20 * 4096 + 512,
        bytes: 3 * 4096,
    });
    rig.settle();
    rig.ask(Ask::Flush);
    rig.settle();
    expected[20 * 4096 + 512..23 * 4096 + 512].fill(0);
    for (first, blocks) in [(1, 1), (4, 2), (9, 1), (20, 1), (23, 1)] {
        let range = first * 4096..(first + blocks) * 4096;
        rig.expect(range.start as u64, &expected[range]);
    }
    assert!(rig.read(0, 1 << 20) == expected[..1 << 20]);
    // Opened anew, with what the store holds alone.
    rig.home = open(&mut rig.store);
    assert_eq!(superblock(&rig.store).data_key, KEY);
    assert!(rig.read(0, 1 << 20) == expected[..1 << 20]);
    // Checksums are of what is stored: whoever has no key can compare them.
    rig.scrub();
    assert!(rig.damaged.is_empty());
    rig.event(Event::Tier);
    rig.settle();
    assert!(rig.backend == expected, "the backend gets plaintext");
    assert_eq!(rig.home.status().dirty_bytes, 0);
    assert_eq!(superblock(&rig.store).data_key, KEY, "written by the tier");
    rig.store[Layout::Grouped.data_offset(9 * 4096 + 600) as usize] ^= 1;
    rig.scrub();
    assert!(rig.damaged.contains(&9), "{:?}", rig.damaged);
}

#[test]
fn home_cipher_waits_for_memory_in_order_and_goes_on() {
    let mut rig = Rig::new(KEY);
    let writes = 2 * HOME_CIPHER_BYTES / REQUEST_BYTES_MAX;
    for number in 0..writes {
        rig.write(
            (number * REQUEST_BYTES_MAX) as u64,
            &vec![number as u8; REQUEST_BYTES_MAX],
        );
    }
    // What of the table of checksums is needed is read; the data has begun then.
    let is_write = |action: &&Action| matches!(action, Action::StoreWrite { .. });
    while rig.actions.iter().any(|action| !is_write(&action)) {
        assert!(rig.act());
    }
    assert_eq!(rig.actions.len(), HOME_CIPHER_BYTES / REQUEST_BYTES_MAX);
    let offset = |action: &Action| match action {
        Action::StoreWrite { offset, .. } => *offset,
        other => panic!("{other:?}"),
    };
    for number in 0..writes {
        let next = Layout::Grouped.data_offset((number * REQUEST_BYTES_MAX) as u64);
        assert_eq!(offset(&rig.actions[0]), next, "in the order of arrival");
        assert!(rig.act());
        for action in std::mem::take(&mut rig.actions) {
            match action {
                Action::End(completion) => rig.ended.push(completion),
                other => rig.actions.push_back(other),
            }
        }
    }
    assert_eq!(rig.ended.len(), writes);
    assert!(rig.ended.iter().all(|ended| ended.result.is_ok()));
    rig.ended.clear();
    for number in 0..writes {
        let at = (number * REQUEST_BYTES_MAX) as u64;
        rig.expect(at, &vec![number as u8; REQUEST_BYTES_MAX]);
    }
}

#[test]
fn home_that_was_made_before_keeps_its_version() {
    let head = format::format_head(UUID, HOME, BYTES, [0; 16]);
    let plain = HomeSuperblock::parse(&head[BLOCK_BYTES..2 * BLOCK_BYTES]).unwrap();
    assert_eq!((plain.version.get(), plain.data_key), (4, [0; 16]));
    let of_before =
        |sums_log| HomeSuperblock::sealed(UUID, HOME, 1, BYTES, 0, sums_log, Layout::Trailing);
    assert_eq!(of_before(None).version.get(), 1);
    assert_eq!(of_before(Some(0)).version.get(), 2);
    let encrypted = of_before(Some(0)).encrypted(KEY);
    assert_eq!((encrypted.version.get(), encrypted.data_key), (3, KEY));
    // It stays so whatever else of it changes.
    let begun = encrypted.begin(LOG, true).unwrap();
    let lost = begun.begin(LOG + 1, true).unwrap();
    assert_eq!(lost.sums(), Some(SUMS_UNTRUSTED));
    assert_eq!((lost.version.get(), lost.data_key), (3, KEY));
}

#[test]
#[should_panic(expected = "a home is encrypted if its superblock says so")]
fn home_that_is_encrypted_is_not_opened_without_its_cipher() {
    let mut store = Rig::new(KEY).store;
    let place = superblock(&store).place() as usize;
    // As if it were of another key.
    let other = HomeSuperblock::sealed(UUID, HOME, 9, BYTES, 0, Some(LOG), Layout::Grouped)
        .encrypted([4; 16]);
    store[place..place + BLOCK_BYTES].copy_from_slice(other.as_bytes());
    open(&mut store);
}
