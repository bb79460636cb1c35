// The trellis types: ITQ4_T, ITQ3_T, ITQ2_T, ITQ1H_T, ITQ1_T and, in blocks of 64, ITQ4_T64 ... ITQ1_T64, in
// blocks of 32 ITQ4_T32, ITQ3_T32 and ITQ2_T32. They differ only in the constants of
// GGML_EXT_TRELLIS_TYPES (codes.h): K bits per symbol, V weights per symbol, n weights per block, two tables of values for each of the V weights
// and an offset.
//
//   w[0..n-1] = S H v,   v[j] = d * (q[j] - offset)                           (ggml-ext-rotation.h)
//
//   byte  0  1      2                  2 + K*n/(8*V)
//         d  start  symbols (K*n/(8*V))         K/V + 16/n bits per weight: ITQ3_T 98 bytes for 256, 3.0625
//
// Each step adds a symbol of K bits to a stream. The last 12 bits of the stream are the state, which determines the codes q of the step's V weights. The
// encoder finds the path through the states with the smallest cost (Viterbi). Neighbouring weights share bits, which acts like a codebook of many
// dimensions.
//
//   Weight v of step t is weight j = V*t + v of the path, at position L*(j%8) + j/8 of the block, L = n/8. So the predecessors of a symbol are in
//   the same byte of other groups of L weights.
//   c[t]     symbol of step t; c[-1], c[-2] ... are the bits of `start`, then zeros
//   pair(t)  low two bits of c[t] << 2 | low two bits of c[t-1]                    K = 3 and 2
//   quad(t)  high bits of c[t] << 3 | c[t-1] << 2 | c[t-2] << 1 | c[t-3]           K = 3
//
//   V = 1           i0                                  i1
//     K = 4         c[t] ^ c[t-2]                       c[t-1]                         all 12 bits of c[t] ... c[t-2]
//     K = 3         pair(t) ^ pair(t-1) ^ pair(t-2)     pair(t) ^ quad(t)              all 12 bits of c[t] ... c[t-3]
//     K = 2         pair(t) ^ pair(t-4)                 pair(t-2)                      all 12 bits of c[t] ... c[t-5]
//
//   V = 2           i0, then i2                         i1
//     K = 3         pair(t) ^ pair(t-1) ^ pair(t-2)     pair(t) ^ quad(t)
//                   pair(t) ^ pair(t-2)
//     K = 2         pair(t) ^ pair(t-4)                 pair(t) ^ pair(t-2) ^ pair(t-4)
//                   pair(t) ^ pair(t-2)
//
//   q = values[0][i0] + values[1][i1]           0..127; of the second weight values[2][i2] + values[3][i1]
//
// How symbols are stored:
//   V = 1     planes of L bytes
//     K = 4     four planes; byte i of plane p has c[8*i + 2*p] and, in its high nibble, c[8*i + 2*p + 1]
//     K = 3, 2  low two bits: two planes with four steps per byte; high bits (K = 3): one plane with eight steps per byte (bits3.h). A pair or
//               quad is four adjacent bits.
//   V = 2     low two bits: four steps per byte, in their order, the first in the lowest bits; then high bits (K = 3): eight steps per byte
//   start     continues the low bits before step 0: c[-4] ... c[-1], for K = 4 c[-2] and c[-1]. K = 3 does not use c[-4]; its two bits are the
//             high bits of c[-2] and c[-1].
//
// Design:
//   - The indices are linear over GF(2). Decoders XOR full words of symbols, and a weight takes two look-ups in 16 bytes.
//   - i0 and i1 must not be windows of one filtered stream, for example i1 = pair(t) ^ pair(t-2) and i0 = i1 two steps earlier. Such a code
//     would have only 256 states.
//   - The two weights of a step have three indices: a fourth costs an operation and gains nothing that was measured. One bit per weight is K = 2,
//     V = 2. K = 1, V = 1 would have 1 % less error, but its symbols would need more operations.
//   - A stored start state takes no extra pass of the encoder, unlike a tail-biting path (docs/results/encoders.md).
//   - d has three mantissa bits (e5m3.h): more bits cost more than they gain.
// scripts/studies/trellis_search.py searches the values.
//
// Sources: trellis-coded quantization, M. W. Marcellin and T. R. Fischer, IEEE Trans. Communications 38(1), 1990; for rotated weights QTIP,
// A. Tseng et al., 2024. The codes are new.
#pragma once

#include "bits3.h"
#include "codes.h"
#include "e5m3.h"

struct ggml_ext_trellis_tables { uint8_t values[4][16]; };

enum { GGML_EXT_TRELLIS_BITS = 12, GGML_EXT_TRELLIS_STATES = 1 << GGML_EXT_TRELLIS_BITS };

// Returns the position of weight j of the path in a block of n weights.
static inline int ggml_ext_trellis_position(int n, int j) {
    return n/8*(j%8) + j/8;
}

