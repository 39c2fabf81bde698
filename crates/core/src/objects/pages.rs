//! Pages of the map that came, or did not, and who waits for them.

use alloc::vec::Vec;

use super::ObjectVolume;
use super::block_store::Waiter;
use super::gets::PageGet;
use super::io::{Action, StoreError, Stored};
use super::port::Context;
use crate::base::error::IoError;

impl ObjectVolume {
    /// A get of pages has ended.
    pub(super) fn page_ended(
        &mut self,
        get: &PageGet,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        // The store has answered: what is no good now will be no better the next time.
        let is_lost = !matches!(result, Err(StoreError::Io(_)));
        let parsed = self.store.pages_ended(
            get,
            result,
            &mut Context::new(&mut self.port, &self.manifest, actions),
        );
        self.port.again = true;
        match parsed {
            Ok(contents) => {
                if !self.store.keep_pages(get, contents) {
                    self.fail_page(get, true, IoError::Failed, actions);
                }
                for &(page, _) in &get.pages {
                    self.wake_waiters(page);
                }
            }
            Err(error) => self.fail_page(get, is_lost, error, actions),
        }
    }

    /// The page for which a get was begun did not come.
    fn fail_page(
        &mut self,
        get: &PageGet,
        is_lost: bool,
        error: IoError,
        actions: &mut Vec<Action>,
    ) {
        let page = get.pages.first().map_or(0, |&(page, _)| page);
        if is_lost {
            self.leave_where_they_are(page);
        }
        for waiter in self.store.take_waiters(page) {
            self.fail_waiter(waiter, error, actions);
        }
    }

    fn wake_waiters(&mut self, page: u64) {
        // In front of the queue, the first one first.
        let waiters = self.store.take_waiters(page);
        for waiter in waiters.into_iter().rev() {
            match waiter {
                Waiter::Read(id) => self.read_queue.push_front(id),
                Waiter::Fill(block) => self.fill_queue.push_front(block),
                Waiter::Copy => {}
            }
        }
    }

    fn fail_waiter(&mut self, waiter: Waiter, error: IoError, actions: &mut Vec<Action>) {
        match waiter {
            Waiter::Read(id) => self.fail_read(id, error, actions),
            Waiter::Fill(block) => self.fail_fill(block, error, actions),
            Waiter::Copy => self.fail_collecting(),
        }
    }
}
