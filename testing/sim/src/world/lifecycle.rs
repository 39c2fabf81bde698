//! Opening, closing and crashing a node.

use std::sync::Arc;

use super::indexes::Indexes;
use hdcs_core::base::cipher::BlockCipher;
use hdcs_core::base::codec::Method;
use hdcs_core::base::io::{Durability as DurableCall, DurableWay};
use hdcs_core::base::limits::LOST_RANGES_MAX;
use hdcs_core::cache::Barrier;
use hdcs_core::local::Event as StoreEvent;
use hdcs_core::node::stop::{Act, CLOSE_PATIENCE, Hung, Others, Stop, View};
use hdcs_core::volume::{DurableWays, sharing};

use super::{
    AGE_SLACK, Action, CacheEvent, CacheIdentity, Context, Coverage, DIRECTOR_ACTIONS_MAX, DiskId,
    Durability, END_TIME_MAX, Event, Fence, Happening, Nanos, Node, OpenClient, OpenError, Owner,
    Phase, Policy, Rc, ReadCache, Readmission, Shards, SsdState, State, Trouble,
    UNPERSISTED_SLACK_BYTES, Unit, Violation, Volume, World, check_backend, check_bounds,
    check_log, check_policy, check_recovery, check_trouble,
};
use crate::engine::Simulated;
use crate::lz4::{CONFUSED, UNSEEN};
use crate::plant::Plant;
use crate::toy_cipher::{SwappingCipher, ToyCipher};

/// Requests that a client has sent before its volume is closed.
const LEAVING_REQUESTS: u32 = 40;

impl World {
    /// Start the node: its cache and all volumes. The crash, if any, comes after so many steps.
    pub fn start(&mut self, crash_at: Option<u64>) -> Result<(), Violation> {
        self.crash_at = crash_at;
        self.stop = None;
        self.step_in_opening = 0;
        let enough = self.scenario.director_pause.0 * DIRECTOR_ACTIONS_MAX;
        self.calm_at = self.engine.now().plus(Nanos(enough));
        self.engine
            .note("start", [crash_at.unwrap_or(u64::MAX), 0, 0, 0]);
        self.cache_identity = CacheIdentity::default();
        // A device that was gone may be back, with what it held.
        self.cache_dead &= self.random.bool();
        if self.cache_silent > self.engine.now() && self.random.bool() {
            self.cache_silent = Nanos(0);
        }
        self.readmission = Readmission::default();
        let mut actions = Vec::new();
        let cache = self.scenario.cache.clone();
        let mut cache = ReadCache::new(
            cache,
            self.engine.now(),
            Arc::clone(&self.pool),
            &mut actions,
        );
        if !self.planted.strikes(Plant::IgnoredMarks) {
            cache.set_fill_marks(self.scenario.fill_marks());
        }
        let mut shards = Shards::new(
            cache,
            self.scenario.shards(),
            self.scenario.cache.dram_blocks,
            self.scenario.seed ^ self.engine.now().0,
        );
        for cache in shards.each() {
            cache.set_tiering(self.scenario.tiering());
            if let Some((probes, places)) = self.scenario.cache_steps() {
                cache.set_step_max(probes, places);
            }
            cache.release();
        }
        let indexes = Indexes::new(
            self.scenario.index_bytes(),
            shards.count(),
            self.scenario.seed,
        );
        self.node = Some(Node {
            shards,
            volumes: Vec::new(),
            closed_volumes: Vec::new(),
            indexes,
        });
        self.perform_all(Owner::Cache(0), actions)?;
        for unit in 0..self.units.len() {
            self.set_policy_offline(unit);
            self.units[unit].log_dead = None;
            self.revive_log(unit);
            self.flip_compression(unit);
            self.forget_kept(unit);
            self.forge_log_sometimes(unit)?;
            self.units[unit].begin_opening();
            self.open(unit)?;
            self.repeat_flush(unit);
            self.engine.after(Nanos(0), Happening::Client(unit));
        }
        self.start_director();
        Ok(())
    }

