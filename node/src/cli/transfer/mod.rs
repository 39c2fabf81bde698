//! `hdcs volume export` and `hdcs volume import`: whole images, raw or qcow2, through the running node.
//!
//! Both are clients of the node's NBD socket, so they see what every client sees, the log included. What is
//! half made never looks whole: an export is written under another name until it is complete, and the volume of an
//! import that did not end is removed again.

mod copy;
mod nbd;
mod qcow2;

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use hdcs_core::limits::{SECTOR_BYTES, VOLUME_BYTES_MIN};
use hyper::Method;
use serde::Serialize;

use self::copy::{Copied, Source, Target, cannot_write, copy, interrupts};
use self::nbd::Endpoint;
use super::client::Client;
use super::size::{Size, show};
use super::snapshot::{self, parse_source};
use super::volume::{Behaviour, absolute_backend, api_path, parse_volume_size};
use super::{Failure, flush, output};
use crate::backends::url::BackendUrl;
use crate::catalogue::{VolumeName, check_volume_bytes};
use crate::control::api::{CloneVolume, Deleted, Status, Volume};

/// Standard input or output in place of a file.
const STREAM: &str = "-";
/// First bytes that tell what a file is.
const MAGIC_BYTES: usize = 512;
/// A copy takes a range of 1 GiB or less at once for its allocation.
const STATUS_BYTES: u64 = 1 << 30;

