// Viterbi's algorithm over the 4096 states of types/trellis.h, in integers of 16 bits.
//
// A step takes, for each of the 4096/2^K groups of states that share all bits but the oldest symbol, the least cost. It keeps
// these minima of every step and no pointers: on the way back the one predecessor of each step is found again from them, which
// costs little beside the forward steps. States lie in planes by the newest symbol, so that all loops of a step run over
// neighbours and compilers vectorise them: a state takes a lane of a subtraction, a multiplication, an addition and a minimum.
//
// Weights and values are in fixed point, S = TRELLIS_FIXED steps a unit of d, and a cost is the upper half of e*e, S*S/65536 of a
// squared unit. Relative squared error of a million Gaussian weights against costs in float: +0.05 % for K = 3, nothing for K = 2.
// Nothing saturates and nothing overflows, whatever the weights are (trellis_begin() asserts it):
//   - They are held within TRELLIS_MAX_UNITS. Values go up to 63.5 for K = 3 and 62 for K = 2, so a cost is at most C = 13076 or 9315.
//     Limits of 64 units cost 0.1 % in error for K = 2, and higher ones the bits of S.
//   - G = 12/K - 1 steps lead from any group to any other, so costs lie within G*C of the least one, which is taken off every
//     other step: sums stay below (G + 2)*C = 65380 or 65205.
//   - TRELLIS_NONE, the cost of groups that cannot be first, is above G*C, which those that can have not passed when the others
//     are gone, and TRELLIS_NONE + C is below 65536; until then every step takes the least off and holds the rest at that cost.
#pragma once

#include "encode.h"

#include "../types/trellis.h"

#include "ggml-impl.h"

#define TRELLIS_FIXED(K) ((K) == 3 ? 204 : 174)

enum {
    TRELLIS_MAX_GROUPS = GGML_EXT_TRELLIS_STATES/4, // K = 2
    TRELLIS_MAX_UNITS  = 80,
    TRELLIS_NONE       = 49152,
};

// What sets one type apart, constants where it is used.
struct trellis_type {
    int   k, n;          // bits a symbol, weights a block
    const struct ggml_ext_trellis_tables * tables;
    float offset, usual; // relative squared error of a Gaussian
};

// Plane a, place j is state j << K | a. Costs are less 32768, which lets processors without an unsigned minimum of 16 bits take
// the signed one.
struct trellis_work {
    int16_t fixed[GGML_EXT_TRELLIS_STATES];        // values of the states in fixed point, in planes
    int16_t planes[TRELLIS_MAX_GROUPS];            // of the step at work: costs by the newest symbol
    int16_t least[QK_K + 1][TRELLIS_MAX_GROUPS];   // costs before each step and after the last one, by state >> K
    int16_t x[QK_K];
    float   code[GGML_EXT_TRELLIS_STATES];         // values of the states
    float   code_rms, code_top;                    // root mean square and largest magnitude of the values
};

static inline struct trellis_work * trellis_begin(struct trellis_type t) {
    struct trellis_work * w = ggml_aligned_malloc(sizeof(*w)); // a cache line: no vector lies in two
    GGML_ASSERT(w != NULL);
    const int n_groups = GGML_EXT_TRELLIS_STATES >> t.k;
    double sum = 0;
    w->code_top = 0.0f;
    for (int s = 0; s < GGML_EXT_TRELLIS_STATES; ++s) {
        const float v = (float) ggml_ext_trellis_code(t.tables, t.k, s) - t.offset;
        w->code[s] = v;
        w->fixed[(s & ((1 << t.k) - 1))*n_groups + (s >> t.k)] = (int16_t) (v*TRELLIS_FIXED(t.k)); // offsets are whole or halves
        w->code_top = fmaxf(w->code_top, fabsf(v));
        sum += (double) v*(double) v; // exact
    }
    w->code_rms = (float) sqrt(sum/GGML_EXT_TRELLIS_STATES);
    const int top = (int) ((TRELLIS_MAX_UNITS + w->code_top)*TRELLIS_FIXED(t.k)), n_steps = GGML_EXT_TRELLIS_BITS/t.k - 1;
    GGML_ASSERT(top <= INT16_MAX && (top*top >> 16)*(n_steps + 2) <= UINT16_MAX && (top*top >> 16)*n_steps < TRELLIS_NONE &&
                (top*top >> 16) + TRELLIS_NONE <= UINT16_MAX);
    return w;
}

static inline void trellis_end(struct trellis_work * w) {
    ggml_aligned_free(w, sizeof(*w));
}

static inline float trellis_value(int k, const struct trellis_work * w, int state) {
    (void) k;
    return w->code[state];
}