    /// What encrypts a volume in the SSD tier: every other one, all with one key, as clones have it.
    fn cipher(&self, number: u32) -> Option<Arc<dyn BlockCipher>> {
        let key = if self.planted.is(Plant::OtherKey) {
            self.engine.now().0
        } else {
            self.scenario.seed
        };
        if number.is_multiple_of(2) {
            return None;
        }
        let cipher = ToyCipher(key);
        let line_blocks = self.node.as_ref().map(|node| node.cache().line_blocks());
        if let Some(line_blocks) = line_blocks.filter(|_| self.planted.is(Plant::SwappedLines)) {
            return Some(Arc::new(SwappingCipher::new(cipher, line_blocks)));
        }
        Some(Arc::new(cipher))
    }

    fn open(&mut self, unit: usize) -> Result<(), Violation> {
        if self.planted.is(Plant::ConfusedCodec) {
            self.units[unit].config.codec = &CONFUSED;
        }
        let mut actions = Vec::new();
        let volume = self.begin_volume(unit, &mut actions);
        let node = self.node.as_mut().expect("the node was started");
        node.volumes.push(volume);
        self.perform_all(Owner::Volume(unit), actions)?;
        if self.units[unit].local.is_some() && self.planted.is(Plant::HastyTier) {
            self.step_store(unit, StoreEvent::Tier)?;
        }
        let pins = self.pins(unit);
        self.step_volume(unit, Event::Pin(pins))?;
        self.warm_up_if_cold(unit)
    }

    /// A volume that begins to open, in a node that was started, and what it asks for first.
    fn begin_volume(&mut self, unit: usize, actions: &mut Vec<Action>) -> Volume {
        let config = self.config_to_open(unit);
        let ways = self.durable_ways(unit);
        let prepared = self.find_log_space(unit);
        // What a process before has written may not be durable yet.
        self.disk(DiskId::Log(unit)).sync();
        if let Some(local) = &mut self.units[unit].local {
            local.begin_sizes(config.bytes);
        }
        let inherited = self.inherited(unit);
        let cipher = self.cipher(config.number);
        let base_cipher = (inherited.as_ref()).and_then(|base| self.cipher(base.origin()));
        let node = self.node.as_mut().expect("the node was started");
        let forgets = !self.planted.is(Plant::StayingFrames);
        node.shards.place(unit, config.number, forgets);
        let index_budget = Rc::clone(node.indexes.of(node.shards.of(unit)));
        let cache = node.cache_of(unit);
        cache.set_cipher(config.number, cipher);
        if let Some(inherited) = &inherited {
            cache.set_cipher(inherited.origin(), base_cipher);
        }
        let mut cx = Context {
            cache,
            pool: &self.pool,
            actions,
        };
        let mut volume = Volume::open(config, self.engine.now(), &mut cx);
        sharing::set_index_budget(&mut volume, &index_budget);
        sharing::set_log_prepared(&mut volume, prepared);
        volume.set_durable_ways(ways);
        if self.planted.is(Plant::UnseenDamage) {
            cx.cache.set_codec(&UNSEEN);
        }
        if let Some(inherited) = inherited {
            volume.inherit(inherited);
        }
        if let Some(kept) = self.units[unit].kept {
            volume.keep_superblock(kept);
        }
        drop(cx);
        self.authenticate_log(unit, &mut volume);
        volume
    }

    /// In which ways the volume's log is written: each one alone, and tried against the other.
    fn durable_ways(&self, unit: usize) -> DurableWays {
        let call = match (self.scenario.seed + unit as u64) % 8 {
            0 | 1 => DurableCall::Fdatasync,
            _ => DurableCall::Dsync,
        };
        let has_choice = (self.scenario.seed + unit as u64) % 4 == 1;
        let by_thread = false;
        DurableWays::new(DurableWay { call, by_thread }, has_choice, false)
    }

    /// Somebody may have turned compression on or off while the node was down.
    fn flip_compression(&mut self, unit: usize) {
        if self.scenario.flips_compression && self.calm_since.is_none() {
            let compression = &mut self.units[unit].config.compression;
            *compression = match compression {
                None => Some(Method::Lz4),
                Some(_) => None,
            };
        }
    }

