//! A volume over an object store: immutable objects of batched writes, a map, and manifests.
//!
//! ```text
//!             write                          flush                    often enough
//!  Gathering ──full, flush──► Batch ──put──► data/N  ···  manifest/M names them  ···  map/N
//!      ▲                                       │                                        │
//!      └────────── copied forward ◄── mostly dead                 the tail begins anew ◄┘
//! ```
//!
//! Writes gather in memory and are sealed as data objects, which the map names from then on. A flush
//! puts what is sealed and then creates the next manifest: that is the commit. Reads are answered
//! from what is gathered, from batches that are being put, or with one ranged get. Objects may be
//! compressed ([`frames`]): then a get needs the lengths of the object's frames, which are kept for the
//! objects that were read last and otherwise fetched first. So are pages of the map ([`map`]).
//!
//! | phase | what happens | next |
//! |---|---|---|
//! | Opening | newest manifest, take-over by creating the next one, map, tail | Open, Failed |
//! | Open | requests; commits; storing the map; freeing objects | Fenced |
//! | Failed, Fenced | requests fail | – |
//!
//! Invariants:
//! 1. A manifest is put only when every object that it names is there whole. The bucket alone is
//!    therefore always the state of its newest manifest, which is that of a flush.
//! 2. Manifests are created, never replaced. An owner takes over by creating the next one, which
//!    stays for ever, so that whoever was the owner before finds that number taken, however late.
//! 3. An owner uses numbers for its objects that no earlier owner could; it removes what it does not
//!    know only below them.
//! 4. An object is removed when neither the committed state nor the tail of its manifest, a snapshot,
//!    a clone, or a read under way needs it. A state that is no longer needed never comes back.
//! 5. A put whose end is not known is repeated with the same bytes. If a manifest exists already, it
//!    is read: our own bytes mean success, others that we are fenced.
//! 6. Every byte that is read was checked against a checksum that knows its volume, object and block.
//! 7. Memory is bounded: three pools, the lengths of frames, pages of the map, what was not merged into
//!    these, and for the largest volume 33 MiB of directory and some 40 bytes for each of its data objects. When
//!    the pool of writes is used up, or too much is not merged, writes wait.
//! 8. Nothing starves: reads, fills and copies have their shares of the gets, whatever clients keep
//!    asking for ([`turns`]).
//!
//! Failure: a failed put is repeated with growing pauses, for ever; the flushes and writes that
//! wait for it end with its error. A failed get ends its read with the error.

mod batch;
mod block_store;
mod checkpoint;
mod collect;
mod commit;
mod data;
mod deletions;
pub mod format;
pub mod frames;
mod gets;
mod inventory;
pub mod io;
mod lineage;
pub mod map;
mod maps;
mod open;
mod pages;
mod port;
mod read;
pub mod references;
mod snapshots;
mod tail;
mod turns;
mod write;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use batch::{Batch, Gathering};
use block_store::BlockStore;
use commit::{Commits, Outcome};
use deletions::Deletions;
use format::{Manifest, Snapshot};
use io::{Action, Ask, Event, Kind, Name, Phase, SnapshotName, StoreError, Stored};
pub use lineage::Parent;
use port::{Context, Port, Purpose, TURN_PAGES_MAX};
use snapshots::What;
use tail::Tail;

use crate::base::buf::Pool;
use crate::base::codec::Method;
use crate::base::error::IoError;
use crate::base::io::{Completion, Done, Nanos, Token};
use crate::base::limits::{
    BLOCK_BYTES, OBJECT_BATCH_BLOCKS_MAX, OBJECT_BATCH_BLOCKS_MIN, OBJECT_CHANGES_MAX,
    OBJECT_PAGE_BLOCKS_MAX, OBJECT_READ_MEMORY_BYTES_MIN,
};

