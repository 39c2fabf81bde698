//! An io_uring with the table of everything that is under way in it.
//!
//! Invariants:
//! 1. An operation's memory lives in its slot until the kernel has ended it; dropping the ring
//!    cancels what is under way, waits for it, and rather leaks memory than frees it too early.
//! 2. Every operation that was started ends in exactly one [`Finished`].
//! 3. A transfer is whole or failed: short ones continue where they stopped, a transfer of zero
//!    bytes fails with `EIO`, `EINTR` and `EAGAIN` are repeated a bounded number of times.
//! 4. A durable write finishes when the medium has it.
//!
//! One thread owns a ring. Nothing here allocates once the table has grown to the largest number
//! of operations under way, except for jobs (which run on the [`Worker`]).

mod address;
mod config;
mod counts;
mod finished;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use address::Address;
pub use config::{RingConfig, Submit};
pub use counts::RingCounts;
pub use finished::{Finished, Outcome, Owner};
use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::io::{Done, Durability, DurableWay, Token};
use io_uring::types::{CancelBuilder, Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use super::Errno;
use super::worker::{Job, Remote, Waker, Worker};
use super::writers::{Task, Writers};

/// How often an operation that made no progress is repeated before it fails.
const RETRIES_MAX: u32 = 1000;
/// Workers of the kernel's for transfers that it cannot begin without waiting. By default there are four for a processor,
/// and a device that hangs would keep them all.
const WORKERS_MAX: u32 = 1024;
/// A transfer that moved too little to continue behind it counts as so many repetitions.
const NO_PROGRESS_COST: u32 = 100;
/// Vectors in one transfer at most: the kernel's `UIO_MAXIOV`.
const VECTORS_MAX: usize = 1024;
/// A short direct transfer continues at a multiple of this: no device that is accepted needs more.
const RESTART_ALIGN: u64 = 4096;
/// How long a dropped ring waits for the kernel.
const DROP_PATIENCE: Duration = Duration::from_secs(5);
/// Transfers under way from which on a device has enough to do, and the next ones go to it together.
const DEVICE_BUSY: usize = 8;
/// Transfers that end in one call of [`Ring::reap`] at most, about: all that a fast device has ended at once would be
/// answered at once, and device and clients would wait for each other by turns.
const REAPED_TRANSFERS_MAX: usize = 4;
/// Completions under this number belong to no operation.
const NO_OPERATION: u64 = u64::MAX;

/// Names a running operation, to cancel it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

/// A file that transfers go to.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The open file.
    pub fd: RawFd,
    /// Whether the kernel may wait for the file's device while it takes an operation: then a worker of the kernel's has to
    /// take it, since this thread waits for nothing.
    pub may_wait: bool,
}

impl From<RawFd> for Target {
    fn from(fd: RawFd) -> Self {
        let may_wait = false;
        Self { fd, may_wait }
    }
}

#[derive(Debug)]
enum Kind {
    Free,
    Read(BufMut),
    /// Holds the data until the kernel has it.
    Write {
        _data: Vec<Buf>,
    },
    /// The `fdatasync` after a write, or one on its own.
    Sync,
    Allocate {
        mode: i32,
    },
    /// Into the slot's vectors.
    Receive,
    Send {
        message: *const libc::msghdr,
    },
    Accept,
    /// The kernel may look at the address until it has connected.
    Connect {
        address: Box<Address>,
    },
    Readable,
    Wake,
}

/// Who performs an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taker {
    Ring,
    /// The ring, to which it goes at once: somebody waits for it.
    RingAtOnce,
    /// A writer thread.
    Writer,
}

struct Operation {
    kind: Kind,
    owner: Owner,
    token: Token,
    generation: u32,
    fd: RawFd,
    offset: u64,
    /// Bytes in all; of an accepted piece of work the whole, of a socket the most.
    bytes: u64,
    done: u64,
    durable: Option<Durability>,
    /// Whether a worker of the kernel's takes it. See [`Target`].
    may_wait: bool,
    taker: Taker,
    /// Whether it is counted in [`Ring::transfers`].
    is_transfer: bool,
    retries: u32,
    /// Stays with the slot, so that its capacity is used again.
    vectors: Vec<libc::iovec>,
}

