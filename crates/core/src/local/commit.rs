//! Making what was written durable: data and its checksums, then the map, then its copies.
//!
//! ```text
//!   idle ──► writing checksums ──► syncing ──► writing pages ──► syncing pages ──► writing copies and superblock
//!                                     │ └── only the superblock changes ──────────────────────────────┘  │
//!                                     └── nothing changed: answered ──► idle                             ▼
//!                                                                             idle ◄── answered ◄── syncing copies
//! ```
//!
//! A page is written as it was when the commit began. Its copy is written when the page is durable, so that a power cut
//! tears one of them at most, and the flush is answered when both are, so that a write that the device has
//! acknowledged and lost takes back neither. The superblock that goes with the copies knows which pages there are: if a
//! power cut tears the one of a page whose other one was lost so, the next opening notices.
//!
//! What the superblock says of the backend, the checksums and the size is durable when two of them say it, for the
//! same reason.
//!
//! A commit begins with a flush, with what else wants one (a tier, a change of size), and when the map has changed for
//! [`HOME_UNCOMMITTED_AGE_MS`] and nobody has flushed: so what a kill of the process takes back is young.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use zerocopy::IntoBytes;

use super::format::{HOME_BETWEEN, HomePage, HomeSuperblock, PAGE_BLOCKS, PAGE_STATE_BYTES};
use super::map::Map;
use super::store::{Purpose, Store};
use super::tier::Tier;
use super::writes::Writes;
use super::{Action, end};
use crate::base::error::IoError;
use crate::base::io::{Done, Nanos, Token};
use crate::base::limits::{BLOCK_BYTES, HOME_UNCOMMITTED_AGE_MS};

/// Writes of pages under way at most.
const PAGE_WRITES_MAX: usize = 32;
/// See [`HOME_UNCOMMITTED_AGE_MS`].
const AGE_MAX: Nanos = Nanos::from_millis(HOME_UNCOMMITTED_AGE_MS);

/// Where a commit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Sums,
    Syncing,
    Pages,
    SyncingPages,
    Copies,
    SyncingCopies,
}

/// What changes in the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Root {
    /// The backend is between two states.
    between: bool,
    /// The log under which the checksums hold.
    sums_log: u64,
    /// The size of the local store.
    bytes: u64,
}

/// The commit that is under way, and what waits for the next one.
#[derive(Debug)]
pub(super) struct Commit {
    stage: Stage,
    /// Flushes for the next one.
    pub waiting: Vec<Token>,
    /// Flushes that this one ends.
    tokens: Vec<Token>,
    pages: BTreeSet<u32>,
    /// Pages that changed since it began, as they were then.
    kept: BTreeMap<u32, Box<[u8; PAGE_STATE_BYTES]>>,
    /// Pages that are not written yet in this stage.
    to_write: Vec<u32>,
    in_flight: usize,
    /// Commits begun, and commits that were answered.
    pub begun: u64,
    pub done: u64,
    /// Something besides a flush wants one.
    pub wanted: bool,
    /// Since when the map has changed without a commit, and whether that matters: not once the local store is to end.
    changed_since: Option<Nanos>,
    ages: bool,
    sequence: u64,
    /// Of the last commit that has written a superblock.
    pub number: u64,
    /// What both superblocks say, what the last one says, what it is to say, and what is being written.
    durable: Root,
    said: Root,
    wants: Root,
    root: Root,
    superblock_written: bool,
}

impl Commit {
    pub fn new(config: &super::Config) -> Self {
        let root = Root {
            between: config.between,
            sums_log: config.sums_log,
            bytes: config.bytes,
        };
        Self {
            stage: Stage::Idle,
            waiting: Vec::new(),
            tokens: Vec::new(),
            pages: BTreeSet::new(),
            kept: BTreeMap::new(),
            to_write: Vec::new(),
            in_flight: 0,
            begun: 0,
            done: 0,
            wanted: false,
            changed_since: None,
            ages: true,
            sequence: config.sequence,
            number: config.commits,
            durable: root,
            said: root,
            wants: root,
            root,
            superblock_written: false,
        }
    }

    /// Whether the superblock says durably that the backend is between two states.
    pub fn is_between(&self) -> bool {
        self.durable.between && self.said.between
    }

    /// Have it say so, or not any more.
    pub fn set_between(&mut self, between: bool) {
        self.wants.between = between;
    }

    /// Have it say that the checksums hold under a log, once they are durable.
    pub fn believe(&mut self, log: u64) {
        self.wants.sums_log = log;
    }

