// Codes of a block whose weights each take one of a few values, under a metric: the quadratic form of the block in place of the
// sum of squares. First segment after segment, errors fed back; then coordinate descent over the whole block. Every float
// operation has one order, so that the numpy reference gives the same bytes (py/ggml_ext/quants/_levels.py).
//
// What the parts are worth: e^T M e over w^T M w with moments of blocks, damping 0.01 and segments of 8, of Gaussian weights with
// moments made up (tests/encode/test_metric.py, 512 columns) and of a layer of the reference model with its own.
//                                        ITQ3_S            DITTO3            CCQ2
//   squared error                        0.0340  0.0192    0.0286  0.0178    0.1082  0.0713
//   a diagonal                           0.0070  0.0133    0.0151  0.0164    0.0270  0.0547
//   as it is                             0.0059  0.00307   0.0090  0.00320   0.0175  0.0121
//     without the descent over a block   0.0064  0.00354   0.0116  0.00392   0.0218  0.0154
//     without the one in segments        0.0065  0.00328
//     start without feedback             0.0086  0.00418
//     levels and codes once              0.0060  0.00316   0.0094  0.00342   0.0178  0.0122
//     five times                         0.0059  0.00307   0.0090  0.00319   0.0175  0.0121
//     first levels without a diagonal                      0.0126  0.00328   0.0206  0.0124
//   whole matrices, 512 columns          0.0042            0.0062            0.0132
#pragma once

#include "rows.h"

#ifndef EXT_LEVELS
#define EXT_LEVELS 8 // of a weight
#endif

enum {
    EXT_MAX_SWEEPS    = 4, // of a descent; it ends earlier when nothing changes
    EXT_LEVELS_ROUNDS = 3, // of levels and codes
};

struct ext_levels_block {
    const struct ggml_ext_metric * metric;
    int64_t first;
    float   x[QK_K], wish[QK_K]; // ext_rows_load()
    float   target[QK_K];        // what would cost nothing: the cost of values v is (target - v)^T B (target - v)
};

struct ext_levels_best {
    float   cost;
    float   level[EXT_LEVELS];
    uint8_t code[QK_K];
};

static inline __attribute__((always_inline)) float ext_dot(const float * a, const float * b) {
    ext_f32 sum[2] = {0};
    for (int i = 0; i < QK_K/4; ++i) {
        sum[i%2] += ext_load(a + 4*i)*ext_load(b + 4*i);
    }
    return ext_sum(sum);
}

// The level nearest to v, the higher one of equals, from code c on.
static inline int ext_nearest_level(const float middle[EXT_LEVELS - 1], float v, int c) {
    while (c < EXT_LEVELS - 1 && v >= middle[c]) {
        ++c;
    }
    while (c > 0 && !(v >= middle[c - 1])) {
        --c;
    }
    return c;
}

// Coordinate descent over n steps under the form, rows of `stride`: g is the form times target - values, and is kept so.
static inline __attribute__((always_inline)) void ext_descend(int n, const float * form, int stride, const float * level, const float * middle,
                                                              int n_sweeps, uint8_t * code, float * g) {
    bool changed = true;
    for (int sweep = 0; sweep < n_sweeps && changed; ++sweep) {
        changed = false;
        for (int i = 0; i < n; ++i) {
            const int   old  = code[i];
            const int   best = ext_nearest_level(middle, level[old] + g[i]/form[i*stride + i], old);
            if (best != old) {
                const float by = level[best] - level[old];
                for (int j = 0; j < n; ++j) {
                    g[j] -= form[i*stride + j]*by;
                }
                code[i] = (uint8_t) best;
                changed = true;
            }
        }
    }
}

static inline void ext_middles(const float level[EXT_LEVELS], float middle[EXT_LEVELS - 1]) {
    for (int k = 0; k < EXT_LEVELS - 1; ++k) {
        middle[k] = 0.5f*(level[k] + level[k + 1]);
    }
}

