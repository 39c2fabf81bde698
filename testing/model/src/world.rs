//! Three nodes, the links between them, the store of the record, and everything that may happen next.
//!
//! What needs nobody else happens at once; every message, write to a medium, crash, restart, deadline and answer of the
//! store is a step of its own. Links keep their order and lose what is on its way when they break.

mod requests;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use hdcs_core::replication::group::Group;
use hdcs_core::replication::message::{Change, Copy, Message};
use hdcs_core::replication::record::{
    AckLevel, Config, GroupRecord, Members, Nodes, Phase, Seat, Shape, WhenShort,
};
use hdcs_core::replication::replica::Superblock;
use hdcs_core::replication::takeover::Step;
use hdcs_core::replication::{Member, Point, Spans};
use stateright::{Model, Property};

use crate::checks::{Broken, History};
use crate::clients::{Client, Records};
use crate::disk::{Disk, Write};
use crate::node::{Effect, Node, Part, Up};
use crate::plant::Plant;

/// Nodes.
pub const NODES: usize = 3;
/// The property that a broken rule breaks.
pub const RULE: &str = "nothing is broken";

/// What is explored: the group, and how much of each thing may happen.
#[derive(Clone, Debug)]
pub struct Scope {
    /// How many copies a write has before it is acknowledged.
    pub ack: AckLevel,
    /// The first so many nodes are members; the others are to join.
    pub members: usize,
    /// Spans that are appended.
    pub spans: u64,
    /// Nodes whose writes take time; those of others end at once.
    pub slow: [bool; NODES],
    /// Spans that the primary has under way at once.
    pub window: u64,
    /// Crashes.
    pub crashes: u8,
    /// Nodes that may crash.
    pub crashing: [bool; NODES],
    /// Takings.
    pub takings: u8,
    /// Nodes that may be named candidates.
    pub candidates: [bool; NODES],
    /// Members that miss a deadline.
    pub suspicions: u8,
    /// Links that break.
    pub breaks: u8,
    /// Tails that are set.
    pub tails: u8,
    /// Media that are lost with a crash.
    pub losses: u8,
    /// Changes of the record that are asked for again since no answer came.
    pub retries: u8,
    /// Times that the manager names the joiners anew.
    pub namings: u8,
    /// Times that the group is asked to be another one.
    pub configurations: u8,
    /// What it may be asked to be: how many of the first nodes have copies, at which level.
    pub shapes: &'static [(u16, AckLevel)],
    /// Openings that a primary raises.
    pub openings: u8,
    /// Copies that are read back and are not whole.
    pub rots: u8,
    /// Blocks of the ring of each copy.
    pub ring_blocks: u64,
    /// Spans that are sealed together, and so with one evidence.
    pub burst: u64,
    /// Requests of a client, of which it has `window` under way: each span has one, or is a checkpoint before a tail moves.
    /// 0: spans have nothing in them.
    pub requests: u8,
    /// Of them, those that are committed at the beginning, and not answered.
    pub unanswered: u8,
    /// A bug.
    pub plant: Option<Plant>,
}

