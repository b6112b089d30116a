// Of vramscope's GPU checks (tests/gpu): a program that prints its own true account, by address.
// w1 N S: known CUDA memory calls, and what is truly live at the end.
//   N pairs of cudaMalloc(1 MiB)/cudaFree, then N pairs of cudaMallocAsync/cudaFreeAsync (timed),
//   then leaks: 10 x 4 MiB by cudaMalloc (leak_here), 10 x 4 MiB by cuMemCreate+cuMemMap (vmm_leak),
//   5 refused cudaMalloc of 1 PiB, and 4 threads that hold one 3 MiB block each while the main
//   thread frees a second block of each. Sleeps S seconds, then exits without freeing.
// W1_ONLY=bench: only the pairs. W1_ONLY=leak: only the leaks. W1_ONLY=none: only a context.
// W1_PAUSE_MS (default 1500): pause between phases, so that a tool that polls can catch up.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static long n_malloc, n_malloc_failed, n_free, n_malloc_async, n_free_async, n_create;
static const size_t MiB = 1 << 20;

static void die(const char *what, int rc) { fprintf(stderr, "w1: %s: error %d\n", what, rc); exit(3); }
#define RT(x) do { cudaError_t rc_ = (x); if (rc_ != cudaSuccess) die(#x, (int)rc_); } while (0)
#define DRV(x) do { CUresult rc_ = (x); if (rc_ != CUDA_SUCCESS) die(#x, (int)rc_); } while (0)

static double now_ns() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
static void pause_ms(long ms) { timespec t = {ms / 1000, (ms % 1000) * 1000000}; while (nanosleep(&t, &t)) {} }
static long tid() { return syscall(SYS_gettid); }
static void say_leak(const char *kind, unsigned long long p, size_t n) { printf("LEAK %s 0x%llx %zu tid=%ld\n", kind, p, n, tid()); }

static void sync_pair() { void *p; RT(cudaMalloc(&p, MiB)); n_malloc++; RT(cudaFree(p)); n_free++; }
static void async_pair(cudaStream_t s) { void *p; RT(cudaMallocAsync(&p, MiB, s)); n_malloc_async++; RT(cudaFreeAsync(p, s)); n_free_async++; }

template <class F> static void timed(const char *name, long n, F pair) {
  const int blocks = 10;
  std::vector<double> per;
  double t0 = now_ns();
  long done = 0;
  for (int b = 0; b < blocks; b++) {
    long k = n * (b + 1) / blocks - done;
    if (!k) continue;
    double a = now_ns();
    for (long i = 0; i < k; i++) pair();
    per.push_back((now_ns() - a) / k);
    done += k;
  }
  double mean = (now_ns() - t0) / (done ? done : 1);
  std::sort(per.begin(), per.end());
  printf("PAIRS %s n=%ld ns_mean=%.0f ns_median_block=%.0f\n", name, done, mean, per.empty() ? 0 : per[per.size() / 2]);
}

extern "C" __attribute__((noinline)) void leak_here() {
  for (int i = 0; i < 10; i++) {
    void *p; RT(cudaMalloc(&p, 4 * MiB)); n_malloc++;
    say_leak("plain", (unsigned long long)p, 4 * MiB);
  }
}

template <class F> static F drv(void *h, const char *name) { F f = (F)dlsym(h, name); if (!f) die(name, -1); return f; }

extern "C" __attribute__((noinline)) void vmm_leak() {
  void *h = dlopen("libcuda.so.1", RTLD_NOW); if (!h) die(dlerror(), -1);
  auto reserve = drv<CUresult (*)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)>(h, "cuMemAddressReserve");
  auto create = drv<CUresult (*)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)>(h, "cuMemCreate");
  auto map = drv<CUresult (*)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)>(h, "cuMemMap");
  auto access = drv<CUresult (*)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)>(h, "cuMemSetAccess");
  CUmemAllocationProp prop; memset(&prop, 0, sizeof prop);
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemAccessDesc d; memset(&d, 0, sizeof d);
  d.location = prop.location; d.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUdeviceptr va; DRV(reserve(&va, 40 * MiB, 0, 0, 0));
  for (int i = 0; i < 10; i++) {
    CUmemGenericAllocationHandle m;
    DRV(create(&m, 4 * MiB, &prop, 0)); n_create++;
    DRV(map(va + i * 4 * MiB, 4 * MiB, 0, m, 0));
    say_leak("vmm", va + i * 4 * MiB, 4 * MiB);
  }
  DRV(access(va, 40 * MiB, &d, 1));
}

