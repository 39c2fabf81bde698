//! Writes of clients, and what makes ranges zero.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;

use super::format::PAGE_BLOCKS;
use super::map::{BlockState, Map};
use super::store::{Purpose, Store};
use super::sums::Sums;
use super::tier::Tier;
use super::{Action, end};
use crate::base::buf::{Arena, Buf};
use crate::base::error::IoError;
use crate::base::io::{Done, Nanos, SectorRange, Token};
use crate::base::limits::{BLOCK_BYTES, SECTOR_BYTES};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Bytes of the volume that one page of the map describes.
const PAGE_BYTES: u64 = PAGE_BLOCKS * BLOCK;

/// A write, or what makes a range zero.
#[derive(Debug)]
pub(super) struct Write {
    id: u64,
    token: Token,
    /// Every block that it touches.
    pub blocks: Range<u64>,
    pub is_begun: bool,
    /// What is written.
    parts: Vec<Part>,
    /// What becomes zero as a whole, and did not yet.
    zeroes: Range<u64>,
    /// Whether all is written, and but for that it has ended.
    is_zeroing: bool,
    /// Actions that have not ended.
    left: usize,
    error: Option<IoError>,
    /// Since when it waits for a block to be copied.
    pub waits_since: Option<Nanos>,
    /// Whether it waits for nothing but the end of a read.
    waits_for_read: bool,
}

/// Something to write. What it has of its first and last block may be a part.
#[derive(Debug)]
struct Part {
    offset: u64,
    data: Vec<Buf>,
    /// The blocks that it touches.
    blocks: Range<u64>,
    /// The whole first and last block, from elsewhere.
    head: Option<Buf>,
    tail: Option<Buf>,
    fills: usize,
    /// The sectors that are being written, once that has begun.
    stored: Option<SectorRange>,
}

impl Write {
    /// Whether these blocks are not to be read now: it writes there, or waits until nobody reads them.
    pub fn keeps_off(&self, blocks: &Range<u64>) -> bool {
        (self.is_begun || self.waits_for_read) && self.overlaps(blocks)
    }

    /// Whether it touches one of these blocks.
    pub fn overlaps(&self, blocks: &Range<u64>) -> bool {
        self.blocks.start < blocks.end && blocks.start < self.blocks.end
    }
}

impl Part {
    fn new(offset: u64, data: Vec<Buf>) -> Self {
        let bytes: u64 = data.iter().map(|buf| buf.len() as u64).sum();
        Self {
            offset,
            data,
            blocks: offset / BLOCK..(offset + bytes).div_ceil(BLOCK),
            head: None,
            tail: None,
            fills: 0,
            stored: None,
        }
    }

    fn bytes(&self) -> u64 {
        self.data.iter().map(|buf| buf.len() as u64).sum()
    }

    /// The blocks of which it has a part, at its front and at its end.
    fn edges(&self) -> [Option<u64>; 2] {
        let end = self.offset + self.bytes();
        let head = !self.offset.is_multiple_of(BLOCK);
        let tail = !end.is_multiple_of(BLOCK);
        [
            head.then_some(self.blocks.start),
            tail.then_some(self.blocks.end - 1),
        ]
    }

    /// Make it whole blocks where the rest of one is there.
    fn complete(&mut self) {
        let end = self.offset + self.bytes();
        if let Some(head) = self.head.take() {
            let inside = (self.offset % BLOCK) as usize;
            self.data.insert(0, head.slice(0..inside));
            self.offset -= inside as u64;
        }
        if let Some(tail) = self.tail.take() {
            self.data
                .push(tail.slice((end % BLOCK) as usize..BLOCK_BYTES));
        }
    }
}

/// The writes of clients.
#[derive(Debug)]
pub(super) struct Writes {
    /// In the order of arrival, begun or not.
    queue: VecDeque<Write>,
    zeroes: Buf,
    /// Whether anything was written since the last flush began.
    pub is_changed: bool,
    /// Parts that are complete and wait for memory to be encrypted into: the number of the write, and which of its
    /// parts.
    to_encrypt: VecDeque<(u64, usize)>,
}

impl Writes {
    /// None.
    pub fn new() -> Self {
        let zeroes = Arena::new(1).claim(0, 1).expect("a new arena is free");
        Self {
            queue: VecDeque::new(),
            zeroes: zeroes.freeze(),
            is_changed: false,
            to_encrypt: VecDeque::new(),
        }
    }

