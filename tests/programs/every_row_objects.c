/* every_row: arrays, graphs, code. */
#include "every_row.h"

#define TILE 128 /* elements of 4 bytes in a row of a sparse array's tile, and rows */

static void refused_array(void)
{
    CUDA_ARRAY3D_DESCRIPTOR huge = {16384, 16384, 16384, CU_AD_FORMAT_FLOAT, 4, 0};
    CUarray array = (CUarray)GARBAGE;
    refused(cuArray3DCreate_v2, (&array, &huge), 2, "device", 0, array, 16ull << 42);
}

static CUarrayMapInfo tile_of(CUarray array, CUmemGenericAllocationHandle memory)
{
    return (CUarrayMapInfo){.resourceType = CU_RESOURCE_TYPE_ARRAY,
                            .resource.array = array,
                            .subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL,
                            .subresource.sparseLevel.extentWidth = TILE,
                            .subresource.sparseLevel.extentHeight = TILE,
                            .subresource.sparseLevel.extentDepth = 1,
                            .memOperationType = CU_MEM_OPERATION_TYPE_MAP,
                            .memHandleType = CU_MEM_HANDLE_TYPE_GENERIC,
                            .memHandle.memHandle = memory,
                            .deviceBitMask = 1};
}

static void sparse_array(void)
{
    CUDA_ARRAY3D_DESCRIPTOR desc = {2048, 2048, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4,
                                    CUDA_ARRAY3D_SPARSE};
    CUmemAllocationProp prop = PINNED_ON_0;
    CUmemGenericAllocationHandle memory;
    CUarray array;
    uint64_t bytes = 2048ull * 2048 * 4;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    prop.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL;
    if (!gave(cuArray3DCreate_v2, (&array, &desc), "reserve", "virtual", array, bytes))
        return;
    if (gave(cuMemCreate, (&memory, 2 * MIB, &prop, 0), "alloc", "device", memory, 2 * MIB)) {
        CUarrayMapInfo tile = tile_of(array, memory);
        told(cuMemMapArrayAsync, (&tile, 1, 0), "map", "virtual", 0, UNKNOWN);
        tile.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP;
        tile.memHandle.memHandle = 0;
        told(cuMemMapArrayAsync_ptsz, (&tile, 1, 0), "map", "virtual", 0, UNKNOWN);
        silent(cuCtxSynchronize, ());
        took(cuMemRelease, (memory), "device", memory, 2 * MIB);
    }
    took(cuArrayDestroy, (array), "virtual", array, bytes);
}

void arrays(void)
{
    CUDA_ARRAY_DESCRIPTOR flat = {640, 480, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR deep = {64, 32, 16, CU_AD_FORMAT_HALF, 2, 0};
    CUDA_ARRAY3D_DESCRIPTOR mips = {256, 256, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4, 0};
    CUDA_ARRAY3D_DESCRIPTOR later = {512, 512, 0, CU_AD_FORMAT_FLOAT, 1,
                                     CUDA_ARRAY3D_DEFERRED_MAPPING};
    CUarray array;
    CUmipmappedArray mipmapped;
    uint64_t flat_bytes = 640 * 480 * 4 * 4, deep_bytes = 64 * 32 * 16 * 2 * 2;
    uint64_t mip_bytes = 4 * (256 * 256 + 128 * 128 + 64 * 64), later_bytes = 512 * 512 * 4;
    if (gave(cuArrayCreate_v2, (&array, &flat), "alloc", "device", array, flat_bytes))
        took(cuArrayDestroy, (array), "device", array, flat_bytes);
    if (gave(cuArray3DCreate_v2, (&array, &deep), "alloc", "device", array, deep_bytes))
        took(cuArrayDestroy, (array), "device", array, deep_bytes);
    if (gave(cuMipmappedArrayCreate, (&mipmapped, &mips, 3), "alloc", "device", mipmapped,
             mip_bytes))
        took(cuMipmappedArrayDestroy, (mipmapped), "device", mipmapped, mip_bytes);
    if (gave(cuArray3DCreate_v2, (&array, &later), "reserve", "virtual", array, later_bytes))
        took(cuArrayDestroy, (array), "virtual", array, later_bytes);
    sparse_array();
    refused_array();
}

static CUgraphNodeParams alloc_params(uint64_t bytes)
{
    CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    params.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params.alloc.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    params.alloc.bytesize = bytes;
    return params;
}

/* A node that allocates by each of the functions; those of the first two are freed by nodes, and
 * the addresses of the others are left to be freed by hand. */
static void memory_nodes(CUgraph graph, CUdeviceptr kept[2])
{
    CUgraphNode made, freed;
    CUDA_MEM_ALLOC_NODE_PARAMS plain = {.poolProps = POOL_ON_0, .bytesize = 3 * MIB};
    CUgraphNodeParams params = alloc_params(5 * MIB), empty = {.type = CU_GRAPH_NODE_TYPE_EMPTY};
    plain.poolProps.handleTypes = CU_MEM_HANDLE_TYPE_NONE;
    if (gave(cuGraphAddMemAllocNode, (&made, graph, NULL, 0, &plain), "reserve", "virtual",
             plain.dptr, 3 * MIB))
        told(cuGraphAddMemFreeNode, (&freed, graph, &made, 1, plain.dptr), "graph", "virtual",
             plain.dptr, UNKNOWN);
    if (gave(cuGraphAddNode, (&made, graph, NULL, 0, &params), "reserve", "virtual",
             params.alloc.dptr, 5 * MIB)) {
        CUgraphNodeParams gone = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE};
        gone.free.dptr = params.alloc.dptr;
        told(cuGraphAddNode, (&freed, graph, &made, 1, &gone), "graph", "virtual",
             params.alloc.dptr, UNKNOWN);
    }
    silent(cuGraphAddNode, (&made, graph, NULL, 0, &empty));
    params = alloc_params(7 * MIB);
    if (gave(cuGraphAddNode_v2, (&made, graph, NULL, NULL, 0, &params), "reserve", "virtual",
             params.alloc.dptr, 7 * MIB))
        kept[0] = params.alloc.dptr;
#if CUDA_VERSION >= 13040
    params = alloc_params(9 * MIB);
    if (gave(cuGraphAddNode_v3, (&made, graph, NULL, NULL, 0, &params), "reserve", "virtual",
             params.alloc.dptr, 9 * MIB))
        kept[1] = params.alloc.dptr;
#else
    skipped("cuGraphAddNode_v3", "the header at hand does not declare it");
#endif
}

