//! Snapshots that an object volume keeps in its bucket.
//!
//! One that is said to be made is named by the newest manifest, and so is every other that was made and not forgotten
//! since, whatever becomes of the volume; one that is said to be forgotten is not. Of all that are named the bucket has
//! everything, and what they hold never changes. Of one whose end nobody was told, whoever opens the volume next finds
//! it whole or not at all.

use std::collections::BTreeMap;

use hdcs_core::objects::io::{Ask, SnapshotName};

use super::object_volume::Objects;
use super::{Content, Violation};

/// Snapshots of a bucket beyond which one is forgotten before the next is made.
const SNAPSHOTS_MAX: usize = 3;

/// What is asked of an object volume.
#[derive(Clone, Copy, Debug)]
pub(super) enum Command {
    Make(SnapshotName),
    Forget(SnapshotName),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct BucketSnapshots {
    asked: u64,
    /// What those hold that are there.
    kept: BTreeMap<SnapshotName, Vec<Content>>,
    /// Those that may be there or not, and what they hold if that is known.
    unknown: BTreeMap<SnapshotName, Option<Vec<Content>>>,
}

impl BucketSnapshots {
    /// What is to be asked next: now and then, and where there are many, one is forgotten.
    pub fn next(&mut self, is_to_forget: bool) -> Command {
        let oldest = self.kept.keys().next().copied();
        if let Some(oldest) = oldest.filter(|_| is_to_forget || self.kept.len() >= SNAPSHOTS_MAX) {
            return Command::Forget(oldest);
        }
        self.asked += 1;
        let name = SnapshotName::new(&format!("{:08}", self.asked));
        Command::Make(name.expect("digits make a name"))
    }

    /// An object volume is asked for something. Until it has answered, that is so or not.
    pub fn begin(&mut self, command: Command) -> Ask {
        match command {
            Command::Make(name) => {
                self.unknown.insert(name, None);
                Ask::Snapshot { name, made_ms: 0 }
            }
            Command::Forget(name) => {
                self.unknown.insert(name, self.kept.remove(&name));
                Ask::DeleteSnapshot { name }
            }
        }
    }

    /// It has done so. Returns what a new snapshot holds.
    pub fn ended(
        &mut self,
        command: Command,
        objects: &Objects,
    ) -> Result<Option<Vec<Content>>, Violation> {
        let named = objects.snapshots()?;
        let (Command::Make(name) | Command::Forget(name)) = command;
        let snapshot = named.iter().find(|snapshot| snapshot.name == name);
        self.unknown.remove(&name);
        match (command, snapshot) {
            (Command::Make(_), Some(snapshot)) => {
                let contents = objects.contents_of(snapshot)?;
                self.kept.insert(name, contents.clone());
                Ok(Some(contents))
            }
            (Command::Forget(_), None) => Ok(None),
            (Command::Make(_), None) => Err(lost(name)),
            (Command::Forget(_), Some(_)) => Err(Violation::new(
                "snapshot-foreign",
                format!("{name:?} is still there after it was forgotten"),
            )),
        }
    }

    /// The object volume was opened again: what nobody was told of is known now.
    pub fn reopened(&mut self, objects: &Objects) -> Result<(), Violation> {
        let unknown = std::mem::take(&mut self.unknown);
        let before = std::mem::take(&mut self.kept);
        for snapshot in objects.snapshots()? {
            let name = snapshot.name;
            let known = before.get(&name).map(|contents| Some(contents.clone()));
            let Some(held) = known.or_else(|| unknown.get(&name).cloned()) else {
                let why = format!("{name:?} is there, which nobody has asked for");
                return Err(Violation::new("snapshot-foreign", why));
            };
            let contents = objects.contents_of(&snapshot)?;
            if held.is_some_and(|held| held != contents) {
                let why = format!("{name:?} does not hold any more what it held");
                return Err(Violation::new("snapshot-changed", why));
            }
            self.kept.insert(name, contents);
        }
        match before.keys().find(|name| !self.kept.contains_key(name)) {
            Some(&name) => Err(lost(name)),
            None => Ok(()),
        }
    }
}

fn lost(name: SnapshotName) -> Violation {
    let why = format!("{name:?} was made, and is not there");
    Violation::new("snapshot-lost", why)
}
