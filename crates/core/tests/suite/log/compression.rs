//! A volume that compresses its log: nobody notices but the log.

use hdcs_core::base::buf::BufMut;
use hdcs_core::base::codec::Method;
use hdcs_core::base::error::{OpenError, RequestError};
use hdcs_core::base::io::{
    Action, BlockKey, Completion, Done, Reply, Request, RequestId, SectorRange,
};
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::cache::Tier;
use hdcs_core::format::{LOG_HEADER_BLOCKS, SpanEntry, SpanHeader};
use hdcs_core::volume::{Context, Event, Inherited, Persist, Phase, VolumeConfig};
use hdcs_kit::volume::{BYTES, SSD, World};

const RING_START: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;

fn compressing(method: Method) -> VolumeConfig {
    VolumeConfig {
        compression: Some(method),
        // Reads and destage find nothing in memory.
        resident_bytes_max: 0,
        ..hdcs_kit::volume::config(Persist::OnWrite)
    }
}

/// Text of which about a third is left, different for every seed.
fn text(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut out = Vec::with_capacity(bytes + 24);
    while out.len() < bytes {
        out.extend_from_slice(&random.u64(..).to_le_bytes());
        out.extend_from_slice(b"which is the same");
    }
    out.truncate(bytes);
    out
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..bytes).map(|_| random.u8(..)).collect()
}

/// The span that begins at a position, as it would be read from its first control block.
fn span(world: &World, position: usize) -> SpanHeader {
    SpanHeader::peek(&world.log[RING_START + position * BLOCK_BYTES..][..BLOCK_BYTES]).unwrap()
}

/// Change a byte of the first entry of the span at a position, as a writer that is wrong would have put it.
fn change_entry(world: &mut World, position: usize, field: usize, value: u8) {
    let control = &mut world.log[RING_START + position * BLOCK_BYTES..][..BLOCK_BYTES];
    control[size_of::<SpanHeader>() + field] = value;
    SpanHeader::seal(control);
}

fn agrees_with_memory(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut world = World::with(compressing(Method::Lz4), None);
    let mut model = vec![0u8; BYTES];
    for step in 0..3000 {
        let sectors = (BYTES / SECTOR_BYTES) as u64;
        let most = if random.u8(..8) == 0 { 2048 } else { 40 };
        let count = random.u64(1..=most);
        let below = if random.bool() { 512 } else { sectors - count };
        let start = random.u64(..below);
        let range = SectorRange::new(start, count);
        let bytes = range.byte_offset() as usize..range.byte_offset() as usize + range.bytes();
        match random.u8(..100) {
            0..50 => {
                let content = match random.u8(..3) {
                    0 => noise(range.bytes(), step),
                    1 => vec![step as u8; range.bytes()],
                    _ => text(range.bytes(), step),
                };
                // A request is at most one piece of that size, as a frontend cuts it.
                let room = (2048 - start % 2048).min(count) as usize * SECTOR_BYTES;
                world.write(start, &content[..room]);
                model[bytes.start..bytes.start + room].copy_from_slice(&content[..room]);
            }
            50..55 => {
                world.ask(Request::Discard { range, fua: false });
                model[bytes].fill(0);
            }
            55..85 => {
                let room = (2048 - start % 2048).min(count);
                let data = world.read(SectorRange::new(start, room));
                assert!(*data == model[bytes][..data.len()], "step {step}");
            }
            85..90 => drop(world.ask(Request::Flush)),
            90..92 => world.step(Event::DestageAll),
            92..95 => {
                let methods = [None, Some(Method::Lz4), Some(Method::Zstd)];
                world.config.compression = methods[random.usize(..3)];
                world.config.resident_bytes_max = [0, 1 << 20][random.usize(..2)];
                let config = world.config.clone();
                world.step(Event::Reconfigure(config));
            }
            95 => world.reopen(),
            96 => {
                world.close(random.bool());
                world.reopen();
            }
            _ => {}
        }
    }
    world.close(true);
    assert!(world.backend == model);
    drop((world.volume, world.replies, world.cache));
    assert_eq!(world.pool.free_bytes(), world.pool.total_bytes());
}

#[test]
fn compressed_volume_agrees_with_memory() {
    (0..6).for_each(agrees_with_memory);
}

#[test]
fn compressed_data_takes_less_of_the_log() {
    for method in Method::ALL {
        let mut world = World::with(compressing(method), None);
        let content = text(1 << 20, 1);
        world.write(0, &content);
        let stats = world.volume.stats(world.now);
        assert_eq!(stats.log_plain_bytes, 1 << 20);
        assert!(stats.log_stored_bytes < 600_000);
        assert!(
            stats.log_used_blocks < 160,
            "{} blocks",
            stats.log_used_blocks
        );
        assert_eq!(
            stats.dirty_bytes,
            1 << 20,
            "what is dirty is what clients wrote"
        );
        assert!(*world.read(SectorRange::new(0, 2048)) == *content);
        world.reopen();
        assert!(*world.read(SectorRange::new(0, 2048)) == *content);
        assert!(*world.read(SectorRange::new(333, 7)) == content[333 * 512..340 * 512]);
        world.close(true);
        assert!(world.backend[..1 << 20] == *content);
    }
}

