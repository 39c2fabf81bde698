//! In which way spans are made durable, found out by trying while it is used.
//!
//! By `RWF_DSYNC` or by `fdatasync` behind the write, by the kernel's workers or by threads of our own: which is faster
//! depends on the device, on the file system, on how many spans are under way, and on what else the processors do. When
//! a log is opened, the driver measures what it can ([`DurableWays::new`]). From then on it is spans themselves that are
//! measured:
//!
//! ```text
//!            a window of spans has ended, another way is due
//!   Usual ─────────────────────────────────────────────────► Trial
//!     ▲  ▲                                                     │ │
//!     │  └── lost, or nothing to compare: pause, then again ───┘ │
//!     └── won often enough in a row: that is the usual way now ──┘
//! ```
//!
//! 1. Time goes in windows of spans that have ended. In a trial, spans that begin take the other way, and what they took
//!    is compared with the window before it.
//! 2. A span keeps the way that it was begun with. One that ends in a window of another way is not counted.
//! 3. A way that costs more processor time has to be clearly faster; one that costs less, only not slower.
//! 4. Trials are rare: the pause before the next one doubles with each that is lost. They are due at once when spans take
//!    much longer than they used to, as on a processor that has become busy, though not more often than the least pause.
//! 5. A trial ends early when it has taken too long. So what it costs is bounded by how slow single spans are.
//! 6. Windows under different load are not compared.
//!
//! It decides; the driver performs. There are no failures: a way that the device refuses fails the log, so none is
//! offered that was not tried at the opening.

use crate::base::io::{Durability, DurableWay, Nanos};

/// Spans of a window.
const WINDOW_SPANS: usize = 8;
/// Points that must be won in a row. A trial that is won has one, one that is won by far has two.
const POINTS: u32 = 3;
/// What a way may take of the time of the usual one, in percent, if it costs more or less processor time than that.
const DEARER_PERCENT: u64 = 80;
const CHEAPER_PERCENT: u64 = 105;
/// By far.
const FAR_PERCENT: u64 = 50;
/// A trial that has taken so many times as long as the window before it is lost.
const LOST_FACTOR: u64 = 3;
/// Spans that take so many times as long as they used to are a reason to try another way.
const SLOW_FACTOR: u64 = 3;
/// A window of so many times as many bytes, or spans under way, is one of another load.
const LOAD_FACTOR: usize = 2;
/// From the end of a trial to the next one of the same way, at first and at most.
const PAUSE_MIN: Nanos = Nanos::from_millis(1_000);
const PAUSE_MAX: Nanos = Nanos::from_millis(64_000);
/// A share of a window in the smoothed time of windows, as a divisor.
const SMOOTHING: u64 = 8;

/// What a span has taken, and under which load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Took {
    pub(super) nanos: Nanos,
    pub(super) bytes: usize,
    /// Spans that were under way when it began, itself included.
    pub(super) depth: usize,
}

/// Spans that have ended, all together.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    spans: usize,
    nanos: u64,
    bytes: usize,
    depth: usize,
}

impl Window {
    fn add(&mut self, took: Took) {
        self.spans += 1;
        self.nanos = self.nanos.saturating_add(took.nanos.0);
        self.bytes += took.bytes;
        self.depth += took.depth;
    }

    fn is_full(&self) -> bool {
        self.spans >= WINDOW_SPANS
    }

    /// Whether this one took at most so many percent of the time of another one.
    fn is_within(&self, percent: u64, of: &Self) -> bool {
        self.nanos.saturating_mul(100) <= of.nanos.saturating_mul(percent)
    }

    fn is_of_same_load(&self, other: &Self) -> bool {
        let alike = |one: usize, other: usize| {
            one <= other.saturating_mul(LOAD_FACTOR) && other <= one.saturating_mul(LOAD_FACTOR)
        };
        alike(self.bytes, other.bytes) && alike(self.depth, other.depth)
    }
}

/// When another way is tried.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    way: DurableWay,
    due: Nanos,
    tried: Option<Nanos>,
    pause: Nanos,
    points: u32,
}

