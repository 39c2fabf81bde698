//! Scenarios of volumes that have begun as one.

use super::{
    Behaviour, CACHE_BYTES_MIN, Content, Policy, Rng, SECTOR_BYTES, Scenario, SsdConfig, Stream,
    pick,
};

impl Scenario {
    /// A scenario of a seed in which the volumes are clones.
    pub fn draw_for_clones(seed: u64) -> Self {
        let mut scenario = Self::draw(seed);
        scenario.make_clones(&mut Stream::Clones.of(seed));
        scenario
    }

    /// Let there be two volumes that have begun as one; the second may be shorter or longer than that.
    pub(super) fn make_clones(&mut self, random: &mut Rng) {
        let first = self.volumes[0].clone();
        let origin = first.base.clone();
        let sectors = origin.len() as u64;
        if self.volumes.len() == 1 {
            let mut second = first;
            second.config.number = 2;
            second.config.uuid = [2; 16];
            second.behaviour = Behaviour::draw(random);
            self.volumes.push(second);
        }
        let second = &mut self.volumes[1];
        let sectors = match random.u8(..4) {
            0 => random.u64(sectors.div_ceil(2)..=sectors).max(8),
            1 => sectors + random.u64(1..200),
            _ => sectors,
        };
        second.base.clone_from(&origin);
        second.base.resize(sectors as usize, Content::Zero);
        second.config.bytes = sectors * SECTOR_BYTES as u64;
        self.origin = Some(origin);
        // What they share shows where the cache has room for it and both use it.
        if random.u8(..4) > 0 {
            self.pool_bytes = 64 << 20;
            self.faults.cache_rot = false;
            let line_blocks = pick(random, &[2, 4]);
            self.cache.ssd.get_or_insert(SsdConfig {
                bytes: CACHE_BYTES_MIN,
                uuid: [7; 16],
                line_blocks,
            });
            for volume in &mut self.volumes {
                if volume.config.policy == Policy::PassThrough {
                    volume.config.policy = Policy::WriteBack;
                }
            }
        }
    }
}
