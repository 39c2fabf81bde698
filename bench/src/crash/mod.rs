//! The crash test of the real program: three volumes (on-write, on-flush, auto) are written with
//! many requests in flight, the node is killed at a random moment, restarted, and every volume has
//! to hold a prefix of what was written that reaches what was promised.
//!
//! With `--power` everything lies on a disk with a volatile write cache, and its power is cut
//! together with the node. All choices follow from one printed seed; the moment of the kill is drawn
//! from it too, but what the node has done by then is the machine's own, so a failure keeps its
//! data directory.

pub mod client;
pub mod model;
mod power;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use fastrand::Rng;

use self::client::{Journal, Plan};
use self::model::{Model, Number, SECTOR_BYTES};
use self::power::PowerDisk;
use crate::failure::{Context, Failure, Result};
use crate::lab::Lab;
use crate::node::{Node, VolumeOptions};
use crate::process::die_with_parent;

/// Size of each volume: small, so that writes overlap and each verification reads all of it.
const VOLUME_BYTES: u64 = 32 << 20;
/// Size of each log: the smallest, so that it is overrun and reclaimed all the time.
const LOG_BYTES: u64 = 16 << 20;
/// Requests in flight on each volume.
const DEPTH: usize = 32;
/// Longest time of load before a kill.
const LOAD_MAX: Duration = Duration::from_millis(300);
/// How often a test is begun whose disk loses its tools.
const ATTEMPTS_MAX: u32 = 2;
/// A node of modest size: three volumes and next to no cache.
const CONFIG: &str = "memory_max_mib = 256\ncache_total_size_mib = 64\n";

/// How the crash test runs.
#[derive(Args, Debug)]
pub struct Options {
    /// Kills.
    #[arg(long, default_value_t = 100)]
    kills: u32,
    /// Seed; chosen and printed when not given.
    #[arg(long)]
    seed: Option<u64>,
    /// Cut the power of the disk too (needs root).
    #[arg(long)]
    power: bool,
    /// The program; by default the one that was built with this.
    #[arg(long, default_value_os_t = crate::options::hdcs_beside())]
    hdcs: PathBuf,
    /// nbdkit's plugin of a disk with a volatile write cache.
    #[arg(long, default_value = "target/testenv/nbdkit-power.so")]
    plugin: PathBuf,
    /// Where the data lies; kept when the test fails.
    #[arg(long, default_value = "target/crash-data")]
    data: PathBuf,
    /// It is watched by another process, which begins anew if the disk loses a tool.
    #[arg(long, hide = true)]
    watched: bool,
}

/// When an acknowledgement promises durability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persist {
    /// At once.
    OnWrite,
    /// At the next flush.
    OnFlush,
    /// At once until the first flush.
    Auto,
}

impl Persist {
    /// As the command line has it.
    const fn name(self) -> &'static str {
        match self {
            Self::OnWrite => "on-write",
            Self::OnFlush => "on-flush",
            Self::Auto => "auto",
        }
    }
}

/// A volume under test.
struct Subject {
    persist: Persist,
    model: Model,
    next: Number,
}

/// How a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// SIGKILL.
    Kill,
    /// Power cut, then SIGKILL a moment later: the node sees its disk fail.
    PowerThenKill,
    /// SIGKILL, then power cut.
    KillThenPower,
    /// SIGTERM: everything acknowledged has to be there, whatever the policy.
    Stop,
}

/// What all rounds add up to.
#[derive(Default)]
struct Totals {
    kills: u32,
    stops: u32,
    interrupted_starts: u32,
    changes: u64,
    acknowledgements: u64,
    flushes: u64,
    lost_unpromised: u64,
    restart_longest: Duration,
}

struct Test<'a> {
    options: &'a Options,
    run: u64,
    data: PathBuf,
    socket: PathBuf,
    disk: Option<PowerDisk>,
    subjects: Vec<Subject>,
    totals: Totals,
}

/// Run the test in another process, and once more if a tool of its disk ends by itself, which says nothing of the node.
fn run_watched() -> Result<()> {
    let program = std::env::current_exe().context("this program")?;
    for attempt in 1..=ATTEMPTS_MAX {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).arg("--watched");
        let status = die_with_parent(&mut command).status();
        let status = status.context(program.display())?;
        if status.success() {
            return Ok(());
        }
        if status.code() != Some(power::TOOL_ENDED) {
            return Err(Failure::new(format!("the crash test ended with {status}")));
        }
        if attempt < ATTEMPTS_MAX {
            println!("crash: begun anew, since that was no fault of the node");
        }
    }
    Err(Failure::new(format!(
        "the disk has lost its tools in each of {ATTEMPTS_MAX} attempts: nothing was found out about the node"
    )))
}