impl Candidate {
    fn new(way: DurableWay, due: Nanos) -> Self {
        Self {
            way,
            due,
            tried: None,
            pause: PAUSE_MIN,
            points: 0,
        }
    }

    fn rest(&mut self, now: Nanos) {
        self.due = now.plus(self.pause);
        self.tried = Some(now);
    }
}

/// See the module. By default there is none to choose from.
#[derive(Debug, Default)]
pub struct DurableWays {
    usual: Option<DurableWay>,
    has_calls: bool,
    has_threads: bool,
    /// The same by the other one who calls, and by the other call.
    candidates: [Option<Candidate>; 2],
    /// Which of them is on trial.
    trial: Option<usize>,
    window: Window,
    /// The last whole window of the usual way, and what windows take in the long run.
    before: Option<Window>,
    smoothed: Option<u64>,
}

impl DurableWays {
    /// Begin with one way. Whether there is another call, and whether there are threads.
    pub fn new(first: DurableWay, has_calls: bool, has_threads: bool) -> Self {
        let mut ways = Self {
            has_calls,
            has_threads,
            ..Self::default()
        };
        ways.change(first, Nanos(0));
        ways
    }

    /// Go on with a way, and try the others from then on.
    fn change(&mut self, way: DurableWay, due: Nanos) {
        let by_other = DurableWay {
            by_thread: !way.by_thread,
            ..way
        };
        let by_other_call = DurableWay {
            call: match way.call {
                Durability::Dsync => Durability::Fdatasync,
                Durability::Fdatasync => Durability::Dsync,
            },
            ..way
        };
        self.usual = Some(way);
        self.candidates = [
            (self.has_threads).then(|| Candidate::new(by_other, due)),
            (self.has_calls).then(|| Candidate::new(by_other_call, due)),
        ];
        self.trial = None;
        self.window = Window::default();
        self.before = None;
        self.smoothed = None;
    }

    /// The usual way.
    pub(super) fn usual(&self) -> Option<DurableWay> {
        self.usual
    }

    /// How the span is made durable that begins now.
    pub(super) fn next(&mut self, now: Nanos) -> Option<DurableWay> {
        if self.trial.is_none() && self.before.is_some() {
            let is_due = |candidate: &Option<Candidate>| {
                candidate.is_some_and(|candidate| candidate.due <= now)
            };
            // One that has won goes on; otherwise whichever has waited for longer.
            let due = (0..self.candidates.len()).filter(|&index| is_due(&self.candidates[index]));
            self.trial = due.min_by_key(|&index| {
                let candidate = self.candidates[index].expect("it is due");
                (candidate.points == 0, candidate.tried.map_or(0, |at| at.0))
            });
            if self.trial.is_some() {
                self.window = Window::default();
            }
        }
        self.current()
    }

    fn current(&self) -> Option<DurableWay> {
        match self.trial {
            Some(index) => self.candidates[index].map(|candidate| candidate.way),
            None => self.usual,
        }
    }

    /// A span that was begun that way is durable.
    pub(super) fn ended(&mut self, now: Nanos, way: DurableWay, took: Took) {
        if self.current() != Some(way) {
            return;
        }
        self.window.add(took);
        if self.trial.is_some() {
            self.look_at_trial(now);
        } else if self.window.is_full() {
            let window = core::mem::take(&mut self.window);
            self.note_usual(now, window);
        }
    }

    /// A window of the usual way has ended.
    fn note_usual(&mut self, now: Nanos, window: Window) {
        self.before = Some(window);
        let smoothed = self.smoothed.unwrap_or(window.nanos);
        if window.nanos / SLOW_FACTOR >= smoothed {
            for candidate in self.candidates.iter_mut().flatten() {
                let rests = |tried: Nanos| now.since(tried) < PAUSE_MIN;
                if !candidate.tried.is_some_and(rests) {
                    candidate.due = now;
                }
            }
        }
        let kept = smoothed - smoothed / SMOOTHING;
        let nanos = window.nanos.min(smoothed.saturating_mul(SLOW_FACTOR));
        self.smoothed = Some(kept.saturating_add(nanos / SMOOTHING).max(1));
    }

