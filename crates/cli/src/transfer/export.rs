//! `hdcs volume export`: the image of a volume, or of a snapshot of one, to a file or a pipe.
//!
//! A snapshot is read through a volume of its own, which is deleted afterwards: over the snapshot where its backend
//! has a place for that (a file, an RBD image), else over a clone (S3, HDFS).

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use hdcs_api::{CloneVolume, CreateVolume, Snapshots, Volume};
use hdcs_backend::url::{BackendUrl, file_url};
use hdcs_device::file::is_locked;
use hdcs_server::catalogue::VolumeName;
use hdcs_server::data_dir::Layout;

use super::copy::{Copied, Source, Target, cannot_write, copy};
use super::{Format, STREAM, Summary, endpoint, is_same, make, nothing_made, qcow2, remove};
use crate::client::Client;
use crate::interrupts::{Interrupts, apart};
use crate::snapshot::{self, parse_source};
use crate::volume::{Behaviour, absolute_backend, api_path};
use crate::{Failure, flush, output};

#[derive(Args, Debug)]
pub(crate) struct Export {
    /// The volume, and which snapshot of it [default: as it is now]
    #[arg(value_name = "NAME[@SNAPSHOT]", value_parser = parse_source)]
    source: snapshot::Source,
    /// A new file, or `-` for standard output
    file: PathBuf,
    /// How the image is stored in the file
    #[arg(long, value_enum, default_value = "raw")]
    format: Format,
    /// Replace a file that exists
    #[arg(long)]
    overwrite: bool,
    /// Export one moment of a volume on s3:, hdfs: or dir: that clients write to
    #[arg(long, requires = "clone_backend")]
    snapshot: bool,
    /// On s3:, hdfs: and dir:, where the objects of the clone go through which a snapshot is read: a place of
    /// its own in the same store
    #[arg(long, value_name = "URL")]
    clone_backend: Option<String>,
    /// Print a summary as JSON; to standard error if the image goes to standard output
    #[arg(long)]
    json: bool,
}

pub(crate) async fn export(client: &Client, arguments: Export) -> Result<(), Failure> {
    let mut interrupts = Interrupts::watch()?;
    let name = &arguments.source.volume;
    let begun = interrupts.or(begin(client, &arguments)).await;
    let volume = begun.map_err(|failure| nothing_made("export", failure))?;
    if arguments.source.snapshot.is_none() && !arguments.snapshot {
        if volume.connections > 0 && !volume.read_only {
            output::note(&format!(
                "warning: volume {name} has clients: what they write meanwhile is in the image or not, block by \
                 block; for one moment of it make a snapshot and export {name}@SNAPSHOT"
            ));
        }
        return write(client, name.as_str(), &arguments, &mut interrupts).await;
    }
    let (beside, interrupt) = beside(client, &arguments, &volume, &mut interrupts).await?;
    let exported = match interrupt {
        Some(failure) => Err(nothing_made("export", failure)),
        None => write(client, &beside, &arguments, &mut interrupts).await,
    };
    let Err(left) = remove(client, &beside, "keep_data=false", &mut interrupts).await else {
        return exported;
    };
    let left = format!(
        "volume {beside}, through which it was read, is left: {}: delete it",
        left.message
    );
    Err(match exported {
        Ok(()) => Failure::failed(format!("the image is whole, but {left}")),
        Err(failure) => Failure {
            message: format!("{}; {left}", failure.message),
            ..failure
        },
    })
}

fn is_stream(arguments: &Export) -> bool {
    arguments.file.as_os_str() == STREAM
}

/// See whether it can be done; the volume.
async fn begin(client: &Client, arguments: &Export) -> Result<Volume, Failure> {
    refuse_place(arguments)?;
    if !is_stream(arguments) {
        refuse_own_file(client, &arguments.file).await?;
    }
    Ok(client.get(&api_path(&arguments.source.volume)).await?)
}

