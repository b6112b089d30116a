/* What UCX's CUDA hooks are linked to, beside the functions that they patch. */
#include "driver.h"

static CUresult range(CUdeviceptr *base, size_t *size, CUdeviceptr addr)
{
    CUdeviceptr found;
    uint64_t bytes = heap_find(addr, &found);
    if (!bytes)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = found;
    if (size)
        *size = bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr addr)
{
    WITH_DRIVER(range(base, size, addr));
}
