// Split activations x into two columns of 8-bit values (ggml-ext-act-prec.h): y = round(x) and r = 128 (x - y).
// The product's own quantizer then quantizes both and must reproduce the codes of y. So y is rounded with that quantizer's groups,
// scale format and rotation.
#pragma once

#include "quantize.cuh"
#include "ggml-ext-act-prec.h"

namespace ggml_ext {

// Which activations share a scale in a quantizer, and the format of that scale.
enum split_groups {
    SPLIT_THREADS_BF16, // block_q8 of quantize.cuh, for MMVQ
    SPLIT_32_FLOAT,     // block_q8_1_mmq, D4
    SPLIT_32_HALF,      // block_q8_1_mmq, DS4, and block_q8_1
    SPLIT_64_HALF,      // block_q8_1_mmq, D2S6
};

// Factor on y where the quantizer rounds its scale: the scale that it computes from y, with float error, then rounds to the scale
// of y, to nearest or up, and never to the next larger one.
constexpr float SPLIT_SHRINK = 1 - 1.0f/(1 << 16);

// Row (i1, i2, i3) has its y at i1*s[1] + i2*s[2] + i3*s[3], and its residual r floats later. In floats.
struct pair_strides {
    int64_t s[4], r;
};

// Grid x counts rows, y the parts of a row. Grid y and z are limited to 65,535, which the columns or tokens of one part of a product
// (act-prec-doubled.h) may exceed.
static dim3 row_grid(int64_t ne1, int64_t ne2, int64_t ne3, int64_t n_parts) {
    GGML_ASSERT(ne1*ne2*ne3 <= INT32_MAX && n_parts <= UINT16_MAX);
    return dim3(ne1*ne2*ne3, n_parts, 1);
}
struct row_index {
    int64_t i1, i2, i3;
    __device__ __forceinline__ row_index(uint32_t ne1, uint32_t ne2)
        : i1(blockIdx.x % ne1), i2(blockIdx.x / ne1 % ne2), i3(blockIdx.x / ne1 / ne2) {}
};

// Grid: rows, ne00/256 / N_WARPS_QUANTIZE. Strides in floats. A group is n_registers registers of n_lanes neighboring lanes. A group
// with Inf or NaN goes to y unchanged, with r = 0.
template <int n, bool rotated, split_groups groups>
__launch_bounds__(32*N_WARPS_QUANTIZE, 1)
static __global__ void split_activations(const float * x_ptr, float * y_ptr, int64_t ne00, int64_t s01, int64_t s02, int64_t s03,
                                         pair_strides y_strides, uint32_t ne1, uint32_t ne2) {
    constexpr bool threads     = groups == SPLIT_THREADS_BF16;
    constexpr int  n_lanes     = threads ? 4 : N_LANES<n>;
    constexpr int  n_registers = threads ? N_PER_LANE : (groups == SPLIT_64_HALF ? 64 : 32)/n_lanes;
    constexpr bool keeps_float = groups == SPLIT_32_FLOAT;
    // truncate the scale to the precision of bfloat16 or half: rounding down keeps the code of the largest value at 127
    constexpr uint32_t scale_bits = keeps_float ? 0xffffffff : threads ? 0xffff0000 : 0xffffe000;

    const int64_t kb   = (int64_t) blockIdx.y*N_WARPS_QUANTIZE + threadIdx.y; // block of 256 values
    const int     lane = threadIdx.x;
    if (kb*QK_K >= ne00) {
        return;
    }
    const row_index row(ne1, ne2);
    const float * x = x_ptr + row.i3*s03 + row.i2*s02 + row.i1*s01;
    float       * y = y_ptr + row.i3*y_strides.s[3] + row.i2*y_strides.s[2] + row.i1*y_strides.s[1];

    ggml_cuda_pdl_sync();
    int64_t j[N_PER_LANE]; // position in the row
    float   v[N_PER_LANE], r[N_PER_LANE];
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        j[i] = kb*QK_K + n*lane_block<n>(lane) + N_LANES<n>*i + block_lane<n>(lane);
        v[i] = j[i] < ne00 ? x[j[i]] : 0.0f;
    }
    if (rotated) {
        rotate<n>(v, lane);
    }
#pragma unroll
    for (int g = 0; g < N_PER_LANE; g += n_registers) {
        uint32_t bits = 0; // largest magnitude
#pragma unroll
        for (int i = g; i < g + n_registers; ++i) {
            bits = max(bits, magnitude_bits(v[i]));
        }
        bits = lanes_max<n_lanes>(bits);
        const float amax = __uint_as_float(bits);
        const bool  is_split = bits < 0x7f800000 && amax >= MIN_AMAX;
        const float d     = __uint_as_float(__float_as_uint(amax/127.0f) & scale_bits);
        const float inv_d = is_split ? 1.0f/d : 0.0f;
#pragma unroll
        for (int i = g; i < g + n_registers; ++i) {
            const float rounded = is_split ? d*(float) min(max(__float2int_rn(v[i]*inv_d), -127), 127) : v[i];
            r[i] = is_split ? (v[i] - rounded)*GGML_EXT_RESIDUAL_SCALE : 0.0f;
            v[i] = keeps_float ? rounded : rounded*SPLIT_SHRINK;
        }
    }
    if (rotated) {
        rotate_back<n>(v, lane);
        rotate_back<n>(r, lane);
    }
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        if (j[i] < ne00) {
            y[j[i]]               = v[i];
            y[j[i] + y_strides.r] = r[i];
        }
    }
}