// First codes: each segment with the errors of those before it fed back.
static inline __attribute__((always_inline)) void ext_levels_start(const struct ext_levels_block * in, const float level[EXT_LEVELS],
                                                                   uint8_t code[QK_K]) {
    const struct ggml_ext_metric * m = in->metric;
    const int S = m->segment;
    float middle[EXT_LEVELS - 1], wish[QK_K], errors[QK_K];
    ext_middles(level, middle);
    memcpy(wish, in->wish, sizeof(wish));
    for (int s = 0; s < QK_K; s += S) {
        float r[METRIC_MAX_SEGMENT], g[METRIC_MAX_SEGMENT] = {0};
        metric_add_rows(S, metric_gains(m, in->first + s) + in->first%m->columns*S, s, errors, wish + s);
        for (int i = 0; i < S; ++i) {
            code[s + i] = (uint8_t) ext_nearest_level(middle, wish[s + i], EXT_LEVELS/2);
            r[i] = wish[s + i] - level[code[s + i]];
        }
        const float * form = metric_form(m, in->first + s);
        metric_add_rows(S, form, S, r, g);
        ext_descend(S, form, S, level, middle, EXT_MAX_SWEEPS, code + s, g);
        for (int i = s; i < s + S; ++i) {
            errors[i] = in->x[i] - level[code[i]];
        }
    }
}

// Better codes for ascending levels, kept if they are the best so far.
static inline __attribute__((always_inline)) void ext_levels_improve(const struct ext_levels_block * in, const float level[EXT_LEVELS],
                                                                     uint8_t code[QK_K], struct ext_levels_best * best) {
    const float * form = metric_block(in->metric, in->first);
    float middle[EXT_LEVELS - 1], e[QK_K], g[QK_K];
    ext_middles(level, middle);
    for (int i = 0; i < QK_K; ++i) {
        e[i] = in->target[i] - level[code[i]];
    }
    metric_form_times(QK_K, form, e, g);
    ext_descend(QK_K, form, QK_K, level, middle, EXT_MAX_SWEEPS, code, g);
    for (int i = 0; i < QK_K; ++i) {
        e[i] = in->target[i] - level[code[i]];
    }
    const float cost = ext_dot(e, g);
    if (cost < best->cost) {
        best->cost = cost;
        memcpy(best->level, level, sizeof(best->level));
        memcpy(best->code, code, sizeof(best->code));
    }
}

// Normal equations of the levels under fixed codes: a[k][l] sums the form over steps of code k and l, b[k] what the form makes of
// the target over those of code k.
static inline __attribute__((always_inline)) void ext_levels_normal(const struct ext_levels_block * in, const float pull[QK_K],
                                                                    const uint8_t code[QK_K], double a[EXT_LEVELS][EXT_LEVELS],
                                                                    double b[EXT_LEVELS]) {
    const float * form = metric_block(in->metric, in->first);
    float sums[EXT_LEVELS][QK_K] = {{0}};
    for (int j = 0; j < QK_K; ++j) {
        float * to = sums[code[j]];
        for (int i = 0; i < QK_K; ++i) {
            to[i] += form[j*QK_K + i];
        }
    }
    memset(a, 0, sizeof(double)*EXT_LEVELS*EXT_LEVELS);
    memset(b, 0, sizeof(double)*EXT_LEVELS);
    for (int j = 0; j < QK_K; ++j) {
        for (int k = 0; k < EXT_LEVELS; ++k) {
            a[code[j]][k] += (double) sums[k][j];
        }
        b[code[j]] += (double) pull[j];
    }
}

// Solves a x = b for a positive definite a of n*n, by Gaussian elimination without pivots, in place. Rows of zeros, of levels that no
// step has, give `given`.
static inline void ext_solve(int n, double * a, double * b, const float * given, double * x) {
    for (int k = 0; k < n; ++k) {
        if (!(a[k*n + k] > 0)) {
            a[k*n + k] = 1;
            b[k]       = (double) given[k];
        }
        for (int i = k + 1; i < n; ++i) {
            const double by = a[i*n + k]/a[k*n + k];
            for (int j = k; j < n; ++j) {
                a[i*n + j] -= by*a[k*n + j];
            }
            b[i] -= by*b[k];
        }
    }
    for (int k = n - 1; k >= 0; --k) {
        x[k] = b[k];
        for (int j = k + 1; j < n; ++j) {
            x[k] -= a[k*n + j]*x[j];
        }
        x[k] /= a[k*n + k];
    }
}
