//! A backend in one file: memory that stays while the program runs. docs/BACKENDS.md goes through it.
//!
//! `cargo run --example memory_backend` runs the conformance suite over it, and so does its test.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use hdcs_backend::url::{Given, OptionList, Scheme, UrlError, decode};
use hdcs_backend::{
    Absent, Ask, Backend, BackendError, Capabilities, Found, Held, Opened, Operation, Place, Port,
    Prepared, check_size, conformance, filters,
};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, Extent, ExtentState, Nanos, Token};
use hdcs_device::ring::Outcome;

/// What a line in `backends::SCHEMES` would name.
const SCHEME: Scheme = Scheme {
    name: "memory",
    form: "memory:NAME",
    options: &["depth"],
    parse,
};

type Image = Arc<Mutex<Vec<u8>>>;

/// Every image of this program: it stands for what is on the other end of a network.
static IMAGES: Mutex<BTreeMap<String, Image>> = Mutex::new(BTreeMap::new());

/// What the URL says. Nothing is looked at when a URL is parsed.
#[derive(Debug)]
struct MemoryPlace {
    name: String,
    depth: usize,
}

fn parse(given: &Given<'_>, options: &mut OptionList) -> Result<Box<dyn Place>, UrlError> {
    let name = String::from_utf8(decode(given.place)?)
        .ok()
        .filter(|name| !name.is_empty())
        .ok_or_else(|| given.refuse("it must have a name, as in memory:disk"))?;
    let depth = options.number("depth", 1024)?.unwrap_or(64).max(1) as usize;
    Ok(Box::new(MemoryPlace { name, depth }))
}

impl MemoryPlace {
    fn image(&self) -> Option<Image> {
        let images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
        images.get(&self.name).cloned()
    }
}

impl Place for MemoryPlace {
    fn name(&self) -> String {
        format!("memory:{}", self.name)
    }

    fn find(&self) -> Result<Option<Found>, BackendError> {
        Ok(self.image().map(|image| Found {
            bytes: image.lock().unwrap_or_else(PoisonError::into_inner).len() as u64,
            partly: false,
        }))
    }

    fn open(&self, bytes: u64, absent: Absent) -> Result<Box<dyn Opened>, BackendError> {
        let image = match (self.image(), absent) {
            (Some(_), Absent::CreateNew) => return Err(BackendError::Exists(self.name())),
            (Some(image), _) => image,
            (None, Absent::Refuse) => return Err(BackendError::Absent(self.name())),
            (None, Absent::Create | Absent::CreateNew) => {
                let image = Image::new(Mutex::new(vec![0; bytes as usize]));
                let mut images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
                images.insert(self.name.clone(), Arc::clone(&image));
                image
            }
        };
        if let Some(found) = self.find()? {
            check_size(&self.name(), found, bytes, absent)?;
        }
        let (name, depth) = (self.name(), self.depth);
        Ok(Box::new(OpenMemory { image, name, depth }))
    }

    fn remove(&self, _was: Held) -> Result<(), BackendError> {
        let mut images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
        let removed = images.remove(&self.name);
        removed.map(drop).ok_or(BackendError::Absent(self.name()))
    }
}

/// Open, and on its way to the thread that will use it.
struct OpenMemory {
    image: Image,
    name: String,
    depth: usize,
}

impl Opened for OpenMemory {
    fn build(self: Box<Self>) -> Box<dyn Backend> {
        Box::new(Memory {
            image: self.image,
            depth: self.depth,
        })
    }

    fn identity(&self) -> Option<String> {
        Some(self.name.clone())
    }
}

struct Memory {
    image: Image,
    depth: usize,
}

impl Memory {
    fn perform(&self, ask: Ask) -> Result<Done, IoError> {
        let mut image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        match ask {
            Ask::Read { offset, mut buf } => {
                let from = offset as usize;
                let content = image.get(from..from + buf.len()).ok_or(IoError::Failed)?;
                buf.copy_from_slice(content);
                Ok(Done::Read(buf))
            }
            Ask::Write { offset, data } => {
                let mut to = offset as usize;
                for buf in data {
                    let place = image.get_mut(to..to + buf.len()).ok_or(IoError::Failed)?;
                    place.copy_from_slice(&buf);
                    to += buf.len();
                }
                Ok(Done::Written)
            }
            Ask::Zero { offset, bytes, .. } => {
                let range = offset as usize..(offset + bytes) as usize;
                image.get_mut(range).ok_or(IoError::Failed)?.fill(0);
                Ok(Done::Written)
            }
            Ask::Flush => Ok(Done::Written),
            Ask::Extents { range } => Ok(Done::Extents(vec![Extent {
                range,
                state: ExtentState::Data,
            }])),
            Ask::Resize { bytes } => {
                image.resize(bytes as usize, 0);
                Ok(Done::Written)
            }
            // It does not say that it has snapshots, so nobody asks.
            Ask::Snapshot(_) => Err(IoError::Failed),
        }
    }
}

impl Backend for Memory {
    fn submit(&mut self, _now: Nanos, operation: Operation, port: &mut Port<'_>) {
        // What blocks must not run here, on the shard's thread: it goes to `port.ring.job`, or to a
        // thread that ends it by `port.ring.remote`.
        let result = self.perform(operation.ask);
        port.end(operation.token, result);
    }

    fn completed(&mut self, _: Nanos, _: Token, outcome: Outcome, _: &mut Port<'_>) {
        unreachable!("it gives nothing to the ring that could end in {outcome:?}");
    }

    fn poll(&mut self, _now: Nanos, _port: &mut Port<'_>) {}

    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            extents: false,
            in_flight_max: self.depth,
            atomic_flush: false,
            snapshots: false,
            read_only: false,
        }
    }
}

/// The conformance suite over one of its places, with the faults that filters make.
fn conform(name: &str, say: &mut dyn FnMut(&str)) -> Result<(), UrlError> {
    let url = format!("memory:{name}");
    let given = Given {
        url: &url,
        place: name,
    };
    let place = (SCHEME.parse)(&given, &mut OptionList::parse("depth=7")?)?;
    let open = |options: &str, bytes: u64, absent: Absent| {
        let options = filters::Options::parse(&mut OptionList::parse(options)?)?;
        let filters = filters::prepare(&options)?;
        Ok(Prepared::over(place.open(bytes, absent)?, filters, bytes))
    };
    conformance::contract(&open, say);
    conformance::faults(&open, say);
    Ok(())
}

fn main() -> Result<(), UrlError> {
    conform("disk", &mut |what| println!("{what}"))
}

#[test]
fn memory_backend_conforms() {
    conform("tested", &mut |_| ()).unwrap();
}
