//! The local store of a volume in storage mode: a store of the volume's size between its write log and its
//! backend. What is destaged stays here, however much it is, until it is tiered out.
//!
//! ```text
//!              first write (filled from the backend)          tiered out
//!   absent ────────────────────────────────► dirty ─────────────────────► clean
//!     ▲  └── write-zeroes, discard ──► zero ──┘ ▲ └──── write-zeroes ──► zero │
//!     └────────── tiered out ───────────┘       └──────────── write ─────────┘
//! ```
//!
//! Data lies in place, so that overwriting costs one write however full the store is. The write log in
//! front makes torn writes harmless: what was written since the last flush is written again.
//!
//! Data may be encrypted (see [`encryption`]); the backend gets plaintext.
//!
//! Each sector of data has a checksum (see [`sums`]). It is compared with what is read for a client, for the
//! backend and for a scrub.
//!
//! A flush makes data and checksums durable, then the pages of the map that changed, then their copies and a superblock
//! that knows which pages there are, then answers. So one write that the device acknowledges and loses takes nothing of
//! the map back without a sign (see [`format::MapCheck`]). Tiering out copies the state of one moment: it begins when
//! nothing was written since a flush, a write to a block that is still to be copied waits until that was read, and
//! blocks become clean only when all of it is in the backend, which was flushed.
//!
//! Invariants:
//! 1. A page of the map never names data that is not durable. One of its two copies is whole at all
//!    times, and nothing is written to a page while its other copy is not durable. When a flush is answered both
//!    copies are, and the superblock that knows them.
//! 2. What is dirty is given up by nobody: it becomes clean only after a flush of the backend that began
//!    when all blocks of the tier had been written there.
//! 3. The backend is written only while the superblock says durably that it is between two states,
//!    unless its flushes are atomic.
//! 4. Writes under way never share a block, and nobody reads a block that is being written.
//! 5. Memory is bounded: two bits for each block, another three at most while tiering, a part of the checksums, and
//!    pools of fixed size, one of them for reads alone, so that however many reads wait, flushes and tiers go on.
//! 6. No byte that does not match its checksum is returned or written to the backend.
//! 7. One turn takes time by the number of pages of the map, and of blocks no more than a bounded number,
//!    however much is discarded or tiered out at once.
//! 8. While the backend is held, as the tier that was asked for has left it, it gets nothing but reads.
//! 9. With a cipher, no plaintext is written to the store, and no superblock or page of the map without its tag.
//! 10. The superblock never says a size that store or backend lack, and what a page says about blocks behind the end
//!     is not there once the local store has grown.
//!
//! A local store may get another size while it is used (see [`resize`]).
//!
//! Failure: a failed read or write of data ends its request with the error. If the map or a sync fails,
//! what is durable is unknown: nothing is made durable or tiered out any more until it is opened anew.
//! A failed backend ends a tier; it begins anew, of a later moment, after a pause.

mod commit;
mod encryption;
pub mod format;
pub mod map;
pub mod open;
mod patrol;
mod reads;
mod resize;
pub mod sizes;
mod store;
mod sums;
mod tier;
mod writes;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use map::{BlockState, Map};
use patrol::Patrol;
pub use patrol::Verified;
use reads::Reads;
use resize::Resize;
use store::{Purpose, Store};
pub use tier::TierState;
use tier::{Hold, Tier};
use writes::Writes;

use crate::base::buf::{Buf, BufMut};
use crate::base::cipher::KeyedCipher;
use crate::base::error::IoError;
use crate::base::io::{Completion, Done, Nanos, SectorRange, Token};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};

/// What the local store of a volume is.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Its size, as its superblock says, a multiple of a block. It may be larger than the volume after a crash, which
    /// is then asked for with [`Ask::Resize`] first.
    pub bytes: u64,
    /// UUID of the volume.
    pub volume: [u8; 16],
    /// Random number of the local store.
    pub home: u64,
    /// Random number of the write log in front of it.
    pub log: u64,
    /// Which key its data is encrypted with; zeroes: it is plain.
    pub data_key: [u8; 16],
    /// Sequence of the superblock.
    pub sequence: u64,
    /// Commits that the superblock counts.
    pub commits: u64,
    /// Whether the superblock says that the backend is between two states.
    pub between: bool,
    /// The write log under which its checksums hold ([`format::SUMS_UNTRUSTED`]: none).
    pub sums_log: u64,
    /// Memory for checksums.
    pub sums_bytes: usize,
    /// Whether what is written to the backend shows at a flush or a resize only, and then all of it. A tier shows as a
    /// whole then, if it needs no flush in between.
    pub backend_atomic: bool,
    /// A tier flushes the backend after so many blocks, since not every one can take any amount without: an atomic
    /// one only if the volume is larger than that.
    pub flush_every_blocks: u64,
    /// Blocks that become zero in one turn at most.
    pub turn_blocks: u64,
}

