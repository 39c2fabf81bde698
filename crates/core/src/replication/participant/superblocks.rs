//! The superblocks of a copy: what the machine wants said, in the log's own format.
//!
//! The machine says what is promised, cut, whole, and where the log begins; what stands on the log says the rest. One is
//! written at a time, and has what both last said. What says another thing of the copy's place in the group than the one
//! before is written to both places before the machine is told: should the newest one rot, the copy has promised no less.

use alloc::boxed::Box;
use alloc::sync::Arc;

use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::base::buf::{Buf, Pool};
use crate::base::cipher::Authenticator;
use crate::base::io::Token;
use crate::base::limits::BLOCK_BYTES;
use crate::cache::Tie;
use crate::format::{LOG_UNFLUSHED, LogSuperblock, Membership};
use crate::replication::Point;
use crate::replication::message::Change;
use crate::replication::replica::Superblock;

/// Memory for one that is made and one that is being written.
const POOL_BLOCKS: usize = 4;

/// What a log says that was in no group.
const NO_GROUP: Membership = Membership {
    promised: 0,
    cut_position: 0,
    void_before: 0,
    joined: 0,
    is_whole: false,
};

/// What a superblock of the log says to the machine.
pub(super) fn of_copy(block: &LogSuperblock) -> Superblock {
    let membership = block.membership().unwrap_or(NO_GROUP);
    Superblock {
        promised: membership.promised,
        incarnation: block.incarnation.get(),
        tail: Point {
            position: block.tail.get(),
            chain: block.tail_chain.get(),
        },
        sync_points: block.sync_points.get(),
        is_unflushed: block.flags.get() & LOG_UNFLUSHED != 0,
        cut_position: membership.cut_position,
        void_before: membership.void_before,
        joined: membership.joined,
        is_whole: membership.is_whole,
    }
}

/// What a superblock asks of all members, after `last`, of a log that ends at `head`.
pub(super) fn change_of(block: &LogSuperblock, last: Change, head: u64) -> Change {
    let said = of_copy(block);
    Change {
        number: last.number,
        tail: said.tail,
        sync_points: said.sync_points,
        incarnation: said.incarnation,
        opens_at: if said.incarnation > last.incarnation {
            head
        } else {
            last.opens_at
        },
        is_unflushed: said.is_unflushed,
    }
}

/// A superblock that what stands on the log has asked for.
#[derive(Debug)]
struct Asked {
    token: Token,
    /// `None`: it is being written, or is on this medium.
    block: Option<Box<LogSuperblock>>,
    /// The change that has to be durable at enough members.
    number: u64,
    is_durable: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Superblocks {
    last: Box<LogSuperblock>,
    keys: Option<Arc<dyn Authenticator>>,
    pool: Arc<Pool>,
    /// The one that is being written: whether the machine waits for it, and whether what stands on the log does.
    writing: Option<(Box<LogSuperblock>, bool, bool)>,
    /// The last one is to be written to the other place too: the machine waits for it; whether what stands on the log does.
    again: Option<bool>,
    asked: Option<Asked>,
}

impl Superblocks {
    /// Those that follow `last`.
    pub(super) fn new(last: Box<LogSuperblock>, keys: Option<Arc<dyn Authenticator>>) -> Self {
        Self {
            last,
            keys,
            pool: Pool::small(POOL_BLOCKS),
            writing: None,
            again: None,
            asked: None,
        }
    }

    /// The one that is durable.
    pub(super) fn last(&self) -> &LogSuperblock {
        &self.last
    }

    /// Whether one is being written.
    pub(super) fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    /// What stands on the log wants this said, of which the change of this number is for all members.
    pub(super) fn ask(&mut self, token: Token, block: Box<LogSuperblock>, number: u64) {
        debug_assert!(self.asked.is_none(), "one is asked for at a time");
        self.asked = Some(Asked {
            token,
            block: Some(block),
            number,
            is_durable: false,
        });
    }

    /// It waits no longer.
    pub(super) fn forget_asked(&mut self) -> Option<Token> {
        if let Some((_, _, is_asked)) = &mut self.writing {
            *is_asked = false;
        }
        self.again = self.again.map(|_| false);
        self.asked.take().map(|asked| asked.token)
    }

    /// What was asked for, if it is durable here and the change of this number is durable at enough members.
    pub(super) fn next_retired(&mut self, number: u64) -> Option<Token> {
        let is_done = |asked: &mut Asked| asked.is_durable && asked.number <= number;
        Some(self.asked.take_if(is_done)?.token)
    }

