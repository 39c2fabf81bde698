//! What happens to the media of copies: they are lost, rot at rest or in use, take no writes any more, or do not read.
//!
//! A node does what the production node does. Who comes back without a medium makes a new copy, which joins anew. A copy with
//! damaged data is opened and doubted: it is no source before it was brought up anew. One whose spans cannot be followed is
//! left as it is, until somebody removes it; then a new one is made. After a write that failed a copy is of no use until
//! its node is started again. A primary whose log rots under its volume fetches what reads badly from a member, and readers
//! get what was written; if no member can be asked they are told that it is damaged.
//!
//! What was acknowledged stays while fewer copies are hurt than a commit needs: media are hurt within that alone
//! ([`Media::may_hurt`]). A medium counts as hurt until its copy was brought up anew.
//!
//! What rots is what a log can tell from the torn end of a log: spans below a point that the log says was durable, and the
//! older superblock. The newest superblock and the last spans are left alone: without them a copy is a sound older one.
//!
//! Checked here: a replay never takes a rotten copy for a shorter one.

use std::collections::{BTreeMap, BTreeSet};

use hdcs_core::base::error::{IoError, RequestError};
use hdcs_core::base::io::{Nanos, Reply, Request, RequestId};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_HEADER_BLOCKS, LogSuperblock};
use hdcs_core::node::scrub::{ScrubAt, Scrubbed};
use hdcs_core::replication::participant::Found;
use hdcs_core::replication::record::GroupRecord;
use hdcs_core::replication::{Member, SpanId};
use hdcs_core::volume::Event;
use zerocopy::IntoBytes;

use super::Plant;
use super::node::CopyError;
use super::world::{ClusterWorld, Happening};
use crate::disk::Disk;
use crate::violation::Violation;

/// Requests of scrubs have numbers from here on.
const FIRST_SCRUB: u64 = 1 << 63;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Media {
    /// Nodes whose copies are not what they were, and at which revision of the record that happened.
    hurt: BTreeMap<usize, u64>,
    /// Those of them whose copies are rotten.
    rotten: BTreeSet<usize>,
    /// Those of them that have rotted under a volume.
    in_use: BTreeSet<usize>,
    /// Nodes whose copies take no more writes.
    failed: BTreeSet<usize>,
    /// Records that the store was asked for and may still take.
    asked: Vec<GroupRecord>,
}

impl Media {
    /// Whether a copy is not what it was, and was not brought up anew since.
    pub(super) fn is_hurt(&self, node: usize) -> bool {
        self.hurt.contains_key(&node)
    }

    /// Whether any copy is not what it was.
    pub(super) fn has_hurt(&self) -> bool {
        !self.hurt.is_empty()
    }

    /// Whether a copy is rotten.
    pub(super) fn is_rotten(&self, node: usize) -> bool {
        self.rotten.contains(&node)
    }

    /// Whether no copy waits for somebody who puts it right.
    pub(super) fn is_sound(&self) -> bool {
        self.failed.is_empty()
    }

    /// A node is down: its copy is opened anew.
    pub(super) fn closed(&mut self, node: usize) {
        self.failed.remove(&node);
    }

    /// Whether what was acknowledged stays if this one is hurt too.
    fn may_hurt(&self, node: usize, record: &GroupRecord) -> bool {
        let others = self.hurt.keys().filter(|other| **other != node).count();
        let mut records = self.asked.iter().chain([record]);
        records.all(|record| others + 1 < record.config.copies_to_commit())
    }

    /// The store is asked for this record.
    pub(super) fn asked(&mut self, record: &GroupRecord) {
        self.asked.push(record.clone());
    }

    /// The store has this record: who was brought up since it was hurt is as good as any.
    pub(super) fn record(&mut self, record: &GroupRecord) {
        self.asked.retain(|asked| asked.revision > record.revision);
        let members = &record.config.members;
        self.hurt.retain(|node, since| {
            let joined = members.joined(Member(*node as u16));
            joined.is_none_or(|joined| joined <= *since)
        });
        let hurt = &self.hurt;
        self.in_use.retain(|node| hurt.contains_key(node));
    }
}

