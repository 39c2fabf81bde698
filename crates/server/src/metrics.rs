//! Metrics in Prometheus' text format (version 0.0.4).
//!
//! Written by hand: the client crates keep registries of live counters, and ours are snapshots
//! that a shard hands over, with summaries that were computed already. What is left of the format
//! is a HELP and a TYPE line per family and three escapes per label.
//!
//! Invariants:
//! 1. All samples of a family are together, after its HELP and TYPE.
//! 2. Units are base units (bytes, seconds), and counters end in `_total`.

use std::fmt::Write;

use hdcs_api::{
    Counters, HomeCounters, LastScrub, Latency, Scrub, ShardCounters, StartProgress, Status,
    StoreCounters, Volume, VolumeBenefit,
};
use hdcs_core::volume::Policy;

use crate::config::value::Word;
use crate::control::view;

/// The content type of what [`render`] returns.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A family with samples of what volumes or shards have one of, such as counters.
struct Family<T: 'static, V: 'static = f64> {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Samples<T, V>,
}

/// Labels beside that of the volume or shard, and the value.
type Samples<T, V> = &'static [(&'static str, fn(&T) -> V)];

const fn counter<T, V>(
    name: &'static str,
    help: &'static str,
    samples: Samples<T, V>,
) -> Family<T, V> {
    let kind = "counter";
    Family {
        name,
        kind,
        help,
        samples,
    }
}

const fn gauge<T, V>(
    name: &'static str,
    help: &'static str,
    samples: Samples<T, V>,
) -> Family<T, V> {
    let kind = "gauge";
    Family {
        name,
        kind,
        help,
        samples,
    }
}

const BLOCK_BYTES: f64 = hdcs_core::base::limits::BLOCK_BYTES as f64;

