// Dequantization: full tensors for cuBLAS, get_rows and copies, all by one kernel. A warp dequantizes 256 weights.
#pragma once

#include "all.cuh"
#include "rotation.cuh"
#include "supports.h"
#include "convert.cuh"

namespace ggml_ext {

constexpr int N_WARPS_DEQUANTIZE = 4;

// Dequantize the 256/block_size blocks at x to y[0..255]. The row has n_left more blocks; nothing is written beyond them.
template <typename B, typename T>
static __device__ __forceinline__ void dequantize_blocks(const B * x, T * y, int64_t n_left, int lane) {
    constexpr int n = traits<B>::block_size, n_lanes = N_LANES<n>;
    const int  block  = lane_block<n>(lane), l = block_lane<n>(lane);
    const bool inside = block < n_left;
    const unpacked u = unpack_by_group<B>(x[inside ? block : 0], l/4);
    float v[N_PER_LANE];
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        const int q = u.q[i] >> 8*(l%4) & 0xff;
        // no FMA with the sums of the rotation: the results would differ from the reference
        v[i] = __fmul_rn(traits<B>::n_groups == 1 ? u.d : __fmul_rn(u.d, (float) u.scale[i/2]), (float) q - u.offset);
    }
    if (traits<B>::rotated) {
        rotate_back<n>(v, lane);
    }
    if (inside) {
#pragma unroll
        for (int i = 0; i < N_PER_LANE; ++i) {
            y[n*block + n_lanes*i + l] = ggml_cuda_cast<T>(v[i]);
        }
    }
}

// Row (i0, i1, i2) of the result is row (i, i1, i2) of x, with i = ids[i0*s10 + i1*s11 + i2*s12], or i0 without ids.
// nb: strides of x in bytes; s: other strides in elements.
struct row_map {
    int64_t         n_blocks;   // per row
    int64_t         ne0, ne1, ne2;
    size_t          nb1, nb2, nb3;
    int64_t         s1, s2, s3;
    const int32_t * ids;
    int64_t         s10, s11, s12;
};

// Thread blocks per row.
template <typename B>
static __host__ __device__ __forceinline__ int64_t row_chunks(const row_map & m) {
    constexpr int n_blocks = N_BLOCKS_256<B>*N_WARPS_DEQUANTIZE;
    return (m.n_blocks + n_blocks - 1)/n_blocks;
}

template <typename B, typename T>
__launch_bounds__(32*N_WARPS_DEQUANTIZE, 1)
static __global__ void dequantize_rows(const void * x, T * y, const row_map m) {
    ggml_cuda_pdl_sync();
    const int64_t n_chunks = row_chunks<B>(m);
    const int64_t i0       = blockIdx.x/n_chunks;
    const int64_t ib       = (blockIdx.x%n_chunks*N_WARPS_DEQUANTIZE + threadIdx.y)*N_BLOCKS_256<B>;
    if (ib >= m.n_blocks) {
        return;
    }
    for (int64_t i12 = blockIdx.y; i12 < m.ne1*m.ne2; i12 += gridDim.y) {
        const int64_t i1 = i12%m.ne1, i2 = i12/m.ne1;
        const int64_t i  = m.ids ? m.ids[i0*m.s10 + i1*m.s11 + i2*m.s12] : i0;
        const B * row = (const B *) ((const char *) x + i*m.nb1 + i1*m.nb2 + i2*m.nb3);
        dequantize_blocks(row + ib, y + i0*m.s1 + i1*m.s2 + i2*m.s3 + ib*traits<B>::block_size, m.n_blocks - ib, threadIdx.x);
    }
}

template <typename B, typename T>
static void dequantize_rows_cuda(const void * x, T * y, const row_map & m, cudaStream_t stream) {
    const int64_t n_x = row_chunks<B>(m)*m.ne0, n_y = m.ne1*m.ne2;
    GGML_ASSERT(n_x <= INT32_MAX);
    if (n_x == 0 || n_y == 0) {
        return;
    }
    const dim3 grid(n_x, n_y < UINT16_MAX ? n_y : UINT16_MAX, 1);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, N_WARPS_DEQUANTIZE, 1), 0, stream);
    ggml_cuda_kernel_launch(dequantize_rows<B, T>, params, x, y, m);
}