#[test]
fn compressed_pieces_of_a_write_share_a_span() {
    let mut world = World::with(compressing(Method::Lz4), None);
    world.write(0, &text(4096, 1));
    let before = world.volume.stats(world.now).log_spans;
    world.write(8, &text((1 << 20) - 4096, 2));
    assert_eq!(world.volume.stats(world.now).log_spans, before + 1);
    let header = span(&world, 2);
    assert_eq!(header.entries.get(), 16);
}

#[test]
fn compressed_writes_of_one_span_lie_behind_one_another() {
    let mut world = World::with(
        VolumeConfig {
            persist: Persist::OnFlush,
            ..compressing(Method::Lz4)
        },
        None,
    );
    for block in 0..32u64 {
        world.write(block * 8, &text(BLOCK_BYTES, block));
    }
    world.ask(Request::Flush);
    // What was in flight alone at first is beside the point.
    let stats = world.volume.stats(world.now);
    assert!(stats.log_spans <= 2, "{} spans", stats.log_spans);
    assert!(
        stats.log_used_blocks <= 18,
        "{} blocks",
        stats.log_used_blocks
    );
    world.reopen();
    for block in 0..32u64 {
        assert!(*world.read(SectorRange::new(block * 8, 8)) == *text(BLOCK_BYTES, block));
    }
}

#[test]
fn noise_is_stored_as_it_is() {
    let mut world = World::with(compressing(Method::Lz4), None);
    for block in 0..20 {
        world.write(block * 8, &noise(BLOCK_BYTES, block));
    }
    let stats = world.volume.stats(world.now);
    assert_eq!(stats.log_stored_bytes, stats.log_plain_bytes);
    // After a stretch of noise, text is noticed again.
    for block in 0..200 {
        world.write(block * 8, &text(BLOCK_BYTES, block));
    }
    let stats = world.volume.stats(world.now);
    assert!(stats.log_stored_bytes < stats.log_plain_bytes / 5 * 4);
}

/// Compression comes and goes, and nobody has to be told before.
#[test]
fn log_holds_both_kinds_of_entries() {
    let mut world = World::new(Persist::OnWrite);
    let contents = [1, 2, 3].map(|seed| text(BLOCK_BYTES, seed));
    for (index, content) in (0..).zip(&contents) {
        world.config.compression = (index == 1).then_some(Method::Zstd);
        let config = world.config.clone();
        world.step(Event::Reconfigure(config));
        world.write(index * 8, content);
    }
    let stats = world.volume.stats(world.now);
    assert!(stats.log_stored_bytes < stats.log_plain_bytes);
    world.reopen();
    for (index, content) in (0..).zip(&contents) {
        assert!(*world.read(SectorRange::new(index * 8, 8)) == **content);
    }
}

#[test]
fn log_with_an_unknown_method_is_refused() {
    let mut world = World::with(compressing(Method::Lz4), None);
    world.write(0, &text(BLOCK_BYTES, 1));
    change_entry(&mut world, 0, core::mem::offset_of!(SpanEntry, method), 9);
    world.try_reopen();
    let expected = OpenError::Method {
        position: 0,
        method: 9,
    };
    assert_eq!(world.volume.phase(), Phase::Failed(expected));
}

#[test]
fn data_that_is_not_what_was_compressed_is_not_returned() {
    // The checksum of the data, another method, another place: each with checksums around it that are right.
    let fields = [
        (core::mem::offset_of!(SpanEntry, checksum), 1),
        (core::mem::offset_of!(SpanEntry, method), 2),
        (core::mem::offset_of!(SpanEntry, stored_offset), 1),
        (core::mem::offset_of!(SpanEntry, stored_bytes), 2),
    ];
    for (field, value) in fields {
        let mut world = World::with(compressing(Method::Lz4), None);
        world.write(0, &text(BLOCK_BYTES, 1));
        change_entry(&mut world, 0, field, value);
        world.reopen();
        world.step(Event::Request {
            id: RequestId(1),
            request: Request::Read {
                range: SectorRange::new(0, 8),
            },
        });
        let reply = world.replies.pop().unwrap();
        assert_eq!(reply.1.unwrap_err(), RequestError::Corrupt, "byte {field}");
        world.close(true);
        assert!(world.backend[..BLOCK_BYTES].iter().all(|&byte| byte == 0));
        world.reopen();
        assert_eq!(
            world.volume.stats(world.now).dirty_bytes,
            4096,
            "it stays in the log"
        );
    }
}

