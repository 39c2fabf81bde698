//! `hdcs volume …`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use hdcs_api::groups::WhenShort;
use hdcs_api::value::Value;
use hdcs_api::{
    Auto, CreateVolume, Deleted, DetachOptions, Detached, KeyPlace, Mode, OpenVolume, OpenedVolume,
    ResizeVolume, SetVolume, ShardChoice, Volume, VolumeRange,
};
use hdcs_backend::url::file_url;
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_server::catalogue::{VolumeName, check_volume_bytes};
use hyper::Method;

use super::client::Client;
use super::group::{self, GroupArguments};
use super::size::{Size, show};
use super::{Failure, attach, flush, heat, output, pin, policy, scrub, snapshot, transfer};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a volume; it is an NBD export of its name at once
    Create(Box<Create>),
    /// List every volume
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show one volume in full
    Show {
        /// Name of the volume
        name: VolumeName,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Change settings of one volume: key=value, or key=default for the node's value. A change of policy is
    /// waited for, with progress; Ctrl-C leaves it going on
    Set {
        /// Name of the volume
        name: VolumeName,
        /// Settings, as in the configuration file
        #[arg(value_name = "KEY=VALUE", required_unless_present = "shard", value_parser = parse_setting)]
        settings: Vec<(String, Value)>,
        /// Move it to this thread of the data path, while its clients go on, and open it there from now on; `auto`: it
        /// stays where it is, and goes where there is least to do when it is opened again. A volume that is not open goes
        /// there when it is opened
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_shard)]
        shard: Option<ShardChoice>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Change the size of a volume; smaller only with --shrink, after it is flushed
    #[command(override_usage = "hdcs volume resize [OPTIONS] <NAME> <SIZE|--size <SIZE>>")]
    Resize {
        /// Name of the volume
        name: VolumeName,
        #[command(flatten)]
        size: NewSize,
        /// What lies beyond the new size may be lost
        #[arg(long)]
        shrink: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Write everything dirty to the backend, with progress; Ctrl-C cancels it
    Flush(flush::Arguments),
    /// Read and verify everything that a volume has here and in its backend, with progress; Ctrl-C cancels it
    Scrub(scrub::Arguments),
    /// Make, list or delete snapshots of a volume
    Snapshot(snapshot::Arguments),
    /// Make a volume that begins as a snapshot of another one, or as it is now, and shares its data
    Clone(Box<snapshot::Clone>),
    /// Write the image of a volume to a file or a pipe, raw or qcow2, with progress; Ctrl-C cancels it
    Export(transfer::Export),
    /// Make a volume of an image, raw or qcow2, from a file or a pipe, with progress; Ctrl-C cancels it
    Import(Box<transfer::Import>),
    /// Drop clean data from the read cache
    Evict(Range),
    /// Bring data into the read cache
    Promote(Range),
    /// Keep a range in the SSD tier: fill it, with progress, and do not evict it; Ctrl-C leaves it going on
    Pin(pin::Arguments),
    /// Bring a range into the SSD tier in the background, beside the clients; `volume show` says how far it is
    Warm(pin::WarmArguments),
    /// Show what of a volume is hot in its cache, or save that for a warm-up
    Heat(heat::Arguments),
    /// Leave a range to eviction again
    Unpin(pin::UnpinArguments),
    /// Open a volume that could not be opened
    Open(Open),
    /// Have this node, which has a copy of the volume's log, serve the volume in the place of the node that does
    /// (experimental)
    Takeover(group::Takeover),
    /// Wrap the data key of an encrypted volume with another key; the volume serves on
    RotateKey {
        /// Name of the volume
        name: VolumeName,
        #[command(flatten)]
        key: KeySource,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a volume a block device of this host, by the kernel's NBD client. `nbd-client -d DEVICE` ends that, and not
    /// `detach`, which makes the node forget the volume. Requests fail when the node is gone, or has not answered for
    /// 600 seconds; then unmount, end it, and attach it again
    Attach(attach::Arguments),
    /// Let the node forget a volume, after its dirty data is written to the backend; backend and log stay
    Detach {
        /// Name of the volume
        name: VolumeName,
        /// Leave dirty data behind in the log instead of writing it to the backend first
        #[arg(long)]
        discard_dirty: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Delete a volume, after its dirty data is written to the backend. A file or image of yours stays there, with
    /// its snapshots. A backing file that HDCS made, because no --backend was given, is deleted, and so are the
    /// objects of a clone on S3 or HDFS, unless --keep-data is given
    Delete {
        /// Name of the volume
        name: VolumeName,
        /// Lose dirty data instead of writing it to the backend first
        #[arg(long)]
        discard_dirty: bool,
        /// Keep the backing file that HDCS made (one of yours is always kept), and a clone; needed
        /// if it has snapshots or clones
        #[arg(long)]
        keep_data: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Create {
    /// Name of the volume: letters, digits, `.`, `_`, `-`
    name: VolumeName,
    /// Size, such as 10G; can be left out if the backend exists
    #[arg(long, value_parser = parse_volume_size)]
    size: Option<Size>,
    /// Where cold data lives, such as file:PATH or dir:PATH; read-only if it is a snapshot, rbd:POOL/IMAGE@SNAP or
    /// file:PATH.hdcs-snap/SNAP
    /// [default: a sparse file in the data directory]
    #[arg(long, value_name = "URL")]
    backend: Option<String>,
    #[command(flatten)]
    behaviour: Behaviour,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a new volume is, whatever it begins with: `create`, `import` and `clone` take the same.
#[derive(Args, Debug, Default)]
pub(crate) struct Behaviour {
    /// Where the data lives: in the backend (`cache`), or in a local store (`storage`)
    #[arg(long, default_value = "cache")]
    mode: Mode,
    /// In storage mode: file or block device for the local store [default: a file in the data directory]
    #[arg(long, value_name = "PATH")]
    store_path: Option<PathBuf>,
    /// Take a block device for the local store although it holds something
    #[arg(long)]
    store_overwrite: bool,
    /// What the cache does with writes and reads [default: the node's `policy`]
    #[arg(long, value_parser = ["write-back", "write-through", "write-around", "read-only", "pass-through"])]
    policy: Option<String>,
    #[command(flatten)]
    copies: GroupArguments,
    /// When a write counts as durable [default: the node's `persist`]
    #[arg(long, value_parser = ["on-write", "on-flush", "auto"])]
    persist: Option<String>,
    /// How data is compressed in the write log, the SSD tier and objects [default: the node's `compression`]
    #[arg(long, value_name = "METHOD", value_parser = ["off", "lz4", "zstd"])]
    compress: Option<String>,
    /// Clients that may open it over TCP, by the names in their certificates, or `any` [default: the node's `allow`]
    #[arg(long, value_name = "NAME[,NAME…]")]
    allow: Option<String>,
    /// Size of the write log [default: the node's `log_size_mib`]
    #[arg(long, value_name = "SIZE")]
    log_size: Option<Size>,
    /// File or block device for the write log [default: under the node's `log_path`]
    #[arg(long, value_name = "PATH")]
    log_path: Option<PathBuf>,
    /// Take a block device for the log although it holds something
    #[arg(long)]
    log_overwrite: bool,
    #[command(flatten)]
    encryption: Encrypt,
    /// Thread of the data path (shard) that it is opened on, now and at each start [default: wherever there is least to do]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_shard_number)]
    shard: Option<u64>,
    /// Settings that differ from the node's
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = parse_setting)]
    settings: Vec<(String, Value)>,
}

/// Whether a new volume is encrypted.
#[derive(Args, Debug, Default)]
pub(crate) struct Encrypt {
    /// Encrypt what leaves memory for the log, the local store, the SSD tier and objects; needs a key
    #[arg(long)]
    encrypt: bool,
    #[command(flatten)]
    key: KeySource,
}

/// Where a key comes from.
#[derive(Args, Debug, Default)]
pub(crate) struct KeySource {
    /// File with the key: 32 bytes, as they are, in hexadecimal digits or in base64
    #[arg(long, value_name = "PATH", conflicts_with = "key_command")]
    key_file: Option<PathBuf>,
    /// Command that prints the key; words between blanks, run by the daemon without a shell
    #[arg(long, value_name = "COMMAND")]
    key_command: Option<String>,
}

impl KeySource {
    fn place(self) -> Result<Option<KeyPlace>, Failure> {
        let key_file = self.key_file.as_deref().map(absolute).transpose()?;
        let is_given = key_file.is_some() || self.key_command.is_some();
        Ok(is_given.then_some(KeyPlace {
            key_file,
            key_command: self.key_command,
        }))
    }
}

impl Encrypt {
    fn place(self) -> Result<Option<KeyPlace>, Failure> {
        match (self.encrypt, self.key.place()?) {
            (true, None) => Err(Failure::misused(
                "--encrypt needs a key: give --key-file or --key-command (make one with `openssl rand \
                 -hex 32`)",
            )),
            (false, Some(_)) => Err(Failure::misused(
                "a key is for a volume that is encrypted: give --encrypt too",
            )),
            (_, place) => Ok(place),
        }
    }
}

impl Behaviour {
    /// What the volume's size is a multiple of.
    pub(crate) fn size_unit(&self) -> u64 {
        match self.mode {
            Mode::Cache => SECTOR_BYTES as u64,
            Mode::Storage => BLOCK_BYTES as u64,
        }
    }

    /// The places, files or devices, that it names for what the volume has on this node.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Path> {
        [&self.log_path, &self.store_path]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
    }

    /// The request for a volume that behaves so.
    pub(crate) fn of(
        self,
        name: &VolumeName,
        bytes: Option<u64>,
        backend: Option<String>,
    ) -> Result<CreateVolume, Failure> {
        let mut settings: BTreeMap<String, Value> = self.settings.into_iter().collect();
        let named = [
            ("policy", self.policy),
            ("persist", self.persist),
            ("compression", self.compress),
            ("allow", self.allow),
        ];
        for (key, value) in named {
            settings.extend(value.map(|value| (key.to_owned(), Value::Text(value))));
        }
        Ok(CreateVolume {
            name: name.to_string(),
            bytes,
            backend,
            must_be_new: false,
            backend_overwrite: false,
            log_bytes: self.log_size.map(|size| size.0),
            log_path: self.log_path.as_deref().map(absolute).transpose()?,
            log_overwrite: self.log_overwrite,
            encryption: self.encryption.place()?,
            mode: self.mode,
            store_path: self.store_path.as_deref().map(absolute).transpose()?,
            store_overwrite: self.store_overwrite,
            shard: self.shard,
            group: self.copies.request()?,
            settings,
        })
    }
}

/// The size that a volume is to have, said in one of two ways.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub(crate) struct NewSize {
    /// The new size, such as 20G
    #[arg(value_name = "SIZE", value_parser = parse_volume_size)]
    plain: Option<Size>,
    /// The new size, as an option
    #[arg(long = "size", value_name = "SIZE", value_parser = parse_volume_size)]
    named: Option<Size>,
}

impl NewSize {
    fn bytes(&self) -> u64 {
        let given = self.plain.or(self.named);
        given.expect("the command line has one of them").0
    }
}

#[derive(Args, Debug)]
pub(crate) struct Open {
    /// Name of the volume
    name: VolumeName,
    /// If its write log is lost, open it with a new one from its backend, or in storage mode its local store; if its
    /// local store is lost, open it from its backend alone, with a new one and a new write log
    #[arg(long)]
    discard_dirty: bool,
    /// File or block device for the new log [default: the place of the lost one]
    #[arg(long, value_name = "PATH")]
    log_path: Option<PathBuf>,
    /// Size of the new log [default: that of the lost one]
    #[arg(long, value_name = "SIZE")]
    log_size: Option<Size>,
    /// Take a block device for the new log although it holds something
    #[arg(long)]
    log_overwrite: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Range {
    /// Name of the volume
    pub(super) name: VolumeName,
    /// First byte
    #[arg(long, default_value = "0")]
    offset: Size,
    /// How much [default: to the end]
    #[arg(long)]
    length: Option<Size>,
}

pub(super) fn parse_volume_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error| format!("{error}"))?;
    check_volume_bytes(size.0)?;
    Ok(size)
}

