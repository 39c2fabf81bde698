//! What is on a device, log, read cache or data directory, without a daemon: for `hdcs inspect`, `hdcs check`,
//! and the decisions that need to know what a log still holds.
//!
//! Invariants:
//! 1. Nothing is written, but by [`wipe_device`].
//! 2. A log is read by the code that opens it ([`hdcs_core::log::replay`]), so that what is called good
//!    here opens there.
//!
//! A log that is in use moves while it is read. A failure then counts only if the same position
//! fails again while the log's superblock stayed the same, or fails every time.

mod cache;
mod damage;
pub mod home;
mod packed;
mod requests;

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use cache::{CacheSummary, CachedVolume, JournalSummary, check as check_cache};
use damage::COPY_UNUSABLE;
use hdcs_api::CheckReport;
use hdcs_backend::crypt::{Encryption, LogCipher, NoCipher};
use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::{FormatError, IoError, OpenError};
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{
    CACHE_MAGIC, CACHE_SUPERBLOCK_BLOCKS, CacheSuperblock, LOG_HEADER_BLOCKS, LOG_HOLDS_VOLUME,
    LOG_MAGIC, LOG_SUPERBLOCKS, LOG_UNFLUSHED, LogSuperblock, Membership,
};
use hdcs_core::log::replay::{Found as Replayed, Record, Replay};
use hdcs_core::log::write_log::WriteLog;
use hdcs_device::space;
pub use requests::RequestSummary;
use serde::Serialize;
use uuid::Uuid;

use crate::catalogue::{self, Found};
use crate::data_dir::Layout;

/// Memory for reading a log: a few of the largest reads.
const POOL_BYTES: usize = 8 << 20;
/// How often a log in use is read at most. One that is written while it is read looks torn wherever the
/// writing overtook the reading, each time elsewhere; what is damaged is damaged at the same place.
const LIVE_TRIES: usize = 200;
const LIVE_PAUSE: Duration = Duration::from_millis(5);
/// The start of a device that must be empty before it becomes a log: every common file system,
/// partition table and volume manager leaves a mark there. Both superblocks of a log lie there, too.
const DEVICE_HEAD_BYTES: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;

/// Whether something may be writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Nobody has it open.
    Offline,
    /// A daemon has it open.
    Live,
}

impl Use {
    fn of(daemon: Option<u32>) -> Self {
        match daemon {
            Some(_) => Self::Live,
            None => Self::Offline,
        }
    }

    /// Of a file: as the data directory that it lies in says, if it does. From any other path alone
    /// it cannot be told whether somebody has it open.
    pub fn of_file(path: &Path) -> Self {
        let layout = path.parent().map(Layout::new);
        match layout.filter(|layout| layout.identity().is_file()) {
            Some(layout) => Self::of(layout.holder()),
            None => Self::Live,
        }
    }
}

/// One superblock of a log.
#[derive(Clone, Debug, Serialize)]
pub struct SuperblockSummary {
    /// Which of the two.
    pub block: u64,
    /// Version of the format.
    pub version: Option<u16>,
    /// What stands on the log: a volume, or something of this number that a newer program has put there.
    pub holds: Option<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
    /// The volume that the log is of.
    pub volume: Option<Uuid>,
    /// Counts superblock writes; the higher one counts.
    pub sequence: Option<u64>,
    /// Counts openings.
    pub incarnation: Option<u64>,
    /// Highest epoch that the copy has promised to its group; 0 without one.
    pub epoch: Option<u64>,
    /// Position where replay begins.
    pub tail: Option<u64>,
    /// Position where the log ended when it was closed cleanly.
    pub clean_head: Option<u64>,
    /// Whether the backend may hold writes past the log that it has not flushed.
    pub unflushed: Option<bool>,
    /// What it says of this copy, if the log is of a group.
    pub group: Option<CopySummary>,
}

/// What a superblock says of a copy in a group, besides the epoch.
#[derive(Clone, Debug, Serialize)]
pub struct CopySummary {
    /// Revision of the record under which it was brought up.
    pub joined: u64,
    /// Whether it may be a source for others.
    pub whole: bool,
    /// Position from which on spans of openings before `void_before` are void.
    pub cut_position: u64,
    /// See `cut_position`.
    pub void_before: u64,
}

impl From<Membership> for CopySummary {
    fn from(membership: Membership) -> Self {
        Self {
            joined: membership.joined,
            whole: membership.is_whole,
            cut_position: membership.cut_position,
            void_before: membership.void_before,
        }
    }
}

