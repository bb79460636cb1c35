// Build metrics (metric.h): rotate, shrink and factorize Hessians. Operations on an element have one order, so that numpy gives the same
// bits (py/ggml_ext/quants/_metric.py); compiled with -ffp-contract=off.
#include "metric.h"
#include "hessian.h"
#include "upstream.h"

#include "../types/trellis.h"

#include <stdlib.h>

static bool is_scalar(enum ggml_type type) {
    switch ((int) type) {
        GGML_EXT_TRELLIS_CASES return false;
        default:               return true;
    }
}

struct ggml_ext_metric * metric_new(enum ggml_type type, int64_t n_per_row, int64_t columns, int segment, int block_size, bool with_hessian) {
    const int64_t rest = n_per_row%columns;
    struct ggml_ext_metric * m = malloc(sizeof(*m));
    if (m == NULL) {
        return NULL;
    }
    *m = (struct ggml_ext_metric) {.type = type, .n_per_row = n_per_row, .columns = columns, .segment = segment,
                                  .block_size = block_size};
    const bool schur = is_scalar(type) || with_hessian, windows = !is_scalar(type) && with_hessian;
    const size_t L_size = n_per_row/columns*metric_L_size(columns, segment) + metric_L_size(rest, segment);
    m->D = malloc((size_t) n_per_row*segment*sizeof(float));
    m->L = malloc((L_size + 1)*sizeof(float)); // a row of one segment has none
    m->schur = schur ? malloc((size_t) n_per_row*block_size*sizeof(float)) : NULL;
    m->windows = windows ? malloc((size_t) (n_per_row/block_size)*metric_n_windows(block_size)*METRIC_WINDOW*METRIC_WINDOW*sizeof(float)) : NULL;
    if (m->D == NULL || m->L == NULL || (schur && m->schur == NULL) || (windows && m->windows == NULL)) {
        ggml_ext_metric_free(m);
        return NULL;
    }
    return m;
}

void ggml_ext_metric_free(struct ggml_ext_metric * m) {
    if (m) {
        free(m->D);
        free(m->L);
        free(m->schur);
        free(m->windows);
        upstream_metric_free(m->upstream);
        free(m);
    }
}

// --- importance: a diagonal Hessian ----------------------------------------------------------------------------------

// The rotation maps a diagonal to H diag(a) H, H the Walsh-Hadamard matrix, a tensor product; the signs cancel. After a transform inside
// each segment there is one small matrix per frequency, whose entry (s, r) depends on s ^ r alone.
static void factorize_diagonal(struct ggml_ext_metric * m, int64_t first, int n, const float * importance) {
    enum { S = METRIC_MAX_SEGMENT, MAX_SEGMENTS = QK_K/S };
    const int n_segments = n/S;
    float L[MAX_SEGMENTS][MAX_SEGMENTS][S], D[MAX_SEGMENTS][S]; // by segments and frequency
    for (int f = 0; f < S; ++f) {
        float  a[MAX_SEGMENTS];
        double d[MAX_SEGMENTS][MAX_SEGMENTS];
        for (int s = 0; s < n_segments; ++s) {
            a[s] = importance[ggml_ext_trellis_position(n, S*s + f)];
        }
        ggml_ext_butterflies(a, n_segments);
        for (int s = 0; s < n_segments; ++s) {
            for (int r = 0; r < n_segments; ++r) {
                d[s][r] = (double) a[s ^ r];
            }
        }
        for (int s = n_segments - 1; s >= 0; --s) { // the last segment compensates all others
            D[s][f] = (float) d[s][s];
            for (int r = 0; r < s; ++r) {
                L[s][r][f] = (float) (d[s][r]/d[s][s]);
                for (int q = 0; q < s; ++q) {
                    d[r][q] -= d[s][r]*d[s][q]/d[s][s];
                }
            }
        }
    }
    // back from frequencies: entry (i, j) is entry i ^ j of the transform
    for (int s = 0; s < n_segments; ++s) {
        float * D_out = m->D + (first + S*s)*S;
        ggml_ext_butterflies(D[s], S);
        for (int i = 0; i < S*S; ++i) {
            D_out[i] = D[s][i/S ^ i%S]*(1.0f/S);
        }
        float * L_out = m->L + first/m->columns*metric_L_size(m->columns, S) + metric_L_size(S*s, S);
        for (int r = 0; r < s; ++r) {
            ggml_ext_butterflies(L[s][r], S);
            for (int i = 0; i < S*S; ++i) {
                L_out[S*S*r + i] = L[s][r][i/S ^ i%S]*(1.0f/S);
            }
        }
    }
}

