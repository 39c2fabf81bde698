//! Copying an image for a snapshot while the volume goes on: copy before write.
//!
//! A thread copies the image chunk by chunk, without its holes. A write or zero to chunks that are not
//! copied yet waits until they are, which are then next. Reads never wait.
//!
//! Invariants:
//! 1. No byte of a chunk changes before it is copied: what is copied is the state of the moment at which
//!    the copier was started.
//! 2. Whatever waits is told, in the end also by a copy that fails or is cancelled.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hdcs_core::base::buf::{Arena, BufMut};
use hdcs_core::base::io::Token;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_device::Errno;
use hdcs_device::worker::{JobOutput, Remote};

use super::presence::{CUT, is_cut};
use super::snapshots::Making;
use crate::copying::Copying;

/// What is copied at once, and before a write that waits for a byte of it.
const CHUNK_BYTES: u64 = 1 << 20;
/// After so much, what was copied is made durable and leaves the page cache.
const SYNC_BYTES: u64 = 64 << 20;

/// What is left to do.
#[derive(Default)]
struct State {
    /// By chunk.
    copied: Vec<bool>,
    /// No chunk before this one is left.
    next: usize,
    /// Chunks that operations wait for.
    wanted: VecDeque<(Range<usize>, Token)>,
    /// Who waits for the end.
    awaited: Option<Token>,
    result: Option<Result<(), Errno>>,
}

struct Shared {
    state: Mutex<State>,
    remote: Remote,
}

impl Shared {
    /// Nobody who holds it leaves it half changed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A copy that is under way.
pub struct Copier(Arc<Shared>);

impl Copier {
    /// Begin to copy an image into a snapshot. It is as `found`, and nothing has written to it since. What ends, ends
    /// through `remote`. Does not block.
    pub fn start(
        image: Arc<File>,
        found: &Metadata,
        making: Making,
        copying: Arc<Copying>,
        remote: Remote,
    ) -> io::Result<Self> {
        let bytes = found.len();
        copying.begin(bytes.min(found.blocks() * 512));
        let state = State {
            copied: vec![false; bytes.div_ceil(CHUNK_BYTES) as usize],
            ..State::default()
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            remote,
        });
        let its = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("hdcs-snapshot".into())
            .spawn(move || {
                let result = its
                    .copy(&image, &making.file, &copying, bytes)
                    .and_then(|()| making.finish().map_err(|error| Errno::from(&error)));
                // First, so that nobody holds the image once all operations have ended.
                drop(image);
                its.end(result);
            })?;
        Ok(Self(shared))
    }

    /// Whether an operation that changes a range of bytes has to wait. It then ends as a job with
    /// this token when it may go on.
    pub fn holds(&self, range: Range<u64>, token: Token) -> bool {
        let mut state = self.0.lock();
        let end = (range.end.div_ceil(CHUNK_BYTES) as usize).min(state.copied.len());
        let chunks = ((range.start / CHUNK_BYTES) as usize).min(end)..end;
        if state.result.is_some() || state.copied[chunks.clone()].iter().all(|&copied| copied) {
            return false;
        }
        state.wanted.push_back((chunks, token));
        true
    }

    /// End this operation as a job once the copy has ended.
    pub fn wait(&self, token: Token) {
        let mut state = self.0.lock();
        match state.result {
            Some(result) => self.0.remote.end(token, JobOutput::Unit(result)),
            None => state.awaited = Some(token),
        }
    }
}

impl Shared {
    /// Copy everything, what is waited for first.
    fn copy(&self, from: &File, to: &File, copying: &Copying, bytes: u64) -> Result<(), Errno> {
        to.set_len(bytes).map_err(|error| Errno::from(&error))?;
        let mut copy = Copy::new(from, to, copying);
        while let Some(chunk) = self.next_chunk(from)? {
            let start = chunk as u64 * CHUNK_BYTES;
            copy.range(start..(start + CHUNK_BYTES).min(bytes))?;
            self.note_copied(chunk);
        }
        // What was cut off meanwhile may have been taken for holes.
        if is_cut(from, bytes) {
            return Err(CUT);
        }
        Ok(())
    }

    /// The next chunk to copy; none: all are. Those of a hole are copied as they are.
    fn next_chunk(&self, from: &File) -> Result<Option<usize>, Errno> {
        let mut state = self.lock();
        if let Some((chunks, _)) = state.wanted.front() {
            let left = chunks.clone().find(|&chunk| !state.copied[chunk]);
            // It was told when its last one was copied.
            return Ok(Some(left.expect("it waits for a chunk")));
        }
        let Some(next) = (state.next..state.copied.len()).find(|&chunk| !state.copied[chunk])
        else {
            return Ok(None);
        };
        state.next = next;
        drop(state);
        // Nothing changes in chunks that are not copied, so what was a hole still is one.
        let data = data_from(from, next as u64 * CHUNK_BYTES)?;
        let mut state = self.lock();
        let end = data.map_or(state.copied.len(), |byte| (byte / CHUNK_BYTES) as usize);
        let end = end.min(state.copied.len());
        if end > next {
            state.copied[next..end].fill(true);
            drop(state);
            self.tell_waiting();
            return self.next_chunk(from);
        }
        Ok(Some(next))
    }

    fn note_copied(&self, chunk: usize) {
        self.lock().copied[chunk] = true;
        self.tell_waiting();
    }

    /// End what has waited for chunks that are copied now.
    fn tell_waiting(&self) {
        let mut state = self.lock();
        let State { wanted, copied, .. } = &mut *state;
        wanted.retain(|(chunks, token)| {
            let waits = copied[chunks.clone()].iter().any(|&copied| !copied);
            if !waits {
                self.remote.end(*token, JobOutput::Unit(Ok(())));
            }
            waits
        });
    }

