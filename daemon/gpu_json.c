/* SPDX-License-Identifier: MIT */
/* What the daemon has of each GPU, for status. */
#include "daemon/status.h"

#include "daemon/gpu/gpu.h"

static void add_rate(json_t *o, const char *name, const struct hrd_gdr_rate *r)
{
    if (r->direct > 0)
        json_object_set_new(
            o, name,
            json_pack("{s:f, s:f}", "direct_mb_per_s", r->direct / 1e6, "staged_mb_per_s", r->staged / 1e6));
}

static json_t *one(const struct hrd_gpu_info *g)
{
    json_t *o = json_pack("{s:s, s:s, s:s, s:b, s:i, s:I, s:I}", "pci", g->pci, "uuid", g->uuid, "name",
                          g->name, "in_use", g->up, "imports", (int)g->imports, "import_bytes",
                          (json_int_t)g->import_bytes, "engine_bytes", (json_int_t)g->device_bytes);
    if (g->lost[0])
        json_object_set_new(o, "lost", json_string(g->lost));
    if (g->up && g->sm_why[0])
        json_object_set_new(o, "no_sm", json_string(g->sm_why));
    if (g->up && g->gdr_text[0])
        json_object_set_new(o, g->gdr ? "gdr" : "no_gdr", json_string(g->gdr_text));
    add_rate(o, "gdr_read", &g->gdr_read);
    add_rate(o, "gdr_written", &g->gdr_written);
    return o;
}

json_t *hrd_gpus_json(const struct hrd_daemon *d)
{
    static struct hrd_gpu_info info[HRD_GPUS_MAX];
    uint64_t pinned = 0;
    json_t *list = json_array();
    unsigned n = d->gpus ? hrd_gpus_info(d->gpus, info, HRD_GPUS_MAX, &pinned) : 0;
    for (unsigned i = 0; i < n && i < HRD_GPUS_MAX; i++)
        json_array_append_new(list, one(&info[i]));
    return json_pack("{s:b, s:I, s:o}", "on", d->gpus && d->cfg.gpu, "pinned_bytes", (json_int_t)pinned,
                     "devices", list);
}
