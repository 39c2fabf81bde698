//! `hdcs-bench compare`: every peer under every profile, side by side in one run.
//!
//! 1. Repetitions are interleaved (all peers, then all peers again), so that drift of the machine hits everybody; ratios
//!    are formed within a repetition, and their median counts.
//! 2. Before each run the same load runs for two seconds that nobody looks at.
//! 3. A run during which the device itself stalled is repeated ([`crate::disk`]); the report says which and why.
//! 4. What is about the processor is measured in memory as well, where no device is in the way.

use std::path::Path;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cost::Cost;
use crate::disk::Watch;
use crate::failure::{Failure, Result};
use crate::fio::{self, Outcome};
use crate::lab::Lab;
use crate::options::Places;
use crate::peers::{MEMORY, Peer, Peers, Place, Sizes};
use crate::profiles::{self, Profile};
use crate::results::Directory;
use crate::{performance, plot, replay, report, steady};

/// A run that a stall of the device has spoiled is repeated so often.
const REPEATS_MAX: usize = 3;

/// The share of reads that the SSD tier answers where its hits are measured, at least.
const SSD_HITS_MIN: f64 = 0.5;

/// What to compare.
#[derive(Args, Debug)]
pub struct Options {
    /// One short repetition with small disks: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// Only these parts, by comma: names of profiles, `steady`, `replay`.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these peers, by comma.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// Repetitions; by default 5.
    #[arg(long)]
    repeat: Option<u32>,
    /// Seconds of one run; by default 5.
    #[arg(long)]
    seconds: Option<u32>,
    /// Where logs, backends and the cache device lie: `disk`, `memory`, or by default both after each other.
    #[arg(long)]
    place: Option<String>,
    #[command(flatten)]
    places: Places,
}

/// One run of one profile on one peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Name of the profile.
    pub profile: String,
    /// Name of the peer.
    pub peer: String,
    /// Where it was measured.
    pub place: Place,
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
    /// Why the device had stalled meanwhile, each time that it was tried.
    pub stalled: Option<String>,
}

/// A run that does not count, since the device had stalled.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Repeated {
    /// Name of the profile.
    pub profile: String,
    /// Name of the peer.
    pub peer: String,
    /// Which repetition, from 0.
    pub repetition: u32,
    /// What it had given.
    pub iops: f64,
    /// What the device did.
    pub why: String,
}

/// Everything that a comparison found.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Findings {
    /// How long one run took.
    pub seconds: u32,
    /// Every run.
    pub samples: Vec<Sample>,
    /// Runs that were repeated.
    pub repeated: Vec<Repeated>,
    /// A durable 4 KiB write by fio, in microseconds, with its repetition.
    pub durable_write_us: Vec<(u32, f64)>,
    /// The steady state, if it was run.
    pub steady: Vec<steady::Steady>,
    /// Replay of a full log, if it was run.
    pub replay: Vec<replay::Replay>,
}

impl Options {
    fn repetitions(&self) -> u32 {
        let usual = if self.quick { 1 } else { 5 };
        self.repeat.unwrap_or(usual).max(1)
    }

    fn seconds(&self) -> u32 {
        let usual = if self.quick { 2 } else { 5 };
        self.seconds.unwrap_or(usual).max(1)
    }

    /// Whether it leaves nothing out.
    fn is_whole(&self) -> bool {
        !self.quick && self.only.is_empty() && self.peers.is_empty() && self.place.is_none()
    }

    fn chosen_places(&self) -> Result<Vec<Place>> {
        let Some(name) = &self.place else {
            return Ok(Place::ALL.to_vec());
        };
        let found = Place::ALL.into_iter().find(|place| place.name() == name);
        let none = || Failure::new(format!("no place `{name}`; there are disk, memory"));
        Ok(vec![found.ok_or_else(none)?])
    }

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
    let places = options.chosen_places()?;
    let (chosen, profiles) = (options.chosen_peers()?, options.chosen_profiles()?);
    let results = Directory::create(&options.places.results)?;
    let mut findings = Findings {
        seconds: options.seconds(),
        ..Findings::default()
    };
    for place in &places {
        let lab = match place {
            Place::Disk => Lab::new(&options.places)?,
            Place::Memory => Lab::at(&options.places.hdcs, &Path::new(MEMORY).join("hdcs-bench"))?,
        };
        let run = Run {
            lab: &lab,
            results: &results,
            place: *place,
            sizes: Sizes::of(*place, options.quick),
            repetitions: options.repetitions(),
            seconds: options.seconds(),
        };
        run.side_by_side(&chosen, &profiles, &mut findings)?;
        let is_hdcs = chosen.iter().any(|peer| peer.is_hdcs());
        if is_hdcs && *place == Place::Disk {
            alone(options, &lab, &results, &mut findings)?;
        }
    }
    plot::comparison(&findings, &results)?;
    results.report(&report::render(&findings), &findings)?;
    if options.is_whole() {
        performance::write(&findings, &options.places.docs, &results)?;
    }
    Ok(())
}

