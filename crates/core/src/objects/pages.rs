//! Pages of the map that somebody waits for.
//!
//! A read, a fill or a copy that comes to a block whose page is not in memory asks for the page and steps aside; others
//! go on. When the page has come it stands in front of its queue again, and looks once more. That needs no pins: the cache
//! never has fewer pages than may come until its turn ([`super::map::cache`]).
//!
//! While the cache has room, a get brings the pages behind the one that is wanted, so that a volume that was just opened
//! warms up with few gets.

use alloc::vec::Vec;

use super::checkpoint::PageGet;
use super::io::{Action, StoreError, Stored};
use super::map::directory::Entry;
use super::{ObjectVolume, Purpose, turns};
use crate::base::error::IoError;

/// Bytes of the page that is wanted and of those behind it.
const WARM_BYTES: usize = 64 << 10;

/// Who waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// A read, or a question for extents.
    Read(u64),
    /// A block that was written in part.
    Fill(u64),
    /// Copying forward.
    Copy,
}

impl Waiter {
    const fn kind(self) -> turns::Kind {
        match self {
            Self::Read(_) => turns::Kind::Read,
            Self::Fill(_) => turns::Kind::Fill,
            Self::Copy => turns::Kind::Copy,
        }
    }
}

impl ObjectVolume {
    /// Wait for a page; false if it could not be asked for at present, so that nobody waits.
    pub(super) fn want_page(
        &mut self,
        page: u64,
        waiter: Waiter,
        actions: &mut Vec<Action>,
    ) -> bool {
        if let Some(waiters) = self.page_waiters.get_mut(&page) {
            if !waiters.contains(&waiter) {
                waiters.push(waiter);
            }
            return true;
        }
        let Some(entry) = self.map.directory.get(page) else {
            return false;
        };
        let pages = self.with_neighbours(page, entry);
        if !self.get_pages(pages, waiter.kind(), Purpose::Page, actions) {
            return false;
        }
        self.page_waiters.insert(page, alloc::vec![waiter]);
        true
    }

    /// A page, and what lies behind it in its object if there is room for more.
    fn with_neighbours(&self, page: u64, entry: Entry) -> Vec<(u64, Entry)> {
        let mut pages = alloc::vec![(page, entry)];
        let mut bytes = entry.bytes();
        let mut last = entry;
        let others = self.map.directory.iter(page + 1);
        for (page, next) in others {
            if !self.map.cache.has_room()
                || !last.is_followed_by(next)
                || bytes + next.bytes() > WARM_BYTES
            {
                break;
            }
            pages.push((page, next));
            bytes += next.bytes();
            last = next;
        }
        pages
    }

    /// A get of pages has ended.
    pub(super) fn page_ended(
        &mut self,
        get: &PageGet,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        // The store has answered: what is no good now will be no better the next time.
        let is_lost = !matches!(result, Err(StoreError::Io(_)));
        let parsed = self.parse_pages(get, result, actions);
        let pages = &get.pages;
        self.again = true;
        match parsed {
            Ok(contents) => {
                let is_first_lost = contents.first().is_some_and(Option::is_none);
                // The one that is wanted comes last, so that it is the last one to be given up.
                for (&(page, entry), content) in pages.iter().zip(contents).rev() {
                    let object = self.map_objects.get(entry.slot());
                    let is_current = object.is_some_and(|object| object.number == get.number)
                        && self.map.directory.get(page) == Some(entry);
                    if let Some(content) = content.filter(|_| is_current) {
                        self.map.cache.insert(page, entry, content);
                    }
                }
                if is_first_lost {
                    self.fail_page(get, true, IoError::Failed, actions);
                }
                for &(page, _) in pages {
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
        for waiter in self.page_waiters.remove(&page).unwrap_or_default() {
            self.fail_waiter(waiter, error, actions);
        }
    }

    fn wake_waiters(&mut self, page: u64) {
        // In front of the queue, the first one first.
        let waiters = self.page_waiters.remove(&page).unwrap_or_default();
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
