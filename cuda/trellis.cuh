// CUDA unpack of the trellis types (types/trellis.h) with words of eight nibbles. The nibbles of byte b belong to the weights
// L*g + 4*k + b (low) and L*(g + 4) + 4*k + b (high), L = n/8; for K = 4 to the groups 2*p and 2*p + 1. For V = 1, predecessors of a symbol are in
// the same byte of other groups. Before group 0 they are in group 7 of the byte before, which block_words::at().before has. For V = 2, byte b has the
// steps of its weights in order, so that the symbols are one stream of bits.
//
// A table of codes in shared memory would be slower: each thread block would write 4096 bytes, more than it reads in weights, and random
// addresses cause bank conflicts.
#pragma once

#include "unpack.cuh"

namespace ggml_ext {

constexpr uint32_t LOW_NIBBLES = 0x0f0f0f0f;

// Computes the codes values[v][i0] + values[v + 1][i1] of eight nibbles.
static __device__ __forceinline__ void trellis_codes(const ggml_ext_trellis_tables & t, int v, uint32_t i0, uint32_t i1,
                                                     uint32_t & q_first, uint32_t & q_second) {
    const lookup16 values0(t.values[v]), values1(t.values[v + 1]);
    uint32_t q[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t s0 = i0 >> 16*i, s1 = i1 >> 16*i;
        q[i] = values0.low(s0) + values0.high(s0) + values1.low(s1) + values1.high(s1);
    }
    q_first  = q[0];
    q_second = q[1];
}

// Returns the distance between the groups of a byte's two nibbles.
constexpr int trellis_nibble_distance(int bits) {
    return bits == 4 ? 1 : 4;
}

// Words for K = 2 and 3, V = 1: low bits of groups 0-3 (l0), of groups 4-7 (l1) and of groups 4-7 one byte earlier (before). Byte -1 has the symbols
// before step 0.
struct trellis_words {
    uint32_t l0, l1, before;

    // Returns pair(t) of the groups g and g + 4 (types/trellis.h). A negative g is group g + 8 one byte earlier.
    __device__ __forceinline__ uint32_t pair(int g) const {
        switch (g) {
            case -2: return select(before >> 2, l0 << 2, LOW_NIBBLES);
            case -1: return select(before >> 4, l0,      LOW_NIBBLES);
            case 0:  return select(select(l0 << 2, before >> 6, 0x0c0c0c0c), select(l1 << 6, l0 >> 2, 0xc0c0c0c0), LOW_NIBBLES);
            case 1:  return select(l0,      l1 << 4, LOW_NIBBLES);
            case 2:  return select(l0 >> 2, l1 << 2, LOW_NIBBLES);
            default: return select(l0 >> 4, l1,      LOW_NIBBLES);
        }
    }
};

// Low bits for V = 2: four steps per byte, after those of the two bytes in the high half of `previous`.
struct trellis_stream {
    uint32_t word, previous;

