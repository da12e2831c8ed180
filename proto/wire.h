/* SPDX-License-Identifier: MIT */
/*
 * Messages between a client and its daemon on the Unix socket (SOCK_SEQPACKET: one message a datagram, at
 * most HRP_MSG_MAX bytes). A message is a struct hrp_msg_hdr followed by the type's fixed body and, where the
 * type allows one, a text tail. Requests carry a cookie that the one reply echoes; requests may be pipelined
 * and are answered in any order. Integers are in host order: both sides are on one machine. Cookies of requests are not
 * 0; an ERROR with cookie 0 answers none: the daemon ends the session, and the sentence says why. It closes the socket
 * only when nothing of it touches the client's memory any more.
 *
 * Descriptors travel by SCM_RIGHTS; their number is fixed by type (hrp_msg_nfds()). A truncated message or
 * control message, a wrong length, an unknown type or a wrong number of descriptors ends the session.
 *
 * Minor versions: a body may grow at its end. hrp_msg_decode() accepts a longer body from a newer side (the
 * tail it does not know is dropped) and zero-fills what an older side did not send, down to the type's size
 * in version 1.0. Types with a text tail never grow.
 */
#ifndef HRP_WIRE_H
#define HRP_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/shm.h"
#include "proto/types.h"

#define HRP_MSG_MAX 65000u
#define HRP_MSG_MAGIC 0x6872u
#define HRP_MAX_FDS 3
#define HRP_DEFAULT_SOCKET "/run/hreduced/hreduced.sock"
#define HRP_DEFAULT_PORT 18515
#define HRP_MAX_RANKS 4096u
#define HRP_MAX_NODES 64u
/* The daemon works on so many requests for memory of a process at a time, and refuses WINDOW, ALLOC and IMPORT_GPU beyond
   that; FREE of an IMPORT_GPU is one, too. */
#define HRP_MEMORY_JOBS 64u

enum hrp_msg_type {
    HRP_MSG_HELLO = 1,   /* client -> daemon, first message. fds: the client's own pidfd */
    HRP_MSG_WELCOME = 2, /* reply to HELLO. fds: segment memfd, daemon's pidfd, doorbell eventfd */
    HRP_MSG_ERROR = 3,   /* reply to any request that failed: status + sentence as text tail */
    HRP_MSG_GET_ID = 4,  /* make a unique id */
    HRP_MSG_ID = 5,      /* reply to GET_ID */
    HRP_MSG_JOIN = 6,    /* join a comm; answered when the comm is committed or failed */
    HRP_MSG_JOINED = 7,  /* reply to JOIN */
    HRP_MSG_LEAVE = 8,   /* leave (destroy) a comm; answered by DONE when the daemon let go of its buffers */
    HRP_MSG_ABORT =
        9, /* abort a comm: every rank gets HRP_ABORTED; answered by DONE at once. text: the reason */
    HRP_MSG_WINDOW = 10, /* make the comm slot's staging window (once) */
    HRP_MSG_ALLOC = 11,  /* make shared memory */
    HRP_MSG_MEMORY = 12, /* reply to WINDOW and ALLOC. fds: memfd */
    HRP_MSG_IMPORT =
        13, /* register a client's memfd: SHRINK-sealed, not hugetlb. fds: memfd. reply REGISTERED */
    HRP_MSG_REGISTERED = 14,
    HRP_MSG_FREE =
        15, /* drop a buffer of ALLOC, IMPORT or IMPORT_GPU; DONE when no op uses it and it is unmapped */
    HRP_MSG_DONE = 16,
    HRP_MSG_PATH = 17,       /* path report of a comm slot; reply TEXT (JSON) */
    HRP_MSG_STATUS = 18,     /* hreducectl: reply TEXT (JSON) */
    HRP_MSG_TEXT = 19,       /* reply in parts: text tail of this part, `more` set on all but the last */
    HRP_MSG_IMPORT_GPU = 20, /* register GPU memory; reply REGISTERED, or ERROR: stage it then */
    HRP_MSG_GPU_PART =
        21, /* a part of the IMPORT_GPU with this cookie; not answered. fds: the part's handle */
    HRP_MSG_DOCTOR =
        22, /* hreducectl: look at this machine or at another node; reply TEXT (JSON). text: DIAL */
    HRP_MSG_JOINING =
        23, /* what a JOIN that is not answered waits for, its body again; reply TEXT: a sentence. Since ABI
                             minor 3 */
    HRP_NMSGS = 24,
};

