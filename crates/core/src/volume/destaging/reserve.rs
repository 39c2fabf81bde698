//! Memory of destage's own: what it reads the log with when the pool has none, so that it always goes on.

use alloc::rc::Rc;
use alloc::sync::Arc;

use crate::base::buf::{BufMut, Pool};
use crate::base::limits::DESTAGE_RESERVE_BYTES;
use crate::log::budget::IndexBudget;

/// Memory to read the log with where the pool has none.
#[derive(Debug)]
pub(super) struct Reserve {
    pool: Arc<Pool>,
    budget: Rc<IndexBudget>,
    /// It counts as kept by a backend that gives no answer.
    is_kept: bool,
}

impl Reserve {
    /// One, if there is one.
    pub(super) fn take(budget: &Rc<IndexBudget>) -> Option<Self> {
        budget
            .take_reserve(DESTAGE_RESERVE_BYTES as u64)
            .then(|| Self {
                pool: Pool::new(DESTAGE_RESERVE_BYTES),
                budget: Rc::clone(budget),
                is_kept: false,
            })
    }

    /// The backend gives no answer for what it has of it: others are to have another one.
    pub(super) fn keep(&mut self) {
        self.is_kept = self.is_kept || self.budget.keep_reserve(DESTAGE_RESERVE_BYTES as u64);
    }

    /// A buffer of it.
    pub(super) fn alloc(&self, bytes: usize) -> Option<BufMut> {
        self.pool.alloc(bytes)
    }

    /// Whether nothing of it is in use.
    pub(super) fn is_free(&self) -> bool {
        self.pool.free_bytes() == self.pool.total_bytes()
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        let bytes = DESTAGE_RESERVE_BYTES as u64;
        if self.is_kept {
            self.budget.give_kept_reserve(bytes);
        } else {
            self.budget.give_reserve(bytes);
        }
    }
}
