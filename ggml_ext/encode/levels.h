// Encode a block whose weights each take one of a few levels, under a Hessian: segment by segment with error feedback (metric.h), then
// coordinate descent over the full block. docs/results/encoders.md has what each part gains. Every float operation has one order, so
// that the numpy reference gives the same bytes (py/ggml_ext/quants/_levels.py).
#pragma once

#include "rows.h"

#ifndef EXT_LEVELS
#define EXT_LEVELS 8 // per weight
#endif

enum {
    EXT_MAX_SWEEPS    = 4, // of a descent, which ends when nothing changes
    EXT_LEVELS_ROUNDS = 3, // of levels and codes in turn
};

struct ext_levels_block {
    const struct ggml_ext_metric * metric;
    int64_t first;
    float   x[QK_K];       // the weights, by step
    float   goal[QK_K];    // x plus the feedback from earlier blocks
    float   optimum[QK_K]; // the values that would cost nothing: metric_find_optimum()
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

// Return the level nearest to v (of two equals the higher), searching from code c.
static inline int ext_nearest_level(const float middle[EXT_LEVELS - 1], float v, int c) {
    while (c < EXT_LEVELS - 1 && v >= middle[c]) {
        ++c;
    }
    while (c > 0 && !(v >= middle[c - 1])) {
        --c;
    }
    return c;
}

// Coordinate descent over n steps with the Hessian H, rows of `stride`. g = H (optimum - values), updated with each step.
static inline __attribute__((always_inline)) void ext_descend(int n, const float * H, int stride, const float * level, const float * middle,
                                                              int n_sweeps, uint8_t * code, float * g) {
    bool changed = true;
    for (int sweep = 0; sweep < n_sweeps && changed; ++sweep) {
        changed = false;
        for (int i = 0; i < n; ++i) {
            const int   old  = code[i];
            const int   best = ext_nearest_level(middle, level[old] + g[i]/H[i*stride + i], old);
            if (best != old) {
                const float delta = level[best] - level[old];
                for (int j = 0; j < n; ++j) {
                    g[j] -= H[i*stride + j]*delta;
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

// Choose first codes: segment by segment with error feedback.
static inline __attribute__((always_inline)) void ext_levels_init(const struct ext_levels_block * in, const float level[EXT_LEVELS],
                                                                  uint8_t code[QK_K]) {
    const struct ggml_ext_metric * m = in->metric;
    const int S = m->segment;
    float middle[EXT_LEVELS - 1], goal[QK_K], errors[QK_K];
    ext_middles(level, middle);
    memcpy(goal, in->goal, sizeof(goal));
    for (int s = 0; s < QK_K; s += S) {
        float r[METRIC_MAX_SEGMENT], g[METRIC_MAX_SEGMENT] = {0};
        metric_add_rows(S, metric_L(m, in->first + s) + in->first%m->columns*S, s, errors, goal + s);
        for (int i = 0; i < S; ++i) {
            code[s + i] = (uint8_t) ext_nearest_level(middle, goal[s + i], EXT_LEVELS/2);
            r[i] = goal[s + i] - level[code[s + i]];
        }
        const float * D = metric_D(m, in->first + s);
        metric_add_rows(S, D, S, r, g);
        ext_descend(S, D, S, level, middle, EXT_MAX_SWEEPS, code + s, g);
        for (int i = s; i < s + S; ++i) {
            errors[i] = in->x[i] - level[code[i]];
        }
    }
}

// Improve the codes for ascending levels; keep them if they are the best so far.
static inline __attribute__((always_inline)) void ext_levels_improve(const struct ext_levels_block * in, const float level[EXT_LEVELS],
                                                                     uint8_t code[QK_K], struct ext_levels_best * best) {
    const float * B = metric_schur(in->metric, in->first);
    float middle[EXT_LEVELS - 1], e[QK_K], g[QK_K];
    ext_middles(level, middle);
    for (int i = 0; i < QK_K; ++i) {
        e[i] = in->optimum[i] - level[code[i]];
    }
    metric_multiply(QK_K, B, e, g);
    ext_descend(QK_K, B, QK_K, level, middle, EXT_MAX_SWEEPS, code, g);
    for (int i = 0; i < QK_K; ++i) {
        e[i] = in->optimum[i] - level[code[i]];
    }
    const float cost = ext_dot(e, g);
    if (cost < best->cost) {
        best->cost = cost;
        memcpy(best->level, level, sizeof(best->level));
        memcpy(best->code, code, sizeof(best->code));
    }
}

// Normal equations of the levels under fixed codes: a[k][l] sums B over the steps of codes k and l, b[k] sums B*optimum over those of k.
static inline __attribute__((always_inline)) void ext_levels_normal_equations(const struct ext_levels_block * in, const float B_opt[QK_K],
                                                                              const uint8_t code[QK_K], double a[EXT_LEVELS][EXT_LEVELS],
                                                                              double b[EXT_LEVELS]) {
    const float * B = metric_schur(in->metric, in->first);
    float sums[EXT_LEVELS][QK_K] = {{0}};
    for (int j = 0; j < QK_K; ++j) {
        float * sum = sums[code[j]];
        for (int i = 0; i < QK_K; ++i) {
            sum[i] += B[j*QK_K + i];
        }
    }
    memset(a, 0, sizeof(double)*EXT_LEVELS*EXT_LEVELS);
    memset(b, 0, sizeof(double)*EXT_LEVELS);
    for (int j = 0; j < QK_K; ++j) {
        for (int k = 0; k < EXT_LEVELS; ++k) {
            a[code[j]][k] += (double) sums[k][j];
        }
        b[code[j]] += (double) B_opt[j];
    }
}

// Solve a x = b for a positive definite n*n matrix a by Gaussian elimination without pivoting, in place. Zero rows, of levels without
// steps, get the value of `fallback`.
static inline void ext_solve(int n, double * a, double * b, const float * fallback, double * x) {
    for (int k = 0; k < n; ++k) {
        if (!(a[k*n + k] > 0)) {
            a[k*n + k] = 1;
            b[k]       = (double) fallback[k];
        }
        for (int i = k + 1; i < n; ++i) {
            const double factor = a[i*n + k]/a[k*n + k];
            for (int j = k; j < n; ++j) {
                a[i*n + j] -= factor*a[k*n + j];
            }
            b[i] -= factor*b[k];
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
