/* SPDX-License-Identifier: MIT */
#include "proto/types.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[HRP_NDTYPES] = {
    [HRP_F32] = {"f32", 4}, [HRP_F64] = {"f64", 8}, [HRP_F16] = {"f16", 2}, [HRP_BF16] = {"bf16", 2},
    [HRP_I8] = {"i8", 1},   [HRP_U8] = {"u8", 1},   [HRP_I32] = {"i32", 4}, [HRP_U32] = {"u32", 4},
    [HRP_I64] = {"i64", 8}, [HRP_U64] = {"u64", 8},
};

static const char *const redops[HRP_NREDOPS] = {"sum", "prod", "min", "max", "avg"};
static const char *const colls[HRP_NCOLLS] = {"all_reduce", "broadcast", "reduce_scatter", "all_gather",
                                              "barrier"};

size_t hrp_dtype_size(unsigned dtype)
{
    return dtype < HRP_NDTYPES ? dtypes[dtype].size : 0;
}

const char *hrp_dtype_name(unsigned dtype)
{
    return dtype < HRP_NDTYPES ? dtypes[dtype].name : "unknown type";
}

const char *hrp_redop_name(unsigned redop)
{
    return redop < HRP_NREDOPS ? redops[redop] : "unknown reduction";
}

const char *hrp_coll_name(unsigned coll)
{
    return coll < HRP_NCOLLS ? colls[coll] : "unknown collective";
}

uint32_t hrp_sig_segments(const struct hrp_sig *sig, uint32_t nranks)
{
    return sig->coll == HRP_REDUCE_SCATTER || sig->coll == HRP_ALL_GATHER ? nranks : 1;
}

uint64_t hrp_sig_bytes(const struct hrp_sig *sig, uint32_t nranks)
{
    return sig->count * hrp_dtype_size(sig->dtype) * hrp_sig_segments(sig, nranks);
}

int hrp_sig_check(const struct hrp_sig *sig, uint32_t nranks)
{
    if (sig->coll >= HRP_NCOLLS || sig->dtype >= HRP_NDTYPES || sig->redop >= HRP_NREDOPS ||
        sig->reserved != 0)
        return -EINVAL;
    if (nranks == 0 || sig->root >= nranks || (sig->coll != HRP_BROADCAST && sig->root != 0))
        return -EINVAL;
    if (sig->coll == HRP_BARRIER && sig->count != 0)
        return -EINVAL;
    uint64_t unit = (uint64_t)hrp_dtype_size(sig->dtype) * hrp_sig_segments(sig, nranks);
    if (sig->count > (UINT64_C(1) << 62) / unit)
        return -EINVAL;
    return 0;
}

const char *hrp_sig_text(const struct hrp_sig *sig, char *buf, size_t len)
{
    int n = snprintf(buf, len, "%s of %" PRIu64 " x %s", hrp_coll_name(sig->coll), sig->count,
                     hrp_dtype_name(sig->dtype));
    if (n > 0 && (size_t)n < len) {
        if (sig->coll == HRP_ALL_REDUCE || sig->coll == HRP_REDUCE_SCATTER)
            snprintf(buf + n, len - (size_t)n, ", %s", hrp_redop_name(sig->redop));
        else if (sig->coll == HRP_BROADCAST)
            snprintf(buf + n, len - (size_t)n, ", root %" PRIu32, sig->root);
    }
    return buf;
}
