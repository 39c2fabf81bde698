//! Reads what a manifest and its snapshots need: their maps, and the tables of the data objects that are newer
//! than these.
//!
//! Snapshots share most of their maps, so several manifests are looked at together, as many as fit into memory,
//! and what they share is read once for all of them. The maps are not kept: they are read from the newest to
//! the oldest, so the first one that has a page is the one that counts. What is newer than the maps lies over
//! them; where that does not fit into memory either, it is of a range of the volume, and all is read once more
//! for the next one.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use hdcs_core::base::error::FormatError;
use hdcs_core::objects::format::{
    Manifest, MapEntry, SLOT_NONE, TailEntry, parse_index, parse_page, parse_table, parse_usage,
};
use hdcs_core::objects::io::{Kind, Name};
use hdcs_core::objects::map::changes::Changes;
use hdcs_core::objects::map::directory::PAGE_ALIGN;
use hdcs_core::objects::map::{Place, Run as MapRun};

use super::gets::Gets;
use super::needs::Run;
use super::sizes::Writer;
use super::{BLOCKS_MAX, Check, damaged};
use crate::BackendError;
use crate::stores::StoreError;
use crate::verify::Verified;

/// Who takes what is needed.
pub(super) type Take<'a> = dyn FnMut(Run) + 'a;

/// A manifest that is looked at, reduced to what is read.
struct Member {
    /// What its problems say behind the name of an object.
    of: String,
    page_blocks: u64,
    maps: Vec<MapEntry>,
    usages: Vec<MapEntry>,
    tail: Vec<TailEntry>,
    /// How many of the tail, from its beginning, and of the maps, from their end, were asked for.
    tail_asked: usize,
    maps_asked: usize,
    /// What the tail says of its blocks.
    over: Changes,
    /// Pages of which the newest copy was found, by bit.
    seen: Vec<u64>,
}

impl Member {
    fn new(manifest: &Manifest, of: String) -> Self {
        Self {
            of,
            page_blocks: manifest.page_blocks.into(),
            maps: manifest.maps.clone(),
            usages: manifest.usages.clone(),
            tail: manifest.tail.clone(),
            tail_asked: 0,
            maps_asked: 0,
            over: Changes::default(),
            seen: Vec::new(),
        }
    }

    /// Memory of its lists, and of its pages at worst.
    fn list_bytes(&self) -> usize {
        let seen = BLOCKS_MAX / self.page_blocks / 8;
        let maps = size_of_val(&*self.maps) + size_of_val(&*self.usages);
        maps + size_of_val(&*self.tail) + seen as usize
    }

    fn start_again(&mut self) {
        self.over = Changes::default();
        self.seen.clear();
        self.tail_asked = 0;
        self.maps_asked = 0;
    }

    /// The next object of the tail, from the oldest to the newest.
    fn next_tail(&self) -> Option<&TailEntry> {
        self.tail.get(self.tail_asked)
    }

    /// The next object of the map, from the newest to the oldest.
    fn next_map(&self) -> Option<&MapEntry> {
        self.maps.iter().rev().nth(self.maps_asked)
    }

    /// A data object says where blocks are, or that they are nowhere: what of that is within `pages` lies over what
    /// others have said.
    fn lay(&mut self, block: u64, count: u64, place: Option<Place>, pages: &Range<u64>) {
        let end = (block + count).min(pages.end.saturating_mul(self.page_blocks));
        let from = block.max(pages.start * self.page_blocks);
        if from < end {
            let place = place.map(|place| place.plus((from - block) as u32));
            self.over.set(from, end - from, place);
        }
    }

    /// Whether a page comes up for the first time.
    fn is_first(&mut self, page: u64) -> bool {
        let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        let is_first = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        is_first
    }
}

/// Take what runs of a page say of blocks of which nothing lies over it. `first` is the first block of the page.
fn take_rest(first: u64, runs: &[MapRun], over: Option<&Changes>, take: &mut Take<'_>) {
    for run in runs {
        let from = first + u64::from(run.first);
        let to = from + u64::from(run.count);
        let mut piece = |begin: u64, end: u64| {
            if begin < end {
                take(Run {
                    place: run.place().plus((begin - from) as u32),
                    block: begin,
                    count: (end - begin) as u32,
                });
            }
        };
        let mut at = from;
        for (block, count, _) in over.iter().flat_map(|over| over.range(from, to)) {
            piece(at, block);
            at = block + count;
        }
        piece(at, to);
    }
}

