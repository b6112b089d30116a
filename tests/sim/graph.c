/* Graphs, as far as memory goes. A node that allocates has its address from the start; its memory
 * comes from the GPU's graph pool when the graph is uploaded or launched, and stays in that pool
 * until it is trimmed. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#define MAX_NODES 64

struct block {
    int gpu;
    uint64_t bytes;
    CUdeviceptr addr;
    bool live;      /* after a launch, until it is freed */
    unsigned users; /* graphs and executables that name it */
    struct block *next;
};
static struct block *blocks;

/* What the graphs of a GPU use of what they reserved. */
static struct graph_pool {
    uint64_t used, used_high, reserved, reserved_high;
} pools[SIM_MAX_GPUS];

struct node {
    struct block *block; /* NULL: a node that has nothing to do with memory */
    bool frees;
};

struct graph {
    size_t count;
    struct node nodes[MAX_NODES];
    struct object *from; /* of an executable: its graph, which may be gone */
    bool frees_on_launch, has_memory, is_instantiated;
};

static struct graph *graph_of(enum object_kind kind, const void *handle)
{
    struct object *object = object_of(kind, handle);
    return object ? object->more : NULL;
}

static struct block **find(CUdeviceptr addr)
{
    struct block **at = &blocks;
    while (*at && (*at)->addr != addr)
        at = &(*at)->next;
    return at;
}

static void drop_if_unused(struct block *block)
{
    if (block->users || block->live)
        return;
    *find(block->addr) = block->next;
    arena_give(block->addr, block->bytes);
    free(block);
}

static void end(struct object *object)
{
    struct graph *graph = object->more;
    struct graph *from = graph_of(OBJECT_GRAPH, graph->from);
    if (from)
        from->is_instantiated = false;
    for (size_t i = 0; i < graph->count; i++) {
        struct block *block = graph->nodes[i].block;
        if (block && !graph->nodes[i].frees) {
            block->users--;
            drop_if_unused(block);
        }
    }
    free(graph);
}

static struct object *graph_new(enum object_kind kind)
{
    struct object *object = object_new(kind, NULL, 0, 0);
    object->more = calloc(1, sizeof(struct graph));
    object->end = end;
    return object;
}

static CUresult create(CUgraph *out)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUgraph)graph_new(OBJECT_GRAPH);
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(create(graph));
}

static CUresult add(CUgraphNode *out, CUgraph handle, struct node node)
{
    struct graph *graph = graph_of(OBJECT_GRAPH, handle);
    if (!out || !graph)
        return CUDA_ERROR_INVALID_VALUE;
    if (graph->count == MAX_NODES)
        return CUDA_ERROR_OUT_OF_MEMORY;
    graph->nodes[graph->count] = node;
    graph->has_memory |= node.block != NULL;
    *out = (CUgraphNode)&graph->nodes[graph->count++];
    return CUDA_SUCCESS;
}

static CUresult add_alloc(CUgraphNode *out, CUgraph graph, const CUmemPoolProps *props,
                          uint64_t bytes, CUdeviceptr *addr)
{
    int gpu = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE
                  ? driver_gpu(props->location.id)
                  : -1;
    if (gpu < 0 || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    struct block *block = calloc(1, sizeof *block);
    *block = (struct block){.gpu = gpu, .bytes = round_up(bytes, GRANULE), .users = 1};
    block->addr = arena_take(block->bytes);
    CUresult rc = block->addr ? add(out, graph, (struct node){block, false})
                              : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc != CUDA_SUCCESS) {
        if (block->addr)
            arena_give(block->addr, block->bytes);
        free(block);
        return rc;
    }
    block->next = blocks;
    blocks = block;
    *addr = block->addr;
    return CUDA_SUCCESS;
}

static CUresult add_free(CUgraphNode *out, CUgraph graph, CUdeviceptr addr)
{
    struct block *block = *find(addr);
    return block ? add(out, graph, (struct node){block, true}) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                                size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
    (void)after, (void)count;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(add_alloc(node, graph, &p->poolProps, p->bytesize, &p->dptr));
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                               size_t count, CUdeviceptr addr)
{
    (void)after, (void)count;
    WITH_DRIVER(add_free(node, graph, addr));
}

static CUresult add_any(CUgraphNode *node, CUgraph graph, CUgraphNodeParams *p)
{
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return add_alloc(node, graph, &p->alloc.poolProps, p->alloc.bytesize, &p->alloc.dptr);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return add_free(node, graph, p->free.dptr);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return add(node, graph, (struct node){NULL, false});
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                        CUgraphNodeParams *params)
{
    (void)after, (void)count;
    WITH_DRIVER(add_any(node, graph, params));
}

CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params)
{
    (void)after, (void)edges, (void)count;
    WITH_DRIVER(add_any(node, graph, params));
}

CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params)
{
    (void)after, (void)edges, (void)count;
    WITH_DRIVER(add_any(node, graph, params));
}

