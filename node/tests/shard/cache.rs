//! The SSD tier of the read cache: over a restart, and when its device dies.

use std::path::Path;
use std::sync::{Arc, Mutex};

use hdcs_core::io::SectorRange;
use hdcs_core::read_cache::SsdState;
use hdcs_node::data_dir::DataDir;
use hdcs_node::device::create::create_region;
use hdcs_node::frontends::VolumeNumber;
use hdcs_node::shard::command::{Command, DeviceRegion, VolumeSpec};
use hdcs_node::shard::{CacheDevice, RecordReset};

use crate::client::noise;
use crate::disk::FaultyDisk;
use crate::node::{BYTES, Node, make_log, spec};

const ONE: VolumeNumber = VolumeNumber(1);
const CACHE_BYTES: u64 = 64 << 20;
/// What is cached of the volume: several segments.
const CONTENT_BYTES: usize = 8 << 20;

fn device(path: &Path, record_reset: RecordReset) -> CacheDevice {
    let region = DeviceRegion {
        path: path.to_path_buf(),
        offset: 0,
        bytes: CACHE_BYTES,
    };
    CacheDevice {
        region,
        record_reset,
    }
}

/// For devices that never fail.
fn never() -> RecordReset {
    RecordReset(Arc::new(|| panic!("the device works")))
}

/// Write content to a new volume and bring it into the SSD tier.
fn fill(node: &Node, volume: &VolumeSpec, content: &[u8]) {
    node.until_shard("online", |report| {
        report.cache.ssd_state == SsdState::Online
    });
    make_log(volume);
    node.open(volume.clone()).unwrap();
    node.connect(1).write(0, content).unwrap();
    node.close(1, true).unwrap();
    node.open(volume.clone()).unwrap();
    let range = SectorRange::new(0, CONTENT_BYTES as u64 / 512);
    node.ask(|answer| Command::Promote(ONE, range, answer))
        .unwrap();
}

#[test]
fn ssd_tier_is_warm_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let cache = path.join("cache");
    create_region(&cache, CACHE_BYTES, &mut |_| ()).unwrap();
    let content = noise(1, CONTENT_BYTES);
    let volume = spec(path, 1, "");
    let node = Node::with_ssd(path, [3; 16], device(&cache, never()));
    fill(&node, &volume, &content);
    node.stop(false);
    let node = Node::with_ssd(path, [3; 16], device(&cache, never()));
    node.until_shard("warm", |report| report.cache.warm_lines > 0);
    node.open(volume).unwrap();
    assert!(node.connect(1).read(0, CONTENT_BYTES).unwrap() == content);
    let stats = node.volume().stats;
    assert!(stats.ssd_hit_blocks > 0, "{stats:?}");
    node.stop(false);
}

#[test]
fn shrinking_ends_what_is_cached_beyond_even_within_a_block() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let cache = path.join("cache");
    create_region(&cache, CACHE_BYTES, &mut |_| ()).unwrap();
    let content = noise(1, CONTENT_BYTES);
    let volume = spec(path, 1, "");
    let node = Node::with_ssd(path, [3; 16], device(&cache, never()));
    fill(&node, &volume, &content);
    let resize = |bytes| node.ask(|answer| Command::Resize(ONE, bytes, answer));
    let end = 4096 + 512;
    resize(end as u64).unwrap();
    resize(BYTES).unwrap();
    let mut expected = content;
    expected[end..].fill(0);
    assert!(node.connect(1).read(0, CONTENT_BYTES).unwrap() == expected);
    node.stop(false);
}

#[test]
fn ssd_tier_whose_device_dies_does_not_hold_up_destage_and_never_comes_back_stale() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let data = path.join("data");
    let dir = Arc::new(Mutex::new(DataDir::open(&data).unwrap()));
    let identity = || dir.lock().unwrap().cache_uuid().into_bytes();
    let renew = {
        let dir = Arc::clone(&dir);
        let renew = move || dir.lock().unwrap().renew_cache_uuid();
        RecordReset(Arc::new(move || renew().map_err(|error| error.to_string())))
    };
    let disk = FaultyDisk::new(path, CACHE_BYTES);
    let before = identity();
    let volume = spec(path, 1, "");
    let (old, new) = (noise(1, CONTENT_BYTES), noise(2, CONTENT_BYTES));
    let node = Node::with_ssd(path, before, device(&disk.path(), renew));
    fill(&node, &volume, &old);

    // Neither the invalidations nor, at first, the new identity can be written.
    disk.fail(true);
    let in_the_way = data.join("node.json.tmp");
    std::fs::create_dir(&in_the_way).unwrap();
    let mut client = node.connect(1);
    client.write(0, &new).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    node.until_shard("refused", |report| report.cache_identity_error.is_some());
    assert_eq!(identity(), before);
    assert!(
        node.volume().stats.dirty_bytes > 0,
        "the log still protects from what the device may bring back"
    );
    std::fs::remove_dir(in_the_way).unwrap();
    node.until("destaged", |report| report.stats.dirty_bytes == 0);
    let report = node.report();
    assert_eq!(report.cache.ssd_state, SsdState::Offline);
    assert_eq!(report.cache_identity_error, None);
    let image = std::fs::read(path.join("image1")).unwrap();
    assert!(image[..CONTENT_BYTES] == new);
    assert!(client.read(0, CONTENT_BYTES).unwrap() == new);
    drop(client);
    node.stop(false);

    // The device is back, with what it held before.
    disk.fail(false);
    let after = identity();
    assert_ne!(before, after);
    drop(dir);
    let dir = DataDir::open(&data).unwrap();
    assert_eq!(dir.cache_uuid().into_bytes(), after, "it is durable");
    let node = Node::with_ssd(path, before, device(&disk.path(), never()));
    node.until_shard("stale", |report| report.cache.warm_lines > 0);
    node.stop(false);
    let node = Node::with_ssd(path, after, device(&disk.path(), never()));
    node.until_shard("online", |report| {
        report.cache.ssd_state == SsdState::Online
    });
    assert_eq!(node.report().cache.warm_lines, 0);
    node.open(volume).unwrap();
    assert!(node.connect(1).read(0, CONTENT_BYTES).unwrap() == new);
    node.stop(false);
}
