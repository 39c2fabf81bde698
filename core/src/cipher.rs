//! What encrypts the data of a volume before it leaves memory for a medium.
//!
//! The driver makes it from a key; here only its place in the data path is decided. A cipher keeps
//! sizes and places: of a *unit* it makes as many bytes. The unit of the SSD tier is a block, that of a home, which
//! writes parts of blocks, a sector; each has a cipher of its own, so that their numbers never meet. Damage is for checksums to find; a
//! cipher of this kind finds none.

use core::fmt::Debug;

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

/// One that also tells what a holder of its key has written from what anybody else has put in its place.
///
/// Invariant: nobody without the key makes the tag of bytes that no holder has tagged, but by guessing.
pub trait KeyedCipher: BlockCipher {
    /// The tag of these bytes, all parts one after another; a part of it serves as well, as far as it is long.
    fn tag(&self, parts: &[&[u8]]) -> [u8; TAG_BYTES];
}

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;
