//! What may be asked for, what is refused, and what an operator sees of groups.

use std::path::Path;
use std::sync::Mutex;

use hdcs_api::groups::{Ack, GroupChange, GroupOther, GroupOtherState};
use hdcs_api::value::Value;
use hdcs_core::replication::Point;
use hdcs_core::replication::record::AckLevel;

use super::*;
use crate::catalogue::tests::entry;
use crate::config::Config;
use crate::config::budget::Budget;
use crate::control::node::lock;
use crate::data_dir::Layout;

/// The configuration of node `a`, of three.
fn config(records: &Path) -> Config {
    let mut text = format!(
        "[cluster]\nid = \"{}\"\nnode = \"a\"\nlisten = \"127.0.0.1:7001\"\nrecords = \"{}\"\n",
        Uuid::from_u128(9),
        records.display()
    );
    for (number, name) in [(1, "a"), (2, "b"), (3, "c")] {
        let id = Uuid::from_u128(number);
        text += &format!(
            "[cluster.nodes.{name}]\nnumber = {number}\nid = \"{id}\"\naddress = \"127.0.0.1:700{number}\"\n"
        );
    }
    Config::parse(&text, Path::new("test.toml")).unwrap()
}

fn setup(config: Config) -> Arc<Setup> {
    let budget = Budget::of(&config.node, &config.volume).unwrap();
    Arc::new(Setup::new(config, budget, Layout::new(Path::new("data"))))
}

fn request(nodes: &[&str]) -> GroupRequest {
    GroupRequest {
        replicas: nodes.len() as u8,
        ack: Ack::Majority,
        nodes: nodes.iter().map(ToString::to_string).collect(),
        copies_min: Some(1),
        when_short: hdcs_api::groups::WhenShort::Wait,
    }
}

fn create(nodes: &[&str]) -> CreateVolume {
    CreateVolume {
        name: "v".to_owned(),
        bytes: Some(1 << 20),
        backend: Some("file:/shared/v.img".to_owned()),
        group: Some(request(nodes)),
        ..CreateVolume::default()
    }
}

/// A data path that takes every group at once, or refuses.
#[derive(Default)]
struct FakePath {
    taken: Mutex<Vec<(Uuid, u64)>>,
    shapes: Mutex<Vec<Shape>>,
    refuses: bool,
}

impl Replication for FakePath {
    fn view(&self, volume: Uuid) -> Option<GroupView> {
        let taken = lock(&self.taken);
        let (_, epoch) = taken.iter().find(|(taken, _)| *taken == volume)?;
        Some(GroupView {
            role: GroupRole::Serves,
            head_blocks: 30 + epoch,
            durable_blocks: 20,
            committed_blocks: Some(10),
            others: vec![GroupOther {
                node: "b".to_owned(),
                state: GroupOtherState::InStep,
                durable_blocks: 10,
                behind_bytes: 20 << 12,
                resync: None,
            }],
            takeover: None,
            silent_ms: None,
        })
    }

    fn trouble(&self, _: Uuid) -> Option<String> {
        None
    }

    fn take_over(&self, spec: VolumeSpecFile, record: GroupRecord) -> Work<()> {
        let refuses = self.refuses;
        if !refuses {
            lock(&self.taken).push((spec.uuid, record.epoch));
        }
        Box::pin(async move {
            if refuses {
                return Err(failed("too few promises"));
            }
            Ok(())
        })
    }

    fn configure(&self, _: VolumeSpecFile, _: GroupRecord, shape: Shape) -> Work<()> {
        lock(&self.shapes).push(shape);
        Box::pin(async { Ok(()) })
    }
}

/// Groups over a store with the group of volume `v`.
async fn made(refuses: bool) -> (tempfile::TempDir, Arc<FakePath>, Groups, Entry) {
    let root = tempfile::tempdir().unwrap();
    let store = RecordStore::open(root.path(), Member(1)).unwrap();
    store.claim(Uuid::from_u128(9)).unwrap();
    let path = Arc::new(FakePath {
        refuses,
        ..FakePath::default()
    });
    let replication: Arc<dyn Replication> = Arc::<FakePath>::clone(&path);
    let groups = Groups::new(setup(config(root.path())), Some(replication));
    let create = create(&["a", "b", "c"]);
    let plan = groups.plan(&"v".parse().unwrap(), &create).unwrap();
    let mut entry = entry("v", 4);
    entry.backend = create.backend;
    entry.is_replicated = true;
    groups
        .found(&entry, 77, GroupRecord::FIRST, plan.unwrap())
        .await
        .unwrap();
    (root, path, groups, entry)
}

