//! Where the results of a run go: a directory of its own, named by date and time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use crate::failure::{Context, Result};
use crate::process;

/// The directory of one run.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// Make one below `parent`.
    pub fn create(parent: &Path) -> Result<Self> {
        let stamp = process::output_of(Command::new("date").arg("+%Y-%m-%d-%H%M%S"))?;
        Self::at(parent.join(stamp.trim()))
    }

    /// Use a given one.
    pub fn at(path: PathBuf) -> Result<Self> {
        fs::create_dir_all(path.join("raw")).context(path.display())?;
        Ok(Self(path))
    }

    /// Where fio's own report of a run is kept.
    pub fn raw(&self, name: &str) -> PathBuf {
        self.0.join("raw").join(format!("{name}.json"))
    }

    /// Path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Write a file.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.file(name);
        fs::write(&path, text).context(path.display())
    }

    /// Print the report of a run, and keep it with the findings that it was made of.
    pub fn report(&self, text: &str, findings: &impl Serialize) -> Result<()> {
        println!("{text}");
        self.write("report.txt", text)?;
        let json = serde_json::to_string_pretty(findings).context("results as JSON")?;
        self.write("results.json", &json)?;
        eprintln!("bench: results in {}", self.0.display());
        Ok(())
    }
}
