//! Freeing objects: copying forward what is left of them, removing what nobody needs, and looking
//! for what nobody knows.
//!
//! A dead object is removed when a manifest names the pages of the map without it, if it is above every pin and not
//! being read. What a listing shows and nobody knows is removed if its number is below those of this epoch: it was never
//! committed, or was put late, by an owner of before.
//!
//! Which blocks an object held says its own table, and which of them it still holds the map: an object that is mostly
//! dead costs one get for its table, and gets for the pages of its blocks that are not in memory.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

use super::ObjectVolume;
use super::block_store::{Waiter, is_good, slot};
use super::data::Object;
use super::format::{Reference, SLOT_BYTES, SLOT_NONE, parse_table, table_bytes};
use super::gets::FETCH_BLOCKS_MAX;
use super::io::{Action, Kind, Listed, Name, StoreError, Stored};
use super::map::{Found, Place};
use super::port::{Context, Purpose};
use super::turns;
use crate::base::buf::BufMut;
use crate::base::limits::{BLOCK_BYTES, OBJECT_LAP_STEP, OBJECT_TAIL_MAX, OBJECT_VOLUME_BYTES_MAX};

/// Part of what is stored that may be dead, in percent.
const GARBAGE_PERCENT_MAX: u64 = 40;
/// And so many batches beside, so that a small volume is left alone.
const GARBAGE_BATCHES_MIN: u64 = 2;
/// An object of which more is alive is not worth copying, in percent.
const VICTIM_LIVE_PERCENT_MAX: u64 = 85;
/// Objects of less than an eighth of a batch, beyond which they are copied together.
const SMALL_OBJECTS_MAX: usize = 64;
/// Objects that one lap finds worth copying, at most: their numbers are in memory.
const VICTIMS_MAX: usize = 4096;
/// Gets for copies at once: clients come first.
const COPIES_IN_FLIGHT_MAX: usize = 2;
/// Slots between two of a get that nobody wants.
const GAP_SLOTS_MAX: u32 = 3;
/// Blocks that one search finds, in batches: what it has found is in memory.
const FOUND_BATCHES_MAX: usize = 8;
/// Objects that nobody needs and that one opening finds, and references of clones: their names are in memory.
const STRAYS_MAX: usize = 64 << 10;
/// Blocks ahead of the next one whose pages are asked for.
const PAGES_AHEAD: usize = 16;

/// What is being copied forward.
#[derive(Debug)]
pub(super) enum Collect {
    Idle,
    /// Reading which blocks the next victims hold.
    Searching {
        asked: bool,
        searched: Vec<u64>,
        found: Vec<(Place, u64)>,
    },
    /// Fetching and gathering those that the map still has there, in the order of their places.
    Copying {
        /// Of these objects.
        searched: Vec<u64>,
        found: Vec<(Place, u64)>,
        next: usize,
        in_flight: usize,
        fetched: VecDeque<(Copy, BufMut)>,
        /// Whether something was not copied.
        has_failed: bool,
    },
}

/// A walk over the objects, a bounded part of it after each commit: what is stored, and which objects are
/// worth copying.
#[derive(Debug, Default)]
pub(super) struct Lap {
    next: u64,
    stored: u64,
    live: u64,
    sparse: Best,
    small: Best,
    small_count: usize,
}

/// The best victims.
#[derive(Debug, Default)]
struct Best(BTreeMap<Rank, Gain>);

/// How much of an object is alive, in percent, and its number.
type Rank = (u64, u64);

/// What copying an object costs and brings.
#[derive(Clone, Copy, Debug)]
struct Gain {
    live_blocks: u64,
    freed_bytes: u64,
}

impl Best {
    fn add(&mut self, rank: Rank, gain: Gain) {
        self.0.insert(rank, gain);
        if self.0.len() > VICTIMS_MAX {
            self.0.pop_last();
        }
    }

    /// The best of them, as many as free so much; no fewer than fill a batch with what is alive.
    fn victims(self, batch_blocks: u64, bytes: u64) -> VecDeque<u64> {
        let (mut live, mut freed) = (0, 0);
        let mut is_wanted = |gain: &Gain| {
            let is_wanted = live < batch_blocks || freed < bytes;
            live += gain.live_blocks;
            freed += gain.freed_bytes;
            is_wanted
        };
        let ranked = self.0.into_iter();
        let best = ranked.take_while(|(_, gain)| is_wanted(gain));
        best.map(|((_, number), _)| number).collect()
    }
}

