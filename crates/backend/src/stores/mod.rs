//! Clients of object stores: the four operations that a volume over objects needs, over S3 or
//! HDFS.
//!
//! Invariants:
//! 1. A put is whole or not there at all, and durable when it has ended well. Of several puts of
//!    one name with [`Condition::IfAbsent`], exactly one ends well, whoever makes them.
//! 2. A put that ended in [`StoreError::Unreachable`] may have been done, or may still come to
//!    pass. So after a repeated conditional put [`StoreError::Exists`] may mean our own object:
//!    whoever needs to know reads it.
//! 3. A get brings exactly what was asked for, or an error.
//! 4. Names are listed in the order of their bytes; what was put before the listing began and was
//!    not deleted since is in it.
//! 5. Every operation ends: what can be retried is, with growing, jittered pauses, until nobody needs it any more or the
//!    patience of its [`Client`] is used up.
//!
//! Everything runs on one runtime of its own threads, never on a shard's. Secrets come from the
//! environment or from files; no message holds one.

#[cfg(feature = "s3")]
mod bounded;
pub mod conformance;
pub mod dir;
#[cfg(feature = "hdfs")]
pub mod hdfs;
#[cfg(feature = "s3")]
pub mod s3;

#[cfg(test)]
pub(crate) mod memory;
#[cfg(test)]
pub(crate) mod tests;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdcs_core::base::error::IoError;
use hdcs_core::base::limits::{BLOCK_BYTES, OBJECT_BATCH_BLOCKS_MAX};
use thiserror::Error;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Notify;

/// Name of the threads in which the client library of HDFS runs, and nothing else: a panic there does not end the process.
pub const HDFS_THREADS: &str = "hdcs-hdfs";
/// Threads of the runtime: it moves bytes and signs requests, and is rarely busy.
const WORKERS: usize = 1;
/// The first pause before a retry, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// No object is longer: what says that one is lies, and nobody makes room for it.
const OBJECT_BYTES_MAX: usize = 2 * OBJECT_BATCH_BLOCKS_MAX * BLOCK_BYTES;
/// Where stores that are made of files make an object, before it has its name.
const WORKSHOP: &str = ".tmp";
/// Age from which something half-made there is nobody's: much longer than any put takes.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// Names in one page of a listing.
pub const LIST_MAX: usize = 1000;
/// Characters of a store's message that reach ours: some send whole pages.
#[cfg(any(feature = "s3", feature = "hdfs"))]
const MESSAGE_MAX: usize = 300;

/// When a put may take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Always; it replaces what is there.
    Always,
    /// Only if nothing has the name.
    IfAbsent,
}

/// How an operation failed. The text says what and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// Nothing has the name.
    #[error("no such object")]
    NotFound,
    /// The object ends before what was asked for.
    #[error("the object is shorter than that")]
    Short,
    /// The name is taken.
    #[error("the object exists already")]
    Exists,
    /// The store cannot be reached or is overloaded; whether the operation took place is unknown.
    #[error("{0}")]
    Unreachable(String),
    /// A quota or the store is full.
    #[error("{0}")]
    NoSpace(String),
    /// The store does not let us, or has no such bucket.
    #[error("{0}")]
    Refused(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl StoreError {
    /// The error of an operation on a device.
    pub fn io(&self) -> IoError {
        match self {
            Self::Unreachable(_) => IoError::Unreachable,
            Self::NoSpace(_) => IoError::NoSpace,
            Self::NotFound | Self::Short | Self::Exists | Self::Refused(_) | Self::Failed(_) => {
                IoError::Failed
            }
        }
    }
}

/// One object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// When it was put, by the store's clock: milliseconds since 1970.
    pub modified_ms: u64,
}

/// A page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// In the order of their names.
    pub objects: Vec<Object>,
    /// Whether there is more after them.
    pub more: bool,
}

/// An operation under way.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// One attempt at each operation. Names are short ASCII strings of `/`-separated segments below
/// the store's prefix.
pub trait Store: Send + Sync + 'static {
    /// Put an object.
    fn put<'a>(&'a self, name: &'a str, data: Bytes, condition: Condition) -> Pending<'a, ()>;
    /// Get a part of an object, all of it.
    fn get<'a>(&'a self, name: &'a str, offset: u64, bytes: usize) -> Pending<'a, Bytes>;
    /// Delete an object; that it is not there is no error.
    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()>;
    /// Names that begin with `prefix` (empty, or up to a `/`) and come after `after`.
    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, max: usize) -> Pending<'a, Listing>;
    /// What it is called in messages.
    fn place(&self) -> String;
}

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Puts.
    Put,
    /// Gets.
    Get,
    /// Deletes.
    Delete,
    /// Pages of listings.
    List,
}

