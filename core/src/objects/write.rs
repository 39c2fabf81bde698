//! Writes: gathering, sealing, putting.
//!
//! A write ends when its bytes are gathered. A write of a part of a block that is stored waits until
//! the rest of the block was fetched: the map knows whole blocks only.

use alloc::vec::Vec;

use super::batch::{Batch, Found, Partial, Refused, WHOLE, chunk_slots};
use super::format::{SLOT_BYTES, SLOT_NONE, TailEntry, table_bytes, write_table};
use super::frames::{COMPRESSED_SLOTS_MIN, Frames};
use super::io::{Action, Condition, Kind, Name, StoreError, Stored};
use super::map::Place;
use super::read::Fetch;
use super::turns;
use super::{Flush, Object, ObjectVolume, Purpose, Tail, end};
use crate::buf::Buf;
use crate::error::IoError;
use crate::io::{Done, Token};
use crate::limits::{BLOCK_BYTES, OBJECT_TAIL_MAX, OBJECT_TAIL_UNFLUSHED_MAX, SECTOR_BYTES};

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
            && bytes <= crate::limits::OBJECT_VOLUME_BYTES_MAX;
        if !good {
            return end(token, Err(IoError::NoSpace), actions);
        }
        if bytes < self.bytes {
            let cut = self.blocks() * BLOCK_BYTES as u64 - bytes;
            return self.add_write(token, What::Cut, bytes, cut);
        }
        self.set_bytes(token, bytes);
    }

    fn set_bytes(&mut self, token: Token, bytes: u64) {
        self.bytes = bytes;
        self.changes += 1;
        self.begin_flush(Some(token));
        if let Some(flush) = self.flushes.back_mut() {
            flush.bytes = Some(bytes);
        }
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
            self.bytes
        );
        self.next_id += 1;
        let write = Write {
            token,
            what,
            begin: offset,
            at: offset,
            end: offset + bytes,
            waits: 0,
        };
        self.writes.insert(self.next_id, write);
        self.write_queue.push_back(self.next_id);
    }

    pub(super) fn begin_flush(&mut self, token: Option<Token>) {
        let target = if self.gathering.is_empty() {
            Some(self.last_sealed)
        } else {
            self.seal_wanted = true;
            None
        };
        self.flushes.push_back(Flush {
            token,
            target,
            changes: self.changes,
            bytes: None,
        });
        self.again = true;
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
            let gathered = self.gather(id, &mut write, actions);
            let token = write.token;
            if gathered.is_ok() {
                self.writes.insert(id, write);
            }
            let writers = core::mem::take(&mut self.whole_writers);
            self.release(writers, actions);
            match gathered {
                Ok(true) => {}
                Ok(false) => break,
                // What of it is gathered stays: nobody was told.
                Err(error) => end(token, Err(error), actions),
            }
            self.write_queue.pop_front();
            self.end_write_if_done(id, actions);
        }
    }

    /// Whether writes need not wait for the map to be stored.
    fn may_gather(&self) -> bool {
        self.tail.len() < OBJECT_TAIL_MAX
            || self.tail.len() < OBJECT_TAIL_UNFLUSHED_MAX && self.has_unflushed_writes()
    }

    /// Whether anything that was asked for from above is not committed.
    pub(super) fn has_unflushed_writes(&self) -> bool {
        let committed = self.committed;
        let sealed = self.tail.iter().rev();
        let mut sealed = sealed.take_while(|tail| tail.entry.number > committed);
        self.gathering.user || sealed.any(|tail| tail.user)
    }

    /// Gather what is left of a write; false if it has to wait. An error ends it.
    fn gather(
        &mut self,
        id: u64,
        write: &mut Write,
        actions: &mut Vec<Action>,
    ) -> Result<bool, IoError> {
        let block_bytes = BLOCK_BYTES as u64;
        while write.at < write.end {
            if self.gathering.is_full() && !self.seal() {
                return Ok(false);
            }
            let block = write.at / block_bytes;
            let within = (write.at % block_bytes) as usize;
            let rest = write.end - write.at;
            // The end of the volume is the end of its last block.
            let to_end = write.end >= self.bytes;
            if within == 0
                && (rest >= block_bytes || to_end)
                && !matches!(write.what, What::Data(..))
            {
                if !self.has_room(2, 0) {
                    return Err(IoError::NoMemory);
                }
                let count = if to_end {
                    rest.div_ceil(block_bytes)
                } else {
                    rest / block_bytes
                };
                self.unmap(block, count, actions);
                write.at = write.end.min(write.at + count * block_bytes);
                continue;
            }
            if !self.has_room(1, self.config.unmap_reserve_bytes) {
                return Err(IoError::NoMemory);
            }
            let bytes = ((block_bytes as usize - within) as u64).min(rest) as usize;
            let to_end = write.at + bytes as u64 == self.bytes;
            let waits = match self.gather_block(id, block, within, bytes, to_end, &mut write.what) {
                Ok(waits) => waits,
                Err(Refused::Full) if self.seal() => continue,
                Err(Refused::Memory) if self.batches.is_empty() && self.seal() => continue,
                Err(_) => return Ok(false),
            };
            write.waits += u32::from(waits);
            write.at += bytes as u64;
        }
        Ok(true)
    }

    fn unmap(&mut self, block: u64, count: u64, actions: &mut Vec<Action>) {
        if self.map.is_clear(block, count) {
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
            Base::Zero | Base::Stored(_) => data.fill(0),
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
        if let Base::Stored(place) = base {
            let partial = Partial {
                mask,
                base: place,
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
            Some(Found::Data(_)) => return Base::Here,
            Some(Found::Zero) => return Base::Zero,
            None => {}
        }
        match self.map.find(block, 1).0 {
            None => Base::Zero,
            Some(place) if self.batches.contains_key(&place.number()) => Base::Batch(place),
            Some(place) => Base::Stored(place),
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
            let fetch = Fetch {
                place: partial.base,
                block,
                count: 1,
            };
            let purpose = Purpose::Fill { block, fetch };
            let Some(token) = self.fetch(fetch, turns::Kind::Fill, purpose, actions) else {
                waits = true;
                break;
            };
            if let Some(partial) = self.gathering.partial.get_mut(&block) {
                partial.fetch = Some(token.0);
            }
            self.fill_queue.pop_front();
        }
        self.again |= self.turns.set_waits(turns::Kind::Fill, waits);
    }

    pub(super) fn fill_ended(
        &mut self,
        token: Token,
        block: u64,
        fetch: Fetch,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let result = self.fetched(fetch, result, actions);
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
        let number = self.next_number;
        if number >= self.manifest.number_limit {
            // A manifest of the state that is committed allows more of them.
            self.recommit();
            return false;
        }
        let runs = self.gathering.runs();
        let Some(mut table) = self.control_pool.alloc(table_bytes(runs.len())) else {
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
        self.next_number += 1;
        self.last_sealed = number;
        let mut object = Object::default();
        let mut origin = entry.origin();
        if method.is_some() {
            object.compressed = true;
            object.slots = entry.slots;
            origin = origin.compressed();
        } else {
            object.bytes = entry.bytes();
        }
        self.insert_object(number, object);
        for run in &runs {
            self.apply(origin, run.block.get(), run.count.get(), run.slot.get());
        }
        if self.objects[&number].live == 0 {
            self.dead.insert(number, number);
        }
        self.tail_bytes += entry.bytes();
        self.tail.push_back(Tail { entry, user });
        let batch = Batch {
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
        self.again = true;
        for flush in &mut self.flushes {
            flush.target.get_or_insert(self.last_sealed);
        }
    }

    /// Let the map have a run of the object whose first slot is at `origin`.
    pub(super) fn apply(&mut self, origin: Place, block: u64, count: u32, slot: u32) {
        let number = origin.number();
        let place = (slot != SLOT_NONE).then(|| origin.plus(slot));
        let (objects, dead) = (&mut self.objects, &mut self.dead);
        let mut deaths = Vec::new();
        self.map.set(block, u64::from(count), place, |old, blocks| {
            if let Some(object) = objects.get_mut(&old.number()) {
                object.live -= blocks;
                if object.live == 0 {
                    deaths.push(old.number());
                }
            }
        });
        for old in deaths {
            dead.insert(old, number);
        }
        if place.is_some()
            && let Some(object) = objects.get_mut(&number)
        {
            object.live += count;
            dead.remove(&number);
        }
    }

    /// Put what is sealed.
    pub(super) fn pump_puts(&mut self, actions: &mut Vec<Action>) {
        if !self.may_try() {
            return;
        }
        while self.puts_in_flight < self.config.puts_in_flight_max {
            let waiting = self.batches.iter_mut().find(|(_, batch)| !batch.in_flight);
            let Some((&number, batch)) = waiting else {
                break;
            };
            batch.in_flight = true;
            let (data, slot_bytes, method) = (batch.data.clone(), batch.slot_bytes, batch.method);
            self.puts_in_flight += 1;
            self.stats.puts_data += 1;
            let token = self.issue(Purpose::PutData(number));
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
                self.went_well();
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
        let index = self.tail.partition_point(|tail| tail.entry.number < number);
        if let Some(Tail { entry, .. }) = self.tail.get_mut(index) {
            self.tail_bytes -= entry.bytes();
            let table = table_bytes(entry.runs as usize);
            entry.compressed_bytes = frames.table_offset(table) as u32;
            self.tail_bytes += entry.bytes();
            let bytes = entry.bytes();
            self.set_object_bytes(number, bytes);
        }
        self.frames.insert(number, frames);
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
}
