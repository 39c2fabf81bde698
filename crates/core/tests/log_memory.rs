//! What a volume takes of memory for its write log is no more than is reserved for that, whatever clients write.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use hdcs_core::base::io::{Request, RequestId, SectorRange};
use hdcs_core::base::limits::{SECTOR_BYTES, log_memory_bytes};
use hdcs_core::volume::{Event, Persist, VolumeConfig};
use hdcs_kit::volume::{BYTES, World};

const BLOCK: usize = 4096;
const SECTORS: u64 = (BYTES / SECTOR_BYTES) as u64;

thread_local! {
    /// Bytes that this thread has of the heap, and the most that it had since that was last noted.
    static HELD: Cell<[isize; 2]> = const { Cell::new([0; 2]) };
}

struct Counting;

fn count(bytes: isize) {
    let [held, most] = HELD.get();
    HELD.set([held + bytes, most.max(held + bytes)]);
}

// SAFETY: the system's allocator does everything, and counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // Large ones are moved by the kernel: old and new are not there at once.
        count(bytes as isize - layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A volume whose backend takes nothing.
fn stuck(persist: Persist, per_block: u64) -> World {
    let config = hdcs_kit::volume::config(persist);
    let config = VolumeConfig {
        log_entries_max: config.log_bytes / BLOCK as u64 * per_block,
        unpersisted_bytes_max: 1 << 30,
        resident_bytes_max: 0,
        ..config
    };
    let mut world = World::with(config, None);
    world.backend_silent = Some(Vec::new());
    world.flush_silent = Some(Vec::new());
    world
}

/// Ask for one thing after the other until the log takes no more; how many it took.
fn fill(world: &mut World, mut next: impl FnMut(&World, u64) -> Request) -> u64 {
    for number in 0..100_000 {
        let request = next(world, number);
        let id = RequestId(number);
        world.step(Event::Request { id, request });
        for _ in 0..1000 {
            if !world.replies.is_empty() {
                break;
            }
            let wakeup = world.volume.next_wakeup();
            world.now = world.now.max(wakeup.unwrap_or(world.now));
            world.step(Event::Poll);
        }
        if world.replies.is_empty() {
            return number;
        }
        for (_, result) in std::mem::take(&mut world.replies) {
            result.expect("nothing fails");
        }
    }
    unreachable!("a log is full at some time")
}

fn write(world: &World, start: u64, sectors: u64) -> Request {
    let range = SectorRange::new(start, sectors);
    let data = world.pool.alloc_for(range).unwrap().freeze();
    let fua = false;
    Request::Write { range, data, fua }
}

fn discard(start: u64, sectors: u64) -> Request {
    let range = SectorRange::new(start, sectors);
    Request::Discard { range, fua: false }
}

/// What clients may do that makes many small things of the log's blocks.
fn ask(pattern: &str, world: &World, number: u64, random: &mut fastrand::Rng) -> Request {
    let large = SECTORS / 2048;
    match pattern {
        "blocks at random" => write(world, random.u64(..SECTORS / 8) * 8, 8),
        "sectors at random" => write(world, random.u64(..SECTORS), 1),
        "sectors in order" => write(world, number * 2 % SECTORS, 1),
        "sectors within large writes" if number < large => write(world, number * 2048, 2048),
        "sectors within large writes" => write(world, (number - large) * 2 % SECTORS + 1, 1),
        "discards" => discard(number * 2 % SECTORS, 1),
        "discards within a large one" if number == 0 => discard(0, SECTORS),
        "discards within a large one" => {
            let start = number * 3 % SECTORS;
            if number.is_multiple_of(2) {
                discard(start, 1)
            } else {
                write(world, start, 1)
            }
        }
        other => unreachable!("{other}"),
    }
}

/// What opening a log that was full takes, which a crash has left.
fn opening_takes(world: &mut World) -> u64 {
    let other = stuck(Persist::OnWrite, 1).volume;
    drop(std::mem::replace(&mut world.volume, other));
    let before = HELD.get()[0];
    HELD.set([before; 2]);
    world.reopen();
    (HELD.get()[1] - before) as u64
}

const PATTERNS: [&str; 6] = [
    "blocks at random",
    "sectors at random",
    "sectors in order",
    "sectors within large writes",
    "discards",
    "discards within a large one",
];

#[test]
fn log_takes_no_more_memory_than_is_reserved() {
    let mut wrong = Vec::new();
    for pattern in PATTERNS {
        for persist in [Persist::OnWrite, Persist::OnFlush] {
            for per_block in [1, 4] {
                let mut random = fastrand::Rng::with_seed(7);
                let mut world = stuck(persist, per_block);
                let config = world.config.clone();
                let blocks = config.log_bytes / BLOCK as u64;
                let reserved = log_memory_bytes(config.log_bytes, config.log_entries_max);
                let before = HELD.get()[0] - blocks as isize * 4;
                HELD.set([HELD.get()[0]; 2]);
                fill(&mut world, |world, number| {
                    ask(pattern, world, number, &mut random)
                });
                let most = (HELD.get()[1] - before) as u64;
                let opening = opening_takes(&mut world);
                for (what, most) in [("full", most), ("opening", opening)] {
                    if most > reserved {
                        wrong.push((what, pattern, persist, per_block, most, reserved));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
