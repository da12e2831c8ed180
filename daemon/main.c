/* SPDX-License-Identifier: MIT */
/* hreduced: command line and configuration; the rest is service.c. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "daemon/config.h"
#include "daemon/log.h"
#include "daemon/service.h"
#include "daemon/version.h"
#include "kernels/kernels.h"

/* sysexits(3): a restart will not help, and the unit says so to systemd. */
enum { EXIT_USAGE = 64, EXIT_CONFIG = 78 };

static const char usage_text[] =
    "usage: hreduced [--config FILE]\n"
    "       hreduced --check-config [--config FILE]\n"
    "       hreduced --print-config[=man]\n"
    "       hreduced --version | --help\n"
    "\n"
    "  -c, --config FILE   configuration (" HRD_DEFAULT_CONFIG "; without it every key has its default)\n"
    "      --check-config  check the configuration and exit: 0, or 78 with each mistake named\n"
    "      --print-config  print every key with its default and meaning; =man: as a manual page\n"
    "\n"
    "SIGTERM and SIGINT stop the daemon, SIGHUP makes it read the configuration again.\n"
    "See hreduced(8), hreduced.conf(5) and hreducectl(1).\n";

struct options {
    const char *config;
    bool config_named;
    bool check;
};

static void print_problem(void *ctx, const char *sentence)
{
    (void)ctx;
    fprintf(stderr, "%s\n", sentence);
}

static void log_problem(void *ctx, const char *sentence)
{
    (void)ctx;
    hrd_error("%s", sentence);
}

static int print_config(const char *how)
{
    if (!how)
        hrd_config_print(stdout);
    else if (strcmp(how, "man") == 0)
        hrd_config_print_man(stdout);
    else {
        fprintf(stderr,
                "hreduced: --print-config=%s is unknown; there is --print-config and --print-config=man\n",
                how);
        return EXIT_USAGE;
    }
    return fflush(stdout) == 0 ? 0 : 1;
}

/* The exit status, or -1: go on with the options. */
static int parse_options(int argc, char **argv, struct options *o)
{
    enum { PRINT = 256, CHECK, VERSION };
    static const struct option longs[] = {
        {"config", required_argument, NULL, 'c'},   {"print-config", optional_argument, NULL, PRINT},
        {"check-config", no_argument, NULL, CHECK}, {"version", no_argument, NULL, VERSION},
        {"help", no_argument, NULL, 'h'},           {NULL, 0, NULL, 0}};
    int opt;
    while ((opt = getopt_long(argc, argv, "c:h", longs, NULL)) != -1) {
        switch (opt) {
        case 'c':
            o->config = optarg;
            o->config_named = true;
            break;
        case PRINT:
            return print_config(optarg);
        case CHECK:
            o->check = true;
            break;
        case VERSION:
            printf("hreduced %s\n", HRD_VERSION);
            return 0;
        case 'h':
            fputs(usage_text, stdout);
            return 0;
        default:
            fputs(usage_text, stderr);
            return EXIT_USAGE;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "hreduced: what is '%s'?\n%s", argv[optind], usage_text);
        return EXIT_USAGE;
    }
    return -1;
}

/* 0, or the exit status. A default file that is not there is no mistake, a named one is. */
static int load_config(const struct options *o, struct hrd_config *cfg, hrd_config_report *report)
{
    char sentence[512];
    int rc = hrd_config_load(cfg, o->config, report, NULL);
    if (rc == -ENOENT && o->config_named) {
        snprintf(sentence, sizeof(sentence), "there is no configuration file %s", o->config);
        report(NULL, sentence);
        return EXIT_CONFIG;
    }
    return rc > 0 ? EXIT_CONFIG : 0;
}

/* 0, or the exit status. */
static int choose_simd(const struct hrd_config *cfg)
{
    char asked[16];
    if (cfg->simd == 0 || hrk_set_level((enum hrk_level)(cfg->simd - 1)) == 0)
        return 0;
    hrd_error("simd = %s: this processor, or its kernel, goes no further than %s; set simd = auto",
              hrd_config_get(cfg, "simd", asked, sizeof(asked)), hrk_level_name(hrk_get_level()));
    return EXIT_CONFIG;
}

int main(int argc, char **argv)
{
    struct options o = {.config = HRD_DEFAULT_CONFIG};
    struct hrd_config cfg;
    int rc = parse_options(argc, argv, &o);
    if (rc >= 0)
        return rc;
    hrd_log_init();
    rc = load_config(&o, &cfg, o.check ? print_problem : log_problem);
    if (o.check) {
        if (rc == 0)
            printf("%s: no mistakes\n", o.config);
        return rc;
    }
    if (rc != 0) {
        hrd_error("the daemon does not start with these mistakes in its configuration");
        return rc;
    }
    hrd_log_set_level(cfg.log_level);
    rc = choose_simd(&cfg);
    if (rc != 0)
        return rc;
    return hrd_service_run(&cfg, o.config, o.config_named);
}