/// What is on a write log.
#[derive(Clone, Debug, Serialize)]
pub struct LogSummary {
    /// The two superblocks.
    pub superblocks: Vec<SuperblockSummary>,
    /// Blocks of the ring.
    pub ring_blocks: u64,
    /// Blocks of the ring that are prepared; the rest is a hole.
    pub prepared_blocks: u64,
    /// Blocks of the ring in use.
    pub used_blocks: u64,
    /// Spans that are not retired.
    pub spans: u64,
    /// Writes, zeroings and discards in them.
    pub entries: u64,
    /// Bytes of data in them.
    pub data_bytes: u64,
    /// Of the entries, those that are compressed.
    pub compressed: packed::Compressed,
    /// Records, which no volume has.
    pub records: u64,
    /// The last requests of clients in them, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestSummary>,
    /// Sync points since the log was made.
    pub sync_points: u64,
    /// First position of the ring that is not used by them.
    pub head: u64,
    /// Position of the first span whose loss is proven.
    pub broken_position: Option<u64>,
    /// Why the log cannot be opened, or what of it is damaged.
    pub problem: Option<String>,
    /// It can be read to its end, and only data blocks of it are damaged.
    #[serde(skip)]
    is_data_damaged: bool,
}

/// What is at a path.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Inspection {
    /// A write log.
    Log {
        /// Where.
        path: String,
        /// What is on it.
        log: LogSummary,
    },
    /// The device of a read cache.
    Cache {
        /// Where.
        path: String,
        /// What is on it.
        cache: CacheSummary,
    },
    /// The local store of a volume in storage mode.
    Home {
        /// Where.
        path: String,
        /// What is in it.
        home: home::LocalStoreSummary,
    },
    /// A data directory.
    DataDirectory {
        /// Where.
        path: String,
        /// Process that has it open.
        daemon: Option<u32>,
        /// What is wrong with its identity.
        problem: Option<String>,
        /// Its volumes.
        volumes: Vec<VolumeSummary>,
        /// Size of the cache file.
        cache_bytes: Option<u64>,
        /// What is on it.
        cache: Option<CacheSummary>,
    },
}

/// One volume of a data directory.
#[derive(Clone, Debug, Serialize)]
pub struct VolumeSummary {
    /// Its name.
    pub name: String,
    /// Why its entry cannot be used.
    pub problem: Option<String>,
    /// Its number, by which the read cache knows it.
    pub number: Option<u32>,
    /// Its size.
    pub bytes: Option<u64>,
    /// Its backend.
    pub backend: Option<String>,
    /// Its write log.
    pub log_path: Option<String>,
    /// What is on its write log.
    pub log: Option<LogSummary>,
    /// What is in its local store, if it is in storage mode.
    pub home: Option<home::LocalStoreSummary>,
}

/// Why a path could not be inspected.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// It could not be read.
    #[error("cannot read it: {path}: {source}")]
    Io {
        /// Where.
        path: String,
        /// What happened.
        source: io::Error,
    },
    /// It is nothing of HDCS.
    #[error(
        "nothing of HDCS is here: {0}: give a write log, a local store, a read cache, a data directory or a volume's directory"
    )]
    Unknown(String),
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> InspectError + '_ {
    move |source| InspectError::Io {
        path: path.display().to_string(),
        source,
    }
}

/// Say what is at `path`.
pub fn inspect(path: &Path) -> Result<Inspection, InspectError> {
    let found = fs::metadata(path).map_err(io_at(path))?;
    let shown = path.display().to_string();
    if found.is_dir() {
        let inside = path.join(catalogue::LOG_FILE);
        if inside.is_file() && path.join("volume.json").is_file() {
            return inspect(&inside);
        }
        let layout = Layout::new(path);
        if !layout.volumes().is_dir() {
            return Err(InspectError::Unknown(shown));
        }
        return inspect_data_directory(&layout).map_err(io_at(path));
    }
    let file = File::open(path).map_err(io_at(path))?;
    if cache::is_cache(&file).map_err(io_at(path))? {
        let cache = cache::summarize(&file, None, Use::of_file(path)).map_err(io_at(path))?;
        return Ok(Inspection::Cache { path: shown, cache });
    }
    if home::is_home(&file).map_err(io_at(path))? {
        let home = home::summarize(&file, None, Use::Live).map_err(io_at(path))?;
        return Ok(Inspection::Home { path: shown, home });
    }
    let encryption = catalogue::encryption_beside(path);
    match summarize(&file, None, encryption.as_ref()).map_err(io_at(path))? {
        Some(log) => Ok(Inspection::Log { path: shown, log }),
        None => Err(InspectError::Unknown(shown)),
    }
}

