//! What is packed is unpacked, all of it or a part, and what was changed is refused or leaves zeroes.

use super::*;
use crate::objects::format::table_bytes;

const VOLUME: [u8; 16] = [7; 16];
const NUMBER: u64 = 44;

/// Runs of equal bytes, behind a byte that tells the method.
#[derive(Debug)]
struct Runs;

impl Codec for Runs {
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        *stored.first_mut()? = method as u8;
        let mut at = 1;
        for run in plain
            .chunk_by(|a, b| a == b)
            .flat_map(|run| run.chunks(255))
        {
            let place = stored.get_mut(at..at + 2)?;
            place.copy_from_slice(&[run.len() as u8, run[0]]);
            at += 2;
        }
        Some(at)
    }

    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool {
        let mut at = 0;
        for run in stored[1..].chunks(2) {
            let &[count, byte] = run else {
                return false;
            };
            let Some(place) = plain.get_mut(at..at + usize::from(count)) else {
                return false;
            };
            place.fill(byte);
            at += usize::from(count);
        }
        stored[0] == method as u8 && at == plain.len()
    }
}

/// Slots of which those of every third frame do not shrink.
fn slots(count: u32) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(u64::from(count));
    let mut slots = Vec::new();
    for slot in 0..count {
        let noise = slot / FRAME_SLOTS % 3 == 1;
        let byte = |_| if noise { random.u8(..) } else { slot as u8 };
        slots.extend((0..SLOT_BYTES).map(byte));
    }
    slots
}

fn packed(count: u32) -> (Vec<u8>, Vec<u8>, Frames) {
    let plain = slots(count);
    let table = vec![0xee; table_bytes(3)];
    let (object, frames) = pack(&Runs, Method::Zstd, VOLUME, NUMBER, &plain, &table);
    assert_eq!(slots_of_size(object.len() as u64), count);
    let offset = frames.table_offset(table.len());
    assert!(
        object[offset..] == table,
        "the table is where it is said to be"
    );
    (plain, object, frames)
}

#[test]
fn frames_are_parsed_as_they_are_written() {
    for count in [4, 15, 16, 17, 40, 4095, 4096] {
        let (_, object, frames) = packed(count);
        let parsed = Frames::parse(&VOLUME, NUMBER, &object);
        assert_eq!(parsed, Ok(frames), "{count} slots");
    }
    let (_, mut object, _) = packed(40);
    let parse = |number, bytes: &[u8]| Frames::parse(&VOLUME, number, bytes).err();
    assert_eq!(parse(NUMBER + 1, &object), Some(FormatError::Identity));
    assert!(parse(NUMBER, &object[..FRAMES_OFFSET - 1]).is_some());
    for bit in 0..FRAMES_OFFSET * 8 {
        object[bit / 8] ^= 1 << (bit % 8);
        assert!(parse(NUMBER, &object).is_some(), "bit {bit}");
        object[bit / 8] ^= 1 << (bit % 8);
    }
    // A good checksum over what cannot be.
    let lengths = size_of::<FrameHeader>();
    for (at, value) in [
        (10, 3),
        (12, 0),
        (13, 0xff),
        (lengths, 15),
        (lengths + 2 * 200, 1),
    ] {
        let mut bad = object[..FRAMES_OFFSET].to_vec();
        bad[at] = value;
        if at >= lengths {
            bad[at + 1] = 0;
        }
        seal(&mut bad);
        assert!(
            matches!(parse(NUMBER, &bad), Some(FormatError::Field(_))),
            "byte {at}"
        );
    }
}

#[test]
fn parts_bring_every_range_of_slots_and_read_little() {
    let (plain, object, frames) = packed(70);
    assert!(object.len() < plain.len() / 2);
    for first in 0..70 {
        for count in 1..=70 - first {
            let part = frames.part(first, count);
            let from = part.offset() as usize;
            let stored = &object[from..from + part.bytes()];
            let mut out = vec![1; count as usize * SLOT_BYTES];
            part.unpack(&Runs, stored, &mut out);
            let wanted = first as usize * SLOT_BYTES..(first + count) as usize * SLOT_BYTES;
            assert!(out == plain[wanted], "{count} slots from {first}");
            let units: Vec<_> = part.units().collect();
            let mut at = 0;
            for (_, range) in &units {
                assert!(range.start == at && range.len() >= STORED_BYTES_MIN);
                at = range.end;
            }
            assert_eq!(at, part.bytes());
        }
    }
    // Frame 1 did not shrink: one slot of it is one slot.
    let part = frames.part(20, 1);
    assert_eq!(part.bytes(), SLOT_BYTES);
    let units: Vec<_> = part.units().map(|(unit, _)| unit).collect();
    assert_eq!(units, [Unit::Slot(20)]);
    let units: Vec<_> = frames.part(33, 1).units().collect();
    assert!(matches!(units[..], [(Unit::Frame(2), _)]));
}

#[test]
fn units_of_an_object_are_each_named_once() {
    let (_, _, frames) = packed(70);
    let mut names: Vec<_> = frames.part(0, 70).units().map(|(unit, _)| unit).collect();
    // Frames 0, 2 and 3, the 16 slots of frame 1 and the 6 of frame 4.
    assert_eq!(names.len(), 3 + 16 + 6);
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), frames.part(0, 70).units().count());
}

#[test]
fn a_bad_frame_leaves_zeroes_and_the_others_are_good() {
    let (plain, mut object, frames) = packed(70);
    let part = frames.part(0, 70);
    let frame = frames.offset(2);
    object[frame] ^= 3;
    let mut out = vec![1; plain.len()];
    let unpack = |object: &[u8], out: &mut [u8]| {
        let stored = &object[FRAMES_OFFSET..FRAMES_OFFSET + part.bytes()];
        part.unpack(&Runs, stored, out);
    };
    unpack(&object, &mut out);
    let bad = 32 * SLOT_BYTES..48 * SLOT_BYTES;
    assert!(out[bad.clone()].iter().all(|&byte| byte == 0));
    assert!(out[..bad.start] == plain[..bad.start] && out[bad.end..] == plain[bad.end..]);
    // Cut, or the slots are not there at all.
    part.unpack(&Runs, &object[FRAMES_OFFSET..frame], &mut out);
    assert!(out[bad.start..].iter().all(|&byte| byte == 0));
    let beyond = frames.part(4000, 3);
    let mut out = vec![1; 3 * SLOT_BYTES];
    let from = beyond.offset() as usize;
    beyond.unpack(&Runs, &object[from..from + beyond.bytes()], &mut out);
    assert!(out.iter().all(|&byte| byte == 0));
}

#[test]
fn the_cache_of_frames_is_bounded_and_keeps_what_is_used() {
    let mut cache = FrameCache::default();
    let (_, _, frames) = packed(4096);
    for number in 1..=20_000 {
        cache.insert(number, frames.clone());
        assert!(cache.get(1).is_some(), "it was used all the time");
        assert!(cache.memory_bytes() <= OBJECT_FRAMES_MEMORY_BYTES);
    }
    assert!(cache.get(2).is_none() && cache.get(20_000).is_some());
    assert!(cache.tables.len() > 5000 && cache.tables.len() == cache.ages.len());
    for number in 1..=20_000 {
        cache.remove(number);
    }
    assert_eq!((cache.memory_bytes(), cache.ages.len()), (0, 0));
}
