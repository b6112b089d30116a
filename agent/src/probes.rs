//! THE TABLE: every traced function is one row.
//!
//! One call, followed end to end: row `cuMemAlloc_v2` is `alloc("cuMemAlloc_v2", Device, Out(0),
//! Arg(1))`. [`Probe::cookie`] packs "argument 0 is an out-pointer" into the attach cookie; the
//! kernel half copies the arguments at entry, replaces word 0 by what it points to at return, and
//! sends both with the row's number; [`crate::decode`] reads address and size out of words 0 and 1
//! by this row's [`Meaning`]. Adding a function is adding a line here.
//!
//! Argument positions are from NVIDIA's `cuda.h` and `PyTorch`'s `c10/core/Allocator.h`, counted
//! from 0.

use agent_common::cookie::{Cookie, Kind, MAX_ROWS};
use ledger::call::{Level, Space};

/// Which shared library exports a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Library {
    /// NVIDIA's driver library, `libcuda.so.*`: the account of record.
    Cuda,
    /// `PyTorch`'s core library, `libc10.so`.
    C10,
    /// `PyTorch`'s operators and autograd, `libtorch_cpu.so`.
    TorchCpu,
}

impl Library {
    /// Which library a mapped file is, by its base name.
    pub fn of_file_name(name: &str) -> Option<Self> {
        if name == "libcuda.so" || name.starts_with("libcuda.so.") {
            Some(Self::Cuda)
        } else if name == "libc10.so" {
            Some(Self::C10)
        } else if name == "libtorch_cpu.so" {
            Some(Self::TorchCpu)
        } else {
            None
        }
    }

    /// Its usual file name, for people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda",
            Self::C10 => "libc10",
            Self::TorchCpu => "libtorch_cpu",
        }
    }
}

/// An argument by position, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arg(pub u8);

/// An argument that points to an 8-byte result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Out(pub u8);

/// How a block's size is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// An argument.
    Of(Arg),
    /// The pitch that the driver chose, times an argument.
    Pitch(Out, Arg),
}

/// What a function's arguments mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Hands out a block.
    Alloc(Level, Out, Size),
    /// Frees a block.
    Free(Arg, Space),
    /// Physical memory behind a handle: handle, size, `CUmemAllocationProp *`.
    VmmCreate(Out, Arg, Arg),
    /// Drops a reference of a handle.
    VmmRelease(Arg),
    /// Maps: address, size, handle.
    VmmMap(Arg, Arg, Arg),
    /// Unmaps: address, size.
    VmmUnmap(Arg, Arg),
    /// One more reference: handle, address.
    VmmRetain(Out, Arg),
    /// Exports a handle.
    VmmExport(Arg),
    /// Imports a handle.
    VmmImport(Out),
    /// Reserves address space: address, size.
    Reserve(Out, Arg),
    /// Gives address space back: address, size.
    Unreserve(Arg, Arg),
    /// Pins memory of the program's own: address, size.
    HostRegister(Arg, Arg),
    /// Unpins it.
    HostUnregister(Arg),
    /// New context: context, device.
    CtxCreate(Out, Arg),
    /// Destroys a context.
    CtxDestroy(Arg),
    /// Retains the primary context: context, device.
    PrimaryRetain(Out, Arg),
    /// Releases it: device.
    PrimaryRelease(Arg),
    /// Destroys it: device.
    PrimaryReset(Arg),
    /// Makes a context current.
    CtxSet(Arg),
    /// Pushes a context.
    CtxPush(Arg),
    /// Pops the current context.
    CtxPop,
    /// The process becomes a CUDA process.
    Init,
    /// UUID of a device: `CUuuid *`, device.
    DeviceUuid(Out, Arg),
    /// `PyTorch`'s block reporter, folded into totals in the kernel.
    TensorUsage,
    /// Autograd begins a backward pass.
    Backward,
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
}

const fn cuda(symbol: &'static str, meaning: Meaning) -> Probe {
    Probe { symbol, library: Library::Cuda, meaning }
}

