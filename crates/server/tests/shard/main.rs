//! The shard with real files, real sockets and real faults.

mod cache;
mod client;
mod disk;
mod faults;
mod gather;
mod group;
mod node;
mod several;

use std::io::{Read, Write};

use client::noise;
use hdcs_core::base::io::SectorRange;
use hdcs_core::volume::{Phase, State};
use hdcs_frontend::VolumeNumber;
use hdcs_frontend::nbd::{NbdConfig, NbdSession};
use hdcs_server::shard::command::{Command, Latencies, SessionFactory, Transport};
use node::{BYTES, Node, make_log, spec, wait};

const ONE: VolumeNumber = VolumeNumber(1);

#[test]
fn volume_keeps_what_was_written_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let mut client = node.connect(1);
    assert_eq!(client.bytes, BYTES);
    assert_eq!(client.read(0, 4096).unwrap(), vec![0; 4096]);
    let large = noise(1, 3 << 20);
    client.write(512, &large).unwrap();
    client.write(BYTES - 512, &noise(2, 512)).unwrap();
    client.zero(1024, 4096).unwrap();
    client.trim(1 << 20, 8192).unwrap();
    client.flush().unwrap();
    let mut expected = large;
    expected[512..512 + 4096].fill(0);
    expected[(1 << 20) - 512..(1 << 20) - 512 + 8192].fill(0);
    assert!(client.read(512, 3 << 20).unwrap() == expected);
    let report = node.volume();
    assert_eq!((report.phase, report.state), (Phase::Open, State::Healthy));
    assert_eq!(report.connections, 1);
    let count = |latencies: &Latencies| latencies.as_ref().map_or(0, |one| one.len());
    assert!(count(&report.write_latency) >= 4 && count(&report.read_latency) >= 2);
    assert_eq!(count(&report.flush_latency), 1);
    assert!(
        report.stats.dirty_bytes > 0,
        "nothing is old enough to be destaged"
    );
    node.stop(false);

    let node = Node::start(directory.path());
    node.open(spec(directory.path(), 1, "")).unwrap();
    assert!(node.volume().stats.replayed_entries > 0);
    let mut client = node.connect(1);
    assert!(client.read(512, 3 << 20).unwrap() == expected);
    assert_eq!(client.read(BYTES - 512, 512).unwrap(), noise(2, 512));
    node.stop(true);
    let image = std::fs::read(directory.path().join("image1")).unwrap();
    assert_eq!(image.len() as u64, BYTES);
    assert!(
        image[512..512 + (3 << 20)] == expected,
        "the image is the volume"
    );
    assert_eq!(image[BYTES as usize - 512..], noise(2, 512));
}

#[test]
fn open_says_what_is_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let node = Node::start(path);
    let refused = |spec| node.open(spec).unwrap_err();
    let good = spec(path, 1, "");
    assert!(refused(good.clone()).contains("cannot open"));
    make_log(&good);
    let mut wrong = good.clone();
    wrong.log.bytes += 4096;
    assert!(refused(wrong).contains("are needed"));
    let mut wrong = good.clone();
    wrong.log.offset = 512;
    assert!(refused(wrong).contains("multiples of 4096"));
    assert!(refused(spec(path, 1, "?delayus=1")).contains("did you mean `delay_us`"));
    let mut wrong = good.clone();
    wrong.backend = format!("file:{}", path.display());
    assert!(refused(wrong).contains("neither a regular file nor a block device"));
    let mut wrong = good.clone();
    wrong.config.uuid = [9; 16];
    assert!(refused(wrong).contains("another volume"));
    assert_eq!(node.report().volumes.len(), 0);

    node.open(good.clone()).unwrap();
    assert!(refused(good.clone()).contains("open already"));
    let mut other = spec(path, 2, "");
    other.backend.clone_from(&good.backend);
    make_log(&other);
    assert!(refused(other).contains("in use"), "an image has one volume");
    assert!(node.close(2, false).unwrap_err().contains("not open"));
    node.close(1, false).unwrap();
    assert_eq!(node.report().volumes.len(), 0);

    // An image that was there is missed, never replaced by an empty one.
    let image = path.join("image1");
    std::fs::rename(&image, path.join("away")).unwrap();
    assert!(refused(good.clone()).contains("does not exist"));
    assert!(!image.exists());
    std::fs::write(&image, [1; 512]).unwrap();
    assert!(refused(good.clone()).contains("holds 512 bytes"));
    std::fs::rename(path.join("away"), &image).unwrap();
    node.open(good).unwrap();
    node.stop(false);
}

