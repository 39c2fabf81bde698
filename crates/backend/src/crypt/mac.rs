//! A message authentication code over hardware instructions for AES and carry-less multiplication: POLYVAL of the message
//! and its place, encrypted with AES-256.
//!
//! This is the tag of AES-GCM-SIV (RFC 8452) with the *place*, two numbers, where that has a nonce: a universal hash under
//! one secret key, and a block cipher as a pseudorandom function over it under another. The same message in the same
//! place has the same tag, which tells no more than that the medium has the same bytes again. A forger has to guess the
//! tag, or to hit a collision of the hash, for which the chance is no more than 2^-120 for each pair of messages here.
//!
//! All messages under one key have the same length, a multiple of 16: so nothing says it.

use aes::Aes256;
use aes::cipher::array::Array;
use aes::cipher::consts::U16;
use aes::cipher::{BlockCipherEncrypt, KeyInit};
use hdcs_core::base::cipher::TAG_BYTES;
use polyval::Polyval;
use polyval::universal_hash::UniversalHash;

use super::xts::KEY_BYTES;

/// Bytes of the key of AES-256; those of POLYVAL's follow them.
const CIPHER_KEY_BYTES: usize = 32;
/// Bytes of the key of POLYVAL.
const HASH_KEY_BYTES: usize = 16;

/// Tags that are made at once.
const BATCH: usize = 8;

type Block = Array<u8, U16>;

/// See the module. Its keys are wiped when it is dropped.
pub struct Mac {
    hash: Polyval,
    cipher: Aes256,
    message_bytes: usize,
}

impl std::fmt::Debug for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mac(..)")
    }
}

impl Mac {
    /// For messages of so many bytes, from a derived key, which is used for nothing else.
    pub fn new(key: &[u8; KEY_BYTES], message_bytes: usize) -> Self {
        assert!(message_bytes.is_multiple_of(16), "whole blocks");
        let (cipher, rest) = key.split_at(CIPHER_KEY_BYTES);
        let hash = rest.first_chunk::<HASH_KEY_BYTES>().expect("a key");
        Self {
            hash: Polyval::new(hash.into()),
            cipher: Aes256::new_from_slice(cipher).expect("half of a key"),
            message_bytes,
        }
    }

    fn hash(&self, place: [u64; 2], message: &[u8]) -> Block {
        assert_eq!(message.len(), self.message_bytes, "one length");
        let mut hash = self.hash.clone();
        hash.update_padded(message);
        let [low, high] = place.map(u128::from);
        let hashed = u128::from_le_bytes(hash.finalize().into());
        Block::from((hashed ^ (high << 64 | low)).to_le_bytes())
    }

    /// The tag of a message in a place.
    pub fn tag(&self, place: [u64; 2], message: &[u8]) -> [u8; TAG_BYTES] {
        let mut block = self.hash(place, message);
        self.cipher.encrypt_block(&mut block);
        block.into()
    }

    /// The first four bytes of the tag of each message, little-endian: the second number of the places counts up. The
    /// cipher takes several blocks in little more time than one.
    pub fn short_tags(&self, [home, first]: [u64; 2], messages: &[u8], tags: &mut [u32]) {
        assert_eq!(
            messages.len(),
            tags.len() * self.message_bytes,
            "a tag each"
        );
        let mut numbered = (first..).zip(messages.chunks(self.message_bytes));
        for tags in tags.chunks_mut(BATCH) {
            let mut blocks = [Block::default(); BATCH];
            let blocks = &mut blocks[..tags.len()];
            for (block, (number, message)) in blocks.iter_mut().zip(&mut numbered) {
                *block = self.hash([home, number], message);
            }
            self.cipher.encrypt_blocks(blocks);
            for (tag, block) in tags.iter_mut().zip(blocks) {
                *tag = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> [u8; KEY_BYTES] {
        std::array::from_fn(|at| at as u8)
    }

    /// What the formulas of RFC 8452 give in integers, and OpenSSL's AES.
    #[test]
    fn mac_is_what_its_definition_gives() {
        let message: Vec<u8> = (0..512).map(|at| at as u8).collect();
        let tag = Mac::new(&key(), message.len()).tag([3, 7], &message);
        let expected = 0xec83_d39d_6b15_3836_bd1a_5d24_3043_2fd6;
        assert_eq!(u128::from_be_bytes(tag), expected);
    }

    #[test]
    fn mac_differs_for_every_bit_place_and_key() {
        let mut message = vec![0; 512];
        let mac = Mac::new(&key(), message.len());
        let mut tags = std::collections::BTreeSet::new();
        tags.insert(mac.tag([0, 0], &message));
        for bit in 0..message.len() * 8 {
            message[bit / 8] ^= 1 << (bit % 8);
            tags.insert(mac.tag([0, 0], &message));
            message[bit / 8] ^= 1 << (bit % 8);
        }
        for place in [[0, 1], [1, 0], [512, 0], [0, 512]] {
            tags.insert(mac.tag(place, &message));
        }
        let mut other = key();
        for at in [0, CIPHER_KEY_BYTES] {
            other[at] ^= 1;
            message[0] = 1;
            tags.insert(Mac::new(&other, message.len()).tag([0, 0], &message));
        }
        assert_eq!(tags.len(), 1 + 512 * 8 + 4 + 2);
    }

    #[test]
    fn mac_of_several_messages_is_that_of_each() {
        let messages: Vec<u8> = (0..19 * 512).map(|at| (at / 3) as u8).collect();
        let mac = Mac::new(&key(), 512);
        for count in 0..=19 {
            let mut tags = vec![0; count];
            mac.short_tags([9, 70], &messages[..count * 512], &mut tags);
            let each = (70..).zip(messages.chunks(512)).take(count);
            let each = each.map(|(number, message)| {
                let tag = mac.tag([9, number], message);
                u32::from_le_bytes([tag[0], tag[1], tag[2], tag[3]])
            });
            assert!(each.eq(tags), "{count} messages");
        }
    }
}
