//! The transmission phase of NBD: requests in, replies out.
//!
//! A request becomes one or several *pieces*, each a request of the core: data is cut at multiples
//! of [`REQUEST_BYTES_MAX`] of the volume's offset. Its state is a slot of a table that is made
//! once; [`RequestId`] holds slot, piece and the slot's generation, so a completion is found
//! without a search.
//!
//! Invariants:
//! 1. A request is taken only while there is a free slot, fewer than [`PIECES_MAX`] pieces and less
//!    than [`BYTES_MAX`] of data in flight or waiting to be sent. So both are bounded by that
//!    limit plus one request of the largest kind.
//! 2. A slot is free again once its reply is whole, which is when its last piece completes.
//! 3. A client's mistake in a request costs that request; a mistake in the framing ends the
//!    connection, because what follows could be anything.
//! 4. The payload of a refused write is received and dropped, and the refusal sent after it.
//!
//! Replies: with structured replies every piece of a read is a chunk of its own, sent as it
//! completes. Without them, or if the client asks for one piece, the reply waits for all pieces.
//! A success without data is a simple reply in both cases: it is shorter, and allowed.

use hdcs_core::buf::{Buf, BufMut};
use hdcs_core::error::RequestError;
use hdcs_core::io::{Reply, Request, RequestId, SectorRange};
use hdcs_core::limits::{PROTOCOL_REQUEST_BYTES_MAX, REQUEST_BYTES_MAX, SECTOR_BYTES};
use zerocopy::FromBytes;

use super::contexts::Contexts;
use super::handshake::Agreement;
use super::inbox::Inbox;
use super::output::Output;
use super::protocol::{
    Errno, REQUEST_HEADER_BYTES, REQUEST_MAGIC, RequestHeader, chunk, chunk_header, command,
    command_flag, simple_reply,
};
use crate::frontends::{Export, Host, Owed};

/// Requests of one connection in flight at most: twice the deepest queue that clients commonly
/// use, and a quarter of what one volume takes, so that one connection does not starve the others.
const SLOTS_MAX: usize = 256;
/// Pieces of one connection in flight below which another request is taken.
pub const PIECES_MAX: usize = 256;
/// Bytes of one connection in flight, or waiting to be sent, below which another request is taken:
/// enough to keep a fast network busy, little beside a node's buffer pool.
pub const BYTES_MAX: usize = 16 << 20;
/// The longest read that is answered in one chunk on the client's demand: its data is held until
/// all of it is there. The specification asks for 64 KiB at least.
const UNFRAGMENTED_BYTES_MAX: usize = REQUEST_BYTES_MAX;
/// The least rest of a payload that is worth a receive of its own, straight into its buffer. A
/// shorter one comes with the requests behind it and is copied.
const DIRECT_BYTES_MIN: usize = 32 << 10;

const _: () = assert!(SLOTS_MAX <= 1 << 16);
const _: () = assert!(SLOTS_MAX <= hdcs_core::limits::VOLUME_REQUESTS_MAX / 4);

/// What follows from the bytes so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// More bytes are needed.
    More,
    /// A completion, a buffer or the sending of replies must come first.
    Blocked,
    /// The client said goodbye, or what it sent is not the protocol: answer what is in flight, then
    /// close.
    Close,
}

/// What a slot answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A chunk for each piece.
    ReadFragmented,
    /// One reply when all is there.
    ReadWhole,
    /// A chunk for each context.
    Status { contexts: Contexts, one: bool },
    /// A reply without data, once all of the payload is written.
    Write,
    /// A reply without data.
    Plain,
}

/// One request in flight.
#[derive(Debug)]
struct Slot {
    generation: u32,
    kind: Kind,
    cookie: u64,
    offset: u64,
    length: u32,
    /// Pieces that are not completed, those not yet submitted included.
    pieces: u16,
    fua: bool,
    error: Option<RequestError>,
    /// Pieces of a [`Kind::ReadWhole`], in order.
    data: Vec<Option<Buf>>,
}

