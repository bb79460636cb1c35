// Hessians for the encoders of upstream's types. The scales come from upstream's encoder, so columns may be encoded in any order: falling
// mean square input (GPTQ's "act-order"), so that all other columns compensate the largest errors. With the columns in this order, the
// shrunk Hessian is L^T D L (QuIP's LDLQ):
//   e^T H e = sum over k of D[k]*r[k]^2,   r[k] = e[k] + sum over j < k of L[k][j]*e[j]
#pragma once

#include "encode.h"

struct upstream_metric {
    int64_t   n_per_row, columns; // of each Hessian; the last one may be smaller
    int32_t * order;              // [n_per_row]: columns of each Hessian in the order of decisions
    float   * D;                  // [n_per_row], in this order
    float   * L;                  // upstream_index(); n*n per Hessian, in this order; only the first k of row k count
    float   * H;                  // upstream_index(); n*n per Hessian, shrunk, in the order of the row
};

// Index of row i, column j in a matrix of n columns: four rows are interleaved, as add_products() reads them.
static inline int64_t upstream_index(int64_t n, int64_t i, int64_t j) {
    return (i/4*n + j)*4 + i%4;
}

// Prepare the Hessians H of a row (ggml_ext_metric_init()). together: adjacent columns that stay together in the order.
// Return NULL if memory runs out or, with *positive = false, a Hessian is not positive definite.
struct upstream_metric * upstream_metric_new(int64_t n_per_row, const float * H, bool full, float shrinkage, int together,
                                             int n_threads, bool * positive);
void upstream_metric_free(struct upstream_metric * m);
