//! The driver of the cluster. It decides nothing about what is right.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::{Completion, Nanos};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::cache::{CacheConfig, CacheEvent, ReadCache};
use hdcs_core::replication::Member;
use hdcs_core::replication::message::Message;
use hdcs_core::replication::participant::{Act, Found, Participant, Role};
use hdcs_core::replication::record::{Config, GroupRecord, Nodes, Seat, WhenShort};
use hdcs_core::volume::{Context, Event, Phase, Volume, lease};

use super::check_logs::{self, Logs};
use super::check_serving::Serving;
use super::client::{Client, Peer};
use super::clock::Clock;
use super::effects;
use super::faults::draw_long_pause;
use super::keys::{Key, MANAGERS, ManagersKey};
use super::link::{ConnectionId, End, Lane, Links, Pair, Wire};
use super::manager::Manager;
use super::media::{self, Media};
use super::node::{CopyError, LogWrite, Node, Standing, Up};
use super::reader::{Reader, read_of_old};
use super::scenario::{ASKS_AT_ONCE_MAX, Scenario};
use super::shapes::{self, Operator};
use super::shared::{Shared, User};
use super::store::{Fate, Store};
use super::{Coverage, Options, Plant, links, stores};
use crate::content::mix;
use crate::engine::{Ended, Engine, Simulated};
use crate::trace::Trace;
use crate::violation::Violation;
use crate::workload::Workload;

/// Once nothing goes wrong any more the group is healthy, and everything has ended, within this time.
const PATIENCE: Nanos = Nanos::from_millis(60_000);
/// After so long nothing arrives any more that was asked for while things went wrong.
const CALMING: Nanos = Nanos::from_millis(4_000);
/// Requests of the client once the group is healthy.
const LAST_ASKS: u32 = 20;
/// The longest pause of the client when nothing goes wrong any more.
const CALM_PAUSE: Nanos = Nanos::from_micros(200);
/// Starts of a node for each of which all copies are compared; they are whenever a node begins to serve, too.
const STARTS_PER_CHECK: u32 = 3;
/// After who leads has broken a link.
const BREAK_PAUSE: Nanos = Nanos::from_millis(500);
/// Rounds of a node at one instant.
const ROUNDS_MAX: u32 = 10_000;
/// Memory of all nodes together, and what checkers replay copies in.
const POOL_BYTES: usize = 64 << 20;
const CHECK_POOL_BYTES: usize = 8 << 20;

/// What happens.
#[derive(Debug)]
pub(super) enum Happening {
    /// Something on a node's devices ends.
    Device { node: usize, life: u32, id: u64 },
    /// A message arrives.
    Deliver {
        connection: ConnectionId,
        lane: Lane,
    },
    /// A leader tries to reach a member.
    Connect { pair: Pair },
    /// An end learns that its connection is broken.
    Closed {
        connection: ConnectionId,
        pair: Pair,
        end: End,
    },
    /// The store is asked.
    Ask {
        node: usize,
        life: u32,
        record: GroupRecord,
        fate: Fate,
    },
    /// The store is read by who does not know how asking has ended, or has just started.
    Reread { node: usize, life: u32 },
    /// What the store says to who has asked.
    Answer {
        node: usize,
        life: u32,
        record: GroupRecord,
        is_reread: bool,
    },
    /// A watch brings a record.
    Watch { node: usize },
    /// A manager looks at everything.
    Manager(usize),
    /// What it wants is written, with the key that it had; or what somebody wants who needs none.
    ManagerWrites(GroupRecord, Option<Key>),
    /// The operator looks at the group.
    Operator,
    /// A message comes once more.
    Repeat {
        connection: ConnectionId,
        pair: Pair,
        lane: Lane,
        wire: Wire,
    },
    /// The client goes on.
    Client,
    /// Something goes wrong.
    Fault,
    /// A node goes down with its power, unless it has done so before.
    Crash { node: usize, life: u32 },
    /// A node starts.
    Start { node: usize },
    /// A node stands still, unless it has gone down before.
    Stop { node: usize, life: u32 },
    /// A node goes on that stood still; its clock stood still too, or not.
    Resume { node: usize, life: u32, stood: bool },
    /// Something gets through again.
    Heal { from: usize, to: usize },
    /// A node reaches the store again.
    HealStore { node: usize },
    /// A node's disk is as fast as it was, and reads well.
    Fast { node: usize },
    /// Somebody starts a node again whose copy took no more writes.
    Restart { node: usize, life: u32 },
    /// Somebody removes a node's damaged copy.
    Replace { node: usize },
}

