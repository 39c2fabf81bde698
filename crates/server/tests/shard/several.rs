//! Several shards: clients come to any of them, and are served by that of their volume.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdcs_backend::memory::{Kind, Needs, Share};
use hdcs_core::base::io::Nanos;
use hdcs_frontend::access::{Allow, Peer};
use hdcs_frontend::nbd::{NbdConfig, NbdSession};
use hdcs_frontend::{OpeningId, VolumeNumber};
use hdcs_server::shard::command::{
    Answer, Command, Departed, SessionFactory, ShardReport, VolumeSpec,
};
use hdcs_server::shard::{SendError, ShardConfig, Shards, start_all};
use tokio::sync::oneshot;

use crate::client::{Client, READ, WRITE, noise};
use crate::node::{BYTES, LOG_BYTES, PATIENCE, make_log, shard_config, spec, wait};

/// The shard that accepts.
const DOOR: usize = 0;
/// The shard of volume 1.
const HOME: usize = 1;
const ONE: VolumeNumber = VolumeNumber(1);

struct Group {
    directory: PathBuf,
    shards: Arc<Shards>,
    threads: Vec<JoinHandle<()>>,
}

/// Holds up a shard, until this is dropped.
struct Hold {
    _release: Sender<()>,
    _client: TcpStream,
}

impl Group {
    /// Two shards with a volume on each, which have the number of their shard; the first one accepts at `nbd.sock`.
    fn start(directory: &Path, change: impl Fn(&mut ShardConfig)) -> Self {
        Self::start_of(2, directory, change)
    }

    /// More shards, the others with no volume.
    fn start_of(count: usize, directory: &Path, change: impl Fn(&mut ShardConfig)) -> Self {
        let configs = (0..count).map(|number| ShardConfig {
            number,
            ..shard_config()
        });
        let mut configs: Vec<_> = configs.collect();
        let volumes = Share::of_shards(u64::MAX, count);
        for config in &mut configs {
            config.volumes = Arc::clone(&volumes);
        }
        configs.iter_mut().for_each(change);
        let (shards, threads) = start_all(configs).unwrap();
        let group = Self {
            directory: directory.to_path_buf(),
            shards,
            threads,
        };
        let socket = UnixListener::bind(directory.join("nbd.sock")).unwrap();
        group.listen(DOOR, socket.into(), |_| ());
        for shard in [DOOR, HOME] {
            let mut spec = spec(directory, shard as u32, "");
            spec.shard = Some(shard);
            make_log(&spec);
            let opened = group.ask(|answer| Command::Open(Box::new(spec), answer));
            opened.map_err(|failure| failure.message).unwrap();
        }
        group
    }

    fn listen(
        &self,
        shard: usize,
        socket: std::os::fd::OwnedFd,
        at_each: impl Fn(usize) + Send + 'static,
    ) {
        let sessions = SessionFactory(Box::new(move |_| {
            at_each(shard);
            Box::new(NbdSession::new(NbdConfig::default()))
        }));
        self.ask_shard(shard, |answer| Command::Listen {
            socket,
            sessions,
            answer,
        })
        .unwrap();
    }

    fn ask<T, E>(&self, command: impl FnOnce(Answer<T, E>) -> Command) -> Result<T, E> {
        let (answer, mut receiver) = oneshot::channel();
        self.shards.send(command(answer)).unwrap();
        wait(&mut receiver)
    }

    fn begin_on<T, E>(
        &self,
        shard: usize,
        command: impl FnOnce(Answer<T, E>) -> Command,
    ) -> oneshot::Receiver<Result<T, E>> {
        let (answer, receiver) = oneshot::channel();
        let (mut command, started) = (command(answer), Instant::now());
        while let Err(error) = self.shards.send_to(shard, command) {
            let SendError::Busy(refused) = error else {
                panic!("{error}");
            };
            assert!(started.elapsed() < PATIENCE, "still busy");
            command = *refused;
            std::thread::yield_now();
        }
        receiver
    }

    fn ask_shard<T, E>(
        &self,
        shard: usize,
        command: impl FnOnce(Answer<T, E>) -> Command,
    ) -> Result<T, E> {
        wait(&mut self.begin_on(shard, command))
    }

