// The rotation R = H S of a block of n = 256, 64 or 32 values. S flips the signs at fixed positions. H is the normalised Walsh-Hadamard
// matrix in Sylvester order, H[i][j] = (-1)^popcount(i & j) / sqrt(n). H H = S S = I, so R^-1 = S H and <R w, R x> = <w, x>.
// H alone would map constants and ramps to a few large values; the signs (types.toml) prevent that.
// Blocks of 64 and 32 use the first 64 and 32 signs.
//
// Every backend computes the butterflies (u, v) -> (u + v, u - v) at strides 1, 2, 4, ... n/2 in this order and multiplies by
// 1/sqrt(n) last, which is exact for 256 and 64. Tests compare bits, and float addition is not associative. Files do not depend on the
// order.
#pragma once

#include "ggml-ext-common.h"
#include "types/codes.h"

#define GGML_EXT_DEFINE_BUTTERFLIES(name, T)        \
    static inline void name(T * x, int n) {         \
        for (int h = 1; h < n; h *= 2) {            \
            for (int i = 0; i < n; i += 2*h) {      \
                for (int j = i; j < i + h; ++j) {   \
                    const T u = x[j];               \
                    const T v = x[j + h];           \
                    x[j]     = u + v;               \
                    x[j + h] = u - v;               \
                }                                   \
            }                                       \
        }                                           \
    }
GGML_EXT_DEFINE_BUTTERFLIES(ggml_ext_butterflies, float)

// 1/sqrt(n)
static inline double ggml_ext_rotation_scale(int n) {
    assert(n == 256 || n == 64 || n == 32);
    return n == 256 ? 1.0/16 : n == 64 ? 1.0/8 : 0.17677669529663688;
}

static inline void ggml_ext_fwht(float * x, int n) {
    ggml_ext_butterflies(x, n);
    for (int j = 0; j < n; ++j) {
        x[j] *= (float) ggml_ext_rotation_scale(n);
    }
}

// S: bit j % 32 of word j / 32 is set where the sign flips.
GGML_EXT_CONSTANT uint32_t ggml_ext_signs[QK_K/32] = GGML_EXT_SIGNS;

static inline void ggml_ext_flip_signs(float * x, int n) {
    for (int j = 0; j < n; ++j) {
        x[j] = ggml_ext_signs[j/32] >> j%32 & 1 ? -x[j] : x[j];
    }
}

static inline void ggml_ext_rotate_block(float * x, int n) {
    ggml_ext_flip_signs(x, n);
    ggml_ext_fwht(x, n);
}

static inline void ggml_ext_rotate_block_back(float * x, int n) {
    ggml_ext_fwht(x, n);
    ggml_ext_flip_signs(x, n);
}
