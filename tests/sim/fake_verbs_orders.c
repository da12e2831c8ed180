/* SPDX-License-Identifier: MIT */
#include "tests/sim/fake_verbs_int.h"

#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

void fake_verbs_reset(void)
{
    fake_verbs_lock();
    unsigned objects = fake_world.objects;
    fake_world.ndev = 0;
    fake_world.list_err = fake_world.cq_limit = 0;
    memset(fake_world.fail, 0, sizeof(fake_world.fail));
    memset(fake_world.calls, 0, sizeof(fake_world.calls));
    fake_world.wc_errors = fake_world.rnr = 0;
    fake_world.lose = false;
    fake_world.hold = fake_world.down = false;
    memset(fake_world.dev_down, 0, sizeof(fake_world.dev_down));
    memset(fake_world.dev_bytes, 0, sizeof(fake_world.dev_bytes));
    fake_world.late = fake_world.damage_in = fake_world.damage_out = false;
    fake_world.gpu_in = fake_world.gpu_out = 0;
    fake_world.rate_in = fake_world.rate_out = fake_world.rate_host = 0;
    fake_verbs_unlock();
    assert_int_equal(objects, 0);
}

void fake_verbs_add(const struct fake_device *dev)
{
    assert_true(fake_world.ndev < FAKE_DEVICES);
    fake_world.dev[fake_world.ndev++] = *dev;
}

void fake_verbs_plain(void)
{
    struct fake_device d = {.name = "fake0", .nports = 1};
    fake_verbs_reset();
    d.port[0].attr = (struct ibv_port_attr){.state = IBV_PORT_ACTIVE,
                                            .max_mtu = IBV_MTU_4096,
                                            .active_mtu = IBV_MTU_4096,
                                            .link_layer = IBV_LINK_LAYER_ETHERNET,
                                            .active_width = 2,
                                            .active_speed = 32};
    d.port[0].pkey[0] = 0xffff;
    d.port[0].gid[1].type = IBV_GID_TYPE_ROCE_V2; /* of no use to whoever chooses */
    inet_pton(AF_INET6, "::ffff:169.254.0.1", &d.port[0].gid[1].gid);
    d.port[0].gid[3].type = IBV_GID_TYPE_ROCE_V2;
    inet_pton(AF_INET6, "::ffff:10.0.0.1", &d.port[0].gid[3].gid);
    fake_verbs_add(&d);
}

void fake_verbs_rails(unsigned n, const unsigned *lanes)
{
    static const char *const names[FAKE_DEVICES] = {"fake0", "fake1", "fake2", "fake3"};
    fake_verbs_plain();
    for (unsigned i = 0; i < n; i++) {
        struct fake_device d = fake_world.dev[0];
        d.name = names[i];
        d.port[0].attr.active_width = !lanes || lanes[i] == 4 ? 2 : 16;
        d.port[0].gid[3].gid.raw[14] = (uint8_t)i; /* 10.0.0.1, 10.0.1.1, ... */
        if (i == 0)
            fake_world.dev[0] = d;
        else
            fake_verbs_add(&d);
    }
}

static int choose(const char *name, struct hrd_verbs_device *dev, char *why, size_t len)
{
    struct hrd_verbs_want want = {.port = HRD_VERBS_AUTO,
                                  .gid_index = HRD_VERBS_AUTO,
                                  .pkey = HRD_VERBS_AUTO,
                                  .mtu = HRD_VERBS_AUTO,
                                  .timeout = 14,
                                  .retry = 7,
                                  .queues = 3};
    snprintf(want.device, sizeof(want.device), "%s", name);
    return hrd_verbs_choose(fake_verbs(), &want, dev, why, len);
}

struct hrd_verbs_device fake_verbs_device_of(const char *name)
{
    struct hrd_verbs_device dev;
    char why[512];
    if (choose(name, &dev, why, sizeof(why)))
        fail_msg("%s", why);
    return dev;
}

