//! The formats on disk stay what they are: images that an earlier program wrote open, and the same
//! writes still make the same bytes. A new format version adds an image; it replaces none.
//!
//! `HDCS_UPDATE=1` writes the images of the present version anew, for a reviewer to compare.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::codec::Method;
use hdcs_core::base::io::{Request, SectorRange};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_HEADER_BLOCKS, LOG_SUPERBLOCKS, LOG_VERSION, LogSuperblock};
use hdcs_core::objects::format::{Manifest, OBJECT_VERSION};
use hdcs_core::objects::io::{Ask, SnapshotName};
use hdcs_core::objects::{Access, Config};
use hdcs_core::volume::{Event, Persist, VolumeConfig};
use hdcs_kit::bucket::{Bucket, Objects};
use hdcs_kit::copies;
use hdcs_kit::volume::World;

/// What of the log is kept: both superblocks and the first blocks of the ring.
const RING_START: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
const KEPT_BYTES: usize = RING_START + 12 * BLOCK_BYTES;

fn image_path(version: u16) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    directory.join(format!("log-v{version}.bin"))
}

/// One of every kind of entry that a volume has, aligned and not, compressed and not, with a sync point between.
fn write_every_kind(world: &mut World) {
    world.write(8, &[1; BLOCK_BYTES]);
    world.ask(Request::Flush);
    world.write(19, &[2; 1024]);
    world.ask(Request::Discard {
        range: SectorRange::new(32, 8),
        fua: false,
    });
    world.ask(Request::WriteZeroes {
        range: SectorRange::new(20, 1),
        fua: false,
        no_hole: true,
    });
    // What is compressed depends on the version of LZ4, too: another one may write another image, but it has to
    // read this one.
    let config = VolumeConfig {
        compression: Some(Method::Lz4),
        ..world.config.clone()
    };
    world.step(Event::Reconfigure(config));
    world.write(64, &[3; 2 * BLOCK_BYTES]);
}

/// The copy of a group's log, which was cut where it begins: all blocks of the ring that are kept are of void spans.
fn world_of_group() -> World {
    let mut world = World::new(Persist::OnWrite);
    // Nothing is destaged, so the log does not begin later.
    world.backend_silent = Some(Vec::new());
    for block in 0..6 {
        world.write(block * 8, &[0xee; BLOCK_BYTES]);
    }
    copies::cut(&mut world.log, 0);
    world.backend_silent = None;
    world.reopen();
    world
}

#[test]
fn golden_log_is_still_written_the_same() {
    for version in 1..=LOG_VERSION {
        let mut world = match version {
            1 => World::new(Persist::OnWrite),
            _ => world_of_group(),
        };
        write_every_kind(&mut world);
        for index in 0..LOG_SUPERBLOCKS {
            let at = LogSuperblock::offset_of(index) as usize;
            assert_eq!(u16::from(world.log[at + 8]), version);
        }
        let path = image_path(version);
        if std::env::var_os("HDCS_UPDATE").is_some() {
            std::fs::write(&path, &world.log[..KEPT_BYTES]).unwrap();
        }
        let golden = std::fs::read(&path).unwrap();
        assert!(
            golden == world.log[..KEPT_BYTES],
            "the log's format has changed: raise LOG_VERSION and add an image"
        );
    }
}

#[test]
fn golden_logs_of_every_version_open() {
    // One whose spans do not name how far they are ahead of what is durable.
    let unbounded = image_path(1).with_file_name("log-v1-unbounded.bin");
    for image in (1..=LOG_VERSION).map(image_path).chain([unbounded]) {
        let mut world = World::new(Persist::OnWrite);
        world.log.fill(0);
        let golden = std::fs::read(&image).unwrap();
        world.log[..golden.len()].copy_from_slice(&golden);
        world.reopen();
        let data = world.read(SectorRange::new(8, 72));
        let sector = |index: usize| data[index * 512];
        assert_eq!([sector(0), sector(7), sector(8), sector(11)], [1, 1, 0, 2]);
        assert_eq!([sector(12), sector(13)], [0, 0], "{}", image.display());
        assert_eq!([sector(55), sector(56), sector(71)], [0, 3, 3]);
        assert_eq!(world.volume.stats(world.now).sync_points, 1);
        world.close(true);
        assert_eq!(
            world.backend[8 * 512..80 * 512],
            *data,
            "it is destaged as it was"
        );
    }
}

/// What a log says that has lost something: blocks 1 and 3 of five, each of which has a span of its own.
#[test]
fn golden_log_with_losses_is_still_written_and_read_the_same() {
    let path = image_path(1).with_file_name("log-losses-v1.bin");
    let mut world = World::new(Persist::OnWrite);
    for block in 0..5 {
        world.write(block * 8, &[block as u8 + 1; BLOCK_BYTES]);
    }
    for block in [1, 3] {
        world.log[RING_START + (2 * block + 1) * BLOCK_BYTES] ^= 1;
    }
    world.reopen();
    if std::env::var_os("HDCS_UPDATE").is_some() {
        std::fs::write(&path, &world.log[..KEPT_BYTES]).unwrap();
    }
    let golden = std::fs::read(&path).unwrap();
    assert!(
        golden == world.log[..KEPT_BYTES],
        "the log's format has changed"
    );
    let mut world = World::new(Persist::OnWrite);
    world.log.fill(0);
    world.log[..golden.len()].copy_from_slice(&golden);
    // With what was damaged gone, the superblocks alone say it.
    world.reopen();
    world.close(true);
    world.log[RING_START..].fill(0);
    world.reopen();
    let lost: Vec<_> = world.volume.lost().iter().collect();
    assert_eq!(lost, [SectorRange::new(8, 8), SectorRange::new(24, 8)]);
    assert_eq!(world.read(SectorRange::new(16, 8))[0], 3);
}

