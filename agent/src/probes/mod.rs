//! What is traced: one row a function, in [`PROBES`].
//!
//! One call, followed end to end: row `cuMemAlloc_v2` hands out a block whose address lies behind
//! argument 0 and whose size is argument 1. [`Probe::cookie`] packs "argument 0 is an out-pointer"
//! into the attach cookie; the kernel half copies the arguments at entry, replaces word 0 by what it
//! points to at return, and sends both with the row's number; [`crate::decode`] reads address and
//! size out of words 0 and 1 by this row's [`Meaning`]. Adding a function is adding a line to the
//! table.

mod meaning;
mod table;

use agent_common::{
    call::Structure,
    cookie::{Cookie, Kind, MAX_ROWS},
};
pub use meaning::{Arg, Meaning, Out, Size, Struct};
pub use table::PROBES;

/// Which shared library exports a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Library {
    /// NVIDIA's driver library, `libcuda.so.*`: the account of record.
    Cuda,
    /// NVIDIA's runtime, `libcudart.so.*`: labels only. Many programs link it statically.
    Cudart,
    /// `PyTorch`'s core library, `libc10.so`.
    C10,
    /// `PyTorch`'s operators and autograd, `libtorch_cpu.so`.
    TorchCpu,
    /// NVIDIA's collective communication, `libnccl.so.*`: who is which rank.
    Nccl,
}

impl Library {
    /// Which library a mapped file is, by its base name.
    pub fn of_file_name(name: &str) -> Option<Self> {
        let is = |soname: &str| {
            name.strip_prefix(soname).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        match name {
            _ if is("libcuda.so") => Some(Self::Cuda),
            _ if is("libcudart.so") => Some(Self::Cudart),
            _ if is("libnccl.so") => Some(Self::Nccl),
            "libc10.so" => Some(Self::C10),
            "libtorch_cpu.so" => Some(Self::TorchCpu),
            _ => None,
        }
    }

    /// Its usual file name, for people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda",
            Self::Cudart => "libcudart",
            Self::C10 => "libc10",
            Self::TorchCpu => "libtorch_cpu",
            Self::Nccl => "libnccl",
        }
    }
}

/// One traced function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Exact exported name; one that ends in `*` is the beginning of a mangled name whose end
    /// (argument types) differs between versions.
    pub symbol: &'static str,
    /// Which library exports it.
    pub library: Library,
    /// What its arguments mean.
    pub meaning: Meaning,
    /// Bit n: argument n (or the result behind it) has 32 bits, the rest of its word is garbage.
    pub narrow: u8,
}

const _: () = assert!(PROBES.len() <= MAX_ROWS as usize);

impl Probe {
    /// What the log calls it.
    pub const fn api(&self) -> &'static str {
        match self.meaning {
            Meaning::TensorUsage | Meaning::TorchOom => "c10",
            _ => self.symbol,
        }
    }

    /// Whether an exported symbol is the function.
    pub fn is(&self, exported: &str) -> bool {
        match self.symbol.strip_suffix('*') {
            Some(beginning) => exported.starts_with(beginning),
            None => exported == self.symbol,
        }
    }

    /// What it is to the kernel half.
    pub const fn kind(&self) -> Kind {
        match self.meaning {
            Meaning::TensorUsage => Kind::Tensor,
            Meaning::Backward => Kind::Backward,
            Meaning::Label => Kind::Runtime,
            Meaning::TorchOom | Meaning::CommInit(..) => Kind::Note,
            _ => Kind::Call,
        }
    }

    /// What the kernel half must know of row `row`.
    pub const fn cookie(&self, row: u8) -> Cookie {
        let structure = match self.meaning.structure() {
            Some((structure, _)) => Some(structure.when()),
            None => None,
        };
        Cookie {
            kind: self.kind(),
            row,
            outs: self.meaning.outs(),
            structure,
            wide: self.meaning.is_wide(),
            harmless: self.meaning.is_harmless(),
            stack: self.meaning.takes_stack(),
            slot: 0,
        }
    }

    /// The words of a structure that the kernel half copies.
    pub fn structure(&self) -> Option<Structure> {
        self.meaning.structure().map(|(structure, arg)| structure.wanted(arg))
    }
}

/// All rows, with their numbers.
pub fn rows() -> impl Iterator<Item = (u8, &'static Probe)> {
    (0u8..).zip(PROBES)
}

/// Rows of a library, with their numbers.
pub fn rows_of(library: Library) -> impl Iterator<Item = (u8, &'static Probe)> {
    rows().filter(move |(_, probe)| probe.library == library)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_symbol_is_listed_once() {
        let names: HashSet<_> = PROBES.iter().map(|probe| probe.symbol).collect();
        assert_eq!(names.len(), PROBES.len());
    }

    #[test]
    fn every_function_of_the_driver_is_in_the_document() {
        let document = include_str!("../../../docs/functions.md");
        for (_, probe) in rows_of(Library::Cuda) {
            let name = format!("`{}`", probe.symbol);
            assert!(document.contains(&name), "docs/functions.md does not name {name}");
        }
    }

    #[test]
    fn what_a_narrow_record_cannot_carry_is_wide() {
        for probe in PROBES {
            let cookie = probe.cookie(0);
            let carried = cookie.wide || cookie.structure.is_some();
            assert!(carried || cookie.outs < 8, "{}", probe.symbol);
        }
    }

    #[test]
    fn structures_are_read_once_and_in_order() {
        for (structure, _) in PROBES.iter().filter_map(|probe| probe.meaning.structure()) {
            let wanted = structure.wanted(Arg(0));
            let offsets = &wanted.offsets[..usize::from(wanted.words)];
            assert!(offsets.is_sorted() && !offsets.is_empty(), "{structure:?}");
        }
    }

    #[test]
    fn libraries_go_by_their_file_names() {
        for (name, library) in [
            ("libcudart.so.12", Some(Library::Cudart)),
            ("libcudart_static.so", None),
            ("libcuda.so.580.159.04", Some(Library::Cuda)),
            ("libcuda.so.1", Some(Library::Cuda)),
            ("libcuda.so", Some(Library::Cuda)),
            ("libcudadebugger.so.1", None),
            ("libc10.so", Some(Library::C10)),
            ("libc10_cuda.so", None),
            ("libnccl.so.2", Some(Library::Nccl)),
            ("libnccl-net.so", None),
        ] {
            assert_eq!(Library::of_file_name(name), library, "{name}");
        }
    }
}