    /// A span of the trial has ended.
    fn look_at_trial(&mut self, now: Nanos) {
        let (Some(index), Some(before), Some(usual)) = (self.trial, self.before, self.usual) else {
            return;
        };
        let Some(candidate) = &mut self.candidates[index] else {
            return;
        };
        let is_too_slow = self.window.nanos / LOST_FACTOR > before.nanos;
        if !self.window.is_full() && !is_too_slow {
            return;
        }
        let window = core::mem::take(&mut self.window);
        self.trial = None;
        // The window before the next trial follows this one.
        self.before = None;
        if !is_too_slow && !window.is_of_same_load(&before) {
            return candidate.rest(now);
        }
        let percent = if is_dearer(candidate.way, usual) {
            DEARER_PERCENT
        } else {
            CHEAPER_PERCENT
        };
        if !window.is_within(percent, &before) {
            candidate.points = 0;
            candidate.rest(now);
            candidate.pause = Nanos((2 * candidate.pause.0).min(PAUSE_MAX.0));
            return;
        }
        candidate.points += 1 + u32::from(window.is_within(FAR_PERCENT, &before));
        candidate.tried = Some(now);
        candidate.due = now;
        if candidate.points >= POINTS {
            let way = candidate.way;
            self.change(way, now.plus(PAUSE_MIN));
        }
    }
}

