// Encoder of llama.cpp's types of codebooks under second moments. Scales are those of llama.cpp's own encoder at first. Then, for each
// matrix of moments,
//   1. points and signs group by group, those of the largest mean square first, each with the errors of those before it fed back
//   2. sweeps over panels of columns: descents over points and signs, over the integers of the sub-blocks and over the block's scale
// Rows go through it in lanes, 16 at a time. Every float operation has one order, whatever the number of rows; compiled with
// -ffp-contract=off.
//
// Weighted squared error under whole matrices, mean of 14 matrices of the reference model (importances: the diagonal of the same
// moments; two sweeps):                    IQ3_S    IQ3_XXS  IQ2_S    IQ2_XS   IQ2_XXS
//   llama.cpp's encoder                    0.0126   0.0214   0.0425   0.0588   0.0801
//   1. alone                               0.0045   0.0083   0.0170   0.0239   0.0312
//   and points descended                   0.0041   0.0073   0.0153   0.0215   0.0278
//   and scales too                         0.0040   0.0071   0.0142   0.0200   0.0266
// Tried and left: turning each sign of a group whose signs are free gains 0.6 % of IQ2_S, 0.0 % of IQ3_S, at twice the time.
#include "stock.h"

#include "codebook-search.h"

// --- first points ----------------------------------------------------------------------------------------------------

static void set_step(struct stock_rows * x, int64_t s) {
    x->step[s] = x->d[s]*(x->scale[s] + lanes_of(0.5f))*lanes_of(x->book->t->factor);
}

// The choice about the columns from j on, as it stands.
static void take_choice(const struct stock_rows * x, int64_t j, struct choice * c) {
    const struct codebook_layout * t = x->book->t;
    c->step = x->step[j/t->sub];
    memcpy(c->level, x->level + j, (size_t) t->columns*sizeof(lanes));
    memcpy(c->point, x->point + j/t->group, (size_t) (t->columns/t->group)*sizeof(lanes));
}

static void keep_choice(struct stock_rows * x, int64_t j, const struct choice * c) {
    const struct codebook_layout * t = x->book->t;
    memcpy(x->level + j, c->level, (size_t) t->columns*sizeof(lanes));
    memcpy(x->point + j/t->group, c->point, (size_t) (t->columns/t->group)*sizeof(lanes));
}

EXT_CLONES __attribute__((noinline))
static void feed_panel(const struct stock_rows * x, int64_t k, int n, int64_t last_k, lanes * wish) {
    const float * gains = x->m->gains + x->first*x->m->columns;
    for (int64_t i = k + n; i < last_k; ++i) {
        for (int64_t j = k; j < k + n; ++j) {
            wish[i - k] += lanes_of(gains[stock_at(x->n, i, j)])*x->fed[j];
        }
    }
}

static void decide_panel(struct stock_rows * x, int64_t first_k, int64_t last_k, lanes * wish) {
    const float   * gains = x->m->gains + x->first*x->m->columns;
    const int32_t * order = x->m->order + x->first;
    const int       n     = x->book->t->columns;
    for (int64_t k = first_k; k < last_k; k += n, wish += n) {
        const int64_t j = order[k];
        struct form f;
        struct choice c;
        for (int a = 0; a < n; ++a) {
            f.pivots[a] = x->m->pivots[x->first + k + a];
            for (int b = 0; b < a; ++b) {
                f.gains[b][a] = gains[stock_at(x->n, k + a, k + b)];
            }
        }
        memcpy(c.w, x->w + j, (size_t) n*sizeof(lanes));
        memcpy(c.wish, wish, (size_t) n*sizeof(lanes));
        take_choice(x, j, &c);
        choose(x->book, &f, &c);
        keep_choice(x, j, &c);
        for (int a = 0; a < n; ++a) {
            x->e[j + a] = x->fed[k + a] = c.w[a] - c.step*c.level[a];
        }
        x->cost += c.cost;
        feed_panel(x, k, n, last_k, wish);
    }
}

// --- descents --------------------------------------------------------------------------------------------------------

// The values of n columns from column i of the panel on rise by `by`.
EXT_CLONES __attribute__((noinline))
static void raise_values(struct stock_rows * x, struct panel * p, int i, int n, const lanes * by) {
    for (int a = 0; a < n; ++a) {
        x->e[p->begin + i + a] -= by[a];
    }
    for (int h = 0; h < 2; ++h) {
        for (int a0 = 0; a0 < n; a0 += 4) {
            half_lanes rise[4], * g = (half_lanes *) p->g + h;
            for (int a = 0; a < 4; ++a) {
                rise[a] = half_at(by + a0 + a, h);
            }
            for (int k = 0; k < p->n; ++k) {
                half_lanes sum = g[2*k];
#pragma GCC unroll 4
                for (int a = 0; a < 4; ++a) {
                    sum -= p->form[i + a0 + a][k]*rise[a];
                }
                g[2*k] = sum;
            }
        }
    }
}

