//! Pins: ranges of a volume that stay in the SSD tier, recorded in its catalogue entry; and warm-ups, which
//! are not.

use hdcs_api::{ApiError, ErrorKind, Volume, VolumeRange};
use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_frontend::VolumeNumber;

use super::{COMMAND_TIME_MAX, Node, invalid};
use crate::catalogue::{Entry, PinnedRange};
use crate::control::link::Link;
use crate::shard::command::Command;

/// Ranges of one volume that are pinned apart, at most.
const PINS_MAX: usize = 64;

/// The sectors of pinned ranges.
pub(super) fn sectors(pins: &[PinnedRange]) -> Vec<SectorRange> {
    let sector = SECTOR_BYTES as u64;
    let range = |pin: &PinnedRange| SectorRange::new(pin.offset / sector, pin.bytes / sector);
    pins.iter().map(range).collect()
}

/// Ranges in order, those that touch made one.
fn merged(mut pins: Vec<PinnedRange>) -> Vec<PinnedRange> {
    pins.sort_unstable_by_key(|pin| pin.offset);
    pins.dedup_by(|next, before| {
        let end = before.offset + before.bytes;
        let touches = next.offset <= end;
        if touches {
            before.bytes = end.max(next.offset + next.bytes) - before.offset;
        }
        touches
    });
    pins
}

/// What is left of pinned ranges without one range.
pub(super) fn without(pins: &[PinnedRange], offset: u64, end: u64) -> Vec<PinnedRange> {
    let parts = pins.iter().flat_map(|pin| {
        let pin_end = pin.offset + pin.bytes;
        [
            (pin.offset, pin_end.min(offset)),
            (pin.offset.max(end), pin_end),
        ]
    });
    parts
        .filter(|(first, end)| first < end)
        .map(|(offset, end)| PinnedRange {
            offset,
            bytes: end - offset,
        })
        .collect()
}

/// Tell the shard what an entry has pinned.
pub(super) async fn apply(entry: &Entry, link: &Link) -> Result<(), ApiError> {
    let (number, ranges) = (VolumeNumber(entry.number), sectors(&entry.pins));
    link.command(entry.name.as_str(), "pinning", COMMAND_TIME_MAX, |answer| {
        Command::Pin(number, ranges, answer)
    })
    .await
}

impl Node {
    /// Pin a range, beside what is pinned, or unpin one. Filling goes on by itself then.
    pub async fn pin(
        &self,
        name: &str,
        range: VolumeRange,
        is_pinned: bool,
    ) -> Result<Volume, ApiError> {
        let _busy = self
            .volumes
            .begin(name, if is_pinned { "pinned" } else { "unpinned" })?;
        let mut entry = self.volumes.entry(name)?;
        let pin = checked(name, &entry, &range)?;
        let policy = self.setup.settings_of(&entry.settings)?.policy;
        if is_pinned && policy == hdcs_core::volume::Policy::PassThrough {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: its policy is pass-through, which leaves the cache out, so nothing would \
                     be kept: set another policy first"
                ),
            ));
        }
        let before = entry.pins.clone();
        entry.pins = if is_pinned {
            merged(before.iter().copied().chain([pin]).collect())
        } else {
            without(&before, pin.offset, pin.offset + pin.bytes)
        };
        if entry.pins.len() > PINS_MAX {
            return Err(invalid(format!(
                "volume {name}: it would have {} pinned ranges, and {PINS_MAX} are the most: pin larger ones",
                entry.pins.len()
            )));
        }
        apply(&entry, &self.link).await?;
        if let Err(error) = self.catalogue.update(&entry).await {
            let unchanged = Entry {
                pins: before,
                ..entry
            };
            apply(&unchanged, &self.link).await?;
            return Err(error);
        }
        self.volumes.put(entry, None);
        self.volume(name).await
    }

    /// Bring a range into the SSD tier in the background; without one, give up what is left of that.
    pub async fn warm_up(
        &self,
        name: &str,
        range: Option<VolumeRange>,
    ) -> Result<Volume, ApiError> {
        let entry = self.volumes.entry(name)?;
        let range = range
            .map(|range| checked(name, &entry, &range))
            .transpose()?;
        let ranges = sectors(range.as_slice());
        let number = VolumeNumber(entry.number);
        self.link
            .command(name, "warming it up", COMMAND_TIME_MAX, |answer| {
                Command::WarmUp(number, ranges, answer)
            })
            .await?;
        self.volume(name).await
    }
}

/// The range that is meant, if it lies in the volume.
fn checked(name: &str, entry: &Entry, range: &VolumeRange) -> Result<PinnedRange, ApiError> {
    let left = entry.bytes.saturating_sub(range.offset);
    let (offset, bytes) = (range.offset, range.bytes.unwrap_or(left));
    let sector = SECTOR_BYTES as u64;
    let end = offset.checked_add(bytes);
    let is_aligned = offset.is_multiple_of(sector) && bytes.is_multiple_of(sector);
    if bytes == 0 || !is_aligned || end.is_none_or(|end| end > entry.bytes) {
        return Err(invalid(format!(
            "volume {name}: the range of {bytes} bytes at {offset} is empty, not a multiple of {sector}, or \
             beyond its {} bytes",
            entry.bytes
        )));
    }
    Ok(PinnedRange { offset, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pins(ranges: &[(u64, u64)]) -> Vec<PinnedRange> {
        let pin = |&(offset, end): &(u64, u64)| PinnedRange {
            offset,
            bytes: end - offset,
        };
        ranges.iter().map(pin).collect()
    }

    #[test]
    fn pins_that_touch_are_one() {
        let found = merged(pins(&[(50, 60), (0, 10), (10, 20), (55, 58), (15, 30)]));
        assert_eq!(found, pins(&[(0, 30), (50, 60)]));
    }

    #[test]
    fn unpinning_cuts_ranges() {
        let all = pins(&[(0, 30), (50, 60)]);
        assert_eq!(without(&all, 10, 20), pins(&[(0, 10), (20, 30), (50, 60)]));
        assert_eq!(without(&all, 20, 55), pins(&[(0, 20), (55, 60)]));
        assert_eq!(without(&all, 0, 100), pins(&[]));
        assert_eq!(without(&all, 30, 50), all);
    }
}