/// Of what every open volume counts.
const OF_COUNTERS: &[Family<Counters>] = &[
    counter(
        "hdcs_volume_requests_total",
        "Requests answered, by kind.",
        &[
            ("op=\"read\"", |c| c.reads as f64),
            ("op=\"write\"", |c| c.writes as f64),
            ("op=\"trim\"", |c| c.trims as f64),
            ("op=\"flush\"", |c| c.flushes as f64),
        ],
    ),
    counter(
        "hdcs_volume_request_errors_total",
        "Requests answered with an error.",
        &[("", |c| c.errors as f64)],
    ),
    counter(
        "hdcs_volume_client_bytes_total",
        "Bytes moved for clients, by kind.",
        &[
            ("op=\"read\"", |c| c.read_bytes as f64),
            ("op=\"write\"", |c| c.write_bytes as f64),
        ],
    ),
    counter(
        "hdcs_volume_read_blocks_total",
        "4 KiB blocks read for clients, by where they were found.",
        &[
            ("tier=\"log\"", |c| c.log_hit_blocks as f64),
            ("tier=\"dram\"", |c| c.dram_hit_blocks as f64),
            ("tier=\"ssd\"", |c| c.ssd_hit_blocks as f64),
            ("tier=\"backend\"", |c| c.miss_blocks as f64),
        ],
    ),
    counter(
        "hdcs_volume_read_ahead_bytes_total",
        "Bytes read ahead.",
        &[("", |c| c.read_ahead_blocks as f64 * BLOCK_BYTES)],
    ),
    counter(
        "hdcs_volume_corrupt_blocks_total",
        "Blocks that failed their checksum.",
        &[
            ("place=\"cache\"", |c| c.cache_corrupt_blocks as f64),
            ("place=\"log\"", |c| c.log_corrupt_blocks as f64),
        ],
    ),
    gauge(
        "hdcs_volume_lost_bytes",
        "Bytes that were lost with a damaged write log and not written since.",
        &[("", |c| c.lost_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_log_used_bytes",
        "Bytes of the write log in use.",
        &[("", |c| c.log_used_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_log_size_bytes",
        "Bytes of the write log that can be in use at most.",
        &[("", |c| c.log_ring_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_log_prepared_bytes",
        "Bytes of the write log that can be in use now; the rest of its size is not taken from the file system.",
        &[("", |c| c.log_prepared_bytes as f64)],
    ),
    counter(
        "hdcs_volume_log_written_bytes_total",
        "Bytes written to the log's device.",
        &[("", |c| c.log_written_bytes as f64)],
    ),
    counter(
        "hdcs_volume_log_spans_total",
        "Spans written to the log's device.",
        &[("", |c| c.log_spans as f64)],
    ),
    counter(
        "hdcs_volume_log_entries_total",
        "Writes, zeroes and discards whose spans became durable.",
        &[("", |c| c.spans.entries as f64)],
    ),
    counter(
        "hdcs_volume_log_spans_in_flight_total",
        "Spans that were being written when the write of one began, that one included, summed up: by \
         hdcs_volume_log_spans_total, how many are in flight.",
        &[("", |c| c.spans.in_flight as f64)],
    ),
    counter(
        "hdcs_volume_log_entry_seconds_total",
        "Time of entries in spans, all entries together: until their span was sealed (`open`), and from then until it \
         was durable (`device`). By hdcs_volume_log_entries_total, that of one write.",
        &[
            ("stage=\"open\"", |c| micros(c.spans.open_us)),
            ("stage=\"device\"", |c| micros(c.spans.device_us)),
        ],
    ),
    counter(
        "hdcs_volume_log_plain_bytes_total",
        "Bytes of data that the write log has taken, before they were compressed.",
        &[("", |c| c.log_plain_bytes as f64)],
    ),
    counter(
        "hdcs_volume_log_stored_bytes_total",
        "Bytes that this data has in the write log: by the above, what compression leaves of it.",
        &[("", |c| c.log_stored_bytes as f64)],
    ),
    counter(
        "hdcs_volume_ssd_plain_bytes_total",
        "Bytes of lines that the SSD tier has taken, before they were compressed.",
        &[("", |c| c.ssd_plain_bytes as f64)],
    ),
    counter(
        "hdcs_volume_ssd_stored_bytes_total",
        "Bytes that these lines have there: by the above, what compression leaves of them.",
        &[("", |c| c.ssd_stored_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_pinned_bytes",
        "Bytes that are pinned in the SSD tier.",
        &[("", |c| c.pinned_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_pinned_left_bytes",
        "Of them, what is still to be looked at or fetched.",
        &[("", |c| c.pinned_left_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_warm_bytes",
        "All bytes of the warm-up that is under way.",
        &[("", |c| c.warm_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_warm_left_bytes",
        "Of them, those still to be looked at or fetched.",
        &[("", |c| c.warm_left_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_dirty_bytes",
        "Bytes that the backend does not have yet.",
        &[("", |c| c.dirty_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_dirty_age_seconds",
        "Age of the oldest of them. In storage mode it counts from the latest of these: the volume was opened; something \
         became dirty while nothing was; the last tier that has ended took its state.",
        &[("", |c| seconds(c.dirty_age_ms))],
    ),
    gauge(
        "hdcs_volume_unpersisted_bytes",
        "Bytes acknowledged and not yet durable.",
        &[("", |c| c.unpersisted_bytes as f64)],
    ),
    counter(
        "hdcs_volume_destaged_bytes_total",
        "Bytes written to the backend by destage.",
        &[("", |c| c.destaged_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_destage_bytes_per_second",
        "The same, over the last second or so.",
        &[("", |c| c.destage_bytes_per_s as f64)],
    ),
    counter(
        "hdcs_volume_coalesced_bytes_total",
        "Dirty bytes that a later write covered before they were destaged.",
        &[("", |c| c.coalesced_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_policy_remaining_bytes",
        "Bytes still to go until the policy that was set is in effect, at least 1; 0 once it is.",
        &[("", |c| c.policy_remaining_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_flush_remaining_bytes",
        "Of a running flush: bytes still to go.",
        &[("", |c| c.flush_remaining_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_copy_remaining_bytes",
        "Of a snapshot or clone that has to copy data: bytes still to go.",
        &[("", |c| c.copy_remaining_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_throttled_requests",
        "Requests waiting for room in the log.",
        &[("", |c| c.throttled_requests as f64)],
    ),
    counter(
        "hdcs_volume_throttled_seconds_total",
        "Time that requests have waited for room.",
        &[("", |c| seconds(c.throttled_ms))],
    ),
    counter(
        "hdcs_volume_qos_delayed_requests_total",
        "Requests that quality of service has delayed.",
        &[("", |c| c.qos.delayed_requests as f64)],
    ),
    counter(
        "hdcs_volume_qos_delayed_seconds_total",
        "How long it has delayed them.",
        &[("", |c| seconds(c.qos.delayed_ms))],
    ),
    gauge(
        "hdcs_volume_qos_waiting_requests",
        "Requests that wait for their turn by quality of service.",
        &[("", |c| c.qos.waiting_requests as f64)],
    ),
    gauge(
        "hdcs_volume_qos_short",
        "1 if the last second brought less than is reserved, although there was always something to do.",
        &[("", |c| bit(c.qos.short))],
    ),
    counter(
        "hdcs_volume_queued_seconds_total",
        "Time that requests have waited for their turn, or for one of those that the volume works on at once to end.",
        &[("", |c| micros(c.queued_us))],
    ),
    gauge(
        "hdcs_volume_requests_in_flight",
        "Requests not answered yet.",
        &[("", |c| c.requests_in_flight as f64)],
    ),
    counter(
        "hdcs_volume_backend_errors_total",
        "Backend operations that failed.",
        &[("", |c| c.backend_errors as f64)],
    ),
    gauge(
        "hdcs_volume_inherited_bytes",
        "Bytes still as in the snapshot that the volume began as, which clones of it share in the cache.",
        &[("", |c| c.inherited_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_replayed_entries",
        "Log entries that the last opening replayed.",
        &[("", |c| c.replayed_entries as f64)],
    ),
    gauge(
        "hdcs_volume_replay_seconds",
        "How long the last opening took.",
        &[("", |c| seconds(c.replay_ms))],
    ),
];

/// Of sizes in bytes.
const OF_SIZES: &[Family<u64>] = &[gauge(
    "hdcs_volume_size_bytes",
    "Size of the volume.",
    &[("", |bytes| *bytes as f64)],
)];

/// What reading volumes costs, and how the read cache weighs them.
const OF_BENEFITS: &[Family<VolumeBenefit, Option<f64>>] = &[
    gauge(
        "hdcs_volume_read_cost_seconds",
        "Mean time of late that a client's read has waited for a line of the backend, or for a block of the SSD tier \
         (of all volumes).",
        &[
            ("tier=\"backend\"", |b| b.miss_us.map(|us| us / 1e6)),
            ("tier=\"ssd\"", |b| b.ssd_hit_us.map(|us| us / 1e6)),
        ],
    ),
    gauge(
        "hdcs_volume_cache_weight",
        "How many times as long the volume's blocks are held on to as the mean of the tier; see cache_tiering.",
        &[
            ("tier=\"dram\"", |b| Some(b.dram_weight)),
            ("tier=\"ssd\"", |b| Some(b.ssd_weight)),
        ],
    ),
];

/// Of each thread of the data path.
const OF_SHARDS: &[Family<ShardCounters>] = &[
    gauge(
        "hdcs_shard_volumes",
        "Volumes on the thread.",
        &[("", |c| c.volumes as f64)],
    ),
    gauge(
        "hdcs_shard_connections",
        "NBD connections open on the thread.",
        &[("", |c| c.connections as f64)],
    ),
    gauge(
        "hdcs_shard_longest_turn_seconds",
        "The longest turn of the thread in the last 30 to 60 seconds.",
        &[("", |c| micros(c.longest_turn_us))],
    ),
    counter(
        "hdcs_shard_turns_total",
        "Turns of the data path's loop.",
        &[("", |c| c.turns as f64)],
    ),
    counter(
        "hdcs_shard_wakeups_total",
        "Times that its thread slept and was woken.",
        &[("", |c| c.wakeups as f64)],
    ),
    counter(
        "hdcs_shard_enters_total",
        "Calls of io_uring_enter.",
        &[("", |c| c.enters as f64)],
    ),
    counter(
        "hdcs_shard_completions_total",
        "Completions of io_uring.",
        &[("", |c| c.completions as f64)],
    ),
    counter(
        "hdcs_shard_messages_total",
        "What other threads told the thread: commands of the control plane and of other threads of the data path, and that the SSD tier or memory has changed. Requests of clients need none.",
        &[("", |c| c.messages as f64)],
    ),
    counter(
        "hdcs_shard_receives_total",
        "Receives of NBD connections that ended; each may bring several requests.",
        &[("", |c| c.receives as f64)],
    ),
    counter(
        "hdcs_shard_sends_total",
        "Sends to NBD connections that ended; each may carry several replies.",
        &[("", |c| c.sends as f64)],
    ),
    counter(
        "hdcs_shard_replies_total",
        "Replies sent.",
        &[("", |c| c.replies as f64)],
    ),
    counter(
        "hdcs_shard_reply_seconds_total",
        "Time of replies from the turn in which their sending began until that in which it ended, all replies together.",
        &[("", |c| micros(c.reply_us))],
    ),
    counter(
        "hdcs_shard_cpu_seconds_total",
        "Processor time of the data path's thread. Workers that the kernel has for it (iou-wrk, iou-sqp) are not in it.",
        &[
            ("mode=\"user\"", |c| micros(c.cpu_user_us)),
            ("mode=\"system\"", |c| micros(c.cpu_system_us)),
        ],
    ),
];

/// Requests to object stores, of the volumes over one.
const OF_STORES: &[Family<StoreCounters>] = &[
    counter(
        "hdcs_volume_store_requests_total",
        "Requests to the object store behind the volume, those that failed included.",
        &[
            ("op=\"put\"", |c| c.puts as f64),
            ("op=\"get\"", |c| c.gets as f64),
            ("op=\"delete\"", |c| c.deletes as f64),
            ("op=\"list\"", |c| c.lists as f64),
        ],
    ),
    counter(
        "hdcs_volume_store_puts_total",
        "Those of them that put an object, by what it is; snapshots are not among them.",
        &[
            ("object=\"data\"", |c| c.puts_data as f64),
            ("object=\"map\"", |c| c.puts_map as f64),
            ("object=\"manifest\"", |c| c.puts_manifest as f64),
        ],
    ),
    counter(
        "hdcs_volume_store_retries_total",
        "Those of them that repeated one that had failed.",
        &[("", |c| c.retries as f64)],
    ),
    counter(
        "hdcs_volume_store_bytes_total",
        "Bytes moved by them.",
        &[
            ("op=\"put\"", |c| c.put_bytes as f64),
            ("op=\"get\"", |c| c.get_bytes as f64),
        ],
    ),
    counter(
        "hdcs_volume_map_pages_damaged_total",
        "Reads of a page of the map that was not what it should be.",
        &[("", |c| c.damaged_map_pages as f64)],
    ),
    counter(
        "hdcs_volume_map_pages_lost_total",
        "Pages of the map that were given up: what was there and has not been written since cannot be read.",
        &[("", |c| c.lost_map_pages as f64)],
    ),
];

/// Local stores of the volumes in storage mode.
const OF_HOMES: &[Family<HomeCounters>] = &[
    gauge(
        "hdcs_volume_home_bytes",
        "Bytes of the local store by what the backend has of them.",
        &[
            ("state=\"dirty\"", |c| c.dirty_bytes as f64),
            ("state=\"zero\"", |c| c.zero_bytes as f64),
            ("state=\"clean\"", |c| c.clean_bytes as f64),
            ("state=\"absent\"", |c| c.absent_bytes as f64),
        ],
    ),
    counter(
        "hdcs_volume_home_written_bytes_total",
        "Bytes written to the local store, by what they are.",
        &[
            ("part=\"data\"", |c| c.data_written_bytes as f64),
            ("part=\"map\"", |c| c.map_written_bytes as f64),
            ("part=\"checksums\"", |c| c.checksums_written_bytes as f64),
        ],
    ),
    counter(
        "hdcs_volume_home_damaged_reads_total",
        "Sectors of the local store that were read and did not match their checksums.",
        &[("", |c| c.damaged_reads as f64)],
    ),
    gauge(
        "hdcs_volume_home_damaged_sectors",
        "Sectors of the local store that did not match their checksums, and were not written since.",
        &[("", |c| c.damaged_sectors as f64)],
    ),
    gauge(
        "hdcs_volume_tier_remaining_bytes",
        "Of a tier that is under way: bytes of data still to go.",
        &[("", |c| c.tier_left_bytes as f64)],
    ),
    counter(
        "hdcs_volume_tiers_total",
        "How often everything that was dirty was tiered out.",
        &[("", |c| c.tiers as f64)],
    ),
    counter(
        "hdcs_volume_tiered_bytes_total",
        "Bytes of data tiered out; zeroes do not count.",
        &[("", |c| c.tiered_bytes as f64)],
    ),
    gauge(
        "hdcs_volume_backend_between",
        "1 while the backend is between two states, since a tier has begun and not ended.",
        &[("", |c| bit(c.backend_between))],
    ),
];

/// Scrubs that are under way.
const OF_SCRUBS: &[Family<Scrub>] = &[
    gauge(
        "hdcs_scrub_running",
        "1 while the volume is being scrubbed.",
        &[("", |scrub| bit(scrub.running))],
    ),
    gauge(
        "hdcs_scrub_read_bytes",
        "Bytes that the running scrub has read.",
        &[("", |scrub| scrub.read_bytes as f64)],
    ),
];

/// The last scrubs that came to their end.
const OF_LAST_SCRUBS: &[Family<LastScrub>] = &[
    gauge(
        "hdcs_scrub_last_end_timestamp_seconds",
        "Unix time at which the last whole scrub ended.",
        &[("", |last| seconds(last.ended_ms))],
    ),
    gauge(
        "hdcs_scrub_last_bad_blocks",
        "4 KiB blocks that the last whole scrub found bad.",
        &[("", |last| last.bad_blocks as f64)],
    ),
    gauge(
        "hdcs_scrub_last_healed_blocks",
        "Those of them that were made good.",
        &[("", |last| last.healed_blocks as f64)],
    ),
    gauge(
        "hdcs_scrub_last_problems",
        "What the last whole scrub found wrong and could not make good.",
        &[("", |last| last.problems.len() as f64)],
    ),
];

/// Heat maps that are kept, by when they were written.
const OF_HEAT_MAPS: &[Family<u64>] = &[gauge(
    "hdcs_volume_heat_saved_timestamp_seconds",
    "Unix time at which the volume's heat map was written last.",
    &[("", |saved_ms| seconds(*saved_ms))],
)];

fn seconds(millis: u64) -> f64 {
    millis as f64 / 1000.0
}

fn micros(micros: u64) -> f64 {
    micros as f64 / 1e6
}

/// 1 for what is so, 0 for what is not.
fn bit(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}

/// Text in the making.
#[derive(Default)]
struct Page {
    text: String,
    family: &'static str,
}

impl Page {
    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        if self.family != name {
            self.family = name;
            self.line(format_args!("# HELP {name} {help}"));
            self.line(format_args!("# TYPE {name} {kind}"));
        }
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{line}");
    }

    fn sample(&mut self, suffix: &str, labels: &[&str], value: f64) {
        let name = self.family;
        let labels = labels
            .iter()
            .filter(|label| !label.is_empty())
            .copied()
            .collect::<Vec<_>>()
            .join(",");
        if labels.is_empty() {
            self.line(format_args!("{name}{suffix} {value}"));
        } else {
            self.line(format_args!("{name}{suffix}{{{labels}}} {value}"));
        }
    }

    fn single(&mut self, name: &'static str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.sample("", &[], value);
    }

    /// Families with the samples of those that have what these are of, by their labels; see [`with`].
    fn families<T, V: Into<Option<f64>>>(&mut self, of: &[(String, &T)], all: &[Family<T, V>]) {
        for family in all {
            self.family(family.name, family.kind, family.help);
            for (whose, one) in of {
                for (labels, value) in family.samples {
                    let found: Option<f64> = value(one).into();
                    if let Some(found) = found {
                        self.sample("", &[whose, labels], found);
                    }
                }
            }
        }
    }

    /// The same of what few volumes have: where none has it, nothing is said of it.
    fn families_if_any<T>(&mut self, of: &[(String, &T)], all: &[Family<T>]) {
        if !of.is_empty() {
            self.families(of, all);
        }
    }
}

fn label(name: &str, value: &str) -> String {
    let escaped = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{name}=\"{escaped}\"")
}

/// The label of each volume that has what `of` says, and what it has.
fn with<'a, T>(
    volumes: &'a [Volume],
    of: impl Fn(&'a Volume) -> Option<&'a T>,
) -> Vec<(String, &'a T)> {
    let labelled = |volume: &'a Volume| Some((label("volume", &volume.name), of(volume)?));
    volumes.iter().filter_map(labelled).collect()
}

/// What a page is made of.
pub struct Scrape {
    /// Identity of the node.
    pub node: String,
    /// Time since the start.
    pub uptime_ms: u64,
    /// What the operating system counts.
    pub rss_bytes: u64,
    /// Lines of the log that nobody took.
    pub log_lines_dropped: u64,
    /// How far the start is, until it is over.
    pub start: Option<StartProgress>,
    /// Of each shard whether it answers.
    pub shards_up: Vec<bool>,
    /// The node as a whole, as far as shards answer; none: no shard does.
    pub status: Option<Status>,
    /// Its volumes.
    pub volumes: Vec<Volume>,
}

/// Everything about the node and its volumes, or what is known without the data path.
pub fn render(scrape: &Scrape) -> String {
    let volumes = &scrape.volumes[..];
    let mut page = Page::default();
    page.family("hdcs_info", "gauge", "The program; always 1.");
    let labels = [
        label("version", env!("CARGO_PKG_VERSION")),
        label("node", &scrape.node),
    ];
    page.sample("", &[&labels[0], &labels[1]], 1.0);
    page.single(
        "hdcs_uptime_seconds",
        "gauge",
        "Time since the start.",
        seconds(scrape.uptime_ms),
    );
    page.single(
        "hdcs_start_volumes_left",
        "gauge",
        "Volumes that the start has not opened yet.",
        scrape.start.as_ref().map_or(0.0, |start| start.left as f64),
    );
    if let Some(left_ms) = scrape.start.as_ref().and_then(|start| start.left_ms) {
        page.single(
            "hdcs_start_left_seconds",
            "gauge",
            "How long the start still takes, at the rate of the volumes that it has opened; left out before the first one and when it is over.",
            seconds(left_ms),
        );
    }
    page.family(
        "hdcs_shard_up",
        "gauge",
        "1 if the thread of the data path answers; 0: it hangs, and what only it knows is left out here.",
    );
    for (number, &is_up) in scrape.shards_up.iter().enumerate() {
        let shard = label("shard", &number.to_string());
        page.sample("", &[&shard], bit(is_up));
    }
    page.single(
        "hdcs_log_lines_dropped_total",
        "counter",
        "Lines of the log that were dropped because nobody read standard error.",
        scrape.log_lines_dropped as f64,
    );
    if let Some(status) = &scrape.status {
        let is_down = |shard: u64| scrape.shards_up.get(shard as usize) == Some(&false);
        if scrape.shards_up.contains(&false) {
            let volumes = volumes.iter();
            let known = volumes.filter(|volume| !volume.shard.is_some_and(is_down));
            known_to_the_shards(&mut page, status, &known.cloned().collect::<Vec<_>>());
        } else {
            known_to_the_shards(&mut page, status, volumes);
        }
    } else {
        page.family("hdcs_memory_bytes", "gauge", MEMORY);
        page.sample("", &["part=\"rss\""], scrape.rss_bytes as f64);
    }
    page.families(&with(volumes, |v| Some(&v.bytes)), OF_SIZES);
    shards_of_volumes(&mut page, scrape);
    let scrubs = with(volumes, |v| v.scrub.as_ref());
    page.families_if_any(&scrubs, OF_SCRUBS);
    let last_scrubs = with(volumes, |v| v.scrub.as_ref()?.last.as_ref());
    page.families_if_any(&last_scrubs, OF_LAST_SCRUBS);
    let heat_maps = with(volumes, |v| v.heat.as_ref()?.saved_ms.as_ref());
    page.families_if_any(&heat_maps, OF_HEAT_MAPS);
    page.text
}

fn shards_of_volumes(page: &mut Page, scrape: &Scrape) {
    page.family(
        "hdcs_volume_shard",
        "gauge",
        "The number of the thread of the data path (shard) that the volume is on.",
    );
    let is_alone = scrape.shards_up.len() == 1;
    for volume in &scrape.volumes {
        let first = (is_alone && volume.counters.is_some()).then_some(0);
        if let Some(shard) = volume.shard.or(first) {
            page.sample("", &[&label("volume", &volume.name)], shard as f64);
        }
    }
}

fn known_to_the_shards(page: &mut Page, status: &Status, volumes: &[Volume]) {
    page.single(
        "hdcs_connections",
        "gauge",
        "NBD connections open.",
        status.connections as f64,
    );
    page.single(
        "hdcs_longest_turn_seconds",
        "gauge",
        "The longest turn of the data path in the last 30 to 60 seconds; each client has waited for so long once.",
        status.longest_turn_us as f64 / 1e6,
    );
    page.single(
        "hdcs_log_space_failures_total",
        "counter",
        "Times that more space for a write log was not to be had, or could not be given back.",
        status.log_space_failures as f64,
    );
    let shards = status.shards.iter();
    let shards: Vec<_> = shards
        .map(|counters| (label("shard", &counters.number.to_string()), counters))
        .collect();
    page.families(&shards, OF_SHARDS);
    memory(page, status);
    cache(page, status);
    states(page, volumes);
    policies(page, volumes);
    page.families(&with(volumes, |v| v.counters.as_ref()), OF_COUNTERS);
    page.families(&with(volumes, |v| v.benefit.as_ref()), OF_BENEFITS);
    let stores = with(volumes, |v| v.counters.as_ref()?.store.as_ref());
    page.families_if_any(&stores, OF_STORES);
    let homes = with(volumes, |v| v.counters.as_ref()?.home.as_ref());
    page.families_if_any(&homes, OF_HOMES);
    latencies(page, volumes);
}

const MEMORY: &str = "Memory by part; `rss` is what the operating system counts, `max` the cap, which is the sum of the \
                      parts that begin with `budget_`.";

fn memory(page: &mut Page, status: &Status) {
    let memory = &status.memory;
    page.family("hdcs_memory_bytes", "gauge", MEMORY);
    for (part, bytes) in [
        ("max", memory.max_bytes),
        ("rss", memory.rss_bytes),
        ("rss_max", memory.rss_max_bytes),
        ("budget_fixed", memory.budget_fixed_bytes),
        ("budget_connections", memory.budget_connections_bytes),
        ("budget_pool", memory.budget_pool_bytes),
        ("budget_cache_index", memory.budget_cache_index_bytes),
        ("budget_volumes", memory.budget_volumes_bytes),
        ("budget_frames", memory.budget_frames_bytes),
        ("connections", memory.connections_used_bytes),
        ("volumes_log", memory.volumes_log_bytes),
        ("volumes_tables", memory.volumes_tables_bytes),
        ("volumes_buffers", memory.volumes_buffers_bytes),
        ("volumes_index", memory.volumes_index_bytes),
        ("volumes_index_max", memory.volumes_index_max_bytes),
        ("pool", memory.pool_bytes),
        ("pool_free", memory.pool_free_bytes),
        ("frames", memory.frames_bytes),
        ("cache_index", memory.cache_index_bytes),
        ("log_index", memory.log_index_bytes),
        ("resident", memory.resident_bytes),
    ] {
        page.sample("", &[&label("part", part)], bytes as f64);
    }
}

fn cache(page: &mut Page, status: &Status) {
    let cache = &status.cache;
    page.family(
        "hdcs_cache_size_bytes",
        "gauge",
        "Size of a tier of the read cache.",
    );
    page.sample("", &["tier=\"dram\""], cache.dram_bytes as f64);
    page.sample("", &["tier=\"ssd\""], cache.ssd_bytes as f64);
    page.family("hdcs_cache_used_bytes", "gauge", "Bytes in use of a tier.");
    page.sample("", &["tier=\"dram\""], cache.dram_used_bytes as f64);
    page.sample("", &["tier=\"ssd\""], cache.ssd_used_bytes as f64);
    page.single(
        "hdcs_cache_ssd_cached_bytes",
        "gauge",
        "Bytes of the lines that the SSD tier holds: more than are in use, if some are compressed.",
        cache.ssd_cached_bytes as f64,
    );
    page.family(
        "hdcs_cache_ssd_state",
        "gauge",
        "1 for the state that the SSD tier is in, 0 for the others.",
    );
    for state in view::SSD_STATES.map(view::ssd_state) {
        let is_in = bit(cache.ssd_state == state);
        page.sample("", &[&label("state", state)], is_in);
    }
    page.single(
        "hdcs_cache_warm_lines",
        "gauge",
        "Lines that the last start found on the SSD.",
        cache.warm_lines as f64,
    );
    let counters: [(&'static str, &str, u64); 10] = [
        (
            "hdcs_cache_forgotten_volumes_total",
            "Volumes whose lines were not used, since the cache's device had lost something that they needed.",
            cache.forgotten_volumes,
        ),
        (
            "hdcs_cache_filled_lines_total",
            "Lines filled.",
            cache.filled_lines,
        ),
        (
            "hdcs_cache_shared_lines_total",
            "Lines that were there already under another address.",
            cache.shared_lines,
        ),
        (
            "hdcs_cache_dram_evicted_blocks_total",
            "Blocks dropped from DRAM to make room.",
            cache.dram_evicted_blocks,
        ),
        (
            "hdcs_cache_ssd_evicted_lines_total",
            "Lines dropped from the SSD tier to make room.",
            cache.ssd_evicted_lines,
        ),
        (
            "hdcs_cache_ssd_written_bytes_total",
            "Bytes written to the cache device.",
            cache.ssd_written_bytes,
        ),
        (
            "hdcs_cache_corrupt_blocks_total",
            "Cached blocks that failed their checksum.",
            cache.corrupt_blocks,
        ),
        (
            "hdcs_cache_ssd_failures_total",
            "Times that the SSD tier was given up.",
            cache.ssd_failures,
        ),
        (
            "hdcs_cache_ssd_readmissions_total",
            "Times that the SSD tier came back.",
            cache.ssd_readmissions,
        ),
        (
            "hdcs_cache_device_errors_total",
            "I/O errors of the cache device.",
            cache.device_errors,
        ),
    ];
    for (name, help, value) in counters {
        page.single(name, "counter", help, value as f64);
    }
}

fn states(page: &mut Page, volumes: &[Volume]) {
    page.family(
        "hdcs_volume_state",
        "gauge",
        "1 for the state that the volume is in, 0 for the others.",
    );
    for volume in volumes {
        for state in view::STATES.map(view::state) {
            let labels = [label("volume", &volume.name), label("state", state)];
            let is_in = bit(volume.state == state);
            page.sample("", &[&labels[0], &labels[1]], is_in);
        }
    }
}

fn policies(page: &mut Page, volumes: &[Volume]) {
    page.family(
        "hdcs_volume_policy",
        "gauge",
        "1 for the policy that is in effect, 0 for the others.",
    );
    for volume in volumes {
        let Some(counters) = &volume.counters else {
            continue;
        };
        for (policy, _) in Policy::WORDS {
            let labels = [label("volume", &volume.name), label("policy", policy)];
            let is_in = bit(counters.policy == *policy);
            page.sample("", &[&labels[0], &labels[1]], is_in);
        }
    }
}

fn latencies(page: &mut Page, volumes: &[Volume]) {
    page.family(
        "hdcs_volume_latency_seconds",
        "summary",
        "Time from arrival to reply, since the volume was opened.",
    );
    for volume in volumes {
        if let Some(latency) = &volume.latency {
            let name = label("volume", &volume.name);
            summary(page, &name, "read", &latency.read);
            summary(page, &name, "write", &latency.write);
            summary(page, &name, "flush", &latency.flush);
        }
    }
}

fn summary(page: &mut Page, volume: &str, op: &str, latency: &Latency) {
    let op = label("op", op);
    for (quantile, micros) in [
        ("0.5", latency.p50_us),
        ("0.9", latency.p90_us),
        ("0.99", latency.p99_us),
        ("0.999", latency.p99_9_us),
        ("0.9999", latency.p99_99_us),
    ] {
        page.sample(
            "",
            &[volume, &op, &label("quantile", quantile)],
            micros / 1e6,
        );
    }
    let sum = latency.mean_us / 1e6 * latency.count as f64;
    page.sample("_sum", &[volume, &op], sum);
    page.sample("_count", &[volume, &op], latency.count as f64);
}

#[cfg(test)]
mod tests;
