//! The wrapped data key of a volume: `DIR/volumes/NAME/key.json`, a file of its own, so that a rotation leaves no
//! earlier wrapping behind. Whoever finds an old wrapping and the key that it was wrapped with has the data key, which a
//! rotation does not change.
//!
//! ```text
//! step             key.json   key.json.new   key.json.old     a crash after it leaves
//! WriteNew         old        new                             the old key
//! KeepOld          old        new            old, same file   the old key
//! Switch           new                       old              the new key
//! OverwriteOld     new                       zeroes           the new key
//! ForgetOld        new                                        the new key
//! ```
//!
//! Invariants:
//! 1. `key.json` is a whole wrapped key after every step, the old one or the new one: it is replaced by a rename, and
//!    nothing is ever written to the file that has this name.
//! 2. Every wrapping that does not count has a name until its bytes are overwritten in place, durably: [`tidy`] finds
//!    it after a crash.
//! 3. These files are for their owner alone.
//! 4. Nothing is written to a file that has a name elsewhere: a copy of the directory that was made with hard links
//!    shares the key with the original.
//!
//! What this cannot do: a file system that writes elsewhere (btrfs, ZFS, XFS with reflinks that share the file, a
//! snapshot below it) and the flash of an SSD may keep the old bytes. There a rotation helps when the old
//! key-encryption key is destroyed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hdcs_backend::crypt::Encryption;

use super::sealed::{self, Kind, SealedError, sync_directory};

/// What kind of file it is.
pub const KEY: Kind = Kind {
    magic: "hdcs-key",
    version: 1,
};
/// Its name in a volume's directory.
pub const KEY_FILE: &str = "key.json";
const NEW_FILE: &str = "key.json.new";
const OLD_FILE: &str = "key.json.old";

/// One step of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The new key is durable under a name of its own.
    WriteNew,
    /// The old one has another name, too.
    KeepOld,
    /// The new one takes the place of the old one.
    Switch,
    /// The bytes of the old one are overwritten.
    OverwriteOld,
    /// Its name goes.
    ForgetOld,
}

const STEPS: [Step; 5] = [
    Step::WriteNew,
    Step::KeepOld,
    Step::Switch,
    Step::OverwriteOld,
    Step::ForgetOld,
];

/// Why a key was not replaced as a whole.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    /// The old key counts.
    #[error("{0}")]
    Unchanged(#[from] SealedError),
    /// Either key may count after a crash.
    #[error(
        "whether the new wrapping or the old one counts is not known: {0}: both are whole; keep both keys until the \
         daemon has been started again"
    )]
    Unknown(SealedError),
    /// The new key counts, and the old wrapping is still there.
    #[error(
        "the new wrapping is in use, but the old one could not be overwritten in {}: {source}: it is tried again when \
         the daemon starts; until then that file and the old key together show the data key", path.display()
    )]
    OldIsLeft {
        /// The file with the old wrapping.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
}

/// Where the key of the volume with this directory is.
pub fn file(directory: &Path) -> PathBuf {
    directory.join(KEY_FILE)
}

/// The key of a volume.
pub fn read(directory: &Path) -> Result<Encryption, SealedError> {
    sealed::read(&file(directory), KEY)
}

/// Give a volume that has no key yet its key, durably.
pub fn create(directory: &Path, key: &Encryption) -> Result<(), SealedError> {
    write_new(&file(directory), key)?;
    Ok(sync_directory(directory)?)
}

/// Replace the key of a volume, durably, and overwrite the bytes of the one before.
pub fn replace(directory: &Path, key: &Encryption) -> Result<(), ReplaceError> {
    tidy(directory).map_err(SealedError::Io)?;
    for step in STEPS {
        let Err(error) = perform(step, directory, key) else {
            continue;
        };
        return Err(match (step, error) {
            (Step::OverwriteOld | Step::ForgetOld, SealedError::Io(source)) => {
                let path = directory.join(OLD_FILE);
                ReplaceError::OldIsLeft { path, source }
            }
            // The names may have changed, and that may not be durable: nothing is overwritten now.
            (Step::Switch, error) => ReplaceError::Unknown(error),
            (_, error) => {
                // The error that matters is the first one; what is left is found at the next start.
                let _ = tidy(directory);
                ReplaceError::Unchanged(error)
            }
        });
    }
    Ok(())
}