    // Returns pair(t - lag) of the steps t = h and h + 2 of each byte, h = 0, 1.
    __device__ __forceinline__ uint32_t pair(int h, int lag) const { return __funnelshift_l(previous, word, 2*(lag + 1 - h)); }
};

// Replaces the byte before the block's first one by byte 1 of `first`.
static __device__ __forceinline__ uint32_t replace_first(uint32_t before, int k, uint32_t first) {
    return prmt(before, first, k == 0 ? 0x3215 : 0x3210);
}

// Unpacks a part of a block with K bits per symbol of V weights (unpack contract).
template <typename B, int K, int V>
static __device__ __forceinline__ unpacked unpack_trellis(const B & x, int k, const ggml_ext_trellis_tables & tables, float offset) {
    // words per plane. V = 1: two planes of low bits and, for K = 3, one of high bits; K = 4: four planes of nibbles. V = 2: one plane of low bits
    // and half a plane of high bits
    constexpr int T = N_THREADS<B>;
    static_assert(offsetof(B, start) == 1 && offsetof(B, symbols) == 2 && sizeof(B) == 2 + 4*K*T/V && (V == 1 || (V == 2 && K < 4)), "");
    const block_words words(&x);
    const uint32_t header = words.header(); // d and start
    unpacked u;
    if constexpr (K == 4) {
        const auto l3   = words.at(3*T + k);
        uint32_t   previous = replace_first(l3.before, k, header); // two groups earlier
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const uint32_t l = p == 3 ? l3.word : words[p*T + k];
            trellis_codes(tables, 0, l ^ previous, select(previous >> 4, l << 4, LOW_NIBBLES), u.q[2*p], u.q[2*p + 1]);
            previous = l;
        }
    } else if constexpr (V == 2) {
        const auto l = words.at(k);
        const trellis_stream low = {l.word, l.previous & (k == 0 ? 0xff000000 : 0xffffffff)}; // before the symbols: `start`, and 0 for d
        uint32_t high = 0; // byte b: high bits of the steps -4 ... 3 of byte b
        if constexpr (K == 3) {
            const uint16_t * steps = (const uint16_t *) x.symbols + 2*T + k;
            // loads without a branch, for k = 0 the last low bits: across branches, ptxas would unpack again for each column
            const uint32_t   h = __ldg(steps), loaded = __ldg(steps - 1), h_before = k == 0 ? header << 6 & 0xc000 : loaded;
            high = prmt(h << 4 | h_before >> 12, h, 0x5140);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t p0 = low.pair(i, 0), p2 = low.pair(i, 2);
            uint32_t i0, i1;
            if constexpr (K == 3) {
                i0 = p0 ^ p2 ^ low.pair(i, 1);
                i1 = p0 ^ select(high >> (i + 1), high << (1 - i), LOW_NIBBLES);
            } else {
                i0 = p0 ^ low.pair(i, 4);
                i1 = i0 ^ p2;
            }
            trellis_codes(tables, 0, i0,      i1, u.q[2*i],     u.q[2*i + 4]);
            trellis_codes(tables, 2, p0 ^ p2, i1, u.q[2*i + 1], u.q[2*i + 5]);
        }
    } else {
        const auto l0 = words.at(k), l1 = words.at(T + k);
        const trellis_words l = {l0.word, l1.word, replace_first(l1.before, k, header)};
        if constexpr (K == 3) {
            const auto     h        = words.at(2*T + k);
            const uint32_t h_before = replace_first(h.before, k, header << 6 & 0xc000);
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                // high bits g - 3 ... g, where negative ones are in the byte before
                const uint32_t quad = g == 3 ? h.word : select(h_before >> (5 + g), h.word << (3 - g), 0x01010101*(0x7 >> g));
                trellis_codes(tables, 0, l.pair(g) ^ l.pair(g - 1) ^ l.pair(g - 2), l.pair(g) ^ quad, u.q[g], u.q[g + 4]);
            }
        } else {
            static_assert(K == 2, "");
            // pair(t) ^ pair(t - 4): four steps earlier is the same byte four groups earlier
            const trellis_words both = {l.l0 ^ l.before, l.l1 ^ l.l0, l.before ^ replace_first(l0.before, k, 0)};
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                trellis_codes(tables, 0, both.pair(g), l.pair(g - 2), u.q[g], u.q[g + 4]);
            }
        }
    }
    u.d      = ggml_ext_e5m3_to_float((uint8_t) header);
    u.offset = offset;
    return u;
}

#define GGML_EXT_X(NAME, name, K, V, N, CODE, OFFSET, ...)                                             \
    template <> struct unpacker<block_##name> {                                                        \
        static constexpr float offset          = OFFSET;                                               \
        static constexpr bool  own_offset      = false;                                                \
        static constexpr int   nibble_distance = trellis_nibble_distance(K);                           \
        static __device__ __forceinline__ unpacked unpack(const block_##name & x, int k) {             \
            constexpr ggml_ext_trellis_tables tables = GGML_EXT_TRELLIS_TABLES_##CODE;                 \
            return unpack_trellis<block_##name, K, V>(x, k, tables, offset);                           \
        }                                                                                              \
    };
GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)
#undef GGML_EXT_X

} // namespace ggml_ext
