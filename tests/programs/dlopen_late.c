/* Opens libcuda only when it is told to, long after it started; then holds a block. */
#include "truth.h"

#include <cuda.h>
#include <dlfcn.h>

static void *library;

static void *find(const char *name)
{
    void *symbol = dlsym(library, name);
    if (!symbol) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    return symbol;
}

int main(void)
{
    CUcontext ctx;
    CUdeviceptr p;
    truth_begin();
    truth_ready();
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    __typeof__(&cuInit) init = find("cuInit");
    __typeof__(&cuDevicePrimaryCtxRetain) retain = find("cuDevicePrimaryCtxRetain");
    __typeof__(&cuCtxSetCurrent) set = find("cuCtxSetCurrent");
    __typeof__(&cuMemAlloc) alloc = find("cuMemAlloc_v2");
    MUST(init(0));
    MUST(retain(&ctx, 0));
    MUST(set(ctx));
    MUST(alloc(&p, 48 * MIB));
    truth_live("device", p, 48 * MIB);
    truth_made(1, 0, 0);
    truth_ready();
}
