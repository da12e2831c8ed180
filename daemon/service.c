/* SPDX-License-Identifier: MIT */
#include "daemon/service.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "daemon/control.h"
#include "daemon/gpu/gpu.h"
#include "daemon/listener.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/session.h"
#include "daemon/status.h"
#include "daemon/transport_tcp.h"
#include "daemon/version.h"

#define TICK_MS 1000
/* Units in flight that keep I/O threads busy: each takes longer, by hand-overs, than it would on one thread. Between two nodes
   4 threads move 64 MiB in 9.1 ms with 8 units in flight and in 14.5 ms with 4. */
#define IO_DEPTH 8u
/* The agent turns at least once a second; older than this it is stuck. */
#define AGENT_STALE_MS 5000
#define STOP_TICK_MS 20
/* For the patterns that a pair of GPUs must carry; they take milliseconds. */
#define PAIR_MS 2000
/* The slowest direct path worth having, a tenth of what PCIe 3.0 x4 does: what is redirected by ACS or an IOMMU is below. */
#define PAIR_BYTES_PER_S 300000000
/* Stopping: for the failures of communicators to reach the agent's other end; for clients to read them; for the
 * agent to let go of everything. */
#define STOP_FAIL_MS 1000
#define STOP_GRACE_MS 200
#define STOP_RELEASE_MS 3000

enum stop_phase { RUNNING, FAILING_COMMS, GRACE, ENDING_SESSIONS, STOPPED };

struct service {
    struct hrd_daemon d;
    uv_loop_t loop;
    struct hrd_listener *listener;
    const char *config_path;
    bool must_exist;
    uv_signal_t sigterm, sigint, sighup;
    uv_poll_t agent_poll, gpus_poll;
    uv_timer_t tick, watchdog, stop_timer;
    uint64_t watchdog_ms;
    unsigned shown_sessions; /* of the last STATUS= */
    struct hrd_log_limit stale_log;
    enum stop_phase phase;
    uint64_t phase_since_ms;
    unsigned comms_to_fail;
    int exit_status;
};

/* ---- before the loop -------------------------------------------------------------------------------------- */

static void raise_descriptor_limit(void)
{
    struct rlimit lim;
    if (getrlimit(RLIMIT_NOFILE, &lim) != 0 || lim.rlim_cur == lim.rlim_max)
        return;
    rlim_t was = lim.rlim_cur;
    lim.rlim_cur = lim.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &lim) == 0)
        hrd_debug("descriptor limit raised from %llu to %llu", (unsigned long long)was,
                  (unsigned long long)lim.rlim_cur);
}

/* Imports of a daemon with gpu = off are refused in words, so it has them too. */
static int start_gpus(struct service *s, char *err, size_t errlen)
{
    struct hrd_gpus_config gc = {.off = !s->d.cfg.gpu,
                                 .idle_ms = s->d.cfg.gpu_idle_ms,
                                 .pair_ms = PAIR_MS,
                                 .pair_bytes_per_s = PAIR_BYTES_PER_S,
                                 .node_name = s->d.node_name,
                                 .gdr = s->d.cfg.gdr,
                                 .gdr_bytes = s->d.cfg.gdr_bytes};
    s->d.gpus = hrd_gpus_new(&gc);
    if (s->d.gpus)
        return 0;
    int rc = -errno;
    snprintf(err, errlen, "GPUs cannot be served: %s", strerror(-rc));
    return rc;
}

/* transport = verbs takes no tcp link, not for a job that asks for one either. */
static unsigned io_threads(const struct hrd_config *c)
{
    return c->transport == 2 ? 0 : c->io_threads;
}

