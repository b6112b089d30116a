/* Calls every function of the probe table once, and some so that they fail, and prints the row of
 * the log that each call is: `op`, `level`, size and change of live bytes, "-" where it has none.
 * With -DREAL_GPU the same for a real driver, where not every function can work. */
#include "every_row.h"

#pragma weak cuMemGetDefaultMemPool
#pragma weak cuMemGetMemPool
#pragma weak cuMemSetMemPool

static long allocs, frees, failed;

void call(const char *api, CUresult rc, const char *op, const char *level, uint64_t addr,
          uint64_t size, int64_t delta)
{
    char text[24] = "-";
    int is_memory = strcmp(level, "virtual") && strcmp(level, "imported");
    allocs += !strcmp(op, "alloc");
    frees += is_memory && !strcmp(op, "free");
    failed += !strcmp(op, "fail");
    if (size != UNKNOWN)
        snprintf(text, sizeof text, "%llu", (unsigned long long)size);
    printf("CALL %s rc=%d op=%s level=%s addr=0x%llx size=%s delta=%lld pid=%d tid=%ld\n", api,
           (int)rc, op, level, (unsigned long long)addr, text, (long long)delta, getpid(),
           truth_tid());
}

void skipped(const char *api, const char *why)
{
    printf("SKIPPED %s why=%s\n", api, why);
}

void unexpected(const char *api, CUresult rc)
{
    fprintf(stderr, "%s answered %d\n", api, (int)rc);
    exit(1);
}

int went_well(const char *api, CUresult rc, const char *level, uint64_t addr, uint64_t size)
{
    if (rc == CUDA_SUCCESS)
        return 1;
#ifndef REAL_GPU
    unexpected(api, rc);
#endif
    call(api, rc, "fail", level, addr, size, 0);
    return 0;
}

static CUcontext contexts(void)
{
    CUcontext ctx, popped, primary;
    CUuuid uuid;
    char bus_id[16];
    CUdevice dev;
    silent("cuInit", cuInit(0));
    silent("cuDeviceGetUuid", cuDeviceGetUuid(&uuid, 0));
    silent("cuDeviceGetUuid_v2", cuDeviceGetUuid_v2(&uuid, 0));
    silent("cuDeviceGetPCIBusId", cuDeviceGetPCIBusId(bus_id, sizeof bus_id, 0));
    silent("cuDeviceGetByPCIBusId", cuDeviceGetByPCIBusId(&dev, bus_id));
    told("cuCtxCreate_v2", cuCtxCreate_v2(&ctx, 0, 0), "ctx", "device", ctx, UNKNOWN);
    silent("cuCtxPopCurrent_v2", cuCtxPopCurrent_v2(&popped));
    silent("cuCtxPushCurrent_v2", cuCtxPushCurrent_v2(ctx));
    told("cuCtxDestroy_v2", cuCtxDestroy_v2(ctx), "ctx", "device", ctx, UNKNOWN);
    told("cuCtxCreate_v3", cuCtxCreate_v3(&ctx, NULL, 0, 0, 0), "ctx", "device", ctx, UNKNOWN);
    told("cuCtxDestroy_v2", cuCtxDestroy_v2(ctx), "ctx", "device", ctx, UNKNOWN);
    told("cuCtxCreate_v4", cuCtxCreate_v4(&ctx, NULL, 0, 0), "ctx", "device", ctx, UNKNOWN);
    told("cuCtxDestroy_v2", cuCtxDestroy_v2(ctx), "ctx", "device", ctx, UNKNOWN);
    for (int i = 0; i < 2; i++)
        told("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&primary, 0), "ctx", "device",
             primary, UNKNOWN);
    told("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease(0), "ctx", "device", primary,
         UNKNOWN);
    silent("cuCtxSetCurrent", cuCtxSetCurrent(primary));
    return primary;
}

