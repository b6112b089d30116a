//! THE TABLE: every traced function is one row.
//!
//! Argument positions are from NVIDIA's `cuda.h` (11.8 to 13.x) and `nccl.h` (2.x), and `PyTorch`'s
//! `c10/core/Allocator.h`, counted from 0. Functions that only move managed memory, ask, launch or
//! copy are not traced: they neither take nor give memory, and some are called a million times.

use ledger::call::{
    Level::{Device, Host, Managed, Pool},
    Space,
};

use super::{Arg, Library, Meaning, Out, Probe, Size, Struct};

const fn probe(library: Library, symbol: &'static str, meaning: Meaning) -> Probe {
    Probe { symbol, library, meaning, narrow: 0 }
}

const fn cuda(symbol: &'static str, meaning: Meaning) -> Probe {
    probe(Library::Cuda, symbol, meaning)
}

/// A function of CUDA's first version, whose addresses and sizes have 32 bits: `narrow` says which
/// arguments.
const fn v1(narrow: u8, symbol: &'static str, meaning: Meaning) -> Probe {
    Probe { symbol, library: Library::Cuda, meaning, narrow }
}

/// A function of NCCL that makes a communicator: [`Meaning::CommInit`]. (`pnccl*` are other names of the
/// same functions.)
const fn comm(symbol: &'static str, rank: Arg, id: Struct, at: Arg) -> Probe {
    probe(Library::Nccl, symbol, Meaning::CommInit(Arg(1), rank, id, at))
}

const fn label(symbol: &'static str) -> Probe {
    probe(Library::Cudart, symbol, Meaning::Label)
}

const fn alloc(level: ledger::call::Level, out: Out, size: Arg) -> Meaning {
    Meaning::Alloc(level, out, Size::Of(size))
}

const FREE: Meaning = Meaning::Free(Arg(0), Space::Device);
const PITCHED: Meaning = Meaning::Alloc(Device, Out(0), Size::Pitch(Out(1), Arg(3)));
const FROM_POOL: Meaning = Meaning::PoolAlloc(Out(0), Arg(1), Arg(2));

/// The argument after [`Struct::UniqueIdByValue`], which takes up no register (System V ABI for x86-64),
/// or one that points to it (AAPCS64).
const AFTER_ID: Arg = Arg(if cfg!(target_arch = "x86_64") { 2 } else { 3 });

