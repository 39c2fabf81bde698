//! Every command, every error, and the bounds.

use hdcs_core::base::io::Request;
use hdcs_core::base::limits::CONNECTION_DATA_BYTES_MAX;

use super::*;
use crate::nbd::protocol::command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
use crate::nbd::transmission::PIECES_MAX;

const MIB: u64 = 1 << 20;
const EPERM: u32 = 1;
const EIO: u32 = 5;
const ENOMEM: u32 = 12;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ESHUTDOWN: u32 = 108;

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut data = vec![0; bytes];
    random.fill(&mut data);
    data
}

fn both(seed: u64) -> [Wire; 2] {
    [Wire::structured(seed), Wire::simple(seed, "disk")]
}

#[test]
fn random_requests_match_a_model() {
    for seed in 0..6 {
        for mut wire in both(100 + seed) {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut model = vec![0; DISK_BYTES as usize];
            for step in 0..150 {
                wire.feed_bytes_max = [1000, 30_000, usize::MAX][random.usize(..3)];
                let sectors = DISK_BYTES / 512;
                let count = if random.u8(..8) == 0 {
                    random.u64(1..=6000)
                } else {
                    random.u64(1..=24)
                };
                let start = random.u64(..=sectors - count);
                let (offset, bytes) = (start * 512, count as usize * 512);
                let part = offset as usize..offset as usize + bytes;
                let fua = random.u16(..2) * FUA;
                match random.u8(..6) {
                    0 | 1 => {
                        let data = pattern(bytes, step);
                        let kind = command::WRITE;
                        let answer = wire.request(kind, fua, offset, bytes as u32, &data);
                        assert_eq!(answer.error(), 0);
                        model[part].copy_from_slice(&data);
                    }
                    2 => {
                        let kind = [command::TRIM, command::WRITE_ZEROES][random.usize(..2)];
                        let answer = wire.request(kind, fua, offset, bytes as u32, &[]);
                        assert_eq!(answer.error(), 0);
                        model[part].fill(0);
                    }
                    _ => {
                        let data = wire.read(offset, bytes as u32).unwrap();
                        assert!(data == model[part], "{bytes} bytes at {offset}");
                    }
                }
            }
            assert!(wire.disk.bytes() == model);
        }
    }
}

#[test]
fn largest_read_and_write_are_cut_and_put_together() {
    for mut wire in both(1) {
        let offset = 3 * MIB + 512;
        let data = pattern(32 << 20, 5);
        assert_eq!(wire.write(offset, &data), Ok(vec![]));
        let answer = wire.request(command::READ, 0, offset, 32 << 20, &[]);
        assert!(answer.chunks == 33 || answer.chunks == 0);
        assert!(answer.data() == Ok(data));
    }
}

