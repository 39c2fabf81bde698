//! Acknowledgements that wait until the log is durable, in the order of what they wait for.

use alloc::collections::VecDeque;

use crate::base::error::RequestError;
use crate::base::io::{Reply, RequestId};
use crate::log::extent_index::Sequence;
use crate::volume::Context;
use crate::volume::port::{Kind, Port};

/// An acknowledgement that waits for durability.
#[derive(Clone, Copy, Debug)]
pub(in crate::volume) struct Waiter {
    /// Answered once every entry before this sequence is durable.
    pub(in crate::volume) until: Sequence,
    pub(in crate::volume) id: RequestId,
    pub(in crate::volume) kind: Kind,
    /// A write that the client wants durable: its acknowledgement orders what follows.
    pub(in crate::volume) fua: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(in crate::volume) struct Waiters {
    /// In order of `until`.
    waiters: VecDeque<Waiter>,
}

impl Waiters {
    /// Answer once the log is durable up to what it covers. Others that came after it may wait for more already; they
    /// are answered in order.
    pub(in crate::volume) fn wait(&mut self, mut waiter: Waiter) {
        let last = self.waiters.back();
        waiter.until = last.map_or(waiter.until, |last| last.until.max(waiter.until));
        self.waiters.push_back(waiter);
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// What the last one waits for.
    pub(super) fn until(&self) -> Option<Sequence> {
        self.waiters.back().map(|last| last.until)
    }

    /// Answer what waited for what is durable now. Returns whether a client counts on something of it from now on.
    pub(super) fn answer(
        &mut self,
        durable: Sequence,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) -> bool {
        let mut promised = false;
        while let Some(waiter) = self.waiters.pop_front_if(|next| next.until <= durable) {
            promised |= waiter.fua;
            port.reply(waiter.id, waiter.kind, Ok(Reply::Done), cx);
        }
        promised
    }

    /// Tell all of an error.
    pub(in crate::volume) fn refuse(
        &mut self,
        error: RequestError,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        for waiter in core::mem::take(&mut self.waiters) {
            port.reply(waiter.id, waiter.kind, Err(error), cx);
        }
    }
}
