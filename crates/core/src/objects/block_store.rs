//! The blocks that are in the store: where they are (the map), in which objects (the inventory), and how they come from
//! there (gets, and who waits for a page of the map first).
//!
//! What is gathered or being put lies over it ([`super::write`]).
//!
//! A read, a fill or a copy that comes to a block whose page is not in memory asks for the page and steps aside; others
//! go on. When the page has come it stands in front of its queue again, and looks once more. That needs no pins: the cache
//! never has fewer pages than may come until its turn ([`super::map::cache`]).
//!
//! While the cache has room, a get brings the pages behind the one that is wanted, so that a volume that was just opened
//! warms up with few gets.
//!
//! Every byte is compared with a checksum that knows its volume, object and block, and every page, too.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::deletions::Deletions;
use super::format::{Manifest, SLOT_BYTES, parse_page, slot_checksum};
use super::frames::Frames;
use super::gets::{Fetch, Gets, PageGet, Waiting};
use super::inventory::Inventory;
use super::io::{Kind, Name, StoreError, Stored};
use super::map::directory::Entry;
use super::map::{Map, Page, Place, Run};
use super::port::{Context, Port, Purpose};
use super::{Config, turns};
use crate::base::buf::BufMut;
use crate::base::error::IoError;
use crate::base::limits::BLOCK_BYTES;

/// Bytes of the page that is wanted and of those behind it.
const WARM_BYTES: usize = 64 << 10;

/// Who waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// A read, or a question for extents.
    Read(u64),
    /// A block that was written in part.
    Fill(u64),
    /// Copying forward.
    Copy,
}

