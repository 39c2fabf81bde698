//! A volume over objects at its usual size, on a store that never fails: what it costs.

use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{
    OBJECT_BATCH_BLOCKS_MAX, OBJECT_BATCH_BLOCKS_MIN, OBJECT_LAP_STEP, OBJECT_MAP_PAGES_MAX,
    OBJECT_PAGE_BLOCKS_MAX, OBJECT_PAGE_BLOCKS_MIN, OBJECT_TAIL_MAX,
};
use hdcs_core::objects::format::{Manifest, parse_page};
use hdcs_core::objects::io::{Ask, Kind, Name, OpenError, Phase, SnapshotName};
use hdcs_core::objects::{Access, Config};
use hdcs_kit::bucket::{Bucket, Objects};

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

/// However many objects there are and however few commits: what dies in them is freed as fast as it dies.
#[test]
fn objects_are_freed_as_fast_as_they_die() {
    const OBJECTS: u64 = 8 * OBJECT_LAP_STEP as u64;
    const WRITES: u64 = 512;
    let batch = OBJECT_BATCH_BLOCKS_MIN as u64;
    let blocks = OBJECTS * batch;
    let mut bucket = volume_of_batches(blocks * 4096, OBJECT_BATCH_BLOCKS_MIN);
    let pool = Pool::new(1 << 20);
    for block in (0..blocks).step_by(64) {
        bucket.fill(&pool, block, 64, 7);
    }
    bucket.ask(Ask::Flush);
    let mut random = fastrand::Rng::with_seed(3);
    let mut most = 0.0_f64;
    for round in 0..5 * blocks / WRITES {
        for _ in 0..WRITES {
            bucket.fill(&pool, random.u64(0..blocks), 1, 9);
        }
        bucket.ask(Ask::Flush);
        let stats = bucket.volume.stats();
        let part = stats.stored_bytes as f64 / (stats.live_blocks * 4100) as f64;
        if round > blocks / WRITES {
            most = most.max(part);
        }
    }
    // Of what is stored 40 % may be garbage, and some more while it is being found and copied.
    assert!(most < 2.1, "{most}");
    bucket.volume.check_map();
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

/// While an object of the map is not stored, storing the map does not keep the turn of a get that it does not begin:
/// reads go on.
#[test]
fn objects_reads_go_on_while_the_map_cannot_be_stored() {
    let page_blocks = u64::from(OBJECT_PAGE_BLOCKS_MIN);
    // Every second page is more than an object of the map holds.
    let pages = 2 * (OBJECT_MAP_PAGES_MAX as u64 + 512);
    let config = Config {
        bytes: Some(pages * page_blocks * 4096),
        batch_blocks: 256,
        page_blocks: OBJECT_PAGE_BLOCKS_MIN,
        map_cache_bytes: 64 << 10,
        changes_max: pages as usize,
        gets_in_flight_max: 1,
        ..Config::new(Access::Create { uuid: [1; 16] }, 7)
    };
    let mut bucket = Bucket::open(&Objects::default(), "", config, "");
    let pool = Pool::new(1 << 20);
    let write = |bucket: &mut Bucket, first: u64, step: usize, byte: u8| {
        for page in (first..pages).step_by(step) {
            bucket.fill(&pool, page * page_blocks, 1, byte);
        }
        bucket.ask(Ask::Flush);
    };
    write(&mut bucket, 0, 1, 7);
    // The second half of them is stored, too.
    write(&mut bucket, 1, 2, 8);
    let merged = bucket.volume.stats().pages_merged;
    bucket.holds_map = true;
    write(&mut bucket, 0, 2, 9);
    assert_eq!(bucket.held.len(), 1, "an object of the map is being put");
    let stats = bucket.volume.stats();
    assert!(
        stats.pages_merged - merged < pages / 2,
        "and others are to follow"
    );
    for page in 0..64 {
        let data = bucket.read(&pool, page * page_blocks);
        assert_eq!(data[0], if page % 2 == 0 { 9 } else { 8 });
    }
    bucket.release_map();
    bucket.volume.check_map();
}

/// A volume whose map has many pages, and is stored after every few changes.
fn with_small_pages(access: Access) -> Config {
    Config {
        batch_blocks: OBJECT_BATCH_BLOCKS_MIN,
        page_blocks: OBJECT_PAGE_BLOCKS_MIN,
        changes_max: 2,
        ..Config::new(access, 7)
    }
}

/// A page of the map that is damaged keeps the objects of its blocks from being copied, and no others, and is in
/// the way of no other page.
#[test]
fn objects_go_on_beside_a_page_of_the_map_that_is_damaged() {
    const PAGES: u64 = 64;
    let batch = OBJECT_BATCH_BLOCKS_MIN;
    let new = Config {
        bytes: Some((PAGES + 8) * (batch * 4096) as u64),
        ..with_small_pages(Access::Create { uuid: [1; 16] })
    };
    let mut bucket = Bucket::open(&Objects::default(), "", new, "");
    let pool = Pool::new(1 << 20);
    // An object for each page. Of that of the first page one block stays, so that it is the first to be copied.
    for page in 0..PAGES {
        bucket.fill(&pool, page * batch as u64, batch, 7);
    }
    bucket.ask(Ask::Flush);
    bucket.fill(&pool, 1, batch - 1, 8);
    // Until that is in its page.
    for round in 0..4 {
        bucket.fill(&pool, PAGES * batch as u64, batch, round);
        bucket.ask(Ask::Flush);
    }
    let objects = std::rc::Rc::clone(&bucket.objects);
    let volume = bucket.volume.uuid();
    drop(bucket);
    damage_page(&objects, volume, 0);

    let mut bucket = Bucket::open(&objects, "", with_small_pages(Access::Existing), "");
    for page in 1..PAGES {
        bucket.fill(&pool, page * batch as u64 + 1, batch - 1, 9);
        bucket.ask(Ask::Flush);
    }
    for round in 0..64 {
        bucket.fill(&pool, PAGES * batch as u64, batch, round);
        bucket.ask(Ask::Flush);
    }
    let stats = bucket.volume.stats();
    assert!(stats.damaged_pages > 0, "it was seen: {stats:?}");
    // Of what is stored 40 % may be garbage.
    let live = stats.live_blocks * 4100;
    assert!(stats.copied_blocks > 0, "{stats:?}");
    assert!(stats.stored_bytes < live * 7 / 4, "{stats:?}");
    for page in 1..PAGES {
        let block = page * batch as u64;
        let data = [block, block + 1].map(|block| bucket.read(&pool, block)[0]);
        assert_eq!(data, [7, 9], "page {page}");
    }
    // What is on it is lost, but what is written to it from now on.
    bucket.fill(&pool, 3, 1, 5);
    for round in 0..8 {
        bucket.fill(&pool, PAGES * batch as u64, batch, round);
        bucket.ask(Ask::Flush);
    }
    assert_eq!(bucket.volume.stats().lost_pages, 1);
    bucket.volume.check_map();
    drop(bucket);
    let mut bucket = Bucket::open(&objects, "", with_small_pages(Access::Existing), "");
    assert_eq!(bucket.read(&pool, 3)[0], 5);
    for block in [0, 1, 2, 4, 7] {
        let buf = pool.alloc(4096).expect("nothing holds it");
        let offset = block * 4096;
        assert!(!bucket.try_to(Ask::Read { offset, buf }), "block {block}");
    }
    bucket.fill(&pool, 0, batch, 6);
    bucket.ask(Ask::Flush);
    assert_eq!([0, 3, 7].map(|block| bucket.read(&pool, block)[0]), [6; 3]);
    bucket.volume.check_map();
}

/// However many pages are damaged, writes wait for a minute in all, not for one for each.
#[test]
fn objects_damaged_pages_are_given_up_together() {
    const PAGES: u64 = 16;
    let batch = OBJECT_BATCH_BLOCKS_MIN;
    let with = |access| Config {
        changes_max: 8 * PAGES as usize,
        ..with_small_pages(access)
    };
    let new = Config {
        bytes: Some((PAGES + 8) * (batch * 4096) as u64),
        ..with(Access::Create { uuid: [1; 16] })
    };
    let mut bucket = Bucket::open(&Objects::default(), "", new, "");
    let pool = Pool::new(1 << 20);
    for page in 0..PAGES {
        bucket.fill(&pool, page * batch as u64, batch, 7);
    }
    // Until all that is in its pages.
    for round in 0..64 {
        bucket.fill(&pool, PAGES * batch as u64, batch, round);
        bucket.ask(Ask::Flush);
    }
    let objects = std::rc::Rc::clone(&bucket.objects);
    let volume = bucket.volume.uuid();
    drop(bucket);
    for page in 0..PAGES {
        damage_page(&objects, volume, page);
    }
    let mut bucket = Bucket::open(&objects, "", with(Access::Existing), "");
    for page in 0..PAGES {
        bucket.fill(&pool, page * batch as u64, 1, 9);
    }
    for round in 0..128 {
        bucket.fill(&pool, PAGES * batch as u64, batch, round);
        bucket.ask(Ask::Flush);
    }
    let stats = bucket.volume.stats();
    assert_eq!(stats.lost_pages, PAGES, "{stats:?}");
    assert!(bucket.now < Nanos::from_millis(90_000), "{:?}", bucket.now);
    for page in 0..PAGES {
        assert_eq!(bucket.read(&pool, page * batch as u64)[0], 9);
    }
    bucket.volume.check_map();
}

/// A damaged page all of whose blocks are written over is not needed.
#[test]
fn objects_damaged_page_is_healed_by_writing_all_of_it() {
    let batch = OBJECT_BATCH_BLOCKS_MIN;
    let new = Config {
        bytes: Some(64 << 20),
        ..with_small_pages(Access::Create { uuid: [1; 16] })
    };
    let mut bucket = Bucket::open(&Objects::default(), "", new, "");
    let pool = Pool::new(1 << 20);
    for round in 0..4 {
        bucket.fill(&pool, 0, batch, round);
        bucket.ask(Ask::Flush);
    }
    let objects = std::rc::Rc::clone(&bucket.objects);
    let volume = bucket.volume.uuid();
    drop(bucket);
    damage_page(&objects, volume, 0);
    let mut bucket = Bucket::open(&objects, "", with_small_pages(Access::Existing), "");
    bucket.fill(&pool, 0, batch, 9);
    for round in 0..4 {
        bucket.ask(Ask::Flush);
        bucket.fill(&pool, 64, batch, round);
    }
    drop(bucket);
    let mut bucket = Bucket::open(&objects, "", with_small_pages(Access::Existing), "");
    assert_eq!([0, 7].map(|block| bucket.read(&pool, block)[0]), [9; 2]);
    assert_eq!(bucket.volume.stats().lost_pages, 0);
    bucket.volume.check_map();
}

/// A turn takes a bounded number of changes out of the map, whatever is discarded, and when they are merged.
#[test]
fn objects_changes_are_forgotten_in_turns_of_bounded_work() {
    const WRITES: u64 = 100_000;
    let access = Access::Create { uuid: [1; 16] };
    let config = Config {
        bytes: Some(4 * WRITES * 4096),
        batch_blocks: 256,
        map_cache_bytes: 64 << 10,
        ..Config::new(access, 7)
    };
    let mut bucket = Bucket::open(&Objects::default(), "", config, "");
    let pool = Pool::new(1 << 20);
    let all = Ask::Zero {
        offset: 0,
        bytes: 4 * WRITES * 4096,
    };
    let write = |bucket: &mut Bucket| {
        for block in 0..WRITES {
            bucket.fill(&pool, block * 2, 1, 7);
        }
        bucket.ask(Ask::Flush);
    };
    // While the map cannot be stored there are many of them.
    bucket.holds_map = true;
    write(&mut bucket);
    bucket.ask(all);
    bucket.ask(Ask::Flush);
    assert_eq!(bucket.read(&pool, 2 * WRITES - 2)[0], 0);
    write(&mut bucket);
    bucket.release_map();
    for round in 0..4 {
        bucket.fill(&pool, 2 * WRITES, 256, round);
        bucket.ask(Ask::Flush);
    }
    let merged = bucket.volume.stats().pages_merged;
    assert!(merged > 2 * WRITES / 1024, "{merged} pages are stored");
    assert_eq!(bucket.read(&pool, 2 * WRITES - 2)[0], 7);
    let changes = bucket.longest_forgetting / 32;
    assert!((1000..20_000).contains(&changes), "{changes}");
    bucket.volume.check_map();
}

/// A clone that has written over all that it inherited, and stored its map since, has inherited nothing: nor where
/// nothing is now, and neither it nor its parent ever stored a page.
#[test]
fn objects_clone_knows_what_it_has_zeroed_when_it_opens_again() {
    const OBJECTS: u64 = 63;
    let batch = OBJECT_BATCH_BLOCKS_MIN as u64;
    let access = Access::Create { uuid: [1; 16] };
    let config = Config {
        bytes: Some(OBJECTS * batch * 4096),
        ..Config::new(access, 7)
    };
    let mut parent = Bucket::open(&Objects::default(), "parent/", config, "");
    let pool = Pool::new(1 << 20);
    for object in 0..OBJECTS {
        parent.fill(&pool, object * batch, batch as usize, 7);
        parent.ask(Ask::Flush);
    }
    assert_eq!(
        parent.volume.stats().puts_map,
        0,
        "all of it is in its tail"
    );
    let name = SnapshotName::new("a").expect("a name");
    parent.ask(Ask::Snapshot { name, made_ms: 1 });
    let access = Access::Clone {
        uuid: [9; 16],
        snapshot: name,
    };
    let mut clone = Bucket::open(&parent.objects, "clone/", Config::new(access, 8), "parent/");
    let blocks = OBJECTS * batch;
    let inherited = |clone: &Bucket| -> u64 {
        let runs = clone.volume.inherited_runs().into_iter();
        runs.map(|(_, count)| count).sum()
    };
    assert_eq!(inherited(&clone), blocks);
    let bytes = blocks * 4096;
    clone.ask(Ask::Zero { offset: 0, bytes });
    for _ in 0..2 {
        clone.ask(Ask::Flush);
    }
    assert_eq!(clone.volume.stats().puts_map, 0, "no page is stored");
    drop(clone);
    let existing = Config::new(Access::Existing, 9);
    let mut clone = Bucket::open(&parent.objects, "clone/", existing, "");
    assert_eq!(inherited(&clone), 0);
    assert_eq!(clone.read(&pool, 0)[0], 0);
}

/// A place that was given up and removed is used again, beside a node that still has the volume of before open.
#[test]
fn objects_of_a_new_volume_are_out_of_reach_of_owners_of_the_one_that_was_given_up_there() {
    let objects = Objects::default();
    let batch = OBJECT_BATCH_BLOCKS_MIN;
    let new = |uuid| Config {
        bytes: Some(1 << 20),
        uuid: Some(uuid),
        batch_blocks: batch,
        ..Config::new(Access::Create { uuid }, u64::from(uuid[0]))
    };
    let pool = Pool::new(1 << 20);
    let mut old = Bucket::open(&objects, "", new([1; 16]), "");
    old.fill(&pool, 0, batch, 1);
    old.ask(Ask::Flush);
    let mut next = Bucket::open(&objects, "", Config::new(Access::Existing, 5), "");
    next.ask(Ask::GiveUp);
    let bytes = objects.borrow().last_key_value().expect("one").1.clone();
    let gone = Manifest::parse(&bytes).expect("it is whole");
    assert!(gone.gone);
    let before: Vec<String> = objects.borrow().keys().cloned().collect();
    // As a removal leaves it.
    let stays = |name: &str| {
        let name = Name::parse(name).expect("a name");
        let begins = gone.beginnings.contains(&name.number);
        name.kind == Kind::Manifest && (begins || name.number == gone.sequence)
    };
    objects.borrow_mut().retain(|name, _| stays(name));

    let mut other = Bucket::open(&objects, "", new([2; 16]), "");
    other.fill(&pool, 0, batch, 2);
    other.ask(Ask::Flush);
    let made = objects.borrow();
    let again = before.iter().filter(|name| made.contains_key(*name));
    assert!(again.into_iter().all(|name| stays(name)));
    drop(made);
    old.fill(&pool, 0, batch, 3);
    assert!(!old.try_to(Ask::Flush), "it is fenced");
    other.fill(&pool, 1, 1, 4);
    other.ask(Ask::Flush);
    drop((old, next, other));
    let mut other = Bucket::open(&objects, "", Config::new(Access::Existing, 6), "");
    assert_eq!(other.volume.uuid(), [2; 16]);
    assert_eq!([0, 1].map(|block| other.read(&pool, block)[0]), [2, 4]);
}

/// A volume of 1 MiB that is made.
fn new_volume(uuid: [u8; 16]) -> Config {
    Config {
        bytes: Some(1 << 20),
        uuid: Some(uuid),
        ..Config::new(Access::Create { uuid }, uuid[0].into())
    }
}

/// A volume at `parent/` with a snapshot, and how a clone of that is made.
fn parent_and_clone(objects: &Objects) -> (Bucket, Config) {
    let mut parent = Bucket::open(objects, "parent/", new_volume([1; 16]), "");
    let name = SnapshotName::new("a").expect("a name");
    parent.ask(Ask::Snapshot { name, made_ms: 1 });
    let (uuid, snapshot) = ([9; 16], name);
    (parent, Config::new(Access::Clone { uuid, snapshot }, 8))
}

#[test]
fn objects_of_another_volume_at_the_place_of_a_new_clone_are_left_to_their_owner() {
    for is_there_before in [false, true] {
        let objects = Objects::default();
        let (_parent, clone) = parent_and_clone(&objects);
        let make: fn(&Objects) = |objects| {
            let mut other = Bucket::open(objects, "place/", new_volume([2; 16]), "");
            other.fill(&Pool::new(1 << 20), 0, 1, 1);
            other.ask(Ask::Flush);
        };
        let mut meanwhile = make;
        if is_there_before {
            make(&objects);
            meanwhile = |_| {};
        }
        let clone = Bucket::open_beside(&objects, "place/", clone, "parent/", meanwhile);
        let refused = Phase::Failed(OpenError::OtherVolume);
        assert_eq!(clone.volume.phase(), refused);
        let manifests = || {
            let objects = objects.borrow();
            let names = objects
                .keys()
                .filter_map(|name| name.strip_prefix("place/"));
            let is_manifest = |name: &Name| name.kind == Kind::Manifest;
            names.filter_map(Name::parse).filter(is_manifest).count()
        };
        assert_eq!(manifests(), 2, "one that begins an epoch, and one commit");
    }
}

/// A clone is begun at the place of a volume that is given up. Who deletes that may commit it once more meanwhile.
#[test]
fn objects_of_a_volume_that_is_given_up_once_more_do_not_stop_a_new_clone_at_its_place() {
    let objects = Objects::default();
    let (_parent, clone) = parent_and_clone(&objects);
    let mut old = Bucket::open(&objects, "place/", new_volume([2; 16]), "");
    old.ask(Ask::GiveUp);
    let once_more: fn(&Objects) = |objects| {
        let newest = objects.borrow().last_key_value().expect("one").1.clone();
        let mut gone = Manifest::parse(&newest).expect("it is whole");
        assert!(gone.gone);
        gone.sequence += 1;
        let mut bytes = vec![0; gone.encoded_bytes()];
        gone.write(&mut bytes);
        let name = format!("place/{}", Name::own(Kind::Manifest, gone.sequence));
        objects.borrow_mut().insert(name, bytes);
    };
    let clone = Bucket::open_beside(&objects, "place/", clone, "parent/", once_more);
    assert_eq!(clone.volume.phase(), Phase::Open);
    assert_eq!(clone.volume.uuid(), [9; 16]);
}

/// Giving a clone up fails, before or after its manifest says so: whoever still has it open gets no write or flush
/// acknowledged, since nobody can open it any more; asking again ends what was begun.
#[test]
fn objects_volume_that_is_being_given_up_takes_no_writes_although_that_failed() {
    for fails_manifests in [true, false] {
        let objects = Objects::default();
        let config = Config {
            bytes: Some(1 << 20),
            ..Config::new(Access::Create { uuid: [1; 16] }, 7)
        };
        let pool = Pool::new(1 << 20);
        let mut parent = Bucket::open(&objects, "parent/", config, "");
        parent.fill(&pool, 0, 1, 1);
        parent.ask(Ask::Flush);
        let snapshot = SnapshotName::new("a").expect("a name");
        parent.ask(Ask::Snapshot {
            name: snapshot,
            made_ms: 1,
        });
        let uuid = [9; 16];
        let config = Config::new(Access::Clone { uuid, snapshot }, 8);
        let mut clone = Bucket::open(&objects, "clone/", config, "parent/");
        clone.fill(&pool, 1, 1, 2);
        clone.ask(Ask::Flush);
        clone.fails_manifests = fails_manifests;
        clone.fails_deletes = !fails_manifests;
        assert!(!clone.try_to(Ask::GiveUp));
        for offset in [0, 2 * 4096] {
            let data = vec![pool.alloc(4096).expect("free").freeze()];
            assert!(!clone.try_to(Ask::Write { offset, data }));
            let bytes = 4096;
            assert!(!clone.try_to(Ask::Zero { offset, bytes }));
        }
        assert!(!clone.try_to(Ask::Flush));
        assert!(!clone.try_to(Ask::Resize { bytes: 2 << 20 }));
        assert_eq!(
            [0, 1, 2].map(|block| clone.read(&pool, block)[0]),
            [1, 2, 0]
        );
        let refers = || objects.borrow().keys().any(|name| name.contains("/clone/"));
        assert!(refers(), "its parent still keeps what it needs");
        (clone.fails_manifests, clone.fails_deletes) = (false, false);
        clone.ask(Ask::GiveUp);
        assert!(!refers());
        assert!(!clone.try_to(Ask::Flush));
    }
}

/// Damage a page wherever it is stored.
fn damage_page(objects: &Objects, volume: [u8; 16], page: u64) {
    let mut damaged = 0;
    for (name, bytes) in objects.borrow_mut().iter_mut() {
        let Some(number) = name.strip_prefix(Kind::Map.prefix()) else {
            continue;
        };
        let number = number.parse().expect("a number");
        let page_blocks = OBJECT_PAGE_BLOCKS_MIN.into();
        for at in (0..bytes.len()).step_by(8) {
            if parse_page(&volume, number, page, page_blocks, &bytes[at..]).is_ok() {
                bytes[at] ^= 1;
                damaged += 1;
            }
        }
    }
    assert!(damaged > 0, "it is stored");
}