/// A write whose payload is still coming.
#[derive(Debug)]
struct Payload {
    slot: u16,
    piece: u16,
    /// Where the present piece is gathered, once there is a buffer, and how much of it is there.
    buf: Option<BufMut>,
    filled: usize,
}

/// A refused write whose payload is still coming.
#[derive(Debug)]
struct Refused {
    cookie: u64,
    bytes: usize,
    errno: Errno,
    reason: &'static str,
}

/// A request that is not carried out, and why.
type Refusal = (Errno, &'static str);

/// The state of the transmission phase.
#[derive(Debug)]
pub struct Transmission {
    export: Export,
    structured: bool,
    contexts: Contexts,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    pieces_in_flight: usize,
    bytes_in_flight: usize,
    payload: Option<Payload>,
    refused: Option<Refused>,
    /// Parts of payloads that were begun: tells one from the next.
    parts: u64,
    stopping: bool,
}

impl Transmission {
    /// Begin as agreed.
    pub fn new(agreement: Agreement) -> Self {
        let slot = |_| Slot {
            generation: 0,
            kind: Kind::Plain,
            cookie: 0,
            offset: 0,
            length: 0,
            pieces: 0,
            fua: false,
            error: None,
            data: Vec::new(),
        };
        Self {
            export: agreement.export,
            structured: agreement.structured,
            contexts: agreement.contexts,
            slots: (0..SLOTS_MAX).map(slot).collect(),
            free: (0..SLOTS_MAX as u16).rev().collect(),
            pieces_in_flight: 0,
            bytes_in_flight: 0,
            payload: None,
            refused: None,
            parts: 0,
            stopping: false,
        }
    }

    /// What the client has to send before anything else can be taken from it.
    pub fn owed(&self) -> Owed {
        if self.payload.is_none() && self.refused.is_none() {
            return Owed::Nothing;
        }
        Owed::Data(self.parts)
    }

    /// How much of a payload has to be in the inbox before it gets a buffer; `None` if none is
    /// waiting for that.
    pub fn wanted(&self) -> Option<usize> {
        let payload = self.payload.as_ref()?;
        let slot = &self.slots[usize::from(payload.slot)];
        let bytes = slot.piece(payload.piece).bytes();
        payload.buf.is_none().then(|| bytes.min(DIRECT_BYTES_MIN))
    }

    /// The export that is open.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Requests submitted and not completed.
    pub fn in_flight(&self) -> usize {
        self.pieces_in_flight
    }

    /// Take no more requests. What comes is not even refused: a client that reconnects sends it
    /// again, and sees a pause, while most hand a refusal on as an error.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Take what the inbox holds.
    pub fn advance(&mut self, inbox: &mut Inbox, host: &mut dyn Host, output: &mut Output) -> Step {
        let mut queued_bytes = None;
        loop {
            if let Some(refused) = &mut self.refused {
                let dropped = refused.bytes.min(inbox.unread().len());
                inbox.consume(dropped);
                let part = refused.bytes / REQUEST_BYTES_MAX;
                refused.bytes -= dropped;
                self.parts += u64::from(part != refused.bytes / REQUEST_BYTES_MAX);
                if refused.bytes > 0 {
                    return Step::More;
                }
                let (cookie, refusal) = (refused.cookie, (refused.errno, refused.reason));
                self.refused = None;
                self.refuse(cookie, refusal, output);
            }
            if self.payload.is_some() {
                let step = self.gather(inbox, host);
                if self.payload.is_some() {
                    return step;
                }
            }
            let Ok((header, _)) = RequestHeader::read_from_prefix(inbox.unread()) else {
                return Step::More;
            };
            if self.stopping {
                return Step::Close;
            }
            let queued = *queued_bytes.get_or_insert_with(|| output.queued_bytes());
            if self.free.is_empty()
                || self.pieces_in_flight >= PIECES_MAX
                || self.bytes_in_flight + queued >= BYTES_MAX
            {
                return Step::Blocked;
            }
            inbox.consume(REQUEST_HEADER_BYTES);
            if header.magic.get() != REQUEST_MAGIC || !self.take(&header, host, output) {
                return Step::Close;
            }
        }
    }

    /// The rest of a payload's buffer, if it is worth a receive of its own.
    pub fn direct(&mut self) -> Option<&mut [u8]> {
        let payload = self.payload.as_mut()?;
        let rest = payload.buf.as_mut()?.get_mut(payload.filled..)?;
        (rest.len() >= DIRECT_BYTES_MIN).then_some(rest)
    }

    /// So many bytes came into the place of [`Self::direct`].
    pub fn direct_received(&mut self, bytes: usize) {
        let payload = self.payload.as_mut().expect("a payload is being received");
        payload.filled += bytes;
    }

    /// A request that was submitted ended.
    pub fn completed(
        &mut self,
        id: RequestId,
        result: Result<Reply, RequestError>,
        output: &mut Output,
    ) {
        let (index, piece) = (id.0 as u16, (id.0 >> 16) as u16);
        let slot = &mut self.slots[usize::from(index)];
        assert!(
            slot.generation == (id.0 >> 32) as u32 && slot.pieces > 0,
            "a completion names a request in flight"
        );
        slot.pieces -= 1;
        self.pieces_in_flight -= 1;
        let last = slot.pieces == 0;
        match result {
            Ok(reply) => slot.succeeded(piece, reply, output),
            Err(error) => slot.failed(piece, error, output),
        }
        if last {
            slot.finish(self.structured, output);
            slot.generation = slot.generation.wrapping_add(1);
            self.bytes_in_flight -= slot.data_bytes();
            self.free.push(index);
        }
    }

    /// Carry out one request; `false` ends the connection.
    fn take(&mut self, header: &RequestHeader, host: &mut dyn Host, output: &mut Output) -> bool {
        let (cookie, length) = (header.cookie.get(), header.length.get());
        let checked = self.check(header);
        match (header.kind.get(), checked) {
            (command::DISC, _) => return false,
            (command::WRITE, _) if length as usize > PROTOCOL_REQUEST_BYTES_MAX => return false,
            (command::WRITE, Err((errno, reason))) => {
                self.parts += 1;
                self.refused = Some(Refused {
                    cookie,
                    bytes: length as usize,
                    errno,
                    reason,
                });
            }
            (command::WRITE, Ok(())) => {
                let slot = self.open(header, Kind::Write, piece_count(header));
                self.payload = Some(Payload {
                    slot,
                    piece: 0,
                    buf: None,
                    filled: 0,
                });
            }
            (_, Err(refusal)) => self.refuse(cookie, refusal, output),
            (command::READ, Ok(())) => self.read(header, host),
            (command::BLOCK_STATUS, Ok(())) => self.status(header, host),
            (kind, Ok(())) => self.plain(kind, header, host),
        }
        true
    }

    /// Whether a request makes sense, by itself and for this export.
    fn check(&self, header: &RequestHeader) -> Result<(), Refusal> {
        use command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
        let (kind, flags) = (header.kind.get(), header.flags.get());
        let (offset, length) = (header.offset.get(), u64::from(header.length.get()));
        let flags_allowed = match kind {
            command::READ if self.structured => FUA | DF,
            command::READ | command::WRITE | command::TRIM | command::FLUSH | command::CACHE => FUA,
            command::WRITE_ZEROES => FUA | NO_HOLE,
            command::BLOCK_STATUS => FUA | REQ_ONE,
            _ => return Err((Errno::Inval, "unknown command")),
        };
        if flags & !flags_allowed != 0 {
            return Err((Errno::Inval, "a flag does not apply to this command"));
        }
        let writes = [command::WRITE, command::WRITE_ZEROES, command::TRIM];
        if self.export.read_only && writes.contains(&kind) {
            return Err((Errno::Perm, "the volume is read-only"));
        }
        if kind == command::FLUSH {
            let zero = offset == 0 && length == 0;
            return zero
                .then_some(())
                .ok_or((Errno::Inval, "offset and length of a flush must be zero"));
        }
        if kind == command::BLOCK_STATUS && self.contexts == Contexts::default() {
            return Err((Errno::Inval, "no metadata context was selected"));
        }
        let sector = SECTOR_BYTES as u64;
        if length == 0 || !offset.is_multiple_of(sector) || !length.is_multiple_of(sector) {
            let reason = "offset and length must be multiples of 512, and length not zero";
            return Err((Errno::Inval, reason));
        }
        let end = offset.checked_add(length);
        if end.is_none_or(|end| end > self.export.bytes) {
            let grows = [command::WRITE, command::WRITE_ZEROES].contains(&kind);
            let errno = if grows { Errno::NoSpace } else { Errno::Inval };
            return Err((errno, "beyond the end of the volume"));
        }
        if kind == command::READ {
            if length as usize > PROTOCOL_REQUEST_BYTES_MAX {
                return Err((Errno::Inval, "longer than 32 MiB"));
            }
            if flags & DF != 0 && length as usize > UNFRAGMENTED_BYTES_MAX {
                return Err((Errno::Overflow, "too long to be answered in one piece"));
            }
        }
        Ok(())
    }

    /// Occupy a slot.
    fn open(&mut self, header: &RequestHeader, kind: Kind, pieces: u16) -> u16 {
        let index = self.free.pop().expect("checked before a request is taken");
        let slot = &mut self.slots[usize::from(index)];
        slot.kind = kind;
        slot.cookie = header.cookie.get();
        slot.offset = header.offset.get();
        slot.length = header.length.get();
        slot.fua = header.flags.get() & command_flag::FUA != 0;
        slot.pieces = pieces;
        slot.error = None;
        if kind == Kind::ReadWhole {
            slot.data.clear();
            slot.data.resize(usize::from(pieces), None);
        }
        self.bytes_in_flight += slot.data_bytes();
        index
    }

    fn submit(&mut self, slot: u16, piece: u16, request: Request, host: &mut dyn Host) {
        let generation = self.slots[usize::from(slot)].generation;
        let id = u64::from(generation) << 32 | u64::from(piece) << 16 | u64::from(slot);
        self.pieces_in_flight += 1;
        host.submit(self.export.number, RequestId(id), request);
    }

    fn read(&mut self, header: &RequestHeader, host: &mut dyn Host) {
        let whole = !self.structured || header.flags.get() & command_flag::DF != 0;
        let kind = if whole {
            Kind::ReadWhole
        } else {
            Kind::ReadFragmented
        };
        let pieces = piece_count(header);
        let index = self.open(header, kind, pieces);
        for piece in 0..pieces {
            let range = self.slots[usize::from(index)].piece(piece);
            self.submit(index, piece, Request::Read { range }, host);
        }
    }

    fn status(&mut self, header: &RequestHeader, host: &mut dyn Host) {
        let contexts = self.contexts;
        let one = header.flags.get() & command_flag::REQ_ONE != 0;
        let pieces = contexts.iter().count() as u16;
        let index = self.open(header, Kind::Status { contexts, one }, pieces);
        let range = self.slots[usize::from(index)].range();
        for (piece, context) in contexts.iter().enumerate() {
            let kind = context.kind();
            self.submit(index, piece as u16, Request::Extents { range, kind }, host);
        }
    }

    /// The commands without data in either direction.
    fn plain(&mut self, kind: u16, header: &RequestHeader, host: &mut dyn Host) {
        let index = self.open(header, Kind::Plain, 1);
        let slot = &self.slots[usize::from(index)];
        let (range, fua) = (slot.range(), slot.fua);
        let request = match kind {
            command::FLUSH => Request::Flush,
            command::TRIM => Request::Discard { range, fua },
            command::CACHE => Request::Promote { range },
            command::WRITE_ZEROES => Request::WriteZeroes {
                range,
                fua,
                no_hole: header.flags.get() & command_flag::NO_HOLE != 0,
            },
            _ => unreachable!("check() knows every other command"),
        };
        self.submit(index, 0, request, host);
    }

    /// Move a write's payload into buffers, and submit each piece as it is whole.
    fn gather(&mut self, inbox: &mut Inbox, host: &mut dyn Host) -> Step {
        loop {
            if let Some(wanted) = self.wanted()
                && inbox.unread().len() < wanted
            {
                return Step::More;
            }
            let Some(payload) = &mut self.payload else {
                return Step::More;
            };
            let slot = &self.slots[usize::from(payload.slot)];
            let range = slot.piece(payload.piece);
            let mut buf = match payload.buf.take() {
                Some(buf) => buf,
                None => match host.alloc(range) {
                    Some(buf) => buf,
                    None => return Step::Blocked,
                },
            };
            let unread = inbox.unread();
            let copied = unread.len().min(buf.len() - payload.filled);
            buf[payload.filled..payload.filled + copied].copy_from_slice(&unread[..copied]);
            inbox.consume(copied);
            payload.filled += copied;
            if payload.filled < buf.len() {
                payload.buf = Some(buf);
                return Step::More;
            }
            let (index, piece, fua) = (payload.slot, payload.piece, slot.fua);
            payload.piece += 1;
            payload.filled = 0;
            if range.end() == slot.range().end() {
                self.payload = None;
            }
            let data = buf.freeze();
            self.parts += 1;
            self.submit(index, piece, Request::Write { range, data, fua }, host);
        }
    }

    fn refuse(&self, cookie: u64, (errno, reason): Refusal, output: &mut Output) {
        error_reply(cookie, errno, reason, self.structured, output);
    }
}

impl Slot {
    fn range(&self) -> SectorRange {
        let sector = SECTOR_BYTES as u64;
        SectorRange::new(self.offset / sector, u64::from(self.length) / sector)
    }

    /// The part of the request's range that its `piece` covers.
    fn piece(&self, piece: u16) -> SectorRange {
        let sectors = (REQUEST_BYTES_MAX / SECTOR_BYTES) as u64;
        let start = (self.range().start / sectors + u64::from(piece)) * sectors;
        SectorRange::new(start, sectors).intersect(self.range())
    }

    /// Bytes of buffers that the request occupies.
    fn data_bytes(&self) -> usize {
        match self.kind {
            Kind::ReadFragmented | Kind::ReadWhole | Kind::Write => self.length as usize,
            Kind::Plain | Kind::Status { .. } => 0,
        }
    }

    fn succeeded(&mut self, piece: u16, reply: Reply, output: &mut Output) {
        let done = self.pieces == 0;
        match (self.kind, reply) {
            (Kind::ReadFragmented, Reply::Data(data)) => {
                let range = self.piece(piece);
                assert_eq!(data.len(), range.bytes(), "a read returns what was asked");
                data_chunk(self.cookie, done, range.byte_offset(), data.len(), output);
                output.data(data);
            }
            (Kind::ReadWhole, Reply::Data(data)) => {
                let range = self.piece(piece);
                assert_eq!(data.len(), range.bytes(), "a read returns what was asked");
                self.data[usize::from(piece)] = Some(data);
            }
            (Kind::Status { contexts, one }, Reply::Extents(extents)) => {
                let context = contexts.iter().nth(usize::from(piece));
                let context = context.expect("one piece for each context");
                let payload = context.describe(self.range(), &extents, one);
                let bytes = payload.len() as u32;
                let done = done && self.error.is_none();
                let header = chunk_header(self.cookie, done, chunk::BLOCK_STATUS, bytes);
                output.bytes(&header);
                output.bytes(&payload);
            }
            (Kind::Write | Kind::Plain, Reply::Done) => {}
            (kind, reply) => panic!("{reply:?} does not answer {kind:?}"),
        }
    }

    fn failed(&mut self, piece: u16, error: RequestError, output: &mut Output) {
        self.error.get_or_insert(error);
        if self.kind == Kind::ReadFragmented {
            let done = self.pieces == 0;
            let offset = self.piece(piece).byte_offset();
            let reason = error.to_string();
            error_chunk(
                self.cookie,
                done,
                errno(error),
                &reason,
                Some(offset),
                output,
            );
        }
    }

    /// Send what follows the last completion, for the kinds that wait for it.
    fn finish(&mut self, structured: bool, output: &mut Output) {
        match (self.kind, self.error) {
            (Kind::ReadFragmented, _) | (Kind::Status { .. }, None) => {}
            (_, Some(error)) => {
                self.data.clear();
                let reason = error.to_string();
                error_reply(self.cookie, errno(error), &reason, structured, output);
            }
            (Kind::Write | Kind::Plain, None) => output.bytes(&simple_reply(self.cookie, 0)),
            (Kind::ReadWhole, None) => {
                if structured {
                    data_chunk(self.cookie, true, self.offset, self.length as usize, output);
                } else {
                    output.bytes(&simple_reply(self.cookie, 0));
                }
                for data in self.data.drain(..) {
                    output.data(data.expect("every piece succeeded"));
                }
            }
        }
    }
}

/// Number of pieces of a request whose range was checked.
fn piece_count(header: &RequestHeader) -> u16 {
    let (offset, length) = (header.offset.get(), u64::from(header.length.get()));
    let bytes = REQUEST_BYTES_MAX as u64;
    ((offset + length).div_ceil(bytes) - offset / bytes) as u16
}

fn data_chunk(cookie: u64, done: bool, offset: u64, bytes: usize, output: &mut Output) {
    let payload_bytes = (8 + bytes) as u32;
    let mut head = [0; 28];
    head[..20].copy_from_slice(&chunk_header(
        cookie,
        done,
        chunk::OFFSET_DATA,
        payload_bytes,
    ));
    head[20..].copy_from_slice(&offset.to_be_bytes());
    output.bytes(&head);
}

fn error_reply(cookie: u64, errno: Errno, reason: &str, structured: bool, output: &mut Output) {
    if structured {
        error_chunk(cookie, true, errno, reason, None, output);
    } else {
        output.bytes(&simple_reply(cookie, errno as u32));
    }
}

fn error_chunk(
    cookie: u64,
    done: bool,
    errno: Errno,
    reason: &str,
    offset: Option<u64>,
    output: &mut Output,
) {
    let kind = if offset.is_some() {
        chunk::ERROR_OFFSET
    } else {
        chunk::ERROR
    };
    let bytes = 6 + reason.len() + if offset.is_some() { 8 } else { 0 };
    output.bytes(&chunk_header(cookie, done, kind, bytes as u32));
    output.bytes(&(errno as u32).to_be_bytes());
    output.bytes(&(reason.len() as u16).to_be_bytes());
    output.bytes(reason.as_bytes());
    if let Some(offset) = offset {
        output.bytes(&offset.to_be_bytes());
    }
}

/// The error of the core as the protocol has it.
const fn errno(error: RequestError) -> Errno {
    match error {
        RequestError::BadRange => Errno::Inval,
        RequestError::Io | RequestError::Corrupt | RequestError::Fenced => Errno::Io,
        RequestError::LogFull => Errno::NoSpace,
        RequestError::ReadOnly | RequestError::Policy => Errno::Perm,
        RequestError::Closing => Errno::Shutdown,
        RequestError::NoBuffers => Errno::NoMem,
    }
}
