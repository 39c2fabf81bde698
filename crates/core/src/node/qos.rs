//! Quality of service: which volume's request goes next, and which waits.
//!
//! The algorithm is mClock (Gulati, Merchant, Varman: *mClock: Handling Throughput Variability for
//! Hypervisor IO Scheduling*, OSDI 2010): a limit, a reservation and a share for each flow, where a
//! flow is what one volume is asked. The tags of its limits and reservations are buckets that fill at
//! their rate ([`Bucket`]); shares are start tags of fair queueing. A request goes
//!
//! 1. never before its flow's limits allow it;
//! 2. else at once if its flow has had less than it has reserved, the smallest tag first;
//! 3. else once the *window* has room, the flow first that has had least for its weight.
//!
//! Reservations and weights mean something only while requests wait here and not in the device: the
//! window bounds what is under way of all flows. It is there only while a flow with a reservation or
//! a weight is active. Where reservations are active it shrinks until their requests take little
//! longer than with next to nothing under way, and grows otherwise ([`Window`]).
//!
//! Flows of a node's other shards share the devices: [`super::common_window`] has what schedulers know of each other.
//!
//! Invariants:
//! 1. Requests of one flow go in the order in which they came.
//! 2. A flow gets no more than rate × time + burst + one request of its limits, whatever it saved.
//! 3. A flow that asks for its reservation does not wait for other flows.
//! 4. The first request of a flow waits at most [`WAIT_MAX`] beyond its limits, and what is not
//!    answered occupies the window for less than two [`LAPSE`]: no device and no other flow holds a
//!    request up for ever.
//! 5. While nothing is configured, nothing is asked of this module.
//!
//! Memory is what callers queue, which they bound. There are no failures.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::common_window::{CommonWindow, Member, Others, Said};
use crate::base::io::{Nanos, Request};
use crate::base::limits::REQUEST_BYTES_MAX;
use crate::node::scrub::PIECE_BYTES;

/// Bursts are at least what the rate brings in this time: timers are late, and what they are late by
/// must not be lost.
pub const BURST_TIME_MIN: Nanos = Nanos::from_millis(10);
/// What a flow did not take of its reservation for so long, it gets as soon as it asks for it. Without that a
/// client at a steady rate would never catch up with what a hiccup of the device has held up: from the first one
/// on, as many of its requests as it may have under way would wait here.
pub const RESERVATION_TIME: Nanos = Nanos(SECOND);
/// The longest that the first request of a flow waits for other flows.
pub const WAIT_MAX: Nanos = Nanos::from_millis(100);
/// What is under way for longer than one to two of these counts no more: it does not wait for the
/// device that is shared, but for a backend, or for room in a log.
pub const LAPSE: Nanos = Nanos::from_millis(5);
/// How long after its last request a flow counts as active.
const ACTIVE: Nanos = Nanos::from_millis(1_000);
/// What a request costs beside its bytes, in KiB. An estimate: one of 4 KiB takes a quarter of what one
/// of 64 KiB takes, as on flash that is not limited by either alone.
const REQUEST_COST: u64 = 16;
/// Cost of a request of 4 KiB.
const SMALL_COST: u64 = REQUEST_COST + 4;
/// The window: as much as keeps a drive busy, in small requests or in large ones.
const WINDOW_MAX: u64 = 32 * SMALL_COST;
/// The smallest window: the drive works while the next request is made ready.
const WINDOW_MIN: u64 = 2 * SMALL_COST;
/// How far above the others a flow's tag may be, in cost: what it got by its reservation is held
/// against it no longer than this.
const SHARE_AHEAD_MAX: u64 = 64 * SMALL_COST;
/// How far behind the others a flow's tag may stay, in cost, if its queue was empty for less than a
/// [`LAPSE`]: a client that takes its answers in waves has its share all the same.
const SHARE_BEHIND_MAX: u64 = 32 * SMALL_COST;
/// Answers that a change of the window goes by, and how many of them may be slow.
const SAMPLES: u32 = 64;
const SLOW_SAMPLES_MAX: u32 = 4;
/// While reservations are active, the window is as small as it gets for so long each so often: what a
/// request takes with next to nothing beside it is measured anew.
const PROBE_EVERY: Nanos = Nanos::from_millis(1_000);
const PROBE_TIME: Nanos = Nanos::from_millis(10);
/// The weight of a flow that was given none.
pub const WEIGHT_DEFAULT: u64 = 100;
/// The largest weight.
pub const WEIGHT_MAX: u64 = 10_000;
const SECOND: u64 = 1_000_000_000;

