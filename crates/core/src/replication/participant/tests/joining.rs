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
