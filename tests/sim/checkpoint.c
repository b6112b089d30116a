/* Checkpoints of processes, by whoever asks: what a process has of each GPU is moved to the host and
 * back. Meanwhile its own calls that take or give memory wait. */
#include "driver.h"

static struct sim_owner *owner_of(int pid)
{
    struct sim_state *state = driver_state();
    for (int slot = 0; pid > 0 && slot < SIM_MAX_OWNERS; slot++)
        if (state->owners[slot].who.pid == pid)
            return &state->owners[slot];
    return NULL;
}

static CUresult move_out(struct sim_owner *owner)
{
    struct sim_state *state = driver_state();
    for (uint32_t gpu = 0; gpu < state->gpus; gpu++) {
        owner->moved_out[gpu] = owner->charged[gpu];
        state->used[gpu] -= owner->charged[gpu];
        owner->charged[gpu] = 0;
    }
    return CUDA_SUCCESS;
}

static CUresult move_back(struct sim_owner *owner)
{
    struct sim_state *state = driver_state();
    for (uint32_t gpu = 0; gpu < state->gpus; gpu++)
        if (owner->moved_out[gpu] > state->capacity - state->used[gpu])
            return CUDA_ERROR_OUT_OF_MEMORY;
    for (uint32_t gpu = 0; gpu < state->gpus; gpu++) {
        owner->charged[gpu] += owner->moved_out[gpu];
        state->used[gpu] += owner->moved_out[gpu];
        owner->moved_out[gpu] = 0;
    }
    return CUDA_SUCCESS;
}

static CUresult stay(struct sim_owner *owner)
{
    (void)owner;
    return CUDA_SUCCESS;
}

static CUresult step(int pid, CUprocessState from, CUprocessState to,
                     CUresult (*move)(struct sim_owner *owner))
{
    sim_lock();
    sim_reclaim();
    struct sim_owner *owner = owner_of(pid);
    CUresult rc = !owner                       ? CUDA_ERROR_INVALID_VALUE
                  : owner->checkpoint != from ? CUDA_ERROR_ILLEGAL_STATE
                                              : move(owner);
    if (rc == CUDA_SUCCESS)
        owner->checkpoint = to;
    sim_unlock();
    return rc;
}

CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    (void)args;
    WITH_DRIVER(step(pid, CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED, stay));
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    (void)args;
    WITH_DRIVER(step(pid, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED, move_out));
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    (void)args;
    WITH_DRIVER(step(pid, CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED, move_back));
}

CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
    (void)args;
    WITH_DRIVER(step(pid, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING, stay));
}

static CUresult get_state(int pid, CUprocessState *out)
{
    sim_lock();
    const struct sim_owner *owner = owner_of(pid);
    if (owner && out)
        *out = owner->checkpoint;
    sim_unlock();
    return owner && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    WITH_DRIVER(get_state(pid, state));
}
