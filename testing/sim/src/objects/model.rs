//! What every sector of the volume may hold, now and at each flush.
//!
//! A completed write leaves one possibility, one under way or failed adds one. A flush that is sent
//! makes a *boundary*: what the sectors may hold in a state that is committed for its sake. After
//! an owner is gone, what is in the bucket must be one of the boundaries since the last flush that
//! was acknowledged.

use std::collections::BTreeMap;

use hdcs_core::base::io::SectorRange;

use crate::content::Content;
use crate::violation::Violation;

/// What a sector may hold: seldom more than one or two things.
type Possible = Vec<Content>;

/// A state that may be committed.
#[derive(Clone, Debug)]
struct Boundary {
    sectors: Vec<Possible>,
}

impl Boundary {
    /// Whether it may be these contents.
    fn admits(&self, contents: &[Content]) -> bool {
        let mut sectors = self.sectors.iter().zip(contents);
        self.sectors.len() == contents.len() && sectors.all(|(p, found)| p.contains(found))
    }
}

/// The history of one volume under one owner.
#[derive(Clone, Debug)]
pub struct Model {
    sectors: Vec<Possible>,
    /// Everything that was ever sent for each sector, so that a read knows what happened meanwhile.
    history: Vec<Vec<Content>>,
    boundaries: BTreeMap<u64, Boundary>,
    next_boundary: u64,
    /// The oldest boundary that may be in the bucket.
    acknowledged: u64,
    /// Of a volume that was left behind: what the next owner found, and the newest flush that is.
    left_with: Option<(u64, Vec<Content>)>,
}

/// What was possible when a read was sent.
#[derive(Clone, Debug)]
pub struct Before {
    sectors: Vec<(Possible, usize)>,
}

impl Model {
    /// A volume that holds this.
    pub fn new(contents: &[Content]) -> Self {
        let sectors: Vec<Possible> = contents.iter().map(|&content| vec![content]).collect();
        let first = Boundary {
            sectors: sectors.clone(),
        };
        Self {
            history: vec![Vec::new(); sectors.len()],
            sectors,
            boundaries: BTreeMap::from([(0, first)]),
            next_boundary: 1,
            acknowledged: 0,
            left_with: None,
        }
    }

    /// Sectors of the volume.
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    fn range(range: SectorRange) -> std::ops::Range<usize> {
        range.start as usize..range.end() as usize
    }

    /// A write of `content` is sent.
    pub fn write_sent(&mut self, range: SectorRange, content: Content) {
        for sector in Self::range(range) {
            if !self.sectors[sector].contains(&content) {
                self.sectors[sector].push(content);
            }
            self.history[sector].push(content);
        }
    }

    /// It has ended well.
    pub fn write_done(&mut self, range: SectorRange, content: Content) {
        for sector in Self::range(range) {
            self.sectors[sector] = vec![content];
        }
    }

    /// A read is sent.
    pub fn read_sent(&self, range: SectorRange) -> Before {
        let sectors = Self::range(range)
            .map(|sector| (self.sectors[sector].clone(), self.history[sector].len()))
            .collect();
        Before { sectors }
    }

    /// It has brought `bytes`.
    pub fn read_done(
        &self,
        volume: u32,
        range: SectorRange,
        before: &Before,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let sectors = Self::range(range).zip(&before.sectors);
        for ((sector, (possible, sent)), bytes) in sectors.zip(bytes.chunks(512)) {
            let Some(found) = Content::decode(volume, sector as u64, bytes) else {
                let message = format!("sector {sector} was read as nobody wrote it");
                return Err(Violation::new("read-foreign", message));
            };
            let meanwhile = &self.history[sector][*sent..];
            if !possible.contains(&found) && !meanwhile.contains(&found) {
                let message = format!(
                    "sector {sector} was read as {found:?}; it was {possible:?}, then {meanwhile:?}"
                );
                return Err(Violation::new("read-stale", message));
            }
        }
        Ok(())
    }

    /// A flush is sent; returns its boundary.
    pub fn flush_sent(&mut self) -> u64 {
        let boundary = Boundary {
            sectors: self.sectors.clone(),
        };
        self.boundaries.insert(self.next_boundary, boundary);
        self.next_boundary += 1;
        self.next_boundary - 1
    }

