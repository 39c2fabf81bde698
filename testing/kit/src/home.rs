//! A local store on memory, as a test drives it: what it wants done is done in order, when that is asked for.

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::cipher::{Authenticator, BlockCipher, KeyedCipher, TAG_BYTES};
use hdcs_core::base::error::{FormatError, IoError};
use hdcs_core::base::io::{Completion, Done, Nanos, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_core::local::format::{self, HomeSuperblock, Layout};
use hdcs_core::local::open::{Before, Opening, Refused, Step};
use hdcs_core::local::{Action, Ask, Event, LocalStore};
use zerocopy::IntoBytes;

/// Size of the local store.
pub const BYTES: u64 = 16 << 20;
/// The key of the toy cipher; any other stands for no encryption.
pub const KEY: [u8; 16] = [3; 16];
/// The volume's id.
pub const UUID: [u8; 16] = [7; 16];
/// The random number of the local store.
pub const HOME: u64 = 99;
/// The random number of its log.
pub const LOG: u64 = 5;

/// Adds the number to every byte: enough to tell sectors apart.
#[derive(Debug)]
pub struct Toy;

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

impl Authenticator for Toy {
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        let mut state = 0x9e37_79b9_7f4a_7c15_u128;
        for byte in bytes {
            state = (state ^ u128::from(*byte)).wrapping_mul(0x0100_0000_01b3_0000_0000_013b_u128);
        }
        state.to_le_bytes()
    }
}

impl KeyedCipher for Toy {
    fn unit_tags(&self, first: u64, units: &[u8], tags: &mut [u32]) {
        assert_eq!(units.len(), tags.len() * SECTOR_BYTES, "a tag a sector");
        for ((number, unit), tag) in (first..).zip(units.chunks(SECTOR_BYTES)).zip(tags) {
            let bytes: Vec<u8> = [&number.to_le_bytes(), unit].concat();
            *tag = (u128::from_le_bytes(self.tag(&bytes)) >> 96) as u32;
        }
    }
}

/// A local store on memory. What it wants done is done in order, when that is asked for.
pub struct Rig {
    /// The state machine.
    pub home: LocalStore,
    /// Its store.
    pub store: Vec<u8>,
    /// What it tiers out to.
    pub backend: Vec<u8>,
    /// What it has asked for and was not performed yet.
    pub actions: VecDeque<Action>,
    /// Operations that have ended.
    pub ended: Vec<Completion>,
    /// Sectors that a scrub found damaged.
    pub damaged: Vec<u64>,
    /// Sectors with the right checksum and the wrong tag.
    pub forged: Vec<u64>,
    /// Where a scrub goes on.
    pub next: Option<u64>,
    /// Where buffers come from.
    pub pool: Arc<Pool>,
    next_token: u64,
}

/// The toy cipher, if this is its key.
pub fn cipher(key: [u8; 16]) -> Option<Arc<dyn KeyedCipher>> {
    (key == KEY).then(|| Arc::new(Toy) as Arc<dyn KeyedCipher>)
}

/// The superblock that counts in a store.
pub fn superblock(store: &[u8]) -> HomeSuperblock {
    let blocks = [&store[..BLOCK_BYTES], &store[BLOCK_BYTES..2 * BLOCK_BYTES]];
    HomeSuperblock::newest(blocks).unwrap()
}

/// Open a local store.
pub fn open(store: &mut [u8]) -> LocalStore {
    try_open(store).unwrap()
}

/// The same, where it may fail.
pub fn try_open(store: &mut [u8]) -> Result<LocalStore, FormatError> {
    let why = |refused| match refused {
        Refused::Superblock(why) | Refused::Page { why, .. } | Refused::Map(why) => why,
        Refused::Size(bytes) => panic!("it is of a volume of {bytes} bytes"),
    };
    let two = |store: &[u8], offset: u64| {
        let (one, two) = store[offset as usize..][..2 * BLOCK_BYTES].split_at(BLOCK_BYTES);
        [one.to_vec(), two.to_vec()]
    };
    let before = Before {
        log: LOG,
        is_whole: true,
    };
    let [one, other] = two(store, 0);
    let mut opening = Opening::begin([&one, &other], UUID, before).map_err(why)?;
    let cipher = cipher(opening.data_key());
    opening.authenticate(cipher.clone(), BYTES).map_err(why)?;
    loop {
        match opening.step() {
            Step::Read(offset) => {
                let [one, other] = two(store, offset);
                opening.read([&one, &other]).map_err(why)?;
            }
            Step::Sync => opening.done(),
            Step::Write(offset, block) => {
                store[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block[..]);
                opening.done();
            }
            Step::Done => break,
        }
    }
    let (config, map) = opening.finish(1 << 20);
    Ok(LocalStore::new(config, map, cipher))
}