    /// Let every client send so many requests.
    pub fn give_work(&mut self, requests: u32) {
        for unit in 0..self.units.len() {
            let state = &mut self.units[unit];
            state.asks_left = requests;
            if let Some(client) = &mut state.open_loop {
                client.give_work(requests);
            }
            self.engine.after(Nanos(0), Happening::Client(unit));
            let client = &mut self.units[unit].open_loop;
            if let Some(pause) = client.as_mut().and_then(OpenClient::next_arrival) {
                self.engine.after(pause, Happening::Arrival(unit));
            }
        }
    }

    /// Whether every client has sent everything and got every answer.
    pub fn is_idle(&self) -> bool {
        self.units.iter().all(|unit| {
            let is_done = unit.open_loop.as_ref().is_none_or(OpenClient::is_done);
            is_done && unit.asks_left == 0 && unit.requests.is_empty()
        })
    }

    /// Whether a volume serves no longer as it should, so that the node is better restarted.
    pub fn is_broken(&self) -> bool {
        let Some(node) = &self.node else { return true };
        node.volumes.iter().any(|volume| {
            matches!(volume.phase(), Phase::Failed(_))
                || matches!(volume.state(), State::ReadOnly | State::Inconsistent)
                || matches!(volume.trouble(), Some((Trouble::Fenced, _)))
        })
    }

    /// Whether every volume is open.
    pub fn is_open(&self) -> bool {
        let Some(node) = &self.node else { return false };
        node.volumes
            .iter()
            .all(|volume| volume.phase() == Phase::Open)
    }

    /// Whether some volume's opening failed.
    pub fn has_failed(&self) -> bool {
        let Some(node) = &self.node else { return false };
        node.volumes
            .iter()
            .any(|volume| matches!(volume.phase(), Phase::Failed(_)))
    }

    /// From now on nothing goes wrong: backends are back, the clock of the stall checker runs.
    pub fn calm(&mut self) {
        if self.calm_since.is_none() {
            self.engine.note("calm", [0; 4]);
        }
        self.calm_since = Some(self.engine.now());
        for unit in &mut self.units {
            unit.backend_down = None;
            unit.backend_silent = Nanos(0);
            unit.shrink = None;
        }
        self.end_silence_of_logs();
        self.engine
            .retain(|happening| !matches!(happening, Happening::BackendReturns(_)));
    }

    /// Things go wrong again.
    pub fn unrest(&mut self) {
        self.calm_since = None;
    }

    /// What rots in a log that was refused is as it was again. Returns whether anything was. One that
    /// was opened stays as it is: what it lost would come back.
    ///
    /// # Errors
    /// What lies below it then is no disk that the client could have seen.
    pub fn heal_logs(&mut self) -> Result<bool, Violation> {
        let mut healed = false;
        for unit in self.units.iter_mut().filter(|unit| unit.refused) {
            healed |= std::mem::replace(&mut unit.log_rotten, unit.has_lost);
            unit.log.heal();
            unit.rotten.clear();
            // What is lost of a span that reads well again is not.
            unit.lost.clear();
            unit.reopen_stack()?;
        }
        Ok(healed)
    }

