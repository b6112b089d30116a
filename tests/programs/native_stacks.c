/* native_stacks MODE...: allocates from known chains of calls, and says which.
 *
 *   STACK scenario bytes function function...     innermost first, as far as they are told
 *
 * chain      from main, three times
 * lines      from two lines of one function in turn, three times
 * deep       from stacks of some 32 and 110 KiB, six times each
 * thread     from a thread
 * fork       from a child that is forked before CUDA is used
 * deleted    deletes the executable, for what comes after
 * replaced PATH PATH    from a library whose file is replaced by the other
 * reopened PATH PATH    from a library that is closed, and from another that takes its place
 * pending    inside another traced call, whose return probe waits on the stack */
#define _GNU_SOURCE
#include "truth.h"

#include <cuda.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/wait.h>

#define KEPT __attribute__((noinline, noclone, visibility("default")))
/* Not the last thing that the caller does: no jump takes the call's place. */
#define CALL(call)                                                                                 \
    do {                                                                                           \
        call;                                                                                      \
        __asm__ volatile("" ::: "memory");                                                         \
    } while (0)

typedef void user_fn(unsigned long long bytes);

static CUcontext context;
static unsigned long long next_bytes = 512;
static CUdeviceptr block;

static void expect(const char *scenario, const char *chain)
{
    next_bytes += 512;
    printf("STACK %s %llu %s\n", scenario, next_bytes, chain);
}

KEPT void innermost(void)
{
    CALL(MUST(cuMemAlloc(&block, next_bytes)));
}

KEPT void middle(void)
{
    CALL(innermost());
}

KEPT void outer(void)
{
    CALL(middle());
}

KEPT void start_cuda(void)
{
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuCtxSetCurrent(context));
}

KEPT void chain(const char *scenario)
{
    start_cuda();
    for (int i = 0; i < 3; i++) {
        expect(scenario, "innermost middle outer chain");
        CALL(outer());
    }
}

KEPT void lines(void)
{
    start_cuda();
    for (int i = 0; i < 3; i++) {
        expect("first_line", "lines run main");
        CALL(MUST(cuMemAlloc(&block, next_bytes)));
        expect("second_line", "lines run main");
        CALL(MUST(cuMemAlloc(&block, next_bytes)));
    }
}

KEPT void deep(int depth)
{
    volatile char room[1024];
    room[depth % 1024] = (char)depth;
    if (depth == 0)
        CALL(innermost());
    else
        CALL(deep(depth - 1));
    room[0] = room[depth % 1024];
}

KEPT void go_deep(const char *scenario, int depth)
{
    char said[4096] = "innermost";
    for (int i = 0; i <= depth; i++)
        strcat(said, " deep");
    strcat(said, " go_deep run main");
    for (int i = 0; i < 6; i++) {
        expect(scenario, said);
        CALL(deep(depth));
        usleep(60 * 1000); /* in which the agent asks for more of the stack */
    }
}

static void *(*allocate_block)(size_t bytes, int device);

KEPT void deep_block(int depth)
{
    volatile char room[1024];
    room[depth % 1024] = (char)depth;
    if (depth == 0)
        CALL(allocate_block(1 << 20, 0));
    else
        CALL(deep_block(depth - 1));
    room[0] = room[depth % 1024];
}

/* Blocks of PyTorch's allocator; none is given back. */
KEPT void blocks(void)
{
    void *torch = dlopen("libc10_cuda.so", RTLD_NOW);
    EXPECT(torch);
    *(void **)&allocate_block = dlsym(torch, "sim_torch_alloc");
    EXPECT(allocate_block);
    start_cuda();
    for (int i = 0; i < 20; i++) {
        CALL(deep_block(28));
        usleep(100 * 1000); /* in which the agent asks for more of the stack */
    }
}

KEPT void *thread_body(void *nothing)
{
    MUST(cuCtxSetCurrent(context));
    CALL(outer());
    return nothing;
}

