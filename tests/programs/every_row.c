/* Calls every function of the probe table once, and some so that they fail, and prints the row of
 * the log that each call is: `op`, `level`, size and change of live bytes, "-" where it has none.
 * What can't be called is said as `CALL-SKIPPED api=.. why=..`: nothing on the simulated GPU, some
 * functions on real ones. `every_row straight` does not wait at each READY. */
#define _GNU_SOURCE
#include "every_row.h"

#include <dlfcn.h>

static long allocs, frees, failed;

void skipped(const char *api, const char *why)
{
    printf("CALL-SKIPPED api=%s why=%s\n", api, why);
}

void *entry(const char *api)
{
    void *found = dlsym(RTLD_DEFAULT, api);
    if (!found)
        skipped(api, "this driver does not export it");
    return found;
}

void call(const char *api, CUresult rc, const char *op, const char *level, uint64_t addr,
          uint64_t size, int64_t delta)
{
    char text[24] = "-";
    int is_memory = strcmp(level, "virtual") && strcmp(level, "imported");
    allocs += !strcmp(op, "alloc");
    frees += is_memory && !strcmp(op, "free");
    failed += !strcmp(op, "fail");
    if (size != UNKNOWN)
        snprintf(text, sizeof text, "%llu", (unsigned long long)size);
    printf("CALL %s rc=%d op=%s level=%s addr=0x%llx size=%s delta=%lld pid=%d tid=%ld\n", api,
           (int)rc, op, level, (unsigned long long)addr, text, (long long)delta, getpid(),
           truth_tid());
}

void unexpected(const char *api, CUresult rc)
{
    fprintf(stderr, "%s answered %d\n", api, (int)rc);
    exit(1);
}

int is_simulated(void)
{
    static int known = -1;
    char name[64] = "";
    if (known < 0 && helper(cuDeviceGetName, (name, sizeof name, 0)) == CUDA_SUCCESS)
        known = strstr(name, "simulated") != NULL;
    return known == 1;
}

int went_well(const char *api, CUresult rc, const char *level)
{
    if (rc == CUDA_SUCCESS)
        return 1;
    if (is_simulated())
        unexpected(api, rc);
    call(api, rc, "fail", strcmp(level, "-") ? level : "device", 0, UNKNOWN, 0);
    return 0;
}

void must_fail(const char *api, CUresult rc, CUresult expected, int is_untouched)
{
    if (rc == CUDA_SUCCESS || (is_simulated() && (rc != expected || !is_untouched)))
        unexpected(api, rc);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 5 && !strcmp(argv[1], "import"))
        return importer(argv + 2);
    if (argc == 3 && !strcmp(argv[1], "checkpointed"))
        return checkpointed(argv + 2);
    int waits = argc < 2 || strcmp(argv[1], "straight");
    truth_begin();
    CUcontext primary = contexts();
    linear();
    pools();
    vmm();
    host();
    arrays();
    graphs();
    modules();
    other_contexts();
    first_versions();
    external_memory();
    multicast();
    between_processes("/proc/self/exe");
    checkpoints("/proc/self/exe");
    silent(cuCtxSynchronize, ());
    truth_made(allocs, frees, failed);
    if (waits)
        truth_ready();
    told(cuDevicePrimaryCtxReset_v2, (0), "ctx", "device", primary, UNKNOWN);
    told(cuDevicePrimaryCtxRelease_v2, (0), "ctx", "device", primary, UNKNOWN);
    told(cuDevicePrimaryCtxReset, (0), "ctx", "device", primary, UNKNOWN);
    if (waits)
        truth_ready();
}
