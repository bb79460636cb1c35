// Encoder of llama.cpp's scalar types under second moments. Scales are those of llama.cpp's own encoder at first. Then, for each
// matrix of moments,
//   1. codes column by column, those of the largest mean square first, each with the errors of those before it fed back
//      (E. Frantar et al., "GPTQ", 2022)
//   2. sweeps over panels of columns: a block's halves are fitted, then descents over codes and the scales of sub-blocks in turn
// Rows go through it in lanes, 16 at a time. Every float operation has one order, so that the numpy reference gives the same bytes
// (py/ggml_ext/quants/_stock.py); compiled with -ffp-contract=off.
//
// Weighted squared error under whole matrices, mean of 14 matrices of the reference model (columns as llama-quantize has them, with
// the diagonal of the same moments):       Q2_K     Q3_K     Q4_K
//   llama.cpp's encoder                    0.0474   0.0145   0.00342
//   1. alone                               0.0225   0.0058   0.00141
//   and codes descended                    0.0200   0.0053   0.00131
//   and scales too                         0.0181   0.0050   0.00127
//   and the blocks' halves                 0.0180   0.0050   0.00126
#include "stock.h"

#include "metric.h"
#include "stock-layouts.h"
#include "stock-rows.h"

#define GGML_COMMON_IMPL_C
#include "ggml-common.h" // kvalues_iq4nl

// --- levels ----------------------------------------------------------------------------------------------------------

// The nearest level to v, the even one, or that of the larger index, of equals.
LANES_INLINE lanes nearest_level(const struct stock_layout * t, const int8_t * table, lanes v) {
    if (t->has_table) {
        lanes level = lanes_of(table[0]);
        for (int i = 1; i < 16; ++i) {
            const lanes middle = lanes_of(0.5f*((float) table[i - 1] + (float) table[i]));
            level = lanes_select(v >= middle, lanes_of(table[i]), level);
        }
        return level;
    }
    const lanes low = lanes_of((float) t->low), high = lanes_of((float) t->high), to_int = lanes_of(12582912.0f); // 1.5*2^23
    v = lanes_select(v > low, v, low);
    v = lanes_select(v < high, v, high);
    return (v + to_int) - to_int;
}

static uint8_t code_of(const struct stock_layout * t, const int8_t * table, float level) {
    int code = 0;
    if (!t->has_table) {
        return (uint8_t) ((int) level - t->low);
    }
    while (code < t->high && (float) table[code] < level) {
        ++code;
    }
    return (uint8_t) code;
}

static void set_step(struct stock_rows * x, int64_t s) {
    const bool integers = x->t->scale_high != 0;
    x->step[s] = integers ? x->d[s]*x->scale[s] : x->d[s];
    x->base[s] = !x->t->has_min ? lanes_of(0) : integers ? -(x->dmin[s]*x->min[s]) : x->dmin[s];
    const lanes one = lanes_of(1), zero = lanes_of(0);
    const lanes_i is_zero = x->step[s] == zero;
    x->inverse[s] = lanes_select(is_zero, zero, one/lanes_select(is_zero, one, x->step[s]));
}

// --- first codes -----------------------------------------------------------------------------------------------------

EXT_CLONES __attribute__((noinline))
static void decide_panel(struct stock_rows * x, int64_t first_k, int64_t last_k, lanes * wish) {
    const float   * gains = x->m->gains + x->first*x->m->columns;
    const int32_t * order = x->m->order + x->first;
    const float   * pivots = x->m->pivots + x->first;
    for (int64_t k = first_k; k < last_k; ++k) {
        const int64_t j = order[k], s = j/x->t->sub;
        const lanes   v = wish[k - first_k];
        const lanes   level = nearest_level(x->t, x->table, (v - x->base[s])*x->inverse[s]);
        const lanes   value = x->base[s] + x->step[s]*level, r = v - value;
        x->level[j] = level;
        x->e[j]     = x->w[j] - value;
        x->fed[k]   = x->e[j];
        x->cost    += lanes_of(pivots[k])*(r*r);
        for (int64_t i = k + 1; i < last_k; ++i) {
            wish[i - first_k] += lanes_of(gains[stock_at(x->n, i, k)])*x->fed[k];
        }
    }
}

// --- descents --------------------------------------------------------------------------------------------------------

// The value of column i of the panel rises by `by`.
LANES_INLINE void raise_value(struct stock_rows * x, struct panel * p, int i, lanes by) {
    const float * row = p->form[i];
    half_lanes halves[2], * g = (half_lanes *) p->g;
    memcpy(halves, &by, sizeof(by));
    x->e[p->begin + i] -= by;
    for (int k = 0; k < p->n; ++k) {
        g[2*k]     -= row[k]*halves[0];
        g[2*k + 1] -= row[k]*halves[1];
    }
}

