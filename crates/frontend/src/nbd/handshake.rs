//! The handshake of NBD: options until one of them opens an export.
//!
//! ```text
//!  greeting sent ── client flags ──▶ options ──┬─ EXPORT_NAME, GO ──▶ Transmit
//!       │                              ▲  │    ├─ STARTTLS ─────────▶ StartTls ─▶ options (forgotten: all before)
//!       └── unknown flags ──▶ Close    └──┘    └─ ABORT, violation ─▶ Close
//! ```
//!
//! Invariants:
//! 1. Every length is checked before it is used; an option's data is at most [`OPTION_BYTES_MAX`].
//! 2. Options are at most [`OPTIONS_MAX`], each is charged to the client's turn, and none is taken while more than
//!    [`OUTPUT_BYTES_MAX`] of replies wait: a client that does not read does not grow the node.
//! 3. Before TLS, where TLS is required, nothing is told about any export.
//! 4. Of an export that the client may not open nothing is told, not even that it is there.
//! 5. An option about a volume that is on its way to another thread waits, and nothing of it is taken before that has
//!    arrived, or is given up.
//!
//! An option that makes no sense gets an error reply and the handshake goes on; bytes that are not
//! an option at all end the connection.

use std::borrow::Cow;

use hdcs_core::base::inbox::Inbox;
use hdcs_core::base::limits::{PROTOCOL_REQUEST_BYTES_MAX, SECTOR_BYTES};
use zerocopy::FromBytes;

use super::PREFERRED_BYTES;
use super::contexts::{CONTEXTS, Contexts};
use super::output::Output;
use super::protocol::{
    GREETING_MAGIC, OPTION_HEADER_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader,
    handshake_flag, info, option, option_reply, transmission_flag,
};
use crate::access::Peer;
use crate::{Ending, Export, Host, Permitted};

/// The longest string that the protocol allows.
const STRING_BYTES_MAX: usize = 4096;
/// The longest reason in a refusal, well below the longest string.
const REASON_BYTES_MAX: usize = 2048;
/// The longest data of an option that is looked at: a name of the longest kind and several queries.
pub const OPTION_BYTES_MAX: usize = 16 << 10;
/// The longest data of an option that is skipped with an error reply; what claims to be longer is
/// no client of this protocol.
const OPTION_SKIP_BYTES_MAX: usize = 1 << 20;
/// Options in one handshake. `qemu-nbd --list` asks twice for every export.
const OPTIONS_MAX: u32 = 4096;
/// Replies that may wait while options are taken. One reply to `LIST` may be larger.
const OUTPUT_BYTES_MAX: usize = 64 << 10;

/// What follows from the bytes so far.
#[derive(Debug)]
pub enum Step {
    /// More bytes are needed.
    More,
    /// Replies must leave first.
    Blocked,
    /// The reply was the last byte in the clear.
    StartTls,
    /// The handshake is over.
    Transmit(Agreement),
    /// End the connection once what was replied is sent.
    Close(Ending),
}

/// What client and server agreed on.
#[derive(Debug)]
pub struct Agreement {
    /// The export that was opened.
    pub export: Export,
    /// Whether replies are structured.
    pub structured: bool,
    /// Which metadata contexts are selected.
    pub contexts: Contexts,
}

/// What the listener allows.
#[derive(Clone, Copy, Debug)]
pub struct Security {
    /// Whether TLS can be started.
    pub offered: bool,
    /// Whether it must be.
    pub required: bool,
    /// Whether it was.
    pub started: bool,
}

/// The state of a handshake.
#[derive(Debug, Default)]
pub struct Handshake {
    client_flags: Option<u16>,
    options: u32,
    /// Data of an overlong option that is still to be skipped.
    skip_bytes: usize,
    structured: bool,
    /// The contexts selected, and for which export.
    selected: Option<(String, Contexts)>,
    /// The last export that the client asked for and did not get: a client asks several times.
    refused: Option<String>,
    /// Whether the next option waits for a volume that moves.
    waits: bool,
}

