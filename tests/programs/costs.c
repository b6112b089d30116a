/* What each kind of thing takes of a GPU on the simulated driver: costs, or costs checkpoint PID.
 * `STEP name bytes=n` says what this process must be charged with now, beyond its context; then
 * READY. With `checkpoint` the process PID is moved out of the GPU at the first READY, and is back
 * at the second. */
#define __CUDA_API_VERSION_INTERNAL
#include "truth.h"

#include <cuda.h>
#include <stdint.h>

#define KIB 1024ull
#define NONE ((void *)0xdead0000ull)

static const char CODE[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
                           ".global .align 4 .b8 first[100];\n.global .align 4 .b8 table[4096];\n";

static void step(const char *name, uint64_t bytes)
{
    printf("STEP %s bytes=%llu\n", name, (unsigned long long)bytes);
    truth_ready();
}

static void before_init(void)
{
    CUarray array = NULL;
    CUmodule module = NULL;
    CUipcMemHandle handle;
    CUDA_ARRAY_DESCRIPTOR desc = {64, 64, CU_AD_FORMAT_FLOAT, 1};
    MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuArrayCreate_v2(&array, &desc));
    MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuModuleLoadData(&module, CODE));
    MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuIpcGetMemHandle(&handle, 1));
    MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGraphMemTrim(0));
    MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1));
}

static void unknown_handles(void)
{
    CUdeviceptr p;
    CUcontext ctx;
    CUgraphExec exec;
    CUipcMemHandle handle = {{0}};
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuArrayDestroy(NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuMipmappedArrayDestroy(NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload(NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuLibraryUnload(NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuDestroyExternalMemory(NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuGreenCtxDestroy(NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuGraphDestroy(NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuCtxFromGreenCtx(&ctx, NONE));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiateWithFlags(&exec, NONE, 0));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuMemFree(0xdead0000u));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(0xdead0000u));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuMulticastUnbind(0xdead0000u, 0, 0, 2 * MIB));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE,
              cuIpcOpenMemHandle_v2(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    MUST_FAIL(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint(getpid(), NULL));
}

/* 641 x 480 elements of 16 bytes are more than 75 times 64 KiB, and less than 76 times. */
static void arrays(void)
{
    CUDA_ARRAY_DESCRIPTOR flat = {641, 480, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR mips = {1024, 1024, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4, 0};
    CUDA_ARRAY3D_DESCRIPTOR sparse = {2048, 2048, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4,
                                      CUDA_ARRAY3D_SPARSE};
    CUarray array, empty;
    CUmipmappedArray mipmapped;
    MUST(cuArrayCreate_v2(&array, &flat));
    step("array", 76 * 64 * KIB);
    /* 4 MiB, a quarter of that for the next level, and so on to one element of 4 bytes. */
    MUST(cuMipmappedArrayCreate(&mipmapped, &mips, 99));
    step("mipmapped", (76 + 86) * 64 * KIB);
    MUST(cuArray3DCreate_v2(&empty, &sparse));
    step("sparse", (76 + 86) * 64 * KIB);
    MUST(cuArrayDestroy(array));
    MUST(cuArrayDestroy(empty));
    MUST(cuMipmappedArrayDestroy(mipmapped));
    step("arrays-destroyed", 0);
}

static void code(void)
{
    CUmodule module;
    CUlibrary library;
    CUdeviceptr first, table;
    size_t bytes;
    MUST(cuModuleLoadData(&module, CODE));
    MUST(cuLibraryLoadData(&library, CODE, NULL, NULL, 0, NULL, NULL, 0));
    MUST(cuModuleGetGlobal_v2(&first, &bytes, module, "first"));
    EXPECT(bytes == 100);
    MUST(cuModuleGetGlobal_v2(&table, &bytes, module, "table"));
    EXPECT(bytes == 4096 && table > first);
    MUST(cuLibraryGetGlobal(&table, NULL, library, "table"));
    MUST_FAIL(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal_v2(&table, &bytes, module, "tables"));
    MUST_FAIL(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&module, "no code"));
    step("code", 4 * MIB);
    MUST(cuModuleUnload(module));
    MUST(cuLibraryUnload(library));
    step("code-unloaded", 0);
}

static uint64_t graph_memory(CUgraphMem_attribute attribute)
{
    cuuint64_t bytes;
    MUST(cuDeviceGetGraphMemAttribute(0, attribute, &bytes));
    return bytes;
}

static void graphs(void)
{
    CUgraph graph;
    CUgraphExec exec, second;
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS params = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}},
        .bytesize = 6 * MIB};
    MUST(cuGraphCreate(&graph, 0));
    MUST(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    MUST_FAIL(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiateWithFlags(&second, graph, 0));
    step("graph", 0);
    MUST(cuGraphLaunch(exec, NULL));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(exec, NULL)); /* its memory is in use */
    MUST(cuDeviceGraphMemTrim(0));
    EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) == 6 * MIB);
    step("graph-launched", 6 * MIB);
    MUST(cuMemFree_v2(params.dptr));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(params.dptr));
    MUST(cuGraphExecDestroy(exec));
    MUST(cuGraphDestroy(graph));
    EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) == 0);
    EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == 6 * MIB);
    step("graph-destroyed", 6 * MIB);
    MUST(cuDeviceGraphMemTrim(0));
    step("graph-trimmed", 0);
}