#[test]
fn plan_of_a_group_has_this_node_as_primary_and_the_others_join() {
    let groups = Groups::new(
        setup(config(Path::new("/records"))),
        Some(Arc::new(FakePath::default())),
    );
    let name = "v".parse().unwrap();
    let none = CreateVolume::default();
    assert_eq!(groups.plan(&name, &none).unwrap(), None);
    let plan = groups.plan(&name, &create(&["a", "c"])).unwrap().unwrap();
    assert_eq!(
        (plan.primary, &plan.others),
        (Member(1), &Nodes::from([Member(3)]))
    );
    let first = plan.first_record(GroupRecord::FIRST);
    assert_eq!((first.revision, first.primary()), (1, Some(Member(1))));
    assert_eq!(first.config.replicas, 2);
    assert_eq!(first.config.members.joined(Member(1)), Some(FIRST_JOINED));
    assert_eq!(first.joiners, plan.others);
}

#[test]
fn plan_that_cannot_be_is_refused_with_its_reason() {
    let groups = Groups::new(
        setup(config(Path::new("/records"))),
        Some(Arc::new(FakePath::default())),
    );
    let refused = |change: &dyn Fn(&mut CreateVolume)| {
        let mut create = create(&["a", "b"]);
        change(&mut create);
        let error = groups.plan(&"v".parse().unwrap(), &create).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{error}");
        error.message
    };
    let of = |change: &dyn Fn(&mut GroupRequest)| {
        refused(&|create| change(create.group.as_mut().unwrap()))
    };
    for (message, part) in [
        (of(&|group| group.replicas = 1), "2 or 3 replicas"),
        (of(&|group| group.replicas = 4), "2 or 3 replicas"),
        (
            of(&|group| group.replicas = 3),
            "3 replicas are on as many nodes, and 2 are named",
        ),
        (
            of(&|group| group.copies_min = Some(3)),
            "from 1 to the number of replicas, 2",
        ),
        (of(&|group| group.copies_min = Some(0)), "from 1 to"),
        (
            of(&|group| group.nodes = Vec::new()),
            "the first of its nodes is the one that is asked, a",
        ),
        (of(&|group| group.nodes.reverse()), "the nodes are a, b, c"),
        (
            of(&|group| group.nodes[1] = "d".to_owned()),
            "there is no node d",
        ),
        (of(&|group| group.nodes[1] = "a".to_owned()), "named twice"),
        (
            refused(&|create| create.mode = Mode::Storage),
            "storage mode",
        ),
        (refused(&|create| create.backend = None), "give --backend"),
        (
            refused(&|create| create.backend = Some("file:/shared/v.img.hdcs-snap/s".to_owned())),
            "is only read",
        ),
        (
            refused(&|create| {
                let word = Value::Text("pass-through".to_owned());
                create.settings.insert("log_failure".to_owned(), word);
            }),
            "log_failure=read-only",
        ),
    ] {
        assert!(
            message.contains(part) && message.starts_with("volume v: "),
            "{message}"
        );
    }
}

#[tokio::test]
async fn node_that_is_alone_or_does_not_replicate_says_so() {
    let alone = Groups::new(setup(Config::default()), None);
    let name = "v".parse().unwrap();
    let error = alone.plan(&name, &create(&["a", "b"])).unwrap_err().message;
    assert!(error.contains("give [cluster]"), "{error}");
    let error = alone.list().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    let (root, _path, _groups, entry) = made(false).await;
    let store = RecordStore::new(root.path(), Member(1));
    let record = store.read(entry.uuid).unwrap().unwrap();
    let silent = Groups::new(setup(config(root.path())), None);
    let error = silent.plan(&name, &create(&["a", "b"])).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    let error = silent.take_over("v").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert_eq!(store.read(entry.uuid).unwrap(), Some(record));
    assert_eq!(silent.show("v").await.unwrap().here, None);
}

