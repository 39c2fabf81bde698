//! Copies of replicated logs on this shard, and the parts that they play in their groups.
//!
//! ```text
//!  control plane ── OpenCopy, SeeRecord ──► Groups ──── messages ──── Links ──── other nodes
//!        ▲                                    │ ▲
//!        └── Ask, Began, Fenced, … ◄──────────┘ └─ writes of the volume that stands on the log, while this node serves
//! ```
//!
//! What is decided is in [`hdcs_core::replication::participant`]; here its acts are performed. All copies are on the first
//! shard, and volumes that stand on them too.
//!
//! Invariants:
//! 1. A copy has its device open and locked from `OpenCopy` to `CloseCopy`; a volume that stands on it borrows the device.
//!    So no write of the copy ever meets a file that was closed.
//! 2. Every write to the device goes through the participant, and every read of the volume past it.
//! 3. What a link brings is handed on in its order; what a link that broke had brought is handed on before it is said that
//!    it broke.

mod opening;
mod performing;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hdcs_core::base::buf::{Buf, BufMut, Pool};
use hdcs_core::base::cipher::LogKeys;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{DurableWay, Nanos, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::replication::Member;
use hdcs_core::replication::message::Message;
use hdcs_core::replication::participant::{Participant, Status, Taking, Times, end_group};
use hdcs_core::replication::record::{GroupRecord, Shape};
use hdcs_core::replication::takeover::Stop;
use hdcs_core::volume::Copies;
use hdcs_core::wire::replication::{About, LogName};
use hdcs_device::file::Device;
pub use opening::{CopyError, CopyOpened, CopySpec, open};
pub use performing::{
    close_copy, copy_opened, finished, forget_copy, is_of_links, link_finished, open_copy, run,
    take_leave,
};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::command::Answer;
use super::links::{Event as LinkEvent, Links, LinksConfig, Received};
use super::slots::Slots;
use crate::cluster::names::Named;
use crate::log_limit::LogLimit;

/// How often a member may say that it has no such log before that is worth a line.
const NO_LOGS_SILENT: u32 = 10;
/// For how long its word is taken that it has none: while its node lives it is asked, and says so again.
const NO_LOG_MAX: Nanos = Nanos::from_millis(3_000);
/// Between two such lines.
const FAULT_PERIOD: Duration = Duration::from_secs(10);
/// How long other nodes have to hear that this one stops.
const LEAVE_MAX: Nanos = Nanos::from_millis(500);
/// After its link was broken for a copy's sake, a member is met again.
const BREAK_PAUSE: Nanos = Nanos::from_millis(500);

/// What the control plane is told of a group.
#[derive(Clone, Debug)]
pub struct GroupEvent {
    /// The volume that stands on the log, or may.
    pub volume: Uuid,
    /// What.
    pub what: GroupChange,
}

/// See [`GroupEvent`].
#[derive(Clone, Debug)]
pub enum GroupChange {
    /// The store is to be asked for this record, in which these nodes are members that were none before, or the other way
    /// round.
    Ask(GroupRecord, Vec<Move>),
    /// The group is this node's: the volume may be opened.
    Began {
        /// Since this epoch.
        epoch: u64,
    },
    /// It is no more: the volume is to be closed.
    Fenced,
    /// A takeover did not come about.
    Stopped(Stop),
    /// A write to the copy's device failed.
    Failed(IoError),
}

/// What may be known of a copy.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Where it stands.
    pub status: Status,
    /// What its node waits for, if that takes the group.
    pub taking: Option<Taking>,
    /// Nodes that are reached and have said last that they have no copy of the log, or none that they can use.
    pub without: Vec<Member>,
    /// For how long nothing of its group has come from any node.
    pub silent: Nanos,
}

/// Why the group's record is to name other members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Who joins or leaves.
    pub member: Member,
    /// What happened.
    pub what: &'static str,
}

