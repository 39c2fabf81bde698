//! `hdcs group …`, `hdcs volume takeover`, and what `hdcs volume create` takes for a group.

use std::io::IsTerminal;
use std::pin::pin;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use hdcs_api::groups::{
    Ack, Group, GroupChange, GroupRecord, GroupRequest, TakeoverWaits, VolumeGroup, WhenShort,
};
use hdcs_server::catalogue::VolumeName;
use hyper::Method;
use indicatif::ProgressBar;

use super::client::Client;
use super::volume::{api_path, said};
use super::{Failure, output, size};

/// How often it is said what a takeover waits for.
const LINE_PERIOD: Duration = Duration::from_secs(1);
/// What stands where nothing is known.
const NOTHING: &str = "-";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the groups of the cluster: the nodes that have copies of a volume's dirty data (experimental)
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the group of one volume, and what this node sees of it (experimental)
    Show {
        /// Name of the volume
        name: VolumeName,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Change the copies of a volume, at the node that serves it: how many, where, and what writes need (experimental)
    Set(Set),
}

#[derive(Args, Debug)]
pub(crate) struct Set {
    /// Name of the volume
    name: VolumeName,
    /// Nodes that have its dirty data, the one that serves included
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    replicas: Option<u8>,
    /// How many of them have a write before it is acknowledged
    #[arg(long, value_name = "LEVEL")]
    ack: Option<Ack>,
    /// Which nodes these are, all of them
    #[arg(long, value_name = "NODE[,NODE…]", value_delimiter = ',')]
    nodes: Option<Vec<String>>,
    /// With fewer of them the volume takes no writes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    copies_min: Option<u8>,
    /// What becomes of writes then
    #[arg(long, value_name = "WHAT")]
    when_short: Option<WhenShort>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The copies that a new volume has on other nodes.
#[derive(Args, Debug, Default)]
pub(crate) struct GroupArguments {
    /// Nodes that have its dirty data, this one included: 2 or 3 need a cluster (experimental) [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    replicas: Option<u8>,
    /// How many of them have a write before it is acknowledged [default: all]
    #[arg(long, value_name = "LEVEL", requires = "replicas")]
    ack: Option<Ack>,
    /// Which nodes these are, this one first
    #[arg(
        long,
        value_name = "NODE[,NODE…]",
        value_delimiter = ',',
        requires = "replicas"
    )]
    nodes: Vec<String>,
    /// With fewer of them the volume takes no writes [default: 1; with majority more than half of the replicas]
    #[arg(long, value_name = "N", requires = "replicas", value_parser = clap::value_parser!(u8).range(1..=3))]
    copies_min: Option<u8>,
    /// What becomes of writes then [default: wait]
    #[arg(long, value_name = "WHAT", requires = "replicas")]
    when_short: Option<WhenShort>,
}

impl GroupArguments {
    /// What is asked for, if it is more than this node's own copy.
    pub(crate) fn request(self) -> Result<Option<GroupRequest>, Failure> {
        let replicas = self.replicas.unwrap_or(1);
        if replicas == 1 {
            let has_more = self.ack.is_some()
                || !self.nodes.is_empty()
                || self.copies_min.is_some()
                || self.when_short.is_some();
            if has_more {
                return Err(Failure::misused(
                    "--ack, --nodes, --copies-min and --when-short are for copies on other nodes: give --replicas 2 or 3, or leave them \
                     out",
                ));
            }
            return Ok(None);
        }
        if self.nodes.is_empty() {
            return Err(Failure::misused(format!(
                "--replicas {replicas} needs the names of {replicas} nodes, this one first: give --nodes"
            )));
        }
        Ok(Some(GroupRequest {
            replicas,
            ack: self.ack.unwrap_or_default(),
            nodes: self.nodes,
            copies_min: self.copies_min,
            when_short: self.when_short.unwrap_or_default(),
        }))
    }
}

#[derive(Args, Debug)]
pub(crate) struct Takeover {
    /// Name of the volume
    name: VolumeName,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(client: &Client, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { json } => {
            let groups: Vec<Group> = client.get("/v1/groups").await?;
            if json {
                return output::json(&groups);
            }
            output::line(&list(&groups));
            Ok(())
        }
        Command::Show { name, json } => {
            let group: Group = client.get(&format!("/v1/groups/{name}")).await?;
            if json {
                return output::json(&group);
            }
            output::line(&show(&group));
            Ok(())
        }
        Command::Set(arguments) => set(client, arguments).await,
    }
}