/// What is asked of it; offsets and lengths are multiples of 512.
#[derive(Debug)]
pub enum Ask {
    /// Fill the buffer.
    Read {
        /// From where.
        offset: u64,
        /// Returned filled.
        buf: BufMut,
    },
    /// Write buffers one after another.
    Write {
        /// To where.
        offset: u64,
        /// What.
        data: Vec<Buf>,
    },
    /// Make a range read as zeroes.
    Zero {
        /// From where.
        offset: u64,
        /// How much.
        bytes: u64,
    },
    /// Make completed writes durable.
    Flush,
    /// Have another size, with its store and its backend. Meanwhile, what is read and written lies below both sizes;
    /// anything else is refused.
    ///
    /// New blocks read as the backend's do, which are zeroes. What is cut off is gone, and not tiered out before:
    /// whoever wants that does it first. The local store's own size changes durably before its store and backend
    /// shrink, and after they have grown.
    ///
    /// It ends with [`Done::Written`] and the new size, or with an error and the old one. It fails if the backend is or
    /// is to be held, if another one is under way, and if the store or the backend cannot grow. It waits for a tier
    /// that an atomic backend would show a part of, and fails with that or if that is cancelled.
    ///
    /// From when a shrink writes its superblock nothing takes it back. It ends well even if the local store fails then:
    /// the next one is of either size, and is asked for the smaller one if it is larger. It ends well, too, if the
    /// backend or the store cannot be cut: that is done when it grows, or when it is asked for the size that it has.
    Resize {
        /// Multiple of a block.
        bytes: u64,
    },
}

impl Ask {
    /// Where what it touches ends, in bytes.
    fn end(&self) -> u64 {
        match self {
            Self::Read { offset, buf } => offset + buf.len() as u64,
            Self::Write { offset, data } => {
                offset + data.iter().map(|buf| buf.len() as u64).sum::<u64>()
            }
            Self::Zero { offset, bytes } => offset + bytes,
            Self::Flush | Self::Resize { .. } => 0,
        }
    }
}

/// What it wants done. Every action but the last three ends in a completion.
#[derive(Debug)]
pub enum Action {
    /// Fill `buf` from the store.
    StoreRead {
        /// Echoed.
        token: Token,
        /// Where in the store.
        offset: u64,
        /// Returned filled.
        buf: BufMut,
    },
    /// Write to the store.
    StoreWrite {
        /// Echoed.
        token: Token,
        /// Where in the store.
        offset: u64,
        /// Written one after another.
        data: Vec<Buf>,
    },
    /// Make completed writes to the store durable.
    StoreSync {
        /// Echoed.
        token: Token,
    },
    /// Fill `buf` from the backend.
    BackendRead {
        /// Echoed.
        token: Token,
        /// Where on the volume.
        offset: u64,
        /// Returned filled.
        buf: BufMut,
    },
    /// Write to the backend.
    BackendWrite {
        /// Echoed.
        token: Token,
        /// Where on the volume.
        offset: u64,
        /// What.
        data: Buf,
    },
    /// Make a range of the backend read as zeroes.
    BackendZero {
        /// Echoed.
        token: Token,
        /// Where on the volume.
        offset: u64,
        /// How much.
        bytes: u64,
    },
    /// Make completed writes to the backend durable.
    BackendFlush {
        /// Echoed.
        token: Token,
    },
    /// Have the store hold so many bytes: reserve what it lacks, durably at the next sync, and give back what is
    /// behind. One whose size is given, a device, is to have them.
    StoreResize {
        /// Echoed.
        token: Token,
        /// Bytes of the store.
        bytes: u64,
    },
    /// Have the backend end there, durably. What it grows by reads as zeroes; if it is that large, nothing changes.
    /// What is asked of it meanwhile lies below both sizes.
    BackendResize {
        /// Echoed.
        token: Token,
        /// Bytes of the volume.
        bytes: u64,
    },
    /// End what was asked.
    End(Completion),
    /// What came of an [`Event::Verify`].
    Verified(Token, Result<Verified, IoError>),
    /// A sector does not match its checksum or its tag; told once until it is written again.
    Damaged {
        /// Where on the volume, in bytes.
        offset: u64,
        /// Where in the store.
        store_offset: u64,
        /// Whether its checksum is right and its tag is not: somebody without the key has written it.
        is_forged: bool,
    },
}