/// What a shard needs to have copies.
pub struct GroupsConfig {
    /// This node.
    pub me: Member,
    /// How long others are waited for.
    pub times: Times,
    /// What copies that are brought up get in a second beside what is written.
    pub resync_bytes_s: u64,
    /// What it speaks with others through.
    pub links: LinksConfig,
    /// Where other nodes connect, as the shard is to accept them.
    pub listener: OwnedFd,
    /// Who is told.
    pub events: mpsc::UnboundedSender<GroupEvent>,
}

/// A copy, and what is to be known of it outside of the machine.
struct Copy {
    volume: Uuid,
    log: LogName,
    participant: Participant,
    device: Arc<Device>,
    /// Reads of the volume that wait until what they read was repaired, and where they read.
    repairs: BTreeMap<Token, (u64, BufMut)>,
    /// The slot of the volume that stands on it.
    slot: Option<u32>,
    /// Whom it wanted to reach when it was looked at last.
    peers: Vec<Member>,
    /// When members are met again whose links were broken for its sake.
    again: BTreeMap<Member, Nanos>,
    /// How often a member has said that it has no such log.
    no_logs: u32,
    /// Who has said so last, and when: it is asked again soon.
    without: BTreeMap<Member, Nanos>,
    /// Who has said that it stops.
    leaving: BTreeSet<Member>,
    /// When something came last that is for this copy.
    heard_at: Nanos,
    faults: LogLimit,
    is_touched: bool,
}

impl Copy {
    /// Nodes that have said of late that they have no such log.
    fn without(&self, now: Nanos) -> impl Iterator<Item = Member> {
        let said = self.without.iter();
        said.filter(move |(_, at)| now.since(**at) < NO_LOG_MAX)
            .map(|(member, _)| *member)
    }
}

/// See the module.
pub struct Groups {
    me: Member,
    times: Times,
    resync_bytes_s: u64,
    copies: Slots<Copy>,
    by_volume: HashMap<Uuid, u32>,
    by_log: HashMap<LogName, u32>,
    openings: BTreeMap<u64, (CopySpec, Answer<()>)>,
    opened: u64,
    links: Links,
    /// Members that this node has a pair to.
    connected: BTreeSet<Member>,
    /// Whether others may be wanted than before.
    peers_differ: bool,
    listener: OwnedFd,
    /// Until when this node takes leave of others, once it stops.
    leaves_until: Option<Nanos>,
    /// When it is tried again to accept, after a failure.
    accept_at: Option<Nanos>,
    events: mpsc::UnboundedSender<GroupEvent>,
    touched: Vec<u32>,
}

impl std::fmt::Debug for GroupsConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupsConfig")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

impl Groups {
    /// None yet.
    pub fn new(config: GroupsConfig) -> Self {
        Self {
            me: config.me,
            times: config.times,
            resync_bytes_s: config.resync_bytes_s,
            copies: Slots::default(),
            by_volume: HashMap::new(),
            by_log: HashMap::new(),
            openings: BTreeMap::new(),
            opened: 0,
            links: Links::new(config.links),
            connected: BTreeSet::new(),
            peers_differ: false,
            listener: config.listener,
            leaves_until: None,
            accept_at: None,
            events: config.events,
            touched: Vec::new(),
        }
    }

    fn copy(&self, volume: Uuid) -> Option<&Copy> {
        self.copies.get(*self.by_volume.get(&volume)?)
    }

    /// The device of a volume's copy, which the volume is to stand on.
    pub fn device_of(&self, volume: Uuid) -> Option<Arc<Device>> {
        Some(Arc::clone(&self.copy(volume)?.device))
    }

    /// A volume stands on its copy. Returns the copy's slot.
    pub fn stands(&mut self, volume: Uuid, slot: u32) -> Option<u32> {
        let group = *self.by_volume.get(&volume)?;
        let copy = self.copies.get_mut(group)?;
        copy.slot = Some(slot);
        copy.participant.stand();
        self.touch(group);
        Some(group)
    }

