//! Devices that fail: a loop device over nbdfuse over nbdkit, and small file systems.
//!
//! Needs root, nbdkit, nbdfuse, losetup and mount, as `testenv/setup.sh` provides them.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::node::PATIENCE;

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A loop device.
pub struct Loop(pub PathBuf);

impl Loop {
    /// Over a file, with logical blocks of `sector` bytes.
    pub fn over(file: &Path, sector: u32) -> Self {
        let (sector, file) = (sector.to_string(), file.to_str().unwrap());
        let arguments = ["--find", "--show", "--sector-size", &sector, file];
        Self(run("losetup", &arguments).into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.0.to_str().unwrap()]);
    }
}

/// A block device whose writes fail while a file exists, and that answers nothing while its process is stopped.
pub struct FaultyDisk {
    // Taken down in this order.
    device: Option<Loop>,
    fuse: Child,
    nbdkit: Child,
    mount: PathBuf,
    switch: PathBuf,
}

impl FaultyDisk {
    pub fn new(directory: &Path, bytes: u64) -> Self {
        let (socket, mount) = (directory.join("disk.sock"), directory.join("disk"));
        let switch = directory.join("fail");
        std::fs::create_dir(&mount).unwrap();
        let nbdkit = Command::new("nbdkit")
            .args(["--foreground", "--unix"])
            .arg(&socket)
            .args(["--filter=error", "memory"])
            .arg(bytes.to_string())
            .arg(format!("error-file={}", switch.display()))
            .args([
                "error-pwrite=EIO",
                "error-pwrite-rate=100%",
                "error-pread-rate=0",
            ])
            .spawn()
            .unwrap();
        // The socket's file is there a moment before anyone listens at it.
        until("nbdkit listens", || UnixStream::connect(&socket).is_ok());
        let mut fuse = Command::new("nbdfuse")
            .arg(mount.join("disk"))
            .arg("--unix")
            .arg(&socket)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let file = mount.join("disk");
        until("nbdfuse serves", || {
            let ended = fuse.try_wait().unwrap();
            assert!(ended.is_none(), "nbdfuse ended: {ended:?}");
            file.exists()
        });
        let device = Some(Loop::over(&file, 4096));
        Self {
            device,
            fuse,
            nbdkit,
            mount,
            switch,
        }
    }

    pub fn path(&self) -> PathBuf {
        self.device.as_ref().unwrap().0.clone()
    }

    pub fn fail(&self, fails: bool) {
        if fails {
            std::fs::write(&self.switch, "").unwrap();
        } else {
            std::fs::remove_file(&self.switch).unwrap();
        }
    }
}

impl FaultyDisk {
    /// Answer nothing from now on, or answer again.
    pub fn hang(&self, hangs: bool) {
        let signal = if hangs { libc::SIGSTOP } else { libc::SIGCONT };
        // SAFETY: a system call on a child that has not been waited for.
        let result = unsafe { libc::kill(self.nbdkit.id() as libc::pid_t, signal) };
        assert_eq!(result, 0);
    }
}

impl Drop for FaultyDisk {
    fn drop(&mut self) {
        self.hang(false);
        drop(self.device.take());
        run("fusermount3", &["-u", "-z", self.mount.to_str().unwrap()]);
        // nbdfuse ends when it is unmounted, nbdkit when it is told to.
        let _ = self.fuse.wait();
        let _ = self.nbdkit.kill();
        let _ = self.nbdkit.wait();
    }
}

/// A tmpfs of its own size.
pub struct SmallFs(pub PathBuf);

impl SmallFs {
    pub fn new(directory: &Path, bytes: u64) -> Self {
        let path = directory.join("small");
        std::fs::create_dir(&path).unwrap();
        let (size, target) = (format!("size={bytes}"), path.to_str().unwrap());
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", target]);
        Self(path)
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        run("umount", &["--lazy", self.0.to_str().unwrap()]);
    }
}
