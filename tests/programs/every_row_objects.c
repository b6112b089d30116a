/* every_row: arrays, graphs, code, contexts of other kinds, and functions of the first version. */
#include "every_row.h"

#define FLAT_BYTES (640ull * 480 * 4 * 4)

static void one_array(const char *api, CUresult rc, CUarray array, uint64_t size)
{
    if (gave(api, rc, "alloc", "device", array, size))
        took("cuArrayDestroy", cuArrayDestroy(array), "device", array, size);
}

void arrays(void)
{
    CUDA_ARRAY_DESCRIPTOR flat = {640, 480, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR deep = {64, 32, 16, CU_AD_FORMAT_HALF, 2, 0};
    CUDA_ARRAY3D_DESCRIPTOR mips = {256, 256, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4, 0};
    CUDA_ARRAY3D_DESCRIPTOR sparse = {2048, 2048, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4,
                                      CUDA_ARRAY3D_SPARSE};
    CUarray array;
    CUmipmappedArray mipmapped;
    uint64_t mip_bytes = 4 * (256 * 256 + 128 * 128 + 64 * 64);
    CUresult rc = cuArrayCreate_v2(&array, &flat);
    one_array("cuArrayCreate_v2", rc, array, FLAT_BYTES);
    rc = cuArray3DCreate_v2(&array, &deep);
    one_array("cuArray3DCreate_v2", rc, array, 64 * 32 * 16 * 2 * 2);
    if (gave("cuMipmappedArrayCreate", cuMipmappedArrayCreate(&mipmapped, &mips, 3), "alloc",
             "device", mipmapped, mip_bytes))
        took("cuMipmappedArrayDestroy", cuMipmappedArrayDestroy(mipmapped), "device", mipmapped,
             mip_bytes);
    if (!gave("cuArray3DCreate_v2", cuArray3DCreate_v2(&array, &sparse), "reserve", "virtual",
              array, 2048ull * 2048 * 4))
        return;
    CUarrayMapInfo tile = {.resourceType = CU_RESOURCE_TYPE_ARRAY,
                           .resource.array = array,
                           .subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL,
                           .subresource.sparseLevel.extentWidth = 128,
                           .subresource.sparseLevel.extentHeight = 128,
                           .subresource.sparseLevel.extentDepth = 1,
                           .memOperationType = CU_MEM_OPERATION_TYPE_UNMAP,
                           .memHandleType = CU_MEM_HANDLE_TYPE_GENERIC,
                           .deviceBitMask = 1};
    told("cuMemMapArrayAsync", cuMemMapArrayAsync(&tile, 1, 0), "map", "virtual", 0, UNKNOWN);
    told("cuMemMapArrayAsync_ptsz", cuMemMapArrayAsync_ptsz(&tile, 1, 0), "map", "virtual", 0,
         UNKNOWN);
    took("cuArrayDestroy", cuArrayDestroy(array), "virtual", array, 2048ull * 2048 * 4);
}

static CUgraphNodeParams alloc_params(uint64_t bytes)
{
    CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    params.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params.alloc.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    params.alloc.bytesize = bytes;
    return params;
}

/* A node that allocates by each of the functions, each followed by one that frees. */
static CUdeviceptr memory_nodes(CUgraph graph)
{
    CUgraphNode made, freed;
    CUDA_MEM_ALLOC_NODE_PARAMS plain = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
        .bytesize = 3 * MIB};
    gave("cuGraphAddMemAllocNode", cuGraphAddMemAllocNode(&made, graph, NULL, 0, &plain),
         "reserve", "virtual", plain.dptr, 3 * MIB);
    told("cuGraphAddMemFreeNode", cuGraphAddMemFreeNode(&freed, graph, &made, 1, plain.dptr),
         "graph", "virtual", plain.dptr, UNKNOWN);
    CUgraphNodeParams params = alloc_params(5 * MIB);
    gave("cuGraphAddNode", cuGraphAddNode(&made, graph, NULL, 0, &params), "reserve", "virtual",
         params.alloc.dptr, 5 * MIB);
    CUgraphNodeParams free_params = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE};
    free_params.free.dptr = params.alloc.dptr;
    told("cuGraphAddNode", cuGraphAddNode(&freed, graph, &made, 1, &free_params), "graph",
         "virtual", params.alloc.dptr, UNKNOWN);
    CUgraphNodeParams empty = {.type = CU_GRAPH_NODE_TYPE_EMPTY};
    silent("cuGraphAddNode", cuGraphAddNode(&made, graph, NULL, 0, &empty));
    params = alloc_params(7 * MIB);
    gave("cuGraphAddNode_v2", cuGraphAddNode_v2(&made, graph, NULL, NULL, 0, &params), "reserve",
         "virtual", params.alloc.dptr, 7 * MIB);
    return params.alloc.dptr; /* the last one is freed by hand */
}