/// What a flow may have and is to have. 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Qos {
    /// Requests a second at most.
    pub iops_max: u64,
    /// Bytes a second at most.
    pub bandwidth_max: u64,
    /// Requests that may be saved up while fewer came than `iops_max`.
    pub iops_burst: u64,
    /// Bytes that may be saved up.
    pub bandwidth_burst: u64,
    /// Requests a second at least, if so many are asked for.
    pub iops_min: u64,
    /// Bytes a second at least.
    pub bandwidth_min: u64,
    /// Share in what is left, beside those of others; 0 counts as [`WEIGHT_DEFAULT`].
    pub weight: u64,
}

impl Qos {
    /// Whether something is reserved.
    const fn is_reserved(&self) -> bool {
        self.iops_min > 0 || self.bandwidth_min > 0
    }
}

/// What a request takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Whether it counts as a request.
    pub requests: u64,
    /// Its data.
    pub bytes: u64,
}

impl Cost {
    /// Of a client's request. A flush is free, but waits for its turn all the same. Frontends cut what is long, so
    /// that each MiB of a promotion is charged; one that the node makes itself may be of any length, and fetches only
    /// what is missing, bit by bit: it costs no more than the largest read. Extents take thousands of lookups.
    pub fn of(request: &Request) -> Self {
        let (requests, bytes) = match request {
            Request::Read { range } | Request::Write { range, .. } => (1, range.bytes() as u64),
            Request::Promote { range } => (1, range.bytes().min(REQUEST_BYTES_MAX) as u64),
            Request::WriteZeroes { .. } | Request::Discard { .. } | Request::Extents { .. } => {
                (1, 0)
            }
            Request::Scrub { .. } => (1, PIECE_BYTES as u64),
            Request::Flush | Request::Evict { .. } => (0, 0),
        };
        Self { requests, bytes }
    }

    /// In KiB of the window and of shares.
    const fn weighed(self) -> u64 {
        self.requests * REQUEST_COST + self.bytes.div_ceil(1024)
    }
}

/// A rate and what is saved up of it (the generic cell rate algorithm of ITU-T I.371): `full_at` is
/// when the bucket is full again, and it may be emptied once that is no further off than `saved`.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// A second; 0 is no bucket.
    rate: u64,
    saved: Nanos,
    full_at: Nanos,
}

impl Bucket {
    /// Another rate, from now on. What was saved stays, and a debt is forgotten.
    fn set(&mut self, now: Nanos, rate: u64, burst: u64, time_min: Nanos) {
        let before = *self;
        self.rate = rate;
        if rate == 0 {
            return;
        }
        self.saved = Nanos(scaled(burst, SECOND, rate)).max(time_min);
        let used = before.full_at.since(now).0;
        let used = scaled(used, before.rate, rate);
        self.full_at = now.plus(Nanos(used).min(self.saved));
    }

    /// From when on something may be taken.
    const fn ready_at(&self) -> Nanos {
        if self.rate == 0 {
            return Nanos(0);
        }
        Nanos(self.full_at.0.saturating_sub(self.saved.0))
    }

    fn take(&mut self, now: Nanos, amount: u64) {
        if self.rate > 0 {
            let time = (u128::from(amount) * u128::from(SECOND)).div_ceil(u128::from(self.rate));
            self.full_at = self.full_at.max(now).plus(Nanos(time as u64));
        }
    }
}

