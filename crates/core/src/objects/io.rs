//! The vocabulary between an [`super::ObjectVolume`] and its driver.
//!
//! Upward it is asked for blocks, as any backend ([`Ask`], [`Action::End`]); downward it asks for
//! whole immutable objects ([`Action::Put`] and its neighbours). The driver performs every action
//! that carries a token and returns one [`Event::Stored`] for each, in any order. It may try again
//! on its own, within a bound; whatever it then reports as failed may still have happened, or may
//! happen later: the machine is made for that.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use super::frames::{Frames, Part};
use crate::base::buf::{Buf, BufMut};
use crate::base::codec::Method;
use crate::base::error::{FormatError, IoError};
use crate::base::io::{Completion, SectorRange, Token};
use crate::base::limits::OBJECT_SNAPSHOT_NAME_BYTES_MAX;

/// Digits of the numbers in names: any `u64`, so that names sort as numbers do.
const DIGITS: usize = 20;

/// What an object is; the first part of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The root of the volume at one moment; creating the next one is the commit.
    Manifest,
    /// A batch of written blocks.
    Data,
    /// Pages of the map.
    Map,
    /// A kept copy of a manifest.
    Snapshot,
    /// Says that a clone elsewhere needs objects of this volume.
    Clone,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 5] = [
        Self::Manifest,
        Self::Data,
        Self::Map,
        Self::Snapshot,
        Self::Clone,
    ];

    /// What the names of its objects begin with.
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Manifest => "manifest/",
            Self::Data => "data/",
            Self::Map => "map/",
            Self::Snapshot => "snapshot/",
            Self::Clone => "clone/",
        }
    }
}

/// What the name of the object begins with in which a driver keeps the volume's wrapped key. No volume
/// makes such a name, and a place that holds nothing else is empty.
pub const KEY_PREFIX: &str = "key/";

/// The name of an object: short ASCII, below the place of its volume.
///
/// `Display` writes it without the volume: `data/00000000000000000042`. The driver puts the place of
/// the volume before it; for an ancestor that is [`super::ObjectVolume::ancestor_location`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// 0: this volume. Other: the ancestor with that number less one.
    pub volume: u16,
    /// What it is.
    pub kind: Kind,
    /// Its number among its kind; never used for another content.
    pub number: u64,
}

impl Name {
    /// An object of this volume.
    pub const fn own(kind: Kind, number: u64) -> Self {
        Self {
            volume: 0,
            kind,
            number,
        }
    }

    /// The name that `text` is, of an object of this volume; `None` if no volume makes such a name.
    pub fn parse(text: &str) -> Option<Self> {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| text.starts_with(kind.prefix()))?;
        let digits = &text[kind.prefix().len()..];
        if digits.len() != DIGITS || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        Some(Self::own(kind, digits.parse().ok()?))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:020}", self.kind.prefix(), self.number)
    }
}

/// A snapshot's name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotName {
    bytes: [u8; OBJECT_SNAPSHOT_NAME_BYTES_MAX],
}

impl SnapshotName {
    /// The name that `text` is, or `None` if it cannot be one.
    pub fn new(text: &str) -> Option<Self> {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if text.is_empty() || text.len() > OBJECT_SNAPSHOT_NAME_BYTES_MAX || !text.bytes().all(good)
        {
            return None;
        }
        let mut bytes = [0; OBJECT_SNAPSHOT_NAME_BYTES_MAX];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Some(Self { bytes })
    }

    /// As it is on the medium: filled up with zeroes.
    pub const fn padded(&self) -> [u8; OBJECT_SNAPSHOT_NAME_BYTES_MAX] {
        self.bytes
    }

    /// From the medium; `None` if it cannot be a name.
    pub fn from_padded(bytes: &[u8; OBJECT_SNAPSHOT_NAME_BYTES_MAX]) -> Option<Self> {
        let length = bytes.iter().position(|&byte| byte == 0);
        let (text, rest) = bytes.split_at(length.unwrap_or(bytes.len()));
        if rest.iter().any(|&byte| byte != 0) {
            return None;
        }
        Self::new(core::str::from_utf8(text).ok()?)
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        let length = self.bytes.iter().position(|&byte| byte == 0);
        core::str::from_utf8(&self.bytes[..length.unwrap_or(self.bytes.len())]).unwrap_or("")
    }
}

