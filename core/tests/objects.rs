//! A volume over objects at its usual size, on a store that never fails: what it costs.

mod bucket;

use bucket::{Bucket, Objects};
use hdcs_core::buf::Pool;
use hdcs_core::limits::{
    OBJECT_BATCH_BLOCKS_MAX, OBJECT_BATCH_BLOCKS_MIN, OBJECT_LAP_STEP, OBJECT_PAGE_BLOCKS_MAX,
    OBJECT_PAGE_BLOCKS_MIN, OBJECT_TAIL_MAX,
};
use hdcs_core::objects::format::Manifest;
use hdcs_core::objects::io::{Ask, Kind};
use hdcs_core::objects::{Access, Config};

/// A new volume.
fn volume(bytes: u64) -> Bucket {
    volume_of_batches(bytes, OBJECT_BATCH_BLOCKS_MAX)
}

/// One whose objects have so many blocks.
fn volume_of_batches(bytes: u64, batch_blocks: usize) -> Bucket {
    let access = Access::Create { uuid: [1; 16] };
    let config = Config {
        bytes: Some(bytes),
        batch_blocks,
        ..Config::new(access, 7)
    };
    Bucket::open(&Objects::default(), "", config, "")
}

/// The last object after the map that the newest manifest names.
fn committed(bucket: &Bucket) -> u64 {
    let objects = bucket.objects.borrow();
    let mut names = objects.iter();
    let newest = names.rfind(|(name, _)| name.starts_with(Kind::Manifest.prefix()));
    let manifest = Manifest::parse(newest.expect("there is one").1).expect("it is whole");
    manifest.tail.last().map_or(0, |entry| entry.number)
}

#[test]
fn objects_random_writes_cost_few_puts_and_little_memory() {
    const MIB: u64 = 1 << 20;
    let blocks = 10 * 1024 * MIB / 4096;
    let mut bucket = volume(blocks * 4096);
    let pool = Pool::new(1 << 20);
    let mut random = fastrand::Rng::with_seed(11);
    let before = bucket.volume.stats();
    for _ in 0..16 {
        for _ in 0..4096 {
            let mut buf = pool.alloc(4096).expect("nothing holds it");
            buf.fill(random.u8(1..));
            let offset = random.u64(0..blocks) * 4096;
            let data = vec![buf.freeze()];
            bucket.ask(Ask::Write { offset, data });
        }
        bucket.ask(Ask::Flush);
    }
    let stats = bucket.volume.stats();
    let puts = |stats: &hdcs_core::objects::Stats| {
        stats.puts_data + stats.puts_map + stats.puts_manifest + stats.puts_other
    };
    // 256 MiB were written.
    let puts_per_gib = (puts(&stats) - puts(&before)) * 4;
    assert!(puts_per_gib <= 150, "{puts_per_gib} puts per GiB");
    let memory = stats.map_memory_bytes;
    // 65,000 blocks are in the map: some in pages, which the cache holds all, and the rest in changes.
    assert!(memory <= 40 * 65_000, "{memory} bytes: {stats:?}");
    bucket.volume.check_map();
}

#[test]
fn objects_read_of_a_block_is_one_get() {
    let mut bucket = volume(1 << 20);
    let pool = Pool::new(1 << 20);
    let mut buf = pool.alloc(64 << 10).expect("free");
    buf.fill(9);
    let data = vec![buf.freeze()];
    bucket.ask(Ask::Write { offset: 0, data });
    bucket.ask(Ask::Flush);
    let before = bucket.volume.stats().gets;
    let buf = pool.alloc(4096).expect("free");
    bucket.ask(Ask::Read { offset: 8192, buf });
    assert_eq!(bucket.volume.stats().gets, before + 1);
    let buf = pool.alloc(64 << 10).expect("free");
    bucket.ask(Ask::Read { offset: 0, buf });
    assert_eq!(bucket.volume.stats().gets, before + 2);
}

/// Even when the map is stored so late that the tail is full: what was written since the last flush goes
/// on to the next one, and nothing before it commits any of it.
#[test]
fn objects_commit_nothing_between_two_flushes() {
    let mut bucket = volume_of_batches(1 << 30, OBJECT_BATCH_BLOCKS_MIN);
    let pool = Pool::new(1 << 20);
    let mut block = 0;
    let mut write = |bucket: &mut Bucket| {
        bucket.fill(&pool, block, OBJECT_BATCH_BLOCKS_MIN, 7);
        block += OBJECT_BATCH_BLOCKS_MIN as u64;
    };
    bucket.holds_map = true;
    for _ in 0..OBJECT_TAIL_MAX - 100 {
        write(&mut bucket);
    }
    bucket.ask(Ask::Flush);
    let flushed = committed(&bucket);
    assert!(!bucket.held.is_empty(), "the map is being stored");
    for _ in 0..300 {
        write(&mut bucket);
    }
    assert_eq!(committed(&bucket), flushed);
    bucket.release_map();
    assert_eq!(committed(&bucket), flushed, "with the map as it was then");
    bucket.ask(Ask::Flush);
    assert!(committed(&bucket) >= flushed + 300);
    bucket.volume.check_map();
}

