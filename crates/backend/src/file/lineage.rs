//! What of a clone's file is still its snapshot's: the data that both files share.
//!
//! A clone is marked with the snapshot that it began as. Whether a block is still as there is never noted
//! anywhere, but seen: a file system with reflinks gives both files the same place on the device for it
//! until either is written, and never writes to a shared place. So a block is inherited where both
//! files have the same place, or both have a hole; whoever has changed or copied either file meanwhile only
//! makes that less.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hdcs_device::Errno;

use super::presence::open_to_look;
use super::snapshots::{UUID_ATTRIBUTE, path_bytes, path_from, set_attribute};

/// The snapshot that a file began as, among its attributes: its identity, a space and its path.
const ORIGIN_ATTRIBUTE: &CStr = c"user.hdcs.origin";
/// Longest attribute that is read.
const ATTRIBUTE_BYTES_MAX: usize = 8192;
/// The request of `FS_IOC_FIEMAP`.
const FIEMAP: libc::Ioctl = 0xC020_660B;
/// `FIEMAP_FLAG_SYNC`.
const FLAG_SYNC: u32 = 1;
/// `FIEMAP_EXTENT_LAST`.
const EXTENT_LAST: u32 = 1;
/// `FIEMAP_EXTENT_UNWRITTEN`.
const EXTENT_UNWRITTEN: u32 = 0x800;
/// `FIEMAP_EXTENT_`: `UNKNOWN`, `DELALLOC`, `ENCODED`, `DATA_ENCRYPTED`, `NOT_ALIGNED`, `DATA_INLINE` and
/// `DATA_TAIL`. Where such data is says nothing about it.
const EXTENT_OPAQUE: u32 = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400;
/// Extents that are asked for at once.
const EXTENTS_MAX: usize = 256;

/// The snapshot that a file began as, and what is still as there.
pub struct Origin {
    pub name: String,
    /// Runs of bytes: offsets and lengths.
    pub inherited: Vec<(u64, u64)>,
}

/// Note that a file shares all its data with a snapshot.
pub fn mark(clone: &File, snapshot: &File, path: &Path) {
    if let Some(uuid) = attribute(snapshot, UUID_ATTRIBUTE) {
        set_attribute(
            clone,
            ORIGIN_ATTRIBUTE,
            &[&uuid, &b" "[..], path_bytes(path)].concat(),
        );
    }
}

/// What a file that nobody writes to began as, and what it still shares with that. Blocks.
pub fn origin_of(clone: &File) -> Option<Origin> {
    let origin = attribute(clone, ORIGIN_ATTRIBUTE)?;
    let space = origin.iter().position(|&byte| byte == b' ')?;
    let (uuid, path) = (&origin[..space], path_from(&origin[space + 1..]));
    let snapshot = open_to_look(&path).ok()??;
    if attribute(&snapshot, UUID_ATTRIBUTE)? != uuid {
        return None;
    }
    let [theirs, ours] = [snapshot.metadata().ok()?, clone.metadata().ok()?];
    if theirs.dev() != ours.dev() {
        return None;
    }
    let bytes = theirs.len().min(ours.len());
    let compared = places(&snapshot, bytes).and_then(|theirs| {
        let ours = places(clone, bytes)?;
        Ok(same(&theirs, &ours))
    });
    let inherited = match compared {
        Ok(inherited) => inherited,
        Err(errno) => {
            tracing::debug!(snapshot = %path.display(), error = %errno, "what a clone shares is not known");
            return None;
        }
    };
    // Whatever was done to the snapshot's file since shows in the time of its last change, and then it
    // is another origin.
    let changed = i128::from(theirs.ctime()) * 1_000_000_000 + i128::from(theirs.ctime_nsec());
    let uuid = String::from_utf8_lossy(uuid);
    Some(Origin {
        name: format!("file:{uuid}/{}/{changed}", theirs.ino()),
        inherited,
    })
}

/// A snapshot's identity, if it has one.
pub fn identity_of(snapshot: &File) -> Option<String> {
    let uuid = attribute(snapshot, UUID_ATTRIBUTE)?;
    Some(format!(
        "the snapshot {} of a file",
        String::from_utf8_lossy(&uuid)
    ))
}

fn attribute(file: &File, name: &CStr) -> Option<Vec<u8>> {
    let mut value = vec![0u8; ATTRIBUTE_BYTES_MAX];
    let to = value.as_mut_ptr().cast();
    // SAFETY: the name is valid during the call, and the buffer's length is told.
    let bytes = unsafe { libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), to, value.len()) };
    value.truncate(usize::try_from(bytes).ok()?);
    Some(value)
}

