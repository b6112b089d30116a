// Of vramscope's GPU checks (tests/gpu): known allocations at known lines of named functions.
//
// Prints a line `ALLOC {json}` each: its bytes, the line, the function that the line is in, and the
// function that the compiler put it into (`outer`, another one where it was inlined).
#include <cuda_runtime.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <thread>

static const size_t MiB = 1 << 20;
#define OWN __attribute__((noinline))

static void need(cudaError_t result) {
  if (result == cudaSuccess) return;
  fprintf(stderr, "sites: error %d\n", (int)result);
  exit(3);
}

static void say(const char *level, int line, const char *function, const char *outer, size_t bytes) {
  printf("ALLOC {\"level\": \"%s\", \"line\": %d, \"function\": \"%s\", \"outer\": \"%s\", \"bytes\": %zu}\n",
         level, line, function, outer, bytes);
  fflush(stdout);
}

OWN void *grow_plain(size_t bytes) {
  void *block = nullptr;
  const int line = __LINE__ + 1;
  need(cudaMalloc(&block, bytes));
  say("device", line, __func__, __func__, bytes);
  return block;
}

OWN void *grow_ordered(size_t bytes) {
  void *block = nullptr;
  const int line = __LINE__ + 1;
  need(cudaMallocAsync(&block, bytes, nullptr));
  say("pool", line, __func__, __func__, bytes);
  return block;
}

static inline __attribute__((always_inline)) void *grow_inlined(size_t bytes, const char *outer) {
  void *block = nullptr;
  const int line = __LINE__ + 1;
  need(cudaMalloc(&block, bytes));
  say("device", line, __func__, outer, bytes);
  return block;
}

OWN void *grow_outer(size_t bytes) { return grow_inlined(bytes, __func__); }

OWN void *grow_in_thread(size_t bytes) {
  void *block = nullptr;
  const int line = __LINE__ + 1;
  need(cudaMalloc(&block, bytes));
  say("device", line, __func__, __func__, bytes);
  return block;
}

int main() {
  printf("PID {\"pid\": %d}\n", getpid());
  need(cudaFree(nullptr));
  void *kept[4] = {grow_plain(8 * MiB), grow_ordered(24 * MiB), grow_outer(40 * MiB)};
  std::thread([&] { kept[3] = grow_in_thread(56 * MiB); }).join();
  need(cudaDeviceSynchronize());
  printf("HELD {\"blocks\": %zu}\n", sizeof kept / sizeof *kept);
  sleep(1);
  return 0;
}