#[test]
fn torn_compressed_span_ends_the_log_and_a_damaged_one_is_lost() {
    let mut world = World::with(compressing(Method::Lz4), None);
    for block in 0..4 {
        world.write(block * 8, &text(BLOCK_BYTES, block));
    }
    world.log[RING_START + 7 * BLOCK_BYTES + 100] ^= 1;
    world.reopen();
    assert!(*world.read(SectorRange::new(16, 8)) == *text(BLOCK_BYTES, 2));
    assert!(
        world
            .read(SectorRange::new(24, 8))
            .iter()
            .all(|&byte| byte == 0)
    );
    let mut world = World::with(compressing(Method::Lz4), None);
    for block in 0..4 {
        world.write(block * 8, &text(BLOCK_BYTES, block));
    }
    world.log[RING_START + 3 * BLOCK_BYTES + 100] ^= 1;
    world.reopen();
    let lost: Vec<_> = world.volume.lost().iter().collect();
    assert_eq!(lost, [SectorRange::new(8, 8)]);
    for block in [0, 2, 3] {
        let range = SectorRange::new(block * 8, 8);
        assert!(*world.read(range) == *text(BLOCK_BYTES, block));
    }
}

#[test]
fn log_counts_entries_that_take_hardly_any_room() {
    let config = VolumeConfig {
        persist: Persist::OnFlush,
        unpersisted_bytes_max: 64 << 20,
        ..compressing(Method::Lz4)
    };
    let mut world = World::with(config, None);
    world.backend_silent = Some(Vec::new());
    let ring_blocks = world.volume.stats(world.now).log_ring_blocks;
    for round in 0..ring_blocks {
        world.write(round % 1024 * 8, &[round as u8; BLOCK_BYTES]);
    }
    let used = world.volume.stats(world.now).log_used_blocks;
    assert!(used >= ring_blocks / 4, "{used} of {ring_blocks}");
    // With less memory for its index it is fuller.
    world.config.log_entries_max = 0;
    let config = world.config.clone();
    world.step(Event::Reconfigure(config));
    let used = world.volume.stats(world.now).log_used_blocks;
    assert_eq!(used, ring_blocks);
}

/// A volume of which each block of the beginning is in another compressed entry, all of which has to be read for
/// it: together more than there is memory for, which is so much. Returns it, the beginning, and what takes the memory.
fn short_of_memory(pieces: usize) -> (World, Vec<u8>, Vec<BufMut>) {
    const PIECE: usize = 64 << 10;
    let mut world = World::with(compressing(Method::Lz4), None);
    let mut content = vec![0; 4 * PIECE];
    for piece in 0..4 {
        for block in 0..PIECE / BLOCK_BYTES {
            let part = piece * PIECE + block * BLOCK_BYTES..(piece + 1) * PIECE;
            content[part.clone()].copy_from_slice(&text(part.len(), part.start as u64));
            world.write((part.start / SECTOR_BYTES) as u64, &content[part]);
        }
    }
    let stats = world.volume.stats(world.now);
    assert_eq!(
        stats.dirty_bytes, stats.log_plain_bytes,
        "nothing is destaged"
    );
    let mut taken: Vec<_> = core::iter::from_fn(|| world.pool.alloc(PIECE)).collect();
    taken.truncate(taken.len() - pieces);
    assert!(stats.log_stored_bytes > world.pool.free_bytes() as u64);
    (world, content, taken)
}

#[test]
fn read_of_many_compressed_entries_ends_when_memory_is_short() {
    let (mut world, content, _taken) = short_of_memory(10);
    let dirty_bytes = world.volume.stats(world.now).dirty_bytes;
    let before = world.log_reads;
    assert!(*world.read(SectorRange::new(0, 512)) == *content);
    let reads = world.log_reads - before;
    assert_eq!(reads, 64, "each block for itself, and once");
    // It does not end because destage has taken it out of the log at last.
    assert_eq!(world.volume.stats(world.now).dirty_bytes, dirty_bytes);
}

/// There is memory for what both bring, and for little besides: so each could take the place of the other, and
/// throw away what that has kept.
#[test]
fn reads_of_many_compressed_entries_end_beside_one_another() {
    (0..16).for_each(reads_end_beside_one_another);
}

