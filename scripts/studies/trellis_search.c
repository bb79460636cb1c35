// Viterbi search over 4096 states for trellis_search.py: finds the path with the smallest squared error for any code of the states.
//
// As in ggml_ext/encode/trellis-search.h, each step stores the minimum costs but no predecessors. States are grouped by their newest symbol,
// so that loops access consecutive elements. Unlike there, a block may start in any state.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { BLOCK = 256, STATES = 4096, MAX_GROUPS = STATES/4 };

struct work {
    float code[2][STATES]; // of each weight of a step; state j << K | a is element j of plane a
    float planes[MAX_GROUPS], least[BLOCK][MAX_GROUPS];
};

// Returns the squared error of the V weights at x with the values of element i.
static inline __attribute__((always_inline)) float squared_error(int v, const struct work * w, const float * x, int i) {
    const float e = x[0] - w->code[0][i], f = v == 2 ? x[1] - w->code[1][i] : 0.0f;
    return e*e + f*f;
}

// Returns the cheapest of the states first, first + step, ...; of equals the first one.
static inline int best_state(int k, int v, const struct work * w, const float * least, const float * x, int first, int step) {
    float best_cost = INFINITY;
    int   best      = first;
    for (int state = first; state < STATES; state += step) {
        const float c = least[state >> k] + squared_error(v, w, x, (state & ((1 << k) - 1))*(STATES >> k) + (state >> k));
        if (c < best_cost) {
            best_cost = c;
            best      = state;
        }
    }
    return best;
}

// Inlined for each K and V: compilers vectorize the loops when their bounds are constants.
static inline __attribute__((always_inline)) void search(int k, int v, struct work * w, const float x[BLOCK], int n_starts,
                                                         uint16_t * states) {
    const int n_symbols = 1 << k, n_groups = STATES >> k, n = n_groups >> k, n_steps = BLOCK/v;
    for (int j = 0; j < n_groups; ++j) {
        w->least[0][j] = j < n_starts ? 0.0f : FLT_MAX;
    }
    for (int t = 1; t < n_steps; ++t) {
        const float * least = w->least[t - 1];
        for (int a = 0; a < n_symbols; ++a) {
            for (int r = 0; r < n; ++r) {
                float m = FLT_MAX;
                for (int p = 0; p < n_symbols; ++p) {
                    const float c = least[p*n + r] + squared_error(v, w, x + (t - 1)*v, a*n_groups + p*n + r);
                    m = c < m ? c : m;
                }
                w->planes[a*n + r] = m;
            }
        }
        for (int r = 0; r < n; ++r) {
            for (int a = 0; a < n_symbols; ++a) {
                w->least[t][r*n_symbols + a] = w->planes[a*n + r];
            }
        }
    }
    states[n_steps - 1] = (uint16_t) best_state(k, v, w, w->least[n_steps - 1], x + (n_steps - 1)*v, 0, 1);
    for (int t = n_steps - 1; t > 0; --t) {
        states[t - 1] = (uint16_t) best_state(k, v, w, w->least[t - 1], x + (t - 1)*v, states[t] >> k, n_groups);
    }
}

// Finds the states of blocks x, BLOCK/v per block, for a code with k bits per symbol and v weights per step; code: [v][STATES]. The state before a
// block is one of the first n_starts states. Returns 0, or 1 if memory is exhausted.
int trellis_search(int k, int v, const float * code, const float * x, int64_t n_blocks, int n_starts, uint16_t * states) {
    struct work * w = malloc(sizeof(*w));
    if (w == NULL) {
        return 1;
    }
    for (int s = 0; s < v*STATES; ++s) {
        const int state = s%STATES;
        w->code[s/STATES][(state & ((1 << k) - 1))*(STATES >> k) + (state >> k)] = code[s];
    }
    for (int64_t b = 0; b < n_blocks; ++b, x += BLOCK, states += BLOCK/v) {
        switch (10*k + v) {
            case 41: search(4, 1, w, x, n_starts, states); break;
            case 31: search(3, 1, w, x, n_starts, states); break;
            case 21: search(2, 1, w, x, n_starts, states); break;
            case 32: search(3, 2, w, x, n_starts, states); break;
            case 22: search(2, 2, w, x, n_starts, states); break;
        }
    }
    free(w);
    return 0;
}
