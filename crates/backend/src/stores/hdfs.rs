//! HDFS: an object is a file, made under a name of its own and renamed when it is whole and synced
//! on every DataNode that has it.
//!
//! The NameNode renames under its lock and refuses to replace unless told to, so a conditional put
//! is exactly that. A file has one block, as large as the object, so that a quota is charged what
//! is used. What a crash leaves half-made lies in `PREFIX/.tmp` and is swept when it is old.

//!
//! The client library panics on answers that it does not expect. It runs in threads of its own, where a panic ends the
//! operation and not the process, and is replaced by a new client then.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hdfs_native::client::ListStatusIterator;
use hdfs_native::{Client, ClientBuilder, HdfsError, WriteOptions};
use tokio::runtime::{Handle, Runtime};
use tokio::task::JoinSet;

use super::{
    ABANDONED, Condition, HDFS_THREADS, LIST_MAX, Listing, Object, Pending, Store, StoreError,
    WORKERS, WORKSHOP, brief,
};

/// Block sizes are multiples of this; HDFS refuses smaller blocks.
const BLOCK_BYTES: u64 = 1 << 20;
/// Directories are ours alone, as are the files.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// What is needed to reach a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `HOST:PORT` of the NameNode, or the name of a service that `conf` explains.
    pub authority: String,
    /// The directory, absolute.
    pub path: String,
    /// Whose files they are; none: `HADOOP_USER_NAME`, a Kerberos ticket, or the process' user.
    pub user: Option<String>,
    /// A directory with `core-site.xml` and `hdfs-site.xml`; none: that of `HADOOP_CONF_DIR`.
    pub conf: Option<PathBuf>,
    /// Replicas of each object; none: the NameNode's default.
    pub replication: Option<u32>,
    /// Time for one operation.
    pub timeout: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Hdfs {
    client: Mutex<Client>,
    config: Config,
    swept: AtomicBool,
    /// Where the last listing stopped.
    listing: Mutex<Option<At>>,
}

/// Where a listing goes on.
struct At {
    prefix: String,
    /// The last name that was told.
    after: String,
    /// The one that comes next, and what is left behind it.
    next: Object,
    rest: ListStatusIterator,
}

impl std::fmt::Debug for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}… behind {}", self.prefix, self.after)
    }
}

impl Hdfs {
    /// Prepare to use a directory. Nothing is sent yet.
    pub fn new(config: &Config) -> Result<Self, StoreError> {
        let refused = |error: HdfsError| {
            let text = brief(&error.to_string());
            StoreError::Refused(format!("HDFS at {}: {text}", config.authority))
        };
        Ok(Self {
            client: Mutex::new(client(config).map_err(refused)?),
            config: config.clone(),
            swept: AtomicBool::new(false),
            listing: Mutex::new(None),
        })
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.config.path)
    }

    /// What an error of an operation on an object means.
    fn error(&self, what: &str, error: &HdfsError) -> StoreError {
        let message = format!("{}: {what}: {}", self.place(), brief(&error.to_string()));
        match error {
            HdfsError::AlreadyExists(_) => StoreError::Exists,
            HdfsError::FileNotFound(_) => StoreError::NotFound,
            HdfsError::RPCError(class, text) | HdfsError::FatalRPCError(class, text) => {
                let class = class.rsplit(['.', '$']).next().unwrap_or(class);
                match class {
                    "FileNotFoundException" => StoreError::NotFound,
                    "AccessControlException" | "AuthorizationException" => StoreError::Refused(
                        format!("{message}; check the user (option `user`) and the permissions"),
                    ),
                    "DSQuotaExceededException"
                    | "NSQuotaExceededException"
                    | "QuotaByStorageTypeExceededException" => StoreError::NoSpace(message),
                    // Too few DataNodes at present, a NameNode that starts, one that is not
                    // active, or one that waits for a lease to run out.
                    _ if text.contains("could only be written to")
                        || text.contains("safe mode")
                        || text.contains("Not replicated yet") =>
                    {
                        StoreError::Unreachable(message)
                    }
                    "SafeModeException"
                    | "StandbyException"
                    | "RetriableException"
                    | "NotReplicatedYetException"
                    | "RetryStartFileException" => StoreError::Unreachable(message),
                    _ => StoreError::Failed(message),
                }
            }
            HdfsError::IOError(_)
            | HdfsError::DataTransferError(_)
            | HdfsError::BlocksNotFound(_)
            | HdfsError::OperationFailed(_) => StoreError::Unreachable(message),
            HdfsError::SASLError(_) | HdfsError::GSSAPIError(..) | HdfsError::NoSASLMechanism => {
                StoreError::Refused(format!("{message}; check the Kerberos ticket"))
            }
            _ => StoreError::Failed(message),
        }
    }

    /// An operation within its time.
    async fn timed<T, F>(
        &self,
        what: &str,
        operation: impl FnOnce(Client) -> F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, HdfsError>> + Send + 'static,
    {
        let client = self.client.lock();
        let client = client.unwrap_or_else(PoisonError::into_inner).clone();
        let (operation, timeout) = (operation(client), self.config.timeout);
        // Dropped with this future, it ends the task.
        let mut task = JoinSet::new();
        task.spawn_on(
            async move { tokio::time::timeout(timeout, operation).await },
            runtime(),
        );
        let why = match task.join_next().await {
            Some(Ok(Ok(result))) => return result.map_err(|error| self.error(what, &error)),
            Some(Ok(Err(_))) => format!("no answer within {} s", timeout.as_secs()),
            Some(Err(_)) | None => {
                self.renew();
                "its client ended on an answer that it did not expect".to_owned()
            }
        };
        let place = self.place();
        Err(StoreError::Unreachable(format!("{place}: {what}: {why}")))
    }

    /// Go on with a new client: what a panic has left of one may be of no use.
    fn renew(&self) {
        if let Ok(new) = client(&self.config) {
            *self.client.lock().unwrap_or_else(PoisonError::into_inner) = new;
        }
    }

    /// Once, delete what crashes have left half-made. It may fail: the next opening tries again.
    async fn sweep(&self) {
        if self.swept.swap(true, Ordering::Relaxed) {
            return;
        }
        let workshop = self.path(WORKSHOP);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default();
        let listed = self.timed("list", async move |client| {
            let all = client.list_status_iter(&workshop, false);
            let mut old = Vec::new();
            while let Some(file) = all.next().await
                && old.len() < LIST_MAX
            {
                let file = file?;
                let made = Duration::from_millis(file.modification_time);
                if made.saturating_add(ABANDONED) < now {
                    old.push(file.path);
                }
            }
            Ok(old)
        });
        for path in listed.await.unwrap_or_default() {
            if self.discard(path).await.is_err() {
                return;
            }
        }
    }

    /// Delete a file that is half-made.
    async fn discard(&self, path: String) -> Result<(), StoreError> {
        let deleted = self.timed("delete", async move |client| {
            client.delete(&path, false).await
        });
        deleted.await.map(drop)
    }
}

