//! Where key-encryption keys come from: a file, or what a command prints.
//!
//! A key is 32 bytes: as they are, as 64 hexadecimal digits, or in base64. A command runs without a
//! shell, for [`COMMAND_TIME_MAX`] at most, and nothing beyond [`SOURCE_BYTES_MAX`] is read.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Once, mpsc};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::hkdf;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// More than any form of a key has.
const SOURCE_BYTES_MAX: u64 = 256;
/// A command that has not ended by then is killed.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(20);
const COMMAND_PAUSE: Duration = Duration::from_millis(5);

/// Why a volume's key cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file or command did not bring one.
    #[error(
        "key: {place}: {why}: put the key there and try again (a volume that is not open: `hdcs volume open`)"
    )]
    Source {
        /// Which.
        place: String,
        /// What happened.
        why: String,
    },
    /// What it brought is no key.
    #[error(
        "key: {0}: a key is {KEY_BYTES} bytes, as they are, as 64 hexadecimal digits or in base64 (make one \
         with `openssl rand -hex 32`)"
    )]
    Form(String),
    /// It is another one.
    #[error(
        "key: {place}: that is key {found}, and the volume's data key is wrapped with key {needs}: put \
         that key there and try again (a volume that is not open: `hdcs volume open`)"
    )]
    Other {
        /// Where the key comes from.
        place: String,
        /// The fingerprint of the key there.
        found: String,
        /// The fingerprint of the right one.
        needs: String,
    },
    /// The wrapped key is not what was written.
    #[error("key: the volume's wrapped data key is damaged: restore it from a copy")]
    Damaged,
    /// The data key is for something that this program does not know.
    #[error(
        "key: the volume is encrypted with `{0}`, which this program does not know: upgrade HDCS"
    )]
    Cipher(String),
    /// The system gave no random numbers.
    #[error("key: the system gives no random numbers")]
    Random,
}

impl KeyError {
    /// Whether the key is merely not to be had here: what is encrypted with it may be good.
    pub fn is_keyless(&self) -> bool {
        !matches!(self, Self::Damaged)
    }
}

/// Where a key-encryption key comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    /// This file.
    File(PathBuf),
    /// What this program prints: words between blanks, without a shell.
    Command(String),
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Command(command) => write!(f, "command `{command}`"),
        }
    }
}

/// A key-encryption key.
pub struct WrappingKey(Zeroizing<[u8; KEY_BYTES]>);

impl fmt::Debug for WrappingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WrappingKey({})", self.fingerprint())
    }
}

impl WrappingKey {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &*self.0
    }

    /// Tells it from others, and tells nothing of it.
    pub fn fingerprint(&self) -> String {
        struct Bytes;
        impl hkdf::KeyType for Bytes {
            fn len(&self) -> usize {
                8
            }
        }
        let mut print = [0; 8];
        hkdf::Salt::new(hkdf::HKDF_SHA512, b"hdcs wrapping key")
            .extract(&*self.0)
            .expand(&[b"fingerprint"], Bytes)
            .and_then(|expanded| expanded.fill(&mut print))
            .expect("HKDF gives 8 bytes");
        format!("{:016x}", u64::from_be_bytes(print))
    }

    /// From any of its forms.
    fn parse(found: &[u8]) -> Option<Self> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        if found.len() == KEY_BYTES {
            key.copy_from_slice(found);
            return Some(Self(key));
        }
        let text = std::str::from_utf8(found).ok()?.trim();
        if text.len() == 2 * KEY_BYTES && text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            for (at, byte) in key.iter_mut().enumerate() {
                *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
            }
            return Some(Self(key));
        }
        let bytes = Zeroizing::new(BASE64_STANDARD.decode(text).ok()?);
        (bytes.len() == KEY_BYTES).then(|| key.copy_from_slice(&bytes))?;
        Some(Self(key))
    }
}

/// Let no core dump of this process show its memory, nor a debugger of the same user: keys and clients'
/// data are in it.
pub fn keep_from_dumps() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: it takes numbers only.
        if unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) } < 0 {
            let error = std::io::Error::last_os_error();
            tracing::warn!(%error, "cannot keep keys out of core dumps");
        }
    });
}

impl KeySource {
    /// Get the key. Blocks.
    pub fn read(&self) -> Result<WrappingKey, KeyError> {
        keep_from_dumps();
        let found = match self {
            Self::File(path) => read_file(path),
            Self::Command(command) => run(command),
        };
        let found = found.map_err(|why| KeyError::Source {
            place: self.to_string(),
            why,
        })?;
        WrappingKey::parse(&found).ok_or_else(|| KeyError::Form(self.to_string()))
    }
}

fn read_file(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    // A pipe that nobody writes to must not hold anybody up.
    let mut options = File::options();
    let options = options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| error.to_string())?;
    let found = file.metadata().map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    if found.mode() & 0o077 != 0 {
        tracing::warn!(
            "key file {}: its mode {:o} lets others read or change it: `chmod 600` it",
            path.display(),
            found.mode() & 0o777
        );
    }
    take(file).map_err(|error| error.to_string())
}

/// What can be read, as far as a key may be long.
fn take(from: impl Read) -> std::io::Result<Zeroizing<Vec<u8>>> {
    // Never grows, so no copy is left behind.
    let mut found = Zeroizing::new(Vec::with_capacity(SOURCE_BYTES_MAX as usize + 32));
    from.take(SOURCE_BYTES_MAX).read_to_end(&mut found)?;
    Ok(found)
}

/// What a command prints.
fn run(command: &str) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut words = command.split_whitespace();
    let program = words.next().ok_or("it is empty")?;
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // What it says goes where the daemon's own lines go.
        .stderr(Stdio::inherit())
        .process_group(0)
        .spawn()
        .map_err(|error| error.to_string())?;
    let output = child.stdout.take().expect("its output is a pipe");
    let (sender, printed) = mpsc::channel();
    // It ends with the output: that of a child that the command has left behind, too.
    std::thread::spawn(move || sender.send(take(output)));
    let deadline = Instant::now() + COMMAND_TIME_MAX;
    let status = wait(&mut child, deadline)?;
    if !status.success() {
        return Err(format!("it failed: {status}"));
    }
    let found = printed.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    let found =
        found.map_err(|_| late("it ended, but what it has started did not close its output"))?;
    found.map_err(|error| error.to_string())
}

fn late(what: &str) -> String {
    format!("{what} within {} s", COMMAND_TIME_MAX.as_secs())
}

/// The end of a command, or of its whole group when its time is up.
fn wait(child: &mut Child, deadline: Instant) -> Result<std::process::ExitStatus, String> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(COMMAND_PAUSE),
            Ok(None) => {
                // SAFETY: it takes numbers only; the group is the child's, which is not reaped yet.
                unsafe { libc::kill(-child.id().cast_signed(), libc::SIGKILL) };
                let _ = child.wait();
                return Err(late("it did not end"));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}
