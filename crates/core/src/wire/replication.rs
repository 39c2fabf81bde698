//! Messages of replication on the wire: each is a span of a stream, a request, or the answer to one.
//!
//! ```text
//!  leader ── Open (LogMeta) ─ Append (AppendMarks, span) ──► member      spans: SpanId from header and marks
//!         ◄── Ack ──────────────────────────────────────────
//!         ── request: code, meta ──────────────────────────►             by `request`, `read_request`
//!         ◄── answer: code, meta, for LogData the span ─────             by `answer`, `read_answer`
//! ```
//!
//! The codes and metas are in the table of [`crate::wire`]. Invariants:
//! 1. Decoding is total: whatever the bytes are, it gives a message or a [`MessageError`].
//! 2. What is decoded encodes to the same bytes; so reserved bytes and unknown flags are refused.
//! 3. Each request has the answers that [`fits`] names, and no others.

use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::AppendMarks;
use crate::base::limits::{
    BLOCK_BYTES, JOIN_POINTS_MAX, LEASE_MS_MAX, WIRE_META_BYTES_MAX, WIRE_PARTS_MAX,
};
use crate::format::{Field, Structure, on_disk};
pub use crate::replication::message::Question;
use crate::replication::message::{Change, Copy, Cut, Message};
use crate::replication::{Point, SpanId};

/// [`ChangeMeta::flags`], [`CutMeta::flags`], [`CopyMeta::flags`]: the backend may hold writes that it has not flushed.
pub const FLAG_UNFLUSHED: u32 = 1;
/// [`CopyMeta::flags`]: the copy may be a source.
pub const FLAG_WHOLE: u32 = 2;

/// Why a member closes a stream: it has no such log.
pub const CLOSE_NO_LOG: u16 = 1;
/// Why a member closes a stream: it has promised a higher epoch.
pub const CLOSE_FENCED: u16 = 2;

on_disk! {
    /// Which log, in which epoch: how each meta of replication begins, and all of it for Open, Attach, Join, Nothing and
    /// NoLog.
    LogMeta: 32 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// Epoch of the request's sender; in an answer the same.
        epoch: U64,
    }
}

on_disk! {
    /// A number: the meta of Named, Fenced and Echo.
    NumberMeta: 40 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// As in LogMeta.
        epoch: U64,
        /// Named: number of the change that is durable. Fenced: the epoch that was promised. Echo: number of the beat.
        number: U64,
    }
}

on_disk! {
    /// A place between two spans: the meta of Promise, ReadLog, Verify, Verified and NotWhole.
    PointMeta: 48 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// As in LogMeta.
        epoch: U64,
        /// Promise: the floor. ReadLog: where the asker's log ends. Else: up to where the copy is read back.
        position: U64,
        /// Checksum of the span before it.
        chain: U64,
    }
}

on_disk! {
    /// The meta of Beat.
    BeatMeta: 48 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// As in LogMeta.
        epoch: U64,
        /// Counts the beats to this member.
        number: U64,
        /// For how long the primary relies on the answer, in milliseconds from when it sent this.
        lease_ms: U32,
        /// Zero.
        reserved: [u8; 4],
    }
}

on_disk! {
    /// What a superblock shall say: the meta of Superblock.
    ChangeMeta: 88 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// As in LogMeta.
        epoch: U64,
        /// Counts the changes of the epoch, from 1 on.
        number: U64,
        /// Where the log begins.
        tail_position: U64,
        /// Checksum of the span before it.
        tail_chain: U64,
        /// Sync points before the tail.
        sync_points: U64,
        /// The opening that writes the next spans.
        incarnation: U64,
        /// Position at which that opening begins.
        opens_at: U64,
        /// 1: the backend may hold writes that it has not flushed.
        flags: U32,
        /// Zero.
        reserved: [u8; 4],
    }
}