pub(super) fn parse_setting(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or("write KEY=VALUE, such as persist=on-write")?;
    Ok((key.to_owned(), Value::from_typed(value)))
}

fn parse_shard(text: &str) -> Result<ShardChoice, String> {
    if text == "auto" {
        return Ok(ShardChoice::Auto(Auto::Auto));
    }
    let number = text.parse().map(ShardChoice::On);
    number.map_err(|_| "`--shard` takes the number of a shard, from 0, or `auto`".to_owned())
}

fn parse_shard_number(text: &str) -> Result<u64, String> {
    let number = text.parse();
    number.map_err(|_| {
        "`--shard` takes the number of a shard, from 0; without it the node chooses".to_owned()
    })
}

/// Turn a relative `file:` or `dir:` URL into an absolute one: the daemon has another working directory.
pub(super) fn absolute_backend(url: &str) -> Result<String, Failure> {
    match url.split_once(':') {
        Some((scheme @ ("file" | "dir"), rest)) if !rest.is_empty() && !rest.starts_with('/') => {
            let here = std::env::current_dir()
                .map_err(|error| Failure::failed(format!("working directory: {error}")))?;
            let here = file_url(&here);
            let here = here.strip_prefix("file:").unwrap_or(&here);
            // The root ends with the separator already.
            let here = here.trim_end_matches('/');
            Ok(format!("{scheme}:{here}/{rest}"))
        }
        _ => Ok(url.to_owned()),
    }
}