    /// Judge an opening that has just ended.
    pub(super) fn notice_opening(&mut self, unit: usize) -> Result<(), Violation> {
        if self.units[unit].opened {
            return Ok(());
        }
        let Some(volume) = self.volume(unit) else {
            return Ok(());
        };
        let state = &self.units[unit];
        match volume.phase() {
            Phase::Open => {
                let replayed = volume.stats(self.engine.now()).replayed_entries;
                self.coverage.openings += 1;
                self.coverage.replayed += replayed;
                self.units[unit].opened = true;
                self.engine.note("opened", [unit as u64, replayed, 0, 0]);
                self.check_rot(unit, replayed)
            }
            Phase::Failed(error) => {
                let excused = match error {
                    OpenError::Io(_) => state.log_trouble,
                    // It is proved that something is gone that is not just data.
                    OpenError::CorruptLog { .. } => {
                        state.rot.as_ref().is_some_and(|view| view.proof)
                            || check_log::outlives_superblock(&state.log)
                    }
                    OpenError::LostTooMuch { .. } => (state.rot.as_ref())
                        .is_some_and(|view| check_log::pieces(&view.lost) > LOST_RANGES_MAX),
                    OpenError::Superblock(_) => {
                        state.rot.is_none() && check_log::superblock_rots(&state.log)
                    }
                    OpenError::Forged
                    | OpenError::Method { .. }
                    | OpenError::Record { .. }
                    | OpenError::Kind { .. } => false,
                };
                self.coverage.refusals += 1;
                self.units[unit].opened = true;
                self.units[unit].refused = !matches!(error, OpenError::Io(_));
                self.engine.note("refused", [unit as u64, 0, 0, 0]);
                if excused {
                    return Ok(());
                }
                Err(Violation::new(
                    "open-refused",
                    format!("volume {unit} cannot be opened: {error}"),
                ))
            }
            _ => Ok(()),
        }
    }

    /// A log was opened. With rot in it that is right only if nothing in it proves a loss that it does not tell. What
    /// the rot has taken is what the log held before, and does not hold now: as many of the newest writes need not be
    /// there any more as that are, from the first reply on. All else is demanded as ever.
    fn check_rot(&mut self, unit: usize, replayed: u64) -> Result<(), Violation> {
        let Some(view) = self.units[unit].rot.take() else {
            return self.check_lost_sectors(unit, None);
        };
        if !view.entries_to_replay().contains(&replayed) {
            return Err(Violation::new(
                "replay-incomplete",
                format!(
                    "volume {unit} has replayed {replayed} entries of {} up to position {}, of which {} are damaged",
                    view.entries(),
                    view.end,
                    view.damaged_entries,
                ),
            ));
        }
        if !self.units[unit].log.is_rotten() {
            return self.check_lost_sectors(unit, None);
        }
        self.check_lost_sectors(unit, Some(&view))?;
        let state = &mut self.units[unit];
        if view.proof {
            return Err(Violation::new(
                "corrupt-log-forgotten",
                format!(
                    "volume {unit} was opened, though its log proves that it went on beyond position {}",
                    view.end
                ),
            ));
        }
        let sound = check_log::read_sound(&state.log, state.kept.as_ref());
        let taken = sound.map_or(0, |sound| sound.entries_beyond(view.end));
        let superblock_rots = state.superblock_rotted || check_log::superblock_rots(&state.log);
        let rested = std::mem::take(&mut state.rested);
        if taken > 0 && rested && !superblock_rots {
            return Err(Violation::new(
                "rest-forgotten",
                format!(
                    "volume {unit} was opened up to position {}, though its log had been at rest with more",
                    view.end
                ),
            ));
        }
        if taken > 0 {
            state.history.forgive(taken);
            state.lost_bytes_max = None;
            self.coverage.torn_logs += 1;
        }
        if taken > 0 || view.damaged > 0 || !view.gaps.is_empty() || !view.lost.is_empty() {
            state.history.mix_all();
            // The backend may have been given what the log has lost.
            state.snapshots.clear();
        } else if !superblock_rots {
            self.coverage.idle_rots += 1;
        }
        if superblock_rots {
            // What it had to say of the backend may be gone as well.
            state.history.loosen(true);
            state.history.told_of_loss();
        }
        Ok(())
    }

    /// Ask one volume to close; the others and the cache go on.
    pub fn begin_reopen(&mut self, unit: usize) -> Result<(), Violation> {
        self.engine.note("reopen", [unit as u64, 0, 0, 0]);
        self.units[unit].destage_all = None;
        self.give_up_snapshot(unit)?;
        if let Some(local) = &mut self.units[unit].local
            && local.is_tiered_before_close()
        {
            // What its clients have sent goes on beside that.
            self.units[unit].asks_left = LEAVING_REQUESTS;
            self.engine.after(Nanos(0), Happening::Client(unit));
            return self.begin_tiering(unit, true);
        }
        self.close_volume(unit, false)
    }

