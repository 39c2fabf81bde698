//! Extents: what is dirty, clean or cold, and what the backend has allocated.

use alloc::vec::Vec;

use super::op::Op;
use super::port::Kind;
use super::read::block_range;
use super::{CachedBlocks, Context, Volume};
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Extent, ExtentState, Reply, RequestId, SectorRange};
use crate::base::limits::STEP_WORK_MAX;
use crate::cache::Tier;
use crate::format::EntryKind;
use crate::log::extent_index::ExtentIndex;
use crate::log::write_log::WriteLog;

/// Extents in one answer, and what is looked at for it: blocks of the cache, runs of the log, extents of the backend.
const EXTENTS_MAX: usize = 256;
const EXTENT_LOOKS_MAX: usize = 2 * STEP_WORK_MAX;

impl Volume {
    pub(super) fn allocation_extents(
        &mut self,
        id: RequestId,
        range: SectorRange,
        cx: &mut Context<'_>,
    ) {
        if self.damage.lost().overlaps(range) {
            // Nobody may take what cannot be read for zeroes, whatever the backend has.
            let state = ExtentState::Data;
            let extents = Vec::from([Extent { range, state }]);
            self.port
                .reply(id, Kind::Other, Ok(Reply::Extents(extents)), cx);
        } else if self.config.backend_extents {
            let token = self.port.begin(Op::Extents { id, range });
            cx.actions.push(Action::BackendExtents { token, range });
        } else {
            let whole = Extent {
                range,
                state: ExtentState::Data,
            };
            self.answer_allocation(id, range, &[whole], cx);
        }
    }

    pub(super) fn backend_extents(
        &mut self,
        id: RequestId,
        range: SectorRange,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let is_good = matches!(result, Ok(Done::Extents(_)));
        self.port.stats.backend_errors += u64::from(!is_good);
        match result {
            // A local store answers whoever owns its backend.
            _ if self.port.is_fenced() => {
                let fenced = Err(RequestError::Fenced);
                self.port.reply(id, Kind::Other, fenced, cx);
            }
            Ok(Done::Extents(extents)) => self.answer_allocation(id, range, &extents, cx),
            _ => {
                let failed = Err(RequestError::Io);
                self.port.reply(id, Kind::Other, failed, cx);
            }
        }
    }

    fn answer_allocation(
        &mut self,
        id: RequestId,
        range: SectorRange,
        backend: &[Extent],
        cx: &mut Context<'_>,
    ) {
        let extents = overlay(range, backend, &self.index, self.log.get());
        let result = if extents.is_empty() {
            Err(RequestError::Io)
        } else {
            Ok(Reply::Extents(extents))
        };
        self.port.reply(id, Kind::Other, result, cx);
    }
}

/// Dirty, clean or cold, from the start of `range` on, bounded.
pub(super) fn cache_extents(
    range: SectorRange,
    index: &ExtentIndex,
    cached: &CachedBlocks,
    cx: &Context<'_>,
) -> Vec<Extent> {
    let mut extents = Vec::new();
    let mut looked = 0;
    for (piece, sequence) in index.pieces(range) {
        looked += 1;
        if sequence.is_some() {
            push_extent(&mut extents, piece, ExtentState::Dirty);
        } else {
            for block in piece.first_block()..piece.first_block() + piece.block_count() {
                let state = match cached.probe(block, cx) {
                    Tier::Absent => ExtentState::Cold,
                    Tier::Dram | Tier::Ssd => ExtentState::Clean,
                };
                push_extent(&mut extents, block_range(block).intersect(piece), state);
                looked += 1;
                if looked >= EXTENT_LOOKS_MAX {
                    return extents;
                }
            }
        }
        if extents.len() >= EXTENTS_MAX || looked >= EXTENT_LOOKS_MAX {
            break;
        }
    }
    extents
}

/// What the log holds over what the backend says, from the start of `range` on, bounded.
fn overlay(
    range: SectorRange,
    backend: &[Extent],
    index: &ExtentIndex,
    log: &WriteLog,
) -> Vec<Extent> {
    let known = backend
        .last()
        .map_or(range.start, |extent| extent.range.end());
    let mut extents = Vec::new();
    let (mut looked, mut behind) = (0, backend);
    for (piece, sequence) in index.pieces(SectorRange::between(range.start, known)) {
        looked += 1;
        if let Some(sequence) = sequence {
            let entry = log.entry(sequence);
            let state = match entry.kind {
                EntryKind::Write | EntryKind::SyncPoint | EntryKind::Record => ExtentState::Data,
                EntryKind::WriteZeroes if entry.no_hole => ExtentState::Zero,
                EntryKind::WriteZeroes | EntryKind::Discard => ExtentState::Hole,
            };
            push_extent(&mut extents, piece, state);
        } else {
            while let Some((extent, others)) = behind.split_first() {
                looked += 1;
                if extent.range.overlaps(piece) {
                    push_extent(&mut extents, extent.range.intersect(piece), extent.state);
                }
                if extent.range.end() > piece.end() || looked >= EXTENT_LOOKS_MAX {
                    break;
                }
                behind = others;
            }
        }
        if extents.len() >= EXTENTS_MAX || looked >= EXTENT_LOOKS_MAX {
            break;
        }
    }
    extents
}

fn push_extent(extents: &mut Vec<Extent>, range: SectorRange, state: ExtentState) {
    match extents.last_mut() {
        Some(last) if last.state == state && last.range.end() == range.start => {
            last.range.count += range.count;
        }
        _ => extents.push(Extent { range, state }),
    }
}
