// Encoder of llama.cpp's types of codebooks under second moments. Scales are those of llama.cpp's own encoder at first. Then, for each
// matrix of moments,
//   1. points and signs group by group, those of the largest mean square first, each with the errors of those before it fed back
//   2. sweeps over panels of columns: descents over points and signs, over the integers of the sub-blocks and over the block's scale
// Of a group every point is tried, as a walk over a tree of the levels column after column: of each level the wish that the errors
// before it leave decides the sign. Rows go through it in lanes, 16 at a time. Every float operation has one order, whatever the number
// of rows; compiled with -ffp-contract=off.
#include "stock.h"

#include "metric.h"
#include "stock-codebook-layouts.h"
#include "stock-rows.h"

#define GGML_COMMON_IMPL_C
#include "ggml-common.h" // grids

enum {
    COLUMNS    = 8, // of a decision, at most
    MAX_LEVELS = 8,
    MAX_POINTS = 1024,
    HALF       = LANES/2,
};

typedef int32_t half_lanes_i __attribute__((vector_size(32), aligned(16)));
typedef int64_t half_lanes_l __attribute__((vector_size(32), aligned(16)));

// Errors of some columns cost the sum over k of pivots[k]*r[k]^2, r[k] = e[k] + sum over j < k of gains[j][k]*e[j].
struct form {
    float pivots[COLUMNS];
    float gains[COLUMNS][COLUMNS];
};

// One level of one column, after those of the columns before it.
struct branch {
    int32_t after;  // the next branch that is not part of this one
    int16_t point;  // of the last column
    uint8_t column, level;
};

struct codebook {
    const struct codebook_layout * t;
    int     n_levels, n_branches;
    float   levels[MAX_LEVELS];
    uint8_t level[MAX_POINTS][COLUMNS];
    struct branch branches[MAX_POINTS*COLUMNS];
    struct form * own; // of each group of columns, that of M itself
};

// --- codebook --------------------------------------------------------------------------------------------------------

static int grid_value(const struct codebook_layout * t, int point, int column) {
    switch ((int) t->type) {
        case GGML_TYPE_IQ2_XXS: return (int) (iq2xxs_grid[point] >> 8*column & 255);
        case GGML_TYPE_IQ2_XS:  return (int) (iq2xs_grid[point] >> 8*column & 255);
        case GGML_TYPE_IQ2_S:   return (int) (iq2s_grid[point] >> 8*column & 255);
        case GGML_TYPE_IQ3_XXS: return (int) (iq3xxs_grid[point] >> 8*column & 255);
        default:                return (int) (iq3s_grid[point] >> 8*column & 255);
    }
}

// Adds the branches of `points`, which have the levels before `column` in common.
static void add_branches(struct codebook * b, const int16_t * points, int n, int column) {
    int16_t same[MAX_POINTS];
    for (int level = 0; level < b->n_levels; ++level) {
        int n_same = 0;
        for (int i = 0; i < n; ++i) {
            if (b->level[points[i]][column] == level) {
                same[n_same++] = points[i];
            }
        }
        if (n_same > 0) {
            struct branch * own = b->branches + b->n_branches++;
            *own = (struct branch) {0, same[0], (uint8_t) column, (uint8_t) level};
            if (column + 1 < b->t->group) {
                add_branches(b, same, n_same, column + 1);
            }
            own->after = b->n_branches;
        }
    }
}

static void codebook_init(struct codebook * b, const struct codebook_layout * t) {
    int16_t points[MAX_POINTS];
    int     level_of[256] = {0};
    *b = (struct codebook) {.t = t};
    for (int p = 0; p < t->n_points; ++p) {
        points[p] = (int16_t) p;
        for (int k = 0; k < t->group; ++k) {
            level_of[grid_value(t, p, k)] = 1;
        }
    }
    for (int v = 0; v < 256; ++v) {
        if (level_of[v]) {
            level_of[v] = b->n_levels;
            b->levels[b->n_levels++] = (float) v;
        }
    }
    for (int p = 0; p < t->n_points; ++p) {
        for (int k = 0; k < t->group; ++k) {
            b->level[p][k] = (uint8_t) level_of[grid_value(t, p, k)];
        }
    }
    add_branches(b, points, t->n_points, 0);
}

