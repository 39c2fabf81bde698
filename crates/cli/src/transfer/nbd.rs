//! A client of NBD for copies: one request after another on a connection, and many connections.
//!
//! Fixed newstyle over a unix socket, structured replies and `base:allocation` where the server has
//! them. Writes of one piece are sent together and answered together, so that a piece with
//! holes in it costs one round trip too.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use hdcs_frontend::nbd::protocol::{
    GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, allocation, chunk, command, handshake_flag, info, option, option_reply,
    transmission_flag,
};

use crate::Failure;

/// Longest option reply and longest chunk without data that is taken.
const REPLY_BYTES_MAX: u32 = 1 << 20;
/// The context that tells holes from data.
const CONTEXT: &[u8] = b"base:allocation";
/// A chunk without payload, which only ends a reply.
const CHUNK_NONE: u16 = 0;
/// Zeroes at an offset.
const CHUNK_OFFSET_HOLE: u16 = 2;

/// An export, and who serves it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The server's unix socket.
    pub socket: PathBuf,
    /// Name of the export.
    pub export: String,
    /// What to call it in an error.
    pub name: Arc<str>,
}

/// A connection to an export.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    name: Arc<str>,
    bytes: u64,
    flags: u16,
    has_structured: bool,
    has_context: bool,
}

/// A run of bytes and whether it reads as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its length.
    pub bytes: u64,
    /// Whether it reads as zeroes.
    pub is_zero: bool,
}

impl Endpoint {
    /// Connect.
    pub fn connect(&self) -> Result<Client, Failure> {
        let stream = UnixStream::connect(&self.socket).map_err(|error| {
            Failure::failed(format!(
                "{}: cannot connect to {}: {error}",
                self.name,
                self.socket.display()
            ))
        })?;
        let mut client = Client {
            stream,
            name: Arc::clone(&self.name),
            bytes: 0,
            flags: 0,
            has_structured: false,
            has_context: false,
        };
        client.negotiate(self.export.as_bytes())?;
        Ok(client)
    }
}

impl Client {
    /// Size of the export.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the export can only be read.
    pub fn is_read_only(&self) -> bool {
        self.flags & transmission_flag::READ_ONLY != 0
    }

    fn failed(&self, what: impl std::fmt::Display) -> Failure {
        Failure::failed(format!("{}: {what}", self.name))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Failure> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), Failure> {
        self.stream
            .read_exact(buffer)
            .map_err(|error| self.failed(format_args!("the NBD connection has ended: {error}")))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.stream
            .write_all(bytes)
            .map_err(|error| self.failed(format_args!("the NBD connection has ended: {error}")))
    }

    fn payload(&mut self, bytes: u32) -> Result<Vec<u8>, Failure> {
        if bytes > REPLY_BYTES_MAX {
            return Err(self.failed(format_args!("an NBD reply of {bytes} bytes is refused")));
        }
        let mut payload = vec![0; bytes as usize];
        self.fill(&mut payload)?;
        Ok(payload)
    }

    fn negotiate(&mut self, export: &[u8]) -> Result<(), Failure> {
        let greeting: [u8; 16] = self.take()?;
        if greeting[..8] != GREETING_MAGIC.to_be_bytes()
            || greeting[8..] != OPTION_MAGIC.to_be_bytes()
        {
            return Err(self.failed("no NBD server answers"));
        }
        let theirs = u16::from_be_bytes(self.take()?);
        if theirs & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(self.failed("the NBD server is too old"));
        }
        let ours = handshake_flag::FIXED_NEWSTYLE | (theirs & handshake_flag::NO_ZEROES);
        self.send(&u32::from(ours).to_be_bytes())?;
        self.has_structured = self.option(option::STRUCTURED_REPLY, &[])?;
        if self.has_structured {
            let mut data = (export.len() as u32).to_be_bytes().to_vec();
            data.extend_from_slice(export);
            data.extend_from_slice(&1_u32.to_be_bytes());
            data.extend_from_slice(&(CONTEXT.len() as u32).to_be_bytes());
            data.extend_from_slice(CONTEXT);
            self.option(option::SET_META_CONTEXT, &data)?;
        }
        let mut data = (export.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(export);
        data.extend_from_slice(&0_u16.to_be_bytes());
        if self.option(option::GO, &data)? {
            return Ok(());
        }
        Err(self.failed("the NBD server is too old"))
    }