impl Lap {
    /// Which objects are to be copied, if there is enough garbage in objects, or if enough are small. However long a lap
    /// has taken, they bring what may be garbage back to its part.
    fn victims(self, batch_blocks: u64) -> VecDeque<u64> {
        let batch = batch_blocks * SLOT_BYTES as u64;
        let garbage = self.stored - self.live;
        let allowed = self.stored * GARBAGE_PERCENT_MAX / 100;
        if garbage > GARBAGE_BATCHES_MIN * batch && garbage > allowed {
            // What is freed is stored no more, either.
            let excess = (garbage - allowed) * 100 / (100 - GARBAGE_PERCENT_MAX);
            self.sparse.victims(batch_blocks, excess)
        } else if self.small_count > SMALL_OBJECTS_MAX {
            self.small.victims(batch_blocks, u64::MAX)
        } else {
            VecDeque::new()
        }
    }
}

/// Blocks that are fetched with one get: where they are, and which they are.
#[derive(Debug)]
pub(super) struct Copy {
    first: Place,
    blocks: Vec<(Place, u64)>,
    /// How many of them are gathered.
    done: usize,
}

/// The search for objects that nobody knows.
#[derive(Debug)]
pub(super) struct Scan {
    todo: VecDeque<Kind>,
    after: String,
    pending: bool,
    /// And their sizes.
    references: Vec<(Name, usize)>,
    reading: bool,
    pin: u64,
    clones_known: bool,
    /// Objects that were found and are not needed.
    strays: usize,
}

impl Default for Scan {
    fn default() -> Self {
        Self {
            // Nothing is removed before it is known what clones need.
            todo: VecDeque::from([
                Kind::Clone,
                Kind::Data,
                Kind::Map,
                Kind::Manifest,
                Kind::Snapshot,
            ]),
            after: String::new(),
            pending: false,
            references: Vec::new(),
            reading: false,
            pin: 0,
            clones_known: false,
            strays: 0,
        }
    }
}

impl Scan {
    /// A snapshot is named no more: look for clones of it.
    pub(super) fn again_for_clones(&mut self) {
        self.todo.push_back(Kind::Clone);
        self.clones_known = false;
    }

    /// Whether nothing is left to be looked for.
    pub(super) fn knows_clones(&self) -> bool {
        self.todo.is_empty()
    }
}

impl ObjectVolume {
    /// After a commit: look at some more objects, and at the end of a lap, is there enough to be freed?
    pub(super) fn consider_collecting(&mut self) {
        if !matches!(self.collect, Collect::Idle) || !self.scan.todo.is_empty() {
            return;
        }
        let pin = self.pin();
        let batch_blocks = self.config.batch_blocks as u64;
        let small = batch_blocks * SLOT_BYTES as u64 / 8;
        let lap = &mut self.lap;
        let mut rest = self.store.inventory.data.range(lap.next.max(pin));
        for _ in 0..OBJECT_LAP_STEP {
            let Some((number, object)) = rest.next() else {
                drop(rest);
                self.victims = core::mem::take(&mut self.lap).victims(batch_blocks);
                return self.search_next();
            };
            lap.next = number + 1;
            self.port.stats.objects_looked_at += 1;
            // It may be merged before it is put.
            if !object.is_worth_a_look() || self.batches.contains_key(&number) {
                continue;
            }
            lap.stored += u64::from(object.bytes);
            lap.live += object.live_bytes();
            let gain = Gain {
                live_blocks: u64::from(object.live),
                freed_bytes: u64::from(object.bytes) - object.live_bytes(),
            };
            let percent = object.live_bytes() * 100 / u64::from(object.bytes);
            if percent <= VICTIM_LIVE_PERCENT_MAX {
                lap.sparse.add((percent, number), gain);
            }
            if object.plain_bytes() < small {
                lap.small_count += 1;
                lap.small.add((0, number), gain);
            }
        }
    }

