/* Green contexts (a part of a GPU), limits of contexts, and checkpoints of processes. */
#include "driver.h"

#include <stdlib.h>

static CUresult resource(CUdevice dev, CUdevResource *out, CUdevResourceType type)
{
    if (driver_gpu(dev) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out || type != CU_DEV_RESOURCE_TYPE_SM)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdevResource){.type = type};
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice dev, CUdevResource *out, CUdevResourceType type)
{
    WITH_DRIVER(resource(dev, out, type));
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources,
                                   unsigned int count)
{
    static char one; /* there is nothing in it that the simulated GPU would look at */
    if (!out || !resources || !count)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdevResourceDesc)&one;
    return driver_ready();
}

static CUresult green_new(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev)
{
    int gpu = driver_gpu(dev);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out || !desc)
        return CUDA_ERROR_INVALID_VALUE;
    struct object *green = object_new(GREEN, NULL, gpu, SIM_MIB);
    if (!green)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUgreenCtx)green;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev,
                          unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(green_new(out, desc, dev));
}

static CUresult from_green(CUcontext *out, CUgreenCtx green)
{
    if (!out || !object_is(GREEN, green))
        return CUDA_ERROR_INVALID_VALUE;
    struct object *object = (struct object *)green;
    CUresult rc = context_new(object->gpu, out);
    object->addr = (CUdeviceptr)*out; /* goes with the green context */
    return rc;
}

CUresult cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green)
{
    WITH_DRIVER(from_green(ctx, green));
}

static CUresult green_destroy(CUgreenCtx green)
{
    if (!object_is(GREEN, green))
        return CUDA_ERROR_INVALID_HANDLE;
    CUcontext own = (CUcontext)((struct object *)green)->addr;
    if (own)
        context_end(own);
    object_free(GREEN, green);
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    WITH_DRIVER(green_destroy(green));
}

/* The heap of a context's kernels is taken at once; the other limits cost nothing here. */
static CUresult set_limit(CUlimit limit, size_t value)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (limit < 0 || limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    if (limit != CU_LIMIT_MALLOC_HEAP_SIZE)
        return CUDA_SUCCESS;
    bool fits = object_new(OLD, ctx, ctx->gpu, round_up(value, GRANULE)) != NULL;
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    WITH_DRIVER(set_limit(limit, value));
}

/* What the process was charged with while it is checkpointed. */
static uint64_t moved_out[SIM_MAX_GPUS];
static bool is_out;

static CUresult checkpoint(int pid, bool out)
{
    struct sim_owner *owner = &driver_state()->owners[driver_owner()];
    if (pid != owner->who.pid || is_out == out)
        return CUDA_ERROR_INVALID_VALUE; /* of other processes the simulated driver knows nothing */
    is_out = out;
    for (uint32_t gpu = 0; gpu < driver_state()->gpus; gpu++) {
        if (out) {
            moved_out[gpu] = owner->charged[gpu];
            sim_uncharge(driver_owner(), (int)gpu, moved_out[gpu]);
        } else if (!sim_charge(driver_owner(), (int)gpu, moved_out[gpu])) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    (void)args;
    WITH_DRIVER(checkpoint(pid, true));
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    (void)args;
    WITH_DRIVER(checkpoint(pid, false));
}
