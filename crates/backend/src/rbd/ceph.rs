//! librados and librbd, loaded when they are first needed, behind safe calls.
//!
//! Invariants:
//! 1. The libraries stay loaded: their threads run code of theirs until the process ends.
//! 2. An image is closed before its pool, the pool before its cluster, and all of it on a thread,
//!    since each may wait for the cluster.
//! 3. An image that asynchronous operations are under way on is never closed ([`Image::leak`]).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use hdcs_device::Errno;

use crate::{BackendError, closing};

mod snaps;

pub use snaps::Snap;

/// What bindgen has read from `rados/librados.h`.
mod rados {
    #![allow(missing_docs, unused, clippy::all, clippy::pedantic)]
    #![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]
    #![allow(unsafe_op_in_unsafe_fn, unnameable_types)]
    include!(concat!(env!("OUT_DIR"), "/rados.rs"));
}

/// What bindgen has read from `rbd/librbd.h`.
mod librbd {
    #![allow(missing_docs, unused, clippy::all, clippy::pedantic)]
    #![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]
    #![allow(unsafe_op_in_unsafe_fn, unnameable_types)]
    include!(concat!(env!("OUT_DIR"), "/rbd.rs"));
}

type Completion = librbd::rbd_completion_t;

/// `RBD_FEATURE_EXCLUSIVE_LOCK`, a macro that bindgen cannot evaluate, like the next ones.
pub const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_FEATURE_FAST_DIFF`.
pub const FEATURE_FAST_DIFF: u64 = 1 << 4;
/// `RBD_FLAG_FAST_DIFF_INVALID`.
pub const FLAG_FAST_DIFF_INVALID: u64 = 1 << 1;

/// Finished operations that are taken at once.
const EVENTS_MAX: usize = 64;
/// Longest text that the library gives back.
const TEXT_BYTES_MAX: usize = 4096;

/// The two libraries.
pub struct Ceph {
    rados: rados::Rados,
    rbd: librbd::Rbd,
}

/// Load the libraries, once. What fails is tried again at the next call, so that installing them
/// does not take a restart.
pub fn load() -> Result<&'static Ceph, BackendError> {
    static LOADED: Mutex<Option<&'static Ceph>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ceph) = *loaded {
        return Ok(ceph);
    }
    let missing = |error: libloading::Error| {
        BackendError::Refused(format!(
            "librbd cannot be loaded ({error}); install it: apt-get install librbd1, version 16 or later"
        ))
    };
    // SAFETY: these are the libraries whose headers the declarations come from; what they run when
    // they are loaded is the construction of their own static objects.
    let ceph = unsafe {
        Ceph {
            rados: rados::Rados::new("librados.so.2").map_err(missing)?,
            rbd: librbd::Rbd::new("librbd.so.1").map_err(missing)?,
        }
    };
    Ok(*loaded.insert(Box::leak(Box::new(ceph))))
}

/// An error code of the libraries: negative ones are errors.
fn check(code: c_int) -> Result<c_int, Errno> {
    if code < 0 {
        Err(Errno(-code))
    } else {
        Ok(code)
    }
}

/// A text that the library wrote into a buffer.
fn text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0);
    String::from_utf8_lossy(&buffer[..end.unwrap_or(buffer.len())]).into_owned()
}

/// Text for the library. What comes from users was checked, so a zero byte cuts only what is ours.
fn c_text(text: &str) -> CString {
    CString::new(text.split('\0').next().unwrap_or("")).unwrap_or_default()
}

/// A connection to a cluster. Dropping it blocks.
pub struct Cluster {
    ceph: &'static Ceph,
    handle: rados::rados_t,
}

// SAFETY: librados may be called from any thread.
unsafe impl Send for Cluster {}
// SAFETY: as above, from several at once.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// A handle for the user `id`, not yet connected.
    pub fn new(ceph: &'static Ceph, id: &str) -> Result<Self, Errno> {
        let mut handle = null_mut();
        let id = c_text(id);
        // SAFETY: both pointers are valid during the call.
        check(unsafe { ceph.rados.rados_create(&raw mut handle, id.as_ptr()) })?;
        Ok(Self { ceph, handle })
    }

    /// Read a configuration file, or those that Ceph looks for.
    pub fn read_conf(&self, path: Option<&str>) -> Result<(), Errno> {
        let path = path.map(c_text);
        let path = path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: the path is null or valid during the call.
        check(unsafe { self.ceph.rados.rados_conf_read_file(self.handle, path) }).map(drop)
    }

    /// Set an option.
    pub fn set(&self, option: &str, value: &str) -> Result<(), Errno> {
        let (option, value) = (c_text(option), c_text(value));
        let rados = &self.ceph.rados;
        // SAFETY: both texts are valid during the call.
        check(unsafe { rados.rados_conf_set(self.handle, option.as_ptr(), value.as_ptr()) })
            .map(drop)
    }

    /// Connect. Blocks up to `client_mount_timeout`.
    pub fn connect(&self) -> Result<(), Errno> {
        // SAFETY: a handle that is held.
        check(unsafe { self.ceph.rados.rados_connect(self.handle) }).map(drop)
    }

    /// The cluster's identity.
    pub fn fsid(&self) -> Result<String, Errno> {
        let mut buffer = [0u8; 64];
        let rados = &self.ceph.rados;
        // SAFETY: the buffer is valid and its length is told.
        check(unsafe {
            rados.rados_cluster_fsid(self.handle, buffer.as_mut_ptr().cast(), buffer.len())
        })?;
        Ok(text(&buffer))
    }

    /// A pool of it, and a namespace in the pool (empty: the default one).
    pub fn pool(self: &Arc<Self>, name: &str, namespace: &str) -> Result<Pool, Errno> {
        let (name, namespace) = (c_text(name), c_text(namespace));
        let (rados, mut handle) = (&self.ceph.rados, null_mut());
        // SAFETY: the name is valid during the call.
        check(unsafe { rados.rados_ioctx_create(self.handle, name.as_ptr(), &raw mut handle) })?;
        // SAFETY: a handle that was just made. On a full pool operations are to fail rather than to
        // hang: images that are opened with this handle take that over.
        unsafe {
            rados.rados_ioctx_set_namespace(handle, namespace.as_ptr());
            rados.rados_set_pool_full_try(handle);
        }
        Ok(Pool {
            cluster: Arc::clone(self),
            handle,
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nothing else uses the handle any more.
        unsafe { self.ceph.rados.rados_shutdown(self.handle) };
    }
}

/// A pool. Dropping it blocks.
pub struct Pool {
    /// Its cluster.
    pub cluster: Arc<Cluster>,
    handle: rados::rados_ioctx_t,
}

// SAFETY: as for the cluster.
unsafe impl Send for Pool {}
// SAFETY: as for the cluster.
unsafe impl Sync for Pool {}

impl Pool {
    /// Its number in the cluster, which is never used again.
    pub fn id(&self) -> i64 {
        // SAFETY: a handle that is held.
        unsafe { self.cluster.ceph.rados.rados_ioctx_get_id(self.handle) }
    }

    /// Make an image with the cluster's default features, and the exclusive lock in any case.
    pub fn create_image(&self, name: &str, bytes: u64) -> Result<(), Errno> {
        let (rbd, name, mut options) = (&self.cluster.ceph.rbd, c_text(name), null_mut());
        let feature_set = librbd::RBD_IMAGE_OPTION_FEATURES_SET as c_int;
        // SAFETY: the options are made, used and destroyed here.
        unsafe {
            rbd.rbd_image_options_create(&raw mut options);
            let lock = FEATURE_EXCLUSIVE_LOCK;
            let mut made = rbd.rbd_image_options_set_uint64(options, feature_set, lock);
            if made >= 0 {
                made = rbd.rbd_create4(self.handle, name.as_ptr(), bytes, options);
            }
            rbd.rbd_image_options_destroy(options);
            check(made).map(drop)
        }
    }

    /// Remove an image that nobody has open, and that has no snapshots.
    pub fn remove_image(&self, name: &str) -> Result<(), Errno> {
        let (rbd, name) = (&self.cluster.ceph.rbd, c_text(name));
        // SAFETY: the name is valid during the call.
        check(unsafe { rbd.rbd_remove(self.handle, name.as_ptr()) }).map(drop)
    }

    /// Open an image, or a snapshot of it. `place` names it for those who wait for its closing.
    pub fn image(
        self: Arc<Self>,
        name: &str,
        snapshot: Option<&str>,
        read_only: bool,
        place: &str,
    ) -> Result<Image, Errno> {
        let (rbd, c_name, mut handle) = (&self.cluster.ceph.rbd, c_text(name), null_mut());
        let snapshot = snapshot.map(c_text);
        let snapshot = snapshot.as_ref();
        let c_snapshot = snapshot.map_or(std::ptr::null(), |name| name.as_ptr());
        let open = if read_only {
            rbd.rbd_open_read_only
        } else {
            rbd.rbd_open
        };
        // SAFETY: the names are valid during the call, or null.
        check(unsafe { open(self.handle, c_name.as_ptr(), &raw mut handle, c_snapshot) })?;
        Ok(Image(Some(Open {
            handle,
            pool: self,
            event: None,
            place: place.to_owned(),
        })))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let rados = &self.cluster.ceph.rados;
        // SAFETY: nothing else uses the handle any more.
        unsafe { rados.rados_ioctx_destroy(self.handle) };
    }
}

struct Open {
    handle: librbd::rbd_image_t,
    pool: Arc<Pool>,
    /// Tells of finished operations.
    event: Option<OwnedFd>,
    place: String,
}

// SAFETY: librbd may be called from any thread, from several at once.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: nothing else uses the image any more. librbd itself waits until it has told of all
        // that has finished; the descriptor for that goes after this.
        let closed = check(unsafe { self.pool.cluster.ceph.rbd.rbd_close(self.handle) });
        if let Err(errno) = closed {
            tracing::warn!(image = self.place, error = %errno, "closing an image");
        }
    }
}

impl Open {
    fn rbd(&self) -> &'static librbd::Rbd {
        &self.pool.cluster.ceph.rbd
    }

    /// Take what the descriptor has told.
    fn clear_event(&self) {
        if let Some(event) = &self.event {
            let mut told = 0u64;
            // SAFETY: reads the eight bytes of `told`; the descriptor does not block, and it is no
            // error if it has nothing to tell.
            unsafe { libc::read(event.as_raw_fd(), (&raw mut told).cast(), 8) };
        }
    }
}

/// An open image. Dropping it does not block: it is closed on a thread.
pub struct Image(Option<Open>);

impl Drop for Image {
    fn drop(&mut self) {
        if let Some(open) = self.0.take() {
            closing::close(open.place.clone(), move || drop(open));
        }
    }
}

/// What an image is a clone of.
pub struct Parent {
    /// Number of the pool of the parent.
    pub pool: i64,
    /// The parent's identity in its pool.
    pub image: String,
    /// Number of the snapshot, which is never used again.
    pub snapshot: u64,
    /// Bytes from the beginning that are the parent's where the clone has no object.
    pub overlap_bytes: u64,
}

/// The end of an asynchronous operation.
pub struct Event {
    /// As given.
    pub number: usize,
    /// Bytes that were read, or zero.
    pub result: Result<usize, Errno>,
}

impl Image {
    fn open(&self) -> &Open {
        self.0.as_ref().expect("present until drop")
    }

    /// Close it on this thread, and let go of the cluster.
    pub fn close(mut self) {
        drop(self.0.take());
    }

    /// Never close it: operations are under way on it that may never end.
    pub fn leak(image: Arc<Self>) {
        std::mem::forget(closing::begin(image.open().place.clone()));
        std::mem::forget(image);
    }

    /// The pool that it is in.
    pub fn pool(&self) -> &Pool {
        &self.open().pool
    }

    fn number(
        &self,
        get: unsafe extern "C" fn(librbd::rbd_image_t, *mut u64) -> c_int,
    ) -> Result<u64, Errno> {
        let mut number = 0;
        // SAFETY: an image that is held, and a place for the number.
        check(unsafe { get(self.open().handle, &raw mut number) })?;
        Ok(number)
    }

    /// Its size.
    pub fn bytes(&self) -> Result<u64, Errno> {
        self.number(self.open().rbd().rbd_get_size)
    }

    /// What it can do, `FEATURE_*`.
    pub fn features(&self) -> Result<u64, Errno> {
        self.number(self.open().rbd().rbd_get_features)
    }

    /// What is wrong with it, `FLAG_*`.
    pub fn flags(&self) -> Result<u64, Errno> {
        self.number(self.open().rbd().rbd_get_flags)
    }

    /// Bytes of one object of it.
    pub fn object_bytes(&self) -> Result<u64, Errno> {
        let open = self.open();
        // SAFETY: plain numbers and texts, for which zeroes are valid; filled during the call.
        unsafe {
            let mut info: librbd::rbd_image_info_t = std::mem::zeroed();
            let bytes = size_of::<librbd::rbd_image_info_t>();
            check(open.rbd().rbd_stat(open.handle, &raw mut info, bytes))?;
            Ok(info.obj_size)
        }
    }

    /// Its identity in its pool.
    pub fn id(&self) -> Result<String, Errno> {
        let (open, mut buffer) = (self.open(), [0u8; TEXT_BYTES_MAX]);
        // SAFETY: the buffer is valid and its length is told.
        check(unsafe {
            let bytes = buffer.len();
            open.rbd()
                .rbd_get_id(open.handle, buffer.as_mut_ptr().cast(), bytes)
        })?;
        Ok(text(&buffer))
    }

    /// The number of a snapshot of it, which is never used again.
    pub fn snapshot_id(&self, name: &str) -> Result<u64, Errno> {
        let (open, name, mut id) = (self.open(), c_text(name), 0);
        // SAFETY: the name is valid during the call, and a place for the number.
        check(unsafe {
            open.rbd()
                .rbd_snap_get_id(open.handle, name.as_ptr(), &raw mut id)
        })?;
        Ok(id)
    }

    /// A note that stays with the image.
    pub fn note(&self, key: &str) -> Result<Option<String>, Errno> {
        let (open, key, mut buffer) = (self.open(), c_text(key), [0u8; TEXT_BYTES_MAX]);
        let mut bytes = buffer.len();
        // SAFETY: the texts are valid and the buffer's length is told.
        let got = check(unsafe {
            let value = buffer.as_mut_ptr().cast();
            open.rbd()
                .rbd_metadata_get(open.handle, key.as_ptr(), value, &raw mut bytes)
        });
        match got {
            Ok(_) => Ok(Some(text(&buffer))),
            Err(Errno(libc::ENOENT)) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Leave a note with the image.
    pub fn set_note(&self, key: &str, value: &str) -> Result<(), Errno> {
        let (open, key, value) = (self.open(), c_text(key), c_text(value));
        // SAFETY: the texts are valid during the call.
        check(unsafe {
            open.rbd()
                .rbd_metadata_set(open.handle, key.as_ptr(), value.as_ptr())
        })
        .map(drop)
    }

    /// The address of the client that holds the exclusive lock.
    pub fn lock_owner(&self) -> Result<Option<String>, Errno> {
        let (open, mut mode, mut owners) = (self.open(), 0, [null_mut::<c_char>(); 8]);
        let mut count = owners.len();
        // SAFETY: the array's length is told; the texts in it are freed by the library below.
        unsafe {
            let got = check(open.rbd().rbd_lock_get_owners(
                open.handle,
                &raw mut mode,
                owners.as_mut_ptr(),
                &raw mut count,
            ));
            match got {
                Ok(_) => {}
                Err(Errno(libc::ENOENT)) => return Ok(None),
                Err(errno) => return Err(errno),
            }
            let owner =
                (count > 0).then(|| CStr::from_ptr(owners[0]).to_string_lossy().into_owned());
            open.rbd()
                .rbd_lock_get_owners_cleanup(owners.as_mut_ptr(), count);
            Ok(owner)
        }
    }

    /// The addresses of the clients that watch the image, which all that have it open for writing do.
    pub fn watchers(&self) -> Result<Vec<String>, Errno> {
        let open = self.open();
        let mut count = 16;
        loop {
            let empty = librbd::rbd_image_watcher_t {
                addr: null_mut(),
                id: 0,
                cookie: 0,
            };
            let mut watchers = vec![empty; count];
            // SAFETY: the array's length is told; what is in it is freed by the library below.
            unsafe {
                let list = watchers.as_mut_ptr();
                match check(
                    open.rbd()
                        .rbd_watchers_list(open.handle, list, &raw mut count),
                ) {
                    Ok(_) => {
                        let addresses = watchers[..count]
                            .iter()
                            .map(|one| CStr::from_ptr(one.addr).to_string_lossy().into_owned())
                            .collect();
                        open.rbd().rbd_watchers_list_cleanup(list, count);
                        return Ok(addresses);
                    }
                    // `count` says how many there are.
                    Err(Errno(libc::ERANGE)) => count = count.max(watchers.len() + 1),
                    Err(errno) => return Err(errno),
                }
            }
        }
    }

    /// Take the exclusive lock for good: others that ask for it are refused.
    pub fn lock(&self) -> Result<(), Errno> {
        let open = self.open();
        let mode = librbd::rbd_lock_mode_t_RBD_LOCK_MODE_EXCLUSIVE;
        // SAFETY: an image that is held.
        check(unsafe { open.rbd().rbd_lock_acquire(open.handle, mode) }).map(drop)
    }

    /// Take the exclusive lock away from its owner, whom the cluster locks out from then on.
    pub fn break_lock(&self, owner: &str) -> Result<(), Errno> {
        let (open, owner) = (self.open(), c_text(owner));
        let mode = librbd::rbd_lock_mode_t_RBD_LOCK_MODE_EXCLUSIVE;
        // SAFETY: the text is valid during the call.
        check(unsafe { open.rbd().rbd_lock_break(open.handle, mode, owner.as_ptr()) }).map(drop)
    }

    /// Change its size. Blocks.
    pub fn resize(&self, bytes: u64) -> Result<(), Errno> {
        let open = self.open();
        // SAFETY: an image that is held.
        check(unsafe { open.rbd().rbd_resize(open.handle, bytes) }).map(drop)
    }

    /// Which snapshot it is a clone of, and how many of its bytes, from the beginning, may still be
    /// that one's.
    pub fn parent(&self) -> Result<Option<Parent>, Errno> {
        let open = self.open();
        // SAFETY: plain numbers and texts, for which zeroes are valid; filled during the call. The texts
        // in them are freed by the library below.
        let parent = unsafe {
            let mut image: librbd::rbd_linked_image_spec_t = std::mem::zeroed();
            let mut snapshot: librbd::rbd_snap_spec_t = std::mem::zeroed();
            let rbd = open.rbd();
            match check(rbd.rbd_get_parent(open.handle, &raw mut image, &raw mut snapshot)) {
                Ok(_) => {}
                Err(Errno(libc::ENOENT)) => return Ok(None),
                Err(errno) => return Err(errno),
            }
            let parent = Parent {
                pool: image.pool_id,
                image: CStr::from_ptr(image.image_id)
                    .to_string_lossy()
                    .into_owned(),
                snapshot: snapshot.id,
                overlap_bytes: 0,
            };
            rbd.rbd_linked_image_spec_cleanup(&raw mut image);
            rbd.rbd_snap_spec_cleanup(&raw mut snapshot);
            parent
        };
        let overlap_bytes = self.number(open.rbd().rbd_get_overlap)?;
        Ok(Some(Parent {
            overlap_bytes,
            ..parent
        }))
    }

    /// Which ranges of it have objects, or its parent has some for them, in order; offsets and lengths
    /// in bytes. Blocks.
    pub fn allocated(&self, offset: u64, bytes: u64) -> Result<Vec<(u64, u64)>, Errno> {
        self.objects(offset, bytes, true)
    }

    /// Which ranges of it have objects of its own, in order; offsets and lengths in bytes. What has none
    /// is read from the parent. Blocks.
    pub fn own(&self, bytes: u64) -> Result<Vec<(u64, u64)>, Errno> {
        self.objects(0, bytes, false)
    }

    fn objects(&self, offset: u64, bytes: u64, parent: bool) -> Result<Vec<(u64, u64)>, Errno> {
        extern "C" fn found(offset: u64, bytes: usize, exists: c_int, to: *mut c_void) -> c_int {
            if exists != 0 {
                // SAFETY: the vector below, which the call outlives and nobody else uses.
                unsafe { &mut *to.cast::<Vec<(u64, u64)>>() }.push((offset, bytes as u64));
            }
            0
        }
        let (open, mut ranges) = (self.open(), Vec::new());
        let to: *mut Vec<(u64, u64)> = &raw mut ranges;
        let (from, parent, whole_objects) = (std::ptr::null(), u8::from(parent), 1);
        // SAFETY: the callback runs only during the call, on what it was given.
        check(unsafe {
            open.rbd().rbd_diff_iterate2(
                open.handle,
                from,
                offset,
                bytes,
                parent,
                whole_objects,
                Some(found),
                to.cast(),
            )
        })?;
        Ok(ranges)
    }

    /// Make a descriptor that tells when operations have finished.
    pub fn make_event(&mut self) -> Result<(), Errno> {
        // SAFETY: makes a descriptor; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Errno::last());
        }
        // SAFETY: it was just made and has no other owner.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        let Some(open) = &mut self.0 else {
            return Ok(());
        };
        let kind = librbd::EVENT_TYPE_EVENTFD as c_int;
        // SAFETY: the descriptor is kept until the image is closed.
        check(unsafe { open.rbd().rbd_set_image_notification(open.handle, fd, kind) })?;
        open.event = Some(event);
        Ok(())
    }

    /// The descriptor of [`Self::make_event`].
    pub fn event(&self) -> RawFd {
        self.open().event.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Take all operations that have finished.
    pub fn take_events(&self, out: &mut Vec<Event>) {
        let open = self.open();
        open.clear_event();
        loop {
            let mut completions: [Completion; EVENTS_MAX] = [null_mut(); EVENTS_MAX];
            // SAFETY: the array's length is told; each completion in it is released once.
            unsafe {
                let list = completions.as_mut_ptr();
                let taken = open
                    .rbd()
                    .rbd_poll_io_events(open.handle, list, EVENTS_MAX as c_int);
                let taken = taken.max(0) as usize;
                for &completion in &completions[..taken] {
                    let result = open.rbd().rbd_aio_get_return_value(completion);
                    out.push(Event {
                        number: open.rbd().rbd_aio_get_arg(completion).addr(),
                        result: usize::try_from(result).map_err(|_| Errno(-result as i32)),
                    });
                    open.rbd().rbd_aio_release(completion);
                }
                if taken < EVENTS_MAX {
                    return;
                }
            }
        }
    }

    /// Start an asynchronous operation under a number.
    fn start(
        &self,
        number: usize,
        start: impl FnOnce(&librbd::Rbd, librbd::rbd_image_t, Completion) -> c_int,
    ) -> Result<(), Errno> {
        let (open, mut completion) = (self.open(), null_mut());
        let argument = std::ptr::without_provenance_mut(number);
        // SAFETY: the argument is only a number; the completion is released here if it was not
        // started, else when it is taken.
        unsafe {
            let to = &raw mut completion;
            check(open.rbd().rbd_aio_create_completion(argument, None, to))?;
            let started = check(start(open.rbd(), open.handle, completion));
            if started.is_err() {
                open.rbd().rbd_aio_release(completion);
            }
            started.map(drop)
        }
    }

    /// Read.
    ///
    /// # Safety
    /// The memory must stay valid and untouched until the operation has been taken.
    pub unsafe fn read(
        &self,
        number: usize,
        offset: u64,
        address: *mut u8,
        bytes: usize,
    ) -> Result<(), Errno> {
        // SAFETY: the caller keeps the memory.
        self.start(number, |rbd, image, completion| unsafe {
            rbd.rbd_aio_read(image, offset, bytes, address.cast(), completion)
        })
    }

    /// Write. The vectors are needed during the call only.
    ///
    /// # Safety
    /// What the vectors point to must stay valid and unchanged until the operation has been taken.
    pub unsafe fn write(
        &self,
        number: usize,
        offset: u64,
        vectors: &[libc::iovec],
    ) -> Result<(), Errno> {
        // SAFETY: the caller keeps the memory.
        self.start(number, |rbd, image, completion| unsafe {
            let count = vectors.len() as c_int;
            rbd.rbd_aio_writev(image, vectors.as_ptr(), count, offset, completion)
        })
    }

    /// Make a range read as zeroes; with `keep` its space stays taken.
    pub fn zero(&self, number: usize, offset: u64, bytes: u64, keep: bool) -> Result<(), Errno> {
        let flags = if keep {
            librbd::RBD_WRITE_ZEROES_FLAG_THICK_PROVISION
        } else {
            0
        };
        // SAFETY: no memory but the completion's.
        self.start(number, |rbd, image, completion| unsafe {
            let bytes = bytes as usize;
            rbd.rbd_aio_write_zeroes(image, offset, bytes, completion, flags as c_int, 0)
        })
    }

    /// Make what was written durable.
    pub fn flush(&self, number: usize) -> Result<(), Errno> {
        // SAFETY: no memory but the completion's.
        self.start(number, |rbd, image, completion| unsafe {
            rbd.rbd_aio_flush(image, completion)
        })
    }
}