    /// It has ended well: from now on the bucket holds that, or a later one.
    pub fn flush_done(&mut self, boundary: u64) -> Result<(), Violation> {
        if let Some((newest, found)) = &self.left_with {
            // One of before may be told late; with nothing new to be committed a later one is true.
            if boundary > *newest && !self.boundaries[&boundary].admits(found) {
                let message = format!("flush {boundary} is not in what the next owner found");
                return Err(Violation::new("fenced-commit", message));
            }
            return Ok(());
        }
        self.acknowledged = self.acknowledged.max(boundary);
        self.boundaries = self.boundaries.split_off(&self.acknowledged);
        Ok(())
    }

    /// The newest boundary that `contents` may be.
    pub fn boundary_of(&self, contents: &[Content]) -> Result<u64, Violation> {
        let mut why = String::new();
        let mut newest = None;
        for (&number, boundary) in &self.boundaries {
            let mut sectors = boundary.sectors.iter().zip(contents);
            if boundary.sectors.len() != contents.len() {
                why = format!("flush {number}: {} sectors", boundary.sectors.len());
            } else if let Some(sector) =
                sectors.position(|(possible, found)| !possible.contains(found))
            {
                why = format!(
                    "flush {number}: sector {sector} is {:?}, not one of {:?}",
                    contents[sector], boundary.sectors[sector]
                );
            } else {
                newest = Some(number);
            }
        }
        newest.ok_or_else(|| {
            let message = format!(
                "the bucket holds no state since flush {}; {why}",
                self.acknowledged
            );
            Violation::new("not-a-boundary", message)
        })
    }

    /// The next owner begins with `contents`.
    pub fn left_with(&mut self, contents: &[Content]) -> Result<(), Violation> {
        self.left_with = Some((self.boundary_of(contents)?, contents.to_vec()));
        Ok(())
    }

    /// Whether a sector may hold zeroes.
    pub fn may_be_zero(&self, sector: u64) -> bool {
        self.sectors[sector as usize].contains(&Content::Zero)
    }

    /// The volume has another size from now on, and nothing is under way.
    pub fn resized(&mut self, sectors: u64) {
        self.sectors.resize(sectors as usize, vec![Content::Zero]);
        self.history.resize(sectors as usize, Vec::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Content = Content::Write(1);
    const B: Content = Content::Write(2);
    const ONE: SectorRange = SectorRange::new(0, 1);

    fn model() -> Model {
        Model::new(&[Content::Zero; 2])
    }

    fn read(model: &Model, before: &Before, content: Content) -> Result<(), Violation> {
        let mut bytes = [0; 512];
        content.fill(1, 0, &mut bytes);
        model.read_done(1, ONE, before, &bytes)
    }

    #[test]
    fn model_takes_old_or_new_while_a_write_is_under_way() {
        let mut model = model();
        model.write_sent(ONE, A);
        let before = model.read_sent(ONE);
        assert!(read(&model, &before, A).is_ok());
        assert!(read(&model, &before, Content::Zero).is_ok());
        assert!(read(&model, &before, B).is_err());
        model.write_done(ONE, A);
        let before = model.read_sent(ONE);
        assert!(read(&model, &before, Content::Zero).is_err());
        model.write_sent(ONE, B);
        assert!(read(&model, &before, B).is_ok(), "written meanwhile");
    }

    #[test]
    fn model_knows_the_boundaries_since_the_last_acknowledged_flush() {
        let mut model = model();
        model.write_sent(ONE, A);
        model.write_done(ONE, A);
        let first = model.flush_sent();
        model.flush_done(first).unwrap();
        model.write_sent(ONE, B);
        model.write_done(ONE, B);
        let with = |content| [content, Content::Zero];
        assert!(model.clone().left_with(&with(A)).is_ok());
        assert!(
            model.clone().left_with(&with(B)).is_err(),
            "no flush after it"
        );
        assert!(
            model.clone().left_with(&with(Content::Zero)).is_err(),
            "too old"
        );
        let second = model.flush_sent();
        assert!(model.clone().left_with(&with(B)).is_ok());
        model.left_with(&with(A)).unwrap();
        let error = model.flush_done(second).unwrap_err();
        assert_eq!(error.rule, "fenced-commit");
        assert!(model.flush_done(first).is_ok());
    }
}
