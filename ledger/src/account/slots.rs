//! What lies at an address (or behind a handle), told apart by time.
//!
//! A slow free's record arrives when the call returns, long after the driver handed its address to
//! somebody else. So an address may hold several entries: the newest, and *displaced* ones that
//! wait for the record of their free. A free belongs to the entry that took effect last before it
//! entered, whatever arrived first.

use std::collections::BTreeMap;

/// One thing at an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<T> {
    /// When it took effect.
    pub(super) since_ns: i64,
    /// When the next one at this address took effect: by then this one was free.
    pub(super) displaced_ns: Option<i64>,
    /// What it is.
    pub(super) value: T,
}

/// The entries of one address, oldest first. `older` is nearly always empty.
#[derive(Debug)]
struct Slot<T> {
    older: Vec<Entry<T>>,
    last: Entry<T>,
}

impl<T> Slot<T> {
    fn entries(&self) -> impl DoubleEndedIterator<Item = &Entry<T>> {
        self.older.iter().chain(std::iter::once(&self.last))
    }

    fn get(&self, index: usize) -> Option<&Entry<T>> {
        if index == self.older.len() { Some(&self.last) } else { self.older.get(index) }
    }

    /// Index of the entry that took effect last at or before `ns`.
    fn at(&self, ns: i64) -> Option<usize> {
        if self.last.since_ns <= ns {
            return Some(self.older.len());
        }
        self.older.iter().rposition(|entry| entry.since_ns <= ns)
    }
}

/// Entries by address.
#[derive(Debug)]
pub(super) struct Slots<T> {
    slots: BTreeMap<u64, Slot<T>>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: BTreeMap::new() }
    }
}

impl<T: Copy> Slots<T> {
    /// Puts `value` at `key`. Gives the entry that is displaced by it: the one that was newest, or
    /// the new one itself where it is the older of the two.
    pub(super) fn insert(&mut self, key: u64, since_ns: i64, value: T) -> Option<Entry<T>> {
        let entry = Entry { since_ns, displaced_ns: None, value };
        let Some(slot) = self.slots.get_mut(&key) else {
            self.slots.insert(key, Slot { older: Vec::new(), last: entry });
            return None;
        };
        if since_ns >= slot.last.since_ns {
            let fresh = slot.last.displaced_ns.is_none();
            slot.last.displaced_ns.get_or_insert(since_ns);
            slot.older.push(slot.last);
            slot.last = entry;
            return slot.older.last().copied().filter(|_| fresh);
        }
        let index = slot.older.partition_point(|older| older.since_ns <= since_ns);
        let next_ns = slot.get(index).map_or(slot.last.since_ns, |next| next.since_ns);
        let entry = Entry { displaced_ns: Some(next_ns), ..entry };
        slot.older.insert(index, entry);
        Some(entry)
    }

    /// The entry that took effect last at or before `ns`.
    pub(super) fn find(&self, key: u64, ns: i64) -> Option<&Entry<T>> {
        let slot = self.slots.get(&key)?;
        slot.get(slot.at(ns)?)
    }

    /// Takes out what [`Slots::find`] finds.
    pub(super) fn take(&mut self, key: u64, ns: i64) -> Option<Entry<T>> {
        let slot = self.slots.get(&key)?;
        let index = slot.at(ns)?;
        self.remove(key, index)
    }

    /// Takes out the first entry of `key` that `wanted` accepts.
    pub(super) fn take_if(
        &mut self,
        key: u64,
        wanted: impl Fn(&Entry<T>) -> bool,
    ) -> Option<Entry<T>> {
        let index = self.slots.get(&key)?.entries().position(wanted)?;
        self.remove(key, index)
    }

    /// Takes out every entry that `wanted` accepts, in order of effect.
    pub(super) fn take_all(&mut self, wanted: impl Fn(&Entry<T>) -> bool) -> Vec<Entry<T>> {
        let keys: Vec<u64> =
            self.iter().filter(|(_, entry)| wanted(entry)).map(|(key, _)| key).collect();
        let mut taken: Vec<Entry<T>> =
            keys.into_iter().filter_map(|key| self.take_if(key, &wanted)).collect();
        taken.sort_by_key(|entry| entry.since_ns);
        taken
    }

    /// Every key and entry, displaced ones included, in order of key.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Entry<T>)> {
        self.slots.iter().flat_map(|(&key, slot)| slot.entries().map(move |entry| (key, entry)))
    }

    /// The keys in `first..end`.
    pub(super) fn keys(&self, first: u64, end: u64) -> impl Iterator<Item = u64> + '_ {
        let keys = (first < end).then(|| self.slots.range(first..end));
        keys.into_iter().flatten().map(|(&key, _)| key)
    }

    /// The last key below `end`.
    pub(super) fn key_below(&self, end: u64) -> Option<u64> {
        self.slots.range(..end).next_back().map(|(&key, _)| key)
    }

    fn remove(&mut self, key: u64, index: usize) -> Option<Entry<T>> {
        let slot = self.slots.get_mut(&key)?;
        if index < slot.older.len() {
            return Some(slot.older.remove(index));
        }
        match slot.older.pop() {
            Some(older) => Some(std::mem::replace(&mut slot.last, older)),
            None => self.slots.remove(&key).map(|slot| slot.last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_takes_what_took_effect_last_before_it() {
        let mut slots = Slots::default();
        assert!(slots.insert(7, 10, 'a').is_none());
        let displaced = slots.insert(7, 30, 'b').unwrap();
        assert_eq!((displaced.value, displaced.displaced_ns), ('a', Some(30)));
        assert!(slots.take(7, 9).is_none());
        assert_eq!(slots.take(7, 29).unwrap().value, 'a');
        assert!(slots.take(7, 29).is_none());
        assert_eq!(slots.take(7, 30).unwrap().value, 'b');
        assert_eq!(slots.iter().count(), 0);
    }

    #[test]
    fn an_older_one_that_comes_later_is_the_displaced_one() {
        let mut slots = Slots::default();
        slots.insert(7, 30, 'c');
        let displaced = slots.insert(7, 10, 'a').unwrap();
        assert_eq!((displaced.value, displaced.displaced_ns), ('a', Some(30)));
        let displaced = slots.insert(7, 20, 'b').unwrap();
        assert_eq!((displaced.value, displaced.displaced_ns), ('b', Some(30)));
        assert_eq!(slots.take(7, 25).unwrap().value, 'b');
        assert_eq!(slots.take(7, 40).unwrap().value, 'c');
    }

    #[test]
    fn what_is_displaced_already_is_not_displaced_again() {
        let mut slots = Slots::default();
        slots.insert(7, 10, 'a');
        slots.insert(7, 20, 'b');
        assert_eq!(slots.take(7, 25).unwrap().value, 'b');
        assert!(slots.insert(7, 30, 'c').is_none());
        assert_eq!(slots.take(7, 12).unwrap().displaced_ns, Some(20));
    }
}
