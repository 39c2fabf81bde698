//! What is found is the same however little memory there is, and whatever else cannot be read.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hdcs_core::objects::io::SnapshotName;

use super::*;
use crate::conformance::Bench;
use crate::crypt::Encryption;
use crate::crypt::source::KeySource;
use crate::objects::tests::Alone;
use crate::stores::tests::Served;
use crate::stores::{Condition, Listing, Object, Pending, Store};
use crate::{Absent, Ask, SnapshotCommand, open};

/// Sixteen pages of the map.
const BYTES: u64 = 256 << 20;
const BLOCK: usize = 4096;
/// Next to nothing: a few objects a pass, one manifest and a few pages at once.
const TINY: Bounds = Bounds {
    runs: 48,
    list_bytes: 0,
    over_bytes: 600,
};

/// Counts the passes, and may end it.
struct Counting {
    passes: usize,
    totals: Vec<u64>,
    passed: u64,
    end_at: u64,
}

impl Watch for Counting {
    fn total(&mut self, bytes: u64) {
        self.passes += 1;
        self.totals.push(bytes);
    }
    fn passed(&mut self, bytes: u64) -> bool {
        self.passed += bytes;
        self.passed < self.end_at
    }
}

fn counting(end_at: u64) -> Counting {
    Counting {
        passes: 0,
        totals: Vec::new(),
        passed: 0,
        end_at,
    }
}

/// The files of a volume, read without asking the server. Some cannot be read as a whole.
#[derive(Clone, Debug)]
struct Files {
    directory: PathBuf,
    denied: Arc<Mutex<Vec<String>>>,
    /// Gets under way, and the most that there were at once.
    gets: Arc<[AtomicUsize; 2]>,
}

impl Store for Files {
    fn put<'a>(&'a self, name: &'a str, _: Bytes, _: Condition) -> Pending<'a, ()> {
        panic!("{name} is put")
    }
    fn get<'a>(&'a self, name: &'a str, offset: u64, bytes: usize) -> Pending<'a, Bytes> {
        let mut denied = self.denied.lock().unwrap();
        let is_denied = offset == 0 && denied.iter_mut().any(|denied| denied == name);
        Box::pin(async move {
            let [now, most] = &*self.gets;
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            now.fetch_sub(1, Ordering::SeqCst);
            if is_denied {
                return Err(StoreError::Failed(format!("{name}: the disk is bad")));
            }
            let Ok(content) = fs::read(self.directory.join(name)) else {
                return Err(StoreError::NotFound);
            };
            let range = offset as usize..offset as usize + bytes;
            let part = content.get(range).ok_or(StoreError::Short)?;
            Ok(Bytes::copy_from_slice(part))
        })
    }
    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        panic!("{name} is deleted")
    }
    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, _: usize) -> Pending<'a, Listing> {
        let mut objects = Vec::new();
        for entry in fs::read_dir(self.directory.join(prefix))
            .into_iter()
            .flatten()
        {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            let bytes = entry.metadata().unwrap().len();
            if *name > *after {
                objects.push(Object {
                    name,
                    bytes,
                    modified_ms: 0,
                });
            }
        }
        objects.sort_by(|a, b| a.name.cmp(&b.name));
        // Small pages, so that there are several.
        let more = objects.len() > 40;
        objects.truncate(40);
        Box::pin(async move { Ok(Listing { objects, more }) })
    }
    fn place(&self) -> String {
        "files".to_owned()
    }
}

struct Volume {
    served: Served,
    name: &'static str,
}

impl Volume {
    fn url(&self) -> String {
        let credentials = self.served.directory.path().join("credentials");
        format!(
            "s3://bucket/{}?endpoint={}&credentials={}&retry_s=2",
            self.name,
            self.served.endpoint,
            credentials.display()
        )
    }

