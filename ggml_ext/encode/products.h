// The products of a factorization: eliminated rows, subtracted from the rows before them, on all threads.
#pragma once

#include "encode.h"

#include <pthread.h>

enum {
    PANEL        = QK_K, // rows eliminated before earlier rows are updated: H is read once for them
    TILE_ROWS    = 4,    // of elements that stay in registers
    TILE_COLUMNS = 8,
    STRIP        = 128,     // columns whose part of the panel stays in the L2 cache
    MAX_PARTS    = 64,      // threads
    PART         = 1 << 22, // products worth a thread
};

// rows[i][j] -= sum over k of left[k][i]*right[k][j] in the order of falling k, so the result does not depend on how threads share the
// matrix. rows: [n][n]; left and right: [n_k][n], n_k <= PANEL. Elements with j > i may hold anything.
struct products {
    double *       rows;
    const double * left;
    const double * right;
    int64_t        n;
    int            n_k;
};

// A thread's copies in the order of use. In the matrices, consecutive elements are n doubles apart, often a power of two, which maps
// them to few cache sets.
struct packed {
    double left[PANEL][TILE_ROWS];
    double right[STRIP/TILE_COLUMNS][PANEL][TILE_COLUMNS];
};

// A tile of TILE_ROWS rows with vectors of N_BYTES. GCC splits longer vectors than the CPU has into slow code.
#define EXT_SUBTRACT_TILE(NAME, ATTRIBUTES, N_BYTES)                                                                                     \
    typedef double NAME##_vector __attribute__((vector_size(N_BYTES), aligned(8), may_alias));                                           \
    ATTRIBUTES __attribute__((noinline))                                                                                                 \
    static void NAME(double * dst, int64_t n, const struct packed * p, int strip, int n_k) {                                              \
        enum { N = N_BYTES/8, N_VECTORS = TILE_COLUMNS/N };                                                                              \
        NAME##_vector sum[TILE_ROWS][N_VECTORS];                                                                                         \
        EXT_EACH_VECTOR { sum[r][v] = *(const NAME##_vector *) (dst + r*n + N*v); }                                                       \
        for (int k = n_k - 1; k >= 0; --k) {                                                                                             \
            EXT_EACH_VECTOR { sum[r][v] -= p->left[k][r]*((const NAME##_vector *) p->right[strip][k])[v]; }                              \
        }                                                                                                                                \
        EXT_EACH_VECTOR { *(NAME##_vector *) (dst + r*n + N*v) = sum[r][v]; }                                                             \
    }
#define EXT_EACH_VECTOR                                                                                                                  \
    _Pragma("GCC unroll 4") for (int r = 0; r < TILE_ROWS; ++r) _Pragma("GCC unroll 4") for (int v = 0; v < N_VECTORS; ++v)

#if defined(__AVX__)
EXT_SUBTRACT_TILE(subtract_tile, , 32)
#else
EXT_SUBTRACT_TILE(subtract_tile, , 16)
#endif
#if defined(__x86_64__) && !defined(__AVX__)
EXT_SUBTRACT_TILE(subtract_tile_avx, __attribute__((target("avx"))), 32)
#define EXT_CHOOSE_TILE (__builtin_cpu_supports("avx") ? subtract_tile_avx : subtract_tile)
#else
#define EXT_CHOOSE_TILE subtract_tile
#endif

struct products_part {
    const struct products * products;
    int64_t         lo, hi; // rows, multiples of TILE_COLUMNS
    struct packed * packed;
};

static void * subtract_part(void * arg) {
    const struct products_part * part = arg;
    const struct products * x = part->products;
    struct packed * p = part->packed;
    void (* const tile)(double *, int64_t, const struct packed *, int, int) = EXT_CHOOSE_TILE;
    for (int64_t j0 = 0; j0 < part->hi; j0 += STRIP) {
        const int64_t end = j0 + STRIP < part->hi ? j0 + STRIP : part->hi;
        for (int k = 0; k < x->n_k; ++k) {
            for (int64_t j = j0; j < end; j += TILE_COLUMNS) {
                memcpy(p->right[(j - j0)/TILE_COLUMNS][k], x->right + k*x->n + j, sizeof(p->right[0][0]));
            }
        }
        for (int64_t i = j0 > part->lo ? j0 : part->lo; i < part->hi; i += TILE_ROWS) {
            for (int k = 0; k < x->n_k; ++k) {
                memcpy(p->left[k], x->left + k*x->n + i, sizeof(p->left[0]));
            }
            for (int64_t j = j0; j < end && j < i + TILE_ROWS; j += TILE_COLUMNS) {
                tile(x->rows + i*x->n + j, x->n, p, (int) (j - j0)/TILE_COLUMNS, x->n_k);
            }
        }
    }
    return NULL;
}

// For rows lo .. hi - 1, both multiples of TILE_COLUMNS. packed: one per thread. Threads that cannot start are replaced by the caller.
static void subtract_products(const struct products * x, int64_t lo, int64_t hi, int n_threads, struct packed * packed) {
    const double before = (double) lo*(double) lo, all = (double) hi*(double) hi - before;
    const int n_worth = (int) fmin(fmax(all/2*x->n_k/PART, 1), MAX_PARTS), n_parts = n_worth < n_threads ? n_worth : n_threads;
    struct products_part part[MAX_PARTS];
    pthread_t thread[MAX_PARTS];
    bool      started[MAX_PARTS];
    for (int t = 0; t < n_parts; ++t) { // equal numbers of elements j <= i
        const int64_t end = (int64_t) sqrt(before + all*(t + 1)/n_parts)/TILE_COLUMNS*TILE_COLUMNS;
        part[t] = (struct products_part) {x, t ? part[t - 1].hi : lo, t == n_parts - 1 ? hi : end, packed + t};
    }
    for (int t = 1; t < n_parts; ++t) {
        started[t] = pthread_create(thread + t, NULL, subtract_part, part + t) == 0;
    }
    subtract_part(part);
    for (int t = 1; t < n_parts; ++t) {
        if (started[t]) {
            pthread_join(thread[t], NULL);
        } else {
            subtract_part(part + t);
        }
    }
}
