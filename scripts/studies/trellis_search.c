// Viterbi search over 4096 states for trellis_search.py: finds the path with the smallest squared error for any code of the states.
//
// As in ggml_ext/encode/trellis-search.h, each step stores the minimum costs but no predecessors. States are grouped by their newest symbol,
// so that loops access consecutive elements. Unlike there, a block may start in any state and its last state may be fixed.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { BLOCK = 256, STATES = 4096, MAX_GROUPS = STATES/4 };

struct work {
    float code[STATES]; // state j << K | a is element j of plane a
    float planes[MAX_GROUPS], least[BLOCK][MAX_GROUPS];
};

// Returns the cheapest of the states first, first + step, ...; of equals the first one.
static inline int best_state(int k, const struct work * w, const float * least, float x, int first, int step) {
    float best_cost = INFINITY;
    int   best      = first;
    for (int state = first; state < STATES; state += step) {
        const float e = x - w->code[(state & ((1 << k) - 1))*(STATES >> k) + (state >> k)];
        const float c = least[state >> k] + e*e;
        if (c < best_cost) {
            best_cost = c;
            best      = state;
        }
    }
    return best;
}

// Inlined for each K: compilers vectorize the loops when their bounds are constants.
static inline __attribute__((always_inline)) void search(int k, struct work * w, const float x[BLOCK], int n_starts,
                                                         const uint16_t * end, uint16_t states[BLOCK]) {
    const int n_symbols = 1 << k, n_groups = STATES >> k, n = n_groups >> k;
    for (int j = 0; j < n_groups; ++j) {
        w->least[0][j] = (end ? j == (*end & (n_groups - 1)) : j < n_starts) ? 0.0f : FLT_MAX;
    }
    for (int t = 1; t < BLOCK; ++t) {
        const float * least = w->least[t - 1];
        for (int a = 0; a < n_symbols; ++a) {
            for (int r = 0; r < n; ++r) {
                float m = FLT_MAX;
                for (int p = 0; p < n_symbols; ++p) {
                    const float e = x[t - 1] - w->code[a*n_groups + p*n + r];
                    const float c = least[p*n + r] + e*e;
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
    states[BLOCK - 1] = end ? *end : (uint16_t) best_state(k, w, w->least[BLOCK - 1], x[BLOCK - 1], 0, 1);
    for (int t = BLOCK - 1; t > 0; --t) {
        states[t - 1] = (uint16_t) best_state(k, w, w->least[t - 1], x[t - 1], states[t] >> k, n_groups);
    }
}

// Finds the states of blocks x for a code with k bits per symbol. The state before a block is one of the first n_starts states or, if `ends` is
// not NULL, the block's own last state, which `ends` fixes (a tail-biting path). Returns 0, or 1 if memory is exhausted.
int trellis_search(int k, const float code[STATES], const float * x, int64_t n_blocks, int n_starts, const uint16_t * ends,
                   uint16_t * states) {
    struct work * w = malloc(sizeof(*w));
    if (w == NULL) {
        return 1;
    }
    for (int s = 0; s < STATES; ++s) {
        w->code[(s & ((1 << k) - 1))*(STATES >> k) + (s >> k)] = code[s];
    }
    for (int64_t b = 0; b < n_blocks; ++b) {
        if (k == 4) {
            search(4, w, x + b*BLOCK, n_starts, ends ? ends + b : NULL, states + b*BLOCK);
        } else if (k == 3) {
            search(3, w, x + b*BLOCK, n_starts, ends ? ends + b : NULL, states + b*BLOCK);
        } else {
            search(2, w, x + b*BLOCK, n_starts, ends ? ends + b : NULL, states + b*BLOCK);
        }
    }
    free(w);
    return 0;
}