/// `value * numerator / denominator`, saturating.
fn scaled(value: u64, numerator: u64, denominator: u64) -> u64 {
    let scaled = u128::from(value) * u128::from(numerator) / u128::from(denominator);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// The ninth decile of a stream in one number (Ma, Muthukrishnan, Sandler: *Frugal Streaming for
/// Estimating Quantiles*, 2013): a stall moves it no further than any slow answer.
#[derive(Clone, Copy, Debug, Default)]
struct Decile {
    nanos: u64,
}

impl Decile {
    fn add(&mut self, took: Nanos) {
        if self.nanos == 0 {
            self.nanos = took.0;
        }
        let step = self.nanos / 256 + 1;
        if took.0 > self.nanos {
            self.nanos += 9 * step;
        } else {
            self.nanos = self.nanos.saturating_sub(step).max(1);
        }
    }
}

/// What is under way of all flows, and how much may be.
///
/// What flows with reservations get in time tells how large it may be. The ninth decile of the time of
/// their requests that met no more than [`WINDOW_MIN`] under way, during probes, is what they take alone;
/// the window shrinks while more than [`SLOW_SAMPLES_MAX`] of [`SAMPLES`] answers take a quarter longer.
/// Only requests count that were admitted since it last changed: those of before met another window.
///
/// What they take alone rises slowly: a processor or a device that others keep busy beside the window, with
/// destage for one, must not pass for how it is.
#[derive(Debug)]
struct Window {
    size: u64,
    /// Present [`LAPSE`], what is under way that was admitted in it, and in the one before.
    lapse: u64,
    present: u64,
    previous: u64,
    /// By the probe under way, or the last one, and by those of before; 0 is not known.
    probed: Decile,
    alone: u64,
    changed: Nanos,
    samples: u32,
    slow: u32,
    /// When the present probe ends, or the last one ended.
    probe_end: Nanos,
}

impl Window {
    fn new() -> Self {
        Self {
            size: WINDOW_MIN,
            lapse: 0,
            present: 0,
            previous: 0,
            probed: Decile::default(),
            alone: 0,
            changed: Nanos(0),
            samples: 0,
            slow: 0,
            probe_end: Nanos(0),
        }
    }

    fn advance(&mut self, now: Nanos) {
        let lapse = now.0 / LAPSE.0;
        if lapse > self.lapse {
            self.previous = if lapse == self.lapse + 1 {
                self.present
            } else {
                0
            };
            self.present = 0;
            self.lapse = lapse;
        }
    }

    const fn under_way(&self) -> u64 {
        self.present + self.previous
    }

    fn ended(&mut self, admitted: Nanos, weighed: u64) {
        let lapse = admitted.0 / LAPSE.0;
        if lapse == self.lapse {
            self.present -= weighed;
        } else if lapse + 1 == self.lapse {
            self.previous -= weighed;
        }
    }

    /// What may be under way while reservations are active.
    fn room(&self, now: Nanos) -> u64 {
        if now < self.probe_end {
            WINDOW_MIN
        } else {
            self.size
        }
    }

    /// A request by a reservation was answered.
    fn sample(&mut self, now: Nanos, admitted: Nanos, met: u64) {
        let took = now.since(admitted);
        if now >= self.probe_end.plus(PROBE_EVERY) {
            self.end_probe();
            self.probe_end = now.plus(PROBE_TIME);
        }
        if met <= WINDOW_MIN && (now < self.probe_end || self.alone == 0) {
            self.probed.add(took);
        }
        if admitted < self.changed || now < self.probe_end {
            return;
        }
        self.samples += 1;
        self.slow += u32::from(took.0 > self.taken_alone() * 5 / 4);
        if self.samples < SAMPLES {
            return;
        }
        self.size = if self.slow > SLOW_SAMPLES_MAX {
            (self.size * 7 / 8).max(WINDOW_MIN)
        } else {
            (self.size + SMALL_COST / 2).min(WINDOW_MAX)
        };
        (self.samples, self.slow, self.changed) = (0, 0, now);
    }

    const fn taken_alone(&self) -> u64 {
        if self.alone == 0 {
            self.probed.nanos
        } else {
            self.alone
        }
    }

    /// What the last probe found is known now.
    fn end_probe(&mut self) {
        self.alone = match self.alone {
            0 => self.probed.nanos,
            alone => self.probed.nanos.min(alone + alone / 128 + 1),
        };
    }
}

/// One flow of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowId(u32);

/// An admitted request, given back when it is answered.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    flow: FlowId,
    /// Of a flow that was removed, another one may have the place.
    life: u32,
    admitted: Nanos,
    cost: Cost,
    /// What it met under way, if it went by its reservation.
    met: Option<u64>,
}

