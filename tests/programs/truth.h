/* How a test program tells what is true: lines on stdout that the tests parse.
 *
 *   PID n                                  first
 *   CALL api rc=n op=.. level=.. addr=0x.. size=n tid=n    one traced call (where a program lists them)
 *   MADE alloc=n free=n failed=n           how many calls were made, so far
 *   LIVE level 0xaddr size pid=n tid=n     a block that is live at the next READY
 *   TIME ns_per_pair=n cpu_ns_per_pair=n   what allocating and freeing took, by the clock and in
 *                                          CPU time of all threads
 *   READY                                  then the program waits for a line on its stdin
 *
 * At the end of its input a program ends as it is, freeing nothing. */
#ifndef TRUTH_H
#define TRUTH_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)

static inline long truth_tid(void)
{
    return syscall(SYS_gettid);
}

static inline void truth_begin(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("PID %d\n", getpid());
}

static inline void truth_live(const char *level, unsigned long long addr, unsigned long long bytes)
{
    printf("LIVE %s 0x%llx %llu pid=%d tid=%ld\n", level, addr, bytes, getpid(), truth_tid());
}

static inline void truth_made(long allocs, long frees, long failed)
{
    printf("MADE alloc=%ld free=%ld failed=%ld\n", allocs, frees, failed);
}

/* Reads the next line of stdin. At its end the process goes, as by kill: no destructor runs. */
static inline void truth_next_line(char *line, int room)
{
    if (!fgets(line, room, stdin)) {
        fflush(stdout);
        _exit(0);
    }
    line[strcspn(line, "\n")] = 0;
}

static inline void truth_ready(void)
{
    char line[256];
    printf("READY\n");
    truth_next_line(line, sizeof line);
}

struct truth_timer {
    double wall_ns, cpu_ns;
};

static inline double truth_clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static inline struct truth_timer truth_timer_start(void)
{
    return (struct truth_timer){truth_clock_ns(CLOCK_MONOTONIC),
                                truth_clock_ns(CLOCK_PROCESS_CPUTIME_ID)};
}

/* Turns the start times into what has passed since. */
static inline void truth_timer_stop(struct truth_timer *timer)
{
    timer->wall_ns = truth_clock_ns(CLOCK_MONOTONIC) - timer->wall_ns;
    timer->cpu_ns = truth_clock_ns(CLOCK_PROCESS_CPUTIME_ID) - timer->cpu_ns;
}

static inline void truth_time(const struct truth_timer *timer, long pairs)
{
    double each = pairs ? (double)pairs : 1;
    printf("TIME ns_per_pair=%.0f cpu_ns_per_pair=%.0f\n", timer->wall_ns / each,
           timer->cpu_ns / each);
}

static inline void truth_check(int rc, int expected, const char *what)
{
    if (rc != expected) {
        fprintf(stderr, "%s: result %d, expected %d\n", what, rc, expected);
        exit(3);
    }
}

#define MUST(call) truth_check((int)(call), 0, #call)
#define MUST_FAIL(code, call) truth_check((int)(call), (int)(code), #call)
#define EXPECT(condition) truth_check(!(condition), 0, #condition)

static inline long truth_arg(int argc, char **argv, int index, long fallback)
{
    return argc > index ? atol(argv[index]) : fallback;
}

#endif
