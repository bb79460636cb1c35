// Viterbi search over the 4096 states of types/trellis.h in 16-bit integers.
//
// A group is the 2^K states that share all bits except the oldest symbol. Each step stores the minimum cost of each of the 4096/2^K groups, but no
// predecessors. The way back finds the one predecessor per step from these minima again, which takes little time compared to the forward steps.
// The order of groups (trellis_place()) lets compilers vectorize all loops of a step. If the state before or the group after the path is known, only
// one oldest or newest symbol matters in the first or last G = 12/K - 1 steps.
//
// Weights and values are in fixed point with S = trellis_type.unit steps per unit of d. A cost is the upper half of e*e. That increases the NMSE of
// Gaussian weights by 0.05 % for K = 3 and not at all for K = 2, compared to costs in float. No weight can cause saturation or overflow
// (trellis_begin() asserts it):
//   - Weights are clamped to TRELLIS_MAX_UNITS. Values are at most 63.5 for K = 3 and 62 for K = 2, so a weight's cost is at most C = 13076 or 9315.
//     A limit of 64 units would increase the error by 0.1 % for K = 2; a higher limit would leave fewer bits for S.
//   - G steps lead from any group to any other, so all costs are within G*V*C of the minimum. The minimum is subtracted before a cost could exceed
//     65535; (G + 1)*V*C is 52304 or 55890 for V = 1. With the C of the actual weights, this is about every ten steps.
//   - If `before` is known, groups that cannot be first have valid costs too, but no path uses them.
#pragma once

#include "encode.h"

#include "../types/trellis.h"

#include "ggml-impl.h"

enum {
    TRELLIS_MAX_GROUPS = GGML_EXT_TRELLIS_STATES/4, // K = 2
    TRELLIS_N_STARTS   = 256, // the first states, which the byte `start` can encode
    TRELLIS_MAX_UNITS  = 80,  // limit of weights in units of d
    TRELLIS_LANES      = 16,  // costs per vector
};

// Constants of a type: a row of GGML_EXT_TRELLIS_TYPES (types/codes.h).
struct trellis_type {
    int   k, v, n; // bits and weights per symbol, weights per block
    const struct ggml_ext_trellis_tables * tables;
    float offset;
    float gain, feedback_gain; // first scale candidate relative to the one that gives the code the block's energy; with correlations
    float unit;    // fixed-point steps per unit of d, an integer
    float nmse;    // of Gaussian weights
};

// Costs are stored minus 32768, for CPUs without an unsigned 16-bit minimum.
struct trellis_work {
    int16_t  fixed[2][GGML_EXT_TRELLIS_STATES];   // values that the states give each weight in fixed point, in the order of trellis_step()
    int16_t  least[QK_K + 1][TRELLIS_MAX_GROUPS]; // minimum costs before each step and after the last one, by place
    int16_t  x[QK_K];
    int16_t  place[TRELLIS_MAX_GROUPS];           // trellis_place() of each group
    int16_t  group[TRELLIS_MAX_GROUPS];           // its inverse
    float    code[2][GGML_EXT_TRELLIS_STATES];    // values that the states give each weight
    float    unit;                                // trellis_type.unit
    float    code_rms, code_top;                  // root mean square and largest magnitude of the values
};

// Returns the number of symbols of a group, which is a state without its newest or its oldest symbol.
static inline int trellis_n_before(int k) {
    return GGML_EXT_TRELLIS_BITS/k - 1;
}

// Returns symbol i of a state or group, counted from the newest one.
static inline int trellis_symbol(int k, int state, int i) {
    return state >> k*i & ((1 << k) - 1);
}

// Returns the number of low bits of a symbol, for the order of trellis_place().
static inline int trellis_low_bits(int k) {
    return k == 4 ? 4 : k - 1;
}

// Returns the number of values of the high bits of all symbols except the oldest.
static inline int trellis_n_high(int k) {
    return 1 << (k - trellis_low_bits(k))*(trellis_n_before(k) - 1);
}

// Returns the index of a group's cost: the high bits of its symbols, then their low bits, both with the newest symbol last. A step then shifts
// places by K - 1 bits instead of K, which makes moving the minima cheaper. For K = 4 the place is the group.
static inline int trellis_place(int k, int group) {
    const int low_bits = trellis_low_bits(k), n = trellis_n_before(k);
    int high = 0, low = 0;
    for (int i = 0; i < n; ++i) {
        const int c = trellis_symbol(k, group, i);
        high |= c >> low_bits << i;
        low  |= (c & ((1 << low_bits) - 1)) << low_bits*i;
    }
    return high << low_bits*n | low;
}

