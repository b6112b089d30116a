#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x76736d33u /* changes with the layout of struct sim_state */

static struct sim_state *state;

uint64_t sim_env(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : fallback;
}

void sim_sleep_ms(uint64_t ms)
{
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR) {
    }
}

const char *sim_state_path(void)
{
    static char fallback[64];
    const char *path = getenv("SIM_STATE");
    if (path && *path)
        return path;
    snprintf(fallback, sizeof fallback, "/dev/shm/vramscope-sim-%u", (unsigned)getuid());
    return fallback;
}

static bool initialise(int fd)
{
    if (ftruncate(fd, sizeof(struct sim_state)))
        return false;
    struct sim_state *new = mmap(NULL, sizeof *new, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (new == MAP_FAILED)
        return false;
    uint64_t gpus = sim_env("SIM_GPUS", 2);
    uint64_t mig = sim_env("SIM_MIG", 0), parts = mig > 1 ? mig : 1, most = SIM_MAX_GPUS / parts;
    new->mig = mig > 7 ? 7 : (uint32_t)mig;
    new->gpus = (uint32_t)((gpus < 1 ? 1 : gpus > most ? most : gpus) * parts);
    new->capacity = sim_env("SIM_MEMORY_MIB", 81920) / parts * SIM_MIB;
    new->reserved = sim_env("SIM_RESERVED_MIB", 512) * SIM_MIB;
    new->context_bytes = sim_env("SIM_CONTEXT_MIB", 500) * SIM_MIB;
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&new->lock, &shared);
    new->magic = MAGIC;
    munmap(new, sizeof *new);
    return true;
}

struct sim_state *sim_state_open(void)
{
    if (state)
        return state;
    const char *path = sim_state_path();
    /* Without O_CREAT first: in a sticky folder the kernel refuses O_CREAT on another user's
     * file (fs.protected_regular), and the agent is root while the programs are not. */
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return NULL;
    struct stat info;
    uint32_t magic = 0;
    flock(fd, LOCK_EX); /* the first process initialises, the others wait for it */
    bool usable = !fstat(fd, &info);
    if (usable && info.st_size == 0) {
        fchmod(fd, 0666); /* whatever the umask: other users share the GPUs */
        usable = initialise(fd);
    }
    usable = usable && pread(fd, &magic, sizeof magic, 0) == sizeof magic && magic == MAGIC;
    flock(fd, LOCK_UN);
    if (usable) {
        void *map = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        state = map == MAP_FAILED ? NULL : map;
    }
    close(fd);
    return state;
}

/* The sum of what is charged is always consistent (each is one store); the total may not be. */
static void repair_totals(void)
{
    memset(state->used, 0, sizeof state->used);
    for (int slot = 0; slot < SIM_MAX_OWNERS; slot++)
        for (uint32_t gpu = 0; gpu < state->gpus; gpu++)
            state->used[gpu] += state->owners[slot].charged[gpu];
    for (int i = 0; i < SIM_MAX_EXPORTS; i++)
        if (state->exports[i].id && state->exports[i].charged_to < 0)
            state->used[state->exports[i].gpu] += state->exports[i].bytes;
}

void sim_lock(void)
{
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD) {
        repair_totals();
        pthread_mutex_consistent(&state->lock);
    }
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&state->lock);
}

/* As the driver, which knows the host's numbers also of processes in containers: what /proc says, for a
 * container whose /proc is the host's. */
static int32_t own_pid(void)
{
    char text[16] = "";
    ssize_t n = readlink("/proc/self", text, sizeof text - 1);
    return n > 0 ? (int32_t)strtol(text, NULL, 10) : getpid();
}

/* False when the process is gone; a zombie's files are closed, so its memory is, too. */
static bool identify(int32_t pid, struct sim_identity *who)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = 0;
    char *field = strrchr(text, ')'); /* the name may hold anything, brackets too */
    if (!field || strchr("ZX", field[2]))
        return false;
    *who = (struct sim_identity){.pid = pid};
    field += 1; /* before field 3 */
    for (int i = 3; i <= 28 && field; i++) {
        field += 1;
        if (i == 22)
            who->start_ticks = strtoull(field, NULL, 10);
        if (i == 28)
            who->start_stack = strtoull(field, NULL, 10);
        field = strchr(field, ' ');
    }
    return who->start_ticks != 0;
}

static bool is_alive(const struct sim_identity *who)
{
    struct sim_identity now;
    if (!identify(who->pid, &now) || now.start_ticks != who->start_ticks)
        return false;
    return !now.start_stack || !who->start_stack || now.start_stack == who->start_stack;
}

int sim_export_path(uint64_t id, char *path, unsigned long room)
{
    return snprintf(path, room, "%s.export.%llu", sim_state_path(), (unsigned long long)id);
}

/* The exporter holds a shared flock on the descriptor that it hands out; the lock belongs to the
 * open file, so it lives until the last duplicate in the last process is closed. */
