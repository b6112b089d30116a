/* The simulated libnccl: communicators under NCCL's real names. Ranks do not wait for each other: a
 * communicator is a buffer on the current device, the first of which makes the first call of CUDA. */
#define _GNU_SOURCE
#include "nccl.h"

#include <cuda_runtime_api.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define MIB (1ull << 20)
#define BUFFER_BYTES (4 * MIB)

/* As with NCCL both names are one function, and the first of them is weak. */
#define PROFILED(name)                                                                             \
    extern __typeof__(name) name __attribute__((visibility("default"), weak));                     \
    extern __typeof__(name) p##name __attribute__((visibility("default"), alias(#name)))

PROFILED(ncclGetUniqueId);
PROFILED(ncclCommInitRank);
PROFILED(ncclCommInitRankConfig);
PROFILED(ncclCommInitRankScalable);
PROFILED(ncclCommDestroy);

struct ncclComm {
    void *buffer;
};

/* A random number and where the root listens, the rest is 0. */
struct handle {
    uint64_t magic;
    struct sockaddr_in6 root;
};

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    struct handle handle = {.root = {.sin6_family = AF_INET6, .sin6_port = htons(40000)}};
    if (getrandom(&handle.magic, sizeof handle.magic, 0) != sizeof handle.magic)
        return ncclSystemError;
    memset(id, 0, sizeof *id);
    memcpy(id, &handle, sizeof handle);
    return ncclSuccess;
}

static ncclResult_t join(ncclComm_t *comm, int nranks, int rank)
{
    if (nranks < 1 || rank < 0 || rank >= nranks)
        return ncclInvalidArgument;
    *comm = calloc(1, sizeof **comm);
    if (cudaMalloc(&(*comm)->buffer, BUFFER_BYTES) == cudaSuccess)
        return ncclSuccess;
    free(*comm);
    return ncclUnhandledCudaError;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
    (void)id;
    return join(comm, nranks, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    (void)id, (void)config;
    return join(comm, nranks, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int n_ids,
                                      ncclUniqueId *ids, ncclConfig_t *config)
{
    (void)config;
    return n_ids < 1 || !ids ? ncclInvalidArgument : join(comm, nranks, rank);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    cudaError_t error = cudaFree(comm->buffer);
    free(comm);
    return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