/// See the module.
#[derive(Debug)]
pub(super) struct ClusterWorld {
    pub(super) random: Rng,
    pub(super) engine: Engine<Happening>,
    pub(super) scenario: Scenario,
    pub(super) plant: Option<Plant>,
    pub(super) pool: Arc<Pool>,
    pub(super) check_pool: Arc<Pool>,
    pub(super) nodes: Vec<Node>,
    /// How many times slower than usual a node's disk is.
    pub(super) slow: Vec<u64>,
    pub(super) touched: BTreeSet<usize>,
    pub(super) links: Links,
    pub(super) store: Store,
    pub(super) managers: Vec<Manager>,
    pub(super) keys: ManagersKey,
    pub(super) operator: Operator,
    pub(super) shared: Shared,
    pub(super) media: Media,
    pub(super) client: Client,
    pub(super) reader: Reader,
    pub(super) logs: Logs,
    pub(super) serving: Serving,
    /// Nothing goes wrong any more.
    pub(super) is_calm: bool,
    /// What the run saw.
    pub(super) coverage: Coverage,
}

impl Simulated for ClusterWorld {
    fn now(&self) -> Nanos {
        self.engine.now()
    }

    fn trace(&self) -> &Trace {
        &self.engine.trace
    }

    fn advance(&mut self) -> Result<bool, Violation> {
        let wakeup = self.nodes.iter().filter_map(Node::next_wakeup).min();
        self.engine
            .go_on(wakeup.map(|at| at.max(self.engine.now())))
    }

    fn turn(&mut self) -> Result<Ended, Violation> {
        while let Some(happening) = self.engine.take_due() {
            self.happen(happening)?;
        }
        let now = self.engine.now();
        for (index, node) in self.nodes.iter_mut().enumerate() {
            if node.next_wakeup().is_some_and(|at| at <= now) {
                let local = node.now(now);
                let up = node.up.as_mut().expect("it wants to be polled");
                up.participant.poll(local);
                if let Some(standing) = &mut up.standing {
                    standing.events.push_back(Event::Poll);
                }
                self.touched.insert(index);
            }
        }
        while let Some(node) = self.touched.pop_first() {
            self.settle(node)?;
        }
        Ok(Ended::Reached)
    }

    fn deadline(&self, began: Nanos) -> Option<Nanos> {
        self.is_calm.then(|| began.plus(PATIENCE))
    }

    fn waiting(&self) -> String {
        let status = |node: &Node| node.up.as_ref().map(|up| up.participant.status());
        let statuses: Vec<_> = self.nodes.iter().map(status).collect();
        format!(
            "record {:?}; nodes {statuses:?}; the client talks to {:?}, {} wait, {} are to be sent",
            self.store.record(),
            self.client.peer,
            self.client.waiting(),
            self.client.asks_left,
        )
    }
}

