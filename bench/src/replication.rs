//! What copies of write logs on another node cost: two nodes of a static cluster on this machine, volumes with a copy on
//! the other node beside volumes without, under the same loads in turn.
//!
//! | part | what is compared |
//! |---|---|
//! | writes | durable writes with two copies (`all`) and without, at depth 32 and 1; processor time of both nodes |
//! | memory | the same, with all files in memory |
//! | apart | the same, with a processor for the node that serves, and one for the other node and the client |
//! | tls | with copies, between nodes that speak TLS and nodes that do not |
//! | reads | what the DRAM and the SSD tier answer |
//! | alone | a volume without copies, on a node of a cluster and on one without `[cluster]` |
//! | resync | writes while the other node's copy is brought up; how fast that is, beside sequential writes of the device |
//!
//! Both nodes and the client share the machine's processors and its disk, so a write with a copy has half of each at
//! most: what a second machine would give is not measured.

use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, thread};

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;

use crate::bars::{self, Bar, median};
use crate::failure::{Context, Failure, Result};
use crate::fio::{Load, Outcome, Target};
use crate::lab::Lab;
use crate::node::{Node, VolumeOptions};
use crate::options::Places;
use crate::process;
use crate::results::Directory;

/// The volumes.
const DISK_BYTES: u64 = 1 << 30;
/// Room for what a turn writes.
const LOG_BYTES: u64 = 768 << 20;
/// What a turn writes at most.
const WRITTEN_BYTES_MAX: u64 = 384 << 20;
/// A turn at most.
const SECONDS: u32 = 4;
/// The range of reads that DRAM has, and of those that only the SSD tier has.
const DRAM_SPAN_BYTES: u64 = 64 << 20;
const SSD_SPAN_BYTES: u64 = 384 << 20;
/// The log of the volume that is brought up, and what it holds then.
const RESYNC_LOG_BYTES: u64 = 4 << 30;
const RESYNC_BYTES: u64 = 768 << 20;
/// How long a copy may take to be brought up.
const RESYNC_MAX: Duration = Duration::from_mins(2);
const CLUSTER: &str = "0b7f6f0e-5f0a-4c55-9d57-3f2c4d1f9a00";
/// No destage beside the turns, little DRAM, nothing read ahead.
const CONFIG: &str = "memory_max_mib = 384\ncache_total_size_mib = 1024\ndestage_age_max_ms = 86400000\n\
                      dirty_ratio_min = 80\ndirty_ratio_max = 90\n";

/// How it runs.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    places: Places,
    /// Turns of each; the median of their ratios counts.
    #[arg(long, default_value_t = 3)]
    repeat: u32,
    /// Only these parts.
    #[arg(long, value_delimiter = ',')]
    part: Vec<Part>,
    /// Where files lie that are to be in memory.
    #[arg(long, default_value = "/dev/shm")]
    memory: PathBuf,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Writes,
    Memory,
    Apart,
    Tls,
    Reads,
    Alone,
    Resync,
}

/// One load on one volume.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Turn {
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    p9999_us: f64,
    /// Processor time of the node that serves, for a request.
    own_cpu_us: f64,
    /// The same of the other node.
    other_cpu_us: f64,
}

/// What two kinds reached, in turn.
#[derive(Debug, Serialize)]
struct Row {
    what: String,
    turns: [Vec<Turn>; 2],
}

impl Row {
    /// The median of the ratios of turns that followed one another.
    fn ratio(&self, of: impl Fn(&Turn) -> f64) -> f64 {
        let pairs = self.turns[0].iter().zip(&self.turns[1]);
        median(pairs.map(|(one, other)| of(one) / of(other)))
    }

    fn difference(&self, of: impl Fn(&Turn) -> f64) -> f64 {
        let pairs = self.turns[0].iter().zip(&self.turns[1]);
        median(pairs.map(|(one, other)| of(one) - of(other)))
    }

    fn line(&self) -> String {
        let side = |index: usize| {
            let of = |pick: fn(&Turn) -> f64| median(self.turns[index].iter().map(pick));
            format!(
                "{:>7.0} IOPS, p50 {:>5.0} µs, p99 {:>5.0} µs, p99.99 {:>6.0} µs, {:>5.1} + {:>4.1} µs CPU",
                of(|turn| turn.iops),
                of(|turn| turn.p50_us),
                of(|turn| turn.p99_us),
                of(|turn| turn.p9999_us),
                of(|turn| turn.own_cpu_us),
                of(|turn| turn.other_cpu_us),
            )
        };
        format!(
            "{:<44} {} | {} | {:.2}",
            self.what,
            side(0),
            side(1),
            self.ratio(|turn| turn.iops)
        )
    }
}

