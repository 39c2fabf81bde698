//! An encrypted local store: ciphertext in its store, plaintext for clients and the backend.

use hdcs_core::base::error::FormatError;
use hdcs_core::base::limits::{
    BLOCK_BYTES, BLOCK_SECTORS, HOME_CIPHER_BYTES, REQUEST_BYTES_MAX, SECTOR_BYTES,
};
use hdcs_core::format::block_checksum;
use hdcs_core::local::format::{
    self, CRC_BYTES, HomePage, HomeSuperblock, MapCheck, SUMS_UNTRUSTED, choose_page,
};
use hdcs_core::local::{Action, Ask, Event};
use hdcs_kit::home::{BYTES, HOME, KEY, LOG, Rig, UUID, open, superblock, try_open};
use zerocopy::IntoBytes;

#[test]
fn home_cipher_keeps_parts_of_blocks_and_what_the_backend_had() {
    let mut rig = Rig::new(KEY);
    let mut expected = rig.backend.clone();
    let mut put = |rig: &mut Rig, offset: usize, bytes: usize, byte: u8| {
        let data: Vec<u8> = (0..bytes).map(|at| byte ^ (at / 100) as u8).collect();
        rig.write(offset as u64, &data);
        rig.settle();
        expected[offset..offset + bytes].copy_from_slice(&data);
    };
    // A part of one block, of three, all of one; then over parts of that.
    put(&mut rig, 4096 + 512, 1024, 1);
    put(&mut rig, 5 * 4096 - 512, 4096 + 1024, 2);
    put(&mut rig, 9 * 4096, 4096, 3);
    put(&mut rig, 9 * 4096 + 1024, 512, 4);
    rig.ask(Ask::Zero {
        offset: 20 * 4096 + 512,
        bytes: 3 * 4096,
    });
    rig.settle();
    rig.ask(Ask::Flush);
    rig.settle();
    expected[20 * 4096 + 512..23 * 4096 + 512].fill(0);
    for (first, blocks) in [(1, 1), (4, 2), (9, 1), (20, 1), (23, 1)] {
        let range = first * 4096..(first + blocks) * 4096;
        rig.expect(range.start as u64, &expected[range]);
    }
    assert!(rig.read(0, 1 << 20) == expected[..1 << 20]);
    // Opened anew, with what the store holds alone.
    rig.home = open(&mut rig.store);
    assert_eq!(superblock(&rig.store).data_key, KEY);
    assert!(rig.read(0, 1 << 20) == expected[..1 << 20]);
    // Checksums are of what is stored: whoever has no key can compare them.
    rig.scrub();
    assert!(rig.damaged.is_empty());
    rig.event(Event::Tier);
    rig.settle();
    assert!(rig.backend == expected, "the backend gets plaintext");
    assert_eq!(rig.home.status().dirty_bytes, 0);
    assert_eq!(superblock(&rig.store).data_key, KEY, "written by the tier");
    let place = rig.layout().data_offset(9 * 4096 + 600) as usize;
    rig.store[place] ^= 1;
    rig.scrub();
    assert!(rig.damaged.contains(&9), "{:?}", rig.damaged);
}

#[test]
fn home_cipher_waits_for_memory_in_order_and_goes_on() {
    let mut rig = Rig::new(KEY);
    let writes = 2 * HOME_CIPHER_BYTES / REQUEST_BYTES_MAX;
    for number in 0..writes {
        rig.write(
            (number * REQUEST_BYTES_MAX) as u64,
            &vec![number as u8; REQUEST_BYTES_MAX],
        );
    }
    // What of the table of checksums is needed is read; the data has begun then.
    let is_write = |action: &&Action| matches!(action, Action::StoreWrite { .. });
    while rig.actions.iter().any(|action| !is_write(&action)) {
        assert!(rig.act());
    }
    assert_eq!(rig.actions.len(), HOME_CIPHER_BYTES / REQUEST_BYTES_MAX);
    let offset = |action: &Action| match action {
        Action::StoreWrite { offset, .. } => *offset,
        other => panic!("{other:?}"),
    };
    for number in 0..writes {
        let next = rig
            .layout()
            .data_offset((number * REQUEST_BYTES_MAX) as u64);
        assert_eq!(offset(&rig.actions[0]), next, "in the order of arrival");
        assert!(rig.act());
        for action in std::mem::take(&mut rig.actions) {
            match action {
                Action::End(completion) => rig.ended.push(completion),
                other => rig.actions.push_back(other),
            }
        }
    }
    assert_eq!(rig.ended.len(), writes);
    assert!(rig.ended.iter().all(|ended| ended.result.is_ok()));
    rig.ended.clear();
    for number in 0..writes {
        let at = (number * REQUEST_BYTES_MAX) as u64;
        rig.expect(at, &vec![number as u8; REQUEST_BYTES_MAX]);
    }
}

#[test]
fn home_keeps_its_data_key_whatever_else_of_its_superblock_changes() {
    let head = format::format_head(UUID, HOME, BYTES, KEY, None);
    let made = HomeSuperblock::parse(&head[BLOCK_BYTES..2 * BLOCK_BYTES]).unwrap();
    let page = format::format_page(HOME, 0, None);
    let found = choose_page([page.as_bytes(); 2], HOME, 0, None).unwrap();
    let mut map = MapCheck::new(&made);
    map.add(&found);
    let begun = made.begin(LOG, true, &map, None).unwrap();
    let lost = begun.begin(LOG + 1, true, &map, None).unwrap();
    assert_eq!(lost.sums_log.get(), SUMS_UNTRUSTED);
    assert_eq!([made, begun, lost].map(|one| one.data_key), [KEY; 3]);
}

