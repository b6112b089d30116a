/* Objects that several GPUs share: address space behind a handle that cuMemRelease ends. */
#include "driver.h"

static CUresult create(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *prop)
{
    if (!out || !prop || !prop->size || prop->size % GRANULE || prop->numDevices < 2)
        return CUDA_ERROR_INVALID_VALUE;
    *out = vmm_handle_without_memory(prop->size);
    return CUDA_SUCCESS;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *prop)
{
    WITH_DRIVER(create(out, prop));
}

static CUresult for_device(CUmemGenericAllocationHandle object, CUdevice dev)
{
    if (driver_gpu(dev) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    return vmm_known(object) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle object, CUdevice dev)
{
    WITH_DRIVER(for_device(object, dev));
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice dev, size_t offset,
                           size_t bytes)
{
    (void)offset, (void)bytes;
    WITH_DRIVER(for_device(object, dev));
}

static CUresult bind(CUmemGenericAllocationHandle object, bool is_memory)
{
    return vmm_known(object) && is_memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset,
                            CUmemGenericAllocationHandle memory, size_t memory_offset,
                            size_t bytes, unsigned long long flags)
{
    (void)offset, (void)memory_offset, (void)bytes, (void)flags;
    WITH_DRIVER(bind(object, vmm_known(memory)));
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr addr,
                             size_t bytes, unsigned long long flags)
{
    (void)offset, (void)bytes, (void)flags;
    WITH_DRIVER(bind(object, arena_granule(addr) != SIZE_MAX));
}
