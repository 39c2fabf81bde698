//! A volume as immutable objects in a store: the driver of [`hdcs_core::objects`].
//!
//! The state machine decides; here its actions become requests to a [`crate::stores::Client`], and
//! their ends events. It is opened on the thread that opens backends, with a loop of its own, and
//! then moves to its shard.
//!
//! Invariants:
//! 1. Each request of the machine is under way once, and its end reaches the machine, unless the
//!    program ends first.
//! 2. A request holds no memory of the machine: data is copied before it begins, a piece in each turn, and
//!    when it ends, so everything that the machine counts without atomics stays in one place.
//! 3. The machine sees a clock of its own, the same on both threads.
//! 4. Once it is to finish, nothing new begins.
//! 5. Of an encrypted volume, slots leave this process only encrypted, after they were compressed; tables, maps, manifests and
//!    references say where data is, not what it is, and stay as they are. The wrapped key is there
//!    before the first manifest ([`key`]).

mod compressed;
mod contents;
mod dead_clones;
pub mod given_up;
mod joining;
mod lineage;
mod opening;
mod verify;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdcs_core::base::buf::BufMut;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Nanos, Token};
use hdcs_core::objects::frames::Frames;
use hdcs_core::objects::io::{
    Action, Ask as ObjectAsk, Condition, Event, Kind, Listed, Name, OpenError, Phase,
    SnapshotError, StoreError as Failure, Stored,
};
use hdcs_core::objects::{Config, ObjectVolume};
use hdcs_core::volume::Inherited;
use hdcs_device::ring::Outcome;
use hdcs_device::worker::{JobOutput, Remote};
use uuid::Uuid;

use self::compressed::Compressed;
use self::contents::{
    There, at, delete_all, gone, identity, kept, newest_manifest, references, refuse_other,
};
use self::joining::{How, Joining};
use self::opening::{late, not_free, within};
use super::compression::Compression;
use super::copying::Copying;
use super::url::{Given, OptionList, UrlError};
use super::{
    Absent, Ask, Backend, BackendError, Capabilities, CloneOrigin, Found, Held, Opened, Operation,
    Place, Port, SnapshotCommand, SnapshotStore, StoredSnapshots, check_size,
};
use crate::crypt::ObjectKey;
use crate::crypt::wrapped::WrappedKey;
use crate::memory::{self, ObjectMemory};
use crate::stores::{self, Client, Counters, LIST_MAX, Listing, Store, StoreError, runtime};

mod key;

/// The option with the time for one request, and the one with the time for all its attempts.
pub const TIMEOUT: &str = "timeout_s";
/// See [`TIMEOUT`].
pub const RETRY: &str = "retry_s";
/// Their values when they are not given, and the most they may be.
const TIMEOUT_DEFAULT_S: u64 = 30;
const RETRY_DEFAULT_S: u64 = 60;
const SECONDS_MAX: u64 = 3600;
/// An opening gives up after this, with all that it asks: somebody waits for it.
const OPEN_TIME_MAX: Duration = Duration::from_secs(30);
/// Patience with one request of an opening.
const OPEN_PATIENCE: Duration = Duration::from_secs(12);
/// Operations that the machine is given at once; the others wait before it.
const IN_FLIGHT_MAX: usize = 256;

/// An option that is a time in seconds.
pub fn seconds(options: &mut OptionList, name: &'static str) -> Result<Duration, UrlError> {
    let default = if name == TIMEOUT {
        TIMEOUT_DEFAULT_S
    } else {
        RETRY_DEFAULT_S
    };
    match options.number(name, SECONDS_MAX)?.unwrap_or(default) {
        0 => Err(UrlError::Value {
            name,
            value: "0".to_owned(),
            must: "at least 1",
        }),
        seconds => Ok(Duration::from_secs(seconds)),
    }
}