static bool export_file_is_open(uint64_t id)
{
    char path[4096];
    sim_export_path(id, path, sizeof path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool open_elsewhere = flock(fd, LOCK_EX | LOCK_NB) != 0;
    close(fd);
    return open_elsewhere;
}

bool sim_export_has_holders(const struct sim_export *shared)
{
    for (int i = 0; i < SIM_MAX_OWNERS / 64; i++)
        if (shared->holders[i])
            return true;
    return false;
}

void sim_export_hold(struct sim_export *shared, int owner)
{
    shared->holders[owner / 64] |= 1ull << (owner % 64);
}

static void export_free(struct sim_export *shared)
{
    char path[4096];
    sim_export_path(shared->id, path, sizeof path);
    unlink(path);
    if (shared->charged_to >= 0)
        state->owners[shared->charged_to].charged[shared->gpu] -= shared->bytes;
    state->used[shared->gpu] -= shared->bytes;
    memset(shared, 0, sizeof *shared);
}

void sim_export_drop(struct sim_export *shared, int owner)
{
    shared->holders[owner / 64] &= ~(1ull << (owner % 64));
    if (!sim_export_has_holders(shared) && !export_file_is_open(shared->id)) {
        export_free(shared);
    } else if (shared->charged_to == owner) {
        state->owners[owner].charged[shared->gpu] -= shared->bytes;
        shared->charged_to = -1;
    }
}

static void owner_free(int slot)
{
    struct sim_owner *owner = &state->owners[slot];
    for (int i = 0; i < SIM_MAX_EXPORTS; i++)
        if (state->exports[i].id)
            sim_export_drop(&state->exports[i], slot);
    for (uint32_t gpu = 0; gpu < state->gpus; gpu++)
        state->used[gpu] -= owner->charged[gpu];
    memset(owner, 0, sizeof *owner);
}

void sim_reclaim(void)
{
    for (int slot = 0; slot < SIM_MAX_OWNERS; slot++)
        if (state->owners[slot].who.pid && !is_alive(&state->owners[slot].who))
            owner_free(slot);
    for (int i = 0; i < SIM_MAX_EXPORTS; i++) {
        struct sim_export *shared = &state->exports[i];
        if (shared->id && !sim_export_has_holders(shared) && !export_file_is_open(shared->id))
            export_free(shared);
    }
}

int sim_owner_register(void)
{
    struct sim_identity who;
    if (!identify(own_pid(), &who))
        return -1;
    int free_slot = -1;
    for (int slot = SIM_MAX_OWNERS - 1; slot >= 0; slot--) {
        if (state->owners[slot].who.pid == who.pid)
            owner_free(slot); /* the image that this one replaced by exec, whatever its stack */
        if (state->owners[slot].who.pid == 0)
            free_slot = slot;
    }
    if (free_slot >= 0)
        state->owners[free_slot].who = who;
    return free_slot;
}

static void lock_unless_checkpointed(int owner)
{
    sim_lock();
    while (state->owners[owner].checkpoint) {
        sim_unlock();
        sim_sleep_ms(1);
        sim_lock();
    }
}

bool sim_charge(int owner, int gpu, uint64_t bytes)
{
    lock_unless_checkpointed(owner);
    /* Asking /proc about every process is slow and changes nothing while there is room. */
    if (bytes > state->capacity - state->used[gpu])
        sim_reclaim();
    bool fits = bytes <= state->capacity - state->used[gpu];
    if (fits) {
        state->owners[owner].charged[gpu] += bytes;
        state->used[gpu] += bytes;
    }
    sim_unlock();
    return fits;
}

void sim_uncharge(int owner, int gpu, uint64_t bytes)
{
    lock_unless_checkpointed(owner);
    state->owners[owner].charged[gpu] -= bytes;
    state->used[gpu] -= bytes;
    sim_unlock();
}

int sim_card(int gpu)
{
    return state->mig ? gpu / (int)state->mig : gpu;
}

static void uuid_of(unsigned number, unsigned char uuid[16])
{
    uint64_t x = 0x9e3779b97f4a7c15ull * number;
    for (int half = 0; half < 2; half++) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull; /* splitmix64: looks random, never changes */
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        x ^= x >> 31;
        memcpy(uuid + 8 * half, &x, 8);
    }
}

void sim_card_uuid(int card, unsigned char uuid[16])
{
    uuid_of((unsigned)card + 1, uuid);
}

void sim_gpu_uuid(int gpu, unsigned char uuid[16])
{
    uuid_of((unsigned)gpu + (state->mig ? 1001 : 1), uuid);
}

static void uuid_text(const char *kind, const unsigned char u[16], char text[SIM_UUID_TEXT])
{
    snprintf(text, SIM_UUID_TEXT,
             "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", kind, u[0],
             u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13],
             u[14], u[15]);
}

void sim_card_uuid_text(int card, char text[SIM_UUID_TEXT])
{
    unsigned char uuid[16];
    sim_card_uuid(card, uuid);
    uuid_text("GPU", uuid, text);
}

void sim_gpu_uuid_text(int gpu, char text[SIM_UUID_TEXT])
{
    unsigned char uuid[16];
    sim_gpu_uuid(gpu, uuid);
    uuid_text(state->mig ? "MIG" : "GPU", uuid, text);
}

unsigned sim_gpu_bus(int gpu)
{
    return 0x1bu + 0x10u * (unsigned)sim_card(gpu);
}
