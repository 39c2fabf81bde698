//! Who is compared before a store, and how each is brought into the state that a run is about.
//!
//! Every turn of HDCS begins with a volume of its own, with an empty log of the size that the profile
//! asks for, over a place that was written before; and it ends with that volume deleted and what is
//! still dirty discarded, so that nobody works on behind the next one's back. (Destaging the rest of a
//! burst would take Ceph minutes, and change no figure. Over objects it is destaged before, since what
//! it costs in requests is one.)

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::requests::Requests;
use super::store::{Behind, Store};
use super::{Kind, Profile, Scale};
use crate::failure::Result;
use crate::fio::{Load, Outcome, Target};
use crate::lab::{self, Lab};
use crate::node::{Node, VolumeOptions};
use crate::process::Usage;

/// DRAM for the working set of the reads, and for the index of the large log.
const CONFIG: &str = "memory_max_mib = 4096\ncache_total_size_mib = 1024\n";
/// The log of a volume that is read.
const READ_LOG_BYTES: u64 = 64 << 20;
/// A burst ends before the log is so full that writes are slowed.
const BURST_SHARE: u64 = 2;

/// One contestant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// fio on a file with io_uring: what the device can do, not durable.
    Device,
    /// The store's own client: librbd in fio's process without a cache, or see [`super::direct`].
    Direct,
    /// HDCS over a file: what the store behind it costs shows beside this.
    File,
    /// HDCS over the store, writes durable before the ack.
    Hdcs,
    /// The same, writes durable at the flush, as the device has them, and as HDCS itself does by
    /// default once a client has flushed.
    OnFlush,
}

impl Peer {
    /// All of them, in the order of the tables.
    pub const ALL: [Self; 5] = [
        Self::Device,
        Self::Direct,
        Self::File,
        Self::Hdcs,
        Self::OnFlush,
    ];

    /// Name in results.
    pub const fn name(self, store: Store) -> &'static str {
        match (self, store) {
            (Self::Device, _) => "device",
            (Self::File, _) => "hdcs-file",
            (Self::Direct, Store::Ceph) => "librbd-direct",
            (Self::Direct, Store::S3) => "s3-direct",
            (Self::Direct, Store::Hdfs) => "hdfs-direct",
            (Self::Hdcs, Store::Ceph) => "hdcs-ceph",
            (Self::Hdcs, Store::S3) => "hdcs-s3",
            (Self::Hdcs, Store::Hdfs) => "hdcs-hdfs",
            (Self::OnFlush, Store::Ceph) => "hdcs-ceph-flush",
            (Self::OnFlush, Store::S3) => "hdcs-s3-flush",
            (Self::OnFlush, Store::Hdfs) => "hdcs-hdfs-flush",
        }
    }

    /// Whether the profile makes sense on it.
    pub fn takes(self, profile: &Profile) -> bool {
        match self {
            Self::Device => matches!(profile.kind, Kind::Burst | Kind::Paced),
            Self::OnFlush => {
                matches!(profile.kind, Kind::Burst | Kind::Sustained | Kind::Paced)
            }
            Self::Direct | Self::File | Self::Hdcs => true,
        }
    }

    /// The volume, image or file that is its own during its turn.
    const fn disk(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Direct => "direct",
            Self::File => "file",
            Self::Hdcs | Self::OnFlush => "hdcs",
        }
    }

    /// Whether a node of HDCS serves it.
    pub const fn is_hdcs(self) -> bool {
        matches!(self, Self::File | Self::Hdcs | Self::OnFlush)
    }
}

/// What a turn left behind, besides what its client saw.
#[derive(Debug)]
pub struct Turn {
    /// What the node said of the volume at the end, if it is one.
    pub volume: Value,
    /// Requests to a store with objects, with those of destaging the rest.
    pub requests: Option<Requests>,
}

/// Everything that is up for a comparison. Fields end in this order: a node first, then what is behind it.
pub struct Peers {
    node: Node,
    behind: Box<dyn Behind>,
    store: Store,
    lab: Lab,
    scale: Scale,
    /// Requests of the volume whose turn it is, when the load begins.
    requests_before: Requests,
}

impl Peers {
    /// Bring everything up and write every disk, so that no later write meets a hole.
    pub fn up(store: Store, lab: Lab, scripts: &Path, parent: &Path, scale: Scale) -> Result<Self> {
        eprintln!(
            "bench: starting {} below {}",
            store.title(),
            parent.display()
        );
        let behind = store.up(scripts, parent)?;
        let node = lab.node("node", Some(CONFIG))?;
        let this = Self {
            node,
            behind,
            store,
            lab,
            scale,
            requests_before: Requests::default(),
        };
        eprintln!("bench: writing {} MiB to each disk", scale.disk_bytes >> 20);
        for peer in [Peer::Direct, Peer::Hdcs] {
            match this.behind.make(peer.disk(), scale.disk_bytes)? {
                Some(target) => this.fill(&target)?,
                None if peer.is_hdcs() => this.fill_through_node(peer)?,
                None => {}
            }
        }
        for peer in [Peer::Device, Peer::File] {
            this.fill(&Target::File(this.image(peer)))?;
        }
        Ok(this)
    }

    fn fill(&self, target: &Target) -> Result<()> {
        self.lab.fill(target, self.scale.disk_bytes)
    }

    /// What only HDCS can write is written by it.
    fn fill_through_node(&self, peer: Peer) -> Result<()> {
        self.create(peer, self.scale.burst_log_bytes, "on-flush")?;
        self.fill(&self.node.target(peer.disk()))?;
        self.node.flush(peer.disk())?;
        self.node.discard(peer.disk())
    }

