/* Which pool a GPU's allocations come from: by device, and by location since CUDA 13. */
#include "driver.h"

static CUresult pool_of(CUmemoryPool *out, int gpu, CUmemoryPool (*which)(int gpu))
{
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = which(gpu);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice dev)
{
    WITH_DRIVER(pool_of(pool, driver_gpu(dev), pool_default_of));
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    WITH_DRIVER(pool_of(pool, driver_gpu(dev), pool_current_of));
}

static CUresult set_pool(CUmemoryPool pool, int gpu)
{
    return gpu < 0 ? CUDA_ERROR_INVALID_DEVICE : pool_make_current(pool, gpu);
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
    WITH_DRIVER(set_pool(pool, driver_gpu(dev)));
}

/* The simulated GPUs have pools of device memory only. */
static CUresult check_location(const CUmemLocation *location, CUmemAllocationType type)
{
    if (!location)
        return CUDA_ERROR_INVALID_VALUE;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED
               ? CUDA_SUCCESS
               : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult pool_at(CUmemoryPool *out, const CUmemLocation *location, CUmemAllocationType type,
                        CUmemoryPool (*which)(int gpu))
{
    CUresult rc = check_location(location, type);
    return rc == CUDA_SUCCESS ? pool_of(out, driver_gpu(location->id), which) : rc;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location,
                                CUmemAllocationType type)
{
    WITH_DRIVER(pool_at(pool, location, type, pool_default_of));
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    WITH_DRIVER(pool_at(pool, location, type, pool_current_of));
}

static CUresult set_pool_at(const CUmemLocation *location, CUmemAllocationType type,
                            CUmemoryPool pool)
{
    CUresult rc = check_location(location, type);
    return rc == CUDA_SUCCESS ? set_pool(pool, driver_gpu(location->id)) : rc;
}

CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    WITH_DRIVER(set_pool_at(location, type, pool));
}
