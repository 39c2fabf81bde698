//! Writes a line for every operation that ended to a file (`log=PATH`): microseconds since the
//! first, what, offset, bytes, how it ended, and how long it took.
//!
//! The file is appended to through a buffer that is written out about once a second and when the
//! backend is closed. A line that cannot be written is lost; the operation is not.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use hdcs_core::base::io::{Completion, Nanos, Token};
use hdcs_device::ring::Outcome;

use super::later::earlier;
use crate::url::{OptionList, UrlError};
use crate::{Backend, BackendError, Capabilities, Operation, Port};

/// The names of its options.
pub const OPTIONS: &[&str] = &["log"];

/// How long a line stays in memory.
const FLUSH_EVERY: Nanos = Nanos::from_millis(1000);

/// Where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The file; lines are added at its end.
    pub path: PathBuf,
}

impl Options {
    /// Take the options out of the list.
    pub fn parse(list: &mut OptionList) -> Result<Option<Self>, UrlError> {
        Ok(list.path("log")?.map(|path| Self { path }))
    }
}

/// A log that is open.
pub struct Prepared(File);

/// Open the file.
pub fn prepare(options: &Options) -> Result<Prepared, BackendError> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&options.path)
        .map(Prepared)
        .map_err(|source| BackendError::Log {
            path: options.path.clone(),
            source,
        })
}

struct Running {
    token: Token,
    what: &'static str,
    offset: u64,
    bytes: u64,
    started: Nanos,
}

/// See the module.
pub struct Log {
    file: BufWriter<File>,
    origin: Option<Nanos>,
    running: Vec<Running>,
    unwritten_since: Option<Nanos>,
    inner: Box<dyn Backend>,
}

impl Log {
    /// Over `inner`.
    pub fn new(prepared: Prepared, inner: Box<dyn Backend>) -> Self {
        Self {
            file: BufWriter::new(prepared.0),
            origin: None,
            running: Vec::new(),
            unwritten_since: None,
            inner,
        }
    }

    fn note(&mut self, now: Nanos, ended: &[Completion]) {
        for completion in ended {
            let index = self
                .running
                .iter()
                .position(|running| running.token == completion.token)
                .expect("what ended was submitted through here");
            let running = self.running.swap_remove(index);
            let origin = self.origin.unwrap_or_default();
            let how = match &completion.result {
                Ok(_) => "ok".to_owned(),
                Err(error) => error.to_string().replace(' ', "_"),
            };
            // A lost line is only a line.
            let _ = writeln!(
                self.file,
                "{} {} {} {} {} {}",
                running.started.since(origin).0 / 1000,
                running.what,
                running.offset,
                running.bytes,
                how,
                now.since(running.started).0 / 1000
            );
            self.unwritten_since.get_or_insert(now);
        }
    }
}

impl Backend for Log {
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        self.origin.get_or_insert(now);
        let (what, offset, bytes) = operation.ask.describe();
        self.running.push(Running {
            token: operation.token,
            what,
            offset,
            bytes,
            started: now,
        });
        let before = port.done.len();
        self.inner.submit(now, operation, port);
        self.note(now, &port.done[before..]);
    }

    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        let before = port.done.len();
        self.inner.completed(now, token, outcome, port);
        self.note(now, &port.done[before..]);
    }

    fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        let before = port.done.len();
        self.inner.poll(now, port);
        self.note(now, &port.done[before..]);
        if let Some(since) = self.unwritten_since
            && now.since(since) >= FLUSH_EVERY
        {
            // A lost line is only a line.
            let _ = self.file.flush();
            self.unwritten_since = None;
        }
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let flush = self.unwritten_since.map(|since| since.plus(FLUSH_EVERY));
        earlier(flush, self.inner.next_wakeup())
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn finish(&mut self) -> bool {
        self.inner.finish()
    }
}