/// Run the crash test.
pub fn run(options: &Options) -> Result<()> {
    if options.power && !options.watched {
        return run_watched();
    }
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..) >> 16);
    println!(
        "crash: {} kills, seed {seed}{}",
        options.kills,
        if options.power {
            ", with power cuts"
        } else {
            ""
        }
    );
    let lab = Lab::at(&options.hdcs, &options.data)?;
    let directory = lab.directory();
    let result = Test::create(options, seed, directory).and_then(|mut test| {
        let result = test.all_rounds(seed);
        if result.is_err() && test.disk.is_some() {
            power::let_watch_look();
        }
        result
    });
    if result.is_err() {
        println!(
            "crash: FAILED with seed {seed}; the data is kept in {}",
            lab.keep().display()
        );
    }
    result
}

impl<'a> Test<'a> {
    fn create(options: &'a Options, seed: u64, directory: &Path) -> Result<Self> {
        let disk = options
            .power
            .then(|| PowerDisk::create(directory, &options.plugin))
            .transpose()?;
        let data = disk
            .as_ref()
            .map_or(directory.to_path_buf(), PowerDisk::mount_point)
            .join("node");
        let sectors = VOLUME_BYTES as usize / SECTOR_BYTES;
        let subjects = [Persist::OnWrite, Persist::OnFlush, Persist::Auto].map(|persist| Subject {
            persist,
            model: Model::new(sectors),
            next: 1,
        });
        Ok(Self {
            options,
            // Never 0, so that no stamp of another run is taken for one of this.
            run: seed | 1 << 63,
            socket: data.join("nbd.sock"),
            data,
            disk,
            subjects: subjects.into(),
            totals: Totals::default(),
        })
    }

    fn start(&self) -> Result<Node> {
        Node::start(&self.options.hdcs, &self.data, Some(CONFIG))
    }

    fn all_rounds(&mut self, seed: u64) -> Result<()> {
        let begin = Instant::now();
        let mut node = self.start()?;
        for (index, subject) in self.subjects.iter().enumerate() {
            node.create(&VolumeOptions {
                name: subject.persist.name().into(),
                bytes: VOLUME_BYTES,
                log_bytes: LOG_BYTES,
                persist: subject.persist.name(),
                // One of them has a backend that lags behind, so that its log is full most of the time.
                backend: (index == 1).then(|| {
                    format!(
                        "file:{}?delay_us=500",
                        self.data.with_file_name("lagging.img").display()
                    )
                }),
            })?;
        }
        let mut round = 0;
        while self.totals.kills < self.options.kills {
            let mut rng =
                Rng::with_seed(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(round));
            node = self
                .round(node, &mut rng)
                .map_err(|failure| Failure::new(format!("round {round}: {failure}")))?;
            round += 1;
            if round.is_multiple_of(25) {
                println!(
                    "crash: {} kills, {} writes, all as promised",
                    self.totals.kills, self.totals.changes
                );
            }
        }
        node.stop()?;
        let totals = &self.totals;
        println!(
            "crash: {} kills, {} clean stops, {} starts interrupted in {:.0} s: {} writes sent, {} of them and {} flushes \
             acknowledged; every promised write was there, nothing torn, nothing out of order; {} writes without a promise \
             were lost; longest restart {:.2} s",
            totals.kills,
            totals.stops,
            totals.interrupted_starts,
            begin.elapsed().as_secs_f64(),
            totals.changes,
            totals.acknowledgements,
            totals.flushes,
            totals.lost_unpromised,
            totals.restart_longest.as_secs_f64(),
        );
        Ok(())
    }

    fn choose_end(&self, rng: &mut Rng) -> End {
        match (rng.u8(0..10), self.disk.is_some()) {
            (0, false) => End::Stop,
            (_, false) | (0..2, true) => End::Kill,
            (2..6, true) => End::PowerThenKill,
            (_, true) => End::KillThenPower,
        }
    }

    /// Load, end, restart, verify.
    fn round(&mut self, node: Node, rng: &mut Rng) -> Result<Node> {
        let end = self.choose_end(rng);
        let pause = LOAD_MAX.mul_f64(rng.f64().powi(2)) + Duration::from_millis(2);
        let journals = self.load_until(node, end, pause, rng)?;
        if let (Some(disk), End::PowerThenKill | End::KillThenPower) = (&mut self.disk, end) {
            disk.restore(rng)?;
        }
        while rng.u8(0..4) == 0 {
            let after = Duration::from_millis(rng.u64(0..40));
            Node::start_and_kill(&self.options.hdcs, &self.data, Some(CONFIG), after)?;
            self.totals.interrupted_starts += 1;
        }
        let begin = Instant::now();
        let node = self.start()?;
        self.totals.restart_longest = self.totals.restart_longest.max(begin.elapsed());
        self.verify(&journals, end)?;
        if rng.u8(0..8) == 0 {
            self.verify_backend(&node)?;
        }
        Ok(node)
    }

