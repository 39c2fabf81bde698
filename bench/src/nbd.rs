//! A small NBD client: fixed newstyle, simple replies, requests in flight. Written apart from the
//! server's code, so that a misunderstanding of the protocol is not shared.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::failure::{Context, Failure, Result};

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_E889_0455_65A9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
/// Longest option reply that is taken: they carry a name or a message.
const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;
/// A server that says nothing for so long hangs.
const TIMEOUT: Duration = Duration::from_mins(1);

/// What a client asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Read.
    Read = 0,
    /// Write.
    Write = 1,
    /// End the connection.
    Disconnect = 2,
    /// Make durable.
    Flush = 3,
    /// Discard.
    Trim = 4,
    /// Write zeroes.
    WriteZeroes = 6,
}

/// Durable before the reply.
pub const FLAG_FUA: u16 = 1;

/// The sending half of a connection.
#[derive(Debug)]
pub struct Sender(UnixStream);

/// The receiving half.
#[derive(Debug)]
pub struct Receiver(UnixStream);

/// Connect to an export; its size comes with the halves.
pub fn connect(socket: &Path, export: &str) -> Result<(Sender, Receiver, u64)> {
    let mut stream = UnixStream::connect(socket).context(socket.display())?;
    stream
        .set_read_timeout(Some(TIMEOUT))
        .context("read timeout")?;
    stream
        .set_write_timeout(Some(TIMEOUT))
        .context("write timeout")?;
    let bytes = negotiate(&mut stream, export).context(format_args!("NBD export `{export}`"))?;
    let other = stream.try_clone().context("second handle of the socket")?;
    Ok((Sender(stream), Receiver(other), bytes))
}

fn take<const N: usize>(stream: &mut UnixStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream
        .read_exact(&mut bytes)
        .context("the server's handshake")?;
    Ok(bytes)
}

/// Handshake up to the transmission phase; the size of the export.
fn negotiate(stream: &mut UnixStream, export: &str) -> Result<u64> {
    let greeting: [u8; 18] = take(stream)?;
    if &greeting[..8] != b"NBDMAGIC" || greeting[8..16] != OPTION_MAGIC.to_be_bytes() {
        return Err(Failure::new("no NBD greeting"));
    }
    let mut hello = Vec::new();
    // Fixed newstyle, no zeroes.
    hello.extend(3u32.to_be_bytes());
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(OPTION_GO.to_be_bytes());
    hello.extend((export.len() as u32 + 6).to_be_bytes());
    hello.extend((export.len() as u32).to_be_bytes());
    hello.extend(export.as_bytes());
    hello.extend(0u16.to_be_bytes());
    stream.write_all(&hello).context("sending the handshake")?;
    let mut size = None;
    loop {
        let magic = u64::from_be_bytes(take(stream)?);
        let _option: [u8; 4] = take(stream)?;
        let kind = u32::from_be_bytes(take(stream)?);
        let length = u32::from_be_bytes(take(stream)?);
        if magic != OPTION_REPLY_MAGIC || length > OPTION_REPLY_BYTES_MAX {
            return Err(Failure::new("malformed option reply"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data).context("an option reply")?;
        match kind {
            REPLY_ACK => return size.context("the server did not tell the size"),
            REPLY_INFO if data.len() >= 12 && data[..2] == [0, 0] => {
                size = data[2..10].try_into().ok().map(u64::from_be_bytes);
            }
            REPLY_INFO => {}
            _ => {
                return Err(Failure::new(format!(
                    "refused ({kind:#x}): {}",
                    String::from_utf8_lossy(&data)
                )));
            }
        }
    }
}

impl Sender {
    /// Send a request; `data` is that of a write.
    pub fn send(
        &mut self,
        command: Command,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> std::io::Result<()> {
        let mut head = [0; 28];
        head[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        head[4..6].copy_from_slice(&flags.to_be_bytes());
        head[6..8].copy_from_slice(&(command as u16).to_be_bytes());
        head[8..16].copy_from_slice(&cookie.to_be_bytes());
        head[16..24].copy_from_slice(&offset.to_be_bytes());
        head[24..].copy_from_slice(&length.to_be_bytes());
        self.0.write_all(&head)?;
        self.0.write_all(data)
    }
}

impl Receiver {
    /// The next reply: its cookie and error number. The data of a read follows it.
    pub fn reply(&mut self) -> std::io::Result<(u64, u32)> {
        let mut head = [0; 16];
        self.0.read_exact(&mut head)?;
        let word =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if word(0) != SIMPLE_REPLY_MAGIC {
            return Err(std::io::Error::other(format!(
                "a reply begins with {:#x}",
                word(0)
            )));
        }
        Ok((u64::from(word(8)) << 32 | u64::from(word(12)), word(4)))
    }

    /// The data of a read.
    pub fn data(&mut self, buffer: &mut [u8]) -> Result<()> {
        self.0.read_exact(buffer).context("the data of a read")
    }
}
