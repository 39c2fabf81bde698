//! The tier's device: what is under way on it, and how well it answers.
//!
//! Invariants:
//! 1. A token names one operation, and is never given again, not after a readmission either: whoever reads a trace can
//!    tell them apart.
//! 2. Operations end in any order; the oldest one says when the device has been silent for too long.
//! 3. Reads and writes are judged apart: a device that takes no more writes may read well for long.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::evict::Kept;
use crate::base::buf::{Buf, Pool};
use crate::base::io::{Action, Nanos, Token};
use crate::base::limits::CACHE_ERRORS_IN_ROW_MAX;

/// What an operation is for.
#[derive(Debug)]
pub enum Op {
    Superblock,
    Footer(usize),
    Journal,
    Control,
    Segment(usize),
    Compare,
    Keep(Kept),
}

impl Op {
    pub fn is_write(&self) -> bool {
        matches!(self, Self::Control | Self::Segment(_))
    }
}

/// See the module.
#[derive(Debug)]
pub struct Device {
    pool: Arc<Pool>,
    /// What is under way and since when; the oldest first.
    ops: BTreeMap<u64, (Nanos, Op)>,
    next_token: u64,
    now: Nanos,
    answer_max: Nanos,
    read_errors_in_row: u32,
    write_errors_in_row: u32,
    /// Whether a read had no memory since [`Self::begin_drive`].
    is_starved: bool,
}

impl Device {
    /// A device whose operations may take so long. What is read goes to buffers of the pool.
    pub fn new(pool: Arc<Pool>, answer_max: Nanos, now: Nanos) -> Self {
        Self {
            pool,
            ops: BTreeMap::new(),
            next_token: 0,
            now,
            answer_max,
            read_errors_in_row: 0,
            write_errors_in_row: 0,
            is_starved: false,
        }
    }

    /// Another one in its place, or the same that is given another chance.
    pub fn renewed(&self) -> Self {
        Self {
            next_token: self.next_token,
            ..Self::new(Arc::clone(&self.pool), self.answer_max, self.now)
        }
    }

    pub fn answer_max(&self) -> Nanos {
        self.answer_max
    }

    /// Time goes on; whether the oldest operation has taken too long.
    pub fn advance(&mut self, now: Nanos) -> bool {
        self.now = self.now.max(now);
        self.deadline().is_some_and(|deadline| deadline <= self.now)
    }

    /// When the oldest operation will have taken too long.
    pub fn deadline(&self) -> Option<Nanos> {
        let (_, (since, _)) = self.ops.first_key_value()?;
        Some(since.plus(self.answer_max))
    }

    /// What had no memory is tried again.
    pub fn begin_drive(&mut self) {
        self.is_starved = false;
    }

    /// Whether something waits for memory.
    pub fn is_starved(&self) -> bool {
        self.is_starved
    }

    /// How many operations are under way.
    pub fn under_way(&self) -> usize {
        self.ops.len()
    }

    fn begin(&mut self, op: Op) -> Token {
        self.next_token += 1;
        self.ops.insert(self.next_token, (self.now, op));
        Token(self.next_token)
    }

    /// Read so many bytes; `None` if there is no memory for them, until the tier is driven again.
    pub fn read(
        &mut self,
        op: Op,
        offset: u64,
        bytes: usize,
        actions: &mut Vec<Action>,
    ) -> Option<Token> {
        let Some(buf) = self.pool.alloc(bytes) else {
            self.is_starved = true;
            return None;
        };
        let token = self.begin(op);
        actions.push(Action::CacheRead { token, offset, buf });
        Some(token)
    }

    /// Write what lies in these buffers, one behind the other.
    pub fn write(
        &mut self,
        op: Op,
        offset: u64,
        data: Vec<Buf>,
        durable: bool,
        actions: &mut Vec<Action>,
    ) {
        let token = self.begin(op);
        actions.push(Action::CacheWrite {
            token,
            offset,
            data,
            durable,
        });
    }

    /// An operation has ended: which.
    pub fn end(&mut self, token: Token) -> Option<Op> {
        self.ops.remove(&token.0).map(|(_, op)| op)
    }

    /// A read or a write was good or not; whether too many of its kind in a row were not.
    pub fn judge(&mut self, is_write: bool, ok: bool) -> bool {
        let in_row = if is_write {
            &mut self.write_errors_in_row
        } else {
            &mut self.read_errors_in_row
        };
        *in_row = if ok { 0 } else { *in_row + 1 };
        *in_row >= CACHE_ERRORS_IN_ROW_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER_MAX: Nanos = Nanos(100);

    fn device() -> Device {
        Device::new(Pool::new(1 << 20), ANSWER_MAX, Nanos(0))
    }

    #[test]
    fn device_is_silent_once_its_oldest_operation_is_late() {
        let (mut device, mut actions) = (device(), Vec::new());
        assert!(!device.advance(Nanos(1_000)) && device.deadline().is_none());
        device.write(Op::Control, 0, Vec::new(), true, &mut actions);
        assert!(!device.advance(Nanos(1_050)));
        device.write(Op::Segment(0), 0, Vec::new(), false, &mut actions);
        assert!(!device.advance(Nanos(1_099)) && device.advance(Nanos(1_100)));
        let [Action::CacheWrite { token: first, .. }, ..] = actions[..] else {
            panic!("{actions:?}");
        };
        assert!(matches!(device.end(first), Some(Op::Control)));
        assert!(device.end(first).is_none(), "it has ended");
        assert_eq!(device.deadline(), Some(Nanos(1_150)));
    }

    #[test]
    fn device_judges_reads_and_writes_apart() {
        let mut device = device();
        for _ in 1..CACHE_ERRORS_IN_ROW_MAX {
            assert!(!device.judge(true, false) && !device.judge(false, false));
        }
        assert!(!device.judge(false, true) && device.judge(true, false));
        assert!(!device.judge(false, false), "the read between was good");
        assert!(!device.renewed().judge(true, false));
    }
}
