// Encode upstream's scalar types under a Hessian. The initial scales are those of upstream's encoder, or of a search that starts from the largest
// weight of a sub-block. Then, for each Hessian of a row:
//   1. choose codes column by column with error feedback, those of the largest mean square input first (GPTQ's "act-order")
//   2. sweep over panels of columns: refit the halves of a block, then descend over codes and over the scales of sub-blocks in turn
// Lanes hold 16 rows. Every float operation has one order, so that the numpy reference gives the same bytes
// (py/ggml_ext/quants/_upstream.py); compiled with -ffp-contract=off. docs/results/encoders.md has what each step gains.
#include "upstream.h"

#include "upstream-layouts.h"
#include "upstream-rows.h"

#define GGML_COMMON_IMPL_C
#include "ggml-common.h" // kvalues_iq4nl

// --- levels ----------------------------------------------------------------------------------------------------------

static const int8_t * const k_tables[] = {[LEVELS_IQ4] = kvalues_iq4nl, [LEVELS_FP4] = k_levels_fp4, [LEVELS_SIGN] = k_levels_sign};

// Return the level nearest to v; of two equals the even one, in a table the larger one.
LANES_INLINE lanes nearest_level(const struct upstream_layout * t, const int8_t * table, lanes v) {
    if (t->levels != INTEGERS) {
        lanes level = lanes_splat(table[0]);
        for (int i = 1; i <= t->high; ++i) {
            const lanes middle = lanes_splat(0.5f*((float) table[i - 1] + (float) table[i]));
            level = lanes_select(v >= middle, lanes_splat(table[i]), level);
        }
        return level;
    }
    const lanes low = lanes_splat((float) t->low), high = lanes_splat((float) t->high);
    const lanes rounder = lanes_splat(12582912.0f); // 1.5*2^23: adding it rounds to an integer
    v = lanes_select(v > low, v, low);
    v = lanes_select(v < high, v, high);
    return (v + rounder) - rounder;
}

static uint8_t find_code(const struct upstream_layout * t, const int8_t * table, float level) {
    int code = 0;
    if (t->levels == INTEGERS) {
        return (uint8_t) ((int) level - t->low);
    }
    while (code < t->high && (float) table[code] < level) {
        ++code;
    }
    return (uint8_t) code;
}

static void set_step(struct upstream_rows * x, int64_t s) {
    const bool integers = x->t->scale_high != 0;
    x->step[s] = integers ? x->d[s]*x->scale[s] : x->d[s];
    x->base[s] = !x->t->has_min ? lanes_splat(0) : integers ? -(x->dmin[s]*x->min[s]) : x->dmin[s];
    const lanes one = lanes_splat(1), zero = lanes_splat(0);
    const lanes_i is_zero = x->step[s] == zero;
    x->inverse[s] = lanes_select(is_zero, zero, one/lanes_select(is_zero, one, x->step[s]));
}

// Round to the nearest value of the scale's format.
LANES_INLINE lanes round_scale(const struct upstream_layout * t, lanes v) {
    if (t->scale == HALF) {
        return round_to_fp16(v);
    }
    for (int r = 0; r < LANES; ++r) {
        v[r] = upstream_round_step(t->scale, v[r]);
    }
    return v;
}

// --- first scales ----------------------------------------------------------------------------------------------------