/// Changes that zeroes take out of the map in about the time of a merged page, and those of one turn, and of one object.
const COVERED_PER_PAGE: usize = 64;
const COVERED_MAX: usize = TURN_PAGES_MAX * COVERED_PER_PAGE;
/// Changes that are merged and that one turn forgets.
const FORGOTTEN_MAX: usize = 4096;

/// Which volume is opened, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Take over the volume at the place; it must be there.
    Existing,
    /// Take over the volume at the place; if there is none, make it.
    Create {
        /// UUID of the volume that is made; random.
        uuid: [u8; 16],
    },
    /// Read a snapshot of the volume at the place; nobody is fenced.
    Snapshot(SnapshotName),
    /// Make a volume that begins as a snapshot of another one, whose place is given to
    /// [`ObjectVolume::clone_of`], and take it over. If it is there already, this is
    /// [`Self::Existing`].
    Clone {
        /// UUID of the volume that is made; random.
        uuid: [u8; 16],
        /// The snapshot.
        snapshot: SnapshotName,
    },
}

/// How a volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Which volume.
    pub access: Access,
    /// Its size: what a new one gets, what an existing one must have. `None`: whatever it has.
    pub bytes: Option<u64>,
    /// UUID that an existing volume must have. `None`: any.
    pub uuid: Option<[u8; 16]>,
    /// UUID that the parent of a clone must have. `None`: any.
    pub parent: Option<[u8; 16]>,
    /// Drawn at random for every opening; tells this owner's manifests from those of others.
    pub nonce: u64,
    /// Blocks that a data object gathers before it is put without a flush.
    pub batch_blocks: usize,
    /// Memory for gathered blocks and those that are being put; at least two batches.
    pub write_memory_bytes: usize,
    /// Memory for objects that are being read.
    pub read_memory_bytes: usize,
    /// Memory for pages of the map that were used lately.
    pub map_cache_bytes: usize,
    /// Changes that wait to be merged into the map, at which writes wait; some 32 bytes of memory each.
    pub changes_max: usize,
    /// Blocks of a page of the map of a volume that is made: a power of two.
    pub page_blocks: u32,
    /// Puts of data in flight at most.
    pub puts_in_flight_max: usize,
    /// Gets in flight at most.
    pub gets_in_flight_max: usize,
}

impl Config {
    /// The usual bounds.
    pub fn new(access: Access, nonce: u64) -> Self {
        Self {
            access,
            bytes: None,
            uuid: None,
            parent: None,
            nonce,
            batch_blocks: OBJECT_BATCH_BLOCKS_MAX,
            write_memory_bytes: 72 << 20,
            read_memory_bytes: 16 << 20,
            map_cache_bytes: 32 << 20,
            changes_max: OBJECT_CHANGES_MAX,
            page_blocks: OBJECT_PAGE_BLOCKS_MAX,
            puts_in_flight_max: 4,
            gets_in_flight_max: 32,
        }
    }
}

/// What a volume has done and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Puts of data objects.
    pub puts_data: u64,
    /// Puts of objects of the map.
    pub puts_map: u64,
    /// Puts of manifests.
    pub puts_manifest: u64,
    /// Puts of anything else.
    pub puts_other: u64,
    /// Gets.
    pub gets: u64,
    /// Deletes.
    pub deletes: u64,
    /// Lists.
    pub lists: u64,
    /// Actions that failed, and were or will be tried again.
    pub failures: u64,
    /// Gets of pages of the map, which are counted among all gets.
    pub gets_of_pages: u64,
    /// Blocks that differed from their checksum.
    pub damaged_blocks: u64,
    /// Pages of the map that were not what they should be.
    pub damaged_pages: u64,
    /// Pages of the map that were given up, so that what is on them is lost but what was written since.
    pub lost_pages: u64,
    /// Blocks that were copied forward to free objects.
    pub copied_blocks: u64,
    /// Objects that were looked at in search of garbage.
    pub objects_looked_at: u64,
    /// Objects without a live block that were looked at after commits: may they go?
    pub dead_looked_at: u64,
    /// Pages of the map that were looked at, for such that are to be stored again.
    pub pages_looked_at: u64,
    /// Pages of the map that changes were merged into, or that were stored again.
    pub pages_merged: u64,
    /// Blocks that the map has, as of the last time it was stored.
    pub live_blocks: u64,
    /// Bytes of data objects that are known to be in the store.
    pub stored_bytes: u64,
    /// Memory of the map and of the tables beside it.
    pub map_memory_bytes: u64,
    /// Number of manifests since the volume was made.
    pub sequence: u64,
    /// Fencing number: it grows with every opening.
    pub epoch: u64,
}