fn refuse_place(arguments: &Export) -> Result<(), Failure> {
    let file = &arguments.file;
    if is_stream(arguments) {
        if arguments.format != Format::Raw {
            return Err(Failure::misused(
                "qcow2 cannot be written to a pipe: give a file, or use --format raw",
            ));
        }
        if io::stdout().is_terminal() {
            return Err(Failure::misused(
                "an image is nothing to look at: send it to a file or a pipe",
            ));
        }
        return Ok(());
    }
    match fs::symlink_metadata(file) {
        Ok(found) if !found.is_file() => Err(Failure::misused(format!(
            "{}: it exists and is no ordinary file: give a new name, or `-` and send that there",
            file.display()
        ))),
        Ok(_) if !arguments.overwrite => Err(Failure::failed(format!(
            "{}: it exists already: give a new name, or --overwrite",
            file.display()
        ))),
        _ => Ok(()),
    }
}

/// Refuse to replace what a volume lives on, or what else the node keeps.
async fn refuse_own_file(client: &Client, file: &Path) -> Result<(), Failure> {
    let volumes: Vec<Volume> = client.get("/v1/volumes").await?;
    let root = client.layout().root().to_owned();
    let file = file.to_owned();
    apart(move || match use_of(&file, &root, &volumes) {
        Some(of) => Err(Failure::misused(format!(
            "{}: it is {of}: give another name",
            file.display()
        ))),
        None => Ok(()),
    })
    .await
}

/// What needs a file as it is. Blocks.
fn use_of(file: &Path, root: &Path, volumes: &[Volume]) -> Option<String> {
    let path = std::path::absolute(file).ok()?;
    let real = |path: &Path| fs::canonicalize(path).ok();
    let inside = |directory: &Path| {
        let (directory, parent) = (real(directory), path.parent().and_then(real));
        directory
            .zip(parent)
            .is_some_and(|(directory, parent)| parent.starts_with(directory))
    };
    if inside(root) && !inside(&Layout::new(root).kept()) {
        return Some("in the data directory, where HDCS keeps its own files".to_owned());
    }
    if hdcs_backend::is_read_only(&file_url(&path)) {
        return Some("among the snapshots of a volume".to_owned());
    }
    let found = fs::metadata(&path).ok()?;
    for volume in volumes {
        let backend = BackendUrl::parse(&volume.backend).ok();
        let backend = backend.and_then(|url| url.place.path().map(Path::to_owned));
        let of = [
            ("backend", backend),
            ("write log", Some(PathBuf::from(&volume.log_path))),
            ("home", volume.home_path.as_ref().map(PathBuf::from)),
        ];
        for (what, theirs) in of {
            let theirs = theirs.and_then(|path| fs::metadata(path).ok());
            if theirs.is_some_and(|theirs| is_same(&found, &theirs)) {
                return Some(format!("the {what} of volume {}", volume.name));
            }
        }
    }
    let file = File::open(&path).ok()?;
    is_locked(&file).then(|| "locked by a program that uses it".to_owned())
}

