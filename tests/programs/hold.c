/* hold [BYTES [COUNT [DEVICE [WAIT_MS]]]]: allocates COUNT blocks, after a wait as of a program that
 * loads its framework first, and holds them, and takes orders on stdin:
 * `alloc BYTES`, `free` (the block allocated last), `exec BYTES` (executes itself anew, to hold one
 * block), anything else does nothing. At the end of its input it ends without freeing. The program for late attach, kill -9 and reused pids. */
#include "truth.h"

#include <cuda.h>

static CUdeviceptr blocks[65536];
static unsigned long long sizes[65536];
static long held, allocs, frees, failed;

static void alloc(unsigned long long bytes)
{
    if (cuMemAlloc(&blocks[held], bytes) != CUDA_SUCCESS) {
        failed++;
        return;
    }
    sizes[held++] = bytes;
    allocs++;
}

static void report(void)
{
    for (long i = 0; i < held; i++)
        truth_live("device", blocks[i], sizes[i]);
    truth_made(allocs, frees, failed);
    printf("READY\n");
}

int main(int argc, char **argv)
{
    unsigned long long bytes = (unsigned long long)truth_arg(argc, argv, 1, 16 * MIB);
    long count = truth_arg(argc, argv, 2, 1);
    CUcontext ctx;
    char line[256];
    truth_begin();
    usleep((useconds_t)truth_arg(argc, argv, 4, 0) * 1000);
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, (CUdevice)truth_arg(argc, argv, 3, 0)));
    MUST(cuCtxSetCurrent(ctx));
    for (long i = 0; i < count; i++)
        alloc(bytes);
    for (;;) {
        report();
        truth_next_line(line, sizeof line);
        if (!strncmp(line, "alloc ", 6)) {
            alloc(strtoull(line + 6, NULL, 10));
        } else if (!strcmp(line, "free") && held) {
            MUST(cuMemFree(blocks[--held]));
            frees++;
        } else if (!strncmp(line, "exec ", 5)) {
            execl("/proc/self/exe", argv[0], line + 5, NULL);
        }
    }
}
