/* The simulated libnvidia-ml: the memory of GPUs and of the processes on them.
 *
 * SIM_NVML_NO_PROCESSES=1: the memory of processes is "not available", as under MPS, in virtual
 * machines or without permission.
 * SIM_NVML_MPS=PID: every process comes through the MPS server PID, which the list of compute
 * processes names in their place.
 * SIM_NVML_VANISHED=PID:MIB: GPU 0 lists a process that need not exist, with so much memory. */
#include "nvml_sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST (SIM_MAX_OWNERS + 1)

static bool vanished(nvmlDevice_t device, unsigned *pid, uint64_t *bytes)
{
    const char *text = getenv("SIM_NVML_VANISHED");
    unsigned long long mib;
    if (!text || device->card != 0 || device->gpu > 0 || sscanf(text, "%u:%llu", pid, &mib) != 2)
        return false;
    *bytes = mib * SIM_MIB;
    return true;
}

struct figures {
    uint64_t capacity, reserved, used;
};

static struct figures figures_of(nvmlDevice_t device)
{
    struct sim_state *state = nvml_state();
    struct figures sum = {0, device->gpu < 0 ? state->reserved : 0, 0};
    unsigned pid;
    uint64_t bytes;
    if (vanished(device, &pid, &bytes))
        sum.used = bytes;
    sim_lock();
    sim_reclaim();
    for (int gpu = 0; gpu < (int)state->gpus; gpu++)
        if (nvml_has(device, gpu)) {
            sum.capacity += state->capacity;
            sum.used += state->used[gpu];
        }
    sim_unlock();
    return sum;
}

/* v1 counts what the driver keeps for itself as used, v2 tells it apart. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlReturn_t rc = nvml_begin_with(device, memory);
    if (rc != NVML_SUCCESS)
        return rc;
    struct figures figures = figures_of(device);
    memory->total = figures.capacity + figures.reserved;
    memory->free = figures.capacity - figures.used;
    memory->used = figures.used + figures.reserved;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t rc = nvml_begin_with(device, memory);
    if (rc != NVML_SUCCESS)
        return rc;
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    struct figures figures = figures_of(device);
    memory->total = figures.capacity + figures.reserved;
    memory->reserved = figures.reserved;
    memory->free = figures.capacity - figures.used;
    memory->used = figures.used;
    return NVML_SUCCESS;
}

static nvmlProcessInfo_t entry(unsigned pid, uint64_t bytes, int gpu)
{
    uint32_t mig = nvml_state()->mig;
    bool hidden = sim_env("SIM_NVML_NO_PROCESSES", 0) != 0;
    return (nvmlProcessInfo_t){
        .pid = pid,
        .usedGpuMemory = hidden ? (unsigned long long)NVML_VALUE_NOT_AVAILABLE : bytes,
        .gpuInstanceId = mig ? (unsigned)gpu % mig : 0xffffffffu,
        .computeInstanceId = mig ? 0 : 0xffffffffu,
    };
}

/* The processes that have a context or memory on the device. */
static unsigned list_processes(nvmlDevice_t device, nvmlProcessInfo_t found[MOST])
{
    const struct sim_state *state = nvml_state();
    unsigned count = 0;
    sim_lock();
    sim_reclaim();
    for (int slot = 0; slot < SIM_MAX_OWNERS; slot++) {
        const struct sim_owner *owner = &state->owners[slot];
        for (int gpu = 0; owner->who.pid && gpu < (int)state->gpus; gpu++)
            if (nvml_has(device, gpu) && (owner->contexts[gpu] || owner->charged[gpu]))
                found[count++] = entry((unsigned)owner->who.pid, owner->charged[gpu], gpu);
    }
    sim_unlock();
    return count;
}

bool nvml_is_busy(nvmlDevice_t device)
{
    nvmlProcessInfo_t found[MOST];
    return list_processes(device, found) > 0;
}

/* Those that use the GPU of their own, or the server that has them all. */
static unsigned list_compute(nvmlDevice_t device, nvmlProcessInfo_t found[MOST])
{
    unsigned server = (unsigned)sim_env("SIM_NVML_MPS", 0), pid;
    unsigned count = list_processes(device, found);
    uint64_t bytes = 0;
    if (server && count) {
        for (unsigned i = 0; i < count; i++)
            bytes += found[i].usedGpuMemory;
        found[0] = entry(server, bytes, 0);
        count = 1;
    }
    if (vanished(device, &pid, &bytes))
        found[count++] = entry(pid, bytes, 0);
    return count;
}

static unsigned list_mps(nvmlDevice_t device, nvmlProcessInfo_t found[MOST])
{
    return sim_env("SIM_NVML_MPS", 0) ? list_processes(device, found) : 0;
}

/* No process draws. */
static unsigned list_graphics(nvmlDevice_t device, nvmlProcessInfo_t found[MOST])
{
    (void)device, (void)found;
    return 0;
}

/* NVML's usual exchange: too little room is an error that tells how much is needed. */
static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out,
                              unsigned (*list)(nvmlDevice_t, nvmlProcessInfo_t[MOST]))
{
    nvmlReturn_t rc = nvml_begin_with(device, count);
    if (rc != NVML_SUCCESS)
        return rc;
    nvmlProcessInfo_t found[MOST];
    unsigned room = *count;
    *count = list(device, found);
    if (*count > room || (*count && !out))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (*count)
        memcpy(out, found, *count * sizeof *out);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count,
                                                  nvmlProcessInfo_v1_t *infos)
{
    nvmlProcessInfo_t found[MOST];
    unsigned room = infos && count ? *count : 0;
    if (count)
        *count = MOST;
    nvmlReturn_t rc = processes(device, count, found, list_compute);
    if (rc == NVML_SUCCESS && *count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; rc == NVML_SUCCESS && i < *count; i++)
        infos[i] = (nvmlProcessInfo_v1_t){found[i].pid, found[i].usedGpuMemory};
    return rc;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_v2_t *infos)
{
    return processes(device, count, infos, list_compute);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos)
{
    return processes(device, count, infos, list_compute);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_v2_t *infos)
{
    return processes(device, count, infos, list_graphics);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos)
{
    return processes(device, count, infos, list_graphics);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *infos)
{
    return processes(device, count, infos, list_mps);
}
