//! A node of HDCS as its user has it: the program, its data directory and its command line.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, thread};

use serde_json::Value;

use crate::failure::{Context, Failure, Result};
use crate::fio::Target;
use crate::process::{self, Server, Usage};

/// A running node.
#[derive(Debug)]
pub struct Node {
    binary: PathBuf,
    data: PathBuf,
    server: Server,
}

/// How a volume is made.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// Name, also of the NBD export.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Size of its log in bytes.
    pub log_bytes: u64,
    /// `on-write`, `on-flush` or `auto`.
    pub persist: &'static str,
    /// URL of the backend; `None`: the default below the data directory.
    pub backend: Option<String>,
}

impl VolumeOptions {
    /// A volume over a file, which makes writes durable before it acknowledges them.
    pub fn over_file(name: &str, image: &Path, bytes: u64, log_bytes: u64) -> Self {
        Self {
            name: name.into(),
            bytes,
            log_bytes,
            persist: "on-write",
            backend: Some(format!("file:{}", image.display())),
        }
    }
}

/// The command that runs a node.
fn serve(binary: &Path, data: &Path, config: Option<&str>) -> Result<Command> {
    fs::create_dir_all(data).context(data.display())?;
    let mut command = Command::new(binary);
    command.arg("serve").arg("--data").arg(data);
    if let Some(config) = config {
        let path = data.with_extension("toml");
        fs::write(&path, config).context(path.display())?;
        command.arg("--config").arg(path);
    }
    Ok(command)
}

impl Node {
    /// Start `hdcs serve` on `data`, with `config` as its configuration file if there is one.
    pub fn start(binary: &Path, data: &Path, config: Option<&str>) -> Result<Self> {
        let mut command = serve(binary, data, config)?;
        let server = Server::start_until_ready("hdcs", &mut command, &data.with_extension("log"))?;
        Ok(Self {
            binary: binary.to_path_buf(),
            data: data.to_path_buf(),
            server,
        })
    }

    /// Start it and kill it `after` a while, ready or not.
    pub fn start_and_kill(
        binary: &Path,
        data: &Path,
        config: Option<&str>,
        after: Duration,
    ) -> Result<()> {
        let mut command = serve(binary, data, config)?;
        let server = Server::start_and_leave("hdcs", &mut command, &data.with_extension("log"))?;
        thread::sleep(after);
        server.kill()
    }

    /// The NBD socket.
    pub fn socket(&self) -> PathBuf {
        self.data.join("nbd.sock")
    }

    /// A volume as fio's target.
    pub fn target(&self, volume: &str) -> Target {
        Target::Nbd {
            socket: self.socket(),
            export: volume.to_owned(),
        }
    }

    /// The daemon's process id.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// CPU time and memory of the daemon.
    pub fn usage(&self) -> Result<Usage> {
        self.server.usage()
    }

    /// Run a command of the program against this node; what it printed.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        process::output_of(
            Command::new(&self.binary)
                .arg("--data")
                .arg(&self.data)
                .args(arguments),
        )
    }

    /// Create a volume.
    pub fn create(&self, volume: &VolumeOptions) -> Result<()> {
        self.create_with(volume, None)
    }

    /// Create a volume, encrypted if a key file is given.
    pub fn create_with(&self, volume: &VolumeOptions, key: Option<&Path>) -> Result<()> {
        let (size, log) = (volume.bytes.to_string(), volume.log_bytes.to_string());
        let mut arguments = vec![
            "volume",
            "create",
            &volume.name,
            "--size",
            &size,
            "--log-size",
            &log,
        ];
        arguments.extend(["--persist", volume.persist]);
        if let Some(backend) = &volume.backend {
            arguments.extend(["--backend", backend]);
        }
        let key = key.map(|path| path.display().to_string());
        if let Some(key) = &key {
            arguments.extend(["--encrypt", "--key-file", key]);
        }
        self.command(&arguments).map(drop)
    }

    /// Delete a volume and lose what it has not destaged; the backend stays.
    pub fn discard(&self, volume: &str) -> Result<()> {
        self.command(&["volume", "delete", volume, "--discard-dirty"])
            .map(drop)
    }

    /// Everything that the node says of a volume.
    pub fn show(&self, volume: &str) -> Result<Value> {
        let text = self.command(&["volume", "show", volume, "--json"])?;
        serde_json::from_str(&text).context(format_args!("hdcs volume show {volume} --json"))
    }

    /// The page of its metrics.
    pub fn metrics(&self) -> Result<String> {
        let path = self.data.join("control.sock");
        let mut answer = String::new();
        UnixStream::connect(&path)
            .and_then(|mut socket| {
                socket.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
                socket.read_to_string(&mut answer)
            })
            .context(path.display())?;
        let (head, page) = answer.split_once("\r\n\r\n").context("no metrics")?;
        if !head.contains(" 200 ") {
            return Err(Failure::new(format!("no metrics: {head}")));
        }
        Ok(page.to_owned())
    }

    /// Destage all that is dirty and wait for it.
    pub fn flush(&self, volume: &str) -> Result<()> {
        self.command(&["volume", "flush", volume]).map(drop)
    }

    /// SIGKILL.
    pub fn kill(self) -> Result<()> {
        self.server.kill()
    }

    /// SIGTERM, and wait for the end.
    pub fn stop(self) -> Result<()> {
        self.server.stop().map(drop)
    }
}
