//! Keys and what they encrypt.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::*;

fn key_file(directory: &Path, name: &str, content: &[u8]) -> KeySource {
    let path = directory.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    KeySource::File(path)
}

fn block(unlocked: &Unlocked) -> Vec<u8> {
    let mut block = vec![7; BLOCK_BYTES];
    unlocked.cache.encrypt(5, &mut block);
    block
}

#[test]
fn key_has_one_meaning_in_every_form() {
    let directory = tempfile::tempdir().unwrap();
    let raw: Vec<u8> = (0..32).map(|at| at * 7).collect();
    let digits: Vec<String> = raw.iter().map(|byte| format!("{byte:02x}")).collect();
    let hex = digits.concat();
    let base64 = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, &raw);
    let forms = [raw, format!("{hex}\n").into_bytes(), base64.into_bytes()];
    let prints = forms.iter().map(|form| {
        let source = key_file(directory.path(), "key", form);
        source.read().unwrap().fingerprint()
    });
    let prints: Vec<String> = prints.collect();
    assert_eq!(prints[0], prints[1]);
    assert_eq!(prints[0], prints[2]);
    let cat = KeySource::Command(format!("cat {}", directory.path().join("key").display()));
    assert_eq!(cat.read().unwrap().fingerprint(), prints[0]);
}

#[test]
fn key_that_is_none_is_told() {
    let directory = tempfile::tempdir().unwrap();
    for bad in [&b""[..], b"short", &[b'x'; 64], &[0; 31], &[b'A'; 300]] {
        let error = key_file(directory.path(), "key", bad).read().unwrap_err();
        assert!(error.to_string().contains("32 bytes"), "{error}");
    }
    let absent = KeySource::File(directory.path().join("absent"));
    assert!(absent.read().unwrap_err().to_string().contains("absent"));
    let error = |command: &str| {
        let source = KeySource::Command(command.to_owned());
        source.read().unwrap_err().to_string()
    };
    assert!(error("false").contains("failed"));
    assert!(error("/no/such/program now").contains("/no/such/program"));
    assert!(error("").contains("empty"));
}

#[test]
fn data_key_is_unwrapped_by_its_key_alone() {
    let directory = tempfile::tempdir().unwrap();
    let right = key_file(directory.path(), "right", &[1; 32]);
    let wrong = key_file(directory.path(), "wrong", &[2; 32]);
    let made = Encryption::new(right).unwrap();
    let expected = block(&made.unlock().unwrap());
    let with_wrong = Encryption {
        source: wrong.clone(),
        ..made.clone()
    };
    let error = with_wrong.unlock().unwrap_err().to_string();
    assert!(error.contains(made.key.wrapped_with()), "{error}");
    let rotated = made.rotated(wrong).unwrap();
    assert_eq!(block(&rotated.unlock().unwrap()), expected);
    assert_eq!(rotated.key.id(), made.key.id());
    assert_ne!(rotated.key.wrapped_with(), made.key.wrapped_with());
    let object = rotated.key.to_object();
    assert_eq!(WrappedKey::from_object(&object).unwrap(), *rotated.key);
    let other = Encryption::new(made.source.clone()).unwrap();
    assert_ne!(block(&other.unlock().unwrap()), expected);
}

#[test]
fn wrapped_key_that_was_changed_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let source = key_file(directory.path(), "key", &[1; 32]);
    let made = Encryption::new(source).unwrap();
    let text = serde_json::to_value(&made).unwrap();
    for field in ["id", "nonce", "key"] {
        let mut changed = text.clone();
        let other = Encryption::new(made.source.clone()).unwrap();
        let other = serde_json::to_value(&other).unwrap();
        changed["key"][field] = other["key"][field].clone();
        let changed: Encryption = serde_json::from_value(changed).unwrap();
        let error = changed.unlock().unwrap_err();
        assert!(matches!(error, KeyError::Damaged), "{field}: {error}");
    }
}

#[test]
fn media_and_places_have_ciphertexts_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let source = key_file(directory.path(), "key", &[1; 32]);
    let unlocked = Encryption::new(source).unwrap().unlock().unwrap();
    let (mut found, mut sectors) = (Vec::new(), Vec::new());
    for number in [0, 1] {
        let mut block = vec![7; BLOCK_BYTES];
        unlocked.cache.encrypt(number, &mut block);
        found.push(block);
        let mut blocks = vec![7; 2 * BLOCK_BYTES];
        unlocked.log(number).encrypt(8192, &mut blocks);
        found.extend(blocks.chunks_exact(BLOCK_BYTES).map(<[u8]>::to_vec));
        unlocked.log(number).decrypt(8192, &mut blocks);
        assert!(blocks.iter().all(|&byte| byte == 7));
        let home = unlocked.home(number);
        // Numbers that the log and the SSD tier have here too.
        for sector in [0, 2] {
            let mut unit = vec![7; SECTOR_BYTES];
            home.encrypt(sector, &mut unit);
            sectors.push(unit.clone());
            home.decrypt(sector, &mut unit);
            assert!(unit.iter().all(|&byte| byte == 7));
        }
        for writer in [[3; 16], [4; 16]] {
            let mut slots = vec![7; 2 * SLOT_BYTES];
            let offset = SLOT_BYTES as u64;
            let objects = &unlocked.objects;
            objects.encrypt(writer, number, offset, &mut slots);
            found.extend(
                slots
                    .chunks_exact(SLOT_BYTES)
                    .map(|slot| slot[..BLOCK_BYTES].to_vec()),
            );
            objects.decrypt(writer, number, offset, &mut slots);
            assert!(slots.iter().all(|&byte| byte == 7));
        }
    }
    // Beside the beginnings of all others.
    sectors.extend(found.iter().map(|block| block[..SECTOR_BYTES].to_vec()));
    for mut found in [found, sectors] {
        let count = found.len();
        found.sort();
        found.dedup();
        assert_eq!(found.len(), count);
    }
}
