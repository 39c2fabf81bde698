//! Whatever is injected: every request ends exactly once, spans arrive in order, whole and unaltered, or the link ends with an
//! error; and memory stays below what the limits add up to. `FAULT_SEED` replays one run.

mod support;

use std::collections::BTreeMap;

use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::wire::Purpose;
use hdcs_messenger::conformance::{End, ONE, Pair, TWO, config, fill, known, memory};
use hdcs_messenger::error::{SendError, Why};
use hdcs_messenger::event::{Ask, Event};
use hdcs_messenger::faults::{Fault, Faulty, Plan};
use hdcs_messenger::link::Link;
use hdcs_messenger::streams::{Marks, Progress};
use hdcs_messenger::tls::Tls;
use hdcs_messenger::transport::Plain;

use support::Certificates;

/// Turns of a run at most. Time passes in each, so that by then everything has ended or timed out.
const TURNS_MAX: u32 = 60_000;
/// Turns in which something is done.
const ACTS: u32 = 600;
const TURN: Nanos = Nanos::from_micros(500);
const POOL_BYTES: usize = 24 << 20;

/// What both ends do, and what is known of it.
struct Run {
    pair: Pair,
    random: fastrand::Rng,
    purpose: Purpose,
    /// Requests by end and number: how often each has ended.
    requests: [BTreeMap<u64, u32>; 2],
    answered: u32,
    stream: Option<u32>,
    /// Where the next span begins that one sends, and that two expects.
    next: [u64; 2],
    spans: u32,
    held_max: usize,
}

/// How a run ended.
#[derive(Default)]
struct Outcome {
    /// One run alone shows nothing of what all of them do.
    runs: u64,
    ended: u32,
    answered: u32,
    spans: u32,
}