// Returns the code that a state gives weight i < v of its step. The state is the 12 bits c[t] | c[t-1] << K | c[t-2] << 2*K ...
static inline int ggml_ext_trellis_code(const struct ggml_ext_trellis_tables * t, int k, int v, int state, int i) {
    const int mask = (1 << k) - 1;
    int c[7] = {0}, quad = 0;
    for (int s = 0; s < GGML_EXT_TRELLIS_BITS/k; ++s) {
        c[s] = state >> k*s & mask;
        quad = s < 4 ? quad | (c[s] >> 2 & 1) << (3 - s) : quad;
    }
    if (k == 4) {
        return t->values[0][c[0] ^ c[2]] + t->values[1][c[1]];
    }
    int pair[5];
    for (int s = 0; s < 5; ++s) {
        pair[s] = (c[s] & 3) << 2 | (c[s + 1] & 3);
    }
    const int i0 = i == 1 ? pair[0] ^ pair[2] : k == 3 ? pair[0] ^ pair[1] ^ pair[2] : pair[0] ^ pair[4];
    const int i1 = k == 3 ? pair[0] ^ quad : v == 2 ? pair[0] ^ pair[2] ^ pair[4] : pair[2];
    return t->values[2*i][i0] + t->values[2*i + 1][i1];
}

// Returns the state before step 0, c[-1] | c[-2] << K ..., of which 12 - K bits matter.
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

// Returns the symbol of step t of a block.
static inline int ggml_ext_trellis_symbol(int k, int v, int n, const uint8_t * symbols, int t) {
    if (v == 2) {
        const int low = symbols[t/4] >> 2*(t%4) & 3;
        return k == 3 ? low | (symbols[n/8 + t/8] >> t%8 & 1) << 2 : low;
    }
    const int j = ggml_ext_trellis_position(n, t), lanes = n/8, group = j/lanes;
    return k == 4 ? symbols[lanes*(group/2) + j%lanes] >> 4*(group%2) & 15
         : k == 3 ? ggml_ext_get_bits3(symbols, symbols + n/4, n, j) : ggml_ext_get_bits2(symbols, n, j);
}

// Packs the symbols of all steps.
static inline void ggml_ext_trellis_pack(int k, int v, int n, const uint8_t * c, uint8_t * symbols) {
    if (v == 1 && k < 4) {
        uint8_t by_position[QK_K];
        for (int t = 0; t < n; ++t) {
            by_position[ggml_ext_trellis_position(n, t)] = c[t];
        }
        ggml_ext_pack_bits3(by_position, n, symbols, k == 3 ? symbols + n/4 : NULL);
        return;
    }
    memset(symbols, 0, (size_t) (k*n/v/8));
    for (int t = 0; t < n/v; ++t) {
        if (k == 4) {
            symbols[n/8*(t%8/2) + t/8] |= (uint8_t) (c[t] << 4*(t%2));
            continue;
        }
        symbols[t/4] |= (uint8_t) ((c[t] & 3) << 2*(t%4));
        if (k == 3) {
            symbols[n/8 + t/8] |= (uint8_t) ((c[t] >> 2) << t%8);
        }
    }
}

// Unpacks a block (unpack contract). This definition is slow: it follows the states one by one.
static inline void ggml_ext_trellis_unpack(const struct ggml_ext_trellis_tables * tables, int k, int v, int n, uint8_t start,
                                           const uint8_t * symbols, struct ggml_ext_unpacked * u) {
    int state = ggml_ext_trellis_start_state(k, start);
    for (int t = 0; t < n/v; ++t) {
        state = (state << k | ggml_ext_trellis_symbol(k, v, n, symbols, t)) & (GGML_EXT_TRELLIS_STATES - 1);
        for (int i = 0; i < v; ++i) {
            u->q[ggml_ext_trellis_position(n, v*t + i)] = (int8_t) ggml_ext_trellis_code(tables, k, v, state, i);
        }
    }
}

// Block struct, tables, unpack, validation and encoder of each type. A block is valid if d is finite; all other bits may have any value.
#define GGML_EXT_X(NAME, name, K, V, N, CODE, OFFSET, ...)                                                                     \
    typedef struct {                                                                                                           \
        uint8_t d, start, symbols[K*N/(8*V)];                                                                                  \
    } block_##name;                                                                                                            \
    static_assert(sizeof(block_##name) == GGML_EXT_##NAME##_BLOCK_BYTES, "types.toml and the struct differ");                  \
    static const struct ggml_ext_trellis_tables ggml_ext_##name##_tables = GGML_EXT_TRELLIS_TABLES_##CODE;                     \
    static inline void ggml_ext_unpack_##name(const block_##name * x, struct ggml_ext_unpacked * u) {                          \
        ggml_ext_trellis_unpack(&ggml_ext_##name##_tables, K, V, N, x->start, x->symbols, u);                                  \
        u->scale[0] = 1;                                                                                                       \
        u->d        = ggml_ext_e5m3_to_float(x->d);                                                                            \
        u->offset   = OFFSET;                                                                                                  \
    }                                                                                                                          \
    static inline bool ggml_ext_validate_block_##name(const block_##name * x) {                                                \
        return x->d <= GGML_EXT_E5M3_MAX;                                                                                      \
    }                                                                                                                          \
    void ggml_ext_encode_##name(const float * src, block_##name * dst, int64_t n_rows, int64_t row_blocks,                     \
                                const float * importance, const struct ggml_ext_quantize_params * params);
GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
