//! One open volume with its devices, as its shard keeps it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hdcs_backend::copying::Copying;
use hdcs_backend::home::LocalStoreBackend;
use hdcs_backend::memory::VolumeMemory;
use hdcs_backend::{Ask, Operation, Stack};
use hdcs_core::base::io::{Nanos, Reply, Request, RequestId};
use hdcs_core::cache::ReadCache;
use hdcs_core::local::{Status, TierState};
use hdcs_core::node::qos::{FlowId, QosStats, Ticket};
use hdcs_core::node::tier_out::TierOut;
use hdcs_core::volume::{Cut, Discard, Phase, State, Volume, VolumeStats};
use hdcs_device::file::Device;
use hdcs_frontend::access::Allow;
use hdcs_frontend::{Export, OpeningId, VolumeNumber};
use hdrhistogram::Histogram;

use super::ciphered_log::CipheredLog;
use super::command::{Admission, Answer, Latencies, OpenFailure, OpenedAs, VolumeReport};
use super::log_space::LogSpace;
use super::moving::Departing;
use super::residents::Residence;
use super::resizing::Resizing;
use super::snapshots::Snapshotting;
use crate::data_dir::dirty::{Amount, Left, LogIdentity};

/// Where a request came from.
#[derive(Clone, Copy, Debug)]
pub enum Origin {
    /// The connection in this slot, under its own name for it.
    Connection(u32, RequestId),
    /// The range job in this slot.
    Job(u32),
    /// The scrub in this slot.
    Scrub(u32),
}

/// A request that has not reached its volume.
#[derive(Debug)]
pub struct Submitted {
    /// From where.
    pub origin: Origin,
    /// For which volume.
    pub volume: VolumeNumber,
    /// When it came.
    pub arrived: Nanos,
    /// Since quality of service has let it go.
    pub ticket: Option<Ticket>,
    /// What is asked.
    pub request: Request,
}

/// Which histogram a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Reads.
    Read,
    /// Writes, zeroes and discards.
    Write,
    /// Flushes.
    Flush,
    /// None.
    Other,
}

impl Class {
    /// The class of a request.
    pub fn of(request: &Request) -> Self {
        match request {
            Request::Read { .. } => Self::Read,
            Request::Write { .. } | Request::WriteZeroes { .. } | Request::Discard { .. } => {
                Self::Write
            }
            Request::Flush => Self::Flush,
            Request::Promote { .. }
            | Request::Evict { .. }
            | Request::Extents { .. }
            | Request::Scrub { .. } => Self::Other,
        }
    }
}

/// A request that its volume works on.
#[derive(Debug)]
pub struct Pending {
    /// From where.
    pub origin: Origin,
    /// When it came.
    pub arrived: Nanos,
    /// How it is counted.
    pub class: Class,
    /// To be given back at its end.
    pub ticket: Option<Ticket>,
}

/// In which lists of its shard a volume waits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Listed {
    /// Those to be polled.
    pub to_poll: bool,
    /// Those to be settled.
    pub to_settle: bool,
    /// Those that follow the cache.
    pub with_cache: bool,
}

/// On which terms a volume serves clients: what may change of its [`Export`], but who may open it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Whether it does.
    pub serves: bool,
    /// Its size.
    pub bytes: u64,
    /// Whether a discard does something.
    pub discards: bool,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// See the module.
pub struct Served {
    /// Its name.
    pub name: String,
    /// Its number.
    pub number: VolumeNumber,
    /// Which clients may open it over TCP.
    pub allow: Allow,
    /// The state machine.
    pub volume: Volume,
    /// Its write log.
    pub log: Arc<Device>,
    /// The copy of a replicated log on which it stands, through which it writes.
    pub copy: Option<u32>,
    /// What encrypts that, if the volume is encrypted.
    pub log_cipher: Option<CipheredLog>,
    /// Its backend.
    pub backend: Stack,
    /// What its backend is.
    pub identity: Option<String>,
    /// Operations on its log that have not ended.
    pub log_operations: usize,
    /// Reads of the cache device that have not ended.
    pub cache_reads: usize,
    /// What quality of service knows it as.
    pub flow: FlowId,
    /// Buffers that its clients hold.
    pub data_bytes: u64,
    /// Requests that the volume has not answered.
    pub requests: usize,
    /// How long requests have waited before the volume took them, all together.
    pub queued: Nanos,
    /// Requests beyond what the volume takes at once.
    pub waiting: VecDeque<Submitted>,
    /// Whether its backend has ended something at once since it was polled.
    pub hurry: bool,
    /// In which lists of the shard it waits.
    pub listed: Listed,
    /// Which opening of it this is.
    pub opening_id: OpeningId,
    /// What the directory says of it.
    pub published: Terms,
    /// Who waits for the end of the replay.
    pub opening: Option<Answer<OpenedAs, OpenFailure>>,
    /// Its log, as it was found.
    pub log_identity: LogIdentity,
    /// Who keeps what its log's device does not take.
    pub admission: Arc<dyn Admission>,
    /// Whether it was said that its log is given up.
    pub log_given_up: bool,
    /// Who waits for the close.
    pub closing: Vec<Answer<Option<Left>>>,
    /// Its way to another shard.
    pub departing: Option<Departing>,
    /// The change of size under way.
    pub resizing: Option<Resizing>,
    /// The size that its backend has grown to, until the volume has it.
    pub grown: Option<u64>,
    /// The snapshot that is being made or removed.
    pub snapshotting: Option<Snapshotting>,
    /// What is being tiered out.
    pub tier_out: Option<TierOut>,
    /// Why what was pinned is not.
    pub pin_trouble: Option<String>,
    /// Backend operations that wait until the backend has shrunk, or has kept a state.
    pub held: Vec<Operation>,
    /// Latency by class, of those that were ever used.
    pub latencies: [Latencies; 3],
    /// What others know of the space of its log.
    pub space: Arc<LogSpace>,
    /// Memory that is reserved for it. It is given back after all that it was reserved for, so it stands behind that.
    pub memory: Arc<VolumeMemory>,
    /// Its stay on this shard, which ends last.
    pub residence: Residence,
}