struct hrd_verbs_device fake_verbs_device(void)
{
    return fake_verbs_device_of("auto");
}

bool fake_verbs_find(const char *name, struct hrd_verbs_device *dev)
{
    char why[512];
    return choose(name, dev, why, sizeof(why)) == 0;
}

void fake_verbs_list_error(int list_err)
{
    fake_world.list_err = list_err;
}

void fake_verbs_fail(enum fake_call call, unsigned after, int err, unsigned times)
{
    fake_verbs_lock();
    fake_world.fail[call].on = err != 0;
    fake_world.fail[call].after = after;
    fake_world.fail[call].err = err;
    fake_world.fail[call].times = times;
    fake_verbs_unlock();
}

unsigned fake_verbs_calls(enum fake_call call)
{
    fake_verbs_lock();
    unsigned n = fake_world.calls[call];
    fake_verbs_unlock();
    return n;
}

void fake_verbs_wc_error(enum ibv_wc_status status, unsigned n)
{
    fake_verbs_lock();
    fake_world.wc_error = status;
    fake_world.wc_errors = n;
    fake_verbs_unlock();
}

void fake_verbs_lose(unsigned after, bool arrived)
{
    fake_verbs_lock();
    fake_world.lose = true;
    fake_world.lose_after = after;
    fake_world.lose_arrived = arrived;
    fake_verbs_unlock();
}

unsigned fake_verbs_to_lose(void)
{
    fake_verbs_lock();
    unsigned n = fake_world.lose;
    fake_verbs_unlock();
    return n;
}

void fake_verbs_hold(bool hold)
{
    fake_verbs_lock();
    fake_world.hold = hold;
    for (struct fqp *q = fake_world.qps; q && !hold; q = q->next) {
        for (unsigned i = 0; i < q->nheld; i++)
            fake_verbs_run(q, &q->held[i].wr);
        q->nheld = 0;
    }
    fake_verbs_unlock();
}

void fake_verbs_gpu(bool late, bool damage_in, bool damage_out)
{
    fake_verbs_lock();
    fake_world.late = late;
    fake_world.damage_in = damage_in;
    fake_world.damage_out = damage_out;
    fake_verbs_unlock();
}

void fake_verbs_rates(uint64_t in, uint64_t out, uint64_t host)
{
    fake_verbs_lock();
    fake_world.rate_in = in;
    fake_world.rate_out = out;
    fake_world.rate_host = host;
    fake_verbs_unlock();
}

void fake_verbs_visible(void)
{
    fake_verbs_lock();
    fake_verbs_settle();
    fake_verbs_unlock();
}

unsigned fake_verbs_gpu_regions(void)
{
    unsigned n = 0;
    fake_verbs_lock();
    for (const struct fmr *m = fake_world.mrs; m; m = m->next)
        n += m->gpu;
    fake_verbs_unlock();
    return n;
}

uint64_t fake_verbs_gpu_bytes(bool in)
{
    fake_verbs_lock();
    uint64_t n = in ? fake_world.gpu_in : fake_world.gpu_out;
    fake_verbs_unlock();
    return n;
}

void fake_verbs_event(enum ibv_event_type type, unsigned port)
{
    fake_verbs_lock();
    for (struct fctx *c = fake_world.contexts; c; c = c->next)
        fake_verbs_raise(c, type, port);
    fake_verbs_unlock();
}

void fake_verbs_port(bool up)
{
    fake_verbs_lock();
    fake_world.down = !up;
    fake_verbs_unlock();
    fake_verbs_event(up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, 1);
}

void fake_verbs_set_gid(const char *ipv4)
{
    char text[64];
    snprintf(text, sizeof(text), "::ffff:%s", ipv4);
    fake_verbs_lock();
    assert_int_equal(inet_pton(AF_INET6, text, &fake_world.dev[0].port[0].gid[3].gid), 1);
    fake_verbs_unlock();
}