    /// It does not any more.
    pub fn left(&mut self, group: u32) {
        if let Some(copy) = self.copies.get_mut(group) {
            copy.slot = None;
        }
    }

    /// What stands on the log is about to write this, in the clear.
    pub fn announce(&mut self, group: u32, token: Token, offset: u64, data: &[Buf]) {
        if let Some(copy) = self.copies.get_mut(group) {
            copy.participant.announce(token, offset, data);
        }
    }

    /// What stands on the log writes what it announced, perhaps encrypted.
    pub fn write(
        &mut self,
        now: Nanos,
        group: u32,
        token: Token,
        data: Vec<Buf>,
        way: Option<DurableWay>,
    ) {
        if let Some(copy) = self.copies.get_mut(group) {
            copy.participant.write(now, token, data, way);
        }
        self.touch(group);
    }

    /// What stands on the log has read this place, and it is not as it should be: read it again once a member was asked
    /// for it.
    pub fn repair(&mut self, now: Nanos, group: u32, token: Token, offset: u64, buf: BufMut) {
        if let Some(copy) = self.copies.get_mut(group) {
            let blocks = (buf.len() / BLOCK_BYTES) as u64;
            copy.repairs.insert(token, (offset, buf));
            copy.participant.repair(now, token, offset, blocks);
        }
        self.touch(group);
    }

    /// What may be known of a copy.
    pub fn look(&self, now: Nanos, volume: Uuid) -> Option<Seen> {
        let copy = self.copy(volume)?;
        let participant = &copy.participant;
        Some(Seen {
            status: participant.status(),
            taking: Taking::of(participant, now),
            without: copy.without(now).collect(),
            silent: now.since(copy.heard_at),
        })
    }

    /// The slot of the volume that stands on a copy, and whether as many nodes have one as should.
    fn copies_of(&self, group: u32) -> Option<(u32, Copies)> {
        let copy = self.copies.get(group)?;
        let config = &copy.participant.record()?.config;
        let copies = if config.is_short() {
            Copies::TooFew
        } else if config.members.count() < usize::from(config.replicas) {
            Copies::Short
        } else {
            Copies::All
        };
        Some((copy.slot?, copies))
    }

    /// The store has this record of the volume's group.
    pub fn see(&mut self, now: Nanos, volume: Uuid, record: &GroupRecord) {
        self.with(volume, |copy| copy.participant.see(now, record));
    }

    /// Have the volume's group become this. Returns whether this node serves it and may have it so.
    pub fn configure(&mut self, now: Nanos, volume: Uuid, shape: Shape) -> bool {
        let mut is_begun = false;
        self.with(volume, |copy| {
            is_begun = copy.participant.configure(now, shape);
        });
        is_begun
    }

    /// The volume's group was removed.
    pub fn end_group(&mut self, now: Nanos, volume: Uuid) {
        self.with(volume, |copy| end_group(&mut copy.participant, now));
    }

    /// It is not known how asking for a record ended, and the one that was seen last is still there.
    pub fn ask_again(&mut self, now: Nanos, volume: Uuid) {
        self.with(volume, |copy| copy.participant.ask_again(now));
    }

    fn with(&mut self, volume: Uuid, call: impl FnOnce(&mut Copy)) {
        if let Some(&group) = self.by_volume.get(&volume) {
            if let Some(copy) = self.copies.get_mut(group) {
                call(copy);
            }
            self.touch(group);
        }
    }

