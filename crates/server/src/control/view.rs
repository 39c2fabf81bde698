//! What the shard reports, in the words of the API.

use std::time::Duration;

use hdcs_api::time::unix_ms;
use hdcs_api::{
    Cache, Counters, HomeCounters, Latencies, Latency, Problem, QosCounters, ShardCounters,
    SpanCounters, StoreCounters, Volume, VolumeBenefit, VolumePin,
};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{CacheStats, SsdFailure, SsdState};
use hdcs_core::log::write_log::SpanCounts;
use hdcs_core::node::qos::QosStats;
use hdcs_core::volume::{LogFailure, Phase, State, Trouble, VolumeStats, WhenFull};
use hdcs_device::durability::DeviceCache;
use hdrhistogram::Histogram;

use super::node_report::{NodeReport, ShardPart};
use crate::catalogue::PinnedRange;
use crate::config::value::Word;
use crate::shard::command::VolumeReport;
use crate::shard::counts::LoopReport;

/// The word for a phase.
pub const fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Opening => "opening",
        Phase::Failed(_) => "failed",
        Phase::Open => "open",
        Phase::Closing => "closing",
        Phase::Closed => "closed",
    }
}

/// All states, in the order of the documentation.
pub const STATES: [State; 6] = [
    State::Healthy,
    State::Degraded,
    State::ReadOnly,
    State::Inconsistent,
    State::Standby,
    State::Error,
];

/// The word for a state.
pub const fn state(state: State) -> &'static str {
    match state {
        State::Healthy => "healthy",
        State::Degraded => "degraded",
        State::ReadOnly => "read-only",
        State::Inconsistent => "inconsistent",
        State::Standby => "standby",
        State::Error => "error",
    }
}

/// Why a volume is in its state and what to do, if it is not healthy.
pub fn reason(report: &VolumeReport, read_only: bool) -> Option<String> {
    if let Phase::Failed(error) = report.phase {
        return Some(format!(
            "cannot be opened: {error}: see `hdcs inspect` and `hdcs check` on its log"
        ));
    }
    let is_damaged = (report.home.as_ref()).is_some_and(|home| home.damaged_sectors > 0);
    if is_damaged && report.state != State::Inconsistent {
        return home_reason(report);
    }
    if let Some((trouble, age)) = report.trouble {
        let special = read_only
            .then(|| words_of_read_only(trouble, age))
            .flatten();
        let words = special.unwrap_or_else(|| words(report, trouble, age));
        let store = report
            .store
            .as_ref()
            .and_then(|store| store.trouble.as_ref());
        return Some(match (report.image_trouble, store) {
            (Some(why), _) => format!("{words}; {why}"),
            (None, Some(why)) => format!("{words}; last answer of the store: {why}"),
            (None, None) => words,
        });
    }
    match report.state {
        State::Healthy => home_reason(report)
            .or_else(|| map_reason(report))
            .or_else(|| Some(format!("backend: {}", report.image_trouble?))),
        _ => home_reason(report).or_else(|| Some("not open".to_owned())),
    }
}

/// What is wrong with a local store, or with tiering out, while the volume serves.
fn home_reason(report: &VolumeReport) -> Option<String> {
    let home = report.home?;
    if let Some(error) = home.failed {
        return Some(format!(
            "local store: its map or a flush failed ({error}): data is kept in the write log; put the store right \
             and restart the daemon"
        ));
    }
    if let Some(offset) = home.damaged_at {
        return Some(format!(
            "local store: {} sectors do not match their checksums and cannot be read, the first at byte {offset} of the \
             volume: write them again, or restore them from a backup",
            home.damaged_sectors
        ));
    }
    let trouble = home.tier_trouble?;
    if trouble == IoError::Fenced {
        return Some(format!(
            "backend: another owner took it over, and nothing is tiered out there any more: clients go on, and {} bytes \
             are in the local store alone: see that the other owner has ended and restart the daemon, or delete the volume \
             with --discard-dirty if the other owner has what counts",
            home.dirty_bytes
        ));
    }
    Some(format!(
        "backend: tiering out failed the last time ({trouble}); nothing is lost, the local store has everything"
    ))
}