    /// Begin to copy what the next victims hold, if there are any.
    fn search_next(&mut self) {
        if !self.victims.is_empty() {
            self.port.again = true;
            self.collect = Collect::Searching {
                asked: false,
                searched: Vec::new(),
                found: Vec::new(),
            };
        }
    }

    pub(super) fn pump_collect(&mut self, actions: &mut Vec<Action>) {
        let waits = core::mem::take(&mut self.copy_waits)
            | (self.search(actions) || self.fetch_copies(actions));
        self.store
            .gets
            .set_waits(turns::Kind::Copy, waits, &mut self.port);
        let Collect::Copying {
            searched,
            found,
            next,
            in_flight: 0,
            fetched,
            has_failed,
        } = &self.collect
        else {
            return;
        };
        if *next < found.len() || !fetched.is_empty() {
            return;
        }
        if !has_failed {
            for &number in searched {
                self.store.inventory.data.mark_copied(number);
            }
        }
        self.collect = Collect::Idle;
        self.search_next();
        // With nothing else to be committed, the copies are no other state than that of before.
        if !self.has_unflushed_writes()
            && self.commits.has_no_flush()
            && self.last_sealed_or_gathered()
        {
            self.begin_flush(None);
        }
    }

    fn last_sealed_or_gathered(&self) -> bool {
        self.tail.last() > self.commits.committed() || !self.gathering.is_empty()
    }

    /// Ask which blocks the next victim holds; true if that waits for a get.
    fn search(&mut self, actions: &mut Vec<Action>) -> bool {
        let found_max = self.config.batch_blocks * FOUND_BATCHES_MAX;
        let Collect::Searching {
            asked: false,
            searched,
            found,
        } = &mut self.collect
        else {
            return false;
        };
        let next = self.victims.front().copied();
        let Some(number) = next.filter(|_| found.len() < found_max) else {
            let (searched, mut found) = (core::mem::take(searched), core::mem::take(found));
            found.sort_unstable();
            self.port.again = true;
            self.collect = Collect::Copying {
                searched,
                found,
                next: 0,
                in_flight: 0,
                fetched: VecDeque::new(),
                has_failed: false,
            };
            return false;
        };
        // It may have died, or be pinned, since it was found.
        let object = self.store.inventory.data.get(number);
        let object = object.filter(|object| object.is_worth_a_look() && number >= self.pin());
        let table = object.and_then(|o| Some((o.table_offset()?, table_bytes(o.runs.into()))));
        let Some((offset, bytes)) = table else {
            // Nothing of it is needed any more, or the store has another one.
            self.victims.pop_front();
            self.port.again = true;
            return false;
        };
        if !self.store.gets.may_begin(turns::Kind::Copy) {
            return true;
        }
        let cx = &mut Context::new(&mut self.port, &self.manifest, actions);
        if !self.store.gets.table(number, offset, bytes, cx) {
            return true;
        }
        if let Collect::Searching { asked, .. } = &mut self.collect {
            *asked = true;
        }
        false
    }

    /// What an object held, as its table says.
    pub(super) fn victim_ended(
        &mut self,
        number: u64,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let result = self.store.gets.ended(
            number,
            result,
            &mut Context::new(&mut self.port, &self.manifest, actions),
        );
        let compressed = self
            .store
            .inventory
            .data
            .get(number)
            .is_some_and(Object::is_compressed);
        let Collect::Searching {
            asked,
            searched,
            found,
        } = &mut self.collect
        else {
            return;
        };
        *asked = false;
        self.port.again = true;
        // One that cannot be read stays as it is, for the next time.
        self.victims.pop_front();
        let Ok(buf) = result else {
            return;
        };
        let writer = self.manifest.volume;
        let blocks = OBJECT_VOLUME_BYTES_MAX / BLOCK_BYTES as u64;
        let Ok((_, runs)) = parse_table(&writer, number, blocks, &buf) else {
            self.store.damaged(number, &mut self.port);
            return;
        };
        searched.push(number);
        let origin = Place::new(number, 0);
        let origin = if compressed {
            origin.compressed()
        } else {
            origin
        };
        for run in runs.iter().filter(|run| run.slot.get() != SLOT_NONE) {
            let (block, slot) = (run.block.get(), run.slot.get());
            found.extend((0..run.count.get()).filter_map(|index| {
                let (place, block) = (origin.plus(slot + index), block + u64::from(index));
                let elsewhere = match self.store.map.find(block, 1) {
                    Found::Here(at, _) => at != Some(place),
                    Found::Page(_) => false,
                };
                (!elsewhere).then_some((place, block))
            }));
        }
    }

