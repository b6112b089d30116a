/* Objects that several GPUs share: address space behind a handle that cuMemRelease ends. Memory that
 * is bound to one stays until it is unbound, or until the object goes. */
#include "driver.h"

#include <stdlib.h>

struct binding {
    int gpu;
    uint64_t offset, bytes;
    unsigned memory;
    struct binding *next;
};

struct team {
    CUmemGenericAllocationHandle handle;
    unsigned wanted, gpus; /* how many GPUs it is for, and a bit for each that was added */
    struct binding *bindings;
    struct team *next;
};
static struct team *teams;

static struct team **find(CUmemGenericAllocationHandle handle)
{
    struct team **at = &teams;
    while (*at && (*at)->handle != handle)
        at = &(*at)->next;
    return at;
}

static void unbind(struct binding **at)
{
    struct binding *binding = *at;
    *at = binding->next;
    vmm_let_go(binding->memory);
    free(binding);
}

static void ended(CUmemGenericAllocationHandle handle)
{
    struct team **at = find(handle), *team = *at;
    *at = team->next;
    while (team->bindings)
        unbind(&team->bindings);
    free(team);
}

static CUresult create(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *prop)
{
    if (!out || !prop || !prop->size || prop->size % GRANULE || prop->numDevices < 2)
        return CUDA_ERROR_INVALID_VALUE;
    struct team *team = calloc(1, sizeof *team);
    team->handle = vmm_handle_without_memory(prop->size, ended);
    team->wanted = prop->numDevices;
    team->next = teams;
    teams = team;
    *out = team->handle;
    return CUDA_SUCCESS;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *prop)
{
    WITH_DRIVER(create(out, prop));
}

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *prop,
                                   CUmulticastGranularity_flags option)
{
    (void)option;
    if (!granularity || !prop)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULE;
    return driver_ready();
}

static CUresult add_device(CUmemGenericAllocationHandle handle, int gpu)
{
    struct team *team = *find(handle);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!team || team->gpus >> gpu & 1 || (unsigned)__builtin_popcount(team->gpus) == team->wanted)
        return CUDA_ERROR_INVALID_VALUE;
    team->gpus |= 1u << gpu;
    return CUDA_SUCCESS;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle object, CUdevice dev)
{
    WITH_DRIVER(add_device(object, driver_gpu(dev)));
}

/* `memory` is held already; the binding keeps it. `gpu` is -1 where the memory says which one. */
static CUresult bind(CUmemGenericAllocationHandle handle, int gpu, uint64_t offset,
                     unsigned memory, uint64_t bytes)
{
    struct team *team = *find(handle);
    bool fits = team && bytes && (offset | bytes) % GRANULE == 0 &&
                bytes <= vmm_bytes(handle) && offset <= vmm_bytes(handle) - bytes;
    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    if (gpu < 0)
        gpu = vmm_gpu(memory);
    bool complete = team && (unsigned)__builtin_popcount(team->gpus) == team->wanted;
    if (!fits || !complete || gpu < 0 || !(team->gpus >> gpu & 1)) {
        vmm_let_go(memory);
        return fits && !complete ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE;
    }
    struct binding *binding = malloc(sizeof *binding);
    *binding = (struct binding){gpu, offset, bytes, memory, team->bindings};
    team->bindings = binding;
    return CUDA_SUCCESS;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset,
                            CUmemGenericAllocationHandle memory, size_t memory_offset,
                            size_t bytes, unsigned long long flags)
{
    (void)memory_offset, (void)flags;
    WITH_DRIVER(bind(object, -1, offset, vmm_hold(memory), bytes));
}

CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice dev, size_t offset,
                               CUmemGenericAllocationHandle memory, size_t memory_offset,
                               size_t bytes, unsigned long long flags)
{
    (void)memory_offset, (void)flags;
    WITH_DRIVER(bind(object, driver_gpu(dev), offset, vmm_hold(memory), bytes));
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr addr,
                             size_t bytes, unsigned long long flags)
{
    (void)flags;
    WITH_DRIVER(bind(object, -1, offset, vmm_hold_at(addr), bytes));
}

CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice dev, size_t offset,
                                CUdeviceptr addr, size_t bytes, unsigned long long flags)
{
    (void)flags;
    WITH_DRIVER(bind(object, driver_gpu(dev), offset, vmm_hold_at(addr), bytes));
}

static CUresult unbind_range(CUmemGenericAllocationHandle handle, int gpu, uint64_t offset,
                             uint64_t bytes)
{
    struct team *team = *find(handle);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!team || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    for (struct binding **at = &team->bindings; *at;)
        if ((*at)->gpu == gpu && (*at)->offset >= offset &&
            (*at)->offset + (*at)->bytes <= offset + bytes)
            unbind(at);
        else
            at = &(*at)->next;
    return CUDA_SUCCESS;
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice dev, size_t offset,
                           size_t bytes)
{
    WITH_DRIVER(unbind_range(object, driver_gpu(dev), offset, bytes));
}
