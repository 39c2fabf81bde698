//! What each filter does beyond passing the conformance suite.

use std::path::Path;
use std::time::{Duration, Instant};

use hdcs_core::base::error::IoError;

use crate::conformance::{BYTES, Bench};
use crate::{Absent, Ask};

fn bench(directory: &Path, options: &str) -> Bench {
    let url = format!("file:{}/image?{options}", directory.display());
    Bench::new(crate::open(&url, BYTES, Absent::Create).unwrap())
}

/// Which of 200 writes fail.
fn failures(options: &str) -> Vec<bool> {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = bench(directory.path(), options);
    (0..200)
        .map(|at| match bench.write(at % 16 * 512, &[1; 512]) {
            Ok(()) => false,
            Err(IoError::Failed) => true,
            Err(other) => panic!("{other}"),
        })
        .collect()
}

#[test]
fn error_follows_from_its_seed() {
    let first = failures("error_rate=0.3&seed=5");
    assert_eq!(first, failures("error_rate=0.3&seed=5"));
    assert_ne!(first, failures("error_rate=0.3&seed=6"));
    let share = first.iter().filter(|failed| **failed).count();
    assert!((30..90).contains(&share), "{share} of 200 at a rate of 0.3");
}

#[test]
fn error_hits_what_it_is_told_to() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = bench(
        directory.path(),
        "error_rate=1&error_kind=enospc&error_on=write",
    );
    assert_eq!(bench.write(0, &[1; 512]), Err(IoError::NoSpace));
    assert!(bench.ask(Ask::Flush).is_ok());
    assert_eq!(
        bench.read(0, 512).unwrap(),
        vec![0; 512],
        "nothing was written"
    );
}

#[test]
fn error_is_switched_by_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("switch");
    let mut bench = bench(
        directory.path(),
        &format!("error_kind=hang&error_file={}", file.display()),
    );
    bench.write(0, &[1; 512]).unwrap();
    std::fs::write(&file, "").unwrap();
    // The file is looked for every few milliseconds.
    std::thread::sleep(Duration::from_millis(10));
    let data = vec![bench.buf(0, &[2; 512])];
    let hanging = bench.start(Ask::Write { offset: 0, data });
    for _ in 0..5 {
        bench.turn();
        assert!(!bench.has_ended(hanging));
    }
    std::fs::remove_file(&file).unwrap();
    bench.end(hanging).unwrap();
    assert_eq!(bench.read(0, 512).unwrap(), vec![2; 512]);
}

#[test]
fn delay_is_at_least_what_was_asked() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = bench(directory.path(), "delay_us=3000");
    let started = Instant::now();
    bench.write(0, &[1; 512]).unwrap();
    assert!(started.elapsed() >= Duration::from_millis(3));
}

#[test]
fn rate_bounds_the_bytes_of_reads_and_writes() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = bench(directory.path(), "rate_mib=64");
    let started = Instant::now();
    for _ in 0..4 {
        bench.write(0, &vec![1; 1 << 20]).unwrap();
    }
    // 4 MiB at 64 MiB/s take 62 ms, less the 10 ms of idle time that count.
    assert!(started.elapsed() >= Duration::from_millis(50));
}

#[test]
fn log_has_a_line_for_each_operation() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let options = format!("log={}&error_rate=1&error_on=flush", log.display());
    let mut bench = bench(directory.path(), &options);
    bench.write(512, &[1; 1024]).unwrap();
    bench.read(0, 512).unwrap();
    assert!(bench.ask(Ask::Flush).is_err());
    drop(bench);
    let text = std::fs::read_to_string(log).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
    let shown: Vec<_> = lines.iter().map(|line| line[1..5].join(" ")).collect();
    let expected = [
        "write 512 1024 ok",
        "read 0 512 ok",
        "flush 0 0 input/output_error",
    ];
    assert_eq!(shown, expected);
    assert!(
        lines
            .iter()
            .all(|line| line.len() == 6 && line[5].parse::<u64>().is_ok())
    );
}

#[test]
fn log_that_cannot_be_opened_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!(
        "file:{}/image?log=/nonexistent/log",
        directory.path().display()
    );
    let error = crate::open(&url, 4096, Absent::Create).err().unwrap();
    assert!(error.to_string().contains("/nonexistent/log"), "{error}");
}
