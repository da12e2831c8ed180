/* SPDX-License-Identifier: MIT */
#include "daemon/verbs/mr.h"

#include "daemon/text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

const char *hrd_mr_way_name(enum hrd_mr_way way)
{
    static const char *const names[HRD_MR_NWAYS] = {"host memory", "GPU memory by dmabuf",
                                                    "GPU memory by the peer-memory module"};
    return names[way];
}

static int error_of(int err)
{
    return err > 0 ? err : EIO;
}

static struct ibv_mr *try_way(const struct hrd_verbs *v, struct ibv_pd *pd, const struct hrd_mr_source *src,
                              enum hrd_mr_way way, int access)
{
    errno = 0;
    if (way != HRD_MR_DMABUF)
        return v->reg_mr(pd, src->addr, src->len, access);
    if (src->dmabuf_fd < 0 || !v->reg_dmabuf_mr) {
        errno = src->dmabuf_fd < 0 && src->dmabuf_err ? src->dmabuf_err : EOPNOTSUPP;
        return NULL;
    }
    return v->reg_dmabuf_mr(pd, src->dmabuf_off, src->len, (uintptr_t)src->addr, src->dmabuf_fd, access);
}

/* A lack of memory or of device objects passes; that a way does not exist here stays. */
static bool lasting(int err)
{
    return err != ENOMEM && err != EAGAIN && err != EINTR && err != ENOSPC;
}

static void host_hint(char *why, size_t len, int err, size_t bytes)
{
    struct rlimit lim;
    if (err == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &lim) == 0 && lim.rlim_cur != RLIM_INFINITY)
        hrd_text_add(why, len,
                     "; the limit for locked memory is %" PRIu64
                     " bytes, too low for RDMA: set LimitMEMLOCK=infinity in the unit",
                     (uint64_t)lim.rlim_cur);
    else if (err == ENOMEM)
        hrd_text_add(why, len, "; %zu bytes: is memory short, or the control group's rdma.max reached?",
                     bytes);
}

int hrd_mr_register(const struct hrd_verbs *v, struct ibv_pd *pd, struct hrd_mr_memory *memory,
                    const struct hrd_mr_source *src, int access, struct hrd_mr *out, char *why, size_t len)
{
    enum hrd_mr_way first = src->gpu ? HRD_MR_DMABUF : HRD_MR_HOST;
    enum hrd_mr_way last = src->gpu ? HRD_MR_PEERMEM : HRD_MR_HOST;
    int err = 0;
    if (len)
        why[0] = '\0';
    for (enum hrd_mr_way way = first; way <= last; way++) {
        bool known = src->gpu && memory->refused[way];
        struct ibv_mr *mr = known ? NULL : try_way(v, pd, src, way, access);
        if (mr) {
            *out = (struct hrd_mr){.mr = mr, .way = way};
            return 0;
        }
        err = known ? memory->refused[way] : error_of(errno);
        if (src->gpu && !known && lasting(err))
            memory->refused[way] = err;
        hrd_text_add(why, len, "%s%s cannot be registered (%s)", way == first ? "" : "; ",
                     hrd_mr_way_name(way), strerror(err));
    }
    if (src->gpu)
        hrd_text_add(why, len, "; load nvidia-peermem, or use a driver and kernel with dmabuf support");
    else
        host_hint(why, len, err, src->len);
    return -err;
}

void hrd_mr_free(const struct hrd_verbs *v, struct hrd_mr *mr)
{
    if (mr->mr)
        v->dereg_mr(mr->mr);
    mr->mr = NULL;
}
