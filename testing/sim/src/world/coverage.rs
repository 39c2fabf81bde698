//! What runs saw: a set of seeds that no longer meets something proves nothing about it.

/// What a run saw, so that a set of seeds can be judged by what it covers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// Events delivered.
    pub steps: u64,
    /// Requests answered.
    pub replies: u64,
    /// Of them with an error.
    pub errors: u64,
    /// Openings of volumes that succeeded.
    pub openings: u64,
    /// Openings that were refused for good reason.
    pub refusals: u64,
    /// Entries replayed.
    pub replayed: u64,
    /// Power cuts and kills.
    pub crashes: u64,
    /// Bytes that went to a backend.
    pub destaged_bytes: u64,
    /// Blocks read from the SSD tier.
    pub ssd_hits: u64,
    /// Blocks read from the DRAM tier.
    pub dram_hits: u64,
    /// Laps of a log, in thousandths.
    pub log_laps: u64,
    /// Times that more of a log was prepared, and that one gave back.
    pub log_growths: u64,
    /// See above.
    pub log_gifts: u64,
    /// Log writes that a sync has made durable.
    pub log_syncs: u64,
    /// Bytes that compression has saved in logs.
    pub compressed_bytes: u64,
    /// Bytes that compression has saved in the SSD tier.
    pub packed_bytes: u64,
    /// Times that the SSD tier was given up.
    pub cache_failures: u64,
    /// Times that it came back within one opening.
    pub readmissions: u64,
    /// Messages between shards.
    pub messages: u64,
    /// Parts of the memory for indexes that shards were given beside their own turns.
    pub index_parts: u64,
    /// Volumes that were told that another owner has their backend.
    pub fences: u64,
    /// Rounds in which a volume was degraded because its backend did not answer.
    pub silent_rounds: u64,
    /// Times that an atomic backend made something durable.
    pub commits: u64,
    /// Of them, past more than one flush of a client.
    pub crossings: u64,
    /// Promotions that were looked at closely.
    pub promotions: u64,
    /// Scrubs that came to their end.
    pub scrubs: u64,
    /// Compressed lines of the SSD tier that rotted and were read then.
    pub packed_rots: u64,
    /// Blocks that a scrub made good.
    pub scrub_healed: u64,
    /// Pins that were looked at closely.
    pub pins: u64,
    /// Warm-ups from heat maps that were looked at closely.
    pub warm_ups: u64,
    /// Times that the worth of lines, and the marks, were looked at closely.
    pub weighed: u64,
    /// Ranges whose reads were counted.
    pub counted: u64,
    /// Logs that were lost.
    pub lost_logs: u64,
    /// Superblocks of logs that were forged, and refused.
    pub forged_logs: u64,
    /// Times that a volume became inconsistent.
    pub inconsistent: u64,
    /// Openings of a damaged log that saved what was good in it, and sectors that were lost then.
    pub saved_logs: u64,
    /// See above.
    pub lost_sectors: u64,
    /// Openings of a log of which rot had taken an end that nothing proves,
    pub torn_logs: u64,
    /// and of one that had rotted where it holds nothing.
    pub idle_rots: u64,
    /// Crashes that found a log at rest.
    pub rests: u64,
    /// Reads of a log that have brought wrong bytes.
    pub spoiled_reads: u64,
    /// The same while an opening replays it.
    pub spoiled_replays: u64,
    /// Snapshots that were given up before the backend was asked.
    pub snapshots_given_up: u64,
    /// Snapshots of backends without atomic flushes.
    pub snapshots_of_files: u64,
    /// Operations that were held back for them.
    pub held_for_snapshots: u64,
    /// Snapshots that were taken.
    pub snapshots: u64,
    /// Of them, those of volumes in storage mode,
    pub snapshots_of_stores: u64,
    /// and of volumes over objects.
    pub snapshots_of_objects: u64,
    /// Snapshots that object volumes have forgotten.
    pub snapshots_forgotten: u64,
    /// Volumes that were made smaller while clients and faults went on.
    pub shrinks: u64,
    /// Changes of size that were made while clients went on.
    pub resizes: u64,
    /// Of them, those that cut something off.
    pub cuts: u64,
    /// Requests that waited then,
    pub cut_requests: u64,
    /// and those that were refused since they reached beyond the new end.
    pub cut_refused: u64,
    /// Growths over logs that held what was cut off before.
    pub cut_logs: u64,
    /// Sectors that one clone read of the cache because another one had.
    pub shared_sectors: u64,
    /// Times that writes began to go past the log.
    pub switches: u64,
    /// Writes that went past the log and were acknowledged.
    pub direct_writes: u64,
    /// Flushes that clients sent after writes had gone past the log, while the backend was being flushed.
    pub flushes_beside: u64,
    /// Superblocks that were kept beside logs whose devices had failed.
    pub kept_superblocks: u64,
    /// Devices that have lied.
    pub lies: u64,
    /// Rounds in which the device of a log had not answered for too long.
    pub log_silent_rounds: u64,
    /// Volumes that were closed without an answer of it.
    pub late_closes: u64,
    /// Tiers of local stores that have ended well, and bytes that went to the backends below them.
    pub tiers: u64,
    /// See above.
    pub tiered_bytes: u64,
    /// Volumes that were closed with all tiered out,
    pub tiered_closes: u64,
    /// and those that could not tier it out.
    pub untiered_closes: u64,
    /// Times that the former tiered out again what had come meanwhile.
    pub tiered_again: u64,
    /// Local stores that were larger than their volumes when those were opened.
    pub stores_cut: u64,
    /// Requests of clients that do not wait for answers,
    pub arrivals: u64,
    /// and times that such a client had too many unanswered to send one.
    pub arrivals_refused: u64,
}

