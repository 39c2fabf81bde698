//! Requests and their answers, in both directions of a link.
//!
//! Invariants:
//! 1. A request that was taken ends exactly once: answered, timed out, or disconnected.
//! 2. What a request costs stays spent until its answer came, however late; the other side may hold memory for it until
//!    then. So a late answer is known as one, and an answer that is neither expected nor late is the peer's mistake.
//! 3. A request whose answer has begun to come does not time out any more: its buffer is in use.
//! 4. Requests that are not answered are [`WIRE_REQUESTS_MAX`] at most, urgent ones among them [`WIRE_URGENT_MAX`].

use std::collections::{BTreeMap, BTreeSet};

use hdcs_core::base::buf::BufMut;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{WIRE_REQUESTS_MAX, WIRE_URGENT_MAX, WIRE_URGENT_META_BYTES_MAX};
use hdcs_core::wire::{FRAME_HEADER_BYTES, FRAME_URGENT};

use crate::credit::{Credit, Grants};
use crate::error::{SendError, Violation};
use crate::frame::Head;

/// Whether a request is urgent.
pub fn is_urgent(head: &Head) -> bool {
    head.flags & FRAME_URGENT != 0
}

/// What a request costs.
pub fn cost(head: &Head) -> u64 {
    if is_urgent(head) {
        return 0;
    }
    FRAME_HEADER_BYTES as u64
        + u64::from(head.meta_bytes)
        + u64::from(head.payload_bytes)
        + u64::from(head.room_bytes)
}

/// Whether an urgent request is as short as it has to be.
fn is_short(head: &Head) -> bool {
    head.payload_bytes == 0
        && head.room_bytes == 0
        && usize::from(head.meta_bytes) <= WIRE_URGENT_META_BYTES_MAX
}

/// A request that was asked and is not answered.
#[derive(Debug)]
struct Asked {
    cost: u64,
    urgent: bool,
    room: u32,
    into: Option<BufMut>,
    /// Whether the asker gave a buffer, wherever it is by now.
    has_buffer: bool,
    /// `None`: it has timed out.
    deadline: Option<Nanos>,
}

/// The requests of this side.
#[derive(Debug, Default)]
pub struct Asking {
    asked: BTreeMap<u64, Asked>,
    deadlines: BTreeSet<(Nanos, u64)>,
    last: u64,
    urgent: usize,
    credit: Credit,
    /// Answers that came too late.
    late: u64,
    /// Somebody waits for credit.
    is_short: bool,
}

/// Where the payload of an answer goes.
#[derive(Debug)]
pub enum Room {
    /// Here, from its beginning on.
    Into(BufMut),
    /// To memory of the pool.
    Pool,
    /// Nowhere: nobody waits for it any more, or there is none.
    Nowhere,
}

/// What an answer is to its asker.
#[derive(Debug)]
pub enum Reply {
    /// Awaited.
    Awaited {
        /// The buffer that was to take it in, if that was not handed out.
        into: Option<BufMut>,
        /// Whether the asker gave one.
        has_buffer: bool,
    },
    /// Too late.
    Late,
}

impl Asking {
    /// The other side has granted so much to begin with.
    pub fn begin(&mut self, granted: u64) {
        self.credit = Credit::new(granted);
    }

    /// Take a request, whose head lacks its number; the number.
    pub fn ask(
        &mut self,
        head: &Head,
        into: Option<BufMut>,
        deadline: Nanos,
    ) -> Result<u64, (SendError, Option<BufMut>)> {
        let (urgent, cost) = (is_urgent(head), cost(head));
        if urgent && !is_short(head) {
            let too_large = SendError::TooLarge {
                part: "an urgent request",
                bytes: usize::from(head.meta_bytes)
                    + (head.payload_bytes + head.room_bytes) as usize,
                max: WIRE_URGENT_META_BYTES_MAX,
            };
            return Err((too_large, into));
        }
        // Urgent ones have places of their own, so that no number of others can take them.
        let is_full = if urgent {
            self.urgent >= WIRE_URGENT_MAX
        } else {
            self.asked.len() - self.urgent >= WIRE_REQUESTS_MAX - WIRE_URGENT_MAX
        };
        if is_full || !self.credit.spend(cost) {
            self.is_short = true;
            return Err((SendError::Full, into));
        }
        self.last += 1;
        self.urgent += usize::from(urgent);
        self.deadlines.insert((deadline, self.last));
        let asked = Asked {
            cost,
            urgent,
            room: head.room_bytes,
            has_buffer: into.is_some(),
            into,
            deadline: Some(deadline),
        };
        self.asked.insert(self.last, asked);
        Ok(self.last)
    }

