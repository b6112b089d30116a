#define _GNU_SOURCE
#include "c10_expandable.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1ull << 20)
#define SPACE (16ull << 30) /* of addresses, for each segment */
#define MAX_DEVICES 16
#define MAX_HANDLES 8192

struct segment {
    CUdeviceptr base;
    size_t count;
    CUmemGenericAllocationHandle handles[MAX_HANDLES];
};

static struct segment segments[MAX_DEVICES][2];

bool expandable_wanted(void)
{
    const char *wanted = getenv("PYTORCH_CUDA_ALLOC_CONF");
    return wanted && strstr(wanted, "expandable_segments:True");
}

/* As PyTorch does, the driver's functions are looked up, not linked. */
#define DRIVER(name) ((__typeof__(&name))dlsym(dlopen("libcuda.so.1", RTLD_NOW), #name))

static size_t handle_bytes(bool small)
{
    return (small ? 2 : 20) * MIB;
}

static bool add(struct segment *segment, int device, size_t bytes)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}}};
    CUmemAccessDesc access = {.location = prop.location,
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle *handle = &segment->handles[segment->count];
    CUdeviceptr addr = segment->base + segment->count * bytes;
    if (segment->count == MAX_HANDLES || DRIVER(cuMemCreate)(handle, bytes, &prop, 0))
        return false;
    DRIVER(cuMemMap)(addr, bytes, 0, *handle, 0);
    DRIVER(cuMemSetAccess)(addr, bytes, &access, 1);
    segment->count++;
    return true;
}

static void take_last(struct segment *segment, size_t bytes)
{
    segment->count--;
    DRIVER(cuMemUnmap)(segment->base + segment->count * bytes, bytes);
    DRIVER(cuMemRelease)(segment->handles[segment->count]);
}

char *expandable_grow(int device, bool small, size_t bytes, size_t *added)
{
    struct segment *segment = &segments[device][small];
    size_t each = handle_bytes(small), before = segment->count;
    if (!segment->base && DRIVER(cuMemAddressReserve)(&segment->base, SPACE, 0, 0, 0))
        return NULL;
    while ((segment->count - before) * each < bytes)
        if (!add(segment, device, each)) {
            while (segment->count > before)
                take_last(segment, each);
            return NULL;
        }
    *added = (segment->count - before) * each;
    return (char *)segment->base + before * each;
}

size_t expandable_shrink(int device, bool small, size_t free_bytes)
{
    struct segment *segment = &segments[device][small];
    size_t each = handle_bytes(small), given = 0;
    for (; given + each <= free_bytes && segment->count; given += each)
        take_last(segment, each);
    return given;
}
