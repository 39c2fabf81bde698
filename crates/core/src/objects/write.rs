//! Writes: gathering, sealing, putting.
//!
//! A write ends when its bytes are gathered. A write of a part of a block that is stored waits until
//! the rest of the block was fetched: the map knows whole blocks only.

use alloc::vec::Vec;

use super::batch::{self, Batch, Partial, Refused, WHOLE, chunk_slots};
use super::block_store::Waiter;
use super::data::Object;
use super::format::{SLOT_BYTES, SLOT_NONE, TailEntry, pages, table_bytes, write_table};
use super::frames::{COMPRESSED_SLOTS_MIN, Frames};
use super::gets::Fetch;
use super::io::{Action, Condition, Kind, Name, StoreError, Stored};
use super::map::{Found, Place};
use super::port::Context;
use super::port::Purpose;
use super::turns;
use super::{COVERED_MAX, COVERED_PER_PAGE, ObjectVolume, end};
use crate::base::buf::Buf;
use crate::base::error::IoError;
use crate::base::io::{Done, Token};
use crate::base::limits::{BLOCK_BYTES, SECTOR_BYTES};

/// What a write leaves.
#[derive(Debug)]
enum What {
    /// These bytes: buffers, the first of which still has bytes from an offset on.
    Data(Vec<Buf>, usize, usize),
    Zeroes,
    /// Zeroes, and then the volume ends where they began.
    Cut,
}

/// A write under way.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) token: Token,
    what: What,
    begin: u64,
    at: u64,
    end: u64,
    /// Blocks that wait for the rest of theirs.
    waits: u32,
}

impl What {
    /// The next `out.len()` bytes.
    fn take(&mut self, out: &mut [u8]) {
        let Self::Data(data, index, offset) = self else {
            return out.fill(0);
        };
        let mut filled = 0;
        while filled < out.len() {
            let rest = &data[*index][*offset..];
            let n = rest.len().min(out.len() - filled);
            out[filled..filled + n].copy_from_slice(&rest[..n]);
            filled += n;
            *offset += n;
            if *offset == data[*index].len() {
                *index += 1;
                *offset = 0;
            }
        }
    }
}

impl ObjectVolume {
    pub(super) fn begin_write(&mut self, token: Token, offset: u64, data: Vec<Buf>) {
        let bytes: u64 = data.iter().map(|buf| buf.len() as u64).sum();
        self.add_write(token, What::Data(data, 0, 0), offset, bytes);
    }

    pub(super) fn begin_zero(&mut self, token: Token, offset: u64, bytes: u64) {
        self.add_write(token, What::Zeroes, offset, bytes);
    }

    pub(super) fn begin_resize(&mut self, token: Token, bytes: u64, actions: &mut Vec<Action>) {
        let good = bytes > 0
            && bytes.is_multiple_of(SECTOR_BYTES as u64)
            && bytes <= crate::base::limits::OBJECT_VOLUME_BYTES_MAX
            && pages(bytes, self.manifest.page_blocks) <= crate::base::limits::OBJECT_PAGES_MAX;
        if !good {
            return end(token, Err(IoError::NoSpace), actions);
        }
        if bytes < self.commits.bytes() {
            let cut = self.blocks() * BLOCK_BYTES as u64 - bytes;
            return self.add_write(token, What::Cut, bytes, cut);
        }
        self.set_bytes(token, bytes);
    }

    fn set_bytes(&mut self, token: Token, bytes: u64) {
        let target = self.flush_target();
        (self.commits).resize(token, bytes, target, &mut self.port);
    }

    fn add_write(&mut self, token: Token, what: What, offset: u64, bytes: u64) {
        let sector = SECTOR_BYTES as u64;
        assert!(
            offset.is_multiple_of(sector)
                && bytes.is_multiple_of(sector)
                && offset
                    .checked_add(bytes)
                    .is_some_and(|end| end <= self.blocks() * BLOCK_BYTES as u64),
            "a write of {bytes} bytes at {offset} of {}",
            self.commits.bytes()
        );
        let id = self.port.next_id();
        let write = Write {
            token,
            what,
            begin: offset,
            at: offset,
            end: offset + bytes,
            waits: 0,
        };
        self.writes.insert(id, write);
        self.write_queue.push_back(id);
    }