    /// Open it again, once it is closed.
    pub fn end_reopen(&mut self, unit: usize) -> Result<(), Violation> {
        if !self.is_unit_closed(unit) {
            return Ok(());
        }
        self.note_closed_late(unit);
        let state = &mut self.units[unit];
        let is_tiered = state.tiered_to_close.is_some();
        state.settle_close(unit, is_tiered)?;
        state.part_from_backend()?;
        state.leave_resizing();
        self.check_commits(unit)?;
        self.units[unit].end_epoch();
        self.forget_kept(unit);
        self.units[unit].begin_opening();
        let mut actions = Vec::new();
        let was_on = self.node.as_ref().map_or(0, |node| node.shards.of(unit));
        let volume = self.begin_volume(unit, &mut actions);
        let node = self.node.as_mut().expect("one of its volumes is closed");
        let mut closed = std::mem::replace(&mut node.volumes[unit], volume);
        if !closed.is_idle() {
            closed.shed();
            // Of another volume in its place, the end of its reads would be taken for another's.
            let owner = Owner::ClosedVolume(node.closed_volumes.len());
            node.closed_volumes.push(closed);
            node.shards.closed_on(was_on);
            let left = self.in_flight.values_mut();
            for one in left.filter(|one| one.owner == Owner::Volume(unit)) {
                one.owner = owner;
            }
        }
        self.perform_all(Owner::Volume(unit), actions)?;
        let pins = self.pins(unit);
        self.step_volume(unit, Event::Pin(pins))?;
        self.tick();
        Ok(())
    }

    /// Whether one volume is closed, and its log may be opened again.
    pub fn is_unit_closed(&self, unit: usize) -> bool {
        let may_hasten = self.planted.is(Plant::HastyReopen);
        self.phase(unit) == Some(Phase::Closed) && (may_hasten || !self.owes_log_answers(unit))
    }

    /// Ask the node to stop.
    pub fn close(&mut self, destage: bool) -> Result<(), Violation> {
        self.engine.note("close", [u64::from(destage), 0, 0, 0]);
        for unit in &mut self.units {
            unit.asks_left = 0;
            if let Some(client) = &mut unit.open_loop {
                client.stop();
            }
        }
        self.stop = Some(Stop::begin(self.engine.now(), destage));
        self.is_stop_held_up = false;
        self.stopped = None;
        self.go_on_stopping()?;
        self.tick();
        Ok(())
    }

    /// How the node has stopped, once it has.
    pub fn stopped(&self) -> Option<Result<(), Hung>> {
        self.stopped
    }

    pub(super) fn go_on_stopping(&mut self) -> Result<(), Violation> {
        self.is_stop_held_up |= self.units.iter().any(|unit| {
            let silent = unit.backend_silent.max(unit.log_silent);
            silent > self.engine.now()
        });
        while let (Some(stop), Some(node)) = (&mut self.stop, &self.node) {
            let volumes = node.volumes.iter();
            let answers = volumes.clone().map(|volume| volume.config().log_answer_max);
            let view = View {
                // Clients have their answers before the node is asked to stop.
                connections: 0,
                volumes: volumes
                    .filter(|volume| volume.phase() != Phase::Closed)
                    .count(),
                log_patience: answers.max().unwrap_or(Nanos(0)),
                others: Others::Closed,
                is_cache_closed: node.cache().is_closed(),
            };
            match stop.next(self.engine.now(), &view) {
                None => break,
                Some(Act::Abort) => unreachable!("there are no connections"),
                Some(Act::CloseVolumes { destage }) => {
                    for unit in 0..self.volumes() {
                        self.give_up_snapshot(unit)?;
                        self.close_volume(unit, destage)?;
                        if self.phase(unit) == Some(Phase::Open) && self.random.u8(..4) == 0 {
                            // Whoever asks for one does not know yet that the node stops.
                            self.snapshot_or_shrink(unit)?;
                        }
                    }
                }
                Some(Act::CloseCache) => {
                    self.step_cache(0, CacheEvent::Close)?;
                    self.tick();
                }
                Some(Act::End(result)) => {
                    self.stop = None;
                    self.stopped = Some(result);
                    if result.is_err() {
                        self.check_given_up()?;
                    }
                }
            }
        }
        Ok(())
    }