    /// Write buffers one after another.
    pub fn write(&mut self, token: Token, offset: u64, data: Vec<Buf>, store: &mut Store) {
        let part = Part::new(offset, data);
        let blocks = part.blocks.clone();
        self.push(store.number(), token, blocks, alloc::vec![part], 0..0);
    }

    /// Whole blocks become zero in the map; parts of blocks are written.
    pub fn zero(&mut self, token: Token, offset: u64, bytes: u64, store: &mut Store) {
        let until = offset + bytes;
        let blocks = offset / BLOCK..until.div_ceil(BLOCK);
        let whole = offset.div_ceil(BLOCK)..until / BLOCK;
        let mut parts = Vec::new();
        let mut piece = |from: u64, to: u64| {
            if from < to {
                let zeroes = self.zeroes.slice(0..(to - from) as usize);
                parts.push(Part::new(from, alloc::vec![zeroes]));
            }
        };
        if whole.start > whole.end {
            // Within one block.
            piece(offset, until);
        } else {
            piece(offset, whole.start * BLOCK);
            piece(whole.end * BLOCK, until);
        }
        let zeroes = whole.start..whole.end.max(whole.start);
        self.push(store.number(), token, blocks, parts, zeroes);
    }

    fn push(
        &mut self,
        id: u64,
        token: Token,
        blocks: Range<u64>,
        parts: Vec<Part>,
        zeroes: Range<u64>,
    ) {
        self.queue.push_back(Write {
            id,
            token,
            blocks,
            is_begun: false,
            parts,
            zeroes,
            is_zeroing: false,
            left: 0,
            error: None,
            waits_since: None,
            waits_for_read: false,
        });
    }

    /// Whether the checksums of what a write changes can be changed now.
    fn are_sums_ready(&self, index: usize, sums: &mut Sums) -> bool {
        let write = &self.queue[index];
        if write.parts.is_empty() {
            return true;
        }
        let parts = write.parts.iter().map(|part| &part.blocks);
        sums.all_ready(parts) && !sums.is_full()
    }

    /// Begin every write that shares no block with one before it, and none that is still to be copied.
    pub fn pump(
        &mut self,
        store: &mut Store,
        tier: &mut Tier,
        is_read: impl Fn(&Range<u64>) -> bool,
        actions: &mut Vec<Action>,
    ) {
        if tier.holds_writes(store) {
            return;
        }
        let mut index = 0;
        while index < self.queue.len() {
            let write = &self.queue[index];
            let mut before = self.queue.iter().take(index);
            if write.is_begun || before.any(|other| other.overlaps(&write.blocks)) {
                index += 1;
                continue;
            }
            if let Some(error) = store.failed {
                let write = self.queue.remove(index).expect("it is there");
                end(actions, write.token, Err(error));
                continue;
            }
            let blocks = write.blocks.clone();
            if tier.must_copy_first(&blocks) {
                if self.queue[index].waits_since.is_none() {
                    self.queue[index].waits_since = Some(store.now);
                    store.status.waited_writes += 1;
                }
                index += 1;
                continue;
            }
            let is_read = is_read(&blocks);
            self.queue[index].waits_for_read = is_read;
            if is_read || !self.are_sums_ready(index, &mut store.sums) {
                // It may be of a generation that the last life has written in part.
                self.is_changed = true;
                index += 1;
                continue;
            }
            if !self.begin(index, store, tier, actions) {
                return;
            }
            // One that has ended at once has left its place.
            if self.queue.get(index).is_some_and(|write| write.is_begun) {
                index += 1;
            }
        }
    }

