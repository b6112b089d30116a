/* Pools and their blocks between processes. What is imported has an address and costs nothing: the
 * pages are charged to the process whose pool they are of. */
#include "driver.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define MAGIC 0x4c4f4f504d4953ull /* "SIMPOOL" */

struct pointer {
    uint64_t magic, bytes;
};
_Static_assert(sizeof(struct pointer) <= sizeof(CUmemPoolPtrExportData), "it has 64 bytes");

#define MAX_IMPORTED 256
static struct {
    CUdeviceptr at;
    uint64_t bytes;
} imported[MAX_IMPORTED];

static CUresult export_pool(int *out, CUmemoryPool pool)
{
    if (!out || !pool_is_known(pool))
        return CUDA_ERROR_INVALID_VALUE;
    *out = open("/dev/null", O_RDWR | O_CLOEXEC);
    return *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
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
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || fcntl(fd, F_GETFD) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = pool_for_import(ctx->gpu);
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
    struct pointer pointer = {MAGIC, heap_block_bytes(addr)};
    if (!out || !pointer.bytes)
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    memcpy(out, &pointer, sizeof pointer);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr addr)
{
    WITH_DRIVER(export_pointer(out, addr));
}

static CUresult import_pointer(CUdeviceptr *out, CUmemoryPool pool,
                               const CUmemPoolPtrExportData *data)
{
    struct pointer pointer;
    if (!out || !data || !pool_is_known(pool))
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&pointer, data, sizeof pointer);
    if (pointer.magic != MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MAX_IMPORTED; i++)
        if (!imported[i].at) {
            imported[i].bytes = round_up(pointer.bytes, GRANULE);
            *out = imported[i].at = arena_take(imported[i].bytes);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    WITH_DRIVER(import_pointer(out, pool, data));
}

bool pool_pointer_free(CUdeviceptr addr)
{
    for (int i = 0; addr && i < MAX_IMPORTED; i++)
        if (imported[i].at == addr) {
            arena_give(addr, imported[i].bytes);
            imported[i].at = 0;
            return true;
        }
    return false;
}
