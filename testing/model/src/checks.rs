//! What must hold whatever happens.

use hdcs_core::replication::record::GroupRecord;
use hdcs_core::replication::replica::Replica;
use hdcs_core::replication::{Member, Point, Spans};

use crate::disk::Disk;
use crate::node::{Part, Up};
use crate::plant::Plant;

/// A rule that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Broken {
    /// A replay reports rot on a medium that lost nothing.
    Rot,
    /// Something else was committed where something was committed before.
    Overwritten,
    /// A new primary lacks what was committed.
    Lost,
    /// What was committed is durable at so few members that enough of the others might promise.
    TooFew,
    /// A new primary begins before a tail behind which a later generation may have been destaged.
    TakenBack,
    /// A tail is known to so few members that enough of the others might promise.
    TailOfTooFew,
    /// Two nodes serve in one epoch.
    TwoPrimaries,
    /// Two members' logs differ.
    NoPrefix,
    /// A machine found its own state to be impossible.
    Invariant,
    /// Everybody is up, nothing is on its way, and the group is not as it should be.
    Stuck,
    /// A span was written over what a durable superblock still needs.
    Overrun,
    /// A copy that was given up since it is rotten is offered again.
    RotOffered,
    /// A record follows that may not.
    Record,
    /// A request took effect twice.
    TakenTwice,
    /// What a client was told is not what the committed log says.
    Unsaid,
    /// A client that keeps to the rules was refused.
    Refused,
    /// Who takes over does not find out what clients have asked for.
    NoTable,
    /// Who takes over does not have what requests have changed.
    State,
}

/// What has happened, as nobody in the world knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// The ends of committed spans, in order.
    pub committed: Vec<Point>,
    /// The furthest tail behind which a primary might begin a generation.
    retired: Point,
}

impl History {
    /// A node begins to serve with this copy.
    pub fn begin(&self, replica: &Replica) -> Option<Broken> {
        if !self.committed.iter().all(|point| replica.has(*point)) {
            return Some(Broken::Lost);
        }
        (replica.superblock().tail.position < self.retired.position).then_some(Broken::TakenBack)
    }

    /// Follow what a node commits and retires.
    pub fn follow(&mut self, up: &Up, plant: Option<Plant>) -> Option<Broken> {
        let Part::Serves(group) = &up.part else {
            return None;
        };
        for point in up.committed() {
            let index = self
                .committed
                .partition_point(|other| other.position < point.position);
            match self.committed.get(index) {
                Some(other) if *other == point => {}
                Some(_) => return Some(Broken::Overwritten),
                None => self.committed.push(point),
            }
        }
        let own = up.replica.superblock().tail.position;
        let is_planted = plant == Some(Plant::TailOfOne) && own == group.change().tail.position;
        let tail = group.change().tail;
        let is_moved = group.is_retired() && tail.position > self.retired.position;
        if is_moved || is_planted {
            self.retired = tail;
        }
        None
    }

    /// Check all media.
    pub fn check(&self, record: &GroupRecord, disks: &[&Disk]) -> Option<Broken> {
        let config = &record.config;
        let disk = |member: Member| disks[usize::from(member.0)];
        let members = || config.members.iter().map(|member| (member, disk(member)));
        let is_whole = |(member, disk): &(Member, &Disk)| {
            disk.superblock.is_whole
                && config.members.joined(*member) == Some(disk.superblock.joined)
        };
        let whole = || members().filter(is_whole).map(|(_, disk)| disk);
        // What went with a medium is missed by no rule, until the member has left and joined.
        let is_gone = |of: &(Member, &Disk)| of.1.was_lost && !is_whole(of);
        let gone = members().filter(is_gone).count();
        let needed = config.copies_to_commit() - gone.min(config.copies_to_commit());
        if let Some(last) = self.committed.last()
            && whole().filter(|disk| disk.has(*last)).count() < needed
        {
            return Some(Broken::TooFew);
        }
        let knows = |disk: &&Disk| disk.superblock.tail.position >= self.retired.position;
        if whole().filter(knows).count() < needed {
            return Some(Broken::TailOfTooFew);
        }
        let mut logs = Vec::new();
        for disk in whole() {
            let Ok(found) = disk.replay() else {
                return Some(Broken::Rot);
            };
            logs.push((disk.superblock.tail, found));
        }
        for (tail, one) in &logs {
            for (_, other) in &logs {
                let common = one.iter().filter(|span| {
                    other
                        .first()
                        .is_some_and(|first| span.start.position >= first.start.position)
                        && other
                            .last()
                            .is_some_and(|last| span.end.position <= last.end.position)
                        && span.start.position >= tail.position
                });
                if common.clone().any(|span| !other.contains(span)) {
                    return Some(Broken::NoPrefix);
                }
            }
        }
        None
    }
}
