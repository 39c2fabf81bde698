//! What every measurement stands on: the program, a directory for the data of the run, and disks that were written once.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;

use crate::failure::{Context, Failure, Result};
use crate::fio::{Load, Outcome, Target};
use crate::node::Node;
use crate::options::Places;
use crate::results::Directory;

/// See the module. The directory goes with it.
#[derive(Debug)]
pub struct Lab {
    program: PathBuf,
    scratch: tempfile::TempDir,
    directory: PathBuf,
}

impl Lab {
    /// With a directory of its own where the data of measurements lies.
    pub fn new(places: &Places) -> Result<Self> {
        Self::at(&places.hdcs, &places.data)
    }

    /// For the program `hdcs`, with a directory of its own below `data`.
    pub fn at(program: &Path, data: &Path) -> Result<Self> {
        if !program.exists() {
            return Err(Failure::new(format!(
                "no program at {}: run `make build`",
                program.display()
            )));
        }
        fs::create_dir_all(data).context(data.display())?;
        let scratch = tempfile::Builder::new()
            .prefix("run-")
            .tempdir_in(data)
            .context(data.display())?;
        let directory = std::path::absolute(scratch.path()).context("scratch directory")?;
        Ok(Self {
            program: program.to_path_buf(),
            scratch,
            directory,
        })
    }

    /// Where everything of it lies.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where something of it lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Leave the directory.
    pub fn keep(self) -> PathBuf {
        self.scratch.keep()
    }

    /// Remove everything that lies there.
    pub fn clear(&self) -> Result<()> {
        let at = &self.directory;
        fs::remove_dir_all(at).context(at.display())?;
        fs::create_dir(at).context(at.display())
    }

    /// Start a node of this name and configuration.
    pub fn node(&self, name: &str, config: Option<&str>) -> Result<Node> {
        Node::start(&self.program, &self.path(name), config)
    }

    /// A file that was written as a whole, so that no later write meets a hole or an unwritten extent.
    pub fn disk(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let image = self.path(name);
        self.fill(&Target::File(image.clone()), bytes)?;
        Ok(image)
    }

    /// Write the first `bytes` of a target, one after another.
    pub fn fill(&self, target: &Target, bytes: u64) -> Result<()> {
        let raw = self.path("fill.json");
        Load::fill(bytes).run(target, &raw).map(drop)
    }

    /// Read the first `bytes` of a target, each block once and in random order: a sequential pass is what a cache does not
    /// keep.
    pub fn warm(&self, target: &Target, bytes: u64) -> Result<()> {
        let once = Load {
            depth: 32,
            ..Load::random("randread", bytes)
        };
        once.run(target, &self.path("warm.json")).map(drop)
    }
}

/// Run loads at once, each on its volume and with a name for its results; what each gave, in their order.
pub fn together(
    node: &Node,
    results: &Directory,
    loads: &[(String, String, Load)],
) -> Result<Vec<Outcome>> {
    thread::scope(|scope| {
        let running: Vec<_> = loads
            .iter()
            .map(|(volume, name, load)| {
                let (target, raw) = (node.target(volume), results.raw(name));
                scope.spawn(move || load.run(&target, &raw))
            })
            .collect();
        running
            .into_iter()
            .map(|one| one.join().map_err(|_| Failure::new("a load panicked"))?)
            .collect()
    })
}

/// What was written to a file does not wait in its device's cache for the next one's flush.
pub fn sync(file: &Path) -> Result<()> {
    File::open(file)
        .and_then(|file| file.sync_all())
        .context(file.display())
}