fn inspect_data_directory(layout: &Layout) -> io::Result<Inspection> {
    let mut volumes = Vec::new();
    for (name, found) in catalogue::list(layout)? {
        volumes.push(match found {
            Found::Damaged(why) => VolumeSummary {
                name,
                problem: Some(why),
                number: None,
                bytes: None,
                backend: None,
                log_path: None,
                log: None,
                home: None,
            },
            Found::Entry(entry) => {
                let path = entry.log_path(layout);
                let log = File::open(&path)
                    .and_then(|file| summarize(&file, Some(entry.uuid), entry.encryption.as_ref()));
                let home = entry.home_path(layout);
                let home = home.and_then(|path| {
                    let file = File::open(path).ok()?;
                    home::summarize(&file, Some(entry.uuid), Use::of(layout.holder())).ok()
                });
                let (log, problem) = match log {
                    Ok(Some(log)) => (Some(log), None),
                    Ok(None) => (None, Some("its write log is not one".to_owned())),
                    Err(error) => (None, Some(format!("its write log: {error}"))),
                };
                VolumeSummary {
                    name,
                    problem,
                    number: Some(entry.number),
                    bytes: Some(entry.bytes),
                    backend: Some(entry.backend_url(layout)),
                    log_path: Some(path.display().to_string()),
                    log,
                    home,
                }
            }
        });
    }
    let daemon = layout.holder();
    let how = Use::of(daemon);
    let cache = match File::open(layout.cache()) {
        Ok(file) => Some(cache::summarize(&file, layout.cache_uuid(), how)?),
        Err(_) => None,
    };
    Ok(Inspection::DataDirectory {
        path: layout.root().display().to_string(),
        daemon,
        problem: layout.identity_problem(),
        volumes,
        cache_bytes: fs::metadata(layout.cache()).ok().map(|found| found.len()),
        cache,
    })
}

/// The two superblocks of a log, and the length of its region.
fn superblocks(file: &File) -> io::Result<Vec<Result<LogSuperblock, FormatError>>> {
    let mut block = [0; BLOCK_BYTES];
    let mut found = Vec::new();
    for index in 0..LOG_SUPERBLOCKS {
        match file.read_exact_at(&mut block, LogSuperblock::offset_of(index)) {
            Ok(()) => {}
            // Too short for a log: the block cannot be used.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => block.fill(0),
            Err(error) => return Err(error),
        }
        found.push(LogSuperblock::parse(&block));
    }
    Ok(found)
}

/// Read a log as opening it would, with what is kept of it beside its device; with where its records are.
fn replay(
    file: &File,
    superblock: &LogSuperblock,
    kept: Option<&LogSuperblock>,
    cipher: Option<&LogCipher>,
) -> Result<(WriteLog, Vec<Record>), OpenError> {
    let region_bytes = (superblock.ring_blocks.get() + LOG_HEADER_BLOCKS) * BLOCK_BYTES as u64;
    let mut replay = Replay::new(superblock.volume, region_bytes);
    replay.set_prepared(space::prepared_bytes(file, region_bytes));
    if let Some(cipher) = cipher {
        replay.authenticate(Arc::new(cipher.clone()));
    }
    if let Some(kept) = kept {
        replay.keep(*kept);
    }
    let pool = Pool::new(POOL_BYTES);
    let (mut done, mut records) = (false, Vec::new());
    while !done {
        // Every read is answered before the next, so there is always a buffer and a read to do.
        let Some(mut read) = replay.next_read(&pool) else {
            return Err(OpenError::Io(IoError::Failed));
        };
        let result = match file.read_exact_at(&mut read.buf, read.offset) {
            Ok(()) => {
                let header_bytes = LOG_HEADER_BLOCKS * BLOCK_BYTES as u64;
                if let Some(cipher) = cipher.filter(|_| read.offset >= header_bytes) {
                    cipher.decrypt(read.offset, &mut read.buf);
                }
                Ok(read.buf)
            }
            Err(_) => Err(IoError::Failed),
        };
        replay.read_done(Nanos(0), read.chunk, result, |_, found| match found {
            Replayed::Span(_) | Replayed::Entries(_) => {}
            Replayed::Record(record) => records.push(record),
            Replayed::Done => done = true,
        })?;
    }
    Ok((replay.into_log(), records))
}

