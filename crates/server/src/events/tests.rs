//! Events: numbers, windows, rates, and what a flood leaves alone.

use std::fs::{self, OpenOptions};
use std::io::Write as _;

use hdcs_api::events::TEXT_CHARS_MAX;

use super::journal::FILE_BYTES_MAX;
use super::*;

fn writer(directory: &Path) -> Writer {
    Writer::open(directory, Arc::default())
}

fn refused(who: &str) -> Event {
    Event::new("connect", Outcome::Refused, who).why("no such export")
}

fn created(name: &str) -> Event {
    Event::new("create", Outcome::Done, "uid 0").of(name)
}

/// Everything in memory, by number.
fn all(writer: &Writer) -> Vec<Event> {
    let events = Events {
        newest: Arc::clone(&writer.newest),
        recorder: Recorder::nowhere(),
    };
    events.list(None, EVENTS_MAX, None)
}

fn bytes_in(directory: &Path) -> u64 {
    let files = fs::read_dir(directory).unwrap();
    files
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum()
}

#[test]
fn events_are_there_after_a_restart_and_numbers_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = writer(directory.path());
    let now = Instant::now();
    for name in ["a", "b", "c"] {
        first.take(created(name), now);
        first.take(refused("tcp 127.0.0.1").of(name), now);
    }
    // A line that a crash has cut.
    let path = directory.path().join("events.jsonl");
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"{\"number\": 7, \"at").unwrap();
    let events = Events::open(directory.path()).unwrap();
    let found = events.list(None, 10, None);
    let names: Vec<_> = found.iter().filter_map(|e| e.volume.as_deref()).collect();
    assert_eq!(names, ["a", "a", "b", "b", "c", "c"]);
    let numbers: Vec<_> = found.iter().map(|event| event.number).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5, 6]);
    assert_eq!(events.list(Some(2), 3, None), found[2..5]);
    assert_eq!(events.list(None, 3, None), found[3..]);
    events.note(created("d"));
    events.finish(Duration::from_secs(60));
    assert_eq!(events.list(Some(6), 10, None)[0].number, 7);
    assert_eq!(Journal::new(directory.path(), "events").read(10).len(), 4);
}

#[tokio::test]
async fn events_are_listed_as_soon_as_they_are_noted() {
    let directory = tempfile::tempdir().expect("a directory");
    let events = Events::open(directory.path()).expect("events");
    for number in 1..=200 {
        events.note(created(&format!("v{number}")));
        assert!(events.settled(Duration::from_secs(60)).await);
        let last = events.list(None, 1, None);
        assert_eq!(last[0].number, number, "{last:?}");
    }
}

#[test]
fn events_that_repeat_become_one_with_a_count() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(directory.path());
    let start = Instant::now();
    for port in 0..5000 {
        writer.take(refused("tcp 127.0.0.1").what(format!("port {port}")), start);
        // One that comes between them does not end the window.
        writer.take(refused("tcp 127.0.0.2"), start);
    }
    writer.settle(start, false);
    assert_eq!(all(&writer).len(), 2);
    writer.settle(start + WINDOW, false);
    let found = all(&writer);
    let mut counts: Vec<_> = found.iter().map(|event| event.count).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 1, 4999, 4999]);
    assert!(found.iter().any(|event| event.what == "port 4999"));
}

#[test]
fn changes_of_a_state_are_each_said_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(directory.path());
    let now = Instant::now();
    let states = ["healthy", "error", "healthy", "error"];
    for state in states {
        for volume in ["v", "w"] {
            let event = Event::new("state", Outcome::Seen, "node").of(volume);
            writer.take(event.what(state), now);
        }
    }
    let found = all(&writer);
    let of_v = found
        .iter()
        .filter(|event| event.volume.as_deref() == Some("v"));
    assert!(of_v.map(|event| &*event.what).eq(states));
}

#[test]
fn events_of_a_flood_are_bounded_on_disk_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(directory.path());
    let start = Instant::now();
    let long = "x".repeat(4096);
    for number in 0..40_000u64 {
        let now = start + Duration::from_millis(100 * number);
        let who = format!("tcp {number}");
        writer.take(refused(&who).what(&*long), now);
        let other = Event::new("state", Outcome::Seen, "node").of(&who);
        writer.take(other.what(&*long), now);
        if number.is_multiple_of(1000) {
            writer.settle(now, false);
        }
    }
    let bytes = bytes_in(directory.path());
    // Both records have changed to their second file.
    assert!(bytes > 2 * FILE_BYTES_MAX, "{bytes}");
    assert!(bytes <= 4 * FILE_BYTES_MAX, "{bytes}");
    writer.settle(start + Duration::from_secs(4000), true);
    let found = all(&writer);
    assert!(found.len() <= EVENTS_MAX);
    let dropped: Vec<_> = found
        .iter()
        .filter(|event| event.kind == "events-dropped")
        .collect();
    assert!(!dropped.is_empty());
    assert!(dropped.iter().all(|event| event.what == "connect"));
    assert!(found.is_sorted_by_key(|event| event.number));
}

