// The one definition of the rotation R = H S: S flips the signs of fixed positions, H is the normalised 256-point
// Walsh-Hadamard matrix in Sylvester order, H[i][j] = (-1)^popcount(i & j) / 16. H H = I and S S = I, so R^-1 = S H, and
// <R w, R x> = <w, x>. H alone gathers constants, ramps and slow waves into few values; the signs, found by
// scripts/studies/rotation_signs.py, spread them like a bell. Types of 64 weights take the first 64 signs.
//
// Every backend computes the butterflies (u, v) -> (u + v, u - v) at strides 1, 2, 4, ... 128 in this order and
// multiplies by 1/16 (exact) last: float addition is not associative, so the order is part of the format of the
// tests' bit-exact comparisons, though not of the files.
#pragma once

#include "ggml-ext-common.h"
#include "types/codes.h"

static inline void ggml_ext_fwht_block(float x[QK_K]) {
    for (int h = 1; h < QK_K; h *= 2) {
        for (int i = 0; i < QK_K; i += 2*h) {
            for (int j = i; j < i + h; ++j) {
                const float u = x[j];
                const float v = x[j + h];
                x[j]     = u + v;
                x[j + h] = u - v;
            }
        }
    }
    for (int j = 0; j < QK_K; ++j) {
        x[j] *= 1.0f/16;
    }
}
static_assert(QK_K == 256, "the factor 1/16 is 1/sqrt(QK_K)");

// S: bit j % 32 of word j / 32 is set where the sign flips.
GGML_EXT_CONSTANT uint32_t ggml_ext_signs[QK_K/32] = GGML_EXT_SIGNS;

static inline void ggml_ext_flip_signs(float x[QK_K]) {
    for (int j = 0; j < QK_K; ++j) {
        x[j] = ggml_ext_signs[j/32] >> j%32 & 1 ? -x[j] : x[j];
    }
}

static inline void ggml_ext_rotate_block(float x[QK_K]) {
    ggml_ext_flip_signs(x);
    ggml_ext_fwht_block(x);
}

static inline void ggml_ext_rotate_block_back(float x[QK_K]) {
    ggml_ext_fwht_block(x);
    ggml_ext_flip_signs(x);
}
