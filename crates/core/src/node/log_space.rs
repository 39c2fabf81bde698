//! Who has the space of a file system on which several write logs lie.
//!
//! ```text
//!            free space
//!  reserve ▲      2 · reserve ▲
//!  ────────┼──────────────────┼──────────────────────────
//!   a quiet │ a quiet log gives back only    │ a log that fills up
//!   log     │ if another one fills up and    │ is given a piece more,
//!   gives   │ finds no space                 │ if so much stays free
//!   back    │                                │
//! ```
//!
//! Logs are given more piece by piece, where they fill up; so space goes where it is used. One that has been empty for a
//! while gives back all but the least when there is too little.
//!
//! Invariants:
//! 1. What logs are given never brings free space below twice the reserve, and only below the reserve is anything given
//!    back for its own sake: growth and giving back cannot follow from each other.
//! 2. Nor does a log grow into what backends on the file system may need: what is in a log has to get there, and a log
//!    gives nothing back before it is empty.
//! 3. A log that has given back was quiet for [`QUIET`], and one that gets more is filled beyond [`FULL_PERCENT`].
//!
//! It decides one step; whoever takes it looks anew before the next.

use crate::base::io::Nanos;
use crate::base::limits::LOG_BYTES_MIN;

/// A log is given so much at a time.
pub const PIECE_BYTES: u64 = 32 << 20;
/// Less than this is not worth it.
const PIECE_BYTES_LEAST: u64 = 4 << 20;
/// Pieces end at a multiple of this, so that no unit that a device may damage lies in two.
const UNIT_BYTES: u64 = 1 << 20;
/// A log is given more from here on: before destage is hurried for its sake.
pub const FULL_PERCENT: u64 = 40;
/// A log has to have been empty for so long before it gives anything back.
pub const QUIET: Nanos = Nanos::from_millis(10_000);
/// The reserve is this part of the file system, as a divisor, within these bounds.
const RESERVE_DIVISOR: u64 = 32;
const RESERVE_BYTES_MIN: u64 = 16 << 20;
const RESERVE_BYTES_MAX: u64 = 4 << 30;

/// A file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that it has in all.
    pub total: u64,
    /// Bytes that may still be taken.
    pub free: u64,
    /// Bytes that the backends of the logs' volumes may still take of them.
    pub owed: u64,
}

/// A log on it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogView {
    /// Its size.
    pub all: u64,
    /// What is prepared of it.
    pub prepared: u64,
    /// What is in use of that.
    pub used: u64,
    /// Whether it may be asked for what it does not need.
    pub is_shared: bool,
    /// For how long it has been empty.
    pub quiet: Nanos,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Prepare this log up to so many bytes.
    Prepare {
        /// Its place among the logs.
        log: usize,
        /// From its beginning on.
        bytes: u64,
    },
    /// Have this log give back all but so many bytes.
    GiveBack {
        /// Its place among the logs.
        log: usize,
        /// From its beginning on.
        bytes: u64,
    },
}

impl LogView {
    /// Whether it fills up, and could have more.
    pub fn wants_more(&self) -> bool {
        self.prepared < self.all && self.used * 100 > self.prepared * FULL_PERCENT
    }

    /// Whether it has something that others could use better.
    fn can_give(&self) -> bool {
        self.is_shared && self.used == 0 && self.prepared > LOG_BYTES_MIN && self.quiet >= QUIET
    }
}

/// What is kept free of a file system.
fn reserve(total: u64) -> u64 {
    (total / RESERVE_DIVISOR).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX)
}

