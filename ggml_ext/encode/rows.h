// Iterate over the blocks of rows in encoding order: a block of several rows, then the next block of these rows, so that each block can
// compensate the errors of earlier blocks of its row (metric.h). Without a metric, blocks are independent.
//
//   struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, block_size);
//   while (ext_rows_next(&rows)) {
//       ... encode block rows.block, which begins at step rows.first of its row; with a metric,
//       ... store the errors of its steps in ext_rows_errors(&rows)
//   }
//   ext_rows_end(&rows);
#pragma once

#include "metric.h"

#include "../types/trellis.h"

#include <stdlib.h>

enum { EXT_ROWS = 16 }; // encoded together, so that L is read once for them

// Above the weights that a block without rotation can hold; keeps quadratic forms finite.
#define EXT_UNROTATED_MAX (64*EXT_HALF_MAX)

struct ext_rows {
    const struct ggml_ext_metric * metric;
    int64_t n_rows, row_blocks;
    int     block_size;
    int64_t block, first;             // current block, and the step of its row at which it begins
    int64_t row, ib;                  // first row of the current group, and the index of the block in its row
    int     n, i;                     // rows of the group, and the current one
    float * errors;                   // of the current Hessian, by row and step
    float   feedback[EXT_ROWS][QK_K]; // of these errors, for the current block
};

static inline struct ext_rows ext_rows_begin(const struct ggml_ext_metric * metric, int64_t n_rows, int64_t row_blocks, int block_size) {
    struct ext_rows r = {.metric = metric, .n_rows = n_rows, .row_blocks = row_blocks, .block_size = block_size};
    r.row = -EXT_ROWS;
    r.ib  = row_blocks - 1;
    r.n   = EXT_ROWS;
    r.i   = EXT_ROWS - 1;
    r.errors = metric ? malloc((size_t) EXT_ROWS*metric->columns*sizeof(float)) : NULL;
    GGML_ASSERT(r.errors != NULL || !metric);
    return r;
}

static inline __attribute__((always_inline)) void ext_rows_compute_feedback(struct ext_rows * r) {
    const struct ggml_ext_metric * m = r->metric;
    const int64_t before = m ? r->first%m->columns : 0;
    memset(r->feedback, 0, sizeof(r->feedback));
    for (int s = 0; s < r->block_size && before > 0; s += m->segment) {
        const int     S = m->segment, span = 4096/S; // rows of L that stay in the cache for all rows
        const float * L = metric_L(m, r->first + s);
        for (int64_t j = 0; j < before; j += span) {
            for (int i = 0; i < r->n; ++i) {
                metric_add_rows(S, L + j*S, before - j < span ? before - j : span, r->errors + i*m->columns + j, r->feedback[i] + s);
            }
        }
    }
}

// Go to the next block. Return false at the end.
static inline __attribute__((always_inline)) bool ext_rows_next(struct ext_rows * r) {
    if (++r->i == r->n) {
        r->i = 0;
        if (++r->ib == r->row_blocks) {
            r->ib   = 0;
            r->row += EXT_ROWS;
            r->n    = r->n_rows - r->row < EXT_ROWS ? (int) (r->n_rows - r->row) : EXT_ROWS;
        }
        if (r->n <= 0 || r->row_blocks == 0) {
            return false;
        }
        r->first = r->ib*r->block_size;
        ext_rows_compute_feedback(r);
    }
    r->block = (r->row + r->i)*r->row_blocks + r->ib;
    return true;
}

static inline float * ext_rows_errors(struct ext_rows * r) {
    return r->errors + r->i*r->metric->columns + r->first%r->metric->columns;
}

static inline void ext_rows_end(struct ext_rows * r) {
    free(r->errors);
}

// Load the current block in the order of steps: x, and goal = x plus the feedback of earlier errors. Return false, with x = 0, if a weight
// is NaN or Inf.
static inline bool ext_rows_load(const struct ext_rows * r, const float * src, bool rotated, float * x, float * goal) {
    const int n = r->block_size;
    float     loaded[QK_K];
    bool      finite = true;
    if (rotated) {
        finite = ext_load_rotated(src + r->block*n, loaded, n);
    } else {
        for (int j = 0; j < n; ++j) {
            const float w = src[r->block*n + j];
            finite &= fabsf(w) <= FLT_MAX;
            loaded[j] = w > EXT_UNROTATED_MAX ? EXT_UNROTATED_MAX : w < -EXT_UNROTATED_MAX ? -EXT_UNROTATED_MAX : w;
        }
    }
    for (int t = 0; t < n; ++t) {
        x[t]    = finite ? loaded[ggml_ext_trellis_position(n, t)] : 0.0f;
        goal[t] = x[t] + r->feedback[r->i][t];
    }
    return finite;
}