impl Coverage {
    /// What another run saw, too.
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.replies += other.replies;
        self.errors += other.errors;
        self.openings += other.openings;
        self.refusals += other.refusals;
        self.replayed += other.replayed;
        self.crashes += other.crashes;
        self.destaged_bytes += other.destaged_bytes;
        self.ssd_hits += other.ssd_hits;
        self.dram_hits += other.dram_hits;
        self.log_laps += other.log_laps;
        self.log_growths += other.log_growths;
        self.log_gifts += other.log_gifts;
        self.log_syncs += other.log_syncs;
        self.compressed_bytes += other.compressed_bytes;
        self.packed_bytes += other.packed_bytes;
        self.cache_failures += other.cache_failures;
        self.readmissions += other.readmissions;
        self.messages += other.messages;
        self.index_parts += other.index_parts;
        self.fences += other.fences;
        self.silent_rounds += other.silent_rounds;
        self.commits += other.commits;
        self.crossings += other.crossings;
        self.promotions += other.promotions;
        self.scrubs += other.scrubs;
        self.packed_rots += other.packed_rots;
        self.scrub_healed += other.scrub_healed;
        self.pins += other.pins;
        self.warm_ups += other.warm_ups;
        self.weighed += other.weighed;
        self.counted += other.counted;
        self.lost_logs += other.lost_logs;
        self.forged_logs += other.forged_logs;
        self.inconsistent += other.inconsistent;
        self.saved_logs += other.saved_logs;
        self.lost_sectors += other.lost_sectors;
        self.torn_logs += other.torn_logs;
        self.idle_rots += other.idle_rots;
        self.rests += other.rests;
        self.spoiled_reads += other.spoiled_reads;
        self.spoiled_replays += other.spoiled_replays;
        self.snapshots += other.snapshots;
        self.snapshots_of_stores += other.snapshots_of_stores;
        self.snapshots_of_objects += other.snapshots_of_objects;
        self.snapshots_forgotten += other.snapshots_forgotten;
        self.snapshots_given_up += other.snapshots_given_up;
        self.snapshots_of_files += other.snapshots_of_files;
        self.held_for_snapshots += other.held_for_snapshots;
        self.shrinks += other.shrinks;
        self.resizes += other.resizes;
        self.cuts += other.cuts;
        self.cut_requests += other.cut_requests;
        self.cut_refused += other.cut_refused;
        self.cut_logs += other.cut_logs;
        self.shared_sectors += other.shared_sectors;
        self.switches += other.switches;
        self.direct_writes += other.direct_writes;
        self.flushes_beside += other.flushes_beside;
        self.kept_superblocks += other.kept_superblocks;
        self.lies += other.lies;
        self.log_silent_rounds += other.log_silent_rounds;
        self.late_closes += other.late_closes;
        self.tiers += other.tiers;
        self.tiered_bytes += other.tiered_bytes;
        self.tiered_closes += other.tiered_closes;
        self.untiered_closes += other.untiered_closes;
        self.tiered_again += other.tiered_again;
        self.stores_cut += other.stores_cut;
        self.arrivals += other.arrivals;
        self.arrivals_refused += other.arrivals_refused;
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} steps, {} replies ({} errors), {} openings ({} refused), {} entries replayed, \
             {} crashes, {} MiB destaged, {} SSD and {} DRAM hits, {} log laps, {} growths and {} gifts of logs, {} MiB saved there, {} cache failures \
             and {} readmissions, {} messages between shards, {} parts of indexes, {} fences, {} rounds without an answer, {} promotions, {} pins, {} warm-ups, {} scrubs that \
             healed {} blocks, {} compressed lines that rotted, {} weighed, {} counted, {} lost logs, {} forged, \
             {} commits ({} past flushes), {} snapshots ({} of files, {} below local stores, {} of objects with {} forgotten, {} operations held back, {} given up), {} shrinks, {} resizes ({} cuts beside {} requests, {} refused; {} over logs with what was cut off), {} shared sectors, {} switches past \
              the log and {} writes there, {} flushes beside one of the backend, {} superblocks beside logs, \
             {} times inconsistent, {} damaged logs saved but for {} sectors, {} torn ones, {} that rot where nothing is, {} at rest when the node crashed, {} spoiled reads ({} of replays), {} lies, \
             {} rounds with silent logs, {} closes without them, {} tiers of {} MiB, {} closes after one ({} again) and {} without, {} stores cut, {} arrivals and {} refused",
            self.steps,
            self.replies,
            self.errors,
            self.openings,
            self.refusals,
            self.replayed,
            self.crashes,
            self.destaged_bytes >> 20,
            self.ssd_hits,
            self.dram_hits,
            self.log_laps / 1000,
            self.log_growths,
            self.log_gifts,
            self.compressed_bytes >> 20,
            self.cache_failures,
            self.readmissions,
            self.messages,
            self.index_parts,
            self.fences,
            self.silent_rounds,
            self.promotions,
            self.pins,
            self.warm_ups,
            self.scrubs,
            self.scrub_healed,
            self.packed_rots,
            self.weighed,
            self.counted,
            self.lost_logs,
            self.forged_logs,
            self.commits,
            self.crossings,
            self.snapshots,
            self.snapshots_of_files,
            self.snapshots_of_stores,
            self.snapshots_of_objects,
            self.snapshots_forgotten,
            self.held_for_snapshots,
            self.snapshots_given_up,
            self.shrinks,
            self.resizes,
            self.cuts,
            self.cut_requests,
            self.cut_refused,
            self.cut_logs,
            self.shared_sectors,
            self.switches,
            self.direct_writes,
            self.flushes_beside,
            self.kept_superblocks,
            self.inconsistent,
            self.saved_logs,
            self.lost_sectors,
            self.torn_logs,
            self.idle_rots,
            self.rests,
            self.spoiled_reads,
            self.spoiled_replays,
            self.lies,
            self.log_silent_rounds,
            self.late_closes,
            self.tiers,
            self.tiered_bytes >> 20,
            self.tiered_closes,
            self.tiered_again,
            self.untiered_closes,
            self.stores_cut,
            self.arrivals,
            self.arrivals_refused,
        )
    }
}
