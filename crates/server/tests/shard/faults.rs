//! What faults of devices and backends lead to.

use hdcs_core::base::io::Nanos;
use hdcs_core::volume::{Phase, State, Trouble, Volume, WhenFull};
use hdcs_device::DeviceRegion;
use hdcs_device::create::{create_region, zero_region};
use hdcs_device::file::Device;
use hdcs_frontend::VolumeNumber;
use hdcs_server::data_dir::dirty::Left;
use hdcs_server::shard::command::{Command, VolumeSpec};

use crate::client::{self, Client, noise};
use crate::disk::{FaultyDisk, Loop, SmallFs};
use crate::node::{BYTES, LOG_BYTES, Node, PATIENCE, make_log, spec, wait};

const ONE: VolumeNumber = VolumeNumber(1);

/// A backend with a switch; the options, and the file that switches it on.
fn switch(directory: &std::path::Path, kind: &str) -> (String, std::path::PathBuf) {
    let file = directory.join("switch");
    let options = format!("?error_file={}&error_kind={kind}", file.display());
    (options, file)
}

#[test]
fn backend_error_keeps_writes_in_the_log_and_passes() {
    let directory = tempfile::tempdir().unwrap();
    let (options, file) = switch(directory.path(), "eio");
    let node = Node::with_volume(directory.path(), &options);
    let mut client = node.connect(1);
    std::fs::write(&file, "").unwrap();
    client.write(0, &noise(1, 1 << 20)).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    node.until("degraded", |report| report.state == State::Degraded);
    assert!(
        client.read(32 << 20, 4096).is_err(),
        "only the backend has it"
    );
    assert_eq!(client.read(0, 4096).unwrap(), noise(1, 1 << 20)[..4096]);
    client.write(4096, &noise(2, 4096)).unwrap();
    std::fs::remove_file(&file).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    let report = node.until("clean", |report| report.stats.dirty_bytes == 0);
    assert_eq!(report.state, State::Healthy);
    assert!(report.stats.backend_errors > 0);
    node.stop(true);
    let image = std::fs::read(directory.path().join("image1")).unwrap();
    assert_eq!(image[4096..8192], noise(2, 4096));
}

#[test]
fn backend_that_hangs_holds_up_only_what_needs_it() {
    let directory = tempfile::tempdir().unwrap();
    let (options, file) = switch(directory.path(), "hang");
    let node = Node::with_volume(directory.path(), &options);
    std::fs::write(&file, "").unwrap();
    let mut stuck = node.connect(1);
    let cookie = stuck.send(client::READ, 32 << 20, 4096, &[]).unwrap();
    let mut client = node.connect(1);
    client.write(0, &noise(1, 8192)).unwrap();
    assert_eq!(client.read(0, 8192).unwrap(), noise(1, 8192));
    // What hung goes on when the switch is off.
    std::fs::remove_file(&file).unwrap();
    assert_eq!(stuck.reply().unwrap(), (cookie, 0));
    node.stop(false);
}

#[test]
fn full_log_over_a_dead_backend_fails_writes_if_the_volume_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let (options, file) = switch(directory.path(), "enospc");
    let mut new = spec(directory.path(), 1, &options);
    new.config.when_full = WhenFull::Error;
    make_log(&new);
    let node = Node::start(directory.path());
    node.open(new).unwrap();
    std::fs::write(&file, "").unwrap();
    let mut client = node.connect(1);
    let refused = (0..2 * LOG_BYTES / (1 << 20))
        .find_map(|at| client.write((at % 64) << 20, &noise(at, 1 << 20)).err());
    assert_eq!(refused.unwrap().raw_os_error(), Some(libc::ENOSPC));
    std::fs::remove_file(&file).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    node.until("clean", |report| report.stats.dirty_bytes == 0);
    client.write(0, &noise(99, 1 << 20)).unwrap();
    node.stop(false);
}

