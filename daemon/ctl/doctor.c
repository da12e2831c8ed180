/* SPDX-License-Identifier: MIT */
/* hreducectl doctor: the daemon's checks, or, where none answers, the own ones; with --cluster those of all nodes. */
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/ctl/ctl.h"
#include "daemon/doctor/facts.h"
#include "proto/wire.h"

#define DOCTOR_WAIT_MS 20000 /* longer than the daemon takes for one question */

/* ---- the report --------------------------------------------------------------------------------------------- */

struct tally {
    unsigned pass, warn, fail, skip;
};

static const char *count_verdict(struct tally *t, const char *verdict)
{
    if (strcmp(verdict, "pass") == 0)
        t->pass++;
    else if (strcmp(verdict, "warn") == 0)
        t->warn++;
    else if (strcmp(verdict, "fail") == 0)
        t->fail++;
    else
        t->skip++;
    return strcmp(verdict, "warn") == 0 ? "WARN" : strcmp(verdict, "fail") == 0 ? "FAIL" : verdict;
}

static void print_checks(const json_t *checks, struct tally *t, bool quiet)
{
    const json_t *c;
    size_t i;
    json_array_foreach(checks, i, c)
    {
        const char *verdict = count_verdict(t, ctl_str(c, "verdict", "fail"));
        bool bad = verdict[0] == 'W' || verdict[0] == 'F';
        if (quiet)
            continue;
        printf("  %s  %-22s", verdict, ctl_str(c, "check", "?"));
        ctl_print(ctl_str(c, "evidence", ""));
        if (bad) {
            printf("\n        %-22s", "  cause");
            ctl_print(ctl_str(c, "cause", ""));
            printf("\n        %-22s", "  remedy");
            ctl_print(ctl_str(c, "remedy", ""));
        }
        putchar('\n');
    }
}

static int exit_status(const struct tally *t)
{
    return t->fail > 0 ? CTL_DOCTOR_FAIL : t->warn > 0 ? CTL_DOCTOR_WARN : CTL_OK;
}

