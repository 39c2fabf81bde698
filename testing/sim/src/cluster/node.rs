//! One node: its medium, its clock, and while it is up its part in the group and the volume that stands on it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::error::{IoError, OpenError};
use hdcs_core::base::io::{Nanos, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::ReadCache;
use hdcs_core::format::{LogSuperblock, Membership};
use hdcs_core::log::replay::{Found as Replayed, Replay};
use hdcs_core::replication::participant::{Found, Participant};
use hdcs_core::replication::{Point, SpanId};
use hdcs_core::volume::{Event, Volume, VolumeConfig};
use zerocopy::IntoBytes;

use super::cipher::LogCipher;
use super::clock::Clock;
use super::shared::{Begun, User};
use super::world::Happening;
use crate::disk::{Disk, OpId};

/// Name of the log.
const LOG: u64 = 99;

/// See the module.
#[derive(Debug)]
pub(super) struct Node {
    /// The medium of its copy.
    pub(super) disk: Disk,
    /// What encrypts its log.
    pub(super) cipher: LogCipher,
    pub(super) clock: Clock,
    /// `None`: it is down.
    pub(super) up: Option<Up>,
    /// Counts its starts.
    pub(super) life: u32,
    /// Since when it is paused, by its own clock.
    pub(super) paused: Option<Nanos>,
    /// What has happened to it meanwhile.
    pub(super) inbox: Vec<Happening>,
    /// Ends of spans that its medium has, or had: position and chain.
    pub(super) media: BTreeSet<(u64, u64)>,
    /// How writes to its medium fail, while they do.
    pub(super) writes_fail: Option<IoError>,
    /// Whether reads of others' spans from its medium fail.
    pub(super) reads_fail: bool,
    /// What the last replay has found, and of which version of the medium.
    cached: RefCell<Option<(u64, Result<Found, CopyError>)>>,
}

/// Why a copy is not opened.
#[derive(Clone, Debug)]
pub(super) enum CopyError {
    /// Its log refuses to open.
    Refused(OpenError),
    /// Some data of what was found is damaged.
    Damaged(Box<Found>),
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "{error}"),
            Self::Damaged(_) => write!(f, "some of its data is damaged"),
        }
    }
}

/// What a node has in memory.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) participant: Participant,
    pub(super) standing: Option<Standing>,
    /// The cache of a volume that has ended, of which a planted bug forgets nothing.
    pub(super) kept_cache: Option<ReadCache>,
    /// What is under way on its devices.
    pub(super) ops: BTreeMap<u64, Op>,
    pub(super) next_op: u64,
    /// Reads of the volume that wait until what they read was repaired, and where they read.
    pub(super) repairs: BTreeMap<Token, (User, u64, BufMut)>,
    /// Revision of the record by which what it has last asked for was asked.
    pub(super) acted_by: u64,
}

/// A volume that stands on the log.
#[derive(Debug)]
pub(super) struct Standing {
    pub(super) user: User,
    pub(super) cache: ReadCache,
    pub(super) volume: Volume,
    /// What it is to be told.
    pub(super) events: VecDeque<Event>,
    /// Its writes to the log that have not ended.
    pub(super) log_writes: BTreeMap<Token, LogWrite>,
    /// The backend was refused to it, some time.
    pub(super) was_refused: bool,
    /// It was to fail writes for want of members, some time.
    pub(super) was_short: bool,
    /// It is open.
    pub(super) is_open: bool,
}

impl Standing {
    /// Whether it has a reason to answer with errors.
    pub(super) fn may_fail(&self) -> bool {
        self.was_refused || self.was_short
    }
}

/// A write of a volume to its log.
#[derive(Clone, Copy, Debug)]
pub(super) enum LogWrite {
    Span(Point),
    Superblock {
        tail: u64,
    },
    /// Blocks of a span once more, in their place.
    Again,
}

/// Something under way.
#[derive(Debug)]
pub(super) enum Op {
    /// Of the participant; the end of the span that is written, if it is one.
    Write {
        op: OpId,
        token: Token,
        end: Option<Point>,
    },
    /// A write that a planted bug has ended before.
    Orphan { op: OpId, end: Option<Point> },
    /// Of the participant.
    Read { op: OpId, token: Token, buf: BufMut },
    /// Of the volume that opened in this epoch.
    VolumeRead {
        user: User,
        op: OpId,
        token: Token,
        offset: u64,
        buf: BufMut,
    },
    /// Of the volume that opened in this epoch.
    Backend {
        user: User,
        token: Token,
        begun: Begun,
    },
}

impl Node {
    /// A node with a new copy: a member's, which begins at this position, or none's.
    pub(super) fn new(
        config: &VolumeConfig,
        tail: Option<u64>,
        cipher: LogCipher,
        clock: Clock,
        seed: u64,
    ) -> Self {
        let mut node = Self {
            disk: Disk::new(config.log_bytes, seed),
            cipher,
            clock,
            up: None,
            life: 0,
            paused: None,
            inbox: Vec::new(),
            media: BTreeSet::new(),
            writes_fail: None,
            reads_fail: false,
            cached: RefCell::default(),
        };
        node.make_copy(config, tail);
        node
    }