/// What a flow has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QosStats {
    /// Requests that had to wait, so far.
    pub delayed_requests: u64,
    /// How long, in all.
    pub delayed_time: Nanos,
    /// Requests that wait now.
    pub waiting_requests: u64,
    /// Requests answered in the last whole second.
    pub served_iops: u64,
    /// Bytes of them.
    pub served_bandwidth: u64,
    /// What is reserved, in the same units.
    pub reserved_iops: u64,
    /// See above.
    pub reserved_bandwidth: u64,
    /// Whether what was served is less than nineteen twentieths of what is reserved, although something was
    /// asked for most of the time: clients whose requests are all answered at once take a moment to ask again.
    pub short: bool,
}

/// What was served in a second.
#[derive(Clone, Copy, Debug, Default)]
struct Served {
    requests: u64,
    bytes: u64,
    /// How long there was no request.
    idle: Nanos,
}

#[derive(Debug)]
struct Waiting<T> {
    item: T,
    cost: Cost,
    since: Nanos,
}

#[derive(Debug)]
struct Flow<T> {
    qos: Qos,
    life: u32,
    queue: VecDeque<Waiting<T>>,
    queued_bytes: u64,
    /// Requests and bytes, of limits and of reservations.
    limits: [Bucket; 2],
    reserved: [Bucket; 2],
    /// The tag of its share.
    share: u64,
    /// Since when its first request could go, but for others.
    first_since: Nanos,
    under_way: u64,
    /// Since when there is none, if there is none.
    idle_since: Nanos,
    second: u64,
    present: Served,
    last: Served,
    stats: QosStats,
}

impl<T> Flow<T> {
    fn limited_until(&self) -> Nanos {
        self.limits[0].ready_at().max(self.limits[1].ready_at())
    }

    /// When its first request goes before all shares.
    fn due_at(&self) -> Nanos {
        let reserved = self.reserved.iter().filter(|bucket| bucket.rate > 0);
        let reserved = reserved.map(Bucket::ready_at).min();
        let patience = self.first_since.max(self.limited_until()).plus(WAIT_MAX);
        reserved.map_or(patience, |due| due.min(patience))
    }

    const fn weight(&self) -> u64 {
        if self.qos.weight == 0 {
            WEIGHT_DEFAULT
        } else {
            self.qos.weight
        }
    }

    const fn tag(&self, weighed: u64) -> u64 {
        weighed * WEIGHT_MAX / self.weight()
    }

    /// Begin another second if it is time.
    fn roll(&mut self, now: Nanos) {
        self.last = self.last_second(now);
        let second = now.0 / SECOND;
        if second > self.second {
            self.present = Served::default();
            self.second = second;
            self.idle_since = self.idle_since.max(Nanos(second * SECOND));
        }
    }

    /// What was served in the last whole second.
    fn last_second(&self, now: Nanos) -> Served {
        match (now.0 / SECOND).saturating_sub(self.second) {
            0 => self.last,
            1 if self.is_idle() => {
                let end = Nanos((self.second + 1) * SECOND);
                let idle = self.present.idle.plus(end.since(self.idle_since));
                Served {
                    idle,
                    ..self.present
                }
            }
            1 => self.present,
            _ => Served {
                idle: Nanos(if self.is_idle() { SECOND } else { 0 }),
                ..Served::default()
            },
        }
    }