impl ClusterWorld {
    /// The world of a seed, with nothing started.
    pub(super) fn new(seed: u64, options: Options) -> Self {
        let scenario = Scenario::new(seed);
        let mut random = Rng::with_seed(mix(seed ^ mix(0xc2)));
        let count = scenario.nodes;
        let now = Nanos(1);
        let nodes: Vec<Node> = (0..count)
            .map(|index| {
                let rate = scenario.rates[random.usize(..scenario.rates.len())];
                let clock = Clock::new(now, Nanos(random.u64(1..1 << 30)), rate);
                let tail = scenario.is_member(index).then_some(scenario.first_tail);
                let seed = random.u64(..);
                Node::new(&scenario.config, tail, scenario.cipher.clone(), clock, seed)
            })
            .collect();
        let record = first_record(&scenario);
        let sectors = scenario.config.bytes / SECTOR_BYTES as u64;
        let workload = Workload::new(scenario.behaviour.clone(), sectors, random.u64(..));
        let seeds = [(); MANAGERS].map(|()| random.u64(..));
        let managers = (seeds.into_iter())
            .map(|seed| Manager::new(record.clone(), count, scenario.whim_one_in, seed));
        Self {
            engine: Engine::new(now, options.verbose),
            plant: options.plant,
            pool: Pool::new(POOL_BYTES),
            check_pool: Pool::new(CHECK_POOL_BYTES),
            slow: vec![1; count],
            nodes,
            touched: BTreeSet::new(),
            links: Links::default(),
            managers: managers.collect(),
            keys: ManagersKey::new(random.u64(..), options.plant),
            operator: Operator::new(count, random.u64(..)),
            store: Store::new(record, count, options.plant),
            shared: Shared::new(sectors, &scenario, random.u64(..), options.plant),
            media: Media::default(),
            client: Client::new(sectors, workload, &scenario.config),
            reader: Reader::new(random.u64(..)),
            logs: Logs::default(),
            serving: Serving::default(),
            is_calm: false,
            coverage: Coverage {
                encrypted: u64::from(scenario.cipher.encrypts()),
                ..Coverage::default()
            },
            scenario,
            random,
        }
    }

    /// The run.
    pub(super) fn run(&mut self) -> Result<(), Violation> {
        for node in 0..self.nodes.len() {
            self.engine.after(Nanos(1), Happening::Start { node });
        }
        for manager in 0..MANAGERS {
            self.engine.after(Nanos(2), Happening::Manager(manager));
        }
        self.engine.after(Nanos(2), Happening::Operator);
        self.engine.after(Nanos(3), Happening::Client);
        self.engine
            .after(self.scenario.fault_pause, Happening::Fault);
        self.client.asks_left = self.scenario.asks;
        let end = self.scenario.trouble;
        self.run_until(|world| world.now() >= end)?;
        self.calm();
        // What was on its way to the store, or late, may still have the group taken.
        let calmed = self.now().plus(CALMING);
        self.run_until(|world| world.now() >= calmed)?;
        self.run_until(|world| world.is_healthy())?;
        self.client.asks_left = LAST_ASKS;
        self.run_until(|world| world.client.is_done() && world.is_healthy())?;
        let acked = self.client.acked;
        self.finish()?;
        self.coverage.acked = acked;
        Ok(())
    }

    /// Have all that was acknowledged destaged, and look at it.
    fn finish(&mut self) -> Result<(), Violation> {
        let (node, _) = self.primary().expect("the group is healthy");
        self.ask(|client, now| Some(client.flush(now)))?;
        self.run_until(|world| world.client.is_done())?;
        let seq = self.client.history.now();
        let standing = self.standing(node).expect("its client was answered");
        standing.events.push_back(Event::Close { destage: true });
        self.touched.insert(node);
        self.settle(node)?;
        self.run_until(|world| {
            let standing = world.standing(node);
            standing.is_none_or(|standing| standing.volume.phase() == Phase::Closed)
        })?;
        let shared = &self.shared;
        crate::check_backend::check_complete(&self.client.history, seq, |sector| {
            shared.durable(sector)
        })?;
        self.check_copies()
    }

    /// Who serves by the record, if it does, and in which epoch.
    pub(super) fn primary(&self) -> Option<(usize, u64)> {
        let record = self.store.record();
        let node = usize::from(record.primary()?.0);
        let standing = self.nodes[node].up.as_ref()?.standing.as_ref()?;
        (standing.user.epoch == record.epoch && standing.is_open).then_some((node, record.epoch))
    }

    /// There are as many members as there should be, one serves, and the client talks to it.
    fn is_healthy(&self) -> bool {
        let record = self.store.record();
        let is_complete = record.config.members.count() == usize::from(record.config.replicas)
            && record.joiners.is_empty();
        let is_complete = is_complete && self.media.is_sound() && self.operator.is_content(record);
        let Some((node, epoch)) = self.primary().filter(|_| is_complete) else {
            return false;
        };
        self.shared.is_owned_by(User { epoch }) && self.client.peer == Some(Peer { node, epoch })
    }

