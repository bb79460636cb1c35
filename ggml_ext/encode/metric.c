// Second moments made ready for the encoders: rotated, damped, factorized. Every operation on an element has one order, so that
// numpy gives the same bits (py/ggml_ext/quants/_metric.py); compiled with -ffp-contract=off.
#include "metric.h"
#include "moments.h"
#include "stock.h"

#include "../types/trellis.h"

#include <stdlib.h>

// Types of blocks of 256 whose codes are chosen one by one, not by a trellis.
static bool has_blocks(enum ggml_type type) {
    switch ((int) type) {
        GGML_EXT_TRELLIS_CASES return false;
        default:               return true;
    }
}

struct ggml_ext_metric * metric_new(enum ggml_type type, int64_t n_per_row, int64_t columns, int segment, int block_size, bool of_moments) {
    const int64_t rest = n_per_row%columns;
    struct ggml_ext_metric * m = malloc(sizeof(*m));
    if (m == NULL) {
        return NULL;
    }
    *m = (struct ggml_ext_metric) {.type = type, .n_per_row = n_per_row, .columns = columns, .segment = segment,
                                  .block_size = block_size};
    const bool blocks = has_blocks(type) || of_moments, windows = !has_blocks(type) && of_moments;
    const size_t n_gains = n_per_row/columns*metric_n_gains(columns, segment) + metric_n_gains(rest, segment);
    m->forms = malloc((size_t) n_per_row*segment*sizeof(float));
    m->gains = malloc((n_gains + 1)*sizeof(float)); // a row of one segment has none
    m->blocks = blocks ? malloc((size_t) n_per_row*block_size*sizeof(float)) : NULL;
    m->windows = windows ? malloc((size_t) (n_per_row/block_size)*metric_n_windows(block_size)*METRIC_WINDOW*METRIC_WINDOW*sizeof(float)) : NULL;
    if (m->forms == NULL || m->gains == NULL || (blocks && m->blocks == NULL) || (windows && m->windows == NULL)) {
        ggml_ext_metric_free(m);
        return NULL;
    }
    return m;
}

void ggml_ext_metric_free(struct ggml_ext_metric * m) {
    if (m) {
        free(m->forms);
        free(m->gains);
        free(m->blocks);
        free(m->windows);
        stock_metric_free(m->stock);
        free(m);
    }
}

// --- a diagonal: the rotated form falls apart ------------------------------------------------------------------------

// H diag(m) H of a tensor product H: after a transform inside each segment it is one matrix for each frequency, whose entries
// depend on the exclusive or of the two segments alone. The signs of the rotation cancel.
static void factorize_diagonal(struct ggml_ext_metric * m, int64_t first, int n, const float * importance) {
    enum { S = METRIC_MAX_SEGMENT, MAX_SEGMENTS = QK_K/S };
    const int n_segments = n/S;
    float gain[MAX_SEGMENTS][MAX_SEGMENTS][S], form[MAX_SEGMENTS][S]; // by segments and frequency
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
        for (int s = n_segments - 1; s >= 0; --s) { // the last segment first: it can react to all others
            form[s][f] = (float) d[s][s];
            for (int r = 0; r < s; ++r) {
                gain[s][r][f] = (float) (d[s][r]/d[s][s]);
                for (int q = 0; q < s; ++q) {
                    d[r][q] -= d[s][r]*d[s][q]/d[s][s];
                }
            }
        }
    }
    // back from frequencies: entry i, j of such a matrix is entry i ^ j of the transform
    for (int s = 0; s < n_segments; ++s) {
        float * to_form = m->forms + (first + S*s)*S;
        ggml_ext_butterflies(form[s], S);
        for (int i = 0; i < S*S; ++i) {
            to_form[i] = form[s][i/S ^ i%S]*(1.0f/S);
        }
        float * to_gains = m->gains + first/m->columns*metric_n_gains(m->columns, S) + metric_n_gains(S*s, S);
        for (int r = 0; r < s; ++r) {
            ggml_ext_butterflies(gain[s][r], S);
            for (int i = 0; i < S*S; ++i) {
                to_gains[S*S*r + i] = gain[s][r][i/S ^ i%S]*(1.0f/S);
            }
        }
    }
}