    fn is_idle(&self) -> bool {
        self.under_way == 0 && self.queue.is_empty()
    }
}

/// See the module. `T` is what waits.
#[derive(Debug)]
pub struct Scheduler<T> {
    flows: Vec<Option<Flow<T>>>,
    queued_bytes: u64,
    lives: u32,
    /// Flows that something waits in.
    backlog: Vec<u32>,
    configured: bool,
    /// Whether limits, reservations and shares are as nothing: the node stops.
    opened: bool,
    /// Until when requests of flows with reservations or weights are expected, and with reservations.
    shared_until: Nanos,
    reserved_until: Nanos,
    /// The tag of the last request that went by its share.
    virtual_time: u64,
    window: Window,
    /// The place beside other shards, if there are some.
    member: Option<Member>,
    /// What it says there.
    said: Said,
    wakeup: Option<Nanos>,
    /// Something has changed that may let a request go.
    changed: bool,
}

impl<T> Default for Scheduler<T> {
    fn default() -> Self {
        Self {
            flows: Vec::new(),
            queued_bytes: 0,
            lives: 0,
            backlog: Vec::new(),
            configured: false,
            opened: false,
            shared_until: Nanos(0),
            reserved_until: Nanos(0),
            virtual_time: 0,
            window: Window::new(),
            member: None,
            said: Said::default(),
            wakeup: None,
            changed: false,
        }
    }
}

impl<T> Scheduler<T> {
    /// Share a window with other shards, as the one of this number.
    pub fn join(&mut self, window: &Arc<CommonWindow>, shard: usize) {
        self.member = Some(Member::new(window, shard));
        self.note_configured();
    }