#[test]
fn pieces_are_aligned_to_the_volume() {
    let mut wire = Wire::structured(2);
    wire.send(&request_bytes(command::READ, 0, 1, MIB - 512, 2 << 20));
    let ranges: Vec<_> = wire
        .host
        .submitted
        .iter()
        .map(|(_, _, request)| match request {
            Request::Read { range } => (range.start, range.count),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ranges, [(2047, 1), (2048, 2048), (4096, 2047)]);
    wire.settle();
}

#[test]
fn write_passes_fua_and_its_place_in_the_block() {
    let mut wire = Wire::structured(3);
    for fua in [0, FUA] {
        wire.send(&request_bytes(command::WRITE, fua, 1, 512, 1024));
        wire.send(&[3; 1024]);
        let (_, _, request) = &wire.host.submitted[0];
        let Request::Write { data, fua: is, .. } = request else {
            panic!("{request:?}");
        };
        assert_eq!(*is, fua == FUA);
        let whole = data.covering_blocks();
        assert_eq!(whole[..512], [0; 512]);
        assert_eq!(whole[512..1536], [3; 1024]);
        wire.settle();
    }
}

#[test]
fn write_zeroes_passes_no_hole() {
    let mut wire = Wire::structured(4);
    for flags in [0, NO_HOLE, FUA | NO_HOLE] {
        let header = request_bytes(command::WRITE_ZEROES, flags, 1, 0, 40 << 20);
        wire.send(&header);
        let (_, _, request) = &wire.host.submitted[0];
        let Request::WriteZeroes {
            range,
            fua,
            no_hole,
        } = request
        else {
            panic!("{request:?}");
        };
        assert_eq!(range.bytes(), 40 << 20);
        assert_eq!((*fua, *no_hole), (flags & FUA != 0, flags & NO_HOLE != 0));
        wire.settle();
    }
}

#[test]
fn fua_is_allowed_on_every_command() {
    for mut wire in both(5) {
        let commands = [
            command::READ,
            command::TRIM,
            command::CACHE,
            command::WRITE_ZEROES,
        ];
        for kind in commands {
            assert_eq!(wire.request(kind, FUA, 0, 512, &[]).error(), 0);
        }
        assert_eq!(wire.request(command::FLUSH, FUA, 0, 0, &[]).error(), 0);
        let answer = wire.request(command::WRITE, FUA, 0, 512, &[1; 512]);
        assert_eq!(answer.error(), 0);
    }
}

#[test]
fn cache_and_flush_reach_the_volume() {
    let mut wire = Wire::structured(6);
    wire.send(&request_bytes(command::CACHE, 0, 1, 0, 8192));
    wire.send(&request_bytes(command::FLUSH, 0, 2, 0, 0));
    let submitted = &wire.host.submitted;
    assert!(matches!(submitted[0].2, Request::Promote { range } if range.count == 16));
    assert!(matches!(submitted[1].2, Request::Flush));
    wire.settle();
    wire.inbound.clear();
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_connection_stays() {
    let end = DISK_BYTES;
    let past = u64::MAX - 511;
    let mib = MIB as u32;
    #[rustfmt::skip]
    let cases: [(u16, u16, u64, u32, u32); 33] = [
        (command::READ, 0, 0, 0, EINVAL),
        (command::READ, 0, 1, 512, EINVAL),
        (command::READ, 0, 0, 511, EINVAL),
        (command::READ, 0, end, 512, EINVAL),
        (command::READ, 0, end - 512, 1024, EINVAL),
        (command::READ, 0, past, 512, EINVAL),
        (command::READ, 0, 0, (32 << 20) + 512, EINVAL),
        (command::READ, NO_HOLE, 0, 512, EINVAL),
        (command::READ, 1 << 15, 0, 512, EINVAL),
        (command::WRITE, 0, 0, 0, EINVAL),
        (command::WRITE, 0, 1, 512, EINVAL),
        (command::WRITE, 0, 0, 700_001, EINVAL),
        (command::WRITE, 0, end, mib, ENOSPC),
        (command::WRITE, 0, end - 512, 1024, ENOSPC),
        (command::WRITE, 0, past, 32 << 20, ENOSPC),
        (command::WRITE, DF, 0, 512, EINVAL),
        (command::FLUSH, 0, 0, 512, EINVAL),
        (command::FLUSH, 0, 512, 0, EINVAL),
        (command::TRIM, 0, 0, 0, EINVAL),
        (command::TRIM, 0, 5, 512, EINVAL),
        (command::TRIM, 0, 0, u32::MAX - 511, EINVAL),
        (command::TRIM, NO_HOLE, 0, 512, EINVAL),
        (command::CACHE, 0, end, 512, EINVAL),
        (command::CACHE, DF, 0, 512, EINVAL),
        (command::WRITE_ZEROES, 0, end - 512, 1024, ENOSPC),
        (command::WRITE_ZEROES, 0, past, 512, ENOSPC),
        (command::WRITE_ZEROES, 1 << 4, 0, 512, EINVAL),
        (command::BLOCK_STATUS, 0, 0, 0, EINVAL),
        (command::BLOCK_STATUS, 0, 0, u32::MAX - 511, EINVAL),
        (command::BLOCK_STATUS, DF, 0, 512, EINVAL),
        (8, 0, 0, 0, EINVAL),
        (9, 0, 0, 512, EINVAL),
        (u16::MAX, u16::MAX, past, u32::MAX, EINVAL),
    ];
    for mut wire in both(7) {
        let structured = wire.write(0, &[1; 512]) == Ok(vec![])
            && wire.request(command::READ, 0, 0, 512, &[]).chunks > 0;
        for (kind, flags, offset, length, error) in cases {
            let payload = if kind == command::WRITE { length } else { 0 };
            let payload = vec![0xee; payload as usize];
            let answer = wire.request(kind, flags, offset, length, &payload);
            assert_eq!(answer.error(), error, "{kind} {flags} {offset} {length}");
            assert_eq!(answer.chunks, usize::from(structured));
            assert_eq!(answer.errors[0].1.is_empty(), !structured);
        }
        assert_eq!(wire.session.in_flight(), 0);
        assert_eq!(wire.read(0, 512), Ok(vec![1; 512]));
        let mut rest = wire.disk.bytes();
        rest[..512].fill(0);
        assert!(rest.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn unfragmented_reads_are_one_chunk_up_to_their_bound() {
    let mut wire = Wire::structured(8);
    let data = pattern(2 << 20, 8);
    wire.write(0, &data).unwrap();
    let answer = wire.request(command::READ, DF, MIB / 2, 1 << 20, &[]);
    assert_eq!(answer.chunks, 1);
    assert!(answer.data[..] == data[1 << 19..(1 << 19) + (1 << 20)]);
    let answer = wire.request(command::READ, DF, 0, (1 << 20) + 512, &[]);
    assert_eq!(answer.error(), EOVERFLOW);
    let mut wire = Wire::simple(8, "disk");
    let answer = wire.request(command::READ, DF, 0, 512, &[]);
    assert_eq!(answer.error(), EINVAL);
}

#[test]
fn read_only_export_refuses_writes() {
    let mut wire = Wire::simple(9, "frozen");
    for kind in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        let payload = vec![1; if kind == command::WRITE { 4096 } else { 0 }];
        let answer = wire.request(kind, 0, 0, 4096, &payload);
        assert_eq!(answer.error(), EPERM);
    }
    assert_eq!(wire.read(0, 4096), Ok(vec![0; 4096]));
    assert_eq!(wire.request(command::FLUSH, 0, 0, 0, &[]).error(), 0);
}

#[test]
fn errors_of_the_volume_have_their_numbers() {
    let errors = [
        (RequestError::BadRange, EINVAL),
        (RequestError::Io, EIO),
        (RequestError::Corrupt, EIO),
        (RequestError::Inconsistent, EIO),
        (RequestError::Fenced, EIO),
        (RequestError::LogFull, ENOSPC),
        (RequestError::ReadOnly, EPERM),
        (RequestError::Closing, ESHUTDOWN),
        (RequestError::NoBuffers, ENOMEM),
    ];
    for mut wire in both(10) {
        for (error, number) in errors {
            let commands = [
                (command::READ, 512),
                (command::WRITE, 512),
                (command::FLUSH, 0),
                (command::TRIM, 512),
                (command::WRITE_ZEROES, 512),
                (command::CACHE, 512),
            ];
            for (kind, length) in commands {
                let payload = vec![1; if kind == command::WRITE { 512 } else { 0 }];
                wire.failures.push_back(error);
                let answer = wire.request(kind, 0, 0, length, &payload);
                assert_eq!(answer.error(), number, "{kind} {error}");
                assert_eq!(answer.errors.len(), 1);
                if answer.chunks > 0 {
                    assert_eq!(answer.errors[0].1, error.to_string());
                }
            }
        }
    }
}

#[test]
fn a_piece_that_fails_fails_its_request_once() {
    for seed in 0..20 {
        for mut wire in both(seed) {
            let at = wire.random.usize(..4);
            wire.failures = vec![RequestError::Io; 1].into();
            let answer = wire.request(command::READ, 0, MIB / 2, 3 << 20, &[]);
            assert_eq!(answer.error(), EIO);
            assert_eq!(answer.errors.len(), 1);
            if let Some(offset) = answer.errors[0].2 {
                assert!(offset == MIB / 2 || offset % MIB == 0);
            }
            // The first completions succeed, a later one fails.
            wire.send(&request_bytes(command::WRITE, 0, 1, MIB / 2, 3 << 20));
            wire.send(&pattern(3 << 20, seed));
            while wire.host.submitted.len() > 4 - at {
                wire.complete_one();
            }
            wire.failures = vec![RequestError::LogFull].into();
            wire.settle();
            let (_, answer) = wire.answer(0, 0);
            assert_eq!(answer.error(), ENOSPC);
            assert!(wire.inbound.is_empty());
        }
    }
}

#[test]
fn block_status_describes_both_contexts() {
    let mut wire = Wire::structured(11);
    wire.write(4096, &[1; 8192]).unwrap();
    wire.request(command::FLUSH, 0, 0, 0, &[]);
    wire.write(8192, &[1; 4096]).unwrap();
    wire.request(command::WRITE_ZEROES, NO_HOLE, 16384, 4096, &[]);
    let mut answer = wire.request(command::BLOCK_STATUS, 0, 512, 32768, &[]);
    answer.extents.sort_unstable();
    let allocation = vec![(3584, 3), (8192, 0), (4096, 3), (4096, 2), (12800, 3)];
    let cache = vec![
        (3584, 4),
        (4096, 1),
        (4096, 2),
        (4096, 4),
        (4096, 2),
        (12800, 4),
    ];
    assert_eq!(answer.extents, [(1, allocation), (2, cache)]);
    let mut answer = wire.request(command::BLOCK_STATUS, REQ_ONE, 512, 32768, &[]);
    answer.extents.sort_unstable();
    assert_eq!(answer.extents, [(1, vec![(3584, 3)]), (2, vec![(3584, 4)])]);
}

#[test]
fn block_status_bounds_its_extents() {
    let mut wire = Wire::structured(12);
    for block in 0..1100 {
        wire.write(block * 8192, &[1; 4096]).unwrap();
    }
    let answer = wire.request(command::BLOCK_STATUS, 0, 0, 20 << 20, &[]);
    for (_, runs) in answer.extents {
        assert_eq!(runs.len(), 256);
        assert!(runs.iter().all(|run| run.0 == 4096));
    }
}

#[test]
fn block_status_that_fails_in_one_context_is_an_error() {
    for seed in 0..10 {
        for successes in 0..2 {
            let mut wire = Wire::structured(seed);
            wire.send(&request_bytes(command::BLOCK_STATUS, 0, 1, 0, 4096));
            for _ in 0..successes {
                wire.complete_one();
            }
            wire.failures.push_back(RequestError::Io);
            wire.settle();
            let (_, answer) = wire.answer(0, 0);
            assert_eq!(answer.error(), EIO);
            assert_eq!(answer.extents.len(), 1);
        }
    }
}

#[test]
fn block_status_without_a_context_is_refused() {
    let mut wire = Wire::simple(13, "disk");
    let answer = wire.request(command::BLOCK_STATUS, 0, 0, 4096, &[]);
    assert_eq!(answer.error(), EINVAL);
}

#[test]
fn framing_errors_close_that_connection_after_its_replies() {
    let mut bad_magic = request_bytes(command::READ, 0, 2, 0, 512);
    bad_magic[0] ^= 1;
    let too_long = request_bytes(command::WRITE, 0, 2, 0, (32 << 20) + 1);
    for bytes in [bad_magic, too_long] {
        for mut wire in both(14) {
            wire.send(&request_bytes(command::READ, 0, 1, 0, 512));
            wire.send(&bytes);
            assert_eq!(wire.session.in_flight(), 1);
            let receive = wire.session.receive(&mut wire.host);
            assert!(matches!(receive, Receive::Wait));
            wire.settle();
            assert!(wire.closed);
            let (cookie, answer) = wire.answer(0, 512);
            assert_eq!((cookie, answer.error()), (1, 0));
            assert!(wire.inbound.is_empty());
        }
    }
}

#[test]
fn disconnect_answers_what_is_in_flight_and_nothing_after() {
    let mut wire = Wire::structured(15);
    let bytes = [
        request_bytes(command::WRITE, 0, 1, 0, 512),
        vec![4; 512],
        request_bytes(command::DISC, 0, 0, 0, 0),
        request_bytes(command::FLUSH, 0, 2, 0, 0),
    ];
    wire.send(&bytes.concat());
    wire.settle();
    assert!(wire.closed);
    let (cookie, answer) = wire.answer(0, 0);
    assert_eq!((cookie, answer.error()), (1, 0));
    assert!(wire.inbound.is_empty());
    assert_eq!(wire.disk.bytes()[..512], [4; 512]);
}

#[test]
fn peer_end_in_mid_payload_leaves_nothing_behind() {
    let mut wire = Wire::structured(16);
    wire.send(&request_bytes(command::WRITE, 0, 1, 0, 4 << 20));
    wire.send(&vec![4; (2 << 20) + 100]);
    wire.hang_up();
    assert_eq!(wire.session.in_flight(), 0);
    let pool = std::sync::Arc::clone(wire.host.pool());
    drop(wire);
    assert_eq!(pool.free_bytes(), pool.total_bytes());
}

#[test]
fn pipelined_requests_are_answered_each_once_in_any_order() {
    for seed in 0..8 {
        for mut wire in both(seed) {
            let data = pattern(1 << 20, seed);
            wire.write(0, &data).unwrap();
            let mut bytes = Vec::new();
            for cookie in 0..1000u64 {
                bytes.extend(request_bytes(command::READ, 0, cookie, cookie * 512, 1024));
            }
            wire.send(&bytes);
            wire.settle();
            let mut seen = vec![false; 1000];
            for _ in 0..1000 {
                // Simple or structured, the cookie lies at the same place.
                let cookie: Vec<u8> = wire.inbound.range(8..16).copied().collect();
                let cookie = u64::from_be_bytes(cookie.try_into().unwrap());
                let (_, answer) = wire.answer(cookie * 512, 1024);
                let start = cookie as usize * 512;
                assert!(answer.data().unwrap() == data[start..start + 1024]);
                assert!(!std::mem::replace(&mut seen[cookie as usize], true));
            }
            assert!(wire.inbound.is_empty());
            assert!(wire.in_flight_max > 100 && wire.in_flight_max <= PIECES_MAX);
        }
    }
}

#[test]
fn bytes_in_flight_are_bounded() {
    let mut wire = Wire::structured(17);
    let request = request_bytes(command::READ, 0, 1, 0, 8 << 20);
    let mut taken = 0;
    while let Receive::Into(place) = wire.session.receive(&mut wire.host) {
        place[..28].copy_from_slice(&request);
        wire.session.received(28, &mut wire.host);
        taken += 1;
        assert!(taken < 100);
    }
    let reads = wire.host.submitted.len();
    assert_eq!(reads, CONNECTION_DATA_BYTES_MAX >> 20, "piece by piece");
    // Completing alone does not help: the data waits for a client that does not read.
    while wire.complete_one() {}
    let receive = wire.session.receive(&mut wire.host);
    assert!(matches!(receive, Receive::Wait));
    assert!(wire.host.submitted.is_empty());
    wire.collect();
    let receive = wire.session.receive(&mut wire.host);
    assert!(matches!(receive, Receive::Into(_)));
    assert!(!wire.host.submitted.is_empty());
    wire.settle();
}

#[test]
fn data_is_bounded_by_what_may_be_held_until_the_client_takes_it() {
    for mut wire in both(25) {
        wire.host.allowance.held.data_bytes = 3 << 20;
        let mut bytes = Vec::new();
        for cookie in 0..20u64 {
            bytes.extend(request_bytes(command::READ, 0, cookie, MIB, 5 << 20));
        }
        let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
            panic!("an idle session takes bytes");
        };
        place[..bytes.len()].copy_from_slice(&bytes);
        wire.session.received(bytes.len(), &mut wire.host);
        let mut given = 0;
        while wire.complete_one() {
            given += 1;
            let receive = wire.session.receive(&mut wire.host);
            assert!(matches!(receive, Receive::Wait));
            wire.watch();
            assert!(given < 100);
        }
        // What completed waits for the client, so nothing more is asked for.
        assert_eq!(given, 3);
        assert_eq!(wire.session.held().data_bytes, 3 << 20);
        let mut read = 0;
        while read < 20 * 5 * MIB as usize {
            assert!(
                wire.collect(),
                "each time that the client takes, more comes"
            );
            read += std::mem::take(&mut wire.inbound).len();
            let receive = wire.session.receive(&mut wire.host);
            assert!(!matches!(receive, Receive::Close));
            while wire.complete_one() {
                wire.session.receive(&mut wire.host);
                wire.watch();
            }
        }
    }
}

#[test]
fn unanswered_reads_of_little_data_are_bounded_by_their_replies() {
    let mut wire = Wire::structured(26);
    let mut taken = 0;
    loop {
        while wire.complete_one() {}
        let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
            break;
        };
        place[..28].copy_from_slice(&request_bytes(command::READ, 0, taken, 0, 512));
        wire.session.received(28, &mut wire.host);
        taken += 1;
        assert!(taken < 2000);
    }
    assert!(wire.session.held().heap_bytes < 512 << 10);
    wire.settle();
}

#[test]
fn unanswered_block_status_is_bounded_by_its_replies() {
    let mut wire = Wire::structured(27);
    // Every other block differs, so that replies are long.
    for block in 0..600 {
        wire.write(block * 8192, &[1; 4096]).unwrap();
    }
    wire.host.allowance.held.heap_bytes = 512 << 10;
    let (before, mut taken) = (wire.session.held().heap_bytes, 0);
    loop {
        while wire.complete_one() {}
        let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
            break;
        };
        let request = request_bytes(command::BLOCK_STATUS, 0, taken, 0, DISK_BYTES as u32);
        place[..28].copy_from_slice(&request);
        wire.session.received(28, &mut wire.host);
        taken += 1;
        assert!(taken < 500);
        wire.watch();
    }
    assert!(taken > 4, "{taken}");
    let after = wire.session.held().heap_bytes;
    assert!(before < 256 << 10, "{before}");
    // What its queue has grown by.
    assert!(after <= (512 << 10) + (64 << 10), "{after}");
    wire.settle();
    wire.inbound.clear();
}

#[test]
fn long_simple_read_is_sent_in_order_and_alone() {
    let mut wire = Wire::simple(28, "disk");
    let data = pattern(8 << 20, 28);
    wire.write(0, &data).unwrap();
    wire.host.allowance.held.data_bytes = 3 << 20;
    // A flush before it is answered before it, and what follows waits.
    wire.send(&request_bytes(command::FLUSH, 0, 1, 0, 0));
    wire.send(&request_bytes(command::READ, 0, 2, 512, (6 << 20) - 512));
    let Receive::Wait = wire.session.receive(&mut wire.host) else {
        panic!("nothing is taken beside it");
    };
    let flush = wire.host.submitted.remove(0);
    while wire.complete_one() {}
    wire.collect();
    assert!(wire.inbound.is_empty(), "the flush is not answered yet");
    wire.host.submitted.push(flush);
    wire.settle();
    assert_eq!(wire.answer(0, 0).0, 1);
    let (cookie, answer) = wire.answer(512, (6 << 20) - 512);
    assert!(cookie == 2 && answer.data().unwrap() == data[512..6 << 20]);
    assert_eq!(wire.read(0, 1024), Ok(data[..1024].to_vec()));
    assert_eq!(wire.session.held().data_bytes, 0);
}

#[test]
fn long_simple_read_that_fails_is_refused_or_ends_the_connection() {
    for after in 0..6 {
        let mut wire = Wire::simple(29, "disk");
        wire.host.allowance.held.data_bytes = 2 << 20;
        wire.send(&request_bytes(command::READ, 0, 3, 0, 6 << 20));
        for _ in 0..after {
            let (id, result) = wire.host.perform(0);
            wire.session.completed(id, result);
            wire.collect();
            let receive = wire.session.receive(&mut wire.host);
            assert!(matches!(receive, Receive::Wait));
        }
        wire.failures.push_back(RequestError::Io);
        wire.settle();
        let (magic, error, cookie) = (wire.u32(), wire.u32(), wire.u64());
        assert_eq!((magic, cookie), (SIMPLE_REPLY_MAGIC, 3));
        if wire.closed {
            assert_eq!(error, 0);
            assert!(wire.inbound.len() < 6 << 20, "the client knows by the end");
        } else {
            assert_eq!((error, wire.inbound.len()), (EIO, 0));
            assert!(wire.read(0, 512).is_ok());
        }
        assert_eq!(after > 0, wire.closed);
        assert_eq!(wire.session.held().data_bytes, 0);
    }
}

#[test]
fn cache_is_cut_and_little_of_it_is_in_flight() {
    let mut wire = Wire::structured(30);
    let header = request_bytes(command::CACHE, 0, 1, 512, (40 << 20) - 512);
    wire.send(&header);
    assert_eq!(wire.session.in_flight(), 4);
    let mut next = 1;
    let mut pieces = 0;
    while !wire.host.submitted.is_empty() {
        for (_, _, request) in &wire.host.submitted {
            let Request::Promote { range } = request else {
                panic!("{request:?}");
            };
            assert!(range.bytes() <= 1 << 20);
        }
        let Request::Promote { range } = wire.host.submitted[0].2 else {
            panic!("a promotion");
        };
        assert_eq!(range.start, next, "in order");
        next = range.end();
        pieces += 1;
        let (id, result) = wire.host.perform(0);
        // In order, for the check above.
        wire.host
            .submitted
            .sort_by_key(|(_, _, request)| match request {
                Request::Promote { range } => range.start,
                other => panic!("{other:?}"),
            });
        wire.session.completed(id, result);
        wire.session.receive(&mut wire.host);
        wire.host
            .submitted
            .sort_by_key(|(_, _, request)| match request {
                Request::Promote { range } => range.start,
                other => panic!("{other:?}"),
            });
    }
    assert_eq!((pieces, next), (40, (40 << 20) / 512));
    wire.collect();
    assert_eq!(wire.answer(0, 0).1.error(), 0);
    // After a failure the rest is not begun.
    wire.send(&header);
    wire.failures.push_back(RequestError::Io);
    let mut performed = 0;
    while wire.complete_one() {
        performed += 1;
        wire.session.receive(&mut wire.host);
    }
    assert_eq!(performed, 4);
    wire.collect();
    assert_eq!(wire.answer(0, 0).1.error(), EIO);
    assert_eq!(wire.session.held().data_bytes, 0);
}

#[test]
fn nothing_is_submitted_beyond_the_work_of_a_turn() {
    let mut wire = Wire::structured(31);
    wire.host.allowance.work = 0;
    let bytes = request_bytes(command::READ, 0, 1, 0, 4096);
    let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
        panic!("an idle session takes bytes");
    };
    place[..28].copy_from_slice(&bytes);
    wire.session.received(28, &mut wire.host);
    let receive = wire.session.receive(&mut wire.host);
    assert!(matches!(receive, Receive::Wait) && wire.host.submitted.is_empty());
    wire.host.allowance.work = 1;
    let receive = wire.session.receive(&mut wire.host);
    assert!(matches!(receive, Receive::Into(_)) && wire.host.submitted.len() == 1);
    wire.settle();
}

