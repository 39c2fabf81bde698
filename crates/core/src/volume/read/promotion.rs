//! Promotion: fetches a range for the cache.
//!
//! A promotion fetches no more than the SSD tier has room for, and fetches again what the tier could
//! not take: others fill it too. What is there already is passed by, a bounded number of blocks from one poll to
//! the next for all promotions together, so that their lengths show in nobody's latency.

use alloc::vec::Vec;

use super::{FETCH_BLOCKS_MAX, Fill, ReadSources, Reads};
use crate::base::error::RequestError;
use crate::base::io::{Nanos, Reply, RequestId, SectorRange};
use crate::base::limits::{BLOCK_SECTORS, STEP_WORK_MAX};
use crate::volume::port::Kind;
use crate::volume::{Context, filling};

/// Fetches of one promotion in flight.
const PROMOTE_FETCHES_MAX: usize = 4;
/// How often one promotion goes back: others may fill the cache faster for ever.
const PROMOTE_RETURNS_MAX: u32 = 64;

/// A promotion under way.
#[derive(Debug)]
pub(super) struct Promotion {
    /// Who is answered; nobody, if the volume fills what nobody waits for.
    id: Option<RequestId>,
    next: u64,
    end: u64,
    pub(super) fetches: usize,
    pub(super) failed: bool,
    /// How often it may go back to what was not taken.
    returns_left: u32,
}

impl Reads {
    pub(in crate::volume) fn promote(
        &mut self,
        id: RequestId,
        range: SectorRange,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let end = (range.first_block() + range.block_count()).min(from.cached.whole_blocks());
        self.begin_promoting(
            Some(id),
            range.first_block(),
            end,
            PROMOTE_RETURNS_MAX,
            from,
            cx,
        );
    }

    /// Promote blocks that nobody has asked for, of which the filling is told once that has ended.
    pub(in crate::volume) fn promote_unasked(
        &mut self,
        first: u64,
        end: u64,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        self.begin_promoting(None, first, end, filling::RETURNS_MAX, from, cx);
    }

    fn begin_promoting(
        &mut self,
        id: Option<RequestId>,
        next: u64,
        end: u64,
        returns_left: u32,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let promotion = Promotion {
            id,
            next,
            end,
            fetches: 0,
            failed: false,
            returns_left,
        };
        let key = self.promotions.insert(promotion);
        self.go_on_promoting(key, from, cx);
    }

    pub(in crate::volume) fn cancel_promotions(
        &mut self,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let keys: Vec<usize> = self.promotions.iter().map(|(key, _)| key).collect();
        for key in keys {
            let promotion = &mut self.promotions[key];
            promotion.end = promotion.end.min(promotion.next);
            self.go_on_promoting(key, from, cx);
        }
    }

    /// The size has changed: what lies beyond the new end is not fetched. Those that end by that end at the next
    /// poll, or with their last fetch.
    pub(in crate::volume) fn cut_promotions(&mut self, whole_blocks: u64) {
        for (_, promotion) in &mut self.promotions {
            promotion.end = promotion.end.min(whole_blocks);
        }
    }

    /// What was fetched for a promotion, but not taken, is fetched once more.
    pub(super) fn return_to_untaken(
        &mut self,
        promotion: usize,
        first: u64,
        blocks: u64,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let state = &self.promotions[promotion];
        let end = (first + blocks).min(state.end);
        let untaken = (first..end).find(|&block| !from.cached.is_promoted(block, cx));
        let state = &mut self.promotions[promotion];
        if let Some(block) = untaken.filter(|&block| block < state.next)
            && state.returns_left > 0
        {
            state.returns_left -= 1;
            state.next = block;
        }
    }

    /// A poll begins, in which promotions may look at some blocks again. Returns whether there are some that no fetch wakes.
    pub(super) fn begin_turn_of_promotions(&mut self) -> bool {
        self.looks_left = STEP_WORK_MAX;
        let is_stalled = self.has_stalled_promotion();
        if !is_stalled {
            self.promoted_last = 0;
        }
        is_stalled
    }

    /// Go on with those that no fetch wakes: with the one behind the last that began first, so that each has its
    /// turn.
    pub(super) fn go_on_with_stalled(&mut self, from: &mut ReadSources<'_>, cx: &mut Context<'_>) {
        let promotions = self.promotions.iter();
        let mut stalled: Vec<usize> = promotions
            .filter_map(|(key, promotion)| (promotion.fetches == 0).then_some(key))
            .collect();
        let turn = stalled.partition_point(|&key| key <= self.promoted_last);
        stalled.rotate_left(turn);
        self.promoted_last = stalled.first().copied().unwrap_or_default();
        for key in stalled {
            self.go_on_promoting(key, from, cx);
        }
    }

    /// When those go on that have looked at as much as they may.
    pub(in crate::volume) fn promotion_wakeup(&self, now: Nanos) -> Option<Nanos> {
        let goes_on = self.looks_left == 0 && self.has_stalled_promotion();
        goes_on.then_some(now)
    }

    pub(super) fn go_on_promoting(
        &mut self,
        key: usize,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        while let Some(&Promotion {
            id,
            next,
            end,
            fetches,
            failed,
            ..
        }) = self.promotions.get(key)
        {
            if next >= end || failed {
                if fetches == 0 {
                    self.promotions.remove(key);
                    let result = if from.port.is_fenced() {
                        Err(RequestError::Fenced)
                    } else if failed {
                        Err(RequestError::Io)
                    } else {
                        Ok(Reply::Done)
                    };
                    if let Some(id) = id {
                        from.port.reply(id, Kind::Other, result, cx);
                    } else {
                        let (cached, now) = (from.cached, from.port.now);
                        let rate_max = from.config.fill_rate_max_bytes_s;
                        from.filling.piece_ended(failed, rate_max, cached, now, cx);
                    }
                }
                return;
            }
            if fetches >= PROMOTE_FETCHES_MAX {
                return;
            }
            if self.looks_left == 0 || cx.cache.refuses(from.cached.fill_key(next, cx), 1) {
                return;
            }
            self.looks_left -= 1;
            from.port.work.add(1);
            let joinable = self.joinable(next);
            if let Some(fetch) = joinable {
                self.fetches[fetch].fill = Fill::Both;
            }
            if joinable.is_some() || from.cached.is_promoted(next, cx) {
                self.promotions[key].next = next + 1;
                continue;
            }
            if !cx.cache.has_room(FETCH_BLOCKS_MAX) {
                return;
            }
            let run = SectorRange::between(next * BLOCK_SECTORS, end * BLOCK_SECTORS);
            let Some(fetch) = self.begin_fetch(run, Fill::Both, Some(key), from, cx) else {
                return;
            };
            let fetch = &self.fetches[fetch];
            cx.cache.promise(fetch.blocks);
            let promotion = &mut self.promotions[key];
            promotion.next = fetch.first_block + fetch.blocks;
            promotion.fetches += 1;
        }
    }
}
