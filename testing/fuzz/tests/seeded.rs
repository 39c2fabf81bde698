//! The targets on seeded mutations of good input: the short form of fuzzing that every test run
//! does. `FUZZ_SEED` replays one run, `FUZZ_RUNS` sets how many there are.

use hdcs_backend::codec::CODECS;
use hdcs_core::base::codec::Method;
use hdcs_core::cache::heat_map::{Gathering, Heat};
use hdcs_core::objects::format::{
    Ancestor, Manifest, MapEntry, SLOT_BYTES, Snapshot, TailEntry, index_bytes, page_bytes,
    usage_bytes,
};
use hdcs_core::objects::frames::pack;
use hdcs_core::objects::io::SnapshotName;
use hdcs_core::volume::Volume;
use hdcs_fuzz::{
    clients, clients_example, formats, heat, messages, messages_example, messenger,
    messenger_example, nbd, nbd_example, objects, replay,
};

/// Call a target on so many inputs; a panic names the seed that replays it.
fn each(runs: u64, target: fn(&[u8]), input: impl Fn(&mut fastrand::Rng) -> Vec<u8>) {
    let set = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seeds = match set("FUZZ_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..set("FUZZ_RUNS").unwrap_or(runs),
    };
    for seed in seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let bytes = input(&mut random);
        let caught = std::panic::catch_unwind(|| target(&bytes));
        if let Err(panic) = caught {
            eprintln!("FUZZ_SEED={seed}, {} bytes", bytes.len());
            std::panic::resume_unwind(panic);
        }
    }
}

