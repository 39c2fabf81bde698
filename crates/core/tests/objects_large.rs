//! The largest volume over objects, all of whose blocks were written at random: what it takes to open and serve it.
//!
//! Nobody can store 16 TiB here, so the store computes what it is asked for: block `b` is in the slot that a
//! permutation of 32 bits says. Only what is written is kept.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::io::{Done, Nanos, Token};
use hdcs_core::base::limits::{OBJECT_PAGE_BLOCKS_MAX, OBJECT_USAGE_ENTRIES_MAX};
use hdcs_core::objects::format::{
    IndexEntry, Manifest, MapEntry, SLOT_BYTES, Usage, index_bytes, page_bytes, slot_checksum,
    usage_bytes, write_index, write_page, write_usage,
};
use hdcs_core::objects::io::{Action, Ask, Event, Kind, Listed, Name, Phase, Stored};
use hdcs_core::objects::map::{Place, Run};
use hdcs_core::objects::{Access, Config, ObjectVolume};

/// Counts what is allocated.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: it is the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller says.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const VOLUME: [u8; 16] = [5; 16];
const BLOCKS: u64 = 1 << 32;
const PAGE_BLOCKS: u64 = OBJECT_PAGE_BLOCKS_MAX as u64;
const PAGES: u64 = BLOCKS / PAGE_BLOCKS;
const SLOTS: u64 = 4096;
/// Numbers of the first data object, the first object of the map, and the first usage table.
const DATA: u64 = 1;
const MAP: u64 = 1 << 21;
const USAGE: u64 = 1 << 22;
const LIMIT: u64 = 1 << 23;
const PAGE_BYTES: usize = page_bytes(PAGE_BLOCKS as usize);
const MAP_PAGES: u64 = ((4 << 20) / PAGE_BYTES) as u64;
const MAPS: u64 = PAGES.div_ceil(MAP_PAGES);
/// An odd number and its inverse.
const FACTOR: u32 = 0x9e37_79b1;

fn place(block: u64) -> Place {
    let at = u64::from((block as u32).wrapping_mul(FACTOR));
    Place::new(DATA + at / SLOTS, (at % SLOTS) as u32)
}

fn block_at(number: u64, slot: u64) -> u64 {
    let mut inverse: u32 = 1;
    for _ in 0..5 {
        inverse = inverse.wrapping_mul(2u32.wrapping_sub(FACTOR.wrapping_mul(inverse)));
    }
    let at = ((number - DATA) * SLOTS + slot) as u32;
    u64::from(at.wrapping_mul(inverse))
}

fn map_entry(index: u64) -> MapEntry {
    let pages = MAP_PAGES.min(PAGES - index * MAP_PAGES) as usize;
    MapEntry {
        number: MAP + index,
        bytes: (pages * PAGE_BYTES + index_bytes(pages)) as u32,
        entries: pages as u32,
    }
}

fn usage_entry(index: u64) -> MapEntry {
    let most = OBJECT_USAGE_ENTRIES_MAX as u64;
    let entries = most.min(BLOCKS / SLOTS - index * most) as usize;
    MapEntry {
        number: USAGE + index,
        bytes: usage_bytes(entries) as u32,
        entries: entries as u32,
    }
}

fn manifest() -> Manifest {
    let usages = (BLOCKS / SLOTS).div_ceil(OBJECT_USAGE_ENTRIES_MAX as u64);
    Manifest {
        begins: true,
        volume: VOLUME,
        sequence: 1,
        epoch: 1,
        number_first: 1,
        number_limit: LIMIT,
        bytes: BLOCKS * 4096,
        page_blocks: PAGE_BLOCKS as u32,
        maps: (0..MAPS).map(map_entry).collect(),
        usages: (0..usages).map(usage_entry).collect(),
        beginnings: vec![1],
        ..Manifest::default()
    }
}

fn page_of(page: u64) -> Vec<u8> {
    let first = page * PAGE_BLOCKS;
    let runs: Vec<Run> = (0..PAGE_BLOCKS)
        .map(|at| Run::new(at as u16, 1, place(first + at)))
        .collect();
    let mut bytes = vec![0; PAGE_BYTES];
    write_page(VOLUME, MAP + page / MAP_PAGES, page, &runs, &mut bytes);
    bytes
}