/// See the module.
pub struct Ring {
    uring: Option<IoUring>,
    operations: Vec<Operation>,
    free: Vec<u32>,
    /// Operations that found the submission queue full.
    backlog: std::collections::VecDeque<squeue::Entry>,
    running: usize,
    /// Reads and writes under way.
    transfers: usize,
    finished: Vec<Finished>,
    worker: Worker,
    writers: Option<Writers>,
    /// Tasks of the writer threads that have brought no result.
    writing: usize,
    written: Vec<(u64, Result<u64, Errno>)>,
    woken: Box<u64>,
    config: RingConfig,
    pending: bool,
    /// Whether a transfer is among what was queued since the kernel was last called.
    has_queued_transfer: bool,
    counts: RingCounts,
    /// The kernel was waited for, and did not end everything.
    given_up: bool,
}

impl Ring {
    /// A ring; the calling thread is the only one that may use it.
    pub fn new(config: RingConfig) -> io::Result<Self> {
        let uring = Self::build(config)?;
        let mut workers = [WORKERS_MAX, 0];
        if let Err(error) = uring.submitter().register_iowq_max_workers(&mut workers) {
            tracing::info!(%error, "the kernel keeps its limit of workers: a device that hangs may hold up others");
        }
        let worker = Worker::start()?;
        let writers = if config.writer_threads > 0 {
            Some(Writers::start(
                config.writer_threads,
                config.raise_priority,
                worker.waker(),
            )?)
        } else {
            None
        };
        let mut ring = Self {
            uring: Some(uring),
            operations: Vec::new(),
            free: Vec::new(),
            backlog: std::collections::VecDeque::new(),
            running: 0,
            transfers: 0,
            finished: Vec::new(),
            worker,
            writers,
            writing: 0,
            written: Vec::new(),
            woken: Box::new(0),
            config,
            pending: false,
            has_queued_transfer: false,
            counts: RingCounts::default(),
            given_up: false,
        };
        ring.arm_waker();
        wake_in_time();
        Ok(ring)
    }