static void graph_made(const char *api, CUresult rc, CUgraphExec exec)
{
    if (told(api, rc, "graph", "virtual", exec, UNKNOWN))
        told("cuGraphExecDestroy", cuGraphExecDestroy(exec), "graph", "virtual", exec, UNKNOWN);
}

void graphs(void)
{
    CUgraph graph, plain;
    CUgraphExec exec = NULL;
    CUstream stream;
    CUDA_GRAPH_INSTANTIATE_PARAMS params = {0};
    if (cuGraphCreate(&graph, 0) != CUDA_SUCCESS || cuGraphCreate(&plain, 0) != CUDA_SUCCESS ||
        cuStreamCreate(&stream, 0) != CUDA_SUCCESS)
        unexpected("cuGraphCreate", CUDA_ERROR_UNKNOWN);
    CUdeviceptr kept = memory_nodes(graph);
    CUresult rc = cuGraphInstantiate(&exec, plain, NULL, NULL, 0);
    graph_made("cuGraphInstantiate", rc, exec);
    rc = cuGraphInstantiate_v2(&exec, plain, NULL, NULL, 0);
    graph_made("cuGraphInstantiate_v2", rc, exec);
    rc = cuGraphInstantiateWithParams(&exec, plain, &params);
    graph_made("cuGraphInstantiateWithParams", rc, exec);
    rc = cuGraphInstantiateWithParams_ptsz(&exec, plain, &params);
    graph_made("cuGraphInstantiateWithParams_ptsz", rc, exec);
    told("cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags(&exec, graph, 0), "graph",
         "virtual", exec, UNKNOWN);
    if (cuGraphLaunch(exec, stream) != CUDA_SUCCESS || cuCtxSynchronize() != CUDA_SUCCESS)
        unexpected("cuGraphLaunch", CUDA_ERROR_UNKNOWN);
    took("cuMemFree_v2", cuMemFree_v2(kept), "virtual", kept, 7 * MIB);
    told("cuGraphExecDestroy", cuGraphExecDestroy(exec), "graph", "virtual", exec, UNKNOWN);
    told("cuGraphDestroy", cuGraphDestroy(graph), "graph", "virtual", graph, UNKNOWN);
    told("cuGraphDestroy", cuGraphDestroy(plain), "graph", "virtual", plain, UNKNOWN);
    told("cuDeviceGraphMemTrim", cuDeviceGraphMemTrim(0), "graph", "virtual", 0, UNKNOWN);
    cuStreamDestroy_v2(stream);
}

