//! The SSD tier of the read cache: over a restart, and when its device dies.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hdcs_core::base::io::SectorRange;
use hdcs_core::cache::SsdState;
use hdcs_device::DeviceRegion;
use hdcs_device::create::create_region;
use hdcs_device::file::{Device, DeviceError};
use hdcs_frontend::VolumeNumber;
use hdcs_server::data_dir::DataDir;
use hdcs_server::shard::cache_place::{CachePlace, CacheTrouble, Found};
use hdcs_server::shard::command::{Command, VolumeSpec};

use crate::client::noise;
use crate::disk::FaultyDisk;
use crate::node::{BYTES, CACHE_BYTES, Node, make_log, spec};

const ONE: VolumeNumber = VolumeNumber(1);
/// What is cached of the volume: several segments.
const CONTENT_BYTES: usize = 8 << 20;

type Renew = Arc<dyn Fn() -> Result<[u8; 16], String> + Send + Sync>;

/// A device that is used under the identity that it is said to carry.
#[derive(Clone)]
struct Place {
    path: PathBuf,
    identity: [u8; 16],
    renew: Renew,
}

impl CachePlace for Place {
    fn open(&self) -> Result<Found, CacheTrouble> {
        let region = DeviceRegion {
            path: self.path.clone(),
            offset: 0,
            bytes: CACHE_BYTES,
        };
        let away = |error: DeviceError| CacheTrouble::Away(error.to_string());
        let device = Device::open(&region, None).map_err(away)?;
        device.prove().map_err(away)?;
        Ok(Found {
            device,
            carries_identity: true,
        })
    }

    fn identity(&self) -> [u8; 16] {
        self.identity
    }

    fn renew(&self) -> Result<[u8; 16], String> {
        (self.renew)()
    }
}

/// A device that never fails.
fn sound(path: &Path, identity: [u8; 16]) -> Place {
    Place {
        path: path.to_path_buf(),
        identity,
        renew: Arc::new(|| panic!("the device works")),
    }
}

/// A device that never fails, the volume of which something is cached there, and that.
struct Rig {
    directory: tempfile::TempDir,
    cache: PathBuf,
    volume: VolumeSpec,
    content: Vec<u8>,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let cache = directory.path().join("cache");
        create_region(&cache, CACHE_BYTES, &mut |_| ()).unwrap();
        Self {
            volume: spec(directory.path(), 1, ""),
            content: noise(1, CONTENT_BYTES),
            cache,
            directory,
        }
    }

    /// A node with the device as it is in a file.
    fn node_over(&self, cache: &Path) -> Node {
        Node::with_ssd(self.directory.path(), sound(cache, [3; 16]))
    }

    /// A node with the device new, and with the content cached.
    fn filled(&self) -> Node {
        let node = self.node_over(&self.cache);
        fill(&node, &self.volume, &self.content);
        node
    }

    /// The next one, over what it has left there.
    fn warm(&self, cache: &Path) -> Node {
        let node = self.node_over(cache);
        node.until_shard("warm", |report| report.cache.warm_lines > 0);
        node
    }
}

/// Whether a volume reads as this.
fn reads(node: &Node, content: &[u8]) -> bool {
    node.connect(1).read(0, content.len()).unwrap() == content
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
    let rig = Rig::new();
    rig.filled().stop(false);
    let node = rig.warm(&rig.cache);
    node.open(rig.volume.clone()).unwrap();
    assert!(reads(&node, &rig.content));
    let stats = node.volume().stats;
    assert!(stats.ssd_hit_blocks > 0, "{stats:?}");
    node.stop(false);
}

#[test]
fn shrinking_ends_what_is_cached_beyond_even_within_a_block() {
    let rig = Rig::new();
    let node = rig.filled();
    let resize = |bytes| node.resize(bytes);
    let end = 4096 + 512;
    resize(end as u64).unwrap();
    resize(BYTES).unwrap();
    let mut expected = rig.content;
    expected[end..].fill(0);
    assert!(reads(&node, &expected));
    node.stop(false);
}

