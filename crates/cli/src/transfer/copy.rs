//! Copies an image: from a file, a stream or an export to a file, a stream or an export.
//!
//! 1. One [`Walk`] hands out the pieces of the image in order. Several threads take one each, read
//!    it, and write it: so several requests are under way. A stream is read where its pieces are handed
//!    out, and written in the order of the pieces, whoever has them.
//! 2. What reads as zeroes, by the source's own account or by its content, is not written where the target
//!    is known to be zero, and written as zeroes where it is not.
//! 3. The first failure ends all threads, and is the result. They end too when nobody waits for the copy any
//!    more; a thread that hangs in a system call is left behind, for the process is about to end.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::nbd::{Client, Endpoint, Run};
use crate::Failure;
use crate::interrupts::apart;
use crate::progress::Progress;

/// The most data of one piece: the largest request that the node takes whole.
const PIECE_BYTES: usize = 1 << 20;
/// The most zeroes of one piece: little enough for progress and a cancel.
const ZERO_PIECE_BYTES: u64 = 64 << 20;
/// A range that is asked for its allocation at once.
const STATUS_BYTES: u64 = 1 << 30;
/// Zeroes that are looked for in data, and kept as holes: the block of file systems and of the node.
const HOLE_BYTES: usize = 4096;
/// Holes that are read with the data around them, because a request costs more.
const READ_THROUGH_BYTES: u64 = 64 << 10;
/// Pieces under way. More do not make it faster on one node.
const WORKERS: usize = 8;
/// How often it is looked whether the copy has ended.
const WATCH_PERIOD: Duration = Duration::from_millis(50);
/// How long the threads of a copy that was given up have to end.
const END_TIME_MAX: Duration = Duration::from_secs(3);

/// Where an image comes from.
#[derive(Debug)]
pub enum Source {
    /// An NBD export.
    Nbd(Endpoint),
    /// A raw file or device.
    File(Arc<File>, String),
    /// Standard input, behind the bytes of it that were looked at already.
    Stream(Vec<u8>),
}

/// Where an image goes.
#[derive(Debug)]
pub enum Target {
    /// An NBD export, and whether it is known to be all zeroes.
    Nbd(Endpoint, bool),
    /// A new file of the image's size.
    File(Arc<File>, String),
    /// Standard output, as a file.
    Stream(File),
}

/// What was copied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copied {
    /// Bytes that were written as data.
    pub data_bytes: u64,
    /// How long it took.
    pub took: Duration,
}

/// A part of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    offset: u64,
    bytes: u64,
    is_zero: bool,
}

/// What the threads share.
struct Shared {
    walk: Mutex<Walk>,
    source: Source,
    target: Target,
    done_bytes: AtomicU64,
    data_bytes: AtomicU64,
    cancelled: AtomicBool,
    failure: Mutex<Option<Failure>>,
    /// Where the next piece of a stream begins.
    turn: Mutex<u64>,
    turned: Condvar,
}

/// A copy that is under way. Dropped, it ends.
struct Copying {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
    progress: Progress,
}

impl Copying {
    fn start(shared: Shared, progress: Progress) -> Result<Self, Failure> {
        let mut copying = Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
            progress,
        };
        for _ in 0..WORKERS {
            let shared = Arc::clone(&copying.shared);
            let work = move || {
                if let Err(failure) = shared.work() {
                    shared.fail(failure);
                }
            };
            let thread = thread::Builder::new().name("copy".to_owned()).spawn(work);
            let thread =
                thread.map_err(|error| Failure::failed(format!("cannot copy: {error}")))?;
            copying.threads.push(thread);
        }
        Ok(copying)
    }

    fn has_ended(&self) -> bool {
        self.threads.iter().all(thread::JoinHandle::is_finished)
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.shared.cancel();
        self.progress.finish();
        let deadline = Instant::now() + END_TIME_MAX;
        while !self.has_ended() && Instant::now() < deadline {
            thread::sleep(WATCH_PERIOD);
        }
    }
}

