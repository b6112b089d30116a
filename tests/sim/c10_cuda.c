/* The simulated libc10_cuda: a caching allocator that calls libc10's reporters as PyTorch's does:
 * under its lock, after every change, with the size of the whole block (rounding and unsplit rest
 * included) and the device's running totals. */
#define _GNU_SOURCE
#include "c10.h"
#include "c10_expandable.h"
#include "c10_reporters.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define MIB (1ull << 20)
#define SMALL_LIMIT MIB          /* up to here blocks come from small segments */
#define SMALL_SEGMENT (2 * MIB)
#define LARGE_SEGMENT (20 * MIB) /* for blocks below LARGE_LIMIT */
#define LARGE_LIMIT (10 * MIB)
#define UNIT 512ull
#define MAX_DEVICES 16
#define CUDA_DEVICE_TYPE 1ull

#define EXPORT __attribute__((visibility("default"), noinline))

struct block {
    char *addr;
    size_t bytes;
    int device;
    bool small, live;
    struct block *before, *after; /* neighbours in the segment */
    struct block *next;           /* of all blocks, by hash of the address */
};

#define BUCKETS 65536
static struct block *blocks[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t allocated[MAX_DEVICES], reserved[MAX_DEVICES], peak[MAX_DEVICES];

/* Free blocks, last freed first; searched for the smallest that fits, as PyTorch's ordered set. */
struct free_list {
    struct block **items;
    size_t count, room;
};
static struct free_list free_blocks[MAX_DEVICES][2]; /* large, small */

static uint64_t device_word(int device)
{
    return 0xdeadbeef5a5a0000ull | (uint64_t)(device & 0xff) << 8 | CUDA_DEVICE_TYPE;
}

static struct block **bucket(const void *addr)
{
    return &blocks[((uint64_t)addr / UNIT * 0x9e3779b97f4a7c15ull) >> 48];
}

static struct block *block_new(char *addr, size_t bytes, int device, bool small)
{
    struct block *block = calloc(1, sizeof *block), **head = bucket(addr);
    *block = (struct block){addr, bytes, device, small, false, NULL, NULL, *head};
    *head = block;
    return block;
}

static void block_drop(struct block *block)
{
    struct block **at = bucket(block->addr);
    while (*at != block)
        at = &(*at)->next;
    *at = block->next;
    free(block);
}

static void list_add(struct block *block)
{
    struct free_list *list = &free_blocks[block->device][block->small];
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 64;
        list->items = realloc(list->items, list->room * sizeof *list->items);
    }
    list->items[list->count++] = block;
}

static void list_remove(struct block *block)
{
    struct free_list *list = &free_blocks[block->device][block->small];
    size_t i = list->count;
    while (list->items[--i] != block) {
    }
    for (list->count--; i < list->count; i++)
        list->items[i] = list->items[i + 1];
}

static struct block *take_free(int device, bool small, size_t bytes)
{
    const struct free_list *list = &free_blocks[device][small];
    struct block *best = NULL;
    for (size_t i = list->count; i-- > 0;)
        if (list->items[i]->bytes >= bytes && (!best || list->items[i]->bytes < best->bytes))
            best = list->items[i];
    if (best)
        list_remove(best);
    return best;
}

/* Of an expandable segment the handles at its end go, as far as they are free. */
static void shrink(int device, int small)
{
    struct block *tail = NULL;
    struct free_list *list = &free_blocks[device][small];
    for (size_t i = 0; i < list->count; i++)
        if (!list->items[i]->after)
            tail = list->items[i];
    if (!tail)
        return;
    size_t given = expandable_shrink(device, small, tail->bytes);
    reserved[device] -= given;
    tail->bytes -= given;
    if (tail->bytes)
        return;
    list_remove(tail);
    if (tail->before)
        tail->before->after = NULL;
    block_drop(tail);
}

static void give_back_segments(int device)
{
    if (expandable_wanted()) {
        shrink(device, 0);
        shrink(device, 1);
        return;
    }
    for (int small = 0; small < 2; small++) {
        struct free_list *list = &free_blocks[device][small];
        size_t kept = 0;
        for (size_t i = 0; i < list->count; i++) {
            struct block *block = list->items[i];
            if (block->before || block->after) {
                list->items[kept++] = block; /* a live neighbour pins the segment */
                continue;
            }
            cudaFree(block->addr);
            reserved[device] -= block->bytes;
            block_drop(block);
        }
        list->count = kept;
    }
}

/* The last block of an expandable segment, or NULL. */
static struct block *last_block(int device, bool small)
{
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct block *block = blocks[i]; block; block = block->next)
            if (block->device == device && block->small == small && !block->after)
                return block;
    return NULL;
}

