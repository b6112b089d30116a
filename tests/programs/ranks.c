/* ranks: joins communicators when told on stdin. `id` prints the id of a new one; `init ID SIZE RANK`,
 * `config ID SIZE RANK` and `scalable ID SIZE RANK` join one by the function of that name; `exec` executes
 * the program anew; anything else does nothing. It says how each ended. */
#include "truth.h"

#include "nccl.h"

static void print_id(const ncclUniqueId *id)
{
    printf("ID ");
    for (size_t i = 0; i < sizeof id->internal; i++)
        printf("%02x", (unsigned char)id->internal[i]);
    printf("\n");
}

static ncclUniqueId read_id(const char *text)
{
    ncclUniqueId id;
    for (size_t i = 0; i < sizeof id.internal; i++) {
        unsigned int byte;
        EXPECT(sscanf(text + 2 * i, "%2x", &byte) == 1);
        id.internal[i] = (char)byte;
    }
    return id;
}

static ncclResult_t join(const char *how, ncclUniqueId id, int size, int rank)
{
    ncclComm_t comm;
    if (!strcmp(how, "init"))
        return ncclCommInitRank(&comm, size, id, rank);
    if (!strcmp(how, "config"))
        return ncclCommInitRankConfig(&comm, size, id, rank, NULL);
    ncclUniqueId ids[2] = {id};
    return ncclCommInitRankScalable(&comm, size, rank, 2, ids, NULL);
}

int main(int argc, char **argv)
{
    char line[512], how[16], text[2 * NCCL_UNIQUE_ID_BYTES + 1];
    int size, rank;
    (void)argc;
    truth_begin();
    for (;;) {
        printf("READY\n");
        truth_next_line(line, sizeof line);
        if (!strcmp(line, "exec")) {
            execl("/proc/self/exe", argv[0], NULL);
        } else if (!strcmp(line, "id")) {
            ncclUniqueId id;
            MUST(ncclGetUniqueId(&id));
            print_id(&id);
        } else if (sscanf(line, "%15s %256s %d %d", how, text, &size, &rank) == 4) {
            printf("JOINED rc=%d\n", join(how, read_id(text), size, rank));
        }
    }
}
