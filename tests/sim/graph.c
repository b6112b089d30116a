/* Graphs, as far as memory goes. A node that allocates has its address from the start; its memory
 * comes from the GPU's graph pool with the first launch and stays there until the pool is trimmed. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct block {
    int gpu;
    uint64_t bytes;
    CUdeviceptr addr;
    bool charged, live;
    struct block *next;
};
static struct block *blocks; /* for the life of the process, as their addresses may be in use */

struct nodes {
    size_t count;
    struct node {
        struct block *block; /* NULL: a node that has nothing to do with memory */
        bool frees;
    } list[64];
};

static struct nodes *nodes_of(enum object_kind kind, void *handle)
{
    return object_is(kind, handle) ? ((struct object *)handle)->more : NULL;
}

static CUresult graph_new(void **out, enum object_kind kind, const struct nodes *from)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    struct object *graph = object_new(kind, NULL, 0, 0);
    graph->more = calloc(1, sizeof(struct nodes));
    if (from)
        memcpy(graph->more, from, sizeof *from);
    *out = graph;
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(graph_new((void **)graph, GRAPH, NULL));
}

static CUresult add(CUgraphNode *out, CUgraph graph, struct node node)
{
    struct nodes *nodes = nodes_of(GRAPH, graph);
    if (!out || !nodes || nodes->count == sizeof nodes->list / sizeof *nodes->list)
        return CUDA_ERROR_INVALID_VALUE;
    nodes->list[nodes->count++] = node;
    *out = (CUgraphNode)&nodes->list[nodes->count - 1];
    return CUDA_SUCCESS;
}

static CUresult add_alloc(CUgraphNode *out, CUgraph graph, CUmemPoolProps *props, uint64_t bytes,
                          CUdeviceptr *addr)
{
    int gpu = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE
                  ? driver_gpu(props->location.id)
                  : -1;
    if (gpu < 0 || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    struct block *block = calloc(1, sizeof *block);
    *block = (struct block){.gpu = gpu, .bytes = round_up(bytes, GRANULE), .next = blocks};
    block->addr = arena_take(block->bytes);
    if (!block->addr) {
        free(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult rc = add(out, graph, (struct node){block, false});
    if (rc != CUDA_SUCCESS) {
        arena_give(block->addr, block->bytes);
        free(block);
        return rc;
    }
    blocks = block;
    *addr = block->addr;
    return CUDA_SUCCESS;
}

static struct block *block_at(CUdeviceptr addr)
{
    struct block *block = blocks;
    while (block && block->addr != addr)
        block = block->next;
    return block;
}

static CUresult add_free(CUgraphNode *out, CUgraph graph, CUdeviceptr addr)
{
    struct block *block = block_at(addr);
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

static CUresult instantiate(CUgraphExec *exec, CUgraph graph)
{
    struct nodes *nodes = nodes_of(GRAPH, graph);
    return nodes ? graph_new((void **)exec, GRAPH_EXEC, nodes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                            size_t room)
{
    (void)error, (void)log, (void)room;
    WITH_DRIVER(instantiate(exec, graph));
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                               size_t room)
{
    (void)error, (void)log, (void)room;
    WITH_DRIVER(instantiate(exec, graph));
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    WITH_DRIVER(instantiate(exec, graph));
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    (void)params;
    WITH_DRIVER(instantiate(exec, graph));
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    (void)params;
    WITH_DRIVER(instantiate(exec, graph));
}

static CUresult launch(CUgraphExec exec)
{
    struct nodes *nodes = nodes_of(GRAPH_EXEC, exec);
    if (!nodes)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < nodes->count; i++) {
        struct block *block = nodes->list[i].block;
        if (!block)
            continue;
        if (!block->charged && !sim_charge(driver_owner(), block->gpu, block->bytes))
            return CUDA_ERROR_OUT_OF_MEMORY;
        block->charged = true;
        block->live = !nodes->list[i].frees;
    }
    return CUDA_SUCCESS;
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

static CUresult graph_destroy(void *graph, enum object_kind kind)
{
    return object_free(kind, graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    WITH_DRIVER(graph_destroy(exec, GRAPH_EXEC));
}

CUresult cuGraphDestroy(CUgraph graph)
{
    WITH_DRIVER(graph_destroy(graph, GRAPH));
}

bool graph_free(CUdeviceptr addr)
{
    struct block *block = block_at(addr);
    bool live = block && block->live;
    if (live)
        block->live = false;
    return live;
}

static CUresult trim(CUdevice dev)
{
    int gpu = driver_gpu(dev);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    for (struct block *block = blocks; block; block = block->next)
        if (block->gpu == gpu && block->charged && !block->live) {
            sim_uncharge(driver_owner(), gpu, block->bytes);
            block->charged = false;
        }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice dev)
{
    WITH_DRIVER(trim(dev));
}
