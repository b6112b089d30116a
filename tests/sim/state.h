/* The memory of the simulated GPUs: one file, mapped by every process that uses or watches them.
 *
 * It holds what the real driver's kernel half holds: how much of each GPU is used, which process
 * is charged with how much, and the memory objects that several processes share. A process's own
 * addresses, contexts and handles are its own business (driver.h). */
#ifndef SIM_STATE_H
#define SIM_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define SIM_MAX_GPUS 16
#define SIM_MAX_OWNERS 512
#define SIM_MAX_EXPORTS 8192
#define SIM_MIB (1ull << 20)

/* One life of one process image. `start_stack` changes with every exec (address space layout
 * randomisation), which neither the pid nor the start time does; 0 where it may not be read. */
struct sim_identity {
    int32_t pid;
    uint64_t start_ticks;
    uint64_t start_stack;
};

struct sim_owner {
    struct sim_identity who; /* pid 0: the slot is free */
    uint64_t charged[SIM_MAX_GPUS];
    uint32_t contexts[SIM_MAX_GPUS];
    uint32_t checkpoint;              /* a CUprocessState */
    uint64_t moved_out[SIM_MAX_GPUS]; /* what it was charged with, while it is checkpointed */
};

/* Memory that was exported at least once, so that its life is no longer its creator's. */
struct sim_export {
    uint64_t id; /* 0: the slot is free */
    uint64_t bytes;
    int32_t gpu;
    int32_t charged_to; /* owner slot, or -1: used on the GPU, charged to no process */
    uint64_t holders[SIM_MAX_OWNERS / 64];
};

struct sim_state {
    uint32_t magic;
    uint32_t gpus;          /* with MIG, instances: those of a GPU stand together */
    uint32_t mig;           /* instances of each GPU; 0: no MIG */
    uint64_t capacity;      /* bytes of each GPU, or instance, that programs can have */
    uint64_t reserved;      /* bytes beyond them that the driver keeps for itself */
    uint64_t context_bytes; /* what a context costs */
    pthread_mutex_t lock;   /* robust: a process may be killed while it holds the lock */
    uint64_t next_export;
    uint64_t used[SIM_MAX_GPUS];
    struct sim_owner owners[SIM_MAX_OWNERS];
    struct sim_export exports[SIM_MAX_EXPORTS];
};

uint64_t sim_env(const char *name, uint64_t fallback);
void sim_sleep_ms(uint64_t ms);

/* Maps $SIM_STATE, creating it first if it is not there. NULL if it can't be had. */
struct sim_state *sim_state_open(void);
const char *sim_state_path(void);

void sim_lock(void);
void sim_unlock(void);

/* Gives back what dead processes held and what no exported file keeps any more. Lock held. */
void sim_reclaim(void);

/* Takes the slot of the calling process. -1: none is free. Lock held. */
int sim_owner_register(void);

/* The calling process's account; these take the lock themselves, and wait while the process is
 * locked for a checkpoint. `sim_charge` is false when the GPU has no room for `bytes`, even after
 * reclaiming. */
bool sim_charge(int owner, int gpu, uint64_t bytes);
void sim_uncharge(int owner, int gpu, uint64_t bytes);

/* The file behind an exported memory object; open while a process holds the descriptor. */
int sim_export_path(uint64_t id, char *path, unsigned long room);
bool sim_export_has_holders(const struct sim_export *shared);
void sim_export_hold(struct sim_export *shared, int owner);
/* Drops the owner's hold, and the memory with the last one. Lock held. */
void sim_export_drop(struct sim_export *shared, int owner);

/* Every GPU, and every instance of one, has the same identity in libcuda and in NVML. These take
 * numbers of the state; `sim_card` is the GPU that an instance is a part of. */
int sim_card(int gpu);
void sim_gpu_uuid(int gpu, unsigned char uuid[16]);
void sim_card_uuid(int card, unsigned char uuid[16]);
/* `GPU-` or `MIG-` and the UUID. */
#define SIM_UUID_TEXT 41
void sim_gpu_uuid_text(int gpu, char text[SIM_UUID_TEXT]);
void sim_card_uuid_text(int card, char text[SIM_UUID_TEXT]);
unsigned sim_gpu_bus(int gpu);
#define SIM_GPU_NAME "vramscope simulated GPU"
#define SIM_CUDA_VERSION 12090
#define SIM_DRIVER_VERSION "580.159.04"

#endif
