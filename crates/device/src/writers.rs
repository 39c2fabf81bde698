//! Threads that make writes durable: each takes a write, waits until the medium has it, and says so.
//!
//! A durable write through io_uring ends in a kernel worker of ordinary priority, which has to wait
//! for the end of a time slice while every processor is busy: milliseconds. A thread that asked for
//! a high priority and waits in the system call itself is woken at once. The figures are in
//! `docs/decisions/2026-11-21-durability-and-direct-io.md`.
//!
//! Invariants:
//! 1. The memory of a write belongs to the ring's slot until its result has been taken; the ring
//!    keeps it while a thread may still read it, even beyond its own end.
//! 2. Every write that was queued brings one result, in any order.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::Errno;
use super::worker::Waker;

/// The priority that threads of the data path ask for: what they wait for is what a client waits
/// for, and they use little processor time.
const NICE: libc::c_int = -20;

/// What a thread is to do.
#[derive(Debug)]
pub enum Task {
    /// Write these buffers, durably if it is said how.
    Write {
        /// To where.
        offset: u64,
        /// The buffers; valid until the result is taken.
        vectors: *const libc::iovec,
        /// How many.
        count: usize,
        /// Whether this call makes it durable.
        dsync: bool,
    },
    /// `fdatasync`.
    Sync,
}

struct Work {
    key: u64,
    fd: RawFd,
    task: Task,
}

// SAFETY: the memory behind the vectors is only read by the thread, and the ring keeps it
// unchanged until it has taken the result.
unsafe impl Send for Work {}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    closed: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    available: Condvar,
    done: Mutex<Vec<(u64, Result<u64, Errno>)>>,
    waker: Waker,
}

/// See the module.
pub struct Writers {
    shared: Arc<Shared>,
}

impl Writers {
    /// Start so many threads, with a high priority if `raise`; `waker` wakes the ring that takes
    /// the results.
    pub fn start(threads: usize, raise: bool, waker: Waker) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            available: Condvar::new(),
            done: Mutex::default(),
            waker,
        });
        let writers = Self { shared };
        for _ in 0..threads {
            let shared = Arc::clone(&writers.shared);
            std::thread::Builder::new()
                .name("hdcs-writer".into())
                .spawn(move || shared.run(raise))?;
        }
        Ok(writers)
    }

    /// Queue a write or sync; its result comes under `key`.
    pub fn submit(&self, key: u64, fd: RawFd, task: Task) {
        let work = Work { key, fd, task };
        locked(&self.shared.queue).work.push_back(work);
        self.shared.available.notify_one();
    }

    /// Whether results wait.
    pub fn has_results(&self) -> bool {
        !locked(&self.shared.done).is_empty()
    }

    /// Move the results to the end of `out`.
    pub fn take(&self, out: &mut Vec<(u64, Result<u64, Errno>)>) {
        out.append(&mut locked(&self.shared.done));
    }
}

impl Drop for Writers {
    /// The threads end after what they are doing; nobody waits, since a device may hang.
    fn drop(&mut self) {
        locked(&self.shared.queue).closed = true;
        self.shared.available.notify_all();
    }
}

impl Shared {
    fn run(&self, raise: bool) {
        if raise {
            raise_priority();
        }
        while let Some(work) = self.next() {
            let result = perform(&work);
            let mut done = locked(&self.done);
            // Whoever takes them takes all, so only the first of them needs to wake it.
            let first = done.is_empty();
            done.push((work.key, result));
            drop(done);
            if first {
                self.waker.wake();
            }
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(work) = queue.work.pop_front() {
                return Some(work);
            }
            if queue.closed {
                return None;
            }
            let woken = self.available.wait(queue);
            queue = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A thread that panicked left nothing half done behind these locks.
fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ask for a high priority for the calling thread; without the right to it, say so and go on.
pub fn raise_priority() {
    // SAFETY: system calls without memory; 0 is the calling thread.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    if result < 0 {
        let error = io::Error::last_os_error();
        tracing::info!(
            %error,
            "the data path keeps the ordinary priority (CAP_SYS_NICE raises it): on a busy machine it waits for time slices"
        );
    }
}

fn perform(work: &Work) -> Result<u64, Errno> {
    let result = match work.task {
        Task::Write {
            offset,
            vectors,
            count,
            dsync,
        } => {
            let flags = if dsync { libc::RWF_DSYNC } else { 0 };
            let (count, offset) = (count as libc::c_int, offset.cast_signed());
            // SAFETY: the ring keeps the vectors and what they point to until it takes the result.
            unsafe { libc::pwritev2(work.fd, vectors, count, offset, flags) }
        }
        // SAFETY: a system call on a descriptor that outlives the operation.
        Task::Sync => unsafe { libc::fdatasync(work.fd) as isize },
    };
    if result < 0 {
        return Err(Errno::last());
    }
    Ok(result as u64)
}
