/* The simulated libnvidia-ml: what NVML tells about the shared state.
 *
 * SIM_NVML_NO_PROCESSES=1: the memory of processes is "not available", as under MPS, in virtual
 * machines or without permission. SIM_NVML_SLOW_MS: what each call costs, as when the driver's
 * lock is taken. */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

#include "state.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct nvmlDevice_st {
    int gpu;
};

static struct nvmlDevice_st devices[SIM_MAX_GPUS];
static struct sim_state *state;
static _Atomic int initialised;

static nvmlReturn_t begin(void)
{
    sim_sleep_ms(sim_env("SIM_NVML_SLOW_MS", 0));
    return atomic_load(&initialised) ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

static nvmlReturn_t begin_with(nvmlDevice_t device, const void *out)
{
    nvmlReturn_t rc = begin();
    if (rc != NVML_SUCCESS)
        return rc;
    bool is_device = device >= devices && device < devices + state->gpus;
    return is_device && out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t put_text(char *out, unsigned room, const char *text)
{
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

static nvmlReturn_t initialise(void)
{
    state = sim_state_open();
    if (!state)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    for (int gpu = 0; gpu < SIM_MAX_GPUS; gpu++)
        devices[gpu].gpu = gpu;
    atomic_fetch_add(&initialised, 1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return initialise();
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialise();
}

nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t rc = begin();
    if (rc == NVML_SUCCESS)
        atomic_fetch_sub(&initialised, 1);
    return rc;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    default:
        return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    nvmlReturn_t rc = begin();
    return rc == NVML_SUCCESS ? put_text(version, length, SIM_DRIVER_VERSION) : rc;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    nvmlReturn_t rc = begin();
    return rc == NVML_SUCCESS ? put_text(version, length, "12." SIM_DRIVER_VERSION) : rc;
}

static nvmlReturn_t cuda_version(int *version)
{
    nvmlReturn_t rc = begin();
    if (rc == NVML_SUCCESS)
        *version = SIM_CUDA_VERSION;
    return rc;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return cuda_version(version);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return cuda_version(version);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t rc = begin();
    if (rc == NVML_SUCCESS)
        *count = state->gpus;
    return rc;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t rc = begin();
    if (rc != NVML_SUCCESS)
        return rc;
    if (index >= state->gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &devices[index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t rc = begin();
    char text[41];
    for (uint32_t gpu = 0; rc == NVML_SUCCESS && gpu < state->gpus; gpu++) {
        sim_gpu_uuid_text((int)gpu, text);
        if (!strcasecmp(uuid, text)) {
            *device = &devices[gpu];
            return NVML_SUCCESS;
        }
    }
    return rc == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : rc;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlReturn_t rc = begin();
    unsigned domain, bus;
    if (rc != NVML_SUCCESS)
        return rc;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t gpu = 0; gpu < state->gpus; gpu++)
        if (domain == 0 && bus == sim_gpu_bus((int)gpu)) {
            *device = &devices[gpu];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    nvmlReturn_t rc = begin_with(device, index);
    if (rc == NVML_SUCCESS)
        *index = (unsigned)device->gpu;
    return rc;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    nvmlReturn_t rc = begin_with(device, minor);
    if (rc == NVML_SUCCESS)
        *minor = (unsigned)device->gpu;
    return rc;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    nvmlReturn_t rc = begin_with(device, name);
    return rc == NVML_SUCCESS ? put_text(name, length, SIM_GPU_NAME) : rc;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    nvmlReturn_t rc = begin_with(device, uuid);
    char text[41];
    if (rc != NVML_SUCCESS)
        return rc;
    sim_gpu_uuid_text(device->gpu, text);
    return put_text(uuid, length, text);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    nvmlReturn_t rc = begin_with(device, pci);
    if (rc != NVML_SUCCESS)
        return rc;
    unsigned bus = sim_gpu_bus(device->gpu);
    *pci = (nvmlPciInfo_t){.bus = bus, .pciDeviceId = 0x233510de, .pciSubSystemId = 0x18be10de};
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:00.0", 0u, bus);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:00.0", 0u, bus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    nvmlReturn_t rc = begin_with(device, major);
    if (rc == NVML_SUCCESS && minor) {
        *major = 9;
        *minor = 0;
    }
    return rc;
}

static uint64_t used_bytes(int gpu)
{
    sim_lock();
    sim_reclaim();
    uint64_t used = state->used[gpu];
    sim_unlock();
    return used;
}

/* v1 counts what the driver keeps for itself as used, v2 tells it apart. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlReturn_t rc = begin_with(device, memory);
    if (rc != NVML_SUCCESS)
        return rc;
    uint64_t used = used_bytes(device->gpu);
    memory->total = state->capacity + state->reserved;
    memory->free = state->capacity - used;
    memory->used = used + state->reserved;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t rc = begin_with(device, memory);
    if (rc != NVML_SUCCESS)
        return rc;
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    uint64_t used = used_bytes(device->gpu);
    memory->total = state->capacity + state->reserved;
    memory->reserved = state->reserved;
    memory->free = state->capacity - used;
    memory->used = used;
    return NVML_SUCCESS;
}

/* The processes that have a context or memory on the GPU. */
static unsigned list_processes(int gpu, nvmlProcessInfo_t found[SIM_MAX_OWNERS])
{
    bool hidden = sim_env("SIM_NVML_NO_PROCESSES", 0) != 0;
    unsigned count = 0;
    sim_lock();
    sim_reclaim();
    for (int slot = 0; slot < SIM_MAX_OWNERS; slot++) {
        const struct sim_owner *owner = &state->owners[slot];
        if (!owner->who.pid || (!owner->contexts[gpu] && !owner->charged[gpu]))
            continue;
        found[count++] = (nvmlProcessInfo_t){
            .pid = (unsigned)owner->who.pid,
            .usedGpuMemory =
                hidden ? (unsigned long long)NVML_VALUE_NOT_AVAILABLE : owner->charged[gpu],
            .gpuInstanceId = 0xffffffffu,
            .computeInstanceId = 0xffffffffu,
        };
    }
    sim_unlock();
    return count;
}

/* NVML's usual exchange: too little room is an error that tells how much is needed. */
static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out)
{
    nvmlReturn_t rc = begin_with(device, count);
    if (rc != NVML_SUCCESS)
        return rc;
    nvmlProcessInfo_t found[SIM_MAX_OWNERS];
    unsigned room = *count;
    *count = list_processes(device->gpu, found);
    if (*count > room || (*count && !out))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (*count)
        memcpy(out, found, *count * sizeof *out);
    return NVML_SUCCESS;
}

/* No process draws, and none comes through MPS. */
static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned *count)
{
    nvmlReturn_t rc = begin_with(device, count);
    if (rc == NVML_SUCCESS)
        *count = 0;
    return rc;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count,
                                                  nvmlProcessInfo_v1_t *infos)
{
    nvmlProcessInfo_t found[SIM_MAX_OWNERS];
    unsigned room = infos && count ? *count : 0;
    if (count)
        *count = SIM_MAX_OWNERS;
    nvmlReturn_t rc = processes(device, count, found);
    if (rc == NVML_SUCCESS && *count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; rc == NVML_SUCCESS && i < *count; i++)
        infos[i] = (nvmlProcessInfo_v1_t){found[i].pid, found[i].usedGpuMemory};
    return rc;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_v2_t *infos)
{
    return processes(device, count, infos);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos)
{
    return processes(device, count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_v2_t *infos)
{
    (void)infos;
    return no_processes(device, count);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos)
{
    (void)infos;
    return no_processes(device, count);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *infos)
{
    (void)infos;
    return no_processes(device, count);
}

/* A GPU that somebody uses is busy and warm; the figures are fixed so that tests can tell them. */
static bool is_busy(int gpu)
{
    nvmlProcessInfo_t found[SIM_MAX_OWNERS];
    return list_processes(gpu, found) > 0;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    nvmlReturn_t rc = begin_with(device, utilization);
    if (rc == NVML_SUCCESS)
        *utilization = is_busy(device->gpu) ? (nvmlUtilization_t){.gpu = 87, .memory = 41}
                                            : (nvmlUtilization_t){.gpu = 0, .memory = 0};
    return rc;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                      unsigned int *degrees)
{
    nvmlReturn_t rc = begin_with(device, degrees);
    if (rc != NVML_SUCCESS)
        return rc;
    if (sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    *degrees = is_busy(device->gpu) ? 63 : 34;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    nvmlReturn_t rc = begin_with(device, milliwatts);
    if (rc == NVML_SUCCESS)
        *milliwatts = is_busy(device->gpu) ? 412000 : 76000;
    return rc;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                  unsigned int *pending)
{
    nvmlReturn_t rc = begin_with(device, current);
    return rc == NVML_SUCCESS && pending ? NVML_ERROR_NOT_SUPPORTED : rc;
}
