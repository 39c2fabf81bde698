//! A device that acknowledges a write of a local store's map and loses it: what was flushed is there, or the local
//! store is refused.

use hdcs_core::base::error::FormatError;
use hdcs_core::base::io::{Completion, Done};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::local::format::Layout;
use hdcs_core::local::map::BlockState;
use hdcs_core::local::{Action, Ask, Event};
use hdcs_kit::home::{Rig, try_open};

/// What becomes of a write.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    /// It is acknowledged, and never happens.
    Lost,
    /// The power goes when its first half is there.
    Torn,
}

/// Write a block and have it flushed; the first write to `place` meets its fate. False if the power went before the
/// flush was answered. When it is answered, the power goes at once: what was not asked for by then never happens.
fn commit(rig: &mut Rig, block: u64, mut fate: Option<(u64, Fate)>) -> bool {
    rig.write(block * BLOCK_BYTES as u64, &[block as u8 + 1; BLOCK_BYTES]);
    rig.settle();
    rig.ended.clear();
    rig.ask(Ask::Flush);
    while rig.ended.is_empty() {
        let hit = match (rig.actions.front(), fate) {
            (Some(Action::StoreWrite { offset, .. }), Some((place, fate))) => {
                (*offset == place).then_some(fate)
            }
            _ => None,
        };
        let Some(hit) = hit else {
            assert!(rig.act(), "the flush never ends");
            continue;
        };
        fate = None;
        let Some(Action::StoreWrite {
            token,
            offset,
            data,
        }) = rig.actions.pop_front()
        else {
            unreachable!("it was looked at");
        };
        if hit == Fate::Torn {
            let (at, half) = (offset as usize, BLOCK_BYTES / 2);
            rig.store[at..at + half].copy_from_slice(&data[0][..half]);
            return false;
        }
        let result = Ok(Done::Written);
        rig.event(Event::Completed(Completion { token, result }));
    }
    true
}

fn is_dirty(rig: &mut Rig, block: u64) -> bool {
    let home = try_open(&mut rig.store).unwrap();
    home.state_of(block, block + 1).0 == BlockState::Dirty
}

#[test]
fn home_survives_the_loss_of_any_write_of_its_map() {
    for place in [
        Layout::PLAIN.page_offset(0, 0),
        Layout::PLAIN.page_offset(0, 1),
        0,
        BLOCK_BYTES as u64,
    ] {
        let mut rig = Rig::new([0; 16]);
        assert!(commit(&mut rig, 3, Some((place, Fate::Lost))));
        assert!(is_dirty(&mut rig, 3), "the write at {place} was lost");
    }
}

#[test]
fn home_survives_a_torn_write_of_a_page_or_of_its_copy() {
    for copy in [0, 1] {
        let mut rig = Rig::new([0; 16]);
        assert!(commit(&mut rig, 3, None));
        let torn = Some((Layout::PLAIN.page_offset(0, copy), Fate::Torn));
        assert!(!commit(&mut rig, 4, torn));
        assert!(is_dirty(&mut rig, 3));
    }
}

/// The copy that counts then is older than what was flushed.
#[test]
fn home_whose_copy_was_lost_and_whose_page_is_torn_is_refused() {
    let mut rig = Rig::new([0; 16]);
    let copy = Some((Layout::PLAIN.page_offset(0, 1), Fate::Lost));
    assert!(commit(&mut rig, 3, copy));
    let torn = Some((Layout::PLAIN.page_offset(0, 0), Fate::Torn));
    assert!(!commit(&mut rig, 4, torn));
    let refused = try_open(&mut rig.store).unwrap_err();
    assert_eq!(refused, FormatError::Stale);
}

#[test]
fn home_whose_page_is_older_than_its_superblock_is_refused() {
    let mut rig = Rig::new([0; 16]);
    assert!(commit(&mut rig, 3, None));
    let place = Layout::PLAIN.page_offset(0, 0) as usize;
    let before = rig.store[place..place + 2 * BLOCK_BYTES].to_vec();
    rig.settle();
    assert!(commit(&mut rig, 4, None));
    rig.store[place..place + 2 * BLOCK_BYTES].copy_from_slice(&before);
    let refused = try_open(&mut rig.store).unwrap_err();
    assert_eq!(refused, FormatError::Stale);
}
