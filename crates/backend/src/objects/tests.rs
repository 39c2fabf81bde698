//! The driver over a server in this process: the suite of the backends, and what fails.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdcs_core::base::error::IoError;
use hdcs_core::objects::io::{Kind, Name, SnapshotName};

use super::{ObjectsPlace, Reach, dead_clones, objects_place};
use crate::conformance::{self, Bench, origin};
use crate::copying::Copying;
use crate::crypt::Encryption;
use crate::crypt::source::KeySource;
use crate::memory::ObjectMemory;
use crate::stores::memory::Memory;
use crate::stores::tests::Served;
use crate::stores::{self, LIST_MAX, Listing, Object, Pending, Store, StoreError, runtime};
use crate::url::BackendUrl;
use crate::verify::{Verified, Watch};
use crate::{
    Absent, Ask, BackendError, Place as _, SnapshotCommand, SnapshotStore as _, find, open,
    open_with,
};

const BYTES: u64 = 8 << 20;

fn url(served: &Served, prefix: &str) -> String {
    let credentials = served.directory.path().join("credentials");
    format!(
        "s3://bucket/{prefix}?endpoint={}&credentials={}&retry_s=2",
        served.endpoint,
        credentials.display()
    )
}

#[test]
fn s3_conforms_as_a_backend() {
    let served = Served::start();
    conformance::run_url(&url(&served, "volume"), &mut |_| ()).unwrap();
}

#[test]
fn volume_is_found_without_being_taken() {
    let served = Served::start();
    let url = url(&served, "volume");
    assert_eq!(find(&url).unwrap(), None);
    let made = open(&url, BYTES, Absent::Create).unwrap();
    let identity = made.identity();
    let mut owner = Bench::over(made.build());
    assert_eq!(find(&url).unwrap().unwrap().bytes, BYTES);
    // Whoever only looked has not fenced it.
    owner.write(0, &[1; 4096]).unwrap();
    owner.ask(Ask::Flush).unwrap();
    let again = open(&url, BYTES, Absent::Refuse).unwrap();
    assert_eq!(again.identity(), identity);
    assert!(identity.is_some());
}

#[test]
fn owner_whose_place_is_taken_is_fenced() {
    let served = Served::start();
    let url = url(&served, "volume");
    let mut first = Bench::over(open(&url, BYTES, Absent::Create).unwrap().build());
    first.write(0, &[1; 4096]).unwrap();
    first.ask(Ask::Flush).unwrap();
    let mut second = Bench::over(open(&url, BYTES, Absent::Refuse).unwrap().build());
    assert_eq!(second.read(0, 4096).unwrap(), vec![1; 4096]);
    second.write(0, &[2; 4096]).unwrap();
    second.ask(Ask::Flush).unwrap();
    // It may take a write into its memory, but nothing of it counts.
    let _ = first.write(0, &[3; 4096]);
    assert_eq!(first.ask(Ask::Flush).unwrap_err(), IoError::Fenced);
    assert_eq!(first.write(0, &[4; 4096]).unwrap_err(), IoError::Fenced);
    assert_eq!(second.read(0, 4096).unwrap(), vec![2; 4096]);
    second.write(4096, &[5; 4096]).unwrap();
    second.ask(Ask::Flush).unwrap();
}

#[test]
fn volume_that_is_to_be_new_leaves_another_one_and_its_owner_alone() {
    let served = Served::start();
    let url = url(&served, "volume");
    let path = served.directory.path().join("wrapping-key");
    fs::write(&path, [5; 32]).unwrap();
    let encryption = Encryption::new(KeySource::File(path)).unwrap();
    let key = encryption.unlock().unwrap().objects;
    let mut owner = Bench::over(open(&url, BYTES, Absent::CreateNew).unwrap().build());
    owner.write(0, &[1; 4096]).unwrap();
    owner.ask(Ask::Flush).unwrap();
    for key in [None, Some(key)] {
        let refused = open_with(
            &url,
            BYTES,
            Absent::CreateNew,
            key,
            ObjectMemory::most(),
            None,
        )
        .map(drop);
        assert!(
            matches!(refused, Err(BackendError::Exists(_))),
            "{refused:?}"
        );
    }
    // It is neither fenced, nor kept from being opened by a key beside it.
    owner.write(4096, &[2; 4096]).unwrap();
    owner.ask(Ask::Flush).unwrap();
    drop(owner);
    let mut again = Bench::over(open(&url, BYTES, Absent::Refuse).unwrap().build());
    assert_eq!(again.read(4096, 4096).unwrap(), vec![2; 4096]);
}

