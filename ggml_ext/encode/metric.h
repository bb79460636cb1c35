// What errors of a row's weights cost together: e^T M e, M the second moments E[x x^T] of its inputs.
//
// Steps are the weights of a row, rotated where the type is, block by block in the order of the trellis (types/trellis.h), which
// also brings CCQ2's weights of a byte together. Segments of a few steps are decided together. M falls apart from the last segment to the first (GPTQ's and LDLQ's error feedback):
//   e^T M e = sum over segments s of r^T D[s] r,   r = e[s] + sum over steps j before s of gain[s][j]*e[j]
// where the sum runs over the steps that share a matrix with s. A segment can so make up for the errors of all that were decided
// before it, and D[s] says what its own errors cost once those to come have done the same.
#pragma once

#include "encode.h"

enum { METRIC_MAX_SEGMENT = 32, METRIC_WINDOW = 32 };

typedef float metric_f32 __attribute__((vector_size(32)));

// Added to importances, of their mean, so that there are no zeros to divide by. Weighted error of ITQ3_S on a layer of the reference
// model 0.0133, with a floor of 1 0.0143.
#define METRIC_FLOOR 0.01

// The forms of a row's segments, and their gains: of segment s of a matrix one float for each of its steps and each step before.
struct ggml_ext_metric {
    enum ggml_type type;
    int64_t n_per_row;
    int64_t columns; // of each matrix but the last, which may be smaller
    int     segment; // steps: 8, 16 or 32
    float * forms;   // [n_per_row][segment]
    float * gains;   // matrix after matrix and segment after segment: [steps before it in its matrix][segment]
    float * blocks;  // each block's form as a whole, once later blocks have reacted: [n_per_row][block_size]; NULL of importances
                     // and a trellis
    float * windows; // of moments and a trellis: inverses of its parts of METRIC_WINDOW steps, each half a window after the last:
                     // [n_per_row/block_size][metric_n_windows(block_size)][METRIC_WINDOW][METRIC_WINDOW]
    int     block_size;
    struct stock_metric * stock; // of llama.cpp's types, in place of all that: stock.h
};

// Gains of the first `steps` steps of a matrix, in whole segments: 0 + 1 + ... segments, each times segment*segment.
static inline size_t metric_n_gains(int64_t steps, int segment) {
    return (size_t) (steps/segment*(steps/segment - 1)/2)*segment*segment;
}

// Of the segment that begins at a step of the row. Row j of the gains is that of step j of its matrix.
static inline const float * metric_gains(const struct ggml_ext_metric * m, int64_t first) {
    return m->gains + first/m->columns*metric_n_gains(m->columns, m->segment) + metric_n_gains(first%m->columns, m->segment);
}

static inline const float * metric_form(const struct ggml_ext_metric * m, int64_t first) {
    return m->forms + first*m->segment;
}

// The same of a whole block: symmetric, [block_size][block_size].
static inline const float * metric_block(const struct ggml_ext_metric * m, int64_t first) {
    return m->blocks + first*m->block_size;
}

static inline int metric_n_windows(int block_size) {
    return 2*block_size/METRIC_WINDOW - 1;
}

static inline const float * metric_windows(const struct ggml_ext_metric * m, int64_t first) {
    return m->windows + first/m->block_size*metric_n_windows(m->block_size)*METRIC_WINDOW*METRIC_WINDOW;
}

