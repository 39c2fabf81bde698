//! `hdcs volume import`: a new volume of an image from a file or a pipe.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use hdcs_api::{CreateVolume, Deleted, Volume};
use hdcs_backend::image_format::{self, MAGIC_BYTES, QCOW2};
use hdcs_backend::url::BackendUrl;
use hdcs_core::base::limits::{SECTOR_BYTES, VOLUME_BYTES_MIN};
use hdcs_server::catalogue::{VolumeName, check_volume_bytes};

use super::copy::{Copied, Source, Target, copy};
use super::{Format, STREAM, Summary, endpoint, is_same, make, nbd, nothing_made, qcow2, remove};
use crate::Failure;
use crate::client::Client;
use crate::interrupts::{Interrupts, apart};
use crate::size::Size;
use crate::volume::{Behaviour, absolute_backend, parse_volume_size};

/// A range of 1 GiB or less is asked for its allocation at once.
const STATUS_BYTES: u64 = 1 << 30;

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
    /// Where cold data lives, such as file:PATH; a place where nothing is [default: a sparse file in the data
    /// directory]
    #[arg(long, value_name = "URL")]
    backend: Option<String>,
    /// Take a backend that is there already, and overwrite what it holds
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

/// An image that was looked at.
struct Image {
    format: Format,
    /// Size of the image in whole sectors.
    bytes: u64,
    source: Source,
    served: Option<qcow2::Served>,
}

pub(crate) async fn import(client: &Client, arguments: Import) -> Result<(), Failure> {
    let mut interrupts = Interrupts::watch()?;
    let looked = interrupts.or(look_at(&arguments)).await;
    let image = looked.map_err(|failure| nothing_made("import", failure))?;
    let unit = arguments.behaviour.size_unit();
    let fitting = image.bytes.max(VOLUME_BYTES_MIN).next_multiple_of(unit);
    let bytes = arguments.size.map_or(fitting, |size| size.0);
    if bytes < image.bytes {
        return Err(Failure::misused(format!(
            "--size {bytes}: the image has {} bytes: nothing of it is cut off; give that or more",
            image.bytes
        )));
    }
    check_volume_bytes(bytes).map_err(Failure::misused)?;
    let backend = arguments.backend.as_deref().map(absolute_backend);
    let backend = backend.transpose()?;
    refuse_own_places(&arguments, backend.as_deref())?;
    // What becomes of the backend if the import does not end.
    let undo_data = match (&backend, arguments.overwrite) {
        (None, _) => "keep_data=false",
        (Some(_), false) => "remove_data=true",
        (Some(_), true) => "keep_data=true",
    };
    let (name, format, image_bytes) = (&arguments.name, image.format, image.bytes);
    let request = CreateVolume {
        must_be_new: !arguments.overwrite,
        backend_overwrite: arguments.overwrite,
        ..arguments.behaviour.of(name, Some(bytes), backend)?
    };
    let at = (name.as_str(), "/v1/volumes");
    let (made, interrupt) = make(client, at, &request, &mut interrupts).await?;
    let copied = match interrupt {
        Some(failure) => Err(failure),
        None => interrupts.or(fill(client, &made, image)).await,
    };
    let copied = match copied {
        Ok(copied) => copied,
        Err(failure) if arguments.keep => {
            return Err(Failure {
                message: format!(
                    "import has not ended: volume {name}: {}: it is kept as far as it came",
                    failure.message
                ),
                ..failure
            });
        }
        Err(failure) => return Err(undo(client, &made, undo_data, failure, &mut interrupts).await),
    };
    let summary = Summary::new(name.as_str(), &arguments.file, format, image_bytes, &copied);
    let sentence = format!(
        "volume {name} is imported from {}: {}",
        arguments.file.display(),
        summary.figures()
    );
    summary.say(arguments.json, false, &sentence)
}

async fn look_at(arguments: &Import) -> Result<Image, Failure> {
    if arguments.file.as_os_str() == STREAM {
        from_stream(arguments).await
    } else {
        from_file(arguments).await
    }
}

/// An image is not written over itself while it is read.
fn refuse_own_places(arguments: &Import, backend: Option<&str>) -> Result<(), Failure> {
    let image = fs::metadata(&arguments.file).ok();
    let is_image = |path: &Path| {
        let found = fs::metadata(path).ok().zip(image.as_ref());
        found.is_some_and(|(found, image)| is_same(&found, image))
    };
    let url = backend.and_then(|url| BackendUrl::parse(url).ok());
    let at_backend = url.as_ref().and_then(|url| url.place.path());
    if let (Some(url), true) = (backend, at_backend.is_some_and(is_image)) {
        return Err(Failure::misused(format!(
            "backend {url}: it is the image itself: name another place, or, if it is raw, take it into use as it \
             is with `hdcs volume create {} --backend {url}`",
            arguments.name
        )));
    }
    let taken = arguments.behaviour.places().find(|path| is_image(path));
    taken.map_or(Ok(()), |path| {
        Err(Failure::misused(format!(
            "{}: it is the image itself: name another place for the volume's log or local store",
            path.display()
        )))
    })
}

