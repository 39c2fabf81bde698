//! A stand-in for a manager: it looks at the nodes and at the record now and then, and says what the record should be. What
//! it says counts while it has the [key](super::keys).
//!
//! Whom it has not heard of for a while it takes for dead. It has the group taken when the primary is dead or does not
//! serve, or a candidate gets nowhere; and sometimes for no reason. While there are fewer members than there should be, it
//! names others to be joiners, of those that live if it can; sometimes it takes that back. Where somebody has said which nodes
//! are to have copies, it names those.

use fastrand::Rng;
use hdcs_core::base::io::Nanos;
use hdcs_core::replication::Member;
use hdcs_core::replication::record::{GroupRecord, Nodes, Phase};

use super::keys::Key;

/// After so long without a word it takes a node for dead.
const SILENCE_MAX: Nanos = Nanos::from_millis(800);
/// A record that nothing follows from is replaced after so long.
const IDLE_MAX: Nanos = Nanos::from_millis(600);
/// A candidate has this long, if nobody says that it gave up: its clock may run at half the speed.
const TAKING_MAX: Nanos = Nanos::from_millis(18_000);

/// What the manager sees of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing.
    Nothing,
    /// It lives and follows.
    Follows,
    /// It takes or serves.
    Leads,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Manager {
    random: Rng,
    heard: Vec<Nanos>,
    /// The record that was there when it looked last, and since when.
    revision: u64,
    since: Nanos,
    /// Since when whoever should lead does not.
    idle: Option<Nanos>,
    whim_one_in: u32,
    /// What it believes to have of the managers' key.
    pub(super) key: Option<Key>,
    /// The record as its watch has shown it.
    pub(super) record: GroupRecord,
}

impl Manager {
    /// One of so many nodes.
    pub(super) fn new(record: GroupRecord, nodes: usize, whim_one_in: u32, seed: u64) -> Self {
        Self {
            random: Rng::with_seed(seed),
            heard: vec![Nanos(0); nodes],
            revision: 0,
            since: Nanos(0),
            idle: None,
            whim_one_in,
            key: None,
            record,
        }
    }

    /// Do nothing for no reason any more.
    pub(super) fn calm(&mut self) {
        self.whim_one_in = 0;
    }

    /// Look at all. Returns the record that it wants in the place of the one that it has seen; with copies on these nodes, if
    /// somebody has said so.
    pub(super) fn look(
        &mut self,
        now: Nanos,
        nodes: &[Seen],
        places: Option<&Nodes>,
    ) -> Option<GroupRecord> {
        let record = &self.record.clone();
        for (heard, seen) in self.heard.iter_mut().zip(nodes) {
            if *seen != Seen::Nothing {
                *heard = now;
            }
        }
        if record.revision != self.revision {
            (self.revision, self.since, self.idle) = (record.revision, now, None);
        }
        let (leader, is_taking) = match record.phase {
            Phase::Serving { primary } => (primary, false),
            Phase::Taking { candidate } => (candidate, true),
        };
        let node = usize::from(leader.0);
        let idle = (nodes[node] == Seen::Follows).then(|| self.idle.unwrap_or(now));
        self.idle = idle;
        let is_dead = now.since(self.heard[node]) > SILENCE_MAX;
        let is_idle = idle.is_some_and(|idle| now.since(idle) > IDLE_MAX);
        let is_stuck = is_taking && now.since(self.since) > TAKING_MAX;
        if is_dead || is_idle || is_stuck || self.has_whim(4) {
            return Some(self.take(now, record));
        }
        (!is_taking)
            .then(|| self.joiners(now, record, places))
            .flatten()
    }

    fn has_whim(&mut self, times: u32) -> bool {
        self.whim_one_in > 0 && self.random.u32(..self.whim_one_in * times) == 0
    }

    fn take(&mut self, now: Nanos, record: &GroupRecord) -> GroupRecord {
        let members: Vec<Member> = record.config.members.iter().collect();
        let is_alive =
            |member: &Member| now.since(self.heard[usize::from(member.0)]) <= SILENCE_MAX;
        let alive: Vec<Member> = members.iter().copied().filter(is_alive).collect();
        let among = if alive.is_empty() { &members } else { &alive };
        let candidate = among[self.random.usize(..among.len())];
        record.taking(candidate)
    }

    /// As many as members are missing: those that are joiners already, if they live, and others that do, if there are any.
    fn joiners(
        &mut self,
        now: Nanos,
        record: &GroupRecord,
        places: Option<&Nodes>,
    ) -> Option<GroupRecord> {
        let config = &record.config;
        let missing = usize::from(config.replicas).saturating_sub(config.members.count());
        let is_dead = |member: &Member| now.since(self.heard[usize::from(member.0)]) > SILENCE_MAX;
        let all = (0..self.heard.len() as u16).map(Member);
        let mut others: Vec<Member> = all
            .filter(|member| !config.members.contains(*member))
            .collect();
        others.sort_by_key(|member| (is_dead(member), !record.joiners.contains(member), *member));
        let mut wanted: Nodes = match places {
            Some(places) => (others.into_iter())
                .filter(|node| places.contains(node))
                .collect(),
            None => others.into_iter().take(missing).collect(),
        };
        if self.has_whim(1) {
            wanted.pop_first();
        }
        (wanted != record.joiners).then(|| record.with_joiners(wanted))
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::replication::record::{AckLevel, Config, Seat, WhenShort};

    use super::*;

    #[test]
    fn manager_takes_for_dead_whom_it_has_not_heard_of_and_names_joiners() {
        let member = Member(0);
        let config = Config {
            members: [Seat { member, joined: 1 }].into_iter().collect(),
            replicas: 2,
            ack: AckLevel::All,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        let record = GroupRecord::first(member, config, Nodes::new());
        let mut manager = Manager::new(record, 2, 0, 1);
        let at = |millis| Nanos::from_millis(millis);
        let joiners: Nodes = [Member(1)].into_iter().collect();
        let wanted = manager
            .look(at(10), &[Seen::Leads, Seen::Follows], None)
            .unwrap();
        assert_eq!(wanted.joiners, joiners);
        manager.record = wanted;
        assert!(
            manager
                .look(at(500), &[Seen::Nothing, Seen::Follows], None)
                .is_none()
        );
        let taking = manager
            .look(at(900), &[Seen::Nothing, Seen::Follows], None)
            .unwrap();
        assert_eq!(taking.phase, Phase::Taking { candidate: member });
    }
}