#[test]
fn events_that_are_not_kept_are_all_counted() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(directory.path());
    let now = Instant::now();
    for number in 0..2000 {
        writer.take(refused(&format!("tcp {number}")), now);
    }
    writer.settle(now, false);
    let counted: u64 = all(&writer).iter().map(|event| event.count).sum();
    assert_eq!(counted, 2000);
}

#[test]
fn flood_of_clients_displaces_nothing_that_was_done() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(directory.path());
    let start = Instant::now();
    writer.take(created("v"), start);
    for number in 0..100_000u64 {
        let now = start + Duration::from_secs(number);
        for kind in ["connect", "disconnect", "tls", "delete"] {
            let event = Event::new(kind, Outcome::Refused, format!("tcp {number}"));
            writer.take(event.what("x".repeat(400)), now);
        }
        writer.settle(now, false);
    }
    assert_eq!(all(&writer)[0].kind, "create", "it is in memory");
    let mut again = self::writer(directory.path());
    assert_eq!(all(&again)[0].kind, "create", "it is on disk");
    // Nor does it use up the rate of another kind, or the windows of what was done.
    let now = start + Duration::from_secs(200_000);
    again.take(created("w"), now);
    again.take(created("w"), now);
    assert_eq!(all(&again).last().unwrap().volume.as_deref(), Some("w"));
    again.settle(now, true);
    assert_eq!(all(&again).last().unwrap().kind, "create");
}

#[test]
fn full_queue_of_clients_leaves_room_and_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    // Nobody takes anything from it as yet.
    let (queue, items) = sync_channel(QUEUE_MAX);
    let recorder = Recorder {
        queue,
        gate: Arc::default(),
    };
    for number in 0..5000 {
        recorder.note(refused(&format!("tcp {number}")));
    }
    recorder.note(created("v"));
    let mut writer = Writer::open(directory.path(), Arc::clone(&recorder.gate));
    let (done, is_done) = sync_channel(1);
    recorder.queue.try_send(Item::Finish(done)).unwrap();
    let gate = Arc::clone(&recorder.gate);
    drop(recorder);
    writer.run(&items);
    is_done.recv().unwrap();
    let found = all(&writer);
    assert!(found.iter().any(|event| event.kind == "create"));
    let counted: u64 = found.iter().map(|event| event.count).sum();
    assert_eq!(counted, 5001);
    assert_eq!(gate.clients.load(Ordering::Relaxed), 0);
}

#[test]
fn many_kinds_share_one_rate_and_little_memory() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(directory.path());
    let now = Instant::now();
    for number in 0..10_000 {
        let kind = format!("kind {number}");
        writer.take(Event::new(&kind, Outcome::Refused, "x"), now);
    }
    writer.settle(now, false);
    assert!(writer.budgets.len() <= KINDS_MAX + Record::ALL.len());
    assert!(writer.recent.len() <= Record::ALL.len() * ALIKE_MAX);
    let counted: u64 = all(&writer).iter().map(|event| event.count).sum();
    assert_eq!(counted, 10_000);
}

#[test]
fn end_of_the_last_run_is_known() {
    let directory = tempfile::tempdir().unwrap();
    let start = || Event::new("start", Outcome::Done, "node");
    let open = || Events::open(directory.path()).unwrap();
    let seconds = Duration::from_secs(60);
    let first = open();
    assert_eq!(first.last_end(), None);
    first.note(start());
    first.note(Event::new("stop", Outcome::Done, "node"));
    first.finish(seconds);
    let second = open();
    let said = second.last_end().unwrap();
    assert!(
        said.starts_with("the last run stopped cleanly at 20"),
        "{said}"
    );
    second.note(start());
    second.note(created("v"));
    second.finish(seconds);
    let third = open();
    let said = third.last_end().unwrap();
    assert!(
        said.ends_with("it was killed or the machine failed"),
        "{said}"
    );
    // A start that failed changes nothing about that.
    third.note(Event::new("start", Outcome::Failed, "node").why("no room"));
    third.finish(seconds);
    let fourth = open();
    assert_eq!(fourth.last_end(), Some(said));
    fourth.note(start());
    fourth.note(Event::new("stop", Outcome::Failed, "node").why("it hangs"));
    fourth.finish(seconds);
    let said = open().last_end().unwrap();
    assert_eq!(said, "the last run stopped uncleanly: it hangs");
}

#[test]
fn events_without_a_disk_stay_in_memory() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["events.jsonl", "events-clients.jsonl"] {
        fs::create_dir(directory.path().join(name)).unwrap();
    }
    let mut writer = writer(directory.path());
    writer.take(refused("tcp 127.0.0.1"), Instant::now());
    writer.take(created("v"), Instant::now());
    assert_eq!(all(&writer).len(), 2);
}

#[test]
fn event_texts_are_bounded_and_on_one_line() {
    let event = refused(&"y\n".repeat(1000));
    assert!(event.who.chars().count() <= TEXT_CHARS_MAX + 1);
    assert!(!event.who.contains('\n'));
}