// --- points ----------------------------------------------------------------------------------------------------------

LANES_INLINE half_lanes half_of(float v) {
    return v - (half_lanes) {0};
}

LANES_INLINE half_lanes_i half_of_int(int32_t v) {
    return v - (half_lanes_i) {0};
}

LANES_INLINE half_lanes half_select(half_lanes_i mask, half_lanes a, half_lanes b) {
    return (half_lanes) (((half_lanes_i) a & mask) | ((half_lanes_i) b & ~mask));
}

LANES_INLINE half_lanes_i half_select_int(half_lanes_i mask, half_lanes_i a, half_lanes_i b) {
    return (a & mask) | (b & ~mask);
}

LANES_INLINE bool half_any(half_lanes_i mask) {
    const half_lanes_l l = (half_lanes_l) mask;
    return ((l[0] | l[1]) | (l[2] | l[3])) != 0;
}

// Signs are a float's highest bit.
LANES_INLINE half_lanes_i sign_of(half_lanes v) {
    return (half_lanes_i) v & half_of_int(INT32_MIN);
}

// What is to be found for half of the rows: the point and signs of one group at the least cost.
struct search {
    const struct codebook * book;
    const float * pivots;           // of the group's columns
    const float * gains;            // [k*COLUMNS + j]
    half_lanes   w[COLUMNS], wish[COLUMNS], before; // what came before costs already
    half_lanes   value[MAX_LEVELS];
    half_lanes_i flip[COLUMNS];     // sign bits that are not the wish's
    half_lanes_i odd;               // sign bit: whether signs have to be odd in number
    half_lanes   best;              // below which points are of interest
    half_lanes_i point;             // -1: none
};

// Every point. even: the last sign is what makes the number of signs even, or odd.
LANES_INLINE void try_points(struct search * x, bool flips, bool even) {
    const int last = x->book->t->group - 1;
    const struct branch * branches = x->book->branches, * end = branches + x->book->n_branches, * p = branches;
    half_lanes   wish[COLUMNS][COLUMNS], cost[COLUMNS];
    half_lanes_i odd[COLUMNS];
    half_lanes   best = x->best;
    half_lanes_i point = x->point;
    memcpy(wish[0], x->wish, sizeof(wish[0]));
    cost[0] = x->before;
    odd[0]  = x->odd;
    while (p < end) {
        const int k = p->column;
        const half_lanes   v = wish[k][k];
        const half_lanes_i sign = flips ? sign_of(v) ^ x->flip[k] : sign_of(v);
        const half_lanes   value = (half_lanes) ((half_lanes_i) x->value[p->level] | sign), r = v - value;
        const half_lanes   so_far = cost[k] + x->pivots[k]*(r*r);
        if (!half_any(so_far < best)) {
            p = branches + p->after;
            continue;
        }
        const half_lanes e = x->w[k] - value;
        for (int j = k + 1; j <= last; ++j) {
            wish[k + 1][j] = wish[k][j] + x->gains[k*COLUMNS + j]*e;
        }
        cost[k + 1] = so_far;
        odd[k + 1]  = odd[k] ^ sign;
        const struct branch * after = branches + p++->after;
        if (k + 1 < last) {
            continue;
        }
        const half_lanes   of_last = wish[last][last];
        const half_lanes_i last_sign = even ? odd[last] : flips ? sign_of(of_last) ^ x->flip[last] : sign_of(of_last);
        for (; p < after; ++p) {
            const half_lanes   r_last = of_last - (half_lanes) ((half_lanes_i) x->value[p->level] | last_sign);
            const half_lanes   total  = so_far + x->pivots[last]*(r_last*r_last);
            const half_lanes_i better = total < best;
            best  = half_select(better, total, best);
            point = half_select_int(better, half_of_int(p->point), point);
        }
    }
    x->best  = best;
    x->point = point;
}

struct found {
    half_lanes   level[COLUMNS]; // with signs
    half_lanes   value[COLUMNS];
    half_lanes   turn[COLUMNS];  // what another sign costs, but for what later columns make up for
    half_lanes_i odd;            // sign bit: of the signs and search.odd
};

