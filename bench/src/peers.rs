//! Who is compared, and how each is brought up.
//!
//! All peers store on the same file system, on files that were written before. They run all the
//! time and idle while another one is measured; a volume of HDCS is destaged before its turn ends,
//! so that it does not work on behind its neighbour's back.

use std::path::PathBuf;
use std::process::Command;

use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::cost::Meter;
use crate::failure::{Context, Result};
use crate::fio::{self, Load, Outcome, Target};
use crate::lab::{self, Lab};
use crate::node::{Node, VolumeOptions};
use crate::process::{Server, Usage};
use crate::profiles::{CACHE_LINE_BYTES, Profile};
use crate::results::Directory;

/// Sizes that a comparison is measured with.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Every peer's disk.
    pub disk_bytes: u64,
    /// The volume of misses: so large that few reads hit what an earlier one brought in.
    miss_disk_bytes: u64,
    /// The range of reads that are meant to hit: it fits the DRAM tier of one node and the SSD tier of the other.
    hit_span_bytes: u64,
    /// Logs that take a whole run of writes, so that the run measures the log and not the destage; that is what
    /// `sustained` and `steady` are for.
    log_bytes: u64,
    /// Writes of one run at most: with those that warm up, below the share of the log at which destage begins.
    written_bytes_max: u64,
    /// Each of four volumes that are written at once, and its log.
    four_disk_bytes: u64,
    four_log_bytes: u64,
    /// A volume whose log is overrun, and its log.
    sustained_disk_bytes: u64,
    sustained_log_bytes: u64,
}

impl Sizes {
    /// On a disk.
    const LARGE: Self = Self {
        disk_bytes: 2 << 30,
        miss_disk_bytes: 8 << 30,
        hit_span_bytes: 1 << 30,
        log_bytes: 2 << 30,
        written_bytes_max: 768 << 20,
        four_disk_bytes: 512 << 20,
        four_log_bytes: 1 << 30,
        sustained_disk_bytes: 1 << 30,
        sustained_log_bytes: 256 << 20,
    };
    /// In memory, and of a short run.
    const SMALL: Self = Self {
        disk_bytes: 512 << 20,
        miss_disk_bytes: 1 << 30,
        hit_span_bytes: 256 << 20,
        log_bytes: 2 << 30,
        written_bytes_max: 768 << 20,
        four_disk_bytes: 256 << 20,
        four_log_bytes: 512 << 20,
        sustained_disk_bytes: 256 << 20,
        sustained_log_bytes: 64 << 20,
    };

    /// For a place, and a short run.
    pub fn of(place: Place, is_quick: bool) -> Self {
        match place {
            Place::Disk if !is_quick => Self::LARGE,
            Place::Disk | Place::Memory => Self::SMALL,
        }
    }
}

/// Reads of one run of misses, for the same reason as that their volume is large.
const MISSES_MAX: u64 = 64 << 10;
/// How often a sustained load overruns the log, and how long it may take.
const OVERRUN: u64 = 4;
const SUSTAINED_SECONDS_MAX: u32 = 60;
/// A run that warms up writes this share of what the run itself may write.
const WARM_SHARE: u64 = 8;
/// Volumes that are written at once.
const FOUR: u32 = 4;
/// What is a file system in memory everywhere.
pub const MEMORY: &str = "/dev/shm";

/// What logs, backends and the cache device lie on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The device of the data directory.
    Disk,
    /// Memory (tmpfs, which takes `O_DIRECT` since Linux 6.6): the device costs nothing and does not stall, so what is
    /// left is the processor.
    Memory,
}

impl Place {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Disk, Self::Memory];

    /// Name in results, and of the option.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Memory => "memory",
        }
    }
}

/// One contestant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// fio on a file with io_uring: what the device can do, not durable.
    Device,
    /// The same with each write durable (`O_DSYNC`): what the device can do of what a write log promises.
    DeviceDurable,
    /// nbdkit's memory plugin: what NBD can do without storing anything.
    Nbdkit,
    /// qemu-nbd on a raw file, cache=none, io_uring.
    Qemu,
    /// HDCS, writes durable before the ack.
    OnWrite,
    /// HDCS, writes durable at the flush.
    OnFlush,
    /// HDCS, reads from its DRAM tier.
    DramHit,
    /// HDCS, reads from its SSD tier.
    SsdHit,
    /// HDCS, reads that its caches have not.
    Miss,
    /// HDCS, four volumes at once, each with the whole load.
    Four,
    /// HDCS with a small log that is overrun, over a file on the same device.
    Sustained,
    /// The same over a file in memory.
    SustainedMemory,
    /// Four volumes with smaller logs that are overrun at once, each with the whole load.
    SustainedFour,
    /// Reads of the volume whose log is overrun meanwhile.
    Beside,
}

