/* Memory of other APIs: another one's file, buffers and arrays in it, and resources of a graphics
 * API, of which the simulated one takes any handle. */
#include "driver.h"

#include <sys/stat.h>
#include <unistd.h>

/* The size of external memory, or of a buffer in it, is in `more`: a number, not a pointer. */
static uint64_t bytes_of(const struct object *object)
{
    return (uint64_t)object->more;
}

/* A file stands for the other API's memory; it must be as large as what is imported. */
static CUresult import(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    struct stat info;
    if (!out || !desc || !desc->size || desc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
        return CUDA_ERROR_INVALID_VALUE;
    if (fstat(desc->handle.fd, &info) || (uint64_t)info.st_size < desc->size)
        return CUDA_ERROR_INVALID_VALUE;
    close(desc->handle.fd); /* a success takes the descriptor over */
    struct object *memory = object_new(OBJECT_EXTERNAL, ctx, ctx->gpu, 0);
    memory->more = (void *)desc->size;
    *out = (CUexternalMemory)memory;
    return CUDA_SUCCESS;
}

CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
    WITH_DRIVER(import(out, desc));
}

static void end_buffer(struct object *buffer)
{
    arena_give(buffer->addr, bytes_of(buffer));
}

static CUresult map_buffer(CUdeviceptr *out, CUexternalMemory handle,
                           const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
    struct object *memory = object_of(OBJECT_EXTERNAL, handle);
    if (!memory)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !desc || !desc->size || desc->size > bytes_of(memory) ||
        desc->offset > bytes_of(memory) - desc->size)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = round_up(desc->size, GRANULE);
    struct object *buffer = object_new(OBJECT_BUFFER, memory->ctx, memory->gpu, 0);
    buffer->more = (void *)bytes;
    buffer->addr = arena_take(bytes);
    buffer->end = end_buffer;
    *out = buffer->addr;
    return CUDA_SUCCESS;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory memory,
                                         const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
    WITH_DRIVER(map_buffer(out, memory, desc));
}

bool external_free(CUdeviceptr addr)
{
    struct object *buffer = object_at(OBJECT_BUFFER, NULL, addr);
    if (buffer)
        object_free(buffer);
    return buffer != NULL;
}

static CUresult map_array(CUmipmappedArray *out, CUexternalMemory handle,
                          const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *desc)
{
    struct object *memory = object_of(OBJECT_EXTERNAL, handle);
    if (!memory)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !desc || !desc->numLevels || desc->offset >= bytes_of(memory))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUmipmappedArray)object_new(OBJECT_MIPMAPPED, memory->ctx, memory->gpu, 0);
    return CUDA_SUCCESS;
}

CUresult
cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *out, CUexternalMemory memory,
                                        const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *desc)
{
    WITH_DRIVER(map_array(out, memory, desc));
}

/* Buffers and arrays that were mapped from it stay until they are freed themselves. */
CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    WITH_DRIVER(object_destroy(OBJECT_EXTERNAL, memory));
}

static CUresult map_resources(unsigned count, const CUgraphicsResource *resources)
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