/// Whether one way takes more processor time than another.
fn is_dearer(way: DurableWay, than: DurableWay) -> bool {
    // A thread costs two more switches for each span, and a call of its own a worker of the kernel's.
    let cost = |way: DurableWay| (way.by_thread, way.call == Durability::Fdatasync);
    cost(way) > cost(than)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DSYNC: DurableWay = DurableWay {
        call: Durability::Dsync,
        by_thread: false,
    };
    const SYNC: DurableWay = DurableWay {
        call: Durability::Fdatasync,
        by_thread: false,
    };
    const THREAD: DurableWay = DurableWay {
        call: Durability::Dsync,
        by_thread: true,
    };

    /// Spans one after the other on a device where they take so many microseconds by each way.
    struct Device {
        ways: DurableWays,
        now: Nanos,
        /// Spans that did not take the usual way, and what all of them took.
        tried: u64,
        tried_micros: u64,
    }

    impl Device {
        fn new() -> Self {
            Self {
                ways: DurableWays::new(DSYNC, true, true),
                now: Nanos::from_millis(1),
                tried: 0,
                tried_micros: 0,
            }
        }

        fn run(&mut self, time: Nanos, micros: impl Fn(DurableWay, Nanos) -> u64) -> DurableWay {
            let until = self.now.plus(time);
            while self.now < until {
                let way = self.ways.next(self.now).unwrap();
                let micros = micros(way, self.now);
                if Some(way) != self.ways.usual() {
                    self.tried += 1;
                    self.tried_micros += micros;
                }
                let nanos = Nanos::from_micros(micros);
                self.now = self.now.plus(nanos);
                let (bytes, depth) = (8192, 1);
                let took = Took {
                    nanos,
                    bytes,
                    depth,
                };
                self.ways.ended(self.now, way, took);
            }
            self.ways.usual().unwrap()
        }
    }

    fn seconds(count: u64) -> Nanos {
        Nanos::from_millis(1000 * count)
    }

    #[test]
    fn way_that_is_clearly_faster_is_found_and_left_when_it_is_not_any_more() {
        let mut device = Device::new();
        let first = |way, _| if way == SYNC { 50 } else { 100 };
        assert_eq!(device.run(seconds(1), first), SYNC);
        let then = |way, _| if way == SYNC { 100 } else { 90 };
        assert_eq!(device.run(seconds(10), then), DSYNC);
    }

    #[test]
    fn way_that_costs_more_is_not_taken_for_a_little_gain_and_left_for_none() {
        let mut device = Device::new();
        assert_eq!(
            device.run(seconds(100), |way, _| if way == DSYNC { 100 } else { 90 }),
            DSYNC
        );
        device.ways.change(THREAD, Nanos(0));
        let little = |way, _| if way == THREAD { 97 } else { 100 };
        assert_eq!(device.run(seconds(100), little), DSYNC);
    }

    #[test]
    fn processor_that_becomes_busy_is_evaded_at_once() {
        let mut device = Device::new();
        let idle = |way: DurableWay, _| if way.by_thread { 110 } else { 100 };
        assert_eq!(device.run(seconds(30), idle), DSYNC);
        let busy = |way: DurableWay, _| if way.by_thread { 250 } else { 3000 };
        assert_eq!(device.run(Nanos::from_millis(150), busy), THREAD);
        assert_eq!(device.run(seconds(60), busy), THREAD);
        assert_eq!(device.run(seconds(70), idle), DSYNC);
    }

    #[test]
    fn trials_of_what_is_worse_cost_little() {
        let mut device = Device::new();
        device.run(seconds(600), |way, _| if way == DSYNC { 100 } else { 150 });
        assert!(device.tried <= 400, "{} spans", device.tried);
        // And one that is worse by far costs some spans each time.
        let mut device = Device::new();
        device.run(
            seconds(600),
            |way, _| {
                if way == DSYNC { 100 } else { 10_000 }
            },
        );
        assert!(device.tried <= 50, "{} spans", device.tried);
        assert!(device.tried_micros <= 600_000_000 / 1000);
    }

    #[test]
    fn moment_in_which_the_device_hangs_changes_nothing() {
        let mut device = Device::new();
        let hangs = |_, now: Nanos| {
            if now.0 % 200_000_000 < 1_000_000 {
                5_000
            } else {
                100
            }
        };
        assert_eq!(device.run(seconds(600), hangs), DSYNC);
    }

    #[test]
    fn windows_under_different_load_are_not_compared() {
        let mut ways = DurableWays::new(DSYNC, true, false);
        let mut now = Nanos(0);
        // Whenever another way is tried, clients happen to send less.
        for _ in 0..100_000 {
            let way = ways.next(now).unwrap();
            let blocks = if way == DSYNC { 64 } else { 2 };
            let nanos = Nanos::from_micros(blocks * 10);
            now = now.plus(nanos);
            let (bytes, depth) = (blocks as usize * 4096, 1);
            let took = Took {
                nanos,
                bytes,
                depth,
            };
            ways.ended(now, way, took);
        }
        assert_eq!(ways.usual(), Some(DSYNC));
    }

    #[test]
    fn span_that_was_begun_another_way_is_not_counted() {
        let mut ways = DurableWays::new(DSYNC, true, false);
        let took = |micros| Took {
            nanos: Nanos::from_micros(micros),
            bytes: 8192,
            depth: 2,
        };
        for _ in 0..WINDOW_SPANS {
            assert_eq!(ways.next(Nanos(0)), Some(DSYNC));
            ways.ended(Nanos(0), DSYNC, took(100));
        }
        assert_eq!(ways.next(Nanos(0)), Some(SYNC), "a trial");
        for _ in 0..WINDOW_SPANS {
            ways.ended(Nanos(0), DSYNC, took(1));
        }
        assert_eq!(ways.next(Nanos(0)), Some(SYNC), "it still goes on");
        for _ in 0..WINDOW_SPANS {
            ways.ended(Nanos(0), SYNC, took(200));
        }
        assert_eq!(ways.next(Nanos(0)), Some(DSYNC));
    }

    #[test]
    fn where_there_is_no_choice_nothing_is_tried() {
        let mut device = Device::new();
        device.ways = DurableWays::new(DSYNC, false, false);
        device.run(seconds(10), |_, _| 100);
        assert_eq!(device.tried, 0);
        assert_eq!(DurableWays::default().next(Nanos(0)), None);
    }
}
