//! What a copy says that is being brought up.

use super::*;
use crate::replication::participant::superblocks::{Superblocks, of_copy};
use crate::replication::replica;

/// Where a copy was cut, and up to where it has taken spans since.
const CUT: u64 = 10;
const DURABLE: u64 = 46;

/// A copy that was cut, void for openings before this one, is asked for a promise once it is durable up to [`DURABLE`]. What
/// its medium says then, and where its log ends by a replay if nothing counts that it was sent.
fn known_and_end(void_before: u64) -> (u64, u64) {
    let mut first = LogSuperblock::new(VOLUME, LOG, REGION_BYTES);
    first.tail = CUT.into();
    first.incarnation = 1.into();
    first.set_membership(Membership {
        promised: 1,
        cut_position: CUT,
        void_before,
        joined: 1,
        is_whole: false,
    });
    first.seal();
    let last = of_copy(&first);
    let wanted = replica::Superblock {
        promised: 2,
        ..last
    };
    let mut superblocks = Superblocks::new(Box::new(first), None);
    let (offset, block) = superblocks.next(Some(wanted), last, DURABLE).unwrap();
    let known = LogSuperblock::parse(&block).unwrap().known_head.get();
    let mut disk = vec![0; REGION_BYTES as usize];
    disk[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
    let (log, found) = replay(&disk, &Pool::new(8 << 20));
    assert_eq!(found.superblock.epoch.get(), 2);
    (known, log.head())
}

#[test]
fn copy_that_was_given_up_opens_again_whatever_it_was_sent_since() {
    assert_eq!(known_and_end(u64::MAX), (CUT, CUT));
}

#[test]
fn copy_that_may_be_cut_once_more_is_known_up_to_its_cut() {
    assert_eq!(known_and_end(1), (CUT, CUT));
}

/// Else what a crash has left of it behind something that was not written would be taken for proof of that.
#[test]
fn joiner_is_told_to_read_back_once_it_has_what_there_was_when_it_was_cut() {
    let (primary, joiner) = (Member(0), Member(1));
    let mut net = Net::new(2, AckLevel::All);
    net.cut.insert((primary, joiner));
    net.take(primary);
    net.settle();
    // Less than a joiner may lack when it begins to read back.
    for byte in 1..=3 {
        net.write(primary, 1, byte);
        net.settle();
    }
    let head = net.participant(primary).status().head;
    net.cut.clear();
    let mut told = None;
    while net.record.config.members.count() == 1 {
        assert!(net.round());
        net.act(primary);
        net.send(primary);
        for wire in &net.wires {
            if let Message::Verify { up_to } = &wire.message {
                told = Some(up_to.position);
            }
        }
    }
    assert_eq!(told, Some(head));
}
