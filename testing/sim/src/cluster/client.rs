//! The client: it writes, reads and flushes on whichever node it believes to be the primary, and checks what it is told.
//!
//! A connection is to one opening of the volume, in one epoch. When that has gone, what it was asked for has an unknown
//! outcome, and the client looks for an opening of a higher epoch. For the history a change of openings is a crash: of what
//! was sent a prefix is there, with all that was promised.

use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{Nanos, Reply, Request, RequestId, SectorRange};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::volume::{Persist, VolumeConfig};

use super::Coverage;
use super::check_leases::Leases;
use super::shared::Shared;
use crate::check_progress::Requests;
use crate::check_recovery::Durability;
use crate::content::{Content, WriteId};
use crate::model::{FlushOp, History, ReadOp};
use crate::violation::Violation;
use crate::workload::{Ask, Workload};
use crate::{check_policy, check_reads};

/// Number of the volume.
pub(super) const VOLUME: u32 = 1;

/// What the sender of a request remembers.
#[derive(Debug)]
enum Waiting {
    Read(ReadOp),
    Write(WriteId, bool),
    Flush(FlushOp),
    Other,
}

/// An opening of the volume that the client talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) node: usize,
    pub(super) epoch: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Client {
    /// What it did.
    pub(super) history: History,
    workload: Workload,
    persist: Persist,
    /// Writes go past the log.
    is_direct: bool,
    /// It asks for what the last opening has acknowledged to be durable before it goes on.
    flushes_first: bool,
    durability: Durability,
    requests: Requests<Waiting>,
    /// What openings of each epoch have acknowledged.
    pub(super) leases: Leases,
    /// Whom it talks to.
    pub(super) peer: Option<Peer>,
    /// The highest epoch that it has talked to anybody in.
    epoch: u64,
    /// Requests that it is still to send.
    pub(super) asks_left: u32,
    /// Writes that were acknowledged.
    pub(super) acked: u64,
}

impl Client {
    /// One of a volume of so many sectors.
    pub(super) fn new(sectors: u64, workload: Workload, config: &VolumeConfig) -> Self {
        let persist = config.persist;
        let history = History::new(vec![Content::Zero; sectors as usize]);
        Self {
            durability: Durability::opened(persist, history.now()),
            history,
            workload,
            persist,
            is_direct: config.policy.is_direct(),
            flushes_first: false,
            requests: Requests::default(),
            leases: Leases::default(),
            peer: None,
            epoch: 0,
            asks_left: 0,
            acked: 0,
        }
    }

    /// Whether it waits for nothing, and has nothing to send.
    pub(super) fn is_done(&self) -> bool {
        self.asks_left == 0 && self.requests.is_empty()
    }