#[test]
fn open_takes_a_new_volume_over_an_image_of_its_size_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let spec = spec(path, 1, "");
    make_log(&spec);
    let node = Node::start(path);
    std::fs::write(path.join("image1"), noise(1, 4096)).unwrap();
    let error = node.open(spec.clone()).unwrap_err();
    assert!(error.contains("--size 4096"), "{error}");
    let image = std::fs::OpenOptions::new()
        .write(true)
        .open(path.join("image1"))
        .unwrap();
    image.set_len(BYTES).unwrap();
    node.open(spec).unwrap();
    assert_eq!(node.connect(1).read(0, 4096).unwrap(), noise(1, 4096));
    node.stop(false);
}

#[test]
fn connection_that_talks_nonsense_ends_alone() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let mut good = node.connect(1);
    good.write(0, &noise(1, 4096)).unwrap();
    let mut bad = node.connect(1);
    bad.stream.write_all(&[0xAA; 100]).unwrap();
    let mut rest = Vec::new();
    // The node may close with bytes of ours unread, which shows as a reset.
    let _ = bad.stream.read_to_end(&mut rest);
    // One that goes away in the middle of a write.
    let mut gone = node.connect(1);
    gone.send(client::WRITE, 4096, 8192, &[1; 100]).unwrap();
    drop(gone);
    // One that asks for much and takes none of it.
    let mut silent = node.connect(1);
    for _ in 0..64 {
        silent.send(client::READ, 0, 1 << 20, &[]).unwrap();
    }
    assert_eq!(good.read(0, 4096).unwrap(), noise(1, 4096));
    good.write(4096, &noise(2, 4096)).unwrap();
    drop(silent);
    let started = std::time::Instant::now();
    while node.report().connections != 1 {
        assert!(
            started.elapsed() < node::PATIENCE,
            "connections never ended"
        );
    }
    assert_eq!(good.read(4096, 4096).unwrap(), noise(2, 4096));
    node.stop(false);
}

#[test]
fn connections_share_a_volume_at_depth() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let mut clients: Vec<_> = (0..4).map(|_| node.connect(1)).collect();
    for round in 0..4u64 {
        for (index, client) in clients.iter_mut().enumerate() {
            for at in 0..64u64 {
                let block = at * 4 + index as u64;
                let data = noise(block + round, 4096);
                client
                    .send(client::WRITE, block * 4096, 4096, &data)
                    .unwrap();
            }
        }
        for client in &mut clients {
            for _ in 0..64 {
                assert_eq!(client.reply().unwrap().1, 0);
            }
        }
    }
    for block in 0..256 {
        let data = clients[0].read(block * 4096, 4096).unwrap();
        assert!(data == noise(block + 3, 4096), "block {block}");
    }
    let report = node.volume();
    assert_eq!(report.stats.writes, 4 * 256);
    assert!(report.stats.log_spans <= report.stats.writes);
    assert_eq!(report.connections, 4);
    node.stop(false);
}

#[test]
fn resize_changes_volume_and_image() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let image = directory.path().join("image1");
    let mut client = node.connect(1);
    client.write(BYTES - 4096, &noise(1, 4096)).unwrap();
    client.write(0, &noise(2, 4096)).unwrap();
    let resize = |bytes| node.resize(bytes);
    assert!(resize(1000).unwrap_err().contains("multiple of 512"));
    assert!(resize(0).unwrap_err().contains("multiple of 512"));
    resize(2 * BYTES).unwrap();
    assert_eq!(image.metadata().unwrap().len(), 2 * BYTES);
    assert_eq!(node.volume().config.bytes, 2 * BYTES);
    // A client learns the size when it connects.
    let mut client = node.connect(1);
    assert_eq!(client.bytes, 2 * BYTES);
    client.write(2 * BYTES - 4096, &noise(3, 4096)).unwrap();
    assert_eq!(client.read(BYTES - 4096, 4096).unwrap(), noise(1, 4096));
    resize(BYTES / 2).unwrap();
    assert_eq!(image.metadata().unwrap().len(), BYTES / 2);
    assert!(client.read(BYTES - 4096, 4096).is_err(), "beyond the end");
    assert_eq!(client.read(0, 4096).unwrap(), noise(2, 4096));
    resize(BYTES).unwrap();
    assert_eq!(client.read(BYTES - 4096, 4096).unwrap(), vec![0; 4096]);
    client.write(BYTES - 4096, &noise(4, 4096)).unwrap();
    node.stop(true);
    let content = std::fs::read(image).unwrap();
    assert_eq!(content.len() as u64, BYTES);
    assert_eq!(content[BYTES as usize - 4096..], noise(4, 4096));
}