pub(super) fn absolute(path: &Path) -> Result<String, Failure> {
    let absolute = std::path::absolute(path)
        .map_err(|error| Failure::misused(format!("path {}: {error}", path.display())))?;
    absolute.into_os_string().into_string().map_err(|path| {
        Failure::misused(format!(
            "path {}: it is not UTF-8: choose another name",
            path.display()
        ))
    })
}

/// Path of a volume in the API. A name has no character that would need escaping.
pub(super) fn api_path(name: &VolumeName) -> String {
    format!("/v1/volumes/{name}")
}

pub(crate) async fn run(client: &Client, command: Command) -> Result<(), Failure> {
    match command {
        Command::Create(arguments) => create(client, *arguments).await,
        Command::List { json } => {
            let volumes: Vec<Volume> = client.get("/v1/volumes").await?;
            if json {
                return output::json(&volumes);
            }
            output::volumes(&volumes);
            Ok(())
        }
        Command::Show { name, json } => {
            let volume: Volume = client.get(&api_path(&name)).await?;
            if json {
                return output::json(&volume);
            }
            output::volume(&volume);
            Ok(())
        }
        Command::Set {
            name,
            settings,
            shard,
            json,
        } => {
            let is_default = |value: &Value| *value == Value::Text("default".to_owned());
            let settings = settings
                .into_iter()
                .map(|(key, value)| (key, Some(value).filter(|value| !is_default(value))))
                .collect();
            let path = api_path(&name);
            let request = SetVolume { settings, shard };
            let volume: Volume = client.request(Method::PATCH, &path, &request).await?;
            let volume = policy::settled(client, &name, volume).await?;
            said(json, &volume, || match shard {
                Some(ShardChoice::On(shard)) if volume.counters.is_none() => format!(
                    "volume {name} is not open, and goes to shard {shard} when it is opened"
                ),
                Some(ShardChoice::On(shard)) => format!("volume {name} is on shard {shard}"),
                Some(ShardChoice::Auto(_)) if volume.counters.is_none() => format!(
                    "volume {name} is not open, and goes where there is least to do when it is opened"
                ),
                Some(ShardChoice::Auto(_)) => format!(
                    "volume {name} stays where it is, and goes where there is least to do when it is opened again"
                ),
                None => format!("volume {name} is changed"),
            })
        }
        Command::Resize {
            name,
            size,
            shrink,
            json,
        } => {
            let path = format!("{}/resize", api_path(&name));
            let request = ResizeVolume {
                bytes: size.bytes(),
                shrink,
            };
            let volume: Volume = client.request(Method::POST, &path, &request).await?;
            said(json, &volume, || {
                format!("volume {name} has {} now", show(volume.bytes))
            })
        }
        Command::Flush(arguments) => flush::run(client, &arguments).await,
        Command::Scrub(arguments) => scrub::run(client, &arguments).await,
        Command::Snapshot(arguments) => snapshot::run(client, arguments).await,
        Command::Clone(arguments) => snapshot::clone(client, *arguments).await,
        Command::Export(arguments) => transfer::export(client, arguments).await,
        Command::Import(arguments) => transfer::import(client, *arguments).await,
        Command::Evict(range) => move_range(client, range, "evict").await,
        Command::Promote(range) => move_range(client, range, "promote").await,
        Command::Pin(arguments) => pin::pin(client, arguments).await,
        Command::Warm(arguments) => pin::warm(client, arguments).await,
        Command::Heat(arguments) => heat::run(client, &arguments).await,
        Command::Unpin(arguments) => pin::unpin(client, arguments).await,
        Command::Open(arguments) => open(client, arguments).await,
        Command::Takeover(arguments) => group::take_over(client, arguments).await,
        Command::RotateKey { name, key, json } => rotate_key(client, &name, key, json).await,
        Command::Attach(arguments) => attach::run(client, &arguments).await,
        Command::Detach {
            name,
            discard_dirty,
            json,
        } => {
            let path = format!("{}/detach", api_path(&name));
            let options = DetachOptions { discard_dirty };
            let detached: Detached = client.request(Method::POST, &path, &options).await?;
            said(json, &detached, || {
                let left = match detached.dirty_bytes_left {
                    0 => String::new(),
                    bytes => format!(", up to {bytes} dirty bytes are left in its log"),
                };
                format!(
                    "volume {name} is detached{left}: backend {}, log {}, directory {}",
                    detached.backend, detached.log, detached.directory
                )
            })
        }
        Command::Delete {
            name,
            discard_dirty,
            keep_data,
            json,
        } => {
            let path = format!(
                "{}?discard_dirty={discard_dirty}&keep_data={keep_data}",
                api_path(&name)
            );
            let deleted: Deleted = client.request(Method::DELETE, &path, &()).await?;
            said(json, &deleted, || {
                let lost = match deleted.discarded_dirty_bytes {
                    0 => String::new(),
                    bytes => format!(", up to {bytes} dirty bytes were discarded"),
                };
                let kept = deleted.data.as_ref().map_or(String::new(), |data| {
                    format!(", its data is kept at {data}")
                });
                let trouble = deleted.data_trouble.as_ref();
                let trouble = trouble.map_or(String::new(), |trouble| format!("; {trouble}"));
                format!("volume {name} is deleted{lost}{kept}{trouble}")
            })
        }
    }
}

