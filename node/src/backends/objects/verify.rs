//! Verifies a volume in a store from its objects alone: the newest manifest, its snapshots, their maps, and every
//! slot that one of them needs.
//!
//! A slot is checked as a read checks it, against the block that the map says it is. What an object holds
//! besides is garbage, and not looked at. The owner goes on meanwhile: what it removes is not missed if a manifest
//! that is newer does without it.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use hdcs_core::limits::{BLOCK_BYTES, OBJECT_MAP_CHUNK_BYTES, OBJECT_VOLUME_BYTES_MAX};
use hdcs_core::objects::format::{
    Manifest, SLOT_BYTES, SLOT_NONE, parse_map, parse_table, slot_checksum,
};
use hdcs_core::objects::io::{Kind, Name};
use hdcs_core::objects::map::{Map, PAGE_BLOCKS};
use tokio::task::JoinSet;

use super::compressed::Compressed;
use super::{ObjectsPlace, backend_error, newest_manifest, references};
use crate::backends::BackendError;
use crate::backends::verify::{Verified, Watch};
use crate::stores::{Client, LIST_MAX, StoreError, runtime};

/// Objects that are got at once: each has up to 16 MiB.
const GETS_IN_FLIGHT: usize = 4;
/// How often it is begun anew because the owner has removed what was being read.
const TRIES: usize = 5;
/// What blocks are counted below, whatever the size of the volume was when an object was written.
const BLOCKS_MAX: u64 = OBJECT_VOLUME_BYTES_MAX / BLOCK_BYTES as u64;

/// A run of blocks that somebody needs of an object: block, slot, count.
type Needed = (u64, u32, u32);

/// What the volume consists of.
#[derive(Default)]
struct Needs {
    /// Runs of each data object.
    data: BTreeMap<u64, Vec<Needed>>,
    /// Which of these are compressed.
    compressed: BTreeSet<u64>,
    /// Manifests, snapshots and maps that are good, and their size.
    objects: u64,
    bytes: u64,
    /// What is wrong with them.
    problems: Vec<String>,
}

/// Verify the volume at a place.
pub fn verify(place: &ObjectsPlace, watch: &mut dyn Watch) -> Result<Verified, BackendError> {
    let client = place.client()?;
    let verifier = Verifier { place, client };
    runtime().block_on(verifier.run(watch))
}

struct Verifier<'a> {
    place: &'a ObjectsPlace,
    client: Client,
}