    /// Write to all volumes, end the node after `pause`; what was sent and promised.
    fn load_until(
        &mut self,
        node: Node,
        end: End,
        pause: Duration,
        rng: &mut Rng,
    ) -> Result<Vec<Journal>> {
        let stop = AtomicBool::new(false);
        // Sometimes the clients finish before the node is ended.
        let drain_first = end == End::Stop && rng.bool();
        let seeds: Vec<u64> = self.subjects.iter().map(|_| rng.u64(..)).collect();
        let second_pause = Duration::from_millis(rng.u64(0..20));
        let (subjects, socket, run, disk) =
            (&self.subjects, &self.socket, self.run, &mut self.disk);
        // Connected before the clock runs: a load that could not connect is a failure of the node.
        let clients = subjects
            .iter()
            .zip(seeds)
            .map(|(subject, seed)| {
                let plan = Plan {
                    socket,
                    volume: subject.persist.name(),
                    persist: subject.persist,
                    run,
                    first: subject.next,
                    sectors: subject.model.sectors() as u32,
                    depth: DEPTH,
                    seed,
                };
                Ok((client::connect(&plan)?, plan))
            })
            .collect::<Result<Vec<_>>>()?;
        let results: Vec<Result<Journal>> = thread::scope(|scope| {
            let stop = &stop;
            let clients: Vec<_> = clients
                .into_iter()
                .map(|(connection, plan)| {
                    scope.spawn(move || client::load(connection, &plan, stop))
                })
                .collect();
            thread::sleep(pause);
            let ended = match end {
                End::Kill => node.kill(),
                End::KillThenPower => node
                    .kill()
                    .and_then(|()| disk.as_mut().map_or(Ok(()), PowerDisk::cut)),
                End::PowerThenKill => {
                    let cut = disk.as_mut().map_or(Ok(()), PowerDisk::cut);
                    thread::sleep(second_pause);
                    cut.and(node.kill())
                }
                End::Stop => {
                    stop.store(drain_first, Ordering::Relaxed);
                    if drain_first {
                        thread::sleep(second_pause);
                    }
                    node.stop()
                }
            };
            let journals = clients.into_iter().map(|client| {
                client
                    .join()
                    .unwrap_or_else(|_| Err(Failure::new("a client panicked")))
            });
            let journals: Vec<_> = journals.collect();
            ended.map(|()| journals)
        })?;
        results.into_iter().collect()
    }

    /// Every volume holds what it may hold.
    fn verify(&mut self, journals: &[Journal], end: End) -> Result<()> {
        if end == End::Stop {
            self.totals.stops += 1;
        } else {
            self.totals.kills += 1;
        }
        for (subject, journal) in self.subjects.iter_mut().zip(journals) {
            let name = subject.persist.name();
            let expects_errors = matches!(end, End::Stop | End::PowerThenKill);
            if let (Some(error), false) = (&journal.error, expects_errors) {
                return Err(Failure::new(format!("volume `{name}`: {error}")));
            }
            let floor = if end == End::Stop {
                journal.acknowledged
            } else {
                journal.floor
            };
            let found = client::read_all(&self.socket, name, self.run, &subject.model)?;
            let held = subject
                .model
                .verify(&journal.changes, floor, &found)
                .map_err(|violation| {
                    Failure::new(format!("volume `{name}` after {end:?}: {violation}"))
                })?;
            let sent = journal
                .changes
                .last()
                .map_or(subject.next - 1, |change| change.number);
            subject.next = sent + 1;
            self.totals.changes += journal.changes.len() as u64;
            self.totals.acknowledgements += journal.acknowledgements;
            self.totals.flushes += journal.flushes;
            let lost = journal
                .changes
                .iter()
                .filter(|change| change.number > held)
                .count();
            self.totals.lost_unpromised += lost as u64;
        }
        Ok(())
    }

    /// After a flush and without its caches, a volume reads from the backend what it held before.
    fn verify_backend(&mut self, node: &Node) -> Result<()> {
        for subject in &mut self.subjects {
            let name = subject.persist.name();
            node.flush(name)?;
            node.command(&["volume", "evict", name])?;
            let found = client::read_all(&self.socket, name, self.run, &subject.model)?;
            subject.model.verify(&[], 0, &found).map_err(|violation| {
                Failure::new(format!(
                    "volume `{name}` read from its backend: {violation}"
                ))
            })?;
        }
        Ok(())
    }
}
