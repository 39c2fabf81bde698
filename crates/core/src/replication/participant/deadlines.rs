//! How long others are waited for.
//!
//! The machines know no time: they are told that somebody is late. A member that owes an answer and gives none, or cannot
//! be reached, is late after `member_max`; every answer begins that anew. A joiner is given more, since it may read back
//! what it has, and is not waited for by anybody. So is a member that a candidate has asked, since it may have much to write
//! before it promises: its link is made anew, and it is asked again. All groups of the two nodes share that link, and a copy
//! whose medium hangs does not answer on the next one either: each time it is given twice as much. Of members that are late
//! and cannot leave, since each lacks what enough of the others would need, the links are made anew as well: then each is asked
//! again what it has, and is given the rest. Echoes of beats count for nothing here: a member whose medium hangs still sends them ([`super::leases`]).
//!
//! A node that stood still, as a virtual machine that is moved, cannot tell whether others were late: their answers may lie
//! unread. When it goes on it gives them their time anew. Leases are not longer for that. It is excused only if it has looked
//! in time for that long before: a node that comes late again and again would wait for ever for who is gone.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::{Act, Part, Participant};
use crate::base::io::Nanos;
use crate::replication::takeover::Step;
use crate::replication::{Member, Spans};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// A member that answers nothing for so long leaves.
    pub member_max: Nanos,
    /// The link to a joiner, to a member that a candidate has asked, or to one that cannot leave, is made anew if it answers
    /// nothing for so long.
    pub joiner_max: Nanos,
    /// A takeover that has enough promises waits so long for the others.
    pub gathering_max: Nanos,
    /// A takeover waits so long for those who promised to be level.
    pub levelling_max: Nanos,
    /// For so long after it was sent a primary relies on a beat that was echoed; [`LEASE_MS_MAX`] at most.
    ///
    /// [`LEASE_MS_MAX`]: crate::base::limits::LEASE_MS_MAX
    pub lease: Nanos,
    /// By so many thousandths the clock of a node may be faster than that of another one.
    pub drift_permille: u32,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            member_max: Nanos::from_millis(2_000),
            joiner_max: Nanos::from_millis(60_000),
            gathering_max: Nanos::from_millis(1_000),
            levelling_max: Nanos::from_millis(5_000),
            lease: Nanos::from_millis(2_000),
            drift_permille: 100,
        }
    }
}

/// So often the time of somebody whose link was made anew in vain is doubled at most.
const DOUBLED_MAX: u32 = 4;
/// After a shortage of memory.
pub(super) const RETRY_PAUSE: Nanos = Nanos::from_millis(5);

/// Who is late.
#[derive(Debug, Default)]
pub(super) struct Late {
    pub(super) members: Vec<Member>,
    pub(super) joiners: Vec<Member>,
    pub(super) gathering: bool,
    pub(super) levelling: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Deadlines {
    times: Times,
    /// Since when somebody owes something.
    owing: BTreeMap<Member, Nanos>,
    /// How often links were made anew since somebody's medium was heard of.
    anew: BTreeMap<Member, u32>,
    /// Since when a member is late that cannot leave.
    held_up: BTreeMap<Member, Nanos>,
    /// When a step of a takeover began.
    step: Nanos,
    levels: bool,
    next: Option<Nanos>,
    /// When was looked last.
    looked: Nanos,
    /// How long it was looked in time since it was excused last.
    in_time: Nanos,
}

impl Deadlines {
    pub(super) fn new(times: Times) -> Self {
        Self {
            times,
            owing: BTreeMap::new(),
            anew: BTreeMap::new(),
            held_up: BTreeMap::new(),
            step: Nanos(0),
            levels: false,
            next: None,
            looked: Nanos(0),
            in_time: times.member_max,
        }
    }

    /// A part begins.
    pub(super) fn begin(&mut self, now: Nanos) {
        self.clear();
        self.step = now;
        self.levels = false;
        self.next = Some(now);
        self.looked = now;
        self.in_time = self.times.member_max;
    }

    /// It is looked now. Whether this node stood still since the last look, and is excused.
    fn stood_still(&mut self, now: Nanos) -> bool {
        let elapsed = now.since(core::mem::replace(&mut self.looked, now));
        // A look is due in a quarter of the time at the latest.
        if elapsed.0 <= self.times.member_max.0 / 2 {
            self.in_time = self.in_time.plus(elapsed);
            return false;
        }
        core::mem::replace(&mut self.in_time, Nanos(0)) >= self.times.member_max
    }

    /// Everybody has their time anew.
    fn begin_anew(&mut self, now: Nanos) {
        for since in self.owing.values_mut() {
            *since = now;
        }
        self.step = now;
    }

    /// Nobody is waited for.
    pub(super) fn clear(&mut self) {
        self.owing.clear();
        self.anew.clear();
        self.held_up.clear();
        self.next = None;
    }

    /// Somebody has answered; whether that took its medium.
    pub(super) fn heard(&mut self, now: Nanos, from: Member, of_medium: bool) {
        if of_medium {
            self.anew.remove(&from);
        }
        if let Some(since) = self.owing.get_mut(&from) {
            *since = now;
        }
    }