struct hrp_msg_hdr {
    uint16_t magic; /* HRP_MSG_MAGIC */
    uint16_t type;
    uint32_t len; /* of the whole message, header included; equals the datagram's length */
    uint64_t cookie;
};
_Static_assert(sizeof(struct hrp_msg_hdr) == 16, "layout");

/* An address of a daemon. family 4 or 6 (0: unused); port in host order, 0: the receiver's own configured
 * port. */
struct hrp_addr {
    uint8_t family;
    uint8_t reserved;
    uint16_t port;
    uint32_t scope_id; /* IPv6 link-local only; meaningful on the sender's machine */
    uint8_t ip[16];    /* network order; IPv4 in the first four */
};
_Static_assert(sizeof(struct hrp_addr) == 24, "layout");
#define HRP_MAX_ADDRS 4

/* The 128 bytes of hclient_unique_id: a random nonce and where its root daemon listens (1..HRP_MAX_ADDRS
 * addresses; unused ones are zero). The nonce's second half is the first half of that daemon's instance id. */
struct hrp_unique_id {
    uint32_t magic; /* HRP_ID_MAGIC */
    uint16_t version;
    uint16_t naddrs;
    uint8_t nonce[16];
    struct hrp_addr addr[HRP_MAX_ADDRS];
    uint8_t reserved[8];
};
_Static_assert(sizeof(struct hrp_unique_id) == 128, "public size");
#define HRP_ID_MAGIC 0x44497268u
#define HRP_ID_VERSION 1u
/* 0, or -EPROTO: these bytes never came from a daemon of this major version. */
int hrp_unique_id_check(const struct hrp_unique_id *id);
/* 0, or -EPROTO: family, or bytes that the family does not use are not zero. */
int hrp_addr_check(const struct hrp_addr *addr);

/* Rendezvous key: who belongs together. Never an identity: the root answers with a random comm id. Compared
   as bytes, so unused bytes are zero. */
enum hrp_key_kind { HRP_KEY_ID = 1, HRP_KEY_NAME = 2 };
struct hrp_key {
    uint32_t kind;
    uint32_t uid; /* filled in by the daemon from SO_PEERCRED; the client's value is ignored */
    uint32_t nranks;
    uint32_t nth;     /* name: n-th comm of that name in the process; id: 0 */
    uint64_t attempt; /* name: hash of the launcher's run id and restart count; id: 0 */
    char name[72];    /* name: 1..71 characters of printable ASCII, rest zero; id: the nonce, rest zero */
};
_Static_assert(sizeof(struct hrp_key) == 96, "layout");

enum hrp_algo {
    HRP_ALGO_AUTO = 0,
    HRP_ALGO_DIRECT = 1,
    HRP_ALGO_GATHER = 2,
    HRP_ALGO_PAIRWISE = 3,
    HRP_ALGO_RING = 4,
    HRP_ALGO_TREE = 5,
    HRP_NALGOS = 6,
};

/* What a job does while its GPU buffers are reduced. */
enum hrp_overlap { HRP_OVERLAP_AUTO = 0, HRP_OVERLAP_COMPUTE = 1, HRP_OVERLAP_IDLE = 2, HRP_NOVERLAPS = 3 };

enum hrp_tristate { HRP_DEFAULT = 0, HRP_OFF = 1, HRP_ON = 2 };

/* Same on all ranks of a comm; the root refuses a difference in words. 0 everywhere: the root daemon's
 * defaults. */
