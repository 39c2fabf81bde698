//! One winner for each revision, whatever races, crashes or is damaged.

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::thread;

use hdcs_core::replication::record::{AckLevel, WhenShort};

use super::super::spec::tests::spec;
use super::*;

const A: Member = Member(1);
const B: Member = Member(2);
const C: Member = Member(3);

fn first() -> GroupRecord {
    let seats = [A, B].map(|member| Seat { member, joined: 1 });
    let config = Config {
        members: seats.into_iter().collect(),
        replicas: 3,
        ack: AckLevel::Majority,
        copies_min: 2,
        when_short: WhenShort::Error,
    };
    GroupRecord::first(A, config, Nodes::from([C]))
}

/// A store with one group.
fn made() -> (tempfile::TempDir, RecordStore, VolumeSpecFile) {
    let root = tempfile::tempdir().unwrap();
    let store = RecordStore::open(root.path(), A).unwrap();
    let spec = spec();
    store.create(&spec, &first()).unwrap();
    (root, store, spec)
}

fn written(store: &RecordStore, volume: Uuid, record: &GroupRecord) {
    let proposed = store.propose(volume, record);
    assert!(matches!(proposed, Proposed::Written), "{proposed:?}");
}

fn left_in_tmp(root: &Path) -> usize {
    fs::read_dir(root.join(TEMPORARY)).unwrap().count()
}

#[test]
fn record_of_each_kind_reads_back() {
    let (root, store, spec) = made();
    assert_eq!(store.list().unwrap(), [spec.uuid]);
    assert_eq!(store.spec(spec.uuid).unwrap(), Some(spec.clone()));
    assert_eq!(store.read(spec.uuid).unwrap(), Some(first()));
    let floor = Point {
        position: 1 << 40,
        chain: u64::MAX,
    };
    let taking = first().taking(B);
    let members = taking.config.members.only(|member| member == B);
    let serving = taking.serving(B, members, floor);
    let joined = serving.join(Seat {
        member: C,
        joined: u64::MAX,
    });
    for record in [taking, serving, joined] {
        written(&store, spec.uuid, &record);
        // Another node sees it.
        let other = RecordStore::open(root.path(), B).unwrap();
        assert_eq!(other.read(spec.uuid).unwrap(), Some(record));
    }
    assert_eq!(left_in_tmp(root.path()), 0);
    let groups = store.groups().unwrap();
    assert_eq!(groups[&spec.uuid].as_ref().unwrap().1.revision, 4);
}

#[test]
fn proposal_that_comes_too_late_has_lost() {
    let (_root, store, spec) = made();
    let (taking, other) = (first().taking(A), first().taking(B));
    written(&store, spec.uuid, &taking);
    let lost = store.propose(spec.uuid, &other);
    assert!(
        matches!(&lost, Proposed::Lost(newer) if **newer == taking),
        "{lost:?}"
    );
    // Who was not told that it was written asks again.
    written(&store, spec.uuid, &taking);
    let late = taking.serving(A, taking.config.members.clone(), Point::default());
    written(&store, spec.uuid, &late);
    assert!(matches!(
        store.propose(spec.uuid, &taking),
        Proposed::Lost(_)
    ));
}

#[test]
fn proposal_that_breaks_a_rule_is_refused() {
    let (_root, store, spec) = made();
    let stranger = first().taking(Member(9));
    let refused = store.propose(spec.uuid, &stranger);
    assert!(
        matches!(refused, Proposed::Refused(RecordError::Taking)),
        "{refused:?}"
    );
    let hasty = first().taking(A).taking(B);
    let refused = store.propose(spec.uuid, &hasty);
    let is_gap = matches!(
        refused,
        Proposed::Refused(RecordError::Revision { last: 1, next: 3 })
    );
    assert!(is_gap, "{refused:?}");
    assert_eq!(store.read(spec.uuid).unwrap(), Some(first()));
}