/// A client that runs in [`runtime`].
fn client(config: &Config) -> Result<Client, HdfsError> {
    let timeout = config.timeout.as_millis().to_string();
    let mut builder = ClientBuilder::new()
        .with_url(format!("hdfs://{}", config.authority))
        .with_config([("dfs.client.socket-timeout", timeout.as_str())])
        .with_io_runtime(runtime().clone());
    if let Some(user) = &config.user {
        builder = builder.with_user(user);
    }
    if let Some(conf) = &config.conf {
        builder = builder.with_config_dir(conf.display().to_string());
    }
    builder.build()
}

/// Where the client library runs.
fn runtime() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(WORKERS)
                .thread_name(HDFS_THREADS)
                .enable_all()
                .build()
                .expect("a thread can be started")
        })
        .handle()
}

/// Make a file whole and durable.
async fn make(
    client: &Client,
    path: &str,
    data: Bytes,
    replication: Option<u32>,
) -> Result<(), HdfsError> {
    let bytes = data.len() as u64;
    let mut options = WriteOptions::default()
        .permission(FILE_MODE)
        .block_size(bytes.next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES));
    if let Some(replication) = replication {
        options = options.replication(replication);
    }
    let mut file = client.create(path, options).await?;
    if !data.is_empty() {
        Box::pin(file.write_bytes(data)).await?;
        file.hsync().await?;
    }
    Box::pin(file.close()).await
}

/// Rename, making the directory when it is not there.
async fn rename(client: &Client, from: &str, to: &str, replace: bool) -> Result<(), HdfsError> {
    let first = client.rename(from, to, replace).await;
    let parent = to.rsplit_once('/').map_or("/", |(parent, _)| parent);
    match first {
        Err(HdfsError::RPCError(class, _)) if class.ends_with("FileNotFoundException") => {
            client.mkdirs(parent, DIRECTORY_MODE, true).await?;
            client.rename(from, to, replace).await
        }
        other => other,
    }
}

