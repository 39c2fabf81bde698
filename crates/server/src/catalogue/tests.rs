//! Making, finding and removing volumes, also where that was interrupted or there are copies.

use super::*;

pub(crate) fn entry(name: &str, number: u32) -> Entry {
    Entry {
        name: name.parse().unwrap(),
        number,
        uuid: Uuid::new_v4(),
        bytes: 1 << 20,
        log: LogPlace {
            path: LOG_FILE.into(),
            bytes: 16 << 20,
            prepared: None,
        },
        backend: None,
        backend_identity: None,
        backend_is_new: false,
        encryption: None,
        home: None,
        pins: Vec::new(),
        shard: None,
        is_replicated: false,
        settings: BTreeMap::from([("persist".to_owned(), Value::Text("auto".to_owned()))]),
    }
}

fn make(dir: &DataDir, entry: Entry) -> Entry {
    let pending = PendingVolume::begin(dir.layout(), entry).unwrap();
    fs::write(pending.log_path(), "log").unwrap();
    fs::write(pending.data_path().unwrap(), "data").unwrap();
    pending.commit().unwrap()
}

fn open() -> (tempfile::TempDir, DataDir) {
    let root = tempfile::tempdir().unwrap();
    let dir = DataDir::open(root.path()).unwrap();
    (root, dir)
}

#[test]
fn name_rules() {
    for good in ["a", "A.b_c-9", &"x".repeat(64)] {
        assert!(good.parse::<VolumeName>().is_ok(), "{good}");
    }
    let refused = |text: &str| text.parse::<VolumeName>().unwrap_err();
    assert_eq!(refused(""), NameError::Empty);
    assert_eq!(refused(&"x".repeat(65)), NameError::TooLong(65));
    assert_eq!(refused(".."), NameError::Start('.'));
    assert_eq!(refused("-a"), NameError::Start('-'));
    assert_eq!(refused("a/b"), NameError::Character('/'));
    assert_eq!(refused("a\n"), NameError::Character('\n'));
    assert_eq!(refused("a\0"), NameError::Character('\0'));
    assert_eq!(refused("ü"), NameError::Character('ü'));
}

#[test]
fn file_url_reads_back() {
    use std::ffi::OsStr;

    use hdcs_backend::url::BackendUrl;
    for bytes in [
        &b"/plain"[..],
        b"/a b%20?x=1#\n",
        "/\u{fc}".as_bytes(),
        b"/\xff\xc3",
    ] {
        let path = Path::new(OsStr::from_bytes(bytes));
        let place = BackendUrl::parse(&file_url(path)).unwrap().place;
        assert_eq!(place.path(), Some(path));
    }
}

#[test]
fn volume_size_rules() {
    for good in [4096, 4608, 10 << 30, VOLUME_BYTES_MAX] {
        assert_eq!(check_volume_bytes(good), Ok(()));
    }
    for (bad, why) in [
        (0, "zero"),
        (512, "at least"),
        (4097, "multiple of 512"),
        (VOLUME_BYTES_MAX + 512, "at most"),
    ] {
        assert!(check_volume_bytes(bad).unwrap_err().contains(why), "{bad}");
    }
}

#[test]
fn catalogue_reads_back_what_was_made() {
    let (_root, dir) = open();
    let made = make(&dir, entry("one", 1));
    let recovered = recover(&dir).unwrap();
    assert!(matches!(&recovered.volumes["one"], Found::Entry(e) if **e == made));
    assert!(recovered.removed.is_empty() && recovered.ignored.is_empty());
}

#[test]
fn catalogue_dropped_draft_leaves_nothing() {
    let (root, dir) = open();
    let outside = root.path().join("elsewhere");
    let mut new = entry("one", 1);
    new.log.path.clone_from(&outside);
    let pending = PendingVolume::begin(dir.layout(), new).unwrap();
    fs::write(pending.log_path(), "log").unwrap();
    drop(pending);
    assert!(!outside.exists());
    assert_eq!(fs::read_dir(dir.layout().volumes()).unwrap().count(), 0);
}