// The levels of the points that were found. forced: where the last sign follows from the others.
LANES_INLINE void replay(const struct search * x, half_lanes_i forced, struct found * f) {
    const int group = x->book->t->group;
    half_lanes wish[COLUMNS];
    memcpy(wish, x->wish, sizeof(wish));
    f->odd = x->odd;
    for (int k = 0; k < group; ++k) {
        half_lanes   level = half_of(0), value = half_of(0);
        half_lanes_i sign = sign_of(wish[k]) ^ x->flip[k];
        for (int r = 0; r < HALF; ++r) {
            const int l = x->book->level[x->point[r] < 0 ? 0 : x->point[r]][k];
            level[r] = x->book->levels[l];
            value[r] = x->value[l][r];
        }
        if (k == group - 1) {
            sign = half_select_int(forced, f->odd, sign);
        }
        f->odd     ^= sign;
        f->level[k] = (half_lanes) ((half_lanes_i) level | sign);
        f->value[k] = (half_lanes) ((half_lanes_i) value | sign);
        f->turn[k]  = x->pivots[k]*(wish[k]*f->value[k]);
        const half_lanes e = x->w[k] - f->value[k];
        for (int j = k + 1; j < group; ++j) {
            wish[j] += x->gains[k*COLUMNS + j]*e;
        }
    }
}

// A group whose signs are free.
LANES_INLINE void find_free(struct search * x, struct found * f) {
    memset(x->flip, 0, sizeof(x->flip));
    try_points(x, false, false);
    replay(x, half_of_int(0), f);
}

// One whose signs are even, or odd, in number, where `wrong`; f: what was found with free signs, of which one of those that cost least
// is turned. The last sign follows from the others. All points cost `bound` at most; -1 of x->point is none.
LANES_INLINE void find_turned(struct search * x, half_lanes_i wrong, half_lanes bound, struct found * f) {
    const int last = x->book->t->group - 1, turns = x->book->t->group/4;
    const half_lanes   free_best  = x->best;
    const half_lanes_i free_point = x->point;
    half_lanes_i turned = half_of_int(last);
    x->best  = half_select(wrong, bound, half_of(-1));
    x->point = half_of_int(-1);
    for (int i = 0; i < turns; ++i) {
        half_lanes   least  = f->turn[0];
        half_lanes_i column = half_of_int(0);
        for (int k = 1; k <= last; ++k) {
            const half_lanes_i less = f->turn[k] < least;
            least  = half_select(less, f->turn[k], least);
            column = half_select_int(less, half_of_int(k), column);
        }
        for (int k = 0; k <= last; ++k) {
            const half_lanes_i own = column == half_of_int(k);
            x->flip[k] = own & half_of_int(k < last ? INT32_MIN : 0);
            f->turn[k] = half_select(own, half_of(INFINITY), f->turn[k]);
        }
        const half_lanes_i before = (half_lanes_i) x->best;
        try_points(x, true, true);
        turned = half_select_int((half_lanes_i) x->best != before, column, turned);
    }
    x->best  = half_select(wrong, x->best, free_best);
    x->point = half_select_int(wrong, x->point, free_point);
    for (int k = 0; k <= last; ++k) {
        x->flip[k] = (turned == half_of_int(k)) & wrong & half_of_int(k < last ? INT32_MIN : 0);
    }
    replay(x, wrong, f);
}

// One whose signs are even, or odd, in number: free signs where these are.
LANES_INLINE void find_even(struct search * x, struct found * f) {
    const half_lanes bound = x->best;
    find_free(x, f);
    const half_lanes_i wrong = (f->odd != half_of_int(0)) & (x->point >= half_of_int(0));
    if (half_any(wrong)) {
        find_turned(x, wrong, bound, f);
    }
}

// A decision about some columns: in, what stands; out, the best. cost: of it.
struct choice {
    lanes   w[COLUMNS], wish[COLUMNS], level[COLUMNS], step, was, cost;
    lanes_i point[2];
};

LANES_INLINE half_lanes half_at(const lanes * v, int h) {
    half_lanes out;
    memcpy(&out, (const char *) v + h*sizeof(out), sizeof(out));
    return out;
}

LANES_INLINE void put_half(lanes * v, int h, half_lanes_i mask, half_lanes by) {
    by = half_select(mask, by, half_at(v, h));
    memcpy((char *) v + h*sizeof(by), &by, sizeof(by));
}

