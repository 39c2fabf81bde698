//! What is waited for: by a node that takes a group, until it serves the volume; and by writes of a volume that is served.

use std::time::{Duration, Instant};

use hdcs_api::groups::{Takeover, TakeoverWaits};
use hdcs_api::{ApiError, ErrorKind};
use hdcs_core::replication::Member;
use hdcs_core::replication::group::Stage;
use hdcs_core::replication::participant::{Role, Waits};
use hdcs_core::replication::takeover::Stop;
use hdcs_core::volume::Trouble;
use hdcs_frontend::VolumeNumber;
use uuid::Uuid;

use super::standing::{some, waits};
use super::{Known, Replicas, Serving, TAKEOVER_TIME_MAX};
use crate::catalogue::Entry;
use crate::control::link::Link;
use crate::control::node::{ANSWER_TIME_MAX, WATCH_PERIOD, find, lock};

/// How long a new volume waits for its members, whose copies are empty.
const JOINING_TIME_MAX: Duration = Duration::from_secs(30);

/// How looking at the records went.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Since when they are being looked at.
    pub begun: Option<Instant>,
    /// What went wrong the last time.
    pub trouble: Option<String>,
}

impl Replicas {
    /// What keeps this node from the records.
    pub fn records_trouble(&self) -> Option<String> {
        let looks = lock(&self.0.looks);
        if looks.begun.is_some_and(|at| at.elapsed() > ANSWER_TIME_MAX) {
            let path = self.0.store.root().display();
            return Some(format!(
                "records of groups: {path}: what it lies on does not answer: have it answer again"
            ));
        }
        looks.trouble.clone()
    }

    pub(super) fn named(&self, members: &[Member]) -> Vec<String> {
        members.iter().map(|member| self.called(*member)).collect()
    }

    /// Why a takeover has stopped, with nodes by their names.
    pub(super) fn why_stopped(&self, stop: &Stop) -> String {
        let Stop::OwnLacks { own, tail, could } = stop else {
            return stop.to_string();
        };
        let could: Vec<_> = could.iter().map(|member| self.called(*member)).collect();
        format!(
            "this node's log ends at block {own} and the group's log begins at block {tail}, and what lies between is in \
             nobody's log any more: have one of these take over: {}",
            could.join(", ")
        )
    }

    /// What this node waits for before it serves.
    pub(super) fn takeover(&self, known: &Known) -> Option<Takeover> {
        let opening = Takeover {
            waits: TakeoverWaits::Opening,
            promised: Vec::new(),
            silent: Vec::new(),
            promises_needed: 0,
            lease_ms: None,
        };
        match known.status.as_ref()?.role {
            Role::Follows => None,
            Role::Serves => (known.serving != Serving::Yes).then_some(opening),
            Role::Takes => {
                let Some(taking) = &known.taking else {
                    return Some(opening);
                };
                let (waits, lease_ms) = match taking.waits {
                    Waits::Promises => (TakeoverWaits::Promises, None),
                    Waits::Copies => (TakeoverWaits::Copies, None),
                    Waits::Lease { left } => (TakeoverWaits::Lease, Some(left.as_millis())),
                    Waits::Record => (TakeoverWaits::Record, None),
                };
                Some(Takeover {
                    waits,
                    promised: self.named(&taking.promised),
                    silent: self.named(&taking.silent),
                    promises_needed: taking.needed as u64,
                    lease_ms,
                })
            }
        }
    }

    /// Wait until this node serves a volume, or cannot.
    pub async fn await_served(&self, name: &str, volume: Uuid) -> Result<(), ApiError> {
        let until = Instant::now() + TAKEOVER_TIME_MAX;
        let refuse = |kind, why: String| Err(ApiError::new(kind, format!("volume {name}: {why}")));
        // It is known from here on, until its copy is let go of; its record was there a moment ago.
        self.with(volume, |known| {
            (known.is_removed, known.absent_since) = (false, None);
        });
        loop {
            if !self.knows(volume) {
                return refuse(ErrorKind::Conflict, self.removal());
            }
            if let Some(why) = self.loss_of_group(volume) {
                return refuse(ErrorKind::Conflict, why);
            }
            let (serving, stopped) =
                self.with(volume, |known| (known.serving, known.stopped.clone()));
            if let Some(why) = stopped {
                let why = format!("this node could not take its group: {why}");
                return refuse(ErrorKind::Conflict, why);
            }
            if serving == Serving::Yes {
                return Ok(());
            }
            if Instant::now() > until {
                let why = format!(
                    "it is not served after {} s{}; `hdcs group show {name}` says which members it has",
                    TAKEOVER_TIME_MAX.as_secs(),
                    self.lacks(volume)
                );
                return refuse(ErrorKind::Timeout, why);
            }
            tokio::time::sleep(WATCH_PERIOD).await;
        }
    }