    /// When somebody may be late.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.next
    }

    /// Those owe something, members or joiners. Who is late now, each once in its time.
    pub(super) fn of_members(&mut self, now: Nanos, owing: &BTreeMap<Member, bool>) -> Late {
        self.owing.retain(|member, _| owing.contains_key(member));
        self.held_up.retain(|member, _| owing.contains_key(member));
        let mut late = Late::default();
        let mut next = now.plus(self.times.member_max);
        for (&member, &is_member) in owing {
            let since = self.owing.entry(member).or_insert(now);
            let max = if is_member {
                self.times.member_max
            } else {
                let doubled = self.anew.get(&member).copied().unwrap_or(0);
                Nanos(self.times.joiner_max.0.saturating_mul(1 << doubled))
            };
            if now >= since.plus(max) {
                *since = now;
                let list = if is_member {
                    &mut late.members
                } else {
                    let doubled = self.anew.entry(member).or_insert(0);
                    *doubled = (*doubled + 1).min(DOUBLED_MAX);
                    &mut late.joiners
                };
                list.push(member);
            }
            next = next.min(since.plus(max));
        }
        // Who owes something later is noticed within a share of the time.
        let share = Nanos(self.times.member_max.0 / 4).max(Nanos(1));
        self.next = Some(next.min(now.plus(share)));
        late
    }

    /// These members are late, and none of them can leave. Whose links are to be made anew now.
    fn held_up(&mut self, now: Nanos, late: &[Member]) -> Vec<Member> {
        let max = self.times.joiner_max;
        let is_over = |member: &Member| {
            let since = self.held_up.entry(*member).or_insert(now);
            let is_over = now >= since.plus(max);
            if is_over {
                *since = now;
            }
            is_over
        };
        late.iter().copied().filter(is_over).collect()
    }

    /// The step of a takeover that is under way, levelling or one before, has taken its time. Those who went away while they
    /// were brought to the level are waited for no longer than for their promises.
    pub(super) fn of_takeover(&mut self, now: Nanos, levels: bool, levels_some: bool) -> Late {
        if core::mem::replace(&mut self.levels, levels) != levels {
            self.step = now;
        }
        let Times {
            gathering_max,
            levelling_max,
            ..
        } = self.times;
        let max = match (levels, levels_some) {
            (true, true) => levelling_max,
            (true, false) => levelling_max.min(gathering_max),
            (false, _) => gathering_max,
        };
        let is_over = now >= self.step.plus(max);
        // No later than what is taken for standing still ([`Self::stood_still`]).
        let again = Nanos(max.0.min(self.times.member_max.0) / 4).max(Nanos(1));
        self.next = Some(if is_over {
            now.plus(again)
        } else {
            self.step.plus(max).min(now.plus(again))
        });
        Late {
            gathering: is_over && !levels,
            levelling: is_over && levels,
            ..Late::default()
        }
    }
}

