//! The model of how fast volumes are, by hand: one run, and a table over time.
//!
//! `cargo run --profile checked -p hdcs-kit --example pace -- log=flushed backend=shared seconds=3 mib=64 depth=32`
//! See [`hdcs_kit::pace`] for what it is, and [`set`] for what can be said.

use hdcs_core::base::io::Nanos;
use hdcs_kit::pace::{Backend, DeviceModel, Model, Report, variation};

/// What one word of the command line says.
fn set(model: &mut Model, millis: &mut u64, word: &str) {
    let (name, value) = word.split_once('=').expect("a word is NAME=VALUE");
    let number = || value.parse::<u64>().expect("a number");
    let device = || match value {
        "flushed" => DeviceModel::flushed(),
        "fua" => DeviceModel::fua(),
        "protected" => DeviceModel::protected(),
        "memory" => DeviceModel::memory(),
        _ => panic!("devices are flushed, fua, protected and memory"),
    };
    match name {
        // How long it goes on.
        "seconds" => *millis = number() * 1000,
        "log" => model.log = device(),
        // The log's device (`shared`), so many operations a second of a millisecond each, or a device.
        "backend" => {
            model.backend = match value {
                "shared" => Backend::Shared,
                _ if value.parse::<u64>().is_ok() => {
                    Backend::Apart(DeviceModel::remote(Nanos::from_millis(1), number()))
                }
                _ => Backend::Apart(device()),
            }
        }
        // Size of each log.
        "mib" => *model = model.clone().with_log_bytes(number() << 20),
        // Size of each volume.
        "volume_mib" => model.config.bytes = number() << 20,
        // Of the first client.
        "depth" => model.loads[0].depth = number() as usize,
        "blocks" => model.loads[0].blocks = number(),
        "reads" => model.loads[0].reads = number() as u8,
        "flush_every" => model.loads[0].flush_every = number(),
        // What a reply of the first client takes to become the next request, in microseconds: fewer writes.
        "latency" => model.loads[0].latency = Nanos::from_micros(number()),
        // When the first client begins and ends, in milliseconds.
        "from" => model.loads[0].from = Nanos::from_millis(number()),
        "until" => model.loads[0].until = Nanos::from_millis(number()),
        // Another client of the first volume, which reads so many blocks at a time.
        "readers" => model.loads.push(hdcs_kit::pace::Load {
            depth: number() as usize,
            reads: 100,
            ..hdcs_kit::pace::Load::default()
        }),
        // Writes under way for destage at most.
        "destage_depth" => model.config.destage_depth_max = number() as usize,
        "pool_mib" => model.pool_bytes = (number() as usize) << 20,
        // Each with a client like the first.
        "volumes" => {
            model.volumes = number() as usize;
            model.loads = (0..model.volumes)
                .map(|volume| hdcs_kit::pace::Load {
                    volume,
                    ..model.loads[0]
                })
                .collect();
        }
        _ => panic!("{name} is not known; see this function"),
    }
}

fn show(report: &Report, millis: u64) {
    println!("      ms   writes/s    reads/s destaged/s  fill   p50 µs   p99 µs  read p50  p99");
    let step = (millis / 40).max(10).next_multiple_of(10);
    for from in (0..millis).step_by(step as usize) {
        let time = from..(from + step).min(millis);
        let windows = report.within(time.clone());
        let destaged: u64 = windows
            .iter()
            .map(|window| window.destaged_bytes / 4096)
            .sum();
        println!(
            "{from:8} {:10.0} {:10.0} {:10.0} {:5.3} {:8.0} {:8.0}  {:8.0} {:8.0}",
            report.write_iops(time.clone()),
            report.read_iops(time.clone()),
            destaged as f64 * 100.0 / windows.len() as f64,
            f64::from(windows.last().map_or(0, |window| window.fill)) / 1000.0,
            report.write_latency(time.clone(), 500),
            report.write_latency(time.clone(), 990),
            report.read_latency(time.clone(), 500),
            report.read_latency(time, 990),
        );
    }
    let late = millis / 2..millis;
    let rates = report.write_rates(late.clone(), 100);
    println!(
        "second half: {:.0} writes/s, p50 {:.0} µs, p99 {:.0} µs, variation of 100 ms {:.3}, fill {:?}; \
         {:.0} reads/s, p50 {:.0} µs, p99 {:.0} µs; \
         processor {:.2}, {} turns, {} spans, throttled {} ms, log reads {} MiB",
        report.write_iops(late.clone()),
        report.write_latency(late.clone(), 500),
        report.write_latency(late.clone(), 990),
        variation(&rates),
        report.fill(late.clone()),
        report.read_iops(late.clone()),
        report.read_latency(late.clone(), 500),
        report.read_latency(late, 990),
        report.busy.0 as f64 / 1e6 / millis as f64,
        report.turns,
        report.spans,
        report.throttled.as_millis(),
        report.log_read_bytes >> 20,
    );
}

fn main() {
    let (mut model, mut millis) = (Model::default(), 3_000);
    for word in std::env::args().skip(1) {
        set(&mut model, &mut millis, &word);
    }
    show(&model.run(Nanos::from_millis(millis)), millis);
}