/// Bytes of an object that nobody has written.
fn computed(name: Name, offset: usize, out: &mut [u8]) {
    match name.kind {
        Kind::Data => {
            for (index, slot) in out.chunks_mut(SLOT_BYTES).enumerate() {
                let at = (offset / SLOT_BYTES + index) as u64;
                let block = block_at(name.number, at);
                let (data, sum) = slot.split_at_mut(4096);
                data.fill(block as u8);
                let crc = slot_checksum(&VOLUME, name.number, block, data);
                sum.copy_from_slice(&crc.to_le_bytes());
            }
        }
        Kind::Map if name.number >= USAGE => {
            let index = name.number - USAGE;
            let first = DATA + index * OBJECT_USAGE_ENTRIES_MAX as u64;
            let usage = |number| Usage {
                number,
                live: SLOTS as u16,
                runs: SLOTS as u16,
                is_compressed: false,
            };
            let count = u64::from(usage_entry(index).entries);
            let entries: Vec<Usage> = (first..first + count).map(usage).collect();
            write_usage(VOLUME, name.number, &entries, out);
        }
        Kind::Map => {
            let index = name.number - MAP;
            let entry = map_entry(index);
            let first = index * MAP_PAGES;
            if offset as u64 == entry.index_offset() {
                let pages: Vec<IndexEntry> = (0..u64::from(entry.entries))
                    .map(|at| IndexEntry {
                        page: first + at,
                        offset: at as u32 * PAGE_BYTES as u32,
                        bytes: PAGE_BYTES as u32,
                        is_full: true,
                        is_inherited: false,
                    })
                    .collect();
                write_index(VOLUME, name.number, &pages, out);
            } else {
                for (at, out) in out.chunks_mut(PAGE_BYTES).enumerate() {
                    let page = first + (offset / PAGE_BYTES + at) as u64;
                    out.copy_from_slice(&page_of(page)[..out.len()]);
                }
            }
        }
        kind => panic!("no {kind:?} is computed"),
    }
}

struct Large {
    volume: ObjectVolume,
    written: BTreeMap<Name, Vec<u8>>,
    written_bytes: usize,
    read: Option<BufMut>,
    page_gets: u64,
    longest_page_get: usize,
}

impl Large {
    fn go(&mut self) {
        loop {
            let mut actions = Vec::new();
            self.volume.poll(Nanos(0), &mut actions);
            if actions.is_empty() && self.volume.next_wakeup() != Some(Nanos(0)) {
                return;
            }
            for action in actions {
                let Some((token, stored)) = self.perform(action) else {
                    continue;
                };
                let mut more = Vec::new();
                let event = Event::Stored {
                    token,
                    result: Ok(stored),
                };
                self.volume.step(Nanos(0), event, &mut more);
                for action in more {
                    assert!(self.perform(action).is_none());
                }
            }
        }
    }

    fn ask(&mut self, ask: Ask) {
        let mut actions = Vec::new();
        let token = Token(0);
        let event = Event::Submit { token, ask };
        self.volume.step(Nanos(0), event, &mut actions);
        self.go();
    }