/// Copy the first `bytes` of the source; a file's or stream's end before that is an error.
pub async fn copy(
    source: Source,
    target: Target,
    bytes: u64,
    done_word: &'static str,
) -> Result<Copied, Failure> {
    let shared = apart(move || {
        Ok(Shared {
            walk: Mutex::new(Walk::new(&source, bytes)?),
            source,
            target,
            done_bytes: AtomicU64::new(0),
            data_bytes: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            failure: Mutex::new(None),
            turn: Mutex::new(0),
            turned: Condvar::new(),
        })
    });
    let mut copying = Copying::start(shared.await?, Progress::new(bytes, done_word))?;
    let shared = Arc::clone(&copying.shared);
    let done = || shared.done_bytes.load(Ordering::Relaxed);
    while !copying.has_ended() && !shared.cancelled.load(Ordering::Relaxed) {
        tokio::time::sleep(WATCH_PERIOD).await;
        copying.progress.update(done());
    }
    let took = copying.progress.elapsed();
    drop(copying);
    if let Some(failure) = lock(&shared.failure).take() {
        return Err(failure);
    }
    let done = done();
    if done != bytes {
        // A thread that panicked; its message is on standard error.
        return Err(Failure::failed(format!(
            "the copy ended after {done} of {bytes} bytes"
        )));
    }
    Ok(Copied {
        data_bytes: shared.data_bytes.load(Ordering::Relaxed),
        took,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The first failure counts; all threads end.
    fn fail(&self, failure: Failure) {
        lock(&self.failure).get_or_insert(failure);
        self.cancel();
    }

    /// All threads end.
    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        // With the lock held, so that nobody is between looking and waiting.
        let _turn = lock(&self.turn);
        self.turned.notify_all();
    }

    fn work(&self) -> Result<(), Failure> {
        let mut source = match &self.source {
            Source::Nbd(endpoint) => Some(endpoint.connect()?),
            Source::File(..) | Source::Stream(_) => None,
        };
        let mut target = match &self.target {
            Target::Nbd(endpoint, _) => Some(endpoint.connect()?),
            Target::File(..) | Target::Stream(_) => None,
        };
        let mut buffer = vec![0; PIECE_BYTES];
        while !self.cancelled.load(Ordering::Relaxed) {
            let Some(piece) = lock(&self.walk).next(&mut buffer)? else {
                break;
            };
            let data = &mut buffer[..if piece.is_zero {
                0
            } else {
                piece.bytes as usize
            }];
            match (&self.source, &mut source) {
                _ if piece.is_zero => {}
                (Source::Nbd(_), Some(client)) => client.read(piece.offset, data)?,
                (Source::File(file, name), _) => read_file(file, name, piece.offset, data)?,
                _ => {}
            }
            let written = self.put(piece, data, target.as_mut())?;
            self.data_bytes.fetch_add(written, Ordering::Relaxed);
            self.done_bytes.fetch_add(piece.bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Write a piece; how much of it went as data.
    fn put(&self, piece: Piece, data: &[u8], client: Option<&mut Client>) -> Result<u64, Failure> {
        match (&self.target, client) {
            (Target::Nbd(_, zeroed), Some(client)) => {
                if piece.is_zero && !zeroed {
                    client.write_zeroes(piece.offset, piece.bytes as u32)?;
                } else if !piece.is_zero {
                    let runs = runs(data);
                    client.write(piece.offset, data, &runs, !zeroed)?;
                    return Ok(data_bytes(&runs));
                }
                Ok(0)
            }
            (Target::File(file, name), _) => {
                let runs = runs(data);
                let mut at = 0;
                for run in &runs {
                    let end = at + run.bytes as usize;
                    if !run.is_zero {
                        file.write_all_at(&data[at..end], piece.offset + at as u64)
                            .map_err(|error| cannot_write(name, &error))?;
                    }
                    at = end;
                }
                Ok(data_bytes(&runs))
            }
            (Target::Stream(output), _) => {
                self.put_in_turn(output, piece, data)?;
                Ok(data.len() as u64)
            }
            (Target::Nbd(..), None) => unreachable!("every thread has connected"),
        }
    }

    fn put_in_turn(&self, mut output: &File, piece: Piece, data: &[u8]) -> Result<(), Failure> {
        let waiting =
            |turn: &mut u64| *turn != piece.offset && !self.cancelled.load(Ordering::Relaxed);
        let turn = lock(&self.turn);
        let turn = self.turned.wait_while(turn, waiting);
        if self.cancelled.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Others only wait for their turn, so the lock need not be held while a reader is slow; and
        // it must not, or an interrupt would wait too.
        drop(turn);
        let wrote = if piece.is_zero {
            std::io::copy(&mut std::io::repeat(0).take(piece.bytes), &mut output).map(|_| ())
        } else {
            output.write_all(data)
        };
        wrote.map_err(|error| cannot_write("standard output", &error))?;
        *lock(&self.turn) = piece.offset + piece.bytes;
        self.turned.notify_all();
        Ok(())
    }
}

/// An error of writing, with what helps against it.
pub fn cannot_write(name: &str, error: &std::io::Error) -> Failure {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ": make room, or choose another place",
        ErrorKind::BrokenPipe => ": its reader has ended before the image did",
        _ => "",
    };
    Failure::failed(format!("{name}: cannot write: {error}{advice}"))
}

fn read_file(file: &File, name: &str, offset: u64, data: &mut [u8]) -> Result<(), Failure> {
    let mut filled = 0;
    while filled < data.len() {
        match file.read_at(&mut data[filled..], offset + filled as u64) {
            // Its last sector need not be whole; more than that was not promised to be there.
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                return Err(Failure::failed(format!(
                    "{name}: cannot read at byte {}: {error}",
                    offset + filled as u64
                )));
            }
        }
    }
    if data.len() - filled >= hdcs_core::base::limits::SECTOR_BYTES {
        return Err(Failure::failed(format!(
            "{name}: it ends at byte {}: somebody has cut it meanwhile",
            offset + filled as u64
        )));
    }
    data[filled..].fill(0);
    Ok(())
}

/// Zeroes and other data in turn.
fn runs(data: &[u8]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for block in data.chunks(HOLE_BYTES) {
        let is_zero = block.iter().all(|byte| *byte == 0);
        match runs.last_mut() {
            Some(last) if last.is_zero == is_zero => last.bytes += block.len() as u64,
            _ => runs.push(Run {
                bytes: block.len() as u64,
                is_zero,
            }),
        }
    }
    runs
}

fn data_bytes(runs: &[Run]) -> u64 {
    let data = runs.iter().filter(|run| !run.is_zero);
    data.map(|run| run.bytes).sum()
}

/// Hands out the pieces of an image.
struct Walk {
    at: u64,
    end: u64,
    /// What is known of what follows `at`.
    known: VecDeque<Run>,
    by: By,
}

/// How a walk learns what is data.
enum By {
    Nbd(Client),
    File(Arc<File>),
    Stream(Box<dyn Read + Send>),
}

impl Walk {
    fn new(source: &Source, bytes: u64) -> Result<Self, Failure> {
        Ok(Self {
            at: 0,
            end: bytes,
            known: VecDeque::new(),
            by: match source {
                Source::Nbd(endpoint) => By::Nbd(endpoint.connect()?),
                Source::File(file, _) => By::File(Arc::clone(file)),
                Source::Stream(begin) => {
                    let begin = std::io::Cursor::new(begin.clone());
                    By::Stream(Box::new(begin.chain(std::io::stdin())))
                }
            },
        })
    }

    /// The next piece. That of a stream is in `buffer` already.
    fn next(&mut self, buffer: &mut [u8]) -> Result<Option<Piece>, Failure> {
        if self.at == self.end {
            return Ok(None);
        }
        let piece_bytes = PIECE_BYTES as u64;
        let boundary = ((self.at / piece_bytes + 1) * piece_bytes).min(self.end);
        if self.known.is_empty() {
            self.learn()?;
        }
        let first = self.known[0];
        let bytes = if first.is_zero {
            first.bytes.min(ZERO_PIECE_BYTES)
        } else {
            self.data_before(boundary)
        };
        let piece = Piece {
            offset: self.at,
            bytes,
            is_zero: first.is_zero,
        };
        if let By::Stream(input) = &mut self.by {
            let data = &mut buffer[..bytes as usize];
            fill(input, data, self.at, self.end)?;
        }
        self.pass(bytes);
        Ok(Some(piece))
    }

    /// Bytes up to `boundary` that are data, or holes too small to be left out.
    fn data_before(&self, boundary: u64) -> u64 {
        let most = boundary - self.at;
        let mut bytes = 0;
        for run in &self.known {
            if run.is_zero && run.bytes >= READ_THROUGH_BYTES {
                break;
            }
            bytes += run.bytes;
        }
        bytes.min(most)
    }

    /// Go so far.
    fn pass(&mut self, bytes: u64) {
        self.at += bytes;
        let mut left = bytes;
        while left > 0 {
            let run = &mut self.known[0];
            let passed = run.bytes.min(left);
            run.bytes -= passed;
            left -= passed;
            if run.bytes == 0 {
                self.known.pop_front();
            }
        }
    }

    /// Learn at least of the next run.
    fn learn(&mut self) -> Result<(), Failure> {
        let most = (self.end - self.at).min(STATUS_BYTES);
        match &mut self.by {
            By::Nbd(client) => {
                let mut left = most;
                for run in client.runs(self.at, most as u32)? {
                    let bytes = run.bytes.min(left);
                    left -= bytes;
                    if bytes > 0 {
                        self.known.push_back(Run { bytes, ..run });
                    }
                }
            }
            By::File(file) => self.known.push_back(file_run(file, self.at, self.end)),
            By::Stream(_) => self.known.push_back(Run {
                bytes: most,
                is_zero: false,
            }),
        }
        Ok(())
    }
}

/// The run of a file that begins at `at`.
fn file_run(file: &File, at: u64, end: u64) -> Run {
    let seek = |whence| {
        // SAFETY: lseek takes no pointers. That it moves the file's position matters to nobody: reads name theirs.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
        u64::try_from(found).map_err(|_| std::io::Error::last_os_error())
    };
    // Whole blocks: what is not all hole is data.
    let block = HOLE_BYTES as u64;
    let run = |upto: u64, is_zero| Run {
        bytes: upto.next_multiple_of(block).min(end) - at,
        is_zero,
    };
    match seek(libc::SEEK_DATA) {
        Ok(data) if data / block > at / block => run(data / block * block, true),
        // No data from here on.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => run(end, true),
        // A file system that cannot tell has data everywhere.
        Err(_) => run(end, false),
        Ok(_) => match seek(libc::SEEK_HOLE) {
            Ok(hole) if hole > at => run(hole, false),
            _ => run(end, false),
        },
    }
}

/// Fill `buffer` from standard input.
fn fill(input: &mut impl Read, buffer: &mut [u8], at: u64, end: u64) -> Result<(), Failure> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => {
                return Err(Failure::failed(format!(
                    "standard input: it ended after {} of {end} bytes: look whether what writes to it has failed, \
                     or give its exact length as --size",
                    at + filled as u64
                )));
            }
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                return Err(Failure::failed(format!("standard input: {error}")));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(known: &[(u64, bool)]) -> Walk {
        let known: VecDeque<_> = (known.iter())
            .map(|&(bytes, is_zero)| Run { bytes, is_zero })
            .collect();
        Walk {
            at: 0,
            end: known.iter().map(|run| run.bytes).sum(),
            known,
            by: By::File(Arc::new(tempfile::tempfile().unwrap())),
        }
    }

    fn pieces(mut walk: Walk) -> Vec<(u64, u64, bool)> {
        std::iter::from_fn(|| walk.next(&mut []).unwrap())
            .map(|piece| (piece.offset, piece.bytes, piece.is_zero))
            .collect()
    }

    #[test]
    fn walk_cuts_data_at_requests_and_leaves_large_holes_out() {
        let mib = 1 << 20;
        let small = READ_THROUGH_BYTES - 4096;
        let found = pieces(walk(&[(4096, false), (mib, true), (2 * mib, false)]));
        assert_eq!(
            found,
            [
                (0, 4096, false),
                (4096, mib, true),
                (mib + 4096, mib - 4096, false),
                (2 * mib, mib, false),
                (3 * mib, 4096, false)
            ]
        );
        // A small hole is read with what is around it; a piece still ends at a multiple of a request.
        let found = pieces(walk(&[(4096, false), (small, true), (mib, false)]));
        assert_eq!(found, [(0, mib, false), (mib, 4096 + small, false)]);
        let found = pieces(walk(&[(ZERO_PIECE_BYTES + 512, true)]));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn runs_tell_zeroes_from_data_block_by_block() {
        let mut data = vec![0; 5 * HOLE_BYTES + 512];
        data[HOLE_BYTES] = 1;
        data[3 * HOLE_BYTES - 1] = 1;
        let block = HOLE_BYTES as u64;
        let found: Vec<_> = runs(&data).iter().map(|r| (r.bytes, r.is_zero)).collect();
        assert_eq!(
            found,
            [(block, true), (2 * block, false), (2 * block + 512, true)]
        );
        assert_eq!(data_bytes(&runs(&data)), 2 * block);
    }

    #[test]
    fn file_runs_are_those_of_its_holes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 << 20).unwrap();
        file.write_all_at(&vec![7; 1 << 20], 1 << 20).unwrap();
        let mut at = 0;
        let mut zeroes = 0;
        while at < 3 << 20 {
            let run = file_run(&file, at, 3 << 20);
            assert!(run.bytes > 0);
            zeroes += if run.is_zero { run.bytes } else { 0 };
            at += run.bytes;
        }
        // A file system without holes tells of none; one with them tells of these.
        assert!(zeroes == 0 || zeroes == 2 << 20, "{zeroes}");
    }
}