const PARENT: &str = "bucket/parent/";
const CLONE: &str = "bucket/clone/";

fn name() -> SnapshotName {
    SnapshotName::new("monday").unwrap()
}

fn config(access: Access) -> Config {
    Config {
        batch_blocks: 8,
        ..Config::new(access, 5)
    }
}

/// A volume with every kind of object: batches, plain ones and compressed ones, a map, a snapshot, and a clone that
/// has written.
fn write_every_object() -> Objects {
    let objects = Objects::default();
    let pool = Pool::new(1 << 20);
    let new = Config {
        bytes: Some(1 << 20),
        ..config(Access::Create { uuid: [7; 16] })
    };
    let mut parent = Bucket::open(&objects, PARENT, new, "");
    parent.volume.set_compression(Some(Method::Zstd));
    for round in 0..40 {
        // Every other batch is too small to be compressed.
        if round % 2 == 1 {
            parent.fill(&pool, 8, 6, round);
        }
        parent.fill(&pool, 0, 1, round);
        parent.fill(&pool, 2, 1, 100 + round);
        parent.ask(Ask::Flush);
    }
    parent.ask(Ask::Snapshot {
        name: name(),
        made_ms: 1_700_000_000_123,
    });
    let clone = config(Access::Clone {
        uuid: [9; 16],
        snapshot: name(),
    });
    let mut clone = Bucket::open(&objects, CLONE, clone, PARENT);
    clone.fill(&pool, 0, 1, 200);
    clone.ask(Ask::Zero {
        offset: 4 * 4096,
        bytes: 4096,
    });
    clone.ask(Ask::Flush);
    parent.fill(&pool, 2, 1, 201);
    parent.ask(Ask::Flush);
    objects
}

fn objects_path(version: u16) -> PathBuf {
    image_path(version).with_file_name(format!("objects-v{version}.bin"))
}

/// Names and objects, each after its length.
fn packed(objects: &Objects) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, object) in objects.borrow().iter() {
        for part in [name.as_bytes(), object] {
            bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
            bytes.extend_from_slice(part);
        }
    }
    bytes
}

fn unpacked(mut bytes: &[u8]) -> Objects {
    let objects = Objects::default();
    let mut next = || {
        let (length, rest) = bytes.split_first_chunk()?;
        let (part, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
        bytes = rest;
        Some(part.to_vec())
    };
    while let (Some(name), Some(object)) = (next(), next()) {
        let name = String::from_utf8(name).unwrap();
        objects.borrow_mut().insert(name, object);
    }
    objects
}

#[test]
fn golden_objects_are_still_written_the_same() {
    let objects = write_every_object();
    for kind in ["data", "map", "manifest", "snapshot", "clone"] {
        let prefix = format!("{PARENT}{kind}/");
        let mut names = objects
            .borrow()
            .keys()
            .cloned()
            .collect::<Vec<_>>()
            .into_iter();
        assert!(names.any(|name| name.starts_with(&prefix)), "no {kind}");
    }
    let path = objects_path(OBJECT_VERSION);
    if std::env::var_os("HDCS_UPDATE").is_some() {
        std::fs::write(&path, packed(&objects)).unwrap();
    }
    let golden = std::fs::read(&path).unwrap();
    assert!(
        golden == packed(&objects),
        "the format of objects has changed: raise OBJECT_VERSION and add an image"
    );
}

#[test]
fn golden_objects_of_every_version_open() {
    let pool: Arc<Pool> = Pool::new(1 << 20);
    for version in 1..=OBJECT_VERSION {
        let objects = unpacked(&std::fs::read(objects_path(version)).unwrap());
        let first = |bucket: &mut Bucket, block: u64| bucket.read(&pool, block)[0];
        let mut clone = Bucket::open(&objects, CLONE, config(Access::Existing), "");
        assert_eq!(
            [0, 2, 4].map(|block| first(&mut clone, block)),
            [200, 139, 0]
        );
        let mut parent = Bucket::open(&objects, PARENT, config(Access::Existing), "");
        assert_eq!(
            [0, 2, 4].map(|block| first(&mut parent, block)),
            [39, 201, 0]
        );
        assert_eq!(parent.volume.snapshots(), [name()]);
        let snapshot = config(Access::Snapshot(name()));
        let mut snapshot = Bucket::open(&objects, PARENT, snapshot, "");
        assert_eq!(
            [0, 2, 4].map(|block| first(&mut snapshot, block)),
            [39, 139, 0]
        );
        let manifests = objects.borrow();
        let newest = manifests
            .iter()
            .rfind(|(name, _)| name.starts_with("bucket/parent/manifest/"));
        let manifest = Manifest::parse(newest.unwrap().1).unwrap();
        assert_eq!(manifest.snapshots[0].made_ms, 1_700_000_000_123);
    }
}