    /// A copy is open: it follows.
    fn add(&mut self, now: Nanos, spec: &CopySpec, opened: CopyOpened, pool: &Arc<Pool>) {
        let superblock = &opened.found.superblock;
        let log = LogName {
            volume: superblock.volume,
            number: superblock.log.get(),
        };
        let keys = opened.cipher;
        let keys = keys.map(|keys| -> Arc<dyn LogKeys> { Arc::new(keys) });
        let pool = Arc::clone(pool);
        let mut participant = Participant::new(self.me, now, opened.found, keys, pool, self.times);
        if opened.damaged_blocks > 0 {
            tracing::error!(
                volume = %spec.volume,
                "{} data blocks of its copy of the log are damaged: it is brought up anew by itself while another member \
                 serves, or gets them from others when it takes the group; look at the health of its device",
                opened.damaged_blocks
            );
            participant.doubt();
        }
        participant.set_resync_rate(self.resync_bytes_s);
        participant.poll(now);
        let group = self.copies.insert(Copy {
            volume: spec.volume,
            log,
            participant,
            device: opened.device,
            repairs: BTreeMap::new(),
            slot: None,
            peers: Vec::new(),
            again: BTreeMap::new(),
            no_logs: 0,
            without: BTreeMap::new(),
            leaving: BTreeSet::new(),
            heard_at: now,
            faults: LogLimit::new(FAULT_PERIOD),
            is_touched: false,
        });
        self.by_volume.insert(spec.volume, group);
        self.by_log.insert(log, group);
        self.touch(group);
    }