/// Make the volume through which a snapshot is read; its name, and the interrupt that came meanwhile.
async fn beside(
    client: &Client,
    arguments: &Export,
    volume: &Volume,
    interrupts: &mut Interrupts,
) -> Result<(String, Option<Failure>), Failure> {
    let name: VolumeName = format!("export-{}", uuid::Uuid::new_v4())
        .parse()
        .map_err(|error| Failure::failed(format!("{error}")))?;
    let place = interrupts.or(snapshot_place(client, arguments)).await;
    let place = place.map_err(|failure| nothing_made("export", failure))?;
    let made = match (place, &arguments.clone_backend) {
        (Some(url), None) => {
            let key = volume.encryption.as_ref();
            let request = CreateVolume {
                // What of the image gets to the SSD tier is no plainer there than the volume's own.
                encryption: key.map(|encryption| encryption.place.clone()),
                ..Behaviour::default().of(&name, None, Some(url))?
            };
            make(client, (name.as_str(), "/v1/volumes"), &request, interrupts).await?
        }
        (Some(_), Some(_)) => {
            return Err(Failure::misused(
                "a snapshot of a file or an RBD image is read where it is: leave --clone-backend out",
            ));
        }
        (None, None) => {
            return Err(Failure::misused(
                "a snapshot on s3:, hdfs: or dir: is read through a clone that is deleted afterwards: give \
                 --clone-backend, a place for its few objects in the same store",
            ));
        }
        (None, Some(url)) => {
            let snapshot::Source { volume, snapshot } = &arguments.source;
            if snapshot.is_none() {
                flush::flush(client, volume, None, interrupts).await?;
            }
            let request = CloneVolume {
                snapshot: snapshot.clone(),
                clone: Behaviour::default().of(&name, None, Some(url.clone()))?,
                copy: false,
            };
            let path = format!("{}/clone", api_path(volume));
            make(client, (name.as_str(), &path), &request, interrupts).await?
        }
    };
    Ok((made.0.name, made.1))
}

/// What a volume over the snapshot that is to be exported names as its backend; none: it takes a clone.
async fn snapshot_place(client: &Client, arguments: &Export) -> Result<Option<String>, Failure> {
    let snapshot::Source { volume, snapshot } = &arguments.source;
    let there: Snapshots = client
        .get(&format!("{}/snapshots", api_path(volume)))
        .await?;
    let Some(snapshot) = snapshot else {
        let place = arguments.clone_backend.as_deref().map(absolute_backend);
        let is_objects = |url: &str| {
            ["s3:", "hdfs:", "dir:"]
                .iter()
                .any(|scheme| url.starts_with(scheme))
        };
        return match place.transpose()? {
            Some(url) if !is_objects(&url) => Err(Failure::misused(format!(
                "--snapshot goes through a clone, whose file or image would stay: run `hdcs volume snapshot \
                 {volume} NAME`, export {volume}@NAME, and delete the snapshot"
            ))),
            _ => Ok(None),
        };
    };
    let found = there
        .snapshots
        .into_iter()
        .find(|one| one.name == *snapshot);
    found.map(|one| one.backend).ok_or_else(|| {
        Failure::failed(format!(
            "volume {volume}: there is no snapshot {snapshot}: see `hdcs volume snapshot {volume} --list`"
        ))
    })
}

/// Write the image of a volume to where it is to be.
async fn write(
    client: &Client,
    volume: &str,
    arguments: &Export,
    interrupts: &mut Interrupts,
) -> Result<(), Failure> {
    let written = interrupts.or(write_image(client, volume, arguments)).await;
    written.map_err(|failure| {
        if !failure.is_interrupt() {
            return failure;
        }
        let left = if is_stream(arguments) {
            "what was written is only a part of the image"
        } else {
            "nothing of it is left"
        };
        let of = &arguments.source.volume;
        Failure::interrupted(format!("export is interrupted: volume {of}: {left}"))
    })
}

async fn write_image(client: &Client, volume: &str, arguments: &Export) -> Result<(), Failure> {
    let from = endpoint(client, volume).await?;
    let at = from.clone();
    let bytes = apart(move || Ok(at.connect()?.bytes())).await?;
    let source = Source::Nbd(from);
    let (file, format) = (&arguments.file, arguments.format);
    let copied = if is_stream(arguments) {
        let output = io::stdout().as_fd().try_clone_to_owned();
        let output = output.map_err(|error| cannot_write("standard output", &error))?;
        copy(source, Target::Stream(output.into()), bytes, "exported").await?
    } else {
        let part = Part::new(file)?;
        let copied = match format {
            Format::Raw => write_raw(source, &part, bytes).await?,
            Format::Qcow2 => write_qcow2(source, &part, bytes).await?,
        };
        part.complete(file, arguments.overwrite)?;
        copied
    };
    let name = &arguments.source.volume;
    let summary = Summary::new(name.as_str(), file, format, bytes, &copied);
    let sentence = format!(
        "volume {name} is exported to {}: {}",
        file.display(),
        summary.figures()
    );
    summary.say(arguments.json, is_stream(arguments), &sentence)
}