static int start_agent(struct service *s, char *err, size_t errlen)
{
    const struct hrd_config *c = &s->d.cfg;
    struct hrd_agent_config ac = {
        .arena_bytes = c->arena_bytes,
        .threads = c->threads,
        .spin_us = c->spin_us,
        .spin_always = io_threads(c) > 0, /* which wait for the agent between any two frames */
        .depth = io_threads(c) > 0 ? IO_DEPTH : 0,
        .unit_bytes = c->unit_bytes,
        .unit_min_bytes = hrd_config_unit_min(c),
        .chunk_bytes = c->chunk_bytes,
        .eager_limit = (uint32_t)c->eager_limit,
        .stall_warning_ms = c->stall_warning_ms,
        .node_name = s->d.node_name,
        .gpus = s->d.gpus,
        .dma_bytes = c->dma_bytes,
    };
    /* Signals are the loop's; the agent's threads inherit a mask that keeps them from being interrupted. SIGBUS
     * and its like are raised by the thread itself and stay open: see guard.h. */
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGABRT);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    int rc = hrd_agent_new(&s->d.agent, &ac, err, errlen);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

static int start_tcp_io(struct service *s, char *err, size_t errlen)
{
    const struct hrd_config *c = &s->d.cfg;
    if (io_threads(c) == 0)
        return 0;
    s->d.tcp_io = hrd_tcp_io_new(io_threads(c), c->spin_us);
    if (s->d.tcp_io)
        return 0;
    int rc = -errno;
    snprintf(err, errlen,
             "cannot start %u I/O threads: %s; lower io_threads, or raise the process or descriptor limit",
             io_threads(c), strerror(-rc));
    return rc;
}

/* peer.c says where other daemons reach this one, and that they are not authenticated. */
static void announce(const struct service *s)
{
    const struct hrd_config *c = &s->d.cfg;
    hrd_log_event(HRD_LOG_NOTICE, HRD_MSGID_STARTED, 0,
                  "version " HRD_VERSION " serves %s%s with %u thread%s and an arena of %" PRIu64 " MiB",
                  hrd_listener_path(s->listener),
                  hrd_listener_activated(s->listener) ? " (from systemd)" : "", c->threads,
                  c->threads == 1 ? "" : "s", c->arena_bytes >> 20);
}

/* ---- agent ------------------------------------------------------------------------------------------------ */

static void dispatch(struct service *s, struct hrd_event *ev)
{
    struct hrd_daemon *d = &s->d;
    switch (ev->type) {
    case HRD_EV_SESSION_GONE:
    case HRD_EV_SESSION_FAULT:
    case HRD_EV_BUFFER_GONE:
        hrd_session_event(d, ev);
        break;
    case HRD_EV_COMM_FAILED:
        if (s->comms_to_fail > 0)
            s->comms_to_fail--;
        hrd_member_event(d, ev);
        break;
    case HRD_EV_COMM_READY:
        hrd_member_event(d, ev);
        if (ev->status == HRP_OK)
            hrd_path_log(d, ev->comm);
        break;
    case HRD_EV_COMM_LEFT:
    case HRD_EV_COMM_GONE:
        hrd_member_event(d, ev);
        break;
    case HRD_EV_LINK_LOST:
    case HRD_EV_LINK_GONE:
    case HRD_EV_LINK_INTERRUPTED:
        hrd_peer_event(d, ev);
        break;
    case HRD_EV_PROBE:
        hrd_doctor_event(d, ev);
        break;
    case HRD_EV_SNAPSHOT:
        hrd_status_event(d, ev);
        break;
    }
}

static void on_agent(uv_poll_t *handle, int status, int events)
{
    struct service *s = handle->data;
    (void)status;
    (void)events;
    for (struct hrd_event *ev = hrd_agent_take_events(s->d.agent), *next; ev; ev = next) {
        next = ev->next;
        dispatch(s, ev);
        free(ev);
    }
}

static void on_gpus(uv_poll_t *handle, int status, int events)
{
    struct service *s = handle->data;
    (void)status;
    (void)events;
    for (struct hrd_gpu_event *ev = hrd_gpus_take_events(s->d.gpus), *next; ev; ev = next) {
        next = ev->next;
        hrd_session_gpu_event(&s->d, ev);
        free(ev);
    }
}

static uint64_t agent_age_ms(const struct service *s)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    uint64_t now = (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
    uint64_t beat = hrd_agent_heartbeat(s->d.agent);
    return beat < now ? (now - beat) / 1000000 : 0;
}