// What the columns wish for under their own form: their values and pivots^-1 gains^-T g.
EXT_CLONES __attribute__((noinline))
static void wishes_of(const struct form * f, const lanes * g, int n, struct choice * c) {
    lanes z[COLUMNS];
    for (int k = n - 1; k >= 0; --k) {
        z[k] = g[k];
        for (int j = k + 1; j < n; ++j) {
            z[k] -= lanes_of(f->gains[k][j])*z[j];
        }
    }
    for (int k = 0; k < n; ++k) {
        c->w[k]    = c->step*c->level[k];
        c->wish[k] = c->w[k] + z[k]*lanes_of(1.0f/f->pivots[k]);
    }
}

// Each group's point and signs in turn. False if nothing changed.
static bool descend_points(struct stock_rows * x, struct panel * p) {
    const int n = x->book->t->columns;
    bool changed = false;
    for (int i = 0; i < p->n; i += n) {
        const int64_t j = p->begin + i;
        const struct form * f = x->book->own + (x->first + j)/n;
        struct choice c;
        lanes by[COLUMNS];
        take_choice(x, j, &c);
        wishes_of(f, p->g + i, n, &c);
        choose(x->book, f, &c);
        if (!lanes_any(c.cost < c.was)) {
            continue;
        }
        for (int a = 0; a < n; ++a) {
            by[a] = c.step*c.level[a] - c.w[a];
        }
        keep_choice(x, j, &c);
        x->cost += c.cost - c.was;
        raise_values(x, p, i, n, by);
        changed = true;
    }
    return changed;
}

// What the errors of columns i0 .. i0 + n - 1 of the panel cost if each level's factor rises by a: a*(ll*a - 2*gl).
EXT_CLONES __attribute__((noinline))
static void level_forms(const struct stock_rows * x, const struct panel * p, int i0, int n, lanes * ll, lanes * gl) {
    *ll = *gl = lanes_of(0);
    for (int i = i0; i < i0 + n; ++i) {
        half_lanes sum[2] = {half_of(0), half_of(0)};
        for (int k = i0; k < i0 + n; ++k) {
            const half_lanes * level = (const half_lanes *) (x->level + p->begin + k);
            sum[0] += p->form[i][k]*level[0];
            sum[1] += p->form[i][k]*level[1];
        }
        lanes both;
        memcpy(&both, sum, sizeof(sum));
        *ll += x->level[p->begin + i]*both;
        *gl += x->level[p->begin + i]*p->g[i];
    }
}

// Scale of each sub-block in turn.
static void descend_scales(struct stock_rows * x, struct panel * p) {
    const struct codebook_layout * t = x->book->t;
    for (int i0 = 0; i0 < p->n; i0 += t->sub) {
        const int64_t s = (p->begin + i0)/t->sub;
        const lanes   of_one = x->d[s]*lanes_of(t->factor), own = x->step[s];
        lanes ll, gl, best = lanes_of(0), scale = x->scale[s], by[QK_K];
        level_forms(x, p, i0, t->sub, &ll, &gl);
        for (int a = -SCALE_STEPS; a <= SCALE_STEPS; ++a) {
            const lanes   to = x->scale[s] + lanes_of((float) a), rise = lanes_of((float) a)*of_one;
            const lanes   cost = rise*(ll*rise - (gl + gl));
            const lanes_i better = (to >= lanes_of(0)) & (to <= lanes_of(15)) & (cost < best);
            best  = lanes_select(better, cost, best);
            scale = lanes_select(better, to, scale);
        }
        if (!lanes_any(best < lanes_of(0))) {
            continue;
        }
        x->scale[s] = scale;
        set_step(x, s);
        x->cost += best;
        for (int i = 0; i < t->sub; ++i) {
            const lanes level = x->level[p->begin + i0 + i];
            by[i] = x->step[s]*level - own*level;
        }
        raise_values(x, p, i0, t->sub, by);
    }
}

// The half of the block that the panel is: values times 1 + a.
static void descend_block(struct stock_rows * x, struct panel * p) {
    const struct codebook_layout * t = x->book->t;
    const float * form = x->m->forms + x->first*x->m->columns;
    const int64_t s0 = p->begin/t->sub;
    lanes value[QK_K], product[QK_K], vv = lanes_of(0), gv = lanes_of(0);
    for (int i = 0; i < QK_K; ++i) {
        value[i] = x->step[s0 + i/t->sub]*x->level[p->begin + i];
    }
    memset(product, 0, sizeof(product));
    add_matrix(x, form + p->begin*TILE_ROWS, p->begin, QK_K, QK_K, value, product);
    for (int i = 0; i < QK_K; ++i) {
        vv += value[i]*product[i];
        gv += value[i]*p->g[i];
    }
    const lanes   d = x->d[s0], one = lanes_of(1), zero = lanes_of(0);
    const lanes_i good = (vv > zero) & (d > zero);
    lanes to = as_halves(d + d*lanes_select(good, gv/lanes_select(good, vv, one), zero));
    const lanes   a = lanes_select(good, to/lanes_select(good, d, one) - one, zero), cost = a*(vv*a - (gv + gv));
    const lanes_i better = good & (to > zero) & (cost < zero);
    if (!lanes_any(better)) {
        return;
    }
    to = lanes_select(better, to, d);
    x->cost += lanes_select(better, cost, zero);
    for (int s = 0; s < QK_K/t->sub; ++s) {
        x->d[s0 + s] = to;
        set_step(x, s0 + s);
    }
    for (int i = 0; i < QK_K; ++i) {
        x->e[p->begin + i] -= x->step[s0 + i/t->sub]*x->level[p->begin + i] - value[i];
        p->g[i] -= lanes_select(better, a*product[i], zero);
    }
}

