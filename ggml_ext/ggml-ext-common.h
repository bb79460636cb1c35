// What every type's header needs: half floats, QK_K, the unpack contract.
#pragma once

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
#define GGML_COMMON_DECL_CPP
#else
#define GGML_COMMON_DECL_C
#endif
#include "ggml-common.h"
#include "ggml-ext.h"

#define GGML_EXT_MAX_GROUPS 4

// Blocks of 64 that kernels take at a time.
enum { GGML_EXT_GROUP_BLOCKS = 4 };

// Tables that C++ uses in constant expressions.
#ifdef __cplusplus
#define GGML_EXT_CONSTANT static constexpr
#else
#define GGML_EXT_CONSTANT static const
#endif

// GGML_EXT_INLINE: functions of the formats that GPU kernels call too. ggml_half is a class in CUDA's sources and the bits
// of one elsewhere.
#ifdef __CUDACC__
#define GGML_EXT_INLINE static __host__ __device__ inline
GGML_EXT_INLINE ggml_half ggml_ext_half_from_bits(uint16_t bits) { return __ushort_as_half(bits); }
GGML_EXT_INLINE uint16_t ggml_ext_half_bits(ggml_half h) { return __half_as_ushort(h); }
GGML_EXT_INLINE float ggml_ext_half_to_float(ggml_half h) { return __half2float(h); }
#else
#define GGML_EXT_INLINE static inline
GGML_EXT_INLINE ggml_half ggml_ext_half_from_bits(uint16_t bits) { return bits; }
GGML_EXT_INLINE uint16_t ggml_ext_half_bits(ggml_half h) { return h; }
GGML_EXT_INLINE float ggml_ext_half_to_float(ggml_half h) { return ggml_fp16_to_fp32(h); }
#endif

// The scale of 8-bit activations whose largest rotated magnitude is amax, and the factor of their codes. False if amax is Inf or
// NaN: then the scale is NaN and so will the result be, as in float. Below 1e-36 127/amax would overflow, and all is zero.
static inline bool ggml_ext_begin_q8(float amax, float * d, float * inv_d) {
    if (!(amax <= FLT_MAX)) {
        *d = NAN;
        return false;
    }
    amax   = amax < 1e-36f ? 0.0f : amax;
    *inv_d = amax > 0.0f ? 127.0f/amax : 0.0f;
    *d     = amax/127.0f;
    return true;
}

// Kernels take group g of 32 codes together with group g + 4 (cpu/simd.h). Rotated activations lie in that order: group g begins
// here. Q8_KR is a block_q8_K whose qs and bsums do.
static inline int ggml_ext_group_at(int g) {
    return 64*(g%4) + 32*(g/4);
}

// Q8_KR64, activations rotated in blocks of 64: a row of n is n/256 of these groups of four blocks, rounded up. Each takes the
// room of a block, so that a row of any number of blocks has room; what is left of it is not used. A row is made and read as a
// whole (ggml_ext_first_block()). One scale for a group: the tiled GEMM has no more. Blocks behind the row's end are zero.
typedef struct {
    float  d[GGML_EXT_GROUP_BLOCKS];   // all alike
    float  sum[GGML_EXT_GROUP_BLOCKS]; // of a block's codes, exact
    int8_t qs[QK_K];                   // value 8*g + i of block b at 8*b + i of group g
} block_q8_kr64;
static_assert(sizeof(block_q8_kr64) == GGML_EXT_Q8_KR64_BLOCK_BYTES, "types.toml and the struct differ");

// One block after unpacking, the same integers on every backend:
//   value[j] = d * scale[j / group] * (q[j] - offset)
// group is the type's entry in types.toml; types with one scale set scale[0] = 1. Rotated types hold rotated values. Blocks of
// 64 leave the rest of q as it is.
struct ggml_ext_unpacked {
    int8_t  q[QK_K];
    int32_t scale[GGML_EXT_MAX_GROUPS];
    float   d;
    float   offset;
};

static inline bool ggml_ext_half_is_finite(ggml_half h) {
    return (ggml_ext_half_bits(h) & 0x7c00) != 0x7c00;
}
