//! The volumes that a node's shards have open, and why the others are not: what a client is told while it has no volume,
//! whichever shard it talks to.
//!
//! A shard publishes what it exports of a volume when the volume comes, when that changes, and when the volume goes. So
//! the directory is touched in handshakes and then, never for a request.
//!
//! Invariants:
//! 1. At the end of each turn the directory says of a shard's volumes what [`Served::export`] says of them.
//! 2. A shard changes what the directory says of its own volumes alone.
//! 3. From when a volume leaves one shard until it is on another one, or is known to be on none, it is *between* them. Whoever
//!    belongs to it meanwhile waits for it, and whoever asks for it, so that neither is told that it is not there.
//! 4. What is known of a volume is published before whoever asked for a change is told that it has happened.
//!
//! [`Served::export`]: super::served::Served::export

use std::collections::{BTreeMap, HashMap};

use hdcs_core::base::io::Nanos;
use hdcs_frontend::access::{Allow, Peer};
use hdcs_frontend::{Export, OpeningId, Unopened, VolumeNumber};
use parking_lot::RwLock;

/// How long a client that asks for a volume waits for it at most, from when that has begun to move: for the requests
/// that are under way as long as these are waited for, and then for its log.
const MOVE_TIME_MAX: Nanos = Nanos::from_millis(20_000);

/// See the module.
#[derive(Debug, Default)]
pub struct Directory(RwLock<Entries>);

#[derive(Debug, Default)]
struct Entries {
    volumes: BTreeMap<VolumeNumber, Entry>,
    by_name: BTreeMap<String, VolumeNumber>,
    /// Volumes that have left one shard and are not on another one yet.
    between: BTreeMap<VolumeNumber, Between>,
    /// Why volumes that the node has are not open, by name.
    explained: HashMap<String, Unopened>,
    openings: u64,
}

#[derive(Debug)]
struct Entry {
    home: Home,
    allow: Allow,
    /// What clients may open, if the volume serves.
    export: Option<Export>,
    /// Since when it moves to another shard, or has come from one and is not exported yet.
    moves_since: Option<Nanos>,
}

/// Where an opening of a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// On this shard.
    On(usize),
    /// It has left a shard and goes on at another one, or is found to be nowhere.
    Between,
    /// It is over.
    Nowhere,
}

/// A volume between two shards.
#[derive(Debug)]
struct Between {
    opening: OpeningId,
    name: String,
    allow: Allow,
    since: Nanos,
}

/// Where a volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// The shard that has it.
    pub shard: usize,
    /// Since which opening.
    pub opening: OpeningId,
    /// Its name.
    pub name: String,
}

/// Why a client does not get an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The client is not among those that may open it.
    Denied {
        /// Whether it is open.
        is_open: bool,
    },
    /// The node has such a volume, and it is not open.
    Unopened(String),
    /// It is being opened or closed.
    Changing,
    /// There is none of this name.
    Unknown,
}

impl Directory {
    /// A shard has a volume now, which serves nobody yet, in a new opening or in one that goes on after another shard has
    /// had it.
    pub fn enter(
        &self,
        shard: usize,
        number: VolumeNumber,
        name: &str,
        allow: &Allow,
        continues: Option<OpeningId>,
    ) -> OpeningId {
        let mut entries = self.0.write();
        let between = entries.between.remove(&number);
        entries.openings += 1;
        let opening = continues.unwrap_or(OpeningId(entries.openings));
        let home = Home {
            shard,
            opening,
            name: name.to_owned(),
        };
        let entry = Entry {
            home,
            allow: allow.clone(),
            export: None,
            moves_since: between.map(|between| between.since),
        };
        let before = entries.volumes.insert(number, entry);
        assert!(before.is_none(), "a volume is on one shard");
        let before = entries.by_name.insert(name.to_owned(), number);
        assert!(before.is_none(), "a name is that of one volume");
        opening
    }

    /// A volume is exported in another way, or not any more.
    pub fn publish(&self, number: VolumeNumber, export: Option<Export>) {
        if let Some(entry) = self.0.write().volumes.get_mut(&number) {
            if export.is_some() {
                entry.moves_since = None;
            }
            entry.export = export;
        }
    }

    /// A volume is to go to another shard, and will not be exported before it is there or [`Self::publish`] says otherwise.
    pub fn begin_move(&self, number: VolumeNumber, now: Nanos) {
        if let Some(entry) = self.0.write().volumes.get_mut(&number) {
            entry.moves_since = Some(now);
        }
    }

    /// Where an opening of a volume is.
    pub fn whereabouts(&self, number: VolumeNumber, opening: OpeningId) -> Whereabouts {
        let entries = self.0.read();
        if let Some(entry) = entries.volumes.get(&number)
            && entry.home.opening == opening
        {
            return Whereabouts::On(entry.home.shard);
        }
        match entries.between.get(&number) {
            Some(between) if between.opening == opening => Whereabouts::Between,
            _ => Whereabouts::Nowhere,
        }
    }

