//! What `hdcs check` asks of a backend: to verify, without opening it, what it holds.
//!
//! Nothing is written, nobody is fenced, and no lock is taken: it runs beside whoever has the volume open.

use std::fs::File;
use std::io::{self, ErrorKind, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use hdcs_device::file::DeviceError;

use super::BackendError;

/// Bytes of a file that are read at once.
const READ_BYTES: u64 = 1 << 20;
/// What a part of a file that cannot be read is narrowed to.
const SECTOR_BYTES: u64 = 4096;
/// Problems that are named one by one.
pub const PROBLEMS_MAX: usize = 100;

/// Who watches a verification, slows it down, and may end it.
pub trait Watch {
    /// There are so many bytes to verify in all, as far as can be told: later it may say otherwise.
    fn total(&mut self, bytes: u64);
    /// How many objects may be read at once.
    fn at_once(&self) -> usize {
        usize::MAX
    }
    /// So many more are read; whether to go on.
    fn passed(&mut self, bytes: u64) -> bool;
    /// So many more need not be read.
    fn skipped(&mut self, _bytes: u64) {}
}

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Objects whose parts that are needed are good.
    pub objects: u64,
    /// 4 KiB blocks whose checksum is good.
    pub blocks: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Whether it was ended before everything was verified.
    pub is_cut_short: bool,
    /// The failure that ended it before that, if something was wrong by then.
    pub ended_by: Option<String>,
    /// What is worth knowing and no problem.
    pub note: Option<String>,
    /// What is wrong: what, where, what to do.
    pub problems: Vec<String>,
    /// Problems beyond those.
    pub more_problems: u64,
}

impl Verified {
    /// Something is wrong. It is named once, also if it is found twice.
    pub fn problem(&mut self, what: String) {
        if self.problems.contains(&what) {
            return;
        }
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(what);
        } else {
            self.more_problems += 1;
        }
    }

    /// Take over what else was found to be wrong by somebody who has looked at some of the same.
    pub fn add_new_problems(&mut self, found: Self) {
        for problem in found.problems {
            self.problem(problem);
        }
        // Those may be known, too.
        self.more_problems = self.more_problems.max(found.more_problems);
    }
}

/// Read a raw file or device to its end; its holes have nothing to read.
pub fn read_file(path: &Path, watch: &mut dyn Watch) -> Result<Verified, BackendError> {
    let mut file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => BackendError::Absent(path.display().to_string()),
        _ => DeviceError::io("open", path, error).into(),
    })?;
    let end = file.seek(SeekFrom::End(0));
    let end = end.map_err(|error| DeviceError::io("measure", path, error))?;
    watch.total(end);
    let mut verified = Verified {
        note: Some(
            "a raw image has no checksums: all of it was read, which finds what the device cannot give back, not \
             what it gives back wrongly"
                .to_owned(),
        ),
        ..Verified::default()
    };
    let mut buffer = vec![0; READ_BYTES as usize];
    let mut at = 0;
    while at < end {
        let data = next_data(&file, at).unwrap_or(at).min(end);
        let stop = (data + READ_BYTES).min(end);
        watch.skipped(data - at);
        let part = &mut buffer[..(stop - data) as usize];
        match file.read_exact_at(part, data) {
            Ok(()) => verified.bytes += stop - data,
            // It was cut meanwhile: a shrunk volume.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => narrow(&file, path, data..stop, &error, &mut verified),
        }
        if !watch.passed(stop - data) {
            verified.is_cut_short = true;
            break;
        }
        at = stop;
    }
    Ok(verified)
}

/// Where data begins from `at` on; `None` if that cannot be told.
fn next_data(file: &File, at: u64) -> Option<u64> {
    // SAFETY: lseek takes no pointers, and every read names its place.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, libc::SEEK_DATA) };
    match u64::try_from(found) {
        Ok(data) => Some(data),
        // Nothing but a hole up to the end.
        Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO) => Some(u64::MAX),
        Err(_) => None,
    }
}

/// Name the sectors of a range that cannot be read.
fn narrow(
    file: &File,
    path: &Path,
    range: std::ops::Range<u64>,
    error: &io::Error,
    verified: &mut Verified,
) {
    let mut sector = [0; SECTOR_BYTES as usize];
    let mut at = range.start;
    let mut bad: Vec<std::ops::Range<u64>> = Vec::new();
    while at < range.end {
        let stop = (at + SECTOR_BYTES).min(range.end);
        match (
            file.read_exact_at(&mut sector[..(stop - at) as usize], at),
            bad.last_mut(),
        ) {
            (Ok(()), _) => verified.bytes += stop - at,
            (Err(_), Some(last)) if last.end == at => last.end = stop,
            (Err(_), _) => bad.push(at..stop),
        }
        at = stop;
    }
    for range in bad {
        verified.problem(format!(
            "{}: bytes {} to {} cannot be read: {error}: look at its device, and restore them from a backup",
            path.display(),
            range.start,
            range.end
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes in all, read and skipped.
    #[derive(Default)]
    struct Counting(u64, u64, u64);

    impl Watch for Counting {
        fn total(&mut self, bytes: u64) {
            self.0 = bytes;
        }
        fn passed(&mut self, bytes: u64) -> bool {
            self.1 += bytes;
            self.1 < 5 << 20
        }
        fn skipped(&mut self, bytes: u64) {
            self.2 += bytes;
        }
    }

    #[test]
    fn verify_file_reads_its_data_and_can_be_ended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        file.as_file().write_all_at(&[1; 4096], 2 << 20).unwrap();
        let mut watch = Counting::default();
        let verified = read_file(file.path(), &mut watch).unwrap();
        assert_eq!((watch.0, watch.1 + watch.2), (4 << 20, 4 << 20));
        // What lies in holes takes no time of a scrub.
        assert_eq!(watch.1, verified.bytes);
        assert!((4096..=2 << 20).contains(&verified.bytes), "{verified:?}");
        assert!(verified.problems.is_empty() && !verified.is_cut_short);
        file.as_file().write_all_at(&vec![1; 9 << 20], 0).unwrap();
        let mut watch = Counting::default();
        let verified = read_file(file.path(), &mut watch).unwrap();
        assert!(verified.is_cut_short && verified.bytes == 5 << 20);
        let missing = read_file(Path::new("/no/such"), &mut Counting::default());
        assert!(matches!(missing, Err(BackendError::Absent(_))));
    }
}
