//! The end of a shard: its connections, its volumes, its cache, in this order. The shard that keeps the cache's SSD tier
//! closes it after all others have ended.
//!
//! ```text
//!  Connections ──► Volumes ──► Others ──► Cache ──► ended
//!                   ▲   │ └──────┴──────────────────► ended without volumes that hang
//!                   └───┘ asked again
//! ```
//!
//! | state | waits for | leaves with |
//! |---|---|---|
//! | Connections | every client has its last answers, or has had [`STOP_PATIENCE`] | [`Act::CloseVolumes`] |
//! | Volumes | every volume is closed | |
//! | | or, without destage, [`CLOSE_PATIENCE`] beyond what the logs' devices may take | [`Act::End`] with [`Hung`] |
//! | Others | the other shards have ended, if this one keeps the cache | [`Act::CloseCache`] |
//! | | or one of them has given up volumes | [`Act::End`] with [`Hung`] |
//! | Cache | the cache is closed | [`Act::End`] |
//!
//! Invariants:
//! 1. The cache closes after the volumes, those of other shards included: what a volume still fills or forgets is in what
//!    the cache writes last, and a cache that is whole says nothing that a log contradicts. So it stays open where a volume
//!    of any shard was given up.
//! 2. A node that is to destage never gives up a volume by itself; whoever asks again without destage makes it.
//! 3. A node that gives up a volume has ended as by a crash: the log has everything that was acknowledged as durable.
//!
//! Failure: a cache whose device does not answer counts as closed; so does one that was given up.

use crate::base::io::Nanos;

/// Time that connections get to take their last answers.
pub const STOP_PATIENCE: Nanos = Nanos::from_millis(5_000);
/// Time that volumes get to close without destage, beyond what the devices of their logs may take: much longer than a
/// log needs, so what is left waits for a backend that hangs.
pub const CLOSE_PATIENCE: Nanos = Nanos::from_millis(5_000);

/// How long a stop waits at most for the device of a write log that does not answer, whatever it may take otherwise.
pub const LOG_PATIENCE_MAX: Nanos = Nanos::from_millis(30_000);

/// What a stop looks at.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Connections that are left.
    pub connections: usize,
    /// Volumes that are not closed.
    pub volumes: usize,
    /// How long the device of a log may take for an answer.
    pub log_patience: Nanos,
    /// What the shards have come to whose volumes use the cache that this one closes.
    pub others: Others,
    /// Whether the cache is closed, or its device given up.
    pub is_cache_closed: bool,
}

/// How far the other shards are, for the one that closes the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// Some still run.
    Open,
    /// All have ended with everything closed, or there are none to wait for.
    Closed,
    /// All have ended, and some without volumes that hang.
    Hung,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Break off the connections that are left.
    Abort,
    /// Close every volume, after destaging everything or not.
    CloseVolumes {
        /// Whether to destage.
        destage: bool,
    },
    /// Close the cache.
    CloseCache,
    /// The node may end.
    End(Result<(), Hung>),
}

/// Some volumes did not close in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hung;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Until when they may take their answers.
    Connections(Nanos),
    /// Those that are left were broken off.
    Aborted,
    /// When those that are left are given up.
    Volumes(Option<Nanos>),
    Others,
    Cache,
    Ended,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Stop {
    state: State,
    destage: bool,
}

impl Stop {
    /// Begin.
    pub const fn begin(now: Nanos, destage: bool) -> Self {
        Self {
            state: State::Connections(now.plus(STOP_PATIENCE)),
            destage,
        }
    }

    /// Somebody asks again, who may be content with less: nobody should have to wait for a dead backend for ever.
    pub fn asked_again(&mut self, now: Nanos, destage: bool) {
        self.destage &= destage;
        if matches!(self.state, State::Volumes(_)) {
            // Nobody is connected any more, and the volumes are told.
            self.state = State::Connections(now);
        }
    }

    /// When to look again, if nothing else happens.
    pub const fn next_wakeup(&self) -> Option<Nanos> {
        match self.state {
            State::Connections(at) => Some(at),
            State::Volumes(at) => at,
            State::Aborted | State::Others | State::Cache | State::Ended => None,
        }
    }

