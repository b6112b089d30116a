//! Reading an input piece by piece.

/// The rest of an input. What is beyond its end is 0, so that every input means something.
#[derive(Clone, Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes so many bytes, fewer at the end.
    pub fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Takes an array.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.take(N);
        let mut array = [0; N];
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// Takes a byte.
    pub fn byte(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    /// Takes a number of two bytes.
    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Takes a number of four bytes.
    pub fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Takes a word.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}
