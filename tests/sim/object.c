/* Things behind handles of their own that may take device memory: arrays, code, graphs and more. */
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

struct object *object_of(enum object_kind kind, const void *handle)
{
    struct object *object = objects;
    while (object && (object != handle || object->kind != kind))
        object = object->next;
    return object;
}

struct object *object_at(enum object_kind kind, CUcontext ctx, CUdeviceptr addr)
{
    struct object *object = objects;
    while (object &&
           (object->kind != kind || object->addr != addr || (ctx && object->ctx != ctx)))
        object = object->next;
    return object;
}

void object_free(struct object *object)
{
    struct object **at = &objects;
    while (*at != object)
        at = &(*at)->next;
    *at = object->next;
    if (object->end)
        object->end(object);
    if (object->charged)
        sim_uncharge(driver_owner(), object->gpu, object->charged);
    free(object);
}

CUresult object_destroy(enum object_kind kind, const void *handle)
{
    struct object *object = object_of(kind, handle);
    if (!object)
        return CUDA_ERROR_INVALID_HANDLE;
    object_free(object);
    return CUDA_SUCCESS;
}

void objects_free_all(CUcontext ctx)
{
    struct object *object = objects;
    while (object) {
        if (object->ctx != ctx) {
            object = object->next;
            continue;
        }
        object_free(object);
        object = objects; /* its end may have ended others */
    }
}
