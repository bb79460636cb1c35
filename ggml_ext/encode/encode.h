// What the encoders share. An encoder is one function:
//   ggml_ext_encode_<type>(src, dst, n_rows, row_blocks, importance, params)
// src holds n_rows rows of row_blocks blocks of unrotated weights; importance has a weight of the squared error per column, or is NULL.
// Sums run in eight lanes that a halving tree adds: two vectors of four, an order that numpy repeats exactly.
#pragma once

#include "../ggml-ext-common.h"
#include "../ggml-ext-rotation.h"

#include <float.h>
#include <math.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Builds for any x86-64 compile the hot functions for newer instruction sets too; the CPU chooses at run time. musl has no ifuncs,
// and ThreadSanitizer does not work before they are resolved.
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__AVX2__) && !defined(__SANITIZE_THREAD__)
#define EXT_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define EXT_CLONES
#endif

#define EXT_HALF_MAX 65504.0f
#define EXT_HALF_NAN ((ggml_half) 0x7e00)

typedef float   ext_f32 __attribute__((vector_size(16))); // four of the eight lanes
typedef int32_t ext_i32 __attribute__((vector_size(16)));

static inline ext_f32 ext_load(const float * p) {
    ext_f32 v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline ext_f32 ext_clamp(ext_f32 v, float lo, float hi) {
    const ext_f32 vlo = {lo, lo, lo, lo}, vhi = {hi, hi, hi, hi};
#if defined(__SSE2__)
    return (ext_f32) _mm_min_ps(_mm_max_ps((__m128) v, (__m128) vlo), (__m128) vhi);
#else
    const ext_i32 above = v > vlo;
    v = (ext_f32) (((ext_i32) v & above) | ((ext_i32) vlo & ~above));
    const ext_i32 below = v < vhi;
    return (ext_f32) (((ext_i32) v & below) | ((ext_i32) vhi & ~below));
#endif
}

static inline float ext_sum(const ext_f32 v[2]) {
    const ext_f32 h = v[0] + v[1];
    return (h[0] + h[2]) + (h[1] + h[3]);
}

// Rotate a block of n weights into x. Return false if a weight is NaN or Inf. Scales are halves, so rotated values are clamped to eight
// times the largest half; a block beyond that range is wrong, but finite.
static inline bool ext_load_rotated(const float * src, float * x, int n) {
    bool finite = true;
    for (int j = 0; j < n; ++j) {
        const float w = src[j];
        finite &= fabsf(w) <= FLT_MAX;
        x[j] = w > 1e30f ? 1e30f : w < -1e30f ? -1e30f : w; // the sums of the transform stay finite
    }
    ggml_ext_rotate_block(x, n);
    for (int j = 0; j < n; ++j) {
        const float limit = 8*EXT_HALF_MAX;
        x[j] = x[j] > limit ? limit : x[j] < -limit ? -limit : x[j];
    }
    return finite;
}

struct ext_block_stats {
    float min, max;
    float sum, mean;
    float energy; // sum of squares
    float sigma;  // of the population
};

static inline struct ext_block_stats ext_block_stats(const float x[QK_K]) {
    struct ext_block_stats s = {x[0], x[0], 0, 0, 0, 0};
    ext_f32 sum[2] = {0}, energy[2] = {0}, var[2] = {0};
    for (int i = 0; i < QK_K/4; ++i) {
        const ext_f32 v = ext_load(x + 4*i);
        sum[i%2]    += v;
        energy[i%2] += v*v;
    }
    s.sum    = ext_sum(sum);
    s.energy = ext_sum(energy);
    s.mean   = s.sum*(1.0f/QK_K);
    for (int i = 0; i < QK_K/4; ++i) {
        const ext_f32 v = ext_load(x + 4*i) - s.mean;
        var[i%2] += v*v;
    }
    s.sigma = sqrtf(ext_sum(var)*(1.0f/QK_K));
    for (int j = 1; j < QK_K; ++j) {
        s.min = x[j] < s.min ? x[j] : s.min;
        s.max = x[j] > s.max ? x[j] : s.max;
    }
    return s;
}
