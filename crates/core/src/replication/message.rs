//! What the nodes of a group tell one another about a log. The data of spans goes with [`Message::Append`] and
//! [`Message::LogData`]; the machines do not see it.
//!
//! Every message names the epoch in which its sender acts. A member takes nothing of an epoch below the one that it has
//! promised.

use alloc::vec::Vec;

use super::{Point, SpanId};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Primary to member, first on a link: I serve in this epoch; what do you have?
    Attach,
    /// The answer.
    Attached(Copy),
    /// Primary or candidate to member: the next span.
    Append(SpanId),
    /// What the member's medium has.
    Ack {
        /// Everything before it is durable.
        durable: u64,
    },
    /// Primary or candidate to member: have a superblock say this.
    Superblock(Change),
    /// It says so, durably, or what a later one said.
    Named {
        /// Number of the change.
        number: u64,
    },
    /// The member has promised this epoch, which is higher than the sender's.
    Fenced {
        /// The epoch.
        promised: u64,
    },
    /// Candidate to member: take nothing of a lower epoch any more.
    Promise {
        /// The floor of the record: who lacks it has lost something.
        floor: Point,
    },
    /// The promise is durable, and nothing is on its way to the medium.
    Promised(Copy),
    /// Candidate to member: what do you have after this point?
    ReadLog {
        /// The end of what the candidate has.
        after: Point,
    },
    /// A span of that.
    LogData(SpanId),
    /// Primary to member: do you still follow me?
    Beat {
        /// Counts the beats to this member.
        number: u64,
        /// For how long after it was sent the primary relies on the answer, in milliseconds by its own clock.
        lease_ms: u32,
    },
    /// Yes. It comes at once: nothing has to be durable for it.
    Echo {
        /// Of which beat.
        number: u64,
    },
    /// Primary to joiner: what do you have?
    Join,
    /// Where the joiner's spans end, oldest first, from its tail on: [`JOIN_POINTS_MAX`] of them at most.
    ///
    /// [`JOIN_POINTS_MAX`]: crate::base::limits::JOIN_POINTS_MAX
    Joining {
        /// See above.
        points: Vec<Point>,
    },
    /// Primary to joiner: forget what you have beyond the cut.
    JoinAt(Cut),
    /// It has, durably, been cut there.
    HasCut(Cut),
    /// Primary to joiner: read back what you have, up to here.
    Verify {
        /// Where that ends.
        up_to: Point,
    },
    /// It was read back and is not whole.
    NotWhole {
        /// Up to here.
        up_to: Point,
    },
    /// It was read back and is whole.
    Verified {
        /// Up to here.
        up_to: Point,
    },
    /// The answer to a request that does not apply, or whose answer is not there. Who asked begins anew with the member.
    Nothing(Question),
}

/// What a request asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Question {
    /// [`Message::Attach`].
    Attach,
    /// [`Message::Superblock`].
    Superblock,
    /// [`Message::Promise`].
    Promise,
    /// [`Message::Join`].
    Join,
    /// [`Message::JoinAt`].
    JoinAt,
    /// [`Message::Verify`].
    Verify,
    /// [`Message::ReadLog`].
    ReadLog,
    /// [`Message::Beat`].
    Beat,
}

impl Message {
    /// Whether it says that something is on a medium, or was read from there.
    pub fn waited_for_medium(&self) -> bool {
        matches!(
            self,
            Self::Promised(_)
                | Self::HasCut(_)
                | Self::Ack { .. }
                | Self::Named { .. }
                | Self::Verified { .. }
                | Self::NotWhole { .. }
                | Self::LogData(_)
        )
    }
}

