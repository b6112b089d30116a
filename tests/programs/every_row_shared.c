/* every_row: memory of other APIs, of several devices, and of other processes. */
#define _GNU_SOURCE
#include "every_row.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

static void external_views(CUexternalMemory memory)
{
    CUdeviceptr p;
    CUmipmappedArray array;
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC part = {.offset = 0, .size = MIB};
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC desc = {
        .arrayDesc = {64, 64, 0, CU_AD_FORMAT_FLOAT, 1, 0}, .numLevels = 1};
    if (gave(cuExternalMemoryGetMappedBuffer, (&p, memory, &part), "reserve", "virtual", p, MIB))
        took(cuMemFree_v2, (p), "virtual", p, MIB);
    if (told(cuExternalMemoryGetMappedMipmappedArray, (&array, memory, &desc), "reserve",
             "virtual", array, UNKNOWN))
        told(cuMipmappedArrayDestroy, (array), "free", "virtual", array, UNKNOWN);
}

/* Memory with a descriptor: what the simulated driver takes for another API's is a plain file; a
 * real one has to be shown its own. */
static int memory_file(CUmemGenericAllocationHandle *memory, uint64_t bytes)
{
    CUmemAllocationProp prop = PINNED_ON_0;
    int fd = -1;
    if (is_simulated()) {
        fd = memfd_create("memory", MFD_CLOEXEC);
        EXPECT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
        return fd;
    }
    if (gave(cuMemCreate, (memory, bytes, &prop, 0), "alloc", "device", *memory, bytes))
        told(cuMemExportToShareableHandle,
             (&fd, *memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "export", "device",
             *memory, bytes);
    return fd;
}

static void graphics(void)
{
    static int shown; /* any address will do for the simulated driver */
    CUgraphicsResource resource = (CUgraphicsResource)&shown;
    CUdeviceptr p;
    size_t bytes;
    if (!is_simulated()) {
        static const char *const functions[] = {
            "cuGraphicsMapResources", "cuGraphicsMapResources_ptsz",
            "cuGraphicsResourceGetMappedPointer_v2", "cuGraphicsUnmapResources",
            "cuGraphicsUnmapResources_ptsz"};
        for (unsigned i = 0; i < sizeof functions / sizeof *functions; i++)
            skipped(functions[i], "no graphics API is at hand");
        return;
    }
    told(cuGraphicsMapResources, (1, &resource, 0), "map", "virtual", 0, UNKNOWN);
    told(cuGraphicsMapResources_ptsz, (1, &resource, 0), "map", "virtual", 0, UNKNOWN);
    told(cuGraphicsResourceGetMappedPointer_v2, (&p, &bytes, resource), "map", "virtual", p, bytes);
    told(cuGraphicsUnmapResources, (1, &resource, 0), "unmap", "virtual", 0, UNKNOWN);
    told(cuGraphicsUnmapResources_ptsz, (1, &resource, 0), "unmap", "virtual", 0, UNKNOWN);
}

void external_memory(void)
{
    CUmemGenericAllocationHandle behind = 0;
    CUexternalMemory memory;
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC desc = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                                             .size = 4 * MIB};
    desc.handle.fd = memory_file(&behind, 4 * MIB);
    if (gave(cuImportExternalMemory, (&memory, &desc), "import", "imported", memory, 4 * MIB)) {
        external_views(memory);
        took(cuDestroyExternalMemory, (memory), "imported", memory, 4 * MIB);
    } else if (desc.handle.fd >= 0) {
        close(desc.handle.fd);
    }
    if (behind)
        took(cuMemRelease, (behind), "device", behind, 4 * MIB);
    graphics();
}

