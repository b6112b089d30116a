/* Address space and blocks of device memory.
 *
 * As the real driver does, small blocks share pages of 2 MiB, so that what a process is charged
 * with is not the sum of what it asked for; and a freed address is the first one to be handed out
 * again, so that one thread's free races with another thread's allocation of the same address. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALLEST 512ull
#define LARGEST_SHARED (1ull << 20)

/* A run of granules that is one block or is cut into equal blocks. */
struct region {
    struct heap *heap;
    CUdeviceptr base;
    uint64_t bytes, block_bytes;
    unsigned live_blocks;
    bool charged;
    int export; /* index into the shared exports, or -1 */
    struct region *next;
    uint64_t live[]; /* a bit for each block */
};

static CUdeviceptr arena;         /* its first address */
static size_t next_granule;       /* granules from here on were never taken */
static struct region **region_of; /* by granule */
static struct shelf given_back;

uint64_t round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static struct stack **find_stack(struct shelf *shelf, uint64_t bytes)
{
    struct stack **at = &shelf->buckets[(bytes * 0x9e3779b97f4a7c15ull) >> 58];
    while (*at && (*at)->bytes != bytes)
        at = &(*at)->next;
    return at;
}

void shelf_push(struct shelf *shelf, uint64_t bytes, uint64_t value)
{
    struct stack **at = find_stack(shelf, bytes), *stack = *at;
    if (!stack) {
        stack = *at = calloc(1, sizeof *stack);
        stack->bytes = bytes;
    }
    if (stack->count == stack->room) {
        stack->room = stack->room ? 2 * stack->room : 16;
        stack->items = realloc(stack->items, stack->room * sizeof *stack->items);
    }
    stack->items[stack->count++] = value;
}

bool shelf_pop(struct shelf *shelf, uint64_t bytes, uint64_t *value)
{
    struct stack *stack = *find_stack(shelf, bytes);
    if (!stack || !stack->count)
        return false;
    *value = stack->items[--stack->count];
    return true;
}

void shelf_clear(struct shelf *shelf)
{
    for (size_t i = 0; i < sizeof shelf->buckets / sizeof *shelf->buckets; i++)
        while (shelf->buckets[i]) {
            struct stack *stack = shelf->buckets[i];
            shelf->buckets[i] = stack->next;
            free(stack->items);
            free(stack);
        }
}

/* Reserves the process's whole device address space at once: real addresses (0x7e.., 0x7f..), which
 * no host allocation can have at the same time, and no memory. */
static bool arena_create(void)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *base = mmap(NULL, ARENA_BYTES + GRANULE, PROT_NONE, flags, -1, 0);
    void *table = mmap(NULL, GRANULES * sizeof *region_of, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base == MAP_FAILED || table == MAP_FAILED)
        return false;
    arena = round_up((CUdeviceptr)base, GRANULE);
    region_of = table;
    return true;
}

CUdeviceptr arena_take(uint64_t bytes)
{
    uint64_t addr;
    if (!arena && !arena_create())
        return 0;
    if (shelf_pop(&given_back, bytes, &addr))
        return addr;
    if (bytes / GRANULE > GRANULES - next_granule)
        return 0;
    addr = arena + next_granule * GRANULE;
    next_granule += bytes / GRANULE;
    return addr;
}

void arena_give(CUdeviceptr base, uint64_t bytes)
{
    shelf_push(&given_back, bytes, base);
}

size_t arena_granule(CUdeviceptr addr)
{
    return arena && addr - arena < ARENA_BYTES ? (addr - arena) / GRANULE : SIZE_MAX;
}

static bool region_charge(struct region *region)
{
    struct heap *heap = region->heap;
    if (region->charged)
        return true;
    if (!sim_charge(driver_owner(), heap->gpu, region->bytes))
        return false;
    region->charged = true;
    heap->reserved += region->bytes;
    if (heap->reserved > heap->reserved_high)
        heap->reserved_high = heap->reserved;
    return true;
}

static void region_uncharge(struct region *region)
{
    if (!region->charged)
        return;
    if (region->export >= 0)
        export_unuse(region->export);
    else
        sim_uncharge(driver_owner(), region->heap->gpu, region->bytes);
    region->export = -1;
    region->charged = false;
    region->heap->reserved -= region->bytes;
}

static uint64_t block_bytes_for(uint64_t bytes)
{
    if (bytes > LARGEST_SHARED)
        return round_up(bytes, GRANULE);
    uint64_t block = SMALLEST;
    while (block < bytes)
        block *= 2;
    return block;
}