extern "C" __attribute__((noinline)) void failed_calls() {
  for (int i = 0; i < 5; i++) {
    void *p = (void *)0xdead0000;
    cudaError_t rc = cudaMalloc(&p, (size_t)1 << 50);
    if (rc == cudaSuccess) die("1 PiB was granted", 0);
    n_malloc_failed++; (void)cudaGetLastError();
  }
}

static pthread_barrier_t allocated, finish;
static void *to_free[4];
static pthread_mutex_t out = PTHREAD_MUTEX_INITIALIZER;
extern "C" __attribute__((noinline)) void *thread_leak(void *arg) {
  long i = (long)arg; void *keep, *give;
  RT(cudaMalloc(&keep, 3 * MiB)); RT(cudaMalloc(&give, 3 * MiB));
  __sync_fetch_and_add(&n_malloc, 2);
  pthread_mutex_lock(&out);
  say_leak("thread", (unsigned long long)keep, 3 * MiB);
  printf("FREED thread 0x%llx %zu tid=%ld\n", (unsigned long long)give, 3 * MiB, tid());
  pthread_mutex_unlock(&out);
  to_free[i] = give;
  pthread_barrier_wait(&allocated);
  pthread_barrier_wait(&finish);       // alive until the process ends
  return nullptr;
}

int main(int argc, char **argv) {
  long n = argc > 1 ? atol(argv[1]) : 2000, s = argc > 2 ? atol(argv[2]) : 4;
  const char *only = getenv("W1_ONLY") ? getenv("W1_ONLY") : "", *ps = getenv("W1_PAUSE_MS");
  long pause = ps ? atol(ps) : 1500;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("PID %d\n", getpid());
  RT(cudaFree(0)); n_free++;
  bool bench = !*only || !strcmp(only, "bench"), leak = !*only || !strcmp(only, "leak");
  if (bench) {
    cudaMemPool_t pool; RT(cudaDeviceGetDefaultMemPool(&pool, 0));
    unsigned long long keep = ~0ull; RT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    cudaStream_t st; RT(cudaStreamCreate(&st));
    for (long i = 0; i < 100; i++) { sync_pair(); async_pair(st); }   // warm-up; in the counts
    timed("sync", n, [] { sync_pair(); });
    timed("async", n, [st] { async_pair(st); });
    RT(cudaStreamSynchronize(st));
    unsigned long long r = 0; RT(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &r));
    printf("POOL reserved_bytes=%llu\n", r);
    if (leak) pause_ms(pause);
  }
  if (leak) {
    leak_here();
    vmm_leak();
    failed_calls();
    pthread_barrier_init(&allocated, nullptr, 5); pthread_barrier_init(&finish, nullptr, 5);
    for (long i = 0; i < 4; i++) { pthread_t t; if (pthread_create(&t, nullptr, thread_leak, (void *)i)) die("pthread_create", 0); }
    pthread_barrier_wait(&allocated);
    pause_ms(pause);                     // a poller has seen the blocks before they go
    for (int i = 0; i < 4; i++) { RT(cudaFree(to_free[i])); n_free++; }
    printf("TRUE plain_bytes=%zu vmm_bytes=%zu thread_bytes=%zu failed_calls=%ld\n", 40 * MiB, 40 * MiB, 12 * MiB, n_malloc_failed);
  } else printf("TRUE plain_bytes=0 vmm_bytes=0 thread_bytes=0 failed_calls=0\n");
  printf("COUNTS cudaMalloc=%ld cudaMalloc_failed=%ld cudaFree=%ld cudaMallocAsync=%ld cudaFreeAsync=%ld cuMemCreate=%ld\n",
         n_malloc, n_malloc_failed, n_free, n_malloc_async, n_free_async, n_create);
  printf("READY\n");
  sleep(s);
  fflush(stdout);
  _exit(0);
}
