//! Threads for what would block: opening, truncating, seeking holes.
//!
//! Jobs of an owner run one after another in the order of submission, on a thread that starts with the first of them:
//! a device that hangs keeps no job of another owner waiting. Results return through a queue and an
//! eventfd that the ring reads; the same eventfd wakes the ring for other threads' messages.
//! Threads that are not the worker's end operations through a [`Remote`], over the same queue.
//! Dropping the worker lets the running jobs end and drops the others.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use hdcs_core::base::io::{Extent, Token};

use super::Errno;
use super::ring::Owner;

/// What a job brought.
pub enum JobOutput {
    /// Nothing but its success.
    Unit(Result<(), Errno>),
    /// The extents of a file.
    Extents(Result<Vec<Extent>, Errno>),
    /// Something that the owner knows.
    Any(Box<dyn std::any::Any + Send>),
}

impl std::fmt::Debug for JobOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unit(result) => result.fmt(f),
            Self::Extents(result) => result.fmt(f),
            Self::Any(_) => f.write_str("Any"),
        }
    }
}

/// Something that blocks.
pub type Job = Box<dyn FnOnce() -> JobOutput + Send>;

/// Wakes the thread of a ring.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    fn new() -> io::Result<Self> {
        // SAFETY: makes a descriptor; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Self(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Wake it, now or when it next waits.
    pub fn wake(&self) {
        let one = 1u64;
        // SAFETY: writes the eight bytes of `one`. It cannot fail: the counter never overflows,
        // since every reader takes all of it.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

/// Ends operations of one owner from other threads.
#[derive(Clone, Debug)]
pub struct Remote {
    owner: Owner,
    results: Sender<(Owner, Token, JobOutput)>,
    waker: Waker,
}

impl Remote {
    /// End an operation. If the ring has gone, nobody waits for it.
    pub fn end(&self, token: Token, output: JobOutput) {
        self.ends(token, output);
    }

    /// The same; whether the ring is there.
    fn ends(&self, token: Token, output: JobOutput) -> bool {
        let is_taken = self.results.send((self.owner, token, output)).is_ok();
        if is_taken {
            self.waker.wake();
        }
        is_taken
    }
}

/// See the module.
#[derive(Debug)]
pub struct Worker {
    threads: HashMap<Owner, Sender<(Token, Job)>>,
    sender: Sender<(Owner, Token, JobOutput)>,
    results: Receiver<(Owner, Token, JobOutput)>,
    waker: Waker,
}

impl Worker {
    /// No thread yet.
    pub fn start() -> io::Result<Self> {
        let (sender, results) = channel();
        Ok(Self {
            threads: HashMap::new(),
            sender,
            results,
            waker: Waker::new()?,
        })
    }

    /// Queue a job. Without a thread for it, it runs at once, on this one.
    pub fn submit(&mut self, owner: Owner, token: Token, job: Job) {
        if let Some(thread) = self.threads.get(&owner) {
            // A thread ends with its queue.
            let _ = thread.send((token, job));
            return;
        }
        let (queue, jobs) = channel::<(Token, Job)>();
        let remote = self.remote(owner);
        let thread = std::thread::Builder::new().name("hdcs-worker".into());
        let started = thread.spawn(move || {
            while let Ok((token, job)) = jobs.recv()
                && remote.ends(token, job())
            {}
        });
        match started {
            Ok(_) => {
                // It has just begun to wait for it.
                let _ = queue.send((token, job));
                self.threads.insert(owner, queue);
            }
            Err(error) => {
                tracing::warn!(%error, "no thread for what blocks: the data path does it itself");
                self.remote(owner).end(token, job());
            }
        }
    }

    /// How other threads end operations of `owner`.
    pub fn remote(&self, owner: Owner) -> Remote {
        Remote {
            owner,
            results: self.sender.clone(),
            waker: self.waker.clone(),
        }
    }

    /// A result, if there is one.
    pub fn take(&self) -> Option<(Owner, Token, JobOutput)> {
        self.results.try_recv().ok()
    }

    /// What wakes the ring.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// What the ring reads.
    pub fn eventfd(&self) -> RawFd {
        self.waker.0.as_raw_fd()
    }
}
