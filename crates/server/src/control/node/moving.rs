//! Moving a volume to another thread of the data path, while its clients go on.
//!
//! ```text
//!  open on one shard ─ Depart ─► held ─► closed there ─ Open ─► open on the other ─ Follow ─► its clients go on there
//!        ▲                        │           └─ Follow, after an opening that failed ─► its clients are ended
//!        └─ requests do not end ──┘
//! ```
//!
//! Invariants:
//! 1. Between the two shards the volume is one that is being opened, and opening it fails as at any time: it is tried again
//!    if that may help, and its clients reconnect. Only while somebody has its log do they wait for some seconds: the node
//!    itself may just have given that log space, and lets go as soon as the device answers.
//! 2. Its memory stays reserved meanwhile: it is neither reserved again beside that, nor given to another volume.
//! 3. Whoever waits for it, on whatever shard, is told in any case where it is.
//! 4. Where somebody has put a volume is recorded, and it is opened there as long as there is such a shard.
//! 5. A volume does not go where there is no memory now for the connections that would follow it.
//! 6. A move is no fault. Until it ends or fails, a volume is shown in the state and with the figures that it had before;
//!    only a move that takes longer than [`TIME_MAX`] is an error.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdcs_api::{ApiError, ErrorKind, Volume};
use hdcs_backend::memory::VolumeMemory;
use hdcs_core::base::io::Nanos;
use hdcs_core::node::opening::Failure;
use hdcs_frontend::{OpeningId, VolumeNumber};
use tokio::sync::oneshot;

use super::open::NotOpen;
use super::{COMMAND_TIME_MAX, Node, WATCH_PERIOD, at_volume, failed, find, invalid, lock};
use crate::catalogue::Entry;
use crate::control::link::DataPath;
use crate::shard::command::{Command, VolumeReport};

/// How long the requests of clients may take before a volume moves.
const PATIENCE: Nanos = Nanos::from_millis(10_000);

/// How long a volume that moves waits for whoever has its log: together with the time for its requests, and that of one
/// opening, no longer than clients who ask for it wait.
const IN_USE_PATIENCE: Duration = Duration::from_secs(8);
/// How long a move may take before it is a problem.
const TIME_MAX: Duration = Duration::from_secs(10);
/// How long the last report of a volume is kept after its move: longer than any report takes.
const KEPT_TIME: Duration = Duration::from_secs(30);

/// Where a volume moves to, and since when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moving {
    pub shard: usize,
    pub since: Instant,
}

impl Moving {
    /// For how long it has been moving, if that is longer than it should take.
    pub fn hangs_for(self) -> Option<Duration> {
        Some(self.since.elapsed()).filter(|age| *age >= TIME_MAX)
    }
}

impl fmt::Display for Moving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shard = self.shard;
        match self.hangs_for() {
            None => write!(f, "it is being moved to shard {shard}"),
            Some(age) => write!(
                f,
                "it has been moving to shard {shard} for {} s: its log is being replayed there, or that log or its \
                 backend does not answer; it serves again by itself once that has ended",
                age.as_secs()
            ),
        }
    }
}

/// A move, and what the volume was before it.
#[derive(Clone, Debug)]
pub(super) struct Move {
    pub to: Moving,
    /// The last report of the volume before the move.
    pub before: Arc<VolumeReport>,
    /// When the volume was open where it was to be.
    ended: Option<Instant>,
}

impl Move {
    /// Show in a volume that it moves.
    pub fn show(&self, volume: &mut Volume) {
        // Once it has ended, the report is what is late.
        if self.ended.is_some() {
            return;
        }
        "moving".clone_into(&mut volume.phase);
        if let Some(age) = self.to.hangs_for() {
            "error".clone_into(&mut volume.state);
            volume.reason = Some(self.to.to_string());
            volume.trouble_ms = Some(age.as_millis() as u64);
        }
    }
}

/// The moves that are under way, and those that ended a short time ago, by the numbers of volumes.
#[derive(Debug, Default)]
pub(super) struct Moves(Mutex<BTreeMap<u32, Move>>);

impl Moves {
    /// A volume moves until it is open or given up.
    fn note(&self, number: VolumeNumber, to: Moving, before: VolumeReport) {
        let one = Move {
            to,
            before: Arc::new(before),
            ended: None,
        };
        lock(&self.0).insert(number.0, one);
    }

    fn begin(&self, number: VolumeNumber, to: Moving, before: VolumeReport) -> Underway<'_> {
        self.note(number, to, before);
        Underway {
            moves: self,
            number,
        }
    }

    /// The volume is open where it was to be.
    fn end(&self, number: VolumeNumber) {
        if let Some(one) = lock(&self.0).get_mut(&number.0) {
            one.ended = Some(Instant::now());
        }
    }

    /// The volume stays where it is, or is not open any more.
    fn give_up(&self, number: VolumeNumber) {
        lock(&self.0).remove(&number.0);
    }

    /// The move of a volume that a report may have missed the volume in, since it was asked for before the move ended.
    /// Without a report: the move that is under way.
    pub fn during(&self, number: VolumeNumber, asked: Option<Instant>) -> Option<Move> {
        let moves = lock(&self.0);
        let found = moves.get(&number.0);
        found.filter(|one| may_miss(asked, one.ended)).cloned()
    }

    /// Forget moves that ended before any report that somebody still looks at was asked for.
    pub fn forget_old(&self) {
        let is_old = |one: &Move| one.ended.is_some_and(|ended| ended.elapsed() >= KEPT_TIME);
        lock(&self.0).retain(|_, one| !is_old(one));
    }
}

