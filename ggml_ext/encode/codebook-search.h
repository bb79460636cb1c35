// Of types of codebooks the points and signs of one decision, of 4 or 8 columns, that cost least. Every point is tried, as a walk over a tree
// of the levels column after column: of each level the wish that the errors before it leave decides the sign, and a branch ends where no
// row of half the lanes has less to lose than it has found. Every float operation has one order, whatever the number of rows.
#pragma once

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

// One whose signs are even, or odd, in number, where `wrong`. f: what was found with free signs; one of those that cost least there is
// turned in every point, and the last sign follows from the others. Each sign of 8 instead of two gains 0.2 % of IQ2_XS, each of 4
// instead of one 0.1 % of IQ3_XXS. bound: below which points are of interest.
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
