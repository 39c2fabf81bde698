//! A bucket read alone, as after the loss of everything else: which objects a manifest needs, and
//! what the volume holds. It shares the parsers with the machine, and nothing else.

use std::collections::{BTreeMap, BTreeSet};

use hdcs_core::base::error::FormatError;
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::objects::format::{
    Manifest, Reference, SLOT_BYTES, SLOT_NONE, Snapshot, parse_index, parse_page, parse_table,
    parse_usage, slot_checksum,
};
use hdcs_core::objects::frames::Frames;
use hdcs_core::objects::io::{Kind, Name};
use hdcs_core::objects::map::{Place, Run};

use super::compressed::SimCodec;
use super::store::Store;
use super::world::{CLONE_PLACE, CLONE_UUID, UUID};
use crate::content::Content;

/// Blocks of any volume here.
const BLOCKS_MAX: u64 = 1 << 32;

/// A state of a volume, as its manifest describes it.
#[derive(Clone, Debug)]
pub struct State {
    /// The manifest.
    pub manifest: Manifest,
    /// Where each block is.
    pub places: BTreeMap<u64, Place>,
    /// Every object that is needed: whole names.
    pub needs: BTreeSet<String>,
}

/// The whole name of an object.
pub fn whole_name(manifest: &Manifest, place: &str, kind: Kind, number: u64) -> String {
    let owner = manifest.ancestors.iter().find(|a| number < a.below);
    let place = owner.map_or(place, |ancestor| ancestor.location.as_str());
    format!("{place}{}", Name::own(kind, number))
}

/// The newest manifest of the volume at `place`.
pub fn newest(store: &Store, place: &str) -> Result<Option<Manifest>, String> {
    let prefix = format!("{place}manifest/");
    let Some((name, bytes)) = store.below(&prefix).last() else {
        return Ok(None);
    };
    let manifest = Manifest::parse(bytes).map_err(|error| format!("{name}: {error}"))?;
    Ok(Some(manifest))
}

/// The manifest that a snapshot keeps.
pub fn kept(store: &Store, place: &str, snapshot: &Snapshot) -> Result<Manifest, String> {
    let name = format!("{place}{}", Name::own(Kind::Snapshot, snapshot.number));
    let bytes = store.get(&name).ok_or(format!("{name} is missing"))?;
    Manifest::parse(bytes).map_err(|error| format!("{name}: {error}"))
}

/// Everything that a manifest describes; an error if something of it is not there or damaged.
pub fn read(store: &Store, place: &str, manifest: Manifest) -> Result<State, String> {
    let mut pages: BTreeMap<u64, Vec<Run>> = BTreeMap::new();
    let mut needs = BTreeSet::new();
    let writer = |number: u64| {
        let owner = manifest.ancestors.iter().find(|a| number < a.below);
        owner.map_or(manifest.volume, |ancestor| ancestor.volume)
    };
    let mut get = |kind, number| {
        let name = whole_name(&manifest, place, kind, number);
        let bytes = store.get(&name).ok_or(format!("{name} is missing"))?;
        needs.insert(name.clone());
        Ok::<_, String>((name, bytes.clone()))
    };
    for map in &manifest.maps {
        let (name, bytes) = get(Kind::Map, map.number)?;
        if bytes.len() != map.bytes as usize {
            return Err(format!("{name} has another size"));
        }
        let writer = writer(map.number);
        let index = &bytes[map.index_offset() as usize..];
        let damaged = |error: FormatError| format!("{name}: {error}");
        let page_blocks = u64::from(manifest.page_blocks);
        let pages_max = BLOCKS_MAX / page_blocks;
        let index = parse_index(&writer, map.number, map.bytes, pages_max, index);
        for entry in index.map_err(damaged)? {
            // It is read alone.
            let from = entry.offset as usize;
            let page = &bytes[from..from + entry.bytes as usize];
            let runs = match entry.bytes {
                0 => Vec::new(),
                _ => parse_page(&writer, map.number, entry.page, page_blocks, page)
                    .map_err(damaged)?,
            };
            let mapped: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
            if entry.is_full != (mapped == page_blocks) {
                return Err(format!("{name}: page {} is said to be full", entry.page));
            }
            // Of two objects with the same page the later one counts.
            pages.insert(entry.page, runs);
        }
    }
    let mut places = BTreeMap::new();
    for (page, runs) in pages {
        for run in runs {
            for index in 0..u32::from(run.count) {
                let first = page * u64::from(manifest.page_blocks);
                let block = first + u64::from(run.first) + u64::from(index);
                places.insert(block, run.place().plus(index));
            }
        }
    }
    let mut live: BTreeMap<u64, u32> = BTreeMap::new();
    for place in places.values() {
        *live.entry(place.number()).or_default() += 1;
    }
    for usage in &manifest.usages {
        let (name, bytes) = get(Kind::Map, usage.number)?;
        let entries = parse_usage(&writer(usage.number), usage.number, &bytes);
        for entry in entries.map_err(|error| format!("{name}: {error}"))? {
            let is = live.remove(&entry.number).unwrap_or(0);
            if is != u32::from(entry.live) {
                return Err(format!("{name} tells another use than {is}: {entry:?}"));
            }
        }
    }
    if let Some(number) = live.keys().next() {
        return Err(format!("no table tells the use of {number}"));
    }
    for tail in &manifest.tail {
        let (name, bytes) = get(Kind::Data, tail.number)?;
        let table = bytes.get(tail.table_offset() as usize..).unwrap_or(&[]);
        let (_, runs) = parse_table(&writer(tail.number), tail.number, BLOCKS_MAX, table)
            .map_err(|error| format!("{name}: {error}"))?;
        for run in runs {
            let blocks = run.block.get()..run.block.get() + u64::from(run.count.get());
            if run.slot.get() == SLOT_NONE {
                places.retain(|block, _| !blocks.contains(block));
                continue;
            }
            let place = tail.origin().plus(run.slot.get());
            for (index, block) in blocks.enumerate() {
                places.insert(block, place.plus(index as u32));
            }
        }
    }
    let numbers: BTreeSet<u64> = places.values().map(|place| place.number()).collect();
    for number in numbers {
        get(Kind::Data, number)?;
    }
    Ok(State {
        manifest,
        places,
        needs,
    })
}