#[tokio::test]
async fn group_is_shown_by_the_names_of_nodes_with_what_this_node_sees() {
    let (root, _path, groups, entry) = made(false).await;
    let shown = groups.show("v").await.unwrap();
    assert_eq!(
        (shown.volume.as_str(), shown.uuid),
        ("v", entry.uuid.to_string())
    );
    assert_eq!((shown.trouble, shown.here), (None, None));
    let record = shown.record.unwrap();
    assert_eq!(
        (record.revision, record.epoch, record.phase),
        (1, 1, GroupPhase::Serving)
    );
    assert_eq!(
        (record.primary.as_str(), record.members),
        ("a", vec!["a".to_owned()])
    );
    assert_eq!(record.joiners, ["b", "c"]);
    assert_eq!(
        (record.ack, record.replicas, record.copies_min),
        (Ack::Majority, 3, 1)
    );
    let store = RecordStore::new(root.path(), Member(2));
    let taking = store.read(entry.uuid).unwrap().unwrap().taking(Member(1));
    assert!(matches!(
        store.propose(entry.uuid, &taking),
        crate::cluster::records::Proposed::Written
    ));
    let listed = groups.list().await.unwrap();
    assert_eq!(listed[0].record.as_ref().unwrap().phase, GroupPhase::Taking);
    let absent = groups.show("w").await.unwrap_err();
    assert_eq!(absent.kind, ErrorKind::NotFound);
    // One that cannot be read is listed, and may be any.
    std::fs::write(
        root.path().join(entry.uuid.to_string()).join("spec-1.json"),
        "{",
    )
    .unwrap();
    let listed = groups.list().await.unwrap();
    assert!(
        listed[0].record.is_none() && listed[0].trouble.as_ref().unwrap().contains("spec-1.json")
    );
    let absent = groups.show("w").await.unwrap_err();
    assert_eq!(absent.kind, ErrorKind::Failed);
}

#[tokio::test]
async fn takeover_is_for_members_that_do_not_serve() {
    let (root, path, groups, entry) = made(false).await;
    let taken = groups.take_over("v").await.unwrap();
    assert_eq!(*lock(&path.taken), [(entry.uuid, 1)]);
    assert_eq!(taken.here.unwrap().role, GroupRole::Serves);
    let again = groups.take_over("v").await.unwrap_err();
    assert!(again.message.contains("serves it already"), "{again}");
    // The record of a group in which this node is no member.
    let store = RecordStore::new(root.path(), Member(1));
    let spec = store.spec(entry.uuid).unwrap().unwrap();
    let other = GroupPlan {
        primary: Member(2),
        others: Nodes::from([Member(1)]),
        request: request(&["b", "a"]),
    };
    let spec = VolumeSpecFile {
        uuid: Uuid::from_u128(5),
        name: "w".parse().unwrap(),
        ..spec
    };
    store
        .create(&spec, &other.first_record(GroupRecord::FIRST))
        .unwrap();
    let refused = groups.take_over("w").await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    assert!(
        refused.message.contains("no member") && refused.message.contains("ask one of b"),
        "{refused}"
    );
}

#[tokio::test]
async fn takeover_that_fails_says_why() {
    let (_root, _path, groups, _entry) = made(true).await;
    let failed = groups.take_over("v").await.unwrap_err();
    assert_eq!(failed.message, "too few promises");
}

#[tokio::test]
async fn group_is_made_with_its_volume_and_goes_with_it() {
    let (root, _path, groups, entry) = made(false).await;
    let store = RecordStore::new(root.path(), Member(1));
    let spec = store.spec(entry.uuid).unwrap().unwrap();
    assert_eq!((spec.log, spec.log_bytes), (77, entry.log.bytes));
    assert_eq!(spec.entry(4), entry);
    // Another volume of its name would be shown and taken for it.
    let mut twin = entry.clone();
    twin.uuid = Uuid::from_u128(5);
    let plan = groups
        .plan(&entry.name, &create(&["a", "b"]))
        .unwrap()
        .unwrap();
    let refused = groups
        .found(&twin, 78, GroupRecord::FIRST, plan)
        .await
        .unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    // Whoever serves it may change it, and the others know that then.
    let mut larger = entry.clone();
    larger.bytes *= 2;
    groups.change(&larger).await.unwrap();
    groups.change(&larger).await.unwrap();
    let spec = store.spec(entry.uuid).unwrap().unwrap();
    assert_eq!((spec.revision, spec.bytes), (2, larger.bytes));
    let taking = store.read(entry.uuid).unwrap().unwrap().taking(Member(1));
    store.propose(entry.uuid, &taking);
    let refused = groups.change(&entry).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    groups.remove(&entry, false).await.unwrap();
    assert_eq!(groups.list().await.unwrap(), []);
    for node in [1, 2, 3] {
        let store = RecordStore::new(root.path(), Member(node));
        assert!(!store.list().unwrap().is_empty());
        store.gone(entry.uuid).unwrap();
    }
    assert!(store.list().unwrap().is_empty());
    groups.gone(&entry).await;
    let alone = Entry {
        is_replicated: false,
        ..entry
    };
    groups.remove(&alone, false).await.unwrap();
    assert_eq!(groups.list().await.unwrap(), []);
}

