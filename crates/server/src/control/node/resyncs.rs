//! How fast copies are brought up, from what is seen of them now and then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdcs_api::groups::{GroupOther, GroupOtherState, Resync};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::replication::Member;
use hdcs_core::replication::group::{OtherCopy, Stage};
use hdcs_core::replication::participant::Status;

/// Between two looks of which a pace is made.
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    durable: u64,
    blocks_s: f64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Resyncs(BTreeMap<Member, Seen>);

impl Resyncs {
    /// This is what is seen now.
    pub fn look(&mut self, now: Instant, status: &Status) {
        let streams = |other: &&OtherCopy| other.stage == Stage::Streams;
        let joiners: BTreeMap<Member, u64> = (status.others.iter().filter(streams))
            .map(|other| (other.member, other.durable))
            .collect();
        self.0.retain(|member, _| joiners.contains_key(member));
        for (member, durable) in joiners {
            let seen = self.0.entry(member).or_insert(Seen {
                at: now,
                durable,
                blocks_s: 0.0,
            });
            let elapsed = now.duration_since(seen.at);
            if elapsed < PERIOD {
                continue;
            }
            let pace = durable.saturating_sub(seen.durable) as f64 / elapsed.as_secs_f64();
            // The first pace is the pace; later ones are smoothed.
            let blocks_s = if seen.blocks_s > 0.0 {
                f64::midpoint(seen.blocks_s, pace)
            } else {
                pace
            };
            *seen = Seen {
                at: now,
                durable,
                blocks_s,
            };
        }
    }

    /// What is said of another node, which may have said itself that it has no copy that it can use.
    pub fn other(
        &self,
        status: &Status,
        node: String,
        of: &OtherCopy,
        is_without: bool,
    ) -> GroupOther {
        let &OtherCopy {
            member,
            stage,
            durable,
        } = of;
        let is_joining = matches!(stage, Stage::Streams | Stage::ReadsBack | Stage::Whole);
        GroupOther {
            node,
            state: match state(stage) {
                GroupOtherState::Away if is_without => GroupOtherState::NoCopy,
                state => state,
            },
            durable_blocks: durable,
            behind_bytes: lacks(status, durable) * BLOCK_BYTES as u64,
            resync: is_joining.then(|| self.resync(status, member, durable)),
        }
    }

    fn resync(&self, status: &Status, member: Member, durable: u64) -> Resync {
        let blocks_s = self.0.get(&member).map_or(0.0, |seen| seen.blocks_s);
        let length = status.head.saturating_sub(status.tail).max(1);
        let left = lacks(status, durable);
        Resync {
            percent: ((length - left) * 100 / length) as u8,
            bytes_left: left * BLOCK_BYTES as u64,
            bytes_per_second: (blocks_s * BLOCK_BYTES as f64) as u64,
            seconds_left: (blocks_s >= 1.0).then(|| (left as f64 / blocks_s).ceil() as u64),
        }
    }
}

/// What a copy lacks of the log that ends at `durable`, in blocks: never more than is in the log.
fn lacks(status: &Status, durable: u64) -> u64 {
    status.head.saturating_sub(durable.max(status.tail))
}

const fn state(stage: Stage) -> GroupOtherState {
    match stage {
        Stage::Away => GroupOtherState::Away,
        Stage::Attaches => GroupOtherState::Attaching,
        Stage::InStep => GroupOtherState::InStep,
        Stage::Begins | Stage::Streams => GroupOtherState::Joining,
        Stage::ReadsBack | Stage::Whole => GroupOtherState::ReadingBack,
        Stage::Blocked => GroupOtherState::Blocked,
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::replication::participant::Role;

    use super::*;

    #[test]
    fn pace_and_what_is_left_are_those_of_late() {
        let (member, began) = (Member(2), Instant::now());
        let status = |durable| Status {
            role: Role::Serves,
            head: 3_000,
            durable: 3_000,
            tail: 1_000,
            committed: Some(3_000),
            promised: 1,
            is_whole: true,
            may_heal: false,
            missing: Vec::new(),
            joined: 1,
            links: vec![member],
            others: vec![OtherCopy {
                member,
                stage: Stage::Streams,
                durable,
            }],
        };
        let mut resyncs = Resyncs::default();
        resyncs.look(began, &status(1_000));
        let resync = |resyncs: &Resyncs, durable| {
            let status = status(durable);
            resyncs
                .other(&status, "b".to_owned(), &status.others[0], false)
                .resync
                .unwrap()
        };
        assert_eq!(resync(&resyncs, 1_000).seconds_left, None);
        resyncs.look(began + PERIOD / 2, &status(1_200));
        resyncs.look(began + PERIOD, &status(1_500));
        assert_eq!(
            resync(&resyncs, 1_500),
            Resync {
                percent: 25,
                bytes_left: 1_500 * 4096,
                bytes_per_second: 500 * 4096,
                seconds_left: Some(3),
            }
        );
        resyncs.look(began + PERIOD * 2, &status(2_500));
        assert_eq!(resync(&resyncs, 2_500).bytes_per_second, 750 * 4096);
        let away = resyncs.other(&status(0), "b".to_owned(), &status(0).others[0], false);
        assert_eq!(away.behind_bytes, 2_000 * 4096, "no more than there is");
        let member_now = Status {
            others: vec![OtherCopy {
                member,
                stage: Stage::InStep,
                durable: 3_000,
            }],
            ..status(3_000)
        };
        resyncs.look(began + PERIOD * 3, &member_now);
        let shown = resyncs.other(&member_now, "b".to_owned(), &member_now.others[0], true);
        assert_eq!((shown.state, shown.resync), (GroupOtherState::InStep, None));
    }
}
