/* SPDX-License-Identifier: MIT */
/* What a thread does between two looks at a word that another thread writes. */
#ifndef HRD_RELAX_H
#define HRD_RELAX_H

static inline void hrd_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
