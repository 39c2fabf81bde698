//! `hdcs volume snapshot` and `hdcs volume clone`.

use clap::Args;
use hdcs_api::time::utc;
use hdcs_api::{CloneVolume, MakeSnapshot, Snapshot, Snapshots, Volume};
use hdcs_server::catalogue::VolumeName;
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::client::Client;
use super::interrupts::Interrupts;
use super::size::show;
use super::volume::{Behaviour, absolute_backend, api_path, said};
use super::{Failure, flush, output};

#[derive(Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(crate) struct Arguments {
    /// Name of the volume
    name: VolumeName,
    /// Name of the snapshot: letters, digits, `.`, `_`, `-`
    #[arg(required_unless_present = "list")]
    snapshot: Option<String>,
    /// List the snapshots, and the clones that begin with them
    #[arg(long, conflicts_with_all = ["snapshot", "delete"])]
    list: bool,
    /// Delete the snapshot
    #[arg(long)]
    delete: bool,
    /// Give up after so many seconds of writing dirty data to the backend; nothing is made then
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["list", "delete"])]
    timeout: Option<u64>,
    /// Copy the data if the file system cannot share it (a file without reflinks)
    #[arg(long, conflicts_with_all = ["list", "delete"])]
    copy: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Clone {
    /// The volume, and which snapshot of it [default: as it is now]
    #[arg(value_name = "NAME[@SNAPSHOT]", value_parser = parse_source)]
    source: Source,
    /// Name of the new volume
    new: VolumeName,
    /// Where its own data goes: a place of its own in the same store, cluster or file system [default: the data
    /// directory, if its parent is there]
    #[arg(long, value_name = "URL")]
    backend: Option<String>,
    #[command(flatten)]
    behaviour: Behaviour,
    /// Copy the data if the file system cannot share it (a file without reflinks)
    #[arg(long)]
    copy: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A volume, or a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) volume: VolumeName,
    pub(super) snapshot: Option<String>,
}

pub(super) fn parse_source(text: &str) -> Result<Source, String> {
    let (volume, snapshot) = match text.split_once('@') {
        Some((volume, snapshot)) => (volume, Some(snapshot.to_owned())),
        None => (text, None),
    };
    let volume = volume.parse().map_err(|error| format!("{error}"))?;
    Ok(Source { volume, snapshot })
}

pub(crate) async fn run(client: &Client, arguments: Arguments) -> Result<(), Failure> {
    let name = &arguments.name;
    let path = format!("{}/snapshots", api_path(name));
    let Some(snapshot) = &arguments.snapshot else {
        return list(client, &path, arguments.json).await;
    };
    if arguments.delete {
        let path = format!("{path}/{}", escaped(snapshot)?);
        let () = client.request(Method::DELETE, &path, &()).await?;
        return said(arguments.json, &(), || {
            format!("snapshot {snapshot} of volume {name} is deleted")
        });
    }
    // Refused before the flush, if that is possible.
    let there: Snapshots = client.get(&path).await?;
    let is_possible = there.copy_bytes == 0 || arguments.copy;
    let mut interrupts = Interrupts::watch()?;
    if is_possible && there.snapshots.iter().all(|there| there.name != *snapshot) {
        flush::flush(client, name, arguments.timeout, &mut interrupts).await?;
    }
    let request = MakeSnapshot {
        name: snapshot.clone(),
        copy: arguments.copy,
    };
    let made: Snapshot = make(client, name, &path, &request, &mut interrupts).await?;
    said(arguments.json, &made, || {
        format!("snapshot {snapshot} of volume {name} is made")
    })
}

/// A name in a path; no snapshot has one that would need escaping.
fn escaped(snapshot: &str) -> Result<&str, Failure> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if snapshot.bytes().all(good) && !snapshot.is_empty() {
        return Ok(snapshot);
    }
    Err(Failure::misused(format!(
        "snapshot name {snapshot:?}: it has 1 to 64 letters A-Z a-z, digits, `.`, `_` and `-`"
    )))
}

