//! A volume over objects that are compressed, on a store that never fails: what it holds and costs.

use std::rc::Rc;
use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::codec::Method;
use hdcs_core::objects::format::DataFooter;
use hdcs_core::objects::io::{Ask, SnapshotName};
use hdcs_core::objects::{Access, Config};
use hdcs_kit::bucket::{Bucket, Objects};
use zerocopy::FromBytes;

const PLACE: &str = "bucket/volume/";

fn config(access: Access, batch_blocks: usize) -> Config {
    Config {
        batch_blocks,
        bytes: matches!(access, Access::Create { .. }).then_some(64 << 20),
        ..Config::new(access, 7)
    }
}

fn open(objects: &Objects, access: Access, method: Option<Method>) -> Bucket {
    let mut bucket = Bucket::open(objects, PLACE, config(access, 256), "");
    bucket.volume.set_compression(method);
    bucket
}

fn create(method: Option<Method>) -> Bucket {
    let access = Access::Create { uuid: [1; 16] };
    open(&Objects::default(), access, method)
}

/// Bytes of all data objects.
fn data_bytes(bucket: &Bucket) -> usize {
    let objects = bucket.objects.borrow();
    let data = objects.iter().filter(|(name, _)| name.contains("/data/"));
    data.map(|(_, bytes)| bytes.len()).sum()
}

/// How many data objects are compressed, and how many are not.
fn kinds(bucket: &Bucket) -> (usize, usize) {
    let objects = bucket.objects.borrow();
    let data = objects.iter().filter(|(name, _)| name.contains("/data/"));
    let footers = data.map(|(_, bytes)| DataFooter::read_from_suffix(bytes).expect("it is long").1);
    let (compressed, plain): (Vec<_>, Vec<_>) = footers.partition(DataFooter::is_compressed);
    (compressed.len(), plain.len())
}

/// Fill every block with what `byte` says of it, in pieces of 64.
fn fill(bucket: &mut Bucket, pool: &Arc<Pool>, blocks: u64, byte: impl Fn(u64) -> u8) {
    for first in (0..blocks).step_by(64) {
        let mut buf = pool.alloc(64 * 4096).expect("nothing holds it");
        for (index, block) in (first..).zip(buf.chunks_mut(4096)) {
            block.fill(byte(index));
        }
        let data = vec![buf.freeze()];
        let offset = first * 4096;
        bucket.ask(Ask::Write { offset, data });
    }
    bucket.ask(Ask::Flush);
}

fn check(bucket: &mut Bucket, pool: &Arc<Pool>, blocks: u64, byte: impl Fn(u64) -> u8) {
    for block in 0..blocks {
        let data = bucket.read(pool, block);
        assert!(data.iter().all(|&b| b == byte(block)), "block {block}");
    }
}

#[test]
fn a_compressed_volume_is_smaller_and_reads_the_same_after_opening_again() {
    let pool = Pool::new(1 << 20);
    for method in Method::ALL {
        let mut bucket = create(Some(method));
        fill(&mut bucket, &pool, 1024, |block| block as u8);
        assert!(data_bytes(&bucket) < 1024 * 4096 / 50);
        assert_eq!(
            bucket.volume.stats().stored_bytes,
            data_bytes(&bucket) as u64
        );
        check(&mut bucket, &pool, 1024, |block| block as u8);
        let objects = Rc::clone(&bucket.objects);
        // Whatever its setting is now.
        let mut bucket = open(&objects, Access::Existing, None);
        check(&mut bucket, &pool, 1024, |block| block as u8);
        assert_eq!(bucket.volume.memory_bytes(), 0);
        bucket.volume.check_map();
    }
}

#[test]
fn a_read_of_a_block_is_one_get_once_the_frames_are_known() {
    let pool = Pool::new(1 << 20);
    let mut bucket = create(Some(Method::Lz4));
    fill(&mut bucket, &pool, 1024, |block| block as u8);
    let gets = |bucket: &mut Bucket, block| {
        let before = (bucket.volume.stats().gets, bucket.bytes_got);
        bucket.read(&pool, block);
        let after = (bucket.volume.stats().gets, bucket.bytes_got);
        (after.0 - before.0, after.1 - before.1)
    };
    // What was put by this owner is known: 16 blocks, 81 bytes.
    assert_eq!(gets(&mut bucket, 700), (1, 81));
    let objects = Rc::clone(&bucket.objects);
    let mut bucket = open(&objects, Access::Existing, None);
    assert_eq!(gets(&mut bucket, 300), (2, 576 + 81));
    assert_eq!(gets(&mut bucket, 511), (1, 81));
    // A long read: whole frames, and none of them twice.
    let before = (bucket.volume.stats().gets, bucket.bytes_got);
    let buf = pool.alloc(255 * 4096).expect("nothing holds it");
    bucket.ask(Ask::Read {
        offset: 257 * 4096,
        buf,
    });
    let after = (bucket.volume.stats().gets, bucket.bytes_got);
    assert_eq!((after.0 - before.0, after.1 - before.1), (3, 16 * 81));
}