    fn report(&self, shard: usize) -> ShardReport {
        let (answer, receiver) = oneshot::channel();
        self.shards.send_to(shard, Command::Report(answer)).unwrap();
        *receiver.blocking_recv().unwrap()
    }

    /// Wait until so many connections are on a shard.
    fn until_connections(&self, shard: usize, count: usize) {
        let started = Instant::now();
        while self.report(shard).connections != count {
            assert!(started.elapsed() < PATIENCE, "never {count} connections");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn connect(&self, volume: u32) -> Client {
        Client::connect(&self.directory.join("nbd.sock"), &format!("v{volume}"))
    }

    /// A socket, the greeting read.
    fn greeted(&self) -> UnixStream {
        let mut stream = UnixStream::connect(self.directory.join("nbd.sock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        stream
    }

    /// Hold up a shard in the midst of a turn: whatever it is sent waits.
    fn hold(&self, shard: usize) -> Hold {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let ((release, released), (held, is_held)) = (channel::<()>(), channel::<()>());
        let released: Receiver<()> = released;
        self.listen(shard, listener.into(), move |_| {
            let _ = held.send(());
            // Until the other end is dropped.
            let _ = released.recv();
        });
        let client = TcpStream::connect(address).unwrap();
        is_held.recv_timeout(PATIENCE).unwrap();
        Hold {
            _release: release,
            _client: client,
        }
    }

    fn begin_move(&self, volume: u32) -> oneshot::Receiver<Result<Departed, String>> {
        self.begin_move_within(volume, PATIENCE)
    }

    fn begin_move_within(
        &self,
        volume: u32,
        patience: Duration,
    ) -> oneshot::Receiver<Result<Departed, String>> {
        let volume = VolumeNumber(volume);
        let from = self.shards.shard_of(volume).unwrap();
        self.begin_on(from, |answer| Command::Depart {
            volume,
            patience: Nanos(patience.as_nanos() as u64),
            answer,
        })
    }

    /// Open a volume on a shard, where an opening goes on if there is one.
    fn open(&self, volume: u32, shard: usize, continues: Option<OpeningId>) -> Result<(), String> {
        let spec = VolumeSpec {
            shard: Some(shard),
            continues,
            ..spec(&self.directory, volume, "")
        };
        let opened = self.ask(|answer| Command::Open(Box::new(spec), answer));
        opened.map(drop).map_err(|failure| failure.message)
    }

    /// Move a volume, as the control plane does.
    fn move_volume(&self, volume: u32, to: usize) {
        let number = VolumeNumber(volume);
        let from = self.shards.shard_of(number).unwrap();
        let departed = wait(&mut self.begin_move(volume)).unwrap();
        self.open(volume, to, Some(departed.opening)).unwrap();
        self.follow(volume);
        assert_ne!(from, to);
    }

    /// Say on all shards that it is known where a volume is.
    fn follow(&self, volume: u32) {
        for shard in 0..self.shards.count() {
            let number = VolumeNumber(volume);
            self.ask_shard(shard, |answer| Command::Follow(number, answer))
                .unwrap();
        }
    }

    fn stop(self, destage: bool) {
        let answers: Vec<_> = (0..self.threads.len())
            .map(|shard| self.begin_on(shard, |answer| Command::Stop { destage, answer }))
            .collect();
        for mut answer in answers {
            wait(&mut answer).unwrap();
        }
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

/// What a client says that opens an export and does not wait for the answer.
fn hello(export: &str) -> Vec<u8> {
    let mut hello = Vec::new();
    hello.extend(3u32.to_be_bytes());
    hello.extend(b"IHAVEOPT");
    hello.extend(1u32.to_be_bytes());
    hello.extend((export.len() as u32).to_be_bytes());
    hello.extend(export.as_bytes());
    hello
}

fn request(command: u16, cookie: u64, offset: u64, bytes: u32) -> Vec<u8> {
    let mut request = Vec::new();
    request.extend(0x2560_9513u32.to_be_bytes());
    request.extend(0u16.to_be_bytes());
    request.extend(command.to_be_bytes());
    request.extend(cookie.to_be_bytes());
    request.extend(offset.to_be_bytes());
    request.extend(bytes.to_be_bytes());
    request
}

/// The node has ended a connection, whether or not it had read everything.
fn assert_ended(mut stream: impl Read) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
}

#[test]
fn clients_are_served_by_the_shard_of_their_volume() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let (mut here, mut there) = (group.connect(0), group.connect(1));
    for (seed, client) in [&mut here, &mut there].into_iter().enumerate() {
        let data = noise(seed as u64, 2 << 20);
        client.write(4096, &data).unwrap();
        client.flush().unwrap();
        assert!(client.read(4096, 2 << 20).unwrap() == data);
    }
    for shard in [DOOR, HOME] {
        let report = group.report(shard);
        assert_eq!((report.connections, report.volumes.len()), (1, 1));
        assert_eq!(report.volumes[0].connections, 1);
        assert!(report.volumes[0].stats.write_bytes >= 2 << 20);
    }
    drop(there);
    group.until_connections(HOME, 0);
    let held = |shard| group.report(shard).connections_used_bytes;
    assert_eq!(held(HOME), 0, "what has gone counts no more");
    drop(here);
    group.until_connections(DOOR, 0);
    assert_eq!(held(DOOR), 0);
    group.stop(true);
    let image = std::fs::read(directory.path().join("image1")).unwrap();
    assert!(image[4096..4096 + (2 << 20)] == noise(1, 2 << 20));
}

#[test]
fn what_follows_the_handshake_at_once_travels_with_the_connection() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    // Whole requests, the head of one, and a part of its data, all in one packet; the rest comes later.
    let data = noise(3, 64 << 10);
    let mut sent = hello("v1");
    sent.extend(request(WRITE, 1, 0, 4096));
    sent.extend(&data[..4096]);
    sent.extend(request(READ, 2, 1 << 20, 512));
    sent.extend(request(WRITE, 3, 8192, data.len() as u32));
    sent.extend(&data[..1000]);
    let mut stream = group.greeted();
    stream.write_all(&sent).unwrap();
    let mut answer = [0; 10];
    stream.read_exact(&mut answer).unwrap();
    let (mut seen, mut reply) = (Vec::new(), [0; 16]);
    for _ in 0..2 {
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4], "no error");
        seen.push(u64::from_be_bytes(reply[8..].try_into().unwrap()));
        if seen.last() == Some(&2) {
            stream.read_exact(&mut [0; 512]).unwrap();
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [1, 2]);
    stream.write_all(&data[1000..]).unwrap();
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..], [&[0; 4][..], &3u64.to_be_bytes()].concat());
    let mut other = group.connect(1);
    assert_eq!(other.read(0, 4096).unwrap(), data[..4096]);
    assert!(other.read(8192, data.len()).unwrap() == data);
    assert_eq!(group.report(DOOR).volumes[0].stats.dirty_bytes, 0);
    group.stop(false);
}

