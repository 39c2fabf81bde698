//! What every backend and every stack of filters must do, whatever it is made of.
//!
//! The tests of this crate run it over files; `cargo run --example conformance -- URL` runs it over
//! whatever a URL names, such as an image of a real cluster. A failure panics with what was wrong.
//! It writes to the place and leaves its image there; of a place that can only be read it tries what
//! such a one must do.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Extent, ExtentState, Nanos, SectorRange, Token};
use hdcs_core::objects::io::{SnapshotError, SnapshotName};
use hdcs_device::ring::{Finished, Owner, Ring, RingConfig};

use super::copying::Copying;
use super::url::BackendUrl;
use super::{
    Absent, Ask, BackendError, CloneOrigin, Content, Operation, Port, Prepared, SnapshotCommand,
    SnapshotStore, Stack, StoredSnapshots,
};
use crate::filters::Chance;

/// Bytes of the backends under test: not a multiple of a block, on purpose.
pub const BYTES: u64 = (3 << 20) + 512;

/// An operation that has not ended by then never will.
const PATIENCE: Duration = Duration::from_secs(60);

/// Opens the backend under test, with these options of filters over it.
pub type Open<'a> = dyn Fn(&str, u64, Absent) -> Result<Prepared, BackendError> + 'a;

/// A backend with the loop that a shard would be.
pub struct Bench {
    /// Where its I/O goes.
    pub ring: Ring,
    /// What is under test.
    pub stack: Stack,
    /// Where buffers come from.
    pub pool: Arc<Pool>,
    origin: Instant,
    next: u64,
    ended: HashMap<u64, Result<Done, IoError>>,
    /// By what was asked for; what goes on has no name.
    calls: HashMap<&'static str, Calls>,
}

/// How often a backend was asked for something, and how often the thread had to wait in such a call: rule 5.
#[derive(Clone, Copy, Debug, Default)]
struct Calls {
    all: u64,
    waited: u64,
}

impl Calls {
    /// How often this thread has waited for something so far.
    fn waits() -> i64 {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: `getrusage` writes a whole `rusage` to a place that has room for one; all zeroes is one, too.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
            usage.assume_init()
        };
        usage.ru_nvcsw
    }

    /// Count a call that has ended, which began when the thread had waited so often.
    fn count(&mut self, before: i64) {
        self.all += 1;
        self.waited += u64::from(Self::waits() > before);
    }

    /// Assert that the backend does not block. A lock that another thread of the backend holds for a moment may make it
    /// wait now and then; what waits for a disk or a network waits in most such calls.
    fn assert_few_waits(self, what: &str) {
        assert!(
            self.waited <= 5 + self.all / 4,
            "rule 5: the thread had to wait in {} of {} calls: {what}",
            self.waited,
            self.all
        );
    }
}

impl Bench {
    /// Use an open backend.
    pub fn new(prepared: Prepared) -> Self {
        Self::over(prepared.build())
    }

    /// Use a stack.
    pub fn over(stack: Stack) -> Self {
        Self::after(None, stack)
    }

    /// Use a stack over what another one has left ([`Self::close`]).
    pub fn after(before: Option<Content>, stack: Stack) -> Self {
        Self {
            stack: stack.watching(before),
            ring: Ring::new(RingConfig::default()).expect("io_uring"),
            pool: Pool::new(8 << 20),
            origin: Instant::now(),
            next: 0,
            ended: HashMap::new(),
            calls: HashMap::new(),
        }
    }

    /// Drop it as it is, as a crash of this program would; what the next one must find.
    pub fn close(self) -> Option<Content> {
        self.stack.into_content()
    }

    fn now(&self) -> Nanos {
        Nanos(self.origin.elapsed().as_nanos() as u64)
    }

