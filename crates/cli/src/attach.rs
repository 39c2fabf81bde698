//! `hdcs volume attach`: a volume as a block device, through the kernel's NBD client.
//!
//! The kernel's driver is given a connection to the node's unix socket by `nbd-client`, which is maintained with it. What
//! the kernel or the host lacks for that is said, with what to use in its place.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use hdcs_api::Volume;
use hdcs_server::catalogue::VolumeName;
use serde::Serialize;

use super::client::Client;
use super::size::show;
use super::transfer::nbd_socket;
use super::volume::api_path;
use super::{Failure, output};

/// Where the kernel tells of its block devices.
const BLOCK: &str = "/sys/block";
/// Seconds that the node may leave a request unanswered before the kernel gives the device up: longer than a backend that
/// is away for a while, and not for ever.
const TIMEOUT_S: u32 = 600;

#[derive(Args, Debug)]
pub struct Arguments {
    /// Name of the volume
    name: VolumeName,
    /// The device to use [default: the first NBD device that is free]
    #[arg(long, value_name = "/dev/nbdN")]
    device: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What was attached.
#[derive(Debug, Serialize)]
struct Attached {
    volume: String,
    device: PathBuf,
    bytes: u64,
}

/// Attach a volume.
pub async fn run(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let name = arguments.name.as_str();
    let volume: Volume = client.get(&api_path(&arguments.name)).await?;
    if volume.connections > 0 {
        output::note(&format!(
            "volume {name} has {} clients already: a file system that two of them mount at once is destroyed",
            volume.connections
        ));
    }
    let socket = nbd_socket(client).await?;
    let instead = instead(name, &socket);
    // SAFETY: geteuid touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        let why = format!("a block device needs root: run this command as root, or {instead}");
        return Err(Failure::failed(why));
    }
    load_driver(&instead)?;
    let device = match &arguments.device {
        Some(device) => {
            check_free(Path::new(BLOCK), device)?;
            device.clone()
        }
        None => free_device(Path::new(BLOCK)).ok_or_else(|| {
            Failure::failed(
                "every NBD device is in use: detach one with `nbd-client -d /dev/nbdN`, or load the driver with more: \
                 modprobe nbd nbds_max=64",
            )
        })?,
    };
    connect(name, &socket, &device, &instead)?;
    let bytes = size(Path::new(BLOCK), &device);
    if bytes != Some(volume.bytes) {
        disconnect(&device);
        return Err(Failure::failed(format!(
            "{} has {} bytes and not the {} of volume {name}; it is detached again: look at the kernel's log (dmesg)",
            device.display(),
            bytes.unwrap_or(0),
            volume.bytes
        )));
    }
    let attached = Attached {
        volume: name.to_owned(),
        device,
        bytes: volume.bytes,
    };
    if arguments.json {
        return output::json(&attached);
    }
    let device = attached.device.display();
    output::line(&format!(
        "volume {name} is {device}: {}; unmount it and run `nbd-client -d {device}` to end that",
        show(volume.bytes)
    ));
    Ok(())
}

/// What a host can use that has no block device for it.
fn instead(name: &str, socket: &Path) -> String {
    let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
    format!(
        "use the volume without one: `nbdfuse {name}.raw '{uri}'` shows it as a file, QEMU opens '{uri}', and nbdcopy and \
         fio (ioengine=nbd) too"
    )
}

/// See that the kernel's driver is there.
fn load_driver(instead: &str) -> Result<(), Failure> {
    let is_there = || Path::new("/sys/module/nbd").exists();
    if is_there() {
        return Ok(());
    }
    // What it says is of no use where there is no such module.
    let _ = Command::new("modprobe").arg("nbd").output();
    if is_there() {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "this kernel has no NBD driver (`modprobe nbd` did not bring it): {instead}"
    )))
}

/// The name of a device below `/sys/block`, if it is one of the driver's.
fn nbd_name(device: &Path) -> Option<&str> {
    let name = device.strip_prefix("/dev").ok()?.to_str()?;
    let number = name.strip_prefix("nbd")?;
    number.parse::<u32>().ok().map(|_| name)
}

