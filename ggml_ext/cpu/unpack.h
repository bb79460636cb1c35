// The unpack contract over SIMD registers, and the dot products on top of it. A type specialises unpacker<block>, constructed from a
// pointer to a block:
//   groups<G>()           u8x64, G = 0 .. 3: codes of groups G and G + 4 (simd.h), equal to the scalar reference
//   d, offset             float, as in ggml_ext_unpacked
// For blocks of 64, constructed from a pointer to four blocks or from four pointers:
//   d                     f32x4
// For blocks of 32, constructed from a pointer to eight blocks or from eight pointers:
//   d[2]                  f32x4, of the even and of the odd blocks
// For four scales per block (group = 64):
//   group<G>()            instead of groups(): u8x32, G = 0 .. 7, codes of weights 32*G .. 32*G + 31
//   scales, scale(g)      scales4 and int
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

// ggml_ext_e5m3_to_float() of every byte: one load instead of a conversion and a product.
struct e5m3_table {
    float value[256] = {};
    constexpr e5m3_table() {
        float ulp = GGML_EXT_E5M3_FACTOR/(1 << 17); // ulp of the smallest: a half's 2^-17
        for (int e = 0; e < 32; ulp *= e++ ? 2 : 1) {
            for (int m = 0; m < 8; ++m) { value[8*e + m] = (float) (e ? 8 + m : m)*ulp; }
        }
        value[248] = std::numeric_limits<float>::infinity();
        for (int d = 249; d < 256; ++d) { value[d] = std::numeric_limits<float>::quiet_NaN(); }
    }
};
static inline float e5m3_to_float(uint8_t d) {
    static constexpr e5m3_table table;
    return table.value[d];
}

// vec_dot processes 256 weights at a time, one block, four or eight.
template <typename B> constexpr int group_blocks = QK_K/traits<B>::block_size;
template <typename B> constexpr bool has_scales  = traits<B>::n_groups > 1;
template <typename B> using activation_block = std::conditional_t<group_blocks<B> == 1, block_q8_K,
                                               std::conditional_t<group_blocks<B> == GGML_EXT_GROUP_BLOCKS, block_q8_kr64, block_q8_kr32>>;

// Scales of 256 weights.
template <typename B> constexpr int n_scales = has_scales<B> ? traits<B>::n_groups : group_blocks<B>;

// Sums have four scales at most. Eight bytes of a group belong to two blocks of 32, so a column of these is two columns: one with the
// activations of the even blocks and zeros, and one with those of the odd blocks.
template <typename B> constexpr int column_parts = group_blocks<B> > GGML_EXT_GROUP_BLOCKS ? 2 : 1;

// Call f(G, codes) with the u8x64 codes of groups G and G + 4.
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

// Unpack the blocks at x, of which n exist; missing ones are zero.
template <typename B> static inline unpacker<B> load_blocks(const B * x, int64_t n) {
    if constexpr (group_blocks<B> == 1) {
        return unpacker<B>(x);
    } else {
        static constexpr B zero_block = {};
        const B * p[group_blocks<B>];
        for (int b = 0; b < group_blocks<B>; ++b) { p[b] = b < n ? x + b : &zero_block; }
        return n < group_blocks<B> ? unpacker<B>(p) : unpacker<B>(x);
    }
}

// Scale s of 256 weights.
template <typename B> static inline float scale_of(const unpacker<B> & u, int s) {
    if constexpr (has_scales<B>) {
        return u.d*(float) u.scale(s);
    } else if constexpr (group_blocks<B> > 1) {
        float d[GGML_EXT_GROUP_BLOCKS];
        if constexpr (column_parts<B> > 1) {
            store4(d, u.d[s%2]);
            s /= 2;
        } else {
            store4(d, u.d);
        }
        return d[s];
    } else {
        return u.d;
    }
}

// Hardware prefetchers stop at page boundaries, so decode is 20 % faster with explicit prefetches; distances of 2000 to 6400 bytes are
// equally good.
constexpr int PREFETCH_BYTES = 4000;