    pub(super) fn begin_flush(&mut self, token: Option<Token>) {
        let target = self.flush_target();
        self.commits.flush(token, target, &mut self.port);
    }

    /// Position of the last object that a flush is about, if everything is sealed; otherwise it will be.
    fn flush_target(&mut self) -> Option<u64> {
        if self.gathering.is_empty() {
            return Some(self.tail.last());
        }
        self.seal_wanted = true;
        None
    }

    pub(super) fn pump_writes(&mut self, actions: &mut Vec<Action>) {
        if self.seal_wanted {
            self.seal();
        }
        // What comes after a flush does not get into its objects.
        while !self.seal_wanted
            && self.may_gather()
            && let Some(&id) = self.write_queue.front()
        {
            let Some(mut write) = self.writes.remove(&id) else {
                self.write_queue.pop_front();
                continue;
            };
            let whole = self.gather(id, &mut write, actions);
            self.writes.insert(id, write);
            let writers = core::mem::take(&mut self.whole_writers);
            self.release(writers, actions);
            if !whole {
                break;
            }
            self.write_queue.pop_front();
            self.end_write_if_done(id, actions);
        }
    }

    /// Whether writes need not wait for the map to be stored.
    fn may_gather(&self) -> bool {
        !self.store.map.has_too_many_changes()
            && (!self.tail.is_full()
                || !self.tail.is_full_unflushed() && self.has_unflushed_writes())
    }

    /// Whether anything that was asked for from above is not committed.
    pub(super) fn has_unflushed_writes(&self) -> bool {
        self.gathering.user || self.tail.has_user_after(self.commits.committed())
    }

    /// Gather what is left of a write; false if it has to wait.
    fn gather(&mut self, id: u64, write: &mut Write, actions: &mut Vec<Action>) -> bool {
        let block_bytes = BLOCK_BYTES as u64;
        while write.at < write.end {
            if self.gathering.is_full() && !self.seal() {
                return false;
            }
            let block = write.at / block_bytes;
            let within = (write.at % block_bytes) as usize;
            let rest = write.end - write.at;
            // The end of the volume is the end of its last block.
            let to_end = write.end >= self.commits.bytes();
            if within == 0
                && (rest >= block_bytes || to_end)
                && !matches!(write.what, What::Data(..))
            {
                let count = if to_end {
                    rest.div_ceil(block_bytes)
                } else {
                    rest / block_bytes
                };
                let (count, covered) = self.store.map.fresh.covered(block, count, COVERED_MAX);
                if covered > 0 && self.port.turn.is_spent() {
                    self.port.turn.has_more = true;
                    return false;
                }
                self.port.turn.spend(covered.div_ceil(COVERED_PER_PAGE));
                self.gathering.covered += covered;
                self.unmap(block, count, actions);
                write.at = write.end.min(write.at + count * block_bytes);
                continue;
            }
            let bytes = ((block_bytes as usize - within) as u64).min(rest) as usize;
            let to_end = write.at + bytes as u64 == self.commits.bytes();
            let waits = match self.gather_block(id, block, within, bytes, to_end, &mut write.what) {
                Ok(waits) => waits,
                Err(Refused::Full) if self.seal() => continue,
                Err(Refused::Memory) if self.batches.is_empty() && self.seal() => continue,
                Err(_) => return false,
            };
            write.waits += u32::from(waits);
            write.at += bytes as u64;
        }
        true
    }

    fn unmap(&mut self, block: u64, count: u64, actions: &mut Vec<Action>) {
        if self.store.map.is_clear(block, count) {
            // Nothing is stored there: forgetting what is gathered is all.
            let writers = self.gathering.forget(block, count);
            return self.release(writers, actions);
        }
        self.gathering.user = true;
        let writers = self.gathering.unmap(block, count);
        self.release(writers, actions);
    }

