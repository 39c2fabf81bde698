//! Gets of parts of objects, a few of them ahead of who looks at them.

use std::collections::VecDeque;

use bytes::Bytes;
use tokio::task::JoinHandle;

use crate::stores::{Client, StoreError, runtime};

/// They end in the order in which they were begun.
pub(super) struct Gets<T>(VecDeque<(T, JoinHandle<Result<Bytes, StoreError>>)>);

impl<T> Default for Gets<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> Gets<T> {
    /// How many have not been looked at.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Begin one.
    pub fn begin(&mut self, what: T, client: &Client, name: &str, offset: u64, bytes: usize) {
        let (client, name) = (client.clone(), name.to_owned());
        let get = runtime().spawn(async move { client.get(&name, offset, bytes).await });
        self.0.push_back((what, get));
    }

    /// The end of the first one that was not looked at; none: all were.
    pub async fn next(&mut self) -> Option<(T, Result<Bytes, StoreError>)> {
        let (what, get) = self.0.pop_front()?;
        // Nothing ends it, and what it does cannot panic.
        let ended = get.await;
        let ended = ended.unwrap_or_else(|error| Err(StoreError::Failed(error.to_string())));
        Some((what, ended))
    }
}

impl<T> Drop for Gets<T> {
    fn drop(&mut self) {
        for (_, get) in &self.0 {
            get.abort();
        }
    }
}