/// Where a run of a file's bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nowhere: it reads as zeroes.
    Zero,
    /// On the device, less the offset in the file: the same all along a run.
    At(u64),
    /// Nobody knows.
    Opaque,
}

/// A run of bytes that ends here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    end: u64,
    place: Place,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved_64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; EXTENTS_MAX],
}

const _: () = assert!(size_of::<Extent>() == 56);
const _: () = assert!(size_of::<Request>() == 32 + 56 * EXTENTS_MAX);

/// Where the first `bytes` bytes of a file are.
fn places(file: &File, bytes: u64) -> Result<Vec<Run>, Errno> {
    let (mut runs, mut at) = (Vec::new(), 0);
    while at < bytes {
        let mut request = Request {
            start: at,
            length: bytes - at,
            flags: FLAG_SYNC,
            mapped: 0,
            count: EXTENTS_MAX as u32,
            reserved: 0,
            extents: [Extent::default(); EXTENTS_MAX],
        };
        // SAFETY: the request is as large as its count says, and valid during the call.
        if unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &raw mut request) } != 0 {
            return Err(Errno::last());
        }
        let extents = &request.extents[..(request.mapped as usize).min(EXTENTS_MAX)];
        for extent in extents {
            note(&mut runs, &mut at, extent, bytes);
        }
        let is_end = extents
            .last()
            .is_none_or(|last| last.flags & EXTENT_LAST != 0);
        if is_end {
            break;
        }
    }
    if at < bytes {
        let place = Place::Zero;
        runs.push(Run { end: bytes, place });
    }
    Ok(runs)
}

fn note(runs: &mut Vec<Run>, at: &mut u64, extent: &Extent, bytes: u64) {
    let (start, end) = (
        extent.logical.min(bytes),
        (extent.logical + extent.length).min(bytes),
    );
    if start > *at {
        let place = Place::Zero;
        runs.push(Run { end: start, place });
    }
    if end > (*at).max(start) {
        let place = if extent.flags & EXTENT_OPAQUE != 0 {
            Place::Opaque
        } else if extent.flags & EXTENT_UNWRITTEN != 0 {
            Place::Zero
        } else {
            Place::At(extent.physical.wrapping_sub(extent.logical))
        };
        runs.push(Run { end, place });
        *at = end;
    }
}

/// The runs of bytes that two files certainly have in common.
fn same(left: &[Run], right: &[Run]) -> Vec<(u64, u64)> {
    let (mut runs, mut at): (Vec<(u64, u64)>, u64) = (Vec::new(), 0);
    let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        let end = a.end.min(b.end);
        if a.place == b.place && a.place != Place::Opaque && end > at {
            match runs.last_mut() {
                Some((offset, bytes)) if *offset + *bytes == at => *bytes = end - *offset,
                _ => runs.push((at, end - at)),
            }
        }
        at = end;
        left.next_if(|run| run.end == end);
        right.next_if(|run| run.end == end);
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::Place::{At, Opaque, Zero};
    use super::*;

    fn run(end: u64, place: Place) -> Run {
        Run { end, place }
    }

    #[test]
    fn same_is_what_lies_in_one_place_or_nowhere() {
        let snapshot = [
            run(8, At(100)),
            run(16, Zero),
            run(24, Opaque),
            run(32, At(7)),
        ];
        assert_eq!(same(&snapshot, &snapshot), [(0, 16), (24, 8)]);
        let clone = [
            run(4, At(100)),
            run(6, At(50)),
            run(12, At(100)),
            run(20, Zero),
            run(32, At(7)),
        ];
        assert_eq!(same(&snapshot, &clone), [(0, 4), (6, 2), (12, 4), (24, 8)]);
        assert_eq!(same(&snapshot, &clone[..1]), [(0, 4)]);
        assert_eq!(same(&[], &clone), []);
    }

    #[test]
    fn extents_become_runs_with_the_holes_between_them() {
        let extent = |logical, physical, length, flags| Extent {
            logical,
            physical,
            length,
            flags,
            ..Extent::default()
        };
        let (mut runs, mut at) = (Vec::new(), 0);
        for one in [
            extent(4, 104, 4, 0),
            extent(8, 500, 4, EXTENT_UNWRITTEN),
            extent(16, 0, 4, 0x4),
            extent(20, 20, 100, EXTENT_LAST),
        ] {
            note(&mut runs, &mut at, &one, 32);
        }
        let expected = [
            run(4, Zero),
            run(8, At(100)),
            run(12, Zero),
            run(16, Zero),
            run(20, Opaque),
            run(32, At(0)),
        ];
        assert_eq!(runs, expected);
        assert_eq!(at, 32);
    }
}
