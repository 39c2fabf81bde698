//! What is said of this node's part in a group: how a volume stands that it does not serve, from whom nothing comes any more,
//! and who joins the group or leaves it.

use std::time::Duration;

use hdcs_api::groups::ClusterStatus;
use hdcs_api::{Problem, Volume};
use hdcs_core::replication::Member;
use hdcs_core::replication::participant::{Role, Status};
use hdcs_core::replication::record::{GroupRecord, Phase};
use hdcs_core::volume::State;
use uuid::Uuid;

use super::Replicas;
use crate::control::node::lock;
use crate::control::node::open::NotOpen;
use crate::control::view;
use crate::shard::groups::Move;

/// For how long a primary may say nothing, at least: it sends beats in each quarter of a lease.
const SILENCE_MIN: Duration = Duration::from_secs(5);

impl Replicas {
    /// The state of a volume that this node has a copy for and has not open, why it is in that one, and whether something is
    /// being opened: the copy, or the volume.
    pub fn standing(&self, volume: Uuid) -> (State, String, bool) {
        let (stopped, trouble, status) = self.with(volume, |known| {
            let stopped = known.stopped.clone();
            (stopped, known.trouble.clone(), known.status.clone())
        });
        if let Some(trouble) = trouble {
            let why = format!("this node's copy of its write log is of no use: {trouble}");
            return (State::Error, why, false);
        }
        if let Some(why) = self.loss_of_group(volume) {
            return (State::Error, why, false);
        }
        let Some(status) = status else {
            if let Some(trouble) = self.records_trouble() {
                return (State::Error, trouble, false);
            }
            let why = "this node's copy of its write log is being opened";
            return (State::Standby, why.to_owned(), true);
        };
        match (status.role, stopped) {
            (Role::Follows, stopped) if status.is_whole => {
                let mut why = NotOpen::Copy.to_string();
                if let Some(stopped) = stopped {
                    why += &format!("; this node could not take its group: {stopped}");
                } else if let Some(silent) = self.silence(volume) {
                    why += &format!("; {silent}");
                }
                (State::Standby, why, false)
            }
            (Role::Follows, Some(why)) if status.may_heal => (State::Error, why, false),
            (Role::Follows, None) if status.may_heal => {
                let why = "some data of this node's copy of its write log is damaged: it can take over only while other members \
                           have that whole";
                (State::Inconsistent, why.to_owned(), false)
            }
            (Role::Follows, _) => {
                let why = "this node's copy of its write log is being brought up, and cannot take over before that ends";
                (State::Inconsistent, why.to_owned(), false)
            }
            (_, Some(why)) => {
                let why = format!("its group is this node's, and it is not served yet: {why}");
                (State::Error, why, false)
            }
            (Role::Takes, None) => {
                let why = format!(
                    "this node takes its group, and {}",
                    self.waits(volume, &status)
                );
                (State::Standby, why, true)
            }
            (Role::Serves, None) => (
                State::Standby,
                "its group is this node's: it is being opened".to_owned(),
                true,
            ),
        }
    }

    /// The copies that this node should have and cannot open, of volumes that are not among those shown: what keeps it from
    /// having them.
    pub fn missing_copies(&self, shown: &[Volume]) -> Vec<Problem> {
        let is_shown = |uuid: &Uuid| {
            let uuid = uuid.to_string();
            shown.iter().any(|volume| volume.uuid == uuid)
        };
        let known = lock(&self.0.known);
        let missing = known.iter().filter_map(|(uuid, known)| {
            let trouble = known.trouble.as_ref()?;
            let is_wanted = !known.is_removed && !known.is_absent() && !is_shown(uuid);
            is_wanted.then(|| Problem {
                part: format!("volume {}", known.name),
                state: view::state(State::Error).to_owned(),
                for_ms: None,
                reason: format!(
                    "this node should have a copy of its write log and has none: {trouble}"
                ),
            })
        });
        missing.collect()
    }

