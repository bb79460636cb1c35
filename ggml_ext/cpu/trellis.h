// SIMD unpack of the trellis types (types/trellis.h): one block of 256, or up to four blocks of 64 or eight of 32 at a time.
#pragma once

#include "unpack.h"

#include <cstddef>

namespace ggml_ext {

// The words that indices are computed from. A lane is a byte of a group.
template <int K, int V> struct trellis_lanes {
    u8x64 ql;             // low bits of groups 0-3 and of groups 4-7
    u8x64 before;         // low bits four groups earlier: groups 4-7 of the previous lane, groups 0-3
    u8x64 before2;        // low bits eight groups earlier: groups 0-3 and 4-7 of the previous lane. K = 2 only
    u8x64 high;           // high bits of four groups and of the four groups before them. K = 3 only
};

// Each word has the nibbles of two groups.
template <> struct trellis_lanes<4, 1> {
    u8x64 ql[2];          // groups 0, 1 and 4, 5; groups 2, 3 and 6, 7
    u8x64 before;         // two groups earlier: groups 6, 7 of the previous lane, groups 2, 3
};

// A lane has four steps of two weights. The halves are for steps 0 and 1 and for steps 2 and 3.
template <int K> struct trellis_lanes<K, 2> {
    u8x64 ql;             // low bits of steps -2 ... 1 and 0 ... 3
    u8x64 before;         // of the two steps before and two of these
    u8x64 before2;        // of the next two and two of `before`. K = 2 only
    u8x64 high;           // high bits from step -4 on and from step -2 on. K = 3 only

    // low: of each lane; before, before2: of the lanes one and two before it
    trellis_lanes(u8x32 low, u8x32 low_before, u8x32 low_before2) {
        const u8x32 middle = funnel<4>(low_before, low);
        ql      = join(middle, low);
        before  = join(low_before, middle);
        before2 = join(funnel<4>(low_before2, low_before), low_before);
    }
    void set_high(u8x32 h) { high = join(h, field<2>(h, 63)); }
};

// Loads the blocks p[0] to p[3] of 64 weights.
template <int K, typename B> static inline trellis_lanes<K, 2> load_trellis_pairs_at(const B * const (&p)[GGML_EXT_GROUP_BLOCKS]) {
    const u8x32 low = load8x4(p[0]->symbols, p[1]->symbols, p[2]->symbols, p[3]->symbols);
    const u8x32 low_before = load8x4(&p[0]->start, &p[1]->start, &p[2]->start, &p[3]->start); // the symbols follow it
    trellis_lanes<K, 2> t(low, low_before, shift_lanes<8>(low_before, u8x32()));
    if constexpr (K == 3) {
        uint32_t high[4], before[4];
        for (int b = 0; b < 4; ++b) {
            memcpy(&high[b], p[b]->symbols + 8, sizeof(high[b]));
            before[b] = high[b] << 8 | (p[b]->start & 3u) << 6;
        }
        t.set_high(spread_nibbles(words4(before), words4(high)));
    }
    return t;
}

// Loads the block of 256 at x.
template <int K, typename B> static inline trellis_lanes<K, 2> load_trellis_pairs(const B * x) {
    static_assert(offsetof(B, symbols) == offsetof(B, start) + 1 && offsetof(B, start) == 1, "");
    trellis_lanes<K, 2> t(load(x->symbols), load(&x->start), load_behind(0, &x->start));
    if constexpr (K == 3) {
        const uint8_t * high = x->symbols + QK_K/8;
        t.set_high(spread_nibbles(load16_behind((uint8_t) (x->start << 6), high), load16(high)));
    }
    return t;
}

// Loads four blocks of 64 weights or eight blocks of 32.
template <int K, typename B, size_t N> static inline trellis_lanes<K, 1> load_trellis_at(const B * const (&p)[N]) {
    constexpr int L = traits<B>::block_size/8; // bytes of a plane
    static_assert(L*N == 32, "a vector has a plane of all blocks");
    const auto bytes = [&](size_t offset) {
        const auto address = [&](int b) { return (const uint8_t *) p[b] + offset; };
        if constexpr (L == 8) {
            return load8x4(address(0), address(1), address(2), address(3));
        } else {
            uint32_t w[8];
            for (int b = 0; b < 8; ++b) { memcpy(&w[b], address(b), L); }
            return words8(w);
        }
    };
    const auto  plane = [&](int i) { return bytes(offsetof(B, symbols) + L*i); };
    const u8x32 start = first_of<L>(bytes(offsetof(B, start)));
    trellis_lanes<K, 1> t;
    if constexpr (K == 4) {
        const u8x32 ql1 = plane(1), ql3 = plane(3);
        t.ql[0]  = join(plane(0), plane(2));
        t.ql[1]  = join(ql1, ql3);
        t.before = join(shift_lanes<L>(ql3, start), ql1);
    } else {
        const u8x32 ql0 = plane(0), ql1 = plane(1);
        t.ql     = join(ql0, ql1);
        t.before = join(shift_lanes<L>(ql1, start), ql0);
        if constexpr (K == 2) {
            t.before2 = join(shift_lanes<L>(ql0, u8x32()), low_half(t.before));
        } else {
            const u8x32 h = plane(2);
            t.high = join(funnel<4>(shift_lanes<L>(h, field<-6>(start, 0xc0)), h), h);
        }
    }
    return t;
}

#if defined(GGML_EXT_AVX512)
// Index of a byte permute.
struct byte_index {
    alignas(64) uint8_t source[64] = {};
    template <typename F> constexpr explicit byte_index(F source_of) {
        for (int j = 0; j < 64; ++j) { source[j] = (uint8_t) source_of(j); }
    }
    __m512i load() const { return keep(_mm512_load_si512(source)); }
};

// Selects bytes offset(i, half), i = 0 ... L - 1, of each of 32/L blocks of 8*L weights from the first and the last 64 bytes of these blocks.
template <typename B, typename F> constexpr byte_index blocks_index(F offset) {
    constexpr int L = traits<B>::block_size/8;
    return byte_index([&](int j) {
        const int byte = (int) sizeof(B)*(j%32/L) + offset(j%L, j/32);
        return byte < 64 ? byte : byte - 32/L*(int) sizeof(B) + 128;
    });
}

// Loads the four blocks of 64 or eight of 32 at x. For K = 2 and 3, their first and last 64 bytes contain all bits.
template <int K, typename B> static inline trellis_lanes<K, 1> load_blocks_at(const B * x) {
    constexpr int L = traits<B>::block_size/8, START = offsetof(B, start), QL = offsetof(B, symbols);
    static constexpr byte_index ql    (blocks_index<B>([](int i, int half) { return QL + L*half + i; }));
    static constexpr byte_index before(blocks_index<B>([](int i, int half) { return half ? QL + i : i ? QL + L - 1 + i : START; }));
    const __m512i begin = keep(_mm512_loadu_si512(x)), end = keep(_mm512_loadu_si512((const char *) (x + 32/L) - 64));
    const __m256i first  = L == 8 ? _mm256_set1_epi64x(0xff) : _mm256_set1_epi32(0xff);
    const __m512i place0 = keep(_mm512_zextsi256_si512(first)); // byte 0 of each block in the low half
    const auto    pick   = [&](const byte_index & index) { return _mm512_permutex2var_epi8(begin, index.load(), end); };
    trellis_lanes<K, 1> t;
    t.ql     = {pick(ql)};
    t.before = {pick(before)};
    if constexpr (K == 2) {
        static constexpr byte_index before2(blocks_index<B>([](int i, int half) { return i ? QL + L*half - 1 + i : START; }));
        t.before2 = {_mm512_andnot_si512(place0, pick(before2))};
    } else {
        constexpr int QH = QL + 2*L;
        static constexpr byte_index high       (blocks_index<B>([](int i, int) { return QH + i; }));
        static constexpr byte_index high_before(blocks_index<B>([](int i, int half) { return half ? QH + i : i ? QH - 1 + i : START; }));
        // funnel<4> in the low half, where byte 0 of each block takes the two bits of `start` instead of the byte before
        const __m512i nibble  = keep(_mm512_inserti64x4(_mm512_set1_epi8(-1), _mm256_set1_epi8(15), 0));
        const __m512i by      = keep(_mm512_zextsi256_si512(_mm256_set1_epi16(4)));
        const __m512i shifted = _mm512_srlv_epi16(pick(high_before), by);
        const __m512i funnels = select_bits(nibble, shifted, _mm512_slli_epi16(pick(high), 4));
        t.high = {select_bits(_mm512_and_si512(place0, nibble), _mm512_slli_epi16(t.before.v, 2), funnels)};
    }
    return t;
}

// Loads the low bits of the block of 256 at x. `before` and `before2` are permutations of `start` and the 64 bytes after it.
template <int K, typename B> static inline void load_low_bits(const B * x, trellis_lanes<K, 1> & t) {
    static_assert(offsetof(B, symbols) == offsetof(B, start) + 1, "");
    static constexpr byte_index before([](int j) { return j == 0 ? 0 : j < 32 ? 32 + j : j - 31; });
    const __m512i bytes = keep(_mm512_loadu_si512(&x->start));
    t.ql     = load64(x->symbols);
    t.before = {_mm512_permutexvar_epi8(before.load(), bytes)};
    if constexpr (K == 2) {
        static constexpr byte_index before2([](int j) { return j == 32 ? 0 : j; });
        t.before2 = {_mm512_maskz_permutexvar_epi8(~1ull, before2.load(), bytes)};
    }
}
#else
template <int K, typename B> static inline void load_low_bits(const B * x, trellis_lanes<K, 1> & t) {
    t.ql     = load64(x->symbols);
    t.before = join(load_behind(x->start, x->symbols + 32), load(x->symbols));
    if constexpr (K == 2) {
        t.before2 = join(load_behind(0, x->symbols), low_half(t.before));
    }
}
#endif

template <int K, typename B, size_t... I> static inline trellis_lanes<K, 1> load_each(const B * x, std::index_sequence<I...>) {
    const B * const p[] = {x + I...};
    return load_trellis_at<K>(p);
}

// Loads the block of 256 at x, or the blocks of 64 or 32.
template <int K, typename B> static inline trellis_lanes<K, 1> load_trellis(const B * x) {
    if constexpr (traits<B>::block_size < QK_K) {
#if defined(GGML_EXT_AVX512)
        if constexpr (K < 4) {
            return load_blocks_at<K>(x);
        }
#endif
        return load_each<K>(x, std::make_index_sequence<group_blocks<B>>());
    } else {
        trellis_lanes<K, 1> t;
        if constexpr (K == 4) {
            const u8x32 ql1 = load(x->symbols + 32);
            t.ql[0]  = join(load(x->symbols), load(x->symbols + 64));
            t.ql[1]  = join(ql1, load(x->symbols + 96));
            t.before = join(load_behind(x->start, x->symbols + 96), ql1);
        } else {
            load_low_bits(x, t);
        }
        if constexpr (K == 3) {
            const uint8_t * high = x->symbols + QK_K/4;
            const u8x32     h = load(high);
            t.high = join(funnel<4>(load_behind((uint8_t) (x->start << 6), high), h), h);
        }
        return t;
    }
}

// Returns pair(t) of the groups G and G + 4 in the low nibbles. A negative G is group G + 8 of the previous lane.
template <int G, int K> static inline u8x64 pairs(const trellis_lanes<K, 1> & t) {
    static_assert(-2 <= G && G < 4, "");
    if constexpr      (G <  0) { return shifted<2*(G + 3)>(t.before); }
    else if constexpr (G == 0) { return funnel<2>(t.before, t.ql); }
    else                       { return shifted<2*(G - 1)>(t.ql); }
}

// Returns pair(t) ^ pair(t - 4). Four steps earlier is the same lane four groups earlier.
template <int G> static inline u8x64 pairs_with_fourth(const trellis_lanes<2, 1> & t) {
    const u8x64 both = t.ql ^ t.before;
    if constexpr (G == 0) { return funnel<2>(t.before ^ t.before2, both); }
    else                  { return shifted<2*(G - 1)>(both); }
}

// Return the codes of the groups G and G + 4.
template <int G> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes<2, 1> & t) {
    return trellis_values(tables, pairs_with_fourth<G>(t), pairs<G - 2>(t));
}
template <int G> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes<3, 1> & t) {
    // the order of operands lets even and odd G share an operation where xor3 takes two
    const u8x64 i0 = G%2 ? xor3(pairs<G>(t), pairs<G - 1>(t), pairs<G - 2>(t)) : xor3(pairs<G - 2>(t), pairs<G>(t), pairs<G - 1>(t));
    return trellis_values(tables, i0, pairs<G>(t) ^ shifted<G + 1>(t.high));
}
template <int G> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes<4, 1> & t) {
    const u8x64 current = t.ql[G/2], previous = G < 2 ? t.before : t.ql[0];
    return trellis_values(tables, shifted<4*(G%2)>(current ^ previous), G%2 ? current : shifted<4>(previous));
}

