//! Small JSON files that survive a crash and show damage: the node's identity, the catalogue, wrapped keys, records.
//!
//! A file is `{"magic", "version", "checksum", "content"}`. The checksum is CRC-64/NVME of the
//! compact form of `content`, so that reformatting by hand does no harm and a changed value does.
//!
//! Invariants:
//! 1. After [`write`] returned, the new content is durable under its name; if it fails or the
//!    machine stops within it, the old content is.
//! 2. [`read`] returns only content whose magic, version and checksum match.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use hdcs_core::format::control_checksum;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The largest file that is read: a catalogue entry has a few hundred bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What kind of file it is, and the newest version that this program reads.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// The value of `magic`.
    pub magic: &'static str,
    /// The newest version.
    pub version: u64,
}

/// Why a file was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SealedError {
    /// It could not be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is larger than any file of this kind.
    #[error("larger than {FILE_BYTES_MAX} bytes: not a file of HDCS, or damaged")]
    TooLarge,
    /// It is not the JSON that HDCS writes.
    #[error("damaged: not the JSON that HDCS writes ({0})")]
    Syntax(#[from] serde_json::Error),
    /// It belongs to something else.
    #[error("not a file of this kind: magic is `{found}`, expected `{expected}`")]
    Magic {
        /// In the file.
        found: String,
        /// What this program writes.
        expected: &'static str,
    },
    /// A newer program wrote it.
    #[error(
        "made by a newer program (format {found}, this program knows {supported}): use that program"
    )]
    Newer {
        /// In the file.
        found: u64,
        /// What this program reads.
        supported: u64,
    },
    /// Its checksum does not match.
    #[error("damaged: its checksum does not match its content")]
    Checksum,
}

impl SealedError {
    /// Whether the file is not there.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    magic: String,
    version: u64,
    checksum: String,
    content: Value,
}

fn checksum(content: &Value) -> String {
    format!("{:016x}", control_checksum(content.to_string().as_bytes()))
}

/// Refuse `path` if a newer program has written it; whatever else is wrong with it is for [`read`] to say.
pub fn refuse_newer(path: &Path, kind: Kind) -> Result<(), SealedError> {
    match read::<Value>(path, kind) {
        Err(newer @ SealedError::Newer { .. }) => Err(newer),
        _ => Ok(()),
    }
}

/// Read and check `path`.
pub fn read<T: DeserializeOwned>(path: &Path, kind: Kind) -> Result<T, SealedError> {
    let mut text = Vec::new();
    File::open(path)?
        .take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(SealedError::TooLarge);
    }
    let any: Value = serde_json::from_slice(&text)?;
    // Version before form: a newer file may have another form.
    if let Some(found) = any.get("magic").and_then(Value::as_str)
        && found != kind.magic
    {
        return Err(SealedError::Magic {
            found: found.to_owned(),
            expected: kind.magic,
        });
    }
    if let Some(found) = any.get("version").and_then(Value::as_u64)
        && found > kind.version
    {
        return Err(SealedError::Newer {
            found,
            supported: kind.version,
        });
    }
    let envelope: Envelope = serde_json::from_value(any)?;
    if envelope.checksum != checksum(&envelope.content) {
        return Err(SealedError::Checksum);
    }
    Ok(serde_json::from_value(envelope.content)?)
}

/// Replace `path` by `content`, durably.
pub fn write<T: Serialize>(path: &Path, kind: Kind, content: &T) -> Result<(), SealedError> {
    Ok(replace(path, &encode(kind, content)?)?)
}

/// The bytes of a file with this content.
pub fn encode<T: Serialize>(kind: Kind, content: &T) -> Result<Vec<u8>, SealedError> {
    let content = serde_json::to_value(content)?;
    let envelope = Envelope {
        magic: kind.magic.to_owned(),
        version: kind.version,
        checksum: checksum(&content),
        content,
    };
    let mut text = serde_json::to_vec_pretty(&envelope)?;
    text.push(b'\n');
    Ok(text)
}

/// Replace the bytes of `path`, durably: if it fails or the machine stops within it, the old ones stand.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = temporary_of(path);
    let result = write_through(&temporary, path, bytes);
    if result.is_err() {
        // The old content stands; what is left of the new one is of no use.
        let _ = fs::remove_file(&temporary);
    }
    result
}

pub(super) fn write_through(temporary: &Path, path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = File::create(temporary)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(temporary, path)?;
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    sync_directory(parent.unwrap_or(Path::new(".")))
}

pub(super) fn temporary_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    path.with_file_name(name)
}

/// Make the names in a directory durable.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        magic: "hdcs-test",
        version: 3,
    };

    fn written() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file.json");
        write(&path, KIND, &serde_json::json!({"b": 7, "a": "x"})).unwrap();
        (directory, path)
    }

    #[test]
    fn sealed_reads_back() {
        let (_directory, path) = written();
        let back: Value = read(&path, KIND).unwrap();
        assert_eq!(back, serde_json::json!({"a": "x", "b": 7}));
        assert!(!temporary_of(&path).exists());
    }

    #[test]
    fn sealed_every_flipped_byte_is_refused_or_harmless() {
        let (_directory, path) = written();
        let good = fs::read(&path).unwrap();
        let content: Value = read(&path, KIND).unwrap();
        for index in 0..good.len() {
            let mut bad = good.clone();
            bad[index] ^= 0x04;
            fs::write(&path, &bad).unwrap();
            if let Ok(back) = read::<Value>(&path, KIND) {
                assert_eq!(back, content, "byte {index} changed the content unseen");
            }
        }
    }

    #[test]
    fn sealed_cut_short_is_refused() {
        let (_directory, path) = written();
        let good = fs::read(&path).unwrap();
        for length in 0..good.len() - 2 {
            fs::write(&path, &good[..length]).unwrap();
            assert!(read::<Value>(&path, KIND).is_err(), "length {length}");
        }
    }

    #[test]
    fn sealed_newer_and_foreign_are_told_apart() {
        let (_directory, path) = written();
        let older = Kind { version: 2, ..KIND };
        assert!(matches!(
            read::<Value>(&path, older),
            Err(SealedError::Newer {
                found: 3,
                supported: 2
            })
        ));
        let other = Kind {
            magic: "other",
            ..KIND
        };
        assert!(matches!(
            read::<Value>(&path, other),
            Err(SealedError::Magic { .. })
        ));
    }

    #[test]
    fn sealed_failed_write_keeps_the_old_content() {
        let (_directory, path) = written();
        fs::create_dir(temporary_of(&path)).unwrap();
        assert!(write(&path, KIND, &1).is_err());
        let back: Value = read(&path, KIND).unwrap();
        assert_eq!(back["b"], 7);
    }
}