async fn set(client: &Client, arguments: Set) -> Result<(), Failure> {
    let Set { name, json, .. } = arguments;
    let change = GroupChange {
        replicas: arguments.replicas,
        ack: arguments.ack,
        nodes: arguments.nodes,
        copies_min: arguments.copies_min,
        when_short: arguments.when_short,
    };
    if change == GroupChange::default() {
        return Err(Failure::misused(
            "nothing is to change: give --replicas, --ack, --nodes, --copies-min or --when-short",
        ));
    }
    let path = format!("/v1/groups/{name}");
    // Only to say what has stayed: a volume without a group has none.
    let before: Option<Group> = client.get(&path).await.ok();
    let before = before.and_then(|group| group.record);
    let group: Group = client.request(Method::PATCH, &path, &change).await?;
    said(json, &group, || {
        changed(&group, before.as_ref(), change.copies_min.is_some())
    })
}

/// What a group is that was changed, and was this before; `is_least_said`: how many copies it takes was asked for.
fn changed(group: &Group, before: Option<&GroupRecord>, is_least_said: bool) -> String {
    let Some(record) = &group.record else {
        return format!("the group of volume {} was changed", group.volume);
    };
    let mut text = format!(
        "volume {} is to have {} of its dirty data, at ack {}: on {}",
        group.volume,
        match record.replicas {
            1 => "one copy".to_owned(),
            count => format!("{count} copies"),
        },
        word(record.ack),
        names(&record.members)
    );
    if !record.joiners.is_empty() {
        text += &format!("; {} to be brought up", names(&record.joiners));
    }
    if record.replicas > 1 {
        text += &least(record, before.filter(|_| !is_least_said), is_least_said);
    }
    text
}

/// With how many copies it takes writes, and why so.
fn least(record: &GroupRecord, before: Option<&GroupRecord>, is_said: bool) -> String {
    let least = record.copies_min;
    let mut text = match record.when_short {
        _ if least == 1 => "\nwrites go on while one member is left".to_owned(),
        WhenShort::Wait => format!("\nwith fewer than {least} members writes wait"),
        WhenShort::Error => format!("\nwith fewer than {least} members writes end with an error"),
    };
    text += &match before {
        _ if is_said => String::new(),
        None => " (--copies-min was left out: 1, and with majority more than half)".to_owned(),
        Some(before) if before.copies_min == least => " (--copies-min is as it was)".to_owned(),
        Some(before) => format!(
            " (--copies-min was {}, and cannot be more than the copies)",
            before.copies_min
        ),
    };
    let most = record.replicas / 2 + 1;
    if record.ack == Ack::Majority && least < most {
        text += &format!(
            "\nack majority counts the members that are there: once others were left out, {least} is enough; to have \
             writes wait for {most}, give --copies-min {most}"
        );
    }
    text
}

pub(crate) async fn take_over(client: &Client, arguments: Takeover) -> Result<(), Failure> {
    let Takeover { name, json } = arguments;
    let group = taken(client, &name).await?;
    said(json, &group, || {
        let epoch = group.record.as_ref().map(|record| record.epoch);
        let epoch = epoch.map_or(String::new(), |epoch| format!(", in epoch {epoch}"));
        format!("volume {name} is served by this node now{epoch}")
    })
}

/// Have the node take the group, and say on standard error what it waits for meanwhile.
async fn taken(client: &Client, name: &VolumeName) -> Result<Group, Failure> {
    let path = format!("{}/takeover", api_path(name));
    let mut asked = pin!(client.request(Method::POST, &path, &()));
    let seen = format!("/v1/groups/{name}");
    let begun = Instant::now();
    let bar = std::io::stderr()
        .is_terminal()
        .then(ProgressBar::new_spinner);
    let look = async || {
        tokio::time::sleep(LINE_PERIOD).await;
        client.get::<Group>(&seen).await
    };
    let taken = loop {
        tokio::select! {
            biased;
            taken = &mut asked => break taken,
            // A node that does not say what it waits for says how the takeover ends all the same.
            group = look() => if let Ok(group) = group {
                let seconds = begun.elapsed().as_secs();
                let line = format!("volume {name}: {seconds} s: {}", waits(&group));
                match &bar {
                    Some(bar) => bar.set_message(line),
                    None => output::note(&line),
                }
            }
        }
    };
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(taken?)
}

