//! This node's copies of replicated logs, and the volumes that stand on them while it serves.
//!
//! ```text
//!  records (all nodes see them)                       first shard
//!   │  a record that names this node                      │
//!   ├─► no copy yet: make one ─► OpenCopy ───────────────►│ follows
//!   ├─► SeeRecord ───────────────────────────────────────►│
//!   ◄── Ask: replace the record by this one ──────────────┤ takes, joins, leaves
//!   │   Began ◄───────────────────────────────────────────┤ serves
//!   │    └─► the volume is opened over the copy           │
//!   │   Fenced ◄──────────────────────────────────────────┤ follows again
//!   │    └─► the volume is closed, without destage        │
//! ```
//!
//! Nothing opens by itself: that a node starts is no reason. But whom the record calls the primary, and who does not serve,
//! takes the group once more: with a new epoch and with promises, as anybody else would.
//!
//! A node that is taken out of a group lets go of its copy by itself ([`forgetting`]).
//!
//! Invariants:
//! 1. A volume with a group is opened only between `Began` and `Fenced`.
//! 2. Of one group one thing is done at a time, in the order of what was told; but records are asked for at once, since what
//!    is being done may wait for a member to leave.

mod awaiting;
mod beginning;
mod configuring;
mod forgetting;
mod opening;
mod standing;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdcs_api::groups::{GroupRole, GroupView, VolumeGroup};
use hdcs_api::{ApiError, ErrorKind};
use hdcs_core::base::limits::LEASE_MS_MAX;
use hdcs_core::node::opening::Failure;
use hdcs_core::replication::Member;
use hdcs_core::replication::participant::{Role, Status, Taking};
use hdcs_core::replication::record::{GroupRecord, Phase, Shape};
use hdcs_frontend::VolumeNumber;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::copies::{follow_spec, let_go, newest_entry};
use awaiting::Looks;
pub(super) use beginning::begin;
use opening::Turns;

use super::create::{make_copy, make_copy_again};
use super::groups::{Replication, Work};
use super::moving::{Destination, arrived};
use super::open::NotOpen;
use super::resyncs::Resyncs;
use super::setup::Setup;
use super::{COMMAND_TIME_MAX, MOVE_TIME_MAX, Node, WATCH_PERIOD, beside, failed, lock};
use crate::catalogue::Entry;
use crate::cluster::records::{Listing, Proposed, RecordStore, StoreError};
use crate::cluster::spec::VolumeSpecFile;
use crate::control::link::Link;
use crate::log_limit::LogLimit;
use crate::shard::command::{Command, OpenFailure};
use crate::shard::groups::{GroupChange, GroupEvent, Move};

/// How often the records are looked at.
const LOOK_PERIOD: Duration = Duration::from_millis(200);
/// How long a takeover may take until the volume is served.
const TAKEOVER_TIME_MAX: Duration = Duration::from_secs(60);
const _: () = assert!(
    TAKEOVER_TIME_MAX.as_millis() > LEASE_MS_MAX as u128 * 3 / 2,
    "a takeover may have to wait out a lease, which is stretched for clocks that differ"
);
/// For how long the record of a group may not be found before that counts: a directory over NFS may show the past.
const ABSENCE_MAX: Duration = Duration::from_secs(2);
/// Between two lines in the log about nodes that do not let go of copies.
const LATE_PERIOD: Duration = Duration::from_hours(1);
/// Between two lines in the log about what goes wrong again and again.
const FAULT_PERIOD: Duration = Duration::from_secs(10);

/// Whether this node serves a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Serving {
    #[default]
    No,
    /// Its group is this node's, and it is being opened, or could not be.
    May,
    Yes,
}