// Consider a step for sub-block s by the error of its nearest levels, weighted by the diagonal of H; then the step that fits these levels best.
LANES_INLINE void consider_step(struct upstream_rows * x, int64_t s, const float * h, lanes step, lanes * best) {
    const lanes   zero = lanes_splat(0), one = lanes_splat(1);
    const lanes_i is_zero = step == zero;
    const lanes   inverse = lanes_select(is_zero, zero, one/lanes_select(is_zero, one, step));
    lanes cost = zero, ll = zero, lw = zero;
    for (int i = 0; i < x->t->sub; ++i) {
        const lanes w = x->w[s*x->t->sub + i], level = nearest_level(x->t, x->table, w*inverse), e = w - step*level, weighted = lanes_splat(h[i])*level;
        cost += lanes_splat(h[i])*(e*e);
        ll   += weighted*level;
        lw   += weighted*w;
    }
    const lanes_i fits = ll > zero;
    const lanes   refit = round_scale(x->t, lanes_select(fits, lw/lanes_select(fits, ll, one), step)), rise = refit - step;
    const lanes   refit_cost = cost + rise*(ll*rise - ((lw - ll*step) + (lw - ll*step)));
    const lanes_i is_better = refit_cost < cost;
    step = lanes_select(is_better, refit, step);
    cost = lanes_select(is_better, refit_cost, cost);
    x->d[s] = lanes_select(cost < *best, step, x->d[s]);
    *best   = lanes_select(cost < *best, cost, *best);
}

// Choose the first step of each sub-block.
EXT_CLONES __attribute__((noinline))
static void search_steps(struct upstream_rows * x) {
    const struct upstream_layout * t = x->t;
    const float * H = x->m->H + x->first*x->m->columns;
    for (int64_t s = 0; s < x->n/t->sub && t->search.step > 0; ++s) {
        float h[QK_K];
        lanes largest = lanes_splat(0), best = lanes_splat(FLT_MAX);
        for (int i = 0; i < t->sub; ++i) {
            const lanes w = x->w[s*t->sub + i], magnitude = lanes_select(w < lanes_splat(0), -w, w);
            largest = lanes_select(magnitude > largest, magnitude, largest);
            h[i] = H[upstream_index(x->n, s*t->sub + i, s*t->sub + i)];
        }
        for (int k = 0; k < STEP_CANDIDATES; ++k) {
            const lanes step = round_scale(t, largest*lanes_splat(t->search.first + (float) k*t->search.step));
            consider_step(x, s, h, step, &best);
            if (t->search.negative) {
                consider_step(x, s, h, -step, &best);
            }
        }
        set_step(x, s);
    }
}

// --- first codes -----------------------------------------------------------------------------------------------------

EXT_CLONES __attribute__((noinline))
static void decide_panel(struct upstream_rows * x, int64_t first_k, int64_t last_k, lanes * goal) {
    const float   * L = x->m->L + x->first*x->m->columns;
    const int32_t * order = x->m->order + x->first;
    const float   * D = x->m->D + x->first;
    for (int64_t k = first_k; k < last_k; ++k) {
        const int64_t j = order[k], s = j/x->t->sub;
        const lanes   v = goal[k - first_k];
        const lanes   level = nearest_level(x->t, x->table, (v - x->base[s])*x->inverse[s]);
        const lanes   value = x->base[s] + x->step[s]*level, r = v - value;
        x->level[j] = level;
        x->e[j]     = x->w[j] - value;
        x->e_order[k] = x->e[j];
        x->cost    += lanes_splat(D[k])*(r*r);
        for (int64_t i = k + 1; i < last_k; ++i) {
            goal[i - first_k] += lanes_splat(L[upstream_index(x->n, i, k)])*x->e_order[k];
        }
    }
}

// --- descents --------------------------------------------------------------------------------------------------------

// Add delta to the value of column i of the panel.
LANES_INLINE void add_to_value(struct upstream_rows * x, struct panel * p, int i, lanes delta) {
    const float * row = p->H[i];
    half_lanes halves[2], * g = (half_lanes *) p->g;
    memcpy(halves, &delta, sizeof(delta));
    x->e[p->begin + i] -= delta;
    for (int k = 0; k < p->n; ++k) {
        g[2*k]     -= row[k]*halves[0];
        g[2*k + 1] -= row[k]*halves[1];
    }
}

