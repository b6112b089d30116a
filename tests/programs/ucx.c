/* A program that uses the real UCX, from the folder UCX_LIB_DIR. Orders on stdin:
 * `load` (as a program linked to UCX has it from its start), `init` (ucp_init, as MPI does it),
 * `hook` (asks UCX for events of CUDA memory and says whether UCX has them), `alloc`, `free`. It
 * tells how many allocations and frees UCX's hooks have seen. */
#define _GNU_SOURCE
#include "truth.h"

#include <cuda.h>
#include <dlfcn.h>

/* ucm.h: UCM_EVENT_MEM_TYPE_ALLOC and UCM_EVENT_MEM_TYPE_FREE. */
#define ON_ALLOC (1 << 20)
#define ON_FREE (1 << 21)
/* ucp.h: UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_TAG; the API that the pinned UCX has. */
#define HAS_FEATURES 1
#define TAG_MATCHING 1
#define API_MAJOR 1
#define API_MINOR 22

static long allocs, frees, failed, hooked_allocs, hooked_frees;
static CUdeviceptr blocks[1024];
static long held;

static void on_event(int type, void *event, void *arg)
{
    (void)event;
    (void)arg;
    hooked_allocs += type == ON_ALLOC;
    hooked_frees += type == ON_FREE;
}

static void *find(const char *name)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);
    if (!symbol) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    return symbol;
}

static void load(void)
{
    char path[4096];
    const char *folder = getenv("UCX_LIB_DIR");
    snprintf(path, sizeof path, "%s/libucp.so.0", folder ? folder : "");
    if (!dlopen(path, RTLD_NOW | RTLD_GLOBAL)) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
}

static void init(void)
{
    /* Begins as ucp_params_t does; room for all of it. */
    unsigned long long params[64] = {HAS_FEATURES, TAG_MATCHING};
    void *context;
    int (*ucp_init)(unsigned, unsigned, const void *, const void *, void **) =
        find("ucp_init_version");
    MUST(ucp_init(API_MAJOR, API_MINOR, params, NULL, &context));
}

static void hook(void)
{
    int (*set)(int, int, void (*)(int, void *, void *), void *) = find("ucm_set_event_handler");
    printf("HOOK rc=%d\n", (signed char)set(ON_ALLOC | ON_FREE, 1000, on_event, NULL));
}

int main(int argc, char **argv)
{
    CUcontext ctx;
    char line[256];
    truth_begin();
    MUST(cuInit((unsigned)truth_arg(argc, argv, 1, 0)));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    for (;;) {
        printf("HOOKED alloc=%ld free=%ld\n", hooked_allocs, hooked_frees);
        truth_made(allocs, frees, failed);
        printf("READY\n");
        truth_next_line(line, sizeof line);
        if (!strcmp(line, "load"))
            load();
        else if (!strcmp(line, "init"))
            init();
        else if (!strcmp(line, "hook"))
            hook();
        else if (!strcmp(line, "alloc")) {
            MUST(cuMemAlloc(&blocks[held++], MIB));
            allocs++;
        } else if (!strcmp(line, "free") && held) {
            MUST(cuMemFree(blocks[--held]));
            frees++;
        }
    }
}
