//! qcow2 through QEMU's own tools: `qemu-img` looks at and makes a file, `qemu-nbd` serves it to the copy.
//!
//! So the format is QEMU's in every detail, what reads an image that may be hostile is a process of its own, and
//! progress, cancel and errors are those of every copy. A file that refers to another one, or is encrypted, is
//! refused: the one would let an image name any file of this host, the other needs a secret.

use std::fs;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use uuid::Uuid;

use super::nbd::Endpoint;
use crate::cli::Failure;

/// How long `qemu-nbd` may take to listen.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// How long it may take to end after its last client.
const END_TIME_MAX: Duration = Duration::from_mins(5);
const POLL_PERIOD: Duration = Duration::from_millis(5);
/// More clients than a copy has.
const CLIENTS: &str = "16";

/// What `qemu-img info` says, as far as it matters.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Info {
    virtual_size: u64,
    #[serde(default)]
    encrypted: bool,
    backing_filename: Option<String>,
    format_specific: Option<FormatSpecific>,
}

#[derive(Debug, Deserialize)]
struct FormatSpecific {
    data: Option<Specific>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Specific {
    data_file: Option<String>,
}

/// Size of the image in a qcow2 file that can be imported.
pub fn size(path: &Path) -> Result<u64, Failure> {
    let name = path.display();
    let text = run("qemu-img", ["info", "--output=json", "-f", "qcow2"], path)?;
    let info: Info = serde_json::from_slice(&text).map_err(|error| {
        Failure::failed(format!("{name}: qemu-img info is not understood: {error}"))
    })?;
    let refuse = |what: String| {
        Err(Failure::failed(format!(
            "{name}: {what}: make a file that stands alone first: qemu-img convert -O qcow2 {name} NEW"
        )))
    };
    if let Some(backing) = info.backing_filename {
        return refuse(format!("it is an overlay of {backing}"));
    }
    let specific = info.format_specific.and_then(|specific| specific.data);
    if let Some(data) = specific.and_then(|specific| specific.data_file) {
        return refuse(format!("its data is in another file, {data}"));
    }
    if info.encrypted {
        return refuse("it is encrypted".to_owned());
    }
    // What is cut off reads as zeroes for QEMU; the check knows better.
    run("qemu-img", ["check", "-q", "-f", "qcow2"], path)?;
    Ok(info.virtual_size)
}

/// Make a new file for an image of `bytes`.
pub fn create(path: &Path, bytes: u64) -> Result<(), Failure> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]).arg(path);
    finish("qemu-img", path, command.arg(bytes.to_string())).map(|_| ())
}

fn run<const N: usize>(
    program: &str,
    arguments: [&str; N],
    path: &Path,
) -> Result<Vec<u8>, Failure> {
    finish(
        program,
        path,
        Command::new(program).args(arguments).arg(path),
    )
}

/// Run a program to its end; what it printed.
fn finish(program: &str, path: &Path, command: &mut Command) -> Result<Vec<u8>, Failure> {
    let done = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| cannot_run(program, &error))?;
    // `qemu-img check` answers 3 for clusters that are leaked, which costs space and no data.
    if done.status.success() || done.status.code() == Some(3) {
        return Ok(done.stdout);
    }
    let said = [done.stderr, done.stdout].concat();
    Err(Failure::failed(format!(
        "{}: it is damaged, or no qcow2: {}",
        path.display(),
        first_lines(&String::from_utf8_lossy(&said))
    )))
}

fn cannot_run(program: &str, error: &std::io::Error) -> Failure {
    Failure::failed(format!(
        "qcow2 needs {program}: {error}: install qemu-utils (Debian, Ubuntu) or qemu-img (Fedora), or use \
         --format raw"
    ))
}

fn first_lines(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let lines: Vec<_> = lines.take(3).collect();
    lines.join("; ")
}

/// A qcow2 file that is served on a socket; dropping it ends that.
#[derive(Debug)]
pub struct Served {
    child: Child,
    directory: PathBuf,
    path: PathBuf,
}

impl Served {
    /// Serve a file that was looked at by [`size`] or made by [`create`].
    pub fn start(path: &Path, writable: bool) -> Result<Self, Failure> {
        let directory = std::env::temp_dir().join(format!("hdcs-qcow2-{}", Uuid::new_v4()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .map_err(|error| Failure::failed(format!("{}: {error}", directory.display())))?;
        let socket = directory.join("nbd.sock");
        let mut command = Command::new("qemu-nbd");
        command.args(["-f", "qcow2", "-e", CLIENTS, "-t", "--discard=unmap", "-k"]);
        command.arg(&socket);
        if !writable {
            command.arg("-r");
        }
        // Dies with this process, but not of its Ctrl-C: what is under way ends first.
        // SAFETY: both calls are async-signal-safe and touch nothing of the parent.
        unsafe {
            command.pre_exec(|| {
                libc::setpgid(0, 0);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let child = command
            .arg(path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| {
                let _ = fs::remove_dir(&directory);
                cannot_run("qemu-nbd", &error)
            })?;
        let mut served = Self {
            child,
            directory,
            path: path.to_owned(),
        };
        served.wait_until_it_listens()?;
        Ok(served)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("nbd.sock")
    }

    /// Where it is served.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            socket: self.socket(),
            export: String::new(),
            name: self.path.display().to_string().into(),
        }
    }

    fn wait_until_it_listens(&mut self) -> Result<(), Failure> {
        let start = Instant::now();
        while std::os::unix::net::UnixStream::connect(self.socket()).is_err() {
            let ended = !matches!(self.child.try_wait(), Ok(None));
            if ended || start.elapsed() > START_TIME_MAX {
                return Err(self.failed("qemu-nbd does not serve it"));
            }
            std::thread::sleep(POLL_PERIOD);
        }
        Ok(())
    }

    /// End it after its file is written; an error if that failed.
    pub fn close(mut self) -> Result<(), Failure> {
        self.terminate();
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if start.elapsed() < END_TIME_MAX => std::thread::sleep(POLL_PERIOD),
                _ => {
                    return Err(Failure::failed(format!(
                        "{}: qemu-nbd does not end",
                        self.path.display()
                    )));
                }
            }
        };
        if status.success() {
            return Ok(());
        }
        Err(self.failed("qemu-nbd has failed"))
    }

    /// A failure of it, in its words.
    fn failed(&mut self, what: &str) -> Failure {
        self.terminate();
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // What is not text says nothing either.
            let _ = stderr.read_to_string(&mut text);
        }
        let (name, said) = (self.path.display(), first_lines(&text));
        Failure::failed(format!("{name}: {what}: {said}"))
    }

    fn terminate(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // SAFETY: kill takes no pointers; the child was not waited for, so its number is still its own.
            unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM) };
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Nothing of what is left matters any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}
