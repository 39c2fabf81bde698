//! The transmission phase of NBD: requests in, replies out.
//!
//! A request becomes one or several *pieces*, each a request of the core: data, and what CACHE
//! brings in, is cut at multiples of [`REQUEST_BYTES_MAX`] of the volume's offset; trims and zeroes
//! are not, since what they cost does not depend on their length. Its state is a slot of a table;
//! [`RequestId`] holds slot, piece and the slot's generation, so a completion is found without a search.
//!
//! Pieces are submitted one by one, as far as the [`Allowance`] goes; the next request is taken once
//! all pieces of the one before are submitted.
//!
//! Invariants:
//! 1. A piece is submitted only while there are fewer than [`PIECES_MAX`] in flight, and only if the
//!    session holds no more than its allowance with it: data in flight, and what waits to be sent,
//!    here or in the socket's queue. A read that is answered as a whole counts as a whole from its
//!    first piece. So data is bounded by the allowance.
//! 2. A request is taken only while fewer than [`REPLIES_MAX`] chunks wait here, and there is room
//!    for its reply in the allowance. So replies are bounded, too.
//! 3. A slot is free again once its reply is whole, which is when its last piece completes.
//! 4. A client's mistake in a request costs that request; a mistake in the framing ends the
//!    connection, because what follows could be anything.
//! 5. The payload of a refused write is received and dropped, and the refusal sent after it.
//!
//! Replies: with structured replies every piece of a read is a chunk of its own, sent as it
//! completes. Without them, or if the client asks for one piece, the reply waits for all pieces of a
//! read of up to [`UNFRAGMENTED_BYTES_MAX`]. A longer one (a *stream*) is answered in order, piece by
//! piece, once nothing else is in flight, and no other request is taken meanwhile: to hold all of it
//! could take more than there is. An error in it ends the connection, as the specification demands,
//! if the reply has begun. A success without data is a simple reply in both cases: it is shorter, and
//! allowed.

use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::error::RequestError;
use hdcs_core::base::inbox::Inbox;
use hdcs_core::base::io::{Reply, Request, RequestId, SectorRange};
use hdcs_core::base::limits::{
    BLOCK_BYTES, PROTOCOL_REQUEST_BYTES_MAX, REQUEST_BYTES_MAX, SECTOR_BYTES,
};
use zerocopy::FromBytes;

use super::contexts::{Contexts, EXTENTS_MAX};
use super::handshake::Agreement;
use super::output::Output;
use super::protocol::{
    Errno, REQUEST_HEADER_BYTES, REQUEST_MAGIC, RequestHeader, chunk, chunk_header, command,
    command_flag, simple_reply,
};
use crate::{Allowance, Ending, Export, Held, Host, Owed};

/// Requests of one connection in flight at most: twice the deepest queue that clients commonly
/// use, and a quarter of what one volume takes, so that one connection does not starve the others.
const SLOTS_MAX: usize = 256;
/// Pieces of one connection in flight below which another request is taken.
pub const PIECES_MAX: usize = 256;
/// Chunks that wait to be sent, below which another request is taken: as many as one send takes.
const REPLIES_MAX: usize = 512;
/// Pieces of CACHE of one connection in flight: each fetches its MiB in four reads at once.
const CACHE_PIECES_MAX: usize = 4;
/// Extents of one context at most, their head, and the chunk that they are in.
const STATUS_BYTES: usize = 4 + 8 * EXTENTS_MAX + 256;
/// The reply to anything else: two chunks, or an error with its reason.
const REPLY_BYTES: usize = 512;
/// The longest read that is held until all of it is there. The specification asks for 64 KiB at
/// least where a client demands one chunk.
const UNFRAGMENTED_BYTES_MAX: usize = REQUEST_BYTES_MAX;
/// A payload from here on is received straight into its buffer, but for its head. A shorter one comes with the requests
/// around it, many in one receive, and is copied.
const DIRECT_BYTES_MIN: usize = 32 << 10;
/// How much of such a payload has to be there before it gets a buffer: so much a client has to send for it.
const HEAD_BYTES: usize = 8 << 10;
/// The least rest of it that is not copied.
const REST_BYTES_MIN: usize = 4 << 10;
/// What is received behind the rest of a payload: the next request with as much as its buffer asks for.
pub const BEHIND_BYTES: usize = REQUEST_HEADER_BYTES + HEAD_BYTES;

