//! The formats on disk stay what they are: images that an earlier program wrote open, and the same
//! writes still make the same bytes. A new format version adds an image; it replaces none.
//!
//! `HDCS_UPDATE=1` writes the images of the present version anew, for a reviewer to compare.

mod world;

use std::path::{Path, PathBuf};

use hdcs_core::format::{LOG_HEADER_BLOCKS, LOG_VERSION};
use hdcs_core::io::{Request, SectorRange};
use hdcs_core::limits::BLOCK_BYTES;
use hdcs_core::volume::Persist;
use world::World;

/// What of the log is kept: both superblocks and the first blocks of the ring.
const RING_START: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
const KEPT_BYTES: usize = RING_START + 12 * BLOCK_BYTES;

fn image_path(version: u16) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    directory.join(format!("log-v{version}.bin"))
}

/// One of every kind of entry, aligned and not, with a sync point between.
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
}

#[test]
fn golden_log_is_still_written_the_same() {
    let mut world = World::new(Persist::OnWrite);
    write_every_kind(&mut world);
    let path = image_path(LOG_VERSION);
    if std::env::var_os("HDCS_UPDATE").is_some() {
        std::fs::write(&path, &world.log[..KEPT_BYTES]).unwrap();
    }
    let golden = std::fs::read(&path).unwrap();
    assert!(
        golden == world.log[..KEPT_BYTES],
        "the log's format has changed: raise LOG_VERSION and add an image"
    );
}

#[test]
fn golden_logs_of_every_version_open() {
    for version in 1..=LOG_VERSION {
        let mut world = World::new(Persist::OnWrite);
        world.log.fill(0);
        let golden = std::fs::read(image_path(version)).unwrap();
        world.log[..golden.len()].copy_from_slice(&golden);
        world.reopen();
        let data = world.read(SectorRange::new(8, 32));
        let sector = |index: usize| data[index * 512];
        assert_eq!([sector(0), sector(7), sector(8), sector(11)], [1, 1, 0, 2]);
        assert_eq!([sector(12), sector(13)], [0, 0], "version {version}");
        assert_eq!(world.volume.stats(world.now).sync_points, 1);
        world.close(true);
        assert_eq!(
            world.backend[8 * 512..40 * 512],
            *data,
            "it is destaged as it was"
        );
    }
}