#[test]
fn proposals_of_many_threads_have_one_winner_for_each_revision() {
    const THREADS: u16 = 8;
    const REVISIONS: u64 = 40;
    let (root, _store, spec) = made();
    let start = Barrier::new(usize::from(THREADS));
    let run = |number: u16| {
        let candidate = if number.is_multiple_of(2) { A } else { B };
        let store = RecordStore::open(root.path(), Member(10 + number)).unwrap();
        let (mut won, mut last) = (Vec::new(), first());
        start.wait();
        while last.revision < REVISIONS {
            // Alike but for who asks: the epoch's joiners say it.
            let next = match last.phase {
                Phase::Serving { .. } => last.taking(candidate),
                Phase::Taking { candidate } => {
                    let members = last.config.members.clone();
                    let floor = Point {
                        position: last.revision,
                        chain: u64::from(number),
                    };
                    last.serving(candidate, members, floor)
                }
            };
            last = match store.propose(spec.uuid, &next) {
                Proposed::Written => {
                    won.push(next.clone());
                    next
                }
                Proposed::Lost(newer) => {
                    assert!(newer.revision >= next.revision);
                    *newer
                }
                other => panic!("{other:?}"),
            };
        }
        won
    };
    let won: Vec<GroupRecord> = thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..THREADS)
            .map(|number| scope.spawn(move || run(number)))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    // Takings of one candidate are the same record, which several may have asked for; servings differ by their floor.
    let mut contents: BTreeMap<u64, GroupRecord> = BTreeMap::from([(1, first())]);
    for record in won {
        let revision = record.revision;
        let before = contents.insert(revision, record.clone());
        assert!(
            before.is_none_or(|before| before == record),
            "two records of {revision}"
        );
    }
    let mut last = contents.remove(&1).unwrap();
    for (_, record) in contents {
        assert_eq!(last.check_next(&record), Ok(()));
        last = record;
    }
    assert!(last.revision >= REVISIONS);
    assert_eq!(left_in_tmp(root.path()), 0);
}

#[test]
fn old_records_go_but_the_last_few() {
    let (root, store, spec) = made();
    let mut last = first();
    for round in 0..20 {
        last = last.taking(if round % 2 == 0 { A } else { B });
        written(&store, spec.uuid, &last);
    }
    let names = names_in(&root.path().join(spec.uuid.to_string())).unwrap();
    let revisions: BTreeSet<_> = names
        .iter()
        .filter_map(|name| revision_of(name, RECORDS))
        .collect();
    assert_eq!(revisions, (21 - KEPT..=21).collect());
    assert_eq!(store.read(spec.uuid).unwrap(), Some(last));
}

#[test]
fn name_that_was_removed_since_is_not_taken_for_new() {
    let (root, store, spec) = made();
    let mut last = first();
    for _ in 0..20 {
        last = last.taking(B);
        written(&store, spec.uuid, &last);
    }
    // As somebody would who had read revision 1 before all that: its list of names is as old.
    let old = root.path().join(spec.uuid.to_string()).join(record_name(1));
    assert!(!old.exists());
    let stale = first().taking(A);
    let path = store.record_path(spec.uuid, 2);
    let stopped = store.link_after(spec.uuid, 1, &stale, &path).unwrap();
    assert!(
        matches!(&stopped, Proposed::Lost(newer) if **newer == last),
        "{stopped:?}"
    );
    // Nor is what follows upon that.
    let staler = stale.taking(B);
    let path = store.record_path(spec.uuid, 3);
    let stopped = store.link_after(spec.uuid, 2, &staler, &path).unwrap();
    assert!(
        matches!(&stopped, Proposed::Lost(newer) if **newer == last),
        "{stopped:?}"
    );
    let next = last.taking(A);
    written(&store, spec.uuid, &next);
    assert!(!path.exists());
    assert_eq!(store.read(spec.uuid).unwrap(), Some(next));
}

#[test]
fn damaged_record_is_an_error_that_names_the_file_and_hides_no_older_one() {
    let (_root, store, spec) = made();
    written(&store, spec.uuid, &first().taking(B));
    let path = store.record_path(spec.uuid, 2);
    let good = fs::read(&path).unwrap();
    let text = String::from_utf8(good.clone()).unwrap();
    let damaged = [
        Vec::new(),
        good[..good.len() / 2].to_vec(),
        text.replace("\"candidate\": 2", "\"candidate\": 1")
            .into_bytes(),
        text.replace("\"version\": 2", "\"version\": 3")
            .into_bytes(),
    ];
    for bad in damaged {
        assert_ne!(bad, good);
        fs::write(&path, bad).unwrap();
        let error = store.read(spec.uuid).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        let proposed = store.propose(spec.uuid, &first().taking(B).taking(A));
        assert!(matches!(proposed, Proposed::Unknown(_)), "{proposed:?}");
        assert!(store.groups().unwrap()[&spec.uuid].is_err());
    }
    fs::write(&path, good).unwrap();
    assert_eq!(store.read(spec.uuid).unwrap(), Some(first().taking(B)));
}