LANES_INLINE void put_half_int(lanes_i * v, int h, half_lanes_i mask, half_lanes_i by) {
    put_half((lanes *) v, h, mask, (half_lanes) by);
}

// What the columns cost as they stand.
LANES_INLINE half_lanes cost_as_is(const struct choice * c, const struct form * f, int columns, int h) {
    half_lanes wish[COLUMNS], cost = half_of(0);
    for (int k = 0; k < columns; ++k) {
        wish[k] = half_at(c->wish + k, h);
    }
    for (int k = 0; k < columns; ++k) {
        const half_lanes value = half_at(&c->step, h)*half_at(c->level + k, h), r = wish[k] - value, e = half_at(c->w + k, h) - value;
        cost += f->pivots[k]*(r*r);
        for (int j = k + 1; j < columns; ++j) {
            wish[j] += f->gains[k][j]*e;
        }
    }
    return cost;
}

// The second group of a decision about two, after what was found of the first.
LANES_INLINE void search_second(struct search * x, const struct form * f, const struct found * first) {
    const int n = x->book->t->group;
    for (int k = 0; k < n; ++k) {
        const half_lanes e = x->w[k] - first->value[k];
        for (int j = n; j < 2*n; ++j) {
            x->wish[j] += f->gains[k][j]*e;
        }
    }
    memmove(x->w, x->w + n, (size_t) n*sizeof(x->w[0]));
    memmove(x->wish, x->wish + n, (size_t) n*sizeof(x->wish[0]));
    x->pivots = f->pivots + n;
    x->gains  = &f->gains[n][n];
    x->before = half_select(x->point < half_of_int(0), half_of(INFINITY), x->best);
    x->odd    = first->odd;
}

LANES_INLINE void choose_half(const struct codebook * b, const struct form * f, struct choice * c, int h) {
    const int n = b->t->group, columns = b->t->columns;
    struct search x = {.book = b, .pivots = f->pivots, .gains = f->gains[0]};
    struct found  found;
    const half_lanes was = cost_as_is(c, f, columns, h);
    for (int k = 0; k < columns; ++k) {
        x.w[k]    = half_at(c->w + k, h);
        x.wish[k] = half_at(c->wish + k, h);
    }
    for (int l = 0; l < b->n_levels; ++l) {
        x.value[l] = half_at(&c->step, h)*b->levels[l];
    }
    x.best  = was;
    x.point = half_of_int(-1);
    put_half(&c->was, h, half_of_int(-1), was);
    if (columns == n) {
        if (codebook_even_signs(b->t)) {
            find_even(&x, &found);
        } else {
            find_free(&x, &found);
        }
        const half_lanes_i better = x.point >= half_of_int(0);
        put_half(&c->cost, h, half_of_int(-1), x.best);
        put_half_int(c->point, h, better, x.point);
        for (int k = 0; k < n; ++k) {
            put_half(c->level + k, h, better, found.level[k]);
        }
        return;
    }
    // two groups with even signs together: the best first group, then the best one of the other parity
    half_lanes best = was;
    for (int other = 0; other < 2; ++other) {
        struct search first = x, second;
        struct found  of_second;
        first.best = best;
        if (other) {
            first.odd = ~found.odd & half_of_int(INT32_MIN);
            find_turned(&first, half_of_int(-1), best, &found);
            found.odd = first.odd; // as the second group has to have it
        } else {
            find_free(&first, &found);
        }
        second       = first;
        search_second(&second, f, &found);
        second.best  = best;
        second.point = half_of_int(-1);
        find_even(&second, &of_second);
        const half_lanes_i better = second.point >= half_of_int(0);
        best = second.best;
        put_half_int(c->point, h, better, first.point);
        put_half_int(c->point + 1, h, better, second.point);
        for (int k = 0; k < n; ++k) {
            put_half(c->level + k, h, better, found.level[k]);
            put_half(c->level + n + k, h, better, of_second.level[k]);
        }
    }
    put_half(&c->cost, h, half_of_int(-1), best);
}

EXT_CLONES __attribute__((noinline))
static void choose(const struct codebook * b, const struct form * f, struct choice * c) {
    for (int h = 0; h < 2; ++h) {
        choose_half(b, f, c, h);
    }
}

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

