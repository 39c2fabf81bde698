//! How fast a volume is over time, in the model of [`hdcs_kit::pace`]: no clock and no machine has a say.

use hdcs_core::base::io::Nanos;
use hdcs_kit::pace::{Backend, DeviceModel, Load, Model, Report, variation};

/// Milliseconds of virtual time.
fn run(model: &Model, millis: u64) -> Report {
    model.run(Nanos::from_millis(millis))
}

#[test]
fn destage_reads_no_more_of_the_log_than_it_writes() {
    // One block in eight is dirty: many a write has a neighbour in its generation, far away in the log.
    let mut model = Model::default();
    model.config.bytes = 256 << 20;
    let report = run(&model, 1000);
    let windows = report.within(0..1000);
    let destaged: u64 = windows.iter().map(|window| window.destaged_bytes).sum();
    assert!(destaged > 64 << 20, "it destages: {destaged}");
    // Control parts lie between, and a chunk is read ahead.
    assert!(
        report.log_read_bytes < destaged * 3 / 2,
        "{} read for {destaged}",
        report.log_read_bytes
    );
}

/// A volume whose backend does so many writes a second, of a millisecond each.
fn behind(iops: u64) -> Model {
    Model {
        backend: Backend::Apart(DeviceModel::remote(Nanos::from_millis(1), iops)),
        ..Model::default()
    }
}

/// Writes a second that destage has done in that time.
fn destaged(report: &Report, millis: core::ops::Range<u64>) -> f64 {
    let windows = report.within(millis.clone());
    let bytes: u64 = windows.iter().map(|window| window.destaged_bytes).sum();
    bytes as f64 / 4096.0 * 1000.0 / (millis.end - millis.start) as f64
}

#[test]
fn throttled_writes_are_as_many_as_destage_can_do() {
    for log in [
        DeviceModel::flushed(),
        DeviceModel::fua(),
        DeviceModel::protected(),
    ] {
        for (iops, millis) in [(20_000, 2_000), (5_000, 5_000)] {
            let report = run(
                &Model {
                    log,
                    ..behind(iops)
                },
                millis,
            );
            let late = millis / 2..millis;
            let (writes, done) = (report.write_iops(late.clone()), destaged(&report, late));
            let best = iops as f64;
            let name = format!("{log:?}, {iops}: {writes} written, {done} destaged");
            assert!(writes > best * 0.95 && writes < best * 1.15, "{name}");
            assert!(done > best * 0.95, "{name}");
        }
    }
}

#[test]
fn throttled_writes_come_evenly_and_the_log_settles() {
    for (iops, millis, varies) in [
        (20_000, 2_500, 0.08),
        (5_000, 5_000, 0.05),
        (1_000, 16_000, 0.13),
    ] {
        let report = run(&behind(iops), millis);
        let late = millis / 2..millis;
        let (low, high) = report.fill(late.clone());
        let found = variation(&report.write_rates(late, 100));
        let name = format!("{iops}: varies by {found}, filled from {low} to {high}");
        assert!(found < varies, "{name}");
        // Where as much is admitted as is freed: a write counts for two blocks in admission, and takes little more
        // than one. A generation gives an eighth of this log back at most, a fortieth if that takes it long.
        let (below, above) = if iops > 10_000 {
            (0.71, 0.88)
        } else {
            (0.77, 0.84)
        };
        assert!(low > below && high < above, "{name}");
    }
}

#[test]
fn throttling_begins_without_a_cliff() {
    for iops in [20_000, 5_000] {
        let report = run(&behind(iops), 3_000);
        let steady = report.write_iops(2_000..3_000);
        let wait = 32e6 / steady;
        for from in (0..3_000).step_by(100) {
            let time = from..from + 100;
            let (rate, p99) = (
                report.write_iops(time.clone()),
                report.write_latency(time, 990),
            );
            let name = format!("{iops}, at {from} ms: {rate} a second, p99 {p99} of {wait}");
            assert!(rate > steady * 0.75, "{name}");
            assert!(p99 < wait * 3.0, "{name}");
        }
    }
}