/// The next step for the logs of one file system, if there is one to take.
pub fn next_act(space: Space, logs: &[LogView]) -> Option<Act> {
    let reserve = reserve(space.total);
    let wanting = logs.iter().enumerate().filter(|(_, log)| log.wants_more());
    // The fullest one first.
    let fullest = wanting
        .max_by_key(|(_, log)| u128::from(log.used) * 1_000_000 / u128::from(log.prepared.max(1)));
    let kept = space.owed.saturating_add(2 * reserve);
    let usable = space.free.saturating_sub(kept);
    if let Some((index, log)) = fullest {
        let piece = PIECE_BYTES.min(log.all - log.prepared).min(usable);
        let end = log.prepared + piece;
        let end = if end < log.all {
            end / UNIT_BYTES * UNIT_BYTES
        } else {
            end
        };
        let is_worth_it = end == log.all || end >= log.prepared + PIECE_BYTES_LEAST;
        if end > log.prepared && is_worth_it {
            return Some(Act::Prepare {
                log: index,
                bytes: end,
            });
        }
    }
    let giving = logs.iter().enumerate().filter(|(_, log)| log.can_give());
    let given: u64 = giving
        .clone()
        .map(|(_, log)| log.prepared - LOG_BYTES_MIN)
        .sum();
    let would_help =
        fullest.is_some() && space.free + given >= kept.saturating_add(PIECE_BYTES_LEAST);
    if space.free >= reserve && !would_help {
        return None;
    }
    let (index, _) = giving.max_by_key(|(_, log)| log.prepared)?;
    Some(Act::GiveBack {
        log: index,
        bytes: LOG_BYTES_MIN,
    })
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn log(all: u64, prepared: u64, used: u64) -> LogView {
        LogView {
            all: all * MIB,
            prepared: prepared * MIB,
            used: used * MIB,
            is_shared: true,
            quiet: if used == 0 { QUIET } else { Nanos(0) },
        }
    }

    fn space(total: u64, free: u64) -> Space {
        Space {
            total: total * MIB,
            free: free * MIB,
            owed: 0,
        }
    }

    fn owing(total: u64, free: u64, owed: u64) -> Space {
        Space {
            owed: owed * MIB,
            ..space(total, free)
        }
    }

    fn prepare(log: usize, mib: u64) -> Act {
        let bytes = mib * MIB;
        Act::Prepare { log, bytes }
    }

    #[test]
    fn log_that_fills_up_is_given_a_piece_while_there_is_space() {
        let logs = [log(512, 16, 6), log(512, 64, 40)];
        assert_eq!(next_act(space(1024, 900), &logs), Some(prepare(1, 96)));
        // Not below twice the reserve, which is 32 MiB here.
        assert_eq!(next_act(space(1024, 84), &logs), Some(prepare(1, 84)));
        assert_eq!(next_act(space(1024, 67), &logs), None);
        assert_eq!(next_act(space(1024, 900), &[log(512, 16, 5)]), None);
        // One that has nothing yet is the fullest.
        let none = [log(512, 64, 60), log(512, 0, 1)];
        assert_eq!(next_act(space(1024, 900), &none), Some(prepare(1, 32)));
        // The end of a log may be anywhere.
        let mut short = log(512, 510, 400);
        short.all -= 4096;
        let bytes = short.all;
        assert_eq!(
            next_act(space(1024, 900), &[short]),
            Some(Act::Prepare { log: 0, bytes })
        );
    }

    #[test]
    fn quiet_log_gives_back_below_the_reserve_or_where_another_one_lacks_space() {
        let back = |log| {
            let bytes = LOG_BYTES_MIN;
            Some(Act::GiveBack { log, bytes })
        };
        let quiet = [
            log(512, 16, 0),
            log(512, 64, 0),
            log(512, 80, 1),
            log(512, 70, 0),
        ];
        assert_eq!(next_act(space(1024, 32), &quiet), None);
        assert_eq!(next_act(space(1024, 31), &quiet), back(3));
        let lacking = [log(512, 70, 0), log(512, 16, 16)];
        assert_eq!(next_act(space(1024, 66), &lacking), back(0));
        let mut fixed = lacking;
        fixed[0].is_shared = false;
        assert_eq!(next_act(space(1024, 10), &fixed), None);
        let mut fresh = lacking;
        fresh[0].quiet = Nanos(QUIET.0 - 1);
        assert_eq!(next_act(space(1024, 10), &fresh), None);
    }

    #[test]
    fn logs_leave_what_backends_may_need() {
        let logs = [log(512, 16, 16), log(512, 70, 0)];
        assert_eq!(
            next_act(owing(1024, 500, 400), &logs),
            Some(prepare(0, 48)),
            "36 MiB are nobody's"
        );
        let back = Some(Act::GiveBack {
            log: 1,
            bytes: LOG_BYTES_MIN,
        });
        assert_eq!(next_act(owing(1024, 500, 434), &logs), back);
        // That would help nobody.
        assert_eq!(next_act(owing(1024, 500, 600), &logs), None);
        assert_eq!(next_act(owing(1024, 500, u64::MAX >> 20), &logs), None);
        assert_eq!(next_act(owing(1024, 31, 600), &logs), back);
    }

    /// Whatever logs do, steps end: none is taken that a later one takes back while nothing else happens.
    #[test]
    fn steps_come_to_rest() {
        for seed in 0..500 {
            let mut random = fastrand::Rng::with_seed(seed);
            let total = random.u64(64..4096);
            let mut logs: Vec<LogView> = (0..random.usize(1..12))
                .map(|_| {
                    let all = random.u64(16..1024);
                    let prepared = random.u64(16..=all);
                    let used = if random.bool() {
                        0
                    } else {
                        random.u64(..=prepared)
                    };
                    log(all, prepared, used)
                })
                .collect();
            let mut free = random.u64(..=total);
            let owed = if random.bool() {
                0
            } else {
                random.u64(..=total)
            };
            let mut given_back = Vec::new();
            for step in 0.. {
                assert!(step < 2000, "seed {seed}: it goes on for ever");
                let Some(act) = next_act(owing(total, free, owed), &logs) else {
                    break;
                };
                match act {
                    Act::Prepare { log, bytes } => {
                        assert!(!given_back.contains(&log), "seed {seed}: it swings");
                        let more = (bytes - logs[log].prepared) / MIB;
                        assert!(more > 0 && more <= PIECE_BYTES / MIB && bytes <= logs[log].all);
                        free -= more;
                        let reserve = (total / 32).clamp(16, 4096);
                        assert!(free >= owed + 2 * reserve, "seed {seed}");
                        logs[log].prepared = bytes;
                    }
                    Act::GiveBack { log, bytes } => {
                        free += (logs[log].prepared - bytes) / MIB;
                        logs[log].prepared = bytes;
                        given_back.push(log);
                    }
                }
            }
        }
    }
}
