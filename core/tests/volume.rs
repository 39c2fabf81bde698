//! A volume agrees with plain memory, and refuses what it must.

mod world;

use hdcs_core::io::{Extent, ExtentKind, ExtentState, Reply, Request, RequestId, SectorRange};
use hdcs_core::limits::SECTOR_BYTES;
use hdcs_core::volume::{Event, Persist};
use world::{BYTES, World};

fn random_range(random: &mut fastrand::Rng) -> SectorRange {
    let sectors = (BYTES / SECTOR_BYTES) as u64;
    let count = if random.u8(0..10) == 0 {
        random.u64(1..=1024)
    } else {
        random.u64(1..=32)
    };
    let start = if random.bool() {
        random.u64(0..256)
    } else {
        random.u64(0..sectors - count)
    };
    SectorRange::new(start, count)
}

fn agrees_with_memory(persist: Persist, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut world = World::new(persist);
    let mut model = vec![0u8; BYTES];
    for step in 0..6000u32 {
        let range = random_range(&mut random);
        let bytes = range.byte_offset() as usize..range.byte_offset() as usize + range.bytes();
        match random.u8(0..100) {
            0..50 => {
                let content: Vec<u8> = (0..range.bytes())
                    .map(|i| (step as usize + i / 512) as u8)
                    .collect();
                world.write(range.start, &content);
                model[bytes].copy_from_slice(&content);
            }
            50..58 => {
                world.ask(Request::Discard { range, fua: false });
                model[bytes].fill(0);
            }
            58..62 => {
                world.ask(Request::WriteZeroes {
                    range,
                    fua: true,
                    no_hole: random.bool(),
                });
                model[bytes].fill(0);
            }
            62..90 => assert!(*world.read(range) == model[bytes], "step {step}"),
            90..95 => drop(world.ask(Request::Flush)),
            95..97 => drop(world.ask(Request::Promote { range })),
            97 => world.step(Event::DestageAll),
            _ if random.u8(0..4) > 0 => {}
            _ => {
                let destage = random.bool();
                world.close(destage);
                if destage {
                    assert!(
                        world.backend == model,
                        "step {step}: the backend holds everything"
                    );
                }
                world.reopen();
            }
        }
    }
    world.close(true);
    assert!(world.backend == model);
    drop((world.volume, world.replies, world.cache));
    assert_eq!(
        world.pool.free_bytes(),
        world.pool.total_bytes(),
        "every buffer came back"
    );
}

#[test]
fn volume_agrees_with_memory_on_write() {
    agrees_with_memory(Persist::OnWrite, 1);
}

#[test]
fn volume_agrees_with_memory_on_flush() {
    agrees_with_memory(Persist::OnFlush, 2);
}

#[test]
fn volume_agrees_with_memory_auto() {
    agrees_with_memory(Persist::Auto, 3);
}

#[test]
fn volume_extents_tell_dirty_from_cold() {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[1; 4096]);
    let range = SectorRange::new(0, 64);
    let reply = world.ask(Request::Extents {
        range,
        kind: ExtentKind::Cache,
    });
    let Reply::Extents(extents) = reply else {
        panic!("not extents")
    };
    let cold = |range| Extent {
        range,
        state: ExtentState::Cold,
    };
    let dirty = Extent {
        range: SectorRange::new(8, 8),
        state: ExtentState::Dirty,
    };
    let expected = [
        cold(SectorRange::new(0, 8)),
        dirty,
        cold(SectorRange::new(16, 48)),
    ];
    assert_eq!(extents, expected);
}

#[test]
fn volume_refuses_what_is_outside() {
    let mut world = World::new(Persist::OnWrite);
    let sectors = (BYTES / SECTOR_BYTES) as u64;
    for range in [
        SectorRange::new(sectors, 1),
        SectorRange::new(sectors - 1, 2),
        SectorRange::new(0, 0),
        SectorRange::new(u64::MAX, 2),
        SectorRange::new(0, 4096),
    ] {
        world.step(Event::Request {
            id: RequestId(1),
            request: Request::Read { range },
        });
        let (_, result) = world.replies.pop().unwrap();
        assert_eq!(
            result.unwrap_err(),
            hdcs_core::error::RequestError::BadRange,
            "{range:?}"
        );
    }
}