    /// Ask for an option; whether the server has it. What it tells is kept.
    fn option(&mut self, kind: u32, data: &[u8]) -> Result<bool, Failure> {
        let mut head = OPTION_MAGIC.to_be_bytes().to_vec();
        head.extend_from_slice(&kind.to_be_bytes());
        head.extend_from_slice(&(data.len() as u32).to_be_bytes());
        head.extend_from_slice(data);
        self.send(&head)?;
        loop {
            let magic = u64::from_be_bytes(self.take()?);
            let option = u32::from_be_bytes(self.take()?);
            let reply = u32::from_be_bytes(self.take()?);
            let bytes = u32::from_be_bytes(self.take()?);
            if magic != OPTION_REPLY_MAGIC || option != kind {
                return Err(self.failed("what the NBD server answers is not the protocol"));
            }
            let payload = self.payload(bytes)?;
            match reply {
                option_reply::ACK => return Ok(true),
                option_reply::ERR_UNSUP => return Ok(false),
                option_reply::META_CONTEXT => self.has_context = true,
                option_reply::INFO
                    if payload.len() >= 12 && payload[..2] == info::EXPORT.to_be_bytes() =>
                {
                    self.bytes = be64(&payload[2..10]);
                    self.flags = u16::from_be_bytes([payload[10], payload[11]]);
                }
                option_reply::INFO => {}
                _ => {
                    let why = String::from_utf8_lossy(&payload);
                    return Err(
                        self.failed(format_args!("the NBD server refuses ({reply:#x}): {why}"))
                    );
                }
            }
        }
    }

    fn request(&mut self, kind: u16, offset: u64, length: u32) -> Result<(), Failure> {
        let mut head = [0; 28];
        head[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        head[6..8].copy_from_slice(&kind.to_be_bytes());
        head[16..24].copy_from_slice(&offset.to_be_bytes());
        head[24..].copy_from_slice(&length.to_be_bytes());
        self.send(&head)
    }

    /// Read into the whole of `buffer`.
    pub fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        self.request(command::READ, offset, buffer.len() as u32)?;
        self.reply(&format!("reading at byte {offset}"), offset, buffer)?;
        Ok(())
    }

    /// Write every run that is not zero of `buffer`, and zeroes for the others if `zeroes` says so.
    pub fn write(
        &mut self,
        offset: u64,
        buffer: &[u8],
        runs: &[Run],
        zeroes: bool,
    ) -> Result<(), Failure> {
        let (mut at, mut sent) = (0, 0_usize);
        for run in runs {
            let end = at + run.bytes as usize;
            if !run.is_zero {
                self.request(command::WRITE, offset + at as u64, run.bytes as u32)?;
                self.send(&buffer[at..end])?;
                sent += 1;
            } else if zeroes {
                self.request(command::WRITE_ZEROES, offset + at as u64, run.bytes as u32)?;
                sent += 1;
            }
            at = end;
        }
        for _ in 0..sent {
            self.reply(&format!("writing at byte {offset}"), 0, &mut [])?;
        }
        Ok(())
    }

    /// Write zeroes, without keeping the space.
    pub fn write_zeroes(&mut self, offset: u64, bytes: u32) -> Result<(), Failure> {
        self.request(command::WRITE_ZEROES, offset, bytes)?;
        self.reply(&format!("writing zeroes at byte {offset}"), 0, &mut [])?;
        Ok(())
    }

    /// Make durable what was acknowledged, on every connection.
    pub fn flush(&mut self) -> Result<(), Failure> {
        if self.flags & transmission_flag::SEND_FLUSH == 0 {
            return Ok(());
        }
        self.request(command::FLUSH, 0, 0)?;
        self.reply("flushing", 0, &mut [])?;
        Ok(())
    }

    /// The runs from `offset` on; they may end before the range does, and there is one at least.
    pub fn runs(&mut self, offset: u64, bytes: u32) -> Result<Vec<Run>, Failure> {
        let data = Run {
            bytes: u64::from(bytes),
            is_zero: false,
        };
        if !self.has_context {
            return Ok(vec![data]);
        }
        self.request(command::BLOCK_STATUS, offset, bytes)?;
        let what = format!("the allocation at byte {offset}");
        let status = self.reply(&what, 0, &mut [])?;
        let runs: Vec<_> = (status.get(4..).unwrap_or_default())
            .chunks_exact(8)
            .map(|run| Run {
                bytes: u64::from(be32(&run[..4])),
                is_zero: be32(&run[4..]) & allocation::ZERO != 0,
            })
            .collect();
        if runs.is_empty() || runs.iter().any(|run| run.bytes == 0) {
            return Err(self.failed(format_args!("{what}: the NBD server's answer is empty")));
        }
        Ok(runs)
    }

