//! Leases: until when a primary answers reads, and how long a candidate waits for that to be over.
//!
//! ```text
//!  primary    Beat sent ────────── lease ──────────► answers reads until here, if enough members have echoed
//!  member          └─► Echo ─────── lease, stretched ───────────► nobody relies on it any more
//!  candidate             Promised: what is left of that, stretched again ────────────────► may ask for the record
//! ```
//!
//! A primary that is cut off does not know whether another node serves. It has a lease while as many members as a commit
//! needs, itself one of them, have echoed beats that it sent less than the lease ago. One of them is among those whose
//! promises a takeover needs, and says how long the primary may still rely on its echo. The candidate asks for the record
//! only once none of these can make a lease any more. A lease that only the primary itself has to give does not end:
//! nobody takes the group without its promise.
//!
//! *Stretched* is longer by [`Times::drift_permille`], by which the clocks of any two nodes may differ in rate. That they
//! do not differ by more is all that is asked of clocks; what they show is never compared.
//!
//! Invariants:
//! 1. While a change of the record is wanted, members of both records make the lease.
//! 2. A member that is asked for a higher epoch echoes no lower one. So what is left of its echo only shrinks.
//! 3. Who has just started does not know what it echoed: as if it was just before.
//! 4. A record names a primary only once every lease of a lower epoch is over. So a candidate that has the promise of the
//!    last primary waits for nobody: that one serves nothing any more, and older ones have no lease.
//! 5. Beats say when a member is gone though nothing is written: one that is not echoed in time makes it late.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use smallvec::SmallVec;

use super::deadlines::Times;
use crate::base::io::Nanos;
use crate::base::limits::LEASE_MS_MAX;
use crate::replication::Member;
use crate::replication::group::Group;
use crate::replication::message::Message;
use crate::replication::takeover::Takeover;

/// Beats in the time of a lease: one may be late.
const BEATS_OF_LEASE: u64 = 4;

/// What one member has been asked, and has echoed.
#[derive(Clone, Copy, Debug, Default)]
struct Beats {
    /// Number of the last one.
    number: u64,
    /// When it was sent.
    sent: Nanos,
    /// Since when its echo is waited for.
    awaited: Option<Nanos>,
    /// When the last one was sent that was echoed.
    echoed: Option<Nanos>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Leases {
    times: Times,
    /// Of the part that serves.
    beats: BTreeMap<Member, Beats>,
    /// What stands on the log was told last.
    told: Option<Nanos>,
    /// Until when a primary may rely on what this node has echoed, by this node's clock.
    echo_ends: Nanos,
    /// Of the part that takes.
    promised: BTreeMap<Member, Promised>,
}

/// A member that has promised.
#[derive(Clone, Copy, Debug)]
struct Promised {
    /// Until when the last primary may rely on its echo, by this node's clock.
    end: Nanos,
    /// It was whole, and so remembers what it has echoed. That stays so if it is lost later.
    counts: bool,
}

impl Leases {
    /// Those of a node that starts now.
    pub(super) fn new(now: Nanos, times: Times) -> Self {
        let mut leases = Self {
            times,
            beats: BTreeMap::new(),
            told: None,
            echo_ends: Nanos(0),
            promised: BTreeMap::new(),
        };
        leases.echo_ends = now.plus(leases.stretched(times.lease));
        leases
    }

    /// At least as long by any other node's clock as `time` is by one.
    fn stretched(&self, time: Nanos) -> Nanos {
        let permille = u128::from(1000 + self.times.drift_permille);
        let stretched = (u128::from(time.0) * permille).div_ceil(1000);
        Nanos(stretched.min(u128::from(u64::MAX / 2)) as u64)
    }

    /// Another part begins. What this node has echoed stays.
    pub(super) fn begin_part(&mut self) {
        self.beats.clear();
        self.promised.clear();
        self.told = None;
    }

    // The primary.

    /// The beat to send to a follower now, if one is due.
    pub(super) fn next_beat(&mut self, now: Nanos, to: Member) -> Option<Message> {
        let interval = Nanos(self.times.lease.0 / BEATS_OF_LEASE);
        let beats = self.beats.entry(to).or_default();
        let is_early = beats.echoed.is_some() && now < beats.sent.plus(interval);
        if beats.awaited.is_some() || is_early {
            return None;
        }
        beats.number += 1;
        beats.sent = now;
        beats.awaited = Some(now);
        Some(Message::Beat {
            number: beats.number,
            lease_ms: millis(self.times.lease),
        })
    }