#[test]
fn damaged_object_is_an_error_and_never_data() {
    let served = Served::start();
    let url = url(&served, "volume");
    let mut bench = Bench::over(open(&url, BYTES, Absent::Create).unwrap().build());
    for block in 0..64u64 {
        bench.write(block * 4096, &[block as u8 + 1; 4096]).unwrap();
    }
    bench.ask(Ask::Flush).unwrap();
    drop(bench);
    let data = served.directory.path().join("bucket/volume/data");
    let objects: Vec<PathBuf> = fs::read_dir(data)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(!objects.is_empty());
    for path in &objects {
        let mut bytes = fs::read(path).unwrap();
        // A run of one block's content: the second half of it is inverted.
        let at = bytes.windows(4096).position(|run| run == [8; 4096]);
        if let Some(at) = at {
            bytes[at + 2048..at + 4096].fill(!8);
            fs::write(path, bytes).unwrap();
        }
    }
    let mut bench = Bench::over(open(&url, BYTES, Absent::Refuse).unwrap().build());
    assert_eq!(bench.read(7 * 4096, 4096).unwrap_err(), IoError::Failed);
    assert_eq!(bench.read(9 * 4096, 4096).unwrap(), vec![10; 4096]);
}

#[test]
fn opening_says_what_is_wrong() {
    let served = Served::start();
    let here = url(&served, "volume");
    assert!(matches!(
        open(&here, BYTES, Absent::Refuse).map(drop),
        Err(BackendError::Absent(_))
    ));
    drop(open(&here, BYTES, Absent::Create).unwrap());
    assert!(matches!(
        open(&here, 2 * BYTES, Absent::Create).map(drop),
        Err(BackendError::Size { has: BYTES, .. })
    ));
    assert!(matches!(
        open(&here, 2 * BYTES, Absent::Refuse).map(drop),
        Err(BackendError::Shrunk { .. })
    ));
    let bucket = here.replace("//bucket", "//absent");
    let said = open(&bucket, BYTES, Absent::Create).map(drop).unwrap_err();
    assert!(said.to_string().contains("does not exist"), "{said}");
    let away = here.replace(&served.endpoint, "http://127.0.0.1:1");
    assert!(matches!(
        open(&away, BYTES, Absent::Create).map(drop),
        Err(BackendError::Unreachable(_))
    ));
}

/// Files below a directory, and their bytes.
fn total(directory: &Path) -> (u64, u64) {
    let Ok(entries) = fs::read_dir(directory) else {
        return (0, 0);
    };
    entries
        .map(Result::unwrap)
        .fold((0, 0), |(count, bytes), entry| {
            let found = entry.metadata().unwrap();
            let (more, beside) = if found.is_dir() {
                total(&entry.path())
            } else {
                (1, found.len())
            };
            (count + more, bytes + beside)
        })
}

#[test]
fn snapshot_and_clone_copy_no_data() {
    let served = Served::start();
    let name = SnapshotName::new("s").unwrap();
    for mib in [1u64, 24] {
        let parent = url(&served, &format!("parent-{mib}"));
        let clone = url(&served, &format!("clone-{mib}"));
        let mut bench = Bench::over(open(&parent, mib << 20, Absent::Create).unwrap().build());
        for at in 0..mib {
            bench.write(at << 20, &vec![at as u8 + 1; 1 << 20]).unwrap();
        }
        bench.ask(Ask::Flush).unwrap();
        let before = bench.stack.counts().unwrap();
        let made_ms = 1;
        bench
            .ask(Ask::Snapshot(SnapshotCommand::Snapshot {
                name,
                made_ms,
                copy: false,
            }))
            .unwrap();
        let after = bench.stack.counts().unwrap();
        assert_eq!(
            after.puts - before.puts,
            2,
            "a copy of a manifest, and a manifest"
        );
        assert!(after.put_bytes - before.put_bytes < 4096);
        let place = BackendUrl::parse(&clone).unwrap().place;
        place
            .snapshot_store()
            .unwrap()
            .clone_from(&origin(&parent, name), &Copying::default())
            .unwrap();
        let bucket = served.directory.path().join("bucket");
        let (count, bytes) = total(&bucket.join(format!("clone-{mib}")));
        assert!(count == 1 && bytes < 4096, "{count} objects, {bytes} bytes");
        let (count, bytes) = total(&bucket.join(format!("parent-{mib}/clone")));
        assert!(count == 1 && bytes < 4096, "{count} objects, {bytes} bytes");
        let mut cloned = Bench::over(open(&clone, mib << 20, Absent::Refuse).unwrap().build());
        let last = cloned.read((mib - 1) << 20, 4096).unwrap();
        assert_eq!(last, vec![mib as u8; 4096]);
    }
}

