/* The simulated CUDA runtime: a thin layer that opens libcuda.so.1, resolves what it needs through
 * cuGetProcAddress with the fixed versions that NVIDIA's libcudart 11 to 13 asks for (so the
 * primary context is released and reset by the v1 functions) and makes the primary context when
 * it is first needed. The same source makes libcudart.so.12 and the static library, in which every
 * name is hidden: a program linked with it has no `cudaMalloc` for a probe to find. */
#define _GNU_SOURCE
#ifdef SIM_CUDART_SHARED
#pragma GCC visibility push(default)
#endif
#include <cuda_runtime_api.h>
#ifdef SIM_CUDART_SHARED
#pragma GCC visibility pop
#endif

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

/* One row for each driver function: the symbol whose prototype it has, the name asked for and the
 * version. */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(cuInit, "cuInit", 2000)                                                                      \
    X(cuDeviceGetCount, "cuDeviceGetCount", 2000)                                                  \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000)                                  \
    X(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000)                                    \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", 4000)                                                    \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", 4000)                                                    \
    X(cuCtxGetDevice, "cuCtxGetDevice", 2000)                                                      \
    X(cuCtxSynchronize, "cuCtxSynchronize", 2000)                                                  \
    X(cuMemGetInfo_v2, "cuMemGetInfo", 3020)                                                       \
    X(cuMemAlloc_v2, "cuMemAlloc", 3020)                                                           \
    X(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020)                                                 \
    X(cuMemAllocManaged, "cuMemAllocManaged", 6000)                                                \
    X(cuMemFree_v2, "cuMemFree", 3020)                                                             \
    X(cuMemAllocAsync, "cuMemAllocAsync", 11020)                                                   \
    X(cuMemFreeAsync, "cuMemFreeAsync", 11020)                                                     \
    X(cuMemHostAlloc, "cuMemHostAlloc", 2020)                                                      \
    X(cuMemFreeHost, "cuMemFreeHost", 2000)                                                        \
    X(cuMemHostRegister_v2, "cuMemHostRegister", 6050)                                             \
    X(cuMemHostUnregister, "cuMemHostUnregister", 4000)                                            \
    X(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020)                               \
    X(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020)                                       \
    X(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", 11020)                                       \
    X(cuStreamCreate, "cuStreamCreate", 2000)                                                      \
    X(cuStreamDestroy_v2, "cuStreamDestroy", 4000)                                                 \
    X(cuStreamSynchronize, "cuStreamSynchronize", 2000)

#define POINTER(symbol, name, version) __typeof__(&symbol) symbol;
static struct {
    DRIVER_FUNCTIONS(POINTER)
} drv;

#define MAX_DEVICES 64

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cudaError_t load_error;
static CUcontext retained[MAX_DEVICES];
static __thread int device;
static __thread cudaError_t last_error;

static void load(void)
{
    load_error = cudaErrorInsufficientDriver;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return;
    __typeof__(&cuGetProcAddress_v2) find;
    *(void **)&find = dlsym(library, "cuGetProcAddress_v2");
    if (!find)
        return;
    bool complete = true;
    CUdriverProcAddressQueryResult status;
#define RESOLVE(symbol, name, version)                                                             \
    complete &= find(name, (void **)&drv.symbol, version, 0, &status) == CUDA_SUCCESS;
    DRIVER_FUNCTIONS(RESOLVE)
    if (complete)
        load_error = (cudaError_t)drv.cuInit(0);
}

/* The driver's results and the runtime's errors have the same numbers where both exist. */
static cudaError_t done(CUresult rc)
{
    if (rc != CUDA_SUCCESS)
        last_error = (cudaError_t)rc;
    return (cudaError_t)rc;
}

static cudaError_t loaded(void)
{
    pthread_once(&once, load);
    return done((CUresult)load_error);
}

/* Makes the device's primary context current; retains it once for the whole process. */
static CUresult enter_device(void)
{
    CUresult rc = CUDA_SUCCESS;
    if (device < 0 || device >= MAX_DEVICES)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (!retained[device])
        rc = drv.cuDevicePrimaryCtxRetain(&retained[device], device);
    CUcontext ctx = retained[device];
    pthread_mutex_unlock(&lock);
    return rc == CUDA_SUCCESS ? drv.cuCtxSetCurrent(ctx) : rc;
}

/* What every call begins with: a context on this thread. A context that the program made current
 * itself, or that is current on the right device, is used as it is. */
static cudaError_t ready(void)
{
    cudaError_t error = loaded();
    if (error != cudaSuccess)
        return error;
    CUdevice current;
    CUresult rc = drv.cuCtxGetDevice(&current);
    if (rc != CUDA_SUCCESS)
        rc = enter_device();
    return done(rc);
}

#define WITH_CONTEXT(call)                                                                         \
    do {                                                                                           \
        cudaError_t error_ = ready();                                                              \
        return error_ != cudaSuccess ? error_ : done(call);                                        \
    } while (0)

cudaError_t cudaGetDeviceCount(int *count)
{
    cudaError_t error = loaded();
    return error != cudaSuccess ? error : done(drv.cuDeviceGetCount(count));
}

/* Creates the context, as the real one does since CUDA 12. */
cudaError_t cudaSetDevice(int ordinal)
{
    int count;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess)
        return error;
    if (ordinal < 0 || ordinal >= count)
        return done(CUDA_ERROR_INVALID_DEVICE);
    device = ordinal;
    return done(enter_device());
}

