/* vmm_nccl [N]: two processes share memory as NCCL's ranks do. Each creates N buffers, maps them,
 * hands them to the other one as file descriptors and maps what it was handed; the teardown is
 * retain, release, unmap, release for every map, so the references close exactly:
 * created + retained + imported = released. A ledger that frees at the first release is wrong. */
#include "truth.h"

#include <cuda.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define BYTES (4 * MIB)

static long created, retained, imported, released;
static int device, peer; /* the socket to the other process */

static void send_fd(int fd)
{
    char byte = 'f', room[CMSG_SPACE(sizeof fd)];
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room,
                             .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){
        .cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    EXPECT(sendmsg(peer, &message, 0) == 1);
}

static int receive_fd(void)
{
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room,
                             .msg_controllen = sizeof room};
    int fd;
    EXPECT(recvmsg(peer, &message, 0) == 1);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* Waits until the other process is as far. */
static void meet(void)
{
    char byte = 'm';
    EXPECT(write(peer, &byte, 1) == 1);
    EXPECT(read(peer, &byte, 1) == 1);
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle)
{
    CUmemAccessDesc access = {{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                              CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr addr;
    MUST(cuMemAddressReserve(&addr, BYTES, 0, 0, 0));
    MUST(cuMemMap(addr, BYTES, 0, handle, 0));
    MUST(cuMemSetAccess(addr, BYTES, &access, 1));
    return addr;
}

static CUdeviceptr create_and_send(void)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    CUmemGenericAllocationHandle handle;
    int fd;
    MUST(cuMemCreate(&handle, BYTES, &prop, 0));
    created++;
    MUST(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    send_fd(fd);
    close(fd);
    truth_live("device", handle, BYTES);
    return map(handle);
}

static CUdeviceptr import_one(void)
{
    CUmemGenericAllocationHandle handle;
    int fd = receive_fd();
    MUST(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    imported++;
    close(fd);
    truth_live("imported", handle, BYTES);
    return map(handle);
}

static void tear_down(CUdeviceptr addr)
{
    CUmemGenericAllocationHandle handle;
    MUST(cuMemRetainAllocationHandle(&handle, (void *)addr));
    retained++;
    MUST(cuMemRelease(handle));
    MUST(cuMemUnmap(addr, BYTES));
    MUST(cuMemRelease(handle));
    released += 2;
    MUST(cuMemAddressFree(addr, BYTES));
}

static void counts(void)
{
    printf("REFS pid=%d created=%ld retained=%ld imported=%ld released=%ld\n", getpid(), created,
           retained, imported, released);
}

int main(int argc, char **argv)
{
    long n = truth_arg(argc, argv, 1, 8);
    CUdeviceptr own[256], others[256];
    int ends[2];
    truth_begin();
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    pid_t child = fork();
    peer = ends[child == 0];
    close(ends[child != 0]);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        usleep(200 * 1000); /* as a rank that imports its framework first */
    } else {
        printf("CHILD %d\n", child);
    }
    CUcontext ctx;
    int devices;
    MUST(cuInit(0));
    MUST(cuDeviceGetCount(&devices));
    device = (child == 0) % devices;
    MUST(cuDevicePrimaryCtxRetain(&ctx, device));
    MUST(cuCtxSetCurrent(ctx));
    for (long i = 0; i < n && i < 256; i++) {
        own[i] = create_and_send();
        others[i] = import_one();
    }
    counts();
    meet();
    if (child)
        truth_ready();
    meet();
    for (long i = 0; i < n && i < 256; i++)
        tear_down(own[i]);
    meet(); /* between the two the pages live on as the other process's imports */
    for (long i = 0; i < n && i < 256; i++)
        tear_down(others[i]);
    counts();
    fflush(stdout);
    meet();
    if (!child) {
        pause();
        _exit(0);
    }
    truth_ready();
}
