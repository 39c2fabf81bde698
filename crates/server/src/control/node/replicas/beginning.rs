//! A volume that was made for this node alone gets a group.
//!
//! ```text
//!  open, alone ─ Depart ─► closed, its clients wait ─► log prepared, its superblock a group's ─► spec and first record
//!       ▲                          │                              │                                   │
//!       └──── opened as before ◄───┴───────── refused, or a crash ┘                                   │
//!                                                                                                     ▼
//!  open, on its copy, its clients go on ◄── the group is taken ◄── the copy is opened ◄── its entry says that it has a group
//! ```
//!
//! A crash at any step leaves a volume that opens:
//!
//! | what is durable | what a start does |
//! |---|---|
//! | the log is a group's | the volume is opened alone: what its superblock says of a group is kept, and read by nobody |
//! | the record, too | the same; then it is seen that the record names this node, and the rest is done ([`go_on`]) |
//! | the entry, too | the record names this node the primary: it takes the group |
//!
//! Invariants:
//! 1. Until the entry says that the volume has a group, nobody else is a member of it: others join what this node serves.
//! 2. The log is changed by nobody else meanwhile: it is closed, and the volume is busy.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use hdcs_api::{ApiError, ErrorKind};
use hdcs_backend::crypt::Encryption;
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_SUPERBLOCKS, LogSuperblock, Membership};
use hdcs_core::replication::record::GroupRecord;
use hdcs_core::volume::Phase;
use hdcs_device::space;
use hdcs_frontend::VolumeNumber;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::Replicas;
use crate::catalogue::{self, Entry};
use crate::control::node::groups::GroupPlan;
use crate::control::node::moving::{Moving, arrived, depart, show_moving};
use crate::control::node::open::NotOpen;
use crate::control::node::{Node, at_volume, beside, failed, find};

/// So many openings and epochs of a log are left out when it begins another group. Nodes of the last one may have opened their
/// copies more often than this one knows, and what those openings wrote must stay older than all that is written from
/// now on. They may also have promised epochs that this one does not know.
const LEFT_OUT: u64 = 1 << 32;
/// All copies, and volumes that stand on them, are there.
const SHARD: usize = 0;

/// Give an open volume the group that was planned. It is served again, by way of its group, when this ends.
pub(in crate::control::node) async fn begin(
    node: &Node,
    entry: &Entry,
    plan: GroupPlan,
) -> Result<(), ApiError> {
    let name = entry.name.as_str();
    let alone = || failed(format!("volume {name}: this node is alone"));
    let replicas = node.replicas.as_ref().ok_or_else(alone)?;
    let busy = node.volumes.begin(name, "given a group")?;
    close_and_change(node, replicas, entry, Some(plan)).await?;
    drop(busy);
    replicas.await_served(name, entry.uuid).await
}

/// The record of a volume names this node, and its entry says nothing of a group: a crash came in between.
pub(super) async fn go_on(
    node: &Node,
    replicas: &Replicas,
    entry: &Entry,
    record: &GroupRecord,
) -> Result<(), ApiError> {
    let name = entry.name.as_str();
    if record.primary() != Some(replicas.0.me) {
        let why =
            "it has a group of other nodes, and is this node's alone: delete it here, or there";
        return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
    }
    // It is being opened, or done already.
    let Ok(_busy) = node.volumes.begin(name, "given a group") else {
        return Ok(());
    };
    if node.volumes.not_open(name).is_some() {
        return Ok(());
    }
    tracing::info!("volume {name}: it was about to get a group, and gets it now");
    close_and_change(node, replicas, entry, None).await
}

/// Close a volume while its clients wait, and change its log, its group and its entry, in this order; the group is there
/// already without a plan. If that fails it is opened as it was.
async fn close_and_change(
    node: &Node,
    replicas: &Replicas,
    entry: &Entry,
    plan: Option<GroupPlan>,
) -> Result<(), ApiError> {
    let (name, number) = (entry.name.as_str(), VolumeNumber(entry.number));
    let report = node.link.report().await?;
    let open = find(&report, number).filter(|volume| volume.phase == Phase::Open);
    let Some(before) = open.cloned() else {
        let why = "it is not open: open it first";
        return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
    };
    let to = Moving {
        shard: SHARD,
        since: Instant::now(),
    };
    let destination = depart(node, entry, to).await?;
    show_moving(node, number, to, before);
    match change(node, entry, plan).await {
        Ok(changed) => {
            replicas.with(entry.uuid, |known| known.waited_for = Some(destination));
            node.volumes.put(changed, Some(NotOpen::Copy));
            Ok(())
        }
        Err(error) => {
            let opened = node.open_at(entry, node.volumes.count(), destination).await;
            arrived(node, entry, opened.is_ok()).await;
            let more = opened.err().map_or(String::new(), |failure| {
                format!("; and it is not open any more: {failure}")
            });
            let why = format!("{}{more}", error.message);
            Err(ApiError::new(error.kind, why))
        }
    }
}

