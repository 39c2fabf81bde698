//! The volumes that this node has: the entry of each, why it is not open if it is not, and the operation that is under
//! way on it.
//!
//! Invariants:
//! 1. One operation at a time changes a volume; a second one is refused, not queued.
//! 2. Whoever asks the data path for a volume that is not open is told what its slot says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hdcs_api::{ApiError, ErrorKind};
use hdcs_backend::StoredClone;
use hdcs_core::node::opening::Failure;
use hdcs_frontend::access::Allow;
use hdcs_frontend::{Unopened, VolumeNumber};

use super::open::NotOpen;
use super::setup::Setup;
use super::{lock, parse_name};
use crate::catalogue::{Entry, Found};
use crate::control::link::{Link, at_volume};
use crate::shard::command::{Command, OpenFailure};

/// A volume that this node has.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub found: Found,
    /// Why the shard does not have it although the entry is good.
    pub not_open: Option<NotOpen>,
    /// What it needs of memory at least.
    least_bytes: u64,
}

/// Marks a volume as having an operation under way.
pub(super) struct Busy<'a> {
    volumes: &'a Volumes,
    name: String,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        lock(&self.volumes.busy).remove(&self.name);
    }
}

/// What is being done to a volume that goes to another shard.
pub(super) const MOVED: &str = "moved";

fn is_busy(name: &str, what: &str) -> ApiError {
    let why = format!("volume {name}: it is being {what}: wait until that has ended");
    ApiError::new(ErrorKind::Conflict, why)
}

/// The volumes of the node, by name.
pub(super) struct Volumes {
    setup: Arc<Setup>,
    link: Arc<Link>,
    slots: Mutex<BTreeMap<String, Slot>>,
    /// Operations under way.
    busy: Mutex<BTreeMap<String, &'static str>>,
}

impl Volumes {
    /// None yet.
    pub fn new(setup: Arc<Setup>, link: Arc<Link>) -> Self {
        Self {
            setup,
            link,
            slots: Mutex::default(),
            busy: Mutex::default(),
        }
    }

