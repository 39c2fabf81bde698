//! Verifies a volume in a store from its objects alone: the newest manifest, its snapshots, their maps, and every
//! slot that one of them needs.
//!
//! A slot is checked as a read checks it, against the block that the map says it is. What an object holds
//! besides is garbage, and not looked at, and neither are objects that nothing needs. The owner goes on
//! meanwhile: what it removes is not missed if a manifest that is newer does without it, and what it writes is
//! not waited for.
//!
//! Invariants:
//! 1. Memory is bounded, whatever the size of the volume ([`Bounds`]): what does not fit is left to further
//!    passes, over objects with higher numbers. Every pass reads each map once, and each data object is read in
//!    one pass.
//! 2. Every byte that is read of a map or data object is paid for at the rate of who watches.
//! 3. A pass begins with the newest manifest; objects that are newer than the first one of all passes are of no pass.
//!
//! An object that cannot be read is a problem, and the others are verified. If several in a row cannot be read,
//! the store is away, and that ends it: what was found by then is told.

mod gets;
mod needs;
mod sizes;
mod walk;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use hdcs_core::base::limits::{BLOCK_BYTES, OBJECT_VOLUME_BYTES_MAX};
use hdcs_core::objects::format::{Manifest, Reference, SLOT_BYTES, slot_checksum};
use hdcs_core::objects::io::{Kind, Name};

use self::gets::Gets;
use self::needs::{Needs, unpacked};
use self::sizes::{Sizes, Writer};
use super::compressed::Compressed;
use super::contents::{each_reference, newest_manifest_bytes};
use super::{ObjectsPlace, backend_error, key};
use crate::BackendError;
use crate::stores::{Client, StoreError, runtime};
use crate::verify::{PROBLEMS_MAX, Verified, Watch};

/// Objects that are got at once: data objects have up to 16 MiB, maps up to 4 MiB.
const GETS_IN_FLIGHT: usize = 4;
/// How often it is begun anew because the owner has removed what was being read.
const TRIES: usize = 5;
/// Objects in a row that cannot be read, at which the store is taken to be away.
const FAILURES_MAX: usize = 4;
/// What blocks are counted below, whatever the size of the volume was when an object was written.
const BLOCKS_MAX: u64 = OBJECT_VOLUME_BYTES_MAX / BLOCK_BYTES as u64;

/// What is held of a volume, whatever its size. With maps that are read ahead that is 64 MiB; beside, while data is
/// verified and maps are not, there are the objects that are got at once and one of them decrypted and decompressed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Runs of blocks that are needed, 16 bytes each.
    pub runs: usize,
    /// Lists of objects of manifests.
    pub list_bytes: usize,
    /// What is newer than the maps.
    pub over_bytes: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            runs: 2 << 20,
            list_bytes: 8 << 20,
            over_bytes: 8 << 20,
        }
    }
}

impl Bounds {
    /// Where memory is short: more passes.
    pub fn least() -> Self {
        Self {
            runs: 256 << 10,
            list_bytes: 2 << 20,
            over_bytes: 2 << 20,
        }
    }
}

/// Verify the volume at a place.
pub(super) fn verify(
    place: &ObjectsPlace,
    bounds: Bounds,
    watch: &mut dyn Watch,
) -> Result<Verified, BackendError> {
    let mut check = Check {
        place,
        client: place.client()?,
        bounds,
        watch,
        verified: Verified::default(),
        bad: Vec::new(),
        failures: 0,
        passed: 0,
        is_locked: false,
    };
    let ended = runtime().block_on(check.run());
    let mut verified = check.verified;
    if let Err(error) = ended {
        // Of what is missing nobody can tell now whether the owner does without it.
        let certain = check.bad.into_iter().filter(|bad| bad.is_certain);
        certain.for_each(|bad| bad.tell(&mut verified));
        if verified.problems.is_empty() {
            return Err(error);
        }
        verified.ended_by = Some(error.to_string());
    }
    Ok(verified)
}

/// What is wrong with a data object.
struct Bad {
    number: u64,
    /// Whether it is there and damaged.
    is_certain: bool,
    problems: Vec<String>,
    more: u64,
}

impl Bad {
    /// There is nothing of it.
    fn whole(number: u64, wrong: &Wrong) -> Self {
        Self {
            number,
            is_certain: false,
            problems: vec![wrong.of("")],
            more: 0,
        }
    }

