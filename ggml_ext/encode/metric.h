// A metric: the Hessian H = E[x x^T] of a row's inputs, factorized for error feedback. An error e of the weights costs e^T H e.
//
// Step t is the t-th weight of a row in the order of decisions: rotated if the type is, block by block, in the order of the trellis
// (types/trellis.h), which also keeps the four weights of a CCQ2 byte together. A segment is S = 8, 16 or 32 steps that are decided
// together. The block LDL decomposition (QuIP#, section 4.1; QuIP's LDLQ has S = 1) is H = L^T D L, L unit block lower triangular:
//   e^T H e = sum over segments s of r^T D[s] r,   r = L e, that is r = e[s] + sum over steps j before s of L[s][j]*e[j]
// A segment compensates all errors before it; D[s] is the cost of its own errors after later segments have compensated them.
#pragma once

#include "encode.h"

enum { METRIC_MAX_SEGMENT = 32, METRIC_WINDOW = 32 };

typedef float metric_f32 __attribute__((vector_size(32)));

// Added to importances whose mean is 1, so that none is zero.
#define METRIC_FLOOR 0.01

// A row has one Hessian per `columns` columns (the last may be smaller): block-diagonal, or full with columns = n_per_row.
struct ggml_ext_metric {
    enum ggml_type type;
    int64_t n_per_row;
    int64_t columns;
    int     segment; // S
    float * D;       // [n_per_row][S]
    float * L;       // by Hessian and segment: [steps before the segment in its Hessian][S]
    float * schur;   // each block's Schur complement, after elimination of later steps: [n_per_row][block_size];
                     // NULL for a trellis with an importance
    float * windows; // trellis with a full or block-diagonal H: inverses of the parts of schur in half-overlapping windows:
                     // [n_per_row/block_size][metric_n_windows(block_size)][METRIC_WINDOW][METRIC_WINDOW]
    int     block_size;
    struct upstream_metric * upstream; // upstream types, in place of all members above: upstream-metric.h
};

// Floats of L for the first `steps` steps of a Hessian: 0 + 1 + ... segments before each segment, S*S floats each.
static inline size_t metric_L_size(int64_t steps, int segment) {
    return (size_t) (steps/segment*(steps/segment - 1)/2)*segment*segment;
}

// L of the segment that begins at a step of the row. Its row j belongs to step j of its Hessian.
static inline const float * metric_L(const struct ggml_ext_metric * m, int64_t first) {
    return m->L + first/m->columns*metric_L_size(m->columns, m->segment) + metric_L_size(first%m->columns, m->segment);
}

static inline const float * metric_D(const struct ggml_ext_metric * m, int64_t first) {
    return m->D + first*m->segment;
}

// Symmetric, [block_size][block_size].
static inline const float * metric_schur(const struct ggml_ext_metric * m, int64_t first) {
    return m->schur + first*m->block_size;
}

static inline int metric_n_windows(int block_size) {
    return 2*block_size/METRIC_WINDOW - 1;
}

static inline const float * metric_windows(const struct ggml_ext_metric * m, int64_t first) {
    return m->windows + first/m->block_size*metric_n_windows(m->block_size)*METRIC_WINDOW*METRIC_WINDOW;
}

// out[i] += sum over j of rows[j][i]*x[j], in the order of j, for n columns of rows `stride` apart.
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

// The same for the steps of a segment. Not inlined: inlining would spill the sums.
EXT_CLONES __attribute__((noinline))
static void metric_add_rows(int segment, const float * rows, int64_t n_rows, const float * x, float * out) {
    switch (segment) {
        case 8:  metric_add_columns(8,  rows, 8,  n_rows, x, out); break;
        case 16: metric_add_columns(16, rows, 16, n_rows, x, out); break;
        case 32: metric_add_columns(32, rows, 32, n_rows, x, out); break;
    }
}

// y[s] += feedback of the steps of x before segment s within the block of n steps that begins at step `first` of the row.
static inline __attribute__((always_inline)) void metric_add_feedback(const struct ggml_ext_metric * m, int64_t first, int n, const float * x, float * y) {
    const int S = m->segment;
    for (int s = S; s < n; s += S) {
        metric_add_rows(S, metric_L(m, first + s) + first%m->columns*S, s, x, y + s);
    }
}

// y = D r, segment by segment of the same block.
static inline __attribute__((always_inline)) void metric_apply_D(const struct ggml_ext_metric * m, int64_t first, int n, const float * r, float * y) {
    memset(y, 0, (size_t) n*sizeof(y[0]));
    for (int s = 0; s < n; s += m->segment) {
        metric_add_rows(m->segment, metric_D(m, first + s), m->segment, r + s, y + s);
    }
}

// The same for any multiple of 32 columns.
EXT_CLONES __attribute__((noinline))
static void metric_add_matrix(int n, const float * rows, int64_t stride, int n_rows, const float * x, float * y) {
    for (int i = 0; i < n; i += 32) {
        metric_add_columns(32, rows + i, stride, n_rows, x, y + i);
    }
}

// y = A x for a symmetric n*n matrix, n a multiple of 32.
static inline __attribute__((always_inline)) void metric_multiply(int n, const float * a, const float * x, float * y) {
    memset(y, 0, (size_t) n*sizeof(y[0]));
    metric_add_matrix(n, a, n, n, x, y);
}

// The optimum of a block: the x whose feedback within the block adds up to the feedback of earlier blocks, which `goal` includes.
// Values v of the block cost (optimum - v)^T B (optimum - v), where B is metric_schur().
static inline __attribute__((always_inline)) void metric_find_optimum(const struct ggml_ext_metric * m, int64_t first, int n, const float * x,
                                                                      const float * goal, float * optimum) {
    const int S = m->segment;
    float shift[QK_K], minus[QK_K];
    for (int i = 0; i < n; ++i) {
        shift[i] = goal[i] - x[i];
    }
    for (int s = 0; s < n; s += S) {
        metric_add_rows(S, metric_L(m, first + s) + first%m->columns*S, s, minus, shift + s);
        for (int i = s; i < s + S; ++i) {
            minus[i] = -shift[i];
        }
    }
    for (int i = 0; i < n; ++i) {
        optimum[i] = x[i] + shift[i];
    }
}

// Allocate a metric without values. with_hessian: not just an importance. Return NULL if memory runs out.
struct ggml_ext_metric * metric_new(enum ggml_type type, int64_t n_per_row, int64_t columns, int segment, int block_size, bool with_hessian);

// Build the metric of a rotated type from the importances of a row of unrotated weights: a diagonal Hessian per block, scaled to a mean
// of 1, plus METRIC_FLOOR. A block of zeros counts as one of ones.
struct ggml_ext_metric * metric_from_importance(enum ggml_type type, int64_t n_per_row, int block_size, const float * importance);
