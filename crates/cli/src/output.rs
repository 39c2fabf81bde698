//! Tables and JSON for people and programs.

use comfy_table::{Cell, CellAlignment, Table, presets};
use hdcs_api::groups::ClusterStatus;
use hdcs_api::time::unix_ms;
use hdcs_api::{QosCounters, ShardCounters, StartProgress, Status, Volume, VolumeBenefit};
use serde::Serialize;

use super::client::Client;
use super::size::show;
use super::{Failure, pin, policy, scrub};

/// Print a line to standard output; a reader that has gone (`| head`) is no error.
pub fn line(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Print what a program reads.
pub fn raw(bytes: &[u8]) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(bytes);
}

/// Print a line to standard error; a reader that has gone (`2>&1 | head`) must not end what is under way.
pub fn note(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Print a value as JSON.
pub fn json<T: Serialize>(value: &T) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::failed(format!("cannot print JSON: {error}")))?;
    line(&text);
    Ok(())
}

/// A table without lines; columns named with a leading `>` are aligned to the right.
pub fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(
        columns
            .iter()
            .map(|column| Cell::new(column.trim_start_matches('>'))),
    );
    for (index, column) in columns.iter().enumerate() {
        if let (true, Some(column)) = (column.starts_with('>'), table.column_mut(index)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Print a table without the blanks at the ends of its lines.
pub fn print(table: &Table) {
    line(&trimmed(table));
}

/// The text of a table without the blanks at the ends of its lines.
pub fn trimmed(table: &Table) -> String {
    let text = table.to_string();
    let lines: Vec<_> = text.lines().map(str::trim_end).collect();
    lines.join("\n")
}

/// `part` of `whole` in percent.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        "-".to_owned()
    } else {
        format!("{:.0}%", part as f64 * 100.0 / whole as f64)
    }
}

/// The state of a volume, and whether it can only be read. One that is about to serve has no fault.
pub fn state(volume: &Volume) -> String {
    let read_only = if volume.read_only { ", read-only" } else { "" };
    let state = match volume.phase.as_str() {
        "opening" | "moving" => &volume.phase,
        _ => &volume.state,
    };
    format!("{state}{read_only}")
}

/// The shard of a volume, if it is on one.
pub fn shard(volume: &Volume) -> String {
    let shard = volume.shard.map(|shard| shard.to_string());
    shard.unwrap_or_else(|| "-".to_owned())
}

/// A list of volumes.
pub fn volumes(volumes: &[Volume]) {
    let has_shards = volumes.iter().any(|volume| volume.shard.is_some());
    let mut columns = vec![
        "NAME", "STATE", ">SIZE", ">DIRTY", ">LOG", ">CLIENTS", "BACKEND",
    ];
    if has_shards {
        columns.insert(6, ">SHARD");
    }
    let mut table = table(&columns);
    for volume in volumes {
        let (dirty, log) = match &volume.counters {
            Some(c) => (
                show(c.dirty_bytes),
                percent(c.log_used_bytes, c.log_prepared_bytes),
            ),
            None => ("-".to_owned(), "-".to_owned()),
        };
        let mut row = vec![
            volume.name.clone(),
            state(volume),
            show(volume.bytes),
            dirty,
            log,
            volume.connections.to_string(),
            volume.backend.clone(),
        ];
        if has_shards {
            row.insert(6, shard(volume));
        }
        table.add_row(row);
    }
    print(&table);
    for volume in volumes {
        if let Some(reason) = &volume.reason {
            line(&format!("\n{}: {reason}", volume.name));
        }
    }
}

