/* The process's side of memory that several processes may use (state.h): how often it uses each
 * object itself, and the files by which others come to one. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT_TEXT "vramscope simulated export %llu\n"

static uint16_t uses[SIM_MAX_EXPORTS];

struct sim_export *export_at(int export)
{
    return &driver_state()->exports[export];
}

int export_new(int gpu, uint64_t bytes)
{
    struct sim_state *state = driver_state();
    int found = -1;
    sim_lock();
    for (int i = 0; i < SIM_MAX_EXPORTS && found < 0; i++)
        if (!state->exports[i].id)
            found = i;
    if (found >= 0) {
        state->exports[found] = (struct sim_export){.id = ++state->next_export,
                                                    .bytes = bytes,
                                                    .gpu = gpu,
                                                    .charged_to = driver_owner()};
        sim_export_hold(&state->exports[found], driver_owner());
        uses[found] = 1;
    }
    sim_unlock();
    return found;
}

int export_use(uint64_t id)
{
    struct sim_state *state = driver_state();
    int found = -1;
    sim_lock();
    for (int i = 0; i < SIM_MAX_EXPORTS && found < 0; i++)
        if (id && state->exports[i].id == id)
            found = i;
    if (found >= 0) {
        sim_export_hold(&state->exports[found], driver_owner());
        uses[found]++;
    }
    sim_unlock();
    return found;
}

void export_unuse(int export)
{
    if (--uses[export])
        return;
    sim_lock();
    sim_export_drop(export_at(export), driver_owner());
    sim_unlock();
}

int export_open_file(int export)
{
    char path[4096], text[64];
    unsigned long long id = export_at(export)->id;
    sim_export_path(id, path, sizeof path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    int length = snprintf(text, sizeof text, EXPORT_TEXT, id);
    if (fd < 0)
        return -1;
    if (fchmod(fd, 0666) || pwrite(fd, text, (size_t)length, 0) != length || flock(fd, LOCK_SH)) {
        close(fd);
        return -1;
    }
    return fd;
}

uint64_t export_id_of_file(int fd)
{
    char text[64] = "";
    unsigned long long id;
    bool read = pread(fd, text, sizeof text - 1, 0) > 0 && sscanf(text, EXPORT_TEXT, &id) == 1;
    return read ? id : 0;
}