/// What the node waits for that takes this group.
fn waits(group: &Group) -> String {
    let here = group.here.as_ref();
    let Some(takeover) = here.and_then(|here| here.takeover.as_ref()) else {
        return "waiting for the record that names this node".to_owned();
    };
    let silent = match &takeover.silent[..] {
        [] => String::new(),
        [one] => format!("; {one} has not answered"),
        more => format!("; {} have not answered", more.join(", ")),
    };
    match takeover.waits {
        TakeoverWaits::Record => "waiting for the record to be written".to_owned(),
        TakeoverWaits::Promises => {
            let needed = takeover.promises_needed;
            let count = takeover.promised.len();
            let have = names(&takeover.promised);
            if count as u64 >= needed {
                format!(
                    "has the {needed} promises that it needs ({have}), waits a moment for more{silent}"
                )
            } else {
                format!("waiting for promises: {count} of {needed} ({have}){silent}")
            }
        }
        TakeoverWaits::Copies => {
            let have = names(&takeover.promised);
            format!("bringing {have} to one level{silent}")
        }
        TakeoverWaits::Lease => {
            let left = takeover.lease_ms.unwrap_or(0) as f64 / 1000.0;
            format!(
                "waiting until the last primary may answer no reads any more, {left:.1} s{silent}"
            )
        }
        TakeoverWaits::Opening => {
            "the group is this node's: waiting until the volume is open".to_owned()
        }
    }
}

/// A word of the API as it is typed.
fn word(value: impl serde::Serialize) -> String {
    let word = serde_json::to_value(value).ok();
    let word = word.as_ref().and_then(serde_json::Value::as_str);
    word.unwrap_or(NOTHING).to_owned()
}

fn names(names: &[String]) -> String {
    if names.is_empty() {
        return NOTHING.to_owned();
    }
    names.join(", ")
}

/// The group of a volume in one line.
pub(crate) fn in_words(group: &VolumeGroup) -> String {
    let role = group.role.map_or("has no copy at present".to_owned(), word);
    let mut words = format!(
        "{} of {}: {}; this node {role}; primary {}, epoch {}",
        group.members.len(),
        group.replicas,
        names(&group.members),
        group.primary,
        group.epoch
    );
    if !group.joiners.is_empty() {
        words += &format!("; being brought up: {}", names(&group.joiners));
    }
    words
}

/// The groups, one in a line; under them what is wrong with those that cannot be read.
fn list(groups: &[Group]) -> String {
    let mut table = output::table(&[
        "VOLUME",
        "PHASE",
        "PRIMARY",
        ">EPOCH",
        "MEMBERS",
        "JOINERS",
        "ACK",
        ">REPLICAS",
        "HERE",
    ]);
    let mut troubles = String::new();
    for group in groups {
        let here = group.here.as_ref();
        let here = here.map_or(NOTHING.to_owned(), |here| word(here.role));
        if let Some(record) = &group.record {
            table.add_row([
                group.volume.clone(),
                word(record.phase),
                record.primary.clone(),
                record.epoch.to_string(),
                names(&record.members),
                names(&record.joiners),
                word(record.ack),
                record.replicas.to_string(),
                here,
            ]);
        }
        if let Some(trouble) = &group.trouble {
            troubles += &format!("\n{trouble}");
        }
    }
    output::trimmed(&table) + &troubles
}