/// A shrink that ended before the cache had durably forgotten what it cut off leaves that on the medium. It is not
/// what is there once the volume has grown again, and not after a crash then.
#[test]
fn growing_ends_what_an_interrupted_shrink_has_left_in_the_cache() {
    let rig = Rig::new();
    rig.filled().stop(false);
    let end = 1 << 20;
    let mut cut = rig.volume.clone();
    cut.config.bytes = end as u64;
    let node = rig.warm(&rig.cache);
    node.open(cut).unwrap();
    node.resize(BYTES).unwrap();
    // What a crash leaves: a stop would make all of it durable.
    let crashed = rig.directory.path().join("crashed");
    std::fs::copy(&rig.cache, &crashed).unwrap();
    node.stop(false);
    let node = rig.warm(&crashed);
    node.open(rig.volume.clone()).unwrap();
    let mut expected = rig.content;
    expected[end..].fill(0);
    assert!(reads(&node, &expected));
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
        move || {
            let mut dir = dir.lock().unwrap();
            let renewed = dir.renew_cache_uuid();
            renewed.map_err(|error| error.to_string())?;
            Ok(dir.cache_uuid().into_bytes())
        }
    };
    let disk = FaultyDisk::new(path, CACHE_BYTES);
    let before = identity();
    let volume = spec(path, 1, "");
    let (old, new) = (noise(1, CONTENT_BYTES), noise(2, CONTENT_BYTES));
    let place = Place {
        path: disk.path(),
        identity: before,
        renew: Arc::new(renew),
    };
    let node = Node::with_ssd(path, place.clone());
    fill(&node, &volume, &old);
    // Only a stop makes sure that what was filled is on the device before that fails.
    node.stop(false);
    let node = Node::with_ssd(path, place);
    node.until_shard("warm", |report| report.cache.warm_lines > 0);
    node.open(volume.clone()).unwrap();

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
    node.until_shard("tried", |report| report.cache_trouble.is_some());

    // The device is back, with what it held before: the tier begins anew on it.
    disk.fail(false);
    node.until_shard("readmitted", |report| {
        report.cache.ssd_state == SsdState::Online
    });
    let report = node.report();
    assert_eq!(report.cache.ssd_readmissions, 1);
    assert_eq!(report.cache_trouble, None);
    assert!(client.read(0, CONTENT_BYTES).unwrap() == new);
    let range = SectorRange::new(0, CONTENT_BYTES as u64 / 512);
    node.ask(|answer| Command::Evict(ONE, range, answer))
        .unwrap();
    node.ask(|answer| Command::Promote(ONE, range, answer))
        .unwrap();
    let before_reading = node.volume().stats.ssd_hit_blocks;
    assert!(client.read(0, CONTENT_BYTES).unwrap() == new);
    assert!(node.volume().stats.ssd_hit_blocks > before_reading);
    drop(client);
    node.stop(false);

    let after = identity();
    assert_ne!(before, after);
    drop(dir);
    // A program that another test starts holds the lock, too, until it runs.
    let is_open = || DataDir::open(&data).ok();
    let dir = (0..100).find_map(|_| {
        is_open().or_else(|| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            None
        })
    });
    let dir = dir.expect("nobody else holds it");
    assert_eq!(dir.cache_uuid().into_bytes(), after, "it is durable");
    let node = Node::with_ssd(path, sound(&disk.path(), after));
    node.until_shard("warm", |report| report.cache.warm_lines > 0);
    node.open(volume).unwrap();
    assert!(node.connect(1).read(0, CONTENT_BYTES).unwrap() == new);
    node.stop(false);
}

#[test]
fn promote_brings_a_range_that_fits_to_the_ssd_tier() {
    let rig = Rig::new();
    let bytes = 40 << 20;
    let content = noise(4, bytes);
    let path = rig.directory.path().join("image1");
    std::fs::write(&path, &content).unwrap();
    let image = std::fs::OpenOptions::new().write(true).open(path);
    image.unwrap().set_len(BYTES).unwrap();
    let node = rig.node_over(&rig.cache);
    node.until_shard("online", |report| {
        report.cache.ssd_state == SsdState::Online
    });
    make_log(&rig.volume);
    node.open(rig.volume.clone()).unwrap();
    let range = SectorRange::new(0, bytes as u64 / 512);
    node.ask(|answer| Command::Promote(ONE, range, answer))
        .unwrap();
    let before = node.volume().stats.miss_blocks;
    let mut client = node.connect(1);
    for (offset, piece) in (0..).step_by(1 << 20).zip(content.chunks(1 << 20)) {
        assert!(client.read(offset, piece.len()).unwrap() == piece);
    }
    drop(client);
    let stats = node.volume().stats;
    assert_eq!(
        stats.miss_blocks, before,
        "every block is in the cache, of which DRAM has next to nothing"
    );
    node.stop(false);
}
