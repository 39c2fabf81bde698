//! How fast a volume is over time, in the model of [`hdcs_kit::pace`]: no clock and no machine has a say.

use hdcs_core::base::io::Nanos;
use hdcs_kit::pace::Model;

/// Milliseconds of virtual time.
fn run(model: &Model, millis: u64) -> hdcs_kit::pace::Report {
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
