// Of vramscope's GPU checks (tests/gpu): a program that prints its own true account, by address.
// burst [T P [async|sync [S]]]: T threads (8) x P pairs (20,000) of cudaMallocAsync/cudaFreeAsync (or
// cudaMalloc/cudaFree) of 64 KiB, as fast as they go; then each thread keeps one 1 MiB block. Sleeps S seconds.
#include <cuda_runtime.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static int T = 8; static long P = 20000; static bool sync_mode; static pthread_barrier_t go, done, finish;
static void die(const char *what, int rc) { fprintf(stderr, "burst: %s: error %d\n", what, rc); exit(3); }
#define RT(x) do { cudaError_t rc_ = (x); if (rc_ != cudaSuccess) die(#x, (int)rc_); } while (0)
static double now_ns() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }

static void *work(void *) {
  void *p; cudaStream_t s;
  RT(cudaSetDevice(0));
  RT(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  pthread_barrier_wait(&go);
  for (long i = 0; i < P; i++) {
    if (sync_mode) { RT(cudaMalloc(&p, 65536)); RT(cudaFree(p)); }
    else { RT(cudaMallocAsync(&p, 65536, s)); RT(cudaFreeAsync(p, s)); }
  }
  pthread_barrier_wait(&done);
  if (sync_mode) RT(cudaMalloc(&p, 1 << 20)); else RT(cudaMallocAsync(&p, 1 << 20, s));
  static pthread_mutex_t out = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&out);
  printf("LEAK held 0x%llx %d tid=%ld\n", (unsigned long long)p, 1 << 20, (long)syscall(SYS_gettid));
  pthread_mutex_unlock(&out);
  pthread_barrier_wait(&finish);
  pause();
  return nullptr;
}

int main(int argc, char **argv) {
  if (argc > 1) T = atoi(argv[1]);
  if (argc > 2) P = atol(argv[2]);
  sync_mode = argc > 3 && !strcmp(argv[3], "sync");
  int s = argc > 4 ? atoi(argv[4]) : 3;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("PID %d\n", getpid());
  RT(cudaFree(0));
  cudaMemPool_t pool; RT(cudaDeviceGetDefaultMemPool(&pool, 0));
  unsigned long long keep = ~0ull; RT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  pthread_barrier_init(&go, nullptr, T + 1); pthread_barrier_init(&done, nullptr, T + 1); pthread_barrier_init(&finish, nullptr, T + 1);
  for (int i = 0; i < T; i++) { pthread_t t; if (pthread_create(&t, nullptr, work, nullptr)) die("pthread_create", 0); }
  pthread_barrier_wait(&go);
  double a = now_ns();
  pthread_barrier_wait(&done);
  double ns = now_ns() - a;
  pthread_barrier_wait(&finish);
  printf("BURST mode=%s threads=%d pairs=%ld allocs=%ld frees=%ld held_bytes=%lld wall_ms=%.1f ns_per_pair_per_thread=%.0f\n",
         sync_mode ? "sync" : "async", T, P * T, P * T + T, P * T, (long long)T << 20, ns / 1e6, ns / P);
  printf("READY\n");
  sleep(s);
  fflush(stdout);
  _exit(0);
}