    /// When something is to be done, if nothing else happens.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let copies = self.copies.iter();
        let copies = copies.flat_map(|(_, copy)| {
            let again = copy.again.values().copied();
            copy.participant.next_wakeup().into_iter().chain(again)
        });
        let others = [
            self.links.next_deadline(),
            self.accept_at,
            self.leaves_until,
        ];
        copies.chain(others.into_iter().flatten()).min()
    }

    /// Let those go on whose time has come.
    fn poll(&mut self, now: Nanos) {
        for group in 0..self.copies.end() {
            let Some(copy) = self.copies.get_mut(group) else {
                continue;
            };
            let is_late = copy.participant.next_wakeup().is_some_and(|at| at <= now);
            if is_late {
                copy.participant.poll(now);
            }
            if is_late || copy.again.values().any(|at| *at <= now) {
                self.touch(group);
            }
        }
    }

    fn touch(&mut self, group: u32) {
        if let Some(copy) = self.copies.get_mut(group)
            && !std::mem::replace(&mut copy.is_touched, true)
        {
            self.touched.push(group);
        }
    }

    fn each(&mut self, mut call: impl FnMut(&mut Copy)) {
        for group in 0..self.copies.end() {
            if let Some(copy) = self.copies.get_mut(group) {
                call(copy);
            }
            self.touch(group);
        }
    }

    fn tell(&self, volume: Uuid, what: GroupChange) {
        // Who listened may have ended before the shard.
        let _ = self.events.send(GroupEvent { volume, what });
    }

    /// Take what links have brought.
    fn take_link_events(&mut self, now: Nanos) {
        while let Some(event) = self.links.next_event() {
            match event {
                LinkEvent::Connected(member) => {
                    self.connected.insert(member);
                    self.peers_differ = true;
                    self.each(|copy| {
                        copy.leaving.remove(&member);
                    });
                }
                LinkEvent::Left(member) => {
                    self.each(|copy| {
                        copy.leaving.insert(member);
                        copy.participant.left(now, member);
                    });
                }
                LinkEvent::Disconnected(member) => {
                    self.connected.remove(&member);
                    self.each(|copy| copy.participant.disconnected(now, member));
                }
                LinkEvent::PeerConnected(_) => {}
                LinkEvent::PeerDisconnected(leader) => {
                    self.each(|copy| copy.participant.leader_gone(now, leader));
                }
                LinkEvent::Room(_) => self.each(|_| {}),
                LinkEvent::NoLog { from, about } => {
                    if let Some(&group) = self.by_log.get(&about.log)
                        && let Some(copy) = self.copies.get_mut(group)
                    {
                        copy.without.insert(from, now);
                        copy.participant.no_log(now, from);
                        copy.no_logs += 1;
                        // A new one is made within a moment.
                        if copy.no_logs > NO_LOGS_SILENT
                            && let Some(left_out) = copy.faults.pass()
                        {
                            tracing::warn!(
                                volume = %copy.volume, member = %Named(from), left_out,
                                "the node has no copy of the volume's log, or one of another log: its own log says why"
                            );
                        }
                        self.touch(group);
                    }
                }
                LinkEvent::Received(received) => self.received(now, received),
            }
        }
    }

    fn received(&mut self, now: Nanos, received: Received) {
        let Received {
            from,
            about,
            message,
            data,
            ..
        } = received;
        let group = self.by_log.get(&about.log).copied();
        let Some((group, copy)) =
            group.and_then(|group| Some((group, self.copies.get_mut(group)?)))
        else {
            return self.links.no_log(from, about.log);
        };
        copy.without.remove(&from);
        copy.heard_at = now;
        copy.participant
            .receive(now, from, about.epoch, &message, data);
        self.touch(group);
    }

    /// Who becomes a member of a copy's group by this record, or leaves it, and why.
    fn moves(&self, copy: &Copy, next: &GroupRecord) -> Vec<Move> {
        let Some(last) = copy.participant.record() else {
            return Vec::new();
        };
        let (before, after) = (&last.config.members, &next.config.members);
        let joins = after.iter().filter(|member| !before.contains(*member));
        let joins = joins.map(|member| Move {
            member,
            what: "joins: its copy was brought up",
        });
        let leaves = before.iter().filter(|member| !after.contains(*member));
        let leaves = leaves.map(|member| Move {
            member,
            what: if !next.joiners.contains(&member) {
                "leaves: it is to have no copy any more"
            } else if copy.leaving.contains(&member) {
                "leaves: it stops"
            } else if copy.without.contains_key(&member) {
                "leaves: it has no copy of the log that it can use"
            } else if !self.connected.contains(&member) {
                "leaves: it is not reached"
            } else {
                "leaves: it has not confirmed in time, or its copy is not what it had said"
            },
        });
        joins.chain(leaves).collect()
    }

    /// The nodes that this one has a pair to, or that have one to this one.
    pub fn peers(&self) -> Vec<Member> {
        self.links.paired().collect()
    }

    /// Reach those that a copy wants to reach, and send what is ready to whoever has room for it. Returns whether there was
    /// something.
    fn send(&mut self, now: Nanos, group: u32) -> bool {
        let Some(copy) = self.copies.get_mut(group) else {
            return false;
        };
        copy.again.retain(|_, at| *at > now);
        let peers = copy.participant.peers();
        let mut has_sent = false;
        for &member in &peers {
            self.links.want(member);
            let is_there = self.connected.contains(&member) && !copy.again.contains_key(&member);
            if is_there && !copy.participant.reaches(member) {
                copy.participant.connected(now, member);
            }
            let committed = copy.participant.committed();
            while let Some((epoch, message, data)) = copy.participant.next_send(member) {
                let about = About {
                    log: copy.log,
                    epoch,
                };
                let sent = match message {
                    Message::Append(span) => {
                        self.links.append(member, about, span, committed, data)
                    }
                    _ => self.links.ask(member, about, message),
                };
                if sent.is_err() {
                    // It is said when there is room, or that the link broke.
                    break;
                }
                has_sent = true;
                copy.participant.sent(now, member);
            }
        }
        if copy.peers != peers {
            copy.peers = peers;
            self.peers_differ = true;
        }
        has_sent
    }

    /// Let go of pairs that no copy wants.
    fn unwant_unneeded(&mut self) {
        if !std::mem::take(&mut self.peers_differ) {
            return;
        }
        let copies = self.copies.iter();
        let wanted: BTreeSet<Member> = copies.flat_map(|(_, copy)| copy.peers.clone()).collect();
        let unneeded = self.connected.iter().copied();
        let unneeded: Vec<Member> = unneeded.filter(|one| !wanted.contains(one)).collect();
        for member in unneeded {
            self.links.unwant(member);
        }
    }
}