/// A volume whose log lies on such a disk, in the middle: what is before it is somebody else's.
fn spec_on(directory: &std::path::Path, disk: &FaultyDisk) -> VolumeSpec {
    let mut on_disk = spec(directory, 1, "");
    on_disk.log.path = disk.path();
    on_disk.log.offset = 8 << 20;
    zero_region(&on_disk.log, &mut |_| ()).unwrap();
    let device = std::fs::OpenOptions::new()
        .write(true)
        .open(disk.path())
        .unwrap();
    let superblock = Volume::format_log(&on_disk.config, 5);
    std::os::unix::fs::FileExt::write_all_at(&device, &superblock, on_disk.log.offset).unwrap();
    device.sync_all().unwrap();
    on_disk
}

#[test]
fn log_device_that_hangs_holds_up_no_close_and_no_opening_comes_before_its_answer() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new(directory.path(), 64 << 20);
    let mut on_disk = spec_on(directory.path(), &disk);
    on_disk.config.log_answer_max = Nanos::from_millis(200);
    let node = Node::start(directory.path());
    node.open(on_disk.clone()).unwrap();
    let mut client = node.connect(1);
    client.write(0, &noise(1, 4096)).unwrap();
    disk.hang(true);
    client
        .send(client::WRITE, 0, 4096, &noise(2, 4096))
        .unwrap();
    let silent = node.until("degraded", |report| report.state == State::Degraded);
    assert!(matches!(silent.trouble, Some((Trouble::LogSilent, _))));
    node.close(1, true).unwrap();
    let refused = node.open(on_disk.clone()).unwrap_err();
    assert!(refused.contains("has not answered"), "{refused}");
    // Another volume has nothing to do with it.
    let other = spec(directory.path(), 2, "");
    make_log(&other);
    node.open(other).unwrap();
    node.connect(2).write(0, &noise(3, 4096)).unwrap();
    disk.hang(false);
    let started = std::time::Instant::now();
    while let Err(refused) = node.open(on_disk.clone()) {
        assert!(refused.contains("has not answered"), "{refused}");
        assert!(started.elapsed() < PATIENCE, "it answers now");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let mut client = node.connect(1);
    let found = client.read(0, 4096).unwrap();
    assert!(found == noise(1, 4096) || found == noise(2, 4096));
    client.write(0, &noise(4, 4096)).unwrap();
    node.stop(true);
}

#[test]
fn log_device_that_hangs_holds_up_no_stop() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new(directory.path(), 64 << 20);
    let mut on_disk = spec_on(directory.path(), &disk);
    on_disk.config.log_answer_max = Nanos::from_millis(200);
    let node = Node::start(directory.path());
    node.open(on_disk).unwrap();
    let mut client = node.connect(1);
    disk.hang(true);
    client
        .send(client::WRITE, 0, 4096, &noise(2, 4096))
        .unwrap();
    node.until("degraded", |report| report.state == State::Degraded);
    let destage = true;
    let closed = node
        .ask(|answer| Command::Stop { destage, answer })
        .unwrap();
    assert!(closed.iter().all(|one| one.log_failed));
    disk.hang(false);
}

#[test]
fn log_device_error_makes_the_volume_read_only_until_reopened() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new(directory.path(), 64 << 20);
    let on_disk = spec_on(directory.path(), &disk);
    let node = Node::start(directory.path());
    node.open(on_disk.clone()).unwrap();
    let mut client = node.connect(1);
    client.write(0, &noise(1, 8192)).unwrap();
    disk.fail(true);
    assert!(client.write(4096, &noise(2, 4096)).is_err());
    node.until("read-only", |report| report.state == State::ReadOnly);
    assert!(client.write(8192, &noise(3, 4096)).is_err());
    assert_eq!(client.read(0, 4096).unwrap(), noise(1, 8192)[..4096]);
    disk.fail(false);
    node.close(1, false).unwrap();
    node.open(on_disk).unwrap();
    let mut client = node.connect(1);
    assert_eq!(client.read(0, 4096).unwrap(), noise(1, 8192)[..4096]);
    let second = client.read(4096, 4096).unwrap();
    // A write that failed may or may not be there; nothing else may.
    assert!(second == noise(1, 8192)[4096..] || second == noise(2, 4096));
    client.write(4096, &noise(4, 4096)).unwrap();
    assert_eq!(node.volume().phase, Phase::Open);
    node.stop(true);
}

