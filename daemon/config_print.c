/* SPDX-License-Identifier: MIT */
/* The table of keys as a file with comments and as a manual page. */
#include "daemon/config.h"

#include <string.h>

#include "daemon/config_table.h"

enum { WIDTH = 96 };

/* Prints text as comment lines, broken at blanks. */
static void print_wrapped(FILE *out, const char *text)
{
    size_t column = 0;
    while (*text) {
        size_t n = strcspn(text, " ");
        if (column == 0)
            column = (size_t)fprintf(out, "# %.*s", (int)n, text);
        else if (column + 1 + n > WIDTH)
            column = (size_t)fprintf(out, "\n# %.*s", (int)n, text) - 1;
        else
            column += (size_t)fprintf(out, " %.*s", (int)n, text);
        text += n;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

static const char *reload_text(const struct hrd_key *key)
{
    return key->reload ? "Applied by a reload (SIGHUP)." : "Needs a restart.";
}

static void print_key(FILE *out, const struct hrd_key *key)
{
    char allowed[256], line[1024];
    print_wrapped(out, key->help);
    snprintf(line, sizeof(line), "Allowed: %s. %s", hrd_key_allowed(key, allowed, sizeof(allowed)),
             reload_text(key));
    print_wrapped(out, line);
    fprintf(out, "#%s =%s%s\n\n", key->name, key->def[0] ? " " : "", key->def);
}

void hrd_config_print(FILE *out)
{
    fputs("# hreduced.conf: every key, with its default. 'hreduced --print-config' prints this file,\n"
          "# 'hreduced --check-config' checks one. One 'key = value' a line; # and ; begin a comment; a list "
          "may\n"
          "# be spread over several lines with the same key.\n\n",
          out);
    for (unsigned i = 0; i < hrd_nkeys; i++) {
        if (hrd_keys[i].section)
            fprintf(out, "# ---- %s ----\n\n", hrd_keys[i].section);
        else
            print_key(out, &hrd_keys[i]);
    }
}

/* ---- troff ------------------------------------------------------------------------------------------------
 */

/* In troff a leading dot or quote is a request and a backslash an escape. */
static void print_troff(FILE *out, const char *text)
{
    if (*text == '.' || *text == '\'')
        fputs("\\&", out);
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\e", out);
        else if (*text == '-')
            fputs("\\-", out);
        else
            fputc(*text, out);
    }
    fputc('\n', out);
}

static void print_key_man(FILE *out, const struct hrd_key *key)
{
    char allowed[256], line[1024];
    fprintf(out, ".TP\n.B %s\n", key->name);
    print_troff(out, key->help);
    snprintf(line, sizeof(line), "Allowed: %s. Default: %s. %s",
             hrd_key_allowed(key, allowed, sizeof(allowed)), key->def[0] ? key->def : "empty",
             reload_text(key));
    fputs(".br\n", out);
    print_troff(out, line);
}

void hrd_config_print_man(FILE *out)
{
    fputs(".\\\" SPDX-License-Identifier: MIT\n"
          ".\\\" Written by 'hreduced --print-config=man' from daemon/config.def; change it there.\n"
          ".TH HREDUCED.CONF 5 \"\" hreduce \"hreduce manual\"\n"
          ".SH NAME\n"
          "hreduced.conf \\- configuration of the hreduce daemon\n"
          ".SH SYNOPSIS\n"
          "/etc/hreduced/hreduced.conf\n"
          ".SH DESCRIPTION\n"
          "One\n.I key = value\na line; # and ; begin a comment; there are no sections.\n"
          "A list is separated by commas and may be spread over several lines with the same key.\n"
          "A key that does not exist, a value that is not allowed and a key given twice are errors that name "
          "the\n"
          "line, and the daemon does not start.\n"
          "Without the file every key has its default.\n"
          ".PP\n"
          ".B hreduced \\-\\-print\\-config\nprints the complete file with comments,\n"
          ".B hreduced \\-\\-check\\-config\nchecks one,\n"
          ".B systemctl reload hreduced\nreads it again.\n",
          out);
    for (unsigned i = 0; i < hrd_nkeys; i++) {
        if (hrd_keys[i].section)
            fprintf(out, ".SH \"%s\"\n", hrd_keys[i].section);
        else
            print_key_man(out, &hrd_keys[i]);
    }
    fputs(".SH SEE ALSO\n.BR hreduced (8),\n.BR hreducectl (1)\n", out);
}
