//! What a store returns against the parsers of objects: manifests, tables, pages, indexes and usage
//! tables of the map, references and names.
//!
//! Whatever a parser accepts must be within bounds, and a manifest must be the same when it is
//! written again.

use hdcs_backend::codec::CODECS;
use hdcs_core::base::limits::OBJECT_BATCH_BLOCKS_MAX;
use hdcs_core::format::{seal, seal_at};
use hdcs_core::objects::format::{
    CLONE_MAGIC, DATA_MAGIC, MANIFEST_MAGIC, MAP_MAGIC, Manifest, PAGE_MAGIC, Reference,
    SLOT_BYTES, SLOT_NONE, USAGE_MAGIC, page_bytes, parse_index, parse_page, parse_table,
    parse_usage,
};
use hdcs_core::objects::frames::{FRAMES_MAGIC, FRAMES_OFFSET, Frames};
use hdcs_core::objects::io::{Name, SnapshotName};

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
        let mut page = data.to_vec();
        let runs = (page.len() - page_bytes(0)) / (page_bytes(1) - page_bytes(0));
        page.truncate(page_bytes(runs));
        name(&mut page, 0, PAGE_MAGIC);
        page[10..12].copy_from_slice(&(runs as u16).to_le_bytes());
        page[48..56].copy_from_slice(&0u64.to_le_bytes());
        seal(&mut page);
        parse_all(&page);
        let mut usage = data.to_vec();
        name(&mut usage, 0, USAGE_MAGIC);
        let entries = (usage.len() - 64) / 16;
        usage[12..16].copy_from_slice(&(entries as u32).to_le_bytes());
        seal(&mut usage);
        parse_all(&usage);
        for magic in [DATA_MAGIC, MAP_MAGIC] {
            let mut table = data.to_vec();
            let footer = table.len() - 64;
            name(&mut table, footer, magic);
            let entries = (footer / 16) as u32;
            table[footer + 12..footer + 16].copy_from_slice(&entries.to_le_bytes());
            seal_at(&mut table, footer);
            parse_all(&table);
        }
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

/// Let a structure that begins at `at` be what it has to be.
fn name(bytes: &mut [u8], at: usize, magic: [u8; 8]) {
    bytes[at..at + 8].copy_from_slice(&magic);
    bytes[at + 8..at + 10].copy_from_slice(&[1, 0]);
    bytes[at + 24..at + 40].copy_from_slice(&VOLUME);
    bytes[at + 40..at + 48].copy_from_slice(&1u64.to_le_bytes());
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
    if let Ok(runs) = parse_page(&VOLUME, 1, 0, 1024, data) {
        let mut end = 0;
        for run in runs {
            assert!(u32::from(run.first) >= end && run.end() <= 1024);
            assert!(run.place().slot() + u32::from(run.count) <= OBJECT_BATCH_BLOCKS_MAX as u32);
            end = run.end();
        }
    }
    let object_bytes = data.len() as u32 + 4096;
    if let Ok(pages) = parse_index(&VOLUME, 1, object_bytes, BLOCKS, data) {
        for page in pages {
            assert!(page.page < BLOCKS && page.offset + page.bytes <= 4096);
        }
    }
    if let Ok(entries) = parse_usage(&VOLUME, 1, data) {
        assert!(entries.iter().all(|entry| entry.live > 0));
    }
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