static void refresh_errors(struct stock_rows * x, int64_t begin, int64_t n) {
    for (int64_t j = begin; j < begin + n; ++j) {
        x->e[j] = x->w[j] - x->step[j/x->book->t->sub]*x->level[j];
    }
}

static void descend(struct stock_rows * x, struct panel * p) {
    descend_block(x, p);
    for (int round = 0; round < 2; ++round) {
        descend_scales(x, p);
        descend_points(x, p);
    }
}

// --- rows ------------------------------------------------------------------------------------------------------------

static void load_row(struct stock_rows * x, int r, const float * src, char * blocks) {
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

static void store_row(const struct stock_rows * x, int r, char * blocks) {
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

// The forms of M's own, factored as those of the moments.
static void own_forms(const struct stock_metric * m, int columns, struct form * own) {
    for (int64_t first = 0; first < m->n_per_row; first += m->columns) {
        const int64_t n = m->n_per_row - first < m->columns ? m->n_per_row - first : m->columns;
        const float * form = m->forms + first*m->columns;
        for (int64_t j0 = 0; j0 < n; j0 += columns, ++own) {
            double a[COLUMNS][COLUMNS];
            for (int i = 0; i < columns; ++i) {
                for (int j = 0; j < columns; ++j) {
                    a[i][j] = (double) form[stock_at(n, j0 + i, j0 + j)];
                }
            }
            for (int k = columns - 1; k >= 0; --k) {
                const double pivot = a[k][k] > 0 ? a[k][k] : (double) FLT_MIN; // what is 0 but for rounding
                own->pivots[k] = (float) pivot;
                for (int j = 0; j < k; ++j) {
                    own->gains[j][k] = (float) (a[k][j]/pivot);
                    for (int i = 0; i < k; ++i) {
                        a[i][j] -= a[k][i]*a[k][j]/pivot;
                    }
                }
            }
        }
    }
}

// Mean squares of a row's columns.
static void mean_squares(const struct stock_metric * m, float * squares) {
    for (int64_t first = 0; first < m->n_per_row; first += m->columns) {
        const int64_t n = m->n_per_row - first < m->columns ? m->n_per_row - first : m->columns;
        for (int64_t j = 0; j < n; ++j) {
            squares[first + j] = m->forms[first*m->columns + stock_at(n, j, j)];
        }
    }
}

// Room for the rows' part of the widest matrix. False if memory is out.
static bool rows_init(struct stock_rows * x, const struct codebook_layout * t, const struct stock_metric * m) {
    const int64_t n = m->columns, n_sub = n/t->sub, n_points = n/t->group;
    struct codebook * book = malloc(sizeof(*book));
    struct form     * own  = calloc((size_t) (m->n_per_row/t->columns), sizeof(*own));
    lanes           * room = calloc((size_t) (5*n + 3*n_sub + n_points), sizeof(lanes));
    *x = (struct stock_rows) {.m = m, .book = book, .w = room, .panel = calloc(1, sizeof(struct panel))};
    if (!book || !own || !room || !x->panel) {
        return false; // the caller gives up
    }
    codebook_init(book, t);
    book->own = own;
    own_forms(m, t->columns, own);
    lanes ** const of_columns[] = {&x->w, &x->e, &x->level, &x->fed, &x->start};
    lanes ** const of_blocks[]  = {&x->d, &x->scale, &x->step};
    for (int i = 0; i < 5; ++i) {
        *of_columns[i] = room + i*n;
    }
    for (int i = 0; i < 3; ++i) {
        *of_blocks[i] = room + 5*n + i*n_sub;
    }
    x->point = (lanes_i *) (room + 5*n + 3*n_sub);
    return true;
}

int stock_codebook_columns(enum ggml_type type) {
    const struct codebook_layout * t = codebook_layout(type);
    return t ? t->columns : 0;
}

void stock_codebook_encode(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance,
                           const struct stock_metric * m, int sweeps) {
    const struct codebook_layout * t = codebook_layout(type);
    const struct stock_coder coder = {load_row, store_row, set_step, refresh_errors, decide_panel, descend, t->sub};
    struct stock_rows x;
    float * squares = malloc((size_t) m->n_per_row*sizeof(float));
    const bool good = rows_init(&x, t, m) && squares;
    GGML_ASSERT(good);
    mean_squares(m, squares);
    ggml_quantize_chunk(type, src, dst, 0, n_rows, m->n_per_row, importance ? importance : squares);
    stock_encode_rows(&coder, &x, type, src, dst, n_rows, sweeps);
    free(squares);
    free(x.w);
    free(x.panel);
    free(x.book->own);
    free(x.book);
}