static void ways_to_instantiate(CUgraph graph)
{
    CUgraphExec exec = NULL;
    CUDA_GRAPH_INSTANTIATE_PARAMS params = {0};
    if (told(cuGraphInstantiate, (&exec, graph, NULL, NULL, 0), "graph", "virtual", exec, UNKNOWN))
        told(cuGraphExecDestroy, (exec), "graph", "virtual", exec, UNKNOWN);
    if (told(cuGraphInstantiate_v2, (&exec, graph, NULL, NULL, 0), "graph", "virtual", exec,
             UNKNOWN))
        told(cuGraphExecDestroy, (exec), "graph", "virtual", exec, UNKNOWN);
    if (told(cuGraphInstantiateWithParams, (&exec, graph, &params), "graph", "virtual", exec,
             UNKNOWN))
        told(cuGraphExecDestroy, (exec), "graph", "virtual", exec, UNKNOWN);
    if (told(cuGraphInstantiateWithParams_ptsz, (&exec, graph, &params), "graph", "virtual", exec,
             UNKNOWN))
        told(cuGraphExecDestroy, (exec), "graph", "virtual", exec, UNKNOWN);
}

/* Launched once: what no node frees is live afterwards, and is freed like any block. */
static void launch(CUgraph graph, const CUdeviceptr kept[2])
{
    CUgraphExec exec;
    CUstream stream;
    if (!told(cuGraphInstantiateWithFlags, (&exec, graph, 0), "graph", "virtual", exec, UNKNOWN))
        return;
    EXPECT(helper(cuStreamCreate, (&stream, 0)) == CUDA_SUCCESS);
    EXPECT(helper(cuGraphLaunch, (exec, stream)) == CUDA_SUCCESS);
    EXPECT(helper(cuStreamSynchronize, (stream)) == CUDA_SUCCESS);
    if (kept[0])
        took(cuMemFree_v2, (kept[0]), "virtual", kept[0], 7 * MIB);
    if (kept[1])
        took(cuMemFreeAsync, (kept[1], stream), "virtual", kept[1], 9 * MIB);
    EXPECT(helper(cuStreamSynchronize, (stream)) == CUDA_SUCCESS);
    told(cuGraphExecDestroy, (exec), "graph", "virtual", exec, UNKNOWN);
    EXPECT(helper(cuStreamDestroy_v2, (stream)) == CUDA_SUCCESS);
}