static inline void prefetch(const char * x, size_t n) {
    for (size_t i = 0; i + 8 < n; i += 64) { // a few bytes beyond a line need no prefetch
        __builtin_prefetch(x + i);
    }
}

// A column's activations for 256 weights in the layout of the kernels: aligned (unaligned loads of 32 bytes take a Zen 3 core twice as
// long), groups g and g + 4 adjacent for each_groups(), and sums computed once for all rows.
struct alignas(64) column_block {
    int8_t    qs[QK_K];
    f32_lanes sums; // of qs, in the lanes of an i32_sum
    float     d;
};

// Write 256 activations in the order of a column_block.
template <typename B> static inline void order_column(const block_q8_K & y, int8_t * qs) {
    constexpr bool ordered = traits<B>::rotated || has_scales<B>;
    for (int g = 0; g < 8; ++g) {
        store((uint8_t *) qs + (ordered ? 32*g : ggml_ext_group_offset(g)), load((const uint8_t *) y.qs + 32*g));
    }
}

// Write the column_parts of a column.
template <typename B> static inline void load_column(const block_q8_K & y, column_block * out) {
    order_column<B>(y, out->qs);
    out->sums = lane_sums(y.bsums);
    out->d    = y.d;
}
template <typename B> static inline void load_column(const block_q8_kr64 & y, column_block * out) {
    memcpy(out->qs, y.qs, sizeof(y.qs));
    out->sums = spread(load4(y.sum))*((float) GGML_EXT_GROUP_BLOCKS/N_LANES);
    out->d    = y.d[0];
}
template <typename B> static inline void load_column(const block_q8_kr32 & y, column_block * out) {
    for (int part = 0; part < 2; ++part) {
        float sum[GGML_EXT_GROUP_BLOCKS];
        for (int i = 0; i < QK_K; i += 8) {
            memcpy(out[part].qs + i + 4*part, y.qs + i + 4*part, 4);
            memset(out[1 - part].qs + i + 4*part, 0, 4);
        }
        for (int b = 0; b < GGML_EXT_GROUP_BLOCKS; ++b) { sum[b] = y.sum[2*b + part]; }
        out[part].sums = spread(load4(sum))*((float) GGML_EXT_GROUP_BLOCKS/N_LANES);
        out[part].d    = y.d[0];
    }
}

// Integer sums of products of the codes with C columns. The codes are unpacked once.
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

// -offset * scale, in lanes as above.
template <typename B> static inline f32_lanes offset_scales(const unpacker<B> & u) {
    if constexpr (has_scales<B>) {
        return spread(u.scales)*-u.offset;
    } else {
        return spread(-u.offset);
    }
}

// Scales of a part of the columns.
template <typename B> static inline f32_lanes part_scales(const unpacker<B> & u, int part) {
    if constexpr (column_parts<B> > 1) {
        return spread(u.d[part]);
    } else {
        (void) part;
        return spread(u.d);
    }
}

// Add the products of the codes with C columns: exact in integers, then float.
template <typename B, int C>
static inline void add_products(f32_sum (&acc)[C], const unpacker<B> & u, const column_block * columns) {
    constexpr int   PARTS = column_parts<B>;
    const auto      dots = dot_codes<B, C*PARTS>(u, columns);
    const f32_lanes offset = offset_scales(u);
    for (int part = 0; part < PARTS; ++part) {
        const f32_lanes d = part_scales(u, part);
        for (int c = 0, i = part; c < C; ++c, i += PARTS) { acc[c].add(d*columns[i].d, dots[i].total(), offset, columns[i].sums); }
    }
}

// Add the last blocks of 32 of each row, fewer than eight; the columns have them at y[c][k].
template <typename B, int C>
static inline void add_tails(float * const * s, int i0, const char * x, size_t stride, int n_rows, const block_q8_kr32 * const * y, int k,
                             int n_blocks) {
    column_block columns[2*C];
    for (int c = 0; c < C; ++c) { load_column<B>(y[c][k], columns + 2*c); }
    for (int i = 0; i < n_rows; ++i) {
        f32_sum acc[C];
        add_products(acc, load_blocks((const B *) (x + i*stride), n_blocks), columns);
        for (int c = 0; c < C; ++c) { s[c][i0 + i] += acc[c].total(); }
    }
}