/// The only place of a store.
#[derive(Debug)]
pub(super) struct Alone<S>(pub S);

impl<S: Store + Clone + std::fmt::Debug + 'static> Reach for Alone<S> {
    fn name(&self) -> String {
        self.location()
    }
    fn reach(&self, _timeout: Option<Duration>) -> Result<Arc<dyn Store>, BackendError> {
        Ok(Arc::new(self.0.clone()))
    }
    fn location(&self) -> String {
        self.0.place()
    }
    fn elsewhere(&self, _location: &str) -> Option<Arc<dyn Reach>> {
        None
    }
    fn store(&self) -> String {
        self.location()
    }
}

/// A store that lists a manifest, and does not have it when it is got.
#[derive(Clone, Debug)]
struct Forgetful;

impl Store for Forgetful {
    fn put<'a>(&'a self, _: &'a str, _: Bytes, _: stores::Condition) -> Pending<'a, ()> {
        Box::pin(async { Ok(()) })
    }
    fn get<'a>(&'a self, _: &'a str, _: u64, _: usize) -> Pending<'a, Bytes> {
        Box::pin(async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Err(StoreError::NotFound)
        })
    }
    fn delete<'a>(&'a self, _: &'a str) -> Pending<'a, ()> {
        Box::pin(async { Ok(()) })
    }
    fn list<'a>(&'a self, _: &'a str, _: &'a str, _: usize) -> Pending<'a, Listing> {
        let manifest = Object {
            name: Name::own(Kind::Manifest, 1).to_string(),
            bytes: 4096,
            modified_ms: 0,
        };
        Box::pin(async {
            Ok(Listing {
                objects: vec![manifest],
                more: false,
            })
        })
    }
    fn place(&self) -> String {
        "forgetful".to_owned()
    }
}

/// A store whose manifests take their time to be put.
#[derive(Clone, Debug, Default)]
struct SlowToCommit(Memory);

impl SlowToCommit {
    const PUT_TIME: Duration = Duration::from_millis(1500);

    fn has(&self, prefix: &str) -> bool {
        let found = runtime().block_on(self.list(prefix, "", LIST_MAX));
        !found.unwrap().objects.is_empty()
    }
}

impl Store for SlowToCommit {
    fn put<'a>(
        &'a self,
        name: &'a str,
        data: Bytes,
        condition: stores::Condition,
    ) -> Pending<'a, ()> {
        Box::pin(async move {
            if name.starts_with(Kind::Manifest.prefix()) {
                tokio::time::sleep(Self::PUT_TIME).await;
            }
            self.0.put(name, data, condition).await
        })
    }
    fn get<'a>(&'a self, name: &'a str, offset: u64, bytes: usize) -> Pending<'a, Bytes> {
        self.0.get(name, offset, bytes)
    }
    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        self.0.delete(name)
    }
    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, max: usize) -> Pending<'a, Listing> {
        self.0.list(prefix, after, max)
    }
    fn place(&self) -> String {
        self.0.place()
    }
}