    /// Begin a write; false if there is no memory for that.
    fn begin(
        &mut self,
        index: usize,
        store: &mut Store,
        tier: &mut Tier,
        actions: &mut Vec<Action>,
    ) -> bool {
        let id = self.queue[index].id;
        let mut parts = core::mem::take(&mut self.queue[index].parts);
        parts.retain(|part| !self.is_zero_over_zero(part, &store.map));
        let mut fills = Vec::new();
        for (number, part) in parts.iter_mut().enumerate() {
            let edges = part.edges();
            for (tail, block) in [(false, edges[0]), (true, edges[1])] {
                let Some(block) = block else { continue };
                let rest = match store.map.get(block) {
                    BlockState::Zero => Some(self.zeroes.clone()),
                    BlockState::Absent if tail && edges[0] == edges[1] => continue,
                    BlockState::Absent => {
                        let Some(buf) = store.pool.alloc(BLOCK_BYTES) else {
                            self.queue[index].parts = parts;
                            return false;
                        };
                        fills.push((number, tail, block, buf));
                        continue;
                    }
                    BlockState::Clean | BlockState::Dirty => None,
                };
                if tail {
                    part.tail = rest;
                } else {
                    part.head = rest;
                }
            }
        }
        for (number, ..) in &fills {
            parts[*number].fills += 1;
        }
        let write = &mut self.queue[index];
        write.is_begun = true;
        write.waits_since = None;
        write.left = fills.len();
        let ready: Vec<usize> = (0..parts.len()).filter(|&n| parts[n].fills == 0).collect();
        write.parts = parts;
        self.is_changed = true;
        for part in &write.parts {
            store.sums.pin(&part.blocks, true);
        }
        store.sums.forget(&write.zeroes);
        for part in &write.parts {
            tier.rewritten(part.blocks.clone());
        }
        for (part, tail, block, buf) in fills {
            store.status.filled_blocks += 1;
            let token = store.token(Purpose::Fill {
                write: id,
                part,
                tail,
            });
            let offset = block * BLOCK;
            actions.push(Action::BackendRead { token, offset, buf });
        }
        for part in ready {
            self.write_part(index, part, store, actions);
        }
        self.end(index, store, tier, actions);
        true
    }

    /// Whether a part writes zeroes into a block that is zero.
    fn is_zero_over_zero(&self, part: &Part, map: &Map) -> bool {
        let is_zeroes = part.data.iter().all(|buf| self.is_of_zeroes(buf));
        is_zeroes
            && part
                .blocks
                .clone()
                .all(|block| map.get(block) == BlockState::Zero)
    }

    fn is_of_zeroes(&self, buf: &Buf) -> bool {
        self.zeroes.as_ptr_range().contains(&buf.as_ptr())
    }

    /// What a block has besides what is written to it.
    pub fn filled(
        &mut self,
        (id, number, tail): (u64, usize, bool),
        result: Result<Done, IoError>,
        store: &mut Store,
        tier: &mut Tier,
        actions: &mut Vec<Action>,
    ) {
        let index = self.index_of(id);
        let write = &mut self.queue[index];
        write.left -= 1;
        let part = &mut write.parts[number];
        part.fills -= 1;
        let is_ready = part.fills == 0;
        match result {
            Ok(Done::Read(buf)) => {
                let buf = buf.freeze();
                let edges = part.edges();
                if !tail && edges[0] == edges[1] {
                    part.tail = Some(buf.clone());
                }
                if tail {
                    part.tail = Some(buf);
                } else {
                    part.head = Some(buf);
                }
            }
            Ok(_) => unreachable!("a read brings its buffer"),
            Err(error) => write.error = Some(error),
        }
        if is_ready && write.error.is_none() {
            self.write_part(index, number, store, actions);
        }
        self.end(index, store, tier, actions);
    }

    /// Write a part to its place, if it is encrypted once there is memory for that.
    fn write_part(
        &mut self,
        index: usize,
        number: usize,
        store: &mut Store,
        actions: &mut Vec<Action>,
    ) {
        let write = &mut self.queue[index];
        write.parts[number].complete();
        if store.encryption.is_none() {
            let data = core::mem::take(&mut write.parts[number].data);
            self.store_part(index, number, data, store, actions);
        } else {
            write.left += 1;
            self.to_encrypt.push_back((write.id, number));
            self.pump_encryption(store, actions);
        }
    }

    /// Write the parts that wait for memory to be encrypted into, as far as it goes.
    pub fn pump_encryption(&mut self, store: &mut Store, actions: &mut Vec<Action>) {
        while let Some(encryption) = &store.encryption
            && let Some(&(id, number)) = self.to_encrypt.front()
        {
            let index = self.index_of(id);
            let part = &self.queue[index].parts[number];
            let sector = part.offset / SECTOR_BYTES as u64;
            let Some(stored) = encryption.encrypt(sector, &part.data) else {
                return;
            };
            self.to_encrypt.pop_front();
            self.store_part(index, number, stored, store, actions);
            // What is written is waited for instead.
            self.queue[index].left -= 1;
        }
    }

