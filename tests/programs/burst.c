/* burst N [sync|async]: N pairs as fast as one thread can, in one go. */
#include "truth.h"

#include <cuda.h>
#include <time.h>

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    long pairs = truth_arg(argc, argv, 1, 100000);
    int async = argc > 2 && !strcmp(argv[2], "async");
    CUcontext ctx;
    CUdeviceptr p;
    truth_begin();
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    double begin = now_ns();
    for (long i = 0; i < pairs; i++) {
        MUST(async ? cuMemAllocAsync(&p, 65536, 0) : cuMemAlloc(&p, 65536));
        MUST(async ? cuMemFreeAsync(p, 0) : cuMemFree(p));
    }
    double ns = now_ns() - begin;
    truth_made(pairs, pairs, 0);
    printf("TIME ns_per_pair=%.0f\n", pairs ? ns / (double)pairs : 0.0);
    truth_ready();
}