pub(super) fn said<T: serde::Serialize>(
    json: bool,
    value: &T,
    sentence: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if json {
        return output::json(value);
    }
    output::line(&sentence());
    Ok(())
}

async fn create(client: &Client, arguments: Create) -> Result<(), Failure> {
    let backend = arguments.backend.as_deref().map(absolute_backend);
    let is_twice_here = backend.is_none() && arguments.behaviour.mode == Mode::Storage;
    let bytes = arguments.size.map(|size| size.0);
    let request = (arguments.behaviour).of(&arguments.name, bytes, backend.transpose()?)?;
    let volume: Volume = client
        .request(Method::POST, "/v1/volumes", &request)
        .await?;
    let fails_short =
        (request.group.as_ref()).is_some_and(|group| group.when_short == WhenShort::Error);
    let is_short = fails_short && volume.state == "read-only";
    let short = volume.reason.as_ref().filter(|_| is_short);
    let short = short.map_or(String::new(), |why| {
        format!("\nwrites fail at present: {why}")
    });
    said(arguments.json, &volume, || {
        format!(
            "volume {} is created: {}, {}, backend {}{}",
            volume.name,
            show(volume.bytes),
            output::state(&volume),
            volume.backend,
            if is_twice_here {
                "\nwhat is tiered out is kept twice in the data directory; to keep it elsewhere, give --backend"
            } else {
                ""
            }
        ) + &short
    })
}

