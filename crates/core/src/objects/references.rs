//! What becomes of the reference of a clone: whether its parent still has to keep objects for it.
//!
//! A clone is made in this order: its reference at the parent, a second look at the parent, its own first
//! manifest, created if absent. A creation that dies between leaves a reference to nothing. It looks like
//! one that is merely slow, whose manifest may be on its way for as long as it likes. So before a
//! reference to nothing is removed, a *tombstone* takes the number of that manifest: a manifest that
//! says that the clone was given up. One of the two is created, and the other finds that.
//!
//! Where a volume that is no clone was given up, a new one begins with the manifest after that which says so, and so
//! does the tombstone: the place stays as free as it was, and its numbers go on. Whoever makes another volume there at
//! the same time finds the tombstone, and begins with the next manifest.
//!
//! | at the clone's place | what that means | [`Fate`] |
//! |---|---|---|
//! | nothing | it never came to be, or not yet | `Bury` |
//! | the clone | it needs its parent | `Keep` |
//! | the clone, given up | nobody opens it again (`snapshots.rs`) | `Remove` |
//! | another clone | its manifests stay for ever, the first one too, so this one never comes to be | `Remove` |
//! | a volume that is no clone, given up | as nothing: a clone may begin after it | `Bury` |
//! | a volume that is no clone | if it is deleted with all its objects, the number is free again | `Keep` |

use alloc::string::String;
use alloc::vec;

use super::format::{Ancestor, Manifest, Reference};
use super::io::{Kind, Name};
use super::snapshots::clone_number;
use crate::base::limits::{OBJECT_PAGE_BLOCKS_MAX, SECTOR_BYTES};

/// The sequence of the first manifest of a volume.
const FIRST: u64 = 1;

/// What is to be done about a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nothing: its clone may need what it pins.
    Keep,
    /// Remove it.
    Remove,
    /// Create the [`tombstone`] at the clone's place, if there is no object of that name. Then, and only
    /// then, remove the reference; otherwise look again.
    Bury,
}

/// The name of the reference of a clone, below its parent's place.
pub fn name(clone: &[u8; 16]) -> Name {
    Name::own(Kind::Clone, clone_number(clone))
}

/// What is to be done about a reference, when the newest manifest at the place that it names is `there`.
pub fn fate(reference: &Reference, there: Option<&Manifest>) -> Fate {
    match there {
        None => Fate::Bury,
        Some(there) if there.volume == reference.clone => {
            if there.gone {
                Fate::Remove
            } else {
                Fate::Keep
            }
        }
        Some(there) if !there.ancestors.is_empty() => Fate::Remove,
        Some(there) if there.gone => Fate::Bury,
        Some(_) => Fate::Keep,
    }
}

/// The manifest that says at a clone's place that the clone never came to be, where `there` is the newest one, which
/// says that another volume was given up. `parent` and `location` are the UUID and the place of the volume that has the
/// reference.
pub fn tombstone(
    reference: &Reference,
    parent: [u8; 16],
    location: String,
    there: Option<&Manifest>,
) -> Manifest {
    if let Some(there) = there {
        let sequence = there.sequence + 1;
        return Manifest {
            volume: reference.clone,
            begins: true,
            gone: true,
            sequence,
            epoch: there.epoch + 1,
            beginnings: there.next_beginnings(),
            number_first: there.number_limit,
            number_limit: there.number_limit,
            bytes: SECTOR_BYTES as u64,
            page_blocks: OBJECT_PAGE_BLOCKS_MAX,
            ..Manifest::default()
        };
    }
    Manifest {
        volume: reference.clone,
        begins: true,
        gone: true,
        sequence: FIRST,
        epoch: 1,
        beginnings: vec![FIRST],
        number_first: reference.pin,
        number_limit: reference.pin,
        bytes: SECTOR_BYTES as u64,
        // As one of a clone it is never removed with what else is there.
        ancestors: vec![Ancestor {
            volume: parent,
            below: reference.pin,
            location,
        }],
        page_blocks: OBJECT_PAGE_BLOCKS_MAX,
        ..Manifest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_is_removed_only_when_its_clone_can_never_be() {
        let reference = Reference {
            clone: [1; 16],
            pin: 7,
            location: "bucket/clone".into(),
        };
        let grave = tombstone(&reference, [2; 16], "bucket/parent".into(), None);
        let mut bytes = vec![0; grave.encoded_bytes()];
        grave.write(&mut bytes);
        assert_eq!(Manifest::parse(&bytes).unwrap(), grave);
        assert_eq!(fate(&reference, None), Fate::Bury);
        assert_eq!(fate(&reference, Some(&grave)), Fate::Remove);
        let alive = Manifest {
            gone: false,
            ..grave.clone()
        };
        assert_eq!(fate(&reference, Some(&alive)), Fate::Keep);
        let other_clone = Manifest {
            volume: [3; 16],
            ..alive
        };
        assert_eq!(fate(&reference, Some(&other_clone)), Fate::Remove);
        let ordinary = Manifest {
            ancestors: vec![],
            ..other_clone
        };
        assert_eq!(fate(&reference, Some(&ordinary)), Fate::Keep);
        let gone = Manifest {
            gone: true,
            sequence: 7,
            epoch: 3,
            beginnings: vec![1, 4],
            number_limit: 900,
            ..ordinary
        };
        assert_eq!(fate(&reference, Some(&gone)), Fate::Bury);
        let grave = tombstone(&reference, [2; 16], "bucket/parent".into(), Some(&gone));
        let mut bytes = vec![0; grave.encoded_bytes()];
        grave.write(&mut bytes);
        assert_eq!(Manifest::parse(&bytes).unwrap(), grave);
        assert_eq!((grave.sequence, grave.epoch), (8, 4));
        assert_eq!(grave.beginnings, [1, 4, 8]);
        assert_eq!(grave.number_limit, 900);
        assert_eq!(fate(&reference, Some(&grave)), Fate::Remove);
    }
}
