//! Bytes of a file against the parser of heat maps.
//!
//! Whatever it accepts covers the map's volume in order, encodes to the same bytes, and plans no more than it has.

use hdcs_core::cache::heat_map::{HEAT_BYTES_MAX, Heat, HeatHeader, HeatMap};
use hdcs_core::format::seal;

/// The bytes as they are, and again with the checksum put right.
pub fn heat(data: &[u8]) {
    parse(data);
    if data.len() >= size_of::<HeatHeader>() {
        let mut sealed = data.to_vec();
        seal(&mut sealed);
        parse(&sealed);
    }
}

fn parse(data: &[u8]) {
    let Ok(map) = HeatMap::parse(data) else {
        return;
    };
    assert!(data.len() <= HEAT_BYTES_MAX);
    assert_eq!(map.encode(), data);
    let mut at = 0;
    let mut cached = 0;
    for (first, end, heat) in map.runs() {
        assert!(first == at && first < end);
        at = end;
        cached += if heat == Heat::Cold { 0 } else { end - first };
    }
    assert_eq!(at, map.bytes());
    for (volume, room) in [
        (u64::MAX, u64::MAX),
        (at / 1024 * 512, at),
        (at, at / 3),
        (0, 0),
    ] {
        let plan = map.plan(volume, room);
        assert_eq!(plan.bytes + plan.beyond_bytes + plan.over_bytes, cached);
        let planned: u64 = plan.ranges.iter().map(|range| range.count * 512).sum();
        assert_eq!(planned, plan.bytes);
        assert!(plan.bytes <= room);
        let inside = |range: &hdcs_core::base::io::SectorRange| range.end() * 512 <= volume.min(at);
        assert!(plan.ranges.iter().all(inside));
    }
}
