//! Snapshots of an image, which are Ceph's own, and clones: images whose parent is a snapshot.
//!
//! The image that is open makes and deletes snapshots ([`perform`]); who looks or clones opens it for
//! reading, beside whoever has its lock.

use hdcs_core::objects::io::SnapshotError;
use hdcs_device::Errno;

use super::ceph::{self, Image, Snap};
use super::{ImagePlace, Look, Prepared, bounded};
use crate::copying::Copying;
use crate::url::{Given, OptionList};
use crate::{
    BackendError, CloneOrigin, Found, SnapshotCommand, SnapshotStore, StoredClone, StoredSnapshot,
    StoredSnapshots,
};

/// Do what is asked about keeping states. Blocks.
pub fn perform(image: &Image, keep: SnapshotCommand) -> Result<(), Errno> {
    match keep {
        SnapshotCommand::Snapshot { name, .. } => image.make_snap(name.as_str()),
        SnapshotCommand::Forget { name } => image.delete_snap(name.as_str()),
        // It has nothing to copy, and is never given up.
        SnapshotCommand::Complete => Ok(()),
        SnapshotCommand::GiveUp => Err(Errno(libc::EOPNOTSUPP)),
    }
}

/// What the cluster has against that, if it was refused and has not failed.
pub fn refusal(errno: Errno) -> Option<SnapshotError> {
    match errno.0 {
        libc::EEXIST => Some(SnapshotError::Exists),
        libc::ENOENT => Some(SnapshotError::NotFound),
        // `rbd snap limit set`.
        libc::EDQUOT => Some(SnapshotError::TooMany),
        // Protected or cloned since that was looked at.
        libc::EBUSY => Some(SnapshotError::HasClones),
        _ => None,
    }
}

impl ImagePlace {
    /// The place of an URL of this kind; filters are left out.
    fn of(url: &str) -> Result<Self, BackendError> {
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let given = Given { url, place };
        if scheme != super::SCHEME.name {
            return Err(given.refuse("it must be an image, rbd:POOL/IMAGE").into());
        }
        Ok(super::parse_place(&given, &mut OptionList::parse(query)?)?)
    }

    fn kept_now(&self, ceph: &'static ceph::Ceph) -> Result<Option<StoredSnapshots>, BackendError> {
        let fail = |errno| self.fail("listing its snapshots", errno);
        let pool = self.connect(ceph, true)?;
        let Some(image) = self.image(&pool, true)? else {
            return Ok(None);
        };
        let kept = self.kept_of(&image);
        image.close();
        kept.map(Some).map_err(fail)
    }

    fn kept_of(&self, image: &Image) -> Result<StoredSnapshots, Errno> {
        let fsid = image.pool().cluster.fsid()?;
        let (identity, _) = Prepared::about(image, None)?;
        let mut kept = StoredSnapshots {
            identity,
            ..StoredSnapshots::default()
        };
        for Snap { id, name, is_gone } in image.snaps()? {
            let children = image.children(id)?;
            let mut clones = children.into_iter().map(|child| StoredClone {
                identity: format!("rbd:{fsid}/{}/{}", child.pool, child.id),
                location: if child.is_trashed {
                    format!("rbd:{} (in the trash)", child.spec)
                } else {
                    format!("rbd:{}", child.spec)
                },
            });
            if is_gone {
                kept.clones.extend(clones);
                continue;
            }
            let hindrance = image.snap_is_protected(&name)?.then(|| {
                let spec = self.image_spec();
                format!("it is protected: run `rbd snap unprotect {spec}@{name}`")
            });
            kept.snapshots.push(StoredSnapshot {
                made_ms: image.snap_made_ms(id)?,
                clones: clones.by_ref().collect(),
                hindrance,
                name,
            });
        }
        Ok(kept)
    }