impl Check<'_> {
    /// Read what a manifest and its snapshots need, and what is wrong with them. It was ended if that is cut short.
    pub(super) async fn walk(
        &mut self,
        manifest: &Manifest,
        writers: &[Writer],
        take: &mut Take<'_>,
    ) -> Result<Verified, BackendError> {
        let mut found = Verified {
            objects: 1,
            ..Verified::default()
        };
        let mut snapshots = manifest.snapshots.iter();
        let mut members = vec![Member::new(manifest, String::new())];
        loop {
            let lists: usize = members.iter().map(Member::list_bytes).sum();
            if (members.is_empty() || lists < self.bounds.list_bytes)
                && let Some(snapshot) = snapshots.next()
            {
                let name = Name::own(Kind::Snapshot, snapshot.number).to_string();
                let of = format!(" of snapshot {}", snapshot.name.as_str());
                let got = self.client.get(&name, 0, snapshot.bytes as usize).await;
                let client = self.client.clone();
                if let Some(bytes) = self.there(&client, &name, &[&of], got, &mut found)? {
                    match Manifest::parse(&bytes) {
                        Ok(copy) if copy.volume == manifest.volume => {
                            found.objects += 1;
                            members.push(Member::new(&copy, of));
                        }
                        Ok(_) => {
                            let why = "it is another volume's";
                            found.problem(damaged(&client.place(), &name, &of, &why));
                        }
                        Err(error) => {
                            found.problem(damaged(&client.place(), &name, &of, &error));
                        }
                    }
                }
                continue;
            }
            if members.is_empty() || found.is_cut_short {
                return Ok(found);
            }
            members = self.walk_group(members, writers, take, &mut found).await?;
        }
    }

    /// Read what some manifests need. Those that there was no room for come back.
    async fn walk_group(
        &mut self,
        mut group: Vec<Member>,
        writers: &[Writer],
        take: &mut Take<'_>,
        found: &mut Verified,
    ) -> Result<Vec<Member>, BackendError> {
        let mut others = Vec::new();
        let mut pages = 0..u64::MAX;
        loop {
            // What is read once more is counted once.
            let mut part = Verified::default();
            let lay = self.read_tails(
                &mut group,
                &mut others,
                &mut pages,
                writers,
                take,
                &mut part,
            );
            lay.await?;
            self.read_maps(&mut group, &pages, writers, take, &mut part)
                .await?;
            for member in &mut group {
                for (block, count, place) in member.over.range(0, BLOCKS_MAX) {
                    if let Some(place) = place {
                        let count = count as u32;
                        take(Run {
                            place,
                            block,
                            count,
                        });
                    }
                }
                member.start_again();
            }
            if pages.start == 0 {
                found.objects += part.objects;
            }
            found.bytes += part.bytes;
            found.is_cut_short |= part.is_cut_short;
            found.add_new_problems(part);
            if pages.end == u64::MAX || found.is_cut_short {
                return Ok(others);
            }
            pages = pages.end..u64::MAX;
        }
    }

    /// Lay what is newer than the maps over them, from the oldest to the newest. If that is too much, manifests are
    /// left out, and if there is but one, pages.
    async fn read_tails(
        &mut self,
        group: &mut Vec<Member>,
        others: &mut Vec<Member>,
        pages: &mut Range<u64>,
        writers: &[Writer],
        take: &mut Take<'_>,
        found: &mut Verified,
    ) -> Result<(), BackendError> {
        let mut gets = Gets::default();
        loop {
            while gets.len() < self.at_once() {
                let tails = group.iter().filter_map(Member::next_tail);
                // What several have in front is read once for all of them.
                let Some(&entry) = tails.min_by_key(|entry| entry.number) else {
                    break;
                };
                let mut whose = Vec::new();
                for (index, member) in group.iter_mut().enumerate() {
                    if member.next_tail().is_some_and(|e| e.number == entry.number) {
                        member.tail_asked += 1;
                        whose.push(index);
                    }
                }
                let client = &Writer::of(writers, entry.number).client;
                let name = Name::own(Kind::Data, entry.number).to_string();
                let bytes = (entry.bytes() - entry.table_offset()) as usize;
                gets.begin((entry, whose), client, &name, entry.table_offset(), bytes);
            }
            let Some(((entry, whose), got)) = gets.next().await else {
                return Ok(());
            };
            // It is to be there, whether a block of it is still needed or not.
            take(Run {
                place: entry.origin(),
                block: 0,
                count: 0,
            });
            let Writer { client, volume, .. } = Writer::of(writers, entry.number);
            let name = Name::own(Kind::Data, entry.number).to_string();
            let members = whose.iter().filter_map(|&index| group.get(index));
            let ofs: Vec<&str> = members.map(|member| &*member.of).collect();
            let read = self.there(client, &name, &ofs, got, found)?;
            if let Some(bytes) = read {
                match parse_table(volume, entry.number, BLOCKS_MAX, &bytes) {
                    Ok((_, runs)) => {
                        for index in whose {
                            // Those at the end may be left out meanwhile.
                            let Some(member) = group.get_mut(index) else {
                                break;
                            };
                            for run in runs {
                                let (block, slot) = (run.block.get(), run.slot.get());
                                let place = (slot != SLOT_NONE).then(|| entry.origin().plus(slot));
                                member.lay(block, run.count.get().into(), place, pages);
                            }
                            self.make_room(group, others, pages);
                        }
                    }
                    Err(error) => {
                        for of in ofs {
                            found.problem(damaged(&client.place(), &name, of, &error));
                        }
                    }
                }
                if !self.pass(bytes.len() as u64) {
                    found.is_cut_short = true;
                    return Ok(());
                }
            }
        }
    }

    /// Leave out manifests, or pages of the only one, until what lies over the maps is not too much.
    fn make_room(&self, group: &mut Vec<Member>, others: &mut Vec<Member>, pages: &mut Range<u64>) {
        let over = |group: &[Member]| -> usize {
            group.iter().map(|member| member.over.memory_bytes()).sum()
        };
        while over(group) > self.bounds.over_bytes {
            if let [only] = &mut group[..] {
                let middle = only.over.nth(only.over.len() / 4 * 3);
                let page = middle.map_or(0, |block| block / only.page_blocks);
                if page <= pages.start {
                    return;
                }
                only.over.truncate(page * only.page_blocks);
                pages.end = page;
            } else if let Some(mut last) = group.pop() {
                last.start_again();
                others.insert(0, last);
            }
        }
    }

    /// Read the maps, from the newest to the oldest.
    async fn read_maps(
        &mut self,
        group: &mut [Member],
        pages: &Range<u64>,
        writers: &[Writer],
        take: &mut Take<'_>,
        found: &mut Verified,
    ) -> Result<(), BackendError> {
        let mut gets = Gets::default();
        while !found.is_cut_short {
            while gets.len() < self.at_once() {
                let maps = group.iter().filter_map(Member::next_map);
                let Some(&entry) = maps.max_by_key(|entry| entry.number) else {
                    break;
                };
                let mut whose = Vec::new();
                for (index, member) in group.iter_mut().enumerate() {
                    if member.next_map().is_some_and(|e| e.number == entry.number) {
                        member.maps_asked += 1;
                        whose.push(index);
                    }
                }
                let client = &Writer::of(writers, entry.number).client;
                let name = Name::own(Kind::Map, entry.number).to_string();
                gets.begin((entry, whose), client, &name, 0, entry.bytes as usize);
            }
            let Some(((entry, whose), got)) = gets.next().await else {
                break;
            };
            let writer = Writer::of(writers, entry.number);
            let name = Name::own(Kind::Map, entry.number).to_string();
            let ofs: Vec<&str> = whose.iter().map(|&index| &*group[index].of).collect();
            let Some(bytes) = self.there(&writer.client, &name, &ofs, got, found)? else {
                continue;
            };
            found.objects += 1;
            if let Err(error) = take_map(group, &whose, entry, writer, &bytes, pages, take) {
                for &index in &whose {
                    let place = writer.client.place();
                    found.problem(damaged(&place, &name, &group[index].of, &error));
                }
            }
            if !self.pass(bytes.len() as u64) {
                found.is_cut_short = true;
            }
        }
        self.read_usages(group, pages, writers, found).await
    }

    /// Read the usage tables: what they say is not needed, but an opening reads them.
    async fn read_usages(
        &mut self,
        group: &[Member],
        pages: &Range<u64>,
        writers: &[Writer],
        found: &mut Verified,
    ) -> Result<(), BackendError> {
        if pages.start > 0 {
            return Ok(());
        }
        let mut usages: BTreeMap<u64, (MapEntry, Vec<&str>)> = BTreeMap::new();
        for member in group {
            for &usage in &member.usages {
                let known = usages.entry(usage.number);
                known.or_insert((usage, Vec::new())).1.push(&member.of);
            }
        }
        let mut usages = usages.into_values();
        let mut gets = Gets::default();
        while !found.is_cut_short {
            while gets.len() < self.at_once()
                && let Some((entry, ofs)) = usages.next()
            {
                let client = &Writer::of(writers, entry.number).client;
                let name = Name::own(Kind::Map, entry.number).to_string();
                gets.begin((entry, ofs), client, &name, 0, entry.bytes as usize);
            }
            let Some(((entry, ofs), got)) = gets.next().await else {
                break;
            };
            let Writer { client, volume, .. } = Writer::of(writers, entry.number);
            let name = Name::own(Kind::Map, entry.number).to_string();
            let Some(bytes) = self.there(client, &name, &ofs, got, found)? else {
                continue;
            };
            found.objects += 1;
            if let Err(error) = parse_usage(volume, entry.number, &bytes) {
                for of in ofs {
                    found.problem(damaged(&client.place(), &name, of, &error));
                }
            }
            if !self.pass(bytes.len() as u64) {
                found.is_cut_short = true;
            }
        }
        Ok(())
    }

    /// What was got of an object, if anything; what is wrong with it is named for each of those that it is `of`.
    fn there(
        &mut self,
        client: &crate::stores::Client,
        name: &str,
        of: &[&str],
        got: Result<Bytes, StoreError>,
        found: &mut Verified,
    ) -> Result<Option<Bytes>, BackendError> {
        match self.answered(client, name, got)? {
            Ok(bytes) => {
                found.bytes += bytes.len() as u64;
                Ok(Some(bytes))
            }
            Err(wrong) => {
                for of in of {
                    found.problem(wrong.of(of));
                }
                Ok(None)
            }
        }
    }
}