/// Describe the log in `file`; `None` if it never was one.
fn summarize(
    file: &File,
    expected: Option<Uuid>,
    encryption: Option<&Encryption>,
) -> io::Result<Option<LogSummary>> {
    let found = superblocks(file)?;
    if found
        .iter()
        .all(|superblock| matches!(superblock, Err(FormatError::Magic)))
    {
        return Ok(None);
    }
    let mut summary = LogSummary {
        superblocks: (0..).zip(&found).map(describe).collect(),
        ring_blocks: 0,
        prepared_blocks: 0,
        used_blocks: 0,
        spans: 0,
        entries: 0,
        data_bytes: 0,
        compressed: packed::Compressed::default(),
        records: 0,
        requests: Vec::new(),
        sync_points: 0,
        head: 0,
        broken_position: None,
        problem: None,
        is_data_damaged: false,
    };
    let Ok(superblock) = &LogSuperblock::in_force(found) else {
        summary.problem = Some("neither superblock can be used".to_owned());
        return Ok(Some(summary));
    };
    summary.ring_blocks = superblock.ring_blocks.get();
    summary.prepared_blocks = summary.ring_blocks;
    summary.head = superblock.tail.get();
    summary.problem = foreign(superblock, expected);
    let cipher = match Encryption::of_log(encryption, superblock) {
        Ok(cipher) => cipher,
        Err(why) => {
            summary.problem = Some(why.to_string());
            return Ok(Some(summary));
        }
    };
    match replay(file, superblock, None, cipher.as_ref()) {
        Ok((log, records)) => {
            let bytes = log.bytes();
            summary.records = records.len() as u64;
            summary.requests = requests::last(file, cipher.as_ref(), &log, &records);
            summary.prepared_blocks = log.prepared_blocks();
            summary.used_blocks = log.used_blocks();
            summary.spans = log.spans().len() as u64;
            summary.entries = log.next_sequence() - log.first_sequence();
            summary.data_bytes = bytes.appended - bytes.retired;
            summary.compressed = packed::Compressed::of(&log);
            summary.sync_points = log.sync_points();
            summary.head = log.durable();
            if !records.is_empty() {
                let why = "it holds records, which are not a volume's".to_owned();
                summary.problem.get_or_insert(why);
            }
            if let Some(why) = damage::lost_with(&log, superblock) {
                summary.is_data_damaged = summary.problem.is_none();
                summary.problem.get_or_insert(why);
            }
        }
        Err(error) => {
            if let OpenError::CorruptLog { position } = error {
                summary.broken_position = Some(position);
            }
            summary.problem = Some(error.to_string());
        }
    }
    Ok(Some(summary))
}

fn describe((block, found): (u64, &Result<LogSuperblock, FormatError>)) -> SuperblockSummary {
    let good = found.as_ref().ok();
    SuperblockSummary {
        block,
        problem: found.as_ref().err().map(ToString::to_string),
        version: good.map(|s| s.version.get()),
        holds: good.map(|s| match s.holds.get() {
            LOG_HOLDS_VOLUME => "volume".to_owned(),
            other => format!("unknown ({other})"),
        }),
        volume: good.map(|s| Uuid::from_bytes(s.volume)),
        sequence: good.map(|s| s.sequence.get()),
        incarnation: good.map(|s| s.incarnation.get()),
        epoch: good.map(|s| s.epoch.get()),
        tail: good.map(|s| s.tail.get()),
        clean_head: good
            .map(|s| s.clean_head.get())
            .filter(|&head| head != u64::MAX),
        unflushed: good.map(|s| s.flags.get() & LOG_UNFLUSHED != 0),
        group: good.and_then(LogSuperblock::membership).map(Into::into),
    }
}

fn foreign(superblock: &LogSuperblock, expected: Option<Uuid>) -> Option<String> {
    let found = Uuid::from_bytes(superblock.volume);
    expected
        .filter(|&expected| expected != found)
        .map(|expected| format!("it is the log of volume {found}, not of {expected}"))
}