#[test]
fn catalogue_interrupted_work_is_removed_and_named() {
    let (root, dir) = open();
    let outside = root.path().join("elsewhere");
    let mut new = entry("one", 1);
    new.log.path.clone_from(&outside);
    let pending = PendingVolume::begin(dir.layout(), new).unwrap();
    fs::write(pending.log_path(), "log").unwrap();
    std::mem::forget(pending);
    let cut = dir.layout().volumes().join(".new-two");
    fs::create_dir(&cut).unwrap();
    fs::write(cut.join("volume.json.tmp"), "{").unwrap();
    fs::create_dir(dir.layout().volumes().join(".gone-three-x")).unwrap();
    let recovered = recover(&dir).unwrap();
    assert_eq!(recovered.removed.len(), 3, "{:?}", recovered.removed);
    assert!(!outside.exists());
    assert_eq!(fs::read_dir(dir.layout().volumes()).unwrap().count(), 0);
}

#[test]
fn catalogue_leftover_that_cannot_be_removed_keeps_no_volume_from_serving() {
    let (_root, dir) = open();
    make(&dir, entry("good", 1));
    let volumes = dir.layout().volumes();
    // No key can be overwritten, nor read, where a directory is in its place.
    let [gone, new, wrapping] = [
        ".gone-three-x/key.json",
        ".new-two/key.json",
        "good/key.json.new",
    ]
    .map(|place| volumes.join(place));
    for place in [&gone, &new, &wrapping] {
        fs::create_dir_all(place).unwrap();
    }
    let recovered = recover(&dir).unwrap();
    assert!(matches!(&recovered.volumes["good"], Found::Entry(_)));
    assert_eq!(recovered.left.len(), 3, "{:?}", recovered.left);
    assert!(recovered.removed.is_empty() && gone.exists() && new.exists());
    for place in [&gone, &new, &wrapping] {
        fs::remove_dir(place).unwrap();
    }
    let recovered = recover(&dir).unwrap();
    assert_eq!(recovered.removed.len(), 2, "{:?}", recovered.removed);
    assert!(recovered.left.is_empty());
}

#[test]
fn catalogue_removal_that_did_not_end_goes_on_when_asked_again() {
    let (_root, dir) = open();
    let outside = tempfile::tempdir().unwrap();
    let files = make_outside(&dir, "one", 1, outside.path());
    let name = "one".parse().unwrap();
    let obstacle = dir.layout().volumes().join("one/key.json");
    fs::create_dir(&obstacle).unwrap();
    assert!(!is_half_removed(dir.layout(), &name));
    for _ in 0..2 {
        remove(dir.layout(), &name, None).unwrap_err();
        assert!(is_half_removed(dir.layout(), &name));
        assert!(!obstacle.exists() && files[0].exists());
    }
    let rest = rest_of(dir.layout(), &name).unwrap();
    fs::remove_dir(rest[0].join("key.json")).unwrap();
    remove(dir.layout(), &name, None).unwrap();
    assert!(!is_half_removed(dir.layout(), &name));
    assert!(!files.iter().any(|file| file.exists()));
    assert_eq!(fs::read_dir(dir.layout().volumes()).unwrap().count(), 0);
    remove(dir.layout(), &name, None).unwrap_err();
}