async fn write_raw(source: Source, part: &Part, bytes: u64) -> Result<Copied, Failure> {
    let name = part.path.display().to_string();
    let failed = |error: io::Error| cannot_write(&name, &error);
    let file = OpenOptions::new().write(true).open(&part.path);
    let file = Arc::new(file.map_err(failed)?);
    file.set_len(bytes).map_err(failed)?;
    let target = Target::File(Arc::clone(&file), name.clone());
    let copied = copy(source, target, bytes, "exported").await?;
    sync(file, name).await?;
    Ok(copied)
}

async fn write_qcow2(source: Source, part: &Part, bytes: u64) -> Result<Copied, Failure> {
    qcow2::create(&part.path, bytes).await?;
    let served = qcow2::Served::start(&part.path, true).await?;
    let to = served.endpoint();
    let target = Target::Nbd(to.clone(), true);
    let copied = copy(source, target, bytes, "exported").await?;
    apart(move || to.connect()?.flush()).await?;
    served.close().await?;
    // What QEMU wrote at the end it has not made durable.
    let name = part.path.display().to_string();
    let file = File::open(&part.path).map_err(|error| cannot_write(&name, &error))?;
    sync(Arc::new(file), name).await?;
    Ok(copied)
}

/// Make a file durable.
async fn sync(file: Arc<File>, name: String) -> Result<(), Failure> {
    let synced = move || file.sync_all().map_err(|error| cannot_write(&name, &error));
    apart(synced).await
}

/// A file that is being written, under a name of its own; removed unless it is completed.
struct Part {
    path: PathBuf,
    is_complete: bool,
}

impl Part {
    fn new(file: &Path) -> Result<Self, Failure> {
        let failed = |path: &Path, error| cannot_write(&path.display().to_string(), &error);
        let path = std::path::absolute(file).map_err(|error| failed(file, error))?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".part-{}", std::process::id()));
        let path = path.with_file_name(name);
        let mut options = OpenOptions::new();
        // Whoever may read a volume may not be whoever may look into the directory: it is its owner's alone.
        options.write(true).create_new(true).mode(0o600);
        let made = options.open(&path);
        made.map_err(|error| failed(&path, error))?;
        Ok(Self {
            path,
            is_complete: false,
        })
    }

    /// Give it its name, durably. A file that came meanwhile is not replaced unless that was said, and none that
    /// somebody uses by now.
    fn complete(mut self, file: &Path, overwrite: bool) -> Result<(), Failure> {
        let failed = |error: io::Error| cannot_write(&file.display().to_string(), &error);
        if !overwrite && fs::symlink_metadata(file).is_ok() {
            return Err(failed(io::ErrorKind::AlreadyExists.into()));
        }
        if File::open(file).is_ok_and(|file| is_locked(&file)) {
            return Err(failed(io::ErrorKind::ResourceBusy.into()));
        }
        fs::rename(&self.path, file).map_err(failed)?;
        self.is_complete = true;
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let directory = File::open(directory).map_err(failed)?;
        directory.sync_all().map_err(failed)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_complete {
            // What cannot be removed is named as a part.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn part_is_removed_unless_it_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("image");
        drop(Part::new(&file).unwrap());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        Part::new(&file).unwrap().complete(&file, false).unwrap();
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else reads what a volume holds");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        // What came meanwhile stays.
        let part = Part::new(&file).unwrap();
        assert!(part.complete(&file, false).is_err());
        Part::new(&file).unwrap().complete(&file, true).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
