//! Storing the map, so that the tail may begin anew.
//!
//! ```text
//!  Idle ─tail long enough─► Looking ─every page seen─► Writing ─every page put─► Ready ─manifest names it─► Idle
//! ```
//!
//! Looking goes over the pages of the map in steps of [`SCAN_PAGES_MAX`], so that no turn takes time by the size of the
//! volume. A page that changes behind it is newer than `begin`: the tail has what changed.
//!
//! Pages are stored one after another while the volume goes on, so they are of different moments:
//! none older than the `begin` of the checkpoint, none newer than its `upto`. A manifest whose state is
//! at `upto` or later may name them, with a tail that starts after `begin`: the tail is applied in
//! order over the pages, and whatever of it a page has already is said once more.
//!
//! Object and page are told apart by numbers that grow: of two copies of a page the one in the
//! object with the higher number counts, so objects may be read in any order.

use alloc::vec::Vec;

use super::format::MapWriter;
use super::io::{Action, Condition, Kind, Name, StoreError, Stored};
use super::{MapObject, ObjectVolume, Purpose, SCAN_PAGES_MAX};
use crate::buf::Buf;
use crate::limits::{
    OBJECT_MAP_CHUNK_BYTES, OBJECT_MAP_CHUNKS_MAX, OBJECT_TAIL_MAX, OBJECT_TAIL_UNFLUSHED_MAX,
};

/// The map is stored when the tail has so many bytes for each byte of the map: the map costs this
/// much less than the data.
const TAIL_PER_MAP: u64 = 32;
/// But not before so many batches ...
const TAIL_BATCHES_MIN: u64 = 4;
/// ... or so many objects, small ones perhaps, and so many more for each object of the map.
const TAIL_OBJECTS_MIN: usize = 64;
const TAIL_OBJECTS_PER_MAP: usize = 8;
/// Objects of the map that are less than a quarter full, beyond which they are stored again.
const SMALL_MAPS_MAX: usize = 8;
const SMALL_MAP_BYTES: u32 = (OBJECT_MAP_CHUNK_BYTES * OBJECT_MAP_CHUNKS_MAX / 4) as u32;

impl MapObject {
    fn is_small(&self) -> bool {
        self.bytes < SMALL_MAP_BYTES
    }
}

/// How far the storing of the map is.
#[derive(Debug)]
pub(super) enum Checkpoint {
    Idle,
    /// Finding the pages that are to be stored.
    Looking {
        begin: u64,
        /// The next one to look at.
        next: u64,
        /// Whether small objects of the map are stored again.
        crowd: bool,
        /// In ascending order.
        pages: Vec<u64>,
    },
    Writing {
        begin: u64,
        upto: u64,
        /// Pages to be stored, in descending order.
        pages: Vec<u64>,
        put: Option<Put>,
    },
    Ready {
        begin: u64,
        upto: u64,
    },
}

/// An object of the map on its way.
#[derive(Debug)]
pub(super) struct Put {
    number: u64,
    data: Vec<Buf>,
    in_flight: bool,
}

impl ObjectVolume {
    pub(super) fn pump_checkpoint(&mut self, actions: &mut Vec<Action>) {
        match &self.checkpoint {
            Checkpoint::Idle if self.is_checkpoint_due() => self.begin_checkpoint(),
            Checkpoint::Ready { upto, .. }
                if self.tail.len() >= OBJECT_TAIL_MAX
                    && *upto > self.committed
                    && self.flushes.is_empty()
                    && (self.tail.len() >= OBJECT_TAIL_UNFLUSHED_MAX
                        || !self.has_unflushed_writes()) =>
            {
                // Writes wait for it, so nobody may be left to flush.
                self.begin_flush(None);
            }
            _ => {}
        }
        self.look_for_pages();
        if let Checkpoint::Writing { .. } = self.checkpoint {
            self.store_pages(actions);
        }
    }

    fn is_checkpoint_due(&self) -> bool {
        let batch = (self.config.batch_blocks * super::format::SLOT_BYTES) as u64;
        let map = self.map.memory_bytes() as u64;
        let objects = TAIL_OBJECTS_MIN + self.maps.len() * TAIL_OBJECTS_PER_MAP;
        self.tail_bytes >= (TAIL_BATCHES_MIN * batch).max(TAIL_PER_MAP * map)
            || self.tail.len() >= objects.min(OBJECT_TAIL_MAX)
    }

    fn begin_checkpoint(&mut self) {
        let crowd = self.maps.values().filter(|map| map.is_small()).count() > SMALL_MAPS_MAX;
        self.checkpoint = Checkpoint::Looking {
            begin: self.last_sealed,
            next: 0,
            crowd,
            pages: Vec::new(),
        };
    }

