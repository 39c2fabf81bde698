//! A real store on loopback for the time of a run, brought up and removed by scripts of `testenv/`.
//!
//! 1. The daemons end with this program, however that ends: a guard waits on a pipe from here, and
//!    whoever closes it (`Drop`, or the kernel when this process is gone) has it stop and remove them.
//! 2. The guard is there before the first daemon, so that a start that fails leaves nothing either.

use std::collections::HashMap;
use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::failure::{Context, Failure, Result};
use crate::process;

/// What the guard does: nothing until its standard input ends; then what its arguments say.
const GUARD: &str = "read -r _; exec bash \"$0\" \"$@\"";

/// How a store is brought up and removed.
#[derive(Clone, Copy, Debug)]
pub struct Scripts<'a> {
    /// Where the scripts are.
    pub directory: &'a Path,
    /// Below what the store lives, in a directory of its own: a short path (the daemons' unix sockets
    /// are in there), on a disk.
    pub parent: &'a Path,
    /// Part of the directory's name.
    pub name: &'a str,
    /// The script that brings it up, and what it gets besides the directory and `--port`.
    pub up: (&'a str, &'a [&'a str]),
    /// The script that stops and removes it, likewise.
    pub down: (&'a str, &'a [&'a str]),
    /// How many ports it uses, from the first on.
    pub ports: u16,
}

/// A running store.
#[derive(Debug)]
pub struct Testenv {
    directory: PathBuf,
    /// What the script that removes it is called.
    down: String,
    guard: Child,
    said: HashMap<String, String>,
}

impl Testenv {
    /// Bring one up.
    pub fn up(scripts: &Scripts<'_>) -> Result<Self> {
        let place = fs::canonicalize(scripts.directory).context(format_args!(
            "{} (run it from the top of the repository, or give --scripts)",
            scripts.directory.display()
        ))?;
        // Removed by the guard, and not by a destructor, which a signal would skip.
        let directory = tempfile::Builder::new()
            .prefix(&format!("hdcs-{}-", scripts.name))
            .tempdir_in(scripts.parent)
            .context(scripts.parent.display())?
            .keep();
        let guard = Command::new("sh")
            .args(["-c", GUARD])
            .arg(place.join(scripts.down.0))
            .arg(&directory)
            .args(scripts.down.1)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Ctrl-C is for us: the guard has to outlive it.
            .process_group(0)
            .spawn()
            .context("cannot start sh")?;
        let mut testenv = Self {
            directory,
            down: scripts.down.0.to_owned(),
            guard,
            said: HashMap::new(),
        };
        let said = process::output_of(
            Command::new("bash")
                .arg(place.join(scripts.up.0))
                .arg(&testenv.directory)
                .args(scripts.up.1)
                .args(["--port", &free_port(scripts.ports)?.to_string()]),
        )?;
        testenv.said = words(said.lines().last().unwrap_or_default());
        Ok(testenv)
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A word of the last line that it said when it was up, `NAME=VALUE`.
    pub fn said(&self, name: &str) -> Result<&str> {
        let value = self.said.get(name).map(String::as_str);
        value.context(format_args!("the store did not say its {name}"))
    }

    /// CPU time in microseconds of the daemons whose ids are in these files of its directory.
    pub fn cpu_us(&self, files: &[&str]) -> Result<f64> {
        files.iter().try_fold(0.0, |sum, file| {
            let path = self.directory.join(file);
            let text = fs::read_to_string(&path).context(path.display())?;
            let id = text.trim().parse().context(path.display())?;
            Ok(sum + process::usage_of(id)?.cpu_us)
        })
    }

    /// Stop and remove it.
    pub fn down(mut self) -> Result<()> {
        self.dismiss()
    }

    /// Let the guard do its work, and wait for it; the second time there is nothing to do.
    fn dismiss(&mut self) -> Result<()> {
        drop(self.guard.stdin.take());
        let status = self.guard.wait().context(&self.down)?;
        if status.success() {
            return Ok(());
        }
        Err(Failure::new(format!(
            "{} ended with {status}; look for what is left in {}",
            self.down,
            self.directory.display()
        )))
    }
}

impl Drop for Testenv {
    fn drop(&mut self) {
        if self.guard.stdin.is_some()
            && let Err(failure) = self.dismiss()
        {
            eprintln!("hdcs-bench: {failure}");
        }
    }
}

/// The words `NAME=VALUE` of a line.
fn words(line: &str) -> HashMap<String, String> {
    line.split_whitespace()
        .filter_map(|word| word.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// The first of so many ports in a row that nobody uses: below those that the kernel gives to clients, any of which
/// could take one before its server does.
fn free_port(ports: u16) -> Result<u16> {
    for _ in 0..100 {
        let first = fastrand::u16(32_200..32_768 - ports);
        let mut range = first..first + ports;
        if range.all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return Ok(first);
        }
    }
    Err(Failure::new(format!(
        "{ports} free ports in a row were not found between 32200 and 32768"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts that stand for the real ones: a start that ends with `status`, a stop that leaves a note.
    fn scripts(status: i32) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, body: &str| {
            fs::write(directory.path().join(name), format!("{body}\n")).unwrap();
        };
        write(
            "up.sh",
            &format!("touch \"$1/settings\"; echo started; echo a=b at=\"$1\" $2; exit {status}"),
        );
        write(
            "down.sh",
            "rm -r \"$1\" && echo \"$@\" > \"${0%/*}/stopped\"",
        );
        directory
    }

    fn up(scripts: &tempfile::TempDir, parent: &tempfile::TempDir) -> Result<Testenv> {
        Testenv::up(&Scripts {
            directory: scripts.path(),
            parent: parent.path(),
            name: "test",
            up: ("up.sh", &["c=d"]),
            down: ("down.sh", &["--purge"]),
            ports: 10,
        })
    }

    #[test]
    fn store_is_stopped_and_removed_when_dropped() {
        let (scripts, parent) = (scripts(0), tempfile::tempdir().unwrap());
        let testenv = up(&scripts, &parent).unwrap();
        let directory = testenv.directory().to_path_buf();
        assert!(directory.join("settings").exists());
        assert_eq!(testenv.said("at").unwrap(), directory.to_str().unwrap());
        assert_eq!(testenv.said("c").unwrap(), "d");
        assert!(testenv.said("b").is_err());
        assert!(!scripts.path().join("stopped").exists());
        drop(testenv);
        let told = fs::read_to_string(scripts.path().join("stopped")).unwrap();
        assert!(told.contains("--purge"), "{told}");
        assert!(!directory.exists());
    }

    #[test]
    fn store_that_does_not_start_leaves_nothing() {
        let (scripts, parent) = (scripts(3), tempfile::tempdir().unwrap());
        assert!(up(&scripts, &parent).is_err());
        assert!(scripts.path().join("stopped").exists());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn store_that_is_not_stopped_is_an_error() {
        let (scripts, parent) = (scripts(0), tempfile::tempdir().unwrap());
        let testenv = up(&scripts, &parent).unwrap();
        fs::write(scripts.path().join("down.sh"), "exit 1\n").unwrap();
        let failure = testenv.down().unwrap_err().to_string();
        assert!(failure.contains("hdcs-test-"), "{failure}");
    }

    #[test]
    fn daemons_are_counted_by_the_ids_in_their_files() {
        let (scripts, parent) = (scripts(0), tempfile::tempdir().unwrap());
        let testenv = up(&scripts, &parent).unwrap();
        fs::write(
            testenv.directory().join("pid"),
            std::process::id().to_string(),
        )
        .unwrap();
        assert!(testenv.cpu_us(&["pid"]).unwrap() >= 0.0);
        assert!(testenv.cpu_us(&["pid", "other"]).is_err());
    }
}