/// A node may be killed at any step of a growth. What a client was told that it has written is there afterwards, by
/// the size that was recorded.
#[test]
fn growth_that_is_interrupted_at_any_step_loses_nothing_that_was_written() {
    for step in 0..4 {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let node = Node::with_volume(path, "");
        let mut recorded = BYTES;
        node.connect(1)
            .write(BYTES - 4096, &noise(1, 4096))
            .unwrap();
        if step > 0 {
            node.ask(|answer| Command::Resize(ONE, 2 * BYTES, answer))
                .unwrap();
            assert_eq!(path.join("image1").metadata().unwrap().len(), 2 * BYTES);
            // Nobody can write there before it is recorded, however often he connects.
            assert_eq!(node.volume().config.bytes, BYTES);
            let mut client = node.connect(1);
            assert_eq!(client.bytes, BYTES);
            assert!(client.write(2 * BYTES - 4096, &noise(2, 4096)).is_err());
        }
        if step > 1 {
            recorded = 2 * BYTES;
        }
        if step > 2 {
            let wrong = node.ask(|answer| Command::Grow(ONE, 3 * BYTES, answer));
            assert!(wrong.unwrap_err().contains("another size"));
            node.ask(|answer| Command::Grow(ONE, recorded, answer))
                .unwrap();
            let mut client = node.connect(1);
            assert_eq!(client.bytes, recorded);
            client.write(recorded - 4096, &noise(3, 4096)).unwrap();
        }
        node.stop(false);
        let mut found = spec(path, 1, "");
        found.config.bytes = recorded;
        let node = Node::start(path);
        node.open(found).unwrap();
        let mut client = node.connect(1);
        assert_eq!(client.bytes, recorded, "step {step}");
        assert_eq!(client.read(BYTES - 4096, 4096).unwrap(), noise(1, 4096));
        if step > 2 {
            assert_eq!(client.read(recorded - 4096, 4096).unwrap(), noise(3, 4096));
        }
        // And it grows, wherever that ended before; who asks for the size that it has gets it.
        node.resize(2 * BYTES).unwrap();
        node.ask(|answer| Command::Resize(ONE, 2 * BYTES, answer))
            .unwrap();
        node.ask(|answer| Command::Grow(ONE, 2 * BYTES, answer))
            .unwrap();
        node.stop(true);
    }
}

/// A shrink that ended after it was recorded leaves what it was to cut off in the log and in the image.
#[test]
fn growing_ends_what_an_interrupted_shrink_has_left_in_log_and_image() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let node = Node::with_volume(path, "");
    let mut client = node.connect(1);
    client.write(0, &noise(1, 4096)).unwrap();
    client.write(BYTES - 8192, &noise(2, 8192)).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    node.until("destaged", |report| report.stats.dirty_bytes == 0);
    client.write(BYTES - 4096, &noise(3, 4096)).unwrap();
    node.stop(false);
    let mut cut = spec(path, 1, "");
    cut.config.bytes = BYTES / 2;
    let node = Node::start(path);
    node.open(cut).unwrap();
    assert!(node.volume().holds_cut);
    node.resize(BYTES).unwrap();
    let report = node.volume();
    assert!(!report.holds_cut && report.config.bytes == BYTES);
    let image = std::fs::read(path.join("image1")).unwrap();
    assert!(
        image.len() as u64 == BYTES && image[BYTES as usize / 2..].iter().all(|&byte| byte == 0)
    );
    let read = |node: &Node| node.connect(1).read(BYTES - 8192, 8192).unwrap();
    assert!(read(&node) == vec![0; 8192]);
    node.stop(false);
    let node = Node::start(path);
    node.open(spec(path, 1, "")).unwrap();
    assert!(read(&node) == vec![0; 8192]);
    assert_eq!(node.connect(1).read(0, 4096).unwrap(), noise(1, 4096));
    node.stop(false);
}

