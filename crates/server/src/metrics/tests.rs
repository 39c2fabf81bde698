//! The page as a whole, and that REFERENCE.md says what is in it.

use std::collections::BTreeSet;

use super::*;

fn page() -> String {
    page_of(false)
}

/// A page of two volumes, the first of which has all that a volume may have.
fn page_of(has_all: bool) -> String {
    let status: Status = serde_json::from_value(serde_json::json!({
        "version": "0", "pid": 1, "node": "n", "data": "/d", "uptime_ms": 1500,
        "nbd_listen": [], "connections": 0, "volumes": 2, "volumes_by_state": {},
        "dirty_bytes": 0,
        "shards": [hdcs_api::ShardCounters::default()],
        "memory": hdcs_api::Memory::default(),
        "cache": hdcs_api::Cache::default(),
    }))
    .unwrap();
    let volume = |name: &str, open: bool| Volume {
        name: name.to_owned(),
        state: if open { "healthy" } else { "error" }.to_owned(),
        phase: String::new(),
        reason: None,
        trouble_ms: None,
        number: 1,
        uuid: String::new(),
        bytes: 4096,
        backend: String::new(),
        allocated_bytes: None,
        read_only: false,
        mode: hdcs_api::Mode::Cache,
        home_path: None,
        log_path: String::new(),
        log_bytes: 0,
        log_durability: None,
        encryption: None,
        group: None,
        pins: Vec::new(),
        pin_trouble: None,
        benefit: open.then(|| VolumeBenefit {
            miss_us: Some(1500.0),
            ..VolumeBenefit::default()
        }),
        connections: 0,
        shard: None,
        shard_set: None,
        settings: std::collections::BTreeMap::new(),
        overridden: Vec::new(),
        counters: open.then(|| Counters {
            reads: 7,
            store: has_all.then(Default::default),
            home: has_all.then(Default::default),
            ..Counters::default()
        }),
        latency: open.then(Default::default),
        heat: has_all.then(|| hdcs_api::SavedHeat {
            saved_ms: Some(1),
            ..Default::default()
        }),
        scrub: open.then(|| Scrub {
            last: has_all.then(LastScrub::default),
            ..Scrub::default()
        }),
    };
    render(&Scrape {
        node: "n".to_owned(),
        uptime_ms: 1500,
        rss_bytes: 1,
        log_lines_dropped: 0,
        start: has_all.then(|| StartProgress {
            left_ms: Some(2000),
            ..StartProgress::default()
        }),
        shards_up: vec![true],
        status: Some(status),
        volumes: vec![volume("a", true), volume("b", false)],
    })
}

#[test]
fn metrics_of_a_silent_shard_are_what_is_known_without_it() {
    let page = render(&Scrape {
        node: "n".to_owned(),
        uptime_ms: 1500,
        rss_bytes: 1,
        log_lines_dropped: 3,
        start: None,
        shards_up: vec![false],
        status: None,
        volumes: Vec::new(),
    });
    assert!(page.contains("\nhdcs_shard_up{shard=\"0\"} 0\n"), "{page}");
    assert!(
        page.contains("\nhdcs_log_lines_dropped_total 3\n"),
        "{page}"
    );
    assert!(!page.contains("hdcs_volume_state{"), "{page}");
}

#[test]
fn metrics_families_are_whole_and_described_once() {
    let page = page();
    let mut seen = BTreeSet::new();
    let mut family = String::new();
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(!help.is_empty(), "{name}");
            assert!(seen.insert(name.to_owned()), "{name} is described twice");
            family = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(name, family);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
        } else {
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(
                name.starts_with(&family),
                "{line} is not in family {family}"
            );
            let value = line.rsplit(' ').next().unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
}

/// `HDCS_UPDATE=1 cargo test` writes the table of docs/REFERENCE.md.
#[test]
fn metrics_reference_has_not_drifted() {
    let page = page_of(true);
    let mut table = "\n| metric | type | labels | meaning |\n|---|---|---|---|\n".to_owned();
    let mut families = page.split("# HELP ").skip(1).collect::<Vec<_>>();
    families.sort_unstable();
    for family in families {
        let mut lines = family.lines();
        let (name, help) = lines.next().and_then(|line| line.split_once(' ')).unwrap();
        let kind = lines
            .next()
            .and_then(|line| line.rsplit(' ').next())
            .unwrap();
        let mut labels: Vec<&str> = Vec::new();
        for label in lines.flat_map(|line| line.split(['{', ',', '}'])) {
            match label.split_once('=') {
                Some((label, _)) if !labels.contains(&label) => labels.push(label),
                _ => {}
            }
        }
        let labels = labels.join(", ");
        writeln!(table, "| `{name}` | {kind} | {labels} | {help} |").unwrap();
    }
    table.push('\n');
    hdcs_kit::documents::check_section("REFERENCE.md", "metrics", &table);
}

#[test]
fn metrics_say_what_was_counted() {
    let page = page();
    assert!(page.contains("hdcs_volume_requests_total{volume=\"a\",op=\"read\"} 7\n"));
    assert!(page.contains("hdcs_volume_state{volume=\"b\",state=\"error\"} 1\n"));
    assert!(page.contains("hdcs_uptime_seconds 1.5\n"));
    assert!(page.contains("quantile=\"0.9999\"} 0\n"));
    assert!(!page.contains("hdcs_volume_dirty_bytes{volume=\"b\"}"));
}

#[test]
fn metrics_labels_are_escaped() {
    assert_eq!(label("a", "x\"\\\n"), "a=\"x\\\"\\\\\\n\"");
}