    /// A volume of many small objects, with a map and a tail, and snapshots after some rounds of writes. How many
    /// blocks it has.
    fn fill(&self, seed: u64, rounds: usize, snapshots: &[usize]) -> u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let made = open(&self.url(), BYTES, Absent::Create).unwrap();
        let mut bench = Bench::over(made.build());
        let mut is_there = vec![false; BYTES as usize / BLOCK];
        for round in 0..rounds {
            // Later on some pages of the map change no more.
            let pages = if round < 90 { 16 } else { 5 };
            for _ in 0..3 {
                let (first, count) = (random.usize(..pages * 2048) * 2, random.usize(1..3));
                let content = vec![random.u8(1..); BLOCK * count];
                bench.write((first * BLOCK) as u64, &content).unwrap();
                is_there[first..first + count].fill(true);
            }
            // A page as a whole, and a part of the next one; in the end a part of one that the map has.
            let (offset, bytes) = if round == rounds - 1 {
                (9 << 24, 12 << 20)
            } else if round % 10 == 9 {
                (random.u64(..pages as u64) << 24, 28 << 20)
            } else {
                (0, 0)
            };
            let bytes = bytes.min(BYTES - offset);
            if bytes > 0 {
                let zero = Ask::Zero {
                    offset,
                    bytes,
                    unmap: true,
                };
                bench.ask(zero).unwrap();
                let first = offset as usize / BLOCK;
                let gone = &mut is_there[first..first + bytes as usize / BLOCK];
                assert!(round < rounds - 1 || gone.contains(&true));
                gone.fill(false);
            }
            bench.ask(Ask::Flush).unwrap();
            if snapshots.contains(&round) {
                let name = SnapshotName::new(&format!("s{round}")).unwrap();
                let keep = SnapshotCommand::Snapshot {
                    name,
                    made_ms: 1,
                    copy: false,
                };
                bench.ask(Ask::Snapshot(keep)).unwrap();
            }
        }
        is_there.iter().filter(|is_there| **is_there).count() as u64
    }

    fn files(&self) -> Files {
        let bucket = self.served.directory.path().join("bucket");
        Files {
            directory: bucket.join(self.name),
            denied: Arc::default(),
            gets: Arc::default(),
        }
    }

    fn place(&self) -> ObjectsPlace {
        ObjectsPlace::new(Arc::new(Alone(self.files())), Duration::from_secs(2))
    }

    fn objects(&self, kind: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.files().directory.join(kind));
        let entries = entries.into_iter().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    }

    fn verified(&self, bounds: Bounds) -> (Verified, Counting) {
        let mut watch = counting(u64::MAX);
        let verified = verify(&self.place(), bounds, &mut watch).unwrap();
        (verified, watch)
    }

    /// What is found, which has to be the same in one pass and in many.
    fn found(&self, of: &str) -> Verified {
        let (whole, watch) = self.verified(Bounds::default());
        assert_eq!(watch.passes, 1, "{of}");
        let (parts, watch) = self.verified(TINY);
        assert!(watch.passes > 2, "{of}: {} passes", watch.passes);
        let sorted = |problems: &[String]| {
            let mut problems = problems.to_vec();
            problems.sort();
            problems
        };
        if whole.more_problems == 0 {
            assert_eq!(sorted(&parts.problems), sorted(&whole.problems), "{of}");
        }
        assert_eq!(
            (parts.blocks, parts.more_problems > 0),
            (whole.blocks, whole.more_problems > 0)
        );
        whole
    }
}

