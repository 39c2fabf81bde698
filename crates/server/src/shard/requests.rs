//! The requests of a shard, from where they are submitted to where they have ended.
//!
//! One way for all: submitted, then in the flow that quality of service lets go from (if anything is limited), then in the
//! queue of their volume ([`super::served::Served::waiting`]), which takes so many at once, then pending in the volume,
//! then ended, for their origin to be told.

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{Nanos, Request, RequestId};
use hdcs_core::base::limits::REQUEST_BYTES_MAX;
use hdcs_core::node::common_window::CommonWindow;
use hdcs_core::node::qos::{Cost, FlowId, Qos, Scheduler};
use hdcs_frontend::VolumeNumber;

use super::served::{Class, Ended, Origin, Pending, Submitted};
use super::slots::Slots;

/// See the module.
pub struct Requests {
    submitted: VecDeque<Submitted>,
    /// Which of them goes next, if there is something to choose.
    pub scheduler: Scheduler<Submitted>,
    /// The flow of what the node does for itself: promotions and evictions.
    background: FlowId,
    /// What volumes work on, by the identity that they know a request by.
    pending: Slots<Pending>,
    ended: Vec<(Origin, Ended)>,
}

impl Requests {
    /// None yet, on the shard of this number.
    pub fn new(window: &Arc<CommonWindow>, shard: usize) -> Self {
        let mut scheduler = Scheduler::default();
        scheduler.join(window, shard);
        Self {
            background: scheduler.add(Nanos(0), Qos::default()),
            scheduler,
            submitted: VecDeque::new(),
            pending: Slots::default(),
            ended: Vec::new(),
        }
    }

    /// A request comes in.
    pub fn submit(&mut self, one: Submitted) {
        self.submitted.push_back(one);
    }

    /// Whether some were submitted and have gone no further.
    pub fn has_submitted(&self) -> bool {
        !self.submitted.is_empty()
    }

    /// Whether there is something to do at once.
    pub fn has_more(&self) -> bool {
        self.has_submitted() || !self.ended.is_empty() || self.scheduler.has_changed()
    }

    /// Let what was submitted wait for its turn, in the flow of its volume; what is for none ends. Without limits nothing
    /// waits.
    pub fn schedule(&mut self, now: Nanos, flow_of: impl Fn(VolumeNumber) -> Option<FlowId>) {
        if !self.scheduler.is_on() {
            return;
        }
        while let Some(one) = self.submitted.pop_front() {
            let Some(flow) = flow_of(one.volume) else {
                self.refuse(now, one);
                continue;
            };
            let flow = match one.origin {
                Origin::Connection(..) => flow,
                Origin::Job(_) | Origin::Scrub(_) => self.background,
            };
            let cost = Cost::of(&one.request);
            self.scheduler.submit(now, flow, cost, one);
        }
    }

    /// The next one whose turn it is.
    pub fn next(&mut self, now: Nanos) -> Option<Submitted> {
        if !self.scheduler.is_on() {
            return self.submitted.pop_front();
        }
        let (mut one, ticket) = self.scheduler.next(now)?;
        one.ticket = Some(ticket);
        Some(one)
    }

    /// Answer what will not reach its volume.
    pub fn refuse(&mut self, now: Nanos, one: Submitted) {
        if let Some(ticket) = one.ticket {
            self.scheduler.ended(now, ticket);
        }
        self.ended.push((one.origin, Err(RequestError::Closing)));
    }

    /// A volume takes one: what it is to be told.
    pub fn begin(&mut self, one: Submitted) -> (RequestId, Request) {
        let pending = self.pending.insert(Pending {
            origin: one.origin,
            arrived: one.arrived,
            class: Class::of(&one.request),
            ticket: one.ticket,
        });
        (RequestId(u64::from(pending)), one.request)
    }

    /// A volume answers one: how it is counted, and when it had come.
    pub fn end(&mut self, now: Nanos, id: RequestId, result: Ended) -> (Class, Nanos) {
        let pending = self.pending.remove(id.0 as u32);
        let pending = pending.expect("a volume answers what it was asked, once");
        if let Some(ticket) = pending.ticket {
            self.scheduler.ended(now, ticket);
        }
        self.ended.push((pending.origin, result));
        (pending.class, pending.arrived)
    }

    /// Hand each that has ended to its origin.
    pub fn take_ended(&mut self) -> Vec<(Origin, Ended)> {
        std::mem::take(&mut self.ended)
    }

    /// Take back the emptied list, whose memory it uses again.
    pub fn keep_emptied(&mut self, emptied: Vec<(Origin, Ended)>) {
        if self.ended.is_empty() {
            self.ended = emptied;
        }
    }

    /// Refuse those that wait in a flow and in the queue of its volume, and that are such.
    pub fn withdraw(
        &mut self,
        now: Nanos,
        flow: FlowId,
        waiting: &mut VecDeque<Submitted>,
        is_such: impl Fn(&Submitted) -> bool,
    ) {
        let of_turn = self.scheduler.withdraw(flow, &is_such);
        let before = std::mem::take(waiting);
        let (of_volume, left): (VecDeque<_>, VecDeque<_>) = before.into_iter().partition(&is_such);
        *waiting = left;
        for one in of_turn.into_iter().chain(of_volume) {
            self.refuse(now, one);
        }
    }

    /// Whether so much waits in a flow that its clients have to wait with more: what they send takes memory that others
    /// need, of which there are `pool_bytes`.
    pub fn is_flooded(&self, flow: FlowId, pool_bytes: u64) -> bool {
        let (all, queued) = (
            self.scheduler.queued_bytes_of_all(),
            self.scheduler.queued_bytes(flow),
        );
        let is_large = all > pool_bytes / 4 && queued > REQUEST_BYTES_MAX as u64;
        self.scheduler.is_on() && (queued > pool_bytes / 8 || is_large)
    }
}
