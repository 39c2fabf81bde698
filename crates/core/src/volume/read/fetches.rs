//! Fetches: reads of the backend that fill the cache.
//!
//! A *fetch* reads whole cache lines from the backend. Reads that miss the same line share one. A
//! fetch that overlaps a retired generation is *stale*: it still serves those who came before, but
//! nobody may join it and it does not fill the cache.

use alloc::vec::Vec;

use super::{FETCH_BLOCKS_MAX, Fetch, Fill, ReadSources, Reads};
use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Nanos, SectorRange};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use crate::cache::SsdTaken;
use crate::volume::filling::Filling;
use crate::volume::op::Op;
use crate::volume::{CachedBlocks, Context};

impl Reads {
    /// The size has changed: what is being fetched may end before the new end of its last block, or
    /// lie beyond it. Nobody joins it, and it is not kept.
    pub(in crate::volume) fn forget_fetches(&mut self) {
        for (_, fetch) in &mut self.fetches {
            fetch.stale = true;
        }
        self.by_block.clear();
    }

    /// A fetch under way that covers `block` and is not stale.
    pub(super) fn joinable(&self, block: u64) -> Option<usize> {
        let (_, &key) = self.by_block.range(..=block).next_back()?;
        let fetch = &self.fetches[key];
        (!fetch.stale && block < fetch.first_block + fetch.blocks).then_some(key)
    }

    /// Fetch at least the first block of `run`, in whole lines, bounded.
    pub(super) fn begin_fetch(
        &mut self,
        run: SectorRange,
        fill: Fill,
        promotion: Option<usize>,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) -> Option<usize> {
        if from.port.is_fenced() {
            return None;
        }
        let line = if fill == Fill::Nowhere {
            1
        } else {
            cx.cache.line_blocks()
        };
        let volume_blocks = from.sectors().div_ceil(BLOCK_SECTORS);
        let first_block = run.first_block() / line * line;
        let end = (run.first_block() + run.block_count())
            .next_multiple_of(line)
            .min(first_block + FETCH_BLOCKS_MAX.max(line))
            .min(volume_blocks)
            .min(self.next_fetch_after(run.first_block()));
        let (buf, first_block, blocks) =
            fetch_buffer(cx.pool, first_block, end, run.first_block())?;
        // A fetch before it may reach into the line, if that one was cut short.
        let range = SectorRange::new(first_block * BLOCK_SECTORS, blocks * BLOCK_SECTORS)
            .intersect(SectorRange::new(0, from.sectors()));
        let buf = buf.narrow(0..range.bytes());
        let fetch = self.fetches.insert(Fetch {
            first_block,
            blocks,
            stale: from.direct.is_changing(range),
            fill,
            waiters: Vec::new(),
            promotion,
        });
        self.by_block.insert(first_block, fetch);
        let token = from.port.begin(Op::Fetch { fetch });
        cx.actions.push(Action::BackendRead {
            token,
            offset: range.byte_offset(),
            buf,
        });
        Some(fetch)
    }

    /// First block after `block` that a fetch under way covers, so that fetches do not overlap.
    fn next_fetch_after(&self, block: u64) -> u64 {
        self.by_block
            .range(block + 1..)
            .next()
            .map_or(u64::MAX, |(&first, _)| first)
    }

