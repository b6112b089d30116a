/* Limits of contexts. What the default ones take is part of what a context costs; what a raised one
 * takes beyond that is taken at once. */
#include "driver.h"

#define THREADS (132ull * 2048) /* that can run on the GPU at a time, each with a stack */

static const struct {
    uint64_t value, times; /* its default, and how many of it there are; 0: it costs nothing */
} limits[CU_LIMIT_MAX] = {
    [CU_LIMIT_STACK_SIZE] = {1024, THREADS},
    [CU_LIMIT_PRINTF_FIFO_SIZE] = {SIM_MIB, 1},
    [CU_LIMIT_MALLOC_HEAP_SIZE] = {8 * SIM_MIB, 1},
    [CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = {2, 0},
    [CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = {2048, 0},
    [CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = {64, 0},
};

static struct object *raised(CUcontext ctx, CUlimit limit)
{
    return object_at(OBJECT_LIMIT, ctx, limit);
}

static CUresult set_limit(CUlimit limit, uint64_t value)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    uint64_t most = limits[limit].value, more = value > most ? value - most : 0, bytes;
    if (__builtin_mul_overflow(more, limits[limit].times, &bytes) ||
        bytes > driver_state()->capacity)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct object *before = raised(ctx, limit);
    struct object *now = object_new(OBJECT_LIMIT, ctx, ctx->gpu, round_up(bytes, GRANULE));
    if (!now)
        return CUDA_ERROR_OUT_OF_MEMORY;
    now->addr = limit;
    now->more = (void *)value;
    if (before)
        object_free(before);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    WITH_DRIVER(set_limit(limit, value));
}

static CUresult get_limit(size_t *out, CUlimit limit)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || limit >= CU_LIMIT_MAX)
        return out ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_ERROR_INVALID_VALUE;
    const struct object *set = raised(ctx, limit);
    *out = set ? (size_t)set->more : limits[limit].value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
    WITH_DRIVER(get_limit(value, limit));
}