    /// Take the reply to the one request whose reply comes next. Data goes into `buffer`, whose first byte
    /// is that of `offset`; the payload of a block status is returned.
    fn reply(&mut self, what: &str, offset: u64, buffer: &mut [u8]) -> Result<Vec<u8>, Failure> {
        let mut status = Vec::new();
        let mut error = None;
        let mut filled = 0;
        loop {
            let magic = u32::from_be_bytes(self.take()?);
            let done = match magic {
                SIMPLE_REPLY_MAGIC => {
                    let number = u32::from_be_bytes(self.take()?);
                    let _cookie: [u8; 8] = self.take()?;
                    if number != 0 {
                        error = Some(said(number, &[]));
                    } else if !buffer.is_empty() {
                        self.fill(buffer)?;
                        filled = buffer.len();
                    }
                    true
                }
                STRUCTURED_REPLY_MAGIC => {
                    let flags = u16::from_be_bytes(self.take()?);
                    let kind = u16::from_be_bytes(self.take()?);
                    let _cookie: [u8; 8] = self.take()?;
                    let bytes = u32::from_be_bytes(self.take()?);
                    match kind {
                        chunk::OFFSET_DATA if bytes > 8 => {
                            let at = u64::from_be_bytes(self.take()?);
                            let place = self.place(at, bytes - 8, offset, buffer)?;
                            self.stream.read_exact(place).map_err(|error| {
                                Failure::failed(format!(
                                    "{}: the NBD connection has ended: {error}",
                                    self.name
                                ))
                            })?;
                            filled += (bytes - 8) as usize;
                        }
                        CHUNK_OFFSET_HOLE if bytes == 12 => {
                            let at = u64::from_be_bytes(self.take()?);
                            let bytes = u32::from_be_bytes(self.take()?);
                            self.place(at, bytes, offset, buffer)?.fill(0);
                            filled += bytes as usize;
                        }
                        chunk::BLOCK_STATUS => status = self.payload(bytes)?,
                        chunk::ERROR | chunk::ERROR_OFFSET if bytes >= 6 => {
                            let payload = self.payload(bytes)?;
                            let length = usize::from(u16::from_be_bytes([payload[4], payload[5]]));
                            let words = payload.get(6..6 + length).unwrap_or_default();
                            error = Some(said(be32(&payload[..4]), words));
                        }
                        CHUNK_NONE if bytes == 0 => {}
                        _ => {
                            return Err(self.failed(format_args!(
                                "{what}: an NBD chunk of type {kind} was not asked for"
                            )));
                        }
                    }
                    flags & chunk::FLAG_DONE != 0
                }
                _ => {
                    return Err(self.failed("what the NBD server answers is not the protocol"));
                }
            };
            if done {
                break;
            }
        }
        match error {
            Some(error) => Err(self.failed(format_args!("{what}: {error}"))),
            None if filled != buffer.len() => Err(self.failed(format_args!(
                "{what}: the NBD server answered with {filled} bytes instead of {}",
                buffer.len()
            ))),
            None => Ok(status),
        }
    }

    /// The part of `buffer` that a chunk fills.
    fn place<'a>(
        &self,
        at: u64,
        bytes: u32,
        offset: u64,
        buffer: &'a mut [u8],
    ) -> Result<&'a mut [u8], Failure> {
        at.checked_sub(offset)
            .and_then(|start| buffer.get_mut(start as usize..start as usize + bytes as usize))
            .ok_or_else(|| self.failed("the NBD server sends what was not asked for"))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Politeness: the server also takes the end of the connection.
        let _ = self.request(command::DISC, 0, 0);
    }
}

/// An error of the server for people.
fn said(number: u32, words: &[u8]) -> String {
    let name = match number {
        1 => "not permitted",
        5 => "input/output error",
        12 => "out of memory",
        22 => "invalid",
        28 => "no space left",
        108 => "the server is stopping",
        _ => "error",
    };
    if words.is_empty() {
        format!("{name} (NBD error {number})")
    } else {
        format!("{name}: {}", String::from_utf8_lossy(words))
    }
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from(be32(&bytes[..4])) << 32 | u64::from(be32(&bytes[4..]))
}