    /// A copy was not made.
    fn fail_copy(&mut self) {
        if let Collect::Copying { has_failed, .. } = &mut self.collect {
            *has_failed = true;
        }
    }

    /// A page or a block that is needed for copying could not be read: give up what is left, for the next time.
    pub(super) fn fail_collecting(&mut self) {
        if let Collect::Copying {
            found,
            next,
            fetched,
            has_failed,
            ..
        } = &mut self.collect
        {
            *next = found.len();
            fetched.clear();
            *has_failed = true;
        }
    }

    /// A page of the map is lost, so nobody knows what of its blocks is current: objects that may hold some are not
    /// copied, lest they are tried first every time, and nothing else is freed.
    pub(super) fn leave_where_they_are(&mut self, page: u64) {
        if let Collect::Copying { found, .. } = &self.collect {
            let page_blocks = self.store.map.page_blocks();
            for (place, _) in found.iter().filter(|(_, b)| b / page_blocks == page) {
                self.store.inventory.data.mark_damaged(place.number());
            }
        }
    }

    /// Whether copies leave clients enough of the changes and of the tail that there may be before the map is stored.
    fn may_copy(&self) -> bool {
        self.store.map.has_room_for_copies() && self.tail.len() < OBJECT_TAIL_MAX / 2
    }

    /// Ask for what is to be copied; true if that waits for a get.
    fn fetch_copies(&mut self, actions: &mut Vec<Action>) -> bool {
        if matches!(self.collect, Collect::Copying { .. }) && !self.may_copy() {
            // The next lap finds the rest.
            self.victims.clear();
            self.fail_collecting();
        }
        loop {
            let Collect::Copying {
                found,
                next,
                in_flight,
                fetched,
                ..
            } = &mut self.collect
            else {
                return false;
            };
            if *in_flight + fetched.len() >= COPIES_IN_FLIGHT_MAX || *next == found.len() {
                return false;
            }
            if !self.store.gets.may_begin(turns::Kind::Copy) {
                return true;
            }
            let (first, block) = found[*next];
            match self.store.map.find(block, 1) {
                Found::Here(place, _) if place == Some(first) => {}
                Found::Here(..) => {
                    // Written over meanwhile; its object may be gone.
                    *next += 1;
                    continue;
                }
                Found::Page(_) => return !self.want_pages_ahead(actions),
            }
            let mut end = *next + 1;
            while let Some(&(place, _)) = found.get(end)
                && place.number() == first.number()
                && place.0 - found[end - 1].0.0 <= u64::from(GAP_SLOTS_MAX) + 1
                && place.0 - first.0 < FETCH_BLOCKS_MAX
            {
                end += 1;
            }
            let slots = (found[end - 1].0.0 - first.0 + 1) as u32;
            let copy = Copy {
                first,
                blocks: found[*next..end].to_vec(),
                done: 0,
            };
            let (kind, purpose) = (turns::Kind::Copy, Purpose::Copy(copy));
            let cx = &mut Context::new(&mut self.port, &self.manifest, actions);
            let token = self.store.gets.slots(first, slots, kind, purpose, cx);
            if token.is_none() {
                return true;
            }
            if let Collect::Copying {
                next, in_flight, ..
            } = &mut self.collect
            {
                *next = end;
                *in_flight += 1;
            }
        }
    }

    /// Ask for the pages of the next blocks; false if that has to wait for a get.
    fn want_pages_ahead(&mut self, actions: &mut Vec<Action>) -> bool {
        let Collect::Copying { found, next, .. } = &self.collect else {
            return true;
        };
        let end = found.len().min(*next + PAGES_AHEAD);
        let blocks: Vec<u64> = found[*next..end].iter().map(|&(_, block)| block).collect();
        for block in blocks {
            if let Found::Page(page) = self.store.map.find(block, 1)
                && !self.store.want_page(
                    page,
                    Waiter::Copy,
                    &mut Context::new(&mut self.port, &self.manifest, actions),
                )
            {
                return false;
            }
        }
        true
    }

