//! Which line of the SSD tier holds which address: the memory side of the segments.
//!
//! A *line* is `line_blocks` blocks of one volume, named by the key of its first block; line `i` of
//! segment `s` has the number `s * lines_per_segment + i`. It has a *place* in its segment, of fewer blocks if
//! it is compressed. The address it was filled for is its *primary* one; further addresses with the same
//! bytes are *aliases*.
//!
//! Invariants:
//! 1. An address is in the table at most once, as a primary or as an alias.
//! 2. A line that is *placed* keeps its checksums until its segment is cleared, so that a read that
//!    began before an invalidation can still be verified.
//! 3. A line is in the content table only while an address leads to it.
//! 4. The aliases of a segment form a list, so that clearing the segment finds them all.
//!
//! Memory: 4 bytes of checksum for each block of a segment; for each line that a segment may have, 8 key, 1 state, 2
//! place, 4.9 addresses and 4.9 contents; and for each that it has uncompressed, at most 6 for aliases. It is
//! taken at the start for as many lines as [`CACHE_SEGMENT_LINES_MAX`](crate::base::limits::CACHE_SEGMENT_LINES_MAX) allows.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::footer::Place;
use super::journal::Layout;
use super::table::{Table, mix};
use crate::base::io::BlockKey;

/// The line's slot is taken in the present segment.
const PLACED: u8 = 1;
/// The primary address leads here.
const PRIMARY: u8 = 2;
/// An alias led here at some time; lasts until the segment is cleared.
const ALIASED: u8 = 4;
/// In the content table.
const CONTENT: u8 = 8;
/// Two bits that count uses.
const USES_SHIFT: u32 = 4;
const USES_MASK: u8 = 3 << USES_SHIFT;

/// One alias is allowed for so many uncompressed lines.
const LINES_PER_ALIAS: usize = 4;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Alias {
    key: u64,
    line: u32,
    next: u32,
    previous: u32,
}

/// Number of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Line(pub u32);

/// See the module.
#[derive(Debug)]
pub struct Index {
    line_blocks: usize,
    lines_per_segment: usize,
    room_blocks: usize,
    aliases_max: usize,
    keys: Vec<u64>,
    places: Vec<[u8; 2]>,
    /// Of each block of each segment.
    checksums: Vec<u32>,
    states: Vec<u8>,
    addresses: Table,
    contents: Table,
    aliases: Vec<Alias>,
    alias_free: u32,
    /// First alias of each segment.
    alias_heads: Vec<u32>,
    used_lines: usize,
    /// Blocks that they take.
    used_blocks: usize,
}

