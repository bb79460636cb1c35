// Encode upstream's codebook types under a Hessian. The initial scales are those of upstream's encoder. Then, for each Hessian of a row:
//   1. choose points and signs group by group with error feedback, those of the largest mean square input first
//   2. sweep over panels of columns: descend over points and signs, the scales of sub-blocks and the scale of the block
// Lanes hold 16 rows. Every float operation has one order for any number of rows; compiled with -ffp-contract=off.
// docs/results/encoders.md has what each step gains.
#include "upstream.h"

#include "codebook-search.h"

// --- first points ----------------------------------------------------------------------------------------------------

static void set_step(struct upstream_rows * x, int64_t s) {
    x->step[s] = x->d[s]*(x->scale[s] + lanes_splat(0.5f))*lanes_splat(x->book->t->factor);
}

// Load the current choice for the columns from j on.
static void load_choice(const struct upstream_rows * x, int64_t j, struct choice * c) {
    const struct codebook_layout * t = x->book->t;
    c->step = x->step[j/t->sub];
    memcpy(c->level, x->level + j, (size_t) t->columns*sizeof(lanes));
    memcpy(c->point, x->point + j/t->group, (size_t) (t->columns/t->group)*sizeof(lanes));
}

static void store_choice(struct upstream_rows * x, int64_t j, const struct choice * c) {
    const struct codebook_layout * t = x->book->t;
    memcpy(x->level + j, c->level, (size_t) t->columns*sizeof(lanes));
    memcpy(x->point + j/t->group, c->point, (size_t) (t->columns/t->group)*sizeof(lanes));
}

EXT_CLONES __attribute__((noinline))
static void add_panel_feedback(const struct upstream_rows * x, int64_t k, int n, int64_t last_k, lanes * goal) {
    const float * L = x->m->L + x->first*x->m->columns;
    for (int64_t i = k + n; i < last_k; ++i) {
        for (int64_t j = k; j < k + n; ++j) {
            goal[i - k] += lanes_splat(L[upstream_index(x->n, i, j)])*x->e_order[j];
        }
    }
}

static void decide_panel(struct upstream_rows * x, int64_t first_k, int64_t last_k, lanes * goal) {
    const float   * L = x->m->L + x->first*x->m->columns;
    const int32_t * order = x->m->order + x->first;
    const int       n     = x->book->t->columns;
    for (int64_t k = first_k; k < last_k; k += n, goal += n) {
        const int64_t j = order[k];
        struct ldl f;
        struct choice c;
        for (int a = 0; a < n; ++a) {
            f.D[a] = x->m->D[x->first + k + a];
            for (int b = 0; b < a; ++b) {
                f.L[b][a] = L[upstream_index(x->n, k + a, k + b)];
            }
        }
        memcpy(c.w, x->w + j, (size_t) n*sizeof(lanes));
        memcpy(c.goal, goal, (size_t) n*sizeof(lanes));
        load_choice(x, j, &c);
        choose(x->book, &f, &c);
        store_choice(x, j, &c);
        for (int a = 0; a < n; ++a) {
            x->e[j + a] = x->e_order[k + a] = c.w[a] - c.step*c.level[a];
        }
        x->cost += c.cost;
        add_panel_feedback(x, k, n, last_k, goal);
    }
}

// --- descents --------------------------------------------------------------------------------------------------------

// Add delta to the values of n columns from column i of the panel on.
EXT_CLONES __attribute__((noinline))
static void add_to_values(struct upstream_rows * x, struct panel * p, int i, int n, const lanes * delta) {
    for (int a = 0; a < n; ++a) {
        x->e[p->begin + i + a] -= delta[a];
    }
    for (int h = 0; h < 2; ++h) {
        for (int a0 = 0; a0 < n; a0 += 4) {
            half_lanes delta_half[4], * g = (half_lanes *) p->g + h;
            for (int a = 0; a < 4; ++a) {
                delta_half[a] = get_half_lanes(delta + a0 + a, h);
            }
            for (int k = 0; k < p->n; ++k) {
                half_lanes sum = g[2*k];
#pragma GCC unroll 4
                for (int a = 0; a < 4; ++a) {
                    sum -= p->H[i + a0 + a][k]*delta_half[a];
                }
                g[2*k] = sum;
            }
        }
    }
}