/// Copy the image into the new volume, and make it durable.
async fn fill(client: &Client, volume: &Volume, image: Image) -> Result<Copied, Failure> {
    let to = endpoint(client, &volume.name).await?;
    let at = to.clone();
    let connected = apart(move || {
        let mut connection = at.connect()?;
        if connection.is_read_only() {
            return Err(Failure::failed("its backend can only be read"));
        }
        let is_zero = is_zero(&mut connection)?;
        Ok((connection, is_zero))
    });
    let (mut connection, is_zero) = connected.await?;
    let target = Target::Nbd(to, is_zero);
    let copied = copy(image.source, target, image.bytes, "imported").await?;
    drop(image.served);
    let (mut at, end) = (image.bytes, volume.bytes);
    let finished = apart(move || {
        while !is_zero && at < end {
            let bytes = (end - at).min(STATUS_BYTES);
            connection.write_zeroes(at, bytes as u32)?;
            at += bytes;
        }
        connection.flush()
    });
    finished.await?;
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

/// Remove the volume of an import that did not end, and of its backend what `data` says: see [`remove`].
async fn undo(
    client: &Client,
    volume: &Volume,
    data: &str,
    failure: Failure,
    interrupts: &mut Interrupts,
) -> Failure {
    let name = &volume.name;
    let end = match remove(client, name, data, interrupts).await {
        Ok(Deleted { data: None, .. }) => "the volume is removed again".to_owned(),
        Ok(Deleted { data: Some(at), .. }) if data == "keep_data=true" => format!(
            "the volume is removed again; {at}, which was there before, stays, overwritten as far as the import \
             came"
        ),
        Ok(Deleted { data: Some(at), .. }) => {
            format!("the volume is removed again, but what it has at {at} is left: remove that")
        }
        Err(left) => format!(
            "the volume is not removed again: {}: delete it",
            left.message
        ),
    };
    Failure {
        message: format!(
            "import has not ended: volume {name}: {}; {end}",
            failure.message
        ),
        ..failure
    }
}

async fn from_stream(arguments: &Import) -> Result<Image, Failure> {
    let Some(size) = arguments.size else {
        return Err(Failure::misused(
            "standard input does not tell its length: give it as --size",
        ));
    };
    let begin = apart(move || {
        let mut begin = Vec::new();
        io::stdin()
            .lock()
            .take((MAGIC_BYTES as u64).min(size.0))
            .read_to_end(&mut begin)
            .map_err(|error| Failure::failed(format!("standard input: {error}")))?;
        Ok(begin)
    });
    let begin = begin.await?;
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

/// A file, its length and how it begins. Blocks.
fn open(path: PathBuf, name: String) -> Result<(File, u64, Vec<u8>), Failure> {
    let failed = |error: io::Error| Failure::failed(format!("{name}: {error}"));
    let found = fs::metadata(&path).map_err(failed)?;
    // A pipe would not even open before somebody writes to it.
    if !found.is_file() && !found.file_type().is_block_device() {
        return Err(Failure::misused(format!(
            "{name}: it is neither a file nor a block device; a pipe goes to `-`"
        )));
    }
    let mut file = File::open(&path).map_err(failed)?;
    let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
    file.rewind().map_err(failed)?;
    let mut begin = Vec::new();
    (&mut file)
        .take(MAGIC_BYTES as u64)
        .read_to_end(&mut begin)
        .map_err(failed)?;
    Ok((file, length, begin))
}

async fn from_file(arguments: &Import) -> Result<Image, Failure> {
    let path = std::path::absolute(&arguments.file)
        .map_err(|error| Failure::failed(format!("{}: {error}", arguments.file.display())))?;
    let name = arguments.file.display().to_string();
    let (at, named) = (path.clone(), name.clone());
    let (file, length, begin) = apart(move || open(at, named)).await?;
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
            let bytes = qcow2::size(&path).await?;
            let served = qcow2::Served::start(&path, false).await?;
            Ok(Image {
                format: Format::Qcow2,
                bytes,
                source: Source::Nbd(served.endpoint()),
                served: Some(served),
            })
        }
    }
}

/// The format of a file that begins so.
fn format(given: GivenFormat, begin: &[u8], name: &str) -> Result<Format, Failure> {
    match given {
        GivenFormat::Raw => return Ok(Format::Raw),
        GivenFormat::Qcow2 => return Ok(Format::Qcow2),
        GivenFormat::Auto => {}
    }
    match image_format::of(begin) {
        Some(QCOW2) => Ok(Format::Qcow2),
        Some(what) => Err(Failure::misused(format!(
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
        let packed = b"\x1f\x8b\x08";
        assert!(auto(packed).unwrap_err().message.contains("gzip"));
        assert_eq!(format(GivenFormat::Raw, packed, "f").unwrap(), Format::Raw);
        assert_eq!(format(GivenFormat::Qcow2, b"", "f").unwrap(), Format::Qcow2);
    }
}
