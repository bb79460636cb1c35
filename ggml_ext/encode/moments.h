// Second moments as matrices of doubles, for what makes them ready for encoders (metric.c, stock-metric.c). Every operation on an
// element has one order, so that numpy gives the same bits.
#pragma once

#include "products.h"

#include <stdlib.h>

enum {
    MOMENTS_COLUMNS = QK_K, // of a matrix that holds no whole row
    MIRROR          = 32,   // rows and columns that change places together
};

static inline int64_t matrix_columns(int64_t n_per_row, bool whole) {
    return whole || n_per_row < MOMENTS_COLUMNS ? n_per_row : MOMENTS_COLUMNS;
}

// What the factorization works in.
struct matrix {
    int64_t n;
    double * a;     // [n][n], of which the lower triangle counts once it is rotated
    double * panel; // [PANEL][n]: rows of it as they were
    double * gains; // [PANEL][n]: what became of them
    int      n_threads;
    struct packed * packed; // [n_threads]
};

static bool matrix_init(struct matrix * x, int64_t n, int n_threads) {
    *x = (struct matrix) {n, malloc((size_t) n*n*sizeof(double)), malloc((size_t) n*PANEL*sizeof(double)),
                          malloc((size_t) n*PANEL*sizeof(double)), n_threads, malloc((size_t) n_threads*sizeof(struct packed))};
    return x->a && x->panel && x->gains && x->packed;
}

static void matrix_free(struct matrix * x) {
    free(x->a);
    free(x->panel);
    free(x->gains);
    free(x->packed);
}

// The upper triangle takes the values of the lower one, and with `swap` the lower one those of the upper.
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

// Unpacks, scales to a mean diagonal of 1 and damps. False if a value is not finite or a diagonal negative.
static bool load_moments(struct matrix * x, const float * triangle, double damping) {
    const int64_t n = x->n;
    double trace = 0;
    bool   good  = true;
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j <= i; ++j) {
            const float v = *triangle++;
            good &= fabsf(v) <= FLT_MAX;
            x->a[i*n + j] = (double) v;
        }
        good &= x->a[i*n + i] >= 0;
        trace += x->a[i*n + i];
    }
    if (!good) {
        return false;
    }
    const double mean = trace > 0 ? trace/(double) n : 1.0; // inputs that are always zero: any metric will do
    for (int64_t i = 0; i < n; ++i) {
        x->a[i*n + i] = (x->a[i*n + i] + damping*mean)/mean;
        for (int64_t j = 0; j < i; ++j) {
            x->a[i*n + j] /= mean;
        }
    }
    mirror(x->a, n, false);
    return true;
}

// a[i][j] -= sum over k of left[k][i]*right[k][j] for j <= i, i in lo .. hi - 1, both multiples of 8.
static void subtract(struct matrix * x, int64_t lo, int64_t hi, const double * left, const double * right, int n_k) {
    subtract_products(&(struct products) {x->a, left, right, x->n, n_k}, lo, hi, x->n_threads, x->packed);
}
