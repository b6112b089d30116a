/* Virtual memory management: physical memory behind handles, mapped into reserved addresses.
 *
 * The pages of a handle go when it has no reference, no map and no open export or import, in
 * whichever order these end. Within a process that is counted here; between processes the shared
 * state counts (state.h), from the first export on. */
#include "driver.h"

#include <stdlib.h>

#define HANDLE_BASE 0x55d000000000ull /* handles look like small heap addresses */
#define HANDLE_STEP 0x40ull

struct memory {
    int gpu; /* -1: host memory, charged to no GPU */
    uint64_t bytes;
    unsigned references, maps;
    int export; /* index into the shared exports, or -1 */
    void (*ended)(CUmemGenericAllocationHandle handle); /* told when it goes, or NULL */
    CUmemAllocationHandleType types;
    bool in_use;
    unsigned next_free;
};

struct map {
    unsigned memory;
    uint64_t bytes;
};

static struct memory *memories; /* slot 0 stays empty: it ends the list of free slots */
static unsigned memory_room, memory_count = 1, first_free;
static struct map *map_at[GRANULES / 4096]; /* maps by their first granule, paged */
static uint64_t *reserved_at[GRANULES / 4096]; /* reservations, likewise */

/* The entry of a granule in a two-level table; the second level is made on first use. */
static struct map *map_entry(size_t granule)
{
    struct map **page = &map_at[granule / 4096];
    if (!*page)
        *page = calloc(4096, sizeof **page);
    return &(*page)[granule % 4096];
}

static uint64_t *reserved_entry(size_t granule)
{
    uint64_t **page = &reserved_at[granule / 4096];
    if (!*page)
        *page = calloc(4096, sizeof **page);
    return &(*page)[granule % 4096];
}

static unsigned memory_new(int gpu, uint64_t bytes)
{
    unsigned index = first_free;
    if (index) {
        first_free = memories[index].next_free; /* last released first, as with addresses */
    } else {
        if (memory_count >= memory_room) {
            memory_room = memory_room ? 2 * memory_room : 256;
            memories = realloc(memories, memory_room * sizeof *memories);
        }
        index = memory_count++;
    }
    memories[index] = (struct memory){
        .gpu = gpu, .bytes = bytes, .references = 1, .export = -1, .in_use = true};
    return index;
}

static CUmemGenericAllocationHandle handle_of(unsigned index)
{
    return HANDLE_BASE + index * HANDLE_STEP;
}

/* NULL unless somebody still holds a reference: a map alone does not keep the handle's name. */
static struct memory *find(CUmemGenericAllocationHandle handle)
{
    uint64_t index = (handle - HANDLE_BASE) / HANDLE_STEP;
    if (handle < HANDLE_BASE || (handle - HANDLE_BASE) % HANDLE_STEP || index >= memory_count ||
        index == 0)
        return NULL;
    return memories[index].in_use && memories[index].references ? &memories[index] : NULL;
}

static void free_if_unused(struct memory *memory)
{
    if (memory->references || memory->maps)
        return;
    if (memory->export >= 0)
        export_unuse(memory->export);
    else if (memory->gpu >= 0)
        sim_uncharge(driver_owner(), memory->gpu, memory->bytes);
    if (memory->ended)
        memory->ended(handle_of((unsigned)(memory - memories)));
    memory->in_use = false;
    memory->next_free = first_free;
    first_free = (unsigned)(memory - memories);
}

static CUresult location_gpu(const CUmemLocation *location, int *gpu)
{
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        *gpu = driver_gpu(location->id);
        return *gpu < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
    }
    *gpu = -1;
    return location->type >= CU_MEM_LOCATION_TYPE_HOST &&
                   location->type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

