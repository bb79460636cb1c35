// Matrix-vector products: the vec_dot function of each type for upstream's mul_mat_vec_q.
#pragma once

#include "all.cuh"
#include "quantize.cuh"

namespace ggml_ext {

// Dot product of one thread's 32 weights with the activations of thread k. The integer sums are below 2^24, so float holds them exactly.
template <typename B>
static __device__ __forceinline__ float dot(const unpacked & u, const block_q8<traits<B>::block_size> & y, int k) {
    const int4 * q = (const int4 *) y.qs[k];
    const int4 y0 = q[0], y1 = q[1];
    const int  w[N_WORDS] = {y0.x, y0.y, y0.z, y0.w, y1.x, y1.y, y1.z, y1.w};
    float sum;
    if constexpr (traits<B>::n_groups == 1) {
        static_assert(32*127*traits<B>::q_max < 1 << 24, "float holds the sums");
        int qy = 0;
#pragma unroll
        for (int g = 0; g < N_WORDS; ++g) {
            qy = ggml_cuda_dp4a((int) u.q[g], w[g], qy);
        }
        sum = (float) qy - u.offset*(float) y.sum(k);
    } else {
        static_assert(traits<B>::block_size == QK_K && traits<B>::group == 64, "a scale for two words");
        static_assert(32*127*16*traits<B>::q_max < 1 << 24, "float holds the sums");
        int sum_qy = 0, sum_y = 0;
#pragma unroll
        for (int s = 0; s < traits<B>::n_groups; ++s) {
            sum_qy += u.scale[s]*ggml_cuda_dp4a((int) u.q[2*s], w[2*s], ggml_cuda_dp4a((int) u.q[2*s + 1], w[2*s + 1], 0));
            sum_y  += u.scale[s]*ggml_cuda_dp4a(0x01010101,     w[2*s], ggml_cuda_dp4a(0x01010101,         w[2*s + 1], 0));
        }
        sum = (float) sum_qy - u.offset*(float) sum_y;
    }
    return u.d*y.d(k)*sum;
}

// vec_dot_q_cuda_t: the part of block kbx of vbq that thread iqs/VDR computes. bq8_1 is upstream's address of that block's activations. A block_q8
// holds the activations of several short blocks, and the address tells which of them this is. kbx does not: it counts from the start of
// the tensor, and a row may begin at any kbx.
template <typename B>
static __device__ __forceinline__ float vec_dot(const void * __restrict__ vbq, const block_q8_1 * __restrict__ bq8_1,
                                                const int & kbx, const int & iqs) {
    const int k     = iqs/GGML_EXT_VDR_MMVQ;
    typedef block_q8<traits<B>::block_size> block_y;
    const int first = block_y::first_thread(bq8_1);
    return dot<B>(unpacker<B>::unpack(((const B *) vbq)[kbx], k), *(const block_y *) (bq8_1 - first), first + k);
}

// The threads of mul_mat_vec_q for rows of n_columns weights: upstream's, or fewer warps. A warp multiplies 1024 weights per iteration. A warp with
// fewer iterations than others waits for them and keeps its registers, so choose the number of warps with the fewest such waits. Use at least
// two unless one covers the row, because the number of blocks per multiprocessor is limited.
template <ggml_type type> static dim3 threads(dim3 upstream, uint32_t n_columns) {
    if constexpr (is_weight_type(type)) {
        const uint32_t n_iterations = (n_columns + 1023)/1024;
        const auto     reserved     = [&](uint32_t n_warps) { return (n_iterations + n_warps - 1)/n_warps*n_warps; };
        for (uint32_t n_warps = upstream.y; n_warps > 1; --n_warps) {
            if (reserved(n_warps) < reserved(upstream.y)) {
                upstream.y = n_warps;
            }
        }
        upstream.y = std::min(upstream.y, n_iterations);
    }
    return upstream;
}

// Thread blocks per multiprocessor for __launch_bounds__: sixteen warps of 128 registers. Without the limit ptxas takes up to 170 for eight columns,
// without fewer instructions.
constexpr __host__ __device__ int min_blocks(ggml_type type, int n_warps) {
    return is_weight_type(type) ? 16/n_warps : 1;
}

// The number of warps that threads() chose; upstream's types have a constant.
template <ggml_type type> static __device__ __forceinline__ int launched_warps(int upstream) {
    return is_weight_type(type) ? blockDim.y : upstream;
}

} // namespace ggml_ext
