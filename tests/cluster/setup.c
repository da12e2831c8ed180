/* SPDX-License-Identifier: MIT */
/*
 * A set-up that takes long: before its limit each rank's log says once which ranks are missing, by number, on the node of the
 * meeting point and on others, whose daemons ask there. The one that is missing comes when the others were told. timeout: 60
 */
#include <stdio.h>
#include <string.h>

#include "tests/lib/harness.h"

struct state {
    _Atomic uint32_t told;
};

struct said {
    struct hpf_rank *me;
    _Atomic uint32_t times;
    char text[1000];
};

static void log_line(void *user, hclient_log_level_t level, const char *text)
{
    struct said *s = user;
    struct state *state = ht_shared(s->me);
    if (level != HCLIENT_LOG_WARN || strstr(text, "wait") == NULL || atomic_fetch_add(&s->times, 1) > 0)
        return;
    snprintf(s->text, sizeof(s->text), "%s", text);
    atomic_fetch_add(&state->told, 1);
}

static int run(struct hpf_rank *me)
{
    static struct said said;
    struct ht_env e;
    struct state *state = ht_shared(me);
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.setup_timeout_ms = ht_ms(6000);
    said.me = me;
    HT_TRY(me, hclient_set_log_callback(log_line, &said));
    bool late = me->rank == 2;
    long long deadline = hpf_now_ms() + ht_ms(5500);
    while (late && atomic_load(&state->told) < 2) {
        HT_EXPECT(me, hpf_now_ms() < deadline, "%u ranks were told what they wait for",
                  atomic_load(&state->told));
        hpf_sleep_ms(5);
    }
    if (ht_join(&e, me, 0, &config) != 0)
        return 1;
    /* Rank 0's daemon made the id, so it is the meeting point. */
    HT_EXPECT(me,
              atomic_load(&said.times) == (late ? 0u : 1u) &&
                  (late || strstr(said.text, "waiting for rank 2 for")) &&
                  (me->rank != 1 || strstr(said.text, "(said by the daemon of node ")),
              "was told %u times: %s", atomic_load(&said.times), said.text);
    HT_TRY(me, hclient_set_log_callback(NULL, NULL));
    return ht_leave(&e);
}

int main(void)
{
    static const unsigned map[] = {0, 1, 1};
    struct hpf_cluster *c = ht_cluster(2, NULL);
    const struct ht_job job = {.nranks = 3, .map = map, .fn = run, .shared_bytes = sizeof(struct state)};
    ht_run(c, &job);
    ht_cluster_end(c);
    return 0;
}
