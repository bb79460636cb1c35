// Quantization of activations, fused with the rotation for rotated types: one launch in place of upstream's quantize_q8_1.
// A warp takes 256 values: one block, four blocks of 64 or eight of 32.
#pragma once

#include "rotation.cuh"
#include "mmq-alias.cuh"

namespace ggml_ext {

// Activations of one block of n = 256 weights, of two blocks of 64 or of four blocks of 32, in place of block_q8_1.
//   qs[k]   the 32 values that thread k multiplies, for two 16-byte loads: weight L*g + 4*k + b of unpack.cuh has its
//           activation at code_place(nibble_distance, g, b)
//   ds[k]   high half: scale as bfloat16, rounded up before the values are divided by it, so that |q| <= 127; low half: sum of
//           qs[k], for the offsets of the weights
// Short blocks share a struct because one of 72 or 36 bytes would not be aligned to 16. A block's threads follow those of the block before.
// Rows hold complete structs: upstream pads them to MATRIX_ROW_PADDING = 512 values.
template <int n> struct block_q8 {
    static constexpr int n_threads = n == QK_K ? 8 : 4; // of the block, or of the two or four blocks
    int8_t   qs[n_threads][4*N_WORDS];
    uint32_t ds[n_threads];
    __device__ __forceinline__ float d(int k) const { return __uint_as_float(ds[k] & 0xffff0000); }
    __device__ __forceinline__ int sum(int k) const { return (int16_t) ds[k]; }

    // The first thread of the block that upstream places at y. Upstream's pointer is this struct's plus a block_q8_1 of 36 bytes for each
    // thread of the blocks before, although the struct interleaves the data of its blocks. Its own address is a multiple of 16, so y/4 % 4
    // is the number of these threads.
    static __device__ __forceinline__ int first_thread(const block_q8_1 * y) { return n == QK_K ? 0 : (uintptr_t) y/4 % 4; }
};
static_assert(sizeof(block_q8<256>) == 256/QK8_1*sizeof(block_q8_1), "upstream allocates the buffer");
static_assert(sizeof(block_q8<64>) == 2*64/QK8_1*sizeof(block_q8_1), "of a pair");
static_assert(sizeof(block_q8<32>) == 4*sizeof(block_q8_1), "of four blocks");
static_assert(sizeof(block_q8<256>) % 16 == 0 && sizeof(block_q8<64>) % 16 == 0, "16-byte loads");

constexpr int   N_WARPS_QUANTIZE = 4;
constexpr float MIN_AMAX         = 1.5e-36f; // 127*FLT_MIN: upstream compiles with subnormals flushed to zero

// Load 256 values of a row in the layout of rotation.cuh and rotate them if `rotated`. The row has n_left values from x on, a
// multiple of n; values after them are zero.
template <int n, bool rotated>
static __device__ __forceinline__ void load_values(const float * x, int64_t n_left, int lane, float (&v)[N_PER_LANE]) {
    const int  first  = n*lane_block<n>(lane); // first value of this lane's block
    const bool inside = first < n_left;
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        v[i] = inside ? x[first + N_LANES<n>*i + block_lane<n>(lane)] : 0.0f;
    }
    if (rotated) {
        rotate<n>(v, lane);
    }
}

// |v| as integer bits, which compare as NaN > Inf > finite.
static __device__ __forceinline__ uint32_t magnitude_bits(float v) {
    return __float_as_uint(v) & 0x7fffffff;
}

// Maximum over `width` neighboring lanes, a power of two. Ampere and later reduce a full warp in one instruction.
template <int width>
static __device__ __forceinline__ uint32_t lanes_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
    if constexpr (width == 32) {
        return __reduce_max_sync(0xffffffff, v);
    } else
#endif
    {
#pragma unroll
        for (int h = 1; h < width; h *= 2) {
            v = max(v, __shfl_xor_sync(0xffffffff, v, h, 32));
        }
        return v;
    }
}

// Sum over `width` neighboring lanes. Upstream's warp_reduce_sum<4> sums over the full warp instead.
template <int width>
static __device__ __forceinline__ int lanes_sum(int v) {
#if __CUDA_ARCH__ >= 800
    if constexpr (width == 32) {
        return __reduce_add_sync(0xffffffff, v);
    } else
#endif
    {
#pragma unroll
        for (int h = 1; h < width; h *= 2) {
            v += __shfl_xor_sync(0xffffffff, v, h, 32);
        }
        return v;
    }
}

