//! Every format on disk, by one table: what each version of it has left opens, and what the next version leaves is
//! refused in one wording and not touched.
//!
//! A format that gets another version needs one thing here: its golden image of that version, beside the others. The
//! table goes from version 1 to the newest, so N-1 is tested from then on. A new format needs a row.
//!
//! Images of structures are in crates/core/tests/golden, where what is written is compared with them; those of a data
//! directory are in crates/server/tests/golden. `HDCS_UPDATE=1` writes the latter anew, for a reviewer to compare.

#![allow(clippy::duplicate_mod, reason = "two rigs have the same codec")]

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdcs_backend::crypt::Encryption;
use hdcs_backend::crypt::source::KeySource;
use hdcs_backend::home::store;
use hdcs_backend::memory::VolumeMemory;
use hdcs_core::base::io::{Nanos, SectorRange};
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_BYTES_MIN};
use hdcs_core::cache::heat_map::{Gathering, HEAT_VERSION, Heat};
use hdcs_core::cache::{Layout as CacheLayout, ReadCache, SsdFailure};
use hdcs_core::format::{
    CACHE_SUPERBLOCK_BLOCKS, CACHE_VERSION, LOG_MAGIC, LOG_VERSION, LogSuperblock, Membership, seal,
};
use hdcs_core::local::format::{HOME_VERSION, Layout as HomeLayout};
use hdcs_core::log::clients::{CLIENT_VERSION, ClientRecord, ClientRecordHeader};
use hdcs_core::objects::format::{Manifest, OBJECT_VERSION};
use hdcs_core::objects::{Access, Config};
use hdcs_core::volume::{Persist, Phase};
use hdcs_server::catalogue::{self, Entry, Found, LogPlace, PendingVolume};
use hdcs_server::data_dir::beside::{SCRUB, SCRUB_FILE};
use hdcs_server::data_dir::dirty::{DirtyRecord, RECORD_FILE};
use hdcs_server::data_dir::heat::HEAT_FILE;
use hdcs_server::data_dir::kept::{self, KEPT_FILE};
use hdcs_server::data_dir::key::{self, KEY_FILE};
use hdcs_server::data_dir::{DataDir, Layout, sealed};
use hdcs_server::inspect;
use uuid::Uuid;
use zerocopy::{FromBytes, IntoBytes};

/// What lies on a medium, by names.
type Medium = BTreeMap<String, Vec<u8>>;

/// What comes of opening what is on a medium.
type Open = dyn Fn(&mut Medium) -> Result<(), String>;

/// A format.
struct Format {
    name: &'static str,
    /// The newest version.
    version: u16,
    /// What a version has left.
    lay_out: Box<dyn Fn(u16) -> Medium>,
    /// Open that and look whether all is there; else what is said of it.
    open: Box<Open>,
    /// Make it what the next version leaves, with its checksums right.
    raise: Box<dyn Fn(&mut Medium)>,
}

fn formats() -> Vec<Format> {
    let mut formats = vec![log(), clients(), cache(), home(), objects()];
    formats.push(in_data_dir("node.json", 1, raise_json));
    for name in ["volume.json", KEY_FILE, RECORD_FILE, SCRUB_FILE] {
        formats.push(in_data_dir(name, 1, raise_json));
    }
    formats.push(in_data_dir(HEAT_FILE, HEAT_VERSION, |bytes| {
        raise_structure(bytes);
    }));
    formats.push(in_data_dir(KEPT_FILE, LOG_VERSION, |bytes| {
        raise_structure(bytes);
    }));
    formats
}

#[test]
fn formats_of_every_version_open() {
    for format in formats() {
        for version in 1..=format.version {
            let mut medium = (format.lay_out)(version);
            let opened = (format.open)(&mut medium);
            assert_eq!(opened, Ok(()), "{} of version {version}", format.name);
        }
    }
}

#[test]
fn formats_of_the_next_version_are_refused_and_left_as_they_are() {
    for format in formats() {
        let (name, known) = (format.name, format.version);
        let mut medium = (format.lay_out)(known);
        let before = medium.clone();
        (format.raise)(&mut medium);
        assert!(medium != before, "{name}: nothing was raised");
        let raised = medium.clone();
        let said = (format.open)(&mut medium).expect_err(name);
        let expected = format!(
            "made by a newer program (format {}, this program knows {known}): use that program",
            known + 1
        );
        assert!(said.contains(&expected), "{name}: {said}");
        assert!(medium == raised, "{name}: it was changed");
    }
}

