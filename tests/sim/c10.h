/* What the simulated libc10_cuda offers to test programs. */
#ifndef SIM_C10_H
#define SIM_C10_H

#include <stddef.h>

/* NULL when the GPU is full, after the cache was given back, as PyTorch does before it throws. */
void *sim_torch_alloc(size_t bytes, int device);
void sim_torch_free(void *ptr);
/* Gives back the segments that hold no live block. */
void sim_torch_empty_cache(void);
size_t sim_torch_allocated(int device);
size_t sim_torch_reserved(int device);
size_t sim_torch_peak(int device); /* of the allocated bytes */

#endif
