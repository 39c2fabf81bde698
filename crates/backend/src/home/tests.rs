//! A local store over a store in a file and a backend, as a shard drives them: sizes, and what stops on the way.

use std::path::Path;
use std::time::{Duration, Instant};

use hdcs_core::local::TierState;
use hdcs_core::local::format::Layout;
use hdcs_device::ring::Owner;
use uuid::Uuid;

use super::*;
use crate::Absent;
use crate::conformance::Bench;
use crate::memory::VolumeMemory;

const VOLUME: Uuid = Uuid::from_u128(7);
const BYTES: u64 = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// The local store of a volume of `bytes` bytes in `directory`, over an image there.
fn open(directory: &Path, bytes: u64) -> Bench {
    let (path, image) = (directory.join("home"), directory.join("image"));
    if !path.exists() {
        store::create(&path, VOLUME, bytes, false, None).unwrap();
    }
    let store = store::open(
        &path,
        VOLUME.into_bytes(),
        bytes,
        5,
        true,
        None,
        &VolumeMemory::unlimited(0),
    )
    .unwrap();
    let url = format!("file:{}", image.display());
    let absent = if image.exists() {
        Absent::Refuse
    } else {
        Absent::Create
    };
    let backend = crate::open(&url, bytes, absent).unwrap();
    Bench::new(backend.behind(Some(store)))
}

fn tier(bench: &mut Bench, ask: Tiers, until: TierState) {
    let mut port = Port {
        ring: &mut bench.ring,
        owner: Owner::Backend(0),
        done: &mut Vec::new(),
    };
    bench.stack.tier(Nanos(0), ask, &mut port);
    let started = Instant::now();
    while status(bench).tier != until {
        assert!(started.elapsed() < PATIENCE, "{:?}", status(bench));
        bench.turn();
    }
}

fn status(bench: &Bench) -> Status {
    bench.stack.home().unwrap().status()
}

/// As a shard does it.
fn resize(bench: &mut Bench, bytes: u64) -> Result<Done, IoError> {
    let before = bench.stack.bytes();
    let resized = bench.ask(Ask::Resize { bytes });
    let smaller = bytes.min(before);
    let now = resized.as_ref().map_or(smaller, |_| bytes);
    bench.stack.resized(now);
    resized
}

#[test]
fn home_that_could_not_be_cut_is_cut_before_it_grows() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = open(directory.path(), BYTES);
    for offset in (0..BYTES).step_by(1 << 20) {
        bench.write(offset, &vec![7; 1 << 20]).unwrap();
    }
    bench.ask(Ask::Flush).unwrap();
    tier(&mut bench, Tiers::BeginAndHold, TierState::Held);
    // The volume keeps the size, since it has no more than that already.
    assert!(resize(&mut bench, BYTES / 2).is_err());
    assert_eq!(status(&bench).bytes, BYTES);
    tier(&mut bench, Tiers::Release, TierState::Idle);
    resize(&mut bench, BYTES).unwrap();
    for (offset, byte) in [(0, 7), (BYTES / 2, 0), (BYTES - (1 << 20), 0)] {
        assert_eq!(bench.read(offset, 1 << 20).unwrap(), vec![byte; 1 << 20]);
    }
    let image = std::fs::read(directory.path().join("image")).unwrap();
    assert!(image.len() as u64 == BYTES && image[BYTES as usize / 2..].iter().all(|&b| b == 0));
}

#[test]
fn home_that_is_larger_than_its_volume_is_cut_before_anything_else() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = open(directory.path(), BYTES);
    bench.write(BYTES - 4096, &[7; 4096]).unwrap();
    bench.write(0, &[8; 4096]).unwrap();
    bench.ask(Ask::Flush).unwrap();
    tier(&mut bench, Tiers::Begin, TierState::Idle);
    drop(bench);
    let mut bench = open(directory.path(), BYTES / 2);
    assert_eq!(status(&bench).bytes, BYTES);
    // What is asked before that waits for it.
    assert_eq!(bench.read(0, 4096).unwrap(), [8; 4096]);
    assert_eq!(status(&bench).bytes, BYTES / 2);
    let bytes_of = |name| {
        let file = std::fs::metadata(directory.path().join(name));
        file.unwrap().len()
    };
    let needs = Layout::PLAIN.store_bytes(BYTES / 2);
    assert_eq!((bytes_of("home"), bytes_of("image")), (needs, BYTES / 2));
    resize(&mut bench, BYTES).unwrap();
    assert_eq!(bench.read(BYTES - 4096, 4096).unwrap(), [0; 4096]);
    assert_eq!(bytes_of("home"), Layout::PLAIN.store_bytes(BYTES));
}
