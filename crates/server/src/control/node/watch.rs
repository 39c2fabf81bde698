//! What is watched of volumes from one second to the next: the state of each, and how fast it destages.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use hdcs_api::Volume;
use hdcs_api::events::{Event, Outcome};

use super::lock;
use crate::control::node_report::NodeReport;
use crate::events::Events;

/// Destaged bytes at one moment, and the rate up to then.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    destaged_bytes: u64,
    bytes_per_s: u64,
}

/// What was seen when volumes were last looked at.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Their states, by name.
    states: Mutex<BTreeMap<String, String>>,
    /// Their samples, by number.
    samples: Mutex<BTreeMap<u32, Sample>>,
}

impl Watch {
    /// Note which of all volumes are in another state than when this was last looked at.
    pub fn note_states(&self, volumes: impl Iterator<Item = Volume>, events: &Events) {
        let mut states = lock(&self.states);
        let mut seen = std::mem::take(&mut *states);
        for volume in volumes {
            let before = seen.remove(&volume.name);
            states.insert(volume.name.clone(), volume.state.clone());
            let before = before.as_deref().unwrap_or("new");
            if before == volume.state || (before == "new" && volume.phase == "opening") {
                continue;
            }
            let event = Event::new("state", Outcome::Seen, "node")
                .of(volume.name)
                .what(format!("{before} → {}", volume.state));
            events.note(event.why(volume.reason.unwrap_or_default()));
        }
    }

    /// Take a sample of the destage rates.
    pub fn sample(&self, report: &NodeReport) {
        let now = Instant::now();
        let mut samples = lock(&self.samples);
        let mut fresh = BTreeMap::new();
        for volume in &report.volumes {
            let destaged_bytes = volume.stats.destaged_bytes;
            let before = samples.get(&volume.config.number);
            let bytes_per_s = before.map_or(0, |before| {
                let seconds = (now - before.at).as_secs_f64().max(0.001);
                (destaged_bytes.saturating_sub(before.destaged_bytes) as f64 / seconds) as u64
            });
            fresh.insert(
                volume.config.number,
                Sample {
                    at: now,
                    destaged_bytes,
                    bytes_per_s,
                },
            );
        }
        *samples = fresh;
    }

    /// How fast the volume with a number destaged between the last two samples.
    pub fn destage_bytes_per_s(&self, number: u32) -> u64 {
        let samples = lock(&self.samples);
        samples.get(&number).map_or(0, |sample| sample.bytes_per_s)
    }
}
