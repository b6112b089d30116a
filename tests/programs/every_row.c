/* Calls every memory function of the driver once, and some so that they fail, and prints the
 * event that each call is: `op` and `level` in the words of the log, "-" where it is none. */
#include "truth.h"

#include <cuda.h>
#include <stdint.h>

#define GARBAGE 0xdead0000ull

/* The forms that cuda.h hides behind macros; their prototypes are their twins'. */
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
CUresult cuDevicePrimaryCtxRelease(CUdevice dev);
CUresult cuDevicePrimaryCtxReset(CUdevice dev);
__typeof__(cuMemAllocAsync) cuMemAllocAsync_ptsz;
__typeof__(cuMemFreeAsync) cuMemFreeAsync_ptsz;
__typeof__(cuMemAllocFromPoolAsync) cuMemAllocFromPoolAsync_ptsz;

static long allocs, frees, failed;

static void call(const char *api, CUresult rc, const char *op, const char *level, uint64_t addr,
                 uint64_t bytes)
{
    allocs += !strcmp(op, "alloc");
    frees += !strcmp(op, "free");
    failed += !strcmp(op, "fail");
    printf("CALL %s rc=%d op=%s level=%s addr=0x%llx size=%llu tid=%ld\n", api, rc, op, level,
           (unsigned long long)addr, (unsigned long long)bytes, truth_tid());
}

/* Macros, since the address is known only after the call. */
#define did(api, expression, op, level, addr, bytes)                                               \
    do {                                                                                           \
        MUST(expression);                                                                          \
        call(api, CUDA_SUCCESS, op, level, (uint64_t)(addr), bytes);                               \
    } while (0)

#define failed_call(api, expression, result, level, out, bytes)                                    \
    do {                                                                                           \
        MUST_FAIL(result, expression);                                                             \
        EXPECT((out) == GARBAGE); /* the result was not written */                                 \
        call(api, (CUresult)(result), "fail", level, 0, bytes);                                    \
    } while (0)

static void contexts(CUcontext *primary)
{
    CUcontext ctx, popped;
    CUuuid uuid;
    did("cuInit", cuInit(0), "-", "-", 0, 0);
    did("cuDeviceGetUuid", cuDeviceGetUuid(&uuid, 0), "-", "-", 0, 0);
    did("cuDeviceGetUuid_v2", cuDeviceGetUuid_v2(&uuid, 0), "-", "-", 0, 0);
    did("cuCtxCreate_v2", cuCtxCreate(&ctx, 0, 0), "ctx", "-", ctx, 0);
    did("cuCtxPopCurrent_v2", cuCtxPopCurrent(&popped), "-", "-", popped, 0);
    did("cuCtxPushCurrent_v2", cuCtxPushCurrent(ctx), "-", "-", ctx, 0);
    did("cuCtxDestroy_v2", cuCtxDestroy(ctx), "ctx", "-", ctx, 0);
    did("cuCtxCreate_v3", cuCtxCreate_v3(&ctx, NULL, 0, 0, 0), "ctx", "-", ctx, 0);
    did("cuCtxDestroy_v2", cuCtxDestroy(ctx), "ctx", "-", ctx, 0);
    did("cuCtxCreate_v4", cuCtxCreate_v4(&ctx, NULL, 0, 0), "ctx", "-", ctx, 0);
    did("cuCtxDestroy_v2", cuCtxDestroy(ctx), "ctx", "-", ctx, 0);
    for (int i = 0; i < 2; i++)
        did("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(primary, 0), "ctx", "-",
            *primary, 0);
    did("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease(0), "ctx", "-", 0, 0);
    did("cuCtxSetCurrent", cuCtxSetCurrent(*primary), "-", "-", *primary, 0);
}

static void linear(void)
{
    CUdeviceptr p = GARBAGE;
    size_t pitch = 0;
    did("cuMemFree_v2", cuMemFree(0), "-", "-", 0, 0);
    did("cuMemAlloc_v2", cuMemAlloc(&p, 3 * MIB), "alloc", "device", p, 3 * MIB);
    did("cuMemFree_v2", cuMemFree(p), "free", "device", p, 3 * MIB);
    did("cuMemAllocPitch_v2", cuMemAllocPitch(&p, &pitch, 1000, 3000, 4), "alloc", "device", p,
        1024 * 3000);
    did("cuMemFree_v2", cuMemFree(p), "free", "device", p, 1024 * 3000);
    did("cuMemAllocManaged", cuMemAllocManaged(&p, 5 * MIB, CU_MEM_ATTACH_GLOBAL), "alloc",
        "managed", p, 5 * MIB);
    did("cuMemFree_v2", cuMemFree(p), "free", "managed", p, 5 * MIB);
    p = GARBAGE;
    failed_call("cuMemAlloc_v2", cuMemAlloc(&p, 1ull << 50), 2, "device", p, 1ull << 50);
    /* An out pointer that can't be read: nothing may depend on it when the call fails. */
    failed_call("cuMemAlloc_v2", cuMemAlloc((CUdeviceptr *)16, 1ull << 50), 2, "device", GARBAGE,
                1ull << 50);
    failed_call("cuMemFree_v2", cuMemFree(GARBAGE), 1, "device", GARBAGE, 0);
}

static void pools(void)
{
    CUdeviceptr p = GARBAGE;
    CUmemoryPool pool;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    cuuint64_t bytes = 64 * MIB;
    did("cuMemAllocAsync", cuMemAllocAsync(&p, 2 * MIB, 0), "alloc", "pool", p, 2 * MIB);
    did("cuMemFreeAsync", cuMemFreeAsync(p, 0), "free", "pool", p, 2 * MIB);
    did("cuMemAllocAsync_ptsz", cuMemAllocAsync_ptsz(&p, MIB, 0), "alloc", "pool", p, MIB);
    did("cuMemFreeAsync_ptsz", cuMemFreeAsync_ptsz(p, 0), "free", "pool", p, MIB);
    did("cuMemPoolCreate", cuMemPoolCreate(&pool, &props), "pool", "-", pool, 0);
    did("cuMemPoolSetAttribute",
        cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes), "-", "-",
        pool, 0);
    did("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync(&p, 4 * MIB, pool, 0), "alloc", "pool",
        p, 4 * MIB);
    did("cuMemFree_v2", cuMemFree(p), "free", "pool", p, 4 * MIB);
    did("cuMemAllocFromPoolAsync_ptsz", cuMemAllocFromPoolAsync_ptsz(&p, 6 * MIB, pool, 0),
        "alloc", "pool", p, 6 * MIB);
    did("cuMemFreeAsync", cuMemFreeAsync(p, 0), "free", "pool", p, 6 * MIB);
    did("cuMemPoolGetAttribute",
        cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes), "-", "-",
        pool, bytes);
    did("cuMemPoolTrimTo", cuMemPoolTrimTo(pool, 0), "-", "-", pool, 0);
    did("cuMemPoolDestroy", cuMemPoolDestroy(pool), "pool", "-", pool, 0);
    did("cuDeviceGetDefaultMemPool", cuDeviceGetDefaultMemPool(&pool, 0), "-", "-",
        pool, 0);
    did("cuDeviceGetMemPool", cuDeviceGetMemPool(&pool, 0), "-", "-", pool, 0);
    p = GARBAGE;
    failed_call("cuMemAllocAsync", cuMemAllocAsync(&p, 1ull << 50, 0), 2, "pool", p, 1ull << 50);
    failed_call("cuMemFreeAsync", cuMemFreeAsync(GARBAGE, 0), 1, "pool", GARBAGE, 0);
}