/// One volume, in full.
pub fn volume(volume: &Volume) {
    let mut table = table(&["FIELD", "VALUE"]);
    let mut row = |field: &str, value: String| {
        table.add_row([field.to_owned(), value]);
    };
    row("name", volume.name.clone());
    row("state", state(volume));
    if let Some(reason) = &volume.reason {
        row("reason", reason.clone());
    }
    row(
        "size",
        format!("{} ({} bytes)", show(volume.bytes), volume.bytes),
    );
    row("backend", volume.backend.clone());
    if let Some(bytes) = volume.allocated_bytes {
        row("  allocated there", show(bytes));
    }
    if let Some(path) = &volume.home_path {
        row("local store (storage mode)", path.clone());
    }
    row(
        "write log",
        format!("{} ({})", volume.log_path, show(volume.log_bytes)),
    );
    if let Some(durability) = &volume.log_durability {
        row("  made durable by", durability.clone());
    }
    if let Some(group) = &volume.group {
        row("copies", crate::group::in_words(group));
    }
    row("policy in effect", policy::in_words(volume));
    if let Some(encryption) = &volume.encryption {
        let place = &encryption.place;
        let file = place.key_file.as_ref().map(|path| format!("file {path}"));
        let command = place.key_command.as_ref();
        let from = file.or_else(|| command.map(|command| format!("command `{command}`")));
        row(
            "encrypted with",
            format!(
                "data key {}, wrapped with key {} from {}",
                encryption.data_key,
                encryption.wrapped_with,
                from.unwrap_or_default()
            ),
        );
    }
    row("uuid", volume.uuid.clone());
    row("number", volume.number.to_string());
    row("clients", volume.connections.to_string());
    if let Some(shard) = volume.shard {
        let set = match volume.shard_set {
            Some(set) if set == shard => " (set for this volume)".to_owned(),
            Some(set) => format!(" ({set} is set for this volume)"),
            None => String::new(),
        };
        row("shard", format!("{shard}{set}"));
    }
    if let Some(c) = &volume.counters {
        row(
            "dirty",
            format!(
                "{}, oldest {:.1} s",
                show(c.dirty_bytes),
                c.dirty_age_ms as f64 / 1000.0
            ),
        );
        let in_use = format!(
            "{} of {} ({})",
            show(c.log_used_bytes),
            show(c.log_prepared_bytes),
            percent(c.log_used_bytes, c.log_prepared_bytes)
        );
        // What it has not been given yet, or has given back.
        let rest = match c.log_ring_bytes - c.log_prepared_bytes.min(c.log_ring_bytes) {
            0 => String::new(),
            _ => format!(", up to {}", show(c.log_ring_bytes)),
        };
        row("log in use", in_use + &rest);
        if c.log_stored_bytes < c.log_plain_bytes {
            row(
                "compressed in the log",
                format!(
                    "{} to {} ({})",
                    show(c.log_plain_bytes),
                    show(c.log_stored_bytes),
                    percent(c.log_stored_bytes, c.log_plain_bytes)
                ),
            );
        }
        if c.ssd_stored_bytes < c.ssd_plain_bytes {
            row(
                "compressed in the SSD tier",
                format!(
                    "{} to {} ({})",
                    show(c.ssd_plain_bytes),
                    show(c.ssd_stored_bytes),
                    percent(c.ssd_stored_bytes, c.ssd_plain_bytes)
                ),
            );
        }
        if let Some(home) = &c.home {
            row(
                "local store: dirty, clean, only in the backend",
                format!(
                    "{}, {}, {}",
                    show(home.dirty_bytes + home.zero_bytes),
                    show(home.clean_bytes),
                    show(home.absent_bytes)
                ),
            );
            let between = if home.backend_between {
                ", the backend is between two states"
            } else {
                ""
            };
            row(
                "tiering out",
                format!(
                    "{}, {} of {} to go{between}",
                    home.tier,
                    show(home.tier_left_bytes),
                    show(home.tier_bytes)
                ),
            );
        }
        row("not yet durable", show(c.unpersisted_bytes));
        row(
            "reads, writes, trims, flushes",
            format!("{}, {}, {}, {}", c.reads, c.writes, c.trims, c.flushes),
        );
        row("errors", c.errors.to_string());
        let blocks = c.log_hit_blocks + c.dram_hit_blocks + c.ssd_hit_blocks + c.miss_blocks;
        row(
            "reads from log, DRAM, SSD, backend",
            format!(
                "{}, {}, {}, {}",
                percent(c.log_hit_blocks, blocks),
                percent(c.dram_hit_blocks, blocks),
                percent(c.ssd_hit_blocks, blocks),
                percent(c.miss_blocks, blocks)
            ),
        );
        if let Some(benefit) = &volume.benefit {
            benefit_rows(benefit, &mut row);
        }
        if !volume.pins.is_empty() {
            row("pinned", pin::in_words(volume));
        }
        if c.warm_left_bytes > 0 {
            let left = format!(
                "{} of {} (`hdcs volume warm {} --cancel` gives that up)",
                show(c.warm_left_bytes),
                show(c.warm_bytes),
                volume.name
            );
            row("left to warm up", left);
        }
        if c.inherited_bytes > 0 {
            row("cached with other clones", show(c.inherited_bytes));
        }
        row(
            "destaged, coalesced",
            format!("{}, {}", show(c.destaged_bytes), show(c.coalesced_bytes)),
        );
        qos(&c.qos, &mut row);
    }
    if let Some(found) = &volume.scrub {
        let last = found.last.as_ref().map_or("never".to_owned(), |last| {
            let ago = unix_ms().saturating_sub(last.ended_ms) / 1000;
            let ago = long_time(ago);
            format!("{ago} ago: {}", scrub::in_words(last))
        });
        row("last whole scrub", last);
        if found.running {
            row(
                "scrub under way",
                format!(
                    "{}, {} of {} to go, at most {}/s",
                    found.part,
                    show(found.part_left_bytes),
                    show(found.part_bytes),
                    show(found.rate_bytes_per_s)
                ),
            );
        }
    }
    if let Some(heat) = &volume.heat {
        let saved = heat.saved_ms.map_or("none yet".to_owned(), |at| {
            format!(
                "written {} ago",
                long_time(unix_ms().saturating_sub(at) / 1000)
            )
        });
        let trouble = heat.trouble.as_ref();
        let trouble = trouble.map_or(String::new(), |why| format!("; {why}"));
        row("heat map", format!("{saved}{trouble}"));
    }
    if let Some(latency) = &volume.latency {
        for (name, l) in [
            ("read", &latency.read),
            ("write", &latency.write),
            ("flush", &latency.flush),
        ] {
            row(
                &format!("{name} latency p50, p99, p99.99"),
                format!("{:.0}, {:.0}, {:.0} µs", l.p50_us, l.p99_us, l.p99_99_us),
            );
        }
    }
    for (key, value) in &volume.settings {
        let mark = if volume.overridden.contains(key) {
            " (set for this volume)"
        } else {
            ""
        };
        row(key, format!("{value}{mark}"));
    }
    print(&table);
}

