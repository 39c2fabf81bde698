//! Checker: what a clone says it has inherited is what it began with, however it has been written, cut
//! and stored since, and whoever opens it.

use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::BLOCK_SECTORS;
use hdcs_core::objects::Access;

use super::model::Model;
use super::plant::Plant;
use super::world::{CLONE_PLACE, ObjectsWorld};
use crate::content::Content;
use crate::violation::Violation;

impl ObjectsWorld {
    /// Let a clone go away from what it began as, little by little, and open it again and again. Its
    /// newest owner.
    pub(super) fn diverge(&mut self, clone: usize, origin: &[Content]) -> Result<usize, Violation> {
        let mut clone = clone;
        for round in 0..4 {
            self.check_inherited(clone, origin)?;
            for _ in 0..round * 2 {
                self.change(clone)?;
            }
            self.send_flush(clone);
            self.settle(clone)?;
            self.calm = true;
            self.kill(clone);
            let next = self.start(Access::Existing, None, CLONE_PLACE);
            clone = self.open(next)?.unwrap_or(next);
            self.calm = true;
        }
        Ok(clone)
    }

    /// Write or zero a little, or change the size.
    fn change(&mut self, clone: usize) -> Result<(), Violation> {
        let model = self.owners[clone].model.as_ref();
        let sectors = model.map_or(1, Model::sectors);
        if self.random.u8(0..6) == 0 {
            self.send_resize(clone);
            self.settle(clone)?;
            self.calm = true;
            return Ok(());
        }
        let is_wiped = self.random.u8(0..8) == 0;
        let start = self.random.u64(0..sectors);
        let range = if is_wiped {
            SectorRange::between(0, sectors)
        } else {
            SectorRange::between(start, sectors.min(start + self.random.u64(1..24)))
        };
        self.next_write += 1;
        let content = if is_wiped || self.random.bool() {
            Content::Zero
        } else {
            Content::Write(self.next_write)
        };
        self.send_write(clone, range, content);
        self.settle(clone)?;
        self.calm = true;
        Ok(())
    }

    /// A clone was opened, and asked for nothing yet.
    pub(super) fn check_inherited(
        &mut self,
        clone: usize,
        origin: &[Content],
    ) -> Result<(), Violation> {
        let contents = self.bucket(CLONE_PLACE)?;
        let blocks = contents.len() as u64 / BLOCK_SECTORS;
        let Some(machine) = self.machine(clone) else {
            return Ok(());
        };
        let runs = match self.plant {
            Some(Plant::GuessedLineage) => vec![(0, blocks)],
            _ => machine.inherited_runs(),
        };
        for (first, count) in runs {
            self.coverage.inherited_blocks += count;
            if first + count > blocks {
                let message = format!("{count} blocks from {first}, of {blocks} whole ones");
                return Err(Violation::new("inherited", message));
            }
            for sector in first * BLOCK_SECTORS..(first + count) * BLOCK_SECTORS {
                let began = origin.get(sector as usize).copied();
                let (began, is) = (began.unwrap_or(Content::Zero), contents[sector as usize]);
                if began != is {
                    let message = format!("sector {sector} began as {began:?} and is {is:?}");
                    return Err(Violation::new("inherited", message));
                }
            }
        }
        Ok(())
    }
}
