/* Blocks of other processes that this one has opened: an address, a hold on the memory, no charge. */
#include "opened.h"

#include <stdlib.h>

struct opened {
    int export;
    uint64_t region_bytes;
    CUdeviceptr base;
};

static void end(struct object *object)
{
    struct opened *opened = object->more;
    arena_give(opened->base, opened->region_bytes);
    export_unuse(opened->export);
    free(opened);
}

struct object *opened_new(CUcontext ctx, const struct shared_block *block)
{
    int export = export_use(block->export_id);
    if (export < 0)
        return NULL;
    uint64_t bytes = round_up(export_at(export)->bytes, GRANULE);
    CUdeviceptr base = arena_take(bytes);
    struct object *object = object_new(OBJECT_OPENED, ctx, export_at(export)->gpu, 0);
    struct opened *opened = malloc(sizeof *opened);
    *opened = (struct opened){export, bytes, base};
    object->more = opened;
    object->end = end;
    object->addr = base + block->part.offset;
    return object;
}
