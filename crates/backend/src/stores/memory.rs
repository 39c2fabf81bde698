//! A store in memory whose faults are told in advance, for tests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use super::{Condition, Listing, Object, Pending, Store, StoreError};

/// What happens to one request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It is not done, and fails so.
    Fails(StoreError),
    /// It is done, and its answer is lost.
    AnswerLost,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Bytes>,
    faults: VecDeque<Fault>,
}

/// See the module. Clones share their objects.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<State>>);

impl Memory {
    /// The next requests end so, one after another.
    pub fn plan(&self, faults: impl IntoIterator<Item = Fault>) {
        self.0.lock().unwrap().faults.extend(faults);
    }

    fn request<T>(
        &self,
        perform: impl FnOnce(&mut BTreeMap<String, Bytes>) -> Result<T, StoreError> + Send,
    ) -> Pending<'static, T>
    where
        T: Send + 'static,
    {
        let mut state = self.0.lock().unwrap();
        let result = match state.faults.pop_front() {
            None => perform(&mut state.objects),
            Some(Fault::Fails(error)) => Err(error),
            Some(Fault::AnswerLost) => perform(&mut state.objects)
                .and_then(|_| Err(StoreError::Unreachable("the answer is lost".to_owned()))),
        };
        Box::pin(async move { result })
    }
}

impl Store for Memory {
    fn put<'a>(&'a self, name: &'a str, data: Bytes, condition: Condition) -> Pending<'a, ()> {
        self.request(|objects| {
            if condition == Condition::IfAbsent && objects.contains_key(name) {
                return Err(StoreError::Exists);
            }
            objects.insert(name.to_owned(), data);
            Ok(())
        })
    }

    fn get<'a>(&'a self, name: &'a str, offset: u64, bytes: usize) -> Pending<'a, Bytes> {
        self.request(|objects| {
            let object = objects.get(name).ok_or(StoreError::NotFound)?;
            let range = offset as usize..offset as usize + bytes;
            if range.end > object.len() {
                return Err(StoreError::Short);
            }
            Ok(object.slice(range))
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        self.request(|objects| {
            objects.remove(name);
            Ok(())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, max: usize) -> Pending<'a, Listing> {
        self.request(|objects| {
            let mut found = objects
                .iter()
                .filter(|(name, _)| name.starts_with(prefix) && name.as_str() > after)
                .map(|(name, data)| Object {
                    name: name.clone(),
                    bytes: data.len() as u64,
                    modified_ms: 0,
                });
            let objects = found.by_ref().take(max).collect();
            let more = found.next().is_some();
            Ok(Listing { objects, more })
        })
    }

    fn place(&self) -> String {
        "memory".to_owned()
    }
}
