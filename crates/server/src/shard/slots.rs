//! A table whose places are used again: the numbers of connections, volumes and requests.

/// See the module.
#[derive(Debug)]
pub struct Slots<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
    /// Places that are empty and not to be used again yet.
    vacated: usize,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
            vacated: 0,
        }
    }
}

impl<T> Slots<T> {
    /// Put a value into a free place.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.places[slot as usize] = Some(value);
            return slot;
        }
        self.places.push(Some(value));
        self.places.len() as u32 - 1
    }

    /// Empty a place.
    pub fn remove(&mut self, slot: u32) -> Option<T> {
        let value = self.places.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(value)
    }

    /// Empty a place, but keep it from being used again until [`Self::release`].
    pub fn vacate(&mut self, slot: u32) -> Option<T> {
        let value = self.places.get_mut(slot as usize)?.take()?;
        self.vacated += 1;
        Some(value)
    }

    /// A place that was vacated may be used again.
    pub fn release(&mut self, slot: u32) {
        self.vacated -= 1;
        self.free.push(slot);
    }

    /// What is in a place.
    pub fn get(&self, slot: u32) -> Option<&T> {
        self.places.get(slot as usize)?.as_ref()
    }

    /// What is in a place.
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.places.get_mut(slot as usize)?.as_mut()
    }

    /// Places in use.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len() - self.vacated
    }

    /// Whether no place is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One more than the highest place that was ever in use.
    pub fn end(&self) -> u32 {
        self.places.len() as u32
    }

    /// Everything with its place.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let places = self.places.iter().enumerate();
        places.filter_map(|(slot, place)| Some((slot as u32, place.as_ref()?)))
    }
}
