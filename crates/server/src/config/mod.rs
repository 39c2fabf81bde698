//! Configuration: one TOML file, every key with a default, a unit in its name and a line in
//! docs/REFERENCE.md (generated from here; a test fails on drift).
//!
//! Invariants:
//! 1. A [`Config`] has passed every check that needs no device: types, ranges, and relations
//!    between keys.
//! 2. An unknown key, wrong type or wrong unit is an error that names the key and what it takes.

pub mod budget;
pub mod machine;
mod qos;
pub mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cluster::Cluster;
use hdcs_api::value::Value;
use hdcs_core::base::codec::Method;
use hdcs_core::base::limits::{
    CACHE_BYTES_MAX, CACHE_BYTES_MIN, CACHE_PIN_RATIO_MAX, LOG_BYTES_MAX, LOG_BYTES_MIN,
};
use hdcs_core::cache::Tiering;
use hdcs_core::volume::{Discard, LogFailure, Persist, Policy, WhenFull};
use hdcs_device::durability::Durability;
use hdcs_frontend::access::Allow;
use value::{LineKib, Listen, Processors, Setting, Shards, Switch};

const MIB: u64 = 1 << 20;
/// The smallest SSD tier.
const CACHE_MIB_MIN: u64 = CACHE_BYTES_MIN / MIB;
/// Processors that an affinity can name.
const PROCESSORS_MAX: usize = libc::CPU_SETSIZE as usize;

/// One configuration key, described.
#[derive(Clone, Debug)]
pub struct Key {
    /// As written in the file.
    pub name: &'static str,
    /// Its default, as it would be written in the file.
    pub default: String,
    /// What it takes.
    pub expects: String,
    /// What it does.
    pub doc: String,
}

/// Why a value was not taken.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// There is no such key.
    #[error("unknown key `{key}`{suggestion}")]
    Unknown {
        /// As written.
        key: String,
        /// `: did you mean …?`, or the list of keys.
        suggestion: String,
    },
    /// The value is not what the key takes.
    #[error("`{key}` takes {expected}, found {found}")]
    Value {
        /// Which key.
        key: String,
        /// What it takes.
        expected: String,
        /// What was given.
        found: String,
    },
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration: {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What happened.
        source: std::io::Error,
    },
    /// It is not TOML.
    #[error("the configuration is not TOML: {path}: {message}", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and what.
        message: String,
    },
    /// A key or value is wrong.
    #[error("configuration: {path}: {source}", path = path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Which and why.
        source: KeyError,
    },
    /// Keys contradict each other.
    #[error("configuration: {0}")]
    Relation(String),
}

