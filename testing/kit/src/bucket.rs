//! Volumes over objects in one bucket, on a store that fails only if it is told to.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::codec::{Codec, Method};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, Nanos, Token};
use hdcs_core::objects::format::SLOT_BYTES;
use hdcs_core::objects::io::{
    Action, Ask, Condition, Event, Kind, Listed, Name, Phase, StoreError, Stored,
};
use hdcs_core::objects::{Config, ObjectVolume, frames};

/// Objects by their whole names.
pub type Objects = Rc<RefCell<BTreeMap<String, Vec<u8>>>>;

/// A volume in a bucket.
pub struct Bucket {
    /// The state machine.
    pub volume: ObjectVolume,
    /// What the bucket holds.
    pub objects: Objects,
    place: String,
    ended: u64,
    /// How many of them failed.
    failed: u64,
    /// The time that it is told.
    pub now: Nanos,
    /// What the last read brought.
    read: Option<Vec<u8>>,
    /// Puts of the map are not answered while this is set.
    pub holds_map: bool,
    /// Those that were not.
    pub held: Vec<Token>,
    /// Puts of manifests, and deletes, fail while these are set.
    pub fails_manifests: bool,
    /// Deletions fail.
    pub fails_deletes: bool,
    /// Bytes that gets have brought.
    pub bytes_got: u64,
    /// Pages of the map that the longest turn has merged.
    pub longest_merge: u64,
    /// Bytes of the map in memory that the longest turn has forgotten.
    pub longest_forgetting: u64,
    /// What others do before the first put of a manifest.
    meanwhile: Option<fn(&Objects)>,
}

/// Compresses slots whose blocks hold one byte each, and tells the methods apart.
#[derive(Debug)]
struct OneByte;

impl Codec for OneByte {
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        let mut bytes = vec![method as u8];
        for slot in plain.chunks(SLOT_BYTES) {
            let (block, sum) = slot.split_at(4096);
            if block.iter().any(|&byte| byte != block[0]) {
                return None;
            }
            bytes.push(block[0]);
            bytes.extend_from_slice(sum);
        }
        stored.get_mut(..bytes.len())?.copy_from_slice(&bytes);
        Some(bytes.len())
    }

    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool {
        if stored.len() != 1 + plain.len() / SLOT_BYTES * 5 || stored[0] != method as u8 {
            return false;
        }
        for (slot, packed) in plain.chunks_mut(SLOT_BYTES).zip(stored[1..].chunks(5)) {
            slot[..4096].fill(packed[0]);
            slot[4096..].copy_from_slice(&packed[1..]);
        }
        true
    }
}

impl Bucket {
    /// The volume at a place, which has to open; `parent` is where the one is that it is a clone of.
    pub fn open(objects: &Objects, place: &str, config: Config, parent: &str) -> Self {
        let this = Self::open_beside(objects, place, config, parent, |_| {});
        assert_eq!(this.volume.phase(), Phase::Open);
        this
    }

    /// The volume at a place, which may open or not; `meanwhile` is what others do before its first put of a manifest.
    pub fn open_beside(
        objects: &Objects,
        place: &str,
        config: Config,
        parent: &str,
        meanwhile: fn(&Objects),
    ) -> Self {
        let mut this = Self {
            volume: ObjectVolume::new(config),
            objects: Rc::clone(objects),
            place: place.to_owned(),
            ended: 0,
            failed: 0,
            now: Nanos(0),
            read: None,
            holds_map: false,
            held: Vec::new(),
            fails_manifests: false,
            fails_deletes: false,
            bytes_got: 0,
            longest_merge: 0,
            longest_forgetting: 0,
            meanwhile: Some(meanwhile),
        };
        this.volume.clone_of(parent.to_owned(), place.to_owned());
        this.go();
        this
    }

    /// Ask for something, which has to end well.
    pub fn ask(&mut self, ask: Ask) {
        assert!(self.try_to(ask), "the store never fails");
    }

    /// Ask for something, which has to end; whether it ends well.
    pub fn try_to(&mut self, ask: Ask) -> bool {
        let mut actions = Vec::new();
        let token = Token(0);
        let event = Event::Submit { token, ask };
        let (ended, failed) = (self.ended, self.failed);
        self.volume.step(self.now, event, &mut actions);
        // What is refused ends at once, and nothing else.
        for action in actions {
            assert!(self.perform(action).is_none());
        }
        self.go();
        assert_eq!(self.ended, ended + 1);
        self.failed == failed
    }

    /// Write blocks that hold one byte.
    pub fn fill(&mut self, pool: &Arc<Pool>, block: u64, blocks: usize, byte: u8) {
        let mut buf = pool.alloc(blocks * 4096).expect("nothing holds it");
        buf.fill(byte);
        let data = vec![buf.freeze()];
        let offset = block * 4096;
        self.ask(Ask::Write { offset, data });
    }

    /// Read a block.
    pub fn read(&mut self, pool: &Arc<Pool>, block: u64) -> Vec<u8> {
        let buf = pool.alloc(4096).expect("nothing holds it");
        let offset = block * 4096;
        self.ask(Ask::Read { offset, buf });
        self.read.take().expect("a read brings what it read")
    }

    /// Answer the puts of the map that were held.
    pub fn release_map(&mut self) {
        self.holds_map = false;
        for token in std::mem::take(&mut self.held) {
            let result = Ok(Stored::Done);
            let mut actions = Vec::new();
            let event = Event::Stored { token, result };
            self.volume.step(self.now, event, &mut actions);
            assert!(actions.is_empty());
        }
        self.go();
    }

