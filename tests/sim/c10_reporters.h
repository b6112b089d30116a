/* PyTorch's two memory reporters: libc10 has them, libc10_cuda calls them. */
#ifndef SIM_C10_REPORTERS_H
#define SIM_C10_REPORTERS_H

#include <stddef.h>
#include <stdint.h>

#define REPORTER __attribute__((visibility("default"), noinline))

/* c10::Device is two bytes that travel in a whole register: its upper bits are whatever was there
 * before, here on purpose never 0. */
REPORTER void report_usage(void *ptr, int64_t size, size_t allocated, size_t reserved,
                           uint64_t device)
    __asm__("_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
REPORTER void report_oom(int64_t size, size_t allocated, size_t reserved, uint64_t device)
    __asm__("_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE");

#endif
