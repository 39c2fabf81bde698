//! A shard with one volume's files in a directory of its own.

use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdcs_backend::Absent;
use hdcs_backend::memory::Share;
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::io::Nanos;
use hdcs_core::cache::{CacheConfig, FillMarks, SsdConfig, Tiering};
use hdcs_core::volume::{Persist, Volume, VolumeConfig};
use hdcs_device::DeviceRegion;
use hdcs_device::create::create_region;
use hdcs_device::ring::RingConfig;
use hdcs_frontend::VolumeNumber;
use hdcs_frontend::nbd::{NbdConfig, NbdSession};
use hdcs_server::data_dir::dirty::LogIdentity;
use hdcs_server::events::Recorder;
use hdcs_server::shard::cache_place::CachePlace;
use hdcs_server::shard::command::{
    Admission, Answer, Command, OpenFailure, SessionFactory, ShardReport, VolumeReport, VolumeSpec,
};
use hdcs_server::shard::{
    CacheDevice, ConnectionLimits, Peers, Residence, ShardConfig, ShardHandle, start,
};
use tokio::sync::oneshot;

use crate::client::Client;

/// Size of the volumes.
pub const BYTES: u64 = 64 << 20;
/// Size of the SSD tier.
pub const CACHE_BYTES: u64 = 64 << 20;
/// Size of their logs.
pub const LOG_BYTES: u64 = 16 << 20;

/// How long anything may take before a test calls it a hang.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Node {
    pub directory: PathBuf,
    handle: ShardHandle,
    thread: Option<JoinHandle<()>>,
}

pub fn config(number: u32) -> VolumeConfig {
    VolumeConfig {
        number,
        uuid: [number as u8; 16],
        bytes: BYTES,
        log_bytes: LOG_BYTES,
        codec: &hdcs_backend::codec::CODECS,
        dirty_age_max: Nanos::from_millis(60_000),
        sequential_cutoff_bytes: 1 << 30,
        read_ahead_bytes_max: 0,
        log_entries_max: LOG_BYTES / 4096,
        backend_extents: true,
        ..hdcs_kit::volume::config(Persist::OnWrite)
    }
}

/// A shard without an SSD tier.
pub fn shard_config() -> ShardConfig {
    ShardConfig {
        shared_cache: Arc::default(),
        origin: hdcs_server::shard::clock::now(),
        number: 0,
        peers: Arc::new(Peers::of(1)),
        cache: CacheConfig {
            dram_blocks: 4096,
            ssd: None,
            ssd_answer_max: Nanos::from_millis(5_000),
        },
        cache_fill: FillMarks::default(),
        cache_tiering: Tiering::default(),
        cache_device: None,
        pool_bytes: 32 << 20,
        touched_bytes: 4 << 20,
        ring: RingConfig::default(),
        durability: None,
        measurements: Arc::default(),
        processor: None,
        connections: ConnectionLimits::default(),
        volumes: Share::unlimited(),
        events: Recorder::nowhere(),
    }
}

/// A volume whose log and image are in `directory`.
pub fn spec(directory: &Path, number: u32, options: &str) -> VolumeSpec {
    let config = config(number);
    VolumeSpec {
        name: format!("v{number}"),
        log: DeviceRegion {
            path: directory.join(format!("log{number}")),
            offset: 0,
            bytes: config.log_bytes,
        },
        is_replicated: false,
        copy: None,
        backend: format!("file:{}/image{number}{options}", directory.display()),
        identity: None,
        encryption: None,
        home: None,
        pins: Vec::new(),
        allow: hdcs_frontend::access::Allow::default(),
        admission: std::sync::Arc::new(Welcome),
        memory: hdcs_backend::memory::VolumeMemory::unlimited(64 << 20),
        shard: None,
        continues: None,
        space: Arc::default(),
        residence: Residence::default(),
        qos: hdcs_core::node::qos::Qos::default(),
        config,
    }
}

/// Lets every log in; the backend of one that was never opened may be made.
struct Welcome;

impl Admission for Welcome {
    fn record(&self) -> Result<Option<LogIdentity>, OpenFailure> {
        Ok(None)
    }

    fn absent(&self) -> Absent {
        Absent::Create
    }

    fn begin(&self, _: LogIdentity, _: Option<&dyn Authenticator>) -> Result<(), OpenFailure> {
        Ok(())
    }
}

/// Make the log of a new volume.
pub fn make_log(spec: &VolumeSpec) {
    create_region(&spec.log.path, spec.log.bytes, &mut |_| ()).unwrap();
    let log = std::fs::OpenOptions::new()
        .write(true)
        .open(&spec.log.path)
        .unwrap();
    log.write_all_at(&Volume::format_log(&spec.config, 7), spec.log.offset)
        .unwrap();
    log.sync_all().unwrap();
}

impl Node {
    pub fn start(directory: &Path) -> Self {
        Self::start_with(directory, 4096, None)
    }

    /// A node with an SSD tier at the given place and next to no DRAM tier.
    pub fn with_ssd(directory: &Path, place: impl CachePlace + 'static) -> Self {
        let device = CacheDevice {
            place: Arc::new(place),
            retry: Nanos::from_millis(20),
        };
        Self::start_with(directory, 16, Some(device))
    }

