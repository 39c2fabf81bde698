//! Who is compared, and how each is brought up.
//!
//! All peers store on the same file system, on files that were written before. They run all the
//! time and idle while another one is measured; a volume of HDCS is destaged before its turn ends,
//! so that it does not work on behind its neighbour's back.

use std::path::PathBuf;
use std::process::Command;

use crate::cost::Meter;
use crate::failure::{Context, Result};
use crate::fio::{Load, Target};
use crate::lab::{self, Lab};
use crate::node::{Node, VolumeOptions};
use crate::process::{Server, Usage};
use crate::profiles::{CACHE_LINE_BYTES, Profile};

/// Size of every peer's disk.
pub const DISK_BYTES: u64 = 2 << 30;
/// Size of the volume of misses: so large that few reads hit what an earlier one brought in.
const MISS_DISK_BYTES: u64 = 8 << 30;
/// Reads of one run of misses, for the same reason.
const MISSES_MAX: u64 = 64 << 10;
/// The range of reads that are meant to hit: it fits the DRAM tier of one node and the SSD tier of
/// the other.
const HIT_SPAN_BYTES: u64 = 1 << 30;
/// Logs that take a whole run of writes, so that the run measures the log and not the destage;
/// that is what `steady` is for.
const LOG_BYTES: u64 = 2 << 30;
/// Writes of one run at most: well below the share of the log at which writes are slowed.
const WRITTEN_BYTES_MAX: u64 = 1 << 30;

/// One contestant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// fio on a file with io_uring: what the device can do, not durable.
    Device,
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
}

impl Peer {
    /// All of them, in the order of the tables.
    pub const ALL: [Self; 8] = [
        Self::Device,
        Self::Nbdkit,
        Self::Qemu,
        Self::OnWrite,
        Self::OnFlush,
        Self::DramHit,
        Self::SsdHit,
        Self::Miss,
    ];

    /// Name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Nbdkit => "nbdkit-memory",
            Self::Qemu => "qemu-nbd",
            Self::OnWrite => "hdcs-on-write",
            Self::OnFlush => "hdcs-on-flush",
            Self::DramHit => "hdcs-dram-hit",
            Self::SsdHit => "hdcs-ssd-hit",
            Self::Miss => "hdcs-miss",
        }
    }

    /// Whether it is a face of HDCS.
    pub const fn is_hdcs(self) -> bool {
        !matches!(self, Self::Device | Self::Nbdkit | Self::Qemu)
    }

    /// Whether the profile makes sense on it.
    pub fn takes(self, profile: &Profile) -> bool {
        match self {
            Self::Device | Self::Nbdkit | Self::Qemu => true,
            Self::OnWrite | Self::OnFlush => !profile.reads(),
            Self::DramHit | Self::SsdHit | Self::Miss => profile.reads(),
        }
    }

    /// The volume that is its face.
    const fn volume(self) -> &'static str {
        match self {
            Self::OnFlush => "on-flush",
            Self::DramHit => "dram",
            Self::SsdHit => "ssd",
            Self::Miss => "miss",
            _ => "on-write",
        }
    }
}

/// Everything that is up for a comparison.
pub struct Peers<'a> {
    lab: &'a Lab,
    nbdkit: Option<Server>,
    qemu: Option<Server>,
    /// Much DRAM: writes, and reads that hit DRAM.
    node: Option<Node>,
    /// Little DRAM and an SSD tier that holds all: reads that hit it, and misses.
    small: Option<Node>,
}

/// Configuration of the node with much memory: DRAM for the hits, and indexes of the large logs.
const LARGE_CONFIG: &str = "memory_max_mib = 4096\ncache_total_size_mib = 1024\n";
/// Configuration of the node whose DRAM tier holds next to nothing.
const SMALL_CONFIG: &str = "memory_max_mib = 256\ncache_total_size_mib = 3072\n";

