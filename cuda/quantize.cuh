// Quantisation of activations for our types, with the rotation inside for those that need it: one launch in place of
// upstream's quantize_q8_1, one warp for 256 values.
#pragma once

#include "rotation.cuh"
#include "mmq-alias.cuh"

namespace ggml_ext {

// Takes the place of eight block_q8_1: what thread k of a block multiplies lies together, 32 bytes for two loads of 16, and
// has a scale of its own. qs[k][4*g + b] belongs to weight 32*g + 4*k + b.
//
// ds[k]: high half the scale as bfloat16, with the range of float; rounded up before it is used, so that it is exact.
// Low half the sum of qs[k], 32*127 at most: products need it for the offsets of the weights.
struct block_q8 {
    int8_t   qs[N_THREADS][4*N_WORDS];
    uint32_t ds[N_THREADS];
    __device__ __forceinline__ float d(int k) const { return __uint_as_float(ds[k] & 0xffff0000); }
    __device__ __forceinline__ int sum(int k) const { return (int16_t) ds[k]; }
};
static_assert(sizeof(block_q8) == QK_K/QK8_1*sizeof(block_q8_1), "upstream allocates the buffer");
static_assert(sizeof(block_q8) % 16 == 0, "16-byte loads");

constexpr int   N_WARPS_QUANTIZE = 4;
constexpr float MIN_AMAX         = 1.5e-36f; // 127*FLT_MIN: upstream compiles so that subnormal numbers are zero

// The values 32*i + lane of a block, rotated or not; zero outside of the row.
template <bool rotated>
static __device__ __forceinline__ void load_block(const float * x, bool inside, int lane, float (&v)[N_PER_LANE]) {
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        v[i] = inside ? x[32*i + lane] : 0.0f;
    }
    if (rotated) {
        rotate(v, lane);
    }
}

// The bits of a magnitude; as integers, NaN > Inf > numbers.
static __device__ __forceinline__ uint32_t magnitude_bits(float v) {
    return __float_as_uint(v) & 0x7fffffff;
}

// The largest of `width` neighbouring lanes, a power of two; of a warp in one instruction since Ampere.
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

// Quantises one block whose value 32*i + lane is v[i]. A group with Inf or NaN gets the scale NaN, so that the result
// shows it, as in float; one whose scale would be subnormal is zero.
static __device__ __forceinline__ void quantize_block(const float (&v)[N_PER_LANE], block_q8 & y, int lane) {
    uint32_t bits = 0; // of the largest
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        bits = max(bits, magnitude_bits(v[i]));
    }
    bits = lanes_max<4>(bits); // lanes 4*k ... 4*k + 3 are group k
    const bool     finite = bits < 0x7f800000;
    const float    amax   = __uint_as_float(bits);
    const uint32_t d_bits = !finite ? 0x7fc00000 : amax < MIN_AMAX ? 0 : (__float_as_uint(amax/127.0f) + 0xffff) & 0xffff0000;
    const float    inv_d  = finite && amax >= MIN_AMAX ? 1.0f/__uint_as_float(d_bits) : 0.0f;
    const int      k      = lane/4, b = lane%4;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        const int q = finite ? __float2int_rn(v[i]*inv_d) : 0;
        y.qs[k][4*i + b] = (int8_t) q;
        sum += q;
    }
#pragma unroll
    for (int h = 1; h < 4; h *= 2) { // upstream's warp_reduce_sum<4> would add up the whole warp
        sum += __shfl_xor_sync(0xffffffff, sum, h, 32);
    }
    if (b == 0) {
        y.ds[k] = d_bits | (uint16_t) sum;
    }
}

// Grid: blocks of a row / N_WARPS_QUANTIZE, ne1, ne2*ne3. Values from ne00 to ne0 are zero; strides in elements.
template <bool rotated>
__launch_bounds__(32*N_WARPS_QUANTIZE, 1)
static __global__ void quantize_q8(const float * x_ptr, void * vy_ptr, int64_t ne00, int64_t s01, int64_t s02, int64_t s03,
                                   int64_t ne0, uint32_t ne1, uint32_t ne2) {
    ggml_cuda_pdl_lc();
    const int64_t ib   = (int64_t) blockIdx.x*N_WARPS_QUANTIZE + threadIdx.y;
    const int     lane = threadIdx.x;
    if (ib >= ne0/QK_K) {
        return;
    }
    const int64_t i1 = blockIdx.y, i2 = blockIdx.z % ne2, i3 = blockIdx.z / ne2;
    const float * x  = x_ptr + i3*s03 + i2*s02 + i1*s01 + ib*QK_K;
    block_q8    * y  = (block_q8 *) vy_ptr + ((i3*ne2 + i2)*ne1 + i1)*(ne0/QK_K) + ib;
    const bool inside = ib < ne00/QK_K;

    ggml_cuda_pdl_sync();
    float v[N_PER_LANE];
    load_block<rotated>(x, inside, lane, v);
    quantize_block(v, *y, lane);
}

static void quantize_row_q8_cuda(const float * x, void * vy, ggml_type type_src0, int64_t ne00, int64_t s01, int64_t s02,
                                 int64_t s03, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, cudaStream_t stream) {
    GGML_ASSERT(ne00 % QK_K == 0 && ne0 % QK_K == 0);
    const int64_t n_blocks = ne0/QK_K;
    const dim3 grid((n_blocks + N_WARPS_QUANTIZE - 1)/N_WARPS_QUANTIZE, ne1, ne2*ne3);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, N_WARPS_QUANTIZE, 1), 0, stream);
    ggml_cuda_kernel_launch(is_rotated(type_src0) ? quantize_q8<true> : quantize_q8<false>, params, x, vy, ne00, s01, s02, s03, ne0,
                            (uint32_t) ne1, (uint32_t) ne2);
}