impl Peer {
    /// All of them, in the order of the tables.
    pub const ALL: [Self; 14] = [
        Self::Device,
        Self::DeviceDurable,
        Self::Nbdkit,
        Self::Qemu,
        Self::OnWrite,
        Self::OnFlush,
        Self::DramHit,
        Self::SsdHit,
        Self::Miss,
        Self::Four,
        Self::Sustained,
        Self::SustainedMemory,
        Self::SustainedFour,
        Self::Beside,
    ];

    /// Name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::DeviceDurable => "device-durable",
            Self::Nbdkit => "nbdkit-memory",
            Self::Qemu => "qemu-nbd",
            Self::OnWrite => "hdcs-on-write",
            Self::OnFlush => "hdcs-on-flush",
            Self::DramHit => "hdcs-dram-hit",
            Self::SsdHit => "hdcs-ssd-hit",
            Self::Miss => "hdcs-miss",
            Self::Four => "hdcs-four",
            Self::Sustained => "hdcs-sustained",
            Self::SustainedMemory => "hdcs-sust-mem",
            Self::SustainedFour => "hdcs-sust-four",
            Self::Beside => "hdcs-beside",
        }
    }

    /// Whether it is a face of HDCS.
    pub const fn is_hdcs(self) -> bool {
        !matches!(
            self,
            Self::Device | Self::DeviceDurable | Self::Nbdkit | Self::Qemu
        )
    }

    /// Whether it is measured under a profile there.
    pub fn takes(self, profile: &Profile, place: Place) -> bool {
        let is_there = match place {
            Place::Disk => true,
            Place::Memory => {
                use Peer::{DramHit, Four, Nbdkit, OnFlush, OnWrite};
                profile.in_memory && matches!(self, Nbdkit | OnWrite | OnFlush | DramHit | Four)
            }
        };
        is_there && profile.peers.contains(&self)
    }

    /// Whether it is several volumes that are written at once.
    pub const fn is_four(self) -> bool {
        matches!(self, Self::Four | Self::SustainedFour)
    }

    /// The volume that is its face.
    const fn volume(self) -> &'static str {
        match self {
            Self::OnFlush => "on-flush",
            Self::DramHit => "dram",
            Self::SsdHit => "ssd",
            Self::Miss => "miss",
            Self::Sustained | Self::Beside => "sustained",
            Self::SustainedMemory => "sustained-mem",
            _ => "on-write",
        }
    }
}

/// Everything that is up for a comparison.
pub struct Peers<'a> {
    lab: &'a Lab,
    sizes: Sizes,
    nbdkit: Option<Server>,
    qemu: Option<Server>,
    /// Much DRAM: writes, and reads that hit DRAM.
    node: Option<Node>,
    /// Little DRAM and an SSD tier that holds all: reads that hit it, and misses.
    small: Option<Node>,
    /// Small logs.
    sustained: Option<Node>,
    /// Where the backend in memory is.
    memory: Option<TempDir>,
}

/// Configuration of the node with much memory: DRAM for the hits, and indexes of the large logs.
const LARGE_CONFIG: &str = "memory_max_mib = 4096\ncache_total_size_mib = 1024\n";
/// Configuration of the node whose DRAM tier holds next to nothing.
const SMALL_CONFIG: &str = "memory_max_mib = 256\ncache_total_size_mib = 3072\n";
/// Configuration of the node with the small logs.
const SUSTAINED_CONFIG: &str = "memory_max_mib = 1024\ncache_total_size_mib = 0\n";

/// Name of one of the volumes that are written at once.
fn one_of_four(peer: Peer, number: u32) -> String {
    let name = if peer == Peer::Four {
        "four"
    } else {
        "overrun"
    };
    format!("{name}{number}")
}