    fn image(&self, peer: Peer) -> PathBuf {
        self.lab.path(&format!("{}.img", peer.disk()))
    }

    /// What is behind.
    pub fn store(&self) -> Store {
        self.store
    }

    /// A profile's load, fitted to a peer.
    pub fn fit(&self, profile: &Profile, peer: Peer, seed: u64) -> Load {
        let scale = self.scale;
        let mut load = Load {
            seconds: Some(scale.seconds),
            seed,
            span_bytes: scale.disk_bytes,
            ..profile.load.clone()
        };
        match profile.kind {
            // The same end for all: who is slower is ended by time.
            Kind::Burst => load.bytes_max = Some(scale.burst_log_bytes / BURST_SHARE),
            Kind::CachedRead => load.span_bytes = scale.read_span_bytes,
            // Once over the whole range, reads for as long as any run takes.
            Kind::Sequential | Kind::ColdScan => {
                load.span_bytes = scale.scan_bytes;
                load.bytes_max = Some(scale.scan_bytes);
                if profile.kind == Kind::Sequential {
                    load.seconds = Some(scale.sustained_seconds_max);
                }
            }
            // The direct client of objects keeps nothing that could fill up: time is enough for it.
            // A cluster does: its database is compacted after a while.
            Kind::Sustained if peer.is_hdcs() || !self.store.has_objects() => {
                load.bytes_max = Some(scale.small_log_bytes * scale.overrun);
                load.seconds = Some(scale.sustained_seconds_max);
            }
            Kind::Sustained | Kind::Paced | Kind::ColdRead => {}
        }
        load
    }

    /// Where fio reaches a peer; nowhere, if its load is not fio's.
    fn target(&self, peer: Peer) -> Option<Target> {
        match peer {
            Peer::Device => Some(Target::File(self.image(peer))),
            Peer::Direct => None,
            Peer::File | Peer::Hdcs | Peer::OnFlush => Some(self.node.target(peer.disk())),
        }
    }

    fn create(&self, peer: Peer, log_bytes: u64, persist: &'static str) -> Result<()> {
        self.node.create(&VolumeOptions {
            name: peer.disk().into(),
            bytes: self.scale.disk_bytes,
            log_bytes,
            persist,
            backend: Some(if peer == Peer::File {
                format!("file:{}", self.image(peer).display())
            } else {
                self.behind.url(peer.disk())
            }),
        })
    }

    /// Begin a peer's turn.
    pub fn prepare(&mut self, peer: Peer, profile: &Profile, load: &Load) -> Result<()> {
        if peer == Peer::Direct {
            return self.behind.prepare(load, &self.lab.path("fill.json"));
        }
        if !peer.is_hdcs() {
            return Ok(());
        }
        let log_bytes = match profile.kind {
            Kind::Burst | Kind::Paced => self.scale.burst_log_bytes,
            Kind::Sustained | Kind::Sequential => self.scale.small_log_bytes,
            Kind::CachedRead | Kind::ColdRead | Kind::ColdScan => READ_LOG_BYTES,
        };
        let persist = if peer == Peer::OnFlush {
            "on-flush"
        } else {
            "on-write"
        };
        self.create(peer, log_bytes, persist)?;
        if profile.kind == Kind::CachedRead {
            let target = self.node.target(peer.disk());
            self.lab.warm(&target, self.scale.read_span_bytes)?;
        }
        if self.has_requests(peer) {
            self.requests_before = Requests::of(&self.node.show(peer.disk())?)?;
        }
        Ok(())
    }

    /// Whether objects are behind the peer's volume.
    fn has_requests(&self, peer: Peer) -> bool {
        self.store.has_objects() && peer.is_hdcs() && peer != Peer::File
    }

    /// Run the load; the client's report is kept in `raw`.
    pub fn run(&mut self, peer: Peer, load: &Load, raw: &Path) -> Result<Outcome> {
        match self.target(peer) {
            Some(target) => load.run(&target, raw),
            None => self.behind.direct(peer.disk(), load, raw),
        }
    }

    /// The device's file, for measurements without a peer.
    pub fn device_file(&self) -> PathBuf {
        self.image(Peer::Device)
    }

    /// CPU time and memory of the node, and the CPU time of the store in microseconds.
    pub fn usage(&self) -> Result<(Usage, f64)> {
        Ok((self.node.usage()?, self.behind.cpu_us()?))
    }

    /// End a peer's turn: nothing of it works on, and what it wrote does not wait in the device's
    /// cache for the next one's flush.
    pub fn end_turn(
        &self,
        peer: Peer,
        profile: &Profile,
        load: &Load,
        outcome: &Outcome,
    ) -> Result<Turn> {
        let mut turn = Turn {
            volume: Value::Null,
            requests: None,
        };
        if peer.is_hdcs() {
            turn.volume = self.node.show(peer.disk())?;
            // Every sync of a client becomes a commit of its own, which takes HDFS the better part of a second.
            let takes_minutes = profile.kind == Kind::Paced && self.store == Store::Hdfs;
            if self.has_requests(peer) && !takes_minutes {
                self.node.flush(peer.disk())?;
                let requests = Requests::of(&self.node.show(peer.disk())?)?;
                turn.requests = Some(requests.since(&self.requests_before));
            }
            self.node.discard(peer.disk())?;
        } else if peer == Peer::Direct && self.store.has_objects() {
            turn.requests = Some(Requests::direct(load, outcome.requests));
        }
        lab::sync(&self.device_file())?;
        Ok(turn)
    }

    /// Stop everything.
    pub fn down(self) -> Result<()> {
        self.node.stop()?;
        self.behind.down()
    }
}