static void linear(void)
{
    CUdeviceptr p = GARBAGE;
    size_t pitch = 0;
    silent("cuMemFree_v2", cuMemFree_v2(0));
    gave("cuMemAlloc_v2", cuMemAlloc_v2(&p, 3 * MIB), "alloc", "device", p, 3 * MIB);
    took("cuMemFree_v2", cuMemFree_v2(p), "device", p, 3 * MIB);
    gave("cuMemAllocPitch_v2", cuMemAllocPitch_v2(&p, &pitch, 1000, 3000, 4), "alloc", "device", p,
         pitch * 3000);
    took("cuMemFree_v2", cuMemFree_v2(p), "device", p, pitch * 3000);
    gave("cuMemAllocManaged", cuMemAllocManaged(&p, 5 * MIB, CU_MEM_ATTACH_GLOBAL), "alloc",
         "managed", p, 5 * MIB);
    took("cuMemFree_v2", cuMemFree_v2(p), "managed", p, 5 * MIB);
    p = GARBAGE;
    refused("cuMemAlloc_v2", cuMemAlloc_v2(&p, 1ull << 50), 2, "device", 0, p, 1ull << 50);
#ifndef REAL_GPU
    /* An out pointer that can't be read: nothing may depend on it when the call fails. */
    refused("cuMemAlloc_v2", cuMemAlloc_v2((CUdeviceptr *)16, 1ull << 50), 2, "device", 0, GARBAGE,
            1ull << 50);
#endif
    refused("cuMemFree_v2", cuMemFree_v2(GARBAGE), 1, "device", GARBAGE, GARBAGE, UNKNOWN);
}

static void pools_of_locations(CUmemoryPool pool)
{
#if CUDA_VERSION >= 13000
    CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    if (cuMemGetMemPool) {
        silent("cuMemGetDefaultMemPool",
               cuMemGetDefaultMemPool(&pool, &here, CU_MEM_ALLOCATION_TYPE_PINNED));
        silent("cuMemGetMemPool", cuMemGetMemPool(&pool, &here, CU_MEM_ALLOCATION_TYPE_PINNED));
        silent("cuMemSetMemPool", cuMemSetMemPool(&here, CU_MEM_ALLOCATION_TYPE_PINNED, pool));
        return;
    }
#endif
    (void)pool;
    skipped("cuMemGetMemPool", "not exported");
}

