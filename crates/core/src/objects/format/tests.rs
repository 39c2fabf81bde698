//! What is written is parsed, and what was changed is refused.

use alloc::vec;

use super::*;
use crate::objects::map::Run;

const VOLUME: [u8; 16] = [7; 16];

fn manifest() -> Manifest {
    Manifest {
        begins: true,
        gone: false,
        volume: VOLUME,
        nonce: 3,
        sequence: 9,
        epoch: 2,
        number_first: 100,
        number_limit: 500,
        bytes: 1 << 20,
        page_blocks: 1024,
        own_map: true,
        maps: vec![
            MapEntry {
                number: 7,
                bytes: (index_bytes(2) + 2 * page_bytes(1)) as u32,
                entries: 2,
            },
            MapEntry {
                number: 5,
                bytes: (index_bytes(1) + page_bytes(9)) as u32,
                entries: 1,
            },
        ],
        usages: vec![MapEntry {
            number: 6,
            bytes: usage_bytes(3) as u32,
            entries: 3,
        }],
        tail: vec![
            TailEntry {
                number: 101,
                slots: 9,
                runs: 2,
                compressed_bytes: 0,
            },
            TailEntry {
                number: 103,
                slots: 0,
                runs: 1,
                compressed_bytes: 0,
            },
        ],
        beginnings: vec![1, 9],
        snapshots: vec![Snapshot {
            name: SnapshotName::new("a").unwrap(),
            number: 50,
            pin: 60,
            bytes: 300,
            made_ms: 1_700_000_000_123,
        }],
        ancestors: vec![Ancestor {
            volume: [8; 16],
            below: 90,
            location: "elsewhere".into(),
        }],
    }
}

fn encode(manifest: &Manifest) -> Vec<u8> {
    let mut bytes = vec![0; manifest.encoded_bytes()];
    manifest.write(&mut bytes);
    bytes
}

#[test]
fn manifest_is_parsed_as_it_is_written() {
    assert_eq!(Manifest::parse(&encode(&manifest())), Ok(manifest()));
}

#[test]
fn manifest_with_any_bit_changed_is_refused() {
    let good = encode(&manifest());
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Manifest::parse(&bad).is_err(), "bit {bit}");
    }
    for length in 0..good.len() {
        assert!(Manifest::parse(&good[..length]).is_err());
    }
}

#[test]
fn manifest_out_of_bounds_is_refused() {
    let bad = |change: fn(&mut Manifest)| {
        let mut manifest = manifest();
        change(&mut manifest);
        matches!(
            Manifest::parse(&encode(&manifest)),
            Err(FormatError::Field(_))
        )
    };
    assert!(bad(|m| m.bytes = 100));
    assert!(bad(|m| m.bytes = 0));
    assert!(bad(|m| m.tail[1].number = 101));
    assert!(bad(|m| m.tail[1].number = 6));
    assert!(bad(|m| m.maps[0].number = 500));
    assert!(bad(|m| m.maps[0].bytes = 50));
    assert!(bad(|m| m.maps[0].entries = 0));
    assert!(bad(|m| m.maps[0].entries = u32::MAX));
    assert!(bad(|m| m.usages[0].entries = 4));
    assert!(bad(|m| m.page_blocks = 0));
    assert!(bad(|m| m.page_blocks = 100));
    assert!(bad(|m| m.page_blocks = 2048));
    assert!(bad(|m| m.beginnings = vec![10]));
    assert!(bad(|m| m.number_limit = u64::MAX));
    assert!(bad(|m| m.ancestors[0].below = 101));
}

#[test]
fn manifest_of_a_newer_program_is_told() {
    let mut bytes = encode(&manifest());
    bytes[8] = 2;
    seal(&mut bytes);
    assert_eq!(
        Manifest::parse(&bytes),
        Err(FormatError::Newer {
            found: 2,
            supported: 1
        })
    );
}

#[test]
fn table_is_parsed_as_it_is_written() {
    let run = |block, count, slot| DataRun {
        block: U64::new(block),
        count: U32::new(count),
        slot: U32::new(slot),
    };
    let runs = [run(0, 100, SLOT_NONE), run(3, 2, 1), run(9, 1, 0)];
    let mut bytes = vec![0; table_bytes(3)];
    write_table(VOLUME, 44, 2, 3, false, &runs, &mut bytes);
    let parse =
        |blocks, bytes: &[u8]| parse_table(&VOLUME, 44, blocks, bytes).map(|(_, runs)| runs.len());
    assert_eq!(parse(100, &bytes), Ok(3));
    assert_eq!(parse(99, &bytes), Err(FormatError::Field("block")));
    assert_eq!(
        parse_table(&VOLUME, 45, 100, &bytes).err(),
        Some(FormatError::Identity)
    );
    for bit in 0..bytes.len() * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(parse(100, &bad).is_err(), "bit {bit}");
    }
    let swapped = [runs[1], runs[0], runs[2]];
    write_table(VOLUME, 44, 2, 3, false, &swapped, &mut bytes);
    assert_eq!(parse(100, &bytes), Err(FormatError::Field("slot")));
    write_table(VOLUME, 44, 2, 2, false, &runs, &mut bytes);
    assert_eq!(parse(100, &bytes), Err(FormatError::Field("slot")));
}

#[test]
fn manifest_tells_order_by_place_and_not_by_number() {
    let mut swapped = manifest();
    swapped.tail.reverse();
    swapped.maps.reverse();
    assert_eq!(Manifest::parse(&encode(&swapped)), Ok(swapped));
}

