//! What a volume may hold after a crash.
//!
//! Every write carries a number that only grows, and every sector of it a stamp of that number,
//! its own address and a filling derived from both. On one connection the volume takes writes in
//! the order of their numbers, so after a crash it has to hold a *prefix*: the writes up to some
//! number and none after it. The prefix reaches at least to the *floor*, the last write that was
//! promised to be durable.
//!
//! 1. A sector is never torn, foreign, or older or newer than the prefix says.
//! 2. What was lost in one crash does not come back after another.

use std::fmt;

/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 512;
/// First bytes of a stamped sector.
const MAGIC: [u8; 8] = *b"HDCSTAMP";

/// Number of a write; 0 stands for zeroes.
pub type Number = u64;

/// What one sector holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The write of this number, or zeroes for 0.
    Of(Number),
    /// Nothing that was ever written there.
    Foreign,
}

/// One change, in order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its number.
    pub number: Number,
    /// First sector.
    pub start: u32,
    /// Sectors.
    pub sectors: u32,
    /// Whether it leaves zeroes.
    pub zeroes: bool,
}

/// Fill a sector with the stamp of a write.
pub fn stamp(run: u64, number: Number, sector: u64, out: &mut [u8]) {
    out[..8].copy_from_slice(&MAGIC);
    out[8..16].copy_from_slice(&run.to_le_bytes());
    out[16..24].copy_from_slice(&number.to_le_bytes());
    out[24..32].copy_from_slice(&sector.to_le_bytes());
    let mut state = (run ^ number.rotate_left(24) ^ sector.rotate_left(48)) | 1;
    for word in out[32..SECTOR_BYTES].chunks_exact_mut(8) {
        // xorshift64: cheap, and no two sectors look alike.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// What a sector that was read holds.
pub fn content(run: u64, sector: u64, bytes: &[u8]) -> Content {
    if bytes[..8] != MAGIC {
        return if bytes.iter().all(|byte| *byte == 0) {
            Content::Of(0)
        } else {
            Content::Foreign
        };
    }
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[16..24]);
    let number = Number::from_le_bytes(number);
    let mut expected = [0; SECTOR_BYTES];
    stamp(run, number, sector, &mut expected);
    if number != 0 && bytes == expected {
        Content::Of(number)
    } else {
        Content::Foreign
    }
}

/// The volume as it was last known, and as it may be now.
#[derive(Clone, Debug)]
pub struct Model {
    /// What each sector held when it was last verified.
    base: Vec<Number>,
}

/// A volume that is not what it may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The durable floor.
    pub floor: Number,
    /// The prefix beyond the floor that comes nearest.
    pub nearest: Number,
    /// Sectors that differ from it.
    pub wrong_sectors: usize,
    /// The first of them: sector, what it should hold, what it holds.
    pub examples: Vec<(usize, Number, Content)>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no prefix at or beyond write {} explains the volume; nearest is {}, which leaves {} sectors:",
            self.floor, self.nearest, self.wrong_sectors
        )?;
        for (sector, expected, found) in &self.examples {
            let what = match found {
                Content::Of(0) => "zeroes".into(),
                Content::Of(number) if number < expected => format!("the older write {number}"),
                Content::Of(number) => format!("the newer write {number}"),
                Content::Foreign => "torn or foreign bytes".into(),
            };
            write!(
                f,
                "\n  sector {sector}: should hold write {expected}, holds {what}"
            )?;
        }
        Ok(())
    }
}

impl Model {
    /// A volume of zeroes.
    pub fn new(sectors: usize) -> Self {
        Self {
            base: vec![0; sectors],
        }
    }

    /// Sectors of the volume.
    pub fn sectors(&self) -> usize {
        self.base.len()
    }

    /// Find the prefix of `changes` that the volume holds, at least up to `floor`, and take it as
    /// the state from now on. Returns the number of its last write (0: none of them).
    pub fn verify(
        &mut self,
        changes: &[Change],
        floor: Number,
        found: &[Content],
    ) -> Result<Number, Violation> {
        let mut expected = self.base.clone();
        let differs =
            |expected: &[Number], sector: usize| Content::Of(expected[sector]) != found[sector];
        let mut wrong = (0..expected.len())
            .filter(|sector| differs(&expected, *sector))
            .count();
        // The longest prefix counts: what is explained by both holds in both.
        let mut held = (wrong == 0 && floor == 0).then_some(0);
        let mut nearest = (usize::MAX, 0);
        if floor == 0 {
            nearest = (wrong, 0);
        }
        for change in changes {
            for sector in change.start as usize..(change.start + change.sectors) as usize {
                wrong -= usize::from(differs(&expected, sector));
                expected[sector] = if change.zeroes { 0 } else { change.number };
                wrong += usize::from(differs(&expected, sector));
            }
            if change.number >= floor {
                if wrong == 0 {
                    held = Some(change.number);
                }
                nearest = nearest.min((wrong, change.number));
            }
        }
        let Some(held) = held else {
            return Err(self.violation(changes, floor, nearest.1, found));
        };
        self.apply(changes, held);
        Ok(held)
    }