#[test]
fn without_its_key_what_is_missing_or_cut_is_found_as_with_it() {
    let volume = Volume {
        served: Served::start(),
        name: "volume",
    };
    volume.fill(1, 110, &[60, 100]);
    let source = volume.served.directory.path().join("wrapping-key");
    fs::write(&source, [5; 32]).unwrap();
    let key = Encryption::new(KeySource::File(source)).unwrap().key;
    // What is read as encrypted need not be.
    let beside = volume.files().directory.join(key::NAME);
    fs::create_dir_all(beside.parent().unwrap()).unwrap();
    let mut told = 0;
    for path in volume.objects("data").iter().step_by(9) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let content = fs::read(path).unwrap();
        for word in ["is missing", "damaged"] {
            fs::remove_file(path).unwrap();
            if word == "damaged" {
                fs::write(path, &content[..1]).unwrap();
            }
            let (with, _) = volume.verified(Bounds::default());
            fs::write(&beside, key.to_object()).unwrap();
            let (without, _) = volume.verified(Bounds::default());
            fs::remove_file(&beside).unwrap();
            fs::write(path, &content).unwrap();
            let is_named = |found: &Verified| {
                let mut problems = found.problems.iter();
                problems.any(|problem| problem.contains(name) && problem.contains(word))
            };
            assert_eq!(is_named(&without), is_named(&with), "{name}: {without:?}");
            assert!(without.note.is_some() && without.blocks == 0);
            told += usize::from(is_named(&without));
        }
    }
    assert!(told > 4, "{told}");
}

#[test]
fn verify_in_many_passes_finds_what_it_finds_in_one() {
    let volume = Volume {
        served: Served::start(),
        name: "volume",
    };
    let blocks = volume.fill(1, 110, &[60, 100]);
    let other = Volume {
        served: Served::start(),
        name: "volume",
    };
    other.fill(2, 30, &[20]);
    assert!(!volume.objects("map").is_empty());
    let good = volume.found("good");
    assert_eq!((good.problems, good.more_problems), (vec![], 0));
    assert!(good.blocks > blocks, "{}", good.blocks);

    // What nothing needs is nobody's problem.
    let data = volume.objects("data");
    let superfluous =
        data[0].with_file_name(Name::own(Kind::Data, 3).to_string().replace("data/", ""));
    let superfluous = [
        superfluous,
        data[0].with_file_name("x"),
        data[0].with_file_name("+"),
    ];
    for path in superfluous.iter().filter(|path| !path.exists()) {
        fs::write(path, "of no use").unwrap();
    }
    let found = volume.found("superfluous");
    assert_eq!((found.problems, found.blocks), (vec![], good.blocks));

    let mut paths = data.clone();
    paths.extend(volume.objects("map"));
    paths.extend(volume.objects("snapshot"));
    let mut random = fastrand::Rng::with_seed(3);
    let mut told = 0;
    let per_kind = paths.len() / 7;
    for (index, path) in paths.iter().enumerate() {
        if index < data.len() && index % per_kind != 0 {
            continue;
        }
        let name = path.file_name().unwrap().to_str().unwrap();
        let kind = path
            .parent()
            .unwrap()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap();
        let content = fs::read(path).unwrap();
        fs::remove_file(path).unwrap();
        let missing = volume.found(&format!("{kind} missing"));
        let mut bad = content.clone();
        bad[random.usize(..content.len())] ^= 1;
        fs::write(path, &bad).unwrap();
        let damaged = volume.found(&format!("{kind} damaged"));
        // Another volume's object.
        let others = [other.objects(kind), other.objects("data")].concat();
        fs::copy(&others[0], path).unwrap();
        let foreign = volume.found(&format!("{kind} foreign"));
        fs::write(path, content).unwrap();
        if missing.problems.is_empty() {
            // Garbage that its owner has not removed yet.
            assert!(
                kind == "data" && foreign.problems.is_empty(),
                "{kind} {name}"
            );
            continue;
        }
        told += 1;
        let named = |found: &Verified, word: &str| {
            let mut problems = found.problems.iter();
            problems.any(|problem| problem.contains(name) && problem.contains(word))
        };
        assert!(named(&missing, "missing"), "{name}: {missing:?}");
        assert!(named(&foreign, "damaged"), "{name}: {foreign:?}");
        // In an object of which little is needed it may hit the rest.
        assert!(
            kind == "data" || named(&damaged, "damaged"),
            "{name}: {damaged:?}"
        );
    }
    assert!(told > 4, "{told}");
    let kept: Vec<_> = data.iter().map(|path| fs::read(path).unwrap()).collect();
    for path in &data {
        fs::remove_file(path).unwrap();
    }
    let found = volume.found("all missing");
    assert_eq!(
        (found.problems.len(), found.blocks),
        (PROBLEMS_MAX.min(found.problems.len()), 0)
    );
    assert!(found.problems.len() > 50);
    for (path, content) in data.iter().zip(kept) {
        fs::write(path, content).unwrap();
    }
    assert_eq!(volume.found("restored").problems, Vec::<String>::new());

    // The total of the first pass is about what all of them read.
    let (_, watch) = volume.verified(TINY);
    let (first, last) = (watch.totals[0], *watch.totals.last().unwrap());
    assert_eq!(last, watch.passed);
    assert!(
        first > last / 3 && first < last * 3,
        "{first}, in the end {last}"
    );
    // It can be ended in each pass, and within one.
    for end_at in [1, last / 3, last / 2, last - 1] {
        let verified = verify(&volume.place(), TINY, &mut counting(end_at)).unwrap();
        assert!(verified.is_cut_short && verified.problems.is_empty());
    }
}

