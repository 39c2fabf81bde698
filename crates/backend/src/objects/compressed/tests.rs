//! Compressed volumes over a server in this process, encrypted and not.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use hdcs_core::base::error::IoError;

use super::*;
use crate::conformance::Bench;
use crate::crypt::Encryption;
use crate::crypt::source::KeySource;
use crate::memory::ObjectMemory;
use crate::stores::tests::Served;
use crate::url::BackendUrl;
use crate::verify::{Verified, Watch};
use crate::{Absent, Ask, open_with};

const BYTES: u64 = 8 << 20;
const BLOCK: usize = 4096;

struct Store {
    served: Served,
    key: Option<ObjectKey>,
}

impl Store {
    fn new(is_encrypted: bool) -> Self {
        let served = Served::start();
        let key = is_encrypted.then(|| {
            let path = served.directory.path().join("key");
            fs::write(&path, [5; 32]).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let encryption = Encryption::new(KeySource::File(path)).unwrap();
            encryption.unlock().unwrap().objects
        });
        Self { served, key }
    }

    fn url(&self) -> String {
        let credentials = self.served.directory.path().join("credentials");
        let (endpoint, credentials) = (&self.served.endpoint, credentials.display());
        format!("s3://bucket/volume?endpoint={endpoint}&credentials={credentials}&retry_s=2")
    }

    fn open(&self, absent: Absent, method: Option<Method>) -> Bench {
        let opened = open_with(
            &self.url(),
            BYTES,
            absent,
            self.key.clone(),
            ObjectMemory::most(),
            None,
        )
        .unwrap();
        let stack = opened.build();
        stack.set_compression(method);
        Bench::over(stack)
    }

    fn verified(&self) -> Verified {
        self.verified_with(self.key.clone())
    }

    fn verified_with(&self, key: Option<ObjectKey>) -> Verified {
        struct Unhurried;
        impl Watch for Unhurried {
            fn total(&mut self, _: u64) {}
            fn passed(&mut self, _: u64) -> bool {
                true
            }
        }
        let mut place = BackendUrl::parse(&self.url()).unwrap().place;
        if let Some(key) = key {
            place.encrypt(key);
        }
        place.verify(&mut Unhurried).unwrap()
    }

    /// The data objects.
    fn data(&self) -> Vec<PathBuf> {
        let directory = self.served.directory.path().join("bucket/volume/data");
        let entries = fs::read_dir(directory).unwrap();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    }
}

/// Words that compress well, but for the blocks of every fourth frame.
fn content() -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(8);
    let words = [&b"storage "[..], b"cache ", b"object ", b"frame of slots "];
    let mut content = Vec::new();
    while content.len() < 300 * BLOCK {
        if content.len() / BLOCK / 16 % 4 == 3 {
            content.extend((0..BLOCK).map(|_| random.u8(..)));
        } else {
            content.extend_from_slice(words[random.usize(..4)]);
        }
    }
    content.truncate(300 * BLOCK);
    content
}

fn fill(bench: &mut Bench, content: &[u8]) {
    for (index, piece) in content.chunks(20 * BLOCK).enumerate() {
        bench.write((index * 20 * BLOCK) as u64, piece).unwrap();
    }
    bench.ask(Ask::Flush).unwrap();
}

#[test]
fn what_was_compressed_is_read_the_same_whoever_opens_it() {
    let content = content();
    for is_encrypted in [false, true] {
        for method in Method::ALL {
            let store = Store::new(is_encrypted);
            let mut bench = store.open(Absent::Create, Some(method));
            fill(&mut bench, &content);
            let stored: u64 = (store.data().iter())
                .map(|path| fs::metadata(path).unwrap().len())
                .sum();
            assert!(stored < content.len() as u64 * 2 / 3, "{stored} bytes");
            let in_clear = store.data().iter().any(|path| {
                let object = fs::read(path).unwrap();
                // Noise is stored as it is.
                let noise = &content[50 * BLOCK..50 * BLOCK + 64];
                object.windows(64).any(|run| run == noise)
            });
            assert_eq!(in_clear, !is_encrypted);
            drop(bench);
            let mut bench = store.open(Absent::Refuse, None);
            let mut random = fastrand::Rng::with_seed(9);
            for _ in 0..100 {
                let first = random.usize(..300 * 8);
                let count = random.usize(1..=(300 * 8 - first).min(700));
                let range = first * 512..(first + count) * 512;
                let read = bench.read(range.start as u64, range.len()).unwrap();
                assert!(read == content[range]);
            }
            // A part of a block, over the rest of it.
            bench.write(7 * BLOCK as u64 + 512, &[3; 512]).unwrap();
            bench.ask(Ask::Flush).unwrap();
            let mut expected = content[7 * BLOCK..8 * BLOCK].to_vec();
            expected[512..1024].fill(3);
            assert!(bench.read(7 * BLOCK as u64, BLOCK).unwrap() == expected);
            let verified = store.verified();
            assert_eq!(verified.problems, Vec::<String>::new());
            assert_eq!(verified.blocks, 300);
        }
    }
}

