//! What the node says about itself and its volumes.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use hdcs_api::{ApiError, Counters, Memory, Mode, Problem, Status, Volume};
use hdcs_backend::url::BackendUrl;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::volume::{Phase, State, Trouble};
use hdcs_frontend::VolumeNumber;
use uuid::Uuid;

use super::memory::Totals;
use super::open::NotOpen;
use super::record::Asked;
use super::replicas::Replicas;
use super::volumes::Slot;
use super::{Node, find, in_time};
use crate::catalogue::Found;
use crate::control::node_report::NodeReport;
use crate::control::view;
use crate::logging;
use crate::metrics::Scrape;
use crate::shard::command::VolumeReport;

/// What `stat` counts in.
const STAT_BLOCK_BYTES: u64 = 512;
/// How long a file may take to say how much of it is allocated.
const LOOK_TIME_MAX: Duration = Duration::from_secs(1);

/// How long the data path may take to report for a scrape: less than a scraper waits.
const SCRAPE_TIME_MAX: Duration = Duration::from_secs(5);

/// What is allocated of the file at a URL. Blocks.
fn allocated_bytes(url: &str) -> Option<u64> {
    let backend = BackendUrl::parse(url).ok()?;
    let found = fs::metadata(backend.place.path()?).ok()?;
    found.is_file().then(|| found.blocks() * STAT_BLOCK_BYTES)
}

/// What a volume with a group shows of that, and of its copy if that is all that this node has.
fn show_group(
    volume: &mut Volume,
    uuid: Uuid,
    not_open: Option<&NotOpen>,
    found: Option<&VolumeReport>,
    replicas: &Replicas,
) {
    volume.group = replicas.in_short(uuid);
    let trouble = found.and_then(|found| found.trouble);
    if let (None, Some(NotOpen::Copy)) = (found, not_open) {
        let (state, why, is_begun) = replicas.standing(uuid);
        view::state(state).clone_into(&mut volume.state);
        volume.reason = Some(why);
        if is_begun {
            view::phase(Phase::Opening).clone_into(&mut volume.phase);
        }
        return;
    }
    let Some(reason) = &mut volume.reason else {
        return;
    };
    if let Some((Trouble::LogSilent, age)) = trouble
        && let Some(why) = replicas.awaited(uuid)
    {
        // Its own device has answered: a write ends only once members have it.
        *reason = format!(
            "copies: for {} {why}; writes and flushes wait",
            view::seconds(age)
        );
        return;
    }
    if !matches!(
        trouble,
        Some((
            Trouble::CopiesShort | Trouble::CopiesTooFew | Trouble::NoLease,
            _
        ))
    ) {
        return;
    }
    if let Some(group) = &volume.group
        && group.members.len() < usize::from(group.replicas)
    {
        *reason += &format!(" (there are those of {}", group.members.join(", "));
        if !group.joiners.is_empty() {
            *reason += &format!(", and not those of {}", group.joiners.join(", "));
        }
        *reason += ")";
    }
    if let Some(without) = replicas.without_copy(uuid) {
        *reason += &format!("; {without}");
    }
    if let Some(trouble) = replicas.records_trouble() {
        *reason += &format!("; {trouble}");
    }
}

impl Node {
    /// Every volume.
    pub async fn volumes(&self) -> Result<Vec<Volume>, ApiError> {
        let report = self.link.report().await?;
        Ok(self.views(Some(&report)))
    }

    /// One volume.
    pub async fn volume(&self, name: &str) -> Result<Volume, ApiError> {
        let slot = self.volumes.slot(name)?;
        let report = self.link.report().await?;
        let mut volume = self.view(name, &slot, Some(&report));
        if volume.state == view::state(State::Healthy) && volume.allocated_bytes.is_none() {
            let url = volume.backend.clone();
            // A disk that hangs keeps a thread for each look, and there are not many.
            if let Ok(permit) = Arc::clone(&self.looks).try_acquire_owned() {
                let look = move || {
                    let _permit = permit;
                    allocated_bytes(&url)
                };
                volume.allocated_bytes = in_time(LOOK_TIME_MAX, look).await.flatten();
            }
        }
        Ok(volume)
    }

