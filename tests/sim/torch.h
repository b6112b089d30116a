/* What the simulated libtorch_cpu offers to test programs, beside the symbol of the real one. */
#ifndef SIM_TORCH_H
#define SIM_TORCH_H

#include <stddef.h>

enum sim_operator { SIM_MUL, SIM_MM, SIM_NLL_LOSS, SIM_PYTHON };

/* One node of a graph: what its backward operator allocates, and whether that outlives the pass. */
struct sim_node {
    int operator;
    int keep;
    size_t bytes;
    void *gradient;        /* out, where it is kept */
    void (*python)(void);  /* for SIM_PYTHON: a backward function written in Python */
};

/* One backward pass: 0, or -1 when the GPU is full. Nodes are given in the order in which their
 * operators run, on the engine's thread of the device. From that thread it is a pass within a
 * pass, and runs at once. */
int sim_torch_backward(struct sim_node *nodes, size_t count, int device);

#endif
