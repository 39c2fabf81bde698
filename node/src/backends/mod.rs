//! Where cold data lives: one file per kind behind one small trait, with filters that stack over
//! the same trait.
//!
//! The contract, which [`Stack`] checks for all and the conformance suite tests for all:
//! 1. Every [`Operation`] ends in exactly one [`Completion`] with its token, in any order, in a
//!    later turn or at once.
//! 2. A read brings what the last completed write, zero or resize of each byte left there.
//! 3. What was completed before a flush was submitted is durable when the flush completes.
//! 4. `Extents` answers with consecutive runs from the start of the range, at least one, all
//!    within it; what it calls a hole or zero reads as zeroes.
//! 5. No method blocks; what would block runs on the ring's worker.
//!
//! Failure: operations end with an [`IoError`]; opening fails with a [`BackendError`], a sentence
//! for the user.

pub mod file;
pub mod url;

#[cfg(test)]
pub(crate) mod conformance;

use std::path::PathBuf;

use hdcs_core::buf::{Buf, BufMut};
use hdcs_core::error::IoError;
use hdcs_core::io::{Completion, Done, Nanos, SectorRange, Token};
use hdcs_core::limits::SECTOR_BYTES;
use thiserror::Error;

use crate::device::file::DeviceError;
use crate::device::ring::{Outcome, Owner, Ring};
use crate::filters;
use url::{BackendUrl, Place, UrlError};

/// What is asked of a backend. Offsets and lengths are bytes, multiples of 512.
#[derive(Debug)]
pub enum Ask {
    /// Fill the buffer.
    Read {
        /// From where.
        offset: u64,
        /// Returned filled.
        buf: BufMut,
    },
    /// Write buffers one after another.
    Write {
        /// To where.
        offset: u64,
        /// What.
        data: Vec<Buf>,
    },
    /// Make a range read as zeroes.
    Zero {
        /// From where.
        offset: u64,
        /// How much.
        bytes: u64,
        /// Whether its space may be given back.
        unmap: bool,
    },
    /// Make completed writes durable.
    Flush,
    /// Describe the allocation.
    Extents {
        /// Of what.
        range: SectorRange,
    },
    /// Change the size; what is added reads as zeroes.
    Resize {
        /// The new size.
        bytes: u64,
    },
}

impl Ask {
    /// A word for it, and the bytes that it is about.
    pub fn describe(&self) -> (&'static str, u64, u64) {
        match self {
            Self::Read { offset, buf } => ("read", *offset, buf.len() as u64),
            Self::Write { offset, data } => {
                let bytes = data.iter().map(|buf| buf.len() as u64).sum();
                ("write", *offset, bytes)
            }
            Self::Zero {
                offset,
                bytes,
                unmap,
            } => (if *unmap { "discard" } else { "zero" }, *offset, *bytes),
            Self::Flush => ("flush", 0, 0),
            Self::Extents { range } => ("extents", range.byte_offset(), range.bytes() as u64),
            Self::Resize { bytes } => ("resize", 0, *bytes),
        }
    }
}

/// One thing that is asked of a backend.
#[derive(Debug)]
pub struct Operation {
    /// Echoed in the completion; unique among the operations of its backend under way.
    pub token: Token,
    /// What.
    pub ask: Ask,
}

/// What a backend works with during one call.
pub struct Port<'a> {
    /// Where its I/O goes.
    pub ring: &'a mut Ring,
    /// Whose operations they are.
    pub owner: Owner,
    /// What has ended.
    pub done: &'a mut Vec<Completion>,
}

impl Port<'_> {
    /// End an operation.
    pub fn end(&mut self, token: Token, result: Result<Done, IoError>) {
        self.done.push(Completion { token, result });
    }
}

/// One backend, or a filter over one.
pub trait Backend {
    /// Begin an operation.
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>);
    /// An operation that it gave to the ring ended.
    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>);
    /// Go on with what has waited for its time.
    fn poll(&mut self, now: Nanos, port: &mut Port<'_>);
    /// When [`Self::poll`] is due.
    fn next_wakeup(&self) -> Option<Nanos>;
    /// Whether it answers `Extents` with more than "data".
    fn has_extents(&self) -> bool;
}