impl Run {
    fn new(seed: u64, faults: &[Fault], tls: Option<(Tls, Tls)>) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut plan = || Plan {
            faults: faults.to_vec(),
            one_of: [3, 20, 200][random.usize(..3)],
            delay_max: Nanos::from_millis(5),
            seed: random.u64(..),
        };
        let plans = [plan(), plan()];
        let mut tls = tls;
        let mut make = |one: Link, two: Link| {
            let (near, far) = memory();
            let [first, second] = plans.clone();
            match tls.take() {
                Some((tls_one, tls_two)) => (
                    End::new(one, Faulty::new(tls_one, first), near),
                    End::new(two, Faulty::new(tls_two, second), far),
                ),
                None => (
                    End::new(one, Faulty::new(Plain, first), near),
                    End::new(two, Faulty::new(Plain, second), far),
                ),
            }
        };
        let purpose = if random.bool() {
            Purpose::Spans
        } else {
            Purpose::Bulk
        };
        let configs = [config(ONE), config(TWO)];
        let pair = Pair::greeting(&mut make, purpose, configs, known(TWO), POOL_BYTES);
        Self {
            pair,
            random,
            purpose,
            requests: [BTreeMap::new(), BTreeMap::new()],
            answered: 0,
            stream: None,
            next: [0, 0],
            spans: 0,
            held_max: 0,
        }
    }

    fn all(mut self) -> Outcome {
        let mut over = 0;
        for turn in 0..TURNS_MAX {
            self.pair.pass(TURN);
            self.pair.two.connection.admit(Some(&known(ONE)));
            if turn < ACTS {
                self.act();
            } else if turn == ACTS {
                self.pair.one.connection.shut_down();
            }
            for _ in 0..self.random.u32(..4) {
                self.pair.turn();
            }
            self.look(0);
            self.look(1);
            let ended = |end: &End| end.connection.ended().is_some();
            over = if ended(&self.pair.one) && ended(&self.pair.two) {
                over + 1
            } else {
                0
            };
            if over > 10 {
                return self.close();
            }
        }
        panic!("neither end is over");
    }

    fn end(&mut self, index: usize) -> &mut End {
        if index == 0 {
            &mut self.pair.one
        } else {
            &mut self.pair.two
        }
    }

    /// Do something at one end.
    fn act(&mut self) {
        let index = self.random.usize(..2);
        let deadline = self
            .pair
            .now
            .plus(Nanos::from_micros(self.random.u64(100..30_000)));
        match self.random.u8(..4) {
            0 | 1 if self.purpose == Purpose::Spans => self.append(deadline),
            _ => self.ask(index, deadline),
        }
    }

    fn append(&mut self, deadline: Nanos) {
        let Some(stream) = self.stream else {
            self.stream = self
                .pair
                .one
                .connection
                .open_stream(1, 0, b"log", deadline)
                .ok();
            return;
        };
        let blocks = [1, 2, 3, 70, 517][self.random.usize(..5)];
        let position = self.next[0];
        let mut parts = Vec::new();
        let mut left = blocks;
        while left > 0 {
            let part = left.min(self.random.usize(1..=200));
            let Some(mut buf) = self.pair.pools[0].alloc(part * BLOCK_BYTES) else {
                return;
            };
            let first = blocks - left;
            for (block, bytes) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
                fill(bytes, position + (first + block) as u64);
            }
            parts.push(buf.freeze());
            left -= part;
        }
        match self
            .pair
            .one
            .connection
            .append(stream, position, Marks::default(), &parts)
        {
            Ok(()) => self.next[0] += blocks as u64,
            Err(SendError::Stream(_)) => {
                // It was not accepted in time.
                self.stream = None;
                self.next = [0, 0];
            }
            Err(SendError::Full | SendError::Ended | SendError::NotOpen) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn ask(&mut self, index: usize, deadline: Nanos) {
        let urgent = self.random.u8(..4) == 0;
        let bytes = match (urgent, self.purpose) {
            (false, Purpose::Bulk) => [0, 5000, 1 << 20][self.random.usize(..3)],
            _ => 0,
        };
        let mut payload = Vec::new();
        let mut into = None;
        if bytes > 0 {
            let pool = &self.pair.pools[index];
            let (Some(mut buf), Some(room)) = (pool.alloc(bytes), pool.alloc(bytes)) else {
                return;
            };
            fill(&mut buf, bytes as u64);
            payload.push(buf.freeze());
            into = Some(room);
        }
        let asked = self.end(index).connection.request(Ask {
            code: 1,
            urgent,
            meta: &(bytes as u64).to_le_bytes(),
            payload: &payload,
            into,
            room_bytes: 0,
            deadline,
        });
        match asked {
            Ok(number) => assert!(self.requests[index].insert(number, 0).is_none()),
            Err(refused) => assert!(
                matches!(
                    refused.error,
                    SendError::Full | SendError::Ended | SendError::NotOpen
                ),
                "{refused:?}"
            ),
        }
    }

    fn ends(&mut self, index: usize, number: u64) {
        let ended = self.requests[index].get_mut(&number);
        *ended.expect("it was asked") += 1;
    }

    /// What has happened at one end.
    fn look(&mut self, index: usize) {
        let bound = self.end(index).connection.data_bytes_max();
        let held = self.end(index).held_bytes();
        // What is encrypted, delayed, or taken by the driver is a few lumps of what a transport makes at once.
        assert!(held <= bound + (6 << 20), "{held} of {bound}");
        self.held_max = self.held_max.max(held);
        while let Some(event) = self.end(index).events.pop_front() {
            match event {
                Event::Answered(answer) => {
                    let bytes = u64::from_le_bytes((*answer.meta).try_into().unwrap());
                    assert_eq!(answer.payload_bytes as u64, bytes);
                    if bytes > 0 {
                        let mut expected = vec![0; bytes as usize];
                        fill(&mut expected, bytes);
                        let into = answer.into.expect("the asker's buffer");
                        assert!(into[..expected.len()] == expected, "an answer is altered");
                    }
                    self.answered += 1;
                    self.ends(index, answer.number);
                }
                Event::TimedOut { number, .. } | Event::Disconnected { number, .. } => {
                    self.ends(index, number);
                }
                Event::Asking(request) => {
                    // Some are answered late.
                    if self.random.u8(..20) == 0 {
                        let late = self.pair.now.plus(Nanos::from_millis(40));
                        self.pair.now = late;
                    }
                    let (number, meta) = (request.number, request.meta);
                    let connection = &mut self.end(index).connection;
                    match connection.answer(number, 0, &meta, &request.payload) {
                        Ok(()) | Err(SendError::Ended | SendError::Unasked(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                Event::StreamAsked { stream, .. } => {
                    self.next[1] = 0;
                    let progress = Progress {
                        durable: 0,
                        tail: 0,
                        limit: 2000,
                    };
                    let _ = self.end(index).connection.ack(stream, progress);
                }
                Event::Span(span) => {
                    assert_eq!(span.position, self.next[1], "spans come in order");
                    let blocks = span.parts.iter().flat_map(|part| part.chunks(BLOCK_BYTES));
                    let mut expected = vec![0; BLOCK_BYTES];
                    for block in blocks {
                        fill(&mut expected, self.next[1]);
                        assert!(*block == expected[..], "a span is altered");
                        self.next[1] += 1;
                    }
                    self.spans += 1;
                    let progress = Progress {
                        durable: self.next[1],
                        tail: 0,
                        limit: self.next[1] + 2000,
                    };
                    let _ = self.end(index).connection.ack(span.stream, progress);
                }
                Event::StreamLate { .. } => self.stream = None,
                Event::Ended(ended) => {
                    let why = &ended.why;
                    let text = ended.to_string();
                    assert!(
                        text.starts_with("end of") || text.starts_with("node"),
                        "{text}"
                    );
                    assert!(!matches!(why, Why::Refused { .. }), "{text}");
                }
                _ => {}
            }
        }
        if self.stream.is_none() {
            self.next[0] = 0;
        }
    }

    fn close(mut self) -> Outcome {
        self.look(0);
        self.look(1);
        for (index, requests) in self.requests.iter().enumerate() {
            for (number, ended) in requests {
                assert_eq!(*ended, 1, "request {number} of end {index}");
            }
        }
        let Pair {
            one, two, pools, ..
        } = self.pair;
        let ended = [&one, &two].into_iter().filter(|end| {
            let why = &end.connection.ended().expect("it is over").why;
            !matches!(why, Why::Finished | Why::Bye)
        });
        let ended = ended.count() as u32;
        drop((one, two));
        for pool in &pools {
            assert_eq!(pool.free_bytes(), pool.total_bytes(), "a buffer is lost");
        }
        Outcome {
            runs: 1,
            ended,
            answered: self.answered,
            spans: self.spans,
        }
    }
}

/// Run each seed; a panic names the one that replays it. What all of them came to.
fn each(seeds: u64, faults: &[Fault], certificates: Option<&Certificates>) -> Outcome {
    let set = std::env::var("FAULT_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let seeds = set.map_or(0..seeds, |seed: u64| seed..seed + 1);
    let mut all = Outcome::default();
    for seed in seeds {
        let tls = certificates.map(Certificates::tls);
        let run = || Run::new(seed, faults, tls).all();
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
            Ok(outcome) => {
                all.runs += outcome.runs;
                all.ended += outcome.ended;
                all.answered += outcome.answered;
                all.spans += outcome.spans;
            }
            Err(panic) => {
                eprintln!("FAULT_SEED={seed} {faults:?}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    all
}

#[test]
fn delays_alone_end_nothing() {
    let all = each(20, &[Fault::Delay], None);
    assert_eq!(all.ended, 0);
    assert!(
        all.runs == 1 || all.answered > 100 && all.spans > 20,
        "{} {}",
        all.answered,
        all.spans
    );
}

#[test]
fn every_fault_alone_is_noticed_or_does_no_harm() {
    for fault in Fault::ALL {
        let all = each(8, &[fault], None);
        assert!(
            all.runs == 1 || fault == Fault::Delay || all.ended > 0,
            "{fault:?} is never noticed"
        );
    }
}

#[test]
fn faults_together_are_noticed_or_do_no_harm() {
    let all = each(60, &Fault::ALL, None);
    assert!(all.runs == 1 || all.ended > 0 && all.answered > 0);
}

#[test]
fn faults_below_tls_are_noticed_or_do_no_harm() {
    let certificates = Certificates::new();
    let all = each(16, &Fault::ALL, Some(&certificates));
    assert!(all.runs == 1 || all.ended > 0);
}
