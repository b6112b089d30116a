/* Green contexts: a part of a GPU. One keeps the primary context, in which it lives, and takes a
 * little of its own. */
#include "driver.h"

#include <stdlib.h>

#define GREEN_BYTES (4 * SIM_MIB)
#define SMS 132

static CUresult resource(int gpu, CUdevResource *out, CUdevResourceType type)
{
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out || type != CU_DEV_RESOURCE_TYPE_SM)
        return out ? CUDA_ERROR_INVALID_RESOURCE_TYPE : CUDA_ERROR_INVALID_VALUE;
    *out = (CUdevResource){.type = type, .sm.smCount = SMS};
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice dev, CUdevResource *out, CUdevResourceType type)
{
    WITH_DRIVER(resource(driver_gpu(dev), out, type));
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources,
                                   unsigned int count)
{
    static char one; /* there is nothing in it that the simulated GPU would look at */
    if (!out || !resources || !count || resources->type != CU_DEV_RESOURCE_TYPE_SM)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdevResourceDesc)&one;
    return driver_ready();
}

static void end(struct object *green)
{
    if (green->more)
        context_end(green->more);
    context_primary_release(green->gpu);
}

static CUresult create(CUgreenCtx *out, CUdevResourceDesc desc, int gpu, unsigned flags)
{
    CUcontext primary;
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out || !desc || flags != CU_GREEN_CTX_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = context_primary_retain(&primary, gpu);
    if (rc != CUDA_SUCCESS)
        return rc;
    struct object *green = object_new(OBJECT_GREEN, NULL, gpu, GREEN_BYTES);
    if (!green) {
        context_primary_release(gpu);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    green->end = end;
    *out = (CUgreenCtx)green;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev,
                          unsigned int flags)
{
    WITH_DRIVER(create(out, desc, driver_gpu(dev), flags));
}

/* Asked again, it is the same one. */
static CUresult as_context(CUcontext *out, CUgreenCtx handle)
{
    struct object *green = object_of(OBJECT_GREEN, handle);
    if (!out || !green)
        return CUDA_ERROR_INVALID_VALUE;
    if (!green->more)
        green->more = context_for_green(green->gpu);
    *out = green->more;
    return CUDA_SUCCESS;
}

CUresult cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green)
{
    WITH_DRIVER(as_context(ctx, green));
}

CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    WITH_DRIVER(object_destroy(OBJECT_GREEN, green));
}