    /// Write what is stored of a part, in one piece for each page of the map.
    fn store_part(
        &mut self,
        index: usize,
        number: usize,
        mut data: Vec<Buf>,
        store: &mut Store,
        actions: &mut Vec<Action>,
    ) {
        let id = self.queue[index].id;
        let mut at = self.queue[index].parts[number].offset;
        let until = at + data.iter().map(|buf| buf.len() as u64).sum::<u64>();
        let sector = SECTOR_BYTES as u64;
        self.queue[index].parts[number].stored =
            Some(SectorRange::between(at / sector, until / sector));
        store.sums.write(at, &data);
        while at < until {
            let piece = ((at / PAGE_BYTES + 1) * PAGE_BYTES).min(until) - at;
            let rest = split_off(&mut data, piece as usize);
            store.status.data_written_bytes += piece;
            self.queue[index].left += 1;
            let token = store.token(Purpose::Write(id));
            actions.push(Action::StoreWrite {
                token,
                offset: store.layout().data_offset(at),
                data: core::mem::replace(&mut data, rest),
            });
            at += piece;
        }
    }

    /// A piece of one was written, or was not.
    pub fn written(
        &mut self,
        id: u64,
        result: Result<Done, IoError>,
        store: &mut Store,
        tier: &mut Tier,
        actions: &mut Vec<Action>,
    ) {
        let index = self.index_of(id);
        let write = &mut self.queue[index];
        write.left -= 1;
        if let Err(error) = result {
            write.error = Some(error);
        }
        self.end(index, store, tier, actions);
    }

    /// End a write of which nothing is under way, once what is to be zero is.
    fn end(&mut self, index: usize, store: &mut Store, tier: &mut Tier, actions: &mut Vec<Action>) {
        let write = &mut self.queue[index];
        if write.left > 0 {
            return;
        }
        let error = write.error;
        for part in core::mem::take(&mut write.parts) {
            store.sums.pin(&part.blocks, false);
            if let Some(sectors) = part.stored.filter(|_| error.is_some()) {
                // They may be torn. The log has them, and writes them again; the others of these blocks it has not.
                store.sums.unsettle(sectors);
            }
            for block in part.blocks {
                // If it failed, what was there may be torn, and is not what the backend has.
                if error.is_none() || store.map.get(block) == BlockState::Clean {
                    store.set(block..block + 1, BlockState::Dirty);
                }
            }
        }
        if error.is_none() && !self.make_zero(index, store, tier) {
            self.queue[index].is_zeroing = true;
            return;
        }
        let write = self.queue.remove(index).expect("it is there");
        end(actions, write.token, error.map_or(Ok(Done::Written), Err));
    }

    /// Go on with what is to be zero, and is more than one turn's.
    pub fn pump_zeroes(&mut self, store: &mut Store, tier: &mut Tier, actions: &mut Vec<Action>) {
        while store.turn_blocks > 0
            && let Some(index) = self.queue.iter().position(|write| write.is_zeroing)
        {
            self.end(index, store, tier, actions);
        }
    }

    /// Whether something waits for the next turn to become zero.
    pub fn is_zeroing(&self) -> bool {
        self.queue.iter().any(|write| write.is_zeroing)
    }

    /// Make as much zero as this turn may; whether that is all of it. Nobody else touches these blocks meanwhile, but
    /// a tier that marks those which are as they were at its moment.
    fn make_zero(&mut self, index: usize, store: &mut Store, tier: &mut Tier) -> bool {
        let zeroes = self.queue[index].zeroes.clone();
        let until = zeroes.end.min(zeroes.start + store.turn_blocks);
        store.turn_blocks -= until - zeroes.start;
        self.queue[index].zeroes.start = until;
        tier.rewritten(zeroes.start..until);
        store.set(zeroes.start..until, BlockState::Zero);
        until == zeroes.end
    }

    fn index_of(&self, id: u64) -> usize {
        let found = self.queue.iter().position(|write| write.id == id);
        found.expect("a write that is under way is known")
    }