static void enter(struct service *s, enum stop_phase phase)
{
    s->phase = phase;
    s->phase_since_ms = uv_now(&s->loop);
}

/* ---- timers ----------------------------------------------------------------------------------------------- */

/* A context that is lost comes back with a new process alone. Jobs get errors from it meanwhile, so the first moment without
   any is taken; Restart= of the unit does the rest. */
static void leave_lost_gpu(struct service *s)
{
    const char *why = hrd_gpus_lost(s->d.gpus, UINT64_MAX);
    if (!why || s->phase != RUNNING || hrd_sessions_live(&s->d) > 0)
        return;
    hrd_error("no job is connected: the daemon ends to be started again, because %s", why);
    s->exit_status = 1;
    enter(s, STOPPED);
    uv_stop(&s->loop);
}

static void on_tick(uv_timer_t *timer)
{
    struct service *s = timer->data;
    unsigned n = hrd_sessions_count(&s->d);
    if (n != s->shown_sessions && hrd_notify_status("serving %u process%s", n, n == 1 ? "" : "es"))
        s->shown_sessions = n;
    uint64_t age = agent_age_ms(s);
    if (age > AGENT_STALE_MS && hrd_log_allowed(&s->stale_log, 1, 60000, NULL))
        hrd_error("the agent has not turned for %" PRIu64 " ms: operations stand still", age);
    leave_lost_gpu(s);
}

/* The agent's heartbeat feeds the watchdog: a loop that runs beside a stuck agent serves nobody. */
static void on_watchdog(uv_timer_t *timer)
{
    struct service *s = timer->data;
    uint64_t limit = s->watchdog_ms / 2 > 2000 ? s->watchdog_ms / 2 : 2000;
    if (agent_age_ms(s) <= limit)
        hrd_notify_watchdog();
}

/* ---- reload ----------------------------------------------------------------------------------------------- */

static void report_problem(void *ctx, const char *sentence)
{
    (void)ctx;
    hrd_error("%s", sentence);
}

static void report_restart_key(void *ctx, const char *key)
{
    unsigned *n = ctx;
    (*n)++;
    hrd_warn("%s was changed in the configuration; that needs a restart", key);
}

static void reload(struct service *s)
{
    struct hrd_config fresh;
    int rc = hrd_config_load(&fresh, s->config_path, report_problem, NULL);
    if (rc == -ENOENT && s->must_exist) {
        hrd_error("%s does not exist any more; the configuration stays as it was", s->config_path);
        return;
    }
    if (rc > 0) {
        hrd_error("the configuration stays as it was, because %s has %d mistake%s", s->config_path, rc,
                  rc == 1 ? "" : "s");
        return;
    }
    unsigned restart = 0;
    unsigned taken = hrd_config_reload(&s->d.cfg, &fresh, report_restart_key, &restart);
    hrd_log_set_level(s->d.cfg.log_level);
    hrd_notice("%s read again: %u key%s taken over; %u other%s need%s a restart", s->config_path, taken,
               taken == 1 ? "" : "s", restart, restart == 1 ? "" : "s", restart == 1 ? "s" : "");
}

static void on_sighup(uv_signal_t *handle, int signum)
{
    struct service *s = handle->data;
    (void)signum;
    if (s->phase != RUNNING)
        return;
    hrd_notify_reloading();
    reload(s);
    hrd_notify_ready("serving %u process%s", hrd_sessions_count(&s->d),
                     hrd_sessions_count(&s->d) == 1 ? "" : "es");
}

/* ---- stop ------------------------------------------------------------------------------------------------- */

static void fail_comm(struct hrd_daemon *d, uint64_t comm)
{
    struct service *s = (struct service *)d; /* its first member */
    char text[200];
    snprintf(text, sizeof(text), "the daemon on node %s is stopping", d->node_name);
    s->comms_to_fail++;
    hrd_agent_comm_fail(d->agent, comm, HRP_SHUTDOWN, text, true);
}

