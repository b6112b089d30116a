/* What the files of the simulated libcuda share: the process's own side of the driver.
 *
 * `__CUDA_API_VERSION_INTERNAL` is NVIDIA's switch for building the driver itself: cuda.h then
 * declares every export under its exact name (`cuMemAlloc_v2`, `cuMemAllocAsync` and its `_ptsz`
 * twin, the v1 forms), so the compiler holds each definition here against NVIDIA's prototype;
 * with the visibility switch what the header declares is exported and nothing else is. */
#ifndef SIM_DRIVER_H
#define SIM_DRIVER_H

#define __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_PUSH_VISIBILITY_DEFAULT
#include <cuda.h>

#include "state.h"

#include <stddef.h>

/* One lock for all that is the process's own. Exported functions take it; the functions declared
 * below expect it to be held. */
void driver_lock(void);
void driver_unlock(void);

/* CUDA_SUCCESS after cuInit; CUDA_ERROR_NOT_INITIALIZED before, and in a child that was forked
 * after it: the real driver's state does not survive a fork. */
CUresult driver_ready(void);
/* Spends $SIM_FREE_LINGER_US after a free has given its address away, the lock not held: a tool
 * that books frees at their return is then sure to see the address again before that. */
void driver_linger(void);
int driver_owner(void);
int driver_gpu(CUdevice ordinal);      /* -1: no such ordinal */
CUdevice driver_ordinal(int gpu);      /* the ordinal that this process uses for the GPU */
struct sim_state *driver_state(void);

/* Last in, first out stacks of 64-bit values, one for each size. */
struct shelf {
    struct stack {
        uint64_t bytes;
        uint64_t *items;
        size_t count, room;
        struct stack *next;
    } *buckets[64];
};
void shelf_push(struct shelf *shelf, uint64_t bytes, uint64_t value);
bool shelf_pop(struct shelf *shelf, uint64_t bytes, uint64_t *value);
void shelf_clear(struct shelf *shelf);

/* Device address space of the process, in granules of 2 MiB. */
#define GRANULE (2ull << 20)
#define ARENA_BYTES (1ull << 40)
#define GRANULES (ARENA_BYTES / GRANULE)
CUdeviceptr arena_take(uint64_t bytes); /* 0: exhausted */
void arena_give(CUdeviceptr base, uint64_t bytes);
/* Which granule of the arena an address lies in; SIZE_MAX outside of it. */
size_t arena_granule(CUdeviceptr addr);
uint64_t round_up(uint64_t value, uint64_t unit);

/* Device memory cut into blocks, of a context or of a pool. */
struct heap {
    int gpu;
    bool keeps_pages; /* a pool keeps pages without live blocks until it is trimmed */
    uint64_t reserved, reserved_high, used, used_high;
    struct shelf free;
    struct region *regions;
    struct CUmemPoolHandle_st *pool; /* the pool that the heap is of, or NULL */
};
CUresult heap_alloc(struct heap *heap, uint64_t bytes, CUdeviceptr *addr);
/* Frees the block at `addr`, whichever heap it is of; NULL if no live block begins there. */
struct heap *heap_free(CUdeviceptr addr);
/* The live block that an address lies in, and its size; 0 if it lies in none. */
uint64_t heap_find(CUdeviceptr addr, CUdeviceptr *base);
void heap_trim(struct heap *heap, uint64_t keep_bytes);
void heap_destroy(struct heap *heap);

struct CUctx_st {
    int gpu;
    unsigned serial; /* grows when the structure is used again for another context */
    bool alive, primary;
    unsigned retained; /* of a primary context */
    unsigned attached; /* of another one: users beyond the first */
    struct heap heap;
    struct CUctx_st *next;
};
/* The calling thread's context. */
CUresult context_current(CUcontext *ctx);

/* A context that is current nowhere: a green context's. */
CUresult context_new(int gpu, CUcontext *ctx);
void context_end(CUcontext ctx);

/* What lies behind a handle of its own kind, and costs device memory of its own. */
enum object_kind { ARRAY, MIPMAPPED, MODULE, LIBRARY, EXTERNAL, BUFFER, GREEN, GRAPH, GRAPH_EXEC, OLD };
struct object {
    enum object_kind kind;
    CUcontext ctx; /* NULL: outlives every context */
    int gpu;
    uint64_t charged;
    CUdeviceptr addr; /* for what is found by its address */
    void *more;       /* freed with the object */
    struct object *next;
};
/* NULL when the GPU has no room. */
struct object *object_new(enum object_kind kind, CUcontext ctx, int gpu, uint64_t bytes);
bool object_is(enum object_kind kind, const void *handle);
/* False: there is no such object. */
bool object_free(enum object_kind kind, void *handle);
bool object_free_at(enum object_kind kind, CUdeviceptr addr);
void objects_free_all(CUcontext ctx);

/* Blocks that cuMemFree takes although no heap has them; false: not one of these. */

bool external_free(CUdeviceptr addr);
bool pool_pointer_free(CUdeviceptr addr);
bool graph_free(CUdeviceptr addr);

/* A handle that costs nothing and ends with cuMemRelease. */
CUmemGenericAllocationHandle vmm_handle_without_memory(uint64_t bytes);
bool vmm_known(CUmemGenericAllocationHandle handle);
/* The size of the block that begins at an address; 0: none does. */
uint64_t heap_block_bytes(CUdeviceptr addr);

/* Memory that lies in host pages: pinned, registered, managed. */
enum host_kind { HOST_PINNED, HOST_REGISTERED, HOST_MANAGED };
CUresult host_new(enum host_kind kind, CUcontext ctx, uint64_t bytes, void **addr);
bool host_free(enum host_kind kind, void *addr);
void host_free_all(CUcontext ctx);

/* A synchronisation with a GPU is when pools give back what exceeds their threshold. */
void pools_synchronize(int gpu);
bool pool_is_known(CUmemoryPool pool);
/* Another process's pool, under a name of its own. */
CUmemoryPool pool_for_import(int gpu);
/* A block of a pool was freed, perhaps the last one of a destroyed pool. */
void pool_block_freed(CUmemoryPool pool, bool synchronous);

/* One traced function's usual frame: not before cuInit, and under the lock. */
#define WITH_DRIVER(body)                                                                          \
    do {                                                                                           \
        CUresult rc_ = driver_ready();                                                             \
        if (rc_ != CUDA_SUCCESS)                                                                   \
            return rc_;                                                                            \
        driver_lock();                                                                             \
        rc_ = (body);                                                                              \
        driver_unlock();                                                                           \
        return rc_;                                                                                \
    } while (0)

#endif
