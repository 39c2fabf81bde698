//! A thread for what would block: opening, truncating, seeking holes.
//!
//! Jobs run one after another in the order of submission. Results return through a queue and an
//! eventfd that the ring reads; the same eventfd wakes the ring for other threads' messages.
//! Threads that are not the worker's end operations through a [`Remote`], over the same queue.
//! Dropping the worker lets the running job end and drops the others.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use hdcs_core::io::{Extent, Token};

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
        if self.results.send((self.owner, token, output)).is_ok() {
            self.waker.wake();
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Worker {
    jobs: Sender<(Owner, Token, Job)>,
    sender: Sender<(Owner, Token, JobOutput)>,
    results: Receiver<(Owner, Token, JobOutput)>,
    waker: Waker,
}

impl Worker {
    /// Start the thread.
    pub fn start() -> io::Result<Self> {
        let waker = Waker::new()?;
        let (jobs, queue) = channel::<(Owner, Token, Job)>();
        let (sender, results) = channel();
        let (wake, sending) = (waker.clone(), sender.clone());
        std::thread::Builder::new()
            .name("hdcs-worker".into())
            .spawn(move || {
                while let Ok((owner, token, job)) = queue.recv() {
                    if sending.send((owner, token, job())).is_err() {
                        return;
                    }
                    wake.wake();
                }
            })?;
        Ok(Self {
            jobs,
            sender,
            results,
            waker,
        })
    }

    /// Queue a job.
    pub fn submit(&self, owner: Owner, token: Token, job: Job) {
        self.jobs
            .send((owner, token, job))
            .expect("the worker lives as long as its queue");
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