#[test]
fn connection_whose_volume_is_closed_while_it_travels_ends_and_gives_its_place_back() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |config| config.connections.count_max = 1);
    let hold = group.hold(HOME);
    // It gets to the shard after the command, having opened the volume before that is carried out.
    let mut closed = group.begin_on(HOME, |answer| Command::Close {
        volume: ONE,
        destage: false,
        answer,
    });
    let client = group.connect(1);
    group.until_connections(DOOR, 0);
    drop(hold);
    wait(&mut closed).unwrap();
    assert_ended(client.stream);
    // There is one place: so it is free again.
    let mut other = group.connect(0);
    other.write(0, &noise(1, 4096)).unwrap();
    group.stop(false);
}

#[test]
fn connection_does_not_go_on_in_another_opening_of_its_volume() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let hold = group.hold(HOME);
    let mut closed = group.begin_on(HOME, |answer| Command::Close {
        volume: ONE,
        destage: false,
        answer,
    });
    let client = group.connect(1);
    group.until_connections(DOOR, 0);
    drop(hold);
    wait(&mut closed).unwrap();
    assert_ended(client.stream);
    let mut again = spec(directory.path(), 1, "");
    again.shard = Some(DOOR);
    let opened = group.ask(|answer| Command::Open(Box::new(again), answer));
    opened.map_err(|failure| failure.message).unwrap();
    let mut client = group.connect(1);
    client.write(0, &noise(1, 4096)).unwrap();
    assert_eq!(group.report(DOOR).volumes.len(), 2);
    group.stop(false);
}