    /// A new flow.
    pub fn add(&mut self, now: Nanos, qos: Qos) -> FlowId {
        self.lives = self.lives.wrapping_add(1);
        let flow = Flow {
            qos: Qos::default(),
            life: self.lives,
            queue: VecDeque::new(),
            queued_bytes: 0,
            limits: [Bucket::default(); 2],
            reserved: [Bucket::default(); 2],
            share: self.virtual_time,
            first_since: now,
            under_way: 0,
            // As if it had been there, with nothing to do.
            idle_since: Nanos(now.0 / SECOND * SECOND),
            second: now.0 / SECOND,
            present: Served::default(),
            last: Served {
                idle: Nanos(SECOND),
                ..Served::default()
            },
            stats: QosStats::default(),
        };
        let free = self.flows.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.flows.push(None);
            self.flows.len() - 1
        });
        self.flows[place] = Some(flow);
        let id = FlowId(place as u32);
        self.set(now, id, qos);
        id
    }

    /// End a flow; what waits in it comes back.
    pub fn remove(&mut self, id: FlowId) -> impl Iterator<Item = T> + use<T> {
        self.backlog.retain(|&place| place != id.0);
        let flow = self.flows[id.0 as usize].take();
        self.note_configured();
        self.queued_bytes -= flow.as_ref().map_or(0, |flow| flow.queued_bytes);
        let waiting = flow.map(|flow| flow.queue).unwrap_or_default();
        waiting.into_iter().map(|waiting| waiting.item)
    }

    /// Change what a flow may have, from now on.
    pub fn set(&mut self, now: Nanos, id: FlowId, qos: Qos) {
        let flow = self.flow_mut(id);
        flow.limits[0].set(now, qos.iops_max, qos.iops_burst, BURST_TIME_MIN);
        flow.limits[1].set(now, qos.bandwidth_max, qos.bandwidth_burst, BURST_TIME_MIN);
        flow.reserved[0].set(now, qos.iops_min, 0, RESERVATION_TIME);
        flow.reserved[1].set(now, qos.bandwidth_min, 0, RESERVATION_TIME);
        flow.qos = qos;
        self.changed = true;
        self.note_configured();
    }

    fn note_configured(&mut self) {
        let flows = self.flows.iter().flatten();
        self.configured = flows.clone().any(|flow| flow.qos != Qos::default());
        if !flows.clone().any(|flow| flow.qos.is_reserved()) {
            self.reserved_until = Nanos(0);
            self.window = Window {
                size: WINDOW_MIN,
                probed: Decile::default(),
                alone: 0,
                ..self.window
            };
        }
        let has_shared = flows.clone().any(|flow| is_shared(&flow.qos));
        if !has_shared {
            self.shared_until = Nanos(0);
        }
        if let Some(member) = &self.member {
            member.set_shared(has_shared);
            self.said.shared_until = self.shared_until;
            self.said.reserved_until = self.reserved_until;
            member.say(&self.said);
        }
    }

    /// Let everything go from now on.
    pub fn open(&mut self) {
        self.opened = true;
        self.changed = true;
    }

    /// Whether requests have to go through here.
    pub fn is_on(&self) -> bool {
        self.configured || !self.backlog.is_empty() || self.others_are_shared()
    }

    fn others_are_shared(&self) -> bool {
        (self.member.as_ref()).is_some_and(Member::others_are_shared)
    }

    /// Whether [`Self::next`] may have something that it had not.
    pub fn has_changed(&self) -> bool {
        self.changed && !self.backlog.is_empty()
    }

    /// Queue a request; [`Self::next`] says when it goes.
    pub fn submit(&mut self, now: Nanos, id: FlowId, cost: Cost, item: T) {
        let virtual_time = self.virtual_time;
        let flow = self.flow_mut(id);
        flow.roll(now);
        if flow.is_idle() {
            let idle = now.since(flow.idle_since);
            flow.present.idle = flow.present.idle.plus(idle);
        }
        if flow.queue.is_empty() {
            let is_wave = now.since(flow.first_since) < LAPSE;
            let behind = if is_wave {
                flow.tag(SHARE_BEHIND_MAX)
            } else {
                0
            };
            flow.share = flow.share.max(virtual_time.saturating_sub(behind));
            flow.first_since = now;
        }
        let is_first = flow.queue.is_empty();
        let qos = flow.qos;
        flow.queued_bytes += cost.bytes;
        flow.queue.push_back(Waiting {
            item,
            cost,
            since: now,
        });
        self.queued_bytes += cost.bytes;
        if is_first {
            self.backlog.push(id.0);
        }
        if is_shared(&qos) {
            self.shared_until = now.plus(ACTIVE);
        }
        if qos.is_reserved() {
            self.reserved_until = now.plus(ACTIVE);
        }
        self.changed = true;
    }

    /// The request that goes now, with what is to be given back at its end.
    pub fn next(&mut self, now: Nanos) -> Option<(T, Ticket)> {
        self.changed = false;
        self.window.advance(now);
        let others = self.others(now);
        let has_room = self.has_room(now, others.as_ref());
        let mut best: Option<(bool, u64, usize)> = None;
        self.wakeup = None;
        for (index, &place) in self.backlog.iter().enumerate() {
            let Some(flow) = &self.flows[place as usize] else {
                continue;
            };
            let due = flow.due_at();
            let by_share = !(self.opened || due <= now);
            let limited = flow.limited_until();
            let (may_go, at) = if self.opened {
                (true, now)
            } else if limited > now {
                (false, limited)
            } else {
                let room_at = self.room_at(others.as_ref());
                (due <= now || has_room, due.min(room_at))
            };
            if !may_go {
                self.wakeup = Some(self.wakeup.map_or(at, |wakeup| wakeup.min(at)));
                continue;
            }
            let tag = if by_share { flow.share } else { due.0 };
            if best.is_none_or(|(share, least, _)| (by_share, tag) < (share, least)) {
                best = Some((by_share, tag, index));
            }
        }
        let (by_share, _, index) = best?;
        let beside = others.map_or(0, |others| others.under_way);
        Some(self.admit(now, index, by_share, beside))
    }

    /// Take the first request of the flow in this place of the backlog, while so much is under way on other shards.
    fn admit(&mut self, now: Nanos, index: usize, by_share: bool, beside: u64) -> (T, Ticket) {
        let place = self.backlog[index];
        let met = self.window.under_way() + beside;
        let virtual_time = self.virtual_time;
        let flow = self.flow_mut(FlowId(place));
        flow.roll(now);
        let Waiting { item, cost, since } = flow.queue.pop_front().expect("it waits");
        let by_reservation = flow.reserved.iter().any(|bucket| {
            // One request that was waited for too long is not a part of the reservation.
            bucket.rate > 0 && bucket.ready_at() <= now
        });
        let amounts = [cost.requests, cost.bytes];
        for (kind, amount) in amounts.into_iter().enumerate() {
            flow.limits[kind].take(now, amount);
            if by_reservation {
                flow.reserved[kind].take(now, amount);
            }
        }
        let weighed = cost.weighed();
        let share = flow.share;
        flow.share += flow.tag(weighed);
        if !by_share {
            let ahead = virtual_time + flow.tag(SHARE_AHEAD_MAX);
            flow.share = flow.share.min(ahead.max(share));
        }
        flow.queued_bytes -= cost.bytes;
        flow.first_since = now;
        flow.under_way += 1;
        if now > since {
            flow.stats.delayed_requests += 1;
            flow.stats.delayed_time = flow.stats.delayed_time.plus(now.since(since));
        }
        let life = flow.life;
        if flow.queue.is_empty() {
            self.backlog.swap_remove(index);
        }
        self.queued_bytes -= cost.bytes;
        if by_share {
            self.virtual_time = self.virtual_time.max(share);
        }
        self.window.present += weighed;
        self.say(now);
        let ticket = Ticket {
            flow: FlowId(place),
            life,
            admitted: now,
            cost,
            met: (by_reservation && cost.requests > 0).then_some(met),
        };
        (item, ticket)
    }

    fn has_room(&self, now: Nanos, others: Option<&Others>) -> bool {
        let under_way = self.window.under_way();
        let Some(others) = others else {
            return self.shared_until <= now || under_way < self.room(now);
        };
        if self.shared_until.max(others.shared_until) <= now {
            return true;
        }
        let room = self.room(now).min(others.size);
        // What others do not use is lent.
        if under_way + others.under_way < room {
            return true;
        }
        let weight = self.said.weight.max(1);
        under_way < (room * weight).div_ceil(weight + others.weight)
    }

    /// What other shards say, while any of them or this one has flows with weights or reservations.
    fn others(&self, now: Nanos) -> Option<Others> {
        let member = self.member.as_ref()?;
        let matters = member.others_are_shared() || self.shared_until > now;
        matters.then(|| member.others(now, self.window.lapse))
    }

    /// Tell other shards what is so now, as long as it matters to them.
    fn say(&mut self, now: Nanos) {
        if self.member.is_none() || !(self.others_are_shared() || self.shared_until > now) {
            return;
        }
        let lapse = self.window.lapse;
        if self.said.lapse != lapse {
            let mut active = (0, Nanos(0));
            for flow in self.flows.iter().flatten() {
                let until = if flow.is_idle() {
                    flow.idle_since.plus(ACTIVE)
                } else {
                    now.plus(ACTIVE)
                };
                if until > now {
                    active = (active.0 + flow.weight(), until.max(active.1));
                }
            }
            (self.said.weight, self.said.active_until) = active;
        }
        self.said = Said {
            shared_until: self.shared_until,
            reserved_until: self.reserved_until,
            size: self.room(now),
            under_way: self.window.under_way(),
            lapse,
            ..self.said
        };
        if let Some(member) = &self.member {
            member.say(&self.said);
        }
    }

    fn room(&self, now: Nanos) -> u64 {
        if self.reserved_until > now {
            self.window.room(now)
        } else {
            WINDOW_MAX
        }
    }

    /// When there is room although nothing is answered.
    fn room_at(&self, others: Option<&Others>) -> Nanos {
        let lapsed = Nanos((self.window.lapse + 1) * LAPSE.0);
        let theirs = others.map_or(Nanos(0), |others| others.shared_until);
        lapsed.min(self.shared_until.max(theirs))
    }

    /// An admitted request was answered.
    pub fn ended(&mut self, now: Nanos, ticket: Ticket) {
        self.window.advance(now);
        self.window.ended(ticket.admitted, ticket.cost.weighed());
        if let Some(met) = ticket.met {
            self.window.sample(now, ticket.admitted, met);
        }
        self.say(now);
        self.changed = true;
        let flow = self.flows[ticket.flow.0 as usize].as_mut();
        if let Some(flow) = flow.filter(|flow| flow.life == ticket.life) {
            flow.roll(now);
            flow.under_way -= 1;
            flow.present.requests += ticket.cost.requests;
            flow.present.bytes += ticket.cost.bytes;
            flow.idle_since = now;
        }
    }

    /// When [`Self::next`] has to be asked again although nothing happens.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        // What was waited for may have been removed or withdrawn since, and nobody asks then.
        self.wakeup.filter(|_| !self.backlog.is_empty())
    }

    /// Take back what waits in a flow and is not wanted any more.
    pub fn withdraw(&mut self, id: FlowId, unwanted: impl Fn(&T) -> bool) -> Vec<T> {
        let flow = self.flow_mut(id);
        let before = flow.queued_bytes;
        let mut withdrawn = Vec::new();
        for waiting in core::mem::take(&mut flow.queue) {
            if unwanted(&waiting.item) {
                flow.queued_bytes -= waiting.cost.bytes;
                withdrawn.push(waiting.item);
            } else {
                flow.queue.push_back(waiting);
            }
        }
        let (rest, is_empty) = (flow.queued_bytes, flow.queue.is_empty());
        self.queued_bytes -= before - rest;
        if is_empty {
            self.backlog.retain(|&place| place != id.0);
        }
        withdrawn
    }

    /// Bytes of the requests that wait in a flow.
    pub fn queued_bytes(&self, id: FlowId) -> u64 {
        let flow = self.flows[id.0 as usize].as_ref();
        flow.map_or(0, |flow| flow.queued_bytes)
    }

    /// Bytes of the requests that wait in all flows.
    pub const fn queued_bytes_of_all(&self) -> u64 {
        self.queued_bytes
    }

    /// What a flow has counted.
    pub fn stats(&self, now: Nanos, id: FlowId) -> QosStats {
        let Some(flow) = &self.flows[id.0 as usize] else {
            return QosStats::default();
        };
        let (last, qos) = (flow.last_second(now), flow.qos);
        QosStats {
            waiting_requests: flow.queue.len() as u64,
            served_iops: last.requests,
            served_bandwidth: last.bytes,
            reserved_iops: qos.iops_min,
            reserved_bandwidth: qos.bandwidth_min,
            short: last.idle.0 < SECOND / 2
                && (is_short(last.requests, qos.iops_min)
                    || is_short(last.bytes, qos.bandwidth_min)),
            ..flow.stats
        }
    }

    fn flow_mut(&mut self, id: FlowId) -> &mut Flow<T> {
        let flow = self.flows[id.0 as usize].as_mut();
        flow.expect("a flow is asked for while it is there")
    }
}

/// A second does not begin and end with a request.
const fn is_short(served: u64, reserved: u64) -> bool {
    served.saturating_mul(20) < reserved.saturating_mul(19)
}

const fn is_shared(qos: &Qos) -> bool {
    qos.is_reserved() || qos.weight > 0
}
