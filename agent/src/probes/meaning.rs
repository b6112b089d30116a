//! What a function's arguments mean.

use agent_common::{
    call::{EXTRA_WORDS, Structure},
    cookie::When,
};
use ledger::call::{Level, Space};

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

/// A structure behind an argument, by the words that matter of it. Offsets are from `cuda.h`, and
/// `nccl.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Struct {
    /// `CUmemAllocationProp`, `CUmemPoolProps`: the location.
    Location,
    /// `CUmemLocation` itself.
    BareLocation,
    /// `CUuuid`.
    Uuid,
    /// A PCI bus id as text, `0000:1b:00.0` for example.
    BusId,
    /// `CUDA_ARRAY_DESCRIPTOR`: width, height; format and channels.
    Flat,
    /// `CUDA_ARRAY3D_DESCRIPTOR`: width, height, depth; format and channels; flags.
    Deep,
    /// `CUDA_ARRAY_DESCRIPTOR_v1`: the same in 32 bits each.
    FlatV1,
    /// `CUDA_ARRAY3D_DESCRIPTOR_v1`.
    DeepV1,
    /// `CUipcMemHandle`, filled in by the driver.
    IpcHandle,
    /// `CUipcMemHandle`, passed by value.
    IpcHandleByValue,
    /// `CUDA_MEM_ALLOC_NODE_PARAMS`: location, size, and the address that the driver chose.
    AllocNode,
    /// `CUgraphNodeParams`: type, address of a free node; and the same of an alloc node.
    Node,
    /// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`: size.
    ExternalHandle,
    /// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`: size.
    ExternalBuffer,
    /// `CUmulticastObjectProp`: size.
    Multicast,
    /// A 64-bit value that the caller gives.
    Given,
    /// The beginning of an `ncclUniqueId`: a random number and the address of the root are in it, the
    /// rest of its 128 bytes is 0.
    UniqueId,
    /// The same, passed by value.
    UniqueIdByValue,
}

impl Struct {
    /// Where its words begin, bytes from its own beginning.
    #[allow(clippy::match_same_arms, reason = "structures that look alike by chance")]
    const fn offsets(self) -> &'static [u16] {
        match self {
            Self::Location => &[8],
            Self::Uuid | Self::BusId => &[0, 8],
            Self::Flat => &[0, 8, 16],
            Self::Deep => &[0, 8, 16, 24, 32],
            Self::FlatV1 => &[0, 8],
            Self::DeepV1 => &[0, 8, 16],
            Self::IpcHandle | Self::IpcHandleByValue | Self::UniqueId | Self::UniqueIdByValue => {
                &[0, 8, 16, 24, 32, 40, 48, 56]
            }
            Self::AllocNode => &[8, 104, 112],
            Self::Node => &[0, 16, 24, 120, 128],
            Self::ExternalHandle => &[24],
            Self::ExternalBuffer | Self::Multicast => &[8],
            Self::BareLocation | Self::Given => &[0],
        }
    }

    /// Who fills it in.
    pub const fn when(self) -> When {
        match self {
            Self::Uuid | Self::BusId | Self::IpcHandle | Self::AllocNode | Self::Node => When::Exit,
            _ => When::Entry,
        }
    }

    /// What the kernel half is told of it, as argument `arg`.
    pub fn wanted(self, arg: Arg) -> Structure {
        let mut offsets = [0; EXTRA_WORDS];
        for (to, from) in offsets.iter_mut().zip(self.offsets()) {
            *to = *from;
        }
        Structure {
            arg: arg.0,
            by_value: u8::from(matches!(self, Self::IpcHandleByValue | Self::UniqueIdByValue)),
            words: self.offsets().len() as u8,
            pad: 0,
            offsets,
        }
    }
}

