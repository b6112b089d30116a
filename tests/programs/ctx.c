/* Contexts and what goes with them: two of its own, and the primary one retained twice, released
 * and reset. Each READY follows a step; LIVE lists what is live then. */
#include "truth.h"

#include <cuda.h>

#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
CUresult cuDevicePrimaryCtxRelease(CUdevice dev);
CUresult cuDevicePrimaryCtxReset(CUdevice dev);

static CUdeviceptr alloc(size_t bytes)
{
    CUdeviceptr p;
    MUST(cuMemAlloc(&p, bytes));
    return p;
}

int main(void)
{
    CUcontext one, two, primary, popped;
    CUdeviceptr in_one, in_two, in_primary, pooled;
    void *pinned;
    truth_begin();
    MUST(cuInit(0));
    MUST(cuCtxCreate(&one, NULL, 0, 0));
    in_one = alloc(10 * MIB);
    MUST(cuMemHostAlloc(&pinned, 3 * MIB, 0));
    MUST(cuMemAllocAsync(&pooled, 5 * MIB, 0)); /* a pool outlives the context */
    MUST(cuCtxCreate(&two, NULL, 0, 0));        /* current on top of the first */
    in_two = alloc(12 * MIB);
    truth_live("device", in_one, 10 * MIB);
    truth_live("host", (unsigned long long)pinned, 3 * MIB);
    truth_live("pool", pooled, 5 * MIB);
    truth_live("device", in_two, 12 * MIB);
    truth_made(4, 0, 0);
    truth_ready();

    MUST(cuCtxPopCurrent(&popped));
    MUST(cuCtxDestroy(one)); /* frees two blocks without a call for either */
    MUST(cuCtxSetCurrent(two));
    MUST_FAIL(CUDA_ERROR_INVALID_VALUE, cuMemFree(in_one));
    truth_live("pool", pooled, 5 * MIB);
    truth_live("device", in_two, 12 * MIB);
    truth_made(4, 0, 1);
    truth_ready();

    for (int i = 0; i < 2; i++)
        MUST(cuDevicePrimaryCtxRetain(&primary, 0));
    MUST(cuCtxSetCurrent(primary));
    in_primary = alloc(14 * MIB);
    MUST(cuDevicePrimaryCtxRelease(0)); /* one of two: nothing goes */
    truth_live("pool", pooled, 5 * MIB);
    truth_live("device", in_two, 12 * MIB);
    truth_live("device", in_primary, 14 * MIB);
    truth_made(5, 0, 1);
    truth_ready();

    MUST(cuDevicePrimaryCtxReset_v2(0)); /* goes, though it is still retained; the retains stay */
    MUST_FAIL(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuMemAlloc(&in_primary, MIB));
    MUST(cuDevicePrimaryCtxRetain(&primary, 0));
    MUST(cuCtxSetCurrent(primary));
    in_primary = alloc(14 * MIB);
    MUST(cuMemFree(pooled));
    truth_live("device", in_two, 12 * MIB);
    truth_live("device", in_primary, 14 * MIB);
    truth_made(6, 1, 2);
    truth_ready();

    MUST(cuDevicePrimaryCtxRelease_v2(0));
    MUST(cuDevicePrimaryCtxRelease(0)); /* the last one */
    truth_live("device", in_two, 12 * MIB);
    truth_made(6, 1, 2);
    truth_ready();

    for (int i = 0; i < 2; i++)
        MUST(cuDevicePrimaryCtxRetain(&primary, 0));
    MUST(cuCtxSetCurrent(primary));
    in_primary = alloc(18 * MIB);
    MUST(cuDevicePrimaryCtxReset(0)); /* goes, and one retain with it */
    MUST(cuDevicePrimaryCtxRetain(&primary, 0));
    MUST(cuCtxSetCurrent(primary));
    in_primary = alloc(20 * MIB);
    MUST(cuDevicePrimaryCtxRelease(0));
    truth_live("device", in_two, 12 * MIB);
    truth_live("device", in_primary, 20 * MIB);
    truth_made(8, 1, 2);
    truth_ready();

    MUST(cuDevicePrimaryCtxRelease(0)); /* the last one already */
    MUST_FAIL(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
    truth_live("device", in_two, 12 * MIB);
    truth_made(8, 1, 3);
    truth_ready();
}
