//! Requests of the client, and what is appended for them.

use std::sync::Arc;

use hdcs_core::replication::Spans;

use super::{Act, Scope, World, member};
use crate::checks::Broken;
use crate::clients::{Answer, Service};
use crate::node::Part;

impl World {
    /// What may be asked of a node that serves.
    pub(super) fn requests(&self, scope: &Scope, index: usize, acts: &mut Vec<Act>) {
        let Some(up) = &self.nodes[index].up else {
            return;
        };
        let (Some(service), Part::Serves(group)) = (&up.service, &up.part) else {
            return;
        };
        let appends = self.appends(scope, up, group);
        let numbers = self.client.numbers(scope.requests, scope.window);
        let acts_on = |number: &u64| match service.answer(*number, scope.plant) {
            Answer::Take => appends,
            Answer::Wait => false,
            Answer::Result(_) | Answer::Refuse => true,
        };
        acts.extend(
            numbers
                .filter(acts_on)
                .map(|number| Act::Request(index, number)),
        );
        if appends && self.checkpoints < scope.tails {
            acts.push(Act::Checkpoint(index));
        }
    }

    pub(super) fn request(&mut self, scope: &Scope, index: usize, number: u64) {
        let Some(service) = self.service(index) else {
            return;
        };
        match service.answer(number, scope.plant) {
            Answer::Take => {
                self.append_record(scope, index, |service, at| service.take(number, at));
            }
            Answer::Result(result) => self.client.told(number, result),
            Answer::Wait => {}
            Answer::Refuse => self.broken = Some(Broken::Refused),
        }
    }

    pub(super) fn checkpoint(&mut self, scope: &Scope, index: usize) {
        self.checkpoints += 1;
        let plant = scope.plant;
        self.append_record(scope, index, |service, at| service.checkpoint(at, plant));
    }

    /// The client registers at the first node, and sends what is not answered when everything begins.
    pub(super) fn begin_requests(&mut self, scope: &Scope) {
        self.append_record(scope, 0, Service::register);
        self.begin(scope);
        for number in 1..=u64::from(scope.unanswered) {
            self.request(scope, 0, number);
            self.begin(scope);
        }
        self.spans = 0;
    }

    fn service(&mut self, index: usize) -> Option<&Service> {
        self.nodes[index].up.as_ref()?.service.as_ref()
    }

    /// The primary appends a span with this in it.
    fn append_record(
        &mut self,
        scope: &Scope,
        index: usize,
        record: impl FnOnce(&mut Service, u64) -> Vec<u8>,
    ) {
        let Some(up) = Arc::make_mut(&mut self.nodes[index]).up.as_mut() else {
            return;
        };
        let (Some(service), Part::Serves(group)) = (&mut up.service, &up.part) else {
            return;
        };
        let epoch = group.epoch();
        let record = record(service, up.replica.head().position);
        if let Some(span) = up.next_span(member(index), &record) {
            self.spans += 1;
            Arc::make_mut(&mut self.records).insert(span.end, record);
            up.replica.append(epoch, span);
        }
        self.with(scope, index, |_| {});
    }

    /// A node begins to serve: it finds in its log what clients have asked for.
    pub(super) fn serve_requests(&mut self, scope: &Scope, index: usize) {
        let committed = self.records.requests(&self.history.committed);
        let Some(up) = Arc::make_mut(&mut self.nodes[index]).up.as_mut() else {
            return;
        };
        let Part::Serves(group) = &up.part else {
            return;
        };
        up.service = Service::rebuild(&up.replica, &self.records, scope.plant);
        match &mut up.service {
            None => self.broken = self.broken.or(Some(Broken::NoTable)),
            Some(service) if !service.has(&committed) => {
                self.broken = self.broken.or(Some(Broken::State));
            }
            Some(service) => service.committed(group.committed()),
        }
    }
}