/// What has no peers.
fn alone(options: &Options, lab: &Lab, results: &Directory, findings: &mut Findings) -> Result<()> {
    for repetition in 0..options.repetitions() {
        if options.wants("steady") {
            findings
                .steady
                .push(steady::run(lab, repetition, options.quick, results)?);
        }
        if options.wants("replay") {
            findings.replay.push(replay::run(
                &options.places.hdcs,
                &lab.path("replay"),
                options.quick,
            )?);
        }
    }
    Ok(())
}

/// What all measurements of one place share.
struct Run<'a> {
    lab: &'a Lab,
    results: &'a Directory,
    place: Place,
    sizes: Sizes,
    repetitions: u32,
    seconds: u32,
}

impl Run<'_> {
    fn side_by_side(
        &self,
        chosen: &[Peer],
        profiles: &[Profile],
        findings: &mut Findings,
    ) -> Result<()> {
        let takes = |peer: &Peer| profiles.iter().any(|one| peer.takes(one, self.place));
        let chosen: Vec<Peer> = chosen.iter().copied().filter(takes).collect();
        if chosen.is_empty() {
            return Ok(());
        }
        let peers = Peers::up(self.lab, &chosen, self.place, self.sizes)?;
        let mut watch = Watch::of(self.lab.directory())?;
        for repetition in 0..self.repetitions {
            for profile in profiles {
                // Beside the profiles that it is the floor of: the device's mood changes.
                if profile.name == "randwrite-qd1" && self.place == Place::Disk {
                    self.measure_floor(&peers, repetition, findings)?;
                }
                let takes = |peer: &Peer| peer.takes(profile, self.place);
                for peer in chosen.iter().copied().filter(takes) {
                    let sample =
                        self.measure_well(&peers, profile, peer, repetition, &mut watch, findings)?;
                    findings.samples.push(sample);
                }
            }
        }
        peers.down()
    }

    /// What a durable write costs without any server.
    fn measure_floor(
        &self,
        peers: &Peers<'_>,
        repetition: u32,
        findings: &mut Findings,
    ) -> Result<()> {
        let raw = self.results.raw(&format!("durable-write-{repetition}"));
        let file = peers.device_file();
        let micros = fio::durable_write_us(&file, self.sizes.disk_bytes, self.seconds, &raw)?;
        eprintln!("bench: durable 4k write (write, fdatasync): {micros:.0} µs");
        findings.durable_write_us.push((repetition, micros));
        Ok(())
    }

    /// One run; if the device stalled meanwhile, another one.
    fn measure_well(
        &self,
        peers: &Peers<'_>,
        profile: &Profile,
        peer: Peer,
        repetition: u32,
        watch: &mut Watch,
        findings: &mut Findings,
    ) -> Result<Sample> {
        let at = |error| Failure::new(format!("{} on {}: {error}", profile.name, peer.name()));
        let run = || {
            let sample = self
                .measure(peers, profile, peer, repetition, watch)
                .map_err(at)?;
            eprintln!("bench: {}", report::one_line(&sample));
            if let Some(why) = &sample.stalled {
                eprintln!("bench: {why}");
            }
            Ok(sample)
        };
        let (sample, repeated) = until_steady(run)?;
        findings.repeated.extend(repeated);
        Ok(sample)
    }

    /// One run.
    fn measure(
        &self,
        peers: &Peers<'_>,
        profile: &Profile,
        peer: Peer,
        repetition: u32,
        watch: &mut Watch,
    ) -> Result<Sample> {
        let probed_before = watch.probe()?;
        peers.prepare(peer, profile)?;
        let name = format!(
            "{}-{}-{}-{repetition}",
            profile.name,
            peer.name(),
            self.place.name()
        );
        let seed = u64::from(repetition) + 1;
        if let Some(load) = peers.fit_warm_up(profile, peer, seed + 1000) {
            peers.run(peer, &load, self.results, "warm-up")?;
        }
        let load = peers.fit(profile, peer, self.seconds, seed);
        let shown_before = peers.show(peer)?;
        let before = peers.usage(peer)?;
        let meter_before = peers.meter(peer)?;
        let load = || peers.run(peer, &load, self.results, &name);
        let (outcome, stall_ms) = watch.during(load)?;
        let meter_after = peers.meter(peer)?;
        let after = peers.usage(peer)?;
        peers.settle(peer, profile)?;
        let settled = peers.usage(peer)?;
        let probed_after = watch.probe()?;
        let shown_after = peers.show(peer)?;
        let requests = outcome.requests as f64;
        if peer == Peer::SsdHit {
            check_ssd_hits(&shown_before, &shown_after, requests)?;
        }
        let has_volume = peer.is_hdcs() && !peer.is_four();
        Ok(Sample {
            profile: profile.name.to_owned(),
            peer: peer.name().to_owned(),
            place: self.place,
            repetition,
            server_cpu_us: (after.cpu_us - before.cpu_us) / requests,
            server_cpu_settled_us: (settled.cpu_us - before.cpu_us) / requests,
            server_rss_bytes: after.rss_bytes,
            cost: meter_before
                .zip(meter_after)
                .map(|(before, after)| before.until(&after, outcome.requests)),
            volume: has_volume.then_some([shown_before, shown_after]),
            stalled: watch.verdict(stall_ms, [probed_before, probed_after]),
            outcome,
        })
    }
}

