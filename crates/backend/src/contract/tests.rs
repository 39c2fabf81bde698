//! Backends that break one rule each, and what notices it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hdcs_core::base::io::{ExtentState, Nanos};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::objects::io::SnapshotName;
use hdcs_device::ring::Outcome;

use super::*;
use crate::conformance::Bench;
use crate::{Backend, Port, Stack};

const BYTES: u64 = 1 << 20;

/// What a backend does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breach {
    None,
    EndsTwice,
    EndsInSomethingElse,
    ReadsLess,
    /// It has the first write of a sector only.
    KeepsTheOld,
    /// A write that overlaps another one changes what is beside it.
    WritesTooMuch,
    /// What it adds to its size is not zero.
    GrowsWithData,
    ForgetsAFlush,
    /// It keeps what was not flushed, though its flushes are atomic.
    KeepsTooMuch,
    LeavesAGap,
    TellsTooMuch,
    TellsNothing,
    HolesOverData,
    IsFencedForAMoment,
    Changes,
}

/// Memory that ends the oldest of its operations at each poll. `kept` is what the next opening finds.
struct Memory {
    breach: Breach,
    is_atomic: bool,
    now: Vec<u8>,
    kept: Vec<u8>,
    waiting: VecDeque<Operation>,
    reads: u8,
    writes: u64,
}

impl Memory {
    fn new(breach: Breach, is_atomic: bool, content: Vec<u8>) -> Self {
        Self {
            breach,
            is_atomic,
            now: content.clone(),
            kept: content,
            waiting: VecDeque::new(),
            reads: 0,
            writes: 0,
        }
    }

    fn perform(&mut self, ask: Ask) -> Result<Done, IoError> {
        let breach = self.breach;
        match ask {
            Ask::Read { offset, mut buf } => {
                self.reads += 1;
                if breach == Breach::ReadsLess {
                    let pool = hdcs_core::base::buf::Pool::new(1 << 20);
                    let less = pool.alloc_for(SectorRange::new(0, 1)).expect("a buffer");
                    return Ok(Done::Read(less));
                }
                let (from, bytes) = (offset as usize, buf.len());
                buf.copy_from_slice(&self.now[from..from + bytes]);
                if breach == Breach::Changes {
                    buf[0] = self.reads;
                }
                Ok(Done::Read(buf))
            }
            Ask::Write { offset, data } => {
                self.writes += 1;
                if breach == Breach::IsFencedForAMoment && self.writes == 2 {
                    return Err(IoError::Fenced);
                }
                let mut at = offset as usize;
                for buf in data {
                    if breach != Breach::KeepsTheOld || self.writes == 1 {
                        self.now[at..at + buf.len()].copy_from_slice(&buf);
                    }
                    at += buf.len();
                }
                if breach == Breach::WritesTooMuch {
                    self.now[at] = 0xff;
                }
                if !self.is_atomic || breach == Breach::KeepsTooMuch {
                    self.kept.clone_from(&self.now);
                }
                Ok(Done::Written)
            }
            Ask::Zero { offset, bytes, .. } => {
                self.now[offset as usize..(offset + bytes) as usize].fill(0);
                Ok(Done::Written)
            }
            Ask::Flush => {
                self.kept.clone_from(&self.now);
                match breach {
                    Breach::ForgetsAFlush => self.kept.fill(0),
                    Breach::EndsInSomethingElse => return Ok(Done::Extents(Vec::new())),
                    _ => {}
                }
                Ok(Done::Written)
            }
            Ask::Extents { range } => Ok(Done::Extents(self.extents(range))),
            Ask::Resize { bytes } => {
                let added = u8::from(breach == Breach::GrowsWithData);
                self.now.resize(bytes as usize, added);
                Ok(Done::Written)
            }
            Ask::Snapshot(_) => Ok(Done::Written),
        }
    }

    fn extents(&self, range: SectorRange) -> Vec<Extent> {
        let (range, state) = match self.breach {
            Breach::TellsNothing => return Vec::new(),
            Breach::LeavesAGap => {
                let range = SectorRange::between(range.start + 1, range.end());
                (range, ExtentState::Data)
            }
            Breach::TellsTooMuch => {
                let range = SectorRange::between(range.start, range.end() + 1);
                (range, ExtentState::Data)
            }
            Breach::HolesOverData => (range, ExtentState::Hole),
            _ => (range, ExtentState::Data),
        };
        vec![Extent { range, state }]
    }
}

impl Backend for Memory {
    fn submit(&mut self, _now: Nanos, operation: Operation, _port: &mut Port<'_>) {
        self.waiting.push_back(operation);
    }

    fn completed(&mut self, _: Nanos, _: Token, outcome: Outcome, _: &mut Port<'_>) {
        unreachable!("it starts nothing that ends in {outcome:?}");
    }

    fn poll(&mut self, _now: Nanos, port: &mut Port<'_>) {
        if let Some(Operation { token, ask }) = self.waiting.pop_front() {
            let result = self.perform(ask);
            port.end(token, result);
            if self.breach == Breach::EndsTwice {
                port.end(token, Ok(Done::Written));
            }
        }
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        (!self.waiting.is_empty()).then_some(Nanos(0))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            atomic_flush: self.is_atomic,
            snapshots: true,
            ..Capabilities::default()
        }
    }
}

fn bench(breach: Breach) -> Bench {
    let memory = Memory::new(breach, false, vec![0; BYTES as usize]);
    Bench::over(Stack::new(Box::new(memory), BYTES))
}

fn write(bench: &Bench, offset: u64, content: u8) -> Ask {
    let data = vec![bench.buf(offset, &[content; 4096])];
    Ask::Write { offset, data }
}

