/* SPDX-License-Identifier: MIT */
/* The agent as a whole against a peer's bytes: one node of a two-node comm, its link fed with the input. Nothing but the
   link may end, and the agent must still stop cleanly. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/agent.h"
#include "daemon/log.h"
#include "daemon/transport_tcp.h"
#include "proto/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int wait_for(struct hrd_agent *a, enum hrd_event_type type)
{
    for (int i = 0; i < 20000; i++) {
        struct hrd_event *ev = hrd_agent_take_events(a);
        int found = 0;
        while (ev) {
            struct hrd_event *next = ev->next;
            found |= ev->type == type;
            free(ev);
            ev = next;
        }
        if (found)
            return 1;
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char err[256];
    struct hrd_agent *a;
    struct hrd_agent_config cfg = {.arena_bytes = 4 << 20,
                                   .threads = 1,
                                   .chunk_bytes = 64 << 10,
                                   .eager_limit = 4096,
                                   .stall_warning_ms = 60000,
                                   .node_name = "good"};
    hrd_log_set_level(HRD_LOG_ERROR);
    if (hrd_agent_new(&a, &cfg, err, sizeof(err)))
        abort();
    size_t seg_size = hrp_seg_size(1);
    struct hrp_seg_header *seg =
        mmap(NULL, seg_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int bell = eventfd(0, EFD_NONBLOCK), pair[2], fd;
    if (seg == MAP_FAILED || bell < 0 ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0)
        abort();
    fd = pair[1];
    hrp_seg_init(seg, 1);
    hrd_agent_session_add(a, 1, seg, bell, NULL);
    hrd_agent_link_up(a, 7, "evil", &hrd_transport_tcp, &hrd_tcp_conn_new(pair, 1)->base);
    static const uint32_t nodes[2] = {0, 1}, peers[2] = {HRD_NO_PEER, 7};
    static const char *const names[2] = {"good", "evil"};
    struct hrd_comm_rank local = {.rank = 0, .slot = 0, .sid = 1, .pid = 1};
    struct hrd_comm_spec spec = {.comm = 9,
                                 .nranks = 2,
                                 .nnodes = 2,
                                 .nlocal = 1,
                                 .node_of_rank = nodes,
                                 .peer_of_node = peers,
                                 .node_name = names,
                                 .local = &local,
                                 .eager_limit = 4096,
                                 .unit_bytes = 256 << 10,
                                 .unit_min_bytes = 64 << 10};
    hrd_agent_comm_add(a, &spec);
    if (!wait_for(a, HRD_EV_COMM_READY))
        abort();
    /* Magic and comm id would cost the fuzzer most of its time: every 80 bytes of the input make a header with them right. */
    for (size_t at = 0; at + sizeof(struct hrp_frame) <= size; at += sizeof(struct hrp_frame)) {
        struct hrp_frame f;
        memcpy(&f, data + at, sizeof(f));
        f.magic = HRP_FRAME_MAGIC;
        f.comm = f.comm % 8 ? 9 : f.comm;
        f.type = (uint8_t)(1 + f.type % (HRP_NFRAMES - 1));
        f.status %= 18;
        f.op %= 64;
        f.len %= 2100;
        memset(f.reserved, 0, sizeof(f.reserved));
        char payload[2100] = {0};
        if (send(fd, &f, sizeof(f), MSG_NOSIGNAL) < 0 || send(fd, payload, f.len, MSG_NOSIGNAL) < 0)
            break;
    }
    close(fd);
    if (!wait_for(a, HRD_EV_LINK_LOST))
        abort();
    hrd_agent_session_end(a, 1, "the end");
    if (!wait_for(a, HRD_EV_SESSION_GONE))
        abort();
    hrd_agent_free(a);
    munmap(seg, seg_size);
    close(bell);
    return 0;
}