/// The log's device answers in any order.
fn reads_end_beside_one_another(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut world, content, _taken) = short_of_memory(14);
    let range = SectorRange::new(0, 512);
    let mut events: Vec<Event> = [1, 2]
        .map(|id| Event::Request {
            id: RequestId(id),
            request: Request::Read { range },
        })
        .into();
    let (mut actions, mut ended) = (Vec::<Action>::new(), 0);
    for _ in 0..2000 {
        events.push(Event::Poll);
        for event in events.drain(..) {
            let mut cx = Context {
                cache: &mut world.cache,
                pool: &world.pool,
                actions: &mut actions,
            };
            world.volume.step(world.now, event, &mut cx);
        }
        let next = (!actions.is_empty()).then(|| random.usize(..actions.len()));
        match next.map(|next| actions.swap_remove(next)) {
            Some(Action::LogRead {
                token,
                offset,
                mut buf,
                ..
            }) => {
                let bytes = buf.len();
                buf.copy_from_slice(&world.log[offset as usize..][..bytes]);
                let result = Ok(Done::Read(buf));
                events.push(Event::Completed(Completion { token, result }));
            }
            Some(Action::Reply { result, .. }) => {
                ended += 1;
                assert!(matches!(result, Ok(Reply::Data(data)) if *data == *content));
            }
            Some(other) => panic!("not of a read: {other:?}"),
            None => {}
        }
    }
    assert_eq!(ended, 2, "seed {seed}");
}

/// What it has kept is given up with it, and the next read may keep instead.
#[test]
fn read_that_keeps_what_has_arrived_and_is_cut_off_leaves_the_others_memory() {
    let (mut world, content, _taken) = short_of_memory(10);
    let sectors = (content.len() / SECTOR_BYTES) as u64;
    let (id, range) = (RequestId(1), SectorRange::new(0, sectors + 8));
    let request = Request::Read { range };
    let (mut events, mut actions) = (vec![Event::Request { id, request }], Vec::new());
    while let Some(event) = events.pop() {
        let mut cx = Context {
            cache: &mut world.cache,
            pool: &world.pool,
            actions: &mut actions,
        };
        world.volume.step(world.now, event, &mut cx);
        drop(cx);
        let Some(action) = actions.pop() else { break };
        let (token, buf) = match action {
            Action::LogRead {
                token,
                offset,
                mut buf,
                ..
            } => {
                let bytes = buf.len();
                buf.copy_from_slice(&world.log[offset as usize..][..bytes]);
                (token, buf)
            }
            Action::BackendRead { token, buf, .. } => (token, buf),
            other => panic!("not of a read: {other:?}"),
        };
        let result = Ok(Done::Read(buf));
        events.push(Event::Completed(Completion { token, result }));
    }
    assert!(world.replies.is_empty(), "it waits for memory");
    let bytes = content.len() as u64;
    world.step(Event::Resize { bytes });
    let (_, refused) = world.replies.pop().expect("what it reads is cut off");
    assert_eq!(refused.err(), Some(RequestError::BadRange));
    let dirty_bytes = world.volume.stats(world.now).dirty_bytes;
    assert!(*world.read(SectorRange::new(0, sectors)) == *content);
    // It does not end because destage has taken it out of the log at last.
    assert_eq!(world.volume.stats(world.now).dirty_bytes, dirty_bytes);
}

/// A compressed line is read once for all of its blocks that are asked for: but those that a clone has written
/// are not in the line of its origin.
#[test]
fn compressed_line_of_an_origin_is_read_as_far_as_it_is_inherited() {
    const ORIGIN: u32 = 9;
    let mut world = World::with(compressing(Method::Lz4), Some(SSD));
    world.backend.copy_from_slice(&text(BYTES, 1));
    let blocks = (BYTES / BLOCK_BYTES) as u64;
    let mut inherited = Inherited::new(ORIGIN);
    inherited.insert(0, blocks);
    world.inherited = Some(inherited);
    world.reopen();
    let range = SectorRange::new(0, blocks * BLOCK_SECTORS);
    world.ask(Request::Promote { range });
    // Each has another one of its blocks written.
    let lines: Vec<u64> = (16..20).map(|line| line * 4).collect();
    for (written, &first) in (0..).zip(&lines) {
        for block in first..first + 4 {
            let key = BlockKey::new(ORIGIN, block);
            assert_eq!(world.cache.probe(key), Tier::Ssd);
        }
        world.write((first + written) * BLOCK_SECTORS, &[7; BLOCK_BYTES]);
    }
    world.step(Event::DestageAll);
    while world.volume.stats(world.now).log_used_blocks > 0 {
        world.step(Event::Poll);
    }
    for &first in &lines {
        let before = world.volume.stats(world.now).ssd_hit_blocks;
        let range = SectorRange::new(first * BLOCK_SECTORS, 4 * BLOCK_SECTORS);
        let bytes = range.byte_offset() as usize..range.byte_offset() as usize + range.bytes();
        assert!(*world.read(range) == world.backend[bytes], "line {first}");
        let hits = world.volume.stats(world.now).ssd_hit_blocks - before;
        assert_eq!(hits, 3, "line {first}");
    }
}