#[test]
fn catalogue_damage_costs_one_volume_and_changes_nothing() {
    let (_root, dir) = open();
    make(&dir, entry("good", 1));
    make(&dir, entry("bad", 2));
    let path = dir.layout().volumes().join("bad/volume.json");
    let text = fs::read_to_string(&path)
        .unwrap()
        .replace("1048576", "2097152");
    fs::write(&path, &text).unwrap();
    let recovered = recover(&dir).unwrap();
    assert!(matches!(&recovered.volumes["good"], Found::Entry(_)));
    assert!(matches!(&recovered.volumes["bad"], Found::Damaged(why) if why.contains("checksum")));
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn catalogue_copies_do_not_serve() {
    let (_root, dir) = open();
    make(&dir, entry("one", 1));
    let mut twin = entry("two", 1);
    twin.uuid = Uuid::new_v4();
    make(&dir, twin);
    fs::rename(
        dir.layout().volumes().join("two"),
        dir.layout().volumes().join("three"),
    )
    .unwrap();
    let renamed = recover(&dir).unwrap();
    assert!(matches!(&renamed.volumes["three"], Found::Damaged(why) if why.contains("renamed")));
    assert!(matches!(&renamed.volumes["one"], Found::Entry(_)));
    make(&dir, entry("four", 1));
    let twins = recover(&dir).unwrap();
    for name in ["one", "four"] {
        assert!(matches!(&twins.volumes[name], Found::Damaged(why) if why.contains("same number")));
    }
}

/// A volume in storage mode, with its log and local store in a directory of their own.
fn make_outside(dir: &DataDir, name: &str, number: u32, outside: &Path) -> [PathBuf; 2] {
    let files = ["log", "home"].map(|what| outside.join(what));
    let mut new = entry(name, number);
    new.log.path.clone_from(&files[0]);
    new.home = Some(files[1].clone());
    make(dir, new);
    fs::write(&files[1], "home").unwrap();
    files
}

/// The volume "one" is whole, and its files go with it.
fn goes_with_its_files(dir: &DataDir, files: &[PathBuf]) {
    assert!(files.iter().all(|file| file.exists()));
    assert!(matches!(
        &recover(dir).unwrap().volumes["one"],
        Found::Entry(_)
    ));
    remove(dir.layout(), &"one".parse().unwrap(), None).unwrap();
    assert!(!files.iter().any(|file| file.exists()));
}

#[test]
fn catalogue_copy_that_is_deleted_takes_nothing_of_the_original() {
    let (_root, dir) = open();
    let outside = tempfile::tempdir().unwrap();
    let files = make_outside(&dir, "one", 1, outside.path());
    let [original, copy] = ["one", "one.bak"].map(|name| dir.layout().volumes().join(name));
    fs::create_dir(&copy).unwrap();
    for item in fs::read_dir(&original).unwrap() {
        let item = item.unwrap();
        fs::copy(item.path(), copy.join(item.file_name())).unwrap();
    }
    let found = recover(&dir).unwrap().volumes;
    assert!(matches!(&found["one.bak"], Found::Damaged(why) if why.contains("renamed")));
    remove(dir.layout(), &"one.bak".parse().unwrap(), None).unwrap();
    assert!(!copy.exists());
    goes_with_its_files(&dir, &files);
}

#[test]
fn catalogue_file_of_two_volumes_goes_with_the_last_one() {
    let (_root, dir) = open();
    let outside = tempfile::tempdir().unwrap();
    let files = make_outside(&dir, "one", 1, outside.path());
    make_outside(&dir, "two", 2, outside.path());
    let found = recover(&dir).unwrap().volumes;
    assert!(found.values().all(|one| matches!(one, Found::Damaged(_))));
    remove(dir.layout(), &"two".parse().unwrap(), None).unwrap();
    goes_with_its_files(&dir, &files);
}

#[test]
fn hidden_directory_tells_whose_it_is() {
    let name_of = |hidden: &str| {
        let name = name_of_hidden(&Path::new("/volumes").join(hidden));
        name.map(String::from)
    };
    let gone = format!(".gone-a-b-{}", Uuid::new_v4());
    assert_eq!(name_of(&gone), Some("a-b".to_owned()));
    assert_eq!(name_of(".new-a-b"), Some("a-b".to_owned()));
    for other in [".gone-three-x", ".gone-", ".new-", "a-b", &gone[1..]] {
        assert_eq!(name_of(other), None, "{other}");
    }
}

#[test]
fn catalogue_delete_keeps_the_data_when_asked() {
    let (root, dir) = open();
    let made = make(&dir, entry("one", 1));
    let keep = root.path().join("kept/one.img");
    remove(dir.layout(), &made.name, Some(&keep)).unwrap();
    assert_eq!(fs::read_to_string(&keep).unwrap(), "data");
    let again = make(&dir, entry("one", 2));
    assert!(remove(dir.layout(), &again.name, Some(&keep)).is_err());
    assert_eq!(fs::read_to_string(&keep).unwrap(), "data");
    remove(dir.layout(), &again.name, None).unwrap();
    assert!(recover(&dir).unwrap().volumes.is_empty());
}
