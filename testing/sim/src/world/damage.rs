//! Logs that rot under dirty data, and reads of them that bring wrong bytes.
//!
//! Checker:
//! 1. A volume whose log is damaged takes no write while it is inconsistent.
//! 2. An opening of a damaged log says exactly which sectors are lost, as an independent reader of the image finds
//!    them; so does every later one, of those that nobody has asked to write since.
//! 3. Both superblocks of such a log say so before the volume is open, and what it had been known to reach, no later
//!    opening ends before.
//! 4. No read of a lost sector succeeds before somebody has asked to write it.
//! 5. A read of the log that brings wrong bytes once has no effect, neither while the volume is open nor while an
//!    opening replays the log.

use std::collections::BTreeSet;

use hdcs_core::base::io::{Reply, SectorRange};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::volume::State;

use super::{
    BLOCK_BYTES, BufMut, Phase, Plant, Rng, Violation, Volume, Waiting, World, WriteId, mix,
};
use crate::check_log::{self, LogView};

/// Reads of an opening that bring wrong bytes at most: one at each of the two looks at the end of the log, before a
/// third is asked for.
const REPLAY_SPOILS_MAX: usize = 2;

impl World {
    /// Remember since when a volume is inconsistent.
    pub(super) fn notice_damage(&mut self, unit: usize) {
        let state = self.volume(unit).map(Volume::state);
        let is_ending = matches!(self.phase(unit), Some(Phase::Closing | Phase::Closed));
        let of = &mut self.units[unit];
        if state != Some(State::Inconsistent) && is_ending {
            // It says nothing any more, and is what it was.
        } else if state != Some(State::Inconsistent) {
            of.inconsistent_since = None;
        } else if of.inconsistent_since.is_none() {
            of.inconsistent_since = Some(of.history.tick());
            self.coverage.inconsistent += 1;
        }
    }

    /// A volume was opened: what its log has lost by what an independent reader made of it, if that has rot.
    pub(super) fn check_lost_sectors(
        &mut self,
        unit: usize,
        view: Option<&LogView>,
    ) -> Result<(), Violation> {
        let volume = self.volume(unit).expect("it was opened");
        // A change of size may have been cut short.
        let bytes = volume.config().bytes;
        let sectors = (bytes / SECTOR_BYTES as u64).min(self.units[unit].history.sectors());
        let told: BTreeSet<u64> = (volume.lost().iter())
            .flat_map(|range| range.start..range.end().min(sectors))
            .collect();
        let state = &mut self.units[unit];
        let damaged = view.map_or(0, |view| view.damaged);
        if let Some(view) = view {
            let found: BTreeSet<u64> = view.lost.range(..sectors).copied().collect();
            let is_told =
                |sector: &u64| told.contains(sector) || state.asked_early.contains(sector);
            if !found.iter().all(is_told) || !told.is_subset(&found) {
                return Err(Violation::new(
                    "lost-not-told",
                    format!("volume {unit} has lost {found:?}, and says {told:?}"),
                ));
            }
        }
        let ends_early = view.is_some_and(|view| view.end < state.log_known);
        let rots = state.superblock_rotted || check_log::superblock_rots(&state.log);
        if ends_early && !rots {
            return Err(Violation::new(
                "saved-forgotten",
                format!("volume {unit} was opened without what an earlier opening has saved"),
            ));
        }
        let recorded = check_log::superblock(&state.log).map_or(0, |found| found.known_head.get());
        if let Some(view) = view.filter(|view| view.damaged > 0 && recorded < view.known) {
            return Err(Violation::new(
                "end-not-recorded",
                format!(
                    "volume {unit} has saved its log up to {}, and its superblock says {recorded}",
                    view.known
                ),
            ));
        }
        if view.is_some() {
            state.log_known = view.map_or(0, |view| view.known);
        }
        if (damaged > 0 || !told.is_empty()) && !check_log::superblocks_agree(&state.log) {
            return Err(Violation::new(
                "lost-told-once",
                format!(
                    "volume {unit} has lost something, and one of its superblocks does not say so"
                ),
            ));
        }
        let mut kept = state.lost.range(..sectors);
        let forgotten = kept.find(|sector| !told.contains(sector));
        if let Some(sector) = forgotten {
            return Err(Violation::new(
                "lost-forgotten",
                format!("volume {unit} has lost sector {sector}, and does not say so any more"),
            ));
        }
        for &sector in &told {
            state.history.lose(sector);
        }
        let gaps = view.into_iter().flat_map(|view| view.gaps.range(..sectors));
        for &sector in gaps.chain(&told) {
            state.history.skip(sector);
        }
        state.has_lost |= !told.is_empty();
        state.log_rotten |= state.has_lost;
        self.coverage.saved_logs += u64::from(damaged > 0);
        self.coverage.lost_sectors += told.difference(&state.lost).count() as u64;
        state.lost = told.difference(&state.asked_early).copied().collect();
        Ok(())
    }