/// Every traced function; a row's number is its place here.
pub const PROBES: &[Probe] = &[
    // Linear, pitched, managed.
    cuda("cuMemAlloc_v2", alloc(Device, Out(0), Arg(1))),
    cuda("cuMemFree_v2", FREE),
    cuda("cuMemAllocPitch_v2", PITCHED),
    cuda("cuMemAllocManaged", alloc(Managed, Out(0), Arg(1))),
    v1(0b11, "cuMemAlloc", alloc(Device, Out(0), Arg(1))),
    v1(0b1111, "cuMemAllocPitch", PITCHED),
    v1(0b1, "cuMemFree", FREE),
    // Stream-ordered; the per-thread-stream twins are functions of their own.
    cuda("cuMemAllocAsync", alloc(Pool, Out(0), Arg(1))),
    cuda("cuMemAllocAsync_ptsz", alloc(Pool, Out(0), Arg(1))),
    cuda("cuMemAllocFromPoolAsync", FROM_POOL),
    cuda("cuMemAllocFromPoolAsync_ptsz", FROM_POOL),
    cuda("cuMemFreeAsync", FREE),
    cuda("cuMemFreeAsync_ptsz", FREE),
    cuda("cuMemPoolCreate", Meaning::PoolCreate(Out(0), Arg(1))),
    cuda("cuMemPoolDestroy", Meaning::PoolDestroy(Arg(0))),
    cuda("cuMemPoolTrimTo", Meaning::PoolTrim(Arg(0), Arg(1))),
    cuda("cuMemPoolSetAttribute", Meaning::PoolSet(Arg(0), Arg(1), Arg(2))),
    cuda("cuMemPoolGetAttribute", Meaning::PoolGet(Arg(0), Arg(1), Out(2))),
    cuda("cuDeviceGetDefaultMemPool", Meaning::PoolOfDevice(Out(0), Arg(1))),
    cuda("cuDeviceGetMemPool", Meaning::PoolOfDevice(Out(0), Arg(1))),
    cuda("cuDeviceSetMemPool", Meaning::PoolForDevice(Arg(0), Arg(1))),
    cuda("cuMemGetDefaultMemPool", Meaning::PoolOfLocation(Out(0), Arg(1))),
    cuda("cuMemGetMemPool", Meaning::PoolOfLocation(Out(0), Arg(1))),
    cuda("cuMemSetMemPool", Meaning::PoolForLocation(Arg(0), Arg(2))),
    cuda("cuMemPoolExportToShareableHandle", Meaning::PoolExport(Arg(1))),
    cuda("cuMemPoolImportFromShareableHandle", Meaning::PoolImport(Out(0))),
    cuda("cuMemPoolExportPointer", Meaning::PointerExport(Arg(1))),
    cuda("cuMemPoolImportPointer", Meaning::PointerImport(Out(0))),
    // Virtual memory management.
    cuda("cuMemCreate", Meaning::VmmCreate(Out(0), Arg(1), Arg(2))),
    cuda("cuMemRelease", Meaning::VmmRelease(Arg(0))),
    cuda("cuMemMap", Meaning::VmmMap(Arg(0), Arg(1), Arg(3))),
    cuda("cuMemUnmap", Meaning::VmmUnmap(Arg(0), Arg(1))),
    cuda("cuMemRetainAllocationHandle", Meaning::VmmRetain(Out(0), Arg(1))),
    cuda("cuMemExportToShareableHandle", Meaning::VmmExport(Arg(1))),
    cuda("cuMemImportFromShareableHandle", Meaning::VmmImport(Out(0))),
    cuda("cuMemGetHandleForAddressRange", Meaning::RangeExport(Arg(1))),
    cuda("cuMemAddressReserve", Meaning::Reserve(Out(0), Arg(1))),
    cuda("cuMemAddressFree", Meaning::Unreserve(Arg(0), Arg(1))),
    // Objects that several devices share (NVLink SHARP).
    cuda("cuMulticastCreate", Meaning::MulticastCreate(Out(0), Arg(1))),
    cuda("cuMulticastBindMem", Meaning::MulticastBind(Arg(0), Arg(4))),
    cuda("cuMulticastBindMem_v2", Meaning::MulticastBind(Arg(0), Arg(5))),
    cuda("cuMulticastBindAddr", Meaning::MulticastBind(Arg(0), Arg(3))),
    cuda("cuMulticastBindAddr_v2", Meaning::MulticastBind(Arg(0), Arg(4))),
    cuda("cuMulticastUnbind", Meaning::MulticastUnbind(Arg(0), Arg(3))),
    // Arrays.
    cuda("cuArrayCreate_v2", Meaning::Array(Out(0), Struct::Flat, Arg(1), None)),
    cuda("cuArray3DCreate_v2", Meaning::Array(Out(0), Struct::Deep, Arg(1), None)),
    cuda("cuMipmappedArrayCreate", Meaning::Array(Out(0), Struct::Deep, Arg(1), Some(Arg(2)))),
    cuda("cuArrayCreate", Meaning::Array(Out(0), Struct::FlatV1, Arg(1), None)),
    cuda("cuArray3DCreate", Meaning::Array(Out(0), Struct::DeepV1, Arg(1), None)),
    cuda("cuArrayDestroy", Meaning::ArrayDestroy(Arg(0))),
    cuda("cuMipmappedArrayDestroy", Meaning::ArrayDestroy(Arg(0))),
    cuda("cuMemMapArrayAsync", Meaning::ArrayMap),
    cuda("cuMemMapArrayAsync_ptsz", Meaning::ArrayMap),
    // Pinned and registered host memory.
    cuda("cuMemHostAlloc", alloc(Host, Out(0), Arg(1))),
    cuda("cuMemAllocHost_v2", alloc(Host, Out(0), Arg(1))),
    v1(0b10, "cuMemAllocHost", alloc(Host, Out(0), Arg(1))),
    cuda("cuMemFreeHost", Meaning::Free(Arg(0), Space::Host)),
    cuda("cuMemHostRegister_v2", Meaning::HostRegister(Arg(0), Arg(1))),
    cuda("cuMemHostRegister", Meaning::HostRegister(Arg(0), Arg(1))),
    cuda("cuMemHostUnregister", Meaning::HostUnregister(Arg(0))),
    // Between processes.
    cuda("cuIpcGetMemHandle", Meaning::IpcExport(Arg(0), Arg(1))),
    cuda("cuIpcOpenMemHandle_v2", Meaning::IpcOpen(Out(0), Arg(1))),
    cuda("cuIpcOpenMemHandle", Meaning::IpcOpen(Out(0), Arg(1))),
    cuda("cuIpcCloseMemHandle", Meaning::IpcClose(Arg(0))),
    // Other APIs' memory.
    cuda("cuImportExternalMemory", Meaning::ExternalImport(Out(0), Arg(1))),
    cuda("cuExternalMemoryGetMappedBuffer", Meaning::ExternalBuffer(Out(0), Arg(2))),
    cuda("cuExternalMemoryGetMappedMipmappedArray", Meaning::ExternalArray(Out(0))),
    cuda("cuDestroyExternalMemory", Meaning::ExternalDestroy(Arg(0))),
    cuda("cuGraphicsMapResources", Meaning::GraphicsMap),
    cuda("cuGraphicsMapResources_ptsz", Meaning::GraphicsMap),
    cuda("cuGraphicsUnmapResources", Meaning::GraphicsUnmap),
    cuda("cuGraphicsUnmapResources_ptsz", Meaning::GraphicsUnmap),
    cuda("cuGraphicsResourceGetMappedPointer_v2", Meaning::GraphicsPointer(Out(0), Out(1))),
    // Graphs. Their memory comes and goes with launches, which are not traced.
    cuda("cuGraphAddMemAllocNode", Meaning::GraphAlloc(Arg(4))),
    cuda("cuGraphAddMemFreeNode", Meaning::GraphFree(Arg(4))),
    cuda("cuGraphAddNode", Meaning::GraphNode(Arg(4))),
    cuda("cuGraphAddNode_v2", Meaning::GraphNode(Arg(5))),
    cuda("cuGraphAddNode_v3", Meaning::GraphNode(Arg(5))),
    cuda("cuGraphInstantiate", Meaning::GraphMake(Out(0))),
    cuda("cuGraphInstantiate_v2", Meaning::GraphMake(Out(0))),
    cuda("cuGraphInstantiateWithFlags", Meaning::GraphMake(Out(0))),
    cuda("cuGraphInstantiateWithParams", Meaning::GraphMake(Out(0))),
    cuda("cuGraphInstantiateWithParams_ptsz", Meaning::GraphMake(Out(0))),
    cuda("cuGraphExecDestroy", Meaning::GraphDestroy(Arg(0))),
    cuda("cuGraphDestroy", Meaning::GraphDestroy(Arg(0))),
    cuda("cuDeviceGraphMemTrim", Meaning::GraphTrim(Arg(0))),
    cuda("cuStreamBeginCapture_v2", Meaning::Capture(Arg(0))),
    cuda("cuStreamBeginCapture_v2_ptsz", Meaning::Capture(Arg(0))),
    cuda("cuStreamBeginCaptureToGraph", Meaning::Capture(Arg(0))),
    cuda("cuStreamBeginCaptureToGraph_ptsz", Meaning::Capture(Arg(0))),
    cuda("cuStreamEndCapture", Meaning::Captured(Arg(0))),
    cuda("cuStreamEndCapture_ptsz", Meaning::Captured(Arg(0))),
    // Code.
    cuda("cuModuleLoad", Meaning::ModuleLoad(Out(0))),
    cuda("cuModuleLoadData", Meaning::ModuleLoad(Out(0))),
    cuda("cuModuleLoadDataEx", Meaning::ModuleLoad(Out(0))),
    cuda("cuModuleLoadFatBinary", Meaning::ModuleLoad(Out(0))),
    cuda("cuModuleUnload", Meaning::ModuleUnload(Arg(0))),
    cuda("cuLibraryLoadData", Meaning::ModuleLoad(Out(0))),
    cuda("cuLibraryLoadFromFile", Meaning::ModuleLoad(Out(0))),
    cuda("cuLibraryUnload", Meaning::ModuleUnload(Arg(0))),
    // With lazy loading, the default, code takes memory when it is asked for. `cuKernelGetFunction`,
    // which comes after these, is called in every training step by some libraries: not traced.
    cuda("cuModuleGetFunction", Meaning::Function(Out(0))),
    cuda("cuModuleGetGlobal_v2", Meaning::Function(Out(0))),
    cuda("cuLibraryGetKernel", Meaning::Function(Out(0))),
    cuda("cuLibraryGetModule", Meaning::Function(Out(0))),
    cuda("cuLibraryGetGlobal", Meaning::Function(Out(0))),
    cuda("cuFuncLoad", Meaning::FunctionLoad(Arg(0))),
    // Contexts. libcudart asks for version 7000 of the primary-context calls: the names without a
    // suffix.
    cuda("cuInit", Meaning::Init),
    cuda("cuDeviceGetUuid", Meaning::DeviceUuid(Arg(0), Arg(1))),
    cuda("cuDeviceGetUuid_v2", Meaning::DeviceUuid(Arg(0), Arg(1))),
    cuda("cuDeviceGetPCIBusId", Meaning::DeviceBusId(Arg(0), Arg(2))),
    cuda("cuDeviceGetByPCIBusId", Meaning::DeviceByBusId(Out(0), Arg(1))),
    cuda("cuCtxCreate_v2", Meaning::CtxCreate(Out(0), Arg(2))),
    cuda("cuCtxCreate_v3", Meaning::CtxCreate(Out(0), Arg(4))),
    cuda("cuCtxCreate_v4", Meaning::CtxCreate(Out(0), Arg(3))),
    cuda("cuCtxCreate", Meaning::CtxCreate(Out(0), Arg(2))),
    cuda("cuCtxAttach", Meaning::CtxAttach(Out(0))),
    cuda("cuCtxDetach", Meaning::CtxDetach(Arg(0))),
    cuda("cuCtxDestroy_v2", Meaning::CtxDestroy(Arg(0))),
    cuda("cuCtxDestroy", Meaning::CtxDestroy(Arg(0))),
    cuda("cuDevicePrimaryCtxRetain", Meaning::PrimaryRetain(Out(0), Arg(1))),
    cuda("cuDevicePrimaryCtxRelease", Meaning::PrimaryRelease(Arg(0))),
    cuda("cuDevicePrimaryCtxRelease_v2", Meaning::PrimaryRelease(Arg(0))),
    cuda("cuDevicePrimaryCtxReset", Meaning::PrimaryReset(Arg(0))),
    cuda("cuDevicePrimaryCtxReset_v2", Meaning::PrimaryReset(Arg(0))),
    cuda("cuGreenCtxCreate", Meaning::GreenCreate(Out(0), Arg(2))),
    cuda("cuCtxFromGreenCtx", Meaning::CtxOfGreen(Out(0), Arg(1))),
    cuda("cuGreenCtxDestroy", Meaning::GreenDestroy(Arg(0))),
    cuda("cuCtxSetCurrent", Meaning::CtxSet(Arg(0))),
    cuda("cuCtxPushCurrent_v2", Meaning::CtxPush(Arg(0))),
    cuda("cuCtxPushCurrent", Meaning::CtxPush(Arg(0))),
    cuda("cuCtxPopCurrent_v2", Meaning::CtxPop),
    cuda("cuCtxPopCurrent", Meaning::CtxPop),
    cuda("cuCtxSetLimit", Meaning::CtxLimit(Arg(0), Arg(1))),
    cuda("cuCheckpointProcessCheckpoint", Meaning::Checkpoint(Arg(0))),
    cuda("cuCheckpointProcessRestore", Meaning::Restore(Arg(0))),
    // PyTorch.
    probe(
        Library::C10,
        "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
        Meaning::TensorUsage,
    ),
    probe(Library::C10, "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE", Meaning::TorchOom),
    probe(Library::TorchCpu, "_ZN5torch8autograd6Engine7executeE*", Meaning::Backward),
    // NCCL. Of its other ways to a communicator, `ncclCommInitAll` is a process by itself, and those that
    // begin with a communicator make no larger one.
    comm("ncclCommInitRank", AFTER_ID, Struct::UniqueIdByValue, Arg(2)),
    comm("ncclCommInitRankConfig", AFTER_ID, Struct::UniqueIdByValue, Arg(2)),
    comm("ncclCommInitRankScalable", Arg(2), Struct::UniqueId, Arg(4)),
    // The runtime: labels only, where they are asked for. Each of these ends in a driver call above.
    label("cudaMalloc"),
    label("cudaFree"),
    label("cudaMallocPitch"),
    label("cudaMalloc3D"),
    label("cudaMallocManaged"),
    label("cudaMallocAsync"),
    label("cudaMallocAsync_ptsz"),
    label("cudaMallocFromPoolAsync"),
    label("cudaMallocFromPoolAsync_ptsz"),
    label("cudaFreeAsync"),
    label("cudaFreeAsync_ptsz"),
    label("cudaMemPoolCreate"),
    label("cudaMemPoolDestroy"),
    label("cudaMemPoolTrimTo"),
    label("cudaMemPoolSetAttribute"),
    label("cudaMallocHost"),
    label("cudaHostAlloc"),
    label("cudaFreeHost"),
    label("cudaHostRegister"),
    label("cudaHostUnregister"),
    label("cudaMallocArray"),
    label("cudaMalloc3DArray"),
    label("cudaMallocMipmappedArray"),
    label("cudaFreeArray"),
    label("cudaFreeMipmappedArray"),
    label("cudaIpcGetMemHandle"),
    label("cudaIpcOpenMemHandle"),
    label("cudaIpcCloseMemHandle"),
    label("cudaGraphAddMemAllocNode"),
    label("cudaGraphAddMemFreeNode"),
    label("cudaGraphAddNode"),
    label("cudaDeviceGraphMemTrim"),
    label("cudaImportExternalMemory"),
    label("cudaExternalMemoryGetMappedBuffer"),
    label("cudaDestroyExternalMemory"),
    label("cudaDeviceReset"),
    label("cudaInitDevice"),
    label("cudaSetDevice"),
    label("cudaDeviceSetLimit"),
    label("cudaLibraryLoadData"),
    label("cudaLibraryLoadFromFile"),
    label("cudaLibraryUnload"),
];