static void in_thread(void)
{
    pthread_t thread;
    start_cuda();
    for (int i = 0; i < 3; i++) {
        expect("thread", "innermost middle outer thread_body");
        MUST(pthread_create(&thread, NULL, thread_body, NULL));
        MUST(pthread_join(thread, NULL));
    }
}

static void forked(void)
{
    int status;
    fflush(stdout);
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        next_bytes += 1 << 20;
        CALL(chain("child"));
        fflush(stdout);
        _exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    chain("parent");
}

static user_fn *function(void **library, const char *path, const char *name)
{
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    return (user_fn *)dlsym(*library, name);
}

KEPT void replaced(const char *path, const char *other)
{
    void *library;
    user_fn *grow = function(&library, path, "first_grow");
    EXPECT(grow);
    MUST(rename(other, path));
    start_cuda();
    for (int i = 0; i < 3; i++) {
        expect("replaced", "first_inner first_grow replaced run main");
        CALL(grow(next_bytes));
    }
}

/* Both are of one size and each is closed before the next is opened: it gets the other's place. */
KEPT void reopened(const char *path, const char *other)
{
    start_cuda();
    ElfW(Addr) before = 0;
    for (int i = 0; i < 6; i++) {
        void *library;
        user_fn *grow = function(&library, i % 2 ? other : path, i % 2 ? "other_grow" : "first_grow");
        EXPECT(grow);
        ElfW(Addr) place = ((struct link_map *)library)->l_addr;
        if (before && before != place)
            printf("MOVED\n");
        before = place;
        for (int hit = 0; hit < 3; hit++) {
            expect("reopened", i % 2 ? "other_inner other_grow reopened run main"
                                     : "first_inner first_grow reopened run main");
            CALL(grow(next_bytes));
        }
        usleep(300 * 1000); /* in which the agent sees that it is there */
        MUST(dlclose(library));
    }
}

/* The driver's lock is taken through this: it is called within a traced call. */
static int calls_inside;
static __thread int inside;

KEPT void called_back(void)
{
    CALL(middle());
}

int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    static int (*real)(pthread_mutex_t *);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    if (calls_inside && !inside) {
        inside = 1;
        CALL(called_back());
        inside = 0;
    }
    return real(mutex);
}

static void pending(void)
{
    CUdeviceptr managed;
    start_cuda();
    for (int i = 0; i < 3; i++) {
        expect("pending", "innermost middle called_back pthread_mutex_lock");
        calls_inside = 1;
        CALL(MUST(cuMemAllocManaged(&managed, MIB, CU_MEM_ATTACH_GLOBAL)));
        calls_inside = 0;
    }
}

static void delete_executable(void)
{
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    EXPECT(length > 0);
    path[length] = 0;
    MUST(unlink(path));
}

KEPT void run(const char *mode, char ***rest)
{
    if (!strcmp(mode, "chain")) {
        CALL(chain(mode));
    } else if (!strcmp(mode, "lines")) {
        CALL(lines());
    } else if (!strcmp(mode, "deep")) {
        start_cuda();
        go_deep("deep", 28);
        go_deep("deeper", 100);
    } else if (!strcmp(mode, "blocks")) {
        blocks();
    } else if (!strcmp(mode, "thread")) {
        in_thread();
    } else if (!strcmp(mode, "fork")) {
        forked();
    } else if (!strcmp(mode, "deleted")) {
        delete_executable();
    } else if (!strcmp(mode, "pending")) {
        pending();
    } else {
        const char *path = *++*rest, *other = *++*rest;
        CALL((!strcmp(mode, "replaced") ? replaced : reopened)(path, other));
    }
}

int main(int argc, char **argv)
{
    truth_begin();
    for (char **rest = argv + 1; argc > 1 && *rest; rest++)
        run(*rest, &rest);
    fflush(stdout);
    return 0;
}
