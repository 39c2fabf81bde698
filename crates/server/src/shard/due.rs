//! When each volume of a shard must be polled next. What a turn costs does not grow with volumes that have nothing due.

use std::collections::BTreeSet;

use hdcs_core::base::io::Nanos;

use super::turn::NEVER;

/// See the module. Volumes are named by their slots.
#[derive(Debug, Default)]
pub struct Due {
    at: Vec<Nanos>,
    /// Every slot whose time is not [`NEVER`].
    order: BTreeSet<(Nanos, u32)>,
}

impl Due {
    /// A volume must be polled at this time, and at no earlier one that was said before.
    pub fn set(&mut self, slot: u32, at: Nanos) {
        let index = slot as usize;
        if self.at.len() <= index {
            self.at.resize(index + 1, NEVER);
        }
        let before = std::mem::replace(&mut self.at[index], at);
        if before == at {
            return;
        }
        if before != NEVER {
            self.order.remove(&(before, slot));
        }
        if at != NEVER {
            self.order.insert((at, slot));
        }
    }

    /// The earliest time that is due, if there is one.
    pub fn next(&self) -> Option<Nanos> {
        self.order.first().map(|&(at, _)| at)
    }

    /// Those whose time has come.
    pub fn come(&self, now: Nanos) -> impl Iterator<Item = u32> + '_ {
        let come = self.order.iter().take_while(move |&&(at, _)| at <= now);
        come.map(|&(_, slot)| slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_is_the_earliest_that_was_said_last() {
        let mut due = Due::default();
        assert_eq!(due.next(), None);
        due.set(7, Nanos(30));
        due.set(2, Nanos(20));
        due.set(3, NEVER);
        assert_eq!(due.next(), Some(Nanos(20)));
        due.set(2, Nanos(40));
        assert_eq!(due.next(), Some(Nanos(30)));
        assert_eq!(due.come(Nanos(29)).count(), 0);
        assert_eq!(due.come(Nanos(40)).collect::<Vec<_>>(), [7, 2]);
        due.set(7, NEVER);
        due.set(2, NEVER);
        assert_eq!(due.next(), None);
    }
}
