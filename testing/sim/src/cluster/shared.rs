//! The one backend behind all nodes, and who may use it.
//!
//! | kind | a newer epoch comes | an older one that goes on |
//! |---|---|---|
//! | fences | it is the owner at once | ends with `Fenced`; what was in flight happened or not |
//! | has a lock | waits, its operations end with `Unreachable` | may write until it ends; what it writes is committed |
//!
//! The lock has the epoch of its last owner beside it: who finds a higher one gives it back. What an owner had not flushed
//! may be lost when it goes; but where writes go past the log it is kept, and waits to be flushed: what a client was told
//! of a flush is checked against that ([`crate::check_policy`]).
//!
//! Checked here: what is written keeps what flushes ordered ([`BackendOrder`]).

use std::collections::BTreeMap;

use fastrand::Rng;
use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, SectorRange};
use hdcs_core::base::limits::SECTOR_BYTES;

use super::client::VOLUME;
use super::plant::Plant;
use super::scenario::Scenario;
use crate::backend::Backend;
use crate::check_backend::BackendOrder;
use crate::content::Content;
use crate::disk::{OpId, joined};
use crate::model::History;
use crate::violation::Violation;

/// A volume that is open, as the backend sees it. Newer ones have higher epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct User {
    /// Epoch of its group.
    pub(super) epoch: u64,
}

/// What a volume asks of the backend.
#[derive(Debug)]
pub(super) enum Wanted {
    Read(u64, BufMut),
    Write(u64, Vec<Buf>),
    Zero(SectorRange, bool),
    Flush,
}

/// An operation that has begun.
#[derive(Debug)]
pub(super) struct Begun {
    user: User,
    /// `None`: it was refused.
    op: Option<OpId>,
    /// Of a read.
    buf: Option<BufMut>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    backend: Backend,
    fences: bool,
    /// What an owner had not flushed is there for the next one.
    keeps: bool,
    owner: Option<User>,
    /// The highest epoch that has ever owned it.
    noted: u64,
    /// The owner has gone, but for what is in flight.
    is_leaving: bool,
    live: BTreeMap<OpId, (User, Kind)>,
    /// What was sent to it, against what clients know.
    pub(super) order: BackendOrder,
    random: Rng,
    plant: Option<Plant>,
}

impl Shared {
    /// One that holds zeroes.
    pub(super) fn new(sectors: u64, scenario: &Scenario, seed: u64, plant: Option<Plant>) -> Self {
        let content = vec![Content::Zero; sectors as usize];
        Self {
            backend: Backend::new(VOLUME, content, false, seed),
            fences: scenario.fences,
            keeps: scenario.config.policy.is_direct(),
            owner: None,
            noted: 0,
            is_leaving: false,
            live: BTreeMap::new(),
            order: BackendOrder::default(),
            random: Rng::with_seed(seed ^ 0x5a5a),
            plant,
        }
    }

    /// What it holds durably.
    pub(super) fn durable(&self, sector: u64) -> Content {
        self.backend.durable(sector)
    }

    /// Whether this one owns it, now that it comes.
    fn owns(&mut self, user: User) -> bool {
        if self.owner == Some(user) && !self.is_leaving {
            return true;
        }
        let is_newer = user.epoch > self.noted;
        if self.plant == Some(Plant::Unfenced) && !is_newer {
            return true;
        }
        if !is_newer || (self.owner.is_some() && !self.fences) {
            return false;
        }
        if let Some(last) = self.owner.filter(|_| self.plant != Some(Plant::Unfenced)) {
            self.settle(last);
        }
        self.change_owner();
        self.owner = Some(user);
        self.noted = user.epoch;
        true
    }

    /// What the last owner had not flushed is lost, or not.
    fn change_owner(&mut self) {
        (self.owner, self.is_leaving) = (None, false);
        if self.live.is_empty() && self.random.bool() && !self.keeps {
            self.backend.power_cut();
            self.backend.client_lost();
        }
        self.order.reopened();
    }

    /// What somebody has in flight has happened, or in part, or not.
    fn settle(&mut self, user: User) {
        let (random, backend) = (&mut self.random, &mut self.backend);
        self.live.retain(|&op, &mut (other, kind)| {
            if other != user {
                return true;
            }
            match (kind, random.u8(..3)) {
                (Kind::Write, 0) => backend.complete_write(op),
                (Kind::Write, 1) => backend.fail_write(op),
                _ => backend.cancel(op),
            }
            false
        });
    }

    /// A volume is opened.
    pub(super) fn open(&mut self, user: User) {
        self.owns(user);
    }

    /// A volume has ended in good order: what it has in flight goes on.
    pub(super) fn leave(&mut self, user: User) {
        if self.owner == Some(user) {
            self.is_leaving = true;
            self.release();
        }
    }

    /// A volume has gone with its node.
    pub(super) fn lose(&mut self, user: User) {
        self.settle(user);
        self.leave(user);
    }

    /// Whether a volume owns it.
    pub(super) fn is_owned_by(&self, user: User) -> bool {
        self.owner == Some(user)
    }

    fn release(&mut self) {
        let Some(owner) = self.owner.filter(|_| self.is_leaving) else {
            return;
        };
        if !self.live.values().any(|(user, _)| *user == owner) {
            self.change_owner();
        }
    }