    /// Wait until as many nodes as writes need have copies of a new volume's log, but no longer than they take if all is well.
    pub async fn await_members(&self, link: &Link, entry: &Entry) {
        let until = Instant::now() + JOINING_TIME_MAX;
        let number = VolumeNumber(entry.number);
        while Instant::now() < until {
            let is_short = self.with(entry.uuid, |known| {
                let record = known.record.as_ref();
                record.is_none_or(|record| record.config.is_short())
            });
            // The data path learns it a moment later.
            let report = link.report().await.ok();
            let volume = report.as_ref().and_then(|report| find(report, number));
            let waits = volume
                .is_none_or(|volume| matches!(volume.trouble, Some((Trouble::CopiesTooFew, _))));
            if !is_short && !waits {
                return;
            }
            tokio::time::sleep(WATCH_PERIOD).await;
        }
    }

    fn removal(&self) -> String {
        let records = self.0.store.root().display();
        format!(
            "its group was removed (so it says in {records}): the volume was deleted or detached, and this node's copy goes"
        )
    }

    /// Why the group of a volume is no more, or cannot be told of, if it was one.
    pub(super) fn loss_of_group(&self, volume: Uuid) -> Option<String> {
        let (is_removed, is_absent) =
            self.with(volume, |known| (known.is_removed, known.is_absent()));
        if is_removed {
            return Some(self.removal());
        }
        let records = self.0.store.root().display();
        is_absent.then(|| {
            format!(
                "no record of its group is in {records}: see that all nodes have the same directory there, and put back \
                 what was in it"
            )
        })
    }

    /// What a takeover still waits for, as the end of a sentence.
    fn lacks(&self, volume: Uuid) -> String {
        if let Some(trouble) = self.records_trouble() {
            return format!(" ({trouble})");
        }
        if let Some(why) = self.with(volume, |known| known.unwritten.clone()) {
            return format!(" (its record cannot be written: {why})");
        }
        let damaged = self.with(volume, |known| {
            let status = known.status.as_ref();
            status
                .filter(|status| !status.missing.is_empty())
                .map(waits)
        });
        if let Some(waits) = damaged {
            return format!(": this node {waits}, and serves it as soon as they do");
        }
        let takeover = self.with(volume, |known| self.takeover(known));
        let Some(takeover) = takeover.filter(|one| one.waits == TakeoverWaits::Promises) else {
            return String::new();
        };
        format!(
            ": too few of its members answer (it has promises of {}, none of {}, and needs {}): this node serves it as \
             soon as they do",
            some(&takeover.promised),
            some(&takeover.silent),
            takeover.promises_needed
        )
    }

    /// Why writes of a volume wait that this node serves, if that is not for the device of its own copy: for whom, and what
    /// keeps them from being left out.
    pub fn awaited(&self, volume: Uuid) -> Option<String> {
        let unwritten = || self.with(volume, |known| known.unwritten.clone());
        let trouble = self.records_trouble().or_else(unwritten);
        let late = self.with(volume, |known| {
            let (status, record) = (known.status.as_ref()?, known.record.as_ref()?);
            if status.committed? >= status.durable {
                return None;
            }
            let others = status.others.iter();
            let late = others.filter(|other| {
                let is_behind = other.durable < status.durable || other.stage == Stage::Away;
                is_behind && record.config.members.contains(other.member)
            });
            Some(
                late.map(|other| self.called(other.member))
                    .collect::<Vec<_>>(),
            )
        })?;
        let whom = match &late[..] {
            [] => "a member has".to_owned(),
            [one] => format!("node {one} has"),
            more => format!("nodes {} have", more.join(", ")),
        };
        Some(match trouble {
            None => format!(
                "{whom} not confirmed what was written: who does not answer is left out after member_deadline_ms"
            ),
            Some(trouble) => {
                format!("{whom} not confirmed what was written, and cannot be left out: {trouble}")
            }
        })
    }
}
