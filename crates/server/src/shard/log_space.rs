//! What a shard tells of the space of each log that it has, and what it is told. The control plane decides who has how much
//! (`crate::control::node`); no write asks anybody.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use hdcs_backend::file::snapshots_of;
use hdcs_core::base::io::Nanos;
use hdcs_core::node::log_space::LogView;
use hdcs_core::volume::sharing::{self, GivenBack, LogBytes};
use hdcs_core::volume::{Event, Volume};
use hdcs_device::file::Device;
use hdcs_frontend::VolumeNumber;
use tokio::sync::Notify;

use super::state::ShardState;

/// The space of the log of one open volume. Its numbers are those of the last poll.
#[derive(Debug, Default)]
pub struct LogSpace {
    all: AtomicU64,
    prepared: AtomicU64,
    used: AtomicU64,
    is_shared: AtomicBool,
    /// What of the file was prepared and not taken back, as far as whoever does that knows: never less than what the log
    /// uses because of it. 0: nothing was done yet.
    taken: AtomicU64,
    /// Up to where the file may still have what the log has given back, for no hole could be made. 0: nowhere.
    owed: AtomicU64,
    /// Nothing is changed before this, since it did not answer of late, or could not do what it was asked.
    not_before: Mutex<Option<Instant>>,
    /// Something was in it since this was last asked.
    was_used: AtomicBool,
    /// Whether it was told that it fills up.
    is_wanting: AtomicBool,
    /// Its file, and which file system that is on; none: its space is not to be changed.
    file: OnceLock<(Weak<File>, u64)>,
    /// Where what it holds goes to, if that is a file on the same file system.
    backend: OnceLock<PathBuf>,
    /// Somebody waits for logs that fill up.
    wanted: Arc<Notify>,
}

impl LogSpace {
    /// That of a log that is still to be opened; `wanted` is told when it fills up.
    pub fn new(wanted: Arc<Notify>) -> Self {
        Self {
            wanted,
            ..Self::default()
        }
    }

    /// Its log is open, and what it holds goes to this local file, device or directory, if to any. Blocks.
    pub fn opened(&self, log: &Device, backend: Option<PathBuf>) {
        let Some(file) = log.resizable() else { return };
        let Ok(found) = file.metadata() else { return };
        // It is opened once.
        let _ = self.file.set((Arc::downgrade(file), found.dev()));
        // What lies elsewhere takes nothing from there. It is not asked again: it may hang one day.
        if let Some(path) = backend.filter(|path| is_file_on(path, found.dev())) {
            let _ = self.backend.set(path);
        }
    }

    /// The file system that it is on.
    pub fn file_system(&self) -> Option<u64> {
        self.file.get().map(|(_, system)| *system)
    }

    /// Bytes that its backend may soon take of the log's file system: what a file there has no space of its own for yet,
    /// but no more than twice what the log can hold, for the rest is written only when that is. What a file shares with
    /// a snapshot it has no space of its own for. Blocks.
    pub fn owed_to_backend(&self) -> u64 {
        let Some(path) = self.backend.get() else {
            return 0;
        };
        let Ok(found) = path.metadata() else { return 0 };
        let mut snapshots = snapshots_of(path).read_dir().into_iter().flatten();
        let own = if snapshots.next().is_some() {
            0
        } else {
            found.blocks() * 512
        };
        let soon = self.all.load(Ordering::Acquire).saturating_mul(2);
        found.len().saturating_sub(own).min(soon)
    }

    /// Its file, while it is open. Whoever has it keeps it locked.
    pub fn file(&self) -> Option<Arc<File>> {
        self.file.get()?.0.upgrade()
    }

