//! Storing the map, so that the tail may begin anew.
//!
//! ```text
//!  Idle ─tail long enough─► Looking ─every page seen─► Merging ─every page put─► Tallying ─► Ready ─manifest names it─► Idle
//!   changes freeze            pages of old objects                  usage tables are put     └─ too many changes ─► Looking
//! ```
//!
//! A checkpoint merges what was sealed up to a position, its `begin`, into the pages of the map: of each page that has
//! changed the stored one is fetched, changed, and stored in a new object. The frozen changes lie over the pages until all
//! of them are stored, so it does not matter which of them a read finds. What is sealed meanwhile is for the next one.
//!
//! Merging learns which blocks a page takes from which data objects. What is left of these is stored beside the map
//! in usage tables, so that an opening need not read the map to know.
//!
//! A manifest whose state is at `begin` or later may name the new pages, with a tail that starts after `begin`. When nobody
//! flushes, there is no such manifest for long, and a checkpoint may follow another one that no manifest ever names.
//!
//! Every turn does a bounded part of it.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::format::{IndexEntry, MapEntry, Usage, index_bytes, page_bytes};
use super::format::{usage_bytes, write_index, write_page, write_usage};
use super::gets::PageGet;
use super::io::{Action, Condition, Kind, Name, StoreError, Stored};
use super::map::Page;
use super::map::directory::{Entry, PAGE_ALIGN};
use super::maps::object_bytes;
use super::port::{Context, Purpose};
use super::tail::Tail;
use super::{ObjectVolume, turns};
use crate::base::buf::{Buf, BufMut};
use crate::base::io::Nanos;
use crate::base::limits::{
    OBJECT_MAP_BYTES_MAX, OBJECT_MAP_CHUNK_BYTES, OBJECT_MAP_PAGES_MAX, OBJECT_MAPS_MAX,
    OBJECT_TAIL_MAX, OBJECT_USAGE_ENTRIES_MAX, OBJECT_USAGES_MAX,
};

/// The map is stored when the tail has so many bytes for each byte of the map: the map costs this
/// much less than the data.
const TAIL_PER_MAP: u64 = 32;
/// But not before so many batches ...
const TAIL_BATCHES_MIN: u64 = 6;
/// ... or so many objects, small ones perhaps, and so many more for each object of the map.
const TAIL_OBJECTS_MIN: usize = 64;
const TAIL_OBJECTS_PER_MAP: usize = 8;
/// Pages that are fetched ahead of merging.
const WINDOW_PAGES: usize = 128;
/// Bytes of one get of pages that follow each other.
const MERGE_GET_BYTES: usize = 256 << 10;
const MERGE_GETS_MAX: usize = 16;
/// Entries of the directory that one turn looks at.
const LOOK_PAGES_MAX: usize = 4096;
/// Pages that one turn merges.
const MERGE_PAGES_MAX: usize = 64;
/// Failed gets after which a page that has not changed stays where it is.
const MISSES_MAX: u8 = 8;
/// Pause before a page is got again of which the store has brought what is no good, or nothing.
const LOST_PAUSE: Nanos = Nanos::from_millis(1000);
/// A page that was lost for so long, and so often in a row, will not be better.
const LOST_AFTER: Nanos = Nanos::from_millis(60_000);
const LOST_TIMES: u32 = 30;
/// Ranges without a page that one turn passes.
const SKIPS_MAX: usize = 4096;

/// How far the storing of the map is.
#[derive(Debug, Default)]
pub(super) enum Checkpoint {
    #[default]
    Idle,
    /// Finding pages that are stored again for the sake of their objects.
    Looking(Looking),
    Merging(Box<Merge>),
    /// Storing how much of which data objects the map needs.
    Tallying(Tally),
    Ready {
        begin: u64,
        maps: Vec<MapEntry>,
        usages: Vec<MapEntry>,
    },
}

