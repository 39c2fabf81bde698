//! Groups of nodes that have copies of a volume's write log.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How many copies a write has before it is acknowledged.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Ack {
    /// Those of all members: any of them can take over.
    #[default]
    All,
    /// More than half of the replicas that the volume should have.
    Majority,
    /// The primary's: what the others lack yet goes with it.
    One,
}

/// What becomes of writes while fewer members are there than `copies_min`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum WhenShort {
    /// They wait until enough members are there.
    #[default]
    Wait,
    /// They end with an input/output error. One that was sent before may be there all the same.
    Error,
}

/// Which nodes are to have copies of a new volume's write log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupRequest {
    /// Copies of the log in all, this node's included: 2 or 3.
    #[schema(minimum = 0, maximum = 255)]
    pub replicas: u8,
    /// How many of them a write has before it is acknowledged.
    #[serde(default)]
    pub ack: Ack,
    /// The nodes by name, as many as replicas. This node is the first one.
    pub nodes: Vec<String>,
    /// With fewer members the volume takes no writes; left out, 1, or with `majority` more than half of the replicas.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 255)]
    pub copies_min: Option<u8>,
    /// What becomes of writes then.
    #[serde(default)]
    pub when_short: WhenShort,
}

/// What a group is to be from now on. What is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupChange {
    /// Copies of the log in all: 1 to 3. Other nodes than now need `nodes`, but for 1: the node that serves.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 255)]
    pub replicas: Option<u8>,
    /// How many of them a write has before it is acknowledged.
    #[serde(default)]
    pub ack: Option<Ack>,
    /// All nodes that are to have a copy, by name, the one that serves among them.
    #[serde(default)]
    pub nodes: Option<Vec<String>>,
    /// With fewer members the volume takes no writes; left out, as it is, but no more than replicas.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 255)]
    pub copies_min: Option<u8>,
    /// What becomes of writes then.
    #[serde(default)]
    pub when_short: Option<WhenShort>,
}

impl GroupRequest {
    /// With fewer members the volume takes no writes.
    pub fn copies_least(&self) -> u8 {
        let usual = match self.ack {
            Ack::Majority => self.replicas / 2 + 1,
            Ack::All | Ack::One => 1,
        };
        self.copies_min.unwrap_or(usual)
    }
}

/// What happens in a group's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupPhase {
    /// A candidate gathers promises of the members.
    Taking,
    /// The primary appends.
    Serving,
}

/// A group, as its record says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Group {
    /// Name of its volume.
    pub volume: String,
    /// UUID of its volume.
    pub uuid: String,
    /// Its record, if that can be read.
    pub record: Option<GroupRecord>,
    /// Why it cannot be read, or why this node has no copy of use.
    pub trouble: Option<String>,
    /// What this node is in it and sees of it; none: it has no part in it, or none yet.
    pub here: Option<GroupView>,
}

/// The newest record of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupRecord {
    /// Counts the records.
    pub revision: u64,
    /// Counts the takeovers.
    pub epoch: u64,
    /// What happens in it.
    pub phase: GroupPhase,
    /// The node that serves, or is about to.
    pub primary: String,
    /// The nodes whose copies count.
    pub members: Vec<String>,
    /// Nodes whose copies are being brought up.
    pub joiners: Vec<String>,
    /// How many copies a write has before it is acknowledged.
    pub ack: Ack,
    /// How many copies there should be.
    pub replicas: u8,
    /// With fewer members the volume takes no writes.
    pub copies_min: u8,
    /// What becomes of writes then.
    pub when_short: WhenShort,
    /// Whether there are fewer members now.
    pub short: bool,
    /// Position in the log, in blocks, up to which everything was committed when the record was written.
    pub floor_blocks: u64,
}

/// What a node is in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupRole {
    /// Its copy follows the primary's.
    Follows,
    /// It is the candidate.
    Takes,
    /// It is the primary.
    Serves,
}

