//! A disk with a volatile write cache under a file system: nbdkit's plugin `power`, nbdfuse, a loop
//! device, ext4. Needs root.
//!
//! Cutting the power kills nbdkit. The next start decides which of the writes that were not
//! flushed had reached the medium.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use fastrand::Rng;

use crate::failure::{Context, Failure, Result};
use crate::process::{Server, output_of};

/// Size of the disk.
const DISK_BYTES: u64 = 1 << 30;

/// The disk, with its file system mounted.
pub struct PowerDisk {
    directory: PathBuf,
    plugin: PathBuf,
    up: Option<Up>,
}

struct Up {
    nbdkit: Option<Server>,
    fuse: Option<Server>,
    device: Option<String>,
    mounted: bool,
}

impl PowerDisk {
    /// Make a disk below `directory` and mount it.
    pub fn create(directory: &Path, plugin: &Path) -> Result<Self> {
        // SAFETY: reads the id of this process.
        if unsafe { libc::geteuid() } != 0 {
            return Err(Failure::new(
                "a power cut needs root: it mounts a file system",
            ));
        }
        let plugin = fs::canonicalize(plugin).context(format_args!(
            "{} (testenv/setup.sh builds it)",
            plugin.display()
        ))?;
        for name in ["mount", "fuse"] {
            fs::create_dir_all(directory.join(name)).context(directory.display())?;
        }
        let image = directory.join("disk");
        File::create(&image)
            .and_then(|file| file.set_len(DISK_BYTES))
            .context(image.display())?;
        let mut disk = Self {
            directory: directory.to_path_buf(),
            plugin,
            up: None,
        };
        disk.attach(&["keep=100".into()])?;
        let device = disk.device()?;
        output_of(Command::new("mkfs.ext4").args(["-q", "-F", &device]))?;
        disk.mount()?;
        Ok(disk)
    }

    /// Where its file system is mounted.
    pub fn mount_point(&self) -> PathBuf {
        self.directory.join("mount")
    }

    fn device(&self) -> Result<String> {
        self.up
            .as_ref()
            .and_then(|up| up.device.clone())
            .context("the disk is not attached")
    }

    /// nbdkit, nbdfuse and the loop device; `state` is what nbdkit's plugin makes of the past.
    fn attach(&mut self, state: &[String]) -> Result<()> {
        let up = self.up.insert(Up {
            nbdkit: None,
            fuse: None,
            device: None,
            mounted: false,
        });
        let (socket, log) = (
            self.directory.join("power.sock"),
            self.directory.join("power.log"),
        );
        let _ = fs::remove_file(&socket);
        let mut nbdkit = Command::new("nbdkit");
        nbdkit
            .args(["--foreground", "--unix"])
            .arg(&socket)
            .arg(&self.plugin);
        nbdkit
            .arg(format!("disk={}", self.directory.join("disk").display()))
            .args(state);
        up.nbdkit = Some(Server::start_on_socket(
            "nbdkit",
            &mut nbdkit,
            &socket,
            &log,
        )?);

        let file = self.directory.join("fuse/disk");
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(&file).arg("--unix").arg(&socket);
        up.fuse = Some(Server::start_when("nbdfuse", &mut fuse, &log, || {
            fs::metadata(&file).is_ok_and(|found| found.len() == DISK_BYTES)
        })?);
        up.device = Some(
            output_of(
                Command::new("losetup")
                    .args(["--find", "--show"])
                    .arg(&file),
            )?
            .trim()
            .to_owned(),
        );
        Ok(())
    }

    fn mount(&mut self) -> Result<()> {
        let device = self.device()?;
        output_of(Command::new("mount").arg(&device).arg(self.mount_point()))?;
        if let Some(up) = &mut self.up {
            up.mounted = true;
        }
        Ok(())
    }

    /// Power off: from now on the disk answers nothing.
    pub fn cut(&mut self) -> Result<()> {
        match self.up.as_mut().and_then(|up| up.nbdkit.take()) {
            Some(nbdkit) => nbdkit.kill(),
            None => Ok(()),
        }
    }

    /// Power on: a random part of what was not flushed is there.
    pub fn restore(&mut self, rng: &mut Rng) -> Result<()> {
        self.detach();
        let keep = [0, 20, 50, 80][rng.usize(0..4)];
        let mode = if rng.u8(0..3) == 0 {
            "prefix"
        } else {
            "random"
        };
        let seed = rng.u32(1..u32::MAX);
        self.attach(&[
            format!("keep={keep}"),
            format!("mode={mode}"),
            format!("seed={seed}"),
        ])?;
        self.mount()
    }

    /// Take everything down. After a power cut each step may complain; the next is needed all the same.
    fn detach(&mut self) {
        let Some(mut up) = self.up.take() else { return };
        let quietly = |command: &mut Command| drop(output_of(command));
        if up.mounted {
            quietly(Command::new("umount").arg("--lazy").arg(self.mount_point()));
        }
        if let Some(device) = up.device.take() {
            quietly(Command::new("losetup").args(["--detach", &device]));
        }
        quietly(
            Command::new("fusermount3")
                .args(["-u", "-z"])
                .arg(self.directory.join("fuse")),
        );
        drop(up.fuse.take());
        drop(up.nbdkit.take());
    }
}

impl Drop for PowerDisk {
    fn drop(&mut self) {
        self.detach();
    }
}