    /// What metrics are made of. Of a shard that does not answer it is left out what only it knows.
    pub async fn scrape(&self) -> Result<Scrape, ApiError> {
        let report = self.link.look_within(SCRAPE_TIME_MAX).await?;
        let volumes = self.views(report.as_deref());
        let all = 0..self.link.path().shards() as u64;
        let answers = |shard: u64| {
            let report = report.as_ref();
            report.is_some_and(|report| !report.silent.contains(&(shard as usize)))
        };
        Ok(Scrape {
            node: self.uuid.to_string(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            rss_bytes: view::resident_set_bytes(),
            log_lines_dropped: logging::dropped_lines(),
            start: self.start.view(),
            shards_up: all.map(answers).collect(),
            status: report.map(|report| self.status_of(&report, &volumes)),
            volumes,
        })
    }

    /// Every volume as a report says it is, by name.
    fn views(&self, report: Option<&NodeReport>) -> Vec<Volume> {
        let slots = self.volumes.slots();
        let views = slots
            .iter()
            .map(|(name, slot)| self.view(name, slot, report));
        views.collect()
    }

    fn view(&self, name: &str, slot: &Slot, report: Option<&NodeReport>) -> Volume {
        let mut volume = Volume {
            name: name.to_owned(),
            state: "error".to_owned(),
            phase: "failed".to_owned(),
            reason: slot.not_open.as_ref().map(ToString::to_string),
            trouble_ms: None,
            number: 0,
            uuid: String::new(),
            bytes: 0,
            backend: String::new(),
            allocated_bytes: None,
            read_only: false,
            mode: Mode::default(),
            home_path: None,
            log_path: String::new(),
            log_bytes: 0,
            log_durability: None,
            encryption: None,
            group: None,
            pins: Vec::new(),
            pin_trouble: None,
            benefit: None,
            connections: 0,
            settings: BTreeMap::new(),
            overridden: Vec::new(),
            shard: None,
            shard_set: None,
            counters: None,
            latency: None,
            scrub: None,
            heat: None,
        };
        let entry = match &slot.found {
            Found::Entry(entry) => entry,
            Found::Damaged(why) => {
                volume.reason = Some(why.clone());
                return volume;
            }
        };
        if let Some(not_open) = &slot.not_open {
            not_open.phase().clone_into(&mut volume.phase);
            let age = not_open.hangs_for();
            volume.trouble_ms = age.map(|age| age.as_millis() as u64);
        }
        volume.scrub = Some(self.scrubs.view(entry));
        volume.heat = self.heats.view(entry);
        let layout = self.setup.layout();
        volume.number = entry.number;
        let number = VolumeNumber(entry.number);
        let found = report.and_then(|report| find(report, number));
        let one = self.moves.during(number, report.map(|report| report.asked));
        let before = one.as_ref().map(|one| &*one.before);
        volume.shard_set = entry.shard.map(|shard| shard as u64);
        let path = self.link.path();
        if path.shards() > 1 || entry.shard.is_some() {
            let shard = path.shard_of(number).or(before.map(|before| before.shard));
            volume.shard = shard.map(|shard| shard as u64);
        }
        volume.uuid = entry.uuid.to_string();
        volume.bytes = entry.bytes;
        volume.backend = entry.backend_url(layout);
        volume.read_only = entry.is_read_only();
        let home = entry.home_path(layout);
        volume.mode = home.as_ref().map_or(Mode::Cache, |_| Mode::Storage);
        volume.home_path = home.map(|path| path.display().to_string());
        volume.log_path = entry.log_path(layout).display().to_string();
        volume.log_bytes = entry.log.bytes;
        volume.pins = entry.pins.iter().map(view::pin).collect();
        volume.encryption = entry.encryption.as_ref().map(super::encryption::shown);
        volume.overridden = entry.settings.keys().cloned().collect();
        if let Ok(settings) = self.setup.settings_of(&entry.settings) {
            volume.settings = settings.values();
        }
        // While it moves, what it was before stands for what no shard can say.
        let is_open = |found: &&VolumeReport| found.phase == Phase::Open;
        let found = match before {
            Some(before) => Some(found.filter(is_open).unwrap_or(before)),
            None => found,
        };
        if one.is_some() {
            volume.reason = None;
            volume.trouble_ms = None;
        }
        if let Some(found) = found {
            view::phase(found.phase).clone_into(&mut volume.phase);
            view::state(found.state).clone_into(&mut volume.state);
            volume.reason = view::reason(found, volume.read_only).or(volume.reason);
            volume.trouble_ms = found.trouble.map(|(_, age)| age.as_millis());
            if let Some(one) = &one {
                one.show(&mut volume);
            }
            volume.pin_trouble.clone_from(&found.pin_trouble);
            volume.log_durability = view::log_durability(found);
            volume.benefit = Some(view::benefit(&found.benefit));
            volume.connections = found.connections as u64;
            let rate = self.watch.destage_bytes_per_s(entry.number);
            volume.allocated_bytes = found.store.as_ref().map(|store| store.stored_bytes);
            volume.counters = Some(Counters {
                store: found.store.as_ref().map(view::store),
                qos: view::qos(&found.qos),
                queued_us: found.queued.as_micros(),
                home: found.home.as_ref().map(view::home),
                copy_remaining_bytes: self.copies.left_bytes(&volume.name, found),
                ..view::counters(&found.stats, rate)
            });
            volume.latency = Some(view::latencies(found));
        }
        if let Some(replicas) = self.replicas.as_ref().filter(|_| entry.is_replicated) {
            show_group(
                &mut volume,
                entry.uuid,
                slot.not_open.as_ref(),
                found,
                replicas,
            );
        }
        volume
    }

    /// The node as a whole.
    pub async fn status(&self) -> Result<Status, ApiError> {
        let report = self.link.report().await?;
        Ok(self.status_of(&report, &self.views(Some(&report))))
    }

    fn status_of(&self, report: &NodeReport, views: &[Volume]) -> Status {
        let is_opening = |volume: &&Volume| volume.phase == "opening";
        let mut volumes_by_state: BTreeMap<String, u64> = view::STATES
            .iter()
            .map(|&state| (view::state(state).to_owned(), 0))
            .collect();
        for volume in views {
            *volumes_by_state.entry(volume.state.clone()).or_default() += 1;
        }
        let cache = view::cache(report);
        let mut problems = view::problems(views, &cache);
        let replicas = self.replicas.as_ref();
        if let Some(reason) = replicas.and_then(Replicas::records_trouble) {
            problems.push(Problem {
                part: "records of groups".to_owned(),
                state: view::state(State::Error).to_owned(),
                for_ms: None,
                reason,
            });
        }
        if let Some(replicas) = replicas {
            problems.extend(replicas.missing_copies(views));
        }
        let state = if problems.is_empty() {
            State::Healthy
        } else {
            State::Degraded
        };
        let Totals {
            volumes_bytes,
            reserved,
            index_bytes,
            index_used_bytes,
        } = self.memories.totals();
        let dirty = |volume: &Volume| Some(volume.counters.as_ref()?.dirty_bytes);
        let sum = |part: fn(&VolumeReport) -> u64| report.volumes.iter().map(part).sum();
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            state: view::state(state).to_owned(),
            problems,
            node: self.uuid.to_string(),
            data: self.setup.layout().root().display().to_string(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            nbd_listen: self.nbd_listen.clone(),
            connections: report.connections as u64,
            longest_turn_us: report.longest_turn.as_micros(),
            shards: report.shards.iter().map(view::shard).collect(),
            volumes: views.len() as u64,
            volumes_by_state,
            volumes_opening: views.iter().filter(is_opening).count() as u64,
            start: self.start.view(),
            cluster: replicas.and_then(|replicas| replicas.cluster_status(&report.peers)),
            dirty_bytes: views.iter().filter_map(dirty).sum(),
            log_space_failures: self.log_spaces.failures(),
            memory: Memory {
                max_bytes: self.setup.node().memory_max_mib << 20,
                rss_bytes: view::resident_set_bytes(),
                rss_max_bytes: view::resident_set_max_bytes(),
                budget_fixed_bytes: self.setup.budget().fixed_bytes,
                budget_connections_bytes: self.setup.budget().connections_bytes,
                budget_pool_bytes: self.setup.budget().pool_bytes,
                budget_cache_index_bytes: self.setup.budget().cache_index_bytes,
                budget_volumes_bytes: volumes_bytes,
                budget_frames_bytes: self.setup.budget().frames_bytes,
                connections_used_bytes: report.connections_used_bytes,
                volumes_log_bytes: reserved.log_bytes,
                volumes_tables_bytes: reserved.tables_bytes,
                volumes_buffers_bytes: reserved.buffers_bytes,
                volumes_index_bytes: index_used_bytes,
                volumes_index_max_bytes: index_bytes,
                pool_bytes: report.pool_bytes,
                pool_free_bytes: report.pool_free_bytes,
                frames_bytes: report.cache.dram_blocks * BLOCK_BYTES as u64,
                cache_index_bytes: report.cache.index_bytes,
                log_index_bytes: sum(|v| v.stats.index_bytes),
                resident_bytes: sum(|v| v.stats.resident_bytes),
            },
            cache,
        }
    }

    /// Take a sample of the destage rate, and renew the dirty records; called about once a second.
    pub async fn sample(&self) -> Option<usize> {
        let asked = Asked::now();
        // Without a report there is nothing to sample; whoever asks for one gets the error.
        let report = self.link.report().await.ok()?;
        let slots = self.volumes.slots();
        let views = slots
            .iter()
            .map(|(name, slot)| self.view(name, slot, Some(&report)));
        self.moves.forget_old();
        self.watch.note_states(views, &self.events);
        self.records.renew(asked, &report);
        self.tiers
            .begin_by_schedule(&report, &self.setup, &self.volumes, &self.link);
        self.record_sizes(&report).await;
        self.watch.sample(&report);
        Some(report.volumes.len())
    }
}