/// Whether a device has no connection: one that has is of a process, or of a size.
fn is_free(block: &Path, name: &str) -> bool {
    let device = block.join(name);
    let size = fs::read_to_string(device.join("size"));
    let is_empty = size.is_ok_and(|size| size.trim() == "0");
    is_empty && !device.join("pid").exists()
}

fn check_free(block: &Path, device: &Path) -> Result<(), Failure> {
    let Some(name) = nbd_name(device) else {
        let why = format!("{} is no NBD device: give /dev/nbdN", device.display());
        return Err(Failure::misused(why));
    };
    if is_free(block, name) {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "{} is in use, or not there: leave out --device, or end what uses it with `nbd-client -d {}`",
        device.display(),
        device.display()
    )))
}

fn free_device(block: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(block).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let numbers = names.filter_map(|name| name.strip_prefix("nbd")?.parse::<u32>().ok());
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    let mut names = numbers.into_iter().map(|number| format!("nbd{number}"));
    let name = names.find(|name| is_free(block, name))?;
    Some(Path::new("/dev").join(name))
}

/// Size of a device in bytes.
fn size(block: &Path, device: &Path) -> Option<u64> {
    let path = block.join(nbd_name(device)?).join("size");
    let sectors = fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()?;
    Some(sectors * 512)
}

fn connect(name: &str, socket: &Path, device: &Path, instead: &str) -> Result<(), Failure> {
    let mut client = Command::new("nbd-client");
    client.arg("-unix").arg(socket).arg(device);
    client.args(["-name", name, "-timeout", &TIMEOUT_S.to_string()]);
    let output = client.output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => Failure::failed(format!(
            "nbd-client is not installed: apt-get install nbd-client, or {instead}"
        )),
        _ => Failure::failed(format!("nbd-client cannot be run: {error}")),
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: Vec<&str> = said.lines().filter(|line| !line.is_empty()).collect();
    Err(Failure::failed(format!(
        "nbd-client could not attach volume {name} to {}: {}",
        device.display(),
        said.join("; ")
    )))
}

fn disconnect(device: &Path) {
    // There is nobody to tell of it: an error is on its way already.
    let _ = Command::new("nbd-client").arg("-d").arg(device).output();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices as the kernel shows them: name, size in sectors, whether a process has it.
    fn block(devices: &[(&str, &str, bool)]) -> tempfile::TempDir {
        let block = tempfile::tempdir().unwrap();
        for (name, size, has_process) in devices {
            let device = block.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("size"), format!("{size}\n")).unwrap();
            if *has_process {
                fs::write(device.join("pid"), "1\n").unwrap();
            }
        }
        block
    }

    #[test]
    fn attach_takes_the_first_device_that_is_free() {
        let devices = [
            ("sda", "0", false),
            ("nbd10", "0", false),
            ("nbd0", "2048", true),
            ("nbd1", "0", true),
            ("nbd2", "8", false),
            ("nbd9", "0", false),
        ];
        let block = block(&devices);
        assert_eq!(free_device(block.path()), Some("/dev/nbd9".into()));
        assert_eq!(size(block.path(), Path::new("/dev/nbd0")), Some(1 << 20));
        let taken = self::block(&devices[2..5]);
        assert_eq!(free_device(taken.path()), None);
    }

    #[test]
    fn attach_refuses_what_is_taken_or_no_nbd_device() {
        let block = block(&[("nbd0", "8", true), ("nbd1", "0", false)]);
        let check = |device: &str| check_free(block.path(), Path::new(device));
        assert!(check("/dev/nbd1").is_ok());
        for (device, part) in [
            ("/dev/nbd0", "in use"),
            ("/dev/nbd7", "not there"),
            ("/dev/sda", "no NBD device"),
            ("/dev/nbd1p1", "no NBD device"),
            ("nbd1", "no NBD device"),
        ] {
            let error = check(device).unwrap_err();
            assert!(error.message.contains(part), "{device}: {}", error.message);
        }
    }
}