/// What is known of one group.
#[derive(Default)]
struct Known {
    /// The record that the copy was told last.
    revision: u64,
    /// Whether the copy is open.
    is_open: bool,
    /// It is being made, opened or let go of, by this one of all that were begun.
    busy: Option<u64>,
    /// When it is tried again to open it.
    open_at: Option<Instant>,
    /// When it was opened anew last, since it was damaged under who serves.
    opened_anew: Option<Instant>,
    /// The epoch in which this process has begun to serve, or to take the group for that.
    epoch: u64,
    serving: Serving,
    /// Why the last takeover by this node did not come about, or the volume was not opened after it.
    stopped: Option<String>,
    /// Why its copy is not open, if that was tried.
    trouble: Option<String>,
    /// What the volume is called whose copy is not open: a node without a copy has no entry of it.
    name: String,
    status: Option<Status>,
    /// Nodes that are reached, and have said last that they have no copy that they can use.
    without: Vec<Member>,
    /// For how long nothing of the group has come from any other node.
    silent: Duration,
    /// What this node waits for, if it takes the group.
    taking: Option<Taking>,
    /// The group was removed.
    is_removed: bool,
    /// Since when no record of it is found.
    absent_since: Option<Instant>,
    /// The record that was read last.
    record: Option<GroupRecord>,
    /// Why its next record could not be written, when that was tried last.
    unwritten: Option<String>,
    resyncs: Resyncs,
    /// The volume was open without a group before, and clients wait for it.
    waited_for: Option<Destination>,
}

impl Known {
    /// Whether no record of it has been found for a while.
    fn is_absent(&self) -> bool {
        (self.absent_since).is_some_and(|since| since.elapsed() > ABSENCE_MAX)
    }
}

/// See the module.
#[derive(Clone)]
pub(in crate::control) struct Replicas(Arc<Inner>);

struct Inner {
    store: RecordStore,
    me: Member,
    link: Arc<Link>,
    setup: Arc<Setup>,
    known: Mutex<BTreeMap<Uuid, Known>>,
    openings: Turns,
    busy_count: AtomicU64,
    faults: Mutex<LogLimit>,
    late: Mutex<LogLimit>,
    looks: Mutex<Looks>,
}

impl Replicas {
    /// Nothing is known yet.
    pub fn new(store: RecordStore, me: Member, link: Arc<Link>, setup: Arc<Setup>) -> Self {
        Self(Arc::new(Inner {
            store,
            me,
            link,
            setup,
            known: Mutex::default(),
            openings: Turns::new(),
            busy_count: AtomicU64::new(0),
            faults: Mutex::new(LogLimit::new(FAULT_PERIOD)),
            late: Mutex::new(LogLimit::new(LATE_PERIOD)),
            looks: Mutex::default(),
        }))
    }

    /// Where the records are.
    pub fn store(&self) -> &RecordStore {
        &self.0.store
    }

    /// This node.
    pub fn me(&self) -> Member {
        self.0.me
    }

    fn with<T>(&self, volume: Uuid, call: impl FnOnce(&mut Known) -> T) -> T {
        call(lock(&self.0.known).entry(volume).or_default())
    }

    fn knows(&self, volume: Uuid) -> bool {
        lock(&self.0.known).contains_key(&volume)
    }

    /// The same of a group in which this node may have no part.
    fn peek<T>(&self, volume: Uuid, call: impl FnOnce(&Known) -> Option<T>) -> Option<T> {
        lock(&self.0.known).get(&volume).and_then(call)
    }

    fn complain(&self, what: &str) {
        if let Some(left_out) = lock(&self.0.faults).pass() {
            tracing::warn!(left_out, "{what}");
        }
    }

    /// This node's copy of a volume is of no use at present.
    fn copy_failed(&self, spec: &VolumeSpecFile, error: &ApiError) {
        self.complain(&format!("volume {}: its copy: {error}", spec.name));
        self.with(spec.uuid, |known| {
            known.trouble = Some(error.to_string());
            known.name = spec.name.to_string();
        });
    }

    /// Whether a volume may be open here.
    pub fn may_serve(&self, volume: Uuid) -> bool {
        self.with(volume, |known| known.serving != Serving::No)
    }