// --- for MMQ ---------------------------------------------------------------------------------------------------------

// The least half that is not below x; Inf where there is none.
static __device__ __forceinline__ float half_above(float x) {
    return __half2float(__float2half_ru(x));
}

// As upstream's quantize_mmq_q8_1, of the rotated row: block_q8_1_mmq with a float scale for 32 values (D4), or with scale
// and sum as halves (DS4); there the scale is rounded up before it is used, so that it is exact, and the sum is that of the
// rounded values, since weights with a zero point multiply both. Values from ne00 to ne0 are zero.
//
// Grid: columns (scattered: tokens), blocks of a row / N_WARPS_QUANTIZE, ne2*ne3. Scattered, a token's values go to each of
// its n_expert_used columns ids[token*n_expert_used + slot]; else column i is row ids[i] of x, or i without ids. No pointer
// is __restrict__: reads through such may pass ggml_cuda_pdl_sync() (upstream's GGML_CUDA_RESTRICT).
template <bool has_sum, bool scatter>
__launch_bounds__(32*N_WARPS_QUANTIZE, 1)
static __global__ void quantize_rotated_mmq(const float * x_all, const int32_t * ids, void * vy, int64_t ne00, int64_t s01,
                                            int64_t s02, int64_t s03, int64_t ne0, int64_t ne1, int64_t ne2, int n_expert_used) {
    const int64_t kb   = (int64_t) blockIdx.y*N_WARPS_QUANTIZE + threadIdx.y; // of 256 values
    const int     lane = threadIdx.x;
    if (kb >= ne0/QK_K) {
        return;
    }
    ggml_cuda_pdl_sync();
    const int64_t row = scatter ? blockIdx.x*s02
                                : blockIdx.z/ne2*s03 + blockIdx.z%ne2*s02 + (ids ? ids[blockIdx.x] : (int64_t) blockIdx.x)*s01;
    const float * x = x_all + row + kb*QK_K;
    float v[N_PER_LANE];
    load_block<true>(x, kb < ne00/QK_K, lane, v);

    int8_t   q[N_PER_LANE];
    uint32_t ds[N_PER_LANE]; // the same in every lane
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        const uint32_t bits  = lanes_max<32>(magnitude_bits(v[i]));
        const float    amax  = bits < 0x7f800000 ? __uint_as_float(bits) : __uint_as_float(0x7fc00000);
        const float    d     = has_sum ? half_above(amax/127.0f) : amax/127.0f;
        const float    inv_d = d > 0 && d < FLT_MAX ? 1.0f/d : 0.0f; // a scale of NaN or Inf reaches the result by itself
        const int      n     = d < FLT_MAX ? __float2int_rn(v[i]*inv_d) : 1;
        q[i] = (int8_t) (n < -127 ? -127 : n > 127 ? 127 : n);
        if (has_sum) {
            const half2 both = make_half2(d, d*(float) warp_reduce_sum<32>((int) q[i]));
            memcpy(&ds[i], &both, sizeof(ds[i]));
        } else {
            ds[i] = __float_as_uint(d);
        }
    }
    const int64_t first = blockIdx.z*ne1*(ne0/QK8_1_MMQ);
    for (int slot = 0; slot < (scatter ? n_expert_used : 1); ++slot) {
        const int64_t column = scatter ? ids[(int64_t) blockIdx.x*n_expert_used + slot] : (int64_t) blockIdx.x;
#pragma unroll
        for (int half_block = 0; half_block < 2; ++half_block) {
            block_q8_1_mmq & y = ((block_q8_1_mmq *) vy)[first + (2*kb + half_block)*ne1 + column];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                y.qs[32*i + lane] = q[4*half_block + i];
                if (lane == i) {
                    ((uint32_t *) y.d4)[i] = ds[4*half_block + i];
                }
            }
        }
    }
}

// Whether the kernel above takes the place of upstream's. Types that are not rotated need nothing of their own.
static inline bool quantizes_for_mmq(ggml_type type_src0) {
    return is_weight_type(type_src0) && is_rotated(type_src0);
}

template <bool scatter>
static void quantize_mmq_cuda(const float * x, const int32_t * ids, void * vy, ggml_type type_src0, int64_t ne00, int64_t s01,
                              int64_t s02, int64_t s03, int64_t ne0, int64_t n_columns, int64_t ne1, int64_t ne2, int64_t ne3,
                              int n_expert_used, cudaStream_t stream) {
    static_assert(QK_K == 2*QK8_1_MMQ, "a block is two of theirs");
    GGML_ASSERT(ne00 % QK_K == 0 && ne0 % QK_K == 0);
    const dim3 grid(n_columns, (ne0/QK_K + N_WARPS_QUANTIZE - 1)/N_WARPS_QUANTIZE, ne2*ne3);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, N_WARPS_QUANTIZE, 1), 0, stream);
    const bool has_sum = mmq_alias(type_src0) == GGML_TYPE_Q5_1;
    ggml_cuda_kernel_launch(has_sum ? quantize_rotated_mmq<true, scatter> : quantize_rotated_mmq<false, scatter>, params, x, ids, vy,
                            ne00, s01, s02, s03, ne0, ne1, ne2, n_expert_used);
}

} // namespace ggml_ext