/// What one option leads to.
enum Outcome {
    Next,
    /// It cannot be said yet.
    Wait,
    Refuse(u32, Cow<'static, str>),
    StartTls,
    Transmit(Export),
    Close(Ending),
}

/// What there is of an export's name.
enum Found {
    Export(Export),
    /// Its volume is about to be exported again.
    Moves,
    Nothing,
}

fn violation(what: &'static str) -> Ending {
    Ending::Violation(Cow::Borrowed(what))
}

impl Handshake {
    /// Greet the client.
    pub fn new(output: &mut Output) -> Self {
        let mut greeting = [0; 18];
        greeting[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
        greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        greeting[16..].copy_from_slice(&flags.to_be_bytes());
        output.bytes(&greeting);
        Self::default()
    }

    /// Take what the inbox holds.
    pub fn advance(
        &mut self,
        inbox: &mut Inbox,
        security: Security,
        host: &mut dyn Host,
        peer: &Peer,
        output: &mut Output,
    ) -> Step {
        loop {
            let skipped = self.skip_bytes.min(inbox.unread().len());
            inbox.consume(skipped);
            self.skip_bytes -= skipped;
            let Some(client_flags) = self.client_flags else {
                let Some(flags) = inbox.unread().first_chunk() else {
                    return Step::More;
                };
                let flags = u32::from_be_bytes(*flags);
                let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
                if flags & !u32::from(known) != 0 {
                    return Step::Close(violation("flags that are not known"));
                }
                self.client_flags = Some(flags as u16);
                inbox.consume(4);
                continue;
            };
            let unread = inbox.unread();
            let Ok((header, rest)) = OptionHeader::read_from_prefix(unread) else {
                return Step::More;
            };
            let (kind, length) = (header.kind.get(), header.length.get() as usize);
            if header.magic.get() != OPTION_MAGIC || length > OPTION_SKIP_BYTES_MAX {
                return Step::Close(violation("something that is no option of the handshake"));
            }
            if output.held().heap_bytes > OUTPUT_BYTES_MAX || host.allowance().work == 0 {
                return Step::Blocked;
            }
            let fixed = client_flags & handshake_flag::FIXED_NEWSTYLE != 0;
            if !fixed && kind != option::EXPORT_NAME {
                return Step::Close(violation("options without fixed newstyle"));
            }
            let outcome = if length > OPTION_BYTES_MAX {
                self.skip_bytes = length;
                inbox.consume(OPTION_HEADER_BYTES);
                if kind == option::EXPORT_NAME {
                    return Step::Close(violation("a name that is too long"));
                }
                refuse(option_reply::ERR_TOO_BIG, "the option's data is too long")
            } else {
                let Some(data) = rest.get(..length) else {
                    return Step::More;
                };
                let permitted = Permitted::new(host, peer);
                let work = permitted.option_work();
                let outcome = self.take(kind, data, security, permitted, output);
                self.waits = matches!(outcome, Outcome::Wait);
                if self.waits {
                    // It is looked at again and again, and only whether the volume is there yet.
                    host.charge(1);
                    return Step::Blocked;
                }
                host.charge(work);
                inbox.consume(OPTION_HEADER_BYTES + length);
                outcome
            };
            self.options += 1;
            match outcome {
                Outcome::Next if self.options < OPTIONS_MAX => {}
                Outcome::Refuse(error, message) if self.options < OPTIONS_MAX => {
                    reply(output, kind, error, &[message.as_bytes()]);
                }
                Outcome::StartTls => {
                    reply(output, kind, option_reply::ACK, &[]);
                    return Step::StartTls;
                }
                Outcome::Transmit(export) => {
                    let contexts = match self.selected.take() {
                        Some((name, contexts)) if name == export.name => contexts,
                        _ => Contexts::default(),
                    };
                    return Step::Transmit(Agreement {
                        export,
                        structured: self.structured,
                        contexts,
                    });
                }
                Outcome::Close(why) => return Step::Close(why),
                Outcome::Wait => unreachable!("it is taken later"),
                Outcome::Next | Outcome::Refuse(..) => {
                    return Step::Close(violation("too many options"));
                }
            }
        }
    }

    /// Whether the client waits for a volume that moves.
    pub const fn waits(&self) -> bool {
        self.waits
    }

    /// TLS was started: what was agreed in the clear counts no more.
    pub fn forget(&mut self) {
        self.structured = false;
        self.selected = None;
    }

    fn take(
        &mut self,
        kind: u32,
        data: &[u8],
        security: Security,
        host: Permitted<'_>,
        output: &mut Output,
    ) -> Outcome {
        let allowed = [option::STARTTLS, option::ABORT];
        if security.required && !security.started && !allowed.contains(&kind) {
            return if kind == option::EXPORT_NAME {
                Outcome::Close(violation("an export is asked for before TLS was started"))
            } else {
                refuse(option_reply::ERR_TLS_REQD, "start TLS first")
            };
        }
        let no_data = [option::LIST, option::STARTTLS, option::STRUCTURED_REPLY];
        if no_data.contains(&kind) && !data.is_empty() {
            return refuse(option_reply::ERR_INVALID, "this option takes no data");
        }
        match kind {
            option::EXPORT_NAME => self.export_name(data, host, output),
            option::ABORT => {
                reply(output, kind, option_reply::ACK, &[]);
                Outcome::Close(Ending::Left)
            }
            option::LIST => {
                for export in host.exports() {
                    let length = (export.name.len() as u32).to_be_bytes();
                    let parts: [&[u8]; 2] = [&length, export.name.as_bytes()];
                    reply(output, kind, option_reply::SERVER, &parts);
                }
                reply(output, kind, option_reply::ACK, &[]);
                Outcome::Next
            }
            option::STARTTLS if security.started => {
                refuse(option_reply::ERR_INVALID, "TLS is in use already")
            }
            option::STARTTLS if security.offered => Outcome::StartTls,
            option::STARTTLS => refuse(
                option_reply::ERR_POLICY,
                "TLS is not configured on this listener",
            ),
            option::STRUCTURED_REPLY => {
                self.structured = true;
                reply(output, kind, option_reply::ACK, &[]);
                Outcome::Next
            }
            option::INFO | option::GO => self.describe(kind, data, host, output),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(kind, data, host, output)
            }
            _ => refuse(option_reply::ERR_UNSUP, "this option is not supported"),
        }
    }