#[test]
fn writes_wait_for_buffers_and_go_on() {
    let mut wire = Wire::structured(18);
    let pool = std::sync::Arc::clone(wire.host.pool());
    let mut hoard: Vec<_> = std::iter::from_fn(|| pool.alloc(1 << 20)).collect();
    let bytes = [request_bytes(command::WRITE, 0, 1, 0, 4096), vec![6; 4096]].concat();
    let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
        panic!("an idle session takes bytes");
    };
    place[..bytes.len()].copy_from_slice(&bytes);
    wire.session.received(bytes.len(), &mut wire.host);
    let receive = wire.session.receive(&mut wire.host);
    assert!(matches!(receive, Receive::Wait));
    assert_eq!(wire.session.in_flight(), 0);
    hoard.pop();
    let receive = wire.session.receive(&mut wire.host);
    assert!(matches!(receive, Receive::Into(_)));
    assert_eq!(wire.session.in_flight(), 1);
    wire.settle();
    assert_eq!(wire.disk.bytes()[..4096], [6; 4096]);
}

#[test]
fn large_payloads_are_received_into_their_buffer() {
    let mut wire = Wire::structured(19);
    wire.send(&request_bytes(command::WRITE, 0, 1, 512, 1 << 20));
    wire.send(&vec![1; 32 << 10]);
    let Receive::IntoBoth(place, behind) = wire.session.receive(&mut wire.host) else {
        panic!("a payload is awaited");
    };
    assert!(!behind.is_empty(), "what follows comes at once");
    // The first piece ends at the first MiB of the volume.
    assert_eq!(place.len(), (1 << 20) - 512 - (32 << 10));
    place.fill(2);
    let bytes = place.len();
    wire.session.received(bytes, &mut wire.host);
    wire.send(&[3; 512]);
    wire.settle();
    let disk = wire.disk.bytes();
    let (first, rest) = disk[512..1 << 20].split_at(32 << 10);
    assert!(first.iter().all(|&byte| byte == 1));
    assert!(rest.iter().all(|&byte| byte == 2));
    assert_eq!(disk[1 << 20..(1 << 20) + 512], [3; 512]);
}