#[test]
fn verify_reads_what_is_needed_and_nothing_that_was_written_over() {
    let volume = Volume {
        served: Served::start(),
        name: "volume",
    };
    let blocks = volume.fill(5, 250, &[]);
    assert!(volume.objects("map").len() > 1, "pages are stored twice");
    let found = volume.found("without snapshots");
    assert_eq!((found.problems, found.blocks), (vec![], blocks));
}

#[test]
fn verify_goes_on_past_what_cannot_be_read_until_the_store_is_away() {
    let volume = Volume {
        served: Served::start(),
        name: "volume",
    };
    volume.fill(4, 110, &[60, 100]);
    let whole = volume.verified(Bounds::default()).0;
    let files = volume.files();
    let (denied, gets) = (Arc::clone(&files.denied), Arc::clone(&files.gets));
    let place = ObjectsPlace::new(Arc::new(Alone(files)), Duration::from_secs(2));
    let verified = |bounds| verify(&place, bounds, &mut counting(u64::MAX));
    let names: Vec<String> = volume
        .objects("data")
        .iter()
        .map(|path| format!("data/{}", path.file_name().unwrap().to_str().unwrap()))
        .collect();
    let found = verified(Bounds::default()).unwrap();
    assert_eq!((&found, found.problems.len()), (&whole, 0));
    assert!(gets[1].load(Ordering::SeqCst) <= GETS_IN_FLIGHT);
    for bounds in [Bounds::default(), TINY] {
        // Far from each other.
        let bad: Vec<String> = names.iter().skip(5).step_by(20).cloned().collect();
        denied.lock().unwrap().clone_from(&bad);
        let found = verified(bounds).unwrap();
        assert!(
            !found.problems.is_empty() && found.ended_by.is_none(),
            "{found:?}"
        );
        assert!(found.blocks > whole.blocks / 2);
        let about = |problem: &String| {
            bad.iter().any(|name| problem.contains(name)) && problem.contains("cannot be read")
        };
        assert!(found.problems.iter().all(about), "{:?}", found.problems);
        // Several in a row: nothing is said to be damaged.
        denied.lock().unwrap().clone_from(&names);
        let why = verified(bounds).unwrap_err();
        assert!(why.to_string().contains("the disk is bad"), "{why}");
    }
    // What was damaged before that is told.
    let first = volume.objects("data").into_iter().find(|path| {
        let content = fs::read(path).unwrap();
        fs::write(path, vec![7; content.len()]).unwrap();
        denied.lock().unwrap().clear();
        let is_needed = !verified(Bounds::default()).unwrap().problems.is_empty();
        if !is_needed {
            fs::write(path, content).unwrap();
        }
        is_needed
    });
    let first = first.unwrap();
    denied.lock().unwrap().extend(
        names
            .iter()
            .filter(|name| !first.ends_with(&name[5..]))
            .cloned(),
    );
    let found = verified(Bounds::default()).unwrap();
    assert!(
        found.problems[0].contains("damaged") && found.ended_by.is_some(),
        "{found:?}"
    );
}
