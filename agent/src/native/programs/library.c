/* A library whose only function has the name that the command line gives it. */
__attribute__((noinline)) int NAME(int (*call)(void))
{
    char room[ROOM];
    __asm__ volatile("" : : "r"(room) : "memory");
    return call() + 1;
}