    fn build(config: RingConfig) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        builder
            .setup_clamp()
            .setup_cqsize(config.entries * 8)
            .setup_submit_all()
            .setup_single_issuer()
            .setup_taskrun_flag();
        if config.defer_taskrun {
            builder.setup_defer_taskrun();
        } else {
            builder.setup_coop_taskrun();
        }
        match builder.build(config.entries) {
            // A kernel before 6.1 knows no deferred work, one before 6.0 no single issuer, one before 5.19 no cooperative
            // work.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::builder()
                .setup_clamp()
                .setup_cqsize(config.entries * 8)
                .build(config.entries),
            built => built,
        }
    }

    /// What wakes the thread of this ring from another thread; it shows as [`Outcome::Woken`].
    pub fn waker(&self) -> Waker {
        self.worker.waker()
    }

    /// Operations under way, jobs included, the waker's own not.
    pub fn running(&self) -> usize {
        self.running
    }

    /// Fill `buf` from `offset`.
    pub fn read(
        &mut self,
        owner: Owner,
        token: Token,
        file: impl Into<Target>,
        offset: u64,
        mut buf: BufMut,
    ) {
        let Target { fd, may_wait } = file.into();
        let bytes = buf.len() as u64;
        let vector = libc::iovec {
            iov_base: buf.as_mut_ptr().cast(),
            iov_len: buf.len(),
        };
        let slot = self.take(Kind::Read(buf), owner, token, fd);
        let operation = &mut self.operations[slot as usize];
        operation.may_wait = may_wait;
        operation.offset = offset;
        operation.bytes = bytes;
        operation.vectors.push(vector);
        self.start_transfer(slot);
    }

    /// Write the buffers one after another at `offset`; durable on completion if asked.
    pub fn write(
        &mut self,
        owner: Owner,
        token: Token,
        file: impl Into<Target>,
        offset: u64,
        data: Vec<Buf>,
        durable: Option<Durability>,
    ) {
        let slot = self.prepare_write(owner, token, file.into(), offset, data, durable);
        self.start_write(slot);
    }

    /// Like [`Self::write`], for what clients wait for. If a writer thread is to perform it and one is free, it does: a
    /// write never queues behind others, whose device may hang.
    pub fn write_urgently(
        &mut self,
        owner: Owner,
        token: Token,
        file: impl Into<Target>,
        offset: u64,
        data: Vec<Buf>,
        way: DurableWay,
    ) {
        let durable = Some(way.call);
        let slot = self.prepare_write(owner, token, file.into(), offset, data, durable);
        let by_writer = way.by_thread && self.has_free_writer();
        self.operations[slot as usize].taker = if by_writer {
            Taker::Writer
        } else {
            Taker::RingAtOnce
        };
        self.start_write(slot);
    }

    fn prepare_write(
        &mut self,
        owner: Owner,
        token: Token,
        file: Target,
        offset: u64,
        data: Vec<Buf>,
        durable: Option<Durability>,
    ) -> u32 {
        let Target { fd, may_wait } = file;
        let slot = self.take(Kind::Write { _data: Vec::new() }, owner, token, fd);
        let operation = &mut self.operations[slot as usize];
        let mut bytes = 0;
        for buf in &data {
            let base = buf.as_ptr().cast_mut();
            bytes += buf.len() as u64;
            // Neighbours in memory make one vector: fewer segments for the device.
            if let Some(last) = operation.vectors.last_mut()
                && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base
            {
                last.iov_len += buf.len();
                continue;
            }
            operation.vectors.push(libc::iovec {
                iov_base: base.cast(),
                iov_len: buf.len(),
            });
        }
        operation.kind = Kind::Write { _data: data };
        operation.offset = offset;
        operation.bytes = bytes;
        operation.durable = durable;
        operation.may_wait = may_wait;
        slot
    }

    fn start_write(&mut self, slot: u32) {
        if self.operations[slot as usize].bytes == 0 {
            self.finish_device(slot, Ok(()));
        } else {
            self.start_transfer(slot);
        }
    }

    /// Make everything that was written to the file durable.
    pub fn sync(&mut self, owner: Owner, token: Token, fd: RawFd) {
        let slot = self.take(Kind::Sync, owner, token, fd);
        self.start(slot);
    }

    /// `fallocate` with `mode`.
    pub fn allocate(
        &mut self,
        owner: Owner,
        token: Token,
        fd: RawFd,
        mode: i32,
        offset: u64,
        bytes: u64,
    ) {
        let slot = self.take(Kind::Allocate { mode }, owner, token, fd);
        self.operations[slot as usize].offset = offset;
        self.operations[slot as usize].bytes = bytes;
        self.start(slot);
    }

    /// Run something that blocks on the worker thread.
    pub fn job(&mut self, owner: Owner, token: Token, job: Job) {
        self.running += 1;
        self.worker.submit(owner, token, job);
    }

    /// How other threads end operations of `owner`: each as [`Outcome::Job`], like a job that ran
    /// elsewhere. Whoever starts such an operation says so by [`Self::begin_remote`].
    pub fn remote(&self, owner: Owner) -> Remote {
        self.worker.remote(owner)
    }

    /// An operation has begun that a [`Remote`] will end.
    pub fn begin_remote(&mut self) {
        self.running += 1;
    }

    /// Receive from a socket to the first of two places and then to the second, which may be empty, as much as there is.
    ///
    /// # Safety
    /// The memory must stay valid and untouched until the operation has finished.
    pub unsafe fn receive(&mut self, owner: Owner, socket: RawFd, places: [libc::iovec; 2]) -> Key {
        let slot = self.take(Kind::Receive, owner, Token(0), socket);
        let operation = &mut self.operations[slot as usize];
        operation
            .vectors
            .extend(places.iter().filter(|one| one.iov_len > 0));
        self.start(slot)
    }

    /// Send a message on a socket; perhaps only part of it.
    ///
    /// # Safety
    /// The message and all it points to must stay valid and unchanged until the operation has
    /// finished.
    pub unsafe fn send(
        &mut self,
        owner: Owner,
        socket: RawFd,
        message: *const libc::msghdr,
    ) -> Key {
        let slot = self.take(Kind::Send { message }, owner, Token(0), socket);
        self.start(slot)
    }

    /// Accept one connection. One that takes all that come would hold a descriptor for each of a burst before the
    /// first of them can be refused, and files would lack them.
    pub fn accept(&mut self, owner: Owner, listener: RawFd) -> Key {
        let slot = self.take(Kind::Accept, owner, Token(0), listener);
        self.start(slot)
    }

    /// Connect a socket, which must be of the address's family, however long the system takes for it.
    pub fn connect(&mut self, owner: Owner, socket: RawFd, address: SocketAddr) -> Key {
        let address = Box::new(Address::from(address));
        let slot = self.take(Kind::Connect { address }, owner, Token(0), socket);
        self.start(slot)
    }

    /// Wait until a descriptor has something to read.
    pub fn readable(&mut self, owner: Owner, token: Token, fd: RawFd) -> Key {
        let slot = self.take(Kind::Readable, owner, token, fd);
        self.start(slot)
    }

    /// Ask the kernel to end an operation early; it still finishes, by `ECANCELED` perhaps.
    pub fn cancel(&mut self, key: Key) {
        let entry = opcode::AsyncCancel::new(key.0)
            .build()
            .user_data(NO_OPERATION);
        self.push(entry);
    }

    /// Hand what is queued to the kernel, and unless something has finished already, wait for the
    /// first completion, at most `timeout`.
    pub fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.drain_backlog();
        let written = self.writers.as_ref().is_some_and(Writers::has_results);
        let ready = written || !self.finished.is_empty() || !self.uring().completion().is_empty();
        let result = if ready || timeout == Some(Duration::ZERO) {
            if self.uring().submission().is_empty() && !self.uring().submission().taskrun() {
                return Ok(());
            }
            self.counts.enters += 1;
            self.uring().submit()
        } else if let Some(timeout) = timeout {
            self.counts.enters += 1;
            let time = Timespec::from(timeout);
            let args = SubmitArgs::new().timespec(&time);
            self.uring().submitter().submit_with_args(1, &args)
        } else {
            self.counts.enters += 1;
            self.uring().submit_and_wait(1)
        };
        self.pending = false;
        self.has_queued_transfer = false;
        match result {
            Ok(_) => Ok(()),
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Hand queued transfers to the kernel before this thread does what takes a while: the device has them meanwhile.
    pub fn submit_transfers(&mut self) {
        if self.config.submit == Submit::Each && self.has_queued_transfer {
            // A refusal is not lost, as above.
            let _ = self.uring().submit();
            self.note_submitted();
        }
    }

    fn note_submitted(&mut self) {
        self.counts.enters += 1;
        self.pending = false;
        self.has_queued_transfer = false;
    }

    /// Move what has finished to the end of `out`, but not all of many transfers: whoever waits for the first ones is
    /// answered while the device goes on, and the others are there at the next call.
    pub fn reap(&mut self, out: &mut Vec<Finished>) {
        let before = self.transfers;
        loop {
            let Some(entry) = self.uring().completion().next() else {
                break;
            };
            self.complete(&entry);
            if self.transfers + REAPED_TRANSFERS_MAX <= before {
                break;
            }
        }
        self.take_written();
        self.drain_backlog();
        out.append(&mut self.finished);
    }

    fn uring(&mut self) -> &mut IoUring {
        self.uring.as_mut().expect("present until drop")
    }

    fn take(&mut self, kind: Kind, owner: Owner, token: Token, fd: RawFd) -> u32 {
        self.running += 1;
        let Some(slot) = self.free.pop() else {
            self.operations.push(Operation {
                kind,
                owner,
                token,
                generation: 0,
                fd,
                offset: 0,
                bytes: 0,
                done: 0,
                durable: None,
                may_wait: false,
                taker: Taker::Ring,
                is_transfer: false,
                retries: 0,
                vectors: Vec::new(),
            });
            return self.operations.len() as u32 - 1;
        };
        let operation = &mut self.operations[slot as usize];
        operation.kind = kind;
        operation.owner = owner;
        operation.token = token;
        operation.fd = fd;
        operation.offset = 0;
        operation.bytes = 0;
        operation.done = 0;
        operation.durable = None;
        operation.may_wait = false;
        operation.taker = Taker::Ring;
        operation.is_transfer = false;
        operation.retries = 0;
        slot
    }

    fn release(&mut self, slot: u32) -> Kind {
        let operation = &mut self.operations[slot as usize];
        operation.generation = operation.generation.wrapping_add(1);
        operation.vectors.clear();
        self.transfers -= usize::from(operation.is_transfer);
        self.free.push(slot);
        self.running -= 1;
        std::mem::replace(&mut operation.kind, Kind::Free)
    }

    fn arm_waker(&mut self) {
        let fd = self.worker.eventfd();
        let slot = self.take(Kind::Wake, Owner::Shard, Token(0), fd);
        self.running -= 1;
        self.start(slot);
    }

    fn start_transfer(&mut self, slot: u32) {
        self.start(slot);
        self.operations[slot as usize].is_transfer = true;
        self.has_queued_transfer = true;
        self.transfers += 1;
        let operation = &self.operations[slot as usize];
        let is_urgent = operation.taker == Taker::RingAtOnce;
        // Destage begins several writes in a turn, and nobody waits for one of them alone.
        let is_read = matches!(operation.kind, Kind::Read(_));
        let goes = is_urgent || is_read && self.transfers <= DEVICE_BUSY;
        if self.config.submit == Submit::Each && self.pending && goes {
            // A refusal is not lost: the entries stay queued until the next turn.
            let _ = self.uring().submit();
            self.note_submitted();
        }
    }

    /// Queue an operation, or what is left of it.
    fn start(&mut self, slot: u32) -> Key {
        let woken: *mut u64 = &raw mut *self.woken;
        let operation = &self.operations[slot as usize];
        let key = u64::from(operation.generation) << 32 | u64::from(slot);
        if operation.taker == Taker::Writer
            && let Some(writers) = &self.writers
        {
            self.writing += 1;
            writers.submit(key, operation.fd, task(operation));
            return Key(key);
        }
        let fd = Fd(operation.fd);
        let entry = match &operation.kind {
            Kind::Read(_) => {
                let vectors = &operation.vectors;
                let vector = vectors[0];
                let (base, len) = (vector.iov_base.cast(), vector.iov_len as u32);
                opcode::Read::new(fd, base, len)
                    .offset(operation.offset + operation.done)
                    .build()
            }
            Kind::Write { .. } => {
                let flags = match operation.durable {
                    Some(Durability::Dsync) => libc::RWF_DSYNC,
                    _ => 0,
                };
                let offset = operation.offset + operation.done;
                let vectors = &operation.vectors;
                if let [vector] = vectors[..] {
                    let (base, len) = (vector.iov_base.cast(), vector.iov_len as u32);
                    opcode::Write::new(fd, base, len)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                } else {
                    let count = vectors.len().min(VECTORS_MAX) as u32;
                    opcode::Writev::new(fd, vectors.as_ptr().cast(), count)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                }
            }
            Kind::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Kind::Allocate { mode } => opcode::Fallocate::new(fd, operation.bytes)
                .offset(operation.offset)
                .mode(*mode)
                .build(),
            Kind::Receive => match operation.vectors[..] {
                [vector] => {
                    let (base, len) = (vector.iov_base.cast(), vector.iov_len as u32);
                    opcode::Recv::new(fd, base, len).build()
                }
                ref vectors => {
                    let count = vectors.len() as u32;
                    opcode::Readv::new(fd, vectors.as_ptr().cast(), count).build()
                }
            },
            Kind::Send { message } => opcode::SendMsg::new(fd, (*message).cast())
                .flags(libc::MSG_NOSIGNAL as u32)
                .build(),
            Kind::Accept => opcode::Accept::new(fd, std::ptr::null_mut(), std::ptr::null_mut())
                .flags(libc::SOCK_CLOEXEC)
                .build(),
            Kind::Connect { address } => {
                opcode::Connect::new(fd, address.pointer(), address.bytes()).build()
            }
            Kind::Readable => opcode::PollAdd::new(fd, libc::POLLIN as u32).build(),
            Kind::Wake => opcode::Read::new(fd, woken.cast(), 8).build(),
            Kind::Free => unreachable!("a free slot is never started"),
        };
        let flags = if operation.may_wait {
            squeue::Flags::ASYNC
        } else {
            squeue::Flags::empty()
        };
        self.push(entry.flags(flags).user_data(key));
        Key(key)
    }

    fn push(&mut self, entry: squeue::Entry) {
        self.pending = true;
        if !self.backlog.is_empty() || !self.try_push(&entry) {
            self.backlog.push_back(entry);
        }
    }

    fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        let uring = self.uring.as_mut().expect("present until drop");
        if uring.submission().is_full() {
            // A refusal leaves the queue full, and the entry goes to the backlog.
            let _ = uring.submit();
            self.counts.enters += 1;
        }
        // SAFETY: what the entry points to lives in its slot (or with the caller of an unsafe
        // method) until its completion.
        unsafe { uring.submission().push(entry) }.is_ok()
    }

    fn drain_backlog(&mut self) {
        while let Some(entry) = self.backlog.pop_front() {
            if !self.try_push(&entry) {
                self.backlog.push_front(entry);
                return;
            }
        }
    }

    fn has_free_writer(&self) -> bool {
        self.writing < self.config.writer_threads
    }

    /// Take over what the writer threads have done.
    fn take_written(&mut self) {
        let Some(writers) = &self.writers else {
            return;
        };
        let mut written = std::mem::take(&mut self.written);
        writers.take(&mut written);
        for (key, result) in written.drain(..) {
            self.writing -= 1;
            self.ended(key, result);
        }
        self.written = written;
    }

    fn complete(&mut self, entry: &cqueue::Entry) {
        self.counts.completions += 1;
        let key = entry.user_data();
        if key == NO_OPERATION {
            return;
        }
        let result = if entry.result() < 0 {
            Err(Errno(-entry.result()))
        } else {
            Ok(entry.result() as u64)
        };
        self.ended(key, result);
    }

    /// The operation under `key` ended.
    fn ended(&mut self, key: u64, result: Result<u64, Errno>) {
        let slot = key as u32;
        let operation = &mut self.operations[slot as usize];
        assert!(
            operation.generation == (key >> 32) as u32,
            "a completion for an operation that has ended"
        );
        if let Err(Errno(libc::EINTR | libc::EAGAIN)) = result
            && operation.retries < RETRIES_MAX
            && !matches!(operation.kind, Kind::Accept | Kind::Connect { .. })
        {
            operation.retries += 1;
            self.start(slot);
            return;
        }
        match operation.kind {
            Kind::Read(_) | Kind::Write { .. } => self.transferred(slot, result),
            Kind::Sync | Kind::Allocate { .. } => self.finish_device(slot, result.map(|_| ())),
            Kind::Receive | Kind::Send { .. } => {
                let outcome = Outcome::Count(result.map(|bytes| bytes as usize));
                self.finish(slot, outcome);
            }
            Kind::Readable => {
                let outcome = Outcome::Readable(result.map(|_| ()));
                self.finish(slot, outcome);
            }
            Kind::Connect { .. } => {
                let outcome = Outcome::Connected(result.map(|_| ()));
                self.finish(slot, outcome);
            }
            Kind::Accept => {
                // SAFETY: the kernel has just made this descriptor for us.
                let connection = result.map(|fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
                self.finish(slot, Outcome::Accepted(connection));
            }
            Kind::Wake => {
                self.start(slot);
                while let Some((owner, token, output)) = self.worker.take() {
                    self.running -= 1;
                    self.finished.push(Finished {
                        owner,
                        token,
                        outcome: Outcome::Job(output),
                    });
                }
                self.finished.push(Finished {
                    owner: Owner::Shard,
                    token: Token(0),
                    outcome: Outcome::Woken,
                });
            }
            Kind::Free => unreachable!("a free slot has no completion"),
        }
    }

    /// A transfer moved some bytes, or failed.
    fn transferred(&mut self, slot: u32, result: Result<u64, Errno>) {
        let operation = &mut self.operations[slot as usize];
        let moved = match result {
            Ok(0) => return self.finish_device(slot, Err(Errno(libc::EIO))),
            Ok(moved) => moved,
            Err(errno) => return self.finish_device(slot, Err(errno)),
        };
        if operation.done + moved < operation.bytes {
            // A direct transfer can only continue at a multiple of the device's block; what was
            // moved beyond that is moved again. Vectors that were all moved are dropped.
            let in_file = operation.offset + operation.done + moved;
            let restart = in_file - in_file % RESTART_ALIGN;
            let position = restart.saturating_sub(operation.offset).max(operation.done);
            if position == operation.done {
                operation.retries += NO_PROGRESS_COST;
                if operation.retries > RETRIES_MAX {
                    return self.finish_device(slot, Err(Errno(libc::EIO)));
                }
            }
            advance(&mut operation.vectors, position - operation.done);
            operation.done = position;
            self.start(slot);
            return;
        }
        operation.done = operation.bytes;
        if operation.durable == Some(Durability::Fdatasync)
            && matches!(operation.kind, Kind::Write { .. })
        {
            operation.kind = Kind::Sync;
            operation.retries = 0;
            self.start(slot);
            return;
        }
        self.finish_device(slot, Ok(()));
    }

    fn finish_device(&mut self, slot: u32, result: Result<(), Errno>) {
        let Operation { owner, token, .. } = self.operations[slot as usize];
        let kind = self.release(slot);
        let result = result.map(|()| match kind {
            Kind::Read(buf) => Done::Read(buf),
            _ => Done::Written,
        });
        self.finished.push(Finished {
            owner,
            token,
            outcome: Outcome::Device(result),
        });
    }

    fn finish(&mut self, slot: u32, outcome: Outcome) {
        let Operation { owner, token, .. } = self.operations[slot as usize];
        self.release(slot);
        self.finished.push(Finished {
            owner,
            token,
            outcome,
        });
    }
}