    /// A volume that was between two shards is somewhere by now, or nowhere.
    pub fn end_move(&self, number: VolumeNumber) {
        self.0.write().between.remove(&number);
    }

    /// No volume that is between two shards is waited for.
    pub fn end_moves(&self) {
        self.0.write().between.clear();
    }

    /// Who may open the volume of this name, if that moves and may still be waited for.
    pub fn moves(&self, name: &str, now: Nanos) -> Option<Allow> {
        let entries = self.0.read();
        let here = entries.by_name.get(name);
        let here = here.and_then(|number| entries.volumes.get(number));
        let here = here.and_then(|entry| Some((entry.moves_since?, &entry.allow)));
        let mut between = entries.between.values();
        let between = between.find(|between| between.name == name);
        let between = between.map(|between| (between.since, &between.allow));
        let (since, allow) = here.or(between)?;
        (now.since(since) < MOVE_TIME_MAX).then(|| allow.clone())
    }

    /// Other clients may open a volume.
    pub fn set_allow(&self, number: VolumeNumber, allow: &Allow) {
        if let Some(entry) = self.0.write().volumes.get_mut(&number) {
            entry.allow = allow.clone();
            if let Some(export) = &mut entry.export {
                export.allow = allow.clone();
            }
        }
    }

    /// A shard has a volume no longer: it goes to another one if it has begun to move and is `closed`.
    pub fn leave(&self, number: VolumeNumber, closed: bool) {
        let mut entries = self.0.write();
        let Some(entry) = entries.volumes.remove(&number) else {
            return;
        };
        entries.by_name.remove(&entry.home.name);
        if let Some(since) = entry.moves_since
            && closed
        {
            let between = Between {
                opening: entry.home.opening,
                name: entry.home.name,
                allow: entry.allow,
                since,
            };
            entries.between.insert(number, between);
        }
    }

    /// Say why a volume is not open; `None`: it is, or there is none of this name.
    pub fn explain(&self, name: String, unopened: Option<Unopened>) {
        let explained = &mut self.0.write().explained;
        match unopened {
            Some(unopened) => explained.insert(name, unopened),
            None => explained.remove(&name),
        };
    }

    /// Everything that is exported, by name.
    pub fn exports(&self) -> Vec<Export> {
        let entries = self.0.read();
        let volumes = entries.by_name.values();
        let export = |number| entries.volumes.get(number)?.export.clone();
        volumes.filter_map(export).collect()
    }

    /// The export of this name.
    pub fn export(&self, name: &str) -> Option<Export> {
        let entries = self.0.read();
        let number = entries.by_name.get(name)?;
        entries.volumes.get(number)?.export.clone()
    }

    /// Why the volume of this name is not open, if that is known.
    pub fn why_not(&self, name: &str) -> Option<Unopened> {
        self.0.read().explained.get(name).cloned()
    }

    /// How many volumes there are.
    pub fn count(&self) -> usize {
        self.0.read().volumes.len()
    }

    /// Where a volume is.
    pub fn home(&self, number: VolumeNumber) -> Option<Home> {
        let entries = self.0.read();
        Some(entries.volumes.get(&number)?.home.clone())
    }

    /// What is exported of a volume.
    pub fn exported(&self, number: VolumeNumber) -> Option<Export> {
        self.0.read().volumes.get(&number)?.export.clone()
    }

