//! The format of local stores stays what it is: what an earlier program wrote opens, and the same writes still make the
//! same bytes, plain and encrypted.
//!
//! `HDCS_UPDATE=1` writes the images anew, for a reviewer to compare.

use std::path::{Path, PathBuf};

use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::local::format::{HOME_VERSION, Layout};
use hdcs_core::local::{Ask, Event};
use hdcs_kit::home::{KEY, Rig, packed, unpacked};

fn image_path(version: u16, key: [u8; 16]) -> PathBuf {
    let encrypted = if key == KEY { "-encrypted" } else { "" };
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("tests/golden/home{encrypted}-v{version}.bin"))
}

/// A local store with blocks in every state, whose superblock has been written in both places.
fn written(key: [u8; 16]) -> Rig {
    let mut rig = Rig::new(key);
    rig.write(4096, &[1; 2 * BLOCK_BYTES]);
    rig.settle();
    rig.ask(Ask::Flush);
    rig.settle();
    rig.event(Event::Tier);
    rig.settle();
    // A part of a block, the rest of which is the backend's; zeroes over what was tiered out.
    rig.write(5 * 4096 + 512, &[2; 1024]);
    rig.ask(Ask::Zero {
        offset: 8192,
        bytes: 4096,
    });
    rig.settle();
    rig.ask(Ask::Flush);
    rig.settle();
    assert!(rig.ended.drain(..).all(|ended| ended.result.is_ok()));
    rig
}

#[test]
fn golden_home_is_still_written_the_same() {
    for key in [[0; 16], KEY] {
        let path = image_path(HOME_VERSION, key);
        let image = packed(&written(key).store);
        if std::env::var_os("HDCS_UPDATE").is_some() {
            std::fs::write(&path, &image).unwrap();
        }
        let golden = std::fs::read(&path).unwrap();
        assert!(
            golden == image,
            "the format of homes has changed: raise HOME_VERSION and add an image"
        );
    }
}

#[test]
fn golden_homes_of_every_version_open() {
    for version in 1..=HOME_VERSION {
        for key in [[0; 16], KEY] {
            let mut rig = Rig::new(key);
            let image = std::fs::read(image_path(version, key)).unwrap();
            rig.store = unpacked(&image, Layout::of(key == KEY));
            rig.reopen();
            let status = rig.home.status();
            let blocks = [status.clean_bytes, status.dirty_bytes, status.zero_bytes]
                .map(|bytes| bytes / BLOCK_BYTES as u64);
            assert_eq!(blocks, [1, 1, 1]);
            let first = |rig: &mut Rig, offset: u64| rig.read(offset, 512)[0];
            let of_backend = rig.backend[5 * 4096];
            let found = [4096, 8192, 5 * 4096, 5 * 4096 + 512].map(|at| first(&mut rig, at));
            assert_eq!(found, [1, 0, of_backend, 2]);
            rig.scrub();
            assert!(rig.damaged.is_empty());
        }
    }
}
