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

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <utility>

namespace ggml_ext {

template <typename B> struct unpacker;

// ggml_ext_e5m3_to_float() of every byte: a load takes the place of a conversion and a product.
struct e5m3_floats {
    float of[256] = {};
    constexpr e5m3_floats() {
        float ulp = GGML_EXT_E5M3_FACTOR/(1 << 17); // of the smallest, a half's 2^-17
        for (int e = 0; e < 32; ulp *= e++ ? 2 : 1) {
            for (int m = 0; m < 8; ++m) { of[8*e + m] = (float) (e ? 8 + m : m)*ulp; }
        }
        of[248] = std::numeric_limits<float>::infinity();
        for (int d = 249; d < 256; ++d) { of[d] = std::numeric_limits<float>::quiet_NaN(); }
    }
};
static inline float e5m3_to_float(uint8_t d) {
    static constexpr e5m3_floats floats;
    return floats.of[d];
}

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

// What a column has for a block of 256 or four of 64, as the kernels read it: aligned, as other loads of 32 bytes take a Zen 3 core
// twice as long; the groups g and g + 4 side by side where each_groups() is used; and sums made once for all rows.
struct alignas(64) column_block {
    int8_t    qs[QK_K];
    f32_lanes sums; // of qs, in the lanes of an i32_sum
    float     d;
};

template <typename B> static inline void load_column(const block_q8_K & y, column_block & out) {
    constexpr bool ordered = traits<B>::rotated || has_scales<B>;
    for (int g = 0; g < 8; ++g) {
        store((uint8_t *) out.qs + (ordered ? 32*g : ggml_ext_group_at(g)), load((const uint8_t *) y.qs + 32*g));
    }
    out.sums = lane_sums(y.bsums);
    out.d    = y.d;
}
template <typename B> static inline void load_column(const block_q8_kr64 & y, column_block & out) {
    memcpy(out.qs, y.qs, sizeof(y.qs));
    out.sums = spread(load4(y.sum))*((float) GGML_EXT_GROUP_BLOCKS/N_LANES);
    out.d    = y.d[0];
}

// Sums of the products of the codes of u with C columns, in integers. Codes are made once.
template <typename B, int C, int... K>
static inline auto dot_codes(const unpacker<B> & u, const column_block * y, std::integer_sequence<int, K...>) {
    if constexpr (has_scales<B>) {
        static_assert(traits<B>::group == QK_K/4, "one scale or four");
        std::array<scaled_dot_sum64<traits<B>::q_max>, C> sums;
        const auto add = [&](int k, u8x64 q, auto scale) {
            for (int c = 0; c < C; ++c) { sums[c].add(q, scale, y[c].qs + 64*k); }
        };
        (add(K, join(u.template group<2*K>(), u.template group<2*K + 1>()), quarter_scale<K>(u.scales)), ...);
        return sums;
    } else {
        std::array<std::conditional_t<group_blocks<B> == 1, dot_sum64<traits<B>::q_max>, quarter_dot_sum64<traits<B>::q_max>>, C> sums;
        each_groups(u, [&](int g, u8x64 q) {
            for (int c = 0; c < C; ++c) { sums[c].add(q, y[c].qs + 64*g); }
        });
        return sums;
    }
}
template <typename B, int C> static inline auto dot_codes(const unpacker<B> & u, const column_block * y) {
    return dot_codes<B, C>(u, y, std::make_integer_sequence<int, 4>());
}

// -offset * scale of the codes, in lanes as above.
template <typename B> static inline f32_lanes offset_scales(const unpacker<B> & u) {
    if constexpr (has_scales<B>) {
        return spread(u.scales)*-u.offset;
    } else {
        return spread(-u.offset);
    }
}

// Adds the products of the codes of u with C columns: exact in integers, then float.
template <typename B, int C>
static inline void add_products(f32_sum (&acc)[C], const unpacker<B> & u, const column_block * columns) {
    const auto      dots = dot_codes<B, C>(u, columns);
    const f32_lanes d = spread(u.d), offset = offset_scales(u);
    for (int c = 0; c < C; ++c) { acc[c].add(d*columns[c].d, dots[c].total(), offset, columns[c].sums); }
}

// Adds what is behind the last four blocks of each row, R blocks of 64 that the columns have at y[c][k]: of one, two or four rows in
// the place of four blocks.
template <int R, typename B, int C>
static inline void add_tails(float * const * s, int i0, const char * x, size_t stride, int n_rows, const block_q8_kr64 * const * y, int k) {
    static constexpr B none = {};
    constexpr int at_once = 4/R, n_places = at_once*R;
    column_block columns[C];
    for (int c = 0; c < C; ++c) {
        block_q8_kr64 places = y[c][k]; // the activations in each place
        for (int b = R; b < n_places; ++b) {
            places.sum[b] = places.sum[b%R];
            for (int g = 0; g < 8; ++g) {
                memcpy(places.qs + 32*g + 8*b, places.qs + 32*g + 8*(b%R), 8);
            }
        }
        load_column<B>(places, columns[c]);
    }
    for (int i = 0; i < n_rows; i += at_once) {
        const B * p[GGML_EXT_GROUP_BLOCKS];
        for (int b = 0; b < GGML_EXT_GROUP_BLOCKS; ++b) {
            p[b] = b < n_places && i + b/R < n_rows ? (const B *) (x + (i + b/R)*stride) + b%R : &none;
        }
        f32_sum acc[C];
        add_products(acc, unpacker<B>(p), columns);
        for (int c = 0; c < C; ++c) {
            float products[GGML_EXT_GROUP_BLOCKS];
            store4(products, acc[c].quarters());
            for (int b = 0; b < n_places && i + b/R < n_rows; ++b) {
                s[c][i0 + i + b/R] += products[b];
            }
        }
    }
}

// Blocks of 256 and rows that are multiplied at a time: all columns' parts of a row stay in a first cache of 32 KB.
constexpr int COLUMN_BLOCKS = 64, MAX_ROWS = 64;

// Products of n_rows rows of n weights, `stride` bytes apart, with C columns of n quantised activations: s[c][i] is that of row i
// and column c. A block is unpacked once. What is in s[c] does not depend on the other columns, nor on C.
template <typename B, int C>
static inline void dot_columns(int n, float * const * s, int i0, const void * x, size_t stride, int n_rows,
                               const activation_of<B> * const * y) {
    constexpr int BLOCKS = group_blocks<B>, N = COLUMN_BLOCKS/C;
    const int     n_full = n/QK_K;
    f32_sum       sums[MAX_ROWS][C];
    for (int k0 = 0; k0 < n_full; k0 += N) {
        const int n_here = n_full - k0 < N ? n_full - k0 : N;
        column_block columns[N*C];
        for (int k = 0; k < n_here; ++k) {
            for (int c = 0; c < C; ++c) {
                load_column<B>(y[c][k0 + k], columns[k*C + c]);
            }
        }
        for (int i = 0; i < n_rows; ++i) {
            const B * row = (const B *) ((const char *) x + i*stride) + k0*BLOCKS;
            f32_sum acc[C];
            if (k0) { for (int c = 0; c < C; ++c) { acc[c] = sums[i][c]; } }
            for (const column_block * at = columns; at < columns + n_here*C; at += C, row += BLOCKS) {
                prefetch((const char *) row + PREFETCH_BYTES, BLOCKS*sizeof(B));
                add_products(acc, unpacker<B>(row), at);
            }
            for (int c = 0; c < C; ++c) { sums[i][c] = acc[c]; }
        }
    }
    for (int c = 0; c < C; ++c) {
        for (int i = 0; i < n_rows; ++i) { s[c][i0 + i] = sums[i][c].total(); }
    }
    if constexpr (BLOCKS > 1) {
        const char * tails = (const char *) x + n_full*BLOCKS*sizeof(B);
        switch (n/traits<B>::block_size%BLOCKS) {
            case 1: add_tails<1, B, C>(s, i0, tails, stride, n_rows, y, n_full); break;
            case 2: add_tails<2, B, C>(s, i0, tails, stride, n_rows, y, n_full); break;
            case 3: add_tails<3, B, C>(s, i0, tails, stride, n_rows, y, n_full); break;
        }
    }
}

// Columns multiplied at a time: the accumulators of more have no room in 16 registers.
constexpr int MAX_COLUMNS = 8;

// The same for any number of columns, as few times as it takes.
template <typename B>
static inline void dot_columns(int n, float * const * s, const void * x, size_t stride, int n_rows, const void * const * y, int n_cols) {
    for (int n_times = (n_cols + MAX_COLUMNS - 1)/MAX_COLUMNS; n_times > 0; --n_times) {
        const int n_here = (n_cols + n_times - 1)/n_times;
        const activation_of<B> * columns[MAX_COLUMNS];
        std::copy_n((const activation_of<B> * const *) y, n_here, columns);
        for (int i = 0; i < n_rows; i += MAX_ROWS) {
            const char * rows = (const char *) x + i*stride;
            const int    left = n_rows - i < MAX_ROWS ? n_rows - i : MAX_ROWS;
            switch (n_here) {
                case 1: dot_columns<B, 1>(n, s, i, rows, stride, left, columns); break;
                case 2: dot_columns<B, 2>(n, s, i, rows, stride, left, columns); break;
                case 3: dot_columns<B, 3>(n, s, i, rows, stride, left, columns); break;
                case 4: dot_columns<B, 4>(n, s, i, rows, stride, left, columns); break;
                case 5: dot_columns<B, 5>(n, s, i, rows, stride, left, columns); break;
                case 6: dot_columns<B, 6>(n, s, i, rows, stride, left, columns); break;
                case 7: dot_columns<B, 7>(n, s, i, rows, stride, left, columns); break;
                case 8: dot_columns<B, 8>(n, s, i, rows, stride, left, columns); break;
            }
        }
        s += n_here, y += n_here, n_cols -= n_here;
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
