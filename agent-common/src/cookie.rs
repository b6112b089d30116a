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
}

/// Row of the probe table and what to copy at entry and return.
#[allow(clippy::struct_excessive_bools, reason = "each is a bit of its own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie {
    /// What the function is.
    pub kind: Kind,
    /// Row of the probe table, below [`MAX_ROWS`].
    pub row: u16,
    /// Bit n: argument n points to an 8-byte result.
    pub outs: u8,
    /// Argument that points to a 16-byte structure to copy, if any.
    pub extra_arg: Option<u8>,
    /// The structure is a result: copy it at return, not at entry.
    pub extra_at_exit: bool,
    /// More than [`crate::call::NARROW_WORDS`] arguments, or a structure, matter.
    pub wide: bool,
    /// Changes nothing in the account: one that was in flight when the probe came is no loss.
    pub harmless: bool,
    /// The stack of the caller is wanted.
    pub stack: bool,
    /// Which attachment the probe belongs to: its calls count once that one is armed, which the
    /// agent says when the entries *and* the returns of all its functions are in place.
    pub slot: u16,
}

/// Rows that the probe table can have; bounds the clean-up loop of an ended thread.
pub const MAX_ROWS: u16 = 128;

/// Attachments that can be told apart.
pub const SLOTS: u32 = 1 << 16;

const EXTRA_NONE: u64 = 7;

impl Cookie {
    /// Packs into the 64 bits that the kernel hands to the program.
    pub const fn pack(self) -> u64 {
        let extra = match self.extra_arg {
            Some(arg) => arg as u64,
            None => EXTRA_NONE,
        };
        self.row as u64
            | (self.outs as u64) << 16
            | extra << 24
            | (self.extra_at_exit as u64) << 28
            | (self.wide as u64) << 29
            | (self.harmless as u64) << 30
            | (self.stack as u64) << 31
            | (self.slot as u64) << 32
            | (self.kind as u64) << 48
    }

    /// Reads what [`Cookie::pack`] wrote.
    pub const fn unpack(bits: u64) -> Self {
        let extra = bits >> 24 & 7;
        let kind = match bits >> 48 & 3 {
            1 => Kind::Tensor,
            2 => Kind::Backward,
            _ => Kind::Call,
        };
        Self {
            kind,
            row: bits as u16,
            outs: (bits >> 16) as u8,
            extra_arg: if extra == EXTRA_NONE { None } else { Some(extra as u8) },
            extra_at_exit: bits >> 28 & 1 == 1,
            wide: bits >> 29 & 1 == 1,
            harmless: bits >> 30 & 1 == 1,
            stack: bits >> 31 & 1 == 1,
            slot: (bits >> 32) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Cookie, Kind};

    #[test]
    fn packing_round_trips() {
        for row in [0, 1, 77, 127] {
            for extra_arg in [None, Some(0), Some(5)] {
                for bits in 0..48u8 {
                    let cookie = Cookie {
                        kind: [Kind::Call, Kind::Tensor, Kind::Backward][usize::from(bits >> 4)],
                        row,
                        outs: 0b10_0001,
                        extra_arg,
                        extra_at_exit: bits & 1 == 1,
                        wide: bits & 2 == 2,
                        harmless: bits & 4 == 4,
                        stack: bits & 8 == 8,
                        slot: row ^ 0xffff,
                    };
                    assert_eq!(Cookie::unpack(cookie.pack()), cookie);
                }
            }
        }
    }
}