#[test]
fn promote_and_evict_move_a_range() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let mut client = node.connect(1);
    let content = noise(1, 4 << 20);
    client.write(0, &content).unwrap();
    node.close(1, true).unwrap();
    node.ask(|answer| Command::Forget(ONE, answer)).unwrap();
    node.open(spec(directory.path(), 1, "")).unwrap();
    let range = SectorRange::new(0, (4 << 20) / 512);
    node.ask(|answer| Command::Promote(ONE, range, answer))
        .unwrap();
    let used = node.report().cache.dram_used_blocks;
    assert!(used >= 1024, "{used} blocks in DRAM");
    let mut client = node.connect(1);
    assert!(client.read(0, 4 << 20).unwrap() == content);
    let stats = node.volume().stats;
    assert_eq!((stats.dram_hit_blocks, stats.miss_blocks), (1024, 0));
    node.ask(|answer| Command::Evict(ONE, range, answer))
        .unwrap();
    assert!(client.read(0, 4 << 20).unwrap() == content);
    assert!(node.volume().stats.miss_blocks > 0);
    let beyond = SectorRange::new(BYTES / 512 - 1, 2);
    let refused = node.ask(|answer| Command::Promote(ONE, beyond, answer));
    assert!(refused.unwrap_err().contains("beyond"));
    let forget = node.ask(|answer| Command::Forget(ONE, answer));
    assert!(forget.unwrap_err().contains("close it first"));
    node.stop(false);
}

#[test]
fn tcp_clients_are_served_like_local_ones() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (seen, peers) = std::sync::mpsc::channel();
    let sessions = SessionFactory(Box::new(move |transport| {
        seen.send(transport).unwrap();
        Box::new(NbdSession::new(NbdConfig::default()))
    }));
    node.ask(|answer| Command::Listen {
        socket: listener.into(),
        sessions,
        answer,
    })
    .unwrap();
    let mut client = std::net::TcpStream::connect(address).unwrap();
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    let peer = client.local_addr().unwrap();
    assert_eq!(peers.recv().unwrap(), Transport::Tcp { peer });
    node.stop(false);
    assert_eq!(client.read(&mut greeting).unwrap(), 0, "closed by the stop");
}

#[test]
fn destage_all_runs_beside_clients_and_can_be_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "?delay_us=20000");
    let mut client = node.connect(1);
    client.write(0, &noise(1, 4 << 20)).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    client.write(8 << 20, &noise(2, 4096)).unwrap();
    node.ask(|answer| Command::CancelDestageAll(ONE, answer))
        .unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), noise(1, 4096));
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    node.until("destaged", |report| report.stats.dirty_bytes == 0);
    node.stop(false);
}

#[test]
fn close_ends_its_connections_alone() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let two = spec(directory.path(), 2, "");
    make_log(&two);
    node.open(two).unwrap();
    let (mut first, mut second) = (node.connect(1), node.connect(2));
    first.write(0, &noise(1, 4096)).unwrap();
    second.write(0, &noise(2, 4096)).unwrap();
    node.close(1, true).unwrap();
    assert!(first.read(0, 4096).is_err());
    assert_eq!(second.read(0, 4096).unwrap(), noise(2, 4096));
    let image = std::fs::read(directory.path().join("image1")).unwrap();
    assert_eq!(image[..4096], noise(1, 4096));
    node.stop(false);
}

#[test]
fn stop_answers_what_is_in_flight_and_ends_idle_connections() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let mut idle = node.connect(1);
    let mut busy = node.connect(1);
    for block in 0..32u64 {
        busy.send(client::WRITE, block * 4096, 4096, &noise(block, 4096))
            .unwrap();
    }
    // The first answer shows that the requests have reached the shard.
    assert_eq!(busy.reply().unwrap().1, 0);
    let mut stopped = node.begin(|answer| Command::Stop {
        destage: false,
        answer,
    });
    let mut acknowledged = 1;
    while let Ok((_, error)) = busy.reply() {
        acknowledged += u64::from(error == 0);
    }
    let mut byte = [0];
    assert_eq!(idle.stream.read(&mut byte).unwrap(), 0, "closed, not reset");
    wait(&mut stopped).unwrap();
    drop(node);

    let node = Node::start(directory.path());
    node.open(spec(directory.path(), 1, "")).unwrap();
    let mut client = node.connect(1);
    let kept = (0..32)
        .filter(|&block| client.read(block * 4096, 4096).unwrap() == noise(block, 4096))
        .count();
    assert!(kept as u64 >= acknowledged, "{kept} kept of {acknowledged}");
    node.stop(false);
}