    /// Begin what a volume wants; what it writes is checked against what clients know.
    pub(super) fn begin(
        &mut self,
        user: User,
        wanted: Wanted,
        history: &mut History,
    ) -> Result<Begun, Violation> {
        let refused = Begun {
            user,
            op: None,
            buf: None,
        };
        if !self.owns(user) {
            return Ok(refused);
        }
        let (op, kind, buf) = match wanted {
            Wanted::Read(offset, buf) => {
                let range = sectors(offset, buf.len());
                (self.backend.submit_read(range), Kind::Read, Some(buf))
            }
            Wanted::Write(offset, data) => {
                let bytes = joined(&data);
                let range = sectors(offset, bytes.len());
                let contents = decode(range, &bytes)?;
                self.check(history, range, &contents)?;
                (
                    self.backend.submit_write(range, contents),
                    Kind::Write,
                    None,
                )
            }
            Wanted::Zero(range, unmap) => {
                let contents = vec![Content::Zero; range.count as usize];
                self.check(history, range, &contents)?;
                (self.backend.submit_zero(range, unmap), Kind::Write, None)
            }
            Wanted::Flush => (self.backend.submit_flush(), Kind::Flush, None),
        };
        self.live.insert(op, (user, kind));
        Ok(Begun {
            op: Some(op),
            buf,
            ..refused
        })
    }

    fn check(
        &mut self,
        history: &mut History,
        range: SectorRange,
        contents: &[Content],
    ) -> Result<(), Violation> {
        let backend = &self.backend;
        self.order
            .submit(history, range, contents, |sector| backend.durable(sector))
    }

    /// An operation ends.
    pub(super) fn end(&mut self, begun: Begun) -> Result<Done, IoError> {
        let Begun { user, op, buf } = begun;
        let live = op.and_then(|op| Some((op, self.live.remove(&op)?)));
        let Some((op, (_, kind))) = live else {
            let is_over = self.fences && self.noted > user.epoch;
            return Err(if is_over {
                IoError::Fenced
            } else {
                IoError::Unreachable
            });
        };
        let result = match (kind, buf) {
            (Kind::Read, Some(mut buf)) => {
                self.backend.complete_read(op, &mut buf);
                Ok(Done::Read(buf))
            }
            (Kind::Flush, _) if self.plant == Some(Plant::LazyFlush) => {
                self.backend.cancel(op);
                Ok(Done::Written)
            }
            (Kind::Flush, _) if !self.backend.complete_flush(op) => Err(IoError::Failed),
            (Kind::Flush, _) => Ok(Done::Written),
            _ => {
                self.backend.complete_write(op);
                Ok(Done::Written)
            }
        };
        self.release();
        result
    }
}

fn sectors(offset: u64, bytes: usize) -> SectorRange {
    let sector = SECTOR_BYTES as u64;
    SectorRange::new(offset / sector, bytes as u64 / sector)
}

fn decode(range: SectorRange, bytes: &[u8]) -> Result<Vec<Content>, Violation> {
    let all = (range.start..).zip(bytes.chunks(SECTOR_BYTES));
    let contents = all.map(|(sector, bytes)| {
        Content::decode(VOLUME, sector, bytes).ok_or_else(|| {
            let message =
                format!("sector {sector} of the backend is given bytes that nobody wrote there");
            Violation::new("backend-foreign", message)
        })
    });
    contents.collect()
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::buf::Pool;

    use super::*;

    const OLD: User = User { epoch: 1 };
    const NEW: User = User { epoch: 2 };

    fn shared(fences: bool) -> Shared {
        let mut scenario = Scenario::new(1);
        scenario.fences = fences;
        Shared::new(8, &scenario, 1, None)
    }

    fn write(shared: &mut Shared, user: User, history: &mut History) -> Begun {
        let range = SectorRange::new(0, 1);
        let id = history.issue_write(range, None);
        let mut buf = Pool::new(1 << 20).alloc(SECTOR_BYTES).unwrap();
        Content::Write(id).fill(VOLUME, 0, &mut buf);
        let wanted = Wanted::Write(0, vec![buf.freeze()]);
        shared.begin(user, wanted, history).unwrap()
    }

    #[test]
    fn backend_that_fences_takes_nothing_of_an_older_owner() {
        let mut history = History::new(vec![Content::Zero; 8]);
        let mut shared = shared(true);
        shared.open(OLD);
        let begun = write(&mut shared, OLD, &mut history);
        shared.open(NEW);
        assert_eq!(shared.end(begun).unwrap_err(), IoError::Fenced);
        let begun = write(&mut shared, OLD, &mut history);
        assert_eq!(shared.end(begun).unwrap_err(), IoError::Fenced);
        let begun = write(&mut shared, NEW, &mut history);
        assert!(shared.end(begun).is_ok());
    }

    #[test]
    fn backend_with_a_lock_is_waited_for_until_its_owner_and_all_of_its_writes_have_ended() {
        let mut history = History::new(vec![Content::Zero; 8]);
        let mut shared = shared(false);
        shared.open(OLD);
        let begun = write(&mut shared, OLD, &mut history);
        shared.leave(OLD);
        let refused = write(&mut shared, NEW, &mut history);
        assert_eq!(shared.end(refused).unwrap_err(), IoError::Unreachable);
        assert!(shared.end(begun).is_ok());
        let begun = write(&mut shared, NEW, &mut history);
        assert!(shared.end(begun).is_ok());
        shared.lose(NEW);
        let refused = write(&mut shared, OLD, &mut history);
        assert!(shared.end(refused).is_err(), "a higher epoch is noted");
    }
}
