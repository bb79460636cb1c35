// Second moments made ready for the encoders of llama.cpp's types; for scalar types in numpy py/ggml_ext/quants/_stock.py.
#include "moments.h"
#include "stock.h"

static int compare_columns(const void * pa, const void * pb) {
    const double * a = *(const double * const *) pa, * b = *(const double * const *) pb;
    return *a > *b ? -1 : *a < *b ? 1 : a < b ? -1 : 1; // of equals the first column
}

// Columns of a matrix, those of the largest mean square first: groups of `together` columns. False if memory is out.
static bool order_columns(const struct matrix * x, int together, int32_t * order) {
    const int64_t n_groups = x->n/together;
    double  * square = calloc((size_t) n_groups, sizeof(double));
    double ** sorted = malloc((size_t) n_groups*sizeof(double *));
    const bool good = square && sorted;
    for (int64_t j = 0; good && j < x->n; ++j) {
        square[j/together] += x->a[j*x->n + j];
        sorted[j/together] = square + j/together;
    }
    if (good) {
        qsort(sorted, (size_t) n_groups, sizeof(sorted[0]), compare_columns);
    }
    for (int64_t k = 0; good && k < x->n; ++k) {
        order[k] = (int32_t) ((sorted[k/together] - square)*together + k%together);
    }
    free(square);
    free(sorted);
    return good;
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

// Eliminates column after column, the last one first: a[i][j] -= a[k][i]*a[k][j]/a[k][k].
static bool eliminate(struct matrix * x, float * pivots, float * gains) {
    const int64_t n = x->n;
    for (int64_t end = n; end > 0; end = (end - 1)/PANEL*PANEL) {
        const int64_t begin = (end - 1)/PANEL*PANEL;
        for (int64_t k = end - 1; k >= begin; --k) {
            double * row = x->panel + (k - begin)*n, * g = x->gains + (k - begin)*n;
            memcpy(row, x->a + k*n, (size_t) (k + 1)*sizeof(double));
            if (!(row[k] > 0)) {
                return false;
            }
            for (int64_t j = 0; j < k; ++j) {
                g[j] = row[j]/row[k];
                gains[stock_at(n, k, j)] = (float) g[j];
            }
            g[k] = 1;
            pivots[k] = (float) row[k];
            subtract_row(x->a, n, begin, k, g, row);
        }
        subtract(x, 0, begin, x->gains, x->panel, (int) (end - begin));
    }
    return true;
}

static bool make_matrix(struct stock_metric * m, int64_t first, int64_t n, const float * triangle, int together, int n_threads,
                        bool * positive) {
    struct matrix x;
    float * form = m->forms + first*m->columns;
    bool    good = matrix_init(&x, n, n_threads);
    if (good && !load_moments(&x, triangle, (double) m->damping)) {
        *positive = good = false;
    }
    good = good && order_columns(&x, together, m->order + first);
    if (good) {
        for (int64_t k = 0; k < n; ++k) {
            for (int64_t j = 0; j < n; ++j) {
                form[stock_at(n, k, j)] = (float) x.a[k*n + j];
            }
        }
        for (int64_t k = 0; k < n; ++k) { // out of the form: a sorted copy would take as much memory as all else
            for (int64_t j = 0; j < n; ++j) {
                x.a[k*n + j] = (double) form[stock_at(n, m->order[first + k], m->order[first + j])];
            }
        }
        good = *positive = eliminate(&x, m->pivots + first, m->gains + first*m->columns);
    }
    matrix_free(&x);
    return good;
}

struct stock_metric * stock_metric_new(int64_t n_per_row, const float * moments, bool whole, float damping, int together,
                                       int n_threads, bool * positive) {
    struct stock_metric * m = calloc(1, sizeof(*m));
    *positive = true;
    if (m == NULL) {
        return NULL;
    }
    m->n_per_row = n_per_row;
    m->columns   = matrix_columns(n_per_row, whole);
    m->damping   = damping;
    m->order  = malloc((size_t) n_per_row*sizeof(int32_t));
    m->pivots = malloc((size_t) n_per_row*sizeof(float));
    m->gains  = calloc((size_t) n_per_row*m->columns, sizeof(float)); // places that do not count are read by whole panels
    m->forms  = malloc((size_t) n_per_row*m->columns*sizeof(float));
    bool good = m->order && m->pivots && m->gains && m->forms;
    for (int64_t first = 0; good && first < n_per_row; first += m->columns) {
        const int64_t n = n_per_row - first < m->columns ? n_per_row - first : m->columns;
        good = make_matrix(m, first, n, moments, together, n_threads, positive);
        moments += n*(n + 1)/2;
    }
    if (!good) {
        stock_metric_free(m);
        return NULL;
    }
    return m;
}

void stock_metric_free(struct stock_metric * m) {
    if (m) {
        free(m->order);
        free(m->pivots);
        free(m->gains);
        free(m->forms);
        free(m);
    }
}