/// How a kind of store is reached.
pub trait Reach: std::fmt::Debug + Send + Sync {
    /// Two places of one name are the same.
    fn name(&self) -> String;
    /// A client for the place; none of its requests takes longer than `timeout`. Sends nothing yet.
    fn reach(&self, timeout: Option<Duration>) -> Result<Arc<dyn Store>, BackendError>;
    /// The place within its store, without how that is reached, which may change: clones keep it.
    fn location(&self) -> String;
    /// Another place in the same store, by its location.
    fn elsewhere(&self, location: &str) -> Option<Arc<dyn Reach>>;
    /// See [`Place::exposure`].
    fn exposure(&self) -> Option<String> {
        None
    }
    /// See [`Place::local_path`].
    fn local_path(&self) -> Option<&Path> {
        None
    }
    /// See [`Place::is_gone`].
    fn is_gone(&self) -> bool {
        false
    }
    /// Whether nothing is at a place if nothing is found there: not so where it could be mounted and is not.
    fn proves_absence(&self) -> bool {
        true
    }
    /// The store: places in one of the same name can be clones of each other.
    fn store(&self) -> String;
}

/// A place in a store.
#[derive(Debug)]
pub struct ObjectsPlace {
    reach: Arc<dyn Reach>,
    patience: Duration,
    key: Option<ObjectKey>,
    /// What the volume is that will be opened here: see [`identity`].
    expected: Option<String>,
    memory: ObjectMemory,
    open_time: Duration,
}

impl ObjectsPlace {
    /// A place that is reached so, with patience for each request.
    pub fn new(reach: Arc<dyn Reach>, patience: Duration) -> Self {
        Self {
            reach,
            patience,
            key: None,
            expected: None,
            memory: ObjectMemory::most(),
            open_time: OPEN_TIME_MAX,
        }
    }

    /// A client for it.
    pub fn client(&self) -> Result<Client, BackendError> {
        Ok(Client::over(self.reach.reach(None)?, self.patience))
    }

    /// One that does not keep somebody waiting for long.
    fn brief_client(&self) -> Result<Client, BackendError> {
        let patience = self.patience.min(OPEN_PATIENCE);
        let store = self.reach.reach(Some(OPEN_PATIENCE))?;
        Ok(Client::over(store, patience))
    }

    fn drive(&self, machine: ObjectVolume, until: Instant) -> Result<Driver, BackendError> {
        let reach = Arc::clone(&self.reach);
        let patience = self.patience.min(OPEN_PATIENCE);
        Driver::open(
            machine,
            reach,
            self.client()?,
            (patience, until),
            self.key.clone(),
        )
    }
}

/// A random number for [`Config::nonce`].
fn nonce() -> u64 {
    Uuid::new_v4().as_u128() as u64
}

impl Place for ObjectsPlace {
    fn name(&self) -> String {
        self.reach.name()
    }

    fn local_path(&self) -> Option<&Path> {
        self.reach.local_path()
    }

    fn is_gone(&self) -> bool {
        self.reach.is_gone()
    }

    fn exposure(&self) -> Option<String> {
        self.reach.exposure()
    }

    fn find(&self) -> Result<Option<Found>, BackendError> {
        let client = self.brief_client()?;
        let until = Instant::now() + self.open_time;
        match within(until, &client, at(&client, None))? {
            There::Free(_) => Ok(None),
            There::Volume(there) => {
                refuse_other(&there, self.expected.as_deref())?;
                Ok(Some(Found {
                    bytes: there.bytes,
                    partly: false,
                }))
            }
            There::Gone(_, left) => Err(not_free(&client, left)),
        }
    }

    fn verify(
        &self,
        watch: &mut dyn super::verify::Watch,
    ) -> Result<super::verify::Verified, BackendError> {
        let bounds = if self.memory == ObjectMemory::least() {
            verify::Bounds::least()
        } else {
            verify::Bounds::default()
        };
        verify::verify(self, bounds, watch)
    }

    fn snapshot_store(&self) -> Option<&dyn SnapshotStore> {
        Some(self)
    }

    fn encrypt(&mut self, key: ObjectKey) {
        self.key = Some(key);
    }

