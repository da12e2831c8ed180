/* SPDX-License-Identifier: MIT */
/* Inside a session: shared by session*.c only. */
#ifndef HRD_SESSION_PRIV_H
#define HRD_SESSION_PRIV_H

#include "daemon/log.h"
#include "daemon/memory.h"
#include "daemon/session.h"

#define HRD_BUFFER_BUCKETS 64
#define HRD_SESSION_BUCKETS 256

enum hrd_session_state {
    HRD_S_HELLO,    /* connected, HELLO not answered yet */
    HRD_S_OPEN,     /* WELCOME was sent */
    HRD_S_ENDING,   /* hrd_session_kill() was called; the reaper will end it */
    HRD_S_RELEASED, /* ended; waits for the agent, for memory jobs or for libuv to let go */
};

struct hrd_slot {
    bool taken;
    bool window_pending;
    uint32_t generation; /* tells a job of the slot's former user from one of this */
    struct hrd_memory window;
};

struct hrd_buffer {
    struct hrd_buffer *next;
    uint32_t id;
    bool dropping; /* FREE came; drop_cookie is answered on BUFFER_GONE */
    uint64_t drop_cookie;
    struct hrd_memory mem;         /* of a GPU's memory only the charge */
    struct hrd_gpu_import *import; /* not NULL: memory of a GPU */
};

/* An IMPORT_GPU whose GPU_PARTs are arriving. */
struct hrd_gpu_parts {
    uint64_t cookie;
    struct hrp_msg_import_gpu msg; /* nparts 0: none is under way */
    uint32_t got;
    uint64_t bytes;
    int *fd;
    uint64_t *part_bytes;
};

struct hrd_out {
    struct hrd_out *next;
    size_t len;
    int nfds;
    int fds[HRP_MAX_FDS];
    unsigned char data[];
};

struct hrd_session_priv {
    struct hrd_session pub;
    struct hrd_daemon *d;
    struct hrd_session_priv *next, **pprev; /* all sessions */
    struct hrd_session_priv *hash_next;     /* of the same bucket */
    struct hrd_session_priv *ending_next;   /* waiting for the reaper */
    enum hrd_session_state state;
    bool ctl;          /* hreducectl: no segment */
    bool fault;        /* ends because it broke the protocol */
    bool hello_taken;  /* HELLO came; its answer may still be in the making */
    bool opened;       /* WELCOME was sent once */
    bool counted;      /* in hrd_sessions.counted */
    bool in_agent;     /* hrd_agent_session_add() was called, SESSION_GONE not yet here */
    char refusal[200]; /* not empty: what HELLO is answered with */
    char why[512];     /* why it ends */
    char command[17];
    uint64_t since_ms; /* uv_now() of the connection */

    int sock, pidfd, doorbell;
    uv_poll_t sock_poll, pid_poll;
    uv_timer_t timer; /* HELLO's deadline; after end of file the moment for the pidfd to speak */
    unsigned handles; /* of the three above, those that libuv still holds */
    bool pid_polled;
    int sock_events;

    struct hrd_out *out_first, **out_last;
    size_t out_bytes;

    unsigned jobs; /* memory jobs on worker threads and on those of GPUs */
    struct hrd_memory segment;
    _Atomic uint32_t poisoned; /* by the SIGBUS guard */
    uint64_t window_bytes;     /* of WELCOME: a reload changes it for later sessions only */
    uint32_t nslots;
    struct hrd_slot *slots;
    uint32_t next_buffer_id;
    uint32_t nbuffers;
    struct hrd_buffer *buffers[HRD_BUFFER_BUCKETS];
    struct hrd_gpu_parts gpu_parts;
};

