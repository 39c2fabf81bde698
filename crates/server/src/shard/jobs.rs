//! Promoting and evicting long ranges, piece by piece, beside the clients' requests.

use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{Request, SectorRange};
use hdcs_frontend::VolumeNumber;

use super::command::Answer;

/// Sectors in one piece of a promotion: small, since its data passes through buffers.
const PROMOTE_SECTORS: u64 = (1 << 20) / 512;
/// Sectors in one piece of an eviction: bounds the time in one step.
const EVICT_SECTORS: u64 = (64 << 20) / 512;
/// Pieces under way at once.
const DEPTH: usize = 4;

/// Which way a job moves its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Into the read cache.
    Promote,
    /// Out of it.
    Evict,
}

/// One range on its way.
#[derive(Debug)]
pub struct Job {
    /// Of which volume.
    pub volume: VolumeNumber,
    way: Move,
    rest: SectorRange,
    under_way: usize,
    failed: Option<RequestError>,
    answer: Answer<()>,
}

impl Job {
    /// A job for a range, answered when all of it is done.
    pub fn new(volume: VolumeNumber, way: Move, range: SectorRange, answer: Answer<()>) -> Self {
        Self {
            volume,
            way,
            rest: range,
            under_way: 0,
            failed: None,
            answer,
        }
    }

    /// The next piece, if one may start now. Pieces end at multiples of their size.
    pub fn next(&mut self) -> Option<Request> {
        if self.rest.is_empty() || self.under_way == DEPTH || self.failed.is_some() {
            return None;
        }
        let piece = match self.way {
            Move::Promote => PROMOTE_SECTORS,
            Move::Evict => EVICT_SECTORS,
        };
        let end = (self.rest.start / piece + 1) * piece;
        let range = SectorRange::between(self.rest.start, end.min(self.rest.end()));
        self.rest = SectorRange::between(range.end(), self.rest.end());
        self.under_way += 1;
        Some(match self.way {
            Move::Promote => Request::Promote { range },
            Move::Evict => Request::Evict { range },
        })
    }

    /// A piece ended.
    pub fn ended(&mut self, result: Result<(), RequestError>) {
        self.under_way -= 1;
        if let Err(error) = result {
            self.failed.get_or_insert(error);
        }
    }

    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.under_way == 0 && (self.rest.is_empty() || self.failed.is_some())
    }

    /// Tell who asked.
    pub fn answer(self) {
        let at = self.rest.byte_offset();
        let result = match self.failed {
            None => Ok(()),
            Some(error) => Err(format!("stopped before byte {at}: {error}")),
        };
        // Whoever asked may have gone.
        let _ = self.answer.send(result);
    }
}
