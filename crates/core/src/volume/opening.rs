//! The opening of a volume: its log is replayed, and requests that come meanwhile wait.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::Context;
use super::op::Op;
use super::port::{Kind, Port};
use crate::base::buf::Buf;
use crate::base::error::RequestError;
use crate::base::io::{Action, Nanos, Request, RequestId};
use crate::log::replay::Replay;
use crate::log::write_log::WriteLog;

/// See the module.
#[derive(Debug)]
pub(super) struct Opening {
    replay: Option<Replay>,
    /// Requests that came while the log was being replayed.
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
        while let Some(read) = self
            .replay
            .as_mut()
            .and_then(|replay| replay.next_read(cx.pool))
        {
            let token = port.begin(Op::Replay { chunk: read.chunk });
            cx.actions.push(Action::LogRead {
                token,
                offset: read.offset,
                buf: read.buf,
            });
        }
    }

    /// A request has come.
    pub(super) fn wait(&mut self, id: RequestId, request: Request) {
        self.early.push_back((id, request));
    }

    /// Those that wait; they wait no longer.
    pub(super) fn take_waiting(&mut self) -> VecDeque<(RequestId, Request)> {
        core::mem::take(&mut self.early)
    }

    /// Refuse those that wait.
    pub(super) fn refuse(&mut self, error: RequestError, port: &mut Port, cx: &mut Context<'_>) {
        for (id, _) in self.take_waiting() {
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
    });
}
