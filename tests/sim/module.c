/* Code: modules belong to a context, libraries to none. What they take, no call tells. */
#include "driver.h"

static uint64_t code_bytes(void)
{
    return sim_env("SIM_MODULE_MIB", 2) * SIM_MIB;
}

static CUresult load(void **out, enum object_kind kind, const void *image)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    struct object *code = object_new(kind, kind == MODULE ? ctx : NULL, ctx->gpu, code_bytes());
    if (!code)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = code;
    return CUDA_SUCCESS;
}

static CUresult unload(void *code, enum object_kind kind)
{
    return object_free(kind, code) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuModuleLoad(CUmodule *module, const char *file)
{
    WITH_DRIVER(load((void **)module, MODULE, file));
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    WITH_DRIVER(load((void **)module, MODULE, image));
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                            CUjit_option *options, void **values)
{
    (void)count, (void)options, (void)values;
    WITH_DRIVER(load((void **)module, MODULE, image));
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    WITH_DRIVER(load((void **)module, MODULE, image));
}

CUresult cuModuleUnload(CUmodule module)
{
    WITH_DRIVER(unload(module, MODULE));
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit,
                           void **jit_values, unsigned int jit_count, CUlibraryOption *options,
                           void **values, unsigned int count)
{
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    WITH_DRIVER(load((void **)library, LIBRARY, image));
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *file, CUjit_option *jit,
                               void **jit_values, unsigned int jit_count,
                               CUlibraryOption *options, void **values, unsigned int count)
{
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    WITH_DRIVER(load((void **)library, LIBRARY, file));
}

CUresult cuLibraryUnload(CUlibrary library)
{
    WITH_DRIVER(unload(library, LIBRARY));
}
