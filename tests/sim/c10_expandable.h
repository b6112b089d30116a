/* Segments that grow: address space first, memory handle by handle. */
#ifndef SIM_C10_EXPANDABLE_H
#define SIM_C10_EXPANDABLE_H

#include <stdbool.h>
#include <stddef.h>

/* PYTORCH_CUDA_ALLOC_CONF asks for expandable segments. */
bool expandable_wanted(void);
/* Adds at least `bytes` at the end of the device's segment of small or large blocks. */
char *expandable_grow(int device, bool small, size_t bytes, size_t *added);
/* Takes the handles away that lie wholly in the last `free_bytes`; how many bytes these are. */
size_t expandable_shrink(int device, bool small, size_t free_bytes);

#endif