    /// Nothing can be done with these blocks.
    pub fn refuse(&mut self, blocks: &Range<u64>, error: IoError, actions: &mut Vec<Action>) {
        let is_refused = |write: &Write| !write.is_begun && write.overlaps(blocks);
        while let Some(index) = self.queue.iter().position(is_refused) {
            let write = self.queue.remove(index).expect("it is there");
            end(actions, write.token, Err(error));
        }
    }

    /// Whether one of them is under way.
    pub fn any_begun(&self) -> bool {
        self.queue.iter().any(|write| write.is_begun)
    }

    /// Whether one that is under way touches one of these blocks.
    pub fn touch(&self, blocks: &Range<u64>) -> bool {
        let mut begun = self.queue.iter().filter(|write| write.is_begun);
        begun.any(|write| write.overlaps(blocks))
    }

    /// Whether one of them, begun or not, touches one of these blocks.
    pub fn overlap(&self, blocks: &Range<u64>) -> bool {
        self.queue.iter().any(|write| write.overlaps(blocks))
    }

    /// Whether these blocks are not to be read now.
    pub fn keep_off(&self, blocks: &Range<u64>) -> bool {
        self.queue.iter().any(|write| write.keeps_off(blocks))
    }

    /// Since when one of them has waited longest for a block to be copied.
    pub fn waits_since(&self) -> Option<Nanos> {
        let waiting = self.queue.iter().filter_map(|write| write.waits_since);
        waiting.min()
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self, is_read: impl Fn(&Range<u64>) -> bool) {
        let begun = self.queue.iter().filter(|write| write.is_begun);
        for (index, write) in begun.clone().enumerate() {
            let mut others = begun.clone().skip(index + 1);
            debug_assert!(
                others.all(|other| !write.overlaps(&other.blocks)),
                "writes under way share a block"
            );
            debug_assert!(
                !is_read(&write.blocks),
                "a block is written while it is read"
            );
        }
    }
}

