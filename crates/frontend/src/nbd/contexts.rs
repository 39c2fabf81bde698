//! The metadata contexts of `BLOCK_STATUS` and how extents of the core look in them.
//!
//! * `base:allocation`: [`super::protocol::allocation`], as the NBD specification has it.
//! * `hdcs:cache`: [`super::protocol::cache`]: clean = 1, dirty = 2, cold = 4.

use hdcs_core::base::io::{Extent, ExtentKind, ExtentState, SectorRange};

use super::protocol::{allocation, cache};

/// One metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`.
    Allocation,
    /// `hdcs:cache`.
    Cache,
}

/// Every context, by id.
pub const CONTEXTS: [Context; 2] = [Context::Allocation, Context::Cache];

/// Extents in one reply at most, which is as many as a volume tells at once. A client asks on from
/// where a reply ends; the bound keeps a reply to 2 KiB, for which memory is set aside.
pub const EXTENTS_MAX: usize = 256;

impl Context {
    /// Its name in the handshake.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocation => "base:allocation",
            Self::Cache => "hdcs:cache",
        }
    }

    /// Its number in replies.
    pub const fn id(self) -> u32 {
        match self {
            Self::Allocation => 1,
            Self::Cache => 2,
        }
    }

    /// What to ask the volume for.
    pub const fn kind(self) -> ExtentKind {
        match self {
            Self::Allocation => ExtentKind::Allocation,
            Self::Cache => ExtentKind::Cache,
        }
    }

    /// The status flags of an extent in this state.
    pub const fn flags(self, state: ExtentState) -> u32 {
        match (self, state) {
            (Self::Allocation, ExtentState::Hole) => allocation::HOLE | allocation::ZERO,
            (Self::Allocation, ExtentState::Zero) => allocation::ZERO,
            (Self::Cache, ExtentState::Clean) => cache::CLEAN,
            (Self::Cache, ExtentState::Dirty) => cache::DIRTY,
            (Self::Cache, ExtentState::Cold) => cache::COLD,
            (Self::Allocation | Self::Cache, _) => 0,
        }
    }

    /// The payload of a reply chunk: the id, then length and flags of each run. Neighbours with
    /// the same flags become one; what lies outside `range` is cut off; `one` stops after the first.
    /// If nothing is known about the start of the range, the whole range has status 0, which is
    /// always a safe answer.
    pub fn describe(self, range: SectorRange, extents: &[Extent], one: bool) -> Vec<u8> {
        let extents_max = if one { 1 } else { EXTENTS_MAX };
        let mut runs: Vec<(u32, u32)> = Vec::with_capacity(extents.len().min(extents_max));
        let mut next = range.start;
        for extent in extents {
            let run = extent.range.intersect(range);
            if run.start != next || run.is_empty() {
                break;
            }
            let (bytes, flags) = (run.bytes() as u32, self.flags(extent.state));
            match runs.last_mut() {
                Some(last) if last.1 == flags => last.0 += bytes,
                _ => {
                    if runs.len() == extents_max {
                        break;
                    }
                    runs.push((bytes, flags));
                }
            }
            next = run.end();
        }
        if runs.is_empty() {
            runs.push((range.bytes() as u32, 0));
        }
        let mut payload = Vec::with_capacity(4 + 8 * runs.len());
        payload.extend_from_slice(&self.id().to_be_bytes());
        for (bytes, flags) in runs {
            payload.extend_from_slice(&bytes.to_be_bytes());
            payload.extend_from_slice(&flags.to_be_bytes());
        }
        payload
    }
}

/// A set of contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts(u8);

impl Contexts {
    /// All of them.
    pub const ALL: Self = Self(0b11);

    /// Add one.
    pub fn insert(&mut self, context: Context) {
        self.0 |= 1 << (context.id() - 1);
    }

    /// Those in the set, by id.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        CONTEXTS
            .into_iter()
            .filter(move |context| self.0 & 1 << (context.id() - 1) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, count: u64, state: ExtentState) -> Extent {
        Extent {
            range: SectorRange::new(start, count),
            state,
        }
    }

    fn runs(payload: &[u8]) -> Vec<(u32, u32)> {
        let field = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        payload[4..]
            .chunks(8)
            .map(|run| (field(&run[..4]), field(&run[4..])))
            .collect()
    }

    #[test]
    fn describe_merges_clips_and_stops_at_a_gap() {
        let extents = [
            extent(0, 8, ExtentState::Data),
            extent(8, 8, ExtentState::Dirty),
            extent(16, 8, ExtentState::Hole),
            extent(32, 8, ExtentState::Zero),
        ];
        let range = SectorRange::new(4, 100);
        let payload = Context::Allocation.describe(range, &extents, false);
        assert_eq!(payload[..4], 1u32.to_be_bytes());
        assert_eq!(runs(&payload), [(12 * 512, 0), (8 * 512, 3)]);
        let payload = Context::Allocation.describe(range, &extents, true);
        assert_eq!(runs(&payload), [(12 * 512, 0)]);
    }

    #[test]
    fn describe_bounds_the_reply_and_always_says_something() {
        let states = [ExtentState::Clean, ExtentState::Cold];
        let extents: Vec<_> = (0..5000)
            .map(|index| extent(index, 1, states[index as usize % 2]))
            .collect();
        let payload = Context::Cache.describe(SectorRange::new(0, 5000), &extents, false);
        assert_eq!(runs(&payload).len(), EXTENTS_MAX);
        assert_eq!(runs(&payload)[..2], [(512, 1), (512, 4)]);
        let payload = Context::Cache.describe(SectorRange::new(9, 3), &[], false);
        assert_eq!(runs(&payload), [(3 * 512, 0)]);
    }
}