// Returns the index of a state's value in `fixed`, from the high bits and lane of its predecessor group and its newest and oldest symbol.
static inline int trellis_value_index(int k, int high, int newest, int oldest, int lane) {
    enum { N = TRELLIS_LANES };
    const int n_symbols = 1 << k;
    return k == 4 ? (lane*n_symbols + oldest)*n_symbols + newest : ((high*n_symbols + newest)*n_symbols + oldest)*N + lane;
}

static inline struct trellis_work * trellis_begin(struct trellis_type t) {
    struct trellis_work * w = ggml_aligned_malloc(sizeof(*w)); // aligned to cache lines, so that no vector spans two
    GGML_ASSERT(w != NULL);
    const int n_symbols = 1 << t.k, n_groups = GGML_EXT_TRELLIS_STATES >> t.k, n_steps = trellis_n_before(t.k);
    const int n_high = trellis_n_high(t.k), low_bits = trellis_low_bits(t.k)*n_steps;
    double sum = 0;
    for (int j = 0; j < n_groups; ++j) {
        w->place[j] = (int16_t) trellis_place(t.k, j);
        w->group[w->place[j]] = (int16_t) j;
    }
    w->unit     = t.unit;
    w->code_top = 0.0f;
    for (int i = 0; i < t.v*GGML_EXT_TRELLIS_STATES; ++i) {
        const int   s = i%GGML_EXT_TRELLIS_STATES, weight = i/GGML_EXT_TRELLIS_STATES;
        const float v = (float) ggml_ext_trellis_code(t.tables, t.k, t.v, s, weight) - t.offset;
        const int place = w->place[s >> t.k], high = place >> low_bits & (n_high - 1), lane = place & (TRELLIS_LANES - 1);
        const int newest = s & (n_symbols - 1), oldest = s >> t.k*n_steps;
        w->code[weight][s] = v;
        w->fixed[weight][trellis_value_index(t.k, high, newest, oldest, lane)] = (int16_t) (v*t.unit); // exact: offsets are multiples of 1/2
        w->code_top = fmaxf(w->code_top, fabsf(v));
        sum += (double) v*(double) v; // exact
    }
    w->code_rms = (float) sqrt(sum/(t.v*GGML_EXT_TRELLIS_STATES));
    const int top = (int) ((TRELLIS_MAX_UNITS + w->code_top)*t.unit);
    GGML_ASSERT(top <= INT16_MAX && (top*top >> 16)*t.v*(n_steps + 1) <= UINT16_MAX);
    return w;
}

static inline void trellis_end(struct trellis_work * w) {
    ggml_aligned_free(w, sizeof(*w));
}

// Returns the value of weight j of the path through `states`.
static inline __attribute__((always_inline)) float trellis_value(int v, const struct trellis_work * w, const uint16_t * states, int j) {
    return w->code[j%v][states[j/v]];
}

// Returns the cost of the v weights at x with the values at index i of `fixed`.
static inline __attribute__((always_inline)) int16_t trellis_distance(int v, const int16_t * x, const int16_t * fixed, int i) {
    const int16_t e = (int16_t) (x[0] - fixed[i]), f = v == 2 ? (int16_t) (x[1] - fixed[GGML_EXT_TRELLIS_STATES + i]) : 0;
    return (int16_t) ((e*e >> 16) + (f*f >> 16));
}

// trellis_step() for K = 4 with all newest symbols. A vector has the states with one previous symbol, whose minimum cost is a scalar.
static inline __attribute__((always_inline)) void trellis_step_4(const int16_t * restrict least, const int16_t * restrict fixed,
                                                                 const int16_t * x, int oldest, int n_oldest, int16_t * restrict next) {
    enum { N = TRELLIS_LANES };
    for (int c1 = 0; c1 < N; ++c1) {
        int16_t m[N];
        for (int i = 0; i < N; ++i) {
            m[i] = INT16_MAX;
        }
        for (int p = oldest; p < oldest + n_oldest; ++p) {
            const int16_t   before = least[p*N + c1];
            const int16_t * f      = fixed + (c1*N + p)*N;
            for (int i = 0; i < N; ++i) {
                const int16_t c = (int16_t) (before + trellis_distance(1, x, f, i));
                m[i] = c < m[i] ? c : m[i];
            }
        }
        memcpy(next + c1*N, m, sizeof(m));
    }
}

