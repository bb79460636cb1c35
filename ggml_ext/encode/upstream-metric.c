// Prepare Hessians for the encoders of upstream's types; for scalar types in numpy: py/ggml_ext/quants/_upstream.py.
#include "hessian.h"
#include "upstream-metric.h"

static int compare_columns(const void * pa, const void * pb) {
    const double * a = *(const double * const *) pa, * b = *(const double * const *) pb;
    return *a > *b ? -1 : *a < *b ? 1 : a < b ? -1 : 1; // of equals the first column
}

// Order groups of `together` columns by falling mean square. Return false if memory runs out.
static bool order_columns(const struct matrix * x, int together, int32_t * order) {
    const int64_t n_groups = x->n/together;
    double  * square = calloc((size_t) n_groups, sizeof(double));
    double ** sorted = malloc((size_t) n_groups*sizeof(double *));
    const bool valid = square && sorted;
    for (int64_t j = 0; valid && j < x->n; ++j) {
        square[j/together] += x->a[j*x->n + j];
        sorted[j/together] = square + j/together;
    }
    if (valid) {
        qsort(sorted, (size_t) n_groups, sizeof(sorted[0]), compare_columns);
    }
    for (int64_t k = 0; valid && k < x->n; ++k) {
        order[k] = (int32_t) ((sorted[k/together] - square)*together + k%together);
    }
    free(square);
    free(sorted);
    return valid;
}

// a[i][j] -= left[i]*right[j] for j <= i, i in lo .. hi - 1.
EXT_CLONES
static void subtract_row(double * a, int64_t n, int64_t lo, int64_t hi, const double * left, const double * right) {
    for (int64_t i = lo; i < hi; ++i) {
        for (int64_t j = 0; j <= i; ++j) {
            a[i*n + j] -= left[i]*right[j];
        }
    }
}

// Eliminate columns, the last one first: a[i][j] -= a[k][i]*a[k][j]/a[k][k].
static bool eliminate(struct matrix * x, float * D, float * L) {
    const int64_t n = x->n;
    for (int64_t end = n; end > 0; end = (end - 1)/PANEL*PANEL) {
        const int64_t begin = (end - 1)/PANEL*PANEL;
        for (int64_t k = end - 1; k >= begin; --k) {
            double * row = x->panel + (k - begin)*n, * g = x->L + (k - begin)*n;
            memcpy(row, x->a + k*n, (size_t) (k + 1)*sizeof(double));
            if (!(row[k] > 0)) {
                return false;
            }
            for (int64_t j = 0; j < k; ++j) {
                g[j] = row[j]/row[k];
                L[upstream_index(n, k, j)] = (float) g[j];
            }
            g[k] = 1;
            D[k] = (float) row[k];
            subtract_row(x->a, n, begin, k, g, row);
        }
        subtract(x, 0, begin, x->L, x->panel, (int) (end - begin));
    }
    return true;
}

static bool factorize_hessian(struct upstream_metric * m, int64_t first, int64_t n, const float * triangle, float shrinkage, int together,
                              int n_threads, bool * positive) {
    struct matrix x;
    float * H = m->H + first*m->columns;
    bool    valid = matrix_init(&x, n, n_threads);
    if (valid && !load_hessian(&x, triangle, (double) shrinkage)) {
        *positive = valid = false;
    }
    valid = valid && order_columns(&x, together, m->order + first);
    if (valid) {
        for (int64_t k = 0; k < n; ++k) {
            for (int64_t j = 0; j < n; ++j) {
                H[upstream_index(n, k, j)] = (float) x.a[k*n + j];
            }
        }
        for (int64_t k = 0; k < n; ++k) { // reads H: a sorted copy would double the memory
            for (int64_t j = 0; j < n; ++j) {
                x.a[k*n + j] = (double) H[upstream_index(n, m->order[first + k], m->order[first + j])];
            }
        }
        valid = *positive = eliminate(&x, m->D + first, m->L + first*m->columns);
    }
    matrix_free(&x);
    return valid;
}

struct upstream_metric * upstream_metric_new(int64_t n_per_row, const float * H, bool full, float shrinkage, int together,
                                             int n_threads, bool * positive) {
    struct upstream_metric * m = calloc(1, sizeof(*m));
    *positive = true;
    if (m == NULL) {
        return NULL;
    }
    m->n_per_row = n_per_row;
    m->columns   = matrix_columns(n_per_row, full);
    m->order = malloc((size_t) n_per_row*sizeof(int32_t));
    m->D     = malloc((size_t) n_per_row*sizeof(float));
    m->L     = calloc((size_t) n_per_row*m->columns, sizeof(float)); // full panels are read, beyond the triangle too
    m->H     = malloc((size_t) n_per_row*m->columns*sizeof(float));
    bool valid = m->order && m->D && m->L && m->H;
    for (int64_t first = 0; valid && first < n_per_row; first += m->columns) {
        const int64_t n = n_per_row - first < m->columns ? n_per_row - first : m->columns;
        valid = factorize_hessian(m, first, n, H, shrinkage, together, n_threads, positive);
        H += n*(n + 1)/2;
    }
    if (!valid) {
        upstream_metric_free(m);
        return NULL;
    }
    return m;
}

void upstream_metric_free(struct upstream_metric * m) {
    if (m) {
        free(m->order);
        free(m->D);
        free(m->L);
        free(m->H);
        free(m);
    }
}
