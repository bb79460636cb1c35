// The one definition of the rotation: y = H x with H the normalised 256-point Walsh-Hadamard matrix in Sylvester
// order, H[i][j] = (-1)^popcount(i & j) / 16, so H H = I.
//
// Every backend computes the butterflies (u, v) -> (u + v, u - v) at strides 1, 2, 4, ... 128 in this order and
// multiplies by 1/16 (exact) last: float addition is not associative, so the order is part of the format of the
// tests' bit-exact comparisons, though not of the files.
#pragma once

#include "ggml-ext-common.h"

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