    /// Have a new copy on its medium and nothing else: a member's, which begins at this position, or none's.
    pub(super) fn make_copy(&mut self, config: &VolumeConfig, tail: Option<u64>) {
        let is_member = tail.is_some();
        let mut superblock = LogSuperblock::new(config.uuid, LOG, config.log_bytes);
        superblock.tail = tail.unwrap_or(0).into();
        (superblock.known_head, superblock.clean_head) = (superblock.tail, superblock.tail);
        superblock.incarnation = u64::from(is_member).into();
        superblock.set_membership(Membership {
            promised: u64::from(is_member),
            cut_position: 0,
            void_before: 0,
            joined: u64::from(is_member),
            is_whole: is_member,
        });
        self.cipher.seal(&mut superblock);
        self.disk.wipe();
        self.disk.put(0, superblock.as_bytes());
    }

    /// What its clock shows.
    pub(super) fn now(&self, world: Nanos) -> Nanos {
        self.paused.unwrap_or_else(|| self.clock.at(world))
    }

    /// Whether it does anything at present.
    pub(super) fn runs(&self) -> bool {
        self.up.is_some() && self.paused.is_none()
    }

    /// When it is to be polled, in the world's time.
    pub(super) fn next_wakeup(&self) -> Option<Nanos> {
        let up = self.up.as_ref().filter(|_| self.paused.is_none())?;
        let volume = up
            .standing
            .as_ref()
            .and_then(|standing| standing.volume.next_wakeup());
        let next = up
            .participant
            .next_wakeup()
            .into_iter()
            .chain(volume)
            .min()?;
        Some(self.clock.when(next))
    }

    /// The part that it plays, if it runs.
    pub(super) fn running(&mut self) -> Option<&mut Up> {
        self.up.as_mut().filter(|_| self.paused.is_none())
    }

    /// Replay its copy as it is on the medium now. What has not changed since is not read again.
    pub(super) fn replay(
        &self,
        config: &VolumeConfig,
        pool: &Arc<Pool>,
    ) -> Result<Found, CopyError> {
        let version = self.disk.version();
        if let Some((_, found)) = (self.cached.borrow().as_ref()).filter(|(of, _)| *of == version) {
            return found.clone();
        }
        let found = self.replay_of(config, pool, |offset, out| self.disk.peek(offset, out));
        *self.cached.borrow_mut() = Some((version, found.clone()));
        found
    }

    /// Replay its copy as if nothing of it had rotted.
    pub(super) fn replay_sound(
        &self,
        config: &VolumeConfig,
        pool: &Arc<Pool>,
    ) -> Result<Found, CopyError> {
        self.replay_of(config, pool, |offset, out| {
            self.disk.peek_sound(offset, out);
        })
    }

    fn replay_of(
        &self,
        config: &VolumeConfig,
        pool: &Arc<Pool>,
        read_now: impl Fn(u64, &mut [u8]),
    ) -> Result<Found, CopyError> {
        let mut replay = Replay::new(config.uuid, config.log_bytes);
        if let Some(tags) = self.cipher.tags() {
            replay.authenticate(tags);
        }
        let read_now = |offset, out: &mut [u8]| {
            read_now(offset, out);
            self.cipher.decrypt(offset, out);
        };
        drive(replay, pool, read_now)
    }

    /// The newest superblock on its medium.
    pub(super) fn superblock(&self) -> Option<LogSuperblock> {
        let places = [0, LogSuperblock::offset_of(1)];
        let blocks = places.into_iter().filter_map(|offset| {
            let mut block = [0; BLOCK_BYTES];
            self.disk.peek(offset, &mut block);
            LogSuperblock::parse(&block).ok()
        });
        blocks.max_by_key(|block| block.sequence.get())
    }
}

fn drive(
    mut replay: Replay,
    pool: &Arc<Pool>,
    read_now: impl Fn(u64, &mut [u8]),
) -> Result<Found, CopyError> {
    let (mut spans, mut is_done, mut lost_blocks) = (Vec::new(), false, 0);
    while !is_done && let Some(mut read) = replay.next_read(pool) {
        read_now(read.offset, &mut read.buf);
        let result = replay.read_done(Nanos(0), read.chunk, Ok(read.buf), |_, found| match found {
            Replayed::Span(span) => {
                lost_blocks += span.damaged_blocks;
                spans.push(SpanId::from(span));
            }
            Replayed::Done => is_done = true,
            Replayed::Entries(_) | Replayed::Record(_) => {}
        });
        result.map_err(CopyError::Refused)?;
    }
    let superblock = *replay
        .superblock()
        .expect("a replay that is done has chosen one");
    let found = Found { superblock, spans };
    if lost_blocks > 0 {
        return Err(CopyError::Damaged(Box::new(found)));
    }
    Ok(found)
}

impl Up {
    /// Something is under way from now on.
    pub(super) fn begin(&mut self, op: Op) -> u64 {
        self.next_op += 1;
        self.ops.insert(self.next_op, op);
        self.next_op
    }

    /// The volume that is there, and those that have left something under way.
    pub(super) fn users(&self) -> BTreeSet<User> {
        let left = self.ops.values().filter_map(|op| match op {
            Op::Backend { user, .. } => Some(*user),
            _ => None,
        });
        let present = self.standing.as_ref().map(|standing| standing.user);
        left.chain(present).collect()
    }

    /// The volume that opened in this epoch, if it is still there.
    pub(super) fn standing_of(&mut self, user: User) -> Option<&mut Standing> {
        self.standing
            .as_mut()
            .filter(|standing| standing.user == user)
    }
}