/* Memory of GPU 0 at an address. */
static CUdeviceptr mapped(CUmemGenericAllocationHandle memory)
{
    CUdeviceptr p = 0;
    CUmemAccessDesc access = {{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                              CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    gave(cuMemAddressReserve, (&p, 4 * MIB, 0, 0, 0), "reserve", "virtual", p, 4 * MIB);
    told(cuMemMap, (p, 4 * MIB, 0, memory, 0), "map", "virtual", p, 4 * MIB);
    silent(cuMemSetAccess, (p, 4 * MIB, &access, 1));
    return p;
}

static void bindings(CUmemGenericAllocationHandle object, CUmemGenericAllocationHandle memory)
{
    CUdeviceptr p = mapped(memory);
    told(cuMulticastBindMem, (object, 0, memory, 0, 2 * MIB, 0), "map", "virtual", object, 2 * MIB);
    told(cuMulticastBindAddr, (object, 2 * MIB, p, 2 * MIB, 0), "map", "virtual", object, 2 * MIB);
#if CUDA_VERSION >= 13010
    told(cuMulticastBindMem_v2, (object, 0, 4 * MIB, memory, 0, 2 * MIB, 0), "map", "virtual",
         object, 2 * MIB);
    told(cuMulticastBindAddr_v2, (object, 0, 6 * MIB, p, 2 * MIB, 0), "map", "virtual", object,
         2 * MIB);
#else
    skipped("cuMulticastBindMem_v2", "the header at hand does not declare it");
    skipped("cuMulticastBindAddr_v2", "the header at hand does not declare it");
#endif
    told(cuMulticastUnbind, (object, 0, 0, 8 * MIB), "unmap", "virtual", object, 8 * MIB);
    told(cuMemUnmap, (p, 4 * MIB), "unmap", "virtual", p, 4 * MIB);
    took(cuMemAddressFree, (p, 4 * MIB), "virtual", p, 4 * MIB);
}

static void no_multicast(const char *why)
{
    static const char *const functions[] = {
        "cuMulticastCreate",     "cuMulticastAddDevice",   "cuMulticastBindMem",
        "cuMulticastBindMem_v2", "cuMulticastBindAddr",    "cuMulticastBindAddr_v2",
        "cuMulticastUnbind"};
    for (unsigned i = 0; i < sizeof functions / sizeof *functions; i++)
        skipped(functions[i], why);
}

void multicast(void)
{
    CUmulticastObjectProp prop = {
        .numDevices = 2,
        .size = 8 * MIB,
        .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    CUmemAllocationProp of = PINNED_ON_0;
    CUmemGenericAllocationHandle object, memory;
    int gpus = 0;
    if (helper(cuDeviceGetCount, (&gpus)) != CUDA_SUCCESS || gpus < 2)
        return no_multicast("it takes two GPUs");
    if (!gave(cuMulticastCreate, (&object, &prop), "reserve", "virtual", object, 8 * MIB))
        return;
    int added = silent(cuMulticastAddDevice, (object, 0)) &&
                silent(cuMulticastAddDevice, (object, 1));
    if (added &&
        gave(cuMemCreate, (&memory, 4 * MIB, &of, 0), "alloc", "device", memory, 4 * MIB)) {
        bindings(object, memory);
        took(cuMemRelease, (memory), "device", memory, 4 * MIB);
    }
    took(cuMemRelease, (object), "virtual", object, 8 * MIB);
}

/* 64 bytes, as text that an argument can carry. */
static void to_text(const void *bytes, char *text)
{
    for (int i = 0; i < 64; i++)
        sprintf(text + 2 * i, "%02x", ((const unsigned char *)bytes)[i]);
}

static void of_text(const char *text, void *bytes)
{
    for (int i = 0; i < 64; i++)
        sscanf(text + 2 * i, "%2hhx", (unsigned char *)bytes + i);
}

static void run_importer(const char *self, const char *block, const char *pool, const char *pointer)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        execl(self, "every_row", "import", block, pool, pointer, (char *)NULL);
        _exit(127);
    }
    EXPECT(waitpid(child, &status, 0) == child);
    if (status != 0)
        unexpected("the importing process", (CUresult)status);
}

static void export_range(CUdeviceptr block)
{
    int range = -1;
    if (told(cuMemGetHandleForAddressRange,
             (&range, block, 4 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), "export", "device",
             block, 4 * MIB))
        close(range);
}

void between_processes(const char *self)
{
    CUmemPoolProps props = POOL_ON_0;
    CUipcMemHandle handle;
    CUmemPoolPtrExportData data;
    CUmemoryPool pool;
    CUdeviceptr block, pooled;
    char texts[2][129] = {"", ""}, number[16];
    int fd = -1;
    gave(cuMemAlloc_v2, (&block, 4 * MIB), "alloc", "device", block, 4 * MIB);
    told(cuIpcGetMemHandle, (&handle, block), "export", "device", block, 4 * MIB);
    export_range(block);
    told(cuMemPoolCreate, (&pool, &props), "pool", "pool", pool, UNKNOWN);
    told(cuMemPoolExportToShareableHandle,
         (&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "export", "pool", pool, UNKNOWN);
    fcntl(fd, F_SETFD, 0); /* the importer inherits it */
    gave(cuMemAllocFromPoolAsync, (&pooled, 2 * MIB, pool, 0), "alloc", "pool", pooled, 2 * MIB);
    silent(cuCtxSynchronize, ());
    told(cuMemPoolExportPointer, (&data, pooled), "export", "pool", pooled, 2 * MIB);
    to_text(&handle, texts[0]);
    to_text(&data, texts[1]);
    snprintf(number, sizeof number, "%d", fd);
    run_importer(self, texts[0], number, texts[1]);
    close(fd);
    took(cuMemFreeAsync, (pooled, 0), "pool", pooled, 2 * MIB);
    told(cuMemPoolDestroy, (pool), "pool", "pool", pool, UNKNOWN);
    took(cuMemFree_v2, (block), "device", block, 4 * MIB);
}

static void open_block(const char *text)
{
    CUipcMemHandle handle;
    CUdeviceptr p, same;
    unsigned flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
    of_text(text, &handle);
    if (!gave(cuIpcOpenMemHandle_v2, (&p, handle, flags), "import", "imported", p, 4 * MIB))
        return;
    /* The same block once more: one opening more, and no memory. */
    if (told(cuIpcOpenMemHandle, (&same, handle, flags), "retain", "virtual", p, 4 * MIB)) {
        EXPECT(same == p);
        told(cuIpcCloseMemHandle, (p), "free", "virtual", p, 4 * MIB);
    }
    took(cuIpcCloseMemHandle, (p), "imported", p, 4 * MIB);
}

int importer(char **args)
{
    CUcontext ctx;
    CUdeviceptr p;
    CUmemPoolPtrExportData data;
    CUmemoryPool pool;
    sleep(2); /* in which an agent that follows it puts its probes in */
    silent(cuInit, (0));
    told(cuDevicePrimaryCtxRetain, (&ctx, 0), "ctx", "device", ctx, UNKNOWN);
    silent(cuCtxSetCurrent, (ctx));
    open_block(args[0]);
    of_text(args[2], &data);
    if (told(cuMemPoolImportFromShareableHandle,
             (&pool, (void *)(intptr_t)atoi(args[1]), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
             "import", "pool", pool, UNKNOWN) &&
        told(cuMemPoolImportPointer, (&p, pool, &data), "import", "imported", p, UNKNOWN))
        told(cuMemFreeAsync, (p, 0), "free", "imported", p, UNKNOWN);
    return 0;
}