    /// A follower has echoed a beat.
    pub(super) fn echoed(&mut self, from: Member, number: u64) {
        if let Some(beats) = self.beats.get_mut(&from)
            && beats.number == number
            && beats.awaited.take().is_some()
        {
            beats.echoed = Some(beats.sent);
        }
    }

    /// The link to a member has gone, and with it what was not echoed. What was, counts.
    pub(super) fn disconnected(&mut self, from: Member) {
        if let Some(beats) = self.beats.get_mut(&from) {
            beats.awaited = None;
        }
    }

    /// Who follows no more, as it has left and is brought up anew on the same link, is not waited for. Once it follows again it
    /// is sent the next beat: it may never have got the last one.
    pub(super) fn forget_awaited(&mut self, group: &Group) {
        for (member, beats) in &mut self.beats {
            if !group.followers().any(|follower| follower == *member) {
                beats.awaited = None;
            }
        }
    }

    /// Beats that were not echoed are waited for as if they were sent now. What was echoed is relied on no longer for that.
    pub(super) fn await_anew(&mut self, now: Nanos) {
        for awaited in self
            .beats
            .values_mut()
            .filter_map(|beats| beats.awaited.as_mut())
        {
            *awaited = now;
        }
    }

    /// Followers that have left a beat unanswered for too long, each once in that time.
    pub(super) fn late(&mut self, now: Nanos, group: &Group) -> Vec<Member> {
        let max = self.times.member_max;
        let late = group.followers().filter(|member| {
            let beats = self.beats.get_mut(member);
            let awaited = beats.and_then(|beats| beats.awaited.as_mut());
            awaited.is_some_and(|since| {
                let is_late = now >= since.plus(max);
                if is_late {
                    *since = now;
                }
                is_late
            })
        });
        late.collect()
    }

    /// Until when reads may be answered; the end of all time if no other node can take the group without this one.
    pub(super) fn until(&self, group: &Group) -> Nanos {
        let until = |member| {
            let echoed = self.beats.get(&member).and_then(|beats| beats.echoed);
            echoed.map_or(0, |sent| sent.plus(self.times.lease).0)
        };
        Nanos(group.held_by_enough(until))
    }

    /// Something else stands on the log: it was told nothing.
    pub(super) fn forget_told(&mut self) {
        self.told = None;
    }

    /// The same, if what stands on the log was not told so.
    pub(super) fn news(&mut self, group: &Group) -> Option<Nanos> {
        let until = self.until(group);
        (self.told.replace(until) != Some(until)).then_some(until)
    }

    /// When the next beat is due, or somebody may be late.
    pub(super) fn next_of_group(&self, group: &Group) -> Option<Nanos> {
        let interval = Nanos(self.times.lease.0 / BEATS_OF_LEASE);
        let next = group.followers().filter_map(|member| {
            let beats = self.beats.get(&member)?;
            Some(match beats.awaited {
                Some(since) => since.plus(self.times.member_max),
                None => beats.sent.plus(interval),
            })
        });
        next.min()
    }

    // The member.

    /// This node echoes a beat of a primary that relies on it for so long.
    pub(super) fn echo(&mut self, now: Nanos, lease_ms: u32) {
        let lease = Nanos::from_millis(lease_ms.min(LEASE_MS_MAX).into());
        self.echo_ends = self.echo_ends.max(now.plus(self.stretched(lease)));
    }

    /// How long that may still be, in milliseconds.
    pub(super) fn left_ms(&self, now: Nanos) -> u32 {
        millis(self.echo_ends.since(now))
    }

    // The candidate.

    /// A member has promised, with a whole copy or without; a primary may rely on its echo for so long.
    pub(super) fn promised(&mut self, now: Nanos, from: Member, left_ms: u32, is_whole: bool) {
        // It may have had a longer lease than there is here, but no longer one than any.
        let longest = self.stretched(Nanos::from_millis(LEASE_MS_MAX.into()));
        let left = Nanos::from_millis(left_ms.into()).min(longest);
        let end = now.plus(self.stretched(left));
        let none = Promised { end, counts: false };
        let known = self.promised.entry(from).or_insert(none);
        known.end = known.end.min(end);
        known.counts |= is_whole;
    }