on_disk! {
    /// From where on a joiner takes the log: the meta of JoinAt and HasCut.
    CutMeta: 120 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// As in LogMeta.
        epoch: U64,
        /// What the joiner keeps ends here.
        at_position: U64,
        /// Checksum of the span before it.
        at_chain: U64,
        /// Spans of older openings behind the cut are void.
        void_before: U64,
        /// Revision of the record under which the copy is brought up.
        joined: U64,
        /// As in ChangeMeta, and so on.
        number: U64,
        /// Where the log begins.
        tail_position: U64,
        /// Checksum of the span before it.
        tail_chain: U64,
        /// Sync points before the tail.
        sync_points: U64,
        /// The opening that writes the next spans.
        incarnation: U64,
        /// Position at which that opening begins.
        opens_at: U64,
        /// 1: the backend may hold writes that it has not flushed.
        flags: U32,
        /// Zero.
        reserved: [u8; 4],
    }
}

on_disk! {
    /// What a member says of its copy: the meta of Attached and Promised.
    CopyMeta: 104 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// As in LogMeta.
        epoch: U64,
        /// The highest epoch that it has promised.
        promised: U64,
        /// Where it ends.
        head_position: U64,
        /// Checksum of the last span.
        head_chain: U64,
        /// Where it begins.
        tail_position: U64,
        /// Checksum of the span before.
        tail_chain: U64,
        /// Sync points before the tail.
        sync_points: U64,
        /// The highest opening that it knows of.
        incarnation: U64,
        /// Revision of the record under which it was brought up.
        joined: U64,
        /// 1: the backend may hold writes that it has not flushed. 2: it may be a source.
        flags: U32,
        /// Promised: for how long a primary of a lower epoch may still rely on an echo of this member, in milliseconds.
        lease_left_ms: U32,
    }
}

on_disk! {
    /// Which span the payload is: the meta of LogData.
    SpanMeta: 88 bytes {
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of its log.
        log: U64,
        /// As in LogMeta.
        epoch: U64,
        /// Where the span before ends.
        start_position: U64,
        /// Checksum of that.
        start_chain: U64,
        /// Where it ends itself.
        end_position: U64,
        /// Its checksum.
        end_chain: U64,
        /// The opening that wrote it.
        incarnation: U64,
        /// Position below which the log was durable at the primary when it sealed the span.
        evidence: U64,
        /// Its length.
        blocks: U32,
        /// Zero.
        reserved: [u8; 4],
    }
}

on_disk! {
    /// Where a span of a joiner ends: an entry of Joining.
    JoinPoint: 16 bytes {
        /// Where.
        position: U64,
        /// Checksum of the span.
        chain: U64,
    }
}

/// A log: that of a volume, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogName {
    /// UUID of the volume.
    pub volume: [u8; 16],
    /// Number of its log.
    pub number: u64,
}

impl fmt::Display for LogName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "log {} of volume ", self.number)?;
        self.volume
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What is said of which log, in which epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct About {
    /// The log.
    pub log: LogName,
    /// The epoch in which the sender of the request acts.
    pub epoch: u64,
}

/// Code and meta of a request or an answer.
pub type Encoded = (u16, Vec<u8>);

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// What the copy says.
    Message(Message),
    /// The request does not apply any more, or there is nothing that it asks for.
    Nothing,
    /// The node has no such log.
    NoLog,
}

/// What is wrong with a message, or with its place among others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MessageError {
    /// A request or an answer of another kind.
    #[error("code {0} is not known in this version of the wire")]
    Code(u16),
    /// Not as long as its kind is.
    #[error("code {code} has {bytes} bytes of meta")]
    Length {
        /// What it is.
        code: u16,
        /// Its length.
        bytes: usize,
    },
    /// Flags that are not known, or reserved bytes that are not zero.
    #[error(
        "flags or reserved bytes of code {0} have a meaning that is not known in this version of the wire"
    )]
    Reserved(u16),
    /// A span whose numbers contradict one another, or its payload.
    #[error("a span of {blocks} blocks from position {start} to {end}, with {bytes} bytes of data")]
    Span {
        /// Where the one before ends.
        start: u64,
        /// Where it ends.
        end: u64,
        /// How long it is.
        blocks: u32,
        /// Bytes that came with it.
        bytes: usize,
    },
    /// A request with data.
    #[error("a request with {0} bytes of data")]
    Payload(usize),
    /// Its log or its epoch is not that of its stream, or of the request.
    #[error("{found} in epoch {found_epoch}, where {expected} in epoch {expected_epoch} is meant", found = .found.log, found_epoch = .found.epoch, expected = .expected.log, expected_epoch = .expected.epoch)]
    About {
        /// What came.
        found: About,
        /// What is meant.
        expected: About,
    },
    /// An answer that does not belong to its request.
    #[error("an answer of code {code} to {question:?}")]
    Answer {
        /// What was asked.
        question: Question,
        /// Its code.
        code: u16,
    },
    /// Something that must not come there or then.
    #[error("{0}")]
    Unexpected(&'static str),
}