    fn call(&mut self, what: &'static str, call: impl FnOnce(&mut Stack, Nanos, &mut Port<'_>)) {
        let now = self.now();
        let mut done = Vec::new();
        let mut port = Port {
            ring: &mut self.ring,
            owner: Owner::Backend(0),
            done: &mut done,
        };
        let before = Calls::waits();
        call(&mut self.stack, now, &mut port);
        self.calls.entry(what).or_default().count(before);
        for Completion { token, result } in done {
            assert!(self.ended.insert(token.0, result).is_none(), "ended twice");
        }
    }

    /// Begin an operation; its number.
    pub fn start(&mut self, ask: Ask) -> u64 {
        self.next += 1;
        let (token, (what, ..)) = (Token(self.next), ask.describe());
        self.call(what, |stack, now, port| {
            stack.submit(now, Operation { token, ask }, port);
        });
        token.0
    }

    /// One turn of the loop.
    pub fn turn(&mut self) {
        let until = self.stack.next_wakeup().map(|due| due.since(self.now()).0);
        let wait = Duration::from_nanos(until.unwrap_or(u64::MAX)).min(Duration::from_millis(20));
        self.ring.submit_and_wait(Some(wait)).expect("io_uring");
        let mut finished = Vec::new();
        self.ring.reap(&mut finished);
        for Finished {
            owner,
            token,
            outcome,
        } in finished
        {
            if owner == Owner::Backend(0) {
                self.call("", |stack, now, port| {
                    stack.completed(now, token, outcome, port);
                });
            }
        }
        self.call("", Stack::poll);
    }

    /// Wait for the end of an operation.
    pub fn end(&mut self, id: u64) -> Result<Done, IoError> {
        let started = Instant::now();
        loop {
            if let Some(result) = self.ended.remove(&id) {
                return result;
            }
            assert!(started.elapsed() < PATIENCE, "never ended");
            self.turn();
        }
    }

    /// An operation from its beginning to its end.
    pub fn ask(&mut self, ask: Ask) -> Result<Done, IoError> {
        let id = self.start(ask);
        self.end(id)
    }

    /// Whether it has ended without being waited for.
    pub fn has_ended(&self, id: u64) -> bool {
        self.ended.contains_key(&id)
    }

    /// A buffer placed as a volume's are.
    pub fn buf(&self, offset: u64, content: &[u8]) -> Buf {
        let range = SectorRange::new(offset / 512, content.len() as u64 / 512);
        let mut buf = self.pool.alloc_for(range).expect("a free buffer");
        buf.copy_from_slice(content);
        buf.freeze()
    }

    /// Write.
    pub fn write(&mut self, offset: u64, content: &[u8]) -> Result<(), IoError> {
        let data = vec![self.buf(offset, content)];
        self.ask(Ask::Write { offset, data }).map(drop)
    }

    /// Read.
    pub fn read(&mut self, offset: u64, bytes: usize) -> Result<Vec<u8>, IoError> {
        let range = SectorRange::new(offset / 512, bytes as u64 / 512);
        let buf = self.pool.alloc_for(range).expect("a free buffer");
        match self.ask(Ask::Read { offset, buf })? {
            Done::Read(buf) => Ok(buf.to_vec()),
            other => panic!("a read ended in {other:?}"),
        }
    }

    /// Read everything, which compares it with what should be there.
    pub fn read_all(&mut self) {
        let end = self.stack.bytes();
        for offset in (0..end).step_by(1 << 20) {
            let bytes = (end - offset).min(1 << 20) as usize;
            self.read(offset, bytes).unwrap();
        }
    }

    /// The whole allocation of a range.
    pub fn extents(&mut self, range: SectorRange) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        let mut at = range.start;
        while at < range.end() {
            let rest = SectorRange::between(at, range.end());
            let Ok(Done::Extents(found)) = self.ask(Ask::Extents { range: rest }) else {
                panic!("extents failed");
            };
            assert!(!found.is_empty());
            for extent in found {
                assert_eq!(extent.range.start, at, "runs are consecutive");
                assert!(!extent.range.is_empty() && extent.range.end() <= range.end());
                at = extent.range.end();
                runs.push(extent);
            }
        }
        runs
    }
}

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut chance = Chance::new(seed);
    std::iter::repeat_with(|| chance.draw() as u8 | 1)
        .take(bytes)
        .collect()
}