    /// Whether a request that waits to be sent is still to be: if it has timed out it is forgotten, as nobody has it.
    pub fn is_to_be_sent(&mut self, number: u64) -> bool {
        let Some(asked) = self.asked.get(&number) else {
            return false;
        };
        if asked.deadline.is_some() {
            return true;
        }
        self.credit.take_back(asked.cost);
        self.urgent -= usize::from(asked.urgent);
        self.asked.remove(&number);
        false
    }

    /// An answer begins to come. Nothing of its payload was looked at yet.
    pub fn answering(&mut self, head: &Head) -> Result<Room, Violation> {
        let asked = self.asked.get_mut(&head.number);
        let asked = asked.ok_or(Violation::Unasked(head.number))?;
        if head.payload_bytes > asked.room {
            return Err(Violation::Room {
                number: head.number,
                bytes: head.payload_bytes,
                room: asked.room,
            });
        }
        let Some(deadline) = asked.deadline.filter(|_| head.payload_bytes > 0) else {
            return Ok(Room::Nowhere);
        };
        self.deadlines.remove(&(deadline, head.number));
        Ok(asked.into.take().map_or(Room::Pool, Room::Into))
    }

    /// An answer is whole.
    pub fn answered(&mut self, head: &Head) -> Result<Reply, Violation> {
        // First, so that a mistake leaves the request among those that end with the link.
        self.credit.grant(head.position)?;
        let asked = self.asked.remove(&head.number);
        let asked = asked.ok_or(Violation::Unasked(head.number))?;
        self.urgent -= usize::from(asked.urgent);
        let Some(deadline) = asked.deadline else {
            self.late += 1;
            return Ok(Reply::Late);
        };
        self.deadlines.remove(&(deadline, head.number));
        Ok(Reply::Awaited {
            into: asked.into,
            has_buffer: asked.has_buffer,
        })
    }

    /// More is granted.
    pub fn grant(&mut self, total: u64) -> Result<(), Violation> {
        self.credit.grant(total)
    }

    /// Whether somebody waits for credit, once.
    pub fn take_short(&mut self) -> bool {
        std::mem::take(&mut self.is_short)
    }

    /// The first time at which a request ends.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// One that has timed out: its number, and its buffer.
    pub fn time_out(&mut self, now: Nanos) -> Option<(u64, Option<BufMut>)> {
        let &(deadline, number) = self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.deadlines.pop_first();
        let asked = self.asked.get_mut(&number)?;
        asked.deadline = None;
        Some((number, asked.into.take()))
    }

    /// The connection is over, or about to be: all that have not ended, with their buffers, but for one that is being received
    /// into. Answers that still come are late.
    pub fn disconnect(&mut self) -> Vec<(u64, Option<BufMut>)> {
        self.deadlines.clear();
        let open = self.asked.iter_mut();
        let open = open.filter_map(|(number, one)| {
            one.deadline.take()?;
            Some((*number, one.into.take()))
        });
        open.collect()
    }

    /// Answers that came too late.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Requests without an answer, those that have timed out included.
    pub fn in_flight(&self) -> usize {
        self.asked.len()
    }
}

/// A request of the other side that is not answered.
#[derive(Clone, Copy, Debug)]
pub struct Open {
    cost: u64,
    urgent: bool,
    /// Bytes that the payload of the answer may have.
    pub room: u32,
}

/// The requests of the other side.
#[derive(Debug)]
pub struct Answering {
    open: BTreeMap<u64, Open>,
    urgent: usize,
    grants: Grants,
    /// The other side is to be told of what it was granted beside an answer.
    to_tell: bool,
}