/// A move that is given up unless it has ended by the time that this is dropped: by an error, or a panic.
struct Underway<'a> {
    moves: &'a Moves,
    number: VolumeNumber,
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        let mut moves = lock(&self.moves.0);
        if moves
            .get(&self.number.0)
            .is_some_and(|one| one.ended.is_none())
        {
            moves.remove(&self.number.0);
        }
    }
}

/// Whether a report that was asked for at some time may miss a volume whose move ended at another.
fn may_miss(asked: Option<Instant>, ended: Option<Instant>) -> bool {
    match (asked, ended) {
        (_, None) => true,
        (Some(asked), Some(ended)) => asked <= ended,
        (None, Some(_)) => false,
    }
}

/// Where a volume is to be opened.
#[derive(Clone, Debug, Default)]
pub(super) struct Destination {
    /// On this shard, if somebody has said so.
    pub shard: Option<usize>,
    /// The opening that goes on there, if it comes from another shard.
    pub continues: Option<OpeningId>,
    /// What is reserved for it, which comes from there as well.
    pub memory: Option<Arc<VolumeMemory>>,
}

impl Destination {
    /// Whether a volume that comes from another shard, and whose opening has failed like this after so long, is opened
    /// again while its clients wait.
    pub fn is_waited_for(&self, failure: Failure, age: Duration) -> bool {
        self.continues.is_some() && failure == Failure::InUse && age < IN_USE_PATIENCE
    }
}

/// The shards of a node that has so many.
pub(super) fn shards_in_words(count: usize) -> String {
    match count {
        1 => "shard 0".to_owned(),
        _ => format!("shards 0 to {}", count - 1),
    }
}

impl Node {
    /// The shard of this number, if the data path has it.
    pub(super) fn check_shard(&self, name: &str, shard: u64) -> Result<usize, ApiError> {
        let count = self.link.path().shards();
        if let Some(found) = usize::try_from(shard).ok().filter(|&found| found < count) {
            return Ok(found);
        }
        let which = if count == 1 {
            "only shard 0".to_owned()
        } else {
            shards_in_words(count)
        };
        Err(invalid(format!(
            "volume {name}: there is no shard {shard}: the data path has {which}: see `shards` in the configuration"
        )))
    }

    /// Move an open volume to another shard. Whoever calls it has begun an operation on the volume.
    pub(super) async fn move_to(&self, entry: &Entry, shard: usize) -> Result<(), ApiError> {
        let name = entry.name.as_str();
        let number = VolumeNumber(entry.number);
        let Some(from) = self.link.path().shard_of(number) else {
            return Err(at_volume(name, failed("it is not open")));
        };
        if from == shard {
            return Ok(());
        }
        // A shard that is silent concerns nobody but those whose volumes are there.
        let report = self.link.look_within(COMMAND_TIME_MAX).await?;
        let before = report.as_ref().and_then(|report| find(report, number));
        let (Some(report), Some(before)) = (&report, before.cloned()) else {
            let why = format!(
                "it is not moved: shard {from} has not answered: it may be waiting for a device"
            );
            return Err(at_volume(name, ApiError::new(ErrorKind::Timeout, why)));
        };
        let mut parts = report.shards.iter();
        if let Some(part) = parts.find(|part| part.number == shard)
            && before.connections > part.connections_left
        {
            let why = format!(
                "it is not moved: {} clients are connected to it, and shard {shard} has memory for {} more: end some of \
                 them, or raise `memory_max_mib`",
                before.connections, part.connections_left
            );
            return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
        }
        let since = Instant::now();
        let to = Moving { shard, since };
        let underway = self.moves.begin(number, to, before);
        self.depart_and_open(entry, to).await?;
        drop(underway);
        if self.link.path().shard_of(number) != Some(shard) {
            let why = "it is not moved: a device had not let go of it, so it was opened where it had been";
            return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
        }
        tracing::info!(
            "volume {name} was moved from shard {from} to shard {shard} in {} ms",
            since.elapsed().as_millis()
        );
        Ok(())
    }

    /// Close a volume on its shard, and open it on another one.
    async fn depart_and_open(&self, entry: &Entry, to: Moving) -> Result<(), ApiError> {
        let destination = depart(self, entry, to).await?;
        let volumes = self.volumes.count();
        let opened = self.open_at(entry, volumes, destination).await;
        arrived(self, entry, opened.is_ok()).await;
        opened.map_err(|failure| self.volumes.refusal(entry.name.as_str(), &failure))
    }
}