    /// Requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.requests.len()
    }

    /// Whether it would talk to an opening of this epoch.
    pub(super) fn prefers(&self, epoch: u64) -> bool {
        epoch > self.epoch
    }

    /// Whether it talks to an opening of a higher epoch than this, or did last.
    pub(super) fn has_left(&self, epoch: u64) -> bool {
        epoch < self.epoch
    }

    /// Talk to this opening.
    pub(super) fn connect(&mut self, peer: Peer) {
        assert!(self.prefers(peer.epoch) && self.peer.is_none());
        self.peer = Some(peer);
        self.epoch = peer.epoch;
        self.durability = Durability::opened(self.persist, self.history.now());
        if self.is_direct {
            self.history.set_direct(true);
            self.flushes_first = peer.epoch.is_multiple_of(2);
        }
    }

    /// Talk to nobody: what was asked for has an unknown outcome.
    pub(super) fn disconnect(&mut self) {
        if self.peer.take().is_some() {
            self.requests.forget_all();
            self.history.crash();
        }
    }

    /// The next request, if there is room for it.
    pub(super) fn ask(
        &mut self,
        now: Nanos,
        pool: &Pool,
        order: impl FnOnce(SectorRange),
    ) -> Option<(RequestId, Request)> {
        if self.asks_left == 0 || self.requests.len() >= self.workload.depth() {
            return None;
        }
        self.asks_left -= 1;
        if std::mem::take(&mut self.flushes_first) {
            return Some(self.flush(now));
        }
        let ask = self.workload.next(self.history.sectors());
        self.send(now, pool, ask, order)
    }

    /// Ask for everything to be durable.
    pub(super) fn flush(&mut self, now: Nanos) -> (RequestId, Request) {
        self.durability.flush_sent();
        let waiting = Waiting::Flush(self.history.issue_flush());
        (self.requests.sent(now, waiting), Request::Flush)
    }

    fn send(
        &mut self,
        now: Nanos,
        pool: &Pool,
        ask: Ask,
        order: impl FnOnce(SectorRange),
    ) -> Option<(RequestId, Request)> {
        let history = &mut self.history;
        let (waiting, request) = match ask {
            Ask::Read(range) => (
                Waiting::Read(history.issue_read(range)),
                Request::Read { range },
            ),
            Ask::Write(range, content, fua) => {
                let mut buf = pool.alloc_for(range)?;
                let id = history.issue_write(range, content);
                let content = history.write(id).content;
                for (sector, bytes) in (range.start..).zip(buf.chunks_mut(SECTOR_BYTES)) {
                    content.fill(VOLUME, sector, bytes);
                }
                order(range);
                let data = buf.freeze();
                (Waiting::Write(id, fua), Request::Write { range, data, fua })
            }
            Ask::WriteZeroes(range, fua, no_hole) => {
                let id = history.issue_write(range, Some(Content::Zero));
                order(range);
                let request = Request::WriteZeroes {
                    range,
                    fua,
                    no_hole,
                };
                (Waiting::Write(id, fua), request)
            }
            Ask::Discard(range, fua) => {
                let id = history.issue_write(range, Some(Content::Zero));
                order(range);
                (Waiting::Write(id, fua), Request::Discard { range, fua })
            }
            Ask::Flush => return Some(self.flush(now)),
            Ask::Promote(range) => (Waiting::Other, Request::Promote { range }),
            Ask::Evict(range) => (Waiting::Other, Request::Evict { range }),
            // What is out of range or about allocation is the matter of other worlds.
            Ask::Extents(..) | Ask::Bad(..) => return None,
        };
        if let Waiting::Write(id, _) = waiting {
            let write = self.history.write(id);
            (self.leases).sent(self.epoch, id, write.content, write.range);
        }
        Some((self.requests.sent(now, waiting), request))
    }

    /// A request was answered by whom it talks to. Errors are right if that volume `may_fail` what it is asked. Returns
    /// whether the connection is over.
    pub(super) fn answered(
        &mut self,
        now: Nanos,
        id: RequestId,
        result: Result<Reply, RequestError>,
        may_fail: bool,
        shared: &Shared,
        coverage: &mut Coverage,
    ) -> Result<bool, Violation> {
        let (_, waiting) = self.requests.answered(id)?;
        coverage.replies += 1;
        match result {
            Ok(reply) => {
                let is_direct = self.succeeded(now, waiting, reply, shared)?;
                coverage.direct_writes += u64::from(is_direct);
                Ok(false)
            }
            Err(RequestError::Fenced) => Ok(true),
            Err(error) => {
                coverage.errors += 1;
                if let Waiting::Write(id, _) = waiting {
                    match error {
                        RequestError::Io | RequestError::Corrupt => self.history.fail_write(id),
                        _ => self.history.refuse_write(id),
                    }
                }
                if may_fail || error == RequestError::NoBuffers {
                    return Ok(false);
                }
                let message = format!("{waiting:?} failed: {error}");
                Err(Violation::new("error-without-cause", message))
            }
        }
    }

    /// A request has succeeded. Returns whether it was a write past the log.
    fn succeeded(
        &mut self,
        now: Nanos,
        waiting: Waiting,
        reply: Reply,
        shared: &Shared,
    ) -> Result<bool, Violation> {
        let durable = |sector| shared.durable(sector);
        match (waiting, reply) {
            (Waiting::Read(read), Reply::Data(data)) => {
                let seen = check_reads::check_read(&mut self.history, VOLUME, read, &data)?;
                self.durability.read_seen(&mut self.history, seen);
            }
            (Waiting::Write(id, fua), Reply::Done) => {
                self.acked += 1;
                self.history.ack_write(id, now);
                self.leases.acked(id, self.history.write(id).range);
                if fua {
                    self.history.order_fua(id);
                }
                self.durability.write_acked(&mut self.history, id, fua);
                if self.history.write(id).direct {
                    if fua {
                        check_policy::check_written(&self.history, id, durable)?;
                    }
                    return Ok(true);
                }
            }
            (Waiting::Flush(flush), Reply::Done) => {
                check_policy::check_flushed(&self.history, flush, durable)?;
                self.durability.flush_acked(&mut self.history, flush);
            }
            (Waiting::Other, Reply::Done) => {}
            (waiting, reply) => {
                let message = format!("{waiting:?} was answered with {reply:?}");
                return Err(Violation::new("reply-kind", message));
            }
        }
        Ok(false)
    }
}
