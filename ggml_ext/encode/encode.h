// What the encoders share. Sums run in 16 lanes that a halving tree adds up, whatever the vector width: compilers
// vectorise the lanes, and numpy can repeat the order exactly.
#pragma once

#include "../ggml-ext-common.h"
#include "../ggml-ext-fwht.h"

#include <float.h>
#include <math.h>

#define EXT_LANES    16

#define EXT_HALF_MAX 65504.0f
#define EXT_HALF_NAN ((ggml_half) 0x7e00)

static inline float ext_sum_lanes(float a[EXT_LANES]) {
    for (int w = EXT_LANES/2; w > 0; w /= 2) {
        for (int l = 0; l < w; ++l) {
            a[l] += a[l + w];
        }
    }
    return a[0];
}

// Rotates one block of weights into x. Returns false if a weight is NaN or Inf. Halves hold scales up to 65504, so
// rotated values saturate at eight times that: the block is then wrong by what no file could hold, but finite.
static inline bool ext_load_rotated(const float * src, float x[QK_K]) {
    bool finite = true;
    for (int j = 0; j < QK_K; ++j) {
        const float w = src[j];
        finite &= fabsf(w) <= FLT_MAX;
        x[j] = w > 1e30f ? 1e30f : w < -1e30f ? -1e30f : w; // keeps the transform's sums finite
    }
    ggml_ext_fwht_block(x);
    for (int j = 0; j < QK_K; ++j) {
        const float top = 8*EXT_HALF_MAX;
        x[j] = x[j] > top ? top : x[j] < -top ? -top : x[j];
    }
    return finite;
}

struct ext_block_stats {
    float min, max;
    float sum, mean;
    float energy; // sum of squares
    float sigma;  // standard deviation, population
};

static inline struct ext_block_stats ext_block_stats(const float x[QK_K]) {
    struct ext_block_stats s = {x[0], x[0], 0, 0, 0, 0};
    float sum[EXT_LANES] = {0}, energy[EXT_LANES] = {0}, var[EXT_LANES] = {0};
    for (int i = 0; i < QK_K; i += EXT_LANES) {
        for (int l = 0; l < EXT_LANES; ++l) {
            sum[l]    += x[i + l];
            energy[l] += x[i + l]*x[i + l];
            s.min = x[i + l] < s.min ? x[i + l] : s.min;
            s.max = x[i + l] > s.max ? x[i + l] : s.max;
        }
    }
    s.sum    = ext_sum_lanes(sum);
    s.energy = ext_sum_lanes(energy);
    s.mean   = s.sum*(1.0f/QK_K);
    for (int i = 0; i < QK_K; i += EXT_LANES) {
        for (int l = 0; l < EXT_LANES; ++l) {
            const float c = x[i + l] - s.mean;
            var[l] += c*c;
        }
    }
    s.sigma = sqrtf(ext_sum_lanes(var)*(1.0f/QK_K));
    return s;
}