impl Checkpoint {
    /// When it goes on by itself, if it waits for a time of its own.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        match self {
            Self::Merging(merge) => merge.retry_at,
            _ => None,
        }
    }

    /// Whether what is merged is to be named by a manifest with the state up to `upto`: the tail would be
    /// too long for the memory of whoever opens it.
    pub(super) fn must_precede(&self, upto: u64, tail: &Tail) -> bool {
        let begin = match self {
            Self::Looking(looking) => looking.begin,
            Self::Merging(merge) => merge.begin,
            Self::Tallying(tally) => tally.begin,
            Self::Idle | Self::Ready { .. } => return false,
        };
        begin <= upto && tail.has_too_many_runs()
    }

    /// The map as it was stored last, if a manifest of this state may name it: more objects than it has room for would
    /// make one that nobody can read.
    pub(super) fn adoptable(&self, upto: u64) -> Option<(u64, &[MapEntry], &[MapEntry])> {
        match self {
            Self::Ready {
                begin,
                maps,
                usages,
            } if *begin <= upto
                && maps.len() <= OBJECT_MAPS_MAX
                && usages.len() <= OBJECT_USAGES_MAX =>
            {
                Some((*begin, maps, usages))
            }
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct Looking {
    begin: u64,
    /// The next page to look at.
    next: u64,
    /// Which objects are stored again, by slot.
    crowd: Vec<bool>,
    /// Their pages, ascending.
    again: VecDeque<u64>,
}

/// A page that is to be merged.
#[derive(Debug)]
struct Wanted {
    page: u64,
    entry: Option<Entry>,
    content: Content,
    /// Whether something of it has changed.
    is_changed: bool,
    misses: u8,
    /// Since when the store has brought what is no good, or nothing, and how often in a row.
    lost: Option<(Nanos, u32)>,
}

#[derive(Debug)]
enum Content {
    Wanted,
    Fetching,
    Here(Page),
}

#[derive(Debug)]
pub(super) struct Merge {
    begin: u64,
    /// The block from which on changes were not looked at.
    next: u64,
    /// Pages that are stored whether they have changed or not, ascending.
    again: VecDeque<u64>,
    window: VecDeque<Wanted>,
    /// Every page is in the window or merged.
    is_seen: bool,
    gets: usize,
    /// When pages are got again, after one that was no good.
    retry_at: Option<Nanos>,
    object: MapBuilder,
    put: Option<MapPut>,
}

/// A page in the object that is being built.
#[derive(Debug)]
struct Built {
    place: IndexEntry,
    /// What is in it, if that is to stay in the cache.
    content: Option<Page>,
}

/// An object of the map while pages are added.
#[derive(Debug, Default)]
struct MapBuilder {
    number: u64,
    full: Vec<Buf>,
    full_bytes: usize,
    chunk: Option<BufMut>,
    used: usize,
    built: Vec<Built>,
}

/// Why a page is not added.
enum NoRoom {
    Full,
    Memory,
}

impl MapBuilder {
    /// Offset in the object of the next page.
    fn offset(&self) -> usize {
        self.full_bytes + self.used
    }

    fn close_chunk(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            self.full_bytes += self.used;
            self.full.push(chunk.narrow(0..self.used).freeze());
            self.used = 0;
        }
    }
}

/// An object of the map on its way.
#[derive(Debug)]
struct MapPut {
    number: u64,
    slot: u32,
    data: Vec<Buf>,
    in_flight: bool,
    built: Vec<Built>,
}

#[derive(Debug)]
pub(super) struct Tally {
    begin: u64,
    /// The next data object to look at.
    next: u64,
    is_seen: bool,
    entries: Vec<Usage>,
    usages: Vec<MapEntry>,
    put: Option<(MapEntry, Vec<Buf>, bool)>,
}

impl ObjectVolume {
    pub(super) fn pump_checkpoint(&mut self, actions: &mut Vec<Action>) {
        match &self.checkpoint {
            Checkpoint::Idle if self.is_checkpoint_due() && self.may_freeze() => {
                self.begin_checkpoint();
            }
            Checkpoint::Ready { begin, .. } => {
                let begin = *begin;
                if self.tail.is_full()
                    && begin > self.commits.committed()
                    && self.commits.has_no_flush()
                    && (self.tail.is_full_unflushed() || !self.has_unflushed_writes())
                {
                    // Writes wait for it, so nobody may be left to flush.
                    self.begin_flush(None);
                } else if self.store.map.has_many_changes()
                    && begin > self.commits.committed()
                    && !self.commits.is_under_way()
                    && self.commits.has_no_flush()
                {
                    // Nobody flushes: no manifest may name it yet, and there is no room for more changes.
                    self.begin_checkpoint();
                }
            }
            _ => {}
        }
        match core::mem::take(&mut self.checkpoint) {
            Checkpoint::Looking(looking) => self.look_for_pages(looking),
            Checkpoint::Merging(merge) => self.pump_merge(merge, actions),
            Checkpoint::Tallying(tally) => self.pump_tally(tally, actions),
            other => self.checkpoint = other,
        }
    }

    /// Whether a checkpoint may begin: with many changes in the tail not before all flushes are done, since a state
    /// before its beginning could not be named with a shorter tail.
    fn may_freeze(&self) -> bool {
        !self.tail.has_too_many_runs() || self.commits.has_no_flush()
    }

    fn is_checkpoint_due(&self) -> bool {
        let batch = (self.config.batch_blocks * super::format::SLOT_BYTES) as u64;
        let map =
            self.store.map.directory.stored_bytes() + page_bytes(self.store.map.fresh.len()) as u64;
        let objects = TAIL_OBJECTS_MIN + self.store.inventory.maps.len() * TAIL_OBJECTS_PER_MAP;
        self.tail.bytes() >= (TAIL_BATCHES_MIN * batch).max(TAIL_PER_MAP * map)
            || self.tail.len() >= objects.min(OBJECT_TAIL_MAX)
            || self.store.map.has_many_changes()
            || self.tail.has_many_runs()
    }

    fn begin_checkpoint(&mut self) {
        assert!(self.store.map.frozen.is_empty(), "one checkpoint at a time");
        self.store.map.frozen = core::mem::take(&mut self.store.map.fresh);
        self.checkpoint = Checkpoint::Looking(Looking {
            begin: self.tail.last(),
            next: 0,
            crowd: self.store.inventory.maps.crowd(),
            again: VecDeque::new(),
        });
        self.port.again = true;
    }

    /// Look for pages in objects that are stored again.
    fn look_for_pages(&mut self, mut looking: Looking) {
        if !looking.crowd.is_empty() {
            if self.port.turn.is_spent() {
                self.port.turn.has_more = true;
                self.checkpoint = Checkpoint::Looking(looking);
                return;
            }
            self.port.turn.spend(MERGE_PAGES_MAX);
            let mut next = None;
            for (seen, (page, entry)) in self.store.map.directory.iter(looking.next).enumerate() {
                if seen == LOOK_PAGES_MAX {
                    next = Some(page);
                    break;
                }
                self.port.stats.pages_looked_at += 1;
                let slot = entry.slot() as usize;
                if looking.crowd.get(slot).copied().unwrap_or(false) {
                    looking.again.push_back(page);
                }
            }
            if let Some(next) = next {
                looking.next = next;
                self.port.turn.has_more = true;
                self.checkpoint = Checkpoint::Looking(looking);
                return;
            }
        }
        self.port.again = true;
        self.checkpoint = Checkpoint::Merging(Box::new(Merge {
            begin: looking.begin,
            next: 0,
            again: looking.again,
            window: VecDeque::new(),
            is_seen: false,
            gets: 0,
            retry_at: None,
            object: MapBuilder::default(),
            put: None,
        }));
    }

    fn pump_merge(&mut self, mut merge: Box<Merge>, actions: &mut Vec<Action>) {
        let done = self.go_on_merging(&mut merge, actions);
        if done {
            self.end_merge(merge.begin);
        } else {
            self.checkpoint = Checkpoint::Merging(merge);
        }
    }

    /// Everything is in pages that are stored.
    fn end_merge(&mut self, begin: u64) {
        self.store.gets.end_waits(turns::Kind::Map);
        self.store.map.thaw();
        for tail in self.tail.iter() {
            if tail.position <= begin {
                self.store.inventory.data.merged(tail.entry.number, begin);
            }
        }
        self.port.again = true;
        self.checkpoint = Checkpoint::Tallying(Tally {
            begin,
            next: 0,
            is_seen: false,
            entries: Vec::new(),
            usages: Vec::new(),
            put: None,
        });
    }

    /// Merge some more; true if that was all.
    fn go_on_merging(&mut self, merge: &mut Merge, actions: &mut Vec<Action>) -> bool {
        // While an object is put the next pages are fetched, and nobody waits for the turn of a get that nobody asks for.
        self.fill_window(merge);
        self.fetch_pages(merge, actions);
        if merge.put.is_none() {
            while let Some(front) = merge.window.front_mut() {
                let Content::Here(content) = &mut front.content else {
                    break;
                };
                if self.port.turn.is_spent() {
                    self.port.turn.has_more = true;
                    break;
                }
                let (page, entry) = (front.page, front.entry);
                let content = core::mem::take(content);
                match self.merge_page(&mut merge.object, merge.begin, page, entry, &content) {
                    Ok(()) => {
                        merge.window.pop_front();
                        self.port.turn.spend(1);
                        self.port.again = true;
                    }
                    Err(reason) => {
                        front.content = Content::Here(content);
                        if let NoRoom::Full = reason {
                            self.finish_object(merge);
                        }
                        break;
                    }
                }
            }
            if merge.put.is_none() && merge.is_seen && merge.window.is_empty() {
                if merge.object.built.is_empty() {
                    return true;
                }
                self.finish_object(merge);
            }
        }
        if let Some(put) = &mut merge.put
            && !put.in_flight
            && self.port.may_try()
        {
            put.in_flight = true;
            let (name, data) = (Name::own(Kind::Map, put.number), put.data.clone());
            self.put_map(name, data, actions);
        }
        false
    }

    fn put_map(&mut self, name: Name, data: Vec<Buf>, actions: &mut Vec<Action>) {
        self.port.stats.puts_map += 1;
        let token = self.port.issue(Purpose::PutMap);
        actions.push(Action::Put {
            token,
            name,
            data,
            slot_bytes: 0,
            condition: Condition::Always,
        });
    }

    /// Find the next pages to be merged.
    fn fill_window(&mut self, merge: &mut Merge) {
        let mut skips = 0;
        while !merge.is_seen && merge.window.len() < WINDOW_PAGES {
            let Ok(changed) = self.next_changed(&mut merge.next, &mut skips) else {
                self.port.turn.has_more = true;
                return;
            };
            let again = merge.again.front().copied();
            let Some(page) = changed.into_iter().chain(again).min() else {
                merge.is_seen = true;
                self.port.again = true;
                return;
            };
            merge.again.pop_front_if(|again| *again == page);
            merge.next = merge.next.max((page + 1) * self.store.map.page_blocks());
            let entry = self.store.map.directory.get(page);
            let content = match entry.filter(|entry| !entry.is_empty()) {
                None => Content::Here(Page::default()),
                Some(entry) => match self.store.map.cache.get(page, entry) {
                    Some(content) => Content::Here(content.clone()),
                    None => Content::Wanted,
                },
            };
            merge.window.push_back(Wanted {
                page,
                entry,
                content,
                is_changed: changed == Some(page),
                misses: 0,
                lost: None,
            });
        }
    }

    /// The next page that changes, from a block on. Pages that there are not are none where everything is unmapped.
    fn next_changed(&self, from: &mut u64, skips: &mut usize) -> Result<Option<u64>, TooMany> {
        let page_blocks = self.store.map.page_blocks();
        loop {
            let mut rest = self.store.map.frozen.range(*from, u64::MAX);
            let Some((first, count, place)) = rest.next() else {
                return Ok(None);
            };
            let page = first / page_blocks;
            if place.is_some() {
                return Ok(Some(page));
            }
            let end = first + count;
            let there = self.store.map.directory.next(page);
            if let Some(page) = there.filter(|page| page * page_blocks < end) {
                return Ok(Some(page));
            }
            *from = end;
            *skips += 1;
            if *skips > SKIPS_MAX {
                return Err(TooMany);
            }
        }
    }

    /// Ask for stored pages, those with one get that lie behind each other.
    fn fetch_pages(&mut self, merge: &mut Merge, actions: &mut Vec<Action>) {
        let mut waits = false;
        merge.retry_at = merge.retry_at.filter(|&at| self.port.now < at);
        let may_get = self.port.may_try() && merge.retry_at.is_none();
        while merge.gets < MERGE_GETS_MAX && may_get {
            let mut wanted = merge.window.iter();
            let Some(first) = wanted.position(|w| matches!(w.content, Content::Wanted)) else {
                break;
            };
            let mut pages: Vec<(u64, Entry)> = Vec::new();
            let mut bytes = 0;
            for wanted in merge.window.range(first..) {
                let (Content::Wanted, Some(entry)) = (&wanted.content, wanted.entry) else {
                    break;
                };
                let follows = pages
                    .last()
                    .is_none_or(|(_, before)| before.is_followed_by(entry));
                if !follows || bytes + entry.bytes() > MERGE_GET_BYTES {
                    break;
                }
                bytes += entry.bytes();
                pages.push((wanted.page, entry));
            }
            let count = pages.len();
            if !self.store.get_pages(
                pages,
                turns::Kind::Map,
                Purpose::Merge,
                &mut Context::new(&mut self.port, &self.manifest, actions),
            ) {
                waits = true;
                break;
            }
            merge.gets += 1;
            for wanted in merge.window.range_mut(first..first + count) {
                wanted.content = Content::Fetching;
            }
        }
        self.store
            .gets
            .set_waits(turns::Kind::Map, waits, &mut self.port);
    }

    pub(super) fn merge_ended(
        &mut self,
        get: &PageGet,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let is_lost = !matches!(result, Err(StoreError::Io(_)));
        let parsed = self.store.pages_ended(
            get,
            result,
            &mut Context::new(&mut self.port, &self.manifest, actions),
        );
        let blocks = self.blocks();
        let Checkpoint::Merging(merge) = &mut self.checkpoint else {
            return;
        };
        merge.gets -= 1;
        let (mut contents, error) = match parsed {
            Ok(contents) => (contents, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let is_damaged = error.is_none();
        let mut contents = contents.drain(..);
        let mut is_missed = false;
        for &(page, _) in &get.pages {
            let content = contents.next().flatten();
            let Some(at) = merge.window.iter().position(|wanted| wanted.page == page) else {
                continue;
            };
            let wanted = &mut merge.window[at];
            if let Some(content) = content {
                wanted.content = Content::Here(content);
                continue;
            }
            wanted.content = Content::Wanted;
            wanted.misses = wanted.misses.saturating_add(1);
            if !is_lost {
                wanted.lost = None;
            }
            if !wanted.is_changed && (is_lost || wanted.misses >= MISSES_MAX) {
                // Nothing needs it anew: it and its object stay as they are.
                merge.window.remove(at);
                self.port.again = true;
                continue;
            }
            if is_lost {
                let (since, times) = wanted.lost.get_or_insert((self.port.now, 0));
                *times += 1;
                if self.port.now >= since.plus(LOST_AFTER)
                    && *times >= LOST_TIMES
                    && let Some(content) =
                        self.store.map.without(page, blocks, get.number, is_damaged)
                {
                    self.port.stats.lost_pages += u64::from(!content.runs().is_empty());
                    wanted.content = Content::Here(content);
                    self.port.again = true;
                    continue;
                }
            }
            is_missed = true;
        }
        if !is_missed {
            return;
        }
        // It is needed: try again, and let those know who wait for the map to be stored.
        if is_lost {
            merge.retry_at = Some(self.port.now.plus(LOST_PAUSE));
        }
        let Some(error) = error else {
            // It is decided soon.
            return;
        };
        let is_waited_for = self.store.map.has_too_many_changes()
            || self.tail.has_too_many_runs()
            || self.tail.is_full();
        if is_waited_for {
            self.fail_waiting(error, actions);
        } else if !is_lost {
            self.port.back_off();
        }
    }

    /// Change a page and add it to the object that is being built.
    fn merge_page(
        &mut self,
        object: &mut MapBuilder,
        begin: u64,
        page: u64,
        entry: Option<Entry>,
        before: &Page,
    ) -> Result<(), NoRoom> {
        if object.built.len() >= OBJECT_MAP_PAGES_MAX {
            return Err(NoRoom::Full);
        }
        let page_blocks = self.store.map.page_blocks();
        let (first, own_first) = (page * page_blocks, self.manifest.own_first());
        let mut content = before.clone();
        let (mut freed, mut used) = (Vec::new(), Vec::new());
        let mut is_inherited =
            own_first > 0 && entry.is_none_or(|entry| self.store.is_of_ancestor(entry, own_first));
        for (block, count, place) in self.store.map.frozen.range(first, first + page_blocks) {
            let from = (block - first) as u32;
            content.set(from, from + count as u32, place, |place, blocks| {
                freed.push((place.number(), blocks));
            });
            used.extend(place.map(|place| (place.number(), count as u32)));
            is_inherited &= place.is_some_and(|place| place.number() < own_first);
        }
        let bytes = match content.runs().len() {
            // An older object may have the page, so this one has to say that it is empty.
            0 => 0,
            runs => page_bytes(runs),
        };
        let offset = self.add_page(object, page, &content, bytes)?;
        for (number, blocks) in used {
            self.store.inventory.data.use_more(number, blocks);
        }
        for (number, blocks) in freed {
            self.store.inventory.data.use_less(number, blocks, begin);
        }
        let stays = self.store.map.cache.holds(page) || self.store.map.cache.has_room();
        self.port.stats.pages_merged += 1;
        object.built.push(Built {
            place: IndexEntry {
                page,
                offset: offset as u32,
                bytes: bytes as u32,
                is_full: content.blocks() == page_blocks,
                is_inherited,
            },
            content: stays.then_some(content),
        });
        Ok(())
    }

    /// Write a page to the object that is being built; its offset there.
    fn add_page(
        &mut self,
        object: &mut MapBuilder,
        page: u64,
        content: &Page,
        bytes: usize,
    ) -> Result<usize, NoRoom> {
        if object.number == 0 {
            let number = self.commits.next_number(&self.manifest, &mut self.port);
            object.number = number.ok_or(NoRoom::Memory)?;
            self.commits.use_number();
        }
        let whole = bytes.next_multiple_of(PAGE_ALIGN);
        if object.used + whole > OBJECT_MAP_CHUNK_BYTES {
            object.close_chunk();
        }
        if object.offset() + whole > OBJECT_MAP_BYTES_MAX {
            return Err(NoRoom::Full);
        }
        if bytes == 0 {
            return Ok(object.offset());
        }
        if object.chunk.is_none() {
            let chunk = self.port.control_pool.alloc(OBJECT_MAP_CHUNK_BYTES);
            object.chunk = Some(chunk.ok_or(NoRoom::Memory)?);
        }
        let offset = object.offset();
        if let Some(chunk) = &mut object.chunk {
            let out = &mut chunk[object.used..object.used + whole];
            out[bytes..].fill(0);
            let (volume, runs) = (self.manifest.volume, content.runs());
            write_page(volume, object.number, page, runs, &mut out[..bytes]);
            object.used += whole;
        }
        Ok(offset)
    }

    /// Put what is built.
    fn finish_object(&mut self, merge: &mut Merge) {
        let pages: Vec<IndexEntry> = merge.object.built.iter().map(|b| b.place).collect();
        let bytes = index_bytes(pages.len());
        let Some(mut index) = self.port.control_pool.alloc(bytes) else {
            return;
        };
        let mut object = core::mem::take(&mut merge.object);
        object.close_chunk();
        write_index(self.manifest.volume, object.number, &pages, &mut index);
        let mut data = object.full;
        data.push(index.freeze());
        let slot = self.store.inventory.maps.insert(MapEntry {
            number: object.number,
            bytes: object_bytes(object.full_bytes, pages.len()) as u32,
            entries: pages.len() as u32,
        });
        merge.put = Some(MapPut {
            number: object.number,
            slot,
            data,
            in_flight: false,
            built: object.built,
        });
        self.port.again = true;
    }

    /// The directory points to what was built.
    fn take_built(&mut self, slot: u32, built: Vec<Built>) {
        for Built { place, content } in built {
            let entry = Entry::new(slot, place.offset as usize, place.bytes as usize);
            let entry = entry.with(place.is_full, place.is_inherited);
            let store = &mut self.store;
            (store.inventory.maps).point(&mut store.map.directory, place.page, Some(entry));
            match content {
                Some(content) => self.store.map.cache.insert(place.page, entry, content),
                // A later object may have the slot of the one where it was, so its entry would tell nothing.
                None => self.store.map.cache.forget(place.page),
            }
        }
    }

    /// Store how much of which data objects the map needs.
    fn pump_tally(&mut self, mut tally: Tally, actions: &mut Vec<Action>) {
        if tally.put.is_none() && self.tally_some(&mut tally) {
            self.port.again = true;
            self.checkpoint = Checkpoint::Ready {
                begin: tally.begin,
                maps: self.store.inventory.maps.live(),
                usages: tally.usages,
            };
            return;
        }
        if let Some((entry, data, in_flight)) = &mut tally.put
            && !*in_flight
            && self.port.may_try()
        {
            *in_flight = true;
            let (name, data) = (Name::own(Kind::Map, entry.number), data.clone());
            self.put_map(name, data, actions);
        }
        self.checkpoint = Checkpoint::Tallying(tally);
    }

    /// Fill a usage table, or a part of it; true if there are no more.
    fn tally_some(&mut self, tally: &mut Tally) -> bool {
        if !tally.is_seen && tally.entries.len() < OBJECT_USAGE_ENTRIES_MAX {
            if self.port.turn.is_spent() {
                self.port.turn.has_more = true;
                return false;
            }
            self.port.turn.spend(MERGE_PAGES_MAX);
            let mut rest = self.store.inventory.data.range(tally.next);
            for _ in 0..LOOK_PAGES_MAX {
                let Some((number, object)) = rest.next() else {
                    tally.is_seen = true;
                    break;
                };
                tally.next = number + 1;
                if object.is_merged() && object.live > 0 {
                    tally.entries.push(Usage {
                        number,
                        live: object.live,
                        runs: object.runs,
                        is_compressed: object.is_compressed(),
                    });
                    if tally.entries.len() == OBJECT_USAGE_ENTRIES_MAX {
                        break;
                    }
                }
            }
            self.port.turn.has_more = true;
        }
        if !tally.is_seen && tally.entries.len() < OBJECT_USAGE_ENTRIES_MAX {
            return false;
        }
        if tally.entries.is_empty() {
            return true;
        }
        let number = self.commits.next_number(&self.manifest, &mut self.port);
        let Some(number) = number else {
            return false;
        };
        let bytes = usage_bytes(tally.entries.len());
        let Some(mut table) = self.port.control_pool.alloc(bytes) else {
            return false;
        };
        self.commits.use_number();
        write_usage(self.manifest.volume, number, &tally.entries, &mut table);
        let entry = MapEntry {
            number,
            bytes: bytes as u32,
            entries: tally.entries.len() as u32,
        };
        tally.entries.clear();
        self.store.inventory.insert_usage(number);
        tally.put = Some((entry, alloc::vec![table.freeze()], false));
        false
    }

    pub(super) fn put_map_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let failed = result.err().map(StoreError::as_io);
        match &mut self.checkpoint {
            Checkpoint::Merging(merge) => {
                if failed.is_none()
                    && let Some(put) = merge.put.take()
                {
                    self.take_built(put.slot, put.built);
                } else if let Some(put) = &mut merge.put {
                    put.in_flight = false;
                }
            }
            Checkpoint::Tallying(tally) => {
                if failed.is_none()
                    && let Some((entry, ..)) = tally.put.take()
                {
                    tally.usages.push(entry);
                } else if let Some((_, _, in_flight)) = &mut tally.put {
                    *in_flight = false;
                }
            }
            _ => return,
        }
        match failed {
            None => self.port.went_well(),
            Some(error) => self.fail_waiting(error, actions),
        }
    }

    /// The newest manifest names the map as it was stored last.
    pub(super) fn adopt(&mut self) {
        let Checkpoint::Ready { begin, .. } = self.checkpoint else {
            return;
        };
        self.checkpoint = Checkpoint::Idle;
        self.commits.adopt(begin);
        self.tail.forget(begin);
        self.store.inventory.adopt(&self.manifest);
        if self.clone_pin > 0 && self.scan.knows_clones() {
            // They may have been deleted since, and nobody tells.
            self.scan.again_for_clones();
        }
    }
}

/// A turn has passed over as many ranges as it may.
struct TooMany;