cudaError_t cudaGetDevice(int *ordinal)
{
    cudaError_t error = loaded();
    if (error == cudaSuccess)
        *ordinal = device;
    return error;
}

/* The reset frees all that was made in the context and takes this library's retain away. */
cudaError_t cudaDeviceReset(void)
{
    cudaError_t error = loaded();
    if (error != cudaSuccess)
        return error;
    pthread_mutex_lock(&lock);
    CUresult rc = drv.cuDevicePrimaryCtxReset(device);
    retained[device] = NULL;
    pthread_mutex_unlock(&lock);
    return done(rc);
}

cudaError_t cudaDeviceSynchronize(void)
{
    WITH_CONTEXT(drv.cuCtxSynchronize());
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    WITH_CONTEXT(drv.cuMemGetInfo_v2(free_bytes, total_bytes));
}

cudaError_t cudaMalloc(void **ptr, size_t bytes)
{
    WITH_CONTEXT(drv.cuMemAlloc_v2((CUdeviceptr *)ptr, bytes));
}

/* cudaFree(0) is an idiom for "make the context now". */
cudaError_t cudaFree(void *ptr)
{
    WITH_CONTEXT(drv.cuMemFree_v2((CUdeviceptr)ptr));
}

cudaError_t cudaMallocPitch(void **ptr, size_t *pitch, size_t width, size_t height)
{
    WITH_CONTEXT(drv.cuMemAllocPitch_v2((CUdeviceptr *)ptr, pitch, width, height, 4));
}

cudaError_t cudaMallocManaged(void **ptr, size_t bytes, unsigned int flags)
{
    WITH_CONTEXT(drv.cuMemAllocManaged((CUdeviceptr *)ptr, bytes, flags));
}

cudaError_t cudaMallocAsync(void **ptr, size_t bytes, cudaStream_t stream)
{
    WITH_CONTEXT(drv.cuMemAllocAsync((CUdeviceptr *)ptr, bytes, stream));
}

cudaError_t cudaFreeAsync(void *ptr, cudaStream_t stream)
{
    WITH_CONTEXT(drv.cuMemFreeAsync((CUdeviceptr)ptr, stream));
}

/* Both arrive at cuMemHostAlloc, in the real library too. */
cudaError_t cudaMallocHost(void **ptr, size_t bytes)
{
    WITH_CONTEXT(drv.cuMemHostAlloc(ptr, bytes, 0));
}

cudaError_t cudaHostAlloc(void **ptr, size_t bytes, unsigned int flags)
{
    WITH_CONTEXT(drv.cuMemHostAlloc(ptr, bytes, flags));
}

cudaError_t cudaFreeHost(void *ptr)
{
    WITH_CONTEXT(drv.cuMemFreeHost(ptr));
}

cudaError_t cudaHostRegister(void *ptr, size_t bytes, unsigned int flags)
{
    WITH_CONTEXT(drv.cuMemHostRegister_v2(ptr, bytes, flags));
}

cudaError_t cudaHostUnregister(void *ptr)
{
    WITH_CONTEXT(drv.cuMemHostUnregister(ptr));
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int ordinal)
{
    WITH_CONTEXT(drv.cuDeviceGetDefaultMemPool(pool, ordinal));
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value)
{
    WITH_CONTEXT(drv.cuMemPoolSetAttribute(pool, (CUmemPool_attribute)attr, value));
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value)
{
    WITH_CONTEXT(drv.cuMemPoolGetAttribute(pool, (CUmemPool_attribute)attr, value));
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    WITH_CONTEXT(drv.cuStreamCreate(stream, 0));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    WITH_CONTEXT(drv.cuStreamDestroy_v2(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    WITH_CONTEXT(drv.cuStreamSynchronize(stream));
}
