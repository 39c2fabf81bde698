//! What a request costs a node: what its metrics counted, and the processor time of its threads, of which the kernel's
//! workers for io_uring are told apart.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::bars::median;
use crate::failure::{Context, Result};
use crate::node::Node;
use crate::process;

/// Threads of the kernel's that work for an io_uring: `iou-wrk-123`, `iou-sqp-123`.
const KERNEL_WORKERS: &str = "iou-";

/// A page of metrics: values by name and labels, as they stand there.
pub type Metrics = BTreeMap<String, f64>;

/// What one request cost, but for the last two of the spans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Turns of the data path.
    pub turns: f64,
    /// Calls of `io_uring_enter`.
    pub enters: f64,
    /// What other threads told the data path's threads. A few come from whoever reads the metrics.
    #[serde(default)]
    pub messages: f64,
    /// Times that the data path's thread slept and was woken.
    pub wakeups: f64,
    /// Receives.
    pub receives: f64,
    /// Microseconds of a write in the open span.
    pub open_us: f64,
    /// From there until it was durable.
    pub device_us: f64,
    /// Of a reply from the turn in which its sending began until that in which it ended.
    pub send_us: f64,
    /// Processor time of the data path's threads, in microseconds.
    #[serde(default)]
    pub shard_cpu_us: f64,
    /// The same of all of the node's own threads: writers of the log are among them.
    pub threads_cpu_us: f64,
    /// The same of the kernel's workers for its io_uring.
    pub workers_cpu_us: f64,
    /// Writes in a span.
    pub span_writes: f64,
    /// Spans in flight when one begins, itself included.
    pub spans_in_flight: f64,
}

impl Cost {
    /// Of several runs: the median of each.
    pub fn median(costs: &[Self]) -> Self {
        let of = |value: fn(&Self) -> f64| median(costs.iter().map(value));
        Self {
            turns: of(|c| c.turns),
            enters: of(|c| c.enters),
            messages: of(|c| c.messages),
            wakeups: of(|c| c.wakeups),
            receives: of(|c| c.receives),
            open_us: of(|c| c.open_us),
            device_us: of(|c| c.device_us),
            send_us: of(|c| c.send_us),
            shard_cpu_us: of(|c| c.shard_cpu_us),
            threads_cpu_us: of(|c| c.threads_cpu_us),
            workers_cpu_us: of(|c| c.workers_cpu_us),
            span_writes: of(|c| c.span_writes),
            spans_in_flight: of(|c| c.spans_in_flight),
        }
    }
}

/// The counters of a node at one moment.
#[derive(Debug)]
pub struct Meter {
    metrics: Metrics,
    /// Of the whole process, with threads that have ended.
    process_us: f64,
    threads_us: f64,
}

impl Meter {
    /// Now.
    pub fn read(node: &Node) -> Result<Self> {
        let metrics = parse(&node.metrics()?);
        let process_us = node.usage()?.cpu_us;
        Ok(Self {
            metrics,
            process_us,
            threads_us: own_threads_us(node.pid())?,
        })
    }

    /// What so many requests cost from then until `end`.
    pub fn until(&self, end: &Self, requests: u64) -> Cost {
        let grown = |name: &str| sum(&end.metrics, name) - sum(&self.metrics, name);
        let per = |value: f64, of: f64| if of > 0.0 { value / of } else { 0.0 };
        let each = |value: f64| per(value, requests as f64);
        let entries = grown("hdcs_volume_log_entries_total");
        let spans = grown("hdcs_volume_log_spans_total");
        let in_span = |stage: &str| {
            let labelled = |metrics| sum_of(metrics, "hdcs_volume_log_entry_seconds_total", stage);
            per(labelled(&end.metrics) - labelled(&self.metrics), entries) * 1e6
        };
        let threads_us = end.threads_us - self.threads_us;
        // Workers come and go: what is not the node's own threads' was theirs.
        let workers_us = (end.process_us - self.process_us - threads_us).max(0.0);
        Cost {
            turns: each(grown("hdcs_shard_turns_total")),
            enters: each(grown("hdcs_shard_enters_total")),
            messages: each(grown("hdcs_shard_messages_total")),
            wakeups: each(grown("hdcs_shard_wakeups_total")),
            receives: each(grown("hdcs_shard_receives_total")),
            open_us: in_span("stage=\"open\""),
            device_us: in_span("stage=\"device\""),
            send_us: per(
                grown("hdcs_shard_reply_seconds_total"),
                grown("hdcs_shard_replies_total"),
            ) * 1e6,
            shard_cpu_us: each(grown("hdcs_shard_cpu_seconds_total")) * 1e6,
            threads_cpu_us: each(threads_us),
            workers_cpu_us: each(workers_us),
            span_writes: per(entries, spans),
            spans_in_flight: per(grown("hdcs_volume_log_spans_in_flight_total"), spans),
        }
    }
}

