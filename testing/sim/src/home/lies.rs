//! A device that loses a write of the map which it has acknowledged, once: of a page, of its copy or of a superblock.
//! Soon after that the power goes.
//!
//! Nothing that was flushed may read as before. What has become of the write is found out by the next opening: the
//! copy counts, or the local store is refused, which ends the run.

use fastrand::Rng;
use hdcs_core::base::error::FormatError;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::local::format::Layout;

use super::Options;
use super::plant::Plant;
use super::world::StoreWorld;
use crate::content::mix;
use crate::violation::Violation;

/// Steps after the lie within which the power goes.
const CUT_WITHIN: u64 = 40;
/// Writes of the map before the lie at most.
const SKIP_MAX: u64 = 30;

/// What is lost. Its randomness is a stream of its own.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct Lies {
    random: Rng,
    /// Writes of the map before the one that is lost, while none was.
    skip: Option<u64>,
    told: bool,
    /// Planted: whether nothing but copies is lost, and their pages are torn.
    is_sought: bool,
    /// Whether nobody has opened the local store since.
    pub is_news: bool,
    /// The page whose copy was lost, if the power goes when it is written next, which tears it perhaps.
    tears: Option<u64>,
    /// Planted: whether the rest of the commit is lost with it.
    loses_rest: bool,
    /// Whether the local store was refused for it.
    pub is_refused: bool,
}

impl Lies {
    pub fn new(seed: u64, options: Options) -> Self {
        let mut random = Rng::with_seed(mix(seed ^ mix(20)));
        // Other plants are found as they were before there were any.
        let may = options.plant.is_none_or(Plant::is_of_lies) && options.crash_at.is_none();
        let tells = random.u8(..3) == 0 && may;
        // It takes a copy that is lost, and a page that is torn.
        let is_sought = options.plant == Some(Plant::MapUnchecked);
        Self {
            skip: (tells || is_sought)
                .then(|| random.u64(..SKIP_MAX) / if is_sought { 6 } else { 1 }),
            is_sought,
            random,
            told: false,
            is_news: false,
            tears: None,
            loses_rest: false,
            is_refused: false,
        }
    }
}

/// Whether a page of the map, a copy of one, or a superblock lies at an offset of the store.
fn is_map(layout: Layout, offset: u64) -> bool {
    let (first, block) = (layout.page_offset(0, 0), BLOCK_BYTES as u64);
    let group = layout.page_offset(1, 0) - first;
    offset < 2 * block
        || offset
            .checked_sub(first)
            .is_some_and(|at| at % group < 2 * block)
}

impl StoreWorld {
    /// Whether this write is lost.
    pub(super) fn loses_map(&mut self, offset: u64) -> bool {
        if self.calm || !is_map(self.layout(), offset) {
            return false;
        }
        if self.lies.loses_rest {
            return true;
        }
        if self.lies.tears.take_if(|page| *page == offset).is_some() {
            self.cut_at = Some(self.engine.turns() + 1);
        }
        let page = offset.wrapping_sub(BLOCK_BYTES as u64);
        let is_copy = self.is_of_map(page);
        if self.lies.is_sought && !is_copy {
            return false;
        }
        let Some(skip) = &mut self.lies.skip else {
            return false;
        };
        if let Some(left) = skip.checked_sub(1) {
            *skip = left;
            return false;
        }
        self.lies.skip = None;
        self.lies.told = true;
        self.lies.is_news = true;
        self.lies.loses_rest =
            self.is_planted(Plant::AnsweredBeforeCopies) && self.is_of_map(offset);
        if is_copy && (self.lies.is_sought || self.lies.random.bool()) {
            self.lies.tears = Some(page);
            self.cut_at = None;
        } else {
            self.cut_at = Some(self.engine.turns() + self.lies.random.u64(1..CUT_WITHIN));
        }
        self.coverage.lost_map_writes += 1;
        self.engine.note("lost write", [offset, 0, 0, 0]);
        true
    }

    /// The map is not what the superblock knows.
    pub(super) fn refused_for_lost_write(&mut self, error: &FormatError) -> Result<(), Violation> {
        if !self.lies.told {
            return Err(Violation::new("open-refused", error.to_string()));
        }
        self.coverage.lost_map_writes_noticed += 1;
        self.lies.is_refused = true;
        Ok(())
    }

    /// The local store opens.
    pub(super) fn has_survived_lie(&mut self) {
        self.lies.loses_rest = false;
        self.lies.tears = None;
        if std::mem::take(&mut self.lies.is_news) {
            self.coverage.lost_map_writes_survived += 1;
        }
    }
}