// Descend over the code of each column in turn. Return false if nothing changed.
EXT_CLONES __attribute__((noinline))
static bool descend_codes(struct upstream_rows * x, struct panel * p) {
    bool changed = false;
    for (int i = 0; i < p->n; ++i) {
        const int64_t j = p->begin + i, s = j/x->t->sub;
        const float   diagonal = p->H[i][i];
        const lanes   inverse = lanes_splat(1.0f/diagonal);
        const lanes   level = nearest_level(x->t, x->table, x->level[j] + (p->g[i]*inverse)*x->inverse[s]);
        // with a step of zero every code gives the same value
        const lanes_i moves = (level != x->level[j]) & (x->inverse[s] != lanes_splat(0));
        if (!lanes_any(moves)) {
            continue;
        }
        const lanes delta = lanes_select(moves, (level - x->level[j])*x->step[s], lanes_splat(0));
        x->level[j] = lanes_select(moves, level, x->level[j]);
        x->cost    += delta*(lanes_splat(diagonal)*delta - (p->g[i] + p->g[i]));
        add_to_value(x, p, i, delta);
        changed = true;
    }
    return changed;
}

// Cost of a sub-block when its step rises by a and its base by b: a*(ll*a - 2*gl + 2*lo*b) + b*(oo*b - 2*go).
struct quadratic {
    lanes ll, gl, lo, go;
    float oo;
};

LANES_INLINE struct quadratic compute_quadratic(const struct upstream_rows * x, const struct panel * p, int i0) {
    struct quadratic f = {lanes_splat(0), lanes_splat(0), lanes_splat(0), lanes_splat(0), 0};
    for (int i = i0; i < i0 + x->t->sub; ++i) {
        const float * row = p->H[i];
        const lanes   level = x->level[p->begin + i];
        lanes sum = lanes_splat(0);
        float row_sum = 0;
        for (int k = i0; k < i0 + x->t->sub; ++k) {
            sum += lanes_splat(row[k])*x->level[p->begin + k];
            row_sum += row[k];
        }
        f.ll += level*sum;
        f.lo += sum;
        f.oo += row_sum;
        f.gl += p->g[i]*level;
        f.go += p->g[i];
    }
    return f;
}

LANES_INLINE lanes evaluate_quadratic(const struct quadratic * f, lanes a, lanes b) {
    return a*(f->ll*a - (f->gl + f->gl) + (f->lo + f->lo)*b) + b*(lanes_splat(f->oo)*b - (f->go + f->go));
}

struct change {
    lanes cost, step, base; // increases
    lanes scale, min;       // new values
};

LANES_INLINE void consider(struct change * best, lanes_i allowed, lanes cost, lanes step, lanes base, lanes scale, lanes min) {
    const lanes_i better = allowed & (cost < best->cost);
    best->cost  = lanes_select(better, cost,  best->cost);
    best->step  = lanes_select(better, step,  best->step);
    best->base  = lanes_select(better, base,  best->base);
    best->scale = lanes_select(better, scale, best->scale);
    best->min   = lanes_select(better, min,   best->min);
}

// Try integers near those of sub-block s.
LANES_INLINE void search_integers(const struct upstream_rows * x, int64_t s, const struct quadratic * f, struct change * best) {
    const struct upstream_layout * t = x->t;
    const int min_steps = t->has_min ? SCALE_STEPS : 0;
    for (int a = -SCALE_STEPS; a <= SCALE_STEPS; ++a) {
        const lanes   scale = x->scale[s] + lanes_splat((float) a), step = lanes_splat((float) a)*x->d[s];
        const lanes_i fits = (scale >= lanes_splat((float) t->scale_low)) & (scale <= lanes_splat((float) t->scale_high));
        for (int b = -min_steps; b <= min_steps; ++b) {
            const lanes   min = x->min[s] + lanes_splat((float) b), base = lanes_splat((float) -b)*x->dmin[s];
            const lanes_i valid = fits & (min >= lanes_splat(0)) & (min <= lanes_splat((float) t->min_high));
            consider(best, valid, evaluate_quadratic(f, step, base), step, base, scale, min);
        }
    }
}