const fn alloc(symbol: &'static str, level: Level, out: Out, size: Arg) -> Probe {
    cuda(symbol, Meaning::Alloc(level, out, Size::Of(size)))
}

const fn free(symbol: &'static str, addr: Arg) -> Probe {
    cuda(symbol, Meaning::Free(addr, Space::Device))
}

use Level::{Device, Host, Managed, Pool};

/// Every traced function; a row's number is its place here.
pub const PROBES: &[Probe] = &[
    // Linear, pitched, managed.
    alloc("cuMemAlloc_v2", Device, Out(0), Arg(1)),
    free("cuMemFree_v2", Arg(0)),
    cuda("cuMemAllocPitch_v2", Meaning::Alloc(Device, Out(0), Size::Pitch(Out(1), Arg(3)))),
    alloc("cuMemAllocManaged", Managed, Out(0), Arg(1)),
    // Stream-ordered; the per-thread-stream twins are functions of their own.
    alloc("cuMemAllocAsync", Pool, Out(0), Arg(1)),
    alloc("cuMemAllocAsync_ptsz", Pool, Out(0), Arg(1)),
    alloc("cuMemAllocFromPoolAsync", Pool, Out(0), Arg(1)),
    alloc("cuMemAllocFromPoolAsync_ptsz", Pool, Out(0), Arg(1)),
    free("cuMemFreeAsync", Arg(0)),
    free("cuMemFreeAsync_ptsz", Arg(0)),
    // Virtual memory management.
    cuda("cuMemCreate", Meaning::VmmCreate(Out(0), Arg(1), Arg(2))),
    cuda("cuMemRelease", Meaning::VmmRelease(Arg(0))),
    cuda("cuMemMap", Meaning::VmmMap(Arg(0), Arg(1), Arg(3))),
    cuda("cuMemUnmap", Meaning::VmmUnmap(Arg(0), Arg(1))),
    cuda("cuMemRetainAllocationHandle", Meaning::VmmRetain(Out(0), Arg(1))),
    cuda("cuMemExportToShareableHandle", Meaning::VmmExport(Arg(1))),
    cuda("cuMemImportFromShareableHandle", Meaning::VmmImport(Out(0))),
    cuda("cuMemAddressReserve", Meaning::Reserve(Out(0), Arg(1))),
    cuda("cuMemAddressFree", Meaning::Unreserve(Arg(0), Arg(1))),
    // Pinned and registered host memory.
    alloc("cuMemHostAlloc", Host, Out(0), Arg(1)),
    alloc("cuMemAllocHost_v2", Host, Out(0), Arg(1)),
    cuda("cuMemFreeHost", Meaning::Free(Arg(0), Space::Host)),
    cuda("cuMemHostRegister_v2", Meaning::HostRegister(Arg(0), Arg(1))),
    cuda("cuMemHostUnregister", Meaning::HostUnregister(Arg(0))),
    // Contexts. libcudart asks for version 7000 of the primary-context calls: the names without a
    // suffix.
    cuda("cuInit", Meaning::Init),
    cuda("cuDeviceGetUuid", Meaning::DeviceUuid(Out(0), Arg(1))),
    cuda("cuDeviceGetUuid_v2", Meaning::DeviceUuid(Out(0), Arg(1))),
    cuda("cuCtxCreate_v2", Meaning::CtxCreate(Out(0), Arg(2))),
    cuda("cuCtxCreate_v3", Meaning::CtxCreate(Out(0), Arg(4))),
    cuda("cuCtxCreate_v4", Meaning::CtxCreate(Out(0), Arg(3))),
    cuda("cuCtxDestroy_v2", Meaning::CtxDestroy(Arg(0))),
    cuda("cuDevicePrimaryCtxRetain", Meaning::PrimaryRetain(Out(0), Arg(1))),
    cuda("cuDevicePrimaryCtxRelease", Meaning::PrimaryRelease(Arg(0))),
    cuda("cuDevicePrimaryCtxRelease_v2", Meaning::PrimaryRelease(Arg(0))),
    cuda("cuDevicePrimaryCtxReset", Meaning::PrimaryReset(Arg(0))),
    cuda("cuDevicePrimaryCtxReset_v2", Meaning::PrimaryReset(Arg(0))),
    cuda("cuCtxSetCurrent", Meaning::CtxSet(Arg(0))),
    cuda("cuCtxPushCurrent_v2", Meaning::CtxPush(Arg(0))),
    cuda("cuCtxPopCurrent_v2", Meaning::CtxPop),
    // PyTorch.
    Probe {
        symbol: "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
        library: Library::C10,
        meaning: Meaning::TensorUsage,
    },
    Probe {
        symbol: "_ZN5torch8autograd6Engine7executeE*",
        library: Library::TorchCpu,
        meaning: Meaning::Backward,
    },
];