// Each column's code in turn. False if nothing changed.
EXT_CLONES __attribute__((noinline))
static bool descend_codes(struct stock_rows * x, struct panel * p) {
    bool changed = false;
    for (int i = 0; i < p->n; ++i) {
        const int64_t j = p->begin + i, s = j/x->t->sub;
        const float   own = p->form[i][i];
        const lanes   inverse = lanes_of(1.0f/own);
        const lanes   level = nearest_level(x->t, x->table, x->level[j] + (p->g[i]*inverse)*x->inverse[s]);
        // a step of zero has any code
        const lanes_i moves = (level != x->level[j]) & (x->inverse[s] != lanes_of(0));
        if (!lanes_any(moves)) {
            continue;
        }
        const lanes by = lanes_select(moves, (level - x->level[j])*x->step[s], lanes_of(0));
        x->level[j] = lanes_select(moves, level, x->level[j]);
        x->cost    += by*(lanes_of(own)*by - (p->g[i] + p->g[i]));
        raise_value(x, p, i, by);
        changed = true;
    }
    return changed;
}

// What the errors of a sub-block cost if its step rises by a and its base by b: a*(ll*a - 2*gl + 2*lo*b) + b*(oo*b - 2*go).
struct forms {
    lanes ll, gl, lo, go;
    float oo;
};

LANES_INLINE struct forms sub_block_forms(const struct stock_rows * x, const struct panel * p, int i0) {
    struct forms f = {lanes_of(0), lanes_of(0), lanes_of(0), lanes_of(0), 0};
    for (int i = i0; i < i0 + x->t->sub; ++i) {
        const float * row = p->form[i];
        const lanes   level = x->level[p->begin + i];
        lanes sum = lanes_of(0);
        float own = 0;
        for (int k = i0; k < i0 + x->t->sub; ++k) {
            sum += lanes_of(row[k])*x->level[p->begin + k];
            own += row[k];
        }
        f.ll += level*sum;
        f.lo += sum;
        f.oo += own;
        f.gl += p->g[i]*level;
        f.go += p->g[i];
    }
    return f;
}

LANES_INLINE lanes cost_of(const struct forms * f, lanes a, lanes b) {
    return a*(f->ll*a - (f->gl + f->gl) + (f->lo + f->lo)*b) + b*(lanes_of(f->oo)*b - (f->go + f->go));
}

struct change {
    lanes cost, step, base; // what they rise by
    lanes scale, min;       // new
};

LANES_INLINE void consider(struct change * best, lanes_i allowed, lanes cost, lanes step, lanes base, lanes scale, lanes min) {
    const lanes_i better = allowed & (cost < best->cost);
    best->cost  = lanes_select(better, cost,  best->cost);
    best->step  = lanes_select(better, step,  best->step);
    best->base  = lanes_select(better, base,  best->base);
    best->scale = lanes_select(better, scale, best->scale);
    best->min   = lanes_select(better, min,   best->min);
}

// Integers near those of sub-block s.
LANES_INLINE void search_integers(const struct stock_rows * x, int64_t s, const struct forms * f, struct change * best) {
    const struct stock_layout * t = x->t;
    const int min_steps = t->has_min ? SCALE_STEPS : 0;
    for (int a = -SCALE_STEPS; a <= SCALE_STEPS; ++a) {
        const lanes   scale = x->scale[s] + lanes_of((float) a), step = lanes_of((float) a)*x->d[s];
        const lanes_i fits = (scale >= lanes_of((float) t->scale_low)) & (scale <= lanes_of((float) t->scale_high));
        for (int b = -min_steps; b <= min_steps; ++b) {
            const lanes   min = x->min[s] + lanes_of((float) b), base = lanes_of((float) -b)*x->dmin[s];
            const lanes_i both = fits & (min >= lanes_of(0)) & (min <= lanes_of((float) t->min_high));
            consider(best, both, cost_of(f, step, base), step, base, scale, min);
        }
    }
}