/// A volume over an object store.
#[derive(Debug)]
pub struct ObjectVolume {
    config: Config,
    phase: Phase,
    port: Port,
    write_pool: Arc<Pool>,
    opening: open::Opening,
    /// The newest manifest of ours.
    manifest: Manifest,
    commits: Commits,
    store: BlockStore,
    tail: Tail,
    gathering: Gathering,
    /// How what is sealed from now on is compressed.
    compression: Option<Method>,
    seal_wanted: bool,
    batches: BTreeMap<u64, Batch>,
    puts_in_flight: usize,
    /// Requests that came before the volume was open.
    early: VecDeque<(Token, Ask)>,
    writes: BTreeMap<u64, write::Write>,
    write_queue: VecDeque<u64>,
    fill_queue: VecDeque<u64>,
    /// Writes that waited for blocks which are whole now.
    whole_writers: Vec<u64>,
    reads: BTreeMap<u64, read::Read>,
    /// Questions for extents; they are in the queue of reads.
    surveys: BTreeMap<u64, read::Survey>,
    read_queue: VecDeque<u64>,
    checkpoint: checkpoint::Checkpoint,
    lap: collect::Lap,
    collect: collect::Collect,
    /// Objects that are to be copied next, in this order.
    victims: VecDeque<u64>,
    scan: collect::Scan,
    snapshots: Vec<Snapshot>,
    snapshot_requests: VecDeque<snapshots::Request>,
    snapshot_stage: snapshots::Stage,
    /// Whether it is given up, from the next manifest on.
    gone: bool,
    clone_pin: u64,
    deletions: Deletions,
    /// What is copied forward waits for a get of a page.
    copy_waits: bool,
}

impl ObjectVolume {
    /// A volume that is about to be opened: [`Self::poll`] it to begin.
    pub fn new(config: Config) -> Self {
        assert!(
            (OBJECT_BATCH_BLOCKS_MIN..=OBJECT_BATCH_BLOCKS_MAX).contains(&config.batch_blocks),
            "batch_blocks"
        );
        let gathering = Gathering::new(config.batch_blocks);
        let batch = config
            .batch_blocks
            .div_ceil(batch::chunk_slots(config.batch_blocks))
            * gathering.chunk_bytes();
        assert!(
            config.write_memory_bytes >= 2 * batch
                && config.read_memory_bytes >= OBJECT_READ_MEMORY_BYTES_MIN
                && config.puts_in_flight_max > 0
                && config.gets_in_flight_max > 0,
            "bounds of a volume over objects"
        );
        Self {
            config,
            phase: Phase::Opening,
            port: Port::new(!matches!(config.access, Access::Snapshot(_))),
            write_pool: Pool::new(config.write_memory_bytes),
            opening: open::Opening::default(),
            manifest: Manifest::default(),
            commits: Commits::new(config.nonce),
            store: BlockStore::new(&config),
            tail: Tail::new(config.changes_max),
            gathering,
            compression: None,
            seal_wanted: false,
            batches: BTreeMap::new(),
            puts_in_flight: 0,
            early: VecDeque::new(),
            writes: BTreeMap::new(),
            write_queue: VecDeque::new(),
            fill_queue: VecDeque::new(),
            whole_writers: Vec::new(),
            reads: BTreeMap::new(),
            surveys: BTreeMap::new(),
            read_queue: VecDeque::new(),
            checkpoint: checkpoint::Checkpoint::Idle,
            lap: collect::Lap::default(),
            collect: collect::Collect::Idle,
            victims: VecDeque::new(),
            scan: collect::Scan::default(),
            snapshots: Vec::new(),
            snapshot_requests: VecDeque::new(),
            snapshot_stage: snapshots::Stage::Idle,
            gone: false,
            clone_pin: 0,
            deletions: Deletions::default(),
            copy_waits: false,
        }
    }