// Make a decision about columns with current values, given their gradients g: c->w becomes the current values, so that choose()
// compensates changes instead of errors. c->goal becomes the value of least cost of each column while the columns before it keep theirs:
// the current value plus D^-1 L^-T g, where L^T D L is the columns' own part of H.
EXT_CLONES __attribute__((noinline))
static void compute_goals(const struct ldl * f, const lanes * g, int n, struct choice * c) {
    lanes z[COLUMNS];
    for (int k = n - 1; k >= 0; --k) {
        z[k] = g[k];
        for (int j = k + 1; j < n; ++j) {
            z[k] -= lanes_splat(f->L[k][j])*z[j];
        }
    }
    for (int k = 0; k < n; ++k) {
        c->w[k]    = c->step*c->level[k];
        c->goal[k] = c->w[k] + z[k]*lanes_splat(1.0f/f->D[k]);
    }
}

// Descend over the point and signs of each group in turn.
static void descend_points(struct upstream_rows * x, struct panel * p) {
    const int n = x->book->t->columns;
    for (int i = 0; i < p->n; i += n) {
        const int64_t j = p->begin + i;
        const struct ldl * f = x->book->groups + (x->first + j)/n;
        struct choice c;
        lanes delta[COLUMNS];
        load_choice(x, j, &c);
        compute_goals(f, p->g + i, n, &c);
        choose(x->book, f, &c);
        if (!lanes_any(c.cost < c.cost_before)) {
            continue;
        }
        for (int a = 0; a < n; ++a) {
            delta[a] = c.step*c.level[a] - c.w[a];
        }
        store_choice(x, j, &c);
        x->cost += c.cost - c.cost_before;
        add_to_values(x, p, i, n, delta);
    }
}

// The cost of columns i0 .. i0 + n - 1 of the panel rises by a*(ll*a - 2*gl) when the step rises by a: ll = l^T H l and gl = g^T l for the
// levels l.
EXT_CLONES __attribute__((noinline))
static void compute_quadratic(const struct upstream_rows * x, const struct panel * p, int i0, int n, lanes * ll, lanes * gl) {
    *ll = *gl = lanes_splat(0);
    for (int i = i0; i < i0 + n; ++i) {
        half_lanes sum[2] = {half_lanes_splat(0), half_lanes_splat(0)};
        for (int k = i0; k < i0 + n; ++k) {
            const half_lanes * level = (const half_lanes *) (x->level + p->begin + k);
            sum[0] += p->H[i][k]*level[0];
            sum[1] += p->H[i][k]*level[1];
        }
        lanes product;
        memcpy(&product, sum, sizeof(sum));
        *ll += x->level[p->begin + i]*product;
        *gl += x->level[p->begin + i]*p->g[i];
    }
}

// Descend over the scale of each sub-block in turn.
static void descend_scales(struct upstream_rows * x, struct panel * p) {
    const struct codebook_layout * t = x->book->t;
    for (int i0 = 0; i0 < p->n; i0 += t->sub) {
        const int64_t s = (p->begin + i0)/t->sub;
        const lanes   unit = x->d[s]*lanes_splat(t->factor), step_before = x->step[s];
        lanes ll, gl, best = lanes_splat(0), scale = x->scale[s], deltas[QK_K];
        compute_quadratic(x, p, i0, t->sub, &ll, &gl);
        for (int a = -SCALE_STEPS; a <= SCALE_STEPS; ++a) {
            const lanes   new_scale = x->scale[s] + lanes_splat((float) a), delta = lanes_splat((float) a)*unit;
            const lanes   cost = delta*(ll*delta - (gl + gl));
            const lanes_i better = (new_scale >= lanes_splat(0)) & (new_scale <= lanes_splat(15)) & (cost < best);
            best  = lanes_select(better, cost, best);
            scale = lanes_select(better, new_scale, scale);
        }
        if (!lanes_any(best < lanes_splat(0))) {
            continue;
        }
        x->scale[s] = scale;
        set_step(x, s);
        x->cost += best;
        for (int i = 0; i < t->sub; ++i) {
            const lanes level = x->level[p->begin + i0 + i];
            deltas[i] = x->step[s]*level - step_before*level;
        }
        add_to_values(x, p, i0, t->sub, deltas);
    }
}

