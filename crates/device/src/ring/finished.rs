//! How operations of a ring end, and whose they are.

use std::os::fd::OwnedFd;

use hdcs_core::base::io::{Done, Token};

use crate::Errno;
use crate::worker::JobOutput;

/// Whose operation it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The read cache.
    Cache,
    /// The volume in this slot, on its write log.
    Volume(u32),
    /// The volume in this slot, on the cache device.
    CacheOf(u32),
    /// The backend of the volume in this slot.
    Backend(u32),
    /// Receiving on the connection in this slot.
    Receive(u32),
    /// Sending on the connection in this slot.
    Send(u32),
    /// The listener in this slot.
    Listener(u32),
    /// The copy of a replicated log in this slot, on its device.
    Copy(u32),
    /// Copies that are being opened.
    Copies,
    /// Where other nodes connect.
    LinkListener,
    /// Connecting, for the link in this slot.
    LinkConnect(u32),
    /// Receiving on the link in this slot.
    LinkReceive(u32),
    /// Sending on the link in this slot.
    LinkSend(u32),
    /// Work of the shard itself.
    Shard,
}

/// How an operation ended.
#[derive(Debug)]
pub enum Outcome {
    /// A read, write, sync or allocation.
    Device(Result<Done, Errno>),
    /// So many bytes were received or sent.
    Count(Result<usize, Errno>),
    /// A connection came in, or accepting failed.
    Accepted(Result<OwnedFd, Errno>),
    /// A socket was connected, or could not be.
    Connected(Result<(), Errno>),
    /// A job of the worker.
    Job(JobOutput),
    /// A descriptor has something to read, or cannot be waited for.
    Readable(Result<(), Errno>),
    /// Another thread has woken the ring.
    Woken,
}

/// The end of one operation.
#[derive(Debug)]
pub struct Finished {
    /// Whose.
    pub owner: Owner,
    /// Which of the owner's.
    pub token: Token,
    /// How it ended.
    pub outcome: Outcome,
}