    fn expect(&mut self, identity: &str) {
        self.expected = Some(identity.to_owned());
    }

    fn choose_identity(&self) -> Option<String> {
        Some(identity(*Uuid::new_v4().as_bytes()))
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn memory_kind(&self) -> memory::Kind {
        memory::Kind::Objects
    }

    fn bound(&mut self, memory: ObjectMemory) {
        self.memory = memory;
    }

    fn open(&self, bytes: u64, absent: Absent) -> Result<Box<dyn Opened>, BackendError> {
        let client = self.brief_client()?;
        let key = self.key.as_ref().map(|key| &key.wrapped);
        let until = Instant::now() + self.open_time;
        let there = within(until, &client, at(&client, key))?;
        let which = self.which(&client, there, absent)?;
        let mut config = Config::new(which.access, nonce());
        self.memory.bound(&mut config);
        config.bytes = (absent != Absent::Refuse).then_some(bytes);
        config.uuid = which.uuid;
        let driver = key::beside(&client, key, which.lacking, which.uuid, until, || {
            self.drive(ObjectVolume::new(config), until)
        });
        let driver = driver.map_err(|error| match (error, which.uuid) {
            (BackendError::Exists(_), Some(uuid)) if absent == Absent::Refuse => {
                BackendError::Replaced {
                    has: "another volume".to_owned(),
                    was: identity(uuid),
                }
            }
            (error, _) => error,
        })?;
        let found = Found {
            bytes: driver.machine.bytes(),
            partly: false,
        };
        check_size(&driver.client.place(), found, bytes, absent)?;
        let origin = lineage::origin(&driver);
        Ok(Box::new(OpenVolume { driver, origin }))
    }

    fn remove(&self, was: Held) -> Result<(), BackendError> {
        let key = match was {
            Held::Objects { key } => key,
            Held::Unnamed | Held::File { .. } => None,
        };
        let client = self.client()?;
        runtime().block_on(async {
            let gone = gone(&client).await?;
            let kinds = [
                Kind::Data,
                Kind::Map,
                Kind::Snapshot,
                Kind::Clone,
                Kind::Manifest,
            ];
            delete_all(&client, &gone, key, kinds).await.map(drop)
        })
    }
}

impl SnapshotStore for ObjectsPlace {
    fn kept(&self) -> Result<Option<StoredSnapshots>, BackendError> {
        let client = self.brief_client()?;
        within(Instant::now() + self.open_time, &client, async {
            let Some(manifest) = newest_manifest(&client).await? else {
                return Ok(None);
            };
            let references = references(&client, &manifest).await?;
            Ok(Some(kept(&manifest, references)))
        })
    }

    fn clone_from(
        &self,
        origin: &CloneOrigin<'_>,
        _copying: &Copying,
    ) -> Result<Found, BackendError> {
        self.make_clone(origin)
    }

    fn is_objects(&self) -> bool {
        true
    }

    fn key(&self) -> Result<Option<WrappedKey>, BackendError> {
        runtime().block_on(key::get(&self.brief_client()?))
    }

    fn put_key(&self, key: &WrappedKey) -> Result<(), BackendError> {
        runtime().block_on(key::put(&self.brief_client()?, key))
    }

    fn forget_dead_clones(&self) -> Result<u64, BackendError> {
        let client = self.client()?;
        runtime().block_on(dead_clones::forget(&*self.reach, &client, self.patience))
    }