// Try the floats nearest to the least-squares solution, without a min the scale alone.
LANES_INLINE void search_floats(const struct upstream_rows * x, int64_t s, const struct quadratic * f, struct change * best) {
    const lanes one = lanes_splat(1), zero = lanes_splat(0);
    lanes a, b = zero;
    if (x->t->has_min) {
        const lanes   oo = lanes_splat(f->oo), det = f->ll*oo - f->lo*f->lo;
        const lanes_i solvable = det > zero;
        const lanes   inverse_det = one/lanes_select(solvable, det, one);
        a = lanes_select(solvable, (f->gl*oo - f->go*f->lo)*inverse_det, zero);
        b = lanes_select(solvable, (f->go*f->ll - f->gl*f->lo)*inverse_det, zero);
    } else {
        const lanes_i solvable = f->ll > zero;
        a = lanes_select(solvable, f->gl*(one/lanes_select(solvable, f->ll, one)), zero);
    }
    const lanes scale = round_scale(x->t, x->d[s] + a), min = x->t->has_min ? round_to_fp16(x->dmin[s] + b) : zero;
    const lanes step = scale - x->d[s], base = x->t->has_min ? min - x->dmin[s] : zero;
    consider(best, x->d[s] != zero, evaluate_quadratic(f, step, base), step, base, scale, min);
}

// Descend over scale and min of each sub-block in turn.
EXT_CLONES __attribute__((noinline))
static void descend_scales(struct upstream_rows * x, struct panel * p) {
    const bool integers = x->t->scale_high != 0;
    for (int i0 = 0; i0 < p->n; i0 += x->t->sub) {
        const int64_t s = (p->begin + i0)/x->t->sub;
        const struct quadratic f = compute_quadratic(x, p, i0);
        struct change best = {lanes_splat(0), lanes_splat(0), lanes_splat(0), integers ? x->scale[s] : x->d[s], integers ? x->min[s] : x->dmin[s]};
        if (integers) {
            search_integers(x, s, &f, &best);
        } else {
            search_floats(x, s, &f, &best);
        }
        if (!lanes_any(best.cost < lanes_splat(0))) {
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
            add_to_value(x, p, i, best.step*x->level[p->begin + i] + best.base);
        }
    }
}

