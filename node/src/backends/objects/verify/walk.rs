//! Reads what a manifest and its snapshots need: their maps, and the tables of the data objects that are newer
//! than these.
//!
//! Snapshots share most of their maps, so several manifests are looked at together, as many as fit into memory,
//! and what they share is read once for all of them. The maps are not kept: they are read from the newest to
//! the oldest, so the first one that has a page is the one that counts. What is newer than the maps lies over
//! them; where that does not fit into memory either, it is of a range of the volume, and all is read once more
//! for the next one.

use std::ops::Range;

use bytes::Bytes;
use hdcs_core::limits::OBJECT_MAP_CHUNK_BYTES;
use hdcs_core::objects::format::{
    Manifest, MapEntry, SLOT_NONE, TailEntry, parse_map, parse_table,
};
use hdcs_core::objects::io::{Kind, Name};
use hdcs_core::objects::map::{Map, PAGE_BLOCKS, Place, Run as MapRun};

use super::gets::Gets;
use super::needs::Run;
use super::sizes::Writer;
use super::{BLOCKS_MAX, Check, damaged};
use crate::backends::BackendError;
use crate::backends::verify::Verified;
use crate::stores::StoreError;

/// Where a block is that the newest state has nowhere. No object has this number.
const NOWHERE: Place = Place(0);

/// Who takes what is needed.
pub(super) type Take<'a> = dyn FnMut(Run) + 'a;

/// A manifest that is looked at, reduced to what is read.
struct Member {
    /// What its problems say behind the name of an object.
    of: String,
    maps: Vec<MapEntry>,
    tail: Vec<TailEntry>,
    /// What the tail says of its blocks.
    over: Map,
    /// Pages of which the newest copy was found, by bit.
    seen: Vec<u64>,
}

impl Member {
    fn new(manifest: &Manifest, of: String) -> Self {
        Self {
            of,
            maps: manifest.maps.clone(),
            tail: manifest.tail.clone(),
            over: Map::default(),
            seen: Vec::new(),
        }
    }

    /// Memory of its lists, and of its pages at worst.
    fn list_bytes(&self) -> usize {
        let seen = BLOCKS_MAX / u64::from(PAGE_BLOCKS) / 8;
        size_of_val(&*self.maps) + size_of_val(&*self.tail) + seen as usize
    }

    fn start_again(&mut self) {
        self.over = Map::default();
        self.seen.clear();
    }

    fn tail_entry(&self, number: u64) -> Option<&TailEntry> {
        let found = self
            .tail
            .binary_search_by_key(&number, |entry| entry.number);
        found.ok().map(|index| &self.tail[index])
    }

    fn map_entry(&self, number: u64) -> Option<&MapEntry> {
        let found = self
            .maps
            .binary_search_by_key(&number, |entry| entry.number);
        found.ok().map(|index| &self.maps[index])
    }

