/* every_row: contexts of every kind, their limits, checkpoints, and CUDA's first version. */
#include "every_row.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

/* Creates one with each function; leaves the primary one current, with two retains. */
CUcontext contexts(void)
{
    CUcontext ctx, popped, primary = NULL;
    CUuuid uuid;
    char bus_id[16] = "";
    CUdevice dev;
    silent(cuInit, (0));
    silent(cuDeviceGetUuid, (&uuid, 0));
    silent(cuDeviceGetUuid_v2, (&uuid, 0));
    silent(cuDeviceGetPCIBusId, (bus_id, sizeof bus_id, 0));
    silent(cuDeviceGetByPCIBusId, (&dev, bus_id));
    told(cuCtxCreate_v2, (&ctx, 0, 0), "ctx", "device", ctx, UNKNOWN);
    silent(cuCtxPopCurrent_v2, (&popped));
    silent(cuCtxPushCurrent_v2, (ctx));
    told(cuCtxDestroy_v2, (ctx), "ctx", "device", ctx, UNKNOWN);
    if (told(cuCtxCreate_v3, (&ctx, NULL, 0, 0, 0), "ctx", "device", ctx, UNKNOWN))
        told(cuCtxDestroy_v2, (ctx), "ctx", "device", ctx, UNKNOWN);
    if (told(cuCtxCreate_v4, (&ctx, NULL, 0, 0), "ctx", "device", ctx, UNKNOWN))
        told(cuCtxDestroy_v2, (ctx), "ctx", "device", ctx, UNKNOWN);
    for (int i = 0; i < 2; i++)
        told(cuDevicePrimaryCtxRetain, (&primary, 0), "ctx", "device", primary, UNKNOWN);
    told(cuDevicePrimaryCtxRelease, (0), "ctx", "device", primary, UNKNOWN);
    silent(cuCtxSetCurrent, (primary));
    return primary;
}

static void green(void)
{
    CUdevResource resource;
    CUdevResourceDesc desc;
    CUgreenCtx ctx;
    CUcontext own;
    if (helper(cuDeviceGetDevResource, (0, &resource, CU_DEV_RESOURCE_TYPE_SM)) != CUDA_SUCCESS ||
        helper(cuDevResourceGenerateDesc, (&desc, &resource, 1)) != CUDA_SUCCESS) {
        skipped("cuGreenCtxCreate", "the GPU can't be divided");
        skipped("cuCtxFromGreenCtx", "no green context");
        skipped("cuGreenCtxDestroy", "no green context");
        return;
    }
    if (!told(cuGreenCtxCreate, (&ctx, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM), "ctx", "device", ctx,
              UNKNOWN))
        return;
    told(cuCtxFromGreenCtx, (&own, ctx), "ctx", "device", own, UNKNOWN);
    told(cuGreenCtxDestroy, (ctx), "ctx", "device", ctx, UNKNOWN);
}

void other_contexts(void)
{
    CUcontext ctx, same;
    if (told(cuCtxCreate, (&ctx, 0, 0), "ctx", "device", ctx, UNKNOWN)) {
        silent(cuCtxPopCurrent, (&same));
        silent(cuCtxPushCurrent, (ctx));
        if (silent(cuCtxAttach, (&same, 0)))
            told(cuCtxDetach, (ctx), "ctx", "device", ctx, UNKNOWN);
        told(cuCtxDestroy, (ctx), "ctx", "device", ctx, UNKNOWN);
    }
    green();
    told(cuCtxSetLimit, (CU_LIMIT_MALLOC_HEAP_SIZE, 24 * MIB), "ctx", "device",
         CU_LIMIT_MALLOC_HEAP_SIZE, 24 * MIB);
}

static void first_arrays(void)
{
    CUarray array;
    CUDA_ARRAY_DESCRIPTOR_v1 flat = {640, 480, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR_v1 deep = {64, 32, 16, CU_AD_FORMAT_HALF, 2, 0};
    uint64_t flat_bytes = 640 * 480 * 4 * 4, deep_bytes = 64 * 32 * 16 * 2 * 2;
    if (gave(cuArrayCreate, (&array, &flat), "alloc", "device", array, flat_bytes))
        took(cuArrayDestroy, (array), "device", array, flat_bytes);
    if (gave(cuArray3DCreate, (&array, &deep), "alloc", "device", array, deep_bytes))
        took(cuArrayDestroy, (array), "device", array, deep_bytes);
}

void first_versions(void)
{
    CUdeviceptr_v1 low;
    unsigned pitch = 0;
    void *pinned;
    char *own = aligned_alloc(4096, MIB);
    if (gave(cuMemAlloc, (&low, 3 * MIB), "alloc", "device", low, 3 * MIB))
        took(cuMemFree, (low), "device", low, 3 * MIB);
    if (gave(cuMemAllocPitch, (&low, &pitch, 1000, 30, 4), "alloc", "device", low, pitch * 30ull))
        took(cuMemFree, (low), "device", low, pitch * 30ull);
    if (gave(cuMemAllocHost, (&pinned, MIB), "alloc", "host", pinned, MIB))
        took(cuMemFreeHost, (pinned), "host", pinned, MIB);
    if (gave(cuMemHostRegister, (own, MIB, 0), "alloc", "host", own, MIB))
        took(cuMemHostUnregister, (own), "host", own, MIB);
    first_arrays();
    free(own);
}

/* Waits for the other side's word, 20 seconds at most. */
static int hears(int peer)
{
    char byte;
    struct pollfd ready = {.fd = peer, .events = POLLIN};
    return poll(&ready, 1, 20000) == 1 && read(peer, &byte, 1) == 1;
}

static void move_out_and_back(pid_t child)
{
    if (helper(cuCheckpointProcessLock, (child, NULL)) != CUDA_SUCCESS) {
        skipped("cuCheckpointProcessCheckpoint", "the process can't be locked");
        skipped("cuCheckpointProcessRestore", "the process can't be locked");
        return;
    }
    if (told(cuCheckpointProcessCheckpoint, (child, NULL), "ctx", "device", child, UNKNOWN))
        told(cuCheckpointProcessRestore, (child, NULL), "ctx", "device", child, UNKNOWN);
    helper(cuCheckpointProcessUnlock, (child, NULL));
}

/* A process of its own is moved out of the GPU and back; nobody can do that to themselves. */
void checkpoints(const char *self)
{
    int pair[2];
    char number[16];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    snprintf(number, sizeof number, "%d", pair[1]);
    pid_t child = fork();
    if (child == 0) {
        execl(self, "every_row", "checkpointed", number, (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    EXPECT(hears(pair[0]));
    move_out_and_back(child);
    EXPECT(write(pair[0], "x", 1) == 1);
    if (!hears(pair[0]))
        kill(child, SIGKILL); /* it was not brought back */
    EXPECT(waitpid(child, NULL, 0) == child);
    close(pair[0]);
}

int checkpointed(char **args)
{
    int peer = atoi(args[0]);
    CUcontext ctx;
    CUdeviceptr p;
    sleep(2); /* in which an agent that follows it puts its probes in */
    silent(cuInit, (0));
    told(cuDevicePrimaryCtxRetain, (&ctx, 0), "ctx", "device", ctx, UNKNOWN);
    silent(cuCtxSetCurrent, (ctx));
    gave(cuMemAlloc_v2, (&p, 8 * MIB), "alloc", "device", p, 8 * MIB);
    if (write(peer, "x", 1) != 1 || !hears(peer))
        return 3;
    took(cuMemFree_v2, (p), "device", p, 8 * MIB);
    return write(peer, "x", 1) == 1 ? 0 : 3;
}