// Returns the pair whose newer symbol is step X, counted from the first one of the lane and of its second half.
template <int X, int K> static inline u8x64 pairs_at(const trellis_lanes<K, 2> & t) {
    static_assert(-4 <= X && X < 2, "");
    if constexpr      (X >= -1) { return shifted<2*(X + 1)>(t.ql); }
    else if constexpr (X >= -3) { return shifted<2*(X + 3)>(t.before); }
    else                        { return shifted<2*(X + 5)>(t.before2); }
}
template <int G, int K> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes<K, 2> & t) {
    constexpr int X = G/2; // step; G%2 is the weight
    const u8x64 sum = pairs_at<X>(t) ^ pairs_at<X - 2>(t);
    const u8x64 i0 = G%2 ? sum : K == 3 ? sum ^ pairs_at<X - 1>(t) : pairs_at<X>(t) ^ pairs_at<X - (K == 2 ? 4 : 0)>(t);
    const u8x64 i1 = K == 3 ? pairs_at<X>(t) ^ shifted<X + 1>(t.high) : sum ^ pairs_at<X - (K == 2 ? 4 : 0)>(t);
    return trellis_values(tables, i0, i1, 2*(G%2));
}

// Loads the block of 256 at x or the four blocks of 64, or the four blocks at p.
template <int K, int V, typename P> static inline trellis_lanes<K, V> load_lanes(const P & p) {
    if constexpr (V == 1) {
        if constexpr (std::is_array_v<P>) { return load_trellis_at<K>(p); }
        else                              { return load_trellis<K>(p); }
    } else if constexpr (std::is_array_v<P>) {
        return load_trellis_pairs_at<K>(p);
    } else if constexpr (traits<std::remove_cv_t<std::remove_pointer_t<P>>>::block_size == 64) {
        const P blocks[GGML_EXT_GROUP_BLOCKS] = {p, p + 1, p + 2, p + 3};
        return load_trellis_pairs_at<K>(blocks);
    } else {
        return load_trellis_pairs<K>(p);
    }
}