impl Served {
    /// Whether what is asked of the backend waits for the end of a resize, or for a state to be kept.
    pub fn holds(&self, ask: &Ask) -> bool {
        if let Some(snapshotting) = &self.snapshotting {
            let changes = matches!(
                ask,
                Ask::Write { .. } | Ask::Zero { .. } | Ask::Flush | Ask::Resize { .. }
            );
            return snapshotting.operation.holds(changes, self.home().as_ref());
        }
        let Some(resizing) = &self.resizing else {
            return false;
        };
        // The resize itself does not wait for its end.
        let is_own = matches!(ask, Ask::Resize { .. });
        !is_own && resizing.resize.holds(matches!(ask, Ask::Read { .. }))
    }

    /// A snapshot that waits for destage has waited enough, as soon as the backend has everything: from
    /// then on nothing reaches it that came later.
    pub fn note_destaged(&mut self, now: Nanos) {
        if let Some(snapshotting) = &mut self.snapshotting
            && snapshotting.operation.awaits_destage()
        {
            let left = self.volume.stats(now).destage_all_remaining_bytes;
            snapshotting.operation.note_destaged(left);
        }
    }

    /// Whether it opens, closes, or something about it is being changed.
    pub fn is_changing(&self) -> bool {
        self.volume.phase() != Phase::Open
            || self.opening.is_some()
            || self.departing.is_some()
            || self.resizing.is_some()
            || self.snapshotting.is_some()
            || self.tier_out.is_some()
    }

    /// Whether it is to close once all is tiered out, which its log or its local store will not have.
    pub fn is_to_close_stuck(&self) -> bool {
        let has_failed = || self.home().is_some_and(|local| local.failed.is_some());
        self.tier_out.is_some_and(|one| one.then_closes())
            && (self.volume.log_is_stuck() || has_failed())
    }

    /// On which terms it serves clients.
    pub fn terms(&self) -> Terms {
        use hdcs_core::volume::{Policy, Trouble};
        let is_leaving = self.tier_out.is_some_and(|one| one.then_closes());
        let is_open = matches!(self.volume.phase(), Phase::Open | Phase::Opening);
        let config = self.volume.config();
        // What waits for copies is written once they are there.
        let waits = || matches!(self.volume.trouble(), Some((Trouble::CopiesTooFew, _)));
        let refuses = matches!(self.volume.state(), State::ReadOnly | State::Inconsistent);
        Terms {
            serves: is_open && !is_leaving && self.departing.is_none(),
            bytes: config.bytes,
            discards: config.discard == Discard::Pass,
            read_only: self.backend.capabilities().read_only
                || config.policy == Policy::ReadOnly
                || (refuses && !waits()),
        }
    }

    /// What frontends may know, if it serves.
    pub fn export(&self) -> Option<Export> {
        let terms = self.terms();
        terms.serves.then(|| Export {
            number: self.number,
            opening: self.opening_id,
            name: self.name.clone(),
            bytes: terms.bytes,
            discards: terms.discards,
            allow: self.allow.clone(),
            read_only: terms.read_only,
        })
    }

    /// Count an answer.
    pub fn record(&mut self, class: Class, took: Nanos) {
        let histogram = match class {
            Class::Read => &mut self.latencies[0],
            Class::Write => &mut self.latencies[1],
            Class::Flush => &mut self.latencies[2],
            Class::Other => return,
        };
        // Copied once after each report, whoever still has that.
        let histogram = histogram.get_or_insert_with(|| Arc::new(histogram_of_latencies()));
        Arc::make_mut(histogram).saturating_record(took.0);
    }

