//! `hdcs volume export` and `hdcs volume import`: whole images, raw or qcow2, through the running node.
//!
//! Both are clients of the node's NBD socket, so they see what every client sees, the log included.
//!
//! 1. What is half made never looks whole: an export is written under another name until it is complete, and the
//!    volume of an import that did not end is removed again.
//! 2. Only what a command has made itself is removed, whatever ends it: an error, Ctrl-C or SIGTERM. Files and
//!    programs go when whatever holds them is dropped; volumes are deleted by the node.

mod copy;
mod export;
mod import;
mod nbd;
mod qcow2;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use hdcs_api::{Deleted, Status, Volume};
use hyper::Method;
use serde::Serialize;

use self::copy::Copied;
pub(crate) use self::export::{Export, export};
pub(crate) use self::import::{Import, import};
use self::nbd::Endpoint;
use super::client::Client;
use super::interrupts::Interrupts;
use super::size::show;
use super::{Failure, output};

/// Standard input or output in place of a file.
const STREAM: &str = "-";

/// How an image is stored in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    /// Byte for byte
    Raw,
    /// QEMU's format; needs qemu-utils
    Qcow2,
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
                output::note(&text);
            }
            (false, false) => output::line(sentence),
            (false, true) => output::note(sentence),
        }
        Ok(())
    }
}

/// The unix socket on which the node serves its volumes.
pub(crate) async fn nbd_socket(client: &Client) -> Result<PathBuf, Failure> {
    let status: Status = client.get("/v1/status").await?;
    let mut sockets = (status.nbd_listen.iter()).filter_map(|listen| listen.strip_prefix("unix:"));
    let socket = sockets.next().ok_or_else(|| {
        Failure::failed(
            "the node serves no unix socket, which this command goes through: nbd_listen: add \"unix:nbd.sock\" \
             to it and restart the node",
        )
    })?;
    Ok(socket.into())
}

/// Where the node serves a volume on it.
async fn endpoint(client: &Client, volume: &str) -> Result<Endpoint, Failure> {
    Ok(Endpoint {
        socket: nbd_socket(client).await?,
        export: volume.to_owned(),
        name: format!("volume {volume}").into(),
    })
}

/// Have a volume made. The node goes on with that whatever becomes of this process, so an interrupt is noted and
/// its end waited for: then the volume comes with the failure that it is to be removed with.
async fn make(
    client: &Client,
    (name, path): (&str, &str),
    request: &impl Serialize,
    interrupts: &mut Interrupts,
) -> Result<(Volume, Option<Failure>), Failure> {
    let making = client.request(Method::POST, path, request);
    tokio::pin!(making);
    tokio::select! {
        biased;
        made = &mut making => return Ok((made?, None)),
        () = interrupts.wait() => {}
    }
    output::note(&format!(
        "interrupted: volume {name} is being made, and is removed then; once more leaves it behind"
    ));
    tokio::select! {
        biased;
        made = &mut making => match made {
            Ok(volume) => Ok((volume, Some(Failure::interrupted("interrupted")))),
            Err(error) => Err(Failure::interrupted(format!(
                "interrupted: volume {name} was not made: {}",
                Failure::from(error).message
            ))),
        },
        () = interrupts.wait() => Err(Failure::interrupted(format!(
            "interrupted: volume {name} is still being made: delete it once `hdcs volume list` shows it"
        ))),
    }
}

/// Delete a volume that this command has made, with what is only in its log. An interrupt ends the wait for that,
/// not the deletion. `data` is what else becomes of it: a field of the API's options.
async fn remove(
    client: &Client,
    name: &str,
    data: &str,
    interrupts: &mut Interrupts,
) -> Result<Deleted, Failure> {
    let path = format!("/v1/volumes/{name}?discard_dirty=true&{data}");
    let deleting = async { Ok(client.request(Method::DELETE, &path, &()).await?) };
    let deleted = interrupts.or(deleting).await;
    deleted.map_err(|failure| {
        if !failure.is_interrupt() {
            return failure;
        }
        Failure::interrupted("interrupted again, while the node was deleting it")
    })
}

/// Say of an interrupt that it came before there was anything to undo.
fn nothing_made(what: &str, failure: Failure) -> Failure {
    if !failure.is_interrupt() {
        return failure;
    }
    Failure::interrupted(format!("{what} is interrupted: nothing was made"))
}

/// Whether two paths lead to the same file or block device.
fn is_same(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    let is_device = |found: &fs::Metadata| found.file_type().is_block_device();
    if is_device(one) && is_device(other) {
        return one.rdev() == other.rdev();
    }
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}
