//! What the tests of the tier's machines need beside them.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use super::device::Device;
use super::journal::Journal;
use super::segments::Stream;
use super::store::{Content, NewLine, Store, line_checksums};
use crate::base::buf::Pool;
use crate::base::io::{BlockKey, Nanos};
use crate::base::limits::BLOCK_BYTES;
use crate::cache::SsdConfig;
use crate::cache::index::Line;
use crate::cache::journal::Layout;

pub const CONFIG: SsdConfig = SsdConfig {
    bytes: 64 << 20,
    uuid: [7; 16],
    line_blocks: 4,
};

pub fn pool() -> Arc<Pool> {
    Pool::new(32 << 20)
}

pub fn layout() -> Layout {
    Layout::new(CONFIG.bytes, CONFIG.line_blocks).unwrap()
}

/// An empty store that takes lines.
pub fn store() -> Store {
    let mut store = Store::new(layout(), pool());
    store.clear();
    store.segments.begin(1);
    store
}

pub fn journal() -> Journal {
    Journal::new(CONFIG, layout())
}

pub fn device() -> Device {
    Device::new(pool(), Nanos(1_000), Nanos(0))
}

pub fn content() -> Content {
    journal().content()
}

/// A line of volume 1, as it is filled: no other number has the same bytes.
pub fn line(number: u64) -> Vec<u8> {
    let mut data = vec![0; CONFIG.line_blocks * BLOCK_BYTES];
    data[..8].copy_from_slice(&number.to_le_bytes());
    data
}

/// The address of that line.
pub fn key(number: u64) -> u64 {
    BlockKey::new(1, number * CONFIG.line_blocks as u64).0
}

/// Put a line into a stream.
pub fn append(store: &mut Store, stream: Stream, number: u64) -> Line {
    let data = line(number);
    let (sums, blocks) = line_checksums(&data);
    let new = NewLine {
        key: key(number),
        data: &data,
        checksums: &sums[..blocks],
        shareable: true,
    };
    store.append(stream, new, content()).unwrap()
}

/// Fill a segment of a stream with the lines from a number on, and have it on the medium. Returns the segment.
pub fn seal_segment(store: &mut Store, stream: Stream, first: u64) -> usize {
    let lines = store.layout.plain_lines as u64;
    let last = (first..first + lines).map(|number| append(store, stream, number));
    let segment = last
        .last()
        .map(|line| store.index.segment_of(line))
        .unwrap();
    assert!(store.segment_written(segment, true).is_none());
    segment
}