const _: () = assert!(SLOTS_MAX <= 1 << 16);
const _: () = assert!(
    (1 << 32) / REQUEST_BYTES_MAX < u16::MAX as usize,
    "the pieces of the longest command are numbered in 16 bits"
);
const _: () = assert!(SLOTS_MAX <= hdcs_core::base::limits::VOLUME_REQUESTS_MAX / 4);

/// What follows from the bytes so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// More bytes are needed.
    More,
    /// A completion, a buffer or the sending of replies must come first.
    Blocked,
    /// The client said goodbye, or what it sent is not the protocol: answer what is in flight, then
    /// close.
    Close(Ending),
}

/// What a slot answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A chunk for each piece.
    ReadFragmented,
    /// One reply when all is there.
    ReadWhole,
    /// One reply, sent in order as it comes.
    ReadStream,
    /// A chunk for each context.
    Status { contexts: Contexts, one: bool },
    /// A reply without data, once all of the payload is written.
    Write,
    /// A reply without data.
    Plain(Command),
}

/// The commands without data in either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    Flush,
    Trim,
    Cache,
    WriteZeroes { no_hole: bool },
}

/// One request in flight.
#[derive(Debug)]
struct Slot {
    generation: u32,
    kind: Kind,
    cookie: u64,
    offset: u64,
    length: u32,
    /// How it is cut; `usize::MAX` if it is not.
    piece_bytes: usize,
    /// Pieces that are not completed, those not yet submitted included.
    pieces: u16,
    fua: bool,
    error: Option<RequestError>,
    /// Pieces of a [`Kind::ReadWhole`] or [`Kind::ReadStream`], in order.
    data: Vec<Option<Buf>>,
}

/// A request of which not all pieces are submitted, the payload of a write left out.
#[derive(Clone, Copy, Debug)]
struct Cut {
    slot: u16,
    /// The next one, and how many there are.
    piece: u16,
    pieces: u16,
}

/// The [`Kind::ReadStream`] that is being answered.
#[derive(Clone, Copy, Debug)]
struct Stream {
    slot: u16,
    /// The next piece to be sent; before the first one goes the head of the reply.
    piece: u16,
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
    /// Made as they are needed, up to [`SLOTS_MAX`].
    slots: Vec<Slot>,
    free: Vec<u16>,
    pieces_in_flight: usize,
    /// Pieces of CACHE among them.
    caching: usize,
    /// Data of requests in flight, and room for their replies.
    in_flight: Held,
    /// What waited to be sent when [`Self::advance`] began, and the memory of inbox and table; since
    /// then only short replies came.
    queued: Held,
    cut: Option<Cut>,
    stream: Option<Stream>,
    /// A reply cannot be finished: the connection ends.
    broken: bool,
    payload: Option<Payload>,
    refused: Option<Refused>,
    /// Parts of payloads that were begun: tells one from the next.
    parts: u64,
    stopping: bool,
}