/// One superblock of a newer program counts, whatever the other one is.
#[test]
fn formats_of_the_next_version_are_told_by_one_superblock() {
    for (format, places) in [
        (log(), log_superblocks()),
        (cache(), cache_superblocks()),
        (home(), vec![0, BLOCK_BYTES]),
    ] {
        for place in places {
            let mut medium = (format.lay_out)(format.version);
            let bytes = medium.values_mut().next().unwrap();
            if bytes[place..place + 8] == [0; 8] {
                // The first superblock of a new one is not written.
                continue;
            }
            raise_at(bytes, place);
            let raised = medium.clone();
            let said = (format.open)(&mut medium).expect_err(format.name);
            assert!(said.contains("made by a newer program"), "{said}");
            assert!(medium == raised, "{}: it was changed", format.name);
        }
    }
}

/// A version number that is damaged is damage, if the other superblock can be read.
#[test]
fn formats_with_a_damaged_version_number_are_not_newer() {
    for (format, place) in [
        (log(), LogSuperblock::offset_of(1) as usize),
        (home(), BLOCK_BYTES),
    ] {
        let mut medium = (format.lay_out)(format.version);
        let bytes = medium.values_mut().next().unwrap();
        bytes[place + 8] += 1;
        if let Err(said) = (format.open)(&mut medium) {
            assert!(!said.contains("newer program"), "{}: {said}", format.name);
        }
    }
}

fn core_golden(name: &str) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/tests/golden");
    fs::read(root.join(name)).expect(name)
}

/// Raise the version of the structure at a place, and seal it.
fn raise_at(bytes: &mut [u8], place: usize) {
    let block = &mut bytes[place..place + BLOCK_BYTES];
    assert!(block.starts_with(b"HDCS"), "a structure begins there");
    block[8] += 1;
    seal(block);
}

fn raise_structure(bytes: &mut [u8]) {
    bytes[8] += 1;
    seal(bytes);
}

fn raise_json(bytes: &mut Vec<u8>) {
    let text = String::from_utf8(bytes.clone()).unwrap();
    *bytes = text
        .replace("\"version\": 1", "\"version\": 2")
        .into_bytes();
}

fn log_superblocks() -> Vec<usize> {
    [0, 1]
        .map(|sequence| LogSuperblock::offset_of(sequence) as usize)
        .to_vec()
}

fn log() -> Format {
    Format {
        name: "log",
        version: LOG_VERSION,
        lay_out: Box::new(|version| {
            let mut log = vec![0; hdcs_kit::volume::World::new(Persist::OnWrite).log.len()];
            let golden = core_golden(&format!("log-v{version}.bin"));
            log[..golden.len()].copy_from_slice(&golden);
            BTreeMap::from([("log".to_owned(), log)])
        }),
        open: Box::new(|medium| {
            let mut world = hdcs_kit::volume::World::new(Persist::OnWrite);
            let log = medium.get_mut("log").unwrap();
            world.log.clone_from(log);
            world.try_reopen();
            log.clone_from(&world.log);
            match world.volume.phase() {
                Phase::Open => {
                    let data = world.read(SectorRange::new(8, 72));
                    assert_eq!([data[0], data[71 * 512]], [1, 3]);
                    Ok(())
                }
                Phase::Failed(error) => Err(error.to_string()),
                other => Err(format!("{other:?}")),
            }
        }),
        raise: Box::new(|medium| {
            for place in log_superblocks() {
                let log = medium.get_mut("log").unwrap();
                if log[place..].starts_with(&LOG_MAGIC) {
                    raise_at(log, place);
                }
            }
        }),
    }
}

const CACHE_REGION: usize = 16 << 20;

fn cache_superblocks() -> Vec<usize> {
    CACHE_SUPERBLOCK_BLOCKS
        .map(|block| block as usize * BLOCK_BYTES)
        .to_vec()
}