struct ggml_ext_metric * metric_from_importance(enum ggml_type type, int64_t n_per_row, int block_size, const float * importance) {
    struct ggml_ext_metric * m = metric_new(type, n_per_row, block_size, METRIC_MAX_SEGMENT, block_size, false);
    for (int64_t first = 0; m && first < n_per_row; first += block_size) {
        float  scaled[QK_K];
        double sum = 0;
        for (int j = 0; j < block_size; ++j) {
            sum += (double) importance[first + j];
        }
        for (int j = 0; j < block_size; ++j) {
            scaled[j] = sum > 0 ? (float) ((double) importance[first + j]*(block_size/sum) + METRIC_FLOOR) : 1.0f;
        }
        factorize_diagonal(m, first, block_size, scaled);
        if (m->schur) {
            ggml_ext_butterflies(scaled, QK_K);
            for (int i = 0; i < QK_K*QK_K; ++i) {
                const int row = ggml_ext_trellis_position(QK_K, i/QK_K), column = ggml_ext_trellis_position(QK_K, i%QK_K);
                m->schur[first*QK_K + i] = scaled[row ^ column]*(1.0f/QK_K);
            }
        }
    }
    return m;
}

// --- Hessians --------------------------------------------------------------------------------------------------------

GGML_EXT_DEFINE_BUTTERFLIES(butterflies, double)

// Bring the columns of a block into the order of steps, in `count` rows `stride` apart; rotate them if the type is rotated.
static void to_steps(double * rows, int64_t count, int64_t stride, int n, bool rotated) {
    for (int64_t i = 0; i < count; ++i) {
        double * x = rows + i*stride, y[QK_K];
        if (rotated) {
            for (int j = 0; j < n; ++j) {
                x[j] = ggml_ext_signs[j/32] >> j%32 & 1 ? -x[j] : x[j];
            }
            butterflies(x, n);
        }
        for (int t = 0; t < n; ++t) {
            y[t] = x[ggml_ext_trellis_position(n, t)]*(rotated ? ggml_ext_rotation_scale(n) : 1.0);
        }
        memcpy(x, y, (size_t) n*sizeof(y[0]));
    }
}

// H -> R H R^T, or H, in the order of steps.
static void rotate_hessian(struct matrix * x, int block_size, bool rotated) {
    for (int side = 0; side < 2; ++side) { // R H as rows of its transpose, then (R H) R^T
        for (int64_t b = 0; b < x->n; b += block_size) {
            to_steps(x->a + b, x->n, x->n, block_size, rotated);
        }
        mirror(x->a, x->n, true);
    }
}

// Compute L of the segment at step f in place: multiply its rows of H by the inverse of its diagonal block (Gauss-Jordan). Return false if
// that block is not positive definite.
EXT_CLONES
static bool solve_segment(double * g, int64_t n, int64_t f, int S) {
    for (int i = S - 1; i >= 0; --i) {
        const double pivot = g[i*n + f + i];
        if (!(pivot > 0)) {
            return false;
        }
        for (int64_t j = 0; j < f + S; ++j) {
            g[i*n + j] /= pivot;
        }
        for (int k = 0; k < S; ++k) {
            const double factor = g[k*n + f + i];
            for (int64_t j = 0; k != i && j < f + S; ++j) {
                g[k*n + j] -= factor*g[i*n + j];
            }
        }
    }
    return true;
}

// Invert a positive definite matrix in place (Gauss-Jordan).
static void invert_window(double a[METRIC_WINDOW][METRIC_WINDOW]) {
    for (int i = 0; i < METRIC_WINDOW; ++i) {
        const double pivot = a[i][i];
        a[i][i] = 1;
        for (int j = 0; j < METRIC_WINDOW; ++j) {
            a[i][j] /= pivot;
        }
        for (int k = 0; k < METRIC_WINDOW; ++k) {
            const double factor = a[k][i];
            a[k][i] = k == i ? factor : 0;
            for (int j = 0; k != i && j < METRIC_WINDOW; ++j) {
                a[k][j] -= factor*a[i][j];
            }
        }
    }
}

// Store the Schur complement of the block that begins at step `begin` of the Hessian, and its windows.
static void store_schur(struct ggml_ext_metric * m, const struct matrix * x, int64_t first, int64_t begin) {
    const int n = m->block_size;
    float * B = m->schur + (first + begin)*n;
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j <= i; ++j) {
            B[i*n + j] = B[j*n + i] = (float) x->a[(begin + i)*x->n + begin + j];
        }
    }
    for (int k = 0; m->windows && k < metric_n_windows(n); ++k) {
        double window[METRIC_WINDOW][METRIC_WINDOW];
        for (int i = 0; i < METRIC_WINDOW; ++i) {
            for (int j = 0; j < METRIC_WINDOW; ++j) {
                window[i][j] = (double) B[(k*(METRIC_WINDOW/2) + i)*n + k*(METRIC_WINDOW/2) + j];
            }
        }
        invert_window(window);
        float * inverse = m->windows + ((first + begin)/n*metric_n_windows(n) + k)*METRIC_WINDOW*METRIC_WINDOW;
        for (int i = 0; i < METRIC_WINDOW*METRIC_WINDOW; ++i) {
            inverse[i] = (float) window[i/METRIC_WINDOW][i%METRIC_WINDOW];
        }
    }
}

