/* What one process tells another one of a block: the bytes of an IPC handle or of a pool pointer. */
#ifndef SIM_OPENED_H
#define SIM_OPENED_H

#include "driver.h"

struct shared_block {
    uint64_t kind; /* IPC_BLOCK, or the identity of the pool that it is of */
    uint64_t export_id;
    struct heap_part part;
    int32_t pid; /* whose it is */
    int32_t gpu;
};
_Static_assert(sizeof(struct shared_block) <= sizeof(CUipcMemHandle), "a handle has 64 bytes");
_Static_assert(sizeof(struct shared_block) <= sizeof(CUmemPoolPtrExportData), "so has a pointer");

#define IPC_BLOCK 0x4b4c42435049u /* no identity of a pool is of its form: no pid is that large */

/* NULL: the memory is gone. The address is in the object. */
struct object *opened_new(CUcontext ctx, const struct shared_block *block);

#endif