impl Answering {
    /// What is not answered may cost so much.
    pub fn new(window: u64) -> Self {
        Self {
            open: BTreeMap::new(),
            urgent: 0,
            grants: Grants::new(window),
            to_tell: false,
        }
    }

    /// A request is about to come: it counts from here on. Nothing of its payload was looked at yet.
    pub fn asking(&mut self, head: &Head) -> Result<(), Violation> {
        if self.open.contains_key(&head.number) {
            return Err(Violation::Repeated(head.number));
        }
        let urgent = is_urgent(head);
        if urgent && !is_short(head) {
            return Err(Violation::Urgent);
        }
        let (found, max) = if urgent {
            (self.urgent, WIRE_URGENT_MAX)
        } else {
            (
                self.open.len() - self.urgent,
                WIRE_REQUESTS_MAX - WIRE_URGENT_MAX,
            )
        };
        if found >= max {
            return Err(Violation::Requests(max));
        }
        let cost = cost(head);
        self.grants.ask(cost)?;
        self.urgent += usize::from(urgent);
        let room = head.room_bytes;
        self.open.insert(head.number, Open { cost, urgent, room });
        Ok(())
    }

    /// A request that waits for an answer.
    pub fn open(&self, number: u64) -> Result<Open, SendError> {
        let open = self.open.get(&number).copied();
        open.ok_or(SendError::Unasked(number))
    }

    /// The answer to a request waits to be sent.
    pub fn answered(&mut self, number: u64) -> Option<Open> {
        let open = self.open.remove(&number)?;
        self.urgent -= usize::from(open.urgent);
        Some(open)
    }

    /// It is being sent, and says what is granted in all.
    pub fn sends(&mut self, cost: u64) -> u64 {
        self.grants.answer(cost);
        self.to_tell = false;
        self.grants.tell()
    }

    /// Another window.
    pub fn set_window(&mut self, window: u64) {
        self.grants.set_window(window);
        self.to_tell = true;
    }

    /// What is granted in all, if the other side is to be told of that.
    pub fn tell(&mut self) -> Option<u64> {
        std::mem::take(&mut self.to_tell).then(|| self.grants.tell())
    }

    /// Requests that are not answered.
    pub fn in_flight(&self) -> usize {
        self.open.len()
    }

    /// The connection is over.
    pub fn disconnect(&mut self) {
        self.open.clear();
        self.urgent = 0;
        self.to_tell = false;
    }
}

impl Open {
    /// What is granted anew once the answer is sent.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether the answer passes by others.
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::wire::Kind;

    use super::*;

    fn request(meta_bytes: u16, room_bytes: u32, flags: u8) -> Head {
        Head {
            flags,
            room_bytes,
            meta_bytes,
            ..Head::new(Kind::Request)
        }
    }

    fn answer(number: u64, granted: u64) -> Head {
        Head {
            number,
            position: granted,
            ..Head::new(Kind::Answer)
        }
    }

    fn asking(granted: u64) -> Asking {
        let mut asking = Asking::default();
        asking.begin(granted);
        asking
    }

    #[test]
    fn request_ends_once_whatever_comes() {
        let mut asking = asking(1000);
        let plain = request(36, 0, 0);
        let first = asking.ask(&plain, None, Nanos(10)).unwrap();
        let second = asking.ask(&plain, None, Nanos(20)).unwrap();
        assert_eq!(asking.next_deadline(), Some(Nanos(10)));
        assert!(asking.time_out(Nanos(9)).is_none());
        assert_eq!(asking.time_out(Nanos(10)).unwrap().0, first);
        assert!(asking.time_out(Nanos(10)).is_none());
        // Late, and then once more.
        let late = asking.answered(&answer(first, 1000)).unwrap();
        assert!(matches!(late, Reply::Late));
        assert_eq!(asking.late(), 1);
        let unasked = Violation::Unasked(first);
        assert_eq!(asking.answering(&answer(first, 1000)).unwrap_err(), unasked);
        let answered = asking.answered(&answer(second, 1000)).unwrap();
        assert!(matches!(answered, Reply::Awaited { into: None, .. }));
        assert!(asking.time_out(Nanos(99)).is_none());
        assert!(asking.disconnect().is_empty());
        assert_eq!(
            asking.answering(&answer(99, 0)).unwrap_err(),
            Violation::Unasked(99)
        );
    }

