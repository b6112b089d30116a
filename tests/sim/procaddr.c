/* cuGetProcAddress: how the runtime, NCCL and others find the driver's functions. Like the real
 * one it returns the exported addresses, so a probe on an exported symbol sees their calls. */
#include "driver.h"

#include <string.h>

#define ROW(name, since, symbol) {name, since, false, (void *)symbol}
#define PER_THREAD(name, since, symbol) {name, since, true, (void *)symbol}

/* (name asked for, lowest CUDA version, symbol); of the rows of one name the last one whose
 * version is not above the caller's counts. Per-thread rows count with that flag only. */
static const struct {
    const char *name;
    int since;
    bool per_thread;
    void *symbol;
} rows[] = {
    ROW("cuInit", 2000, cuInit),
    ROW("cuDriverGetVersion", 2020, cuDriverGetVersion),
    ROW("cuDeviceGetCount", 2000, cuDeviceGetCount),
    ROW("cuDeviceGet", 2000, cuDeviceGet),
    ROW("cuDeviceGetName", 2000, cuDeviceGetName),
    ROW("cuDeviceGetUuid", 9020, cuDeviceGetUuid),
    ROW("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2),
    ROW("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2),
    ROW("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute),
    ROW("cuDeviceGetPCIBusId", 4010, cuDeviceGetPCIBusId),
    ROW("cuGetErrorName", 6000, cuGetErrorName),
    ROW("cuGetErrorString", 6000, cuGetErrorString),
    ROW("cuGetProcAddress", 11030, cuGetProcAddress),
    ROW("cuGetProcAddress", 12000, cuGetProcAddress_v2),
    ROW("cuCtxCreate", 2000, cuCtxCreate),
    ROW("cuCtxCreate", 3020, cuCtxCreate_v2),
    ROW("cuCtxCreate", 11040, cuCtxCreate_v3),
    ROW("cuCtxCreate", 12050, cuCtxCreate_v4),
    ROW("cuCtxDestroy", 2000, cuCtxDestroy),
    ROW("cuCtxDestroy", 4000, cuCtxDestroy_v2),
    ROW("cuCtxSetCurrent", 4000, cuCtxSetCurrent),
    ROW("cuCtxGetCurrent", 4000, cuCtxGetCurrent),
    ROW("cuCtxPushCurrent", 2000, cuCtxPushCurrent),
    ROW("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2),
    ROW("cuCtxPopCurrent", 2000, cuCtxPopCurrent),
    ROW("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2),
    ROW("cuCtxGetDevice", 2000, cuCtxGetDevice),
    ROW("cuCtxSynchronize", 2000, cuCtxSynchronize),
    ROW("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
    ROW("cuDevicePrimaryCtxRelease", 7000, cuDevicePrimaryCtxRelease),
    ROW("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2),
    ROW("cuDevicePrimaryCtxReset", 7000, cuDevicePrimaryCtxReset),
    ROW("cuDevicePrimaryCtxReset", 11000, cuDevicePrimaryCtxReset_v2),
    ROW("cuMemGetInfo", 3020, cuMemGetInfo_v2),
    ROW("cuMemGetAddressRange", 3020, cuMemGetAddressRange_v2),
    ROW("cuMemAlloc", 2000, cuMemAlloc),
    ROW("cuMemAlloc", 3020, cuMemAlloc_v2),
    ROW("cuMemAllocPitch", 2000, cuMemAllocPitch),
    ROW("cuMemAllocPitch", 3020, cuMemAllocPitch_v2),
    ROW("cuMemAllocManaged", 6000, cuMemAllocManaged),
    ROW("cuMemFree", 2000, cuMemFree),
    ROW("cuMemFree", 3020, cuMemFree_v2),
    ROW("cuMemAllocAsync", 11020, cuMemAllocAsync),
    PER_THREAD("cuMemAllocAsync", 11020, cuMemAllocAsync_ptsz),
    ROW("cuMemAllocFromPoolAsync", 11020, cuMemAllocFromPoolAsync),
    PER_THREAD("cuMemAllocFromPoolAsync", 11020, cuMemAllocFromPoolAsync_ptsz),
    ROW("cuMemFreeAsync", 11020, cuMemFreeAsync),
    PER_THREAD("cuMemFreeAsync", 11020, cuMemFreeAsync_ptsz),
    ROW("cuDeviceGetDefaultMemPool", 11020, cuDeviceGetDefaultMemPool),
    ROW("cuDeviceGetMemPool", 11020, cuDeviceGetMemPool),
    ROW("cuDeviceSetMemPool", 11020, cuDeviceSetMemPool),
    ROW("cuMemPoolCreate", 11020, cuMemPoolCreate),
    ROW("cuMemPoolDestroy", 11020, cuMemPoolDestroy),
    ROW("cuMemPoolTrimTo", 11020, cuMemPoolTrimTo),
    ROW("cuMemPoolSetAttribute", 11020, cuMemPoolSetAttribute),
    ROW("cuMemPoolGetAttribute", 11020, cuMemPoolGetAttribute),
    ROW("cuMemAddressReserve", 10020, cuMemAddressReserve),
    ROW("cuMemAddressFree", 10020, cuMemAddressFree),
    ROW("cuMemCreate", 10020, cuMemCreate),
    ROW("cuMemRelease", 10020, cuMemRelease),
    ROW("cuMemMap", 10020, cuMemMap),
    ROW("cuMemUnmap", 10020, cuMemUnmap),
    ROW("cuMemSetAccess", 10020, cuMemSetAccess),
    ROW("cuMemRetainAllocationHandle", 11000, cuMemRetainAllocationHandle),
    ROW("cuMemExportToShareableHandle", 10020, cuMemExportToShareableHandle),
    ROW("cuMemImportFromShareableHandle", 10020, cuMemImportFromShareableHandle),
    ROW("cuMemGetAllocationGranularity", 10020, cuMemGetAllocationGranularity),
    ROW("cuMemHostAlloc", 2020, cuMemHostAlloc),
    ROW("cuMemAllocHost", 2000, cuMemAllocHost),
    ROW("cuMemAllocHost", 3020, cuMemAllocHost_v2),
    ROW("cuMemFreeHost", 2000, cuMemFreeHost),
    ROW("cuMemHostRegister", 4000, cuMemHostRegister),
    ROW("cuMemHostRegister", 6050, cuMemHostRegister_v2),
    ROW("cuMemHostUnregister", 4000, cuMemHostUnregister),
    ROW("cuStreamCreate", 2000, cuStreamCreate),
    ROW("cuStreamDestroy", 4000, cuStreamDestroy_v2),
    ROW("cuStreamSynchronize", 2000, cuStreamSynchronize),
    PER_THREAD("cuStreamSynchronize", 7000, cuStreamSynchronize_ptsz),
    ROW("cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2),
    PER_THREAD("cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2_ptsz),
    ROW("cuStreamBeginCaptureToGraph", 12030, cuStreamBeginCaptureToGraph),
    PER_THREAD("cuStreamBeginCaptureToGraph", 12030, cuStreamBeginCaptureToGraph_ptsz),
    ROW("cuStreamEndCapture", 10000, cuStreamEndCapture),
    PER_THREAD("cuStreamEndCapture", 10000, cuStreamEndCapture_ptsz),
    ROW("cuDeviceGetByPCIBusId", 4010, cuDeviceGetByPCIBusId),
    ROW("cuCtxAttach", 2000, cuCtxAttach),
    ROW("cuCtxDetach", 2000, cuCtxDetach),
    ROW("cuCtxSetLimit", 3010, cuCtxSetLimit),
    ROW("cuCtxGetLimit", 3010, cuCtxGetLimit),
    ROW("cuGreenCtxCreate", 12040, cuGreenCtxCreate),
    ROW("cuGreenCtxDestroy", 12040, cuGreenCtxDestroy),
    ROW("cuCtxFromGreenCtx", 12040, cuCtxFromGreenCtx),
    ROW("cuDeviceGetDevResource", 12040, cuDeviceGetDevResource),
    ROW("cuDevResourceGenerateDesc", 12040, cuDevResourceGenerateDesc),
    ROW("cuCheckpointProcessGetState", 12080, cuCheckpointProcessGetState),
    ROW("cuCheckpointProcessLock", 12080, cuCheckpointProcessLock),
    ROW("cuCheckpointProcessCheckpoint", 12080, cuCheckpointProcessCheckpoint),
    ROW("cuCheckpointProcessRestore", 12080, cuCheckpointProcessRestore),
    ROW("cuCheckpointProcessUnlock", 12080, cuCheckpointProcessUnlock),
    ROW("cuArrayCreate", 2000, cuArrayCreate),
    ROW("cuArrayCreate", 3020, cuArrayCreate_v2),
    ROW("cuArray3DCreate", 2000, cuArray3DCreate),
    ROW("cuArray3DCreate", 3020, cuArray3DCreate_v2),
    ROW("cuMipmappedArrayCreate", 5000, cuMipmappedArrayCreate),
    ROW("cuArrayDestroy", 2000, cuArrayDestroy),
    ROW("cuMipmappedArrayDestroy", 5000, cuMipmappedArrayDestroy),
    ROW("cuMemMapArrayAsync", 11010, cuMemMapArrayAsync),
    PER_THREAD("cuMemMapArrayAsync", 11010, cuMemMapArrayAsync_ptsz),
    ROW("cuIpcGetMemHandle", 4010, cuIpcGetMemHandle),
    ROW("cuIpcOpenMemHandle", 4010, cuIpcOpenMemHandle),
    ROW("cuIpcOpenMemHandle", 11000, cuIpcOpenMemHandle_v2),
    ROW("cuIpcCloseMemHandle", 4010, cuIpcCloseMemHandle),
    ROW("cuImportExternalMemory", 10000, cuImportExternalMemory),
    ROW("cuExternalMemoryGetMappedBuffer", 10000, cuExternalMemoryGetMappedBuffer),
    ROW("cuExternalMemoryGetMappedMipmappedArray", 10000, cuExternalMemoryGetMappedMipmappedArray),
    ROW("cuDestroyExternalMemory", 10000, cuDestroyExternalMemory),
    ROW("cuGraphicsMapResources", 3000, cuGraphicsMapResources),
    PER_THREAD("cuGraphicsMapResources", 7000, cuGraphicsMapResources_ptsz),
    ROW("cuGraphicsUnmapResources", 3000, cuGraphicsUnmapResources),
    PER_THREAD("cuGraphicsUnmapResources", 7000, cuGraphicsUnmapResources_ptsz),
    ROW("cuGraphicsResourceGetMappedPointer", 3020, cuGraphicsResourceGetMappedPointer_v2),
    ROW("cuGraphCreate", 10000, cuGraphCreate),
    ROW("cuGraphAddMemAllocNode", 11040, cuGraphAddMemAllocNode),
    ROW("cuGraphAddMemFreeNode", 11040, cuGraphAddMemFreeNode),
    ROW("cuGraphAddNode", 12020, cuGraphAddNode),
    ROW("cuGraphAddNode", 12030, cuGraphAddNode_v2),
    ROW("cuGraphAddNode", 13040, cuGraphAddNode_v3),
    ROW("cuGraphInstantiate", 10000, cuGraphInstantiate),
    ROW("cuGraphInstantiate", 11000, cuGraphInstantiate_v2),
    ROW("cuGraphInstantiate", 12000, cuGraphInstantiateWithFlags),
    ROW("cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags),
    ROW("cuGraphInstantiateWithParams", 12000, cuGraphInstantiateWithParams),
    PER_THREAD("cuGraphInstantiateWithParams", 12000, cuGraphInstantiateWithParams_ptsz),
    ROW("cuGraphUpload", 11010, cuGraphUpload),
    PER_THREAD("cuGraphUpload", 11010, cuGraphUpload_ptsz),
    ROW("cuGraphLaunch", 10000, cuGraphLaunch),
    PER_THREAD("cuGraphLaunch", 10000, cuGraphLaunch_ptsz),
    ROW("cuGraphExecDestroy", 10000, cuGraphExecDestroy),
    ROW("cuGraphDestroy", 10000, cuGraphDestroy),
    ROW("cuDeviceGraphMemTrim", 11040, cuDeviceGraphMemTrim),
    ROW("cuDeviceGetGraphMemAttribute", 11040, cuDeviceGetGraphMemAttribute),
    ROW("cuModuleLoad", 2000, cuModuleLoad),
    ROW("cuModuleLoadData", 2000, cuModuleLoadData),
    ROW("cuModuleLoadDataEx", 2010, cuModuleLoadDataEx),
    ROW("cuModuleLoadFatBinary", 2000, cuModuleLoadFatBinary),
    ROW("cuModuleUnload", 2000, cuModuleUnload),
    ROW("cuModuleGetGlobal", 3020, cuModuleGetGlobal_v2),
    ROW("cuModuleGetFunction", 2000, cuModuleGetFunction),
    ROW("cuLibraryGetKernel", 12000, cuLibraryGetKernel),
    ROW("cuLibraryGetModule", 12000, cuLibraryGetModule),
    ROW("cuKernelGetFunction", 12000, cuKernelGetFunction),
    ROW("cuFuncLoad", 12040, cuFuncLoad),
    ROW("cuLibraryLoadData", 12000, cuLibraryLoadData),
    ROW("cuLibraryLoadFromFile", 12000, cuLibraryLoadFromFile),
    ROW("cuLibraryUnload", 12000, cuLibraryUnload),
    ROW("cuLibraryGetGlobal", 12000, cuLibraryGetGlobal),
    ROW("cuMulticastCreate", 12010, cuMulticastCreate),
    ROW("cuMulticastAddDevice", 12010, cuMulticastAddDevice),
    ROW("cuMulticastBindMem", 12010, cuMulticastBindMem),
    ROW("cuMulticastBindMem", 13010, cuMulticastBindMem_v2),
    ROW("cuMulticastBindAddr", 12010, cuMulticastBindAddr),
    ROW("cuMulticastBindAddr", 13010, cuMulticastBindAddr_v2),
    ROW("cuMulticastUnbind", 12010, cuMulticastUnbind),
    ROW("cuMulticastGetGranularity", 12010, cuMulticastGetGranularity),
    ROW("cuMemGetHandleForAddressRange", 11070, cuMemGetHandleForAddressRange),
    ROW("cuMemPoolExportToShareableHandle", 11020, cuMemPoolExportToShareableHandle),
    ROW("cuMemPoolImportFromShareableHandle", 11020, cuMemPoolImportFromShareableHandle),
    ROW("cuMemPoolExportPointer", 11020, cuMemPoolExportPointer),
    ROW("cuMemPoolImportPointer", 11020, cuMemPoolImportPointer),
    ROW("cuMemGetDefaultMemPool", 13000, cuMemGetDefaultMemPool),
    ROW("cuMemGetMemPool", 13000, cuMemGetMemPool),
    ROW("cuMemSetMemPool", 13000, cuMemSetMemPool),
};

static CUresult look_up(const char *name, int version, cuuint64_t flags, void **symbol,
                        CUdriverProcAddressQueryResult *status)
{
    bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    *symbol = NULL;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].name, name) || (rows[i].per_thread && !per_thread))
            continue;
        if (version >= rows[i].since)
            *symbol = rows[i].symbol;
        *status = *symbol ? CU_GET_PROC_ADDRESS_SUCCESS
                          : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    }
    return *symbol ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **symbol, int version, cuuint64_t flags)
{
    CUdriverProcAddressQueryResult status;
    if (!name || !symbol)
        return CUDA_ERROR_INVALID_VALUE;
    return look_up(name, version, flags, symbol, &status);
}

CUresult cuGetProcAddress_v2(const char *name, void **symbol, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    CUdriverProcAddressQueryResult unasked;
    if (!name || !symbol)
        return CUDA_ERROR_INVALID_VALUE;
    return look_up(name, version, flags, symbol, status ? status : &unasked);
}
