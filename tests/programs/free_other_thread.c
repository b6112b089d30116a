/* Each of 4 threads allocates two blocks; the main thread frees one of each. */
#include "truth.h"

#include <cuda.h>
#include <pthread.h>

#define THREADS 4

static CUcontext ctx;
static pthread_barrier_t allocated;
static pthread_mutex_t out = PTHREAD_MUTEX_INITIALIZER;
static CUdeviceptr given[THREADS];

static void *work(void *arg)
{
    long i = (long)arg;
    CUdeviceptr kept;
    MUST(cuCtxSetCurrent(ctx));
    MUST(cuMemAlloc(&kept, 3 * MIB));
    MUST(cuMemAlloc(&given[i], (size_t)(4 + i) * MIB));
    pthread_mutex_lock(&out);
    truth_live("device", kept, 3 * MIB);
    pthread_mutex_unlock(&out);
    pthread_barrier_wait(&allocated);
    pause();
    return NULL;
}

int main(void)
{
    truth_begin();
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    pthread_barrier_init(&allocated, NULL, THREADS + 1);
    for (long i = 0; i < THREADS; i++) {
        pthread_t thread;
        MUST(pthread_create(&thread, NULL, work, (void *)i));
    }
    pthread_barrier_wait(&allocated);
    for (int i = 0; i < THREADS; i++)
        MUST(cuMemFree(given[i]));
    truth_made(2 * THREADS, THREADS, 0);
    truth_ready();
}