impl<'a> Peers<'a> {
    /// Bring up what these need.
    pub fn up(lab: &'a Lab, peers: &[Peer], place: Place, sizes: Sizes) -> Result<Self> {
        let mut this = Self {
            lab,
            sizes,
            nbdkit: None,
            qemu: None,
            node: None,
            small: None,
            sustained: None,
            memory: None,
        };
        if place == Place::Disk {
            let device = this.device_file();
            eprintln!(
                "bench: writing {} MiB to {}",
                sizes.disk_bytes >> 20,
                device.display()
            );
            lab.disk("device.img", sizes.disk_bytes)?;
        }
        if peers.contains(&Peer::Nbdkit) {
            this.start_nbdkit()?;
        }
        if peers.contains(&Peer::Qemu) {
            this.start_qemu()?;
        }
        let of = |wanted: &[Peer]| -> Vec<Peer> {
            let peers = peers.iter().copied();
            peers.filter(|peer| wanted.contains(peer)).collect()
        };
        let on_large = of(&[Peer::OnWrite, Peer::OnFlush, Peer::DramHit, Peer::Four]);
        if !on_large.is_empty() {
            let node = lab.node("large", Some(LARGE_CONFIG))?;
            for peer in on_large {
                this.create(&node, peer)?;
            }
            this.node = Some(node);
        }
        let on_small = of(&[Peer::SsdHit, Peer::Miss]);
        if !on_small.is_empty() {
            let node = lab.node("small", Some(SMALL_CONFIG))?;
            for peer in on_small {
                this.create(&node, peer)?;
            }
            this.small = Some(node);
        }
        let mut on_sustained = of(&[Peer::Sustained, Peer::SustainedMemory, Peer::SustainedFour]);
        if peers.contains(&Peer::Beside) && !on_sustained.contains(&Peer::Sustained) {
            on_sustained.push(Peer::Sustained);
        }
        if !on_sustained.is_empty() {
            let node = lab.node("sustained", Some(SUSTAINED_CONFIG))?;
            if on_sustained.contains(&Peer::SustainedMemory) {
                let memory = TempDir::new_in(MEMORY).context(MEMORY)?;
                this.memory = Some(memory);
            }
            for peer in on_sustained {
                this.create(&node, peer)?;
            }
            this.sustained = Some(node);
        }
        Ok(this)
    }

    fn start_nbdkit(&mut self) -> Result<()> {
        let socket = self.lab.path("nbdkit.sock");
        let mut command = Command::new("nbdkit");
        command
            .args(["--foreground", "--unix"])
            .arg(&socket)
            .arg("memory")
            .arg(self.sizes.disk_bytes.to_string());
        self.nbdkit = Some(Server::start_on_socket(
            "nbdkit",
            &mut command,
            &socket,
            &self.lab.path("nbdkit.log"),
        )?);
        self.lab
            .fill(&self.target(Peer::Nbdkit)?, self.sizes.disk_bytes)
    }

    fn start_qemu(&mut self) -> Result<()> {
        let (socket, image) = (
            self.lab.path("qemu.sock"),
            self.lab.disk("qemu.img", self.sizes.disk_bytes)?,
        );
        let mut command = Command::new("qemu-nbd");
        command
            .args([
                "--persistent",
                "--format=raw",
                "--cache=none",
                "--aio=io_uring",
                "--shared=4",
                "--socket",
            ])
            .arg(&socket)
            .arg(&image);
        self.qemu = Some(Server::start_on_socket(
            "qemu-nbd",
            &mut command,
            &socket,
            &self.lab.path("qemu.log"),
        )?);
        Ok(())
    }

    /// A volume over a backing file that was written before; for four, four of them.
    fn create(&self, node: &Node, peer: Peer) -> Result<()> {
        let sizes = &self.sizes;
        let small = 64 << 20;
        let (bytes, log_bytes) = match peer {
            Peer::Miss => (sizes.miss_disk_bytes, small),
            Peer::OnWrite | Peer::OnFlush => (sizes.disk_bytes, sizes.log_bytes),
            Peer::Four => (sizes.four_disk_bytes, sizes.four_log_bytes),
            Peer::Sustained | Peer::SustainedMemory => {
                (sizes.sustained_disk_bytes, sizes.sustained_log_bytes)
            }
            Peer::SustainedFour => {
                let four = u64::from(FOUR);
                (
                    sizes.sustained_disk_bytes / four,
                    sizes.sustained_log_bytes / four,
                )
            }
            _ => (sizes.disk_bytes, small),
        };
        for name in Self::volumes(peer) {
            let image = match &self.memory {
                Some(memory) if peer == Peer::SustainedMemory => {
                    let image = memory.path().join("backend.img");
                    self.lab.fill(&Target::File(image.clone()), bytes)?;
                    image
                }
                _ => self.lab.disk(&format!("{name}.img"), bytes)?,
            };
            let mut volume = VolumeOptions::over_file(&name, &image, bytes, log_bytes);
            if peer == Peer::OnFlush {
                volume.persist = "on-flush";
            }
            node.create(&volume)?;
            // Memory that the node takes for writes is there from then on.
            if !matches!(peer, Peer::Miss | Peer::DramHit | Peer::SsdHit) {
                self.lab.fill(&node.target(&name), bytes)?;
                node.flush(&name)?;
            }
        }
        Ok(())
    }

