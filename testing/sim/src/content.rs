//! What a sector holds, and how its bytes tell which write they came from.
//!
//! Every sector of a [`Content::Write`] names its volume, its write and its own number, and the rest
//! follows from these, so that any byte out of place is noticed. A [`Content::Pattern`] names only
//! its place within 64 KiB: equal lines abound and the content-addressed cache has something to
//! share. Zeroes are themselves. Some of both can be compressed, some cannot.

use hdcs_core::base::limits::SECTOR_BYTES;

/// Number of a write in the history of one volume, counted from 1 in the order of arrival.
pub type WriteId = u32;

/// What one sector holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Content {
    /// Zeroes: never written, zeroed or discarded.
    Zero,
    /// One of a few patterns that repeat all over the volumes.
    Pattern(u32),
    /// Data that no other write has.
    Write(WriteId),
}

const MAGIC: u64 = 0x5345_4354_4f52_2121;
const PATTERN_SECTORS: u64 = 128;

/// Spread the bits of `value` (the finaliser of SplitMix64).
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Content {
    /// The two words that tell the content and its place; `None` for zeroes.
    fn words(self, volume: u32, sector: u64) -> Option<(u64, u64)> {
        match self {
            Self::Zero => None,
            Self::Pattern(number) => Some((1 << 63 | u64::from(number), sector % PATTERN_SECTORS)),
            Self::Write(id) => Some((u64::from(volume) << 32 | u64::from(id), sector)),
        }
    }

    /// Write this content's bytes for `sector` of `volume` to `out`, one sector long.
    pub fn fill(self, volume: u32, sector: u64, out: &mut [u8]) {
        let Some((identity, place)) = self.words(volume, sector) else {
            out.fill(0);
            return;
        };
        let seed = mix(identity ^ mix(place));
        for (index, word) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = Self::word(index, identity, place, seed).to_le_bytes();
        }
    }

    fn word(index: usize, identity: u64, place: u64, seed: u64) -> u64 {
        match index {
            0 => MAGIC,
            1 => identity,
            2 => place,
            _ => {
                // Some repeats itself within the sector, more or less: it can be compressed.
                let period = [usize::MAX, 48, 16, 4][(mix(identity) % 4) as usize];
                seed.wrapping_add(((index % period) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            }
        }
    }

    /// What `bytes` of `sector` of `volume` are, or `None` if nobody ever made them for this place.
    pub fn decode(volume: u32, sector: u64, bytes: &[u8]) -> Option<Self> {
        debug_assert_eq!(bytes.len(), SECTOR_BYTES);
        let words = bytes.as_chunks::<8>().0;
        let word = |index: usize| u64::from_le_bytes(words[index]);
        if word(0) == 0 {
            return bytes.iter().all(|&byte| byte == 0).then_some(Self::Zero);
        }
        let identity = word(1);
        let content = if identity >> 63 == 1 {
            Self::Pattern(identity as u32)
        } else {
            Self::Write(identity as u32)
        };
        let (expected_identity, place) = content.words(volume, sector)?;
        let seed = mix(expected_identity ^ mix(place));
        (0..words.len())
            .all(|index| word(index) == Self::word(index, expected_identity, place, seed))
            .then_some(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_told_from_its_bytes_and_its_place() {
        let mut bytes = [0; SECTOR_BYTES];
        for content in [Content::Zero, Content::Pattern(3), Content::Write(9)] {
            content.fill(2, 300, &mut bytes);
            assert_eq!(Content::decode(2, 300, &bytes), Some(content));
        }
        assert_eq!(Content::decode(2, 301, &bytes), None, "another sector");
        assert_eq!(Content::decode(1, 300, &bytes), None, "another volume");
        for bit in [0, 70, 130, 200, 511 * 8] {
            let mut rotten = bytes;
            rotten[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Content::decode(2, 300, &rotten), None, "bit {bit}");
        }
    }
}
