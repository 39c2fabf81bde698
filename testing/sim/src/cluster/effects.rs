//! What volumes and parts ask of devices, and how that ends.

use hdcs_core::base::buf::{Buf, BufMut, Pool};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Action, Completion, Done, Nanos, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_HEADER_BLOCKS, LOG_UNFLUSHED, LogSuperblock, SpanHeader};
use hdcs_core::replication::participant::Role;
use hdcs_core::volume::Event;
use zerocopy::IntoBytes;

use super::Plant;
use super::check_logs;
use super::client::Peer;
use super::faults::stop_beside;
use super::media;
use super::node::{LogWrite, Op};
use super::reader::{self, Reader};
use super::scenario::RING_BLOCKS;
use super::shared::{User, Wanted};
use super::world::{ClusterWorld, Happening};
use crate::violation::Violation;

/// How many times longer a write takes that a planted bug has ended before.
const ORPHAN_FACTOR: u64 = 40;

fn is_in_ring(offset: u64) -> bool {
    offset >= LOG_HEADER_BLOCKS * BLOCK_BYTES as u64
}

impl ClusterWorld {
    /// Do what a volume asks for.
    pub(super) fn perform(
        &mut self,
        node: usize,
        user: User,
        action: Action,
    ) -> Result<(), Violation> {
        match action {
            Action::LogRead {
                token,
                offset,
                buf,
                is_bad: true,
            } => {
                let now = self.nodes[node].now(self.engine.now());
                let blocks = (buf.len() / BLOCK_BYTES) as u64;
                if let Some(up) = self.nodes[node].up.as_mut() {
                    up.repairs.insert(token, (user, offset, buf));
                    up.participant.repair(now, token, offset, blocks);
                }
                Ok(())
            }
            Action::LogRead {
                token,
                offset,
                buf,
                is_bad: false,
            } => {
                volume_read(self, node, user, token, (offset, buf));
                Ok(())
            }
            Action::LogWrite {
                token,
                offset,
                data,
                way,
            } => {
                let now = self.nodes[node].now(self.engine.now());
                self.note_log_write(node, token, offset, &data)?;
                let stored = encrypted(self, node, offset, &data);
                if let Some(up) = self.nodes[node].up.as_mut() {
                    up.participant.announce(token, offset, &data);
                    up.participant.write(now, token, stored, way);
                }
                self.end_hastily(node, token, is_in_ring(offset))
            }
            Action::BackendRead { token, offset, buf } => {
                self.begin_on_backend(node, user, token, Wanted::Read(offset, buf))
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                check_mark(self, user)?;
                stop_beside(self, node);
                self.begin_on_backend(node, user, token, Wanted::Write(offset, data))
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
                unmap,
            } => {
                let sector = hdcs_core::base::limits::SECTOR_BYTES as u64;
                let range = hdcs_core::base::io::SectorRange::new(offset / sector, bytes / sector);
                self.begin_on_backend(node, user, token, Wanted::Zero(range, unmap))
            }
            Action::BackendFlush { token } => {
                self.begin_on_backend(node, user, token, Wanted::Flush)
            }
            // It is for local stores.
            Action::BackendUnsettled { .. } => Ok(()),
            Action::Reply { request, result } if media::is_scrub(request) => {
                media::scrubbed(self, node, result);
                Ok(())
            }
            Action::Reply { request, result } if Reader::is_its(request) => {
                reader::old_answered(self, request, result)
            }
            Action::Reply { request, result } => {
                if self.client.peer
                    != Some(Peer {
                        node,
                        epoch: user.epoch,
                    })
                {
                    return Ok(());
                }
                let may_fail = (self.standing(node)).is_some_and(|standing| standing.may_fail());
                let may_fail = may_fail || media::may_be_corrupt(self, node, &result);
                let now = self.engine.now();
                self.engine
                    .note("reply", [request.0, u64::from(result.is_ok()), 0, 0]);
                let coverage = &mut self.coverage;
                let (client, shared) = (&mut self.client, &self.shared);
                if client.answered(now, request, result, may_fail, shared, coverage)? {
                    self.leave_client(user);
                }
                Ok(())
            }
            other => Err(Violation::new(
                "unexpected",
                format!("a volume asks for {other:?}"),
            )),
        }
    }

    fn note_log_write(
        &mut self,
        node: usize,
        token: Token,
        offset: u64,
        data: &[Buf],
    ) -> Result<(), Violation> {
        let write = if is_in_ring(offset) {
            let end = data
                .first()
                .and_then(|first| check_logs::end_of(first, data));
            Some(end.map_or(LogWrite::Again, LogWrite::Span))
        } else {
            let superblock = data
                .first()
                .and_then(|block| LogSuperblock::parse(block).ok());
            superblock.map(|superblock| LogWrite::Superblock {
                tail: superblock.tail.get(),
            })
        };
        let write = write.ok_or_else(|| {
            Violation::new("unexpected", "a volume writes no span and no superblock")
        })?;
        if let Some(standing) = self.standing(node) {
            standing.log_writes.insert(token, write);
        }
        Ok(())
    }

