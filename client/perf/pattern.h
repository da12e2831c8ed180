/* SPDX-License-Identifier: MIT */
/*
 * Inputs that every process can compute for every rank: element i of rank r is a function of (seed, r, i),
 * dtype and redop alone, so that results can be checked without sending inputs anywhere. Values are chosen
 * so that the reduction neither overflows nor hides an error:
 *   sum, avg   floats: random in [-1, 1) with all bits of the mantissa; integers: all bits random (they wrap)
 *   prod       floats: random sign, size in [0.75, 1.3125); integers: all bits random, odd three times in four
 *   min, max   as for sum
 */
#ifndef HPF_PATTERN_H
#define HPF_PATTERN_H

#include <stddef.h>
#include <stdint.h>

#include "proto/types.h"

/* Elements first .. first + n - 1 of rank's input into dst, which needs no alignment. */
void hpf_pattern(unsigned dtype, unsigned redop, uint64_t seed, unsigned rank, uint64_t first, size_t n,
                 void *dst);

/* Bits of IEEE binary16 and bfloat16, to nearest, ties to even; NaN becomes the canonical quiet one. */
uint16_t hpf_f32_to_f16(float f);
float hpf_f16_to_f32(uint16_t h);
uint16_t hpf_f32_to_bf16(float f);
float hpf_bf16_to_f32(uint16_t b);

/* A guard area: bytes that no collective may touch. check returns how many bytes differ. */
void hpf_guard_fill(void *p, size_t bytes, uint32_t seed);
size_t hpf_guard_check(const void *p, size_t bytes, uint32_t seed);

#endif