    pub(super) fn standing(&mut self, node: usize) -> Option<&mut Standing> {
        self.nodes[node].up.as_mut()?.standing.as_mut()
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        match happening {
            Happening::Device { node, life, id } if self.listens(node, life) => {
                self.device_done(node, id);
            }
            Happening::Answer {
                node,
                life,
                record,
                is_reread,
            } if self.listens(node, life) => {
                self.answered(node, &record, is_reread);
            }
            Happening::Device { node, life, .. } | Happening::Answer { node, life, .. } => {
                // A node that stands still is told later, one that has gone never.
                if self.nodes[node].life == life && self.nodes[node].up.is_some() {
                    self.nodes[node].inbox.push(happening);
                }
            }
            Happening::Deliver { connection, lane } => self.deliver(connection, lane),
            Happening::Connect { pair } => self.connect(pair),
            Happening::Closed {
                connection,
                pair,
                end,
            } => self.closed(connection, pair, end),
            Happening::Ask {
                node,
                life,
                record,
                fate,
            } => self.ask_arrives(node, life, &record, fate)?,
            Happening::Reread { node, life } => self.reread(node, life),
            Happening::Watch { node } => self.watch(node),
            Happening::Manager(manager) => stores::manager_looks(self, manager),
            Happening::ManagerWrites(record, key) => stores::manager_writes(self, record, key)?,
            Happening::Operator => shapes::operator_looks(self),
            Happening::Repeat {
                connection,
                pair,
                lane,
                wire,
            } => links::repeat(self, connection, pair, lane, wire),
            Happening::Client => self.client_goes_on(),
            Happening::Fault => self.fault(),
            Happening::Crash { node, life } if self.is_calm || self.nodes[node].life != life => {}
            Happening::Crash { node, .. } => self.crash(node, true),
            Happening::Start { node } => self.start(node)?,
            Happening::Stop { node, life } if self.is_calm || self.nodes[node].life != life => {}
            Happening::Stop { node, .. } => {
                let pause = draw_long_pause(&mut self.random);
                self.pause(node, pause);
            }
            Happening::Resume { node, life, stood } => self.resume(node, life, stood)?,
            Happening::Heal { from, to } => self.heal(from, to),
            Happening::HealStore { node } => self.heal_store(node),
            Happening::Fast { node } => {
                self.slow[node] = 1;
                self.nodes[node].reads_fail = false;
            }
            Happening::Restart { node, life } if self.nodes[node].life == life => {
                self.crash(node, false);
            }
            Happening::Restart { .. } => {}
            Happening::Replace { node } => media::replace_copy(self, node)?,
        }
        Ok(())
    }

    /// What has happened to a node that stood still.
    pub(super) fn take_inbox(&mut self, node: usize) -> Result<(), Violation> {
        for happening in std::mem::take(&mut self.nodes[node].inbox) {
            self.happen(happening)?;
            // What it does of one comes before the next one.
            self.settle(node)?;
        }
        Ok(())
    }

    fn listens(&self, node: usize, life: u32) -> bool {
        self.nodes[node].life == life && self.nodes[node].runs()
    }

    // Nodes.

    pub(super) fn start(&mut self, node: usize) -> Result<(), Violation> {
        if self.nodes[node].up.is_some() {
            return Ok(());
        }
        self.engine.note("start", [node as u64, 0, 0, 0]);
        self.nodes[node].disk.sync();
        let Some((found, is_doubted)) = media::open_copy(self, node)? else {
            return Ok(());
        };
        let ends = found
            .spans
            .iter()
            .map(|span| (span.end.position, span.end.chain));
        self.nodes[node].media.extend(ends);
        let (member, times) = (Member(node as u16), self.scenario.times);
        let now = if self.plant == Some(Plant::PromiseWithoutWaiting) {
            Nanos(0)
        } else {
            self.nodes[node].now(self.engine.now())
        };
        let pool = Arc::clone(&self.pool);
        let keys = self.nodes[node].cipher.keys();
        let mut participant = Participant::new(member, now, found, keys, pool, times);
        if is_doubted {
            participant.doubt();
        }
        self.nodes[node].up = Some(Up {
            participant,
            standing: None,
            kept_cache: None,
            ops: BTreeMap::new(),
            next_op: 0,
            repairs: BTreeMap::new(),
            acted_by: 0,
        });
        self.store.watch_anew(node);
        let life = self.nodes[node].life;
        let pause = self.scenario.store.draw(&mut self.random);
        self.engine.after(pause, Happening::Reread { node, life });
        // Reading all copies is what a run costs most of.
        if life.is_multiple_of(STARTS_PER_CHECK) {
            self.check_copies()?;
        }
        Ok(())
    }