struct hrd_sessions {
    struct hrd_daemon *d;
    struct hrd_session_priv *all;
    struct hrd_session_priv *bucket[HRD_SESSION_BUCKETS];
    struct hrd_session_priv *ending;
    uint64_t next_sid;
    unsigned live;      /* connections */
    unsigned counted;   /* with a segment */
    unsigned releasing; /* memory on its way back on worker threads, without a session */
    uint64_t memory_bytes;
    uint64_t accepted, refused, faults;
    int own_pidfd;
    int guard_fd;
    uv_idle_t reaper; /* runs only while something is ending */
    uv_poll_t guard_poll;
    struct hrd_quotas quotas;
    struct hrd_log_limit fault_log, refused_log;
};

/* ---- session.c ---- */

/* Protocol fault: counted, logged with a limit, ends the session. */
void hrd_client_fault(struct hrd_session_priv *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Answers HELLO with ERROR and ends the session; logged with a limit. */
void hrd_client_refuse(struct hrd_session_priv *p, uint64_t cookie, enum hrp_status status, const char *fmt,
                       ...) __attribute__((format(printf, 4, 5)));
/* Frees the session when nobody holds it any more. */
void hrd_session_try_free(struct hrd_session_priv *p);
/* Ending ones too. */
struct hrd_session_priv *hrd_session_lookup(struct hrd_daemon *d, uint64_t sid);

/* ---- session_io.c ---- */

int hrd_session_io_start(struct hrd_session_priv *p);
/* As much of the queue as the socket takes. */
void hrd_session_flush(struct hrd_session_priv *p);
void hrd_session_drop_queue(struct hrd_session_priv *p);
void hrd_session_io_stop(struct hrd_session_priv *p);
/* Begins to watch the client's process. */
int hrd_session_watch_pid(struct hrd_session_priv *p, int pidfd);

/* ---- session_request.c ---- */

/* One decoded message; fd is -1 or the session's to keep or close. */
void hrd_session_request(struct hrd_session_priv *p, const struct hrp_msg *msg, int fd);

/* ---- session_memory.c ---- */

/* Makes the segment on a worker thread, then WELCOME. */
void hrd_session_make_segment(struct hrd_session_priv *p, uint64_t cookie);
void hrd_session_window(struct hrd_session_priv *p, uint64_t cookie, uint32_t slot);
void hrd_session_alloc(struct hrd_session_priv *p, uint64_t cookie, uint64_t bytes);
void hrd_session_import(struct hrd_session_priv *p, uint64_t cookie, const struct hrp_msg_import *m, int fd);
void hrd_session_free_buffer(struct hrd_session_priv *p, uint64_t cookie, uint32_t id);
void hrd_session_buffer_gone(struct hrd_session_priv *p, uint32_t id);
/* Everything the session has mapped; the agent has let go. */
void hrd_session_unmap_all(struct hrd_session_priv *p);
/* 0, or the answer is given (an ERROR, or the refusal of a HELLO). */
int hrd_session_charge(struct hrd_session_priv *p, struct hrd_charge *c, uint64_t cookie, uint64_t bytes,
                       uint32_t sessions);
/* Gives b an id and keeps it. */
void hrd_session_keep_buffer(struct hrd_session_priv *p, struct hrd_buffer *b);
bool hrd_session_may_start_job(struct hrd_session_priv *p, uint64_t cookie);
/* WELCOME with the segment, or without one for hreducectl. */
void hrd_session_welcome(struct hrd_session_priv *p, uint64_t cookie, int segment_fd);

/* ---- session_gpu.c ---- */

void hrd_session_import_gpu(struct hrd_session_priv *p, uint64_t cookie, const struct hrp_msg_import_gpu *m);
/* fd is the session's to keep or close. */
void hrd_session_gpu_part(struct hrd_session_priv *p, uint64_t cookie, const struct hrp_msg_gpu_part *m,
                          int fd);
/* b is off the session's list, and the agent let go of it: answers its FREE when it is really closed. */
void hrd_session_gpu_release(struct hrd_session_priv *p, struct hrd_buffer *b);
/* Starts to close everything of GPUs that the session has; p->jobs says when that is done. */
void hrd_session_gpu_release_all(struct hrd_session_priv *p);

#endif
