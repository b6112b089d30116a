/* Prints what NVML says, one line for each GPU, for each process on it (of MPS, too), and for each
 * instance of a GPU that is divided. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include "truth.h"

#include <nvml.h>

#define MOST 512

static void show(unsigned index)
{
    nvmlDevice_t device;
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    nvmlProcessInfo_t processes[MOST];
    unsigned count = MOST;
    char uuid[NVML_DEVICE_UUID_BUFFER_SIZE];
    MUST(nvmlDeviceGetHandleByIndex_v2(index, &device));
    MUST(nvmlDeviceGetUUID(device, uuid, sizeof uuid));
    MUST(nvmlDeviceGetMemoryInfo_v2(device, &memory));
    MUST(nvmlDeviceGetComputeRunningProcesses_v3(device, &count, processes));
    printf("GPU index=%u uuid=%s total=%llu reserved=%llu used=%llu free=%llu\n", index, uuid,
           memory.total, memory.reserved, memory.used, memory.free);
    for (unsigned i = 0; i < count; i++)
        printf("PROCESS gpu=%u pid=%u used=%llu\n", index, processes[i].pid,
               processes[i].usedGpuMemory);
}

static void show_mps(unsigned index)
{
    nvmlDevice_t device;
    nvmlProcessInfo_t processes[MOST];
    unsigned count = MOST;
    MUST(nvmlDeviceGetHandleByIndex_v2(index, &device));
    MUST(nvmlDeviceGetMPSComputeRunningProcesses_v3(device, &count, processes));
    for (unsigned i = 0; i < count; i++)
        printf("MPS gpu=%u pid=%u used=%llu\n", index, processes[i].pid,
               processes[i].usedGpuMemory);
}

static void show_instances(unsigned index)
{
    nvmlDevice_t device, instance;
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    MUST(nvmlDeviceGetHandleByIndex_v2(index, &device));
    for (unsigned i = 0; nvmlDeviceGetMigDeviceHandleByIndex(device, i, &instance) == 0; i++) {
        MUST(nvmlDeviceGetUUID(instance, uuid, sizeof uuid));
        MUST(nvmlDeviceGetMemoryInfo_v2(instance, &memory));
        printf("INSTANCE gpu=%u index=%u uuid=%s total=%llu used=%llu\n", index, i, uuid,
               memory.total, memory.used);
    }
}

int main(void)
{
    unsigned count;
    MUST(nvmlInit_v2());
    MUST(nvmlDeviceGetCount_v2(&count));
    for (unsigned i = 0; i < count; i++) {
        show(i);
        show_mps(i);
        show_instances(i);
    }
    MUST(nvmlShutdown());
    return 0;
}