    /// Gather bytes of one block; true if the rest of the block has to be fetched.
    fn gather_block(
        &mut self,
        id: u64,
        block: u64,
        within: usize,
        bytes: usize,
        to_end: bool,
        what: &mut What,
    ) -> Result<bool, Refused> {
        let whole = bytes == BLOCK_BYTES || (within == 0 && to_end);
        let partial = self.gathering.partial.contains_key(&block);
        let base = if whole || partial {
            Base::None
        } else {
            self.base(block)
        };
        let data = self.gathering.block_mut(block, &self.write_pool)?;
        match &base {
            Base::None | Base::Here => {}
            Base::Zero | Base::Stored(_) | Base::Unknown => data.fill(0),
            Base::Batch(place) => {
                let batch = &self.batches[&place.number()];
                data.copy_from_slice(batch.block(place.slot()));
            }
        }
        if whole {
            data[bytes..].fill(0);
        }
        what.take(&mut data[within..within + bytes]);
        self.gathering.user = true;
        if whole {
            self.whole_writers
                .extend(self.gathering.drop_partial(block));
            return Ok(false);
        }
        let sectors = within / SECTOR_BYTES..(within + bytes) / SECTOR_BYTES;
        let mask = sectors.fold(0, |mask, sector| mask | 1 << sector);
        let fill = match base {
            Base::Stored(place) => Some(Some(place)),
            Base::Unknown => Some(None),
            _ => None,
        };
        if let Some(base) = fill {
            let partial = Partial {
                mask,
                base,
                writers: alloc::vec![id],
                fetch: None,
            };
            self.gathering.partial.insert(block, partial);
            self.fill_queue.push_back(block);
            return Ok(true);
        }
        let Some(partial) = self.gathering.partial.get_mut(&block) else {
            return Ok(false);
        };
        partial.mask |= mask;
        if partial.mask == WHOLE {
            self.whole_writers
                .extend(self.gathering.drop_partial(block));
            return Ok(false);
        }
        partial.writers.push(id);
        Ok(true)
    }

    /// What a block is before a write to a part of it.
    fn base(&self, block: u64) -> Base {
        match self.gathering.find(block) {
            Some(batch::Found::Data(_)) => return Base::Here,
            Some(batch::Found::Zero) => return Base::Zero,
            None => {}
        }
        match self.store.map.find(block, 1) {
            Found::Here(None, _) => Base::Zero,
            Found::Here(Some(place), _) if self.batches.contains_key(&place.number()) => {
                Base::Batch(place)
            }
            Found::Here(Some(place), _) => Base::Stored(place),
            Found::Page(_) => Base::Unknown,
        }
    }

    /// Blocks that these writes waited for are whole, or written over.
    fn release(&mut self, writers: Vec<u64>, actions: &mut Vec<Action>) {
        for id in writers {
            if let Some(write) = self.writes.get_mut(&id) {
                write.waits -= 1;
                self.end_write_if_done(id, actions);
            }
        }
    }

    fn end_write_if_done(&mut self, id: u64, actions: &mut Vec<Action>) {
        let Some(write) = self.writes.get(&id) else {
            return;
        };
        if write.at < write.end || write.waits > 0 {
            return;
        }
        if let Some(write) = self.writes.remove(&id) {
            if matches!(write.what, What::Cut) {
                self.set_bytes(write.token, write.begin);
            } else {
                end(write.token, Ok(Done::Written), actions);
            }
        }
    }