    /// Look at some more pages: which differ from what is stored, or are stored in an object that is mostly of no use?
    fn look_for_pages(&mut self) {
        let own = self.own_first();
        let Checkpoint::Looking {
            begin,
            next,
            crowd,
            pages,
        } = &mut self.checkpoint
        else {
            return;
        };
        let again = |number: u64| {
            self.maps.get(&number).is_some_and(|map| {
                let sparse = map.live * 2 < map.pages;
                number >= own && (sparse || (*crowd && map.is_small()))
            })
        };
        let mut seen = 0;
        for (number, page) in self.map.pages(*next).take(SCAN_PAGES_MAX) {
            seen += 1;
            *next = number + 1;
            if page.dirty || again(page.stored_in) {
                pages.push(number);
            }
        }
        self.stats.pages_looked_at += seen as u64;
        if seen == SCAN_PAGES_MAX {
            return;
        }
        let (begin, mut pages) = (*begin, core::mem::take(pages));
        pages.reverse();
        self.checkpoint = Checkpoint::Writing {
            begin,
            upto: begin,
            pages,
            put: None,
        };
    }

    fn store_pages(&mut self, actions: &mut Vec<Action>) {
        let may_try = self.may_try();
        let Checkpoint::Writing {
            begin,
            upto,
            pages,
            put,
        } = &mut self.checkpoint
        else {
            return;
        };
        if put.is_none() {
            if pages.is_empty() {
                self.checkpoint = Checkpoint::Ready {
                    begin: *begin,
                    upto: *upto,
                };
                self.again = true;
                return;
            }
            if self.next_number >= self.manifest.number_limit {
                return self.recommit();
            }
            *upto = self.last_sealed;
            let pages = core::mem::take(pages);
            if self.fill_object(pages) {
                self.store_pages(actions);
            }
            return;
        }
        if let Some(put) = put
            && !put.in_flight
            && may_try
        {
            put.in_flight = true;
            let name = Name::own(Kind::Map, put.number);
            let data = put.data.clone();
            self.stats.puts_map += 1;
            let token = self.issue(Purpose::PutMap);
            actions.push(Action::Put {
                token,
                name,
                data,
                slot_bytes: 0,
                condition: Condition::Always,
            });
        }
    }

    /// Write pages to the next object of the map, as many as fit; the rest goes back. False if there
    /// is no memory for any at present.
    fn fill_object(&mut self, mut pages: Vec<u64>) -> bool {
        let number = self.next_number;
        let mut data = Vec::new();
        let mut bytes = 0;
        let mut stored = Vec::new();
        while data.len() < OBJECT_MAP_CHUNKS_MAX && !pages.is_empty() {
            let Some(mut chunk) = self.control_pool.alloc(OBJECT_MAP_CHUNK_BYTES) else {
                break;
            };
            let mut writer = MapWriter::new(&mut chunk);
            while let Some(&page) = pages.last() {
                let runs = self.map.page(page).map_or(&[][..], |page| page.runs());
                if !writer.add(page, runs) {
                    break;
                }
                pages.pop();
                stored.push(page);
            }
            let used = writer.finish(self.manifest.volume, number, data.len() as u32);
            let last = pages.is_empty() || data.len() + 1 == OBJECT_MAP_CHUNKS_MAX;
            let length = if last { used } else { OBJECT_MAP_CHUNK_BYTES };
            bytes += length;
            data.push(chunk.narrow(0..length).freeze());
        }
        let count = stored.len() as u32;
        for page in stored {
            if let Some(page) = self.map.page_mut(page) {
                if let Some(old) = self.maps.get_mut(&page.stored_in) {
                    old.live -= 1;
                }
                page.stored_in = number;
                page.dirty = false;
            }
        }
        if let Checkpoint::Writing {
            pages: rest, put, ..
        } = &mut self.checkpoint
        {
            *rest = pages;
            if count > 0 {
                self.next_number += 1;
                let object = MapObject {
                    bytes: bytes as u32,
                    pages: count,
                    live: count,
                };
                self.maps.insert(number, object);
                *put = Some(Put {
                    number,
                    data,
                    in_flight: false,
                });
            }
        }
        count > 0
    }

    pub(super) fn put_map_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let Checkpoint::Writing { put, .. } = &mut self.checkpoint else {
            return;
        };
        match result {
            Ok(_) => {
                *put = None;
                self.went_well();
            }
            Err(error) => {
                if let Some(put) = put {
                    put.in_flight = false;
                }
                self.fail_waiting(error.as_io(), actions);
            }
        }
    }

    /// The newest manifest names the map as it was stored last.
    pub(super) fn adopt(&mut self) {
        let Checkpoint::Ready { begin, .. } = self.checkpoint else {
            return;
        };
        self.checkpoint = Checkpoint::Idle;
        while let Some(tail) = self.tail.pop_front_if(|tail| tail.entry.number <= begin) {
            self.tail_bytes -= tail.entry.bytes();
        }
        let maps = &mut self.maps;
        let dropped = maps.extract_if(.., |_, map| map.live == 0);
        self.dropped_maps.extend(dropped.map(|(number, _)| number));
        if self.clone_pin > 0 && self.scan.knows_clones() {
            // They may have been deleted since, and nobody tells.
            self.scan.again_for_clones();
        }
    }
}