/// Read a page in Prometheus' text format.
pub fn parse(page: &str) -> Metrics {
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    samples
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}

/// Sum of a family over all its labels: of all shards, or of all volumes.
fn sum(metrics: &Metrics, family: &str) -> f64 {
    sum_of(metrics, family, "")
}

/// The same of those whose labels have this one.
fn sum_of(metrics: &Metrics, family: &str, label: &str) -> f64 {
    let samples = metrics.range(family.to_owned()..);
    samples
        .take_while(|(name, _)| name.starts_with(family))
        .filter(|(name, _)| match name[family.len()..].chars().next() {
            None => label.is_empty(),
            Some(next) => next == '{' && name.contains(label),
        })
        .map(|(_, value)| value)
        .sum()
}

/// Processor time of a process' threads that are not the kernel's workers, in microseconds.
fn own_threads_us(pid: u32) -> Result<f64> {
    let tasks = format!("/proc/{pid}/task");
    let mut all_us = 0.0;
    for task in fs::read_dir(&tasks).context(&tasks)? {
        let path = task.context(&tasks)?.path().join("stat");
        // A thread may have ended meanwhile.
        if let Ok(stat) = fs::read_to_string(&path)
            && let Some((name, cpu_us)) = thread(&stat)
            && !name.starts_with(KERNEL_WORKERS)
        {
            all_us += cpu_us;
        }
    }
    Ok(all_us)
}

/// Name of a thread, and its processor time in microseconds, from its `stat`.
fn thread(stat: &str) -> Option<(&str, f64)> {
    let name = stat.split_once('(')?.1.rsplit_once(')')?.0;
    Some((name, process::cpu_us_of_stat(stat)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP hdcs_shard_turns_total Turns.\n# TYPE hdcs_shard_turns_total counter\n\
        hdcs_shard_turns_total{shard=\"0\"} 100\nhdcs_shard_turns_total{shard=\"1\"} 20\n\
        hdcs_volume_log_entry_seconds_total{volume=\"a b\",stage=\"open\"} 0.5\n\
        hdcs_volume_log_entry_seconds_total{volume=\"a b\",stage=\"device\"} 1.5e-3\n\
        hdcs_uptime_seconds 3\nhdcs_uptime_seconds_more 4\n";

    #[test]
    fn page_is_read_and_summed_over_labels() {
        let metrics = parse(PAGE);
        assert!((sum(&metrics, "hdcs_shard_turns_total") - 120.0).abs() < 1e-9);
        let device = sum_of(
            &metrics,
            "hdcs_volume_log_entry_seconds_total",
            "stage=\"device\"",
        );
        assert!((device - 1.5e-3).abs() < 1e-12);
        assert!((sum(&metrics, "hdcs_uptime_seconds") - 3.0).abs() < 1e-9);
        assert!(sum(&metrics, "hdcs_none").abs() < 1e-9);
    }

    #[test]
    fn cost_is_of_one_request_and_workers_are_apart() {
        let meter = |page: &str, process_us, threads_us| Meter {
            metrics: parse(page),
            process_us,
            threads_us,
        };
        let before = meter("hdcs_shard_turns_total{shard=\"0\"} 50\n", 1000.0, 900.0);
        let after = meter(
            "hdcs_shard_turns_total{shard=\"0\"} 90\nhdcs_volume_log_entries_total{volume=\"v\"} 10\n\
             hdcs_volume_log_spans_total{volume=\"v\"} 4\nhdcs_volume_log_spans_in_flight_total{volume=\"v\"} 6\n\
             hdcs_volume_log_entry_seconds_total{volume=\"v\",stage=\"open\"} 0.001\n",
            2000.0,
            1500.0,
        );
        let cost = before.until(&after, 20);
        let expected = Cost {
            turns: 2.0,
            span_writes: 2.5,
            spans_in_flight: 1.5,
            open_us: 100.0,
            threads_cpu_us: 30.0,
            workers_cpu_us: 20.0,
            ..Cost::default()
        };
        assert_eq!(cost, expected);
    }

    #[test]
    fn thread_is_known_by_its_name() {
        let stat = "12 (iou-wrk-10) S 1 2 3 4 5 6 7 8 9 10 200 100 0 0 20 0 1";
        let (name, cpu_us) = thread(stat).unwrap();
        assert!(name.starts_with(KERNEL_WORKERS));
        assert!(cpu_us > 0.0);
        assert_eq!(thread("12 (a) b) S 1").map(|(name, _)| name), None);
        assert!(own_threads_us(std::process::id()).is_ok());
    }
}
