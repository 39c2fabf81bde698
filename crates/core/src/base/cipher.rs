//! What encrypts the data of a volume before it leaves memory for a medium.
//!
//! The driver makes it from a key; here only its place in the data path is decided. A cipher keeps sizes and places: of
//! a *unit* it makes as many bytes. The unit of the SSD tier is a block, that of a local store, which writes parts of
//! blocks, a sector; each has a cipher of its own, so that their numbers never meet. Damage is for checksums to find; a
//! cipher of this kind finds none.

use core::fmt::Debug;

use crate::base::error::FormatError;

/// Encrypts whole units in place, each by its number.
///
/// Invariants:
/// 1. `decrypt` with the same number undoes `encrypt`, and nothing else does.
/// 2. Two ciphers of one key are the same function: equal bytes of the same unit encrypt to equal
///    bytes, so that a clone shares what its parent has in the cache. Under different keys or
///    numbers they do not.
pub trait BlockCipher: Debug + Send + Sync {
    /// Encrypt the unit `number` of the volume.
    fn encrypt(&self, number: u64, unit: &mut [u8]);
    /// Decrypt the unit `number` of the volume.
    fn decrypt(&self, number: u64, unit: &mut [u8]);
}

/// Tells what a holder of its key has written from what anybody else has put in its place.
///
/// Invariant: without the key nobody makes the tag of bytes that no holder has tagged, except by guessing.
pub trait Authenticator: Debug + Send + Sync {
    /// The tag of these bytes. The first bytes of it are a tag, too, as strong as they are long.
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES];
}

/// What encrypts the data of a local store, and authenticates it and the structures that say where it is.
pub trait KeyedCipher: BlockCipher + Authenticator {
    /// The tags of encrypted units, one for each of `tags`, in the places from this number on. A tag is none of
    /// anything else, nor of the same bytes in another place or local store.
    fn unit_tags(&self, first: u64, units: &[u8], tags: &mut [u32]);
}

/// What encrypts the blocks of a write log, each by its number on the log's region, and authenticates its superblocks.
pub trait LogKeys: BlockCipher + Authenticator {}

impl<T: BlockCipher + Authenticator> LogKeys for T {}

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;

/// Compare a tag, or the first bytes of one, with what it should be, in constant time.
///
/// # Errors
/// [`FormatError::Forged`] if they differ.
pub(crate) fn compare_tags(found: &[u8], expected: &[u8; TAG_BYTES]) -> Result<(), FormatError> {
    let pairs = found.iter().zip(expected);
    match pairs.fold(0, |differs, (one, other)| differs | (one ^ other)) {
        0 => Ok(()),
        _ => Err(FormatError::Forged),
    }
}
