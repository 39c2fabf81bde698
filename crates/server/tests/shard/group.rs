//! Several shards of one node: who gets which command, and how they stop.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use hdcs_backend::memory::Share;
use hdcs_frontend::VolumeNumber;
use hdcs_frontend::nbd::{NbdConfig, NbdSession};
use hdcs_server::shard::command::{
    Answer, ClosedReport, Command, SessionFactory, ShardReport, VolumeSpec,
};
use hdcs_server::shard::{ShardConfig, Shards, start_all};
use tokio::sync::oneshot;

use crate::client::{Client, noise};
use crate::node::{PATIENCE, make_log, shard_config, spec, wait};

const COUNT: usize = 3;
const BYTES: usize = 1 << 20;

/// Shards, each of which listens on a socket of its own.
struct Group {
    shards: Arc<Shards>,
    threads: Vec<JoinHandle<()>>,
}

impl Group {
    fn start(directory: &Path) -> Self {
        let volumes = Share::of_shards(u64::MAX, COUNT);
        let config = |_| ShardConfig {
            volumes: Arc::clone(&volumes),
            ..shard_config()
        };
        let (shards, threads) = start_all((0..COUNT).map(config).collect()).unwrap();
        let group = Self { shards, threads };
        for shard in 0..COUNT {
            let path = socket(directory, shard);
            // One of an earlier group.
            let _ = std::fs::remove_file(&path);
            let socket = UnixListener::bind(path).unwrap().into();
            let sessions = SessionFactory(Box::new(|_| {
                Box::new(NbdSession::new(NbdConfig::default()))
            }));
            let listen = |answer| Command::Listen {
                socket,
                sessions,
                answer,
            };
            // They listen in turn.
            group.ask(listen).unwrap();
        }
        group
    }

    fn begin<T, E>(
        &self,
        command: impl FnOnce(Answer<T, E>) -> Command,
    ) -> oneshot::Receiver<Result<T, E>> {
        let (answer, receiver) = oneshot::channel();
        self.shards.send(command(answer)).unwrap();
        receiver
    }

    fn ask<T, E>(&self, command: impl FnOnce(Answer<T, E>) -> Command) -> Result<T, E> {
        wait(&mut self.begin(command))
    }

    fn open(&self, spec: VolumeSpec) -> Result<(), String> {
        self.ask(|answer| Command::Open(Box::new(spec), answer))
            .map(drop)
            .map_err(|failure| failure.message)
    }

    fn open_on(&self, shard: usize, mut spec: VolumeSpec) {
        spec.shard = Some(shard);
        let number = VolumeNumber(spec.config.number);
        self.open(spec).unwrap();
        assert_eq!(self.shards.shard_of(number), Some(shard));
    }

    fn close(&self, number: u32, destage: bool) -> Result<(), String> {
        let volume = VolumeNumber(number);
        let close = |answer| Command::Close {
            volume,
            destage,
            answer,
        };
        self.ask(close).map(drop)
    }

    fn report(&self, shard: usize) -> ShardReport {
        let (answer, receiver) = oneshot::channel();
        let asked = self.shards.send_to(shard, Command::Report(answer));
        asked.unwrap();
        *receiver.blocking_recv().unwrap()
    }

    fn volumes(&self) -> Vec<usize> {
        let of = |shard| self.report(shard).volumes.len();
        (0..COUNT).map(of).collect()
    }

    /// Tell every shard to stop; what each says.
    fn stop(self, destage: bool) -> Vec<Result<Vec<ClosedReport>, String>> {
        let mut answers = Vec::new();
        for shard in 0..COUNT {
            let (answer, receiver) = oneshot::channel();
            let stop = Command::Stop { destage, answer };
            self.shards.send_to(shard, stop).unwrap();
            answers.push(receiver);
        }
        assert!(self.shards.is_stopping());
        let closed = answers.iter_mut().map(wait).collect();
        for thread in self.threads {
            thread.join().unwrap();
        }
        closed
    }
}

fn socket(directory: &Path, shard: usize) -> std::path::PathBuf {
    directory.join(format!("nbd{shard}.sock"))
}

fn connect(directory: &Path, shard: usize, volume: u32) -> Client {
    Client::connect(&socket(directory, shard), &format!("v{volume}"))
}

fn made(directory: &Path, number: u32) -> VolumeSpec {
    let spec = spec(directory, number, "");
    make_log(&spec);
    spec
}