#[test]
fn throttled_volumes_have_equal_shares() {
    let load = |volume| Load {
        volume,
        ..Load::default()
    };
    let model = Model {
        volumes: 4,
        loads: (0..4).map(load).collect(),
        pool_bytes: 128 << 20,
        ..behind(20_000)
    };
    let report = run(&model, 4_000);
    let late = 3_000..4_000;
    let all = report.write_iops(late.clone());
    assert!(all > 19_000.0, "{all}");
    for volume in 0..4 {
        let its = report.write_iops_of(volume, late.clone());
        assert!(
            (its * 4.0 / all - 1.0).abs() < 0.1,
            "{volume}: {its} of {all}"
        );
    }
    let found = variation(&report.write_rates(late, 100));
    assert!(found < 0.06, "{found}");
}

#[test]
fn reads_beside_throttled_writes_do_not_wait_for_them() {
    let mut model = behind(20_000);
    model.loads.push(Load {
        depth: 4,
        reads: 100,
        ..Load::default()
    });
    let report = run(&model, 3_000);
    // The backend's own time is a millisecond, for which destage's writes are before it.
    let p99 = report.read_latency(2_000..3_000, 990);
    assert!(p99 < 6_000.0, "{p99}");
    let reads = report.read_iops(2_000..3_000);
    assert!(reads > 800.0, "{reads}");
    let writes = report.write_iops(2_000..3_000);
    assert!(writes > 15_000.0, "{writes}");
}

#[test]
fn log_that_destage_keeps_up_with_is_not_throttled_and_settles() {
    let report = run(&Model::default().with_log_bytes(128 << 20), 3_000);
    let late = 1_500..3_000;
    let found = variation(&report.write_rates(late.clone(), 100));
    let (low, high) = report.fill(late);
    let name = format!("varies by {found}, filled from {low} to {high}");
    assert_eq!(report.throttled, Nanos(0), "{name}");
    assert!(found < 0.03 && low > 0.5 && high < 0.68, "{name}");
}

/// Writers of so many requests, and readers, on one device that destage keeps up with.
fn beside_readers(log: DeviceModel, mib: u64, depth: usize) -> Model {
    let mut model = Model {
        log,
        ..Model::default()
    };
    model = model.with_log_bytes(mib << 20);
    model.loads[0].depth = depth;
    model.loads.push(Load {
        depth: 4,
        reads: 100,
        ..Load::default()
    });
    model
}

#[test]
fn destage_that_keeps_up_goes_on_evenly() {
    // In bursts, one for each generation, writes had 535 µs here and reads 500, of which a hundredth waits longer.
    let report = run(&beside_readers(DeviceModel::protected(), 128, 8), 2_000);
    let late = 1_000..2_000;
    let (writes, reads) = (
        report.write_latency(late.clone(), 990),
        report.read_latency(late.clone(), 990),
    );
    let name = format!("p99 of writes {writes}, of reads {reads}");
    assert!(writes < 450.0 && reads < 400.0, "{name}");
    let windows = report.within(late);
    let idle = windows.iter().filter(|window| window.destaged_bytes == 0);
    let (idle, all) = (idle.count(), windows.len());
    assert!(idle * 10 < all, "nothing was destaged in {idle} of {all}");
}

#[test]
fn four_volumes_beside_their_destage_have_equal_shares() {
    let load = |volume| Load {
        volume,
        ..Load::default()
    };
    let model = Model {
        volumes: 4,
        loads: (0..4).map(load).collect(),
        pool_bytes: 128 << 20,
        ..Model::default()
    };
    let report = run(&model, 2_500);
    let late = 1_500..2_500;
    let all = report.write_iops(late.clone());
    for volume in 0..4 {
        let its = report.write_iops_of(volume, late.clone());
        assert!(
            (its * 4.0 / all - 1.0).abs() < 0.1,
            "{volume}: {its} of {all}"
        );
    }
    let (found, p99) = (
        variation(&report.write_rates(late.clone(), 100)),
        report.write_latency(late, 990),
    );
    assert!(found < 0.08, "{found}");
    // 128 requests are under way.
    let wait = 128e6 / all;
    assert!(p99 < 2.0 * wait, "{p99} of {wait}");
}
