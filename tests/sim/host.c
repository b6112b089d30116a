/* Memory in host pages: pinned, registered and managed. It is charged to no GPU; pages of managed
 * memory are the host's as long as nothing says that they moved. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <sys/mman.h>

#define BUCKETS 1024
#define PAGE 4096ull

struct host_block {
    void *addr;
    uint64_t bytes;
    enum host_kind kind;
    CUcontext ctx;
    struct host_block *next;
};

static struct host_block *blocks[BUCKETS];

static struct host_block **bucket(void *addr)
{
    return &blocks[((uint64_t)addr / PAGE * 0x9e3779b97f4a7c15ull) >> 54];
}

static void *map_pages(uint64_t bytes)
{
    void *addr = mmap(NULL, round_up(bytes, PAGE), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return addr == MAP_FAILED ? NULL : addr;
}

/* For HOST_REGISTERED `*addr` is the program's own memory; else it is set. */
CUresult host_new(enum host_kind kind, CUcontext ctx, uint64_t bytes, void **addr)
{
    if (bytes > 1ull << 46)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *pages = kind == HOST_REGISTERED ? *addr : map_pages(bytes);
    if (!pages)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct host_block *block = malloc(sizeof *block), **head = bucket(pages);
    *block = (struct host_block){pages, bytes, kind, ctx, *head};
    *head = block;
    *addr = pages;
    return CUDA_SUCCESS;
}

static void drop(struct host_block **at)
{
    struct host_block *block = *at;
    *at = block->next;
    if (block->kind != HOST_REGISTERED)
        munmap(block->addr, round_up(block->bytes, PAGE));
    free(block);
}

static struct host_block **find(enum host_kind kind, void *addr)
{
    struct host_block **at = bucket(addr);
    while (*at && ((*at)->addr != addr || (*at)->kind != kind))
        at = &(*at)->next;
    return *at ? at : NULL;
}

bool host_free(enum host_kind kind, void *addr)
{
    struct host_block **at = find(kind, addr);
    if (at)
        drop(at);
    return at != NULL;
}

void host_free_all(CUcontext ctx)
{
    for (int i = 0; i < BUCKETS; i++)
        for (struct host_block **at = &blocks[i]; *at;)
            if ((*at)->ctx == ctx)
                drop(at);
            else
                at = &(*at)->next;
}

static CUresult pinned(void **out, uint64_t bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    void *addr;
    rc = host_new(HOST_PINNED, ctx, bytes, &addr);
    if (rc == CUDA_SUCCESS)
        *out = addr;
    return rc;
}

CUresult cuMemHostAlloc(void **ptr, size_t bytes, unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(pinned(ptr, bytes));
}

CUresult cuMemAllocHost_v2(void **ptr, size_t bytes)
{
    WITH_DRIVER(pinned(ptr, bytes));
}

CUresult cuMemAllocHost(void **ptr, unsigned int bytes)
{
    WITH_DRIVER(pinned(ptr, bytes));
}

CUresult cuMemFreeHost(void *ptr)
{
    WITH_DRIVER(host_free(HOST_PINNED, ptr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static CUresult register_block(void *ptr, uint64_t bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!ptr || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (find(HOST_REGISTERED, ptr))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return host_new(HOST_REGISTERED, ctx, bytes, &ptr);
}

CUresult cuMemHostRegister_v2(void *ptr, size_t bytes, unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(register_block(ptr, bytes));
}

CUresult cuMemHostRegister(void *ptr, size_t bytes, unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(register_block(ptr, bytes));
}

CUresult cuMemHostUnregister(void *ptr)
{
    WITH_DRIVER(host_free(HOST_REGISTERED, ptr) ? CUDA_SUCCESS
                                                : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}
