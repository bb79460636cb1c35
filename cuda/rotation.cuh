// The rotation (ggml-ext-rotation.h) in one warp: lane l holds the values 32*i + l, i = 0 ... 7. Butterflies at strides 1 to 16
// are shuffles, at 32 to 128 registers: the reference's order, so that the results are its bits.
#pragma once

#include "common.cuh"
#include "types/codes.h"

namespace ggml_ext {

constexpr int N_PER_LANE = QK_K/32;

static __device__ __forceinline__ void fwht(float (&v)[N_PER_LANE], int lane) {
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
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
        v[i] *= 1.0f/16;
    }
}

// S of R = H S.
static __device__ __forceinline__ void flip_signs(float (&v)[N_PER_LANE], int lane) {
    constexpr uint32_t signs[N_PER_LANE] = GGML_EXT_SIGNS;
#pragma unroll
    for (int i = 0; i < N_PER_LANE; ++i) {
        v[i] = __uint_as_float(__float_as_uint(v[i]) ^ (signs[i] >> lane) << 31);
    }
}

static __device__ __forceinline__ void rotate(float (&v)[N_PER_LANE], int lane) {
    flip_signs(v, lane);
    fwht(v, lane);
}

static __device__ __forceinline__ void rotate_back(float (&v)[N_PER_LANE], int lane) {
    fwht(v, lane);
    flip_signs(v, lane);
}

} // namespace ggml_ext