fn perform(step: Step, directory: &Path, key: &Encryption) -> Result<(), SealedError> {
    let [present, new, old] = [KEY_FILE, NEW_FILE, OLD_FILE].map(|name| directory.join(name));
    match step {
        Step::WriteNew => return write_new(&new, key),
        Step::KeepOld => fs::hard_link(present, old).and_then(|()| sync_directory(directory)),
        Step::Switch => fs::rename(new, present).and_then(|()| sync_directory(directory)),
        Step::OverwriteOld => overwrite(&old),
        Step::ForgetOld => fs::remove_file(old).and_then(|()| sync_directory(directory)),
    }?;
    Ok(())
}

fn write_new(path: &Path, key: &Encryption) -> Result<(), SealedError> {
    let text = sealed::encode(KEY, key)?;
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(&text)?;
    Ok(file.sync_all()?)
}

/// Overwrite the bytes of a file where they are, durably, as far as the file system lets them be. A file that has
/// another name, too, is refused.
fn overwrite(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let found = file.metadata()?;
    if found.nlink() > 1 {
        return Err(io::Error::other(
            "it has other names (hard links), and may be the key of another volume's directory: remove those",
        ));
    }
    file.write_all_at(&vec![0; found.len() as usize], 0)?;
    file.sync_all()
}

fn overwrite_and_remove(path: &Path) -> io::Result<()> {
    match overwrite(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => fs::remove_file(path),
    }
}

/// Overwrite and remove what an interrupted replacement has left beside the key that counts; whether there was
/// anything.
pub fn tidy(directory: &Path) -> io::Result<bool> {
    let [present, new, old] = [KEY_FILE, NEW_FILE, OLD_FILE].map(|name| directory.join(name));
    let is_left = new.exists() || old.exists();
    if !is_left {
        return Ok(false);
    }
    // What the names say now is to hold after a crash, too, before any bytes go.
    sync_directory(directory)?;
    overwrite_and_remove(&new)?;
    if is_same_file(&present, &old)? {
        // Before the switch: these are the bytes of the key that counts.
        fs::remove_file(&old)?;
    } else {
        overwrite_and_remove(&old)?;
    }
    sync_directory(directory)?;
    Ok(true)
}

