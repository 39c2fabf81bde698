//! Whose get is next: gets of reads, fills of partly written blocks, copies and the storing of the map share the gets in
//! flight.
//!
//! While more than one kind waits, each gets a share of the gets that are begun, however many of the
//! others wait (start-time fair queueing: Goyal et al., SIGCOMM 1996). A kind that waits alone gets all of
//! them. The kind whose turn it is keeps it while there is no memory for its get, so that small gets do
//! not pass a large one for ever.
//!
//! Without that, clients that keep every get busy would starve the fills: a flush waits for its fills,
//! and destage for the flush.

/// What a get is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A client's read.
    Read,
    /// The rest of a block that was written in part: a flush waits for it.
    Fill,
    /// Blocks that are copied forward.
    Copy,
    /// Pages of the map that change: the tail waits for them, and in the end writes do.
    Map,
}

const KINDS: usize = 4;
/// What one get costs its kind: of nine gets, four are for reads, two for fills, two for the map, one is for a copy.
const COST: [u64; KINDS] = [1, 2, 4, 2];

/// Who waits, and what each kind has had.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// When the next get of each kind begins, in units of cost.
    start: [u64; KINDS],
    waits: [bool; KINDS],
    /// When the last get began.
    now: u64,
}

impl Turns {
    fn start(&self, kind: Kind) -> u64 {
        // What it did not use while nothing of it waited is not made up for.
        self.start[kind as usize].max(self.now)
    }

    /// Whether the next get may be one of this kind.
    pub(super) fn is_next(&self, kind: Kind) -> bool {
        let key = |kind: Kind| (self.start(kind), kind as usize);
        [Kind::Read, Kind::Fill, Kind::Copy, Kind::Map]
            .into_iter()
            .filter(|&other| other != kind && self.waits[other as usize])
            .all(|other| key(kind) < key(other))
    }

    /// A get of this kind has begun.
    pub(super) fn begun(&mut self, kind: Kind) {
        self.now = self.start(kind);
        self.start[kind as usize] = self.now + COST[kind as usize];
    }

    /// Say whether gets of this kind wait; true if they did and no longer do, so that others may go on.
    #[must_use]
    pub(super) fn set_waits(&mut self, kind: Kind, waits: bool) -> bool {
        let index = kind as usize;
        if waits && !self.waits[index] {
            self.start[index] = self.start(kind);
        }
        core::mem::replace(&mut self.waits[index], waits) && !waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Kind; KINDS] = [Kind::Read, Kind::Fill, Kind::Copy, Kind::Map];

    /// Begin `count` gets; how many of them are of each kind.
    fn begin(turns: &mut Turns, count: usize) -> [usize; KINDS] {
        let mut begun = [0; KINDS];
        for _ in 0..count {
            let waiting = ALL.into_iter().filter(|&kind| turns.waits[kind as usize]);
            let next: alloc::vec::Vec<_> = waiting.filter(|&kind| turns.is_next(kind)).collect();
            assert_eq!(next.len(), 1, "one kind is next");
            turns.begun(next[0]);
            begun[next[0] as usize] += 1;
        }
        begun
    }

    #[test]
    fn turns_share_gets_among_who_waits() {
        let mut turns = Turns::default();
        assert!(ALL.into_iter().all(|kind| turns.is_next(kind)));
        let _ = turns.set_waits(Kind::Read, true);
        assert_eq!(begin(&mut turns, 1000), [1000, 0, 0, 0]);
        let _ = turns.set_waits(Kind::Fill, true);
        assert_eq!(begin(&mut turns, 3), [2, 1, 0, 0]);
        assert_eq!(begin(&mut turns, 300), [200, 100, 0, 0]);
        let _ = turns.set_waits(Kind::Copy, true);
        assert_eq!(begin(&mut turns, 700), [400, 200, 100, 0]);
        let _ = turns.set_waits(Kind::Map, true);
        assert_eq!(begin(&mut turns, 900), [400, 200, 100, 200]);
    }

    #[test]
    fn turns_owe_nothing_for_a_time_without_wishes() {
        let mut turns = Turns::default();
        let _ = turns.set_waits(Kind::Read, true);
        begin(&mut turns, 10_000);
        let _ = turns.set_waits(Kind::Fill, true);
        begin(&mut turns, 30);
        assert!(turns.set_waits(Kind::Fill, false));
        begin(&mut turns, 10_000);
        let _ = turns.set_waits(Kind::Fill, true);
        let [reads, fills, ..] = begin(&mut turns, 30);
        assert!((19..=21).contains(&reads), "{reads} reads, {fills} fills");
    }
}
