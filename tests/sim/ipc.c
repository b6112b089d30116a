/* Blocks of cuMemAlloc that another process opens by 64 bytes. The exporter is charged, who opens
 * it is not. */
#include "opened.h"

#include <string.h>
#include <unistd.h>

/* What this process has opened: once more is the same address once more. */
#define MAX_OPEN 256
static struct {
    struct shared_block what;
    struct object *object;
    unsigned serial; /* of the context that it was opened in */
    unsigned times;
} opened[MAX_OPEN];

static CUresult get(CUipcMemHandle *out, CUdeviceptr addr)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    struct heap *heap = heap_of(addr);
    if (!out || !heap || heap->pool) /* blocks of pools have a way of their own */
        return CUDA_ERROR_INVALID_VALUE;
    struct shared_block block = {.kind = IPC_BLOCK, .pid = getpid(), .gpu = heap->gpu};
    int export = heap_share(addr, &block.part);
    if (export < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    block.export_id = export_at(export)->id;
    memset(out, 0, sizeof *out);
    memcpy(out, &block, sizeof block);
    return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr addr)
{
    WITH_DRIVER(get(handle, addr));
}

static bool is_open(int slot)
{
    return opened[slot].times && object_of(OBJECT_OPENED, opened[slot].object) &&
           opened[slot].object->ctx->serial == opened[slot].serial;
}

static CUresult open_handle(CUdeviceptr *out, const CUipcMemHandle *in)
{
    CUcontext ctx;
    struct shared_block block;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    memcpy(&block, in, sizeof block);
    if (!out || block.kind != IPC_BLOCK)
        return CUDA_ERROR_INVALID_VALUE;
    if (block.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT; /* nobody opens what is their own */
    int free_slot = -1;
    for (int i = 0; i < MAX_OPEN; i++) {
        if (!is_open(i)) {
            free_slot = i;
        } else if (!memcmp(&opened[i].what, &block, sizeof block)) {
            opened[i].times++;
            *out = opened[i].object->addr;
            return CUDA_SUCCESS;
        }
    }
    struct object *object = free_slot < 0 ? NULL : opened_new(ctx, &block);
    if (!object)
        return free_slot < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
    opened[free_slot].what = block;
    opened[free_slot].object = object;
    opened[free_slot].serial = ctx->serial;
    opened[free_slot].times = 1;
    *out = object->addr;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *addr, CUipcMemHandle handle, unsigned int flags)
{
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(open_handle(addr, &handle));
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *addr, CUipcMemHandle handle, unsigned int flags)
{
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(open_handle(addr, &handle));
}

static CUresult close_handle(CUdeviceptr addr)
{
    for (int i = 0; i < MAX_OPEN; i++)
        if (is_open(i) && opened[i].object->addr == addr) {
            if (--opened[i].times == 0)
                object_free(opened[i].object);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr addr)
{
    WITH_DRIVER(close_handle(addr));
}