// Add the R < 4 blocks of 64 after the last full four of each row; the columns have them at y[c][k]. The four block slots hold the
// tails of one, two or four rows.
template <int R, typename B, int C>
static inline void add_tails(float * const * s, int i0, const char * x, size_t stride, int n_rows, const block_q8_kr64 * const * y, int k) {
    static constexpr B zero_block = {};
    constexpr int rows_per_pass = 4/R, n_slots = rows_per_pass*R;
    column_block columns[C];
    for (int c = 0; c < C; ++c) {
        block_q8_kr64 slots = y[c][k]; // the activations of each slot
        for (int b = R; b < n_slots; ++b) {
            slots.sum[b] = slots.sum[b%R];
            for (int g = 0; g < 8; ++g) {
                memcpy(slots.qs + 32*g + 8*b, slots.qs + 32*g + 8*(b%R), 8);
            }
        }
        load_column<B>(slots, columns + c);
    }
    for (int i = 0; i < n_rows; i += rows_per_pass) {
        const B * p[GGML_EXT_GROUP_BLOCKS];
        for (int b = 0; b < GGML_EXT_GROUP_BLOCKS; ++b) {
            p[b] = b < n_slots && i + b/R < n_rows ? (const B *) (x + (i + b/R)*stride) + b%R : &zero_block;
        }
        f32_sum acc[C];
        add_products(acc, unpacker<B>(p), columns);
        for (int c = 0; c < C; ++c) {
            float products[GGML_EXT_GROUP_BLOCKS];
            store4(products, acc[c].quarters());
            for (int b = 0; b < n_slots && i + b/R < n_rows; ++b) {
                s[c][i0 + i + b/R] += products[b];
            }
        }
    }
}

// Blocks of 256, and rows, per pass: the columns' parts stay in an L1 cache of 32 KB.
constexpr int COLUMN_BLOCKS = 64, MAX_ROWS = 64;

// Multiply n_rows rows of n weights, `stride` bytes apart, with C columns of n quantized activations; s[c][i0 + i] is the product of row i
// and column c. A block is unpacked once. s[c] does not depend on the other columns or on C.
template <typename B, int C>
static inline void dot_columns(int n, float * const * s, int i0, const void * x, size_t stride, int n_rows,
                               const activation_block<B> * const * y) {
    constexpr int BLOCKS = group_blocks<B>, PARTS = column_parts<B>, N = COLUMN_BLOCKS/(C*PARTS);
    const int     n_full = n/QK_K;
    f32_sum       sums[MAX_ROWS][C];
    for (int k0 = 0; k0 < n_full; k0 += N) {
        const int n_blocks = n_full - k0 < N ? n_full - k0 : N;
        column_block columns[N*C*PARTS];
        for (int k = 0; k < n_blocks; ++k) {
            for (int c = 0; c < C; ++c) {
                load_column<B>(y[c][k0 + k], columns + (k*C + c)*PARTS);
            }
        }
        for (int i = 0; i < n_rows; ++i) {
            const B * row = (const B *) ((const char *) x + i*stride) + k0*BLOCKS;
            f32_sum acc[C];
            if (k0) { for (int c = 0; c < C; ++c) { acc[c] = sums[i][c]; } }
            for (const column_block * column = columns; column < columns + n_blocks*C*PARTS; column += C*PARTS, row += BLOCKS) {
                prefetch((const char *) row + PREFETCH_BYTES, BLOCKS*sizeof(B));
                add_products(acc, unpacker<B>(row), column);
            }
            for (int c = 0; c < C; ++c) { sums[i][c] = acc[c]; }
        }
    }
    for (int c = 0; c < C; ++c) {
        for (int i = 0; i < n_rows; ++i) { s[c][i0 + i] = sums[i][c].total(); }
    }
    if constexpr (BLOCKS > 1) {
        const char * tails = (const char *) x + n_full*BLOCKS*sizeof(B);
        const int    n_tail = n/traits<B>::block_size%BLOCKS;
        if constexpr (PARTS > 1) {
            if (n_tail) { add_tails<B, C>(s, i0, tails, stride, n_rows, y, n_full, n_tail); }
        } else {
            switch (n_tail) {
                case 1: add_tails<1, B, C>(s, i0, tails, stride, n_rows, y, n_full); break;
                case 2: add_tails<2, B, C>(s, i0, tails, stride, n_rows, y, n_full); break;
                case 3: add_tails<3, B, C>(s, i0, tails, stride, n_rows, y, n_full); break;
            }
        }
    }
}