    /// The volumes behind a face of HDCS.
    fn volumes(peer: Peer) -> Vec<String> {
        if peer.is_four() {
            (0..FOUR).map(|number| one_of_four(peer, number)).collect()
        } else {
            vec![peer.volume().to_owned()]
        }
    }

    /// The node that a face of HDCS lives on.
    fn node_of(&self, peer: Peer) -> Option<&Node> {
        match peer {
            Peer::SsdHit | Peer::Miss => self.small.as_ref(),
            Peer::OnWrite | Peer::OnFlush | Peer::DramHit | Peer::Four => self.node.as_ref(),
            Peer::Sustained | Peer::SustainedMemory | Peer::SustainedFour | Peer::Beside => {
                self.sustained.as_ref()
            }
            Peer::Device | Peer::DeviceDurable | Peer::Nbdkit | Peer::Qemu => None,
        }
    }

    /// Run a load on a peer.
    pub fn run(&self, peer: Peer, load: &Load, results: &Directory, name: &str) -> Result<Outcome> {
        if peer == Peer::Beside {
            return self.run_beside_writes(peer, load, results, name);
        }
        if !peer.is_four() {
            return load.run(&self.target(peer)?, &results.raw(name));
        }
        let node = self.node_of(peer).context("its node is not up")?;
        let one = |number: u32| {
            let mut load = load.clone();
            load.seed += u64::from(number);
            (one_of_four(peer, number), format!("{name}-{number}"), load)
        };
        let loads: Vec<_> = (0..FOUR).map(one).collect();
        Ok(fio::together(&lab::together(node, results, &loads)?))
    }

    /// Run a load of reads beside writes that overrun the log; what the reads gave.
    fn run_beside_writes(
        &self,
        peer: Peer,
        reads: &Load,
        results: &Directory,
        name: &str,
    ) -> Result<Outcome> {
        let node = self.node_of(peer).context("its node is not up")?;
        let writes = Load {
            depth: 32,
            seed: reads.seed + 1,
            seconds: reads.seconds,
            ..Load::random("randwrite", reads.span_bytes)
        };
        let one = |load: Load, of: &str| (peer.volume().to_owned(), format!("{name}-{of}"), load);
        let loads = [one(reads.clone(), "reads"), one(writes, "writes")];
        let mut outcomes = lab::together(node, results, &loads)?.into_iter();
        outcomes.next().context("the reads gave nothing")
    }

    /// Where fio reaches a peer.
    pub fn target(&self, peer: Peer) -> Result<Target> {
        let nbd = |socket| Target::Nbd {
            socket: self.lab.path(socket),
            export: String::new(),
        };
        Ok(match peer {
            Peer::Device | Peer::DeviceDurable => Target::File(self.lab.path("device.img")),
            Peer::Nbdkit => nbd("nbdkit.sock"),
            Peer::Qemu => nbd("qemu.sock"),
            _ => self
                .node_of(peer)
                .context("its node is not up")?
                .target(peer.volume()),
        })
    }

    /// The device's file, for measurements below fio's NBD engine.
    pub fn device_file(&self) -> PathBuf {
        self.lab.path("device.img")
    }

    /// CPU time and memory of a peer's server; none for the device.
    pub fn usage(&self, peer: Peer) -> Result<Usage> {
        match peer {
            Peer::Device | Peer::DeviceDurable => Ok(Usage::default()),
            Peer::Nbdkit => self.nbdkit.as_ref().context("nbdkit is not up")?.usage(),
            Peer::Qemu => self.qemu.as_ref().context("qemu-nbd is not up")?.usage(),
            _ => self.node_of(peer).context("its node is not up")?.usage(),
        }
    }