    /// Have it say another size, once what has changed by now is durable.
    pub fn set_bytes(&mut self, bytes: u64) {
        self.wants.bytes = bytes;
    }

    /// Whether it says so durably.
    pub fn has_bytes(&self, bytes: u64) -> bool {
        self.durable.bytes == bytes
    }

    /// Whether nothing of one is under way.
    pub fn is_idle(&self) -> bool {
        self.stage == Stage::Idle
    }

    /// Whether a flush waits for nothing but to begin.
    pub fn is_due(&self) -> bool {
        self.stage == Stage::Idle && !self.waiting.is_empty()
    }

    /// Whether the superblock has to be written, whatever pages change.
    fn changes_root(&self) -> bool {
        self.wants != self.durable || self.wants != self.said
    }

    /// A block is about to change; what is being written has it as it was.
    pub fn keep(&mut self, map: &Map, block: u64) {
        let page = (block / PAGE_BLOCKS) as u32;
        if self.stage != Stage::Idle && self.pages.contains(&page) {
            let kept = || Box::new(*map.states(page));
            self.kept.entry(page).or_insert_with(kept);
        }
    }

    /// Nothing is committed any more because it is old.
    pub fn stop_aging(&mut self) {
        self.ages = false;
        self.changed_since = None;
    }

    /// When something that nobody has flushed is old enough to be committed.
    pub fn age_wakeup(&self) -> Option<Nanos> {
        let since = self.changed_since.filter(|_| self.stage == Stage::Idle)?;
        Some(since.plus(AGE_MAX))
    }

    /// Nothing is made durable any more; the flushes that wait.
    pub fn give_up(&mut self) -> Vec<Token> {
        let mut tokens = core::mem::take(&mut self.tokens);
        tokens.append(&mut self.waiting);
        tokens
    }
}

impl Store {
    /// Want a commit when what has changed is old.
    pub(super) fn pump_age(&mut self) {
        let commit = &mut self.commit;
        if self.map.changed.is_empty() || self.failed.is_some() || !commit.ages {
            commit.changed_since = None;
            return;
        }
        let since = *commit.changed_since.get_or_insert(self.now);
        if commit.stage == Stage::Idle && self.now >= since.plus(AGE_MAX) {
            commit.wanted = true;
            commit.changed_since = None;
        }
    }

    /// Begin or go on with a commit.
    pub(super) fn pump_commit(
        &mut self,
        writes: &mut Writes,
        tier: &mut Tier,
        actions: &mut Vec<Action>,
    ) {
        if self.failed.is_some() {
            return;
        }
        if self.commit.stage == Stage::Idle {
            let commit = &self.commit;
            let is_wanted = commit.wanted || commit.changes_root();
            if (commit.waiting.is_empty() && !is_wanted) || tier.awaits_writes(self, writes) {
                return;
            }
            let commit = &mut self.commit;
            commit.wanted = false;
            commit.begun += 1;
            commit.stage = Stage::Sums;
            commit.tokens = core::mem::take(&mut commit.waiting);
            // A commit that no flush asked for may be in mid-generation.
            if !commit.tokens.is_empty() && !writes.any_begun() {
                writes.is_changed = false;
                tier.take_moment_of_flush(self);
            }
            let commit = &mut self.commit;
            commit.pages = core::mem::take(&mut self.map.changed);
            commit.root = commit.wants;
            self.sums.begin_commit();
            self.sums_are_written(actions);
        }
        if matches!(self.commit.stage, Stage::Pages | Stage::Copies) {
            self.write_pages(actions);
        }
    }

    /// Once the checksums are written, they are made durable with the data.
    pub(super) fn sums_are_written(&mut self, actions: &mut Vec<Action>) {
        let is_all = self.sums.is_committed();
        if self.commit.stage == Stage::Sums && is_all && self.failed.is_none() {
            self.commit.stage = Stage::Syncing;
            let token = self.token(Purpose::Commit);
            actions.push(Action::StoreSync { token });
        }
    }