/* What was added to the segment, joined to the free block before it. */
static struct block *segment_grow(int device, bool small, size_t bytes)
{
    struct block *last = last_block(device, small);
    bool is_free = last && !last->live;
    size_t added, missing = is_free ? bytes - last->bytes : bytes;
    char *addr = expandable_grow(device, small, missing, &added);
    if (!addr) {
        give_back_segments(device);
        return NULL;
    }
    reserved[device] += added;
    if (is_free) {
        list_remove(last);
        last->bytes += added;
        return last;
    }
    struct block *block = block_new(addr, added, device, small);
    block->before = last;
    if (last)
        last->after = block;
    return block;
}

static struct block *segment_new(int device, bool small, size_t bytes)
{
    if (expandable_wanted())
        return segment_grow(device, small, bytes);
    size_t segment = small                 ? SMALL_SEGMENT
                     : bytes < LARGE_LIMIT ? LARGE_SEGMENT
                                           : (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    void *addr;
    if (cudaSetDevice(device) != cudaSuccess)
        return NULL;
    if (cudaMalloc(&addr, segment) != cudaSuccess) {
        give_back_segments(device);
        if (cudaMalloc(&addr, segment) != cudaSuccess)
            return NULL;
    }
    reserved[device] += segment;
    return block_new(addr, segment, device, small);
}

/* Cuts what is left over off the block, if it is worth a block of its own. */
static void split(struct block *block, size_t bytes)
{
    size_t rest = block->bytes - bytes;
    if (block->small ? rest < UNIT : rest <= SMALL_LIMIT)
        return;
    struct block *tail = block_new(block->addr + bytes, rest, block->device, block->small);
    tail->before = block;
    tail->after = block->after;
    if (tail->after)
        tail->after->before = tail;
    block->after = tail;
    block->bytes = bytes;
    list_add(tail);
}

static void *alloc_locked(size_t bytes, int device)
{
    bool small = bytes <= SMALL_LIMIT;
    struct block *block = take_free(device, small, bytes);
    if (!block)
        block = segment_new(device, small, bytes);
    if (!block) {
        report_oom((int64_t)bytes, allocated[device], reserved[device], device_word(device));
        return NULL;
    }
    split(block, bytes);
    block->live = true;
    allocated[device] += block->bytes;
    if (allocated[device] > peak[device])
        peak[device] = allocated[device];
    report_usage(block->addr, (int64_t)block->bytes, allocated[device], reserved[device],
                 device_word(device));
    return block->addr;
}

EXPORT void *sim_torch_alloc(size_t bytes, int device)
{
    if (device < 0 || device >= MAX_DEVICES)
        return NULL;
    size_t rounded = bytes < UNIT ? UNIT : (bytes + UNIT - 1) / UNIT * UNIT;
    pthread_mutex_lock(&lock);
    void *ptr = alloc_locked(rounded, device);
    pthread_mutex_unlock(&lock);
    return ptr;
}

/* Joins `right` to `left`; both are free and neither is in a list. */
static struct block *join(struct block *left, struct block *right)
{
    left->bytes += right->bytes;
    left->after = right->after;
    if (left->after)
        left->after->before = left;
    block_drop(right);
    return left;
}

static void free_locked(struct block *block)
{
    int device = block->device;
    block->live = false;
    allocated[device] -= block->bytes;
    report_usage(block->addr, -(int64_t)block->bytes, allocated[device], reserved[device],
                 device_word(device));
    if (block->after && !block->after->live) {
        list_remove(block->after);
        block = join(block, block->after);
    }
    if (block->before && !block->before->live) {
        list_remove(block->before);
        block = join(block->before, block);
    }
    list_add(block);
}

EXPORT void sim_torch_free(void *ptr)
{
    pthread_mutex_lock(&lock);
    struct block *block = *bucket(ptr);
    while (block && block->addr != ptr)
        block = block->next;
    if (block && block->live)
        free_locked(block);
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_torch_empty_cache(void)
{
    pthread_mutex_lock(&lock);
    for (int device = 0; device < MAX_DEVICES; device++)
        give_back_segments(device);
    pthread_mutex_unlock(&lock);
}

static size_t read_total(const size_t totals[MAX_DEVICES], int device)
{
    pthread_mutex_lock(&lock);
    size_t total = device >= 0 && device < MAX_DEVICES ? totals[device] : 0;
    pthread_mutex_unlock(&lock);
    return total;
}

EXPORT size_t sim_torch_allocated(int device)
{
    return read_total(allocated, device);
}

EXPORT size_t sim_torch_reserved(int device)
{
    return read_total(reserved, device);
}

EXPORT size_t sim_torch_peak(int device)
{
    return read_total(peak, device);
}
