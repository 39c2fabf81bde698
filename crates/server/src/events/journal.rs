//! Two files of lines, the older of which makes way for the newer.
//!
//! Invariant: both together hold at most twice [`FILE_BYTES_MAX`].
//!
//! Failure: a file that cannot be written is logged once and opened anew with the next line; a line that cannot be read
//! is passed over.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::Event;

/// Bytes of the newer of two files; then it becomes the older one.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// See the module.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    older: PathBuf,
    file: Option<File>,
    bytes: u64,
    is_unsynced: bool,
    is_failing: bool,
}

impl Journal {
    /// The files `NAME.jsonl` and `NAME.1.jsonl` in a directory.
    pub fn new(directory: &Path, name: &str) -> Self {
        Self {
            path: directory.join(format!("{name}.jsonl")),
            older: directory.join(format!("{name}.1.jsonl")),
            file: None,
            bytes: 0,
            is_unsynced: false,
            is_failing: false,
        }
    }

    /// The newest events of both files, so many at most.
    pub fn read(&self, events_max: usize) -> VecDeque<Event> {
        let mut found = VecDeque::new();
        for path in [&self.older, &self.path] {
            let Ok(file) = File::open(path) else {
                continue;
            };
            // Somebody may have put anything there.
            let lines = BufReader::new(file.take(2 * FILE_BYTES_MAX)).split(b'\n');
            for line in lines.map_while(Result::ok) {
                let Ok(event) = serde_json::from_slice::<Event>(&line) else {
                    continue;
                };
                let is_next = found
                    .back()
                    .is_none_or(|last: &Event| last.number < event.number);
                // Room for the numbers to come.
                if is_next && event.number < u64::MAX / 2 {
                    if found.len() == events_max {
                        found.pop_front();
                    }
                    found.push_back(event);
                }
            }
        }
        found
    }

    /// Add a line; [`Self::sync`] makes it durable.
    pub fn append(&mut self, event: &Event) {
        let result = self.try_append(event);
        self.note(result);
    }

    fn try_append(&mut self, event: &Event) -> io::Result<()> {
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        if self.bytes + line.len() as u64 > FILE_BYTES_MAX && self.file.take().is_some() {
            fs::rename(&self.path, &self.older)?;
        }
        if self.file.is_none() {
            let file = OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o600)
                .open(&self.path)?;
            self.bytes = file.metadata()?.len();
            self.file = Some(file);
            if self.bytes > 0 {
                // What was cut off by a crash ends here.
                line.insert(0, b'\n');
            }
        }
        if let Some(file) = &mut self.file {
            file.write_all(&line)?;
            self.bytes += line.len() as u64;
            self.is_unsynced = true;
        }
        Ok(())
    }

    /// Make what was added durable.
    pub fn sync(&mut self) {
        if std::mem::take(&mut self.is_unsynced)
            && let Some(file) = &self.file
        {
            let result = file.sync_data();
            self.note(result);
        }
    }

    fn note(&mut self, result: io::Result<()>) {
        match result {
            Ok(()) => self.is_failing = false,
            Err(error) => {
                // A file in an unknown state is opened anew.
                self.file = None;
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(
                        "events are kept in memory only: {}: {error}",
                        self.path.display()
                    );
                }
            }
        }
    }
}