impl Rig {
    /// An empty local store, encrypted with this key.
    pub fn new(key: [u8; 16]) -> Self {
        let layout = Layout::of(key == KEY);
        let mut store = vec![0; layout.store_bytes(BYTES) as usize];
        let head = format::format_head(UUID, HOME, BYTES, key, cipher(key).as_deref());
        store[..head.len()].copy_from_slice(&head);
        let page = format::format_page(HOME, 0, cipher(key).as_deref());
        for copy in [0, 1] {
            let place = layout.page_offset(0, copy) as usize;
            store[place..place + BLOCK_BYTES].copy_from_slice(page.as_bytes());
        }
        Self {
            home: open(&mut store),
            store,
            backend: (0..BYTES).map(|at| (at / 512) as u8 ^ 0x5a).collect(),
            actions: VecDeque::new(),
            ended: Vec::new(),
            damaged: Vec::new(),
            forged: Vec::new(),
            next: None,
            pool: Pool::new(32 << 20),
            next_token: 0,
        }
    }

    /// Where things are in the store.
    pub fn layout(&self) -> Layout {
        superblock(&self.store).layout()
    }

    /// Open what the store holds.
    pub fn reopen(&mut self) {
        self.home = open(&mut self.store);
    }

    /// Hand an event in.
    pub fn event(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.home.step(Nanos(0), event, &mut actions);
        self.actions.extend(actions);
    }

    /// Submit an operation.
    pub fn ask(&mut self, ask: Ask) {
        self.next_token += 1;
        let token = Token(self.next_token);
        self.event(Event::Submit { token, ask });
    }

    /// A buffer with this data.
    pub fn buf(&self, data: &[u8]) -> Buf {
        let mut buf = self.pool.alloc(data.len()).unwrap();
        buf.copy_from_slice(data);
        buf.freeze()
    }

    /// Do the first of what is to be done; false if that is nothing.
    pub fn act(&mut self) -> bool {
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
            Action::Damaged {
                offset, is_forged, ..
            } => {
                self.damaged.push(offset / BLOCK_BYTES as u64);
                if is_forged {
                    self.forged.push(offset / SECTOR_BYTES as u64);
                }
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

    /// Perform whatever it asks for until it asks for nothing.
    pub fn settle(&mut self) {
        while self.act() {}
    }

    /// Write bytes, and settle.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let data = vec![self.buf(data)];
        self.ask(Ask::Write { offset, data });
    }

    /// Read bytes.
    pub fn read(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        self.try_read(offset, bytes).unwrap()
    }

    /// The same, where it may fail.
    pub fn try_read(&mut self, offset: u64, bytes: usize) -> Result<Vec<u8>, IoError> {
        let buf = self.pool.alloc(bytes).unwrap();
        self.ask(Ask::Read { offset, buf });
        self.settle();
        match self.ended.pop().expect("it ends").result {
            Ok(Done::Read(buf)) => Ok(buf.to_vec()),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error),
        }
    }

    /// Scrub all of it.
    pub fn scrub(&mut self) {
        self.next = Some(0);
        while let Some(block) = self.next.take() {
            let token = Token(0);
            self.event(Event::Verify { token, block });
            self.settle();
        }
    }

    /// Nothing of what is here is in the store as it reads, and it reads as `expected`.
    pub fn expect(&mut self, offset: u64, expected: &[u8]) {
        assert!(self.read(offset, expected.len()) == expected, "at {offset}");
        let place = self.layout().data_offset(offset) as usize;
        let stored = &self.store[place..][..expected.len()];
        let sectors = stored
            .chunks(SECTOR_BYTES)
            .zip(expected.chunks(SECTOR_BYTES));
        for (index, (stored, plain)) in sectors.enumerate() {
            assert_ne!(stored, plain, "sector {index} from {offset} on is plain");
        }
    }
}

/// The blocks of a store that hold anything, each behind its number.
pub fn packed(store: &[u8]) -> Vec<u8> {
    let mut image = Vec::new();
    for (number, block) in (0u64..).zip(store.chunks(BLOCK_BYTES)) {
        if block.iter().any(|&byte| byte != 0) {
            image.extend_from_slice(&number.to_le_bytes());
            image.extend_from_slice(block);
        }
    }
    image
}

/// The store of such an image.
pub fn unpacked(image: &[u8], layout: Layout) -> Vec<u8> {
    let mut store = vec![0; layout.store_bytes(BYTES) as usize];
    for part in image.chunks_exact(8 + BLOCK_BYTES) {
        let (number, block) = part.split_at(8);
        let number = u64::from_le_bytes(number.try_into().unwrap());
        store[number as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(block);
    }
    store
}
