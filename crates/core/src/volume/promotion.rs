//! Promotion: fetches a range for the cache.
//!
//! A promotion fetches no more than the SSD tier has room for, and fetches again what the tier could
//! not take: others fill it too. What is there already is passed by, a bounded number of blocks from one poll to
//! the next for all promotions together, so that their lengths show in nobody's latency.

use alloc::vec::Vec;

use super::port::Kind;
use super::read::{FETCH_BLOCKS_MAX, Fill};
use super::{Context, Volume, filling};
use crate::base::error::RequestError;
use crate::base::io::{Nanos, Reply, RequestId, SectorRange};
use crate::base::limits::{BLOCK_SECTORS, STEP_WORK_MAX};

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

impl Volume {
    pub(super) fn promote(&mut self, id: RequestId, range: SectorRange, cx: &mut Context<'_>) {
        let end = (range.first_block() + range.block_count()).min(self.cached.whole_blocks());
        self.begin_promoting(Some(id), range.first_block(), end, PROMOTE_RETURNS_MAX, cx);
    }

    /// Promote the next piece that nobody has asked for, if there is one.
    pub(super) fn fill_on(&mut self, cx: &mut Context<'_>) {
        let now = self.port.now;
        let policy = self.config.policy;
        let piece = self.filling.begin_piece(policy, &self.cached, now, cx);
        let Some((first, end)) = piece else { return };
        self.begin_promoting(None, first, end, filling::RETURNS_MAX, cx);
    }

    fn begin_promoting(
        &mut self,
        id: Option<RequestId>,
        next: u64,
        end: u64,
        returns_left: u32,
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
        let key = self.reads.promotions.insert(promotion);
        self.go_on_promoting(key, cx);
    }

    pub(super) fn cancel_promotions(&mut self, cx: &mut Context<'_>) {
        let keys: Vec<usize> = self.reads.promotions.iter().map(|(key, _)| key).collect();
        for key in keys {
            let promotion = &mut self.reads.promotions[key];
            promotion.end = promotion.end.min(promotion.next);
            self.go_on_promoting(key, cx);
        }
    }

    /// The size has changed: what lies beyond the new end is not fetched. Those that end by that end at the next
    /// poll, or with their last fetch.
    pub(super) fn cut_promotions(&mut self) {
        let end = self.cached.whole_blocks();
        for (_, promotion) in &mut self.reads.promotions {
            promotion.end = promotion.end.min(end);
        }
    }

    /// What was fetched for a promotion, but not taken, is fetched once more.
    pub(super) fn return_to_untaken(
        &mut self,
        promotion: usize,
        first: u64,
        blocks: u64,
        cx: &mut Context<'_>,
    ) {
        let state = &self.reads.promotions[promotion];
        let end = (first + blocks).min(state.end);
        let untaken = (first..end).find(|&block| !self.cached.is_promoted(block, cx));
        let state = &mut self.reads.promotions[promotion];
        if let Some(block) = untaken.filter(|&block| block < state.next)
            && state.returns_left > 0
        {
            state.returns_left -= 1;
            state.next = block;
        }
    }

    /// Go on with those that no fetch wakes: with the one behind the last that began first, so that each has its
    /// turn.
    pub(super) fn go_on_with_stalled(&mut self, cx: &mut Context<'_>) {
        self.reads.looks_left = STEP_WORK_MAX;
        let promotions = self.reads.promotions.iter();
        let mut stalled: Vec<usize> = promotions
            .filter_map(|(key, promotion)| (promotion.fetches == 0).then_some(key))
            .collect();
        let turn = stalled.partition_point(|&key| key <= self.reads.promoted_last);
        stalled.rotate_left(turn);
        self.reads.promoted_last = stalled.first().copied().unwrap_or_default();
        for key in stalled {
            self.go_on_promoting(key, cx);
        }
    }

    /// When those go on that have looked at as much as they may.
    pub(super) fn promotion_wakeup(&self) -> Option<Nanos> {
        let goes_on = self.reads.looks_left == 0 && self.reads.has_stalled_promotion();
        goes_on.then_some(self.port.now)
    }

    pub(super) fn go_on_promoting(&mut self, key: usize, cx: &mut Context<'_>) {
        while let Some(&Promotion {
            id,
            next,
            end,
            fetches,
            failed,
            ..
        }) = self.reads.promotions.get(key)
        {
            if next >= end || failed {
                if fetches == 0 {
                    self.reads.promotions.remove(key);
                    let result = if self.port.is_fenced() {
                        Err(RequestError::Fenced)
                    } else if failed {
                        Err(RequestError::Io)
                    } else {
                        Ok(Reply::Done)
                    };
                    if let Some(id) = id {
                        self.port.reply(id, Kind::Other, result, cx);
                    } else {
                        let (cached, now) = (&self.cached, self.port.now);
                        let rate_max = self.config.fill_rate_max_bytes_s;
                        self.filling.piece_ended(failed, rate_max, cached, now, cx);
                    }
                }
                return;
            }
            if fetches >= PROMOTE_FETCHES_MAX {
                return;
            }
            if self.reads.looks_left == 0 || cx.cache.refuses(self.cached.fill_key(next, cx), 1) {
                return;
            }
            self.reads.looks_left -= 1;
            self.port.work.add(1);
            let joinable = self.joinable(next);
            if let Some(fetch) = joinable {
                self.reads.fetches[fetch].fill = Fill::Both;
            }
            if joinable.is_some() || self.cached.is_promoted(next, cx) {
                self.reads.promotions[key].next = next + 1;
                continue;
            }
            if !cx.cache.has_room(FETCH_BLOCKS_MAX) {
                return;
            }
            let run = SectorRange::between(next * BLOCK_SECTORS, end * BLOCK_SECTORS);
            let Some(fetch) = self.begin_fetch(run, Fill::Both, Some(key), cx) else {
                return;
            };
            let fetch = &self.reads.fetches[fetch];
            cx.cache.promise(fetch.blocks);
            let promotion = &mut self.reads.promotions[key];
            promotion.next = fetch.first_block + fetch.blocks;
            promotion.fetches += 1;
        }
    }
}