static void vmm(void)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle h = GARBAGE, again, imported;
    CUdeviceptr p;
    int fd;
    failed_call("cuMemCreate", cuMemCreate(&h, 1ull << 50, &prop, 0), 2, "device", h, 1ull << 50);
    did("cuMemCreate", cuMemCreate(&h, 4 * MIB, &prop, 0), "alloc", "device", h, 4 * MIB);
    did("cuMemAddressReserve", cuMemAddressReserve(&p, 8 * MIB, 0, 0, 0), "reserve", "virtual", p,
        8 * MIB);
    did("cuMemMap", cuMemMap(p, 4 * MIB, 0, h, 0), "map", "virtual", p, 4 * MIB);
    did("cuMemSetAccess", cuMemSetAccess(p, 4 * MIB, &access, 1), "-", "-", p, 4 * MIB);
    did("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle(&again, (void *)p), "-", "-",
        again, 0);
    did("cuMemExportToShareableHandle",
        cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "export", "device", h, 4 * MIB);
    did("cuMemImportFromShareableHandle",
        cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "import", "imported", imported, 4 * MIB);
    close(fd);
    did("cuMemRelease", cuMemRelease(imported), "-", "-", imported, 0);
    did("cuMemRelease", cuMemRelease(again), "-", "-", again, 0);
    did("cuMemRelease", cuMemRelease(h), "-", "-", h, 0);
    /* The map was the last thing that kept the pages. */
    did("cuMemUnmap", cuMemUnmap(p, 4 * MIB), "free", "device", p, 4 * MIB);
    did("cuMemAddressFree", cuMemAddressFree(p, 8 * MIB), "-", "virtual", p, 8 * MIB);
    failed_call("cuMemRelease", cuMemRelease(GARBAGE), 1, "device", GARBAGE, 0);
}

static void host(void)
{
    void *p;
    char *own = aligned_alloc(4096, 2 * MIB);
    did("cuMemHostAlloc", cuMemHostAlloc(&p, 2 * MIB, 0), "alloc", "host", p, 2 * MIB);
    did("cuMemFreeHost", cuMemFreeHost(p), "free", "host", p, 2 * MIB);
    did("cuMemAllocHost_v2", cuMemAllocHost(&p, MIB), "alloc", "host", p, MIB);
    did("cuMemFreeHost", cuMemFreeHost(p), "free", "host", p, MIB);
    did("cuMemHostRegister_v2", cuMemHostRegister(own, 2 * MIB, 0), "alloc", "host",
        own, 2 * MIB);
    did("cuMemHostUnregister", cuMemHostUnregister(own), "free", "host", own, 2 * MIB);
    free(own);
}

int main(void)
{
    CUcontext primary;
    truth_begin();
    contexts(&primary);
    linear();
    pools();
    vmm();
    host();
    did("cuCtxSynchronize", cuCtxSynchronize(), "-", "-", 0, 0);
    truth_made(allocs, frees, failed);
    truth_ready();
    did("cuDevicePrimaryCtxReset_v2", cuDevicePrimaryCtxReset_v2(0), "ctx", "-", 0, 0);
    did("cuDevicePrimaryCtxRelease_v2", cuDevicePrimaryCtxRelease_v2(0), "ctx", "-", 0, 0);
    did("cuDevicePrimaryCtxReset", cuDevicePrimaryCtxReset(0), "ctx", "-", 0, 0);
    truth_ready();
}
