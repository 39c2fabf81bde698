//! The data objects that are there and their sizes, by listings of the places of all who have written them.

use std::collections::VecDeque;
use std::ops::Range;

use hdcs_core::objects::io::{Kind, Name};

use crate::BackendError;
use crate::objects::backend_error;
use crate::stores::{Client, LIST_MAX};

/// The place of a writer, and the numbers of the objects that are its.
pub(super) struct Writer {
    pub client: Client,
    pub volume: [u8; 16],
    pub numbers: Range<u64>,
}

impl Writer {
    /// Who has written the objects with a number.
    pub fn of(writers: &[Self], number: u64) -> &Self {
        let index = writers.partition_point(|writer| writer.numbers.end <= number);
        &writers[index.min(writers.len() - 1)]
    }
}

/// Objects in the order of their numbers, a page of a listing at a time.
pub(super) struct Sizes<'a> {
    /// Whose places are still to be listed, ascending.
    writers: &'a [Writer],
    /// After which name of the first one; none: its listing has not begun.
    after: Option<String>,
    numbers: Range<u64>,
    page: VecDeque<(u64, u64)>,
}

impl<'a> Sizes<'a> {
    /// Of objects with these numbers.
    pub fn new(writers: &'a [Writer], numbers: Range<u64>) -> Self {
        let first = writers.partition_point(|writer| writer.numbers.end <= numbers.start);
        Self {
            writers: &writers[first..],
            after: None,
            numbers,
            page: VecDeque::new(),
        }
    }

    /// The next object, without passing it: its number and its size in bytes.
    async fn peek(&mut self) -> Result<Option<(u64, u64)>, BackendError> {
        while self.page.is_empty() {
            let Some((writer, others)) = self.writers.split_first() else {
                break;
            };
            let from = writer.numbers.start.max(self.numbers.start);
            let to = writer.numbers.end.min(self.numbers.end);
            if from >= to {
                break;
            }
            let after = self.after.take().unwrap_or_else(|| {
                let before = from.checked_sub(1);
                before.map_or_else(String::new, |number| {
                    Name::own(Kind::Data, number).to_string()
                })
            });
            let listed = writer.client.list(Kind::Data.prefix(), &after, LIST_MAX);
            let listed = listed.await.map_err(|error| backend_error(&error))?;
            let numbered = |object: &crate::stores::Object| {
                Some((Name::parse(&object.name)?.number, object.bytes))
            };
            let found = listed.objects.iter().filter_map(numbered);
            let is_past = found.clone().any(|(number, _)| number >= to);
            self.page = found
                .filter(|(number, _)| (from..to).contains(number))
                .collect();
            match listed.objects.last() {
                Some(last) if listed.more && !is_past => self.after = Some(last.name.clone()),
                _ => self.writers = others,
            }
        }
        Ok(self.page.front().copied())
    }

    /// The next object: its number and its size in bytes.
    pub async fn next(&mut self) -> Result<Option<(u64, u64)>, BackendError> {
        let next = self.peek().await?;
        self.page.pop_front();
        Ok(next)
    }

    /// The size of an object, if it is there. Numbers ascend from call to call.
    pub async fn of(&mut self, number: u64) -> Result<Option<u64>, BackendError> {
        while let Some((next, bytes)) = self.peek().await? {
            if next >= number {
                return Ok((next == number).then_some(bytes));
            }
            self.page.pop_front();
        }
        Ok(None)
    }
}