const CODE_ATTACHED: u16 = 80;
const CODE_NAMED: u16 = 81;
const CODE_PROMISED: u16 = 82;
const CODE_JOINING: u16 = 83;
const CODE_HAS_CUT: u16 = 84;
const CODE_VERIFIED: u16 = 85;
const CODE_NOT_WHOLE: u16 = 86;
const CODE_LOG_DATA: u16 = 87;
const CODE_FENCED: u16 = 88;
const CODE_NOTHING: u16 = 89;
const CODE_NO_LOG: u16 = 90;
const CODE_ECHO: u16 = 91;

/// The code of a request on the wire.
const fn code_of(question: Question) -> u16 {
    match question {
        Question::Attach => 64,
        Question::Superblock => 65,
        Question::Promise => 66,
        Question::Join => 67,
        Question::JoinAt => 68,
        Question::Verify => 69,
        Question::ReadLog => 70,
        Question::Beat => 71,
    }
}

fn question_of(code: u16) -> Option<Question> {
    (Question::ALL.into_iter()).find(|question| code_of(*question) == code)
}

/// Whether an answer of this code belongs to the request.
pub const fn fits(question: Question, code: u16) -> bool {
    match code {
        CODE_FENCED | CODE_NOTHING | CODE_NO_LOG => true,
        CODE_ATTACHED => matches!(question, Question::Attach),
        CODE_NAMED => matches!(question, Question::Superblock),
        CODE_PROMISED => matches!(question, Question::Promise),
        CODE_JOINING => matches!(question, Question::Join),
        CODE_HAS_CUT => matches!(question, Question::JoinAt),
        CODE_VERIFIED | CODE_NOT_WHOLE => matches!(question, Question::Verify),
        CODE_LOG_DATA => matches!(question, Question::ReadLog),
        CODE_ECHO => matches!(question, Question::Beat),
        _ => false,
    }
}

/// A request; `None`: the message is none.
pub fn request(about: About, message: &Message) -> Option<Encoded> {
    let meta = match message {
        Message::Attach | Message::Join => bytes(&log_meta(about)),
        Message::Superblock(change) => bytes(&change_meta(about, change)),
        Message::Promise { floor: point }
        | Message::ReadLog { after: point }
        | Message::Verify { up_to: point } => bytes(&point_meta(about, *point)),
        Message::JoinAt(cut) => bytes(&cut_meta(about, cut)),
        Message::Beat { number, lease_ms } => bytes(&beat_meta(about, *number, *lease_ms)),
        _ => return None,
    };
    Some((code_of(Question::of(message)?), meta))
}

/// What a request says.
pub fn read_request(code: u16, meta: &[u8]) -> Result<(About, Message), MessageError> {
    let question = question_of(code).ok_or(MessageError::Code(code))?;
    Ok(match question {
        Question::Attach => (read_log(code, meta)?, Message::Attach),
        Question::Join => (read_log(code, meta)?, Message::Join),
        Question::Superblock => {
            let (about, change) = read_change(code, meta)?;
            (about, Message::Superblock(change))
        }
        Question::Promise => {
            let (about, floor) = read_point(code, meta)?;
            (about, Message::Promise { floor })
        }
        Question::ReadLog => {
            let (about, after) = read_point(code, meta)?;
            (about, Message::ReadLog { after })
        }
        Question::Verify => {
            let (about, up_to) = read_point(code, meta)?;
            (about, Message::Verify { up_to })
        }
        Question::JoinAt => {
            let (about, cut) = read_cut(code, meta)?;
            (about, Message::JoinAt(cut))
        }
        Question::Beat => read_beat(code, meta)?,
    })
}