/// A time as people say it, in its largest unit.
fn long_time(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// What reading the volume costs, once it was measured, and how the cache weighs it for that.
fn benefit_rows(benefit: &VolumeBenefit, row: &mut impl FnMut(&str, String)) {
    let Some(miss_us) = benefit.miss_us else {
        return;
    };
    let ssd_hit = match benefit.ssd_hit_us {
        Some(micros) => format!("{:.2} ms", micros / 1000.0),
        None => "not measured".to_owned(),
    };
    row(
        "a read of the backend, of SSD",
        format!("{:.2} ms, {ssd_hit}", miss_us / 1000.0),
    );
    row(
        "weight in DRAM, in SSD",
        format!("{}, {}", benefit.dram_weight, benefit.ssd_weight),
    );
}

/// What quality of service did, if anything was set.
fn qos(qos: &QosCounters, row: &mut impl FnMut(&str, String)) {
    if qos.delayed_requests + qos.waiting_requests > 0 {
        let seconds = qos.delayed_ms as f64 / 1000.0;
        row(
            "delayed by quality of service",
            format!(
                "{} requests for {seconds:.1} s in all, {} wait",
                qos.delayed_requests, qos.waiting_requests
            ),
        );
    }
    let is_short = if qos.short { ": not reached" } else { "" };
    if qos.reserved_iops > 0 {
        row(
            "requests a second",
            format!(
                "reserved {}, served {}{is_short}",
                qos.reserved_iops, qos.served_iops
            ),
        );
    }
    if qos.reserved_bytes_per_s > 0 {
        row(
            "bytes a second",
            format!(
                "reserved {}, served {}{is_short}",
                show(qos.reserved_bytes_per_s),
                show(qos.served_bytes_per_s)
            ),
        );
    }
}

/// A thread of the data path.
fn shard_in_words(shard: &ShardCounters) -> String {
    let processor = shard.processor;
    let processor = processor.map_or(String::new(), |number| format!(", processor {number}"));
    format!(
        "{} connections, {} volumes, longest turn {:.1} ms{processor}",
        shard.connections,
        shard.volumes,
        shard.longest_turn_us as f64 / 1000.0
    )
}

/// How many volumes are being opened; and of a start how far it is, and how long the rest takes.
fn opening_in_words(opening: u64, all: u64, start: Option<&StartProgress>) -> String {
    let Some(start) = start else {
        return format!("{opening} of {all}");
    };
    let opened = start.volumes.saturating_sub(start.left);
    let so_far = format!(
        "{opened} of {} are open after {:.1} s",
        start.volumes,
        start.elapsed_ms as f64 / 1000.0
    );
    match start.left_ms {
        Some(left_ms) => format!("{so_far}, about {} s left", left_ms.div_ceil(1000)),
        None => so_far,
    }
}

/// How many volumes are in which state; those that are being opened are not errors yet.
fn by_state(status: &Status) -> String {
    let opening = status.volumes_opening;
    let mut counts = Vec::new();
    for (state, count) in &status.volumes_by_state {
        let count = match state.as_str() {
            "error" => count.saturating_sub(opening),
            _ => *count,
        };
        counts.push((state.as_str(), count));
    }
    counts.push(("opening", opening));
    counts.retain(|(_, count)| *count > 0);
    let counts = counts
        .iter()
        .map(|(state, count)| format!("{count} {state}"));
    counts.collect::<Vec<_>>().join(", ")
}

/// What a node is in its cluster.
fn cluster_in_words(cluster: &ClusterStatus) -> String {
    let connected = match &cluster.connected[..] {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    let records = match &cluster.records_trouble {
        None => format!("records in {}", cluster.records),
        Some(trouble) => trouble.clone(),
    };
    format!(
        "node {}, number {}, of {}; connected with {connected}, of {} others; {records}",
        cluster.node,
        cluster.number,
        cluster.id,
        cluster.others.len()
    )
}

/// `hdcs status`.
pub async fn status(client: &Client, as_json: bool) -> Result<(), Failure> {
    let status: Status = client.get("/v1/status").await?;
    if as_json {
        return json(&status);
    }
    let by_state = by_state(&status);
    let mut table = table(&["FIELD", "VALUE"]);
    let mut row = |field: &str, value: String| {
        table.add_row([field.to_owned(), value]);
    };
    row("state", status.state);
    row("version", status.version);
    row("process", status.pid.to_string());
    row("data", status.data);
    row("node", status.node);
    if let Some(cluster) = &status.cluster {
        row("cluster", cluster_in_words(cluster));
    }
    row("up", format!("{} s", status.uptime_ms / 1000));
    row("nbd", status.nbd_listen.join(", "));
    row("connections", status.connections.to_string());
    if status.shards.len() > 1 {
        for shard in &status.shards {
            row(&format!("  shard {}", shard.number), shard_in_words(shard));
        }
    }
    row("volumes", format!("{} ({by_state})", status.volumes));
    if status.volumes_opening > 0 || status.start.is_some() {
        row(
            "  opening",
            opening_in_words(
                status.volumes_opening,
                status.volumes,
                status.start.as_ref(),
            ),
        );
    }
    row("dirty", show(status.dirty_bytes));
    let memory = &status.memory;
    row(
        "memory",
        format!("{} of {}", show(memory.rss_bytes), show(memory.max_bytes)),
    );
    row(
        "  buffers",
        format!(
            "{}, {} free, {} recent writes",
            show(memory.pool_bytes),
            show(memory.pool_free_bytes),
            show(memory.resident_bytes)
        ),
    );
    let reserved =
        memory.volumes_log_bytes + memory.volumes_tables_bytes + memory.volumes_buffers_bytes;
    row(
        "  volumes",
        format!(
            "{} of {} reserved: {} logs, {} tables, {} buffers; {} of {} indexes of logs",
            show(reserved),
            show(memory.budget_volumes_bytes),
            show(memory.volumes_log_bytes),
            show(memory.volumes_tables_bytes),
            show(memory.volumes_buffers_bytes),
            show(memory.volumes_index_bytes),
            show(memory.volumes_index_max_bytes)
        ),
    );
    row(
        "  connections",
        format!(
            "{} of {}",
            show(memory.connections_used_bytes),
            show(memory.budget_connections_bytes)
        ),
    );
    row(
        "  indexes",
        format!(
            "{} cache, {} logs",
            show(memory.cache_index_bytes),
            show(memory.log_index_bytes)
        ),
    );
    let cache = &status.cache;
    row(
        "DRAM tier",
        format!(
            "{} of {}",
            show(cache.dram_used_bytes),
            show(cache.dram_bytes)
        ),
    );
    row(
        "SSD tier",
        if cache.ssd_state == "online" {
            format!(
                "online, {} of {}",
                show(cache.ssd_used_bytes),
                show(cache.ssd_bytes)
            )
        } else {
            cache.ssd_state.clone()
        },
    );
    if cache.ssd_used_bytes < cache.ssd_cached_bytes {
        row(
            "  compressed",
            format!(
                "{} to {} ({})",
                show(cache.ssd_cached_bytes),
                show(cache.ssd_used_bytes),
                percent(cache.ssd_used_bytes, cache.ssd_cached_bytes)
            ),
        );
    }
    if cache.ssd_failures > 0 {
        row(
            "  given up, came back",
            format!("{}, {}", cache.ssd_failures, cache.ssd_readmissions),
        );
    }
    print(&table);
    for problem in &status.problems {
        let since = problem
            .for_ms
            .map_or(String::new(), |ms| format!(" for {} s", ms / 1000));
        line(&format!(
            "\n{}: {}{since}: {}",
            problem.part, problem.state, problem.reason
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_says_how_far_it_is_and_how_long_the_rest_takes_once_that_can_be_told() {
        assert_eq!(opening_in_words(1, 900, None), "1 of 900");
        let mut start = StartProgress {
            volumes: 900,
            left: 900,
            elapsed_ms: 40,
            left_ms: None,
        };
        let said = opening_in_words(900, 902, Some(&start));
        assert_eq!(said, "0 of 900 are open after 0.0 s");
        (start.left, start.elapsed_ms, start.left_ms) = (600, 1500, Some(3000));
        assert_eq!(
            opening_in_words(600, 902, Some(&start)),
            "300 of 900 are open after 1.5 s, about 3 s left"
        );
    }
}
