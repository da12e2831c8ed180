/* SPDX-License-Identifier: MIT */
#include "client/perf/options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/hclient.h"
#include "client/perf/cluster.h"
#include "proto/types.h"

static const char help[] =
    "usage: hreduce-perf [options]\n"
    "\n"
    "Measures and checks collectives of hreduce; the table and the short options are those of nccl-tests.\n"
    "Started under torchrun, mpirun or srun it uses the hreduced daemon that runs on each node; with --local "
    "it\n"
    "starts daemons and ranks on this machine by itself and removes them again.\n"
    "\n"
    "What is measured\n"
    "      --op NAME           all_reduce (default), broadcast, reduce_scatter, all_gather or barrier\n"
    "  -b, --minbytes SIZE     smallest size, of the whole data (default 4M); 64K, 4M, 1G are multiples of "
    "1024\n"
    "  -e, --maxbytes SIZE     largest size (default: the smallest)\n"
    "  -i, --stepbytes SIZE    from one size to the next by adding this\n"
    "  -f, --stepfactor N      ... or by multiplying (default 2)\n"
    "  -d, --datatype TYPE     float (default), double, half, bfloat16, int8, uint8, int32, uint32, int64,\n"
    "                          uint64 or all; f32, f64, f16, bf16, i8, ... mean the same\n"
    "  -o, --redop OP          sum (default), prod, min, max, avg or all\n"
    "  -r, --root RANK         root of a broadcast (default 0)\n"
    "  -n, --iters N           measured operations of each size (default 20)\n"
    "  -w, --warmup_iters N    operations before them (default 5); the wire bytes are taken from these\n"
    "  -c, --check N           rounds of checks of every element, fresh inputs each (default 1; 0: none)\n"
    "  -z, --blocking 0|1      1 (default): a barrier before each operation; the time is the median of what "
    "the\n"
    "                          slowest rank took. 0: up to 4 operations in flight on buffers of their own; "
    "the\n"
    "                          time is the total divided by their number\n"
    "      --memory KIND       hclient (default): hclient_mem_alloc() memory, no copies; plain: malloc()ed\n"
    "      --gpu               buffers in GPU memory, rank r on GPU r modulo their number (with --local) or "
    "on\n"
    "                          that of its local rank\n"
    "      --overlap HINT      auto (default), compute (copy engines) or idle (kernels)\n"
    "      --algo NAME         auto (default), direct, gather, pairwise, ring or tree\n"
    "      --reproducible 0|1  the order of additions is defined and checked bit for bit (default: the "
    "daemon's)\n"
    "      --wire type|f32     what 16-bit floats travel as between nodes (default: the daemon's)\n"
    "  -T, --timeout SECONDS   longest time without progress (default 120)\n"
    "      --json FILE         also write the results there\n"
    "      --name NAME         meeting name under a launcher (default hreduce-perf)\n"
    "\n"
    "On this machine alone\n"
    "      --local NxR         N daemons (nodes) with R ranks each, on 127.0.0.1 to 127.0.0.N\n"
    "      --map KIND          block (default): ranks 0 to R-1 on the first node; roundrobin: dealt one by "
    "one\n"
    "      --daemon-config K=V a line for the configuration of these daemons; may be repeated\n"
    "      --keep-logs DIR     keep the daemons' logs there\n"
    "\n"
    "  -h, --help\n"
    "\n"
    "Exit status: 0 when everything was right, 1 when a value was wrong or something failed, 2 for a wrong\n"
    "command line. See hreduce-perf(1) for the columns.\n";