/// The messages on their way from one node to another.
type Link = VecDeque<(u64, Message)>;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    nodes: [Arc<Node>; NODES],
    links: [[Arc<Link>; NODES]; NODES],
    record: GroupRecord,
    /// What the store was asked for and has not done.
    asked: Vec<GroupRecord>,
    history: History,
    /// What is in the spans.
    records: Arc<Records>,
    client: Client,
    checkpoints: u8,
    spans: u64,
    crashes: u8,
    takings: u8,
    suspicions: u8,
    breaks: u8,
    tails: u8,
    losses: u8,
    retries: u8,
    namings: u8,
    configurations: u8,
    openings: u8,
    rots: u8,
    broken: Option<Broken>,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// The primary appends spans.
    Append(usize),
    /// It raises the opening.
    Open(usize),
    /// What a node has is read back; it is good or not.
    ReadBack(usize, bool),
    /// The write of this index ends.
    Finish(usize, usize),
    /// The next message from one node arrives at another.
    Deliver(usize, usize),
    /// A node stops; these writes happen.
    Crash(usize, u32),
    /// A node stops, and starts over a new and empty medium.
    Lose(usize),
    /// It starts.
    Restart(usize),
    /// A link breaks, and is there again.
    Break(usize, usize),
    /// The primary gives up a member.
    Suspect(usize, usize),
    /// Somebody who owes an answer misses a deadline, when nothing else happens.
    Miss(usize, usize),
    /// The manager names a candidate.
    Take(usize),
    /// It names the joiners anew.
    Name,
    /// The primary is asked for the shape of this index.
    Configure(usize, usize),
    /// A node was not told how asking for a record ended, and asks again.
    AskAgain(usize),
    /// The candidate waits for no more promises.
    EndGathering(usize),
    /// It waits for nobody to be level any more.
    EndLevelling(usize),
    /// The store does what it was asked for, or refuses it.
    Store(usize),
    /// A node sees the record.
    See(usize),
    /// What is committed up to the span of this index is in the backend.
    SetTail(usize, usize),
    /// The client sends the request of this number to a node, again or for the first time.
    Request(usize, u64),
    /// The primary appends a checkpoint of what it knows of the client.
    Checkpoint(usize),
}

fn member(node: usize) -> Member {
    Member(node as u16)
}

impl Model for Scope {
    type State = World;
    type Action = Act;

    fn init_states(&self) -> Vec<World> {
        let seat = |node| Seat {
            member: member(node),
            joined: 1,
        };
        let members: Members = (0..self.members).map(seat).collect();
        let joiners: Nodes = (self.members..NODES).map(member).collect();
        let config = Config {
            members: members.clone(),
            replicas: NODES as u8,
            ack: self.ack,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        let mut record = GroupRecord::first(member(0), config, joiners);
        // The first node is made the primary by a taking like any other one; so its opening is known to all.
        record = record.taking(member(0));
        let node = |index: usize| {
            let disk = Disk::new(Superblock::new(index < self.members), self.ring_blocks);
            let up = Up::start(&disk, self.plant).expect("an empty log is whole");
            Arc::new(Node { disk, up: Some(up) })
        };
        let mut world = World {
            nodes: std::array::from_fn(node),
            links: Default::default(),
            record,
            asked: Vec::new(),
            history: History::default(),
            records: Arc::default(),
            client: Client::default(),
            checkpoints: 0,
            spans: 0,
            crashes: 0,
            takings: 0,
            suspicions: 0,
            breaks: 0,
            tails: 0,
            losses: 0,
            retries: 0,
            namings: 0,
            configurations: 0,
            openings: 0,
            rots: 0,
            broken: None,
        };
        world.begin(self);
        if self.requests > 0 {
            world.begin_requests(self);
        }
        vec![world]
    }

    fn actions(&self, world: &World, acts: &mut Vec<Act>) {
        if world.broken.is_some() {
            return;
        }
        for index in 0..NODES {
            world.acts_of(self, index, acts);
        }
        acts.extend((0..world.asked.len()).map(Act::Store));
        if world.namings < self.namings && world.record.primary().is_some() {
            acts.push(Act::Name);
        }
        if world.is_quiet() && !world.is_taken() {
            world.misses(acts);
        }
        if world.takings < self.takings {
            let members = world.record.config.members.iter();
            // As long as the secondaries are alike, it does not matter which of them is the first one to take.
            let are_alike = self.members == NODES
                && self.slow[1..].iter().all(|slow| *slow == self.slow[1])
                && world.takings == 0;
            let candidates = members.map(|member| usize::from(member.0));
            acts.extend(
                candidates
                    .filter(|node| self.candidates[*node] && (!are_alike || *node < 2))
                    .map(Act::Take),
            );
        }
    }

    fn next_state(&self, last: &World, act: Act) -> Option<World> {
        let mut world = last.clone();
        world.step(self, act);
        if world.broken.is_none() && world.is_stuck(self) {
            world.broken = Some(Broken::Stuck);
        }
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(RULE, |_, world: &World| world.broken.is_none()),
            Property::sometimes("everything is committed", |scope: &Self, world: &World| {
                world.client.has_all(scope.requests)
                    && (scope.requests > 0 || world.history.committed.len() as u64 == scope.spans)
            }),
        ]
    }
}

