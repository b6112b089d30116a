/* Streams: each is an address of its own. There is no work in them, but synchronising counts. */
#include "driver.h"

#include <stdlib.h>

struct CUstream_st {
    int gpu;
};

static CUresult stream_create(CUstream *stream)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    *stream = malloc(sizeof **stream);
    (*stream)->gpu = ctx->gpu;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    (void)flags;
    WITH_DRIVER(stream_create(stream));
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    CUresult rc = driver_ready();
    if (rc == CUDA_SUCCESS)
        free(stream);
    return rc;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    WITH_DRIVER(context_synchronize());
}

CUresult cuStreamSynchronize_ptsz(CUstream stream)
{
    (void)stream;
    WITH_DRIVER(context_synchronize());
}