    fn add(&mut self, problem: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem);
        } else {
            self.more += 1;
        }
    }

    fn tell(self, verified: &mut Verified) {
        verified.more_problems += self.more;
        for problem in self.problems {
            verified.problem(problem);
        }
    }
}

/// What is wrong with an object as a whole.
struct Wrong {
    place: String,
    name: String,
    why: Why,
}

enum Why {
    Missing,
    Short,
    Unread(StoreError),
}

impl Wrong {
    /// In words, with what stands behind the name.
    fn of(&self, of: &str) -> String {
        let Self { place, name, why } = self;
        match why {
            Why::Missing => format!("{place}: object {name}{of} is missing: {RESTORE}"),
            Why::Short => damaged(place, name, of, &"it is too short"),
            Why::Unread(error) => {
                format!("{place}: object {name}{of} cannot be read, so it is not verified: {error}")
            }
        }
    }
}

struct Check<'a> {
    place: &'a ObjectsPlace,
    client: Client,
    bounds: Bounds,
    watch: &'a mut dyn Watch,
    verified: Verified,
    /// Data objects that are bad, if a newer manifest does not do without them.
    bad: Vec<Bad>,
    /// Objects in a row that could not be read.
    failures: usize,
    /// Bytes that those who watch know of.
    passed: u64,
    /// Whether the data is encrypted and the key is not here.
    is_locked: bool,
}