    /// A read was answered with data.
    pub(super) fn check_not_lost(&self, unit: usize, range: SectorRange) -> Result<(), Violation> {
        let Some(sector) = self.units[unit].lost.range(range.start..range.end()).next() else {
            return Ok(());
        };
        Err(Violation::new(
            "lost-shown",
            format!("volume {unit} answers a read of sector {sector}, which is lost"),
        ))
    }

    /// A planted bug answers a read of lost sectors with what the backend has.
    pub(super) fn shown_lost(&mut self, unit: usize, waiting: &Waiting) -> Option<Reply> {
        let Waiting::Read(read) = waiting else {
            return None;
        };
        if !self.planted.strikes(Plant::ShownLoss) {
            return None;
        }
        let mut data = self.pool.alloc(read.range.bytes())?;
        let state = &self.units[unit];
        for (sector, bytes) in (read.range.start..).zip(data.chunks_mut(SECTOR_BYTES)) {
            let content = state.backend.visible(sector);
            content.fill(state.volume, sector, bytes);
        }
        Some(Reply::Data(data.freeze()))
    }

    /// A write was acknowledged.
    pub(super) fn check_consistent(&self, unit: usize, id: WriteId) -> Result<(), Violation> {
        let state = &self.units[unit];
        let issued = state.history.write(id).issued;
        if state.inconsistent_since.is_none_or(|since| issued < since) {
            return Ok(());
        }
        Err(Violation::new(
            "inconsistent-writes",
            format!("volume {unit} has taken write {id}, though it is inconsistent"),
        ))
    }

    /// What a read of a volume's log has brought may be wrong, once.
    pub(super) fn spoil_log_read(&mut self, unit: usize, offset: u64, buf: &mut BufMut) {
        if self.phase(unit) == Some(Phase::Opening) {
            return self.spoil_replay(unit, offset, buf);
        }
        let one_in = self.scenario.faults.log_spoils_one_in;
        if one_in == 0
            || self.calm_since.is_some()
            || self.phase(unit) != Some(Phase::Open)
            || self.random.u32(..one_in) > 0
        {
            return;
        }
        let block = offset / BLOCK_BYTES as u64;
        // A planted bug reads no better the second time.
        if !self.units[unit].spoiled.insert(block) && !self.planted.is(Plant::StuckRead) {
            return;
        }
        let at = self.random.usize(..BLOCK_BYTES);
        buf[at] ^= 1 << self.random.u8(..8);
        self.coverage.spoiled_reads += 1;
        self.engine
            .note("log read spoiled", [unit as u64, offset, 0, 0]);
    }

    /// The same while its log is replayed: any block of what was read.
    fn spoil_replay(&mut self, unit: usize, offset: u64, buf: &mut BufMut) {
        let one_in = self.scenario.faults.replay_spoils_one_in;
        if one_in == 0 || self.calm_since.is_some() {
            return;
        }
        let first = offset / BLOCK_BYTES as u64;
        let blocks = (buf.len() / BLOCK_BYTES) as u64;
        // A planted bug reads no better the second time.
        let is_stuck = self.planted.is(Plant::StuckReplay);
        let spoiled = &self.units[unit].spoiled;
        let again = spoiled.range(first..first + blocks).next().copied();
        let block = match again.filter(|_| is_stuck) {
            Some(block) => block - first,
            None if self.random.u32(..one_in) > 0 || spoiled.len() >= REPLAY_SPOILS_MAX => return,
            // Few blocks of what is read ahead matter, most of them at its beginning.
            None => {
                let among = if self.random.bool() { 8 } else { blocks };
                self.random.u64(..among.min(blocks))
            }
        };
        if !self.units[unit].spoiled.insert(first + block) && !is_stuck {
            return;
        }
        // What is stuck is wrong in the same way every time.
        let mut way = Rng::with_seed(mix(self.scenario.seed ^ mix(first + block)));
        let at = block as usize * BLOCK_BYTES + way.usize(..BLOCK_BYTES);
        buf[at] ^= 1 << way.u8(..8);
        self.coverage.spoiled_replays += 1;
        self.engine
            .note("replay spoiled", [unit as u64, first + block, 0, 0]);
    }
}
