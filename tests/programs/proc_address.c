/* proc_address NAME...: asks cuGetProcAddress for each export by its name without a version, and
 * says from which version of CUDA on it gives that export out: `SINCE NAME version=n`, 0: never. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include "truth.h"

#include <ctype.h>
#include <cuda.h>
#include <dlfcn.h>

#define NEWEST 13050

/* Takes off `_ptsz`, then `_v2` or a later one. */
static void strip(char *name)
{
    size_t length = strlen(name);
    if (length > 5 && !strcmp(name + length - 5, "_ptsz"))
        name[length -= 5] = 0;
    if (length > 3 && isdigit(name[length - 1]) && !strncmp(name + length - 3, "_v", 2))
        name[length - 3] = 0;
}

static int since(const char *export)
{
    char name[128];
    void *wanted = dlsym(RTLD_DEFAULT, export), *found;
    int is_per_thread = strstr(export, "_ptsz") != NULL;
    cuuint64_t flags = is_per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
                                     : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    snprintf(name, sizeof name, "%s", export);
    strip(name);
    for (int version = 2000; wanted && version <= NEWEST; version += 10)
        if (cuGetProcAddress_v2(name, &found, version, flags, NULL) == CUDA_SUCCESS &&
            found == wanted)
            return version;
    return 0;
}

int main(int argc, char **argv)
{
    truth_begin();
    for (int i = 1; i < argc; i++)
        printf("SINCE %s version=%d\n", argv[i], since(argv[i]));
    return 0;
}
