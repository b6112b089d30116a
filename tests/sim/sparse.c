/* Tiles of sparse arrays: memory of cuMemCreate that is mapped into an array keeps its pages until
 * the tile is unmapped or the array destroyed. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct tile {
    CUarrayMapInfo where; /* the place in the array; the rest is zero */
    unsigned memory;
    struct tile *next;
};

static CUarrayMapInfo place_of(const CUarrayMapInfo *info)
{
    CUarrayMapInfo place;
    memset(&place, 0, sizeof place); /* padding too: places are compared as bytes */
    place.subresourceType = info->subresourceType;
    place.subresource = info->subresource;
    return place;
}

static void drop(struct tile **at)
{
    struct tile *tile = *at;
    *at = tile->next;
    vmm_let_go(tile->memory);
    free(tile);
}

static void drop_all(struct object *array)
{
    struct tile *tiles = array->more;
    while (tiles)
        drop(&tiles);
}

static struct object *array_of(const CUarrayMapInfo *info)
{
    return info->resourceType == CU_RESOURCE_TYPE_ARRAY
               ? object_of(OBJECT_ARRAY, info->resource.array)
               : object_of(OBJECT_MIPMAPPED, info->resource.mipmap);
}

static CUresult map_tile(const CUarrayMapInfo *info)
{
    struct object *array = array_of(info);
    bool maps = info->memOperationType == CU_MEM_OPERATION_TYPE_MAP;
    unsigned memory = array && maps ? vmm_hold(info->memHandle.memHandle) : 0;
    if (!array || (maps && !memory))
        return CUDA_ERROR_INVALID_VALUE;
    CUarrayMapInfo place = place_of(info);
    struct tile *tiles = array->more, **at = &tiles;
    while (*at && memcmp(&(*at)->where, &place, sizeof place))
        at = &(*at)->next;
    if (*at)
        drop(at);
    if (maps) {
        struct tile *tile = malloc(sizeof *tile);
        memcpy(&tile->where, &place, sizeof place);
        tile->memory = memory;
        tile->next = tiles;
        tiles = tile;
    }
    array->more = tiles;
    array->end = drop_all;
    return CUDA_SUCCESS;
}

static CUresult map_tiles(const CUarrayMapInfo *list, unsigned count)
{
    if (!list || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        CUresult rc = map_tile(&list[i]);
        if (rc != CUDA_SUCCESS)
            return rc;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(map_tiles(list, count));
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(map_tiles(list, count));
}