    /// A stop gives up nothing but what waits for an answer.
    fn check_given_up(&self) -> Result<(), Violation> {
        let is_closing = |unit| self.phase(unit) != Some(Phase::Closed);
        let asked = self.in_flight.values().filter(|one| {
            let unit = one.io.backend().or(one.io.log());
            unit.is_some_and(is_closing)
        });
        // What was asked in a silence that is over may still be answered late.
        let is_old = |since: Nanos| self.engine.now().since(since).0 > CLOSE_PATIENCE.0 / 2;
        let waits = asked.map(|one| one.since).any(is_old);
        let is_calm = self.calm_since.is_some_and(is_old);
        if waits || (self.is_stop_held_up && !is_calm) {
            return Ok(());
        }
        Err(self.stalled("it does not stop"))
    }

    /// Everything is closed: check what that promises, and drop the node.
    pub fn stop(&mut self, destaged: bool) -> Result<(), Violation> {
        self.engine.note("stopped", [0; 4]);
        self.leave_silent_logs();
        for (index, unit) in self.units.iter_mut().enumerate() {
            unit.settle_close(index, destaged)?;
            unit.part_from_backend()?;
        }
        for unit in 0..self.units.len() {
            self.check_commits(unit)?;
        }
        // What the cache device has not answered it may still do.
        self.cache_disk.process_kill();
        self.drop_node()
    }

    /// Power is cut, or the process is killed: what was not durable may be lost.
    pub fn crash(&mut self, power: bool) -> Result<(), Violation> {
        self.engine.note("crash", [u64::from(power), 0, 0, 0]);
        self.coverage.crashes += 1;
        for unit in 0..self.units.len() {
            let is_well = matches!(
                self.volume(unit).map(Volume::state),
                Some(State::Healthy | State::Degraded)
            );
            let state = &mut self.units[unit];
            let is_timely = !state.log_slow && !state.log_hung;
            if state.opened {
                let time = END_TIME_MAX.0 + state.log_latency.longest().0 * 8;
                let is_at_rest = self.engine.now().since(state.log_written) > Nanos(time);
                state.rested = is_well
                    && is_timely
                    && is_at_rest
                    && !state.log_trouble
                    && state.log_writes.is_empty();
                self.coverage.rests += u64::from(state.rested);
            }
            if !state.log_trouble && is_timely && state.opened {
                let config = &state.config;
                let age =
                    config.unpersisted_age_max.0 + AGE_SLACK.0 + state.log_latency.longest().0 * 8;
                check_recovery::promise_aged(
                    &mut state.history,
                    Nanos(self.engine.now().0.saturating_sub(age)),
                );
            }
            check_backend::check_whole(&state.history, |sector| state.backend.durable(sector))?;
            if !state.backend.is_atomic() {
                check_backend::check_whole(&state.history, |sector| state.backend.visible(sector))?;
            }
            self.crash_keeping(unit);
            let state = &mut self.units[unit];
            if power {
                state.log.power_cut();
            } else {
                state.log.process_kill();
            }
            if let Some(local) = &mut state.local {
                local.crash(power);
            }
            if power && self.scenario.shared_power {
                self.cut_backend(unit)?;
            }
            self.units[unit].lose_client()?;
            self.check_commits(unit)?;
            let state = &self.units[unit];
            check_backend::check_whole(&state.history, |sector| state.backend.visible(sector))?;
        }
        if power {
            self.cache_disk.power_cut();
        } else {
            self.cache_disk.process_kill();
        }
        if self.scenario.faults.cache_wiped {
            self.cache_disk.wipe();
        }
        self.drop_node()
    }

    /// Everything was read since the last crash: check how much it took.
    pub fn check_lost(&self) -> Result<(), Violation> {
        for unit in &self.units {
            if let Some(bytes_max) = unit.lost_bytes_max {
                check_recovery::check_lost_bytes(&unit.history, bytes_max)?;
            }
        }
        Ok(())
    }