#[test]
fn record_that_contradicts_itself_is_refused() {
    let file = RecordFile::of(&first());
    assert_eq!(file.clone().into_record(1), Ok(first()));
    let twice = RecordFile {
        joiners: vec![3, 3],
        ..file.clone()
    };
    let both = RecordFile {
        joiners: vec![2],
        ..file.clone()
    };
    let no_epoch = RecordFile {
        epoch: 0,
        ..file.clone()
    };
    let never = RecordFile {
        copies_min: 4,
        ..file.clone()
    };
    let empty = RecordFile {
        members: Vec::new(),
        ..file.clone()
    };
    let stranger = RecordFile {
        phase: PhaseFile::Serving { primary: 3 },
        ..file.clone()
    };
    let many = RecordFile {
        joiners: (3..100).collect(),
        ..file.clone()
    };
    let last_epoch = RecordFile {
        epoch: u64::MAX,
        ..file.clone()
    };
    for bad in [
        twice, both, no_epoch, never, empty, stranger, many, last_epoch,
    ] {
        assert!(bad.clone().into_record(1).is_err(), "{bad:?}");
    }
    assert!(file.into_record(2).is_err());
}

#[test]
fn crash_leaves_nothing_that_counts_and_the_next_start_removes_it() {
    let (root, store, spec) = made();
    let temporary = root.path().join(TEMPORARY);
    // Of this node: a record without its name, and a group that was being made.
    fs::write(temporary.join("1-half"), "{").unwrap();
    fs::create_dir(temporary.join("1-group")).unwrap();
    fs::write(temporary.join("1-group").join(record_name(1)), "x").unwrap();
    // Of one that runs.
    fs::write(temporary.join("12-whole"), "{}").unwrap();
    assert_eq!(store.list().unwrap(), [spec.uuid]);
    written(&store, spec.uuid, &first().taking(B));
    let again = RecordStore::open(root.path(), A).unwrap();
    assert_eq!(names_in(&temporary).unwrap(), ["12-whole"]);
    assert_eq!(again.read(spec.uuid).unwrap(), Some(first().taking(B)));
}

#[test]
fn record_whose_link_was_made_and_not_told_is_found() {
    let (_root, store, spec) = made();
    // The node died between the link and the removal of the other name.
    let next = first().taking(B);
    let text = encode(&next).unwrap();
    let temporary = store.temporary_name();
    write_new(&temporary, &text).unwrap();
    fs::hard_link(&temporary, store.record_path(spec.uuid, 2)).unwrap();
    assert_eq!(store.read(spec.uuid).unwrap(), Some(next.clone()));
    written(&store, spec.uuid, &next);
}

#[test]
fn group_is_made_once_and_removed_as_a_whole() {
    let (root, store, spec) = made();
    let again = store.create(&spec, &first());
    assert!(matches!(again, Err(StoreError::Exists { .. })), "{again:?}");
    assert_eq!(store.removed(spec.uuid).unwrap(), None);
    assert_eq!(store.remove(spec.uuid, None).unwrap(), Removal::Done);
    assert_eq!(store.remove(spec.uuid, Some(B)).unwrap(), Removal::Done);
    let all = store.all().unwrap();
    assert!(all.groups.is_empty());
    assert!(
        !all.removed[&spec.uuid].is_kept_by(B),
        "the first one counts"
    );
    let refused = store.propose(spec.uuid, &first().taking(B));
    assert!(matches!(refused, Proposed::Unknown(_)), "{refused:?}");
    assert!(store.change(&spec.changed(&spec.entry(1))).is_err());
    // It is there until each of its nodes has let go, the joiner among them.
    for node in [A, C, C] {
        RecordStore::new(root.path(), node).gone(spec.uuid).unwrap();
        assert!(store.removed(spec.uuid).unwrap().is_some());
    }
    RecordStore::new(root.path(), B).gone(spec.uuid).unwrap();
    assert_eq!(store.read(spec.uuid).unwrap(), None);
    assert_eq!(store.spec(spec.uuid).unwrap(), None);
    assert!(store.list().unwrap().is_empty());
    store.gone(spec.uuid).unwrap();
    assert_eq!(store.remove(spec.uuid, None).unwrap(), Removal::NoGroup);
    assert_eq!(left_in_tmp(root.path()), 0);
}

