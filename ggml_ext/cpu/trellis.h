// The trellis code of types/trellis.h over the SIMD primitives: of one block of 256, or of up to four blocks of 64 at a time.
#pragma once

#include "unpack.h"

#include <cstddef>

namespace ggml_ext {

// What the indices are made of; lane: a byte of a group.
template <int K> struct trellis_lanes {
    u8x64 ql;             // low bits of the groups 0 to 3 and 4 to 7
    u8x64 before;         // those of the four groups before: 4 to 7 of the lane before, and 0 to 3
    u8x64 before2;        // those before them: 0 to 3 and 4 to 7 of the lane before. For K = 2 alone
    u8x64 high;           // high bits: four groups before, and four. For K = 3 alone
};

// Nibbles of two groups each.
template <> struct trellis_lanes<4> {
    u8x64 ql[2];          // groups 0, 1 and 4, 5; groups 2, 3 and 6, 7
    u8x64 before;         // the two groups before: 6, 7 of the lane before, and 2, 3
};

// Of the blocks p[0] to p[3] of 64 weights.
template <int K, typename B> static inline trellis_lanes<K> load_trellis_at(const B * const (&p)[GGML_EXT_GROUP_BLOCKS]) {
    const auto bytes = [&](size_t at) {
        const auto byte = [&](int b) { return (const uint8_t *) p[b] + at; };
        return load8x4(byte(0), byte(1), byte(2), byte(3));
    };
    const auto  plane = [&](int i) { return bytes(offsetof(B, ql) + 8*i); };
    const u8x32 start = first_of_8(bytes(offsetof(B, start)));
    trellis_lanes<K> t;
    if constexpr (K == 4) {
        const u8x32 ql1 = plane(1), ql3 = plane(3);
        t.ql[0]  = join(plane(0), plane(2));
        t.ql[1]  = join(ql1, ql3);
        t.before = join(shift_lanes8(ql3, start), ql1);
    } else {
        const u8x32 ql0 = plane(0), ql1 = plane(1);
        t.ql     = join(ql0, ql1);
        t.before = join(shift_lanes8(ql1, start), ql0);
        if constexpr (K == 2) {
            t.before2 = join(shift_lanes8(ql0, u8x32()), low_half(t.before));
        } else {
            const u8x32 h = bytes(offsetof(B, qh));
            t.high = join(funnel<4>(shift_lanes8(h, field<-6>(start, 0xc0)), h), h);
        }
    }
    return t;
}

// The same of one block of 256 weights.
template <int K, typename B> static inline trellis_lanes<K> load_trellis_of(const B * x) {
    trellis_lanes<K> t;
    if constexpr (K == 4) {
        const u8x32 ql1 = load(x->ql + 32), ql3 = load(x->ql + 96);
        t.ql[0]  = join(load(x->ql), load(x->ql + 64));
        t.ql[1]  = join(ql1, ql3);
        t.before = join(shift_lanes(ql3, x->start), ql1);
    } else {
        t.ql     = load64(x->ql);
        t.before = join(shift_lanes(load(x->ql + 32), x->start), load(x->ql));
        if constexpr (K == 2) {
            t.before2 = join(shift_lanes(load(x->ql), 0), low_half(t.before));
        } else {
            const u8x32 h = load(x->qh);
            t.high = join(funnel<4>(shift_lanes(h, (uint8_t) (x->start << 6)), h), h);
        }
    }
    return t;
}

#if defined(GGML_EXT_AVX512)
// Where the bytes of a word lie in a block of 256 or in four of 64: among the 64 bytes at their beginning or, what is behind
// those, among the 64 at their end.
template <typename B> struct picked_bytes {
    alignas(64) uint8_t at[64] = {};

    // offset(i, half): where in a block byte i of its L in a half is
    template <typename F> constexpr explicit picked_bytes(F offset) {
        constexpr int L = traits<B>::block_size/8;
        for (int j = 0; j < 64; ++j) {
            const int byte = (int) sizeof(B)*(j%32/L) + offset(j%L, j/32);
            at[j] = (uint8_t) (byte < 64 ? byte : byte - group_blocks<B>*(int) sizeof(B) + 128);
        }
    }
    __m512i pick(__m512i begin, __m512i end) const { return _mm512_permutex2var_epi8(begin, keep(_mm512_load_si512(at)), end); }
};

// The block at x, or the four at x, where their bits of K = 2 or 3 lie in the first and the last 64 bytes.
template <int K, typename B> static inline trellis_lanes<K> pick_trellis(const B * x) {
    constexpr int L = traits<B>::block_size/8, START = offsetof(B, start), QL = offsetof(B, ql);
    static constexpr picked_bytes<B> ql    ([](int i, int half) { return QL + L*half + i; });
    static constexpr picked_bytes<B> before([](int i, int half) { return half ? QL + i : i ? QL + L - 1 + i : START; });
    const __m512i begin = _mm512_loadu_si512(x), end = _mm512_loadu_si512((const char *) (x + group_blocks<B>) - 64);
    const __m256i lane0 = L == 8 ? _mm256_set1_epi64x(0xff) : _mm256_zextsi128_si256(_mm_cvtsi32_si128(0xff));
    const __m512i first = keep(_mm512_zextsi256_si512(lane0)); // of the low half's blocks
    trellis_lanes<K> t;
    t.ql     = {L == 32 ? _mm512_loadu_si512(x->ql) : ql.pick(begin, end)};
    t.before = {before.pick(begin, end)};
    if constexpr (K == 2) {
        static constexpr picked_bytes<B> before2([](int i, int half) { return i ? QL + L*half - 1 + i : START; });
        t.before2 = {_mm512_andnot_si512(first, before2.pick(begin, end))};
    } else {
        constexpr int QH = offsetof(B, qh);
        static constexpr picked_bytes<B> high       ([](int i, int) { return QH + i; });
        static constexpr picked_bytes<B> high_before([](int i, int half) { return half ? QH + i : i ? QH - 1 + i : START; });
        // as funnel<4> in the low half; in its lane 0 the start's two bits take the place of the lane before
        const __m512i nibble  = keep(_mm512_inserti64x4(_mm512_set1_epi8(-1), _mm256_set1_epi8(15), 0));
        const __m512i by      = keep(_mm512_zextsi256_si512(_mm256_set1_epi16(4)));
        const __m512i shifted = _mm512_srlv_epi16(high_before.pick(begin, end), by);
        const __m512i funnels = select_bits(nibble, shifted, _mm512_slli_epi16(high.pick(begin, end), 4));
        t.high = {select_bits(_mm512_and_si512(first, nibble), _mm512_slli_epi16(t.before.v, 2), funnels)};
    }
    return t;
}
#endif

// The block at x, or the four at x.
template <int K, typename B> static inline trellis_lanes<K> load_trellis(const B * x) {
#if defined(GGML_EXT_AVX512)
    if constexpr (K < 4) {
        return pick_trellis<K>(x);
    } else
#endif
    if constexpr (traits<B>::block_size == 64) {
        const B * const p[GGML_EXT_GROUP_BLOCKS] = {x, x + 1, x + 2, x + 3};
        return load_trellis_at<K>(p);
    } else {
        return load_trellis_of<K>(x);
    }
}

// pair(t) of the groups G and G + 4 in the low nibbles. A negative G is G + 8 of the lane before.
template <int G, int K> static inline u8x64 pairs(const trellis_lanes<K> & t) {
    static_assert(-2 <= G && G < 4, "");
    if constexpr      (G <  0) { return shifted<2*(G + 3)>(t.before); }
    else if constexpr (G == 0) { return funnel<2>(t.before, t.ql); }
    else                       { return shifted<2*(G - 1)>(t.ql); }
}

// pair(t) ^ pair(t - 4): a symbol four steps earlier has the place of this one in the four groups before.
template <int G> static inline u8x64 pairs_with_fourth(const trellis_lanes<2> & t) {
    const u8x64 both = t.ql ^ t.before;
    if constexpr (G == 0) { return funnel<2>(t.before ^ t.before2, both); }
    else                  { return shifted<2*(G - 1)>(both); }
}

// Codes of the groups G and G + 4.
template <int G> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes<2> & t) {
    return trellis_values(tables, pairs_with_fourth<G>(t), pairs<G - 2>(t));
}
template <int G> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes<3> & t) {
    // even and odd G share the exclusive or in brackets
    const u8x64 i0 = G%2 ? pairs<G>(t) ^ (pairs<G - 1>(t) ^ pairs<G - 2>(t)) : (pairs<G>(t) ^ pairs<G - 1>(t)) ^ pairs<G - 2>(t);
    return trellis_values(tables, i0, pairs<G>(t) ^ shifted<G + 1>(t.high));
}
template <int G> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes<4> & t) {
    const u8x64 here = t.ql[G/2], last = G < 2 ? t.before : t.ql[0];
    return trellis_values(tables, shifted<4*(G%2)>(here ^ last), G%2 ? here : shifted<4>(last));
}