/// An answer; `None`: the message is none, or says of more than [`JOIN_POINTS_MAX`] points.
pub fn answer(about: About, answer: &Answer) -> Option<Encoded> {
    let message = match answer {
        Answer::Nothing => return Some((CODE_NOTHING, bytes(&log_meta(about)))),
        Answer::NoLog => return Some((CODE_NO_LOG, bytes(&log_meta(about)))),
        Answer::Message(message) => message,
    };
    Some(match message {
        Message::Attached(copy) => (CODE_ATTACHED, bytes(&copy_meta(about, copy))),
        Message::Promised(copy) => (CODE_PROMISED, bytes(&copy_meta(about, copy))),
        Message::Named { number } => (CODE_NAMED, bytes(&number_meta(about, *number))),
        Message::Fenced { promised } => (CODE_FENCED, bytes(&number_meta(about, *promised))),
        Message::Echo { number } => (CODE_ECHO, bytes(&number_meta(about, *number))),
        Message::HasCut(cut) => (CODE_HAS_CUT, bytes(&cut_meta(about, cut))),
        Message::Verified { up_to } => (CODE_VERIFIED, bytes(&point_meta(about, *up_to))),
        Message::NotWhole { up_to } => (CODE_NOT_WHOLE, bytes(&point_meta(about, *up_to))),
        Message::LogData(span) => (CODE_LOG_DATA, bytes(&span_meta(about, span))),
        Message::Joining { points } if points.len() <= JOIN_POINTS_MAX => {
            let mut meta = bytes(&log_meta(about));
            for point in points {
                let point = JoinPoint {
                    position: point.position.into(),
                    chain: point.chain.into(),
                };
                meta.extend_from_slice(point.as_bytes());
            }
            (CODE_JOINING, meta)
        }
        _ => return None,
    })
}

/// What an answer says.
pub fn read_answer(code: u16, meta: &[u8]) -> Result<(About, Answer), MessageError> {
    let (about, message) = match code {
        CODE_NOTHING => return Ok((read_log(code, meta)?, Answer::Nothing)),
        CODE_NO_LOG => return Ok((read_log(code, meta)?, Answer::NoLog)),
        CODE_ATTACHED => {
            let (about, copy) = read_copy(code, meta)?;
            (about, Message::Attached(copy))
        }
        CODE_PROMISED => {
            let (about, copy) = read_copy(code, meta)?;
            (about, Message::Promised(copy))
        }
        CODE_NAMED => {
            let (about, number) = read_number(code, meta)?;
            (about, Message::Named { number })
        }
        CODE_FENCED => {
            let (about, promised) = read_number(code, meta)?;
            (about, Message::Fenced { promised })
        }
        CODE_ECHO => {
            let (about, number) = read_number(code, meta)?;
            (about, Message::Echo { number })
        }
        CODE_HAS_CUT => {
            let (about, cut) = read_cut(code, meta)?;
            (about, Message::HasCut(cut))
        }
        CODE_VERIFIED => {
            let (about, up_to) = read_point(code, meta)?;
            (about, Message::Verified { up_to })
        }
        CODE_NOT_WHOLE => {
            let (about, up_to) = read_point(code, meta)?;
            (about, Message::NotWhole { up_to })
        }
        CODE_LOG_DATA => {
            let (about, span) = read_span(code, meta)?;
            (about, Message::LogData(span))
        }
        CODE_JOINING => read_joining(meta)?,
        _ => return Err(MessageError::Code(code)),
    };
    Ok((about, Answer::Message(message)))
}

/// The meta of an Open.
pub fn open(about: About) -> Vec<u8> {
    bytes(&log_meta(about))
}

