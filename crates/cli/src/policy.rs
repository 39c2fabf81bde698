//! The progress of a change of policy: it is in effect once the write log is empty. Ctrl-C stops the
//! watching, not the change.

use std::time::Duration;

use hdcs_api::Volume;
use hdcs_api::value::Value;
use hdcs_server::catalogue::VolumeName;
use tokio::signal::unix::{SignalKind, signal};

use super::Failure;
use super::client::Client;
use super::flush::Progress;
use super::size::show;
use super::volume::api_path;

/// How often progress is looked at.
const WATCH_PERIOD: Duration = Duration::from_millis(50);

/// The policy that a volume is set to.
fn wanted(volume: &Volume) -> &str {
    match volume.settings.get("policy") {
        Some(Value::Text(policy)) => policy,
        _ => "unknown",
    }
}

fn remaining(volume: &Volume) -> u64 {
    let counters = volume.counters.as_ref();
    counters.map_or(0, |counters| counters.policy_remaining_bytes)
}

/// How a volume's policy is shown: the one in effect, and the way to another.
pub(super) fn in_words(volume: &Volume) -> String {
    let (wanted, left) = (wanted(volume), remaining(volume));
    match &volume.counters {
        Some(counters) if left > 0 => format!(
            "{} until {} are destaged, then {wanted}",
            counters.policy,
            show(left)
        ),
        _ => wanted.to_owned(),
    }
}

/// Wait until the policy that was set is in effect. Returns the volume as it is then.
pub(super) async fn settled(
    client: &Client,
    name: &VolumeName,
    mut volume: Volume,
) -> Result<Volume, Failure> {
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| Failure::failed(format!("cannot watch for Ctrl-C: {error}")))?;
    let mut progress = Progress::new(remaining(&volume), "flushed");
    while remaining(&volume) > 0 {
        let tick = tokio::time::sleep(WATCH_PERIOD);
        let interrupted = tokio::select! {
            () = tick => false,
            _ = interrupts.recv() => true,
        };
        if interrupted {
            progress.finish();
            return Err(Failure::failed(format!(
                "no longer watched: volume {name}: the change goes on: {}: see `hdcs volume show {name}`",
                in_words(&volume)
            )));
        }
        volume = client.get(&api_path(name)).await?;
        progress.update(remaining(&volume), volume.reason.as_deref());
        if volume.state == "error" {
            progress.finish();
            let why = volume.reason.unwrap_or_default();
            return Err(Failure::failed(format!(
                "volume {name}: its policy cannot change now: {why}"
            )));
        }
    }
    progress.finish();
    Ok(volume)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_words_tell_what_is_in_effect_and_what_is_left() {
        let volume = |left: u64| -> Volume {
            let mut volume: Volume = serde_json::from_value(serde_json::json!({
                "name": "v", "state": "healthy", "phase": "open", "reason": null, "number": 1,
                "uuid": "", "bytes": 4096, "backend": "", "log_path": "", "log_bytes": 0,
                "connections": 0, "settings": {"policy": "write-around"}, "overridden": [],
                "counters": null, "latency": null,
            }))
            .unwrap();
            volume.counters = Some(hdcs_api::Counters {
                policy: "write-back".to_owned(),
                policy_remaining_bytes: left,
                ..Default::default()
            });
            volume
        };
        assert_eq!(in_words(&volume(0)), "write-around");
        assert_eq!(
            in_words(&volume(2 << 20)),
            "write-back until 2 MiB are destaged, then write-around"
        );
    }
}