    /// Say where the volume is that this one is to be a clone of ([`Access::Clone`]), and where this
    /// one is, before the first [`Self::poll`]. Places are text of at most
    /// [`crate::base::limits::OBJECT_LOCATION_BYTES_MAX`] bytes.
    pub fn clone_of(&mut self, parent: String, own: String) {
        self.opening.parent = parent;
        self.opening.own = own;
    }

    /// Compress objects from the next one on, or stop that. What there is stays as it is.
    pub fn set_compression(&mut self, compression: Option<Method>) {
        self.compression = compression;
    }

    /// Where it is in its life.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Take an event.
    pub fn step(&mut self, now: Nanos, event: Event, actions: &mut Vec<Action>) {
        self.port.now = now;
        match event {
            Event::Submit { token, ask } => self.submit(token, ask, actions),
            Event::Stored { token, result } => self.stored(token, result, actions),
        }
        self.check_invariants();
    }

    /// Go on with what is due. Call it once at first, after every batch of events, and when
    /// [`Self::next_wakeup`] has come.
    pub fn poll(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        let has_more = self.store.map.forget_merged(FORGOTTEN_MAX);
        self.port.begin_turn(now, has_more);
        loop {
            let before = actions.len();
            self.port.again = false;
            match self.phase {
                Phase::Opening => self.pump_open(actions),
                Phase::Open => self.pump(actions),
                Phase::Failed(_) | Phase::Fenced => {}
            }
            if actions.len() == before && !self.port.again {
                break;
            }
        }
        self.check_invariants();
    }

    fn pump(&mut self, actions: &mut Vec<Action>) {
        self.pump_reads(actions);
        if self.is_read_only() {
            return;
        }
        self.gather_copies(actions);
        self.pump_writes(actions);
        self.pump_fills(actions);
        self.pump_puts(actions);
        self.pump_commits(actions);
        self.pump_snapshots(actions);
        self.pump_checkpoint(actions);
        self.pump_collect(actions);
        self.pump_scan(actions);
        self.deletions.pump(&mut self.port, actions);
    }