    fn end(&self, result: Result<(), Errno>) {
        let mut state = self.lock();
        state.result = Some(result);
        for (_, token) in std::mem::take(&mut state.wanted) {
            self.remote.end(token, JobOutput::Unit(Ok(())));
        }
        if let Some(token) = state.awaited.take() {
            self.remote.end(token, JobOutput::Unit(result));
        }
    }
}

/// Copy a file that does not change, without its holes. Blocks.
pub fn copy_all(from: &File, to: &File, copying: &Copying) -> Result<(), Errno> {
    let found = from.metadata().map_err(|error| Errno::from(&error))?;
    copying.begin(found.len().min(found.blocks() * 512));
    let copied = to
        .set_len(found.len())
        .map_err(|error| Errno::from(&error))
        .and_then(|()| Copy::new(from, to, copying).range(0..found.len()));
    copying.end();
    copied
}

/// Copies data from a file to a new one.
struct Copy<'a> {
    from: &'a File,
    to: &'a File,
    copying: &'a Copying,
    /// As direct I/O needs it.
    buffer: BufMut,
    unsynced_bytes: u64,
}

impl<'a> Copy<'a> {
    fn new(from: &'a File, to: &'a File, copying: &'a Copying) -> Self {
        let blocks = CHUNK_BYTES as usize / BLOCK_BYTES;
        Self {
            from,
            to,
            copying,
            buffer: Arena::new(blocks)
                .claim(0, blocks)
                .expect("a new arena is free"),
            unsynced_bytes: 0,
        }
    }

    /// Copy the data in a range that begins at a block.
    fn range(&mut self, range: Range<u64>) -> Result<(), Errno> {
        let mut at = range.start;
        while at < range.end {
            let Some(data) = data_from(self.from, at)?.filter(|&data| data < range.end) else {
                return Ok(());
            };
            let block = BLOCK_BYTES as u64;
            at = at.max(data / block * block);
            let hole = hole_from(self.from, data)?.next_multiple_of(block);
            let end = hole.min(at + CHUNK_BYTES).min(range.end);
            self.piece(at, end)?;
            at = end;
        }
        Ok(())
    }

    fn piece(&mut self, start: u64, end: u64) -> Result<(), Errno> {
        if self.copying.is_cancelled() {
            return Err(Errno(libc::ECANCELED));
        }
        let failed = |error: io::Error| Errno::from(&error);
        let bytes = (end - start) as usize;
        let mut filled = 0;
        while filled < bytes {
            // Whole blocks, as direct I/O needs them; the file may end before.
            let rest = &mut self.buffer[filled..bytes.next_multiple_of(BLOCK_BYTES)];
            match self.from.read_at(rest, start + filled as u64) {
                Ok(0) => return Err(Errno(libc::EIO)),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        self.to
            .write_all_at(&self.buffer[..bytes], start)
            .map_err(failed)?;
        self.copying.add(bytes as u64);
        self.unsynced_bytes += bytes as u64;
        if self.unsynced_bytes >= SYNC_BYTES {
            self.unsynced_bytes = 0;
            self.to.sync_data().map_err(failed)?;
            // SAFETY: a hint about a descriptor that is held.
            unsafe { libc::posix_fadvise(self.to.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        }
        Ok(())
    }
}

/// Where data begins, from an offset on, if there is any. A file system that cannot tell holds data
/// everywhere.
pub fn data_from(file: &File, offset: u64) -> Result<Option<u64>, Errno> {
    match seek(file, offset, libc::SEEK_DATA) {
        Err(Errno(libc::ENXIO)) => Ok(None),
        Err(Errno(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(Some(offset)),
        found => found.map(Some),
    }
}

/// Where data ends that holds an offset.
fn hole_from(file: &File, offset: u64) -> Result<u64, Errno> {
    match seek(file, offset, libc::SEEK_HOLE) {
        Err(Errno(libc::ENXIO | libc::EINVAL | libc::EOPNOTSUPP)) => Ok(u64::MAX / 2),
        found => found,
    }
}

fn seek(file: &File, offset: u64, whence: i32) -> Result<u64, Errno> {
    // SAFETY: a system call on a descriptor that is held. Nobody uses its position.
    let found = unsafe { libc::lseek(file.as_raw_fd(), offset.cast_signed(), whence) };
    u64::try_from(found).map_err(|_| Errno::last())
}

#[cfg(test)]
mod tests {
    use hdcs_core::objects::io::SnapshotName;
    use hdcs_device::ring::Owner;
    use hdcs_device::worker::Worker;

    use super::*;
    use crate::file::snapshots::directory_of;

    /// How large the image is it is told: whoever starts it must not wait for a file system's answer.
    #[test]
    fn copier_copies_an_image_as_it_was_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let content: Vec<u8> = (0..2 * CHUNK_BYTES + 512).map(|at| at as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let mut options = File::options();
        let image = options.read(true).write(true).open(&path).unwrap();
        let found = image.metadata().unwrap();
        image.set_len(4 * CHUNK_BYTES).unwrap();
        let name = SnapshotName::new("s").unwrap();
        let making = Making::begin(&path, &name, 0).unwrap();
        let worker = Worker::start().unwrap();
        let (image, remote) = (Arc::new(image), worker.remote(Owner::Shard));
        let copier = Copier::start(image, &found, making, Arc::default(), remote).unwrap();
        copier.wait(Token(1));
        let ended = std::iter::repeat_with(|| worker.take()).flatten().next();
        assert!(matches!(
            ended,
            Some((_, Token(1), JobOutput::Unit(Ok(()))))
        ));
        let copy = std::fs::read(directory_of(&path).join("s")).unwrap();
        assert!(copy == content, "{} bytes", copy.len());
    }
}
