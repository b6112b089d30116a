/* A library of the user's that allocates: compiled twice, as first_* and as other_*, to code
 * of one size at other offsets. */
#include <cuda.h>

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)

__attribute__((noinline, noclone)) void NAMED(PREFIX, inner)(unsigned long long bytes)
{
    CUdeviceptr block;
#ifdef LATER
    __asm__ volatile(".rept 64\n\tnop\n\t.endr");
#endif
    if (cuMemAlloc(&block, bytes) != CUDA_SUCCESS)
        __builtin_trap();
}

void NAMED(PREFIX, grow)(unsigned long long bytes)
{
    NAMED(PREFIX, inner)(bytes);
    __asm__ volatile("" ::: "memory");
}
