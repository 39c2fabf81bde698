//! What copies ask for, performed on the shard's thread.

use std::any::Any;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use hdcs_core::base::buf::BufMut;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Nanos, Token};
use hdcs_core::replication::message::Message;
use hdcs_core::replication::participant::Act;
use hdcs_core::volume::Event;
use hdcs_core::wire::replication::About;
use hdcs_device::ring::{Finished, Outcome, Owner, Ring};
use hdcs_device::worker::JobOutput;
use uuid::Uuid;

use super::{BREAK_PAUSE, CopyError, CopyOpened, CopySpec, GroupChange, Groups, LEAVE_MAX, open};
use crate::shard::ACCEPT_PAUSE;
use crate::shard::command::Answer;
use crate::shard::control::tell;
use crate::shard::state::ShardState;
use crate::shard::turn::Shard;

/// How often links are looked at in one go while they bring something.
const ROUNDS_MAX: usize = 4;
const NO_CLUSTER: &str = "this node is alone: there is no [cluster] in its configuration";

/// What the volume that stands on a copy is told.
enum Told {
    /// An operation on its log has ended.
    Ended(Completion),
    /// This read of its log may go on.
    Repaired {
        token: Token,
        offset: u64,
        buf: BufMut,
    },
    /// Until when it may answer reads.
    Lease(Nanos),
    /// The group is another node's.
    Fenced,
    /// Whether writes are to fail for want of members.
    Short(bool),
}

impl Groups {
    /// Perform one act of a copy. Returns what the volume in this slot is told.
    fn perform(
        &mut self,
        now: Nanos,
        ring: &mut Ring,
        group: u32,
        act: Act,
    ) -> Option<(u32, Told)> {
        let copy = self.copies.get_mut(group)?;
        let volume = copy.volume;
        match act {
            Act::Write {
                token,
                offset,
                data,
                way,
            } => (copy.device).write_urgently(ring, Owner::Copy(group), token, offset, data, way),
            Act::Read { token, offset, buf } => {
                (copy.device).read(ring, Owner::Copy(group), token, offset, buf);
            }
            Act::Ended(completion) => return Some((copy.slot?, Told::Ended(completion))),
            Act::Repaired(token) => {
                let (offset, buf) = copy.repairs.remove(&token)?;
                return Some((copy.slot?, Told::Repaired { token, offset, buf }));
            }
            Act::Answer {
                to,
                epoch,
                message,
                data,
            } => {
                let about = About {
                    log: copy.log,
                    epoch,
                };
                if let Message::Ack { durable } = message {
                    let tail = copy.participant.status().tail;
                    self.links.ack(to, about, durable, tail);
                } else {
                    self.links.answer(to, about, &message, &data);
                }
            }
            Act::Break(member) => {
                // Not at once: it may come to the same again.
                copy.again.insert(member, now.plus(BREAK_PAUSE));
                self.links.unwant(member);
                self.links.want(member);
            }
            Act::Blocked { member, span } => {
                let (from, to) = (
                    span.end.position - u64::from(span.blocks),
                    span.end.position,
                );
                tracing::error!(
                    %volume, %member,
                    "the node cannot be brought up: blocks {from} to {to} of the log are damaged on this node, and no other \
                     member has them whole. It is tried again every 10 s: start a member that has them, or write over what is \
                     damaged and flush the volume, so that the log lets go of them"
                );
            }
            Act::Drop(leader) => self.links.drop_leader(leader),
            Act::Ask(record) => {
                let copy = self.copies.get(group)?;
                let moves = self.moves(copy, &record);
                self.tell(volume, GroupChange::Ask(record, moves));
            }
            Act::Began => {
                let epoch = copy.participant.record().map_or(0, |record| record.epoch);
                self.tell(volume, GroupChange::Began { epoch });
            }
            Act::Lease { until } => return Some((copy.slot?, Told::Lease(until))),
            Act::Fenced => {
                let slot = copy.slot;
                self.tell(volume, GroupChange::Fenced);
                return Some((slot?, Told::Fenced));
            }
            Act::Short(refuses) => return Some((copy.slot?, Told::Short(refuses))),
            Act::Stopped(why) => self.tell(volume, GroupChange::Stopped(why)),
            Act::Failed(error) => self.tell(volume, GroupChange::Failed(error)),
        }
        None
    }

    /// Somebody has connected.
    fn accepted(&mut self, socket: OwnedFd) {
        let socket = TcpStream::from(socket);
        // One that has gone already has no address.
        if let Ok(from) = socket.peer_addr() {
            self.links.accepted(socket.into(), from);
        }
    }