struct ggml_ext_metric * metric_of_importance(enum ggml_type type, int64_t n_per_row, int block_size, const float * importance) {
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
        if (m->blocks) {
            ggml_ext_butterflies(scaled, QK_K);
            for (int i = 0; i < QK_K*QK_K; ++i) {
                const int row = ggml_ext_trellis_position(QK_K, i/QK_K), column = ggml_ext_trellis_position(QK_K, i%QK_K);
                m->blocks[first*QK_K + i] = scaled[row ^ column]*(1.0f/QK_K);
            }
        }
    }
    return m;
}

// --- moments ---------------------------------------------------------------------------------------------------------

GGML_EXT_DEFINE_BUTTERFLIES(butterflies, double)

// Columns of `count` rows of doubles, a block each, into the order of steps; rotated where the type is.
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
            y[t] = x[ggml_ext_trellis_position(n, t)]*(rotated ? n == QK_K ? 1.0/16 : 1.0/8 : 1.0);
        }
        memcpy(x, y, (size_t) n*sizeof(y[0]));
    }
}

// R A R^T, or A, in the order of steps.
static void rotate_moments(struct matrix * x, int block_size, bool rotated) {
    for (int side = 0; side < 2; ++side) { // R A, as rows of its transpose, then (R A) R^T
        for (int64_t b = 0; b < x->n; b += block_size) {
            to_steps(x->a + b, x->n, x->n, block_size, rotated);
        }
        mirror(x->a, x->n, true);
    }
}

// Gains of the segment that begins at step f: its rows of the matrix times the inverse of its own part, in place
// (Gauss-Jordan). False if that part is not positive definite.
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
            const double by = g[k*n + f + i];
            for (int64_t j = 0; k != i && j < f + S; ++j) {
                g[k*n + j] -= by*g[i*n + j];
            }
        }
    }
    return true;
}

// The inverse of a positive definite matrix of METRIC_WINDOW rows, in place (Gauss-Jordan).
static void invert_window(double a[METRIC_WINDOW][METRIC_WINDOW]) {
    for (int i = 0; i < METRIC_WINDOW; ++i) {
        const double pivot = a[i][i];
        a[i][i] = 1;
        for (int j = 0; j < METRIC_WINDOW; ++j) {
            a[i][j] /= pivot;
        }
        for (int k = 0; k < METRIC_WINDOW; ++k) {
            const double by = a[k][i];
            a[k][i] = k == i ? by : 0;
            for (int j = 0; k != i && j < METRIC_WINDOW; ++j) {
                a[k][j] -= by*a[i][j];
            }
        }
    }
}

// The form of the block that begins at step `begin` of the matrix, which the later steps have reacted to, and its windows.
static void take_block(struct ggml_ext_metric * m, const struct matrix * x, int64_t first, int64_t begin) {
    const int n = m->block_size;
    float * form = m->blocks + (first + begin)*n;
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j <= i; ++j) {
            form[i*n + j] = form[j*n + i] = (float) x->a[(begin + i)*x->n + begin + j];
        }
    }
    for (int at = 0; m->windows && at < metric_n_windows(n); ++at) {
        double window[METRIC_WINDOW][METRIC_WINDOW];
        for (int i = 0; i < METRIC_WINDOW; ++i) {
            for (int j = 0; j < METRIC_WINDOW; ++j) {
                window[i][j] = (double) form[(at*(METRIC_WINDOW/2) + i)*n + at*(METRIC_WINDOW/2) + j];
            }
        }
        invert_window(window);
        float * to = m->windows + ((first + begin)/n*metric_n_windows(n) + at)*METRIC_WINDOW*METRIC_WINDOW;
        for (int i = 0; i < METRIC_WINDOW*METRIC_WINDOW; ++i) {
            to[i] = (float) window[i/METRIC_WINDOW][i%METRIC_WINDOW];
        }
    }
}

