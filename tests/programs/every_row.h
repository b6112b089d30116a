/* What the files of every_row share: a call, and the row of the log that it must be.
 *
 * Built like NVIDIA's own driver (`__CUDA_API_VERSION_INTERNAL`), cuda.h declares every export under
 * its exact name, so that what is called is what is written. Functions that a driver may lack are
 * weak: their address is 0 there. */
#ifndef EVERY_ROW_H
#define EVERY_ROW_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "truth.h"

#include <stdint.h>

#define GARBAGE 0xdead0000ull
#define UNKNOWN UINT64_MAX /* a size that the row can't tell */

/* Prints a call and what its row says. `delta` is the change of live bytes at its level. */
void call(const char *api, CUresult rc, const char *op, const char *level, uint64_t addr,
          uint64_t size, int64_t delta);
/* A function that can't be called here. */
void skipped(const char *api, const char *why);
/* Ends the program where a call that must succeed did not; on a real GPU it goes on, and the row is
 * that of a failed call. */
int went_well(const char *api, CUresult rc, const char *level, uint64_t addr, uint64_t size);

/* Macros, since addresses are known only after the call. Whether it went well. */
#define did(api, expression, op, level, addr, size, delta)                                         \
    __extension__({                                                                                \
        int well_ = went_well(api, expression, level, 0, UNKNOWN);                                 \
        if (well_)                                                                                 \
            call(api, CUDA_SUCCESS, op, level, (uint64_t)(addr), size, delta);                     \
        well_;                                                                                     \
    })
/* What gives and takes the bytes that it names. */
#define gave(api, expression, op, level, addr, size)                                               \
    did(api, expression, op, level, addr, size, (int64_t)(size))
#define took(api, expression, level, addr, size)                                                   \
    did(api, expression, "free", level, addr, size, -(int64_t)(size))
/* A call with a row that is no change, and one without a row. */
#define told(api, expression, op, level, addr, size) did(api, expression, op, level, addr, size, 0)
#define silent(api, expression) did(api, expression, "-", "-", 0, UNKNOWN, 0)

#ifdef REAL_GPU
#define LEFT_ALONE(out) 1 /* driver 580 writes 0 */
#else
#define LEFT_ALONE(out) ((out) == GARBAGE)
#endif
/* A call that must fail with `result`; the simulated driver leaves `out` as it was. */
#define refused(api, expression, result, level, addr, out, size)                                   \
    do {                                                                                           \
        CUresult rc_ = (expression);                                                               \
        if (rc_ != (CUresult)(result) || !LEFT_ALONE(out))                                         \
            unexpected(api, rc_);                                                                  \
        call(api, rc_, "fail", level, addr, size, 0);                                              \
    } while (0)
void unexpected(const char *api, CUresult rc);

void arrays(void);
void graphs(void);
void modules(void);
void other_contexts(void);
void first_versions(void);
void external_memory(void);
void multicast(void);
void between_processes(const char *self);
/* The other process's half. */
int importer(char **args);

#endif