impl Transmission {
    /// Begin as agreed.
    pub fn new(agreement: Agreement) -> Self {
        Self {
            export: agreement.export,
            structured: agreement.structured,
            contexts: agreement.contexts,
            slots: Vec::new(),
            free: Vec::new(),
            pieces_in_flight: 0,
            caching: 0,
            in_flight: Held::default(),
            queued: Held::default(),
            cut: None,
            stream: None,
            broken: false,
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

    /// How much of a payload has to be in an inbox of so many bytes before it gets a buffer; `None`
    /// if none is waiting for that.
    pub fn wanted(&self, inbox_bytes: usize) -> Option<usize> {
        let payload = self.payload.as_ref()?;
        let slot = &self.slots[usize::from(payload.slot)];
        let bytes = slot.piece(payload.piece).bytes();
        let wanted = if bytes >= DIRECT_BYTES_MIN {
            HEAD_BYTES
        } else {
            bytes
        };
        payload.buf.is_none().then(|| wanted.min(inbox_bytes))
    }

    /// How much is to be received into an inbox, which has so many unread bytes, before the rest of a payload goes to its
    /// buffer; `None`: as much as there is.
    pub fn inbox_bytes_max(&self, unread: usize) -> Option<usize> {
        let payload = self.payload.as_ref()?;
        let slot = &self.slots[usize::from(payload.slot)];
        let is_large = slot.piece(payload.piece).bytes() >= DIRECT_BYTES_MIN;
        let waits = payload.buf.is_none() && is_large && unread < HEAD_BYTES;
        waits.then(|| HEAD_BYTES - unread)
    }

    /// Memory that it takes up, its output left out.
    pub fn held(&self) -> Held {
        let mut held = self.in_flight;
        held.heap_bytes += self.table_bytes();
        held
    }

    fn table_bytes(&self) -> usize {
        let data: usize = REQUEST_BYTES_MAX / UNFRAGMENTED_BYTES_MAX * size_of::<Option<Buf>>();
        size_of::<Self>() + self.slots.capacity() * (size_of::<Slot>() + data)
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
        self.queued = output.held();
        self.queued.heap_bytes += inbox.capacity() + self.table_bytes() + output.spare_bytes();
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
            if self.cut.is_some() && !self.go_on(host, output) {
                return Step::Blocked;
            }
            if self.broken {
                return Step::Close(Ending::Failed(
                    "a read failed after a part of it was sent".to_owned(),
                ));
            }
            if self.stream.is_some() {
                return Step::Blocked;
            }
            let Ok((header, _)) = RequestHeader::read_from_prefix(inbox.unread()) else {
                return Step::More;
            };
            if self.stopping {
                return Step::Close(Ending::NodeStops);
            }
            if !self.has_room(&header, &host.allowance(), output) {
                return Step::Blocked;
            }
            inbox.consume(REQUEST_HEADER_BYTES);
            if header.magic.get() != REQUEST_MAGIC {
                return Step::Close(Ending::Violation("something that is no request".into()));
            }
            if let Err(ending) = self.take(&header, host, output) {
                return Step::Close(ending);
            }
        }
    }

    /// Whether a request can be taken now.
    fn has_room(&self, header: &RequestHeader, allowed: &Allowance, output: &Output) -> bool {
        if self.free.is_empty() && self.slots.len() >= SLOTS_MAX
            || self.pieces_in_flight >= PIECES_MAX
            || output.chunks.len() >= REPLIES_MAX
            || allowed.work == 0
        {
            return false;
        }
        let mut held = self.queued;
        held += self.in_flight;
        let reply = match header.kind.get() {
            command::BLOCK_STATUS => STATUS_BYTES * self.contexts.iter().count(),
            _ => REPLY_BYTES,
        };
        held.data_bytes < allowed.held.data_bytes
            && held.heap_bytes + reply <= allowed.held.heap_bytes
    }

    /// Whether so much data may be held besides what is.
    fn may_hold(&self, bytes: usize, host: &dyn Host) -> bool {
        let held = self.in_flight.data_bytes + self.queued.data_bytes;
        held + bytes <= host.allowance().held.data_bytes
    }

    /// Submit what can be of the request that is being cut; whether that was the rest.
    fn go_on(&mut self, host: &mut dyn Host, output: &mut Output) -> bool {
        while let Some(Cut {
            slot: index,
            piece,
            pieces,
        }) = self.cut
        {
            let slot = &mut self.slots[usize::from(index)];
            let kind = slot.kind;
            if piece == pieces {
                self.cut = None;
                break;
            }
            match kind {
                Kind::Plain(_) if slot.error.is_some() => {
                    // The rest is not begun.
                    slot.pieces -= pieces - piece;
                    self.cut = None;
                    if slot.pieces == 0 {
                        slot.finish(self.structured, output);
                        self.close(index);
                    }
                    break;
                }
                // It ends with the last of what is in flight.
                Kind::ReadStream if slot.error.is_some() => return false,
                _ => {}
            }
            let range = slot.piece(piece);
            let is_first = piece == 0;
            let (data, is_cache) = match kind {
                // All of it or nothing: half of it would wait for the other half.
                Kind::ReadWhole => (if is_first { slot.whole_bytes() } else { 0 }, false),
                Kind::Plain(Command::Cache) => (held_bytes(range), true),
                Kind::Plain(_) | Kind::Status { .. } | Kind::Write => (0, false),
                Kind::ReadFragmented | Kind::ReadStream => (held_bytes(range), false),
            };
            if self.pieces_in_flight >= PIECES_MAX
                || is_cache && self.caching >= CACHE_PIECES_MAX
                || host.allowance().work == 0
                || data > 0 && !self.may_hold(data, host)
            {
                return false;
            }
            let request = self.slots[usize::from(index)].request(range, piece);
            self.in_flight.data_bytes += data;
            self.caching += usize::from(is_cache);
            self.cut = Some(Cut {
                slot: index,
                piece: piece + 1,
                pieces,
            });
            self.submit(index, piece, request, host);
        }
        true
    }

    /// The rest of a payload's buffer, if it is not to be copied. The inbox is empty then.
    pub fn direct(&mut self) -> Option<&mut [u8]> {
        let payload = self.payload.as_mut()?;
        let buf = payload.buf.as_mut()?;
        let is_large = buf.len() >= DIRECT_BYTES_MIN;
        let rest = buf.get_mut(payload.filled..)?;
        (is_large && rest.len() >= REST_BYTES_MIN).then_some(rest)
    }

    /// So many bytes came into the place of [`Self::direct`], and behind it; how many these are.
    pub fn direct_received(&mut self, bytes: usize) -> usize {
        let payload = self.payload.as_mut().expect("a payload is being received");
        let buf = payload.buf.as_ref().expect("a payload has its buffer");
        let here = bytes.min(buf.len() - payload.filled);
        payload.filled += here;
        bytes - here
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
        let (last, kind) = (slot.pieces == 0, slot.kind);
        match kind {
            Kind::ReadStream if result.is_err() => {
                self.in_flight.data_bytes -= held_bytes(slot.piece(piece));
            }
            Kind::ReadFragmented | Kind::Write | Kind::Plain(Command::Cache) => {
                self.in_flight.data_bytes -= held_bytes(slot.piece(piece));
            }
            Kind::ReadWhole if last => self.in_flight.data_bytes -= slot.whole_bytes(),
            Kind::ReadWhole | Kind::ReadStream | Kind::Plain(_) | Kind::Status { .. } => {}
        }
        self.caching -= usize::from(kind == Kind::Plain(Command::Cache));
        match result {
            Ok(reply) => slot.succeeded(piece, reply, output),
            Err(error) => slot.failed(piece, error, output),
        }
        if last && kind != Kind::ReadStream {
            slot.finish(self.structured, output);
            self.close(index);
        }
        self.go_on_streaming(output);
    }

    /// Send what is next of the stream, if it is its turn.
    fn go_on_streaming(&mut self, output: &mut Output) {
        let Some(Stream { slot: index, piece }) = &mut self.stream else {
            return;
        };
        let index = *index;
        let slot = &mut self.slots[usize::from(index)];
        let left = usize::from(slot.pieces);
        if let Some(error) = slot.error {
            // What is here is of no use any more; what is not submitted, is not.
            for (number, data) in slot.data.iter_mut().enumerate() {
                if data.take().is_some() {
                    let range =
                        slot_piece(slot.offset, slot.length, number as u16, REQUEST_BYTES_MAX);
                    self.in_flight.data_bytes -= held_bytes(range);
                }
            }
            let unsubmitted = self
                .cut
                .map_or(0, |cut| usize::from(cut.pieces - cut.piece));
            if left > unsubmitted {
                return;
            }
            self.broken = *piece > 0;
            if !self.broken {
                output.bytes(&simple_reply(slot.cookie, errno(error) as u32));
            }
            self.cut = None;
        } else {
            let others = self.slots.len() - self.free.len() - 1;
            if others > 0 && *piece == 0 {
                return;
            }
            let slot = &mut self.slots[usize::from(index)];
            while let Some(data) = slot
                .data
                .get_mut(usize::from(*piece))
                .and_then(Option::take)
            {
                if *piece == 0 {
                    output.bytes(&simple_reply(slot.cookie, 0));
                }
                let range = slot_piece(slot.offset, slot.length, *piece, REQUEST_BYTES_MAX);
                self.in_flight.data_bytes -= held_bytes(range);
                output.data(data);
                *piece += 1;
            }
            if usize::from(*piece) < slot.data.len() {
                return;
            }
        }
        self.stream = None;
        self.close(index);
    }

    /// A slot is answered.
    fn close(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        slot.generation = slot.generation.wrapping_add(1);
        slot.data.clear();
        self.in_flight.heap_bytes -= slot.reply_bytes();
        self.free.push(index);
        self.cut.take_if(|cut| cut.slot == index);
    }

    /// Carry out one request, or end the connection.
    fn take(
        &mut self,
        header: &RequestHeader,
        host: &mut dyn Host,
        output: &mut Output,
    ) -> Result<(), Ending> {
        let (cookie, length) = (header.cookie.get(), header.length.get());
        let checked = self.check(header);
        match (header.kind.get(), checked) {
            (command::DISC, _) => return Err(Ending::Left),
            (command::WRITE, _) if length as usize > PROTOCOL_REQUEST_BYTES_MAX => {
                return Err(Ending::Violation("a write of more than 32 MiB".into()));
            }
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
                let slot = self.open(header, Kind::Write, REQUEST_BYTES_MAX).slot;
                self.payload = Some(Payload {
                    slot,
                    piece: 0,
                    buf: None,
                    filled: 0,
                });
            }
            (_, Err(refusal)) => self.refuse(cookie, refusal, output),
            (kind, Ok(())) => {
                let (kind, piece_bytes) = self.kind(kind, header);
                let cut = self.open(header, kind, piece_bytes);
                if kind == Kind::ReadStream {
                    self.stream = Some(Stream {
                        slot: cut.slot,
                        piece: 0,
                    });
                }
                self.cut = Some(cut);
                self.go_on(host, output);
            }
        }
        Ok(())
    }