static void of_contexts(void)
{
    CUcontext ctx;
    CUarray array;
    CUmodule module;
    CUDA_ARRAY_DESCRIPTOR flat = {1024, 1024, CU_AD_FORMAT_FLOAT, 1};
    size_t heap;
    MUST(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 40 * MIB));
    MUST(cuCtxGetLimit(&heap, CU_LIMIT_MALLOC_HEAP_SIZE));
    EXPECT(heap == 40 * MIB);
    step("heap", 32 * MIB);
    MUST(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB));
    MUST(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2048));
    step("stacks", 1024 * 132 * 2048ull);
    MUST(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024));
    MUST(cuCtxCreate_v2(&ctx, 0, 0));
    MUST(cuArrayCreate_v2(&array, &flat));
    MUST(cuModuleLoadData(&module, CODE));
    MUST(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 40 * MIB));
    MUST(cuCtxDestroy_v2(ctx));
    MUST_FAIL(CUDA_ERROR_INVALID_HANDLE, cuArrayDestroy(array));
    step("context-destroyed", 0);
}

static void green(void)
{
    CUdevResource resource;
    CUdevResourceDesc desc;
    CUgreenCtx ctx;
    CUcontext one, same;
    MUST(cuDeviceGetDevResource(0, &resource, CU_DEV_RESOURCE_TYPE_SM));
    MUST(cuDevResourceGenerateDesc(&desc, &resource, 1));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuGreenCtxCreate(&ctx, desc, 0, 0));
    MUST(cuGreenCtxCreate(&ctx, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    MUST(cuCtxFromGreenCtx(&one, ctx));
    MUST(cuCtxFromGreenCtx(&same, ctx));
    EXPECT(one == same);
    step("green", 4 * MIB);
    MUST(cuGreenCtxDestroy(ctx));
    step("green-destroyed", 0);
}

static void first_version(void)
{
    CUdeviceptr_v1 low, again;
    MUST(cuMemAlloc(&low, 3 * MIB));
    step("low", 4 * MIB);
    MUST(cuMemFree(low));
    MUST(cuMemAlloc(&again, 3 * MIB));
    EXPECT(again == low);
    MUST(cuMemFree_v2(again));
    step("low-freed", 0);
}

/* The block's pages are the GPU's as long as the descriptor is open, and nobody's charge. */
static void range(void)
{
    CUdeviceptr block;
    int fd;
    MUST(cuMemAlloc_v2(&block, 4 * MIB));
    MUST(cuMemGetHandleForAddressRange(&fd, block, 4 * MIB,
                                       CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    step("range", 4 * MIB);
    MUST(cuMemFree_v2(block));
    step("range-freed", 0);
    close(fd);
    step("range-closed", 0);
}

static void checkpoint(int pid)
{
    CUprocessState state;
    MUST(cuInit(0));
    MUST(cuCheckpointProcessLock(pid, NULL));
    MUST(cuCheckpointProcessCheckpoint(pid, NULL));
    MUST_FAIL(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint(pid, NULL));
    truth_ready();
    MUST(cuCheckpointProcessRestore(pid, NULL));
    MUST(cuCheckpointProcessUnlock(pid, NULL));
    MUST(cuCheckpointProcessGetState(pid, &state));
    EXPECT(state == CU_PROCESS_STATE_RUNNING);
    truth_ready();
}

int main(int argc, char **argv)
{
    CUcontext ctx;
    truth_begin();
    if (argc == 3 && !strcmp(argv[1], "checkpoint")) {
        checkpoint(atoi(argv[2]));
        return 0;
    }
    before_init();
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    unknown_handles();
    arrays();
    code();
    graphs();
    of_contexts();
    green();
    first_version();
    range();
    return 0;
}
