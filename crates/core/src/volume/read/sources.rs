//! The border between the read side of a volume and the rest of it.

use super::{Fill, Reads};
use crate::base::buf::Buf;
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Done, SectorRange};
use crate::base::limits::{BLOCK_BYTES, LOG_READ_TRIES_MAX, SECTOR_BYTES};
use crate::cache::read_counts::ReadCounts;
use crate::cache::{Lookup, SsdTaken};
use crate::log::extent_index::{ExtentIndex, Sequence};
use crate::log::lost::LostSectors;
use crate::volume::compression::{Compression, Packed};
use crate::volume::direct::Direct;
use crate::volume::filling::Filling;
use crate::volume::op::Op;
use crate::volume::open_log::OpenLog;
use crate::volume::port::Port;
use crate::volume::{CachedBlocks, Context, Policy, Volume, VolumeConfig};

/// What the read side takes of the rest of the volume.
pub(in crate::volume) struct ReadSources<'a> {
    pub(in crate::volume) config: &'a VolumeConfig,
    pub(in crate::volume) log: &'a mut OpenLog,
    pub(in crate::volume) index: &'a ExtentIndex,
    pub(in crate::volume) cached: &'a CachedBlocks,
    pub(in crate::volume) compression: &'a mut Compression,
    pub(in crate::volume) direct: &'a Direct,
    pub(in crate::volume) filling: &'a mut Filling,
    pub(in crate::volume) lost: &'a LostSectors,
    pub(in crate::volume) port: &'a mut Port,
    /// Whether an acknowledgement waits for durability at present.
    pub(in crate::volume) is_on_write: bool,
    /// Whether whoever waits for the log is told of an error.
    pub(in crate::volume) refuses_for_silent_log: bool,
}

impl ReadSources<'_> {
    pub(super) fn sectors(&self) -> u64 {
        self.config.bytes / SECTOR_BYTES as u64
    }

    /// Whether what is not durable is shown: nobody was promised more, or it will not become durable.
    pub(super) fn shows_undurable(&self) -> bool {
        self.log.refuses_writes() || !self.is_on_write
    }

    /// A block in the cache, if it is to be looked for there.
    pub(super) fn find_cached(&self, block: u64, cx: &mut Context<'_>) -> Lookup {
        match self.config.policy {
            Policy::PassThrough => Lookup::Miss,
            _ => self.cached.look_up(block, cx),
        }
    }

    /// The sequence after the last write in `range`, if a read of it may have to wait until that is durable.
    pub(super) fn undurable_in(&self, range: SectorRange) -> Sequence {
        let durable = self.log.get().durable_sequence();
        if self.shows_undurable() || durable == self.log.get().next_sequence() {
            return 0;
        }
        let last = self.index.overlaps(range).map(|(_, sequence)| sequence + 1);
        last.max().unwrap_or(0)
    }

    /// Keep each line where its reads of late have earned it a place.
    pub(super) fn fill_by_use(
        &self,
        first_block: u64,
        data: &Buf,
        counts: &ReadCounts,
        cx: &mut Context<'_>,
    ) -> SsdTaken {
        let mut taken = SsdTaken::default();
        let method = self.config.compression;
        let line_blocks = cx.cache.line_blocks();
        let end = first_block + (data.len() / BLOCK_BYTES) as u64;
        let mut block = first_block;
        while block < end {
            let line = block / line_blocks;
            let next = end.min((line + 1) * line_blocks);
            let bytes = |block: u64| (block - first_block) as usize * BLOCK_BYTES;
            let part = data.slice(bytes(block)..bytes(next));
            let is_used = counts.count(line) >= self.config.promote_hits;
            let fill = if is_used { Fill::ByUse } else { Fill::Dram };
            taken += self.cached.fill(block, &part, fill, method, cx);
            block = next;
        }
        taken
    }
}

impl Volume {
    /// The read side, and what it takes of the rest.
    #[inline]
    pub(in crate::volume) fn read_side(&mut self) -> (&mut Reads, ReadSources<'_>) {
        let is_on_write = self.is_on_write();
        let when_full = self.config.when_full;
        let refuses_for_silent_log = self.health.refuses_for_silent_log(when_full);
        let sources = ReadSources {
            config: &self.config,
            log: &mut self.log,
            index: &self.index,
            cached: &self.cached,
            compression: &mut self.compression,
            direct: &self.direct,
            filling: &mut self.filling,
            lost: self.damage.lost(),
            port: &mut self.port,
            is_on_write,
            refuses_for_silent_log,
        };
        (&mut self.reads, sources)
    }

    /// Blocks of the log were read for a read.
    pub(in crate::volume) fn log_was_read(
        &mut self,
        read: usize,
        piece: SectorRange,
        (position, packed): (u64, Option<Packed>),
        tries: u8,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let tries = tries + 1;
        let mut error = None;
        match result {
            Ok(Done::Read(data)) => {
                let is_good = self.log.blocks_match(&data, position);
                if !is_good && tries < LOG_READ_TRIES_MAX {
                    let token = self.port.begin(Op::ReadLog {
                        read,
                        range: piece,
                        position,
                        packed,
                        tries,
                    });
                    return self.log.read_pinned(token, position, data, true, cx);
                }
                let (reads, mut from) = self.read_side();
                if is_good && reads.place_logged(read, piece, packed, &data, &mut from) {
                    let blocks = (data.len() / BLOCK_BYTES) as u64;
                    self.damage.found_good(&(position..position + blocks));
                } else {
                    let stats = &mut self.port.stats;
                    self.damage
                        .found_bad(position, &data, self.log.get(), stats);
                    self.refuse_for_damage(cx);
                    error = Some(RequestError::Corrupt);
                }
            }
            _ => error = Some(RequestError::Io),
        }
        self.log.unpin(position);
        let (reads, mut from) = self.read_side();
        match error {
            Some(error) => reads.fail_read(read, error, &mut from, cx),
            None => reads.finish_read(read, &mut from, cx),
        }
    }
}
