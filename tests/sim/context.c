/* Contexts: what they cost, which one a thread is in, and what goes when they go. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#define DEPTH 64

struct entry {
    CUcontext ctx;
    unsigned serial;
};

static __thread struct entry stack[DEPTH];
static __thread int depth;

static struct CUctx_st *created; /* every context ever made; dead ones are used again */
static struct CUctx_st primaries[SIM_MAX_GPUS];

static bool known(CUcontext ctx)
{
    if (ctx >= primaries && ctx < primaries + SIM_MAX_GPUS)
        return ctx->alive;
    for (struct CUctx_st *c = created; c; c = c->next)
        if (c == ctx)
            return c->alive;
    return false;
}

CUresult context_current(CUcontext *ctx)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    struct entry *top = &stack[depth - 1];
    if (!top->ctx->alive || top->ctx->serial != top->serial)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *ctx = top->ctx;
    return CUDA_SUCCESS;
}

static void count_context(int gpu, int change)
{
    sim_lock();
    driver_state()->owners[driver_owner()].contexts[gpu] += (unsigned)change;
    sim_unlock();
}

static void begin(CUcontext ctx, int gpu, uint64_t charged)
{
    count_context(gpu, 1);
    ctx->gpu = gpu;
    ctx->alive = true;
    ctx->attached = 0;
    ctx->charged = charged;
    ctx->heap = (struct heap){.gpu = gpu};
}

static CUresult start(CUcontext ctx, int gpu)
{
    uint64_t bytes = driver_state()->context_bytes;
    if (!sim_charge(driver_owner(), gpu, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_sleep_ms(sim_env("SIM_CTX_MS", 30));
    begin(ctx, gpu, bytes);
    return CUDA_SUCCESS;
}

/* Frees all that was made in the context. Memory of cuMemCreate and of pools stays. */
static void destroy(CUcontext ctx)
{
    heap_destroy(&ctx->heap);
    host_free_all(ctx);
    objects_free_all(ctx);
    sim_uncharge(driver_owner(), ctx->gpu, ctx->charged);
    count_context(ctx->gpu, -1);
    ctx->alive = false;
}

void context_end(CUcontext ctx)
{
    if (ctx->alive)
        destroy(ctx);
}

static CUresult push(CUcontext ctx)
{
    if (!known(ctx) || depth == DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = (struct entry){ctx, ctx->serial};
    return CUDA_SUCCESS;
}

/* The structure of a context that is gone, or another one. */
static struct CUctx_st *blank(void)
{
    struct CUctx_st *ctx = created;
    while (ctx && ctx->alive)
        ctx = ctx->next;
    if (!ctx) {
        ctx = calloc(1, sizeof *ctx);
        ctx->next = created;
        created = ctx;
    }
    return ctx;
}

static CUresult create(CUcontext *out, CUdevice dev)
{
    int gpu = driver_gpu(dev);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out || depth == DEPTH)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUctx_st *ctx = blank();
    CUresult rc = start(ctx, gpu);
    if (rc != CUDA_SUCCESS)
        return rc;
    ctx->serial++;
    *out = ctx;
    return push(ctx);
}

CUcontext context_for_green(int gpu)
{
    struct CUctx_st *ctx = blank();
    begin(ctx, gpu, 0);
    ctx->serial++;
    return ctx;
}

CUresult cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
    (void)flags;
    WITH_DRIVER(create(ctx, dev));
}

CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
    (void)flags;
    WITH_DRIVER(create(ctx, dev));
}

CUresult cuCtxCreate_v3(CUcontext *ctx, CUexecAffinityParam *params, int count, unsigned int flags,
                        CUdevice dev)
{
    (void)params, (void)count, (void)flags;
    WITH_DRIVER(create(ctx, dev));
}

CUresult cuCtxCreate_v4(CUcontext *ctx, CUctxCreateParams *params, unsigned int flags,
                        CUdevice dev)
{
    (void)params, (void)flags;
    WITH_DRIVER(create(ctx, dev));
}

