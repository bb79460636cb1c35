// Matrix-matrix products: tile loaders for upstream's MMQ.
//
// A tile holds int8 values and one scale per 32 weights. Centering the codes removes the offset without rounding:
// int8 = factor*code - factor*offset with factor 1 or 2. DITTO5's offset 63.5 gives 2*code - 127 and half the scale.
// Accumulators of 32 products are at most 32*127*127 < 2^19, which a float represents exactly.
//
// Each ITQ3_S block has its own zero point z: the tile holds code - 4 with scale d and minimum d*(4 - z) as a half. z is near
// 3.5, so the minimum is a tenth of the product and its rounding error 2^-11 of that.
#pragma once

#include "mmq-alias.cuh"

namespace ggml_ext {

template <typename B> struct tile {
    static constexpr bool has_minimum = unpacker<B>::own_offset;
    static constexpr int  factor      = unpacker<B>::offset == (int) unpacker<B>::offset ? 1 : 2;
    static constexpr int  centre      = (int) (factor*unpacker<B>::offset);
    static_assert(centre <= 127 && factor*traits<B>::q_max - centre <= 127 && centre == factor*unpacker<B>::offset, "int8 holds the codes");
    static_assert(factor*traits<B>::q_max + 128 - centre <= 255, "no carry between bytes");

    static __device__ __forceinline__ int centred(uint32_t q) {
        return (int) ((factor*q + 0x01010101u*(128 - centre)) ^ 0x80808080);
    }
    // scale of the 32 weights of group g
    static __device__ __forceinline__ float scale(const unpacked & u, int g) {
        const float d = u.d*(1.0f/factor);
        if constexpr (traits<B>::n_groups == 1) {
            return d;
        } else { // selects instead of a dynamic index, which would move the array to local memory
            return d*(float) (g < 4 ? (g < 2 ? u.scale[0] : u.scale[1]) : (g < 6 ? u.scale[2] : u.scale[3]));
        }
    }
    static __device__ __forceinline__ float minimum(const unpacked & u) { return u.d*(unpacker<B>::offset - u.offset); }
};

} // namespace ggml_ext

// ggml_cuda_mmq_load_tiles_t: load 256 weights of each of I rows, from block kbx0 on, into 64 words per row.
// Tiles for tensor cores store the scales in each row. Tiles for DP4A store them after all rows: eight per row, one word of
// padding every four rows.
//
// With shorter blocks, a row may end inside its last 256 weights. The loader then reads the start of the next row, or after
// the last row upstream's zeroed padding to a multiple of 512 weights. The activations there have q = 0 and d = 0
// (quantize.cuh), so finite scales give exact zeros. A non-finite scale spoils the next row's own results anyway.
template <ggml_type type, int J, bool fallback, bool mma>
static __device__ __forceinline__ void ggml_ext_mmq_load_tiles(const char * __restrict__ x, int * __restrict__ x_tile, const int kbx0,
                                                               const int i_max, const int stride) {
    typedef typename ggml_ext::block_of<type>::type B;
    typedef ggml_ext::tile<B> tile;
    constexpr int warp_size = ggml_cuda_get_physical_warp_size();
    constexpr int nwarps    = ggml_cuda_mmq_get_nthreads(type, J, fallback) / warp_size;
    constexpr int I         = ggml_cuda_mmq_get_I(type, J, fallback);
    constexpr int n_threads = ggml_ext::N_THREADS_256; // per row
    constexpr int T         = ggml_ext::N_THREADS<B>;  // per block
    constexpr int nrows     = warp_size/n_threads;
    constexpr int qs_stride = mma ? ggml_cuda_mmq_get_sram_stride(type, J, fallback) : 2*MMQ_TILE_NE_K + 1;
    int * x_scales = x_tile + (mma ? 2*MMQ_TILE_NE_K : mmq_get_dp4a_tile_x_sizes(type, I).qs);

    const int k = threadIdx.x % n_threads, block = k/T;
#pragma unroll
    for (int i0 = 0; i0 < I; i0 += nwarps*nrows) {
        int i = i0 + threadIdx.y*nrows + threadIdx.x/n_threads;
        if (fallback) {
            i = min(i, i_max);
        }
        const ggml_ext::unpacked u = ggml_ext::unpack_by_group<B>(((const B *) x)[kbx0 + i*stride + block], k%T);
        int * words = x_tile + i*qs_stride + T*ggml_ext::N_WORDS*block + k%T;
#pragma unroll
        for (int g = 0; g < ggml_ext::N_WORDS; ++g) {
            words[T*g] = tile::centred(u.q[g]);
        }
        // scale k covers 32 weights of the block that thread k unpacks
        int * scale_ptr = x_scales + (mma ? i*qs_stride : i*(MMQ_TILE_NE_K/4) + i/4) + k;
        if constexpr (tile::has_minimum) {
            *(half2 *) scale_ptr = make_half2(tile::scale(u, k%T), tile::minimum(u));
        } else {
            *(float *) scale_ptr = tile::scale(u, k%T);
        }
    }
}

#ifdef __CUDACC__
template <ggml_type type, int J, bool fallback>
static constexpr __device__ ggml_cuda_mmq_util_funcs ggml_ext_mmq_util_funcs() {
    constexpr bool has_minimum = ggml_ext::tile<typename ggml_ext::block_of<type>::type>::has_minimum;
#ifdef TURING_MMA_AVAILABLE
    return ggml_cuda_mmq_util_funcs(-1, ggml_ext_mmq_load_tiles<type, J, fallback, true>,
        has_minimum ? ggml_cuda_mmq_vec_dot_q8_1_q8_1_mma<type, J, fallback>
                    : ggml_cuda_mmq_vec_dot_q8_0_q8_1_mma<type, J, fallback, MMQ_Q8_1_DS_LAYOUT_D4>,
        ggml_cuda_mmq_write_back_mma<type, J, fallback>);
#else
    return ggml_cuda_mmq_util_funcs(VDR_Q8_0_Q8_1_MMQ, ggml_ext_mmq_load_tiles<type, J, fallback, false>,
        has_minimum ? ggml_cuda_mmq_vec_dot_q8_1_q8_1_dp4a<type, J, fallback> : ggml_cuda_mmq_vec_dot_q8_0_q8_1_dp4a<type, J, fallback>,
        ggml_cuda_mmq_write_back_dp4a<type, J, fallback>);
#endif // TURING_MMA_AVAILABLE
}
#endif // __CUDACC__
