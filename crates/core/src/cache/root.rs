//! The root of the SSD tier: what its two superblocks say, and when they are believed.
//!
//! Superblocks are written in turn. They are believed only when both are valid, agree and follow one
//! another: if one is damaged, it may have been the newer one, and the older one would bring
//! back what was invalidated since. A torn write of a superblock therefore costs the next start
//! its warmth, which is rare and safe.

use zerocopy::little_endian::U64;
use zerocopy::{FromZeros, IntoBytes};

use crate::base::limits::{BLOCK_BYTES, CACHE_STARTS_KEPT};
use crate::cache::SsdConfig;
use crate::format::{
    CACHE_MAGIC, CACHE_START_SHIFT, CACHE_VERSION, CacheSuperblock, control_checksum,
};

/// The part of a superblock that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root {
    /// Whether the region is being made: nothing in it counts.
    pub forming: bool,
    /// Counts the times that all content was declared void.
    pub format: u64,
    /// Counts superblock writes.
    pub sequence: u64,
    /// Counts starts.
    pub incarnation: u64,
    /// First epoch of the journal that counts.
    pub journal_first: u64,
    /// Last epoch of the journal.
    pub journal_last: u64,
    /// The stamp of the journal when it was written.
    pub stamp: u64,
    /// The stamps that starts have found, the present one's first.
    pub ends: [u64; CACHE_STARTS_KEPT],
}

/// What two superblocks say.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The content counts.
    Warm(Root),
    /// Nothing counts; a format of this number was never used here.
    Cold {
        /// That number.
        format: u64,
    },
    /// A newer program made it: it is not to be overwritten.
    Newer,
}

impl Root {
    /// The root of a format in which nothing was written yet. It takes both superblocks, the
    /// second of which follows the first.
    pub fn fresh(format: u64, forming: bool) -> Self {
        Self {
            forming,
            format,
            sequence: 2,
            incarnation: 1,
            journal_first: 1,
            journal_last: 1,
            stamp: 1 << CACHE_START_SHIFT,
            ends: [0; CACHE_STARTS_KEPT],
        }
    }

    /// The root of the next start, which has found what is durable up to a stamp.
    #[must_use]
    pub fn started(&self, found: u64) -> Self {
        let incarnation = self.incarnation + 1;
        let mut ends = self.ends;
        ends.rotate_right(1);
        ends[0] = found;
        Self {
            incarnation,
            stamp: incarnation << CACHE_START_SHIFT,
            ends,
            ..*self
        }
    }

    /// Whether everything up to a stamp that was reached once is there, when the present start has reached `now`.
    pub fn has(&self, stamp: u64, now: u64) -> bool {
        let start = stamp >> CACHE_START_SHIFT;
        match self.incarnation.checked_sub(start) {
            None => false,
            Some(0) => stamp <= now,
            Some(before) => {
                let end = self.ends.get(before as usize - 1);
                end.is_some_and(|&end| end >> CACHE_START_SHIFT == start && stamp <= end)
            }
        }
    }

    /// One superblock.
    pub fn write(&self, config: &SsdConfig, block: &mut [u8]) {
        let mut superblock = CacheSuperblock::new_zeroed();
        superblock.magic = CACHE_MAGIC;
        superblock.version.set(CACHE_VERSION);
        superblock.line_blocks.set(config.line_blocks as u16);
        superblock.forming = u8::from(self.forming);
        superblock.uuid = config.uuid;
        superblock.format.set(self.format);
        superblock.sequence.set(self.sequence);
        superblock.incarnation.set(self.incarnation);
        superblock.region_bytes.set(config.bytes);
        superblock.journal_first.set(self.journal_first);
        superblock.journal_last.set(self.journal_last);
        superblock.stamp.set(self.stamp);
        superblock.ends = self.ends.map(U64::new);
        superblock.seal();
        block.copy_from_slice(superblock.as_bytes());
    }