struct hrp_comm_config {
    uint32_t setup_timeout_ms;
    uint32_t op_timeout_ms; /* UINT32_MAX: no deadline */
    uint8_t algo;           /* enum hrp_algo */
    uint8_t reproducible;   /* enum hrp_tristate */
    uint8_t wire_f32;       /* enum hrp_tristate */
    uint8_t transport;      /* 0 default (resolved: whatever the daemons' links are), 1 tcp, 2 verbs */
    uint32_t require;       /* bits: HRP_REQUIRE_* */
    uint8_t overlap;        /* enum hrp_overlap; an op's own flags go before */
    /* Class of verbs links: those of HRP_CLASS_* in class_set are the job's, the others are filled in by the root. */
    uint8_t service_level, traffic_class;
    uint8_t class_set;
    uint8_t reserved[12];
};
_Static_assert(sizeof(struct hrp_comm_config) == 32, "layout");
#define HRP_CLASS_SL 1u
#define HRP_CLASS_TC 2u
#define HRP_REQUIRE_VERBS 1u
#define HRP_REQUIRE_GDR 2u
#define HRP_REQUIRE_P2P 4u
#define HRP_REQUIRE_ALL (HRP_REQUIRE_VERBS | HRP_REQUIRE_GDR | HRP_REQUIRE_P2P)

struct hrp_msg_hello {
    uint32_t abi; /* HRP_ABI of the client */
    uint32_t
        flags; /* HRP_HELLO_CTL: no segment wanted (hreducectl); WELCOME's first fd is then the pidfd again */
    int32_t pid; /* informational: own namespace */
    uint32_t reserved;
};
#define HRP_HELLO_CTL 1u

struct hrp_msg_welcome {
    uint32_t abi;
    uint32_t ncomms; /* 0 with segment_bytes 0: no segment (HRP_HELLO_CTL) */
    uint64_t segment_bytes;
    uint64_t window_bytes; /* size that WINDOW will make, a multiple of HRP_PAGE */
    uint16_t port;         /* the daemon's peer port */
    uint16_t reserved[3];
    char version[32]; /* "0.1.0" */
};

struct hrp_msg_error {
    uint32_t status; /* enum hrp_status, not HRP_OK */
    uint32_t scope;  /* enum hrp_scope */
    /* text tail: the sentence */
};

struct hrp_msg_empty {
    uint32_t reserved; /* GET_ID, DONE, STATUS */
};

struct hrp_msg_id {
    struct hrp_unique_id id;
};

struct hrp_msg_join {
    struct hrp_key key;
    uint32_t rank;
    uint32_t nroots; /* 1..HRP_MAX_ADDRS addresses of the root daemon, tried in order */
    struct hrp_addr root[HRP_MAX_ADDRS];
    struct hrp_comm_config config;
};

struct hrp_msg_joined {
    uint32_t slot; /* comm slot of the segment */
    uint32_t nranks;
    uint32_t nnodes;
    uint32_t node; /* index of this node */
    uint32_t nlocal;
    uint32_t op_timeout_ms;
    uint8_t comm_id[16];
    /* Since ABI minor 3: */
    uint32_t require; /* bits: HRP_REQUIRE_*, of the job, of the root's configuration and of this node's */
    uint32_t reserved;
};

struct hrp_msg_slot {
    uint32_t slot; /* LEAVE, ABORT (text tail), WINDOW, PATH */
    uint32_t reserved;
};

struct hrp_msg_alloc {
    uint64_t bytes;
};

struct hrp_msg_memory {
    uint64_t bytes; /* of the memfd */
    uint32_t id;    /* ALLOC: buffer id; WINDOW: the slot */
    uint32_t reserved;
};

struct hrp_msg_import {
    uint64_t offset; /* in the memfd, a multiple of the page size */
    uint64_t bytes;
};

struct hrp_msg_buffer {
    uint32_t id; /* REGISTERED, FREE */
    uint32_t reserved;
};

/*
 * Memory of one GPU, as one range of `bytes`. LEGACY: a whole cuMemAlloc allocation and its IPC handle. VMM: nparts
 * handles (cuMemExportToShareableHandle, POSIX file descriptors), each in a GPU_PART that follows at once; other messages may lie
 * between, other parts may not.
 */