    pub(super) fn copy_ended(
        &mut self,
        copy: Copy,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let result = self.store.gets.ended(
            copy.first.number(),
            result,
            &mut Context::new(&mut self.port, &self.manifest, actions),
        );
        if let Collect::Copying {
            in_flight,
            fetched,
            has_failed,
            ..
        } = &mut self.collect
        {
            *in_flight -= 1;
            // What could not be read stays where it is, for the next time.
            match result {
                Ok(buf) => fetched.push_back((copy, buf)),
                Err(_) => *has_failed = true,
            }
        }
    }

    /// Gather what was fetched and is still where it was.
    pub(super) fn gather_copies(&mut self, actions: &mut Vec<Action>) {
        let Collect::Copying { fetched, .. } = &mut self.collect else {
            return;
        };
        let mut fetched = core::mem::take(fetched);
        while let Some((copy, buf)) = fetched.front_mut() {
            if self.seal_wanted || !self.gather_copy(copy, buf, actions) {
                break;
            }
            fetched.pop_front();
            self.port.again = true;
        }
        if let Collect::Copying { fetched: place, .. } = &mut self.collect {
            *place = fetched;
        }
    }

    /// Gather one; false if there is no room at present, or if it has to be looked up first whether it is current.
    fn gather_copy(&mut self, copy: &mut Copy, buf: &BufMut, actions: &mut Vec<Action>) -> bool {
        while let Some(&(place, block)) = copy.blocks.get(copy.done) {
            if self.gathering.is_full() && !self.seal() {
                return false;
            }
            if self.gathering.partial.contains_key(&block) {
                // Should the rest of it not come, it stays where it is.
                self.fail_copy();
            }
            let is_current = match self.store.map.find(block, 1) {
                _ if self.gathering.holds(block) => false,
                Found::Here(at, _) => at == Some(place),
                Found::Page(_) => {
                    let rest = copy.blocks[copy.done..].iter().take(PAGES_AHEAD);
                    for &(_, block) in rest {
                        if let Found::Page(page) = self.store.map.find(block, 1)
                            && !self.store.want_page(
                                page,
                                Waiter::Copy,
                                &mut Context::new(&mut self.port, &self.manifest, actions),
                            )
                        {
                            self.copy_waits = true;
                            break;
                        }
                    }
                    return false;
                }
            };
            if is_current {
                let bytes = slot(buf, (place.0 - copy.first.0) as u32);
                if is_good(&self.manifest, place, block, bytes) {
                    match self.gathering.block_mut(block, &self.write_pool) {
                        Ok(data) => data.copy_from_slice(&bytes[..BLOCK_BYTES]),
                        Err(_) => return false,
                    }
                    self.port.stats.copied_blocks += 1;
                } else {
                    self.store.damaged(place.number(), &mut self.port);
                    self.fail_copy();
                }
            }
            copy.done += 1;
        }
        true
    }

    /// Remove what the committed state and everything that is pinned can do without.
    pub(super) fn bury(&mut self) {
        if !self.scan.clones_known {
            return;
        }
        let (pin, adopted, batches) = (self.pin(), self.commits.adopted(), &self.batches);
        let is_on_its_way = |number| batches.contains_key(&number);
        let (deletions, port) = (&mut self.deletions, &mut self.port);
        self.store
            .bury(pin, adopted, is_on_its_way, deletions, port);
    }

    pub(super) fn pump_scan(&mut self, actions: &mut Vec<Action>) {
        if self.scan.pending || !self.port.may_try() {
            return;
        }
        if let Some(&(name, bytes)) = self.scan.references.last() {
            let Some(buf) = self.port.control_pool.alloc(bytes) else {
                return;
            };
            self.scan.pending = true;
            self.scan.reading = true;
            self.port.stats.gets += 1;
            let token = self.port.issue(Purpose::Scan);
            actions.push(Action::Get {
                token,
                name,
                offset: 0,
                slots: false,
                buf,
            });
        } else if let Some(&kind) = self.scan.todo.front() {
            self.scan.pending = true;
            self.scan.reading = false;
            self.port.stats.lists += 1;
            let token = self.port.issue(Purpose::Scan);
            actions.push(Action::List {
                token,
                volume: 0,
                prefix: kind.prefix(),
                after: self.scan.after.clone(),
            });
        }
    }