impl fmt::Debug for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// What is asked of the volume. Offsets and lengths are bytes, multiples of 512, within its size.
#[derive(Debug)]
pub enum Ask {
    /// Fill the buffer; ends with [`crate::base::io::Done::Read`].
    Read {
        /// From where.
        offset: u64,
        /// Returned filled.
        buf: BufMut,
    },
    /// Write buffers one after another. They are copied: none is held after the end.
    Write {
        /// To where.
        offset: u64,
        /// What.
        data: Vec<Buf>,
    },
    /// Make a range read as zeroes; its space is given back.
    Zero {
        /// From where.
        offset: u64,
        /// How much.
        bytes: u64,
    },
    /// Make completed writes durable.
    Flush,
    /// Describe the allocation; ends with [`crate::base::io::Done::Extents`].
    Extents {
        /// Of what.
        range: SectorRange,
    },
    /// Change the size, durably; what is added reads as zeroes.
    Resize {
        /// The new size.
        bytes: u64,
    },
    /// Keep the state that was committed last, which is that of a flush, under a name. Ends with
    /// [`Action::SnapshotEnd`].
    Snapshot {
        /// The name; free.
        name: SnapshotName,
        /// The time: milliseconds since 1970.
        made_ms: u64,
    },
    /// Forget a snapshot. Ends with [`Action::SnapshotEnd`].
    DeleteSnapshot {
        /// Which.
        name: SnapshotName,
    },
    /// The volume is not needed any more: if it is a clone, its parent may free what it has for it.
    /// From then on it cannot be opened, and writes and flushes fail. If it fails, it may have happened all the same.
    /// Ends with [`Action::SnapshotEnd`].
    GiveUp,
}

impl Ask {
    /// Whether it changes what the volume holds, or makes such changes durable.
    pub(super) fn is_change(&self) -> bool {
        match self {
            Self::Write { .. } | Self::Zero { .. } | Self::Flush | Self::Resize { .. } => true,
            Self::Read { .. }
            | Self::Extents { .. }
            | Self::Snapshot { .. }
            | Self::DeleteSnapshot { .. }
            | Self::GiveUp => false,
        }
    }
}

/// Whether a put may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It may; it is only ever repeated with the same bytes.
    Always,
    /// It must create the object, atomically, or fail with [`StoreError::Exists`].
    IfAbsent,
}

/// An effect for the driver to perform.
#[derive(Debug)]
pub enum Action {
    /// Store an object whole: afterwards it is there with all of its bytes and durable, or not
    /// there at all. Ends with [`Stored::Done`].
    Put {
        /// Echoed.
        token: Token,
        /// Which object.
        name: Name,
        /// Its bytes, one buffer after another.
        data: Vec<Buf>,
        /// How many of them are slots. They hold what the client wrote, and nothing else does: a
        /// driver may keep them encrypted, each slot for itself, as long as a get brings them plain.
        slot_bytes: usize,
        /// Whether it may be there already.
        condition: Condition,
    },
    /// Make a compressed object of slots and put it, as [`Self::Put`] that may replace does. The same is
    /// made of the same. Ends with [`Stored::Packed`].
    PutCompressed {
        /// Echoed.
        token: Token,
        /// Which object.
        name: Name,
        /// The slots, and after them runs and footer.
        data: Vec<Buf>,
        /// How many bytes of that are slots.
        slot_bytes: usize,
        /// How they are compressed: with [`super::frames::pack`].
        method: Method,
    },
    /// Fill `buf` with slots of a compressed object, with [`Part::unpack`]. Ends with [`Stored::Read`].
    GetCompressed {
        /// Echoed.
        token: Token,
        /// Which object.
        name: Name,
        /// What to get of it.
        part: Part,
        /// Returned filled.
        buf: BufMut,
    },
    /// Fill `buf` with exactly the bytes from `offset`. Ends with [`Stored::Read`].
    Get {
        /// Echoed.
        token: Token,
        /// Which object.
        name: Name,
        /// From where in it.
        offset: u64,
        /// Whether these are whole slots; otherwise there is none among them.
        slots: bool,
        /// Returned filled.
        buf: BufMut,
    },
    /// Remove an object; that it is not there is success. Ends with
    /// [`Stored::Done`].
    Delete {
        /// Echoed.
        token: Token,
        /// Which object.
        name: Name,
    },
    /// Name objects in ascending order of their names. Ends with [`Stored::Listed`].
    List {
        /// Echoed.
        token: Token,
        /// Of which volume, as in [`Name::volume`].
        volume: u16,
        /// What their names begin with; may be empty.
        prefix: &'static str,
        /// Only names greater than this one, if it is not empty.
        after: String,
    },
    /// A request has ended. Carries the token of [`Event::Submit`]; nothing comes back.
    End(Completion),
    /// A snapshot was made or forgotten, or the volume given up, or not. Nothing comes back.
    SnapshotEnd {
        /// Of which request.
        token: Token,
        /// How it ended.
        result: Result<(), SnapshotError>,
    },
}

/// One object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name below the place of the volume.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// What an action brought.
#[derive(Debug)]
pub enum Stored {
    /// A put or delete.
    Done,
    /// A put of a compressed object: how it was compressed.
    Packed(Frames),
    /// A get: the buffer of the action, filled.
    Read(BufMut),
    /// A listing.
    Listed {
        /// In order; at least one if `more`.
        objects: Vec<Listed>,
        /// Whether there are more after the last.
        more: bool,
    },
}

/// How an action on the store failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// It may have happened, may yet happen, or not.
    #[error(transparent)]
    Io(#[from] IoError),
    /// A get: there is no such object.
    #[error("no such object")]
    NotFound,
    /// A get: the object ends before the range does.
    #[error("the object is shorter than it was written")]
    Short,
    /// A put if absent: there is such an object; perhaps this very put made it, before.
    #[error("the object exists")]
    Exists,
}