/// Something that a backend must do.
type Case = fn(&mut Bench);

/// Everything, over a URL without filters at whose place nothing is yet. `say` hears what is tried.
pub fn run_url(url: &str, say: &mut dyn FnMut(&str)) -> Result<(), BackendError> {
    let parsed = BackendUrl::parse(url)?;
    if parsed.place.is_read_only() {
        return reads_only(url, say);
    }
    if parsed.place.find()?.is_some() {
        let place = parsed.place.name();
        return Err(BackendError::Refused(format!(
            "{place} exists, and the suite would overwrite it: name a place where nothing is"
        )));
    }
    say("a place where nothing is");
    let refused = super::open(url, BYTES, Absent::Refuse);
    assert!(
        refused.is_err(),
        "nothing there was taken for a volume's data"
    );
    let mark = if url.contains('?') { '&' } else { '?' };
    let open = |options: &str, bytes: u64, absent: Absent| {
        super::open(&format!("{url}{mark}{options}"), bytes, absent)
    };
    contract(&open, say);
    faults(&open, say);
    if let Some(store) = parsed.place.snapshot_store() {
        say("snapshots and clones");
        let (place, options) = url.split_once('?').unwrap_or((url, ""));
        let clone = format!("{place}-clone?{options}");
        keeps_and_clones(url, &clone, store);
    }
    let found = super::find(url)?.expect("the image is there");
    assert_eq!(found.bytes, BYTES, "its size is found");
    assert!(super::closing::wait(None, PATIENCE), "it never closed");
    Ok(())
}

/// What the contract says of a place that can only be read, over one where something is.
fn reads_only(url: &str, say: &mut dyn FnMut(&str)) -> Result<(), BackendError> {
    let place = || BackendError::Refused(format!("nothing is at {url}"));
    let bytes = super::find(url)?.ok_or_else(place)?.bytes;
    say("opening it, twice at once");
    let wrong = super::open(url, bytes + 512, Absent::Create).err();
    assert!(
        matches!(wrong, Some(BackendError::Size { .. })),
        "of another size: {wrong:?}"
    );
    let (first, second) = (
        super::open(url, bytes, Absent::Create)?,
        super::open(url, bytes, Absent::Refuse)?,
    );
    assert_eq!(
        first.identity(),
        second.identity(),
        "the same thing is there"
    );
    let (mut first, mut second) = (Bench::new(first), Bench::new(second));
    assert!(first.stack.capabilities().read_only);
    let piece = |offset: u64| (bytes - offset).min(1 << 20) as usize;
    let all = |bench: &mut Bench| -> Vec<u8> {
        let pieces = (0..bytes).step_by(1 << 20);
        pieces
            .flat_map(|offset| bench.read(offset, piece(offset)).unwrap())
            .collect()
    };
    let content = all(&mut first);
    say("nothing changes it");
    let data = vec![first.buf(0, &noise(70, 4096))];
    let zero = |unmap| Ask::Zero {
        offset: 0,
        bytes: 4096,
        unmap,
    };
    for ask in [
        Ask::Write { offset: 0, data },
        zero(true),
        zero(false),
        Ask::Resize { bytes: 4096 },
    ] {
        assert!(first.ask(ask).is_err(), "it was written to");
    }
    first.ask(Ask::Flush).unwrap();
    for bench in [&mut first, &mut second] {
        assert!(all(bench) == content);
    }
    say("extents tell the truth");
    for extent in first.extents(SectorRange::new(0, bytes / 512)) {
        let (from, to) = (extent.range.byte_offset(), extent.range.end() * 512);
        let range = &content[from as usize..to as usize];
        assert!(
            extent.state == ExtentState::Data || range.iter().all(|&byte| byte == 0),
            "a hole over data"
        );
    }
    drop((first, second));
    assert!(super::closing::wait(None, PATIENCE), "it never closed");
    Ok(())
}