    /// Replay a node's copy as it is now.
    pub(super) fn replay(&self, node: usize) -> Result<Found, CopyError> {
        self.nodes[node].replay(&self.scenario.config, &self.check_pool)
    }

    /// Check what lies on all media.
    fn check_copies(&self) -> Result<(), Violation> {
        let mut copies = Vec::new();
        for node in 0..self.nodes.len() {
            match self.replay(node) {
                Ok(found) => copies.push((Member(node as u16), found)),
                Err(_) if self.media.is_rotten(node) => {}
                Err(error) => {
                    let message = format!("the copy of node {node} cannot be opened: {error}");
                    return Err(Violation::new("replay", message));
                }
            }
        }
        check_logs::check_prefixes(self.store.record(), &copies)
    }

    /// Let a node do what it can without anybody else.
    pub(super) fn settle(&mut self, node: usize) -> Result<(), Violation> {
        for _ in 0..ROUNDS_MAX {
            if !self.nodes[node].runs() {
                return Ok(());
            }
            let mut has_some = self.step_volume(node)?;
            has_some |= self.act(node)?;
            has_some |= self.send(node);
            if !has_some {
                self.want_links(node);
                return self.check(node);
            }
        }
        Err(Violation::new(
            "spinning",
            format!("node {node} never comes to rest"),
        ))
    }

    fn check(&mut self, node: usize) -> Result<(), Violation> {
        let is_due = self.engine.turns().is_multiple_of(64);
        let Some(up) = &mut self.nodes[node].up else {
            return Ok(());
        };
        up.participant.check_invariants();
        let Some(standing) = &mut up.standing else {
            return Ok(());
        };
        if is_due {
            standing.volume.check_invariants();
        }
        match standing.volume.phase() {
            // Its node is started again.
            Phase::Failed(_) if standing.was_refused => self.end_volume(node),
            // Somebody starts its node again.
            Phase::Failed(_) if self.media.is_rotten(node) => {
                let pause = self.draw_pause();
                let life = self.nodes[node].life;
                self.engine.after(pause, Happening::Restart { node, life });
                self.end_volume(node);
            }
            Phase::Failed(error) => {
                let message = format!("the volume cannot be opened on node {node}: {error}");
                return Err(Violation::new("open-refused", message));
            }
            Phase::Open => standing.is_open = true,
            _ => {}
        }
        Ok(())
    }

    /// Have the volume take what has happened. Returns whether there was anything.
    fn step_volume(&mut self, node: usize) -> Result<bool, Violation> {
        let now = self.nodes[node].now(self.engine.now());
        let Some(standing) = self.nodes[node]
            .up
            .as_mut()
            .and_then(|up| up.standing.as_mut())
        else {
            return Ok(false);
        };
        if standing.events.is_empty() {
            return Ok(false);
        }
        let user = standing.user;
        let mut actions = Vec::new();
        let events = std::mem::take(&mut standing.events);
        for event in events.into_iter().chain([Event::Poll]) {
            let mut cx = Context {
                cache: &mut standing.cache,
                pool: &self.pool,
                actions: &mut actions,
            };
            standing.volume.step(now, event, &mut cx);
        }
        let mut of_cache = Vec::new();
        standing.cache.step(now, CacheEvent::Poll, &mut of_cache);
        assert!(of_cache.is_empty(), "there is no cache device");
        for action in actions {
            self.perform(node, user, action)?;
        }
        Ok(true)
    }