/// However many objects there are, and yet all of them are seen in the end.
#[test]
fn objects_commit_looks_at_a_bounded_part_of_them() {
    let batches = 3 * OBJECT_LAP_STEP as u64;
    let batch = OBJECT_BATCH_BLOCKS_MIN;
    let mut bucket = volume_of_batches(batches * (batch * 4096) as u64, batch);
    let pool = Pool::new(1 << 20);
    for index in 0..batches {
        bucket.fill(&pool, index * batch as u64, batch, 7);
    }
    bucket.ask(Ask::Flush);
    let mut seen = 0;
    for round in 0..20_u64 {
        let before = bucket.volume.stats().objects_looked_at;
        bucket.fill(&pool, round % batches * batch as u64, batch, 9);
        bucket.ask(Ask::Flush);
        let looked_at = bucket.volume.stats().objects_looked_at - before;
        assert!(looked_at <= OBJECT_LAP_STEP as u64, "{looked_at} objects");
        seen += looked_at;
    }
    assert!(seen >= batches, "{seen} of {batches}");
    // Most of what is stored dies; all of that is found, and freed.
    for round in 0..4 * batches {
        bucket.fill(&pool, round % 64 * batch as u64, batch, 9);
        if round % 32 == 0 {
            bucket.ask(Ask::Flush);
        }
    }
    let stats = bucket.volume.stats();
    let live = stats.live_blocks * 4100;
    assert!(stats.stored_bytes < live * 2, "{stats:?}");
}

/// However many pages change: a turn merges a bounded part of them, and what is written meanwhile is for the next time.
#[test]
fn objects_map_is_stored_in_turns_of_bounded_work() {
    const PAGES: u64 = 1500;
    let page_blocks = u64::from(OBJECT_PAGE_BLOCKS_MAX);
    let mut bucket = volume_of_batches(PAGES * page_blocks * 4096, OBJECT_BATCH_BLOCKS_MIN);
    let pool = Pool::new(1 << 20);
    let mut longest = 0;
    for round in 0..4_u64 {
        for page in 0..PAGES {
            // A run of one object in each page.
            let byte = 1 + (page % 200) as u8;
            bucket.fill(&pool, page * page_blocks + round, 1, byte);
            longest = longest.max(bucket.longest_merge);
        }
        bucket.ask(Ask::Flush);
    }
    let merged = bucket.volume.stats().pages_merged;
    assert!(merged > 2 * PAGES, "stored more than once: {merged}");
    assert!(longest > 0 && longest <= 64, "{longest} pages in a turn");
    bucket.volume.check_map();
    let objects = std::rc::Rc::clone(&bucket.objects);
    drop(bucket);
    let config = Config {
        batch_blocks: OBJECT_BATCH_BLOCKS_MIN,
        ..Config::new(Access::Existing, 8)
    };
    let mut bucket = Bucket::open(&objects, "", config, "");
    for page in (0..PAGES).step_by(7) {
        for round in 0..4 {
            let data = bucket.read(&pool, page * page_blocks + round);
            assert_eq!(data[0], 1 + (page % 200) as u8, "page {page}");
        }
    }
    bucket.volume.check_map();
}

/// Objects that died since the map was stored are in the tail, and stay: a commit does not look at them again and
/// again.
#[test]
fn objects_commit_does_not_look_at_the_dead_that_must_stay() {
    const ROUNDS: u64 = 4096;
    let batch = OBJECT_BATCH_BLOCKS_MIN;
    let mut bucket = volume_of_batches(64 << 20, batch);
    let pool = Pool::new(1 << 20);
    bucket.holds_map = true;
    for round in 0..ROUNDS {
        // Each of them kills the one before.
        bucket.fill(&pool, 0, batch, 7);
        if round % 16 == 0 {
            bucket.ask(Ask::Flush);
        }
    }
    bucket.release_map();
    for _ in 0..256 {
        bucket.fill(&pool, 0, batch, 7);
        bucket.ask(Ask::Flush);
    }
    let stats = bucket.volume.stats();
    assert!(stats.deletes > ROUNDS, "they go in the end: {stats:?}");
    // Each of them once, more or less, when it may go.
    assert!(stats.dead_looked_at <= 2 * ROUNDS, "{stats:?}");
}

/// A page that was emptied stays empty, although an older object of the map, which is needed for another page, has it.
#[test]
fn objects_page_that_was_emptied_does_not_come_back() {
    let page_blocks = u64::from(OBJECT_PAGE_BLOCKS_MIN);
    let access = Access::Create { uuid: [1; 16] };
    let config = |access| Config {
        bytes: Some(64 * page_blocks * 4096),
        batch_blocks: OBJECT_BATCH_BLOCKS_MIN,
        page_blocks: OBJECT_PAGE_BLOCKS_MIN,
        changes_max: 2,
        ..Config::new(access, 7)
    };
    let mut bucket = Bucket::open(&Objects::default(), "", config(access), "");
    let pool = Pool::new(1 << 20);
    for page in 0..8 {
        bucket.fill(&pool, page * page_blocks, 1, 7);
    }
    bucket.ask(Ask::Flush);
    let bytes = page_blocks * 4096;
    bucket.ask(Ask::Zero {
        offset: bytes,
        bytes,
    });
    bucket.ask(Ask::Flush);
    bucket.fill(&pool, 9 * page_blocks, 1, 7);
    bucket.ask(Ask::Flush);
    assert!(bucket.volume.stats().pages_merged >= 9, "they are stored");
    let objects = std::rc::Rc::clone(&bucket.objects);
    drop(bucket);
    let config = Config {
        bytes: None,
        ..config(Access::Existing)
    };
    let mut bucket = Bucket::open(&objects, "", config, "");
    let first = [0, 1, 2, 9].map(|page| bucket.read(&pool, page * page_blocks)[0]);
    assert_eq!(first, [7, 0, 7, 7]);
    bucket.volume.check_map();
}
