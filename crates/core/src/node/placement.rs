//! Which shard a volume is opened on.
//!
//! A shard counts for as many volumes as it has, and for up to twice as many when its processor is busy. The volume goes
//! to the shard that would count for least with it, of several to the first.
//!
//! Invariants:
//! 1. Of shards that are equally busy, none has two volumes more than another by placement alone.
//! 2. No shard has more than twice as many volumes as another, and one more, by placement alone.
//!
//! There are no failures: there is always a first shard.

/// What a full processor counts for.
const BUSY_MAX: u64 = 1_000;

/// What a shard has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Volumes on it, those that are opening included.
    pub volumes: usize,
    /// Its thread's part of a processor of late, in thousandths.
    pub busy_permille: u64,
}

impl Load {
    /// What it would count for with one volume more.
    fn with_one_more(&self) -> u64 {
        let volumes = self.volumes as u64 + 1;
        volumes.saturating_mul(BUSY_MAX + self.busy_permille.min(BUSY_MAX))
    }
}

/// The shard for the next volume, by its place among `loads`.
pub fn choose(loads: impl IntoIterator<Item = Load>) -> usize {
    let loads = loads.into_iter().enumerate();
    let least = loads.min_by_key(|(_, load)| load.with_one_more());
    least.map_or(0, |(number, _)| number)
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    /// Place so many volumes on shards that are so busy.
    fn place(volumes: usize, busy: &[u64]) -> Vec<usize> {
        let mut counts = vec![0; busy.len()];
        for _ in 0..volumes {
            let loads = counts
                .iter()
                .zip(busy)
                .map(|(&volumes, &busy_permille)| Load {
                    volumes,
                    busy_permille,
                });
            let chosen = choose(loads);
            counts[chosen] += 1;
        }
        counts
    }

    #[test]
    fn placement_spreads_volumes_evenly() {
        assert_eq!(place(7, &[0; 3]), [3, 2, 2]);
        assert_eq!(place(7, &[800; 3]), [3, 2, 2]);
        assert_eq!(place(3, &[500]), [3]);
    }

    #[test]
    fn placement_spares_a_busy_shard_and_does_not_shun_it() {
        assert_eq!(place(1, &[1000, 0, 0]), [0, 1, 0]);
        assert_eq!(place(5, &[1000, 0, 0]), [1, 2, 2]);
        let counts = place(1000, &[1000, 0, 300, 100_000]);
        let (least, most) = (counts.iter().min(), counts.iter().max());
        assert!(*most.unwrap() <= 2 * least.unwrap() + 1, "{counts:?}");
    }

    #[test]
    fn placement_without_shards_is_the_first() {
        assert_eq!(choose([]), 0);
    }
}