impl Index {
    /// The index of so many segments.
    pub fn new(segments: usize, layout: &Layout) -> Self {
        let lines = segments * layout.lines_per_segment;
        let aliases_max = segments * layout.plain_lines / LINES_PER_ALIAS;
        Self {
            line_blocks: layout.line_blocks,
            lines_per_segment: layout.lines_per_segment,
            room_blocks: layout.room_blocks(),
            aliases_max,
            keys: vec![0; lines],
            places: vec![[0; 2]; lines],
            checksums: vec![0; segments * layout.room_blocks()],
            states: vec![0; lines],
            addresses: Table::new(lines + aliases_max),
            contents: Table::new(lines),
            aliases: Vec::with_capacity(aliases_max),
            alias_free: NONE,
            alias_heads: vec![NONE; segments],
            used_lines: 0,
            used_blocks: 0,
        }
    }

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.addresses.work() + self.contents.work()
    }

    pub fn bytes(&self) -> usize {
        self.keys.len() * 10
            + self.checksums.len() * 4
            + self.states.len()
            + self.addresses.bytes()
            + self.contents.bytes()
            + self.aliases.capacity() * size_of::<Alias>()
            + self.alias_heads.len() * 4
    }

    /// Lines that an address leads to or led to by an alias.
    pub fn used_lines(&self) -> usize {
        self.used_lines
    }

    /// Blocks that these take on the device.
    pub fn used_blocks(&self) -> usize {
        self.used_blocks
    }

    /// Lines that there may be: one above their highest number.
    pub fn lines(&self) -> usize {
        self.keys.len()
    }

    /// Places that an address may be in: the lines, then the aliases.
    pub fn places(&self) -> usize {
        self.keys.len() + self.aliases.len()
    }

    /// The address in a place, if there is one, and the line that it leads to.
    pub fn address_at(&self, place: usize) -> Option<(u64, Line)> {
        match place.checked_sub(self.keys.len()) {
            None => {
                let line = Line(place as u32);
                self.primary(line).map(|key| (key, line))
            }
            // One that is free keeps its key, which leads elsewhere or nowhere.
            Some(alias) => {
                let entry = self.aliases.get(alias)?;
                (self.find_id(entry.key) == Some(place as u32))
                    .then_some((entry.key, Line(entry.line)))
            }
        }
    }

    pub fn segment_of(&self, line: Line) -> usize {
        line.0 as usize / self.lines_per_segment
    }

    pub fn line_at(&self, segment: usize, slot: usize) -> Line {
        Line((segment * self.lines_per_segment + slot) as u32)
    }

    pub fn slot_of(&self, line: Line) -> usize {
        line.0 as usize % self.lines_per_segment
    }

    /// Where a line lies that is placed.
    pub fn place_of(&self, line: Line) -> Place {
        let [first, blocks] = self.places[line.0 as usize];
        Place { first, blocks }
    }

    /// Whether a line that is placed is compressed.
    pub fn is_packed(&self, line: Line) -> bool {
        usize::from(self.place_of(line).blocks) < self.line_blocks
    }

    fn checksum_range(&self, line: Line, place: Place) -> Range<usize> {
        let segment = self.segment_of(line) * self.room_blocks;
        segment + usize::from(place.first)..segment + place.end()
    }

    /// The checksums of the stored blocks of a line.
    pub fn checksums(&self, line: Line) -> &[u32] {
        &self.checksums[self.checksum_range(line, self.place_of(line))]
    }

    fn state(&self, line: Line) -> u8 {
        self.states[line.0 as usize]
    }

    /// The primary key of a line, if it leads there.
    pub fn primary(&self, line: Line) -> Option<u64> {
        (self.state(line) & PRIMARY != 0).then(|| self.keys[line.0 as usize])
    }

    pub fn uses(&self, line: Line) -> u8 {
        (self.state(line) & USES_MASK) >> USES_SHIFT
    }

    pub fn set_uses(&mut self, line: Line, uses: u8) {
        let state = &mut self.states[line.0 as usize];
        *state = (*state & !USES_MASK) | (uses.min(3) << USES_SHIFT);
    }

    fn find_id(&self, key: u64) -> Option<u32> {
        self.addresses.find(mix(key), |id| {
            let id = id as usize;
            match id.checked_sub(self.keys.len()) {
                None => self.keys[id] == key && self.states[id] & PRIMARY != 0,
                Some(alias) => self.aliases[alias].key == key,
            }
        })
    }

    /// The line that holds an address.
    pub fn find(&self, key: u64) -> Option<Line> {
        let id = self.find_id(key)?;
        Some(match (id as usize).checked_sub(self.keys.len()) {
            None => Line(id),
            Some(alias) => Line(self.aliases[alias].line),
        })
    }

    /// A line with these checksums, whose bytes may be the same.
    pub fn find_content(&self, checksums: &[u32]) -> Option<Line> {
        self.contents
            .find(content_hash(checksums), |id| {
                self.checksums(Line(id)) == checksums
            })
            .map(Line)
    }

    /// Place a line in a free slot and let its primary address, which leads nowhere yet, lead there;
    /// with `shareable`, others may become aliases of it.
    pub fn place(&mut self, line: Line, key: u64, first: u8, checksums: &[u32], shareable: bool) {
        let id = line.0 as usize;
        self.place_void(line, key, first, checksums);
        self.states[id] |= PRIMARY;
        self.addresses.insert(mix(key), line.0);
        if shareable {
            self.states[id] |= CONTENT;
            self.contents.insert(content_hash(checksums), line.0);
        }
        self.used_lines += 1;
        self.used_blocks += checksums.len();
    }

    /// Place a line that no address leads to: one that the journal or a newer line has voided.
    pub fn place_void(&mut self, line: Line, key: u64, first: u8, checksums: &[u32]) {
        let id = line.0 as usize;
        assert!(self.states[id] == 0, "the slot is free");
        let place = Place {
            first,
            blocks: checksums.len() as u8,
        };
        assert!(place.end() <= self.room_blocks, "the line fits its segment");
        self.keys[id] = key;
        self.places[id] = [place.first, place.blocks];
        let range = self.checksum_range(line, place);
        self.checksums[range].copy_from_slice(checksums);
        self.states[id] = PLACED;
    }

    /// Keys of the lines of a segment in their order, as far as their primary addresses lead there, and the
    /// blocks of each.
    pub fn placed(&self, segment: usize) -> impl Iterator<Item = (Option<u64>, Place)> {
        (0..self.lines_per_segment)
            .map(move |slot| self.line_at(segment, slot))
            .take_while(|&line| self.state(line) & PLACED != 0)
            .map(|line| (self.primary(line), self.place_of(line)))
    }

    /// The checksums of so many blocks of a segment.
    pub fn block_checksums(&self, segment: usize, blocks: usize) -> &[u32] {
        &self.checksums[segment * self.room_blocks..][..blocks]
    }

    /// A line is used no longer.
    fn leave(&mut self, line: Line) {
        self.used_lines -= 1;
        self.used_blocks -= usize::from(self.place_of(line).blocks);
    }

    /// Let another address lead to a line as well; false if there are too many already.
    pub fn add_alias(&mut self, key: u64, line: Line) -> bool {
        let segment = self.segment_of(line);
        let head = self.alias_heads[segment];
        let entry = Alias {
            key,
            line: line.0,
            next: head,
            previous: NONE,
        };
        let alias = if self.alias_free != NONE {
            let alias = self.alias_free;
            self.alias_free = self.aliases[alias as usize].next;
            self.aliases[alias as usize] = entry;
            alias
        } else if self.aliases.len() < self.aliases_max {
            self.aliases.push(entry);
            self.aliases.len() as u32 - 1
        } else {
            return false;
        };
        if head != NONE {
            self.aliases[head as usize].previous = alias;
        }
        self.alias_heads[segment] = alias;
        self.states[line.0 as usize] |= ALIASED;
        self.addresses
            .insert(mix(key), self.keys.len() as u32 + alias);
        true
    }

    fn remove_alias(&mut self, alias: u32) {
        let entry = self.aliases[alias as usize];
        self.addresses
            .remove(mix(entry.key), self.keys.len() as u32 + alias);
        if entry.next != NONE {
            self.aliases[entry.next as usize].previous = entry.previous;
        }
        match entry.previous {
            NONE => {
                let segment = self.segment_of(Line(entry.line));
                self.alias_heads[segment] = entry.next;
            }
            previous => self.aliases[previous as usize].next = entry.next,
        }
        self.aliases[alias as usize].next = self.alias_free;
        self.alias_free = alias;
    }

    /// Let a line's primary address lead nowhere. Its bytes and checksums stay.
    pub fn unmap_primary(&mut self, line: Line) {
        let id = line.0 as usize;
        if self.states[id] & PRIMARY == 0 {
            return;
        }
        self.addresses.remove(mix(self.keys[id]), line.0);
        self.states[id] &= !PRIMARY;
        if self.states[id] & ALIASED == 0 {
            self.forget_content(line);
            self.leave(line);
        }
    }

    fn forget_content(&mut self, line: Line) {
        if self.state(line) & CONTENT != 0 {
            let hash = content_hash(self.checksums(line));
            self.contents.remove(hash, line.0);
            self.states[line.0 as usize] &= !CONTENT;
        }
    }

    /// Let an address lead nowhere; the line that was its primary one, if any.
    pub fn unmap(&mut self, key: u64) -> Option<Line> {
        let id = self.find_id(key)?;
        match (id as usize).checked_sub(self.keys.len()) {
            None => {
                self.unmap_primary(Line(id));
                Some(Line(id))
            }
            Some(alias) => {
                self.remove_alias(alias as u32);
                None
            }
        }
    }

    /// Let every address of a line lead nowhere: its bytes are not to be trusted.
    pub fn unmap_line(&mut self, line: Line) {
        let mut alias = self.alias_heads[self.segment_of(line)];
        while alias != NONE {
            let next = self.aliases[alias as usize].next;
            if self.aliases[alias as usize].line == line.0 {
                self.remove_alias(alias);
            }
            alias = next;
        }
        self.unmap_primary(line);
        self.forget_content(line);
    }

    /// The aliases of a segment, with the line of each.
    pub fn aliases_of(&self, segment: usize) -> impl Iterator<Item = (u64, Line)> {
        let first = self.aliases.get(self.alias_heads[segment] as usize);
        core::iter::successors(first, |alias| self.aliases.get(alias.next as usize))
            .map(|alias| (alias.key, Line(alias.line)))
    }

    /// Empty every slot of a segment.
    pub fn clear_segment(&mut self, segment: usize) {
        while self.alias_heads[segment] != NONE {
            self.remove_alias(self.alias_heads[segment]);
        }
        for slot in 0..self.lines_per_segment {
            let line = self.line_at(segment, slot);
            self.unmap_primary(line);
            self.forget_content(line);
            if self.state(line) & ALIASED != 0 {
                self.leave(line);
            }
            self.states[line.0 as usize] = 0;
        }
    }

    /// One bit per slot of a segment: its line is on the medium but its primary address leads
    /// elsewhere or nowhere.
    pub fn void_bits(&self, segment: usize) -> u128 {
        (0..self.lines_per_segment).fold(0, |bits, slot| {
            let state = self.state(self.line_at(segment, slot));
            bits | u128::from(state & (PLACED | PRIMARY) == PLACED) << slot
        })
    }

    /// Whether an address of one of these volumes leads to a line.
    pub fn leads_to(&self, line: Line, volumes: [u32; 2]) -> bool {
        let is_one = |key: u64| volumes.contains(&BlockKey(key).volume());
        if self.primary(line).is_some_and(is_one) {
            return true;
        }
        if self.state(line) & ALIASED == 0 {
            return false;
        }
        let mut alias = self.alias_heads[self.segment_of(line)];
        while let Some(entry) = self.aliases.get(alias as usize) {
            if entry.line == line.0 && is_one(entry.key) {
                return true;
            }
            alias = entry.next;
        }
        false
    }

    /// Every address within the range, found by whichever way is shorter.
    pub fn addresses_in(&self, first: u64, end: u64) -> Vec<u64> {
        let step = self.line_blocks as u64;
        let first = first & !(step - 1);
        if end.saturating_sub(first) / step <= self.keys.len() as u64 {
            return (first..end)
                .step_by(self.line_blocks)
                .filter(|&key| self.find_id(key).is_some())
                .collect();
        }
        let primaries = (0..self.keys.len())
            .filter(|&id| self.states[id] & PRIMARY != 0)
            .map(|id| self.keys[id]);
        let aliases = self.alias_heads.iter().flat_map(|&head| {
            core::iter::successors(self.aliases.get(head as usize), |alias| {
                self.aliases.get(alias.next as usize)
            })
            .map(|alias| alias.key)
        });
        primaries
            .chain(aliases)
            .filter(|key| (first..end).contains(key))
            .collect()
    }

    pub fn check_invariants(&self) {
        let (mut primaries, mut contents, mut used, mut blocks) = (0, 0, 0, 0);
        for id in 0..self.keys.len() {
            let (line, state) = (Line(id as u32), self.states[id]);
            assert!(state == 0 || state & PLACED != 0, "state of line {id}");
            if state & PRIMARY != 0 {
                primaries += 1;
                assert_eq!(self.find(self.keys[id]), Some(line), "primary of line {id}");
            }
            if state & CONTENT != 0 {
                contents += 1;
                assert!(state & (PRIMARY | ALIASED) != 0, "content of line {id}");
            }
            if state & (PRIMARY | ALIASED) != 0 {
                used += 1;
                blocks += usize::from(self.place_of(line).blocks);
            }
            if state != 0 && self.slot_of(line) > 0 && self.states[id - 1] != 0 {
                let before = self.place_of(Line(line.0 - 1));
                let is_behind = before.end() == usize::from(self.place_of(line).first);
                assert!(is_behind, "line {id} is behind the one before");
            }
        }
        let mut aliases = 0;
        for (segment, &head) in self.alias_heads.iter().enumerate() {
            let mut alias = head;
            while alias != NONE {
                let entry = self.aliases[alias as usize];
                assert_eq!(self.segment_of(Line(entry.line)), segment, "alias {alias}");
                assert_eq!(self.find(entry.key), Some(Line(entry.line)));
                aliases += 1;
                alias = entry.next;
            }
        }
        assert_eq!(self.addresses.len(), primaries + aliases, "addresses");
        assert_eq!(self.contents.len(), contents, "contents");
        assert_eq!(self.used_lines, used, "used lines");
        assert_eq!(self.used_blocks, blocks, "used blocks");
    }
}