    /// Do what the part asks for. Returns whether there was anything.
    fn act(&mut self, node: usize) -> Result<bool, Violation> {
        let Some(up) = self.nodes[node].running() else {
            return Ok(false);
        };
        let acts = up.participant.take_acts();
        let has_some = !acts.is_empty();
        for act in acts {
            self.perform_act(node, act)?;
        }
        if let Some(up) = self.nodes[node].up.as_mut() {
            up.acted_by = (up.participant.record()).map_or(0, |record| record.revision);
        }
        Ok(has_some)
    }

    fn perform_act(&mut self, node: usize, act: Act) -> Result<(), Violation> {
        match act {
            Act::Write {
                token,
                offset,
                data,
                ..
            } => self.disk_write(node, token, offset, data),
            Act::Read {
                token, offset, buf, ..
            } => {
                self.disk_read(node, token, offset, buf);
                Ok(())
            }
            Act::Ended(completion) => self.log_ended(node, completion),
            Act::Repaired(token) => {
                effects::repaired(self, node, token);
                Ok(())
            }
            Act::Answer {
                to,
                epoch,
                message,
                data,
            } => {
                if let Message::HasCut(cut) = &message {
                    check_logs::check_cut(cut, self.nodes[node].superblock().as_ref())?;
                }
                self.answer(node, to, epoch, message, data);
                Ok(())
            }
            Act::Ask(record) => {
                self.ask_store(node, record);
                Ok(())
            }
            Act::Break(member) => {
                let pair = (node, usize::from(member.0));
                self.close_end(pair, End::Leader);
                // Not at once: it may come to the same again.
                self.links.begin(pair);
                self.engine.after(BREAK_PAUSE, Happening::Connect { pair });
                Ok(())
            }
            Act::Drop(leader) => {
                self.close_end((usize::from(leader.0), node), End::Member);
                Ok(())
            }
            Act::Began => self.began(node),
            Act::Lease { until } => {
                if let Some(standing) = self.standing(node) {
                    standing.events.push_back(Event::Lease { until });
                }
                Ok(())
            }
            Act::Fenced => {
                self.coverage.fenced += 1;
                self.engine.note("fenced", [node as u64, 0, 0, 0]);
                if self.plant != Some(Plant::DeafVolume) {
                    self.end_volume(node);
                }
                Ok(())
            }
            Act::Short(refuses) => {
                self.coverage.shortages += u64::from(refuses);
                if let Some(standing) = self.standing(node) {
                    standing.was_short |= refuses;
                    (standing.events).push_back(Event::RefuseForCopies(refuses));
                }
                Ok(())
            }
            // Nobody reads what a joiner waits for.
            Act::Blocked { .. } => Ok(()),
            Act::Stopped(_) => {
                self.coverage.stopped += 1;
                self.engine.note("gives up", [node as u64, 0, 0, 0]);
                Ok(())
            }
            Act::Failed(_) => {
                media::copy_failed(self, node);
                Ok(())
            }
        }
    }

    // The volume.

    fn began(&mut self, node: usize) -> Result<(), Violation> {
        let up = self.nodes[node].up.as_mut().expect("it has just begun");
        let epoch = up.participant.record().map_or(0, |record| record.epoch);
        self.engine.note("serves", [node as u64, epoch, 0, 0]);
        self.coverage.takeovers += 1;
        self.serving.begin(node, epoch)?;
        self.check_copies()?;
        if let Ok(found) = self.replay(node) {
            self.logs.begin(epoch, &found)?;
        }
        self.open_volume(node, User { epoch })
    }