/// Nodes `a` and `b` of a cluster, whose files lie in a lab.
struct Pair<'a> {
    lab: &'a Lab,
    name: &'static str,
    configs: [String; 2],
    nodes: [Node; 2],
}

impl<'a> Pair<'a> {
    /// Start both nodes. If they are to be apart, what this process starts from then on stays with the second one.
    fn start(
        lab: &'a Lab,
        name: &'static str,
        with_tls: bool,
        apart: Option<[usize; 2]>,
    ) -> Result<Self> {
        let records = lab.path(&format!("{name}-records"));
        fs::create_dir_all(&records).context(records.display())?;
        let ports = [free_port()?, free_port()?];
        let mut configs = [String::new(), String::new()];
        for (index, config) in configs.iter_mut().enumerate() {
            *config = cluster_config(&records, ports, index);
            if with_tls {
                config.push_str(&tls_config(lab, index)?);
            }
            config.push_str(&nodes_config(ports));
        }
        let start = |index: usize| {
            if let Some(processors) = apart {
                process::keep_to(&[processors[index]])?;
            }
            Self::node(lab, name, &configs, index)
        };
        let nodes = [start(0)?, start(1)?];
        Ok(Self {
            lab,
            name,
            configs,
            nodes,
        })
    }

    fn node(lab: &Lab, name: &str, configs: &[String; 2], index: usize) -> Result<Node> {
        lab.node(
            &format!("{name}-{}", ["a", "b"][index]),
            Some(&configs[index]),
        )
    }

    /// Make a volume with a copy on each node, or one of the first node's alone.
    fn create(&self, volume: &str, log_bytes: u64, with_copies: bool) -> Result<()> {
        let image = self.lab.path(&format!("{}-{volume}.img", self.name));
        let options = VolumeOptions::over_file(volume, &image, DISK_BYTES, log_bytes);
        if !with_copies {
            return self.nodes[0].create(&options);
        }
        let (size, log) = (DISK_BYTES.to_string(), log_bytes.to_string());
        let backend = options.backend.unwrap_or_default();
        let mut arguments = vec![
            "volume",
            "create",
            volume,
            "--size",
            &size,
            "--log-size",
            &log,
        ];
        arguments.extend(["--persist", options.persist, "--backend", &backend]);
        arguments.extend(["--replicas", "2", "--ack", "all", "--nodes", "a,b"]);
        self.nodes[0].command(&arguments)?;
        self.wait_whole(volume).map(drop)
    }

