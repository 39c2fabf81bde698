//! A backend that has checksums refuses a fetch for one sector that is bad: what is asked for is read alone.

use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{BlockKey, Request, RequestId, SectorRange};
use hdcs_core::cache::Tier;
use hdcs_core::volume::{Persist, State};
use hdcs_kit::volume::World;

/// The line of four blocks in which a sector is rotten, and that sector.
const LINE: SectorRange = SectorRange::new(64, 32);
const ROTTEN: SectorRange = SectorRange::new(77, 1);

fn world() -> World {
    let mut world = World::new(Persist::OnWrite);
    for (number, sector) in world.backend.chunks_mut(512).enumerate() {
        sector.fill(number as u8 | 1);
    }
    world.backend_rotten = Some(ROTTEN);
    world
}

fn content(range: SectorRange) -> Vec<u8> {
    let sectors = range.start..range.end();
    sectors.flat_map(|number| [number as u8 | 1; 512]).collect()
}

fn refused(world: &mut World, range: SectorRange) -> RequestError {
    let id = RequestId(9);
    let request = Request::Read { range };
    world.step(hdcs_core::volume::Event::Request { id, request });
    let (_, result) = world.replies.pop().expect("it is answered");
    result.unwrap_err()
}

fn is_cached(world: &World) -> bool {
    let mut blocks = LINE.first_block()..LINE.first_block() + LINE.block_count();
    blocks.any(|block| world.cache.probe(BlockKey::new(1, block)) != Tier::Absent)
}

#[test]
fn narrow_read_brings_what_is_asked_for_beside_a_bad_sector() {
    let mut world = world();
    // The sectors on both sides of it, and a whole block of its line.
    for range in [
        SectorRange::new(ROTTEN.start - 5, 5),
        SectorRange::new(ROTTEN.start + 1, 10),
        SectorRange::new(80, 8),
    ] {
        world.backend_reads.clear();
        assert!(*world.read(range) == content(range), "{range:?}");
        assert_eq!(world.backend_reads, [LINE, range]);
    }
    assert!(
        !is_cached(&world),
        "a line of which a part is bad is not kept"
    );
    assert_eq!(world.volume.state(), State::Healthy, "the backend answers");
}

#[test]
fn narrow_read_of_a_bad_sector_is_refused_as_corrupt() {
    let mut world = world();
    for range in [ROTTEN, SectorRange::new(72, 16), LINE] {
        world.backend_reads.clear();
        assert_eq!(refused(&mut world, range), RequestError::Corrupt);
        let reads = if range == LINE { 1 } else { 2 };
        assert_eq!(world.backend_reads.len(), reads, "{range:?}");
    }
    assert!(!is_cached(&world));
}

/// As after a crash: the log is about to write it again.
#[test]
fn narrow_read_goes_around_a_bad_sector_that_is_dirty_in_the_log() {
    let mut world = world();
    world.write(ROTTEN.start, &[0xee; 512]);
    let mut expected = content(LINE);
    let at = (ROTTEN.start - LINE.start) as usize * 512;
    expected[at..at + 512].fill(0xee);
    world.backend_reads.clear();
    assert!(*world.read(LINE) == expected);
    let before = SectorRange::between(LINE.start, ROTTEN.start);
    let behind = SectorRange::between(ROTTEN.end(), LINE.end());
    assert_eq!(world.backend_reads, [LINE, before, behind]);
    assert!(!is_cached(&world));
}

/// A local store refuses what was written before a crash and not flushed. The log has it again, so it is no damage.
#[test]
fn promotion_beside_a_sector_that_the_log_has_does_not_fail() {
    let promoted = |world: &mut World| {
        let range = SectorRange::new(80, 8);
        let (id, request) = (RequestId(9), Request::Promote { range });
        world.step(hdcs_core::volume::Event::Request { id, request });
        let (_, result) = world.replies.pop().expect("it is answered");
        result.is_ok()
    };
    let mut world = world();
    assert!(!promoted(&mut world), "nobody else has the bad sector");
    world.write(72, &[1; 4096]);
    assert!(promoted(&mut world));
}
