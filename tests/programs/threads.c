/* threads T P [sync|async] [K]: T threads make P pairs of allocation and free each, then each
 * keeps K blocks of 1 MiB. All blocks are of one size class, so a freed address goes to the next
 * thread at once, and of sizes that differ by thread, so a free that is paired with the wrong
 * allocation shows in the bytes. */
#include "truth.h"

#include <cuda.h>
#include <pthread.h>

static long threads, pairs, keep;
static int async;
static CUcontext ctx;
static pthread_barrier_t go, done, leave;
static pthread_mutex_t out = PTHREAD_MUTEX_INITIALIZER;

static void pair(size_t bytes)
{
    CUdeviceptr p;
    if (async) {
        MUST(cuMemAllocAsync(&p, bytes, 0));
        MUST(cuMemFreeAsync(p, 0));
    } else {
        MUST(cuMemAlloc(&p, bytes));
        MUST(cuMemFree(p));
    }
}

static void *work(void *arg)
{
    size_t bytes = 65536 - 512 * ((size_t)arg % 60);
    MUST(cuCtxSetCurrent(ctx));
    pthread_barrier_wait(&go);
    for (long i = 0; i < pairs; i++)
        pair(bytes);
    pthread_barrier_wait(&done);
    for (long i = 0; i < keep; i++) {
        CUdeviceptr p;
        MUST(async ? cuMemAllocAsync(&p, MIB, 0) : cuMemAlloc(&p, MIB));
        pthread_mutex_lock(&out);
        truth_live(async ? "pool" : "device", p, MIB);
        pthread_mutex_unlock(&out);
    }
    pthread_barrier_wait(&leave);
    pause(); /* alive until the process ends, so that its blocks are a living thread's */
    return NULL;
}

int main(int argc, char **argv)
{
    threads = truth_arg(argc, argv, 1, 8);
    pairs = truth_arg(argc, argv, 2, 1000);
    async = argc > 3 && !strcmp(argv[3], "async");
    keep = truth_arg(argc, argv, 4, 0);
    truth_begin();
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    pthread_barrier_init(&go, NULL, (unsigned)threads + 1);
    pthread_barrier_init(&done, NULL, (unsigned)threads + 1);
    pthread_barrier_init(&leave, NULL, (unsigned)threads + 1);
    for (long i = 0; i < threads; i++) {
        pthread_t thread;
        MUST(pthread_create(&thread, NULL, work, (void *)i));
    }
    pthread_barrier_wait(&go);
    struct truth_timer timer = truth_timer_start();
    pthread_barrier_wait(&done);
    truth_timer_stop(&timer);
    pthread_barrier_wait(&leave);
    truth_made(threads * (pairs + keep), threads * pairs, 0);
    truth_time(&timer, threads * pairs);
    truth_ready();
}