    /// The next one to write, and where, if there is something to say: the machine wants `wanted` said, and said `last`
    /// before. The copy is durable up to a position.
    pub(super) fn next(
        &mut self,
        wanted: Option<Superblock>,
        last: Superblock,
        durable: u64,
    ) -> Option<(u64, Buf)> {
        if let Some(is_asked) = self.again.take() {
            debug_assert!(wanted.is_none(), "the machine waits for the last one");
            let mut next = self.last.clone();
            let names_ahead = next.ahead_sequence == next.sequence;
            next.sequence = U64::new(next.sequence.get() + 1);
            if names_ahead {
                next.ahead_sequence = next.sequence;
            }
            return Some(self.begin(next, true, is_asked));
        }
        let says = wanted.unwrap_or(last);
        let fits = |block: &LogSuperblock| block.tail.get() == says.tail.position;
        let asked = self.asked.as_mut();
        let asked = asked.and_then(|asked| asked.block.take_if(|block| fits(block)));
        let is_asked = asked.is_some();
        if wanted.is_none() && !is_asked {
            return None;
        }
        let mut next = asked.unwrap_or_else(|| self.without_what_stands(&says));
        let sequence = self.last.sequence.get() + 1;
        next.sequence = U64::new(sequence);
        if is_asked {
            next.ahead_sequence = next.sequence;
        }
        say(&mut next, &says);
        next.known_head = U64::new(if is_asked {
            next.known_head.get().max(durable)
        } else {
            known_of(&says, durable)
        });
        Some(self.begin(next, wanted.is_some(), is_asked))
    }

    /// Begin to write one. Returns where, and what.
    fn begin(
        &mut self,
        mut next: Box<LogSuperblock>,
        is_of_machine: bool,
        is_asked: bool,
    ) -> (u64, Buf) {
        next.seal_with(self.keys.as_deref());
        let mut block = self
            .pool
            .alloc(BLOCK_BYTES)
            .expect("one superblock is written at a time");
        block.copy_from_slice(next.as_bytes());
        let offset = LogSuperblock::offset_of(next.sequence.get());
        self.writing = Some((next, is_of_machine, is_asked));
        (offset, block.freeze())
    }

    /// The last one, of a copy on which nothing stands.
    fn without_what_stands(&self, says: &Superblock) -> Box<LogSuperblock> {
        let mut next = self.last.clone();
        next.clean_head = U64::new(u64::MAX);
        let keeps_ahead = next.tail.get() == says.tail.position && next.named_ahead() > 0;
        // Zero: how far ahead spans behind another tail were written is not known here.
        next.ahead_sequence = U64::new(if keeps_ahead {
            next.sequence.get() + 1
        } else {
            0
        });
        let is_same = next.tail.get() == says.tail.position
            && next.incarnation.get() == says.incarnation
            && next.membership().is_some_and(|last| last.is_whole);
        if !is_same {
            // The cache of this node has forgotten nothing of what others destaged, or wrote past the log.
            next.cache = U64::new(Tie::UNKNOWN.cache);
            next.cache_stamp = U64::new(Tie::UNKNOWN.stamp);
        }
        next
    }

    /// The one that was being written is durable. Returns whether the machine waits for it.
    pub(super) fn written(&mut self) -> bool {
        let Some((block, is_of_machine, is_asked)) = self.writing.take() else {
            return false;
        };
        let says_other = block.membership() != self.last.membership();
        self.last = block;
        if says_other && is_of_machine {
            self.again = Some(is_asked);
            return false;
        }
        if let Some(asked) = self.asked.as_mut().filter(|_| is_asked) {
            asked.is_durable = true;
        }
        is_of_machine
    }
}

/// Up to where a replay is to find a copy on which nothing stands, which is durable up to a position. What was cut off was
/// durable, and is not any more. One that is being brought up may be cut there again, and if it was given up, nothing behind
/// its cut counts before it is whole, however much it has taken since.
fn known_of(says: &Superblock, durable: u64) -> u64 {
    if says.is_whole {
        durable
    } else {
        durable.min(says.cut_position)
    }
}

/// Have a superblock say what the machine wants.
fn say(block: &mut LogSuperblock, says: &Superblock) {
    block.incarnation = U64::new(says.incarnation);
    block.tail = U64::new(says.tail.position);
    block.tail_chain = U64::new(says.tail.chain);
    block.sync_points = U64::new(says.sync_points);
    let others = block.flags.get() & !LOG_UNFLUSHED;
    let mark = if says.is_unflushed { LOG_UNFLUSHED } else { 0 };
    block.flags = U64::new(others | mark);
    block.set_membership(Membership {
        promised: says.promised,
        cut_position: says.cut_position,
        void_before: says.void_before,
        joined: says.joined,
        is_whole: says.is_whole,
    });
}
