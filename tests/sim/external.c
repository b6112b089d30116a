/* Memory of other APIs: another one's file descriptor, buffers and arrays in it, and resources of a
 * graphics API, of which the simulated one takes any handle. */
#include "driver.h"

#include <unistd.h>

static CUresult import(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || !desc || !desc->size || desc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
        return CUDA_ERROR_INVALID_VALUE;
    close(desc->handle.fd); /* a success takes the descriptor over */
    *out = (CUexternalMemory)object_new(EXTERNAL, ctx, ctx->gpu, 0);
    return CUDA_SUCCESS;
}

CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
    WITH_DRIVER(import(out, desc));
}

static CUresult map_buffer(CUdeviceptr *out, CUexternalMemory memory,
                           const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
    if (!out || !desc || !desc->size || !object_is(EXTERNAL, memory))
        return CUDA_ERROR_INVALID_VALUE;
    struct object *of = (struct object *)memory;
    struct object *buffer = object_new(BUFFER, of->ctx, of->gpu, 0);
    *out = buffer->addr = arena_take(round_up(desc->size, GRANULE));
    return CUDA_SUCCESS;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory memory,
                                         const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
    WITH_DRIVER(map_buffer(out, memory, desc));
}

bool external_free(CUdeviceptr addr)
{
    return object_free_at(BUFFER, addr);
}

static CUresult map_array(CUmipmappedArray *out, CUexternalMemory memory)
{
    if (!out || !object_is(EXTERNAL, memory))
        return CUDA_ERROR_INVALID_VALUE;
    struct object *of = (struct object *)memory;
    *out = (CUmipmappedArray)object_new(MIPMAPPED, of->ctx, of->gpu, 0);
    return CUDA_SUCCESS;
}

CUresult
cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *out, CUexternalMemory memory,
                                        const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *desc)
{
    (void)desc;
    WITH_DRIVER(map_array(out, memory));
}

static CUresult destroy(CUexternalMemory memory)
{
    return object_free(EXTERNAL, memory) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    WITH_DRIVER(destroy(memory));
}

static CUresult map_resources(unsigned count, CUgraphicsResource *resources)
{
    return count && resources ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuGraphicsMapResources(unsigned int count, CUgraphicsResource *resources, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(map_resources(count, resources));
}

CUresult cuGraphicsMapResources_ptsz(unsigned int count, CUgraphicsResource *resources,
                                     CUstream stream)
{
    (void)stream;
    WITH_DRIVER(map_resources(count, resources));
}

CUresult cuGraphicsUnmapResources(unsigned int count, CUgraphicsResource *resources,
                                  CUstream stream)
{
    (void)stream;
    WITH_DRIVER(map_resources(count, resources));
}

CUresult cuGraphicsUnmapResources_ptsz(unsigned int count, CUgraphicsResource *resources,
                                       CUstream stream)
{
    (void)stream;
    WITH_DRIVER(map_resources(count, resources));
}

/* Every resource is one and the same frame buffer. */
static CUresult mapped_pointer(CUdeviceptr *out, size_t *bytes)
{
    static CUdeviceptr frame;
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!frame)
        frame = arena_take(4 * GRANULE);
    *out = frame;
    *bytes = 4 * GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuGraphicsResourceGetMappedPointer_v2(CUdeviceptr *out, size_t *bytes,
                                               CUgraphicsResource resource)
{
    (void)resource;
    WITH_DRIVER(mapped_pointer(out, bytes));
}
