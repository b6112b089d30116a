/* What the files of the simulated libnvidia-ml share. */
#ifndef SIM_NVML_SIM_H
#define SIM_NVML_SIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

#include "state.h"

/* A GPU, or an instance of one. */
struct nvmlDevice_st {
    int card;
    int gpu; /* of an instance, its number in the state; -1: the whole GPU */
};

/* What every call does first: NVML_SUCCESS where it may go on; with a device, where that is one,
 * and there is something to write to. */
nvmlReturn_t nvml_begin(void);
nvmlReturn_t nvml_begin_with(nvmlDevice_t device, const void *out);
struct sim_state *nvml_state(void);
nvmlDevice_t nvml_card(unsigned index);     /* NULL: there is none */
nvmlDevice_t nvml_instance(unsigned index); /* by its number in the state */
/* Whether what the state has under the number is (a part of) the device. */
bool nvml_has(nvmlDevice_t device, int gpu);
bool nvml_is_busy(nvmlDevice_t device);

#endif