/// What the contract says, over a place where nothing is yet.
pub fn contract(open: &Open<'_>, say: &mut dyn FnMut(&str)) {
    let cases: [(&str, Case); 7] = [
        ("reads bring what was written", reads_what_was_written),
        ("zeroes are zero", zeroes_are_zero),
        ("many at once", many_at_once),
        ("more at once than may be under way", bounded_in_flight),
        ("extents tell the truth", extents_tell_the_truth),
        ("resizing", resizes),
        ("nothing blocks", blocks_nowhere),
    ];
    say("making it");
    let prepared = open("", BYTES, Absent::Create).unwrap_or_else(|error| panic!("{error}"));
    let identity = prepared.identity();
    let mut bench = Bench::new(prepared);
    for (what, case) in cases {
        say(what);
        case(&mut bench);
        assert_eq!(bench.stack.under_way(), 0);
    }
    say("opening it again");
    let pool = Arc::clone(&bench.pool);
    bench.write(8192, &noise(77, 4096)).unwrap();
    bench.ask(Ask::Flush).unwrap();
    let mut content = bench.close();
    assert_eq!(pool.free_bytes(), pool.total_bytes(), "buffers came back");
    for (bytes, absent) in [(BYTES + 512, Absent::Refuse), (BYTES - 512, Absent::Create)] {
        let wrong = open("", bytes, absent).err();
        assert!(
            matches!(
                wrong,
                Some(BackendError::Size { .. } | BackendError::Shrunk { .. })
            ),
            "of another size: {wrong:?}"
        );
    }
    say("refusing what is there to a volume that is to be new");
    let refused = open("", BYTES, Absent::CreateNew).err();
    assert!(
        matches!(refused, Some(BackendError::Exists(_))),
        "{refused:?}"
    );
    for absent in [Absent::Refuse, Absent::Create] {
        let prepared = open("", BYTES, absent).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(prepared.identity(), identity, "the same thing is there");
        let mut again = Bench::after(content, prepared.build());
        assert_eq!(again.read(8192, 4096).unwrap(), noise(77, 4096));
        again.read_all();
        content = again.close();
    }
    let reopen = |content| {
        let prepared = open("", BYTES, Absent::Refuse);
        let prepared = prepared.unwrap_or_else(|error| panic!("{error}"));
        Bench::after(content, prepared.build())
    };
    let mut bench = reopen(content);
    if bench.stack.capabilities().atomic_flush {
        say("what is not flushed is not there");
        bench.write(8192, &noise(78, 4096)).unwrap();
        bench
            .ask(Ask::Zero {
                offset: 16384,
                bytes: 4096,
                unmap: true,
            })
            .unwrap();
        assert_eq!(bench.read(8192, 4096).unwrap(), noise(78, 4096));
        let mut again = reopen(bench.close());
        assert_eq!(again.read(8192, 4096).unwrap(), noise(77, 4096));
        again.read_all();
    }
}

fn open_bench(url: &str) -> Bench {
    let prepared = super::open(url, BYTES, Absent::Refuse);
    Bench::new(prepared.unwrap_or_else(|error| panic!("{error}")))
}

fn kept(store: &dyn SnapshotStore) -> StoredSnapshots {
    let kept = store.kept().unwrap_or_else(|error| panic!("{error}"));
    kept.expect("there is a volume")
}

