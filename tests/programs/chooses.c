/* chooses [GPUS]: sets CUDA_VISIBLE_DEVICES itself before it first calls the driver, or removes it where
 * GPUS is "-"; then holds 1 MiB on its device 0, and allocates once more at each line of its input, after
 * another cuInit with the GPUs that the line names, if it does: CUDA has counted its devices by then. */
#include "truth.h"

#include <cuda.h>
#include <string.h>

int main(int argc, char **argv)
{
    CUcontext ctx;
    CUdeviceptr p;
    char line[256];
    const char *gpus = argc > 1 ? argv[1] : "-";
    truth_begin();
    if (strcmp(gpus, "-"))
        setenv("CUDA_VISIBLE_DEVICES", gpus, 1);
    else
        unsetenv("CUDA_VISIBLE_DEVICES");
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    for (;;) {
        MUST(cuMemAlloc(&p, MIB));
        printf("READY\n");
        truth_next_line(line, sizeof line);
        if (*line) {
            setenv("CUDA_VISIBLE_DEVICES", line, 1);
            MUST(cuInit(0));
        }
    }
}