enum hrp_gpu_kind { HRP_GPU_LEGACY = 1, HRP_GPU_VMM = 2 };
#define HRP_GPU_PARTS_MAX 4096u
struct hrp_msg_import_gpu {
    uint8_t
        uuid[16]; /* of the device, as cuDeviceGetUuid_v2 says it: of the instance, where it is one of MIG */
    uint64_t bytes;
    uint32_t kind;      /* enum hrp_gpu_kind */
    uint32_t nparts;    /* VMM: 1..HRP_GPU_PARTS_MAX; LEGACY: 0 */
    uint8_t handle[64]; /* LEGACY: CUipcMemHandle; VMM: zero */
    uint32_t
        mig; /* the device is an instance of MIG: for the words in which it is refused. 0 from older libraries */
    uint32_t reserved;
};
_Static_assert(sizeof(struct hrp_msg_import_gpu) == 104, "layout");

/* Parts come in ascending order and leave no hole: offset is the sum of the bytes before. */
struct hrp_msg_gpu_part {
    uint64_t offset; /* in the range; a multiple of HRP_PAGE, likewise: */
    uint64_t bytes;  /* of the whole handle */
};

struct hrp_msg_text {
    uint32_t more;
    uint32_t reserved;
    /* text tail */
};

enum hrp_doctor_what {
    HRP_DOCTOR_HERE = 1, /* the checks of one machine, and the facts that nodes should agree in */
    HRP_DOCTOR_DIAL =
        2, /* connect with the daemons at the addresses of the text ("10.0.0.2 fd00::3"), and list peers */
    HRP_DOCTOR_REACH = 3, /* can the peer's port be reached at each of its addresses? */
    HRP_DOCTOR_PROBE = 4, /* latency and rate of the data link with the peer */
    HRP_DOCTOR_LINK = 5,  /* between daemons only: have a data link with the asker, who waits for it */
    HRP_NDOCTOR = 6,
};

struct hrp_msg_doctor {
    uint32_t what; /* enum hrp_doctor_what */
    uint32_t peer; /* its number in the answer to DIAL; 0: HERE on this node, DIAL */
    uint32_t back; /* 1: the peer does it, towards this node (HERE: on its own machine) */
    uint32_t reserved;
};

union hrp_msg_body {
    struct hrp_msg_hello hello;
    struct hrp_msg_welcome welcome;
    struct hrp_msg_error error;
    struct hrp_msg_empty empty;
    struct hrp_msg_id id;
    struct hrp_msg_join join;
    struct hrp_msg_joined joined;
    struct hrp_msg_slot slot;
    struct hrp_msg_alloc alloc;
    struct hrp_msg_memory memory;
    struct hrp_msg_import import;
    struct hrp_msg_buffer buffer;
    struct hrp_msg_text text;
    struct hrp_msg_import_gpu import_gpu;
    struct hrp_msg_gpu_part gpu_part;
    struct hrp_msg_doctor doctor;
};

struct hrp_msg {
    uint16_t type;
    uint64_t cookie;
    union hrp_msg_body body;
    const char *text; /* decode: into the caller's buffer, not NUL-terminated; NULL when empty */
    size_t text_len;
};

/* Descriptors that belong to a type; -1 for an unknown type. */
int hrp_msg_nfds(unsigned type);
/* "JOIN", ...; never NULL. */
const char *hrp_msg_name(unsigned type);
/* Encodes into buf; returns the length, or -EINVAL (unknown type, field out of range, text where none is
   allowed) or -EMSGSIZE. Reserved fields are sent as zero. */
long hrp_msg_encode(const struct hrp_msg *msg, void *buf, size_t size);
/* Decodes a whole datagram, checks every field against its range; msg->text points into buf. 0 or -EPROTO.
   Ranges that depend on the session (slots, buffer ids) are the session's to check. In a HELLO or WELCOME of
   another major version only abi is checked, so that the version can be refused in words. */
int hrp_msg_decode(struct hrp_msg *msg, const void *buf, size_t len);

#endif
