//! Lines that the SSD tier has compressed: some of them rot.
//!
//! Checker: a read that meets one of them drops it, so none of those that were met is used once all of a volume was
//! read. Not all are met: what was brought into DRAM meanwhile, as by reading ahead, is read there. What a read returns
//! is judged as always.

use std::collections::BTreeSet;

use hdcs_core::base::codec::Method;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{ScrubLine, Tier};

use super::{BlockKey, Event, Violation, World};

impl World {
    /// Whether compressed lines of this scenario rot in the end.
    pub fn packed_rots(&self) -> bool {
        self.scenario.packed_rots
    }

    /// From now on the SSD tier stores a volume's lines compressed.
    pub fn compress(&mut self, unit: usize) -> Result<(), Violation> {
        let config = &mut self.units[unit].config;
        config.compression = Some(Method::Lz4);
        config.promote_hits = 1;
        let config = config.clone();
        self.step_volume(unit, Event::Reconfigure(config))
    }

    /// Where each line of a volume lies on the cache's device, how long it is, and whether nothing of it is in DRAM.
    fn lines(&mut self, unit: usize) -> Vec<(u64, u64, bool)> {
        let number = self.units[unit].config.number;
        let Some(node) = &mut self.node else {
            return Vec::new();
        };
        let (mut lines, mut from) = (Vec::new(), 0);
        loop {
            match node.cache_mut().next_to_scrub([number; 2], from) {
                ScrubLine::Line { read, next } => {
                    let first = read.key.block();
                    let mut blocks = first..first + node.cache().line_blocks();
                    let is_alone = blocks.all(|block| {
                        node.look_at_cache_of(unit)
                            .probe(BlockKey::new(number, block))
                            != Tier::Dram
                    });
                    lines.push((read.offset, read.bytes as u64, is_alone));
                    node.cache_mut().cancel_ssd_read(read);
                    from = next;
                }
                ScrubLine::Further(next) => from = next,
                ScrubLine::End => return lines,
            }
        }
    }

    /// Let compressed lines rot, a bit of every other one that DRAM has nothing of.
    pub fn rot_packed(&mut self) {
        // What is in the device's own cache does not rot.
        self.cache_disk.sync();
        let line_blocks = self
            .node
            .as_ref()
            .map_or(0, |node| node.cache().line_blocks());
        let line_bytes = line_blocks * BLOCK_BYTES as u64;
        let lines: BTreeSet<_> = (0..self.units())
            .flat_map(|unit| self.lines(unit))
            .filter(|&(_, bytes, is_alone)| bytes < line_bytes && is_alone)
            .collect();
        for (offset, bytes, _) in lines {
            let (at, bit) = (offset + self.random.u64(..bytes), self.random.u8(..8));
            if self.random.bool() && self.cache_disk.rot(at, bit) {
                self.rotten.insert(offset, false);
                self.engine
                    .note("line rots", [offset, bytes, at - offset, u64::from(bit)]);
            }
        }
    }

    /// A volume reads from an offset of the cache's device on.
    pub(super) fn note_rot_met(&mut self, offset: u64) {
        if let Some(is_met) = self.rotten.get_mut(&offset) {
            self.coverage.packed_rots += u64::from(!*is_met);
            *is_met = true;
        }
    }

    /// All of a volume was read since.
    pub fn check_packed(&mut self, unit: usize) -> Result<(), Violation> {
        let lines = self.lines(unit);
        // The place may have got another line meanwhile.
        let rotten = lines.into_iter().find(|&(offset, bytes, _)| {
            self.rotten.get(&offset) == Some(&true) && self.cache_disk.rots_within(offset, bytes)
        });
        match rotten {
            None => Ok(()),
            Some((offset, bytes, _)) => Err(Violation::new(
                "rot-kept",
                format!(
                    "volume {unit} was read, and its line of {bytes} bytes at {offset} is rotten and still used"
                ),
            )),
        }
    }
}