static void take(struct block *block)
{
    struct graph_pool *pool = &pools[block->gpu];
    block->live = true;
    pool->used += block->bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

static void give(struct block *block)
{
    block->live = false;
    pools[block->gpu].used -= block->bytes;
    drop_if_unused(block);
}

/* Makes room in the pools for all that the graph allocates. */
static CUresult reserve(const struct graph *graph)
{
    uint64_t needed[SIM_MAX_GPUS] = {0};
    for (size_t i = 0; i < graph->count; i++)
        if (graph->nodes[i].block && !graph->nodes[i].frees && !graph->nodes[i].block->live)
            needed[graph->nodes[i].block->gpu] += graph->nodes[i].block->bytes;
    for (int gpu = 0; gpu < SIM_MAX_GPUS; gpu++) {
        struct graph_pool *pool = &pools[gpu];
        if (pool->used + needed[gpu] <= pool->reserved)
            continue;
        uint64_t more = pool->used + needed[gpu] - pool->reserved;
        if (!sim_charge(driver_owner(), gpu, more))
            return CUDA_ERROR_OUT_OF_MEMORY;
        pool->reserved += more;
        if (pool->reserved > pool->reserved_high)
            pool->reserved_high = pool->reserved;
    }
    return CUDA_SUCCESS;
}

/* Memory nodes have one address, so that a graph with some has one executable at a time. */
static CUresult instantiate(CUgraphExec *exec, CUgraph handle, unsigned long long flags)
{
    struct graph *graph = graph_of(OBJECT_GRAPH, handle);
    if (!exec || !graph)
        return CUDA_ERROR_INVALID_VALUE;
    if (graph->has_memory && graph->is_instantiated)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD && reserve(graph) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct object *object = graph_new(OBJECT_GRAPH_EXEC);
    struct graph *copy = object->more;
    *copy = *graph;
    copy->from = (struct object *)handle;
    copy->frees_on_launch = flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    graph->is_instantiated = true;
    for (size_t i = 0; i < copy->count; i++)
        if (copy->nodes[i].block && !copy->nodes[i].frees)
            copy->nodes[i].block->users++;
    *exec = (CUgraphExec)object;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                            size_t room)
{
    (void)error, (void)log, (void)room;
    WITH_DRIVER(instantiate(exec, graph, 0));
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                               size_t room)
{
    (void)error, (void)log, (void)room;
    WITH_DRIVER(instantiate(exec, graph, 0));
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    WITH_DRIVER(instantiate(exec, graph, flags));
}

static CUresult instantiate_with(CUgraphExec *exec, CUgraph graph,
                                 CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = instantiate(exec, graph, params->flags);
    params->result_out =
        rc == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return rc;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    WITH_DRIVER(instantiate_with(exec, graph, params));
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    WITH_DRIVER(instantiate_with(exec, graph, params));
}

static CUresult upload(CUgraphExec exec)
{
    const struct graph *graph = graph_of(OBJECT_GRAPH_EXEC, exec);
    return graph ? reserve(graph) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(upload(exec));
}

CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(upload(exec));
}

static CUresult launch(CUgraphExec exec)
{
    const struct graph *graph = graph_of(OBJECT_GRAPH_EXEC, exec);
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < graph->count; i++) {
        struct block *block = graph->nodes[i].block;
        if (!block || graph->nodes[i].frees || !block->live)
            continue;
        if (!graph->frees_on_launch)
            return CUDA_ERROR_INVALID_VALUE; /* what the last launch allocated is not freed yet */
        give(block);
    }
    CUresult rc = reserve(graph);
    for (size_t i = 0; i < graph->count && rc == CUDA_SUCCESS; i++) {
        struct block *block = graph->nodes[i].block;
        if (block && !graph->nodes[i].frees)
            take(block);
        else if (block && block->live)
            give(block);
    }
    return rc;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(launch(exec));
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
    (void)stream;
    WITH_DRIVER(launch(exec));
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    WITH_DRIVER(object_destroy(OBJECT_GRAPH_EXEC, exec));
}

CUresult cuGraphDestroy(CUgraph graph)
{
    WITH_DRIVER(object_destroy(OBJECT_GRAPH, graph));
}

bool graph_free(CUdeviceptr addr)
{
    struct block *block = *find(addr);
    bool live = block && block->live;
    if (live)
        give(block);
    return live;
}

static CUresult trim(int gpu)
{
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    struct graph_pool *pool = &pools[gpu];
    if (pool->reserved > pool->used)
        sim_uncharge(driver_owner(), gpu, pool->reserved - pool->used);
    pool->reserved = pool->used;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice dev)
{
    WITH_DRIVER(trim(driver_gpu(dev)));
}

static CUresult get_attribute(int gpu, CUgraphMem_attribute attribute, cuuint64_t *value)
{
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    const struct graph_pool *pool = &pools[gpu];
    const uint64_t values[] = {
        [CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT] = pool->used,
        [CU_GRAPH_MEM_ATTR_USED_MEM_HIGH] = pool->used_high,
        [CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT] = pool->reserved,
        [CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH] = pool->reserved_high,
    };
    if (!value || (size_t)attribute >= sizeof values / sizeof *values)
        return CUDA_ERROR_INVALID_VALUE;
    *value = values[attribute];
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value)
{
    WITH_DRIVER(get_attribute(driver_gpu(dev), attribute, value));
}