/// One group in full.
fn show(group: &Group) -> String {
    let mut table = output::table(&["GROUP OF", &group.volume]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("uuid", group.uuid.clone());
    if let Some(trouble) = &group.trouble {
        row("trouble", trouble.clone());
    }
    if let Some(record) = &group.record {
        row("revision", record.revision.to_string());
        row("epoch", record.epoch.to_string());
        row("phase", word(record.phase));
        row("primary", record.primary.clone());
        row("members", names(&record.members));
        row("joiners", names(&record.joiners));
        row("ack", word(record.ack));
        row("replicas", record.replicas.to_string());
        let short = if record.short {
            ", which are not there"
        } else {
            ""
        };
        let least = format!("{}{short}", record.copies_min);
        row("copies at least", least);
        row("  with fewer, writes", word(record.when_short));
        row("floor, in blocks", record.floor_blocks.to_string());
    }
    let here = group.here.as_ref();
    let of_here = |value: &dyn Fn(&hdcs_api::groups::GroupView) -> String| {
        here.map_or(NOTHING.to_owned(), value)
    };
    row("this node", of_here(&|here| word(here.role)));
    row(
        "  head, in blocks",
        of_here(&|here| here.head_blocks.to_string()),
    );
    row(
        "  durable",
        of_here(&|here| here.durable_blocks.to_string()),
    );
    row(
        "  committed",
        of_here(&|here| {
            let committed = here.committed_blocks;
            committed.map_or(NOTHING.to_owned(), |blocks| blocks.to_string())
        }),
    );
    if let Some(silent_ms) = here.and_then(|here| here.silent_ms) {
        let silent = format!("{:.1} s ago", silent_ms as f64 / 1000.0);
        row("  heard from the primary", silent);
    }
    for other in here.iter().flat_map(|here| &here.others) {
        let (durable, behind) = (other.durable_blocks, size::show(other.behind_bytes));
        let resync = other.resync.map(|resync| {
            let left = resync.seconds_left;
            let left = left.map_or(String::new(), |seconds| format!(", {seconds} s left"));
            let speed = size::show(resync.bytes_per_second);
            format!(", has {} %, {speed}/s{left}", resync.percent)
        });
        row(
            &format!("  node {}", other.node),
            format!(
                "{}, durable {durable}, {behind} behind{}",
                word(other.state),
                resync.unwrap_or_default()
            ),
        );
    }
    output::trimmed(&table)
}

#[cfg(test)]
mod tests {
    use clap::{Parser, ValueEnum};
    use hdcs_api::groups::{
        GroupOther, GroupOtherState, GroupPhase, GroupRecord, GroupRole, GroupView,
    };

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        copies: GroupArguments,
    }

    fn parsed(arguments: &[&str]) -> Result<Option<GroupRequest>, String> {
        let line = ["create"].iter().chain(arguments);
        let line = Line::try_parse_from(line).map_err(|error| error.to_string())?;
        line.copies.request().map_err(|failure| failure.message)
    }

    fn group(here: Option<GroupView>) -> Group {
        Group {
            volume: "v".to_owned(),
            uuid: "6f1c1a52".to_owned(),
            record: Some(GroupRecord {
                revision: 12,
                epoch: 3,
                phase: GroupPhase::Serving,
                primary: "a".to_owned(),
                members: vec!["a".to_owned(), "b".to_owned()],
                joiners: Vec::new(),
                ack: Ack::Majority,
                replicas: 3,
                copies_min: 1,
                when_short: WhenShort::Wait,
                short: false,
                floor_blocks: 77,
            }),
            trouble: None,
            here,
        }
    }

    #[test]
    fn copies_are_what_the_arguments_say() {
        assert_eq!(parsed(&[]), Ok(None));
        assert_eq!(parsed(&["--replicas", "1"]), Ok(None));
        let two = parsed(&["--replicas", "2", "--nodes", "a,b"])
            .unwrap()
            .unwrap();
        assert_eq!((two.replicas, two.ack, two.copies_min), (2, Ack::All, None));
        assert_eq!(two.nodes, ["a", "b"]);
        let all = [
            "--replicas",
            "3",
            "--nodes",
            "a,b,c",
            "--ack",
            "majority",
            "--copies-min",
            "2",
        ];
        let three = parsed(&all).unwrap().unwrap();
        assert_eq!(
            (three.replicas, three.ack, three.copies_min),
            (3, Ack::Majority, Some(2))
        );
    }

    #[test]
    fn copies_that_contradict_themselves_are_refused() {
        for (arguments, part) in [
            (&["--replicas", "2"][..], "needs the names of 2 nodes"),
            (
                &["--replicas", "1", "--ack", "one"],
                "give --replicas 2 or 3",
            ),
            (
                &["--replicas", "1", "--nodes", "a"],
                "give --replicas 2 or 3",
            ),
            (
                &["--replicas", "1", "--copies-min", "1"],
                "give --replicas 2 or 3",
            ),
            (&["--ack", "all"], "--replicas"),
            (&["--nodes", "a,b"], "--replicas"),
            (&["--replicas", "4", "--nodes", "a,b,c,d"], "1..=3"),
            (&["--replicas", "0"], "1..=3"),
            (
                &["--replicas", "2", "--nodes", "a,b", "--ack", "none"],
                "all, majority, one",
            ),
        ] {
            let error = parsed(arguments).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn takeover_says_whom_and_what_it_waits_for() {
        let mut one = group(None);
        assert!(waits(&one).contains("the record that names this node"));
        let mut says = |waits_for, silent: &[&str], lease_ms| {
            one.here = Some(GroupView {
                role: GroupRole::Takes,
                head_blocks: 5,
                durable_blocks: 5,
                committed_blocks: None,
                others: Vec::new(),
                takeover: Some(hdcs_api::groups::Takeover {
                    waits: waits_for,
                    promised: vec!["b".to_owned()],
                    silent: silent.iter().map(ToString::to_string).collect(),
                    promises_needed: 2,
                    lease_ms,
                }),
                silent_ms: None,
            });
            waits(&one)
        };
        for (waits_for, silent, lease_ms, line) in [
            (
                TakeoverWaits::Promises,
                &["a", "c"][..],
                None,
                "waiting for promises: 1 of 2 (b); a, c have not answered",
            ),
            (TakeoverWaits::Copies, &[], None, "bringing b to one level"),
            (
                TakeoverWaits::Lease,
                &["a"],
                Some(1_240),
                "waiting until the last primary may answer no reads any more, 1.2 s; a has not answered",
            ),
        ] {
            assert_eq!(says(waits_for, silent, lease_ms), line);
        }
    }

    #[test]
    fn every_ack_level_is_typed_as_it_is_shown() {
        for level in Ack::value_variants() {
            let typed = level.to_possible_value().unwrap();
            assert_eq!(typed.get_name(), word(level));
        }
    }

    #[test]
    fn group_that_this_node_has_no_part_in_is_shown_with_dashes() {
        let listed = list(&[group(None)]);
        let last = listed.lines().last().unwrap();
        let words: Vec<_> = last.split_whitespace().collect();
        assert_eq!(
            words,
            [
                "v", "serving", "a", "3", "a,", "b", "-", "majority", "3", "-"
            ]
        );
        let shown = show(&group(None));
        let lines: Vec<String> = shown
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        for line in [
            "GROUP OF v",
            "revision 12",
            "floor, in blocks 77",
            "this node -",
        ] {
            assert!(lines.iter().any(|found| found == line), "{shown}");
        }
        let dashes = shown.lines().filter(|line| line.ends_with(" -"));
        assert_eq!(dashes.count(), 5, "{shown}");
    }

    #[test]
    fn group_is_shown_with_what_this_node_sees() {
        let here = GroupView {
            role: GroupRole::Serves,
            head_blocks: 120,
            durable_blocks: 110,
            committed_blocks: Some(100),
            others: vec![GroupOther {
                node: "b".to_owned(),
                state: GroupOtherState::InStep,
                durable_blocks: 105,
                behind_bytes: 15 << 12,
                resync: None,
            }],
            takeover: None,
            silent_ms: Some(1_234),
        };
        let shown = show(&group(Some(here)));
        for part in [
            "serves",
            "120",
            "110",
            "100",
            "node b",
            "in-step, durable 105, 60 KiB behind",
            "1.2 s ago",
        ] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn group_that_cannot_be_read_says_why() {
        let broken = Group {
            volume: String::new(),
            record: None,
            trouble: Some("records of groups: spec.json: damaged".to_owned()),
            ..group(None)
        };
        for text in [list(std::slice::from_ref(&broken)), show(&broken)] {
            assert!(text.contains("spec.json: damaged"), "{text}");
        }
    }
}
