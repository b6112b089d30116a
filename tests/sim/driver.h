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

/* A live block's place in the region that it shares pages with, which is what others can open. */
struct heap_part {
    uint64_t offset, bytes;
};
/* The shared object that the region of a live block is from now on; -1: no block begins there. */
int heap_share(CUdeviceptr addr, struct heap_part *part);
/* The heap of the live block that begins at `addr`; NULL: none does. */
struct heap *heap_of(CUdeviceptr addr);

/* Memory that several processes may use, by its index in the shared state (-1: none, or no room).
 * Each use ends with export_unuse; the memory goes with the last use of the last process. */
int export_new(int gpu, uint64_t bytes); /* charged to this process, and used by it */
int export_use(uint64_t id);
void export_unuse(int export);
struct sim_export *export_at(int export);
/* A descriptor that names the memory, and keeps it while it is open anywhere; -1: none. */
int export_open_file(int export);
uint64_t export_id_of_file(int fd); /* 0: it names none */

struct CUctx_st {
    int gpu;
    unsigned serial; /* grows when the structure is used again for another context */
    bool alive, primary;
    unsigned retained; /* of a primary context */
    unsigned attached; /* of another one: users beyond the first */
    uint64_t charged;
    struct heap heap;
    struct CUctx_st *next;
};
/* The calling thread's context. */
CUresult context_current(CUcontext *ctx);
/* What every function that waits for a GPU does. */
CUresult context_synchronize(void);
CUresult context_primary_retain(CUcontext *ctx, int gpu);
CUresult context_primary_release(int gpu);
/* A context that costs nothing and is current nowhere: a green context's. */
CUcontext context_for_green(int gpu);
void context_end(CUcontext ctx);

/* What lies behind a handle, belongs to a context and may take device memory. A handle is the
 * object's address, as with the real driver. */
enum object_kind {
    OBJECT_ARRAY,
    OBJECT_MIPMAPPED,
    OBJECT_MODULE,
    OBJECT_LIBRARY,
    OBJECT_CODE, /* of a library, in a context */
    OBJECT_EXTERNAL,
    OBJECT_BUFFER, /* mapped from external memory */
    OBJECT_GREEN,
    OBJECT_GRAPH,
    OBJECT_GRAPH_EXEC,
    OBJECT_LIMIT, /* what a raised limit of a context takes */
    OBJECT_LOW,   /* a block with an address of 32 bits */
    OBJECT_OPENED /* another process's block */
};
struct object {
    enum object_kind kind;
    CUcontext ctx; /* NULL: outlives every context */
    int gpu;
    uint64_t charged;
    CUdeviceptr addr; /* for what is found by a number */
    void *more;
    void (*end)(struct object *object); /* ends `more`, before the object goes; or NULL */
    struct object *next;
};
/* NULL when the GPU has no room. */
struct object *object_new(enum object_kind kind, CUcontext ctx, int gpu, uint64_t bytes);
/* NULL: there is no such object. */
struct object *object_of(enum object_kind kind, const void *handle);
/* The same by `addr`, of this context; of any one where it is NULL. */
struct object *object_at(enum object_kind kind, CUcontext ctx, CUdeviceptr addr);
void object_free(struct object *object);
CUresult object_destroy(enum object_kind kind, const void *handle);
void objects_free_all(CUcontext ctx);

/* The size of what a handle of cuMemCreate or cuMulticastCreate names; 0: it names none. */
uint64_t vmm_bytes(CUmemGenericAllocationHandle handle);
/* A handle of address space; `ended` hears of its end, by whatever call it comes. */
CUmemGenericAllocationHandle
vmm_handle_without_memory(uint64_t bytes, void (*ended)(CUmemGenericAllocationHandle handle));
/* Keeps the memory of a handle, or that mapped at an address, until it is let go; 0: no memory. */
unsigned vmm_hold(CUmemGenericAllocationHandle handle);
unsigned vmm_hold_at(CUdeviceptr addr);
void vmm_let_go(unsigned held);
int vmm_gpu(unsigned held); /* -1: host memory */

/* What cuMemFree takes although no heap has it. False: it is not one of these. */
bool external_free(CUdeviceptr addr);
bool graph_free(CUdeviceptr addr);
bool low_free(CUdeviceptr addr);
bool pool_pointer_free(CUdeviceptr addr);

/* Memory that lies in host pages: pinned, registered, managed. */
enum host_kind { HOST_PINNED, HOST_REGISTERED, HOST_MANAGED };
CUresult host_new(enum host_kind kind, CUcontext ctx, uint64_t bytes, void **addr);
bool host_free(enum host_kind kind, void *addr);
void host_free_all(CUcontext ctx);

/* A synchronisation with a GPU is when pools give back what exceeds their threshold. */
void pools_synchronize(int gpu);
CUmemoryPool pool_default_of(int gpu);
CUmemoryPool pool_current_of(int gpu);
/* INVALID_VALUE for one that can't be named, or that belongs to another GPU. */
CUresult pool_make_current(CUmemoryPool pool, int gpu);
/* What names an exportable or imported pool on this machine; 0: neither, or no pool. */
uint64_t pool_identity(CUmemoryPool pool);
int pool_gpu(CUmemoryPool pool);
/* Another process's pool: nothing can be allocated from it. */
CUmemoryPool pool_import(int gpu, uint64_t identity);
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