#[test]
fn volumes_are_spread_over_shards_and_found_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let group = Group::start(path);
    for number in 1..=6 {
        group.open(made(path, number)).unwrap();
    }
    assert_eq!(group.volumes(), [2, 2, 2]);
    for number in 1..=6 {
        let volume = VolumeNumber(number);
        group
            .ask(|answer| Command::DestageAll(volume, answer))
            .unwrap();
        let shard = group.shards.shard_of(volume).unwrap();
        let report = group.report(shard);
        let names: Vec<&str> = report.volumes.iter().map(|one| &*one.name).collect();
        assert!(names.contains(&&*format!("v{number}")), "{names:?}");
        assert!(report.volumes.iter().all(|one| one.shard == shard));
    }
    let refused = group.open(spec(path, 4, "")).unwrap_err();
    assert!(refused.contains("open already"), "{refused}");
    let mut same_name = spec(path, 9, "");
    same_name.name = "v4".to_owned();
    let refused = group.open(same_name).unwrap_err();
    assert!(refused.contains("open already"), "{refused}");
    let closed = group.stop(false);
    let closed: Vec<usize> = closed.into_iter().map(|one| one.unwrap().len()).collect();
    assert_eq!(closed, [2, 2, 2]);
}

#[test]
fn closed_volume_is_on_no_shard_and_its_place_is_free() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let group = Group::start(path);
    for number in 1..=3 {
        group.open(made(path, number)).unwrap();
    }
    let two = VolumeNumber(2);
    let shard = group.shards.shard_of(two).unwrap();
    group.close(2, false).unwrap();
    assert_eq!(group.shards.shard_of(two), None);
    let refused = group.close(2, false).unwrap_err();
    assert!(refused.contains("not open"), "{refused}");
    group.open(made(path, 4)).unwrap();
    assert_eq!(group.shards.shard_of(VolumeNumber(4)), Some(shard));
    // Without its log a volume is not opened, and is nowhere then.
    let without_log = spec(path, 5, "");
    group.open(without_log).unwrap_err();
    let started = std::time::Instant::now();
    while group.shards.shard_of(VolumeNumber(5)).is_some() {
        assert!(started.elapsed() < PATIENCE, "it stays somewhere");
        std::thread::yield_now();
    }
    group
        .stop(false)
        .into_iter()
        .for_each(|one| drop(one.unwrap()));
}

#[test]
fn volume_that_comes_back_to_a_shard_finds_nothing_old_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let group = Group::start(path);
    let (old, new) = (noise(1, BYTES), noise(2, BYTES));
    group.open_on(1, made(path, 1));
    connect(path, 1, 1).write(0, &old).unwrap();
    group.close(1, true).unwrap();
    // Read from the backend, it is in the DRAM tier.
    group.open_on(1, spec(path, 1, ""));
    for _ in 0..2 {
        assert!(connect(path, 1, 1).read(0, BYTES).unwrap() == old);
    }
    assert!(group.report(1).cache.dram_used_blocks > 0);
    group.close(1, true).unwrap();
    group.open_on(2, spec(path, 1, ""));
    connect(path, 2, 1).write(0, &new).unwrap();
    group.close(1, true).unwrap();
    group.open_on(1, spec(path, 1, ""));
    assert!(connect(path, 1, 1).read(0, BYTES).unwrap() == new);
    group
        .stop(false)
        .into_iter()
        .for_each(|one| drop(one.unwrap()));
}

#[test]
fn group_stops_with_every_shard_written_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let group = Group::start(path);
    let data: Vec<Vec<u8>> = (0..3).map(|seed| noise(seed, BYTES)).collect();
    for number in 1..=3 {
        group.open_on(number as usize - 1, made(path, number));
    }
    std::thread::scope(|scope| {
        for (shard, data) in data.iter().enumerate() {
            scope.spawn(move || {
                let mut client = connect(path, shard, shard as u32 + 1);
                client.write(4096, data).unwrap();
                client.flush().unwrap();
            });
        }
    });
    let closed = group.stop(true);
    for one in closed {
        let one = one.unwrap();
        assert_eq!(one.len(), 1);
        assert_eq!(one[0].left.map(|left| left.all.dirty_bytes), Some(0));
    }
    for (number, data) in (1..).zip(&data) {
        let image = std::fs::read(path.join(format!("image{number}"))).unwrap();
        assert!(&image[4096..4096 + BYTES] == data);
    }
}
