/* Functions of CUDA's first version: addresses and sizes of 32 bits, for which the GPU's lowest
 * addresses are kept. */
#include "driver.h"

#include <stdlib.h>

#define LOW_BASE 0x10000000u

static CUdeviceptr next_low = LOW_BASE;
static struct shelf given_back;

static void end(struct object *block)
{
    shelf_push(&given_back, block->charged, block->addr);
}

static CUresult alloc_low(CUdeviceptr_v1 *out, uint64_t bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    uint64_t whole = round_up(bytes, GRANULE), addr;
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    bool again = shelf_pop(&given_back, whole, &addr);
    bool fits = again || next_low + whole <= UINT32_MAX;
    struct object *block = fits ? object_new(OBJECT_LOW, ctx, ctx->gpu, whole) : NULL;
    if (!block) {
        if (again)
            shelf_push(&given_back, whole, addr);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->addr = again ? addr : next_low;
    block->end = end;
    if (!again)
        next_low += whole;
    *out = (CUdeviceptr_v1)block->addr;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr_v1 *addr, unsigned int bytes)
{
    WITH_DRIVER(alloc_low(addr, bytes));
}

static CUresult alloc_rows(CUdeviceptr_v1 *addr, unsigned *pitch, unsigned width, unsigned height,
                           unsigned element)
{
    if (!pitch || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t row = round_up(width, 512);
    CUresult rc = alloc_low(addr, row * height);
    if (rc == CUDA_SUCCESS)
        *pitch = (unsigned)row;
    return rc;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *addr, unsigned int *pitch, unsigned int width,
                         unsigned int height, unsigned int element)
{
    WITH_DRIVER(alloc_rows(addr, pitch, width, height, element));
}

bool low_free(CUdeviceptr addr)
{
    struct object *block = object_at(OBJECT_LOW, NULL, addr);
    if (block)
        object_free(block);
    return block != NULL;
}

static CUresult free_low(CUdeviceptr_v1 addr)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    return low_free(addr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree(CUdeviceptr_v1 addr)
{
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS || !addr)
        return rc;
    driver_lock();
    rc = free_low(addr);
    driver_unlock();
    driver_linger();
    return rc;
}