/// What is wrong with the map of a volume over objects.
fn map_reason(report: &VolumeReport) -> Option<String> {
    let lost = report.store.as_ref()?.lost_pages;
    (lost > 0).then(|| {
        format!(
            "backend: {lost} pages of the map were damaged and are given up since the volume was opened: what was \
             there and has not been written since cannot be read; write it again, or restore it from a backup"
        )
    })
}

/// A time as people say it.
pub fn seconds(age: Nanos) -> String {
    format!("{} s", age.0 / 1_000_000_000)
}

/// What is different if nothing is ever written to the backend.
fn words_of_read_only(trouble: Trouble, age: Nanos) -> Option<String> {
    let time = seconds(age);
    match trouble {
        Trouble::BackendSilent => Some(format!(
            "backend: no answer for {time}: reads of what is not cached wait"
        )),
        Trouble::Fenced => Some(format!(
            "backend: its snapshot was found deleted {time} ago, or the cluster has locked this node out \
             (the log says which): nothing is served any more; delete the volume, or restart the daemon \
             if the snapshot is there"
        )),
        _ => None,
    }
}

fn words(report: &VolumeReport, trouble: Trouble, age: Nanos) -> String {
    let time = seconds(age);
    let kept = || {
        if report.stats.policy.is_direct() {
            return format!(
                "({} operations failed since it was opened): so do writes and flushes of clients, as \
                 the volume's policy is {}",
                report.stats.backend_errors,
                report.stats.policy.word()
            );
        }
        format!(
            "({} operations failed since it was opened): data is kept in the write log until it \
             takes some again",
            report.stats.backend_errors
        )
    };
    // What a volume in storage mode writes to.
    let place = if report.home.is_some() {
        "local store"
    } else {
        "backend"
    };
    match trouble {
        Trouble::BackendSilent if report.stats.policy.is_direct() => format!(
            "backend: no answer for {time}: writes, flushes and reads of what is not cached wait"
        ),
        Trouble::BackendSilent => format!(
            "backend: no answer for {time}: writes go on into the write log until it is full; reads \
             of what is not cached wait"
        ),
        Trouble::BackendWrites(IoError::NoSpace) => {
            format!("{place}: no space left for {time} {}", kept())
        }
        Trouble::BackendWrites(IoError::Unreachable) => {
            format!("{place}: not reachable for {time} {}", kept())
        }
        Trouble::BackendWrites(_) => format!("{place}: writes fail for {time} {}", kept()),
        Trouble::BackendReads(IoError::Unreachable) => {
            format!("backend: not reachable for {time}: reads of what is not cached fail")
        }
        Trouble::BackendReads(error) => {
            format!("backend: reads fail for {time} ({error}): what is cached is still read")
        }
        Trouble::Fenced => format!(
            "backend: another owner took it over {time} ago: nothing is served here any more; the \
             write log keeps {} bytes that the backend does not have",
            report.stats.dirty_bytes
        ),
        Trouble::LogFailed if report.config.log_failure == LogFailure::PassThrough => format!(
            "write log: its device failed {time} ago, and what it holds cannot be read from it, or that the backend \
             has it cannot be recorded (the log says which): writes are refused; put the device right and restart \
             the daemon"
        ),
        Trouble::LogFailed => format!(
            "write log: a write to its device failed {time} ago: reads and destage go on; put the \
             device right and restart the daemon"
        ),
        Trouble::CopiesTooFew => format!(
            "copies: for {time} fewer nodes have a copy of the write log than writes need: they and flushes wait, or fail if \
             that is what when_short of the group says; reads go on. Start the others again: their copies are brought up \
             by themselves"
        ),
        Trouble::CopiesShort => format!(
            "copies: for {time} fewer nodes have a copy of the write log than should: start the others again, and they are \
             brought up by themselves"
        ),
        Trouble::MemoryShort => format!(
            "write log: it has not been replayed on for {time}: what other volumes have in their logs takes the memory that \
             it needs. It goes on when their backends have taken that: see which of them are not healthy, or raise \
             volumes_memory_mib and restart the daemon"
        ),
        Trouble::NoLease => format!(
            "copies: too few members have answered this node for {time}, so another one may have taken the volume: reads \
             wait until they answer, or are left out after member_deadline_ms (hdcs group show says who they are)"
        ),
        Trouble::LogSilent => format!(
            "write log: its device has not answered for {time}: {}; it heals by itself when the device answers",
            match report.config.when_full {
                WhenFull::Wait => "writes, flushes and reads that need it wait",
                WhenFull::Error =>
                    "writes, flushes and reads that need it fail, as when_full is error",
            }
        ),
        Trouble::LogEmptying => format!(
            "write log: a write to its device failed {time} ago: {} bytes are on their way to the backend, and \
             writes wait for that",
            report.stats.dirty_bytes
        ),
        Trouble::LogGivenUp => format!(
            "write log: a write to its device failed {time} ago: nothing is lost, and writes go to the backend \
             (log_failure is {}); put the device right, or give it another, and restart the daemon",
            report.config.log_failure.word()
        ),
        Trouble::LogUnreadable => format!(
            "write log: dirty data could not be read from its device {time} ago, and does not get to the backend \
             before it can: it is tried again; put the device right"
        ),
        Trouble::SectorsLost => format!(
            "write log: it was damaged when the volume was opened: {} bytes in {} places are lost, and reads of them fail \
             until they are written over, zeroed or discarded; all else is there. Restore them, or write over them",
            report.stats.lost_bytes, report.stats.lost_ranges
        ),
        Trouble::LogCorrupt => format!(
            "write log: dirty data in it was found corrupt {time} ago: writes are refused, reads go on, and destage \
             goes up to it. If it reads well again (a scrub tries), all goes on; else open it again (restart the daemon): \
             what is damaged is lost then, and all else is saved"
        ),
    }
}