/// Receive as much as the session takes at once; how many bytes that were.
fn receive_all(wire: &mut Wire, stream: &[u8]) -> usize {
    let (place, behind) = match wire.session.receive(&mut wire.host) {
        Receive::Into(place) => (place, &mut [][..]),
        Receive::IntoBoth(place, behind) => (place, behind),
        other => panic!("{other:?}"),
    };
    let bytes = stream.len().min(place.len() + behind.len());
    let (here, further) = stream[..bytes].split_at(bytes.min(place.len()));
    place[..here.len()].copy_from_slice(here);
    behind[..further.len()].copy_from_slice(further);
    wire.session.received(bytes, &mut wire.host);
    while wire.complete_one() {}
    bytes
}

#[test]
fn stream_of_large_writes_takes_a_receive_for_each() {
    let mut wire = Wire::structured(32);
    let mut stream = Vec::new();
    for cookie in 0..16u64 {
        let header = request_bytes(command::WRITE, 0, cookie, cookie << 16, 64 << 10);
        stream.extend(header);
        stream.extend(vec![cookie as u8 + 1; 64 << 10]);
    }
    // The first ones let the inbox grow.
    let (mut sent, mut receives) = (0, 0);
    while sent < stream.len() {
        sent += receive_all(&mut wire, &stream[sent..]);
        receives += 1;
    }
    assert!(receives <= 16 + 4, "{receives}");
    wire.settle();
    let disk = wire.disk.bytes();
    for (cookie, part) in disk.chunks(64 << 10).take(16).enumerate() {
        assert!(part.iter().all(|&byte| byte == cookie as u8 + 1));
    }
}

