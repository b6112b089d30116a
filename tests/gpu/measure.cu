// Of vramscope's GPU checks (tests/gpu): one small act after the other, so that NVML can be read
// between them.
//
// measure context|rounding|managed|pinned|pool|export, or measure import HANDLE. Prints
//   STEP name            and waits for a line on stdin
//   FIGURE name value    something that only the program can see
//   HANDLE hex           (export) the IPC handle, for `measure import`
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static const size_t KiB = 1 << 10, MiB = 1 << 20, BLOCK = 256 * MiB;

static void die(const char *what, int rc) {
  fprintf(stderr, "measure: %s: error %d\n", what, rc);
  exit(3);
}
#define RT(x) do { cudaError_t rc_ = (x); if (rc_ != cudaSuccess) die(#x, (int)rc_); } while (0)
#define DRV(x) do { CUresult rc_ = (x); if (rc_ != CUDA_SUCCESS) die(#x, (int)rc_); } while (0)

#define FUNCTIONS(X) X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuMemAlloc_v2) \
    X(cuMemFree_v2) X(cuMemGetInfo_v2) X(cuMemCreate) X(cuMemRelease) \
    X(cuMemGetAllocationGranularity)
#define DECLARE(name) static decltype(&name) p_##name;
FUNCTIONS(DECLARE)

static void open_driver() {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) die(dlerror(), -1);
#define FIND(name) p_##name = (decltype(&name))dlsym(library, #name); if (!p_##name) die(#name, -1);
  FUNCTIONS(FIND)
}

static void step(const char *name) {
  printf("STEP %s\n", name);
  char line[16];
  if (!fgets(line, sizeof line, stdin)) exit(4);
}

static void figure(const char *name, unsigned long long value) {
  printf("FIGURE %s %llu\n", name, value);
}

__global__ void write_all(char *bytes, size_t n) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (; i < n; i += gridDim.x * (size_t)blockDim.x) bytes[i] = 1;
}

static void touch_on_gpu(void *p, size_t n) {
  write_all<<<256, 256>>>((char *)p, n);
  RT(cudaGetLastError());
  RT(cudaDeviceSynchronize());
}

static void context() {
  step("before_cuInit");
  DRV(p_cuInit(0));
  step("cuInit");
  CUcontext primary;
  DRV(p_cuDevicePrimaryCtxRetain(&primary, 0));
  DRV(p_cuCtxSetCurrent(primary));
  step("primary_context");
  RT(cudaSetDevice(0));
  RT(cudaFree(0));
  step("runtime");
  touch_on_gpu(nullptr, 0);
  step("first_kernel");
}

static size_t free_bytes() {
  size_t available = 0, total = 0;
  DRV(p_cuMemGetInfo_v2(&available, &total));
  return available;
}

// How many blocks of one size fit into what the driver takes from the device at once.
static void small(size_t bytes) {
  const int most = 20000;
  static CUdeviceptr blocks[most];
  char name[64];
  int count = 0, first_step = -1, second_step = -1;
  size_t before = free_bytes(), taken = 0;
  while (count < most && second_step < 0) {
    DRV(p_cuMemAlloc_v2(&blocks[count], bytes));
    count++;
    size_t now = free_bytes();
    if (now < before) {
      if (first_step < 0) first_step = count;
      else second_step = count, taken = before - now;
      before = now;
    }
  }
  if (second_step > 0) {
    snprintf(name, sizeof name, "blocks_of_%zu_B_per_step", bytes);
    figure(name, second_step - first_step);
    snprintf(name, sizeof name, "bytes_per_step_with_blocks_of_%zu_B", bytes);
    figure(name, taken);
  }
  if (count > 2) {
    snprintf(name, sizeof name, "distance_of_blocks_of_%zu_B", bytes);
    unsigned long long a = blocks[count - 2], b = blocks[count - 3];
    figure(name, a > b ? a - b : b - a);
  }
  while (count > 0) DRV(p_cuMemFree_v2(blocks[--count]));
}