    /// Wait until both nodes are members; how long that took, once the other one was reached.
    fn wait_whole(&self, volume: &str) -> Result<Duration> {
        let since = Instant::now();
        let mut began = None;
        loop {
            let text = self.nodes[0].command(&["group", "show", volume, "--json"])?;
            let shown: Value = serde_json::from_str(&text).context("hdcs group show")?;
            if shown["record"]["members"].as_array().map_or(0, Vec::len) == 2 {
                return Ok(began.unwrap_or(since).elapsed());
            }
            let state = shown["here"]["others"][0]["state"].as_str();
            if state.is_some_and(|state| state != "away") {
                began.get_or_insert_with(Instant::now);
            }
            if since.elapsed() > RESYNC_MAX {
                return Err(Failure::new(format!(
                    "{volume}: its copy is not whole after {RESYNC_MAX:?}"
                )));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn discard(&self, volume: &str, with_copies: bool) -> Result<()> {
        self.nodes[0].discard(volume)?;
        // The other node lets go of its copy by itself.
        let since = Instant::now();
        while with_copies
            && self.nodes[1]
                .command(&["volume", "list", "--json"])?
                .contains(volume)
        {
            if since.elapsed() > RESYNC_MAX {
                return Err(Failure::new(format!(
                    "{volume}: its copy is still there after {RESYNC_MAX:?}"
                )));
            }
            thread::sleep(Duration::from_millis(20));
        }
        let image = self.lab.path(&format!("{}-{volume}.img", self.name));
        fs::remove_file(&image).context(image.display())
    }

    fn measure(&self, volume: &str, load: &Load, raw: &Path) -> Result<Turn> {
        let cpu = |index: usize| Ok::<_, Failure>(self.nodes[index].usage()?.cpu_us);
        let before = [cpu(0)?, cpu(1)?];
        let outcome = load.run(&self.nodes[0].target(volume), raw)?;
        let used = [cpu(0)? - before[0], cpu(1)? - before[1]];
        Ok(turn_of(&outcome, used))
    }

    fn stop(self) -> Result<()> {
        self.nodes.into_iter().try_for_each(Node::stop)
    }
}

fn turn_of(outcome: &Outcome, cpu_us: [f64; 2]) -> Turn {
    let requests = outcome.requests as f64;
    Turn {
        iops: outcome.iops,
        p50_us: outcome.latency.p50,
        p99_us: outcome.latency.p99,
        p9999_us: outcome.latency.p9999,
        own_cpu_us: cpu_us[0] / requests,
        other_cpu_us: cpu_us[1] / requests,
    }
}

/// A port of loopback that nothing listens on at present.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("loopback")?;
    Ok(listener.local_addr().context("loopback")?.port())
}

fn node_id(index: usize) -> String {
    format!("0b7f6f0e-5f0a-4c55-9d57-3f2c4d1f9a0{}", index + 1)
}

fn cluster_config(records: &Path, ports: [u16; 2], index: usize) -> String {
    format!(
        "{CONFIG}[cluster]\nid = \"{CLUSTER}\"\nnode = \"{}\"\nlisten = \"127.0.0.1:{}\"\nrecords = \"{}\"\n",
        ["a", "b"][index],
        ports[index],
        records.display()
    )
}

fn nodes_config(ports: [u16; 2]) -> String {
    let mut text = String::new();
    for (index, port) in ports.iter().enumerate() {
        let _ = write!(
            text,
            "[cluster.nodes.{}]\nnumber = {}\nid = \"{}\"\naddress = \"127.0.0.1:{port}\"\n",
            ["a", "b"][index],
            index + 1,
            node_id(index)
        );
    }
    text
}

/// The TLS keys of a node, whose certificate is made.
fn tls_config(lab: &Lab, index: usize) -> Result<String> {
    let (authority, node) = (lab.path("tls"), ["a", "b"][index]);
    let script = |arguments: &[&str]| {
        let mut command = Command::new("testenv/tls.sh");
        process::output_of(command.arg(&authority).args(arguments)).map(drop)
    };
    if !authority.exists() {
        script(&[])?;
    }
    let name = format!("DNS:{}.{CLUSTER}.hdcs", node_id(index));
    script(&["node", node, &name])?;
    let at = authority.display();
    Ok(format!(
        "tls_certificate = \"{at}/{node}/node-cert.pem\"\ntls_key = \"{at}/{node}/node-key.pem\"\n\
         tls_authority = \"{at}/ca-cert.pem\"\n"
    ))
}

fn writes(depth: u32) -> Load {
    Load {
        depth,
        bytes_max: Some(WRITTEN_BYTES_MAX),
        seconds: Some(SECONDS),
        ..Load::random("randwrite", DISK_BYTES)
    }
}

/// Turns of two kinds, the first of which is compared with the second; they take turns in who is first.
fn alternate(
    what: &str,
    repeat: u32,
    mut turn: impl FnMut(usize, &str) -> Result<Turn>,
) -> Result<Row> {
    let mut turns = [Vec::new(), Vec::new()];
    for repetition in 0..repeat {
        for index in 0..2 {
            let index = (index + repetition as usize) % 2;
            let kind = ["one", "other"][index];
            let place: String = what.chars().filter(char::is_ascii_alphanumeric).collect();
            let name = format!("{kind}-{place}-{repetition}");
            turns[index].push(turn(index, &name)?);
        }
    }
    let what = what.to_owned();
    let row = Row { what, turns };
    eprintln!("bench: {}", row.line());
    Ok(row)
}

/// What bringing up a copy is like.
#[derive(Clone, Copy, Debug, Serialize)]
struct Resync {
    /// Requests a second of a client meanwhile, by those before.
    client: f64,
    /// How fast it is beside that client, and while nobody writes.
    busy_mib_s: f64,
    quiet_mib_s: f64,
    /// Sequential writes of the device, alone and while as much is read from it.
    device_mib_s: f64,
    device_copies_mib_s: f64,
}

/// What a copy adds to a write at depth 1, and a durable write of the device, in microseconds.
#[derive(Debug, Serialize)]
struct Floor {
    place: String,
    more_us: f64,
    durable_write_us: f64,
}

/// Everything that was found.
#[derive(Default, Serialize)]
struct Findings {
    rows: Vec<Row>,
    floors: Vec<Floor>,
    resync: Option<Resync>,
    #[serde(skip)]
    bars: Vec<Bar>,
}

struct Bench<'a> {
    options: &'a Options,
    results: Directory,
    found: Findings,
}

/// Measure it.
pub fn run(options: &Options) -> Result<()> {
    let mut bench = Bench {
        options,
        results: Directory::create(&options.places.results)?,
        found: Findings::default(),
    };
    let on_disk = Lab::new(&options.places)?;
    let wants = |part| options.part.is_empty() || options.part.contains(&part);
    let needs_pair = [
        Part::Writes,
        Part::Tls,
        Part::Reads,
        Part::Alone,
        Part::Resync,
    ];
    if needs_pair.into_iter().any(wants) {
        let mut pair = Pair::start(&on_disk, "plain", false, None)?;
        if wants(Part::Writes) {
            bench.writes(&pair, "disk", 0.5, 0.7)?;
        }
        if wants(Part::Tls) {
            bench.tls(&pair)?;
        }
        if wants(Part::Reads) {
            bench.reads(&pair)?;
        }
        if wants(Part::Alone) {
            bench.alone(&pair)?;
        }
        if wants(Part::Resync) {
            pair = bench.resync(pair)?;
        }
        pair.stop()?;
    }
    if wants(Part::Memory) {
        let in_memory = Lab::at(&options.places.hdcs, &options.memory)?;
        let pair = Pair::start(&in_memory, "memory", false, None)?;
        bench.writes(&pair, "memory", 0.6, 0.8)?;
        pair.stop()?;
    }
    if wants(Part::Apart) {
        let all = process::processors()?;
        let &[first, second, ..] = &all[..] else {
            return Err(Failure::new("part `apart`: it takes two processors"));
        };
        let in_memory = Lab::at(&options.places.hdcs, &options.memory)?;
        let pair = Pair::start(&in_memory, "apart", false, Some([first, second]))?;
        bench.writes(&pair, "memory, apart", 0.6, 0.8)?;
        pair.stop()?;
        process::keep_to(&all)?;
    }
    bench.report()
}

impl Bench<'_> {
    fn writes(&mut self, pair: &Pair, place: &str, must: f64, aim: f64) -> Result<()> {
        for depth in [32, 1] {
            let before = self.durable_write_us(pair)?;
            let what = format!("durable 4k randwrite QD{depth}, {place}: copies, none");
            let row = self.copies_or_none(pair, &what, &writes(depth))?;
            if depth == 1 {
                let more = row.difference(|turn| turn.p50_us);
                let floor = median([before, self.durable_write_us(pair)?]);
                self.found.floors.push(Floor {
                    place: place.to_owned(),
                    more_us: more,
                    durable_write_us: floor,
                });
                let what = format!("µs that a copy adds at QD1, beside a durable write, {place}");
                self.bar(Bar::at_most(what, Some(more - floor), 60.0, Some(30.0)));
            } else {
                let ratio = row.ratio(|turn| turn.iops);
                let what = format!("IOPS at QD32 with copies, of those without, {place}");
                self.bar(Bar::at_least(what, Some(ratio), must, Some(aim)));
                let with = &row.turns[0];
                let cpu = median(with.iter().map(|turn| turn.other_cpu_us / turn.own_cpu_us));
                let what = format!("processor time of the member, of the primary's, {place}");
                self.bar(Bar::at_most(what, Some(cpu), 0.5, Some(0.3)));
            }
            self.found.rows.push(row);
        }
        Ok(())
    }