/// Which log an Open names; its epoch is that of the frame.
pub fn read_open(epoch: u64, meta: &[u8]) -> Result<LogName, MessageError> {
    let found = read_log(0, meta)?;
    let log = found.log;
    let expected = About { log, epoch };
    if found != expected {
        return Err(MessageError::About { found, expected });
    }
    Ok(log)
}

/// The span that an Append brings: where the one before ended, where it lies, its length in bytes, and its marks.
pub fn span_of(
    follows: u64,
    position: u64,
    data_bytes: usize,
    marks: &AppendMarks,
) -> Result<SpanId, MessageError> {
    let blocks = (data_bytes / BLOCK_BYTES) as u32;
    let end = position.checked_add(u64::from(blocks));
    let end = end.ok_or(MessageError::Span {
        start: follows,
        end: u64::MAX,
        blocks,
        bytes: data_bytes,
    })?;
    let span = SpanId {
        start: Point {
            position: follows,
            chain: marks.chain_before.get(),
        },
        end: Point {
            position: end,
            chain: marks.chain.get(),
        },
        blocks,
        incarnation: marks.incarnation.get(),
        evidence: marks.durable.get(),
    };
    check_span(&span, data_bytes)?;
    Ok(span)
}

/// The marks of a span, with what is committed by now, as far as the span may say so.
pub fn marks_of(span: &SpanId, committed: u64) -> AppendMarks {
    AppendMarks {
        durable: span.evidence.into(),
        committed: committed.min(span.evidence).into(),
        chain_before: span.start.chain.into(),
        chain: span.end.chain.into(),
        incarnation: span.incarnation.into(),
        reserved: [0; 24],
    }
}

/// Whether the numbers of a span fit one another, and so many bytes of data.
pub fn check_span(span: &SpanId, data_bytes: usize) -> Result<(), MessageError> {
    let blocks = span.blocks as usize;
    let lies_at = span.end.position.checked_sub(u64::from(span.blocks));
    let is_good = (1..=WIRE_PARTS_MAX).contains(&blocks)
        && data_bytes == blocks * BLOCK_BYTES
        && lies_at.is_some_and(|at| at >= span.start.position);
    if is_good {
        return Ok(());
    }
    Err(MessageError::Span {
        start: span.start.position,
        end: span.end.position,
        blocks: span.blocks,
        bytes: data_bytes,
    })
}

fn bytes(meta: &(impl IntoBytes + Immutable)) -> Vec<u8> {
    meta.as_bytes().to_vec()
}

fn read<T: FromBytes>(code: u16, meta: &[u8]) -> Result<T, MessageError> {
    let bytes = meta.len();
    T::read_from_bytes(meta).map_err(|_| MessageError::Length { code, bytes })
}

fn about(volume: [u8; 16], number: U64, epoch: U64) -> About {
    About {
        log: LogName {
            volume,
            number: number.get(),
        },
        epoch: epoch.get(),
    }
}

fn point(position: U64, chain: U64) -> Point {
    Point {
        position: position.get(),
        chain: chain.get(),
    }
}

/// The flags, none of which is outside `known`.
fn flags(code: u16, flags: U32, known: u32, reserved: [u8; 4]) -> Result<u32, MessageError> {
    let flags = flags.get();
    if flags & !known != 0 || reserved != [0; 4] {
        return Err(MessageError::Reserved(code));
    }
    Ok(flags)
}

const fn flag(is_set: bool, flag: u32) -> u32 {
    if is_set { flag } else { 0 }
}

fn log_meta(about: About) -> LogMeta {
    LogMeta {
        volume: about.log.volume,
        log: about.log.number.into(),
        epoch: about.epoch.into(),
    }
}

fn read_log(code: u16, meta: &[u8]) -> Result<About, MessageError> {
    let meta: LogMeta = read(code, meta)?;
    Ok(about(meta.volume, meta.log, meta.epoch))
}

fn number_meta(about: About, number: u64) -> NumberMeta {
    NumberMeta {
        volume: about.log.volume,
        log: about.log.number.into(),
        epoch: about.epoch.into(),
        number: number.into(),
    }
}