impl World {
    fn acts_of(&self, scope: &Scope, index: usize, acts: &mut Vec<Act>) {
        let node = &self.nodes[index];
        acts.extend((0..node.disk.in_flight.len()).map(|write| Act::Finish(index, write)));
        for to in 0..NODES {
            if !self.links[index][to].is_empty() {
                acts.push(Act::Deliver(index, to));
            }
            if self.breaks < scope.breaks && index < to {
                acts.push(Act::Break(index, to));
            }
        }
        let Some(up) = &node.up else {
            acts.push(Act::Restart(index));
            return;
        };
        if self.crashes < scope.crashes && scope.crashing[index] {
            let happened = 0..1 << node.disk.in_flight.len();
            acts.extend(happened.map(|happened| Act::Crash(index, happened)));
        }
        if self.losses < scope.losses {
            acts.push(Act::Lose(index));
        }
        if self.retries < scope.retries && up.part != Part::Follows && !self.asked.is_empty() {
            acts.push(Act::AskAgain(index));
        }
        if up.seen < self.record.revision && self.is_told_something(index, up) {
            acts.push(Act::See(index));
        }
        if up.is_reading {
            acts.push(Act::ReadBack(index, true));
            if self.rots < scope.rots {
                acts.push(Act::ReadBack(index, false));
            }
        }
        match &up.part {
            Part::Follows => {}
            Part::Takes(takeover) => match takeover.step() {
                Step::Gathers if takeover.has_enough() => acts.push(Act::EndGathering(index)),
                Step::Levels { .. } => acts.push(Act::EndLevelling(index)),
                _ => {}
            },
            Part::Serves(group) => {
                if scope.requests > 0 {
                    self.requests(scope, index, acts);
                } else if self.appends(scope, up, group) {
                    acts.push(Act::Append(index));
                }
                let is_idle = up.replica.durable() == up.replica.head();
                if self.openings < scope.openings && group.is_retired() && is_idle {
                    acts.push(Act::Open(index));
                }
                if self.suspicions < scope.suspicions {
                    let others = (0..NODES).filter(|other| *other != index);
                    acts.extend(others.map(|other| Act::Suspect(index, other)));
                }
                if self.configurations < scope.configurations {
                    acts.extend((0..scope.shapes.len()).map(|shape| Act::Configure(index, shape)));
                }
                if self.tails < scope.tails && group.is_retired() {
                    let points = up.committed();
                    let may_be = |point: &Point| match &up.service {
                        None => true,
                        // As far as it may.
                        Some(service) => {
                            point.position == service.tail_max(scope.plant)
                                && point.position > up.replica.superblock().tail.position
                        }
                    };
                    let points = (points.iter().enumerate()).filter(|(_, point)| may_be(point));
                    acts.extend(points.map(|(point, _)| Act::SetTail(index, point)));
                }
            }
        }
    }

    /// Whether the primary may append a span: it has room in its window and its ring, and others know its opening.
    fn appends(&self, scope: &Scope, up: &Up, group: &Group) -> bool {
        let head = up.replica.head().position;
        let tail = up.replica.superblock().tail.position;
        let is_known =
            scope.openings == 0 || group.is_retired() || scope.plant == Some(Plant::OpeningOfOne);
        self.spans < scope.spans
            && head - group.committed() < scope.window
            && head - tail < scope.ring_blocks
            && is_known
    }

    /// Whether it makes a difference that a node sees the record.
    fn is_told_something(&self, index: usize, up: &Up) -> bool {
        let is_candidate = self.record.phase
            == Phase::Taking {
                candidate: member(index),
            };
        is_candidate || !matches!(up.part, Part::Follows)
    }

