//! The ratios that say how good HDCS is, each with what limits it.
//!
//! A ratio is formed within a repetition; of those of all repetitions the median counts, and the least and the most say
//! how far to trust it.

use crate::bars::{Bar, median};
use crate::compare::{Findings, Sample};
use crate::peers::{Peer, Place};

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Row {
    /// Short name, for [`LIMITS`].
    pub key: &'static str,
    /// What is divided by what.
    pub what: &'static str,
    /// Whether more is better.
    pub more: bool,
    /// What it has to reach, and what would be better.
    pub wanted: [f64; 2],
    /// The ratio in each repetition.
    pub ratios: Vec<f64>,
}

/// What limits a row, in a sentence: written by hand after a look at what requests cost there. A row without one says
/// nothing.
pub const LIMITS: &[(&str, &str)] = &[
    (
        "write-device",
        "a span of 15 writes takes 690 µs to be durable, and 1.7 of them are in flight; what the device is measured by \
         need not be durable: it makes a third as many writes durable.",
    ),
    (
        "write-thread",
        "in memory, requests come one at a time: 0.38 receives for each instead of 0.27, and 5 writes share a span \
         instead of 10.",
    ),
    (
        "write-cpu",
        "the spans: without them (on-flush) a request takes as much of the processor as nbdkit's.",
    ),
    (
        "write-one",
        "the durable write, which is 206 of 257 µs: of two blocks, and with one more thread to wake than fio has.",
    ),
    (
        "write-one-cpu",
        "two turns and three calls of io_uring_enter for each request, and the device's part of them, which nbdkit has \
         none of: a request that makes nothing durable takes 29 µs, less than nbdkit's.",
    ),
    (
        "paced",
        "the durable write (202 of 256 µs); the rest is that node and client sleep before each request. NBD alone takes \
         68 µs at that pace (nbdkit) and a durable write of one block 172.",
    ),
    (
        "sustained-qemu",
        "qemu-nbd makes nothing durable; here every write is, and destaged besides.",
    ),
    (
        "sustained-p50",
        "destage writes to the same device, and a flush for the log writes that out, too: a span takes 1590 µs instead of \
         690.",
    ),
    (
        "sustained-memory",
        "the processor: destage takes 15 µs for each write beside the 15 of the write itself, and the file in memory 6 \
         more.",
    ),
    (
        "flush-nbdkit",
        "the processors: the client takes 11.5 µs for a request and the node 10.5, four fifths of both.",
    ),
    (
        "dram",
        "both processors are busy: the client takes 12 µs for a request, the node 11.",
    ),
    (
        "ssd",
        "the client takes 14 µs of a processor for a request and the node 18, two thirds of both; the device's row moved \
         by half.",
    ),
    (
        "sustained-four",
        "the device: a span takes 5.3 ms beside 20,000 destaged writes a second.",
    ),
    (
        "large-device",
        "the device, which makes a third as many writes of 64 KiB durable as it takes otherwise: less than are written \
         here.",
    ),
    (
        "four-one",
        "the device: four of fio make 2.1 times as many durable writes of 64 KiB as one, without any server.",
    ),
    (
        "four-deep",
        "the device, of which one volume takes all that it makes durable.",
    ),
];

impl Row {
    /// Median, least and most; none if it was not run.
    pub fn spread(&self) -> Option<[f64; 3]> {
        spread(self.ratios.iter().copied())
    }

    /// Its median beside what is wanted.
    pub fn bar(&self) -> Bar {
        let [must, aim] = self.wanted;
        Bar {
            what: self.what.to_owned(),
            measured: self.spread().map(|[middle, ..]| middle),
            must,
            aim: Some(aim),
            more: self.more,
        }
    }

    /// What limits it, if somebody has said so.
    pub fn limit(&self) -> Option<&'static str> {
        let found = LIMITS.iter().find(|(key, _)| *key == self.key);
        found.map(|(_, sentence)| *sentence)
    }
}

/// Median, least and most.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Option<[f64; 3]> {
    let values: Vec<f64> = values.into_iter().collect();
    let least = values.iter().copied().reduce(f64::min)?;
    let most = values.iter().copied().reduce(f64::max)?;
    Some([median(values), least, most])
}

/// One value of a run.
type Value = fn(&Sample) -> f64;

const IOPS: Value = |s| s.outcome.iops;
const CPU: Value = |s| s.server_cpu_us;
const MEAN: Value = |s| s.outcome.latency.mean;
const P50: Value = |s| s.outcome.latency.p50;
const P99: Value = |s| s.outcome.latency.p99;
const P9999: Value = |s| s.outcome.latency.p9999;

/// Whose runs under which profile.
type Cell = (&'static str, Peer);

/// Cell by cell within the repetitions of one place.
struct Table<'a> {
    findings: &'a Findings,
    place: Place,
}