    /// Begin an operation on a volume, which is refused while another one is under way.
    pub fn begin(&self, name: &str, what: &'static str) -> Result<Busy<'_>, ApiError> {
        let mut busy = lock(&self.busy);
        if let Some(other) = busy.get(name) {
            return Err(is_busy(name, other));
        }
        busy.insert(name.to_owned(), what);
        Ok(Busy {
            volumes: self,
            name: name.to_owned(),
        })
    }

    /// Refuse what goes on beside other operations, but not while a volume moves.
    pub fn refuse_while_moved(&self, name: &str) -> Result<(), ApiError> {
        match lock(&self.busy).get(name) {
            Some(&MOVED) => Err(is_busy(name, MOVED)),
            _ => Ok(()),
        }
    }

    /// What the node has under this name.
    pub fn slot(&self, name: &str) -> Result<Slot, ApiError> {
        parse_name(name)?;
        lock(&self.slots).get(name).cloned().ok_or_else(|| {
            ApiError::new(
                ErrorKind::NotFound,
                format!(
                    "no volume {name}: {}: see `hdcs volume list`",
                    self.setup.layout().root().display()
                ),
            )
        })
    }

    /// The entry of a volume that the shard has.
    pub fn entry(&self, name: &str) -> Result<Entry, ApiError> {
        let slot = self.slot(name)?;
        let why = match (slot.found, slot.not_open) {
            (Found::Entry(entry), None) => return Ok(*entry),
            (Found::Entry(_), Some(not_open)) => not_open.to_string(),
            (Found::Damaged(why), _) => why,
        };
        Err(ApiError::new(
            ErrorKind::Conflict,
            format!("volume {name}: it is not open: {why}"),
        ))
    }

    /// Note what became of a volume, and have the data path tell it to whoever asks for it.
    pub fn put(&self, entry: Entry, not_open: Option<NotOpen>) {
        let name = entry.name.to_string();
        let why = not_open.as_ref().map(ToString::to_string);
        let slot = Slot {
            least_bytes: self.setup.needs_of(&entry).least_parts().total(),
            found: Found::Entry(Box::new(entry)),
            not_open,
        };
        lock(&self.slots).insert(name.clone(), slot);
        self.explain(&name, why);
    }

    /// Have the data path tell whoever asks for a volume why it is not open; `None` if it is, or is not there.
    pub fn explain(&self, name: &str, why: Option<String>) {
        let unopened = why.map(|why| Unopened {
            why,
            allow: self.allow_of(name),
        });
        // If the shard has ended, nobody asks any more.
        self.link.send(Command::Explain(name.to_owned(), unopened));
    }

    /// Which clients may open a volume over TCP; nobody if that cannot be told.
    fn allow_of(&self, name: &str) -> Allow {
        let slots = lock(&self.slots);
        let Some(Found::Entry(entry)) = slots.get(name).map(|slot| &slot.found) else {
            return Allow::default();
        };
        self.setup.allow_of(entry)
    }

    /// The entries that take part in the split of memory.
    pub fn entries(&self) -> Vec<Entry> {
        let slots = lock(&self.slots);
        slots
            .values()
            .filter_map(|slot| match &slot.found {
                Found::Entry(entry) => Some(Entry::clone(entry)),
                Found::Damaged(_) => None,
            })
            .collect()
    }

    /// How many take part in the split of memory.
    pub fn count(&self) -> usize {
        let slots = lock(&self.slots);
        let entries = slots
            .values()
            .filter(|slot| matches!(slot.found, Found::Entry(_)));
        entries.count()
    }

    /// Whether an operation is under way on a volume.
    pub fn is_busy(&self, name: &str) -> bool {
        lock(&self.busy).contains_key(name)
    }

    /// Whether something has this name.
    pub fn has(&self, name: &str) -> bool {
        lock(&self.slots).contains_key(name)
    }

    /// All as they are now.
    pub fn slots(&self) -> BTreeMap<String, Slot> {
        lock(&self.slots).clone()
    }

    /// The entry of a volume, whether it is open or not.
    pub fn known(&self, name: &str) -> Result<Entry, ApiError> {
        match self.slot(name)?.found {
            Found::Entry(entry) => Ok(*entry),
            Found::Damaged(why) => Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why))),
        }
    }

    /// Why a volume is not open, if it is there and is not.
    pub fn not_open(&self, name: &str) -> Option<NotOpen> {
        lock(&self.slots).get(name)?.not_open.clone()
    }

    /// Why a volume was not opened by hand, as its slot says it now.
    pub fn refusal(&self, name: &str, failure: &OpenFailure) -> ApiError {
        let kind = match failure.kind {
            Failure::Unreachable | Failure::Stopping => ErrorKind::Unavailable,
            Failure::LogLost
            | Failure::LocalLost
            | Failure::Gone
            | Failure::Shortage
            | Failure::InUse
            | Failure::Refused => ErrorKind::Conflict,
        };
        let why = self.not_open(name);
        let why = why.map_or(failure.message.clone(), |why| why.to_string());
        ApiError::new(kind, format!("volume {name}: {why}"))
    }

    /// Note why a volume is not open, and have the data path tell it to whoever asks for it.
    pub fn set_not_open(&self, name: &str, not_open: NotOpen) {
        let why = not_open.to_string();
        if let Some(slot) = lock(&self.slots).get_mut(name) {
            slot.not_open = Some(not_open);
        }
        self.explain(name, Some(why));
    }

    /// Note that the opening of a volume has begun, if a start is to open it. Clients are told the same as before.
    pub fn note_begun(&self, name: &str, at: Instant) {
        if let Some(slot) = lock(&self.slots).get_mut(name)
            && let Some(NotOpen::Opening { since }) = &mut slot.not_open
        {
            *since = Some(at);
        }
    }

    /// Note a volume whose entry is damaged.
    pub fn put_damaged(&self, name: String, why: String) {
        self.explain(&name, Some(why.clone()));
        let slot = Slot {
            least_bytes: 0,
            found: Found::Damaged(why),
            not_open: None,
        };
        lock(&self.slots).insert(name, slot);
    }

    /// A volume is gone.
    pub fn remove(&self, name: &str) {
        lock(&self.slots).remove(name);
    }

    /// Volumes whose next attempt to open them is due, at most so many.
    pub fn due(&self, now: Instant, count_max: usize) -> Vec<String> {
        let slots = lock(&self.slots);
        let due = slots.iter().filter(|(_, slot)| {
            matches!(slot.not_open, Some(NotOpen::Waiting { retry_at, .. }) if retry_at <= now)
        });
        due.take(count_max).map(|(name, _)| name.clone()).collect()
    }

    /// What each volume that is not being deleted or detached needs of memory at least, by its number.
    pub fn least_bytes(&self) -> Vec<(u32, u64)> {
        let slots = lock(&self.slots);
        let stay = slots.values().filter_map(|slot| match &slot.found {
            Found::Entry(entry) if !matches!(slot.not_open, Some(NotOpen::Leaving { .. })) => {
                Some((entry.number, slot.least_bytes))
            }
            _ => None,
        });
        stay.collect()
    }

    /// The name of the volume with a number.
    pub fn name_of(&self, number: VolumeNumber) -> String {
        let entries = self.entries();
        let entry = entries.iter().find(|entry| entry.number == number.0);
        entry.map_or_else(|| format!("number {}", number.0), |e| e.name.to_string())
    }

    /// What a clone is called: by its volume's name if that is here.
    fn called(&self, clone: &StoredClone) -> String {
        let entries = self.entries();
        let mut here = entries.iter();
        let here = here.find(|entry| entry.backend_identity.as_ref() == Some(&clone.identity));
        here.map_or_else(|| clone.location.clone(), |entry| entry.name.to_string())
    }

    /// The same of several.
    pub fn called_all<'a>(&self, clones: impl IntoIterator<Item = &'a StoredClone>) -> Vec<String> {
        clones.into_iter().map(|clone| self.called(clone)).collect()
    }

    /// The URL of the backend of a volume, as far as that is known, in words otherwise.
    pub fn backend_of(&self, name: &str) -> String {
        match self.slot(name).map(|slot| slot.found) {
            Ok(Found::Entry(entry)) => entry.backend_url(self.setup.layout()),
            _ => "unknown backend".to_owned(),
        }
    }
}
