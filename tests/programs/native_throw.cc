// Exceptions that unwind frames between traced calls. Prints how many were caught, and the stacks
// as native_stacks.c does.
#include <cstdio>
#include <stdexcept>

extern "C" {
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(unsigned long long *block, size_t bytes);
}

namespace job {

static size_t bytes = 512;

struct Guard {
    ~Guard();
};

[[gnu::noinline, gnu::noclone]] void grow(const char *chain)
{
    unsigned long long block;
    std::printf("STACK thrown %zu %s\n", bytes += 512, chain);
    if (cuMemAlloc_v2(&block, bytes) != 0)
        std::printf("FAILED\n");
    asm volatile("" ::: "memory");
}

// Allocates while the exception passes.
Guard::~Guard()
{
    grow("job::grow job::Guard::~Guard");
}

[[gnu::noinline, gnu::noclone]] void thrower(int depth)
{
    Guard guard;
    if (depth == 0)
        throw std::runtime_error("out");
    thrower(depth - 1);
    asm volatile("" ::: "memory");
}

[[gnu::noinline, gnu::noclone]] int attempt()
{
    grow("job::grow job::attempt main");
    try {
        thrower(3);
    } catch (const std::runtime_error &) {
        grow("job::grow job::attempt main");
        return 1;
    }
    return 0;
}

} // namespace job

int main()
{
    void *context;
    int caught = 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 3;
    for (int i = 0; i < 20; i++)
        caught += job::attempt();
    std::printf("CAUGHT %d\n", caught);
}