    fn whole(&self, name: Name) -> String {
        match name.volume {
            0 => format!("{}{name}", self.place),
            number => format!("{}{name}", self.volume.ancestor_location(number - 1)),
        }
    }

    /// Perform everything until nothing is left, with pauses only while something that was asked for waits.
    fn go(&mut self) {
        loop {
            let mut actions = Vec::new();
            let before = self.volume.stats();
            self.volume.poll(self.now, &mut actions);
            let after = self.volume.stats();
            let merged = after.pages_merged - before.pages_merged;
            self.longest_merge = self.longest_merge.max(merged);
            let forgotten = before
                .map_memory_bytes
                .saturating_sub(after.map_memory_bytes);
            self.longest_forgetting = self.longest_forgetting.max(forgotten);
            if actions.is_empty() {
                match self.volume.next_wakeup() {
                    Some(at) if at <= self.now => {}
                    Some(at) if !self.volume.is_idle() && self.held.is_empty() => self.now = at,
                    _ => return,
                }
            }
            let mut actions = VecDeque::from(actions);
            while let Some(action) = actions.pop_front() {
                let Some((token, result)) = self.perform(action) else {
                    continue;
                };
                let mut more = Vec::new();
                let event = Event::Stored { token, result };
                self.volume.step(self.now, event, &mut more);
                actions.extend(more);
            }
        }
    }

    fn perform(&mut self, action: Action) -> Option<(Token, Result<Stored, StoreError>)> {
        if let Action::Put { name, .. } = &action
            && name.kind == Kind::Manifest
            && let Some(meanwhile) = self.meanwhile.take()
        {
            meanwhile(&self.objects);
        }
        let failed = Err(StoreError::Io(IoError::Failed));
        Some(match action {
            Action::Put { token, name, .. }
                if self.fails_manifests && name.kind == Kind::Manifest =>
            {
                (token, failed)
            }
            Action::Delete { token, .. } if self.fails_deletes => (token, failed),
            Action::Put {
                token,
                name,
                condition: Condition::IfAbsent,
                ..
            } if self.objects.borrow().contains_key(&self.whole(name)) => {
                (token, Err(StoreError::Exists))
            }
            Action::Put {
                token, name, data, ..
            } => {
                let bytes = data.iter().flat_map(|buf| buf.iter().copied()).collect();
                self.objects.borrow_mut().insert(self.whole(name), bytes);
                if self.holds_map && name.kind == Kind::Map {
                    self.held.push(token);
                    return None;
                }
                (token, Ok(Stored::Done))
            }
            Action::PutCompressed {
                token,
                name,
                data,
                slot_bytes,
                method,
            } => {
                let bytes: Vec<u8> = data.iter().flat_map(|buf| buf.iter().copied()).collect();
                let (slots, table) = bytes.split_at(slot_bytes);
                let volume = self.volume.uuid();
                let (object, frames) =
                    frames::pack(&OneByte, method, volume, name.number, slots, table);
                self.objects.borrow_mut().insert(self.whole(name), object);
                (token, Ok(Stored::Packed(frames)))
            }
            Action::GetCompressed {
                token,
                name,
                part,
                mut buf,
            } => {
                self.bytes_got += part.bytes() as u64;
                let objects = self.objects.borrow();
                let from = part.offset() as usize;
                let stored = &objects[&self.whole(name)][from..from + part.bytes()];
                part.unpack(&OneByte, stored, &mut buf);
                (token, Ok(Stored::Read(buf)))
            }
            Action::Get {
                token,
                name,
                offset,
                mut buf,
                ..
            } => {
                self.bytes_got += buf.len() as u64;
                let range = offset as usize..offset as usize + buf.len();
                let objects = self.objects.borrow();
                let result = match objects.get(&self.whole(name)).map(|bytes| bytes.get(range)) {
                    Some(Some(part)) => {
                        buf.copy_from_slice(part);
                        Ok(Stored::Read(buf))
                    }
                    Some(None) => Err(StoreError::Short),
                    None => Err(StoreError::NotFound),
                };
                (token, result)
            }
            Action::Delete { token, name } => {
                self.objects.borrow_mut().remove(&self.whole(name));
                (token, Ok(Stored::Done))
            }
            Action::List {
                token,
                volume,
                prefix,
                after,
            } => {
                let name = Name {
                    volume,
                    ..Name::own(Kind::Data, 0)
                };
                let whole = self.whole(name);
                let place = &whole[..whole.len() - name.to_string().len()];
                let objects = self.objects.borrow();
                let objects = objects
                    .iter()
                    .filter_map(|(name, bytes)| Some((name.strip_prefix(place)?, bytes)))
                    .filter(|(name, _)| name.starts_with(prefix) && *name > after.as_str())
                    .map(|(name, bytes)| Listed {
                        name: name.to_owned(),
                        bytes: bytes.len() as u64,
                    })
                    .collect();
                let more = false;
                (token, Ok(Stored::Listed { objects, more }))
            }
            Action::End(completion) => {
                match completion.result {
                    Ok(Done::Read(buf)) => self.read = Some(buf.to_vec()),
                    Ok(_) => {}
                    Err(_) => self.failed += 1,
                }
                self.ended += 1;
                return None;
            }
            Action::SnapshotEnd { result, .. } => {
                self.failed += u64::from(result.is_err());
                self.ended += 1;
                return None;
            }
        })
    }
}
