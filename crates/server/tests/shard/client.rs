//! A blocking NBD client that knows the least of the protocol: one export, simple replies.

use std::io::{Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const WRITE_ZEROES: u16 = 6;

pub struct Client {
    pub stream: UnixStream,
    pub bytes: u64,
    cookie: u64,
}

impl Client {
    pub fn connect(path: &Path, export: &str) -> Self {
        let mut stream = UnixStream::connect(path).unwrap();
        stream
            .set_read_timeout(Some(crate::node::PATIENCE))
            .unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        let mut hello = Vec::new();
        hello.extend(3u32.to_be_bytes());
        hello.extend(b"IHAVEOPT");
        hello.extend(1u32.to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        stream.write_all(&hello).unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).unwrap();
        Self {
            stream,
            bytes: u64::from_be_bytes(answer[..8].try_into().unwrap()),
            cookie: 0,
        }
    }

    /// Send a request; its cookie.
    pub fn send(&mut self, command: u16, offset: u64, bytes: u32, data: &[u8]) -> Result<u64> {
        self.cookie += 1;
        let mut request = Vec::with_capacity(28 + data.len());
        request.extend(0x2560_9513u32.to_be_bytes());
        request.extend(0u16.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(bytes.to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)?;
        Ok(self.cookie)
    }

    /// The next reply: its cookie and error. Data is left for the caller.
    pub fn reply(&mut self) -> Result<(u64, u32)> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        let cookie = u64::from_be_bytes(reply[8..].try_into().unwrap());
        Ok((cookie, error))
    }

    fn call(&mut self, command: u16, offset: u64, bytes: u32, data: &[u8]) -> Result<()> {
        let cookie = self.send(command, offset, bytes, data)?;
        let (answered, error) = self.reply()?;
        assert_eq!(answered, cookie);
        match error {
            0 => Ok(()),
            error => Err(std::io::Error::from_raw_os_error(error as i32)),
        }
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.call(WRITE, offset, data.len() as u32, data)
    }

    pub fn read(&mut self, offset: u64, bytes: usize) -> Result<Vec<u8>> {
        self.call(READ, offset, bytes as u32, &[])?;
        let mut data = vec![0; bytes];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    pub fn flush(&mut self) -> Result<()> {
        self.call(FLUSH, 0, 0, &[])
    }

    pub fn trim(&mut self, offset: u64, bytes: u32) -> Result<()> {
        self.call(TRIM, offset, bytes, &[])
    }

    pub fn zero(&mut self, offset: u64, bytes: u32) -> Result<()> {
        self.call(WRITE_ZEROES, offset, bytes, &[])
    }
}

/// Bytes that follow from a seed; none of them zero.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(1..))
        .take(bytes)
        .collect()
}
