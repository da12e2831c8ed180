/* SPDX-License-Identifier: MIT */
#include "daemon/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "daemon/config_table.h"

/* Left to the daemon itself and to everybody else. */
#define HEADROOM_KEPT (UINT64_C(32) << 20)
/* Between two looks at what else the thread should do: none here, but the kernel's lock is let go. */
#define PIECE (UINT64_C(32) << 20)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* ---- what is left ----------------------------------------------------------------------------------------- */

static bool read_file(const char *path, char *buf, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, buf, size - 1);
    close(fd);
    if (n < 0)
        return false;
    buf[n] = '\0';
    return true;
}

/* A file with one number; "max" and anything unreadable is no number. */
static bool read_number(const char *dir, const char *file, uint64_t *out)
{
    char path[720], text[64];
    snprintf(path, sizeof(path), "%s/%s", dir, file);
    if (!read_file(path, text, sizeof(text)) || text[0] < '0' || text[0] > '9')
        return false;
    *out = strtoull(text, NULL, 10);
    return true;
}

static uint64_t machine_headroom(void)
{
    char text[2048];
    const char *at;
    if (!read_file("/proc/meminfo", text, sizeof(text)) || (at = strstr(text, "MemAvailable:")) == NULL)
        return UINT64_MAX;
    return strtoull(at + 13, NULL, 10) * 1024;
}

/* The two generations of control groups; a machine has its memory controller in one of them. */
static const struct generation {
    const char *line; /* of /proc/self/cgroup, behind the hierarchy's number */
    const char *mount, *max, *now, *cache, *name;
} generations[] = {
    {"0::", "/sys/fs/cgroup", "memory.max", "memory.current", "\ninactive_file ", "memory.max"},
    {":memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "\ntotal_inactive_file ", "memory.limit_in_bytes"},
};

/* Page cache that the group can drop counts as room. */
static uint64_t group_reclaimable(const char *dir, const char *field)
{
    char path[720], text[4096];
    const char *at;
    snprintf(path, sizeof(path), "%s/memory.stat", dir);
    if (!read_file(path, text, sizeof(text)) || (at = strstr(text, field)) == NULL)
        return 0;
    return strtoull(at + strlen(field), NULL, 10);
}

/* What one group leaves; UINT64_MAX: it has no limit. */
static uint64_t group_left(const char *dir, const struct generation *g)
{
    uint64_t max, now;
    if (!read_number(dir, g->max, &max) || !read_number(dir, g->now, &now) || max > INT64_MAX / 2)
        return UINT64_MAX;
    uint64_t cache = group_reclaimable(dir, g->cache);
    now -= cache < now ? cache : now;
    return max > now ? max - now : 0;
}

/* The tightest limit on the way up from the daemon's own group. */
static uint64_t group_headroom(const struct generation *g, char *where, size_t len)
{
    char text[1024], dir[640], *nl;
    uint64_t best = UINT64_MAX;
    if (!read_file("/proc/self/cgroup", text, sizeof(text)))
        return best;
    char *path = strstr(text, g->line);
    if (!path)
        return best;
    path += strlen(g->line);
    if ((nl = strchr(path, '\n')) != NULL)
        *nl = '\0';
    while (path[0] == '/' && path[1] != '\0') {
        snprintf(dir, sizeof(dir), "%s%.560s", g->mount, path);
        uint64_t left = group_left(dir, g);
        if (left < best) {
            best = left;
            snprintf(where, len, "%s of the control group %.400s (MemoryMax= of its unit)", g->name, path);
        }
        *strrchr(path, '/') = '\0';
    }
    return best;
}

uint64_t hrd_memory_headroom(char *where, size_t len)
{
    uint64_t best = machine_headroom();
    snprintf(where, len, "the memory of this machine (MemAvailable)");
    for (unsigned i = 0; i < sizeof(generations) / sizeof(generations[0]); i++) {
        char group[600];
        uint64_t left = group_headroom(&generations[i], group, sizeof(group));
        if (left < best) {
            best = left;
            snprintf(where, len, "%s", group);
        }
    }
    return best;
}

/* ---- memory of the daemon's making ------------------------------------------------------------------------ */

static int refuse(int err, char *text, size_t len, uint64_t bytes, const char *what)
{
    char size[32];
    hrd_size_text(bytes, size, sizeof(size));
    struct rlimit lim = {0};
    switch (err) {
    case EMFILE:
        getrlimit(RLIMIT_NOFILE, &lim);
        snprintf(text, len,
                 "%s of shared memory: the daemon has no free descriptor (limit %" PRIu64
                 "); raise LimitNOFILE= of hreduced.service",
                 size, (uint64_t)lim.rlim_cur);
        break;
    case ENFILE:
        snprintf(text, len, "%s of shared memory: the machine has no free descriptor; raise fs.file-max",
                 size);
        break;
    case ENOMEM:
    case ENOSPC:
        snprintf(
            text, len,
            "%s of shared memory: %s failed (%s); free memory, lower staging_window, or raise the limit of "
            "the daemon's control group, vm.overcommit_ratio or vm.max_map_count",
            size, what, strerror(err));
        break;
    default:
        snprintf(text, len, "%s of shared memory: %s failed: %s", size, what, strerror(err));
        break;
    }
    return -err;
}

static int check_headroom(uint64_t bytes, char *err, size_t errlen)
{
    char where[640] = "", size[32];
    uint64_t left = hrd_memory_headroom(where, sizeof(where));
    uint64_t usable = left > HEADROOM_KEPT ? left - HEADROOM_KEPT : 0;
    if (bytes <= usable)
        return 0;
    /* Past this point the kernel would kill a process instead of refusing. */
    snprintf(err, errlen,
             "%s of shared memory cannot be had: %" PRIu64 "M are left of %s, 32M of which stay free",
             hrd_size_text(bytes, size, sizeof(size)), left >> 20, where);
    return -ENOMEM;
}

static int reserve(int fd, size_t len)
{
    int rc;
    do
        rc = fallocate(fd, 0, 0, (off_t)len);
    while (rc != 0 && errno == EINTR);
    return rc;
}

/* The page tables, here and not on the thread that moves data; in pieces, because the kernel holds the lock on
 * the address space over each. */
static void populate(char *base, size_t len)
{
    for (size_t at = 0; at < len; at += PIECE) {
        size_t n = len - at < PIECE ? len - at : PIECE;
        if (madvise(base + at, n, MADV_POPULATE_WRITE) != 0)
            return; /* an older kernel: the first touch does it */
    }
}

int hrd_memfd_make(const char *name, uint64_t bytes, void **base, size_t *len, char *err, size_t errlen)
{
    const char *what = "memfd_create";
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes > (UINT64_C(1) << 46))
        return refuse(ENOMEM, err, errlen, bytes, what);
    size_t size = ((size_t)bytes + page - 1) / page * page;
    int rc = check_headroom(size, err, errlen);
    if (rc != 0)
        return rc;
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return refuse(errno, err, errlen, size, what);
    what = "fallocate";
    if (reserve(fd, size) != 0)
        goto fail;
    what = "sealing";
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        goto fail;
    what = "mmap";
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        goto fail;
    populate(map, size);
    *base = map;
    *len = size;
    return fd;
fail:
    rc = errno;
    close(fd);
    return refuse(rc, err, errlen, size, what);
}