    fn perform(&mut self, action: Action) -> Option<(Token, Stored)> {
        Some(match action {
            Action::Put {
                token, name, data, ..
            } => {
                let bytes: Vec<u8> = data.iter().flat_map(|buf| buf.iter().copied()).collect();
                self.written_bytes += bytes.capacity();
                self.written.insert(name, bytes);
                (token, Stored::Done)
            }
            Action::Get {
                token,
                name,
                offset,
                mut buf,
                ..
            } => {
                let offset = offset as usize;
                if name.kind == Kind::Map && self.volume.phase() == Phase::Open {
                    self.page_gets += 1;
                    self.longest_page_get = self.longest_page_get.max(buf.len());
                }
                match self.written.get(&name) {
                    Some(bytes) => {
                        let range = offset..offset + buf.len();
                        buf.copy_from_slice(&bytes[range]);
                    }
                    None => computed(name, offset, &mut buf),
                }
                (token, Stored::Read(buf))
            }
            Action::Delete { token, name } => {
                if let Some(bytes) = self.written.remove(&name) {
                    self.written_bytes -= bytes.capacity();
                }
                (token, Stored::Done)
            }
            Action::List {
                token,
                prefix,
                after,
                ..
            } => {
                let listed = |name: Name, bytes: u64| Listed {
                    name: name.to_string(),
                    bytes,
                };
                let mut objects: Vec<Listed> = Vec::new();
                let mut more = false;
                if prefix == Kind::Data.prefix() {
                    let from = Name::parse(&after).map_or(DATA, |name| name.number + 1);
                    let end = (DATA + BLOCKS / SLOTS).min(from + 1000);
                    let bytes = SLOTS * SLOT_BYTES as u64 + SLOTS * 16 + 64;
                    let names = (from..end).map(|number| Name::own(Kind::Data, number));
                    objects.extend(names.map(|name| listed(name, bytes)));
                    more = end < DATA + BLOCKS / SLOTS;
                } else {
                    let written = self.written.iter();
                    let all = written.map(|(name, bytes)| listed(*name, bytes.len() as u64));
                    objects.extend(
                        all.filter(|listed| listed.name.starts_with(prefix) && listed.name > after),
                    );
                }
                (token, Stored::Listed { objects, more })
            }
            Action::End(completion) => {
                if let Done::Read(buf) = completion.result.expect("the store never fails") {
                    self.read = Some(buf);
                }
                return None;
            }
            other => panic!("{other:?}"),
        })
    }

    fn first_byte(&mut self, pool: &Pool, block: u64) -> u8 {
        let buf = pool.alloc(4096).expect("nothing holds it");
        let offset = block * 4096;
        self.ask(Ask::Read { offset, buf });
        self.read.take().expect("it was read")[0]
    }
}

#[test]
fn largest_volume_written_at_random_is_served_within_256_mib() {
    let pool = Pool::new(1 << 20);
    let mut written = BTreeMap::new();
    let manifest = manifest();
    let mut bytes = vec![0; manifest.encoded_bytes()];
    manifest.write(&mut bytes);
    written.insert(Name::own(Kind::Manifest, 1), bytes);
    let config = Config {
        // So that the map is stored while the test waits for it.
        changes_max: 2 * 4096,
        ..Config::new(Access::Existing, 7)
    };
    let mut large = Large {
        volume: ObjectVolume::new(config),
        written,
        written_bytes: 0,
        read: None,
        page_gets: 0,
        longest_page_get: 0,
    };
    // The pools, which have bounds of their own, are there from now on.
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    large.go();
    assert_eq!(large.volume.phase(), Phase::Open);
    let opened = PEAK.load(Ordering::Relaxed) - before;
    assert!(opened < 256 << 20, "{} MiB to open it", opened >> 20);
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..300 {
        let block = random.u64(0..BLOCKS);
        assert_eq!(large.first_byte(&pool, block), block as u8);
    }
    assert!(large.page_gets <= 300, "one get for a page");
    let mut changed = Vec::new();
    for _ in 0..3 * 4096 {
        let block = random.u64(0..BLOCKS);
        changed.push(block);
        let mut buf = pool.alloc(4096).expect("nothing holds it");
        buf.fill(!(block as u8));
        let data = vec![buf.freeze()];
        let offset = block * 4096;
        large.ask(Ask::Write { offset, data });
    }
    large.ask(Ask::Flush);
    let stats = large.volume.stats();
    assert!(stats.pages_merged >= 4096, "the map is stored: {stats:?}");
    for &block in changed.iter().step_by(37) {
        assert_eq!(large.first_byte(&pool, block), !(block as u8));
    }
    let served = PEAK.load(Ordering::Relaxed) - before - large.written_bytes;
    assert!(served < 256 << 20, "{} MiB to serve it", served >> 20);
    let said = stats.map_memory_bytes as usize;
    let is = NOW.load(Ordering::Relaxed) - before - large.written_bytes;
    assert!(
        (is / 2..is * 3 / 2).contains(&said),
        "it says {said} bytes and takes {is}"
    );
    println!(
        "opened with {} MiB, served with {} MiB, said {} MiB; the largest get of pages: {} bytes",
        opened >> 20,
        served >> 20,
        said >> 20,
        large.longest_page_get
    );
}
