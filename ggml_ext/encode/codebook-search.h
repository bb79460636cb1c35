// Find the codebook points and signs of least cost for one decision about 4 or 8 columns. The search walks a tree of the points' levels,
// column by column. At each level, the goal (the weight plus error feedback) decides the sign, and a branch ends where no row of half the
// lanes can improve on its best point. Every float operation has one order for any number of rows.
#pragma once

#include "upstream-codebook-layouts.h"
#include "upstream-rows.h"

#define GGML_COMMON_IMPL_C
#include "ggml-common.h" // grids

enum {
    COLUMNS    = 8, // of a decision, at most
    MAX_LEVELS = 8,
    MAX_POINTS = 1024,
    HALF_LANES = LANES/2,
};

typedef int32_t half_lanes_i __attribute__((vector_size(32), aligned(16)));
typedef int64_t half_lanes_l __attribute__((vector_size(32), aligned(16)));

// The error of some columns costs sum over k of D[k]*r[k]^2, where r[k] = e[k] + sum over j < k of L[j][k]*e[j].
struct ldl {
    float D[COLUMNS];
    float L[COLUMNS][COLUMNS];
};

// A node of the tree: one level of one column, below the levels of earlier columns.
struct branch {
    int32_t next;  // index of the next branch outside this one
    int16_t point; // in the last column: the point
    uint8_t column, level;
};