/* The least that a driver takes for code: text that it compiles. */
static const char CODE[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
                           ".visible .entry nothing()\n{\nret;\n}\n";

static void one_module(const char *api, CUresult rc, CUmodule module)
{
    if (told(api, rc, "module", "device", module, UNKNOWN))
        told("cuModuleUnload", cuModuleUnload(module), "module", "device", module, UNKNOWN);
}

static void one_library(const char *api, CUresult rc, CUlibrary library)
{
    if (told(api, rc, "module", "device", library, UNKNOWN))
        told("cuLibraryUnload", cuLibraryUnload(library), "module", "device", library, UNKNOWN);
}

void modules(void)
{
    char file[] = "/tmp/vramscope-every-row-XXXXXX";
    int fd = mkstemp(file);
    CUmodule module = NULL;
    CUlibrary library = NULL;
    if (fd < 0 || write(fd, CODE, sizeof CODE - 1) < 0)
        unexpected("mkstemp", CUDA_ERROR_OPERATING_SYSTEM);
    close(fd);
    CUresult rc = cuModuleLoad(&module, file);
    one_module("cuModuleLoad", rc, module);
    rc = cuModuleLoadData(&module, CODE);
    one_module("cuModuleLoadData", rc, module);
    rc = cuModuleLoadDataEx(&module, CODE, 0, NULL, NULL);
    one_module("cuModuleLoadDataEx", rc, module);
    rc = cuModuleLoadFatBinary(&module, CODE);
    one_module("cuModuleLoadFatBinary", rc, module);
    rc = cuLibraryLoadData(&library, CODE, NULL, NULL, 0, NULL, NULL, 0);
    one_library("cuLibraryLoadData", rc, library);
    rc = cuLibraryLoadFromFile(&library, file, NULL, NULL, 0, NULL, NULL, 0);
    one_library("cuLibraryLoadFromFile", rc, library);
    unlink(file);
}

static void green(void)
{
    CUdevResource resource;
    CUdevResourceDesc desc;
    CUgreenCtx ctx;
    CUcontext own;
    if (cuDeviceGetDevResource(0, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS ||
        cuDevResourceGenerateDesc(&desc, &resource, 1) != CUDA_SUCCESS)
        return skipped("cuGreenCtxCreate", "no resource to make it of");
    if (!told("cuGreenCtxCreate", cuGreenCtxCreate(&ctx, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM),
              "ctx", "device", ctx, UNKNOWN))
        return;
    told("cuCtxFromGreenCtx", cuCtxFromGreenCtx(&own, ctx), "ctx", "device", own, UNKNOWN);
    told("cuGreenCtxDestroy", cuGreenCtxDestroy(ctx), "ctx", "device", ctx, UNKNOWN);
}

void other_contexts(void)
{
    CUcontext ctx, same;
    if (told("cuCtxCreate", cuCtxCreate(&ctx, 0, 0), "ctx", "device", ctx, UNKNOWN)) {
        silent("cuCtxPopCurrent", cuCtxPopCurrent(&same));
        silent("cuCtxPushCurrent", cuCtxPushCurrent(ctx));
        if (silent("cuCtxAttach", cuCtxAttach(&same, 0)))
            told("cuCtxDetach", cuCtxDetach(ctx), "ctx", "device", ctx, UNKNOWN);
        told("cuCtxDestroy", cuCtxDestroy(ctx), "ctx", "device", ctx, UNKNOWN);
    }
    green();
#ifdef REAL_GPU
    skipped("cuCheckpointProcessCheckpoint", "another process has to call it");
#else
    told("cuCheckpointProcessCheckpoint", cuCheckpointProcessCheckpoint(getpid(), NULL), "ctx",
         "device", getpid(), UNKNOWN);
    told("cuCheckpointProcessRestore", cuCheckpointProcessRestore(getpid(), NULL), "ctx", "device",
         getpid(), UNKNOWN);
#endif
    told("cuCtxSetLimit", cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 16 * MIB), "ctx", "device",
         CU_LIMIT_MALLOC_HEAP_SIZE, 16 * MIB);
}

void first_versions(void)
{
    CUdeviceptr_v1 low;
    unsigned pitch = 0;
    void *pinned;
    CUarray array;
    CUDA_ARRAY_DESCRIPTOR_v1 flat = {640, 480, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR_v1 deep = {64, 32, 16, CU_AD_FORMAT_HALF, 2, 0};
    char *own = aligned_alloc(4096, MIB);
    if (gave("cuMemAlloc", cuMemAlloc(&low, 3 * MIB), "alloc", "device", low, 3 * MIB))
        took("cuMemFree", cuMemFree(low), "device", low, 3 * MIB);
    if (gave("cuMemAllocPitch", cuMemAllocPitch(&low, &pitch, 1000, 30, 4), "alloc", "device", low,
             pitch * 30ull))
        took("cuMemFree", cuMemFree(low), "device", low, pitch * 30ull);
    if (gave("cuMemAllocHost", cuMemAllocHost(&pinned, MIB), "alloc", "host", pinned, MIB))
        took("cuMemFreeHost", cuMemFreeHost(pinned), "host", pinned, MIB);
    if (gave("cuMemHostRegister", cuMemHostRegister(own, MIB, 0), "alloc", "host", own, MIB))
        took("cuMemHostUnregister", cuMemHostUnregister(own), "host", own, MIB);
    CUresult rc = cuArrayCreate(&array, &flat);
    one_array("cuArrayCreate", rc, array, FLAT_BYTES);
    rc = cuArray3DCreate(&array, &deep);
    one_array("cuArray3DCreate", rc, array, 64 * 32 * 16 * 2 * 2);
    free(own);
}