    /// Which nodes have said that they have no copy of a volume's log that they can use, in words.
    pub fn without_copy(&self, volume: Uuid) -> Option<String> {
        let without = self.with(volume, |known| known.without.clone());
        let (nodes, have) = match &self.named(&without)[..] {
            [] => return None,
            [one] => (format!("node {one}"), "has"),
            more => (format!("nodes {}", more.join(", ")), "have"),
        };
        Some(format!(
            "{nodes} can be reached and {have} no usable copy: `hdcs status` there says why"
        ))
    }

    /// That nothing has come from the primary for longer than it may say nothing.
    fn silence(&self, volume: Uuid) -> Option<String> {
        let lease_ms = (self.0.setup.cluster()).map_or(0, |cluster| cluster.lease_ms);
        let silence_min = SILENCE_MIN.max(Duration::from_millis(lease_ms));
        let (silent, primary) = self.with(volume, |known| {
            let phase = known.record.as_ref().map(|record| record.phase);
            (known.silent, phase)
        });
        let Some(Phase::Serving { primary }) = primary.filter(|_| silent > silence_min) else {
            return None;
        };
        Some(format!(
            "nothing has come from its primary, {}, for {} s",
            self.called(primary),
            silent.as_secs()
        ))
    }

    /// What this node waits for as the candidate.
    fn waits(&self, volume: Uuid, status: &Status) -> String {
        let takeover = self.with(volume, |known| self.takeover(known));
        let waits = waits(status);
        match takeover.filter(|_| status.missing.is_empty()) {
            Some(takeover) if !takeover.promised.is_empty() || !takeover.silent.is_empty() => {
                format!(
                    "{waits} (it has promises of {}, none of {}, and needs {})",
                    some(&takeover.promised),
                    some(&takeover.silent),
                    takeover.promises_needed
                )
            }
            _ => waits,
        }
    }

    /// What this node is in its cluster, speaking with these nodes.
    pub fn cluster_status(&self, peers: &[Member]) -> Option<ClusterStatus> {
        let cluster = self.0.setup.cluster()?;
        let own = cluster.own.member;
        let others = cluster.nodes.iter().filter(|(_, node)| node.member != own);
        Some(ClusterStatus {
            id: cluster.id.to_string(),
            node: cluster.node.clone(),
            number: own.0,
            others: others.map(|(name, _)| name.clone()).collect(),
            connected: self.named(peers),
            records: cluster.records.display().to_string(),
            records_trouble: self.records_trouble(),
        })
    }

    /// These nodes have not let go for long of their copies of a volume whose group was removed.
    pub(super) fn note_late(&self, volume: Uuid, late: &[Member]) {
        let Some(first) = late.first() else { return };
        let Some(left_out) = lock(&self.0.late).pass() else {
            return;
        };
        let mark = self.0.store.gone_mark(volume, *first);
        tracing::warn!(
            %volume, left_out,
            "the volume was deleted or detached, and node {} has not been here since to delete its copy: the records of its \
             group stay until then; if that node is gone for good, `touch {}` says so",
            self.called(*first),
            mark.display()
        );
    }

    /// Who has become a member of a group by this record, or is none any more.
    pub(super) fn note_moves(&self, volume: Uuid, record: &GroupRecord, moves: &[Move]) {
        for one in moves {
            tracing::info!(
                %volume, revision = record.revision, epoch = record.epoch,
                "node {} {} (of {} copies there are {})",
                self.called(one.member),
                one.what,
                record.config.replicas,
                record.config.members.count()
            );
        }
    }
}

/// Names one after another, if there are some.
pub(super) fn some(names: &[String]) -> String {
    if names.is_empty() {
        return "nobody".to_owned();
    }
    names.join(", ")
}

/// What a candidate waits for.
pub(super) fn waits(status: &Status) -> String {
    if status.missing.is_empty() {
        let what = if status.may_heal {
            "reads back its copy of the write log, which is damaged, and gets that from members that answer"
        } else {
            "waits for members to answer"
        };
        return what.to_owned();
    }
    let spots = status.missing.iter();
    let spots: Vec<_> = spots.map(|(from, to)| format!("{from} to {to}")).collect();
    format!(
        "has a copy of the write log that is damaged at blocks {}, which no member that has answered has whole, and waits \
         for the others to answer",
        spots.join(", ")
    )
}