/// See who is late, and have the part go on without them.
pub(super) fn look(this: &mut Participant) {
    if this.deadlines.stood_still(this.now) {
        this.deadlines.begin_anew(this.now);
        this.leases.await_anew(this.now);
        this.repairs.await_anew(this.now);
    }
    this.repairs.give_up_on_late(this.now);
    let head = this.replica.head().position;
    let mut late = match &this.part {
        Part::Follows => {
            this.deadlines.clear();
            Late::default()
        }
        Part::Takes(takeover) => {
            let levels = matches!(takeover.step(), Step::Levels { .. });
            // They are given as much time as joiners.
            let owing = takeover.owing().map(|member| (member, false)).collect();
            let joiners = (this.deadlines.of_members(this.now, &owing)).joiners;
            let late = (this.deadlines).of_takeover(this.now, levels, takeover.levels_some());
            Late { joiners, ..late }
        }
        Part::Serves(group) => {
            let members = &group.record().config.members;
            let owing: BTreeSet<Member> = group.owing(head).collect();
            let all = members.iter().filter(|member| *member != this.me);
            let away = all.filter(|member| !this.links.contains(member));
            let owing = owing.iter().copied().chain(away);
            let owing: BTreeMap<Member, bool> = owing
                .map(|member| (member, members.contains(member)))
                .collect();
            let mut late = this.deadlines.of_members(this.now, &owing);
            let silent = this.leases.late(this.now, group).into_iter();
            late.members
                .extend(silent.filter(|member| members.contains(*member)));
            late
        }
    };
    match &mut this.part {
        Part::Follows => {}
        Part::Takes(takeover) => {
            if late.gathering {
                takeover.end_gathering();
            }
            if late.levelling {
                takeover.end_levelling();
            }
        }
        Part::Serves(group) => {
            for member in &late.members {
                group.suspect(*member);
            }
            if group.is_leave_held_up() {
                let held_up = this.deadlines.held_up(this.now, &late.members);
                let linked = held_up.iter().filter(|member| this.links.contains(member));
                late.joiners.extend(linked);
            }
        }
    }
    this.acts.extend(late.joiners.into_iter().map(Act::Break));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBER: Member = Member(1);
    const JOINER: Member = Member(2);

    fn at(millis: u64) -> Nanos {
        Nanos::from_millis(millis)
    }

    #[test]
    fn member_is_late_once_it_has_said_nothing_for_its_time() {
        let mut deadlines = Deadlines::new(Times::default());
        let owing = BTreeMap::from([(MEMBER, true), (JOINER, false)]);
        assert!(deadlines.of_members(at(10), &owing).members.is_empty());
        assert!(deadlines.of_members(at(2_009), &owing).members.is_empty());
        deadlines.heard(at(2_009), MEMBER, true);
        assert!(deadlines.of_members(at(4_008), &owing).members.is_empty());
        assert!(deadlines.next().unwrap() <= at(4_009));
        let late = deadlines.of_members(at(4_009), &owing);
        assert_eq!(
            (late.members, late.joiners),
            (Vec::from([MEMBER]), Vec::new())
        );
        let late = deadlines.of_members(at(60_010), &owing);
        assert_eq!(late.joiners, [JOINER]);
    }

    #[test]
    fn link_is_made_anew_less_often_while_that_brings_no_answer() {
        let mut deadlines = Deadlines::new(Times::default());
        let owing = BTreeMap::from([(JOINER, false)]);
        let mut seconds = 0..20_000;
        let mut breaks = |deadlines: &mut Deadlines, count: usize| {
            let mut at_s = Vec::new();
            while at_s.len() < count {
                let now = seconds.next().unwrap();
                let late = deadlines.of_members(at(now * 1_000), &owing).joiners;
                if !late.is_empty() {
                    at_s.push(now);
                    // While it is not reached it owes nothing.
                    deadlines.of_members(at(now * 1_000), &BTreeMap::new());
                }
            }
            at_s
        };
        let seen = breaks(&mut deadlines, 7);
        let pauses: Vec<u64> = seen.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(pauses, [121, 241, 481, 961, 961, 961]);
        // That it says what it has takes no medium.
        deadlines.heard(at(seen[6] * 1_000), JOINER, false);
        let next = breaks(&mut deadlines, 1)[0];
        assert_eq!(next, seen[6] + 961);
        deadlines.heard(at(next * 1_000), JOINER, true);
        assert_eq!(breaks(&mut deadlines, 1), [next + 61]);
    }

    #[test]
    fn member_that_cannot_leave_has_its_link_made_anew_in_the_time_of_a_joiner() {
        let mut deadlines = Deadlines::new(Times::default());
        let owing = BTreeMap::from([(MEMBER, true)]);
        let mut at_s = Vec::new();
        for second in 0..200 {
            let late = deadlines.of_members(at(second * 1_000), &owing).members;
            if !deadlines.held_up(at(second * 1_000), &late).is_empty() {
                at_s.push(second);
            }
            // It answers, and owes the same all the time.
            if second % 10 == 9 {
                deadlines.heard(at(second * 1_000), MEMBER, true);
            }
        }
        assert_eq!(at_s, [63, 123, 183]);
        deadlines.of_members(at(200_000), &BTreeMap::new());
        assert!(deadlines.held_up(at(201_000), &[MEMBER]).is_empty());
    }

    #[test]
    fn who_owes_nothing_for_a_moment_is_given_its_time_anew() {
        let mut deadlines = Deadlines::new(Times::default());
        let owing = BTreeMap::from([(MEMBER, true)]);
        deadlines.of_members(at(0), &owing);
        deadlines.of_members(at(1_900), &BTreeMap::new());
        assert!(deadlines.of_members(at(2_100), &owing).members.is_empty());
    }

    #[test]
    fn who_comes_late_is_excused_once_until_it_has_been_in_time_for_a_while() {
        let mut deadlines = Deadlines::new(Times::default());
        deadlines.begin(at(100));
        assert!(!deadlines.stood_still(at(1_100)));
        assert!(deadlines.stood_still(at(2_101)));
        assert!(!deadlines.stood_still(at(9_000)), "again at once");
        for look in 0..4 {
            assert!(!deadlines.stood_still(at(9_500 + look * 500)));
        }
        assert!(deadlines.stood_still(at(20_000)));
    }

    #[test]
    fn takeover_waits_less_for_those_who_went_away() {
        let mut deadlines = Deadlines::new(Times::default());
        deadlines.begin(at(100));
        assert!(!deadlines.of_takeover(at(200), true, true).levelling);
        assert!(!deadlines.of_takeover(at(1_199), true, false).levelling);
        assert!(deadlines.of_takeover(at(1_200), true, false).levelling);
    }

    #[test]
    fn takeover_waits_for_each_step() {
        let mut deadlines = Deadlines::new(Times::default());
        deadlines.begin(at(100));
        assert!(!deadlines.of_takeover(at(1_099), false, false).gathering);
        assert!(deadlines.of_takeover(at(1_100), false, false).gathering);
        assert!(!deadlines.of_takeover(at(1_200), true, true).levelling);
        assert!(!deadlines.of_takeover(at(6_199), true, true).levelling);
        assert!(deadlines.of_takeover(at(6_200), true, true).levelling);
    }
}