/// What is called a hit of the SSD tier was one, but for those few blocks that DRAM holds.
fn check_ssd_hits(before: &Value, after: &Value, requests: f64) -> Result<()> {
    let hits = |shown: &Value| shown["counters"]["ssd_hit_blocks"].as_f64().unwrap_or(0.0);
    let share = (hits(after) - hits(before)) / requests;
    if share < SSD_HITS_MIN {
        let percent = share * 100.0;
        return Err(Failure::new(format!(
            "only {percent:.0} % of the reads came from the SSD tier"
        )));
    }
    Ok(())
}

/// Run until the device has not stalled meanwhile, or as often as is worth it: the last run, and those before it.
fn until_steady(mut run: impl FnMut() -> Result<Sample>) -> Result<(Sample, Vec<Repeated>)> {
    let mut repeated = Vec::new();
    let mut sample = run()?;
    while let Some(why) = &sample.stalled
        && repeated.len() < REPEATS_MAX
    {
        repeated.push(Repeated {
            profile: sample.profile.clone(),
            peer: sample.peer.clone(),
            repetition: sample.repetition,
            iops: sample.outcome.iops,
            why: why.clone(),
        });
        sample = run()?;
    }
    Ok((sample, repeated))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::tests::sample;

    /// Runs of which the first so many stalled; the run that counts, and what was repeated.
    fn with_stalls(count: u32) -> (Sample, Vec<Repeated>) {
        let mut runs = 0;
        until_steady(|| {
            runs += 1;
            let cell = ("randwrite-qd32", Peer::OnWrite);
            Ok(Sample {
                stalled: (runs <= count).then(|| format!("stall {runs}")),
                ..sample(cell, Place::Disk, 2, f64::from(runs))
            })
        })
        .unwrap()
    }

    #[test]
    fn run_that_a_stall_has_spoiled_is_repeated_and_said() {
        let (sample, repeated) = with_stalls(0);
        assert!(sample.outcome.iops < 1.5 && repeated.is_empty());
        let (sample, repeated) = with_stalls(2);
        assert!(sample.stalled.is_none() && sample.outcome.iops > 2.5);
        let whys: Vec<_> = repeated.iter().map(|one| one.why.as_str()).collect();
        assert_eq!(whys, ["stall 1", "stall 2"]);
        assert_eq!(
            (repeated[0].repetition, repeated[0].profile.as_str()),
            (2, "randwrite-qd32")
        );
    }

    #[test]
    fn reads_that_do_not_come_from_the_ssd_tier_are_no_hits_of_it() {
        let shown = |hits: u64| serde_json::json!({"counters": {"ssd_hit_blocks": hits}});
        assert!(check_ssd_hits(&shown(10), &shown(900), 1000.0).is_ok());
        assert!(check_ssd_hits(&shown(10), &shown(400), 1000.0).is_err());
    }

    #[test]
    fn device_that_always_stalls_ends_the_repeating_and_the_run_says_so() {
        let (sample, repeated) = with_stalls(100);
        assert_eq!(repeated.len(), REPEATS_MAX);
        assert_eq!(sample.stalled.as_deref(), Some("stall 4"));
    }
}