/// Change a few bytes, and perhaps the length.
fn mutate(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    for _ in 0..[0, 1, 1, 2, 8][random.usize(..5)] {
        let at = random.usize(..bytes.len());
        match random.u8(..6) {
            0 => bytes[at] ^= 1 << random.u8(..8),
            1 => bytes[at] = random.u8(..),
            2 => bytes[at] = [0, 0xff, 0x7f, 0x80][random.usize(..4)],
            3 => bytes.truncate(at + 1),
            4 => {
                let end = (at + random.usize(1..40)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => drop(bytes.drain(at..(at + random.usize(..40)).min(bytes.len() - 1).max(at))),
        }
    }
}

#[test]
fn nbd_survives_mutations() {
    each(3000, nbd, |random| {
        let mut bytes = nbd_example(random);
        // Most of the meaning is at the start; payloads are long.
        let tail = bytes.split_off(bytes.len().min([400, 4000, usize::MAX][random.usize(..3)]));
        mutate(&mut bytes, random);
        bytes.extend(tail);
        bytes
    });
}

#[test]
fn messenger_survives_mutations() {
    each(4000, messenger, |random| {
        let mut bytes = messenger_example(random);
        mutate(&mut bytes, random);
        bytes
    });
}

#[test]
fn messages_survive_mutations() {
    each(200_000, messages, |random| {
        let mut bytes = messages_example(random);
        mutate(&mut bytes, random);
        bytes
    });
}

#[test]
fn client_records_survive_mutations() {
    each(100_000, clients, |random| {
        let mut bytes = clients_example(random);
        mutate(&mut bytes, random);
        bytes
    });
}

#[test]
fn formats_survive_mutations() {
    let config = Volume::format_log(&hdcs_fuzz::replay_config(), 5);
    each(100_000, formats, move |random| {
        let mut bytes = config.to_vec();
        if random.bool() {
            bytes.iter_mut().for_each(|byte| *byte = 0);
            bytes.truncate(random.usize(100..4096));
            let head = random.usize(1..=bytes.len().min(128));
            random.fill(&mut bytes[..head]);
            bytes[..8].copy_from_slice(b"HDCSSPAN");
        }
        mutate(&mut bytes, random);
        bytes
    });
}

/// Footers as a cache has them.
#[test]
fn footers_survive_mutations() {
    let image = include_bytes!("../../../crates/core/tests/golden/cache-v1.bin");
    each(20_000, formats, move |random| {
        // Behind both superblocks and a block of the journal.
        let mut bytes = image[3 * 4096..4 * 4096].to_vec();
        mutate(&mut bytes, random);
        bytes.resize(4096, 0);
        bytes
    });
}

#[test]
fn heat_maps_survive_mutations() {
    each(100_000, heat, |random| {
        let bytes = random.u64(8..4000) * 512;
        let mut gathering = Gathering::new(bytes, [2, 4, 8, 16][random.usize(..4)]);
        for _ in 0..random.usize(..60) {
            let heat = [Heat::Hot, Heat::Warm, Heat::Cool, Heat::Cold][random.usize(..4)];
            gathering.see(random.u64(..bytes / 4096 + 1), heat);
        }
        let mut map = gathering.finish().encode();
        mutate(&mut map, random);
        map
    });
}

#[test]
fn replay_survives_mutations() {
    each(150, replay, |random| {
        let mut bytes = Vec::new();
        let steps = random.usize(..30);
        for _ in 0..steps {
            bytes.extend([
                random.u8(..) & !1,
                random.u8(..),
                random.u8(..),
                random.u8(..),
            ]);
        }
        bytes.extend([7, 0, 0, 0]);
        for _ in 0..random.usize(..12) {
            let blocks = [2, 12, 40, 1000][random.usize(..4)];
            let block = random.u16(..blocks);
            bytes.push(random.u8(..));
            bytes.extend(block.to_le_bytes());
            bytes.extend(random.u16(..).to_le_bytes());
            bytes.push(random.u8(..));
        }
        bytes
    });
}

/// A manifest with something of everything.
fn manifest(random: &mut fastrand::Rng) -> Vec<u8> {
    let is_compressed = random.bool();
    let manifest = Manifest {
        volume: [7; 16],
        sequence: 9,
        epoch: 2,
        number_first: 100,
        number_limit: 500,
        bytes: 1 << 20,
        page_blocks: 1024,
        own_map: false,
        maps: (1..random.u64(2..5))
            .map(|number| MapEntry {
                number,
                bytes: (index_bytes(2) + 2 * page_bytes(1)) as u32,
                entries: 2,
            })
            .collect(),
        usages: vec![MapEntry {
            number: 7,
            bytes: usage_bytes(3) as u32,
            entries: 3,
        }],
        tail: (10..random.u64(11..15))
            .map(|number| TailEntry {
                number,
                slots: 8,
                runs: 2,
                compressed_bytes: if is_compressed {
                    random.u32(600..30_000)
                } else {
                    0
                },
            })
            .collect(),
        beginnings: vec![1, 9],
        snapshots: SnapshotName::new("a")
            .map(|name| Snapshot {
                made_ms: random.u64(..),
                name,
                number: 5,
                pin: 6,
                bytes: 300,
            })
            .into_iter()
            .collect(),
        ancestors: vec![Ancestor {
            volume: [8; 16],
            below: 4,
            location: "elsewhere".into(),
        }],
        ..Manifest::default()
    };
    let mut bytes = vec![0; manifest.encoded_bytes()];
    manifest.write(&mut bytes);
    bytes
}

/// A compressed object; some of its frames do not shrink.
fn compressed(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut slots = vec![7; random.usize(1..40) * SLOT_BYTES];
    let head = random.usize(..slots.len());
    random.fill(&mut slots[..head]);
    let method = Method::ALL[random.usize(..2)];
    let (mut object, _) = pack(&CODECS, method, [7; 16], 1, &slots, &[0; 80]);
    let at = random.usize(..object.len());
    object[at] ^= random.u8(..);
    object
}

#[test]
fn objects_survive_mutations() {
    each(100_000, objects, |random| {
        let mut bytes = if random.bool() {
            manifest(random)
        } else if random.u8(..20) == 0 {
            compressed(random)
        } else {
            // Small numbers, of which tables and maps are made.
            let length = random.usize(64..400) / 4 * 4;
            (0..length)
                .map(|_| {
                    if random.u8(..3) == 0 {
                        random.u8(..9)
                    } else {
                        0
                    }
                })
                .collect()
        };
        mutate(&mut bytes, random);
        bytes
    });
}