static CUresult destroy_created(CUcontext ctx)
{
    if (!known(ctx) || ctx->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth && stack[depth - 1].ctx == ctx)
        depth--; /* as documented, for the calling thread only */
    destroy(ctx);
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    WITH_DRIVER(destroy_created(ctx));
}

CUresult cuCtxDestroy(CUcontext ctx)
{
    WITH_DRIVER(destroy_created(ctx));
}

static CUresult attach(CUcontext *ctx)
{
    CUresult rc = context_current(ctx);
    if (rc == CUDA_SUCCESS)
        (*ctx)->attached++;
    return rc;
}

CUresult cuCtxAttach(CUcontext *ctx, unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(attach(ctx));
}

static CUresult detach(CUcontext ctx)
{
    if (!known(ctx) || !ctx->attached)
        return destroy_created(ctx);
    ctx->attached--;
    return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext ctx)
{
    WITH_DRIVER(detach(ctx));
}

static CUresult set_current(CUcontext ctx)
{
    if (!ctx) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    if (!known(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    depth -= depth > 0;
    return push(ctx);
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
    WITH_DRIVER(set_current(ctx));
}

CUresult cuCtxGetCurrent(CUcontext *ctx)
{
    CUresult rc = driver_ready();
    if (rc == CUDA_SUCCESS)
        *ctx = depth ? stack[depth - 1].ctx : NULL;
    return rc;
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
    WITH_DRIVER(push(ctx));
}

CUresult cuCtxPushCurrent(CUcontext ctx)
{
    WITH_DRIVER(push(ctx));
}

static CUresult pop(CUcontext *ctx)
{
    CUresult rc = driver_ready();
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (ctx)
        *ctx = stack[depth].ctx;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *ctx)
{
    return pop(ctx);
}

CUresult cuCtxPopCurrent(CUcontext *ctx)
{
    return pop(ctx);
}

static CUresult current_device(CUdevice *device)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc == CUDA_SUCCESS)
        *device = driver_ordinal(ctx->gpu);
    return rc;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    WITH_DRIVER(current_device(device));
}

CUresult context_synchronize(void)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc == CUDA_SUCCESS)
        pools_synchronize(ctx->gpu);
    return rc;
}

CUresult cuCtxSynchronize(void)
{
    WITH_DRIVER(context_synchronize());
}

CUresult context_primary_retain(CUcontext *out, int gpu)
{
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    struct CUctx_st *ctx = &primaries[gpu];
    CUresult rc = ctx->alive ? CUDA_SUCCESS : start(ctx, gpu);
    if (rc != CUDA_SUCCESS)
        return rc;
    ctx->primary = true;
    ctx->retained++;
    *out = ctx;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev)
{
    WITH_DRIVER(context_primary_retain(ctx, driver_gpu(dev)));
}

CUresult context_primary_release(int gpu)
{
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    struct CUctx_st *ctx = &primaries[gpu];
    if (!ctx->retained)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (--ctx->retained == 0 && ctx->alive)
        destroy(ctx);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
    WITH_DRIVER(context_primary_release(driver_gpu(dev)));
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    WITH_DRIVER(context_primary_release(driver_gpu(dev)));
}

/* Whoever retained the context still has to release it after the `_v2` function; the older one takes
 * one of the retains away, as the real driver does (H200, driver 580). */
static CUresult primary_reset(CUdevice dev, bool keeps_retains)
{
    int gpu = driver_gpu(dev);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (primaries[gpu].alive)
        destroy(&primaries[gpu]);
    if (!keeps_retains && primaries[gpu].retained)
        primaries[gpu].retained--;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset(CUdevice dev)
{
    WITH_DRIVER(primary_reset(dev, false));
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    WITH_DRIVER(primary_reset(dev, true));
}
