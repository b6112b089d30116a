/* Calls that fail in every way, between calls that don't: nothing of a failed call may count. */
#include "truth.h"

#include <cuda.h>
#include <pthread.h>

static void *without_context(void *unused)
{
    CUdeviceptr p = 0xdead0000;
    (void)unused;
    MUST_FAIL(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&p, MIB));
    return NULL;
}

int main(void)
{
    CUdeviceptr p = 0xdead0000, kept;
    CUcontext ctx;
    pthread_t thread;
    void *pinned = NULL;
    truth_begin();
    MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc(&p, MIB));
    MUST(cuInit(0));
    MUST_FAIL(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&p, MIB));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    MUST(pthread_create(&thread, NULL, without_context, NULL));
    MUST(pthread_join(thread, NULL));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&p, 0));
    for (int i = 0; i < 5; i++)
        MUST_FAIL(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p, 1ull << 50));
    MUST(cuMemAlloc(&kept, 7 * MIB));
    MUST_FAIL(CUDA_ERROR_OUT_OF_MEMORY, cuMemAllocAsync(&p, 1ull << 50, 0));
    MUST_FAIL(CUDA_ERROR_OUT_OF_MEMORY, cuMemHostAlloc(&pinned, 1ull << 50, 0));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuMemFree(kept + 512)); /* inside of a live block */
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(0xdead0000, 0));
    EXPECT(p == 0xdead0000 && !pinned); /* a failed call writes no result */
    truth_live("device", kept, 7 * MIB);
    truth_made(1, 0, 13);
    truth_ready();
}
