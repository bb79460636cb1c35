// What the encoders of llama.cpp's types share (stock.c, stock-codebooks.c): rows in lanes, products with matrices of moments, panels
// of columns, and what errors cost. Every float operation has one order, whatever the number of rows.
#pragma once

#include "stock.h"

#include <stdlib.h>

#pragma GCC diagnostic ignored "-Wpsabi" // of vectors in functions that are all inlined

struct stock_layout;
struct codebook;

enum {
    LANES       = 16,  // rows that are encoded together
    STEPS_PANEL = 32,  // columns decided between two products with all before
    SWEEP_PANEL = 256, // columns of a descent
    TILE_ROWS   = 4,   // whose sums stay in registers
    SCALE_STEPS = 2,   // up and down, for each integer of a sub-block
};

typedef float   lanes   __attribute__((vector_size(64), aligned(16)));
typedef float   half_lanes __attribute__((vector_size(32), aligned(16)));
typedef int32_t lanes_i __attribute__((vector_size(64), aligned(16)));

#define LANES_INLINE static inline __attribute__((always_inline))

// GCC 12 makes 16 instructions of the 64 bytes at once.
LANES_INLINE lanes lanes_of(float v) {
    const half_lanes half = v - (half_lanes) {0};
    lanes out;
    memcpy(&out, &half, sizeof(half));
    memcpy((char *) &out + sizeof(half), &half, sizeof(half));
    return out;
}

LANES_INLINE lanes lanes_select(lanes_i mask, lanes a, lanes b) {
    return (lanes) (((lanes_i) a & mask) | ((lanes_i) b & ~mask));
}

LANES_INLINE bool lanes_any(lanes_i mask) {
    int32_t any = 0;
    for (int r = 0; r < LANES; ++r) {
        any |= mask[r];
    }
    return any != 0;
}

// A panel of columns, and M e of them.
struct panel {
    const float * of; // matrix that it is a part of
    int64_t begin;
    int     n;
    float   form[SWEEP_PANEL][SWEEP_PANEL]; // its part of M
    lanes   g[SWEEP_PANEL];
};

// 16 rows' part of a matrix of moments. What has no comment of its own is by column.
struct stock_rows {
    const struct stock_metric * m;
    int64_t first, n;   // columns of the row
    lanes * w, * e;
    lanes * level;      // what the step is multiplied by
    lanes * d, * scale; // by sub-block
    lanes * step;       // by sub-block
    lanes * fed;        // errors in the order of decisions
    lanes * start;      // those of llama.cpp's encoder
    lanes   cost;
    struct panel * panel;

    // scalar types
    const struct stock_layout * t;
    const int8_t * table;
    lanes * dmin, * min, * base, * inverse; // by sub-block; inverse: of the step

    // types of codebooks
    struct codebook * book;
    lanes_i * point; // of the codebook, by group
};

// --- products --------------------------------------------------------------------------------------------------------

// y[i] += sum over j of rows[j][i]*x[j], one j after the other, for TILE_ROWS of y; n is a multiple of COLUMNS_LINE. next: as long, what
// will be read after it.
LANES_INLINE void add_products(const float * rows, const float * next, int64_t n, const half_lanes * x, half_lanes * y) {
    enum { COLUMNS_LINE = 64/(TILE_ROWS*sizeof(float)) }; // of the cache
    half_lanes sum[2*TILE_ROWS];
    memcpy(sum, y, sizeof(sum));
    for (int64_t j = 0; j < n; j += COLUMNS_LINE) {
        __builtin_prefetch(next + j*TILE_ROWS);
#pragma GCC unroll 4
        for (int h = 0; h < COLUMNS_LINE; ++h, rows += TILE_ROWS) {
            const half_lanes low = x[2*(j + h)], high = x[2*(j + h) + 1];
#pragma GCC unroll 4
            for (int i = 0; i < TILE_ROWS; ++i) {
                sum[2*i]     += rows[i]*low;
                sum[2*i + 1] += rows[i]*high;
            }
        }
    }
    memcpy(y, sum, sizeof(sum));
}