/// Have the calling thread woken when its time has come: by default the kernel takes up to 50 µs more, to wake several
/// together.
fn wake_in_time() {
    // SAFETY: a system call without memory. It cannot fail for the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

/// What a writer thread does for an operation.
fn task(operation: &Operation) -> Task {
    if matches!(operation.kind, Kind::Sync) {
        return Task::Sync;
    }
    Task::Write {
        offset: operation.offset + operation.done,
        vectors: operation.vectors.as_ptr(),
        count: operation.vectors.len().min(VECTORS_MAX),
        dsync: operation.durable == Some(Durability::Dsync),
    }
}

/// Drop the first `bytes` bytes from the vectors.
fn advance(vectors: &mut Vec<libc::iovec>, mut bytes: u64) {
    let mut whole = 0;
    for vector in vectors.iter_mut() {
        let len = vector.iov_len as u64;
        if bytes < len {
            vector.iov_base = vector
                .iov_base
                .cast::<u8>()
                .wrapping_add(bytes as usize)
                .cast();
            vector.iov_len -= bytes as usize;
            break;
        }
        bytes -= len;
        whole += 1;
    }
    vectors.drain(..whole);
}

impl Ring {
    /// Cancel everything and wait for its end. Returns whether the kernel uses no memory of any operation any more: if
    /// not, what [`Self::receive`] and [`Self::send`] were given must never be freed.
    pub fn quiesce(&mut self) -> bool {
        if self.given_up || !self.is_busy() {
            return !self.given_up;
        }
        let everything = opcode::AsyncCancel2::new(CancelBuilder::any().all())
            .build()
            .user_data(NO_OPERATION);
        self.backlog.clear();
        self.push(everything);
        let started = Instant::now();
        while self.is_busy() && started.elapsed() < DROP_PATIENCE {
            if self
                .submit_and_wait(Some(Duration::from_millis(10)))
                .is_err()
            {
                break;
            }
            let mut finished = Vec::new();
            self.reap(&mut finished);
        }
        self.given_up = self.is_busy();
        !self.given_up
    }

    fn is_busy(&self) -> bool {
        self.operations
            .iter()
            .any(|operation| !matches!(operation.kind, Kind::Free | Kind::Wake))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let is_quiet = self.quiesce();
        // The kernel ends the waker's read when the descriptor of the ring is closed, at a time of
        // its own: its eight bytes stay.
        std::mem::forget(std::mem::take(&mut self.woken));
        if !is_quiet {
            tracing::error!("the kernel did not end every operation in time; memory stays behind");
            std::mem::forget(std::mem::take(&mut self.operations));
        }
        drop(self.uring.take());
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fd = self.uring.as_ref().map(AsRawFd::as_raw_fd);
        write!(f, "Ring(fd {fd:?}, {} under way)", self.running)
    }
}

#[cfg(test)]
mod tests;
