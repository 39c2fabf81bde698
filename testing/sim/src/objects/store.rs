//! A fake object store: names and bytes. What an action does happens at one instant; when that is,
//! and what is reported of it, is the world's.

use std::collections::BTreeMap;
use std::rc::Rc;

use hdcs_core::objects::io::Listed;

/// Names listed at once at most: small, so that listings have several pages.
const PAGE: usize = 7;

/// Objects by their whole names.
#[derive(Debug, Default)]
pub struct Store {
    objects: BTreeMap<String, Rc<Vec<u8>>>,
    bytes: u64,
}

impl Store {
    /// An object's bytes.
    pub fn get(&self, name: &str) -> Option<&Rc<Vec<u8>>> {
        self.objects.get(name)
    }

    /// Bytes of all objects: what a quota counts.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Store an object.
    pub fn put(&mut self, name: &str, bytes: Rc<Vec<u8>>) {
        self.delete(name);
        self.bytes += bytes.len() as u64;
        self.objects.insert(name.into(), bytes);
    }

    /// Remove an object.
    pub fn delete(&mut self, name: &str) {
        let gone = self.objects.remove(name);
        self.bytes -= gone.map_or(0, |bytes| bytes.len() as u64);
    }

    /// Names below `place` that begin with `prefix` and come after `after`.
    pub fn list(&self, place: &str, prefix: &str, after: &str) -> (Vec<Listed>, bool) {
        let whole = format!("{place}{prefix}");
        let all = self.below(&whole);
        let mut found = all
            .map(|(name, bytes)| Listed {
                name: name[place.len()..].into(),
                bytes: bytes.len() as u64,
            })
            .filter(|listed| listed.name.as_str() > after);
        let objects: Vec<_> = found.by_ref().take(PAGE).collect();
        (objects, found.next().is_some())
    }

    /// Every object whose name begins with `prefix`.
    pub fn below<'a>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = (&'a String, &'a Rc<Vec<u8>>)> + 'a {
        self.objects
            .range(prefix.to_string()..)
            .take_while(move |(name, _)| name.starts_with(prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_lists_in_pages() {
        let mut store = Store::default();
        for number in 0..10 {
            store.put(&format!("a/data/{number}"), Rc::new(vec![0; number]));
        }
        store.put("a/map/1", Rc::default());
        store.put("b/data/5", Rc::default());
        let (first, more) = store.list("a/", "data/", "");
        assert!(more && first.len() == PAGE && first[2].bytes == 2);
        let (rest, more) = store.list("a/", "data/", &first[PAGE - 1].name);
        assert!(!more && rest.len() == 3 && rest[2].name == "data/9");
        assert_eq!(store.list("a/", "", "data/8").0.len(), 2);
    }

    #[test]
    fn store_counts_its_bytes() {
        let mut store = Store::default();
        store.put("a", Rc::new(vec![0; 10]));
        store.put("a", Rc::new(vec![0; 3]));
        store.put("b", Rc::new(vec![0; 4]));
        assert_eq!(store.bytes(), 7);
        store.delete("a");
        store.delete("a");
        assert_eq!(store.bytes(), 4);
    }
}