    fn count_hits(&mut self) {
        for volume in self.node.iter().flat_map(|node| &node.volumes) {
            let stats = volume.stats(self.engine.now());
            self.coverage.ssd_hits += stats.ssd_hit_blocks;
            self.coverage.dram_hits += stats.dram_hit_blocks;
            self.coverage.compressed_bytes += stats.log_plain_bytes - stats.log_stored_bytes;
            self.coverage.packed_bytes += stats.ssd_plain_bytes - stats.ssd_stored_bytes;
        }
        if let Some(node) = &self.node {
            let cache = node.cache().stats();
            self.coverage.cache_failures += cache.ssd_failures;
            self.coverage.readmissions += cache.ssd_readmissions;
        }
    }

    /// The node's memory is gone.
    fn drop_node(&mut self) -> Result<(), Violation> {
        self.check_snapshots()?;
        self.count_hits();
        self.keep_heat();
        self.engine
            .retain(|happening| matches!(happening, Happening::BackendReturns(_)));
        self.in_flight.clear();
        self.cache_writes.clear();
        self.node = None;
        for unit in &mut self.units {
            unit.requests.forget_all();
            unit.asks_left = 0;
            if let Some(client) = &mut unit.open_loop {
                client.forget();
            }
            unit.postponed = None;
            unit.scrub.forget();
            unit.starving = None;
            unit.starved.clear();
            unit.leave_resizing();
            unit.destage_all = None;
            unit.snapshotting = None;
            unit.log_writes.clear();
            unit.backend_writes.clear();
            unit.backend_trouble = None;
            // Whoever had taken it over has given it back, as it was.
            unit.fence = Fence::default();
            let bound = unit.unpersisted_bytes_max + UNPERSISTED_SLACK_BYTES;
            unit.lost_bytes_max = (!unit.log_trouble && !unit.log_rotten).then_some(bound);
            unit.end_epoch();
        }
        check_bounds::check_pool_is_free(&self.pool)
    }
}

impl World {
    /// What the run saw.
    pub fn coverage(&self) -> Coverage {
        let mut coverage = self.coverage;
        let logs = self.units.iter().map(|unit| &unit.log);
        let disks = logs.chain([&self.cache_disk]);
        coverage.lies = disks.filter(|disk| disk.told().is_some()).count() as u64;
        coverage
    }

    /// Number of volumes.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// Size of a volume in sectors.
    pub fn sectors(&self, unit: usize) -> u64 {
        self.units[unit].history.sectors()
    }

    /// The point after everything that the cache was told to forget.
    pub fn cache_barrier(&mut self) -> Option<Barrier> {
        self.node.as_mut().map(|node| node.cache_mut().barrier())
    }

    /// Whether all before a point is durably forgotten.
    pub fn is_persisted(&self, barrier: Option<Barrier>) -> bool {
        let persisted = self.node.as_ref().map(|node| node.cache().persisted());
        barrier <= persisted
    }

    /// Whether a log has rot in it that may matter still.
    pub fn is_rotten(&self) -> bool {
        self.units.iter().any(|unit| unit.log_rotten)
    }

    /// Let one round pass.
    pub fn pause(&mut self) -> Result<(), Violation> {
        self.engine.at(
            self.engine.now().plus(Nanos::from_millis(1)),
            Happening::Tick,
        );
        let round = self.engine.turns();
        self.run_until(|world| world.engine.turns() > round)
            .map(|_| ())
    }

    /// Ask a volume to destage everything.
    pub fn begin_destage_all(&mut self, unit: usize) -> Result<(), Violation> {
        self.destage_all(unit)?;
        self.tick();
        Ok(())
    }

    pub(super) fn tick(&mut self) {
        self.engine.after(Nanos(0), Happening::Tick);
    }

    /// Whether the SSD tier serves, or cannot be expected to.
    pub fn is_cache_back(&self) -> bool {
        let Some(node) = &self.node else { return true };
        let state = node.cache().stats().ssd_state;
        matches!(state, SsdState::Off | SsdState::Online) || self.cache_silent == Nanos(u64::MAX)
    }

