//! The compressed entries of a write log: how many there are, and whether each can be unpacked.

use std::fs::File;
use std::os::unix::fs::FileExt;

use hdcs_backend::codec::CODECS;
use hdcs_backend::crypt::LogCipher;
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_PIECE_BYTES_MAX};
use hdcs_core::log::write_log::{Entry, WriteLog};
use serde::Serialize;

/// What there is of them.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Compressed {
    /// Entries.
    pub entries: u64,
    /// Bytes of their blocks.
    pub plain_bytes: u64,
    /// Bytes that these have in the log.
    pub stored_bytes: u64,
}

/// What a log that was replayed has.
pub fn entries(log: &WriteLog) -> impl Iterator<Item = &Entry> {
    (log.first_sequence()..log.next_sequence()).map(|sequence| log.entry(sequence))
}

impl Compressed {
    /// Those of a log that was replayed.
    pub fn of(log: &WriteLog) -> Self {
        let mut all = Self::default();
        for entry in entries(log) {
            let Some(stored) = &entry.stored else {
                continue;
            };
            all.entries += 1;
            all.plain_bytes += entry.range.block_count() * BLOCK_BYTES as u64;
            all.stored_bytes += u64::from(stored.bytes);
        }
        all
    }
}

/// Unpack every one of a log that was replayed, and compare it with its checksum.
pub fn check(file: &File, log: &WriteLog, cipher: Option<&LogCipher>) -> Result<(), String> {
    let mut blocks = vec![0; LOG_PIECE_BYTES_MAX + BLOCK_BYTES];
    let mut plain = vec![0; LOG_PIECE_BYTES_MAX];
    for entry in entries(log) {
        let Some(stored) = &entry.stored else {
            continue;
        };
        let (position, range) = (entry.position, entry.range);
        let blocks = &mut blocks[..stored.block_count() as usize * BLOCK_BYTES];
        let plain = &mut plain[..range.block_count() as usize * BLOCK_BYTES];
        let (offset, _) = log.locate(position);
        file.read_exact_at(blocks, offset)
            .map_err(|error| format!("log position {position}: {error}"))?;
        if let Some(cipher) = cipher {
            cipher.decrypt(offset, blocks);
        }
        if !stored.unpack(&CODECS, blocks, plain) {
            return Err(format!(
                "the write of sectors {} to {} at log position {position} cannot be decompressed",
                range.start,
                range.end() - 1
            ));
        }
    }
    Ok(())
}
