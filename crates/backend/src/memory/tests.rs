//! What volumes reserve, what they are refused, and what they find where there is plenty.

use hdcs_core::base::limits::{HOME_TIER_FLUSH_BYTES, OBJECT_TAIL_MAX};
use hdcs_core::objects::{Access, ObjectVolume};

use super::*;

const GIB: u64 = 1 << 30;
/// What the default memory cap has for volumes, whole MiB of it: a test of the server's budget says that it is so.
const USUAL_BYTES: u64 = 344 * MIB;

fn plain(log_bytes: u64) -> Needs {
    Needs {
        bytes: 0,
        log_bytes,
        home_bytes: None,
        kind: Kind::File,
        encrypted: false,
        compressed: false,
    }
}

fn home(bytes: u64) -> Needs {
    Needs {
        home_bytes: Some(bytes),
        ..plain(16 * MIB)
    }
}

fn objects() -> Needs {
    Needs {
        kind: Kind::Objects,
        ..plain(16 * MIB)
    }
}

#[test]
fn share_lends_no_more_than_it_has_and_takes_it_back() {
    let share = Share::new(100 * MIB + RESERVE_BYTES);
    let buffers = |mib| Parts {
        buffers_bytes: mib * MIB,
        ..Parts::default()
    };
    let first = share.reserve(buffers(60)).unwrap();
    let refused = share.reserve(buffers(41)).unwrap_err();
    assert_eq!(
        (refused.left_bytes, refused.all_bytes, refused.needs),
        (40 * MIB, 106 * MIB, buffers(41))
    );
    let mut second = share.reserve(buffers(30)).unwrap();
    second.reach(buffers(40)).unwrap();
    let tables = Parts {
        tables_bytes: 1,
        ..Parts::default()
    };
    second.reach(tables).unwrap_err();
    assert_eq!(
        share.held(),
        buffers(100),
        "what is refused changes nothing"
    );
    drop(first);
    second.reach(tables).unwrap();
    assert_eq!(share.held().total(), 40 * MIB + 1);
    drop(second);
    assert_eq!(share.held(), Parts::default());
    share.reserve(buffers(u64::MAX / MIB)).unwrap_err();
}

#[test]
fn shortage_says_what_is_needed_for_what_and_what_to_do() {
    let share = Share::new(20 * MIB);
    let said = home(4 << 40).check(&share).unwrap_err().to_string();
    for part in [
        "651 for tables",
        "of the 20 MiB",
        "detach volumes",
        "`memory_max_mib`",
    ] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(share.held(), Parts::default(), "asking reserves nothing");
}

#[test]
fn home_has_all_its_checksums_or_what_there_is() {
    let share = Share::new(600 * MIB);
    let small = home(64 * MIB).reserve(&share, 0).unwrap();
    assert!(small.sums_bytes() as u64 >= MIB / 2 && small.parts().tables_bytes < MIB);
    let large = home(64 * GIB).reserve(&share, 0).unwrap();
    assert_eq!(large.sums_bytes(), HOME_SUMS_BYTES);
    let mut others = Vec::new();
    while let Ok(other) = home(64 * GIB).reserve(&share, 0) {
        assert!(other.sums_bytes() as u64 >= HOME_SUMS_BYTES_MIN);
        others.push(other);
        assert!(share.held().total() <= share.bytes());
    }
    assert!(others.len() >= 4, "{}", others.len());
    let last = others.last().unwrap();
    assert!(last.sums_bytes() < HOME_SUMS_BYTES, "{}", last.sums_bytes());
    drop((small, large, others));
    assert_eq!(share.held(), Parts::default());
}

#[test]
fn home_grows_only_if_its_map_fits() {
    let share = Share::new(64 * MIB);
    let memory = home(GIB).reserve(&share, 0).unwrap();
    memory.reach_bytes(64 * GIB).unwrap();
    let (before, parts) = (share.held(), memory.parts());
    let refused = memory.reach_bytes(16 << 40).unwrap_err();
    assert!(refused.needs.tables_bytes > 2 * GIB, "{refused}");
    assert_eq!((share.held(), memory.parts()), (before, parts));
    // A map takes two bits for each block, and three while it is tiered out.
    let map = memory.parts().tables_bytes - memory.sums_bytes() as u64;
    assert!((64 * 150 * KIB..64 * 200 * KIB).contains(&map), "{map}");
}