/// Defines a struct of settings: its fields, defaults, how a key is set, and its documentation.
macro_rules! settings {
    (
        $(#[doc = $struct_doc:literal])* $name:ident
        $($(#[doc = $doc:literal])+ $field:ident: $kind:ty = $default:expr, $bounds:expr;)*
    ) => {
        $(#[doc = $struct_doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[doc = $doc])+ pub $field: $kind,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $name {
            /// Every key, in the order of the documentation.
            pub fn keys() -> Vec<Key> {
                vec![$(Key {
                    name: stringify!($field),
                    default: <$kind as Setting>::value(&$default).to_string(),
                    expects: <$kind as Setting>::expects(&$bounds),
                    doc: [$($doc),+].concat().trim().to_owned(),
                }),*]
            }

            /// Set one key; `Ok(false)` if this struct has no such key.
            pub fn set(&mut self, key: &str, value: &Value) -> Result<bool, KeyError> {
                match key {
                    $(stringify!($field) => {
                        self.$field = <$kind as Setting>::accept(value, &$bounds).ok_or_else(|| {
                            KeyError::Value {
                                key: key.to_owned(),
                                expected: <$kind as Setting>::expects(&$bounds),
                                found: value.to_string(),
                            }
                        })?;
                        Ok(true)
                    })*
                    _ => Ok(false),
                }
            }

            /// Every key with its present value.
            pub fn values(&self) -> BTreeMap<String, Value> {
                BTreeMap::from([$((stringify!($field).to_owned(), self.$field.value())),*])
            }
        }
    };
}

/// After the macro, which it uses.
pub mod cluster;

settings! {
    /// What belongs to the node as a whole.
    NodeSettings
    /// Hard cap of the memory of the whole process. It is split at start into the buffer pool, the
    /// DRAM tier, the index of the SSD tier, and what volumes need each. Unless it is set, it is a quarter of what
    /// the machine or the node's control group has, from 1024 to 8192, and three quarters of that at most.
    memory_max_mib: u64 = 1024, 128..=(1 << 20);
    /// Memory for what volumes need each: indexes of their write logs, local stores, maps and buffers of volumes on S3
    /// and HDFS. 0: an eighth of `memory_max_mib`, and two fifths of what is left then for the DRAM tier.
    volumes_memory_mib: u64 = 0, 0..=(1 << 20);
    /// How many MiB of the buffers of requests are touched at the start, all shards together and half of the buffers at
    /// most, so that the first writes need not wait for the kernel to hand out memory. They lie in huge pages where the
    /// system gives such on request. 0: none, memory is taken as it is needed.
    buffers_touched_mib: u64 = 64, 0..=1024;
    /// File or block device of the SSD tier of the read cache.
    cache_path: Option<PathBuf> = None, "`cache` in the data directory";
    /// Size of the SSD tier; 0 turns it off, else at least 16. Unless it is set, it is a tenth of the free room beside
    /// the data directory, from 1024 to 65536 and eight times `memory_max_mib` or half of the room at most; a cache
    /// that is there keeps its size while its index fits the memory.
    cache_total_size_mib: u64 = 1024, 0..=(CACHE_BYTES_MAX / MIB);
    /// Unit of filling and evicting the SSD tier: a large one costs small random reads more, a
    /// smaller one than these would need more than 16 bytes of index per 4 KiB. A change empties
    /// the SSD tier.
    cache_line_kib: LineKib = LineKib::default(), ();
    /// Share of the SSD tier in use, in percent, above which lines are evicted ahead of demand. At 100 it
    /// fills up, all but two segments of 1 MiB.
    cache_ratio_max: u64 = 100, 10..=100;
    /// Share of the SSD tier in use, in percent, down to which that goes on: the difference is room for
    /// a burst of fills or a promotion. It must not be above `cache_ratio_max`.
    cache_ratio_health: u64 = 100, 10..=100;
    /// Share of the SSD tier, in percent, that pins of all volumes may take.
    cache_pin_ratio_max: u64 = 50, 0..=u64::from(CACHE_PIN_RATIO_MAX);
    /// By what the read cache chooses what it keeps: how recently and how often it was read, or that weighed with what
    /// reading it again costs, as measured for each volume. Volumes that cost the same are treated alike.
    cache_tiering: Tiering = Tiering::Benefit, ();
    /// How long the SSD tier's device may take for one operation. Beyond it the tier is given up:
    /// reads and destage go on without it.
    cache_answer_max_ms: u64 = 5_000, 10..=600_000;
    /// How long after the SSD tier was given up its device is tried again. The pause doubles, up to
    /// 32 times as long, while the device keeps failing.
    cache_retry_ms: u64 = 10_000, 10..=3_600_000;
    /// How often the heat maps of volumes with `cache_warm_up = "on"` are written to the data directory,
    /// beside a clean stop.
    heat_save_interval_s: u64 = 300, 1..=86_400;
    /// Directory for the write logs of volumes that are created from now on.
    log_path: Option<PathBuf> = None, "each volume's own directory in the data directory";
    /// Size of the write log of volumes that are created from now on. Unless it is set, it is a quarter of
    /// `memory_max_mib`, from 512 to 2048, a sixteenth of the free room at most. Then a log takes a 64th of what is free,
    /// but 16 at least, when it is made, more as it fills up, and gives back what it does not need where others do. A log
    /// whose size is set takes all of it at once, and keeps it.
    log_size_mib: u64 = 512, (LOG_BYTES_MIN / MIB)..=(LOG_BYTES_MAX / MIB);
    /// How writes to the write logs and to the SSD tier are made durable: by `RWF_DSYNC`, by `fdatasync` after the write, or
    /// by what is faster: as measured on each device when it is opened, and on a write log while it is used.
    log_durability: Option<Durability> = None, ();
    /// Threads of each shard that write to the write logs and wait for the device while that was measured to be clearly faster, as on
    /// a busy processor; 0: the kernel's workers always do it.
    log_writer_threads: u64 = 2, 0..=64;
    /// Whether the threads of the data path ask for the highest priority (nice -20, which needs
    /// CAP_SYS_NICE), so that on a busy machine they never wait for the end of a time slice.
    raise_priority: bool = true, ();
    /// Threads of the data path (shards), each with volumes, buffers and a DRAM tier of its own; memory is split between
    /// them. A volume and its clients are on one of them at a time. auto: one shard on up to 4 processors; on more, one for
    /// every 4 processors, from 2 to 8, and no more than one for each 1024 of `memory_max_mib`; as many as
    /// `shard_processor` names, if that is set.
    shards: Shards = Shards::default(), ();
    /// The processors that shards keep to: the first one is shard 0's, and so on, such as [2, 3], "2,3" or "0-3,8"; one
    /// for each of `shards`.
    shard_processor: Processors = Processors::default(), 0..=(PROCESSORS_MAX - 1);
    /// Where NBD clients connect. A relative unix path is below the data directory. TCP beyond
    /// loopback needs TLS and certificates of clients.
    nbd_listen: Vec<Listen> = vec![Listen::Unix("nbd.sock".into())], ();
    /// NBD connections at once on each address of `nbd_listen`, whatever the others have; a newer one is closed at
    /// once, with a line in the log. It is lowered if the limit of open files has no room for them.
    nbd_connections_max: u64 = 1024, 1..=4096;
    /// How long an NBD client may take for its TLS handshake, and then to open an export.
    nbd_handshake_max_ms: u64 = 10_000, 100..=3_600_000;
    /// How long an NBD client may leave one MiB of a write's data incomplete, or take nothing of its
    /// replies. Then its connection is ended, and what it held is given back.
    nbd_stall_max_ms: u64 = 30_000, 100..=3_600_000;
    /// What an NBD client takes of its replies a second at least, over `nbd_stall_max_ms` while some wait
    /// for it; otherwise its connection is ended. 0: any rate will do.
    nbd_rate_min_kib_s: u64 = 64, 0..=1_048_576;
    /// Certificate chain (PEM) of the NBD server; turns TLS on for every TCP listener.
    nbd_tls_cert_file: Option<PathBuf> = None, "no TLS";
    /// Private key (PEM) of the certificate.
    nbd_tls_key_file: Option<PathBuf> = None, "no TLS";
    /// Authorities (PEM) that must have signed a client's certificate. Which volumes a client may open says `allow`.
    nbd_tls_client_ca_file: Option<PathBuf> = None, "clients are asked for no certificate";
    /// Lists (PEM) of the certificates that these authorities have revoked, at least one of each authority. A list
    /// counts also after its time for the next one.
    nbd_tls_client_crl_file: Option<PathBuf> = None, "none is revoked";
    /// TLS handshakes under way at once. Beyond, those whose client does not go on make room, the oldest first.
    nbd_tls_handshakes_max: u64 = 128, 1..=4096;
    /// TLS handshakes that begin in a second; further ones wait for their turn.
    nbd_tls_handshakes_s: u64 = 200, 1..=100_000;
    /// Whether TCP that other hosts can reach is served to clients without a certificate: whoever reaches it opens
    /// every volume that has no `allow`.
    nbd_tls_open: bool = false, ();
    /// Where Prometheus scrapes `/metrics`, beside the control socket.
    metrics_listen: Option<SocketAddr> = None, ();
    /// On a graceful stop, write everything dirty to the backends first. Without it the dirty data
    /// stays in the write logs, durable, and the next start goes on with it.
    destage_on_stop: bool = false, ();
    /// How long a graceful stop waits for that before it leaves the rest in the write logs.
    destage_on_stop_max_ms: u64 = 60_000, 0..=86_400_000;
}

settings! {
    /// What each volume can have differently.
    VolumeSettings
    /// Clients that may open the volume over TCP, by the alternative names of their certificates; "any": all whose
    /// certificate is good. Empty: no certificate opens it. It does not restrict the unix socket.
    allow: Allow = Allow::default(), ();
    /// What the cache does with writes and reads: acknowledge writes from the write log and destage them
    /// later; have the backend acknowledge them, and keep them in the cache or not; refuse them; or
    /// leave the cache out for reads too. A change while clients go on takes until the log is empty.
    policy: Policy = Policy::WriteBack, ();
    /// Under write-back, when a write counts as durable: before its acknowledgement, at the client's next flush, or
    /// on-write until the client's first flush shows that it knows barriers.
    persist: Persist = Persist::Auto, ();
    /// Whether data is compressed in the write log, in the SSD tier and in the objects of a bucket, and how.
    compression: Option<Method> = None, ();
    /// What a write gets when the log is full and the backend takes no data, or the log's device does not answer.
    when_full: WhenFull = WhenFull::Wait, ();
    /// What becomes of the volume when its log's device takes no writes any more: it refuses writes; or what the log
    /// holds is written to the backend, and from then on what clients write, which the backend acknowledges.
    log_failure: LogFailure = LogFailure::ReadOnly, ();
    /// What becomes of a client's discard (trim): pass it to the backend, which gives the space back, or acknowledge
    /// and ignore it. NBD clients are not offered trim while it is ignored.
    discard: Discard = Discard::Pass, ();
    /// Deadline of destage: the oldest dirty data is meant to be no older.
    destage_age_max_ms: u64 = 30_000, 1..=86_400_000;
    /// Share of the log in use, in percent, below which destage waits for data to age.
    dirty_ratio_min: u64 = 50, 0..=90;
    /// Share of the log in use, in percent, above which writes are slowed.
    dirty_ratio_max: u64 = 70, 5..=95;
    /// Backend writes in flight at most during destage.
    cache_flush_queue_depth: u64 = 64, 1..=256;
    /// How long the backend may take for one operation before the volume counts as degraded. The
    /// operation is waited for all the same.
    backend_answer_max_ms: u64 = 5_000, 10..=600_000;
    /// How long the device of the write log may take for one operation before the volume counts as degraded. The
    /// operation is waited for all the same; but a volume that closes waits no longer, and with `when_full = "error"`
    /// no client does: it gets EIO.
    log_answer_max_ms: u64 = 5_000, 10..=600_000;
    /// In storage mode, how often what is dirty is tiered out by itself; 0: only when a flush is asked for.
    tier_interval_s: u64 = 0, 0..=31_536_000;
    /// How often everything that the volume has is read and verified, in hours; 0: only by
    /// `hdcs volume scrub`.
    scrub_interval_h: u64 = 168, 0..=8760;
    /// MiB that a scrub reads a second at most.
    scrub_rate_mib_s: u64 = 8, 1..=100_000;
    /// A sequential read longer than this stops filling the read cache.
    sequential_cutoff_kib: u64 = 4096, 0..=(1 << 30);
    /// A line goes to the SSD tier once it was read so often of late, and to DRAM before; 1 is at the first
    /// read. More spares the SSD what is read once.
    cache_promote_hits: u64 = 1, 1..=8;
    /// Pins and warm-ups are filled no faster than this, beside the clients' requests.
    cache_warm_rate_mib_s: u64 = 200, 1..=100_000;
    /// Whether a volume that is opened over a cache that has lost what was hot is warmed up from its last heat
    /// map, as far as the cache has free room.
    cache_warm_up: Switch = Switch::Off, ();
    /// Largest read-ahead of a sequential read; 0 turns it off.
    read_ahead_max_kib: u64 = 1024, 0..=16384;
    /// Most data acknowledged and not yet durable, under persist on-flush.
    unpersisted_max_kib: u64 = 8192, 4..=(1 << 20);
    /// Longest time that an acknowledged write stays not durable, under persist on-flush.
    unpersisted_age_max_ms: u64 = 1000, 1..=60_000;
    /// Requests a second at most; 0: no limit. Reads, writes, discards and zeroes count, flushes do not.
    iops_max: u64 = 0, 0..=qos::IOPS_MAX;
    /// MiB read and written a second at most; 0: no limit.
    bandwidth_max_mib_s: u64 = 0, 0..=qos::BANDWIDTH_MAX_MIB_S;
    /// Requests beyond `iops_max` that a volume may save up while it asks for less, and then have at
    /// once. To allow B a second for S seconds, give (B - `iops_max`) x S.
    iops_burst: u64 = 0, 0..=qos::BURST_MAX;
    /// MiB beyond `bandwidth_max_mib_s` that it may save up.
    bandwidth_burst_mib: u64 = 0, 0..=qos::BURST_MAX;
    /// Requests a second that the volume gets before others get more, if it asks for them; 0: none.
    iops_min: u64 = 0, 0..=qos::IOPS_MAX;
    /// MiB a second that the volume gets before others get more; 0: none.
    bandwidth_min_mib_s: u64 = 0, 0..=qos::BANDWIDTH_MAX_MIB_S;
    /// Share of what is left, in proportion to those of the volumes that want it too; 0: none was
    /// given, which counts as 100.
    qos_weight: u64 = 0, 0..=hdcs_core::node::qos::WEIGHT_MAX;
}

impl VolumeSettings {
    /// Check the relations between keys.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.dirty_ratio_min >= self.dirty_ratio_max {
            return Err(ConfigError::Relation(format!(
                "dirty_ratio_min ({}) must be below dirty_ratio_max ({})",
                self.dirty_ratio_min, self.dirty_ratio_max
            )));
        }
        self.check_qos()
    }

    /// Set one key that must exist.
    pub fn set_known(&mut self, key: &str, value: &Value) -> Result<(), KeyError> {
        if self.set(key, value)? {
            return Ok(());
        }
        Err(Self::unknown(key))
    }

    /// Check that a key exists.
    pub fn check_key(key: &str) -> Result<(), KeyError> {
        if Self::keys().iter().any(|k| k.name == key) {
            return Ok(());
        }
        Err(Self::unknown(key))
    }

    fn unknown(key: &str) -> KeyError {
        let of_node = NodeSettings::keys().iter().any(|k| k.name == key);
        KeyError::Unknown {
            key: key.to_owned(),
            suggestion: if of_node {
                ": it belongs to the node, not to a volume; set it in the configuration file"
                    .to_owned()
            } else {
                suggest(key, Self::keys().iter().map(|k| k.name))
            },
        }
    }
}

/// Settings whose defaults follow from the machine: [`machine`].
const BY_MACHINE: [&str; 3] = ["memory_max_mib", "cache_total_size_mib", "log_size_mib"];

/// The configuration of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// What belongs to the node as a whole.
    pub node: NodeSettings,
    /// What volumes have unless they were given something else.
    pub volume: VolumeSettings,
    /// The cluster that it is a node of; none: it is alone.
    pub cluster: Option<Cluster>,
    /// The keys that were set.
    given: BTreeSet<String>,
}