/// What a function's arguments mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Hands out a block.
    Alloc(Level, Out, Size),
    /// Frees a block.
    Free(Arg, Space),
    /// Hands out a block of a pool: address, size, pool.
    PoolAlloc(Out, Arg, Arg),
    /// New pool: pool, [`Struct::Location`].
    PoolCreate(Out, Arg),
    /// Destroys a pool.
    PoolDestroy(Arg),
    /// Gives back what a pool keeps above a size: pool, bytes.
    PoolTrim(Arg, Arg),
    /// Sets an attribute: pool, attribute, [`Struct::Given`].
    PoolSet(Arg, Arg, Arg),
    /// Reads an attribute: pool, attribute, value.
    PoolGet(Arg, Arg, Out),
    /// The pool of a device: pool, device.
    PoolOfDevice(Out, Arg),
    /// Gives a device another pool: device, pool.
    PoolForDevice(Arg, Arg),
    /// The pool of a location: pool, [`Struct::BareLocation`].
    PoolOfLocation(Out, Arg),
    /// Gives a location another pool: [`Struct::BareLocation`], pool.
    PoolForLocation(Arg, Arg),
    /// Exports a pool.
    PoolExport(Arg),
    /// Imports a pool.
    PoolImport(Out),
    /// Exports a block of a pool: its address.
    PointerExport(Arg),
    /// Imports one: address.
    PointerImport(Out),
    /// An array: handle, description, number of mip levels.
    Array(Out, Struct, Arg, Option<Arg>),
    /// Destroys an array.
    ArrayDestroy(Arg),
    /// Maps tiles of sparse arrays.
    ArrayMap,
    /// Exports a block to another process: [`Struct::IpcHandle`], address.
    IpcExport(Arg, Arg),
    /// Opens another process's block: address, [`Struct::IpcHandleByValue`].
    IpcOpen(Out, Arg),
    /// Closes it.
    IpcClose(Arg),
    /// Exports a range of addresses as a file: address.
    RangeExport(Arg),
    /// Adds a node that allocates to a graph: [`Struct::AllocNode`].
    GraphAlloc(Arg),
    /// Adds a node that frees: address.
    GraphFree(Arg),
    /// Adds a node of any type: [`Struct::Node`].
    GraphNode(Arg),
    /// Makes an executable graph.
    GraphMake(Out),
    /// Destroys a graph or an executable graph.
    GraphDestroy(Arg),
    /// Gives back what a device keeps for graphs: device.
    GraphTrim(Arg),
    /// Loads code: handle.
    ModuleLoad(Out),
    /// Unloads it.
    ModuleUnload(Arg),
    /// Asks for a function or variable of it, which may load it: handle.
    Function(Out),
    /// Loads a function.
    FunctionLoad(Arg),
    /// A stream begins to be recorded into a graph.
    Capture(Arg),
    /// It ends.
    Captured(Arg),
    /// Memory of another API: handle, [`Struct::ExternalHandle`].
    ExternalImport(Out, Arg),
    /// A buffer in it: address, [`Struct::ExternalBuffer`].
    ExternalBuffer(Out, Arg),
    /// An array in it: handle.
    ExternalArray(Out),
    /// Gives it up.
    ExternalDestroy(Arg),
    /// Maps resources of a graphics API.
    GraphicsMap,
    /// Unmaps them.
    GraphicsUnmap,
    /// Address and size of a mapped one.
    GraphicsPointer(Out, Out),
    /// An object that several devices share: handle, [`Struct::Multicast`].
    MulticastCreate(Out, Arg),
    /// Binds memory to it: object, size.
    MulticastBind(Arg, Arg),
    /// Unbinds: object, size.
    MulticastUnbind(Arg, Arg),
    /// Physical memory behind a handle: handle, size, [`Struct::Location`].
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
    /// One more user of the current context: context.
    CtxAttach(Out),
    /// One user less.
    CtxDetach(Arg),
    /// Destroys a context.
    CtxDestroy(Arg),
    /// Retains the primary context: context, device.
    PrimaryRetain(Out, Arg),
    /// Releases it: device.
    PrimaryRelease(Arg),
    /// Destroys it: device.
    PrimaryReset(Arg),
    /// A context of a part of a device: handle, device.
    GreenCreate(Out, Arg),
    /// The context that calls can be made in: context, green context.
    CtxOfGreen(Out, Arg),
    /// Destroys it.
    GreenDestroy(Arg),
    /// Makes a context current.
    CtxSet(Arg),
    /// Pushes a context.
    CtxPush(Arg),
    /// Pops the current context.
    CtxPop,
    /// A limit, some of which take memory: limit, value.
    CtxLimit(Arg, Arg),
    /// Moves a process's device memory to the host: process.
    Checkpoint(Arg),
    /// Moves it back.
    Restore(Arg),
    /// The process becomes a CUDA process.
    Init,
    /// UUID of a device: [`Struct::Uuid`], device.
    DeviceUuid(Arg, Arg),
    /// PCI bus id of a device: [`Struct::BusId`], device.
    DeviceBusId(Arg, Arg),
    /// Device of a PCI bus id: device, text.
    DeviceByBusId(Out, Arg),
    /// `PyTorch`'s block reporter, folded into totals in the kernel.
    TensorUsage,
    /// `PyTorch` is about to throw `OutOfMemoryError`: bytes asked for, allocated, reserved, device.
    TorchOom,
    /// Autograd begins a backward pass.
    Backward,
    /// The process takes part in a communicator: its ranks, which of them, what stands for it on all of
    /// them, and in which argument.
    CommInit(Arg, Arg, Struct, Arg),
    /// A function of the runtime, the label of what it calls.
    Label,
}