    /// A durable 4 KiB write of the device where the nodes' files lie, one after another on a file that was written before:
    /// its median, in microseconds.
    fn durable_write_us(&self, pair: &Pair) -> Result<f64> {
        let file = Target::File(pair.lab.path("floor"));
        Load::fill(DRAM_SPAN_BYTES).run(&file, &self.results.raw("floor-fill"))?;
        let load = Load {
            durable: true,
            seconds: Some(1),
            ..Load::random("randwrite", DRAM_SPAN_BYTES)
        };
        Ok(load.run(&file, &self.results.raw("floor"))?.latency.p50)
    }

    fn copies_or_none(&self, pair: &Pair, what: &str, load: &Load) -> Result<Row> {
        alternate(what, self.options.repeat, |index, name| {
            let with_copies = index == 0;
            pair.create(name, LOG_BYTES, with_copies)?;
            let turn = pair.measure(name, load, &self.results.raw(name))?;
            pair.discard(name, with_copies)?;
            Ok(turn)
        })
    }

    fn tls(&mut self, plain: &Pair) -> Result<()> {
        let tls = Pair::start(plain.lab, "tls", true, None)?;
        let what = "durable 4k randwrite QD32 with copies: TLS, plain";
        let row = alternate(what, self.options.repeat, |index, name| {
            let pair = [&tls, plain][index];
            pair.create(name, LOG_BYTES, true)?;
            let turn = pair.measure(name, &writes(32), &self.results.raw(name))?;
            pair.discard(name, true)?;
            Ok(turn)
        })?;
        let ratio = row.ratio(|turn| turn.iops);
        let what = "IOPS with copies over TLS, of those over plain TCP";
        self.bar(Bar::at_least(what, Some(ratio), 0.85, None));
        self.found.rows.push(row);
        tls.stop()
    }