#[test]
fn volume_over_objects_grows_only_if_its_directory_fits() {
    let share = Share::new(256 * MIB);
    for home_bytes in [None, Some(GIB)] {
        let needs = Needs {
            home_bytes,
            ..objects()
        };
        let memory = needs.reserve(&share, 0).unwrap();
        let before = memory.parts();
        memory.reach_bytes(64 * GIB).unwrap();
        // In storage mode the map of its local store, too.
        let grown = memory.parts().tables_bytes - before.tables_bytes;
        let map = if home_bytes.is_some() {
            63 * 150 * KIB
        } else {
            0
        };
        assert!(grown > map + 350 * KIB, "{home_bytes:?}: {grown}");
        let (held, parts) = (share.held(), memory.parts());
        memory.reach_bytes(4096 << 40).unwrap_err();
        assert_eq!((share.held(), memory.parts()), (held, parts));
    }
}

#[test]
fn volume_over_objects_takes_more_where_there_is_plenty() {
    let of = |mib: u64| {
        let share = Share::new(mib * MIB);
        objects()
            .reserve(&share, 0)
            .map(|memory| memory.objects().unwrap())
    };
    of(48).unwrap_err();
    assert_eq!(of(64).unwrap(), ObjectMemory::least());
    assert_eq!(of(1024).unwrap(), ObjectMemory::most());
    let levels = [of(64), of(150), of(300), of(500), of(1024)].map(Result::unwrap);
    assert!(
        levels.is_sorted_by_key(|level| level.parts().total()),
        "{levels:?}"
    );
    // All of them work, and none has less for its map than a map needs.
    for level in ObjectMemory::LEVELS {
        let mut config = ObjectConfig::new(Access::Existing, 1);
        level.bound(&mut config);
        drop(ObjectVolume::new(config));
        assert!(level.map_bytes >= 16 * MIB && level.map_bytes <= 64 * MIB);
    }
    assert_eq!(ObjectMemory::most().map_bytes, 64 * MIB);
}

#[test]
fn volume_that_opens_first_leaves_the_others_what_they_need_at_least() {
    let usual = plain(512 * MIB);
    let archive = Needs {
        kind: Kind::Objects,
        ..usual
    };
    // In any order: made last, and first after a restart.
    for first in 0..9 {
        let mut needs = [usual; 9];
        needs[first] = archive;
        let share = Share::new(USUAL_BYTES);
        let opened: Vec<_> = (0..needs.len())
            .map(|at| {
                let others = needs[at + 1..].iter().map(|one| one.least_parts().total());
                needs[at].reserve(&share, others.sum()).unwrap()
            })
            .collect();
        assert_eq!(opened.len(), 9);
    }
    // With nobody else it has plenty.
    let alone = archive.reserve(&Share::new(USUAL_BYTES), 0);
    assert_ne!(alone.unwrap().objects().unwrap(), ObjectMemory::least());
}

#[test]
fn home_over_objects_has_large_objects() {
    // What it tiers out between two flushes is no more objects than a manifest names.
    for level in (Needs {
        kind: Kind::Objects,
        ..home(GIB)
    })
    .levels()
    {
        let objects = HOME_TIER_FLUSH_BYTES / (level.batch_blocks * BLOCK_BYTES) as u64;
        assert!(2 * objects <= OBJECT_TAIL_MAX as u64);
    }
}

#[test]
fn log_has_one_entry_for_each_block_and_of_compressed_data_some() {
    let entries = |compressed| {
        let share = Share::new(24 * MIB);
        let needs = Needs {
            compressed,
            ..plain(64 * MIB)
        };
        needs.reserve(&share, 0).unwrap().entries_max() / (64 * MIB / BLOCK_BYTES as u64)
    };
    assert_eq!([entries(false), entries(true)], [1, LOG_BLOCK_ENTRIES_MAX]);
}