// Refit the scale of the panel's block: values times 1 + a.
static void descend_block(struct upstream_rows * x, struct panel * p) {
    const struct codebook_layout * t = x->book->t;
    const float * H = x->m->H + x->first*x->m->columns;
    const int64_t s0 = p->begin/t->sub;
    lanes value[QK_K], product[QK_K], vv = lanes_splat(0), gv = lanes_splat(0);
    for (int i = 0; i < QK_K; ++i) {
        value[i] = x->step[s0 + i/t->sub]*x->level[p->begin + i];
    }
    memset(product, 0, sizeof(product));
    add_matrix(x, H + p->begin*TILE_ROWS, p->begin, QK_K, QK_K, value, product);
    for (int i = 0; i < QK_K; ++i) {
        vv += value[i]*product[i];
        gv += value[i]*p->g[i];
    }
    const lanes   d = x->d[s0], one = lanes_splat(1), zero = lanes_splat(0);
    const lanes_i good = (vv > zero) & (d > zero);
    lanes d_new = round_to_fp16(d + d*lanes_select(good, gv/lanes_select(good, vv, one), zero));
    const lanes   a = lanes_select(good, d_new/lanes_select(good, d, one) - one, zero), cost = a*(vv*a - (gv + gv));
    const lanes_i better = good & (d_new > zero) & (cost < zero);
    if (!lanes_any(better)) {
        return;
    }
    d_new = lanes_select(better, d_new, d);
    x->cost += lanes_select(better, cost, zero);
    for (int s = 0; s < QK_K/t->sub; ++s) {
        x->d[s0 + s] = d_new;
        set_step(x, s0 + s);
    }
    for (int i = 0; i < QK_K; ++i) {
        x->e[p->begin + i] -= x->step[s0 + i/t->sub]*x->level[p->begin + i] - value[i];
        p->g[i] -= lanes_select(better, a*product[i], zero);
    }
}

static void refresh_errors(struct upstream_rows * x, int64_t begin, int64_t n) {
    for (int64_t j = begin; j < begin + n; ++j) {
        x->e[j] = x->w[j] - x->step[j/x->book->t->sub]*x->level[j];
    }
}

static void descend(struct upstream_rows * x, struct panel * p) {
    descend_block(x, p);
    for (int round = 0; round < 2; ++round) {
        descend_scales(x, p);
        descend_points(x, p);
    }
}

// --- rows ------------------------------------------------------------------------------------------------------------

static void load_row(struct upstream_rows * x, int r, const float * src, char * blocks) {
    const struct codebook_layout * t = x->book->t;
    const size_t size = ggml_type_size(t->type);
    struct codebook_block b;
    for (int64_t j = 0; j < x->n; j += QK_K) {
        codebook_load(t, blocks + j/QK_K*size, &b);
        for (int s = 0; s < QK_K/t->sub; ++s) {
            x->d[j/t->sub + s][r]     = b.d;
            x->scale[j/t->sub + s][r] = (float) b.scale[s];
        }
        for (int i = 0; i < QK_K; ++i) {
            const int   point = b.point[i/t->group];
            const float level = x->book->levels[x->book->level[point][i%t->group]];
            x->w[j + i][r]     = src[j + i];
            x->level[j + i][r] = b.sign[i/8] >> i%8 & 1 ? -level : level;
            x->point[(j + i)/t->group][r] = point;
        }
    }
}

static void store_row(const struct upstream_rows * x, int r, char * blocks) {
    const struct codebook_layout * t = x->book->t;
    const size_t size = ggml_type_size(t->type);
    for (int64_t j = 0; j < x->n; j += QK_K) {
        struct codebook_block b = {.d = x->d[j/t->sub][r]};
        for (int s = 0; s < QK_K/t->sub; ++s) {
            b.scale[s] = (int) x->scale[j/t->sub + s][r];
        }
        for (int i = 0; i < QK_K; ++i) {
            b.point[i/t->group] = x->point[(j + i)/t->group][r];
            b.sign[i/8] |= (x->level[j + i][r] < 0) << i%8;
        }
        codebook_store(t, &b, blocks + j/QK_K*size);
    }
}