impl Waiter {
    const fn kind(self) -> turns::Kind {
        match self {
            Self::Read(_) => turns::Kind::Read,
            Self::Fill(_) => turns::Kind::Fill,
            Self::Copy => turns::Kind::Copy,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct BlockStore {
    pub(super) map: Map,
    pub(super) inventory: Inventory,
    pub(super) gets: Gets,
    /// Who waits for which page of the map.
    waiters: BTreeMap<u64, Vec<Waiter>>,
}

impl BlockStore {
    /// An empty one.
    pub(super) fn new(config: &Config) -> Self {
        let pages_min = config.gets_in_flight_max + 8;
        Self {
            map: Map::new(config.map_cache_bytes, pages_min, config.changes_max),
            inventory: Inventory::default(),
            gets: Gets::new(config.gets_in_flight_max, config.read_memory_bytes),
            waiters: BTreeMap::new(),
        }
    }

    /// Wait for a page; false if it could not be asked for at present, so that nobody waits.
    pub(super) fn want_page(&mut self, page: u64, waiter: Waiter, cx: &mut Context<'_>) -> bool {
        if let Some(waiters) = self.waiters.get_mut(&page) {
            if !waiters.contains(&waiter) {
                waiters.push(waiter);
            }
            return true;
        }
        let Some(entry) = self.map.directory.get(page) else {
            return false;
        };
        let pages = self.with_neighbours(page, entry);
        if !self.get_pages(pages, waiter.kind(), Purpose::Page, cx) {
            return false;
        }
        self.waiters.insert(page, alloc::vec![waiter]);
        true
    }

    /// A page, and what lies behind it in its object if there is room for more.
    fn with_neighbours(&self, page: u64, entry: Entry) -> Vec<(u64, Entry)> {
        let mut pages = alloc::vec![(page, entry)];
        let mut bytes = entry.bytes();
        let mut last = entry;
        let others = self.map.directory.iter(page + 1);
        for (page, next) in others {
            if !self.map.cache.has_room()
                || !last.is_followed_by(next)
                || bytes + next.bytes() > WARM_BYTES
            {
                break;
            }
            pages.push((page, next));
            bytes += next.bytes();
            last = next;
        }
        pages
    }

    /// Get pages that lie behind each other; false if that has to wait.
    pub(super) fn get_pages(
        &mut self,
        pages: Vec<(u64, Entry)>,
        kind: turns::Kind,
        purpose: impl FnOnce(PageGet) -> Purpose,
        cx: &mut Context<'_>,
    ) -> bool {
        let slot = pages.first().map(|(_, entry)| entry.slot());
        let object = slot.and_then(|slot| self.inventory.maps.get(slot));
        object.is_some_and(|object| {
            let number = object.number;
            self.gets.pages(number, pages, kind, purpose, cx)
        })
    }

    /// The pages that a get has brought, but those that are damaged.
    pub(super) fn pages_ended(
        &mut self,
        get: &PageGet,
        result: Result<Stored, StoreError>,
        cx: &mut Context<'_>,
    ) -> Result<Vec<Option<Page>>, IoError> {
        let buf = self.gets.ended(get.number, result, cx)?;
        let (number, writer) = (get.number, cx.manifest.writer(get.number));
        let begin = get.pages.first().map_or(0, |(_, entry)| entry.offset());
        let pages = get.pages.iter().map(|&(page, entry)| {
            let bytes = buf.get(entry.offset() - begin..).unwrap_or(&[]);
            let runs = parse_page(&writer, number, page, self.map.page_blocks(), bytes);
            // What was there before this owner names nothing that it has made since.
            let first = cx.manifest.number_first;
            let is_later = |run: &Run| number < first && run.place().number() >= first;
            let runs = runs.ok().filter(|runs| !runs.iter().any(is_later));
            if runs.is_none() {
                cx.port.stats.damaged_pages += 1;
            }
            runs.map(Page::new)
        });
        Ok(pages.collect())
    }

    /// Keep the pages that a get has brought, if they are still what the directory points to. Returns whether the one that
    /// was wanted is among them.
    pub(super) fn keep_pages(&mut self, get: &PageGet, contents: Vec<Option<Page>>) -> bool {
        let has_first = contents.first().is_none_or(Option::is_some);
        // The one that is wanted comes last, so that it is the last one to be given up.
        for (&(page, entry), content) in get.pages.iter().zip(contents).rev() {
            let object = self.inventory.maps.get(entry.slot());
            let is_current = object.is_some_and(|object| object.number == get.number)
                && self.map.directory.get(page) == Some(entry);
            if let Some(content) = content.filter(|_| is_current) {
                self.map.cache.insert(page, entry, content);
            }
        }
        has_first
    }

    /// Who waits for a page, and no longer does.
    pub(super) fn take_waiters(&mut self, page: u64) -> Vec<Waiter> {
        self.waiters.remove(&page).unwrap_or_default()
    }

    /// Nobody waits for anything any more.
    pub(super) fn forget_waiting(&mut self, port: &mut Port) {
        self.gets.forget_waiting(port);
        self.waiters.clear();
    }

    /// Whether a stored page is of an ancestor as a whole.
    pub(super) fn is_of_ancestor(&self, entry: Entry, own_first: u64) -> bool {
        let object = self.inventory.maps.get(entry.slot());
        entry.is_inherited() || object.is_some_and(|object| object.number < own_first)
    }

    /// It is known, or not, where the frames of an object are. If not: why, and which gets that ends.
    pub(super) fn frames_ended(
        &mut self,
        number: u64,
        result: Result<Stored, StoreError>,
        cx: &mut Context<'_>,
    ) -> Result<(), (StoreError, Vec<Waiting>)> {
        let frames = match result {
            Ok(Stored::Read(buf)) => Frames::parse(&cx.manifest.writer(number), number, &buf)
                .map_err(|_| StoreError::Io(self.damaged(number, cx.port))),
            Ok(_) => Err(StoreError::Io(IoError::Failed)),
            Err(error) => Err(error),
        };
        match frames {
            Ok(frames) => {
                self.gets.add_frames(number, frames, cx);
                Ok(())
            }
            Err(error) => Err((error, self.gets.take_waiting(number))),
        }
    }

    /// The slots that were fetched, if every one is what it should be.
    pub(super) fn fetched(
        &mut self,
        fetch: Fetch,
        result: Result<Stored, StoreError>,
        cx: &mut Context<'_>,
    ) -> Result<BufMut, IoError> {
        let buf = self.gets.ended(fetch.place.number(), result, cx)?;
        for index in 0..fetch.count {
            let place = fetch.place.plus(index);
            let block = fetch.block + u64::from(index);
            if !is_good(cx.manifest, place, block, slot(&buf, index)) {
                return Err(self.damaged(place.number(), cx.port));
            }
        }
        Ok(buf)
    }

    /// A block of an object is not what it should be.
    pub(super) fn damaged(&mut self, number: u64, port: &mut Port) -> IoError {
        port.stats.damaged_blocks += 1;
        // Where its frames are may be what was wrong.
        self.gets.forget_frames(number);
        self.inventory.data.mark_damaged(number);
        IoError::Failed
    }

    /// Remove objects from the number `pin` on that the state of the pages as of `adopted` can do without, and that are not
    /// on their way.
    pub(super) fn bury(
        &mut self,
        pin: u64,
        adopted: u64,
        is_on_its_way: impl Fn(u64) -> bool,
        deletions: &mut Deletions,
        port: &mut Port,
    ) {
        let dead = self.inventory.data.dead(pin);
        let dead = dead.filter(|&(number, by)| {
            port.stats.dead_looked_at += 1;
            by <= adopted && !is_on_its_way(number) && !self.gets.is_reading(number)
        });
        let gone: Vec<u64> = dead.map(|(number, _)| number).collect();
        for number in gone {
            self.inventory.data.remove(number);
            self.gets.forget_frames(number);
            deletions.push(Name::own(Kind::Data, number));
        }
        for number in self.inventory.take_dropped(pin) {
            if self.gets.is_reading(number) {
                self.inventory.drop_map(number);
            } else {
                deletions.push(Name::own(Kind::Map, number));
            }
        }
    }

    /// Approximate memory in bytes, but for buffers.
    pub(super) fn memory_bytes(&self) -> usize {
        self.map.memory_bytes() + self.gets.memory_bytes() + self.inventory.memory_bytes()
    }

    /// Compare the map with what is counted beside it. Costs the directory and all objects.
    pub(super) fn check_map(&self) {
        self.map.check_invariants();
        self.inventory.data.check_invariants();
        (self.inventory.maps).check_invariants(&self.map.directory);
    }
}

/// Whether a slot holds what the map says.
pub(super) fn is_good(manifest: &Manifest, place: Place, block: u64, slot: &[u8]) -> bool {
    let number = place.number();
    let (data, sum) = slot.split_at(BLOCK_BYTES);
    slot_checksum(&manifest.writer(number), number, block, data).to_le_bytes() == *sum
}

/// A slot of a buffer of slots.
pub(super) fn slot(buf: &[u8], index: u32) -> &[u8] {
    &buf[index as usize * SLOT_BYTES..(index as usize + 1) * SLOT_BYTES]
}
