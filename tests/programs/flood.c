/* flood: takes orders on stdin: `calls N` and `blocks N` make N pairs, of the driver's stream-ordered
 * allocator and of PyTorch's; `calls N MS` and `blocks N MS` make them again and again for so long.
 * `alloc BYTES`, `host BYTES` and `tensor BYTES` allocate once more and keep it. */
#include "truth.h"

#include "c10.h"
#include <cuda.h>

static long allocs, frees, tensors_made, tensors_gone;

static void calls(long pairs)
{
    CUdeviceptr p;
    for (long i = 0; i < pairs; i++) {
        MUST(cuMemAllocAsync(&p, 65536, 0));
        MUST(cuMemFreeAsync(p, 0));
    }
    allocs += pairs;
    frees += pairs;
}

static void blocks(long pairs)
{
    for (long i = 0; i < pairs; i++)
        sim_torch_free(sim_torch_alloc(512, 0));
    tensors_made += pairs;
    tensors_gone += pairs;
}

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ll + now.tv_nsec / 1000000;
}

static void flood(const char *order, void (*make)(long))
{
    long pairs = 0, ms = 0;
    sscanf(order, "%*s %ld %ld", &pairs, &ms);
    long long end = now_ms() + ms;
    do {
        make(pairs);
    } while (now_ms() < end);
}

int main(void)
{
    CUcontext ctx;
    CUdeviceptr p;
    void *host;
    char line[256];
    truth_begin();
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    for (;;) {
        truth_made(allocs, frees, 0);
        printf("TENSORS made=%ld gone=%ld\n", tensors_made, tensors_gone);
        printf("READY\n");
        truth_next_line(line, sizeof line);
        if (!strncmp(line, "calls ", 6))
            flood(line, calls);
        else if (!strncmp(line, "blocks ", 7))
            flood(line, blocks);
        else if (!strncmp(line, "alloc ", 6))
            MUST(cuMemAlloc(&p, strtoull(line + 6, NULL, 10)));
        else if (!strncmp(line, "host ", 5))
            MUST(cuMemAllocHost(&host, strtoull(line + 5, NULL, 10)));
        else if (!strncmp(line, "tensor ", 7))
            EXPECT(sim_torch_alloc(strtoull(line + 7, NULL, 10), 0));
    }
}
