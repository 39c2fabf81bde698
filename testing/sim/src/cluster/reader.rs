//! A second client, which only reads, and of openings that the first one has left for one of a higher epoch: those of
//! primaries that stand still, or are cut off and know of nothing. What they answer is checked by
//! [`super::check_leases`].

use std::collections::BTreeMap;

use fastrand::Rng;
use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{Reply, Request, RequestId, SectorRange};
use hdcs_core::volume::Event;

use super::check_leases::Floors;
use super::client::Peer;
use super::scenario::StandingClocks;
use super::shared::User;
use super::world::ClusterWorld;
use crate::violation::Violation;

/// Its requests have numbers from here on.
const FIRST_REQUEST: u64 = 1 << 62;
/// Its requests that wait at once, at most: one that stands still answers none.
const WAITING_MAX: usize = 16;
/// The longest read, in sectors.
const SECTORS_MAX: u64 = 256;

/// A read that waits.
#[derive(Debug)]
struct Waiting {
    peer: Peer,
    range: SectorRange,
    floors: Floors,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Reader {
    random: Rng,
    waiting: BTreeMap<u64, Waiting>,
    next: u64,
}

impl Reader {
    /// One that waits for nothing.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: Rng::with_seed(seed),
            waiting: BTreeMap::new(),
            next: FIRST_REQUEST,
        }
    }

    /// Whether a request is one of its own.
    pub(super) fn is_its(id: RequestId) -> bool {
        id.0 >= FIRST_REQUEST
    }

    /// An opening has gone with its connections.
    pub(super) fn leave(&mut self, user: User) {
        self.waiting
            .retain(|_, waiting| waiting.peer.epoch != user.epoch);
    }
}

/// Have an opening that the client has left read something, if there is one. It may stand still.
pub(super) fn read_of_old(world: &mut ClusterWorld) {
    if world.scenario.clocks == StandingClocks::MayStop || world.reader.waiting.len() >= WAITING_MAX
    {
        return;
    }
    let nodes = world.nodes.iter().enumerate();
    let old = nodes.filter_map(|(node, state)| {
        let standing = state.up.as_ref()?.standing.as_ref()?;
        let epoch = standing.user.epoch;
        let is_old = standing.is_open && world.client.has_left(epoch);
        is_old.then_some(Peer { node, epoch })
    });
    let old: Vec<Peer> = old.collect();
    if old.is_empty() {
        return;
    }
    let random = &mut world.reader.random;
    let peer = old[random.usize(..old.len())];
    let sectors = world.client.history.sectors();
    let newest = world.client.leases.newest().filter(|_| random.bool());
    let range = newest.unwrap_or_else(|| {
        let start = random.u64(..sectors);
        SectorRange::new(start, random.u64(1..=SECTORS_MAX).min(sectors - start))
    });
    let floors = world.client.leases.floors(peer.epoch, range);
    let id = world.reader.next;
    world.reader.next += 1;
    let waiting = Waiting {
        peer,
        range,
        floors,
    };
    world.reader.waiting.insert(id, waiting);
    world.coverage.old_reads += 1;
    let standing = world.standing(peer.node).expect("it was found there");
    standing.events.push_back(Event::Request {
        id: RequestId(id),
        request: Request::Read { range },
    });
    world.touched.insert(peer.node);
}

/// An opening has answered it. Errors are right: it may have lost its backend, or be fenced.
pub(super) fn old_answered(
    world: &mut ClusterWorld,
    id: RequestId,
    result: Result<Reply, RequestError>,
) -> Result<(), Violation> {
    let Some(waiting) = world.reader.waiting.remove(&id.0) else {
        let message = format!("read {} of an old opening was answered twice", id.0);
        return Err(Violation::new("reply-unexpected", message));
    };
    let Ok(Reply::Data(data)) = result else {
        return Ok(());
    };
    let (epoch, first) = (waiting.peer.epoch, waiting.range.start);
    (world.client.leases).check(epoch, first, &waiting.floors, &data)
}