impl StoreError {
    /// What a request that needed it ends with.
    pub fn as_io(self) -> IoError {
        match self {
            Self::Io(error) => error,
            _ => IoError::Failed,
        }
    }
}

/// What the machine is told.
#[derive(Debug)]
pub enum Event {
    /// A request. Its token is the caller's own; it is echoed in [`Action::End`].
    Submit {
        /// Echoed.
        token: Token,
        /// What.
        ask: Ask,
    },
    /// An action on the store has ended.
    Stored {
        /// Of which action.
        token: Token,
        /// How it ended.
        result: Result<Stored, StoreError>,
    },
}

/// Where the volume is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is being opened; requests wait.
    Opening,
    /// It serves.
    Open,
    /// It could not be opened; requests fail.
    Failed(OpenError),
    /// Another owner has taken over; requests end with [`IoError::Fenced`], for ever.
    Fenced,
}

/// Why a volume could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The store failed.
    #[error("object store: {0}")]
    Io(#[from] IoError),
    /// There is no volume, and none was to be made.
    #[error("there is no volume at this place")]
    Absent,
    /// There is no snapshot of that name.
    #[error("there is no snapshot of that name")]
    NoSnapshot,
    /// There are objects that no volume made, and no manifest.
    #[error("the place holds objects that belong to no HDCS volume; name an empty one")]
    Foreign,
    /// An object was lost or changed.
    #[error("object {name} is damaged: {reason}")]
    Damaged {
        /// Which.
        name: Name,
        /// How.
        reason: FormatError,
    },
    /// An object that the manifest names is not there.
    #[error("object {name} is missing")]
    Missing {
        /// Which.
        name: Name,
    },
    /// Written by a newer program.
    #[error("format version {found} is newer than the supported version {supported}; upgrade HDCS")]
    Newer {
        /// In the manifest.
        found: u16,
        /// The newest that this program reads.
        supported: u16,
    },
    /// It was given up; what it needs of its parent may be gone.
    #[error("the volume at this place was deleted; name another place")]
    Gone,
    /// Another volume than the one that was expected.
    #[error("the place holds another volume (its UUID differs)")]
    OtherVolume,
    /// The volume has another size than was asked for.
    #[error("the volume there has {has} bytes, not {needs}")]
    OtherSize {
        /// Its size.
        has: u64,
        /// What was asked for.
        needs: u64,
    },
    /// A new volume was to be made without a size, or with one that it cannot have.
    #[error("a volume over objects cannot have {bytes} bytes")]
    Size {
        /// What was asked for.
        bytes: u64,
    },
    /// A clone of a clone of … too often.
    #[error("the snapshot is of a clone of too many generations; copy it instead")]
    TooManyGenerations,
    /// Others took it over again and again while this opened it.
    #[error("another owner keeps taking the volume over")]
    Contended,
}

/// Why a snapshot was not made or forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SnapshotError {
    /// There is one of that name.
    #[error("there is a snapshot of that name")]
    Exists,
    /// There is none of that name.
    #[error("there is no snapshot of that name")]
    NotFound,
    /// There are as many as a volume can have.
    #[error("the volume has as many snapshots as it can have")]
    TooMany,
    /// It has snapshots, so it is not given up.
    #[error("the volume has snapshots")]
    HasSnapshots,
    /// It has clones, so it is not given up.
    #[error("the volume has clones")]
    HasClones,
    /// A snapshot is read-only, and so is what was given up.
    #[error("it is read-only")]
    ReadOnly,
    /// The store failed.
    #[error(transparent)]
    Io(#[from] IoError),
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn name_is_parsed_as_it_is_written() {
        for kind in Kind::ALL {
            for number in [0, 42, u64::MAX] {
                let name = Name::own(kind, number);
                assert_eq!(Name::parse(&name.to_string()), Some(name));
            }
        }
        let big = "data/99999999999999999999";
        for bad in [
            "",
            "data/",
            "data/42",
            "manifest",
            "data/+0000000000000000042",
            big,
        ] {
            assert_eq!(Name::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn name_order_is_the_order_of_numbers() {
        let name = |number| Name::own(Kind::Data, number).to_string();
        assert!(name(9) < name(10) && name(u64::MAX - 1) < name(u64::MAX));
    }

    #[test]
    fn snapshot_name_takes_what_is_safe_anywhere() {
        for good in ["a", "nightly-2026.11_21", &"x".repeat(64)] {
            let name = SnapshotName::new(good).unwrap();
            assert_eq!(name.as_str(), good);
            assert_eq!(SnapshotName::from_padded(&name.padded()), Some(name));
        }
        for bad in ["", "a/b", "ä", "a b", &"x".repeat(65)] {
            assert_eq!(SnapshotName::new(bad), None);
        }
        let mut hole = SnapshotName::new("ab").unwrap().padded();
        hole[3] = b'c';
        assert_eq!(SnapshotName::from_padded(&hole), None);
    }
}