/// How the log is made durable, for a reader.
pub fn log_durability(report: &VolumeReport) -> Option<String> {
    let (way, cache) = report.log_way;
    let way = way?;
    Some(match cache {
        DeviceCache::Unknown => way.to_string(),
        cache => format!("{way} ({cache})"),
    })
}

/// What is not as it should be, of all parts.
pub fn problems(volumes: &[Volume], cache: &Cache) -> Vec<Problem> {
    // A move that is soon over is none.
    let moves_long = |volume: &Volume| volume.phase == "moving" && volume.trouble_ms.is_some();
    let of_volumes = volumes.iter();
    let is_well = |volume: &Volume| matches!(volume.state.as_str(), "healthy" | "standby");
    let of_volumes = of_volumes.filter(|volume| !is_well(volume) || moves_long(volume));
    let mut problems: Vec<_> = of_volumes
        // Opening takes its time; that something does not answer shows.
        .filter(|volume| volume.phase != "opening" || volume.trouble_ms.is_some())
        .map(|volume| Problem {
            part: format!("volume {}", volume.name),
            state: match volume.state.as_str() {
                "healthy" => volume.phase.clone(),
                state => state.to_owned(),
            },
            for_ms: volume.trouble_ms,
            reason: volume.reason.clone().unwrap_or_default(),
        })
        .collect();
    for volume in volumes {
        let last = volume.scrub.as_ref().and_then(|scrub| scrub.last.as_ref());
        let Some((last, first)) = last.and_then(|last| Some((last, last.problems.first()?))) else {
            continue;
        };
        let more = match last.problems.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more: see `hdcs volume show {}`)", volume.name),
        };
        problems.push(Problem {
            part: format!("volume {}", volume.name),
            state: "damaged".to_owned(),
            for_ms: Some(unix_ms().saturating_sub(last.ended_ms)),
            reason: format!(
                "its last scrub found damage: {first}{more}; once that is put right, scrub it again"
            ),
        });
    }
    if let Some(reason) = &cache.ssd_reason {
        problems.push(Problem {
            part: "SSD tier".to_owned(),
            state: cache.ssd_state.clone(),
            for_ms: Some(cache.ssd_state_ms),
            reason: reason.clone(),
        });
    }
    problems
}

