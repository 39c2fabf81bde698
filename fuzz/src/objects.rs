//! What a store returns against the parsers of objects: manifests, tables, pieces of the map,
//! references and names.
//!
//! Whatever a parser accepts must be within bounds, and a manifest must be the same when it is
//! written again.

use hdcs_core::format::{seal, seal_at};
use hdcs_core::limits::OBJECT_BATCH_BLOCKS_MAX;
use hdcs_core::objects::format::{
    CLONE_MAGIC, DATA_MAGIC, MANIFEST_MAGIC, MAP_MAGIC, Manifest, Reference, SLOT_BYTES, SLOT_NONE,
    parse_map, parse_table,
};
use hdcs_core::objects::frames::{FRAMES_MAGIC, FRAMES_OFFSET, Frames};
use hdcs_core::objects::io::{Name, SnapshotName};
use hdcs_node::codec::CODECS;

const VOLUME: [u8; 16] = [7; 16];
const BLOCKS: u64 = 1 << 20;

/// The bytes as they are, and with magic, version, lengths and checksum put right.
pub fn objects(data: &[u8]) {
    parse_all(data);
    if data.len() >= 128 {
        let mut manifest = data.to_vec();
        manifest[..8].copy_from_slice(&MANIFEST_MAGIC);
        manifest[8..10].copy_from_slice(&[1, 0]);
        let length = manifest.len() as u32;
        manifest[12..16].copy_from_slice(&length.to_le_bytes());
        seal(&mut manifest);
        parse_all(&manifest);
    }
    if data.len() >= 64 {
        let mut map = data.to_vec();
        map[..8].copy_from_slice(&MAP_MAGIC);
        map[8..10].copy_from_slice(&[1, 0]);
        let length = map.len() as u32;
        map[12..16].copy_from_slice(&length.to_le_bytes());
        map[24..40].copy_from_slice(&VOLUME);
        map[40..52].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        seal(&mut map);
        parse_all(&map);
        let mut table = data.to_vec();
        let footer = table.len() - 64;
        let runs = (footer / 16) as u32;
        table[footer..footer + 8].copy_from_slice(&DATA_MAGIC);
        table[footer + 8..footer + 10].copy_from_slice(&[1, 0]);
        table[footer + 12..footer + 16].copy_from_slice(&runs.to_le_bytes());
        table[footer + 24..footer + 40].copy_from_slice(&VOLUME);
        table[footer + 40..footer + 48].copy_from_slice(&1u64.to_le_bytes());
        seal_at(&mut table, footer);
        parse_all(&table);
        let mut frames = data.to_vec();
        frames.resize(frames.len().max(FRAMES_OFFSET), 0);
        frames[..8].copy_from_slice(&FRAMES_MAGIC);
        frames[8..10].copy_from_slice(&[2, 0]);
        frames[10] = 1 + frames[10] % 2;
        let slots = 1 + u32::from(u16::from_le_bytes([frames[12], frames[13]]) % 4096);
        frames[12..16].copy_from_slice(&slots.to_le_bytes());
        frames[24..40].copy_from_slice(&VOLUME);
        frames[40..48].copy_from_slice(&1u64.to_le_bytes());
        frames[64 + 2 * slots.div_ceil(16) as usize..FRAMES_OFFSET].fill(0);
        seal(&mut frames[..FRAMES_OFFSET]);
        parse_all(&frames);
        let mut clone = data[..64].to_vec();
        clone[..8].copy_from_slice(&CLONE_MAGIC);
        clone[8..10].copy_from_slice(&[1, 0]);
        clone[24..40].copy_from_slice(&VOLUME);
        seal(&mut clone);
        parse_all(&clone);
    }
}

/// Every part of an object leaves slots, whatever its frames are.
fn unpack_all(frames: &Frames, object: &[u8]) {
    for (first, count) in [
        (0, 1),
        (frames.slots() / 2, 20),
        (frames.slots() - 1, 3),
        (4000, 96),
    ] {
        let part = frames.part(first, count);
        let from = part.offset() as usize;
        let end = part.units().last().map_or(0, |(_, range)| range.end);
        assert_eq!(end, part.bytes());
        let stored = object.get(from..).unwrap_or(&[]);
        let mut slots = vec![1; count as usize * SLOT_BYTES];
        part.unpack(&CODECS, &stored[..stored.len().min(end)], &mut slots);
    }
}

fn parse_all(data: &[u8]) {
    if let Ok(manifest) = Manifest::parse(data) {
        let mut again = vec![0; manifest.encoded_bytes()];
        manifest.write(&mut again);
        assert_eq!(Manifest::parse(&again), Ok(manifest));
    }
    if let Ok((footer, runs)) = parse_table(&VOLUME, 1, BLOCKS, data) {
        for run in runs {
            let (count, slot) = (run.count.get(), run.slot.get());
            assert!(run.block.get() + u64::from(count) <= BLOCKS);
            assert!(slot == SLOT_NONE || slot + count <= footer.slots.get());
        }
    }
    let _ = parse_map(&VOLUME, 1, 0, BLOCKS, data, |page, runs| {
        assert!(page * 4096 < BLOCKS);
        let mut end = 0;
        for run in runs {
            assert!(u32::from(run.first) >= end && run.end() <= 4096);
            assert!(run.place().slot() + u32::from(run.count) <= OBJECT_BATCH_BLOCKS_MAX as u32);
            end = run.end();
        }
    });
    if let Ok(frames) = Frames::parse(&VOLUME, 1, data) {
        assert!((1..=OBJECT_BATCH_BLOCKS_MAX as u32).contains(&frames.slots()));
        unpack_all(&frames, data);
    }
    let _ = Reference::parse(&VOLUME, data);
    if let Ok(text) = core::str::from_utf8(data) {
        if let Some(name) = Name::parse(text) {
            assert_eq!(name.to_string(), text);
        }
        if let Some(name) = SnapshotName::new(text) {
            assert_eq!(name.as_str(), text);
        }
    }
}
