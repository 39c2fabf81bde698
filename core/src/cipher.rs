//! What encrypts the blocks of a volume before they leave memory for a shared medium.
//!
//! The driver makes it from a key; here only its place in the data path is decided. A cipher keeps
//! sizes and places: one 4 KiB block becomes one 4 KiB block. Damage is for checksums to find; a
//! cipher of this kind finds none.

use core::fmt::Debug;

/// Encrypts whole blocks in place, each by its number.
///
/// Invariants:
/// 1. `decrypt` with the same number undoes `encrypt`, and nothing else does.
/// 2. Two ciphers of one key are the same function: equal bytes of the same block encrypt to equal
///    bytes, so that a clone shares what its parent has in the cache. Under different keys or
///    numbers they do not.
pub trait BlockCipher: Debug + Send + Sync {
    /// Encrypt the block `number` of the volume.
    fn encrypt(&self, number: u64, block: &mut [u8]);
    /// Decrypt the block `number` of the volume.
    fn decrypt(&self, number: u64, block: &mut [u8]);
}