    #[test]
    fn request_that_is_late_still_costs() {
        let mut asking = asking(150);
        let plain = request(36, 0, 0);
        let first = asking.ask(&plain, None, Nanos(10)).unwrap();
        assert_eq!(
            asking.ask(&plain, None, Nanos(10)).unwrap_err().0,
            SendError::Full
        );
        asking.time_out(Nanos(10)).unwrap();
        assert!(asking.ask(&plain, None, Nanos(30)).is_err());
        assert!(asking.take_short() && !asking.take_short());
        asking.answered(&answer(first, 250)).unwrap();
        let second = asking.ask(&plain, None, Nanos(30)).unwrap();
        // One that was never sent costs nothing once it is late.
        asking.time_out(Nanos(30)).unwrap();
        assert!(!asking.is_to_be_sent(second));
        let third = asking.ask(&plain, None, Nanos(40)).unwrap();
        assert!(asking.is_to_be_sent(third));
        assert_eq!(asking.disconnect().len(), 1);
    }

    #[test]
    fn urgent_requests_have_places_of_their_own() {
        let mut asking = asking(u64::MAX);
        let mut answering = Answering::new(u64::MAX);
        let mut take = |head: Head, count: usize| {
            for _ in 0..count {
                let number = asking.ask(&head, None, Nanos(1)).unwrap();
                answering.asking(&Head { number, ..head }).unwrap();
            }
            assert_eq!(
                asking.ask(&head, None, Nanos(1)).unwrap_err().0,
                SendError::Full
            );
            let number = u64::MAX;
            let too_many = answering.asking(&Head { number, ..head });
            assert!(matches!(too_many, Err(Violation::Requests(_))));
        };
        take(request(0, 0, 0), WIRE_REQUESTS_MAX - WIRE_URGENT_MAX);
        take(request(100, 0, FRAME_URGENT), WIRE_URGENT_MAX);
    }

    #[test]
    fn urgent_request_with_data_is_refused_by_both_sides() {
        for bad in [request(5000, 0, FRAME_URGENT), request(0, 1, FRAME_URGENT)] {
            let refused = asking(1 << 20).ask(&bad, None, Nanos(1)).unwrap_err();
            assert!(matches!(refused.0, SendError::TooLarge { .. }));
            let noticed = Answering::new(1 << 20).asking(&bad);
            assert_eq!(noticed, Err(Violation::Urgent));
        }
    }

    #[test]
    fn answer_larger_than_its_room_is_noticed() {
        let mut asking = asking(1 << 20);
        let number = asking.ask(&request(0, 4096, 0), None, Nanos(1)).unwrap();
        let large = Head {
            payload_bytes: 4097,
            ..answer(number, 1 << 20)
        };
        assert!(matches!(
            asking.answering(&large),
            Err(Violation::Room { .. })
        ));
    }

    #[test]
    fn answers_grant_what_requests_have_cost() {
        let mut answering = Answering::new(1000);
        let head = Head {
            number: 5,
            ..request(36, 800, 0)
        };
        answering.asking(&head).unwrap();
        assert_eq!(answering.asking(&head), Err(Violation::Repeated(5)));
        let second = Head { number: 6, ..head };
        assert!(matches!(
            answering.asking(&second),
            Err(Violation::Credit { .. })
        ));
        assert_eq!(answering.open(5).unwrap().room, 800);
        let open = answering.answered(5).unwrap();
        assert!(answering.open(5).is_err() && answering.answered(5).is_none());
        assert!(answering.asking(&second).is_err(), "nothing was sent yet");
        assert_eq!(answering.sends(open.cost()), 1900);
        assert_eq!(answering.asking(&second), Ok(()));
        answering.set_window(2000);
        assert_eq!((answering.tell(), answering.tell()), (Some(2900), None));
    }
}