#[test]
fn without_the_key_it_is_verified_that_every_object_is_there() {
    let content = content();
    for method in [None, Some(Method::Lz4)] {
        let store = Store::new(true);
        fill(&mut store.open(Absent::Create, method), &content);
        let verified = store.verified_with(None);
        assert_eq!(verified.problems, Vec::<String>::new());
        assert_eq!(verified.blocks, 0);
        let note = verified.note.expect("it says what is not verified");
        assert!(note.contains("encrypted"), "{note}");
        let path = store.data()[0].clone();
        let good = fs::read(&path).unwrap();
        if method.is_none() {
            fs::write(&path, &good[..BLOCK]).unwrap();
            let said = store.verified_with(None).problems.join("\n");
            assert!(said.contains("too short"), "{said}");
        }
        fs::remove_file(&path).unwrap();
        let said = store.verified_with(None).problems.join("\n");
        assert!(said.contains("is missing"), "{said}");
    }
}

#[test]
fn damage_anywhere_in_a_compressed_object_is_found_and_never_read() {
    let content = content();
    for is_encrypted in [false, true] {
        let store = Store::new(is_encrypted);
        fill(
            &mut store.open(Absent::Create, Some(Method::Zstd)),
            &content,
        );
        let path = store.data()[0].clone();
        let good = fs::read(&path).unwrap();
        // The header, a length, the first frame, and one that is stored as it is.
        for at in [20, 70, 576 + 100, good.len() - 70_000] {
            let mut bad = good.clone();
            bad[at] ^= 16;
            fs::write(&path, &bad).unwrap();
            let problems = store.verified().problems;
            assert_eq!(problems.len(), 1, "byte {at}: {problems:?}");
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(problems[0].contains(name), "{problems:?}");
            if is_encrypted {
                // It is read as one that is not.
                continue;
            }
            let mut bench = store.open(Absent::Refuse, None);
            let mut failed = 0;
            for block in 0..300 {
                match bench.read((block * BLOCK) as u64, BLOCK) {
                    Ok(read) => assert!(read == content[block * BLOCK..(block + 1) * BLOCK]),
                    Err(error) => {
                        assert_eq!(error, IoError::Failed);
                        failed += 1;
                    }
                }
            }
            // What a changed frame still decompresses to may be good in part.
            let expected = match at {
                20 | 70 => 300..=300,
                676 => 1..=16,
                _ => 1..=1,
            };
            assert!(expected.contains(&failed), "byte {at}: {failed} blocks");
        }
        fs::write(&path, &good[..good.len() / 2]).unwrap();
        assert!(!store.verified().problems.is_empty());
        fs::write(&path, &good).unwrap();
        assert!(store.verified().problems.is_empty());
    }
}

#[test]
fn the_same_slots_are_packed_the_same_whatever_was_packed_before() {
    let content = content();
    let slots = &content[..200 * SLOT_BYTES];
    let object = Compressed {
        name: Name::own(hdcs_core::objects::io::Kind::Data, 6),
        writer: [3; 16],
        key: None,
    };
    for method in Method::ALL {
        let first = object.packed(method, slots, &[1; 80]);
        for other in Method::ALL {
            object.packed(other, &content[BLOCK..][..150 * SLOT_BYTES], &[2; 96]);
            assert!(object.packed(method, slots, &[1; 80]) == first);
        }
        let elsewhere = object.clone();
        let slots = slots.to_vec();
        let again = std::thread::spawn(move || elsewhere.packed(method, &slots, &[1; 80]));
        assert!(again.join().unwrap() == first);
    }
}
