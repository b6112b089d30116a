/* every_row: memory of other APIs, of several devices, and of other processes. */
#include "every_row.h"

#include <fcntl.h>
#include <sys/wait.h>

static void external_arrays(CUexternalMemory memory)
{
    CUmipmappedArray array;
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC desc = {
        .arrayDesc = {64, 64, 0, CU_AD_FORMAT_FLOAT, 1, 0}, .numLevels = 1};
    if (told("cuExternalMemoryGetMappedMipmappedArray",
             cuExternalMemoryGetMappedMipmappedArray(&array, memory, &desc), "reserve", "virtual",
             array, UNKNOWN))
        told("cuMipmappedArrayDestroy", cuMipmappedArrayDestroy(array), "free", "virtual", array,
             UNKNOWN);
}

void external_memory(void)
{
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    CUexternalMemory memory;
    CUdeviceptr p;
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC desc = {
        .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = fd, .size = 4 * MIB};
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC part = {.offset = 0, .size = MIB};
    CUgraphicsResource resource = (CUgraphicsResource)&fd;
    size_t bytes;
    if (gave("cuImportExternalMemory", cuImportExternalMemory(&memory, &desc), "import",
             "imported", memory, 4 * MIB)) {
        gave("cuExternalMemoryGetMappedBuffer",
             cuExternalMemoryGetMappedBuffer(&p, memory, &part), "reserve", "virtual", p, MIB);
        took("cuMemFree_v2", cuMemFree_v2(p), "virtual", p, MIB);
        external_arrays(memory);
        took("cuDestroyExternalMemory", cuDestroyExternalMemory(memory), "imported", memory,
             4 * MIB);
    } else {
        close(fd);
    }
#ifdef REAL_GPU
    (void)resource, (void)bytes;
    skipped("cuGraphicsMapResources", "no graphics API");
#else
    told("cuGraphicsMapResources", cuGraphicsMapResources(1, &resource, 0), "map", "virtual", 0,
         UNKNOWN);
    told("cuGraphicsMapResources_ptsz", cuGraphicsMapResources_ptsz(1, &resource, 0), "map",
         "virtual", 0, UNKNOWN);
    told("cuGraphicsResourceGetMappedPointer_v2",
         cuGraphicsResourceGetMappedPointer_v2(&p, &bytes, resource), "map", "virtual", p, bytes);
    told("cuGraphicsUnmapResources", cuGraphicsUnmapResources(1, &resource, 0), "unmap", "virtual",
         0, UNKNOWN);
    told("cuGraphicsUnmapResources_ptsz", cuGraphicsUnmapResources_ptsz(1, &resource, 0), "unmap",
         "virtual", 0, UNKNOWN);
#endif
}

void multicast(void)
{
    CUmulticastObjectProp prop = {.numDevices = 2, .size = 4 * MIB};
    CUmemGenericAllocationHandle object, memory;
    CUmemAllocationProp of = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUdeviceptr p;
    if (!gave("cuMulticastCreate", cuMulticastCreate(&object, &prop), "reserve", "virtual", object,
              4 * MIB))
        return;
    silent("cuMulticastAddDevice", cuMulticastAddDevice(object, 0));
    gave("cuMemCreate", cuMemCreate(&memory, 2 * MIB, &of, 0), "alloc", "device", memory, 2 * MIB);
    told("cuMulticastBindMem", cuMulticastBindMem(object, 0, memory, 0, 2 * MIB, 0), "map",
         "virtual", object, 2 * MIB);
    gave("cuMemAlloc_v2", cuMemAlloc_v2(&p, 2 * MIB), "alloc", "device", p, 2 * MIB);
    told("cuMulticastBindAddr", cuMulticastBindAddr(object, 2 * MIB, p, 2 * MIB, 0), "map",
         "virtual", object, 2 * MIB);
    told("cuMulticastUnbind", cuMulticastUnbind(object, 0, 0, 4 * MIB), "unmap", "virtual", object,
         4 * MIB);
    took("cuMemFree_v2", cuMemFree_v2(p), "device", p, 2 * MIB);
    took("cuMemRelease", cuMemRelease(memory), "device", memory, 2 * MIB);
    took("cuMemRelease", cuMemRelease(object), "virtual", object, 4 * MIB);
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
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl(self, self, block, pool, pointer, (char *)NULL);
        _exit(127);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0)
        unexpected("the importing process", (CUresult)status);
}