    /// The export of this name; if the client does not get it, that is noted, once.
    fn find(&mut self, name: &str, host: Permitted<'_>) -> Found {
        if let Some(export) = host.export(name) {
            return Found::Export(export);
        }
        if host.moves(name) {
            return Found::Moves;
        }
        // It may have arrived in between.
        if let Some(export) = host.export(name) {
            return Found::Export(export);
        }
        if self.refused.as_deref() != Some(name) {
            host.refused(name);
            self.refused = Some(name.to_owned());
        }
        Found::Nothing
    }

    fn export_name(&mut self, data: &[u8], host: Permitted<'_>, output: &mut Output) -> Outcome {
        let export = match self.find(&String::from_utf8_lossy(data), host) {
            Found::Export(export) => export,
            Found::Moves => return Outcome::Wait,
            Found::Nothing => return Outcome::Close(Ending::NoExport),
        };
        output.bytes(&export.bytes.to_be_bytes());
        output.bytes(&transmission_flags(&export, self.structured).to_be_bytes());
        let flags = self.client_flags.unwrap_or_default();
        if flags & handshake_flag::NO_ZEROES == 0 {
            output.bytes(&[0; 124]);
        }
        Outcome::Transmit(export)
    }

    /// `INFO` and `GO`: name, then the kinds of information that the client asks for.
    fn describe(
        &mut self,
        kind: u32,
        data: &[u8],
        host: Permitted<'_>,
        output: &mut Output,
    ) -> Outcome {
        let mut fields = Fields(data);
        let Some((name, count)) = fields.string().zip(fields.u16()) else {
            return MALFORMED;
        };
        if fields.0.len() != usize::from(count) * 2 {
            return MALFORMED;
        }
        let export = match self.find(name, host) {
            Found::Export(export) => export,
            Found::Moves => return Outcome::Wait,
            Found::Nothing => return unknown_export(name, host),
        };
        let flags = transmission_flags(&export, self.structured);
        let (size, flags) = (export.bytes.to_be_bytes(), flags.to_be_bytes());
        reply_info(output, kind, info::EXPORT, &[&size, &flags]);
        let mut asked = [false; 4];
        while let Some(kind) = fields.u16() {
            if let Some(asked) = asked.get_mut(usize::from(kind)) {
                *asked = true;
            }
        }
        if asked[usize::from(info::NAME)] {
            reply_info(output, kind, info::NAME, &[export.name.as_bytes()]);
        }
        if asked[usize::from(info::DESCRIPTION)] {
            let words = format!("HDCS volume {}", export.name);
            reply_info(output, kind, info::DESCRIPTION, &[words.as_bytes()]);
        }
        // The constraints hold whether asked for or not, so they are always told.
        let sizes = [SECTOR_BYTES, PREFERRED_BYTES, PROTOCOL_REQUEST_BYTES_MAX];
        let sizes = sizes.map(|bytes| (bytes as u32).to_be_bytes());
        reply_info(output, kind, info::BLOCK_SIZE, &[sizes.as_flattened()]);
        reply(output, kind, option_reply::ACK, &[]);
        if kind == option::GO {
            Outcome::Transmit(export)
        } else {
            Outcome::Next
        }
    }