    /// Fetch the rest of blocks that were written in part.
    pub(super) fn pump_fills(&mut self, actions: &mut Vec<Action>) {
        let mut waits = false;
        while let Some(&block) = self.fill_queue.front() {
            let Some(partial) = self.gathering.partial.get(&block) else {
                self.fill_queue.pop_front();
                continue;
            };
            if partial.fetch.is_some() {
                self.fill_queue.pop_front();
                continue;
            }
            let Some(place) = partial.base else {
                match self.find_base(block, actions) {
                    Some(true) => continue,
                    Some(false) => {
                        self.fill_queue.pop_front();
                        continue;
                    }
                    None => {
                        waits = true;
                        break;
                    }
                }
            };
            let fetch = Fetch {
                place,
                block,
                count: 1,
            };
            let purpose = Purpose::Fill { block, fetch };
            let Some(token) = self.store.gets.fetch(
                fetch,
                turns::Kind::Fill,
                purpose,
                &mut Context::new(&mut self.port, &self.manifest, actions),
            ) else {
                waits = true;
                break;
            };
            if let Some(partial) = self.gathering.partial.get_mut(&block) {
                partial.fetch = Some(token.0);
            }
            self.fill_queue.pop_front();
        }
        self.store
            .gets
            .set_waits(turns::Kind::Fill, waits, &mut self.port);
    }

    /// Find out where the rest of a block is that was written in part. True: that is known now; false: nothing is to be
    /// fetched, or its page is, after which it comes back; `None`: it has to wait for a get.
    fn find_base(&mut self, block: u64, actions: &mut Vec<Action>) -> Option<bool> {
        // What is gathered of it hides nothing of the map: it is not whole.
        let writers = match self.store.map.find(block, 1) {
            Found::Page(page) => {
                let is_wanted = self.store.want_page(
                    page,
                    Waiter::Fill(block),
                    &mut Context::new(&mut self.port, &self.manifest, actions),
                );
                return is_wanted.then_some(false);
            }
            Found::Here(None, _) => self.gathering.complete(block, &[0; BLOCK_BYTES]),
            Found::Here(Some(place), _) => {
                let Some(batch) = self.batches.get(&place.number()) else {
                    if let Some(partial) = self.gathering.partial.get_mut(&block) {
                        partial.base = Some(place);
                    }
                    return Some(true);
                };
                self.gathering.complete(block, batch.block(place.slot()))
            }
        };
        self.release(writers, actions);
        // What waited to be sealed may go on.
        self.port.again = true;
        Some(false)
    }

    /// The rest of a block that was written in part cannot be had: it stays what it was, and nobody was told otherwise.
    pub(super) fn fail_fill(&mut self, block: u64, error: IoError, actions: &mut Vec<Action>) {
        let waits = self.gathering.partial.get(&block);
        if waits.is_none_or(|partial| partial.base.is_some()) {
            // It was written over meanwhile.
            return;
        }
        for id in self.gathering.remove(block) {
            if let Some(write) = self.writes.remove(&id) {
                end(write.token, Err(error), actions);
            }
        }
    }

    pub(super) fn fill_ended(
        &mut self,
        token: Token,
        block: u64,
        fetch: Fetch,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let result = self.store.fetched(
            fetch,
            result,
            &mut Context::new(&mut self.port, &self.manifest, actions),
        );
        let partial = self.gathering.partial.get(&block);
        if partial.is_none_or(|partial| partial.fetch != Some(token.0)) {
            return;
        }
        match result {
            Ok(buf) => {
                let writers = self.gathering.complete(block, &buf[..BLOCK_BYTES]);
                self.release(writers, actions);
            }
            Err(error) => {
                // The block stays what it was; nobody was told otherwise.
                for id in self.gathering.remove(block) {
                    if let Some(write) = self.writes.remove(&id) {
                        end(write.token, Err(error), actions);
                    }
                }
            }
        }
    }