static void rounding() {
  const struct { const char *name; size_t bytes; } sizes[] = {
      {"1_B", 1}, {"4_KiB", 4 * KiB}, {"64_KiB", 64 * KiB}, {"1_MiB", MiB}, {"2_MiB", 2 * MiB},
      {"2_MiB+1_B", 2 * MiB + 1}, {"3_MiB", 3 * MiB}, {"20_MiB", 20 * MiB}, {"1_GiB", 1024 * MiB}};
  char name[64];
  RT(cudaFree(0));
  step("base");
  for (auto size : sizes) {
    CUdeviceptr block;
    DRV(p_cuMemAlloc_v2(&block, size.bytes));
    snprintf(name, sizeof name, "alloc_%s", size.name);
    step(name);
    DRV(p_cuMemFree_v2(block));
    snprintf(name, sizeof name, "free_%s", size.name);
    step(name);
  }
  for (size_t bytes : {(size_t)1, 512 * (size_t)1, 4 * KiB, 64 * KiB, 512 * KiB}) small(bytes);
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  size_t least = 0, advised = 0;
  DRV(p_cuMemGetAllocationGranularity(&least, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  DRV(p_cuMemGetAllocationGranularity(&advised, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  figure("cuMemCreate_granularity_minimum", least);
  figure("cuMemCreate_granularity_recommended", advised);
  step("before_cuMemCreate");
  CUmemGenericAllocationHandle handle;
  DRV(p_cuMemCreate(&handle, least, &prop, 0));
  step("cuMemCreate_minimum");
  DRV(p_cuMemRelease(handle));
  step("cuMemRelease_minimum");
}

// Never more than 512 MiB of managed memory at once.
static void managed() {
  RT(cudaFree(0));
  touch_on_gpu(nullptr, 0);
  step("base");
  char *p;
  RT(cudaMallocManaged(&p, BLOCK));
  step("untouched");
  memset(p, 1, BLOCK);
  step("touched_by_CPU");
  touch_on_gpu(p, BLOCK);
  step("touched_by_GPU");
  memset(p, 2, BLOCK);
  step("touched_by_CPU_again");
  RT(cudaFree(p));
  step("freed");
  RT(cudaMallocManaged(&p, BLOCK));
#if CUDART_VERSION >= 13000
  cudaMemLocation where = {};
  where.type = cudaMemLocationTypeDevice;
  RT(cudaMemPrefetchAsync(p, BLOCK, where, 0, 0));
#else
  RT(cudaMemPrefetchAsync(p, BLOCK, 0, 0));
#endif
  RT(cudaDeviceSynchronize());
  step("another_prefetched_to_GPU");
  RT(cudaFree(p));
  step("that_freed");
}

static void pinned() {
  RT(cudaFree(0));
  step("base");
  void *p;
  RT(cudaHostAlloc(&p, BLOCK, cudaHostAllocDefault));
  step("cudaHostAlloc");
  RT(cudaFreeHost(p));
  step("cudaFreeHost");
  p = malloc(BLOCK);
  if (!p) die("malloc", -1);
  memset(p, 1, BLOCK);
  step("malloc");
  RT(cudaHostRegister(p, BLOCK, cudaHostRegisterDefault));
  step("cudaHostRegister");
  RT(cudaHostUnregister(p));
  step("cudaHostUnregister");
}

static void pool_figures(cudaMemPool_t pool, const char *when) {
  unsigned long long reserved = 0, used = 0;
  char name[64];
  RT(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved));
  RT(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
  snprintf(name, sizeof name, "pool_reserved_%s", when);
  figure(name, reserved);
  snprintf(name, sizeof name, "pool_used_%s", when);
  figure(name, used);
}

static void pool() {
  RT(cudaFree(0));
  step("base");
  cudaMemPool_t pool;
  RT(cudaDeviceGetDefaultMemPool(&pool, 0));
  unsigned long long keep = ~0ull;
  RT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  void *p, *q;
  RT(cudaMallocAsync(&p, 1, 0));
  RT(cudaDeviceSynchronize());
  step("cudaMallocAsync_1_B");
  pool_figures(pool, "with_1_B");
  RT(cudaMallocAsync(&q, BLOCK, 0));
  RT(cudaDeviceSynchronize());
  step("cudaMallocAsync_256_MiB");
  pool_figures(pool, "with_256_MiB");
  RT(cudaFreeAsync(q, 0));
  RT(cudaDeviceSynchronize());
  step("freed_threshold_max");
  pool_figures(pool, "freed_threshold_max");
  RT(cudaMemPoolTrimTo(pool, 0));
  step("trimmed");
  pool_figures(pool, "trimmed");
  keep = 0;
  RT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  RT(cudaMallocAsync(&q, BLOCK, 0));
  RT(cudaDeviceSynchronize());
  step("256_MiB_again_threshold_0");
  RT(cudaFreeAsync(q, 0));
  RT(cudaDeviceSynchronize());
  step("freed_threshold_0");
  pool_figures(pool, "freed_threshold_0");
}

static void export_block() {
  RT(cudaFree(0));
  step("context");
  void *p;
  RT(cudaMalloc(&p, BLOCK));
  RT(cudaMemset(p, 0x5a, BLOCK));
  RT(cudaDeviceSynchronize());
  cudaIpcMemHandle_t handle;
  RT(cudaIpcGetMemHandle(&handle, p));
  printf("HANDLE ");
  for (unsigned char byte : handle.reserved) printf("%02x", byte);
  printf("\n");
  step("exported");
  RT(cudaFree(p));
  step("freed");
}

static void import_block(const char *hex) {
  cudaIpcMemHandle_t handle;
  if (strlen(hex) != 2 * sizeof handle.reserved) die("the handle's length", (int)strlen(hex));
  for (size_t i = 0; i < sizeof handle.reserved; i++) {
    unsigned byte;
    if (sscanf(hex + 2 * i, "%2x", &byte) != 1) die("the handle's digits", (int)i);
    handle.reserved[i] = (char)byte;
  }
  RT(cudaFree(0));
  step("context");
  void *p;
  unsigned char byte = 0;
  RT(cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess));
  step("opened");
  RT(cudaMemcpy(&byte, p, 1, cudaMemcpyDeviceToHost));
  if (byte != 0x5a) die("the import shows other bytes than the export", byte);
  step("read");
  RT(cudaIpcCloseMemHandle(p));
  step("closed");
}

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "";
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("PID %d\n", getpid());
  open_driver();
  if (!strcmp(what, "context")) context();
  else if (!strcmp(what, "rounding")) rounding();
  else if (!strcmp(what, "managed")) managed();
  else if (!strcmp(what, "pinned")) pinned();
  else if (!strcmp(what, "pool")) pool();
  else if (!strcmp(what, "export")) export_block();
  else if (!strcmp(what, "import") && argc > 2) import_block(argv[2]);
  else die("usage: measure WHAT (see the top of measure.cu)", 2);
  fflush(stdout);
  _exit(0);
}