// Columns per pass: the accumulators of more do not fit 16 registers.
constexpr int MAX_COLUMNS = 8;

// The same for any number of columns, in as few passes as possible.
template <typename B>
static inline void dot_columns(int n, float * const * s, const void * x, size_t stride, int n_rows, const void * const * y, int n_cols) {
    for (int n_passes = (n_cols + MAX_COLUMNS - 1)/MAX_COLUMNS; n_passes > 0; --n_passes) {
        const int n_batch = (n_cols + n_passes - 1)/n_passes;
        const activation_block<B> * columns[MAX_COLUMNS];
        std::copy_n((const activation_block<B> * const *) y, n_batch, columns);
        for (int i = 0; i < n_rows; i += MAX_ROWS) {
            const char * rows = (const char *) x + i*stride;
            const int    n_batch_rows = n_rows - i < MAX_ROWS ? n_rows - i : MAX_ROWS;
            switch (n_batch) {
                case 1: dot_columns<B, 1>(n, s, i, rows, stride, n_batch_rows, columns); break;
                case 2: dot_columns<B, 2>(n, s, i, rows, stride, n_batch_rows, columns); break;
                case 3: dot_columns<B, 3>(n, s, i, rows, stride, n_batch_rows, columns); break;
                case 4: dot_columns<B, 4>(n, s, i, rows, stride, n_batch_rows, columns); break;
                case 5: dot_columns<B, 5>(n, s, i, rows, stride, n_batch_rows, columns); break;
                case 6: dot_columns<B, 6>(n, s, i, rows, stride, n_batch_rows, columns); break;
                case 7: dot_columns<B, 7>(n, s, i, rows, stride, n_batch_rows, columns); break;
                case 8: dot_columns<B, 8>(n, s, i, rows, stride, n_batch_rows, columns); break;
            }
        }
        s += n_batch, y += n_batch, n_cols -= n_batch;
    }
}

// Store the codes of all groups, group g at q + offset(g).
template <typename B, typename F> static inline void store_groups(const unpacker<B> & u, uint8_t * q, F offset) {
    each_groups(u, [&](int g, u8x64 codes) {
        store(q + offset(g), low_half(codes));
        store(q + offset(g + 4), high_half(codes));
    });
}
static inline int weight_offset(int g) { return 32*g; }

// Reorder blocks of 8*L from groups, L bytes of each block per group, to the order of the weights.
template <int L> static inline void order_blocks(const void * groups, void * q) {
    for (int g = 0; g < 8; ++g) {
        for (int b = 0; b < 32/L; ++b) {
            memcpy((char *) q + 8*L*b + L*g, (const char *) groups + ggml_ext_group_offset(g) + L*b, L);
        }
    }
}

// Unpack the 256 codes of the blocks to the order of the weights.
template <typename B> static inline void unpack_blocks(const unpacker<B> & u, uint8_t * q) {
    if constexpr (group_blocks<B> == 1) {
        store_groups(u, q, weight_offset);
    } else {
        alignas(64) uint8_t groups[QK_K];
        store_groups(u, groups, ggml_ext_group_offset);
        order_blocks<traits<B>::block_size/8>(groups, q);
    }
}

} // namespace ggml_ext
