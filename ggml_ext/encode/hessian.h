// A Hessian as a matrix of doubles during its factorization (metric.c, upstream-metric.c). Operations on an element have one order, so
// that numpy gives the same bits.
#pragma once

#include "products.h"

#include <stdlib.h>

enum {
    BLOCK_COLUMNS = QK_K, // columns of one block of a block-diagonal Hessian
    MIRROR          = 32, // rows and columns that are mirrored together
};

// Added to the diagonal, relative to its mean, so that the Hessian is positive definite even if columns are always zero.
#define DIAGONAL_FLOOR 0.001

static inline int64_t matrix_columns(int64_t n_per_row, bool full) {
    return full || n_per_row < BLOCK_COLUMNS ? n_per_row : BLOCK_COLUMNS;
}

struct matrix {
    int64_t n;
    double * a;     // [n][n]; once rotated, only the lower triangle counts
    double * panel; // [PANEL][n]: rows of H before their elimination
    double * L;     // [PANEL][n]: the same rows of L
    int      n_threads;
    struct packed * packed; // [n_threads]
};

static bool matrix_init(struct matrix * x, int64_t n, int n_threads) {
    *x = (struct matrix) {n, malloc((size_t) n*n*sizeof(double)), malloc((size_t) n*PANEL*sizeof(double)),
                          malloc((size_t) n*PANEL*sizeof(double)), n_threads, malloc((size_t) n_threads*sizeof(struct packed))};
    return x->a && x->panel && x->L && x->packed;
}

static void matrix_free(struct matrix * x) {
    free(x->a);
    free(x->panel);
    free(x->L);
    free(x->packed);
}

// Copy the lower triangle to the upper one; n is a multiple of MIRROR. swap: exchange both triangles.
static void mirror(double * a, int64_t n, bool swap) {
    for (int64_t i0 = 0; i0 < n; i0 += MIRROR) {
        for (int64_t j0 = 0; j0 <= i0; j0 += MIRROR) {
            for (int64_t i = i0; i < i0 + MIRROR; ++i) {
                for (int64_t j = j0; j < (j0 < i0 ? j0 + MIRROR : i); ++j) {
                    const double upper = a[j*n + i];
                    a[j*n + i] = a[i*n + j];
                    a[i*n + j] = swap ? upper : a[i*n + j];
                }
            }
        }
    }
}

// Unpack, scale to a mean diagonal of 1, and add shrinkage*diag(H) and DIAGONAL_FLOOR. Return false if a value is not finite or a diagonal
// negative.
static bool load_hessian(struct matrix * x, const float * triangle, double shrinkage) {
    const int64_t n = x->n;
    double trace = 0;
    bool   valid  = true;
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j <= i; ++j) {
            const float v = *triangle++;
            valid &= fabsf(v) <= FLT_MAX;
            x->a[i*n + j] = (double) v;
        }
        valid &= x->a[i*n + i] >= 0;
        trace += x->a[i*n + i];
    }
    if (!valid) {
        return false;
    }
    const double mean = trace > 0 ? trace/(double) n : 1.0; // inputs that are always zero: any Hessian will do
    for (int64_t i = 0; i < n; ++i) {
        x->a[i*n + i] = (x->a[i*n + i] + shrinkage*x->a[i*n + i] + DIAGONAL_FLOOR*mean)/mean;
        for (int64_t j = 0; j < i; ++j) {
            x->a[i*n + j] /= mean;
        }
    }
    mirror(x->a, n, false);
    return true;
}

// a[i][j] -= sum over k of left[k][i]*right[k][j] for j <= i, i in lo .. hi - 1; lo and hi are multiples of 8.
static void subtract(struct matrix * x, int64_t lo, int64_t hi, const double * left, const double * right, int n_k) {
    subtract_products(&(struct products) {x->a, left, right, x->n, n_k}, lo, hi, x->n_threads, x->packed);
}