    /// Tell the copy of the record, if it does not know it.
    fn tell(&self, volume: Uuid, record: &GroupRecord) {
        let is_news = self.with(volume, |known| {
            // What this node has written itself is not read before the next look.
            let last = known.record.as_ref().map_or(0, |last| last.revision);
            if record.revision > last {
                known.record = Some(record.clone());
            }
            if record.primary().is_some_and(|primary| primary != self.0.me) {
                // Somebody else has taken the group since.
                known.stopped = None;
            }
            known.is_open && record.revision > known.revision
        });
        let is_told =
            is_news && (self.0.link).send(Command::SeeRecord(volume, Box::new(record.clone())));
        if is_told {
            // What the shard had no room for is told again at the next look.
            self.with(volume, |known| {
                known.revision = known.revision.max(record.revision);
            });
        }
    }

    /// Have the store replace its record by this one, and tell the copy what it has then.
    async fn ask(&self, volume: Uuid, record: GroupRecord, moves: Vec<Move>) {
        let (store, asked) = (self.0.store.clone(), record.clone());
        let outcome = beside(move || match store.propose(volume, &asked) {
            Proposed::Written => Ok((Some(asked), None)),
            Proposed::Lost(newer) => Ok((Some(*newer), None)),
            Proposed::Refused(error) => {
                tracing::warn!("a record that may not follow was not written: {error}");
                store.read(volume).map(|found| (found, None))
            }
            Proposed::Unknown(error) => {
                tracing::warn!("{error}");
                let read = store.read(volume);
                read.map(|found| (found, Some(error.to_string())))
            }
        });
        let outcome = match outcome.await {
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let (found, unwritten) = outcome.unwrap_or_else(|error| {
            self.complain(&error);
            (None, Some(error))
        });
        let is_there = (found.as_ref()).is_some_and(|found| found.revision >= record.revision);
        self.with(volume, |known| {
            known.unwritten = unwritten.filter(|_| !is_there);
        });
        if let Some(found) = &found {
            if *found == record {
                self.note_moves(volume, &record, &moves);
            }
            self.tell(volume, found);
        }
        if !is_there {
            // It is not there, whatever became of the attempt.
            tokio::time::sleep(LOOK_PERIOD).await;
            while !self.0.link.send(Command::AskAgain(volume)) {
                if self.0.link.path().is_stopping() {
                    return;
                }
                tokio::time::sleep(LOOK_PERIOD).await;
            }
        }
    }

    /// Ask for the group, as its candidate. Returns why the record could not be written that says so, if it could not.
    async fn take(&self, volume: Uuid, record: &GroupRecord) -> Option<String> {
        let taking = record.taking(self.0.me);
        let revision = taking.revision;
        self.with(volume, |known| {
            known.epoch = taking.epoch;
            known.serving = Serving::No;
            known.stopped = None;
        });
        self.ask(volume, taking, Vec::new()).await;
        self.with(volume, |known| {
            let last = known.record.as_ref();
            if last.is_some_and(|last| last.revision >= revision) {
                return None;
            }
            // It was not written: whom the record calls the primary asks for it at the next look again.
            known.epoch = 0;
            known.unwritten.clone()
        })
    }

    /// What this node's copy is and has.
    async fn look(&self, volume: Uuid) {
        let status = self
            .0
            .link
            .ask("looking at a copy", COMMAND_TIME_MAX, |answer| {
                Command::CopyStatus(volume, answer)
            });
        let seen = status.await.ok();
        if !self.knows(volume) {
            return;
        }
        self.with(volume, |known| {
            let Some(seen) = seen else {
                (known.status, known.taking) = (None, None);
                return;
            };
            known.resyncs.look(Instant::now(), &seen.status);
            known.silent = Duration::from_nanos(seen.silent.0);
            known.without = seen.without;
            (known.status, known.taking) = (Some(seen.status), seen.taking);
        });
    }

    fn called(&self, member: Member) -> String {
        let cluster = self.0.setup.cluster();
        cluster.map_or_else(|| member.to_string(), |cluster| cluster.called(member))
    }

    /// The group of a volume in short, if its record was read.
    pub fn in_short(&self, volume: Uuid) -> Option<VolumeGroup> {
        let (record, status) =
            self.with(volume, |known| (known.record.clone(), known.status.clone()));
        let record = record?;
        let (Phase::Taking { candidate: lead } | Phase::Serving { primary: lead }) = record.phase;
        let members = record.config.members.iter();
        let joiners = record.joiners.iter().copied();
        Some(VolumeGroup {
            role: status.map(|status| role(status.role)),
            primary: self.called(lead),
            epoch: record.epoch,
            members: members.map(|member| self.called(member)).collect(),
            joiners: joiners.map(|member| self.called(member)).collect(),
            replicas: record.config.replicas,
        })
    }
}

fn role(role: Role) -> GroupRole {
    match role {
        Role::Follows => GroupRole::Follows,
        Role::Takes => GroupRole::Takes,
        Role::Serves => GroupRole::Serves,
    }
}

impl Replication for Replicas {
    fn view(&self, volume: Uuid) -> Option<GroupView> {
        let (status, others, takeover, silent_ms) = self.peek(volume, |known| {
            let status = known.status.clone()?;
            let others = status.others.iter().map(|other| {
                let name = self.called(other.member);
                let is_without = known.without.contains(&other.member);
                known.resyncs.other(&status, name, other, is_without)
            });
            let others = others.collect();
            let silent_ms =
                (status.role == Role::Follows).then_some(known.silent.as_millis() as u64);
            Some((status, others, self.takeover(known), silent_ms))
        })?;
        Some(GroupView {
            role: role(status.role),
            head_blocks: status.head,
            durable_blocks: status.durable,
            committed_blocks: status.committed,
            others,
            takeover,
            silent_ms,
        })
    }

