/* Stream-ordered allocation. A pool owns pages; live blocks are at most what it reserved, and what
 * it reserved beyond its threshold goes back to the GPU at the next synchronisation. There is no
 * work to wait for here, so a block is free as soon as cuMemFreeAsync returns. */
#include "driver.h"

#include <stdlib.h>
#include <unistd.h>

struct CUmemPoolHandle_st {
    struct heap heap;
    uint64_t threshold;
    int reuse[3]; /* the three switches that only say how the real pool reuses blocks */
    bool is_default, destroyed;
    bool is_import;    /* another process's, under a name of its own */
    uint64_t identity; /* of one that others can import; 0: nobody can */
    struct CUmemPoolHandle_st *next;
};

static struct CUmemPoolHandle_st *pools;
static CUmemoryPool default_pool[SIM_MAX_GPUS], current_pool[SIM_MAX_GPUS];

static CUmemoryPool pool_new(int gpu)
{
    CUmemoryPool pool = calloc(1, sizeof *pool);
    pool->heap = (struct heap){.gpu = gpu, .keeps_pages = true, .pool = pool};
    pool->next = pools;
    pools = pool;
    return pool;
}

CUmemoryPool pool_default_of(int gpu)
{
    if (!default_pool[gpu]) {
        default_pool[gpu] = pool_new(gpu);
        default_pool[gpu]->is_default = true;
    }
    return default_pool[gpu];
}

CUmemoryPool pool_current_of(int gpu)
{
    return current_pool[gpu] ? current_pool[gpu] : pool_default_of(gpu);
}

/* A pool that was destroyed while blocks were live still owns their pages, but can't be named. */
static bool known(CUmemoryPool pool)
{
    for (CUmemoryPool p = pools; p; p = p->next)
        if (p == pool)
            return !p->destroyed;
    return false;
}

static void drop(CUmemoryPool pool)
{
    CUmemoryPool *at = &pools;
    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    heap_destroy(&pool->heap);
    free(pool);
}

uint64_t pool_identity(CUmemoryPool pool)
{
    return known(pool) ? pool->identity : 0;
}

int pool_gpu(CUmemoryPool pool)
{
    return pool->heap.gpu;
}

CUmemoryPool pool_import(int gpu, uint64_t identity)
{
    CUmemoryPool pool = pool_new(gpu);
    pool->is_import = true;
    pool->identity = identity;
    return pool;
}

void pools_synchronize(int gpu)
{
    for (CUmemoryPool p = pools; p; p = p->next)
        if (p->heap.gpu == gpu)
            heap_trim(&p->heap, p->threshold);
}

void pool_block_freed(CUmemoryPool pool, bool synchronous)
{
    if (pool->destroyed && pool->heap.used == 0)
        drop(pool);
    else if (synchronous)
        heap_trim(&pool->heap, pool->threshold);
}

static CUresult alloc_from(CUdeviceptr *out, uint64_t bytes, CUmemoryPool pool)
{
    if (!out || !bytes || !known(pool) || pool->is_import)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = heap_alloc(&pool->heap, bytes, out);
    if (rc != CUDA_ERROR_OUT_OF_MEMORY)
        return rc;
    heap_trim(&pool->heap, 0); /* pages kept for blocks of other sizes */
    return heap_alloc(&pool->heap, bytes, out);
}

static CUresult alloc_async(CUdeviceptr *out, uint64_t bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    return rc == CUDA_SUCCESS ? alloc_from(out, bytes, pool_current_of(ctx->gpu)) : rc;
}

static CUresult alloc_from_pool(CUdeviceptr *out, uint64_t bytes, CUmemoryPool pool)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    return rc == CUDA_SUCCESS ? alloc_from(out, bytes, pool) : rc;
}