/// Counters and gauges; the destage rate is the sampler's.
pub fn counters(stats: &VolumeStats, destage_bytes_per_s: u64) -> Counters {
    let block = BLOCK_BYTES as u64;
    Counters {
        reads: stats.reads,
        writes: stats.writes,
        trims: stats.trims,
        flushes: stats.flushes,
        errors: stats.errors,
        read_bytes: stats.read_bytes,
        write_bytes: stats.write_bytes,
        log_hit_blocks: stats.log_hit_blocks,
        dram_hit_blocks: stats.dram_hit_blocks,
        ssd_hit_blocks: stats.ssd_hit_blocks,
        miss_blocks: stats.miss_blocks,
        read_ahead_blocks: stats.read_ahead_blocks,
        pinned_bytes: stats.pinned_bytes,
        pinned_left_bytes: stats.pinned_left_bytes,
        warm_bytes: stats.warm_bytes,
        warm_left_bytes: stats.warm_left_bytes,
        cache_corrupt_blocks: stats.cache_corrupt_blocks,
        log_corrupt_blocks: stats.log_corrupt_blocks,
        lost_ranges: stats.lost_ranges,
        lost_bytes: stats.lost_bytes,
        log_used_bytes: stats.log_used_blocks * block,
        log_ring_bytes: stats.log_ring_blocks * block,
        log_prepared_bytes: stats.log_prepared_blocks * block,
        log_written_bytes: stats.log_written_bytes,
        log_spans: stats.log_spans,
        log_plain_bytes: stats.log_plain_bytes,
        log_stored_bytes: stats.log_stored_bytes,
        ssd_plain_bytes: stats.ssd_plain_bytes,
        ssd_stored_bytes: stats.ssd_stored_bytes,
        dirty_bytes: stats.dirty_bytes,
        dirty_age_ms: stats.dirty_age.as_millis(),
        unpersisted_bytes: stats.unpersisted_bytes,
        destaged_bytes: stats.destaged_bytes,
        destage_bytes_per_s,
        direct_bytes: stats.direct_bytes,
        policy: stats.policy.word().to_owned(),
        policy_remaining_bytes: stats.policy_remaining_bytes,
        coalesced_bytes: stats.coalesced_bytes,
        sync_points: stats.sync_points,
        flush_remaining_bytes: stats.destage_all_remaining_bytes,
        copy_remaining_bytes: 0,
        throttled_requests: stats.throttled_requests,
        throttled_ms: stats.throttled_time.as_millis(),
        requests_in_flight: stats.requests_in_flight,
        backend_errors: stats.backend_errors,
        inherited_bytes: stats.inherited_blocks * block,
        index_bytes: stats.index_bytes,
        resident_bytes: stats.resident_bytes,
        replayed_entries: stats.replayed_entries,
        replayed_bytes: stats.replayed_bytes,
        replay_ms: stats.replay_time.as_millis(),
        store: None,
        spans: spans(&stats.log_counts),
        queued_us: 0,
        qos: QosCounters::default(),
        home: None,
    }
}

fn spans(counts: &SpanCounts) -> SpanCounters {
    SpanCounters {
        entries: counts.entries,
        in_flight: counts.in_flight,
        open_us: counts.open_time.as_micros(),
        device_us: counts.device_time.as_micros(),
    }
}

/// What a thread of the data path has done.
pub fn shard(part: &ShardPart) -> ShardCounters {
    let micros = |time: Duration| time.as_micros() as u64;
    let LoopReport {
        shard,
        ring,
        thread,
    } = &part.counts;
    ShardCounters {
        number: part.number as u64,
        processor: part.processor.map(|number| number as u64),
        volumes: part.volumes as u64,
        connections: part.connections as u64,
        longest_turn_us: part.longest_turn.as_micros(),
        turns: shard.turns,
        wakeups: thread.wakeups,
        enters: ring.enters,
        completions: ring.completions,
        messages: shard.messages,
        receives: shard.receives,
        sends: shard.sends,
        replies: shard.replies,
        reply_us: shard.reply_time.as_micros(),
        cpu_user_us: micros(thread.user),
        cpu_system_us: micros(thread.system),
    }
}