    pub(super) fn scanned(&mut self, result: Result<Stored, StoreError>) {
        self.scan.pending = false;
        let kind = self.scan.todo.front().copied();
        match result {
            Ok(Stored::Read(buf)) => {
                self.scan.references.pop();
                // One that cannot be read pins everything: its clone needs something.
                let pin = Reference::parse(&self.manifest.volume, &buf)
                    .map_or(u64::MAX, |reference| reference.pin);
                self.scan.pin = self.scan.pin.max(pin);
            }
            Err(StoreError::NotFound) if self.scan.reading => {
                self.scan.references.pop();
            }
            Err(StoreError::Short) if self.scan.reading => {
                self.scan.references.pop();
                self.scan.pin = u64::MAX;
            }
            Ok(Stored::Listed { objects, more }) => {
                for object in &objects {
                    self.found(object);
                }
                self.scan.after = objects
                    .last()
                    .filter(|_| more)
                    .map_or_else(String::new, |last| last.name.clone());
                if self.scan.after.is_empty() && kind != Some(Kind::Clone) {
                    self.next_scan();
                }
                self.port.again = true;
            }
            _ => return self.port.back_off(),
        }
        if self.scan.todo.front() == Some(&Kind::Clone)
            && self.scan.references.is_empty()
            && self.scan.after.is_empty()
        {
            self.clone_pin = core::mem::take(&mut self.scan.pin);
            self.scan.clones_known = true;
            self.next_scan();
        }
    }

    /// One kind of objects is known.
    fn next_scan(&mut self) {
        self.scan.todo.pop_front();
        self.port.again = true;
        if self.scan.todo.is_empty() {
            self.bury();
            self.consider_collecting();
        }
    }

    /// A listing shows an object.
    fn found(&mut self, listed: &Listed) {
        let Some(name) = Name::parse(&listed.name) else {
            return;
        };
        let number = name.number;
        // Further ones are found by the next opening: a store may name as many as it likes.
        let has_room = self.scan.strays < STRAYS_MAX;
        let stray =
            number < self.manifest.number_first && number >= self.manifest.own_first() && has_room;
        match name.kind {
            Kind::Data => {
                if self.store.inventory.data.contains(number) {
                    self.store.inventory.data.set_bytes(number, listed.bytes);
                } else if stray {
                    self.scan.strays += 1;
                    self.store.inventory.data.insert_stray(number, listed.bytes);
                }
            }
            Kind::Map => {
                let known = self.store.inventory.knows_map(number);
                if stray && !known {
                    self.scan.strays += 1;
                    self.store.inventory.drop_map(number);
                }
            }
            Kind::Manifest => {
                let beginnings = &self.manifest.beginnings;
                let known = beginnings.first().is_some_and(|&first| number > first);
                if known
                    && number < self.manifest.sequence
                    && beginnings.binary_search(&number).is_err()
                    && has_room
                {
                    self.scan.strays += 1;
                    self.deletions.push(name);
                }
            }
            Kind::Snapshot => {
                let is_it = |snapshot: &super::format::Snapshot| snapshot.number == number;
                // One that is to be forgotten is named until that is committed.
                let mut named = self.manifest.snapshots.iter().chain(&self.snapshots);
                if stray && !named.any(is_it) {
                    self.scan.strays += 1;
                    self.deletions.push(name);
                }
            }
            Kind::Clone => match usize::try_from(listed.bytes) {
                Ok(bytes @ Reference::BYTES_MIN..=Reference::BYTES_MAX)
                    if self.scan.references.len() < STRAYS_MAX =>
                {
                    self.scan.references.push((name, bytes));
                }
                _ => self.scan.pin = u64::MAX,
            },
        }
    }
}
