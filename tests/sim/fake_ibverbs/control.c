/* SPDX-License-Identifier: MIT */
/* What tests order; fake.h lists it. */
#include "tests/sim/fake_ibverbs/fake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const kind_name[FAKE_KINDS] = {"alloc_pd",  "reg_mr",    "reg_dmabuf", "create_channel",
                                                  "create_cq", "create_qp", "open_device"};

static void say(char *answer, size_t len, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void say(char *answer, size_t len, const char *fmt, ...)
{
    size_t at = strlen(answer);
    va_list ap;
    va_start(ap, fmt);
    if (at < len)
        vsnprintf(answer + at, len - at, fmt, ap);
    va_end(ap);
}

static bool port_order(struct fake_dev *dev, const char *word)
{
    enum ibv_port_state was = dev->port;
    if (strcmp(word, "up") == 0)
        dev->port = IBV_PORT_ACTIVE;
    else if (strcmp(word, "down") == 0)
        dev->port = IBV_PORT_DOWN;
    else if (strcmp(word, "init") == 0)
        dev->port = IBV_PORT_INIT;
    else
        return false;
    if ((was == IBV_PORT_ACTIVE) != (dev->port == IBV_PORT_ACTIVE))
        fake_event_all(dev, dev->port == IBV_PORT_ACTIVE ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
    return true;
}

static bool gid_order(struct fake_dev *dev, const char *address)
{
    char text[INET6_ADDRSTRLEN + 8];
    union ibv_gid gid;
    snprintf(text, sizeof(text), "%s%s", strchr(address, ':') ? "" : "::ffff:", address);
    if (inet_pton(AF_INET6, text, gid.raw) != 1)
        return false;
    dev->gid = gid;
    if (!fake.started)
        return true;
    fake_listen(dev);
    for (struct fake_qp *q = fake.qps; q; q = q->next)
        if (fake_dev_of(q->qp.context) == dev)
            fake_cut(q);
    fake_event_all(dev, IBV_EVENT_GID_CHANGE);
    return true;
}

static bool pkey_order(char *list)
{
    unsigned n = 0;
    memset(fake.pkey, 0, sizeof(fake.pkey));
    for (char *save = NULL, *word = strtok_r(list, ",", &save); word; word = strtok_r(NULL, ",", &save))
        if (n < FAKE_PKEYS)
            fake.pkey[n++] = (uint16_t)strtoul(word, NULL, 0);
    for (unsigned i = 0; fake.started && i < FAKE_DEVICES; i++)
        fake_event_all(&fake.dev[i], IBV_EVENT_PKEY_CHANGE);
    return n > 0;
}

static bool limit_order(const char *text)
{
    char name[32];
    long n;
    int err = ENOMEM;
    if (sscanf(text, "%31s %ld %d", name, &n, &err) < 2)
        return false;
    for (unsigned k = 0; k < FAKE_KINDS; k++) {
        if (strcmp(name, kind_name[k]) != 0)
            continue;
        fake.limit[k] = n;
        fake.limit_errno[k] = err;
        return true;
    }
    return false;
}

static bool gpu_order(const char *word)
{
    static const char *const words[] = {"none", "dmabuf", "peermem", "both"};
    for (unsigned i = 0; i < 4; i++) {
        if (strcmp(word, words[i]) != 0)
            continue;
        fake.dmabuf = i & 1;
        fake.peermem = i & 2;
        return true;
    }
    return false;
}

static void die(struct fake_dev *dev)
{
    dev->dead = true;
    for (struct fake_qp *q = fake.qps; q; q = q->next)
        if (fake_dev_of(q->qp.context) == dev)
            fake_qp_error(q);
    fake_event_all(dev, IBV_EVENT_DEVICE_FATAL);
}

static void tell_stats(char *answer, size_t len)
{
    for (unsigned k = 0; k < FAKE_KINDS; k++)
        say(answer, len, "%s=%u ", kind_name[k], fake.live[k]);
    say(answer, len, "sends=%llu writes=%llu bytes=%llu rnr=%llu", (unsigned long long)fake.sends,
        (unsigned long long)fake.writes, (unsigned long long)fake.bytes, (unsigned long long)fake.rnr);
    for (unsigned i = 0; i < FAKE_DEVICES; i++)
        say(answer, len, " bytes%u=%llu", i, (unsigned long long)fake.dev[i].bytes);
}

static void tell_qps(char *answer, size_t len)
{
    for (const struct fake_qp *q = fake.qps; q; q = q->next)
        say(answer, len, "%u:%d:%u:%u ", q->qp.qp_num, (int)q->state, q->attr.ah_attr.sl,
            q->attr.ah_attr.grh.traffic_class);
}

static bool count_order(const char *text)
{
    fake.ndevices = (unsigned)strtoul(text, NULL, 0);
    return fake.ndevices <= FAKE_DEVICES;
}

void fake_order(char *text, char *answer, size_t len)
{
    char *rest = NULL, *word = strtok_r(text, " ", &rest);
    struct fake_dev *dev = &fake.dev[0];
    bool ok = true;
    answer[0] = '\0';
    if (word && strcmp(word, "on") == 0) {
        dev = &fake.dev[strtoul(rest, &rest, 0) % FAKE_DEVICES];
        word = strtok_r(NULL, " ", &rest);
    }
    if (!word)
        ok = false;
    else if (strcmp(word, "port") == 0)
        ok = port_order(dev, rest);
    else if (strcmp(word, "gid") == 0)
        ok = gid_order(dev, rest);
    else if (strcmp(word, "pkey") == 0)
        ok = pkey_order(rest);
    else if (strcmp(word, "limit") == 0)
        ok = limit_order(rest);
    else if (strcmp(word, "gpu") == 0)
        ok = gpu_order(rest);
    else if (strcmp(word, "devices") == 0)
        ok = count_order(rest);
    else if (strcmp(word, "lanes") == 0)
        dev->width = strcmp(rest, "2") == 0 ? 16 : 2;
    else if (strcmp(word, "link") == 0)
        fake.ib = strcmp(rest, "ib") == 0;
    else if (strcmp(word, "lose") == 0)
        fake.lose_at = strtoul(rest, NULL, 0);
    else if (strcmp(word, "fatal") == 0)
        die(dev);
    else if (strcmp(word, "revive") == 0)
        dev->dead = false;
    else if (strcmp(word, "stats") == 0)
        tell_stats(answer, len);
    else if (strcmp(word, "qps") == 0)
        tell_qps(answer, len);
    else
        ok = false;
    if (!ok || !answer[0])
        snprintf(answer, len, "%s", ok ? "ok" : "what is that?");
}

/* A process is its own node: its number makes the address, where the test names none. */
static void defaults(void)
{
    unsigned pid = (unsigned)getpid();
    uint8_t ipv4[4] = {10, (uint8_t)(pid >> 16), (uint8_t)(pid >> 8), (uint8_t)pid};
    fake.ndevices = 1;
    fake.pkey[0] = 0xffff;
    fake.last_qpn = 0x100;
    fake.last_key = 0x1000;
    for (unsigned i = 0; i < FAKE_DEVICES; i++) {
        struct fake_dev *dev = &fake.dev[i];
        *dev = (struct fake_dev){.ib = {.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB},
                                 .port = IBV_PORT_ACTIVE,
                                 .lid = (uint16_t)(pid % 0x2fff + 1 + i * 0x2fff),
                                 .width = 2,
                                 .listener = -1};
        snprintf(dev->ib.name, sizeof(dev->ib.name), "fakeib%u", i);
        snprintf(dev->ib.dev_name, sizeof(dev->ib.dev_name), "uverbs%u", i);
        ipv4[0] = (uint8_t)(10 + i);
        memset(dev->gid.raw + 10, 0xff, 2);
        memcpy(dev->gid.raw + 12, ipv4, sizeof(ipv4));
    }
    for (unsigned k = 0; k < FAKE_KINDS; k++)
        fake.limit[k] = -1;
}

void fake_orders_of_environment(void)
{
    const char *orders = secure_getenv("FAKE_VERBS");
    char *copy = orders ? strdup(orders) : NULL, *save = NULL, answer[4096];
    defaults();
    for (char *one = copy ? strtok_r(copy, ";\n", &save) : NULL; one; one = strtok_r(NULL, ";\n", &save)) {
        while (*one == ' ')
            one++;
        fake_order(one, answer, sizeof(answer));
        if (strcmp(answer, "ok") != 0) {
            fprintf(stderr, "FAKE_VERBS: '%s': %s\n", one, answer);
            abort();
        }
    }
    free(copy);
}
