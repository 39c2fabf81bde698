//! Ceph: one mon, one mgr, one OSD on a file. Volumes lie on images, and the direct client is librbd in
//! fio's process.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::store::Behind;
use super::testenv::{Scripts, Testenv};
use crate::failure::Result;
use crate::fio::{Load, Outcome, Target};
use crate::process;

/// The pool that `ceph-up.sh` makes.
const POOL: &str = "rbd";

/// A running cluster.
#[derive(Debug)]
pub struct Cluster(Testenv);

impl Cluster {
    /// Bring one up below `parent`.
    pub fn up(scripts: &Path, parent: &Path) -> Result<Self> {
        Testenv::up(&Scripts {
            directory: scripts,
            parent,
            name: "ceph",
            up: (
                "ceph-up.sh",
                &["--size", "20G", "--mem", "1536M", "--timeout", "120"],
            ),
            down: ("ceph-down.sh", &["--purge", "--fast"]),
            ports: 100,
        })
        .map(Self)
    }

    fn conf(&self) -> PathBuf {
        self.0.directory().join("ceph.conf")
    }

    fn image(&self, name: &str) -> Target {
        Target::Rbd {
            conf: self.conf(),
            pool: POOL.into(),
            image: name.into(),
        }
    }
}

impl Behind for Cluster {
    fn make(&self, name: &str, bytes: u64) -> Result<Option<Target>> {
        process::output_of(
            Command::new("rbd")
                .arg("-c")
                .arg(self.conf())
                .args(["create", &format!("{POOL}/{name}")])
                .args(["--size", &format!("{bytes}B")]),
        )?;
        Ok(Some(self.image(name)))
    }

    fn url(&self, name: &str) -> String {
        format!("rbd:{POOL}/{name}?conf={}", self.conf().display())
    }

    fn direct(&mut self, name: &str, load: &Load, raw: &Path) -> Result<Outcome> {
        load.run(&self.image(name), raw)
    }

    fn cpu_us(&self) -> Result<f64> {
        self.0.cpu_us(&["run/osd.0.launched"])
    }

    fn down(self: Box<Self>) -> Result<()> {
        self.0.down()
    }
}
