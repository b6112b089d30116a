/* Prints what NVML says, one line for each GPU and for each process on it. */
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

int main(void)
{
    unsigned count;
    MUST(nvmlInit_v2());
    MUST(nvmlDeviceGetCount_v2(&count));
    for (unsigned i = 0; i < count; i++)
        show(i);
    MUST(nvmlShutdown());
    return 0;
}
