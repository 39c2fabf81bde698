//! qcow2 through QEMU's own tools: `qemu-img` looks at and makes a file, `qemu-nbd` serves it to the copy.
//!
//! So the format is QEMU's in every detail, what reads an image that may be hostile is a process of its own, and
//! progress, cancel and errors are those of every copy. A file that refers to another one, or is encrypted, is
//! refused: the one would let an image name any file of this host, the other needs a secret.

use std::fs;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use uuid::Uuid;

use super::nbd::Endpoint;
use crate::Failure;
use crate::interrupts::apart;

/// How long `qemu-nbd` may take to listen.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// How long it may take to end after its last client.
const END_TIME_MAX: Duration = Duration::from_mins(5);
const POLL_PERIOD: Duration = Duration::from_millis(5);
/// Its name in a directory of its own.
const SOCKET: &str = "nbd.sock";
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
pub async fn size(path: &Path) -> Result<u64, Failure> {
    let name = path.display();
    let text = run("qemu-img", ["info", "--output=json", "-f", "qcow2"], path).await?;
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
    run("qemu-img", ["check", "-q", "-f", "qcow2"], path).await?;
    Ok(info.virtual_size)
}

/// Make a new file for an image of `bytes`.
pub async fn create(path: &Path, bytes: u64) -> Result<(), Failure> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]).arg(path);
    command.arg(bytes.to_string());
    finish("qemu-img", path, command).await.map(drop)
}

async fn run<const N: usize>(
    program: &'static str,
    arguments: [&str; N],
    path: &Path,
) -> Result<Vec<u8>, Failure> {
    let mut command = Command::new(program);
    command.args(arguments).arg(path);
    finish(program, path, command).await
}

/// Run a program to its end; what it printed.
async fn finish(
    program: &'static str,
    path: &Path,
    mut command: Command,
) -> Result<Vec<u8>, Failure> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running::start(program, command)?;
    let printed = apart(text(running.0.stdout.take()));
    let said = apart(text(running.0.stderr.take()));
    let (printed, said) = (printed.await?, said.await?);
    let status = running.end(END_TIME_MAX).await;
    // `qemu-img check` answers 3 for clusters that are leaked, which costs space and no data.
    if status.is_some_and(|status| status.success() || status.code() == Some(3)) {
        return Ok(printed);
    }
    Err(Failure::failed(format!(
        "{}: it is damaged, or no qcow2: {}",
        path.display(),
        first_lines(&String::from_utf8_lossy(&[said, printed].concat()))
    )))
}

/// Reads all that comes out of a pipe.
fn text(
    pipe: Option<impl Read + Send + 'static>,
) -> impl FnOnce() -> Result<Vec<u8>, Failure> + Send + 'static {
    move || {
        let mut text = Vec::new();
        if let Some(mut pipe) = pipe {
            // What cannot be read says nothing; its end counts.
            let _ = pipe.read_to_end(&mut text);
        }
        Ok(text)
    }
}

/// A program of QEMU's. It dies when this is dropped, and with this process, but not of its Ctrl-C.
#[derive(Debug)]
struct Running(Child);

impl Running {
    /// Not on a thread that ends before the program: that would end it, too.
    fn start(program: &'static str, mut command: Command) -> Result<Self, Failure> {
        // SAFETY: both calls are async-signal-safe and touch nothing of the parent.
        unsafe {
            command.pre_exec(|| {
                libc::setpgid(0, 0);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let child = command.stdin(Stdio::null()).spawn();
        child.map(Self).map_err(|error| cannot_run(program, &error))
    }

    /// Whether it has not ended.
    fn is_running(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }

    /// Wait for its end, if that comes in time.
    async fn end(&mut self, time_max: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if start.elapsed() < time_max => tokio::time::sleep(POLL_PERIOD).await,
                _ => return None,
            }
        }
    }

    fn terminate(&mut self) {
        if self.is_running() {
            // SAFETY: kill takes no pointers; the child was not waited for, so its number is still its own.
            unsafe { libc::kill(self.0.id() as libc::pid_t, libc::SIGTERM) };
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended takes no signal.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory of its own below that for temporary files; removed when this is dropped.
#[derive(Debug)]
struct Directory(PathBuf);

impl Directory {
    fn make() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("hdcs-qcow2-{}", Uuid::new_v4()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What is left of it is a socket that nobody listens on.
        let _ = fs::remove_dir_all(&self.0);
    }
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
    // In this order: the program ends before its socket goes.
    program: Running,
    directory: Directory,
    path: PathBuf,
}

impl Served {
    /// Serve a file that was looked at by [`size`] or made by [`create`].
    pub async fn start(path: &Path, writable: bool) -> Result<Self, Failure> {
        let directory = Directory::make()?;
        let socket = directory.0.join(SOCKET);
        let mut command = Command::new("qemu-nbd");
        command.args(["-f", "qcow2", "-e", CLIENTS, "-t", "--discard=unmap", "-k"]);
        command.arg(&socket);
        if !writable {
            command.arg("-r");
        }
        command.arg(path);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut served = Self {
            program: Running::start("qemu-nbd", command)?,
            directory,
            path: path.to_owned(),
        };
        let start = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            if !served.program.is_running() || start.elapsed() > START_TIME_MAX {
                return Err(served.failed("qemu-nbd does not serve it"));
            }
            tokio::time::sleep(POLL_PERIOD).await;
        }
        Ok(served)
    }

    /// Where it is served.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            socket: self.directory.0.join(SOCKET),
            export: String::new(),
            name: self.path.display().to_string().into(),
        }
    }

    /// End it after its file is written; an error if that failed.
    pub async fn close(mut self) -> Result<(), Failure> {
        self.program.terminate();
        match self.program.end(END_TIME_MAX).await {
            Some(status) if status.success() => Ok(()),
            Some(_) => Err(self.failed("qemu-nbd has failed")),
            None => Err(self.failed("qemu-nbd does not end")),
        }
    }

    /// A failure of it, in its words.
    fn failed(&mut self, what: &str) -> Failure {
        // What it has said is in the pipe, however it ends.
        let _ = self.program.0.kill();
        let mut text = String::new();
        if let Some(stderr) = &mut self.program.0.stderr {
            // What is not text says nothing either.
            let _ = stderr.read_to_string(&mut text);
        }
        let (name, said) = (self.path.display(), first_lines(&text));
        Failure::failed(format!("{name}: {what}: {said}"))
    }
}
