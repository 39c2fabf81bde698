//! `make demo`: a backend that answers in a millisecond, straight and through HDCS, side by side;
//! then the node is killed in mid-write, and what it had acknowledged is verified.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;

use crate::crash::Persist;
use crate::crash::client::{self, Plan};
use crate::crash::model::{Model, SECTOR_BYTES};
use crate::failure::{Context, Failure, Result};
use crate::fio::{Load, Outcome, Target};
use crate::lab::Lab;
use crate::nbd;
use crate::node::{Node, VolumeOptions};
use crate::plot::{self, Series, thousands};
use crate::process::Server;
use crate::results::Directory;

/// The disk of the demo.
const DISK_BYTES: u64 = 1 << 30;
/// Its log, of the default size.
const LOG_BYTES: u64 = 512 << 20;
/// What one run writes, both ways the same: it fits the log.
const WRITTEN_BYTES_MAX: u64 = 288 << 20;
/// The range of reads: it is cold at first, and fits the cache.
const READ_SPAN_BYTES: u64 = 256 << 20;
/// How long the backend takes.
const DELAY_US: u32 = 1000;
/// Requests in flight.
const DEPTH: u32 = 16;
/// Seconds of reads.
const SECONDS: u32 = 6;
/// Writes are cut off after so many seconds, whatever is left of them.
const SECONDS_MAX: u32 = 20;
/// The volume that is written while the node is killed.
const PROOF_BYTES: u64 = 64 << 20;

/// How the demo runs.
#[derive(Args, Debug)]
pub struct Options {
    /// The program; by default the one that was built with this.
    #[arg(long, default_value_os_t = crate::options::hdcs_beside())]
    hdcs: PathBuf,
    /// Where the data lies while the demo runs, about 5 GB.
    #[arg(long, default_value = "target/demo-data")]
    data: PathBuf,
    /// Where the pictures go.
    #[arg(long, default_value = "target/demo")]
    results: PathBuf,
}

/// One load, straight and through HDCS.
struct Pair {
    title: &'static str,
    name: &'static str,
    straight: Outcome,
    cached: Outcome,
}

fn loads() -> [(&'static str, &'static str, Load); 3] {
    let load = |rw, span| Load {
        depth: DEPTH,
        seconds: Some(SECONDS),
        ..Load::random(rw, span)
    };
    let write = || Load {
        bytes_max: Some(WRITTEN_BYTES_MAX),
        seconds: Some(SECONDS_MAX),
        ..load("randwrite", DISK_BYTES)
    };
    [
        ("4k random write", "randwrite", write()),
        (
            "4k zipf 1.2 write",
            "zipf",
            Load {
                zipf: Some(1.2),
                ..write()
            },
        ),
        (
            "4k random read",
            "randread",
            load("randread", READ_SPAN_BYTES),
        ),
    ]
}