// Refit the halves of the panel's block: its scales times 1 + a, its mins times 1 + b.
static void descend_block(struct upstream_rows * x, struct panel * p) {
    const struct upstream_layout * t = x->t;
    const float * H = x->m->H + x->first*x->m->columns;
    const int64_t s0 = p->begin/t->sub;
    const lanes   zero = lanes_splat(0), one = lanes_splat(1);
    lanes v[2][QK_K], product[2][QK_K], vv = zero, uu = zero, vu = zero, gv = zero, gu = zero;
    for (int i = 0; i < QK_K; ++i) {
        const int64_t s = s0 + i/t->sub;
        v[0][i] = x->step[s]*x->level[p->begin + i];
        v[1][i] = x->base[s];
    }
    memset(product, 0, sizeof(product));
    for (int h = 0; h < (t->has_min ? 2 : 1); ++h) {
        add_matrix(x, H + p->begin*TILE_ROWS, p->begin, QK_K, QK_K, v[h], product[h]);
    }
    for (int i = 0; i < QK_K; ++i) {
        vv += v[0][i]*product[0][i];
        uu += v[1][i]*product[1][i];
        vu += v[0][i]*product[1][i];
        gv += v[0][i]*p->g[i];
        gu += v[1][i]*p->g[i];
    }
    const lanes   d = x->d[s0], dmin = x->dmin[s0], det = vv*uu - vu*vu;
    const lanes_i valid = (det > lanes_splat(1e-6f)*(vv*uu)) & (dmin != zero) & (d != zero), alone = (vv > zero) & (d != zero);
    lanes a = lanes_select(valid, (gv*uu - gu*vu)/lanes_select(valid, det, one), lanes_select(alone, gv/lanes_select(alone, vv, one), zero));
    lanes b = lanes_select(valid, (gu*vv - gv*vu)/lanes_select(valid, det, one), zero);
    const lanes d_new = round_to_fp16(d + d*a), dmin_new = round_to_fp16(dmin + dmin*b);
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

static void refresh_errors(struct upstream_rows * x, int64_t begin, int64_t n) {
    for (int64_t j = begin; j < begin + n; ++j) {
        const int64_t s = j/x->t->sub;
        x->e[j] = x->w[j] - (x->base[s] + x->step[s]*x->level[j]);
    }
}

static void descend(struct upstream_rows * x, struct panel * p) {
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

static void load_row(struct upstream_rows * x, int r, const float * src, char * blocks) {
    const struct upstream_layout * t = x->t;
    const size_t size = ggml_type_size(t->type);
    struct upstream_block b;
    for (int64_t j = 0; j < x->n; j += t->block) {
        upstream_load(t, blocks + j/t->block*size, &b);
        for (int s = 0; s < t->block/t->sub; ++s) {
            const int64_t s_row = j/t->sub + s;
            x->d[s_row][r]     = t->scale == HALF ? b.d : upstream_get_step(t->scale, b.scale[s]);
            x->dmin[s_row][r]  = b.dmin;
            x->scale[s_row][r] = (float) b.scale[s];
            x->min[s_row][r]   = (float) b.min[s];
        }
        for (int i = 0; i < t->block; ++i) {
            x->w[j + i][r]     = src[j + i];
            x->level[j + i][r] = t->levels != INTEGERS ? (float) x->table[b.code[i]] : (float) (b.code[i] + t->low);
        }
    }
}

static void store_row(const struct upstream_rows * x, int r, char * blocks) {
    const struct upstream_layout * t = x->t;
    const size_t size = ggml_type_size(t->type);
    struct upstream_block b;
    for (int64_t j = 0; j < x->n; j += t->block) {
        b.d    = x->d[j/t->sub][r];
        b.dmin = x->dmin[j/t->sub][r];
        for (int s = 0; s < t->block/t->sub; ++s) {
            b.scale[s] = t->scale == HALF ? (int) x->scale[j/t->sub + s][r] : upstream_get_step_bits(t->scale, x->d[j/t->sub + s][r]);
            b.min[s]   = (int) x->min[j/t->sub + s][r];
        }
        for (int i = 0; i < t->block; ++i) {
            b.code[i] = find_code(t, x->table, x->level[j + i][r]);
        }
        upstream_store(t, &b, blocks + j/t->block*size);
    }
}

// Allocate arrays for the rows' part of the widest Hessian. Return false if memory runs out.
static bool rows_init(struct upstream_rows * x, const struct upstream_layout * t, const struct upstream_metric * m) {
    const int64_t n = m->columns, n_sub = n/t->sub;
    lanes * memory = calloc((size_t) (5*n + 7*n_sub), sizeof(lanes));
    *x = (struct upstream_rows) {.t = t, .m = m, .table = k_tables[t->levels], .w = memory, .panel = calloc(1, sizeof(struct panel))};
    if (memory != NULL) {
        lanes ** const column_arrays[] = {&x->w, &x->e, &x->level, &x->e_order, &x->e_upstream};
        lanes ** const sub_block_arrays[] = {&x->d, &x->dmin, &x->scale, &x->min, &x->step, &x->base, &x->inverse};
        for (int i = 0; i < 5; ++i) {
            *column_arrays[i] = memory + i*n;
        }
        for (int i = 0; i < 7; ++i) {
            *sub_block_arrays[i] = memory + 5*n + i*n_sub;
        }
    }
    return memory != NULL && x->panel != NULL;
}

void upstream_encode_scalars(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance, const struct upstream_metric * m,
                             int sweeps) {
    const struct upstream_layout * t = upstream_layout(type);
    struct upstream_rows x;
    const struct upstream_coder coder = {load_row, store_row, set_step, search_steps, refresh_errors, decide_panel, descend, t->sub};
    const bool allocated = rows_init(&x, t, m);
    GGML_ASSERT(allocated);
    ggml_quantize_chunk(type, src, dst, 0, n_rows, m->n_per_row, importance);
    upstream_encode_rows(&coder, &x, type, src, dst, n_rows, sweeps);
    free(x.w);
    free(x.panel);
}
