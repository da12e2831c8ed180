/* SPDX-License-Identifier: MIT */
/*
 * The fold of kernels.h: many sources, one accumulator a thread and element, many sinks. Each thread takes one
 * vector a round; all sources of a batch are loaded before the first is used, because a load from a peer takes
 * microseconds and a small op is nothing but that latency.
 */
#ifndef HRK_GPU_FOLD_CUH
#define HRK_GPU_FOLD_CUH

#include "kernels/gpu_device.cuh"

/* Element types: Bits is what is loaded and stored, `load` and `store` convert from and to an accumulator. The
   intrinsics named _rn are never contracted, flushed or approximated. */

/* What the 64-bit intrinsics take. */
using Long = long long;
using ULong = unsigned long long;

/* Both keep subnormals; the second overflows to infinity. */
#ifndef HRG_HALF_CONVERSIONS_GIVEN
static __device__ __forceinline__ float half_to_float(uint16_t b)
{
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(b));
    return v;
}

static __device__ __forceinline__ uint16_t float_to_half(float v)
{
    uint16_t b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(v));
    return b;
}
#endif

struct F32 {
    using Bits = uint32_t;
    static __device__ float load(Bits b) { return __uint_as_float(b); }
    static __device__ Bits store(float v) { return v != v ? 0x7fc00000u : __float_as_uint(v); }
    static __device__ Bits store(double v) { return store(__double2float_rn(v)); }
};

struct F64 {
    using Bits = ULong;
    static __device__ double load(Bits b) { return __longlong_as_double(Long(b)); }
    static __device__ Bits store(double v)
    {
        return v != v ? 0x7ff8000000000000ull : (Bits)__double_as_longlong(v);
    }
};

struct F16 {
    using Bits = uint16_t;
    static __device__ float load(Bits b) { return half_to_float(b); }
    static __device__ Bits store(float v) { return v != v ? Bits(0x7e00) : float_to_half(v); }
};

