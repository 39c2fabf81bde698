//! Snapshots of images and clones of snapshots, behind safe calls. All of it blocks.

use std::ffi::{CStr, c_char, c_int};
use std::ptr::null_mut;

use super::{Errno, FEATURE_EXCLUSIVE_LOCK, Image, Pool, c_text, check, librbd};

/// The format in which a clone needs no protected snapshot; from Ceph 13 on.
const CLONE_FORMAT: u64 = 2;

/// A snapshot of an image.
pub struct Snap {
    /// Its number, which is never used again.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Whether it is one of those that were deleted while they had clones, and go with the last of these.
    pub is_gone: bool,
}

/// An image that is a clone.
pub struct Child {
    /// Number of its pool.
    pub pool: i64,
    /// Its identity in its pool.
    pub id: String,
    /// Pool, namespace and name, as the `rbd` program writes it.
    pub spec: String,
    /// Whether it is in the trash.
    pub is_trashed: bool,
}

/// # Safety
/// `text` is null or a text that lives during the call.
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller keeps it.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

impl Image {
    /// Its snapshots, in the order in which they were made; those of Ceph's own left out.
    pub fn snaps(&self) -> Result<Vec<Snap>, Errno> {
        let open = self.open();
        let mut count: c_int = 16;
        loop {
            let empty = librbd::rbd_snap_info_t {
                id: 0,
                size: 0,
                name: std::ptr::null(),
            };
            let mut list = vec![empty; count as usize];
            // SAFETY: the array's length is told; what is in it is freed by the library below.
            let listed = check(unsafe {
                let to = list.as_mut_ptr();
                open.rbd().rbd_snap_list(open.handle, to, &raw mut count)
            });
            let listed = match listed {
                Ok(listed) => listed as usize,
                // `count` says how many there are.
                Err(Errno(libc::ERANGE)) => {
                    count = count.max(list.len() as c_int + 1);
                    continue;
                }
                Err(errno) => return Err(errno),
            };
            let snaps = list[..listed].iter().map(|snap| {
                let mut kind = librbd::rbd_snap_namespace_type_t_RBD_SNAP_NAMESPACE_TYPE_USER;
                // SAFETY: an image that is held, and a place for the type.
                check(unsafe {
                    let to = &raw mut kind;
                    open.rbd()
                        .rbd_snap_get_namespace_type(open.handle, snap.id, to)
                })?;
                // SAFETY: the list is freed only below.
                Ok((kind, snap.id, unsafe { owned(snap.name) }))
            });
            let snaps: Result<Vec<_>, Errno> = snaps.collect();
            // SAFETY: a list that the library has filled, with an entry without a name at its end.
            unsafe { open.rbd().rbd_snap_list_end(list.as_mut_ptr()) };
            let user = librbd::rbd_snap_namespace_type_t_RBD_SNAP_NAMESPACE_TYPE_USER;
            let trash = librbd::rbd_snap_namespace_type_t_RBD_SNAP_NAMESPACE_TYPE_TRASH;
            let mut snaps: Vec<Snap> = snaps?
                .into_iter()
                .filter(|(kind, ..)| *kind == user || *kind == trash)
                .map(|(kind, id, name)| Snap {
                    id,
                    name,
                    is_gone: kind == trash,
                })
                .collect();
            snaps.sort_unstable_by_key(|snap| snap.id);
            return Ok(snaps);
        }
    }

    /// When a snapshot was made: milliseconds since 1970.
    pub fn snap_made_ms(&self, id: u64) -> Result<u64, Errno> {
        let open = self.open();
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut time: librbd::timespec = unsafe { std::mem::zeroed() };
        // SAFETY: an image that is held, and a place for the time.
        check(unsafe {
            open.rbd()
                .rbd_snap_get_timestamp(open.handle, id, &raw mut time)
        })?;
        Ok(time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000)
    }

    /// Whether a snapshot is protected from being deleted.
    pub fn snap_is_protected(&self, name: &str) -> Result<bool, Errno> {
        let (open, name, mut is_protected) = (self.open(), c_text(name), 0);
        // SAFETY: the name is valid during the call, and a place for the answer.
        check(unsafe {
            let to = &raw mut is_protected;
            open.rbd()
                .rbd_snap_is_protected(open.handle, name.as_ptr(), to)
        })?;
        Ok(is_protected != 0)
    }

