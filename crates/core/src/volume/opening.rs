//! The opening of a volume: its log is replayed, and requests that come meanwhile wait. Once it is open they are served
//! in the order in which they came, so many in one step: whoever comes while some still wait, waits behind them.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::Context;
use super::op::Op;
use super::port::{Kind, Port};
use crate::base::buf::Buf;
use crate::base::error::RequestError;
use crate::base::io::{Action, Nanos, Request, RequestId};
use crate::base::limits::{BLOCK_SECTORS, REQUEST_BLOCKS_MAX, STEP_WORK_MAX};
use crate::log::replay::Replay;
use crate::log::write_log::WriteLog;

/// What serving a request costs beside a look for each of its blocks, in looks.
const REQUEST_LOOKS: usize = 8;

/// See the module.
#[derive(Debug)]
pub(super) struct Opening {
    replay: Option<Replay>,
    /// Requests that came while the log was being replayed, and after that while such were waiting.
    early: VecDeque<(RequestId, Request)>,
    started: Nanos,
}

impl Opening {
    /// The opening of the volume of this name begins, whose log's region has so many bytes.
    pub(super) fn new(uuid: [u8; 16], log_bytes: u64, now: Nanos) -> Self {
        Self {
            replay: Some(Replay::new(uuid, log_bytes)),
            early: VecDeque::new(),
            started: now,
        }
    }

    /// When it began.
    pub(super) fn started(&self) -> Nanos {
        self.started
    }

    /// The replay, until it has ended.
    pub(super) fn replay(&mut self) -> Option<&mut Replay> {
        self.replay.as_mut()
    }

    /// Whether the log is being replayed.
    pub(super) fn is_replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// The log cannot be opened, or is not to be any more.
    pub(super) fn give_up(&mut self) {
        self.replay = None;
    }

    /// All is replayed.
    pub(super) fn take_log(&mut self) -> WriteLog {
        self.replay.take().expect("it was replayed").into_log()
    }

    /// Read more of the log, as far as there is memory.
    pub(super) fn read_ahead(&mut self, port: &mut Port, cx: &mut Context<'_>) {
        while let Some(replay) = self.replay.as_mut()
            && replay.has_memory()
            && let Some(read) = replay.next_read(cx.pool)
        {
            let token = port.begin(Op::Replay { chunk: read.chunk });
            cx.actions.push(Action::LogRead {
                token,
                offset: read.offset,
                buf: read.buf,
                is_bad: false,
            });
        }
    }

    /// Whether the log is not read on because there is no memory for what it may hold.
    pub(super) fn awaits_memory(&mut self) -> bool {
        let replay = self.replay.as_mut();
        replay.is_some_and(|replay| !replay.has_memory())
    }

    /// A request has come.
    pub(super) fn wait(&mut self, id: RequestId, request: Request) {
        self.early.push_back((id, request));
    }

    /// Whether some wait.
    pub(super) fn has_waiting(&self) -> bool {
        !self.early.is_empty()
    }

    /// The first of those that wait: as many as one step serves.
    pub(super) fn take_piece(&mut self) -> Vec<(RequestId, Request)> {
        if self.early.is_empty() {
            // Nearly always, and every poll asks.
            return Vec::new();
        }
        let mut looks_left = STEP_WORK_MAX;
        let fits = |(_, request): &&(RequestId, Request)| {
            // Nobody has looked yet whether the range lies within the volume.
            let blocks = request
                .range()
                .map_or(0, |range| range.count / BLOCK_SECTORS);
            let looks = REQUEST_LOOKS + blocks.min(REQUEST_BLOCKS_MAX as u64) as usize;
            let fits = looks <= looks_left;
            looks_left = looks_left.saturating_sub(looks);
            fits
        };
        let count = self.early.iter().take_while(fits).count();
        self.early.drain(..count).collect()
    }

    /// Refuse those that wait.
    pub(super) fn refuse(&mut self, error: RequestError, port: &mut Port, cx: &mut Context<'_>) {
        for (id, _) in core::mem::take(&mut self.early) {
            port.reply(id, Kind::Other, Err(error), cx);
        }
    }
}

/// Have a superblock say that the log is open.
pub(super) fn write_superblock((offset, block): (u64, Buf), port: &mut Port, cx: &mut Context<'_>) {
    let token = port.begin(Op::OpeningSuperblock);
    cx.actions.push(Action::LogWrite {
        token,
        offset,
        data: Vec::from([block]),
        way: None,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::io::SectorRange;
    use crate::base::limits::{LOG_BYTES_MIN, VOLUME_REQUESTS_MAX};

    /// How many requests for such a range go in each step.
    fn pieces(range: SectorRange) -> Vec<usize> {
        let mut opening = Opening::new([7; 16], LOG_BYTES_MIN, Nanos(0));
        for id in 0..VOLUME_REQUESTS_MAX as u64 {
            opening.wait(RequestId(id), Request::Read { range });
        }
        let mut next = 0;
        core::iter::from_fn(|| {
            let piece = opening.take_piece();
            for (id, _) in &piece {
                assert_eq!(id.0, next, "in the order in which they came");
                next += 1;
            }
            (!piece.is_empty()).then_some(piece.len())
        })
        .collect()
    }

    #[test]
    fn opening_has_what_waits_served_in_pieces() {
        let small = pieces(SectorRange::new(8, 8));
        assert_eq!(small.iter().sum::<usize>(), VOLUME_REQUESTS_MAX);
        assert!(small.iter().all(|&count| count <= 56), "{small:?}");
        let large = pieces(SectorRange::new(0, 2048));
        assert_eq!(large.len(), VOLUME_REQUESTS_MAX);
        // One that will be refused counts like any other.
        let wrong = pieces(SectorRange::new(u64::MAX, u64::MAX));
        assert_eq!(wrong.len(), VOLUME_REQUESTS_MAX);
    }
}