static int print_report(const json_t *report, bool json)
{
    struct tally t = {0};
    const json_t *node;
    size_t i;
    json_array_foreach(json_object_get(report, "nodes"), i, node)
    {
        const json_t *checks = json_object_get(node, "checks");
        if (!json && checks) {
            printf("%snode ", i > 0 ? "\n" : "");
            ctl_print(ctl_str(node, "name", "?"));
            printf(", by %s\n", ctl_str(node, "by", "its daemon"));
        }
        print_checks(checks, &t, json);
    }
    const json_t *cluster = json_object_get(report, "cluster");
    if (!json && cluster)
        printf("\nall nodes\n");
    print_checks(cluster, &t, json);
    if (json) {
        json_dumpf(report, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
    } else {
        printf("\n%u pass, %u warn, %u fail, %u skip\n", t.pass, t.warn, t.fail, t.skip);
    }
    return exit_status(&t);
}

/* ---- without a daemon --------------------------------------------------------------------------------------- */

static void count_problem(void *ctx, const char *sentence)
{
    struct hrd_finding *f = ctx;
    hrd_find(f, HRD_FAIL, "the daemon does not start with it",
             "Correct it; 'hreduced --check-config' tests the file.", "%s", sentence);
}

static void own_machine(struct hrd_config *cfg, struct hrd_machine *m, struct hrd_netif **ifs,
                        struct hrd_finding *f)
{
    int n = hrd_config_load(cfg, HRD_DEFAULT_CONFIG, count_problem, f);
    if (n == 0)
        hrd_find(f, HRD_PASS, NULL, NULL, HRD_DEFAULT_CONFIG " has no mistakes");
    else if (n < 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "there is no " HRD_DEFAULT_CONFIG "; the defaults hold");
    n = hrd_netif_list(ifs);
    hrd_machine_here(m, cfg, *ifs, n > 0 ? (unsigned)n : 0);
}

/* The same checks with the eyes of who runs hreducectl. */
static json_t *own_report(const struct ctl_options *o)
{
    struct hrd_config cfg;
    struct hrd_machine m;
    struct hrd_netif *ifs = NULL;
    struct hrd_finding none = {.verdict = HRD_SKIP}, config = {.verdict = HRD_SKIP};
    char name[65] = "?", by[96];
    gethostname(name, sizeof(name) - 1);
    own_machine(&cfg, &m, &ifs, &config);
    hrd_find(&none, HRD_FAIL,
             "jobs on this node cannot start; what follows was seen by hreducectl, not by the daemon's user",
             "Start it: systemctl start hreduced; see journalctl -u hreduced.", "no daemon answers at %s",
             o->socket);
    json_t *checks = hrd_doctor_run(&m);
    json_array_insert_new(checks, 0, hrd_finding_json("configuration", "daemon", &config));
    json_array_insert_new(checks, 0, hrd_finding_json("daemon", "daemon", &none));
    snprintf(by, sizeof(by), "hreducectl as user %u", (unsigned)geteuid());
    json_t *report = json_pack("{s:i, s:[{s:s, s:s, s:o, s:o}]}", "format", 1, "nodes", "name", name, "by",
                               by, "facts", hrd_doctor_facts(&m), "checks", checks);
    free(ifs);
    return report;
}

/* ---- with one ----------------------------------------------------------------------------------------------- */

static int ask(struct ctl_client *c, uint32_t what, uint32_t peer, bool back, const char *text, json_t **doc)
{
    struct hrp_msg msg = {.type = HRP_MSG_DOCTOR, .text = text, .text_len = strlen(text)};
    msg.body.doctor = (struct hrp_msg_doctor){.what = what, .peer = peer, .back = back};
    *doc = NULL;
    return ctl_ask_msg(c, &msg, DOCTOR_WAIT_MS, doc);
}

/* Checks of which root sees more than the daemon's user are made once more here. */
static void look_as_root(json_t *checks)
{
    struct hrd_config cfg;
    struct hrd_machine m;
    struct hrd_netif *ifs = NULL;
    struct hrd_finding ignored = {.verdict = HRD_SKIP};
    if (geteuid() != 0)
        return;
    own_machine(&cfg, &m, &ifs, &ignored);
    for (size_t i = 0; i < json_array_size(checks); i++)
        for (unsigned k = 0; k < hrd_nchecks; k++)
            if (hrd_checks[k].root &&
                strcmp(ctl_str(json_array_get(checks, i), "check", ""), hrd_checks[k].name) == 0 &&
                strcmp(ctl_str(json_array_get(checks, i), "verdict", ""), "skip") == 0)
                json_array_set_new(checks, i, hrd_doctor_one(&hrd_checks[k], &m));
    free(ifs);
}

static void add_node(json_t *report, const char *name, json_t *doc)
{
    json_object_set_new(doc, "name", json_string(name));
    json_array_append_new(json_object_get(report, "nodes"), doc);
}

/* What failed is a part of the report, not the end of it. */
static void add_failed(json_t *report, const char *name, const char *why)
{
    add_node(report, name, json_pack("{s:s}", "failed", why));
}

/* "node1 10.0.0.2,10.0.0.3" -> addresses. False: a name that cannot be resolved. */
static bool resolve(const char *list, char *out, size_t len)
{
    char copy[4096], *save = NULL;
    out[0] = 0;
    snprintf(copy, sizeof(copy), "%s", list ? list : "");
    for (char *word = strtok_r(copy, ", ", &save); word; word = strtok_r(NULL, ", ", &save)) {
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG}, *found = NULL;
        char addr[NI_MAXHOST];
        int r = getaddrinfo(word, NULL, &hints, &found);
        if (r == 0)
            r = getnameinfo(found->ai_addr, found->ai_addrlen, addr, sizeof(addr), NULL, 0, NI_NUMERICHOST);
        if (found)
            freeaddrinfo(found);
        if (r != 0) {
            ctl_complain("--nodes: '%s' is no address and cannot be resolved: %s", word, gai_strerror(r));
            return false;
        }
        size_t at = strlen(out);
        snprintf(out + at, len - at, "%s%s", at ? " " : "", addr);
    }
    return true;
}

static void add_reach(json_t *report, const char *from, const char *to, const json_t *answers)
{
    const json_t *a;
    size_t i;
    json_array_foreach(answers, i, a)
    {
        json_array_append_new(json_object_get(report, "reach"),
                              json_pack("{s:s, s:s, s:s, s:b, s:s}", "from", from, "to", to, "address",
                                        ctl_str(a, "address", "?"), "ok",
                                        json_is_true(json_object_get(a, "ok")), "why",
                                        ctl_str(a, "why", "")));
    }
}

