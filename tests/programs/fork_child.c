/* fork_child before|soon|after|exec|thread: what a child of fork owns.
 *   before  the parent forks first; both become CUDA processes and hold a block each
 *   soon    the same, and the child does not wait a moment
 *   after   the parent holds a block and forks; the child's calls fail, it owns nothing
 *   exec    the parent holds a block; the child executes `hold` from this program's folder
 *   thread  the same, from another thread than the child's main one
 * The child lives until the parent goes on, and then ends without freeing. What the child prints
 * comes before the parent's READY; its own READY is not shown. */
#include "truth.h"

#include <cuda.h>
#include <libgen.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static void hold_one(size_t bytes)
{
    CUcontext ctx;
    CUdeviceptr p;
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    MUST(cuMemAlloc(&p, bytes));
    truth_live("device", p, bytes);
}

static void *execute(void *path)
{
    execl(path, "hold", "25165824", "1", "0", "200", NULL);
    _exit(127);
}

static int executes(const char *mode)
{
    return !strcmp(mode, "exec") || !strcmp(mode, "thread");
}

static int forks_first(const char *mode)
{
    return !strcmp(mode, "before") || !strcmp(mode, "soon");
}

static void be_child(const char *mode, const char *self, int settled, int go_on)
{
    char path[4096], byte;
    pthread_t thread;
    if (executes(mode)) {
        snprintf(path, sizeof path, "%s/hold", dirname(strdup(self)));
        dup2(go_on, STDIN_FILENO);
        dup2(settled, STDOUT_FILENO);
        if (!strcmp(mode, "exec"))
            execute(path);
        usleep(100 * 1000); /* its probes are in place by then, and belong to the main thread */
        MUST(pthread_create(&thread, NULL, execute, path));
        pthread_join(thread, NULL);
    }
    if (forks_first(mode)) {
        if (!strcmp(mode, "before"))
            usleep(200 * 1000); /* as a child that imports its framework first */
        hold_one(24 * MIB);
    } else {
        CUdeviceptr p = 0;
        MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc(&p, MIB));
        MUST_FAIL(CUDA_ERROR_NOT_INITIALIZED, cuInit(0));
    }
    fflush(stdout);
    if (write(settled, "x", 1) != 1 || read(go_on, &byte, 1) < 0)
        _exit(4);
    _exit(0);
}

/* Passes on what `hold` prints until it is ready, or waits for the byte of another child. */
static void wait_for_child(const char *mode, int settled)
{
    char line[256];
    FILE *lines = fdopen(settled, "r");
    if (!executes(mode)) {
        EXPECT(fgetc(lines) == 'x');
        return;
    }
    while (fgets(line, sizeof line, lines) && strcmp(line, "READY\n"))
        if (strncmp(line, "PID", 3))
            fputs(line, stdout); /* the child's pid is in each of its lines */
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "before";
    int settled[2], go_on[2], status;
    truth_begin();
    MUST(pipe(settled));
    MUST(pipe(go_on));
    if (!forks_first(mode))
        hold_one(32 * MIB);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(settled[0]);
        close(go_on[1]);
        be_child(mode, argv[0], settled[1], go_on[0]);
    }
    printf("CHILD %d\n", child);
    close(settled[1]);
    close(go_on[0]);
    if (forks_first(mode))
        hold_one(32 * MIB);
    wait_for_child(mode, settled[0]);
    truth_ready();
    close(go_on[1]);
    waitpid(child, &status, 0);
    printf("CHILD %d status=%d\n", child, status);
    truth_ready();
}