    /// A planted bug has a write of the volume end before it should.
    fn end_hastily(&mut self, node: usize, token: Token, is_span: bool) -> Result<(), Violation> {
        let plant = if is_span {
            Plant::HastyEnd
        } else {
            Plant::TailOfOne
        };
        if self.plant != Some(plant) {
            return Ok(());
        }
        let result = Ok(Done::Written);
        self.log_ended(node, Completion { token, result })
    }

    fn begin_on_backend(
        &mut self,
        node: usize,
        user: User,
        token: Token,
        wanted: Wanted,
    ) -> Result<(), Violation> {
        let begun = self.shared.begin(user, wanted, &mut self.client.history)?;
        let pause = self.scenario.backend.draw(&mut self.random);
        self.begin(node, pause, Op::Backend { user, token, begun });
        Ok(())
    }

    fn begin_on_disk(&mut self, node: usize, op: Op) {
        let pause = self.scenario.disk.draw(&mut self.random).0 * self.slow[node];
        self.begin(node, Nanos(pause), op);
    }

    fn begin(&mut self, node: usize, pause: Nanos, op: Op) {
        let life = self.nodes[node].life;
        if let Some(up) = self.nodes[node].up.as_mut() {
            let id = up.begin(op);
            self.engine
                .after(pause, Happening::Device { node, life, id });
        }
    }

    /// A part writes to its medium.
    pub(super) fn disk_write(
        &mut self,
        node: usize,
        token: Token,
        offset: u64,
        data: Vec<Buf>,
    ) -> Result<(), Violation> {
        let data = encrypted_again(self, node, offset, data);
        let head = self.nodes[node].cipher.head(offset, &data);
        let end = is_in_ring(offset)
            .then(|| check_logs::end_of(&head, &data))
            .flatten();
        let data = match end {
            // Blocks of a span, which were not as they should be.
            None if is_in_ring(offset) => {
                check_logs::check_again(&self.nodes[node].disk, offset, &data)?;
                data
            }
            Some(end) => {
                self.logs.written(&head, &data)?;
                let gone = end.position - self.scenario.first_tail;
                self.coverage.laps = self.coverage.laps.max(gone * 1000 / RING_BLOCKS);
                data
            }
            None => self.spoil_superblock(node, data)?,
        };
        let position = end.map_or(0, |end| end.position);
        self.engine
            .note("write", [node as u64, offset, position, 0]);
        let op = self.nodes[node].disk.submit_write(offset, &data, true);
        let plant = if end.is_some() {
            Plant::EarlySpan
        } else {
            Plant::EarlySuperblock
        };
        if self.plant != Some(plant) {
            self.begin_on_disk(node, Op::Write { op, token, end });
            return Ok(());
        }
        let pause = self.scenario.disk.draw(&mut self.random).0 * ORPHAN_FACTOR;
        self.begin(node, Nanos(pause), Op::Orphan { op, end });
        let now = self.nodes[node].now(self.engine.now());
        if let Some(up) = self.nodes[node].up.as_mut() {
            up.participant.finished(now, token, Ok(Done::Written));
        }
        Ok(())
    }

    /// What planted bugs make of a superblock.
    fn spoil_superblock(&self, node: usize, data: Vec<Buf>) -> Result<Vec<Buf>, Violation> {
        let foreign = || {
            Violation::new(
                "superblock-foreign",
                "what is written there is no superblock",
            )
        };
        let first = data.first().ok_or_else(foreign)?;
        let mut superblock = LogSuperblock::parse(first).map_err(|_| foreign())?;
        let mut says = superblock.membership().ok_or_else(foreign)?;
        if self.plant != Some(Plant::ForgottenCut) {
            return Ok(data);
        }
        (says.cut_position, says.void_before) = (0, 0);
        superblock.set_membership(says);
        self.nodes[node].cipher.seal(&mut superblock);
        let mut block = Pool::new(BLOCK_BYTES)
            .alloc(BLOCK_BYTES)
            .expect("it is all free");
        block.copy_from_slice(superblock.as_bytes());
        Ok(Vec::from([block.freeze()]))
    }

    /// A part reads from its medium.
    pub(super) fn disk_read(&mut self, node: usize, token: Token, offset: u64, buf: BufMut) {
        let op = self.nodes[node].disk.submit_read(offset, buf.len());
        self.begin_on_disk(node, Op::Read { op, token, buf });
    }