    pub(in crate::volume) fn fetched(
        &mut self,
        key: usize,
        result: Result<Done, IoError>,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let fetch = self.fetches.remove(key);
        if self.by_block.get(&fetch.first_block) == Some(&key) {
            self.by_block.remove(&fetch.first_block);
        }
        let is_corrupt = matches!(result, Err(IoError::Corrupt));
        let data = if let Ok(Done::Read(data)) = result {
            Some(data.freeze())
        } else {
            None
        };
        from.port.stats.backend_errors += u64::from(data.is_none());
        let whole = SectorRange::new(
            fetch.first_block * BLOCK_SECTORS,
            fetch.blocks * BLOCK_SECTORS,
        );
        for (read, part) in fetch.waiters {
            if let Some(data) = &data {
                let start =
                    (part.start - fetch.first_block * BLOCK_SECTORS) as usize * SECTOR_BYTES;
                self.place(read, part)
                    .copy_from_slice(&data[start..start + part.bytes()]);
            } else if is_corrupt {
                self.read_narrowly(read, part, whole, from, cx);
            } else {
                self.active[read].error = Some(RequestError::Io);
            }
            self.finish_read(read, from, cx);
        }
        if fetch.promotion.is_some() {
            cx.cache.end_promise(fetch.blocks);
        }
        let failed = data.is_none();
        // A local store refuses sectors whose destage was not flushed before a crash. The log has them again.
        let is_excused = is_corrupt && (fetch.stale || !from.index.is_clear(whole));
        if let Some(data) = data.filter(|_| !fetch.stale) {
            let taken = self.fill_cache(fetch.first_block, &data, fetch.fill, from, cx);
            from.port.stats.ssd_plain_bytes += taken.plain_bytes;
            from.port.stats.ssd_stored_bytes += taken.stored_bytes;
        }
        if let Some(promotion) = fetch.promotion {
            let state = &mut self.promotions[promotion];
            state.fetches -= 1;
            state.failed |= failed && !is_excused;
            if !failed {
                self.return_to_untaken(promotion, fetch.first_block, fetch.blocks, from, cx);
            }
            self.go_on_promoting(promotion, from, cx);
        }
    }

    /// Keep what was fetched; a last partial block of the volume is not cached. Returns what the SSD tier took.
    fn fill_cache(
        &self,
        first_block: u64,
        data: &Buf,
        fill: Fill,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) -> SsdTaken {
        let whole = data.len() / BLOCK_BYTES * BLOCK_BYTES;
        if whole == 0 || fill == Fill::Nowhere {
            return SsdTaken::default();
        }
        let data = data.slice(0..whole);
        let range = SectorRange::new(
            first_block * BLOCK_SECTORS,
            (data.len() / SECTOR_BYTES) as u64,
        );
        let fill = match fill {
            // The SSD tier would keep what the backend may lose.
            Fill::Both | Fill::ByUse if from.direct.is_unflushed(range) => Fill::Dram,
            Fill::ByUse if !from.cached.is_worth_taking(first_block, cx) => Fill::Dram,
            other => other,
        };
        match (fill, &self.counts) {
            (Fill::ByUse, Some(counts)) => from.fill_by_use(first_block, &data, counts, cx),
            (fill, _) => {
                let method = from.config.compression;
                from.cached.fill(first_block, &data, fill, method, cx)
            }
        }
    }

    /// The backend's content of `range` has changed: fetches that overlap it are stale, and what is to be kept of it is
    /// to be filled again.
    pub(in crate::volume) fn mark_fetches_stale(
        &mut self,
        range: SectorRange,
        filling: &mut Filling,
        now: Nanos,
    ) {
        filling.note_forgotten(range, now);
        for (_, fetch) in &mut self.fetches {
            let covered = SectorRange::new(
                fetch.first_block * BLOCK_SECTORS,
                fetch.blocks * BLOCK_SECTORS,
            );
            fetch.stale |= covered.overlaps(range);
        }
    }

    /// An action of a read took so long: what the cache weighs blocks by.
    pub(in crate::volume) fn note_cost(
        &self,
        op: &Op,
        took: Nanos,
        cached: &CachedBlocks,
        cx: &mut Context<'_>,
    ) {
        match op {
            Op::ReadSsd { permission, .. } => cx.cache.note_ssd_hit(permission.key, took),
            Op::Fetch { fetch } => {
                let fetch = &self.fetches[*fetch];
                // Nobody has waited for what was read ahead in time, or promoted.
                if fetch.fill != Fill::Nowhere && !fetch.waiters.is_empty() {
                    let key = cached.fill_key(fetch.first_block, cx);
                    cx.cache.note_miss(key, fetch.blocks, took);
                }
            }
            _ => {}
        }
    }
}

/// A buffer for the blocks from `first` to `end`, or for fewer from `wanted` on while memory is
/// short.
fn fetch_buffer(pool: &Pool, first: u64, end: u64, wanted: u64) -> Option<(BufMut, u64, u64)> {
    let mut blocks = end - first;
    while first + blocks > wanted && blocks > 0 {
        if let Some(buf) = pool.alloc(blocks as usize * BLOCK_BYTES) {
            return Some((buf, first, blocks));
        }
        blocks /= 2;
    }
    pool.alloc(BLOCK_BYTES).map(|buf| (buf, wanted, 1))
}
