// Second moments for llama.cpp's own types. Their scales come from llama.cpp's encoder, so columns may be decided in any order: those
// of the largest mean square first, whose errors all others can make up for (GPTQ's "act-order"). Of each matrix M of moments, damped,
// with its columns in that order,
//   e^T M e = sum over k of pivots[k]*r[k]^2,   r[k] = e[k] + sum over j < k of gains[k][j]*e[j]
// and `forms` is M itself, in the order of the row, for the descent that follows.
#pragma once

#include "encode.h"

struct ggml_ext_metric;

struct stock_metric {
    int64_t   n_per_row, columns; // of each matrix but the last, which may be smaller
    float     damping;            // what was added to the diagonal of each, whose mean was 1
    int32_t * order;              // [n_per_row]: columns of each matrix as they are decided
    float   * pivots;             // [n_per_row]
    float   * gains, * forms;     // matrix after matrix, n*n each: stock_at(); of gains[k] the first k count
};

// Where row i, column j of a matrix of n columns lies: four rows side by side, as products take them.
static inline int64_t stock_at(int64_t n, int64_t i, int64_t j) {
    return (i/4*n + j)*4 + i%4;
}

// together: columns that are neighbours in the order, 1 for the scalar types; the first columns of a matrix, the next ones and so on.
// NULL if memory is out, or (*positive = false) if one is not positive definite.
struct stock_metric * stock_metric_new(int64_t n_per_row, const float * moments, bool whole, float damping, int together,
                                       int n_threads, bool * positive);
void stock_metric_free(struct stock_metric * m);

// Columns that a decision about a type is of, which an order holds together: 1 of scalar types; 0 for types without such an encoder.
int stock_columns(enum ggml_type type);
int stock_codebook_columns(enum ggml_type type); // of those with codebooks alone

// Rows by llama.cpp's encoder, as ggml_quantize_chunk() takes them, then with better codes and scales under the moments. Of each
// matrix a row keeps what has the smaller error under them, without damping. importance: NULL is the mean squares of the moments for
// types with codebooks; sweeps: over the matrix after the first codes.
void stock_encode(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance, const struct stock_metric * m,
                  int sweeps);
void stock_codebook_encode(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance,
                           const struct stock_metric * m, int sweeps);