// The unpackers: of a block of 256, and of four blocks of 64, one after the other or anywhere.
#define GGML_EXT_TRELLIS_UNPACKER(NAME, name, K)                                                                     \
    template <> struct unpacker<block_##name> {                                                                      \
        trellis_lanes<K> lanes;                                                                                         \
        float         d;                                                                                             \
        static constexpr float offset = GGML_EXT_##NAME##_TRELLIS_OFFSET;                                            \
        explicit unpacker(const block_##name * x) : lanes(load_trellis<K>(x)), d(e5m3_to_float(x->d)) {}             \
        template <int G> u8x64 groups() const { return trellis_groups<G>(ggml_ext_##name##_tables, lanes); }      \
    };

#define GGML_EXT_TRELLIS_UNPACKER64(NAME, name, K)                                                                   \
    template <> struct unpacker<block_##name> {                                                                      \
        trellis_lanes<K> lanes;                                                                                         \
        f32x4         d;                                                                                             \
        static constexpr float offset = GGML_EXT_##NAME##_TRELLIS_OFFSET;                                            \
        explicit unpacker(const block_##name * x)                                                                    \
            : lanes(load_trellis<K>(x)), d(e5m3_to_float(x[0].d, x[1].d, x[2].d, x[3].d)) {}                         \
        explicit unpacker(const block_##name * const (&p)[GGML_EXT_GROUP_BLOCKS])                                    \
            : lanes(load_trellis_at<K>(p)), d(e5m3_to_float(p[0]->d, p[1]->d, p[2]->d, p[3]->d)) {}                     \
        template <int G> u8x64 groups() const { return trellis_groups<G>(ggml_ext_##name##_tables, lanes); }      \
    };

} // namespace ggml_ext
