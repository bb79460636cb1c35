// The trellis code of ITQ3_T, ITQ2_T and their types of 64: K = 3 or 2 new bits a weight, values from the last 12 bits.
//
//   step t of a block of n = 256 or 64 is position L*(t%8) + t/8, L = n/8: a symbol's predecessors lie in the same byte of
//   other groups of L
//   c[t]   symbol of step t, K bits;  c[-1], c[-2] ... are the bits of `start`, as far as they go, then zero
//   pair(t) = low two bits of c[t] << 2 | of c[t-1]
//   quad(t) = high bits (of K = 3) of c[t] << 3 | c[t-1] << 2 | c[t-2] << 1 | c[t-3]
//
//             a          b          e
//   K = 3     pair(t-2)  pair(t)    quad(t)       all 12 bits of c[t] ... c[t-3]
//   K = 2     pair(t)    pair(t-4)  pair(t-2)     all 12 bits of c[t] ... c[t-5]
//
//   q = values[0][a ^ mix[0][b]] + values[1][e ^ mix[1][b]]           0..127
//
// mix and values are tables of 16 bytes (types.toml). scripts/studies/trellis_search.py finds them and compares what a block can store
// of its start; relative squared error of 1 M Gaussian weights, a map of the 12 bits to an index of 8 that is linear over
// GF(2), with two tables of quantiles, in brackets (the best of 24; unlike ours it is not improved further):
//             state 0 first     a circle          start byte, 1, 2, 3 scales tried         any start
//   K = 3     0.0195 (0.0200)   0.0186 (0.0190)   0.0184 0.0179 0.0178 (0.0181 for 3)      0.0181 (0.0185)
//   K = 2     0.0723 (0.0734)   0.0702 (0.0708)   0.0689 0.0683 0.0683 (0.0690 for 3)      0.0679 (0.0686)
// The linear map takes five look-ups, two XORs and three operations to part the index for 32 weights, this code four and two.
//
// Low bits of the symbols lie in ql as in bits3.h, so that (ql[i] >> s) & 15 is a pair, and likewise quads in qh. `start` is
// the byte that would stand in ql before its last L bytes: the symbols of the steps -4 ... -1. K = 3 does not look at c[-4];
// its two bits hold the high bits of c[-2] and c[-1].
#pragma once

#include "bits3.h"
#include "codes.h"
#include "e5m3.h"

struct ggml_ext_trellis_tables { uint8_t mix[2][16], values[2][16]; };

enum { GGML_EXT_TRELLIS_BITS = 12, GGML_EXT_TRELLIS_STATES = 1 << GGML_EXT_TRELLIS_BITS };

// Position of step t in a block of n weights.
static inline int ggml_ext_trellis_position(int n, int t) {
    return n/8*(t%8) + t/8;
}

// Code of a state: the 12 bits c[t] | c[t-1] << K | c[t-2] << 2*K ...
static inline int ggml_ext_trellis_code(const struct ggml_ext_trellis_tables * t, int k, int state) {
    const int mask = (1 << k) - 1;
    int low[6] = {0}, quad = 0;
    for (int i = 0; i < GGML_EXT_TRELLIS_BITS/k; ++i) {
        const int c = state >> k*i & mask;
        low[i] = c & 3;
        quad   = i < 4 ? quad | (c >> 2) << (3 - i) : quad;
    }
    const int pair0 = low[0] << 2 | low[1], pair2 = low[2] << 2 | low[3], pair4 = low[4] << 2 | low[5];
    const int a = k == 3 ? pair2 : pair0, b = k == 3 ? pair0 : pair4, e = k == 3 ? quad : pair2;
    return t->values[0][a ^ t->mix[0][b]] + t->values[1][e ^ t->mix[1][b]];
}

// State before step 0: c[-1] | c[-2] << K ..., of which 12 - K bits count.
static inline int ggml_ext_trellis_start_state(int k, uint8_t start) {
    const int c1 = start >> 6, c2 = start >> 4 & 3, c3 = start >> 2 & 3, c4 = start & 3;
    if (k == 2) {
        return c1 | c2 << 2 | c3 << 4 | c4 << 6;
    }
    return (c1 | (start >> 1 & 1) << 2) | (c2 | (start & 1) << 2) << 3 | c3 << 6;
}

// The unpack contract of a block of n weights, slow definition: follows the states one by one. qh is not read for K = 2.
static inline void ggml_ext_trellis_unpack(const struct ggml_ext_trellis_tables * tables, int k, int n, uint8_t d, uint8_t start,
                                           const uint8_t * ql, const uint8_t * qh, float offset, struct ggml_ext_unpacked * u) {
    int state = ggml_ext_trellis_start_state(k, start);
    for (int t = 0; t < n; ++t) {
        const int j = ggml_ext_trellis_position(n, t);
        const int c = k == 3 ? ggml_ext_get_bits3(ql, qh, n, j) : ggml_ext_get_bits2(ql, n, j);
        state   = (state << k | c) & (GGML_EXT_TRELLIS_STATES - 1);
        u->q[j] = (int8_t) ggml_ext_trellis_code(tables, k, state);
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_e5m3_to_float(d);
    u->offset   = offset;
}