#[test]
fn connection_that_loses_its_right_while_it_travels_ends() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    group.listen(DOOR, listener.into(), |_| ());
    let hold = group.hold(HOME);
    let somebody = Allow::parse(["dns:somebody"]).unwrap();
    assert!(!somebody.lets_in(&Peer::Unnamed));
    let mut set = group.begin_on(HOME, |answer| Command::SetAllow(ONE, somebody, answer));
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&hello("v1")).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    group.until_connections(DOOR, 0);
    drop(hold);
    wait(&mut set).unwrap();
    assert_ended(stream);
    group.stop(false);
}

#[test]
fn connection_waits_for_a_shard_that_takes_nothing_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let hold = group.hold(HOME);
    let mut answers = Vec::new();
    loop {
        let (answer, receiver) = oneshot::channel();
        match group.shards.send_to(HOME, Command::Report(answer)) {
            Ok(()) => answers.push(receiver),
            Err(SendError::Busy(_)) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let mut client = group.connect(1);
    client.send(WRITE, 0, 4096, &noise(1, 4096)).unwrap();
    // It tries again and again, at its pace.
    let before = group.report(DOOR).counts.shard.turns;
    std::thread::sleep(Duration::from_millis(100));
    let after = group.report(DOOR);
    assert_eq!(after.connections, 1);
    assert!(after.counts.shard.turns - before < 100, "no busy loop");
    drop(hold);
    assert_eq!(client.reply().unwrap().1, 0);
    assert_eq!(client.read(0, 4096).unwrap(), noise(1, 4096));
    group.until_connections(DOOR, 0);
    group.stop(false);
}

#[test]
fn connection_that_no_shard_takes_in_time_ends() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |config| {
        config.connections.stall_max = hdcs_core::base::io::Nanos::from_millis(50);
    });
    let hold = group.hold(HOME);
    let mut answers = Vec::new();
    loop {
        let (answer, receiver) = oneshot::channel();
        if group.shards.send_to(HOME, Command::Report(answer)).is_err() {
            break;
        }
        answers.push(receiver);
    }
    let client = group.connect(1);
    assert_ended(client.stream);
    group.until_connections(DOOR, 0);
    drop(hold);
    group.stop(false);
}

#[test]
fn connection_that_comes_to_a_shard_that_stops_ends() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let hold = group.hold(HOME);
    let mut stopped = group.begin_on(HOME, |answer| Command::Stop {
        destage: false,
        answer,
    });
    let client = group.connect(1);
    group.until_connections(DOOR, 0);
    drop(hold);
    assert_ended(client.stream);
    wait(&mut stopped).unwrap();
    let destage = false;
    group
        .ask_shard(DOOR, |answer| Command::Stop { destage, answer })
        .unwrap();
    for thread in group.threads {
        thread.join().unwrap();
    }
}

#[test]
fn connection_that_finds_no_memory_on_its_shard_ends() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |config| {
        if config.number == HOME {
            config.connections.heap_bytes = 0;
        }
    });
    assert_ended(group.connect(1).stream);
    group.until_connections(HOME, 0);
    let mut other = group.connect(0);
    other.write(0, &noise(1, 4096)).unwrap();
    group.stop(false);
}

#[test]
fn volume_moves_to_and_fro_and_its_clients_notice_nothing() {
    const MOVES: usize = 12;
    const BLOCKS: u64 = 64;
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let done = AtomicBool::new(false);
    let written: u64 = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4u64)
            .map(|client| {
                let (group, done) = (&group, &done);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(client);
                    let mut nbd = group.connect(1);
                    let place = |block: u64| (client * BLOCKS + block) * 65_536;
                    let mut content = vec![0; BLOCKS as usize];
                    let mut count = 0;
                    while !done.load(Ordering::Relaxed) {
                        // Many at once, of several sizes, so that a move meets them half way.
                        let blocks: Vec<u64> = (0..8).map(|_| random.u64(..BLOCKS)).collect();
                        for &block in &blocks {
                            count += 1;
                            content[block as usize] = count;
                            let bytes = [512, 4096, 65_536][block as usize % 3];
                            let data = noise(count, bytes);
                            nbd.send(WRITE, place(block), bytes as u32, &data).unwrap();
                        }
                        for _ in &blocks {
                            assert_eq!(nbd.reply().unwrap().1, 0);
                        }
                        for _ in 0..4 {
                            let block = random.u64(..BLOCKS);
                            let bytes = [512, 4096, 65_536][block as usize % 3];
                            let data = nbd.read(place(block), bytes).unwrap();
                            match content[block as usize] {
                                0 => assert!(data.iter().all(|&byte| byte == 0)),
                                seed => assert!(data == noise(seed, bytes), "block {block}"),
                            }
                        }
                    }
                    count
                })
            })
            .collect();
        // Whoever comes while it moves would be told that it is not open.
        group.until_connections(HOME, 4);
        for number in 0..MOVES {
            let to = if number % 2 == 0 { DOOR } else { HOME };
            group.move_volume(1, to);
            assert_eq!(group.shards.shard_of(ONE), Some(to));
            group.until_connections(to, 4);
        }
        done.store(true, Ordering::Relaxed);
        clients.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert!(written > 0);
    group.until_connections(HOME, 0);
    for shard in [DOOR, HOME] {
        assert_eq!(group.report(shard).connections_used_bytes, 0);
    }
    group.stop(true);
}

