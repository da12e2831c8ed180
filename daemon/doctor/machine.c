/* SPDX-License-Identifier: MIT */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/klog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timex.h>
#include <unistd.h>

#include "daemon/doctor/doctor.h"
#include "daemon/verbs/verbs_api.h"

/* ---- files ------------------------------------------------------------------------------------------------- */

static bool path_of(const struct hrd_machine *m, char *path, const char *fmt, va_list ap)
    __attribute__((format(printf, 3, 0)));
static bool path_of(const struct hrd_machine *m, char *path, const char *fmt, va_list ap)
{
    int n = snprintf(path, PATH_MAX, "%s", m->root);
    int k = vsnprintf(path + n, PATH_MAX - (size_t)n, fmt, ap);
    errno = ENAMETOOLONG;
    return k >= 0 && n + k < PATH_MAX;
}

static long read_bytes(const char *path, void *buf, size_t len)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -1;
    size_t got = 0;
    ssize_t n = 1;
    while (got < len && (n = read(fd, (char *)buf + got, len - got)) > 0)
        got += (size_t)n;
    int err = errno;
    close(fd);
    errno = err;
    return n < 0 && got == 0 ? -1 : (long)got;
}

#define WITH_PATH(missing)               \
    char path[PATH_MAX];                 \
    va_list ap;                          \
    va_start(ap, fmt);                   \
    bool ok = path_of(m, path, fmt, ap); \
    va_end(ap);                          \
    if (!ok)                             \
    return missing

long hrd_machine_bytes(const struct hrd_machine *m, void *buf, size_t len, const char *fmt, ...)
{
    WITH_PATH(-1);
    return read_bytes(path, buf, len);
}

static bool read_text(const char *path, char *buf, size_t len)
{
    long n = read_bytes(path, buf, len - 1);
    if (n < 0)
        return false;
    while (n > 0 && (buf[n - 1] == '\n' || buf[n - 1] == ' '))
        n--;
    buf[n] = 0;
    return true;
}

bool hrd_machine_text(const struct hrd_machine *m, char *buf, size_t len, const char *fmt, ...)
{
    buf[0] = 0;
    WITH_PATH(false);
    return read_text(path, buf, len);
}

long hrd_machine_number(const struct hrd_machine *m, long missing, const char *fmt, ...)
{
    char text[64], *end;
    WITH_PATH(missing);
    if (!read_text(path, text, sizeof(text)))
        return missing;
    long n = strtol(text, &end, 10);
    return end == text ? missing : n;
}

bool hrd_machine_exists(const struct hrd_machine *m, const char *fmt, ...)
{
    WITH_PATH(false);
    return access(path, F_OK) == 0;
}

bool hrd_machine_link(const struct hrd_machine *m, char *buf, size_t len, const char *fmt, ...)
{
    buf[0] = 0;
    WITH_PATH(false);
    ssize_t n = readlink(path, buf, len - 1);
    buf[n > 0 ? n : 0] = 0;
    return n > 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

unsigned hrd_machine_list(const struct hrd_machine *m, const char *dir, char (*names)[HRD_MACHINE_NAME],
                          unsigned max)
{
    char path[PATH_MAX];
    unsigned n = 0;
    snprintf(path, sizeof(path), "%s%s", m->root, dir);
    DIR *d = opendir(path);
    if (!d)
        return 0;
    for (struct dirent *e = readdir(d); e && n < max; e = readdir(d))
        if (e->d_name[0] != '.' && strlen(e->d_name) < HRD_MACHINE_NAME)
            snprintf(names[n++], HRD_MACHINE_NAME, "%s", e->d_name);
    closedir(d);
    qsort(names, n, sizeof(names[0]), by_name);
    return n;
}

static bool in_group(const struct hrd_machine *m, gid_t gid)
{
    for (unsigned i = 0; i < m->ngids; i++)
        if (m->gids[i] == gid)
            return true;
    return false;
}

int hrd_machine_access(const struct hrd_machine *m, const char *file)
{
    char path[PATH_MAX];
    struct stat st;
    snprintf(path, sizeof(path), "%s%s", m->root, file);
    if (m->self) { /* what a control group or a security module forbids shows only here */
        int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            return errno;
        close(fd);
        return 0;
    }
    if (stat(path, &st) != 0)
        return errno;
    if (m->uid == 0)
        return 0;
    mode_t need = st.st_uid == m->uid ? 0600 : in_group(m, st.st_gid) ? 0060 : 0006;
    return (st.st_mode & need) == need ? 0 : EACCES;
}

bool hrd_machine_line(const struct hrd_machine *m, const char *path, const char *key, char *buf, size_t len)
{
    char text[8192];
    if (!hrd_machine_text(m, text, sizeof(text), "%s", path))
        return false;
    size_t n = strlen(key);
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (strncmp(line, key, n) != 0)
            continue;
        snprintf(buf, len, "%s", line + n + strspn(line + n, " \t"));
        return true;
    }
    return false;
}

/* The numbers are part of the kernel's interface: those that it boots with are always the same. */
bool hrd_machine_namespace(const struct hrd_machine *m, const char *kind, char *buf, size_t len)
{
    static const char *const first[] = {"ipc:[4026531839]", "pid:[4026531836]"};
    if (!hrd_machine_link(m, buf, len, "/proc/self/ns/%s", kind))
        return false;
    for (size_t i = 0; i < sizeof(first) / sizeof(first[0]); i++)
        if (strcmp(buf, first[i]) == 0)
            return true;
    return false;
}

