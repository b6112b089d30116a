/* every_row: linear memory, pools, virtual memory management, host memory. */
#include "every_row.h"

void linear(void)
{
    CUdeviceptr p = GARBAGE;
    size_t pitch = 0;
    silent(cuMemFree_v2, (0));
    gave(cuMemAlloc_v2, (&p, 3 * MIB), "alloc", "device", p, 3 * MIB);
    took(cuMemFree_v2, (p), "device", p, 3 * MIB);
    gave(cuMemAllocPitch_v2, (&p, &pitch, 1000, 3000, 4), "alloc", "device", p, pitch * 3000);
    took(cuMemFree_v2, (p), "device", p, pitch * 3000);
    gave(cuMemAllocManaged, (&p, 5 * MIB, CU_MEM_ATTACH_GLOBAL), "alloc", "managed", p, 5 * MIB);
    took(cuMemFree_v2, (p), "managed", p, 5 * MIB);
    p = GARBAGE;
    refused(cuMemAlloc_v2, (&p, 1ull << 50), 2, "device", 0, p, 1ull << 50);
    /* An out pointer that can't be read: nothing may depend on it when the call fails. */
    if (is_simulated())
        refused(cuMemAlloc_v2, ((CUdeviceptr *)16, 1ull << 50), 2, "device", 0, GARBAGE,
                1ull << 50);
    refused(cuMemFree_v2, (GARBAGE), 1, "device", GARBAGE, GARBAGE, UNKNOWN);
}

static void pools_of_locations(void)
{
#if CUDA_VERSION >= 13000
    CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    CUmemoryPool pool = NULL;
    silent(cuMemGetDefaultMemPool, (&pool, &here, CU_MEM_ALLOCATION_TYPE_PINNED));
    if (silent(cuMemGetMemPool, (&pool, &here, CU_MEM_ALLOCATION_TYPE_PINNED)))
        silent(cuMemSetMemPool, (&here, CU_MEM_ALLOCATION_TYPE_PINNED, pool));
#else
    skipped("cuMemGetDefaultMemPool", "the header at hand does not declare it");
    skipped("cuMemGetMemPool", "the header at hand does not declare it");
    skipped("cuMemSetMemPool", "the header at hand does not declare it");
#endif
}

static void pool_blocks(CUmemoryPool pool)
{
    CUdeviceptr p = GARBAGE;
    gave(cuMemAllocFromPoolAsync, (&p, 4 * MIB, pool, 0), "alloc", "pool", p, 4 * MIB);
    took(cuMemFree_v2, (p), "pool", p, 4 * MIB);
    gave(cuMemAllocFromPoolAsync_ptsz, (&p, 6 * MIB, pool, 0), "alloc", "pool", p, 6 * MIB);
    took(cuMemFreeAsync, (p, 0), "pool", p, 6 * MIB);
}

void pools(void)
{
    CUdeviceptr p = GARBAGE;
    CUmemoryPool pool, current;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    cuuint64_t bytes = 64 * MIB;
    int reuse = 1;
    gave(cuMemAllocAsync, (&p, 2 * MIB, 0), "alloc", "pool", p, 2 * MIB);
    took(cuMemFreeAsync, (p, 0), "pool", p, 2 * MIB);
    gave(cuMemAllocAsync_ptsz, (&p, MIB, 0), "alloc", "pool", p, MIB);
    took(cuMemFreeAsync_ptsz, (p, 0), "pool", p, MIB);
    told(cuMemPoolCreate, (&pool, &props), "pool", "pool", pool, UNKNOWN);
    told(cuMemPoolSetAttribute, (pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes), "pool", "pool",
         pool, 64 * MIB);
    silent(cuMemPoolSetAttribute, (pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse));
    pool_blocks(pool);
    told(cuMemPoolGetAttribute, (pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes), "pool",
         "pool", pool, bytes);
    silent(cuMemPoolGetAttribute, (pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &bytes));
    told(cuMemPoolTrimTo, (pool, MIB), "pool", "pool", pool, MIB);
    silent(cuDeviceGetDefaultMemPool, (&current, 0));
    silent(cuDeviceGetMemPool, (&current, 0));
    silent(cuDeviceSetMemPool, (0, current));
    pools_of_locations();
    told(cuMemPoolDestroy, (pool), "pool", "pool", pool, UNKNOWN);
    p = GARBAGE;
    refused(cuMemAllocAsync, (&p, 1ull << 50, 0), 2, "pool", 0, p, 1ull << 50);
    refused(cuMemFreeAsync, (GARBAGE, 0), 1, "device", GARBAGE, GARBAGE, UNKNOWN);
}

static void shared_handle(CUmemGenericAllocationHandle h)
{
    CUmemGenericAllocationHandle imported;
    int fd = -1;
    if (!told(cuMemExportToShareableHandle,
              (&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "export", "device", h,
              4 * MIB))
        return;
    /* What is imported was never mapped here: its size is not known. */
    if (told(cuMemImportFromShareableHandle,
             (&imported, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), "import",
             "imported", imported, UNKNOWN))
        told(cuMemRelease, (imported), "free", "imported", imported, UNKNOWN);
    close(fd);
}

void vmm(void)
{
    CUmemAllocationProp prop = PINNED_ON_0;
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle h = GARBAGE, again;
    CUdeviceptr p;
    refused(cuMemCreate, (&h, 1ull << 50, &prop, 0), 2, "device", 0, h, 1ull << 50);
    gave(cuMemCreate, (&h, 4 * MIB, &prop, 0), "alloc", "device", h, 4 * MIB);
    gave(cuMemAddressReserve, (&p, 8 * MIB, 0, 0, 0), "reserve", "virtual", p, 8 * MIB);
    told(cuMemMap, (p, 4 * MIB, 0, h, 0), "map", "virtual", p, 4 * MIB);
    silent(cuMemSetAccess, (p, 4 * MIB, &access, 1));
    /* The same handle once more: its row tells whose memory it is. */
    told(cuMemRetainAllocationHandle, (&again, (void *)p), "retain", "virtual", h, 4 * MIB);
    shared_handle(h);
    /* A reference less, and the memory stays. */
    told(cuMemRelease, (again), "free", "virtual", h, 4 * MIB);
    told(cuMemRelease, (h), "free", "virtual", h, 4 * MIB);
    /* The map was the last thing that kept the memory. */
    told(cuMemUnmap, (p, 4 * MIB), "unmap", "virtual", p, 4 * MIB);
    call("cuMemUnmap", CUDA_SUCCESS, "free", "device", h, 4 * MIB, -4 * (int64_t)MIB);
    took(cuMemAddressFree, (p, 8 * MIB), "virtual", p, 8 * MIB);
    /* The real driver takes a handle for an address, and crashes on what is none. */
    if (is_simulated())
        refused(cuMemRelease, (GARBAGE), 1, "device", GARBAGE, GARBAGE, UNKNOWN);
}

void host(void)
{
    void *p;
    char *own = aligned_alloc(4096, 2 * MIB);
    gave(cuMemHostAlloc, (&p, 2 * MIB, 0), "alloc", "host", p, 2 * MIB);
    took(cuMemFreeHost, (p), "host", p, 2 * MIB);
    gave(cuMemAllocHost_v2, (&p, MIB), "alloc", "host", p, MIB);
    took(cuMemFreeHost, (p), "host", p, MIB);
    gave(cuMemHostRegister_v2, (own, 2 * MIB, 0), "alloc", "host", own, 2 * MIB);
    took(cuMemHostUnregister, (own), "host", own, 2 * MIB);
    free(own);
}
