/* SPDX-License-Identifier: MIT */
/* What a client may ask for. Messages are well-formed here (hrp_msg_decode); ranges that depend on the session
 * are checked where they are used. */
#include "daemon/session_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/member.h"
#include "daemon/text.h"

/* ---- HELLO ------------------------------------------------------------------------------------------------ */

/* The process that a pidfd is for, in the daemon's numbers: 0 when it is no pidfd, or of a process outside the
 * daemon's pid namespace; -1 when the process is gone. */
static long pid_of_pidfd(int fd)
{
    char path[64], text[512];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, text, sizeof(text) - 1);
    if (n < 0)
        return 0;
    text[n] = '\0';
    /* anon_inode:[pidfd], and pidfd:[N] from Linux 6.9 on. No client can make a file of such a name. */
    if (strcmp(text, "anon_inode:[pidfd]") != 0 && strncmp(text, "pidfd:[", 7) != 0)
        return 0;
    snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
    int info = open(path, O_RDONLY | O_CLOEXEC);
    if (info < 0)
        return 0;
    n = read(info, text, sizeof(text) - 1);
    close(info);
    if (n <= 0)
        return 0;
    text[n] = '\0';
    const char *at = strstr(text, "Pid:");
    return at ? strtol(at + 4, NULL, 10) : 0;
}

static void read_command(struct hrd_session_priv *p)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/comm", (int)p->pub.pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t n = read(fd, p->command, sizeof(p->command) - 1);
    close(fd);
    if (n <= 0)
        return;
    p->command[n] = '\0';
    p->command[strcspn(p->command, "\n")] = '\0';
    hrd_text_printable(p->command);
}

/* Takes the pidfd into the session; false: refused. */
static bool take_pidfd(struct hrd_session_priv *p, uint64_t cookie, int fd)
{
    long pid = pid_of_pidfd(fd);
    if (pid == 0 || p->pub.pid == 0) {
        close(fd);
        if (p->pub.pid == 0)
            hrd_client_refuse(
                p, cookie, HRP_REFUSED,
                "the daemon cannot see this process, because it is in another pid namespace; run "
                "hreduced in the initial one, or the job in the daemon's");
        else
            hrd_client_fault(p, "process %d sent something else than a pidfd in its HELLO", (int)p->pub.pid);
        return false;
    }
    if (pid < 0) {
        close(fd);
        hrd_session_kill(&p->pub, "its process died before it was served");
        return false;
    }
    if (pid != p->pub.pid) {
        close(fd);
        hrd_client_fault(p, "process %d sent the pidfd of process %ld in its HELLO", (int)p->pub.pid, pid);
        return false;
    }
    int rc = hrd_session_watch_pid(p, fd);
    if (rc != 0) {
        if (!p->pid_polled)
            close(fd);
        hrd_client_refuse(p, cookie, HRP_SYSTEM, "the daemon cannot watch this process: %s", uv_strerror(rc));
        return false;
    }
    return true;
}

static void on_hello(struct hrd_session_priv *p, uint64_t cookie, const struct hrp_msg_hello *m, int fd)
{
    struct hrd_daemon *d = p->d;
    if (p->hello_taken) {
        close(fd);
        hrd_client_fault(p, "process %d said HELLO twice", (int)p->pub.pid);
        return;
    }
    p->hello_taken = true;
    if (m->abi >> 16 != HRP_ABI_MAJOR) {
        close(fd);
        hrd_client_refuse(
            p, cookie, HRP_VERSION,
            "libhclient speaks version %u of the session protocol and hreduced version %u; install "
            "the libhclient that came with this hreduced and start the job again",
            m->abi >> 16, HRP_ABI_MAJOR);
        return;
    }
    read_command(p);
    p->ctl = (m->flags & HRP_HELLO_CTL) != 0;
    if (!take_pidfd(p, cookie, fd))
        return;
    if (p->ctl) {
        hrd_session_welcome(p, cookie, -1);
    } else if (d->stopping) {
        hrd_client_refuse(p, cookie, HRP_SHUTDOWN, "the daemon on %s is stopping; try again", d->node_name);
    } else if (d->sessions->counted >= d->cfg.max_sessions) {
        hrd_client_refuse(p, cookie, HRP_RESOURCE,
                          "the daemon serves %u processes already; raise max_sessions (%u) in hreduced.conf",
                          d->sessions->counted, d->cfg.max_sessions);
    } else {
        hrd_session_make_segment(p, cookie);
    }
}

/* ---- GET_ID ----------------------------------------------------------------------------------------------- */