impl Table<'_> {
    fn of(&self, (profile, peer): Cell) -> impl Iterator<Item = &Sample> {
        self.findings.samples.iter().filter(move |sample| {
            (sample.profile == profile && sample.peer == peer.name()) && sample.place == self.place
        })
    }

    fn by(&self, ours: Cell, theirs: Cell, value: Value) -> Vec<f64> {
        self.of(ours)
            .filter_map(|sample| {
                let mut others = self.of(theirs);
                let other = others.find(|other| other.repetition == sample.repetition)?;
                Some(value(sample) / value(other))
            })
            .collect()
    }

    /// A latency by that of a durable write, with NBD's before it if there is any.
    fn by_durable_write(&self, ours: Cell, nbd: Option<Cell>) -> Vec<f64> {
        if self.place == Place::Memory {
            return Vec::new();
        }
        self.of(ours)
            .filter_map(|sample| {
                let mut durable = self.findings.durable_write_us.iter();
                let (_, durable_us) = durable.find(|(one, _)| *one == sample.repetition)?;
                let nbd_us = match nbd {
                    None => 0.0,
                    Some(cell) => {
                        let mut others = self.of(cell);
                        MEAN(others.find(|other| other.repetition == sample.repetition)?)
                    }
                };
                Some(MEAN(sample) / (nbd_us + durable_us))
            })
            .collect()
    }
}