fn cache() -> Format {
    Format {
        name: "cache",
        version: CACHE_VERSION,
        lay_out: Box::new(|version| {
            let golden = core_golden(&format!("cache-v{version}.bin"));
            let layout = CacheLayout::new(CACHE_REGION as u64, hdcs_kit::cache::LINE_BLOCKS)
                .expect("a region of this size");
            let mut places = cache_superblocks();
            places.push(layout.journal_offset(1, 0) as usize);
            places.push(layout.footer_offset(0) as usize);
            let first = layout.segment_offset(0) as usize;
            places.extend((0..golden.len() / BLOCK_BYTES).map(|block| first + block * BLOCK_BYTES));
            let mut region = vec![0; CACHE_REGION];
            for (place, block) in places.into_iter().zip(golden.chunks(BLOCK_BYTES)) {
                region[place..place + BLOCK_BYTES].copy_from_slice(block);
            }
            BTreeMap::from([("cache".to_owned(), region)])
        }),
        open: Box::new(|medium| {
            let mut rig = hdcs_kit::cache::Rig::new(CACHE_REGION);
            let region = medium.get_mut("cache").unwrap();
            rig.medium.clone_from(region);
            let pool = Arc::clone(&rig.pool);
            rig.cache = ReadCache::new(rig.config.clone(), Nanos(0), pool, &mut rig.actions);
            rig.run();
            region.clone_from(&rig.medium);
            if rig.cache.stats().ssd_failure == Some(SsdFailure::Newer) {
                let file = tempfile::NamedTempFile::new().unwrap();
                fs::write(file.path(), &*region).unwrap();
                let why = inspect::cache_made_newer(file.path()).unwrap();
                return Err(why.expect("it looks at the same blocks").to_string());
            }
            let found = rig.read(3, 0, 0).map(|found| found.unwrap());
            found.map(drop).ok_or("a line is missing".to_owned())
        }),
        raise: Box::new(|medium| {
            for place in cache_superblocks() {
                raise_at(medium.get_mut("cache").unwrap(), place);
            }
        }),
    }
}

fn home() -> Format {
    Format {
        name: "home",
        version: HOME_VERSION,
        lay_out: Box::new(|version| {
            let golden = core_golden(&format!("home-v{version}.bin"));
            BTreeMap::from([(
                "home".to_owned(),
                hdcs_kit::home::unpacked(&golden, HomeLayout::PLAIN),
            )])
        }),
        open: Box::new(|medium| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let bytes = medium.get_mut("home").unwrap();
            fs::write(file.path(), &*bytes).unwrap();
            let (volume, size, log) = (
                hdcs_kit::home::UUID,
                hdcs_kit::home::BYTES,
                hdcs_kit::home::LOG,
            );
            let memory = VolumeMemory::unlimited(0);
            let opened = store::open(file.path(), volume, size, log, true, None, &memory);
            *bytes = fs::read(file.path()).unwrap();
            opened.map(drop).map_err(|error| error.to_string())
        }),
        raise: Box::new(|medium| {
            for place in [0, BLOCK_BYTES] {
                raise_at(medium.get_mut("home").unwrap(), place);
            }
        }),
    }
}

fn clients() -> Format {
    Format {
        name: "records of clients",
        version: CLIENT_VERSION,
        lay_out: Box::new(|version| {
            let golden = core_golden(&format!("clients-v{version}.bin"));
            let mut records = Medium::new();
            let mut rest = &golden[..];
            while let Ok((header, behind)) = ClientRecordHeader::ref_from_prefix(rest) {
                let bytes = header.result_bytes.get() + header.effect_bytes.get();
                let (record, next) = rest.split_at(rest.len() - behind.len() + bytes as usize);
                records.insert(format!("{}", header.kind), record.to_vec());
                rest = next;
            }
            assert_eq!((records.len(), rest.len()), (3, 0));
            records
        }),
        open: Box::new(|medium| {
            let parsed = medium
                .values()
                .map(|bytes| ClientRecord::parse(bytes).map(drop));
            (parsed.collect::<Result<(), _>>()).map_err(|error| error.to_string())
        }),
        raise: Box::new(|medium| {
            for bytes in medium.values_mut() {
                raise_structure(bytes);
            }
        }),
    }
}

const PARENT: &str = "bucket/parent/";

fn newest_manifest(medium: &mut Medium) -> &mut Vec<u8> {
    let manifests = medium.iter_mut();
    let mut manifests = manifests.filter(|(name, _)| name.contains("bucket/parent/manifest/"));
    manifests.next_back().expect("there is one").1
}