// to_t_nc_cuda_t: strides of x in blocks, y contiguous.
template <typename B, typename T>
static void dequantize_nc_cuda(const void * x, T * y, int64_t ne00, int64_t ne01, int64_t ne02, int64_t ne03,
                               int64_t s01, int64_t s02, int64_t s03, cudaStream_t stream) {
    GGML_ASSERT(ne00 % traits<B>::block_size == 0);
    dequantize_rows_cuda<B>(x, y, {ne00/traits<B>::block_size, ne01, ne02, ne03, s01*sizeof(B), s02*sizeof(B), s03*sizeof(B),
                                   ne00, ne00*ne01, ne00*ne01*ne02, nullptr, 0, 0, 0}, stream);
}

// to_t_cuda_t: k contiguous weights.
template <typename B, typename T>
static void dequantize_cuda(const void * x, T * y, int64_t k, cudaStream_t stream) {
    dequantize_nc_cuda<B>(x, y, k, 1, 1, 1, 0, 0, 0, stream);
}

// Takes the arguments of upstream's get_rows_cuda().
template <typename B, typename T>
static void get_rows_cuda(const void * src0_d, const int32_t * src1_d, T * dst_d, int64_t ne00, size_t nb01, size_t nb02,
                          size_t nb03, int64_t ne10, int64_t ne11, int64_t ne12, size_t nb10, size_t nb11, size_t nb12,
                          size_t nb1, size_t nb2, size_t nb3, cudaStream_t stream) {
    GGML_ASSERT(ne00 % traits<B>::block_size == 0);
    const auto n = [](size_t bytes, size_t size) { return (int64_t) (bytes/size); };
    dequantize_rows_cuda<B>(src0_d, dst_d, {ne00/traits<B>::block_size, ne10, ne11, ne12, nb01, nb02, nb03, n(nb1, sizeof(T)),
                                            n(nb2, sizeof(T)), n(nb3, sizeof(T)), src1_d, n(nb10, 4), n(nb11, 4), n(nb12, 4)}, stream);
}

// Copy tensors for which can_copy() is true.
template <typename B>
static void copy_cuda(const ggml_tensor * src, ggml_tensor * dst, cudaStream_t stream) {
    const auto run = [&](auto * y) {
        const int64_t size = sizeof(*y);
        dequantize_rows_cuda<B>(src->data, y, {src->ne[0]/traits<B>::block_size, src->ne[1], src->ne[2], src->ne[3], src->nb[1],
                                               src->nb[2], src->nb[3], (int64_t) dst->nb[1]/size, (int64_t) dst->nb[2]/size,
                                               (int64_t) dst->nb[3]/size, nullptr, 0, 0, 0}, stream);
    };
    switch (dst->type) {
        case GGML_TYPE_F32:  return run((float *)       dst->data);
        case GGML_TYPE_F16:  return run((half *)        dst->data);
        case GGML_TYPE_BF16: return run((nv_bfloat16 *) dst->data);
        default:             GGML_ABORT("%s: no copy to %s", __func__, ggml_type_name(dst->type));
    }
}

static inline void copy_cuda(const ggml_tensor * src, ggml_tensor * dst, cudaStream_t stream) {
    switch (src->type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return copy_cuda<block_##name>(src, dst, stream);
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: GGML_ABORT("%s: no copy from %s", __func__, ggml_type_name(src->type));
    }
}

} // namespace ggml_ext

// Cases for upstream's switches.
#define GGML_EXT_CONVERT_CASE(NAME, name)    case GGML_TYPE_##NAME: return ggml_ext::dequantize_cuda<block_##name>;
#define GGML_EXT_CONVERT_NC_CASE(NAME, name) case GGML_TYPE_##NAME: return ggml_ext::dequantize_nc_cuda<block_##name>;