static void on_stop_tick(uv_timer_t *timer)
{
    struct service *s = timer->data;
    uint64_t age = uv_now(&s->loop) - s->phase_since_ms;
    switch (s->phase) {
    case FAILING_COMMS:
        if (s->comms_to_fail == 0 || age >= STOP_FAIL_MS)
            enter(s, GRACE);
        break;
    case GRACE:
        /* Without clients nobody has to read anything. */
        if (age >= STOP_GRACE_MS || hrd_sessions_live(&s->d) == 0) {
            hrd_sessions_end_all(&s->d, "the daemon is stopping");
            enter(s, ENDING_SESSIONS);
        }
        break;
    case ENDING_SESSIONS:
        if (hrd_sessions_live(&s->d) == 0) {
            enter(s, STOPPED);
            uv_stop(&s->loop);
        } else if (age >= STOP_RELEASE_MS) {
            hrd_error("%u sessions are not released after %d ms; the daemon ends without them",
                      hrd_sessions_live(&s->d), STOP_RELEASE_MS);
            s->exit_status = 1;
            enter(s, STOPPED);
            uv_stop(&s->loop);
        }
        break;
    default:
        break;
    }
}

static void on_stop_signal(uv_signal_t *handle, int signum)
{
    struct service *s = handle->data;
    if (s->phase != RUNNING) {
        hrd_warn("a second %s: the daemon ends at once", signum == SIGINT ? "SIGINT" : "SIGTERM");
        s->exit_status = 1;
        enter(s, STOPPED);
        uv_stop(&s->loop);
        return;
    }
    hrd_notify_stopping();
    hrd_log_event(HRD_LOG_NOTICE, HRD_MSGID_STOPPING, 0, "stopping with %u process%s connected",
                  hrd_sessions_count(&s->d), hrd_sessions_count(&s->d) == 1 ? "" : "es");
    s->d.stopping = true;
    hrd_listener_stop(s->listener);
    hrd_sessions_each_comm(&s->d, fail_comm);
    enter(s, FAILING_COMMS);
    uv_timer_start(&s->stop_timer, on_stop_tick, 0, STOP_TICK_MS);
}

/* ---- start and end ---------------------------------------------------------------------------------------- */

static void start_signal(struct service *s, uv_signal_t *handle, uv_signal_cb cb, int signum)
{
    uv_signal_init(&s->loop, handle);
    handle->data = s;
    uv_signal_start(handle, cb, signum);
}

/* Before there is anything that a signal could leave behind; the loop, which handles them, begins when all is there. */
static void start_signals(struct service *s)
{
    start_signal(s, &s->sigterm, on_stop_signal, SIGTERM);
    start_signal(s, &s->sigint, on_stop_signal, SIGINT);
    start_signal(s, &s->sighup, on_sighup, SIGHUP);
}

static void close_signals(struct service *s)
{
    uv_close((uv_handle_t *)&s->sigterm, NULL);
    uv_close((uv_handle_t *)&s->sigint, NULL);
    uv_close((uv_handle_t *)&s->sighup, NULL);
}

static int start_parts(struct service *s, char *err, size_t errlen)
{
    struct hrd_daemon *d = &s->d;
    int rc = hrd_listener_new(&s->listener, d, err, errlen);
    if (rc == 0)
        rc = start_gpus(s, err, errlen);
    if (rc == 0)
        rc = start_tcp_io(s, err, errlen);
    if (rc == 0)
        rc = start_agent(s, err, errlen);
    if (rc == 0)
        rc = hrd_sessions_new(d, err, errlen);
    if (rc == 0 && (rc = hrd_members_new(d)) != 0)
        snprintf(err, errlen, "communicators cannot be served: %s", strerror(-rc));
    if (rc == 0)
        rc = hrd_peers_new(d, err, errlen);
    return rc;
}