#[test]
fn indexes_have_what_is_not_reserved_and_a_part_that_never_is() {
    let share = Share::new(60 * MIB);
    assert_eq!(share.index_bytes(), 54 * MIB);
    let needs = plain(512 * MIB);
    let mut volumes = Vec::new();
    while let Ok(volume) = needs.reserve(&share, 0) {
        volumes.push(volume);
        assert_eq!(
            share.index_bytes() + share.held().total() + RESERVE_BYTES,
            share.bytes()
        );
    }
    assert!(share.index_bytes() >= 10 * MIB, "{}", share.index_bytes());
    assert!(volumes.len() > 70, "{}", volumes.len());
    assert!(!share.is_overdrawn());
    share.note_index_used(0, share.index_bytes() + 1);
    assert!(share.is_overdrawn());
    drop(volumes);
    assert!(!share.is_overdrawn() && share.index_bytes() == 54 * MIB);
    // Small logs leave no more for indexes than they can ever need.
    let small = plain(16 * MIB);
    let volume = small.reserve(&share, 0).unwrap();
    let rest = share.left(&share.lock(), 0);
    assert_eq!(
        rest,
        54 * MIB - volume.parts().total() - small.index_most_bytes()
    );
}

#[test]
fn volume_that_is_alone_can_fill_its_log() {
    for log_mib in [16, 512, 8192] {
        let needs = plain(log_mib * MIB);
        let share = Share::new(needs.share_bytes());
        let _volume = needs.reserve(&share, 0).unwrap();
        let budget = hdcs_core::log::budget::IndexBudget::new(share.index_bytes());
        let index = hdcs_core::log::budget::Share::new(&budget, LOG_INDEX_BYTES_LEAST);
        assert!(index.takes(needs.index_most_bytes() / 4 * 3), "{log_mib}");
    }
}

#[test]
fn clone_reserves_what_it_knows_of_its_origin() {
    let needs = Needs {
        kind: Kind::Rbd,
        ..plain(16 * MIB)
    };
    let taken = RESERVE_BYTES + needs.index_most_bytes();
    let share = Share::new(taken + needs.least_parts().total() + INHERITED_BYTES + MIB);
    let memory = needs.reserve(&share, 0).unwrap();
    memory.reach_inherited(2 << 40).unwrap_err();
    memory.reach_inherited(1 << 40).unwrap();
    assert_eq!(share.held().total() + taken, share.bytes());
    memory
        .reach_inherited(1 << 40)
        .expect("it has that already, if it goes on elsewhere");
}

#[test]
fn usual_cap_has_room_for_what_the_documentation_says() {
    let count = |needs: Needs| {
        let share = Share::new(USUAL_BYTES);
        let mut volumes = Vec::new();
        while let Ok(volume) = needs.reserve(&share, 0) {
            volumes.push(volume);
        }
        volumes.len()
    };
    let usual = plain(512 * MIB);
    assert_eq!(
        [count(usual), count(home(GIB)), count(objects())],
        [520, 14, 4]
    );
    // The first volume on S3 has the largest objects, with the usual log too.
    let first = Needs {
        kind: Kind::Objects,
        ..usual
    };
    let share = Share::new(USUAL_BYTES);
    let first = first.reserve(&share, 0).unwrap().objects().unwrap();
    assert_eq!(first.batch_blocks, OBJECT_BATCH_BLOCKS_MAX);
    let of_all = |needs: Needs| needs.least_parts().total() / KIB;
    assert_eq!([of_all(plain(16 * MIB)), of_all(usual)], [552, 552]);
    // And in 2 GiB for a thousand.
    let share = Share::new(704 * MIB);
    let all: Result<Vec<_>, _> = (0..1000).map(|_| usual.reserve(&share, 0)).collect();
    assert!(all.is_ok() && share.index_bytes() > 128 * MIB);
    let levels = ObjectMemory::LEVELS.map(|level| level.parts().total() / MIB);
    assert_eq!(levels, [47, 62, 112, 190, 329]);
}
