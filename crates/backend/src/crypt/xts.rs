//! AES-256 in XTS mode (IEEE 1619, NIST SP 800-38E), over the block function of the `aes` crate.
//!
//! The crate brings hardware instructions for many blocks at once (AES-NI, VAES, `ARMv8`) and constant
//! time without them; the mode itself is the few lines here, which the NIST vectors of the tests
//! check. A unit is what one tweak belongs to: 16 bytes to 16 MiB, of any length, the last bytes by
//! ciphertext stealing.

use aes::Aes256;
use aes::cipher::array::Array;
use aes::cipher::consts::U16;
use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};

/// Bytes of a key: one half for the data, one for the tweaks.
pub const KEY_BYTES: usize = 64;
/// Bytes of a block of the cipher.
const UNIT_BYTES_MIN: usize = 16;
/// Cipher blocks that are masked and encrypted at once: one 4 KiB block.
const BATCH: usize = 256;

type Block = Array<u8, U16>;

/// See the module. The round keys are wiped when it is dropped.
pub struct Xts {
    data: Aes256,
    tweak: Aes256,
}

impl std::fmt::Debug for Xts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Xts(..)")
    }
}

/// Multiply by the polynomial `x` in the field of XTS.
const fn double(tweak: u128) -> u128 {
    (tweak << 1) ^ (0x87 * (tweak >> 127))
}

fn mask(block: &mut [u8], tweak: u128) {
    let bytes: [u8; 16] = block.try_into().expect("a cipher block");
    block.copy_from_slice(&(u128::from_le_bytes(bytes) ^ tweak).to_le_bytes());
}

impl Xts {
    /// From a key, whose halves must differ (which random ones do).
    pub fn new(key: &[u8; KEY_BYTES]) -> Self {
        let (data, tweak) = key.split_at(KEY_BYTES / 2);
        assert_ne!(data, tweak, "the halves of an XTS key differ");
        Self {
            data: Aes256::new_from_slice(data).expect("half of a key"),
            tweak: Aes256::new_from_slice(tweak).expect("half of a key"),
        }
    }

    fn first(&self, tweak: u128) -> u128 {
        let mut block = Block::from(tweak.to_le_bytes());
        self.tweak.encrypt_block(&mut block);
        u128::from_le_bytes(block.into())
    }

    /// Encrypt or decrypt whole cipher blocks; the tweak after them.
    fn whole(mut tweak: u128, data: &mut [u8], cipher: impl Fn(&mut [Block])) -> u128 {
        let mut tweaks = [0; BATCH];
        for batch in data.chunks_mut(BATCH * UNIT_BYTES_MIN) {
            let (blocks, _) = Block::slice_as_chunks_mut(batch);
            for (block, mask_of) in blocks.iter_mut().zip(&mut tweaks) {
                *mask_of = tweak;
                mask(block, tweak);
                tweak = double(tweak);
            }
            cipher(blocks);
            for (block, &mask_of) in blocks.iter_mut().zip(&tweaks) {
                mask(block, mask_of);
            }
        }
        tweak
    }

    /// Encrypt a unit in place.
    pub fn encrypt(&self, tweak: u128, unit: &mut [u8]) {
        assert!(unit.len() >= UNIT_BYTES_MIN, "an XTS unit");
        let tail = unit.len() % UNIT_BYTES_MIN;
        let (whole, rest) = unit.split_at_mut(unit.len() - tail);
        let encrypt = |blocks: &mut [Block]| self.data.encrypt_blocks(blocks);
        let last = Self::whole(self.first(tweak), whole, encrypt);
        if tail > 0 {
            let stolen = whole.last_chunk_mut::<UNIT_BYTES_MIN>().expect("a unit");
            stolen[..tail].swap_with_slice(rest);
            Self::whole(last, stolen, encrypt);
        }
    }

    /// Decrypt a unit in place.
    pub fn decrypt(&self, tweak: u128, unit: &mut [u8]) {
        assert!(unit.len() >= UNIT_BYTES_MIN, "an XTS unit");
        let tail = unit.len() % UNIT_BYTES_MIN;
        let decrypt = |blocks: &mut [Block]| self.data.decrypt_blocks(blocks);
        let first = self.first(tweak);
        if tail == 0 {
            Self::whole(first, unit, decrypt);
            return;
        }
        let (whole, rest) = unit.split_at_mut(unit.len() - tail);
        let (whole, stolen) = whole.split_at_mut(whole.len() - UNIT_BYTES_MIN);
        let before = Self::whole(first, whole, decrypt);
        Self::whole(double(before), stolen, decrypt);
        stolen[..tail].swap_with_slice(rest);
        Self::whole(before, stolen, decrypt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = hex.as_bytes().chunks_exact(2);
        let parse = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16);
        digits.map(|pair| parse(pair).unwrap()).collect()
    }

    /// IEEE 1619-2007, vector 10: XTS-AES-256, 512 bytes of 00 01 02 …, data unit ff.
    #[test]
    fn xts_is_that_of_the_standard() {
        let mut key = bytes("2718281828459045235360287471352662497757247093699959574966967627");
        key.extend(bytes(
            "3141592653589793238462643383279502884197169399375105820974944592",
        ));
        let xts = Xts::new(&key.try_into().unwrap());
        let plain: Vec<u8> = (0..512).map(|at| at as u8).collect();
        let mut unit = plain.clone();
        xts.encrypt(0xff, &mut unit);
        let expected = "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b\
                        5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb4bb188fd";
        assert_eq!(unit[..64], bytes(expected));
        xts.decrypt(0xff, &mut unit);
        assert_eq!(unit, plain);
    }

    /// A unit that is not whole cipher blocks, as OpenSSL encrypts it.
    #[test]
    fn xts_steals_as_others_do() {
        let key = std::array::from_fn(|at| at as u8);
        let mut unit: Vec<u8> = (0..37).collect();
        Xts::new(&key).encrypt(7, &mut unit);
        let expected = "b2d9289b998ebd6bcc8a6d434711b8af1c8d06195bf14a0594cdf538d0ce86386f974e732a";
        assert_eq!(unit, bytes(expected));
    }

    #[test]
    fn xts_undoes_itself_at_every_length_and_nowhere_else() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut key = [0; KEY_BYTES];
        random.fill(&mut key);
        let xts = Xts::new(&key);
        for length in (16..100).chain([4096, 4100, 8191, 12300]) {
            let mut plain = vec![0; length];
            random.fill(&mut plain);
            let tweak = random.u128(..);
            let mut unit = plain.clone();
            xts.encrypt(tweak, &mut unit);
            let encrypted = unit.clone();
            assert_ne!(unit, plain);
            xts.decrypt(tweak, &mut unit);
            assert_eq!(unit, plain, "{length} bytes");
            unit.copy_from_slice(&encrypted);
            xts.decrypt(tweak ^ 1, &mut unit);
            assert_ne!(unit, plain);
        }
    }
}