    /// Begin to accept other nodes.
    pub fn accept(&self, ring: &mut Ring) {
        ring.accept(Owner::LinkListener, self.listener.as_raw_fd());
    }
}

/// Let copies go on with what has happened.
pub fn run(state: &mut ShardState) {
    let now = state.now;
    let Some(groups) = &mut state.groups else {
        return;
    };
    groups.links.tick(now);
    if groups.leaves_until.is_some() {
        while groups.links.next_event().is_some() {}
        return groups.links.start_io(&mut state.ring);
    }
    // What has come is heard before anybody is found late.
    groups.take_link_events(now);
    groups.poll(now);
    if groups.accept_at.take_if(|at| *at <= now).is_some() {
        groups.accept(&mut state.ring);
    }
    for _ in 0..ROUNDS_MAX {
        let Some(groups) = &mut state.groups else {
            return;
        };
        groups.take_link_events(now);
        run_touched(state);
        let Some(groups) = &mut state.groups else {
            return;
        };
        groups.unwant_unneeded();
        groups.links.start_io(&mut state.ring);
        if !groups.links.has_events() {
            return;
        }
    }
}

/// Tell other nodes that this one stops. Whether they all know, or are not waited for any longer.
pub fn take_leave(state: &mut ShardState) -> bool {
    let now = state.now;
    let Some(groups) = &mut state.groups else {
        return true;
    };
    if groups.leaves_until.is_none() {
        groups.leaves_until = Some(now.plus(LEAVE_MAX));
        groups.links.shut_down();
        groups.links.start_io(&mut state.ring);
    }
    groups.links.is_idle() || groups.leaves_until.is_some_and(|until| until <= now)
}

/// Perform what copies that were touched ask for.
fn run_touched(state: &mut ShardState) {
    let now = state.now;
    while let Some(groups) = &mut state.groups
        && !groups.touched.is_empty()
    {
        let touched = std::mem::take(&mut groups.touched);
        let mut has_sent = false;
        for &group in &touched {
            if let Some(copy) = groups.copies.get_mut(group) {
                copy.is_touched = false;
            }
            has_sent |= groups.send(now, group);
        }
        // What others do with a span takes longer than to write it here: they begin first.
        if has_sent {
            groups.links.start_io(&mut state.ring);
        }
        for group in touched {
            perform_acts(state, group);
        }
    }
}

/// Perform what a copy asks for.
fn perform_acts(state: &mut ShardState, group: u32) {
    let now = state.now;
    let Some(groups) = &mut state.groups else {
        return;
    };
    if let Some((slot, copies)) = groups.copies_of(group)
        && let Some(served) = state.volumes.get_mut(slot)
    {
        served.volume.set_copies(copies, now);
    }
    let acts = groups.copies.get_mut(group);
    let acts = acts.map_or_else(Vec::new, |copy| copy.participant.take_acts());
    if acts.is_empty() {
        return;
    }
    groups.touch(group);
    for act in acts {
        let Some(groups) = &mut state.groups else {
            return;
        };
        match groups.perform(now, &mut state.ring, group, act) {
            None => {}
            Some((slot, Told::Ended(completion))) => {
                state.log_finished(slot, completion.token, completion.result);
            }
            Some((slot, Told::Repaired { token, offset, buf })) => {
                if let Some(served) = state.volumes.get_mut(slot) {
                    let owner = Owner::Volume(slot);
                    served.log.read(&mut state.ring, owner, token, offset, buf);
                }
            }
            Some((slot, Told::Lease(until))) => state.step(slot, Event::Lease { until }),
            // Its clients get no answer from here any more, whatever the control plane is busy with.
            Some((slot, Told::Fenced)) => state.step(slot, Event::Fenced),
            Some((slot, Told::Short(refuses))) => {
                state.step(slot, Event::RefuseForCopies(refuses));
            }
        }
    }
}

/// An operation of a copy on its device has ended.
pub fn finished(state: &mut ShardState, group: u32, token: Token, result: Result<Done, IoError>) {
    let now = state.now;
    let Some(groups) = &mut state.groups else {
        return;
    };
    if let Some(copy) = groups.copies.get_mut(group) {
        copy.participant.finished(now, token, result);
    }
    groups.touch(group);
}

/// Whether an operation is one of links, or accepts those of others.
pub fn is_of_links(owner: Owner) -> bool {
    matches!(
        owner,
        Owner::LinkListener | Owner::LinkConnect(_) | Owner::LinkReceive(_) | Owner::LinkSend(_)
    )
}

