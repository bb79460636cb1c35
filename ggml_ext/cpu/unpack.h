// The unpack contract over SIMD registers. A type specialises unpacker<block>:
//   d, offset             float, as in ggml_ext_unpacked (offset only if the type has one)
//   group<G>()            u8x32, the codes of weights 32*G .. 32*G + 31, equal to the scalar reference
//   scales, scale(g)      scales4 and int: the scales of the block's quarters, of types with group = 64
// and everything below follows.
#pragma once

#include "simd.h"

#include <utility>

namespace ggml_ext {

template <typename B> struct unpacker;

static inline float e5m3_to_float(uint8_t d) { return half_to_float(ggml_ext_e5m3_half(d))*GGML_EXT_E5M3_FACTOR; }

// The type's row of types.toml.
template <typename B> struct traits;
#define GGML_EXT_X(NAME, name)                                              \
    template <> struct traits<block_##name> {                               \
        static constexpr int       q_min      = GGML_EXT_##NAME##_UNPACK_MIN; \
        static constexpr int       q_max      = GGML_EXT_##NAME##_UNPACK_MAX; \
        static constexpr int       group      = GGML_EXT_##NAME##_GROUP;    \
        static constexpr bool      has_offset = GGML_EXT_##NAME##_HAS_OFFSET; \
    };
GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X

constexpr int N_VECS = QK_K/32;

// Sum over a block of scale*q*y.
template <typename B, int... G>
static inline i32_sum dot_block(const unpacker<B> & u, const int8_t * y, std::integer_sequence<int, G...>) {
    if constexpr (traits<B>::group == QK_K) {
        dot_sum<traits<B>::q_max, N_VECS> sum;
        (sum.add(u.template group<G>(), y + 32*G), ...);
        return sum.total();
    } else {
        static_assert(traits<B>::group == QK_K/4, "one scale or four");
        scaled_dot_sum<traits<B>::q_max> sum{u.scales};
        ((G%2 == 0 ? sum.template add<G/2>(u.template group<G & ~1>(), u.template group<G | 1>(), y + 32*G) : void()), ...);
        return sum.total();
    }
}

// Sum over a block of scale*y.
template <typename B>
static inline i32_sum sum_block(const unpacker<B> & u, const int16_t * bsums) {
    if constexpr (traits<B>::group == QK_K) {
        return activation_sum(bsums);
    } else {
        return activation_sum(bsums, u.scales);
    }
}

template <typename B, int... G>
static inline void store_block(const unpacker<B> & u, uint8_t * q, std::integer_sequence<int, G...>) {
    (store(q + 32*G, u.template group<G>()), ...);
}

// Rows follow each other in memory, but hardware prefetchers stop at each 4 KB page: asking 40 blocks ahead took decode
// from 127 to 155 tokens/s (two Zen 5 cores, 1B shape, ITQ3_S); 20 to 64 blocks are alike.
constexpr int PREFETCH_BLOCKS = 40;

template <typename B>
static inline void prefetch(const B * x) {
    for (size_t i = 0; i + 8 < sizeof(B); i += 64) { // a few bytes beyond a line need no prefetch of their own
        __builtin_prefetch((const char *) x + i);
    }
}

// Dot product of n weights with n quantised activations: exact in integers inside a block, float across blocks.
template <typename B>
static inline float vec_dot(int n, const B * x, const block_q8_K * y) {
    f32_sum acc;
    for (int ib = 0; ib < n/QK_K; ++ib) {
        prefetch(x + ib + PREFETCH_BLOCKS);
        const unpacker<B> u(x[ib]);
        const float d = u.d*y[ib].d;
        acc.add(d, dot_block(u, y[ib].qs, std::make_integer_sequence<int, N_VECS>()));
        if constexpr (traits<B>::has_offset) {
            acc.add(-d*u.offset, sum_block(u, y[ib].bsums));
        }
    }
    return acc.total();
}

// The 256 codes of one block in order.
template <typename B>
static inline void unpack_block(const unpacker<B> & u, uint8_t * q) {
    store_block(u, q, std::make_integer_sequence<int, N_VECS>());
}

} // namespace ggml_ext