#[test]
fn backend_on_a_full_file_system_degrades_until_there_is_room() {
    let directory = tempfile::tempdir().unwrap();
    let small = SmallFs::new(directory.path(), 8 << 20);
    let mut new = spec(directory.path(), 1, "");
    new.backend = format!("file:{}/image", small.0.display());
    make_log(&new);
    let node = Node::start(directory.path());
    node.open(new).unwrap();
    let ballast = small.0.join("ballast");
    std::fs::write(&ballast, vec![1; 6 << 20]).unwrap();
    let mut client = node.connect(1);
    client.write(0, &noise(1, 4 << 20)).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    node.until("degraded", |report| report.state == State::Degraded);
    assert!(client.read(0, 4 << 20).unwrap() == noise(1, 4 << 20));
    std::fs::remove_file(ballast).unwrap();
    node.ask(|answer| Command::DestageAll(ONE, answer)).unwrap();
    node.until("clean", |report| report.stats.dirty_bytes == 0);
    node.stop(true);
    let image = std::fs::read(small.0.join("image")).unwrap();
    assert!(image[..4 << 20] == noise(1, 4 << 20));
}

#[test]
fn region_that_does_not_fit_is_refused_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let small = SmallFs::new(directory.path(), 4 << 20);
    let path = small.0.join("log");
    let error = create_region(&path, LOG_BYTES, &mut |_| ()).unwrap_err();
    assert!(
        error.to_string().contains("no space for 16777216 bytes"),
        "{error}"
    );
    assert!(!path.exists());
    let mut last = 0;
    create_region(&path, 2 << 20, &mut |done| last = done).unwrap();
    assert_eq!(last, 2 << 20);
    let again = create_region(&path, 4096, &mut |_| ()).unwrap_err();
    assert!(again.to_string().contains("exists already"), "{again}");
}

#[test]
fn region_is_open_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    create_region(&path, 64 << 10, &mut |_| ()).unwrap();
    let region = |offset| DeviceRegion {
        path: path.clone(),
        offset,
        bytes: 32 << 10,
    };
    let first = Device::open(&region(0), None).unwrap();
    let error = Device::open(&region(16 << 10), None).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    let beside = Device::open(&region(32 << 10), None).unwrap();
    drop((first, beside));
    Device::open(&region(16 << 10), None).unwrap();
}

#[test]
fn volume_lives_on_block_devices_of_either_sector_size() {
    for sector in [512, 4096] {
        let directory = tempfile::tempdir().unwrap();
        let (disk, cache) = (directory.path().join("a"), directory.path().join("b"));
        for (file, bytes) in [(&disk, BYTES + (1 << 20)), (&cache, 20 << 20)] {
            std::fs::File::create(file).unwrap().set_len(bytes).unwrap();
        }
        let (disk, log) = (Loop::over(&disk, sector), Loop::over(&cache, sector));
        let mut on_disks = spec(directory.path(), 1, "");
        on_disks.backend = format!("file:{}", disk.0.display());
        on_disks.log.path.clone_from(&log.0);
        let device = std::fs::OpenOptions::new()
            .write(true)
            .open(&log.0)
            .unwrap();
        let superblock = Volume::format_log(&on_disks.config, 5);
        std::os::unix::fs::FileExt::write_all_at(&device, &superblock, 0).unwrap();
        device.sync_all().unwrap();
        drop(device);
        let node = Node::start(directory.path());
        node.open(on_disks).unwrap();
        let mut client = node.connect(1);
        client.write(512, &noise(1, 512)).unwrap();
        client.write(8192, &noise(2, 8192)).unwrap();
        client.trim(8192, 512).unwrap();
        client.zero(12288, 1024).unwrap();
        client.flush().unwrap();
        node.stop(true);
        let mut found = vec![0; 16384];
        let device = std::fs::File::open(&disk.0).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&device, &mut found, 0).unwrap();
        let mut expected = vec![0; 16384];
        expected[512..1024].copy_from_slice(&noise(1, 512));
        expected[8192..].copy_from_slice(&noise(2, 8192));
        expected[8192..8704].fill(0);
        expected[12288..13312].fill(0);
        assert!(found == expected, "sectors of {sector}");
    }
}