    fn sweep(&self, key: Option<Uuid>) -> Result<u64, BackendError> {
        let client = self.client()?;
        runtime().block_on(async {
            let gone = gone(&client).await?;
            let kinds = [Kind::Data, Kind::Map, Kind::Snapshot];
            delete_all(&client, &gone, key, kinds).await
        })
    }
}

/// A client for the place of a URL, without the volume that may be there; filters are left out.
pub fn client(url: &str) -> Result<Client, BackendError> {
    objects_place(url)?.client()
}

/// The place of a URL of an object store.
fn objects_place(url: &str) -> Result<ObjectsPlace, BackendError> {
    let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut options = OptionList::parse(query)?;
    let given = Given { url, place };
    let place = match scheme {
        "dir" => super::dir::parse_place(&given, &mut options)?,
        #[cfg(feature = "s3")]
        "s3" => super::s3::parse_place(&given, &mut options)?,
        #[cfg(feature = "hdfs")]
        "hdfs" => super::hdfs::parse_place(&given, &mut options)?,
        _ => {
            return Err(given
                .refuse("it must be one of objects: dir:, s3: or hdfs:")
                .into());
        }
    };
    Ok(place)
}

/// What an error of a store is to somebody who opens a backend.
fn backend_error(error: &StoreError) -> BackendError {
    match error {
        StoreError::Unreachable(why) => BackendError::Unreachable(why.clone()),
        error => BackendError::Refused(error.to_string()),
    }
}

/// What a request brought.
#[derive(Debug)]
enum Got {
    Nothing,
    Packed(Frames),
    Bytes(Bytes),
    Listing(Listing),
}

/// The end of a request.
type Ended = Result<Got, StoreError>;

/// Where the ends of requests go.
#[derive(Clone)]
enum Sink {
    /// To the thread that opens.
    Opening(Sender<(Token, Ended)>),
    /// To the ring of the shard.
    Ring(Remote),
}

impl Sink {
    fn end(self, token: Token, ended: Ended) {
        match self {
            // Whoever opened may have given up.
            Self::Opening(sender) => drop(sender.send((token, ended))),
            Self::Ring(remote) => remote.end(token, JobOutput::Any(Box::new(ended))),
        }
    }
}

/// Where the bytes of a get go.
struct Target {
    buf: BufMut,
    /// If they are slots: the number of the object, and where in it they are.
    slots: Option<(u64, u64)>,
}

/// The machine and what it waits for.
struct Driver {
    machine: ObjectVolume,
    client: Client,
    reach: Arc<dyn Reach>,
    /// For the places of ancestors, by location.
    ancestors: HashMap<String, Client>,
    /// What it has asked and was not performed yet.
    actions: Vec<Action>,
    /// Objects that are to be put and are not copied whole yet.
    joining: VecDeque<Joining>,
    /// Requests under way; those that read have the place that the bytes go to.
    flights: HashMap<u64, Option<Target>>,
    key: Option<ObjectKey>,
    compression: Arc<Compression>,
    /// How the last request failed, if it did.
    trouble: Option<StoreError>,
    damaged_blocks: u64,
    damaged_pages: u64,
    lost_pages: u64,
    is_fenced: bool,
    origin: Instant,
    /// When its opening is given up.
    until: Instant,
}

impl Driver {
    /// Open a volume, with patience for one request and until a time. Blocks.
    fn open(
        machine: ObjectVolume,
        reach: Arc<dyn Reach>,
        client: Client,
        (patience, until): (Duration, Instant),
        key: Option<ObjectKey>,
    ) -> Result<Self, BackendError> {
        let mut driver = Self {
            machine,
            client,
            reach,
            ancestors: HashMap::new(),
            actions: Vec::new(),
            joining: VecDeque::new(),
            flights: HashMap::new(),
            key,
            compression: Arc::default(),
            trouble: None,
            damaged_blocks: 0,
            damaged_pages: 0,
            lost_pages: 0,
            is_fenced: false,
            origin: Instant::now(),
            until,
        };
        let serving = driver.client.clone();
        driver.client = serving.with_patience(patience);
        let (sender, ends) = channel();
        let sink = Sink::Opening(sender);
        driver.poll();
        while driver.machine.phase() == Phase::Opening {
            driver.perform(&sink, &mut |end| unreachable!("nothing was asked: {end:?}"));
            driver.wait(&ends)?;
        }
        match driver.machine.phase() {
            Phase::Failed(error) => return Err(driver.refusal(error)),
            Phase::Fenced => {
                let place = driver.client.place();
                return Err(BackendError::Refused(format!(
                    "{place}: another node has taken the volume over meanwhile"
                )));
            }
            Phase::Open | Phase::Opening => {}
        }
        // What it has begun besides ends here; what it wants now begins on the shard.
        while !driver.flights.is_empty() {
            driver.wait(&ends)?;
        }
        driver.client = serving;
        // Those of the opening have less patience. All of them now: later nothing may block.
        driver.ancestors.clear();
        let locations = driver.machine.ancestor_locations().map(str::to_owned);
        for location in locations.collect::<Vec<_>>() {
            driver.ancestor(&location)?;
        }
        driver.count_space();
        Ok(driver)
    }

