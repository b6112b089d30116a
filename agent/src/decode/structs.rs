//! Structures of `cuda.h` and `nccl.h`, from the words that `Struct::offsets` picks out of them.

use agent_common::call::EXTRA_WORDS;
use ledger::call::{Action, ArrayShape, Location};
use xxhash_rust::xxh3::xxh3_64;

use crate::probes::Struct;

/// The words of a structure, in the order of the table's offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Structure(pub(super) [u64; EXTRA_WORDS]);

/// `CUgraphNodeType`.
const NODE_ALLOC: u32 = 10;
const NODE_FREE: u32 = 11;

impl Structure {
    /// The only word, or the first one.
    pub(super) fn first(&self) -> u64 {
        self.0[0]
    }

    /// The first two words as they lay in memory.
    pub(super) fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.0[0].to_le_bytes());
        bytes[8..].copy_from_slice(&self.0[1].to_le_bytes());
        bytes
    }

    /// What stands for an IPC handle, or a communicator's id: its bytes are the same in every process.
    pub(super) fn key(&self) -> u64 {
        let mut bytes = [0; 8 * EXTRA_WORDS];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        xxh3_64(&bytes)
    }

    /// The description of an array; `None` for a structure that is none.
    pub(super) fn array(&self, shape: Struct, levels: u32) -> Option<ArrayShape> {
        let [first, second, third, fourth, fifth, ..] = self.0;
        let (low, high) = (|word: u64| word & 0xffff_ffff, |word: u64| word >> 32);
        let of = |[width, height, depth]: [u64; 3], [format, channels]: [u64; 2], flags: u64| {
            let (format, channels) = (format as u32, channels as u32);
            ArrayShape { width, height, depth, format, channels, flags: flags as u32, levels }
        };
        Some(match shape {
            Struct::Flat => of([first, second, 0], [low(third), high(third)], 0),
            Struct::Deep => of([first, second, third], [low(fourth), high(fourth)], low(fifth)),
            Struct::FlatV1 => of([low(first), high(first), 0], [low(second), high(second)], 0),
            Struct::DeepV1 => {
                of([low(first), high(first), low(second)], [high(second), low(third)], high(third))
            }
            _ => return None,
        })
    }

    /// `CUDA_MEM_ALLOC_NODE_PARAMS`.
    pub(super) fn alloc_node(&self) -> Action {
        let [at, size_bytes, addr, ..] = self.0;
        Action::GraphAlloc { addr, size_bytes, location: location_of(at) }
    }

    /// `CUgraphNodeParams`: a node of another type has nothing to do with memory.
    pub(super) fn any_node(&self) -> Action {
        let [kind, freed, at, size_bytes, addr, ..] = self.0;
        match kind as u32 {
            NODE_ALLOC => Action::GraphAlloc { addr, size_bytes, location: location_of(at) },
            NODE_FREE => Action::Graph { addr: freed },
            _ => Action::Nothing,
        }
    }
}

/// The `CUmemLocation` in a structure's first word.
pub(super) fn location(structure: Option<Structure>) -> Location {
    structure.map_or(Location::Unknown, |structure| location_of(structure.first()))
}

/// `CUmemLocation`: its type, then its id.
fn location_of(word: u64) -> Location {
    match word as u32 {
        1 => Location::Device((word >> 32) as i32),
        2..=4 => Location::Host,
        _ => Location::Unknown,
    }
}