#[test]
fn page_is_parsed_as_it_is_written() {
    let runs = [
        Run::new(0, 5, Place::new(9, 3)),
        Run::new(7, 1, Place::new(8, 0)),
    ];
    let used = page_bytes(2);
    let mut bytes = vec![0xff; used + 100];
    write_page(VOLUME, 77, 3, &runs, &mut bytes[..used]);
    let parse = |blocks, bytes: &[u8]| parse_page(&VOLUME, 77, 3, blocks, bytes);
    assert_eq!(parse(64, &bytes), Ok(runs.to_vec()));
    assert_eq!(parse(8, &bytes[..used]), Ok(runs.to_vec()));
    assert_eq!(parse(7, &bytes), Err(FormatError::Field("first")));
    let identity = Err(FormatError::Identity);
    assert_eq!(parse_page(&VOLUME, 76, 3, 64, &bytes), identity);
    assert_eq!(parse_page(&VOLUME, 77, 4, 64, &bytes), identity);
    assert_eq!(parse_page(&[8; 16], 77, 3, 64, &bytes), identity);
    for length in 0..used {
        assert!(parse(64, &bytes[..length]).is_err());
    }
    for bit in 0..used * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(parse(64, &bad).is_err(), "bit {bit}");
    }
}

#[test]
fn index_is_parsed_as_it_is_written() {
    let entry = |page, offset, is_full| IndexEntry {
        page,
        offset,
        bytes: page_bytes(1) as u32,
        is_full,
        is_inherited: !is_full,
    };
    let pages = [entry(2, 0, true), entry(9, 128, false)];
    let write = |pages: &[IndexEntry]| {
        let mut bytes = vec![0; index_bytes(pages.len())];
        write_index(VOLUME, 77, pages, &mut bytes);
        bytes
    };
    let good = write(&pages);
    let size = (good.len() + 256) as u32;
    let parse = |size, limit, bytes: &[u8]| parse_index(&VOLUME, 77, size, limit, bytes);
    assert_eq!(parse(size, 10, &good), Ok(pages.to_vec()));
    assert_eq!(parse(size, 9, &good), Err(FormatError::Field("page")));
    assert_eq!(
        parse(size - 64, 10, &good),
        Err(FormatError::Field("offset"))
    );
    assert_eq!(parse(10, 10, &good), Err(FormatError::Field("length")));
    let empty = IndexEntry {
        bytes: 0,
        ..entry(2, 0, false)
    };
    let alone = write(&[empty]);
    assert_eq!(parse(alone.len() as u32, 10, &alone), Ok(vec![empty]));
    let swapped = write(&[pages[1], pages[0]]);
    assert_eq!(parse(size, 10, &swapped), Err(FormatError::Field("page")));
    let unaligned = write(&[entry(2, 8, true)]);
    assert_eq!(
        parse(size, 10, &unaligned),
        Err(FormatError::Field("offset"))
    );
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(parse(size, 10, &bad).is_err(), "bit {bit}");
    }
    for length in 0..good.len() {
        assert!(parse(size, 10, &good[..length]).is_err());
    }
}

#[test]
fn usage_is_parsed_as_it_is_written() {
    let entry = |number, live| Usage {
        number,
        live,
        runs: 3,
        is_compressed: number == 4,
    };
    let write = |entries: &[Usage]| {
        let mut bytes = vec![0; usage_bytes(entries.len())];
        write_usage(VOLUME, 77, entries, &mut bytes);
        bytes
    };
    let entries = [entry(4, 7), entry(9, 4096)];
    let good = write(&entries);
    assert_eq!(parse_usage(&VOLUME, 77, &good), Ok(entries.to_vec()));
    assert_eq!(parse_usage(&VOLUME, 78, &good), Err(FormatError::Identity));
    for bad in [entry(0, 7), entry(4, 0), entry(4, 4097)] {
        let bad = parse_usage(&VOLUME, 77, &write(&[bad]));
        assert_eq!(bad, Err(FormatError::Field("entry")));
    }
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(parse_usage(&VOLUME, 77, &bad).is_err(), "bit {bit}");
    }
    for length in 0..good.len() {
        assert!(parse_usage(&VOLUME, 77, &good[..length]).is_err());
    }
}

#[test]
fn slot_checksum_knows_its_place() {
    let block = [1; BLOCK_BYTES];
    let sum = slot_checksum(&VOLUME, 5, 6, &block);
    assert_ne!(sum, slot_checksum(&[8; 16], 5, 6, &block));
    assert_ne!(sum, slot_checksum(&VOLUME, 6, 6, &block));
    assert_ne!(sum, slot_checksum(&VOLUME, 5, 7, &block));
}

#[test]
fn clone_reference_is_parsed_as_it_is_written() {
    let reference = Reference {
        clone: [9; 16],
        pin: 55,
        location: "bucket/clone".into(),
    };
    let mut bytes = vec![0; reference.encoded_bytes()];
    reference.write(VOLUME, &mut bytes);
    assert_eq!(Reference::parse(&VOLUME, &bytes), Ok(reference));
    assert_eq!(
        Reference::parse(&[1; 16], &bytes),
        Err(FormatError::Identity)
    );
    for bit in 0..bytes.len() * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Reference::parse(&VOLUME, &bad).is_err(), "bit {bit}");
    }
    for length in 0..bytes.len() {
        assert!(Reference::parse(&VOLUME, &bytes[..length]).is_err());
    }
}