const _: () = assert!(PROBES.len() <= MAX_ROWS as usize);

impl Probe {
    /// What the log calls it.
    pub const fn api(&self) -> &'static str {
        match self.meaning {
            Meaning::TensorUsage => "c10",
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
            _ => Kind::Call,
        }
    }

    /// Who calls it is worth a stack: it takes memory, or makes a context.
    const fn takes_stack(&self) -> bool {
        matches!(
            self.meaning,
            Meaning::Alloc(..)
                | Meaning::VmmCreate(..)
                | Meaning::VmmImport(..)
                | Meaning::Reserve(..)
                | Meaning::HostRegister(..)
                | Meaning::CtxCreate(..)
                | Meaning::PrimaryRetain(..)
        )
    }

    /// What the kernel half must know of row `row`.
    pub const fn cookie(&self, row: u16) -> Cookie {
        let mut cookie = Cookie {
            kind: self.kind(),
            row,
            outs: 0,
            extra_arg: None,
            extra_at_exit: false,
            wide: false,
            harmless: false,
            stack: self.takes_stack(),
            slot: 0,
        };
        match self.meaning {
            Meaning::Alloc(_, out, size) => {
                cookie.outs = 1 << out.0;
                if let Size::Pitch(pitch, _) = size {
                    cookie.outs |= 1 << pitch.0;
                    cookie.wide = true;
                }
            }
            Meaning::VmmCreate(out, _, prop) => {
                cookie.outs = 1 << out.0;
                cookie.extra_arg = Some(prop.0);
                cookie.wide = true;
            }
            Meaning::DeviceUuid(out, _) => {
                cookie.extra_arg = Some(out.0);
                cookie.extra_at_exit = true;
                cookie.wide = true;
                cookie.harmless = true;
            }
            Meaning::Init => cookie.harmless = true,
            Meaning::VmmRetain(out, _)
            | Meaning::VmmImport(out)
            | Meaning::Reserve(out, _)
            | Meaning::PrimaryRetain(out, _) => cookie.outs = 1 << out.0,
            Meaning::CtxCreate(out, _) => {
                cookie.outs = 1 << out.0;
                cookie.wide = true;
            }
            Meaning::VmmMap(..) => cookie.wide = true,
            _ => {}
        }
        cookie
    }
}

/// Rows of a library, with their numbers.
pub fn rows_of(library: Library) -> impl Iterator<Item = (u16, &'static Probe)> {
    (0u16..).zip(PROBES).filter(move |(_, probe)| probe.library == library)
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
    fn what_a_narrow_record_cannot_carry_is_wide() {
        for probe in PROBES {
            let cookie = probe.cookie(0);
            assert!(cookie.wide || cookie.outs < 8, "{}", probe.symbol);
            assert!(cookie.wide || cookie.extra_arg.is_none(), "{}", probe.symbol);
        }
    }

    #[test]
    fn libcudart_is_not_libcuda() {
        assert_eq!(Library::of_file_name("libcudart.so.12"), None);
        assert_eq!(Library::of_file_name("libcuda.so.580.159.04"), Some(Library::Cuda));
        assert_eq!(Library::of_file_name("libcuda.so.1"), Some(Library::Cuda));
        assert_eq!(Library::of_file_name("libc10.so"), Some(Library::C10));
        assert_eq!(Library::of_file_name("libc10_cuda.so"), None);
    }
}