impl Check<'_> {
    async fn run(&mut self) -> Result<(), BackendError> {
        let Some(mut manifest) = self.manifest().await? else {
            return Ok(());
        };
        if self.place.key.is_none()
            && let Some(key) = key::get(&self.client).await?
        {
            self.is_locked = true;
            self.verified.note = Some(format!(
                "its data is encrypted, and the key {} is not here: it is verified that every object that is \
                 needed is there, and not what is in those with data (check it by its volume's name or data \
                 directory, where the key is known)",
                key.wrapped_with()
            ));
        }
        self.references(&manifest).await?;
        let end = manifest.number_limit;
        // Bytes of the data objects of the passes so far that are listed, and of those of further passes.
        let (mut listed_by_now, mut listed_later) = (0, 0);
        let mut from = 0;
        loop {
            let writers = self.writers(&manifest)?;
            let Some(needs) = self.needs(&mut manifest, &writers, from..end).await? else {
                return Ok(());
            };
            let range = needs.range();
            if self.is_locked {
                self.presence(&manifest, &writers, &needs).await?;
            } else {
                let (needed, listed) = measure(&writers, range.clone(), Some(&needs)).await?;
                if range.end < end && range.start == 0 {
                    listed_later = measure(&writers, range.end..end, None).await?.1;
                } else {
                    listed_later = listed_later.saturating_sub(listed);
                }
                listed_by_now += listed;
                let by_then = self.passed + needed;
                // Of what a further pass lists, it will read such a share.
                let later = by_then as f64 * listed_later as f64 / listed_by_now.max(1) as f64;
                self.watch.total(by_then + later as u64);
                self.data(&manifest, &writers, &needs).await?;
            }
            self.confirm(&manifest).await?;
            if self.verified.is_cut_short || range.end >= end {
                return Ok(());
            }
            from = range.end;
            match self.manifest().await? {
                Some(newest) => manifest = newest,
                None => return Ok(()),
            }
        }
    }

    /// The newest manifest; `None` if it is damaged.
    async fn manifest(&mut self) -> Result<Option<Manifest>, BackendError> {
        let place = self.client.place();
        let newest = newest_manifest_bytes(&self.client).await?;
        let (name, bytes) = newest.ok_or_else(|| BackendError::Absent(place.clone()))?;
        self.verified.bytes += bytes.len() as u64;
        match Manifest::parse(&bytes) {
            Ok(manifest) if manifest.gone => Err(BackendError::Refused(format!(
                "{place}: the volume here was deleted"
            ))),
            Ok(manifest) => Ok(Some(manifest)),
            Err(error) => {
                self.verified.problem(damaged(&place, &name, "", &error));
                Ok(None)
            }
        }
    }

    /// The references of clones are read at an opening: a damaged one keeps objects for ever.
    async fn references(&mut self, manifest: &Manifest) -> Result<(), BackendError> {
        let client = self.client.clone();
        let looked_at = each_reference(&client, |name, got| {
            match self.answered(&client, name, got)? {
                Ok(bytes) => match Reference::parse(&manifest.volume, &bytes) {
                    Ok(_) => self.verified.objects += 1,
                    Err(error) => {
                        let wrong = damaged(&client.place(), name, "", &error);
                        self.verified.problem(wrong);
                    }
                },
                Err(wrong) => self.verified.problem(wrong.of("")),
            }
            Ok(())
        });
        looked_at.await
    }

    /// Who has written the objects of a volume.
    fn writers(&self, manifest: &Manifest) -> Result<Vec<Writer>, BackendError> {
        let mut writers = Vec::with_capacity(manifest.ancestors.len() + 1);
        let mut from = 0;
        for ancestor in &manifest.ancestors {
            let reach = self.place.reach.elsewhere(&ancestor.location);
            let reach = reach.ok_or_else(|| {
                BackendError::Refused(format!(
                    "{}: the place of its parent, {}, is not understood",
                    self.client.place(),
                    ancestor.location
                ))
            })?;
            writers.push(Writer {
                client: self.client.beside(reach.reach(None)?),
                volume: ancestor.volume,
                numbers: from..ancestor.below,
            });
            from = ancestor.below;
        }
        writers.push(Writer {
            client: self.client.clone(),
            volume: manifest.volume,
            numbers: from..u64::MAX,
        });
        Ok(writers)
    }

    /// How many objects are got at once.
    fn at_once(&self) -> usize {
        GETS_IN_FLIGHT.min(self.watch.at_once()).max(1)
    }

    /// So much more was read; whether to go on.
    fn pass(&mut self, bytes: u64) -> bool {
        self.passed += bytes;
        self.watch.passed(bytes)
    }

    /// What was got of an object, or what is wrong with it. An error if the store is away.
    fn answered(
        &mut self,
        client: &Client,
        name: &str,
        got: Result<Bytes, StoreError>,
    ) -> Result<Result<Bytes, Wrong>, BackendError> {
        let why = match got {
            Ok(bytes) => {
                self.failures = 0;
                return Ok(Ok(bytes));
            }
            Err(StoreError::NotFound) => Why::Missing,
            Err(StoreError::Short) => Why::Short,
            Err(error) => {
                self.failures += 1;
                if self.failures == FAILURES_MAX {
                    return Err(backend_error(&error));
                }
                Why::Unread(error)
            }
        };
        if !matches!(why, Why::Unread(_)) {
            self.failures = 0;
        }
        Ok(Err(Wrong {
            place: client.place(),
            name: name.to_owned(),
            why,
        }))
    }

    /// What is needed of the data objects with numbers in a range, or of the first of them. A newer manifest is
    /// taken if its owner has removed what was being read. None: it was ended.
    async fn needs(
        &mut self,
        manifest: &mut Manifest,
        writers: &[Writer],
        range: Range<u64>,
    ) -> Result<Option<Needs>, BackendError> {
        let mut tries = 0;
        loop {
            let mut needs = Needs::new(range.clone(), self.bounds.runs);
            let mut take = |run| needs.add(run);
            let found = self.walk(manifest, writers, &mut take).await?;
            tries += 1;
            self.verified.bytes += found.bytes;
            if found.is_cut_short {
                self.verified.is_cut_short = true;
                return Ok(None);
            }
            // What is missing may have been removed by a commit since.
            if !found.problems.is_empty() && tries < TRIES {
                let newest = self.manifest().await?;
                if let Some(newest) = newest.filter(|newest| newest.sequence != manifest.sequence) {
                    *manifest = newest;
                    continue;
                }
            }
            // Further passes read the same once more.
            if range.start == 0 {
                self.verified.objects += found.objects;
            }
            self.verified.add_new_problems(found);
            needs.merge();
            return Ok(Some(needs));
        }
    }

    /// See that the data objects of a pass are there, and have what is needed of them.
    async fn presence(
        &mut self,
        manifest: &Manifest,
        writers: &[Writer],
        needs: &Needs,
    ) -> Result<(), BackendError> {
        let mut sizes = Sizes::new(writers, needs.range());
        for (number, runs) in needs.objects() {
            let why = match sizes.of(number).await? {
                None => Why::Missing,
                Some(bytes) if bytes < bytes_min(runs) => Why::Short,
                Some(_) => continue,
            };
            let wrong = Wrong {
                place: Writer::of(writers, number).client.place(),
                name: Name::own(Kind::Data, number).to_string(),
                why,
            };
            self.blame(manifest, Bad::whole(number, &wrong)).await?;
        }
        Ok(())
    }

    /// Get and verify the data objects of a pass.
    async fn data(
        &mut self,
        manifest: &Manifest,
        writers: &[Writer],
        needs: &Needs,
    ) -> Result<(), BackendError> {
        let mut sizes = Sizes::new(writers, needs.range());
        let mut objects = needs.objects();
        let mut gets = Gets::default();
        loop {
            while gets.len() < self.at_once()
                && let Some((number, runs)) = objects.next()
            {
                let client = &Writer::of(writers, number).client;
                let name = Name::own(Kind::Data, number).to_string();
                if let Some(bytes) = sizes.of(number).await? {
                    gets.begin((number, runs), client, &name, 0, bytes as usize);
                } else {
                    let missing = Wrong {
                        place: client.place(),
                        name,
                        why: Why::Missing,
                    };
                    self.blame(manifest, Bad::whole(number, &missing)).await?;
                }
            }
            let Some(((number, runs), got)) = gets.next().await else {
                return Ok(());
            };
            let writer = Writer::of(writers, number);
            let name = Name::own(Kind::Data, number).to_string();
            match self.answered(&writer.client, &name, got)? {
                Ok(bytes) => {
                    let length = bytes.len() as u64;
                    self.verified.bytes += length;
                    let bad = self.verify_object(writer, number, runs, bytes);
                    match bad {
                        Some(bad) => self.blame(manifest, bad).await?,
                        None => self.verified.objects += 1,
                    }
                    if !self.pass(length) {
                        self.verified.is_cut_short = true;
                        return Ok(());
                    }
                }
                Err(mut wrong) => {
                    if matches!(wrong.why, Why::Short) {
                        // It was longer a moment ago.
                        wrong.why = Why::Missing;
                    }
                    self.blame(manifest, Bad::whole(number, &wrong)).await?;
                }
            }
        }
    }

    /// Verify what is needed of a data object.
    fn verify_object(
        &mut self,
        writer: &Writer,
        number: u64,
        runs: &[u128],
        object: Bytes,
    ) -> Option<Bad> {
        let (place, name) = (writer.client.place(), Name::own(Kind::Data, number));
        let mut bad = Bad {
            number,
            is_certain: true,
            problems: Vec::new(),
            more: 0,
        };
        let is_compressed = unpacked(runs).any(|run| run.place.is_compressed());
        let plain = if is_compressed {
            let compressed = Compressed {
                name,
                writer: writer.volume,
                key: self.place.key.clone(),
            };
            compressed.slots(&object)
        } else {
            Ok(self.decrypted(writer.volume, number, object))
        };
        let name = name.to_string();
        match plain {
            Ok(plain) => {
                let (good, wrong) = check_object(&writer.volume, number, runs, &plain);
                self.verified.blocks += good;
                for range in wrong {
                    let why = format!(
                        "bytes {} to {} of the volume do not have their checksum",
                        range.start, range.end
                    );
                    bad.add(damaged(&place, &name, "", &why));
                }
            }
            Err(error) => {
                let why = format!("where its frames are is lost: {error}");
                bad.add(damaged(&place, &name, "", &why));
            }
        }
        (!bad.problems.is_empty()).then_some(bad)
    }

    /// An object with its slots as they were before they were encrypted. Where its table does not say which
    /// these are, everything is taken for slots.
    fn decrypted(&self, writer: [u8; 16], number: u64, object: Bytes) -> Bytes {
        let Some(key) = &self.place.key else {
            return object;
        };
        let copied = |object: Bytes| BytesMut::from(&object[..]);
        let mut plain = object.try_into_mut().unwrap_or_else(copied);
        let whole = plain.len() / SLOT_BYTES * SLOT_BYTES;
        key.decrypt(writer, number, 0, &mut plain[..whole]);
        plain.freeze()
    }

    /// A data object is bad.
    async fn blame(&mut self, manifest: &Manifest, bad: Bad) -> Result<(), BackendError> {
        self.bad.push(bad);
        if self.bad.len() >= PROBLEMS_MAX {
            self.confirm(manifest).await?;
        }
        Ok(())
    }

    /// Name what is bad, unless the owner has come to do without it meanwhile.
    async fn confirm(&mut self, manifest: &Manifest) -> Result<(), BackendError> {
        if self.bad.is_empty() {
            return Ok(());
        }
        let mut still = None;
        // Beyond what is named nobody needs to know exactly, and who ends it is not kept waiting.
        if self.verified.problems.len() < PROBLEMS_MAX && !self.verified.is_cut_short {
            let newest = self.manifest().await?;
            if let Some(newest) = newest.filter(|newest| newest.sequence != manifest.sequence) {
                let asked: BTreeSet<u64> = self.bad.iter().map(|bad| bad.number).collect();
                let writers = self.writers(&newest)?;
                let mut needed = BTreeSet::new();
                let mut take = |run: needs::Run| {
                    let number = run.place.number();
                    if asked.contains(&number) {
                        needed.insert(number);
                    }
                };
                let found = self.walk(&newest, &writers, &mut take).await?;
                self.verified.bytes += found.bytes;
                self.verified.is_cut_short |= found.is_cut_short;
                still = Some(needed).filter(|_| !found.is_cut_short);
            }
        }
        for bad in std::mem::take(&mut self.bad) {
            if (still.as_ref()).is_none_or(|needed| needed.contains(&bad.number)) {
                bad.tell(&mut self.verified);
            }
        }
        Ok(())
    }
}

