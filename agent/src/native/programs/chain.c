/* Calls `traced` at the end of a known chain of calls. `traced` writes what the kernel half would
 * copy at its first instruction to standard output, then waits for a byte. */
#define _GNU_SOURCE
#include <alloca.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))

static unsigned char copy[1 << 20];
static size_t limit = sizeof copy;

/* The state at the first instruction: its address, sp, fp. */
__asm__(".text\n.globl traced\n.hidden traced\n.type traced, @function\n"
        "traced:\n.cfi_startproc\n"
        "mov %rsp, %rdi\nmov %rbp, %rsi\nlea traced(%rip), %rdx\njmp capture\n"
        ".cfi_endproc\n.size traced, .-traced\n");
int traced(void);

__attribute__((used, visibility("hidden"))) int capture(uint64_t sp, uint64_t fp, uint64_t ip)
{
    int memory = open("/proc/self/mem", O_RDONLY);
    ssize_t copied = pread(memory, copy, limit, (off_t)sp);
    uint64_t header[4] = {ip, sp, fp, copied > 0 ? (uint64_t)copied : 0};
    char go;
    close(memory);
    if (write(1, header, sizeof header) != sizeof header)
        _exit(3);
    for (uint64_t done = 0; done < header[3];) {
        ssize_t wrote = write(1, copy + done, header[3] - done);
        if (wrote <= 0)
            _exit(3);
        done += (uint64_t)wrote;
    }
    if (read(0, &go, 1) != 1)
        _exit(0);
    return go;
}

static inline __attribute__((always_inline)) int folded(int value)
{
    return traced() + value; /* line of the call */
}

NOINLINE int inner(int value)
{
    char room[3000];
    memset(room, value, sizeof room);
    __asm__ volatile("" : : "r"(room) : "memory");
    return folded(value) + room[7];
}

NOINLINE int middle(int value) { return inner(value + 1) * 3; }
NOINLINE int outer(int value) { return middle(value + 2) - 5; }

NOINLINE int recurse(int depth)
{
    int result = depth > 0 ? recurse(depth - 1) : traced();
    __asm__ volatile("" : "+r"(result));
    return result + 1;
}

/* The compiler realigns the stack: the caller's stack pointer is only known by an expression. */
NOINLINE int realigned(int value)
{
    char *room = alloca((size_t)value * 16 + 16);
    int vector[16] __attribute__((aligned(64)));
    memset(vector, value, sizeof vector);
    memset(room, value, 16);
    __asm__ volatile("" : : "r"(vector), "r"(room) : "memory");
    return inner(value) + vector[3] + room[2];
}
NOINLINE int above_realigned(int value) { return realigned(value + 1) + 7; }

static int through(const char *path, const char *name)
{
    void *library = dlopen(path, RTLD_NOW);
    int (*call)(int (*)(void)) = library ? (int (*)(int (*)(void)))dlsym(library, name) : NULL;
    if (!call)
        _exit(4);
    int result = call(traced) + 1;
    dlclose(library);
    return result;
}

int main(int argc, char **argv)
{
    int result = 0;
    const char *mode = argc > 1 ? argv[1] : "chain";
    for (;;) {
        if (!strcmp(mode, "chain"))
            result += outer(argc);
        else if (!strcmp(mode, "recurse"))
            result += recurse(atoi(argv[2]));
        else if (!strcmp(mode, "realigned"))
            result += above_realigned(argc);
        else if (!strcmp(mode, "libraries"))
            result += through(argv[2], "first") + through(argv[3], "second");
        __asm__ volatile("" : "+r"(result));
    }
}