/// How an image is stored in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    /// Byte for byte
    Raw,
    /// QEMU's format; needs qemu-utils
    Qcow2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GivenFormat {
    /// qcow2 if the file begins as one, else raw
    Auto,
    /// Byte for byte
    Raw,
    /// QEMU's format; needs qemu-utils
    Qcow2,
}

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
    /// Export one moment of a volume on s3: or hdfs: that clients write to
    #[arg(long, requires = "clone_backend")]
    snapshot: bool,
    /// Where the objects of the clone go through which a snapshot is read: a place of its own in the
    /// same store
    #[arg(long, value_name = "URL")]
    clone_backend: Option<String>,
    /// Print a summary as JSON; to standard error if the image goes to standard output
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Import {
    /// Name of the new volume: letters, digits, `.`, `_`, `-`
    name: VolumeName,
    /// The image, or `-` for standard input (raw, with --size)
    file: PathBuf,
    /// How the image is stored in the file
    #[arg(long, value_enum, default_value = "auto")]
    format: GivenFormat,
    /// Size of the volume [default: the image's]; the exact length of standard input
    #[arg(long, value_parser = parse_volume_size)]
    size: Option<Size>,
    /// Where cold data lives, such as file:PATH [default: a sparse file in the data directory]
    #[arg(long, value_name = "URL")]
    backend: Option<String>,
    /// Take a backend that holds data already, and overwrite that
    #[arg(long)]
    overwrite: bool,
    /// Keep the volume if the import does not end, as far as it came
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    behaviour: Behaviour,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

/// What was done.
#[derive(Debug, Serialize)]
struct Summary {
    volume: String,
    file: String,
    format: Format,
    /// Size of the image.
    bytes: u64,
    /// How much of it was written as data; the rest is zeroes.
    data_bytes: u64,
    seconds: f64,
    bytes_per_s: u64,
}

impl Summary {
    fn new(volume: &str, file: &Path, format: Format, bytes: u64, copied: &Copied) -> Self {
        let seconds = copied.took.as_secs_f64();
        Self {
            volume: volume.to_owned(),
            file: file.display().to_string(),
            format,
            bytes,
            data_bytes: copied.data_bytes,
            seconds,
            bytes_per_s: (bytes as f64 / seconds.max(0.001)) as u64,
        }
    }

    fn figures(&self) -> String {
        format!(
            "{}, {} of it data, in {:.1} s, {}/s",
            show(self.bytes),
            show(self.data_bytes),
            self.seconds,
            show(self.bytes_per_s)
        )
    }

    /// Tell it; on standard error if standard output has the image.
    fn say(&self, json: bool, aside: bool, sentence: &str) -> Result<(), Failure> {
        match (json, aside) {
            (true, false) => output::json(self)?,
            (true, true) => {
                let text = serde_json::to_string_pretty(self)
                    .map_err(|error| Failure::failed(format!("cannot print JSON: {error}")))?;
                eprintln!("{text}");
            }
            (false, false) => output::line(sentence),
            (false, true) => eprintln!("{sentence}"),
        }
        Ok(())
    }
}

/// Where the node serves a volume on a unix socket.
async fn endpoint(client: &Client, volume: &str) -> Result<Endpoint, Failure> {
    let status: Status = client.get("/v1/status").await?;
    let mut sockets = (status.nbd_listen.iter()).filter_map(|listen| listen.strip_prefix("unix:"));
    let socket = sockets.next().ok_or_else(|| {
        Failure::failed(
            "the node serves no unix socket, which this command goes through: nbd_listen: add \"unix:nbd.sock\" \
             to it and restart the node",
        )
    })?;
    Ok(Endpoint {
        socket: socket.into(),
        export: volume.to_owned(),
        name: format!("volume {volume}").into(),
    })
}

pub(crate) async fn export(client: &Client, arguments: Export) -> Result<(), Failure> {
    let is_stream = arguments.file.as_os_str() == STREAM;
    refuse_place(&arguments, is_stream)?;
    let name = &arguments.source.volume;
    let volume: Volume = client.get(&api_path(name)).await?;
    if arguments.source.snapshot.is_none() && !arguments.snapshot {
        if volume.connections > 0 && !volume.read_only {
            eprintln!(
                "warning: volume {name} has clients: what they write meanwhile is in the image or not, block by \
                 block; for one moment of it use --snapshot on s3: and hdfs:, or a volume over a snapshot of it"
            );
        }
        return export_volume(client, name.as_str(), &arguments, is_stream).await;
    }
    let clone = clone(client, &arguments).await?;
    let exported = export_volume(client, &clone, &arguments, is_stream).await;
    let path = format!("/v1/volumes/{clone}?discard_dirty=true&keep_data=false");
    let deleted: Result<Deleted, _> = client.request(Method::DELETE, &path, &()).await;
    match (exported, deleted) {
        (Ok(()), Err(error)) => {
            let why = Failure::from(error).message;
            Err(Failure::failed(format!(
                "the image is whole, but its clone is left: {why}: delete volume {clone}"
            )))
        }
        (exported, _) => exported,
    }
}

fn refuse_place(arguments: &Export, is_stream: bool) -> Result<(), Failure> {
    let file = &arguments.file;
    if is_stream {
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

/// Make the clone through which a snapshot is read; its name.
async fn clone(client: &Client, arguments: &Export) -> Result<String, Failure> {
    let snapshot::Source { volume, snapshot } = &arguments.source;
    let Some(url) = &arguments.clone_backend else {
        return Err(Failure::misused(
            "a snapshot is read through a clone that is deleted afterwards: give --clone-backend, a place for \
             its few objects in the same store",
        ));
    };
    if url.starts_with("rbd:") || url.starts_with("file:") {
        // The image of a deleted volume stays.
        return Err(Failure::misused(
            "a clone there would stay when its volume is deleted: create a volume over the snapshot, `--backend \
             rbd:POOL/IMAGE@SNAP` or `file:PATH.hdcs-snap/SNAP`, and export that",
        ));
    }
    if snapshot.is_none() {
        flush::flush(client, volume, None).await?;
    }
    let name: VolumeName = format!("export-{}", uuid::Uuid::new_v4())
        .parse()
        .map_err(|error| Failure::failed(format!("{error}")))?;
    let request = CloneVolume {
        snapshot: snapshot.clone(),
        clone: Behaviour::default().of(&name, None, Some(url.clone()))?,
        copy: false,
    };
    let path = format!("{}/clone", api_path(volume));
    let made: Volume = client.request(Method::POST, &path, &request).await?;
    Ok(made.name)
}

async fn export_volume(
    client: &Client,
    volume: &str,
    arguments: &Export,
    is_stream: bool,
) -> Result<(), Failure> {
    let mut interrupts = interrupts()?;
    let from = endpoint(client, volume).await?;
    let bytes = from.connect()?.bytes();
    let source = Source::Nbd(from);
    let (file, format) = (&arguments.file, arguments.format);
    let copied = if is_stream {
        let output = io::stdout().as_fd().try_clone_to_owned();
        let output = output.map_err(|error| cannot_write("standard output", &error))?;
        let target = Target::Stream(output.into());
        copy(source, target, bytes, "exported", &mut interrupts).await?
    } else {
        let part = Part::new(file)?;
        let copied = match format {
            Format::Raw => export_raw(source, &part, bytes, &mut interrupts).await?,
            Format::Qcow2 => {
                qcow2::create(&part.path, bytes)?;
                let served = qcow2::Served::start(&part.path, true)?;
                let target = Target::Nbd(served.endpoint(), true);
                let copied = copy(source, target, bytes, "exported", &mut interrupts).await?;
                served.endpoint().connect()?.flush()?;
                served.close()?;
                // What QEMU wrote at the end it has not made durable.
                let file = File::open(&part.path).and_then(|file| file.sync_all());
                file.map_err(|error| cannot_write(&part.path.display().to_string(), &error))?;
                copied
            }
        };
        part.complete(file, arguments.overwrite)?;
        copied
    };
    let summary = Summary::new(
        arguments.source.volume.as_str(),
        file,
        format,
        bytes,
        &copied,
    );
    let sentence = format!(
        "volume {} is exported to {}: {}",
        arguments.source.volume,
        file.display(),
        summary.figures()
    );
    summary.say(arguments.json, is_stream, &sentence)
}

async fn export_raw(
    source: Source,
    part: &Part,
    bytes: u64,
    interrupts: &mut tokio::signal::unix::Signal,
) -> Result<Copied, Failure> {
    let failed = |error: io::Error| cannot_write(&part.path.display().to_string(), &error);
    let file = OpenOptions::new().write(true).open(&part.path);
    let file = Arc::new(file.map_err(failed)?);
    file.set_len(bytes).map_err(failed)?;
    let target = Target::File(Arc::clone(&file), part.path.display().to_string());
    let copied = copy(source, target, bytes, "exported", interrupts).await?;
    file.sync_all().map_err(failed)?;
    Ok(copied)
}

/// A file that is being written, under a name of its own; removed unless it is completed.
struct Part {
    path: PathBuf,
    is_complete: bool,
}

impl Part {
    fn new(file: &Path) -> Result<Self, Failure> {
        let path = std::path::absolute(file).map_err(|error| cannot_write(STREAM, &error))?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".part-{}", std::process::id()));
        let path = path.with_file_name(name);
        let made = OpenOptions::new().write(true).create_new(true).open(&path);
        made.map_err(|error| cannot_write(&path.display().to_string(), &error))?;
        Ok(Self {
            path,
            is_complete: false,
        })
    }

    /// Give it its name, durably. A file that came meanwhile is not replaced unless that was said.
    fn complete(mut self, file: &Path, overwrite: bool) -> Result<(), Failure> {
        let failed = |error: io::Error| cannot_write(&file.display().to_string(), &error);
        if !overwrite && fs::symlink_metadata(file).is_ok() {
            return Err(failed(io::ErrorKind::AlreadyExists.into()));
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

/// An image that was looked at.
struct Image {
    format: Format,
    /// Size of the image in whole sectors.
    bytes: u64,
    source: Source,
    served: Option<qcow2::Served>,
}

pub(crate) async fn import(client: &Client, arguments: Import) -> Result<(), Failure> {
    let image = if arguments.file.as_os_str() == STREAM {
        from_stream(&arguments)?
    } else {
        from_file(&arguments)?
    };
    let bytes = arguments
        .size
        .map_or(image.bytes.max(VOLUME_BYTES_MIN), |size| size.0);
    if bytes < image.bytes {
        return Err(Failure::misused(format!(
            "--size {bytes}: the image has {} bytes: nothing of it is cut off; give that or more",
            image.bytes
        )));
    }
    check_volume_bytes(bytes).map_err(Failure::misused)?;
    let mut interrupts = interrupts()?;
    let backend = arguments.backend.as_deref().map(absolute_backend);
    let backend = backend.transpose()?;
    let new_file = backend.as_deref().and_then(absent_file);
    let request = arguments
        .behaviour
        .of(&arguments.name, Some(bytes), backend)?;
    let made: Volume = client
        .request(Method::POST, "/v1/volumes", &request)
        .await?;
    let (name, format, image_bytes) = (&arguments.name, image.format, image.bytes);
    let copied = fill(client, &made, image, arguments.overwrite, &mut interrupts).await;
    let copied = match copied {
        Ok(copied) => copied,
        Err(failure) if arguments.keep => {
            return Err(Failure::failed(format!(
                "import has not ended: volume {name}: {}: it is kept as far as it came",
                failure.message
            )));
        }
        Err(failure) => return Err(undo(client, &made, new_file.as_deref(), failure).await),
    };
    let summary = Summary::new(name.as_str(), &arguments.file, format, image_bytes, &copied);
    let sentence = format!(
        "volume {name} is imported from {}: {}",
        arguments.file.display(),
        summary.figures()
    );
    summary.say(arguments.json, false, &sentence)
}

/// Copy the image into the new volume, and make it durable.
async fn fill(
    client: &Client,
    volume: &Volume,
    image: Image,
    overwrite: bool,
    interrupts: &mut tokio::signal::unix::Signal,
) -> Result<Copied, Failure> {
    let to = endpoint(client, &volume.name).await?;
    let mut connection = to.connect()?;
    if connection.is_read_only() {
        return Err(Failure::failed("its backend can only be read"));
    }
    let is_zero = is_zero(&mut connection)?;
    if !is_zero && !overwrite {
        return Err(Failure::failed(format!(
            "backend {} holds data already: give a new place, or --overwrite",
            volume.backend
        )));
    }
    let rest = volume.bytes - image.bytes;
    let target = Target::Nbd(to, is_zero);
    let copied = copy(image.source, target, image.bytes, "imported", interrupts).await?;
    drop(image.served);
    if !is_zero {
        let mut at = image.bytes;
        while at < image.bytes + rest {
            let bytes = (volume.bytes - at).min(STATUS_BYTES);
            connection.write_zeroes(at, bytes as u32)?;
            at += bytes;
        }
    }
    connection.flush()?;
    Ok(copied)
}

/// Whether all of an export reads as zeroes by its own account.
fn is_zero(connection: &mut nbd::Client) -> Result<bool, Failure> {
    let mut at = 0;
    while at < connection.bytes() {
        let bytes = (connection.bytes() - at).min(STATUS_BYTES);
        for run in connection.runs(at, bytes as u32)? {
            if !run.is_zero {
                return Ok(false);
            }
            at += run.bytes;
        }
    }
    Ok(true)
}

/// Remove the volume of an import that did not end.
async fn undo(
    client: &Client,
    volume: &Volume,
    new_file: Option<&Path>,
    failure: Failure,
) -> Failure {
    let name = &volume.name;
    let path = format!("/v1/volumes/{name}?discard_dirty=true&keep_data=false");
    let deleted: Result<Deleted, _> = client.request(Method::DELETE, &path, &()).await;
    let end = match deleted {
        Ok(Deleted { data: None, .. }) => "the volume is removed again".to_owned(),
        Ok(Deleted {
            data: Some(data), ..
        }) => match new_file.map(fs::remove_file) {
            Some(Ok(())) => "the volume and its backend's file are removed again".to_owned(),
            _ => format!("the volume is removed again; what was written to {data} before is there"),
        },
        Err(error) => {
            let why = Failure::from(error).message;
            format!("the volume could not be removed again: {why}: delete it")
        }
    };
    Failure {
        status: failure.status,
        message: format!(
            "import has not ended: volume {name}: {}; {end}",
            failure.message
        ),
    }
}

/// The file of a backend that does not exist yet, so that the import makes it.
fn absent_file(url: &str) -> Option<PathBuf> {
    let path = BackendUrl::parse(url).ok()?.place.path()?.to_owned();
    let is_absent = matches!(fs::symlink_metadata(&path), Err(error) if error.kind() == io::ErrorKind::NotFound);
    is_absent.then_some(path)
}

fn from_stream(arguments: &Import) -> Result<Image, Failure> {
    let Some(size) = arguments.size else {
        return Err(Failure::misused(
            "standard input does not tell its length: give it as --size",
        ));
    };
    let mut begin = Vec::new();
    io::stdin()
        .lock()
        .take((MAGIC_BYTES as u64).min(size.0))
        .read_to_end(&mut begin)
        .map_err(|error| Failure::failed(format!("standard input: {error}")))?;
    if format(arguments.format, &begin, "standard input")? == Format::Qcow2 {
        return Err(Failure::misused(
            "qcow2 cannot be read from a pipe: give a file, or --format raw if it is none",
        ));
    }
    Ok(Image {
        format: Format::Raw,
        bytes: size.0,
        source: Source::Stream(begin),
        served: None,
    })
}

fn from_file(arguments: &Import) -> Result<Image, Failure> {
    let path = std::path::absolute(&arguments.file)
        .map_err(|error| Failure::failed(format!("{}: {error}", arguments.file.display())))?;
    let name = arguments.file.display().to_string();
    let failed = |error: io::Error| Failure::failed(format!("{name}: {error}"));
    let mut file = File::open(&path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() && !found.file_type().is_block_device() {
        return Err(Failure::misused(format!(
            "{name}: it is neither a file nor a block device; a pipe goes to `-`"
        )));
    }
    let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
    file.rewind().map_err(failed)?;
    let mut begin = Vec::new();
    (&mut file)
        .take(MAGIC_BYTES as u64)
        .read_to_end(&mut begin)
        .map_err(failed)?;
    match format(arguments.format, &begin, &name)? {
        Format::Raw => {
            if length == 0 {
                return Err(Failure::failed(format!("{name}: it is empty")));
            }
            Ok(Image {
                format: Format::Raw,
                bytes: length.next_multiple_of(SECTOR_BYTES as u64),
                source: Source::File(Arc::new(file), name),
                served: None,
            })
        }
        Format::Qcow2 => {
            let bytes = qcow2::size(&path)?;
            let served = qcow2::Served::start(&path, false)?;
            Ok(Image {
                format: Format::Qcow2,
                bytes,
                source: Source::Nbd(served.endpoint()),
                served: Some(served),
            })
        }
    }
}

/// What is at the begin of files that are no raw images, and what they are.
const MAGICS: [(&[u8], &str); 8] = [
    (b"KDMV", "a VMDK image"),
    (b"vhdxfile", "a VHDX image"),
    (b"conectix", "a VHD image"),
    (b"QED\0", "a QED image"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\xfd7zXZ\0", "compressed by xz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh", "compressed by bzip2"),
];

/// The format of a file that begins so.
fn format(given: GivenFormat, begin: &[u8], name: &str) -> Result<Format, Failure> {
    match given {
        GivenFormat::Raw => return Ok(Format::Raw),
        GivenFormat::Qcow2 => return Ok(Format::Qcow2),
        GivenFormat::Auto => {}
    }
    if begin.starts_with(b"QFI\xfb") {
        return Ok(Format::Qcow2);
    }
    match MAGICS.iter().find(|(magic, _)| begin.starts_with(magic)) {
        Some((_, what)) => Err(Failure::misused(format!(
            "{name}: it is {what}: unpack or convert it first (qemu-img convert -O raw), or say --format raw to \
             take it as it is"
        ))),
        None => Ok(Format::Raw),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_is_told_by_the_first_bytes_and_guesses_nothing_else() {
        let auto = |begin: &[u8]| format(GivenFormat::Auto, begin, "f");
        assert_eq!(auto(b"QFI\xfb\0\0").unwrap(), Format::Qcow2);
        assert_eq!(auto(b"\xebfat").unwrap(), Format::Raw);
        assert_eq!(auto(b"").unwrap(), Format::Raw);
        for (magic, what) in MAGICS {
            assert!(auto(magic).unwrap_err().message.contains(what));
            assert_eq!(format(GivenFormat::Raw, magic, "f").unwrap(), Format::Raw);
        }
        assert_eq!(format(GivenFormat::Qcow2, b"", "f").unwrap(), Format::Qcow2);
    }

    #[test]
    fn part_is_removed_unless_it_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("image");
        drop(Part::new(&file).unwrap());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        Part::new(&file).unwrap().complete(&file, false).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        // What came meanwhile stays.
        let part = Part::new(&file).unwrap();
        assert!(part.complete(&file, false).is_err());
        Part::new(&file).unwrap().complete(&file, true).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
