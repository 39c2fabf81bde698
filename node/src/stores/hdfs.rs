//! HDFS: an object is a file, made under a name of its own and renamed when it is whole and synced
//! on every DataNode that has it.
//!
//! The NameNode renames under its lock and refuses to replace unless told to, so a conditional put
//! is exactly that. A file has one block, as large as the object, so that a quota is charged what
//! is used. What a crash leaves half-made lies in `PREFIX/.tmp` and is swept when it is old.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hdfs_native::{Client, ClientBuilder, HdfsError, WriteOptions};

use super::{Condition, Listing, Object, Pending, Store, StoreError, brief, runtime};

/// Where objects are made.
const WORKSHOP: &str = ".tmp";
/// Age from which something half-made is nobody's: much longer than any put takes.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
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
    client: Client,
    config: Config,
    swept: AtomicBool,
}

impl Hdfs {
    /// Prepare to use a directory. Nothing is sent yet.
    pub fn new(config: &Config) -> Result<Self, StoreError> {
        let refused = |error: HdfsError| {
            let text = brief(&error.to_string());
            StoreError::Refused(format!("HDFS at {}: {text}", config.authority))
        };
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
        Ok(Self {
            client: builder.build().map_err(refused)?,
            config: config.clone(),
            swept: AtomicBool::new(false),
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
    async fn timed<T>(
        &self,
        what: &str,
        operation: impl Future<Output = Result<T, HdfsError>> + Send,
    ) -> Result<T, StoreError> {
        match tokio::time::timeout(self.config.timeout, operation).await {
            Ok(result) => result.map_err(|error| self.error(what, &error)),
            Err(_) => Err(StoreError::Unreachable(format!(
                "{}: {what}: no answer within {} s",
                self.place(),
                self.config.timeout.as_secs()
            ))),
        }
    }

    /// Make a file whole and durable.
    async fn make(&self, path: &str, data: Bytes) -> Result<(), HdfsError> {
        let bytes = data.len() as u64;
        let mut options = WriteOptions::default()
            .permission(FILE_MODE)
            .block_size(bytes.next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES));
        if let Some(replication) = self.config.replication {
            options = options.replication(replication);
        }
        let mut file = self.client.create(path, options).await?;
        if !data.is_empty() {
            Box::pin(file.write_bytes(data)).await?;
            file.hsync().await?;
        }
        Box::pin(file.close()).await
    }

    /// Rename, making the directory when it is not there.
    async fn rename(&self, from: &str, to: &str, replace: bool) -> Result<(), HdfsError> {
        let first = self.client.rename(from, to, replace).await;
        let parent = to.rsplit_once('/').map_or("/", |(parent, _)| parent);
        match first {
            Err(HdfsError::RPCError(class, _)) if class.ends_with("FileNotFoundException") => {
                self.client.mkdirs(parent, DIRECTORY_MODE, true).await?;
                self.client.rename(from, to, replace).await
            }
            other => other,
        }
    }

    /// Once, delete what crashes have left half-made. It may fail: the next opening tries again.
    async fn sweep(&self) {
        if self.swept.swap(true, Ordering::Relaxed) {
            return;
        }
        let workshop = self.path(WORKSHOP);
        let Ok(Ok(found)) = tokio::time::timeout(
            self.config.timeout,
            self.client.list_status(&workshop, false),
        )
        .await
        else {
            return;
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default();
        for file in found {
            if Duration::from_millis(file.modification_time) + ABANDONED < now {
                let deleted = self.client.delete(&file.path, false);
                if tokio::time::timeout(self.config.timeout, deleted)
                    .await
                    .is_err()
                {
                    return;
                }
            }
        }
    }
}

impl Store for Hdfs {
    fn put<'a>(&'a self, name: &'a str, data: Bytes, condition: Condition) -> Pending<'a, ()> {
        Box::pin(async move {
            self.sweep().await;
            let what = format!("put {name}");
            let half_made = self.path(&format!("{WORKSHOP}/{}", uuid::Uuid::new_v4()));
            let made = self
                .timed(&what, Box::pin(self.make(&half_made, data)))
                .await;
            let replace = condition == Condition::Always;
            let done = match made {
                Ok(()) => {
                    let to = self.path(name);
                    self.timed(&what, self.rename(&half_made, &to, replace))
                        .await
                }
                Err(error) => Err(error),
            };
            if done.is_err() {
                // What cannot be deleted now is swept later.
                let deleted = self.client.delete(&half_made, false);
                let _ = tokio::time::timeout(self.config.timeout, deleted).await;
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
            let what = format!("get {name}");
            let path = self.path(name);
            let file = self.timed(&what, self.client.read(&path)).await?;
            let end = usize::try_from(offset)
                .ok()
                .and_then(|at| at.checked_add(bytes));
            if end.is_none_or(|end| end > file.file_length()) {
                return Err(StoreError::Short);
            }
            self.timed(&what, file.read_range(offset as usize, bytes))
                .await
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            let path = self.path(name);
            let deleted = self.client.delete(&path, false);
            match self.timed(&format!("delete {name}"), deleted).await {
                Ok(_) | Err(StoreError::NotFound) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, max: usize) -> Pending<'a, Listing> {
        Box::pin(async move {
            let directory = self.path(prefix.trim_end_matches('/'));
            let directory = directory.trim_end_matches('/');
            let listed = self.client.list_status(directory, true);
            let found = match self.timed("list", listed).await {
                Ok(found) => found,
                // No directory is made before something is put there.
                Err(StoreError::NotFound) => Vec::new(),
                Err(error) => return Err(error),
            };
            let whole = format!("{}/", self.config.path);
            let workshop = format!("{WORKSHOP}/");
            let mut objects: Vec<Object> = found
                .into_iter()
                .filter(|file| !file.isdir)
                .filter_map(|file| {
                    let name = file.path.strip_prefix(&whole)?;
                    let ours = name > after && !name.starts_with(&workshop);
                    ours.then(|| Object {
                        name: name.to_owned(),
                        bytes: file.length as u64,
                        modified_ms: file.modification_time,
                    })
                })
                .collect();
            objects.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            let more = objects.len() > max;
            objects.truncate(max);
            Ok(Listing { objects, more })
        })
    }

    fn place(&self) -> String {
        format!("HDFS at {}, {}", self.config.authority, self.config.path)
    }
}