/// Keep the first `bytes` bytes; the rest comes back.
fn split_off(data: &mut Vec<Buf>, bytes: usize) -> Vec<Buf> {
    let mut left = bytes;
    for index in 0..data.len() {
        let len = data[index].len();
        if len > left {
            let mut rest = data.split_off(index + 1);
            let cut = data[index].clone();
            data[index] = cut.slice(0..left);
            rest.insert(0, cut.slice(left..len));
            if left == 0 {
                data.pop();
            }
            return rest;
        }
        left -= len;
        if left == 0 {
            return data.split_off(index + 1);
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;
    use alloc::vec;

    use super::*;
    use crate::base::limits::HOME_UNCOMMITTED_AGE_MS;
    use crate::local::format::{format_page, pages};
    use crate::local::map::Map;
    use crate::local::sums::{Compared, Sum};
    use crate::local::{Config, Event, LocalStore};

    const TURN_BLOCKS: u64 = 1 << 12;

    /// A local store of which the volume has nothing yet.
    fn home(blocks: u64) -> LocalStore {
        let config = Config {
            bytes: blocks * BLOCK,
            volume: [1; 16],
            home: 1,
            log: 5,
            sequence: 1,
            commits: 1,
            between: false,
            sums_log: 5,
            sums_bytes: 16 * BLOCK_BYTES,
            backend_atomic: true,
            flush_every_blocks: u64::MAX,
            turn_blocks: TURN_BLOCKS,
            data_key: [0; 16],
        };
        let pages = (0..pages(config.bytes)).map(|page| Box::new(format_page(1, page, None)));
        LocalStore::new(config, Map::load(pages.collect(), blocks, 5, true), None)
    }

    fn has_ended(actions: &[Action], token: u64) -> bool {
        actions
            .iter()
            .any(|action| matches!(action, Action::End(end) if end.token == Token(token)))
    }

    #[test]
    fn zeroing_of_any_size_takes_bounded_turns_in_which_others_go_on() {
        let blocks = 64 * TURN_BLOCKS;
        let mut home = home(blocks + 10);
        let (mut actions, now) = (Vec::new(), Nanos(7));
        let zero = |offset, bytes| Event::Submit {
            token: Token(1),
            ask: crate::local::Ask::Zero { offset, bytes },
        };
        // Its first block is a part.
        home.step(now, zero(512, blocks * BLOCK - 512), &mut actions);
        let Some(Action::StoreRead { token, buf, .. }) = actions.pop() else {
            panic!("it reads the checksums of the part: {actions:?}");
        };
        let answered = |home: &mut LocalStore, token, result| {
            let completion = crate::base::io::Completion { token, result };
            let mut actions = Vec::new();
            home.step(now, Event::Completed(completion), &mut actions);
            actions
        };
        let filled = answered(&mut home, token, Ok(Done::Read(buf)));
        let [Action::BackendRead { token, .. }] = filled[..] else {
            panic!("{filled:?}");
        };
        let buf = crate::base::buf::Arena::new(1).claim(0, 1).unwrap();
        let written = answered(&mut home, token, Ok(Done::Read(buf)));
        let [Action::StoreWrite { token, .. }] = written[..] else {
            panic!("{written:?}");
        };
        let mut ended = answered(&mut home, token, Ok(Done::Written));
        let (mut turns, mut zero_blocks) = (1, 0);
        loop {
            let by_now = home.status().zero_bytes / BLOCK;
            assert!(by_now - zero_blocks <= 2 * TURN_BLOCKS, "in turn {turns}");
            zero_blocks = by_now;
            if has_ended(&ended, 1) {
                break;
            }
            assert_eq!(home.next_wakeup(), Some(now));
            ended.clear();
            if turns == 9 {
                let data = vec![home.writes.zeroes.clone()];
                let ask = crate::local::Ask::Write {
                    offset: (blocks + 5) * BLOCK,
                    data,
                };
                let token = Token(2);
                home.step(now, Event::Submit { token, ask }, &mut ended);
                // It asks for its checksums.
                let is_begun = |action: &Action| matches!(action, Action::StoreRead { .. });
                assert!(ended.iter().any(is_begun), "it waits: {ended:?}");
            } else {
                home.poll(now, &mut ended);
            }
            turns += 1;
        }
        assert!(turns > 60 && zero_blocks == blocks - 1, "{turns} turns");
        // What is left is a commit, when it is old.
        let commit = now.plus(Nanos::from_millis(HOME_UNCOMMITTED_AGE_MS));
        assert_eq!(
            (home.next_wakeup(), home.writes.queue.len()),
            (Some(commit), 1)
        );
    }

    #[test]
    fn failed_write_leaves_doubt_about_no_sector_but_its_own() {
        let mut home = home(100);
        let (mut actions, now) = (Vec::new(), Nanos(7));
        let arena = crate::base::buf::Arena::new(8);
        let write = |at: usize, offset: u64, bytes: usize| {
            let data = arena.claim(at, 1).unwrap().freeze().slice(0..bytes);
            let data = vec![data];
            Event::Submit {
                token: Token(at as u64),
                ask: crate::local::Ask::Write { offset, data },
            }
        };
        let answer =
            |home: &mut LocalStore, actions: &mut Vec<Action>, result: Result<(), IoError>| {
                for action in core::mem::take(actions) {
                    let (token, result) = match action {
                        Action::StoreRead { token, buf, .. } => (token, Ok(Done::Read(buf))),
                        Action::StoreWrite { token, .. } => (token, result.map(|()| Done::Written)),
                        _ => continue,
                    };
                    let completion = crate::base::io::Completion { token, result };
                    home.step(now, Event::Completed(completion), actions);
                }
            };
        // A block of which all is there, and then a sector of it that is not written.
        home.step(now, write(1, 5 * BLOCK, BLOCK_BYTES), &mut actions);
        for _ in 0..4 {
            answer(&mut home, &mut actions, Ok(()));
        }
        home.step(now, write(2, 5 * BLOCK + 1024, SECTOR_BYTES), &mut actions);
        assert!(
            matches!(actions[..], [Action::StoreWrite { .. }]),
            "{actions:?}"
        );
        answer(&mut home, &mut actions, Err(IoError::Failed));
        let mut compared = |sector| {
            let bad = [1; SECTOR_BYTES];
            home.store
                .verify(sector, &[Sum::default()], &bad, &mut Vec::new())
        };
        assert_eq!(compared(5 * 8 + 2), Compared::Unsettled);
        for sector in [5 * 8, 5 * 8 + 1, 5 * 8 + 3, 5 * 8 + 7, 4 * 8 + 7, 6 * 8] {
            assert_eq!(compared(sector), Compared::Damaged, "sector {sector}");
        }
    }
}
