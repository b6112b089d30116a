/* The simulated libnvidia-ml: which GPUs there are, by the shared state.
 *
 * SIM_NVML_SLOW_MS: what each call costs, as when the driver's lock is taken. */
#define _GNU_SOURCE
#include "nvml_sim.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static struct nvmlDevice_st cards[SIM_MAX_GPUS], instances[SIM_MAX_GPUS];
static struct sim_state *state;
static _Atomic int initialised;
/* As the real one, it has a thread of its own, with the rights of whoever initialised it first. */
static pthread_t own;
static bool own_runs;

static void *idle(void *unused)
{
    while (atomic_load(&initialised))
        sim_sleep_ms(10);
    return unused;
}

struct sim_state *nvml_state(void)
{
    return state;
}

nvmlReturn_t nvml_begin(void)
{
    sim_sleep_ms(sim_env("SIM_NVML_SLOW_MS", 0));
    return atomic_load(&initialised) ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

static unsigned card_count(void)
{
    return state->mig ? state->gpus / state->mig : state->gpus;
}

nvmlDevice_t nvml_card(unsigned index)
{
    return index < card_count() ? &cards[index] : NULL;
}

nvmlDevice_t nvml_instance(unsigned index)
{
    return state->mig && index < state->gpus ? &instances[index] : NULL;
}

nvmlReturn_t nvml_begin_with(nvmlDevice_t device, const void *out)
{
    nvmlReturn_t rc = nvml_begin();
    if (rc != NVML_SUCCESS)
        return rc;
    bool is_card = device >= cards && device < cards + card_count();
    bool is_instance = state->mig && device >= instances && device < instances + state->gpus;
    return (is_card || is_instance) && out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

bool nvml_has(nvmlDevice_t device, int gpu)
{
    return device->gpu < 0 ? sim_card(gpu) == device->card : gpu == device->gpu;
}

static nvmlReturn_t put_text(char *out, unsigned room, const char *text)
{
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

static nvmlReturn_t initialise(void)
{
    state = sim_state_open();
    if (!state)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    for (int i = 0; i < SIM_MAX_GPUS; i++) {
        cards[i] = (struct nvmlDevice_st){.card = i, .gpu = -1};
        instances[i] = (struct nvmlDevice_st){.card = sim_card(i), .gpu = i};
    }
    if (!atomic_fetch_add(&initialised, 1))
        own_runs = !pthread_create(&own, NULL, idle, NULL);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return initialise();
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialise();
}

nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t rc = nvml_begin();
    if (rc == NVML_SUCCESS && atomic_fetch_sub(&initialised, 1) == 1 && own_runs)
        own_runs = pthread_join(own, NULL);
    return rc;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    default:
        return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    nvmlReturn_t rc = nvml_begin();
    return rc == NVML_SUCCESS ? put_text(version, length, SIM_DRIVER_VERSION) : rc;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    nvmlReturn_t rc = nvml_begin();
    return rc == NVML_SUCCESS ? put_text(version, length, "12." SIM_DRIVER_VERSION) : rc;
}

static nvmlReturn_t cuda_version(int *version)
{
    nvmlReturn_t rc = nvml_begin();
    if (rc == NVML_SUCCESS)
        *version = SIM_CUDA_VERSION;
    return rc;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return cuda_version(version);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return cuda_version(version);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t rc = nvml_begin();
    if (rc == NVML_SUCCESS)
        *count = card_count();
    return rc;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t rc = nvml_begin();
    if (rc != NVML_SUCCESS)
        return rc;
    if (!nvml_card(index))
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = nvml_card(index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t rc = nvml_begin();
    char text[SIM_UUID_TEXT];
    for (unsigned i = 0; rc == NVML_SUCCESS && nvml_card(i); i++) {
        sim_card_uuid_text((int)i, text);
        if (!strcasecmp(uuid, text)) {
            *device = nvml_card(i);
            return NVML_SUCCESS;
        }
    }
    for (unsigned i = 0; rc == NVML_SUCCESS && nvml_instance(i); i++) {
        sim_gpu_uuid_text((int)i, text);
        if (!strcasecmp(uuid, text)) {
            *device = nvml_instance(i);
            return NVML_SUCCESS;
        }
    }
    return rc == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : rc;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlReturn_t rc = nvml_begin();
    unsigned domain, bus;
    if (rc != NVML_SUCCESS)
        return rc;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned gpu = 0; gpu < state->gpus; gpu++)
        if (domain == 0 && bus == sim_gpu_bus((int)gpu)) {
            *device = nvml_card((unsigned)sim_card((int)gpu));
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    nvmlReturn_t rc = nvml_begin_with(device, index);
    if (rc == NVML_SUCCESS)
        *index = (unsigned)device->card;
    return rc;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    nvmlReturn_t rc = nvml_begin_with(device, minor);
    if (rc == NVML_SUCCESS)
        *minor = (unsigned)device->card;
    return rc;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    nvmlReturn_t rc = nvml_begin_with(device, name);
    return rc == NVML_SUCCESS ? put_text(name, length, SIM_GPU_NAME) : rc;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    nvmlReturn_t rc = nvml_begin_with(device, uuid);
    char text[SIM_UUID_TEXT];
    if (rc != NVML_SUCCESS)
        return rc;
    if (device->gpu < 0)
        sim_card_uuid_text(device->card, text);
    else
        sim_gpu_uuid_text(device->gpu, text);
    return put_text(uuid, length, text);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    nvmlReturn_t rc = nvml_begin_with(device, pci);
    if (rc != NVML_SUCCESS)
        return rc;
    unsigned bus = 0x1bu + 0x10u * (unsigned)device->card;
    *pci = (nvmlPciInfo_t){.bus = bus, .pciDeviceId = 0x233510de, .pciSubSystemId = 0x18be10de};
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:00.0", 0u, bus);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:00.0", 0u, bus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    nvmlReturn_t rc = nvml_begin_with(device, major);
    if (rc == NVML_SUCCESS && minor) {
        *major = 9;
        *minor = 0;
    }
    return rc;
}

/* A GPU that somebody uses is busy and warm; the figures are fixed so that tests can tell them. Of
 * an instance the real one says none of these. */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    nvmlReturn_t rc = nvml_begin_with(device, utilization);
    if (rc == NVML_SUCCESS && device->gpu >= 0)
        return NVML_ERROR_NOT_SUPPORTED;
    if (rc == NVML_SUCCESS)
        *utilization = nvml_is_busy(device) ? (nvmlUtilization_t){.gpu = 87, .memory = 41}
                                            : (nvmlUtilization_t){.gpu = 0, .memory = 0};
    return rc;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                      unsigned int *degrees)
{
    nvmlReturn_t rc = nvml_begin_with(device, degrees);
    if (rc != NVML_SUCCESS)
        return rc;
    if (device->gpu >= 0)
        return NVML_ERROR_NOT_SUPPORTED;
    if (sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    *degrees = nvml_is_busy(device) ? 63 : 34;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    nvmlReturn_t rc = nvml_begin_with(device, milliwatts);
    if (rc == NVML_SUCCESS && device->gpu >= 0)
        return NVML_ERROR_NOT_SUPPORTED;
    if (rc == NVML_SUCCESS)
        *milliwatts = nvml_is_busy(device) ? 412000 : 76000;
    return rc;
}