// Halves near the least squares, of the scale alone where there is no min.
LANES_INLINE void search_halves(const struct stock_rows * x, int64_t s, const struct forms * f, struct change * best) {
    const lanes one = lanes_of(1), zero = lanes_of(0);
    lanes a, b = zero;
    if (x->t->has_min) {
        const lanes   oo = lanes_of(f->oo), det = f->ll*oo - f->lo*f->lo;
        const lanes_i good = det > zero;
        const lanes   by = one/lanes_select(good, det, one);
        a = lanes_select(good, (f->gl*oo - f->go*f->lo)*by, zero);
        b = lanes_select(good, (f->go*f->ll - f->gl*f->lo)*by, zero);
    } else {
        const lanes_i good = f->ll > zero;
        a = lanes_select(good, f->gl*(one/lanes_select(good, f->ll, one)), zero);
    }
    const lanes scale = as_halves(x->d[s] + a), min = x->t->has_min ? as_halves(x->dmin[s] + b) : zero;
    const lanes step = scale - x->d[s], base = x->t->has_min ? min - x->dmin[s] : zero;
    consider(best, x->d[s] != zero, cost_of(f, step, base), step, base, scale, min);
}

// Scale and min of each sub-block in turn.
EXT_CLONES __attribute__((noinline))
static void descend_scales(struct stock_rows * x, struct panel * p) {
    const bool integers = x->t->scale_high != 0;
    for (int i0 = 0; i0 < p->n; i0 += x->t->sub) {
        const int64_t s = (p->begin + i0)/x->t->sub;
        const struct forms f = sub_block_forms(x, p, i0);
        struct change best = {lanes_of(0), lanes_of(0), lanes_of(0), integers ? x->scale[s] : x->d[s], integers ? x->min[s] : x->dmin[s]};
        if (integers) {
            search_integers(x, s, &f, &best);
        } else {
            search_halves(x, s, &f, &best);
        }
        if (!lanes_any(best.cost < lanes_of(0))) {
            continue;
        }
        if (integers) {
            x->scale[s] = best.scale;
            x->min[s]   = best.min;
        } else {
            x->d[s]    = best.scale;
            x->dmin[s] = best.min;
        }
        set_step(x, s);
        x->cost += best.cost;
        for (int i = i0; i < i0 + x->t->sub; ++i) {
            raise_value(x, p, i, best.step*x->level[p->begin + i] + best.base);
        }
    }
}

// The halves of the block that the panel is: what hangs on the scales times 1 + a, the mins times 1 + b.
static void descend_block(struct stock_rows * x, struct panel * p) {
    const struct stock_layout * t = x->t;
    const float * form = x->m->forms + x->first*x->m->columns;
    const int64_t s0 = p->begin/t->sub;
    const lanes   zero = lanes_of(0), one = lanes_of(1);
    lanes v[2][QK_K], product[2][QK_K], vv = zero, uu = zero, vu = zero, gv = zero, gu = zero;
    for (int i = 0; i < QK_K; ++i) {
        const int64_t s = s0 + i/t->sub;
        v[0][i] = x->step[s]*x->level[p->begin + i];
        v[1][i] = x->base[s];
    }
    memset(product, 0, sizeof(product));
    for (int h = 0; h < (t->has_min ? 2 : 1); ++h) {
        add_matrix(x, form + p->begin*TILE_ROWS, p->begin, QK_K, QK_K, v[h], product[h]);
    }
    for (int i = 0; i < QK_K; ++i) {
        vv += v[0][i]*product[0][i];
        uu += v[1][i]*product[1][i];
        vu += v[0][i]*product[1][i];
        gv += v[0][i]*p->g[i];
        gu += v[1][i]*p->g[i];
    }
    const lanes   d = x->d[s0], dmin = x->dmin[s0], det = vv*uu - vu*vu;
    const lanes_i both = (det > lanes_of(1e-6f)*(vv*uu)) & (dmin != zero) & (d != zero), alone = (vv > zero) & (d != zero);
    lanes a = lanes_select(both, (gv*uu - gu*vu)/lanes_select(both, det, one), lanes_select(alone, gv/lanes_select(alone, vv, one), zero));
    lanes b = lanes_select(both, (gu*vv - gv*vu)/lanes_select(both, det, one), zero);
    const lanes d_new = as_halves(d + d*a), dmin_new = as_halves(dmin + dmin*b);
    a = lanes_select(d != zero, d_new/lanes_select(d != zero, d, one) - one, zero);
    b = lanes_select(dmin != zero, dmin_new/lanes_select(dmin != zero, dmin, one) - one, zero);
    const lanes   cost = a*(vv*a - (gv + gv) + (vu + vu)*b) + b*(uu*b - (gu + gu));
    const lanes_i better = cost < zero;
    if (!lanes_any(better)) {
        return;
    }
    x->cost += lanes_select(better, cost, zero);
    for (int64_t s = s0; s < s0 + QK_K/t->sub; ++s) {
        x->d[s]    = lanes_select(better, d_new, d);
        x->dmin[s] = lanes_select(better, dmin_new, dmin);
        set_step(x, s);
    }
    a = lanes_select(better, a, zero);
    b = lanes_select(better, b, zero);
    for (int i = 0; i < QK_K; ++i) {
        x->e[p->begin + i] -= a*v[0][i] + b*v[1][i];
        p->g[i] -= a*product[0][i] + b*product[1][i];
    }
}

