//! What the steps of an opening are told, and what they find.

use hdcs_core::base::error::FormatError;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_UNFLUSHED, LogSuperblock};
use hdcs_core::node::opening::{LogRefused, Opening, Step, retry_pause};
use hdcs_core::volume::{Persist, Volume, VolumeConfig};

const KEY: [u8; 16] = [3; 16];
const NONE: [u8; 16] = [0; 16];

fn config() -> VolumeConfig {
    hdcs_kit::volume::config(Persist::OnFlush)
}

fn superblock(log: u64, change: impl FnOnce(&mut LogSuperblock)) -> [u8; BLOCK_BYTES] {
    let mut superblock = LogSuperblock::parse(&Volume::format_log(&config(), log)).unwrap();
    change(&mut superblock);
    superblock.seal();
    zerocopy::transmute!(superblock)
}

fn opened(blocks: &[[u8; BLOCK_BYTES]; 2], key: [u8; 16]) -> Result<Opening, LogRefused> {
    let mut opening = Opening::begin(config().uuid, true);
    opening.log_read(blocks)?;
    opening.authenticate(blocks, key, None)?;
    Ok(opening)
}

fn refused(blocks: &[[u8; BLOCK_BYTES]; 2], key: [u8; 16]) -> LogRefused {
    opened(blocks, key).unwrap_err()
}

#[test]
fn opening_takes_its_steps_in_order() {
    for has_local in [true, false] {
        let blocks = [superblock(5, |_| ()), [0; BLOCK_BYTES]];
        let mut opening = Opening::begin(config().uuid, has_local);
        assert_eq!(opening.step(), Step::Log);
        opening.log_read(&blocks).unwrap();
        assert_eq!(opening.step(), Step::Log, "it is not authenticated");
        opening.authenticate(&blocks, NONE, None).unwrap();
        assert_eq!(opening.step(), Step::Records);
        assert_eq!(opening.recorded(None), Ok(true));
        assert_eq!(
            opening.step(),
            Step::Records,
            "what is kept of it is not known"
        );
        opening.kept(None);
        let mut taken = Vec::new();
        while opening.step() != Step::Done {
            taken.push(opening.step());
            opening.done();
        }
        let all = [Step::Local, Step::Backend, Step::Sync, Step::Begin];
        assert_eq!(taken, all[usize::from(!has_local)..]);
    }
}

#[test]
fn opening_goes_by_the_newest_superblock() {
    let old = superblock(5, |s| s.sequence = 8.into());
    let new = superblock(5, |s| {
        s.sequence = 9.into();
        s.incarnation = 4.into();
        s.flags = LOG_UNFLUSHED.into();
    });
    for blocks in [[old, new], [new, old]] {
        let log = opened(&blocks, NONE).unwrap().log();
        assert_eq!((log.log, log.incarnation, log.is_whole), (5, 4, false));
    }
}

#[test]
fn opening_refuses_a_log_that_is_not_the_volumes() {
    let own = superblock(5, |_| ());
    let foreign = superblock(5, |s| s.volume = [1; 16]);
    let empty = [0; BLOCK_BYTES];
    assert!(
        opened(&[own, foreign], NONE).is_ok(),
        "one of them is enough"
    );
    let identity = LogRefused::Superblock(FormatError::Identity);
    assert_eq!(refused(&[foreign, empty], NONE), identity);
    assert!(matches!(
        refused(&[empty, empty], NONE),
        LogRefused::Superblock(_)
    ));
    assert_eq!(refused(&[own, empty], KEY), LogRefused::OtherKey);
    let encrypted = superblock(5, |s| s.data_key = KEY);
    assert_eq!(refused(&[encrypted, empty], NONE), LogRefused::OtherKey);
    assert!(opened(&[encrypted, empty], KEY).is_ok());
}

#[test]
fn opening_knows_that_a_log_that_failed_was_gone_past() {
    let blocks = [superblock(5, |_| ()), [0; BLOCK_BYTES]];
    for (kept, is_whole) in [(None, true), (Some(5), false), (Some(6), true)] {
        let mut opening = opened(&blocks, NONE).unwrap();
        let kept = kept.map(|log| LogSuperblock::parse(&superblock(log, |_| ())).unwrap());
        opening.kept(kept.as_ref());
        assert_eq!(opening.log().is_whole, is_whole);
    }
}

#[test]
fn opening_takes_the_recorded_log_and_newer_incarnations_of_it() {
    let recorded = |incarnation: u64, record| {
        let block = superblock(7, |s| s.incarnation = incarnation.into());
        let opening = opened(&[block, [0; BLOCK_BYTES]], NONE).unwrap();
        opening.recorded(record)
    };
    assert_eq!(recorded(0, None), Ok(true), "its backend is made with it");
    assert_eq!(recorded(3, None), Ok(false));
    assert_eq!(recorded(3, Some((7, 3))), Ok(false));
    assert_eq!(recorded(4, Some((7, 3))), Ok(false));
    assert_eq!(
        recorded(2, Some((7, 3))),
        Err(LogRefused::Older { recorded: 3 })
    );
    for incarnation in [0, 3] {
        let another = Err(LogRefused::Another { recorded: 8 });
        assert_eq!(recorded(incarnation, Some((8, 3))), another);
    }
}

#[test]
fn retry_pauses_double_up_to_half_a_minute() {
    let seconds: Vec<u64> = (1..9).map(|n| retry_pause(n).0 / 1_000_000_000).collect();
    assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30, 30]);
    assert_eq!(retry_pause(u32::MAX), Nanos::from_millis(30_000));
}