#[test]
#[should_panic(expected = "a local store is encrypted if its superblock says so")]
fn home_that_is_encrypted_is_not_opened_without_its_cipher() {
    let mut store = Rig::new(KEY).store;
    let place = superblock(&store).place() as usize;
    // As if it were of another key.
    let other = HomeSuperblock::sealed(UUID, HOME, 9, BYTES, 0, LOG)
        .encrypted([4; 16])
        .counting(1, format::page_digest(0, 1));
    store[place..place + BLOCK_BYTES].copy_from_slice(other.as_bytes());
    open(&mut store);
}

/// A block is changed by somebody who makes its checksum right again.
fn forge(rig: &mut Rig, place: u64, at: usize) {
    let block = &mut rig.store[place as usize..][..BLOCK_BYTES];
    block[at] ^= 0x55;
    hdcs_core::format::seal(block);
}

#[test]
fn home_that_is_encrypted_refuses_a_forged_map() {
    let states = core::mem::offset_of!(HomePage, states);
    let log = core::mem::offset_of!(HomePage, log);
    let flags = core::mem::offset_of!(HomeSuperblock, flags);
    let digest = core::mem::offset_of!(HomeSuperblock, map_digest);
    for (key, expected) in [(KEY, Err(FormatError::Forged)), ([0; 16], Ok(()))] {
        for (copy, at) in [(0, states), (1, states + 9), (0, log)] {
            let mut rig = Rig::new(key);
            rig.write(0, &[1; BLOCK_BYTES]);
            rig.settle();
            rig.ask(Ask::Flush);
            rig.settle();
            let place = rig.layout().page_offset(0, copy);
            forge(&mut rig, place, at);
            assert_eq!(try_open(&mut rig.store).map(drop), expected, "{copy}, {at}");
        }
    }
    for at in [flags, digest] {
        let mut rig = Rig::new(KEY);
        let place = superblock(&rig.store).place();
        forge(&mut rig, place, at);
        let refused = try_open(&mut rig.store).map(drop);
        assert_eq!(refused, Err(FormatError::Forged), "{at}");
    }
}

#[test]
fn home_that_is_encrypted_tags_what_it_writes() {
    let mut rig = Rig::new(KEY);
    rig.write(0, &[1; BLOCK_BYTES]);
    rig.settle();
    rig.ask(Ask::Flush);
    rig.settle();
    rig.event(Event::Tier);
    rig.settle();
    rig.reopen();
    rig.expect(0, &[1; BLOCK_BYTES]);
    assert_ne!(superblock(&rig.store).tag, [0; 16]);
}

/// Somebody without the key has sectors in its store changed, each with a CRC-32C that is right.
fn forge_sector(rig: &mut Rig, sector: u64) {
    let layout = rig.layout();
    let place = layout.data_offset(sector * SECTOR_BYTES as u64) as usize;
    rig.store[place + 100] ^= 0x55;
    let crc = block_checksum(&rig.store[place..][..SECTOR_BYTES]);
    let sum = layout.sum_offset(sector) as usize;
    rig.store[sum..sum + CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn home_that_is_encrypted_refuses_forged_sectors_and_gives_others() {
    let sector = 3 * BLOCK_SECTORS + 2;
    for key in [KEY, [0; 16]] {
        let mut rig = Rig::new(key);
        rig.write(3 * BLOCK_BYTES as u64, &[1; BLOCK_BYTES]);
        rig.settle();
        rig.ask(Ask::Flush);
        rig.settle();
        forge_sector(&mut rig, sector);
        rig.reopen();
        let is_forged = key == KEY;
        let refused = rig.try_read(sector * SECTOR_BYTES as u64, SECTOR_BYTES);
        assert_eq!(refused.is_err(), is_forged);
        assert_eq!(
            rig.forged,
            if is_forged { vec![sector] } else { Vec::new() }
        );
        for other in [sector - 1, sector + 1] {
            let found = rig.read(other * SECTOR_BYTES as u64, SECTOR_BYTES);
            assert!(found == [1; SECTOR_BYTES]);
        }
        rig.damaged.clear();
        rig.scrub();
        assert_eq!(rig.damaged, if is_forged { vec![3] } else { Vec::new() });
        // To the backend it does not get either.
        let before = rig.backend.clone();
        rig.event(Event::Tier);
        rig.settle();
        assert_eq!(rig.backend == before, is_forged);
        // What is written over it is good.
        rig.write(3 * BLOCK_BYTES as u64, &[2; BLOCK_BYTES]);
        rig.settle();
        assert!(rig.read(3 * BLOCK_BYTES as u64, BLOCK_BYTES) == [2; BLOCK_BYTES]);
    }
}

/// A sector and its tag that are genuine do not count in another place.
#[test]
fn home_that_is_encrypted_refuses_a_sector_of_another_place() {
    let mut rig = Rig::new(KEY);
    for block in [3, 4] {
        rig.write(block * BLOCK_BYTES as u64, &[block as u8; BLOCK_BYTES]);
    }
    rig.settle();
    rig.ask(Ask::Flush);
    rig.settle();
    let layout = rig.layout();
    let [from, to] = [3, 4].map(|block| block * BLOCK_SECTORS);
    let data = |sector: u64| layout.data_offset(sector * SECTOR_BYTES as u64) as usize;
    rig.store
        .copy_within(data(from)..data(from) + SECTOR_BYTES, data(to));
    let sum = |sector| layout.sum_offset(sector) as usize;
    rig.store
        .copy_within(sum(from)..sum(from) + layout.sum_bytes(), sum(to));
    rig.reopen();
    assert!(
        rig.try_read(to * SECTOR_BYTES as u64, SECTOR_BYTES)
            .is_err()
    );
    assert_eq!(rig.forged, [to]);
}