/// What happens to it.
#[derive(Debug)]
pub enum Event {
    /// Something is asked of it.
    Submit {
        /// Echoed in [`Action::End`].
        token: Token,
        /// What.
        ask: Ask,
    },
    /// An action ended.
    Completed(Completion),
    /// Tier everything out that is dirty, as of a moment that is still to come. Goes on until it is done.
    Tier,
    /// The same, and then the backend stays as it is ([`TierState::Held`]) until [`Event::Release`]: no
    /// other tier begins. A tier that is under way does not count, since its moment was before.
    TierAndHold,
    /// The backend need not stay as it is any more, nor be held once a tier has ended.
    Release,
    /// Stop tiering out, and hold nothing. What the backend was given so far stays there.
    CancelTier,
    /// Compare what is here with its checksums, from a block on and as much as is read at once.
    Verify {
        /// Echoed in [`Action::Verified`].
        token: Token,
        /// From where.
        block: u64,
    },
}

/// Counters and gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Bytes of the volume that it is the local store of, as its superblock says.
    pub bytes: u64,
    /// Bytes that the backend lacks.
    pub dirty_bytes: u64,
    /// Bytes that read as zeroes, which the backend lacks.
    pub zero_bytes: u64,
    /// Since when the backend lacks something at the earliest: the moment of the last tier that has ended, or since
    /// that, when something became dirty while nothing was. What was dirty at the opening counts from then.
    pub owed_since: Option<Nanos>,
    /// Bytes that are the same as the backend's.
    pub clean_bytes: u64,
    /// Bytes that only the backend has.
    pub absent_bytes: u64,
    /// What tiering out is doing.
    pub tier: TierState,
    /// Whether nothing of a tier is under way, also of one that was given up.
    pub tier_rests: bool,
    /// Of a running tier: bytes of data in all, and still to go.
    pub tier_bytes: u64,
    /// See [`Self::tier_bytes`].
    pub tier_left_bytes: u64,
    /// Whether the backend is between two states because a tier has not ended.
    pub between: bool,
    /// Tiers that have ended well.
    pub tiers: u64,
    /// Bytes of data that were tiered out.
    pub tiered_bytes: u64,
    /// Bytes that tiers have zeroed in the backend.
    pub tiered_zero_bytes: u64,
    /// Why the last tier failed, if it did.
    pub tier_trouble: Option<IoError>,
    /// Why nothing is made durable any more, if that is so.
    pub failed: Option<IoError>,
    /// Bytes of data written to the store.
    pub data_written_bytes: u64,
    /// Bytes of the map and the superblock written to the store.
    pub map_written_bytes: u64,
    /// Bytes of checksums written to the store.
    pub sums_written_bytes: u64,
    /// Bytes of checksums in memory.
    pub sums_memory_bytes: u64,
    /// Bytes up to which these are not believed yet, since they are made anew: all of the volume's, and those
    /// that are done.
    pub sums_rebuild: Option<(u64, u64)>,
    /// Sectors that were read and did not match their checksums.
    pub damaged_reads: u64,
    /// Sectors that did not, and were not written since.
    pub damaged_sectors: u64,
    /// The first of them, in bytes on the volume.
    pub damaged_at: Option<u64>,
    /// Blocks that were filled from the backend because a write touched a part of them.
    pub filled_blocks: u64,
    /// Writes that waited for a block to be copied.
    pub waited_writes: u64,
}

/// See the module.
#[derive(Debug)]
pub struct LocalStore {
    store: Store,
    reads: Reads,
    writes: Writes,
    tier: Tier,
    patrol: Patrol,
    resize: Option<Resize>,
}

impl LocalStore {
    /// A local store that was read from its store, and what encrypts its data, by the numbers of sectors of the volume.
    ///
    /// # Panics
    /// Panics if only one of the superblock and the caller says that it is encrypted.
    pub fn new(config: Config, map: Map, cipher: Option<Arc<dyn KeyedCipher>>) -> Self {
        assert_eq!(
            cipher.is_some(),
            config.data_key != [0; 16],
            "a local store is encrypted if its superblock says so"
        );
        Self {
            store: Store::new(config, map, cipher),
            reads: Reads::new(),
            writes: Writes::new(),
            tier: Tier::default(),
            patrol: Patrol::default(),
            resize: None,
        }
    }

