/* SPDX-License-Identifier: MIT */
#include "daemon/guard.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * One range. The handler reads it while the control thread may be changing it for somebody else's range, so a
 * reader takes it only when seq is even and the same before and after. The range that a thread faults in is
 * never being changed: it is added before any thread knows it and removed after all have let go.
 */
struct range {
    _Atomic uint32_t seq;
    _Atomic uintptr_t base; /* 0: free */
    _Atomic size_t len;
    _Atomic(_Atomic uint32_t *) poisoned;
};

/* Blocks are never freed and their list only grows at its head, so the handler can walk it at any time. */
enum { BLOCK_RANGES = 512 };
struct block {
    struct block *next;
    struct range range[BLOCK_RANGES];
};

static _Atomic(struct block *) blocks;
static int wake_fd = -1;
static uintptr_t page_mask;

/* ---- in the handler: async-signal-safe calls only --------------------------------------------------------- */

struct hit {
    uintptr_t end;
    _Atomic uint32_t *poisoned;
};

static bool range_holds(struct range *r, uintptr_t addr, struct hit *hit)
{
    uint32_t seq = atomic_load_explicit(&r->seq, memory_order_acquire);
    uintptr_t base = atomic_load_explicit(&r->base, memory_order_relaxed);
    size_t len = atomic_load_explicit(&r->len, memory_order_relaxed);
    hit->poisoned = atomic_load_explicit(&r->poisoned, memory_order_relaxed);
    hit->end = base + len;
    atomic_thread_fence(memory_order_acquire);
    if ((seq & 1) != 0 || seq != atomic_load_explicit(&r->seq, memory_order_relaxed))
        return false;
    return base != 0 && addr >= base && addr - base < len;
}

static bool find_range(uintptr_t addr, struct hit *hit)
{
    struct block *b = atomic_load_explicit(&blocks, memory_order_acquire);
    for (; b; b = b->next) {
        for (unsigned i = 0; i < BLOCK_RANGES; i++) {
            if (range_holds(&b->range[i], addr, hit))
                return true;
        }
    }
    return false;
}

/*
 * Everything from the fault to the end of the range is replaced: its session is over in any case, and one
 * mapping instead of one a page keeps a truncated gigabyte from using up the mappings a process may have.
 */
static bool cover(void *at, const struct hit *hit)
{
    char *page = (char *)at - ((uintptr_t)at & ~page_mask);
    /* The call itself: a sanitizer's mmap() would count as a write to the pages that other threads read. */
    long got = syscall(SYS_mmap, page, hit->end - (uintptr_t)page, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0L);
    return got == (long)page;
}

static void on_sigbus(int sig, siginfo_t *info, void *context)
{
    static const uint64_t one = 1;
    struct hit hit;
    int saved = errno;
    (void)context;
    /* si_code > 0: the kernel's own, with a true address; anything else was sent by somebody. */
    if (info->si_code > 0 && find_range((uintptr_t)info->si_addr, &hit) && cover(info->si_addr, &hit)) {
        atomic_store_explicit(hit.poisoned, 1, memory_order_seq_cst);
        ssize_t n = write(wake_fd, &one, sizeof(one));
        (void)n; /* full means that the loop is woken already */
        errno = saved;
        return;
    }
    struct sigaction dfl = {.sa_handler = SIG_DFL};
    sigaction(sig, &dfl, NULL);
    raise(sig); /* pending until this handler returns */
}

/* ---- the control thread ----------------------------------------------------------------------------------- */

int hrd_guard_init(void)
{
    struct sigaction act = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    page_mask = ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    if (wake_fd < 0)
        wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd < 0)
        return -errno;
    sigemptyset(&act.sa_mask);
    return sigaction(SIGBUS, &act, NULL) == 0 ? wake_fd : -errno;
}

static void set_range(struct range *r, uintptr_t base, size_t len, _Atomic uint32_t *poisoned)
{
    uint32_t seq = atomic_load_explicit(&r->seq, memory_order_relaxed);
    atomic_store_explicit(&r->seq, seq + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&r->base, base, memory_order_relaxed);
    atomic_store_explicit(&r->len, len, memory_order_relaxed);
    atomic_store_explicit(&r->poisoned, poisoned, memory_order_relaxed);
    atomic_store_explicit(&r->seq, seq + 2, memory_order_release);
}

static struct range *range_at(uintptr_t base)
{
    struct block *b = atomic_load_explicit(&blocks, memory_order_relaxed);
    for (; b; b = b->next) {
        for (unsigned i = 0; i < BLOCK_RANGES; i++) {
            if (atomic_load_explicit(&b->range[i].base, memory_order_relaxed) == base)
                return &b->range[i];
        }
    }
    return NULL;
}

int hrd_guard_add(void *base, size_t len, _Atomic uint32_t *poisoned)
{
    struct range *r = range_at(0);
    if (!r) {
        struct block *b = calloc(1, sizeof(*b));
        if (!b)
            return -ENOMEM;
        b->next = atomic_load_explicit(&blocks, memory_order_relaxed);
        atomic_store_explicit(&blocks, b, memory_order_release);
        r = &b->range[0];
    }
    set_range(r, (uintptr_t)base, len, poisoned);
    return 0;
}

void hrd_guard_remove(void *base)
{
    struct range *r = range_at((uintptr_t)base);
    if (r)
        set_range(r, 0, 0, NULL);
}