/// Why a backend could not be opened.
#[derive(Debug, Error)]
pub enum BackendError {
    /// Its URL is wrong.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// Its file could not be used.
    #[error("backend: {0}")]
    Device(#[from] DeviceError),
    /// There is nothing at its place.
    #[error(
        "backend: {} does not exist; put it back, or delete the volume if its data is gone",
        .0.display()
    )]
    Absent(PathBuf),
    /// A new volume over an existing image of another size.
    #[error(
        "backend: {} exists and holds {has} bytes, but the volume has {needs}; create the volume with \
         --size {has} to use it as it is, or name a path that does not exist",
        path.display()
    )]
    Size {
        /// The image.
        path: PathBuf,
        /// Its size.
        has: u64,
        /// The volume's size.
        needs: u64,
    },
    /// The image of an existing volume has lost its end.
    #[error(
        "backend: {} holds {has} bytes, but the volume has {needs}: it was cut or replaced; restore it, \
         or enlarge it (truncate --size {needs}) if zeroes at its end are acceptable",
        path.display()
    )]
    Shrunk {
        /// The image.
        path: PathBuf,
        /// Its size.
        has: u64,
        /// The volume's size.
        needs: u64,
    },
    /// A filter's log file could not be used.
    #[error("backend: cannot open the log {}: {source}", path.display())]
    Log {
        /// The log.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// What to do when nothing is at the backend's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {
    /// Make it: the volume is new.
    Create,
    /// Refuse: the volume's data should be there.
    Refuse,
}

/// A backend that is open but not yet on its shard's thread.
pub struct Prepared {
    file: file::Prepared,
    filters: filters::Prepared,
    bytes: u64,
}

/// Open a backend. Blocks: not for a shard's thread.
pub fn open(url: &str, bytes: u64, absent: Absent) -> Result<Prepared, BackendError> {
    let url = BackendUrl::parse(url)?;
    let Place::File { path, direct } = &url.place;
    Ok(Prepared {
        file: file::open(path, bytes, *direct, absent)?,
        filters: filters::prepare(&url.filters)?,
        bytes,
    })
}

/// Make the backend of a new volume, or see that what exists fits it. Blocks.
pub fn create(url: &str, bytes: u64) -> Result<(), BackendError> {
    open(url, bytes, Absent::Create).map(drop)
}

impl Prepared {
    /// Put it together on the thread that will use it.
    pub fn build(self) -> Stack {
        let backend = filters::stack(self.filters, Box::new(file::FileBackend::new(self.file)));
        Stack {
            backend,
            bytes: self.bytes,
            under_way: 0,
        }
    }
}

/// A backend with its filters, as a shard uses it: checks the contract for all of them.
pub struct Stack {
    backend: Box<dyn Backend>,
    bytes: u64,
    under_way: usize,
}

impl Stack {
    /// Operations that have not ended.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Size that operations must keep to.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Begin an operation. One off the sector grid is a bug of the caller, and asserts. What a
    /// write or zero asks beyond the end is left out: it was accepted before the volume shrank.
    pub fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let Operation { token, mut ask } = operation;
        let (what, offset, bytes) = ask.describe();
        if let Ask::Resize { bytes } = ask {
            // While a resize is under way, the smaller size is the one to keep to.
            self.bytes = self.bytes.min(bytes);
        } else {
            let sector = SECTOR_BYTES as u64;
            assert!(
                offset.is_multiple_of(sector) && bytes.is_multiple_of(sector),
                "backend {what} of {bytes} bytes at {offset}: off the sector grid"
            );
            let inside = self.bytes.saturating_sub(offset);
            if bytes > inside {
                match &mut ask {
                    Ask::Write { data, .. } => cut(data, inside as usize),
                    Ask::Zero { bytes, .. } => *bytes = inside,
                    _ => return port.end(token, Err(IoError::Failed)),
                }
                if inside == 0 {
                    return port.end(token, Ok(Done::Written));
                }
            }
        }
        self.under_way += 1;
        let before = port.done.len();
        self.backend.submit(now, Operation { token, ask }, port);
        self.ended(before, port);
    }

    /// A resize has ended; operations must keep to the new size from now on.
    pub fn resized(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// See [`Backend::completed`].
    pub fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        let before = port.done.len();
        self.backend.completed(now, token, outcome, port);
        self.ended(before, port);
    }

    /// See [`Backend::poll`].
    pub fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        let before = port.done.len();
        self.backend.poll(now, port);
        self.ended(before, port);
    }

    /// See [`Backend::next_wakeup`].
    pub fn next_wakeup(&self) -> Option<Nanos> {
        self.backend.next_wakeup()
    }

    /// See [`Backend::has_extents`].
    pub fn has_extents(&self) -> bool {
        self.backend.has_extents()
    }

    fn ended(&mut self, before: usize, port: &Port<'_>) {
        let ended = port.done.len() - before;
        assert!(ended <= self.under_way, "an operation ended twice");
        self.under_way -= ended;
    }
}

/// Keep the first `bytes` bytes.
fn cut(data: &mut Vec<Buf>, mut bytes: usize) {
    data.retain_mut(|buf| {
        let keep = buf.len().min(bytes);
        bytes -= keep;
        if keep < buf.len() {
            *buf = buf.slice(0..keep);
        }
        keep > 0
    });
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Stack({} bytes, {} under way)",
            self.bytes, self.under_way
        )
    }
}