    /// Something on a node's devices has ended.
    pub(super) fn device_done(&mut self, index: usize, id: u64) {
        let now = self.nodes[index].now(self.engine.now());
        let node = &mut self.nodes[index];
        let Some(up) = node.up.as_mut() else {
            return;
        };
        self.touched.insert(index);
        match up.ops.remove(&id).expect("it was under way") {
            Op::Write { op, token, end } => {
                let position = end.map_or(0, |end| end.position);
                if let Some(error) = node.writes_fail {
                    self.engine
                        .note("not written", [index as u64, position, 0, 0]);
                    node.disk.fail_write(op);
                    let is_hidden = self.plant == Some(Plant::HiddenFailure);
                    let result = if is_hidden {
                        Ok(Done::Written)
                    } else {
                        Err(error)
                    };
                    return up.participant.finished(now, token, result);
                }
                self.engine.note("written", [index as u64, position, 0, 0]);
                node.disk.complete_write(op);
                node.media.extend(end.map(|end| (end.position, end.chain)));
                up.participant.finished(now, token, Ok(Done::Written));
            }
            Op::Orphan { op, end } => {
                node.disk.complete_write(op);
                node.media.extend(end.map(|end| (end.position, end.chain)));
            }
            Op::Read { op, token, .. } if node.reads_fail => {
                self.coverage.failed_reads += 1;
                node.disk.cancel_read(op);
                up.participant.finished(now, token, Err(IoError::Failed));
            }
            Op::Read { op, token, mut buf } => {
                node.disk.complete_read(op, &mut buf);
                up.participant.finished(now, token, Ok(Done::Read(buf)));
            }
            Op::VolumeRead {
                user,
                op,
                token,
                offset,
                mut buf,
            } => {
                node.disk.complete_read(op, &mut buf);
                node.cipher.decrypt(offset, &mut buf);
                if let Some(standing) = up.standing_of(user) {
                    let result = Ok(Done::Read(buf));
                    standing
                        .events
                        .push_back(Event::Completed(Completion { token, result }));
                }
            }
            Op::Backend { user, token, begun } => {
                let result = self.shared.end(begun);
                if let Some(standing) = up.standing_of(user) {
                    standing.was_refused |= result.is_err();
                    standing
                        .events
                        .push_back(Event::Completed(Completion { token, result }));
                }
            }
        }
    }
}

/// A volume whose writes go past the log writes to the backend: as many members as a commit needs know that it may hold what
/// it has not flushed.
fn check_mark(world: &ClusterWorld, user: User) -> Result<(), Violation> {
    let record = world.store.record();
    if !world.scenario.config.policy.is_direct() || record.epoch != user.epoch {
        return Ok(());
    }
    let members = record.config.members.iter();
    let says = |node: &usize| {
        let superblock = world.nodes[*node].superblock();
        // One that was hurt may have said so before.
        world.media.is_hurt(*node)
            || superblock.is_some_and(|superblock| superblock.flags.get() & LOG_UNFLUSHED != 0)
    };
    let says = members.map(|member| usize::from(member.0)).filter(says);
    let (says, needs) = (says.count(), record.config.copies_to_commit());
    if says >= needs {
        return Ok(());
    }
    let message = format!("a volume writes past the log, and {says} members know it of {needs}");
    Err(Violation::new("mark-too-few", message))
}

fn volume_read(
    world: &mut ClusterWorld,
    node: usize,
    user: User,
    token: Token,
    (offset, buf): (u64, BufMut),
) {
    let op = world.nodes[node].disk.submit_read(offset, buf.len());
    world.begin_on_disk(
        node,
        Op::VolumeRead {
            user,
            op,
            token,
            offset,
            buf,
        },
    );
}

/// A member was asked for what a volume has read, or could not be: it is read again.
pub(super) fn repaired(world: &mut ClusterWorld, node: usize, token: Token) {
    let up = world.nodes[node].up.as_mut();
    if let Some((user, offset, buf)) = up.and_then(|up| up.repairs.remove(&token)) {
        media::repaired(world, node, (offset, buf.len() as u64));
        volume_read(world, node, user, token, (offset, buf));
    }
}

/// What the driver of a volume makes of what goes to its log.
fn encrypted(world: &ClusterWorld, node: usize, offset: u64, data: &[Buf]) -> Vec<Buf> {
    let planted = (world.plant == Some(Plant::TweakOfPosition) && is_in_ring(offset))
        .then(|| SpanHeader::peek(data.first()?).ok())
        .flatten();
    let place = planted.map_or(offset, |header| {
        (LOG_HEADER_BLOCKS + header.position.get()) * BLOCK_BYTES as u64
    });
    world.nodes[node].cipher.encrypted(place, data)
}

/// What a planted bug has a member's driver make of what goes to its copy.
fn encrypted_again(world: &ClusterWorld, node: usize, offset: u64, data: Vec<Buf>) -> Vec<Buf> {
    let is_planted = world.plant == Some(Plant::EncryptedTwice) && is_in_ring(offset);
    let up = world.nodes[node].up.as_ref();
    if is_planted && up.is_some_and(|up| up.participant.status().role == Role::Follows) {
        return world.nodes[node].cipher.encrypted(offset, &data);
    }
    data
}