// Quantize the 256 values of a warp to the blocks at y. Inf or NaN among a thread's values makes its scale NaN, so that it
// propagates to the result. Values with a subnormal scale become zero.
template <int n, int nibble_distance>
static __device__ __forceinline__ void quantize_values(const float (&v)[N_PER_LANE], block_q8<n> * y, int lane) {
    uint32_t bits = 0; // largest magnitude
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        bits = max(bits, magnitude_bits(v[i]));
    }
    bits = lanes_max<4>(bits); // lanes 4*k ... 4*k + 3 hold the values that thread k multiplies
    const bool     finite = bits < 0x7f800000;
    const float    amax   = __uint_as_float(bits);
    const uint32_t d_bits = !finite ? 0x7fc00000 : amax < MIN_AMAX ? 0 : (__float_as_uint(amax/127.0f) + 0xffff) & 0xffff0000;
    const float    inv_d  = finite && amax >= MIN_AMAX ? 1.0f/__uint_as_float(d_bits) : 0.0f;
    const int      b      = lane%4, k = lane/4 % block_q8<n>::n_threads;
    y += lane/4 / block_q8<n>::n_threads;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        const int q = finite ? __float2int_rn(v[i]*inv_d) : 0;
        y->qs[k][code_place(nibble_distance, i, b)] = (int8_t) q;
        sum += q;
    }
    sum = lanes_sum<4>(sum);
    if (b == 0) {
        y->ds[k] = d_bits | (uint16_t) sum;
    }
}

// Grid: ne0/256 / N_WARPS_QUANTIZE, ne1, ne2*ne3. Strides in elements. Values from ne00 to ne0 are zero.
template <int n, bool rotated, int nibble_distance>
__launch_bounds__(32*N_WARPS_QUANTIZE, 1)
static __global__ void quantize_q8(const float * x_ptr, void * vy_ptr, int64_t ne00, int64_t s01, int64_t s02, int64_t s03,
                                   int64_t ne0, uint32_t ne1, uint32_t ne2) {
    ggml_cuda_pdl_lc();
    const int64_t kb   = (int64_t) blockIdx.x*N_WARPS_QUANTIZE + threadIdx.y; // block of 256 values
    const int     lane = threadIdx.x;
    if (kb >= ne0/QK_K) {
        return;
    }
    const int64_t i1 = blockIdx.y, i2 = blockIdx.z % ne2, i3 = blockIdx.z / ne2;
    const float * x  = x_ptr + i3*s03 + i2*s02 + i1*s01 + kb*QK_K;
    const int64_t iy = ((i3*ne2 + i2)*ne1 + i1)*(ne0/QK_K) + kb;

    ggml_cuda_pdl_sync();
    float v[N_PER_LANE];
    load_values<n, rotated>(x, ne00 - kb*QK_K, lane, v);
    quantize_values<n, nibble_distance>(v, (block_q8<n> *) ((block_q8<QK_K> *) vy_ptr + iy), lane);
}

static void quantize_row_q8_cuda(const float * x, void * vy, ggml_type type_src0, int64_t ne00, int64_t s01, int64_t s02,
                                 int64_t s03, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, cudaStream_t stream) {
    GGML_ASSERT(is_weight_type(type_src0) && ne00 % block_size_of(type_src0) == 0 && ne0 % QK_K == 0);
    const dim3 grid((ne0/QK_K + N_WARPS_QUANTIZE - 1)/N_WARPS_QUANTIZE, ne1, ne2*ne3);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, N_WARPS_QUANTIZE, 1), 0, stream);
    const auto launch = [&](auto kernel) {
        ggml_cuda_kernel_launch(kernel, params, x, vy, ne00, s01, s02, s03, ne0, (uint32_t) ne1, (uint32_t) ne2);
    };
    switch (type_src0) {
#define GGML_EXT_X(NAME, name)                                                                                                               \
    case GGML_TYPE_##NAME:                                                                                                                   \
        return launch(quantize_q8<traits<block_##name>::block_size, traits<block_##name>::rotated, unpacker<block_##name>::nibble_distance>);
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return;
    }
}

// --- MMQ -------------------------------------------------------------------------------------------------------------

// The smallest half >= x, or Inf.
static __device__ __forceinline__ float half_above(float x) {
    return __half2float(__float2half_ru(x));
}

