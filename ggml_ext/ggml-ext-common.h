// What every type header needs: half floats, QK_K, the unpack contract, the activation types.
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

// Blocks of 64, and of 32, that kernels process together.
enum { GGML_EXT_GROUP_BLOCKS = 4, GGML_EXT_GROUP_BLOCKS_32 = 8 };

// For tables that C++ uses in constant expressions.
#ifdef __cplusplus
#define GGML_EXT_CONSTANT static constexpr
#else
#define GGML_EXT_CONSTANT static const
#endif

// For format functions that GPU kernels share. ggml_half is a class in CUDA sources and a uint16_t elsewhere.
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

// Scale and inverse scale of 8-bit activations with the largest rotated magnitude amax. Return false if amax is Inf or NaN: the scale
// becomes NaN, and so does the product, as in float. Below 1e-36, 127/amax would overflow, so everything becomes zero.
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

// Offset of group g of 32 rotated activations. Kernels process groups g and g + 4 together (cpu/simd.h), so these are adjacent.
// Q8_KR is a block_q8_K whose qs and bsums are in this order.
static inline int ggml_ext_group_offset(int g) {
    return 64*(g%4) + 32*(g/4);
}

// Q8_KR64: activations rotated in blocks of 64. A row of n has n/256 of these structs, rounded up, four blocks each; missing blocks of
// the last one are zero. ggml reserves one struct per block, so a row of any length fits. A row is written and read in full
// (cpu/mul-mat.cpp). The four blocks share one scale, because the GEMM has one per column and 256 values.
typedef struct {
    float  d[GGML_EXT_GROUP_BLOCKS];   // four equal values
    float  sum[GGML_EXT_GROUP_BLOCKS]; // sum of the codes of each block, exact
    int8_t qs[QK_K];                   // value 8*g + i of block b at 8*b + i of group g
} block_q8_kr64;
static_assert(sizeof(block_q8_kr64) == GGML_EXT_Q8_KR64_BLOCK_BYTES, "types.toml and the struct differ");

// Q8_KR32: the same for eight blocks of 32.
typedef struct {
    float  d[GGML_EXT_GROUP_BLOCKS];
    float  sum[GGML_EXT_GROUP_BLOCKS_32];
    int8_t qs[QK_K];                   // value 4*g + i of block b at 4*b + i of group g
} block_q8_kr32;
static_assert(sizeof(block_q8_kr32) == GGML_EXT_Q8_KR32_BLOCK_BYTES, "types.toml and the struct differ");

// The unpack contract: one block as integers, the same on every backend.
//   value[j] = d * scale[j / group] * (q[j] - offset)
// group comes from types.toml; types with one scale set scale[0] = 1. Values of rotated types are rotated. Blocks of n weights use q[0..n-1].
struct ggml_ext_unpacked {
    int8_t  q[QK_K];
    int32_t scale[GGML_EXT_MAX_GROUPS];
    float   d;
    float   offset;
};

static inline bool ggml_ext_half_is_finite(ggml_half h) {
    return (ggml_ext_half_bits(h) & 0x7c00) != 0x7c00;
}
