/* torch_like [STEPS [DEVICE]]: a training loop on the caching allocator: activations that come and
 * go, one tensor kept in each step, and an allocation that is refused at the end. */
#include "truth.h"

#include "c10.h"

static long made, gone;

static void *get(size_t bytes, int device)
{
    void *p = sim_torch_alloc(bytes, device);
    made += p != NULL;
    return p;
}

static void drop(void *p)
{
    sim_torch_free(p);
    gone++;
}

static void totals(int device)
{
    printf("TORCH allocated=%zu reserved=%zu peak=%zu\n", sim_torch_allocated(device),
           sim_torch_reserved(device), sim_torch_peak(device));
}

int main(int argc, char **argv)
{
    static const size_t sizes[] = {300, 4096, 700 << 10, 3 << 20, 9 << 20, 11 << 20, 40 << 20};
    enum { KINDS = sizeof sizes / sizeof *sizes };
    long steps = truth_arg(argc, argv, 1, 10);
    int device = (int)truth_arg(argc, argv, 2, 0);
    truth_begin();
    for (long step = 0; step < steps; step++) {
        void *activations[KINDS];
        for (int i = 0; i < KINDS; i++)
            activations[i] = get(sizes[i], device);
        void *kept = get(1 << 20, device); /* as whole as a block of the small pool can be */
        truth_live("tensor", (unsigned long long)kept, 1 << 20);
        for (int i = KINDS; i-- > 0;)
            drop(activations[i]);
    }
    totals(device);
    truth_made(made, gone, 0);
    truth_ready();
    EXPECT(!sim_torch_alloc(1ull << 42, device)); /* 4 TiB: the cache is given back in vain */
    sim_torch_empty_cache();
    totals(device);
    truth_made(made, gone, 1);
    truth_ready();
}