    /// Note what it has now.
    pub fn note(&self, volume: &Volume) {
        let Some(bytes) = sharing::log_bytes(volume) else {
            return;
        };
        let LogBytes {
            all,
            prepared,
            used,
            is_shared,
        } = bytes;
        self.prepared.store(prepared, Ordering::Relaxed);
        self.used.store(used, Ordering::Relaxed);
        self.is_shared.store(is_shared, Ordering::Relaxed);
        // Last, for it says that there are others.
        self.all.store(all, Ordering::Release);
        if used > 0 && !self.was_used.load(Ordering::Relaxed) {
            self.was_used.store(true, Ordering::Relaxed);
        }
        let wants = self.wants_more();
        if wants != self.is_wanting.load(Ordering::Relaxed) {
            self.is_wanting.store(wants, Ordering::Relaxed);
            if wants {
                self.wanted.notify_one();
            }
        }
    }

    /// Whether the log fills up in what it knows of. If its file has more, it is told so.
    fn wants_more(&self) -> bool {
        let prepared = self.prepared.load(Ordering::Relaxed);
        let view = self.view(Nanos(0));
        view.is_some_and(|view| LogView { prepared, ..view }.wants_more())
    }

    /// How much is prepared of its file, if the log knows of less and can use it: it was told, and has not heard.
    pub fn untold(&self) -> Option<u64> {
        let all = self.all.load(Ordering::Acquire);
        let prepared = self.prepared.load(Ordering::Relaxed);
        Some(self.taken()).filter(|taken| prepared < *taken && prepared < all)
    }

    /// What is to be decided by, if it has been empty for so long; `None` before it is open. All that its file may have
    /// counts as prepared, so that it is given back in the end.
    pub fn view(&self, quiet: Nanos) -> Option<LogView> {
        let all = self.all.load(Ordering::Acquire);
        let of_file = self.taken().max(self.owed.load(Ordering::Relaxed));
        (all > 0).then(|| LogView {
            all,
            prepared: self.prepared.load(Ordering::Relaxed).max(of_file),
            used: self.used.load(Ordering::Relaxed),
            is_shared: self.is_shared.load(Ordering::Relaxed),
            quiet,
        })
    }

    /// So many bytes of its file are prepared from now on, and up to the second number it may have more.
    pub fn take(&self, bytes: u64, owed: u64) {
        self.taken.store(bytes, Ordering::Relaxed);
        self.owed.store(owed, Ordering::Relaxed);
    }

    /// How much of its file the log may use, whatever it knows by now of what it was told.
    pub fn usable(&self) -> u64 {
        self.taken().max(self.prepared.load(Ordering::Relaxed))
    }

    fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    fn not_before(&self) -> MutexGuard<'_, Option<Instant>> {
        self.not_before
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Change nothing of it for so long.
    pub fn leave_alone(&self, pause: Duration) {
        *self.not_before() = Some(Instant::now() + pause);
    }

    /// Whether that is so.
    pub fn is_left_alone(&self) -> bool {
        self.not_before()
            .is_some_and(|until| Instant::now() < until)
    }

    /// Whether something was in it since the last call.
    pub fn take_used(&self) -> bool {
        self.was_used.swap(false, Ordering::Relaxed) || self.used.load(Ordering::Relaxed) > 0
    }
}

/// More of a volume's log is prepared: writes that wait for room go on.
pub fn log_prepared(
    state: &mut ShardState,
    number: VolumeNumber,
    bytes: u64,
) -> Result<(), String> {
    let slot = state.open_slot(number)?;
    if let Some(served) = state.volumes.get_mut(slot) {
        sharing::set_log_prepared(&mut served.volume, bytes);
        served.space.note(&served.volume);
    }
    state.touch(slot);
    Ok(())
}

/// A volume is to use less of its log.
pub fn give_log_back(
    state: &mut ShardState,
    number: VolumeNumber,
    bytes: u64,
) -> Result<GivenBack, String> {
    let slot = state.open_slot(number)?;
    let Some(served) = state.volumes.get_mut(slot) else {
        return Ok(GivenBack::No);
    };
    let given = sharing::give_log_back(&mut served.volume, bytes);
    served.space.note(&served.volume);
    if given == GivenBack::Soon {
        state.step(slot, Event::Poll);
    }
    Ok(given)
}