/// What a place with snapshots must do besides, over one that [`contract`] has left; its clone goes
/// to `clone_url`, where nothing is. One that is objects is given up in the end.
fn keeps_and_clones(url: &str, clone_url: &str, store: &dyn SnapshotStore) {
    let name = |text| SnapshotName::new(text).expect("a name");
    let snapshot = |bench: &mut Bench, text, made_ms| {
        let (name, copy) = (name(text), true);
        let kept = bench.ask(Ask::Snapshot(SnapshotCommand::Snapshot {
            name,
            made_ms,
            copy,
        }));
        match bench.stack.copying() {
            Some(_) if kept.is_ok() => bench.ask(Ask::Snapshot(SnapshotCommand::Complete)),
            _ => kept,
        }
    };
    let forget = |text| Ask::Snapshot(SnapshotCommand::Forget { name: name(text) });
    let is_objects = store.is_objects();
    let copying = Copying::new(true);
    let [first, second, third, fourth] = [60, 61, 62, 63].map(|seed| noise(seed, 1 << 20));
    let mut parent = open_bench(url);
    assert!(parent.stack.capabilities().snapshots);
    assert_eq!(
        kept(store),
        StoredSnapshots {
            identity: kept(store).identity,
            ..StoredSnapshots::default()
        }
    );
    parent.write(0, &first).unwrap();
    parent.ask(Ask::Flush).unwrap();
    if parent.stack.capabilities().atomic_flush {
        // Not flushed: it is in no snapshot.
        parent.write(4096, &noise(64, 4096)).unwrap();
    }
    let written = |done: Result<Done, IoError>| matches!(done, Ok(Done::Written));
    assert!(written(snapshot(&mut parent, "one", 5)));
    assert_eq!(
        refused(snapshot(&mut parent, "one", 6)),
        SnapshotError::Exists
    );
    parent.write(0, &second).unwrap();
    parent.ask(Ask::Flush).unwrap();
    assert!(written(snapshot(&mut parent, "two", 7)));
    let names = |kept: StoredSnapshots| {
        let snapshots = kept.snapshots.into_iter();
        snapshots.map(|s| s.name).collect::<Vec<_>>()
    };
    assert_eq!(names(kept(store)), ["one", "two"]);

    let clone_place = BackendUrl::parse(clone_url).expect("a URL").place;
    let clone_store = clone_place.snapshot_store().expect("the same kind");
    let begin = |from| clone_store.clone_from(&origin(url, name(from)), &copying);
    assert!(begin("three").is_err());
    let made = begin("one").unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(made.bytes, BYTES);
    assert!(begin("one").is_err(), "it is there");
    assert_eq!(names(kept(store)), ["one", "two"]);
    let mut clone = open_bench(clone_url);
    assert!(
        clone.read(0, 1 << 20).unwrap() == first,
        "it begins as the snapshot"
    );
    clone.write(1 << 20, &third).unwrap();
    clone.ask(Ask::Flush).unwrap();
    parent.write(1 << 20, &fourth).unwrap();
    parent.ask(Ask::Flush).unwrap();
    if is_objects {
        assert!(kept(clone_store).is_clone);
        let snapshots = kept(store).snapshots.into_iter();
        let made: Vec<_> = snapshots.map(|s| (s.made_ms, s.clones.len())).collect();
        assert_eq!(made, [(5, 1), (7, 0)]);
    }
    // The clone keeps what it needs, whatever is forgotten.
    for name in ["one", "two"] {
        assert!(written(parent.ask(forget(name))));
    }
    assert_eq!(refused(parent.ask(forget("one"))), SnapshotError::NotFound);
    assert_eq!(names(kept(store)), Vec::<String>::new());
    drop(clone);
    let mut clone = open_bench(clone_url);
    assert!(clone.read(0, 1 << 20).unwrap() == first, "opened again");
    assert!(clone.read(1 << 20, 1 << 20).unwrap() == third);
    assert!(parent.read(0, 1 << 20).unwrap() == second);
    assert!(parent.read(1 << 20, 1 << 20).unwrap() == fourth);
    if is_objects {
        gives_up(parent, clone, store, (clone_url, clone_store));
    }
}

