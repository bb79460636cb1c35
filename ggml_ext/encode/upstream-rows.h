// What the encoders of upstream's types share: rows in lanes, products with Hessians, panels of columns, and the cost of errors. Every
// float operation has one order for any number of rows.
#pragma once

#include "upstream-metric.h"

#include <stdlib.h>

#pragma GCC diagnostic ignored "-Wpsabi" // of vector arguments; all these functions are inlined

struct upstream_layout;
struct codebook;

enum {
    LANES       = 16,  // rows that are encoded together
    STEPS_PANEL = 32,  // columns decided between two products with all earlier columns
    SWEEP_PANEL = 256, // columns of a descent
    TILE_ROWS   = 4,   // whose sums stay in registers
    SCALE_STEPS = 2,   // up and down, for each integer of a sub-block
    STEP_CANDIDATES = 16, // of a search for first steps
};

typedef float   lanes      __attribute__((vector_size(64), aligned(16)));
typedef float   half_lanes __attribute__((vector_size(32), aligned(16))); // half of the lanes
typedef int32_t lanes_i    __attribute__((vector_size(64), aligned(16)));

#define LANES_INLINE static inline __attribute__((always_inline))

// In two half_lanes: GCC 12 makes 16 instructions of the 64 bytes at once.
LANES_INLINE lanes lanes_splat(float v) {
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

// A panel of columns, and g = H e for them.
struct panel {
    const float * source; // Hessian that H is a part of
    int64_t begin;
    int     n;
    float   H[SWEEP_PANEL][SWEEP_PANEL];
    lanes   g[SWEEP_PANEL];
};

// 16 rows' part of a Hessian. Arrays are by column unless they say otherwise.
struct upstream_rows {
    const struct upstream_metric * m;
    int64_t first, n;   // columns of the row
    lanes * w, * e;
    lanes * level;      // factor of the step
    lanes * d, * scale; // by sub-block
    lanes * step;       // by sub-block
    lanes * e_order;    // errors in the order of decisions
    lanes * e_upstream; // errors of upstream's encoder
    lanes   cost;
    struct panel * panel;

    // for upstream-scalars.c
    const struct upstream_layout * t;
    const int8_t * table;
    lanes * dmin, * min, * base, * inverse; // by sub-block; inverse: of the step

    // for upstream-codebooks.c
    struct codebook * book;
    lanes_i * point; // index in the codebook, by group
};

// --- products --------------------------------------------------------------------------------------------------------

// y[i] += sum over j of rows[j][i]*x[j] in the order of j, for TILE_ROWS of y; n is a multiple of COLUMNS_LINE. next: the memory to
// prefetch, as long as rows.
LANES_INLINE void add_products(const float * rows, const float * next, int64_t n, const half_lanes * x, half_lanes * y) {
    enum { COLUMNS_LINE = 64/(TILE_ROWS*sizeof(float)) }; // columns per cache line
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

// The same for n_rows rows of a Hessian or of L from `row` on, n of its columns. These matrices exceed the caches, and the rows of
// consecutive tiles are a page or more apart, which hardware prefetchers do not follow.
EXT_CLONES __attribute__((noinline))
static void add_matrix(const struct upstream_rows * r, const float * matrix, int64_t row, int n_rows, int64_t n, const lanes * x, lanes * y) {
    enum { SPAN = 256 }; // of x, which stays in the cache for all rows
    for (int64_t j = 0; j < n; j += SPAN) {
        const int64_t span = n - j < SPAN ? n - j : SPAN;
        for (int i = 0; i < n_rows; i += TILE_ROWS) {
            const float * rows = matrix + upstream_index(r->n, row + i, j);
            const float * next = i + TILE_ROWS < n_rows ? rows + TILE_ROWS*r->n : j + 2*SPAN <= n ? matrix + upstream_index(r->n, row, j + SPAN) : rows;
            add_products(rows, next, span, (const half_lanes *) (x + j), (half_lanes *) (y + i));
        }
    }
}

// Add the feedback of all earlier columns to y, for columns first_k .. last_k - 1 in the order of decisions.
static void add_feedback(const struct upstream_rows * x, int64_t first_k, int64_t last_k, lanes * y) {
    add_matrix(x, x->m->L + x->first*x->m->columns, first_k, (int) (last_k - first_k), first_k, x->e_order, y);
}

// Load the panel of columns from `begin` on, unless it is loaded.
static void load_panel(const struct upstream_rows * x, struct panel * p, int64_t begin) {
    const float * H = x->m->H + x->first*x->m->columns;
    if (p->source == H && p->begin == begin) {
        return;
    }
    p->source = H;
    p->begin  = begin;
    p->n      = (int) (x->n - begin < SWEEP_PANEL ? x->n - begin : SWEEP_PANEL);
    for (int i = 0; i < p->n; i += TILE_ROWS) {
        for (int k = 0; k < p->n; ++k) {
            for (int h = 0; h < TILE_ROWS; ++h) {
                p->H[i + h][k] = H[upstream_index(x->n, begin + i + h, begin + k)];
            }
        }
    }
}

// Cost of the rows' errors. Stop when all exceed `limit`.
static lanes compute_cost(struct upstream_rows * x, lanes limit) {
    const int32_t * order = x->m->order + x->first;
    const float   * L     = x->m->L + x->first*x->m->columns;
    const float   * D     = x->m->D + x->first;
    lanes cost = lanes_splat(0);
    for (int64_t k = 0; k < x->n; k += STEPS_PANEL) {
        lanes r[STEPS_PANEL];
        for (int i = 0; i < STEPS_PANEL; ++i) {
            r[i] = x->e_order[k + i] = x->e[order[k + i]];
        }
        add_feedback(x, k, k + STEPS_PANEL, r);
        for (int i = 0; i < STEPS_PANEL; ++i) {
            for (int h = 0; h < i; ++h) {
                r[i] += lanes_splat(L[upstream_index(x->n, k + i, k + h)])*x->e_order[k + h];
            }
            cost += lanes_splat(D[k + i])*(r[i]*r[i]);
        }
        if (!lanes_any(cost <= limit)) {
            break;
        }
    }
    return cost;
}

// Round to the nearest FP16 value; larger magnitudes become EXT_HALF_MAX.
LANES_INLINE lanes round_to_fp16(lanes v) {
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

// The operations that depend on the kind of types.
struct upstream_coder {
    void (*load_row)(struct upstream_rows * x, int r, const float * src, char * blocks); // into lane r, from the blocks of upstream's encoder
    void (*store_row)(const struct upstream_rows * x, int r, char * blocks);
    void (*set_step)(struct upstream_rows * x, int64_t s);
    void (*search_steps)(struct upstream_rows * x); // first steps other than those of upstream's encoder; may be NULL
    void (*refresh_errors)(struct upstream_rows * x, int64_t begin, int64_t n); // recompute e, without the rounding errors of a descent
    void (*decide_panel)(struct upstream_rows * x, int64_t first_k, int64_t last_k, lanes * goal); // first codes, in the order of decisions
    void (*descend)(struct upstream_rows * x, struct panel * p);
    int  sub; // weights of a sub-block
};

// Choose first codes for the current scales, and compute the total cost.
static void upstream_decide(const struct upstream_coder * coder, struct upstream_rows * x) {
    const int32_t * order = x->m->order + x->first;
    x->cost = lanes_splat(0);
    for (int64_t k = 0; k < x->n; k += STEPS_PANEL) {
        lanes goal[STEPS_PANEL];
        for (int i = 0; i < STEPS_PANEL; ++i) {
            goal[i] = x->w[order[k + i]];
        }
        add_feedback(x, k, k + STEPS_PANEL, goal);
        coder->decide_panel(x, k, k + STEPS_PANEL, goal);
    }
}

static void upstream_sweep(const struct upstream_coder * coder, struct upstream_rows * x) {
    const float  * H = x->m->H + x->first*x->m->columns;
    struct panel * p    = x->panel;
    for (int64_t begin = 0; begin < x->n; begin += SWEEP_PANEL) {
        load_panel(x, p, begin);
        memset(p->g, 0, sizeof(p->g));
        add_matrix(x, H, begin, p->n, x->n, x->e, p->g);
        coder->descend(x, p);
        coder->refresh_errors(x, begin, p->n);
    }
}

// Encode up to LANES rows of one Hessian. src, blocks: first row, first column of the Hessian; stride, row_size: distance between rows.
static void upstream_encode_matrix(const struct upstream_coder * coder, struct upstream_rows * x, const float * src, int64_t stride, char * blocks,
                                   size_t row_size, int n_rows, int sweeps) {
    for (int r = 0; r < LANES; ++r) {
        const int64_t row = r < n_rows ? r : 0; // unused lanes repeat the first row
        coder->load_row(x, r, src + row*stride, blocks + (size_t) row*row_size);
    }
    for (int64_t s = 0; s < x->n/coder->sub; ++s) {
        coder->set_step(x, s);
    }
    coder->refresh_errors(x, 0, x->n);
    memcpy(x->e_upstream, x->e, (size_t) x->n*sizeof(lanes));
    if (coder->search_steps) {
        coder->search_steps(x);
    }
    upstream_decide(coder, x);
    for (int i = 0; i < sweeps; ++i) {
        upstream_sweep(coder, x);
    }
    memcpy(x->e, x->e_upstream, (size_t) x->n*sizeof(lanes));
    const lanes_i better = compute_cost(x, x->cost) > x->cost;
    for (int r = 0; r < n_rows; ++r) {
        if (better[r] && is_finite(src + r*stride, x->n)) {
            coder->store_row(x, r, blocks + (size_t) r*row_size);
        }
    }
}

// Improve rows that upstream's encoder has encoded. x: allocated for the widest Hessian.
static void upstream_encode_rows(const struct upstream_coder * coder, struct upstream_rows * x, enum ggml_type type, const float * src, void * dst,
                                 int64_t n_rows, int sweeps) {
    const int64_t n_per_row = x->m->n_per_row, columns = x->m->columns;
    const size_t  row_size  = ggml_row_size(type, n_per_row);
    for (x->first = 0; x->first < n_per_row; x->first += columns) {
        x->n = n_per_row - x->first < columns ? n_per_row - x->first : columns;
        for (int64_t row = 0; row < n_rows; row += LANES) {
            upstream_encode_matrix(coder, x, src + row*n_per_row + x->first, n_per_row,
                                   (char *) dst + (size_t) row*row_size + ggml_row_size(type, x->first), row_size,
                                   (int) (n_rows - row < LANES ? n_rows - row : LANES), sweeps);
        }
    }
}
