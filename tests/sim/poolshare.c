/* Pools and their blocks between processes. What is imported has an address and costs nothing: the
 * pages are charged to the process whose pool they are of. */
#define _GNU_SOURCE
#include "opened.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define POOL_TEXT "vramscope simulated pool %llx of GPU %d\n"

static CUresult export_pool(int *out, CUmemoryPool pool)
{
    uint64_t identity = pool_identity(pool);
    if (!out || !identity)
        return CUDA_ERROR_INVALID_VALUE;
    int fd = memfd_create("vramscope-simulated-pool", MFD_CLOEXEC);
    if (fd < 0 || dprintf(fd, POOL_TEXT, (unsigned long long)identity, pool_gpu(pool)) < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    *out = fd;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool,
                                          CUmemAllocationHandleType type,
                                          unsigned long long flags)
{
    if (flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(export_pool(out, pool));
}

static CUresult import_pool(CUmemoryPool *out, int fd)
{
    char text[96] = "";
    unsigned long long identity;
    int gpu;
    if (!out || pread(fd, text, sizeof text - 1, 0) <= 0 ||
        sscanf(text, POOL_TEXT, &identity, &gpu) != 2)
        return CUDA_ERROR_INVALID_VALUE;
    if (driver_ordinal(gpu) < 0)
        return CUDA_ERROR_INVALID_DEVICE; /* this process does not see that GPU */
    *out = pool_import(gpu, identity);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle,
                                            CUmemAllocationHandleType type,
                                            unsigned long long flags)
{
    if (flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(import_pool(out, (int)(intptr_t)handle));
}

static CUresult export_pointer(CUmemPoolPtrExportData *out, CUdeviceptr addr)
{
    struct heap *heap = heap_of(addr);
    struct shared_block block = {.pid = getpid()};
    block.kind = heap && heap->pool ? pool_identity(heap->pool) : 0;
    if (!out || !block.kind)
        return CUDA_ERROR_INVALID_VALUE;
    int export = heap_share(addr, &block.part);
    if (export < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    block.gpu = heap->gpu;
    block.export_id = export_at(export)->id;
    memset(out, 0, sizeof *out);
    memcpy(out, &block, sizeof block);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr addr)
{
    WITH_DRIVER(export_pointer(out, addr));
}

static CUresult import_pointer(CUdeviceptr *out, CUmemoryPool pool,
                               const CUmemPoolPtrExportData *data)
{
    struct shared_block block;
    if (!out || !data || !pool_identity(pool))
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&block, data, sizeof block);
    struct object *object = block.kind == pool_identity(pool) ? opened_new(NULL, &block) : NULL;
    if (!object)
        return CUDA_ERROR_INVALID_VALUE;
    *out = object->addr;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    WITH_DRIVER(import_pointer(out, pool, data));
}

/* Blocks of cuMemAlloc that were opened belong to a context, and are closed, not freed. */
bool pool_pointer_free(CUdeviceptr addr)
{
    struct object *object = object_at(OBJECT_OPENED, NULL, addr);
    if (!object || object->ctx)
        return false;
    object_free(object);
    return true;
}
