//! `hdcs-bench compare`: every peer under every profile, side by side in one run.
//!
//! Repetitions are interleaved (all peers, then all peers again), so that drift of the machine
//! hits everybody; ratios are formed within a repetition, and their median counts.

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use crate::cost::Cost;
use crate::failure::{Failure, Result};
use crate::fio::{self, Outcome};
use crate::lab::Lab;
use crate::options::Places;
use crate::peers::{Peer, Peers};
use crate::profiles::{self, Profile};
use crate::results::Directory;
use crate::{plot, replay, report, steady};

/// What to compare.
#[derive(Args, Debug)]
pub struct Options {
    /// One short repetition: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// Only these parts, by comma: names of profiles, `steady`, `replay`.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these peers, by comma.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// Repetitions.
    #[arg(long, default_value_t = 3)]
    repeat: u32,
    /// Seconds of one run.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    #[command(flatten)]
    places: Places,
}

/// One run of one profile on one peer.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Name of the profile.
    pub profile: &'static str,
    /// Name of the peer.
    pub peer: &'static str,
    /// Which repetition, from 0.
    pub repetition: u32,
    /// What fio saw.
    pub outcome: Outcome,
    /// Server's CPU time for one request, in microseconds, while the load ran.
    pub server_cpu_us: f64,
    /// The same with what the server did afterwards to bring the data home (HDCS: destage).
    pub server_cpu_settled_us: f64,
    /// Server's resident memory at the end, in bytes.
    pub server_rss_bytes: u64,
    /// What a request cost HDCS.
    pub cost: Option<Cost>,
    /// What HDCS said of the volume before and after.
    pub volume: Option<[Value; 2]>,
}

/// Everything that a comparison found.
#[derive(Debug, Default, Serialize)]
pub struct Findings {
    /// Every run.
    pub samples: Vec<Sample>,
    /// A durable 4 KiB write by fio, in microseconds, once for each repetition.
    pub durable_write_us: Vec<f64>,
    /// The steady state, if it was run.
    pub steady: Vec<steady::Steady>,
    /// Replay of a full log, if it was run.
    pub replay: Vec<replay::Replay>,
}

impl Options {
    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == part)
    }

    fn chosen_peers(&self) -> Result<Vec<Peer>> {
        for name in &self.peers {
            if !Peer::ALL.iter().any(|peer| peer.name() == name) {
                let known: Vec<&str> = Peer::ALL.iter().map(|peer| peer.name()).collect();
                return Err(Failure::new(format!(
                    "no peer `{name}`; there are {}",
                    known.join(", ")
                )));
            }
        }
        let named = |peer: &Peer| {
            self.peers.is_empty() || self.peers.iter().any(|name| name == peer.name())
        };
        let peers: Vec<Peer> = Peer::ALL.into_iter().filter(named).collect();
        Ok(peers)
    }

    fn chosen_profiles(&self) -> Result<Vec<Profile>> {
        let all = profiles::all();
        for name in &self.only {
            if !["steady", "replay"].contains(&name.as_str())
                && !all.iter().any(|profile| profile.name == name)
            {
                let known: Vec<&str> = all.iter().map(|profile| profile.name).collect();
                return Err(Failure::new(format!(
                    "no profile `{name}`; there are {}, steady, replay",
                    known.join(", ")
                )));
            }
        }
        Ok(all
            .into_iter()
            .filter(|profile| self.wants(profile.name))
            .collect())
    }
}

/// Run the comparison and write its results.
pub fn run(options: &Options) -> Result<()> {
    let (chosen, profiles) = (options.chosen_peers()?, options.chosen_profiles()?);
    let (repetitions, seconds) = if options.quick {
        (1, 2)
    } else {
        (options.repeat.max(1), options.seconds.max(1))
    };
    let results = Directory::create(&options.places.results)?;
    let mut findings = Findings::default();
    let lab = Lab::new(&options.places)?;

    if !profiles.is_empty() {
        let peers = Peers::up(&lab, &chosen)?;
        for repetition in 0..repetitions {
            for profile in &profiles {
                // Beside the profile that it is the floor of: the device's mood changes.
                if profile.name == "randwrite-qd1" {
                    measure_floor(&peers, seconds, repetition, &results, &mut findings)?;
                }
                for peer in chosen.iter().copied().filter(|peer| peer.takes(profile)) {
                    let sample = measure(&peers, profile, peer, repetition, seconds, &results)?;
                    eprintln!("bench: {}", report::one_line(&sample));
                    findings.samples.push(sample);
                }
            }
        }
        peers.down()?;
    }
    let hdcs = chosen.iter().any(|peer| peer.is_hdcs());
    for repetition in 0..repetitions {
        if hdcs && options.wants("steady") {
            findings
                .steady
                .push(steady::run(&lab, repetition, options.quick, &results)?);
        }
        if hdcs && options.wants("replay") {
            findings.replay.push(replay::run(
                &options.places.hdcs,
                &lab.path("replay"),
                options.quick,
            )?);
        }
    }
    finish(&findings, &results)
}

/// What a durable write costs without any server.
fn measure_floor(
    peers: &Peers<'_>,
    seconds: u32,
    repetition: u32,
    results: &Directory,
    findings: &mut Findings,
) -> Result<()> {
    let raw = results.raw(&format!("durable-write-{repetition}"));
    let micros = fio::durable_write_us(
        &peers.device_file(),
        crate::peers::DISK_BYTES,
        seconds,
        &raw,
    )?;
    eprintln!("bench: durable 4k write (write, fdatasync): {micros:.0} µs");
    findings.durable_write_us.push(micros);
    Ok(())
}

/// One run.
fn measure(
    peers: &Peers<'_>,
    profile: &Profile,
    peer: Peer,
    repetition: u32,
    seconds: u32,
    results: &Directory,
) -> Result<Sample> {
    let at = |error| Failure::new(format!("{} on {}: {error}", profile.name, peer.name()));
    peers.prepare(peer, profile).map_err(at)?;
    let load = Peers::fit(profile, peer, seconds, u64::from(repetition) + 1);
    let shown_before = peers.show(peer).map_err(at)?;
    let before = peers.usage(peer)?;
    let meter_before = peers.meter(peer)?;
    let raw = results.raw(&format!("{}-{}-{repetition}", profile.name, peer.name()));
    let outcome = load.run(&peers.target(peer)?, &raw).map_err(at)?;
    let meter_after = peers.meter(peer)?;
    let after = peers.usage(peer)?;
    peers.settle(peer, profile).map_err(at)?;
    let settled = peers.usage(peer)?;
    let shown_after = peers.show(peer).map_err(at)?;
    let requests = outcome.requests as f64;
    Ok(Sample {
        profile: profile.name,
        peer: peer.name(),
        repetition,
        server_cpu_us: (after.cpu_us - before.cpu_us) / requests,
        server_cpu_settled_us: (settled.cpu_us - before.cpu_us) / requests,
        server_rss_bytes: after.rss_bytes,
        cost: meter_before
            .zip(meter_after)
            .map(|(before, after)| before.until(&after, outcome.requests)),
        volume: peer.is_hdcs().then_some([shown_before, shown_after]),
        outcome,
    })
}

/// Write tables, JSON and plots, and print the tables.
fn finish(findings: &Findings, results: &Directory) -> Result<()> {
    plot::comparison(findings, results)?;
    results.report(&report::render(findings), findings)
}
