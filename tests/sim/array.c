/* Arrays: opaque, and padded, so that what they take is more than their elements. */
#include "driver.h"

#define PAD (64ull << 10)

static uint64_t channel_bytes(CUarray_format format)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        return 0;
    }
}

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned level)
{
    bool layers = desc->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    uint64_t width = desc->Width >> level, height = desc->Height >> level;
    uint64_t depth = layers ? desc->Depth : desc->Depth >> level;
    return (width ? width : 1) * (height ? height : 1) * (depth ? depth : 1) *
           desc->NumChannels * channel_bytes(desc->Format);
}

/* As many levels as there are halves, whatever was asked for. */
static unsigned levels_of(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned asked)
{
    uint64_t longest = desc->Width > desc->Height ? desc->Width : desc->Height;
    bool layers = desc->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    if (!layers && desc->Depth > longest)
        longest = desc->Depth;
    unsigned most = 0;
    for (; longest; longest /= 2)
        most++;
    return asked < most ? asked : most;
}

static CUresult array_new(void **out, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned levels,
                          enum object_kind kind)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    unsigned channels = desc->NumChannels;
    if (!out || !desc->Width || !channel_bytes(desc->Format) || !levels ||
        (channels != 1 && channels != 2 && channels != 4))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = 0;
    for (unsigned level = 0; level < levels_of(desc, levels); level++)
        bytes += level_bytes(desc, level);
    /* Virtual until something is mapped there. */
    if (desc->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        bytes = 0;
    struct object *array = object_new(kind, ctx, ctx->gpu, round_up(bytes, PAD));
    if (!array)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = array;
    return CUDA_SUCCESS;
}

static CUresult flat_new(CUarray *out, uint64_t width, uint64_t height, CUarray_format format,
                         unsigned channels)
{
    CUDA_ARRAY3D_DESCRIPTOR desc = {width, height, 0, format, channels, 0};
    return array_new((void **)out, &desc, 1, OBJECT_ARRAY);
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d)
{
    if (!d)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(flat_new(array, d->Width, d->Height, d->Format, d->NumChannels));
}

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *d)
{
    if (!d)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(flat_new(array, d->Width, d->Height, d->Format, d->NumChannels));
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
    if (!desc)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(array_new((void **)array, desc, 1, OBJECT_ARRAY));
}

CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d)
{
    if (!d)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR desc = {d->Width, d->Height, d->Depth, d->Format, d->NumChannels,
                                    d->Flags};
    WITH_DRIVER(array_new((void **)array, &desc, 1, OBJECT_ARRAY));
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc,
                                unsigned int levels)
{
    if (!desc)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(array_new((void **)array, desc, levels, OBJECT_MIPMAPPED));
}

CUresult cuArrayDestroy(CUarray array)
{
    WITH_DRIVER(object_destroy(OBJECT_ARRAY, array));
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    WITH_DRIVER(object_destroy(OBJECT_MIPMAPPED, array));
}
