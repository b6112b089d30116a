/* What the files of every_row share: a call, and the row of the log that it must be.
 *
 * Built like NVIDIA's own driver (`__CUDA_API_VERSION_INTERNAL`), cuda.h declares every export under
 * its exact name, so that what is called is what is written. A function is looked up when it is
 * called, so that the program runs with drivers that lack some. */
#ifndef EVERY_ROW_H
#define EVERY_ROW_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "truth.h"

#include <stdint.h>

#define GARBAGE 0xdead0000ull
#define UNKNOWN UINT64_MAX /* a size that the row can't tell */

/* The driver's function of the name; NULL, and a line that says so, where it has none. */
void *entry(const char *api);
/* Prints a call and what its row says. `delta` is the change of live bytes at its level. */
void call(const char *api, CUresult rc, const char *op, const char *level, uint64_t addr,
          uint64_t size, int64_t delta);
/* Says that a function is not called here. */
void skipped(const char *api, const char *why);
/* Whether the call went well. On the simulated GPU one that did not ends the program; a real driver
 * may refuse it, and its row is that of a failed call. */
int went_well(const char *api, CUresult rc, const char *level);
void must_fail(const char *api, CUresult rc, CUresult expected, int is_untouched);
void unexpected(const char *api, CUresult rc);
/* After cuInit: whether the GPU is the simulated one, where every function works. */
int is_simulated(void);

/* Macros, since each function has a type of its own and results are known only after the call.
 * `args` stands in brackets. Whether it went well. */
#define did(api, args, op, level, addr, size, delta)                                               \
    __extension__({                                                                                \
        __typeof__(&api) entry_ = (__typeof__(&api))entry(#api);                                   \
        int well_ = entry_ && went_well(#api, entry_ args, level);                                 \
        if (well_)                                                                                 \
            call(#api, CUDA_SUCCESS, op, level, (uint64_t)(addr), size, delta);                    \
        well_;                                                                                     \
    })
/* What gives and takes the bytes that it names. */
#define gave(api, args, op, level, addr, size) did(api, args, op, level, addr, size, (int64_t)(size))
#define took(api, args, level, addr, size)                                                         \
    did(api, args, "free", level, addr, size, -(int64_t)(size))
/* A call with a row that is no change, and one without a row. */
#define told(api, args, op, level, addr, size) did(api, args, op, level, addr, size, 0)
#define silent(api, args) did(api, args, "-", "-", 0, UNKNOWN, 0)

/* A call that must fail; on the simulated GPU with `result`, and `out` left as it was. (Driver 580
 * writes to it.) */
#define refused(api, args, result, level, addr, out, size)                                         \
    do {                                                                                           \
        __typeof__(&api) entry_ = (__typeof__(&api))entry(#api);                                   \
        if (entry_) {                                                                              \
            CUresult rc_ = entry_ args;                                                            \
            must_fail(#api, rc_, (CUresult)(result), (uint64_t)(out) == GARBAGE);                  \
            call(#api, rc_, "fail", level, addr, size, 0);                                         \
        }                                                                                          \
    } while (0)

/* A function that is none of the probe table, and needed by those that are. */
#define helper(api, args)                                                                          \
    __extension__({                                                                                \
        __typeof__(&api) entry_ = (__typeof__(&api))entry(#api);                                   \
        entry_ ? entry_ args : CUDA_ERROR_NOT_FOUND;                                               \
    })

#define PINNED_ON_0                                                                                \
    {                                                                                              \
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,                                                     \
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,                          \
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}                                 \
    }
#define POOL_ON_0                                                                                  \
    {                                                                                              \
        .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,                                                \
        .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,                                   \
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}                                 \
    }

CUcontext contexts(void);
void linear(void);
void pools(void);
void vmm(void);
void host(void);
void arrays(void);
void graphs(void);
void modules(void);
void other_contexts(void);
void first_versions(void);
void external_memory(void);
void multicast(void);
void between_processes(const char *self);
void checkpoints(const char *self);
/* The other processes' halves. */
int importer(char **args);
int checkpointed(char **args);

#endif
