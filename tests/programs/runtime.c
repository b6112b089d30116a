/* runtime: the runtime API, linked to the shared library (runtime_shared) and to the static one
 * (runtime_static), where no cudaMalloc can be found to probe. */
#include "truth.h"

#include <cuda_runtime_api.h>

int main(void)
{
    void *kept, *p, *pooled;
    size_t pitch;
    cudaStream_t stream;
    cudaMemPool_t pool;
    unsigned long long keep = ~0ull, reserved;
    int count;
    truth_begin();
    MUST(cudaFree(0));
    MUST(cudaGetDeviceCount(&count));
    MUST(cudaMalloc(&kept, 9 * MIB));
    MUST(cudaMalloc(&p, 2 * MIB));
    MUST(cudaFree(p));
    MUST(cudaMallocPitch(&p, &pitch, 1000, 2048));
    MUST(cudaFree(p));
    MUST(cudaMallocManaged(&p, MIB, cudaMemAttachGlobal));
    MUST(cudaFree(p));
    MUST(cudaMallocHost(&p, MIB));
    MUST(cudaFreeHost(p));
    MUST(cudaHostAlloc(&p, MIB, cudaHostAllocDefault));
    MUST(cudaFreeHost(p));
    p = aligned_alloc(4096, MIB);
    MUST(cudaHostRegister(p, MIB, 0));
    MUST(cudaHostUnregister(p));
    MUST(cudaDeviceGetDefaultMemPool(&pool, 0));
    MUST(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    MUST(cudaStreamCreate(&stream));
    MUST(cudaMallocAsync(&pooled, 3 * MIB, stream));
    MUST(cudaMallocAsync(&p, 6 * MIB, stream));
    MUST(cudaFreeAsync(p, stream));
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved));
    p = NULL;
    MUST_FAIL(cudaErrorMemoryAllocation, cudaMalloc(&p, 1ull << 50));
    MUST_FAIL(cudaErrorMemoryAllocation, cudaGetLastError());
    EXPECT(p == NULL);
    printf("POOL reserved=%llu\n", reserved);
    truth_live("device", (unsigned long long)kept, 9 * MIB);
    truth_live("pool", (unsigned long long)pooled, 3 * MIB);
    truth_made(9, 7, 1);
    truth_ready();
    MUST(cudaDeviceReset()); /* the block of the pool stays */
    truth_live("pool", (unsigned long long)pooled, 3 * MIB);
    truth_made(9, 7, 1);
    truth_ready();
}