fn content_hash(checksums: &[u32]) -> u64 {
    checksums
        .iter()
        .fold(0, |hash, &checksum| mix(hash ^ u64::from(checksum)))
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;

    use super::*;

    #[test]
    fn index_is_within_16_bytes_per_block() {
        for line_blocks in [4, 8, 16] {
            let layout = Layout::new(1 << 30, line_blocks).unwrap();
            let bytes = Index::new(layout.segments, &layout).bytes();
            let blocks = layout.segments * layout.room_blocks();
            assert!(bytes <= 16 * blocks, "{bytes} bytes for {blocks} blocks");
        }
    }

    #[test]
    fn index_agrees_with_a_map_through_churn() {
        let (segments, blocks) = (8, 4);
        let layout = Layout {
            segments,
            line_blocks: blocks,
            plain_lines: 12,
            lines_per_segment: 20,
            half_blocks: 0,
        };
        let mut index = Index::new(segments, &layout);
        let mut random = fastrand::Rng::with_seed(7);
        let mut model: BTreeMap<u64, u32> = BTreeMap::new();
        let mut filled = [(0, 0); 8];
        let has_room = |(slot, first): (usize, usize)| {
            slot < layout.lines_per_segment && first + blocks <= layout.room_blocks()
        };
        for step in 0..30_000 {
            let key = random.u64(..300) * blocks as u64;
            let segment = random.usize(..segments);
            match random.u8(..20) {
                0..8 if has_room(filled[segment]) && !model.contains_key(&key) => {
                    let (slot, first) = filled[segment];
                    let line = index.line_at(segment, slot);
                    let sums = &[random.u32(..50); 4][..random.usize(1..=4)];
                    filled[segment] = (slot + 1, first + sums.len());
                    let shareable = index.find_content(sums).is_none();
                    index.place(line, key, first as u8, sums, shareable);
                    assert_eq!(index.checksums(line), sums);
                    assert_eq!(index.is_packed(line), sums.len() < 4);
                    model.insert(key, line.0);
                }
                8..12 if !model.contains_key(&key) => {
                    let sums = &[random.u32(..50); 4][..random.usize(1..=4)];
                    if let Some(line) = index.find_content(sums)
                        && index.add_alias(key, line)
                    {
                        model.insert(key, line.0);
                    }
                }
                12..15 => {
                    index.unmap(key);
                    model.remove(&key);
                }
                15 => {
                    let end = key + random.u64(..40);
                    let mut all: Vec<_> = (0..index.places())
                        .filter_map(|place| index.address_at(place))
                        .map(|(key, line)| (key, line.0))
                        .collect();
                    all.sort_unstable();
                    assert_eq!(all, model.clone().into_iter().collect::<Vec<_>>());
                    let mut found = index.addresses_in(key, end);
                    found.sort_unstable();
                    let expected: Vec<u64> = model.range(key..end).map(|(&key, _)| key).collect();
                    assert_eq!(found, expected);
                    let mut all = index.addresses_in(0, u64::MAX);
                    all.sort_unstable();
                    assert!(all.iter().eq(model.keys()));
                }
                16 if random.u8(..8) == 0 => {
                    index.clear_segment(segment);
                    filled[segment] = (0, 0);
                    model.retain(|_, line| index.segment_of(Line(*line)) != segment);
                }
                17 => {
                    let line = index.line_at(segment, random.usize(..layout.lines_per_segment));
                    index.unmap_line(line);
                    model.retain(|_, found| *found != line.0);
                }
                _ => assert_eq!(index.find(key).map(|line| line.0), model.get(&key).copied()),
            }
            if step % 100 == 0 {
                index.check_invariants();
            }
        }
        (0..segments).for_each(|segment| index.clear_segment(segment));
        index.check_invariants();
        assert_eq!(index.used_lines(), 0);
    }
}