// Points for the scales that are there, and the cost of all.
static void decide_points(struct stock_rows * x) {
    const int32_t * order = x->m->order + x->first;
    x->cost = lanes_of(0);
    for (int64_t k = 0; k < x->n; k += STEPS_PANEL) {
        lanes wish[STEPS_PANEL];
        for (int i = 0; i < STEPS_PANEL; ++i) {
            wish[i] = x->w[order[k + i]];
        }
        ask_earlier(x, k, k + STEPS_PANEL, wish);
        decide_panel(x, k, k + STEPS_PANEL, wish);
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

// Errors as they are, without what the steps of a descent added up to.
static void refresh_errors(struct stock_rows * x, int64_t begin, int64_t n) {
    for (int64_t j = begin; j < begin + n; ++j) {
        x->e[j] = x->w[j] - x->step[j/x->book->t->sub]*x->level[j];
    }
}

static void sweep(struct stock_rows * x) {
    const float  * form = x->m->forms + x->first*x->m->columns;
    struct panel * p    = x->panel;
    for (int64_t begin = 0; begin < x->n; begin += SWEEP_PANEL) {
        take_panel(x, p, begin);
        memset(p->g, 0, sizeof(p->g));
        add_matrix(x, form, begin, p->n, x->n, x->e, p->g);
        descend_block(x, p);
        for (int round = 0; round < 2; ++round) {
            descend_scales(x, p);
            descend_points(x, p);
        }
        refresh_errors(x, begin, p->n);
    }
}

// --- rows ------------------------------------------------------------------------------------------------------------

// Blocks of one row into lane r, as llama.cpp's encoder left them.
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

// One matrix of up to LANES rows. src, blocks: of the first, at the matrix' first column; stride, row_size: to the next row.
static void encode_matrix(struct stock_rows * x, const float * src, int64_t stride, char * blocks, size_t row_size, int n_rows, int sweeps) {
    for (int r = 0; r < LANES; ++r) {
        const int64_t row = r < n_rows ? r : 0; // lanes without one repeat the first
        load_row(x, r, src + row*stride, blocks + (size_t) row*row_size);
    }
    for (int64_t s = 0; s < x->n/x->book->t->sub; ++s) {
        set_step(x, s);
    }
    refresh_errors(x, 0, x->n);
    memcpy(x->start, x->e, (size_t) x->n*sizeof(lanes));
    decide_points(x);
    for (int i = 0; i < sweeps; ++i) {
        sweep(x);
    }
    const lanes cost = x->cost - lanes_of(x->m->damping)*energy(x);
    memcpy(x->e, x->start, (size_t) x->n*sizeof(lanes));
    const lanes_i better = cost_of_errors(x, cost) > cost;
    for (int r = 0; r < n_rows; ++r) {
        if (better[r] && is_finite(src + r*stride, x->n)) {
            store_row(x, r, blocks + (size_t) r*row_size);
        }
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

void stock_codebook_encode(enum ggml_type type, const float * src, void * dst, int64_t n_rows, int64_t n_per_row, const float * importance,
                           const struct stock_metric * m, int sweeps) {
    const struct codebook_layout * t = codebook_layout(type);
    const size_t size = ggml_type_size(type), row_size = ggml_row_size(type, n_per_row);
    struct stock_rows x;
    float * squares = malloc((size_t) n_per_row*sizeof(float));
    const bool good = rows_init(&x, t, m) && squares;
    GGML_ASSERT(good);
    mean_squares(m, squares);
    ggml_quantize_chunk(type, src, dst, 0, n_rows, n_per_row, importance ? importance : squares);
    for (x.first = 0; x.first < n_per_row; x.first += m->columns) {
        x.n = n_per_row - x.first < m->columns ? n_per_row - x.first : m->columns;
        for (int64_t row = 0; row < n_rows; row += LANES) {
            encode_matrix(&x, src + row*n_per_row + x.first, n_per_row, (char *) dst + (size_t) row*row_size + x.first/QK_K*size,
                          row_size, (int) (n_rows - row < LANES ? n_rows - row : LANES), sweeps);
        }
    }
    free(squares);
    free(x.w);
    free(x.panel);
    free(x.book->own);
    free(x.book);
}
