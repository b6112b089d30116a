//! What a call asked for, with the driver's answer filled in.

use super::Level;

/// What a call asked for. Sizes are bytes; addresses are what the driver handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A new block at `addr` in the calling thread's current context.
    Alloc {
        /// The kind of memory.
        level: Level,
        /// Device (or host) address that the driver returned.
        addr: u64,
        /// Bytes asked for (pitch x height for a pitched block); `None` where a successful
        /// call's size could not be read.
        size_bytes: Option<u64>,
    },
    /// `PyTorch`'s allocator handed a block out.
    TensorAlloc {
        /// Its address.
        addr: u64,
        /// Bytes, as `PyTorch` rounds them.
        size_bytes: u64,
        /// The device's number in the process.
        ordinal: i32,
    },
    /// `PyTorch`'s allocator took a block back.
    TensorFree {
        /// Its address.
        addr: u64,
    },
    /// Frees the block at `addr`, whatever its level (`cuMemFree` takes device, managed and pool
    /// blocks alike). Address 0 is an initialisation idiom, not an event about memory.
    Free {
        /// Address to free.
        addr: u64,
        /// The address space: host frees never match device blocks.
        space: Space,
    },
    /// A block of a pool that the call names; its device is the pool's.
    PoolAlloc {
        /// Device address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
        /// `CUmemoryPool`.
        pool: u64,
    },
    /// `cuMemPoolCreate`.
    PoolCreate {
        /// `CUmemoryPool`.
        pool: u64,
        /// Where its memory lies.
        location: Location,
    },
    /// `cuMemPoolDestroy`: live blocks stay until they are freed.
    PoolDestroy {
        /// `CUmemoryPool`.
        pool: u64,
    },
    /// `cuMemPoolTrimTo`: how much is given back is not told.
    PoolTrim {
        /// `CUmemoryPool`.
        pool: u64,
        /// Bytes that the pool may keep.
        keep_bytes: u64,
    },
    /// A size that belongs to a pool was set (its release threshold) or read (what it has reserved).
    PoolSize {
        /// `CUmemoryPool`.
        pool: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// A pool is a device's: said by the calls that get or set a device's pool.
    PoolOf {
        /// `CUmemoryPool`.
        pool: u64,
        /// Where its memory lies.
        location: Location,
    },
    /// `cuMemPoolExportToShareableHandle`.
    PoolExport {
        /// `CUmemoryPool`.
        pool: u64,
    },
    /// `cuMemPoolImportFromShareableHandle`: another process's pool.
    PoolImport {
        /// `CUmemoryPool`.
        pool: u64,
    },
    /// An array, behind a handle that is no address.
    Array {
        /// `CUarray` or `CUmipmappedArray`.
        handle: u64,
        /// What it holds; `None` where it could not be read.
        shape: Option<ArrayShape>,
    },
    /// `cuArrayDestroy`, `cuMipmappedArrayDestroy`.
    ArrayDestroy {
        /// The handle.
        handle: u64,
    },
    /// `cuMemMapArrayAsync`: tiles of sparse arrays were mapped or unmapped.
    ArrayMap,
    /// A block of this process may be used by others from here on.
    BlockExport {
        /// An address in the block.
        addr: u64,
        /// What stands for it in the process that opens it; `None`: not known.
        key: Option<u64>,
    },
    /// Another process's block appears at an address.
    BlockImport {
        /// The address.
        addr: u64,
        /// What the exporter was given for it; `None`: not known.
        key: Option<u64>,
    },
    /// `cuIpcCloseMemHandle`.
    BlockClose {
        /// The address.
        addr: u64,
    },
    /// A node of a graph that allocates: its address is fixed, its memory comes with a launch.
    GraphAlloc {
        /// The address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
        /// Where the memory will lie.
        location: Location,
    },
    /// A graph's other doings: a free node, instantiation, destruction.
    Graph {
        /// The address to free, or the handle.
        addr: u64,
    },
    /// `cuDeviceGraphMemTrim`: how much is given back is not told.
    GraphTrim {
        /// CUDA ordinal.
        ordinal: i32,
    },
    /// Code was loaded, asked for (which may load it) or unloaded: device memory of a size that the
    /// driver does not tell.
    Module {
        /// `CUmodule`, `CUlibrary`, `CUfunction`, `CUkernel`, or a variable's address.
        handle: u64,
        /// It was loaded or unloaded, not just asked for.
        loads: bool,
    },
    /// `cuStreamBeginCapture`, `cuStreamEndCapture`: what is allocated in between is a graph's.
    Capture {
        /// `CUstream`.
        stream: u64,
        /// It begins, or ends.
        begins: bool,
    },
    /// `cuImportExternalMemory`: memory of another API.
    ExternalImport {
        /// `CUexternalMemory`.
        handle: u64,
        /// Bytes.
        size_bytes: Option<u64>,
    },
    /// A buffer of it, which `cuMemFree` takes away.
    ExternalBuffer {
        /// Its address.
        addr: u64,
        /// Bytes.
        size_bytes: Option<u64>,
    },
    /// An array of it.
    ExternalArray {
        /// `CUmipmappedArray`.
        handle: u64,
    },
    /// `cuDestroyExternalMemory`.
    ExternalDestroy {
        /// `CUexternalMemory`.
        handle: u64,
    },
    /// A resource of a graphics API is mapped (at `addr`, where that was asked).
    GraphicsMap {
        /// Its address, or 0.
        addr: u64,
        /// Bytes.
        size_bytes: Option<u64>,
    },
    /// Such resources are unmapped.
    GraphicsUnmap,
    /// `cuMulticastCreate`: address space that several devices share. `cuMemRelease` ends it.
    MulticastCreate {
        /// The handle.
        handle: u64,
        /// Bytes.
        size_bytes: Option<u64>,
    },
    /// Memory was bound to a multicast object.
    MulticastBind {
        /// The object.
        handle: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// Memory was unbound from it.
    MulticastUnbind {
        /// The object.
        handle: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemCreate`: physical memory behind a handle.
    VmmCreate {
        /// `CUmemGenericAllocationHandle`.
        handle: u64,
        /// Bytes.
        size_bytes: u64,
        /// Where the memory lies, from `CUmemAllocationProp.location`.
        location: Location,
    },
    /// `cuMemRelease`: drops one reference of a handle.
    VmmRelease {
        /// The handle.
        handle: u64,
    },
    /// `cuMemMap`: maps (part of) a handle; a map holds a reference.
    VmmMap {
        /// First mapped address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
        /// The handle.
        handle: u64,
    },
    /// `cuMemUnmap`: drops every map inside the range.
    VmmUnmap {
        /// First address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemRetainAllocationHandle`: one more reference of the handle that is mapped at `addr`.
    VmmRetain {
        /// The handle that the driver returned (equal to the one mapped there).
        handle: u64,
        /// An address inside a map.
        addr: u64,
    },
    /// `cuMemExportToShareableHandle`: the exported object keeps the pages alive.
    VmmExport {
        /// The handle.
        handle: u64,
    },
    /// `cuMemImportFromShareableHandle`: another process's memory behind a new handle.
    VmmImport {
        /// The new handle.
        handle: u64,
    },
    /// `cuMemAddressReserve`: address space only.
    Reserve {
        /// First address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemAddressFree`.
    Unreserve {
        /// First address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemHostRegister`: pins memory of the program's own.
    HostRegister {
        /// Host address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemHostUnregister`.
    HostUnregister {
        /// Host address.
        addr: u64,
    },
    /// `cuCtxCreate*`: a new context, current on the calling thread.
    CtxCreate {
        /// `CUcontext`.
        ctx: u64,
        /// CUDA ordinal of its device.
        ordinal: i32,
    },
    /// `cuCtxAttach`: one more user of the current context.
    CtxAttach {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuCtxDetach`: one user less; the last one destroys it.
    CtxDetach {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuGreenCtxCreate`: a context of a part of a device.
    GreenCreate {
        /// `CUgreenCtx`.
        green: u64,
        /// CUDA ordinal of its device.
        ordinal: i32,
    },
    /// `cuCtxFromGreenCtx`: the context in which calls are made.
    CtxOfGreen {
        /// `CUcontext`.
        ctx: u64,
        /// `CUgreenCtx`.
        green: u64,
    },
    /// `cuGreenCtxDestroy`.
    GreenDestroy {
        /// `CUgreenCtx`.
        green: u64,
    },
    /// `cuCtxSetLimit`: stack, heap and printf buffer take device memory.
    CtxLimit {
        /// `CUlimit`.
        limit: u32,
        /// The value asked for, bytes for those three.
        value: u64,
    },
    /// The driver moves a process's device memory to the host, or back.
    Checkpoint {
        /// The process, as the caller numbers it.
        pid: u32,
    },
    /// `cuCtxDestroy*`: frees all that was made in the context.
    CtxDestroy {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuDevicePrimaryCtxRetain`: the first retain creates the device's primary context.
    PrimaryRetain {
        /// `CUcontext`.
        ctx: u64,
        /// CUDA ordinal of its device.
        ordinal: i32,
    },
    /// `cuDevicePrimaryCtxRelease*`: the last release destroys the primary context.
    PrimaryRelease {
        /// CUDA ordinal.
        ordinal: i32,
    },
    /// `cuDevicePrimaryCtxReset*`: destroys the primary context whoever retains it.
    PrimaryReset {
        /// CUDA ordinal.
        ordinal: i32,
    },
    /// `cuCtxSetCurrent`: replaces the top of the thread's context stack (0 = none).
    CtxSet {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuCtxPushCurrent*`.
    CtxPush {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuCtxPopCurrent*`.
    CtxPop,
    /// Changes nothing in the account.
    Nothing,
    /// `PyTorch` is about to throw `OutOfMemoryError`, after it gave back what it could.
    TorchOom {
        /// Bytes asked for, as `PyTorch` rounds them.
        size_bytes: u64,
        /// `torch.cuda.memory_allocated()` of the device.
        allocated_bytes: u64,
        /// `torch.cuda.memory_reserved()` of it.
        reserved_bytes: u64,
        /// The device's number in the process.
        ordinal: i32,
    },
    /// `ncclCommInitRank` and its kin: the process takes part in a communicator.
    CommInit {
        /// Which of its ranks the process is.
        rank: i32,
        /// Its ranks.
        size: i32,
        /// What stands for it on all of them; `None`: not known.
        key: Option<u64>,
    },
    /// `cuInit`: the process becomes a CUDA process. Seen from the first one, nothing was missed.
    Init,
    /// `cuDeviceGetUuid*`: the process's own ordinal -> UUID map.
    DeviceUuid {
        /// CUDA ordinal.
        ordinal: i32,
        /// The 16 bytes of `CUuuid`.
        uuid: [u8; 16],
    },
    /// The PCI address of a device: the same.
    DeviceBusId {
        /// CUDA ordinal.
        ordinal: i32,
        /// Text, `0000:1b:00.0` for example, up to its first zero.
        bus_id: [u8; 16],
    },
}

/// Which address space a free works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Device addresses: device, managed and pool blocks.
    Device,
    /// Pinned host memory.
    Host,
}

/// `CUmemLocation` of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// Device memory of this CUDA ordinal.
    Device(i32),
    /// Host memory (`CU_MEM_LOCATION_TYPE_HOST`, `HOST_NUMA`, `HOST_NUMA_CURRENT`).
    Host,
    /// The properties could not be read.
    Unknown,
}

/// What an array holds, from its `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayShape {
    /// Elements in a row.
    pub width: u64,
    /// Rows; 0 for an array of one dimension.
    pub height: u64,
    /// Slices, layers or cube faces; 0 where it has none.
    pub depth: u64,
    /// `CUarray_format`.
    pub format: u32,
    /// Channels of an element.
    pub channels: u32,
    /// `CUDA_ARRAY3D_*`.
    pub flags: u32,
    /// Mip levels; 1 for an array without.
    pub levels: u32,
}

impl ArrayShape {
    /// `CUDA_ARRAY3D_LAYERED`, `CUDA_ARRAY3D_CUBEMAP` (`cuda.h`): `depth` counts layers or faces,
    /// which mip levels do not halve.
    const LAYERED: u32 = 0x01 | 0x04;
    /// `CUDA_ARRAY3D_SPARSE`, `CUDA_ARRAY3D_DEFERRED_MAPPING`: no memory until it is mapped.
    const UNMAPPED: u32 = 0x40 | 0x80;

    /// It has no memory of its own.
    pub const fn is_unmapped(&self) -> bool {
        self.flags & Self::UNMAPPED != 0
    }

    /// Bytes of its elements: the least that it takes, since the driver pads arrays in ways of its
    /// own. `None` for formats whose elements are no whole bytes each.
    pub fn least_bytes(&self) -> Option<u64> {
        let element = u64::from(self.channels).checked_mul(format_bytes(self.format)?)?;
        let mut sum = 0u64;
        for level in 0..self.levels.clamp(1, 32) {
            let shrunk = |length: u64| (length >> level).max(1);
            let depth = if self.flags & Self::LAYERED == 0 {
                shrunk(self.depth)
            } else {
                self.depth.max(1)
            };
            let elements =
                shrunk(self.width).checked_mul(shrunk(self.height))?.checked_mul(depth)?;
            sum = sum.checked_add(elements.checked_mul(element)?)?;
        }
        Some(sum)
    }
}

/// Bytes of one channel (`CUarray_format`, `cuda.h`); `None` for packed and compressed formats.
const fn format_bytes(format: u32) -> Option<u64> {
    match format {
        0x01 | 0x08 => Some(1),        // 8-bit integers
        0x02 | 0x09 | 0x10 => Some(2), // 16-bit integers, half
        0x03 | 0x0a | 0x20 => Some(4), // 32-bit integers, float
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::ArrayShape;

    const FLAT: ArrayShape = ArrayShape {
        width: 100,
        height: 10,
        depth: 0,
        format: 0x20,
        channels: 4,
        flags: 0,
        levels: 1,
    };

    #[test]
    fn arrays_take_at_least_their_elements() {
        assert_eq!(FLAT.least_bytes(), Some(100 * 10 * 16));
        let line = ArrayShape { height: 0, format: 0x01, channels: 1, ..FLAT };
        assert_eq!(line.least_bytes(), Some(100));
        let solid = ArrayShape { depth: 3, ..FLAT };
        assert_eq!(solid.least_bytes(), Some(3 * 16_000));
        assert_eq!(ArrayShape { format: 0x91, ..FLAT }.least_bytes(), None, "compressed");
        assert_eq!(ArrayShape { width: u64::MAX, ..FLAT }.least_bytes(), None);
    }

    #[test]
    fn mip_levels_halve_all_but_layers() {
        let levels = ArrayShape { width: 8, height: 4, format: 1, channels: 1, levels: 4, ..FLAT };
        assert_eq!(levels.least_bytes(), Some(32 + 8 + 2 + 1));
        let layered = ArrayShape { depth: 5, flags: 1, ..levels };
        assert_eq!(layered.least_bytes(), Some(5 * 43));
        let solid = ArrayShape { depth: 5, ..levels };
        assert_eq!(solid.least_bytes(), Some(5 * 32 + 2 * 8 + 2 + 1));
    }
}
