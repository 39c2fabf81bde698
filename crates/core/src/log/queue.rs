//! A queue whose memory follows its length: items come at the back and go at the front, in chunks of fixed size. Nothing
//! is ever copied to make room, so no step pays for the growth of a large queue, and what has gone gives its memory back.

use alloc::collections::VecDeque;
use core::ops::{Index, IndexMut};

/// Items of one chunk.
const CHUNK: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct Queue<T> {
    chunks: VecDeque<VecDeque<T>>,
    /// Items that have gone from the first chunk.
    gone: usize,
    len: usize,
    /// An empty chunk, so that a queue of about one length does not allocate all the time.
    spare: Option<VecDeque<T>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            chunks: VecDeque::new(),
            gone: 0,
            len: 0,
            spare: None,
        }
    }
}

impl<T> Queue<T> {
    /// Append an item.
    pub fn push_back(&mut self, item: T) {
        let is_full = (self.gone + self.len).is_multiple_of(CHUNK);
        if is_full {
            let chunk = self.spare.take();
            let chunk = chunk.unwrap_or_else(|| VecDeque::with_capacity(CHUNK));
            self.chunks.push_back(chunk);
        }
        let last = self.chunks.back_mut().expect("just made, or not full");
        last.push_back(item);
        self.len += 1;
    }

    /// Take the first item out.
    pub fn pop_front(&mut self) -> Option<T> {
        let chunk = self.chunks.front_mut()?;
        let item = chunk.pop_front()?;
        self.gone += 1;
        self.len -= 1;
        if self.len == 0 || self.gone == CHUNK {
            self.gone = 0;
            self.spare = self.chunks.pop_front();
            if self.len == 0 {
                self.chunks = VecDeque::new();
                self.spare = None;
            }
        }
        Some(item)
    }

    /// Take the first so many items out, also those that the iterator is not asked for.
    pub fn drain_front(&mut self, count: usize) -> Drain<'_, T> {
        assert!(count <= self.len, "no more than there are");
        Drain {
            queue: self,
            left: count,
        }
    }

    /// An item.
    pub fn get(&self, index: usize) -> Option<&T> {
        let (chunk, place) = self.place(index)?;
        self.chunks[chunk].get(place)
    }

    /// An item.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        let (chunk, place) = self.place(index)?;
        self.chunks[chunk].get_mut(place)
    }

    fn place(&self, index: usize) -> Option<(usize, usize)> {
        if index >= self.len {
            return None;
        }
        let at = index + self.gone;
        let chunk = at / CHUNK;
        let gone = if chunk == 0 { self.gone } else { 0 };
        Some((chunk, at % CHUNK - gone))
    }

    /// The first item.
    pub fn front(&self) -> Option<&T> {
        self.chunks.front()?.front()
    }

    /// The last item.
    pub fn back(&self) -> Option<&T> {
        self.chunks.back()?.back()
    }

    /// The last item.
    pub fn back_mut(&mut self) -> Option<&mut T> {
        self.chunks.back_mut()?.back_mut()
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Every item in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.chunks.iter().flatten()
    }

    /// How many of the first items are `first`, after which none is.
    pub fn partition_point(&self, first: impl Fn(&T) -> bool) -> usize {
        let (mut from, mut to) = (0, self.len);
        while from < to {
            let middle = from + (to - from) / 2;
            if first(&self[middle]) {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        from
    }

    /// Memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        let chunks = self.chunks.len() + usize::from(self.spare.is_some());
        chunks * CHUNK * size_of::<T>() + self.chunks.capacity() * size_of::<VecDeque<T>>()
    }
}

/// See [`Queue::drain_front`].
#[derive(Debug)]
pub struct Drain<'a, T> {
    queue: &'a mut Queue<T>,
    left: usize,
}

impl<T> Iterator for Drain<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.left = self.left.checked_sub(1)?;
        self.queue.pop_front()
    }
}

impl<T> Drop for Drain<'_, T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

impl<T> Index<usize> for Queue<T> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        self.get(index).expect("an item of the queue")
    }
}

impl<T> IndexMut<usize> for Queue<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        self.get_mut(index).expect("an item of the queue")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_agrees_with_another_and_gives_memory_back() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut queue, mut model) = (Queue::default(), VecDeque::new());
        for number in 0..20_000u64 {
            // First it grows, then it shrinks.
            if random.u64(..20_000) > number {
                queue.push_back(number);
                model.push_back(number);
            } else {
                let count = random.usize(..=model.len().min(3));
                let taken = queue.drain_front(count).collect::<VecDeque<_>>();
                assert_eq!(taken, model.drain(..count).collect::<VecDeque<_>>());
            }
            assert_eq!(
                (queue.len(), queue.front(), queue.back()),
                (model.len(), model.front(), model.back())
            );
            if let Some(index) = model.len().checked_sub(1).map(|last| random.usize(..=last)) {
                assert_eq!(queue[index], model[index]);
                let found = queue.partition_point(|&item| item < model[index]);
                assert_eq!(found, index);
            }
            let most = (model.len() + 3 * CHUNK) * 8
                + queue.chunks.capacity() * size_of::<VecDeque<u64>>();
            assert!(queue.memory_bytes() <= most);
        }
        assert!(queue.iter().eq(model.iter()));
        let rest = queue.len();
        drop(queue.drain_front(rest / 2));
        let rest = rest - rest / 2;
        assert_eq!(queue.drain_front(rest).count(), rest);
        assert_eq!((queue.memory_bytes(), queue.get(0)), (0, None));
    }
}