impl Config {
    /// Read and check the file at `path`.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Whether a key was set, and not chosen.
    pub fn is_given(&self, key: &str) -> bool {
        self.given.contains(key)
    }

    /// Parse and check `text`; `path` is for errors only.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error
                .span()
                .map_or(0, |span| text[..span.start].matches('\n').count() + 1);
            ConfigError::Syntax {
                path: path.to_owned(),
                message: format!("line {line}: {}", error.message()),
            }
        })?;
        let mut config = Self::default();
        let at = |source| ConfigError::Key {
            path: path.to_owned(),
            source,
        };
        for (key, value) in &table {
            if key == cluster::SECTION {
                config.cluster = Some(Cluster::parse(value).map_err(at)??);
                continue;
            }
            config.set(key, value).map_err(at)?;
        }
        let processors = config.node.shard_processor.numbers().len();
        if config.node.shards.is_auto() && processors > 0 {
            config.node.shards.choose(processors.min(Shards::MAX));
        }
        config.check_relations()?;
        // What the machine decides is checked once that is known.
        if config.is_given("memory_max_mib") {
            config.check_memory()?;
        }
        Ok(config)
    }

    fn set(&mut self, key: &str, value: &toml::Value) -> Result<(), KeyError> {
        let known = Self::keys();
        let Some(described) = known.iter().find(|k| k.name == key) else {
            return Err(KeyError::Unknown {
                key: key.to_owned(),
                suggestion: suggest(key, known.iter().map(|k| k.name)),
            });
        };
        let value = value::from_toml(value).map_err(|found| KeyError::Value {
            key: key.to_owned(),
            expected: described.expects.clone(),
            found,
        })?;
        let _in_one_of_them = self.node.set(key, &value)? || self.volume.set(key, &value)?;
        self.given.insert(key.to_owned());
        Ok(())
    }

    /// Every key, in the order of the documentation.
    pub fn keys() -> Vec<Key> {
        let mut keys = NodeSettings::keys();
        keys.extend(VolumeSettings::keys());
        keys
    }

    /// Check the relations between keys, and that the memory suffices.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_relations()?;
        self.check_memory()
    }

    fn check_memory(&self) -> Result<(), ConfigError> {
        budget::Budget::of(&self.node, &self.volume).map(|_| ())
    }

    fn check_relations(&self) -> Result<(), ConfigError> {
        let node = &self.node;
        let refuse = |message: String| Err(ConfigError::Relation(message));
        if (1..CACHE_MIB_MIN).contains(&node.cache_total_size_mib) {
            return refuse(format!(
                "`cache_total_size_mib` takes 0 (no SSD tier) or at least {CACHE_MIB_MIN}, found {}",
                node.cache_total_size_mib
            ));
        }
        if node.cache_ratio_health > node.cache_ratio_max {
            return refuse(format!(
                "cache_ratio_health ({}) must not be above cache_ratio_max ({}): eviction works down to it",
                node.cache_ratio_health, node.cache_ratio_max
            ));
        }
        node.shard_processor
            .check(node.shards.count())
            .or_else(refuse)?;
        let has_tls = node.nbd_tls_cert_file.is_some();
        if has_tls != node.nbd_tls_key_file.is_some() {
            return refuse(
                "`nbd_tls_cert_file` and `nbd_tls_key_file` belong together: give both or none"
                    .to_owned(),
            );
        }
        let has_clients = node.nbd_tls_client_ca_file.is_some();
        if has_clients && !has_tls {
            return refuse(
                "`nbd_tls_client_ca_file` needs `nbd_tls_cert_file` and `nbd_tls_key_file`"
                    .to_owned(),
            );
        }
        if node.nbd_tls_client_crl_file.is_some() && !has_clients {
            return refuse(
                "`nbd_tls_client_crl_file` needs `nbd_tls_client_ca_file`, whose lists it holds"
                    .to_owned(),
            );
        }
        if has_clients && node.nbd_tls_open {
            return refuse(
                "`nbd_tls_client_ca_file` asks clients for certificates and `nbd_tls_open` does not: \
                 give one of them"
                    .to_owned(),
            );
        }
        for listen in &node.nbd_listen {
            if let Listen::Tcp(address) = listen
                && !address.ip().is_loopback()
                && !has_tls
            {
                return refuse(format!(
                    "`nbd_listen` has {listen}, which other hosts can reach, without TLS: give \
                     `nbd_tls_cert_file`, `nbd_tls_key_file` and `nbd_tls_client_ca_file`, or listen on \
                     127.0.0.1 or a unix socket"
                ));
            }
            if let Listen::Tcp(address) = listen
                && !address.ip().is_loopback()
                && !has_clients
                && !node.nbd_tls_open
            {
                return refuse(format!(
                    "`nbd_listen` has {listen}, which other hosts can reach, and clients are asked for no \
                     certificate, so that whoever reaches it would open volumes: give \
                     `nbd_tls_client_ca_file`, or say `nbd_tls_open = true` if that is what you want"
                ));
            }
        }
        self.volume.check()
    }

    /// The tables of keys for docs/REFERENCE.md.
    pub fn documentation() -> String {
        let mut text = String::new();
        for (title, keys) in [
            ("Of the node", NodeSettings::keys()),
            ("Of volumes", VolumeSettings::keys()),
            (
                "Of a fixed cluster: `[cluster]`",
                cluster::ClusterSettings::keys(),
            ),
            (
                "Of each of its nodes: `[cluster.nodes.NAME]`",
                cluster::NodeEntry::keys(),
            ),
        ] {
            text.push_str("\n### ");
            text.push_str(title);
            text.push_str("\n\n| key | default | takes | meaning |\n|---|---|---|---|\n");
            for key in keys {
                let row = [
                    format!("`{}`", key.name),
                    if BY_MACHINE.contains(&key.name) {
                        "by the machine".to_owned()
                    } else if cluster::NEEDED.contains(&key.name) {
                        "must be given".to_owned()
                    } else {
                        format!("`{}`", key.default)
                    },
                    key.expects,
                    key.doc,
                ];
                text.push_str("| ");
                text.push_str(&row.join(" | "));
                text.push_str(" |\n");
            }
        }
        text.push('\n');
        text
    }
}

