/* layers [DEVICE]: takes device memory in every layer, one order a line on stdin:
 *
 *   torch BYTES | untorch N (the N-th block that torch gave) | empty_cache
 *   own BYTES | pitch BYTES | myop BYTES (libmyop.so) | array BYTES
 *   library | function (of it) | unload | context (a second one) | limit MIB (the heap of kernels)
 *   pool BYTES | unpool N | keep BYTES (the pool's release threshold) | trim BYTES | read (its size)
 *   managed BYTES | host BYTES | capture | captured
 *   refused-torch BYTES | refused-own BYTES | refused-host BYTES | refused-addresses BYTES
 *
 * After each order it prints what PyTorch holds, and READY. */
#include "truth.h"

#include "c10.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>

enum { ROOM = 4096 };

static void *tensors[ROOM];
static CUdeviceptr pooled[ROOM];
static long tensor_count, pooled_count;
static int device;
static CUlibrary library;
static CUstream stream;

static const char CODE[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
                           ".visible .entry nothing()\n{\nret;\n}\n";

static int is(const char *line, const char *order, long *argument)
{
    size_t length = strlen(order);
    if (strncmp(line, order, length) || (line[length] && line[length] != ' '))
        return 0;
    *argument = line[length] ? atol(line + length) : 0;
    return 1;
}

static int torch(const char *line)
{
    long n;
    if (is(line, "torch", &n))
        EXPECT((tensors[tensor_count++] = sim_torch_alloc((size_t)n, device)) != NULL);
    else if (is(line, "untorch", &n))
        sim_torch_free(tensors[n]);
    else if (is(line, "empty_cache", &n))
        sim_torch_empty_cache();
    else
        return 0;
    return 1;
}

static void array(long bytes)
{
    CUarray array;
    CUDA_ARRAY_DESCRIPTOR shape = {.Width = (size_t)bytes / 1024, .Height = 1024,
                                   .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 1};
    MUST(cuArrayCreate_v2(&array, &shape));
}

/* The path of a file in the program's own folder. */
static const char *beside(const char *name)
{
    static char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 64);
    EXPECT(length > 0);
    path[length] = 0;
    strcpy(strrchr(path, '/') + 1, name);
    return path;
}

static void in_library(long bytes)
{
    static void (*grow)(unsigned long long);
    if (!grow)
        grow = (void (*)(unsigned long long))dlsym(dlopen(beside("libmyop.so"), RTLD_NOW), "myop_grow");
    EXPECT(grow != NULL);
    grow((unsigned long long)bytes);
}

static int memory(const char *line)
{
    CUdeviceptr block;
    size_t pitch;
    void *host;
    long n;
    if (is(line, "own", &n))
        MUST(cuMemAlloc_v2(&block, (size_t)n));
    else if (is(line, "pitch", &n))
        MUST(cuMemAllocPitch_v2(&block, &pitch, (size_t)n / 1024, 1024, 4));
    else if (is(line, "myop", &n))
        in_library(n);
    else if (is(line, "array", &n))
        array(n);
    else if (is(line, "managed", &n))
        MUST(cuMemAllocManaged(&block, (size_t)n, CU_MEM_ATTACH_GLOBAL));
    else if (is(line, "host", &n))
        MUST(cuMemHostAlloc(&host, (size_t)n, 0));
    else
        return 0;
    return 1;
}

static int pool(const char *line)
{
    CUmemoryPool pool;
    cuuint64_t bytes;
    long n;
    MUST(cuDeviceGetDefaultMemPool(&pool, device));
    if (is(line, "pool", &n)) {
        MUST(cuMemAllocAsync(&pooled[pooled_count++], (size_t)n, 0));
    } else if (is(line, "unpool", &n)) {
        MUST(cuMemFreeAsync(pooled[n], 0));
        MUST(cuStreamSynchronize(0));
    } else if (is(line, "keep", &n)) {
        bytes = (cuuint64_t)n;
        MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes));
    } else if (is(line, "trim", &n)) {
        MUST(cuMemPoolTrimTo(pool, (size_t)n));
    } else if (is(line, "read", &n)) {
        MUST(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes));
    } else {
        return 0;
    }
    return 1;
}

static int other(const char *line)
{
    CUcontext ctx;
    CUkernel kernel;
    CUgraph graph;
    long n;
    if (is(line, "library", &n))
        MUST(cuLibraryLoadData(&library, CODE, NULL, NULL, 0, NULL, NULL, 0));
    else if (is(line, "function", &n))
        MUST(cuLibraryGetKernel(&kernel, library, "nothing"));
    else if (is(line, "unload", &n))
        MUST(cuLibraryUnload(library));
    else if (is(line, "limit", &n))
        MUST(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, (size_t)n * MIB));
    else if (is(line, "capture", &n))
        MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    else if (is(line, "captured", &n))
        MUST(cuStreamEndCapture(stream, &graph));
    else if (is(line, "context", &n)) {
        MUST(cuCtxCreate(&ctx, NULL, 0, device)); /* cuda.h 13 names _v4 so */
        MUST(cuCtxPopCurrent_v2(&ctx));
    } else {
        return 0;
    }
    return 1;
}

/* What there is not enough memory for. */
static int refused(const char *line)
{
    CUdeviceptr block;
    void *host;
    long n;
    if (is(line, "refused-torch", &n))
        EXPECT(!sim_torch_alloc((size_t)n, device));
    else if (is(line, "refused-own", &n))
        MUST_FAIL(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&block, (size_t)n));
    else if (is(line, "refused-host", &n))
        MUST_FAIL(CUDA_ERROR_OUT_OF_MEMORY, cuMemHostAlloc(&host, (size_t)n, 0));
    else if (is(line, "refused-addresses", &n))
        MUST_FAIL(CUDA_ERROR_OUT_OF_MEMORY, cuMemAddressReserve(&block, (size_t)n, 0, 0, 0));
    else
        return 0;
    return 1;
}

int main(int argc, char **argv)
{
    CUcontext ctx;
    char line[256];
    device = (int)truth_arg(argc, argv, 1, 0);
    truth_begin();
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, device));
    MUST(cuCtxSetCurrent(ctx));
    MUST(cuStreamCreate(&stream, 0));
    for (;;) {
        printf("TORCH allocated=%zu reserved=%zu peak=%zu\n", sim_torch_allocated(device),
               sim_torch_reserved(device), sim_torch_peak(device));
        printf("READY\n");
        truth_next_line(line, sizeof line);
        EXPECT(torch(line) || memory(line) || other(line) || refused(line) || !line[0] || pool(line));
    }
}