/// The snapshot of what is at a URL, whatever that is.
pub(crate) fn origin(url: &str, snapshot: SnapshotName) -> CloneOrigin<'_> {
    CloneOrigin {
        url,
        identity: None,
        snapshot,
        key: None,
    }
}

fn refused(done: Result<Done, IoError>) -> SnapshotError {
    match done {
        Ok(Done::Refused(why)) => why,
        other => panic!("it is not refused: {other:?}"),
    }
}

/// What becomes of a clone whose objects are needed no more.
fn gives_up(
    mut parent: Bench,
    mut clone: Bench,
    store: &dyn SnapshotStore,
    (clone_url, clone_store): (&str, &dyn SnapshotStore),
) {
    let before = parent.read(0, 1 << 20).unwrap();
    assert_eq!(kept(store).clones.len(), 1);
    assert_eq!(
        refused(parent.ask(Ask::Snapshot(SnapshotCommand::GiveUp))),
        SnapshotError::HasClones
    );
    let key = clone_store.key().unwrap().map(|key| key.id());
    assert!(clone_store.sweep(key).is_err(), "it is in use");
    assert!(matches!(
        clone.ask(Ask::Snapshot(SnapshotCommand::GiveUp)),
        Ok(Done::Written)
    ));
    drop(clone);
    assert!(kept(clone_store).is_gone);
    assert_eq!(kept(store).all_clones().count(), 0);
    assert!(super::open(clone_url, BYTES, Absent::Refuse).is_err());
    assert!(super::open(clone_url, BYTES, Absent::Create).is_err());
    assert!(
        clone_store
            .sweep(key)
            .unwrap_or_else(|error| panic!("{error}"))
            > 0
    );
    assert!(kept(clone_store).is_gone, "that stays");
    assert!(parent.read(0, 1 << 20).unwrap() == before);
}

/// A file that makes an error filter fail while it exists.
struct Switch(std::path::PathBuf);

