// The rotation (ggml-ext-fwht.h) in one warp: lane l holds the values 32*i + l, i = 0 ... 7. Butterflies at strides 1 to 16
// are shuffles, at 32 to 128 registers: the reference's order, so that the results are its bits.
#pragma once

#include "common.cuh"

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

} // namespace ggml_ext