static CUresult region_add(struct heap *heap, uint64_t block)
{
    uint64_t bytes = round_up(block, GRANULE), blocks = bytes / block;
    struct region *region = calloc(1, sizeof *region + (blocks + 63) / 64 * 8);
    if (!region)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *region = (struct region){
        .heap = heap, .bytes = bytes, .block_bytes = block, .export = -1};
    if (!region_charge(region)) {
        free(region);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    region->base = arena_take(bytes);
    if (!region->base) {
        region_uncharge(region);
        free(region);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    region->next = heap->regions;
    heap->regions = region;
    size_t first = arena_granule(region->base);
    for (size_t i = 0; i < bytes / GRANULE; i++)
        region_of[first + i] = region;
    for (uint64_t i = blocks; i-- > 0;)
        shelf_push(&heap->free, block, region->base + i * block);
    return CUDA_SUCCESS;
}

CUresult heap_alloc(struct heap *heap, uint64_t bytes, CUdeviceptr *out)
{
    if (bytes > driver_state()->capacity)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t block = block_bytes_for(bytes), addr;
    if (!shelf_pop(&heap->free, block, &addr)) {
        CUresult rc = region_add(heap, block);
        if (rc != CUDA_SUCCESS)
            return rc;
        shelf_pop(&heap->free, block, &addr);
    }
    struct region *region = region_of[arena_granule(addr)];
    if (!region_charge(region)) {
        shelf_push(&heap->free, block, addr);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t index = (addr - region->base) / block;
    region->live[index / 64] |= 1ull << (index % 64);
    region->live_blocks++;
    heap->used += block;
    if (heap->used > heap->used_high)
        heap->used_high = heap->used;
    *out = addr;
    return CUDA_SUCCESS;
}

/* The region of the live block that begins at `addr`, and the block's number in it; or NULL. */
static struct region *live_block(CUdeviceptr addr, uint64_t *index)
{
    size_t granule = arena_granule(addr);
    struct region *region = granule == SIZE_MAX ? NULL : region_of[granule];
    if (!region || (addr - region->base) % region->block_bytes)
        return NULL;
    *index = (addr - region->base) / region->block_bytes;
    return region->live[*index / 64] >> (*index % 64) & 1 ? region : NULL;
}

struct heap *heap_free(CUdeviceptr addr)
{
    uint64_t index;
    struct region *region = live_block(addr, &index);
    if (!region)
        return NULL;
    region->live[index / 64] &= ~(1ull << (index % 64));
    region->live_blocks--;
    region->heap->used -= region->block_bytes;
    shelf_push(&region->heap->free, region->block_bytes, addr);
    if (!region->live_blocks && !region->heap->keeps_pages)
        region_uncharge(region);
    return region->heap;
}

uint64_t heap_find(CUdeviceptr addr, CUdeviceptr *base)
{
    size_t granule = arena_granule(addr);
    struct region *region = granule == SIZE_MAX ? NULL : region_of[granule];
    uint64_t index;
    if (!region)
        return 0;
    *base = region->base + (addr - region->base) / region->block_bytes * region->block_bytes;
    return live_block(*base, &index) ? region->block_bytes : 0;
}

struct heap *heap_of(CUdeviceptr addr)
{
    uint64_t index;
    struct region *region = live_block(addr, &index);
    return region ? region->heap : NULL;
}

int heap_share(CUdeviceptr addr, struct heap_part *part)
{
    uint64_t index;
    struct region *region = live_block(addr, &index);
    if (!region)
        return -1;
    if (region->export < 0)
        region->export = export_new(region->heap->gpu, region->bytes);
    if (part)
        *part = (struct heap_part){addr - region->base, region->block_bytes};
    return region->export;
}

void heap_trim(struct heap *heap, uint64_t keep_bytes)
{
    for (struct region *r = heap->regions; r && heap->reserved > keep_bytes; r = r->next)
        if (!r->live_blocks)
            region_uncharge(r);
}

void heap_destroy(struct heap *heap)
{
    while (heap->regions) {
        struct region *region = heap->regions;
        heap->regions = region->next;
        region_uncharge(region);
        size_t first = arena_granule(region->base);
        memset(&region_of[first], 0, region->bytes / GRANULE * sizeof *region_of);
        arena_give(region->base, region->bytes);
        free(region);
    }
    shelf_clear(&heap->free);
    heap->used = 0;
}