/* ---- memory of a client's --------------------------------------------------------------------------------- */

int hrd_memfd_import(int fd, uint64_t offset, uint64_t bytes, void **base, char *err, size_t errlen)
{
    struct stat st;
    struct statfs fs;
    if (fstat(fd, &st) != 0 || fstatfs(fd, &fs) != 0) {
        int rc = -errno;
        snprintf(err, errlen, "the descriptor to register cannot be examined: %s", strerror(-rc));
        return rc;
    }
    if (fs.f_type == HUGETLBFS_MAGIC) {
        snprintf(err, errlen,
                 "memory of huge pages (MFD_HUGETLB) cannot be registered, because its pages cannot be "
                 "reserved for the daemon; use an ordinary memfd or hclient_mem_alloc");
        return -EINVAL;
    }
    if (fs.f_type != TMPFS_MAGIC || !S_ISREG(st.st_mode)) {
        snprintf(err, errlen,
                 "the descriptor to register is no memfd; use memfd_create or hclient_mem_alloc");
        return -EINVAL;
    }
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) {
        snprintf(err, errlen,
                 "the memfd to register is not sealed against shrinking; add F_SEAL_SHRINK first");
        return -EINVAL;
    }
    if (bytes == 0 || bytes > (uint64_t)st.st_size || offset > (uint64_t)st.st_size - bytes) {
        snprintf(err, errlen,
                 "the range to register, %" PRIu64 " bytes at %" PRIu64
                 ", does not lie within the memfd of %" PRIu64 " bytes",
                 bytes, offset, (uint64_t)st.st_size);
        return -EINVAL;
    }
    void *map = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (map == MAP_FAILED) {
        int rc = -errno;
        snprintf(err, errlen,
                 "mapping the memfd to register failed: %s; it must be open for reading and writing and must "
                 "not be "
                 "sealed against writing",
                 strerror(-rc));
        return rc;
    }
    *base = map;
    return 0;
}