    fn open_volume(&mut self, node: usize, user: User) -> Result<(), Violation> {
        self.shared.open(user);
        let now = self.nodes[node].now(self.engine.now());
        let mut actions = Vec::new();
        let config = CacheConfig {
            dram_blocks: 256,
            ssd: None,
            ssd_answer_max: Nanos::from_millis(1 << 40),
        };
        // What others have destaged meanwhile it has not forgotten: it begins empty.
        let kept = self.nodes[node]
            .up
            .as_mut()
            .and_then(|up| up.kept_cache.take());
        let mut cache = kept
            .unwrap_or_else(|| ReadCache::new(config, now, Arc::clone(&self.pool), &mut actions));
        let mut cx = Context {
            cache: &mut cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        let mut volume = Volume::open(self.scenario.config.clone(), now, &mut cx);
        drop(cx);
        if let Some(tags) = self.nodes[node].cipher.tags() {
            volume.authenticate_log(tags);
        }
        if self.plant != Some(Plant::ReadPastLease) {
            lease::need(&mut volume);
        }
        let standing = Standing {
            user,
            cache,
            volume,
            events: VecDeque::new(),
            log_writes: BTreeMap::new(),
            was_refused: false,
            was_short: false,
            is_open: false,
        };
        let up = self.nodes[node].up.as_mut().expect("it serves");
        up.standing = Some(standing);
        up.participant.stand();
        for action in actions {
            self.perform(node, user, action)?;
        }
        Ok(())
    }

    /// The volume of a node that goes on has to end.
    fn end_volume(&mut self, node: usize) {
        let standing = self.nodes[node]
            .up
            .as_mut()
            .and_then(|up| up.standing.take());
        let Some(standing) = standing else { return };
        self.shared.leave(standing.user);
        self.leave_client(standing.user);
        self.reader.leave(standing.user);
        if self.plant == Some(Plant::StaleCache)
            && let Some(up) = self.nodes[node].up.as_mut()
        {
            up.kept_cache = Some(standing.cache);
        }
    }

    /// A connection of the client to this volume has gone with it.
    pub(super) fn leave_client(&mut self, user: User) {
        if self
            .client
            .peer
            .is_some_and(|peer| peer.epoch == user.epoch)
        {
            self.engine.note("client leaves", [user.epoch, 0, 0, 0]);
            self.client.disconnect();
        }
    }

    /// A write of the volume to its log has ended.
    pub(super) fn log_ended(
        &mut self,
        node: usize,
        completion: Completion,
    ) -> Result<(), Violation> {
        let is_deaf = self.plant == Some(Plant::DeafVolume);
        let Some(standing) = self.nodes[node]
            .up
            .as_mut()
            .and_then(|up| up.standing.as_mut())
        else {
            return Ok(());
        };
        let Some(write) = standing.log_writes.remove(&completion.token) else {
            let is_planted = matches!(self.plant, Some(Plant::HastyEnd | Plant::TailOfOne));
            if is_planted || is_deaf {
                return Ok(());
            }
            let message = format!("{completion:?} has ended twice or was never begun");
            return Err(Violation::new("end-unexpected", message));
        };
        if completion.result.is_err() && is_deaf {
            return Ok(());
        }
        let is_good = completion.result.is_ok();
        standing.events.push_back(Event::Completed(completion));
        if matches!(write, LogWrite::Again) {
            media::written_again(&mut self.media, &self.nodes[node].disk, node);
        }
        if is_good {
            self.check_committed(node, write)?;
        }
        Ok(())
    }

    fn check_committed(&mut self, node: usize, write: LogWrite) -> Result<(), Violation> {
        let up = self.nodes[node].up.as_ref();
        let seen = up.and_then(|up| up.participant.record());
        let seen = seen.expect("it serves by a record");
        let stored = self.store.record();
        // What was committed by the last record may end after the next one was seen.
        let acted_by = up.map_or(0, |up| up.acted_by);
        if matches!(write, LogWrite::Span(_))
            && self.store.was_short(seen.revision)
            && self.store.was_short(acted_by)
        {
            let message = format!("a write is committed by {seen:?}: it has too few members");
            return Err(Violation::new("committed-short", message));
        }
        // By the record that there is, too: it may not know that one yet.
        let configs = [
            Some(seen),
            Some(stored).filter(|record| record.epoch == seen.epoch),
        ];
        for config in configs
            .into_iter()
            .flatten()
            .map(|record| record.config.clone())
        {
            let members = config.members.iter().map(|member| usize::from(member.0));
            let needs = config.copies_to_commit();
            match write {
                LogWrite::Span(end) => {
                    let end_of = (end.position, end.chain);
                    let has = members.filter(|node| self.nodes[*node].media.contains(&end_of));
                    self.logs.committed(end, has.count(), needs)?;
                }
                LogWrite::Again => {}
                LogWrite::Superblock { tail } => {
                    let says = |node: &usize| {
                        let superblock = self.nodes[*node].superblock();
                        // One that was hurt may have said so before.
                        self.media.is_hurt(*node)
                            || superblock.is_some_and(|superblock| superblock.tail.get() >= tail)
                    };
                    self.logs
                        .retired(tail, members.filter(says).count(), needs)?;
                }
            }
        }
        Ok(())
    }

    // The client.

    fn client_goes_on(&mut self) {
        let pause = if self.is_calm {
            CALM_PAUSE
        } else {
            self.scenario.client_pause()
        };
        let pause = Nanos(self.random.u64(1..pause.0));
        self.engine.after(pause, Happening::Client);
        self.open_backend();
        self.choose_peer();
        for _ in 0..self.random.u64(1..=ASKS_AT_ONCE_MAX) {
            read_of_old(self);
            let (pool, shared) = (Arc::clone(&self.pool), &mut self.shared);
            let Some(peer) = self.client.peer.filter(|peer| self.nodes[peer.node].runs()) else {
                break;
            };
            let now = self.engine.now();
            if let Some((id, request)) = self
                .client
                .ask(now, &pool, |range| shared.order.written(range))
            {
                let standing = self.standing(peer.node).expect("the client talks to it");
                standing.events.push_back(Event::Request { id, request });
                self.touched.insert(peer.node);
            }
        }
    }

    /// Have the client ask for this.
    fn ask(
        &mut self,
        request: impl FnOnce(
            &mut Client,
            Nanos,
        )
            -> Option<(hdcs_core::base::io::RequestId, hdcs_core::base::io::Request)>,
    ) -> Result<(), Violation> {
        let Some(peer) = self.client.peer else {
            return Ok(());
        };
        let now = self.engine.now();
        if let Some((id, request)) = request(&mut self.client, now) {
            let standing = self.standing(peer.node).expect("the client talks to it");
            standing.events.push_back(Event::Request { id, request });
            self.touched.insert(peer.node);
            self.settle(peer.node)?;
        }
        Ok(())
    }

    /// Volumes that wait for the backend try again.
    fn open_backend(&mut self) {
        let users: Vec<User> = self
            .nodes
            .iter_mut()
            .filter_map(Node::running)
            .filter_map(|up| up.standing.as_ref())
            .map(|standing| standing.user)
            .collect();
        for user in users {
            self.shared.open(user);
        }
    }

    /// An opening of a higher epoch than that which the client talks to, if it finds one.
    fn choose_peer(&mut self) {
        let nodes = self.nodes.iter().enumerate();
        let open = nodes
            .filter(|(_, node)| node.runs())
            .filter_map(|(index, node)| {
                let standing = node.up.as_ref()?.standing.as_ref()?;
                standing.is_open.then_some(Peer {
                    node: index,
                    epoch: standing.user.epoch,
                })
            });
        let all: Vec<Peer> = open
            .filter(|peer| self.client.prefers(peer.epoch))
            .collect();
        if all.is_empty() || (self.client.peer.is_some() && !self.is_calm && self.random.bool()) {
            return;
        }
        let peer = all[self.random.usize(..all.len())];
        self.engine
            .note("client talks to", [peer.node as u64, peer.epoch, 0, 0]);
        self.client.disconnect();
        self.client.connect(peer);
    }

    /// What a node plays, if it is heard.
    pub(super) fn role(&self, node: usize) -> Option<Role> {
        let up = self.nodes[node]
            .up
            .as_ref()
            .filter(|_| self.nodes[node].runs())?;
        self.store
            .is_reached(node)
            .then(|| up.participant.status().role)
    }
}

fn first_record(scenario: &Scenario) -> GroupRecord {
    let all = (0..scenario.nodes as u16).map(Member);
    let is_member = |member: &Member| scenario.is_member(usize::from(member.0));
    let (members, others): (Vec<Member>, Vec<Member>) = all.partition(is_member);
    let joiners = others.into_iter().take(scenario.replicas - members.len());
    let seats = members.into_iter().map(|member| Seat { member, joined: 1 });
    let config = Config {
        members: seats.collect(),
        replicas: scenario.replicas as u8,
        ack: scenario.ack,
        copies_min: 1,
        when_short: WhenShort::Wait,
    };
    GroupRecord::first(Member(0), config, joiners.collect::<Nodes>())
}
