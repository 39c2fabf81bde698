//! The record of a group: whose copies of a log count. It lies in a store that compares and swaps, and is the only thing
//! that decides who may open the log.
//!
//! ```text
//!            ┌──leave, join, joiners──┐
//!            ▼                        │
//!        serving ──────taking──────► taking ──taking (another candidate)──┐
//!            ▲                        │ ▲                                 │
//!            └───────serving──────────┘ └─────────────────────────────────┘
//! ```
//!
//! | change | who | epoch | what it may do |
//! |---|---|---|---|
//! | taking | the manager, an operator | + 1 | name a candidate; `config` stays that of the last `serving` |
//! | serving | the candidate | same | name itself the primary, of members of `config`; the floor does not go down |
//! | leave | the primary | same | have a member other than itself join anew |
//! | join | the primary | same | make a member of a joiner |
//! | configure | the primary | same | change what commits need; name other joiners; let one member go that is to join no more |
//! | joiners | the manager | same | name nodes that are to join, or are not any more |
//!
//! Invariants:
//! 1. In an epoch there is one primary: the candidate that its `taking` named.
//! 2. Whatever was committed is held by [`Config::copies_to_commit`] of the members of `config`; so of every
//!    [`Config::promises_to_take`] of them one has it.

use alloc::collections::BTreeSet;

use smallvec::SmallVec;
use thiserror::Error;

use super::{Member, Point};

/// How many copies a write has before it is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AckLevel {
    /// The primary's.
    One,
    /// Those of more than half of the copies that the volume should have.
    Majority,
    /// Every member's.
    All,
}

/// What becomes of writes while fewer members are there than [`Config::copies_min`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WhenShort {
    /// They wait.
    Wait,
    /// They end with an error.
    Error,
}

/// Nodes, in order.
pub type Nodes = BTreeSet<Member>;

/// The members of a group, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Members(SmallVec<[Seat; 3]>);

/// A member, and since when it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seat {
    /// The node.
    pub member: Member,
    /// What its copy says of when it was brought up ([`super::message::Cut::joined`]). A copy that says anything else is
    /// not the member's: its medium was lost, and somebody who does not act for the group any more has filled it.
    pub joined: u64,
}

impl Members {
    /// Whether it is one of them.
    pub fn contains(&self, member: Member) -> bool {
        self.joined(member).is_some()
    }

    /// Since when it is one of them.
    pub fn joined(&self, member: Member) -> Option<u64> {
        let seat = self.0.iter().find(|seat| seat.member == member)?;
        Some(seat.joined)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = Member> + '_ {
        self.0.iter().map(|seat| seat.member)
    }

    /// The same and this one.
    #[must_use]
    pub fn with(&self, seat: Seat) -> Self {
        self.0.iter().copied().chain([seat]).collect()
    }

    /// Those of them that are of this kind.
    #[must_use]
    pub fn only(&self, mut is_of_it: impl FnMut(Member) -> bool) -> Self {
        let seats = self.0.iter().copied();
        seats.filter(|seat| is_of_it(seat.member)).collect()
    }

    /// Whether all of them are among the others, since the same time.
    pub fn are_among(&self, others: &Self) -> bool {
        self.0.iter().all(|seat| others.0.contains(seat))
    }
}

impl FromIterator<Seat> for Members {
    fn from_iter<T: IntoIterator<Item = Seat>>(seats: T) -> Self {
        let mut all: SmallVec<[Seat; 3]> = seats.into_iter().collect();
        all.sort_unstable();
        all.dedup_by_key(|seat| seat.member);
        Self(all)
    }
}

/// Who counts for a commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Whose copies count; the primary is one of them.
    pub members: Members,
    /// How many there should be.
    pub replicas: u8,
    /// How many have to have a write.
    pub ack: AckLevel,
    /// With fewer members no write is acknowledged.
    pub copies_min: u8,
    /// What becomes of writes then.
    pub when_short: WhenShort,
}

/// What a group is asked to be: [`GroupRecord::toward`] leads there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Who is to have a copy; as many copies there should be.
    pub nodes: Nodes,
    /// How many have to have a write.
    pub ack: AckLevel,
    /// With fewer members no write is acknowledged.
    pub copies_min: u8,
    /// What becomes of writes then.
    pub when_short: WhenShort,
}