/// Whether there is a file, and that on this file system. Blocks.
fn is_file_on(path: &Path, system: u64) -> bool {
    let found = path.metadata();
    found.is_ok_and(|found| found.is_file() && found.dev() == system)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn space() -> LogSpace {
        let space = LogSpace::default();
        space.all.store(512 * MIB, Ordering::Relaxed);
        space.prepared.store(64 * MIB, Ordering::Relaxed);
        space
    }

    #[test]
    fn log_may_use_what_it_was_told_of_whether_or_not_it_has_answered() {
        let space = space();
        assert_eq!(space.usable(), 64 * MIB);
        space.take(96 * MIB, 0);
        assert_eq!(space.usable(), 96 * MIB);
        assert_eq!(
            space.view(Nanos(0)).unwrap().prepared,
            96 * MIB,
            "what it does not know of is not prepared again"
        );
    }

    #[test]
    fn log_that_has_not_heard_of_more_is_told_again_and_wants_more_by_what_it_knows() {
        let space = space();
        assert_eq!(space.untold(), None);
        space.used.store(48 * MIB, Ordering::Relaxed);
        space.take(160 * MIB, 0);
        assert!(space.wants_more(), "it is full by what it knows of");
        assert!(!space.view(Nanos(0)).unwrap().wants_more());
        assert_eq!(space.untold(), Some(160 * MIB));
        space.prepared.store(160 * MIB, Ordering::Relaxed);
        assert!(!space.wants_more());
        assert_eq!(space.untold(), None);
        // One that has failed says that what it has is all.
        space.take(192 * MIB, 0);
        space.all.store(160 * MIB, Ordering::Relaxed);
        assert_eq!(space.untold(), None);
    }

    #[test]
    fn backend_is_owed_what_its_file_has_no_space_of_its_own_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        let file = File::create(&path).unwrap();
        let space = space();
        assert_eq!(space.owed_to_backend(), 0, "there is none");
        space.backend.set(path).unwrap();
        file.set_len(4 * MIB).unwrap();
        assert_eq!(space.owed_to_backend(), 4 * MIB);
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, MIB).unwrap();
        assert_eq!(space.owed_to_backend(), 3 * MIB);
        let snapshots = directory.path().join("data.hdcs-snap");
        std::fs::create_dir(&snapshots).unwrap();
        assert_eq!(space.owed_to_backend(), 3 * MIB, "there was a snapshot");
        File::create(snapshots.join("monday")).unwrap();
        assert_eq!(space.owed_to_backend(), 4 * MIB, "there is one");
        // A large one is not written all at once: the log holds 512 MiB.
        file.set_len(1 << 40).unwrap();
        assert_eq!(space.owed_to_backend(), 1024 * MIB);
    }

    #[test]
    fn backend_is_asked_only_if_it_is_a_file_where_the_log_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        let system = File::create(&path).unwrap().metadata().unwrap().dev();
        assert!(is_file_on(&path, system));
        assert!(!is_file_on(&path, system + 1));
        assert!(!is_file_on(directory.path(), system));
        assert!(!is_file_on(&directory.path().join("absent"), system));
    }

    #[test]
    fn what_could_not_be_taken_back_is_asked_for_again_and_prepared_anew() {
        let space = space();
        space.prepared.store(16 * MIB, Ordering::Relaxed);
        space.take(16 * MIB, 64 * MIB);
        assert_eq!(space.view(Nanos(0)).unwrap().prepared, 64 * MIB);
        assert_eq!(space.usable(), 16 * MIB);
        space.take(16 * MIB, 0);
        assert_eq!(space.view(Nanos(0)).unwrap().prepared, 16 * MIB);
    }

    #[test]
    fn log_that_does_not_answer_is_left_alone_for_a_while() {
        let space = space();
        assert!(!space.is_left_alone());
        space.leave_alone(Duration::from_secs(3600));
        assert!(space.is_left_alone());
        space.leave_alone(Duration::ZERO);
        assert!(!space.is_left_alone());
    }
}
