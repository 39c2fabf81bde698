//! Which volume is on which shard.
//!
//! A volume has a [`Residence`] from when its `Open` is sent until it is closed, or was not opened, and nothing on its
//! shard waits for its devices any more. Whoever may still work for it has a copy: the thread that opens its files, the
//! volume itself, what is left of it when it is closed.
//!
//! Invariants:
//! 1. A volume is on one shard at most: as long as there is a residence, whoever asks is told the same shard.
//! 2. So are two volumes of one name, of which the shard refuses the second.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hdcs_frontend::VolumeNumber;

/// All volumes that are on some shard, by number.
#[derive(Debug, Default)]
pub(super) struct Residents(Mutex<BTreeMap<u32, Resident>>);

#[derive(Debug)]
struct Resident {
    name: String,
    shard: usize,
    stays: usize,
}

/// The stay of a volume on a shard; of nowhere until the volume is sent there.
#[derive(Clone, Debug, Default)]
pub struct Residence {
    _stay: Option<Arc<Stay>>,
}

#[derive(Debug)]
struct Stay {
    residents: Arc<Residents>,
    number: VolumeNumber,
}

impl Residents {
    /// Have a volume stay where it is, or on the shard that is chosen for it, of how many volumes each shard has. Returns
    /// that shard.
    pub fn stay(
        self: &Arc<Self>,
        number: VolumeNumber,
        name: &str,
        shards: usize,
        choose: impl FnOnce(&[usize]) -> usize,
    ) -> (usize, Residence) {
        let mut all = self.lock();
        let same_name = || all.values().find(|one| one.name == name);
        let found = all.get(&number.0).or_else(same_name).map(|one| one.shard);
        let shard = found.unwrap_or_else(|| choose(&counts(&all, shards)));
        let resident = all.entry(number.0).or_insert_with(|| Resident {
            name: name.to_owned(),
            shard,
            stays: 0,
        });
        resident.stays += 1;
        let stay = Stay {
            residents: Arc::clone(self),
            number,
        };
        let residence = Residence {
            _stay: Some(Arc::new(stay)),
        };
        (resident.shard, residence)
    }

    /// Where a volume is.
    pub fn shard_of(&self, number: VolumeNumber) -> Option<usize> {
        Some(self.lock().get(&number.0)?.shard)
    }

    /// How many volumes each of so many shards has.
    #[cfg(test)]
    fn counts(&self, shards: usize) -> Vec<usize> {
        counts(&self.lock(), shards)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Resident>> {
        // Nobody who holds it leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn counts(all: &BTreeMap<u32, Resident>, shards: usize) -> Vec<usize> {
    let mut counts = vec![0; shards];
    for one in all.values() {
        if let Some(count) = counts.get_mut(one.shard) {
            *count += 1;
        }
    }
    counts
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut all = self.residents.lock();
        if let Some(resident) = all.get_mut(&self.number.0) {
            resident.stays -= 1;
            if resident.stays == 0 {
                all.remove(&self.number.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_stays_where_it_is_until_nobody_works_for_it() {
        let residents = Arc::new(Residents::default());
        let number = VolumeNumber(7);
        assert_eq!(residents.shard_of(number), None);
        let (shard, stay) = residents.stay(number, "v", 3, |_| 2);
        assert_eq!((shard, residents.shard_of(number)), (2, Some(2)));
        let copy = stay.clone();
        let (again, second) = residents.stay(number, "v", 3, |_| unreachable!());
        assert_eq!(again, 2, "a second opening meets the first");
        drop(second);
        drop(stay);
        assert_eq!(residents.counts(3), [0, 0, 1]);
        drop(copy);
        assert_eq!(residents.shard_of(number), None);
        assert_eq!(residents.counts(3), [0, 0, 0]);
    }

    #[test]
    fn volume_of_the_same_name_meets_the_other() {
        let residents = Arc::new(Residents::default());
        let (_, _stay) = residents.stay(VolumeNumber(1), "v", 2, |_| 1);
        let (shard, other) = residents.stay(VolumeNumber(2), "v", 2, |_| unreachable!());
        assert_eq!(shard, 1);
        drop(other);
        assert_eq!(residents.counts(2), [0, 1]);
    }

    #[test]
    fn whoever_chooses_knows_how_many_each_shard_has() {
        let residents = Arc::new(Residents::default());
        let mut stays = Vec::new();
        for number in 0..4 {
            let name = number.to_string();
            let choose = |counts: &[usize]| usize::from(counts[0] > counts[1]);
            stays.push(residents.stay(VolumeNumber(number), &name, 2, choose).1);
        }
        assert_eq!(residents.counts(2), [2, 2]);
    }
}