/// What one node sees of a group. Positions are blocks since the log was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupView {
    /// What it is in the group.
    pub role: GroupRole,
    /// Where its copy ends.
    pub head_blocks: u64,
    /// Up to where that is durable.
    pub durable_blocks: u64,
    /// Up to where enough members have it; null: only the primary knows.
    #[serde(default)]
    pub committed_blocks: Option<u64>,
    /// What the primary sees of the other nodes.
    #[serde(default)]
    pub others: Vec<GroupOther>,
    /// What the candidate waits for; none: this node does not take the group.
    #[serde(default)]
    pub takeover: Option<Takeover>,
    /// For how long nothing has come from the primary; null: this node does not follow one.
    #[serde(default)]
    pub silent_ms: Option<u64>,
}

/// A takeover that has not come to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Takeover {
    /// What is waited for.
    pub waits: TakeoverWaits,
    /// The members that have promised to follow the candidate, with a whole copy.
    pub promised: Vec<String>,
    /// The members that have not answered.
    pub silent: Vec<String>,
    /// How many promises it takes.
    pub promises_needed: u64,
    /// For how long the last primary may still answer reads, as far as that is waited for.
    pub lease_ms: Option<u64>,
}

/// What a takeover waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TakeoverWaits {
    /// The record that names the candidate.
    Record,
    /// Promises of members.
    Promises,
    /// The members that promised get what one of them lacks.
    Copies,
    /// The last primary may still answer reads.
    Lease,
    /// The volume is opened.
    Opening,
}

/// The group of a volume in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeGroup {
    /// What this node is in it; none: it has no copy at present.
    pub role: Option<GroupRole>,
    /// The node that serves, or is about to.
    pub primary: String,
    /// Counts the takeovers.
    pub epoch: u64,
    /// The nodes whose copies count.
    pub members: Vec<String>,
    /// Nodes whose copies are being brought up.
    pub joiners: Vec<String>,
    /// How many copies there should be.
    pub replicas: u8,
}

/// What becomes of another node's copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupOtherState {
    /// A member that takes each write.
    InStep,
    /// A member that was reached again says what it has.
    Attaching,
    /// It is being brought up.
    Joining,
    /// It has all, and reads that back before it becomes a member.
    ReadingBack,
    /// The node is not reached.
    Away,
    /// The node is reached, and has no copy of the log that it can use: there it is said why.
    NoCopy,
    /// It cannot be brought up: it needs blocks of the log that are damaged on this node, and no member has them whole.
    Blocked,
}

/// Another node of a group, as the primary sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupOther {
    /// Its name.
    pub node: String,
    /// What becomes of its copy.
    pub state: GroupOtherState,
    /// Up to where it has said that its copy is durable, as far as that is known.
    pub durable_blocks: u64,
    /// How much of the primary's log that copy lacks, as far as that is known.
    pub behind_bytes: u64,
    /// How its copy is brought up; none: it is not, or that has not begun.
    #[serde(default)]
    pub resync: Option<Resync>,
}

/// How a copy is brought up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Resync {
    /// How much of the log it has, of 100.
    #[schema(minimum = 0, maximum = 255)]
    pub percent: u8,
    /// What it lacks.
    pub bytes_left: u64,
    /// How fast it comes nearer of late.
    pub bytes_per_second: u64,
    /// How long it takes at that pace until it has all, without what it reads back then; none: it comes no nearer.
    pub seconds_left: Option<u64>,
}

/// What a node is in its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterStatus {
    /// Identity of the cluster.
    pub id: String,
    /// The node's name there.
    pub node: String,
    /// Its number there.
    #[schema(minimum = 0, maximum = 65535)]
    pub number: u16,
    /// The other nodes.
    pub others: Vec<String>,
    /// Those that it is connected with: it is where one of them has a copy of a volume that the other one serves.
    pub connected: Vec<String>,
    /// Where the records of groups are.
    pub records: String,
    /// What keeps it from these.
    pub records_trouble: Option<String>,
}