/// What every sector of the volume holds; an error if something is damaged.
pub fn contents(
    store: &Store,
    place: &str,
    state: &State,
    content_volume: u32,
) -> Result<Vec<Content>, String> {
    let sectors = state.manifest.bytes / SECTOR_BYTES as u64;
    let mut contents = vec![Content::Zero; sectors as usize];
    for (&block, &slot) in &state.places {
        let name = whole_name(&state.manifest, place, Kind::Data, slot.number());
        let bytes = store.get(&name).ok_or(format!("{name} is missing"))?;
        let owner = state.manifest.ancestors.iter();
        let owner = owner.clone().find(|a| slot.number() < a.below);
        let uuid = owner.map_or(state.manifest.volume, |ancestor| ancestor.volume);
        let bytes = slot_of(bytes, &uuid, slot).ok_or(format!("{name} is short or damaged"))?;
        let (data, sum) = bytes.split_at(BLOCK_BYTES);
        if slot_checksum(&uuid, slot.number(), block, data).to_le_bytes() != *sum {
            return Err(format!("block {block} in {name} is damaged"));
        }
        for (index, data) in data.chunks(SECTOR_BYTES).enumerate() {
            let sector = block * BLOCK_SECTORS + index as u64;
            if sector >= sectors {
                continue;
            }
            contents[sector as usize] = Content::decode(content_volume, sector, data)
                .ok_or(format!("sector {sector} in {name} was never written"))?;
        }
    }
    Ok(contents)
}

/// The slot at a place, of an object that is compressed or not.
fn slot_of(object: &[u8], uuid: &[u8; 16], place: Place) -> Option<Vec<u8>> {
    let bytes = if place.is_compressed() {
        let frames = Frames::parse(uuid, place.number(), object).ok()?;
        let part = frames.part(place.slot(), 1);
        let from = part.offset() as usize;
        let stored = object.get(from..from + part.bytes())?;
        let mut slot = vec![0; SLOT_BYTES];
        part.unpack(&SimCodec, stored, &mut slot);
        slot
    } else {
        let from = place.slot() as usize * SLOT_BYTES;
        object.get(from..from + SLOT_BYTES)?.to_vec()
    };
    Some(bytes)
}

/// UUID of the volume at a place.
pub fn uuid_at(place: &str) -> [u8; 16] {
    if place == CLONE_PLACE {
        CLONE_UUID
    } else {
        UUID
    }
}

/// Every object that the newest manifest of the volume, its snapshots, and the clones of it need.
pub fn needed(store: &Store, place: &str) -> Result<BTreeSet<String>, String> {
    let Some(manifest) = newest(store, place)?.filter(|manifest| !manifest.gone) else {
        return Ok(BTreeSet::new());
    };
    let snapshots = manifest.snapshots.clone();
    let mut needs = read(store, place, manifest)?.needs;
    for snapshot in snapshots {
        needs.extend(read(store, place, kept(store, place, &snapshot)?)?.needs);
        needs.insert(format!(
            "{place}{}",
            Name::own(Kind::Snapshot, snapshot.number)
        ));
    }
    Ok(needs)
}

/// The clones that a volume knows of.
pub fn clones(store: &Store, place: &str, volume: &[u8; 16]) -> Vec<Reference> {
    let prefix = format!("{place}clone/");
    store
        .below(&prefix)
        .filter_map(|(_, bytes)| Reference::parse(volume, bytes).ok())
        .collect()
}