void between_processes(const char *self)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUipcMemHandle handle;
    CUmemPoolPtrExportData data;
    CUmemoryPool pool;
    CUdeviceptr block, pooled;
    char texts[2][129] = {"", ""}, number[16];
    int fd, range = -1;
    gave("cuMemAlloc_v2", cuMemAlloc_v2(&block, 4 * MIB), "alloc", "device", block, 4 * MIB);
    told("cuIpcGetMemHandle", cuIpcGetMemHandle(&handle, block), "export", "device", block,
         4 * MIB);
    if (told("cuMemGetHandleForAddressRange",
             cuMemGetHandleForAddressRange(&range, block, 4 * MIB,
                                           CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
             "export", "device", block, 4 * MIB))
        close(range);
    told("cuMemPoolCreate", cuMemPoolCreate(&pool, &props), "pool", "pool", pool, UNKNOWN);
    told("cuMemPoolExportToShareableHandle",
         cuMemPoolExportToShareableHandle(&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
         "export", "pool", pool, UNKNOWN);
    fcntl(fd, F_SETFD, 0); /* the importer inherits it */
    gave("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync(&pooled, 2 * MIB, pool, 0), "alloc",
         "pool", pooled, 2 * MIB);
    cuCtxSynchronize();
    told("cuMemPoolExportPointer", cuMemPoolExportPointer(&data, pooled), "export", "pool", pooled,
         2 * MIB);
    to_text(&handle, texts[0]);
    to_text(&data, texts[1]);
    snprintf(number, sizeof number, "%d", fd);
    run_importer(self, texts[0], number, texts[1]);
    close(fd);
    took("cuMemFreeAsync", cuMemFreeAsync(pooled, 0), "pool", pooled, 2 * MIB);
    told("cuMemPoolDestroy", cuMemPoolDestroy(pool), "pool", "pool", pool, UNKNOWN);
    took("cuMemFree_v2", cuMemFree_v2(block), "device", block, 4 * MIB);
}

int importer(char **args)
{
    CUcontext ctx;
    CUdeviceptr p, same;
    CUipcMemHandle handle;
    CUmemPoolPtrExportData data;
    CUmemoryPool pool;
    setvbuf(stdout, NULL, _IOLBF, 0);
    of_text(args[0], &handle);
    of_text(args[2], &data);
    sleep(1); /* in which an agent that follows it puts its probes in */
    silent("cuInit", cuInit(0));
    told("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&ctx, 0), "ctx", "device", ctx,
         UNKNOWN);
    silent("cuCtxSetCurrent", cuCtxSetCurrent(ctx));
    unsigned flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
    gave("cuIpcOpenMemHandle_v2", cuIpcOpenMemHandle_v2(&p, handle, flags), "import", "imported",
         p, 4 * MIB);
    /* The same block once more: one opening more, and no memory. */
    if (told("cuIpcOpenMemHandle", cuIpcOpenMemHandle(&same, handle, flags), "retain", "virtual",
             p, 4 * MIB))
        told("cuIpcCloseMemHandle", cuIpcCloseMemHandle(p), "free", "virtual", p, 4 * MIB);
    took("cuIpcCloseMemHandle", cuIpcCloseMemHandle(p), "imported", p, 4 * MIB);
    if (told("cuMemPoolImportFromShareableHandle",
             cuMemPoolImportFromShareableHandle(&pool, (void *)(intptr_t)atoi(args[1]),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
             "import", "pool", pool, UNKNOWN) &&
        told("cuMemPoolImportPointer", cuMemPoolImportPointer(&p, pool, &data), "import",
             "imported", p, UNKNOWN))
        told("cuMemFreeAsync", cuMemFreeAsync(p, 0), "free", "imported", p, UNKNOWN);
    return 0;
}