// Computes next[group] = min over the oldest symbol of (least + cost of the v weights at x). Only n_oldest oldest symbols from `oldest` on are considered, and only
// groups with n_newest newest symbols from `newest` on are written. n_newest is 1 or all.
static inline __attribute__((always_inline)) void trellis_step(int k, int v, const int16_t * restrict least, const int16_t * restrict fixed,
                                                               const int16_t * x, int oldest, int n_oldest, int newest, int n_newest,
                                                               int16_t * restrict next) {
    enum { N = TRELLIS_LANES };
    if (k == 4) {
        trellis_step_4(least, fixed, x, oldest, n_oldest, next);
        return;
    }
    const int n_symbols = 1 << k, n_lows = n_symbols/2, n_high = trellis_n_high(k), n_place = n_lows*N;
    const int n_written = n_newest < n_lows ? n_newest : n_lows;
    for (int h = 0; h < n_high; ++h) {
        for (int a = newest; a < newest + n_newest; a += n_written) {
            const int16_t * f = fixed + ((h*n_symbols + a)*n_symbols + oldest)*N;
            int16_t * dst = next + (2*h + a/n_lows)*n_place + a%n_lows;
#pragma GCC unroll 1 // otherwise short vectors need more registers than there are
            for (int i = 0; i < N; ++i) {
#pragma GCC unroll 4
                for (int b = 0; b < n_written; ++b) {
                    int16_t m = INT16_MAX;
#pragma GCC unroll 8
                    for (int p = 0; p < n_oldest; ++p) {
                        const int symbol = oldest + p;
                        const int16_t c = (int16_t) (least[(symbol/n_lows*n_high + h)*n_place + symbol%n_lows*N + i] +
                                                     trellis_distance(v, x, f, (b*n_symbols + p)*N + i));
                        m = c < m ? c : m;
                    }
                    dst[i*n_lows + b] = m;
                }
            }
        }
    }
}

// Subtracts the minimum from all costs. Returns the maximum of the results.
static inline __attribute__((always_inline)) int trellis_subtract_minimum(int n_groups, int16_t * least) {
    int16_t lo = INT16_MAX, hi = INT16_MIN;
    for (int j = 0; j < n_groups; ++j) {
        lo = least[j] < lo ? least[j] : lo;
        hi = least[j] > hi ? least[j] : hi;
    }
    for (int j = 0; j < n_groups; ++j) {
        least[j] = (int16_t) (least[j] - lo + INT16_MIN);
    }
    return hi - lo;
}

// Returns the first group with the minimum cost.
static inline __attribute__((always_inline)) int trellis_first_least(int n_groups, const int16_t * least, const int16_t * group) {
    int16_t lo = INT16_MAX, first = INT16_MAX;
    for (int j = 0; j < n_groups; ++j) {
        lo = least[j] < lo ? least[j] : lo;
    }
    for (int j = 0; j < n_groups; ++j) {
        const int16_t g = group[j], candidate = least[j] == lo ? g : INT16_MAX;
        first = candidate < first ? candidate : first;
    }
    return first;
}

// Returns the cheapest state of step t that precedes the group `after`; of equals the first one.
static inline __attribute__((always_inline)) int trellis_step_back(int k, int v, const struct trellis_work * w, int t, int n_oldest, int after) {
    enum { N = TRELLIS_LANES };
    const int n_symbols = 1 << k, n_lows = 1 << trellis_low_bits(k), n_groups = GGML_EXT_TRELLIS_STATES >> k, n_high = trellis_n_high(k);
    const int place = w->place[after >> k]; // with an oldest symbol of zero
    const int16_t * least = w->least[t] + place, * fixed = w->fixed[0] + trellis_value_index(k, place/(n_lows*N), after%n_symbols, 0, place%N);
    int32_t best = INT32_MAX;
#pragma GCC unroll 16
    for (int p = 0; p < n_oldest; ++p) {
        const int32_t c = (least[(p/n_lows*n_high*n_lows + p%n_lows)*N] + trellis_distance(v, w->x + v*t, fixed, p*N))*n_symbols + p;
        best = c < best ? c : best;
    }
    return (best & (n_symbols - 1))*n_groups + after;
}