fn is_same_file(one: &Path, other: &Path) -> io::Result<bool> {
    let identity = |path: &Path| match File::open(path).and_then(|file| file.metadata()) {
        Ok(found) => Ok(Some((found.dev(), found.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let (one, other) = (identity(one)?, identity(other)?);
    Ok(one.is_some() && one == other)
}

/// Destroy every wrapping of a volume that is gone: what media still hold of it is unreadable from then on. A wrapping
/// that has a name elsewhere, too, lives on there.
pub fn destroy(directory: &Path) -> io::Result<()> {
    for name in [KEY_FILE, NEW_FILE, OLD_FILE] {
        let path = directory.join(name);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_file() && found.nlink() > 1 => fs::remove_file(&path)?,
            // A directory always has several.
            _ => overwrite_and_remove(&path)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use hdcs_backend::crypt::source::KeySource;

    use super::*;

    /// A volume's directory with a key, and the same key wrapped anew.
    fn with_key() -> (tempfile::TempDir, Encryption, Encryption) {
        let directory = tempfile::tempdir().unwrap();
        let sources = [1, 2].map(|byte| {
            let path = directory.path().join(format!("kek{byte}"));
            fs::write(&path, [byte; 32]).unwrap();
            KeySource::File(path)
        });
        let [first, second] = sources;
        let old = Encryption::new(first).unwrap();
        let new = old.rotated(second).unwrap();
        create(directory.path(), &old).unwrap();
        (directory, old, new)
    }

    /// What of a wrapping nobody may find: every part of it that differs from one to the next.
    fn secrets(key: &Encryption) -> Vec<String> {
        let text = serde_json::to_value(key).unwrap();
        ["nonce", "key"]
            .map(|field| text["key"][field].as_str().unwrap().to_owned())
            .to_vec()
    }

    /// Whether a part of a wrapping is in a file of a directory.
    fn is_found(directory: &Path, key: &Encryption) -> bool {
        fs::read_dir(directory).unwrap().any(|item| {
            let bytes = fs::read(item.unwrap().path()).unwrap();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            secrets(key).iter().any(|secret| text.contains(secret))
        })
    }

    #[test]
    fn key_that_is_replaced_is_nowhere_any_more() {
        let (directory, old, new) = with_key();
        let here = directory.path();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&file(here)), 0o600);
        // The old file, held open, shows what becomes of its blocks.
        let blocks = File::open(file(here)).unwrap();
        replace(here, &new).unwrap();
        assert_eq!(read(here).unwrap(), new);
        assert_eq!(mode(&file(here)), 0o600);
        assert!(!is_found(here, &old) && is_found(here, &new));
        let left = io::read_to_string(blocks).unwrap().into_bytes();
        assert!(!left.is_empty() && left.iter().all(|&byte| byte == 0));
        destroy(here).unwrap();
        assert!(!is_found(here, &new));
    }

    /// A copy of a volume's directory that was made with hard links.
    fn linked_copy(directory: &Path) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        for item in fs::read_dir(directory).unwrap() {
            let item = item.unwrap();
            fs::hard_link(item.path(), copy.path().join(item.file_name())).unwrap();
        }
        copy
    }

    #[test]
    fn key_that_a_linked_copy_shares_survives_the_copy() {
        let (directory, old, new) = with_key();
        let here = directory.path();
        destroy(linked_copy(here).path()).unwrap();
        assert_eq!(read(here).unwrap(), old);
        // One that was made while the key was replaced has the key that counts now under another name.
        perform(Step::WriteNew, here, &new).unwrap();
        let copy = linked_copy(here);
        fs::rename(here.join(NEW_FILE), file(here)).unwrap();
        tidy(copy.path()).unwrap_err();
        destroy(copy.path()).unwrap();
        assert_eq!(read(here).unwrap(), new);
        assert!(!is_found(copy.path(), &new));
    }

    #[test]
    fn key_replacement_tells_of_a_linked_copy_that_has_the_old_one() {
        let (directory, old, new) = with_key();
        let here = directory.path();
        let copy = linked_copy(here);
        let error = replace(here, &new).unwrap_err();
        assert!(matches!(error, ReplaceError::OldIsLeft { .. }), "{error}");
        assert!(error.to_string().contains("hard links"), "{error}");
        assert_eq!(read(here).unwrap(), new);
        assert_eq!(read(copy.path()).unwrap(), old);
        // Without the copy it goes.
        drop(copy);
        assert!(tidy(here).unwrap());
        assert!(!is_found(here, &old));
    }

    #[test]
    fn key_replacement_that_is_cut_at_any_step_leaves_one_key() {
        for steps in 0..=STEPS.len() {
            let (directory, old, new) = with_key();
            let here = directory.path();
            for step in &STEPS[..steps] {
                perform(*step, here, &new).unwrap();
            }
            let is_switched = STEPS[..steps].contains(&Step::Switch);
            let (counts, other) = if is_switched {
                (&new, &old)
            } else {
                (&old, &new)
            };
            assert_eq!(read(here).unwrap(), *counts, "after {steps} steps");
            let was_left = tidy(here).unwrap();
            assert_eq!(was_left, (1..STEPS.len()).contains(&steps));
            assert_eq!(read(here).unwrap(), *counts, "after {steps} steps");
            counts.unlock().unwrap();
            assert!(!is_found(here, other), "after {steps} steps");
            // Another one goes on from there.
            replace(here, &new).unwrap();
            assert_eq!(read(here).unwrap(), new);
            assert!(!is_found(here, &old));
        }
    }

    /// A crash within a step: a part of the new file, a part of the zeroes.
    #[test]
    fn key_files_that_are_torn_are_tidied_away() {
        let (directory, old, new) = with_key();
        let here = directory.path();
        fs::write(here.join(NEW_FILE), "{\"magic\": \"hdcs-k").unwrap();
        assert!(tidy(here).unwrap());
        assert_eq!(read(here).unwrap(), old);
        for step in &STEPS[..3] {
            perform(*step, here, &new).unwrap();
        }
        let torn = OpenOptions::new().write(true).open(here.join(OLD_FILE));
        torn.unwrap().write_all_at(&[0; 100], 0).unwrap();
        assert!(tidy(here).unwrap());
        assert!(!is_found(here, &old) && read(here).unwrap() == new);
        assert!(!tidy(here).unwrap());
    }

    #[test]
    fn key_replacement_that_fails_says_which_key_counts() {
        let (directory, old, new) = with_key();
        let here = directory.path();
        // Nothing can be written where a directory is in the way.
        fs::create_dir(here.join(NEW_FILE)).unwrap();
        assert!(matches!(
            replace(here, &new),
            Err(ReplaceError::Unchanged(_))
        ));
        assert_eq!(read(here).unwrap(), old);
    }
}