static void refresh_errors(struct stock_rows * x, int64_t begin, int64_t n) {
    for (int64_t j = begin; j < begin + n; ++j) {
        const int64_t s = j/x->t->sub;
        x->e[j] = x->w[j] - (x->base[s] + x->step[s]*x->level[j]);
    }
}

static void descend(struct stock_rows * x, struct panel * p) {
    if (x->t->scale_high != 0) {
        descend_block(x, p);
    }
    for (int round = 0; round < 2; ++round) {
        if (descend_codes(x, p)) {
            descend_codes(x, p);
        }
        descend_scales(x, p);
    }
    descend_codes(x, p);
}

// --- rows ------------------------------------------------------------------------------------------------------------

static void load_row(struct stock_rows * x, int r, const float * src, char * blocks) {
    const struct stock_layout * t = x->t;
    const size_t size = ggml_type_size(t->type);
    struct stock_block b;
    for (int64_t j = 0; j < x->n; j += t->block) {
        stock_load(t, blocks + j/t->block*size, &b);
        for (int s = 0; s < t->block/t->sub; ++s) {
            const int64_t at = j/t->sub + s;
            x->d[at][r]     = b.d;
            x->dmin[at][r]  = b.dmin;
            x->scale[at][r] = (float) b.scale[s];
            x->min[at][r]   = (float) b.min[s];
        }
        for (int i = 0; i < t->block; ++i) {
            x->w[j + i][r]     = src[j + i];
            x->level[j + i][r] = t->has_table ? (float) x->table[b.code[i]] : (float) (b.code[i] + t->low);
        }
    }
}

static void store_row(const struct stock_rows * x, int r, char * blocks) {
    const struct stock_layout * t = x->t;
    const size_t size = ggml_type_size(t->type);
    struct stock_block b;
    for (int64_t j = 0; j < x->n; j += t->block) {
        b.d    = x->d[j/t->sub][r];
        b.dmin = x->dmin[j/t->sub][r];
        for (int s = 0; s < t->block/t->sub; ++s) {
            b.scale[s] = (int) x->scale[j/t->sub + s][r];
            b.min[s]   = (int) x->min[j/t->sub + s][r];
        }
        for (int i = 0; i < t->block; ++i) {
            b.code[i] = code_of(t, x->table, x->level[j + i][r]);
        }
        stock_store(t, &b, blocks + j/t->block*size);
    }
}

// Room for the rows' part of the widest matrix. False if memory is out.
static bool rows_init(struct stock_rows * x, const struct stock_layout * t, const struct stock_metric * m) {
    const int64_t n = m->columns, n_sub = n/t->sub;
    lanes * room = calloc((size_t) (5*n + 7*n_sub), sizeof(lanes));
    *x = (struct stock_rows) {.t = t, .m = m, .table = kvalues_iq4nl, .w = room, .panel = calloc(1, sizeof(struct panel))};
    if (room != NULL) {
        lanes ** const of_columns[] = {&x->w, &x->e, &x->level, &x->fed, &x->start};
        lanes ** const of_blocks[]  = {&x->d, &x->dmin, &x->scale, &x->min, &x->step, &x->base, &x->inverse};
        for (int i = 0; i < 5; ++i) {
            *of_columns[i] = room + i*n;
        }
        for (int i = 0; i < 7; ++i) {
            *of_blocks[i] = room + 5*n + i*n_sub;
        }
    }
    return room != NULL && x->panel != NULL;
}

int stock_columns(enum ggml_type type) {
    return stock_layout(type) ? 1 : stock_codebook_columns(type);
}

void stock_encode(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance, const struct stock_metric * m,
                  int sweeps) {
    const struct stock_layout * t = stock_layout(type);
    struct stock_rows x;
    if (t == NULL) {
        stock_codebook_encode(type, src, dst, n_rows, importance, m, sweeps);
        return;
    }
    const struct stock_coder coder = {load_row, store_row, set_step, refresh_errors, decide_panel, descend, t->sub};
    const bool good = rows_init(&x, t, m);
    GGML_ASSERT(good);
    ggml_quantize_chunk(type, src, dst, 0, n_rows, m->n_per_row, importance);
    stock_encode_rows(&coder, &x, type, src, dst, n_rows, sweeps);
    free(x.w);
    free(x.panel);
}
