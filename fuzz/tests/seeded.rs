//! The targets on seeded mutations of good input: the short form of fuzzing that every test run
//! does. `FUZZ_SEED` replays one run, `FUZZ_RUNS` sets how many there are.

use hdcs_core::volume::Volume;
use hdcs_fuzz::{formats, nbd, nbd_example, replay};

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