#[test]
fn stop_of_a_node_without_volumes_waits_for_nothing() {
    let directory = tempfile::tempdir().unwrap();
    Node::start(directory.path()).stop(true);
}

#[test]
fn stop_asked_twice_is_content_with_less() {
    let directory = tempfile::tempdir().unwrap();
    let (options, file) = switch(directory.path(), "eio");
    let node = Node::with_volume(directory.path(), &options);
    let mut client = node.connect(1);
    client.write(0, &noise(1, 4096)).unwrap();
    drop(client);
    std::fs::write(&file, "").unwrap();
    let mut first = node.begin(|answer| Command::Stop {
        destage: true,
        answer,
    });
    node.stop(false);
    wait(&mut first).unwrap();
    std::fs::remove_file(&file).unwrap();
    let node = Node::start(directory.path());
    node.open(spec(directory.path(), 1, "")).unwrap();
    assert_eq!(node.connect(1).read(0, 4096).unwrap(), noise(1, 4096));
    node.stop(false);
}

#[test]
fn stop_gives_up_on_a_backend_that_hangs_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let (options, file) = switch(directory.path(), "hang");
    let node = Node::with_volume(directory.path(), &options);
    let mut client = node.connect(1);
    client.write(0, &noise(1, 4096)).unwrap();
    std::fs::write(&file, "").unwrap();
    client.send(client::READ, 32 << 20, 4096, &[]).unwrap();
    let stopped = node.ask(|answer| Command::Stop {
        destage: false,
        answer,
    });
    assert!(stopped.unwrap_err().contains("v1"));
    drop(node);
    std::fs::remove_file(&file).unwrap();
    let node = Node::start(directory.path());
    node.open(spec(directory.path(), 1, "")).unwrap();
    assert_eq!(node.connect(1).read(0, 4096).unwrap(), noise(1, 4096));
    node.stop(false);
}

/// A volume in storage mode whose log is on this disk, with something dirty in it.
fn dirty_in_storage_mode(directory: &std::path::Path, disk: &FaultyDisk) -> (Node, Client) {
    let mut new = spec_on(directory, disk);
    new.config.log_answer_max = Nanos::from_millis(200);
    let home = directory.join("home1");
    let volume = uuid::Uuid::from_bytes(new.config.uuid);
    hdcs_backend::home::store::create(&home, volume, new.config.bytes, false, None).unwrap();
    new.home = Some(home);
    let node = Node::start(directory);
    node.open(new).unwrap();
    let mut client = node.connect(1);
    client.write(0, &noise(1, 8192)).unwrap();
    (node, client)
}

/// Close it, with what is dirty in the backend if that can be.
fn close(node: &Node) -> Left {
    let closed = node.ask(|answer| Command::Close {
        volume: ONE,
        destage: true,
        answer,
    });
    closed.unwrap().expect("its log is known")
}

#[test]
fn volume_in_storage_mode_closes_although_its_log_has_failed() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new(directory.path(), 64 << 20);
    let (node, mut client) = dirty_in_storage_mode(directory.path(), &disk);
    disk.fail(true);
    assert!(client.write(4096, &noise(2, 4096)).is_err());
    node.until("read-only", |report| report.state == State::ReadOnly);
    assert!(close(&node).all.dirty_bytes > 0, "the log has it");
    disk.fail(false);
    node.stop(false);
}

#[test]
fn volume_in_storage_mode_closes_in_a_resize_that_waits_for_a_log_that_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new(directory.path(), 64 << 20);
    let (node, _client) = dirty_in_storage_mode(directory.path(), &disk);
    disk.hang(true);
    let mut resized = node.begin(|answer| Command::Resize(ONE, BYTES / 2, answer));
    node.until("silent", |report| {
        matches!(report.trouble, Some((Trouble::LogSilent, _)))
    });
    assert!(close(&node).all.dirty_bytes > 0, "the log has it");
    assert!(wait(&mut resized).is_err(), "the volume was closed");
    disk.hang(false);
    node.stop(false);
}