#[test]
fn volume_that_comes_to_be_after_its_creation_was_given_up_has_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("wrapping-key");
    fs::write(&path, [5; 32]).unwrap();
    let encryption = Encryption::new(KeySource::File(path)).unwrap();
    let store = SlowToCommit::default();
    let mut place = ObjectsPlace::new(Arc::new(Alone(store.clone())), Duration::from_secs(60));
    place.open_time = Duration::from_millis(300);
    place.encrypt(encryption.unlock().unwrap().objects);
    let refused = place.open(BYTES, Absent::CreateNew).map(drop).unwrap_err();
    assert!(refused.is_unreachable(), "{refused}");
    let patience = Instant::now() + Duration::from_secs(60);
    while !store.has("manifest/") && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(store.has("manifest/") && store.has("key/wrapped"));
}

#[test]
fn opening_gives_up_in_time_whatever_it_waits_for() {
    let mut place = ObjectsPlace::new(Arc::new(Alone(Forgetful)), Duration::from_secs(60));
    place.open_time = Duration::from_millis(300);
    let begun = Instant::now();
    let refused = place.open(BYTES, Absent::Refuse).map(drop).unwrap_err();
    assert!(refused.is_unreachable(), "{refused}");
    assert!(begun.elapsed() < Duration::from_secs(3));
}

#[test]
fn clone_in_another_store_is_refused() {
    let (served, other) = (Served::start(), Served::start());
    let parent = url(&served, "parent");
    let name = SnapshotName::new("s").unwrap();
    let mut bench = Bench::over(open(&parent, BYTES, Absent::Create).unwrap().build());
    let made_ms = 1;
    bench
        .ask(Ask::Snapshot(SnapshotCommand::Snapshot {
            name,
            made_ms,
            copy: false,
        }))
        .unwrap();
    let place = BackendUrl::parse(&url(&other, "clone")).unwrap().place;
    let refused = place
        .snapshot_store()
        .unwrap()
        .clone_from(&origin(&parent, name), &Copying::default());
    let said = refused.unwrap_err().to_string();
    assert!(said.contains("name a place in the same store"), "{said}");
    let elsewhere = place
        .snapshot_store()
        .unwrap()
        .clone_from(&origin("file:/tmp/x", name), &Copying::default());
    assert!(elsewhere.is_err());
}

struct Unhurried;

impl Watch for Unhurried {
    fn total(&mut self, _: u64) {}
    fn passed(&mut self, _: u64) -> bool {
        true
    }
}

fn verified(url: &str) -> Verified {
    let place = BackendUrl::parse(url).unwrap().place;
    place.verify(&mut Unhurried).unwrap()
}

/// The files below a prefix of the bucket.
fn objects(served: &Served, prefix: &str) -> Vec<PathBuf> {
    let directory = served.directory.path().join("bucket").join(prefix);
    let entries = fs::read_dir(directory).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn verify_reads_all_that_a_volume_its_snapshots_and_a_clone_need_and_fences_nobody() {
    let served = Served::start();
    let (parent, clone) = (url(&served, "parent"), url(&served, "clone"));
    let name = SnapshotName::new("s").unwrap();
    let mut bench = Bench::over(open(&parent, BYTES, Absent::Create).unwrap().build());
    for block in 0..64u64 {
        bench.write(block * 4096, &[block as u8 + 1; 4096]).unwrap();
    }
    let made_ms = 1;
    bench.ask(Ask::Flush).unwrap();
    bench
        .ask(Ask::Snapshot(SnapshotCommand::Snapshot {
            name,
            made_ms,
            copy: false,
        }))
        .unwrap();
    // Only the snapshot needs what this replaces.
    bench.write(0, &vec![99; 4096 * 8]).unwrap();
    bench.ask(Ask::Flush).unwrap();
    let found = verified(&parent);
    assert_eq!((found.problems, found.blocks), (vec![], 72));
    let place = BackendUrl::parse(&clone).unwrap().place;
    place
        .snapshot_store()
        .unwrap()
        .clone_from(&origin(&parent, name), &Copying::default())
        .unwrap();
    let found = verified(&clone);
    assert_eq!((found.problems, found.blocks), (vec![], 64));
    bench.write(0, &[98; 4096]).unwrap();
    bench.ask(Ask::Flush).unwrap();
}

#[test]
fn verify_names_every_object_that_is_damaged_or_missing() {
    let served = Served::start();
    let here = url(&served, "volume");
    let absent = BackendUrl::parse(&here).unwrap().place;
    assert!(matches!(
        absent.verify(&mut Unhurried),
        Err(BackendError::Absent(_))
    ));
    let name = SnapshotName::new("s").unwrap();
    let mut bench = Bench::over(open(&here, BYTES, Absent::Create).unwrap().build());
    for block in 0..64u64 {
        bench.write(block * 4096, &[block as u8 + 1; 4096]).unwrap();
    }
    bench.ask(Ask::Flush).unwrap();
    let made_ms = 1;
    bench
        .ask(Ask::Snapshot(SnapshotCommand::Snapshot {
            name,
            made_ms,
            copy: false,
        }))
        .unwrap();
    drop(bench);
    assert!(verified(&here).problems.is_empty());
    let mut tried = 0;
    let newest = objects(&served, "volume/manifest").pop().unwrap();
    let mut targets = [
        objects(&served, "volume/data"),
        objects(&served, "volume/snapshot"),
    ]
    .concat();
    targets.push(newest);
    for path in targets {
        let good = fs::read(&path).unwrap();
        let object = path.file_name().unwrap().to_str().unwrap().to_owned();
        for at in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            let problems = verified(&here).problems;
            let said = problems.join("\n");
            assert!(
                said.contains("damaged") && said.contains(&object),
                "{at}: {said}"
            );
            tried += 1;
        }
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(
            !verified(&here).problems.is_empty(),
            "{} is cut",
            path.display()
        );
        if !path.to_str().unwrap().contains("/manifest/") {
            fs::remove_file(&path).unwrap();
            let said = verified(&here).problems.join("\n");
            assert!(
                said.contains("is missing") && said.contains(&object),
                "{said}"
            );
        }
        fs::write(&path, good).unwrap();
    }
    assert!(tried >= 9, "{tried}");
    assert!(verified(&here).problems.is_empty());
}

