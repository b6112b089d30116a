//! Buffers that go through a channel full and come back empty.
//!
//! At 300,000 calls a second each batch is hundreds of KiB: taken anew, its pages are made, filled
//! once and taken away again, which costs a tenth of the recorder's time.

use std::sync::{Arc, Mutex, PoisonError};

use agent_common::call::RawCall;

use super::sink::AnyRow;

/// Buffers that are kept: what is filled on one side while the other empties one.
const KEPT: usize = 2;

/// Bytes of a buffer that is kept. Larger ones are of a burst: their memory goes back.
const MOST_BYTES: usize = 2 << 20;

/// The empty buffers of a recording.
#[derive(Clone, Debug, Default)]
pub struct Buffers {
    /// The reader fills them, the books give them back.
    pub calls: Spares<RawCall>,
    /// The books fill them, the log's thread gives them back.
    pub rows: Spares<AnyRow>,
}

/// Where both ends of a channel put and find empty buffers.
#[derive(Debug)]
pub struct Spares<T>(Arc<Mutex<Vec<Vec<T>>>>);

impl<T> Clone for Spares<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Spares<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Spares<T> {
    /// An empty buffer.
    pub fn take(&self) -> Vec<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Takes a buffer back; what is still in it is dropped.
    pub fn give(&self, mut buffer: Vec<T>) {
        buffer.clear();
        let bytes = buffer.capacity().saturating_mul(size_of::<T>());
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT && (1..=MOST_BYTES).contains(&bytes) {
            kept.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_empty_and_only_so_many_and_so_large_ones_are_kept() {
        let spares = Spares::<u64>::default();
        spares.give(vec![1, 2, 3]);
        let again = spares.take();
        assert!(again.is_empty() && again.capacity() >= 3);

        (0..10).for_each(|_| spares.give(Vec::with_capacity(8)));
        let capacities = |_| spares.take().capacity();
        assert_eq!((0..4).map(capacities).filter(|capacity| *capacity > 0).count(), KEPT);

        spares.give(Vec::new());
        spares.give(Vec::with_capacity(MOST_BYTES / 8 + 1));
        assert_eq!(spares.take().capacity(), 0);
    }
}
