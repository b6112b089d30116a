/* Things behind handles of their own that take device memory: arrays, code, green contexts, graphs.
 * A handle is the object's address, as with the real driver. */
#include "driver.h"

#include <stdlib.h>

static struct object *objects;

struct object *object_new(enum object_kind kind, CUcontext ctx, int gpu, uint64_t bytes)
{
    if (bytes && !sim_charge(driver_owner(), gpu, bytes))
        return NULL;
    struct object *object = calloc(1, sizeof *object);
    *object = (struct object){
        .kind = kind, .ctx = ctx, .gpu = gpu, .charged = bytes, .next = objects};
    objects = object;
    return object;
}

static void drop(struct object **at)
{
    struct object *object = *at;
    *at = object->next;
    if (object->charged)
        sim_uncharge(driver_owner(), object->gpu, object->charged);
    free(object->more);
    free(object);
}

static struct object **find(enum object_kind kind, const void *handle)
{
    struct object **at = &objects;
    while (*at && (*at != handle || (*at)->kind != kind))
        at = &(*at)->next;
    return *at ? at : NULL;
}

bool object_is(enum object_kind kind, const void *handle)
{
    return find(kind, handle) != NULL;
}

bool object_free(enum object_kind kind, void *handle)
{
    struct object **at = find(kind, handle);
    if (at)
        drop(at);
    return at != NULL;
}

bool object_free_at(enum object_kind kind, CUdeviceptr addr)
{
    for (struct object **at = &objects; *at; at = &(*at)->next)
        if ((*at)->kind == kind && (*at)->addr == addr) {
            drop(at);
            return true;
        }
    return false;
}

void objects_free_all(CUcontext ctx)
{
    for (struct object **at = &objects; *at;)
        if ((*at)->ctx == ctx)
            drop(at);
        else
            at = &(*at)->next;
}