    /// Whether everybody is up and nothing is on its way, so that only deadlines and the manager have anything go on.
    fn is_quiet(&self) -> bool {
        let is_idle = |(index, node): (usize, &Arc<Node>)| {
            let is_told =
                |up: &Up| up.seen >= self.record.revision || !self.is_told_something(index, up);
            node.disk.in_flight.is_empty()
                && (node.up.as_ref()).is_some_and(|up| is_told(up) && !up.is_reading)
        };
        self.asked.is_empty()
            && self.links.iter().flatten().all(|link| link.is_empty())
            && self.nodes.iter().enumerate().all(is_idle)
    }

    /// The primary that the record names, if it serves.
    fn primary(&self) -> Option<(usize, &Up, &Group)> {
        let index = usize::from(self.record.primary()?.0);
        let up = self.nodes[index].up.as_ref()?;
        match &up.part {
            Part::Serves(group) if group.epoch() == self.record.epoch => Some((index, up, group)),
            Part::Follows | Part::Takes(_) | Part::Serves(_) => None,
        }
    }

    /// The deadlines that may be missed.
    fn misses(&self, acts: &mut Vec<Act>) {
        let Some((index, up, group)) = self.primary() else {
            return;
        };
        let owing = group.owing(up.replica.head().position);
        acts.extend(owing.map(|other| Act::Miss(index, usize::from(other.0))));
    }

    /// Whether nothing goes on any more although something should.
    fn is_stuck(&self, scope: &Scope) -> bool {
        if !self.is_quiet() {
            return false;
        }
        if self.is_taken() {
            return self.is_candidate_stuck(scope);
        }
        let Some((.., group)) = self.primary() else {
            return false;
        };
        if self.is_span_stuck() {
            return true;
        }
        if group.is_settled() {
            return false;
        }
        let mut acts = Vec::new();
        self.misses(&mut acts);
        acts.into_iter().all(|act| {
            let mut next = self.clone();
            if let Act::Miss(index, other) = act {
                next.miss(scope, index, other);
            }
            next == *self
        })
    }

    /// Whether a node takes the group.
    fn is_taken(&self) -> bool {
        let mut all = 0..NODES;
        all.any(|index| matches!(self.part_of(index), Some(Part::Takes(_))))
    }

    /// Whether a candidate does not go on even when it waits for nobody any more.
    fn is_candidate_stuck(&self, scope: &Scope) -> bool {
        let mut next = self.clone();
        for index in 0..NODES {
            next.step(scope, Act::EndGathering(index));
            next.step(scope, Act::EndLevelling(index));
        }
        next == *self
    }

    /// Whether a member does not write what it took.
    fn is_span_stuck(&self) -> bool {
        let mut members = self.record.config.members.iter();
        members.any(|member| {
            let up = self.nodes[usize::from(member.0)].up.as_ref();
            up.is_some_and(|up| up.replica.head() != up.replica.durable())
        })
    }

    /// The first taking, and what follows from what was done, up to where all members are in step, without anything going
    /// wrong.
    fn begin(&mut self, scope: &Scope) {
        loop {
            let mut acts = Vec::new();
            for index in 0..NODES {
                self.acts_of(scope, index, &mut acts);
            }
            acts.extend((0..self.asked.len()).map(Act::Store));
            let goes_on = |act: &&Act| {
                matches!(
                    act,
                    Act::Finish(..) | Act::Deliver(..) | Act::Store(_) | Act::See(_)
                )
            };
            let Some(act) = acts.iter().find(goes_on).copied() else {
                break;
            };
            self.step(scope, act);
        }
        assert_eq!(self.broken, None);
    }

