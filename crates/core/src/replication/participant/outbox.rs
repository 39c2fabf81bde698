//! Messages to one member, in order, with what goes with them.
//!
//! Some wait for their data to be read from the log; those behind them wait along, as a link keeps its order. Who does not
//! listen is given no more than [`MESSAGES_MAX`] messages and [`BYTES_MAX`]; what it needs later is read from the log.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::base::buf::Buf;
use crate::base::limits::BLOCK_BYTES;
use crate::replication::message::Message;

/// Messages that wait for one member at most.
const MESSAGES_MAX: usize = 64;
/// Bytes of spans among them, of those that come after the first.
const BYTES_MAX: usize = 4 << 20;

#[derive(Debug)]
struct Waiting {
    message: Message,
    /// `None`: it is being read.
    data: Option<Vec<Buf>>,
    bytes: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Tells it from those that the member had before: what was read for them does not go with its messages.
    life: u64,
    waiting: VecDeque<Waiting>,
    bytes: usize,
    /// Messages that went.
    gone: u64,
}

impl Outbox {
    /// An empty one.
    pub(super) fn new(life: u64) -> Self {
        Self {
            life,
            waiting: VecDeque::new(),
            bytes: 0,
            gone: 0,
        }
    }

    /// Which one it is.
    pub(super) fn life(&self) -> u64 {
        self.life
    }

    /// Whether it takes one more message.
    pub(super) fn takes_more(&self) -> bool {
        self.waiting.len() < MESSAGES_MAX && self.bytes < BYTES_MAX
    }

    /// A message with all its data.
    pub(super) fn push(&mut self, message: Message, data: Vec<Buf>) {
        let bytes = data.iter().map(|part| part.len()).sum();
        self.bytes += bytes;
        self.waiting.push_back(Waiting {
            message,
            data: Some(data),
            bytes,
        });
    }

    /// A message whose data, of so many blocks, is still to be read. Returns its place.
    pub(super) fn push_unread(&mut self, message: Message, blocks: u32) -> u64 {
        let bytes = blocks as usize * BLOCK_BYTES;
        self.bytes += bytes;
        self.waiting.push_back(Waiting {
            message,
            data: None,
            bytes,
        });
        self.gone + self.waiting.len() as u64 - 1
    }

    /// The data of the message at this place was read.
    pub(super) fn fill(&mut self, place: u64, data: Vec<Buf>) {
        let index = place.checked_sub(self.gone).map(|index| index as usize);
        if let Some(waiting) = index.and_then(|index| self.waiting.get_mut(index)) {
            waiting.data = Some(data);
        }
    }

    /// The next message, if its data is there.
    pub(super) fn front(&self) -> Option<(&Message, &[Buf])> {
        let first = self.waiting.front()?;
        Some((&first.message, first.data.as_ref()?))
    }

    /// It went.
    pub(super) fn pop(&mut self) {
        if let Some(first) = self.waiting.pop_front() {
            self.bytes -= first.bytes;
            self.gone += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buf::Pool;

    #[test]
    fn what_is_being_read_holds_up_what_comes_behind_it() {
        let pool = Pool::new(1 << 20);
        let data = || Vec::from([pool.alloc(BLOCK_BYTES).unwrap().freeze()]);
        let mut outbox = Outbox::new(1);
        outbox.push(Message::Join, data());
        outbox.pop();
        let place = outbox.push_unread(Message::Attach, 1);
        outbox.push(Message::Join, data());
        assert!(outbox.front().is_none());
        outbox.fill(place, data());
        assert_eq!(outbox.front().unwrap().0, &Message::Attach);
        outbox.pop();
        assert_eq!(outbox.front().unwrap().0, &Message::Join);
        outbox.pop();
        assert_eq!(outbox.bytes, 0);
        assert!(outbox.takes_more());
    }

    #[test]
    fn who_does_not_listen_is_given_no_more_than_the_bound() {
        let mut outbox = Outbox::new(1);
        let mut count = 0;
        while outbox.takes_more() {
            outbox.push_unread(Message::Attach, 512);
            count += 1;
        }
        assert_eq!(count, BYTES_MAX / (512 * BLOCK_BYTES));
    }
}