impl Switch {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("hdcs-switch-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    /// Switch the failure on, and wait until the filter has seen it: `probe` then fails.
    fn on(&self, bench: &mut Bench, probe: impl Fn(&mut Bench) -> Result<(), IoError>) -> IoError {
        std::fs::write(&self.0, "").expect("a temporary file");
        let started = Instant::now();
        loop {
            match probe(bench) {
                Err(error) => return error,
                Ok(()) => assert!(started.elapsed() < PATIENCE, "it never failed"),
            }
        }
    }

    fn off(&self) {
        std::fs::remove_file(&self.0).expect("a temporary file");
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // It is there only if a case has failed.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What faults between a volume and its backend do, over a place that [`contract`] has left.
pub fn faults(open: &Open<'_>, say: &mut dyn FnMut(&str)) {
    let bench = |options: &str| {
        let prepared = open(options, BYTES, Absent::Refuse);
        Bench::new(prepared.unwrap_or_else(|error| panic!("{error}")))
    };
    say("a slow backend");
    let mut slow = bench("delay_us=3000");
    let started = Instant::now();
    slow.write(0, &noise(50, 4096)).unwrap();
    slow.ask(Ask::Flush).unwrap();
    assert_eq!(slow.read(0, 4096).unwrap(), noise(50, 4096));
    assert!(started.elapsed() >= Duration::from_millis(9));
    drop(slow);

    for (kind, expected) in [
        ("eio", IoError::Failed),
        ("gone", IoError::Unreachable),
        ("enospc", IoError::NoSpace),
    ] {
        say(&format!("a failing backend: {kind}"));
        let switch = Switch::new();
        let mut failing = bench(&format!(
            "error_kind={kind}&error_on=write&error_file={}",
            switch.0.display()
        ));
        let error = switch.on(&mut failing, |bench| bench.write(0, &noise(50, 4096)));
        assert_eq!(error, expected);
        assert_eq!(failing.write(0, &noise(51, 4096)), Err(expected));
        assert_eq!(failing.read(0, 4096).unwrap(), noise(50, 4096));
        failing.ask(Ask::Flush).unwrap();
        switch.off();
        let started = Instant::now();
        while failing.write(0, &noise(50, 4096)).is_err() {
            assert!(started.elapsed() < PATIENCE, "it never came back");
        }
        assert_eq!(failing.read(0, 4096).unwrap(), noise(50, 4096));
    }

    say("a backend that was taken over");
    let switch = Switch::new();
    let mut fenced = bench(&format!(
        "error_kind=fenced&error_on=write&error_file={}",
        switch.0.display()
    ));
    let error = switch.on(&mut fenced, |bench| bench.write(0, &noise(50, 4096)));
    assert_eq!(error, IoError::Fenced);
    switch.off();
    assert_eq!(fenced.write(0, &noise(51, 4096)), Err(IoError::Fenced));
    assert_eq!(fenced.read(0, 4096), Err(IoError::Fenced));
    drop(fenced);
    let mut successor = bench("");
    assert_eq!(successor.read(0, 4096).unwrap(), noise(50, 4096));
    drop(successor);

    say("a backend that hangs and goes on");
    let switch = Switch::new();
    let mut hanging = bench(&format!(
        "error_kind=hang&error_on=flush&error_file={}",
        switch.0.display()
    ));
    let flushes = std::cell::RefCell::new(Vec::new());
    switch.on(&mut hanging, |bench| {
        let id = bench.start(Ask::Flush);
        flushes.borrow_mut().push(id);
        // Long enough for the filter to look, and for a flush that does not hang to end.
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(500) {
            bench.turn();
            if bench.has_ended(id) {
                return Ok(());
            }
        }
        Err(IoError::Unreachable)
    });
    hanging.write(4096, &noise(52, 4096)).unwrap();
    switch.off();
    for id in flushes.into_inner() {
        hanging.end(id).unwrap();
    }
    assert_eq!(hanging.read(4096, 4096).unwrap(), noise(52, 4096));
}

fn reads_what_was_written(bench: &mut Bench) {
    assert_eq!(
        bench.read(0, 1 << 20).unwrap(),
        vec![0; 1 << 20],
        "new is zero"
    );
    let cases = [
        (0, 512),
        (512, 512),
        (3584, 1024),
        (4096, 4096),
        (5120, 8192),
        (BYTES - 512, 512),
    ];
    for (seed, (offset, bytes)) in cases.into_iter().enumerate() {
        let content = noise(seed as u64, bytes);
        bench.write(offset, &content).unwrap();
        assert_eq!(bench.read(offset, bytes).unwrap(), content);
    }
    let large = noise(9, 1 << 20);
    bench.write(1 << 20, &large).unwrap();
    assert_eq!(bench.read(1 << 20, 1 << 20).unwrap(), large);
    // More buffers than one system call takes.
    let piece = bench.buf(0, &noise(10, 512));
    let data = vec![piece.clone(); 1500];
    bench.ask(Ask::Write { offset: 512, data }).unwrap();
    assert_eq!(bench.read(512, 1500 * 512).unwrap(), piece.repeat(1500));
}

fn zeroes_are_zero(bench: &mut Bench) {
    let content = noise(20, 1 << 20);
    for unmap in [true, false] {
        for (offset, bytes) in [(512u64, 1024u64), (4096, 8192), (1024, 700 * 512), (0, 0)] {
            bench.write(0, &content).unwrap();
            bench
                .ask(Ask::Zero {
                    offset,
                    bytes,
                    unmap,
                })
                .unwrap();
            let mut expected = content.clone();
            expected[offset as usize..(offset + bytes) as usize].fill(0);
            assert!(
                bench.read(0, 1 << 20).unwrap() == expected,
                "{offset} {bytes} {unmap}"
            );
        }
        bench.write(BYTES - 512, &noise(21, 512)).unwrap();
        bench
            .ask(Ask::Zero {
                offset: 0,
                bytes: BYTES,
                unmap,
            })
            .unwrap();
        assert_eq!(bench.read(BYTES - 512, 512).unwrap(), vec![0; 512]);
    }
}

/// Write blocks in an order drawn from the seed, all at once, and read them back.
fn write_at_once(bench: &mut Bench, seed: u64, blocks: u64, block_bytes: u64) {
    let mut chance = Chance::new(seed);
    let mut order: Vec<u64> = (0..blocks).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, (chance.draw() % (at as u64 + 1)) as usize);
    }
    let content = |block: u64| noise(seed << 32 | block, block_bytes as usize);
    let ids: Vec<u64> = order
        .iter()
        .map(|&block| {
            let offset = block * block_bytes;
            let data = vec![bench.buf(offset, &content(block))];
            bench.start(Ask::Write { offset, data })
        })
        .collect();
    for id in ids {
        bench.end(id).unwrap();
    }
    bench.ask(Ask::Flush).unwrap();
    for block in 0..blocks {
        let read = bench.read(block * block_bytes, block_bytes as usize);
        assert!(read.unwrap() == content(block), "block {block}");
    }
}

fn many_at_once(bench: &mut Bench) {
    write_at_once(bench, 5, 256, 4096);
}

fn bounded_in_flight(bench: &mut Bench) {
    let max = bench.stack.capabilities().in_flight_max.min(1000) as u64;
    // Small ones, since each takes a block of the pool.
    write_at_once(bench, 6, max + max / 2, 512);
}

fn extents_tell_the_truth(bench: &mut Bench) {
    bench
        .ask(Ask::Zero {
            offset: 0,
            bytes: BYTES,
            unmap: true,
        })
        .unwrap();
    bench.write(1 << 20, &noise(30, 4096)).unwrap();
    bench.ask(Ask::Flush).unwrap();
    for range in [SectorRange::new(0, BYTES / 512), SectorRange::new(2047, 3)] {
        for extent in bench.extents(range) {
            if extent.state == ExtentState::Data {
                continue;
            }
            assert!(
                !extent.range.overlaps(SectorRange::new(2048, 8)),
                "a hole over data"
            );
        }
    }
}

fn resizes(bench: &mut Bench) {
    bench.write(BYTES - 512, &noise(40, 512)).unwrap();
    for bytes in [BYTES + (1 << 20), BYTES] {
        bench.ask(Ask::Resize { bytes }).unwrap();
        bench.stack.resized(bytes);
    }
    assert_eq!(bench.read(BYTES - 512, 512).unwrap(), noise(40, 512));
    bench.ask(Ask::Resize { bytes: 1 << 20 }).unwrap();
    bench.ask(Ask::Resize { bytes: BYTES }).unwrap();
    bench.stack.resized(BYTES);
    assert_eq!(
        bench.read(BYTES - 512, 512).unwrap(),
        vec![0; 512],
        "cut off is gone"
    );
}

/// Everything so often that what blocks shows.
fn blocks_nowhere(bench: &mut Bench) {
    for _ in 0..20 {
        bench.write(0, &noise(41, 4096)).unwrap();
        bench.ask(Ask::Flush).unwrap();
        bench.read(0, 4096).unwrap();
        bench.extents(SectorRange::new(0, BYTES / 512));
        for unmap in [true, false] {
            let (offset, bytes) = (0, 4096);
            let zero = Ask::Zero {
                offset,
                bytes,
                unmap,
            };
            bench.ask(zero).unwrap();
        }
        for bytes in [BYTES + 4096, BYTES] {
            bench.ask(Ask::Resize { bytes }).unwrap();
            bench.stack.resized(bytes);
        }
    }
    for (what, calls) in &bench.calls {
        calls.assert_few_waits(what);
    }
}

#[cfg(test)]
mod tests;