    fn step(&mut self, scope: &Scope, act: Act) {
        match act {
            Act::Append(index) => {
                self.append(scope, index);
            }
            Act::Open(index) => {
                self.openings += 1;
                self.with(scope, index, |up| {
                    let opens_at = up.replica.head().position;
                    up.change(member(index), |change| Change {
                        incarnation: change.incarnation + 1,
                        opens_at,
                        ..change
                    });
                });
            }
            Act::ReadBack(index, is_good) => self.read_back(scope, index, is_good),
            Act::Finish(index, write) => {
                let write = Arc::make_mut(&mut self.nodes[index]).disk.finish(write);
                self.with(scope, index, |up| up.finished(write));
            }
            Act::Deliver(from, to) => {
                let link = Arc::make_mut(&mut self.links[from][to]);
                let (epoch, message) = link.pop_front().expect("there is one");
                self.deliver(scope, from, to, epoch, &message);
            }
            Act::Crash(index, happened) => {
                self.crashes += 1;
                Arc::make_mut(&mut self.nodes[index]).disk.crash(happened);
                self.stop(scope, index);
            }
            Act::Lose(index) => {
                self.losses += 1;
                let is_whole = scope.plant == Some(Plant::NewIsWhole);
                Arc::make_mut(&mut self.nodes[index]).disk = Disk {
                    was_lost: true,
                    ..Disk::new(Superblock::new(is_whole), scope.ring_blocks)
                };
                self.stop(scope, index);
            }
            Act::Restart(index) => {
                let node = Arc::make_mut(&mut self.nodes[index]);
                if core::mem::take(&mut node.disk.is_given_up) && node.disk.offers_rot() {
                    self.broken = Some(Broken::RotOffered);
                    return;
                }
                let Ok(up) = Up::start(&node.disk, scope.plant) else {
                    self.broken = Some(Broken::Rot);
                    return;
                };
                node.up = Some(up);
                for other in (0..NODES).filter(|other| *other != index) {
                    self.connect(scope, index, other);
                }
            }
            Act::Break(one, other) => {
                self.breaks += 1;
                self.disconnect(scope, one, other);
                self.connect(scope, one, other);
            }
            Act::Suspect(index, other) => {
                self.suspicions += 1;
                self.suspect(scope, index, other);
            }
            Act::Take(candidate) => {
                self.takings += 1;
                let record = self.record.taking(member(candidate));
                self.asked.push(record);
                self.store(self.asked.len() - 1);
            }
            Act::Miss(index, other) => self.miss(scope, index, other),
            Act::Name => {
                self.namings += 1;
                self.record = self.record.with_joiners(self.record.joiners.clone());
            }
            Act::Configure(index, shape) => {
                self.configurations += 1;
                self.configure(scope, index, scope.shapes[shape]);
            }
            Act::AskAgain(index) => {
                self.retries += 1;
                self.with(scope, index, |up| match &mut up.part {
                    Part::Follows => {}
                    Part::Takes(takeover) => takeover.ask_again(),
                    Part::Serves(group) => group.ask_again(),
                });
            }
            Act::EndGathering(index) => self.with(scope, index, |up| {
                if let Part::Takes(takeover) = &mut up.part {
                    takeover.end_gathering();
                }
            }),
            Act::EndLevelling(index) => self.with(scope, index, |up| {
                if let Part::Takes(takeover) = &mut up.part {
                    takeover.end_levelling();
                }
            }),
            Act::Store(index) => self.store(index),
            Act::See(index) => {
                let record = self.record.clone();
                let mut begins = false;
                let before = self.others_of(index);
                self.with(scope, index, |up| {
                    begins = up.see(member(index), &record);
                });
                self.meet(scope, index, &before);
                if begins {
                    self.connect_all(scope, index);
                    if scope.plant == Some(Plant::ForgedPromise) {
                        self.forge_promise(index);
                    }
                }
            }
            Act::SetTail(index, point) => {
                self.tails += 1;
                self.with(scope, index, |up| {
                    let tail = up.committed()[point];
                    up.change(member(index), |change| Change { tail, ..change });
                });
            }
            Act::Request(index, number) => self.request(scope, index, number),
            Act::Checkpoint(index) => self.checkpoint(scope, index),
        }
        self.check();
    }