    /// What is to be done next, if anything; asked until there is nothing.
    pub fn next(&mut self, now: Nanos, view: &View) -> Option<Act> {
        match self.state {
            State::Connections(deadline) if view.connections > 0 => {
                if deadline > now {
                    return None;
                }
                // The volumes do not wait for what they still have in flight.
                self.state = State::Aborted;
                Some(Act::Abort)
            }
            State::Connections(_) | State::Aborted => {
                let patience = view.log_patience.min(LOG_PATIENCE_MAX).plus(CLOSE_PATIENCE);
                let give_up = (!self.destage).then(|| now.plus(patience));
                self.state = State::Volumes(give_up);
                let destage = self.destage;
                Some(Act::CloseVolumes { destage })
            }
            State::Volumes(_) if view.volumes == 0 => {
                self.state = State::Others;
                self.next(now, view)
            }
            State::Volumes(Some(give_up)) if give_up <= now => Some(self.end(Err(Hung))),
            State::Others => match view.others {
                Others::Open => None,
                Others::Hung => Some(self.end(Err(Hung))),
                Others::Closed => {
                    self.state = State::Cache;
                    Some(Act::CloseCache)
                }
            },
            State::Cache if view.is_cache_closed => Some(self.end(Ok(()))),
            State::Volumes(_) | State::Cache | State::Ended => None,
        }
    }

    fn end(&mut self, result: Result<(), Hung>) -> Act {
        self.state = State::Ended;
        Act::End(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = Nanos(7);

    fn view(connections: usize, volumes: usize) -> View {
        View {
            connections,
            volumes,
            log_patience: Nanos::from_millis(1_000),
            others: Others::Closed,
            is_cache_closed: false,
        }
    }

    #[test]
    fn stop_closes_connections_then_volumes_then_the_cache() {
        let mut stop = Stop::begin(START, true);
        assert_eq!(stop.next(START, &view(1, 2)), None);
        let closing = Some(Act::CloseVolumes { destage: true });
        assert_eq!(stop.next(START, &view(0, 2)), closing);
        assert_eq!(stop.next_wakeup(), None, "it waits for the destage");
        let late = START.plus(Nanos::from_millis(1_000_000));
        assert_eq!(stop.next(late, &view(0, 1)), None);
        assert_eq!(stop.next(late, &view(0, 0)), Some(Act::CloseCache));
        assert_eq!(stop.next(late, &view(0, 0)), None);
        let closed = View {
            is_cache_closed: true,
            ..view(0, 0)
        };
        assert_eq!(stop.next(late, &closed), Some(Act::End(Ok(()))));
        assert_eq!(stop.next(late, &closed), None);
    }

    #[test]
    fn stop_breaks_off_clients_that_take_no_answers_once() {
        let mut stop = Stop::begin(START, true);
        let late = START.plus(STOP_PATIENCE);
        assert_eq!(stop.next_wakeup(), Some(late));
        assert_eq!(stop.next(late, &view(1, 1)), Some(Act::Abort));
        let closing = Some(Act::CloseVolumes { destage: true });
        assert_eq!(stop.next(late, &view(1, 1)), closing);
    }

    #[test]
    fn stop_without_destage_gives_up_what_hangs() {
        let mut stop = Stop::begin(START, false);
        let closing = Some(Act::CloseVolumes { destage: false });
        assert_eq!(stop.next(START, &view(0, 1)), closing);
        let over = START.plus(Nanos::from_millis(1_000)).plus(CLOSE_PATIENCE);
        assert_eq!(stop.next_wakeup(), Some(over));
        assert_eq!(stop.next(Nanos(over.0 - 1), &view(0, 1)), None);
        assert_eq!(stop.next(over, &view(0, 1)), Some(Act::End(Err(Hung))));
        assert_eq!(stop.next(over, &view(0, 0)), None);
    }

    #[test]
    fn stop_closes_the_cache_once_the_other_shards_have_ended() {
        let with = |volumes, others| View {
            others,
            ..view(0, volumes)
        };
        let mut stop = Stop::begin(START, false);
        stop.next(START, &with(1, Others::Open)).unwrap();
        let late = START.plus(Nanos::from_millis(1_000_000));
        assert_eq!(stop.next(START, &with(0, Others::Open)), None);
        assert_eq!(
            stop.next(late, &with(0, Others::Open)),
            None,
            "they bound it"
        );
        stop.asked_again(late, false);
        let mut other = stop;
        let closed = stop.next(late, &with(0, Others::Closed));
        assert_eq!(closed, Some(Act::CloseCache));
        let hung = other.next(late, &with(0, Others::Hung));
        assert_eq!(hung, Some(Act::End(Err(Hung))), "the cache stays open");
    }

    #[test]
    fn stop_that_is_asked_again_without_destage_tells_the_volumes() {
        let mut stop = Stop::begin(START, true);
        stop.next(START, &view(0, 1)).unwrap();
        stop.asked_again(START, true);
        let closing = |destage| Some(Act::CloseVolumes { destage });
        assert_eq!(stop.next(START, &view(0, 1)), closing(true));
        stop.asked_again(START, false);
        assert_eq!(stop.next(START, &view(0, 1)), closing(false));
        assert!(stop.next_wakeup().is_some());
        stop.asked_again(START, true);
        assert_eq!(stop.next(START, &view(0, 1)), closing(false), "it stays so");
    }
}