// The same for n_rows rows of a matrix of moments from `row` on, n of its columns. Matrices are larger than caches, and a tile's rows are
// a page or more from the next one's, which no processor foresees.
EXT_CLONES __attribute__((noinline))
static void add_matrix(const struct stock_rows * r, const float * matrix, int64_t row, int n_rows, int64_t n, const lanes * x, lanes * y) {
    enum { SPAN = 256 }; // of x: stays in the cache for all rows
    for (int64_t j = 0; j < n; j += SPAN) {
        const int64_t span = n - j < SPAN ? n - j : SPAN;
        for (int i = 0; i < n_rows; i += TILE_ROWS) {
            const float * rows = matrix + stock_at(r->n, row + i, j);
            const float * next = i + TILE_ROWS < n_rows ? rows + TILE_ROWS*r->n : j + 2*SPAN <= n ? matrix + stock_at(r->n, row, j + SPAN) : rows;
            add_products(rows, next, span, (const half_lanes *) (x + j), (half_lanes *) (y + i));
        }
    }
}

// Columns first_k .. last_k - 1 as they are decided: what the errors before them ask of them is added to y, errors or wishes.
static void ask_earlier(const struct stock_rows * x, int64_t first_k, int64_t last_k, lanes * y) {
    add_matrix(x, x->m->gains + x->first*x->m->columns, first_k, (int) (last_k - first_k), first_k, x->fed, y);
}

// The columns from `begin` of the matrix on, unless they are there.
static void take_panel(const struct stock_rows * x, struct panel * p, int64_t begin) {
    const float * form = x->m->forms + x->first*x->m->columns;
    if (p->of == form && p->begin == begin) {
        return;
    }
    p->of    = form;
    p->begin = begin;
    p->n     = (int) (x->n - begin < SWEEP_PANEL ? x->n - begin : SWEEP_PANEL);
    for (int i = 0; i < p->n; i += TILE_ROWS) {
        for (int k = 0; k < p->n; ++k) {
            for (int h = 0; h < TILE_ROWS; ++h) {
                p->form[i + h][k] = form[stock_at(x->n, begin + i + h, begin + k)];
            }
        }
    }
}

// sum of e^2, which the damping is taken for.
static lanes energy(const struct stock_rows * x) {
    lanes sum = lanes_of(0);
    for (int64_t j = 0; j < x->n; ++j) {
        sum += x->e[j]*x->e[j];
    }
    return sum;
}

// What the rows' errors cost, without damping. Ends when all are over `limit`.
static lanes cost_of_errors(struct stock_rows * x, lanes limit) {
    const int32_t * order  = x->m->order + x->first;
    const float   * gains  = x->m->gains + x->first*x->m->columns;
    const float   * pivots = x->m->pivots + x->first;
    lanes cost = -(lanes_of(x->m->damping)*energy(x));
    for (int64_t k = 0; k < x->n; k += STEPS_PANEL) {
        lanes r[STEPS_PANEL];
        for (int i = 0; i < STEPS_PANEL; ++i) {
            r[i] = x->fed[k + i] = x->e[order[k + i]];
        }
        ask_earlier(x, k, k + STEPS_PANEL, r);
        for (int i = 0; i < STEPS_PANEL; ++i) {
            for (int h = 0; h < i; ++h) {
                r[i] += lanes_of(gains[stock_at(x->n, k + i, k + h)])*x->fed[k + h];
            }
            cost += lanes_of(pivots[k + i])*(r[i]*r[i]);
        }
        if (!lanes_any(cost <= limit)) {
            break;
        }
    }
    return cost;
}

// The half nearest to v.
LANES_INLINE lanes as_halves(lanes v) {
    for (int r = 0; r < LANES; ++r) {
        const float x = v[r] > EXT_HALF_MAX ? EXT_HALF_MAX : v[r] < -EXT_HALF_MAX ? -EXT_HALF_MAX : v[r];
        v[r] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(x));
    }
    return v;
}

static bool is_finite(const float * x, int64_t n) {
    bool finite = true;
    for (int64_t j = 0; j < n; ++j) {
        finite &= fabsf(x[j]) <= FLT_MAX;
    }
    return finite;
}

// --- rows of a matrix ------------------------------------------------------------------------------------------------