    /// The primary seals spans while it has room.
    fn append(&mut self, scope: &Scope, index: usize) {
        for _ in 0..scope.burst {
            let up = self.nodes[index].up.as_ref();
            let appends = up.is_some_and(|up| match &up.part {
                Part::Serves(group) => self.appends(scope, up, group),
                Part::Follows | Part::Takes(_) => false,
            });
            if !appends {
                break;
            }
            self.spans += 1;
            let up = Arc::make_mut(&mut self.nodes[index]).up.as_mut();
            if let Some(up) = up
                && let (Some(span), Part::Serves(group)) =
                    (up.next_span(member(index), &[]), &up.part)
            {
                up.replica.append(group.epoch(), span);
            }
        }
        self.with(scope, index, |_| {});
    }

    /// A node has read back what it has. What is rotten is so every time.
    fn read_back(&mut self, scope: &Scope, index: usize, is_good: bool) {
        let node = Arc::make_mut(&mut self.nodes[index]);
        if !is_good {
            self.rots += 1;
            node.disk.rot();
        }
        self.with(scope, index, |up| {
            up.is_reading = false;
            up.replica.verified(is_good);
        });
    }

    fn stop(&mut self, scope: &Scope, index: usize) {
        let node = Arc::make_mut(&mut self.nodes[index]);
        if let Some(up) = node.up.take() {
            node.disk.is_given_up = up.replica.superblock().is_void();
        }
        for other in (0..NODES).filter(|other| *other != index) {
            self.disconnect(scope, index, other);
        }
    }

    /// Have a node do something, and all that follows from it there.
    fn with(&mut self, scope: &Scope, index: usize, act: impl FnOnce(&mut Up)) {
        let mut act = Some(act);
        self.apply(scope, index, &mut |up| {
            if let Some(act) = act.take() {
                act(up);
            }
        });
    }

    fn apply(&mut self, scope: &Scope, index: usize, act: &mut dyn FnMut(&mut Up)) {
        let node = Arc::make_mut(&mut self.nodes[index]);
        let Some(up) = &mut node.up else { return };
        let mut effects = Vec::new();
        // An invariant of a machine's own; caught, so that the way to it is printed.
        let done = catch_unwind(AssertUnwindSafe(|| {
            act(up);
            loop {
                up.settle(member(index), &mut node.disk, scope, &mut effects);
                if scope.slow[index] || node.disk.in_flight.is_empty() {
                    break;
                }
                up.finished(node.disk.finish(0));
            }
        }));
        if done.is_err() {
            self.broken = Some(Broken::Invariant);
            return;
        }
        let (mut began, mut asked) = (false, Vec::new());
        for effect in effects {
            match effect {
                Effect::Send((to, epoch, message)) => {
                    let to = usize::from(to.0);
                    if self.is_heard(to, epoch, &message) {
                        Arc::make_mut(&mut self.links[index][to]).push_back((epoch, message));
                    }
                }
                Effect::Ask(record) => asked.push(record),
                Effect::Began => began = true,
                Effect::Overran => self.broken = self.broken.or(Some(Broken::Overrun)),
            }
        }
        self.forget_answers(index);
        if began {
            if let Some(up) = &self.nodes[index].up {
                self.broken = self.broken.or(self.history.begin(&up.replica));
            }
            if scope.requests > 0 {
                self.serve_requests(scope, index);
            }
            self.connect_all(scope, index);
        }
        if let Some(up) = &self.nodes[index].up {
            let broken = self.history.follow(up, scope.plant);
            self.broken = self.broken.or(broken);
        }
        for record in asked {
            if scope.plant == Some(Plant::ServesUnasked) {
                self.with(scope, index, |up| {
                    up.see(member(index), &record);
                });
            }
            self.asked.push(record);
        }
    }

    /// Whether a message makes a difference to whom it goes.
    fn is_heard(&self, to: usize, epoch: u64, message: &Message) -> bool {
        (self.nodes[to].up.as_ref()).is_some_and(|up| up.hears(epoch, message))
    }

    /// Drop what is on its way to a node as an answer to what it does not ask any more.
    fn forget_answers(&mut self, to: usize) {
        let Some(up) = &self.nodes[to].up else { return };
        for link in self.links.iter_mut().map(|links| &mut links[to]) {
            if link
                .iter()
                .any(|(epoch, message)| !up.hears(*epoch, message))
            {
                Arc::make_mut(link).retain(|(epoch, message)| up.hears(*epoch, message));
            }
        }
    }