impl Question {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Attach,
        Self::Superblock,
        Self::Promise,
        Self::Join,
        Self::JoinAt,
        Self::Verify,
        Self::ReadLog,
        Self::Beat,
    ];

    /// What a message asks; `None`: it is no request.
    pub fn of(message: &Message) -> Option<Self> {
        Some(match message {
            Message::Attach => Self::Attach,
            Message::Superblock(_) => Self::Superblock,
            Message::Promise { .. } => Self::Promise,
            Message::Join => Self::Join,
            Message::JoinAt(_) => Self::JoinAt,
            Message::Verify { .. } => Self::Verify,
            Message::ReadLog { .. } => Self::ReadLog,
            Message::Beat { .. } => Self::Beat,
            _ => return None,
        })
    }

    /// Whether it has no answer any more once the same node asks `later` about the log in the same epoch.
    pub const fn gives_way_to(self, later: Self) -> bool {
        match later {
            Self::Superblock => false,
            Self::Promise => matches!(self, Self::Promise | Self::Superblock | Self::Verify),
            Self::JoinAt => !matches!(self, Self::Attach | Self::Join | Self::ReadLog | Self::Beat),
            Self::Attach => matches!(self, Self::Attach),
            Self::Join => matches!(self, Self::Join),
            Self::Verify => matches!(self, Self::Verify),
            Self::ReadLog => matches!(self, Self::ReadLog),
            Self::Beat => matches!(self, Self::Beat),
        }
    }

    /// What it is called in a log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Attach => "Attach",
            Self::Superblock => "Superblock",
            Self::Promise => "Promise",
            Self::Join => "Join",
            Self::JoinAt => "JoinAt",
            Self::Verify => "Verify",
            Self::ReadLog => "ReadLog",
            Self::Beat => "Beat",
        }
    }
}

/// What a member says of its copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Copy {
    /// The highest epoch that it has promised.
    pub promised: u64,
    /// Where it ends: everything before is durable.
    pub head: Point,
    /// Where it begins.
    pub tail: Point,
    /// Sync points before the tail.
    pub sync_points: u64,
    /// The highest opening that it knows of.
    pub incarnation: u64,
    /// The backend may hold writes past the log that it has not flushed.
    pub is_unflushed: bool,
    /// When it was brought up; see [`Cut::joined`].
    pub joined: u64,
    /// Whether it may be a source: it is whole, and has the floor if it was asked for one.
    pub is_whole: bool,
    /// In [`Message::Promised`]: for how long the primary of a lower epoch may still rely on an echo of this member, in
    /// milliseconds by the member's clock. Else 0.
    pub lease_left_ms: u32,
}

/// What a superblock shall say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Change {
    /// Counts the changes of an epoch, from 1 on. A higher one replaces a lower one.
    pub number: u64,
    /// Where the log begins. It does not go back.
    pub tail: Point,
    /// Sync points before the tail.
    pub sync_points: u64,
    /// The opening that writes the next spans. It does not go back.
    pub incarnation: u64,
    /// Position at which that opening begins. Spans of older ones from there on are void: a crash may have left some
    /// that nobody was told of, and that would follow again once what lies before them is written again.
    pub opens_at: u64,
    /// The backend may hold writes past the log that it has not flushed.
    pub is_unflushed: bool,
}

#[cfg(test)]
impl Copy {
    /// A whole copy that has nothing yet.
    pub(super) fn empty(promised: u64) -> Self {
        Self {
            promised,
            head: Point::default(),
            tail: Point::default(),
            sync_points: 0,
            incarnation: 1,
            is_unflushed: false,
            joined: 1,
            is_whole: true,
            lease_left_ms: 0,
        }
    }
}

impl Copy {
    /// Whether the copy's superblock says what this change says.
    pub fn says(&self, change: &Change) -> bool {
        self.tail == change.tail
            && self.sync_points == change.sync_points
            && self.incarnation == change.incarnation
            && self.is_unflushed == change.is_unflushed
    }
}

/// From where on a joiner takes the log of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// What it keeps ends here; it lies at or behind the tail.
    pub at: Point,
    /// Spans of older openings from there on are void: they were truncated. It is the opening of the first span that
    /// others have there, or of the next one.
    pub void_before: u64,
    /// Revision of the record under which it is brought up. The record that makes it a member repeats it, and it counts
    /// only while its superblock says the same.
    pub joined: u64,
    /// What superblocks of the others shall say.
    pub change: Change,
}
