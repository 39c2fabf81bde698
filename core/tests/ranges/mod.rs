//! What a step costs does not depend on the length of a range.

use hdcs_core::io::{Reply, Request, RequestId, SectorRange};
use hdcs_core::limits::STEP_WORK_MAX;
use hdcs_core::read_cache::SsdConfig;
use hdcs_core::volume::{Event, Persist};

use crate::world::{self, BYTES, World};

#[test]
fn promotion_passes_by_what_is_there_in_bounded_steps() {
    let ssd = SsdConfig {
        bytes: 32 << 20,
        uuid: [3; 16],
        line_blocks: 4,
    };
    let mut world = World::with(world::config(Persist::OnWrite), Some(ssd));
    for (index, bytes) in world.backend.chunks_exact_mut(4096).enumerate() {
        bytes.fill(index as u8);
        bytes[..8].copy_from_slice(&index.to_le_bytes());
    }
    let range = SectorRange::new(0, BYTES as u64 / 512);
    world.ask(Request::Promote { range });
    let reads = world.backend_reads.len();
    // Several at once share what may be looked at from one poll to the next.
    for id in 0..4 {
        let before = world.volume.work();
        let (id, request) = (RequestId(id), Request::Promote { range });
        world.step(Event::Request { id, request });
        assert!(world.volume.work() - before <= 3 * STEP_WORK_MAX as u64);
    }
    let mut steps = 0;
    while world.replies.len() < 4 {
        let before = world.volume.work();
        world.step(Event::Poll);
        assert!(world.volume.work() - before <= 3 * STEP_WORK_MAX as u64);
        steps += 1;
    }
    assert!(steps > 4, "{steps} steps for {} blocks", 4 * BYTES / 4096);
    let all_done = world
        .replies
        .drain(..)
        .all(|(_, result)| matches!(result, Ok(Reply::Done)));
    assert!(all_done && world.backend_reads.len() == reads);
}