impl<'a> Peers<'a> {
    /// Bring up what these need.
    pub fn up(lab: &'a Lab, peers: &[Peer]) -> Result<Self> {
        let mut this = Self {
            lab,
            nbdkit: None,
            qemu: None,
            node: None,
            small: None,
        };
        let device = lab.path("device.img");
        eprintln!(
            "bench: writing {} GiB to {}",
            DISK_BYTES >> 30,
            device.display()
        );
        lab.disk("device.img", DISK_BYTES)?;
        if peers.contains(&Peer::Nbdkit) {
            this.start_nbdkit()?;
        }
        if peers.contains(&Peer::Qemu) {
            this.start_qemu()?;
        }
        if peers
            .iter()
            .any(|peer| matches!(peer, Peer::OnWrite | Peer::OnFlush | Peer::DramHit))
        {
            let node = lab.node("large", Some(LARGE_CONFIG))?;
            for peer in peers
                .iter()
                .filter(|p| matches!(p, Peer::OnWrite | Peer::OnFlush | Peer::DramHit))
            {
                this.create(&node, *peer)?;
            }
            this.node = Some(node);
        }
        if peers
            .iter()
            .any(|peer| matches!(peer, Peer::SsdHit | Peer::Miss))
        {
            let node = lab.node("small", Some(SMALL_CONFIG))?;
            for peer in peers
                .iter()
                .filter(|p| matches!(p, Peer::SsdHit | Peer::Miss))
            {
                this.create(&node, *peer)?;
            }
            this.small = Some(node);
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
            .arg(DISK_BYTES.to_string());
        self.nbdkit = Some(Server::start_on_socket(
            "nbdkit",
            &mut command,
            &socket,
            &self.lab.path("nbdkit.log"),
        )?);
        self.lab.fill(&self.target(Peer::Nbdkit)?, DISK_BYTES)
    }

    fn start_qemu(&mut self) -> Result<()> {
        let (socket, image) = (
            self.lab.path("qemu.sock"),
            self.lab.disk("qemu.img", DISK_BYTES)?,
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

    /// A volume over a backing file that was written before.
    fn create(&self, node: &Node, peer: Peer) -> Result<()> {
        let bytes = if peer == Peer::Miss {
            MISS_DISK_BYTES
        } else {
            DISK_BYTES
        };
        let image = self.lab.disk(&format!("{}.img", peer.volume()), bytes)?;
        let writes = matches!(peer, Peer::OnWrite | Peer::OnFlush);
        let log_bytes = if writes { LOG_BYTES } else { 64 << 20 };
        let mut volume = VolumeOptions::over_file(peer.volume(), &image, bytes, log_bytes);
        if peer == Peer::OnFlush {
            volume.persist = "on-flush";
        }
        node.create(&volume)
    }

    /// The node that a face of HDCS lives on.
    fn node_of(&self, peer: Peer) -> Option<&Node> {
        match peer {
            Peer::SsdHit | Peer::Miss => self.small.as_ref(),
            Peer::OnWrite | Peer::OnFlush | Peer::DramHit => self.node.as_ref(),
            Peer::Device | Peer::Nbdkit | Peer::Qemu => None,
        }
    }

    /// Where fio reaches a peer.
    pub fn target(&self, peer: Peer) -> Result<Target> {
        let nbd = |socket| Target::Nbd {
            socket: self.lab.path(socket),
            export: String::new(),
        };
        Ok(match peer {
            Peer::Device => Target::File(self.lab.path("device.img")),
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
            Peer::Device => Ok(Usage::default()),
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
            .map_or(Ok(serde_json::Value::Null), |node| node.show(peer.volume()))
    }

    /// A profile's load, fitted to a peer.
    pub fn fit(profile: &Profile, peer: Peer, seconds: u32, seed: u64) -> Load {
        let mut load = Load {
            seconds: Some(seconds),
            seed,
            span_bytes: DISK_BYTES,
            ..profile.load.clone()
        };
        if peer == Peer::Miss {
            load.span_bytes = MISS_DISK_BYTES;
            load.align_bytes = Some(CACHE_LINE_BYTES);
            load.bytes_max = Some(MISSES_MAX * load.block_bytes);
        } else if profile.reads() {
            load.span_bytes = HIT_SPAN_BYTES;
        } else {
            load.bytes_max = Some(WRITTEN_BYTES_MAX);
        }
        load
    }

    /// Bring a peer into the state that its measurement is about.
    pub fn prepare(&self, peer: Peer, profile: &Profile) -> Result<()> {
        let Some(node) = self.node_of(peer).filter(|_| profile.reads()) else {
            return Ok(());
        };
        match peer {
            Peer::Miss => node.command(&["volume", "evict", peer.volume()]).map(drop),
            Peer::DramHit | Peer::SsdHit => {
                let target = node.target(peer.volume());
                self.lab.warm(&target, HIT_SPAN_BYTES)
            }
            _ => Ok(()),
        }
    }

    /// End a peer's turn: nothing of it works on, and what it wrote does not wait in the device's
    /// cache for the next one's flush.
    pub fn settle(&self, peer: Peer, profile: &Profile) -> Result<()> {
        if profile.reads() {
            return Ok(());
        }
        if let Some(node) = self.node_of(peer) {
            node.flush(peer.volume())?;
        }
        lab::sync(&self.device_file())
    }

    /// Stop everything and remove the files.
    pub fn down(mut self) -> Result<()> {
        for node in [self.node.take(), self.small.take()].into_iter().flatten() {
            node.stop()?;
        }
        for server in [self.nbdkit.take(), self.qemu.take()].into_iter().flatten() {
            server.stop()?;
        }
        self.lab.clear()
    }
}