/// Something has happened on a link, or somebody has connected.
pub fn link_finished(state: &mut ShardState, finished: Finished) {
    let Some(groups) = &mut state.groups else {
        return;
    };
    match finished.outcome {
        // Whoever comes now finds this node gone.
        Outcome::Accepted(_) if groups.leaves_until.is_some() => {}
        Outcome::Accepted(accepted) => match accepted {
            Ok(socket) => {
                groups.accepted(socket);
                groups.accept(&mut state.ring);
            }
            Err(error) => {
                tracing::warn!("a connection of a node was not accepted: {error}");
                let pause = Nanos(ACCEPT_PAUSE.as_nanos() as u64);
                groups.accept_at = Some(state.now.plus(pause));
            }
        },
        _ => groups.links.finished(finished),
    }
}

/// Open a copy, on a thread of its own.
pub fn open_copy(shard: &mut Shard, spec: Box<CopySpec>, answer: Answer<()>) {
    let Some(groups) = &mut shard.state.groups else {
        return tell(answer, Err(NO_CLUSTER.to_owned()));
    };
    if groups.by_volume.contains_key(&spec.volume) {
        return tell(answer, Ok(()));
    }
    let mut openings = groups.openings.values();
    if openings.any(|(other, _)| other.volume == spec.volume) {
        return tell(answer, Err("it is being opened".to_owned()));
    }
    groups.opened += 1;
    let token = Token(groups.opened);
    groups.openings.insert(token.0, ((*spec).clone(), answer));
    let remote = shard.state.ring.remote(Owner::Copies);
    let (durability, known) = (
        shard.config.durability,
        Arc::clone(&shard.config.measurements),
    );
    let thread = std::thread::Builder::new().name("hdcs-copy".into());
    let spawned = thread.spawn(move || {
        let opened = open(&spec, durability, &known);
        remote.end(token, JobOutput::Any(Box::new(opened)));
    });
    match spawned {
        Ok(_) => shard.state.ring.begin_remote(),
        Err(error) => {
            if let Some(groups) = &mut shard.state.groups
                && let Some((_, answer)) = groups.openings.remove(&token.0)
            {
                tell(
                    answer,
                    Err(format!("cannot start a thread for it: {error}")),
                );
            }
        }
    }
}

/// A copy is open, or not.
pub fn copy_opened(shard: &mut Shard, token: Token, opened: Box<dyn Any + Send>) {
    let opened = opened
        .downcast::<Result<CopyOpened, CopyError>>()
        .expect("opening a copy says how it ended");
    let (now, pool) = (shard.state.now, Arc::clone(&shard.state.pool));
    let Some(groups) = &mut shard.state.groups else {
        return;
    };
    let Some((spec, answer)) = groups.openings.remove(&token.0) else {
        return;
    };
    match *opened {
        Ok(opened) => {
            groups.add(now, &spec, opened, &pool);
            tell(answer, Ok(()));
        }
        Err(error) => tell(answer, Err(error.to_string())),
    }
}

/// Let go of a copy on which no volume stands, unless it was brought up under a newer record than this. From then on it
/// answers nobody, so that it is not counted again.
pub fn forget_copy(shard: &mut Shard, volume: Uuid, revision: u64) -> Result<(), String> {
    let groups = shard.state.groups.as_ref().ok_or(NO_CLUSTER)?;
    let copy = groups.copy(volume);
    let joined = copy.map_or(0, |copy| copy.participant.status().joined);
    if joined >= revision {
        return Err("it was brought up again meanwhile".to_owned());
    }
    close_copy(shard, volume)
}

/// Let go of a copy on which no volume stands.
pub fn close_copy(shard: &mut Shard, volume: Uuid) -> Result<(), String> {
    let groups = shard.state.groups.as_mut().ok_or(NO_CLUSTER)?;
    if (groups.openings.values()).any(|(opens, _)| opens.volume == volume) {
        return Err("it is being opened: try again".to_owned());
    }
    let Some(&group) = groups.by_volume.get(&volume) else {
        return Ok(());
    };
    let copy = groups.copies.get(group).ok_or(NO_CLUSTER)?;
    if copy.slot.is_some() {
        return Err("its volume is open".to_owned());
    }
    if !copy.participant.is_idle() {
        return Err("its device has not ended everything: try again".to_owned());
    }
    let log = copy.log;
    for peer in groups.links.members() {
        groups.links.no_log(peer, log);
    }
    groups.copies.remove(group);
    groups.peers_differ = true;
    groups.by_volume.remove(&volume);
    groups.by_log.remove(&log);
    Ok(())
}
