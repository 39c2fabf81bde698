//! A write log that something has happened to against its replay.
//!
//! A volume writes a real log, which may be cut as a copy in a group is; then bytes of it are changed, with the checksum
//! of the span or superblock put right or not. Opening it either fails, or gives a volume that reads everywhere,
//! destages, closes, and opens again. It never forgets what its superblock says of the group.

use std::cell::RefCell;

use hdcs_core::base::codec::Method;
use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{Request, RequestId, SectorRange};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_HEADER_BLOCKS, SpanHeader, seal};
use hdcs_core::volume::{Event, Persist, Phase};
use hdcs_kit::copies;
use hdcs_kit::volume::{BYTES, World};

const SECTORS: u64 = (BYTES / 512) as u64;
/// Steps of one run at most, so that a run ends soon.
const STEPS_MAX: usize = 64;
/// The part of the log that changes go to: where the writes of one run can have been.
const CHANGED_BLOCKS: usize = LOG_HEADER_BLOCKS as usize + 1024;

thread_local! {
    static WORLD: RefCell<Option<(World, Vec<u8>)>> = const { RefCell::new(None) };
}

/// The bytes are steps: first what the volume does, then what happens to its log.
pub fn replay(data: &[u8]) {
    WORLD.with_borrow_mut(|kept| {
        // Made once: a world is tens of megabytes.
        let (world, fresh) = kept.get_or_insert_with(|| {
            let world = World::new(Persist::OnWrite);
            let log = world.log.clone();
            (world, log)
        });
        world.log.copy_from_slice(fresh);
        world.backend.fill(0);
        world.cache.forget_volume(world.config.number);
        world.config.compression = None;
        world.reopen();
        let mut input = Input(data);
        for _ in 0..STEPS_MAX {
            if !act(world, &mut input) {
                break;
            }
        }
        for _ in 0..STEPS_MAX {
            if !damage(&mut world.log, &mut input) {
                break;
            }
        }
        world.try_reopen();
        match world.volume.phase() {
            Phase::Failed(_) => {}
            Phase::Open => {
                world.volume.check_invariants();
                let said = copies::superblock(&world.log).membership();
                for start in (0..SECTORS).step_by(2048) {
                    read_or_refuse(world, SectorRange::new(start, 2048));
                }
                // What cannot be decompressed stays in the log.
                world.close(true);
                world.try_reopen();
                assert_eq!(copies::superblock(&world.log).membership(), said);
            }
            phase => panic!("a log that was read ends as {phase:?}"),
        }
    });
}

/// Data, or the word that it is corrupt: the checksums of a span may be right and what it says of a compressed
/// entry wrong.
fn read_or_refuse(world: &mut World, range: SectorRange) {
    let id = RequestId(5);
    let request = Request::Read { range };
    world.step(Event::Request { id, request });
    match world.replies.pop() {
        Some((_, Ok(_) | Err(RequestError::Corrupt))) => {}
        other => panic!("a read ends as {other:?}"),
    }
}

/// One thing that a volume does; `false` when it is over.
fn act(world: &mut World, input: &mut Input<'_>) -> bool {
    let Some(kind) = input.byte() else {
        return false;
    };
    let start = u64::from(input.u16()) % SECTORS;
    let count = (u64::from(input.byte().unwrap_or(0)) + 1).min(SECTORS - start);
    let range = SectorRange::new(start, count);
    let fua = kind & 0x80 != 0;
    match kind % 8 {
        0 if fua => {
            let methods = [None, Some(Method::Lz4), Some(Method::Zstd)];
            world.config.compression = methods[usize::from(kind / 8) % 3];
            let config = world.config.clone();
            world.step(Event::Reconfigure(config));
        }
        2 if fua => is_cut(world, start),
        0..=2 => world.write(start, &vec![kind; range.bytes()]),
        3 => {
            let no_hole = fua;
            world.ask(Request::WriteZeroes {
                range,
                fua,
                no_hole,
            });
        }
        4 => {
            world.ask(Request::Discard { range, fua });
        }
        5 => {
            world.ask(Request::Flush);
        }
        6 if fua => {
            world.close(false);
            world.reopen();
        }
        6 => world.reopen(),
        _ => return false,
    }
    true
}

/// The log is cut where one of its spans ends, or where it begins, and opened again.
fn is_cut(world: &mut World, choice: u64) {
    let spans = copies::spans(&world.log, world.config.uuid).expect("nothing has happened to it");
    let tail = copies::superblock(&world.log).tail.get();
    let kept = choice as usize % (spans.len() + 1);
    let last = kept.checked_sub(1).map(|last| spans[last]);
    let at = last.map_or(tail, |last| last.end());
    copies::cut(&mut world.log, at);
    let left = copies::spans(&world.log, world.config.uuid);
    assert_eq!(left.as_deref(), Ok(&spans[..kept]));
    world.reopen();
}

/// One thing that happens to a log; `false` when it is over.
fn damage(log: &mut [u8], input: &mut Input<'_>) -> bool {
    let Some(kind) = input.byte() else {
        return false;
    };
    let block = usize::from(input.u16()) % CHANGED_BLOCKS;
    let offset = usize::from(input.u16()) % BLOCK_BYTES;
    let value = input.byte().unwrap_or(0);
    let start = block * BLOCK_BYTES;
    match kind % 4 {
        0 => log[start + offset] ^= value,
        1 => {
            // Head and entries are where the meaning is.
            log[start + offset % 512] = value;
            put_right(log, start);
        }
        2 => log[start..start + BLOCK_BYTES].fill(value),
        _ => {
            let from = usize::from(value) % CHANGED_BLOCKS * BLOCK_BYTES;
            log.copy_within(from..from + BLOCK_BYTES, start);
        }
    }
    true
}

/// Put the checksum of the structure that begins at `start` right, if there is one.
fn put_right(log: &mut [u8], start: usize) {
    let block = &log[start..start + BLOCK_BYTES];
    if start < LOG_HEADER_BLOCKS as usize * BLOCK_BYTES {
        seal(&mut log[start..start + BLOCK_BYTES]);
    } else if let Ok(header) = SpanHeader::peek(block) {
        let bytes = usize::from(header.control_blocks.get()) * BLOCK_BYTES;
        if let Some(control) = log.get_mut(start..start + bytes) {
            seal(control);
        }
    }
}

/// Bytes, taken one after another.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte().unwrap_or(0), self.byte().unwrap_or(0)])
    }
}

/// The volume whose log is replayed.
pub fn replay_config() -> hdcs_core::volume::VolumeConfig {
    hdcs_kit::volume::config(Persist::OnWrite)
}