// Finds the n/v states of the path with the smallest squared error for x[0 .. n-1], which is in units of d. It follows the state `before`, or any of the first
// TRELLIS_N_STARTS states if that is negative. It ends in the group `after`, or in any group if that is negative. Of equal paths the one with the
// first last group wins, then the one with the first state at each step backwards.
static inline __attribute__((always_inline)) void trellis_search_k(int k, int v, struct trellis_work * w, const float * x, int n,
                                                                   int before, int after, uint16_t * states) {
    const int   n_symbols = 1 << k, n_groups = GGML_EXT_TRELLIS_STATES >> k;
    const int   n_starts = TRELLIS_N_STARTS*n_symbols/n_groups; // oldest symbols of the start states
    const int   code_top = (int) (w->code_top*w->unit);
    const float top_units = TRELLIS_MAX_UNITS;
    const int   n_before = trellis_n_before(k), n_known = before < 0 ? 0 : n_before; // steps whose oldest symbol `before` determines
    int max_cost[QK_K] = {0}; // of each step
    for (int j = 0; j < n; ++j) {
        const float units = x[j] > top_units ? top_units : x[j] > -top_units ? x[j] : -top_units; // NaN too
        w->x[j] = (int16_t) ((int) (units*w->unit + 32768.5f) - 32768); // rounded to nearest
        max_cost[j/v] += (abs(w->x[j]) + code_top)*(abs(w->x[j]) + code_top) >> 16;
    }
    n /= v;
    for (int j = 0; j < n_groups; ++j) {
        w->least[0][j] = INT16_MIN;
    }
    int bound = 0; // upper bound of the costs
    int t = 0;
    for (; t < n; ++t) {
        if (after >= 0 && t == n - n_before) {
            int sum = 0;
            for (int s = t; s < n; ++s) {
                sum += max_cost[s];
            }
            if (bound + sum > UINT16_MAX) {
                bound = trellis_subtract_minimum(n_groups, w->least[t]);
            }
            if (bound + sum <= UINT16_MAX) {
                break;
            }
        }
        if (bound + max_cost[t] > UINT16_MAX) {
            bound = trellis_subtract_minimum(n_groups, w->least[t]);
        }
        bound += max_cost[t];
        const int16_t * least = w->least[t];
        int16_t * next = w->least[t + 1];
        if (t < n_known) {
            trellis_step(k, v, least, w->fixed[0], w->x + v*t, trellis_symbol(k, before, n_before - 1 - t), 1, 0, n_symbols, next);
        } else if (t == 0) {
            trellis_step(k, v, least, w->fixed[0], w->x + v*t, 0, n_starts, 0, n_symbols, next);
        } else {
            trellis_step(k, v, least, w->fixed[0], w->x + v*t, 0, n_symbols, 0, n_symbols, next);
        }
    }
    for (; t < n - 1; ++t) { // `after` determines the newest symbols
        trellis_step(k, v, w->least[t], w->fixed[0], w->x + v*t, 0, n_symbols, trellis_symbol(k, after, n - 1 - t), 1, w->least[t + 1]);
    }
    for (int j = 0; n < n_known && j < n_groups; ++j) { // so few steps that the last group holds symbols of `before`
        if (j >> k*n != (before & ((1 << k*(n_before - n)) - 1))) {
            w->least[n][w->place[j]] = INT16_MAX;
        }
    }
    int state = after < 0 ? trellis_first_least(n_groups, w->least[n], w->group) : after; // the last group
    for (t = n - 1; t >= 0; --t) {
        if (t < n_known) {
            state += trellis_symbol(k, before, n_before - 1 - t)*n_groups;
        } else {
            state = trellis_step_back(k, v, w, t, t == 0 ? n_starts : n_symbols, state);
        }
        states[t] = (uint16_t) state;
        state >>= k;
    }
}

// One function per K and V, which all callers share.
#define TRELLIS_SEARCH(K, V)                                                                                                                \
    EXT_CLONES __attribute__((noinline))                                                                                                    \
    static void trellis_search_##K##_##V(struct trellis_work * w, const float * x, int n, int before, int after, uint16_t * states) {       \
        trellis_search_k(K, V, w, x, n, before, after, states);                                                                             \
    }
TRELLIS_SEARCH(4, 1)
TRELLIS_SEARCH(3, 1)
TRELLIS_SEARCH(2, 1)
TRELLIS_SEARCH(3, 2)
TRELLIS_SEARCH(2, 2)

static inline __attribute__((always_inline)) void trellis_search(struct trellis_type t, struct trellis_work * w, const float * x, int n, int before,
                                                                 int after, uint16_t * states) {
    (t.k == 4 ? trellis_search_4_1 : t.k == 3 ? t.v == 1 ? trellis_search_3_1 : trellis_search_3_2
              : t.v == 1 ? trellis_search_2_1 : trellis_search_2_2)(w, x, n, before, after, states);
}
