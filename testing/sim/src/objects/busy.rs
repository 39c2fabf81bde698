//! Clients that keep the store busier than it can be: they do not wait for answers before they ask for
//! more. Whatever they ask for, a write of a part of a block and the flush after it end within a bounded
//! number of gets.

use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::BLOCK_SECTORS;
use hdcs_core::objects::format::SLOT_BYTES;
use hdcs_core::objects::io::Kind;

use super::model::Model;
use super::plant::Plant;
use super::world::{Look, ObjectsWorld, Op};
use crate::content::Content;
use crate::engine::Simulated;
use crate::violation::Violation;

/// Parts of blocks that are written before each flush.
const PARTS: u64 = 4;
/// Gets that may begin for each of them: its own, those of reads and copies that have their share
/// meanwhile, and as many for the lengths of frames.
const GETS_PER_PART: u64 = 16;
const ROUNDS: u32 = 4;

impl ObjectsWorld {
    /// Write parts of blocks and flush, beside more reads than there may be gets.
    pub(super) fn beside_readers(&mut self, owner: usize) -> Result<(), Violation> {
        for _ in 0..ROUNDS {
            self.ask_for_more(owner);
            self.poll(owner)?;
            let sectors = self.owners[owner].model.as_ref().map_or(1, Model::sectors);
            for _ in 0..PARTS {
                let sector = self.random.u64(0..sectors);
                self.next_write += 1;
                let content = Content::Write(self.next_write);
                self.send_write(owner, SectorRange::new(sector, 1), content);
            }
            self.poll(owner)?;
            let gets = |world: &Self| world.machine(owner).map_or(0, |m| m.stats().gets);
            let in_flight_max = self.scenario.gets as u64;
            let limit = gets(self) + 4 * in_flight_max + PARTS * GETS_PER_PART;
            self.send_flush(owner);
            self.poll(owner)?;
            let waits = |world: &Self| {
                let mut ops = world.owners[owner].ops.values();
                ops.any(|(_, op)| !matches!(op, Op::Read(..)))
            };
            while waits(self) {
                if gets(self) > limit {
                    let message = "reads have every get, and a flush waits for its own";
                    return Err(Violation::new("starved", message));
                }
                self.ask_for_more(owner);
                if self.go_on()?.is_none() {
                    return Err(self.stalled("nothing happens"));
                }
            }
            self.coverage.flushes_beside_readers += 1;
        }
        self.settle(owner)?;
        self.calm = true;
        Ok(())
    }

    /// Have more reads wait than there may be gets.
    fn ask_for_more(&mut self, owner: usize) {
        let reads = |world: &Self| {
            let ops = world.owners[owner].ops.values();
            ops.filter(|(_, op)| matches!(op, Op::Read(..))).count()
        };
        while reads(self) < self.scenario.gets * 2 + 8 {
            let before = reads(self);
            let range = self.draw_range(owner);
            // Not so long that there is no memory for all of them.
            let count = range.count.min(8 * BLOCK_SECTORS);
            self.send_read(owner, SectorRange::new(range.start, count));
            if reads(self) == before {
                return;
            }
        }
    }

    /// Planted bugs: what a get brings for a write of a part of a block, or a page of the map, waits while more reads
    /// wait than there are gets.
    pub(super) fn is_passed(&self, owner: usize, look: &Look) -> bool {
        let (is_page, buf) = match look {
            Look::Get { kind, buf, .. } => (*kind == Kind::Map, buf),
            Look::GetFrames { buf, .. } => (false, buf),
            Look::List { .. } => return false,
        };
        let is_planted = match self.plant {
            Some(Plant::FillsLast) => buf.len() == SLOT_BYTES,
            Some(Plant::PagesLast) => is_page,
            _ => false,
        };
        let ops = || self.owners[owner].ops.values();
        is_planted
            && ops().any(|(_, op)| matches!(op, Op::Write(..)))
            && ops().filter(|(_, op)| matches!(op, Op::Read(..))).count() > self.scenario.gets
    }
}