/// Close a volume on its shard while its clients wait, and note that it moves. Where it is to be opened, whoever calls
/// this says [`arrived`].
pub(super) async fn depart(
    node: &Node,
    entry: &Entry,
    to: Moving,
) -> Result<Destination, ApiError> {
    let name = entry.name.as_str();
    let number = VolumeNumber(entry.number);
    node.volumes.explain(name, Some(to.to_string()));
    let (answer, answered) = oneshot::channel();
    let sent = node.link.send(Command::Depart {
        volume: number,
        patience: PATIENCE,
        answer,
    });
    // However long it takes: it either stays soon, or closes.
    let departed = match answered.await {
        Ok(departed) if sent => departed,
        _ => {
            node.volumes.explain(name, None);
            let why = "the data path did not take it: try again";
            return Err(at_volume(name, ApiError::new(ErrorKind::Unavailable, why)));
        }
    };
    let departed = departed.map_err(|why| {
        node.volumes.explain(name, None);
        let why = format!("it is not moved: {why}");
        at_volume(name, ApiError::new(ErrorKind::Conflict, why))
    })?;
    node.volumes.put(entry.clone(), Some(NotOpen::Moving(to)));
    node.records.closed(entry.number, departed.left).await;
    Ok(Destination {
        shard: Some(to.shard),
        continues: Some(departed.opening),
        memory: departed.memory,
    })
}

/// A volume that has departed is open, or is not: its clients go on, or end.
pub(super) async fn arrived(node: &Node, entry: &Entry, is_open: bool) {
    let number = VolumeNumber(entry.number);
    // From now on it is shown as what it is.
    if is_open {
        node.moves.end(number);
    } else {
        node.moves.give_up(number);
    }
    say_follow(node.link.shared_path(), number).await;
}

/// Note that a volume, of which this is the last report, moves; until [`arrived`].
pub(super) fn show_moving(node: &Node, number: VolumeNumber, to: Moving, before: VolumeReport) {
    node.moves.note(number, to, before);
}

/// Have the connections that wait for a volume, on whatever shard, go where that is.
async fn say_follow(path: &Arc<dyn DataPath>, number: VolumeNumber) {
    let told: Vec<_> = (0..path.shards())
        .map(|shard| tokio::spawn(say_follow_to(Arc::clone(path), shard, number)))
        .collect();
    // Until then the volume does not move on, so that they find it. A shard that is stuck hears of it later.
    let all = async {
        for one in told {
            let _ = one.await;
        }
    };
    let _ = tokio::time::timeout(COMMAND_TIME_MAX, all).await;
}

/// Tell one shard, however long it is busy: connections there wait for it. One that has ended has ended them.
async fn say_follow_to(path: Arc<dyn DataPath>, shard: usize, number: VolumeNumber) {
    while !path.is_stopping() {
        let (answer, answered) = oneshot::channel();
        if path.send_to(shard, Command::Follow(number, answer)) {
            let _ = answered.await;
            return;
        }
        tokio::time::sleep(WATCH_PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_report_may_miss_a_volume_until_one_that_was_asked_for_after_its_move() {
        let before = Instant::now();
        let ended = before + Duration::from_millis(1);
        let after = ended + Duration::from_millis(1);
        assert!(may_miss(None, None) && may_miss(Some(after), None));
        assert!(may_miss(Some(before), Some(ended)) && may_miss(Some(ended), Some(ended)));
        assert!(!may_miss(Some(after), Some(ended)) && !may_miss(None, Some(ended)));
    }

    #[test]
    fn moving_volume_says_for_how_long_once_that_is_too_long() {
        let now = Instant::now();
        let moving = |age: Duration| Moving {
            shard: 2,
            since: now.checked_sub(age).unwrap(),
        };
        let young = moving(Duration::ZERO);
        assert_eq!(young.to_string(), "it is being moved to shard 2");
        assert_eq!(young.hangs_for(), None);
        let old = moving(TIME_MAX);
        assert!(old.hangs_for().is_some());
        let said = old.to_string();
        assert!(
            said.starts_with("it has been moving to shard 2 for 1"),
            "{said}"
        );
    }

    #[test]
    fn moving_volume_whose_log_is_in_use_waits_some_seconds_for_it() {
        let moves = Destination {
            continues: Some(OpeningId::default()),
            ..Destination::default()
        };
        let soon = IN_USE_PATIENCE / 2;
        assert!(moves.is_waited_for(Failure::InUse, soon));
        assert!(!moves.is_waited_for(Failure::InUse, IN_USE_PATIENCE));
        assert!(!moves.is_waited_for(Failure::LogLost, soon));
        // Nobody waits for one that is opened at a start, and others have the time.
        assert!(!Destination::default().is_waited_for(Failure::InUse, soon));
    }

    #[test]
    fn shards_are_said_by_their_numbers() {
        assert_eq!(shards_in_words(1), "shard 0");
        assert_eq!(shards_in_words(4), "shards 0 to 3");
    }
}
