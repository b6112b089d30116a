// Of vramscope's GPU checks (tests/gpu): the cost of an allocation, in windows, for as long as asked.
//
// pairs SECONDS [SYNC [ASYNC]]: windows of SYNC (400) pairs of cudaMalloc/cudaFree and of ASYNC
// (20,000) pairs of cudaMallocAsync/cudaFreeAsync in turn, 64 KiB each. Prints for each window
//   WINDOW sync|async START END PAIRS        times: CLOCK_MONOTONIC, nanoseconds
// so that whoever attaches and detaches meanwhile can tell which windows ran with what.
#include <cuda_runtime.h>
#include <time.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>

static volatile sig_atomic_t stop;
static void on_term(int) { stop = 1; }

static void die(const char *what, int rc) {
  fprintf(stderr, "pairs: %s: error %d\n", what, rc);
  exit(3);
}
#define RT(x) do { cudaError_t rc_ = (x); if (rc_ != cudaSuccess) die(#x, (int)rc_); } while (0)

static long long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

template <class F> static void window(const char *mode, long n, F pair) {
  long long start = now_ns();
  for (long i = 0; i < n; i++) pair();
  printf("WINDOW %s %lld %lld %ld\n", mode, start, now_ns(), n);
}

int main(int argc, char **argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 10;
  long n_sync = argc > 2 ? atol(argv[2]) : 400, n_async = argc > 3 ? atol(argv[3]) : 20000;
  const size_t bytes = 65536;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  signal(SIGTERM, on_term);
  printf("PID %d\n", getpid());
  RT(cudaFree(0));
  cudaMemPool_t pool;
  RT(cudaDeviceGetDefaultMemPool(&pool, 0));
  unsigned long long keep = ~0ull;
  RT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  cudaStream_t stream;
  RT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  auto sync_pair = [=] {
    void *p;
    RT(cudaMalloc(&p, bytes));
    RT(cudaFree(p));
  };
  auto async_pair = [=] {
    void *p;
    RT(cudaMallocAsync(&p, bytes, stream));
    RT(cudaFreeAsync(p, stream));
  };
  for (int i = 0; i < 200; i++) { sync_pair(); async_pair(); }
  RT(cudaStreamSynchronize(stream));
  printf("READY\n");
  long long end = now_ns() + (long long)(seconds * 1e9);
  while (!stop && now_ns() < end) {
    window("sync", n_sync, sync_pair);
    window("async", n_async, async_pair);
    RT(cudaStreamSynchronize(stream));
  }
  printf("DONE\n");
  return 0;
}