fn objects() -> Format {
    Format {
        name: "objects",
        version: OBJECT_VERSION,
        lay_out: Box::new(|version| {
            let golden = core_golden(&format!("objects-v{version}.bin"));
            let (mut medium, mut rest) = (Medium::new(), &golden[..]);
            let mut next = || {
                let (length, after) = rest.split_first_chunk()?;
                let (part, after) = after.split_at(u32::from_le_bytes(*length) as usize);
                rest = after;
                Some(part.to_vec())
            };
            while let (Some(name), Some(object)) = (next(), next()) {
                medium.insert(String::from_utf8(name).unwrap(), object);
            }
            medium
        }),
        open: Box::new(|medium| {
            let said = Manifest::parse(newest_manifest(medium)).map(drop);
            let objects = hdcs_kit::bucket::Objects::default();
            objects.borrow_mut().clone_from(medium);
            let config = Config {
                batch_blocks: 8,
                ..Config::new(Access::Existing, 5)
            };
            let opened = catch_unwind(AssertUnwindSafe(|| {
                hdcs_kit::bucket::Bucket::open(&objects, PARENT, config, "")
            }));
            medium.clone_from(&objects.borrow());
            assert_eq!(
                opened.is_ok(),
                said.is_ok(),
                "it opens if its manifest can be read"
            );
            said.map_err(|error| error.to_string())
        }),
        raise: Box::new(|medium| {
            let manifest = newest_manifest(medium);
            manifest[8] += 1;
            seal(manifest);
        }),
    }
}

/// Where the golden data directory of a version is.
fn golden_dir(version: u16) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/data-v{version}"))
}

/// What a version leaves: it has images of those files only that an earlier one writes otherwise.
fn golden_files(version: u16) -> Medium {
    (1..=version)
        .flat_map(|version| files(&golden_dir(version)))
        .collect()
}

/// The files of a data directory but those of its life: lock and log.
fn files(root: &Path) -> Medium {
    let mut medium = Medium::new();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        for item in fs::read_dir(root.join(&directory)).unwrap() {
            let item = item.unwrap();
            let path = directory.join(item.file_name());
            if item.path().is_dir() {
                directories.push(path);
            } else if !["lock", "log", "data"].contains(&&*item.file_name().to_string_lossy()) {
                let name = path.to_str().unwrap().to_owned();
                medium.insert(name, fs::read(item.path()).unwrap());
            }
        }
    }
    medium
}