#[test]
fn receive_that_ends_within_a_small_write_takes_what_is_behind_it() {
    let mut wire = Wire::structured(33);
    let mut stream = Vec::new();
    for cookie in 0..64u64 {
        stream.extend(request_bytes(command::WRITE, 0, cookie, cookie << 12, 4096));
        stream.extend(vec![cookie as u8 + 1; 4096]);
    }
    // A part of the first one, and all that the inbox has room for.
    let (mut sent, mut receives) = (receive_all(&mut wire, &stream[..2000]), 0);
    while sent < stream.len() {
        let bytes = receive_all(&mut wire, &stream[sent..]);
        assert!(
            receives == 0 || sent + bytes == stream.len() || bytes > 100_000,
            "{bytes}"
        );
        sent += bytes;
        receives += 1;
    }
    assert!(receives <= 4, "{receives}");
    wire.settle();
    let disk = wire.disk.bytes();
    for (cookie, part) in disk.chunks(4096).take(64).enumerate() {
        assert!(part.iter().all(|&byte| byte == cookie as u8 + 1));
    }
}

#[test]
fn payload_gets_its_buffer_only_when_some_of_it_is_there() {
    let mut wire = Wire::structured(21);
    let pool = std::sync::Arc::clone(wire.host.pool());
    let all = pool.free_bytes();
    assert_eq!(wire.session.owed(), Owed::Nothing);
    wire.send(&request_bytes(command::WRITE, 0, 1, 0, 2 << 20));
    wire.send(&[1; 300]);
    let Owed::Data(first) = wire.session.owed() else {
        panic!("data is owed");
    };
    assert_eq!(pool.free_bytes(), all, "nothing is held for 300 bytes");
    wire.send(&vec![1; (32 << 10) - 300]);
    assert!(pool.free_bytes() < all);
    assert_eq!(wire.session.owed(), Owed::Data(first));
    wire.send(&vec![1; (1 << 20) - (32 << 10)]);
    let Owed::Data(second) = wire.session.owed() else {
        panic!("data is owed");
    };
    assert_ne!(first, second, "the second MiB has its own time");
    wire.settle();
    assert_eq!(
        pool.free_bytes(),
        all,
        "nothing is held for what has not begun"
    );
    wire.send(&vec![1; 1 << 20]);
    assert_eq!(wire.session.owed(), Owed::Nothing);
    wire.settle();
    assert!(wire.disk.bytes()[..2 << 20].iter().all(|&byte| byte == 1));
}

