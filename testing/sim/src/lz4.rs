//! LZ4 for both methods, each marked, so that data compressed by one and read by the other is noticed.

use hdcs_core::base::codec::{Codec, Method};

/// What a planted bug does to what is decompressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    None,
    /// It is something else, and is said to be right.
    Confused,
    /// It differs in a way that no CRC-32C tells.
    Unseen,
}

/// See the module.
#[derive(Debug)]
pub struct Lz4(Damage);

/// What volumes are given.
pub static LZ4: Lz4 = Lz4(Damage::None);
/// What a planted bug gives them: data that is something else.
pub static CONFUSED: Lz4 = Lz4(Damage::Confused);
/// What another one does: data that is something else and has the checksum that it should have.
pub static UNSEEN: Lz4 = Lz4(Damage::Unseen);

/// The polynomial of CRC-32C as its bits lie in data: whatever it is added to keeps its checksum.
const POLYNOMIAL: [u8; 5] = [0xf1, 0x76, 0xec, 0x05, 0x01];
/// Where it is added: to what follows from the rest, in the first sector.
const DAMAGED_AT: usize = 100;

impl Codec for Lz4 {
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        let (mark, rest) = stored.split_first_mut()?;
        *mark = method as u8;
        let bytes = lz4_flex::block::compress_into(plain, rest).ok()?;
        Some(1 + bytes)
    }

    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool {
        let Some((&mark, rest)) = stored.split_first() else {
            return false;
        };
        if self.0 == Damage::Confused {
            plain.fill(mark);
            return true;
        }
        let bytes = lz4_flex::block::decompress_into(rest, plain).ok();
        if self.0 == Damage::Unseen {
            for (byte, bits) in plain[DAMAGED_AT..].iter_mut().zip(POLYNOMIAL) {
                *byte ^= bits;
            }
        }
        mark == method as u8 && bytes == Some(plain.len())
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::format::block_checksum;

    use super::*;

    #[test]
    fn lz4_damage_that_is_unseen_has_the_same_checksum() {
        let plain: Vec<u8> = (0..8192).map(|at| (at / 64) as u8).collect();
        let mut stored = vec![0; 12_000];
        let bytes = LZ4.compress(Method::Lz4, &plain, &mut stored).unwrap();
        let mut found = vec![0; plain.len()];
        assert!(LZ4.decompress(Method::Lz4, &stored[..bytes], &mut found));
        assert_eq!(found, plain);
        assert!(!LZ4.decompress(Method::Zstd, &stored[..bytes], &mut found));
        assert!(UNSEEN.decompress(Method::Lz4, &stored[..bytes], &mut found));
        assert_ne!(found, plain);
        assert_eq!(block_checksum(&found), block_checksum(&plain));
    }
}
