// Metal kernels for the ggml-ext types. scripts/build/metal_library.py writes this file with its includes expanded, as a library next
// to upstream's: if it does not compile on a Mac, upstream types still run there.
#include "common.h"
#include "../ggml_ext/ggml-ext-types.h"
#include "../ggml_ext/types/codes.h"
#include "args.h"
#include "unpack.metal"
#include "all.metal"
#include "rotation.metal"
#include "get_rows.metal"
#include "mul_mv.metal"
#include "dequantize.metal"
#include "mul_mm.metal"

// upstream's mul_mm takes blocks of 16*nl weights
#define GGML_EXT_MUL_MM(B)                                                                                                       \
    half, half4x4, simdgroup_half8x8, half, half2x4, simdgroup_half8x8, B, ggml_ext_lanes<B>::n/16, ggml_ext_dequantize<B, half4x4>, \
    float, float4x4, float, float2x4

// these function types do not depend on the block
typedef decltype(kernel_ext_get_rows<block_itq3_s>)                 ggml_ext_get_rows_t;
typedef decltype(kernel_ext_mul_mv<block_itq3_s, 1>)                ggml_ext_mul_mv_t;
typedef decltype(kernel_ext_mul_mv_id<block_itq3_s>)                ggml_ext_mul_mv_id_t;
typedef decltype(kernel_mul_mm<GGML_EXT_MUL_MM(block_itq3_s)>)      ggml_ext_mul_mm_t;
typedef decltype(kernel_mul_mm_id<GGML_EXT_MUL_MM(block_itq3_s)>)   ggml_ext_mul_mm_id_t;

#include "instances.metal"