    /// The clones of a snapshot. The image shows the snapshot from then on.
    pub fn children(&self, snap: u64) -> Result<Vec<Child>, Errno> {
        let open = self.open();
        // SAFETY: an image that is held.
        check(unsafe { open.rbd().rbd_snap_set_by_id(open.handle, snap) })?;
        let mut count = 16;
        loop {
            let empty = librbd::rbd_linked_image_spec_t {
                pool_id: 0,
                pool_name: null_mut(),
                pool_namespace: null_mut(),
                image_id: null_mut(),
                image_name: null_mut(),
                trash: false,
            };
            let mut list = vec![empty; count];
            // SAFETY: the array's length is told; what is in it is freed by the library below.
            unsafe {
                let to = list.as_mut_ptr();
                let rbd = open.rbd();
                match check(rbd.rbd_list_children3(open.handle, to, &raw mut count)) {
                    Ok(_) => {}
                    // `count` says how many there are.
                    Err(Errno(libc::ERANGE)) => {
                        count = count.max(list.len() + 1);
                        continue;
                    }
                    Err(errno) => return Err(errno),
                }
                let children = list[..count].iter().map(|child| {
                    let parts = [child.pool_name, child.pool_namespace, child.image_name];
                    let parts = parts.map(|part| owned(part));
                    let parts: Vec<_> = parts.into_iter().filter(|p| !p.is_empty()).collect();
                    Child {
                        pool: child.pool_id,
                        id: owned(child.image_id),
                        spec: parts.join("/"),
                        is_trashed: child.trash,
                    }
                });
                let children = children.collect();
                rbd.rbd_linked_image_spec_list_cleanup(list.as_mut_ptr(), count);
                return Ok(children);
            }
        }
    }

    /// Make a snapshot, of everything that was written.
    pub fn make_snap(&self, name: &str) -> Result<(), Errno> {
        let (open, name) = (self.open(), c_text(name));
        // SAFETY: the name is valid during the call.
        check(unsafe { open.rbd().rbd_snap_create(open.handle, name.as_ptr()) }).map(drop)
    }

    /// Delete a snapshot. One that has clones stays, without a name, until the last of them goes.
    pub fn delete_snap(&self, name: &str) -> Result<(), Errno> {
        let (open, name) = (self.open(), c_text(name));
        // SAFETY: the name is valid during the call.
        check(unsafe { open.rbd().rbd_snap_remove(open.handle, name.as_ptr()) }).map(drop)
    }
}

impl Pool {
    /// Make an image here that begins as a snapshot of one in a pool of the same cluster, with the
    /// cluster's default features, and the exclusive lock in any case.
    pub fn clone_image(
        &self,
        name: &str,
        parent_pool: &Self,
        parent: &str,
        snapshot: &str,
    ) -> Result<(), Errno> {
        let (rbd, mut options) = (&self.cluster.ceph.rbd, null_mut());
        let [name, parent, snapshot] = [name, parent, snapshot].map(c_text);
        let set = [
            (
                librbd::RBD_IMAGE_OPTION_FEATURES_SET,
                FEATURE_EXCLUSIVE_LOCK,
            ),
            (librbd::RBD_IMAGE_OPTION_CLONE_FORMAT, CLONE_FORMAT),
        ];
        // SAFETY: the options are made, used and destroyed here; the texts are valid during the calls.
        unsafe {
            rbd.rbd_image_options_create(&raw mut options);
            let mut made = 0;
            for (option, value) in set {
                if made >= 0 {
                    made = rbd.rbd_image_options_set_uint64(options, option as c_int, value);
                }
            }
            if made >= 0 {
                made = rbd.rbd_clone3(
                    parent_pool.handle,
                    parent.as_ptr(),
                    snapshot.as_ptr(),
                    self.handle,
                    name.as_ptr(),
                    options,
                );
            }
            rbd.rbd_image_options_destroy(options);
            check(made).map(drop)
        }
    }
}