    /// The counters of the node behind a face of HDCS.
    pub fn meter(&self, peer: Peer) -> Result<Option<Meter>> {
        self.node_of(peer).map(Meter::read).transpose()
    }

    /// What the node says of the volume behind a face of HDCS.
    pub fn show(&self, peer: Peer) -> Result<serde_json::Value> {
        self.node_of(peer)
            .filter(|_| !peer.is_four())
            .map_or(Ok(serde_json::Value::Null), |node| node.show(peer.volume()))
    }

    /// A profile's load, fitted to a peer.
    pub fn fit(&self, profile: &Profile, peer: Peer, seconds: u32, seed: u64) -> Load {
        let sizes = &self.sizes;
        let mut load = Load {
            seconds: Some(seconds),
            seed,
            span_bytes: sizes.disk_bytes,
            durable: peer == Peer::DeviceDurable,
            ..profile.load.clone()
        };
        if profile.overruns() {
            load.seconds = Some(SUSTAINED_SECONDS_MAX);
            load.span_bytes = sizes.sustained_disk_bytes;
            load.bytes_max = Some(sizes.sustained_log_bytes * OVERRUN);
            if peer == Peer::SustainedFour {
                load.span_bytes /= u64::from(FOUR);
                load.bytes_max = load.bytes_max.map(|bytes| bytes / u64::from(FOUR));
            }
        } else if matches!(peer, Peer::Sustained | Peer::Beside) {
            load.span_bytes = sizes.sustained_disk_bytes;
        } else if peer == Peer::Miss {
            load.span_bytes = sizes.miss_disk_bytes;
            load.align_bytes = Some(CACHE_LINE_BYTES);
            load.bytes_max = Some(MISSES_MAX * load.block_bytes);
        } else if peer == Peer::Four {
            load.span_bytes = sizes.four_disk_bytes;
            load.bytes_max = Some(sizes.four_log_bytes / 8 * 3);
        } else if profile.reads() {
            load.span_bytes = sizes.hit_span_bytes;
        } else {
            load.bytes_max = Some(sizes.written_bytes_max);
        }
        load
    }

    /// The same for a second or so before, which nobody looks at: memory is touched, and the device awake.
    pub fn fit_warm_up(&self, profile: &Profile, peer: Peer, seed: u64) -> Option<Load> {
        let seconds = 2;
        let load = self.fit(profile, peer, seconds, seed);
        let bytes_max = if profile.overruns() {
            // The log is full when the run begins, as it will be from then on.
            load.bytes_max.map(|bytes| bytes / OVERRUN)
        } else {
            load.bytes_max.map(|bytes| bytes / WARM_SHARE)
        };
        let seconds = if profile.overruns() {
            load.seconds
        } else {
            Some(seconds)
        };
        (peer != Peer::Miss).then_some(Load {
            bytes_max,
            seconds,
            ..load
        })
    }

    /// Bring a peer into the state that its measurement is about.
    pub fn prepare(&self, peer: Peer, profile: &Profile) -> Result<()> {
        let Some(node) = self.node_of(peer).filter(|_| profile.reads()) else {
            return Ok(());
        };
        match peer {
            Peer::Miss | Peer::Sustained | Peer::Beside => {
                node.command(&["volume", "evict", peer.volume()]).map(drop)
            }
            Peer::DramHit | Peer::SsdHit => {
                let target = node.target(peer.volume());
                self.lab.warm(&target, self.sizes.hit_span_bytes)
            }
            _ => Ok(()),
        }
    }

    /// End a peer's turn: nothing of it works on, and what it wrote does not wait in the device's
    /// cache for the next one's flush.
    pub fn settle(&self, peer: Peer, profile: &Profile) -> Result<()> {
        if profile.reads() && peer != Peer::Beside {
            return Ok(());
        }
        if let Some(node) = self.node_of(peer) {
            for name in Self::volumes(peer) {
                node.flush(&name)?;
            }
        }
        let device = self.device_file();
        if device.exists() {
            lab::sync(&device)?;
        }
        Ok(())
    }

    /// Stop everything and remove the files.
    pub fn down(mut self) -> Result<()> {
        let nodes = [self.node.take(), self.small.take(), self.sustained.take()];
        for node in nodes.into_iter().flatten() {
            node.stop()?;
        }
        for server in [self.nbdkit.take(), self.qemu.take()].into_iter().flatten() {
            server.stop()?;
        }
        drop(self.memory.take());
        self.lab.clear()
    }
}