impl Config {
    /// Whether there are too few members to acknowledge a write.
    pub fn is_short(&self) -> bool {
        self.members.count() < usize::from(self.copies_min)
    }

    /// Whether commits need the same, whoever the members are.
    fn needs_as(&self, other: &Self) -> bool {
        let needs = |config: &Self| {
            (
                config.replicas,
                config.ack,
                config.copies_min,
                config.when_short,
            )
        };
        needs(self) == needs(other)
    }

    /// Members that have what is committed, the primary among them.
    pub fn copies_to_commit(&self) -> usize {
        let copies = match self.ack {
            AckLevel::One => 1,
            AckLevel::Majority => usize::from(self.replicas) / 2 + 1,
            AckLevel::All => self.members.count(),
        };
        copies.min(self.members.count())
    }

    /// Members whose promises a takeover needs: one of them has whatever was committed.
    pub fn promises_to_take(&self) -> usize {
        self.members.count() - self.copies_to_commit() + 1
    }
}

/// What the group is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The candidate gathers promises of the members of the last `serving`.
    Taking {
        /// Who shall be the primary.
        candidate: Member,
    },
    /// The primary appends.
    Serving {
        /// One of the members.
        primary: Member,
    },
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupRecord {
    /// Counts the records: one replaces exactly the one before it.
    pub revision: u64,
    /// Number of the taking; what members promise.
    pub epoch: u64,
    /// What happens in it.
    pub phase: Phase,
    /// Who counts; while it is taken, who counted before.
    pub config: Config,
    /// Nodes whose copies are being brought up.
    pub joiners: Nodes,
    /// Everything before it was committed when this was written. A copy that lacks it has lost something.
    pub floor: Point,
}

/// A record that may not follow another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// It does not replace the one that is there.
    #[error("revision {next} cannot follow revision {last}")]
    Revision {
        /// Of the record that is there.
        last: u64,
        /// Of the one that was to follow.
        next: u64,
    },
    /// It skips an epoch, or goes back.
    #[error("a record of epoch {next} cannot follow one of epoch {last}")]
    Epoch {
        /// Of the record that is there.
        last: u64,
        /// Of the one that was to follow.
        next: u64,
    },
    /// In an epoch another node serves than was named.
    #[error("the primary of an epoch is the candidate that its taking named")]
    Primary,
    /// The members are not what the change may make of them.
    #[error(
        "members change one at a time, the primary stays, and who joins was named a joiner before"
    )]
    Members,
    /// What commits need changes when it must not, or is nothing that a group can need.
    #[error(
        "what commits need is changed by the primary while it serves, and copies_min is from 1 to the number of replicas"
    )]
    Needs,
    /// The floor goes back.
    #[error("the floor of a record never goes back")]
    Floor,
    /// A taking changes more than the candidate.
    #[error("a taking names a candidate of the members and changes nothing else")]
    Taking,
}

impl GroupRecord {
    /// Revision of a first record, and its epoch if the log has had no other group.
    pub const FIRST: u64 = 1;

    /// The first one of a group. Where copies of the log have promised epochs in another group, it is given a higher one.
    pub fn first(primary: Member, config: Config, joiners: Nodes) -> Self {
        Self {
            revision: Self::FIRST,
            epoch: Self::FIRST,
            phase: Phase::Serving { primary },
            config,
            joiners,
            floor: Point::default(),
        }
    }

    /// The primary, while there is one.
    pub fn primary(&self) -> Option<Member> {
        match self.phase {
            Phase::Serving { primary } => Some(primary),
            Phase::Taking { .. } => None,
        }
    }

    /// The record with which `candidate` begins to take the group.
    #[must_use]
    pub fn taking(&self, candidate: Member) -> Self {
        Self {
            revision: self.revision + 1,
            epoch: self.epoch + 1,
            phase: Phase::Taking { candidate },
            ..self.clone()
        }
    }

    /// The record with which the candidate ends that, with these members; the others are to join.
    #[must_use]
    pub fn serving(&self, primary: Member, members: Members, floor: Point) -> Self {
        let others = (self.config.members.iter()).chain(self.joiners.iter().copied());
        let joiners = others.filter(|member| !members.contains(*member)).collect();
        Self {
            revision: self.revision + 1,
            epoch: self.epoch,
            phase: Phase::Serving { primary },
            config: Config {
                members,
                ..self.config.clone()
            },
            joiners,
            floor,
        }
    }