    /// A data object says where blocks are, or that they are nowhere: what of that is within `pages` lies over what
    /// others have said.
    fn lay(&mut self, block: u64, count: u64, place: Option<Place>, pages: &Range<u64>) {
        let page_blocks = u64::from(PAGE_BLOCKS);
        let end = (block + count).min(pages.end.saturating_mul(page_blocks));
        let mut at = block.max(pages.start * page_blocks);
        while at < end {
            let page = at / page_blocks;
            let to = end.min((page + 1) * page_blocks);
            let place = match place {
                Some(place) => Some(place.plus((at - block) as u32)),
                // Nothing is needed of the maps' page, and memory only for what is written there later.
                None if to - at == page_blocks => {
                    self.is_first(page);
                    None
                }
                None => Some(NOWHERE),
            };
            self.over.set(at, to - at, place, |_, _| {});
            at = to;
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

/// Take what runs of a page say of blocks of which nothing lies over it.
fn take_rest(page: u64, runs: &[MapRun], over: &[MapRun], take: &mut Take<'_>) {
    let first = page * u64::from(PAGE_BLOCKS);
    let mut over = over.iter().peekable();
    for run in runs {
        let mut at = u32::from(run.first);
        let mut piece = |from: u32, to: u32| {
            if from < to {
                let place = run.place().plus(from - u32::from(run.first));
                let (block, count) = (first + u64::from(from), to - from);
                take(Run {
                    place,
                    block,
                    count,
                });
            }
        };
        while let Some(cover) = over.next_if(|cover| cover.end() <= run.end()) {
            piece(at, u32::from(cover.first));
            at = at.max(cover.end());
        }
        // One that goes on beyond this run may cover the next one too.
        let begin = over.peek().map_or(u32::MAX, |cover| u32::from(cover.first));
        piece(at, begin.min(run.end()));
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
                for (page, content) in member.over.pages(0) {
                    let here = content.runs().iter();
                    for run in here.filter(|run| run.place().number() != NOWHERE.number()) {
                        take(Run {
                            place: run.place(),
                            block: page * u64::from(PAGE_BLOCKS) + u64::from(run.first),
                            count: run.count.into(),
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
        let mut next = 0;
        loop {
            while gets.len() < self.at_once() {
                let tails = group.iter().filter_map(|member| {
                    let index = member.tail.partition_point(|entry| entry.number < next);
                    member.tail.get(index)
                });
                let Some(&entry) = tails.min_by_key(|entry| entry.number) else {
                    break;
                };
                next = entry.number + 1;
                let client = &Writer::of(writers, entry.number).client;
                let name = Name::own(Kind::Data, entry.number).to_string();
                let bytes = (entry.bytes() - entry.table_offset()) as usize;
                gets.begin(entry, client, &name, entry.table_offset(), bytes);
            }
            let Some((entry, got)) = gets.next().await else {
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
            let ofs: Vec<&str> = (group.iter())
                .filter(|member| member.tail_entry(entry.number).is_some())
                .map(|member| &*member.of)
                .collect();
            let read = self.there(client, &name, &ofs, got, found)?;
            if let Some(bytes) = read {
                match parse_table(volume, entry.number, BLOCKS_MAX, &bytes) {
                    Ok((_, runs)) => {
                        let mut index = 0;
                        while let Some(member) = group.get_mut(index) {
                            index += 1;
                            if member.tail_entry(entry.number).is_none() {
                                continue;
                            }
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
                let count = only.over.pages(0).count();
                let from = only.over.pages(0).nth(count / 4 * 3).filter(|_| count >= 4);
                let Some((page, _)) = from else {
                    return;
                };
                only.over.truncate(page);
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
        let mut before = u64::MAX;
        while !found.is_cut_short {
            while gets.len() < self.at_once() {
                let maps = group.iter().filter_map(|member| {
                    let end = member.maps.partition_point(|entry| entry.number < before);
                    member.maps[..end].last()
                });
                let Some(&entry) = maps.max_by_key(|entry| entry.number) else {
                    break;
                };
                before = entry.number;
                let client = &Writer::of(writers, entry.number).client;
                let name = Name::own(Kind::Map, entry.number).to_string();
                gets.begin(entry.number, client, &name, 0, entry.bytes as usize);
            }
            let Some((number, got)) = gets.next().await else {
                return Ok(());
            };
            let mut theirs: Vec<&mut Member> = (group.iter_mut())
                .filter(|member| member.map_entry(number).is_some())
                .collect();
            let writer = Writer::of(writers, number);
            let name = Name::own(Kind::Map, number).to_string();
            let ofs: Vec<&str> = theirs.iter().map(|member| &*member.of).collect();
            let Some(bytes) = self.there(&writer.client, &name, &ofs, got, found)? else {
                continue;
            };
            found.objects += 1;
            for (index, chunk) in bytes.chunks(OBJECT_MAP_CHUNK_BYTES).enumerate() {
                let page = |page: u64, runs: Vec<MapRun>| {
                    if !pages.contains(&page) {
                        return;
                    }
                    let mut is_taken = false;
                    for member in &mut theirs {
                        if !member.is_first(page) {
                            continue;
                        }
                        match member.over.page(page) {
                            Some(over) => take_rest(page, &runs, over.runs(), take),
                            None if is_taken => {}
                            None => {
                                is_taken = true;
                                take_rest(page, &runs, &[], take);
                            }
                        }
                    }
                };
                let parsed = parse_map(
                    &writer.volume,
                    number,
                    index as u32,
                    BLOCKS_MAX,
                    chunk,
                    page,
                );
                if let Err(error) = parsed {
                    for member in &theirs {
                        let place = writer.client.place();
                        found.problem(damaged(&place, &name, &member.of, &error));
                    }
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