// Squared distance of a weight to a value.
static inline __attribute__((always_inline)) int16_t trellis_distance(int16_t x, int16_t value) {
    const int16_t e = (int16_t) (x - value);
    return (int16_t) (e*e >> 16);
}

// next[j] = min, over the oldest symbol of the states that lead to group j, of least + cost of x.
// lower: less the least of all, and no more than TRELLIS_NONE.
static inline __attribute__((always_inline)) void trellis_step(int k, const int16_t * restrict least, const int16_t * restrict fixed,
                                                               int16_t x, bool lower, int16_t * restrict planes,
                                                               int16_t * restrict next) {
    const int n_symbols = 1 << k, n_groups = GGML_EXT_TRELLIS_STATES >> k, n = n_groups >> k;
    for (int r = 0; r < n; ++r) { // least[p*n + r] of all p stay in registers
#pragma GCC unroll 8
        for (int a = 0; a < n_symbols; ++a) {
            int16_t m = INT16_MAX;
#pragma GCC unroll 8
            for (int p = 0; p < n_symbols; ++p) {
                const int16_t c = (int16_t) (least[p*n + r] + trellis_distance(x, fixed[a*n_groups + p*n + r]));
                m = c < m ? c : m;
            }
            planes[a*n + r] = m;
        }
    }
    if (lower) {
        int16_t m = INT16_MAX;
        for (int j = 0; j < n_groups; ++j) {
            m = planes[j] < m ? planes[j] : m;
        }
        const int16_t none = (int16_t) (m + TRELLIS_NONE < INT16_MAX ? m + TRELLIS_NONE : INT16_MAX), off = (int16_t) (m - INT16_MIN);
        for (int j = 0; j < n_groups; ++j) {
            planes[j] = (int16_t) ((planes[j] < none ? planes[j] : none) - off);
        }
    }
    for (int r = 0; r < n; ++r) {
        for (int a = 0; a < n_symbols; ++a) {
            next[r*n_symbols + a] = planes[a*n + r];
        }
    }
}

// The state of step t in group `after` of the next one: that of least cost, the first of equals.
static inline __attribute__((always_inline)) int trellis_step_back(int k, const struct trellis_work * w, int t, int after) {
    const int n_symbols = 1 << k, n_groups = GGML_EXT_TRELLIS_STATES >> k, n = n_groups >> k;
    const int16_t * least = w->least[t] + (after >> k), * fixed = w->fixed + (after & (n_symbols - 1))*n_groups + (after >> k);
    int32_t best = INT32_MAX;
#pragma GCC unroll 8
    for (int p = 0; p < n_symbols; ++p) {
        const int32_t c = (least[p*n] + trellis_distance(w->x[t], fixed[p*n]))*n_symbols + p;
        best = c < best ? c : best;
    }
    return (best & (n_symbols - 1))*n_groups + after;
}

// States of least squared error of x[0 .. n-1], in units of d, that follow one of the first n_starts states before, or if
// that is 0 the state `before`, and that the group `after` can follow, or if that is -1 any. Of equals, the last state is in the
// first group, and each state before it the first one.
static inline __attribute__((always_inline)) void trellis_search(int k, struct trellis_work * w, const float * x, int n,
                                                                 int n_starts, int before, int after, uint16_t * states) {
    const int   n_groups = GGML_EXT_TRELLIS_STATES >> k;
    const float top = TRELLIS_MAX_UNITS;
    for (int t = 0; t < n; ++t) {
        const float v = x[t] > top ? top : x[t] > -top ? x[t] : -top; // NaN too
        w->x[t] = (int16_t) ((int) (v*TRELLIS_FIXED(k) + 16384.5f) - 16384); // to the nearest
    }
    for (int j = 0; j < n_groups; ++j) {
        const bool can = n_starts ? j < n_starts : j == (before & (n_groups - 1));
        w->least[0][j] = (int16_t) (can ? INT16_MIN : INT16_MIN + TRELLIS_NONE);
    }
    for (int t = 0; t < n; ++t) {
        const bool lower = t%2 == 1 || t < GGML_EXT_TRELLIS_BITS/k - 1;
        trellis_step(k, w->least[t], w->fixed, w->x[t], lower, w->planes, w->least[t + 1]);
    }
    const bool ends = after >= 0;
    int16_t m = INT16_MAX;
    for (int j = 0; j < n_groups; ++j) {
        m = w->least[n][j] < m ? w->least[n][j] : m;
    }
    while (after < 0 || (!ends && w->least[n][after] != m)) {
        ++after;
    }
    for (int t = n - 1; t >= 0; --t) {
        const int state = trellis_step_back(k, w, t, after);
        states[t] = (uint16_t) state;
        after     = state >> k;
    }
}
