/* cuInit, the process's view of the GPUs, and what it costs to become a CUDA process. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum phase { BEFORE_INIT, READY, FORKED };

static pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
static _Atomic int phase = BEFORE_INIT;
static struct sim_state *state;
static int owner = -1;
static int visible[SIM_MAX_GPUS];
static int visible_count;
static uint64_t linger_ns;

void driver_lock(void)
{
    pthread_mutex_lock(&lock);
}

void driver_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

CUresult driver_ready(void)
{
    return atomic_load_explicit(&phase, memory_order_acquire) == READY
               ? CUDA_SUCCESS
               : CUDA_ERROR_NOT_INITIALIZED;
}

int driver_owner(void)
{
    return owner;
}

struct sim_state *driver_state(void)
{
    return state;
}

int driver_gpu(CUdevice ordinal)
{
    return ordinal >= 0 && ordinal < visible_count ? visible[ordinal] : -1;
}

CUdevice driver_ordinal(int gpu)
{
    for (int ordinal = 0; ordinal < visible_count; ordinal++)
        if (visible[ordinal] == gpu)
            return ordinal;
    return -1;
}

void driver_linger(void)
{
    if (!linger_ns)
        return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t until = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + linger_ns;
    do {
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec < until);
}

/* The GPU that one entry of CUDA_VISIBLE_DEVICES names: an index in CUDA's order, or a prefix of
 * a UUID that fits one GPU only. */
static int named_gpu(const char *name, const int *order)
{
    char uuid[SIM_UUID_TEXT], *end;
    if (!strncmp(name, state->mig ? "MIG-" : "GPU-", 4)) {
        int found = -1;
        for (uint32_t gpu = 0; gpu < state->gpus; gpu++) {
            sim_gpu_uuid_text((int)gpu, uuid);
            if (strncasecmp(uuid, name, strlen(name)) == 0)
                found = found < 0 ? (int)gpu : SIM_MAX_GPUS;
        }
        return found < SIM_MAX_GPUS ? found : -1;
    }
    long index = strtol(name, &end, 10);
    return end == name || index < 0 || index >= (long)state->gpus ? -1 : order[index];
}

/* As NVIDIA's: entries from the first invalid one on are not seen, and a GPU named twice leaves
 * none at all. SIM_CUDA_ORDER=reverse makes CUDA's default order ("fastest first") differ from
 * NVML's, as on hosts of mixed GPUs; CUDA_DEVICE_ORDER=PCI_BUS_ID undoes it. */
static void find_visible(void)
{
    int order[SIM_MAX_GPUS];
    const char *cuda_order = getenv("SIM_CUDA_ORDER"), *by = getenv("CUDA_DEVICE_ORDER");
    bool reverse = cuda_order && !strcmp(cuda_order, "reverse") &&
                   !(by && !strcmp(by, "PCI_BUS_ID"));
    int count = (int)state->gpus;
    for (int i = 0; i < count; i++)
        order[i] = reverse ? count - 1 - i : i;
    /* Of instances a process has one: the first that it names, or the first there is. */
    int most = state->mig ? 1 : SIM_MAX_GPUS;
    visible_count = 0;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) {
        memcpy(visible, order, sizeof order);
        visible_count = count < most ? count : most;
        return;
    }
    char *copy = strdup(list), *rest = copy, *name;
    while ((name = strsep(&rest, ",")) && visible_count < most) {
        int gpu = named_gpu(name + strspn(name, " "), order);
        if (gpu < 0)
            break;
        if (driver_ordinal(gpu) >= 0) {
            visible_count = 0;
            break;
        }
        visible[visible_count++] = gpu;
    }
    free(copy);
}

static void after_fork_in_child(void)
{
    if (atomic_load(&phase) == READY)
        atomic_store(&phase, FORKED);
}

static CUresult initialise(void)
{
    state = sim_state_open();
    if (!state)
        return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    sim_sleep_ms(sim_env("SIM_INIT_MS", 120));
    linger_ns = sim_env("SIM_FREE_LINGER_US", 0) * 1000;
    find_visible();
    if (visible_count == 0)
        return CUDA_ERROR_NO_DEVICE;
    sim_lock();
    sim_reclaim();
    owner = sim_owner_register();
    sim_unlock();
    if (owner < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_atfork(NULL, NULL, after_fork_in_child);
    atomic_store_explicit(&phase, READY, memory_order_release);
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&phase) == FORKED)
        return CUDA_ERROR_NOT_INITIALIZED;
    driver_lock();
    CUresult rc = atomic_load(&phase) == READY ? CUDA_SUCCESS : initialise();
    driver_unlock();
    return rc;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = SIM_CUDA_VERSION;
    return CUDA_SUCCESS;
}
