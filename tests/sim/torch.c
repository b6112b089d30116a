/* The simulated libtorch_cpu: autograd's engine under its real names. `execute` hands the graph to
 * a thread of the device, which is made once and named as PyTorch names it, and waits; each
 * operator allocates its gradient there, below a frame with the operator's real symbol. */
#define _GNU_SOURCE
#include "torch.h"

#include "c10.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default"), noinline))
#define MAX_DEVICES 16

struct task {
    struct sim_node *nodes;
    size_t count;
    int device;
    int failed;
    bool done;
};

/* One thread of the engine, with the graph that it is to run. */
struct worker {
    pthread_t thread;
    struct task *task;
};

static struct worker workers[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t given = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
static __thread bool on_engine_thread;

#define VECTORS "EOSt6vectorIN2at6TensorESaIS5_EE"
EXPORT void *mul_backward(const struct sim_node *node, int device)
    __asm__("_ZN5torch8autograd9generated12MulBackward05apply" VECTORS);
EXPORT void *mm_backward(const struct sim_node *node, int device)
    __asm__("_ZN5torch8autograd9generated11MmBackward05apply" VECTORS);
EXPORT void *nll_loss_backward(const struct sim_node *node, int device)
    __asm__("_ZN5torch8autograd9generated16NllLossBackward05apply" VECTORS);
EXPORT void engine_execute(struct task *task)
    __asm__("_ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorE"
            "SaIS9_EEbbbS7_");

void *mul_backward(const struct sim_node *node, int device)
{
    return sim_torch_alloc(node->bytes, device);
}

void *mm_backward(const struct sim_node *node, int device)
{
    return sim_torch_alloc(node->bytes, device);
}

void *nll_loss_backward(const struct sim_node *node, int device)
{
    return sim_torch_alloc(node->bytes, device);
}

static void *apply(const struct sim_node *node, int device)
{
    switch (node->operator) {
    case SIM_MUL:
        return mul_backward(node, device);
    case SIM_MM:
        return mm_backward(node, device);
    default:
        return nll_loss_backward(node, device);
    }
}

/* A gradient that is not kept lives until the next operator has used it. */
static void run(struct task *task)
{
    void *before = NULL;
    for (size_t i = 0; i < task->count && !task->failed; i++) {
        struct sim_node *node = &task->nodes[i];
        if (node->operator == SIM_PYTHON) {
            node->python();
            continue;
        }
        void *gradient = apply(node, task->device);
        task->failed = !gradient;
        sim_torch_free(before);
        before = NULL;
        if (node->keep)
            node->gradient = gradient;
        else
            before = gradient;
    }
    sim_torch_free(before);
}

static void *work(void *arg)
{
    struct worker *worker = arg;
    on_engine_thread = true;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!worker->task)
            pthread_cond_wait(&given, &lock);
        struct task *task = worker->task;
        pthread_mutex_unlock(&lock);
        run(task);
        pthread_mutex_lock(&lock);
        worker->task = NULL;
        task->done = true;
        pthread_cond_broadcast(&finished);
    }
    return NULL;
}

static void start(struct worker *worker)
{
    char name[16];
    snprintf(name, sizeof name, "pt_autograd_%d", (int)(worker - workers));
    pthread_create(&worker->thread, NULL, work, worker);
    pthread_setname_np(worker->thread, name);
}

/* Waits while the thread is busy with the graph of another caller. */
void engine_execute(struct task *task)
{
    if (on_engine_thread) {
        run(task);
        return;
    }
    struct worker *worker = &workers[task->device];
    pthread_mutex_lock(&lock);
    if (!worker->thread)
        start(worker);
    while (worker->task)
        pthread_cond_wait(&finished, &lock);
    worker->task = task;
    pthread_cond_broadcast(&given);
    while (!task->done)
        pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
}

EXPORT int sim_torch_backward(struct sim_node *nodes, size_t count, int device)
{
    if (device < 0 || device >= MAX_DEVICES)
        return -1;
    struct task task = {nodes, count, device, 0, false};
    engine_execute(&task);
    return task.failed ? -1 : 0;
}