    fn reads(&mut self, pair: &Pair) -> Result<()> {
        for (tier, span) in [("DRAM", DRAM_SPAN_BYTES), ("SSD", SSD_SPAN_BYTES)] {
            let load = Load {
                depth: 32,
                seconds: Some(SECONDS),
                ..Load::random("randread", span)
            };
            let what = format!("4k randread QD32, {tier}: copies, none");
            let row = alternate(&what, self.options.repeat, |index, name| {
                let with_copies = index == 0;
                pair.create(name, LOG_BYTES, with_copies)?;
                let node = &pair.nodes[0];
                Load::fill(span).run(
                    &node.target(name),
                    &self.results.raw(&format!("{name}-fill")),
                )?;
                node.flush(name)?;
                if tier == "SSD" {
                    node.command(&["volume", "evict", name])?;
                    node.command(&["volume", "promote", name, "--length", &span.to_string()])?;
                } else {
                    pair.lab.warm(&node.target(name), span)?;
                }
                let turn = pair.measure(name, &load, &self.results.raw(name))?;
                pair.discard(name, with_copies)?;
                Ok(turn)
            })?;
            let ratio = row.ratio(|turn| turn.iops);
            let what = format!("reads with copies, of those without, {tier} tier");
            self.bar(Bar::at_least(what, Some(ratio), 0.97, None));
            self.found.rows.push(row);
        }
        Ok(())
    }

    fn alone(&mut self, pair: &Pair) -> Result<()> {
        let alone = pair.lab.node("alone", Some(CONFIG))?;
        let what = "durable 4k randwrite QD32, no copies: [cluster], none";
        let row = alternate(what, self.options.repeat, |index, name| {
            let raw = self.results.raw(name);
            if index == 0 {
                pair.create(name, LOG_BYTES, false)?;
                let turn = pair.measure(name, &writes(32), &raw)?;
                pair.discard(name, false)?;
                return Ok(turn);
            }
            let image = pair.lab.path(&format!("alone-{name}.img"));
            alone.create(&VolumeOptions::over_file(
                name, &image, DISK_BYTES, LOG_BYTES,
            ))?;
            let before = alone.usage()?.cpu_us;
            let outcome = writes(32).run(&alone.target(name), &raw)?;
            let turn = turn_of(&outcome, [alone.usage()?.cpu_us - before, 0.0]);
            alone.discard(name)?;
            fs::remove_file(&image).context(image.display())?;
            Ok(turn)
        })?;
        let ratio = row.ratio(|turn| turn.iops);
        let what = "a volume without copies on a node of a cluster, of one on a node alone";
        self.bar(Bar::at_least(what, Some(ratio), 0.97, None));
        self.found.rows.push(row);
        alone.stop()
    }