/// What a replay says of the place of a span.
fn offset_of(found: &Found, span: &SpanId) -> u64 {
    let at = span.end.position - u64::from(span.blocks);
    (LOG_HEADER_BLOCKS + at % found.superblock.ring_blocks.get()) * BLOCK_BYTES as u64
}

/// Something happens to a node's medium.
pub(super) fn hurt_medium(world: &mut ClusterWorld, node: usize) {
    match world.random.u8(..8) {
        0 | 1 => lose_medium(world, node),
        2 | 3 => rot_medium(world, node),
        4 | 5 => rot_in_use(world, node),
        6 => {
            let errors = [IoError::Failed, IoError::NoSpace];
            world.nodes[node].writes_fail = Some(errors[world.random.usize(..2)]);
        }
        _ => {
            world.nodes[node].reads_fail = true;
            let pause = world.draw_pause();
            world.engine.after(pause, Happening::Fast { node });
        }
    }
}

/// Hurt a medium, if what was acknowledged stays then.
fn is_hurt_now(world: &mut ClusterWorld, node: usize) -> bool {
    let record = world.store.record();
    // A group on its way to another one may soon do with fewer copies of what it has.
    if !world.media.may_hurt(node, record) || !world.operator.is_content(record) {
        return false;
    }
    world.media.hurt.insert(node, record.revision);
    true
}

/// A node goes down and comes back with an empty medium.
fn lose_medium(world: &mut ClusterWorld, node: usize) {
    if !is_hurt_now(world, node) {
        return;
    }
    world.engine.note("medium lost", [node as u64, 0, 0, 0]);
    world.coverage.lost_media += 1;
    world.crash(node, true);
    make_copy_anew(world, node);
}

/// A node that is down has a new copy, and nothing of the old one.
fn make_copy_anew(world: &mut ClusterWorld, node: usize) {
    world.media.rotten.remove(&node);
    world.media.in_use.remove(&node);
    let last = world.nodes[node].superblock();
    let state = &mut world.nodes[node];
    state.make_copy(&world.scenario.config, None);
    // A planted bug makes one that says what the old one said.
    let posed = last.filter(|_| world.plant == Some(Plant::FreshVote));
    if let Some(mut superblock) = posed {
        superblock.known_head = 0.into();
        superblock.clean_head = u64::MAX.into();
        state.cipher.seal(&mut superblock);
        let place = LogSuperblock::offset_of(superblock.sequence.get());
        state.disk.put(place, superblock.as_bytes());
    }
}

/// A node goes down, and its copy rots meanwhile.
fn rot_medium(world: &mut ClusterWorld, node: usize) {
    if world.media.is_rotten(node) {
        return;
    }
    let is_power = world.random.bool();
    world.crash(node, is_power);
    world.nodes[node].disk.sync();
    let Ok(found) = world.replay(node) else {
        return;
    };
    let older = LogSuperblock::offset_of(found.superblock.sequence.get() + 1);
    let place = match draw_rot(world, node, &found) {
        _ if world.random.u8(..8) == 0 => older,
        Some(place) if is_hurt_now(world, node) => place,
        _ => return,
    };
    let byte = place + world.random.u64(..BLOCK_BYTES as u64);
    if world.nodes[node].disk.rot(byte, world.random.u8(..8)) {
        world.engine.note("rots", [node as u64, byte, 0, 0]);
        world.coverage.rots += 1;
        if place != older {
            world.media.rotten.insert(node);
        }
    }
}

/// A block of the log rots on which a volume stands.
fn rot_in_use(world: &mut ClusterWorld, node: usize) {
    let stands = (world.nodes[node].up.as_ref()).is_some_and(|up| up.standing.is_some());
    if !stands || world.media.is_hurt(node) || world.nodes[node].disk.is_rotten() {
        return;
    }
    let Ok(found) = world.replay(node) else {
        return;
    };
    let Some(place) = draw_rot(world, node, &found).filter(|_| is_hurt_now(world, node)) else {
        return;
    };
    let byte = place + world.random.u64(..BLOCK_BYTES as u64);
    if world.nodes[node].disk.rot(byte, world.random.u8(..8)) {
        world.engine.note("rots in use", [node as u64, byte, 0, 0]);
        world.coverage.rots += 1;
        world.media.rotten.insert(node);
        world.media.in_use.insert(node);
        // Clients may not read it before it is destaged.
        if world.random.bool() {
            scrub(world, node, ScrubAt::LOG);
        }
    }
}