#[test]
fn volume_that_comes_back_finds_nothing_old_in_the_cache() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let mut client = group.connect(1);
    client.write(0, &noise(1, 65_536)).unwrap();
    // Clean and read: so it is in the DRAM tier of this shard.
    group
        .ask(|answer| Command::DestageAll(ONE, answer))
        .unwrap();
    let started = Instant::now();
    while group.report(HOME).volumes[0].stats.dirty_bytes > 0 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    for _ in 0..4 {
        assert!(client.read(0, 65_536).unwrap() == noise(1, 65_536));
    }
    assert!(group.report(HOME).cache.dram_used_blocks > 0);
    group.move_volume(1, DOOR);
    client.write(0, &noise(2, 65_536)).unwrap();
    group
        .ask(|answer| Command::DestageAll(ONE, answer))
        .unwrap();
    let dirty = || group.report(DOOR).volumes[1].stats.dirty_bytes;
    let started = Instant::now();
    while dirty() > 0 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    group.move_volume(1, HOME);
    assert!(client.read(0, 65_536).unwrap() == noise(2, 65_536));
    group.stop(false);
}

#[test]
fn move_is_given_up_for_requests_that_do_not_end() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let slow = VolumeSpec {
        shard: Some(HOME),
        ..spec(directory.path(), 2, "?delay_us=1000000")
    };
    make_log(&slow);
    let opened = group.ask(|answer| Command::Open(Box::new(slow), answer));
    opened.map_err(|failure| failure.message).unwrap();
    let mut client = group.connect(2);
    client.send(READ, 1 << 20, 4096, &[]).unwrap();
    let started = Instant::now();
    while group.report(HOME).counts.shard.receives == 0 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    let why = wait(&mut group.begin_move_within(2, Duration::from_millis(20)));
    assert!(why.unwrap_err().contains("did not end in time"));
    assert_eq!(client.reply().unwrap().1, 0);
    client.stream.read_exact(&mut [0; 4096]).unwrap();
    client.write(0, &noise(1, 512)).unwrap();
    let mut other = group.connect(2);
    other.write(4096, &noise(2, 512)).unwrap();
    group.stop(false);
}

#[test]
fn volume_that_cannot_be_opened_elsewhere_ends_its_connections() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let mut client = group.connect(1);
    client.write(0, &noise(1, 4096)).unwrap();
    wait(&mut group.begin_move(1)).unwrap();
    client.send(READ, 0, 4096, &[]).unwrap();
    let log = directory.path().join("log1");
    std::fs::rename(&log, directory.path().join("away")).unwrap();
    assert!(group.open(1, DOOR, None).is_err());
    group.follow(1);
    assert_ended(client.stream);
    group.until_connections(HOME, 0);
    // What was acknowledged is in the log.
    std::fs::rename(directory.path().join("away"), &log).unwrap();
    group.open(1, DOOR, None).unwrap();
    let mut client = group.connect(1);
    assert_eq!(client.read(0, 4096).unwrap(), noise(1, 4096));
    group.stop(false);
}

#[test]
fn stop_ends_connections_whose_volume_is_between_two_shards() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let client = group.connect(1);
    group.until_connections(HOME, 1);
    wait(&mut group.begin_move(1)).unwrap();
    assert_eq!(group.report(HOME).connections, 1, "it waits");
    group.stop(false);
    assert_ended(client.stream);
}