    /// A client for the place of an ancestor.
    fn ancestor(&mut self, location: &str) -> Result<Client, BackendError> {
        if let Some(client) = self.ancestors.get(location) {
            return Ok(client.clone());
        }
        let place = self.client.place();
        let Some(reach) = self.reach.elsewhere(location) else {
            return Err(BackendError::Refused(format!(
                "{place}: it is a clone, and {location:?} is no place in its store"
            )));
        };
        let client = self.client.beside(reach.reach(None)?);
        self.ancestors.insert(location.to_owned(), client.clone());
        Ok(client)
    }

    /// While opening: wait for the end of a request, or until the machine wants to go on.
    fn wait(&mut self, ends: &Receiver<(Token, Ended)>) -> Result<(), BackendError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(match &self.trouble {
                Some(trouble) => BackendError::Unreachable(trouble.to_string()),
                None => late(self.client.place()),
            });
        }
        let wakeup = self.next_wakeup();
        let due = wakeup.map_or(left, |at| Duration::from_nanos(at.since(self.now()).0));
        match ends.recv_timeout(due.min(left)) {
            Ok((token, ended)) => self.settle(token, ended),
            Err(RecvTimeoutError::Timeout) => self.poll(),
            Err(RecvTimeoutError::Disconnected) => unreachable!("a sender is held while opening"),
        }
        Ok(())
    }

    /// Why it did not open.
    fn refusal(&self, error: OpenError) -> BackendError {
        let place = self.client.place();
        match (error, &self.trouble) {
            (OpenError::Io(_), Some(trouble)) => backend_error(trouble),
            (OpenError::Io(IoError::Unreachable), None) => {
                BackendError::Unreachable(format!("{place}: it is not reachable"))
            }
            (OpenError::Absent, _) => BackendError::Absent(place),
            (OpenError::Gone, _) => BackendError::Gone(place),
            (OpenError::OtherVolume, _) => BackendError::Exists(place),
            (OpenError::OtherSize { has, needs }, _) => BackendError::Size { place, has, needs },
            (error, _) => BackendError::Refused(format!("{place}: {error}")),
        }
    }

    fn now(&self) -> Nanos {
        Nanos(self.origin.elapsed().as_nanos() as u64)
    }

    fn poll(&mut self) {
        self.machine.set_compression(self.compression.get());
        self.machine.poll(self.now(), &mut self.actions);
        self.look();
    }

    fn step(&mut self, event: Event) {
        let now = self.now();
        self.machine.set_compression(self.compression.get());
        self.machine.step(now, event, &mut self.actions);
        self.machine.poll(now, &mut self.actions);
        self.look();
    }

    /// Say so when another owner has taken it over, or when a part of the map is damaged.
    fn look(&mut self) {
        let stats = self.machine.stats();
        let counters = self.client.counters();
        counters.miss_pages(stats.damaged_pages, stats.lost_pages);
        if stats.damaged_pages > 0 && self.damaged_pages == 0 || stats.lost_pages > self.lost_pages
        {
            tracing::error!(
                place = self.client.place(),
                damaged = stats.damaged_pages,
                given_up = stats.lost_pages,
                "a page of the map is damaged: what it has is not handed out, and lost once it is given up"
            );
            (self.damaged_pages, self.lost_pages) = (stats.damaged_pages, stats.lost_pages);
        }
        if self.machine.phase() == Phase::Fenced && !self.is_fenced {
            self.is_fenced = true;
            self.joining.clear();
            let why = format!(
                "{}: another node has taken the volume over; nothing is written to it any more",
                self.client.place()
            );
            tracing::error!("{why}");
            self.client.counters().lose(why);
        }
    }

    /// Let others know what the volume takes in the store.
    fn count_space(&self) {
        let bytes = self.machine.stats().stored_bytes;
        self.client.counters().store(bytes);
    }

    /// A request has ended.
    fn settle(&mut self, token: Token, ended: Ended) {
        let Some(target) = self.flights.remove(&token.0) else {
            unreachable!("a request that was not under way has ended");
        };
        if let Err(error) = &ended {
            self.trouble = Some(error.clone());
        }
        let result = match (ended, target) {
            (Ok(Got::Bytes(bytes)), Some(Target { mut buf, slots })) => {
                buf.copy_from_slice(&bytes);
                if let (Some(key), Some((number, offset))) = (&self.key, slots) {
                    key.decrypt(self.machine.writer(number), number, offset, &mut buf);
                }
                Ok(Stored::Read(buf))
            }
            (Ok(Got::Listing(listing)), None) => {
                let objects = listing.objects.into_iter().map(|object| Listed {
                    name: object.name,
                    bytes: object.bytes,
                });
                Ok(Stored::Listed {
                    objects: objects.collect(),
                    more: listing.more,
                })
            }
            (Ok(Got::Packed(frames)), None) => Ok(Stored::Packed(frames)),
            (Ok(_), _) => Ok(Stored::Done),
            (Err(StoreError::NotFound), _) => Err(Failure::NotFound),
            (Err(StoreError::Short), _) => Err(Failure::Short),
            (Err(StoreError::Exists), _) => Err(Failure::Exists),
            (Err(error), _) => Err(Failure::Io(error.io())),
        };
        // Something was put or deleted.
        let is_change = matches!(result, Ok(Stored::Done | Stored::Packed(_)));
        self.step(Event::Stored { token, result });
        if is_change {
            self.count_space();
        }
    }

    /// Begin what the machine has asked for; how many requests that were.
    fn perform(&mut self, sink: &Sink, end: &mut dyn FnMut(Completion)) -> usize {
        let before = self.flights.len();
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Put {
                    token,
                    name,
                    data,
                    slot_bytes,
                    condition,
                } => {
                    let how = How::Plain(condition);
                    self.join(sink, Joining::new(token, name, how, slot_bytes, data));
                }
                Action::PutCompressed {
                    token,
                    name,
                    data,
                    slot_bytes,
                    method,
                } => {
                    let how = How::Compressed(method);
                    self.join(sink, Joining::new(token, name, how, slot_bytes, data));
                }
                Action::GetCompressed {
                    token,
                    name,
                    part,
                    buf,
                } => {
                    let bytes = buf.len();
                    let at = self.at(name, self.machine.writer(name.number));
                    let target = Some(Target { buf, slots: None });
                    self.begin(sink, token, name.volume, target, move |client| async move {
                        at.get(&client, &part, bytes).await
                    });
                }
                Action::Get {
                    token,
                    name,
                    offset,
                    slots,
                    buf,
                } => {
                    let (bytes, volume) = (buf.len(), name.volume);
                    let slots = slots.then_some((name.number, offset));
                    let target = Some(Target { buf, slots });
                    let name = name.to_string();
                    self.begin(sink, token, volume, target, move |client| async move {
                        client.get(&name, offset, bytes).await.map(Got::Bytes)
                    });
                }
                Action::Delete { token, name } => {
                    let volume = name.volume;
                    let name = name.to_string();
                    self.begin(sink, token, volume, None, move |client| async move {
                        client.delete(&name).await?;
                        Ok(Got::Nothing)
                    });
                }
                Action::List {
                    token,
                    volume,
                    prefix,
                    after,
                } => {
                    self.begin(sink, token, volume, None, move |client| async move {
                        let listed = client.list(prefix, &after, LIST_MAX).await;
                        listed.map(Got::Listing)
                    });
                }
                Action::End(completion) => {
                    self.note_damage(&completion);
                    end(completion);
                }
                Action::SnapshotEnd { token, result } => {
                    let result = match result {
                        Ok(()) => Ok(Done::Written),
                        Err(SnapshotError::Io(error)) => Err(error),
                        Err(refused) => Ok(Done::Refused(refused)),
                    };
                    end(Completion { token, result });
                }
            }
        }
        if let Some(mut joining) = self.joining.pop_front() {
            if joining.go_on() {
                self.put(sink, joining);
            } else {
                self.joining.push_front(joining);
            }
        }
        self.flights.len() - before
    }

    /// Put an object, at once if it is small.
    fn join(&mut self, sink: &Sink, mut joining: Joining) {
        if joining.is_small() {
            joining.go_on();
            self.put(sink, joining);
        } else {
            self.joining.push_back(joining);
        }
    }

    /// Put an object that is copied whole.
    fn put(&mut self, sink: &Sink, joining: Joining) {
        let Joining {
            token,
            name,
            how,
            slot_bytes,
            ..
        } = joining;
        let mut data = joining.into_bytes();
        let writer = self.machine.uuid();
        let condition = match how {
            How::Plain(Condition::Always) => stores::Condition::Always,
            How::Plain(Condition::IfAbsent) => stores::Condition::IfAbsent,
            How::Compressed(method) => {
                let at = self.at(name, writer);
                return self.begin(sink, token, name.volume, None, move |client| async move {
                    at.put(&client, method, data.freeze(), slot_bytes).await
                });
            }
        };
        let key = self.key.clone().filter(|_| slot_bytes > 0);
        let Name { volume, number, .. } = name;
        let name = name.to_string();
        self.begin(sink, token, volume, None, move |client| async move {
            if let Some(key) = key {
                key.encrypt(writer, number, 0, &mut data[..slot_bytes]);
            }
            client.put(&name, data.freeze(), condition).await?;
            Ok(Got::Nothing)
        });
    }

    /// When it is to be polled.
    fn next_wakeup(&self) -> Option<Nanos> {
        if self.joining.is_empty() {
            self.machine.next_wakeup()
        } else {
            Some(self.now())
        }
    }

    /// A compressed object that the volume `writer` has put, or is to put.
    fn at(&self, name: Name, writer: [u8; 16]) -> Compressed {
        Compressed {
            name,
            writer,
            key: self.key.clone(),
        }
    }

    /// Begin a request about objects of this volume, or of the ancestor with a number.
    fn begin<F: Future<Output = Ended> + Send>(
        &mut self,
        sink: &Sink,
        token: Token,
        volume: u16,
        target: Option<Target>,
        request: impl FnOnce(Client) -> F + Send + 'static,
    ) {
        let other = self.flights.insert(token.0, target);
        assert!(other.is_none(), "a request is under way already");
        let sink = sink.clone();
        let client = match volume.checked_sub(1) {
            None => Ok(self.client.clone()),
            Some(number) => {
                let location = self.machine.ancestor_location(number).to_owned();
                self.ancestor(&location)
            }
        };
        runtime().spawn(async move {
            let ended = match client {
                Ok(client) => request(client).await,
                Err(error) => Err(StoreError::Refused(error.to_string())),
            };
            sink.end(token, ended);
        });
    }

    /// Say so when a request fails because an object is damaged.
    fn note_damage(&mut self, completion: &Completion) {
        if completion.result.is_ok() {
            return;
        }
        let damaged = self.machine.stats().damaged_blocks;
        if damaged > self.damaged_blocks {
            self.damaged_blocks = damaged;
            tracing::error!(
                place = self.client.place(),
                blocks = damaged,
                "objects are damaged: what they hold differs from its checksum and is not handed out"
            );
        }
    }
}