// Split rows of ne00 activations for a product with weights of type_src0. Strides in floats.
static void split_activations_cuda(const float * x, float * y, ggml_type type_src0, split_groups groups, int64_t ne00, int64_t s01,
                                   int64_t s02, int64_t s03, const pair_strides & y_strides, int64_t ne1, int64_t ne2, int64_t ne3,
                                   cudaStream_t stream) {
    const int rotated_block = is_rotated(type_src0) ? block_size_of(type_src0) : 0;
    const dim3 grid = row_grid(ne1, ne2, ne3, ((ne00 + QK_K - 1)/QK_K + N_WARPS_QUANTIZE - 1)/N_WARPS_QUANTIZE);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, N_WARPS_QUANTIZE, 1), 0, stream);
    const auto launch = [&](auto kernel) {
        ggml_cuda_kernel_launch(kernel, params, x, y, ne00, s01, s02, s03, y_strides, (uint32_t) ne1, (uint32_t) ne2);
    };
#define GGML_EXT_SPLIT(groups)                                                                  \
    case groups: return rotated_block == 0   ? launch(split_activations<256, false, groups>)    \
                      : rotated_block == 256 ? launch(split_activations<256, true,  groups>)    \
                      : rotated_block == 64  ? launch(split_activations<64,  true,  groups>)    \
                                             : launch(split_activations<32,  true,  groups>);
    switch (groups) {
        GGML_EXT_SPLIT(SPLIT_THREADS_BF16)
        GGML_EXT_SPLIT(SPLIT_32_FLOAT)
        GGML_EXT_SPLIT(SPLIT_32_HALF)
        case SPLIT_64_HALF: return launch(split_activations<256, false, SPLIT_64_HALF>); // Q2_K
    }
#undef GGML_EXT_SPLIT
}

// --- results and expert ids ------------------------------------------------------------------------------------------

// sum = W y + W r/128. Grid: rows, ne0/256. Strides in floats.
static __global__ void add_residuals(const float * y_ptr, float * sum_ptr, int64_t ne0, pair_strides y_strides, int64_t s1, int64_t s2,
                                     int64_t s3, uint32_t ne1, uint32_t ne2) {
    const int64_t i0 = (int64_t) blockIdx.y*QK_K + threadIdx.y*32 + threadIdx.x;
    const row_index row(ne1, ne2);
    ggml_cuda_pdl_sync();
    if (i0 < ne0) {
        const float * y = y_ptr + row.i3*y_strides.s[3] + row.i2*y_strides.s[2] + row.i1*y_strides.s[1] + i0;
        sum_ptr[row.i3*s3 + row.i2*s2 + row.i1*s1 + i0] = y[0] + y[y_strides.r]*(1/GGML_EXT_RESIDUAL_SCALE);
    }
}

static void add_residuals_cuda(const float * y, float * sum, int64_t ne0, const pair_strides & y_strides, int64_t s1, int64_t s2,
                               int64_t s3, int64_t ne1, int64_t ne2, int64_t ne3, cudaStream_t stream) {
    const dim3 grid = row_grid(ne1, ne2, ne3, (ne0 + QK_K - 1)/QK_K);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, QK_K/32, 1), 0, stream);
    ggml_cuda_kernel_launch(add_residuals, params, y, sum, ne0, y_strides, s1, s2, s3, (uint32_t) ne1, (uint32_t) ne2);
}

// Repeat each token's experts for both of its columns. Grid: tokens. Stride of ids in elements.
static __global__ void double_ids(const int32_t * ids, int32_t * out, int64_t n_used, int64_t stride) {
    ggml_cuda_pdl_sync();
    for (int64_t i = threadIdx.x; i < n_used; i += 32) {
        const int32_t id = ids[blockIdx.x*stride + i];
        out[2*blockIdx.x*n_used + i] = out[(2*blockIdx.x + 1)*n_used + i] = id;
    }
}

static void double_ids_cuda(const int32_t * ids, int32_t * out, int64_t n_used, int64_t stride, int64_t n_tokens, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(dim3(n_tokens, 1, 1), dim3(32, 1, 1), 0, stream);
    ggml_cuda_kernel_launch(double_ids, params, ids, out, n_used, stride);
}

} // namespace ggml_ext
