//! `hdcs-bench ceph`, `s3` and `hdfs`: HDCS before a real store, beside the store's own client.
//!
//! Repetitions are interleaved and ratios formed within one, as in `compare`. The store runs on the
//! same cores as everything else, so that what destage asks of it is part of what is measured.

mod ceph;
mod direct;
mod hdfs;
mod peers;
mod requests;
mod s3;
mod store;
mod table;
mod testenv;

use std::path::PathBuf;

use clap::Args;
use peers::{Peer, Peers};
use requests::Requests;
use serde::Serialize;
use serde_json::Value;
pub use store::{Behind, Store};

use crate::failure::{Failure, Result};
use crate::fio::{self, Load, Outcome};
use crate::lab::Lab;
use crate::options::Places;
use crate::performance::CEPH;
use crate::results::Directory;

/// What to compare.
#[derive(Args, Debug)]
pub struct Options {
    /// One short repetition on small images: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// Only these profiles, by comma.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Repetitions.
    #[arg(long, default_value_t = 3)]
    repeat: u32,
    /// Seconds of one run; sustained writes take as long as they need, at most five minutes.
    #[arg(long, default_value_t = 10)]
    seconds: u32,
    /// Where the store lives, up to 12 GB: a short path on the same disk; removed at the end.
    #[arg(long, default_value = "/var/tmp")]
    cluster: PathBuf,
    /// Where the scripts are that bring the store up and remove it.
    #[arg(long, default_value = "testenv")]
    scripts: PathBuf,
    #[command(flatten)]
    places: Places,
}

/// How much of everything: the measurement's, or a glance.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Scale {
    /// Repetitions.
    repetitions: u32,
    /// Seconds of a run that time ends.
    seconds: u32,
    /// Sustained writes that take longer are cut off.
    sustained_seconds_max: u32,
    /// Size of every image and volume.
    disk_bytes: u64,
    /// The range of reads, which fits the cache.
    read_span_bytes: u64,
    /// The range of sequential writes and reads over a store with objects.
    scan_bytes: u64,
    /// The log that a burst fits into.
    burst_log_bytes: u64,
    /// The log that sustained writes overrun.
    small_log_bytes: u64,
    /// How often they do.
    overrun: u64,
}

/// What a run is about, which decides the size of the log and what ends the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Writes that the log takes whole.
    Burst,
    /// Writes of many times the log's size.
    Sustained,
    /// Reads of what the cache holds.
    CachedRead,
    /// Writes at a given rate.
    Paced,
    /// Writes of the range, in order.
    Sequential,
    /// Reads of what no cache holds, at random.
    ColdRead,
    /// The same, in order.
    ColdScan,
}

/// One load with its name.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name, as given to `--only`.
    name: &'static str,
    /// For people.
    title: &'static str,
    kind: Kind,
    /// The load; span, bytes and seconds are filled in by the run.
    load: Load,
}

/// One run of one profile on one peer.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Name of the profile.
    profile: &'static str,
    /// Name of the peer.
    peer: &'static str,
    /// Which repetition, from 0.
    repetition: u32,
    /// What fio saw.
    outcome: Outcome,
    /// The node's CPU time for one request, in microseconds, while the load ran.
    node_cpu_us: f64,
    /// The store's, likewise, with what destage asked of it.
    store_cpu_us: f64,
    /// The node's resident memory at the end, in bytes.
    node_rss_bytes: u64,
    /// Bytes that the client read or wrote.
    client_bytes: u64,
    /// What HDCS said of the volume when the load had ended.
    volume: Value,
    /// What a store with objects was asked for, with what destaging the rest took.
    requests: Option<Requests>,
}

/// Everything that a run found.
#[derive(Debug, Serialize)]
pub struct Findings {
    store: Store,
    scale: Scale,
    /// Every run.
    samples: Vec<Sample>,
    /// A durable 4 KiB write by fio, in microseconds, beside each repetition of the paced writes.
    durable_write_us: Vec<f64>,
}

impl Scale {
    fn of(options: &Options, store: Store) -> Self {
        let (repetitions, seconds, sustained_seconds_max) = if options.quick {
            (1, 1, 3)
        } else {
            (options.repeat.max(1), options.seconds.max(1), 300)
        };
        let of_mib = |[disk, read, scan, burst_log, small_log]: [u64; 5], overrun| Self {
            repetitions,
            seconds,
            sustained_seconds_max,
            disk_bytes: disk << 20,
            read_span_bytes: read << 20,
            scan_bytes: scan << 20,
            burst_log_bytes: burst_log << 20,
            small_log_bytes: small_log << 20,
            overrun,
        };
        match (store, options.quick) {
            (Store::Ceph, false) => of_mib([4096, 512, 512, 2048, 64], 10),
            (Store::Ceph, true) => of_mib([512, 64, 64, 512, 16], 3),
            // The small log is the default one, also because its size decides how many requests a GiB takes.
            (_, false) => of_mib([1024, 32, 512, 1024, 512], 2),
            (_, true) => of_mib([32, 4, 16, 32, 16], 2),
        }
    }
}