#[test]
fn the_setting_takes_effect_with_the_next_object_and_older_ones_stay() {
    let pool = Pool::new(1 << 20);
    let mut bucket = create(None);
    fill(&mut bucket, &pool, 256, |_| 1);
    let plain = data_bytes(&bucket);
    assert!(plain > 256 * 4096);
    assert_eq!(kinds(&bucket), (0, 1));
    bucket.volume.set_compression(Some(Method::Lz4));
    fill(&mut bucket, &pool, 128, |_| 2);
    assert!(data_bytes(&bucket) < plain + 16384);
    assert_eq!(kinds(&bucket), (1, 1));
    bucket.volume.set_compression(Some(Method::Zstd));
    fill(&mut bucket, &pool, 64, |_| 3);
    bucket.volume.set_compression(None);
    bucket.fill(&pool, 7, 20, 4);
    bucket.ask(Ask::Flush);
    assert_eq!(kinds(&bucket), (2, 2), "older ones are still there");
    let byte = |block| match block {
        7..27 => 4,
        0..64 => 3,
        64..128 => 2,
        _ => 1,
    };
    check(&mut bucket, &pool, 256, byte);
    let objects = Rc::clone(&bucket.objects);
    let mut bucket = open(&objects, Access::Existing, None);
    check(&mut bucket, &pool, 256, byte);
    bucket.fill(&pool, 300, 1, 5);
    bucket.ask(Ask::Flush);
    check(&mut bucket, &pool, 256, byte);
}

#[test]
fn a_part_of_a_stored_block_is_written_over_the_rest_of_it() {
    let pool = Pool::new(1 << 20);
    let mut bucket = create(Some(Method::Zstd));
    fill(&mut bucket, &pool, 256, |_| 1);
    let objects = Rc::clone(&bucket.objects);
    let mut bucket = open(&objects, Access::Existing, Some(Method::Zstd));
    let mut buf = pool.alloc(512).expect("nothing holds it");
    buf.fill(2);
    let data = vec![buf.freeze()];
    bucket.ask(Ask::Write {
        offset: 20 * 4096 + 512,
        data,
    });
    let block = bucket.read(&pool, 20);
    assert!(
        block[..512]
            .iter()
            .chain(&block[1024..])
            .all(|&byte| byte == 1)
    );
    assert!(block[512..1024].iter().all(|&byte| byte == 2));
}

#[test]
fn snapshots_and_clones_read_what_their_parent_has_compressed() {
    let pool = Pool::new(1 << 20);
    let mut parent = create(Some(Method::Zstd));
    fill(&mut parent, &pool, 256, |block| block as u8);
    let name = SnapshotName::new("a").expect("a name");
    parent.ask(Ask::Snapshot { name, made_ms: 1 });
    fill(&mut parent, &pool, 256, |_| 9);
    let objects = Rc::clone(&parent.objects);
    let access = Access::Clone {
        uuid: [9; 16],
        snapshot: name,
    };
    let mut clone = Bucket::open(&objects, "bucket/clone/", config(access, 256), PLACE);
    clone.fill(&pool, 3, 1, 77);
    clone.ask(Ask::Flush);
    check(&mut clone, &pool, 256, |block| {
        if block == 3 { 77 } else { block as u8 }
    });
    let snapshot = config(Access::Snapshot(name), 256);
    let mut snapshot = Bucket::open(&objects, PLACE, snapshot, "");
    check(&mut snapshot, &pool, 256, |block| block as u8);
    check(&mut parent, &pool, 256, |_| 9);
}

#[test]
fn garbage_of_compressed_objects_is_known_after_opening_again_and_freed() {
    let pool = Pool::new(1 << 20);
    let mut bucket = create(Some(Method::Lz4));
    let blocks = 8192;
    let mut random = fastrand::Rng::with_seed(3);
    // Every second frame shrinks.
    for first in (0..blocks).step_by(64) {
        let mut buf = pool.alloc(64 * 4096).expect("nothing holds it");
        for frame in buf.chunks_mut(32 * 4096) {
            random.fill(&mut frame[..16 * 4096]);
            frame[16 * 4096..].fill(1);
        }
        let data = vec![buf.freeze()];
        let offset = first * 4096;
        bucket.ask(Ask::Write { offset, data });
    }
    bucket.ask(Ask::Flush);
    let objects = Rc::clone(&bucket.objects);
    let mut bucket = open(&objects, Access::Existing, Some(Method::Lz4));
    // The ends of objects die: what the map has left of them does not tell how large they were.
    for object in 0..blocks / 256 {
        bucket.fill(&pool, object * 256 + 96, 160, 5);
    }
    bucket.ask(Ask::Flush);
    // It is known once the map is stored, and freed once it is stored again.
    for round in 0..200 {
        bucket.fill(&pool, 9000, 16, round);
        bucket.ask(Ask::Flush);
    }
    bucket.volume.check_map();
    let stats = bucket.volume.stats();
    assert!(stats.copied_blocks > 0, "{stats:?}");
    assert_eq!(stats.stored_bytes, data_bytes(&bucket) as u64);
    let live = blocks / 256 * 48 * 4100;
    assert!(stats.stored_bytes < live * 17 / 10, "{live} of {stats:?}");
    // One that was written whole, however small it is now, is no small object to be copied for ever.
    let before = bucket.volume.stats().copied_blocks;
    for round in 0..20 {
        bucket.fill(&pool, 9000, 16, round);
        bucket.ask(Ask::Flush);
    }
    let after = bucket.volume.stats().copied_blocks;
    assert!(after < before + 4096, "{} blocks more", after - before);
}
