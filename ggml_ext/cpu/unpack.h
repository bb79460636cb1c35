// The unpack contract over SIMD registers. A type specialises unpacker<block>, made of a pointer to a block:
//   groups<G>()           u8x64, G = 0 ... 3: the codes of groups G and G + 4 (simd.h), equal to the scalar reference
//   d, offset             float, as in ggml_ext_unpacked
// with blocks of 64, of which it takes four, one after the other or by four pointers:
//   d                     f32x4
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

// The unpacker of the blocks at x, of which n follow; where there are fewer than it takes, the others are zero.
template <typename B> static inline unpacker<B> load_blocks(const B * x, int64_t n) {
    if constexpr (group_blocks<B> == 1) {
        return unpacker<B>(x);
    } else {
        static constexpr B none = {};
        const B * const p[GGML_EXT_GROUP_BLOCKS] = {x, n > 1 ? x + 1 : &none, n > 2 ? x + 2 : &none, n > 3 ? x + 3 : &none};
        return n < GGML_EXT_GROUP_BLOCKS ? unpacker<B>(p) : unpacker<B>(x);
    }
}

// Rows follow each other in memory, but hardware prefetchers stop at each 4 KB page: asking 4000 bytes ahead took decode
// from 127 to 155 tokens/s (two Zen 5 cores, 1B shape, ITQ3_S); 2000 to 6400 bytes are alike.
constexpr int PREFETCH_BYTES = 4000;

static inline void prefetch(const char * x, size_t n) {
    for (size_t i = 0; i + 8 < n; i += 64) { // a few bytes beyond a line need no prefetch of their own
        __builtin_prefetch(x + i);
    }
}

// Adds the products of a block of 256, or of four of 64, to acc: exact in integers, then float.
template <typename B>
static inline void add_block(f32_sum & acc, const unpacker<B> & u, const block_q8_K & y) {
    const float d = u.d*y.d;
    if constexpr (has_scales<B>) {
        acc.add(d, scaled_dot(u, y.qs, std::make_integer_sequence<int, 4>()));
        acc.add(-d*u.offset, activation_sum(y.bsums, u.scales));
    } else {
        dot_sum64<traits<B>::q_max> sum;
        each_groups(u, [&](int g, u8x64 q) {
            if constexpr (traits<B>::rotated) { // ggml_ext_group_at()
                sum.add(q, y.qs + 64*g);
            } else {
                sum.add(q, y.qs + 32*g, y.qs + 128 + 32*g);
            }
        });
        acc.add(d, sum.total());
        acc.add(-d*u.offset, activation_sum(y.bsums));
    }
}

template <typename B>
static inline i32_sum4 quarter_dots(const unpacker<B> & u, const block_q8_kr64 & y) {
    quarter_dot_sum64<traits<B>::q_max> sum;
    each_groups(u, [&](int g, u8x64 q) { sum.add(q, y.qs + 64*g); });
    return sum.quarters();
}

template <typename B>
static inline void add_block(f32_sum4 & acc, const unpacker<B> & u, const block_q8_kr64 & y) {
    const f32x4 d = u.d*load4(y.d);
    acc.add(d, quarter_dots(u, y));
    acc.add(d, load4(y.sum)*-u.offset);
}

// Adds what is behind the last four blocks of each row, R blocks of 64: of one, two or four rows in the place of four blocks.
template <int R, typename B>
static inline void add_tails(float * s, const char * x, size_t stride, int n_rows, const block_q8_kr64 & y) {
    static constexpr B none = {};
    constexpr int at_once = 4/R, n_places = at_once*R;
    block_q8_kr64 places = y; // the activations in each place
    for (int b = R; b < n_places; ++b) {
        places.sum[b] = y.sum[b%R];
        for (int g = 0; g < 8; ++g) {
            memcpy(places.qs + 32*g + 8*b, y.qs + 32*g + 8*(b%R), 8);
        }
    }
    for (int i = 0; i < n_rows; i += at_once) {
        const B * p[GGML_EXT_GROUP_BLOCKS];
        for (int b = 0; b < GGML_EXT_GROUP_BLOCKS; ++b) {
            p[b] = b < n_places && i + b/R < n_rows ? (const B *) (x + (i + b/R)*stride) + b%R : &none;
        }
        const unpacker<B> u(p);
        float products[GGML_EXT_GROUP_BLOCKS];
        store4(products, u.d*load4(places.d)*(to_floats(quarter_dots(u, places)) + load4(places.sum)*-u.offset));
        for (int b = 0; b < n_places && i + b/R < n_rows; ++b) {
            s[i + b/R] += products[b];
        }
    }
}

// Products of n_rows rows of n weights, `stride` bytes apart, with n quantised activations.
template <typename B>
static inline void dot_rows(int n, float * s, const void * x, size_t stride, int n_rows, const activation_of<B> * y) {
    constexpr int BLOCKS = group_blocks<B>;
    const int     n_full = n/QK_K;
    for (int i = 0; i < n_rows; ++i) {
        const B * row = (const B *) ((const char *) x + i*stride);
        std::conditional_t<BLOCKS == 1, f32_sum, f32_sum4> acc;
        for (int k = 0; k < n_full; ++k, row += BLOCKS) {
            prefetch((const char *) row + PREFETCH_BYTES, BLOCKS*sizeof(B));
            add_block(acc, unpacker<B>(row), y[k]);
        }
        s[i] = acc.total();
    }
    if constexpr (BLOCKS > 1) {
        const char * tails = (const char *) x + n_full*BLOCKS*sizeof(B);
        switch (n/traits<B>::block_size%BLOCKS) {
            case 1: return add_tails<1, B>(s, tails, stride, n_rows, y[n_full]);
            case 2: return add_tails<2, B>(s, tails, stride, n_rows, y[n_full]);
            case 3: return add_tails<3, B>(s, tails, stride, n_rows, y[n_full]);
        }
    }
}

// The codes of all groups, those of group g from q + at(g) on.
template <typename B, typename F> static inline void store_groups(const unpacker<B> & u, uint8_t * q, F at) {
    each_groups(u, [&](int g, u8x64 codes) {
        store(q + at(g), low_half(codes));
        store(q + at(g + 4), high_half(codes));
    });
}
static inline int in_order(int g) { return 32*g; }

// What lies as the kernels want it of four blocks of 64, eight bytes of each in a group, in the order of the weights.
static inline void order_blocks(const void * groups, void * q) {
    for (int g = 0; g < 8; ++g) {
        for (int b = 0; b < GGML_EXT_GROUP_BLOCKS; ++b) {
            memcpy((char *) q + 64*b + 8*g, (const char *) groups + ggml_ext_group_at(g) + 8*b, 8);
        }
    }
}

// The 256 codes of a block as its activations lie.
template <typename B> static inline void unpack_block_for_tile(const unpacker<B> & u, uint8_t * q) {
    store_groups(u, q, traits<B>::rotated ? ggml_ext_group_at : in_order);
}

// The codes of the blocks of an unpacker in order, 256.
template <typename B> static inline void unpack_blocks(const unpacker<B> & u, uint8_t * q) {
    if constexpr (group_blocks<B> == 1) {
        store_groups(u, q, in_order);
    } else {
        alignas(64) uint8_t groups[QK_K];
        store_groups(u, groups, ggml_ext_group_at);
        order_blocks(groups, q);
    }
}

} // namespace ggml_ext
