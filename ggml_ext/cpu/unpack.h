// The unpack contract over SIMD registers. A type specialises unpacker<block>, made of the blocks at x, of which n follow:
//   groups<G>()           u8x64, G = 0 ... 3: the codes of groups G and G + 4 (simd.h), equal to the scalar reference
//   d, offset             float, as in ggml_ext_unpacked
// with blocks of 64, of which it takes up to four:
//   d                     f32x4, zero where there is no block
// with four scales a block (group = 64):
//   group<G>()            in place of groups(): u8x32, G = 0 ... 7, the codes of weights 32*G .. 32*G + 31
//   scales, scale(g)      scales4 and int
// and everything below follows.
#pragma once

#include "../ggml-ext-traits.h"
#include "simd.h"

#include <type_traits>
#include <utility>

namespace ggml_ext {

template <typename B> struct unpacker;

static inline float e5m3_to_float(uint8_t d) { return half_to_float(ggml_ext_e5m3_half(d))*GGML_EXT_E5M3_FACTOR; }

// What vec_dot takes at a time: 256 weights, in one block or in four.
template <typename B> constexpr int group_blocks = QK_K/traits<B>::block_size;
template <typename B> constexpr bool has_scales  = traits<B>::n_groups > 1;
template <typename B> using activation_of = std::conditional_t<group_blocks<B> == 1, block_q8_K, block_q8_kr64>;

// The codes of all groups to f(G, codes), codes u8x64 of the groups G and G + 4.
template <typename B, typename F, int... G>
static inline void each_groups(const unpacker<B> & u, F f, std::integer_sequence<int, G...>) {
    if constexpr (has_scales<B>) {
        (f(G, join(u.template group<G>(), u.template group<G + 4>())), ...);
    } else {
        (f(G, u.template groups<G>()), ...);
    }
}
template <typename B, typename F> static inline void each_groups(const unpacker<B> & u, F f) {
    each_groups(u, f, std::make_integer_sequence<int, 4>());
}

// Sum over a block of scale*q*y.
template <typename B, int... K>
static inline i32_sum scaled_dot(const unpacker<B> & u, const int8_t * y, std::integer_sequence<int, K...>) {
    static_assert(traits<B>::group == QK_K/4, "one scale or four");
    scaled_dot_sum<traits<B>::q_max> sum{u.scales};
    (sum.template add<K>(u.template group<2*K>(), u.template group<2*K + 1>(), y + 64*K), ...);
    return sum.total();
}

// Rows follow each other in memory, but hardware prefetchers stop at each 4 KB page: asking 4000 bytes ahead took decode
// from 127 to 155 tokens/s (two Zen 5 cores, 1B shape, ITQ3_S); 2000 to 6400 bytes are alike.
constexpr int PREFETCH_BYTES = 4000;

static inline void prefetch(const char * x, size_t n) {
    for (size_t i = 0; i + 8 < n; i += 64) { // a few bytes beyond a line need no prefetch of their own
        __builtin_prefetch(x + i);
    }
}

// Dot product of n weights with n quantised activations: exact in integers inside a block, float across blocks.
template <typename B>
static inline float vec_dot(int n, const B * x, const activation_of<B> * y) {
    constexpr int BLOCKS = group_blocks<B>;
    const int     n_blocks = n/traits<B>::block_size;
    std::conditional_t<BLOCKS == 1, f32_sum, f32_sum4> acc;
    for (int ib = 0; ib < n_blocks; ib += BLOCKS, ++y) {
        prefetch((const char *) (x + ib) + PREFETCH_BYTES, BLOCKS*sizeof(B));
        const unpacker<B> u(x + ib, n_blocks - ib);
        if constexpr (BLOCKS > 1) {
            const f32x4 d = u.d*load4(y->d);
            quarter_dot_sum64<traits<B>::q_max> sum;
            each_groups(u, [&](int g, u8x64 q) { sum.add(q, y->qs + 64*g); });
            acc.add(d, sum.quarters());
            acc.add(d, load4(y->sum)*-u.offset);
        } else {
            const float d = u.d*y->d;
            if constexpr (has_scales<B>) {
                acc.add(d, scaled_dot(u, y->qs, std::make_integer_sequence<int, 4>()));
                acc.add(-d*u.offset, activation_sum(y->bsums, u.scales));
            } else {
                dot_sum64<traits<B>::q_max> sum;
                each_groups(u, [&](int g, u8x64 q) {
                    if constexpr (traits<B>::rotated) { // ggml_ext_group_at()
                        sum.add(q, y->qs + 64*g);
                    } else {
                        sum.add(q, y->qs + 32*g, y->qs + 128 + 32*g);
                    }
                });
                acc.add(d, sum.total());
                acc.add(-d*u.offset, activation_sum(y->bsums));
            }
        }
    }
    return acc.total();
}

// The 256 codes of a block as its activations lie.
template <typename B>
static inline void unpack_block_for_tile(const unpacker<B> & u, uint8_t * q) {
    each_groups(u, [&](int g, u8x64 codes) {
        store(q + (traits<B>::rotated ? 64*g      : 32*g), low_half(codes));
        store(q + (traits<B>::rotated ? 64*g + 32 : 32*g + 128), high_half(codes));
    });
}

// The codes of the blocks of an unpacker in order, 256.
template <typename B>
static inline void unpack_blocks(const unpacker<B> & u, uint8_t * q) {
    if constexpr (group_blocks<B> == 1) {
        each_groups(u, [&](int g, u8x64 codes) {
            store(q + 32*g, low_half(codes));
            store(q + 32*g + 128, high_half(codes));
        });
    } else { // eight codes of each block in a group
        alignas(64) uint8_t groups[QK_K];
        each_groups(u, [&](int g, u8x64 codes) {
            store(groups + 32*g, low_half(codes));
            store(groups + 32*g + 128, high_half(codes));
        });
        for (int b = 0; b < group_blocks<B>; ++b) {
            for (int g = 0; g < 8; ++g) {
                memcpy(q + 64*b + 8*g, groups + 32*g + 8*b, 8);
            }
        }
    }
}

} // namespace ggml_ext
