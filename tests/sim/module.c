/* Code: what it takes of a GPU, no call tells. A module belongs to its context; a library to none,
 * but its code is in the context that it was first loaded in. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ELF_MAGIC 0x464c457fu
#define FATBIN_MAGIC 0xba55ed50u
#define FATBIN_WRAPPER_MAGIC 0x466243b1u

/* The variables of code that came as text; nothing is known of those in machine code. */
struct code {
    char *text;
    CUdeviceptr globals; /* where they lie: one granule for all, or 0 */
    bool asked;          /* for a function of it: what is loaded lazily is there by now */
};

static uint64_t code_bytes(void)
{
    return sim_env("SIM_MODULE_MIB", 2) * SIM_MIB;
}

static void end(struct object *object)
{
    struct code *code = object->more;
    if (code->globals)
        arena_give(code->globals, GRANULE);
    free(code->text);
    free(code);
}

/* A library's code goes with the library. */
static void end_library(struct object *object)
{
    struct object *code = object_at(OBJECT_CODE, NULL, (CUdeviceptr)object);
    if (code)
        object_free(code);
    end(object);
}

static bool is_code(const void *image)
{
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    return magic == ELF_MAGIC || magic == FATBIN_MAGIC || magic == FATBIN_WRAPPER_MAGIC ||
           !memcmp(image, ".ver", 4) || !memcmp(image, "//", 2);
}

static struct object *code_new(enum object_kind kind, CUcontext ctx, const void *image)
{
    bool is_library = kind == OBJECT_LIBRARY;
    struct object *object =
        object_new(kind, is_library ? NULL : ctx, ctx->gpu, is_library ? 0 : code_bytes());
    if (!object)
        return NULL;
    bool is_text = *(const char *)image == '.' || *(const char *)image == '/';
    struct code *code = calloc(1, sizeof *code);
    code->text = is_text ? strdup(image) : NULL;
    object->more = code;
    object->end = is_library ? end_library : end;
    if (!is_library)
        return object;
    struct object *loaded = object_new(OBJECT_CODE, ctx, ctx->gpu, code_bytes());
    if (!loaded) {
        object_free(object);
        return NULL;
    }
    loaded->addr = (CUdeviceptr)object;
    return object;
}

static CUresult load(void **out, enum object_kind kind, const void *image)
{
    CUcontext ctx;
    CUresult rc = context_current(&ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_code(image))
        return CUDA_ERROR_INVALID_IMAGE;
    struct object *code = code_new(kind, ctx, image);
    if (!code)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = code;
    return CUDA_SUCCESS;
}

static CUresult load_file(void **out, enum object_kind kind, const char *path)
{
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file)
        return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
    char *image = NULL;
    size_t room = 0;
    ssize_t length = getdelim(&image, &room, -1, file); /* all of a text */
    fclose(file);
    CUresult rc = length < 4 ? CUDA_ERROR_INVALID_IMAGE : load(out, kind, image);
    free(image);
    return rc;
}

CUresult cuModuleLoad(CUmodule *module, const char *file)
{
    WITH_DRIVER(load_file((void **)module, OBJECT_MODULE, file));
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    WITH_DRIVER(load((void **)module, OBJECT_MODULE, image));
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                            CUjit_option *options, void **values)
{
    (void)count, (void)options, (void)values;
    WITH_DRIVER(load((void **)module, OBJECT_MODULE, image));
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    WITH_DRIVER(load((void **)module, OBJECT_MODULE, image));
}

CUresult cuModuleUnload(CUmodule module)
{
    WITH_DRIVER(object_destroy(OBJECT_MODULE, module));
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit,
                           void **jit_values, unsigned int jit_count, CUlibraryOption *options,
                           void **values, unsigned int count)
{
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    WITH_DRIVER(load((void **)library, OBJECT_LIBRARY, image));
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *file, CUjit_option *jit,
                               void **jit_values, unsigned int jit_count,
                               CUlibraryOption *options, void **values, unsigned int count)
{
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    WITH_DRIVER(load_file((void **)library, OBJECT_LIBRARY, file));
}

CUresult cuLibraryUnload(CUlibrary library)
{
    WITH_DRIVER(object_destroy(OBJECT_LIBRARY, library));
}

/* A variable of the text's form `.b8 NAME[BYTES]`, in the order of which they lie one by one. */
static CUresult global(CUdeviceptr *addr, size_t *bytes, enum object_kind kind, const void *handle,
                       const char *name)
{
    struct object *object = object_of(kind, handle);
    if (!object || !name)
        return object ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    struct code *code = object->more;
    uint64_t offset = 0;
    for (const char *at = code->text; at && (at = strstr(at, ".b8 ")); at++) {
        char found[64];
        unsigned long size;
        if (sscanf(at, ".b8 %63[^[][%lu]", found, &size) != 2)
            continue;
        if (strcmp(found, name)) {
            offset += round_up(size, 256);
            continue;
        }
        if (!code->globals)
            code->globals = arena_take(GRANULE);
        if (addr)
            *addr = code->globals + offset;
        if (bytes)
            *bytes = size;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *addr, size_t *bytes, CUmodule module, const char *name)
{
    WITH_DRIVER(global(addr, bytes, OBJECT_MODULE, module, name));
}

CUresult cuLibraryGetGlobal(CUdeviceptr *addr, size_t *bytes, CUlibrary library, const char *name)
{
    WITH_DRIVER(global(addr, bytes, OBJECT_LIBRARY, library, name));
}

/* Parts of code have handles of their own: so many bytes behind that of the whole. */
enum part { PART_KERNEL = 1, PART_MODULE, PART_FUNCTION };

/* What a lazily loaded module takes once somebody asks for a function of it, SIM_FUNCTION_MIB. */
static CUresult ask(void **out, struct object *object, struct object *charged, enum part part)
{
    if (!object || !out)
        return object ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    struct code *code = object->more;
    uint64_t bytes = code->asked ? 0 : sim_env("SIM_FUNCTION_MIB", 0) * SIM_MIB;
    if (bytes && !sim_charge(driver_owner(), charged->gpu, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    charged->charged += bytes;
    code->asked = true;
    *out = (char *)object + part;
    return CUDA_SUCCESS;
}

static CUresult ask_module(void **out, const void *module, const char *name)
{
    struct object *object = object_of(OBJECT_MODULE, module);
    return name ? ask(out, object, object, PART_FUNCTION) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult ask_library(void **out, const void *library, enum part part)
{
    struct object *object = object_of(OBJECT_LIBRARY, library);
    return ask(out, object, object_at(OBJECT_CODE, NULL, (CUdeviceptr)object), part);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    WITH_DRIVER(ask_module((void **)function, module, name));
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_DRIVER(ask_library((void **)kernel, library, PART_KERNEL));
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    WITH_DRIVER(ask_library((void **)module, library, PART_MODULE));
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    WITH_DRIVER(ask_library((void **)function, (const char *)kernel - PART_KERNEL, PART_FUNCTION));
}

CUresult cuFuncLoad(CUfunction function)
{
    return function ? driver_ready() : CUDA_ERROR_INVALID_HANDLE;
}
