/* Blocks that another process opens by 64 bytes. The exporter is charged, who opens it is not. */
#include "driver.h"

#include <string.h>
#include <unistd.h>

struct handle {
    char magic[8];
    int32_t pid;
    int32_t gpu;
    uint64_t bytes;
    CUdeviceptr addr;
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "a handle has 64 bytes");

#define MAGIC "SIMIPC1"
#define MAX_OPEN 256

/* What this process has opened: once more is the same address once more. */
static struct opened {
    struct handle what;
    CUdeviceptr at;
    unsigned times;
} opened[MAX_OPEN];

static CUresult get(CUipcMemHandle *out, CUdeviceptr addr)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    uint64_t bytes = heap_block_bytes(addr);
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    struct handle handle = {MAGIC, getpid(), ctx->gpu, bytes, addr};
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr addr)
{
    WITH_DRIVER(get(handle, addr));
}

static CUresult open_handle(CUdeviceptr *out, const CUipcMemHandle *in)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    struct handle handle;
    memcpy(&handle, in, sizeof handle);
    /* A process can't open its own. */
    if (!out || memcmp(handle.magic, MAGIC, sizeof handle.magic) || handle.pid == getpid())
        return CUDA_ERROR_INVALID_VALUE;
    struct opened *slot = NULL;
    for (int i = 0; i < MAX_OPEN; i++) {
        if (opened[i].times && !memcmp(&opened[i].what, &handle, sizeof handle)) {
            slot = &opened[i];
            break;
        }
        if (!opened[i].times && !slot)
            slot = &opened[i];
    }
    if (!slot)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!slot->times)
        *slot = (struct opened){handle, arena_take(round_up(handle.bytes, GRANULE)), 0};
    slot->times++;
    *out = slot->at;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *addr, CUipcMemHandle handle, unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(open_handle(addr, &handle));
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *addr, CUipcMemHandle handle, unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(open_handle(addr, &handle));
}

static CUresult close_handle(CUdeviceptr addr)
{
    for (int i = 0; i < MAX_OPEN; i++)
        if (opened[i].times && opened[i].at == addr) {
            if (--opened[i].times == 0)
                arena_give(addr, round_up(opened[i].what.bytes, GRANULE));
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr addr)
{
    WITH_DRIVER(close_handle(addr));
}