/// All rows, as measured in one place.
pub fn rows(findings: &Findings, place: Place) -> Vec<Row> {
    use Peer::{
        Beside, Device, DeviceDurable, DramHit, Four, Nbdkit, OnFlush, OnWrite, Qemu, SsdHit,
        Sustained, SustainedFour, SustainedMemory,
    };
    let table = Table { findings, place };
    let (one, deep, thread) = ("randwrite-qd1", "randwrite-qd32", "randwrite-qd32-thread");
    let (read, paced, sustained) = ("randread-qd32", "rate4000-sync32", "sustained");
    let (large1, large16) = ("write64k-qd1", "write64k-qd16");
    let same = |profile, ours, theirs, value| table.by((profile, ours), (profile, theirs), value);
    let at_least = |key, what, wanted, ratios| Row {
        key,
        what,
        more: true,
        wanted,
        ratios,
    };
    let at_most = |key, what, wanted, ratios| Row {
        more: false,
        ..at_least(key, what, wanted, ratios)
    };
    vec![
        at_least(
            "write-device",
            "4k randwrite QD32, on-write / device, IOPS",
            [0.95, 1.3],
            same(deep, OnWrite, Device, IOPS),
        ),
        at_least(
            "write-durable",
            "4k randwrite QD32, on-write / device, each write durable, IOPS",
            [1.0, 1.2],
            same(deep, OnWrite, DeviceDurable, IOPS),
        ),
        at_least(
            "write-qemu",
            "4k randwrite QD32, on-write / qemu-nbd raw, IOPS",
            [1.8, 2.5],
            same(deep, OnWrite, Qemu, IOPS),
        ),
        at_least(
            "write-thread",
            "4k randwrite QD32, on-write, fio --thread / as a process, IOPS",
            [0.9, 1.0],
            table.by((thread, OnWrite), (deep, OnWrite), IOPS),
        ),
        at_most(
            "write-p99",
            "4k randwrite QD32, on-write / device, p99",
            [2.0, 1.2],
            same(deep, OnWrite, Device, P99),
        ),
        at_most(
            "write-cpu",
            "4k randwrite QD32, on-write / nbdkit memory, server CPU",
            [1.25, 0.9],
            same(deep, OnWrite, Nbdkit, CPU),
        ),
        at_most(
            "write-one",
            "4k randwrite QD1, on-write / (nbdkit + durable write by fio), latency",
            [0.97, 0.8],
            table.by_durable_write((one, OnWrite), Some((one, Nbdkit))),
        ),
        at_most(
            "write-one-cpu",
            "4k randwrite QD1, on-write / nbdkit memory, server CPU",
            [1.6, 1.1],
            same(one, OnWrite, Nbdkit, CPU),
        ),
        at_most(
            "paced",
            "4000 writes a second, sync every 32, on-write / durable write by fio, mean",
            [1.3, 1.1],
            table.by_durable_write((paced, OnWrite), None),
        ),
        at_most(
            "paced-tail",
            "4000 writes a second, sync every 32, on-write / device, p99.99",
            [1.5, 1.0],
            same(paced, OnWrite, Device, P9999),
        ),
        at_least(
            "sustained-qemu",
            "sustained 4k randwrite QD32, file backend / qemu-nbd raw, IOPS",
            [1.0, 1.5],
            same(sustained, Sustained, Qemu, IOPS),
        ),
        at_most(
            "sustained-p50",
            "sustained 4k randwrite QD32, file backend / burst, p50",
            [1.5, 1.2],
            table.by((sustained, Sustained), (deep, OnWrite), P50),
        ),
        at_least(
            "sustained-memory",
            "sustained 4k randwrite QD32, backend in memory / burst, IOPS",
            [0.7, 0.85],
            table.by((sustained, SustainedMemory), (deep, OnWrite), IOPS),
        ),
        at_least(
            "sustained-four",
            "sustained 4k randwrite QD32 each, four volumes / one, IOPS",
            [1.2, 1.5],
            same(sustained, SustainedFour, Sustained, IOPS),
        ),
        at_most(
            "read-beside",
            "4k randread QD4, beside sustained writes / by itself, p50",
            [3.0, 2.0],
            same("read-beside", Beside, Sustained, P50),
        ),
        at_most(
            "read-beside-p99",
            "4k randread QD4, beside sustained writes / by itself, p99",
            [3.0, 2.0],
            same("read-beside", Beside, Sustained, P99),
        ),
        at_least(
            "flush-nbdkit",
            "4k randwrite QD32, on-flush / nbdkit memory, IOPS",
            [1.1, 1.25],
            same(deep, OnFlush, Nbdkit, IOPS),
        ),
        at_least(
            "large-device",
            "64k randwrite QD16, on-write / device, IOPS",
            [0.85, 1.0],
            same(large16, OnWrite, Device, IOPS),
        ),
        at_least(
            "large-durable",
            "64k randwrite QD16, on-write / device, each write durable, IOPS",
            [1.0, 1.2],
            same(large16, OnWrite, DeviceDurable, IOPS),
        ),
        at_least(
            "large-flush",
            "64k randwrite QD16, on-flush / on-write, IOPS",
            [1.0, 1.2],
            same(large16, OnFlush, OnWrite, IOPS),
        ),
        at_least(
            "dram",
            "4k randread QD32, DRAM hit / nbdkit memory, IOPS",
            [1.15, 1.3],
            same(read, DramHit, Nbdkit, IOPS),
        ),
        at_most(
            "dram-cpu",
            "4k randread QD32, DRAM hit / nbdkit memory, server CPU",
            [0.75, 0.6],
            same(read, DramHit, Nbdkit, CPU),
        ),
        at_least(
            "ssd",
            "4k randread QD32, SSD hit / device, IOPS",
            [0.8, 0.95],
            same(read, SsdHit, Device, IOPS),
        ),
        at_most(
            "ssd-cpu",
            "4k randread QD32, SSD hit / nbdkit memory, server CPU",
            [1.3, 1.0],
            same(read, SsdHit, Nbdkit, CPU),
        ),
        at_least(
            "four-one",
            "64k randwrite QD1 each, four volumes / one, IOPS",
            [2.4, 2.5],
            same(large1, Four, OnWrite, IOPS),
        ),
        at_least(
            "four-deep",
            "64k randwrite QD16 each, four volumes / one, IOPS",
            [1.8, 2.2],
            same(large16, Four, OnWrite, IOPS),
        ),
    ]
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fio::Outcome;

    /// A run that gave so many requests a second.
    pub fn sample(cell: Cell, place: Place, repetition: u32, iops: f64) -> Sample {
        Sample {
            profile: cell.0.to_owned(),
            peer: cell.1.name().to_owned(),
            place,
            repetition,
            outcome: Outcome {
                iops,
                ..Outcome::default()
            },
            server_cpu_us: 1.0,
            server_cpu_settled_us: 1.0,
            server_rss_bytes: 0,
            cost: None,
            volume: None,
            stalled: None,
        }
    }

    #[test]
    fn spread_is_median_least_and_most() {
        assert_eq!(spread([3.0, 1.0, 2.0]), Some([2.0, 1.0, 3.0]));
        assert_eq!(spread([]), None);
    }

    #[test]
    fn ratios_are_formed_within_a_repetition_and_a_place() {
        let (ours, theirs) = (
            ("randwrite-qd32", Peer::OnWrite),
            ("randwrite-qd32", Peer::Qemu),
        );
        let findings = Findings {
            // The machine is ten times slower in the second repetition; the third is not whole.
            samples: vec![
                sample(ours, Place::Disk, 0, 200.0),
                sample(theirs, Place::Disk, 0, 100.0),
                sample(ours, Place::Disk, 1, 30.0),
                sample(theirs, Place::Disk, 1, 10.0),
                sample(ours, Place::Disk, 2, 30.0),
                sample(ours, Place::Memory, 0, 1000.0),
            ],
            ..Findings::default()
        };
        let found = |place| {
            let rows = rows(&findings, place);
            let row = rows.into_iter().find(|row| row.key == "write-qemu");
            row.unwrap().ratios
        };
        assert_eq!(found(Place::Disk), [2.0, 3.0]);
        assert!(found(Place::Memory).is_empty());
    }

    #[test]
    fn limits_are_of_rows_that_there_are() {
        let rows = rows(&Findings::default(), Place::Disk);
        for (key, sentence) in LIMITS {
            assert!(rows.iter().any(|row| row.key == *key), "{key}");
            assert!(sentence.ends_with('.'), "{sentence}");
        }
        let mut keys: Vec<_> = rows.iter().map(|row| row.key).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), rows.len());
    }
}
