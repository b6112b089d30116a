/* The simulated libc10: PyTorch's two memory reporters under their real names. */
#include "c10_reporters.h"

static _Atomic uint64_t reports; /* work for the compiler, so that the calls stay */

void report_usage(void *ptr, int64_t size, size_t allocated, size_t reserved, uint64_t device)
{
    reports += (uint64_t)ptr ^ (uint64_t)size ^ allocated ^ reserved ^ device;
}

void report_oom(int64_t size, size_t allocated, size_t reserved, uint64_t device)
{
    reports += (uint64_t)size ^ allocated ^ reserved ^ device;
}