static void on_get_id(struct hrd_session_priv *p, uint64_t cookie)
{
    struct hrp_msg msg = {.type = HRP_MSG_ID, .cookie = cookie};
    struct hrp_unique_id *id = &msg.body.id.id;
    unsigned n = hrd_peers_own_addrs(p->d, id->addr, HRP_MAX_ADDRS);
    if (n == 0) {
        hrd_session_error(
            &p->pub, cookie, HRP_SYSTEM, HRP_SCOPE_NONE,
            "node %s has no address to give to other nodes; set listen, interface or advertise in "
            "hreduced.conf",
            p->d->node_name);
        return;
    }
    id->magic = HRP_ID_MAGIC;
    id->version = HRP_ID_VERSION;
    id->naddrs = (uint16_t)n;
    if (getrandom(id->nonce, sizeof(id->nonce), GRND_NONBLOCK) != (ssize_t)sizeof(id->nonce)) {
        hrd_session_error(&p->pub, cookie, HRP_SYSTEM, HRP_SCOPE_NONE,
                          "the kernel has no random numbers yet: %s; try again", strerror(errno));
        return;
    }
    hrd_member_stamp_id(p->d, id);
    hrd_session_send(&p->pub, &msg, NULL, 0);
}

/* ---- everything ------------------------------------------------------------------------------------------- */

static void on_join(struct hrd_session_priv *p, const struct hrp_msg *msg)
{
    struct hrp_msg_join join = msg->body.join;
    if (p->d->stopping) {
        hrd_session_error(&p->pub, msg->cookie, HRP_SHUTDOWN, HRP_SCOPE_COMM, "the daemon on %s is stopping",
                          p->d->node_name);
        return;
    }
    join.key.uid = p->pub.uid;
    hrd_member_join(p->d, &p->pub, msg->cookie, &join);
}

static bool slot_in_use(struct hrd_session_priv *p, const struct hrp_msg *msg)
{
    uint32_t slot = msg->body.slot.slot;
    if (slot < p->nslots && p->slots[slot].taken)
        return true;
    hrd_session_error(&p->pub, msg->cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE,
                      "%s names communicator slot %u, which this process does not use",
                      hrp_msg_name(msg->type), slot);
    return false;
}

/* Requests of hreducectl, which has no segment; false: it is none. */
static bool on_ctl_request(struct hrd_session_priv *p, const struct hrp_msg *msg)
{
    switch (msg->type) {
    case HRP_MSG_STATUS:
        hrd_status_reply(p->d, &p->pub, msg->cookie);
        return true;
    case HRP_MSG_PATH:
        if (p->ctl || slot_in_use(p, msg))
            hrd_path_reply(p->d, &p->pub, msg->cookie, msg->body.slot.slot);
        return true;
    case HRP_MSG_DOCTOR:
        if (!p->ctl)
            return false;
        hrd_doctor_request(p->d, &p->pub, msg->cookie, &msg->body.doctor, msg->text ? msg->text : "",
                           msg->text_len);
        return true;
    case HRP_MSG_GET_ID:
        on_get_id(p, msg->cookie);
        return true;
    default:
        return false;
    }
}

static bool on_job_request(struct hrd_session_priv *p, const struct hrp_msg *msg, int fd)
{
    const union hrp_msg_body *b = &msg->body;
    switch (msg->type) {
    case HRP_MSG_JOIN:
        on_join(p, msg);
        return true;
    case HRP_MSG_JOINING:
        hrd_member_joining(p->d, &p->pub, msg->cookie, &msg->body.join);
        return true;
    case HRP_MSG_LEAVE:
        if (slot_in_use(p, msg))
            hrd_member_leave(p->d, &p->pub, msg->cookie, b->slot.slot);
        return true;
    case HRP_MSG_ABORT:
        if (slot_in_use(p, msg))
            hrd_member_abort(p->d, &p->pub, msg->cookie, b->slot.slot, msg->text ? msg->text : "",
                             msg->text_len);
        return true;
    case HRP_MSG_WINDOW:
        if (slot_in_use(p, msg))
            hrd_session_window(p, msg->cookie, b->slot.slot);
        return true;
    case HRP_MSG_ALLOC:
        hrd_session_alloc(p, msg->cookie, b->alloc.bytes);
        return true;
    case HRP_MSG_IMPORT:
        hrd_session_import(p, msg->cookie, &b->import, fd);
        return true;
    case HRP_MSG_IMPORT_GPU:
        hrd_session_import_gpu(p, msg->cookie, &b->import_gpu);
        return true;
    case HRP_MSG_GPU_PART:
        hrd_session_gpu_part(p, msg->cookie, &b->gpu_part, fd);
        return true;
    case HRP_MSG_FREE:
        hrd_session_free_buffer(p, msg->cookie, b->buffer.id);
        return true;
    default:
        return false;
    }
}

void hrd_session_request(struct hrd_session_priv *p, const struct hrp_msg *msg, int fd)
{
    if (msg->type == HRP_MSG_HELLO) {
        on_hello(p, msg->cookie, &msg->body.hello, fd);
        return;
    }
    if (p->state != HRD_S_OPEN) {
        if (fd >= 0)
            close(fd);
        hrd_client_fault(p, "process %d sent %s before its HELLO was answered", (int)p->pub.pid,
                         hrp_msg_name(msg->type));
        return;
    }
    if (on_ctl_request(p, msg) || (!p->ctl && on_job_request(p, msg, fd)))
        return;
    if (fd >= 0)
        close(fd);
    hrd_client_fault(p, "process %d sent %s, which is not a %s's to send", (int)p->pub.pid,
                     hrp_msg_name(msg->type), p->ctl ? "control client" : "client");
}