    fn deliver(&mut self, scope: &Scope, from: usize, to: usize, epoch: u64, message: &Message) {
        self.with(scope, to, |up| {
            up.receive(member(to), member(from), epoch, message);
        });
        match (scope.plant, message) {
            (Some(Plant::AckBeforeDurable), Message::Append(span)) => {
                let durable = span.end.position;
                let took = self.copy_of(to).is_some_and(|copy| copy.2 == durable);
                if took {
                    self.answer(to, from, epoch, Message::Ack { durable });
                }
            }
            (Some(Plant::PromiseNotDurable), Message::Promise { .. }) => {
                if let Some((promised, copy, _)) = self.copy_of(to)
                    && promised == epoch
                {
                    let copy = Copy {
                        promised: epoch,
                        ..copy
                    };
                    self.answer(to, from, epoch, Message::Promised(copy));
                }
            }
            (Some(Plant::JoinerCountedEarly), Message::HasCut(_)) => {
                if let Some(Part::Serves(group)) = self.part_of(to) {
                    let record = group.record().join(Seat {
                        member: member(from),
                        joined: group.record().revision,
                    });
                    self.asked.push(record);
                }
            }
            (
                Some(plant @ (Plant::SpanPastEvidence | Plant::JoinerPastEvidence)),
                Message::Append(span),
            ) => {
                let node = Arc::make_mut(&mut self.nodes[to]);
                let write = Write::Span(*span);
                let took = (node.up.as_ref()).is_some_and(|up| up.replica.head() == span.end);
                let is_one = plant == Plant::SpanPastEvidence || !node.disk.superblock.is_whole;
                if took && is_one && !node.disk.in_flight.contains(&write) {
                    node.disk.in_flight.push(write);
                }
            }
            _ => {}
        }
    }

    /// The rule that was broken, if one was.
    pub fn broken(&self) -> Option<Broken> {
        self.broken
    }

    fn part_of(&self, index: usize) -> Option<&Part> {
        self.nodes[index].up.as_ref().map(|up| &up.part)
    }

    /// Which epoch a node has promised or is about to, what it says of its copy, and where what it took ends.
    fn copy_of(&self, index: usize) -> Option<(u64, Copy, u64)> {
        let replica = &self.nodes[index].up.as_ref()?.replica;
        let superblock = replica.superblock();
        let copy = Copy {
            promised: superblock.promised,
            head: replica.durable(),
            tail: superblock.tail,
            sync_points: superblock.sync_points,
            incarnation: superblock.incarnation,
            is_unflushed: superblock.is_unflushed,
            joined: superblock.joined,
            is_whole: superblock.is_whole,
            lease_left_ms: 0,
        };
        Some((replica.promised(), copy, replica.head().position))
    }

    fn answer(&mut self, from: usize, to: usize, epoch: u64, message: Message) {
        if self.is_heard(to, epoch, &message) {
            Arc::make_mut(&mut self.links[from][to]).push_back((epoch, message));
        }
    }

    /// Another member seems to promise what the candidate is about to ask for.
    fn forge_promise(&mut self, index: usize) {
        let (from, epoch) = ((index + 1) % NODES, self.record.epoch);
        let copy = Copy {
            promised: epoch,
            head: self.record.floor,
            tail: self.record.floor,
            sync_points: 0,
            incarnation: 1,
            is_unflushed: false,
            joined: 1,
            is_whole: true,
            lease_left_ms: 0,
        };
        self.answer(from, index, epoch, Message::Promised(copy));
    }

    /// Tell a node's new part of all links.
    fn connect_all(&mut self, scope: &Scope, index: usize) {
        for other in (0..NODES).filter(|other| *other != index) {
            if self.nodes[other].up.is_some() {
                self.with(scope, index, |up| up.connected(member(other)));
            }
        }
    }

    fn connect(&mut self, scope: &Scope, one: usize, other: usize) {
        if self.nodes[one].up.is_some() && self.nodes[other].up.is_some() {
            self.with(scope, one, |up| up.connected(member(other)));
            self.with(scope, other, |up| up.connected(member(one)));
        }
    }

