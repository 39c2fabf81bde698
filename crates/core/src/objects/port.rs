//! The side of the volume that faces the store: what is under way, when what failed is tried again, and what one turn
//! may still do.
//!
//! ```text
//!  issue ──► under way ──event──► ended
//!  back off ──► pause, twice as long each time ──poll──► may try ──went well──► the shortest pause
//! ```
//!
//! Invariants:
//! 1. A token names one action until that ends. Requests that wait have numbers from the same row.
//! 2. During a pause nothing is put, deleted or looked for that failed before; reads go on.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::format::Manifest;
use super::io::{Action, Kind, Name};
use super::{Stats, collect, gets, open, snapshots};
use crate::base::buf::{Buf, Pool};
use crate::base::io::{Nanos, Token};
use crate::base::limits::OBJECT_CONTROL_BYTES;

/// First and longest pause after a failure of the store.
const PAUSE_MIN: Nanos = Nanos::from_millis(100);
const PAUSE_MAX: Nanos = Nanos::from_millis(5000);
/// Pages of the map that one turn merges; looking for some costs as much as so many.
pub(super) const TURN_PAGES_MAX: usize = 64;

/// Why something was asked of the store.
#[derive(Debug)]
pub(super) enum Purpose {
    Open(open::Part),
    PutData(u64),
    PutMap,
    PutManifest,
    CheckManifest,
    CheckLength,
    Probe,
    Snapshots(snapshots::Part),
    Read {
        request: u64,
        fetch: gets::Fetch,
    },
    Fill {
        block: u64,
        fetch: gets::Fetch,
    },
    Copy(collect::Copy),
    /// Which blocks a data object held.
    Table(u64),
    /// Pages of the map that somebody waits for, and such that are merged.
    Page(gets::PageGet),
    Merge(gets::PageGet),
    Frames(u64),
    Scan,
    Delete(Name),
}

/// What may still be done in this turn of what is done in bounded pieces.
#[derive(Debug, Default)]
pub(super) struct Turn {
    pages_left: usize,
    /// There is more for the next one.
    pub(super) has_more: bool,
}

impl Turn {
    pub(super) fn is_spent(&self) -> bool {
        self.pages_left == 0
    }

    pub(super) fn spend(&mut self, pages: usize) {
        self.pages_left = self.pages_left.saturating_sub(pages);
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Port {
    /// The time of the present step.
    pub(super) now: Nanos,
    /// Memory for everything but blocks and what is read of data objects and of the map.
    pub(super) control_pool: Arc<Pool>,
    pub(super) stats: Stats,
    /// Something changed that the rest of the machine has to see.
    pub(super) again: bool,
    pub(super) turn: Turn,
    under_way: BTreeMap<u64, Purpose>,
    last_id: u64,
    retry_at: Option<Nanos>,
    pause: Nanos,
    /// Whether somebody may take over what this one has: not of a snapshot.
    has_owner: bool,
    /// Whether it is being looked at who the owner is.
    is_probing: bool,
}

impl Port {
    /// Nothing is under way.
    pub(super) fn new(has_owner: bool) -> Self {
        Self {
            now: Nanos::default(),
            control_pool: Pool::new(OBJECT_CONTROL_BYTES),
            stats: Stats::default(),
            again: false,
            turn: Turn::default(),
            under_way: BTreeMap::new(),
            last_id: 0,
            retry_at: None,
            pause: PAUSE_MIN,
            has_owner,
            is_probing: false,
        }
    }

    /// A poll begins.
    pub(super) fn begin_turn(&mut self, now: Nanos, has_more: bool) {
        self.now = now;
        self.retry_at = self.retry_at.filter(|&at| now < at);
        self.turn = Turn {
            pages_left: TURN_PAGES_MAX,
            has_more,
        };
    }

    /// The number of an action, or of a request.
    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// An action begins.
    pub(super) fn issue(&mut self, purpose: Purpose) -> Token {
        let id = self.next_id();
        self.under_way.insert(id, purpose);
        Token(id)
    }

    /// An action has ended.
    pub(super) fn ended(&mut self, token: Token) -> Purpose {
        let purpose = self.under_way.remove(&token.0);
        purpose.expect("the store ends an action once")
    }

    /// An action that was not asked for yet never will be.
    pub(super) fn forget(&mut self, token: Token) {
        self.under_way.remove(&token.0);
    }

    /// What is under way.
    pub(super) fn under_way(&self) -> impl ExactSizeIterator<Item = &Purpose> {
        self.under_way.values()
    }

    /// A put or a piece of housekeeping failed: pause before the next attempt.
    pub(super) fn back_off(&mut self) {
        if self.retry_at.is_none() {
            self.retry_at = Some(self.now.plus(self.pause));
            self.pause = Nanos(self.pause.0 * 2).min(PAUSE_MAX);
        }
    }

    /// Whether what failed may be tried again.
    pub(super) fn may_try(&self) -> bool {
        self.retry_at.is_none()
    }

    /// When it may.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        self.retry_at
    }

    /// Nothing is tried again any more, so there is nothing to wait for.
    pub(super) fn stop_trying(&mut self) {
        self.retry_at = None;
    }

    /// The store works.
    pub(super) fn went_well(&mut self) {
        self.pause = PAUSE_MIN;
    }

    /// An object that must be there is not: damage, or somebody else is the owner. Look for a manifest after this one.
    pub(super) fn probe(&mut self, sequence: u64, actions: &mut Vec<Action>) {
        if self.is_probing || !self.has_owner {
            return;
        }
        self.is_probing = true;
        self.list_manifests(Purpose::Probe, sequence, actions);
    }

    pub(super) fn probe_ended(&mut self) {
        self.is_probing = false;
    }

    /// List the manifests of this volume after that with a number.
    pub(super) fn list_manifests(
        &mut self,
        purpose: Purpose,
        sequence: u64,
        actions: &mut Vec<Action>,
    ) {
        self.stats.lists += 1;
        let token = self.issue(purpose);
        actions.push(Action::List {
            token,
            volume: 0,
            prefix: Kind::Manifest.prefix(),
            after: alloc::format!("{}", Name::own(Kind::Manifest, sequence)),
        });
    }

    /// The bytes of a manifest; `None` if there is no memory for them at present.
    pub(super) fn encode(&self, manifest: &Manifest) -> Option<Buf> {
        let mut data = self.control_pool.alloc(manifest.encoded_bytes())?;
        manifest.write(&mut data);
        Some(data.freeze())
    }
}

/// What a machine works with in one step, beside its own state and that of others: the store, what the newest manifest
/// says, and where effects go.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) port: &'a mut Port,
    pub(super) manifest: &'a Manifest,
    pub(super) actions: &'a mut Vec<Action>,
}

impl<'a> Context<'a> {
    pub(super) fn new(
        port: &'a mut Port,
        manifest: &'a Manifest,
        actions: &'a mut Vec<Action>,
    ) -> Self {
        Self {
            port,
            manifest,
            actions,
        }
    }
}
