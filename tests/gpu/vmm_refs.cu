// Of vramscope's GPU checks (tests/gpu): memory shared between two processes of one GPU by file
// descriptor, torn down in NCCL's order (retain, release, unmap, release).
//
// vmm_refs [N [steps]]: the parent creates N buffers (4), maps them, exports each and sends it over a
// socket; the child imports and maps them; both tear down, the child first. Prints a line a process
//   REFS pid=.. created=.. retained=.. imported=.. released=..
// With `steps` it stops at each step, prints STEP and a name, and waits for a line on stdin, so that
// NVML can be read meanwhile.
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static const int MAX = 64;
static const size_t MiB = 1 << 20;
static long created, retained, imported, released;
static bool steps;
static int peer;

static void die(const char *what, int rc) {
  fprintf(stderr, "vmm_refs: %d: %s: error %d\n", getpid(), what, rc);
  exit(3);
}
#define DRV(x) do { CUresult rc_ = (x); if (rc_ != CUDA_SUCCESS) die(#x, (int)rc_); } while (0)
#define SYS(x) do { if (!(x)) die(#x, -1); } while (0)

// The driver is opened like libcudart opens it: the program itself links to no driver library.
#define FUNCTIONS(X) X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuMemCreate) \
    X(cuMemRelease) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) \
    X(cuMemSetAccess) X(cuMemRetainAllocationHandle) X(cuMemExportToShareableHandle) \
    X(cuMemImportFromShareableHandle) X(cuMemsetD8_v2) X(cuMemcpyDtoH_v2)
#define DECLARE(name) static decltype(&name) p_##name;
FUNCTIONS(DECLARE)

template <class F> static void find(void *library, F &function, const char *name) {
  function = (F)dlsym(library, name);
  if (!function) die(name, -1);
}

static void open_driver() {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) die(dlerror(), -1);
#define FIND(name) find(library, p_##name, #name);
  FUNCTIONS(FIND)
  CUcontext context;
  DRV(p_cuInit(0));
  DRV(p_cuDevicePrimaryCtxRetain(&context, 0));
  DRV(p_cuCtxSetCurrent(context));
}

static size_t size_of(int i) { return (i + 1) * 64 * MiB; }

static void step(const char *name) {
  if (!steps) return;
  printf("STEP %s\n", name);
  char line[16];
  if (!fgets(line, sizeof line, stdin)) exit(4);
}

// Waits until the other process is as far.
static void meet() {
  char byte = 'm';
  SYS(write(peer, &byte, 1) == 1);
  SYS(read(peer, &byte, 1) == 1);
}

static void send_fd(int fd) {
  char byte = 'f';
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof fd)] = {};
  iovec data = {&byte, 1};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_len = CMSG_LEN(sizeof fd);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  memcpy(CMSG_DATA(header), &fd, sizeof fd);
  SYS(sendmsg(peer, &message, 0) == 1);
}

static int receive_fd() {
  char byte;
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  iovec data = {&byte, 1};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  SYS(recvmsg(peer, &message, 0) == 1);
  cmsghdr *header = CMSG_FIRSTHDR(&message);
  SYS(header != nullptr);
  int fd;
  memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return fd;
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t bytes) {
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUdeviceptr address;
  DRV(p_cuMemAddressReserve(&address, bytes, 0, 0, 0));
  DRV(p_cuMemMap(address, bytes, 0, handle, 0));
  DRV(p_cuMemSetAccess(address, bytes, &access, 1));
  return address;
}

static CUdeviceptr create_and_send(size_t bytes) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle handle;
  DRV(p_cuMemCreate(&handle, bytes, &prop, 0));
  created++;
  CUdeviceptr address = map(handle, bytes);
  DRV(p_cuMemsetD8_v2(address, 0x5a, bytes));
  int fd;
  DRV(p_cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  send_fd(fd);
  close(fd);
  printf("SHARED created pid=%d 0x%llx %zu\n", getpid(), (unsigned long long)handle, bytes);
  return address;
}

static CUdeviceptr receive_and_import(size_t bytes) {
  CUmemGenericAllocationHandle handle;
  int fd = receive_fd();
  DRV(p_cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fd);
  imported++;
  printf("SHARED imported pid=%d 0x%llx %zu\n", getpid(), (unsigned long long)handle, bytes);
  return map(handle, bytes);
}

static void tear_down(CUdeviceptr address, size_t bytes) {
  CUmemGenericAllocationHandle handle;
  DRV(p_cuMemRetainAllocationHandle(&handle, (void *)address));
  retained++;
  DRV(p_cuMemRelease(handle));
  released++;
  DRV(p_cuMemUnmap(address, bytes));
  DRV(p_cuMemRelease(handle));
  released++;
  DRV(p_cuMemAddressFree(address, bytes));
}

static void child(int n) {
  CUdeviceptr address[MAX];
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  open_driver();
  meet();                                        // the parent measures: a bare context
  meet();
  for (int i = 0; i < n; i++) address[i] = receive_and_import(size_of(i));
  for (int i = 0; i < n; i++) {
    unsigned char byte = 0;
    DRV(p_cuMemcpyDtoH_v2(&byte, address[i], 1));
    if (byte != 0x5a) die("the import shows other bytes than the export", byte);
  }
  meet();                                        // the parent measures: imported
  meet();
  for (int i = 0; i < n; i++) tear_down(address[i], size_of(i));
  meet();                                        // the parent measures: the import is gone
  meet();
}

static void parent(int n) {
  CUdeviceptr address[MAX];
  open_driver();
  meet();
  step("both_have_a_context");
  meet();
  for (int i = 0; i < n; i++) address[i] = create_and_send(size_of(i));
  meet();
  step("exported_and_imported");
  meet();
  meet();
  step("importer_closed");
  meet();
  for (int i = 0; i < n; i++) tear_down(address[i], size_of(i));
  step("exporter_closed");
}

static void refs() {
  printf("REFS pid=%d created=%ld retained=%ld imported=%ld released=%ld\n", getpid(), created,
         retained, imported, released);
}

int main(int argc, char **argv) {
  int n = argc > 1 ? atoi(argv[1]) : 4;
  if (n < 1 || n > MAX) n = 4;
  steps = argc > 2 && !strcmp(argv[2], "steps");
  setvbuf(stdout, nullptr, _IOLBF, 0);
  int ends[2];
  SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  printf("PID %d\n", getpid());
  pid_t pid = fork();
  SYS(pid >= 0);
  peer = ends[pid == 0];
  close(ends[pid != 0]);
  if (pid == 0) {
    child(n);
    refs();
    fflush(stdout);
    _exit(0);
  }
  printf("CHILD %d\n", pid);
  parent(n);
  refs();
  int status = 0;
  SYS(waitpid(pid, &status, 0) == pid);
  printf("TOTAL bytes=%zu\n", size_of(0) * n * (n + 1) / 2);
  fflush(stdout);
  _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 5);
}