    fn disconnect(&mut self, scope: &Scope, one: usize, other: usize) {
        self.links[one][other] = Arc::default();
        self.links[other][one] = Arc::default();
        self.with(scope, one, |up| up.disconnected(member(other)));
        self.with(scope, other, |up| up.disconnected(member(one)));
        // What the first one sent on hearing of it is lost, too.
        self.links[one][other] = Arc::default();
        self.links[other][one] = Arc::default();
    }

    /// Somebody missed a deadline: a member is to leave; the link to a joiner is broken.
    fn miss(&mut self, scope: &Scope, index: usize, other: usize) {
        if self.record.config.members.contains(member(other)) {
            self.suspect(scope, index, other);
        } else {
            self.disconnect(scope, index, other);
            self.connect(scope, index, other);
        }
    }

    fn suspect(&mut self, scope: &Scope, index: usize, other: usize) {
        self.with(scope, index, |up| {
            if let Part::Serves(group) = &mut up.part {
                group.suspect(member(other));
                if scope.plant == Some(Plant::LeaverDroppedEarly) {
                    let record = group.record().leave(member(other));
                    group.seen(&record);
                }
            }
        });
        if let (Some(Plant::LeaveNotCovered), Some(Part::Serves(group))) =
            (scope.plant, self.part_of(index))
        {
            let record = group.record().leave(member(other));
            self.asked.push(record);
        }
    }

    /// Whom a node has messages for as the primary.
    fn others_of(&self, index: usize) -> Vec<Member> {
        match self.part_of(index) {
            Some(Part::Serves(group)) => group.others().collect(),
            Some(Part::Follows | Part::Takes(_)) | None => Vec::new(),
        }
    }

    /// Make the links anew to those whom a primary had no messages for before.
    fn meet(&mut self, scope: &Scope, index: usize, before: &[Member]) {
        let met = self.others_of(index).into_iter();
        for other in met.filter(|other| !before.contains(other)) {
            let other = usize::from(other.0);
            self.disconnect(scope, index, other);
            self.connect(scope, index, other);
        }
    }

    fn configure(&mut self, scope: &Scope, index: usize, (copies, ack): (u16, AckLevel)) {
        let shape = Shape {
            nodes: (0..copies).map(Member).collect(),
            ack,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        let Some(Part::Serves(group)) = self.part_of(index) else {
            return;
        };
        let planted = group.record().toward(&shape);
        self.with(scope, index, |up| {
            if let Part::Serves(group) = &mut up.part {
                group.configure(shape);
                if scope.plant == Some(Plant::ConfigCountedEarly)
                    && let Some(record) = &planted
                {
                    group.seen(record);
                }
            }
        });
        if scope.plant == Some(Plant::ConfigNotCovered) {
            self.asked.extend(planted);
        }
    }

    /// The store does what it was asked for if that follows, and forgets it.
    fn store(&mut self, index: usize) {
        let record = self.asked.remove(index);
        if record.revision != self.record.revision + 1 {
            return;
        }
        if self.record.check_next(&record).is_err() {
            self.broken = Some(Broken::Record);
        }
        self.record = record;
    }

    fn check(&mut self) {
        let mut epochs: Vec<u64> = (0..NODES)
            .filter_map(|index| match self.part_of(index)? {
                Part::Serves(group) => Some(group.epoch()),
                Part::Follows | Part::Takes(_) => None,
            })
            .collect();
        epochs.sort_unstable();
        if epochs.windows(2).any(|two| two[0] == two[1]) {
            self.broken = self.broken.or(Some(Broken::TwoPrimaries));
        }
        if self.broken.is_none() {
            let disks = self.nodes.iter().map(|node| &node.disk);
            self.broken = self.history.check(&self.record, &disks.collect::<Vec<_>>());
        }
        if self.broken.is_none() {
            let committed = self.records.requests(&self.history.committed);
            self.broken = self.client.check(&committed);
        }
    }
}