// A loaded block of 256, or four loaded blocks of 64, contiguous or not.
template <typename B, int K, int V, int N> struct loaded_trellis {
    trellis_lanes<K, V> lanes;
    float               d;
    explicit loaded_trellis(const B * x) : lanes(load_lanes<K, V>(x)), d(e5m3_to_float(x->d)) {}
};
template <typename B, int K, int V> struct loaded_trellis<B, K, V, 64> {
    trellis_lanes<K, V> lanes;
    f32x4               d;
    explicit loaded_trellis(const B * x) : lanes(load_lanes<K, V>(x)), d(e5m3_to_float(x[0].d, x[1].d, x[2].d, x[3].d)) {}
    explicit loaded_trellis(const B * const (&p)[GGML_EXT_GROUP_BLOCKS])
        : lanes(load_lanes<K, V>(p)), d(e5m3_to_float(p[0]->d, p[1]->d, p[2]->d, p[3]->d)) {}
};

// Eight loaded blocks of 32.
template <typename B, int K, int V> struct loaded_trellis<B, K, V, 32> {
    trellis_lanes<K, V> lanes;
    f32x4               d[2];
    explicit loaded_trellis(const B * x)
        : lanes(load_lanes<K, V>(x)), d{e5m3_to_float(x[0].d, x[2].d, x[4].d, x[6].d), e5m3_to_float(x[1].d, x[3].d, x[5].d, x[7].d)} {}
    explicit loaded_trellis(const B * const (&p)[GGML_EXT_GROUP_BLOCKS_32])
        : lanes(load_lanes<K, V>(p)), d{e5m3_to_float(p[0]->d, p[2]->d, p[4]->d, p[6]->d), e5m3_to_float(p[1]->d, p[3]->d, p[5]->d, p[7]->d)} {}
};

#define GGML_EXT_X(NAME, name, K, V, N, CODE, OFFSET, ...)                                                                  \
    template <> struct unpacker<block_##name> : loaded_trellis<block_##name, K, V, N> {                                     \
        using loaded_trellis::loaded_trellis;                                                                               \
        static constexpr float offset = OFFSET;                                                                             \
        template <int G> u8x64 groups() const { return trellis_groups<G>(ggml_ext_##name##_tables, lanes); }                \
    };
GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)
#undef GGML_EXT_X

} // namespace ggml_ext
