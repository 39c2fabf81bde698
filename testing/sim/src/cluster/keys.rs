//! The managers' key: who holds it may write records. It is leased, as etcd has it.
//!
//! A lease ends a little late, and begins anew when the store's leader changes: then everybody who holds one has it for a whole
//! term again, also who is dead. A manager that stands still for longer than a lease does not know that another one has the
//! key, and goes on to write; so each of its transactions compares the key, and is refused.
//!
//! Checked here: nobody writes once another one has had the key.

use fastrand::Rng;
use hdcs_core::base::io::Nanos;

use super::Plant;
use crate::violation::Violation;

/// Managers that want the key.
pub(super) const MANAGERS: usize = 2;
/// For how long it is leased.
const TERM: Nanos = Nanos::from_millis(2_000);
/// How much later than that a lease ends, at most.
const LATE_MAX_MILLIS: u64 = 500;

/// That a manager has taken the key, the how manieth time anybody has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) manager: usize,
    times: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct ManagersKey {
    random: Rng,
    /// Who holds it or did last, and until when.
    held: Option<(Key, Nanos)>,
    plant: Option<Plant>,
}

impl ManagersKey {
    /// One that nobody has.
    pub(super) fn new(seed: u64, plant: Option<Plant>) -> Self {
        Self {
            random: Rng::with_seed(seed),
            held: None,
            plant,
        }
    }

    fn until(&mut self, now: Nanos) -> Nanos {
        let late = Nanos::from_millis(self.random.u64(..LATE_MAX_MILLIS));
        now.plus(TERM).plus(late)
    }

    /// A manager that believes that it has `believed` keeps the key alive, or takes it if nobody has it. Returns what it has,
    /// if it has it.
    pub(super) fn keep(&mut self, manager: usize, now: Nanos) -> Option<Key> {
        let until = self.until(now);
        let times = match self.held {
            Some((key, end)) if end > now => {
                if key.manager != manager {
                    return None;
                }
                key.times
            }
            last => last.map_or(1, |(key, _)| key.times + 1),
        };
        let key = Key { manager, times };
        self.held = Some((key, until));
        Some(key)
    }

    /// The store has a new leader.
    pub(super) fn leader_changes(&mut self, now: Nanos) {
        let until = self.until(now);
        if let Some((_, end)) = self.held.as_mut().filter(|(_, end)| *end > now) {
            *end = until;
        }
    }

    /// Whether the store takes what a manager writes that has this key.
    pub(super) fn takes(&self, key: Key, now: Nanos) -> Result<bool, Violation> {
        let (last, end) = self.held.expect("somebody has taken it");
        let holds = last == key && end > now;
        if holds || self.plant != Some(Plant::KeylessManager) {
            return Ok(holds);
        }
        if last == key {
            return Ok(true);
        }
        let message = format!("manager {} writes, and {last:?} has the key", key.manager);
        Err(Violation::new("manager-keyless", message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_of_one_and_of_another_one_once_its_lease_is_over() {
        let at = Nanos::from_millis;
        let mut keys = ManagersKey::new(1, None);
        let first = keys.keep(0, at(0)).unwrap();
        assert_eq!(keys.keep(1, at(1_000)), None);
        assert_eq!(keys.keep(0, at(1_500)), Some(first));
        keys.leader_changes(at(3_000));
        assert_eq!(keys.keep(1, at(4_500)), None, "it began anew");
        assert_eq!(keys.takes(first, at(4_500)), Ok(true));
        let second = keys.keep(1, at(6_000)).unwrap();
        assert_eq!(keys.takes(second, at(6_000)), Ok(true));
        assert_eq!(keys.takes(first, at(6_000)), Ok(false));
        assert_ne!(keys.keep(0, at(9_000)), Some(first), "it is another one");
    }
}
