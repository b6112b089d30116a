/* The simulated libnvidia-ml: instances of GPUs (MIG). SIM_MIG=N divides every GPU into N equal
 * ones when the state is made. */
#include "nvml_sim.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                  unsigned int *pending)
{
    nvmlReturn_t rc = nvml_begin_with(device, current);
    if (rc != NVML_SUCCESS)
        return rc;
    if (!nvml_state()->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    if (device->gpu >= 0 || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = *pending = NVML_DEVICE_MIG_ENABLE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    nvmlReturn_t rc = nvml_begin_with(device, count);
    if (rc == NVML_SUCCESS)
        *count = nvml_state()->mig ? 7 : 0;
    return rc;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                 nvmlDevice_t *instance)
{
    nvmlReturn_t rc = nvml_begin_with(device, instance);
    unsigned mig = rc == NVML_SUCCESS ? nvml_state()->mig : 0;
    if (rc != NVML_SUCCESS)
        return rc;
    if (!mig)
        return NVML_ERROR_NOT_SUPPORTED;
    if (index >= mig)
        return index < 7 ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
    *instance = nvml_instance((unsigned)device->card * mig + index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance,
                                                          nvmlDevice_t *device)
{
    nvmlReturn_t rc = nvml_begin_with(instance, device);
    if (rc == NVML_SUCCESS && instance->gpu < 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (rc == NVML_SUCCESS)
        *device = nvml_card((unsigned)instance->card);
    return rc;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_instance)
{
    nvmlReturn_t rc = nvml_begin_with(device, is_instance);
    if (rc == NVML_SUCCESS)
        *is_instance = device->gpu >= 0;
    return rc;
}

/* Success for an instance only: a whole GPU has no such number. */
static nvmlReturn_t begin_with_instance(nvmlDevice_t device, unsigned int *id)
{
    nvmlReturn_t rc = nvml_begin_with(device, id);
    return rc == NVML_SUCCESS && device->gpu < 0 ? NVML_ERROR_NOT_FOUND : rc;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    nvmlReturn_t rc = begin_with_instance(device, id);
    if (rc == NVML_SUCCESS)
        *id = (unsigned)device->gpu % nvml_state()->mig;
    return rc;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    nvmlReturn_t rc = begin_with_instance(device, id);
    if (rc == NVML_SUCCESS)
        *id = 0;
    return rc;
}