/// Keys of the first HDCS, and what does the same now.
const FORMER: [(&str, &str); 6] = [
    (
        "cache_dirty_ratio_min",
        "it is `dirty_ratio_min` now, in percent",
    ),
    (
        "cache_dirty_ratio_max",
        "it is `dirty_ratio_max` now, in percent",
    ),
    (
        "cache_flush_interval",
        "data is written back by age now: `destage_age_max_ms`",
    ),
    (
        "cache_evict_interval",
        "eviction runs whenever it is due, from `cache_ratio_max` down to `cache_ratio_health`",
    ),
    ("cache_total_size", "it is `cache_total_size_mib` now"),
    (
        "object_size",
        "the unit of the read cache is `cache_line_kib` now",
    ),
];

/// What to say beside an unknown key: what a former one is now, the nearest one if it is near, else
/// all of them.
fn suggest<'a>(key: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    if let Some((_, now)) = FORMER.iter().find(|(former, _)| *former == key) {
        return format!(": {now}");
    }
    // The unit is what people get wrong most often, and it changes many letters.
    let stem = |name: &str| {
        let (stem, unit) = name.rsplit_once('_').unwrap_or((name, ""));
        let is_unit = matches!(
            unit,
            "mib" | "kib" | "gib" | "mb" | "kb" | "gb" | "ms" | "s" | "sec" | "us" | "bytes" | "ns"
        );
        (if is_unit { stem } else { name }).to_owned()
    };
    let nearest = known
        .clone()
        .map(|name| {
            let whole = strsim::jaro_winkler(key, name);
            let stems = strsim::jaro_winkler(&stem(key), &stem(name));
            (name, whole.max(stems))
        })
        .max_by(|a, b| a.1.total_cmp(&b.1));
    match nearest {
        Some((name, likeness)) if likeness > 0.85 => format!(": did you mean `{name}`?"),
        _ => format!(": the keys are {}", known.collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("test.toml"))
    }

    fn refused(text: &str) -> String {
        let checked = parse(text).and_then(|config| config.check());
        checked.expect_err(text).to_string()
    }

    #[test]
    fn config_empty_is_the_default() {
        assert_eq!(parse("").unwrap(), Config::default());
    }

    #[test]
    fn config_every_default_is_accepted_when_written_out() {
        let text: String = Config::keys()
            .iter()
            .map(|key| format!("{} = {}", key.name, key.default))
            .collect::<Vec<_>>()
            .join("\n");
        let parsed = parse(&text).unwrap();
        assert_eq!(parsed.node, NodeSettings::default());
        assert_eq!(parsed.volume, VolumeSettings::default());
    }

    #[test]
    fn config_sets_what_it_says() {
        let config = parse(
            "memory_max_mib = 1024\npersist = \"on-write\"\nnbd_listen = [\"tcp:127.0.0.1:1\"]\n\
             shard_processor = 1\nlog_durability = \"fdatasync\"\ncache_line_kib = 32",
        )
        .unwrap();
        assert_eq!(config.node.memory_max_mib, 1024);
        assert_eq!(config.volume.persist, Persist::OnWrite);
        assert_eq!(config.node.nbd_listen.len(), 1);
        assert_eq!(config.node.shard_processor.numbers(), [1]);
        assert_eq!(config.node.log_durability, Some(Durability::Fdatasync));
        assert_eq!(config.node.cache_line_kib.blocks(), 8);
    }

    #[test]
    fn config_of_shards_takes_a_number_and_a_list_of_processors() {
        let config = parse("shards = \"auto\"").unwrap();
        assert_eq!(config.node.shards.count(), 1);
        for processors in ["\"2, 0\"", "[2, 0]", "[\"2\", \"0\"]"] {
            // There are as many as it names.
            for shards in ["", "shards = \"auto\"", "shards = 2"] {
                let text = format!("{shards}\nshard_processor = {processors}");
                let config = parse(&text).unwrap();
                assert_eq!(config.node.shards.count(), 2, "{text}");
                assert_eq!(config.node.shard_processor.numbers(), [2, 0], "{text}");
            }
        }
        for (processors, numbers) in [
            ("\"0-1\"", vec![0, 1]),
            ("\"1-3, 8, 5 - 5\"", vec![1, 2, 3, 8, 5]),
            ("[\"6-7\", \"2\"]", vec![6, 7, 2]),
            ("\"\"", vec![]),
        ] {
            let text = format!("shard_processor = {processors}");
            let config = parse(&text).unwrap();
            assert_eq!(config.node.shard_processor.numbers(), numbers, "{text}");
            assert_eq!(config.node.shards.count(), numbers.len().max(1), "{text}");
        }
    }

    #[test]
    fn config_unknown_key_suggests_the_nearest() {
        assert!(refused("memory_max_mb = 1").contains("did you mean `memory_max_mib`?"));
        assert!(refused("destage_age_max_s = 1").contains("did you mean `destage_age_max_ms`?"));
        assert!(refused("dirty_ration_max = 1").contains("did you mean `dirty_ratio_max`?"));
        assert!(refused("cache_flush_interval = 10").contains("`destage_age_max_ms`"));
        assert!(refused("colour = 1").contains("the keys are memory_max_mib,"));
    }

    #[test]
    fn config_former_keys_point_to_keys_that_are_there() {
        for (former, now) in FORMER {
            assert!(Config::keys().iter().all(|key| key.name != former));
            let names = now.split('`').skip(1).step_by(2);
            for name in names {
                assert!(Config::keys().iter().any(|key| key.name == name), "{name}");
            }
        }
    }

    #[test]
    fn config_wrong_type_or_unit_names_the_key_and_what_it_takes() {
        for (text, found) in [
            ("memory_max_mib = \"1G\"", "found \"1G\""),
            ("memory_max_mib = 1.5", "found the fraction 1.5"),
            ("memory_max_mib = -1", "found -1"),
            ("memory_max_mib = true", "found true"),
            ("memory_max_mib = 1", "found 1"),
            ("[memory_max_mib]", "found a table"),
        ] {
            let error = refused(text);
            assert!(
                error.contains("`memory_max_mib` takes a whole number from 128 to")
                    && error.contains(found),
                "{error}"
            );
        }
        for (text, part) in [
            ("cache_line_kib = 8", "takes 16, 32 or 64, found 8"),
            ("cache_total_size_mib = 4194305", "from 0 to 4194304"),
            ("shard_processor = 1024", "from 0 to 1023"),
            ("shard_processor = \"any\"", "empty: any"),
            ("shard_processor = \"1,\"", "empty: any"),
            ("shard_processor = \"1,1024\"", "from 0 to 1023"),
            ("shard_processor = \"3-1\"", "ranges in quotes"),
            ("shard_processor = \"1-1024\"", "from 0 to 1023"),
            ("shard_processor = \"-1\"", "from 0 to 1023"),
            ("shard_processor = -1", "from 0 to 1023"),
            ("shard_processor = \"1-2-3\"", "from 0 to 1023"),
            (
                "shards = 0",
                "\"auto\" or a whole number from 1 to 64, found 0",
            ),
            ("shards = 65", "from 1 to 64"),
            ("shards = \"all\"", "\"auto\""),
            ("shards = -1", "\"auto\""),
            (
                "log_durability = \"fsync\"",
                "\"measure\", \"dsync\", \"fdatasync\"",
            ),
        ] {
            let error = refused(text);
            assert!(error.contains(part), "{error}");
        }
        assert!(refused("persist = \"never\"").contains("\"on-write\", \"on-flush\", \"auto\""));
        assert!(refused("nbd_listen = [1]").contains("a list of"));
        assert!(refused("a = [").contains("line 1"));
    }

    #[test]
    fn config_contradictions_are_refused() {
        for (text, part) in [
            ("nbd_listen = [\"tcp:0.0.0.0:10809\"]", "without TLS"),
            (
                "nbd_listen = [\"tcp:0.0.0.0:10809\"]\nnbd_tls_cert_file = \"x\"\nnbd_tls_key_file = \"x\"",
                "asked for no certificate",
            ),
            (
                "nbd_listen = [\"tcp:[::]:0\"]\nnbd_tls_open = true",
                "without TLS",
            ),
            (
                "nbd_tls_cert_file = \"x\"\nnbd_tls_key_file = \"x\"\nnbd_tls_client_ca_file = \"x\"\n\
                 nbd_tls_open = true",
                "give one of them",
            ),
            ("allow = [\"*\"]", "`allow` takes a list of names"),
            ("nbd_tls_cert_file = \"x\"", "belong together"),
            ("nbd_tls_client_ca_file = \"x\"", "needs"),
            ("cache_total_size_mib = 3", "at least 16"),
            (
                "shards = 2\nshard_processor = \"1\"",
                "`shard_processor` names 1 processor for 2 shards",
            ),
            (
                "shards = 1\nshard_processor = [\"0\", \"1\"]",
                "`shard_processor` names 2 processors for 1 shard",
            ),
            (
                "shard_processor = \"0-64\"",
                "`shard_processor` names 65 processors for 64 shards",
            ),
            ("shard_processor = \"0-2,1\"", "names processor 1 twice"),
            (
                "shards = 2\nshard_processor = [1, 1]",
                "names processor 1 twice",
            ),
            ("memory_max_mib = 256\nshards = 64", "by 64 shards"),
            ("dirty_ratio_min = 80", "must be below"),
            ("cache_ratio_max = 80", "must not be above"),
            ("cache_total_size_mib = 1000000", "memory_max_mib"),
        ] {
            let error = refused(text);
            assert!(error.contains(part), "{error}");
        }
    }

    /// `HDCS_UPDATE=1 cargo test` writes the tables of docs/REFERENCE.md.
    #[test]
    fn settings_reference_has_not_drifted() {
        hdcs_kit::documents::check_section("REFERENCE.md", "settings", &Config::documentation());
    }
}