impl Meaning {
    /// The structure among its arguments.
    pub const fn structure(self) -> Option<(Struct, Arg)> {
        Some(match self {
            Self::VmmCreate(_, _, at) | Self::PoolCreate(_, at) => (Struct::Location, at),
            Self::PoolOfLocation(_, at) | Self::PoolForLocation(at, _) => {
                (Struct::BareLocation, at)
            }
            Self::Array(_, shape, at, _) => (shape, at),
            Self::PoolSet(_, _, at) => (Struct::Given, at),
            Self::IpcExport(at, _) => (Struct::IpcHandle, at),
            Self::IpcOpen(_, at) => (Struct::IpcHandleByValue, at),
            Self::GraphAlloc(at) => (Struct::AllocNode, at),
            Self::GraphNode(at) => (Struct::Node, at),
            Self::ExternalImport(_, at) => (Struct::ExternalHandle, at),
            Self::ExternalBuffer(_, at) => (Struct::ExternalBuffer, at),
            Self::MulticastCreate(_, at) => (Struct::Multicast, at),
            Self::DeviceUuid(at, _) => (Struct::Uuid, at),
            Self::DeviceBusId(at, _) | Self::DeviceByBusId(_, at) => (Struct::BusId, at),
            Self::CommInit(_, _, id, at) => (id, at),
            _ => return None,
        })
    }

    /// The arguments that point to an 8-byte result, a bit each.
    pub const fn outs(self) -> u8 {
        match self {
            Self::Alloc(_, out, Size::Pitch(pitch, _)) => 1 << out.0 | 1 << pitch.0,
            Self::GraphicsPointer(addr, size) => 1 << addr.0 | 1 << size.0,
            Self::Alloc(_, out, Size::Of(_))
            | Self::PoolAlloc(out, ..)
            | Self::PoolCreate(out, _)
            | Self::PoolGet(.., out)
            | Self::PoolOfDevice(out, _)
            | Self::PoolOfLocation(out, _)
            | Self::PoolImport(out)
            | Self::PointerImport(out)
            | Self::Array(out, ..)
            | Self::IpcOpen(out, _)
            | Self::GraphMake(out)
            | Self::ModuleLoad(out)
            | Self::Function(out)
            | Self::ExternalImport(out, _)
            | Self::ExternalBuffer(out, _)
            | Self::ExternalArray(out)
            | Self::MulticastCreate(out, _)
            | Self::VmmCreate(out, ..)
            | Self::VmmRetain(out, _)
            | Self::VmmImport(out)
            | Self::Reserve(out, _)
            | Self::CtxCreate(out, _)
            | Self::CtxAttach(out)
            | Self::PrimaryRetain(out, _)
            | Self::GreenCreate(out, _)
            | Self::CtxOfGreen(out, _)
            | Self::DeviceByBusId(out, _) => 1 << out.0,
            _ => 0,
        }
    }

    /// An argument beyond the third matters.
    pub const fn is_wide(self) -> bool {
        match self {
            Self::Alloc(_, _, Size::Pitch(_, Arg(last)))
            | Self::VmmMap(_, _, Arg(last))
            | Self::CtxCreate(_, Arg(last))
            | Self::MulticastBind(_, Arg(last))
            | Self::MulticastUnbind(_, Arg(last))
            | Self::GraphFree(Arg(last)) => last > 2,
            Self::TorchOom => true,
            _ => false,
        }
    }

    /// Changes nothing in the account: one that was in flight when its probe came is no loss.
    pub const fn is_harmless(self) -> bool {
        matches!(
            self,
            Self::Init
                | Self::DeviceUuid(..)
                | Self::DeviceBusId(..)
                | Self::DeviceByBusId(..)
                | Self::PoolSet(..)
                | Self::PoolGet(..)
                | Self::PoolOfDevice(..)
                | Self::PoolForDevice(..)
                | Self::PoolOfLocation(..)
                | Self::PoolForLocation(..)
                | Self::CtxLimit(..)
                | Self::Function(..)
                | Self::FunctionLoad(..)
                | Self::Capture(..)
                | Self::Captured(..)
        )
    }

    /// Who calls it is worth a stack: it takes memory, or would have, or makes a context.
    pub const fn takes_stack(self) -> bool {
        matches!(
            self,
            Self::Alloc(..)
                | Self::PoolAlloc(..)
                | Self::PoolCreate(..)
                | Self::PointerImport(..)
                | Self::Array(..)
                | Self::IpcOpen(..)
                | Self::GraphAlloc(..)
                | Self::GraphMake(..)
                | Self::ModuleLoad(..)
                | Self::ExternalImport(..)
                | Self::ExternalBuffer(..)
                | Self::MulticastCreate(..)
                | Self::VmmCreate(..)
                | Self::VmmImport(..)
                | Self::Reserve(..)
                | Self::HostRegister(..)
                | Self::CtxCreate(..)
                | Self::PrimaryRetain(..)
                | Self::GreenCreate(..)
                | Self::CtxLimit(..)
                | Self::TorchOom
        )
    }
}
