//! What the kernel half must know of a traced function, packed into its probe's attach cookie.
//!
//! The grammar, not code, decides what is copied: adding a function needs no new eBPF object.

/// What a traced function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A call with a result: its return is probed too.
    Call,
    /// Entry of `PyTorch`'s reporter (C++ that can throw: never a return probe).
    Tensor,
    /// Entry of autograd's execute (C++ likewise).
    Backward,
    /// A function of the CUDA runtime, which labels the driver calls inside it.
    Runtime,
    /// Entry of a function whose arguments tell all that is wanted: C++ that can throw, or a call that
    /// takes long. It is told of at once, as a call that took no time.
    Note,
}

impl Kind {
    /// Its return is probed too.
    pub const fn returns(self) -> bool {
        matches!(self, Self::Call | Self::Runtime)
    }
}

/// Row of the probe table and what to copy at entry and return.
#[allow(clippy::struct_excessive_bools, reason = "each is a bit of its own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie {
    /// What the function is.
    pub kind: Kind,
    /// Row of the probe table, below [`MAX_ROWS`].
    pub row: u8,
    /// Bit n: argument n points to an 8-byte result.
    pub outs: u8,
    /// When the row's [`crate::call::Structure`] is copied, if it has one.
    pub structure: Option<When>,
    /// More than [`crate::call::NARROW_WORDS`] arguments matter.
    pub wide: bool,
    /// Changes nothing in the account: one that was in flight when the probe came is no loss.
    pub harmless: bool,
    /// The stack of the caller is wanted.
    pub stack: bool,
    /// Which attachment the probe belongs to: its calls count once that one is armed, which the
    /// agent says when the entries *and* the returns of all its functions are in place.
    pub slot: u16,
}

/// When a structure is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The program filled it in.
    Entry,
    /// The function does.
    Exit,
}

/// Rows that the probe table can have (a row is a byte, and [`crate::call::NO_ROW`] is none);
/// bounds the clean-up loop of an ended thread.
pub const MAX_ROWS: u8 = u8::MAX;

/// Attachments that can be told apart.
pub const SLOTS: u32 = 1 << 16;

impl Cookie {
    /// Packs into the 64 bits that the kernel hands to the program.
    pub const fn pack(self) -> u64 {
        let structure = match self.structure {
            None => 0,
            Some(When::Entry) => 1,
            Some(When::Exit) => 2,
        };
        self.row as u64
            | (self.outs as u64) << 16
            | structure << 24
            | (self.wide as u64) << 29
            | (self.harmless as u64) << 30
            | (self.stack as u64) << 31
            | (self.slot as u64) << 32
            | (self.kind as u64) << 48
    }

    /// Reads what [`Cookie::pack`] wrote.
    pub const fn unpack(bits: u64) -> Self {
        let structure = match bits >> 24 & 3 {
            1 => Some(When::Entry),
            2 => Some(When::Exit),
            _ => None,
        };
        let kind = match bits >> 48 & 7 {
            1 => Kind::Tensor,
            2 => Kind::Backward,
            3 => Kind::Runtime,
            4 => Kind::Note,
            _ => Kind::Call,
        };
        Self {
            kind,
            row: bits as u8,
            outs: (bits >> 16) as u8,
            structure,
            wide: bits >> 29 & 1 == 1,
            harmless: bits >> 30 & 1 == 1,
            stack: bits >> 31 & 1 == 1,
            slot: (bits >> 32) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Cookie, Kind, When};

    #[test]
    fn packing_round_trips() {
        for row in [0, 1, 77, 254] {
            for structure in [None, Some(When::Entry), Some(When::Exit)] {
                for bits in 0..40u8 {
                    let kinds =
                        [Kind::Call, Kind::Tensor, Kind::Backward, Kind::Runtime, Kind::Note];
                    let cookie = Cookie {
                        kind: kinds[usize::from(bits >> 3)],
                        row,
                        outs: 0b10_0001,
                        structure,
                        wide: bits & 1 == 1,
                        harmless: bits & 2 == 2,
                        stack: bits & 4 == 4,
                        slot: u16::from(row) ^ 0xffff,
                    };
                    assert_eq!(Cookie::unpack(cookie.pack()), cookie);
                }
            }
        }
    }
}