    fn trouble(&self, volume: Uuid) -> Option<String> {
        self.peek(volume, |known| known.trouble.clone())
    }

    fn take_over(&self, spec: VolumeSpecFile, record: GroupRecord) -> Work<()> {
        let replicas = self.clone();
        Box::pin(async move {
            // Before the group is taken from who serves.
            replicas.look(spec.uuid).await;
            let is_of_no_use = replicas.with(spec.uuid, |known| {
                (known.status.as_ref()).is_none_or(|status| !status.is_whole && !status.may_heal)
            });
            if is_of_no_use {
                let why = format!(
                    "volume {}: this node's copy of its write log is not open, of no use, or being brought up, and cannot take \
                     over: ask another member (`hdcs group show {}`)",
                    spec.name, spec.name
                );
                return Err(ApiError::new(ErrorKind::Conflict, why));
            }
            if let Some(why) = replicas.take(spec.uuid, &record).await {
                return Err(failed(format!(
                    "volume {}: its group was not taken: the record that says that this node takes it could not be written: \
                     {why}. Make room there, or mount it for writing, and begin the takeover again",
                    spec.name
                )));
            }
            replicas.await_served(spec.name.as_str(), spec.uuid).await
        })
    }

    fn configure(&self, spec: VolumeSpecFile, record: GroupRecord, shape: Shape) -> Work<()> {
        let replicas = self.clone();
        Box::pin(async move { replicas.configure(&spec, &record, shape).await })
    }
}

/// Follow the records and the copies for as long as the node lives.
pub async fn run(node: Arc<Node>, mut events: UnboundedReceiver<GroupEvent>) {
    let mut look = tokio::time::interval(LOOK_PERIOD);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // What is done with a volume may take long, and others do not wait for that.
    let mut queues = BTreeMap::new();
    let (mut looking, mut watching): (Option<JoinHandle<()>>, Option<JoinHandle<()>>) =
        (None, None);
    loop {
        tokio::select! {
            event = events.recv() => {
                let Some(GroupEvent { volume, what }) = event else { return };
                if let (GroupChange::Ask(record, moves), Some(replicas)) = (&what, &node.replicas) {
                    // An opening may wait for it: a member that is late has to leave.
                    let (replicas, record, moves) = (replicas.clone(), record.clone(), moves.clone());
                    tokio::spawn(async move { replicas.ask(volume, record, moves).await });
                    continue;
                }
                let queue = queues.entry(volume).or_insert_with(|| {
                    let (queue, waiting) = tokio::sync::mpsc::unbounded_channel();
                    tokio::spawn(follow(Arc::clone(&node), volume, waiting));
                    queue
                });
                let _ = queue.send(what);
            }
            // One that hangs holds up no event, and no second one is begun.
            _ = look.tick() => {
                if looking.as_ref().is_none_or(JoinHandle::is_finished) {
                    let node = Arc::clone(&node);
                    looking = Some(tokio::spawn(async move { look_at_all(&node).await }));
                }
                // The copies say what they wait for, also while the records do not answer.
                if watching.as_ref().is_none_or(JoinHandle::is_finished) {
                    let node = Arc::clone(&node);
                    watching = Some(tokio::spawn(async move { watch_all(&node).await }));
                }
            }
        }
    }
}

/// Do what one group asks for, in order.
async fn follow(node: Arc<Node>, volume: Uuid, mut events: UnboundedReceiver<GroupChange>) {
    while let Some(what) = events.recv().await {
        let Some(replicas) = &node.replicas else {
            return;
        };
        match what {
            // Not in turn.
            GroupChange::Ask(..) => {}
            GroupChange::Began { epoch } => {
                replicas.with(volume, |known| {
                    known.epoch = epoch;
                    known.serving = Serving::May;
                });
                let opened = serve(&node, replicas, volume).await;
                replicas.with(volume, |known| {
                    if opened == Ok(true) {
                        known.serving = Serving::Yes;
                    }
                    known.stopped = opened.err();
                });
            }
            GroupChange::Fenced => {
                replicas.with(volume, |known| known.serving = Serving::No);
                end_serving(&node, volume).await;
            }
            GroupChange::Stopped(why) => {
                let why = replicas.why_stopped(&why);
                replicas.with(volume, |known| known.stopped = Some(why.clone()));
                tracing::warn!(
                    "volume {}: this node did not take its group: {why}",
                    called(&node, volume)
                );
            }
            GroupChange::Failed(error) => {
                let why = format!(
                    "a write to this node's copy of its log failed ({error}): the copy is left as it is; put its device \
                     right and restart the daemon"
                );
                tracing::error!("volume {}: {why}", called(&node, volume));
                replicas.with(volume, |known| known.trouble = Some(why));
            }
        }
        replicas.look(volume).await;
    }
}

/// The entry of a volume on this node.
pub(super) fn entry_of(node: &Node, volume: Uuid) -> Option<Entry> {
    let mut entries = node.volumes.entries().into_iter();
    entries.find(|entry| entry.uuid == volume)
}

fn called(node: &Node, volume: Uuid) -> String {
    let entry = entry_of(node, volume);
    entry.map_or_else(|| volume.to_string(), |entry| entry.name.to_string())
}

/// The group is this node's: open the volume. Returns whether it is; else its copy is opened anew, and takes the group again.
async fn serve(node: &Node, replicas: &Replicas, volume: Uuid) -> Result<bool, String> {
    let Some(entry) = entry_of(node, volume) else {
        return Err("this node does not know the volume".to_owned());
    };
    let name = entry.name.as_str();
    let _busy = loop {
        match node.volumes.begin(name, "opened") {
            Ok(busy) => break busy,
            Err(_) => tokio::time::sleep(WATCH_PERIOD).await,
        }
    };
    // What others have destaged meanwhile it has not forgotten.
    let number = VolumeNumber(entry.number);
    let forgotten = node
        .link
        .ask_each("forgetting it", COMMAND_TIME_MAX, |answer| {
            Command::Forget(number, answer)
        });
    forgotten.await.map_err(|error| error.to_string())?;
    let began = Instant::now();
    let mut is_said = false;
    loop {
        let waited_for = replicas.with(volume, |known| known.waited_for.take());
        let is_waited_for = waited_for.is_some();
        let destination = waited_for.unwrap_or_default();
        let opened = match newest_entry(node, replicas, entry.clone()).await {
            Ok(entry) => {
                node.open_at(&entry, node.volumes.count(), destination)
                    .await
            }
            Err(error) => Err(OpenFailure::new(Failure::Unreachable, error.message)),
        };
        if is_waited_for {
            arrived(node, &entry, opened.is_ok()).await;
        }
        let Err(failure) = opened else {
            tracing::info!("volume {name} is served by this node now");
            return Ok(true);
        };
        let is_late = began.elapsed() > TAKEOVER_TIME_MAX / 2;
        if is_late && !std::mem::replace(&mut is_said, true) {
            tracing::error!(
                "volume {name}: its group is this node's, and it does not serve yet: {failure}"
            );
            replicas.with(volume, |known| known.stopped = Some(failure.to_string()));
        }
        // Who served before may still be letting go of the backend, for as long as the group stays this node's.
        replicas.look(volume).await;
        let is_ours = replicas.with(volume, |known| {
            let status = known.status.as_ref();
            status.is_some_and(|status| status.role == Role::Serves)
        });
        if failure.kind.is_loss() || failure.kind == Failure::Gone || !is_ours {
            if failure.kind == Failure::LogLost && open_anew(replicas, name, volume).await {
                return Ok(false);
            }
            tracing::error!("volume {name}: it is not opened: {failure}");
            return Err(failure.to_string());
        }
        let pause = if is_late {
            FAULT_PERIOD / 10
        } else {
            LOOK_PERIOD
        };
        tokio::time::sleep(pause).await;
    }
}

/// The copy was damaged since it was opened: have it opened anew. Its replay sees what is damaged, and this node takes the
/// group again and gets that from other members first. Returns whether that is begun: once in a while, lest a device that
/// keeps nothing do nothing else.
async fn open_anew(replicas: &Replicas, name: &str, volume: Uuid) -> bool {
    let now = Instant::now();
    let is_due = replicas.with(volume, |known| {
        let last = known.opened_anew.replace(now);
        last.is_none_or(|at| now.duration_since(at) > TAKEOVER_TIME_MAX)
    });
    if !is_due {
        return false;
    }
    let link = &replicas.0.link;
    let closed = link.ask("closing its copy", COMMAND_TIME_MAX, |answer| {
        Command::CloseCopy(volume, answer)
    });
    if let Err(error) = closed.await {
        replicas.complain(&error.to_string());
        return false;
    }
    tracing::warn!(
        "volume {name}: this node's copy of the log was damaged since it was opened: it is opened anew, and what is \
         damaged is got from other members"
    );
    replicas.with(volume, |known| {
        (known.is_open, known.open_at, known.revision) = (false, None, 0);
        (known.epoch, known.serving) = (0, Serving::No);
    });
    true
}

/// The group is another node's: close the volume as it is.
async fn end_serving(node: &Node, volume: Uuid) {
    let Some(entry) = entry_of(node, volume) else {
        return;
    };
    let name = entry.name.as_str();
    if node.volumes.not_open(name).is_none() {
        let number = VolumeNumber(entry.number);
        let closed = node
            .link
            .command(name, "closing it", MOVE_TIME_MAX, |answer| Command::Close {
                volume: number,
                destage: false,
                answer,
            });
        match closed.await {
            Ok(_) => tracing::warn!("volume {name} is closed: another node has its group"),
            Err(error) => tracing::error!("{error}: it may still be open"),
        }
    }
    node.volumes.put(entry, Some(NotOpen::Copy));
}

/// Look at what all copies of this node are and have.
async fn watch_all(node: &Node) {
    let Some(replicas) = &node.replicas else {
        return;
    };
    let volumes: Vec<_> = lock(&replicas.0.known).keys().copied().collect();
    for volume in volumes {
        replicas.look(volume).await;
    }
}

/// Look at all records: have the copies that this node should have, and tell them.
async fn look_at_all(node: &Arc<Node>) {
    let Some(replicas) = &node.replicas else {
        return;
    };
    let store = replicas.0.store.clone();
    lock(&replicas.0.looks).begun = Some(Instant::now());
    let all = beside(move || store.is_there().and_then(|()| store.all())).await;
    let all = match all {
        Ok(Ok(all)) => Ok(all),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    *lock(&replicas.0.looks) = Looks {
        begun: None,
        trouble: all.as_ref().err().cloned(),
    };
    let all = match all {
        Ok(all) => all,
        Err(trouble) => return replicas.complain(&trouble),
    };
    note_absent(replicas, &all);
    for (volume, removed) in all.removed {
        // What is being opened is let go of afterwards.
        if opening::is_busy(replicas, volume) {
            continue;
        }
        match let_go(node, replicas, volume, &removed).await {
            Ok(late) => replicas.note_late(volume, &late),
            Err(error) => replicas.complain(&error.to_string()),
        }
    }
    for (volume, group) in all.groups {
        let (spec, record) = match group {
            Ok(group) => group,
            Err(error) => {
                replicas.complain(&error.to_string());
                continue;
            }
        };
        let me = replicas.0.me;
        let is_mine = record.config.members.contains(me) || record.joiners.contains(&me);
        if !is_mine && !forgetting::has_copy(node, volume) {
            // What kept this node from having a copy matters no more.
            if replicas.knows(volume) {
                replicas.with(volume, |known| known.trouble = None);
            }
            continue;
        }
        replicas.with(volume, |known| known.record = Some(record.clone()));
        if let Err(error) = look_at(node, replicas, &spec, &record).await {
            replicas.copy_failed(&spec, &error);
        }
        if !is_mine {
            replicas.look(volume).await;
            forgetting::begin(node, replicas, volume, record);
        }
    }
}

/// Note which groups were removed, or are not among the records.
fn note_absent(replicas: &Replicas, all: &Listing) {
    for (volume, known) in lock(&replicas.0.known).iter_mut() {
        known.is_removed = all.removed.contains_key(volume);
        known.absent_since = if known.is_removed || all.groups.contains_key(volume) {
            None
        } else {
            known.absent_since.or_else(|| Some(Instant::now()))
        };
    }
}

async fn look_at(
    node: &Arc<Node>,
    replicas: &Replicas,
    spec: &VolumeSpecFile,
    record: &GroupRecord,
) -> Result<(), ApiError> {
    let volume = spec.uuid;
    if !replicas.with(volume, |known| known.is_open) {
        opening::begin(node, replicas, spec, record);
        return Ok(());
    }
    follow_spec(node, spec).await?;
    replicas.tell(volume, record);
    let is_forgotten = record.primary() == Some(replicas.0.me)
        && replicas.with(volume, |known| known.epoch < record.epoch);
    if is_forgotten {
        // Before it was started anew.
        let _is_tried_again = replicas.take(volume, record).await;
    }
    Ok(())
}

/// A volume of this node, whose copy is made anew if it is gone.
async fn with_log(node: &Node, entry: Entry, spec: &VolumeSpecFile) -> Result<Entry, ApiError> {
    let config = node.setup.core_config(&entry, node.volumes.count(), None)?;
    let (layout, of, log) = (node.setup.layout().clone(), entry.clone(), spec.log);
    let made = beside(move || {
        let is_gone = !of.log_path(&layout).exists();
        let made = is_gone.then(|| make_copy_again(&layout, &of, &config, log));
        made.transpose()
    });
    if made.await??.is_some() {
        tracing::warn!(
            "volume {}: this node's copy of its log was gone, and is brought up anew",
            entry.name
        );
    }
    Ok(entry)
}

/// Refuse what the volume's copies on other nodes would not learn of.
pub(super) fn refuse_with_copies(node: &Node, name: &str, what: &str) -> Result<(), ApiError> {
    let is_replicated = node
        .volumes
        .known(name)
        .is_ok_and(|entry| entry.is_replicated);
    if is_replicated {
        let message = format!(
            "volume {name}: other nodes have copies of its write log, and {what} would not reach them yet: nothing was \
             changed"
        );
        return Err(ApiError::new(ErrorKind::Conflict, message));
    }
    Ok(())
}

/// Refuse to delete or detach a volume that another node serves, or may.
pub(super) async fn refuse_copy(node: &Node, name: &str, what: &str) -> Result<(), ApiError> {
    let Ok(entry) = node.volumes.known(name) else {
        return Ok(());
    };
    if !entry.is_replicated {
        return Ok(());
    }
    let refuse = |why: String| {
        let message = format!("volume {name}: {why}");
        Err(ApiError::new(ErrorKind::Conflict, message))
    };
    let Some(replicas) = &node.replicas else {
        return refuse(
            "it has a group, and this node is in no cluster: give [cluster] in its configuration"
                .to_owned(),
        );
    };
    let (store, volume) = (replicas.0.store.clone(), entry.uuid);
    let me = replicas.0.me;
    // Whom the record names may, also when it cannot serve. What it believes itself may be out of date.
    let names = move |record: &GroupRecord| {
        let is_of_it = record.config.members.contains(me) || record.joiners.contains(&me);
        let (Phase::Taking { candidate: named } | Phase::Serving { primary: named }) = record.phase;
        is_of_it && named != me
    };
    let is_there = beside(move || match store.removed(volume)? {
        Some(_) => Ok(false),
        None => store
            .read(volume)
            .map(|record| record.as_ref().is_some_and(names)),
    });
    let is_there: Result<bool, StoreError> = is_there.await?;
    if is_there.map_err(|error| failed(error.to_string()))? {
        return refuse(format!(
            "this node has a copy of its write log, and the volume is another node's: {what} it there (`hdcs group show`)"
        ));
    }
    Ok(())
}

/// The group of a volume that is still open was removed: what it writes to its log ends without the other members, which
/// are letting go of their copies.
pub(super) async fn end_group(node: &Node, entry: &Entry) {
    if !entry.is_replicated {
        return;
    }
    let ended = (node.link).ask("ending its group", COMMAND_TIME_MAX, |answer| {
        Command::EndGroup(entry.uuid, answer)
    });
    if let Err(error) = ended.await {
        tracing::warn!("volume {}: {error}", entry.name);
    }
}

/// A volume that had copies is deleted: let go of this node's.
pub(super) async fn close_copy(node: &Node, entry: &Entry) {
    let Some(replicas) = node.replicas.as_ref().filter(|_| entry.is_replicated) else {
        return;
    };
    let until = Instant::now() + COMMAND_TIME_MAX;
    loop {
        let closed = node
            .link
            .ask("closing its copy", COMMAND_TIME_MAX, |answer| {
                Command::CloseCopy(entry.uuid, answer)
            });
        match closed.await {
            Ok(()) => break,
            // Something of it may still be under way on its device.
            Err(_) if Instant::now() < until => tokio::time::sleep(WATCH_PERIOD).await,
            Err(error) => {
                tracing::warn!("volume {}: {error}", entry.name);
                break;
            }
        }
    }
    lock(&replicas.0.known).remove(&entry.uuid);
}

/// Make a copy that is still to be brought up, and the volume's entry on this node.
async fn make_own_copy(node: &Node, spec: &VolumeSpecFile) -> Result<Entry, ApiError> {
    let name = spec.name.as_str();
    let _busy = node.volumes.begin(name, "made")?;
    if node.volumes.has(name) {
        return Err(ApiError::new(
            ErrorKind::Conflict,
            format!("this node has another volume of the name {name}: rename or delete that one"),
        ));
    }
    let number = node.catalogue.next_number(name).await?;
    let entry = spec.entry(number);
    node.memories.check(&entry)?;
    let config = node
        .setup
        .core_config(&entry, node.volumes.count() + 1, None)?;
    let (layout, log) = (node.setup.layout().clone(), spec.log);
    let made = beside(move || make_copy(&layout, entry, &config, log)).await??;
    tracing::info!("volume {name}: this node has a copy of its log from now on");
    node.volumes.put(made.clone(), Some(NotOpen::Copy));
    Ok(made)
}