    /// When every lease of a lower epoch is over, as far as that is known from those who have promised. `last` was the
    /// last primary, if this node has seen that.
    pub(super) fn over_at(&self, takeover: &Takeover, last: Option<Member>) -> Nanos {
        if last.is_some_and(|last| self.promised.contains_key(&last)) {
            return Nanos(0);
        }
        let config = &takeover.record().config;
        let members = config.members.iter();
        let promised = members.filter_map(|member| self.promised.get(&member));
        let counting = promised.filter(|promised| promised.counts);
        let mut ends: SmallVec<[Nanos; 8]> = counting.map(|promised| promised.end).collect();
        ends.sort_unstable_by(|a, b| b.cmp(a));
        // A lease is of members that have not promised, the primary among them, and of so many others at the least.
        let others = config.members.count() - ends.len();
        match config.copies_to_commit().checked_sub(others) {
            _ if others == 0 => Nanos(0),
            Some(needed @ 1..) => ends.get(needed - 1).copied().unwrap_or(Nanos(u64::MAX)),
            // Too few have promised to take the group.
            _ => Nanos(u64::MAX),
        }
    }
}

/// In whole milliseconds, not less.
fn millis(time: Nanos) -> u32 {
    time.0.div_ceil(1_000_000).try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replication::Point;
    use crate::replication::group::tests::{attach, group_of};
    use crate::replication::message::Copy;
    use crate::replication::record::{AckLevel, GroupRecord};
    use crate::replication::replica::{Replica, Superblock};

    const ME: Member = Member(0);

    fn at(millis: u64) -> Nanos {
        Nanos::from_millis(millis)
    }

    fn log() -> Replica {
        Replica::new(Superblock::new(true), 64, [])
    }

    /// A primary of so many members, all in step.
    fn group(count: u16, ack: AckLevel) -> Group {
        let (mut group, log) = group_of(count, ack);
        for member in 1..count {
            attach(&mut group, &log, member);
        }
        assert_eq!(group.followers().count(), usize::from(count) - 1);
        group
    }

    fn leases() -> Leases {
        Leases::new(at(0), Times::default())
    }

    fn beat(leases: &mut Leases, now: u64, to: u16) -> u64 {
        match leases.next_beat(at(now), Member(to)) {
            Some(Message::Beat { number, lease_ms }) => {
                assert_eq!(lease_ms, 2_000);
                number
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn lease_counts_from_when_a_beat_was_sent_that_enough_have_echoed() {
        let (group, mut leases) = (group(3, AckLevel::Majority), leases());
        assert_eq!(leases.until(&group), at(0));
        let (one, two) = (beat(&mut leases, 100, 1), beat(&mut leases, 200, 2));
        leases.echoed(Member(1), one + 1);
        assert_eq!(leases.until(&group), at(0), "that was not sent");
        leases.echoed(Member(1), one);
        assert_eq!(leases.until(&group), at(2_100), "one other is enough");
        leases.echoed(Member(2), two);
        assert_eq!(leases.until(&group), at(2_200));
        assert_eq!(leases.news(&group), Some(at(2_200)));
        assert_eq!(leases.news(&group), None);
    }

    #[test]
    fn lease_of_all_is_of_the_slowest_and_one_alone_needs_none() {
        let (pair, mut leases) = (group(3, AckLevel::All), leases());
        for (now, member) in [(100, 1), (900, 2)] {
            let number = beat(&mut leases, now, member);
            leases.echoed(Member(member), number);
        }
        assert_eq!(leases.until(&pair), at(2_100));
        let alone = group(3, AckLevel::One);
        assert_eq!(leases.until(&alone), Nanos(u64::MAX));
    }

    #[test]
    fn member_that_is_to_leave_counts_until_the_record_without_it_is_there() {
        let (mut group, mut leases) = (group(3, AckLevel::All), leases());
        let number = beat(&mut leases, 100, 1);
        leases.echoed(Member(1), number);
        group.suspect(Member(2));
        assert_eq!(leases.until(&group), at(0));
        let left = group.next_record().expect("nothing is committed");
        assert_eq!(
            leases.until(&group),
            at(0),
            "the other record may be in force"
        );
        group.seen(&left);
        assert_eq!(leases.until(&group), at(2_100));
    }

    #[test]
    fn one_beat_is_under_way_to_a_member_at_a_time_and_the_next_follows_in_a_share_of_the_lease() {
        let mut leases = leases();
        let number = beat(&mut leases, 100, 1);
        assert!(leases.next_beat(at(5_000), Member(1)).is_none());
        leases.echoed(Member(1), number);
        assert!(leases.next_beat(at(599), Member(1)).is_none());
        beat(&mut leases, 600, 1);
        leases.disconnected(Member(1));
        beat(&mut leases, 1_100, 1);
    }

    #[test]
    fn member_that_leaves_a_beat_unanswered_is_late_once_in_its_time() {
        let (group, mut leases) = (group(2, AckLevel::All), leases());
        beat(&mut leases, 100, 1);
        assert!(leases.late(at(2_099), &group).is_empty());
        assert_eq!(leases.late(at(2_100), &group), [Member(1)]);
        assert!(leases.late(at(2_200), &group).is_empty());
        assert_eq!(leases.late(at(4_100), &group), [Member(1)]);
    }

    #[test]
    fn echo_is_relied_on_for_longer_by_its_members_clock_and_after_a_start_as_well() {
        let mut leases = leases();
        assert_eq!(leases.left_ms(at(1_000)), 1_200);
        leases.echo(at(2_000), 2_000);
        assert_eq!(leases.left_ms(at(2_000)), 2_200);
        leases.echo(at(2_100), 100);
        assert_eq!(
            leases.left_ms(at(2_100)),
            2_100,
            "a shorter one takes nothing back"
        );
        assert_eq!(leases.left_ms(at(9_000)), 0);
    }

    /// Node 1 takes the group; these have promised, and this is left of their echoes.
    fn takeover(count: u16, ack: AckLevel, left: &[(u16, u32)]) -> (Takeover, Leases) {
        let me = Member(1);
        let mut takeover = Takeover::new(me, GroupRecord::of_members(count, ack).taking(me));
        let mut leases = leases();
        for &(member, left_ms) in left {
            let member = Member(member);
            takeover.connected(member);
            takeover.next_message(member, &log(), Point::default());
            takeover.receive(member, &Message::Promised(Copy::empty(2)));
            leases.promised(at(100), member, left_ms, true);
        }
        (takeover, leases)
    }

    #[test]
    fn candidate_waits_for_those_that_may_still_make_a_lease() {
        // One of two: its own echo is what the other one may rely on.
        let (takeover_1, leases) = takeover(2, AckLevel::All, &[(1, 1_000)]);
        assert_eq!(leases.over_at(&takeover_1, Some(ME)), at(1_200));
        // Two of three that commit with two: either one's.
        let (takeover_2, leases) = takeover(3, AckLevel::Majority, &[(1, 1_000), (2, 500)]);
        assert_eq!(leases.over_at(&takeover_2, None), at(1_200));
        // Two of three that commit with three: a lease is of both.
        let (takeover_3, leases) = takeover(3, AckLevel::All, &[(1, 1_000), (2, 500)]);
        assert_eq!(leases.over_at(&takeover_3, None), at(650));
    }

    #[test]
    fn candidate_waits_for_nobody_once_the_last_primary_or_all_have_promised() {
        let (takeover_1, leases) = takeover(3, AckLevel::Majority, &[(1, 1_000), (0, 2_200)]);
        assert_eq!(leases.over_at(&takeover_1, Some(ME)), at(0));
        assert_eq!(
            leases.over_at(&takeover_1, None),
            at(2_520),
            "not known to be"
        );
        let (lost, mut leases_3) = takeover(2, AckLevel::All, &[(1, 1_000)]);
        leases_3.promised(at(100), ME, 0, false);
        assert_eq!(leases_3.over_at(&lost, None), at(1_200), "it has forgotten");
        assert_eq!(leases_3.over_at(&lost, Some(ME)), at(0));
        let all = [(0, 2_200), (1, 2_200), (2, 2_200)];
        let (takeover_2, leases) = takeover(3, AckLevel::Majority, &all);
        assert_eq!(leases.over_at(&takeover_2, None), at(0));
    }
}
