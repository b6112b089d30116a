/* share exporter-first|importer-first: two processes that share memory in the three ways there are.
 * One exports a block of cuMemAlloc (IPC handle), one of cuMemCreate (file descriptor) and one of a
 * pool (descriptor and pointer); the other one imports and maps them. At the first READY both hold
 * all three; then the first of the two ends as it is, freeing nothing, and at the second READY the
 * other one is alone; then that one lets go by calls, and at the third READY it holds nothing but
 * its context. The process that was started has no part in it. */
#include "truth.h"

#include <cuda.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define IPC_BYTES (6 * MIB)
#define VMM_BYTES (4 * MIB)
#define POOL_BYTES (2 * MIB)

struct message {
    CUipcMemHandle block;
    CUmemPoolPtrExportData pointer;
};

/* What one process holds: addresses and, of cuMemCreate's memory, the handle. */
struct held {
    CUdeviceptr block, mapped, pooled;
    CUmemGenericAllocationHandle memory;
    CUmemoryPool pool;
};

static void send_all(int peer, const struct message *message, const int fds[2])
{
    char room[CMSG_SPACE(2 * sizeof(int))] = {0};
    struct iovec data = {(void *)message, sizeof *message};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room,
                            .msg_controllen = sizeof room};
    struct cmsghdr *control = CMSG_FIRSTHDR(&header);
    *control = (struct cmsghdr){.cmsg_len = CMSG_LEN(2 * sizeof(int)), .cmsg_level = SOL_SOCKET,
                                .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(control), fds, 2 * sizeof(int));
    EXPECT(sendmsg(peer, &header, 0) == sizeof *message);
}

static void receive_all(int peer, struct message *message, int fds[2])
{
    char room[CMSG_SPACE(2 * sizeof(int))];
    struct iovec data = {message, sizeof *message};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room,
                            .msg_controllen = sizeof room};
    EXPECT(recvmsg(peer, &header, MSG_WAITALL) == sizeof *message);
    memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&header)), 2 * sizeof(int));
}

static void begin(void)
{
    CUcontext ctx;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody stays behind */
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
}

static CUdeviceptr map(CUmemGenericAllocationHandle memory)
{
    CUmemAccessDesc access = {{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                              CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr addr;
    MUST(cuMemAddressReserve(&addr, VMM_BYTES, 0, 0, 0));
    MUST(cuMemMap(addr, VMM_BYTES, 0, memory, 0));
    MUST(cuMemSetAccess(addr, VMM_BYTES, &access, 1));
    return addr;
}

static struct held export_all(int peer)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                            .location = prop.location};
    struct held held;
    struct message message;
    int fds[2];
    MUST(cuMemAlloc(&held.block, IPC_BYTES));
    MUST(cuIpcGetMemHandle(&message.block, held.block));
    MUST(cuMemCreate(&held.memory, VMM_BYTES, &prop, 0));
    held.mapped = map(held.memory);
    MUST(cuMemExportToShareableHandle(&fds[0], held.memory,
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    MUST(cuMemPoolCreate(&held.pool, &props));
    MUST(cuMemAllocFromPoolAsync(&held.pooled, POOL_BYTES, held.pool, 0));
    MUST(cuStreamSynchronize(0));
    MUST(cuMemPoolExportToShareableHandle(&fds[1], held.pool,
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    MUST(cuMemPoolExportPointer(&message.pointer, held.pooled));
    send_all(peer, &message, fds);
    close(fds[0]);
    close(fds[1]);
    return held;
}

static struct held import_all(int peer)
{
    struct held held;
    struct message message;
    int fds[2];
    receive_all(peer, &message, fds);
    MUST(cuIpcOpenMemHandle(&held.block, message.block, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    MUST(cuMemImportFromShareableHandle(&held.memory, (void *)(intptr_t)fds[0],
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    held.mapped = map(held.memory);
    MUST(cuMemPoolImportFromShareableHandle(&held.pool, (void *)(intptr_t)fds[1],
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    MUST(cuMemPoolImportPointer(&held.pooled, held.pool, &message.pointer));
    close(fds[0]);
    close(fds[1]);
    return held;
}

static void print_live(const struct held *held, int is_importer)
{
    truth_live(is_importer ? "imported" : "device", held->block, IPC_BYTES);
    truth_live(is_importer ? "imported" : "device", held->memory, VMM_BYTES);
    truth_live(is_importer ? "imported" : "pool", held->pooled, POOL_BYTES);
}

static void let_go(const struct held *held, int is_importer)
{
    MUST(is_importer ? cuIpcCloseMemHandle(held->block) : cuMemFree(held->block));
    MUST(cuMemUnmap(held->mapped, VMM_BYTES));
    MUST(cuMemRelease(held->memory));
    MUST(cuMemAddressFree(held->mapped, VMM_BYTES));
    MUST(cuMemFreeAsync(held->pooled, 0));
    MUST(cuStreamSynchronize(0));
    MUST(cuMemPoolDestroy(held->pool));
}

/* One of the two: tells `above` of each step that is done, and hears from it when to do the next. */
static void take_part(int above, int peer, int is_importer)
{
    char order;
    begin();
    struct held held = is_importer ? import_all(peer) : export_all(peer);
    print_live(&held, is_importer);
    EXPECT(write(above, "d", 1) == 1);
    while (read(above, &order, 1) == 1 && order != 'e') {
        if (order == 'l')
            let_go(&held, is_importer);
        else
            print_live(&held, is_importer);
        EXPECT(write(above, "d", 1) == 1);
    }
    fflush(stdout);
    _exit(0);
}

static pid_t start(int *below, int peer, int is_importer)
{
    int pair[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    pid_t pid = fork();
    if (pid == 0)
        take_part(pair[1], peer, is_importer);
    close(pair[1]);
    *below = pair[0];
    return pid;
}

static void hear(int below)
{
    char done;
    EXPECT(read(below, &done, 1) == 1);
}

static void order(int below, const char *what)
{
    EXPECT(write(below, what, 1) == 1);
    if (*what != 'e')
        hear(below);
}

int main(int argc, char **argv)
{
    int between[2], below[2];
    int first = argc > 1 && !strcmp(argv[1], "importer-first");
    truth_begin();
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, between) == 0);
    pid_t pids[2] = {start(&below[0], between[0], 0), start(&below[1], between[1], 1)};
    hear(below[0]);
    hear(below[1]);
    printf("EXPORTER %d\nIMPORTER %d\n", pids[0], pids[1]);
    truth_ready();
    order(below[first], "e");
    EXPECT(waitpid(pids[first], NULL, 0) == pids[first]);
    order(below[!first], "p");
    truth_ready();
    order(below[!first], "l");
    truth_ready();
    order(below[!first], "e");
    int status;
    EXPECT(waitpid(pids[!first], &status, 0) == pids[!first]);
    return status ? 3 : 0;
}
