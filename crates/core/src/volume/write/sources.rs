//! The border between the write side of a volume and the rest of it.

use alloc::sync::Arc;

use super::Writes;
use super::throttle::{Pace, Throttle};
use crate::base::buf::{Buf, Pool};
use crate::base::codec::Method;
use crate::base::io::{Nanos, SectorRange};
use crate::base::limits::{LOG_PIECE_BYTES_MAX, SECTOR_BYTES};
use crate::format::EntryKind;
use crate::log::extent_index::{ExtentIndex, Sequence};
use crate::log::packing::Compressed;
use crate::log::write_log::Entry;
use crate::volume::compression::Compression;
use crate::volume::damage::Damage;
use crate::volume::destaging::Destaging;
use crate::volume::direct::{Direct, WritePath};
use crate::volume::health::Health;
use crate::volume::open_log::OpenLog;
use crate::volume::port::Port;
use crate::volume::{CachedBlocks, Context, Phase, Volume, VolumeConfig};

/// What the write side takes of the rest of the volume.
pub(in crate::volume) struct WriteSources<'a> {
    pub(super) config: &'a VolumeConfig,
    pub(super) phase: Phase,
    pub(super) log: &'a mut OpenLog,
    pub(super) index: &'a mut ExtentIndex,
    pub(super) cached: &'a mut CachedBlocks,
    pub(super) compression: &'a mut Compression,
    pub(super) damage: &'a mut Damage,
    pub(super) direct: &'a mut Direct,
    pub(super) destaging: &'a Destaging,
    pub(super) port: &'a mut Port,
    pub(super) health: &'a Health,
}

/// What there is to admit a write by.
pub(super) struct Room<'a> {
    pub(super) config: &'a VolumeConfig,
    pub(super) log: &'a OpenLog,
    pub(super) index: &'a ExtentIndex,
    pub(super) path: &'a WritePath,
    pub(super) log_is_silent: bool,
    pub(super) pace: Pace,
}

impl Room<'_> {
    /// 0 while nothing is throttled, rising to 1 at a full log.
    pub(super) fn throttle(&self) -> f64 {
        Throttle::fill(self.log.get(), self.config.dirty_ratio_max, self.pace)
    }
}

impl WriteSources<'_> {
    /// What there is to admit a write by.
    pub(super) fn room(&self) -> Room<'_> {
        Room {
            config: self.config,
            log: self.log,
            index: self.index,
            path: self.direct.path(),
            log_is_silent: self.health.log_is_silent(),
            pace: Pace {
                rate_blocks: self.destaging.generation().rate_blocks(self.port.now),
                drains: (self.direct).drains(self.damage, self.destaging, self.health),
            },
        }
    }

    /// Put a write into the log in pieces. Returns the sequence of the last.
    pub(super) fn append_compressed(
        &mut self,
        now: Nanos,
        range: SectorRange,
        data: Buf,
        method: Method,
        cx: &Context<'_>,
    ) -> Sequence {
        let piece_sectors = (LOG_PIECE_BYTES_MAX / SECTOR_BYTES) as u64;
        let (first, last) = (
            range.start / piece_sectors,
            (range.end() - 1) / piece_sectors,
        );
        let mut pieces_left = (last - first + 1) as u16;
        let mut held_left = data.held_blocks();
        self.log.get_mut().keep_together(
            now,
            usize::from(pieces_left),
            range.block_count() as usize,
        );
        let mut sequence = 0;
        for piece in first..=last {
            let whole = SectorRange::new(piece * piece_sectors, piece_sectors);
            let part = whole.intersect(range);
            let start = (part.start - range.start) as usize * SECTOR_BYTES;
            let data = data.slice(start..start + part.bytes());
            let held_blocks = held_left / pieces_left;
            (held_left, pieces_left) = (held_left - held_blocks, pieces_left - 1);
            let plain = data.covering_blocks();
            let entry = Entry {
                range: part,
                kind: EntryKind::Write,
                no_hole: false,
                position: u64::MAX,
                stored: None,
                held_blocks,
                data: Some(data),
            };
            let mut compression = core::mem::take(&mut *self.compression);
            let compressed = compression.compress(self.config.codec, method, &plain);
            let compressed = compressed.map(|compressed| (compressed, cx.pool));
            sequence = self.append_entry(now, entry, plain.len(), compressed);
            *self.compression = compression;
        }
        sequence
    }

    /// Put one entry into the log, whose data blocks have so many bytes, and into the index.
    pub(super) fn append_entry(
        &mut self,
        now: Nanos,
        entry: Entry,
        data_bytes: usize,
        compressed: Option<(Compressed<'_>, &Arc<Pool>)>,
    ) -> Sequence {
        let (range, is_data) = (entry.range, entry.kind == EntryKind::Write);
        let stored_bytes = self.log.get_mut().append(now, entry, compressed);
        self.port.stats.log_plain_bytes += data_bytes as u64;
        self.port.stats.log_stored_bytes += stored_bytes as u64;
        let sequence = self.log.get().next_sequence() - 1;
        if is_data {
            self.index.insert(range, sequence);
        } else {
            self.index.insert_long(range, sequence);
        }
        self.log.note_runs(self.index.len());
        sequence
    }
}

impl Volume {
    /// What there is to admit a write by.
    pub(super) fn room(&self) -> Room<'_> {
        Room {
            config: &self.config,
            log: &self.log,
            index: &self.index,
            path: self.direct.path(),
            log_is_silent: self.health.log_is_silent(),
            pace: Pace {
                rate_blocks: self.destaging.generation().rate_blocks(self.port.now),
                drains: (self.direct).drains(&self.damage, &self.destaging, &self.health),
            },
        }
    }

    /// The write side, and what it takes of the rest.
    #[inline]
    pub(in crate::volume) fn write_side(&mut self) -> (&mut Writes, WriteSources<'_>) {
        let sources = WriteSources {
            health: &self.health,
            config: &self.config,
            phase: self.phase,
            log: &mut self.log,
            index: &mut self.index,
            cached: &mut self.cached,
            compression: &mut self.compression,
            damage: &mut self.damage,
            direct: &mut self.direct,
            destaging: &self.destaging,
            port: &mut self.port,
        };
        (&mut self.writes, sources)
    }
}