#[test]
fn refused_payload_is_owed_too() {
    let mut wire = Wire::simple(22, "frozen");
    wire.send(&request_bytes(command::WRITE, 0, 1, 0, 3 << 20));
    let mut parts = std::collections::BTreeSet::new();
    for _ in 0..6 {
        let Owed::Data(part) = wire.session.owed() else {
            panic!("data is owed");
        };
        parts.insert(part);
        wire.send(&vec![0; 512 << 10]);
    }
    assert!(parts.len() >= 3, "{parts:?}");
    assert_eq!(wire.session.owed(), Owed::Nothing);
}

#[test]
fn shut_down_answers_what_was_received_and_closes() {
    let mut wire = Wire::structured(20);
    wire.send(&request_bytes(command::READ, 0, 1, 0, 512));
    wire.session.shut_down();
    let Receive::Wait = wire.session.receive(&mut wire.host) else {
        panic!("something is in flight");
    };
    wire.settle();
    assert!(wire.closed);
    assert_eq!(wire.answer(0, 512).1.error(), 0);
    // A receive was under way when the node stopped: what it brings is neither done nor refused, so
    // that a client that reconnects sends it again.
    let mut wire = Wire::structured(21);
    let bytes = [
        request_bytes(command::WRITE, 0, 2, 0, 512),
        vec![1; 512],
        request_bytes(command::FLUSH, 0, 3, 0, 0),
    ]
    .concat();
    let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
        panic!("an idle session takes bytes");
    };
    place[..bytes.len()].copy_from_slice(&bytes);
    wire.session.shut_down();
    wire.session.received(bytes.len(), &mut wire.host);
    wire.settle();
    assert!(wire.closed);
    assert!(wire.inbound.is_empty());
    assert_eq!(wire.disk.bytes()[..512], [0; 512]);
}