/// Everything that an honest backend may be asked for.
fn use_it(bench: &mut Bench) {
    bench.read_all();
    for content in 1..=3 {
        bench.write(4096, &[content; 4096]).unwrap();
        bench.ask(Ask::Flush).unwrap();
        bench.read_all();
    }
    // Nobody knows which of these comes last, but one of them does, and stays.
    let ids = [4, 5].map(|content| {
        let ask = write(bench, 8192, content);
        bench.start(ask)
    });
    for id in ids {
        bench.end(id).unwrap();
    }
    bench.read_all();
    bench.read_all();
    let (offset, bytes, unmap) = (4096, SECTOR_BYTES as u64, true);
    let zero = Ask::Zero {
        offset,
        bytes,
        unmap,
    };
    bench.ask(zero).unwrap();
    bench.extents(SectorRange::new(0, BYTES / SECTOR_BYTES as u64));
    for bytes in [BYTES / 2, BYTES] {
        bench.ask(Ask::Resize { bytes }).unwrap();
        bench.stack.resized(bytes);
    }
    bench.read_all();
}

/// What it panics with.
fn breach_of(tried: impl FnOnce()) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(tried)) else {
        return "nothing was noticed".to_owned();
    };
    let words = panic.downcast_ref::<String>().cloned();
    words.unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap_or(&"").to_string())
}

#[test]
fn honest_backend_keeps_every_rule() {
    use_it(&mut bench(Breach::None));
}

#[test]
fn backend_that_breaks_a_rule_is_caught() {
    for (breach, rule) in [
        (Breach::EndsTwice, "rule 1"),
        (Breach::EndsInSomethingElse, "rule 1"),
        (Breach::ReadsLess, "rule 1"),
        (Breach::KeepsTheOld, "rule 2"),
        (Breach::WritesTooMuch, "rule 2"),
        (Breach::GrowsWithData, "rule 2"),
        (Breach::LeavesAGap, "rule 4"),
        (Breach::TellsTooMuch, "rule 4"),
        (Breach::TellsNothing, "rule 4"),
        (Breach::HolesOverData, "rule 4"),
        (Breach::Changes, "rule 2"),
    ] {
        let said = breach_of(|| use_it(&mut bench(breach)));
        assert!(said.starts_with(rule), "{breach:?}: {said}");
    }
}

#[test]
fn backend_that_is_fenced_for_a_moment_is_caught() {
    let said = breach_of(|| {
        let mut bench = bench(Breach::IsFencedForAMoment);
        bench.write(0, &[1; 4096]).unwrap();
        assert_eq!(bench.write(0, &[2; 4096]), Err(IoError::Fenced));
        let _ = bench.read(0, 4096);
    });
    assert!(said.starts_with("rule 7"), "{said}");
}

#[test]
fn next_opening_that_finds_something_else_is_caught() {
    for (breach, is_atomic, expected) in [
        (Breach::None, false, "nothing was noticed"),
        (Breach::None, true, "nothing was noticed"),
        (Breach::ForgetsAFlush, false, "rule 2"),
        (Breach::ForgetsAFlush, true, "rule 2"),
        (Breach::KeepsTooMuch, true, "rule 2"),
    ] {
        let said = breach_of(|| {
            let memory = Memory::new(breach, is_atomic, vec![0; BYTES as usize]);
            let mut bench = Bench::over(Stack::new(Box::new(memory), BYTES));
            let mut kept = vec![0; BYTES as usize];
            bench.read_all();
            bench.write(0, &[1; 8192]).unwrap();
            bench.ask(Ask::Flush).unwrap();
            bench.write(4096, &[2; 4096]).unwrap();
            // What `Memory` has kept: it is gone with the bench.
            let is_kept = breach != Breach::ForgetsAFlush;
            kept[..8192].fill(u8::from(is_kept));
            if !is_atomic || breach == Breach::KeepsTooMuch {
                kept[4096..8192].fill(2);
            }
            let next = Memory::new(Breach::None, is_atomic, kept);
            let next = Stack::new(Box::new(next), BYTES);
            Bench::after(bench.close(), next).read_all();
        });
        assert!(said.starts_with(expected), "{breach:?} {is_atomic}: {said}");
    }
}

#[test]
fn what_was_not_flushed_may_be_there_or_not() {
    for content in [1, 2] {
        let mut bench = bench(Breach::None);
        bench.write(0, &[1; 4096]).unwrap();
        bench.ask(Ask::Flush).unwrap();
        bench.write(0, &[2; 4096]).unwrap();
        let mut kept = vec![0; BYTES as usize];
        kept[..4096].fill(content);
        let next = Memory::new(Breach::None, false, kept);
        let next = Stack::new(Box::new(next), BYTES);
        Bench::after(bench.close(), next).read_all();
    }
}

#[test]
fn snapshot_beside_something_else_is_caught() {
    let snapshot = || {
        Ask::Snapshot(SnapshotCommand::Snapshot {
            name: SnapshotName::new("one").expect("a name"),
            made_ms: 1,
            copy: false,
        })
    };
    let before = breach_of(|| {
        let mut bench = bench(Breach::None);
        let ask = write(&bench, 0, 1);
        bench.start(ask);
        bench.start(snapshot());
    });
    assert!(before.starts_with("rule 10"), "{before}");
    let after = breach_of(|| {
        let mut bench = bench(Breach::None);
        bench.start(snapshot());
        let ask = write(&bench, 0, 1);
        bench.start(ask);
    });
    assert!(after.starts_with("rule 10"), "{after}");
    let mut bench = bench(Breach::None);
    let id = bench.start(snapshot());
    bench.read(0, 4096).unwrap();
    bench.end(id).unwrap();
    bench.write(0, &[1; 4096]).unwrap();
}