/// A format of a file in a data directory. All of them are laid out, each in the version that its golden image has.
fn in_data_dir(name: &'static str, version: u16, raise: fn(&mut Vec<u8>)) -> Format {
    let path = match name {
        "node.json" => name.to_owned(),
        name => format!("volumes/v/{name}"),
    };
    Format {
        name,
        version,
        lay_out: Box::new(golden_files),
        open: Box::new(|medium| {
            let root = tempfile::tempdir().unwrap();
            for (name, bytes) in &*medium {
                let path = root.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
            let opened = DataDir::open(root.path()).map_err(|error| error.to_string());
            let opened = opened.and_then(|dir| {
                let recovered = catalogue::recover(&dir).map_err(|error| error.to_string())?;
                match recovered.volumes.get("v") {
                    Some(Found::Entry(entry)) => look_at(&dir, entry),
                    Some(Found::Damaged(why)) => Err(why.clone()),
                    None => Err("the volume is missing".to_owned()),
                }
            });
            *medium = files(root.path());
            opened
        }),
        raise: Box::new(move |medium| raise(medium.get_mut(&path).unwrap())),
    }
}

/// All that is beside a volume's entry can be used.
fn look_at(dir: &DataDir, entry: &Entry) -> Result<(), String> {
    let directory = catalogue::directory(dir.layout(), &entry.name);
    let encryption = entry.encryption.as_ref().ok_or("it has no key")?;
    encryption.unlock().map_err(|error| error.to_string())?;
    DirtyRecord::read(&directory, entry.uuid).ok_or("its record is missing")?;
    let scrub: serde_json::Value =
        sealed::read(&directory.join(SCRUB_FILE), SCRUB).map_err(|error| error.to_string())?;
    assert!(scrub["since_ms"].is_u64());
    let heat = hdcs_server::data_dir::heat::read(&directory.join(HEAT_FILE));
    heat.map_err(|error| error.to_string())?;
    let kept = kept::read(&directory, entry.uuid)?;
    kept.map(drop).ok_or("its superblock is missing".to_owned())
}

fn write_data_dir(root: &Path) {
    let dir = DataDir::open(root).unwrap();
    let key = format!("echo {}", "07".repeat(32));
    let uuid = Uuid::from_u128(7);
    let entry = Entry {
        name: "v".parse().unwrap(),
        number: 1,
        uuid,
        bytes: 1 << 20,
        log: LogPlace {
            path: "log".into(),
            bytes: LOG_BYTES_MIN,
            prepared: None,
        },
        backend: None,
        backend_identity: None,
        backend_is_new: false,
        encryption: Some(Encryption::new(KeySource::Command(key)).unwrap()),
        home: Some("home".into()),
        pins: Vec::new(),
        shard: None,
        is_replicated: false,
        settings: BTreeMap::new(),
    };
    PendingVolume::begin(dir.layout(), entry)
        .unwrap()
        .commit()
        .unwrap();
    let directory = catalogue::directory(dir.layout(), &"v".parse().unwrap());
    let record = DirtyRecord::of_new_log(uuid, 9, Some(5));
    record.write(&directory).unwrap();
    let scrub = serde_json::json!({ "since_ms": 5, "last": null });
    sealed::write(&directory.join(SCRUB_FILE), SCRUB, &scrub).unwrap();
    let mut heat = Gathering::new(1 << 20, 4);
    heat.see(8, Heat::Hot);
    sealed::replace(&directory.join(HEAT_FILE), &heat.finish().encode()).unwrap();
    let superblock = LogSuperblock::new(uuid.into_bytes(), 9, LOG_BYTES_MIN);
    kept::write_superblock(&directory, &superblock).unwrap();
}

/// The superblock of the same log, as if it had a group.
fn kept_of_group() -> Vec<u8> {
    let kept = files(&golden_dir(1))
        .remove(&format!("volumes/v/{KEPT_FILE}"))
        .unwrap();
    let mut superblock = LogSuperblock::parse(&kept).unwrap();
    superblock.incarnation = 4.into();
    superblock.set_membership(Membership {
        promised: 7,
        cut_position: 100,
        void_before: 3,
        joined: 5,
        is_whole: false,
    });
    superblock.seal();
    superblock.as_bytes().to_vec()
}

#[test]
fn golden_kept_superblock_of_a_group_is_still_written_the_same() {
    let golden = golden_dir(2).join("volumes/v").join(KEPT_FILE);
    if std::env::var_os("HDCS_UPDATE").is_some() {
        fs::create_dir_all(golden.parent().unwrap()).unwrap();
        fs::write(&golden, kept_of_group()).unwrap();
    }
    let expected = fs::read(&golden).unwrap();
    assert!(
        expected == kept_of_group(),
        "the format of the superblock has changed: raise its version and add an image"
    );
}

#[test]
fn golden_data_dir_is_still_written_the_same() {
    let golden = golden_dir(1);
    if std::env::var_os("HDCS_UPDATE").is_some() {
        let root = tempfile::tempdir().unwrap();
        write_data_dir(root.path());
        for (name, bytes) in files(root.path()) {
            let path = golden.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
    let expected = files(&golden);
    let root = tempfile::tempdir().unwrap();
    let layout = Layout::new(root.path());
    let directory = layout.volumes().join("v");
    fs::create_dir_all(&directory).unwrap();
    let found = catalogue::list(&Layout::new(&golden)).unwrap();
    let Some(Found::Entry(entry)) = found.get("v") else {
        panic!("{found:?}");
    };
    catalogue::update(&layout, entry).unwrap();
    key::create(&directory, entry.encryption.as_ref().unwrap()).unwrap();
    let golden_volume = golden.join("volumes/v");
    let record = DirtyRecord::read(&golden_volume, entry.uuid).unwrap();
    record.write(&directory).unwrap();
    let heat = hdcs_server::data_dir::heat::read(&golden_volume.join(HEAT_FILE)).unwrap();
    fs::write(directory.join(HEAT_FILE), heat.encode()).unwrap();
    let kept = kept::read(&golden_volume, entry.uuid).unwrap().unwrap();
    kept::write_superblock(&directory, &kept).unwrap();
    let written = files(root.path());
    assert_eq!(written.len(), 5);
    for (name, bytes) in written {
        assert!(
            expected[&name] == bytes,
            "the format of {name} has changed: raise its version and add an image"
        );
    }
}