    fn start_with(directory: &Path, dram_blocks: usize, cache_device: Option<CacheDevice>) -> Self {
        let ssd = cache_device.as_ref().map(|_| SsdConfig {
            bytes: CACHE_BYTES,
            uuid: [0; 16],
            line_blocks: 4,
        });
        let mut config = shard_config();
        config.cache.dram_blocks = dram_blocks;
        config.cache.ssd = ssd;
        config.cache_device = cache_device;
        let (handle, thread) = start(config).unwrap();
        let node = Self {
            directory: directory.to_path_buf(),
            handle,
            thread: Some(thread),
        };
        let path = directory.join("nbd.sock");
        if path.exists() {
            std::fs::remove_file(&path).unwrap();
        }
        let socket = UnixListener::bind(path).unwrap().into();
        let sessions = SessionFactory(Box::new(|_| {
            Box::new(NbdSession::new(NbdConfig::default()))
        }));
        node.ask(|answer| Command::Listen {
            socket,
            sessions,
            answer,
        })
        .unwrap();
        node
    }

    /// A node with one new volume, which is open.
    pub fn with_volume(directory: &Path, options: &str) -> Self {
        let spec = spec(directory, 1, options);
        make_log(&spec);
        let node = Self::start(directory);
        node.open(spec).unwrap();
        node
    }

    pub fn send(&self, command: Command) {
        self.handle.send(command).unwrap();
    }

    /// Send a command, without waiting for its answer.
    pub fn begin<T, E>(
        &self,
        command: impl FnOnce(Answer<T, E>) -> Command,
    ) -> oneshot::Receiver<Result<T, E>> {
        let (answer, receiver) = oneshot::channel();
        self.send(command(answer));
        receiver
    }

    pub fn ask<T, E>(&self, command: impl FnOnce(Answer<T, E>) -> Command) -> Result<T, E> {
        wait(&mut self.begin(command))
    }

    /// Change the size of volume 1, as the control plane does.
    pub fn resize(&self, bytes: u64) -> Result<(), String> {
        let volume = VolumeNumber(1);
        let grows = bytes > self.volume().config.bytes;
        self.ask(|answer| Command::Resize(volume, bytes, answer))?;
        if grows {
            self.ask(|answer| Command::Grow(volume, bytes, answer))?;
        }
        Ok(())
    }

    pub fn open(&self, spec: VolumeSpec) -> Result<(), String> {
        self.ask(|answer| Command::Open(Box::new(spec), answer))
            .map(drop)
            .map_err(|failure| failure.message)
    }

    pub fn close(&self, number: u32, destage: bool) -> Result<(), String> {
        let volume = VolumeNumber(number);
        self.ask(|answer| Command::Close {
            volume,
            destage,
            answer,
        })
        .map(drop)
    }

    pub fn report(&self) -> ShardReport {
        let (answer, mut receiver) = oneshot::channel();
        self.send(Command::Report(answer));
        let started = Instant::now();
        loop {
            match receiver.try_recv() {
                Ok(report) => return *report,
                Err(error) => assert!(started.elapsed() < PATIENCE, "no report: {error}"),
            }
            std::thread::yield_now();
        }
    }

    pub fn volume(&self) -> VolumeReport {
        self.report().volumes.remove(0)
    }

    /// Wait until the volume's report is as wanted.
    pub fn until(&self, what: &str, wanted: impl Fn(&VolumeReport) -> bool) -> VolumeReport {
        let started = Instant::now();
        loop {
            let report = self.volume();
            if wanted(&report) {
                return report;
            }
            assert!(started.elapsed() < PATIENCE, "never {what}: {report:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn connect(&self, volume: u32) -> Client {
        Client::connect(&self.directory.join("nbd.sock"), &format!("v{volume}"))
    }

    /// Wait until the shard's report is as wanted.
    pub fn until_shard(&self, what: &str, wanted: impl Fn(&ShardReport) -> bool) {
        let started = Instant::now();
        while !wanted(&self.report()) {
            let cache = self.report().cache;
            assert!(started.elapsed() < PATIENCE, "never {what}: {cache:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn stop(mut self, destage: bool) {
        self.ask(|answer| Command::Stop { destage, answer })
            .unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A test that has failed already needs no second panic.
        if let Some(thread) = self.thread.take() {
            let (answer, _) = oneshot::channel();
            let destage = false;
            if self.handle.send(Command::Stop { destage, answer }).is_ok()
                && !std::thread::panicking()
            {
                thread.join().unwrap();
            }
        }
    }
}

pub fn wait<T, E>(receiver: &mut oneshot::Receiver<Result<T, E>>) -> Result<T, E> {
    let started = Instant::now();
    loop {
        match receiver.try_recv() {
            Ok(answer) => return answer,
            Err(oneshot::error::TryRecvError::Closed) => panic!("the shard dropped the answer"),
            Err(oneshot::error::TryRecvError::Empty) => {
                assert!(started.elapsed() < PATIENCE, "no answer");
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