// Eliminates segment after segment, the last one first. `first`: step of the row at which the matrix begins.
static bool factorize(struct ggml_ext_metric * m, struct matrix * x, int64_t first) {
    const int64_t n = x->n;
    const int     S = m->segment;
    float * gains = m->gains + first/m->columns*metric_n_gains(m->columns, S);
    for (int64_t end = n; end > 0; end = (end - 1)/PANEL*PANEL) {
        const int64_t begin = (end - 1)/PANEL*PANEL;
        for (int64_t f = end - S; f >= begin; f -= S) {
            if ((f + S)%m->block_size == 0) {
                take_block(m, x, first, f + S - m->block_size);
            }
            double * rows = x->panel + (f - begin)*n, * g = x->gains + (f - begin)*n;
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
            float * form = m->forms + (first + f)*S, * to = gains + metric_n_gains(f, S);
            for (int i = 0; i < S; ++i) {
                for (int j = 0; j < S; ++j) {
                    form[j*S + i] = (float) rows[i*n + f + j];
                }
                for (int64_t j = 0; j < f; ++j) {
                    to[j*S + i] = (float) g[i*n + j];
                }
            }
            subtract(x, begin, f, rows, g, S);
        }
        subtract(x, 0, begin, x->panel, x->gains, (int) (end - begin));
    }
    return true;
}

static bool factorize_rotated(struct ggml_ext_metric * m, struct matrix * x, int64_t first, bool rotated) {
    rotate_moments(x, m->block_size, rotated);
    return factorize(m, x, first);
}

static struct ggml_ext_metric * init_stock(enum ggml_type type, int64_t n_per_row, const float * moments, bool whole, float damping,
                                           int n_threads, enum ggml_ext_metric_status * status) {
    bool positive = true;
    struct ggml_ext_metric * m = calloc(1, sizeof(*m));
    if (m) {
        *m = (struct ggml_ext_metric) {.type = type, .n_per_row = n_per_row};
        m->stock = stock_metric_new(n_per_row, moments, whole, damping, stock_columns(type), n_threads, &positive);
    }
    if (m == NULL || m->stock == NULL) {
        ggml_ext_metric_free(m);
        *status = positive ? GGML_EXT_METRIC_NO_MEMORY : GGML_EXT_METRIC_NOT_POSITIVE;
        return NULL;
    }
    *status = GGML_EXT_METRIC_OK;
    return m;
}

struct ggml_ext_metric * ggml_ext_metric_init(enum ggml_type type, int64_t n_per_row, const float * moments, bool whole, float damping,
                                              int segment, int n_threads, enum ggml_ext_metric_status * status) {
    int  block_size = 0;
    bool rotated    = false;
    switch ((int) type) {
#define X(NAME, name) case GGML_TYPE_##NAME: block_size = GGML_EXT_##NAME##_BLOCK_SIZE; rotated = GGML_EXT_##NAME##_ROTATED; break;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
    }
    const bool stock = stock_columns(type) > 0;
    if (stock) {
        block_size = (int) ggml_blck_size(type);
    }
    *status = GGML_EXT_METRIC_BAD_ARGUMENT;
    if (block_size == 0 || n_per_row <= 0 || n_per_row%block_size || (segment != 8 && segment != 16 && segment != 32) ||
        n_threads < 1 || !(damping > 0) || !(damping <= FLT_MAX)) {
        return NULL;
    }
    if (stock) {
        return init_stock(type, n_per_row, moments, whole, damping, n_threads, status);
    }
    const int64_t columns = matrix_columns(n_per_row, whole);
    struct ggml_ext_metric * m = metric_new(type, n_per_row, columns, segment, block_size, true);
    *status = m ? GGML_EXT_METRIC_OK : GGML_EXT_METRIC_NO_MEMORY;
    for (int64_t first = 0; m && first < n_per_row; first += columns) {
        struct matrix x;
        if (!matrix_init(&x, n_per_row - first < columns ? n_per_row - first : columns, n_threads)) {
            *status = GGML_EXT_METRIC_NO_MEMORY;
        } else if (!load_moments(&x, moments, (double) damping) || !factorize_rotated(m, &x, first, rotated)) {
            *status = GGML_EXT_METRIC_NOT_POSITIVE;
        }
        matrix_free(&x);
        moments += x.n*(x.n + 1)/2;
        if (*status != GGML_EXT_METRIC_OK) {
            ggml_ext_metric_free(m);
            return NULL;
        }
    }
    return m;
}