    fn apply(&mut self, changes: &[Change], last: Number) {
        for change in changes.iter().filter(|change| change.number <= last) {
            let range = change.start as usize..(change.start + change.sectors) as usize;
            self.base[range].fill(if change.zeroes { 0 } else { change.number });
        }
    }

    fn violation(
        &self,
        changes: &[Change],
        floor: Number,
        nearest: Number,
        found: &[Content],
    ) -> Violation {
        let mut state = self.clone();
        state.apply(changes, nearest);
        let wrong: Vec<usize> = (0..found.len())
            .filter(|sector| Content::Of(state.base[*sector]) != found[*sector])
            .collect();
        let examples = wrong
            .iter()
            .take(8)
            .map(|sector| (*sector, state.base[*sector], found[*sector]))
            .collect();
        Violation {
            floor,
            nearest,
            wrong_sectors: wrong.len(),
            examples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(number: Number, start: u32, sectors: u32) -> Change {
        Change {
            number,
            start,
            sectors,
            zeroes: false,
        }
    }

    fn found(numbers: &[Number]) -> Vec<Content> {
        numbers.iter().map(|number| Content::Of(*number)).collect()
    }

    #[test]
    fn stamp_is_recognised_whole_only() {
        let mut sector = [0; SECTOR_BYTES];
        assert_eq!(content(7, 3, &sector), Content::Of(0));
        stamp(7, 42, 3, &mut sector);
        assert_eq!(content(7, 3, &sector), Content::Of(42));
        // Another place, another run, one bit.
        assert_eq!(content(7, 4, &sector), Content::Foreign);
        assert_eq!(content(8, 3, &sector), Content::Foreign);
        sector[511] ^= 1;
        assert_eq!(content(7, 3, &sector), Content::Foreign);
    }

    #[test]
    fn every_prefix_beyond_the_floor_is_taken() {
        let changes = [write(1, 0, 2), write(2, 1, 2), write(3, 0, 1)];
        let states = [[0, 0, 0], [1, 1, 0], [1, 2, 2], [3, 2, 2]];
        for floor in 0..=3 {
            for (last, state) in states.iter().enumerate() {
                let verdict = Model::new(3).verify(&changes, floor, &found(state));
                assert_eq!(
                    verdict.is_ok(),
                    last as u64 >= floor,
                    "floor {floor}, state {last}"
                );
            }
        }
    }

    #[test]
    fn hole_in_the_prefix_is_a_violation() {
        let changes = [write(1, 0, 1), write(2, 1, 1), write(3, 2, 1)];
        let violation = Model::new(3)
            .verify(&changes, 0, &found(&[1, 0, 3]))
            .unwrap_err();
        assert_eq!(violation.wrong_sectors, 1);
    }

    #[test]
    fn torn_write_is_a_violation() {
        let changes = [write(1, 0, 2)];
        assert!(Model::new(2).verify(&changes, 0, &found(&[1, 0])).is_err());
        assert!(
            Model::new(2)
                .verify(&changes, 0, &[Content::Of(1), Content::Foreign])
                .is_err()
        );
    }

    #[test]
    fn lost_write_may_not_come_back() {
        let mut model = Model::new(2);
        assert_eq!(
            model.verify(&[write(1, 0, 1), write(2, 1, 1)], 1, &found(&[1, 0])),
            Ok(1)
        );
        assert!(
            model
                .clone()
                .verify(&[write(3, 0, 1)], 0, &found(&[3, 2]))
                .is_err()
        );
        assert_eq!(model.verify(&[write(3, 0, 1)], 0, &found(&[3, 0])), Ok(3));
    }

    #[test]
    fn zeroes_are_a_change_like_another() {
        let zeroes = Change {
            number: 2,
            start: 0,
            sectors: 1,
            zeroes: true,
        };
        let mut model = Model::new(1);
        assert!(
            model
                .clone()
                .verify(&[write(1, 0, 1), zeroes], 2, &found(&[1]))
                .is_err()
        );
        assert_eq!(
            model.verify(&[write(1, 0, 1), zeroes], 1, &found(&[0])),
            Ok(2)
        );
    }
}