// Factorize the part of H of each group of columns on its own.
static void factorize_groups(const struct upstream_metric * m, int columns, struct ldl * groups) {
    for (int64_t first = 0; first < m->n_per_row; first += m->columns) {
        const int64_t n = m->n_per_row - first < m->columns ? m->n_per_row - first : m->columns;
        const float * H = m->H + first*m->columns;
        for (int64_t j0 = 0; j0 < n; j0 += columns, ++groups) {
            double a[COLUMNS][COLUMNS];
            for (int i = 0; i < columns; ++i) {
                for (int j = 0; j < columns; ++j) {
                    a[i][j] = (double) H[upstream_index(n, j0 + i, j0 + j)];
                }
            }
            for (int k = columns - 1; k >= 0; --k) {
                const double pivot = a[k][k] > 0 ? a[k][k] : (double) FLT_MIN; // H is positive definite, but rounding can cost a small pivot its sign
                groups->D[k] = (float) pivot;
                for (int j = 0; j < k; ++j) {
                    groups->L[j][k] = (float) (a[k][j]/pivot);
                    for (int i = 0; i < k; ++i) {
                        a[i][j] -= a[k][i]*a[k][j]/pivot;
                    }
                }
            }
        }
    }
}

// Copy the diagonal of H, the mean square input of each column.
static void copy_diagonal(const struct upstream_metric * m, float * diagonal) {
    for (int64_t first = 0; first < m->n_per_row; first += m->columns) {
        const int64_t n = m->n_per_row - first < m->columns ? m->n_per_row - first : m->columns;
        for (int64_t j = 0; j < n; ++j) {
            diagonal[first + j] = m->H[first*m->columns + upstream_index(n, j, j)];
        }
    }
}

// Allocate arrays for the rows' part of the widest Hessian. Return false if memory runs out.
static bool rows_init(struct upstream_rows * x, const struct codebook_layout * t, const struct upstream_metric * m) {
    const int64_t n = m->columns, n_sub = n/t->sub, n_points = n/t->group;
    struct codebook * book   = malloc(sizeof(*book));
    struct ldl      * groups = calloc((size_t) (m->n_per_row/t->columns), sizeof(*groups));
    lanes           * memory = calloc((size_t) (5*n + 3*n_sub + n_points), sizeof(lanes));
    *x = (struct upstream_rows) {.m = m, .book = book, .w = memory, .panel = calloc(1, sizeof(struct panel))};
    if (!book || !groups || !memory || !x->panel) {
        return false; // the caller aborts
    }
    codebook_init(book, t);
    book->groups = groups;
    factorize_groups(m, t->columns, groups);
    lanes ** const column_arrays[] = {&x->w, &x->e, &x->level, &x->e_order, &x->e_upstream};
    lanes ** const sub_block_arrays[] = {&x->d, &x->scale, &x->step};
    for (int i = 0; i < 5; ++i) {
        *column_arrays[i] = memory + i*n;
    }
    for (int i = 0; i < 3; ++i) {
        *sub_block_arrays[i] = memory + 5*n + i*n_sub;
    }
    x->point = (lanes_i *) (memory + 5*n + 3*n_sub);
    return true;
}

void upstream_encode_codebooks(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance,
                               const struct upstream_metric * m, int sweeps) {
    const struct codebook_layout * t = codebook_layout(type);
    const struct upstream_coder coder = {load_row, store_row, set_step, NULL, refresh_errors, decide_panel, descend, t->sub};
    struct upstream_rows x;
    float * diagonal = malloc((size_t) m->n_per_row*sizeof(float));
    const bool allocated = rows_init(&x, t, m) && diagonal;
    GGML_ASSERT(allocated);
    copy_diagonal(m, diagonal);
    ggml_quantize_chunk(type, src, dst, 0, n_rows, m->n_per_row, importance ? importance : diagonal);
    upstream_encode_rows(&coder, &x, type, src, dst, n_rows, sweeps);
    free(diagonal);
    free(x.w);
    free(x.panel);
    free(x.book->groups);
    free(x.book);
}