    /// The other node is gone while much is written, and comes back: while clients write, and while nobody does.
    fn resync<'b>(&mut self, pair: Pair<'b>) -> Result<Pair<'b>> {
        let device = pair.lab.path("device");
        let fill = Load::fill(RESYNC_BYTES);
        let bytes_s = |outcome: &Outcome| outcome.iops * fill.block_bytes as f64;
        let target = Target::File(device.clone());
        let written = fill.run(&target, &self.results.raw("device"))?;
        let device_bytes_s = bytes_s(&written);
        // One disk is read for one node and written for the other one.
        let beside = pair.lab.path("beside");
        let (read, written) = thread::scope(|scope| {
            let read = Load { rw: "read", ..fill };
            let raw = self.results.raw("device-read");
            let read = scope.spawn(move || read.run(&target, &raw));
            let written = fill.run(
                &Target::File(beside.clone()),
                &self.results.raw("device-beside"),
            );
            (read.join(), written)
        });
        let read = read.map_err(|_| Failure::new("reading the device panicked"))??;
        let copied_bytes_s = bytes_s(&read).min(bytes_s(&written?));
        for path in [&device, &beside] {
            fs::remove_file(path).context(path.display())?;
        }
        pair.create("resync", RESYNC_LOG_BYTES, true)?;
        let load = Load {
            bytes_max: Some(RESYNC_BYTES / 2),
            ..writes(32)
        };
        let healthy = pair.measure("resync", &load, &self.results.raw("healthy"))?;
        let pair = self.lack(pair, "busy")?;
        let (during, took) = thread::scope(|scope| {
            let whole = scope.spawn(|| pair.wait_whole("resync"));
            let during = pair.measure("resync", &load, &self.results.raw("during"));
            (during, whole.join())
        });
        let client = during?.iops / healthy.iops;
        let mib_s = |took: Duration| (RESYNC_BYTES >> 20) as f64 / took.as_secs_f64();
        let took = took.map_err(|_| Failure::new("waiting for a copy panicked"))??;
        let pair = self.lack(pair, "quiet")?;
        let quiet = mib_s(pair.wait_whole("resync")?);
        let speed = quiet * f64::from(1 << 20) / device_bytes_s;
        self.found.resync = Some(Resync {
            client,
            busy_mib_s: mib_s(took),
            quiet_mib_s: quiet,
            device_mib_s: device_bytes_s / f64::from(1 << 20),
            device_copies_mib_s: copied_bytes_s / f64::from(1 << 20),
        });
        let what = "IOPS while a copy is brought up, of those before";
        self.bar(Bar::at_least(what, Some(client), 0.7, None));
        let what = "bringing up a copy while nobody writes, of the device's sequential writes";
        self.bar(Bar::at_least(what, Some(speed), 0.5, None));
        pair.discard("resync", true)?;
        Ok(pair)
    }

    /// The other node is killed, lacks much, and is started again.
    fn lack<'b>(&self, pair: Pair<'b>, name: &str) -> Result<Pair<'b>> {
        let Pair {
            lab,
            name: pair_name,
            configs,
            nodes: [a, b],
        } = pair;
        b.kill()?;
        let raw = self.results.raw(&format!("lacks-{name}"));
        Load::fill(RESYNC_BYTES).run(&a.target("resync"), &raw)?;
        let b = Pair::node(lab, pair_name, &configs, 1)?;
        Ok(Pair {
            lab,
            name: pair_name,
            configs,
            nodes: [a, b],
        })
    }

    fn bar(&mut self, bar: Bar) {
        self.found.bars.push(bar);
    }

    fn report(self) -> Result<()> {
        let mut text = String::new();
        for row in &self.found.rows {
            let _ = writeln!(text, "{}", row.line());
        }
        for floor in &self.found.floors {
            let _ = writeln!(
                text,
                "{}: a copy adds {:.0} µs at QD1; a durable write of the device takes {:.0} µs",
                floor.place, floor.more_us, floor.durable_write_us
            );
        }
        if let Some(resync) = self.found.resync {
            let _ = writeln!(
                text,
                "a copy is brought up with {:.0} MiB/s beside a client, {:.0} MiB/s without; the device writes {:.0} MiB/s, \
                 and {:.0} MiB/s while as much is read from it",
                resync.busy_mib_s,
                resync.quiet_mib_s,
                resync.device_mib_s,
                resync.device_copies_mib_s
            );
        }
        bars::list(&mut text, "bars", &self.found.bars);
        self.results.report(&text, &self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_that_of_turns_that_followed_one_another() {
        let turn = |iops| Turn {
            iops,
            ..Turn::default()
        };
        let row = Row {
            what: String::new(),
            turns: [
                [1.0, 30.0, 8.0].map(turn).into(),
                [2.0, 40.0, 10.0].map(turn).into(),
            ],
        };
        assert!((row.ratio(|turn| turn.iops) - 0.75).abs() < 1e-9);
        assert!((row.difference(|turn| turn.iops) + 2.0).abs() < 1e-9);
    }
}