static void pools(void)
{
    CUdeviceptr p = GARBAGE;
    CUmemoryPool pool, current;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    cuuint64_t bytes = 64 * MIB;
    int reuse = 1;
    gave("cuMemAllocAsync", cuMemAllocAsync(&p, 2 * MIB, 0), "alloc", "pool", p, 2 * MIB);
    took("cuMemFreeAsync", cuMemFreeAsync(p, 0), "pool", p, 2 * MIB);
    gave("cuMemAllocAsync_ptsz", cuMemAllocAsync_ptsz(&p, MIB, 0), "alloc", "pool", p, MIB);
    took("cuMemFreeAsync_ptsz", cuMemFreeAsync_ptsz(p, 0), "pool", p, MIB);
    told("cuMemPoolCreate", cuMemPoolCreate(&pool, &props), "pool", "pool", pool, UNKNOWN);
    told("cuMemPoolSetAttribute",
         cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes), "pool", "pool",
         pool, 64 * MIB);
    silent("cuMemPoolSetAttribute",
           cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse));
    gave("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync(&p, 4 * MIB, pool, 0), "alloc", "pool",
         p, 4 * MIB);
    took("cuMemFree_v2", cuMemFree_v2(p), "pool", p, 4 * MIB);
    gave("cuMemAllocFromPoolAsync_ptsz", cuMemAllocFromPoolAsync_ptsz(&p, 6 * MIB, pool, 0),
         "alloc", "pool", p, 6 * MIB);
    took("cuMemFreeAsync", cuMemFreeAsync(p, 0), "pool", p, 6 * MIB);
    told("cuMemPoolGetAttribute",
         cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes), "pool", "pool",
         pool, bytes);
    silent("cuMemPoolGetAttribute",
           cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &bytes));
    told("cuMemPoolTrimTo", cuMemPoolTrimTo(pool, MIB), "pool", "pool", pool, MIB);
    silent("cuDeviceGetDefaultMemPool", cuDeviceGetDefaultMemPool(&current, 0));
    silent("cuDeviceGetMemPool", cuDeviceGetMemPool(&current, 0));
    silent("cuDeviceSetMemPool", cuDeviceSetMemPool(0, current));
    pools_of_locations(current);
    told("cuMemPoolDestroy", cuMemPoolDestroy(pool), "pool", "pool", pool, UNKNOWN);
    p = GARBAGE;
    refused("cuMemAllocAsync", cuMemAllocAsync(&p, 1ull << 50, 0), 2, "pool", 0, p, 1ull << 50);
    refused("cuMemFreeAsync", cuMemFreeAsync(GARBAGE, 0), 1, "device", GARBAGE, GARBAGE, UNKNOWN);
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
    refused("cuMemCreate", cuMemCreate(&h, 1ull << 50, &prop, 0), 2, "device", 0, h, 1ull << 50);
    gave("cuMemCreate", cuMemCreate(&h, 4 * MIB, &prop, 0), "alloc", "device", h, 4 * MIB);
    gave("cuMemAddressReserve", cuMemAddressReserve(&p, 8 * MIB, 0, 0, 0), "reserve", "virtual", p,
         8 * MIB);
    told("cuMemMap", cuMemMap(p, 4 * MIB, 0, h, 0), "map", "virtual", p, 4 * MIB);
    silent("cuMemSetAccess", cuMemSetAccess(p, 4 * MIB, &access, 1));
    told("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle(&again, (void *)p), "retain",
         "virtual", h, 4 * MIB);
    told("cuMemExportToShareableHandle",
         cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
         "export", "device", h, 4 * MIB);
    /* What is imported was never mapped here: its size is not known. */
    told("cuMemImportFromShareableHandle",
         cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
         "import", "imported", imported, UNKNOWN);
    close(fd);
    told("cuMemRelease", cuMemRelease(imported), "free", "imported", imported, UNKNOWN);
    /* A reference less, and the memory stays. */
    told("cuMemRelease", cuMemRelease(again), "free", "virtual", h, 4 * MIB);
    told("cuMemRelease", cuMemRelease(h), "free", "virtual", h, 4 * MIB);
    /* The map was the last thing that kept the memory. */
    told("cuMemUnmap", cuMemUnmap(p, 4 * MIB), "unmap", "virtual", p, 4 * MIB);
    call("cuMemUnmap", CUDA_SUCCESS, "free", "device", h, 4 * MIB, -4 * (int64_t)MIB);
    took("cuMemAddressFree", cuMemAddressFree(p, 8 * MIB), "virtual", p, 8 * MIB);
    refused("cuMemRelease", cuMemRelease(GARBAGE), 1, "device", GARBAGE, GARBAGE, UNKNOWN);
}

static void host(void)
{
    void *p;
    char *own = aligned_alloc(4096, 2 * MIB);
    gave("cuMemHostAlloc", cuMemHostAlloc(&p, 2 * MIB, 0), "alloc", "host", p, 2 * MIB);
    took("cuMemFreeHost", cuMemFreeHost(p), "host", p, 2 * MIB);
    gave("cuMemAllocHost_v2", cuMemAllocHost_v2(&p, MIB), "alloc", "host", p, MIB);
    took("cuMemFreeHost", cuMemFreeHost(p), "host", p, MIB);
    gave("cuMemHostRegister_v2", cuMemHostRegister_v2(own, 2 * MIB, 0), "alloc", "host", own,
         2 * MIB);
    took("cuMemHostUnregister", cuMemHostUnregister(own), "host", own, 2 * MIB);
    free(own);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return importer(argv + 1);
    truth_begin();
    CUcontext primary = contexts();
    linear();
    pools();
    vmm();
    host();
    arrays();
    graphs();
    modules();
    other_contexts();
    first_versions();
    external_memory();
    multicast();
    between_processes(argv[0]);
    silent("cuCtxSynchronize", cuCtxSynchronize());
    truth_made(allocs, frees, failed);
    truth_ready();
    told("cuDevicePrimaryCtxReset_v2", cuDevicePrimaryCtxReset_v2(0), "ctx", "device", primary,
         UNKNOWN);
    told("cuDevicePrimaryCtxRelease_v2", cuDevicePrimaryCtxRelease_v2(0), "ctx", "device", primary,
         UNKNOWN);
    told("cuDevicePrimaryCtxReset", cuDevicePrimaryCtxReset(0), "ctx", "device", primary, UNKNOWN);
    truth_ready();
}