    /// The write log of the volume, which is being opened, writes these sectors again. To be said before anything is
    /// asked; what is behind the end does not count.
    pub fn unsettle(&mut self, sectors: SectorRange) {
        let within = sectors.intersect(SectorRange::between(0, self.end_block() * BLOCK_SECTORS));
        if within.is_empty() {
            return;
        }
        // The last life may have written a part of a generation, which is no state to tier out.
        self.writes.is_changed = true;
        self.store.sums.unsettle(within);
    }

    /// Take an event.
    pub fn step(&mut self, now: Nanos, event: Event, actions: &mut Vec<Action>) {
        self.store.now = now;
        match event {
            Event::Submit { token, ask } => self.submit(token, ask, actions),
            Event::Completed(completion) => self.completed(completion, actions),
            Event::Tier => self.tier.begin(&self.store),
            Event::TierAndHold => {
                self.tier.begin(&self.store);
                self.tier.hold = Hold::Wanted;
            }
            Event::Release => self.tier.hold = Hold::No,
            Event::CancelTier => self.tier.cancel(),
            Event::Verify { token, block } => self.patrol.ask(token, block),
        }
        self.poll(now, actions);
    }

    /// Go on with what is due.
    pub fn poll(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.store.now = now;
        self.store.turn_blocks = self.store.config.turn_blocks;
        self.writes
            .pump_zeroes(&mut self.store, &mut self.tier, actions);
        // Between two commits, if there are any.
        self.pump_resize(actions);
        self.pump_requests(actions);
        // What it waits for may have ended just now.
        self.pump_resize(actions);
        // What these want of it.
        self.store.pump_age();
        self.store
            .pump_commit(&mut self.writes, &mut self.tier, actions);
        self.store.pump_sums(actions);
        self.store.note_owed();
        self.check_invariants();
    }

    fn pump_requests(&mut self, actions: &mut Vec<Action>) {
        let end_block = self.patrol_end();
        let Self {
            store,
            reads,
            writes,
            tier,
            patrol,
            ..
        } = self;
        // A commit that ends may let a tier begin, before a write that waits; that order matters.
        store.pump_commit(writes, tier, actions);
        tier.pump(store, writes, actions);
        writes.pump_encryption(store, actions);
        let is_read = |blocks: &Range<u64>| Self::is_read(reads, patrol, blocks);
        writes.pump(store, tier, is_read, actions);
        tier.pump_copies(store, actions);
        reads.pump(store, writes, actions);
        patrol.pump(store, writes, end_block, actions);
    }