fn read_number(code: u16, meta: &[u8]) -> Result<(About, u64), MessageError> {
    let meta: NumberMeta = read(code, meta)?;
    Ok((about(meta.volume, meta.log, meta.epoch), meta.number.get()))
}

fn point_meta(about: About, point: Point) -> PointMeta {
    PointMeta {
        volume: about.log.volume,
        log: about.log.number.into(),
        epoch: about.epoch.into(),
        position: point.position.into(),
        chain: point.chain.into(),
    }
}

fn read_point(code: u16, meta: &[u8]) -> Result<(About, Point), MessageError> {
    let meta: PointMeta = read(code, meta)?;
    Ok((
        about(meta.volume, meta.log, meta.epoch),
        point(meta.position, meta.chain),
    ))
}

fn beat_meta(about: About, number: u64, lease_ms: u32) -> BeatMeta {
    BeatMeta {
        volume: about.log.volume,
        log: about.log.number.into(),
        epoch: about.epoch.into(),
        number: number.into(),
        lease_ms: lease_ms.into(),
        reserved: [0; 4],
    }
}

/// A member that echoed a longer lease than there is would hold up takeovers for as long.
fn read_beat(code: u16, meta: &[u8]) -> Result<(About, Message), MessageError> {
    let meta: BeatMeta = read(code, meta)?;
    flags(code, 0.into(), 0, meta.reserved)?;
    let (number, lease_ms) = (meta.number.get(), meta.lease_ms.get());
    if lease_ms > LEASE_MS_MAX {
        return Err(MessageError::Unexpected(
            "a beat with a longer lease than any",
        ));
    }
    Ok((
        about(meta.volume, meta.log, meta.epoch),
        Message::Beat { number, lease_ms },
    ))
}

fn change_meta(about: About, change: &Change) -> ChangeMeta {
    ChangeMeta {
        volume: about.log.volume,
        log: about.log.number.into(),
        epoch: about.epoch.into(),
        number: change.number.into(),
        tail_position: change.tail.position.into(),
        tail_chain: change.tail.chain.into(),
        sync_points: change.sync_points.into(),
        incarnation: change.incarnation.into(),
        opens_at: change.opens_at.into(),
        flags: flag(change.is_unflushed, FLAG_UNFLUSHED).into(),
        reserved: [0; 4],
    }
}

fn read_change(code: u16, meta: &[u8]) -> Result<(About, Change), MessageError> {
    let meta: ChangeMeta = read(code, meta)?;
    let flags = flags(code, meta.flags, FLAG_UNFLUSHED, meta.reserved)?;
    let change = Change {
        number: meta.number.get(),
        tail: point(meta.tail_position, meta.tail_chain),
        sync_points: meta.sync_points.get(),
        incarnation: meta.incarnation.get(),
        opens_at: meta.opens_at.get(),
        is_unflushed: flags & FLAG_UNFLUSHED != 0,
    };
    Ok((about(meta.volume, meta.log, meta.epoch), change))
}

fn cut_meta(about: About, cut: &Cut) -> CutMeta {
    let change = change_meta(about, &cut.change);
    CutMeta {
        volume: change.volume,
        log: change.log,
        epoch: change.epoch,
        at_position: cut.at.position.into(),
        at_chain: cut.at.chain.into(),
        void_before: cut.void_before.into(),
        joined: cut.joined.into(),
        number: change.number,
        tail_position: change.tail_position,
        tail_chain: change.tail_chain,
        sync_points: change.sync_points,
        incarnation: change.incarnation,
        opens_at: change.opens_at,
        flags: change.flags,
        reserved: [0; 4],
    }
}

fn read_cut(code: u16, meta: &[u8]) -> Result<(About, Cut), MessageError> {
    let meta: CutMeta = read(code, meta)?;
    let flags = flags(code, meta.flags, FLAG_UNFLUSHED, meta.reserved)?;
    let cut = Cut {
        at: point(meta.at_position, meta.at_chain),
        void_before: meta.void_before.get(),
        joined: meta.joined.get(),
        change: Change {
            number: meta.number.get(),
            tail: point(meta.tail_position, meta.tail_chain),
            sync_points: meta.sync_points.get(),
            incarnation: meta.incarnation.get(),
            opens_at: meta.opens_at.get(),
            is_unflushed: flags & FLAG_UNFLUSHED != 0,
        },
    };
    Ok((about(meta.volume, meta.log, meta.epoch), cut))
}