unsigned fake_verbs_qps(uint8_t sl, uint8_t tc)
{
    unsigned n = 0;
    fake_verbs_lock();
    for (const struct fqp *q = fake_world.qps; q; q = q->next)
        n += q->rtr.qp_state == IBV_QPS_RTR && q->rtr.ah_attr.sl == sl &&
             q->rtr.ah_attr.grh.traffic_class == tc;
    fake_verbs_unlock();
    return n;
}

void fake_verbs_cq_limit(int entries)
{
    fake_world.cq_limit = entries;
}

unsigned fake_verbs_objects(void)
{
    fake_verbs_lock();
    unsigned n = fake_world.objects;
    fake_verbs_unlock();
    return n;
}

unsigned fake_verbs_rnr(void)
{
    fake_verbs_lock();
    unsigned n = fake_world.rnr;
    fake_verbs_unlock();
    return n;
}

struct ibv_qp_attr fake_verbs_last_rtr(void)
{
    fake_verbs_lock();
    struct ibv_qp_attr a = fake_world.last_rtr;
    fake_verbs_unlock();
    return a;
}

static void device_event(unsigned dev, enum ibv_event_type type)
{
    for (struct fctx *c = fake_world.contexts; c; c = c->next)
        if (c->dev == &fake_world.dev[dev])
            fake_verbs_raise(c, type, 1);
}

void fake_verbs_device_port(unsigned dev, bool up)
{
    fake_verbs_lock();
    fake_world.dev_down[dev] = !up;
    fake_world.dev[dev].port[0].attr.state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    device_event(dev, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
    fake_verbs_unlock();
}

void fake_verbs_device_silent(unsigned dev, bool silent)
{
    fake_verbs_lock();
    fake_world.dev_down[dev] = silent;
    fake_verbs_unlock();
}

void fake_verbs_device_gone(unsigned dev, bool gone)
{
    fake_verbs_lock();
    fake_world.dev_down[dev] = gone;
    fake_world.dev[dev].open_err = gone ? ENODEV : 0;
    if (gone)
        device_event(dev, IBV_EVENT_DEVICE_FATAL);
    fake_verbs_unlock();
}

uint64_t fake_verbs_device_bytes(unsigned dev)
{
    fake_verbs_lock();
    uint64_t n = fake_world.dev_bytes[dev];
    fake_verbs_unlock();
    return n;
}

void fake_verbs_pair(struct hrd_verbs_conn **a, void *arena_a, uint64_t len_a, struct hrd_verbs_conn **b,
                     void *arena_b, uint64_t len_b, unsigned queues)
{
    struct hrd_verbs_device dev = fake_verbs_device();
    fake_verbs_pair_on(&dev, a, arena_a, len_a, b, arena_b, len_b, queues);
}

void fake_verbs_pair_on(const struct hrd_verbs_device *dev, struct hrd_verbs_conn **a, void *arena_a,
                        uint64_t len_a, struct hrd_verbs_conn **b, void *arena_b, uint64_t len_b,
                        unsigned queues)
{
    char why[512] = "?";
    *a = hrd_verbs_conn_new(dev, queues, arena_a, len_a, 77, fake_verbs_stall_ms, why, sizeof(why));
    *b = *a ? hrd_verbs_conn_new(dev, queues, arena_b, len_b, 77, fake_verbs_stall_ms, why, sizeof(why))
            : NULL;
    if (!*b || hrd_verbs_conn_connect(*b, &(*a)->local, false, why, sizeof(why)) ||
        hrd_verbs_conn_connect(*a, &(*b)->local, true, why, sizeof(why)))
        fail_msg("%s", why);
    int ra = 0, rb = 0;
    for (int i = 0; i < 10 && (ra != 1 || rb != 1) && ra >= 0 && rb >= 0; i++) {
        rb = rb ? rb : hrd_verbs_conn_probe(*b, why, sizeof(why));
        ra = ra ? ra : hrd_verbs_conn_probe(*a, why, sizeof(why));
    }
    if (ra != 1 || rb != 1)
        fail_msg("probe: %d %d %s", ra, rb, why);
}
