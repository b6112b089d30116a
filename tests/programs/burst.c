/* burst N [sync|async]: N pairs as fast as one thread can, in one go. */
#include "truth.h"

#include <cuda.h>

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
    struct truth_timer timer = truth_timer_start();
    for (long i = 0; i < pairs; i++) {
        MUST(async ? cuMemAllocAsync(&p, 65536, 0) : cuMemAlloc(&p, 65536));
        MUST(async ? cuMemFreeAsync(p, 0) : cuMemFree(p));
    }
    truth_timer_stop(&timer);
    truth_made(pairs, pairs, 0);
    truth_time(&timer, pairs);
    truth_ready();
}
