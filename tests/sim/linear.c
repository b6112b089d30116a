/* cuMemAlloc and its relatives, and cuMemFree, which frees the blocks of every kind. */
#include "driver.h"

static CUresult alloc_in_context(CUdeviceptr *out, uint64_t bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    return heap_alloc(&ctx->heap, bytes, out);
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t bytes)
{
    WITH_DRIVER(alloc_in_context(ptr, bytes));
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *ptr, size_t *pitch, size_t width, size_t height,
                            unsigned int element)
{
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!pitch || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t row = round_up(width, 512), bytes;
    if (__builtin_mul_overflow(row, height, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    driver_lock();
    rc = alloc_in_context(ptr, bytes);
    driver_unlock();
    if (rc == CUDA_SUCCESS)
        *pitch = row;
    return rc;
}

static CUresult alloc_managed(CUdeviceptr *out, uint64_t bytes, unsigned flags)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || !bytes || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    void *addr;
    rc = host_new(HOST_MANAGED, ctx, bytes, &addr);
    if (rc == CUDA_SUCCESS)
        *out = (CUdeviceptr)addr;
    return rc;
}

CUresult cuMemAllocManaged(CUdeviceptr *ptr, size_t bytes, unsigned int flags)
{
    WITH_DRIVER(alloc_managed(ptr, bytes, flags));
}

static CUresult free_any(CUdeviceptr ptr)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    struct heap *heap = heap_free(ptr);
    if (!heap)
        return host_free(HOST_MANAGED, (void *)ptr) || graph_free(ptr) || external_free(ptr) ||
                       pool_pointer_free(ptr) || low_free(ptr)
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_INVALID_VALUE;
    if (heap->pool)
        pool_block_freed(heap->pool, true);
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr ptr)
{
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS || !ptr)
        return rc;
    driver_lock();
    rc = free_any(ptr);
    driver_unlock();
    driver_linger();
    return rc;
}

static CUresult get_info(size_t *free_bytes, size_t *total_bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    struct sim_state *state = driver_state();
    sim_lock();
    sim_reclaim();
    *free_bytes = state->capacity - state->used[ctx->gpu];
    *total_bytes = state->capacity;
    sim_unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    WITH_DRIVER(get_info(free_bytes, total_bytes));
}