    fn clone_now(
        &self,
        ceph: &'static ceph::Ceph,
        parent: &Self,
        snapshot: &str,
    ) -> Result<Found, BackendError> {
        let pool = match self.look(ceph)? {
            Look::Nothing(pool) => pool,
            Look::Image { .. } => return Err(self.is_there()),
        };
        let fsid = |place: &Self, pool: &ceph::Pool| {
            let fsid = pool.cluster.fsid();
            fsid.map_err(|errno| place.fail("asking for the cluster's identity", errno))
        };
        let cluster = fsid(parent, &*parent.connect(ceph, true)?)?;
        if fsid(self, &pool)? != cluster {
            return Err(BackendError::Refused(format!(
                "{}: the parent is in the cluster {cluster}, and a clone shares its objects: name a place \
                 in the same cluster",
                self.spec()
            )));
        }
        // Over one connection, and so as the client that will read the clone.
        let theirs = parent.pool_in(&pool.cluster)?;
        let made = pool.clone_image(&self.image, &theirs, &parent.image, snapshot);
        made.map_err(|errno| match errno.0 {
            libc::EEXIST => self.is_there(),
            libc::ENOENT => {
                BackendError::Refused(format!("{}@{snapshot} does not exist", parent.spec()))
            }
            _ => self.fail("cloning into it", errno),
        })?;
        match self.look(ceph)? {
            Look::Image { bytes } => Ok(Found {
                bytes,
                partly: false,
            }),
            Look::Nothing(_) => Err(BackendError::Absent(self.spec())),
        }
    }

    fn is_there(&self) -> BackendError {
        BackendError::Refused(format!(
            "{}: there is an image already: name a place where nothing is",
            self.spec()
        ))
    }
}

impl SnapshotStore for ImagePlace {
    fn kept(&self) -> Result<Option<StoredSnapshots>, BackendError> {
        let (ceph, this) = (ceph::load()?, self.clone());
        bounded(&self.spec(), move || this.kept_now(ceph))
    }

    fn clone_from(
        &self,
        origin: &CloneOrigin<'_>,
        _copying: &Copying,
    ) -> Result<Found, BackendError> {
        let (ceph, this) = (ceph::load()?, self.clone());
        let (parent, snapshot) = (Self::of(origin.url)?, origin.snapshot);
        bounded(&self.spec(), move || {
            this.clone_now(ceph, &parent, snapshot.as_str())
        })
    }

    fn snapshot_url(&self, url: &str, snapshot: &str) -> Option<String> {
        let (place, options) = url.split_once('?').unwrap_or((url, ""));
        // A snapshot has no owner from whom it could be taken.
        let options = options.split('&').filter(|one| !one.starts_with("steal="));
        let options: Vec<_> = options.filter(|one| !one.is_empty()).collect();
        let question = if options.is_empty() { "" } else { "?" };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let snapshot = snapshot.bytes().map(|byte| match byte {
            byte if plain(byte) => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        });
        let snapshot: String = snapshot.collect();
        Some(format!("{place}@{snapshot}{question}{}", options.join("&")))
    }
}

#[cfg(test)]
mod tests {
    use crate::url::BackendUrl;

    #[test]
    fn snapshot_url_names_the_snapshot_of_the_same_image() {
        let of = |url: &str, snapshot: &str| {
            let place = BackendUrl::parse(url).unwrap().place;
            let found = place.snapshot_store().unwrap().snapshot_url(url, snapshot);
            let found = found.unwrap();
            assert!(BackendUrl::parse(&found).unwrap().place.is_read_only());
            found
        };
        assert_eq!(of("rbd:p/i", "s.1_-"), "rbd:p/i@s.1_-");
        let url = "rbd:p/n/i?conf=/c&steal=on&delay_us=5";
        assert_eq!(of(url, "a bü"), "rbd:p/n/i@a%20b%C3%BC?conf=/c&delay_us=5");
        assert_eq!(of("rbd:p/i?steal=on", "s"), "rbd:p/i@s");
    }
}