/* A stream that is recorded into a graph, each way. */
static void captures(CUgraph into)
{
    CUstream stream = NULL;
    CUgraph made[2] = {NULL, NULL};
    EXPECT(helper(cuStreamCreate, (&stream, 0)) == CUDA_SUCCESS);
    if (told(cuStreamBeginCapture_v2, (stream, CU_STREAM_CAPTURE_MODE_RELAXED), "capture", "virtual",
             stream, UNKNOWN))
        told(cuStreamEndCapture, (stream, &made[0]), "captured", "virtual", stream, UNKNOWN);
    if (told(cuStreamBeginCapture_v2_ptsz, (stream, CU_STREAM_CAPTURE_MODE_RELAXED), "capture",
             "virtual", stream, UNKNOWN))
        told(cuStreamEndCapture_ptsz, (stream, &made[1]), "captured", "virtual", stream, UNKNOWN);
    for (int i = 0; i < 2; i++)
        if (made[i])
            told(cuGraphDestroy, (made[i]), "graph", "virtual", made[i], UNKNOWN);
    if (told(cuStreamBeginCaptureToGraph, (stream, into, NULL, NULL, 0,
                                           CU_STREAM_CAPTURE_MODE_RELAXED),
             "capture", "virtual", stream, UNKNOWN))
        told(cuStreamEndCapture, (stream, &made[0]), "captured", "virtual", stream, UNKNOWN);
    if (told(cuStreamBeginCaptureToGraph_ptsz, (stream, into, NULL, NULL, 0,
                                                CU_STREAM_CAPTURE_MODE_RELAXED),
             "capture", "virtual", stream, UNKNOWN))
        told(cuStreamEndCapture, (stream, &made[0]), "captured", "virtual", stream, UNKNOWN);
    refused(cuStreamEndCapture, (stream, &made[0]), CUDA_ERROR_ILLEGAL_STATE, "virtual",
            (uint64_t)stream, GARBAGE, UNKNOWN);
    EXPECT(helper(cuStreamDestroy_v2, (stream)) == CUDA_SUCCESS);
}

void graphs(void)
{
    CUgraph graph, plain;
    CUdeviceptr kept[2] = {0, 0};
    EXPECT(helper(cuGraphCreate, (&graph, 0)) == CUDA_SUCCESS);
    EXPECT(helper(cuGraphCreate, (&plain, 0)) == CUDA_SUCCESS);
    memory_nodes(graph, kept);
    ways_to_instantiate(plain);
    captures(plain);
    launch(graph, kept);
    told(cuGraphDestroy, (graph), "graph", "virtual", graph, UNKNOWN);
    told(cuGraphDestroy, (plain), "graph", "virtual", plain, UNKNOWN);
    told(cuDeviceGraphMemTrim, (0), "graph", "virtual", 0, UNKNOWN);
}

/* The least that a driver takes for code: text that it compiles. */
static const char CODE[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
                           ".visible .global .align 4 .b8 table[4096];\n"
                           ".visible .entry nothing()\n{\nret;\n}\n";

static void unload(CUmodule module)
{
    told(cuModuleUnload, (module), "module", "device", module, UNKNOWN);
}

static void parts_of_library(CUlibrary library)
{
    CUkernel kernel = NULL;
    CUmodule module = NULL;
    CUfunction function = NULL;
    CUdeviceptr table = 0;
    size_t bytes = 0;
    told(cuLibraryGetGlobal, (&table, &bytes, library, "table"), "module", "device", table, UNKNOWN);
    told(cuLibraryGetModule, (&module, library), "module", "device", module, UNKNOWN);
    if (told(cuLibraryGetKernel, (&kernel, library, "nothing"), "module", "device", kernel, UNKNOWN))
        silent(cuKernelGetFunction, (&function, kernel));
}

static void parts_of_module(CUmodule module)
{
    CUfunction function = NULL;
    CUdeviceptr table = 0;
    size_t bytes = 0;
    told(cuModuleGetGlobal_v2, (&table, &bytes, module, "table"), "module", "device", table, UNKNOWN);
    if (told(cuModuleGetFunction, (&function, module, "nothing"), "module", "device", function,
             UNKNOWN))
        told(cuFuncLoad, (function), "module", "device", function, UNKNOWN);
}

static void libraries(const char *file)
{
    CUlibrary library = NULL;
    if (told(cuLibraryLoadData, (&library, CODE, NULL, NULL, 0, NULL, NULL, 0), "module", "device",
             library, UNKNOWN)) {
        parts_of_library(library);
        told(cuLibraryUnload, (library), "module", "device", library, UNKNOWN);
    }
    if (told(cuLibraryLoadFromFile, (&library, file, NULL, NULL, 0, NULL, NULL, 0), "module",
             "device", library, UNKNOWN))
        told(cuLibraryUnload, (library), "module", "device", library, UNKNOWN);
}

void modules(void)
{
    char file[] = "/tmp/vramscope-every-row-XXXXXX";
    int fd = mkstemp(file);
    CUmodule module = NULL;
    EXPECT(fd >= 0 && write(fd, CODE, sizeof CODE - 1) == sizeof CODE - 1);
    close(fd);
    if (told(cuModuleLoad, (&module, file), "module", "device", module, UNKNOWN))
        unload(module);
    if (told(cuModuleLoadData, (&module, CODE), "module", "device", module, UNKNOWN)) {
        parts_of_module(module);
        unload(module);
    }
    if (told(cuModuleLoadDataEx, (&module, CODE, 0, NULL, NULL), "module", "device", module,
             UNKNOWN))
        unload(module);
    if (told(cuModuleLoadFatBinary, (&module, CODE), "module", "device", module, UNKNOWN))
        unload(module);
    libraries(file);
    unlink(file);
    module = (CUmodule)GARBAGE;
    refused(cuModuleLoad, (&module, file), CUDA_ERROR_FILE_NOT_FOUND, "device", 0, module, UNKNOWN);
}