/// Take what an object of the map says of those whose it is.
fn take_map(
    group: &mut [Member],
    whose: &[usize],
    entry: MapEntry,
    writer: &Writer,
    bytes: &[u8],
    pages: &Range<u64>,
    take: &mut Take<'_>,
) -> Result<(), FormatError> {
    let Some(page_blocks) = whose.first().map(|&index| group[index].page_blocks) else {
        return Ok(());
    };
    let length = FormatError::Field("length");
    let index = bytes.get(entry.index_offset() as usize..).ok_or(length)?;
    let pages_max = BLOCKS_MAX / page_blocks;
    for page in parse_index(&writer.volume, entry.number, entry.bytes, pages_max, index)? {
        let runs = match page.bytes as usize {
            0 => Vec::new(),
            size => {
                let from = page.offset as usize;
                let end = from + size.next_multiple_of(PAGE_ALIGN);
                let bytes = bytes.get(from..end).ok_or(length)?;
                let (bytes, padding) = bytes.split_at(size);
                if padding.iter().any(|&byte| byte != 0) {
                    return Err(FormatError::Field("padding"));
                }
                parse_page(&writer.volume, entry.number, page.page, page_blocks, bytes)?
            }
        };
        if !pages.contains(&page.page) {
            continue;
        }
        let first = page.page * page_blocks;
        let mut is_taken = false;
        for &index in whose {
            let member = &mut group[index];
            if !member.is_first(page.page) {
                continue;
            }
            let over = &member.over;
            if over.range(first, first + page_blocks).next().is_some() {
                take_rest(first, &runs, Some(over), take);
            } else if !is_taken {
                is_taken = true;
                take_rest(first, &runs, None, take);
            }
        }
    }
    Ok(())
}
