/* Questions about GPUs, and the words for results. */
#include "driver.h"

#include <stdio.h>
#include <string.h>

CUresult cuDeviceGetCount(int *count)
{
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS)
        return rc;
    int ordinals = 0;
    while (driver_gpu(ordinals) >= 0)
        ordinals++;
    *count = ordinals;
    return CUDA_SUCCESS;
}

/* CUDA_SUCCESS and the GPU, or why there is none. */
static CUresult find(CUdevice ordinal, int *gpu)
{
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS)
        return rc;
    *gpu = driver_gpu(ordinal);
    return *gpu < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    int gpu;
    CUresult rc = find(ordinal, &gpu);
    if (rc == CUDA_SUCCESS)
        *device = ordinal;
    return rc;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice dev)
{
    int gpu;
    CUresult rc = find(dev, &gpu);
    if (rc == CUDA_SUCCESS && len > 0)
        snprintf(name, (size_t)len, "%s", SIM_GPU_NAME);
    return rc;
}

/* The older function names the whole GPU, whatever part of it the process has. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
    int gpu;
    CUresult rc = find(dev, &gpu);
    if (rc == CUDA_SUCCESS)
        sim_card_uuid(sim_card(gpu), (unsigned char *)uuid->bytes);
    return rc;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
    int gpu;
    CUresult rc = find(dev, &gpu);
    if (rc == CUDA_SUCCESS)
        sim_gpu_uuid(gpu, (unsigned char *)uuid->bytes);
    return rc;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    int gpu;
    CUresult rc = find(dev, &gpu);
    if (rc == CUDA_SUCCESS)
        *bytes = driver_state()->capacity;
    return rc;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev)
{
    int gpu;
    CUresult rc = find(dev, &gpu);
    if (rc != CUDA_SUCCESS)
        return rc;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *value = (int)sim_gpu_bus(gpu);
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 132;
        break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = 1;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int len, CUdevice dev)
{
    int gpu;
    CUresult rc = find(dev, &gpu);
    if (rc == CUDA_SUCCESS && len > 0)
        snprintf(text, (size_t)len, "0000:%02X:00.0", sim_gpu_bus(gpu));
    return rc;
}

static CUresult by_bus_id(CUdevice *out, const char *text)
{
    unsigned domain, bus;
    /* With the domain or without it, as the real one takes both. */
    bool full = text && sscanf(text, "%x:%x:", &domain, &bus) == 2;
    if (!out || !text || (!full && sscanf(text, "%x:", &bus) != 1))
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdevice ordinal = 0; driver_gpu(ordinal) >= 0; ordinal++)
        if ((!full || domain == 0) && sim_gpu_bus(driver_gpu(ordinal)) == bus) {
            *out = ordinal;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    WITH_DRIVER(by_bus_id(device, text));
}

static const struct {
    CUresult result;
    const char *name, *text;
} results[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {CUDA_ERROR_UNSUPPORTED_LIMIT, "CUDA_ERROR_UNSUPPORTED_LIMIT",
     "limit is not supported on this architecture"},
};

static CUresult describe(CUresult error, const char **name, const char **text)
{
    *name = *text = NULL;
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].result == error) {
            *name = results[i].name;
            *text = results[i].text;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    const char *text;
    return describe(error, name, &text);
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    const char *name;
    return describe(error, &name, text);
}