/// Bytes of the data objects with numbers in a range: of those that are needed, and of all.
async fn measure(
    writers: &[Writer],
    range: Range<u64>,
    needs: Option<&Needs>,
) -> Result<(u64, u64), BackendError> {
    let mut needed = needs.into_iter().flat_map(Needs::objects).peekable();
    let mut sizes = Sizes::new(writers, range);
    let (mut needed_bytes, mut listed_bytes) = (0, 0);
    while let Some((number, bytes)) = sizes.next().await? {
        listed_bytes += bytes;
        while needed.next_if(|(needed, _)| *needed < number).is_some() {}
        if needed.next_if(|(needed, _)| *needed == number).is_some() {
            needed_bytes += bytes;
        }
    }
    Ok((needed_bytes, listed_bytes))
}

/// What to do about an object.
const RESTORE: &str = "restore the object (a versioned bucket has it), or the volume from a backup";

fn damaged(place: &str, name: &str, of: &str, why: &dyn Display) -> String {
    format!("{place}: object {name}{of} is damaged: {why}: {RESTORE}")
}

/// Bytes that an object has at least, by what is needed of it. Where frames are only it knows itself.
fn bytes_min(runs: &[u128]) -> u64 {
    let slots = unpacked(runs)
        .filter(|run| !run.place.is_compressed())
        .map(|run| run.place.slot() + run.count);
    u64::from(slots.max().unwrap_or(0)) * SLOT_BYTES as u64
}

/// Verify what is needed of an object: how many blocks are good, and which bytes of the volume are not.
fn check_object(
    volume: &[u8; 16],
    number: u64,
    runs: &[u128],
    object: &[u8],
) -> (u64, Vec<Range<u64>>) {
    let mut good = 0;
    let mut bad: Vec<Range<u64>> = Vec::new();
    for run in unpacked(runs) {
        for index in 0..run.count {
            let block = run.block + u64::from(index);
            let slot = (run.place.slot() + index) as usize;
            let bytes = object.get(slot * SLOT_BYTES..(slot + 1) * SLOT_BYTES);
            let is_good = bytes.is_some_and(|bytes| {
                let (data, sum) = bytes.split_at(BLOCK_BYTES);
                slot_checksum(volume, number, block, data).to_le_bytes() == *sum
            });
            let at = block * BLOCK_BYTES as u64;
            match bad.last_mut() {
                _ if is_good => good += 1,
                Some(last) if last.end == at => last.end += BLOCK_BYTES as u64,
                _ => bad.push(at..at + BLOCK_BYTES as u64),
            }
        }
    }
    (good, bad)
}

#[cfg(test)]
mod tests;