    /// Whether nothing is left that could still concern it, but perhaps operations of devices that do not answer.
    pub fn is_idle(&self) -> bool {
        self.volume.awaits_nothing() && self.backend.under_way() == 0 && self.requests == 0
    }

    /// Whether a device owes it the end of an operation.
    pub fn is_owed(&self) -> bool {
        self.log_operations > 0 || self.cache_reads > 0
    }

    /// What its log holds, or has lost, that the backend does not have; `None` if the log was never read.
    pub fn left(&self, now: Nanos) -> Option<Left> {
        let stats = self.volume.stats(now);
        if stats.log_ring_blocks == 0 {
            return None;
        }
        // How old that is which the log has lost, nobody knows.
        let age = match stats.lost_bytes {
            0 => Duration::from_nanos(stats.dirty_age.0),
            _ => Duration::MAX,
        };
        let in_log = Amount {
            dirty_bytes: stats.dirty_bytes + stats.lost_bytes,
            nothing: stats.log_used_blocks == 0 && stats.lost_bytes == 0,
            age,
        };
        let Some(home) = self.home() else {
            return Some(Left {
                all: in_log,
                in_log: None,
            });
        };
        let is_home_clean = home.dirty_bytes + home.zero_bytes == 0;
        Some(Left {
            all: Amount {
                dirty_bytes: in_log.dirty_bytes + home.dirty_bytes,
                nothing: in_log.nothing && is_home_clean,
                // Nor how old that is which the local store had when it was opened.
                age: if is_home_clean { age } else { Duration::MAX },
            },
            in_log: Some(in_log),
        })
    }

    /// Its local store, if it is in storage mode.
    pub fn home(&self) -> Option<Status> {
        self.backend.home().map(LocalStoreBackend::status)
    }

    /// Its state. It is degraded while a part of its local store is damaged, which is healed by what is written there,
    /// and while nothing can be tiered out.
    fn state(&self) -> State {
        let is_troubled = self.home().is_some_and(|local| {
            local.damaged_sectors > 0 || local.tier_trouble.is_some() || local.failed.is_some()
        });
        match self.volume.state() {
            State::Healthy if is_troubled => State::Degraded,
            state => state,
        }
    }

    /// Counters, with what the local store has dirty, and what it has to tier out.
    fn stats(&self, now: Nanos) -> VolumeStats {
        let mut stats = self.volume.stats(now);
        let Some(home) = self.home() else {
            return stats;
        };
        stats.dirty_bytes += home.dirty_bytes;
        let owed = home.owed_since.map_or(Nanos(0), |since| now.since(since));
        stats.dirty_age = stats.dirty_age.max(owed);
        let snapshotting = self.snapshotting.as_ref();
        let is_to_tier = snapshotting.is_some_and(|one| one.operation.is_before_backend());
        if self.tier_out.is_some() || is_to_tier {
            let left = match home.tier {
                TierState::Copying | TierState::Finishing => home.tier_left_bytes,
                _ => home.dirty_bytes,
            };
            // Zeroes have no bytes: until it has ended, something is left.
            let left = stats.destage_all_remaining_bytes + left;
            stats.destage_all_remaining_bytes = left.max(1);
        }
        stats
    }

    /// What the control plane may know.
    pub fn report(
        &self,
        now: Nanos,
        shard: usize,
        connections: usize,
        qos: QosStats,
        cache: &ReadCache,
    ) -> VolumeReport {
        let [read_latency, write_latency, flush_latency] = self.latencies.clone();
        VolumeReport {
            name: self.name.clone(),
            shard,
            phase: self.volume.phase(),
            state: self.state(),
            trouble: self
                .volume
                .trouble()
                .map(|(trouble, since)| (trouble, now.since(since))),
            config: self.volume.config().clone(),
            stats: self.stats(now),
            left: self.left(now),
            holds_cut: self.volume.cut() == Cut::Held,
            read_latency,
            write_latency,
            flush_latency,
            connections,
            qos,
            queued: self.queued,
            benefit: self.volume.cached().benefit(cache),
            store: self.backend.counts(),
            image_trouble: self.backend.image_trouble(),
            pin_trouble: self.pin_trouble.clone(),
            log_way: (self.volume.durable_way(), self.log.cache()),
            home: self.home(),
            is_resizing: self.resizing.is_some(),
            is_snapshotting: self.snapshotting.is_some(),
            copying: self
                .backend
                .copying()
                .map(Copying::progress)
                .unwrap_or_default(),
        }
    }
}

/// An empty histogram of nanoseconds: 1 µs to 100 s, two digits. It takes 23 KB, and each volume has up to three; three
/// digits would take 156 KB.
fn histogram_of_latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 100_000_000_000, 2).expect("constant bounds are valid")
}

/// How a request ended, for whoever submitted it.
pub type Ended = Result<Reply, hdcs_core::base::error::RequestError>;
