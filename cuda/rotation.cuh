// The rotation (ggml-ext-rotation.h) of 256 values in one warp: one block, four blocks of 64 or eight of 32. A block of n values occupies
// L = n/8 neighboring lanes; lane l holds the values L*i + l, i = 0 ... 7. This is the layout of unpack.cuh with four lanes per
// thread. Butterflies at strides 1 to L/2 are shuffles, those at L to n/2 use registers. The order is the reference's, so the
// results are bit-equal.
#pragma once

#include "common.cuh"
#include "types/codes.h"

namespace ggml_ext {

constexpr int N_PER_LANE = QK_K/32;
template <int n> constexpr int N_LANES = n/N_PER_LANE; // per block

// The block of a lane within its warp, and the lane within that block; constants for the compiler where n = 256.
template <int n> static __device__ __forceinline__ int lane_block(int lane) { return n == QK_K ? 0 : lane/N_LANES<n>; }
template <int n> static __device__ __forceinline__ int block_lane(int lane) { return n == QK_K ? lane : lane%N_LANES<n>; }

template <int n>
static __device__ __forceinline__ void fwht(float (&v)[N_PER_LANE], int lane) {
    static_assert(n == 256 || n == 64 || n == 32, "block sizes");
    constexpr float scale = n == 256 ? 1.0f/16 : n == 64 ? 1.0f/8 : 0.17677669529663688f; // 1/sqrt(n)
#pragma unroll
    for (int h = 1; h < N_LANES<n>; h *= 2) {
#pragma unroll
        for (int i = 0; i < N_PER_LANE; ++i) {
            const float other = __shfl_xor_sync(0xffffffff, v[i], h, 32);
            v[i] = lane & h ? other - v[i] : v[i] + other;
        }
    }
#pragma unroll
    for (int h = 1; h < N_PER_LANE; h *= 2) {
#pragma unroll
        for (int i = 0; i < N_PER_LANE; ++i) {
            if (!(i & h)) {
                const float a = v[i], b = v[i + h];
                v[i]     = a + b;
                v[i + h] = a - b;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        v[i] *= scale;
    }
}

// Apply the signs S of R = H S.
template <int n>
static __device__ __forceinline__ void flip_signs(float (&v)[N_PER_LANE], int lane) {
    constexpr uint32_t signs[QK_K/32] = GGML_EXT_SIGNS;
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        const int first = N_LANES<n>*i; // value of lane 0 in register i
        v[i] = __uint_as_float(__float_as_uint(v[i]) ^ (signs[first/32] >> (first%32 + block_lane<n>(lane))) << 31);
    }
}

template <int n>
static __device__ __forceinline__ void rotate(float (&v)[N_PER_LANE], int lane) {
    flip_signs<n>(v, lane);
    fwht<n>(v, lane);
}

template <int n>
static __device__ __forceinline__ void rotate_back(float (&v)[N_PER_LANE], int lane) {
    fwht<n>(v, lane);
    flip_signs<n>(v, lane);
}

} // namespace ggml_ext