/// All of them, in the order of the table.
fn profiles(store: Store) -> Vec<Profile> {
    let deep = |rw| Load {
        depth: 32,
        ..Load::random(rw, 0)
    };
    let whole = |rw| Load {
        block_bytes: 1 << 20,
        depth: 4,
        ..Load::random(rw, 0)
    };
    let mut all = vec![
        Profile {
            name: "burst",
            title: "4k random write, depth 32, log larger than the burst",
            kind: Kind::Burst,
            load: deep("randwrite"),
        },
        Profile {
            name: "sustained",
            title: "4k random write, depth 32, log overrun",
            kind: Kind::Sustained,
            load: deep("randwrite"),
        },
        Profile {
            name: "zipf",
            title: "4k random write, zipf 1.2, depth 32, log overrun",
            kind: Kind::Sustained,
            load: Load {
                zipf: Some(1.2),
                ..deep("randwrite")
            },
        },
        Profile {
            name: "randread",
            title: "4k random read, depth 32, working set cached",
            kind: Kind::CachedRead,
            load: deep("randread"),
        },
        // Depth 1: fio 3.33 miscounts syncs at higher depths.
        Profile {
            name: "paced",
            title: "4k random write, depth 1, 4000 a second, sync every 32",
            kind: Kind::Paced,
            load: Load {
                rate: Some(4000),
                fsync_every: Some(32),
                ..Load::random("randwrite", 0)
            },
        },
    ];
    if store.has_objects() {
        all.extend([
            Profile {
                name: "coldread",
                title: "4k random read, depth 32, nothing cached",
                kind: Kind::ColdRead,
                load: deep("randread"),
            },
            Profile {
                name: "coldscan",
                title: "1M sequential read, depth 4, nothing cached",
                kind: Kind::ColdScan,
                load: whole("read"),
            },
            Profile {
                name: "write",
                title: "1M sequential write, depth 4",
                kind: Kind::Sequential,
                load: whole("write"),
            },
            Profile {
                name: "rescan",
                title: "1M sequential read, depth 4, nothing cached, just written in order",
                kind: Kind::ColdScan,
                load: whole("read"),
            },
        ]);
    }
    all
}

fn chosen_profiles(store: Store, only: &[String]) -> Result<Vec<Profile>> {
    let mut all = profiles(store);
    if let Some(name) = only.iter().find(|n| !all.iter().any(|p| p.name == *n)) {
        let known: Vec<&str> = all.iter().map(|profile| profile.name).collect();
        return Err(Failure::new(format!(
            "no profile `{name}`; there are {}",
            known.join(", ")
        )));
    }
    all.retain(|profile| only.is_empty() || only.iter().any(|name| name == profile.name));
    Ok(all)
}

/// Run the comparison and write its results.
pub fn run(store: Store, options: &Options) -> Result<()> {
    let profiles = chosen_profiles(store, &options.only)?;
    let scale = Scale::of(options, store);
    let results = Directory::create(&options.places.results)?;
    let lab = Lab::new(&options.places)?;
    let mut peers = Peers::up(store, lab, &options.scripts, &options.cluster, scale)?;
    let (mut samples, mut durable_write_us) = (Vec::new(), Vec::new());
    for repetition in 0..scale.repetitions {
        for profile in &profiles {
            if profile.kind == Kind::Paced {
                let raw = results.raw(&format!("durable-write-{repetition}"));
                let file = peers.device_file();
                let micros = fio::durable_write_us(&file, scale.disk_bytes, scale.seconds, &raw)?;
                durable_write_us.push(micros);
            }
            for peer in Peer::ALL.into_iter().filter(|peer| peer.takes(profile)) {
                let sample =
                    measure(&mut peers, profile, peer, repetition, &results).map_err(|e| {
                        let peer = peer.name(store);
                        Failure::new(format!("{} on {peer}: {e}", profile.name))
                    })?;
                eprintln!("bench: {}", table::one_line(&sample));
                samples.push(sample);
            }
        }
    }
    peers.down()?;
    let findings = Findings {
        store,
        scale,
        samples,
        durable_write_us,
    };
    let report = table::render(&findings);
    results.report(&report, &findings)?;
    if store == Store::Ceph && !options.quick && options.only.is_empty() {
        CEPH.write(&options.places.docs, &report)?;
    }
    Ok(())
}

/// One run.
fn measure(
    peers: &mut Peers,
    profile: &Profile,
    peer: Peer,
    repetition: u32,
    results: &Directory,
) -> Result<Sample> {
    let name = peer.name(peers.store());
    let load = peers.fit(profile, peer, u64::from(repetition) + 1);
    peers.prepare(peer, profile, &load)?;
    let raw = results.raw(&format!("{}-{name}-{repetition}", profile.name));
    let (node_before, store_before) = peers.usage()?;
    let outcome = peers.run(peer, &load, &raw)?;
    let (node, store_cpu_us) = peers.usage()?;
    let turn = peers.end_turn(peer, profile, &load, &outcome)?;
    let requests = outcome.requests as f64;
    Ok(Sample {
        profile: profile.name,
        peer: name,
        repetition,
        node_cpu_us: (node.cpu_us - node_before.cpu_us) / requests,
        store_cpu_us: (store_cpu_us - store_before) / requests,
        node_rss_bytes: node.rss_bytes,
        client_bytes: outcome.requests * load.block_bytes,
        volume: turn.volume,
        requests: turn.requests,
        outcome,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORES: [Store; 3] = [Store::Ceph, Store::S3, Store::Hdfs];

    #[test]
    fn profile_unknown_is_refused_with_the_known() {
        let chosen = |store, only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            chosen_profiles(store, &only)
        };
        let failure = chosen(Store::Ceph, &["burst", "bursts"]).unwrap_err();
        assert!(failure.to_string().contains("`bursts`; there are burst, "));
        assert!(chosen(Store::Ceph, &["coldread"]).is_err());
        assert_eq!(chosen(Store::Hdfs, &["coldread"]).unwrap().len(), 1);
        for store in STORES {
            assert_eq!(chosen(store, &["zipf"]).unwrap().len(), 1);
            assert_eq!(chosen(store, &[]).unwrap().len(), profiles(store).len());
        }
    }

    #[test]
    fn profiles_with_syncs_have_depth_one() {
        for profile in STORES.into_iter().flat_map(profiles) {
            assert!(profile.load.fsync_every.is_none() || profile.load.depth == 1);
        }
    }
}