    /// Seal what is gathered; false if that has to wait.
    pub(super) fn seal(&mut self) -> bool {
        if !self.gathering.partial.is_empty() {
            return false;
        }
        if self.gathering.is_empty() {
            self.gathering.clear();
            self.sealed();
            return true;
        }
        let number = self.commits.next_number(&self.manifest, &mut self.port);
        let Some(number) = number else {
            return false;
        };
        let runs = self.gathering.runs();
        let Some(mut table) = self.port.control_pool.alloc(table_bytes(runs.len())) else {
            return false;
        };
        let entry = TailEntry {
            number,
            slots: self.gathering.slot_count(),
            runs: runs.len() as u32,
            // Of a compressed object it is known once it is put.
            compressed_bytes: 0,
        };
        let method = self.compression;
        let method = method.filter(|_| entry.slots >= COMPRESSED_SLOTS_MIN);
        let volume = self.manifest.volume;
        let user = self.gathering.user;
        write_table(
            volume,
            number,
            self.manifest.epoch,
            entry.slots,
            method.is_some(),
            &runs,
            &mut table,
        );
        let mut data = self.gathering.seal(&volume, number);
        data.push(table.freeze());
        self.commits.use_number();
        let origin = match method {
            Some(_) => entry.origin().compressed(),
            None => entry.origin(),
        };
        self.store
            .inventory
            .data
            .insert(number, Object::of(&entry, method.is_some()));
        for run in &runs {
            self.apply(origin, run.block.get(), run.count.get(), run.slot.get());
        }
        let position = self.tail.push(entry, user);
        let batch = Batch {
            position,
            data,
            slot_bytes: entry.slots as usize * SLOT_BYTES,
            chunk_slots: chunk_slots(self.config.batch_blocks),
            method,
            in_flight: false,
        };
        self.batches.insert(number, batch);
        self.sealed();
        true
    }

    /// Everything that was gathered is in an object now.
    fn sealed(&mut self) {
        self.seal_wanted = false;
        self.port.again = true;
        self.commits.sealed(self.tail.last());
    }

    /// Let the map have a run of the object whose first slot is at `origin`.
    pub(super) fn apply(&mut self, origin: Place, block: u64, count: u32, slot: u32) {
        let place = (slot != SLOT_NONE).then(|| origin.plus(slot));
        self.store.map.fresh.set(block, u64::from(count), place);
    }

    /// Put what is sealed.
    pub(super) fn pump_puts(&mut self, actions: &mut Vec<Action>) {
        if !self.port.may_try() {
            return;
        }
        while self.puts_in_flight < self.config.puts_in_flight_max {
            let waiting = self
                .batches
                .iter_mut()
                .filter(|(_, batch)| !batch.in_flight);
            let Some((&number, batch)) = waiting.min_by_key(|(_, batch)| batch.position) else {
                break;
            };
            batch.in_flight = true;
            let (data, slot_bytes, method) = (batch.data.clone(), batch.slot_bytes, batch.method);
            self.puts_in_flight += 1;
            self.port.stats.puts_data += 1;
            let token = self.port.issue(Purpose::PutData(number));
            let name = Name::own(Kind::Data, number);
            actions.push(match method {
                Some(method) => Action::PutCompressed {
                    token,
                    name,
                    data,
                    slot_bytes,
                    method,
                },
                None => Action::Put {
                    token,
                    name,
                    data,
                    slot_bytes,
                    condition: Condition::Always,
                },
            });
        }
    }

    pub(super) fn put_data_ended(
        &mut self,
        number: u64,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        self.puts_in_flight -= 1;
        match result {
            Ok(stored) => {
                if let Stored::Packed(frames) = stored {
                    self.packed(number, frames);
                }
                self.batches.remove(&number);
                self.port.went_well();
            }
            Err(error) => {
                if let Some(batch) = self.batches.get_mut(&number) {
                    batch.in_flight = false;
                }
                self.fail_waiting(error.as_io(), actions);
            }
        }
    }

    /// A compressed object is there: now it is known how large it is.
    fn packed(&mut self, number: u64, frames: Frames) {
        // It is in the tail: nothing that is committed comes after it.
        let position = self.batches.get(&number).map(|batch| batch.position);
        let bytes = position.and_then(|position| self.tail.set_frames(position, &frames));
        if let Some(bytes) = bytes {
            self.store.inventory.data.set_bytes(number, bytes);
        }
        self.store.gets.note_frames(number, frames);
    }
}

/// What a block is before a write to a part of it.
enum Base {
    /// It does not matter.
    None,
    /// Gathered, whole.
    Here,
    Zero,
    Batch(Place),
    Stored(Place),
    /// Its page of the map is not in memory.
    Unknown,
}