/// What the log of volume `uuid` holds and the backend may not have: bytes of data, and entries,
/// discards included. `None` if that cannot be told.
pub fn dirty_of(path: &Path, uuid: Uuid, encryption: Option<&Encryption>) -> Option<(u64, u64)> {
    let file = File::open(path).ok()?;
    let summary = summarize(&file, Some(uuid), encryption).ok()??;
    match summary.problem {
        None => Some((summary.data_bytes, summary.entries)),
        // Something was lost, even if nothing is left of it.
        Some(_) if summary.is_data_damaged => Some((summary.data_bytes, summary.entries.max(1))),
        Some(_) => None,
    }
}

/// Verify every checksum of the log at `path`; without the key of an encrypted one, those of its superblocks.
pub fn check_log(
    path: &Path,
    uuid: Option<Uuid>,
    encryption: Option<&Encryption>,
    how: Use,
) -> CheckReport {
    let mut report = CheckReport {
        path: path.display().to_string(),
        ..CheckReport::default()
    };
    let mut last = None;
    for _ in 0..if how == Use::Live { LIVE_TRIES } else { 1 } {
        match check_once(path, uuid, encryption, &mut report) {
            Ok(()) => return report,
            Err(failure) if last.as_ref() == Some(&failure) => break,
            Err(failure) => last = Some(failure),
        }
        if how == Use::Live {
            std::thread::sleep(LIVE_PAUSE);
        }
    }
    report.problems.extend(last);
    report
}

/// What to do about one of two superblocks that is damaged.
const OTHER_SUPERBLOCK: &str = "the other one is used, and this one is written again once the volume is open: look at the \
                                health of the device";

/// One reading.
fn check_once(
    path: &Path,
    uuid: Option<Uuid>,
    encryption: Option<&Encryption>,
    report: &mut CheckReport,
) -> Result<(), String> {
    let shown = path.display();
    let file = File::open(path).map_err(|error| format!("{shown}: {error}"))?;
    let found = superblocks(&file).map_err(|error| format!("{shown}: {error}"))?;
    let superblock = &LogSuperblock::in_force(found.iter().copied())
        .map_err(|why| {
            format!(
                "{shown}: no usable superblock: {why}: put a good copy of the log back, or give up what only it holds \
                 with `hdcs volume open NAME --discard-dirty`; {COPY_UNUSABLE}"
            )
        })?;
    if let Some(why) = foreign(superblock, uuid) {
        return Err(format!("{shown}: {why}"));
    }
    match Encryption::of_log(encryption, superblock) {
        Ok(cipher) => {
            let log = replay(&file, superblock, None, cipher.as_ref());
            let unusable = |error| format!("{shown}: {}", damage::unusable(&error, superblock));
            let (log, _) = log.map_err(unusable)?;
            report.spans = log.spans().len() as u64;
            report.blocks = log.spans().iter().map(|span| span.blocks).sum();
            packed::check(&file, &log, cipher.as_ref()).map_err(|why| format!("{shown}: {why}"))?;
            if let Some(why) = damage::lost_with(&log, superblock) {
                return Err(format!("{shown}: {why}"));
            }
        }
        Err(NoCipher::Keyless(why)) => {
            let note =
                format!("its superblocks are verified, and without its key not its spans: {why}");
            report.note = Some(note);
        }
        Err(NoCipher::Wrong(why)) => return Err(format!("{shown}: {why}")),
    }
    // A second superblock that was never written is empty; one that is damaged is a finding,
    // since the log then hangs on the other one alone.
    for (block, superblock) in found.iter().enumerate() {
        match superblock {
            Ok(_) | Err(FormatError::Magic) => {}
            Err(why) => {
                return Err(format!(
                    "{shown}: superblock {block}: {why}: {OTHER_SUPERBLOCK}"
                ));
            }
        }
    }
    Ok(())
}