    /// When [`Self::poll`] is due, if nothing else happens.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        if self.port.turn.has_more && self.phase == Phase::Open {
            return Some(self.port.now);
        }
        (self.port.retry_at())
            .into_iter()
            .chain(self.checkpoint.retry_at())
            .min()
    }

    /// Size in bytes; known once it is open.
    pub fn bytes(&self) -> u64 {
        self.commits.bytes()
    }

    /// UUID of the volume; known once it is open.
    pub fn uuid(&self) -> [u8; 16] {
        self.manifest.volume
    }

    /// Whether no request waits or is under way; housekeeping may be.
    pub fn is_idle(&self) -> bool {
        self.early.is_empty()
            && self.writes.is_empty()
            && self.reads.is_empty()
            && self.surveys.is_empty()
            && self.commits.is_idle()
            && self.snapshot_requests.is_empty()
    }

    /// Whether nothing at all is under way.
    pub fn is_at_rest(&self) -> bool {
        self.is_idle()
            && self.port.under_way().len() == 0
            && self.port.may_try()
            && !self.port.turn.has_more
    }

    /// What it has done and holds.
    pub fn stats(&self) -> Stats {
        Stats {
            live_blocks: self.store.inventory.data.live_blocks(),
            stored_bytes: self.store.inventory.data.stored_bytes(),
            map_memory_bytes: self.store.memory_bytes() as u64,
            sequence: self.manifest.sequence,
            epoch: self.manifest.epoch,
            ..self.port.stats
        }
    }

    /// Bytes of the memory that the configuration bounds, in use now.
    pub fn memory_bytes(&self) -> usize {
        [
            &self.write_pool,
            self.store.gets.pool(),
            &self.port.control_pool,
        ]
        .iter()
        .map(|pool| pool.total_bytes() - pool.free_bytes())
        .sum()
    }

    /// The place of an ancestor: what stands before the names of its objects. `number` is that of a
    /// [`io::Name`] less one. Ask when an action is performed: opening a clone changes the numbers.
    pub fn ancestor_location(&self, number: u16) -> &str {
        let ancestors = &self.manifest.ancestors;
        ancestors
            .get(usize::from(number))
            .map_or("", |ancestor| &ancestor.location)
    }

    /// The places of all ancestors, the direct parent last.
    pub fn ancestor_locations(&self) -> impl Iterator<Item = &str> {
        let ancestors = self.manifest.ancestors.iter();
        ancestors.map(|ancestor| ancestor.location.as_str())
    }

    /// The snapshots that there are, in the order in which they were made.
    pub fn snapshots(&self) -> Vec<SnapshotName> {
        let committed = &self.manifest.snapshots;
        committed.iter().map(|snapshot| snapshot.name).collect()
    }

    fn is_read_only(&self) -> bool {
        matches!(self.config.access, Access::Snapshot(_))
    }

    /// Blocks of the volume; the last one may be cut.
    fn blocks(&self) -> u64 {
        self.commits.bytes().div_ceil(BLOCK_BYTES as u64)
    }

    fn submit(&mut self, token: Token, ask: Ask, actions: &mut Vec<Action>) {
        match self.phase {
            Phase::Opening => self.early.push_back((token, ask)),
            Phase::Open if self.is_read_only() => self.submit_read_only(token, ask, actions),
            Phase::Open if self.gone && ask.is_change() => {
                refuse(token, &ask, IoError::Failed, actions);
            }
            Phase::Open => self.begin(token, ask, actions),
            Phase::Failed(_) => refuse(token, &ask, IoError::Failed, actions),
            Phase::Fenced => refuse(token, &ask, IoError::Fenced, actions),
        }
    }

    fn submit_read_only(&mut self, token: Token, ask: Ask, actions: &mut Vec<Action>) {
        match ask {
            Ask::Read { .. } | Ask::Extents { .. } => self.begin(token, ask, actions),
            Ask::Flush => end(token, Ok(Done::Written), actions),
            _ => refuse(token, &ask, IoError::Failed, actions),
        }
    }

    fn begin(&mut self, token: Token, ask: Ask, actions: &mut Vec<Action>) {
        match ask {
            Ask::Read { offset, buf } => self.begin_read(token, offset, buf),
            Ask::Write { offset, data } => self.begin_write(token, offset, data),
            Ask::Zero { offset, bytes } => self.begin_zero(token, offset, bytes),
            Ask::Flush => self.begin_flush(Some(token)),
            Ask::Extents { range } => self.begin_survey(token, range),
            Ask::Resize { bytes } => self.begin_resize(token, bytes, actions),
            Ask::Snapshot { name, made_ms } => {
                self.begin_snapshot(token, What::Make { name, made_ms });
            }
            Ask::DeleteSnapshot { name } => self.begin_snapshot(token, What::Forget { name }),
            Ask::GiveUp => self.begin_snapshot(token, What::GiveUp),
        }
    }

    fn stored(
        &mut self,
        token: Token,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let purpose = self.port.ended(token);
        if matches!(self.phase, Phase::Failed(_) | Phase::Fenced) {
            return;
        }
        if let Err(StoreError::Io(IoError::Fenced)) = result {
            return self.fence(actions);
        }
        self.port.stats.failures += u64::from(matches!(result, Err(StoreError::Io(_))));
        match purpose {
            Purpose::Open(part) => self.opened(part, result, actions),
            Purpose::PutData(number) => self.put_data_ended(number, result, actions),
            Purpose::PutMap => self.put_map_ended(result, actions),
            Purpose::PutManifest => {
                let outcome = self.commits.put_ended(
                    result,
                    &mut Context::new(&mut self.port, &self.manifest, actions),
                );
                self.commit_went_on(outcome, actions);
            }
            Purpose::CheckManifest => {
                let outcome = self.commits.check_ended(
                    result,
                    &mut Context::new(&mut self.port, &self.manifest, actions),
                );
                self.commit_went_on(outcome, actions);
            }
            Purpose::CheckLength => {
                let outcome = self.commits.length_ended(result, &mut self.port);
                self.commit_went_on(outcome, actions);
            }
            Purpose::Probe => self.probed(result, actions),
            Purpose::Snapshots(part) => self.snapshots_ended(part, result, actions),
            Purpose::Read { request, fetch } => self.read_ended(request, fetch, result, actions),
            Purpose::Fill { block, fetch } => {
                self.fill_ended(token, block, fetch, result, actions);
            }
            Purpose::Copy(copy) => self.copy_ended(copy, result, actions),
            Purpose::Table(number) => self.victim_ended(number, result, actions),
            Purpose::Page(get) => self.page_ended(&get, result, actions),
            Purpose::Merge(get) => self.merge_ended(&get, result, actions),
            Purpose::Frames(number) => {
                let cx = &mut Context::new(&mut self.port, &self.manifest, actions);
                if let Err((error, ended)) = self.store.frames_ended(number, result, cx) {
                    for waiting in ended {
                        self.stored(waiting.token, Err(error), actions);
                    }
                }
            }
            Purpose::Scan => self.scanned(result),
            Purpose::Delete(name) => self.deletions.ended(name, result, &mut self.port),
        }
    }

    fn pump_commits(&mut self, actions: &mut Vec<Action>) {
        let state = commit::State {
            batches: &self.batches,
            tail: &self.tail,
            checkpoint: &self.checkpoint,
            snapshots: &self.snapshots,
            gone: self.gone,
            has_many_changes: self.store.map.has_many_changes(),
        };
        let cx = &mut Context::new(&mut self.port, &self.manifest, actions);
        self.commits.pump(&state, cx);
    }

    fn commit_went_on(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        match outcome {
            Outcome::Pending => {}
            Outcome::Committed => self.committed(actions),
            Outcome::Fenced => self.fence(actions),
            Outcome::Failed(error) => self.fail_waiting(error, actions),
        }
    }

    /// The manifest that was on its way is there.
    fn committed(&mut self, actions: &mut Vec<Action>) {
        let Some((manifest, adopts)) = self.commits.take_committed() else {
            return;
        };
        self.port.went_well();
        self.port.again = true;
        if !self.manifest.begins {
            let before = Name::own(Kind::Manifest, self.manifest.sequence);
            self.deletions.push(before);
        }
        self.manifest = manifest;
        if adopts {
            self.adopt();
        }
        self.commits.end_flushes(actions);
        self.bury();
        self.consider_collecting();
    }

    /// End what waits for the store with its error. What was completed stays, and goes on.
    fn fail_waiting(&mut self, error: IoError, actions: &mut Vec<Action>) {
        self.port.back_off();
        self.snapshot_failed(error, actions);
        self.end_waiting(error, actions);
    }

    /// End flushes, and writes that were not begun, with an error.
    fn end_waiting(&mut self, error: IoError, actions: &mut Vec<Action>) {
        self.commits.fail_flushes(error, actions);
        for id in core::mem::take(&mut self.write_queue) {
            if let Some(write) = self.writes.remove(&id) {
                end(write.token, Err(error), actions);
            }
        }
    }

    /// Another owner has taken over.
    fn fence(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Fenced;
        self.end_all(IoError::Fenced, actions);
    }

    /// End every request, for good.
    fn end_all(&mut self, error: IoError, actions: &mut Vec<Action>) {
        self.fail_waiting(error, actions);
        self.port.stop_trying();
        for (_, write) in core::mem::take(&mut self.writes) {
            end(write.token, Err(error), actions);
        }
        for (_, read) in core::mem::take(&mut self.reads) {
            end(read.token, Err(error), actions);
        }
        for (_, survey) in core::mem::take(&mut self.surveys) {
            end(survey.token, Err(error), actions);
        }
        for request in core::mem::take(&mut self.snapshot_requests) {
            let result = Err(error.into());
            actions.push(Action::SnapshotEnd {
                token: request.token,
                result,
            });
        }
        for (token, ask) in core::mem::take(&mut self.early) {
            refuse(token, &ask, error, actions);
        }
        self.store.forget_waiting(&mut self.port);
        self.read_queue.clear();
        self.fill_queue.clear();
        self.gathering.clear();
        self.batches.clear();
        self.commits.clear();
        self.checkpoint = checkpoint::Checkpoint::Idle;
        self.collect = collect::Collect::Idle;
        self.victims.clear();
        self.deletions.clear();
    }

    fn probed(&mut self, result: Result<Stored, StoreError>, actions: &mut Vec<Action>) {
        self.port.probe_ended();
        let Ok(Stored::Listed { objects, .. }) = result else {
            return;
        };
        let mine = u64::from(self.commits.is_under_way()) + self.manifest.sequence;
        let beyond = objects
            .iter()
            .filter_map(|object| Name::parse(&object.name))
            .any(|name| name.kind == Kind::Manifest && name.number > mine);
        if beyond {
            self.fence(actions);
        }
    }

    /// UUID of the volume that wrote the object with this number.
    pub fn writer(&self, number: u64) -> [u8; 16] {
        self.manifest.writer(number)
    }

    /// Objects below this number stay, whatever the present state needs.
    fn pin(&self) -> u64 {
        let committed = self.manifest.snapshots.iter();
        let snapshots = committed
            .chain(&self.snapshots)
            .map(|snapshot| snapshot.pin);
        snapshots
            .max()
            .unwrap_or(0)
            .max(self.clone_pin)
            .max(self.manifest.own_first())
            .max(self.snapshot_stage.pin())
    }

    /// What holds between any two steps. The costly part is for builds with assertions.
    fn check_invariants(&self) {
        assert!(
            self.commits.committed() <= self.tail.last(),
            "only what is sealed is committed"
        );
        assert!(self.puts_in_flight <= self.config.puts_in_flight_max);
        self.store.gets.check_invariants();
        if cfg!(debug_assertions) {
            self.gathering.check_invariants();
            self.tail.check_invariants();
        }
    }

    /// Compare the map with what is counted beside it. Costs the directory and all objects; for tests.
    pub fn check_map(&self) {
        self.store.check_map();
    }

    /// Blocks that the pages of the map have in each data object, if these are the pages that the newest manifest
    /// names; for tests.
    pub fn usage(&self) -> Option<Vec<(u64, u32)>> {
        let is_idle = matches!(self.checkpoint, checkpoint::Checkpoint::Idle);
        let live = self
            .store
            .inventory
            .data
            .range(0)
            .filter(|(_, object)| object.live > 0);
        is_idle.then(|| {
            live.map(|(number, object)| (number, object.live.into()))
                .collect()
        })
    }
}

/// End a request.
fn end(token: Token, result: Result<Done, IoError>, actions: &mut Vec<Action>) {
    actions.push(Action::End(Completion { token, result }));
}

/// End a request that was never begun.
fn refuse(token: Token, ask: &Ask, error: IoError, actions: &mut Vec<Action>) {
    if let Ask::Snapshot { .. } | Ask::DeleteSnapshot { .. } | Ask::GiveUp = ask {
        let result = Err(error.into());
        actions.push(Action::SnapshotEnd { token, result });
    } else {
        end(token, Err(error), actions);
    }
}