/// The steps of a closed volume; its entry afterwards.
async fn change(node: &Node, entry: &Entry, plan: Option<GroupPlan>) -> Result<Entry, ApiError> {
    let (layout, of) = (node.setup.layout().clone(), entry.clone());
    let is_new = plan.is_some();
    let log = beside(move || begin_copy(&of, &layout, is_new));
    let begun = log
        .await?
        .map_err(|why| failed(format!("volume {}: its write log: {why}", entry.name)))?;
    if let Some(plan) = plan {
        let Begun { log, epoch } = begun;
        node.groups.found(entry, log, epoch, plan).await?;
    }
    let changed = Entry {
        is_replicated: true,
        shard: None,
        log: catalogue::LogPlace {
            prepared: None,
            ..entry.log.clone()
        },
        ..entry.clone()
    };
    let (layout, new) = (node.setup.layout().clone(), changed.clone());
    let written = beside(move || catalogue::update(&layout, &new)).await?;
    written.map_err(|error| at_volume(entry.name.as_str(), failed(error.to_string())))?;
    Ok(changed)
}

/// A log that is the copy of a group's first member.
struct Begun {
    /// Its number.
    log: u64,
    /// The group's first epoch.
    epoch: u64,
}

/// Take all the space of a closed log, and have it say that it is the copy of a group's first member, unless the group is
/// there and it says so already. Blocks.
fn begin_copy(
    entry: &Entry,
    layout: &crate::data_dir::Layout,
    is_new: bool,
) -> Result<Begun, String> {
    let path = entry.log_path(layout);
    let file = fs::OpenOptions::new().read(true).write(true).open(&path);
    let file = Arc::new(file.map_err(|error| format!("{}: {error}", path.display()))?);
    let prepared = space::prepared_bytes(&file, entry.log.bytes);
    if prepared < entry.log.bytes {
        // A copy may be filled at any time, and so is this one to be. Nobody else has the file, and it is wanted all the same.
        let wanted = Arc::clone(&file);
        let taken = space::prepare(&file, prepared, entry.log.bytes);
        drop(wanted);
        taken.map_err(|error| format!("its space cannot be taken: {error}"))?;
    }
    let newest = newest(&file, entry).map_err(|error| error.to_string())?;
    let log = newest.log.get();
    let unlocked = entry.encryption.as_ref().map(Encryption::unlock);
    let unlocked = unlocked.transpose().map_err(|error| error.to_string())?;
    let keys = unlocked.map(|keys| keys.log(log));
    let keys = keys.as_ref().map(|keys| -> &dyn Authenticator { keys });
    // What nobody with the volume's key has written must not be given a tag.
    newest
        .authenticate(keys)
        .map_err(|error| error.to_string())?;
    let mut next = newest;
    // One that was detached still says what it was in another group. What was cut there stays so.
    let last = next.membership();
    if let Some(last) = last.filter(|_| !is_new) {
        let epoch = last.promised;
        return Ok(Begun { log, epoch });
    }
    let raised = |number: u64| {
        let raised = number.checked_add(LEFT_OUT);
        raised.ok_or("the numbers of its openings, or of its epochs, are used up")
    };
    let epoch = last.map_or(Ok(GroupRecord::FIRST), |last| raised(last.promised))?;
    let founding = Membership {
        promised: epoch,
        cut_position: last.map_or(0, |last| last.cut_position),
        void_before: last.map_or(0, |last| last.void_before),
        joined: GroupRecord::FIRST,
        is_whole: true,
    };
    next.sequence = U64::new(newest.sequence.get() + 1);
    if newest.named_ahead() > 0 {
        next.ahead_sequence = next.sequence;
    }
    if last.is_some() {
        next.incarnation = U64::new(raised(newest.incarnation.get())?);
    }
    next.set_membership(founding);
    next.seal_with(keys);
    let offset = LogSuperblock::offset_of(next.sequence.get());
    file.write_all_at(next.as_bytes(), offset)
        .and_then(|()| file.sync_all())
        .map_err(|error| error.to_string())?;
    Ok(Begun { log, epoch })
}

/// The superblock of a log that is in force.
fn newest(file: &File, entry: &Entry) -> std::io::Result<LogSuperblock> {
    let mut found = Vec::new();
    for sequence in 0..LOG_SUPERBLOCKS {
        let mut block = [0; BLOCK_BYTES];
        file.read_exact_at(&mut block, LogSuperblock::offset_of(sequence))?;
        found.push(LogSuperblock::parse(&block));
    }
    let own = |copy: &LogSuperblock| copy.volume == *entry.uuid.as_bytes();
    let newest = LogSuperblock::in_force(found).ok().filter(own);
    newest.ok_or_else(|| std::io::Error::other("it is not the volume's"))
}