// out[i] += rows[j][i]*x[j], one j after the other, for n columns of rows that are `stride` long.
static inline __attribute__((always_inline)) void metric_add_columns(const int n, const float * rows, int64_t stride, int64_t n_rows,
                                                                     const float * x, float * out) {
    enum { N = sizeof(metric_f32)/sizeof(float), MAX = METRIC_MAX_SEGMENT/N };
    metric_f32 sum[MAX] = {0}, row[MAX];
#pragma GCC unroll 4
    for (int i = 0; i < n/N; ++i) {
        memcpy(sum + i, out + N*i, sizeof(sum[i]));
    }
    for (int64_t j = 0; j < n_rows; ++j) {
#pragma GCC unroll 4
        for (int i = 0; i < n/N; ++i) {
            memcpy(row + i, rows + j*stride + N*i, sizeof(row[i]));
            sum[i] += row[i]*x[j];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < n/N; ++i) {
        memcpy(out + N*i, sum + i, sizeof(sum[i]));
    }
}

// The same for the steps of a segment. A function of its own: inlined, its sums leave the registers.
EXT_CLONES __attribute__((noinline))
static void metric_add_rows(int segment, const float * rows, int64_t n_rows, const float * x, float * out) {
    switch (segment) {
        case 8:  metric_add_columns(8,  rows, 8,  n_rows, x, out); break;
        case 16: metric_add_columns(16, rows, 16, n_rows, x, out); break;
        case 32: metric_add_columns(32, rows, 32, n_rows, x, out); break;
    }
}

// y[s] += what the steps of x before segment s, in the block of n steps that begins at step `first` of the row, ask of it.
static inline __attribute__((always_inline)) void metric_feed_block(const struct ggml_ext_metric * m, int64_t first, int n, const float * x, float * y) {
    const int S = m->segment;
    for (int s = S; s < n; s += S) {
        metric_add_rows(S, metric_gains(m, first + s) + first%m->columns*S, s, x, y + s);
    }
}

// y = D r, segment by segment of the same block.
static inline __attribute__((always_inline)) void metric_apply_forms(const struct ggml_ext_metric * m, int64_t first, int n, const float * r, float * y) {
    memset(y, 0, (size_t) n*sizeof(y[0]));
    for (int s = 0; s < n; s += m->segment) {
        metric_add_rows(m->segment, metric_form(m, first + s), m->segment, r + s, y + s);
    }
}

// y[i] += rows[j][i]*x[j], one j after the other, for all n columns, a multiple of 32, of rows that are `stride` long.
EXT_CLONES __attribute__((noinline))
static void metric_add_matrix(int n, const float * rows, int64_t stride, int n_rows, const float * x, float * y) {
    for (int at = 0; at < n; at += 32) {
        metric_add_columns(32, rows + at, stride, n_rows, x, y + at);
    }
}

// y = A x for a symmetric matrix of n*n, n a multiple of 32.
static inline __attribute__((always_inline)) void metric_form_times(int n, const float * a, const float * x, float * y) {
    memset(y, 0, (size_t) n*sizeof(y[0]));
    metric_add_matrix(n, a, n, n, x, y);
}

// What would cost nothing in a block: x, and the shift whose own feedback within the block adds up to what earlier blocks ask for.
// The cost of values v is then (target - v)^T B (target - v), B of metric_block().
static inline __attribute__((always_inline)) void metric_aim(const struct ggml_ext_metric * m, int64_t first, int n, const float * x,
                                                             const float * wish, float * target) {
    const int S = m->segment;
    float shift[QK_K], minus[QK_K];
    for (int i = 0; i < n; ++i) {
        shift[i] = wish[i] - x[i];
    }
    for (int s = 0; s < n; s += S) {
        metric_add_rows(S, metric_gains(m, first + s) + first%m->columns*S, s, minus, shift + s);
        for (int i = s; i < s + S; ++i) {
            minus[i] = -shift[i];
        }
    }
    for (int i = 0; i < n; ++i) {
        target[i] = x[i] + shift[i];
    }
}

// Without gains and forms yet. of_moments: with windows where the type is a trellis. NULL if memory is out.
struct ggml_ext_metric * metric_new(enum ggml_type type, int64_t n_per_row, int64_t columns, int segment, int block_size, bool of_moments);

// Of importances of the unrotated weights of a row, for rotated types: a diagonal for each block, scaled to a mean of 1, with
// METRIC_FLOOR added. A block of zeros counts as one of ones.
struct ggml_ext_metric * metric_of_importance(enum ggml_type type, int64_t n_per_row, int block_size, const float * importance);