    /// What a request without a payload is, and how it is cut.
    fn kind(&self, kind: u16, header: &RequestHeader) -> (Kind, usize) {
        let flags = header.flags.get();
        let whole = !self.structured || flags & command_flag::DF != 0;
        match kind {
            command::READ if !whole => (Kind::ReadFragmented, REQUEST_BYTES_MAX),
            command::READ if header.length.get() as usize <= UNFRAGMENTED_BYTES_MAX => {
                (Kind::ReadWhole, REQUEST_BYTES_MAX)
            }
            command::READ => (Kind::ReadStream, REQUEST_BYTES_MAX),
            command::BLOCK_STATUS => {
                let one = flags & command_flag::REQ_ONE != 0;
                let contexts = self.contexts;
                (Kind::Status { contexts, one }, usize::MAX)
            }
            command::FLUSH => (Kind::Plain(Command::Flush), usize::MAX),
            command::TRIM => (Kind::Plain(Command::Trim), usize::MAX),
            command::CACHE => (Kind::Plain(Command::Cache), REQUEST_BYTES_MAX),
            command::WRITE_ZEROES => {
                let no_hole = flags & command_flag::NO_HOLE != 0;
                (Kind::Plain(Command::WriteZeroes { no_hole }), usize::MAX)
            }
            _ => unreachable!("check() knows every other command"),
        }
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

    /// Occupy a slot, for a request that is cut into pieces of so many bytes.
    fn open(&mut self, header: &RequestHeader, kind: Kind, piece_bytes: usize) -> Cut {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u16
        });
        let slot = &mut self.slots[usize::from(index)];
        slot.kind = kind;
        slot.cookie = header.cookie.get();
        slot.offset = header.offset.get();
        slot.length = header.length.get();
        slot.fua = header.flags.get() & command_flag::FUA != 0;
        slot.pieces = match kind {
            Kind::Status { contexts, .. } => contexts.iter().count() as u16,
            Kind::Plain(Command::Flush) => 1,
            _ => piece_count(header, piece_bytes),
        };
        slot.piece_bytes = piece_bytes;
        slot.error = None;
        if matches!(kind, Kind::ReadWhole | Kind::ReadStream) {
            slot.data.clear();
            slot.data.resize(usize::from(slot.pieces), None);
        }
        self.in_flight.heap_bytes += slot.reply_bytes();
        Cut {
            slot: index,
            piece: 0,
            pieces: slot.pieces,
        }
    }

    fn submit(&mut self, slot: u16, piece: u16, request: Request, host: &mut dyn Host) {
        let generation = self.slots[usize::from(slot)].generation;
        let id = u64::from(generation) << 32 | u64::from(piece) << 16 | u64::from(slot);
        self.pieces_in_flight += 1;
        host.submit(self.export.number, RequestId(id), request);
    }

    /// Move a write's payload into buffers, and submit each piece as it is whole.
    fn gather(&mut self, inbox: &mut Inbox, host: &mut dyn Host) -> Step {
        loop {
            if let Some(wanted) = self.wanted(inbox.capacity())
                && inbox.unread().len() < wanted
            {
                return Step::More;
            }
            let Some(payload) = &self.payload else {
                return Step::More;
            };
            let slot = &self.slots[usize::from(payload.slot)];
            let range = slot.piece(payload.piece);
            let bytes = held_bytes(range);
            let is_new = payload.buf.is_none();
            if is_new
                && (self.pieces_in_flight >= PIECES_MAX
                    || host.allowance().work == 0
                    || !self.may_hold(bytes, host))
            {
                return Step::Blocked;
            }
            let Some(payload) = &mut self.payload else {
                return Step::More;
            };
            let Some(mut buf) = payload.buf.take().or_else(|| host.alloc(range)) else {
                return Step::Blocked;
            };
            if is_new {
                self.in_flight.data_bytes += bytes;
            }
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

impl Default for Slot {
    fn default() -> Self {
        Self {
            generation: 0,
            kind: Kind::Plain(Command::Flush),
            cookie: 0,
            offset: 0,
            length: 0,
            piece_bytes: 0,
            pieces: 0,
            fua: false,
            error: None,
            data: Vec::new(),
        }
    }
}

impl Slot {
    fn range(&self) -> SectorRange {
        slot_range(self.offset, self.length)
    }

    /// The part of the request's range that its `piece` covers; all of it, if it is not cut.
    fn piece(&self, piece: u16) -> SectorRange {
        if self.piece_bytes == usize::MAX {
            return self.range();
        }
        slot_piece(self.offset, self.length, piece, self.piece_bytes)
    }

    /// Memory for all of its data.
    fn whole_bytes(&self) -> usize {
        (0..self.data.len() as u16)
            .map(|piece| held_bytes(self.piece(piece)))
            .sum()
    }

    /// Memory that its reply takes up at most, data left out.
    fn reply_bytes(&self) -> usize {
        match self.kind {
            Kind::Status { contexts, .. } => STATUS_BYTES * contexts.iter().count(),
            _ => REPLY_BYTES,
        }
    }

    /// What one piece asks of the core.
    fn request(&self, range: SectorRange, piece: u16) -> Request {
        let fua = self.fua;
        match self.kind {
            Kind::ReadFragmented | Kind::ReadWhole | Kind::ReadStream => Request::Read { range },
            Kind::Status { contexts, .. } => {
                let context = contexts.iter().nth(usize::from(piece));
                let kind = context.expect("one piece for each context").kind();
                Request::Extents { range, kind }
            }
            Kind::Plain(Command::Flush) => Request::Flush,
            Kind::Plain(Command::Trim) => Request::Discard { range, fua },
            Kind::Plain(Command::Cache) => Request::Promote { range },
            Kind::Plain(Command::WriteZeroes { no_hole }) => Request::WriteZeroes {
                range,
                fua,
                no_hole,
            },
            Kind::Write => unreachable!("a write's pieces come with their data"),
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
            (Kind::ReadWhole | Kind::ReadStream, Reply::Data(data)) => {
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
            (Kind::Write | Kind::Plain(_), Reply::Done) => {}
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
            (Kind::ReadStream, _) => unreachable!("a stream ends by itself"),
            (Kind::ReadFragmented, _) | (Kind::Status { .. }, None) => {}
            (_, Some(error)) => {
                self.data.clear();
                let reason = error.to_string();
                error_reply(self.cookie, errno(error), &reason, structured, output);
            }
            (Kind::Write | Kind::Plain(_), None) => output.bytes(&simple_reply(self.cookie, 0)),
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
fn piece_count(header: &RequestHeader, piece_bytes: usize) -> u16 {
    let (offset, length) = (header.offset.get(), u64::from(header.length.get()));
    let bytes = piece_bytes as u64;
    ((offset + length).div_ceil(bytes) - offset / bytes) as u16
}

fn slot_range(offset: u64, length: u32) -> SectorRange {
    let sector = SECTOR_BYTES as u64;
    SectorRange::new(offset / sector, u64::from(length) / sector)
}

fn slot_piece(offset: u64, length: u32, piece: u16, piece_bytes: usize) -> SectorRange {
    let range = slot_range(offset, length);
    let sectors = (piece_bytes / SECTOR_BYTES) as u64;
    let start = (range.start / sectors + u64::from(piece)) * sectors;
    SectorRange::new(start, sectors).intersect(range)
}

/// Memory for the data of a range: whole blocks, as many as a buffer of the pool has.
fn held_bytes(range: SectorRange) -> usize {
    (range.block_count() as usize).next_power_of_two() * BLOCK_BYTES
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
        RequestError::Io
        | RequestError::Corrupt
        | RequestError::Inconsistent
        | RequestError::Fenced => Errno::Io,
        RequestError::LogFull => Errno::NoSpace,
        RequestError::ReadOnly | RequestError::Policy => Errno::Perm,
        RequestError::Closing => Errno::Shutdown,
        RequestError::NoBuffers => Errno::NoMem,
    }
}