bool hrd_list_has(const char *list, long n)
{
    for (char *end; *list; list = *end == ',' ? end + 1 : end) {
        long from = strtol(list, &end, 10), to = from;
        if (end == list)
            return false;
        if (*end == '-')
            to = strtol(end + 1, &end, 10);
        if (n >= from && n <= to)
            return true;
        if (*end != ',' && *end != 0)
            return false;
    }
    return false;
}

/* ---- this machine ------------------------------------------------------------------------------------------ */

/* Mbit/s of ethtool's link modes, by bit; what is not listed is slower than what is, or no speed at all. */
static const struct {
    unsigned char bit;
    unsigned mbit;
} modes[] = {{5, 1000},    {12, 10000},  {19, 10000},  {23, 40000},  {24, 40000},  {25, 40000},  {26, 40000},
             {31, 25000},  {32, 25000},  {33, 25000},  {34, 50000},  {35, 50000},  {36, 100000}, {37, 100000},
             {38, 100000}, {39, 100000}, {40, 50000},  {42, 10000},  {43, 10000},  {44, 10000},  {52, 50000},
             {53, 50000},  {54, 50000},  {55, 50000},  {56, 50000},  {57, 100000}, {58, 100000}, {59, 100000},
             {60, 100000}, {61, 100000}, {62, 200000}, {63, 200000}, {64, 200000}, {65, 200000}, {66, 200000},
             {69, 400000}, {70, 400000}, {71, 400000}, {72, 400000}, {73, 400000}, {75, 100000}, {76, 100000},
             {77, 100000}, {78, 100000}, {79, 100000}, {80, 200000}, {81, 200000}, {82, 200000}, {83, 200000},
             {84, 200000}, {85, 400000}, {86, 400000}, {87, 400000}, {88, 400000}, {89, 400000}, {93, 800000},
             {94, 800000}, {95, 800000}, {96, 800000}, {97, 800000}, {98, 800000}};

static int ask_interface(const char *name, unsigned long request, struct ifreq *ifr)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    snprintf(ifr->ifr_name, sizeof(ifr->ifr_name), "%s", name);
    int r = ioctl(fd, request, ifr);
    close(fd);
    return r;
}

#define MASK_WORDS 127 /* at most */

/* q has room for three masks behind it. */
static int link_settings(const char *name, struct ethtool_link_settings *q)
{
    struct ifreq ifr = {.ifr_data = (void *)q};
    q->cmd = ETHTOOL_GLINKSETTINGS;
    /* The first answer is how many words the masks have, as a negative number. */
    if (ask_interface(name, SIOCETHTOOL, &ifr) != 0 || q->link_mode_masks_nwords >= 0)
        return -1;
    __s8 words = (__s8)-q->link_mode_masks_nwords;
    memset(q, 0, sizeof(*q));
    q->cmd = ETHTOOL_GLINKSETTINGS;
    q->link_mode_masks_nwords = words;
    return ask_interface(name, SIOCETHTOOL, &ifr);
}

static unsigned netif_mbit(const char *name, bool most)
{
    struct ethtool_link_settings *q = calloc(1, sizeof(*q) + 3 * MASK_WORDS * sizeof(__u32));
    unsigned best = 0;
    if (!q || link_settings(name, q) != 0) {
        free(q);
        return 0;
    }
    if (!most)
        best = q->speed == (__u32)SPEED_UNKNOWN ? 0 : q->speed;
    for (size_t i = 0; most && i < sizeof(modes) / sizeof(modes[0]); i++)
        if (modes[i].bit / 32 < q->link_mode_masks_nwords &&
            q->link_mode_masks[modes[i].bit / 32] >> modes[i].bit % 32 & 1 && modes[i].mbit > best)
            best = modes[i].mbit;
    free(q);
    return best;
}

static unsigned netif_mtu(const char *name)
{
    struct ifreq ifr = {.ifr_mtu = 0};
    return ask_interface(name, SIOCGIFMTU, &ifr) == 0 && ifr.ifr_mtu > 0 ? (unsigned)ifr.ifr_mtu : 0;
}

static int clock_synchronised(void)
{
    struct timex t = {.modes = 0};
    int state = adjtimex(&t);
    if (state < 0)
        return -1;
    return state != TIME_ERROR && !(t.status & STA_UNSYNC);
}

#define READ_ALL 3 /* of syslog(2): its last bytes, and they stay there */

static long kernel_log(char *buf, size_t len)
{
    return klogctl(READ_ALL, buf, (int)len);
}

void hrd_machine_here(struct hrd_machine *m, const struct hrd_config *cfg, const struct hrd_netif *ifs,
                      unsigned nifs)
{
    static char why[256];
    *m = (struct hrd_machine){.root = "",
                              .cfg = cfg,
                              .ifs = ifs,
                              .nifs = nifs,
                              .uid = geteuid(),
                              .self = true,
                              .verbs_why = why,
                              .netif_mbit = netif_mbit,
                              .netif_mtu = netif_mtu,
                              .ask_gpus = hrd_gpu_states_ask,
                              .kernel_log = kernel_log,
                              .clock_synchronised = clock_synchronised};
    m->verbs = hrd_verbs_load(why, sizeof(why));
}