static enum hpf_parse bad(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static enum hpf_parse bad(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fputs("hreduce-perf: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputs("; --help lists the options\n", stderr);
    va_end(ap);
    return HPF_USAGE;
}

bool hpf_parse_size(const char *text, uint64_t *bytes)
{
    if (!isdigit((unsigned char)text[0]))
        return false;
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    static const char units[] = "KMGT";
    unsigned shift = 0;
    if (*end) {
        const char *u = strchr(units, toupper((unsigned char)*end));
        if (!u)
            return false;
        shift = 10 * (unsigned)(u - units + 1);
        end++;
        if (*end == 'i')
            end++;
        if (*end == 'B')
            end++;
    }
    if (errno || *end || v > UINT64_MAX >> shift)
        return false;
    *bytes = (uint64_t)v << shift;
    return true;
}

const char *hpf_size_text(uint64_t bytes, char *buf, size_t len)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    unsigned u = 0;
    while (u < 4 && bytes >= 1024 && bytes % 1024 == 0) {
        bytes /= 1024;
        u++;
    }
    snprintf(buf, len, "%" PRIu64 " %s", bytes, units[u]);
    return buf;
}

static bool parse_uint(const char *text, unsigned max, unsigned *out)
{
    uint64_t v;
    if (!hpf_parse_size(text, &v) || v > max)
        return false;
    *out = (unsigned)v;
    return true;
}

/* ---- names ----------------------------------------------------------------------------------------------- */

static const char *const type_names[HRP_NDTYPES] = {"float", "double", "half",   "bfloat16", "int8",
                                                    "uint8", "int32",  "uint32", "int64",    "uint64"};

const char *hpf_type_name(unsigned dtype)
{
    return dtype < HRP_NDTYPES ? type_names[dtype] : "unknown";
}

static bool parse_type(const char *text, unsigned *out)
{
    if (strcmp(text, "all") == 0) {
        *out = HPF_ALL;
        return true;
    }
    for (unsigned d = 0; d < HRP_NDTYPES; d++) {
        if (strcmp(text, type_names[d]) == 0 || strcmp(text, hrp_dtype_name(d)) == 0) {
            *out = d;
            return true;
        }
    }
    return false;
}

static bool parse_name(const char *text, const char *(*name)(unsigned), unsigned n, unsigned *out)
{
    for (unsigned i = 0; i < n; i++) {
        if (strcmp(text, name(i)) == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

static bool parse_redop(const char *text, unsigned *out)
{
    if (strcmp(text, "all") == 0) {
        *out = HPF_ALL;
        return true;
    }
    return parse_name(text, hrp_redop_name, HRP_NREDOPS, out);
}

static const char *algo_name(unsigned algo)
{
    static const char *const names[] = {"auto", "direct", "gather", "pairwise", "ring", "tree"};
    return names[algo];
}

static const char *overlap_name(unsigned overlap)
{
    static const char *const names[] = {"auto", "compute", "idle"};
    return names[overlap];
}

/* ---- the options ----------------------------------------------------------------------------------------- */

enum {
    OPT_OP = 1000,
    OPT_MEMORY,
    OPT_GPU,
    OPT_OVERLAP,
    OPT_ALGO,
    OPT_REPRODUCIBLE,
    OPT_WIRE,
    OPT_JSON,
    OPT_NAME,
    OPT_LOCAL,
    OPT_MAP,
    OPT_CONFIG,
    OPT_LOGS,
};

static const struct option options[] = {
    {"op", required_argument, NULL, OPT_OP},
    {"minbytes", required_argument, NULL, 'b'},
    {"maxbytes", required_argument, NULL, 'e'},
    {"stepbytes", required_argument, NULL, 'i'},
    {"stepfactor", required_argument, NULL, 'f'},
    {"datatype", required_argument, NULL, 'd'},
    {"redop", required_argument, NULL, 'o'},
    {"root", required_argument, NULL, 'r'},
    {"iters", required_argument, NULL, 'n'},
    {"warmup_iters", required_argument, NULL, 'w'},
    {"check", required_argument, NULL, 'c'},
    {"blocking", required_argument, NULL, 'z'},
    {"memory", required_argument, NULL, OPT_MEMORY},
    {"gpu", no_argument, NULL, OPT_GPU},
    {"overlap", required_argument, NULL, OPT_OVERLAP},
    {"algo", required_argument, NULL, OPT_ALGO},
    {"reproducible", required_argument, NULL, OPT_REPRODUCIBLE},
    {"wire", required_argument, NULL, OPT_WIRE},
    {"timeout", required_argument, NULL, 'T'},
    {"json", required_argument, NULL, OPT_JSON},
    {"name", required_argument, NULL, OPT_NAME},
    {"local", required_argument, NULL, OPT_LOCAL},
    {"map", required_argument, NULL, OPT_MAP},
    {"daemon-config", required_argument, NULL, OPT_CONFIG},
    {"keep-logs", required_argument, NULL, OPT_LOGS},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static bool parse_local(const char *text, struct hpf_options *o)
{
    char *x = strchr(text, 'x');
    char nodes[16];
    if (!x || (size_t)(x - text) >= sizeof(nodes))
        return false;
    snprintf(nodes, sizeof(nodes), "%.*s", (int)(x - text), text);
    return parse_uint(nodes, HPF_MAX_NODES, &o->local_nodes) && parse_uint(x + 1, 256, &o->local_ranks) &&
           o->local_nodes > 0 && o->local_ranks > 0;
}

static bool parse_config(const char *text, struct hpf_options *o)
{
    if (!strchr(text, '=') || text[0] == '=' || strchr(text, '\n') || o->nkeys == HPF_MAX_KEYS)
        return false;
    o->keys[o->nkeys++] = text;
    return true;
}

static bool parse_tristate(const char *text, int *out)
{
    if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0)
        return false;
    *out = text[0] == '1' ? HCLIENT_ON : HCLIENT_OFF;
    return true;
}

/* One of two words; *second says which. */
static bool parse_choice(const char *text, const char *a, const char *b, bool *second)
{
    *second = strcmp(text, b) == 0;
    return *second || strcmp(text, a) == 0;
}

static bool parse_collective(const char *text, struct hpf_options *o)
{
    /* nccl-tests' long name of -o is --op; no collective is called like a reduction. */
    return parse_name(text, hrp_coll_name, HRP_NCOLLS, &o->coll) || parse_redop(text, &o->redop);
}

static bool parse_wire(const char *text, struct hpf_options *o)
{
    bool f32;
    if (!parse_choice(text, "type", "f32", &f32))
        return false;
    o->wire_f32 = f32 ? HCLIENT_ON : HCLIENT_OFF;
    return true;
}

/* What belongs to the sizes and counts; false: not a valid value. */
static bool parse_amount(struct hpf_options *o, int opt, const char *arg)
{
    switch (opt) {
    case 'b':
        return hpf_parse_size(arg, &o->min_bytes);
    case 'e':
        return hpf_parse_size(arg, &o->max_bytes);
    case 'i':
        return hpf_parse_size(arg, &o->step_bytes);
    case 'f':
        return parse_uint(arg, 1u << 30, &o->factor);
    case 'n':
        return parse_uint(arg, 1000000, &o->iters) && o->iters > 0;
    case 'w':
        return parse_uint(arg, 1000000, &o->warmup);
    case 'c':
        return parse_uint(arg, 1000000, &o->check);
    case 'r':
        return parse_uint(arg, 1u << 20, &o->root);
    default:
        return parse_uint(arg, 86400, &o->timeout_s) && o->timeout_s > 0;
    }
}

static bool parse_one(struct hpf_options *o, int opt, char *arg)
{
    bool second = false;
    switch (opt) {
    case 'd':
        return parse_type(arg, &o->dtype);
    case 'o':
        return parse_redop(arg, &o->redop);
    case 'z':
        return parse_choice(arg, "0", "1", &o->blocking);
    case OPT_OP:
        return parse_collective(arg, o);
    case OPT_MEMORY:
        return parse_choice(arg, "hclient", "plain", &o->plain);
    case OPT_GPU:
        o->gpu = true;
        return true;
    case OPT_OVERLAP:
        return parse_name(arg, overlap_name, HCLIENT_OVERLAP_IDLE + 1, &o->overlap);
    case OPT_ALGO:
        return parse_name(arg, algo_name, HCLIENT_ALGO_TREE + 1, &o->algo);
    case OPT_REPRODUCIBLE:
        return parse_tristate(arg, &o->reproducible);
    case OPT_WIRE:
        return parse_wire(arg, o);
    case OPT_LOCAL:
        return parse_local(arg, o);
    case OPT_MAP:
        if (!parse_choice(arg, "block", "roundrobin", &second))
            return false;
        o->round_robin = second;
        return true;
    case OPT_CONFIG:
        return parse_config(arg, o);
    case OPT_JSON:
        o->json = arg;
        return true;
    case OPT_NAME:
        o->name = arg;
        return true;
    case OPT_LOGS:
        o->keep_logs = arg;
        return true;
    default:
        return parse_amount(o, opt, arg);
    }
}

static const char *option_name(int opt, char *buf, size_t len)
{
    for (const struct option *p = options; p->name; p++) {
        if (p->val == opt) {
            snprintf(buf, len, "--%s", p->name);
            return buf;
        }
    }
    return "option";
}

/* What the help says about the values of an option: its first line there, without the name. */
static const char *option_help(const char *name, char *buf, size_t len)
{
    const char *at = help;
    size_t n = strlen(name);
    buf[0] = 0;
    while ((at = strstr(at, name)) != NULL && at[n] != ' ')
        at += n;
    if (at == NULL)
        return buf;
    at += n;
    at += strspn(at, " ");
    at += strcspn(at, " "); /* the value's name */
    at += strspn(at, " ");
    snprintf(buf, len, "%.*s", (int)strcspn(at, "\n"), at);
    return buf;
}

static enum hpf_parse check_together(struct hpf_options *o)
{
    if (o->coll == HRP_BARRIER)
        o->min_bytes = o->max_bytes = 0;
    if (o->max_bytes == UINT64_MAX)
        o->max_bytes = o->min_bytes;
    if (o->max_bytes < o->min_bytes)
        return bad("the largest size (-e %" PRIu64 ") is below the smallest (-b %" PRIu64 ")", o->max_bytes,
                   o->min_bytes);
    if (o->factor < 2 && o->step_bytes == 0 && o->max_bytes > o->min_bytes)
        return bad("-f %u would repeat the same size for ever: use 2 or more, or -i", o->factor);
    if (o->min_bytes == 0 && o->step_bytes == 0 && o->max_bytes > 0)
        return bad("from size 0 no factor leads to another: start at -b 4 or more, or step with -i");
    if (o->coll != HRP_ALL_REDUCE && o->coll != HRP_REDUCE_SCATTER && o->redop == HPF_ALL)
        o->redop = HRP_SUM;
    if (!o->local_nodes && (o->round_robin || o->nkeys || o->keep_logs))
        return bad("--map, --daemon-config and --keep-logs belong to --local");
    if (o->local_nodes && o->root >= o->local_nodes * o->local_ranks)
        return bad("root %u is no rank of %u", o->root, o->local_nodes * o->local_ranks);
    if (o->algo >= HCLIENT_ALGO_PAIRWISE && o->reproducible != HCLIENT_OFF)
        return bad("--algo %s adds in another order: it needs --reproducible 0", algo_name(o->algo));
    return HPF_RUN;
}

enum hpf_parse hpf_options_parse(struct hpf_options *o, int argc, char **argv)
{
    *o = (struct hpf_options){
        .min_bytes = 4 << 20,
        .max_bytes = UINT64_MAX,
        .factor = 2,
        .iters = 20,
        .warmup = 5,
        .check = 1,
        .blocking = true,
        .timeout_s = 120,
        .name = "hreduce-perf",
    };
    int opt;
    char name[32], allowed[128];
    opterr = 0;
    optind = 1;
    while ((opt = getopt_long(argc, argv, ":b:e:i:f:d:o:r:n:w:c:z:T:h", options, NULL)) != -1) {
        if (opt == 'h') {
            fputs(help, stdout);
            return HPF_EXIT_OK;
        }
        if (opt == '?')
            return bad("%s is no option of hreduce-perf", argv[optind - 1]);
        if (opt == ':')
            return bad("%s needs a value", argv[optind - 1]);
        if (!parse_one(o, opt, optarg)) {
            option_name(opt, name, sizeof(name));
            return bad("%s cannot be '%s'; it is: %s", name, optarg,
                       option_help(name, allowed, sizeof(allowed)));
        }
    }
    if (optind < argc)
        return bad("'%s' is no option", argv[optind]);
    return check_together(o);
}