/// A range that stays in the SSD tier.
pub fn pin(range: &PinnedRange) -> VolumePin {
    VolumePin {
        offset: range.offset,
        bytes: range.bytes,
    }
}

/// What reading a volume costs, and how it is weighed.
pub fn benefit(found: &hdcs_core::cache::VolumeBenefit) -> VolumeBenefit {
    let micros = |time: Nanos| time.0 as f64 / 1000.0;
    VolumeBenefit {
        miss_us: found.miss.map(micros),
        ssd_hit_us: found.ssd_hit.map(micros),
        dram_weight: f64::from(found.dram_gain).exp2(),
        ssd_weight: f64::from(found.ssd_gain).exp2(),
    }
}

/// What quality of service has counted.
pub const fn qos(stats: &QosStats) -> QosCounters {
    QosCounters {
        waiting_requests: stats.waiting_requests,
        delayed_requests: stats.delayed_requests,
        delayed_ms: stats.delayed_time.as_millis(),
        served_iops: stats.served_iops,
        served_bytes_per_s: stats.served_bandwidth,
        reserved_iops: stats.reserved_iops,
        reserved_bytes_per_s: stats.reserved_bandwidth,
        short: stats.short,
    }
}

/// The local store of a volume in storage mode.
pub fn home(status: &hdcs_core::local::Status) -> HomeCounters {
    use hdcs_core::local::TierState;
    let tier = match status.tier {
        TierState::Idle => "idle",
        TierState::Waiting => "waiting",
        TierState::Pausing => "pausing",
        TierState::Copying => "copying",
        TierState::Finishing => "finishing",
        TierState::Held => "held",
    };
    HomeCounters {
        dirty_bytes: status.dirty_bytes,
        zero_bytes: status.zero_bytes,
        clean_bytes: status.clean_bytes,
        absent_bytes: status.absent_bytes,
        tier: tier.to_owned(),
        tier_bytes: status.tier_bytes,
        tier_left_bytes: status.tier_left_bytes,
        backend_between: status.between,
        tiers: status.tiers,
        tiered_bytes: status.tiered_bytes,
        trouble: status.tier_trouble.map(|error| error.to_string()),
        failed: (status.failed)
            .or_else(|| {
                status
                    .tier_trouble
                    .filter(|error| *error == IoError::Fenced)
            })
            .map(|error| error.to_string()),
        data_written_bytes: status.data_written_bytes,
        map_written_bytes: status.map_written_bytes,
        checksums_written_bytes: status.sums_written_bytes,
        checksums_memory_bytes: status.sums_memory_bytes,
        checksums_rebuild_left_bytes: status
            .sums_rebuild
            .map_or(0, |(bytes, done)| bytes.saturating_sub(done)),
        damaged_reads: status.damaged_reads,
        damaged_sectors: status.damaged_sectors,
        filled_blocks: status.filled_blocks,
    }
}

/// What is known of the store behind a volume.
pub fn store(counts: &hdcs_backend::stores::Counts) -> StoreCounters {
    StoreCounters {
        puts: counts.puts,
        puts_data: counts.puts_data,
        puts_map: counts.puts_map,
        puts_manifest: counts.puts_manifest,
        gets: counts.gets,
        deletes: counts.deletes,
        lists: counts.lists,
        retries: counts.retries,
        put_bytes: counts.put_bytes,
        get_bytes: counts.get_bytes,
        damaged_map_pages: counts.damaged_pages,
        lost_map_pages: counts.lost_pages,
        trouble: counts.trouble.clone(),
    }
}

