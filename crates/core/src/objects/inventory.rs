//! The objects of the volume that are known to be in the store, or on their way there.

use alloc::collections::BTreeSet;

use super::data::DataObjects;
use super::format::{Manifest, MapEntry};
use super::maps::MapObjects;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    pub(super) data: DataObjects,
    pub(super) maps: MapObjects,
    /// Usage tables.
    usages: BTreeSet<u64>,
    /// Objects of the map and usage tables that nothing but a snapshot or a clone may need.
    dropped: BTreeSet<u64>,
}

impl Inventory {
    /// A usage table is there, or on its way.
    pub(super) fn insert_usage(&mut self, number: u64) {
        self.usages.insert(number);
    }

    /// Whether an object of the map or a usage table has this number.
    pub(super) fn knows_map(&self, number: u64) -> bool {
        self.maps.contains(number) || self.usages.contains(&number)
    }

    /// An object of the map, or a usage table, is not needed for the present state.
    pub(super) fn drop_map(&mut self, number: u64) {
        self.dropped.insert(number);
    }

    /// A manifest names other objects of the map than the one before.
    pub(super) fn adopt(&mut self, manifest: &Manifest) {
        let named = |maps: &[MapEntry]| maps.iter().map(|map| map.number).collect();
        let maps: BTreeSet<u64> = named(&manifest.maps);
        let usages: BTreeSet<u64> = named(&manifest.usages);
        let gone = self.maps.forget_dead(|number| maps.contains(&number));
        self.dropped.extend(gone);
        let gone = self
            .usages
            .extract_if(.., |number| !usages.contains(number));
        self.dropped.extend(gone);
    }

    /// Objects of the map and usage tables, from a number on, that are not needed: they are forgotten.
    pub(super) fn take_dropped(&mut self, first: u64) -> BTreeSet<u64> {
        self.dropped.split_off(&first)
    }

    /// Approximate memory in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.maps.memory_bytes() + self.data.memory_bytes()
    }
}