    /// Judge the blocks of both superblocks, one behind the other.
    pub fn judge(config: &SsdConfig, blocks: &[u8]) -> Verdict {
        let parsed = [0, 1].map(|index| {
            CacheSuperblock::parse(&blocks[index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES])
        });
        let (one, other) = blocks.split_at(BLOCK_BYTES);
        if CacheSuperblock::refuse_newer(&[one, other]).is_err() {
            return Verdict::Newer;
        }
        let parsed = parsed.map(Result::ok);
        let newest = parsed
            .iter()
            .flatten()
            .map(|found| found.format.get())
            .max();
        // Formats are never used twice under one identity. What damaged superblocks held is not
        // known; their bytes give a number that nobody used, with room to count on.
        let format = newest.map_or_else(
            || {
                if blocks.iter().all(|&byte| byte == 0) {
                    1
                } else {
                    (control_checksum(blocks) >> 1).max(1)
                }
            },
            |newest| newest.saturating_add(1),
        );
        let cold = Verdict::Cold { format };
        let [Some(even), Some(odd)] = parsed else {
            return cold;
        };
        let ours = |block: &CacheSuperblock| {
            block.uuid == config.uuid
                && block.region_bytes.get() == config.bytes
                && usize::from(block.line_blocks.get()) == config.line_blocks
                && block.forming == 0
        };
        let (one, two) = (even.sequence.get(), odd.sequence.get());
        if !ours(&even)
            || !ours(&odd)
            || even.format.get() != odd.format.get()
            || one.abs_diff(two) != 1
            || one % 2 != 0
        {
            return cold;
        }
        let newer = if one > two { even } else { odd };
        Verdict::Warm(Self {
            forming: false,
            format: newer.format.get(),
            sequence: newer.sequence.get(),
            incarnation: newer.incarnation.get(),
            journal_first: newer.journal_first.get(),
            journal_last: newer.journal_last.get(),
            stamp: newer.stamp.get(),
            ends: newer.ends.map(U64::get),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::seal;

    const CONFIG: SsdConfig = SsdConfig {
        bytes: 64 << 20,
        uuid: [7; 16],
        line_blocks: 4,
    };

    fn pair(root: Root) -> [u8; 2 * BLOCK_BYTES] {
        let mut blocks = [0; 2 * BLOCK_BYTES];
        let (even, odd) = blocks.split_at_mut(BLOCK_BYTES);
        root.write(&CONFIG, even);
        let second = Root {
            sequence: root.sequence + 1,
            ..root
        };
        second.write(&CONFIG, odd);
        blocks
    }

    #[test]
    fn root_is_warm_only_if_both_superblocks_are_sound() {
        let blocks = pair(Root::fresh(5, false));
        let newer = Root {
            sequence: 3,
            ..Root::fresh(5, false)
        };
        assert_eq!(Root::judge(&CONFIG, &blocks), Verdict::Warm(newer));
        for byte in 0..2 * BLOCK_BYTES {
            let mut rotten = blocks;
            rotten[byte] ^= 4;
            assert_eq!(Root::judge(&CONFIG, &rotten), Verdict::Cold { format: 6 });
        }
        // A version that is damaged is not a newer one, whatever the other superblock is.
        let mut rotten = blocks;
        rotten[100] ^= 4;
        rotten[BLOCK_BYTES + 8] ^= 32;
        assert!(matches!(
            Root::judge(&CONFIG, &rotten),
            Verdict::Cold { .. }
        ));
        let mut newer = blocks;
        for block in newer.chunks_exact_mut(BLOCK_BYTES) {
            block[8] += 1;
            seal(block);
        }
        assert_eq!(Root::judge(&CONFIG, &newer), Verdict::Newer);
        let other = SsdConfig {
            uuid: [8; 16],
            ..CONFIG
        };
        assert_eq!(Root::judge(&other, &blocks), Verdict::Cold { format: 6 });
        let larger = SsdConfig {
            bytes: 65 << 20,
            ..CONFIG
        };
        assert_eq!(Root::judge(&larger, &blocks), Verdict::Cold { format: 6 });
        let forming = pair(Root::fresh(5, true));
        assert_eq!(Root::judge(&CONFIG, &forming), Verdict::Cold { format: 6 });
    }

    #[test]
    fn root_of_a_half_written_pair_is_cold_with_a_new_format() {
        let mut blocks = pair(Root::fresh(5, false));
        let next = pair(Root::fresh(6, false));
        blocks[..BLOCK_BYTES].copy_from_slice(&next[..BLOCK_BYTES]);
        assert_eq!(Root::judge(&CONFIG, &blocks), Verdict::Cold { format: 7 });
        let blank = [0; 2 * BLOCK_BYTES];
        assert_eq!(Root::judge(&CONFIG, &blank), Verdict::Cold { format: 1 });
    }

    #[test]
    fn root_remembers_what_each_start_has_found() {
        let stamp = |start: u64, blocks: u64| start << CACHE_START_SHIFT | blocks;
        let first = Root::fresh(5, false);
        assert!(first.has(stamp(1, 0), stamp(1, 0)) && first.has(stamp(1, 3), stamp(1, 3)));
        assert!(!first.has(stamp(1, 4), stamp(1, 3)) && !first.has(stamp(2, 0), stamp(1, 3)));
        // It has reached 7 blocks, of which the next start finds 6.
        let second = first.started(stamp(1, 6));
        assert!(second.has(stamp(1, 6), stamp(2, 0)) && !second.has(stamp(1, 7), stamp(2, 9)));
        let third = second.started(stamp(2, 9));
        assert!(third.has(stamp(1, 6), third.stamp) && !third.has(stamp(1, 7), third.stamp));
        assert!(third.has(stamp(2, 9), third.stamp) && !third.has(stamp(2, 10), third.stamp));
        let mut root = third;
        for _ in 0..CACHE_STARTS_KEPT {
            root = root.started(root.stamp);
        }
        assert!(!root.has(stamp(1, 6), root.stamp), "nobody knows any more");
        assert!(root.has(stamp(4, 0), root.stamp));
    }
}