    /// All is well and destaged: check that the volumes say so.
    pub fn check_healthy(&self) -> Result<(), Violation> {
        let volumes = self.node.iter().flat_map(|node| &node.volumes);
        for (unit, volume) in volumes.enumerate() {
            // A backend may be as slow as that with nothing wrong.
            let max = self.units[unit].config.backend_answer_max;
            let mut theirs = (self.in_flight.values()).filter(|op| op.io.backend() == Some(unit));
            if theirs.all(|op| self.engine.now().since(op.since) < max) {
                check_trouble::check_healthy(unit, volume.state())?;
            }
        }
        Ok(())
    }

    /// Whether every volume has destaged what it was asked to.
    pub fn is_destaged(&mut self) -> bool {
        self.units.iter().all(|unit| unit.destage_all.is_none())
    }
}

impl Unit {
    /// The volume is about to be opened.
    fn begin_opening(&mut self) {
        self.log_trouble = false;
        self.log_stuck = false;
        self.unpersisted_bytes_max = self.config.unpersisted_bytes_max;
        self.opened = false;
        self.refused = false;
        let log = &self.log;
        let kept = self.kept.as_ref();
        self.rot = check_log::read_log(log, kept);
        self.superblock_rotted = check_log::superblock_rots(log);
        self.inconsistent_since = None;
        self.spoiled.clear();
        self.asked_early.clear();
        self.destage_all = None;
        self.snapshotting = None;
        self.tiered_to_close = None;
        self.is_leaving = false;
        self.shrink = None;
        self.was_direct = self.config.policy.is_direct() || check_log::is_marked(log, kept);
        self.read_only_until = 0;
        let read_only = self.config.policy == Policy::ReadOnly;
        self.read_only_since = read_only.then(|| self.history.tick());
        self.fence.reopened();
        self.order.reopened();
        // No opening knows what an earlier one was to tell.
        self.history.told_of_loss();
        let now = self.history.tick();
        self.durability = Durability::opened(self.config.persist, now);
    }

    /// The volume is closed, and with it its backend: what an atomic one holds beside is gone.
    fn part_from_backend(&mut self) -> Result<(), Violation> {
        if self.backend.is_atomic() || self.is_stacked() {
            self.lose_client()?;
        }
        Ok(())
    }

    /// The backend's client is gone, and with it what an atomic one holds beside.
    fn lose_client(&mut self) -> Result<(), Violation> {
        if self.is_stacked() {
            return self.lose_stack();
        }
        self.backend.client_lost();
        if self.backend.is_atomic() {
            self.history.loosen(true);
        }
        Ok(())
    }

    /// The volume is closed: everything was answered, and what was acknowledged stays.
    fn settle_close(&mut self, index: usize, destaged: bool) -> Result<(), Violation> {
        if let Some((_, waiting)) = self.requests.oldest() {
            return Err(Violation::new(
                "closed-without-answer",
                format!("volume {index} is closed and owes an answer to {waiting:?}"),
            ));
        }
        if !self.opened || self.refused || self.log_trouble {
            return Ok(());
        }
        let end = self.history.acked_end;
        self.history.promise(end);
        if !self.fence.is_told() {
            // What the flush of a close has lost, nobody is there to be told.
            self.history.told_of_loss();
            let flush = self.history.issue_flush();
            let backend = &self.backend;
            check_policy::check_flushed(&self.history, flush, |sector| backend.durable(sector))?;
            self.history.settle_acked_before(flush.issued);
        }
        // What is damaged keeps a volume from destaging what lies behind it.
        if destaged && !self.fence.is_told() && self.inconsistent_since.is_none() {
            if let Some(before) = self.tiered_to_close {
                self.check_tiered(before)?;
            }
            let now = self.history.now() + 1;
            let backend = &self.backend;
            check_backend::check_complete(&self.history, now, |sector| backend.durable(sector))?;
        }
        Ok(())
    }
}
