//! Tests of [`super`]: what becomes of volumes that a start is to open.

use std::sync::Mutex;

use hdcs_backend::memory::Share;

use super::*;
use crate::catalogue::PendingVolume;
use crate::catalogue::tests::entry;
use crate::config::Config;
use crate::config::budget::Budget;
use crate::control::link::DataPath;
use crate::data_dir::DataDir;
use crate::events::Events;
use crate::shard::command::Answer;

/// A data path that is asked to open volumes, and answers when it is told to.
#[derive(Default)]
struct Asked(Mutex<Vec<Answer<OpenedAs, OpenFailure>>>);

impl Asked {
    fn count(&self) -> usize {
        lock(&self.0).len()
    }

    /// None of these volumes can be opened before somebody puts something right.
    fn refuse_all(&self) {
        for answer in lock(&self.0).drain(..) {
            let _ = answer.send(Err(OpenFailure::new(Failure::Refused, "not now")));
        }
    }
}

impl DataPath for Asked {
    fn send(&self, command: Command) -> bool {
        if let Command::Open(_, answer) = command {
            lock(&self.0).push(answer);
        }
        true
    }

    fn shards(&self) -> usize {
        1
    }

    fn send_to(&self, _: usize, command: Command) -> bool {
        self.send(command)
    }

    fn is_stopping(&self) -> bool {
        false
    }

    fn shard_of(&self, _: VolumeNumber) -> Option<usize> {
        None
    }

    fn note(&self, _: usize, _: Duration, _: usize) {}
}

/// A node that has read a catalogue with a volume `v`, and is to open it.
async fn recovered(root: &Path) -> (Arc<Node>, Arc<Asked>) {
    let dir = DataDir::open(root).unwrap();
    PendingVolume::begin(dir.layout(), entry("v", 1))
        .and_then(PendingVolume::commit)
        .unwrap();
    let config = Config::default();
    let budget = Budget::of(&config.node, &config.volume).unwrap();
    let share = Share::of_shards(budget.volumes_bytes, budget.shards);
    let path = Arc::new(Asked::default());
    let node = Node::new(
        config,
        (budget, share),
        Arc::new(Mutex::new(dir)),
        Arc::<Asked>::clone(&path),
        Vec::new(),
        None,
        Events::open(root).unwrap(),
    );
    assert_eq!(node.recover().await.unwrap(), ["v"]);
    (Arc::new(node), path)
}

#[tokio::test]
async fn volume_whose_turn_comes_while_something_is_done_to_it_is_opened_after_that() {
    let directory = tempfile::tempdir().unwrap();
    let (node, path) = recovered(directory.path()).await;
    let changed = node.volumes.begin("v", "changed").unwrap();
    let opening = tokio::spawn(Arc::clone(&node).open_by_itself("v".to_owned()));
    // Its turn has come.
    tokio::task::yield_now().await;
    assert_eq!(path.count(), 0, "one at a time changes it");
    drop(changed);
    while path.count() == 0 && !opening.is_finished() {
        tokio::time::sleep(WATCH_PERIOD).await;
    }
    assert_eq!(path.count(), 1, "it is not passed over");
    path.refuse_all();
    opening.await.unwrap();
    assert_eq!(node.volumes.not_open("v").unwrap().phase(), "failed");

    // What is tried again and again has another turn.
    let changed = node.volumes.begin("v", "changed").unwrap();
    Arc::clone(&node).open_by_itself("v".to_owned()).await;
    assert_eq!(path.count(), 0);
    drop(changed);
}

#[tokio::test]
async fn volume_that_waits_for_its_turn_does_not_hang() {
    let directory = tempfile::tempdir().unwrap();
    let (node, path) = recovered(directory.path()).await;
    let since = || match node.volumes.not_open("v") {
        Some(NotOpen::Opening { since }) => since,
        other => panic!("{other:?}"),
    };
    assert_eq!(since(), None, "however long the others take");
    let opening = tokio::spawn(Arc::clone(&node).open_by_itself("v".to_owned()));
    while path.count() == 0 && !opening.is_finished() {
        tokio::time::sleep(WATCH_PERIOD).await;
    }
    assert!(since().is_some(), "its opening has begun");
    path.refuse_all();
    opening.await.unwrap();

    let opening = |age: Option<Duration>| NotOpen::Opening {
        since: age.map(|age| Instant::now().checked_sub(age).unwrap()),
    };
    assert_eq!(opening(None).hangs_for(), None);
    assert_eq!(opening(None).to_string(), "it is being opened");
    assert_eq!(opening(Some(Duration::ZERO)).hangs_for(), None);
    let old = opening(Some(HANG_TIME_LOCAL));
    assert!(old.hangs_for() >= Some(HANG_TIME_LOCAL));
    let said = old.to_string();
    assert!(said.starts_with("it has been opening for 1"), "{said}");
}

#[test]
fn make_way_moves_its_own_file_aside_and_never_makes_one_below_dev() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let make_way = |path: &Path, own| make_way(path, own, Uuid::nil(), true);
    assert_eq!(make_way(&path, true).unwrap(), None);
    fs::write(&path, "precious").unwrap();
    assert_eq!(make_way(&path, false).unwrap(), None);
    assert!(path.exists(), "a file of somebody else's stays");
    let aside = make_way(&path, true).unwrap().unwrap();
    assert!(!path.exists());
    assert_eq!(fs::read_to_string(aside).unwrap(), "precious");
    let error = make_way(Path::new("/dev/hdcs-no-such-device"), true).unwrap_err();
    assert!(error.message.contains("--log-path"), "{error}");
}

#[test]
fn lost_home_whose_device_is_gone_is_told_as_that() {
    let home = Path::new("/dev/hdcs-no-such-device");
    let said = refuse_foreign_home(home, Uuid::nil()).unwrap_err().message;
    assert!(said.contains("its local store cannot be made"), "{said}");
    assert!(
        said.contains("connect it") && said.contains("hdcs volume open"),
        "{said}"
    );
    assert!(!said.contains("log"), "{said}");
}