    /// `LIST_META_CONTEXT` and `SET_META_CONTEXT`: name, count, queries. A namespace alone
    /// (`base:`) stands for all its contexts when listing, as the specification says; it selects
    /// none when setting.
    fn contexts(
        &mut self,
        kind: u32,
        data: &[u8],
        host: Permitted<'_>,
        output: &mut Output,
    ) -> Outcome {
        let list = kind == option::LIST_META_CONTEXT;
        if !list {
            self.selected = None;
        }
        if !self.structured {
            return refuse(
                option_reply::ERR_INVALID,
                "metadata contexts need structured replies; ask for those first",
            );
        }
        let mut fields = Fields(data);
        let Some((name, count)) = fields.string().zip(fields.u32()) else {
            return MALFORMED;
        };
        let mut found = Contexts::default();
        if list && count == 0 {
            found = Contexts::ALL;
        }
        // Each query takes at least four bytes, so the data bounds the loop whatever `count` says.
        for _ in 0..count {
            let Some(query) = fields.string() else {
                return MALFORMED;
            };
            for context in CONTEXTS {
                let namespace = context.name().split_inclusive(':').next();
                if query == context.name() || list && Some(query) == namespace {
                    found.insert(context);
                }
            }
        }
        if !fields.0.is_empty() {
            return MALFORMED;
        }
        let export = match self.find(name, host) {
            Found::Export(export) => export,
            Found::Moves => return Outcome::Wait,
            Found::Nothing => return unknown_export(name, host),
        };
        for context in found.iter() {
            let id = if list { 0 } else { context.id() };
            let parts: [&[u8]; 2] = [&id.to_be_bytes(), context.name().as_bytes()];
            reply(output, kind, option_reply::META_CONTEXT, &parts);
        }
        reply(output, kind, option_reply::ACK, &[]);
        if !list {
            self.selected = Some((export.name, found));
        }
        Outcome::Next
    }
}

const MALFORMED: Outcome = Outcome::Refuse(
    option_reply::ERR_INVALID,
    Cow::Borrowed("the option is malformed"),
);

fn refuse(error: u32, message: &'static str) -> Outcome {
    Outcome::Refuse(error, Cow::Borrowed(message))
}

/// There is no such export; a volume that the node has and that is not open is explained.
fn unknown_export(name: &str, host: Permitted<'_>) -> Outcome {
    let message = match host.why_not(name) {
        Some(mut why) => {
            why.truncate(why.floor_char_boundary(REASON_BYTES_MAX));
            format!("volume {name} is not open: {why}").into()
        }
        None => {
            "there is no open volume of this name that this client may open; list the exports to see \
             which there are"
                .into()
        }
    };
    Outcome::Refuse(option_reply::ERR_UNKNOWN, message)
}

/// What a client may do with an export. `FAST_ZERO` is left out: zeroing is never refused for
/// being slow, and no promise is made that it is fast.
fn transmission_flags(export: &Export, structured: bool) -> u16 {
    use transmission_flag as flag;
    let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
    // One core owns a volume, so a flush on one connection covers them all.
    flags |= flag::CAN_MULTI_CONN;
    if export.read_only {
        flags |= flag::READ_ONLY;
    } else {
        flags |= flag::SEND_WRITE_ZEROES;
        if export.discards {
            flags |= flag::SEND_TRIM;
        }
    }
    if structured {
        flags |= flag::SEND_DF;
    }
    flags
}

fn reply(output: &mut Output, option: u32, kind: u32, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut header = [0; 20];
    header[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    header[8..12].copy_from_slice(&option.to_be_bytes());
    header[12..16].copy_from_slice(&kind.to_be_bytes());
    header[16..].copy_from_slice(&(length as u32).to_be_bytes());
    output.bytes(&header);
    for part in parts {
        output.bytes(part);
    }
}

fn reply_info(output: &mut Output, option: u32, kind: u16, parts: &[&[u8]]) {
    let kind = kind.to_be_bytes();
    let mut all: Vec<&[u8]> = vec![&kind];
    all.extend_from_slice(parts);
    reply(output, option, option_reply::INFO, &all);
}

/// The data of an option, field by field; `None` where it ends early.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// A length of 32 bits and so many bytes of UTF-8.
    fn string(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        if length > STRING_BYTES_MAX {
            return None;
        }
        let (string, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        str::from_utf8(string).ok()
    }
}