#[test]
fn reference_of_a_clone_that_never_came_to_be_is_removed_and_no_other() {
    let served = Served::start();
    let parent = url(&served, "parent");
    let name = SnapshotName::new("s").unwrap();
    let mut bench = Bench::over(open(&parent, BYTES, Absent::Create).unwrap().build());
    bench.write(0, &[1; 4096]).unwrap();
    bench.ask(Ask::Flush).unwrap();
    let made_ms = 1;
    bench
        .ask(Ask::Snapshot(SnapshotCommand::Snapshot {
            name,
            made_ms,
            copy: false,
        }))
        .unwrap();
    let clone = |to: &str| {
        let place = objects_place(&url(&served, to)).unwrap();
        place.clone_from(&origin(&parent, name), &Copying::default())
    };
    clone("alive").unwrap();
    clone("dead").unwrap();
    // As if its creation had died before its first manifest, which the store may still have to put.
    let bucket = served.directory.path().join("bucket");
    let first = objects(&served, "dead/manifest").remove(0);
    let late = fs::read(&first).unwrap();
    fs::remove_dir_all(bucket.join("dead")).unwrap();
    let place = objects_place(&parent).unwrap();
    let forget = |grace| {
        let client = place.client().unwrap();
        let forgotten = dead_clones::forget_older(&*place.reach, &client, place.patience, grace);
        runtime().block_on(forgotten).unwrap()
    };
    assert_eq!(forget(Duration::from_secs(3600)), 0, "it may only be slow");
    assert_eq!(objects(&served, "parent/clone").len(), 2);
    assert_eq!(forget(Duration::ZERO), 1);
    assert_eq!(forget(Duration::ZERO), 0);
    assert_eq!(objects(&served, "parent/clone").len(), 1);
    let there = objects_place(&url(&served, "dead"))
        .unwrap()
        .client()
        .unwrap();
    let name = Name::own(Kind::Manifest, 1).to_string();
    let put = there.put(&name, late.into(), stores::Condition::IfAbsent);
    assert_eq!(runtime().block_on(put), Err(StoreError::Exists));
    let said = clone("dead").unwrap_err().to_string();
    assert!(said.contains("name another place"), "{said}");
    let alive = open(&url(&served, "alive"), BYTES, Absent::Refuse).unwrap();
    assert_eq!(Bench::over(alive.build()).read(0, 4096).unwrap(), [1; 4096]);
}