static void add_probe(json_t *report, const char *from, const char *to, json_t *answer, const char *why)
{
    json_t *p = answer ? answer : json_pack("{s:s}", "failed", why);
    json_object_set_new(p, "from", json_string(from));
    json_object_set_new(p, "to", json_string(to));
    json_array_append_new(json_object_get(report, "probes"), p);
}

/* Everything about one other node, one thing after the other: a probe shall have the link for itself. */
static void look_at_peer(struct ctl_client *c, json_t *report, const char *here, const json_t *peer)
{
    uint32_t no = (uint32_t)ctl_int(peer, "peer");
    const char *name = ctl_str(peer, "name", "?");
    json_t *doc = NULL;
    if (ask(c, HRP_DOCTOR_HERE, no, true, "", &doc) == CTL_OK)
        add_node(report, name, doc);
    else
        add_failed(report, name, c->error);
    for (int back = 0; back < 2; back++) {
        const char *from = back ? name : here, *to = back ? here : name;
        if (ask(c, HRP_DOCTOR_REACH, no, back, "", &doc) == CTL_OK)
            add_reach(report, from, to, doc);
        json_decref(doc);
    }
    for (int back = 0; back < 2; back++) {
        const char *from = back ? name : here, *to = back ? here : name;
        int rc = ask(c, HRP_DOCTOR_PROBE, no, back, "", &doc);
        add_probe(report, from, to, rc == CTL_OK ? doc : NULL, c->error);
    }
}

static int look_at_cluster(struct ctl_client *c, json_t *report, const char *here, const char *addresses)
{
    json_t *list = NULL;
    const json_t *p;
    size_t i;
    int rc = ask(c, HRP_DOCTOR_DIAL, 0, false, addresses, &list);
    if (rc != CTL_OK) {
        ctl_complain("%s", c->error);
        return rc;
    }
    json_object_set_new(report, "reach", json_array());
    json_object_set_new(report, "probes", json_array());
    json_array_foreach(json_object_get(list, "failed"), i, p)
    {
        add_failed(report, ctl_str(p, "address", "?"), ctl_str(p, "why", "?"));
    }
    json_array_foreach(json_object_get(list, "peers"), i, p)
    {
        look_at_peer(c, report, here, p);
    }
    json_object_set_new(report, "cluster", hrd_doctor_cluster(report));
    json_decref(list);
    return CTL_OK;
}

int ctl_doctor(const struct ctl_options *o)
{
    struct ctl_client c;
    char addresses[8192];
    json_t *report = json_pack("{s:i, s:[]}", "format", 1, "nodes"), *doc = NULL;
    if (!resolve(o->nodes, addresses, sizeof(addresses))) {
        json_decref(report);
        return CTL_USAGE;
    }
    int rc = ctl_connect(&c, o->socket);
    if (rc != CTL_OK) {
        json_decref(report);
        report = own_report(o);
        rc = print_report(report, o->json);
        json_decref(report);
        return rc;
    }
    if (c.daemon_abi < (HRP_ABI_MAJOR << 16 | 2u)) {
        ctl_complain(
            "hreduced %s is too old to be asked; bring it to the version of hreducectl and restart it",
            c.daemon_version);
        ctl_close(&c);
        json_decref(report);
        return CTL_FAILED;
    }
    /* From here on what a question fails with is in c.error, and not printed. */
    c.keep_error = true;
    rc = ask(&c, HRP_DOCTOR_HERE, 0, false, "", &doc);
    if (rc == CTL_OK) {
        char here[128];
        json_t *status = NULL;
        if (ctl_ask(&c, HRP_MSG_STATUS, &status) != CTL_OK)
            status = NULL;
        snprintf(here, sizeof(here), "%s", ctl_str(json_object_get(status, "daemon"), "node", "here"));
        json_decref(status);
        look_as_root(json_object_get(doc, "checks"));
        add_node(report, here, doc);
        if (o->cluster || o->nodes)
            rc = look_at_cluster(&c, report, here, addresses);
    } else {
        ctl_complain("%s", c.error);
    }
    ctl_close(&c);
    if (rc == CTL_OK)
        rc = print_report(report, o->json);
    json_decref(report);
    return rc;
}