// Upstream's quantize_mmq_q8_1 for rotated rows. has_sum = false: one float scale per 32 values (D4). has_sum = true: scale and
// sum as halves (DS4); the scale is rounded up before use and the sum is that of the rounded values, because the zero point
// multiplies both. Values from ne00 to ne0 are zero.
//
// Grid: columns (scatter: tokens), ne0/256 / N_WARPS_QUANTIZE, ne2*ne3. With scatter, a token's values go to its n_expert_used
// columns ids[token*n_expert_used + slot]; else column i is row ids[i] of x, or i without ids. No pointer is __restrict__: the
// compiler may move such reads before ggml_cuda_pdl_sync() (upstream's GGML_CUDA_RESTRICT).
template <int n, bool has_sum, bool scatter>
__launch_bounds__(32*N_WARPS_QUANTIZE, 1)
static __global__ void quantize_rotated_mmq(const float * x_all, const int32_t * ids, void * vy, int64_t ne00, int64_t s01,
                                            int64_t s02, int64_t s03, int64_t ne0, int64_t ne1, int64_t ne2, int n_expert_used) {
    const int64_t kb   = (int64_t) blockIdx.y*N_WARPS_QUANTIZE + threadIdx.y; // block of 256 values
    const int     lane = threadIdx.x;
    if (kb >= ne0/QK_K) {
        return;
    }
    ggml_cuda_pdl_sync();
    const int64_t row = scatter ? blockIdx.x*s02 // tokens are dimension 2 of x
                                : blockIdx.z/ne2*s03 + blockIdx.z%ne2*s02 + (ids ? ids[blockIdx.x] : (int64_t) blockIdx.x)*s01;
    const float * x = x_all + row + kb*QK_K;
    float v[N_PER_LANE];
    load_values<n, true>(x, ne00 - kb*QK_K, lane, v);

    // a group of 32 values is n_registers registers of all lanes of a block
    constexpr int n_lanes = N_LANES<n>, n_registers = 32/n_lanes, n_groups = N_PER_LANE/n_registers;
    int8_t   q[N_PER_LANE];
    uint32_t ds[n_groups]; // equal in all lanes of a block
#pragma unroll
    for (int g = 0; g < n_groups; ++g) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = g*n_registers; i < (g + 1)*n_registers; ++i) {
            bits = max(bits, magnitude_bits(v[i]));
        }
        bits = lanes_max<n_lanes>(bits);
        const float amax  = bits < 0x7f800000 ? __uint_as_float(bits) : __uint_as_float(0x7fc00000);
        const float d     = has_sum ? half_above(amax/127.0f) : amax/127.0f;
        const float inv_d = d > 0 && d < FLT_MAX ? 1.0f/d : 0.0f; // NaN and Inf scales propagate to the result
        int sum = 0;
#pragma unroll
        for (int i = g*n_registers; i < (g + 1)*n_registers; ++i) {
            const int rounded = d < FLT_MAX ? __float2int_rn(v[i]*inv_d) : 1; // 1, so that a NaN or Inf scale reaches the sum
            q[i] = (int8_t) (rounded < -127 ? -127 : rounded > 127 ? 127 : rounded);
            sum += q[i];
        }
        if (has_sum) {
            const half2 scale_sum = make_half2(d, d*(float) lanes_sum<n_lanes>(sum));
            memcpy(&ds[g], &scale_sum, sizeof(ds[g]));
        } else {
            ds[g] = __float_as_uint(d);
        }
    }
    const int     block = lane_block<n>(lane), l = block_lane<n>(lane);
    const int64_t first = blockIdx.z*ne1*(ne0/QK8_1_MMQ);
    for (int slot = 0; slot < (scatter ? n_expert_used : 1); ++slot) {
        const int64_t column = scatter ? ids[(int64_t) blockIdx.x*n_expert_used + slot] : (int64_t) blockIdx.x;
        block_q8_1_mmq * y  = (block_q8_1_mmq *) vy + first + 2*kb*ne1 + column; // first 128 values; the others are ne1 blocks later
#pragma unroll
        for (int i = 0; i < N_PER_LANE; ++i) {
            const int j = n*block + n_lanes*i; // of lane 0 of the block
            y[j/QK8_1_MMQ*ne1].qs[j%QK8_1_MMQ + l] = q[i];
        }
#pragma unroll
        for (int g = 0; g < n_groups; ++g) {
            const int j = n_groups*block + g; // group 0 to 7
            if (l == g) {
                ((uint32_t *) y[j/4*ne1].d4)[j%4] = ds[g];
            }
        }
    }
}

// Whether the type needs quantize_rotated_mmq. Upstream's kernel serves types without rotation.
static inline bool quantizes_for_mmq(ggml_type type_src0) {
    return is_weight_type(type_src0) && is_rotated(type_src0);
}

template <bool scatter>
static void quantize_mmq_cuda(const float * x, const int32_t * ids, void * vy, ggml_type type_src0, int64_t ne00, int64_t s01,
                              int64_t s02, int64_t s03, int64_t ne0, int64_t n_columns, int64_t ne1, int64_t ne2, int64_t ne3,
                              int n_expert_used, cudaStream_t stream) {
    static_assert(QK_K == 2*QK8_1_MMQ, "a warp fills two blocks");
    GGML_ASSERT(ne00 % block_size_of(type_src0) == 0 && ne0 % QK_K == 0);
    const dim3 grid(n_columns, (ne0/QK_K + N_WARPS_QUANTIZE - 1)/N_WARPS_QUANTIZE, ne2*ne3);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, N_WARPS_QUANTIZE, 1), 0, stream);
    const bool has_sum = mmq_alias(type_src0) == GGML_TYPE_Q5_1; // stands for types with zero points
    GGML_ASSERT(!has_sum || block_size_of(type_src0) == QK_K); // only 256-weight types have zero points per block
    const auto kernel = has_sum                          ? quantize_rotated_mmq<256, true,  scatter>
                      : block_size_of(type_src0) == QK_K ? quantize_rotated_mmq<256, false, scatter>
                      : block_size_of(type_src0) == 64   ? quantize_rotated_mmq<64,  false, scatter>
                                                         : quantize_rotated_mmq<32,  false, scatter>;
    ggml_cuda_kernel_launch(kernel, params, x, ids, vy, ne00, s01, s02, s03, ne0, ne1, ne2, n_expert_used);
}

} // namespace ggml_ext
