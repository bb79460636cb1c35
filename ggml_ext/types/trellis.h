// The trellis code of ITQ4_T, ITQ3_T, ITQ2_T and their types of 64: K = 4, 3 or 2 new bits a weight, values from the last 12 bits.
//
//   step t of a block of n = 256 or 64 is position L*(t%8) + t/8, L = n/8: a symbol's predecessors lie in the same byte of
//   other groups of L
//   c[t]   symbol of step t, K bits;  c[-1], c[-2] ... are the bits of `start`, as far as they go, then zero
//   pair(t) = low two bits of c[t] << 2 | of c[t-1]                                        K = 3 and 2
//   quad(t) = high bits of c[t] << 3 | c[t-1] << 2 | c[t-2] << 1 | c[t-3]                  K = 3
//
//             i0                              i1
//   K = 4     c[t] ^ c[t-2]                   c[t-1]                 all 12 bits of c[t] ... c[t-2]
//   K = 3     pair(t) ^ pair(t-1) ^ pair(t-2) pair(t) ^ quad(t)      all 12 bits of c[t] ... c[t-3]
//   K = 2     pair(t) ^ pair(t-4)             pair(t-2)              all 12 bits of c[t] ... c[t-5]
//
//   q = values[0][i0] + values[1][i1]           0..127
//
// The indices are linear over GF(2), so decoders exclusive-or whole words of symbols, and two look-ups of 16 bytes are all that a
// weight costs. The two must not be windows of one filtered stream, as i1 = pair(t) ^ pair(t-2), i0 = the same two steps earlier
// would be: any such stream can be had, and the code would have 256 states. scripts/studies/trellis_search.py finds `values`
// (types.toml) and compares maps and what a block can store of its start.
//
// K = 3 and 2: low bits of the symbols lie in ql as in bits3.h, so that (ql[i] >> s) & 15 is a pair, and likewise quads in qh.
// K = 4: steps 8*i + 2*p and, in the high nibble, 8*i + 2*p + 1 are the byte L*p + i of ql. `start` is the byte that would stand
// in ql before its last L bytes: the symbols of the steps -4 ... -1, for K = 4 of -2 and -1. K = 3 does not look at c[-4]; its two
// bits hold the high bits of c[-2] and c[-1].
#pragma once

#include "bits3.h"
#include "codes.h"
#include "e5m3.h"

struct ggml_ext_trellis_tables { uint8_t values[2][16]; };

enum { GGML_EXT_TRELLIS_BITS = 12, GGML_EXT_TRELLIS_STATES = 1 << GGML_EXT_TRELLIS_BITS };

// Position of step t in a block of n weights.
static inline int ggml_ext_trellis_position(int n, int t) {
    return n/8*(t%8) + t/8;
}

// Code of a state: the 12 bits c[t] | c[t-1] << K | c[t-2] << 2*K ...
static inline int ggml_ext_trellis_code(const struct ggml_ext_trellis_tables * t, int k, int state) {
    const int mask = (1 << k) - 1;
    int c[7] = {0}, quad = 0;
    for (int i = 0; i < GGML_EXT_TRELLIS_BITS/k; ++i) {
        c[i] = state >> k*i & mask;
        quad = i < 4 ? quad | (c[i] >> 2 & 1) << (3 - i) : quad;
    }
    if (k == 4) {
        return t->values[0][c[0] ^ c[2]] + t->values[1][c[1]];
    }
    int pair[5];
    for (int i = 0; i < 5; ++i) {
        pair[i] = (c[i] & 3) << 2 | (c[i + 1] & 3);
    }
    return k == 3 ? t->values[0][pair[0] ^ pair[1] ^ pair[2]] + t->values[1][pair[0] ^ quad]
                  : t->values[0][pair[0] ^ pair[4]]           + t->values[1][pair[2]];
}

// State before step 0: c[-1] | c[-2] << K ..., of which 12 - K bits count.
static inline int ggml_ext_trellis_start_state(int k, uint8_t start) {
    if (k == 4) {
        return start >> 4 | (start & 15) << 4;
    }
    const int c1 = start >> 6, c2 = start >> 4 & 3, c3 = start >> 2 & 3, c4 = start & 3;
    if (k == 2) {
        return c1 | c2 << 2 | c3 << 4 | c4 << 6;
    }
    return (c1 | (start >> 1 & 1) << 2) | (c2 | (start & 1) << 2) << 3 | c3 << 6;
}

// Symbol of position j; qh is not read unless K = 3.
static inline int ggml_ext_trellis_symbol(int k, int n, const uint8_t * ql, const uint8_t * qh, int j) {
    const int lanes = n/8, group = j/lanes;
    return k == 4 ? ql[lanes*(group/2) + j%lanes] >> 4*(group%2) & 15
         : k == 3 ? ggml_ext_get_bits3(ql, qh, n, j) : ggml_ext_get_bits2(ql, n, j);
}

// Symbols 0..15 as ITQ4_T's blocks hold them.
static inline void ggml_ext_pack_nibbles(const uint8_t * symbols, int n, uint8_t * ql) {
    const int lanes = n/8;
    memset(ql, 0, (size_t) n/2);
    for (int j = 0; j < n; ++j) {
        ql[lanes*(j/lanes/2) + j%lanes] |= (uint8_t) (symbols[j] << 4*(j/lanes%2));
    }
}

// The unpack contract of a block of n weights, slow definition: follows the states one by one.
static inline void ggml_ext_trellis_unpack(const struct ggml_ext_trellis_tables * tables, int k, int n, uint8_t d, uint8_t start,
                                           const uint8_t * ql, const uint8_t * qh, float offset, struct ggml_ext_unpacked * u) {
    int state = ggml_ext_trellis_start_state(k, start);
    for (int t = 0; t < n; ++t) {
        const int j = ggml_ext_trellis_position(n, t);
        state   = (state << k | ggml_ext_trellis_symbol(k, n, ql, qh, j)) & (GGML_EXT_TRELLIS_STATES - 1);
        u->q[j] = (int8_t) ggml_ext_trellis_code(tables, k, state);
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_e5m3_to_float(d);
    u->offset   = offset;
}