/// An open volume on its way to its shard.
struct OpenVolume {
    driver: Driver,
    origin: Option<String>,
}

// SAFETY: what the machine counts without atomics (its arenas and their buffers) is all inside the
// driver: nobody gave it a buffer from outside before it was open, nothing was under way when it
// was put here, and requests hold copies. So everything moves at once.
unsafe impl Send for OpenVolume {}

impl Opened for OpenVolume {
    fn build(self: Box<Self>) -> Box<dyn Backend> {
        Box::new(ObjectsBackend {
            driver: self.driver,
            ahead: 0,
            is_finishing: false,
        })
    }

    fn identity(&self) -> Option<String> {
        Some(identity(self.driver.machine.uuid()))
    }

    fn origin(&self) -> Option<&str> {
        self.origin.as_deref()
    }

    fn inherit(&self, inherited: &mut Inherited) {
        let machine = &self.driver.machine;
        machine.inherited(|first, count| inherited.insert(first, count));
    }

    fn counters(&self) -> Option<Arc<Counters>> {
        Some(self.driver.client.counters())
    }

    fn compression(&self) -> Option<Arc<Compression>> {
        Some(Arc::clone(&self.driver.compression))
    }
}

/// See the module.
struct ObjectsBackend {
    driver: Driver,
    /// Nanoseconds that the shard's clock is ahead of the machine's.
    ahead: i64,
    is_finishing: bool,
}

