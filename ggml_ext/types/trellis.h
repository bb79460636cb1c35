// The trellis types: ITQ4_T, ITQ3_T, ITQ2_T and, in blocks of 64, ITQ4_T64, ITQ3_T64, ITQ2_T64. They differ only in the constants of
// GGML_EXT_TRELLIS_TYPES (codes.h): K bits per symbol, n weights per block, two tables of values and an offset.
//
//   w[0..n-1] = S H v,   v[j] = d * (q[j] - offset)                           (ggml-ext-rotation.h)
//
//   byte  0  1      2                2 + K*n/8
//         d  start  symbols (K*n/8)            K + 16/n bits per weight: ITQ3_T 98 bytes for 256, 3.0625
//
// Each weight adds a symbol of K bits to a stream. The last 12 bits of the stream are the state, which determines the code q. The encoder finds
// the path through the states with the smallest cost (Viterbi). Neighbouring weights share bits, which acts like a codebook of many dimensions.
//
//   Step t of a block is the weight at position L*(t%8) + t/8, L = n/8. So the predecessors of a symbol are in the same byte of other groups of
//   L weights.
//   c[t]     symbol of step t; c[-1], c[-2] ... are the bits of `start`, then zeros
//   pair(t)  low two bits of c[t] << 2 | low two bits of c[t-1]                    K = 3 and 2
//   quad(t)  high bits of c[t] << 3 | c[t-1] << 2 | c[t-2] << 1 | c[t-3]           K = 3
//
//             i0                              i1
//   K = 4     c[t] ^ c[t-2]                   c[t-1]                 all 12 bits of c[t] ... c[t-2]
//   K = 3     pair(t) ^ pair(t-1) ^ pair(t-2) pair(t) ^ quad(t)      all 12 bits of c[t] ... c[t-3]
//   K = 2     pair(t) ^ pair(t-4)             pair(t-2)              all 12 bits of c[t] ... c[t-5]
//
//   q = values[0][i0] + values[1][i1]           0..127
//
// Symbols are stored in planes of L bytes:
//   K = 4     four planes; byte i of plane p has c[8*i + 2*p] and, in its high nibble, c[8*i + 2*p + 1]
//   K = 3, 2  low two bits: two planes with four steps per byte; high bits (K = 3): one plane with eight steps per byte (bits3.h). A pair or
//             quad is four adjacent bits.
//   start     continues the last plane of low bits before its byte 0: c[-4] ... c[-1], for K = 4 c[-2] and c[-1]. K = 3 does not use c[-4];
//             its two bits are the high bits of c[-2] and c[-1].
//
// Design:
//   - The indices are linear over GF(2). Decoders XOR full words of symbols, and a weight takes two look-ups in 16 bytes.
//   - i0 and i1 must not be windows of one filtered stream, for example i1 = pair(t) ^ pair(t-2) and i0 = i1 two steps earlier. Such a code
//     would have only 256 states.
//   - A stored start state takes no extra pass of the encoder, unlike a tail-biting path (docs/results/encoders.md).
//   - d has three mantissa bits (e5m3.h): more bits cost more than they gain.
// scripts/studies/trellis_search.py searches the values and compares maps.
//
// Sources: trellis-coded quantization, M. W. Marcellin and T. R. Fischer, IEEE Trans. Communications 38(1), 1990; for rotated weights QTIP,
// A. Tseng et al., 2024. The codes are new.
#pragma once

#include "bits3.h"
#include "codes.h"
#include "e5m3.h"

struct ggml_ext_trellis_tables { uint8_t values[2][16]; };

enum { GGML_EXT_TRELLIS_BITS = 12, GGML_EXT_TRELLIS_STATES = 1 << GGML_EXT_TRELLIS_BITS };

// Returns the position of step t in a block of n weights.
static inline int ggml_ext_trellis_position(int n, int t) {
    return n/8*(t%8) + t/8;
}

// Returns the code of a state, which is the 12 bits c[t] | c[t-1] << K | c[t-2] << 2*K ...
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

// Returns the symbol at position j of a block.
static inline int ggml_ext_trellis_symbol(int k, int n, const uint8_t * symbols, int j) {
    const int lanes = n/8, group = j/lanes;
    return k == 4 ? symbols[lanes*(group/2) + j%lanes] >> 4*(group%2) & 15
         : k == 3 ? ggml_ext_get_bits3(symbols, symbols + n/4, n, j) : ggml_ext_get_bits2(symbols, n, j);
}

// Packs the symbols of all positions.
static inline void ggml_ext_trellis_pack(int k, int n, const uint8_t * by_position, uint8_t * symbols) {
    if (k < 4) {
        ggml_ext_pack_bits3(by_position, n, symbols, k == 3 ? symbols + n/4 : NULL);
        return;
    }
    const int lanes = n/8;
    memset(symbols, 0, (size_t) n/2);
    for (int j = 0; j < n; ++j) {
        symbols[lanes*(j/lanes/2) + j%lanes] |= (uint8_t) (by_position[j] << 4*(j/lanes%2));
    }
}

// Unpacks a block (unpack contract). This definition is slow: it follows the states one by one.
static inline void ggml_ext_trellis_unpack(const struct ggml_ext_trellis_tables * tables, int k, int n, uint8_t start,
                                           const uint8_t * symbols, struct ggml_ext_unpacked * u) {
    int state = ggml_ext_trellis_start_state(k, start);
    for (int t = 0; t < n; ++t) {
        const int j = ggml_ext_trellis_position(n, t);
        state   = (state << k | ggml_ext_trellis_symbol(k, n, symbols, j)) & (GGML_EXT_TRELLIS_STATES - 1);
        u->q[j] = (int8_t) ggml_ext_trellis_code(tables, k, state);
    }
}

// Block struct, tables, unpack, validation and encoder of each type. A block is valid if d is finite; all other bits may have any value.
#define GGML_EXT_X(NAME, name, K, N, CODE, OFFSET, ...)                                                                        \
    typedef struct {                                                                                                           \
        uint8_t d, start, symbols[K*N/8];                                                                                      \
    } block_##name;                                                                                                            \
    static_assert(sizeof(block_##name) == GGML_EXT_##NAME##_BLOCK_BYTES, "types.toml and the struct differ");                  \
    static const struct ggml_ext_trellis_tables ggml_ext_##name##_tables = GGML_EXT_TRELLIS_TABLES_##CODE;                     \
    static inline void ggml_ext_unpack_##name(const block_##name * x, struct ggml_ext_unpacked * u) {                          \
        ggml_ext_trellis_unpack(&ggml_ext_##name##_tables, K, N, x->start, x->symbols, u);                                     \
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