/// Kinds of objects whose puts are told apart, by the first segment of their names.
const PUT_KINDS: [&str; 3] = ["data", "map", "manifest"];

/// What has been asked of a store, attempts that failed included.
#[derive(Debug, Default)]
pub struct Counters {
    requests: [AtomicU64; 4],
    puts_of: [AtomicU64; PUT_KINDS.len()],
    retries: AtomicU64,
    put_bytes: AtomicU64,
    get_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    damaged_pages: AtomicU64,
    lost_pages: AtomicU64,
    trouble: Mutex<Option<String>>,
    lost: OnceLock<String>,
    /// Whether nobody needs any more what is asked, and whom that wakes.
    is_over: AtomicBool,
    over: Notify,
}

/// [`Counters`] at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that put an object.
    pub puts: u64,
    /// How many of them put a batch of written blocks.
    pub puts_data: u64,
    /// How many of them put a part of a map.
    pub puts_map: u64,
    /// How many of them put a manifest.
    pub puts_manifest: u64,
    /// Requests that got a part of one.
    pub gets: u64,
    /// Requests that deleted one.
    pub deletes: u64,
    /// Requests for a page of a listing.
    pub lists: u64,
    /// How many of all these repeated one that had failed.
    pub retries: u64,
    /// Bytes put.
    pub put_bytes: u64,
    /// Bytes got.
    pub get_bytes: u64,
    /// Bytes of the data objects that are known to be there.
    pub stored_bytes: u64,
    /// Reads of a page of the map that was not what it should be.
    pub damaged_pages: u64,
    /// Pages of the map that were given up.
    pub lost_pages: u64,
    /// Why the place was lost, or what the last request failed with; none if it ended well.
    pub trouble: Option<String>,
    /// Whether the place was lost, for ever.
    pub is_lost: bool,
}