async fn rotate_key(
    client: &Client,
    name: &VolumeName,
    key: KeySource,
    json: bool,
) -> Result<(), Failure> {
    let place = key.place()?;
    let place = place.ok_or_else(|| {
        Failure::misused("the new key: give --key-file or --key-command".to_owned())
    })?;
    let path = format!("{}/rotate-key", api_path(name));
    let volume: Volume = client.request(Method::POST, &path, &place).await?;
    said(json, &volume, || {
        let key = volume.encryption.as_ref();
        format!(
            "volume {name}: its data key is wrapped with key {} now; the old one is not needed here any \
             more",
            key.map_or("", |key| &key.wrapped_with)
        )
    })
}

async fn open(client: &Client, arguments: Open) -> Result<(), Failure> {
    let request = OpenVolume {
        discard_dirty: arguments.discard_dirty,
        log_path: arguments.log_path.as_deref().map(absolute).transpose()?,
        log_bytes: arguments.log_size.map(|size| size.0),
        log_overwrite: arguments.log_overwrite,
    };
    let path = format!("{}/open", api_path(&arguments.name));
    let opened: OpenedVolume = client.request(Method::POST, &path, &request).await?;
    said(arguments.json, &opened, || {
        let lost = opened.lost.as_ref().map_or(String::new(), |lost| {
            let what = if lost.is_home { "local store" } else { "log" };
            let kept = [("local store", &lost.home_kept), ("log", &lost.log_kept)];
            let kept = kept.into_iter().filter_map(|(what, path)| {
                let path = path.as_ref()?;
                Some(format!(
                    "; what was in the {what}'s place is kept at {path}"
                ))
            });
            let kept: String = kept.collect();
            format!(", without its {what}, which is lost: {}{kept}", lost.said)
        });
        format!("volume {} is open{lost}", opened.volume.name)
    })
}

impl Range {
    /// Ask for something to be done to the range.
    pub(super) async fn ask<T: serde::de::DeserializeOwned>(
        &self,
        client: &Client,
        what: &str,
    ) -> Result<T, Failure> {
        let path = format!("{}/{what}", api_path(&self.name));
        let request = VolumeRange {
            offset: self.offset.0,
            bytes: self.length.map(|size| size.0),
        };
        Ok(client.request(Method::POST, &path, &request).await?)
    }
}

async fn move_range(client: &Client, range: Range, what: &str) -> Result<(), Failure> {
    let () = range.ask(client, what).await?;
    output::line(&format!("volume {}: {what} is done", range.name));
    Ok(())
}