impl ObjectsBackend {
    /// Perform what the machine wants.
    fn go_on(&mut self, now: Nanos, port: &mut Port<'_>) {
        self.ahead = now.0.wrapping_sub(self.driver.now().0).cast_signed();
        if self.is_finishing {
            return;
        }
        let sink = Sink::Ring(port.ring.remote(port.owner));
        let done = &mut *port.done;
        let begun = self.driver.perform(&sink, &mut |end| done.push(end));
        for _ in 0..begun {
            port.ring.begin_remote();
        }
    }
}

impl Backend for ObjectsBackend {
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let Operation { token, ask } = operation;
        let ask = match ask {
            Ask::Zero { bytes: 0, .. } | Ask::Snapshot(SnapshotCommand::Complete) => {
                return port.end(token, Ok(Done::Written));
            }
            Ask::Read { offset, buf } => ObjectAsk::Read { offset, buf },
            Ask::Write { offset, data } => ObjectAsk::Write { offset, data },
            // What is zero takes no space, whatever was asked.
            Ask::Zero { offset, bytes, .. } => ObjectAsk::Zero { offset, bytes },
            Ask::Flush => ObjectAsk::Flush,
            Ask::Extents { range } => ObjectAsk::Extents { range },
            Ask::Resize { bytes } => ObjectAsk::Resize { bytes },
            Ask::Snapshot(SnapshotCommand::Snapshot { name, made_ms, .. }) => {
                ObjectAsk::Snapshot { name, made_ms }
            }
            Ask::Snapshot(SnapshotCommand::Forget { name }) => ObjectAsk::DeleteSnapshot { name },
            Ask::Snapshot(SnapshotCommand::GiveUp) => ObjectAsk::GiveUp,
        };
        self.driver.step(Event::Submit { token, ask });
        self.go_on(now, port);
    }

    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        let Outcome::Job(JobOutput::Any(ended)) = outcome else {
            unreachable!("nothing is started that ends in {outcome:?}");
        };
        let Ok(ended) = ended.downcast::<Ended>() else {
            unreachable!("requests end in what they brought");
        };
        self.driver.settle(token, *ended);
        self.go_on(now, port);
    }

    fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        self.driver.poll();
        self.go_on(now, port);
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        if self.is_finishing {
            return None;
        }
        let due = self.driver.next_wakeup()?;
        Some(Nanos(due.0.saturating_add_signed(self.ahead)))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            extents: true,
            snapshots: true,
            read_only: false,
            in_flight_max: IN_FLIGHT_MAX,
            atomic_flush: true,
        }
    }

    fn finish(&mut self) -> bool {
        self.is_finishing = true;
        self.driver.flights.is_empty()
    }
}

#[cfg(test)]
mod tests;