    /// The record without a member, which is to join anew.
    #[must_use]
    pub fn leave(&self, member: Member) -> Self {
        Self {
            revision: self.revision + 1,
            config: Config {
                members: self.config.members.only(|other| other != member),
                ..self.config.clone()
            },
            joiners: self.joiners.iter().copied().chain([member]).collect(),
            ..self.clone()
        }
    }

    /// The record with a member that was a joiner.
    #[must_use]
    pub fn join(&self, seat: Seat) -> Self {
        Self {
            revision: self.revision + 1,
            config: Config {
                members: self.config.members.with(seat),
                ..self.config.clone()
            },
            joiners: (self.joiners.iter().copied())
                .filter(|joiner| *joiner != seat.member)
                .collect(),
            ..self.clone()
        }
    }

    /// The record with these joiners.
    #[must_use]
    pub fn with_joiners(&self, joiners: Nodes) -> Self {
        Self {
            revision: self.revision + 1,
            joiners,
            ..self.clone()
        }
    }

    /// The next record on the way to what the group is asked to be, while it is served; none: it is that already, but for
    /// joiners that become members, and for who goes once they have. What commits need changes first: a member that is to go is not needed for more than
    /// that while the others go.
    pub fn toward(&self, shape: &Shape) -> Option<Self> {
        let primary = self.primary()?;
        let members = &self.config.members;
        let goes = |member: &Member| *member != primary && !shape.nodes.contains(member);
        // Not before whoever takes its place has its copy.
        let is_spare = members.count() > shape.nodes.len();
        let gone = members.iter().find(goes).filter(|_| is_spare);
        let joiners = shape.nodes.iter().copied();
        let next = Self {
            revision: self.revision + 1,
            config: Config {
                members: members.only(|member| Some(member) != gone),
                replicas: u8::try_from(shape.nodes.len()).unwrap_or(u8::MAX),
                ack: shape.ack,
                copies_min: shape.copies_min,
                when_short: shape.when_short,
            },
            joiners: joiners.filter(|node| !members.contains(*node)).collect(),
            ..self.clone()
        };
        let is_news = next.config != self.config || next.joiners != self.joiners;
        is_news.then_some(next)
    }

    /// Check that `next` may follow: the rules of the table.
    pub fn check_next(&self, next: &Self) -> Result<(), RecordError> {
        if next.revision != self.revision + 1 {
            return Err(RecordError::Revision {
                last: self.revision,
                next: next.revision,
            });
        }
        if next.floor.position < self.floor.position {
            return Err(RecordError::Floor);
        }
        match next.phase {
            Phase::Taking { candidate } => {
                self.check_epoch(next, self.epoch + 1)?;
                let is_same = next.config == self.config
                    && next.joiners == self.joiners
                    && next.floor == self.floor;
                if !is_same || !self.config.members.contains(candidate) {
                    return Err(RecordError::Taking);
                }
                Ok(())
            }
            Phase::Serving { primary } => {
                self.check_epoch(next, self.epoch)?;
                match self.phase {
                    Phase::Taking { candidate } if candidate != primary => {
                        return Err(RecordError::Primary);
                    }
                    Phase::Serving { primary: last } if last != primary => {
                        return Err(RecordError::Primary);
                    }
                    Phase::Taking { .. } | Phase::Serving { .. } => {}
                }
                let (old, new) = (&self.config.members, &next.config.members);
                let gone = old.iter().filter(|member| !new.contains(*member)).count();
                let come: Nodes = new.iter().filter(|member| !old.contains(*member)).collect();
                let stay = new.only(|member| old.contains(member));
                let is_allowed = match self.phase {
                    Phase::Taking { .. } => come.is_empty(),
                    Phase::Serving { .. } => {
                        gone + come.len() <= 1 && come.is_subset(&self.joiners)
                    }
                };
                let is_disjoint = !next.joiners.iter().any(|joiner| new.contains(*joiner));
                if !is_allowed || !is_disjoint || !new.contains(primary) || !stay.are_among(old) {
                    return Err(RecordError::Members);
                }
                let is_served = matches!(self.phase, Phase::Serving { .. });
                let can_need = (1..=next.config.replicas).contains(&next.config.copies_min);
                if !(next.config.needs_as(&self.config) || is_served && can_need) {
                    return Err(RecordError::Needs);
                }
                Ok(())
            }
        }
    }