fn copy_meta(about: About, copy: &Copy) -> CopyMeta {
    let flags = flag(copy.is_unflushed, FLAG_UNFLUSHED) | flag(copy.is_whole, FLAG_WHOLE);
    CopyMeta {
        volume: about.log.volume,
        log: about.log.number.into(),
        epoch: about.epoch.into(),
        promised: copy.promised.into(),
        head_position: copy.head.position.into(),
        head_chain: copy.head.chain.into(),
        tail_position: copy.tail.position.into(),
        tail_chain: copy.tail.chain.into(),
        sync_points: copy.sync_points.into(),
        incarnation: copy.incarnation.into(),
        joined: copy.joined.into(),
        flags: flags.into(),
        lease_left_ms: copy.lease_left_ms.into(),
    }
}

fn read_copy(code: u16, meta: &[u8]) -> Result<(About, Copy), MessageError> {
    let meta: CopyMeta = read(code, meta)?;
    let known = FLAG_UNFLUSHED | FLAG_WHOLE;
    let flags = flags(code, meta.flags, known, [0; 4])?;
    let copy = Copy {
        promised: meta.promised.get(),
        head: point(meta.head_position, meta.head_chain),
        tail: point(meta.tail_position, meta.tail_chain),
        sync_points: meta.sync_points.get(),
        incarnation: meta.incarnation.get(),
        is_unflushed: flags & FLAG_UNFLUSHED != 0,
        joined: meta.joined.get(),
        is_whole: flags & FLAG_WHOLE != 0,
        lease_left_ms: meta.lease_left_ms.get(),
    };
    Ok((about(meta.volume, meta.log, meta.epoch), copy))
}

fn span_meta(about: About, span: &SpanId) -> SpanMeta {
    SpanMeta {
        volume: about.log.volume,
        log: about.log.number.into(),
        epoch: about.epoch.into(),
        start_position: span.start.position.into(),
        start_chain: span.start.chain.into(),
        end_position: span.end.position.into(),
        end_chain: span.end.chain.into(),
        incarnation: span.incarnation.into(),
        evidence: span.evidence.into(),
        blocks: span.blocks.into(),
        reserved: [0; 4],
    }
}

fn read_span(code: u16, meta: &[u8]) -> Result<(About, SpanId), MessageError> {
    let meta: SpanMeta = read(code, meta)?;
    flags(code, 0.into(), 0, meta.reserved)?;
    let span = SpanId {
        start: point(meta.start_position, meta.start_chain),
        end: point(meta.end_position, meta.end_chain),
        blocks: meta.blocks.get(),
        incarnation: meta.incarnation.get(),
        evidence: meta.evidence.get(),
    };
    Ok((about(meta.volume, meta.log, meta.epoch), span))
}

fn read_joining(meta: &[u8]) -> Result<(About, Message), MessageError> {
    let bytes = meta.len();
    let code = CODE_JOINING;
    let length = MessageError::Length { code, bytes };
    let (log, points) = meta.split_at_checked(size_of::<LogMeta>()).ok_or(length)?;
    let points = <[JoinPoint]>::ref_from_bytes(points).map_err(|_| length)?;
    if points.len() > JOIN_POINTS_MAX {
        return Err(length);
    }
    let points = points.iter().map(|one| point(one.position, one.chain));
    let points = points.collect();
    Ok((read_log(code, log)?, Message::Joining { points }))
}

const _: () = assert!(
    size_of::<LogMeta>() + JOIN_POINTS_MAX * size_of::<JoinPoint>() <= WIRE_META_BYTES_MAX,
    "all points of a joiner fit into one answer"
);

#[cfg(test)]
mod tests;