impl Counters {
    fn request(&self, kind: Kind) {
        self.requests[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn put(&self, name: &str) {
        let folder = name.split('/').next();
        if let Some(kind) = PUT_KINDS.iter().position(|kind| folder == Some(*kind)) {
            self.puts_of[kind].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Note how a request ended, and log when trouble begins, changes and ends.
    fn ended(&self, trouble: Option<String>, place: &str) {
        let mut last = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*last, &trouble) {
            (None, Some(trouble)) => tracing::warn!("{trouble}"),
            (Some(_), None) => tracing::info!("{place}: reached again"),
            _ => {}
        }
        *last = trouble;
    }

    /// So many bytes of data objects are known to be there.
    pub fn store(&self, bytes: u64) {
        self.stored_bytes.store(bytes, Ordering::Relaxed);
    }

    /// So many reads of a page of the map were no good, and so many pages were given up.
    pub fn miss_pages(&self, damaged: u64, lost: u64) {
        self.damaged_pages.store(damaged, Ordering::Relaxed);
        self.lost_pages.store(lost, Ordering::Relaxed);
    }

    /// The place is ours no more, for ever, for this reason.
    pub fn lose(&self, why: String) {
        // The first reason stands.
        let _ = self.lost.set(why);
    }

    /// Nobody needs any more what is asked: what fails from now on is not tried again.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.over.notify_waiters();
    }

    /// Wait, but not once nobody needs what is asked any more; whether that is so.
    async fn pause(&self, pause: Duration) -> bool {
        let over = self.over.notified();
        if !self.is_over.load(Ordering::Acquire) {
            // How it ends is seen below.
            let _ = tokio::time::timeout(pause, over).await;
        }
        self.is_over.load(Ordering::Acquire)
    }

    /// What they are now.
    pub fn counts(&self) -> Counts {
        let requests = |kind: Kind| self.requests[kind as usize].load(Ordering::Relaxed);
        let [puts_data, puts_map, puts_manifest] =
            [0, 1, 2].map(|kind: usize| self.puts_of[kind].load(Ordering::Relaxed));
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        Counts {
            puts: requests(Kind::Put),
            puts_data,
            puts_map,
            puts_manifest,
            gets: requests(Kind::Get),
            deletes: requests(Kind::Delete),
            lists: requests(Kind::List),
            retries: self.retries.load(Ordering::Relaxed),
            put_bytes: self.put_bytes.load(Ordering::Relaxed),
            get_bytes: self.get_bytes.load(Ordering::Relaxed),
            stored_bytes: self.stored_bytes.load(Ordering::Relaxed),
            damaged_pages: self.damaged_pages.load(Ordering::Relaxed),
            lost_pages: self.lost_pages.load(Ordering::Relaxed),
            is_lost: self.lost.get().is_some(),
            trouble: self.lost.get().or(trouble.as_ref()).cloned(),
        }
    }
}

/// A store with its retries and counters. Clones share both.
#[derive(Clone)]
pub struct Client {
    store: Arc<dyn Store>,
    counters: Arc<Counters>,
    patience: Duration,
}

impl Client {
    /// Use a store; an operation is retried for as long as `patience`.
    pub fn new(store: impl Store, patience: Duration) -> Self {
        Self::over(Arc::new(store), patience)
    }

    /// See [`Self::new`].
    pub fn over(store: Arc<dyn Store>, patience: Duration) -> Self {
        Self {
            store,
            counters: Arc::default(),
            patience,
        }
    }

    /// The same with another patience.
    #[must_use]
    pub fn with_patience(&self, patience: Duration) -> Self {
        Self {
            patience,
            ..self.clone()
        }
    }

    /// The same for another place; counted together.
    #[must_use]
    pub fn beside(&self, store: Arc<dyn Store>) -> Self {
        Self {
            store,
            ..self.clone()
        }
    }

    /// What has been asked.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// What the store is called in messages.
    pub fn place(&self) -> String {
        self.store.place()
    }

    /// See [`Store::put`].
    pub async fn put(
        &self,
        name: &str,
        data: Bytes,
        condition: Condition,
    ) -> Result<(), StoreError> {
        let bytes = data.len() as u64;
        let attempt = || {
            self.counters.put(name);
            self.store.put(name, data.clone(), condition)
        };
        self.retried(Kind::Put, attempt).await?;
        self.counters.put_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// See [`Store::get`].
    pub async fn get(&self, name: &str, offset: u64, bytes: usize) -> Result<Bytes, StoreError> {
        let end = offset.checked_add(bytes as u64);
        if bytes > OBJECT_BYTES_MAX || end.is_none() {
            let place = self.place();
            return Err(StoreError::Failed(format!(
                "{place}: get {name}: it is said to have {bytes} bytes at {offset}, which no object has"
            )));
        }
        let attempt = || self.store.get(name, offset, bytes);
        let got = self.retried(Kind::Get, attempt).await?;
        if got.len() != bytes {
            return Err(StoreError::Short);
        }
        let bytes = bytes as u64;
        self.counters.get_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(got)
    }

    /// See [`Store::delete`].
    pub async fn delete(&self, name: &str) -> Result<(), StoreError> {
        self.retried(Kind::Delete, || self.store.delete(name)).await
    }

    /// See [`Store::list`].
    pub async fn list(&self, prefix: &str, after: &str, max: usize) -> Result<Listing, StoreError> {
        self.retried(Kind::List, || self.store.list(prefix, after, max))
            .await
    }

    /// Attempt it until it ends in something that another attempt would not change.
    async fn retried<'a, T>(
        &'a self,
        kind: Kind,
        attempt: impl Fn() -> Pending<'a, T>,
    ) -> Result<T, StoreError> {
        let started = Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            self.counters.request(kind);
            let result = attempt().await;
            let trouble = match &result {
                Ok(_) | Err(StoreError::NotFound | StoreError::Short | StoreError::Exists) => None,
                Err(error) => Some(error.to_string()),
            };
            self.counters.ended(trouble, &self.place());
            // Half of the pause is drawn, so that many clients do not come back at once.
            let wait = pause / 2 + pause.mul_f64(draw() / 2.0);
            let again = matches!(result, Err(StoreError::Unreachable(_)))
                && started.elapsed() + wait < self.patience;
            if !again || self.counters.pause(wait).await {
                return result;
            }
            pause = (pause * 2).min(PAUSE_MAX);
            self.counters.retries.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.place())
    }
}

/// A number from 0 to 1. It spreads retries and decides nothing else.
fn draw() -> f64 {
    let random = uuid::Uuid::new_v4().as_u128() as u32;
    f64::from(random) / f64::from(u32::MAX)
}

/// The runtime of all stores.
pub fn runtime() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(WORKERS)
                .thread_name("hdcs-stores")
                .enable_all()
                .build()
                .expect("a thread can be started")
        })
        .handle()
}

/// One line of a message, not too long.
#[cfg(any(feature = "s3", feature = "hdfs"))]
fn brief(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MESSAGE_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Whether a name is one that the stores take: segments of letters, digits, `-`, `_` and `.`.
pub fn is_name(name: &str) -> bool {
    let segment = |segment: &str| {
        !segment.is_empty()
            && !segment.starts_with('.')
            && segment
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    name.split('/').all(segment)
}