fn latency(histogram: Option<&Histogram<u64>>) -> Latency {
    let Some(histogram) = histogram.filter(|histogram| !histogram.is_empty()) else {
        return Latency::default();
    };
    let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1000.0;
    Latency {
        count: histogram.len(),
        mean_us: histogram.mean() / 1000.0,
        p50_us: at(0.5),
        p90_us: at(0.9),
        p99_us: at(0.99),
        p99_9_us: at(0.999),
        p99_99_us: at(0.9999),
        max_us: histogram.max() as f64 / 1000.0,
    }
}

/// Latencies of a volume.
pub fn latencies(report: &VolumeReport) -> Latencies {
    Latencies {
        read: latency(report.read_latency.as_deref()),
        write: latency(report.write_latency.as_deref()),
        flush: latency(report.flush_latency.as_deref()),
    }
}

/// The states of the SSD tier, in the order of its life.
pub const SSD_STATES: [SsdState; 4] = [
    SsdState::Off,
    SsdState::Warming,
    SsdState::Online,
    SsdState::Offline,
];

/// The word for a state of the SSD tier.
pub const fn ssd_state(state: SsdState) -> &'static str {
    match state {
        SsdState::Off => "off",
        SsdState::Warming => "warming",
        SsdState::Online => "online",
        SsdState::Offline => "offline",
    }
}

/// Why the SSD tier is offline, and what to do.
fn ssd_reason(report: &NodeReport) -> Option<String> {
    if report.cache.ssd_state != SsdState::Offline {
        return None;
    }
    let (errors, time) = (report.cache.device_errors, seconds(report.cache_state_age));
    let what = match report.cache.ssd_failure {
        Some(SsdFailure::Silent) => format!("its device did not answer, {time} ago"),
        Some(SsdFailure::Absent) => "its device could not be used at the start".to_owned(),
        Some(SsdFailure::Newer) => {
            "what is on its device was made by a newer program: use that program".to_owned()
        }
        Some(SsdFailure::Errors) | None => format!(
            "its device failed too often in a row, {time} ago ({errors} errors since the start)"
        ),
    };
    if let Some(why) = &report.cache_identity_error {
        return Some(format!(
            "{what}, and destage waits because that cannot be recorded: {why}"
        ));
    }
    let last = report.cache_trouble.as_ref();
    let last = last.map_or(String::new(), |why| format!(" (the last time: {why})"));
    Some(format!(
        "{what}: reads and destage go on without it; it is tried again{last}, and starts empty then: \
         put the device right"
    ))
}

/// The read cache.
pub fn cache(report: &NodeReport) -> Cache {
    let stats: &CacheStats = &report.cache;
    let block = BLOCK_BYTES as u64;
    Cache {
        dram_used_bytes: stats.dram_used_blocks * block,
        dram_bytes: stats.dram_blocks * block,
        ssd_used_bytes: stats.ssd_used_blocks * block,
        ssd_cached_bytes: stats.ssd_used_lines * stats.line_blocks * block,
        ssd_bytes: stats.ssd_lines * stats.line_blocks * block,
        ssd_state: ssd_state(stats.ssd_state).to_owned(),
        ssd_reason: ssd_reason(report),
        ssd_state_ms: report.cache_state_age.as_millis(),
        ssd_failures: stats.ssd_failures,
        ssd_readmissions: stats.ssd_readmissions,
        filled_lines: stats.filled_lines,
        shared_lines: stats.shared_lines,
        dram_evicted_blocks: stats.dram_evicted_blocks,
        ssd_evicted_lines: stats.ssd_evicted_lines,
        ssd_written_bytes: stats.ssd_written_bytes,
        corrupt_blocks: stats.corrupt_blocks,
        device_errors: stats.device_errors,
        warm_lines: stats.warm_lines,
        forgotten_volumes: stats.forgotten_volumes,
    }
}

/// The largest resident set that this process has had, as the kernel counts it.
pub fn resident_set_max_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let most = lines.find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = most.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Resident set of this process, as the kernel counts it.
pub fn resident_set_bytes() -> u64 {
    // Pages; /proc is there on every Linux that has io_uring. 0 says "unknown".
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    // SAFETY: sysconf touches no memory.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages.unwrap_or(0) * u64::try_from(page_bytes).unwrap_or(0)
}