    fn write_pages(&mut self, actions: &mut Vec<Action>) {
        let copy = usize::from(self.commit.stage == Stage::Copies);
        while self.commit.in_flight < PAGE_WRITES_MAX
            && let Some(&page) = self.commit.to_write.last()
        {
            let Some(mut buf) = self.pool.alloc(BLOCK_BYTES) else {
                return;
            };
            self.commit.to_write.pop();
            self.commit.in_flight += 1;
            let kept = self.commit.kept.get(&page);
            let states = kept.map_or(self.map.states(page), |kept| kept);
            let (home, log) = (self.config.home, self.config.log);
            let generation = self.map.generation(page);
            let sealed = HomePage::sealed(home, log, generation, page.into(), states);
            let sealed = sealed.tagged(self.keys());
            buf.copy_from_slice(sealed.as_bytes());
            self.status.map_written_bytes += BLOCK_BYTES as u64;
            let token = self.token(Purpose::Commit);
            actions.push(Action::StoreWrite {
                token,
                offset: self.layout().page_offset(page.into(), copy),
                data: vec![buf.freeze()],
            });
        }
        if copy == 1
            && !self.commit.superblock_written
            && let Some(mut buf) = self.pool.alloc(BLOCK_BYTES)
        {
            self.commit.superblock_written = true;
            self.commit.in_flight += 1;
            self.commit.sequence += 1;
            let (sequence, root) = (self.commit.sequence, self.commit.root);
            let flags = if root.between { HOME_BETWEEN } else { 0 };
            let super::Config {
                volume,
                home,
                data_key,
                ..
            } = self.config;
            let Root {
                sums_log, bytes, ..
            } = root;
            // Those that it is about to have, or to cut off, as well.
            let blocks = bytes / BLOCK_BYTES as u64;
            let digest = self.map.digest_of(blocks, self.new_generation);
            let sealed = HomeSuperblock::sealed(volume, home, sequence, bytes, flags, sums_log)
                .encrypted(data_key)
                .counting(self.commit.number, digest)
                .tagged(self.keys());
            buf.copy_from_slice(sealed.as_bytes());
            self.status.map_written_bytes += BLOCK_BYTES as u64;
            let token = self.token(Purpose::Superblock);
            actions.push(Action::StoreWrite {
                token,
                offset: sealed.place(),
                data: vec![buf.freeze()],
            });
        }
    }

    /// A sync or the write of a page ended; if it failed, what is durable is not known any more.
    pub(super) fn commit_moved(
        &mut self,
        result: Result<(), IoError>,
        actions: &mut Vec<Action>,
    ) -> Result<(), IoError> {
        result?;
        if self.failed.is_some() {
            return Ok(());
        }
        match self.commit.stage {
            Stage::Idle | Stage::Sums => unreachable!("nothing of a commit is under way"),
            Stage::Syncing => {
                let commit = &mut self.commit;
                let root = commit.root;
                if commit.pages.is_empty() && root == commit.durable && root == commit.said {
                    commit.stage = Stage::Idle;
                    self.answer_flushes(actions);
                    return Ok(());
                }
                commit.number += 1;
                for &page in &commit.pages {
                    self.map.begin_write(page, commit.number);
                }
                commit.superblock_written = false;
                commit.to_write = commit.pages.iter().rev().copied().collect();
                commit.stage = if commit.pages.is_empty() {
                    Stage::Copies
                } else {
                    Stage::Pages
                };
            }
            Stage::Pages | Stage::Copies => {
                self.commit.in_flight -= 1;
                self.pages_are_written(actions);
            }
            Stage::SyncingPages => {
                let commit = &mut self.commit;
                commit.to_write = commit.pages.iter().rev().copied().collect();
                commit.stage = Stage::Copies;
            }
            Stage::SyncingCopies => {
                let commit = &mut self.commit;
                let root = commit.root;
                let before = core::mem::replace(&mut commit.said, root);
                if before == root {
                    commit.durable = root;
                }
                commit.durable.between &= root.between;
                commit.pages.clear();
                commit.kept.clear();
                commit.stage = Stage::Idle;
                self.answer_flushes(actions);
            }
        }
        Ok(())
    }

    /// The write of the superblock ended, as above.
    pub(super) fn superblock_moved(
        &mut self,
        result: Result<(), IoError>,
        actions: &mut Vec<Action>,
    ) -> Result<(), IoError> {
        result?;
        self.commit.in_flight -= 1;
        if self.failed.is_none() {
            self.pages_are_written(actions);
        }
        Ok(())
    }

    fn pages_are_written(&mut self, actions: &mut Vec<Action>) {
        let commit = &mut self.commit;
        let next = match commit.stage {
            Stage::Copies if commit.superblock_written => Stage::SyncingCopies,
            Stage::Pages => Stage::SyncingPages,
            _ => return,
        };
        if commit.in_flight == 0 && commit.to_write.is_empty() {
            commit.stage = next;
            let token = self.token(Purpose::Commit);
            actions.push(Action::StoreSync { token });
        }
    }

    fn answer_flushes(&mut self, actions: &mut Vec<Action>) {
        self.commit.done = self.commit.begun;
        for token in core::mem::take(&mut self.commit.tokens) {
            end(actions, token, Ok(Done::Written));
        }
    }
}