// Eliminate segments, the last one first. first: step of the row at which the Hessian begins.
static bool factorize(struct ggml_ext_metric * m, struct matrix * x, int64_t first) {
    const int64_t n = x->n;
    const int     S = m->segment;
    float * L = m->L + first/m->columns*metric_L_size(m->columns, S);
    for (int64_t end = n; end > 0; end = (end - 1)/PANEL*PANEL) {
        const int64_t begin = (end - 1)/PANEL*PANEL;
        for (int64_t f = end - S; f >= begin; f -= S) {
            if ((f + S)%m->block_size == 0) {
                store_schur(m, x, first, f + S - m->block_size);
            }
            double * rows = x->panel + (f - begin)*n, * g = x->L + (f - begin)*n;
            for (int i = 0; i < S; ++i) {
                memcpy(rows + i*n, x->a + (f + i)*n, (size_t) (f + i + 1)*sizeof(double));
                for (int j = i + 1; j < S; ++j) {
                    rows[i*n + f + j] = x->a[(f + j)*n + f + i];
                }
            }
            memcpy(g, rows, (size_t) S*n*sizeof(double));
            if (!solve_segment(g, n, f, S)) {
                return false;
            }
            float * D = m->D + (first + f)*S, * L_s = L + metric_L_size(f, S);
            for (int i = 0; i < S; ++i) {
                for (int j = 0; j < S; ++j) {
                    D[j*S + i] = (float) rows[i*n + f + j];
                }
                for (int64_t j = 0; j < f; ++j) {
                    L_s[j*S + i] = (float) g[i*n + j];
                }
            }
            subtract(x, begin, f, rows, g, S);
        }
        subtract(x, 0, begin, x->panel, x->L, (int) (end - begin));
    }
    return true;
}

static bool factorize_rotated(struct ggml_ext_metric * m, struct matrix * x, int64_t first, bool rotated) {
    rotate_hessian(x, m->block_size, rotated);
    return factorize(m, x, first);
}

static struct ggml_ext_metric * init_upstream(enum ggml_type type, int64_t n_per_row, const float * H, bool full, float shrinkage,
                                              int n_threads, enum ggml_ext_metric_status * status) {
    bool positive = true;
    struct ggml_ext_metric * m = calloc(1, sizeof(*m));
    if (m) {
        *m = (struct ggml_ext_metric) {.type = type, .n_per_row = n_per_row};
        m->upstream = upstream_metric_new(n_per_row, H, full, shrinkage, upstream_columns(type), n_threads, &positive);
    }
    if (m == NULL || m->upstream == NULL) {
        ggml_ext_metric_free(m);
        *status = positive ? GGML_EXT_METRIC_NO_MEMORY : GGML_EXT_METRIC_NOT_POSITIVE;
        return NULL;
    }
    *status = GGML_EXT_METRIC_OK;
    return m;
}

struct ggml_ext_metric * ggml_ext_metric_init(enum ggml_type type, int64_t n_per_row, const float * H, bool full, float shrinkage,
                                              int segment, int n_threads, enum ggml_ext_metric_status * status) {
    int  block_size = 0;
    bool rotated    = false;
    switch ((int) type) {
#define X(NAME, name) case GGML_TYPE_##NAME: block_size = GGML_EXT_##NAME##_BLOCK_SIZE; rotated = GGML_EXT_##NAME##_ROTATED; break;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
    }
    const bool is_upstream = upstream_columns(type) > 0;
    if (is_upstream) {
        block_size = (int) ggml_blck_size(type);
    }
    *status = GGML_EXT_METRIC_BAD_ARGUMENT;
    if (block_size == 0 || n_per_row <= 0 || n_per_row%block_size || (segment != 8 && segment != 16 && segment != 32) ||
        n_threads < 1 || !(shrinkage >= 0) || !(shrinkage <= FLT_MAX)) {
        return NULL;
    }
    if (is_upstream) {
        return init_upstream(type, n_per_row, H, full, shrinkage, n_threads, status);
    }
    const int64_t columns = matrix_columns(n_per_row, full);
    struct ggml_ext_metric * m = metric_new(type, n_per_row, columns, segment, block_size, true);
    *status = m ? GGML_EXT_METRIC_OK : GGML_EXT_METRIC_NO_MEMORY;
    for (int64_t first = 0; m && first < n_per_row; first += columns) {
        struct matrix x;
        if (!matrix_init(&x, n_per_row - first < columns ? n_per_row - first : columns, n_threads)) {
            *status = GGML_EXT_METRIC_NO_MEMORY;
        } else if (!load_hessian(&x, H, (double) shrinkage) || !factorize_rotated(m, &x, first, rotated)) {
            *status = GGML_EXT_METRIC_NOT_POSITIVE;
        }
        matrix_free(&x);
        H += x.n*(x.n + 1)/2;
        if (*status != GGML_EXT_METRIC_OK) {
            ggml_ext_metric_free(m);
            return NULL;
        }
    }
    return m;
}