/// Verify everything below a data directory; `progress` is that of its cache, in bytes done and in
/// all.
pub fn check_data_directory(
    layout: &Layout,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<CheckReport>, InspectError> {
    let how = Use::of(layout.holder());
    let mut reports = vec![CheckReport {
        path: layout.identity().display().to_string(),
        problems: layout.identity_problem().into_iter().collect(),
        ..CheckReport::default()
    }];
    for (name, found) in catalogue::list(layout).map_err(io_at(layout.root()))? {
        let report = match found {
            Found::Entry(entry) => {
                let (path, encryption) = (entry.log_path(layout), entry.encryption.as_ref());
                if let Some(home) = entry.home_path(layout) {
                    let directory = catalogue::directory(layout, &entry.name);
                    let log = home::data::logged(&path, &directory, entry.uuid, encryption);
                    reports.push(home::check(&home, Some(entry.uuid), how, log.as_deref()));
                }
                check_log(&path, Some(entry.uuid), encryption, how)
            }
            Found::Damaged(why) => CheckReport {
                path: name,
                problems: vec![why],
                ..CheckReport::default()
            },
        };
        reports.push(report);
    }
    let cache = layout.cache();
    if cache.exists() {
        reports.push(check_cache(&cache, layout.cache_uuid(), how, progress));
    }
    Ok(reports)
}

/// URLs of the backends of the volumes below a data directory, or of the one in a volume's directory, and how
/// they are encrypted. What cannot be read of them is a finding of the check of the directory itself.
pub fn backends(path: &Path) -> Vec<(String, Option<Encryption>)> {
    let whole = Layout::new(path);
    let (layout, only) = if whole.volumes().is_dir() {
        (whole, None)
    } else {
        let root = path.parent().and_then(Path::parent);
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let (Some(root), Some(name)) = (root, name) else {
            return Vec::new();
        };
        (Layout::new(root), Some(name))
    };
    let found = catalogue::list(&layout).unwrap_or_default();
    let entries = found.into_iter().filter_map(|(name, found)| match found {
        Found::Entry(entry) if only.as_ref().is_none_or(|only| *only == name) => Some(entry),
        _ => None,
    });
    entries
        .map(|entry| (entry.backend_url(&layout), entry.encryption))
        .collect()
}

/// Whether the file or device at `path` begins like a read cache.
pub fn is_cache(path: &Path) -> bool {
    File::open(path)
        .and_then(|file| cache::is_cache(&file))
        .unwrap_or(false)
}

/// The volume whose log is at `path`.
pub fn log_owner(path: &Path) -> Option<Uuid> {
    let found = File::open(path).and_then(|file| superblocks(&file)).ok()?;
    let superblock = LogSuperblock::in_force(found).ok()?;
    Some(Uuid::from_bytes(superblock.volume))
}

/// Whether the file or device at `path` begins like a log.
pub fn is_log(path: &Path) -> bool {
    let mut magic = [0; LOG_MAGIC.len()];
    File::open(path)
        .and_then(|file| file.read_exact_at(&mut magic, 0))
        .is_ok_and(|()| magic == LOG_MAGIC)
}

/// The beginning of a block device, where whatever it holds shows.
fn device_head(path: &Path) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let file = File::open(path)?;
    file.take(DEVICE_HEAD_BYTES as u64).read_to_end(&mut head)?;
    Ok(head)
}

/// Whether a block device holds nothing, as far as its beginning tells.
pub fn is_empty_device(path: &Path) -> bool {
    device_head(path).is_ok_and(|head| head.iter().all(|&byte| byte == 0))
}