impl Verifier<'_> {
    async fn run(&self, watch: &mut dyn Watch) -> Result<Verified, BackendError> {
        let mut verified = Verified::default();
        let Some(mut manifest) = self.manifest(&mut verified).await? else {
            return Ok(verified);
        };
        let mut needs = self.needs(&manifest).await?;
        for _ in 1..TRIES {
            // What is missing may have been removed by a commit since.
            if needs.problems.is_empty() {
                break;
            }
            let newest = self.manifest(&mut verified).await?;
            match newest.filter(|newest| newest.sequence != manifest.sequence) {
                Some(newest) => manifest = newest,
                None => break,
            }
            needs = self.needs(&manifest).await?;
        }
        for problem in std::mem::take(&mut needs.problems) {
            verified.problem(problem);
        }
        verified.objects = needs.objects;
        verified.bytes = needs.bytes;
        let bad = self.data(&manifest, needs, &mut verified, watch).await?;
        if !bad.is_empty() {
            self.tell_garbage(&manifest, bad, &mut verified).await?;
        }
        Ok(verified)
    }

    /// The newest manifest; `None` if it is damaged.
    async fn manifest(&self, verified: &mut Verified) -> Result<Option<Manifest>, BackendError> {
        match newest_manifest(&self.client).await {
            Ok(Some(manifest)) if manifest.gone => Err(BackendError::Refused(format!(
                "{}: the volume here was deleted",
                self.client.place()
            ))),
            Ok(Some(manifest)) => Ok(Some(manifest)),
            Ok(None) => Err(BackendError::Absent(self.client.place())),
            Err(BackendError::Refused(why)) => {
                verified.problem(format!("{why}: {RESTORE}"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The client of whoever wrote the objects with a number, and its volume.
    fn writer(&self, manifest: &Manifest, number: u64) -> Result<(Client, [u8; 16]), BackendError> {
        let ancestor = (manifest.ancestors.iter()).find(|ancestor| number < ancestor.below);
        let Some(ancestor) = ancestor else {
            return Ok((self.client.clone(), manifest.volume));
        };
        let reach = self.place.reach.elsewhere(&ancestor.location);
        let reach = reach.ok_or_else(|| {
            BackendError::Refused(format!(
                "{}: the place of its parent, {}, is not understood",
                self.client.place(),
                ancestor.location
            ))
        })?;
        Ok((self.client.beside(reach.reach(None)?), ancestor.volume))
    }

    /// Read manifest, snapshots and maps.
    async fn needs(&self, manifest: &Manifest) -> Result<Needs, BackendError> {
        let mut needs = Needs {
            objects: 1,
            bytes: manifest.encoded_bytes() as u64,
            ..Needs::default()
        };
        self.add(manifest, "", &mut needs).await?;
        for snapshot in &manifest.snapshots {
            let name = Name::own(Kind::Snapshot, snapshot.number).to_string();
            let of = format!(" of snapshot {}", snapshot.name.as_str());
            let got = self.client.get(&name, 0, snapshot.bytes as usize).await;
            let Some(bytes) = there(&self.client, &name, &of, got, &mut needs)? else {
                continue;
            };
            match Manifest::parse(&bytes) {
                Ok(copy) => self.add(&copy, &of, &mut needs).await?,
                Err(error) => {
                    let place = self.client.place();
                    needs.problems.push(damaged(&place, &name, &of, &error));
                }
            }
        }
        // The references of clones are read at an opening: a damaged one keeps objects for ever.
        match references(&self.client, manifest).await {
            Ok(found) => needs.objects += found.len() as u64,
            Err(BackendError::Refused(why)) => needs.problems.push(format!("{why}: {RESTORE}")),
            Err(error) => return Err(error),
        }
        for runs in needs.data.values_mut() {
            merge(runs);
        }
        Ok(needs)
    }

    /// Add what a manifest needs.
    async fn add(
        &self,
        manifest: &Manifest,
        of: &str,
        needs: &mut Needs,
    ) -> Result<(), BackendError> {
        let mut map = Map::default();
        for stored in &manifest.maps {
            let (client, volume) = self.writer(manifest, stored.number)?;
            let name = Name::own(Kind::Map, stored.number).to_string();
            let got = client.get(&name, 0, stored.bytes as usize).await;
            let Some(bytes) = there(&client, &name, of, got, needs)? else {
                continue;
            };
            for (index, chunk) in bytes.chunks(OBJECT_MAP_CHUNK_BYTES).enumerate() {
                let load = |page, runs| map.load(page, runs, stored.number);
                let parsed = parse_map(
                    &volume,
                    stored.number,
                    index as u32,
                    BLOCKS_MAX,
                    chunk,
                    load,
                );
                if let Err(error) = parsed {
                    let place = client.place();
                    needs.problems.push(damaged(&place, &name, of, &error));
                }
            }
        }
        for tail in &manifest.tail {
            let (client, volume) = self.writer(manifest, tail.number)?;
            let name = Name::own(Kind::Data, tail.number).to_string();
            let bytes = (tail.bytes() - tail.table_offset()) as usize;
            let got = client.get(&name, tail.table_offset(), bytes).await;
            let Some(bytes) = there(&client, &name, of, got, needs)? else {
                continue;
            };
            match parse_table(&volume, tail.number, BLOCKS_MAX, &bytes) {
                Ok((_, runs)) => {
                    for run in runs {
                        let (slot, count) = (run.slot.get(), u64::from(run.count.get()));
                        let place = (slot != SLOT_NONE).then(|| tail.origin().plus(slot));
                        map.set(run.block.get(), count, place, |_, _| {});
                    }
                }
                Err(error) => {
                    let place = client.place();
                    needs.problems.push(damaged(&place, &name, of, &error));
                }
            }
            // It is named, whether a block of it is still needed or not.
            needs.data.entry(tail.number).or_default();
        }
        for (page, found) in map.pages(0) {
            for run in found.runs() {
                let (place, block) = (run.place(), page * u64::from(PAGE_BLOCKS));
                let block = block + u64::from(run.first);
                if place.is_compressed() {
                    needs.compressed.insert(place.number());
                }
                let runs = needs.data.entry(place.number()).or_default();
                runs.push((block, place.slot(), u32::from(run.count)));
            }
        }
        Ok(())
    }

    /// Sizes of all data objects below a place, by number.
    async fn sizes(client: &Client) -> Result<BTreeMap<u64, u64>, BackendError> {
        let mut sizes = BTreeMap::new();
        let mut after = String::new();
        loop {
            let page = client.list(Kind::Data.prefix(), &after, LIST_MAX).await;
            let page = page.map_err(|error| backend_error(&error))?;
            for object in &page.objects {
                if let Some(name) = Name::parse(&object.name) {
                    sizes.insert(name.number, object.bytes);
                }
            }
            match page.objects.last() {
                Some(last) if page.more => after.clone_from(&last.name),
                _ => return Ok(sizes),
            }
        }
    }

    /// Get and verify the data objects; those that are bad, and what is wrong with each.
    async fn data(
        &self,
        manifest: &Manifest,
        needs: Needs,
        verified: &mut Verified,
        watch: &mut dyn Watch,
    ) -> Result<BTreeMap<u64, Vec<String>>, BackendError> {
        let mut bad: BTreeMap<u64, Vec<String>> = BTreeMap::new();
        let mut sizes: BTreeMap<String, BTreeMap<u64, u64>> = BTreeMap::new();
        let mut work = Vec::new();
        let compressed = needs.compressed;
        for (number, runs) in needs.data {
            let (client, volume) = self.writer(manifest, number)?;
            let place = client.place();
            if !sizes.contains_key(&place) {
                sizes.insert(place.clone(), Self::sizes(&client).await?);
            }
            if let Some(&bytes) = sizes[&place].get(&number) {
                work.push((number, bytes, client, volume, runs));
            } else {
                let name = Name::own(Kind::Data, number).to_string();
                let problems = bad.entry(number).or_default();
                problems.push(missing(&place, &name, ""));
            }
        }
        watch.total(work.iter().map(|(_, bytes, ..)| bytes).sum());
        let mut work = work.into_iter();
        let mut under_way = JoinSet::new();
        loop {
            while under_way.len() < GETS_IN_FLIGHT.min(watch.at_once())
                && let Some((number, bytes, client, volume, runs)) = work.next()
            {
                let get = async move {
                    let name = Name::own(Kind::Data, number).to_string();
                    let got = client.get(&name, 0, bytes as usize).await;
                    (number, client.place(), volume, runs, got)
                };
                under_way.spawn_on(get, runtime());
            }
            let Some(ended) = under_way.join_next().await else {
                break;
            };
            // Nothing ends it, and what it does cannot panic.
            let Ok((number, place, volume, runs, got)) = ended else {
                continue;
            };
            let name = Name::own(Kind::Data, number).to_string();
            let passed = match got {
                Ok(bytes) => {
                    let plain = if compressed.contains(&number) {
                        let compressed = Compressed {
                            name: Name::own(Kind::Data, number),
                            writer: volume,
                            key: self.place.key.clone(),
                        };
                        compressed.slots(&bytes)
                    } else {
                        Ok(self.decrypted(volume, number, &bytes))
                    };
                    let (blocks, wrong) = match plain {
                        Ok(plain) => check_object(&volume, number, &runs, &plain),
                        Err(error) => (0, vec![format!("where its frames are is lost: {error}")]),
                    };
                    verified.blocks += blocks;
                    verified.bytes += bytes.len() as u64;
                    let wrong = wrong.iter().map(|why| damaged(&place, &name, "", why));
                    let wrong: Vec<_> = wrong.collect();
                    if wrong.is_empty() {
                        verified.objects += 1;
                    } else {
                        bad.entry(number).or_default().extend(wrong);
                    }
                    bytes.len() as u64
                }
                Err(StoreError::NotFound | StoreError::Short) => {
                    bad.entry(number)
                        .or_default()
                        .push(missing(&place, &name, ""));
                    0
                }
                Err(error) => return Err(backend_error(&error)),
            };
            if !watch.passed(passed) {
                verified.is_cut_short = true;
                break;
            }
        }
        Ok(bad)
    }

    /// An object with its slots as they were before they were encrypted. Where its table does not say which
    /// these are, everything is taken for slots.
    fn decrypted(&self, writer: [u8; 16], number: u64, object: &Bytes) -> Bytes {
        let Some(key) = &self.place.key else {
            return object.clone();
        };
        let mut plain = object.to_vec();
        let whole = plain.len() / SLOT_BYTES * SLOT_BYTES;
        key.decrypt(writer, number, 0, &mut plain[..whole]);
        plain.into()
    }

    /// Name what is bad, unless the owner has come to do without it meanwhile.
    async fn tell_garbage(
        &self,
        manifest: &Manifest,
        bad: BTreeMap<u64, Vec<String>>,
        verified: &mut Verified,
    ) -> Result<(), BackendError> {
        let newest = self.manifest(verified).await?;
        let still = match newest.filter(|newest| newest.sequence != manifest.sequence) {
            Some(newest) => Some(self.needs(&newest).await?),
            None => None,
        };
        for (number, problems) in bad {
            if (still.as_ref()).is_none_or(|needs| needs.data.contains_key(&number)) {
                for problem in problems {
                    verified.problem(problem);
                }
            }
        }
        Ok(())
    }
}

/// What was got of an object, if it is there.
fn there(
    client: &Client,
    name: &str,
    of: &str,
    got: Result<Bytes, StoreError>,
    needs: &mut Needs,
) -> Result<Option<Bytes>, BackendError> {
    match got {
        Ok(bytes) => {
            needs.objects += 1;
            needs.bytes += bytes.len() as u64;
            Ok(Some(bytes))
        }
        Err(StoreError::NotFound) => {
            let place = client.place();
            needs.problems.push(missing(&place, name, of));
            Ok(None)
        }
        Err(StoreError::Short) => {
            let place = client.place();
            needs
                .problems
                .push(damaged(&place, name, of, &"it is too short"));
            Ok(None)
        }
        Err(error) => Err(backend_error(&error)),
    }
}

/// What to do about an object.
const RESTORE: &str = "restore the object (a versioned bucket has it), or the volume from a backup";

fn missing(place: &str, name: &str, of: &str) -> String {
    format!("{place}: object {name}{of} is missing: {RESTORE}")
}

fn damaged(place: &str, name: &str, of: &str, why: &dyn std::fmt::Display) -> String {
    format!("{place}: object {name}{of} is damaged: {why}: {RESTORE}")
}

/// Put together what several manifests need of an object, so that nothing is verified twice.
fn merge(runs: &mut Vec<Needed>) {
    runs.sort_unstable();
    let mut merged: Vec<Needed> = Vec::with_capacity(runs.len());
    for &(block, slot, count) in &*runs {
        let (end, delta) = (
            block + u64::from(count),
            block.wrapping_sub(u64::from(slot)),
        );
        match merged.last_mut() {
            Some(last)
                if block <= last.0 + u64::from(last.2)
                    && last.0.wrapping_sub(u64::from(last.1)) == delta =>
            {
                last.2 = last.2.max((end - last.0) as u32);
            }
            _ => merged.push((block, slot, count)),
        }
    }
    *runs = merged;
}

/// Verify what is needed of an object: how many blocks are good, and what is wrong.
fn check_object(
    volume: &[u8; 16],
    number: u64,
    runs: &[Needed],
    object: &Bytes,
) -> (u64, Vec<String>) {
    let mut good = 0;
    let mut bad: Vec<std::ops::Range<u64>> = Vec::new();
    for &(block, slot, count) in runs {
        for index in 0..count {
            let (block, slot) = (block + u64::from(index), (slot + index) as usize);
            let bytes = object.get(slot * SLOT_BYTES..(slot + 1) * SLOT_BYTES);
            let is_good = bytes.is_some_and(|bytes| {
                let (data, sum) = bytes.split_at(BLOCK_BYTES);
                slot_checksum(volume, number, block, data).to_le_bytes() == *sum
            });
            match bad.last_mut() {
                _ if is_good => good += 1,
                Some(last) if last.end == block => last.end += 1,
                _ => bad.push(block..block + 1),
            }
        }
    }
    let bytes = BLOCK_BYTES as u64;
    let wrong = bad.iter().map(|range| {
        let (from, to) = (range.start * bytes, range.end * bytes);
        format!("bytes {from} to {to} of the volume do not have their checksum")
    });
    (good, wrong.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_verifies_nothing_twice_and_forgets_nothing() {
        let mut runs = vec![
            (8, 8, 56),
            (0, 0, 64),
            (10, 10, 2),
            (70, 70, 1),
            (70, 90, 1),
            (64, 64, 2),
        ];
        merge(&mut runs);
        assert_eq!(runs, [(0, 0, 66), (70, 70, 1), (70, 90, 1)]);
    }
}