    /// Why `peer` does not get the export of this name.
    pub fn refusal(&self, name: &str, peer: &Peer) -> Refusal {
        let entries = self.0.read();
        let number = entries.by_name.get(name);
        let open = number.and_then(|number| entries.volumes.get(number));
        match (open, entries.explained.get(name)) {
            (Some(open), _) if !open.allow.lets_in(peer) => Refusal::Denied { is_open: true },
            (None, Some(unopened)) if !unopened.allow.lets_in(peer) => {
                Refusal::Denied { is_open: false }
            }
            (None, Some(unopened)) => Refusal::Unopened(unopened.why.clone()),
            (Some(_), _) => Refusal::Changing,
            (None, None) => Refusal::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEVEN: VolumeNumber = VolumeNumber(7);

    fn somebody() -> Allow {
        Allow::parse(["dns:somebody"]).unwrap()
    }

    fn export(name: &str, number: VolumeNumber, allow: Allow) -> Export {
        Export {
            number,
            opening: OpeningId::default(),
            name: name.to_owned(),
            bytes: 1 << 20,
            read_only: false,
            discards: true,
            allow,
        }
    }

    #[test]
    fn volume_is_exported_from_when_it_serves_until_it_goes() {
        let directory = Directory::default();
        let first = directory.enter(1, SEVEN, "seven", &Allow::default(), None);
        assert_eq!(directory.export("seven"), None);
        assert_eq!(directory.refusal("seven", &Peer::Local), Refusal::Changing);
        directory.publish(SEVEN, Some(export("seven", SEVEN, Allow::default())));
        assert_eq!(directory.export("seven").unwrap().number, SEVEN);
        let home = directory.home(SEVEN).unwrap();
        assert_eq!((home.shard, home.opening), (1, first));
        directory.publish(SEVEN, None);
        assert!(directory.exports().is_empty());
        assert_eq!(directory.count(), 1);
        directory.leave(SEVEN, false);
        assert_eq!((directory.count(), directory.home(SEVEN)), (0, None));
        assert_eq!(directory.refusal("seven", &Peer::Local), Refusal::Unknown);
        let second = directory.enter(0, SEVEN, "seven", &Allow::default(), None);
        assert_ne!(first, second, "connections to the first are not let in");
        directory.leave(SEVEN, false);
        let moved = directory.enter(1, SEVEN, "seven", &Allow::default(), Some(second));
        assert_eq!(second, moved, "connections follow it");
    }

    #[test]
    fn volume_is_waited_for_from_when_it_begins_to_move_until_it_is_exported_or_nowhere() {
        let directory = Directory::default();
        let (began, soon) = (Nanos(1_000), Nanos(2_000));
        let late = began.plus(MOVE_TIME_MAX);
        let exported = || Some(export("seven", SEVEN, Allow::default()));
        let opening = directory.enter(1, SEVEN, "seven", &somebody(), None);
        directory.publish(SEVEN, exported());
        assert_eq!(directory.moves("seven", soon), None);
        directory.begin_move(SEVEN, began);
        directory.publish(SEVEN, None);
        assert_eq!(directory.moves("seven", soon), Some(somebody()));
        assert_eq!(directory.moves("seven", late), None, "not for ever");
        assert_eq!(directory.moves("eight", soon), None);
        // It stays.
        directory.publish(SEVEN, exported());
        assert_eq!(directory.moves("seven", soon), None);

        directory.begin_move(SEVEN, began);
        directory.publish(SEVEN, None);
        assert_eq!(directory.whereabouts(SEVEN, opening), Whereabouts::On(1));
        directory.leave(SEVEN, true);
        assert_eq!(directory.whereabouts(SEVEN, opening), Whereabouts::Between);
        let other = OpeningId(opening.0 + 1);
        assert_eq!(directory.whereabouts(SEVEN, other), Whereabouts::Nowhere);
        assert_eq!(directory.moves("seven", soon), Some(somebody()));
        assert_eq!(directory.moves("seven", late), None);
        let again = directory.enter(0, SEVEN, "seven", &somebody(), Some(opening));
        assert_eq!(again, opening);
        assert_eq!(directory.whereabouts(SEVEN, opening), Whereabouts::On(0));
        assert_eq!(
            directory.moves("seven", soon),
            Some(somebody()),
            "it is not exported yet"
        );
        directory.publish(SEVEN, exported());
        assert_eq!(directory.moves("seven", soon), None);

        directory.begin_move(SEVEN, began);
        directory.leave(SEVEN, false);
        let found = directory.whereabouts(SEVEN, opening);
        assert_eq!(found, Whereabouts::Nowhere, "it failed on its way out");
        directory.enter(0, SEVEN, "seven", &somebody(), None);
        directory.begin_move(SEVEN, began);
        directory.leave(SEVEN, true);
        directory.end_move(SEVEN);
        assert_eq!(directory.moves("seven", soon), None, "it is nowhere");
    }

    #[test]
    fn exports_are_listed_by_name() {
        let directory = Directory::default();
        for (number, name) in [(1, "b"), (2, "c"), (3, "a")] {
            let number = VolumeNumber(number);
            directory.enter(0, number, name, &Allow::default(), None);
            directory.publish(number, Some(export(name, number, Allow::default())));
        }
        let names: Vec<_> = directory
            .exports()
            .into_iter()
            .map(|one| one.name)
            .collect();
        assert_eq!(names, ["a", "b", "c"]);
    }

    #[test]
    fn refusal_says_no_more_than_a_client_may_know() {
        let directory = Directory::default();
        let unopened = |allow| Unopened {
            why: "its device is gone".to_owned(),
            allow,
        };
        directory.explain("closed".to_owned(), Some(unopened(Allow::default())));
        let why = Refusal::Unopened("its device is gone".to_owned());
        assert_eq!(directory.refusal("closed", &Peer::Unnamed), why);
        directory.explain("closed".to_owned(), Some(unopened(somebody())));
        let denied = Refusal::Denied { is_open: false };
        assert_eq!(directory.refusal("closed", &Peer::Unnamed), denied);
        directory.explain("closed".to_owned(), None);
        assert_eq!(
            directory.refusal("closed", &Peer::Unnamed),
            Refusal::Unknown
        );

        directory.enter(0, SEVEN, "seven", &Allow::default(), None);
        directory.publish(SEVEN, Some(export("seven", SEVEN, Allow::default())));
        directory.set_allow(SEVEN, &somebody());
        let denied = Refusal::Denied { is_open: true };
        assert_eq!(directory.refusal("seven", &Peer::Unnamed), denied);
        assert_eq!(directory.export("seven").unwrap().allow, somebody());
    }
}