/// Make it, of what has come meanwhile too, with progress if something is copied; Ctrl-C cancels that.
async fn make<T: DeserializeOwned>(
    client: &Client,
    name: &VolumeName,
    path: &str,
    request: &impl Serialize,
    interrupts: &mut Interrupts,
) -> Result<T, Failure> {
    let made = client.request(Method::POST, path, request);
    tokio::pin!(made);
    tokio::select! {
        made = &mut made => return Ok(made?),
        () = watch(client, name) => {}
        () = interrupts.wait() => {}
    }
    let copy = format!("{}/copy", api_path(name));
    let () = client.request(Method::DELETE, &copy, &()).await?;
    tokio::select! {
        made = &mut made => made.map_err(|error| Failure::interrupted(Failure::from(error).message)),
        () = interrupts.wait() => Err(Failure::interrupted(format!(
            "it is being given up: `hdcs volume snapshot {name} --list` shows what became of it"
        ))),
    }
}

/// Show how far the copying for a snapshot or clone of a volume is, for as long as it is waited for.
async fn watch(client: &Client, name: &VolumeName) {
    let mut progress: Option<flush::Progress> = None;
    loop {
        tokio::time::sleep(flush::WATCH_PERIOD).await;
        // Whoever makes it says what is wrong.
        let Ok(volume) = client.get::<Volume>(&api_path(name)).await else {
            continue;
        };
        let left = volume.counters.map_or(0, |c| c.copy_remaining_bytes);
        match &mut progress {
            Some(progress) => progress.update(left, None),
            None if left > 0 => progress = Some(flush::Progress::new(left, "copied")),
            None => {}
        }
    }
}

async fn list(client: &Client, path: &str, json: bool) -> Result<(), Failure> {
    let there: Snapshots = client.get(path).await?;
    if json {
        return output::json(&there);
    }
    let mut table = output::table(&["SNAPSHOT", "MADE", "CLONES"]);
    for snapshot in &there.snapshots {
        table.add_row([
            snapshot.name.clone(),
            utc(snapshot.made_ms),
            snapshot.clones.join(", "),
        ]);
    }
    output::print(&table);
    if !there.clones.is_empty() {
        let clones = there.clones.join(", ");
        output::line(&format!("\nclones without a snapshot: {clones}"));
    }
    Ok(())
}

pub(crate) async fn clone(client: &Client, arguments: Clone) -> Result<(), Failure> {
    let Source { volume, snapshot } = arguments.source;
    let mut interrupts = Interrupts::watch()?;
    if snapshot.is_none() {
        // Refused before the flush, if that is possible.
        let path = format!("{}/snapshots", api_path(&volume));
        let there: Snapshots = client.get(&path).await?;
        if there.copy_bytes == 0 || arguments.copy {
            flush::flush(client, &volume, None, &mut interrupts).await?;
        }
    }
    let of = match &snapshot {
        Some(snapshot) => format!("snapshot {snapshot} of volume {volume}"),
        None => format!("volume {volume}"),
    };
    let backend = arguments.backend.as_deref().map(absolute_backend);
    let backend = backend.transpose()?;
    let request = CloneVolume {
        snapshot,
        clone: (arguments.behaviour).of(&arguments.new, None, backend)?,
        copy: arguments.copy,
    };
    let path = format!("{}/clone", api_path(&volume));
    let made: Volume = make(client, &volume, &path, &request, &mut interrupts).await?;
    said(arguments.json, &made, || {
        format!(
            "volume {} is a clone of {of}: {}, {}, backend {}",
            made.name,
            show(made.bytes),
            made.state,
            made.backend
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_is_a_volume_or_a_snapshot_of_it() {
        let source = |text| parse_source(text).map(|s| (s.volume.to_string(), s.snapshot));
        assert_eq!(source("v"), Ok(("v".to_owned(), None)));
        assert_eq!(source("v@s"), Ok(("v".to_owned(), Some("s".to_owned()))));
        assert!(source("@s").is_err() && source("a/b").is_err());
    }

    #[test]
    fn snapshot_name_never_leaves_its_path() {
        for bad in ["", "a/b", "..?x", "a b"] {
            assert!(escaped(bad).is_err(), "{bad}");
        }
        assert_eq!(escaped("nightly-1.0_a").unwrap(), "nightly-1.0_a");
    }
}
