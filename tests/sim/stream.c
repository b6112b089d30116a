/* Streams: each is an address of its own. There is no work in them, but synchronising counts. */
#include "driver.h"

#include <stdlib.h>

struct CUstream_st {
    int gpu;
    bool captured;
    CUgraph graph; /* that it is recorded into, or NULL for one of its own */
};

static CUresult stream_create(CUstream *stream)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    *stream = calloc(1, sizeof **stream);
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

static CUresult capture_begin(CUstream stream, CUgraph graph)
{
    if (!stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* the legacy stream */
    if (stream->captured)
        return CUDA_ERROR_ILLEGAL_STATE;
    stream->captured = true;
    stream->graph = graph;
    return CUDA_SUCCESS;
}

static CUresult capture_end(CUstream stream, CUgraph *graph)
{
    if (!stream || !stream->captured)
        return CUDA_ERROR_ILLEGAL_STATE;
    stream->captured = false;
    *graph = stream->graph;
    return CUDA_SUCCESS;
}

/* A capture without a graph of its own ends in an empty one. */
static CUresult end(CUstream stream, CUgraph *graph)
{
    CUresult rc;
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    driver_lock();
    rc = capture_end(stream, graph);
    driver_unlock();
    return rc == CUDA_SUCCESS && !*graph ? cuGraphCreate(graph, 0) : rc;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    (void)mode;
    WITH_DRIVER(capture_begin(stream, NULL));
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
    (void)mode;
    WITH_DRIVER(capture_begin(stream, NULL));
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *nodes,
                                     const CUgraphEdgeData *edges, size_t count,
                                     CUstreamCaptureMode mode)
{
    (void)nodes, (void)edges, (void)count, (void)mode;
    WITH_DRIVER(capture_begin(stream, graph));
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *nodes,
                                          const CUgraphEdgeData *edges, size_t count,
                                          CUstreamCaptureMode mode)
{
    (void)nodes, (void)edges, (void)count, (void)mode;
    WITH_DRIVER(capture_begin(stream, graph));
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return end(stream, graph);
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return end(stream, graph);
}