struct BF16 {
    using Bits = uint16_t;
    static __device__ float load(Bits b) { return __uint_as_float(uint32_t(b) << 16); }
    static __device__ Bits store(float v)
    {
        const uint32_t u = __float_as_uint(v);
        return v != v ? Bits(0x7fc0) : Bits((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    static __device__ Bits store(double v) { return store(__double2float_rn(v)); }
};

template <typename T, typename U> struct Integer {
    using Bits = U;
    static __device__ T load(Bits b) { return T(b); }
    static __device__ Bits store(T v) { return Bits(v); }
};
struct I8 : Integer<int8_t, uint8_t> {
};
struct U8 : Integer<uint8_t, uint8_t> {
};
struct I32 : Integer<int32_t, uint32_t> {
};
struct U32 : Integer<uint32_t, uint32_t> {
};
struct I64 : Integer<Long, ULong> {
};
struct U64 : Integer<ULong, ULong> {
};

/* Accumulation. Integers are added and multiplied as unsigned ones, where wrapping is defined. */

static __device__ __forceinline__ float add(float a, float x)
{
    return __fadd_rn(a, x);
}
static __device__ __forceinline__ float mul(float a, float x)
{
    return __fmul_rn(a, x);
}
static __device__ __forceinline__ float quotient(float a, uint32_t d)
{
    return __fdiv_rn(a, __uint2float_rn(d));
}
static __device__ __forceinline__ double add(double a, double x)
{
    return __dadd_rn(a, x);
}
static __device__ __forceinline__ double mul(double a, double x)
{
    return __dmul_rn(a, x);
}
static __device__ __forceinline__ double quotient(double a, uint32_t d)
{
    return __ddiv_rn(a, __uint2double_rn(d));
}
static __device__ __forceinline__ float weighed(float x, uint32_t w)
{
    return __fmul_rn(x, __uint2float_rn(w));
}
static __device__ __forceinline__ double weighed(double x, uint32_t w)
{
    return __dmul_rn(x, __uint2double_rn(w));
}

#define INTEGER(T, U, Wide)                                       \
    static __device__ __forceinline__ T add(T a, T x)             \
    {                                                             \
        return T(U(U(a) + U(x)));                                 \
    }                                                             \
    static __device__ __forceinline__ T mul(T a, T x)             \
    {                                                             \
        return T(U(U(a) * U(x)));                                 \
    }                                                             \
    static __device__ __forceinline__ T quotient(T a, uint32_t d) \
    {                                                             \
        return T(Wide(a) / Wide(d));                              \
    }                                                             \
    static __device__ __forceinline__ T weighed(T x, uint32_t)    \
    {                                                             \
        return x;                                                 \
    }
INTEGER(int8_t, uint32_t, int64_t)
INTEGER(uint8_t, uint32_t, uint32_t)
INTEGER(int32_t, uint32_t, int64_t)
INTEGER(uint32_t, uint32_t, uint32_t)
INTEGER(Long, ULong, Long)
INTEGER(ULong, ULong, ULong)
#undef INTEGER

/* op is the same in all threads, so this is one branch a source and not one an element. */
template <int N, typename A>
static __device__ __forceinline__ void accumulate(A (&acc)[N], const A (&x)[N], unsigned op)
{
    switch (op) {
    case HRP_PROD:
#pragma unroll
        for (int e = 0; e < N; e++)
            acc[e] = mul(acc[e], x[e]);
        break;
    case HRP_MIN:
#pragma unroll
        for (int e = 0; e < N; e++)
            acc[e] = x[e] < acc[e] || x[e] != x[e] ? x[e] : acc[e];
        break;
    case HRP_MAX:
#pragma unroll
        for (int e = 0; e < N; e++)
            acc[e] = x[e] > acc[e] || x[e] != x[e] ? x[e] : acc[e];
        break;
    default:
#pragma unroll
        for (int e = 0; e < N; e++)
            acc[e] = add(acc[e], x[e]);
    }
}

/* N elements of a type in registers: as loaded, and as values. */
template <int N, typename T> struct Pack {
    static constexpr int BYTES = N * int(sizeof(typename T::Bits));
    static constexpr int QUADS = BYTES / 16;
    union {
        uint4 quad[QUADS ? QUADS : 1];
        typename T::Bits bits[N];
    };

    __device__ __forceinline__ void load(uint64_t p, unsigned bytewise)
    {
        if constexpr (QUADS == 0) {
            static_assert(N == 1, "a vector fills quads");
            bits[0] = load_any<typename T::Bits>(p, bytewise);
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; q++)
                quad[q] = load16(p + 16 * q);
        }
    }
    __device__ __forceinline__ void store(uint64_t p, unsigned bytewise) const
    {
        if constexpr (QUADS == 0) {
            store_any<typename T::Bits>(p, bits[0], bytewise);
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; q++)
                store16(p + 16 * q, quad[q]);
        }
    }
};

/* N elements from element i on. */
template <typename In, typename Out, typename Acc, int N>
static __device__ __forceinline__ void fold_at(const hrg_fold_args &a, uint64_t i)
{
    using A = decltype(Acc::load(typename Acc::Bits()));
    constexpr int IN_BYTES = int(sizeof(typename In::Bits)), OUT_BYTES = int(sizeof(typename Out::Bits));
    constexpr unsigned BATCH = Pack<N, In>::QUADS > 1 ? 4 : 8;
    A acc[N];

    for (unsigned base = 0; base < a.nsrc; base += BATCH) {
        Pack<N, In> raw[BATCH];
#pragma unroll
        for (unsigned k = 0; k < BATCH; k++)
            if (base + k < a.nsrc)
                raw[k].load(a.src[base + k] + i * IN_BYTES, a.bytewise);
#pragma unroll
        for (unsigned k = 0; k < BATCH; k++) {
            if (base + k >= a.nsrc)
                break;
            A x[N];
#pragma unroll
            for (int e = 0; e < N; e++)
                x[e] = A(In::load(raw[k].bits[e]));
            if (a.weighted) {
                const uint32_t w = a.weight[base + k];
#pragma unroll
                for (int e = 0; e < N; e++)
                    x[e] = weighed(x[e], w);
            }
            if (base + k == 0) {
#pragma unroll
                for (int e = 0; e < N; e++)
                    acc[e] = x[e];
            } else {
                accumulate(acc, x, a.op);
            }
        }
    }
    Pack<N, Out> result;
    if (a.divisor) {
#pragma unroll
        for (int e = 0; e < N; e++)
            acc[e] = quotient(acc[e], a.divisor);
    }
#pragma unroll
    for (int e = 0; e < N; e++)
        result.bits[e] = Out::store(acc[e]);
    for (unsigned d = 0; d < a.ndst; d++)
        result.store(a.dst[d] + i * OUT_BYTES, a.bytewise);
}

template <typename In, typename Out, typename Acc>
static __device__ __forceinline__ void fold(const hrg_fold_args &a)
{
    constexpr int NARROW = sizeof(typename In::Bits) < sizeof(typename Out::Bits)
                               ? int(sizeof(typename In::Bits))
                               : int(sizeof(typename Out::Bits));
    constexpr int N = 16 / NARROW;
    const uint64_t step = thread_count();
    unsigned round = 0;
    bool go = true;

    for (uint64_t v = thread_index(); v < a.vectors && go; v += step) {
        fold_at<In, Out, Acc, N>(a, a.head + v * N);
        go = !aborted(a.signal, round++);
    }
    /* What no vector covers: before the first, behind the last, or everything. */
    const uint64_t body = a.vectors * N, rest = a.n - body;
    for (uint64_t r = thread_index(); r < rest && go; r += step) {
        fold_at<In, Out, Acc, 1>(a, r < a.head ? r : r + body);
        go = !aborted(a.signal, round++);
    }
    finish(a.signal);
}

#endif
