//! Who of the clients holds how much memory, and who may hold more.

use hdcs_core::base::limits::{
    CONNECTION_DATA_BYTES_MAX, CONNECTION_DATA_BYTES_MIN, CONNECTION_HEAP_BYTES_MAX,
    CONNECTION_HEAP_BYTES_MIN, CONNECTION_SHARE, VOLUME_SHARE,
};
use hdcs_core::node::shares::Shares;
use hdcs_frontend::{Allowance, Held};

/// See the module.
pub struct ClientShares {
    /// Of the buffers.
    data: Shares,
    /// Of the memory for connections.
    heap: Shares,
}

impl ClientShares {
    /// So many bytes of buffers for all clients, and of memory for connections.
    pub fn new(data_bytes: u64, heap_bytes: u64) -> Self {
        Self {
            data: Shares::new(data_bytes),
            heap: Shares::new(heap_bytes),
        }
    }

    /// The memory for connections.
    pub fn heap(&self) -> &Shares {
        &self.heap
    }

    /// What the session of a connection may hold and submit, that is known to hold `counted`, of which `queued` waits in
    /// its socket, and that has `work` left in this turn. The clients of its volume hold `of_volume` bytes of data.
    pub fn allowance(&self, of_volume: u64, counted: Held, queued: Held, work: usize) -> Allowance {
        let (data, heap) = (counted.data_bytes as u64, counted.heap_bytes as u64);
        // Its part of what its volume may have leaves something for the volume's other clients.
        let mut volume = Shares::new(self.data.most(of_volume, VOLUME_SHARE));
        volume.update(0, of_volume);
        let data = volume.most(data, CONNECTION_SHARE) as usize;
        let data = data.max(CONNECTION_DATA_BYTES_MIN);
        let heap = self.heap.most(heap, CONNECTION_SHARE) as usize;
        Allowance {
            held: Held {
                data_bytes: data
                    .min(CONNECTION_DATA_BYTES_MAX)
                    .saturating_sub(queued.data_bytes),
                heap_bytes: heap
                    .min(CONNECTION_HEAP_BYTES_MAX)
                    .saturating_sub(queued.heap_bytes),
            },
            work,
        }
    }

    /// Who held `before` holds `after`.
    pub fn update(&mut self, before: Held, after: Held) {
        self.data
            .update(before.data_bytes as u64, after.data_bytes as u64);
        self.heap
            .update(before.heap_bytes as u64, after.heap_bytes as u64);
    }

    /// Whether there is memory for one more connection. A quarter is for local ones alone: whoever reaches the node
    /// over a network must not lock out those who work on it.
    pub fn has_room_for_connection(&self, is_local: bool) -> bool {
        let reserve = if is_local { 0 } else { self.reserve() };
        self.heap.left() >= CONNECTION_HEAP_BYTES_MIN as u64 + reserve
    }

    /// For how many more connections from anywhere there is memory, if each has the least.
    pub fn connections_left(&self) -> usize {
        let left = self.heap.left().saturating_sub(self.reserve());
        left as usize / CONNECTION_HEAP_BYTES_MIN
    }

    fn reserve(&self) -> u64 {
        self.heap.total() / 4
    }
}

/// What is counted of a connection that holds this: so much is kept for one that holds anything.
pub fn as_counted(held: Held) -> Held {
    let least = if held == Held::default() {
        0
    } else {
        CONNECTION_HEAP_BYTES_MIN
    };
    Held {
        heap_bytes: held.heap_bytes.max(least),
        ..held
    }
}