// What one kind of types does in its own way.
struct stock_coder {
    void (*load_row)(struct stock_rows * x, int r, const float * src, char * blocks); // into lane r, as llama.cpp's encoder left it
    void (*store_row)(const struct stock_rows * x, int r, char * blocks);
    void (*set_step)(struct stock_rows * x, int64_t s);
    void (*refresh_errors)(struct stock_rows * x, int64_t begin, int64_t n); // as they are, without what the steps of a descent added up to
    void (*decide_panel)(struct stock_rows * x, int64_t first_k, int64_t last_k, lanes * wish); // first codes in the order of decisions
    void (*descend)(struct stock_rows * x, struct panel * p);
    int  sub; // weights of a sub-block
};

// First codes for the scales that are there, and the cost of all.
static void stock_decide(const struct stock_coder * coder, struct stock_rows * x) {
    const int32_t * order = x->m->order + x->first;
    x->cost = lanes_of(0);
    for (int64_t k = 0; k < x->n; k += STEPS_PANEL) {
        lanes wish[STEPS_PANEL];
        for (int i = 0; i < STEPS_PANEL; ++i) {
            wish[i] = x->w[order[k + i]];
        }
        ask_earlier(x, k, k + STEPS_PANEL, wish);
        coder->decide_panel(x, k, k + STEPS_PANEL, wish);
    }
}

static void stock_sweep(const struct stock_coder * coder, struct stock_rows * x) {
    const float  * form = x->m->forms + x->first*x->m->columns;
    struct panel * p    = x->panel;
    for (int64_t begin = 0; begin < x->n; begin += SWEEP_PANEL) {
        take_panel(x, p, begin);
        memset(p->g, 0, sizeof(p->g));
        add_matrix(x, form, begin, p->n, x->n, x->e, p->g);
        coder->descend(x, p);
        coder->refresh_errors(x, begin, p->n);
    }
}

// One matrix of up to LANES rows. src, blocks: of the first, at the matrix' first column; stride, row_size: to the next row.
static void stock_encode_matrix(const struct stock_coder * coder, struct stock_rows * x, const float * src, int64_t stride, char * blocks,
                                size_t row_size, int n_rows, int sweeps) {
    for (int r = 0; r < LANES; ++r) {
        const int64_t row = r < n_rows ? r : 0; // lanes without one repeat the first
        coder->load_row(x, r, src + row*stride, blocks + (size_t) row*row_size);
    }
    for (int64_t s = 0; s < x->n/coder->sub; ++s) {
        coder->set_step(x, s);
    }
    coder->refresh_errors(x, 0, x->n);
    memcpy(x->start, x->e, (size_t) x->n*sizeof(lanes));
    stock_decide(coder, x);
    for (int i = 0; i < sweeps; ++i) {
        stock_sweep(coder, x);
    }
    const lanes cost = x->cost - lanes_of(x->m->damping)*energy(x);
    memcpy(x->e, x->start, (size_t) x->n*sizeof(lanes));
    const lanes_i better = cost_of_errors(x, cost) > cost;
    for (int r = 0; r < n_rows; ++r) {
        if (better[r] && is_finite(src + r*stride, x->n)) {
            coder->store_row(x, r, blocks + (size_t) r*row_size);
        }
    }
}

// All matrices of rows that llama.cpp's encoder has made already. x: with room for the widest matrix.
static void stock_encode_rows(const struct stock_coder * coder, struct stock_rows * x, enum ggml_type type, const float * src, void * dst,
                              int64_t n_rows, int sweeps) {
    const int64_t n_per_row = x->m->n_per_row, columns = x->m->columns;
    const size_t  row_size  = ggml_row_size(type, n_per_row);
    for (x->first = 0; x->first < n_per_row; x->first += columns) {
        x->n = n_per_row - x->first < columns ? n_per_row - x->first : columns;
        for (int64_t row = 0; row < n_rows; row += LANES) {
            stock_encode_matrix(coder, x, src + row*n_per_row + x->first, n_per_row,
                                (char *) dst + (size_t) row*row_size + ggml_row_size(type, x->first), row_size,
                                (int) (n_rows - row < LANES ? n_rows - row : LANES), sweeps);
        }
    }
}
