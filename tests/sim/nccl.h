/* What the simulated libnccl offers, as NVIDIA's nccl.h (2.27) declares it. NVIDIA ships that header only
 * in wheels of hundreds of megabytes, so that these few lines are written here. */
#ifndef SIM_NCCL_H
#define SIM_NCCL_H

#define NCCL_UNIQUE_ID_BYTES 128

typedef struct ncclComm *ncclComm_t;
typedef struct ncclConfig ncclConfig_t;
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;
typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInvalidArgument = 4,
} ncclResult_t;

/* Each function has a second name for profilers, which put their own in the place of the first. */
#define NCCL_API(name, ...)                                                                        \
    ncclResult_t name(__VA_ARGS__);                                                                \
    ncclResult_t p##name(__VA_ARGS__)

NCCL_API(ncclGetUniqueId, ncclUniqueId *id);
NCCL_API(ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank);
NCCL_API(ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
         ncclConfig_t *config);
NCCL_API(ncclCommInitRankScalable, ncclComm_t *comm, int nranks, int rank, int n_ids,
         ncclUniqueId *ids, ncclConfig_t *config);
NCCL_API(ncclCommDestroy, ncclComm_t comm);

#endif