/* Needs no current context: worker threads of allocators call it without one. */
static CUresult create(CUmemGenericAllocationHandle *out, uint64_t bytes,
                       const CUmemAllocationProp *prop)
{
    int gpu;
    if (!out || !prop || !bytes || bytes % GRANULE || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = location_gpu(&prop->location, &gpu);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (gpu >= 0 && !sim_charge(driver_owner(), gpu, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    unsigned index = memory_new(gpu, bytes);
    memories[index].types = prop->requestedHandleTypes;
    *out = handle_of(index);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(create(handle, bytes, prop));
}

CUmemGenericAllocationHandle
vmm_handle_without_memory(uint64_t bytes, void (*ended)(CUmemGenericAllocationHandle handle))
{
    unsigned index = memory_new(-1, bytes);
    memories[index].ended = ended;
    return handle_of(index);
}

uint64_t vmm_bytes(CUmemGenericAllocationHandle handle)
{
    const struct memory *memory = find(handle);
    return memory ? memory->bytes : 0;
}

/* Counts as a map: whoever holds the memory has it, whatever becomes of the handle. */
unsigned vmm_hold(CUmemGenericAllocationHandle handle)
{
    struct memory *memory = find(handle);
    if (!memory)
        return 0;
    memory->maps++;
    return (unsigned)(memory - memories);
}

unsigned vmm_hold_at(CUdeviceptr addr)
{
    size_t granule = arena_granule(addr);
    unsigned index = granule == SIZE_MAX ? 0 : map_entry(granule)->memory;
    if (index)
        memories[index].maps++;
    return index;
}

int vmm_gpu(unsigned index)
{
    return memories[index].gpu;
}

void vmm_let_go(unsigned index)
{
    memories[index].maps--;
    free_if_unused(&memories[index]);
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    struct memory *memory = find(handle);
    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    memory->references--;
    free_if_unused(memory);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    WITH_DRIVER(release(handle));
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option)
{
    (void)option;
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!granularity || !prop)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *out, uint64_t bytes, uint64_t alignment)
{
    if (!out || !bytes || bytes % GRANULE || alignment & (alignment - 1) || alignment > GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr base = arena_take(bytes);
    if (!base)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0, first = arena_granule(base); i < bytes / GRANULE; i++)
        *reserved_entry(first + i) = i == 0 ? bytes : 1; /* 1: inside of a reservation */
    *out = base;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags)
{
    (void)hint, (void)flags; /* a hint binds nobody */
    WITH_DRIVER(reserve(ptr, bytes, alignment));
}

/* The first granule of a range that lies in the arena; SIZE_MAX if it doesn't. */
static size_t range_granule(CUdeviceptr ptr, uint64_t bytes)
{
    if (!bytes || ptr % GRANULE || bytes % GRANULE)
        return SIZE_MAX;
    size_t last = arena_granule(ptr + bytes - 1);
    return last == SIZE_MAX ? SIZE_MAX : arena_granule(ptr);
}

static CUresult unreserve(CUdeviceptr ptr, uint64_t bytes)
{
    size_t first = range_granule(ptr, bytes);
    if (first == SIZE_MAX || *reserved_entry(first) != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < bytes / GRANULE; i++)
        if (map_entry(first + i)->memory)
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < bytes / GRANULE; i++)
        *reserved_entry(first + i) = 0;
    arena_give(ptr, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t bytes)
{
    WITH_DRIVER(unreserve(ptr, bytes));
}

static CUresult map(CUdeviceptr ptr, uint64_t bytes, uint64_t offset,
                    CUmemGenericAllocationHandle handle)
{
    struct memory *memory = find(handle);
    size_t first = range_granule(ptr, bytes);
    if (!memory || offset || bytes > memory->bytes || first == SIZE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < bytes / GRANULE; i++)
        if (!*reserved_entry(first + i) || map_entry(first + i)->memory)
            return CUDA_ERROR_INVALID_VALUE;
    unsigned index = (unsigned)(memory - memories);
    for (size_t i = 0; i < bytes / GRANULE; i++)
        *map_entry(first + i) = (struct map){index, i == 0 ? bytes : 0};
    memory->maps++;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(map(ptr, bytes, offset, handle));
}

/* Takes whole maps only, any number of them. */
static CUresult unmap(CUdeviceptr ptr, uint64_t bytes)
{
    size_t first = range_granule(ptr, bytes), count = bytes / GRANULE;
    if (first == SIZE_MAX || !map_entry(first)->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count;) {
        struct map *entry = map_entry(first + i);
        if (entry->bytes > bytes - i * GRANULE)
            return CUDA_ERROR_INVALID_VALUE;
        i += entry->bytes ? entry->bytes / GRANULE : 1;
    }
    for (size_t i = 0; i < count; i++) {
        struct map gone = *map_entry(first + i);
        *map_entry(first + i) = (struct map){0, 0};
        if (gone.bytes) {
            memories[gone.memory].maps--;
            free_if_unused(&memories[gone.memory]);
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t bytes)
{
    WITH_DRIVER(unmap(ptr, bytes));
}

static CUresult set_access(CUdeviceptr ptr, uint64_t bytes, const CUmemAccessDesc *desc,
                           size_t count)
{
    size_t first = range_granule(ptr, bytes);
    if (first == SIZE_MAX || !desc || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < bytes / GRANULE; i++)
        if (!map_entry(first + i)->memory)
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *desc, size_t count)
{
    WITH_DRIVER(set_access(ptr, bytes, desc, count));
}

static CUresult retain(CUmemGenericAllocationHandle *out, CUdeviceptr addr)
{
    size_t granule = arena_granule(addr);
    unsigned index = granule == SIZE_MAX ? 0 : map_entry(granule)->memory;
    if (!out || !index)
        return CUDA_ERROR_INVALID_VALUE;
    memories[index].references++;
    *out = handle_of(index);
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    WITH_DRIVER(retain(handle, (CUdeviceptr)addr));
}

/* The shared object that the memory is from its first export on; -1: there are too many. */
static int share(struct memory *memory)
{
    if (memory->export < 0)
        memory->export = export_new(memory->gpu, memory->bytes);
    return memory->export;
}

static CUresult export(int *out, CUmemGenericAllocationHandle handle,
                       CUmemAllocationHandleType type)
{
    struct memory *memory = find(handle);
    if (!out || !memory || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !(memory->types & type))
        return CUDA_ERROR_INVALID_VALUE;
    if (memory->gpu < 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    int fd = share(memory) < 0 ? -1 : export_open_file(memory->export);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    *out = fd;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(export(shareable, handle, type));
}

static CUresult import(CUmemGenericAllocationHandle *out, int fd, CUmemAllocationHandleType type)
{
    if (!out || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    int export = export_use(export_id_of_file(fd));
    if (export < 0)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned index = memory_new(export_at(export)->gpu, export_at(export)->bytes);
    memories[index].export = export;
    memories[index].types = type;
    *out = handle_of(index);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type)
{
    WITH_DRIVER(import(handle, (int)(intptr_t)shareable, type));
}

/* A file for a range of addresses: of memory that is mapped, or of a block. It keeps the pages. */
static CUresult handle_for_range(int *out, CUdeviceptr addr, uint64_t bytes,
                                 CUmemRangeHandleType type)
{
    size_t granule = arena_granule(addr);
    if (!out || !bytes || (addr | bytes) % 4096 || granule == SIZE_MAX ||
        type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned index = map_entry(granule)->memory;
    int export = index ? share(&memories[index]) : heap_share(addr, NULL);
    if (export < 0)
        return CUDA_ERROR_INVALID_VALUE;
    int fd = export_open_file(export);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    *out = fd;
    return CUDA_SUCCESS;
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr addr, size_t bytes,
                                       CUmemRangeHandleType type, unsigned long long flags)
{
    (void)flags;
    WITH_DRIVER(handle_for_range(handle, addr, bytes, type));
}