#[test]
fn group_that_was_removed_is_kept_until_a_node_that_was_taken_out_before_has_let_go() {
    let (root, store, spec) = made();
    let of = |node| RecordStore::new(root.path(), node);
    for node in [A, B, C] {
        of(node).has_copy(spec.uuid).unwrap();
        of(node).has_copy(spec.uuid).unwrap();
    }
    // One is taken out while it is away, another one knows that and has forgotten its copy.
    let joiner = first().joiners;
    let next = GroupRecord {
        revision: 2,
        joiners: Nodes::new(),
        ..first()
    };
    assert!(joiner.contains(&C));
    written(&store, spec.uuid, &next);
    assert_eq!(store.remove(spec.uuid, None).unwrap(), Removal::Done);
    for node in [A, B] {
        of(node).gone(spec.uuid).unwrap();
        assert!(store.removed(spec.uuid).unwrap().is_some());
    }
    of(C).gone(spec.uuid).unwrap();
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn node_that_has_forgotten_its_copy_is_not_waited_for() {
    let (root, store, spec) = made();
    let other = RecordStore::new(root.path(), Member(9));
    other.has_copy(spec.uuid).unwrap();
    other.forgot_copy(spec.uuid).unwrap();
    other.forgot_copy(spec.uuid).unwrap();
    assert_eq!(store.remove(spec.uuid, None).unwrap(), Removal::Done);
    for node in [A, B, C] {
        RecordStore::new(root.path(), node).gone(spec.uuid).unwrap();
    }
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn spec_of_a_revision_is_written_once_and_the_newest_counts() {
    let (root, store, spec) = made();
    let mut entry = spec.entry(1);
    entry.bytes *= 2;
    let next = spec.changed(&entry);
    entry.bytes *= 2;
    let other = spec.changed(&entry);
    assert!(store.change(&next).unwrap());
    assert!(store.change(&next).unwrap(), "it was written");
    assert!(
        !store.change(&other).unwrap(),
        "who made it of the one before has lost"
    );
    let elsewhere = RecordStore::new(root.path(), B);
    assert_eq!(elsewhere.spec(spec.uuid).unwrap(), Some(next.clone()));
    let mut last = next;
    for _ in 0..2 * KEPT {
        entry.bytes += 4096;
        last = last.changed(&entry);
        assert!(elsewhere.change(&last).unwrap());
    }
    assert_eq!(store.spec(spec.uuid).unwrap(), Some(last.clone()));
    assert_eq!(store.read(spec.uuid).unwrap(), Some(first()));
    let path = store
        .directory(spec.uuid)
        .join(name_of(SPECS, last.revision));
    fs::write(&path, "{").unwrap();
    let error = store.spec(spec.uuid).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn group_whose_removal_cannot_be_read_is_an_error_and_not_removed() {
    let (_root, store, spec) = made();
    fs::write(store.directory(spec.uuid).join(REMOVED_FILE), "{").unwrap();
    let all = store.all().unwrap();
    assert!(all.removed.is_empty() && all.groups[&spec.uuid].is_err());
}

#[test]
fn directory_that_takes_nothing_leaves_it_unknown_and_the_record_as_it_was() {
    let (root, store, spec) = made();
    let temporary = root.path().join(TEMPORARY);
    // As with a directory that is full or read-only: no new file can be made.
    fs::remove_dir(&temporary).unwrap();
    fs::write(&temporary, "").unwrap();
    let proposed = store.propose(spec.uuid, &first().taking(B));
    let Proposed::Unknown(error) = proposed else {
        panic!("{proposed:?}");
    };
    assert!(
        error.to_string().contains(temporary.to_str().unwrap()),
        "{error}"
    );
    assert_eq!(store.read(spec.uuid).unwrap(), Some(first()));
    let unusable = RecordStore::open(root.path(), A).unwrap_err().to_string();
    assert!(unusable.contains("Not a directory"), "{unusable}");
}

#[test]
fn removal_is_tried_before_anything_of_it_is_written() {
    let (root, store, spec) = made();
    store.may_remove(spec.uuid).unwrap();
    assert_eq!(left_in_tmp(root.path()), 0);
    let temporary = root.path().join(TEMPORARY);
    fs::remove_dir(&temporary).unwrap();
    fs::write(&temporary, "").unwrap();
    store.may_remove(spec.uuid).unwrap_err();
    assert_eq!(store.removed(spec.uuid).unwrap(), None);
    fs::remove_file(&temporary).unwrap();
    fs::create_dir(&temporary).unwrap();
    assert_eq!(store.remove(spec.uuid, None).unwrap(), Removal::Done);
    store.may_remove(spec.uuid).unwrap();
}

#[test]
fn lock_that_read_only_nfs_refuses_is_said_to_be_that() {
    let refused = |is_writable| {
        let error = io::Error::from_raw_os_error(libc::EBADF);
        owning::not_locked(Path::new("running-1"), error, is_writable)
    };
    let error = refused(false).to_string();
    assert!(error.contains("read-only NFS mount"), "{error}");
    assert!(!refused(true).to_string().contains("NFS"));
}

#[test]
fn store_without_its_directory_says_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let absent = root.path().join("records");
    let error = RecordStore::open(&absent, A).unwrap_err().to_string();
    assert!(
        error.contains("make the directory") && error.contains("`records`"),
        "{error}"
    );
    fs::write(&absent, "").unwrap();
    assert!(RecordStore::open(&absent, A).is_err());
}

#[test]
fn names_that_are_no_groups_are_left_alone() {
    let (root, store, spec) = made();
    fs::write(root.path().join("README"), "x").unwrap();
    let upper = spec.uuid.to_string().to_uppercase();
    fs::create_dir(root.path().join(upper)).unwrap();
    assert_eq!(store.list().unwrap(), [spec.uuid]);
    for (name, revision) in [
        ("record-12.json", Some(12)),
        ("record-012.json", None),
        ("record-+1.json", None),
        ("record-.json", None),
        ("record-1.json.tmp", None),
        ("spec.json", None),
    ] {
        assert_eq!(revision_of(name, RECORDS), revision, "{name}");
    }
}

#[test]
fn group_that_another_node_has_taken_is_not_removed() {
    let (root, store, spec) = made();
    let taking = first().taking(B);
    let taken = store.propose(spec.uuid, &taking);
    assert!(matches!(taken, Proposed::Written), "{taken:?}");
    let kept = Some(A);
    assert_eq!(store.remove(spec.uuid, kept).unwrap(), Removal::Another(B));
    assert_eq!(store.removed(spec.uuid).unwrap(), None);
    assert_eq!(store.read(spec.uuid).unwrap(), Some(taking.clone()));
    // A removal that did not get as far as its own file excludes every taking.
    let elsewhere = RecordStore::new(root.path(), B);
    assert_eq!(elsewhere.remove(spec.uuid, None).unwrap(), Removal::Done);
    std::fs::remove_file(store.directory(spec.uuid).join(REMOVED_FILE)).unwrap();
    assert!(store.removed(spec.uuid).unwrap().is_some());
    let late = store.propose(spec.uuid, &taking.taking(A));
    assert!(matches!(late, Proposed::Unknown(_)), "{late:?}");
    assert_eq!(store.remove(spec.uuid, None).unwrap(), Removal::Done);
}

#[test]
fn directory_of_another_cluster_is_refused() {
    let (_root, store, _) = made();
    let (own, other) = (Uuid::from_u128(7), Uuid::from_u128(8));
    store.claim(own).unwrap();
    store.claim(own).unwrap();
    let error = store.claim(other).unwrap_err().to_string();
    assert!(
        error.contains(&own.to_string()) && error.contains("cluster.json"),
        "{error}"
    );
    assert_eq!(store.groups().unwrap().len(), 1, "it is no group");
}

#[test]
fn node_runs_once_and_another_one_is_told_where() {
    let (root, store, _) = made();
    let held = store.be_the_only_one("node a, process 7 on here").unwrap();
    let refused = store.be_the_only_one("node a, process 8 on there");
    let refused = refused.unwrap_err().to_string();
    for part in ["node 1 runs already", "process 7 on here", "of its own"] {
        assert!(refused.contains(part), "{refused}");
    }
    let other = RecordStore::open(root.path(), B).unwrap();
    other.be_the_only_one("node b").unwrap();
    drop(held);
    store.be_the_only_one("node a").unwrap();
}

#[test]
fn records_that_are_not_mounted_are_away() {
    let (root, store, _) = made();
    let away = store.is_there().unwrap_err().to_string();
    for part in ["cluster.json", "mount it again", "No such file"] {
        assert!(away.contains(part), "{away}");
    }
    store.claim(Uuid::from_u128(9)).unwrap();
    store.is_there().unwrap();
    drop(root);
    assert!(matches!(store.is_there(), Err(StoreError::Away { .. })));
}