#[test]
fn clients_that_are_handed_over_leave_room_for_commands() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let hold = group.hold(HOME);
    let clients: Vec<_> = (0..300)
        .map(|_| {
            let mut stream = group.greeted();
            stream.write_all(&hello("v1")).unwrap();
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    let sent = group.shards.send_to(HOME, Command::EndRevoked);
    drop(hold);
    sent.expect("clients fill half of the queue at most");
    drop(clients);
    group.stop(false);
}

#[test]
fn memory_goes_along_with_a_volume_and_is_free_once_it_is_said_to_be_closed() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start(directory.path(), |_| ());
    let needs = Needs {
        bytes: BYTES,
        log_bytes: LOG_BYTES,
        home_bytes: None,
        kind: Kind::File,
        encrypted: false,
        compressed: false,
    };
    // For one such volume.
    let share = Share::new(needs.share_bytes());
    let with = |shard, memory, continues| VolumeSpec {
        shard: Some(shard),
        continues,
        memory,
        ..spec(directory.path(), 2, "")
    };
    let reserve = || Arc::new(needs.reserve(&share, 0).expect("nobody else has it"));
    make_log(&with(HOME, reserve(), None));
    let needed = reserve().parts();
    for _ in 0..20 {
        let open = |spec| {
            let opened = group.ask(|answer| Command::Open(Box::new(spec), answer));
            opened.map_err(|failure| failure.message).unwrap();
        };
        open(with(HOME, reserve(), None));
        let departed = wait(&mut group.begin_move(2)).unwrap();
        assert_eq!(share.held(), needed, "neither twice nor not at all");
        assert_eq!(group.shards.shard_of(VolumeNumber(2)), None);
        let memory = departed.memory.expect("nothing of it is in use");
        open(with(DOOR, memory, Some(departed.opening)));
        assert_eq!(share.held(), needed);
        group
            .ask(|answer| Command::Close {
                volume: VolumeNumber(2),
                destage: false,
                answer,
            })
            .unwrap();
    }
    group.stop(false);
}

/// A shard that has neither volume.
const OTHER: usize = 2;

#[test]
fn connection_that_arrives_at_the_shard_before_the_last_one_waits_there() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start_of(3, directory.path(), |_| ());
    let mut client = group.connect(1);
    group.until_connections(HOME, 1);
    let departed = wait(&mut group.begin_move(1)).unwrap();
    group.open(1, OTHER, Some(departed.opening)).unwrap();
    // It follows, and arrives where the volume has been, which is on its way already.
    let hold = group.hold(OTHER);
    let mut moved = group.begin_move(1);
    group
        .ask_shard(HOME, |answer| Command::Follow(ONE, answer))
        .unwrap();
    group.until_connections(HOME, 0);
    drop(hold);
    let departed = wait(&mut moved).unwrap();
    group.open(1, DOOR, Some(departed.opening)).unwrap();
    group.follow(1);
    client.write(0, &noise(2, 4096)).unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), noise(2, 4096));
    group.stop(false);
}

#[test]
fn client_that_comes_while_its_volume_moves_waits_and_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::start_of(3, directory.path(), |_| ());
    let departed = wait(&mut group.begin_move(1)).unwrap();
    let mut stream = group.greeted();
    let mut sent = hello("v1");
    sent.extend(request(READ, 7, 0, 512));
    stream.write_all(&sent).unwrap();
    // Whatever it does, the handshake goes no further before the volume is there.
    group.until_connections(DOOR, 1);
    for _ in 0..10 {
        group.report(DOOR);
    }
    assert_eq!(group.report(DOOR).connections, 1);
    group.open(1, OTHER, Some(departed.opening)).unwrap();
    group.follow(1);
    stream.read_exact(&mut [0; 10]).unwrap();
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..], [&[0; 4][..], &7u64.to_be_bytes()].concat());
    // One that moves to nowhere is not there.
    let departed = wait(&mut group.begin_move(1)).unwrap();
    let mut waits = group.greeted();
    waits.write_all(&hello("v1")).unwrap();
    group.until_connections(DOOR, 1);
    drop(departed);
    group.follow(1);
    assert_ended(waits);
    assert_ended(stream);
    group.stop(false);
}