/// Show it.
pub fn run(options: &Options) -> Result<()> {
    let begin = Instant::now();
    let lab = Lab::at(&options.hdcs, &options.data)?;
    let directory = lab.directory();
    let results = Directory::at(options.results.clone())?;

    println!("A slow backend: a file behind {DELAY_US} µs of delay. Filling it.");
    let image = lab.disk("backend.img", DISK_BYTES)?;
    let mut pairs = Vec::new();
    println!(
        "fio straight to it over NBD (nbdkit), {DEPTH} requests in flight; {} writes, or {SECONDS} s of reads.",
        WRITTEN_BYTES_MAX / 4096
    );
    let straight = run_straight(&image, directory, &results)?;
    println!(
        "The same through HDCS: one node with its defaults, and a client that flushes, as file systems do: what it \
         writes is durable at its next flush, as on the backend."
    );
    let data = directory.join("node");
    let node = Node::start(&options.hdcs, &data, None)?;
    node.create(&VolumeOptions {
        name: "demo".into(),
        bytes: DISK_BYTES,
        log_bytes: LOG_BYTES,
        persist: "auto",
        backend: Some(format!("file:{}?delay_us={DELAY_US}", image.display())),
    })?;
    flush_as_client(&node, "demo")?;
    for ((title, name, load), straight) in loads().into_iter().zip(straight) {
        let cached = load.run(&node.target("demo"), &results.raw(&format!("{name}-hdcs")))?;
        if load.rw == "randwrite" {
            let flushing = Instant::now();
            node.flush("demo")?;
            println!(
                "  {title}: done; destaged the rest in {:.1} s",
                flushing.elapsed().as_secs_f64()
            );
        }
        pairs.push(Pair {
            title,
            name,
            straight,
            cached,
        });
    }
    print_table(&pairs);
    draw(&pairs, &results)?;
    println!(
        "\nLatency curves: {}/latency-*.svg and .png",
        options.results.display()
    );

    let node = prove_crash(options, node, &data, &image)?;
    node.stop()?;
    println!(
        "\nDone in {:.0} s. Nothing is left running.",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// The loads straight to the backend: the same file, as slow, without HDCS.
fn run_straight(image: &Path, directory: &Path, results: &Directory) -> Result<Vec<Outcome>> {
    let socket = directory.join("backend.sock");
    let mut command = Command::new("nbdkit");
    command
        .args(["--foreground", "--filter=delay", "--unix"])
        .arg(&socket)
        .arg("file")
        .arg(image);
    command.args([
        format!("rdelay={}ms", DELAY_US / 1000),
        format!("wdelay={}ms", DELAY_US / 1000),
    ]);
    let server = Server::start_on_socket(
        "nbdkit",
        &mut command,
        &socket,
        &directory.join("nbdkit.log"),
    )?;
    let target = Target::Nbd {
        socket,
        export: String::new(),
    };
    let outcomes = loads()
        .into_iter()
        .map(|(_, name, load)| load.run(&target, &results.raw(&format!("{name}-straight"))))
        .collect();
    server.stop()?;
    outcomes
}

fn print_table(pairs: &[Pair]) {
    println!(
        "\n{:<20}{:^38}{:^38}",
        "", "straight to the backend", "through HDCS"
    );
    println!(
        "{:<20}{:>8}{:>9}{:>9}{:>11} {:>8}{:>9}{:>9}{:>11}{:>9}",
        "latency in µs", "IOPS", "p50", "p99", "p99.99", "IOPS", "p50", "p99", "p99.99", "ratio"
    );
    for pair in pairs {
        let columns = |outcome: &Outcome| {
            format!(
                "{:>8}{:>9.0}{:>9.0}{:>11.0}",
                thousands(outcome.iops),
                outcome.latency.p50,
                outcome.latency.p99,
                outcome.latency.p9999
            )
        };
        println!(
            "{:<20}{} {}{:>8.1}x",
            pair.title,
            columns(&pair.straight),
            columns(&pair.cached),
            pair.cached.iops / pair.straight.iops
        );
    }
}

fn draw(pairs: &[Pair], results: &Directory) -> Result<()> {
    for pair in pairs {
        let series = [
            Series {
                name: "straight to the backend".into(),
                colour: "#999999",
                points: plot::latency_curve(&pair.straight.histogram),
            },
            Series {
                name: "through HDCS".into(),
                colour: "#1565c0",
                points: plot::latency_curve(&pair.cached.histogram),
            },
        ];
        plot::latency(
            pair.title,
            &series,
            results,
            &format!("latency-{}", pair.name),
        )?;
    }
    Ok(())
}

/// Kill the node while it is written to; verify after its restart.
fn prove_crash(options: &Options, node: Node, data: &Path, image: &Path) -> Result<Node> {
    let (volume, sectors) = ("proof", PROOF_BYTES as usize / SECTOR_BYTES);
    node.create(&VolumeOptions {
        name: volume.into(),
        bytes: PROOF_BYTES,
        log_bytes: 64 << 20,
        persist: "on-write",
        backend: Some(format!(
            "file:{}?delay_us={DELAY_US}",
            image.with_file_name("proof.img").display()
        )),
    })?;
    let (socket, seed) = (node.socket(), fastrand::u64(..) >> 16);
    let plan = Plan {
        socket: &socket,
        volume,
        persist: Persist::OnWrite,
        run: seed,
        first: 1,
        sectors: sectors as u32,
        depth: DEPTH as usize,
        seed,
    };
    println!(
        "\nNow writing with {DEPTH} requests in flight, and killing the node (SIGKILL) in the middle."
    );
    let never = AtomicBool::new(false);
    let connection = client::connect(&plan)?;
    let (journal, killed) = thread::scope(|scope| {
        let client = scope.spawn(|| client::load(connection, &plan, &never));
        thread::sleep(Duration::from_secs(2));
        let killed = node.kill();
        (
            client
                .join()
                .unwrap_or_else(|_| Err(Failure::new("the client panicked"))),
            killed,
        )
    });
    killed?;
    let journal = journal?;
    if journal.acknowledged == 0 {
        return Err(Failure::new("nothing was acknowledged before the kill"));
    }
    let restarting = Instant::now();
    let node = Node::start(&options.hdcs, data, None)?;
    println!(
        "Restarted in {:.2} s; its log was replayed. Reading everything.",
        restarting.elapsed().as_secs_f64()
    );
    let mut model = Model::new(sectors);
    let found = client::read_all(&socket, volume, seed, &model)?;
    let held = model
        .verify(&journal.changes, journal.floor, &found)
        .map_err(|violation| {
            Failure::new(format!(
                "the volume lost what it had acknowledged: {violation}"
            ))
        })?;
    println!(
        "VERIFIED: {} writes were sent, {} acknowledged before the kill; all of those are there, whole and in order \
         (the volume holds exactly the first {held}).",
        journal.changes.len(),
        journal.acknowledgements,
    );
    Ok(node)
}

/// One flush, as a file system sends it when it is mounted: by that a volume with `persist = "auto"` learns that its
/// client knows barriers.
fn flush_as_client(node: &Node, volume: &str) -> Result<()> {
    let (mut sender, mut receiver, _) = nbd::connect(&node.socket(), volume)?;
    sender
        .send(nbd::Command::Flush, 0, 1, 0, 0, &[])
        .context("a flush")?;
    let (_, error) = receiver.reply().context("the reply to a flush")?;
    let bye = sender.send(nbd::Command::Disconnect, 0, 2, 0, 0, &[]);
    bye.context("the end of a connection")?;
    if error == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("a flush failed with error {error}")))
    }
}