    fn check_epoch(&self, next: &Self, must: u64) -> Result<(), RecordError> {
        if next.epoch == must {
            return Ok(());
        }
        Err(RecordError::Epoch {
            last: self.epoch,
            next: next.epoch,
        })
    }
}

#[cfg(test)]
impl GroupRecord {
    /// The first record of so many members, which node 0 serves.
    pub(super) fn of_members(count: u16, ack: AckLevel) -> Self {
        let seats = (0..count).map(|node| Seat {
            member: Member(node),
            joined: 1,
        });
        let config = Config {
            members: seats.collect(),
            replicas: count as u8,
            ack,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        Self::first(Member(0), config, Nodes::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(node: u16) -> Seat {
        Seat {
            member: Member(node),
            joined: 1,
        }
    }

    fn members(nodes: impl IntoIterator<Item = u16>) -> Members {
        nodes.into_iter().map(seat).collect()
    }

    fn joiners(nodes: impl IntoIterator<Item = u16>) -> Nodes {
        nodes.into_iter().map(Member).collect()
    }

    fn config(nodes: impl IntoIterator<Item = u16>, ack: AckLevel) -> Config {
        Config {
            members: members(nodes),
            replicas: 3,
            ack,
            copies_min: 1,
            when_short: WhenShort::Wait,
        }
    }

    fn shape(nodes: impl IntoIterator<Item = u16>, ack: AckLevel, copies_min: u8) -> Shape {
        Shape {
            nodes: joiners(nodes),
            ack,
            copies_min,
            when_short: WhenShort::Wait,
        }
    }

    #[test]
    fn quorums_of_commit_and_takeover_meet() {
        for ack in [AckLevel::One, AckLevel::Majority, AckLevel::All] {
            for count in 1..=3 {
                let config = config(0..count, ack);
                let (commit, take) = (config.copies_to_commit(), config.promises_to_take());
                assert!(commit >= 1 && commit <= usize::from(count));
                assert_eq!(commit + take, usize::from(count) + 1);
            }
        }
        assert_eq!(config(0..3, AckLevel::Majority).copies_to_commit(), 2);
        assert_eq!(config(0..2, AckLevel::Majority).copies_to_commit(), 2);
        assert_eq!(config(0..1, AckLevel::Majority).copies_to_commit(), 1);
    }

    #[test]
    fn record_of_each_kind_may_follow() {
        let first = GroupRecord::first(Member(0), config(0..2, AckLevel::All), joiners([2]));
        let floor = Point {
            position: 7,
            chain: 1,
        };
        let joined = first.join(seat(2));
        assert_eq!(first.check_next(&joined), Ok(()));
        assert_eq!(joined.config.members, members(0..3));
        let left = joined.leave(Member(1));
        assert_eq!(joined.check_next(&left), Ok(()));
        assert_eq!((left.config.members.count(), left.joiners.len()), (2, 1));
        let taking = left.taking(Member(2));
        assert_eq!(left.check_next(&taking), Ok(()));
        let again = taking.taking(Member(0));
        assert_eq!(taking.check_next(&again), Ok(()));
        let serving = again.serving(Member(0), members([0]), floor);
        assert_eq!(again.check_next(&serving), Ok(()));
        assert_eq!((serving.epoch, serving.revision), (3, 6));
        assert_eq!(serving.joiners, joiners([1, 2]));
    }

    #[test]
    fn record_that_breaks_a_rule_may_not_follow() {
        let first = GroupRecord::first(Member(0), config(0..3, AckLevel::All), joiners([]));
        let taking = first.taking(Member(1));
        let floor = Point {
            position: 7,
            chain: 1,
        };
        let serving = taking.serving(Member(1), members([0, 1]), floor);
        let refused = |last: &GroupRecord, next: &GroupRecord| last.check_next(next).unwrap_err();
        assert_eq!(
            refused(&first, &serving),
            RecordError::Revision { last: 1, next: 3 }
        );
        let hasty = GroupRecord {
            epoch: 1,
            ..taking.clone()
        };
        assert_eq!(
            refused(&first, &hasty),
            RecordError::Epoch { last: 1, next: 1 }
        );
        let other = taking.serving(Member(0), members([0, 1]), floor);
        assert_eq!(refused(&taking, &other), RecordError::Primary);
        let absent = taking.serving(Member(1), members([0, 2]), floor);
        assert_eq!(refused(&taking, &absent), RecordError::Members);
        assert_eq!(
            refused(&serving, &serving.leave(Member(1))),
            RecordError::Members
        );
        assert_eq!(
            refused(&serving, &serving.join(seat(5))),
            RecordError::Members
        );
        let mut less = taking.serving(Member(1), members([0, 1]), floor);
        less.config.ack = AckLevel::One;
        assert_eq!(refused(&taking, &less), RecordError::Needs);
        for copies_min in [0, 4] {
            let mut never = serving.with_joiners(joiners([]));
            never.config.copies_min = copies_min;
            assert_eq!(refused(&serving, &never), RecordError::Needs);
        }
        let both = serving.with_joiners(joiners([0]));
        assert_eq!(refused(&serving, &both), RecordError::Members);
        let later = Seat {
            joined: 2,
            ..seat(0)
        };
        let mut renewed = serving.with_joiners(joiners([]));
        renewed.config.members = [later, seat(1)].into_iter().collect();
        assert_eq!(refused(&serving, &renewed), RecordError::Members);
        let back = GroupRecord {
            revision: 4,
            floor: Point::default(),
            ..serving.clone()
        };
        assert_eq!(refused(&serving, &back), RecordError::Floor);
        assert_eq!(
            refused(&first, &first.taking(Member(4))),
            RecordError::Taking
        );
    }

    /// Follow the records to a shape, each of which may follow the one before it.
    fn follow(mut record: GroupRecord, shape: &Shape) -> GroupRecord {
        while let Some(next) = record.toward(shape) {
            assert_eq!(record.check_next(&next), Ok(()));
            assert!(next.revision < 20, "it leads nowhere");
            record = next;
        }
        record
    }

    #[test]
    fn record_leads_to_what_the_group_is_asked_to_be() {
        let first = GroupRecord::first(Member(0), config(0..3, AckLevel::All), joiners([]));
        let one = follow(first.clone(), &shape([0], AckLevel::One, 1));
        assert_eq!(one.config.members, members([0]));
        assert_eq!((one.config.replicas, one.config.ack), (1, AckLevel::One));
        assert_eq!(one.joiners, joiners([]));
        assert_eq!(one.revision, 3, "members go one at a time");
        let three = follow(one, &shape([0, 2, 5], AckLevel::Majority, 2));
        assert_eq!(three.config.members, members([0]));
        assert_eq!(three.joiners, joiners([2, 5]));
        assert!(three.config.is_short());
        let other = follow(first, &shape([0, 1, 5], AckLevel::All, 1));
        assert_eq!(other.config.members, members(0..3), "until it has its copy");
        assert_eq!(other.joiners, joiners([5]));
        let joined = other.join(Seat {
            member: Member(5),
            joined: other.revision,
        });
        assert_eq!(other.check_next(&joined), Ok(()));
        let last = follow(joined, &shape([0, 1, 5], AckLevel::All, 1));
        let nodes: alloc::vec::Vec<Member> = last.config.members.iter().collect();
        assert_eq!(nodes, [0, 1, 5].map(Member));
    }

    #[test]
    fn needs_are_lowered_with_the_first_member_that_goes() {
        let mut first = GroupRecord::first(Member(0), config(0..3, AckLevel::All), joiners([]));
        first.config.copies_min = 3;
        let next = first.toward(&shape([0], AckLevel::All, 1)).unwrap();
        assert_eq!(
            (next.config.members.count(), next.config.copies_min),
            (2, 1)
        );
        assert!(!next.config.is_short());
    }

    #[test]
    fn record_that_is_being_taken_leads_nowhere() {
        let first = GroupRecord::first(Member(0), config(0..3, AckLevel::All), joiners([]));
        let taking = first.taking(Member(1));
        assert_eq!(taking.toward(&shape([0], AckLevel::One, 1)), None);
    }
}