CUresult cuMemAllocAsync(CUdeviceptr *ptr, size_t bytes, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(alloc_async(ptr, bytes));
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *ptr, size_t bytes, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(alloc_async(ptr, bytes));
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool,
                                 CUstream stream)
{
    (void)stream;
    WITH_DRIVER(alloc_from_pool(ptr, bytes, pool));
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool,
                                      CUstream stream)
{
    (void)stream;
    WITH_DRIVER(alloc_from_pool(ptr, bytes, pool));
}

/* Takes blocks of cuMemAlloc as well, as the real one does. */
static CUresult free_async(CUdeviceptr ptr)
{
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS || !ptr)
        return rc;
    driver_lock();
    CUcontext ctx;
    rc = context_current(&ctx);
    if (rc == CUDA_SUCCESS) {
        struct heap *heap = heap_free(ptr);
        bool other = !heap && (graph_free(ptr) || pool_pointer_free(ptr));
        rc = heap || other ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        if (heap && heap->pool)
            pool_block_freed(heap->pool, false);
    }
    driver_unlock();
    driver_linger();
    return rc;
}

CUresult cuMemFreeAsync(CUdeviceptr ptr, CUstream stream)
{
    (void)stream;
    return free_async(ptr);
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr ptr, CUstream stream)
{
    (void)stream;
    return free_async(ptr);
}

CUresult pool_make_current(CUmemoryPool pool, int gpu)
{
    if (!known(pool) || pool->heap.gpu != gpu || pool->is_import)
        return CUDA_ERROR_INVALID_VALUE;
    current_pool[gpu] = pool;
    return CUDA_SUCCESS;
}

/* Not seen twice on this machine, as no process lives twice. */
static uint64_t new_identity(void)
{
    static uint32_t pools_named;
    return (uint64_t)getpid() << 32 | ++pools_named;
}

static CUresult create(CUmemoryPool *out, const CUmemPoolProps *props)
{
    if (!out || !props || props->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    int gpu = driver_gpu(props->location.id);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = pool_new(gpu);
    if (props->handleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        (*out)->identity = new_identity();
    return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    WITH_DRIVER(create(pool, props));
}

static CUresult destroy(CUmemoryPool pool)
{
    if (!known(pool) || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    if (current_pool[pool->heap.gpu] == pool)
        current_pool[pool->heap.gpu] = NULL;
    pool->destroyed = true;
    pool->threshold = 0;
    heap_trim(&pool->heap, 0);
    pool_block_freed(pool, false); /* gone now, or with its last block */
    return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    WITH_DRIVER(destroy(pool));
}

static CUresult trim(CUmemoryPool pool, size_t keep)
{
    if (!known(pool))
        return CUDA_ERROR_INVALID_VALUE;
    heap_trim(&pool->heap, keep);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    WITH_DRIVER(trim(pool, keep));
}

/* The 64-bit attribute, or NULL. */
static uint64_t *attribute_of(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return &pool->threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        return &pool->heap.reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return &pool->heap.reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        return &pool->heap.used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return &pool->heap.used_high;
    default:
        return NULL;
    }
}

static bool is_switch(CUmemPool_attribute attribute)
{
    return attribute >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
           attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

static CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    if (!known(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_switch(attribute)) {
        pool->reuse[attribute - 1] = *(int *)value;
        return CUDA_SUCCESS;
    }
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        pool->threshold = *(cuuint64_t *)value;
        return CUDA_SUCCESS;
    }
    bool is_high = attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH ||
                   attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    if (!is_high || *(cuuint64_t *)value != 0)
        return CUDA_ERROR_INVALID_VALUE; /* a high-water mark can only be reset */
    *attribute_of(pool, attribute) = attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH
                                         ? pool->heap.used
                                         : pool->heap.reserved;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    WITH_DRIVER(set_attribute(pool, attribute, value));
}

static CUresult get_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    if (!known(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_switch(attribute)) {
        *(int *)value = pool->reuse[attribute - 1];
        return CUDA_SUCCESS;
    }
    const uint64_t *found = attribute_of(pool, attribute);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    *(cuuint64_t *)value = *found;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    WITH_DRIVER(get_attribute(pool, attribute, value));
}
