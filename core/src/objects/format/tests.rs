//! What is written is parsed, and what was changed is refused.

use super::*;
use alloc::vec;

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
        maps: vec![MapEntry {
            number: 5,
            bytes: 200,
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
    assert!(bad(|m| m.tail.reverse()));
    assert!(bad(|m| m.maps[0].number = 500));
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
fn map_is_parsed_as_it_is_written() {
    let runs = [
        Run::new(0, 5, Place::new(9, 3)),
        Run::new(7, 1, Place::new(8, 0)),
    ];
    let mut bytes = vec![0xff; 4096];
    let mut writer = MapWriter::new(&mut bytes);
    assert!(writer.add(0, &runs) && writer.add(2, &[]));
    let used = writer.finish(VOLUME, 77, 1);
    let parse = |blocks, bytes: &[u8]| {
        let mut pages = Vec::new();
        parse_map(&VOLUME, 77, 1, blocks, bytes, |page, runs| {
            pages.push((page, runs));
        })
        .map(|()| pages)
    };
    let expected = vec![(0, runs.to_vec()), (2, Vec::new())];
    assert_eq!(parse(10_000, &bytes), Ok(expected.clone()));
    assert_eq!(parse(10_000, &bytes[..used]), Ok(expected));
    assert_eq!(parse(8192, &bytes), Err(FormatError::Field("page")));
    assert!(parse(10_000, &bytes[..used - 1]).is_err());
    for bit in 0..used * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(parse(10_000, &bad).is_err(), "bit {bit}");
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