/// Whether a device is named that is not there: a file made in its place would be a file in memory, unnoticed. Who names
/// a place below `/dev/shm`, which is a file system, means that.
pub fn is_missing_device(path: &Path) -> bool {
    path.starts_with("/dev")
        && !path.starts_with("/dev/shm")
        && !fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Refuse a block device that holds something.
pub fn refuse_used_device(path: &Path) -> Result<(), String> {
    let head = device_head(path);
    let head = head.map_err(|error| format!("log device {}: {error}", path.display()))?;
    if head.iter().all(|&byte| byte == 0) {
        return Ok(());
    }
    let what = if head.starts_with(&LOG_MAGIC) {
        "the write log of a volume"
    } else {
        "data"
    };
    Err(format!(
        "log device {} holds {what}: everything on it would be lost; choose another, or say \
         --log-overwrite",
        path.display()
    ))
}

/// Whether a place for the read cache holds something else, which would be overwritten.
pub fn is_foreign_to_cache(path: &Path) -> io::Result<bool> {
    let mut head = Vec::new();
    let end = CACHE_SUPERBLOCK_BLOCKS[1] + 1;
    File::open(path)?
        .take(end * BLOCK_BYTES as u64)
        .read_to_end(&mut head)?;
    // Rot in one superblock, or a file that was cut short, is no reason to refuse what was ours.
    let mut blocks = head.chunks(BLOCK_BYTES);
    let is_ours =
        head.iter().all(|&byte| byte == 0) || blocks.any(|block| block.starts_with(&CACHE_MAGIC));
    Ok(!is_ours)
}

/// Why a place for the read cache is to be left to a newer program, if one made what is there.
pub fn cache_made_newer(path: &Path) -> io::Result<Option<FormatError>> {
    File::open(path).and_then(|file| cache::made_newer(&file))
}

/// Whether a superblock at `path` carries the identity of a cache.
pub fn is_cache_of(path: &Path, uuid: [u8; 16]) -> bool {
    let blocks = File::open(path).and_then(|file| cache::superblock_blocks(&file));
    let carries_it =
        |block: &[u8]| CacheSuperblock::parse(block).is_ok_and(|found| found.uuid == uuid);
    blocks.is_ok_and(|blocks| blocks.chunks_exact(BLOCK_BYTES).any(carries_it))
}

/// Make the device of a log or local store empty again, so that it can be used for something else.
pub fn wipe_device(path: &Path) -> io::Result<()> {
    let file = fs::OpenOptions::new().write(true).open(path)?;
    file.write_all_at(&vec![0; DEVICE_HEAD_BYTES], 0)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::limits::LOG_BYTES_MIN;
    use hdcs_core::format::{
        EntryKind, SPAN_MAGIC, SPAN_VERSION, SpanEntry, SpanHeader, block_checksum,
    };
    use zerocopy::IntoBytes;

    use super::*;

    fn log_of(uuid: Uuid) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LOG_BYTES_MIN).unwrap();
        let superblock = LogSuperblock::new(uuid.into_bytes(), 7, LOG_BYTES_MIN);
        file.as_file()
            .write_all_at(superblock.as_bytes(), 0)
            .unwrap();
        file
    }

    #[test]
    fn file_in_memory_is_made_only_where_people_put_files() {
        assert!(is_missing_device(Path::new("/dev/hdcs-no-such-device")));
        assert!(
            is_missing_device(Path::new("/dev/null")),
            "nothing to keep blocks in"
        );
        assert!(!is_missing_device(Path::new("/dev/shm/hdcs-no-such-file")));
        assert!(!is_missing_device(Path::new("/var/hdcs-no-such-file")));
    }

    #[test]
    fn inspect_empty_log_is_clean_and_good() {
        let uuid = Uuid::new_v4();
        let file = log_of(uuid);
        assert!(is_log(file.path()));
        assert_eq!(log_owner(file.path()), Some(uuid));
        assert_eq!(dirty_of(file.path(), uuid, None), Some((0, 0)));
        let report = check_log(file.path(), Some(uuid), None, Use::Offline);
        assert_eq!(report.problems, Vec::<String>::new());
        assert!(matches!(
            inspect(file.path()).unwrap(),
            Inspection::Log { log, .. } if log.problem.is_none() && log.spans == 0
        ));
    }

    #[test]
    fn inspect_tells_what_a_copy_says_of_its_group() {
        let uuid = Uuid::new_v4();
        let file = log_of(uuid);
        let superblocks = || match inspect(file.path()).unwrap() {
            Inspection::Log { log, .. } => serde_json::to_value(log.superblocks).unwrap(),
            other => panic!("{other:?}"),
        };
        let alone = superblocks();
        assert_eq!(
            (&alone[0]["version"], &alone[0]["epoch"]),
            (&1.into(), &0.into())
        );
        assert!(alone[0]["group"].is_null());
        let mut superblock = LogSuperblock::new(uuid.into_bytes(), 7, LOG_BYTES_MIN);
        superblock.incarnation = 3.into();
        superblock.set_membership(Membership {
            promised: 6,
            cut_position: 40,
            void_before: 2,
            joined: 5,
            is_whole: false,
        });
        superblock.seal();
        (file.as_file().write_all_at(superblock.as_bytes(), 0)).unwrap();
        let of_group = superblocks();
        assert_eq!(
            (&of_group[0]["version"], &of_group[0]["epoch"]),
            (&2.into(), &6.into())
        );
        let expected = serde_json::json!({
            "joined": 5, "whole": false, "cut_position": 40, "void_before": 2,
        });
        assert_eq!(of_group[0]["group"], expected);
    }

    /// What another use of the log has written is named, and its blocks are verified.
    #[test]
    fn inspect_tells_of_records() {
        let uuid = Uuid::new_v4();
        let file = log_of(uuid);
        let mut opened = LogSuperblock::parse(
            LogSuperblock::new(uuid.into_bytes(), 7, LOG_BYTES_MIN).as_bytes(),
        )
        .unwrap();
        opened.incarnation = 1.into();
        opened.clean_head = u64::MAX.into();
        opened.seal();
        let (record, request) = requests::example();
        let mut data = [9; BLOCK_BYTES];
        data[..record.len()].copy_from_slice(&record);
        let header = SpanHeader {
            magic: SPAN_MAGIC,
            version: SPAN_VERSION.into(),
            control_blocks: 1.into(),
            data_blocks: 1.into(),
            entries: 1.into(),
            checksum: 0.into(),
            chain: 0.into(),
            log: 7.into(),
            incarnation: 1.into(),
            epoch: 0.into(),
            position: 0.into(),
            durable: 0.into(),
            sync_points: 0.into(),
            ahead: 0.into(),
            reserved: [0; 40],
        };
        let entry = SpanEntry {
            start: 0.into(),
            sectors: (record.len() as u64).into(),
            data_block: 0.into(),
            kind: EntryKind::Record.code(),
            flags: 0,
            stored_offset: 0.into(),
            stored_bytes: 0.into(),
            method: 0,
            reserved: 0,
            checksum: 0.into(),
        };
        let checksum = block_checksum(&data).to_le_bytes();
        let mut control = [header.as_bytes(), entry.as_bytes(), &checksum].concat();
        control.resize(BLOCK_BYTES, 0);
        SpanHeader::seal(&mut control);
        let ring = LOG_HEADER_BLOCKS * BLOCK_BYTES as u64;
        let blocks = [
            (0, opened.as_bytes()),
            (ring, &control[..]),
            (ring + 4096, &data[..]),
        ];
        for (offset, block) in blocks {
            file.as_file().write_all_at(block, offset).unwrap();
        }
        let log = || match inspect(file.path()).unwrap() {
            Inspection::Log { log, .. } => log,
            other => panic!("{other:?}"),
        };
        let found = log();
        assert_eq!((found.spans, found.entries, found.records), (1, 0, 1));
        assert_eq!(found.requests, [request]);
        assert!(found.problem.is_some_and(|why| why.contains("records")));
        assert_eq!(dirty_of(file.path(), uuid, None), None);
        let report = check_log(file.path(), Some(uuid), None, Use::Offline);
        assert_eq!((report.problems.len(), report.blocks), (0, 2));
        file.as_file().write_all_at(&[8], ring + 5000).unwrap();
        let found = log();
        assert_eq!((found.spans, found.records), (0, 0));
    }

    #[test]
    fn inspect_log_of_another_volume_is_told() {
        let file = log_of(Uuid::new_v4());
        let other = Uuid::new_v4();
        let report = check_log(file.path(), Some(other), None, Use::Live);
        assert!(
            report.problems[0].contains(&other.to_string()),
            "{report:?}"
        );
        assert_eq!(dirty_of(file.path(), other, None), None);
    }

    #[test]
    fn inspect_damaged_superblock_is_told() {
        let uuid = Uuid::new_v4();
        let file = log_of(uuid);
        file.as_file().write_all_at(&[0xff], 100).unwrap();
        let report = check_log(file.path(), Some(uuid), None, Use::Offline);
        assert!(report.problems[0].contains("checksum"), "{report:?}");
        assert!(matches!(
            inspect(file.path()).unwrap(),
            Inspection::Log { log, .. } if log.problem.is_some()
        ));
    }

    #[test]
    fn inspect_anything_else_is_not_taken_for_a_log() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(
            inspect(file.path()),
            Err(InspectError::Unknown(_))
        ));
        file.as_file().write_all_at(&[1; 10_000], 0).unwrap();
        assert!(matches!(
            inspect(file.path()),
            Err(InspectError::Unknown(_))
        ));
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(
            inspect(directory.path()),
            Err(InspectError::Unknown(_))
        ));
    }

    #[test]
    fn used_device_is_refused_and_can_be_wiped() {
        let file = log_of(Uuid::new_v4());
        assert!(
            refuse_used_device(file.path())
                .unwrap_err()
                .contains("write log")
        );
        wipe_device(file.path()).unwrap();
        refuse_used_device(file.path()).unwrap();
        file.as_file().write_all_at(b"EXT", 1080).unwrap();
        assert!(
            refuse_used_device(file.path())
                .unwrap_err()
                .contains("holds data")
        );
    }
}
