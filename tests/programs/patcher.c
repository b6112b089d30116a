/* A program that overwrites the entry of cuMemAlloc in its own memory, as tools that hook functions
 * do. Orders on stdin: `patch`, `alloc`; the hook hands out one address and counts. */
#define _GNU_SOURCE
#include "truth.h"

#include <cuda.h>
#include <stdint.h>
#include <sys/mman.h>

#define HOOKS_ADDRESS 0x7f0000000000ull

static long hooked;

static CUresult hook(CUdeviceptr *ptr, size_t bytes)
{
    (void)bytes;
    hooked++;
    *ptr = HOOKS_ADDRESS;
    return CUDA_SUCCESS;
}

static void patch(void)
{
    /* movabs $hook, %rax; jmp *%rax */
    unsigned char code[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
    unsigned char *entry = (unsigned char *)cuMemAlloc;
    void (*to)(void) = (void (*)(void))hook;
    memcpy(code + 2, &to, 8);
    uintptr_t page = (uintptr_t)entry & ~4095ul;
    EXPECT(mprotect((void *)page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
    memcpy(entry, code, sizeof code);
    EXPECT(mprotect((void *)page, 8192, PROT_READ | PROT_EXEC) == 0);
}

int main(void)
{
    CUcontext ctx;
    CUdeviceptr p;
    char line[256];
    long allocs = 0;
    truth_begin();
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    for (;;) {
        printf("HOOKED alloc=%ld\n", hooked);
        truth_made(allocs, 0, 0);
        printf("READY\n");
        truth_next_line(line, sizeof line);
        if (!strcmp(line, "patch")) {
            patch();
        } else if (!strcmp(line, "alloc")) {
            MUST(cuMemAlloc(&p, MIB));
            allocs++;
        }
    }
}