static void start_handles(struct service *s)
{
    uv_timer_init(&s->loop, &s->tick);
    uv_timer_init(&s->loop, &s->watchdog);
    uv_timer_init(&s->loop, &s->stop_timer);
    uv_poll_init(&s->loop, &s->agent_poll, hrd_agent_event_fd(s->d.agent));
    uv_poll_init(&s->loop, &s->gpus_poll, hrd_gpus_event_fd(s->d.gpus));
    s->tick.data = s->watchdog.data = s->stop_timer.data = s->agent_poll.data = s->gpus_poll.data = s;
    uv_poll_start(&s->agent_poll, UV_READABLE, on_agent);
    uv_poll_start(&s->gpus_poll, UV_READABLE, on_gpus);
    uv_timer_start(&s->tick, on_tick, TICK_MS, TICK_MS);
    s->watchdog_ms = hrd_notify_watchdog_ms();
    if (s->watchdog_ms > 0)
        uv_timer_start(&s->watchdog, on_watchdog, 0, s->watchdog_ms / 3 + 1);
}

static void close_handles(struct service *s)
{
    uv_close((uv_handle_t *)&s->tick, NULL);
    uv_close((uv_handle_t *)&s->watchdog, NULL);
    uv_close((uv_handle_t *)&s->stop_timer, NULL);
    uv_close((uv_handle_t *)&s->agent_poll, NULL);
    uv_close((uv_handle_t *)&s->gpus_poll, NULL);
}

/* Lets close callbacks run; whoever still holds a handle after that is left to the end of the process. */
static void drain_loop(struct service *s)
{
    for (int i = 0; i < 100 && uv_run(&s->loop, UV_RUN_NOWAIT) != 0; i++) {
        struct timespec ts = {.tv_nsec = 1000000};
        nanosleep(&ts, NULL);
    }
    uv_loop_close(&s->loop);
}

static void end_parts(struct service *s)
{
    struct hrd_daemon *d = &s->d;
    if (d->members)
        hrd_members_free(d);
    if (d->peers)
        hrd_peers_free(d);
    hrd_status_stop(d);
    hrd_doctor_stop(d);
    hrd_sessions_free(d);
    hrd_listener_free(s->listener);
    drain_loop(s);
    if (d->gpus)
        hrd_gpus_stop(d->gpus);
    if (d->agent)
        hrd_agent_free(d->agent);
    hrd_tcp_io_free(d->tcp_io);
    if (d->gpus)
        hrd_gpus_free(d->gpus);
}

int hrd_service_run(const struct hrd_config *cfg, const char *config_path, bool must_exist)
{
    static struct service s; /* threads of the pool that are stuck may outlive this function */
    struct hrd_daemon *d = &s.d;
    char err[1024] = "";
    s = (struct service){.config_path = config_path, .must_exist = must_exist};
    signal(SIGPIPE, SIG_IGN);
    raise_descriptor_limit();
    d->cfg = *cfg;
    d->loop = &s.loop;
    memcpy(d->node_name, cfg->node_name, sizeof(d->node_name));
    if (getrandom(d->instance, sizeof(d->instance), 0) != (ssize_t)sizeof(d->instance) ||
        uv_loop_init(&s.loop) != 0) {
        hrd_error("the daemon cannot start: %s", strerror(errno));
        return 1;
    }
    start_signals(&s);
    int rc = start_parts(&s, err, sizeof(err));
    if (rc == 0) {
        start_handles(&s);
        rc = hrd_listener_start(s.listener);
        if (rc == 0) {
            announce(&s);
            hrd_notify_ready("serving no process yet");
            uv_run(&s.loop, UV_RUN_DEFAULT);
        } else {
            snprintf(err, sizeof(err), "the socket cannot be polled: %s", uv_strerror(rc));
        }
        close_handles(&s);
    }
    close_signals(&s);
    if (rc != 0) {
        hrd_error("the daemon cannot start: %s", err);
        s.exit_status = 1;
    }
    if (s.exit_status != 0 && rc == 0)
        return s.exit_status; /* something is stuck: the kernel frees what is left */
    end_parts(&s);
    if (s.phase == STOPPED)
        hrd_notice("stopped");
    return s.exit_status;
}
