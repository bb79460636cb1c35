// CUDA device code as host code: replaces the parts of upstream's common.cuh and of CUDA that cuda/ uses. The threads of a block are
// fibers of one thread, which switch where a shuffle waits for the rest of its warp.
#pragma once

#include "ggml-ext-base.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>

using std::max;
using std::min;

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(int64_t x = 1, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) int4 { int x, y, z, w; };
struct half { ggml_fp16_t bits; };
struct half2 { half x, y; };
struct nv_bfloat16 { ggml_bf16_t bits; };
typedef void * cudaStream_t;

extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace ggml_ext {
static inline uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t s) {
    const uint64_t bytes = (uint64_t) hi << 32 | lo;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t sel = s >> 4*i & 15;
        uint32_t byte = bytes >> 8*(sel & 7) & 0xff;
        if (sel & 8) { // replicate the sign bit
            byte = byte & 0x80 ? 0xff : 0;
        }
        out |= byte << 8*i;
    }
    return out;
}
static inline uint32_t select(uint32_t x, uint32_t y, uint32_t mask) { return (x & mask) | (y & ~mask); }
static inline uint32_t in_register(uint32_t x) { return x; }
template <typename T> static inline T __ldg(const T * p) { return *p; }
} // namespace ggml_ext
static inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, uint32_t n) { return (((uint64_t) hi << 32 | lo) << n % 32) >> 32; }
static inline uint32_t __byte_perm(uint32_t lo, uint32_t hi, uint32_t s) { return ggml_ext::prmt(lo, hi, s & 0x7777); }

static inline int ggml_cuda_dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) {
        c += (int8_t) (a >> 8*i)*(int8_t) (b >> 8*i);
    }
    return c;
}

static inline uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline float __half2float(half h) { return ggml_fp16_to_fp32(h.bits); }
static inline half2 make_half2(float x, float y) { return {{ggml_fp32_to_fp16(x)}, {ggml_fp32_to_fp16(y)}}; }
static inline half __float2half_ru(float x) { // x >= 0, Inf or NaN
    half h = {ggml_fp32_to_fp16(x)};
    h.bits += __half2float(h) < x;
    return h;
}
static inline float __fmul_rn(float a, float b) { return a*b; }
static inline int __float2int_rn(float x) { return (int) std::nearbyint(x); }

uint32_t cuda_host_shuffle(uint32_t value, int lane_mask);
template <typename T> static inline T __shfl_xor_sync(uint32_t, T value, int lane_mask, int) {
    uint32_t bits;
    static_assert(sizeof(T) == 4, "");
    memcpy(&bits, &value, 4);
    bits = cuda_host_shuffle(bits, lane_mask);
    memcpy(&value, &bits, 4);
    return value;
}

// Run body for every thread of every block, one block after the other.
void cuda_host_launch(dim3 grid, dim3 block, const std::function<void()> & body);

// Restrict later launches to the last n blocks of grid x.
extern "C" void cuda_host_run_last_blocks(unsigned n);

static inline void ggml_cuda_pdl_sync() {}
static inline void ggml_cuda_pdl_lc() {}

struct ggml_cuda_kernel_launch_params {
    dim3 block_nums, block_dims;
    ggml_cuda_kernel_launch_params(dim3 nums, dim3 dims, int, cudaStream_t) : block_nums(nums), block_dims(dims) {}
};
template <typename Kernel, typename... Args>
static inline void ggml_cuda_kernel_launch(Kernel kernel, const ggml_cuda_kernel_launch_params & p, Args... args) {
    cuda_host_launch(p.block_nums, p.block_dims, [=] { kernel(args...); });
}

template <ggml_type> struct ggml_cuda_type_traits;

// From upstream's mmq.cuh: activations, and the tile shapes of Q8_0 and Q8_1.
constexpr int QK8_1_MMQ = 4*QK8_1;
struct block_q8_1_mmq {
    union { float d4[4]; half2 ds4[4]; };
    int8_t qs[QK8_1_MMQ];
};
static_assert(sizeof(block_q8_1_mmq) == 4*sizeof(block_q8_1), "");

constexpr int MMQ_TILE_NE_K = 32;
struct tile_x_sizes { int qs; };
constexpr tile_x_sizes mmq_get_dp4a_tile_x_sizes(ggml_type, int I) { return {2*MMQ_TILE_NE_K*I + I}; }
constexpr int ggml_cuda_mmq_get_sram_stride(ggml_type, int, bool) { return 2*MMQ_TILE_NE_K + 2*MMQ_TILE_NE_K/8 + 4; }
constexpr int ggml_cuda_mmq_get_nthreads(ggml_type, int, bool) { return 256; }
constexpr int ggml_cuda_mmq_get_I(ggml_type, int, bool) { return 128; }
constexpr int ggml_cuda_get_physical_warp_size() { return 32; }