/// Have a volume read what its log has, from there on.
fn scrub(world: &mut ClusterWorld, node: usize, at: ScrubAt) {
    let id = RequestId(FIRST_SCRUB | world.engine.turns());
    if let Some(standing) = world.standing(node) {
        let request = Request::Scrub { at };
        standing.events.push_back(Event::Request { id, request });
        world.touched.insert(node);
    }
}

/// Whether a request is one of a scrub.
pub(super) fn is_scrub(id: RequestId) -> bool {
    id.0 >= FIRST_SCRUB
}

/// A piece was scrubbed: there may be more.
pub(super) fn scrubbed(world: &mut ClusterWorld, node: usize, result: Result<Reply, RequestError>) {
    if let Ok(Reply::Scrubbed(Scrubbed { next: Some(at), .. })) = result {
        scrub(world, node, at);
    }
}

/// The store is asked for a record without a member: what a primary has that rotted may be on no other member any more once that is
/// written, and its own copy may not open by then. That is more than one thing that goes wrong at once, so it has not rotted. Who has
/// doubted its copy for that is started again.
pub(super) fn member_leaves(world: &mut ClusterWorld) {
    for node in std::mem::take(&mut world.media.in_use) {
        world.nodes[node].disk.heal();
        world.media.rotten.remove(&node);
        world.media.hurt.remove(&node);
        if (world.nodes[node].up.as_ref()).is_some_and(|up| up.standing.is_none()) {
            let life = world.nodes[node].life;
            (world.engine).after(Nanos(1), Happening::Restart { node, life });
        }
    }
}

/// A member was asked for these bytes, which had not read well.
pub(super) fn repaired(world: &mut ClusterWorld, node: usize, (offset, bytes): (u64, u64)) {
    if world.nodes[node].disk.rots_within(offset, bytes) {
        return;
    }
    world.engine.note("repaired", [node as u64, offset, 0, 0]);
    if world.media.in_use.contains(&node) {
        world.coverage.repairs += 1;
    }
    written_again(&mut world.media, &world.nodes[node].disk, node);
}

/// What had rotted under a volume may not be rotten any more, since it was written again.
pub(super) fn written_again(media: &mut Media, disk: &Disk, node: usize) {
    if !disk.is_rotten() && media.in_use.remove(&node) {
        media.rotten.remove(&node);
        media.hurt.remove(&node);
    }
}

/// Whether a volume has a reason to answer that what it has is damaged, or to refuse what it is asked for that: nobody could be asked for
/// what has rotted.
pub(super) fn may_be_corrupt(
    world: &mut ClusterWorld,
    node: usize,
    result: &Result<Reply, RequestError>,
) -> bool {
    let is_about = matches!(
        result,
        Err(RequestError::Corrupt | RequestError::Inconsistent)
    );
    let may_be = is_about && world.media.is_rotten(node);
    world.coverage.corrupt += u64::from(may_be);
    may_be
}

/// A block of this copy's spans of which a replay can tell that it is not what was written.
fn draw_rot(world: &mut ClusterWorld, node: usize, found: &Found) -> Option<u64> {
    // Not what a copy that is brought up has behind its cut.
    let proves = |span: &&SpanId| {
        let position = span.end.position - u64::from(span.blocks);
        found.superblock.proves(position)
    };
    let evidence = (found.spans.iter().filter(proves)).map(|span| span.evidence);
    let says = world.nodes[node].superblock()?.known_head.get();
    let known = evidence.chain([says]).max()?;
    let spans = found.spans.iter();
    let durable: Vec<&SpanId> = spans.filter(|span| span.end.position <= known).collect();
    let span = durable.get(world.random.usize(..durable.len().max(1)))?;
    let block = world.random.u64(..u64::from(span.blocks));
    Some(offset_of(found, span) + block * BLOCK_BYTES as u64)
}