    /// When [`Self::poll`] is due.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        if self.patrol.goes_on || self.writes.is_zeroing() || self.is_cutting() {
            return Some(self.store.now);
        }
        let tier = self.tier.wakeup(self.store.now, &self.writes);
        let due = [tier, self.store.commit.age_wakeup()];
        due.into_iter().flatten().min()
    }

    /// Nothing is asked any more: begin nothing. What is under way ends.
    pub fn finish(&mut self) {
        self.tier.cancel();
        self.store.commit.stop_aging();
        self.finish_resize();
        self.patrol.stop();
    }

    /// The state of a block, and the end of the run of blocks in such a state.
    pub fn state_of(&self, block: u64, end: u64) -> (BlockState, u64) {
        let map = &self.store.map;
        let state = map.get(block);
        (state, map.run_end(block, end, |state| state))
    }

    /// Actions that have not ended.
    pub fn under_way(&self) -> usize {
        self.store.in_flight.len()
    }

    /// Counters and gauges.
    pub fn status(&self) -> Status {
        let store = &self.store;
        let bytes = |state| store.map.count(state) * BLOCK_BYTES as u64;
        let (dirty_bytes, zero_bytes) = store.owed_bytes();
        let (tier_bytes, tier_left_bytes) = self.tier.progress();
        let (sums, believed) = (&store.sums, store.sums.trusted_until);
        Status {
            bytes: store.config.bytes,
            sums_memory_bytes: sums.memory_bytes(),
            sums_rebuild: (believed < store.map.blocks())
                .then(|| (store.config.bytes, believed * BLOCK_BYTES as u64)),
            damaged_sectors: sums.damaged.len() as u64,
            damaged_at: sums
                .damaged
                .first()
                .map(|sector| sector * SECTOR_BYTES as u64),
            dirty_bytes,
            zero_bytes,
            owed_since: store.owed_since,
            clean_bytes: bytes(BlockState::Clean),
            absent_bytes: bytes(BlockState::Absent),
            tier: self.tier.state(),
            tier_rests: self.tier.is_at_rest(),
            tier_bytes,
            tier_left_bytes,
            between: store.commit.is_between(),
            tier_trouble: self.tier.trouble,
            failed: store.failed,
            ..store.status
        }
    }

    fn submit(&mut self, token: Token, ask: Ask, actions: &mut Vec<Action>) {
        if ask.end() > self.end_block() * BLOCK_BYTES as u64 {
            return end(actions, token, Err(IoError::Failed));
        }
        match ask {
            Ask::Read { offset, buf } => self.reads.read(token, offset, buf, &mut self.store),
            Ask::Write { offset, data } => {
                self.writes.write(token, offset, data, &mut self.store);
            }
            Ask::Zero { offset, bytes } => {
                self.writes.zero(token, offset, bytes, &mut self.store);
            }
            Ask::Flush => match self.store.failed {
                None => self.store.commit.waiting.push(token),
                Some(error) => end(actions, token, Err(error)),
            },
            Ask::Resize { bytes } => self.ask_to_resize(token, bytes, actions),
        }
    }

    fn completed(&mut self, completion: Completion, actions: &mut Vec<Action>) {
        let Completion { token, result } = completion;
        let purpose = self.store.in_flight.remove(&token.0);
        let Self {
            store,
            reads,
            writes,
            tier,
            patrol,
            ..
        } = self;
        let moved = match purpose.expect("an action ends once") {
            Purpose::Read(id) => return reads.ended(id, result, store, actions),
            Purpose::Fill { write, part, tail } => {
                let place = (write, part, tail);
                return writes.filled(place, result, store, tier, actions);
            }
            Purpose::Write(id) => return writes.written(id, result, store, tier, actions),
            Purpose::Commit => store.commit_moved(result.map(drop), actions),
            Purpose::Superblock => store.superblock_moved(result.map(drop), actions),
            Purpose::CopyRead(id) => return tier.copy_was_read(id, result, store, actions),
            Purpose::CopyWrite(id) => return tier.copied(id, result.map(drop), store),
            Purpose::TierFlush => return tier.flushed(result.map(drop), store.now),
            Purpose::SumsRead(page) => {
                if let Err((blocks, error)) = store.sums_were_read(page, result) {
                    self.refuse_without_sums(&blocks, error, actions);
                }
                return;
            }
            Purpose::SumsWrite(page) => store.sums_were_written(page, result, actions),
            Purpose::Patrol(id) => return patrol.ended(id, result, store, actions),
            Purpose::Resize => return self.resize_moved(result.map(drop), actions),
        };
        if let Err(error) = moved {
            self.fail(error, actions);
        }
    }

    /// A block of the table of checksums cannot be read, so nothing can be done with these blocks.
    fn refuse_without_sums(
        &mut self,
        blocks: &Range<u64>,
        error: IoError,
        actions: &mut Vec<Action>,
    ) {
        self.reads.refuse(blocks, error, actions);
        self.writes.refuse(blocks, error, actions);
        self.tier.refuse(blocks, error, self.store.now);
        self.patrol.refuse(error, actions);
    }

    /// What is durable is not known any more.
    fn fail(&mut self, error: IoError, actions: &mut Vec<Action>) {
        self.store.failed = Some(error);
        for token in self.store.commit.give_up() {
            end(actions, token, Err(error));
        }
        self.give_up_resize(error, actions);
        self.tier.give_up();
    }

    /// Whether one of these blocks is being read for somebody who compares it with its checksum.
    fn is_read(reads: &Reads, patrol: &Patrol, blocks: &Range<u64>) -> bool {
        reads.reads(blocks) || patrol.reads(blocks)
    }

    fn check_invariants(&self) {
        let is_read = |blocks: &Range<u64>| Self::is_read(&self.reads, &self.patrol, blocks);
        self.writes.check_invariants(is_read);
        self.tier.check_invariants();
        self.check_resize();
    }
}

fn end(actions: &mut Vec<Action>, token: Token, result: Result<Done, IoError>) {
    actions.push(Action::End(Completion { token, result }));
}