struct codebook {
    const struct codebook_layout * t;
    int     n_levels, n_branches;
    float   levels[MAX_LEVELS];
    uint8_t level[MAX_POINTS][COLUMNS];
    struct branch branches[MAX_POINTS*COLUMNS];
    struct ldl * groups; // by group of columns: the LDL decomposition of its own part of H
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

// Add the branches of points that share the levels of all columns before `column`.
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
            struct branch * branch = b->branches + b->n_branches++;
            *branch = (struct branch) {0, same[0], (uint8_t) column, (uint8_t) level};
            if (column + 1 < b->t->group) {
                add_branches(b, same, n_same, column + 1);
            }
            branch->next = b->n_branches;
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

LANES_INLINE half_lanes half_lanes_splat(float v) {
    return v - (half_lanes) {0};
}

LANES_INLINE half_lanes_i half_lanes_splat_int(int32_t v) {
    return v - (half_lanes_i) {0};
}

LANES_INLINE half_lanes half_lanes_select(half_lanes_i mask, half_lanes a, half_lanes b) {
    return (half_lanes) (((half_lanes_i) a & mask) | ((half_lanes_i) b & ~mask));
}

LANES_INLINE half_lanes_i half_lanes_select_int(half_lanes_i mask, half_lanes_i a, half_lanes_i b) {
    return (a & mask) | (b & ~mask);
}

LANES_INLINE bool half_lanes_any(half_lanes_i mask) {
    const half_lanes_l l = (half_lanes_l) mask;
    return ((l[0] | l[1]) | (l[2] | l[3])) != 0;
}

// Get the sign bit.
LANES_INLINE half_lanes_i sign_of(half_lanes v) {
    return (half_lanes_i) v & half_lanes_splat_int(INT32_MIN);
}

// A search for half of the rows: the point and signs of one group at the least cost.
struct search {
    const struct codebook * book;
    const float * D;                // of the group's columns
    const float * L;                // [k*COLUMNS + j]
    half_lanes   w[COLUMNS], goal[COLUMNS], cost_before; // cost_before: of an earlier group of the decision
    half_lanes   value[MAX_LEVELS];
    half_lanes_i flip[COLUMNS];     // sign bits that differ from the goal's
    half_lanes_i odd;               // sign bit: parity that the signs must have, so far
    half_lanes   best;              // only points below this cost count
    half_lanes_i point;             // -1: none
};

// Try all points. flips: apply x->flip. even: the last sign makes the parity even.
LANES_INLINE void try_points(struct search * x, bool flips, bool even) {
    const int last = x->book->t->group - 1;
    const struct branch * branches = x->book->branches, * end = branches + x->book->n_branches, * p = branches;
    half_lanes   goal[COLUMNS][COLUMNS], cost[COLUMNS];
    half_lanes_i odd[COLUMNS];
    half_lanes   best = x->best;
    half_lanes_i point = x->point;
    memcpy(goal[0], x->goal, sizeof(goal[0]));
    cost[0] = x->cost_before;
    odd[0]  = x->odd;
    while (p < end) {
        const int k = p->column;
        const half_lanes   v = goal[k][k];
        const half_lanes_i sign = flips ? sign_of(v) ^ x->flip[k] : sign_of(v);
        const half_lanes   value = (half_lanes) ((half_lanes_i) x->value[p->level] | sign), r = v - value;
        const half_lanes   cost_k = cost[k] + x->D[k]*(r*r);
        if (!half_lanes_any(cost_k < best)) {
            p = branches + p->next;
            continue;
        }
        const half_lanes e = x->w[k] - value;
        for (int j = k + 1; j <= last; ++j) {
            goal[k + 1][j] = goal[k][j] + x->L[k*COLUMNS + j]*e;
        }
        cost[k + 1] = cost_k;
        odd[k + 1]  = odd[k] ^ sign;
        const struct branch * next = branches + p++->next;
        if (k + 1 < last) {
            continue;
        }
        const half_lanes   goal_last = goal[last][last];
        const half_lanes_i last_sign = even ? odd[last] : flips ? sign_of(goal_last) ^ x->flip[last] : sign_of(goal_last);
        for (; p < next; ++p) {
            const half_lanes   r_last = goal_last - (half_lanes) ((half_lanes_i) x->value[p->level] | last_sign);
            const half_lanes   total  = cost_k + x->D[last]*(r_last*r_last);
            const half_lanes_i better = total < best;
            best  = half_lanes_select(better, total, best);
            point = half_lanes_select_int(better, half_lanes_splat_int(p->point), point);
        }
    }
    x->best  = best;
    x->point = point;
}

struct point_result {
    half_lanes   level[COLUMNS]; // with signs
    half_lanes   value[COLUMNS];
    half_lanes   flip_cost[COLUMNS]; // increase in cost when the sign flips, neglecting feedback
    half_lanes_i odd;                // sign bit: parity of the signs and search.odd
};

// Compute the levels of the best points. forced: rows whose last sign follows from the parity.
LANES_INLINE void compute_levels(const struct search * x, half_lanes_i forced, struct point_result * f) {
    const int group = x->book->t->group;
    half_lanes goal[COLUMNS];
    memcpy(goal, x->goal, sizeof(goal));
    f->odd = x->odd;
    for (int k = 0; k < group; ++k) {
        half_lanes   level = half_lanes_splat(0), value = half_lanes_splat(0);
        half_lanes_i sign = sign_of(goal[k]) ^ x->flip[k];
        for (int r = 0; r < HALF_LANES; ++r) {
            const int l = x->book->level[x->point[r] < 0 ? 0 : x->point[r]][k];
            level[r] = x->book->levels[l];
            value[r] = x->value[l][r];
        }
        if (k == group - 1) {
            sign = half_lanes_select_int(forced, f->odd, sign);
        }
        f->odd     ^= sign;
        f->level[k] = (half_lanes) ((half_lanes_i) level | sign);
        f->value[k] = (half_lanes) ((half_lanes_i) value | sign);
        f->flip_cost[k]  = x->D[k]*(goal[k]*f->value[k]);
        const half_lanes e = x->w[k] - f->value[k];
        for (int j = k + 1; j < group; ++j) {
            goal[j] += x->L[k*COLUMNS + j]*e;
        }
    }
}

// Search a group whose signs are free.
LANES_INLINE void search_free(struct search * x, struct point_result * f) {
    memset(x->flip, 0, sizeof(x->flip));
    try_points(x, false, false);
    compute_levels(x, half_lanes_splat_int(0), f);
}

// Search again where the free signs have the wrong parity. f: the result with free signs. Flip each of the cheapest signs in turn, in every
// point; the last sign follows from the parity. bound: only points below this cost count. Flipping more signs gains 0.1 to 0.2 %.
LANES_INLINE void search_flipped(struct search * x, half_lanes_i wrong, half_lanes bound, struct point_result * f) {
    const int last = x->book->t->group - 1, n_flips = x->book->t->group/4;
    const half_lanes   free_best  = x->best;
    const half_lanes_i free_point = x->point;
    half_lanes_i flipped = half_lanes_splat_int(last);
    x->best  = half_lanes_select(wrong, bound, half_lanes_splat(-1));
    x->point = half_lanes_splat_int(-1);
    for (int i = 0; i < n_flips; ++i) {
        half_lanes   least  = f->flip_cost[0];
        half_lanes_i column = half_lanes_splat_int(0);
        for (int k = 1; k <= last; ++k) {
            const half_lanes_i less = f->flip_cost[k] < least;
            least  = half_lanes_select(less, f->flip_cost[k], least);
            column = half_lanes_select_int(less, half_lanes_splat_int(k), column);
        }
        for (int k = 0; k <= last; ++k) {
            const half_lanes_i is_column = column == half_lanes_splat_int(k);
            x->flip[k] = is_column & half_lanes_splat_int(k < last ? INT32_MIN : 0);
            f->flip_cost[k] = half_lanes_select(is_column, half_lanes_splat(INFINITY), f->flip_cost[k]);
        }
        const half_lanes_i best_before = (half_lanes_i) x->best;
        try_points(x, true, true);
        flipped = half_lanes_select_int((half_lanes_i) x->best != best_before, column, flipped);
    }
    x->best  = half_lanes_select(wrong, x->best, free_best);
    x->point = half_lanes_select_int(wrong, x->point, free_point);
    for (int k = 0; k <= last; ++k) {
        x->flip[k] = (flipped == half_lanes_splat_int(k)) & wrong & half_lanes_splat_int(k < last ? INT32_MIN : 0);
    }
    compute_levels(x, wrong, f);
}

// Search a group whose signs must have even parity.
LANES_INLINE void search_even(struct search * x, struct point_result * f) {
    const half_lanes bound = x->best;
    search_free(x, f);
    const half_lanes_i wrong = (f->odd != half_lanes_splat_int(0)) & (x->point >= half_lanes_splat_int(0));
    if (half_lanes_any(wrong)) {
        search_flipped(x, wrong, bound, f);
    }
}

// A decision about some columns. In: current values; out: the best ones and their cost.
struct choice {
    lanes   w[COLUMNS], goal[COLUMNS], level[COLUMNS], step, cost_before, cost;
    lanes_i point[2];
};

LANES_INLINE half_lanes get_half_lanes(const lanes * v, int h) {
    half_lanes out;
    memcpy(&out, (const char *) v + h*sizeof(out), sizeof(out));
    return out;
}

LANES_INLINE void set_half_lanes(lanes * v, int h, half_lanes_i mask, half_lanes new_value) {
    new_value = half_lanes_select(mask, new_value, get_half_lanes(v, h));
    memcpy((char *) v + h*sizeof(new_value), &new_value, sizeof(new_value));
}

LANES_INLINE void set_half_lanes_int(lanes_i * v, int h, half_lanes_i mask, half_lanes_i new_value) {
    set_half_lanes((lanes *) v, h, mask, (half_lanes) new_value);
}

// Cost of the current values.
LANES_INLINE half_lanes compute_cost_now(const struct choice * c, const struct ldl * f, int columns, int h) {
    half_lanes goal[COLUMNS], cost = half_lanes_splat(0);
    for (int k = 0; k < columns; ++k) {
        goal[k] = get_half_lanes(c->goal + k, h);
    }
    for (int k = 0; k < columns; ++k) {
        const half_lanes value = get_half_lanes(&c->step, h)*get_half_lanes(c->level + k, h);
        const half_lanes r = goal[k] - value, e = get_half_lanes(c->w + k, h) - value;
        cost += f->D[k]*(r*r);
        for (int j = k + 1; j < columns; ++j) {
            goal[j] += f->L[k][j]*e;
        }
    }
    return cost;
}

// Continue with the second group of a decision, given the result of the first.
LANES_INLINE void continue_second(struct search * x, const struct ldl * f, const struct point_result * first) {
    const int n = x->book->t->group;
    for (int k = 0; k < n; ++k) {
        const half_lanes e = x->w[k] - first->value[k];
        for (int j = n; j < 2*n; ++j) {
            x->goal[j] += f->L[k][j]*e;
        }
    }
    memmove(x->w, x->w + n, (size_t) n*sizeof(x->w[0]));
    memmove(x->goal, x->goal + n, (size_t) n*sizeof(x->goal[0]));
    x->D = f->D + n;
    x->L  = &f->L[n][n];
    x->cost_before = half_lanes_select(x->point < half_lanes_splat_int(0), half_lanes_splat(INFINITY), x->best);
    x->odd    = first->odd;
}

LANES_INLINE void choose_half_lanes(const struct codebook * b, const struct ldl * f, struct choice * c, int h) {
    const int n = b->t->group, columns = b->t->columns;
    struct search x = {.book = b, .D = f->D, .L = f->L[0]};
    struct point_result result;
    const half_lanes cost_before = compute_cost_now(c, f, columns, h);
    for (int k = 0; k < columns; ++k) {
        x.w[k]    = get_half_lanes(c->w + k, h);
        x.goal[k] = get_half_lanes(c->goal + k, h);
    }
    for (int l = 0; l < b->n_levels; ++l) {
        x.value[l] = get_half_lanes(&c->step, h)*b->levels[l];
    }
    x.best  = cost_before;
    x.point = half_lanes_splat_int(-1);
    set_half_lanes(&c->cost_before, h, half_lanes_splat_int(-1), cost_before);
    if (columns == n) {
        if (codebook_even_signs(b->t)) {
            search_even(&x, &result);
        } else {
            search_free(&x, &result);
        }
        const half_lanes_i better = x.point >= half_lanes_splat_int(0);
        set_half_lanes(&c->cost, h, half_lanes_splat_int(-1), x.best);
        set_half_lanes_int(c->point, h, better, x.point);
        for (int k = 0; k < n; ++k) {
            set_half_lanes(c->level + k, h, better, result.level[k]);
        }
        return;
    }
    // two groups with even parity in total: the best first group, then the best one of the other parity
    half_lanes best = cost_before;
    for (int other = 0; other < 2; ++other) {
        struct search first = x, second;
        struct point_result second_result;
        first.best = best;
        if (other) {
            first.odd = ~result.odd & half_lanes_splat_int(INT32_MIN);
            search_flipped(&first, half_lanes_splat_int(-1), best, &result);
            result.odd = first.odd; // parity that the second group must have
        } else {
            search_free(&first, &result);
        }
        second       = first;
        continue_second(&second, f, &result);
        second.best  = best;
        second.point = half_lanes_splat_int(-1);
        search_even(&second, &second_result);
        const half_lanes_i better = second.point >= half_lanes_splat_int(0);
        best = second.best;
        set_half_lanes_int(c->point, h, better, first.point);
        set_half_lanes_int(c->point + 1, h, better, second.point);
        for (int k = 0; k < n; ++k) {
            set_half_lanes(c->level + k, h, better, result.level[k]);
            set_half_lanes(c->level + n + k, h, better, second_result.level[k]);
        }
    }
    set_half_lanes(&c->cost, h, half_lanes_splat_int(-1), best);
}

EXT_CLONES __attribute__((noinline))
static void choose(const struct codebook * b, const struct ldl * f, struct choice * c) {
    for (int h = 0; h < 2; ++h) {
        choose_half_lanes(b, f, c, h);
    }
}