#[test]
fn first_record_of_a_plan_may_be_followed_by_a_taking() {
    let plan = GroupPlan {
        primary: Member(1),
        others: Nodes::from([Member(2)]),
        request: request(&["a", "b"]),
    };
    let first = plan.first_record(GroupRecord::FIRST);
    assert_eq!(first.floor, Point::default());
    assert_eq!(first.check_next(&first.taking(Member(1))), Ok(()));
}

fn change(nodes: &[&str]) -> GroupChange {
    GroupChange {
        nodes: Some(nodes.iter().map(ToString::to_string).collect()),
        ..GroupChange::default()
    }
}

/// The same groups, whose volume this node serves.
async fn served() -> (tempfile::TempDir, Arc<FakePath>, Groups) {
    let (root, path, groups, _) = made(false).await;
    groups.take_over("v").await.unwrap();
    (root, path, groups)
}

#[tokio::test]
async fn change_is_handed_on_with_what_stays_as_it_is() {
    let (_root, path, groups) = served().await;
    let nodes = |nodes: &[u16]| nodes.iter().copied().map(Member).collect::<Nodes>();
    let asked = [
        change(&["c", "a"]),
        GroupChange {
            replicas: Some(1),
            ..GroupChange::default()
        },
        GroupChange {
            ack: Some(Ack::All),
            copies_min: Some(2),
            ..GroupChange::default()
        },
    ];
    for asked in asked {
        groups.set("v", asked).await.unwrap();
    }
    // What is so already is not asked for.
    groups.set("v", change(&["a", "b", "c"])).await.unwrap();
    let shapes = lock(&path.shapes);
    let said: Vec<_> = (shapes.iter())
        .map(|shape| (shape.nodes.clone(), shape.ack, shape.copies_min))
        .collect();
    assert_eq!(
        said,
        [
            (nodes(&[1, 3]), AckLevel::Majority, 1),
            (nodes(&[1]), AckLevel::Majority, 1),
            (nodes(&[1, 2, 3]), AckLevel::All, 2),
        ]
    );
}

#[tokio::test]
async fn change_that_cannot_be_is_refused() {
    let (_root, path, groups) = served().await;
    let of = |edit: &dyn Fn(&mut GroupChange)| {
        let mut change = GroupChange::default();
        edit(&mut change);
        change
    };
    for (asked, part) in [
        (of(&|change| change.replicas = Some(0)), "1, 2 or 3"),
        (of(&|change| change.replicas = Some(4)), "1, 2 or 3"),
        (of(&|change| change.replicas = Some(2)), "on which nodes"),
        (change(&[]), "from 1 to 3, and 0 are named"),
        (
            change(&["a", "d"]),
            "there is no node d: the nodes are a, b, c",
        ),
        (change(&["a", "b", "b"]), "named twice"),
        (change(&["b", "c"]), "take it over first"),
        (
            of(&|change| {
                change.replicas = Some(3);
                change.nodes = Some(vec!["a".to_owned(), "b".to_owned()]);
            }),
            "3 replicas are on as many nodes",
        ),
        (of(&|change| change.copies_min = Some(0)), "from 1 to"),
        (of(&|change| change.copies_min = Some(4)), "from 1 to"),
        (
            of(&|change| {
                change.copies_min = Some(2);
                change.when_short = Some(hdcs_api::groups::WhenShort::Error);
            }),
            "all writes would fail",
        ),
    ] {
        let refused = groups.set("v", asked).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Invalid);
        assert!(refused.message.contains(part), "{}", refused.message);
    }
    assert!(lock(&path.shapes).is_empty());
}

#[tokio::test]
async fn change_is_asked_for_where_the_volume_is_served() {
    let (root, _path, groups, entry) = made(false).await;
    let refused = groups.set("v", change(&["a"])).await.unwrap_err();
    assert!(
        refused.message.contains("does not serve it yet"),
        "{refused}"
    );
    let store = RecordStore::new(root.path(), Member(2));
    let record = store.read(entry.uuid).unwrap().unwrap();
    let seat = Seat {
        member: Member(2),
        joined: 1,
    };
    let taking = record.join(seat).taking(Member(2));
    let members = taking.config.members.clone();
    for (next, part) in [
        (record.join(seat), "does not serve it yet"),
        (taking.clone(), "node b takes it over"),
        (
            taking.serving(Member(2), members, record.floor),
            "node b serves it, and this is node a",
        ),
    ] {
        assert!(matches!(
            store.propose(entry.uuid, &next),
            crate::cluster::records::Proposed::Written
        ));
        let refused = groups.set("v", change(&["a"])).await.unwrap_err();
        assert!(refused.message.contains(part), "{}", refused.message);
    }
}