/// Files up to one more than `max` that come after a name, in the order of their names: the first of them is `first`, if
/// it is known. If what is left can go on from there, it comes back.
async fn page(
    rest: ListStatusIterator,
    first: Option<Object>,
    whole: &str,
    after: &str,
    max: usize,
) -> Result<(Vec<Object>, Option<ListStatusIterator>), HdfsError> {
    let first = first.map(|object| (object.name.clone(), object));
    let mut objects = BTreeMap::from_iter(first);
    let mut is_sorted = true;
    let workshop = format!("{WORKSHOP}/");
    while let Some(file) = rest.next().await {
        let file = file?;
        let name = file.path.strip_prefix(whole).unwrap_or_default();
        if file.isdir || name <= after || name.starts_with(&workshop) {
            continue;
        }
        let object = Object {
            name: name.to_owned(),
            bytes: file.length as u64,
            modified_ms: file.modification_time,
        };
        is_sorted &= objects
            .last_key_value()
            .is_none_or(|(last, _)| **last < *name);
        objects.insert(object.name.clone(), object);
        if objects.len() > max + 1 {
            objects.pop_last();
        }
        if objects.len() > max && is_sorted {
            // A NameNode lists a directory in order, so all that is left comes after these.
            return Ok((objects.into_values().collect(), Some(rest)));
        }
    }
    Ok((objects.into_values().collect(), None))
}

impl Store for Hdfs {
    fn put<'a>(&'a self, name: &'a str, data: Bytes, condition: Condition) -> Pending<'a, ()> {
        Box::pin(async move {
            self.sweep().await;
            let what = format!("put {name}");
            let half_made = self.path(&format!("{WORKSHOP}/{}", uuid::Uuid::new_v4()));
            let (path, replication) = (half_made.clone(), self.config.replication);
            let made = self.timed(&what, async move |client| {
                Box::pin(make(&client, &path, data, replication)).await
            });
            let replace = condition == Condition::Always;
            let done = match made.await {
                Ok(()) => {
                    let (from, to) = (half_made.clone(), self.path(name));
                    let renamed = self.timed(&what, async move |client| {
                        rename(&client, &from, &to, replace).await
                    });
                    renamed.await
                }
                Err(error) => Err(error),
            };
            if done.is_err() {
                // What cannot be deleted now is swept later.
                let _ = self.discard(half_made).await;
            }
            match done {
                Err(StoreError::NotFound) => Err(StoreError::Unreachable(format!(
                    "{}: {what}: what was being made has gone",
                    self.place()
                ))),
                done => done,
            }
        })
    }

    fn get<'a>(&'a self, name: &'a str, offset: u64, bytes: usize) -> Pending<'a, Bytes> {
        Box::pin(async move {
            let (what, path) = (format!("get {name}"), self.path(name));
            let got = self.timed(&what, async move |client| {
                let file = client.read(&path).await?;
                let at = usize::try_from(offset).ok();
                let end = at.and_then(|at| at.checked_add(bytes));
                match at {
                    Some(at) if end.is_some_and(|end| end <= file.file_length()) => {
                        file.read_range(at, bytes).await.map(Some)
                    }
                    _ => Ok(None),
                }
            });
            got.await?.ok_or(StoreError::Short)
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            let (what, path) = (format!("delete {name}"), self.path(name));
            let deleted = self.timed(&what, async move |client| client.delete(&path, false).await);
            match deleted.await {
                Ok(_) | Err(StoreError::NotFound) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, max: usize) -> Pending<'a, Listing> {
        Box::pin(async move {
            let at = self.listing.lock().unwrap_or_else(PoisonError::into_inner);
            let going_on = { at }
                .take()
                .filter(|at| at.prefix == prefix && at.after == after);
            let directory = self.path(prefix.trim_end_matches('/'));
            let (whole, after) = (format!("{}/", self.config.path), after.to_owned());
            let listed = self.timed("list", async move |client| {
                let (rest, first) = if let Some(at) = going_on {
                    (at.rest, Some(at.next))
                } else {
                    let directory = directory.trim_end_matches('/');
                    (client.list_status_iter(directory, true), None)
                };
                page(rest, first, &whole, &after, max).await
            });
            let (mut objects, rest) = match listed.await {
                Ok(found) => found,
                // No directory is made before something is put there.
                Err(StoreError::NotFound) => return Ok(Listing::default()),
                Err(error) => return Err(error),
            };
            let next = if objects.len() > max {
                objects.pop()
            } else {
                None
            };
            let more = next.is_some();
            if let (Some(rest), Some(next), Some(last)) = (rest, next, objects.last()) {
                let at = At {
                    prefix: prefix.to_owned(),
                    after: last.name.clone(),
                    rest,
                    next,
                };
                *self.listing.lock().unwrap_or_else(PoisonError::into_inner) = Some(at);
            }
            Ok(Listing { objects, more })
        })
    }

    fn place(&self) -> String {
        format!("HDFS at {}, {}", self.config.authority, self.config.path)
    }
}
