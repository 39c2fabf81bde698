//! The superblock of a write log whose device takes no writes any more, kept beside it.
//!
//! `DIR/volumes/NAME/superblock` is the block as it would be on the device. A volume is opened with the newer of the
//! two, so that nothing is replayed that is in the backend already, and perhaps older than what is there.
//!
//! Invariants:
//! 1. After [`write`] returned, the new block is durable under its name; if it fails, or the machine stops within it,
//!    the old one is, or the new one.
//! 2. One that is damaged, or of another volume, is told from none: without it an old log could be replayed.
//! 3. That it says that its log is empty holds as long as no opening has begun since: see [`claims_no_more`].

use std::path::{Path, PathBuf};
use std::{fs, io};

use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::error::FormatError;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_UNFLUSHED, LogSuperblock};
use uuid::Uuid;
use zerocopy::IntoBytes;

use super::sealed;

/// Its name in a volume's directory.
pub const KEPT_FILE: &str = "superblock";

/// Where it is.
pub fn file(directory: &Path) -> PathBuf {
    directory.join(KEPT_FILE)
}

/// What is kept of a volume's log; an error says what is wrong with it, and what to do.
pub fn read(directory: &Path, volume: Uuid) -> Result<Option<LogSuperblock>, String> {
    let path = file(directory);
    let wrong = |what: &dyn std::fmt::Display| {
        format!(
            "the superblock that is kept of its write log: {}: {what}: restore it; without it old data in the log \
             could overwrite newer data in the backend",
            path.display()
        )
    };
    let block = match fs::read(&path) {
        Ok(block) => block,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(wrong(&error)),
    };
    let superblock = LogSuperblock::parse(&block).map_err(|error| match error {
        FormatError::Newer { .. } => format!("{}: {error}", path.display()),
        error => wrong(&error),
    })?;
    if superblock.volume != volume.into_bytes() {
        return Err(wrong(&"it is of another volume"));
    }
    Ok(Some(superblock))
}

/// Replace it, durably. Blocks.
pub fn write(directory: &Path, block: &[u8]) -> io::Result<()> {
    let path = file(directory);
    sealed::write_through(&sealed::temporary_of(&path), &path, block)
}

/// Whether it says that its log holds nothing.
pub fn is_empty(kept: &LogSuperblock) -> bool {
    kept.clean_head == kept.tail
}

/// The same, but that it no longer says that its log is empty: the log is about to be used.
pub fn claims_no_more(kept: &LogSuperblock, keys: Option<&dyn Authenticator>) -> LogSuperblock {
    let mut other = *kept;
    other.clean_head = u64::MAX.into();
    other.seal_with(keys);
    other
}

/// What it says of the backend is so for a new log in its place: that it may hold what it has not flushed, and which
/// sectors it has as they were before something was written that is lost.
pub fn carry(kept: &LogSuperblock, first_block: &mut [u8; BLOCK_BYTES]) {
    let mut new = LogSuperblock::parse(first_block).expect("a new log's superblock is good");
    let unflushed = kept.flags.get() & LOG_UNFLUSHED;
    new.flags = (new.flags.get() & !LOG_UNFLUSHED | unflushed).into();
    (new.lost_ranges, new.lost) = (kept.lost_ranges, kept.lost);
    new.seal();
    first_block.copy_from_slice(new.as_bytes());
}

/// Replace it by one that was parsed. Blocks.
pub fn write_superblock(directory: &Path, kept: &LogSuperblock) -> io::Result<()> {
    write(directory, kept.as_bytes())
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::limits::LOG_BYTES_MIN;

    use super::*;

    #[test]
    fn kept_superblock_is_read_back_or_refused() {
        let directory = tempfile::tempdir().unwrap();
        let here = directory.path();
        let volume = Uuid::from_u128(7);
        assert!(read(here, volume).unwrap().is_none());
        let mut superblock = LogSuperblock::new(volume.into_bytes(), 9, LOG_BYTES_MIN);
        assert!(is_empty(&superblock));
        superblock.tail = 5.into();
        superblock.clean_head = 5.into();
        superblock.seal();
        write_superblock(here, &superblock).unwrap();
        let back = read(here, volume).unwrap().unwrap();
        assert_eq!(back.as_bytes(), superblock.as_bytes());
        assert!(is_empty(&back) && !is_empty(&claims_no_more(&back, None)));
        let mut first_block = [0; BLOCK_BYTES];
        first_block.copy_from_slice(back.as_bytes());
        for (flags, ranges) in [(0, 0), (LOG_UNFLUSHED, 0), (0, 1), (LOG_UNFLUSHED, 2)] {
            superblock.flags = flags.into();
            superblock.lost_ranges = ranges.into();
            for (index, place) in (0..ranges).zip(&mut superblock.lost) {
                *place = [(index * 16).into(), 8.into()];
            }
            carry(&superblock, &mut first_block);
            let new = LogSuperblock::parse(&first_block).unwrap();
            assert_eq!((new.flags.get(), new.lost_ranges.get()), (flags, ranges));
            assert!(new.lost == superblock.lost);
        }
        let claims_nothing = claims_no_more(&back, None);
        LogSuperblock::parse(claims_nothing.as_bytes()).unwrap();
        assert!(
            read(here, Uuid::from_u128(8))
                .unwrap_err()
                .contains("another volume")
        );
        let mut rotten = superblock.as_bytes().to_vec();
        rotten[100] ^= 1;
        write(here, &rotten).unwrap();
        assert!(read(here, volume).unwrap_err().contains("restore it"));
    }
}