/// Open the copy of a node that starts, as its driver does, and whether it is doubted. One that cannot be followed is left as
/// it is until somebody removes it.
pub(super) fn open_copy(
    world: &mut ClusterWorld,
    node: usize,
) -> Result<Option<(Found, bool)>, Violation> {
    let found = world.replay(node);
    if !world.media.is_rotten(node) {
        let refused = |error: CopyError| {
            let message = format!("the copy of node {node} cannot be opened: {error}");
            Violation::new("replay", message)
        };
        return found.map(|found| Some((found, false))).map_err(refused);
    }
    let config = &world.scenario.config;
    let sound = world.nodes[node].replay_sound(config, &world.check_pool);
    match (found, sound) {
        (Ok(found), Ok(sound)) if found.spans == sound.spans => Ok(Some((found, false))),
        (Err(CopyError::Damaged(found)), Ok(sound)) if found.spans == sound.spans => {
            world.engine.note("doubted", [node as u64, 0, 0, 0]);
            world.coverage.damaged += 1;
            let planted = opened_all_the_same(world, node, sound);
            Ok(Some(planted.map_or((*found, true), |found| (found, false))))
        }
        (Ok(_) | Err(CopyError::Damaged(_)), Ok(_)) => {
            let message = format!("node {node} takes its rotten copy for one that ends elsewhere");
            Err(Violation::new("rot-unnoticed", message))
        }
        (Err(_), Ok(sound)) => {
            world.engine.note("damaged", [node as u64, 0, 0, 0]);
            world.coverage.damaged += 1;
            if let Some(found) = opened_all_the_same(world, node, sound) {
                return Ok(Some((found, false)));
            }
            let pause = world.draw_pause();
            world.engine.after(pause, Happening::Replace { node });
            Ok(None)
        }
        (_, Err(error)) => {
            let message = format!("the copy of node {node} is bad without its rot: {error}");
            Err(Violation::new("replay", message))
        }
    }
}

/// A planted bug has a node open what of a damaged copy lies before the damage.
fn opened_all_the_same(world: &ClusterWorld, node: usize, sound: Found) -> Option<Found> {
    if world.plant != Some(Plant::DamagedVote) {
        return None;
    }
    let disk = &world.nodes[node].disk;
    let is_good = |span: &&SpanId| {
        let bytes = u64::from(span.blocks) * BLOCK_BYTES as u64;
        !disk.rots_within(offset_of(&sound, span), bytes)
    };
    let spans = sound.spans.iter().take_while(is_good).copied().collect();
    Some(Found { spans, ..sound })
}

/// Somebody removes a damaged copy, and starts the node again; not while it may be about to be the last one.
pub(super) fn replace_copy(world: &mut ClusterWorld, node: usize) -> Result<(), Violation> {
    if world.nodes[node].up.is_some() {
        return Ok(());
    }
    if world.media.is_rotten(node) {
        if !world.media.asked.is_empty() {
            let pause = world.draw_pause();
            world.engine.after(pause, Happening::Replace { node });
            return Ok(());
        }
        world.engine.note("copy removed", [node as u64, 0, 0, 0]);
        make_copy_anew(world, node);
    }
    world.start(node)
}

/// A write to a node's medium has failed: somebody starts the node again.
pub(super) fn copy_failed(world: &mut ClusterWorld, node: usize) {
    world.engine.note("write failed", [node as u64, 0, 0, 0]);
    world.coverage.failed_writes += 1;
    world.media.failed.insert(node);
    let life = world.nodes[node].life;
    if let Some(standing) = world.standing(node) {
        standing.was_refused = true;
    }
    let pause = world.draw_pause();
    world.engine.after(pause, Happening::Restart { node, life });
}

/// Nothing happens to media any more, and what happened is put right.
pub(super) fn calm_media(world: &mut ClusterWorld) {
    for node in 0..world.nodes.len() {
        world.nodes[node].writes_fail = None;
        world.nodes[node].reads_fail = false;
        if world.media.is_rotten(node) {
            // It is brought up anew, or removed.
            world.crash(node, false);
        }
        world.engine.after(Nanos(2), Happening::Replace { node });
    }
}
