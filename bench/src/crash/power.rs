//! A disk with a volatile write cache under a file system: nbdkit's plugin `power`, nbdfuse, a loop
//! device, ext4. Needs root.
//!
//! Cutting the power kills nbdkit. The next start decides which of the writes that were not
//! flushed had reached the medium.
//!
//! These tools have faults of their own, and a disk that is gone may keep everybody waiting who uses it. So a thread watches
//! them: if one ends by itself, this process ends with [`TOOL_ENDED`], and says which one it was.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use fastrand::Rng;

use crate::failure::{Context, Failure, Result};
use crate::process::{Server, output_of};

/// The exit status of a process whose disk has lost one of its tools.
pub const TOOL_ENDED: i32 = 75;
/// How often it is looked whether the tools are there.
const LOOK_PERIOD: Duration = Duration::from_millis(50);
/// How long after something failed it is still looked: what uses the disk may notice first.
const LOOK_AFTER_FAILURE: Duration = Duration::from_secs(2);
/// Size of the disk.
const DISK_BYTES: u64 = 1 << 30;

/// The disk, with its file system mounted.
pub struct PowerDisk {
    directory: PathBuf,
    plugin: PathBuf,
    up: Option<Up>,
    tools: Arc<Mutex<Tools>>,
}

/// Processes that must not end at present, by name, and the loop device.
#[derive(Default)]
struct Tools {
    running: Vec<(&'static str, u32)>,
    device: Option<String>,
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
            tools: Arc::default(),
        };
        let (tools, at) = (Arc::downgrade(&disk.tools), disk.directory.clone());
        thread::spawn(move || watch(&tools, &at));
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

    fn tools(&self) -> MutexGuard<'_, Tools> {
        self.tools.lock().unwrap_or_else(PoisonError::into_inner)
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

        let nbdkit = up.nbdkit.as_ref().map(|server| ("nbdkit", server.pid()));

        let file = self.directory.join("fuse/disk");
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(&file).arg("--unix").arg(&socket);
        up.fuse = Some(Server::start_when("nbdfuse", &mut fuse, &log, || {
            fs::metadata(&file).is_ok_and(|found| found.len() == DISK_BYTES)
        })?);
        let fuse = up.fuse.as_ref().map(|server| ("nbdfuse", server.pid()));
        let device = output_of(
            Command::new("losetup")
                .args(["--find", "--show"])
                .arg(&file),
        )?;
        let device = device.trim().to_owned();
        up.device = Some(device.clone());
        *self.tools() = Tools {
            running: nbdkit.into_iter().chain(fuse).collect(),
            device: Some(device),
        };
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
        // What lies over nbdkit may end with it.
        self.tools().running.clear();
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
        *self.tools() = Tools::default();
        take_down(&self.directory, up.mounted, up.device.as_deref());
        drop(up.fuse.take());
        drop(up.nbdkit.take());
    }
}

/// Unmount what is mounted of a disk.
fn take_down(directory: &Path, is_mounted: bool, device: Option<&str>) {
    let quietly = |command: &mut Command| drop(output_of(command));
    if is_mounted {
        quietly(
            Command::new("umount")
                .arg("--lazy")
                .arg(directory.join("mount")),
        );
    }
    if let Some(device) = device {
        quietly(Command::new("losetup").args(["--detach", device]));
    }
    quietly(
        Command::new("fusermount3")
            .args(["-u", "-z"])
            .arg(directory.join("fuse")),
    );
}

/// Whether a child of this process has ended. It stays to be waited for.
fn has_ended(pid: u32) -> bool {
    // SAFETY: an all-zero siginfo_t is a valid one.
    let mut found: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `found` is valid for the call, and was filled by it, or is all zero, when its process is read.
    unsafe { libc::waitid(libc::P_PID, pid, &raw mut found, how) == 0 && found.si_pid() != 0 }
}

/// End this process as soon as a tool of the disk ends by itself: others may wait for the disk for ever.
fn watch(tools: &Weak<Mutex<Tools>>, directory: &Path) {
    while let Some(tools) = tools.upgrade() {
        let tools = tools.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = tools.running.iter().find(|(_, pid)| has_ended(*pid));
        if let Some((name, _)) = ended {
            let log = fs::read_to_string(directory.join("power.log")).unwrap_or_default();
            let last = log.lines().next_back().unwrap_or("none");
            println!(
                "crash: {name}, which the disk is made of, ended by itself; its last words: {last}"
            );
            take_down(directory, true, tools.device.as_deref());
            let _ = fs::remove_dir_all(directory);
            // Whatever it has started ends with it.
            std::process::exit(TOOL_ENDED);
        }
        drop(tools);
        thread::sleep(LOOK_PERIOD);
    }
}

/// Something failed: give [`watch`] the time to see whether that was because a tool of the disk had ended.
pub fn let_watch_look() {
    thread::sleep(LOOK_AFTER_FAILURE);
}

impl Drop for PowerDisk {
    fn drop(&mut self) {
        self.detach();
    }
}
